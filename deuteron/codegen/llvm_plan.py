"""How a scalar program is laid over vectors and loops on the CPU, before any code is written."""

import struct
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from deuteron.codegen import llvm
from deuteron.codegen.index import Affine, Var
from deuteron.codegen.scalar import Guard, Load, Reduce, ScalarProgram, reads
from deuteron.ops.formula import Arg, Compute

FUNCTIONS = "exp exp2 log erf tanh sin cos expm1 log1p ndtr"  # of one number
HEAVY = frozenset(f"{FUNCTIONS} pow fmod atan2 div random quotient power".split())
FEW = 2  # vectors per step on an axis that is too short for many
MANY_ROWS = 32  # from here on a reduction down the columns follows the order of memory


@dataclass
class Shape:
    """How the program is laid over loops."""

    vector: Var | None  # None: every statement is scalar
    rows: tuple[Var, ...]  # outer axes shared out, the vector axis excluded
    columns: tuple[Var, ...]  # reduced axes walked one by one
    inner_vector: bool  # the vector axis is a reduced one
    steps: tuple[int, ...]  # lanes per step: several vectors, one, parts of one, what is left
    kept: tuple[str, ...] = ()
    breaks: tuple[int, ...] = ()  # where guards change along the vector axis
    in_order: bool = False  # a single walk down the rows of memory computes all: see llvm_columns

    @property
    def lanes(self) -> int:
        return self.steps[0]


def plan(program: ScalarProgram) -> Shape:
    """Choose the vector axis, the lanes, and what is kept between passes."""
    one = llvm.width() // (2 if program.wide else 1)
    work, accesses = _arithmetic(program), list(program.accesses())
    often = _often(program)
    best, least = None, float(work + len(often))
    for v in (*program.inner[-1:], *reversed(program.outer)):
        # guards may change along v only where the axis can be cut
        along = (g for g in program.guards if v in program.axes_of(g.index))
        if any(e.factor(v) is None for e in accesses) or any(opens(g, v) is None for g in along):
            continue
        apart = sum(scatters(e, v) for e in often)
        lanes = min(one, 1 << v.size.bit_length() - 1)
        price = apart + (work + len(often) - apart) / lanes
        if price < least:
            best, least = v, price
    inner = best is not None and best in program.inner
    # vectors per step: enough independent work to hide the latency of a multiply-add, as far as
    # there are registers for it; rows side by side in lanes read longer stretches of each line
    side_by_side = program.inner and not inner
    many = 8 if side_by_side or llvm.by_lane() or llvm.width() == 16 else 4
    offered = [n * one for n in sorted({many, 4, FEW, 1}, reverse=True)] + llvm.halves(one)
    sizes = [n for n in offered if best is not None and best.size >= n]
    if not sizes:
        best, inner = None, False
    rows = tuple(v for v in program.outer if v != best)
    columns = tuple(v for v in program.inner if v != best)
    wide = best is not None and best.size > many * one
    in_order = best is not None and not inner and _one_walk(program, columns, wide)
    kept = _kept(program) if program.reductions and not in_order else ()
    breaks = _breaks(program, best)
    return Shape(best, rows, columns, inner, (*sizes, 1), kept, breaks, in_order)


def _often(program: ScalarProgram) -> list[Affine]:
    """Indices of what is read and stored for every element, not once a row."""
    inside, accesses = set(program.inner), list(program.accesses())
    return [e for e in accesses if e.variables & inside] or accesses


def scatters(e: Affine, v: Var | None) -> bool:
    """Whether lanes along an axis lie apart in memory, and are put together one by one."""
    return v is not None and e.factor(v) not in (0, 1, 2)


def scattered(program: ScalarProgram) -> int:
    """How many numbers of an element are put into their lanes, or taken out of them, one by one."""
    v = plan(program).vector
    return sum(scatters(e, v) for e in _often(program))


def _arithmetic(program: ScalarProgram) -> int:
    """About how many simple operations an element takes."""
    level, inner = program.level, program.inner
    made = [s for n, s in program.made.items() if not inner or level[n] == "element"]
    return sum(9 if s.op in HEAVY else 1 for s in made if isinstance(s, Compute))


def _one_walk(program: ScalarProgram, columns: tuple[Var, ...], wide: bool) -> bool:
    """Whether a single pass over many rows does everything: nothing of an element, reduced or
    stored, waits for the result of a reduction. Rows that registers hold (not ``wide``) are read in
    order anyway, and gain only if something is stored on the way."""
    if not columns or columns[-1].size < MANY_ROWS:
        return False
    late, stored = program.after_reductions, program.element_stores
    reduced = all(s.source not in late and s.kind != "bool" for s in program.reductions)
    return (wide or bool(stored)) and reduced and all(s.source not in late for s in stored)


def opens(g: Guard, v: Var) -> tuple[int, int] | None:
    """Return the range along ``v`` in which a guard holds; None if it depends on more than
    ``v``."""
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
    """Return the element values that more than one pass reads and that are costly to compute
    again."""
    passes = [[s.source] for s in program.reductions if not s.seldom]
    passes.append([s.source for s in program.stores if isinstance(s.source, str)])
    floats = [n for n, s in program.made.items() if isinstance(s, Compute) and s.kind == "float"]
    elements = [name for name in floats if program.level[name] == "element"]
    kept: list[str] = []
    for name in elements:
        readers = sum(name in reached(program, roots, kept) for roots in passes)
        if readers > 1 and _weight(program, name, kept) > 3:
            kept.append(name)

    # a value that only feeds another kept value need not be kept itself
    def is_useful(k: str) -> bool:
        return any(k in reached(program, roots, set(kept) - {k}) for roots in passes[1:])

    def gate(name: str) -> str:
        """Return the last value through which every pass reads ``name``. That one is kept instead,
        so that what all passes compute alike is computed once."""
        readers = [roots for roots in passes if name in reached(program, roots)]
        for v in reversed(elements):
            past = any(name in reached(program, roots, {v}) for roots in readers)
            if not past and name in reached(program, [v]):
                return v
        return name

    return tuple(dict.fromkeys(gate(k) for k in kept if is_useful(k)))


def reached(program: ScalarProgram, roots: Iterable[str], stop: Collection[str] = ()) -> set[str]:
    """Return all values that a pass reads to compute ``roots``, as far back as to ``stop`` and to
    numbers of rows."""
    found, stack = set(), list(roots)
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            if name not in stop and program.level[name] == "element":
                stack.extend(reads(program.made[name]))
    return found


def _weight(program: ScalarProgram, name: str, stop: Collection[str]) -> int:
    """Return the cost of computing an element again, in about as many simple operations."""
    again = reached(program, [name], stop).difference(stop)
    made = [program.made[r] for r in again if program.level[r] == "element"]
    heavy = sum(isinstance(s, Compute) and s.op in HEAVY for s in made)
    return 9 * heavy + sum(isinstance(s, Load | Compute) for s in made)


def multiply_adds(program: ScalarProgram, kept: Collection[str]) -> dict[str, tuple[str, str, str]]:
    """Return by name the sums of a product, which nothing else reads, and a number from memory:
    their factors and that number. They take one instruction instead of two, and are rounded once. A
    sum of two products is left alone: if these are equal, their difference has to be 0."""
    made = program.made
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
    """Whether the lower half of the number as a float32 is zero, and nothing else is lost."""
    try:
        bits = struct.pack("<f", number)
    except OverflowError:
        return False
    return bits[:2] == b"\0\0" and struct.unpack("<f", bits)[0] == number
