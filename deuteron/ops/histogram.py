"""Histograms: how many elements lie in each of several equal ranges, or the sum of their weights.

Counting on a GPU has a kernel of our own; for everything else we call torch. Sums are always taken
in the same order, so that two runs agree to the last bit.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import dtype, int64
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_shape
from deuteron.ops.elementwise import floats, numbers
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.formula import TENSORS
from deuteron.ops.opdef import Attr, Fusion, Given, Vjp, input_flops, operator
from deuteron.ops.reference import fixed_order


def _bins_of(b: Any, x: Any, bins: int, low: float, high: float) -> tuple[Any, Any]:
    """The bin of each element, as torch.histc finds it, and whether it lies in any."""
    wide = x if dtype(x.dtype).short in ("f32", "f64") else b.cast(x, dtype="f64")
    place = b.floor((wide - low) * float(bins) / (high - low))
    place = b.clamp(place, min=0.0, max=bins - 1.0)
    return place, b.logical_and(wide >= low, wide <= high)


def _histogram_reference(x: Tensor, weight: Tensor | None, bins: int, **ends: float) -> Tensor:
    place, inside = _bins_of(TENSORS, x, bins, **ends)
    index = torch.where(inside, place, bins).long().flatten()
    if weight is None:  # whole numbers: the order of sums makes no difference
        counts = torch.zeros(bins + 1, dtype=torch.int64, device=x.device)
        return counts.scatter_add(0, index, torch.ones_like(index))[:bins].clone()
    wide = weight.flatten().to(torch.promote_types(weight.dtype, torch.float32))
    sums = torch.zeros(bins + 1, dtype=wide.dtype, device=x.device)
    with fixed_order(sums):
        sums = sums.index_put((index,), wide, accumulate=True)
    return sums[:bins].to(weight.dtype, copy=True)


def _histogram_vjp(b: Ops, v: Vjp) -> Grads:
    """Each weight receives the gradient of its bin. A histogram is constant in x almost everywhere,
    so x receives 0."""
    x = v.arg(0)
    dx = b.zeros(x.type) if v.needs[0] else None
    if not v.needs[1]:
        return [dx, None]
    place, inside = _bins_of(b, x, **v.attrs)
    safe = b.cast(b.where(inside, place, 0.0), dtype="i64")
    picked = b.index_select(v.grad, b.reshape(safe, (-1,)), axis=0)
    return [dx, b.where(inside, b.reshape(picked, x.shape), 0.0)]


@operator(
    Fusion.OPAQUE,
    _histogram_reference,
    attrs={
        "bins": Attr("int", doc="how many parts"),
        "low": Attr("float", doc="where the first part begins"),
        "high": Attr("float", doc="where the last part ends"),
    },
    vjp=_histogram_vjp,
    flops=input_flops(4),
    samples="""bins=5 low=-1.0 high=2.0; 33 | 4x6@transposed bins=7 low=-0.5 high=0.5 | 3x5 3x5
        | 3x5@sliced 3x5@transposed bins=7 low=-0.5 high=0.5
        | 40:index<6 bins=6 low=0.0 high=6.0 | 20:index<6:i32 20 bins=3 low=0 high=5
        | 0 0 [empty] | scalar [scalar] | 33:extreme nograd [extreme]""",
)
def histogram(x: TensorType, weight: Given, bins: int, low: float, high: float) -> TensorType:
    """How many elements of x lie in each of ``bins`` equal parts of low … high, as int64, or the
    sum of their weights. The last part includes high; what lies outside, and nan, is left out. Sums
    are always taken in the same order."""
    numbers("histogram", x)
    if bins < 1:
        raise GraphError(f"histogram with bins={bins}", remedy="use 1 or more")
    if not (isfinite(low) and isfinite(high) and low < high):
        wrong = f"histogram over low={low}, high={high}"
        raise GraphError(wrong, remedy="give finite bounds, low below high")
    if weight is None:
        return TensorType.of((bins,), int64)
    check_shape("weight", weight, x.shape, "give one weight for each element of x")
    return TensorType.of((bins,), floats("histogram with weights", weight))
