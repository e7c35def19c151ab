"""Spatial-pyramid pooling: an image covered by grids of several sizes at once.

A cell of a grid of s cells per side spans ⌊i·n / s⌋ … ⌈(i + 1)·n / s⌉ of each side, as adaptive
pooling has it; cells overlap where s does not divide n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops import table
from deuteron.ops.conv import at_least, memory_order, ordered, spatial_dims
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.matmul import one_dtype
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp
from deuteron.ops.pool import ORDER_OF_X, SHAPE_OF_X, check_gradient
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
Types = Sequence[TensorType | None]
Attributes = Mapping[str, Any]
_GRAD = "pyramid_pool_grad"


def _grids(shape: Shape, sizes: Shape) -> Iterator[tuple[int, int, Shape]]:
    """Where each grid begins and ends among the cells, and its sides."""
    begin = 0
    for size in sizes:
        grid = (size,) * (len(shape) - 2)
        yield begin, begin + prod(grid), grid
        begin += prod(grid)


def _result(op: str, shape: Shape, sizes: Shape) -> Shape:
    """The shape of the pool of ``shape``."""
    at_least(op, 1, sizes=sizes, shape_beside_batch=shape[1:])
    if not sizes:
        raise GraphError(f"{op} without sizes", remedy="e.g. sizes=(1, 2, 3, 6)")
    return (*shape[:2], sum(prod(grid) for _, _, grid in _grids(shape, sizes)))


def _infer(x: TensorType, sizes: Shape, kind: str) -> TensorType:
    one_dtype("pyramid_pool", x=x)
    spatial_dims("pyramid_pool", x)
    return TensorType.of(_result("pyramid_pool", x.shape, sizes), x.dtype)


def _reference(x: Tensor, sizes: Shape, kind: str) -> Tensor:
    pool = getattr(torch.nn.functional, f"adaptive_{kind}_pool{x.ndim - 2}d")
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


# ---- backward ------------------------------------------------------------------------------------


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
    check_gradient(_GRAD, grad, _result(_GRAD, shape, sizes))
    return TensorType.of(shape, grad.dtype, order)


def _grad_reference(
    grad: Tensor, x: Tensor | None, shape: Shape, order: str, sizes: Shape, kind: str
) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(shape, dtype=wide)
    for begin, end, grid in _grids(shape, sizes):
        part = grad[..., begin:end].reshape(*shape[:2], *grid).to(wide)
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
    for begin, end, grid in _grids(shape, attrs["sizes"]):
        part = b.reshape(b.slice(grad, axis=2, start=begin, stop=end), (*shape[:2], *grid))
        if x is not None:
            back = b.upcast(b.adaptive_max_pool_grad(part, x, size=grid))
        else:
            back = b.upcast(b.adaptive_avg_pool_grad(part, shape=shape))
        total = back if total is None else total + back
    assert total is not None
    return [b.to_layout(b.to(total, grad.dtype), attrs["order"])]


# ---- samples and records -------------------------------------------------------------------------

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
_EXTREME = Sample((Arg((2, 3, 5, 7), "extreme"),), {"kind": "max"}, grad=False, note="extreme")


def _grad_samples() -> list[Sample]:
    found = []
    for s in _SAMPLES:
        (x,) = s.inputs
        assert x is not None
        attrs = {"sizes": (1, 2, 3, 6), "kind": "avg", "shape": x.shape, **s.attrs}
        attrs["order"] = "nhwc" if x.layout == "nhwc" else "contiguous"
        grad = Arg((*x.shape[:2], sum(prod(g) for _, _, g in _grids(x.shape, attrs["sizes"]))))
        found.append(Sample((grad, x if attrs["kind"] == "max" else None), attrs, note=s.note))
    return found


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
    samples=lambda: (*_SAMPLES, _EXTREME),
)
PYRAMID_GRAD = replace(
    PYRAMID,
    name=_GRAD,
    doc="The gradient of pyramid_pool: each cell's is shared out evenly, or goes to its winner.",
    inputs=("grad", "x?"),
    attrs={"shape": SHAPE_OF_X, "order": ORDER_OF_X, **_ATTRS},
    infer=_grad_infer,
    reference=_grad_reference,
    vjp=None,
    expand=_grad_expand,
    samples=_grad_samples,
)

OPS = (PYRAMID, PYRAMID_GRAD)
