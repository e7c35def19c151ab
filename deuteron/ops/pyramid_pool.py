"""Spatial-pyramid pooling: an image covered by grids of several sizes at once.

A cell of a grid of s cells per side spans ⌊i·n / s⌋ … ⌈(i + 1)·n / s⌉ of each side, as adaptive
pooling has it; cells overlap where s does not divide n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops import table
from deuteron.ops.conv import at_least, memory_order, ordered, spatial_dims
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.matmul import one_dtype
from deuteron.ops.opdef import REQUIRED, Attr, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
Types = Sequence[TensorType | None]
Attributes = Mapping[str, Any]

_POOLS: dict[tuple[str, int], Callable[..., Tensor]] = {
    ("avg", 1): torch.nn.functional.adaptive_avg_pool1d,
    ("avg", 2): torch.nn.functional.adaptive_avg_pool2d,
    ("avg", 3): torch.nn.functional.adaptive_avg_pool3d,
    ("max", 1): torch.nn.functional.adaptive_max_pool1d,
    ("max", 2): torch.nn.functional.adaptive_max_pool2d,
    ("max", 3): torch.nn.functional.adaptive_max_pool3d,
}


def _cells(op: str, shape: Shape, sizes: Shape) -> int:
    """How many cells all grids have together."""
    at_least(op, 1, sizes=sizes, shape_beside_batch=shape[1:])
    if not sizes:
        raise GraphError(f"{op} without sizes", remedy="e.g. sizes=(1, 2, 3, 6)")
    return sum(int(s ** (len(shape) - 2)) for s in sizes)


# ---- forward -------------------------------------------------------------------------------------


def _infer(x: TensorType, sizes: Shape, kind: str) -> TensorType:
    one_dtype("pyramid_pool", x=x)
    spatial_dims("pyramid_pool", x)
    return TensorType.of((*x.shape[:2], _cells("pyramid_pool", x.shape, sizes)), x.dtype)


def _reference(x: Tensor, sizes: Shape, kind: str) -> Tensor:
    pool = _POOLS[kind, x.ndim - 2]
    return torch.cat([pool(x, size).flatten(2) for size in sizes], 2)


def _vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    x = v.arg(0)
    kept = x if v.attrs["kind"] == "max" else None
    order = memory_order(x.type)
    return [b.pyramid_pool_grad(v.grad, kept, shape=x.shape, order=order, **v.attrs)]


def _flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """Every grid looks at every element once; overlaps are not counted."""
    x = outs[0].shape if "shape" in attrs else () if ins[0] is None else ins[0].shape
    return float(len(attrs["sizes"]) * prod(x))


_ATTRS = {
    "sizes": Attr("ints", (1, 2, 3, 6), "cells per side of each grid"),
    "kind": Attr("str", "avg", "mean or maximum of a cell", ("avg", "max")),
}
_SAMPLES = (
    Sample((Arg((2, 3, 7, 5)),)),
    Sample((Arg((1, 2, 6, 6), "distinct", layout="nhwc"),), {"kind": "max", "sizes": (1, 2)}),
    Sample((Arg((2, 3, 5, 4), layout="sliced"),), {"sizes": (2,)}),
    Sample((Arg((1, 2, 4, 5), "distinct", layout="transposed"),), {"kind": "max"}),
    Sample((Arg((2, 3, 7)),), {"sizes": (1, 3)}),
    Sample((Arg((2, 3, 3)),), {"sizes": (7, 2), "kind": "avg"}),
    Sample((Arg((1, 2, 3, 4, 3)),), {"sizes": (1, 2)}),
    Sample((Arg((0, 3, 4, 4)),), {"sizes": (1, 2)}, note="empty"),
)

PYRAMID = OpDef(
    name="pyramid_pool",
    doc="x [N, C, ...] pooled over grids of several sizes, one result after another: [N, C, Σ sᵈ].",
    inputs=("x",),
    attrs=_ATTRS,
    infer=_infer,
    reference=_reference,
    fusion=Fusion.OPAQUE,
    vjp=_vjp,
    flops=_flops,
    samples=lambda: (
        *_SAMPLES,
        Sample((Arg((2, 3, 5, 7), "extreme"),), {"kind": "max"}, grad=False, note="extreme"),
    ),
)

# ---- backward ------------------------------------------------------------------------------------

_GRAD = "pyramid_pool_grad"


def _grad_infer(
    grad: TensorType, x: TensorType | None, shape: Shape, order: str, sizes: Shape, kind: str
) -> TensorType:
    if len(shape) not in (3, 4, 5):
        raise GraphError(f"{_GRAD}: shape {list(shape)} is not [N, C, ...]", remedy="x's shape")
    if (x is None) != (kind == "avg") or (x is not None and x.shape != shape):
        raise GraphError(
            f"{_GRAD} with kind={kind!r} and {'no x' if x is None else f'x {list(x.shape)}'}",
            remedy=f"a maximum needs x {list(shape)}, to find the winners; a mean does not",
        )
    one_dtype(_GRAD, grad=grad, x=grad if x is None else x)
    expected = (*shape[:2], _cells(_GRAD, shape, sizes))
    if grad.shape != expected:
        raise GraphError(
            f"{_GRAD}: the gradient is {list(grad.shape)}, the forward result {list(expected)}",
            remedy="use the shape and attributes of the forward operator",
        )
    return TensorType.of(shape, grad.dtype, order)


def _grids(shape: Shape, sizes: Shape) -> list[tuple[int, Shape]]:
    """Where each grid begins among the cells, and its sides."""
    found, begin = [], 0
    for size in sizes:
        grid = (size,) * (len(shape) - 2)
        found.append((begin, grid))
        begin += prod(grid)
    return found


def _grad_reference(
    grad: Tensor, x: Tensor | None, shape: Shape, order: str, sizes: Shape, kind: str
) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(shape, dtype=wide)
    for begin, grid in _grids(shape, sizes):
        part = grad[..., begin : begin + prod(grid)].reshape(*shape[:2], *grid).to(wide)
        if x is None:
            total += table.get("adaptive_avg_pool_grad").reference(part, shape=shape)
        else:
            total += table.get("adaptive_max_pool_grad").reference(part, x.to(wide), size=grid)
    return ordered(total.to(grad.dtype), order)


def _grad_expand(b: Ops, ins: Sequence[Sym | None], attrs: Attributes) -> list[Sym]:
    """Each grid sends its part back as its adaptive pool would; the parts are added up."""
    grad, x = ins
    assert grad is not None
    shape, total = attrs["shape"], None
    for begin, grid in _grids(shape, attrs["sizes"]):
        part = b.slice(grad, axis=2, start=begin, stop=begin + prod(grid))
        part = b.reshape(part, (*shape[:2], *grid))
        if x is not None:
            back = b.adaptive_max_pool_grad(part, x, size=grid)
        else:
            back = b.adaptive_avg_pool_grad(part, shape=shape)
        back = b.upcast(back)
        total = back if total is None else total + back
    assert total is not None
    return [b.to_layout(b.to(total, grad.dtype), attrs["order"])]


def _grad_samples() -> list[Sample]:
    found = []
    for s in _SAMPLES:
        (x,) = s.inputs
        assert x is not None
        attrs = {"sizes": (1, 2, 3, 6), "kind": "avg", **s.attrs}
        cells = sum(prod(grid) for _, grid in _grids(x.shape, attrs["sizes"]))
        order = "nhwc" if x.layout == "nhwc" else "contiguous"
        kept = x if attrs["kind"] == "max" else None
        attrs |= {"shape": x.shape, "order": order}
        found.append(Sample((Arg((*x.shape[:2], cells)), kept), attrs, note=s.note))
    return found


PYRAMID_GRAD = OpDef(
    name=_GRAD,
    doc="The gradient of pyramid_pool: each cell's is shared out evenly, or goes to its winner.",
    inputs=("grad", "x?"),
    attrs={
        "shape": Attr("ints", REQUIRED, "the shape of x, whose gradient this is"),
        "order": Attr("str", "contiguous", "memory order of the result", ("contiguous", "nhwc")),
        **_ATTRS,
    },
    infer=_grad_infer,
    reference=_grad_reference,
    fusion=Fusion.OPAQUE,
    expand=_grad_expand,
    flops=_flops,
    samples=_grad_samples,
)

OPS = (PYRAMID, PYRAMID_GRAD)
