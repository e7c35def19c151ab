"""ATen → ours: shapes, copies, pieces, padding, indexing, casts and constant tensors."""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch

from deuteron.frontends.aten_site import Entry, Number, Site, axis_of
from deuteron.ir.dtype import bool_, int64, uint8
from deuteron.ir.types import same_strides, strides_for
from deuteron.ops.emit import Sym

# ---- views -------------------------------------------------------------------------------------


def _permute(b: Site, x: Sym, dims: Sequence[int]) -> Sym:
    order = tuple(d % x.rank for d in dims)
    return x if order == tuple(range(x.rank)) else b.permute(x, dims=order)


def _transpose(b: Site, x: Sym, first: int, second: int) -> Sym:
    order = list(range(x.rank))
    if order:
        i, j = first % x.rank, second % x.rank
        order[i], order[j] = order[j], order[i]
    return _permute(b, x, order)


def _dropout(b: Site, x: Sym, p: float, train: bool | None) -> Sym:
    b.need(not train or p == 0, "dropout in training mode")
    return x


# ---- pieces --------------------------------------------------------------------------------------


def _range(x: Sym, dim: int, *bounds: int | None) -> tuple[int, int, int, int]:
    """The axis, and where x[start:end:step] begins and ends along it."""
    axis = axis_of(dim, x.rank)
    low, high, step = slice(*bounds).indices(x.shape[axis])
    return axis, low, max(low, high), step


def _select(b: Site, x: Sym, dim: int, index: int) -> Sym:
    axis = axis_of(dim, x.rank)
    at = index % x.shape[axis]
    return b.shaped(b.part(x, axis, at, at + 1))


def _pieces(b: Site, x: Sym, dim: int, sizes: Sequence[int]) -> tuple[Sym | None, ...]:
    """Consecutive slices; only those that are read are made."""
    axis, begin, found = axis_of(dim, x.rank), 0, []
    for i, size in enumerate(sizes):
        found.append(b.part(x, axis, begin, begin + size) if i in b.used else None)
        begin += size
    return tuple(found)


def _split(b: Site, x: Sym, size: int, dim: int) -> tuple[Sym | None, ...]:
    """Pieces of ``size``, the last one smaller where it does not divide; torch has worked out how
    many."""
    axis = axis_of(dim, x.rank)
    return _pieces(b, x, dim, [t.shape[axis] for t in b.want if t is not None])


def _unbind(b: Site, x: Sym, dim: int) -> tuple[Sym | None, ...]:
    pieces = _pieces(b, x, dim, [1] * x.shape[dim])
    return tuple(None if p is None else b.shaped(p) for p in pieces)


def _concat(b: Site, xs: Sequence[Sym], dim: int) -> Sym:
    """torch.cat leaves out old-fashioned empty tensors of shape [0], whatever the others are."""
    rank = b.out.rank
    same = [x for x in xs if x.rank == rank]
    b.need(bool(same), "nothing to put together")
    return b.wanted(b.join(same, axis_of(dim, rank)))


