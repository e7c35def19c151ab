"""Spatial-pyramid pooling: all grids of an image in one launch.

    y[n, c, cell] = mean or max of x[n, c, top:bottom, left:right];  dx = Σ over cells of its share

A program takes one cell of some planes (n, c); the cells of the same planes come one after another,
so a plane is read from memory once and by the other grids from the L2 cache:

    bytes = size · (x + y), and (grids − 1) · size · x from the cache

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
    """A program's planes, elements of each that it holds at a time, and its warps."""

    planes: int
    pixels: int
    warps: int


@triton.jit
def _cell(cell, height, width, SIZES: tl.constexpr, FLAT: tl.constexpr):
    """(top, bottom, left, right) of a cell, counted through all grids; FLAT grids have one row."""
    size = 1
    place = cell
    begin = 0
    for k in tl.static_range(len(SIZES)):
        here = cell >= begin
        size = tl.where(here, SIZES[k], size)
        place = tl.where(here, cell - begin, place)
        begin += SIZES[k] if FLAT else SIZES[k] * SIZES[k]
    i = 0 if FLAT else place // size
    j = place if FLAT else place % size
    rows = 1 if FLAT else size
    top = i * height // rows
    bottom = ((i + 1) * height + rows - 1) // rows
    return top, bottom, j * width // size, ((j + 1) * width + size - 1) // size


