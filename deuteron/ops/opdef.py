"""What an operator is: one frozen record that every other folder reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from inspect import signature
from operator import index
from typing import TYPE_CHECKING, Any

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, dtype, promote
from deuteron.ir.types import TensorType, view_strides
from deuteron.ops.samples import Sample, samples

if TYPE_CHECKING:
    from torch import Tensor

    from deuteron.ops.emit import Ops, Sym


class Fusion(StrEnum):
    """How an operator may be grouped with neighbours, by the rules in passes/fusion_rules.py."""

    ELEMENTWISE = "elementwise"  # one output element from the same element of each input
    BROADCAST = "broadcast"  # the same, after stretching inputs
    INJECTIVE = "injective"  # each output element is one input element, moved
    REDUCTION = "reduction"  # elements along some axes are combined
    COMPLEX = "complex"  # a product or convolution: its kernel may do elementwise work at the end
    OPAQUE = "opaque"  # runs alone


@dataclass(frozen=True, slots=True)
class Cost:
    """The least work an operator must do: arithmetic, and bytes through memory."""

    flops: float
    reads: int
    writes: int

    @property
    def bytes(self) -> int:
        return self.reads + self.writes


REQUIRED: Any = type("Required", (), {"__repr__": lambda self: "REQUIRED"})()


def _only(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds):
        raise TypeError
    return value


def _unless_text(value: Any) -> Any:
    if isinstance(value, str):
        raise TypeError
    return value


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    found = index(value)
    if not -(2**63) <= found < 2**63:
        raise OverflowError  # torch counts in 64 bits
    return found


def _plain(value: Any) -> Any:
    """A value that graph text can hold: numbers, strings, None, and tuples of these."""
    if isinstance(value, list | tuple):
        return tuple(_plain(v) for v in value)
    return _only(value, bool, int, float, str, type(None))


_KINDS: dict[str, Callable[[Any], Any]] = {
    "int": _int,
    "float": lambda v: float(_unless_text(v)),
    "ints": lambda v: tuple(map(_int, (v,) if isinstance(v, int) else _unless_text(v))),
    "bool": lambda v: _only(v, bool),
    "str": lambda v: _only(v, str),
    "dtype": lambda v: dtype(v).short,
    "any": _plain,
}


@dataclass(frozen=True, slots=True)
class Attr:
    """One attribute: ``kind`` is int, float, bool, str, dtype, ints, or any (a plain value).

    With ``default`` left at REQUIRED the caller must give it. None is accepted where the
    default is None.
    """

    kind: str
    default: Any = REQUIRED
    doc: str = ""
    choices: tuple[str, ...] = ()

    def coerce(self, name: str, value: Any) -> Any:
        """``value`` in its one canonical form, or a GraphError."""
        if value is None and self.default is None:
            return None
        try:
            out = _KINDS[self.kind](value)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, GraphError):
                raise
            fault = f"is not of kind {self.kind}"
            if isinstance(error, OverflowError):
                fault = "does not fit into 64 bits"
            wrong = f"attribute {name}={value!r} {fault}"
            raise GraphError(wrong, remedy=self.doc) from None
        if self.choices and out not in self.choices:
            wrong = f"attribute {name}={value!r} is not known"
            raise GraphError(wrong, remedy=f"use one of {', '.join(self.choices)}")
        return out


Given = TensorType | None  # the type of an input that may be left out
Types = Sequence[Any]  # the types of a node's inputs, None for an input left out
Attributes = Mapping[str, Any]
InferFn = Callable[..., "TensorType | tuple[TensorType, ...]"]
VjpFn = Callable[["Ops", "Vjp"], "Sequence[Sym | None]"]
CostFn = Callable[[Types, Sequence[TensorType], Attributes], float]
ImpliedFn = Callable[["Sequence[Tensor | None]", Attributes], "Mapping[int, Tensor]"]
ExpandFn = Callable[["Ops", "Sequence[Sym | None]", Attributes], "Sequence[Sym]"]
AgainFn = Callable[["Ops", "Sequence[Sym | None]", Attributes], "Sym"]
CompleteFn = Callable[[Types, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Vjp:
    """What a gradient rule sees: the forward node's handles and the gradients of its outputs.

    ``grads[i]`` is None when output ``i`` does not reach the loss. ``needs[i]`` says whether
    input ``i`` wants a gradient; a rule may return None for the others.
    """

    ins: tuple[Sym | None, ...]
    outs: tuple[Sym, ...]
    grads: tuple[Sym | None, ...]
    attrs: Mapping[str, Any]
    needs: tuple[bool, ...]

    @property
    def grad(self) -> Sym:
        """The gradient of the first output, which a rule with one output always has."""
        first = self.grads[0]
        assert first is not None
        return first

    def arg(self, index: int) -> Sym:
        """Input ``index``, which must be present."""
        value = self.ins[index]
        assert value is not None
        return value

    def has(self, index: int) -> bool:
        return index < len(self.ins) and self.ins[index] is not None


def elementwise_flops(per_element: float) -> CostFn:
    """Return a cost rule: ``per_element`` operations for each element of the first result."""
    return lambda ins, outs, attrs: per_element * outs[0].numel


def input_flops(per_element: float) -> CostFn:
    """Return a cost rule: ``per_element`` operations for each element of the first input."""
    return lambda ins, outs, attrs: per_element * ins[0].numel


_ONE_EACH = elementwise_flops(1)


@lru_cache(maxsize=1024)
def parameters(rule: Callable[..., Any]) -> tuple[str, ...]:
    """The names of what a gradient formula needs: its parameters after ``b`` and the gradient."""
    return tuple(signature(rule).parameters)[2:]


@dataclass(frozen=True)
class OpDef:
    """Everything an operator is.

    * ``inputs``: names in order; ``"bias?"`` may be left out, ``"*xs"`` stands for any number.
    * ``attrs``: name → :class:`Attr`. What changes numbers is an attribute, never a knob.
    * ``infer(*types, **attrs)``: the result type(s), or a GraphError.
    * ``reference(*tensors, **attrs)``: plain torch, right in float64; the ground truth.
    * ``formula(b, *inputs, **attrs)``: what an elementwise operator does to one element, written
      with other operators (``ops/formula.py``): generated code, epilogues and prices follow from
      it. ``gradients``: a formula for the gradient of each input, ``rule(b, g, …)``, whose other
      parameters name the inputs, attributes and ``out`` that it needs; left out, they follow from
      the formula.
    * ``vjp(ops, v)``: gradients for each input, emitted as nodes through ``ops``.
    * ``expand(ops, ins, attrs)``: the same results written with simpler operators, for machines
      where no kernel takes the operator whole (passes/expand.py), and to differentiate it.
    * ``again``: names of inputs, positions of results, and ``f(ops, these, attrs)``, which computes
      the first result again from these by elementwise work (passes/recompute.py).
    * ``flops``: arithmetic of the least-work algorithm; bytes follow from the types.
    * ``fusion``: its class. ``view``: torch may answer with a view of the first input.
    * ``complete(types, attrs)``: attributes made canonical where that takes the types: axes
      counted from 0, one stride per spatial dimension, no −1 in a shape. Applying it twice
      changes nothing.
    * ``implied(results, attrs)``: position → result, for results that follow exactly from other
      results of the same call, such as the signs of another: near 0 rounding decides, so they are
      compared with that one, not with float64. In ``results``, None was not asked for.
    * ``samples()``: cases for tests, fuzzing and benchmarks.
    """

    name: str
    doc: str
    inputs: tuple[str, ...]
    infer: InferFn
    reference: Callable[..., Any]
    fusion: Fusion
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    formula: Callable[..., Any] | None = None
    gradients: tuple[Callable[..., Any] | None, ...] | None = None
    vjp: VjpFn | None = None
    expand: ExpandFn | None = None
    again: tuple[tuple[str, ...], tuple[int, ...], AgainFn] | None = None
    flops: CostFn = _ONE_EACH
    samples: Callable[[], Sequence[Sample]] = tuple
    view: bool = False
    implied: ImpliedFn | None = None
    complete: CompleteFn | None = None

    @property
    def variadic(self) -> bool:
        return self.inputs[-1:] != () and self.inputs[-1].startswith("*")

    @property
    def required(self) -> int:
        """How many inputs must be given."""
        return sum(not name.endswith("?") and not name.startswith("*") for name in self.inputs)

    def shows(self, ins: Types, outs: Sequence[TensorType]) -> bool:
        """Whether the result is a view; a reshape has to copy if no strides over the same memory
        give its elements in the right order."""
        x = ins[0] if self.view and self.name == "reshape" else None
        copies = x is not None and view_strides(x.shape, x.strides, outs[0].shape) is None
        return self.view and not copies

    def cost(self, ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> Cost:
        """Operations, and bytes with each input read once and each result written once."""
        if self.shows(ins, outs):
            return Cost(0.0, 0, 0)
        reads = sum(t.nbytes for t in ins if t is not None)
        if self.name in GATHERING and ins[0] is not None:
            reads += min(0, outs[0].nbytes - ins[0].nbytes)
        return Cost(float(self.flops(ins, outs, attrs)), reads, sum(t.nbytes for t in outs))

    def pulled(self, b: Any, slot: int, grad: Any, ins: Types, out: Any, attrs: Attributes) -> Any:
        """The gradient of input ``slot``, given ``grad``, that of the result ``out``, as values of
        ``b``; a number if it is the same for all elements, None if there is no gradient."""
        from deuteron.ops.formula import walked_back

        if self.gradients is None:
            if self.formula is None:
                raise GraphError(f"{self.name} has no formula", remedy="give its OpDef one")
            return walked_back(b, self.formula, grad, ins, attrs)[slot]
        rule = self.gradients[slot] if self.gradients else None
        known = {**dict(zip(self.inputs, ins, strict=False)), "out": out, **attrs}
        return None if rule is None else rule(b, grad, **{n: known[n] for n in parameters(rule)})

    def normalise(self, attrs: Mapping[str, Any]) -> dict[str, Any]:
        """All attributes in schema order, defaults filled in, each in canonical form."""
        unknown = [name for name in attrs if name not in self.attrs]
        if unknown:
            known = ", ".join(self.attrs) or "none"
            wrong = f"{self.name} has no attribute {unknown[0]!r}"
            raise GraphError(wrong, remedy=f"its attributes: {known}")
        full = {}
        for name, attr in self.attrs.items():
            value = attrs.get(name, attr.default)
            if value is REQUIRED:
                wrong = f"{self.name} needs the attribute {name!r}"
                raise GraphError(wrong, remedy=attr.doc or f"{name}=…")
            full[name] = attr.coerce(name, value)
        return full

    def check_arity(self, count: int) -> None:
        if count < self.required or (count > len(self.inputs) and not self.variadic):
            wrong = f"{self.name} takes inputs ({', '.join(self.inputs)}), {count} given"
            remedy = "give them in this order; leave out only those marked '?'"
            raise GraphError(wrong, remedy=remedy)


Define = Callable[[InferFn], OpDef]


def operator(fusion: Fusion, reference: Any, inputs: str = "", **fields: Any) -> Define:
    """Decorator: define an operator from the function that infers the types of its results.

    The name (without a final ``_``, which avoids a name that Python uses), the description and the
    inputs come from the function: a parameter of type TensorType is an input, one of type Given an
    input that may be left out. ``inputs`` names them if the function does not; ``fields`` are other
    fields of OpDef. ``samples`` may be text (:func:`deuteron.ops.samples.samples`), or a function
    that yields them.
    """
    given = fields.pop("samples", tuple)
    cases = samples(given) if isinstance(given, str) else given

    def make(infer: InferFn) -> OpDef:
        slots, ends = inputs.split(), {"TensorType": "", "Given": "?"}
        for p in signature(infer).parameters.values() if not slots else ():
            if p.annotation in ends:
                star = "*" * (p.kind is p.VAR_POSITIONAL)
                slots.append(f"{star}{p.name}{ends[p.annotation]}")
        name, doc = infer.__name__.removesuffix("_"), " ".join((infer.__doc__ or "").split())
        fields["samples"] = lambda: tuple(cases())
        return OpDef(name, doc, tuple(slots), infer, reference, fusion, **fields)

    return make


# operators that read no more elements of their first input than they return
GATHERING = frozenset({"gather", "embedding", "index_select", "slice"})


def promoted(*types: TensorType | None) -> DType:
    """The element type of an elementwise result, by PyTorch's promotion rule."""
    return promote(*((t.dtype, t.rank) for t in types if t is not None))
