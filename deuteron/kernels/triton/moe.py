"""Rows grouped by expert, and the products of each group with a matrix of its own.

    y[r] = f(x[order[r] // share] · w[e]ᵀ, …)      r from starts[e] up to starts[e + 1]
    dw[e] = Σ grad[r]ᵀ · x[order[r] // share]      over the same r

Nothing is sorted in memory or padded. A program finds its tile by itself: it reads where all groups
start, adds up how many tiles each of them has, and finds the group that its number falls into. So
the grid can be the largest number of tiles that any groups need, and the host waits for nothing.
Programs that are left without a tile end at once.

Rows of x are gathered while they are loaded. The epilogue, a formula, is applied to the sums in
registers, and with ``gate`` there are two second factors. Bytes: every matrix that has rows once,
and x and y once for each tile of columns; tiles of one group are walked together, so that all but
the first read of each comes from L2.

Where starts do not rise from 0 to the number of rows, rows that are in no group are nan.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula, _place, finish

# rows, columns, steps: of all products together; tokens: rows of x; groups; share: rows of the
# result that a row of x has; x_line, w_line: row strides; w_matrix: from one matrix of w to the
# next.
Sizes = namedtuple("Sizes", "rows columns steps tokens groups share x_line w_line w_matrix")
# rows, columns: of a tile of the result; steps: of the sum at a time; group: rows of tiles walked
# together; groups: a power of two beyond the number of groups; turned: w lies as [steps, columns];
# gate: there are two second factors; even: all tiles are full; precision: of float32 products.
Tile = namedtuple("Tile", "rows columns steps group groups turned gate even precision")


@triton.jit
def _bounds(starts, size, GROUPS: tl.constexpr):
    """Return where each group begins and ends. One more at the end stands for rows in no group,
    which are all rows where the starts do not rise from 0."""
    e = tl.arange(0, GROUPS)
    begin = tl.load(starts + e, mask=e <= size.groups, other=0).to(tl.int32)
    end = tl.load(starts + e + 1, mask=e < size.groups, other=0).to(tl.int32)
    end = tl.where(e == size.groups, size.rows, end)
    wrong = (begin < 0) | (end < begin) | (end > size.rows) | ((e == 0) & (begin != 0))
    broken = tl.sum((wrong & (e <= size.groups)).to(tl.int32), 0) > 0
    begin = tl.where(broken, 0, begin)
    end = tl.where(broken, tl.where(e == size.groups, size.rows, 0), end)
    return e, begin, end


@triton.jit
def _tile(starts, number, across, size, T: tl.constexpr):
    """Return the group of a tile, its first row and column, and the row where the group ends."""
    e, begin, end = _bounds(starts, size, T.groups)
    tiles = tl.cdiv(end - begin, T.rows) * across
    until = tl.cumsum(tiles, 0)
    group = tl.sum((until <= number).to(tl.int32), 0)
    here = e == group
    first = tl.sum(tl.where(here, begin, 0), 0)
    last = tl.sum(tl.where(here, end, 0), 0)
    inside = number - tl.sum(tl.where(here, until - tiles, 0), 0)
    row, column = _place(inside, tl.cdiv(last - first, T.rows), across, T.group)
    return group, first + row * T.rows, column * T.columns, last


@triton.jit
def _gathered(order, m, live, size):
    """Return, for rows m of the result, the rows of x, and whether they exist."""
    if order is None:
        row = m
    else:
        row = tl.load(order + m, mask=live, other=0).to(tl.int32) // size.share
    there = live & (row >= 0) & (row < size.tokens)
    return tl.where(there, row, 0).to(tl.int64), there


@triton.jit
def _columns(n0, T: tl.constexpr):
    """Return the columns of a block of w; with a gate each one twice, once for each factor."""
    if T.gate:
        n = n0 + tl.arange(0, 2 * T.columns) // 2
    else:
        n = n0 + tl.arange(0, T.columns)
    return n


@triton.jit
def _matrix(w, w2, k, n, group, size, T: tl.constexpr):
    """Return addresses of a block [steps, columns] of a group's matrix. With a gate the columns of
    the two factors alternate, so that one product computes both, and a thread ends up with both
    results of a column side by side."""
    if T.gate:
        other = tl.arange(0, 2 * T.columns) % 2 == 1
        start = tl.where(other, w2, w)[None, :]
    else:
        start = w
    start += group.to(tl.int64) * size.w_matrix
    if T.turned:
        place = start + k.to(tl.int64)[:, None] * size.w_line + n[None, :]
    else:
        place = start + n.to(tl.int64)[None, :] * size.w_line + k[:, None]
    return place


@triton.jit
def _block(place, k, n, size, T: tl.constexpr):
    """Load the block of a matrix that a tile needs next."""
    if T.even:
        found = tl.load(place)
    else:
        inside = (k < size.steps)[:, None] & (n < size.columns)[None, :]
        found = tl.load(place, mask=inside, other=0.0)
    return found


@triton.jit
def _linear(x, w, w2, y, starts, order, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    across = tl.cdiv(size.columns, T.columns)
    group, m0, n0, end = _tile(starts, tl.program_id(0), across, size, T)
    if group <= size.groups:
        m = m0 + tl.arange(0, T.rows)
        k = tl.arange(0, T.steps)
        live = m < end
        row, there = _gathered(order, m, live, size)
        factors: tl.constexpr = 2 if T.gate else 1
        sums = tl.zeros((T.rows, factors * T.columns), tl.float32)
        if group < size.groups:
            both = _columns(n0, T)
            left = x + row[:, None] * size.x_line + k[None, :]
            right = _matrix(w, w2, k, both, group, size, T)
            step = size.w_line if T.turned else 1
            for first in range(0, size.steps, T.steps):
                if T.even:
                    a = tl.load(left)
                else:
                    a = tl.load(left, mask=(first + k < size.steps)[None, :], other=0.0)
                b = _block(right, first + k, both, size, T)
                sums = tl.dot(a, b, sums, T.precision)
                left += T.steps
                right += T.steps * step
        if T.gate:
            sums, more = tl.split(tl.reshape(sums, (T.rows, T.columns, 2)))
        else:
            more = sums
        n = n0 + tl.arange(0, T.columns)
        found = FINISH(sums, more, others, 0, m0, n0, size, T, 0)
        found = tl.where((there & (group < size.groups))[:, None], found, float("nan"))
        place = y + m.to(tl.int64)[:, None] * size.columns + n[None, :]
        inside = live[:, None] & (n < size.columns)[None, :]
        tl.store(place, found.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _outer(grad, x, dw, starts, order, size, T: tl.constexpr):
    """A program has a tile [rows, columns] of one matrix of dw; here the rows of a tile are columns
    of grad, and its steps are rows of the group."""
    down, across = tl.cdiv(size.columns, T.rows), tl.cdiv(size.steps, T.columns)
    row, column = _place(tl.program_id(0), down, across, T.group)
    group = tl.program_id(1)
    e, begins, ends = _bounds(starts, size, T.groups)
    begin = tl.sum(tl.where(e == group, begins, 0), 0)
    end = tl.sum(tl.where(e == group, ends, 0), 0)
    n = row * T.rows + tl.arange(0, T.rows)
    k = column * T.columns + tl.arange(0, T.columns)
    sums, lost = tl.zeros((T.rows, T.columns), tl.float32), tl.zeros((T.steps,), tl.int32)
    for first in range(begin, end, T.steps):
        m = first + tl.arange(0, T.steps)
        live = m < end
        at, there = _gathered(order, m, live, size)
        lost += (live & ~there).to(tl.int32)
        left = grad + m.to(tl.int64)[:, None] * size.w_line + n[None, :]
        right = x + at[:, None] * size.x_line + k[None, :]
        if T.even:
            a = tl.load(left, mask=live[:, None], other=0.0)
            b = tl.load(right, mask=live[:, None], other=0.0)
        else:
            a = tl.load(left, mask=live[:, None] & (n < size.columns)[None, :], other=0.0)
            b = tl.load(right, mask=live[:, None] & (k < size.steps)[None, :], other=0.0)
        sums = tl.dot(tl.trans(a), b, sums, T.precision)
    sums = tl.where(tl.sum(lost, 0) > 0, float("nan"), sums)
    place = dw + group.to(tl.int64) * size.w_matrix + n.to(tl.int64)[:, None] * size.steps
    inside = (n < size.columns)[:, None] & (k < size.steps)[None, :]
    tl.store(place + k[None, :], sums.to(dw.dtype.element_ty), mask=inside)


@triton.jit
def _group(index, starts, order, places, count, groups, BLOCK: tl.constexpr):
    """A program has one group; one more program only counts. A program counts the entries of all
    groups before its own, and then places its own entries behind these, in their order. Entries of
    no group are put into the last."""
    group = tl.program_id(0)
    i = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, count, BLOCK):
        e = tl.load(index + first + i, mask=first + i < count, other=0)
        e = tl.where((e >= 0) & (e < groups), e, groups - 1).to(tl.int32)
        before += ((e < group) & (first + i < count)).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(starts + group, at)
    for first in range(0, count, BLOCK):
        e = tl.load(index + first + i, mask=first + i < count, other=0)
        e = tl.where((e >= 0) & (e < groups), e, groups - 1).to(tl.int32)
        own = ((e == group) & (first + i < count)).to(tl.int32)
        place = at + tl.cumsum(own, 0) - 1
        tl.store(order + place, first + i, mask=own > 0)
        tl.store(places + first + i, place, mask=own > 0)
        at += tl.sum(own, 0)


@triton.jit
def _clear(dw, starts, count, BLOCK: tl.constexpr):
    """Write zeros to the matrices of groups without rows; a matrix has ``count`` numbers."""
    group = tl.program_id(1)
    if tl.load(starts + group + 1) <= tl.load(starts + group):
        dw += group.to(tl.int64) * count
        i = tl.arange(0, BLOCK)
        for first in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
            tl.store(
                dw + first + i, tl.zeros((BLOCK,), dw.dtype.element_ty), mask=first + i < count
            )


linear, outer, group = Launchable(_linear), Launchable(_outer), Launchable(_group)
clear = Launchable(_clear)


def most_tiles(rows: int, groups: int, height: int) -> int:
    """Return the most tiles, ``height`` rows high, that ``rows`` in groups of any sizes can need;
    rows in no group count as one more group."""
    some = min(rows, groups + 1)  # groups that are not empty; the last tile of each may be one row
    return (rows - some) // height + some


def prepare_linear(
    size: Sizes, tile: Tile, after: EpilogueFormula, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (x, w, w2, y, starts, order, others=…): without a gate w2 is w again, order
    may be None, and ``others`` are operands of the epilogue."""
    last = finish(after, tile.gate)
    tiles = most_tiles(size.rows, size.groups, tile.rows)
    grid = (tiles * -(-size.columns // tile.columns),)

    def run(*given: Any, others: Sequence[Any] = ()) -> None:
        linear(grid, *given, tuple(others), size, warps=warps, stages=stages, T=tile, FINISH=last)

    return run


def prepare_outer(size: Sizes, tile: Tile, warps: int, stages: int) -> Callable[..., None]:
    """Return a function (grad, x, dw, starts, order); order may be None. Here ``w_line`` is the row
    stride of grad, and ``w_matrix`` is from one matrix of dw to the next."""
    tiles = -(-size.columns // tile.rows) * -(-size.steps // tile.columns)
    grid = (tiles, size.groups)
    return outer.over(grid, size, warps=warps, stages=stages, T=tile)


def prepare_group(count: int, groups: int, block: int, warps: int) -> Callable[..., None]:
    """Return a function (index, starts, order, places)."""
    return group.over((groups + 1,), count, groups, warps=warps, BLOCK=block)


def clear_empty(dw: Any, starts: Any) -> None:
    """Set dw [groups, …] to 0 for groups without rows, which a library may leave unwritten."""
    clear((64, dw.shape[0]), dw, starts, dw[0].numel(), BLOCK=4096)
