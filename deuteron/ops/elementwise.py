"""Elementwise operators, defined by formulas: one result element from the same element of each
input.

Types promote as in PyTorch; shapes broadcast; the result keeps the memory order of the first
input that has the full shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from inspect import Parameter, signature
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, bool_, float32
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.checks import broadcast
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.formula import TENSORS, Formula, trace_op
from deuteron.ops.opdef import REQUIRED, Attr, Fusion, OpDef, Vjp, parameters, promoted
from deuteron.ops.samples import Sample, unary_samples

Result = Callable[..., DType]
Gradient = Callable[..., Any] | Sequence[Callable[..., Any] | None] | None


def floats(name: str, *types: TensorType) -> DType:
    """The promoted type if it is a float; anything else is an error."""
    dt = promoted(*types)
    if dt.is_float:
        return dt
    raise GraphError(f"{name} of {dt.name} is not defined", remedy='cast(x, dtype="f32") first')


def made_float(name: str, *types: TensorType) -> DType:
    """Integers and booleans become float32 in functions that only make sense on reals."""
    dt = promoted(*types)
    return dt if dt.is_float else float32


def numbers(name: str, *types: TensorType) -> DType:
    """The promoted type of any numbers; booleans are an error."""
    dt = promoted(*types)
    if dt == bool_:
        raise GraphError(f"{name} of bool is not defined", remedy='cast(x, dtype="u8") first')
    return dt


def anything(name: str, *types: TensorType) -> DType:
    return promoted(*types)


def truth(name: str, *types: TensorType) -> DType:
    return bool_


def result_type(dt: DType, *types: TensorType | None) -> TensorType:
    """The broadcast result over ``types`` in element type ``dt``."""
    present = [t for t in types if t is not None]
    shape = broadcast(*(t.shape for t in present))
    whole = [t for t in present if t.shape == shape]
    ordered = (t for t in whole if 0 not in t.strides)  # stride 0: no order of its own
    like = next(ordered, next((t for t in whole if 0 not in t.strides[:1]), present[0]))
    return like.dense_like(shape, dt)


def elementwise(
    *,
    rules: Mapping[str, Callable[..., bool]] | None = None,
    gradient: Gradient = None,
    reference: Callable[..., torch.Tensor] | None = None,
    result: Result = floats,
    samples: str | Callable[[], Sequence[Sample]] = "normal",
    tried: Sequence[Mapping[str, Any]] = ({},),
    wide: bool = True,
) -> Callable[..., OpDef]:
    """Define an operator from a formula for one element, made from one element of each input.

    >>> @dt.elementwise(rules={"use cap above 0": lambda cap: cap > 0})
    ... def softcap(b, x, cap: float = 30.0):
    ...     \"""x held between −cap and cap without a corner\"""
    ...     return b.tanh(x / cap) * cap
    >>> dt.register_op(softcap)

    The name, the description, the inputs and the attributes (parameters that have a type) come from
    the function; :mod:`deuteron.ops.formula` says what its body may use.

    rules      remedy → a function that says whether the attributes that it names make sense
    gradient   ``gradient(b, g, …)``: the gradient of an input, where g is that of the result. Its
               other parameters name what it needs: inputs, attributes and ``out``, the result. A
               sequence has one function for each input, None for an input without a gradient. Left
               out: the gradient is derived from the formula
    reference  plain torch, right in float64. Left out: the formula, in float32 at least
    result     the element type of the result: a function of the operator's name and the inputs'
               types. Left out: floats keep their type, and everything else is refused
    samples    data for the tests ("normal", "positive", … as in ``dt.Arg``), or a function that
               returns samples; ``tried``: attributes to try them with
    wide       whether gradients of 16-bit numbers are computed in float32
    """

    cases = partial(_cases, samples, tried) if isinstance(samples, str) else samples
    several = gradient is None or isinstance(gradient, Sequence)

    def make(formula: Formula | None, name: str = "", doc: str = "", inputs: str = "") -> OpDef:
        """Name, description and inputs are passed in if ``formula`` is None (a primitive, which
        every code generator knows by its name) or does not tell them (a lambda)."""
        attrs: dict[str, Attr] = {}
        slots = tuple(inputs.split())
        if formula is not None and not name:
            name, given = formula.__name__, list(signature(formula).parameters.values())[1:]
            attrs = {p.name: _attr(p) for p in given if p.annotation not in (p.empty, "Any", Any)}
            slots = tuple(p.name for p in given if p.name not in attrs)
            doc = (formula.__doc__ or name).rstrip(".")

        def infer(*types: TensorType, **given: Any) -> TensorType:
            for remedy, holds in (rules or {}).items():
                asked = signature(holds).parameters
                if not holds(**{key: given[key] for key in asked}):
                    shown = ", ".join(f"{key}={given[key]}" for key in asked)
                    raise GraphError(f"{name} with {shown} is not defined", remedy=remedy)
            dt = result(name, *types)
            return types[0].dense_like(dt=dt) if len(types) == 1 else result_type(dt, *types)

        return OpDef(
            name=name,
            doc=f"{doc}, elementwise{' with broadcasting' * (len(slots) > 1)}.",
            inputs=slots,
            attrs=attrs,
            infer=infer,
            reference=reference or _by_formula(formula),
            fusion=Fusion.BROADCAST if len(slots) > 1 else Fusion.ELEMENTWISE,
            formula=formula,
            gradients=gradient if several else (gradient,),  # type: ignore[arg-type]
            vjp=lambda b, v: _vjp(table.get(name), b, v, wide),
            flops=lambda ins, outs, given: outs[0].numel * _flops(name, tuple(given.items())),
            samples=cases,
        )

    return make


