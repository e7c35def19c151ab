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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


@dataclass(frozen=True)
class Way:
    """A program's planes, rows and columns of each that it holds at a time, and its warps."""

    planes: int
    rows: int
    columns: int
    warps: int


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
def _winner(held, where, AXIS: tl.constexpr, NONE: tl.constexpr):
    """The largest along an axis and its place: the first of equals, the last nan."""
    odd = held != held
    some = tl.max(odd.to(tl.int32), AXIS, keep_dims=True) > 0
    best = tl.max(tl.where(odd, float("-inf"), held), AXIS, keep_dims=True)
    last = tl.max(tl.where(odd, where, -1), AXIS, keep_dims=True)
    first = tl.min(tl.where(held == best, where, NONE), AXIS, keep_dims=True)
    return tl.where(some, float("nan"), best), tl.where(some, last, first)


@triton.jit
def _place(block, channels, sn, sc, PLANES: tl.constexpr, LAST: tl.constexpr):
    """Image and channels of a block of planes, and where they begin. A block stays in one image, so
    that channels that are adjacent in memory are seen to be."""
    blocks = tl.cdiv(channels, PLANES)
    n = block // blocks
    channel = _spread_out(block % blocks * PLANES + tl.arange(0, PLANES), "plane", LAST)
    start = n.to(tl.int64) * sn + (channel if LAST else channel.to(tl.int64) * sc)
    return n, channel, start


@triton.jit
def _take(held, where, v, inside, place, KIND: tl.constexpr, NONE: tl.constexpr):
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
def _put(out, held, where, count, live, AXIS: tl.constexpr, KIND: tl.constexpr, NONE: tl.constexpr):
    """The result of a cell, from what its columns came to."""
    kind = out.dtype.element_ty
    if KIND == "avg":
        tl.store(out, (tl.sum(held, AXIS, keep_dims=True) / count).to(kind), mask=live)
    else:
        best, place = _winner(held, where, AXIS, NONE)
        tl.store(out, (best if KIND == "max" else place).to(kind), mask=live)


