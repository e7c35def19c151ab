"""Spatial-pyramid pooling: all grids of an image in one launch.

    y[n, c, cell] = mean or max of x[n, c, top:bottom, left:right];  dx = Σ over cells of its share

A program takes some planes (n, c) and goes through the grids one after another, so a plane is read
from memory once, and by the other grids from the cache of the multiprocessor:

    bytes = size · (x + y), and (grids − 1) · size · x from the cache

It adds a row of cells up from above to below, and only then splits it into cells. Where channels
are adjacent a program takes one row of cells, and vectors of channels.

Backwards an element gathers the gradients of the cells it lies in, at most a few per grid, so
nothing is added by atomics and two runs agree to the last bit. A maximum is looked up first: one
launch writes each cell's winner, the next compares. Ties go to the first, nan to the last, as in
torch.

Written out, this is a pool per grid, each of which reads x again, and a concatenation; cells of a
maximum with more than 255 elements would be torch's. One launch instead of five takes 39 µs instead
of 67 for a small image, with its gradient 239 instead of 383 (bench/results/small-h200.md). Large
images were not measured on a GPU: there it saves three of four reads of x.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.ir.types import TensorType
from deuteron.kernels.triton.launch import Launchable

NONE: tl.constexpr = tl.constexpr(2**31 - 1)  # no winner yet


class Tile(NamedTuple):
    """A program's planes, and rows and columns of each that it holds at a time."""

    planes: int
    rows: int
    columns: int


class Grids(NamedTuple):
    """Cells per side of each grid, all cells, and all rows of cells. ``flat``: images are rows.
    ``last``: channels are adjacent; ``adjacent``: the elements of a row are. One element lies in at
    most ``tall`` rows and ``broad`` columns of cells of a grid."""

    sizes: tuple[int, ...]
    cells: int
    bands: int
    flat: bool
    last: bool
    adjacent: bool
    tall: int
    broad: int


@triton.jit
def _spread_out(n, AT: tl.constexpr, LAST: tl.constexpr):
    """Numbers along one side of a tile, which is [planes, rows, columns], or with planes last."""
    if AT == "plane":
        return n[None, None, :] if LAST else n[:, None, None]
    elif AT == "row":
        return n[:, None, None] if LAST else n[None, :, None]
    else:
        return n[None, :, None] if LAST else n[None, None, :]


@triton.jit
def _place(block, channels, sn, sc, G: tl.constexpr, T: tl.constexpr):
    """Image and channels of a block of planes, and where they begin. A block stays in one image, so
    that channels that are adjacent in memory are seen to be."""
    blocks = tl.cdiv(channels, T.planes)
    n = block // blocks
    channel = _spread_out(block % blocks * T.planes + tl.arange(0, T.planes), "plane", G.last)
    start = n.to(tl.int64) * sn + (channel if G.last else channel.to(tl.int64) * sc)
    return n, channel, start


@triton.jit
def _winner(held, where, AXIS: tl.constexpr):
    """The largest along an axis and its place: the first of equals, the last nan."""
    odd = held != held
    some = tl.max(odd.to(tl.int32), AXIS, keep_dims=True) > 0
    best = tl.max(tl.where(odd, float("-inf"), held), AXIS, keep_dims=True)
    last = tl.max(tl.where(odd, where, -1), AXIS, keep_dims=True)
    first = tl.min(tl.where(held == best, where, NONE), AXIS, keep_dims=True)
    return tl.where(some, float("nan"), best), tl.where(some, last, first)


@triton.jit
def _joined(held, where, AXIS: tl.constexpr, KIND: tl.constexpr):
    """What is held along an axis comes to."""
    if KIND == "avg":
        return tl.sum(held, AXIS, keep_dims=True), where
    else:
        return _winner(held, where, AXIS)


@triton.jit
def _take(held, where, v, inside, place, KIND: tl.constexpr):
    """A tile of elements joins what is held of those before."""
    if KIND == "avg":
        held += v
    else:
        wins = (v > held) | (v != v)
        if KIND == "where":
            wins = wins | (where == NONE)
            where = tl.where(inside & wins, place, where)
        held = tl.where(inside & wins, v, held)
    return held, where


@triton.jit
def _put(out, held, where, count, live, AXIS: tl.constexpr, KIND: tl.constexpr):
    """The result of a cell, from what its columns came to."""
    held, where = _joined(held, where, AXIS, KIND)
    if KIND == "avg":
        held = held / count
    tl.store(out, (where if KIND == "where" else held).to(out.dtype.element_ty), mask=live)


