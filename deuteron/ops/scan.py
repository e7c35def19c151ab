"""Scans: what has met so far along an axis. Results are contiguous.

16-bit floats are added and multiplied up in float32, and each result is rounded once; integers
and booleans become int64. Torch's scans do the work, with the order of sums fixed on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from deuteron.ir.dtype import int64
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_shape, one_dtype
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.movement import AXIS, with_axis
from deuteron.ops.opdef import Fusion, Vjp, input_flops, operator
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

    As in torch's, a zero ends it: what comes after has no slope, whatever it holds, and an
    infinity or a nan before has none that is known.
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
    """Each result's gradient goes to the element it was; what led for a while collects several."""
    x, axis = v.arg(0), v.attrs["axis"]
    total = b.scatter_add(v.outs[1], b.upcast(v.grad), shape=x.shape, axis=axis)
    return [b.to(total, x.dtype)]


_CASES = """3x5 axis=1 | 3x5 axis=0 | 33 axis=-1 | 2x3x4 axis=1 | 0x4 axis=0 | 3x0 axis=1
    | 1x1 axis=0 | 4x5@transposed axis=1 | 4x5@sliced axis=0 | 4x5@expanded axis=1
    | 2x3x4x5@nhwc axis=1"""
_MORE = """ | 3x4:normal:i32 axis=1 nograd | 3x4:bool axis=0 nograd
    | 33:extreme axis=0 nograd [extreme]"""


def _grad_samples() -> tuple[Sample, ...]:
    cases = ((s, Arg(s.args[0].shape)) for s in samples(_CASES)())
    both = (replace(s, inputs=(grad, *s.inputs), grad=False) for s, grad in cases)
    return (*both, *samples("4x6:f64 4x6:index<3:f64 axis=1 nograd [zeros]")())


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
