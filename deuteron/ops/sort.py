"""By rank: sort, topk, and the scatter that undoes a sort.

Torch's library calls sort and select; nothing here is generated, and a plan shows these nodes as
run by ``torch``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.elementwise import numbers
from deuteron.ops.embedding import check_scatter
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.movement import AXIS, with_axis
from deuteron.ops.opdef import Attr, Fusion, Vjp, elementwise_flops, input_flops, operator
from deuteron.ops.samples import samples

LAST = Attr("int", -1, AXIS.doc)


@operator(
    Fusion.OPAQUE,
    lambda index, src, shape, axis: src.new_zeros(shape).scatter(axis, index, src),
    attrs={"shape": Attr("ints", doc="the sizes of the result"), "axis": AXIS},
    complete=with_axis,
    vjp=lambda b, v: [None, b.gather(v.grad, v.arg(0), axis=v.attrs["axis"])],
    flops=elementwise_flops(0),
    samples=samples(  # one element a row: no place is named twice
        """3x1:index<4 3x1 shape=(3,4) | 2x1:index<5 2x1@sliced shape=(3,5)
        | 4x1:index<1 4x1@transposed shape=(4,1) | 0x1:index<3 0x1 shape=(2,3)""",
        axis=1,
    ),
)
def scatter(index: TensorType, src: TensorType, shape: Shape, axis: int) -> TensorType:
    """Zeros of the given shape, and each element of src put where index says along the axis. The
    index names no place twice: scatter_add is for sums."""
    check_scatter(index, src, shape)
    if any(i > n for i, n in zip(src.shape, shape, strict=True)):
        wrong = f"src {list(src.shape)} has more elements than shape {list(shape)} has places"
        remedy = "no size may be larger; scatter_add lets elements share a place"
        raise GraphError(wrong, remedy=remedy)
    return TensorType.of(shape, src.dtype)


def _dense(found: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return tuple(t.contiguous() for t in found)


def _back_to_places(b: Ops, v: Vjp) -> Grads:
    """Each value's gradient goes where the value came from; no two came from one place."""
    return [b.scatter(v.outs[1], v.grad, shape=v.arg(0).shape, axis=v.attrs["axis"])]


_ORDER = """3x5 {0} axis=-1 | 5x3 {1} axis=0 | 33 {0} axis=0 | 2x4x3 {1} axis=1 | 0x4 {0} axis=1
    | 4x5@transposed {1} axis=1 | 4x5@sliced {0} axis=0 | 2x3x4x5@nhwc {1} axis=1
    | 5x4:i32 {0} axis=0 nograd | """


ordering = partial(operator, Fusion.OPAQUE, complete=with_axis, vjp=_back_to_places)


@ordering(
    lambda x, axis, **how: _dense(torch.sort(x, dim=axis, **how)),
    attrs={
        "axis": LAST,
        "descending": Attr("bool", False, "largest first"),
        "stable": Attr("bool", True, "equal elements keep their order"),
    },
    flops=lambda ins, outs, attrs: float(outs[0].numel * outs[0].shape[attrs["axis"]].bit_length()),
    samples=f""":distinct; {_ORDER.format("", "descending=True")} 3x4:bool descending=True nograd
        | 33:extreme axis=0 nograd [extreme]""",
)
def sort(x: TensorType, **how: Any) -> tuple[TensorType, ...]:
    """x in order along the axis, and the places the elements came from as int64; nan is the
    largest. Stable: equal elements keep their order."""
    return TensorType.of(x.shape, x.dtype), TensorType.of(x.shape, int64)


@ordering(
    lambda x, k, axis, largest: _dense(torch.topk(x, k, axis, largest)),
    attrs={
        "k": Attr("int", doc="how many to take"),
        "axis": LAST,
        "largest": Attr("bool", True, "whether the largest or the smallest are wanted"),
    },
    flops=input_flops(2),
    samples=samples(f"{_ORDER.format('k=2', 'k=3 largest=False')} 3x4 k=0 | 4 k=4", "distinct"),
)
def topk(x: TensorType, k: int, axis: int, largest: bool) -> tuple[TensorType, ...]:
    """The k largest (or smallest) elements along the axis, best first, and their places as int64;
    nan is the largest. Which of equal elements is taken is not defined."""
    kind = numbers("topk", x)
    if not 0 <= k <= x.shape[axis]:
        wrong = f"topk with k={k} along axis {axis} of {list(x.shape)}"
        raise GraphError(wrong, remedy=f"use a k from 0 to {x.shape[axis]}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return TensorType.of(shape, kind), TensorType.of(shape, int64)
