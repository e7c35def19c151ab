"""Spatial-pyramid pooling: all grids of an image in one launch.

    y[n, c, cell] = mean or max of x[n, c, top:bottom, left:right];  dx = Σ over cells of its share

A program takes some planes (n, c) and goes through the grids one after another, so a plane is read
from memory once, and by the other grids from the cache of the multiprocessor:

    bytes = size · (x + y), and (grids − 1) · size · x from the cache

It adds a row of cells up from above to below, and only then splits it into cells.

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

from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.launch import Launchable


@dataclass(frozen=True)
class Way:
    """A program's planes, rows of each that it holds at a time, and its warps."""

    planes: int
    rows: int
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
def _pool(
    x, y, planes, channels, height, width, sn, sc, sh, sw,
    SIZES: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr, KIND: tl.constexpr,
    LAST: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """KIND: "avg", "max", or "where", which writes the winner's place in the image. LAST says that
    channels are adjacent in memory. A row of cells is added up from above to below first."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    NONE: tl.constexpr = 2147483647
    DOWN: tl.constexpr = 0 if LAST else 1
    ACROSS: tl.constexpr = 1 if LAST else 2
    EMPTY: tl.constexpr = 0.0 if KIND == "avg" else float("-inf")
    plane = _spread_out(tl.program_id(0) * PLANES + tl.arange(0, PLANES), "plane", LAST)
    row = _spread_out(tl.arange(0, ROWS), "row", LAST)
    column = _spread_out(tl.arange(0, COLUMNS), "column", LAST)
    start = (plane // channels).to(tl.int64) * sn + (plane % channels).to(tl.int64) * sc
    source = x + start + column.to(tl.int64) * sw
    live = (plane < planes) & (column < width)
    begin = 0
    for g in tl.static_range(len(SIZES)):
        size = SIZES[g]
        rows = 1 if FLAT else size
        for i in range(rows):
            top = i * height // rows
            bottom = ((i + 1) * height + rows - 1) // rows
            held = tl.zeros((ROWS, COLUMNS, PLANES) if LAST else (PLANES, ROWS, COLUMNS), WIDE)
            held += EMPTY
            where = tl.full(held.shape, NONE, tl.int32)
            for first in range(top, bottom, ROWS):
                here = first + row
                inside = live & (here < bottom)
                v = tl.load(source + here.to(tl.int64) * sh, mask=inside, other=0.0).to(WIDE)
                if KIND == "avg":
                    held += v
                else:
                    wins = (v > held) | (v != v)
                    if KIND == "where":
                        wins = wins | (where == NONE)
                        where = tl.where(inside & wins, here * width + column, where)
                    held = tl.where(inside & wins, v, held)
            if KIND == "avg":
                held = tl.sum(held, DOWN, keep_dims=True)
            else:
                held, where = _winner(held, where, DOWN, NONE)
            for j in range(size):
                left = j * width // size
                right = ((j + 1) * width + size - 1) // size
                mine = (column >= left) & (column < right)
                cell = tl.where(mine, held, EMPTY)
                out = y + plane.to(tl.int64) * CELLS + begin + i * size + j
                if KIND == "avg":
                    total = tl.sum(cell, ACROSS, keep_dims=True)
                    total = total / ((bottom - top) * (right - left))
                    tl.store(out, total.to(y.dtype.element_ty), mask=plane < planes)
                else:
                    best, place = _winner(cell, tl.where(mine, where, NONE), ACROSS, NONE)
                    if KIND == "max":
                        tl.store(out, best.to(y.dtype.element_ty), mask=plane < planes)
                    else:
                        tl.store(out, place, mask=plane < planes)
        begin += size if FLAT else size * size


@triton.jit
def _spread(
    grad, where, dx, planes, channels, height, width, sn, sc, sh, sw,
    SIZES: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, CELLS: tl.constexpr,
    FLAT: tl.constexpr, LAST: tl.constexpr, PLANES: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx in ROWS rows of PLANES planes. TALL and BROAD say in how many rows and columns of cells
    of a grid one element can lie. What a cell is follows from rows and columns apart, so little
    is computed for every element."""
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    pieces = tl.cdiv(height, ROWS)
    block = tl.program_id(0) // pieces
    first = tl.program_id(0) % pieces * ROWS
    plane = _spread_out(block * PLANES + tl.arange(0, PLANES), "plane", LAST)
    row = _spread_out(first + tl.arange(0, ROWS), "row", LAST)
    column = _spread_out(tl.arange(0, COLUMNS), "column", LAST)
    live = (plane < planes) & (row < height) & (column < width)
    total = tl.zeros((ROWS, COLUMNS, PLANES) if LAST else (PLANES, ROWS, COLUMNS), WIDE)
    base = plane.to(tl.int64) * CELLS
    begin = 0
    for g in tl.static_range(len(SIZES)):
        size = SIZES[g]
        rows = 1 if FLAT else size
        for di in tl.static_range(TALL):
            i = row * rows // height + di
            top = i * height // rows
            bottom = ((i + 1) * height + rows - 1) // rows
            in_row = (i < rows) & (top <= row)
            down = 1.0 / (bottom - top).to(WIDE)
            for dj in tl.static_range(BROAD):
                j = column * size // width + dj
                left = j * width // size
                right = ((j + 1) * width + size - 1) // size
                inside = live & in_row & (j < size) & (left <= column)
                at = base + (begin + i * size) + j
                v = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
                if where is not None:
                    winner = tl.load(where + at, mask=inside, other=-1)
                    total += tl.where(winner == row * width + column, v, 0.0)
                else:
                    share = down * (1.0 / (right - left).to(WIDE))
                    total += tl.where(inside, v * share, 0.0)
        begin += size if FLAT else size * size
    start = (plane // channels).to(tl.int64) * sn + (plane % channels).to(tl.int64) * sc
    at = dx + start + row.to(tl.int64) * sh + column.to(tl.int64) * sw
    tl.store(at, total.to(dx.dtype.element_ty), mask=live)


pool, spread = Launchable(_pool), Launchable(_spread)


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
    def numbers(self) -> tuple[int, ...]:
        """planes, channels, height, width and the four strides, as the kernels take them."""
        (n, c, *space), (sn, sc, *steps) = self.shape, self.strides
        return (n * c, c, *(1, *space)[-2:], sn, sc, *(0, *steps)[-2:])

    def constants(self, way: Way) -> dict[str, Any]:
        last = self.strides[1] == 1 and self.shape[1] > 1
        return {"SIZES": self.sizes, "CELLS": self.cells, "FLAT": self.flat, "LAST": last,
                "PLANES": way.planes, "ROWS": way.rows,
                "COLUMNS": power_of_two(self.shape[-1])}  # fmt: skip

    def reach(self) -> dict[str, int]:
        height, width = (1, *self.shape[2:])[-2:]
        tall = 1 if self.flat else max(most_cells(height, s) for s in self.sizes)
        return {"TALL": tall, "BROAD": max(most_cells(width, s) for s in self.sizes)}


def forward(image: Image, kind: str, way: Way) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``run(x, y)``; kind "where" writes the places of the winners into an int32 y."""
    numbers, constants = image.numbers, image.constants(way)
    grid = (-(-numbers[0] // way.planes),)

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        pool(grid, x, y, *numbers, warps=way.warps, KIND=kind, **constants)

    return run


def backward(
    image: Image, way: Way, winners: Callable[[torch.Tensor, torch.Tensor], None] | None
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """``run(grad, x, dx)``; ``winners`` finds those of x where the pool is a maximum."""
    numbers, constants = image.numbers, image.constants(way) | image.reach()
    grid = (-(-numbers[0] // way.planes) * -(-numbers[2] // way.rows),)

    def run(grad: torch.Tensor, x: torch.Tensor | None, dx: torch.Tensor) -> None:
        where = None
        if winners is not None:
            assert x is not None
            where = torch.empty(grad.shape, dtype=torch.int32, device=grad.device)
            winners(x, where)
        spread(grid, grad, where, dx, *numbers, warps=way.warps, **constants)

    return run
