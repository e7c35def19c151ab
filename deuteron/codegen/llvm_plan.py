"""How a scalar program is laid over vectors and loops on the CPU, before any code is written."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen import llvm
from deuteron.codegen.index import Var
from deuteron.codegen.scalar import Guard, Load, Reduce, ScalarProgram, Store, reads
from deuteron.ops.formula import Arg, Compute

FUNCTIONS = "exp exp2 log erf tanh sin cos expm1 log1p ndtr"  # of one number
HEAVY = frozenset(f"{FUNCTIONS} pow fmod atan2 div random quotient power".split())
FEW = 2  # vectors per step where many do not fit
MANY_ROWS = 32  # from here on a reduction down the columns follows the order of memory


@dataclass
class Shape:
    """How the program is laid over loops."""

    vector: Var | None  # None: every statement is scalar
    rows: tuple[Var, ...]  # outer axes shared out, the vector axis excluded
    columns: tuple[Var, ...]  # reduced axes walked one by one
    inner_vector: bool  # the vector axis is a reduced one
    steps: tuple[int, ...]  # lanes per step: several vectors, one vector, what is left
    kept: tuple[str, ...] = ()
    breaks: tuple[int, ...] = ()  # where guards change along the vector axis
    in_order: bool = False  # one walk down the rows of memory does it: see llvm_columns

    @property
    def lanes(self) -> int:
        return self.steps[0]


def plan(program: ScalarProgram) -> Shape:
    """Choose the vector axis, the lanes, and what is kept between passes."""
    best, score, inside = None, 0, set(program.inner)
    accesses = list(program.accesses())
    often = [e for e in accesses if e.variables & inside] or accesses  # not once a row
    for v in (*program.outer[-1:], *program.inner[-1:]):
        if any(e.factor(v) is None for e in accesses) or not _settles(program, v):
            continue
        factors = [e.factor(v) for e in often]
        points = sum(f == 1 for f in factors) - sum(f not in (0, 1, 2) for f in factors)
        if points > score or (points == score and best is not None and v in program.inner):
            best, score = v, points
    inner = best is not None and best in program.inner
    one = llvm.width() // (2 if program.wide else 1)
    # rows side by side in lanes: wider steps read longer stretches of each line of memory
    many = 8 if program.inner and not inner else _unroll()
    sizes = [n * one for n in (many, FEW, 1) if best is not None and best.size >= n * one]
    if not sizes:
        best, inner = None, False
    rows = tuple(v for v in program.outer if v != best)
    columns = tuple(v for v in program.inner if v != best)
    wide = best is not None and best.size > many * one
    in_order = best is not None and not inner and _one_walk(program, columns, wide)
    kept = _kept(program) if program.reductions and not in_order else ()
    breaks = _breaks(program, best)
    return Shape(best, rows, columns, inner, (*sizes, 1), kept, breaks, in_order)


def _one_walk(program: ScalarProgram, columns: tuple[Var, ...], wide: bool) -> bool:
    """Whether one pass over many rows is all there is to do: nothing of an element, reduced or
    stored, waits for the result of a reduction. Rows that registers hold (not ``wide``) are read in
    order anyway, and gain only if something is stored on the way."""
    if not columns or columns[-1].size < MANY_ROWS:
        return False
    late, inner = program.after_reductions, set(program.inner)
    reduced = all(s.source not in late and s.kind != "bool" for s in program.reductions)
    stored = [s for s in program.stores if s.offset.variables & inner]
    return (wide or bool(stored)) and reduced and all(s.source not in late for s in stored)


def _unroll() -> int:
    """Vectors per step: enough independent work to hide the latency of a multiply-add, as far as
    there are registers for it."""
    return 8 if llvm.has_lanes() or llvm.width() == 16 else 4


def _settles(program: ScalarProgram, v: Var) -> bool:
    """Whether each guard changes along ``v`` only where the axis can be cut, and no division
    hides a scalar that changes along it."""
    along = (g for g in program.guards if v in program.axes_of(g.index))
    return all(opens(g, v) is not None for g in along)


def opens(g: Guard, v: Var) -> tuple[int, int] | None:
    """From where to where along ``v`` a guard holds, if that is all that it depends on."""
    match g.index.terms:
        case ((axis, step),) if axis == v and step > 0:
            low, high = g.low - g.index.const, g.high - g.index.const
            return -(-low // step), -(-high // step)
    return None


def _breaks(program: ScalarProgram, v: Var | None) -> tuple[int, ...]:
    """Positions along ``v`` where a guard opens or closes."""
    if v is None:
        return ()
    found = {0, v.size}.union(*(opens(g, v) or () for g in program.guards))
    return tuple(sorted(b for b in found if 0 <= b <= v.size))


def _kept(program: ScalarProgram) -> tuple[str, ...]:
    """Element values that more than one pass reads and that are dear to compute again."""
    made = {s.name: s for s in program.statements if not isinstance(s, Store)}
    passes = [[s.source] for s in program.reductions if not s.seldom]
    passes.append([s.source for s in program.stores if isinstance(s.source, str)])
    kept: list[str] = []
    for name, level in program.level.items():
        s = made[name]
        if level != "element" or not isinstance(s, Compute) or s.kind != "float":
            continue
        readers = sum(needs(made, roots, name, set(kept), program) for roots in passes)
        if readers > 1 and _weight(made, name, set(kept), program) > 3:
            kept.append(name)

    # a value that only feeds another kept value need not be kept itself
    def is_useful(k: str) -> bool:
        return any(needs(made, roots, k, set(kept) - {k}, program) for roots in passes[1:])

    useful = filter(is_useful, kept)
    return tuple(dict.fromkeys(_gate(made, passes, k, program) for k in useful))


def _gate(made: dict[str, Any], passes: list[list[str]], name: str, program: ScalarProgram) -> str:
    """The last value through which every pass reads ``name``: what is kept of it, so that what
    follows in all passes alike is done once."""
    found = name
    readers = [roots for roots in passes if needs(made, roots, name, set(), program)]
    for v, s in made.items():
        element = program.level[v] == "element" and isinstance(s, Compute) and s.kind == "float"
        through = element and needs(made, [v], name, set(), program)
        if through and not any(needs(made, roots, name, {v}, program) for roots in readers):
            found = v
    return found


def needs(
    made: dict[str, Any], roots: Sequence[str], name: str, stop: set[str], program: ScalarProgram
) -> bool:
    """Whether a pass that computes ``roots`` reads ``name``, not looking past ``stop``."""
    stack, seen = list(roots), set()
    while stack:
        r = stack.pop()
        if r == name:
            return True
        if r in seen or r in stop or program.level.get(r) != "element":
            continue
        seen.add(r)
        stack.extend(reads(made[r]))
    return False


def _weight(made: dict[str, Any], name: str, stop: set[str], program: ScalarProgram) -> int:
    """What computing an element again would cost, in about as many simple operations."""
    total, stack, seen = 0, [name], set()
    while stack:
        r = stack.pop()
        if r in seen or r in stop or program.level[r] != "element":
            continue
        seen.add(r)
        s = made[r]
        if isinstance(s, Load):
            total += 1
        elif isinstance(s, Compute):
            total += 10 if s.op in HEAVY else 1
        stack.extend(reads(s))
    return total


def multiply_adds(program: ScalarProgram, kept: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Sums of a product that nothing else reads and a number from memory, by their names: the
    factors and that number. One instruction instead of two, and one rounding. A sum of two
    products is left alone: where they are equal, their difference is to be 0."""
    made = {s.name: s for s in program.statements if not isinstance(s, Store)}
    uses = Counter(name for s in program.statements for name in reads(s))
    found = {}
    for s in made.values():
        if not (isinstance(s, Compute) and s.op == "add" and s.kind == "float"):
            continue
        for a, b in (s.args, s.args[::-1]):
            product, number = made.get(str(a)), made.get(str(b))
            if not isinstance(product, Compute) or not isinstance(number, Load):
                continue
            x, y = product.args[0], product.args[-1]
            alone = product.op == "mul" and uses[product.name] == 1 and product.name not in kept
            if alone and isinstance(x, str) and isinstance(y, str):
                found[s.name] = (x, y, number.name)
    return found


