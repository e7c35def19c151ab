"""By rank and by range: sort, topk, histogram, and the scatter that undoes a sort.

Torch's library calls sort and select; nothing here is generated, and a plan shows these nodes as
run by ``torch``, except counts on a GPU, for which there is a kernel. Sums over equal bins keep one
order, so that two runs agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.determinism import fixed_order
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.movement import AXIS, check_index, with_axis
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp
from deuteron.ops.reduce import input_flops
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
LAST = Attr("int", -1, AXIS.doc)

# ---- scatter: each element to a place of its own -------------------------------------------------


def _scatter_infer(index: TensorType, src: TensorType, shape: Shape, axis: int) -> TensorType:
    check_index(index, int64)
    if index.shape != src.shape or len(shape) != src.rank:
        raise GraphError(
            f"index {list(index.shape)}, src {list(src.shape)} and shape {list(shape)} do not fit",
            remedy="index and src must be of one shape, and of the rank of shape",
        )
    if any(i > n for i, n in zip(src.shape, shape, strict=True)):
        raise GraphError(
            f"src {list(src.shape)} has more elements than shape {list(shape)} has places",
            remedy="no size may be larger; scatter_add lets elements share a place",
        )
    return TensorType.of(shape, src.dtype)


def _scatter_reference(index: Tensor, src: Tensor, shape: Shape, axis: int) -> Tensor:
    return torch.zeros(shape, dtype=src.dtype, device=src.device).scatter(axis, index, src)


def _scatter_samples() -> tuple[Sample, ...]:
    """One element a row: no place is named twice."""
    rows: tuple[tuple[Shape, Shape, str], ...] = (
        ((3, 1), (3, 4), "contiguous"),
        ((2, 1), (3, 5), "sliced"),
        ((4, 1), (4, 1), "transposed"),
        ((0, 1), (2, 3), "contiguous"),
    )
    return tuple(
        Sample((Arg(i, "index", high=s[1]), Arg(i, layout=how)), {"shape": s, "axis": 1})
        for i, s, how in rows
    )


SCATTER = OpDef(
    name="scatter",
    doc="Zeros of the given shape, and each element of src put where index says along the axis. "
    "The index names no place twice: scatter_add is for sums.",
    inputs=("index", "src"),
    attrs={"shape": Attr("ints", doc="the sizes of the result"), "axis": AXIS},
    complete=with_axis,
    infer=_scatter_infer,
    reference=_scatter_reference,
    fusion=Fusion.OPAQUE,
    vjp=lambda b, v: [None, b.gather(v.grad, v.arg(0), axis=v.attrs["axis"])],
    flops=lambda ins, outs, attrs: 0.0,
    samples=_scatter_samples,
)

# ---- sort and topk -------------------------------------------------------------------------------


def _sort_infer(
    x: TensorType, axis: int, descending: bool, stable: bool
) -> tuple[TensorType, TensorType]:
    values = TensorType.of(x.shape, x.dtype)
    return values, values.with_dtype(int64)


def _sort_reference(x: Tensor, axis: int, descending: bool, stable: bool) -> tuple[Tensor, ...]:
    found = torch.sort(x, dim=axis, descending=descending, stable=stable)
    return tuple(t.contiguous() for t in found)


def _topk_infer(x: TensorType, k: int, axis: int, largest: bool) -> tuple[TensorType, TensorType]:
    if x.dtype.kind == "bool":
        raise GraphError("topk of bool is not defined", remedy='cast first: cast(x, dtype="u8")')
    if not 0 <= k <= x.shape[axis]:
        raise GraphError(
            f"topk with k={k} along axis {axis} of {list(x.shape)}",
            remedy=f"use a k from 0 to {x.shape[axis]}",
        )
    values = TensorType.of((*x.shape[:axis], k, *x.shape[axis + 1 :]), x.dtype)
    return values, values.with_dtype(int64)


def _topk_reference(x: Tensor, k: int, axis: int, largest: bool) -> tuple[Tensor, ...]:
    return tuple(t.contiguous() for t in torch.topk(x, k, axis, largest, sorted=True))


def _back_to_places(b: Ops, v: Vjp) -> list[Sym | None]:
    """Each value's gradient goes where the value came from; no two came from one place."""
    if v.grads[0] is None:
        return [None]
    return [b.scatter(v.outs[1], v.grad, shape=v.arg(0).shape, axis=v.attrs["axis"])]


