"""Pointwise work on elements of different kinds: a copy of the statements for each kind.

If an index is divided along the last axis, as in ``x[i // 2]`` or to find which of a pair an
element is, neighbours are not treated alike and cannot share a vector. But every second element is:
with i = 2 · j + rest the divisions are gone, and the results of both rests are interleaved as they
are stored. In the same way an axis whose halves are treated differently is cut into them: with i =
j + half or j what is read for both is read once, and no guard is left.

An axis that is divided by more, as in ``x[i // 64, i % 64]`` where features of several heads become
one row, becomes two axes: i = 64 · j + k, and vectors run along k.

Windows of neighbours overlap. With i = 4 · j + rest along an axis that is not the last, a thread
makes four neighbours, and reads what their windows share once. In the gradient of windows that do
not overlap, neighbours lie in windows of the same number, ⌊i / 2⌋, and differ only in their place
in the window: written out for four, that place is a constant and nothing has to be compared.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from deuteron.codegen import scalar
from deuteron.codegen.index import Affine, Quotient, Var
from deuteron.codegen.scalar import (
    Guard,
    Inside,
    Load,
    Position,
    ScalarProgram,
    Statement,
    Store,
    Value,
)
from deuteron.ops.formula import Arg, Compute, Const


def in_phases(program: ScalarProgram) -> ScalarProgram:
    """Cut the last axis in two, by remainder or by half, unless that leaves divisions or guards."""
    accesses = list(program.accesses())
    if program.inner or not program.outer or any(e.dynamic for e in accesses):
        return program
    axis = program.outer[-1]
    half = Var(axis.name, axis.size // 2)
    divided = {b for e in accesses for b in _divisors(e, axis)}
    if axis.size % 2:
        return program
    if divided == {2}:
        kinds = [Affine.var(half) * 2 + rest for rest in range(2)]
    elif not divided and any(axis in g.index.variables for g in program.guards):
        kinds = [Affine.var(half) + start for start in (0, half.size)]
    else:
        return program
    found = _for_each(program, axis, half, kinds)
    guarded = not divided and any(half in g.index.variables for g in found.guards)
    return program if guarded or any(_divisors(e, half) for e in found.accesses()) else found


def undivided(program: ScalarProgram) -> ScalarProgram:
    """Return the program with each axis that is divided cut in two, as long as that leaves no
    division of it behind."""
    cut = next((c for v in (*program.outer, *program.inner) if (c := _cut(program, v))), None)
    return program if cut is None else undivided(scalar.merge_axes(cut))


def _cut(program: ScalarProgram, axis: Var) -> ScalarProgram | None:
    accesses = list(program.accesses())
    for size in sorted({size for e in accesses for size in _lengths(e, axis)}, reverse=True):
        far, near = Var(f"{axis.name}x{size}", axis.size // size), Var(axis.name, size)
        found = scalar.substitute(program, {axis: Affine.var(far) * size + Affine.var(near)})
        if not any(_divisors(e, v) for e in found.accesses() for v in (far, near)):
            outer = _replaced(program.outer, axis, (far, near))
            return replace(found, outer=outer, inner=_replaced(program.inner, axis, (far, near)))
    return None


def _replaced(axes: Sequence[Var], axis: Var, by: Sequence[Var]) -> tuple[Var, ...]:
    return tuple(part for v in axes for part in (by if v == axis else (v,)))


def _lengths(e: Affine, axis: Var) -> Iterator[int]:
    """Yield lengths of pieces of an axis within which a quotient in an index stays the same."""
    for atom, _ in e.terms:
        if isinstance(atom, Quotient):
            step = atom.of.factor(axis)
            size = atom.by // step if step and step > 0 and atom.by % step == 0 else 1
            if 1 < size < axis.size and axis.size % size == 0:
                yield size
            yield from _lengths(atom.of, axis)


@lru_cache(maxsize=4096)
def shared_axis(program: ScalarProgram) -> Var | None:
    """Return the axis, not the last, along which an element reads most of what its neighbour reads
    as well; None if that is little."""
    if program.inner or len(program.outer) < 2:
        return None
    loads = {(s.tensor, s.offset) for s in program.loads if not s.offset.dynamic}
    best, most = None, len(program.loads) / 4
    for axis in program.outer[:-1]:
        steps = ((tensor, e, e.factor(axis)) for tensor, e in loads)
        shared = sum(bool(f) and (tensor, e + (f or 0)) in loads for tensor, e, f in steps)
        if shared >= most:  # among equal ones the last, whose elements lie closest
            best, most = axis, shared
    if best is not None:
        return best
    by = (axis for axis in reversed(program.outer[:-1]) if divided_by(program, axis) > 1)
    return next(by, None)


MANY = 8  # with this many divided loads for an element it pays to write windows out


@lru_cache(maxsize=4096)
def divided_by(program: ScalarProgram, axis: Var) -> int:
    """Return by what an axis is divided to find the many windows that its elements lie in; 1 if it
    is not divided, or not by one number that comes out even."""
    offsets = [s.offset for s in program.loads]
    found = [_divisors(e, axis) for e in offsets]
    each = {by for divisors in found for by in divisors}
    if len(each) != 1 or sum(map(bool, found)) < MANY or any(e.dynamic for e in offsets):
        return 1
    (by,) = each
    return by if axis.size % by == 0 else 1


@lru_cache(maxsize=4096)
def in_copies(program: ScalarProgram, count: int) -> ScalarProgram:
    """Return the program that makes ``count`` neighbours at a time along the axis of overlaps."""
    axis = shared_axis(program) if count > 1 else None
    if axis is None:
        return program
    part = Var(axis.name, axis.size // count)
    kinds = [Affine.var(part) * count + rest for rest in range(count)]
    return _for_each(program, axis, part, kinds, in_turns=True)


def _for_each(
    program: ScalarProgram, axis: Var, part: Var, kinds: Sequence[Affine], in_turns: bool = False
) -> ScalarProgram:
    """Return the program with ``axis`` replaced by ``part``, and a copy of the statements for each
    of ``kinds``: indices on ``axis`` in terms of ``part``. ``in_turns``: the first statement of all
    copies, then the second, so that what they share is used at once."""
    phases = _Phases()
    for kind in kinds:
        phases.add(scalar.substitute(program, {axis: kind}))
    made = phases.statements
    if in_turns:
        made = sorted(made, key=phases.turn.__getitem__)
    wanted = (name for s in phases.stores for name in scalar.reads(s))
    statements = (*scalar.needed(made, wanted), *phases.stores)
    return replace(program, outer=_replaced(program.outer, axis, (part,)), statements=statements)


def _divisors(e: Affine, v: Var) -> set[int]:
    """The numbers that ``v`` is divided by in an index."""
    return {a.by for a, _ in e.terms if isinstance(a, Quotient) and v in a.of.variables}


class _Phases:
    """The statements of all copies. What is a constant in one of them, such as in which half of a
    pair an element is, becomes one; what two have in common is done once."""

    def __init__(self) -> None:
        self.statements: list[Value] = []
        self.stores: list[Store] = []
        self.made: dict[Statement, Value] = {}  # by the statement without its name
        self.turn: dict[Value, int] = {}  # the first place at which a copy needs it

    def add(self, program: ScalarProgram) -> None:
        known: dict[str, Arg] = {}
        for turn, s in enumerate(program.statements):
            if isinstance(s, Store):
                source = s.source if isinstance(s.source, Const) else known[s.source]
                self.stores.append(replace(s, source=source))
            else:
                known[s.name] = self._value(s, known, turn)

    def _value(self, s: Statement, known: dict[str, Arg], turn: int) -> Arg:
        if isinstance(s, Load | Inside):
            s = replace(s, guards=tuple(g for g in s.guards if _holds(g) is not True))
            kind = s.dtype.kind if isinstance(s, Load) else "bool"
            if any(_holds(g) is False for g in s.guards):
                return scalar.number(0, kind)
            if isinstance(s, Inside) and not s.guards:
                return Const(True, "bool")
        elif isinstance(s, Compute):
            s = replace(s, args=tuple(known[a] if isinstance(a, str) else a for a in s.args))
            if s.op == "select" and isinstance(s.args[0], Const):
                return s.args[1] if s.args[0].value else s.args[2]
        elif isinstance(s, Position) and not s.index.terms:
            return Const(s.index.const, "int")
        assert not isinstance(s, Store)
        key = replace(s, name="")
        if key not in self.made:
            self.made[key] = replace(s, name=f"{s.name}_{len(self.made)}")
            self.statements.append(self.made[key])
        made = self.made[key]
        self.turn[made] = min(turn, self.turn.get(made, turn))
        return made.name


def _holds(g: Guard) -> bool | None:
    """Whether a guard holds always (True) or never (False); None if that depends on the place."""
    if g.low <= g.index.low and g.index.high < g.high:
        return True
    return False if g.index.high < g.low or g.index.low >= g.high else None
