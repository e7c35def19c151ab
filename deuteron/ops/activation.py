"""Activations. Nan goes through as in PyTorch; gradients are computed in float32 at least."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, bool_, float32
from deuteron.ir.types import TensorType
from deuteron.ops.elementwise import ndtr
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.movement import lay, with_axis
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops
from deuteron.ops.samples import Arg, Sample, unary_samples

# rule(ops, grad, s, attrs) → the gradient of the input, where s is the input or the result.
Rule = Callable[[Ops, Sym, Sym, Mapping[str, Any]], Any]

_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _tanhshrink(x: torch.Tensor) -> torch.Tensor:
    """PyTorch's difference loses its digits near 0, where x and tanh x cancel. In float64, in which
    it has to be exact, the continued fraction of tanh takes over there."""
    if x.dtype != torch.float64:
        return F.tanhshrink(x)
    square, tail = x * x, torch.zeros_like(x)
    for odd in range(17, 3, -2):
        tail = square / (odd + tail)
    return torch.where(x.abs() < 1.0, x * square / (3.0 + square + tail), F.tanhshrink(x))


def _gelu_reference(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """PyTorch's own, but in float64, in which it has to be exact, with all its digits."""
    if x.dtype == torch.float64 and approximate == "none":
        return x * ndtr(x)
    if x.dtype == torch.float64:
        return x * torch.sigmoid(x * (x * x * 0.044715 + 1.0) * (2.0 * math.sqrt(2.0 / math.pi)))
    return F.gelu(x, approximate=approximate)


def _gelu(b: Ops, g: Sym, x: Sym, a: Mapping[str, Any]) -> Any:
    if a["approximate"] == "none":
        return g * (b.ndtr(x) + x * b.exp(b.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi)))
    k, c = math.sqrt(2.0 / math.pi), 0.044715
    square = b.square(x)
    s = b.sigmoid(x * (square * c + 1.0) * (2.0 * k))  # (1 + tanh u) / 2
    inner = (square * (3.0 * c) + 1.0) * (2.0 * k)
    # s first: far below 0 it is 0, and x · inner alone would overflow
    return g * (x * (s * (1.0 - s)) * inner + s)


def _silu(b: Ops, g: Sym, x: Sym, a: Mapping[str, Any]) -> Any:
    s = b.sigmoid(x)
    return g * s * (x * (1.0 - s) + 1.0)


def _mish(b: Ops, g: Sym, x: Sym, a: Mapping[str, Any]) -> Any:
    t = b.tanh(b.softplus(x))
    return g * (t + x * b.sigmoid(x) * (1.0 - b.square(t)))


def _hardswish(b: Ops, g: Sym, x: Sym, a: Mapping[str, Any]) -> Any:
    middle = b.where(b.le(x, -3.0), 0.0, g * (x * (1.0 / 3.0) + 0.5))
    return b.where(b.ge(x, 3.0), g, middle)


def _softplus(b: Ops, g: Sym, x: Sym, a: Mapping[str, Any]) -> Any:
    scaled = x * a["beta"]
    return b.where(b.gt(scaled, a["threshold"]), g, g * b.sigmoid(scaled))


def _between(b: Ops, g: Sym, x: Sym, low: float, high: float) -> Any:
    return b.where(b.logical_and(b.gt(x, low), b.lt(x, high)), g, 0.0)


def _beyond(b: Ops, g: Sym, x: Sym, a: Mapping[str, Any]) -> Any:
    return b.where(b.gt(b.abs(x), a["lambd"]), g, 0.0)


def _elu(b: Ops, g: Sym, x: Sym, above: float, below: float, rate: float = 1.0) -> Any:
    """The slope is ``above`` over 0, and below · e^(rate·x) under it. Over 0 the exponential is of
    0: of x it would overflow, and the derivative of this slope would be 0 · inf there."""
    over, positive = g if above == 1.0 else g * above, b.gt(x, 0.0)
    x = b.where(positive, 0.0, x)
    return b.where(positive, over, g * b.exp(x if rate == 1.0 else x * rate) * below)


def _log_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """torch forgets the memory order here, but only on the CPU."""
    return lay(F.logsigmoid(x), TensorType.from_tensor(x).dense_like())


_Row = tuple[str, Callable[..., torch.Tensor], str, Rule, float, str, Mapping[str, Attr], str]

