"""By rank: sort, topk, and the scatter that undoes a sort.

Torch's library calls sort and select; nothing here is generated, and a plan shows these nodes as
run by ``torch``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import Shape, TensorType
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
    rows: tuple[tuple[int, Shape, str], ...] = (
        (3, (3, 4), "contiguous"),
        (2, (3, 5), "sliced"),
        (4, (4, 1), "transposed"),
        (0, (2, 3), "contiguous"),
    )
    return tuple(
        Sample((Arg((n, 1), "index", high=s[1]), Arg((n, 1), layout=how)), {"shape": s, "axis": 1})
        for n, s, how in rows
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


def _both(values: TensorType) -> tuple[TensorType, TensorType]:
    """Values, and the places they came from."""
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
    return _both(TensorType.of((*x.shape[:axis], k, *x.shape[axis + 1 :]), x.dtype))


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
    infer=lambda x, **how: _both(TensorType.of(x.shape, x.dtype)),
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

TOPK = replace(
    SORT,
    name="topk",
    doc="The k largest (or smallest) elements along the axis, best first, and their places as "
    "int64; nan is the largest. Which of equal elements is taken is not defined.",
    attrs={
        "k": Attr("int", doc="how many to take"),
        "axis": LAST,
        "largest": Attr("bool", True, "whether the largest or the smallest are wanted"),
    },
    infer=_topk_infer,
    reference=_topk_reference,
    flops=input_flops(2),
    samples=lambda: (
        *_order_samples({"k": 2}, {"k": 3, "largest": False}),
        Sample((Arg((3, 4), "distinct"),), {"k": 0}),
        Sample((Arg((4,), "distinct"),), {"k": 4}),
    ),
)

OPS = (SCATTER, SORT, TOPK)
