"""Activations. Nan propagates as in PyTorch; gradients are computed in float32 at least."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.types import TensorType
from deuteron.ops.arithmetic import ndtr
from deuteron.ops.elementwise import elementwise, floats, made_float
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.formula import TENSORS, Formula
from deuteron.ops.movement import with_axis
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops, operator
from deuteron.ops.reference import lay


def as_in_torch(**how: Any) -> Callable[[Formula], OpDef]:
    """Decorator: an elementwise operator with torch's function of the same name as reference."""
    return lambda formula: elementwise(reference=getattr(F, formula.__name__), **how)(formula)


# ---- held within bounds ---------------------------------------------------------------------


def _inside(b: Any, g: Any, x: Any, low: float, high: float) -> Any:
    """Return g where low < x < high, else 0. Where x is nan the gradient passes, as in torch."""
    return b.where(b.logical_or(x <= low, x >= high), 0.0, g)


@as_in_torch(
    gradient=lambda b, g, out: b.where(out <= 0.0, 0.0, g),
    # relu of integers has the same integer type
    result=lambda name, x: floats(name, x) if x.dtype.kind in ("float", "bool") else x.dtype,
    samples="away",
    wide=False,  # the gradient only picks values and rounds nothing
)
def relu(b: Any, x: Any) -> Any:
    """max(x, 0)"""
    return b.maximum(x, 0.0)


@as_in_torch(gradient=lambda b, g, out: _inside(b, g, out, 0.0, 6.0), samples="away", wide=False)
def relu6(b: Any, x: Any) -> Any:
    """x held between 0 and 6"""
    return b.clamp(x, min=0.0, max=6.0)


@elementwise(
    reference=lambda x, min, max: F.hardtanh(x, min, max),
    gradient=lambda b, g, x, min, max: _inside(b, g, x, min, max),
    rules={"min must not be larger than max": lambda min, max: min <= max},
    tried=({}, {"min": -0.3, "max": 0.4}),
)
def hardtanh(b: Any, x: Any, min: float = -1.0, max: float = 1.0) -> Any:
    """x held between min and max"""
    return b.clamp(x, min=min, max=max)


def _held_gradient(b: Any, g: Any, out: Any, min: float | None, max: float | None) -> Any:
    if min is not None and max is not None:
        return _inside(b, g, out, min, max)
    return b.where(out <= min if max is None else out >= max, 0.0, g)


@elementwise(
    gradient=_held_gradient,
    rules={"give min, max or both": lambda min, max: min is not None or max is not None},
    samples="away",
    tried=({"min": -0.03, "max": 0.04}, {"min": 0.0}, {"max": 0.0}),
    wide=False,
)
def clamp_nan(b: Any, x: Any, min: float | None = None, max: float | None = None) -> Any:
    """x held between min and max, nan as well: it becomes min, or max if that is the only bound"""
    x = x if min is None else b.where(x > min, x, min)
    return x if max is None else b.where(x < max, x, max)


@as_in_torch(gradient=lambda b, g, x: b.where(b.abs(x) < 3.0, g * (1.0 / 6.0), 0.0))
def hardsigmoid(b: Any, x: Any) -> Any:
    """x/6 + 1/2 held between 0 and 1"""
    return b.clamp(x + 3.0, min=0.0, max=6.0) * (1.0 / 6.0)  # a division takes ten times as long


def _hardswish_gradient(b: Any, g: Any, x: Any) -> Any:
    return b.where(x >= 3.0, g, b.where(x <= -3.0, 0.0, g * (x * (1.0 / 3.0) + 0.5)))


@as_in_torch(gradient=_hardswish_gradient)
def hardswish(b: Any, x: Any) -> Any:
    """x · hardsigmoid(x)"""
    return x * b.hardsigmoid(x)


# ---- two branches ---------------------------------------------------------------------------


def _leaky_gradient(b: Any, g: Any, x: Any, out: Any, negative_slope: float) -> Any:
    """Tell the sign of x by the result, unless the slope is negative or 0: then read x itself."""
    sign = out if negative_slope > 0.0 else x
    return b.where(sign > 0.0, g, g * negative_slope)


@as_in_torch(gradient=_leaky_gradient, samples="away", tried=({}, {"negative_slope": -0.5}))
def leaky_relu(b: Any, x: Any, negative_slope: float = 0.01) -> Any:
    """x, or x times negative_slope where x is below 0"""
    return b.where(x > 0.0, x, x * negative_slope)


