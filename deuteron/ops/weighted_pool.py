"""``weighted_pool`` gives every element of a window a weight. Mathematically it is a depthwise
convolution, and its gradients are those of that convolution:

    y[n, c, o] = Σ w[c, t] · x[n, c, o·stride − padding + t]
    dx[n, c, i] = Σ w[c, t] · g[n, c, (i + padding − t) / stride], over t that divide
    dw[c, t] = Σ g[n, c, o] · x[n, c, o·stride − padding + t]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import at_least, check_grad, one_dtype, per_dim, spatial_dims
from deuteron.ops.conv import memory_order, ordered
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.formula import TENSORS
from deuteron.ops.movement import NHWC, ROW
from deuteron.ops.opdef import Attr, Attributes, Define, Fusion, Types, Vjp, operator
from deuteron.ops.pool import ORDER_OF_X, SHAPE_OF_X
from deuteron.ops.samples import Sample, samples


def _window(rank: int, weight: Any) -> Shape:
    """The sides of the window for an x of this rank; the weight is a type, a tensor or a Sym."""
    return tuple(weight.shape[len(weight.shape) - (rank - 2) :])


def _complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, weight = types[0], types[1]
    dims = spatial_dims("weighted_pool", x)
    if "window" not in attrs and weight.rank not in (dims, dims + 1):
        wrong = f"weighted_pool: weight {list(weight.shape)} does not fit {dims} spatial dimensions"
        remedy = "give the window [kh, kw], or one for each channel [C, kh, kw]"
        raise GraphError(wrong, remedy=remedy)
    window = attrs["window"] if "window" in attrs else _window(x.rank, weight)
    return attrs | {
        "stride": per_dim("weighted_pool", "stride", attrs["stride"] or window, dims),
        "padding": per_dim("weighted_pool", "padding", attrs["padding"], dims),
    }


def _infer(x: TensorType, weight: TensorType, stride: Shape, padding: Shape) -> TensorType:
    one_dtype("weighted_pool", x=x, weight=weight)
    window = _window(x.rank, weight)
    at_least("weighted_pool", 1, stride=stride, window=window, shape_beside_batch=x.shape[1:])
    at_least("weighted_pool", 0, padding=padding)
    if weight.rank > len(window) and weight.shape[0] != x.shape[1]:
        there = f"weight {list(weight.shape)} has windows for {weight.shape[0]} channels"
        remedy = "give one window for each channel, or [kh, kw] for all"
        raise GraphError(f"weighted_pool: {there}, x has {x.shape[1]}", remedy=remedy)
    sides = zip(x.shape[2:], window, stride, padding, strict=True)
    size = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sides)
    if min(size) < 1:
        wrong = f"weighted_pool: the window {list(window)} does not fit into x {list(x.shape)}"
        raise GraphError(wrong, remedy="use a smaller window or more padding")
    return TensorType.of((*x.shape[:2], *size), x.dtype, memory_order(x))


def _filters(b: Any, x: Shape, weight: Any) -> Any:
    """The weight as that of a depthwise convolution, for a tensor or for a value of the graph that
    ``b`` writes."""
    window = _window(len(x), weight)
    return b.expand(b.reshape(weight, shape=(-1, 1, *window)), shape=(x[1], 1, *window))


def _pooled(b: Any, ins: Syms, how: Attributes) -> Any:
    x, weight = ins
    return b.conv(x, _filters(b, x.shape, weight), None, groups=x.shape[1], **how)


def _reference(x: Tensor, weight: Tensor, **how: Shape) -> Tensor:
    return ordered(_pooled(TENSORS, (x, weight), how), memory_order(TensorType.from_tensor(x)))


def _vjp(b: Ops, v: Vjp) -> Grads:
    x, weight, found = v.arg(0), v.arg(1), Grads([None, None])
    if v.needs[0]:
        like = {"shape": x.shape, "order": memory_order(x.type)}
        found[0] = b.weighted_pool_dx(v.grad, weight, **like, **v.attrs)
    if v.needs[1]:
        window = _window(x.rank, weight)
        parts = b.call("weighted_pool_dw", v.grad, x, window=window, **v.attrs)
        columns = [b.reshape(p, (-1, 1)) for p in (parts if isinstance(parts, tuple) else [parts])]
        each = b.reshape(b.concat(columns, axis=1), (x.shape[1], *window))
        found[1] = b.unbroadcast(b.upcast(each), weight.type)
    return found


def _flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """A multiplication and an addition per element of each window."""
    y, weight = ins[0] if {"shape", "window"} & attrs.keys() else outs[0], ins[1]
    return 2.0 * y.numel * prod(attrs["window"] if "window" in attrs else _window(y.rank, weight))


def _check_rank(op: str, grad: TensorType, rank: int) -> None:
    if grad.rank != rank:
        wrong = f"{op}: the gradient has rank {grad.rank}, x has {rank}"
        raise GraphError(wrong, remedy="give the gradient of what weighted_pool returned")


# ---- gradients -----------------------------------------------------------------------------------


def _dx(b: Any, ins: Syms, shape: Shape, how: Attributes) -> Any:
    grad, weight = ins
    return b.conv_dx(grad, _filters(b, shape, weight), groups=shape[1], shape=shape, **how)


def _dx_reference(*ins: Tensor, shape: Shape, order: str, **how: Shape) -> Tensor:
    return ordered(_dx(TENSORS, ins, shape, how), order)


def _dx_expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    how = dict(attrs)
    order, shape = how.pop("order"), how.pop("shape")
    return [b.to_layout(_dx(b, ins, shape, how), order)]


def _dw(b: Any, ins: Syms, window: Shape, how: Attributes) -> Any:
    grad, x = ins
    channels = x.shape[1]
    dw = b.conv_dw(grad, x, shape=(channels, 1, *window), groups=channels, **how)
    return b.reshape(dw, shape=(channels, prod(window)))


def _dw_reference(*ins: Tensor, window: Shape, **how: Shape) -> tuple[Tensor, ...]:
    return tuple(part.contiguous() for part in _dw(TENSORS, ins, window, how).unbind(1))


def _dw_expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    how = dict(attrs)
    window = how.pop("window")
    flat = _dw(b, ins, window, how)
    columns = [b.slice(flat, axis=1, start=i, stop=i + 1) for i in range(prod(window))]
    return [b.reshape(column, flat.shape[:1]) for column in columns]


# ---- samples and operators -----------------------------------------------------------------------

_ATTRS = {
    "stride": Attr("ints", None, "steps between windows; None means the window"),
    "padding": Attr("ints", (0,), "zeros added on both sides"),
}
_CASES = samples(  # x, weight and result
    """2x3x6x5 2x2 2x3x3x2 | 2x3x6x5@nhwc 3x3x2 2x3x6x6 stride=1 padding=1
    | 1x2x5x5@sliced 3x3 1x2x3x3 stride=2 padding=1 | 2x3x8 3x3 2x3x2
    | 1x2x3x4x3 2x2x2 1x2x2x3x2 stride=1 | 2x3x4x4 1x1 2x3x4x4 | 0x3x4x4 2x2 0x3x2x2 [empty]"""
)


def _samples(op: str) -> Iterator[Sample]:
    for s in _CASES():
        x, weight, y = s.args
        if op == "weighted_pool":
            yield replace(s, inputs=(x, weight))
        elif op == "weighted_pool_dx":
            like = {"shape": x.shape, "order": NHWC if x.layout == NHWC else ROW}
            yield replace(s, inputs=(y, weight), attrs={**like, **s.attrs})
        else:
            window = {"window": _window(len(x.shape), weight)}
            yield replace(s, inputs=(y, x), attrs={**window, **s.attrs})


def _weighing(
    op: str, fusion: Fusion, reference: Any, expand: Any, vjp: Any = None, **attrs: Attr
) -> Define:
    made = partial(operator, fusion, reference, complete=_complete, vjp=vjp, expand=expand)
    return made(attrs=attrs | _ATTRS, flops=_flops, samples=partial(_samples, op))


@_weighing("weighted_pool", Fusion.OPAQUE, _reference, lambda *given: [_pooled(*given)], _vjp)
def weighted_pool(x: TensorType, weight: TensorType, stride: Shape, padding: Shape) -> TensorType:
    """The sum of each window of x [N, C, ...], its elements times a weight: one window
    [kh, kw] for all channels, or [C, kh, kw]. Weights that add up to 1 give a weighted mean."""
    return _infer(x, weight, stride, padding)


_OF_X = {"shape": SHAPE_OF_X, "order": ORDER_OF_X}


@_weighing("weighted_pool_dx", Fusion.OPAQUE, _dx_reference, _dx_expand, **_OF_X)
def weighted_pool_dx(
    grad: TensorType, weight: TensorType, shape: Shape, order: str, **windows: Shape
) -> TensorType:
    """The gradient of weighted_pool for x."""
    one_dtype("weighted_pool_dx", grad=grad, weight=weight)
    _check_rank("weighted_pool_dx", grad, len(shape))
    x = TensorType.of(shape, grad.dtype, order)
    check_grad("weighted_pool_dx", grad, _infer(x, weight, **windows).shape)
    return x


_SIDES = Attr("ints", doc="the sides of the window")


@_weighing("weighted_pool_dw", Fusion.REDUCTION, _dw_reference, _dw_expand, window=_SIDES)
def weighted_pool_dw(
    grad: TensorType, x: TensorType, window: Shape, **windows: Shape
) -> tuple[TensorType, ...]:
    """The gradient of weighted_pool for the weight of each channel: a vector [C] for every
    element of the window, in its order."""
    one_dtype("weighted_pool_dw", grad=grad, x=x)
    _check_rank("weighted_pool_dw", grad, x.rank)
    window = per_dim("weighted_pool_dw", "window", window, x.rank - 2)
    y = _infer(x, TensorType.of(window, x.dtype), **windows)
    check_grad("weighted_pool_dw", grad, y.shape)
    return (TensorType.of(x.shape[1:2], x.dtype),) * prod(window)