def _order_samples(*settings: dict[str, Any]) -> tuple[Sample, ...]:
    shapes: tuple[tuple[Shape, str, int], ...] = (
        ((3, 5), "contiguous", -1),
        ((5, 3), "contiguous", 0),
        ((33,), "contiguous", 0),
        ((2, 4, 3), "contiguous", 1),
        ((0, 4), "contiguous", 1),
        ((4, 5), "transposed", 1),
        ((4, 5), "sliced", 0),
        ((2, 3, 4, 5), "nhwc", 1),
    )
    found = [
        Sample((Arg(s, "distinct", layout=how),), {"axis": a} | settings[i % len(settings)])
        for i, (s, how, a) in enumerate(shapes)
    ]
    whole = Arg((5, 4), "distinct", "i32")
    return (*found, Sample((whole,), {"axis": 0} | settings[0], grad=False))


SORT = OpDef(
    name="sort",
    doc="x in order along the axis, and the places the elements came from as int64; nan is the "
    "largest. Stable: equal elements keep their order.",
    inputs=("x",),
    attrs={
        "axis": LAST,
        "descending": Attr("bool", False, "largest first"),
        "stable": Attr("bool", True, "equal elements keep their order"),
    },
    complete=with_axis,
    infer=_sort_infer,
    reference=_sort_reference,
    fusion=Fusion.OPAQUE,
    vjp=_back_to_places,
    flops=lambda ins, outs, attrs: float(outs[0].numel * outs[0].shape[attrs["axis"]].bit_length()),
    samples=lambda: (
        *_order_samples({}, {"descending": True}),
        Sample((Arg((3, 4), "bool"),), {"descending": True}, grad=False),
        Sample((Arg((33,), "extreme"),), {"axis": 0}, grad=False, note="extreme"),
    ),
)

TOPK = OpDef(
    name="topk",
    doc="The k largest (or smallest) elements along the axis, best first, and their places as "
    "int64; nan is the largest. Which of equal elements is taken is not defined.",
    inputs=("x",),
    attrs={
        "k": Attr("int", doc="how many to take"),
        "axis": LAST,
        "largest": Attr("bool", True, "whether the largest or the smallest are wanted"),
    },
    complete=with_axis,
    infer=_topk_infer,
    reference=_topk_reference,
    fusion=Fusion.OPAQUE,
    vjp=_back_to_places,
    flops=input_flops(2),
    samples=lambda: (
        *_order_samples({"k": 2}, {"k": 3, "largest": False}),
        Sample((Arg((3, 4), "distinct"),), {"k": 0}),
        Sample((Arg((4,), "distinct"),), {"k": 4}),
    ),
)

# ---- histogram -----------------------------------------------------------------------------------


def _histogram_infer(
    x: TensorType, weight: TensorType | None, bins: int, low: float, high: float
) -> TensorType:
    if x.dtype.kind == "bool":
        raise GraphError(
            "histogram of bool is not defined", remedy='cast first: cast(x, dtype="u8")'
        )
    if bins < 1:
        raise GraphError(f"histogram with bins={bins}", remedy="use 1 or more")
    if not (isfinite(low) and isfinite(high) and low < high):
        raise GraphError(
            f"histogram over low={low}, high={high}", remedy="give finite bounds, low below high"
        )
    if weight is None:
        return TensorType.of((bins,), int64)
    if weight.shape != x.shape or not weight.dtype.is_float:
        raise GraphError(
            f"weight is {weight}, x {list(x.shape)}",
            remedy="give one weight of a float type for each element of x",
        )
    return TensorType.of((bins,), weight.dtype)


