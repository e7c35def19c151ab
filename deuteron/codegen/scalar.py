"""The scalar program: what one fused region does to one element and one row.

::

    for row in i0: 4096
      v0 = load x[i0*1024 + r0]            # each element of the row
      v1 = gelu(v0)
      m0 = sum(v1) over r0: 1024           # once per row
      v2 = sub(v1, m0)
      store y[i0*1024 + r0] = v2

A statement is *element* level if it depends on a reduced axis, *row* level if it does not. What
accumulates, in which type, what is kept and what is computed again is decided here, above the
renderers, so that every one of them computes the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf, prod
from typing import TypeVar

from deuteron.codegen.index import Affine, Dynamic, Index, Var
from deuteron.ir.dtype import DType
from deuteron.ops.formula import Arg, Compute, Const

KINDS = {"float": "float", "int": "int", "uint": "int", "bool": "bool"}  # by DType.kind


def number(value: float, kind: str = "float") -> Const:
    """Return ``value`` as a constant, for an element type of ``kind``."""
    kind = KINDS[kind]
    return Const({"float": float, "int": int, "bool": bool}[kind](value), kind)


@dataclass(frozen=True)
class Guard:
    """``low ≤ index < high``: says where an access through pad or concat is inside."""

    index: Affine
    low: int
    high: int

    def __str__(self) -> str:
        return f"{self.low} <= {self.index} < {self.high}"


Guards = tuple[Guard, ...]


def guards_of(places: Index, sizes: Sequence[int]) -> Guards:
    """Guards for those of the places that may lie outside."""
    pairs = zip(places, sizes, strict=True)
    return tuple(Guard(i, 0, n) for i, n in pairs if i.low < 0 or i.high >= n)


@dataclass(frozen=True)
class Load:
    """One element of an input; outside its guards it reads as 0 and is not touched."""

    name: str
    tensor: str
    offset: Affine
    dtype: DType
    guards: Guards = ()


@dataclass(frozen=True)
class Inside:
    """Whether all guards hold, as a bool."""

    name: str
    guards: Guards


@dataclass(frozen=True)
class Position:
    """An index as a number: the place of an element, for argmax and for random numbers."""

    name: str
    index: Affine


@dataclass(frozen=True)
class Reduce:
    """``name = kind(source)`` over all reduced axes: sum, max, min, prod, any or all.

    With ``seldom``, a number of the row that is known before, the result counts only if that number
    is infinite: a renderer may skip the reduction if it is not."""

    name: str
    op: str
    source: str
    kind: str
    seldom: str = ""


def start(op: str, kind: str) -> float:
    """Return what a reduction starts with: it leaves any other number as it is."""
    least, most = (-inf, inf) if kind == "float" else (-(2**63), 2**63 - 1)
    first = {"sum": 0, "prod": 1, "max": least, "min": most, "any": 0, "all": 1}[op]
    return float(first) if kind == "float" else first


@dataclass(frozen=True)
class Store:
    """Write a value to an output, rounded to its type."""

    tensor: str
    offset: Affine
    source: Arg
    dtype: DType


Value = Load | Compute | Inside | Position | Reduce  # a statement that gives a name to something
Statement = Value | Store
S = TypeVar("S", bound=Statement)


def indices(s: Statement) -> tuple[Affine, ...]:
    """The offset and guard expressions of a statement."""
    if isinstance(s, Position):
        return (s.index,)
    offset = (s.offset,) if isinstance(s, Load | Store) else ()
    return (*offset, *(g.index for g in s.guards)) if isinstance(s, Load | Inside) else offset


def reads(s: Statement) -> tuple[str, ...]:
    """The scalars that a statement needs, those in its addresses included."""
    if isinstance(s, Compute):
        return tuple(a for a in s.args if isinstance(a, str))
    if isinstance(s, Reduce):
        return (s.source,)
    own = (s.source,) if isinstance(s, Store) and isinstance(s.source, str) else ()
    return (*own, *(name for e in indices(s) for name in sorted(e.dynamic)))


def needed(statements: Sequence[S], wanted: Iterable[str]) -> list[S]:
    """Return the statements that the wanted values are computed from, in order."""
    names, found = set(wanted), list[S]()
    for s in reversed(statements):
        if not isinstance(s, Store) and s.name in names:
            names.update(reads(s))
            found.append(s)
    return found[::-1]


@dataclass(frozen=True)
class ScalarProgram:
    """Axes, statements in an order that runs, and the arguments of the kernel."""

    outer: tuple[Var, ...]
    inner: tuple[Var, ...]  # reduced axes; empty for pointwise work
    statements: tuple[Statement, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    wide: bool = False  # compute in float64

    @cached_property
    def _hash(self) -> int:
        return hash((self.outer, self.inner, self.statements))

    def __hash__(self) -> int:  # computed once: statements are many, and every cache asks for it
        return self._hash

    @cached_property
    def rows(self) -> int:
        return prod(v.size for v in self.outer)

    @cached_property
    def columns(self) -> int:
        return prod(v.size for v in self.inner)

    @cached_property
    def varies(self) -> dict[str, frozenset[Var]]:
        """Value → the axes along which it changes."""
        found: dict[str, frozenset[Var]] = {}
        for s in self.made.values():
            own, read = (e.variables for e in indices(s)), (found[name] for name in reads(s))
            axes = frozenset[Var]().union(*own, *read)
            found[s.name] = axes - set(self.inner) if isinstance(s, Reduce) else axes
        return found

    def axes_of(self, e: Affine) -> frozenset[Var]:
        """The axes along which an index changes, those of the scalars that it reads included."""
        return e.variables.union(*(self.varies[name] for name in e.dynamic))

    @cached_property
    def level(self) -> dict[str, str]:
        """Value → "element" if it changes along a reduced axis, else "row"."""
        inner = set(self.inner)
        return {name: "element" if axes & inner else "row" for name, axes in self.varies.items()}

    @cached_property
    def made(self) -> dict[str, Value]:
        """Value → the statement that makes it."""
        return {s.name: s for s in self.statements if not isinstance(s, Store)}

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        return tuple(s for s in self.statements if isinstance(s, Load))

    @cached_property
    def guards(self) -> Guards:
        """Every guard, once."""
        asked = (s.guards for s in self.statements if isinstance(s, Load | Inside))
        return tuple(dict.fromkeys(g for guards in asked for g in guards))

    @cached_property
    def reductions(self) -> tuple[Reduce, ...]:
        return tuple(s for s in self.statements if isinstance(s, Reduce))

    @cached_property
    def stores(self) -> tuple[Store, ...]:
        return tuple(s for s in self.statements if isinstance(s, Store))

    @cached_property
    def row_stores(self) -> tuple[Store, ...]:
        """What is stored once for a row."""
        return tuple(s for s in self.stores if not s.offset.variables & set(self.inner))

    @cached_property
    def element_stores(self) -> tuple[Store, ...]:
        """What is stored for every element of a row."""
        return tuple(s for s in self.stores if s not in self.row_stores)

    @property
    def transfers(self) -> tuple[Load | Store, ...]:
        """All loads, then all stores."""
        return (*self.loads, *self.stores)

    @cached_property
    def after_reductions(self) -> frozenset[str]:
        """The results of reductions and the values that depend on them."""
        found: set[str] = set()
        for name, s in self.made.items():
            if isinstance(s, Reduce) or found.intersection(reads(s)):
                found.add(name)
        return frozenset(found)

    def anonymous(self) -> ScalarProgram:
        """The same with tensors called a0, a1 … and y0, y1 …: equal work gets equal code."""
        names = {v: f"a{i}" for i, v in enumerate(self.inputs)}
        names |= {v: f"y{i}" for i, v in enumerate(self.outputs)}
        statements = list(self.statements)
        for i, s in enumerate(statements):
            if isinstance(s, Load | Store):
                statements[i] = replace(s, tensor=names[s.tensor])
        inputs, outputs = (tuple(names[v] for v in of) for of in (self.inputs, self.outputs))
        return replace(self, statements=tuple(statements), inputs=inputs, outputs=outputs)

    def accesses(self) -> Iterator[Affine]:
        """Every offset and guard expression."""
        for s in self.statements:
            yield from indices(s)

    def __str__(self) -> str:
        outer = ", ".join(f"{v.name}: {v.size}" for v in self.outer) or "once"
        inner = ", ".join(f"{v.name}: {v.size}" for v in self.inner)
        head = f"for {outer}" + (f"  (reduced: {inner})" if inner else "")
        return "\n".join([head, *(f"  {show(s, inner)}" for s in self.statements)])


def show(s: Statement, inner: str = "") -> str:
    if isinstance(s, Load):
        guard = f"  if {' and '.join(map(str, s.guards))}" if s.guards else ""
        return f"{s.name} = load {s.tensor}[{s.offset}] as {s.dtype.short}{guard}"
    if isinstance(s, Inside):
        return f"{s.name} = {' and '.join(map(str, s.guards))}"
    if isinstance(s, Position):
        return f"{s.name} = {s.index}"
    if isinstance(s, Compute):
        args = [*(a if isinstance(a, str) else repr(a.value) for a in s.args)]
        args += [f"{k}={v!r}" for k, v in s.attrs]
        return f"{s.name} = {s.op}({', '.join(args)})"
    if isinstance(s, Reduce):
        seldom = f" if {s.seldom} is infinite" if s.seldom else ""
        return f"{s.name} = {s.op}({s.source}) over {inner}{seldom}"
    source = s.source if isinstance(s.source, str) else repr(s.source.value)
    return f"store {s.tensor}[{s.offset}] = {source} as {s.dtype.short}"


def merge_axes(program: ScalarProgram) -> ScalarProgram:
    """Join neighbouring axes that every access walks through as if they were one.

    ``x[i*20 + j*5 + k]`` with j: 4 and k: 5 is ``x[i*20 + jk]`` with jk: 20. Longer loops
    vectorise better, and equal work gets equal programs.
    """
    outer, inner = _by_memory(program, program.outer), _by_memory(program, program.inner)
    program = replace(program, outer=outer, inner=inner)
    for which in ("outer", "inner"):
        for at in range(len(getattr(program, which)) - 2, -1, -1):
            axes: tuple[Var, ...] = getattr(program, which)
            a, b = axes[at], axes[at + 1]
            if all(_walks_as_one(e, a, b) for e in program.accesses()):
                both = Var(b.name, a.size * b.size)
                joined = {which: (*axes[:at], both, *axes[at + 2 :])}
                program = substitute(program, {a: Affine(), b: Affine.var(both)})
                program = replace(program, **joined)  # type: ignore[arg-type]
    return program


def _by_memory(program: ScalarProgram, axes: tuple[Var, ...]) -> tuple[Var, ...]:
    """Axes with the largest steps first, as the outputs (then the inputs) lie in memory; without
    those of size 1."""
    offsets = [*(s.offset for s in program.stores), *(s.offset for s in program.loads)]

    def step(v: Var) -> int:
        factors = (offset.factor(v) for offset in offsets)
        # an axis along which nothing is read or stored goes outermost
        return next((abs(f) for f in factors if f), 1 << 62)

    return tuple(sorted((v for v in axes if v.size != 1), key=lambda v: -step(v)))


def _walks_as_one(e: Affine, a: Var, b: Var) -> bool:
    fa, fb = e.factor(a), e.factor(b)
    return fa is not None and fb is not None and fa == fb * b.size


def overwritable(program: ScalarProgram, at_once: bool = False) -> list[tuple[str, str]]:
    """Return pairs of an output and an input whose memory it may take. The input must be read only
    at the place that is stored, by the element that is stored there; or, for a number of the row,
    anywhere in the same row. If there are several outputs and reductions, one output may be stored
    in a pass over the row that comes before the one that reads the input of another. Then there are
    no such pairs, unless each row is read as a whole before any of it is stored (``at_once``)."""
    outer, place = set(program.outer), {id(s): i for i, s in enumerate(program.statements)}
    if len(program.stores) > 1 and program.reductions and not at_once:
        return []

    def of_row(e: Affine) -> tuple[object, ...]:
        return e.const, *((atom, f) for atom, f in e.terms if atom in outer)

    def is_over(s: Load, store: Store) -> bool:
        if s.offset == store.offset:
            return True
        looked_up = all(atom in outer or isinstance(atom, Dynamic) for atom, _ in s.offset.terms)
        same = program.level[s.name] == "row" and of_row(s.offset) == of_row(store.offset)
        return bool(program.inner) and looked_up and same

    found = []
    for store in program.stores:
        for tensor in program.inputs:
            loads = [s for s in program.loads if s.tensor == tensor]
            plain = all(s.dtype == store.dtype and not s.guards for s in loads)
            here = any(s.offset == store.offset for s in loads)
            before = all(place[id(s)] < place[id(store)] for s in loads)
            if here and plain and before and all(is_over(s, store) for s in loads):
                found.append((store.tensor, tensor))
    return found


def substitute(program: ScalarProgram, values: dict[Var, Affine]) -> ScalarProgram:
    """The same statements with variables replaced in every index."""

    @cache  # many statements stand under the same guards
    def moved(e: Affine) -> Affine:
        return e.substitute(values)

    def replaced(s: Statement) -> Statement:
        if all(moved(e) is e for e in indices(s)):
            return s
        if isinstance(s, Load | Inside):
            s = replace(s, guards=tuple(replace(g, index=moved(g.index)) for g in s.guards))
        if isinstance(s, Load | Store):
            return replace(s, offset=moved(s.offset))
        return replace(s, index=moved(s.index)) if isinstance(s, Position) else s

    return replace(program, statements=tuple(map(replaced, program.statements)))


# ---- softmax: what renderers may know about e^(x − max x) and its sum


@dataclass(frozen=True)
class Softmax:
    """A maximum over a row and the sum of e^(x − maximum) over it: one pass can find both."""

    top: Reduce
    total: Reduce


def softmaxes(program: ScalarProgram) -> tuple[list[Softmax], frozenset[str]]:
    """The pairs in a program, and the names of all exponentials e^(x − max x)."""
    pairs, shifted = [], set()
    for s in program.statements:
        if not (isinstance(s, Compute) and s.op == "exp" and isinstance(s.args[0], str)):
            continue
        d = program.made[s.args[0]]
        if not (isinstance(d, Compute) and d.op == "sub" and isinstance(d.args[1], str)):
            continue
        top = program.made[d.args[1]]
        if isinstance(top, Reduce) and top.op == "max" and top.source == d.args[0]:
            shifted.add(s.name)
            for total in program.reductions:
                if total.op == "sum" and total.source == s.name:
                    pairs.append(Softmax(top, total))
    return pairs, frozenset(shifted)
