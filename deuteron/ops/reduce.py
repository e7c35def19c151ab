"""Reductions: elements along some axes are combined into one. Results are contiguous.

16-bit floats are summed in float32 and rounded once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import norm_axes
from deuteron.ops.elementwise import Result, anything, floats, numbers, truth
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, OpDef, Types, Vjp, VjpFn, input_flops, operator
from deuteron.ops.reference import LOW, without_overflow
from deuteron.ops.samples import Arg, Sample, samples

Grad = Callable[[Ops, Vjp], Any]


def reduced_shape(shape: Shape, axes: Sequence[int], keepdim: bool) -> Shape:
    """``shape`` with ``axes`` gone, or of size 1."""
    kept = ((1 if i in axes else n, i) for i, n in enumerate(shape))
    return tuple(n for n, i in kept if keepdim or i not in axes)


def _complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, axes = types[0], attrs["axes"]
    if axes == () and x.rank:
        raise GraphError("axes=() names no dimension", remedy="leave axes out to reduce over all")
    return attrs | {"axes": norm_axes(axes, x.rank)}


def _count(v: Vjp) -> int:
    """How many elements are combined into one."""
    return math.prod(v.arg(0).shape[a] for a in v.attrs["axes"])


def _spread(b: Ops, v: Vjp, value: Sym) -> Any:
    """A reduced ``value`` with its axes back, as sizes of 1."""
    shape = reduced_shape(v.arg(0).shape, v.attrs["axes"], True)
    return value if value.shape == shape else b.reshape(value, shape=shape)


def _sum_grad(b: Ops, v: Vjp) -> Any:
    return b.expand(_spread(b, v, v.grad), shape=v.arg(0).shape)


def _mean_grad(b: Ops, v: Vjp) -> Any:
    return b.expand(_spread(b, v, v.grad) * (1.0 / max(_count(v), 1)), shape=v.arg(0).shape)


def _prod_grad(b: Ops, v: Vjp) -> Any:
    """g · (product of the other elements). If one of the others is 0, that is 0, or nan if an
    infinity or a nan is among them, too. The formula never divides by zero."""
    x, grad = b.upcast(v.arg(0)), _spread(b, v, b.upcast(v.grad))
    how = {"axes": v.attrs["axes"], "keepdim": True}
    is_zero, is_odd = b.eq(x, 0.0), b.logical_or(b.isnan(x), b.isinf(x))
    safe = b.where(is_zero, 1.0, x)
    zeros, rest = b.sum(is_zero, **how), grad * b.prod(safe, **how)
    odd_others = b.sum(is_odd, **how) - b.to(is_odd, int64)
    times_zero = b.where(b.gt(odd_others, 0), math.nan, b.zeros(x.type))
    at_zero = b.where(b.eq(zeros, 1), rest, times_zero)
    return b.where(is_zero, at_zero, b.where(b.eq(zeros, 0), rest / safe, times_zero))


def _peak_grad(b: Ops, v: Vjp) -> Any:
    """The gradient is shared evenly among all elements that reach the extreme."""
    grad = _spread(b, v, b.upcast(v.grad))
    hit = b.to(b.eq(v.arg(0), _spread(b, v, v.outs[0])), grad.dtype)
    return hit * (grad / b.sum(hit, axes=v.attrs["axes"], keepdim=True))


def _var_grad(b: Ops, v: Vjp) -> Any:
    x, freedom = b.upcast(v.arg(0)), _count(v) - v.attrs["correction"]
    scale = 2.0 / freedom if freedom else math.inf
    centred = x - b.mean(x, axes=v.attrs["axes"], keepdim=True)
    return centred * (_spread(b, v, b.upcast(v.grad)) * scale)


def _prod_reference(x: Tensor, dim: Shape, keepdim: bool) -> Tensor:
    out = x.float() if x.dtype in LOW else x
    for axis in reversed(dim):
        out = torch.prod(out, axis, keepdim)
    # without axes ``out`` may still be x, but a result must not share its input's memory: copy
    return out.to(x.dtype if x.is_floating_point() else torch.int64, copy=not dim)


def _of_truths(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, dim, keepdim: fn(x.bool(), dim, keepdim)


def _var_reference(x: Tensor, axes: Shape, keepdim: bool, correction: int) -> Tensor:
    if x.dtype != torch.float64:
        return torch.var(x, dim=axes, keepdim=keepdim, correction=correction)
    # torch computes it in one pass, whose error grows with the length; here it has to be exact
    v, down = without_overflow(x, axes)
    centred = v - v.mean(axes, keepdim=True)
    centred = centred - centred.mean(axes, keepdim=True)
    count = math.prod(x.shape[a] for a in axes)
    out = centred.square().sum(axes, keepdim=True) / max(count - correction, 0)
    out = out if down is None else out / down / down
    return out if keepdim else out.squeeze(axes)


def _checked(name: str, x: TensorType, axes: Shape) -> None:
    """Raise if an axis is empty: then there is no largest element."""
    gone = [a for a in axes if x.shape[a] == 0]
    if gone:
        wrong = f"{name} over axis {gone[0]} of {list(x.shape)}, an empty axis, has no answer"
        raise GraphError(wrong, remedy="reduce over other axes, or leave empty tensors out")


def _vjp(grad: Grad | None) -> VjpFn:
    if grad is None:
        return lambda b, v: [None]
    return lambda b, v: [b.to(grad(b, v), v.arg(0).dtype) if v.needs[0] else None]


_CASES = """3x5 axes=None | 3x5 axes=(1,) | 3x5 axes=(0,) keepdim=True | 2x3x4 axes=(-1,0)
    | scalar axes=None | 0x4 axes=({gone},) keepdim={empty} | 1x1x7 axes=(1,2)
    | 4x5@transposed axes=(0,) | 4x5@sliced axes=(1,) | 4x5@expanded axes=(1,)
    | 2x3x4x5@nhwc axes=(2,3) keepdim=True | 2x3x4x5@nhwc axes=(1,)"""


def _samples(kind: str, empty: bool, extra: str = "") -> tuple[Sample, ...]:
    text = _CASES.format(gone=0 if empty else 1, empty=empty)
    return (*samples(text, kind, keepdim=False)(), *(samples(extra)() if extra else ()))


_WHOLE, _BOOLS = "3x4:i32 axes=1 nograd", "3x4:bool axes=0 nograd"
_ZEROS, _ODD = "4x3:index<3:f64 axes=1 [zeros]", "33:extreme nograd [extreme]"

_AXES: Mapping[str, Attr] = {
    "axes": Attr("ints", None, "the axes to reduce over; None for all"),
    "keepdim": Attr("bool", False, "whether reduced axes stay, with size 1"),
}


_reducing = partial(operator, Fusion.REDUCTION, complete=_complete)
_KINDS = {"max": "distinct", "min": "distinct", "any": "bool", "all": "bool"}


def _reduce(name: str, doc: str, fn: Any, grad: Grad | None, result: Result, extra: str) -> OpDef:
    """Define a reduction. ``extra``: further samples."""
    filled = name in ("max", "min")

    def infer(x: TensorType, axes: Shape, keepdim: bool) -> TensorType:
        if filled:
            _checked(name, x, axes)
        return TensorType.of(reduced_shape(x.shape, axes, keepdim), result(name, x))

    made = _reducing(
        lambda x, axes, keepdim: fn(x, dim=axes, keepdim=keepdim),
        attrs=_AXES,
        vjp=_vjp(grad),
        flops=input_flops(1),
        samples=partial(_samples, _KINDS.get(name, "normal"), not filled, extra),
    )(infer)
    return replace(made, name=name, doc=f"Along the axes: {doc}.")


def _widened(name: str, x: TensorType) -> DType:
    return x.dtype if x.dtype.is_float else int64


_BOTH, _TIES = f"{_WHOLE} | {_BOOLS}", "element; nan wins, and ties share the gradient evenly"
_SUM = "the sum; integers and booleans add up to int64"
_PROD = "the product; integers and booleans multiply to int64"

REDUCE = (
    _reduce("sum", _SUM, torch.sum, _sum_grad, _widened, _BOTH),
    _reduce("mean", "the mean", torch.mean, _mean_grad, floats, _ODD),
    _reduce("prod", _PROD, _prod_reference, _prod_grad, _widened, f"{_WHOLE} | {_ZEROS}"),
    _reduce("max", f"the largest {_TIES}", torch.amax, _peak_grad, anything, f"{_WHOLE} | {_ODD}"),
    _reduce("min", f"the smallest {_TIES}", torch.amin, _peak_grad, anything, _BOTH),
    _reduce("any", "whether an element is not zero", _of_truths(torch.any), None, truth, _WHOLE),
    _reduce("all", "whether no element is zero", _of_truths(torch.all), None, truth, _ODD),
)

# ---- variance, and where the extremes are ------------------------------------------------------


def _var_samples() -> Iterator[Sample]:
    for i, s in enumerate(_samples("normal", False)):
        if s.inputs[0] != Arg(()):
            yield replace(s, attrs={**s.attrs, "correction": i % 2})
    yield from samples("4x5:offset axes=1 | scalar correction=0")()


@_reducing(
    _var_reference,
    attrs={**_AXES, "correction": Attr("int", 1, "1 for samples, 0 for whole populations")},
    vjp=_vjp(_var_grad),
    flops=input_flops(4),
    samples=_var_samples,
)
def var(x: TensorType, axes: Shape, keepdim: bool, correction: int) -> TensorType:
    """The variance along the axes: squared distances from the mean, summed and divided by
    (count − correction), or by 0 where the correction is larger."""
    if correction < 0:
        raise GraphError(f"correction={correction} is negative", remedy="use 0 or 1")
    return TensorType.of(reduced_shape(x.shape, axes, keepdim), floats("var", x))


def _arg_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, axis = types[0], attrs["axis"]
    axis = axis if axis is None else (*norm_axes((axis,), x.rank, "axis"), 0)[0]
    return attrs | {"axis": axis}


_finding = partial(
    operator,
    Fusion.REDUCTION,
    attrs={
        "axis": Attr("int", None, "the axis to search along; None for all"),
        "keepdim": _AXES["keepdim"],
    },
    complete=_arg_complete,
    vjp=_vjp(None),
    flops=input_flops(1),
    samples="""33:extreme axis=0 nograd [extreme] | 3x4:i32 axis=0 nograd | 3x5
        | 3x5 axis=None keepdim=True | 3x5 axis=-1 | 2x3x4 axis=1 keepdim=True | scalar
        | scalar axis=0 | 0x4 axis=1 | 4x5@transposed axis=0 | 4x5@sliced axis=1
        | 2x3x4x5@nhwc axis=1""",
)


def _place(name: str, x: TensorType, axis: int | None, keepdim: bool) -> TensorType:
    numbers(name, x)
    axes = tuple(range(x.rank)) if axis is None else (axis,)[: x.rank]
    _checked(name, x, axes)
    return TensorType.of(reduced_shape(x.shape, axes, keepdim), int64)


@_finding(lambda x, axis, keepdim: torch.argmax(x, axis, keepdim))
def argmax(x: TensorType, axis: int | None, keepdim: bool) -> TensorType:
    """Where the largest element along the axis is, as int64: the first of equals; nan wins. With
    axis=None the place in the flattened tensor."""
    return _place("argmax", x, axis, keepdim)


@_finding(lambda x, axis, keepdim: torch.argmin(x, axis, keepdim))
def argmin(x: TensorType, axis: int | None, keepdim: bool) -> TensorType:
    """Where the smallest element along the axis is, as int64: the first of equals; nan wins. With
    axis=None the place in the flattened tensor."""
    return _place("argmin", x, axis, keepdim)


# ---- the norm of vectors, from other operators ------------------------------------------------


def vector_norm(b: Ops, x: Sym, *, p: float, axes: tuple[int, ...] | None, keepdim: bool) -> Sym:
    """(Σ |x|ᵖ)^(1/p) along ``axes``; for p = ±inf the largest or smallest |x|, for p = 0 how many
    elements are not 0. Powers of 16-bit numbers, which overflow soon, are computed in float32."""
    floats("norm", x.type)
    along = {"axes": axes, "keepdim": keepdim}
    wide = b.upcast(x)
    if p < 0.0 or p == math.inf:
        _check_filled(x.type, p, axes)
    if math.isinf(p):
        y = b.one("max" if p > 0 else "min", b.abs(wide), **along)
    elif p == 0.0:
        y = b.one("sum", b.to(b.one("ne", wide, 0.0), wide.dtype), **along)
    elif p == 1.0:
        y = b.one("sum", b.abs(wide), **along)
    elif p == 2.0:
        y = _rooted(b, b.sum(b.square(wide), **along), 2.0)
    else:
        zero = b.one("eq", wide, 0.0)
        powers = b.pow(b.where(zero, 1.0, b.abs(wide)), p)
        y = _rooted(b, b.sum(b.where(zero, 0.0 if p > 0 else math.inf, powers), **along), p)
    return b.to(y, x.dtype)


def _check_filled(x: TensorType, p: float, axes: tuple[int, ...] | None) -> None:
    """Raise if an axis is empty, for a p below 0 or infinite: a sum of no elements is 0, whose root
    is not defined for p below 0, and there is no largest or smallest of no elements."""
    for axis in norm_axes(axes, x.rank):
        if x.shape[axis] == 0:
            what = f"the {p:g}-norm over axis {axis} of {list(x.shape)}, an empty one,"
            remedy = "reduce over other axes, leave empty tensors out, or a finite p from 0 on"
            raise GraphError(f"{what} has no answer", remedy=remedy)


def _rooted(b: Ops, total: Sym, p: float) -> Sym:
    """total^(1/p), with a slope of 0 at 0, where the root has none. torch does the same: else the
    gradient of a row of zeros would be nan."""
    zero = b.one("eq", total, 0.0)
    safe = b.where(zero, 1.0, total)
    return b.one("where", zero, 0.0, b.sqrt(safe) if p == 2.0 else b.pow(safe, 1.0 / p))