@triton.jit
def _span(i, length, count):
    """Where the i-th of ``count`` cells over ``length`` elements begins and ends."""
    return i * length // count, ((i + 1) * length + count - 1) // count


@triton.jit
def _pool(x, y, sizes, strides, KIND: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """All cells of some planes, or, where channels are adjacent, one row of cells of one grid.
    KIND: "avg", "max", or "where", which writes the winner's place in the image."""
    channels, height, width = sizes
    sn, sc, sh, sw = strides
    row = _spread_out(tl.arange(0, T.rows), "row", G.last)
    column = _spread_out(tl.arange(0, T.columns), "column", G.last)
    if G.last:
        band = tl.program_id(0) % G.bands
        n, channel, start = _place(tl.program_id(0) // G.bands, channels, sn, sc, G, T)
        size, i, base = G.sizes[0], band, 0
        first_band, begin = 0, 0
        for g in tl.static_range(len(G.sizes)):
            if band >= first_band:
                size, i, base = G.sizes[g], band - first_band, begin
            first_band += 1 if G.flat else G.sizes[g]
            begin += G.sizes[g] if G.flat else G.sizes[g] * G.sizes[g]
        out = y + (n.to(tl.int64) * channels + channel) * G.cells + base + i * size
        at = (channel, row, column, channels, height, width, sh, sw)
        _cells_last(x + start, out, i, size, at, KIND, G, T)
    else:
        n, channel, start = _place(tl.program_id(0), channels, sn, sc, G, T)
        source = x + start + (column if G.adjacent else column.to(tl.int64) * sw)
        out = y + (n.to(tl.int64) * channels + channel) * G.cells
        at = (channel, row, column, channels, height, width, sh, sw)
        begin = 0
        for g in tl.static_range(len(G.sizes)):
            size = G.sizes[g]
            for i in range(1 if G.flat else size):
                _cells_of_rows(source, out + begin + i * size, i, size, at, KIND, G, T)
            begin += size if G.flat else size * size


@triton.jit
def _cells_of_rows(source, out, i, size, at, KIND: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """The i-th row of cells of a grid, whole rows at a time: first every column from above to
    below, then what belongs to each cell."""
    channel, row, column, channels, height, width, sh, _ = at
    WIDE: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
    EMPTY: tl.constexpr = 0.0 if KIND == "avg" else float("-inf")
    top, bottom = _span(i, height, 1 if G.flat else size)
    live = (channel < channels) & (column < width)
    held = tl.full((T.planes, T.rows, T.columns), EMPTY, WIDE)
    where = tl.full((T.planes, T.rows, T.columns), NONE, tl.int32)
    for first in range(top, bottom, T.rows):
        here = first + row
        inside = live & (here < bottom)
        v = tl.load(source + here.to(tl.int64) * sh, mask=inside, other=0.0).to(WIDE)
        held, where = _take(held, where, v, inside, here * width + column, KIND)
    held, where = _joined(held, where, 1, KIND)
    for j in range(size):
        left, right = _span(j, width, size)
        mine = (column >= left) & (column < right)
        cell, places = tl.where(mine, held, EMPTY), tl.where(mine, where, NONE)
        count = (bottom - top) * (right - left)
        _put(out + j, cell, places, count, channel < channels, 2, KIND)


@triton.jit
def _cells_last(source, out, i, size, at, KIND: tl.constexpr, G: tl.constexpr, T: tl.constexpr):
    """The i-th row of cells of a grid, cell by cell, for channels that are adjacent in memory."""
    channel, row, column, channels, height, width, sh, sw = at
    WIDE: tl.constexpr = tl.float64 if source.dtype.element_ty == tl.float64 else tl.float32
    EMPTY: tl.constexpr = 0.0 if KIND == "avg" else float("-inf")
    top, bottom = _span(i, height, 1 if G.flat else size)
    for j in range(size):
        left, right = _span(j, width, size)
        held = tl.full((T.rows, T.columns, T.planes), EMPTY, WIDE)
        where = tl.full((T.rows, T.columns, T.planes), NONE, tl.int32)
        for first in range(top, bottom, T.rows):
            here = first + row
            for left_most in range(left, right, T.columns):
                there = left_most + column
                inside = (channel < channels) & (here < bottom) & (there < right)
                far = here.to(tl.int64) * sh + there.to(tl.int64) * sw
                v = tl.load(source + far, mask=inside, other=0.0).to(WIDE)
                held, where = _take(held, where, v, inside, here * width + there, KIND)
        held, where = _joined(held, where, 0, KIND)
        count = (bottom - top) * (right - left)
        _put(out + j, held, where, count, channel < channels, 1, KIND)


@triton.jit
def _spread(grad, where, dx, sizes, strides, G: tl.constexpr, T: tl.constexpr):
    """dx in a tile of some planes. What a cell is follows from rows and columns apart, so little is
    computed for every element."""
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    channels, height, width = sizes
    sn, sc, sh, sw = strides
    down = tl.cdiv(height, T.rows)
    across = tl.cdiv(width, T.columns)
    piece = tl.program_id(0) % (down * across)
    n, channel, start = _place(tl.program_id(0) // (down * across), channels, sn, sc, G, T)
    row = _spread_out(piece // across * T.rows + tl.arange(0, T.rows), "row", G.last)
    column = _spread_out(piece % across * T.columns + tl.arange(0, T.columns), "column", G.last)
    live = (channel < channels) & (row < height) & (column < width)
    total = tl.zeros(live.shape, WIDE)
    base = (n.to(tl.int64) * channels + channel) * G.cells
    begin = 0
    for g in tl.static_range(len(G.sizes)):
        size = G.sizes[g]
        rows = 1 if G.flat else size
        for di in tl.static_range(G.tall):
            i = row * rows // height + di
            top, bottom = _span(i, height, rows)
            for dj in tl.static_range(G.broad):
                j = column * size // width + dj
                left, right = _span(j, width, size)
                inside = live
                if G.tall > 1:
                    inside = inside & (i < rows) & (top <= row)
                if G.broad > 1:
                    inside = inside & (j < size) & (left <= column)
                at = base + (begin + i * size) + j
                v = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
                if where is not None:
                    winner = tl.load(where + at, mask=inside, other=-1)
                    total += tl.where(winner == row * width + column, v, 0.0)
                else:  # what is not inside was read as 0
                    share = (1.0 / (bottom - top).to(WIDE)) * (1.0 / (right - left).to(WIDE))
                    total += v * share
        begin += size if G.flat else size * size
    far = row.to(tl.int64) * sh
    if G.adjacent:
        at = dx + start + far + column
    else:
        at = dx + (far + column.to(tl.int64) * sw) + start
    tl.store(at, total.to(dx.dtype.element_ty), mask=live)


pool, spread = Launchable(_pool), Launchable(_spread)


def most_cells(length: int, size: int) -> int:
    """In how many of ``size`` cells over ``length`` elements one element can lie."""
    if length % size == 0:
        return 1
    return max(-(-(k + 1) * size // length) - k * size // length for k in range(length))


class Image(NamedTuple):
    """[N, C, H, W] in memory, a row as an image of height 1, and the grids over it."""

    images: int
    sizes: tuple[int, int, int]  # channels, height and width
    strides: tuple[int, int, int, int]
    grids: Grids

    @staticmethod
    def of(t: TensorType, sizes: tuple[int, ...]) -> Image:
        (n, c, *space), (sn, sc, *steps), flat = t.shape, t.strides, t.rank == 3
        (height, width), (sh, sw) = (1, *space)[-2:], (0, *steps)[-2:]
        cells, bands = sum(sizes), len(sizes)
        if not flat:
            cells, bands = sum(s * s for s in sizes), cells
        tall, broad = (max(most_cells(side, s) for s in sizes) for side in (height, width))
        known = (flat, sc == 1 and c > 1, sw == 1, 1 if flat else tall, broad)
        grids = Grids(sizes, cells, bands, *known)
        return Image(n, (c, height, width), (sn, sc, sh, sw), grids)

    def programs(self, tile: Tile) -> int:
        """Blocks of planes."""
        return self.images * -(-self.sizes[0] // tile.planes)


def forward(
    image: Image, kind: str, tile: Tile, warps: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``run(x, y)``; kind "where" writes the places of the winners into an int32 y."""
    _, sizes, strides, grids = image
    programs = (image.programs(tile) * (grids.bands if grids.last else 1),)

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        pool(programs, x, y, sizes, strides, warps=warps, KIND=kind, G=grids, T=tile)

    return run


def backward(
    image: Image, tile: Tile, warps: int
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """``run(grad, winners, dx)``; where the pool is a mean there are no winners."""
    _, sizes, strides, grids = image
    pieces = -(-sizes[1] // tile.rows) * -(-sizes[2] // tile.columns)
    programs = (image.programs(tile) * pieces,)

    def run(grad: torch.Tensor, where: torch.Tensor | None, dx: torch.Tensor) -> None:
        spread(programs, grad, where, dx, sizes, strides, warps=warps, G=grids, T=tile)

    return run