def _attr(p: Parameter) -> Attr:
    """Make an attribute of a parameter: ``cap: float = 30.0``, or one whose default is an Attr."""
    if isinstance(p.default, Attr):
        return p.default
    kind = p.annotation if isinstance(p.annotation, str) else p.annotation.__name__
    return Attr(kind.removesuffix(" | None"), REQUIRED if p.default is p.empty else p.default)


def _cases(kind: str, tried: Sequence[Mapping[str, Any]]) -> Sequence[Sample]:
    rest = (s for given in tried[1:] for s in unary_samples(kind, given)[:2])
    return (*unary_samples(kind, tried[0]), *rest)


def _by_formula(formula: Formula | None) -> Callable[..., torch.Tensor]:
    """The formula as a reference: in float32 where tensors have 16 bits."""
    assert formula is not None, "an operator without a formula needs a reference"

    def reference(*tensors: torch.Tensor, **attrs: Any) -> torch.Tensor:
        low = [t.dtype for t in tensors if t.is_floating_point() and t.dtype.itemsize < 4]
        given = [t.float() if t.dtype in low else t for t in tensors]
        out: torch.Tensor = formula(TENSORS, *given, **attrs)
        return out.to(low[0]) if low and out.dtype == torch.float32 else out

    return reference


@lru_cache
def _flops(name: str, attrs: tuple[tuple[str, Any], ...]) -> float:
    return trace_op(name, dict(attrs)).flops


def _vjp(op: OpDef, b: Ops, v: Vjp, wide: bool) -> list[Sym | None]:
    def widened(s: Sym) -> Sym:
        return b.upcast(s) if wide else s

    grad, found = widened(v.grad), list[Sym | None]()
    asked = op.gradients
    for i, need in enumerate(v.needs):
        rule = asked[i] if asked else None
        if not need or (asked is not None and rule is None):
            found.append(None)
            continue
        # widen only what a rule asks for: a cast of anything else would look as if it were read
        reads = op.inputs if rule is None else parameters(rule)
        ins = [widened(v.arg(k)) if n in reads else v.arg(k) for k, n in enumerate(op.inputs)]
        out = widened(v.outs[0]) if "out" in reads else v.outs[0]
        part = op.pulled(b, i, grad, ins, out, v.attrs)
        like = v.arg(i).type
        found.append(b.unbroadcast(part, like) if isinstance(part, Sym) else b.zeros(like))
    return found