_ALPHA = {"alpha": Attr("float", 1.0, "the depth of the negative side")}
_LAMBD = {"lambd": Attr("float", 0.5, "the half-width of the flat part, at least 0")}

_ACTIVATIONS: tuple[_Row, ...] = (
    # name, reference, what the gradient is found from (the input x or the result y), its rule,
    # operations per element, sample data, attributes, what it is
    (
        "relu",
        F.relu,
        "y",
        lambda b, g, y, a: b.where(b.le(y, 0.0), 0.0, g),
        1,
        "away",
        {},
        "max(x, 0)",
    ),
    (
        "relu6",
        F.relu6,
        "x",
        lambda b, g, x, a: _between(b, g, x, 0.0, 6.0),
        2,
        "away",
        {},
        "x held between 0 and 6",
    ),
    (
        "leaky_relu",
        F.leaky_relu,
        "x",
        lambda b, g, x, a: b.where(b.gt(x, 0.0), g, g * a["negative_slope"]),
        2,
        "away",
        {"negative_slope": Attr("float", 0.01, "the slope below 0")},
        "x, times a slope below 0",
    ),
    (
        "sigmoid",
        torch.sigmoid,
        "y",
        lambda b, g, y, a: g * y * (1.0 - y),
        10,
        "normal",
        {},
        "1 / (1 + e⁻ˣ)",
    ),
    (
        "tanh",
        torch.tanh,
        "y",
        lambda b, g, y, a: g * (1.0 - b.square(y)),
        12,
        "normal",
        {},
        "tanh x",
    ),
    (
        "gelu",
        _gelu_reference,
        "x",
        _gelu,
        16,
        "normal",
        {"approximate": Attr("str", "none", "how Φ is computed", choices=("none", "tanh"))},
        "x · Φ(x), with Φ the normal distribution or its tanh approximation",
    ),
    ("silu", F.silu, "x", _silu, 11, "normal", {}, "x · sigmoid(x)"),
    ("mish", F.mish, "x", _mish, 24, "normal", {}, "x · tanh(softplus(x))"),
    ("hardswish", F.hardswish, "x", _hardswish, 5, "normal", {}, "x · hardsigmoid(x)"),
    (
        "hardsigmoid",
        F.hardsigmoid,
        "x",
        lambda b, g, x, a: _between(b, g * (1.0 / 6.0), x, -3.0, 3.0),
        4,
        "normal",
        {},
        "x/6 + 1/2 held between 0 and 1",
    ),
    (
        "hardtanh",
        lambda x, min, max: F.hardtanh(x, min, max),
        "x",
        lambda b, g, x, a: _between(b, g, x, a["min"], a["max"]),
        2,
        "normal",
        {"min": Attr("float", -1.0, "lower bound"), "max": Attr("float", 1.0, "upper bound")},
        "x held between min and max",
    ),
    (
        "elu",
        F.elu,
        "x",
        lambda b, g, x, a: _elu(b, g, x, 1.0, a["alpha"]),
        10,
        "away",
        _ALPHA,
        "x, or alpha · (eˣ − 1) below 0",
    ),
    (
        "selu",
        F.selu,
        "x",
        lambda b, g, x, a: _elu(b, g, x, _SELU_SCALE, _SELU_ALPHA * _SELU_SCALE),
        11,
        "away",
        {},
        "elu with the two constants of self-normalising networks",
    ),
    (
        "celu",
        F.celu,
        "x",
        lambda b, g, x, a: _elu(b, g, x, 1.0, 1.0, 1.0 / a["alpha"]),
        11,
        "away",
        _ALPHA,
        "x, or alpha · (e^(x/alpha) − 1) below 0",
    ),
    (
        "softplus",
        F.softplus,
        "x",
        _softplus,
        18,
        "normal",
        {
            "beta": Attr("float", 1.0, "the sharpness, not 0"),
            "threshold": Attr("float", 20.0, "beyond this value of beta · x the result is x"),
        },
        "ln(1 + e^(beta·x)) / beta",
    ),
    (
        "softsign",
        F.softsign,
        "x",
        lambda b, g, x, a: g / b.square(b.abs(x) + 1.0),
        6,
        "away",
        {},
        "x / (1 + |x|)",
    ),
    (
        "log_sigmoid",
        _log_sigmoid,
        "x",
        lambda b, g, x, a: g * b.sigmoid(-x),
        18,
        "normal",
        {},
        "ln sigmoid(x)",
    ),
    (
        "tanhshrink",
        _tanhshrink,
        "x",
        lambda b, g, x, a: g * b.square(b.tanh(x)),
        13,
        "normal",
        {},
        "x − tanh x",
    ),
    (
        "softshrink",
        F.softshrink,
        "x",
        _beyond,
        3,
        "normal",
        _LAMBD,
        "x moved towards 0 by lambd, and 0 within it",
    ),
    ("hardshrink", F.hardshrink, "x", _beyond, 2, "normal", _LAMBD, "x, but 0 where |x| ≤ lambd"),
    (
        "threshold",
        F.threshold,
        "x",
        lambda b, g, x, a: b.where(b.le(x, a["threshold"]), 0.0, g),
        1,
        "normal",
        {
            "threshold": Attr("float", doc="the largest x that is replaced"),
            "value": Attr("float", doc="what stands in its place"),
        },
        "x, but value where x ≤ threshold",
    ),
)

