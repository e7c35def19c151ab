"""``weighted_pool`` gives every element of a window a weight; as mathematics it is a convolution in
which no channel sees another, and its gradients are those of the convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.conv import at_least, memory_order, ordered, per_dim, spatial_dims
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.matmul import one_dtype
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp
from deuteron.ops.pool import check_gradient
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
Types = Sequence[TensorType | None]
Attributes = Mapping[str, Any]
_GRAD = "weighted_pool_grad"


def _window(x: Any, weight: Any) -> Shape:
    """The sides of the window, of types, tensors or values of a graph."""
    return tuple(weight.shape[len(weight.shape) - (len(x.shape) - 2) :])


def _complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, weight = types[-2], types[-1]
    assert x is not None and weight is not None
    dims = spatial_dims("weighted_pool", x)
    if weight.rank not in (dims, dims + 1):
        raise GraphError(
            f"weighted_pool: weight {list(weight.shape)} does not fit {dims} spatial dimensions",
            remedy="give the window [kh, kw], or one for each channel [C, kh, kw]",
        )
    stride = attrs["stride"] or _window(x, weight)
    return {
        "stride": per_dim("weighted_pool", "stride", stride, dims),
        "padding": per_dim("weighted_pool", "padding", attrs["padding"], dims),
    }


def _infer(x: TensorType, weight: TensorType, stride: Shape, padding: Shape) -> TensorType:
    one_dtype("weighted_pool", x=x, weight=weight)
    window = _window(x, weight)
    at_least("weighted_pool", 1, stride=stride, window=window, shape_beside_batch=x.shape[1:])
    at_least("weighted_pool", 0, padding=padding)
    if weight.rank > len(window) and weight.shape[0] != x.shape[1]:
        raise GraphError(
            f"weighted_pool: weight {list(weight.shape)} has windows for {weight.shape[0]} "
            f"channels, x has {x.shape[1]}",
            remedy="give one window for each channel, or [kh, kw] for all",
        )
    sides = zip(x.shape[2:], window, stride, padding, strict=True)
    size = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in sides)
    if min(size) < 1:
        raise GraphError(
            f"weighted_pool: the window {list(window)} does not fit into x {list(x.shape)}",
            remedy="use a smaller window or more padding",
        )
    return TensorType.of((*x.shape[:2], *size), x.dtype, memory_order(x))


def _filters(x: Tensor, weight: Tensor) -> Tensor:
    """The weight as that of a convolution in which no channel sees another."""
    window = _window(x, weight)
    return weight.reshape(-1, 1, *window).expand(x.shape[1], 1, *window)


def _reference(x: Tensor, weight: Tensor, stride: Shape, padding: Shape) -> Tensor:
    dims, channels = x.ndim - 2, x.shape[1]
    how = (stride, padding, [1] * dims, False, [0] * dims, channels)
    y = torch.convolution(x, _filters(x, weight), None, *how)
    return ordered(y, memory_order(TensorType.from_tensor(x)))


def _vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    x, weight = v.arg(0), v.arg(1)
    dx, each = b.call(_GRAD, v.grad, x, weight, **v.attrs)
    if weight.rank < x.rank - 1:
        each = b.unbroadcast(b.upcast(each), weight.type)
    return [dx if v.needs[0] else None, each if v.needs[1] else None]


def _filter_syms(b: Ops, x: Sym, weight: Sym) -> Sym:
    window = _window(x, weight)
    flat: Sym = b.reshape(weight, (-1, 1, *window))
    return b.one("expand", flat, shape=(x.shape[1], 1, *window))


def _expand(b: Ops, ins: Sequence[Sym | None], attrs: Attributes) -> list[Sym]:
    x, weight = ins
    assert x is not None and weight is not None
    return [b.conv(x, _filter_syms(b, x, weight), None, groups=x.shape[1], **attrs)]


def _flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """A multiplication and an addition per element of each window, for every result."""
    y = outs[0] if len(outs) == 1 else ins[0]
    assert y is not None
    return 2.0 * len(outs) * y.numel * prod(_window(ins[-2], ins[-1]))


# ---- backward ------------------------------------------------------------------------------------


def _grad_infer(
    grad: TensorType, x: TensorType, weight: TensorType, stride: Shape, padding: Shape
) -> tuple[TensorType, TensorType]:
    one_dtype(_GRAD, grad=grad, x=x, weight=weight)
    check_gradient(_GRAD, grad, _infer(x, weight, stride, padding).shape)
    each = TensorType.of((x.shape[1], *_window(x, weight)), x.dtype)
    return TensorType.of(x.shape, x.dtype, memory_order(x)), each


def _grad_reference(
    grad: Tensor, x: Tensor, weight: Tensor, stride: Shape, padding: Shape
) -> tuple[Tensor, Tensor]:
    dims, channels = x.ndim - 2, x.shape[1]
    how = (stride, padding, [1] * dims, False, [0] * dims, channels, [True, True, False])
    dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, _filters(x, weight), None, *how)
    each = dw.reshape(channels, *_window(x, weight)).contiguous()
    return ordered(dx, memory_order(TensorType.from_tensor(x))), each


def _grad_expand(b: Ops, ins: Sequence[Sym | None], attrs: Attributes) -> list[Sym]:
    """As the gradients of a convolution in which no channel sees another."""
    grad, x, weight = ins
    assert grad is not None and x is not None and weight is not None
    filters, how = _filter_syms(b, x, weight), {**attrs, "groups": x.shape[1]}
    dx = b.conv_dx(grad, filters, shape=x.shape, **how)
    dw = b.conv_dw(grad, x, shape=filters.shape, **how)
    return [dx, b.reshape(dw, (x.shape[1], *filters.shape[2:]))]


# ---- samples and records -------------------------------------------------------------------------

_ATTRS = {
    "stride": Attr("ints", None, "steps between windows; None means the window"),
    "padding": Attr("ints", (0,), "zeros added on both sides"),
}
_SAMPLES = (
    Sample((Arg((2, 3, 6, 5)), Arg((2, 2)))),
    Sample((Arg((2, 3, 6, 5), layout="nhwc"), Arg((3, 3, 2))), {"stride": 1, "padding": 1}),
    Sample((Arg((1, 2, 5, 5), layout="sliced"), Arg((3, 3))), {"stride": 2, "padding": 1}),
    Sample((Arg((2, 3, 8)), Arg((3, 3)))),
    Sample((Arg((1, 2, 3, 4, 3)), Arg((2, 2, 2))), {"stride": 1}),
    Sample((Arg((0, 3, 4, 4)), Arg((2, 2))), note="empty"),
)
# the shape of each result
_SHAPES = (2, 3, 3, 2), (2, 3, 6, 6), (1, 2, 3, 3), (2, 3, 2), (1, 2, 2, 3, 2), (0, 3, 2, 2)

WEIGHTED = OpDef(
    name="weighted_pool",
    doc="The sum of each window of x [N, C, ...], its elements times a weight: one window "
    "[kh, kw] for all channels, or [C, kh, kw]. Weights that add up to 1 give a weighted mean.",
    inputs=("x", "weight"),
    attrs=_ATTRS,
    complete=_complete,
    infer=_infer,
    reference=_reference,
    fusion=Fusion.OPAQUE,
    vjp=_vjp,
    expand=_expand,
    flops=_flops,
    samples=lambda: _SAMPLES,
)
WEIGHTED_GRAD = replace(
    WEIGHTED,
    name=_GRAD,
    doc="The gradients of weighted_pool: for x, and for the weight of each channel [C, kh, kw].",
    inputs=("grad", "x", "weight"),
    infer=_grad_infer,
    reference=_grad_reference,
    vjp=None,
    expand=_grad_expand,
    samples=lambda: [
        Sample((Arg(shape), *s.inputs), s.attrs, note=s.note)
        for s, shape in zip(_SAMPLES, _SHAPES, strict=True)
    ],
)

OPS = (WEIGHTED, WEIGHTED_GRAD)
