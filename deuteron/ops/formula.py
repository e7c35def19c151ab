"""Formulas: what an operator does to one element, written once, with other operators.

>>> silu = lambda b, x: x / (1.0 + b.exp(-x))

``b`` has every elementwise operator of the table as a method, and values have arithmetic. What a
formula produces depends on the values that it is given:

* handles of a graph (:class:`~deuteron.ops.emit.Ops`): nodes; gradients are written in this way;
* tensors (:data:`TENSORS`): calls of torch, as a reference;
* scalars (:class:`Scalars`): statements. From these we generate code for every machine, also for
  epilogues of products and for kernels written by hand, and count operations for the price.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from deuteron.ops import table
from deuteron.ops.opdef import Fusion, OpDef
from deuteron.ops.reference import wide_type

Formula = Callable[..., Any]

# The primitives that every code generator knows, and how many operations each counts for.
PRIMITIVES: Mapping[str, float] = {
    **dict.fromkeys("add sub mul fma neg abs maximum minimum floor ceil round trunc".split(), 1.0),
    **dict.fromkeys("eq ne lt le gt ge and or not select rounded wrapped".split(), 1.0),
    **dict.fromkeys("to_float to_int to_bool".split(), 0.0),
    **dict.fromkeys("div sqrt".split(), 4.0),
    **dict.fromkeys("fmod quotient".split(), 6.0),
    **dict.fromkeys("exp exp2 log".split(), 8.0),
    **dict.fromkeys("expm1 log1p sin cos".split(), 10.0),
    **dict.fromkeys("tanh erf random".split(), 12.0),
    **dict.fromkeys("ndtr".split(), 14.0),
    **dict.fromkeys("pow power atan2".split(), 20.0),
}
COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


class CannotLower(Exception):
    """There is no scalar form. With ``too_long``: it would be too long, but parts of the region
    have one."""

    def __init__(self, reason: str, remedy: str = "", too_long: bool = False) -> None:
        self.reason, self.remedy, self.too_long = reason, remedy, too_long


V = TypeVar("V", bound="Value")


def _binary(op: str, swap: bool = False) -> Callable[[V, Any], V]:
    def method(self: V, other: Any) -> V:
        if not isinstance(other, type(self) | int | float):
            return NotImplemented  # type: ignore[no-any-return]
        made: V = self.apply(op, other, self) if swap else self.apply(op, self, other)
        return made

    return method


class Value(ABC):
    """A value whose arithmetic becomes operators of the table."""

    __slots__ = ()

    @abstractmethod
    def apply(self, op: str, *args: Any) -> Any:
        """The operator on this value and others."""

    __add__, __radd__ = _binary("add"), _binary("add", swap=True)
    __sub__, __rsub__ = _binary("sub"), _binary("sub", swap=True)
    __mul__, __rmul__ = _binary("mul"), _binary("mul", swap=True)
    __truediv__, __rtruediv__ = _binary("div"), _binary("div", swap=True)
    __pow__, __rpow__ = _binary("pow"), _binary("pow", swap=True)
    __lt__, __le__ = _binary("lt"), _binary("le")
    __gt__, __ge__ = _binary("gt"), _binary("ge")

    def __neg__(self: V) -> V:
        made: V = self.apply("neg", self)
        return made


# ---- scalars: formulas as statements -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Const:
    """A number known now. 0.0 and −0.0 are two, and nan is one: programs are kept by what they
    are."""

    value: float | int | bool
    kind: str  # "float", "int" or "bool"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and repr(self) == repr(other)

    def __hash__(self) -> int:
        return hash(repr(self))


Arg = str | Const
Pairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Compute:
    """``name = op(args)`` on scalars; ``kind`` is float, int or bool."""

    name: str
    op: str
    args: tuple[Arg, ...]
    kind: str
    attrs: Pairs = ()


class Scalars:
    """Statements under construction: names, their kinds, and what computes them."""

    def __init__(self) -> None:
        self.statements: list[Any] = []
        self.kinds: dict[str, str] = {}
        self.count = 0

    def name(self, letter: str, kind: str) -> str:
        """A new name."""
        name = f"{letter}{self.count}"
        self.count += 1
        self.kinds[name] = kind
        return name

    def op(self, name: str, *args: Any, kind: str = "", attrs: Pairs = ()) -> Arg:
        """Emit one primitive; arguments may be Python numbers."""
        refs = tuple(_arg(a) for a in args)
        if any(isinstance(r, str) and self.kinds[r] == "int" for r in refs):
            refs = tuple(_as_whole(r) for r in refs)
        out = kind or _result_kind(name, [self.kind(r) for r in refs])
        fresh = self.name("v", out)
        self.statements.append(Compute(fresh, name, refs, out, attrs))
        return fresh

    def kind(self, value: Any) -> str:
        """What a value is: "float", "int" or "bool"."""
        ref = _arg(value)
        return ref.kind if isinstance(ref, Const) else self.kinds[ref]

    def formula(self, op: str, *args: Any, **attrs: Any) -> Arg:
        """Emit the statements of an operator on scalars, and return its result."""
        given = [a if a is None else Scalar(self, _arg(a)) for a in args]
        return _arg(ScalarOps(self).call(op, *given, **attrs))


class Scalar(Value):
    """One number of a scalar program, as formulas see it."""

    __slots__ = ("of", "ref")

    def __init__(self, of: Scalars, ref: Arg) -> None:
        self.of, self.ref = of, ref

    def apply(self, op: str, *args: Any) -> Any:
        return ScalarOps(self.of).call(op, *args)

    @property
    def is_whole(self) -> bool:
        """Whether it is an integer."""
        return self.of.kind(self.ref) == "int"

    @property
    def is_float(self) -> bool:
        return self.of.kind(self.ref) == "float"

    @property
    def number(self) -> float | int | bool | None:
        """Its value, if that is known now."""
        return self.ref.value if isinstance(self.ref, Const) else None


class Methods(ABC):
    """Every operator that ``call`` knows is a method."""

    __slots__ = ()

    @abstractmethod
    def call(self, name: str, *args: Any, **attrs: Any) -> Any: ...

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **attrs: self.call(name, *args, **attrs)


class ScalarOps(Methods):
    """Every elementwise operator as a method on scalars."""

    def __init__(self, of: Scalars) -> None:
        self.of = of

    def call(self, name: str, *args: Any, **attrs: Any) -> Any:
        """The operator's formula, or the primitive of that name."""
        op = table.TABLE.get(name)
        if op is not None and op.formula is not None:
            wrapped = (a if a is None else Scalar(self.of, _arg(a)) for a in args)
            return op.formula(self, *wrapped, **op.normalise(attrs))
        if name not in PRIMITIVES:
            table.get(name)  # says what it may have been, if there is no such operator
            raise CannotLower(f"{name} has no formula", "give its OpDef one")
        return self.primitive(name, *args)

    def primitive(self, name: str, *args: Any) -> Scalar:
        """One of :data:`PRIMITIVES`."""
        return Scalar(self.of, self.of.op(name, *map(_arg, args)))


