"""Checks that operators share: element types, ranks, shapes and axes. Errors say what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, float32
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.opdef import Given


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape, aligned at the right, sizes equal or 1."""
    rank = max((len(s) for s in shapes), default=0)
    out = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if out[i] == 1:
                out[i] = size
            elif size not in (1, out[i]):
                listed = " and ".join(str(list(s)) for s in shapes)
                wrong = f"shapes {listed} do not broadcast: size {i - rank} is {out[i]} and {size}"
                remedy = "make the sizes equal, or 1 in one of them (reshape, expand)"
                raise GraphError(wrong, remedy=remedy)
    return tuple(out)


def check_float(op: str, **given: Given) -> None:
    """Raise unless every input is a float of 16 bits or more."""
    for name, t in given.items():
        if t is not None and not (t.dtype.is_float and t.dtype.bits >= 16):
            remedy = f'cast first: cast({name}, dtype="f32")'
            raise GraphError(f"{op} of {t.dtype.name} is not defined", remedy=remedy)


def check_shape(what: str, t: Given, shape: tuple[int, ...], remedy: str) -> None:
    """Raise if an input is given and does not have this shape."""
    if t is not None and t.shape != shape:
        raise GraphError(f"{what} has shape {list(t.shape)}, not {list(shape)}", remedy=remedy)


def norm_axes(axes: Sequence[int] | None, rank: int, what: str = "axes") -> tuple[int, ...]:
    """Return axes counted from 0 and sorted; raise if one is named twice. None means all. As in
    torch, a scalar may be treated as a row: its axis is 0 or -1, and the result is ()."""
    if axes is None:
        return tuple(range(rank))
    out, many = [], max(rank, 1)
    for axis in axes:
        if not -many <= axis < many:
            wrong = f"{what} {axis} is out of range for rank {rank}"
            raise GraphError(wrong, remedy=f"use a number from {-many} to {many - 1}")
        out.append(axis % rank if rank else 0)
    if len(set(out)) != len(out):
        raise GraphError(f"{what} {tuple(axes)} name one dimension twice")
    return tuple(sorted(out)) if rank else ()


def one_dtype(
    op: str, *, ints: bool = False, least: int = 16, **operands: TensorType | None
) -> None:
    """Raise unless all operands share one element type that can be multiplied and added up: a float
    of at least ``least`` bits, or with ``ints`` an integer."""
    given = {name: t.dtype for name, t in operands.items() if t is not None}
    first, dt = next(iter(given.items()))
    if dt.bits < least if dt.is_float else not ints or dt.kind == "bool" or dt.bits < 8:
        wrong = f"{op} is not defined on {dt.name}"
        raise GraphError(wrong, remedy=f'cast first: cast({first}, dtype="f32")')
    for name, other in given.items():
        if other != dt:
            wrong = f"{op} needs one element type: {first} is {dt.name}, {name} is {other.name}"
            remedy = f'cast one of them, e.g. cast({name}, dtype="{dt.short}")'
            raise GraphError(wrong, remedy=remedy)


def spatial_dims(op: str, t: TensorType) -> int:
    """How many spatial dimensions ``t`` has after batch and channels: 1, 2 or 3."""
    if not 3 <= t.rank <= 5:
        wrong = f"{op} takes a tensor [N, C, ...] of rank 3 to 5, not {list(t.shape)}"
        remedy = "reshape it; a single image needs a batch dimension of 1 in front"
        raise GraphError(wrong, remedy=remedy)
    return t.rank - 2


def per_dim(op: str, name: str, values: Shape, dims: int) -> Shape:
    """``values`` with one entry per spatial dimension; a single one stands for all."""
    if len(values) == 1:
        return values * dims
    if len(values) != dims:
        wrong = f"{name}={values} of {op} has {len(values)} entries for {dims} spatial dimensions"
        raise GraphError(wrong, remedy=f"give one int, or {dims}")
    return values


def at_least(op: str, low: int, **values: Sequence[int]) -> None:
    """Raise unless every entry of every attribute is ``low`` or more."""
    for name, entries in values.items():
        if any(entry < low for entry in entries):
            wrong = f"{name}={tuple(entries)} of {op} is too small"
            raise GraphError(wrong, remedy=f"use {low} or more")


def check_index(index: TensorType, *allowed: DType) -> None:
    """Raise unless ``index`` is of one of the integer types ``allowed``."""
    if index.dtype not in allowed:
        wrong = f"the index is {index.dtype.name}, not {' or '.join(dt.name for dt in allowed)}"
        raise GraphError(wrong, remedy='cast(index, dtype="i64")')


def check_grad(op: str, grad: TensorType, expected: Shape) -> None:
    """Raise unless the gradient of a result has the result's shape."""
    if grad.shape != expected:
        wrong = f"{op}: the gradient is {list(grad.shape)}, the forward result {list(expected)}"
        raise GraphError(wrong, remedy="use the shape and attributes of the forward operator")


def check_x(name: str, x: TensorType, least_rank: int, eps: float) -> None:
    check_float(name, x=x)
    if x.rank < least_rank:
        wrong = f"{name} needs rank {least_rank} or more, x has rank {x.rank}"
        raise GraphError(wrong, remedy="add the missing dimensions with reshape")
    if not eps >= 0.0:
        raise GraphError(f"{name} needs eps of 0 or more, not {eps}", remedy="use eps=1e-5")


def check_params(name: str, x: TensorType, shape: Shape, params: Mapping[str, Given]) -> None:
    """Raise unless weights and statistics have this shape, and the element type of x, or float32
    for an x of fewer bits."""
    for slot, p in params.items():
        check_shape(f"{slot} of {name} of x {list(x.shape)}", p, shape, f"reshape {slot} to that")
        if p is not None and p.dtype not in (x.dtype, float32 if x.dtype.is_low else x.dtype):
            wrong = f"{slot} of {name} is {p.dtype.name}, x is {x.dtype.name}"
            raise GraphError(wrong, remedy=f'cast it: cast({slot}, dtype="{x.dtype.short}")')


def check_like_x(name: str, x: TensorType, **others: Given) -> None:
    """Raise unless tensors have the shape and element type of x."""
    for slot, t in others.items():
        if t is not None and (t.shape, t.dtype) != (x.shape, x.dtype):
            wrong = f"{slot} of {name} is {t}, x is {x}"
            raise GraphError(wrong, remedy=f"give {slot} the shape and element type of x")


def check_spread(name: str, x: TensorType, count: int, remedy: str) -> Shape:
    """Return the shape of the parameters; raise if a channel has one value only (``count``)."""
    if count == 1:
        wrong = f"{name} of x {list(x.shape)} sees one value per channel, which has no variance"
        raise GraphError(wrong, remedy=remedy)
    return x.shape[1:2]