def _exponential(b: Any, x: Any, alpha: float, scale: float = 1.0, rate: float = 1.0) -> Any:
    below = b.expm1(x if rate == 1.0 else x * rate) * (alpha * scale)
    return b.where(x > 0.0, x if scale == 1.0 else x * scale, below)


def _slope(b: Any, g: Any, x: Any, above: float, below: float, rate: float = 1.0) -> Any:
    """Return g times the slope, which is ``above`` for x > 0, else below · e^(rate·x). For x > 0 we
    take the exponential of 0 instead: that of x could overflow, and the derivative of this slope
    would be 0 · inf there."""
    over, positive = g if above == 1.0 else g * above, x > 0.0
    x = b.where(positive, 0.0, x)
    return b.where(positive, over, g * b.exp(x if rate == 1.0 else x * rate) * below)


_BY_ALPHA: Any = {"samples": "away", "tried": ({}, {"alpha": 0.7})}


@as_in_torch(gradient=lambda b, g, x, alpha: _slope(b, g, x, 1.0, alpha), **_BY_ALPHA)
def elu(b: Any, x: Any, alpha: float = 1.0) -> Any:
    """x, or alpha · (eˣ − 1) below 0"""
    return _exponential(b, x, alpha)


_ALPHA, _SCALE = 1.6732632423543772, 1.0507009873554805  # of selu


@as_in_torch(gradient=lambda b, g, x: _slope(b, g, x, _SCALE, _ALPHA * _SCALE), samples="away")
def selu(b: Any, x: Any) -> Any:
    """elu with the two constants of self-normalising networks"""
    return _exponential(b, x, _ALPHA, _SCALE)


@as_in_torch(
    gradient=lambda b, g, x, alpha: _slope(b, g, x, 1.0, 1.0, 1.0 / alpha),
    rules={"alpha must not be 0": lambda alpha: alpha != 0},
    **_BY_ALPHA,
)
def celu(b: Any, x: Any, alpha: float = 1.0) -> Any:
    """x, or alpha · (e^(x/alpha) − 1) below 0"""
    return _exponential(b, x, alpha, rate=1.0 / alpha)


def _beyond(b: Any, g: Any, x: Any, lambd: float) -> Any:
    return b.where(b.abs(x) > lambd, g, 0.0)


@as_in_torch(
    gradient=_beyond,
    rules={"lambd must be at least 0": lambda lambd: lambd >= 0},
    tried=({}, {"lambd": 0.0}),
)
def softshrink(b: Any, x: Any, lambd: float = 0.5) -> Any:
    """x moved towards 0 by lambd, and 0 where |x| ≤ lambd"""
    rest = b.where(b.ne(x, x), x, 0.0)  # nan stays nan
    return b.where(x > lambd, x - lambd, b.where(x < -lambd, x + lambd, rest))


@as_in_torch(gradient=_beyond, tried=({}, {"lambd": 1.0}))
def hardshrink(b: Any, x: Any, lambd: float = 0.5) -> Any:
    """x, but 0 where |x| ≤ lambd"""
    keep = b.logical_or(x > lambd, x < -lambd)
    return b.where(b.logical_or(keep, b.ne(x, x)), x, 0.0)


@as_in_torch(
    gradient=lambda b, g, x, threshold: b.where(x <= threshold, 0.0, g),
    tried=({"threshold": 0.1, "value": -7.0}, {"threshold": -0.2, "value": 3.0}),
)
def threshold(b: Any, x: Any, threshold: float, value: float) -> Any:
    """x, but value where x ≤ threshold"""
    return b.where(x <= threshold, value, x)


# ---- smooth ones ----------------------------------------------------------------------------


@as_in_torch(gradient=lambda b, g, out: g * out * (1.0 - out), result=made_float)
def sigmoid(b: Any, x: Any) -> Any:
    """1 / (1 + e⁻ˣ)"""
    return 1.0 / (1.0 + b.exp(-x))


@as_in_torch(gradient=lambda b, g, out: g * (1.0 - b.square(out)), result=made_float)
def tanh(b: Any, x: Any) -> Any:
    """tanh x"""
    return b.primitive("tanh", x)


def _silu_gradient(b: Any, g: Any, x: Any) -> Any:
    s = b.sigmoid(x)
    return g * s * (x * (1.0 - s) + 1.0)