@triton.jit
def _pool(
    x,
    y,
    channels,
    height,
    width,
    sn,
    sc,
    sh,
    sw,
    SIZES: tl.constexpr,
    CELLS: tl.constexpr,
    FLAT: tl.constexpr,
    KIND: tl.constexpr,
    ADJACENT: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """All cells of PLANES planes. KIND: "avg", "max", or "where", which writes the winner's place
    in the image. ADJACENT says that a row is. A row of cells is added up from above to below."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    NONE: tl.constexpr = 2147483647
    EMPTY: tl.constexpr = 0.0 if KIND == "avg" else float("-inf")
    n, channel, start = _place(tl.program_id(0), channels, sn, sc, PLANES, False)
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, COLUMNS)[None, None, :]
    source = x + start + (column if ADJACENT else column.to(tl.int64) * sw)
    live = (channel < channels) & (column < width)
    begin = 0
    for g in tl.static_range(len(SIZES)):
        size = SIZES[g]
        rows = 1 if FLAT else size
        for i in range(rows):
            top = i * height // rows
            bottom = ((i + 1) * height + rows - 1) // rows
            held = tl.full((PLANES, ROWS, COLUMNS), EMPTY, WIDE)
            where = tl.full((PLANES, ROWS, COLUMNS), NONE, tl.int32)
            for first in range(top, bottom, ROWS):
                here = first + row
                inside = live & (here < bottom)
                v = tl.load(source + here.to(tl.int64) * sh, mask=inside, other=0.0).to(WIDE)
                held, where = _take(held, where, v, inside, here * width + column, KIND, NONE)
            if KIND == "avg":
                held = tl.sum(held, 1, keep_dims=True)
            else:
                held, where = _winner(held, where, 1, NONE)
            for j in range(size):
                left = j * width // size
                right = ((j + 1) * width + size - 1) // size
                mine = (column >= left) & (column < right)
                out = y + (n.to(tl.int64) * channels + channel) * CELLS + begin + i * size + j
                count = (bottom - top) * (right - left)
                cell, places = tl.where(mine, held, EMPTY), tl.where(mine, where, NONE)
                _put(out, cell, places, count, channel < channels, 2, KIND, NONE)
        begin += size if FLAT else size * size


@triton.jit
def _pool_last(
    x,
    y,
    channels,
    height,
    width,
    sn,
    sc,
    sh,
    sw,
    SIZES: tl.constexpr,
    BANDS: tl.constexpr,
    CELLS: tl.constexpr,
    FLAT: tl.constexpr,
    KIND: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One row of cells of one grid, for channels that are adjacent in memory: vectors of channels
    are added up cell by cell."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    NONE: tl.constexpr = 2147483647
    EMPTY: tl.constexpr = 0.0 if KIND == "avg" else float("-inf")
    band = tl.program_id(0) % BANDS
    n, channel, start = _place(tl.program_id(0) // BANDS, channels, sn, sc, PLANES, True)
    size, i, base = SIZES[0], band, 0
    first_band, begin = 0, 0
    for g in tl.static_range(len(SIZES)):
        if band >= first_band:
            size, i, base = SIZES[g], band - first_band, begin
        first_band += 1 if FLAT else SIZES[g]
        begin += SIZES[g] if FLAT else SIZES[g] * SIZES[g]
    rows = 1 if FLAT else size
    top = i * height // rows
    bottom = ((i + 1) * height + rows - 1) // rows
    row = tl.arange(0, ROWS)[:, None, None]
    column = tl.arange(0, COLUMNS)[None, :, None]
    for j in range(size):
        left = j * width // size
        right = ((j + 1) * width + size - 1) // size
        held = tl.full((ROWS, COLUMNS, PLANES), EMPTY, WIDE)
        where = tl.full((ROWS, COLUMNS, PLANES), NONE, tl.int32)
        for first in range(top, bottom, ROWS):
            here = first + row
            for left_most in range(left, right, COLUMNS):
                there = left_most + column
                inside = (channel < channels) & (here < bottom) & (there < right)
                at = x + (here.to(tl.int64) * sh + there.to(tl.int64) * sw) + start
                v = tl.load(at, mask=inside, other=0.0).to(WIDE)
                held, where = _take(held, where, v, inside, here * width + there, KIND, NONE)
        if KIND == "avg":
            held = tl.sum(held, 0, keep_dims=True)
        else:
            held, where = _winner(held, where, 0, NONE)
        out = y + (n.to(tl.int64) * channels + channel) * CELLS + base + i * size + j
        _put(out, held, where, (bottom - top) * (right - left), channel < channels, 1, KIND, NONE)


@triton.jit
def _spread(
    grad,
    where,
    dx,
    channels,
    height,
    width,
    sn,
    sc,
    sh,
    sw,
    SIZES: tl.constexpr,
    TALL: tl.constexpr,
    BROAD: tl.constexpr,
    CELLS: tl.constexpr,
    FLAT: tl.constexpr,
    LAST: tl.constexpr,
    ADJACENT: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx in a tile of PLANES planes. TALL and BROAD say in how many rows and columns of cells of a
    grid one element can lie. What a cell is follows from rows and columns apart, so little is
    computed for every element."""
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    down = tl.cdiv(height, ROWS)
    across = tl.cdiv(width, COLUMNS)
    piece = tl.program_id(0) % (down * across)
    n, channel, start = _place(tl.program_id(0) // (down * across), channels, sn, sc, PLANES, LAST)
    row = _spread_out(piece // across * ROWS + tl.arange(0, ROWS), "row", LAST)
    column = _spread_out(piece % across * COLUMNS + tl.arange(0, COLUMNS), "column", LAST)
    live = (channel < channels) & (row < height) & (column < width)
    total = tl.zeros((ROWS, COLUMNS, PLANES) if LAST else (PLANES, ROWS, COLUMNS), WIDE)
    base = (n.to(tl.int64) * channels + channel) * CELLS
    begin = 0
    for g in tl.static_range(len(SIZES)):
        size = SIZES[g]
        rows = 1 if FLAT else size
        for di in tl.static_range(TALL):
            i = row * rows // height + di
            top = i * height // rows
            bottom = ((i + 1) * height + rows - 1) // rows
            for dj in tl.static_range(BROAD):
                j = column * size // width + dj
                left = j * width // size
                right = ((j + 1) * width + size - 1) // size
                inside = live
                if TALL > 1:
                    inside = inside & (i < rows) & (top <= row)
                if BROAD > 1:
                    inside = inside & (j < size) & (left <= column)
                at = base + (begin + i * size) + j
                v = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
                if where is not None:
                    winner = tl.load(where + at, mask=inside, other=-1)
                    total += tl.where(winner == row * width + column, v, 0.0)
                else:  # what is not inside was read as 0
                    share = (1.0 / (bottom - top).to(WIDE)) * (1.0 / (right - left).to(WIDE))
                    total += v * share
        begin += size if FLAT else size * size
    far = row.to(tl.int64) * sh
    if ADJACENT:
        at = dx + start + far + column
    else:
        at = dx + (far + column.to(tl.int64) * sw) + start
    tl.store(at, total.to(dx.dtype.element_ty), mask=live)


pool, pool_last, spread = Launchable(_pool), Launchable(_pool_last), Launchable(_spread)


def most_cells(length: int, size: int) -> int:
    """In how many of ``size`` cells over ``length`` elements one element can lie."""
    if length % size == 0:
        return 1
    return max(-(-(k + 1) * size // length) - k * size // length for k in range(length))


@dataclass(frozen=True)
class Image:
    """[N, C, H, W] or [N, C, W] in memory, and the grids over it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def flat(self) -> bool:
        return len(self.shape) == 3

    @property
    def cells(self) -> int:
        return sum(s if self.flat else s * s for s in self.sizes)

    @property
    def last(self) -> bool:
        """Whether channels are adjacent in memory."""
        return self.strides[1] == 1 and self.shape[1] > 1

    @property
    def numbers(self) -> tuple[int, ...]:
        """channels, height, width and the four strides, as the kernels take them."""
        (_, c, *space), (sn, sc, *steps) = self.shape, self.strides
        return (c, *(1, *space)[-2:], sn, sc, *(0, *steps)[-2:])

    def blocks(self, way: Way) -> int:
        return self.shape[0] * -(-self.shape[1] // way.planes)

    def constants(self, way: Way) -> dict[str, Any]:
        return {
            "SIZES": self.sizes,
            "CELLS": self.cells,
            "FLAT": self.flat,
            "PLANES": way.planes,
            "ROWS": way.rows,
            "COLUMNS": way.columns,
        }

    def reach(self) -> dict[str, int]:
        height, width = (1, *self.shape[2:])[-2:]
        tall = 1 if self.flat else max(most_cells(height, s) for s in self.sizes)
        return {"TALL": tall, "BROAD": max(most_cells(width, s) for s in self.sizes)}


def forward(image: Image, kind: str, way: Way) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``run(x, y)``; kind "where" writes the places of the winners into an int32 y."""
    numbers, constants = image.numbers, image.constants(way) | {"KIND": kind}
    bands = len(image.sizes) if image.flat else sum(image.sizes)
    kernel, more = pool, {"ADJACENT": image.strides[-1] == 1}
    grid = (image.blocks(way),)
    if image.last:
        kernel, more, grid = pool_last, {"BANDS": bands}, (image.blocks(way) * bands,)

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel(grid, x, y, *numbers, warps=way.warps, **constants, **more)

    return run


def backward(
    image: Image, way: Way, winners: Callable[[torch.Tensor, torch.Tensor], None] | None
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """``run(grad, x, dx)``; ``winners`` finds those of x where the pool is a maximum."""
    numbers, constants = image.numbers, image.constants(way) | image.reach()
    constants |= {"LAST": image.last, "ADJACENT": image.strides[-1] == 1}
    pieces = -(-numbers[1] // way.rows) * -(-numbers[2] // way.columns)
    grid = (image.blocks(way) * pieces,)

    def run(grad: torch.Tensor, x: torch.Tensor | None, dx: torch.Tensor) -> None:
        where = None
        if winners is not None:
            assert x is not None
            where = torch.empty(grad.shape, dtype=torch.int32, device=grad.device)
            winners(x, where)
        spread(grid, grad, where, dx, *numbers, warps=way.warps, **constants)

    return run