_EXACT = {"relu", "relu6"}  # gradients that only select: nothing is rounded in 16 bits

# attribute → (what makes it bad, remedy)
_BAD: Mapping[tuple[str, str], tuple[Callable[[Mapping[str, float]], bool], str]] = {
    ("hardtanh", "min"): (lambda a: a["min"] > a["max"], "min must not be larger than max"),
    ("celu", "alpha"): (lambda a: a["alpha"] == 0, "alpha must not be 0"),
    ("softplus", "beta"): (lambda a: a["beta"] == 0, "beta must not be 0"),
    ("softshrink", "lambd"): (lambda a: a["lambd"] < 0, "lambd must be at least 0"),
}

_ON_INTEGERS: Mapping[str, Callable[[DType], DType]] = {
    "relu": lambda dt: dt,
    "sigmoid": lambda dt: float32,
    "tanh": lambda dt: float32,
}


def _only_float(name: str, dt: DType) -> DType:
    if dt.is_float:
        return dt
    if name in _ON_INTEGERS and (dt != bool_ or name != "relu"):
        return _ON_INTEGERS[name](dt)
    raise GraphError(f"{name} of {dt.name} is not defined", remedy='cast(x, dtype="f32") first')


def _infer(name: str) -> Callable[..., TensorType]:
    def infer(x: TensorType, **attrs: Any) -> TensorType:
        for (op, attr), (is_bad, remedy) in _BAD.items():
            if op == name and is_bad(attrs):
                raise GraphError(f"{name} with {attr}={attrs[attr]} is not defined", remedy=remedy)
        return x.dense_like(dt=_only_float(name, x.dtype))

    return infer


def _vjp(name: str, of: str, rule: Rule, b: Ops, v: Vjp) -> list[Sym | None]:
    grad, source = v.grad, v.arg(0) if of == "x" else v.outs[0]
    if name not in _EXACT:
        grad, source = b.upcast(grad), b.upcast(source)
    return [b.to(rule(b, grad, source, v.attrs), v.arg(0).dtype)]


_OTHER: Mapping[str, Sequence[Mapping[str, Any]]] = {  # attributes to try besides the defaults
    "leaky_relu": [{"negative_slope": -0.5}],
    "gelu": [{"approximate": "tanh"}],
    "hardtanh": [{"min": -0.3, "max": 0.4}],
    "elu": [{"alpha": 0.7}],
    "celu": [{"alpha": 0.7}],
    "softplus": [{"beta": 2.0, "threshold": 1.0}],
    "softshrink": [{"lambd": 0.0}],
    "hardshrink": [{"lambd": 1.0}],
    "threshold": [{"threshold": -0.2, "value": 3.0}],
}


def _samples(name: str, kind: str) -> tuple[Sample, ...]:
    usual: Mapping[str, Any] = {"threshold": 0.1, "value": -7.0} if name == "threshold" else {}
    other = [s for a in _OTHER.get(name, ()) for s in unary_samples(kind, a)[:2]]
    return (*unary_samples(kind, usual), *other)


UNARY = tuple(
    OpDef(
        name=name,
        doc=f"{doc}, elementwise.",
        inputs=("x",),
        attrs=attrs,
        infer=_infer(name),
        reference=fn,
        fusion=Fusion.ELEMENTWISE,
        vjp=partial(_vjp, name, of, rule),
        flops=elementwise_flops(flops),
        samples=partial(_samples, name, kind),
    )
    for name, fn, of, rule, flops, kind, attrs, doc in _ACTIVATIONS
)