def _arg(value: Any) -> Arg:
    if isinstance(value, Scalar):
        return value.ref
    if isinstance(value, str | Const):
        return value
    kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "float"
    return Const(value, kind)


def _as_whole(a: Arg) -> Arg:
    """Beside integers, a whole number that a formula writes as a float becomes an integer."""
    if isinstance(a, Const) and a.kind == "float" and float(a.value).is_integer():
        return Const(int(a.value), "int")
    return a


def _result_kind(name: str, kinds: Sequence[str]) -> str:
    if name in COMPARISONS or name in ("and", "or", "not", "to_bool"):
        return "bool"
    if name == "to_float":
        return "float"
    return kinds[-1] if name == "select" else kinds[0]


@dataclass(frozen=True)
class Traced:
    """A formula as statements, which code generators place in code of their own. ``inputs``: the
    names of its inputs; ``result``: the name or number that it returns; ``others``: what else it
    returns, if it returns a tuple."""

    inputs: tuple[str, ...]
    statements: tuple[Compute, ...]
    result: Arg
    others: tuple[Arg, ...] = ()

    @property
    def flops(self) -> float:
        return sum(PRIMITIVES[s.op] for s in self.statements)

    def reads(self, name: str) -> bool:
        """Whether the results depend on an input."""
        return name in (self.result, *self.others) or any(name in s.args for s in self.statements)


def is_scalar(op: OpDef) -> bool:
    """Whether an operator can be written as statements on one element of each input."""
    simple = op.fusion in (Fusion.ELEMENTWISE, Fusion.BROADCAST)
    return simple and (op.formula is not None or op.name in PRIMITIVES)


