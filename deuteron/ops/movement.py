"""Shape, order and memory: operators that move elements and compute nothing.

Where torch returns a view, inference gives that view's strides. The operators that add up elements
which land in one place (scatter_add, embedding_grad) are in embedding.py, and so is embedding.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import int32, int64
from deuteron.ir.types import Shape, TensorType, strides_for, view_strides
from deuteron.ops.checks import check_index, norm_axes
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, Types, Vjp, elementwise_flops, operator, promoted
from deuteron.ops.reference import lay

moving = partial(operator, Fusion.INJECTIVE, flops=elementwise_flops(0))
viewing = partial(moving, view=True)
AXIS = Attr("int", doc="the dimension to work along")


def with_axis(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    """``OpDef.complete``: count ``axis`` from 0; raise if the tensor has no axes."""
    if not types or types[0].rank == 0:
        raise GraphError("there is no axis to work along", remedy="reshape a scalar to (1,) first")
    return attrs | {"axis": norm_axes((attrs["axis"],), types[0].rank, "axis")[0]}


ROW, NHWC = "contiguous", "nhwc"

# ---- views: reshape, permute, expand, slice ----------------------------------------------------


def _reshape_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, shape = types[0], list(attrs["shape"])
    if shape.count(-1) > 1 or any(s < -1 for s in shape):
        raise GraphError(f"shape {shape} is not clear", remedy="one size at most may be -1")
    known = prod(s for s in shape if s != -1)
    if -1 in shape and known and x.numel % known == 0:
        shape[shape.index(-1)] = x.numel // known
    if -1 in shape or prod(shape) != x.numel:
        wrong = f"shape {shape} cannot hold the {x.numel} elements of {list(x.shape)}"
        remedy = "the sizes must multiply to that number; one may be -1 if no other is 0"
        raise GraphError(wrong, remedy=remedy)
    return attrs | {"shape": tuple(shape)}


@viewing(
    torch.reshape,
    attrs={"shape": Attr("ints", doc="the new sizes, e.g. shape=(2, -1)")},
    complete=_reshape_complete,
    vjp=lambda b, v: [b.reshape(v.grad, shape=v.arg(0).shape)],
    samples="""3x4 shape=(2,6) | 3x4 shape=(-1,) | scalar shape=(1,1) | 1x1 shape=()
        | 0x4 shape=(2,0,3) | 4x6@transposed shape=(2,2,6) | 4x6@transposed shape=(24,)
        | 4x6@sliced shape=(2,12) | 4x6@expanded shape=(4,2,3) | 4x6@expanded shape=(24,)
        | 2x3x4x5@nhwc shape=(2,3,20) | 2x3x4x5@nhwc shape=(2,60)""",
)
def reshape(x: TensorType, shape: Shape) -> TensorType:
    """x with the same elements, in row-major order, in another shape; one size may be -1. A view
    where the strides allow it, else a contiguous copy."""
    made = TensorType.of(shape, x.dtype, strides=view_strides(x.shape, x.strides, shape))
    return made.with_layout(ROW) if made.is_layout(ROW) else made


def _permute_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    rank, dims = types[0].rank, attrs["dims"]
    if sorted(d + rank if d < 0 else d for d in dims) != list(range(rank)):
        remedy = f"name each of 0 … {rank - 1} once" if rank else "use dims=()"
        raise GraphError(f"dims {dims} are not an order of the {rank} dimensions", remedy=remedy)
    return attrs | {"dims": tuple(d % rank for d in dims)}


@viewing(
    torch.permute,
    attrs={"dims": Attr("ints", doc="the new order, e.g. dims=(0, 2, 1)")},
    complete=_permute_complete,
    vjp=lambda b, v: [b.permute(v.grad, tuple(map(v.attrs["dims"].index, range(v.grad.rank))))],
    samples="""3x4 dims=(1,0) | scalar dims=() | 2x0x3 dims=(2,0,1) | 2x3x4 dims=(-1,0,1)
        | 3x4@sliced dims=(1,0) | 3x4@expanded dims=(1,0) | 2x3x4x5@nhwc dims=(0,2,3,1)""",
)
def permute(x: TensorType, dims: Shape) -> TensorType:
    """x with its dimensions in another order: dimension i of the result is dims[i] of x."""
    shape, strides = (tuple(of[d] for d in dims) for of in (x.shape, x.strides))
    return TensorType(shape, x.dtype, strides)


def _expand_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    x, shape = types[0], attrs["shape"]
    lead = max(len(shape) - x.rank, 0)
    pairs = list(zip(shape, (None,) * lead + x.shape, strict=False))
    full = tuple(o if n == -1 and o is not None else n for n, o in pairs)
    fits = all(n >= 0 and o in (None, 1, n) for n, (_, o) in zip(full, pairs, strict=True))
    if len(shape) < x.rank or not fits:
        wrong = f"x {list(x.shape)} does not expand to {list(shape)}"
        raise GraphError(wrong, remedy="only sizes of 1 stretch; new dimensions go in front")
    return attrs | {"shape": full}


@viewing(
    lambda x, shape: x.expand(shape),
    attrs={"shape": Attr("ints", doc="the new sizes, e.g. shape=(8, -1)")},
    complete=_expand_complete,
    vjp=lambda b, v: [b.unbroadcast(v.grad, v.arg(0).type)],
    samples="""3x1 shape=(3,4) | 3x1 shape=(2,-1,5) | scalar shape=(2,3) | scalar shape=()
        | 1x3 shape=(0,3) | 4x3@transposed shape=(2,4,3) | 4x1x3@sliced shape=(4,2,3)
        | 2x3x1x1@nhwc shape=(2,3,4,5)""",
)
def expand(x: TensorType, shape: Shape) -> TensorType:
    """x stretched to a larger shape by repeating sizes of 1; -1 keeps a size. A view: nothing is
    copied."""
    lead = len(shape) - x.rank
    kept = (s if n == o else 0 for n, o, s in zip(shape[lead:], x.shape, x.strides, strict=True))
    return TensorType(shape, x.dtype, (0,) * lead + tuple(kept))


def _slice_complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    attrs = with_axis(types, attrs)
    if attrs["step"] < 1:
        wrong = f"step={attrs['step']} is not at least 1"
        raise GraphError(wrong, remedy="to go backwards, flip() the axis")
    span = slice(attrs["start"], attrs["stop"], attrs["step"])
    start, stop, _ = span.indices(types[0].shape[attrs["axis"]])
    return attrs | {"start": start, "stop": max(start, stop)}


def _pad_axis(b: Ops, x: Sym, axis: int, low: int, high: int) -> Sym:
    ends = ({axis: low}, {axis: high})
    low_, high_ = (tuple(end.get(i, 0) for i in range(x.rank)) for end in ends)
    out: Sym = b.pad(x, low=low_, high=high_) if low or high else x
    return out


def _slice_vjp(b: Ops, v: Vjp) -> Grads:
    """Put zeros back between the elements, where the step skipped some, then around all of them."""
    grad, axis, step = v.grad, v.attrs["axis"], v.attrs["step"]
    before, count, after = grad.shape[:axis], grad.shape[axis], grad.shape[axis + 1 :]
    if step > 1:
        apart = _pad_axis(b, b.reshape(grad, (*before, count, 1, *after)), axis + 1, 0, step - 1)
        grad = b.reshape(apart, (*before, count * step, *after))
    start, size = v.attrs["start"], v.arg(0).shape[axis]
    return [_pad_axis(b, grad, axis, start, size - start - count * step)]


@viewing(
    lambda x, axis, start, stop, step: torch.ops.aten.slice(x, axis, start, stop, step),
    attrs={
        "axis": AXIS,
        "start": Attr("int", 0, "the first index; from the end if negative"),
        "stop": Attr("int", None, "the index to stop before; None for the end"),
        "step": Attr("int", 1, "every so many elements"),
    },
    complete=_slice_complete,
    vjp=_slice_vjp,
    samples="""5x4 axis=0 start=1 stop=4 | 5x4 axis=-1 start=-3 | 5 axis=0 start=4 stop=2
        | 7 axis=0 start=1 stop=7 step=3 | 7x2 axis=0 start=0 stop=None step=2 | 0x3 axis=0
        | 5 axis=0 start=-99 stop=99 | 2x6@sliced axis=1 start=1 stop=6 step=4
        | 4x6@transposed axis=1 start=2 | 4x3@expanded axis=0 start=1 stop=3
        | 2x3x4x5@nhwc axis=1 start=0 stop=2""",
)
def slice_(x: TensorType, axis: int, start: int, stop: int, step: int) -> TensorType:
    """The elements start, start + step, … before stop along one axis, as x[start:stop:step]."""
    shape, strides = list(x.shape), list(x.strides)
    shape[axis], strides[axis] = len(range(start, stop, step)), strides[axis] * step
    return TensorType(tuple(shape), x.dtype, tuple(strides))


# ---- copies: flip, concat, pad, to_layout --------------------------------------------------------


@moving(
    lambda x, axes: torch.flip(x, axes),
    attrs={"axes": Attr("ints", doc="the axes to turn round, e.g. axes=(0,)")},
    complete=lambda types, attrs: attrs | {"axes": norm_axes(attrs["axes"], types[0].rank)},
    vjp=lambda b, v: [b.flip(v.grad, axes=v.attrs["axes"])],
    samples="""3x4 axes=(0,) | 3x4 axes=(-1,0) | scalar axes=() | 0x3 axes=(0,) | 3x4 axes=()
        | 3x4@transposed axes=(1,) | 3x4@sliced axes=(1,) | 3x4@expanded axes=(0,)
        | 2x3x4x5@nhwc axes=(2,3)""",
)
def flip(x: TensorType, axes: Shape) -> TensorType:
    """x with the order of its elements reversed along the axes."""
    return x.dense_like()


def _by_pixels(t: TensorType) -> bool:
    """Whether ``t`` is nhwc, or some channels of an nhwc tensor, with gaps between the pixels."""
    return t.dense_like().layout == NHWC


def _concat_reference(*xs: Tensor, axis: int) -> Tensor:
    types = [TensorType.from_tensor(x) for x in xs]
    t: Any = concat.infer(*types, axis=axis)
    if t.layout == NHWC and not all(map(_by_pixels, types)):
        # torch.cat is fast only if all its inputs have one memory order: convert the others first
        xs = tuple(lay(x, of.with_layout(NHWC)) for x, of in zip(xs, types, strict=True))
    return lay(torch.cat(xs, axis), t)


def _concat_vjp(b: Ops, v: Vjp) -> Grads:
    axis, start = v.attrs["axis"], 0
    grads: Grads = []
    for i, need in enumerate(v.needs):
        stop = start + v.arg(i).shape[axis]
        part = b.to(b.slice(v.grad, axis, start, stop), v.arg(i).dtype) if need else None
        start, grads = stop, [*grads, part]
    return grads


@moving(
    _concat_reference,
    attrs={"axis": AXIS},
    complete=with_axis,
    vjp=_concat_vjp,
    samples="""2x3 4x3 axis=0 | 2x3 2x1 2x2@transposed axis=-1 | 5 axis=0 | 0x3 2x3 axis=0
        | 2x3:f64 2x3:f32 axis=0 nograd | 2x3:i32 2x3@sliced axis=1
        | 2x3x4x5@nhwc 2x1x4x5@nhwc axis=1 | 2x3x4x5@nhwc 2x3x4x5 axis=1
        | 2x3x1x1 2x3x1x1@nhwc axis=2 | 2x3x4@nhwc 2x2x4@nhwc axis=1""",
)
def concat(*xs: TensorType, axis: int) -> TensorType:
    """Tensors joined one after another along an axis; element types promote. The result is nhwc
    when most of its elements come from nhwc tensors."""
    x = xs[0]
    for i, t in enumerate(xs):
        if t.rank != x.rank or any(
            a != b and d != axis for d, (a, b) in enumerate(zip(t.shape, x.shape, strict=True))
        ):
            wrong = f"input {i} {list(t.shape)} does not fit input 0 {list(x.shape)} on axis {axis}"
            raise GraphError(wrong, remedy=f"all sizes but that of axis {axis} must be equal")
    shape = (*x.shape[:axis], sum(t.shape[axis] for t in xs), *x.shape[axis + 1 :])
    # most elements decide: a broadcast or converted part does not change the order of the result
    turned = x.rank > 3 and 2 * sum(t.numel for t in xs if _by_pixels(t)) > prod(shape)
    return TensorType.of(shape, promoted(*xs), NHWC if turned else ROW)


concat_in_place = replace(
    concat,
    name="concat_in_place",
    doc="""What concat gives, of parts that were written side by side: a plan has given them the
    memory of the whole, and nothing is moved. By itself, in a graph, it is concat.""",
    fusion=Fusion.OPAQUE,
    view=True,
)


def _pad_reference(x: Tensor, low: Shape, high: Shape, mode: str, value: float) -> Tensor:
    like: Any = pad.infer(TensorType.from_tensor(x), low, high, mode, value)
    out = x
    if mode == "constant":
        ends = [n for pair in zip(reversed(low), reversed(high), strict=True) for n in pair]
        return lay(F.pad(x, ends, value=value) if ends else x.clone(), like)
    for axis, (size, lo, hi) in enumerate(zip(x.shape, low, high, strict=True)):
        place = torch.arange(-lo, size + hi, device=x.device)
        if mode == "reflect":  # at both ends indices turn back: |i|, and n−1 − |n−1 − i|
            place = (size - 1) - ((size - 1) - place.abs()).abs()
        out = out.index_select(axis, place.clamp(0, max(size - 1, 0)))
    return lay(out, like)


def _pad_vjp(b: Ops, v: Vjp) -> Grads:
    x, low, high, mode = v.arg(0), v.attrs["low"], v.attrs["high"], v.attrs["mode"]
    if min((*low, *high), default=0) < 0:  # a crop is undone by padding
        return [b.pad(v.grad, *(tuple(-n for n in ends) for ends in (low, high)))]
    grad = v.grad if mode == "constant" else b.upcast(v.grad)
    for axis, (n, lo, hi) in enumerate(zip(x.shape, low, high, strict=True)):
        if lo == hi == 0:
            continue
        whole, grad = grad, b.slice(grad, axis=axis, start=lo, stop=lo + n)
        for start, count, reflected, edge in ((0, lo, 1, 0), (lo + n, hi, n - 1 - hi, n - 1)):
            if mode == "constant" or count == 0:
                continue
            part = b.slice(whole, axis=axis, start=start, stop=start + count)
            if mode == "reflect":
                part, at = b.flip(part, axes=axis), reflected
            else:
                part, at = b.sum(part, axes=axis, keepdim=True), edge
            grad = grad + _pad_axis(b, part, axis, at, n - at - part.shape[axis])
    return [b.to(grad, x.dtype)]


@moving(
    _pad_reference,
    attrs={
        "low": Attr("ints", doc="one number per dimension, e.g. low=(0, 0, 1, 1)"),
        "high": Attr("ints", doc="one number per dimension, e.g. high=(0, 0, 1, 1)"),
        "mode": Attr("str", "constant", choices=("constant", "reflect", "replicate")),
        "value": Attr("float", 0.0, "what a constant padding holds"),
    },
    vjp=_pad_vjp,
    samples="""3x4 low=(0,1) high=(2,0) | scalar low=() high=()
        | 3x4 low=(-1,1) high=(1,-2) mode=constant value=7.0 | 0x2 low=(1,0) high=(0,1)
        | 3x4@transposed low=(0,-1) high=(0,-1) | 2x3x4x5@nhwc low=(0,0,1,1) high=(0,0,1,2)
        | 3x4@sliced low=(2,1) high=(1,3) mode=reflect | 2x3 low=(0,2) high=(1,0) mode=reflect
        | 2x2x3x4@nhwc low=(0,0,1,1) high=(0,0,2,2) mode=reflect
        | 3x1 low=(2,1) high=(0,3) mode=replicate | 0x2 low=(0,1) high=(0,1) mode=replicate
        | 2x2x3x4@nhwc low=(0,0,1,1) high=(0,0,2,2) mode=replicate""",
)
def pad(x: TensorType, low: Shape, high: Shape, mode: str, value: float) -> TensorType:
    """x with elements added before (low) and after (high) along each dimension: a constant, the
    mirror image without its edge, or the edge repeated. Negative numbers crop, for constants
    only."""
    if not len(low) == len(high) == x.rank:
        what = f"low {low} and high {high} do not fit the rank {x.rank} of x"
        raise GraphError(what, remedy="give one number per dimension, 0 where nothing is added")
    for axis, (size, lo, hi) in enumerate(zip(x.shape, low, high, strict=True)):
        if mode == "constant":
            wrong, most = size + min(lo, 0) + min(hi, 0) < 0, "crop no more than there is"
        else:
            limit = max(size - 1, 0) if mode == "reflect" else (1 << 62 if size else 0)
            wrong, most = not (0 <= lo <= limit and 0 <= hi <= limit), f"use 0 to {limit}"
        if wrong:
            what = f"{mode} padding of ({lo}, {hi})"
            raise GraphError(f"{what} does not fit axis {axis} of size {size}", remedy=most)
    shape = tuple(n + lo + hi for n, lo, hi in zip(x.shape, low, high, strict=True))
    return TensorType.of(shape, x.dtype, NHWC if x.rank > 3 and x.layout == NHWC else ROW)


@moving(
    lambda x, layout: x.new_empty_strided(x.shape, strides_for(tuple(x.shape), layout)).copy_(x),
    attrs={"layout": Attr("str", "contiguous", choices=("contiguous", "nhwc"))},
    vjp=lambda b, v: [v.grad],
    samples="""3x4@transposed | scalar | 3x4@sliced | 3x4@expanded | 2x3x4x5@nhwc
        | 2x3x4x5 layout=nhwc | 2x3x4 layout=nhwc | 0x2x3 layout=nhwc | 2x3x2x2x2 layout=nhwc""",
)
def to_layout(x: TensorType, layout: str) -> TensorType:
    """A copy of x in row-major order (contiguous) or with its channels innermost (nhwc)."""
    return x.with_layout(layout)


# ---- by index: gather, index_select --------------------------------------------------------------


def _pick_vjp(b: Ops, v: Vjp) -> Grads:
    """An element that was read several times receives the sum of its gradients."""
    x, index, axis = v.arg(0), b.to(v.arg(1), int64), v.attrs["axis"]
    if index.shape != v.grad.shape:  # index_select
        index = b.reshape(index, (*(1,) * axis, -1, *(1,) * (x.rank - axis - 1)))
    total = b.scatter_add(index, b.upcast(v.grad), shape=x.shape, axis=axis)
    return [b.to(total, x.dtype), None]


picking = partial(moving, attrs={"axis": AXIS}, complete=with_axis, vjp=_pick_vjp)


@picking(
    lambda x, index, axis: torch.gather(x, axis, index),
    samples="""4x3 6x3:index<4 axis=0 | 4x3 2x5:index<3 axis=-1 | 5 0:index<5 axis=0
        | 4x3@transposed 4x2:index<3 axis=1 | 4x3@sliced 1x3:index<4 axis=0
        | 4x3@expanded 2x3:index<4 axis=0 | 2x3x2x2@nhwc 2x1x2x2:index<3 axis=1""",
)
def gather(x: TensorType, index: TensorType, axis: int) -> TensorType:
    """out[i, j, …] = x[index[i, j, …], j, …] for axis 0, and likewise for the others."""
    check_index(index, int64)
    pairs = enumerate(zip(index.shape, x.shape, strict=False))
    if index.rank != x.rank or any(i > n and d != axis for d, (i, n) in pairs):
        wrong = f"the index {list(index.shape)} does not fit x {list(x.shape)} along axis {axis}"
        remedy = "the ranks must be equal, and no other size of the index larger than that of x"
        raise GraphError(wrong, remedy=remedy)
    return TensorType.of(index.shape, x.dtype)


@picking(
    lambda x, index, axis: torch.index_select(x, axis, index),
    samples="""4x3 6:index<4 axis=0 | 4x3 2:index<3 axis=-1 | 4x3 0:index<4 axis=0
        | 4x3@transposed 4:index<3 axis=1 | 4x3@sliced 1:index<4 axis=0
        | 4x3@expanded 3:index<4 axis=0 | 2x3x4x5@nhwc 2:index<4 axis=2""",
)
def index_select(x: TensorType, index: TensorType, axis: int) -> TensorType:
    """The slices of x along an axis that a list of indices names, in that order."""
    check_index(index, int64, int32)
    if index.rank != 1:
        wrong = f"the index has rank {index.rank}, not 1"
        raise GraphError(wrong, remedy="reshape it to (-1,), or use gather")
    return TensorType.of((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]), x.dtype)
