"""By rank: sort, topk, and the scatter that undoes a sort.

Torch's library calls sort and select; nothing here is generated, and a plan shows these nodes as
run by ``torch``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.movement import AXIS, check_index, with_axis
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp
from deuteron.ops.reduce import input_flops
from deuteron.ops.samples import samples

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
    samples=samples(  # one element a row: no place is named twice
        """3x1:index<4 3x1 shape=(3,4) | 2x1:index<5 2x1@sliced shape=(3,5)
        | 4x1:index<1 4x1@transposed shape=(4,1) | 0x1:index<3 0x1 shape=(2,3)""",
        axis=1,
    ),
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


_ORDER = """3x5 {0} axis=-1 | 5x3 {1} axis=0 | 33 {0} axis=0 | 2x4x3 {1} axis=1 | 0x4 {0} axis=1
    | 4x5@transposed {1} axis=1 | 4x5@sliced {0} axis=0 | 2x3x4x5@nhwc {1} axis=1
    | 5x4:i32 {0} axis=0 nograd | """


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
    samples=samples(
        f"""{_ORDER.format("", "descending=True")} 3x4:bool descending=True nograd
        | 33:extreme axis=0 nograd [extreme]""",
        "distinct",
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
    samples=samples(f"{_ORDER.format('k=2', 'k=3 largest=False')} 3x4 k=0 | 4 k=4", "distinct"),
)

OPS = (SCATTER, SORT, TOPK)