# ---- prelu and glu -----------------------------------------------------------------------------


def _prelu_infer(x: TensorType, weight: TensorType) -> TensorType:
    channels = x.shape[1] if x.rank > 1 else 1
    if weight.rank > 1 or weight.numel not in (1, channels):
        raise GraphError(
            f"weight {list(weight.shape)} does not fit the {channels} channels of x "
            f"{list(x.shape)}",
            remedy=f"give it the shape [1] or [{channels}]",
        )
    if weight.dtype != x.dtype:
        raise GraphError(
            f"x is {x.dtype.name} and weight {weight.dtype.name}",
            remedy=f'cast(weight, dtype="{x.dtype.short}")',
        )
    return x.dense_like(dt=_only_float("prelu", x.dtype))


def _prelu_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    x, weight, grad = b.upcast(v.arg(0)), v.arg(1), b.upcast(v.grad)
    each = weight.shape != () and weight.shape != (1,)
    positive, grads = b.gt(x, 0.0), list[Sym | None]([None, None])
    if v.needs[0]:
        shape = (-1,) + (1,) * (x.rank - 2) if each else ()
        slope = b.reshape(b.upcast(weight), shape=shape)
        grads[0] = b.to(b.where(positive, grad, grad * slope), v.arg(0).dtype)
    if v.needs[1]:
        axes = tuple(d for d in range(x.rank) if d != 1 or not each)
        total = b.sum(b.where(positive, 0.0, grad * x), axes=axes if x.rank else None)
        grads[1] = b.to(b.reshape(total, shape=weight.shape), weight.dtype)
    return grads


PRELU = OpDef(
    name="prelu",
    doc="x, times a learned slope below 0; the slope is one number, or one per channel "
    "(dimension 1).",
    inputs=("x", "weight"),
    infer=_prelu_infer,
    reference=F.prelu,
    fusion=Fusion.BROADCAST,
    vjp=_prelu_vjp,
    flops=elementwise_flops(2),
    samples=lambda: tuple(
        Sample((Arg(shape, "away", layout=layout), Arg((count,))))
        for shape, layout, count in (
            ((3, 5), "contiguous", 5),
            ((3, 5), "contiguous", 1),
            ((), "contiguous", 1),
            ((7,), "contiguous", 1),
            ((0, 4), "contiguous", 4),
            ((2, 3, 4), "transposed", 3),
            ((4, 5), "sliced", 5),
            ((4, 5), "expanded", 1),
            ((2, 3, 4, 5), "nhwc", 3),
        )
    ),
)


def _glu_infer(x: TensorType, axis: int) -> TensorType:
    if x.shape[axis] % 2:
        raise GraphError(
            f"axis {axis} of x {list(x.shape)} cannot be halved", remedy="its size must be even"
        )
    shape = (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])
    dt = _only_float("glu", x.dtype)
    return TensorType(shape, dt, x.strides).dense_like()


def _glu_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    axis, grad = v.attrs["axis"], b.upcast(v.grad)
    half = v.outs[0].shape[axis]
    value = b.upcast(b.slice(v.arg(0), axis=axis, stop=half))
    gate = b.sigmoid(b.upcast(b.slice(v.arg(0), axis=axis, start=half)))
    through = grad * gate
    both = b.concat([through, through * value * (1.0 - gate)], axis=axis)
    return [b.to(both, v.arg(0).dtype)]


GLU = OpDef(
    name="glu",
    doc="The first half of x along an axis, times the sigmoid of the second half.",
    inputs=("x",),
    attrs={"axis": Attr("int", -1, "the axis to halve")},
    complete=with_axis,
    infer=_glu_infer,
    reference=lambda x, axis: F.glu(x, axis),
    fusion=Fusion.BROADCAST,
    vjp=_glu_vjp,
    flops=elementwise_flops(11),
    samples=lambda: tuple(
        Sample((Arg(shape, layout=layout),), {"axis": axis})
        for shape, layout, axis in (
            ((3, 6), "contiguous", -1),
            ((4, 3), "contiguous", 0),
            ((2,), "contiguous", 0),
            ((0, 4), "contiguous", 1),
            ((3, 0), "contiguous", 1),
            ((4, 6), "transposed", 0),
            ((4, 6), "sliced", 1),
            ((4, 6), "expanded", 1),
            ((2, 4, 3, 5), "nhwc", 1),
        )
    ),
)

OPS = (*UNARY, PRELU, GLU)
