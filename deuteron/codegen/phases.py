"""Pointwise work on elements of two kinds: a copy of the statements for each of them.

Where an index is divided along the last axis, as in ``x[i // 2]`` or by which of a pair an element
is, neighbours are not treated alike and no vector holds them. But every second element is: with
i = 2 · j + rest the divisions are gone, and the results of both rests are woven together as they
are stored. In the same way an axis whose halves are treated differently is cut into them: with
i = j + half or j what is read for both is read once, and no guard is left.

An axis that is divided by more, as in ``x[i // 64, i % 64]`` where features of several heads become
one row, is two axes: i = 64 · j + k, and vectors run along k.

Windows of neighbours overlap. With i = 4 · j + rest along an axis that is not the last, a thread
makes four neighbours, and reads what their windows share once. In the gradient of windows that lie
apart, neighbours are elements of windows of one number, ⌊i / 2⌋, and differ in which of their
elements they are: written out for four, that is known and nothing is asked.
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
    """The program with its last axis cut in two by rests, or as it is if that leaves divisions."""
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
    """The program with each axis that is divided cut in two, as long as that leaves no division of
    it behind."""
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
    """Pieces of an axis within which what an index divides stays the same."""
    for atom, _ in e.terms:
        if isinstance(atom, Quotient):
            step = atom.of.factor(axis)
            size = atom.by // step if step and step > 0 and atom.by % step == 0 else 1
            if 1 < size < axis.size and axis.size % size == 0:
                yield size
            yield from _lengths(atom.of, axis)


@lru_cache(maxsize=4096)
def shared_axis(program: ScalarProgram) -> Var | None:
    """The axis, not the last, along which an element reads most of what its neighbour reads as
    well; None where that is little."""
    if program.inner or len(program.outer) < 2:
        return None
    loads = {(s.tensor, s.offset) for s in program.loads if not s.offset.dynamic}
    best, most = None, len(program.loads) / 4
    for axis in program.outer[:-1]:
        steps = ((tensor, e, e.factor(axis)) for tensor, e in loads)
        shared = sum(bool(f) and (tensor, e + (f or 0)) in loads for tensor, e, f in steps)
        if shared >= most:  # of equals the one whose elements lie closest
            best, most = axis, shared
    if best is not None:
        return best
    by = (axis for axis in reversed(program.outer[:-1]) if divided_by(program, axis) > 1)
    return next(by, None)


MANY = 8  # elements that one reads, from which windows are worth being written out


@lru_cache(maxsize=4096)
def divided_by(program: ScalarProgram, axis: Var) -> int:
    """By what an axis is divided to find the many windows that its elements lie in; 1 if it is
    not, or not by one number that comes out even."""
    offsets = [s.offset for s in program.loads]
    found = [_divisors(e, axis) for e in offsets]
    each = {by for divisors in found for by in divisors}
    if len(each) != 1 or sum(map(bool, found)) < MANY or any(e.dynamic for e in offsets):
        return 1
    (by,) = each
    return by if axis.size % by == 0 else 1


@lru_cache(maxsize=4096)
def in_copies(program: ScalarProgram, count: int) -> ScalarProgram:
    """The program with ``count`` neighbours along the axis that windows share made at a time."""
    axis = shared_axis(program) if count > 1 else None
    if axis is None:
        return program
    part = Var(axis.name, axis.size // count)
    kinds = [Affine.var(part) * count + rest for rest in range(count)]
    return _for_each(program, axis, part, kinds, in_turns=True)


def _for_each(
    program: ScalarProgram, axis: Var, part: Var, kinds: Sequence[Affine], in_turns: bool = False
) -> ScalarProgram:
    """The statements for each of the places along an axis that ``kinds`` of ``part`` stand for;
    ``in_turns``: the first of all, then the second, so that what is shared is used at once."""
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
    """By what ``v`` is divided in an index."""
    return {a.by for a, _ in e.terms if isinstance(a, Quotient) and v in a.of.variables}


class _Phases:
    """The statements of all rests. What is a number for one rest, such as in which half of a pair
    an element is, is taken as one; what is the same for two is done once."""

    def __init__(self) -> None:
        self.statements: list[Value] = []
        self.stores: list[Store] = []
        self.made: dict[Statement, Value] = {}  # by the same without a name
        self.turn: dict[Value, int] = {}  # the first place at which one is asked for

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
    """Whether a guard holds wherever it is asked, or nowhere; None if that depends."""
    if g.low <= g.index.low and g.index.high < g.high:
        return True
    return False if g.index.high < g.low or g.index.low >= g.high else None