@as_in_torch(gradient=_silu_gradient)
def silu(b: Any, x: Any) -> Any:
    """x · sigmoid(x)"""
    return x * b.sigmoid(x)


_TANH_SCALE, _TANH_CUBE = 2.0 * math.sqrt(2.0 / math.pi), 0.044715


def _gelu_gradient(b: Any, g: Any, x: Any, approximate: str) -> Any:
    if approximate == "none":
        return g * (b.ndtr(x) + x * b.exp(b.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi)))
    square = b.square(x)
    s = b.sigmoid(x * (square * _TANH_CUBE + 1.0) * _TANH_SCALE)
    inner = (square * (3.0 * _TANH_CUBE) + 1.0) * _TANH_SCALE
    # multiply x by s · (1 − s) first: far below 0 that is 0, while x · inner alone would overflow
    return g * (x * (s * (1.0 - s)) * inner + s)


def _gelu_torch(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """PyTorch's gelu. In float64, where the reference has to be exact, torch's loses digits, so
    there we write it out."""
    if x.dtype == torch.float64 and approximate == "none":
        return x * ndtr(x)
    if x.dtype == torch.float64:
        return x * torch.sigmoid(x * (x * x * _TANH_CUBE + 1.0) * _TANH_SCALE)
    return F.gelu(x, approximate=approximate)


_APPROXIMATE: Any = Attr("str", "none", "how Φ is computed", ("none", "tanh"))


@elementwise(reference=_gelu_torch, gradient=_gelu_gradient, tried=({}, {"approximate": "tanh"}))
def gelu(b: Any, x: Any, approximate: str = _APPROXIMATE) -> Any:
    """x · Φ(x), with Φ the normal distribution or its tanh approximation"""
    if approximate == "none":
        return x * b.ndtr(x)
    # (1 + tanh u) / 2 is sigmoid(2u), in which nothing cancels
    return x * b.sigmoid((x + x * x * x * _TANH_CUBE) * _TANH_SCALE)


def _softplus_gradient(b: Any, g: Any, x: Any, beta: float, threshold: float) -> Any:
    scaled = x * beta
    return b.where(scaled > threshold, g, g * b.sigmoid(scaled))


@as_in_torch(
    gradient=_softplus_gradient,
    rules={"beta must not be 0": lambda beta: beta != 0},
    tried=({}, {"beta": 2.0, "threshold": 1.0}),
)
def softplus(b: Any, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    """ln(1 + e^(beta·x)) / beta, and x itself where beta · x is over threshold"""
    scaled = x if beta == 1.0 else x * beta
    # ln(1 + eᵗ) without overflow
    soft = b.maximum(scaled, 0.0) + b.log1p(b.exp(-b.abs(scaled)))
    return b.where(scaled > threshold, x, soft if beta == 1.0 else soft / beta)


def _log_sigmoid_reference(x: torch.Tensor) -> torch.Tensor:
    """F.logsigmoid in the memory order of x, which torch forgets here, but only on the CPU."""
    return lay(F.logsigmoid(x), TensorType.from_tensor(x).dense_like())


@elementwise(reference=_log_sigmoid_reference, gradient=lambda b, g, x: g * b.sigmoid(-x))
def log_sigmoid(b: Any, x: Any) -> Any:
    """ln sigmoid(x)"""
    return b.minimum(x, 0.0) - b.log1p(b.exp(-b.abs(x)))


def _mish_gradient(b: Any, g: Any, x: Any) -> Any:
    t = b.tanh(b.softplus(x))
    return g * (t + x * b.sigmoid(x) * (1.0 - b.square(t)))


@as_in_torch(gradient=_mish_gradient)
def mish(b: Any, x: Any) -> Any:
    """x · tanh(softplus(x))"""
    return x * b.tanh(b.softplus(x))


@as_in_torch(gradient=lambda b, g, x: g / b.square(b.abs(x) + 1.0), samples="away")
def softsign(b: Any, x: Any) -> Any:
    """x / (1 + |x|)"""
    return x / (1.0 + b.abs(x))


def _tanhshrink(b: Any, x: Any) -> Any:
    """x − tanh x. Near 0 the two cancel; there it is x³ / (3 + x² + x² / (5 + x² / (7 + …))), from
    the continued fraction of tanh: all its terms are positive, and those after 17 are below
    float64's last bit."""
    square = x * x
    tail = square / 17.0
    for odd in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0):
        tail = square / (odd + tail)
    return b.where(b.abs(x) < 1.0, x * square / (3.0 + square + tail), x - b.tanh(x))


@elementwise(
    reference=lambda x: F.tanhshrink(x) if x.dtype != torch.float64 else _tanhshrink(TENSORS, x),
    gradient=lambda b, g, x: g * b.square(b.tanh(x)),
)
def tanhshrink(b: Any, x: Any) -> Any:
    """x − tanh x"""
    return _tanhshrink(b, x)


# ---- prelu and glu -----------------------------------------------------------------------------


def _prelu_vjp(b: Ops, v: Vjp) -> Grads:
    x, weight, grad = b.upcast(v.arg(0)), v.arg(1), b.upcast(v.grad)
    each = weight.shape != () and weight.shape != (1,)
    positive, grads = b.gt(x, 0.0), Grads([None, None])
    if v.needs[0]:
        shape = (-1,) + (1,) * (x.rank - 2) if each else ()
        slope = b.reshape(b.upcast(weight), shape=shape)
        grads[0] = b.to(b.where(positive, grad, grad * slope), v.arg(0).dtype)
    if v.needs[1]:
        axes = tuple(d for d in range(x.rank) if d != 1 or not each)
        total = b.sum(b.where(positive, 0.0, grad * x), axes=axes if x.rank else None)
        grads[1] = b.to(b.reshape(total, shape=weight.shape), weight.dtype)
    return grads


@operator(
    Fusion.BROADCAST,
    F.prelu,
    vjp=_prelu_vjp,
    flops=elementwise_flops(2),
    samples=""":away; 3x5 5:normal | 3x5 1:normal | scalar 1:normal | 7 1:normal | 0x4 4:normal
        | 2x3x4@transposed 3:normal | 4x5@sliced 5:normal | 4x5@expanded 1:normal
        | 2x3x4x5@nhwc 3:normal""",
)
def prelu(x: TensorType, weight: TensorType) -> TensorType:
    """x, or x times a learned slope, weight, where x is below 0. The slope is one number, or one
    per channel (dimension 1)."""
    channels = x.shape[1] if x.rank > 1 else 1
    if weight.rank > 1 or weight.numel not in (1, channels):
        wrong = f"weight {list(weight.shape)} does not fit {channels} channels of x {list(x.shape)}"
        raise GraphError(wrong, remedy=f"give it the shape [1] or [{channels}]")
    if weight.dtype != x.dtype:
        wrong = f"x is {x.dtype.name} and weight {weight.dtype.name}"
        raise GraphError(wrong, remedy=f'cast(weight, dtype="{x.dtype.short}")')
    return x.dense_like(dt=floats("prelu", x))


def _glu_vjp(b: Ops, v: Vjp) -> Grads:
    axis, grad = v.attrs["axis"], b.upcast(v.grad)
    half = v.outs[0].shape[axis]
    value = b.upcast(b.slice(v.arg(0), axis=axis, stop=half))
    gate = b.sigmoid(b.upcast(b.slice(v.arg(0), axis=axis, start=half)))
    through = grad * gate
    return [b.to(b.concat([through, through * value * (1.0 - gate)], axis=axis), v.arg(0).dtype)]


@operator(
    Fusion.BROADCAST,
    lambda x, axis: F.glu(x, axis),
    attrs={"axis": Attr("int", -1, "the axis to halve")},
    complete=with_axis,
    vjp=_glu_vjp,
    flops=elementwise_flops(11),
    samples="""3x6 axis=-1 | 4x3 axis=0 | 2 axis=0 | 0x4 axis=1 | 3x0 axis=1 | 4x6@transposed axis=0
        | 4x6@sliced axis=1 | 4x6@expanded axis=1 | 2x4x3x5@nhwc axis=1""",
)
def glu(x: TensorType, axis: int) -> TensorType:
    """The first half of x along an axis, times the sigmoid of the second half."""
    if x.shape[axis] % 2:
        wrong = f"axis {axis} of x {list(x.shape)} cannot be halved"
        raise GraphError(wrong, remedy="its size must be even")
    shape = (*x.shape[:axis], x.shape[axis] // 2, *x.shape[axis + 1 :])
    return TensorType(shape, floats("glu", x), x.strides).dense_like()
