"""``weighted_pool`` gives every tap of a window a weight; as mathematics it is a convolution in
which no channel sees another, and its gradients are those of the convolution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.conv import at_least, memory_order, ordered, per_dim, spatial_dims
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.matmul import one_dtype
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
Types = Sequence[TensorType | None]
Attributes = Mapping[str, Any]

_WINDOW = {
    "stride": Attr("ints", None, "steps between windows; None means the window"),
    "padding": Attr("ints", (0,), "zeros added on both sides"),
}


def _weighted_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, weight = types[0], types[1]
    assert x is not None and weight is not None
    dims = spatial_dims("weighted_pool", x)
    if weight.rank not in (dims, dims + 1):
        raise GraphError(
            f"weighted_pool: weight {list(weight.shape)} does not fit {dims} spatial dimensions",
            remedy="give the window [kh, kw], or one for each channel [C, kh, kw]",
        )
    stride = attrs["stride"] or weight.shape[weight.rank - dims :]
    return {
        "stride": per_dim("weighted_pool", "stride", stride, dims),
        "padding": per_dim("weighted_pool", "padding", attrs["padding"], dims),
    }


def _weighted_infer(x: TensorType, weight: TensorType, stride: Shape, padding: Shape) -> TensorType:
    one_dtype("weighted_pool", x=x, weight=weight)
    dims = x.rank - 2
    window = weight.shape[weight.rank - dims :]
    at_least("weighted_pool", 1, stride=stride, window=window, shape_beside_batch=x.shape[1:])
    at_least("weighted_pool", 0, padding=padding)
    if weight.rank > dims and weight.shape[0] != x.shape[1]:
        raise GraphError(
            f"weighted_pool: weight {list(weight.shape)} has windows for {weight.shape[0]} "
            f"channels, x has {x.shape[1]}",
            remedy="give one window for each channel, or [kh, kw] for all",
        )
    rows = zip(x.shape[2:], window, stride, padding, strict=True)
    size = tuple((n + 2 * p - k) // s + 1 for n, k, s, p in rows)
    if min(size) < 1:
        raise GraphError(
            f"weighted_pool: the window {list(window)} does not fit into x {list(x.shape)}",
            remedy="use a smaller window or more padding",
        )
    return TensorType.of((*x.shape[:2], *size), x.dtype, memory_order(x))


def _weighted_reference(x: Tensor, weight: Tensor, stride: Shape, padding: Shape) -> Tensor:
    dims, channels = x.ndim - 2, x.shape[1]
    window = weight.shape[weight.ndim - dims :]
    taps = weight.reshape(-1, 1, *window).expand(channels, 1, *window)
    none = [0] * dims
    y = torch.convolution(x, taps, None, stride, padding, [1] * dims, False, none, channels)
    return ordered(y, memory_order(TensorType.from_tensor(x)))


def _weighted_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    x, weight, channels = v.arg(0), v.arg(1), v.arg(0).shape[1]
    dims = x.rank - 2
    window = weight.shape[weight.rank - dims :]
    how = {**v.attrs, "groups": channels}
    dx = dw = None
    if v.needs[0]:
        taps = b.reshape(weight, (-1, 1, *window))
        full = b.expand(taps, (channels, 1, *window))
        dx = b.conv_dx(v.grad, full, shape=x.shape, **how)
    if v.needs[1]:
        each = b.conv_dw(v.grad, x, shape=(channels, 1, *window), **how)
        each = b.reshape(each, (channels, *window))
        dw = b.unbroadcast(b.upcast(each), weight.type) if weight.rank == dims else each
    return [dx, dw]


def _weighted_flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    x, weight = ins[0], ins[1]
    assert x is not None and weight is not None
    return 2.0 * outs[0].numel * prod(weight.shape[weight.rank - (x.rank - 2) :])


WEIGHTED = OpDef(
    name="weighted_pool",
    doc="The sum of each window of x [N, C, ...], its elements times a weight: one window "
    "[kh, kw] for all channels, or [C, kh, kw]. Weights that add up to 1 give a weighted mean.",
    inputs=("x", "weight"),
    attrs=_WINDOW,
    complete=_weighted_complete,
    infer=_weighted_infer,
    reference=_weighted_reference,
    fusion=Fusion.OPAQUE,
    vjp=_weighted_vjp,
    flops=_weighted_flops,
    samples=lambda: (
        Sample((Arg((2, 3, 6, 5)), Arg((2, 2)))),
        Sample((Arg((2, 3, 6, 5), layout="nhwc"), Arg((3, 3, 2))), {"stride": 1, "padding": 1}),
        Sample((Arg((1, 2, 5, 5), layout="sliced"), Arg((3, 3))), {"stride": 2, "padding": 1}),
        Sample((Arg((2, 3, 8)), Arg((3, 3)))),
        Sample((Arg((1, 2, 3, 4, 3)), Arg((2, 2, 2))), {"stride": 1}),
        Sample((Arg((0, 3, 4, 4)), Arg((2, 2))), note="empty"),
    ),
)

OPS = (WEIGHTED,)