CHOOSE = frozenset({"maximum", "minimum", "select", "abs", "neg"})  # an argument, or its sign


def short_already(program: ScalarProgram) -> frozenset[str]:
    """Values that are bfloat16 numbers as they stand: storing them there rounds nothing. Loaded
    ones, those that were rounded before, and what is chosen among such."""
    found: set[str] = set()

    def short(a: Arg) -> bool:
        return a in found if isinstance(a, str) else _is_bf16(a.value)

    for s in program.statements:
        if isinstance(s, Load):
            is_short = s.dtype.short == "bf16"
        elif isinstance(s, Reduce):
            is_short = s.op in ("max", "min") and s.source in found
        elif isinstance(s, Compute) and s.kind == "float":
            rounded = s.op == "rounded" and dict(s.attrs)["dtype"] == "bf16"
            chosen = s.args[1:] if s.op == "select" else s.args
            is_short = rounded or (s.op in CHOOSE and all(map(short, chosen)))
        else:
            continue
        if is_short:
            found.add(s.name)
    return frozenset(found)


def _is_bf16(number: float) -> bool:
    """Whether the lower half of the number as a float32 is zero, and no more is lost."""
    try:
        bits = struct.pack("<f", number)
    except OverflowError:
        return False
    return bits[:2] == b"\0\0" and struct.unpack("<f", bits)[0] == number