def _bins_of(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """The bin of each element, as torch.histc finds it; ``bins`` for what lies outside."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.double()
    place = ((wide - low) * bins / (high - low)).floor()
    inside = (wide >= low) & (wide <= high)
    return torch.where(inside, place.clamp(0, bins - 1), bins).long().flatten()


def _histogram_reference(
    x: Tensor, weight: Tensor | None, bins: int, low: float, high: float
) -> Tensor:
    index = _bins_of(x, bins, low, high)
    if weight is None:  # whole numbers: the order of sums makes no difference
        counts = torch.zeros(bins + 1, dtype=torch.int64, device=x.device)
        return counts.scatter_add(0, index, torch.ones_like(index))[:bins].clone()
    wide = weight.flatten().to(torch.promote_types(weight.dtype, torch.float32))
    sums = torch.zeros(bins + 1, dtype=wide.dtype, device=x.device)
    with fixed_order(sums):
        sums = sums.index_put((index,), wide, accumulate=True)
    return sums[:bins].to(weight.dtype, copy=True)


def _histogram_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    """A weight has the gradient of its bin. In x a histogram is flat."""
    x, a = v.arg(0), v.attrs
    dx = b.zeros(x.type) if v.needs[0] else None
    if not v.has(1) or not v.needs[1]:
        return [dx, None]
    wide = x if x.dtype.short in ("f32", "f64") else b.cast(x, dtype="f64")
    place = b.clamp(
        b.floor((wide - a["low"]) * float(a["bins"]) / (a["high"] - a["low"])),
        min=0.0,
        max=a["bins"] - 1.0,
    )
    inside = b.logical_and(wide >= a["low"], wide <= a["high"])
    safe = b.cast(b.where(inside, place, 0.0), dtype="i64")
    picked = b.index_select(v.grad, b.reshape(safe, (-1,)), axis=0)
    return [dx, b.where(inside, b.reshape(picked, x.shape), 0.0)]


def _histogram_samples() -> Sequence[Sample]:
    span = {"bins": 5, "low": -1.0, "high": 2.0}
    near = {"bins": 7, "low": -0.5, "high": 0.5}
    return (
        Sample((Arg((33,)),), span),
        Sample((Arg((4, 6), layout="transposed"),), near),
        Sample((Arg((3, 5)), Arg((3, 5))), span),
        Sample((Arg((3, 5), layout="sliced"), Arg((3, 5), layout="transposed")), near),
        Sample((Arg((40,), "index", high=6),), {"bins": 6, "low": 0.0, "high": 6.0}),
        Sample((Arg((20,), "index", "i32", high=6), Arg((20,))), {"bins": 3, "low": 0, "high": 5}),
        Sample((Arg((0,)), Arg((0,))), span, note="empty"),
        Sample((Arg(()),), span, note="scalar"),
        Sample((Arg((33,), "extreme"),), span, grad=False, note="extreme"),
    )


HISTOGRAM = OpDef(
    name="histogram",
    doc="How many elements of x lie in each of ``bins`` equal parts of low … high, as int64, or "
    "the sum of their weights. The last part includes high; what lies outside, and nan, is left "
    "out. Sums keep one order.",
    inputs=("x", "weight?"),
    attrs={
        "bins": Attr("int", doc="how many parts"),
        "low": Attr("float", doc="where the first part begins"),
        "high": Attr("float", doc="where the last part ends"),
    },
    infer=_histogram_infer,
    reference=_histogram_reference,
    fusion=Fusion.OPAQUE,
    vjp=_histogram_vjp,
    flops=input_flops(4),
    samples=_histogram_samples,
)

OPS = (SCATTER, SORT, TOPK, HISTOGRAM)
