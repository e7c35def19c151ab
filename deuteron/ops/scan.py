"""Operators along an axis: scans (the sum, product or extreme of all elements so far), and order:
sort, topk, and the scatter that undoes a sort. Results are contiguous.

Sums and products of 16-bit floats are computed in float32, and each result is rounded once;
integers and booleans become int64. torch's scans do the work, with the order of sums fixed on a
GPU, and torch's calls sort and select: a plan shows those nodes as run by ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import check_shape, one_dtype
from deuteron.ops.elementwise import numbers
from deuteron.ops.embedding import check_scatter
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.movement import AXIS, with_axis
from deuteron.ops.opdef import Attr, Fusion, Vjp, elementwise_flops, input_flops, operator
from deuteron.ops.reference import LOW, fixed_order, wide_type
from deuteron.ops.samples import Arg, Sample, samples


def _total_reference(scan: Callable[..., torch.Tensor], x: torch.Tensor, axis: int) -> torch.Tensor:
    low = x.dtype in LOW
    with fixed_order(x):
        found = scan(x, axis, dtype=torch.float32 if low else None)
    return found.to(x.dtype) if low else found


def _cumsum_vjp(b: Ops, v: Vjp) -> Grads:
    """Element i is in every sum from the i-th on: a sum that runs backwards."""
    axis = v.attrs["axis"]
    return [b.flip(b.cumsum(b.flip(v.grad, axes=axis), axis=axis), axes=axis)]


def _cumprod_grad_reference(grad: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """dx_k = (Π_{j<k} x_j) · r_k with r_k = g_k + x_{k+1}·r_{k+1}: nothing is divided by, so
    zeros are like any other number. The recurrence is solved by doubling its reach, log₂ n times:
    r_k ← r_k + m_k·r_{k+d},  m_k ← m_k·m_{k+d}.

    As in torch's gradient, a zero ends the chain: elements after it get 0, whatever they are, and
    an infinity or a nan that no zero precedes gets nan.
    """
    g, wide = (t.to(wide_type(x)).movedim(axis, -1) for t in (grad, x))
    n = wide.shape[-1]
    ones = torch.ones_like(wide[..., :1])
    before = torch.cat((ones, torch.cumprod(wide, -1)[..., : max(n - 1, 0)]), -1)[..., :n]
    r, m = g, torch.cat((wide[..., 1:], torch.zeros_like(ones)), -1)[..., :n]
    reach = 1
    while reach < n:
        near, far = m[..., :-reach], m[..., reach:]
        step = torch.where(near == 0, 0.0, near * r[..., reach:])
        r = torch.cat((r[..., :-reach] + step, r[..., -reach:]), -1)
        both = torch.where((near == 0) | (far == 0), 0.0, near * far)
        m = torch.cat((both, torch.zeros_like(m[..., -reach:])), -1)
        reach *= 2
    found = torch.where(wide.isfinite(), before * r, torch.nan)
    zeros = (wide == 0).cumsum(-1)
    after = zeros > (wide == 0).to(zeros.dtype)  # some zero lies before this element
    return torch.where(after, 0.0, found).movedim(-1, axis).to(x.dtype).contiguous()


def _extreme_vjp(b: Ops, v: Vjp) -> Grads:
    """Each result's gradient goes to the element that it is; an element that was the extreme for
    several results adds up their gradients."""
    x, axis = v.arg(0), v.attrs["axis"]
    total = b.scatter_add(v.outs[1], b.upcast(v.grad), shape=x.shape, axis=axis)
    return [b.to(total, x.dtype)]


_CASES = """3x5 axis=1 | 3x5 axis=0 | 33 axis=-1 | 2x3x4 axis=1 | 0x4 axis=0 | 3x0 axis=1
    | 1x1 axis=0 | 4x5@transposed axis=1 | 4x5@sliced axis=0 | 4x5@expanded axis=1
    | 2x3x4x5@nhwc axis=1"""
_MORE = """ | 3x4:normal:i32 axis=1 nograd | 3x4:bool axis=0 nograd
    | 33:extreme axis=0 nograd [extreme]"""


def _grad_samples() -> Iterator[Sample]:
    for s in samples(_CASES)():
        yield replace(s, inputs=(Arg(s.args[0].shape), *s.inputs), grad=False)
    yield from samples("4x6:f64 4x6:index<3:f64 axis=1 nograd [zeros]")()


scanning = partial(operator, Fusion.OPAQUE, attrs={"axis": AXIS}, complete=with_axis)
_totals = partial(scanning, flops=input_flops(1), samples=_CASES + _MORE)
_extremes = partial(
    scanning, vjp=_extreme_vjp, flops=input_flops(1), samples=samples(_CASES + _MORE, "distinct")
)


@_totals(partial(_total_reference, torch.cumsum), vjp=_cumsum_vjp)
def cumsum(x: TensorType, axis: int) -> TensorType:
    """The sum of all elements up to each one, along axis."""
    return TensorType.of(x.shape, x.dtype if x.dtype.is_float else int64)


@_totals(
    partial(_total_reference, torch.cumprod),
    vjp=lambda b, v: [b.cumprod_grad(v.grad, v.arg(0), axis=v.attrs["axis"])],
)
def cumprod(x: TensorType, axis: int) -> TensorType:
    """The product of all elements up to each one, along axis."""
    return TensorType.of(x.shape, x.dtype if x.dtype.is_float else int64)


@scanning(_cumprod_grad_reference, flops=input_flops(5), samples=_grad_samples)
def cumprod_grad(grad: TensorType, x: TensorType, axis: int) -> TensorType:
    """The gradient of cumprod, right where elements are zero too. It has none of its own."""
    one_dtype("cumprod_grad", grad=grad, x=x)
    check_shape("grad of cumprod_grad", grad, x.shape, "use the input of the forward operator")
    return TensorType.of(x.shape, x.dtype)


@_extremes(lambda x, axis: tuple(torch.cummax(x, axis)))
def cummax(x: TensorType, axis: int) -> tuple[TensorType, ...]:
    """The largest element so far along axis, and its place on the axis as int64: the last of
    equals; nan wins."""
    return TensorType.of(x.shape, x.dtype), TensorType.of(x.shape, int64)


cummin = replace(
    cummax,
    name="cummin",
    doc=cummax.doc.replace("largest", "smallest"),
    reference=lambda x, axis: tuple(torch.cummin(x, axis)),
)

# ---- order ---------------------------------------------------------------------------------------

LAST = Attr("int", -1, AXIS.doc)


@operator(
    Fusion.OPAQUE,
    lambda index, src, shape, axis: src.new_zeros(shape).scatter(axis, index, src),
    attrs={"shape": Attr("ints", doc="the sizes of the result"), "axis": AXIS},
    complete=with_axis,
    vjp=lambda b, v: [None, b.gather(v.grad, v.arg(0), axis=v.attrs["axis"])],
    flops=elementwise_flops(0),
    samples=samples(  # one element per row, so that no place is named twice
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
    """Each value's gradient goes to the place the value came from; no two came from one place."""
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