def trace_op(name: str, attrs: Mapping[str, Any]) -> Traced:
    """Trace an operator on floats; raise CannotLower if it has no formula."""
    return trace(lambda b, *given: b.call(name, *given, **attrs), table.get(name).inputs, {})


def trace_gradient(name: str, attrs: Mapping[str, Any]) -> Traced:
    """Trace the gradient of an operator of one input, as a function of ``g``, the gradient of its
    result, its input ``x`` and its result ``out``; :meth:`Traced.reads` says which it needs."""
    op = table.get(name)
    full = op.normalise(attrs)
    return trace(lambda b, g, x, out: op.pulled(b, 0, g, (x,), out, full), ("g", "x", "out"), {})


def trace(formula: Formula, inputs: Sequence[str], attrs: Mapping[str, Any]) -> Traced:
    """Trace ``formula(b, *inputs, **attrs)``, which returns a value or a tuple of them, on floats.
    Statements that no result depends on are left out."""
    scalars = Scalars()
    scalars.kinds = dict.fromkeys(inputs, "float")
    made = formula(ScalarOps(scalars), *[Scalar(scalars, name) for name in inputs], **attrs)
    result, *others = map(_arg, made if isinstance(made, tuple) else (made,))
    needed, kept = {result, *others}, []
    for s in reversed(scalars.statements):
        if s.name in needed:
            needed.update(s.args)
            kept.append(s)
    return Traced(tuple(inputs), tuple(reversed(kept)), result, tuple(others))


class _Tensors(Methods):
    """Every operator as its reference, on tensors and numbers."""

    def call(self, name: str, *args: Any, **attrs: Any) -> Any:
        op, tensors = table.get(name), [a for a in args if isinstance(a, torch.Tensor)]
        if not tensors:  # from numbers alone, a number
            numbers = (torch.tensor(a, dtype=torch.float64) for a in args)
            return op.reference(*numbers, **op.normalise(attrs)).item()
        # numbers take the type of a tensor, but not that of the bool condition of where
        like = next((t for t in tensors if t.dtype != torch.bool), tensors[0])
        given = (
            torch.tensor(a, device=like.device)
            if isinstance(a, bool)
            else like.new_full((), a)
            if isinstance(a, int | float)
            else a
            for a in args
        )
        return op.reference(*given, **op.normalise(attrs))

    def constant(self, data: torch.Tensor, name: str) -> torch.Tensor:
        return data

    def upcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(wide_type(x))


TENSORS = _Tensors()


# ---- gradients: a formula recorded, and walked backwards ----------------------------------------


class _Followed(Value):
    """A value of a formula whose steps are recorded."""

    __slots__ = ("tape", "value")

    def __init__(self, tape: _Tape, value: Any) -> None:
        self.tape, self.value = tape, value

    def apply(self, op: str, *args: Any) -> Any:
        return self.tape.call(op, *args)


class _Tape(Methods):
    """Records every operator that a formula applies, while ``b`` applies it."""

    def __init__(self, b: Any) -> None:
        self.b = b
        self.steps: list[tuple[str, tuple[Any, ...], dict[str, Any], _Followed]] = []

    def call(self, name: str, *args: Any, **attrs: Any) -> _Followed:
        made = _Followed(self, getattr(self.b, name)(*map(_plain, args), **attrs))
        self.steps.append((name, args, attrs, made))
        return made


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, _Followed) else value


def walked_back(
    b: Any, formula: Formula, grad: Any, inputs: Sequence[Any], attrs: Mapping[str, Any]
) -> list[Any]:
    """The gradients of the inputs of ``formula(b, *inputs, **attrs)``, given ``grad``, that of its
    result: by the chain rule, from the gradients of the operators that it is written with. None for
    an input without a gradient."""
    tape = _Tape(b)
    given = [_Followed(tape, value) for value in inputs]
    found: dict[int, Any] = {id(formula(tape, *given, **attrs)): grad}
    for name, args, own, made in reversed(tape.steps):
        g = found.get(id(made))
        if g is None:
            continue
        op = table.get(name)
        values = [_plain(a) for a in args]
        for i, a in enumerate(args):
            part = None
            if isinstance(a, _Followed):
                part = op.pulled(b, i, g, values, made.value, op.normalise(own))
            if part is not None:
                found[id(a)] = found[id(a)] + part if id(a) in found else part
    return [found.get(id(value)) for value in given]
