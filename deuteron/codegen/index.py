"""Index arithmetic: sums of loop variables with constant factors, and integer division of them.

An access ``x[n, c, h // 2]`` is kept in one normal form, so that equal accesses are equal
objects and loops can be merged by looking at factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain


@dataclass(frozen=True)
class Named:
    """A number from 0 to ``size`` − 1 that has a name."""

    name: str
    size: int

    @property
    def high(self) -> int:
        return max(self.size - 1, 0)

    def __str__(self) -> str:
        return self.name


class Var(Named):
    """A loop variable."""


@dataclass(frozen=True)
class Dynamic(Named):
    """A scalar known only at run time, used as an index: what gather reads from a tensor. It is
    below ``size`` wherever the access is inside its guards."""

    given: bool = True  # whether the caller gave it, who may be wrong about that


@dataclass(frozen=True)
class Quotient:
    """``⌊of / by⌋`` or, with ``rest``, what is left of ``of`` after it; ``of`` is not negative."""

    of: Affine
    by: int
    rest: bool

    @property
    def high(self) -> int:
        top = self.of.high
        return min(top, self.by - 1) if self.rest else top // self.by

    def __hash__(self) -> int:
        return hash((self.of, self.by, self.rest))

    def __str__(self) -> str:
        return f"({self.of} {'%' if self.rest else '//'} {self.by})"


Atom = Var | Quotient | Dynamic


@dataclass(frozen=True)
class Affine:
    """A constant plus a sum of atoms times integer factors."""

    const: int = 0
    terms: tuple[tuple[Atom, int], ...] = ()

    @staticmethod
    def of(const: int, terms: Iterable[tuple[Atom, int]]) -> Affine:
        """The normal form: equal atoms joined, quotients and remainders of one division put
        together again, zero factors dropped, a fixed order."""
        joined: dict[Atom, int] = {}
        for atom, factor in terms:
            if atom.high > 0:
                joined[atom] = joined.get(atom, 0) + factor
        for atom, factor in joined.items():
            if isinstance(atom, Quotient) and atom.rest and factor:
                whole = Quotient(atom.of, atom.by, rest=False)
                if joined.get(whole) == factor * atom.by:  # by · ⌊e / by⌋ + e % by = e
                    joined[atom] = joined[whole] = 0
                    back = ((a, f * factor) for a, f in atom.of.terms)
                    return Affine.of(const + factor * atom.of.const, (*joined.items(), *back))
        kept = [(atom, f) for atom, f in joined.items() if f]
        if len(kept) > 1:
            kept.sort(key=lambda t: (-abs(t[1]), str(t[0])))
        return Affine(const, tuple(kept))

    @staticmethod
    def var(v: Atom) -> Affine:
        return Affine.of(0, ((v, 1),))

    @cached_property
    def high(self) -> int:
        """The largest value it can take."""
        return self.const + sum(f * a.high for a, f in self.terms if f > 0)

    @cached_property
    def low(self) -> int:
        """The smallest value it can take."""
        return self.const + sum(f * a.high for a, f in self.terms if f < 0)

    def __add__(self, other: Affine | int) -> Affine:
        if isinstance(other, int):
            return Affine(self.const + other, self.terms)
        return Affine.of(self.const + other.const, (*self.terms, *other.terms))

    def __mul__(self, factor: int) -> Affine:
        if not factor:
            return Affine()
        return Affine(self.const * factor, tuple((a, f * factor) for a, f in self.terms))

    def divided(self, by: int, rest: bool) -> Affine:
        """Whole division (or its remainder) by a positive number; self must not be negative."""
        assert self.low >= 0 and by > 0, "only indices that cannot be negative are divided"
        if by == 1:
            return Affine() if rest else self
        part = Affine.of(self.const % by, ((a, f) for a, f in self.terms if f % by))
        if part.low < 0:  # alone it may be negative; with the terms left out here it is not
            return Affine.var(Quotient(self, by, rest))
        fits = part.high < by  # then nothing of it carries over
        left = part if fits and rest else Affine() if fits else Affine.var(Quotient(part, by, rest))
        whole = Affine.of(self.const // by, ((a, f // by) for a, f in self.terms if f % by == 0))
        return left if rest else whole + left

    def factor(self, v: Var) -> int | None:
        """The factor of ``v``; None if ``v`` also hides inside a quotient."""
        found = 0
        for atom, f in self.terms:
            if atom == v:
                found = f
            elif isinstance(atom, Quotient) and v in atom.of.variables:
                return None
        return found

    @cached_property
    def leaves(self) -> tuple[Var | Dynamic, ...]:
        """Its variables and scalars, those in quotients too."""
        inside = (a.of.leaves if isinstance(a, Quotient) else (a,) for a, _ in self.terms)
        return tuple(chain.from_iterable(inside))

    @cached_property
    def size(self) -> int:
        """How many variables and scalars it has, counted as often as they occur."""
        return sum(a.of.size if isinstance(a, Quotient) else 1 for a, _ in self.terms)

    @cached_property
    def _hash(self) -> int:
        return hash((self.const, self.terms))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def variables(self) -> frozenset[Var]:
        return frozenset(a for a in self.leaves if isinstance(a, Var))

    @cached_property
    def dynamic(self) -> frozenset[str]:
        """The scalars that it reads at run time."""
        return frozenset(a.name for a in self.leaves if isinstance(a, Dynamic))

    @property
    def lookups(self) -> list[Dynamic]:
        """The scalars among them that a caller gave."""
        return [a for a in self.leaves if isinstance(a, Dynamic) and a.given]

    def substitute(self, values: Mapping[Var, Affine]) -> Affine:
        """The same with variables replaced."""
        if self.variables.isdisjoint(values):
            return self
        const, terms = self.const, list[tuple[Atom, int]]()
        for atom, f in self.terms:
            if isinstance(atom, Quotient):
                moved = atom.of.substitute(values).divided(atom.by, atom.rest)
            elif isinstance(atom, Var) and atom in values:
                moved = values[atom]
            else:
                terms.append((atom, f))
                continue
            const += moved.const * f
            terms += ((a, g * f) for a, g in moved.terms)
        return Affine.of(const, terms)

    def __str__(self) -> str:
        parts = [str(a) if f == 1 else f"{f}*{a}" for a, f in self.terms]
        if self.const or not parts:
            parts.append(str(self.const))
        return " + ".join(parts).replace("+ -", "- ")


Index = tuple[Affine, ...]


def flatten(index: Index, shape: tuple[int, ...]) -> Affine:
    """The row-major position of ``index`` in ``shape``."""
    total = Affine()
    for i, size in zip(index, shape, strict=True):
        total = total * size + i
    return total


def unflatten(position: Affine, shape: tuple[int, ...]) -> Index:
    """The index in ``shape`` of a row-major position."""
    out: list[Affine] = []
    for size in reversed(shape[1:]):
        out.append(position.divided(size, rest=True) if size > 1 else Affine())
        position = position.divided(size, rest=False) if size > 1 else position
    return (position, *reversed(out)) if shape else ()
