"""Spatial-pyramid pooling: an image covered by grids of several sizes at once.

A cell of a grid of s cells per side spans ⌊i·n / s⌋ … ⌈(i + 1)·n / s⌉ of each side, as adaptive
pooling has it; cells overlap where s does not divide n.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import at_least, one_dtype, spatial_dims
from deuteron.ops.conv import memory_order
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.opdef import Attr, Attributes, Fusion, Vjp, operator


def _grids(shape: Shape, sizes: Shape) -> Iterator[tuple[int, int, Shape]]:
    """Yield where each grid begins and ends in the list of all cells, and its sides."""
    begin = 0
    for size in sizes:
        grid = (size,) * (len(shape) - 2)
        yield begin, begin + prod(grid), grid
        begin += prod(grid)


def _reference(x: Tensor, sizes: Shape, kind: str) -> Tensor:
    pool = getattr(torch.nn.functional, f"adaptive_{kind}_pool{x.ndim - 2}d")
    return torch.cat([pool(x, size).flatten(2) for size in sizes], 2)


def _expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    """Adaptive pools, finest first. A grid whose cells consist of cells of a finer grid, all of the
    same size, is pooled from that one, in float32 at least, and not from x."""
    (x,), sizes, kind = ins, attrs["sizes"], attrs["kind"]
    found: dict[int, Sym] = {}
    for size in sorted(set(sizes), reverse=True):
        even = [s for s in sizes if not any(n % s for n in x.shape[2:])]
        finer = [s for s in found if s in even and s % size == 0]
        is_read = size in even and any(size % s == 0 for s in sizes if s != size)
        source = found[min(finer)] if finer else b.upcast(x) if is_read and kind == "avg" else x
        found[size] = b.one(f"adaptive_{kind}_pool", source, size=size)
    parts = [b.to(b.reshape(found[s], (*x.shape[:2], s ** (x.rank - 2))), x.dtype) for s in sizes]
    return [b.concat(parts, axis=2) if len(parts) > 1 else b.to_layout(parts[0], "contiguous")]


def _vjp(b: Ops, v: Vjp) -> Grads:
    """Each grid sends its part back as its adaptive pool would; the parts are added up."""
    x, total = v.arg(0), None
    for begin, end, grid in _grids(x.shape, v.attrs["sizes"]):
        part = b.slice(v.grad, axis=2, start=begin, stop=end)
        part = b.to_layout(b.reshape(part, (*x.shape[:2], *grid)), memory_order(x.type))
        if v.attrs["kind"] == "max":
            back = b.adaptive_max_pool_grad(part, x, size=grid)
        else:
            back = b.adaptive_avg_pool_grad(part, shape=x.shape)
        total = b.upcast(back) if total is None else total + b.upcast(back)
    assert total is not None
    return [b.to(total, x.dtype)]


@operator(
    Fusion.OPAQUE,
    _reference,
    attrs={
        "sizes": Attr("ints", (1, 2, 3, 6), "cells per side of each grid"),
        "kind": Attr("str", "avg", "mean or maximum of a cell", ("avg", "max")),
    },
    vjp=_vjp,
    expand=_expand,
    # every grid looks at every element once; overlaps are not counted
    flops=lambda ins, outs, attrs: float(len(attrs["sizes"]) * ins[0].numel),
    samples="""2x3x7x5 | 1x2x6x6@nhwc:distinct kind=max sizes=(1,2) | 2x3x5x4@sliced sizes=(2,)
        | 1x2x4x5@transposed:distinct kind=max | 2x3x7 sizes=(1,3) | 2x3x3 sizes=(7,2) kind=avg
        | 1x2x3x4x3 sizes=(1,2) | 0x3x4x4 sizes=(1,2) [empty]
        | 2x3x5x7:extreme kind=max nograd [extreme]""",
)
def pyramid_pool(x: TensorType, sizes: Shape, kind: str) -> TensorType:
    """x [N, C, ...] pooled over grids of several sizes, one result after another: [N, C, Σ sᵈ]."""
    one_dtype("pyramid_pool", x=x)
    spatial_dims("pyramid_pool", x)
    at_least("pyramid_pool", 1, sizes=sizes, shape_beside_batch=x.shape[1:])
    if not sizes:
        raise GraphError("pyramid_pool without sizes", remedy="e.g. sizes=(1, 2, 3, 6)")
    cells = sum(prod(grid) for _, _, grid in _grids(x.shape, sizes))
    return TensorType.of((*x.shape[:2], cells), x.dtype)
