"""How a scalar program is laid over vectors and loops on the CPU, before any code is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen import llvm
from deuteron.codegen.index import Var
from deuteron.codegen.scalar import Compute, Inside, Load, ScalarProgram, Store, reads

HEAVY = frozenset(
    {"exp", "exp2", "log", "erf", "tanh", "sin", "cos", "pow", "expm1", "log1p", "div", "random"}
)
UNROLL = 4  # vectors per step: enough independent work to hide the latency of a multiply-add


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

    @property
    def lanes(self) -> int:
        return self.steps[0]


def plan(program: ScalarProgram) -> Shape:
    """Choose the vector axis, the lanes, and what is kept between passes."""
    best, score = None, 0
    for v in (*program.outer[-1:], *program.inner[-1:]):
        factors = [e.factor(v) for e in program.accesses()]
        if any(f is None for f in factors) or not _settles(program, v):
            continue
        points = sum(f == 1 for f in factors) - sum(f not in (0, 1) for f in factors)
        if points > score or (points == score and best is not None and v in program.inner):
            best, score = v, points
    inner = best is not None and best in program.inner
    one = llvm.width() // (2 if program.wide else 1)
    # rows side by side in lanes: wider steps read longer stretches of each line of memory
    most = one * UNROLL * (2 if program.inner and not inner else 1)
    sizes = [n for n in (most, one) if best is not None and best.size >= n]
    if not sizes:
        best, inner = None, False
    rows = tuple(v for v in program.outer if v != best)
    columns = tuple(v for v in program.inner if v != best)
    kept = _kept(program) if program.reductions else ()
    return Shape(best, rows, columns, inner, (*sizes, 1), kept, _breaks(program, best))


def _settles(program: ScalarProgram, v: Var) -> bool:
    """Whether each guard changes along ``v`` only where the axis can be cut, and no division
    hides a scalar that changes along it."""
    for s in program.statements:
        for g in s.guards if isinstance(s, Load | Inside) else ():
            if v in program.axes_of(g.index) and g.index.terms != ((v, 1),):
                return False
    return True


def _breaks(program: ScalarProgram, v: Var | None) -> tuple[int, ...]:
    """Positions along ``v`` where a guard opens or closes."""
    if v is None:
        return ()
    found = {0, v.size}
    for s in program.statements:
        if isinstance(s, Load | Inside):
            for g in s.guards:
                if g.index.terms == ((v, 1),):
                    found |= {g.low - g.index.const, g.high - g.index.const}
    return tuple(sorted(b for b in found if 0 <= b <= v.size))


def _kept(program: ScalarProgram) -> tuple[str, ...]:
    """Element values that more than one pass reads and that are dear to compute again."""
    made = {s.name: s for s in program.statements if not isinstance(s, Store)}
    passes = [[s.source] for s in program.reductions]
    passes.append([s.source for s in program.statements
                   if isinstance(s, Store) and isinstance(s.source, str)])  # fmt: skip
    kept: list[str] = []
    for name, level in program.level.items():
        s = made[name]
        if level != "element" or not isinstance(s, Compute) or s.kind != "float":
            continue
        readers = sum(needs(made, roots, name, set(kept), program) for roots in passes)
        if readers > 1 and _weight(made, name, set(kept), program) > 3:
            kept.append(name)
    # a value that only feeds another kept value need not be kept itself
    return tuple(
        k for k in kept
        if any(needs(made, roots, k, set(kept) - {k}, program) for roots in passes[1:])
    )  # fmt: skip


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
