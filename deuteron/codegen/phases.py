"""Pointwise work on elements of two kinds: a copy of the statements for each of them.

Where an index is divided along the last axis, as in ``x[i // 2]`` or by which of a pair an element
is, neighbours are not treated alike and no vector holds them. But every second element is: with
i = 2 · j + rest the divisions are gone, and the results of both rests are woven together as they
are stored. In the same way an axis whose halves are treated differently is cut into them: with
i = j + half or j what is read for both is read once, and no guard is left.
"""

from dataclasses import replace

from deuteron.codegen import scalar
from deuteron.codegen.index import Affine, Quotient, Var
from deuteron.codegen.scalar import Guard, Inside, Load, ScalarProgram, Statement, Store
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
    phases = _Phases()
    for kind in kinds:
        phases.add(scalar.substitute(program, {axis: kind}))
    wanted = (name for s in phases.stores for name in scalar.reads(s))
    statements = (*scalar.needed(phases.statements, wanted), *phases.stores)
    found = replace(program, outer=(*program.outer[:-1], half), statements=statements)
    guarded = not divided and any(half in g.index.variables for g in found.guards)
    return program if guarded or any(_divisors(e, half) for e in found.accesses()) else found


def _divisors(e: Affine, v: Var) -> set[int]:
    """By what ``v`` is divided in an index."""
    return {a.by for a, _ in e.terms if isinstance(a, Quotient) and v in a.of.variables}


class _Phases:
    """The statements of all rests. What is a number for one rest, such as in which half of a pair
    an element is, is taken as one; what is the same for two is done once."""

    def __init__(self) -> None:
        self.statements: list[Statement] = []
        self.stores: list[Store] = []
        self.made: dict[Statement, str] = {}  # a statement without its name → its name

    def add(self, program: ScalarProgram) -> None:
        known: dict[str, Arg] = {}
        for s in program.statements:
            if isinstance(s, Store):
                source = s.source if isinstance(s.source, Const) else known[s.source]
                self.stores.append(replace(s, source=source))
            else:
                known[s.name] = self._value(s, known)

    def _value(self, s: Statement, known: dict[str, Arg]) -> Arg:
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
        assert not isinstance(s, Store)
        key = replace(s, name="")
        if key not in self.made:
            self.made[key] = f"{s.name}_{len(self.made)}"
            self.statements.append(replace(s, name=self.made[key]))
        return self.made[key]


def _holds(g: Guard) -> bool | None:
    """Whether a guard holds wherever it is asked, or nowhere; None if that depends."""
    if g.low <= g.index.low and g.index.high < g.high:
        return True
    return False if g.index.high < g.low or g.index.low >= g.high else None