def _roll(b: Site, x: Sym, shifts: Sequence[int], dims: Sequence[int]) -> Sym:
    """Elements that leave at one end of an axis come in at the other."""
    if not dims:  # roll all elements as one row
        return b.one("reshape", _roll(b, b.reshape(x, shape=(-1,)), shifts, (0,)), shape=x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(dim, x.rank)
        size = x.shape[axis]
        cut = -shift % size if size else 0
        if cut:
            x = b.concat([b.part(x, axis, cut, size), b.part(x, axis, 0, cut)], axis=axis)
    return x


def _stack(b: Site, xs: Sequence[Sym], dim: int) -> Sym:
    axis = dim % b.out.rank
    one = [1 if i == axis else n for i, n in enumerate(b.out.shape)]
    return b.wanted(b.join([b.shaped(x, one) for x in xs], axis))


def _repeat(b: Site, x: Sym, repeats: Sequence[int]) -> Sym:
    """Each dimension gets a new one to its left, which is expanded and then merged with it."""
    sizes = (1,) * (len(repeats) - x.rank) + x.shape
    pairs = list(zip(repeats, sizes, strict=True))
    apart = b.shaped(x, [s for r, n in pairs for s in ((1, n) if r != 1 else (n,))])
    full = b.stretched(apart, [s for r, n in pairs for s in ((r, n) if r != 1 else (n,))])
    return b.shaped(full)


def _repeat_interleave(b: Site, x: Sym, repeats: int, dim: int | None, size: Any) -> Sym:
    """As :func:`_repeat`, but the expanded dimension stands to the right."""
    if dim is None:
        x, dim = b.shaped(x, (x.type.numel,)), 0
    axis = axis_of(dim, x.rank)
    lead, tail = x.shape[: axis + 1], x.shape[axis + 1 :]
    apart = b.shaped(x, (*lead, 1, *tail))
    return b.shaped(b.stretched(apart, (*lead, repeats, *tail)))


def _meshgrid(b: Site, xs: Sequence[Sym], indexing: str = "ij") -> tuple[Sym, ...]:
    b.need(indexing == "ij", "meshgrid with indexing='xy'")
    rank = len(xs)
    apart = (b.shaped(x, [*[1] * i, x.type.numel, *[1] * (rank - i - 1)]) for i, x in enumerate(xs))
    return tuple(map(b.stretched, apart))


def _channel_shuffle(b: Site, x: Sym, groups: int) -> Sym:
    n, c, *rest = x.shape
    apart = b.reshape(x, shape=(n, groups, c // groups, *rest))
    return b.shaped(b.permute(apart, dims=(0, 2, 1, *range(3, apart.rank))))


# ---- writing into a part, without writing -------------------------------------------------------


def _slice_scatter(b: Site, x: Sym, part: Sym, dim: int, *bounds: int | None) -> Sym:
    axis, low, high, step = _range(x, dim, *bounds)
    # seen as a matrix with rows of ``step`` elements, this is one column, if all rows are whole
    if step > 1:
        size = x.shape[axis]
        whole = size % step == 0 and low < step and high > size - step + low
        b.need(whole, "writing to every second element or fewer, and not to the end")
        lead, tail = x.shape[:axis], x.shape[axis + 1 :]
        rows = b.shaped(x, (*lead, size // step, step, *tail))
        column = b.shaped(
            b.stretched(part, (*lead, size // step, *tail)), (*lead, size // step, 1, *tail)
        )
        return b.shaped(_slice_scatter(b, rows, column, axis + 1, low, low + 1), x.shape)
    shape = tuple(high - low if i == axis else n for i, n in enumerate(x.shape))
    before, after = b.part(x, axis, 0, low), b.part(x, axis, high, x.shape[axis])
    return b.join([before, b.to(b.stretched(part, shape), x.dtype), after], axis)


def _select_scatter(b: Site, x: Sym, part: Sym, dim: int, index: int) -> Sym:
    axis = axis_of(dim, x.rank)
    at = index % x.shape[axis]
    row = b.shaped(part, [1 if i == axis else n for i, n in enumerate(x.shape)])
    return _slice_scatter(b, x, row, axis, at, at + 1)


# ---- padding ---------------------------------------------------------------------------------


def _pad(b: Site, x: Sym, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Sym:
    """``pad`` lists (low, high) from the last dimension backwards."""
    b.need(mode in ("constant", "reflect", "replicate"), f"padding of mode {mode!r}")
    low, high = [0] * x.rank, [0] * x.rank
    for i in range(len(pad) // 2):
        low[-1 - i], high[-1 - i] = pad[2 * i], pad[2 * i + 1]
    if not any(low) and not any(high):
        return x
    return b.pad(x, low=low, high=high, mode=mode, value=value or 0.0)  # type: ignore[no-any-return]


# ---- indexing ------------------------------------------------------------------------------------


FEW = 4  # x may be copied first if it has at most so many elements for each that is picked


def _from_start(b: Site, index: Sym, size: int) -> Any:
    """An index counted from the start where it was counted from the end."""
    return b.where(b.lt(*b.pair(index, 0)), b.add(*b.pair(index, size)), index)


def _index(b: Site, x: Sym, indices: Sequence[Sym | None]) -> Sym:
    """x[:, index] with a tensor of whole numbers selects along its dimension. With several tensors,
    as in x[i, :, j], their dimensions are merged into one, of which one number then picks a row for
    each place."""
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    given = [i for i in indices if i is not None]
    masks = any(i.dtype in (bool_, uint8) or i.dtype.is_float for i in given)
    b.need(bool(given) and not masks, "indexing by a mask")
    if len(given) == 1:
        flat, first = _from_start(b, given[0], x.shape[axes[0]]), axes[0]
    else:
        # torch then puts the indexed dimensions first
        apart = axes != list(range(axes[0], axes[-1] + 1))
        copied = (apart or not b.row_major) and x.type.numel > FEW * b.out.numel
        b.need(not copied, "indexing by several tensors, a few elements of what lies apart")
        flat, first = _row_of(b, given, [x.shape[axis] for axis in axes]), 0 if apart else axes[0]
        if apart:
            x = b.permute(x, dims=(*axes, *(a for a in range(x.rank) if a not in axes)))
        last = first + len(axes)
        rows = prod(x.shape[first:last])
        x = b.reshape(x, shape=(*x.shape[:first], rows, *x.shape[last:]))
    return b.shaped(b.index_select(x, b.shaped(flat, (flat.type.numel,)), axis=first))


def _row_of(b: Site, indices: Sequence[Sym], sizes: Sequence[int]) -> Any:
    """The row that indices into several dimensions mean. If one of them is out of range, it is the
    number of rows, so that whoever checks the row sees it."""
    row, inside = None, None
    for index, size in zip(indices, sizes, strict=True):
        at = _from_start(b, b.to(index, int64), size)
        there = b.logical_and(b.ge(*b.pair(at, 0)), b.lt(*b.pair(at, size)))
        inside = there if inside is None else b.logical_and(inside, there)
        row = at if row is None else b.add(b.mul(*b.pair(row, size)), at)
    return b.where(inside, row, b.literal(prod(sizes), int64))


def _index_put(b: Site, x: Sym, indices: Sequence[Sym | None], src: Sym, add: bool = False) -> Any:
    """Add rows of ``src`` to those of x that one tensor of whole numbers names: the gradient of
    x[index], where x is zero."""
    b.need(add and x.dtype.is_float, "values put in places by index")
    index = indices[0]
    b.need(len(indices) == 1 and index is not None, "adding by several indices, or none of rows")
    assert index is not None
    b.need(index.dtype != bool_ and x.rank > 0, "adding by a mask")
    entries, features = index.type.numel, prod(x.shape[1:])
    rows = b.shaped(b.stretched(src, (*index.shape, *x.shape[1:])), (entries, features))
    flat = b.shaped(_from_start(b, index, x.shape[0]), (entries,))
    return _onto(b, x, b.shaped(b.embedding_grad(rows, flat, rows=x.shape[0]), x.shape))


def _index_add(b: Site, x: Sym, dim: int, index: Sym, src: Sym, alpha: Number = 1) -> Any:
    """Add each slice of ``src`` along a dimension to the slice of x that its index names."""
    b.need(src.rank == x.rank > 0 and index.rank == 1, "adding to a single number")
    along = [1] * x.rank
    along[dim] = index.type.numel
    return _summed(b, x, dim, b.shaped(b.to(index, int64), along), b.scaled(src, alpha))


def _scatter_add(b: Site, x: Sym, dim: int, index: Sym, src: Sym) -> Any:
    b.need(index.shape == src.shape, "an index for a part of src")
    return _summed(b, x, dim, index, src)


def _summed(b: Site, x: Sym, dim: int, index: Sym, src: Sym) -> Any:
    b.need(x.dtype.is_float and x.rank > 0, "whole numbers added up by index")
    return _onto(b, x, b.scatter_add(index, src, shape=x.shape, axis=axis_of(dim, x.rank)))


def _onto(b: Site, x: Sym, sums: Sym) -> Any:
    """``x + sums``; just ``sums`` if x is nothing but zeros."""
    fill = b.build.producer.get(x.name)
    one = b.build.constants.get(fill.uses[0]) if fill is not None and fill.op == "expand" else None
    zeros = one is not None and one.data.numel() == 1 and not one.data.any()
    return sums if zeros else b.add(x, sums)


def _along(op: str) -> Entry:
    return lambda b, x, dim, index, *_: b.call(op, x, index, axis=axis_of(dim, x.rank))


def _one_hot(b: Site, index: Sym, classes: int) -> Sym:
    b.need(classes > 0, "one_hot with a number of classes read from the data")
    column = b.shaped(index, (*index.shape, 1))
    return b.to(b.eq(column, b.constant(torch.arange(classes), "classes")), int64)


def _triangle(keep: Callable[..., torch.Tensor]) -> Entry:
    """tril and triu: a constant mask chooses between x and 0."""

    def entry(b: Site, x: Sym, diagonal: int = 0) -> Any:
        mask = keep(torch.ones(x.shape[-2:], dtype=torch.bool), diagonal)
        return b.where(b.constant(mask, "triangle"), x, b.literal(0, x.dtype))

    return entry


def _cast(b: Site, x: Sym, *options: Any) -> Sym:
    """``to`` in all its forms: an element type, and perhaps a memory order."""
    order = next((o for o in options if isinstance(o, torch.memory_format)), None)
    return b.laid_out(b.wanted(x), order)


_REGROUPED = """view.default _unsafe_view.default reshape.default flatten.using_ints squeeze.default
    squeeze.dim squeeze.dims unsqueeze.default unflatten.int view_as.default"""
_CASTS = "_to_copy.default to.dtype to.dtype_layout to.device to.other type_as.default"


def _all_in_order(b: Site, x: Sym, size: Sequence[int], stride: Sequence[int]) -> None:
    """Refuse the call unless size and stride show all elements of a row-major tensor in their
    order."""
    shape = tuple(size)
    plain = same_strides(shape, tuple(stride), strides_for(shape, "contiguous"))
    whole = b.row_major and plain and prod(shape) == x.type.numel
    b.need(whole, "memory seen in an order of its own")


def _as_strided(b: Site, x: Sym, size: Any, stride: Any, *_: Any) -> Sym:
    _all_in_order(b, x, size, stride)
    return b.shaped(x, size)


def _as_strided_scatter(b: Site, x: Sym, src: Sym, size: Any, stride: Any, *_: Any) -> Sym:
    """All of x is replaced."""
    _all_in_order(b, x, size, stride)
    return b.shaped(b.to(src, x.dtype), x.shape)


TABLE: dict[str, Entry] = {
    _REGROUPED: lambda b, x, *_: b.shaped(x),  # torch has worked out the new shape already
    "expand.default expand_as.default broadcast_to.default": lambda b, x, *_: b.stretched(x),
    "alias.default detach.default lift_fresh_copy.default": lambda b, x: x,
    _CASTS: _cast,
    # nothing in a graph is written to, so a copy is only worth making for its strides
    "clone.default contiguous.default": lambda b, x, order: b.laid_out(x, order),
    "dropout.default feature_dropout.default native_dropout.default": _dropout,
    "permute.default": _permute,
    "transpose.int": _transpose,
    "t.default": lambda b, x: _transpose(b, x, 0, -1),
    "slice.Tensor": lambda b, x, dim, *bounds: b.part(x, *_range(x, dim, *bounds)),
    "narrow.default": lambda b, x, dim, at, size: b.part(x, *_range(x, dim, at, at + size)),
    "select.int": _select,
    "split.Tensor chunk.default unsafe_split.Tensor": _split,
    "split_with_sizes.default unsafe_split_with_sizes.default": lambda b, x, sizes, dim: _pieces(
        b, x, dim, sizes
    ),
    "unbind.int": _unbind,
    "cat.default": _concat,
    "stack.default": _stack,
    "roll.default": _roll,
    "repeat.default": _repeat,
    "repeat_interleave.self_int": _repeat_interleave,
    "meshgrid.default meshgrid.indexing": _meshgrid,
    "broadcast_tensors.default": lambda b, xs: tuple(map(b.stretched, xs)),
    "channel_shuffle.default": _channel_shuffle,
    "flip.default": lambda b, x, dims: b.flip(x, axes=tuple(axis_of(d, x.rank) for d in dims)),
    "as_strided.default": _as_strided,
    "as_strided_scatter.default": _as_strided_scatter,
    "slice_scatter.default": _slice_scatter,
    "select_scatter.default": _select_scatter,
    # all of x replaced, by values in the shape and element type of x
    "copy.default fill.Tensor": lambda b, x, y, *_: b.stretched(b.to(y, x.dtype), x.shape),
    "pad.default": _pad,
    "constant_pad_nd.default": lambda b, x, pad, value: _pad(b, x, pad, "constant", value),
    **{f"reflection_pad{n}d.default": partial(_pad, mode="reflect") for n in (1, 2, 3)},
    **{f"replication_pad{n}d.default": partial(_pad, mode="replicate") for n in (1, 2, 3)},
    "index.Tensor": _index,
    "index_put.default _unsafe_index_put.default": lambda b, *args: _index_put(b, *args[:4]),
    "index_add.default": _index_add,
    "scatter_add.default": _scatter_add,
    "index_select.default": _along("index_select"),
    "gather.default": _along("gather"),
    "embedding.default": lambda b, weight, index, *_: b.embedding(
        weight, index, **b.settings("padding_idx scale_grad_by_freq")
    ),
    "one_hot.default": _one_hot,
    "tril.default": _triangle(torch.tril),
    "triu.default": _triangle(torch.triu),
}

# Calls whose result is one number everywhere: which argument that number is, or the number itself.
# They become an expanded scalar; nothing of their size is stored.
_ZEROS = "zeros.default zeros_like.default new_zeros.default"
FILLS: dict[str, Callable[[Sequence[Any]], Number]] = {
    "full.default full_like.default fill.Scalar": lambda args: args[1],
    "new_full.default": lambda args: args[2],
    "scalar_tensor.default": lambda args: args[0],
    f"{_ZEROS} _efficientzerotensor.default": lambda args: 0,
    "empty.memory_format empty_like.default new_empty.default": lambda args: 0,
    "ones.default ones_like.default new_ones.default": lambda args: 1,
}
