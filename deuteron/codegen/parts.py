"""A reduction of few long rows in two programs: one of parts of each row, one of the parts'
results.

Threads split the work by rows. A sum over everything is a single row, which one thread would read
alone while the others wait. How a row is cut follows from its length, never from the number of
threads: the results are the same to the bit on any number of them.
"""

from dataclasses import replace

from deuteron.codegen import scalar
from deuteron.codegen.index import Affine, Var, flatten
from deuteron.codegen.scalar import Load, Reduce, ScalarProgram, Statement, Store
from deuteron.ir.dtype import DType, dtype

FEW_ROWS = 8  # with this many rows or more threads have enough to do
LONG = 1 << 14  # elements of a row that are worth a second program
PIECES = 32  # wanted number of parts, of all rows together
Parts = dict[str, tuple[str, DType]]  # by reduction, the tensor that holds its parts


def in_parts(program: ScalarProgram) -> tuple[ScalarProgram, ScalarProgram] | None:
    """Return two programs: one with the reductions of parts, which it stores in tensors ``part0``,
    ``part1``, …, and one that reads those. None if rows are many or short, or take several
    passes."""
    if not program.inner or program.rows >= FEW_ROWS or program.columns < LONG:
        return None
    if not _one_walk(program):
        return None
    axis = max(program.inner, key=lambda v: v.size)
    wanted = min(axis.size, PIECES // program.rows)
    count = next(n for n in range(wanted, 0, -1) if axis.size % n == 0)  # of equal parts
    if count == 1:
        return None
    part, rest = Var(f"{axis.name}p", count), Var(axis.name, axis.size // count)
    shape = (*(v.size for v in program.outer), count)
    place = flatten(tuple(map(Affine.var, (*program.outer, part))), shape)
    real, whole = dtype("f64" if program.wide else "f32"), dtype("i64")
    kinds = {s.name: whole if s.kind == "int" else real for s in program.reductions}
    parts = {name: (f"part{i}", kind) for i, (name, kind) in enumerate(kinds.items())}
    first = scalar.substitute(program, {axis: Affine.var(part) * rest.size + Affine.var(rest)})
    stores = [Store(tensor, place, name, kind) for name, (tensor, kind) in parts.items()]
    outer, inner = (*program.outer, part), tuple(rest if v == axis else v for v in program.inner)
    statements = (*scalar.needed(first.statements, parts), *stores)
    outputs = tuple(s.tensor for s in stores)
    first = replace(first, outer=outer, inner=inner, statements=statements, outputs=outputs)
    statements, inputs = tuple(_after(program, parts, place)), (*program.inputs, *outputs)
    return first, replace(program, inner=(part,), statements=statements, inputs=inputs)


def _one_walk(program: ScalarProgram) -> bool:
    """Whether no reduction waits for another, and only numbers of rows are stored."""
    late = program.after_reductions
    waits = any(s.source in late or s.seldom or s.kind == "bool" for s in program.reductions)
    return not waits and not program.element_stores


def _after(program: ScalarProgram, parts: Parts, place: Affine) -> list[Statement]:
    """Return what a row does with the results of its parts; it reads its elements no more."""
    found: list[Statement] = []
    for s in program.statements:
        if isinstance(s, Reduce):
            each = f"{s.name}p"
            tensor, kind = parts[s.name]
            found += (Load(each, tensor, place, kind), replace(s, source=each))
        elif isinstance(s, Store) or program.level[s.name] == "row":
            found.append(s)
    return found