@triton.jit
def _pool(
    x, y, planes, channels, height, width, sn, sc, sh, sw,
    SIZES: tl.constexpr, CELLS: tl.constexpr, FLAT: tl.constexpr, KIND: tl.constexpr,
    LAST: tl.constexpr, PLANES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """KIND: "avg", "max", or "where", which writes the winner's place in the image. LAST says that
    channels are adjacent in memory."""
    cell = tl.program_id(0) % CELLS
    block = tl.program_id(0) // CELLS
    top, bottom, left, right = _cell(cell, height, width, SIZES, FLAT)
    across = right - left
    count = (bottom - top) * across
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    AXIS: tl.constexpr = 0 if LAST else 1
    plane = block * PLANES + tl.arange(0, PLANES)
    live = plane < planes
    start = (plane // channels).to(tl.int64) * sn + (plane % channels).to(tl.int64) * sc
    lane = tl.arange(0, PIXELS)
    if LAST:
        held = tl.full((PIXELS, PLANES), 0.0 if KIND == "avg" else float("-inf"), WIDE)
        where = tl.full((PIXELS, PLANES), height * width, tl.int32)
    else:
        held = tl.full((PLANES, PIXELS), 0.0 if KIND == "avg" else float("-inf"), WIDE)
        where = tl.full((PLANES, PIXELS), height * width, tl.int32)
    for first in range(0, count, PIXELS):
        k = first + lane
        row = top + k // across
        column = left + k % across
        at = row.to(tl.int64) * sh + column.to(tl.int64) * sw
        if LAST:
            inside = (k < count)[:, None] & live[None, :]
            v = tl.load(x + at[:, None] + start[None, :], mask=inside, other=0.0).to(WIDE)
            place = (row * width + column)[:, None]
        else:
            inside = (k < count)[None, :] & live[:, None]
            v = tl.load(x + start[:, None] + at[None, :], mask=inside, other=0.0).to(WIDE)
            place = (row * width + column)[None, :]
        if KIND == "avg":
            held += v
        else:
            wins = (v > held) | (v != v)
            if KIND == "where":
                wins = wins | (where == height * width)
                where = tl.where(inside & wins, place, where)
            held = tl.where(inside & wins, v, held)
    out = y + plane.to(tl.int64) * CELLS + cell
    if KIND == "avg":
        tl.store(out, (tl.sum(held, AXIS) / count).to(y.dtype.element_ty), mask=live)
    else:
        odd = held != held
        some = tl.max(odd.to(tl.int32), AXIS) > 0
        best = tl.max(tl.where(odd, float("-inf"), held), AXIS)
        if KIND == "max":
            best = tl.where(some, float("nan"), best)
            tl.store(out, best.to(y.dtype.element_ty), mask=live)
        else:
            same = held == (best[None, :] if LAST else best[:, None])
            last = tl.max(tl.where(odd, where, -1), AXIS)
            winner = tl.min(tl.where(same & (where >= 0), where, height * width), AXIS)
            tl.store(out, tl.where(some, last, winner), mask=live)


@triton.jit
def _spread(
    grad, where, dx, planes, channels, height, width, sn, sc, sh, sw,
    SIZES: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr, CELLS: tl.constexpr,
    FLAT: tl.constexpr, LAST: tl.constexpr, PLANES: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """dx at PIXELS places of PLANES planes. TALL and BROAD say in how many rows and columns of
    cells of a grid one element can lie."""
    pieces = tl.cdiv(height * width, PIXELS)
    plane = tl.program_id(0) // pieces * PLANES + tl.arange(0, PLANES)
    k = tl.program_id(0) % pieces * PIXELS + tl.arange(0, PIXELS)
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    if LAST:
        k = k[:, None]
        plane = plane[None, :]
    else:
        k = k[None, :]
        plane = plane[:, None]
    live = (plane < planes) & (k < height * width)
    row = k // width
    column = k % width
    total = (k + plane).to(WIDE) * 0.0
    base = plane.to(tl.int64) * CELLS
    begin = 0
    for g in tl.static_range(len(SIZES)):
        rows = 1 if FLAT else SIZES[g]
        for di in tl.static_range(TALL):
            i = row * rows // height + di
            top = i * height // rows
            bottom = ((i + 1) * height + rows - 1) // rows
            in_row = (i < rows) & (top <= row)
            for dj in tl.static_range(BROAD):
                j = column * SIZES[g] // width + dj
                left = j * width // SIZES[g]
                right = ((j + 1) * width + SIZES[g] - 1) // SIZES[g]
                inside = live & in_row & (j < SIZES[g]) & (left <= column)
                cell = begin + i * SIZES[g] + j
                v = tl.load(grad + base + cell, mask=inside, other=0.0).to(WIDE)
                if where is not None:
                    winner = tl.load(where + base + cell, mask=inside, other=-1)
                    total += tl.where(winner == k, v, 0.0)
                else:
                    total += tl.where(inside, v / ((bottom - top) * (right - left)), 0.0)
        begin += SIZES[g] if FLAT else SIZES[g] * SIZES[g]
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
                "PLANES": way.planes, "PIXELS": way.pixels}  # fmt: skip

    def reach(self) -> dict[str, int]:
        height, width = (1, *self.shape[2:])[-2:]
        tall = 1 if self.flat else max(most_cells(height, s) for s in self.sizes)
        return {"TALL": tall, "BROAD": max(most_cells(width, s) for s in self.sizes)}


def forward(image: Image, kind: str, way: Way) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``run(x, y)``; kind "where" writes the places of the winners into an int32 y."""
    numbers, constants = image.numbers, image.constants(way)
    grid = (-(-numbers[0] // way.planes) * image.cells,)

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        pool(grid, x, y, *numbers, warps=way.warps, KIND=kind, **constants)

    return run


def backward(
    image: Image, way: Way, winners: Callable[[torch.Tensor, torch.Tensor], None] | None
) -> Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]:
    """``run(grad, x, dx)``; ``winners`` finds those of x where the pool is a maximum."""
    numbers, constants = image.numbers, image.constants(way) | image.reach()
    grid = (-(-numbers[0] // way.planes) * -(-(numbers[2] * numbers[3]) // way.pixels),)

    def run(grad: torch.Tensor, x: torch.Tensor | None, dx: torch.Tensor) -> None:
        where = None
        if winners is not None:
            assert x is not None
            where = torch.empty(grad.shape, dtype=torch.int32, device=grad.device)
            winners(x, where)
        spread(grid, grad, where, dx, *numbers, warps=way.warps, **constants)

    return run
