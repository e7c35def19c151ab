"""Adafactor over many matrices at once: second moments as the product of a column and a row.

    r ← r + w·(mean over columns of g² − r);    c ← c + w·(mean over rows of g² − c)
    u = g / √max(r·c / mean r, ε₁²)
    p ← (1 − γ·λ)·p − ρ·max(ε₂, rms p) / max(1, rms u / d)·u

A tile is a few matrices, or a piece of one. What a rate depends on lies between passes, so there
are three over the data, whatever the number of tensors: sums of squares by row and by column; the
length of u; the step. Bytes per element of fp32: g three times, p twice and written, 24, and little
more for the sums of tiles. Those are added up in a fixed order: no atomics, so two runs give the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.optim import squares_of_chunks

Tile = tuple[int, int, int]  # matrices, rows and columns that one program takes
ELEMENTS, WIDEST, TALLEST = 2048, 128, 16
WARPS = 8
PARTS, BLOCK = 32, 64  # tiles, and rows or columns, that one program adds up at a time


def tile_for(shape: Sequence[int]) -> Tile:
    """The tile for matrices of this shape."""
    columns = min(power_of_two(max(shape[-1], 1)), WIDEST)
    rows = min(power_of_two(max(shape[-2], 1)), max(TALLEST, ELEMENTS // columns // 8))
    return max(ELEMENTS // (columns * rows), 1), rows, columns


@dataclass
class Layout:
    """Where everything of some matrices is: sizes and places of tensors, tiles, scratch memory.

    ``sizes`` has for each tensor its number of matrices, their height and width, and where in
    scratch memory are: sums by row (3), by column (4), moments of rows (5), of columns (6), and
    means (7).
    """

    shapes: Sequence[tuple[int, ...]]
    wide: torch.dtype
    device: torch.device
    tile: Tile = field(init=False)
    sizes: torch.Tensor = field(init=False)
    tiles: torch.Tensor = field(init=False)  # (tensor, tile of it)
    lines: torch.Tensor = field(init=False)  # (tensor, block of its rows, then of its columns)
    matrices: torch.Tensor = field(init=False)  # (tensor, matrix of it)
    firsts: torch.Tensor = field(init=False)
    scratch: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tile = tile_for(self.shapes[0])
        sizes: list[list[int]] = []
        counts: dict[str, list[int]] = {"tiles": [], "lines": [], "matrices": []}
        room = 0
        for shape in self.shapes:
            count, height, width = prod(shape[:-2]), *shape[-2:]
            across, down = -(-width // self.tile[2]), -(-height // self.tile[1])
            places = []
            for need in (
                count * height * across,
                count * width * down,
                count * height,
                count * width,
                count,
            ):
                places.append(room)
                room += need
            sizes.append([count, height, width, *places])
            counts["tiles"].append(-(-count // self.tile[0]) * down * across)
            blocks = (-(-count * height // BLOCK), -(-count * width // BLOCK))
            counts["lines"].append(sum(blocks) if prod(shape) else 0)
            counts["matrices"].append(count if prod(shape) else 0)
        self.sizes = torch.tensor(sizes, dtype=torch.int64).t().contiguous().to(self.device)
        self.tiles, self.lines, self.matrices = (_listed(n, self.device) for n in counts.values())
        ends = torch.tensor([0, *counts["tiles"]]).cumsum(0)
        self.firsts = ends.to(torch.int32).to(self.device)
        self.scratch = torch.empty(room, dtype=self.wide, device=self.device)


def _listed(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """(owner, place) for so many pieces of each tensor, one row after the other."""
    each = torch.tensor(counts, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(counts)), each)
    place = torch.arange(len(owner)) - (each.cumsum(0) - each)[owner]
    return torch.stack((owner, place)).to(torch.int32).to(device)


# ---- one tile


@triton.jit
def _place(tiles, count, sizes, tensors, NB: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Tensor, matrix, row and column numbers of this program's tile, and the tensor's sizes."""
    i = tl.program_id(0)
    t = tl.load(tiles + i)
    k = tl.load(tiles + count + i)
    matrices = tl.load(sizes + t)
    height = tl.load(sizes + tensors + t)
    width = tl.load(sizes + 2 * tensors + t)
    across = tl.cdiv(width, BC)
    down = tl.cdiv(height, BR)
    b = (k // (across * down) * NB + tl.arange(0, NB))[:, None, None]
    r = (k // across % down * BR + tl.arange(0, BR))[None, :, None]
    c = (k % across * BC + tl.arange(0, BC))[None, None, :]
    return t, b, r, c, matrices, height, width


@triton.jit
def _is_whole(address, b, r, c, matrices, height, width):
    """Whether the tile lies inside and on 16 bytes: masked loads do not vectorise."""
    inside = (tl.max(b) < matrices) & (tl.max(r) < height) & (tl.max(c) < width)
    return inside & (width % 16 == 0) & ((address & 15) == 0)


@triton.jit
def _read(address, TYPE: tl.constexpr, WIDE: tl.constexpr, b, r, c, matrices, height, width):
    """A tile of the matrices at an address."""
    at = address.to(tl.pointer_type(TYPE))
    if _is_whole(address, b, r, c, matrices, height, width):
        there = tl.multiple_of(at, 16) + (b * height + r) * (width // 16 * 16) + c
        tile = tl.load(there)
    else:
        inside = (b < matrices) & (r < height) & (c < width)
        tile = tl.load(at + (b * height + r) * width + c, mask=inside, other=0.0)
    return tile.to(WIDE)


@triton.jit
def _write(address, tile, TYPE: tl.constexpr, b, r, c, matrices, height, width):
    at = address.to(tl.pointer_type(TYPE))
    if _is_whole(address, b, r, c, matrices, height, width):
        there = tl.multiple_of(at, 16) + (b * height + r) * (width // 16 * 16) + c
        tl.store(there, tile.to(TYPE))
    else:
        inside = (b < matrices) & (r < height) & (c < width)
        tl.store(at + (b * height + r) * width + c, tile.to(TYPE), mask=inside)


@triton.jit
def _quotient(g, b, r, c, sizes, scratch, tensors, t, matrices, height, width, eps1):
    """u of a tile, from the moments in scratch memory."""
    live = b < matrices
    rows = scratch + tl.load(sizes + 5 * tensors + t)
    columns = scratch + tl.load(sizes + 6 * tensors + t)
    means = scratch + tl.load(sizes + 7 * tensors + t)
    row = tl.load(rows + b * height + r, mask=live & (r < height), other=0.0)
    column = tl.load(columns + b * width + c, mask=live & (c < width), other=0.0)
    mean = tl.load(means + b, mask=live, other=1.0)
    # nan must go through, or a bad gradient would leave no trace
    mean = tl.maximum(mean, eps1, propagate_nan=tl.PropagateNan.ALL)
    below = row * column / mean
    below = tl.maximum(below, eps1 * eps1, propagate_nan=tl.PropagateNan.ALL)
    return g / tl.sqrt(below)


@triton.jit
def _scaled(rows, control, t, NUMBERS: tl.constexpr):
    """What gradients are multiplied with, and whether the step is left out."""
    gscale = tl.load(rows + t * NUMBERS)
    skip = 0.0
    if control is not None:
        gscale = (gscale * tl.load(control)).to(gscale.dtype)
        skip = tl.load(control + 1)
    return gscale, skip


@triton.jit
def _sums(
    table,
    grads,
    sizes,
    tiles,
    count,
    tensors,
    rows,
    control,
    scratch,
    squares,
    P: tl.constexpr,
    G: tl.constexpr,
    NUMBERS: tl.constexpr,
    NB: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Σ g² of every row and column of the tile, and Σ p²."""
    t, b, r, c, matrices, height, width = _place(tiles, count, sizes, tensors, NB, BR, BC)
    WIDE: tl.constexpr = scratch.dtype.element_ty
    gscale, skip = _scaled(rows, control, t, NUMBERS)
    if skip == 0.0:
        g = _read(tl.load(grads + t), G, WIDE, b, r, c, matrices, height, width) * gscale
        a_p = tl.load(table + tensors + t)
        p = _read(a_p, P, WIDE, b, r, c, matrices, height, width)
        by_row = tl.sum(g * g, 2, keep_dims=True)
        by_column = tl.sum(g * g, 1, keep_dims=True)
        across = tl.cdiv(width, BC)
        down = tl.cdiv(height, BR)
        k = tl.load(tiles + count + tl.program_id(0))
        to_rows = scratch + tl.load(sizes + 3 * tensors + t)
        to_columns = scratch + tl.load(sizes + 4 * tensors + t)
        live = b < matrices
        # tile by tile, so that whoever adds them up reads neighbours
        tl.store(
            to_rows + k % across * matrices * height + b * height + r,
            by_row,
            mask=live & (r < height),
        )
        tl.store(
            to_columns + k // across % down * matrices * width + b * width + c,
            by_column,
            mask=live & (c < width),
        )
        total = tl.sum(tl.sum(tl.sum(p * p, 2), 1), 0)
        tl.store(squares + tl.program_id(0), total.to(tl.float64))


@triton.jit
def _moments(
    table,
    sizes,
    lines,
    count,
    tensors,
    rows,
    control,
    scratch,
    S: tl.constexpr,
    NUMBERS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows or columns of one tensor: their new moments, from the sums of the tiles."""
    t = tl.load(lines + tl.program_id(0))
    k = tl.load(lines + count + tl.program_id(0))
    WIDE: tl.constexpr = scratch.dtype.element_ty
    _, skip = _scaled(rows, control, t, NUMBERS)
    matrices = tl.load(sizes + t)
    height = tl.load(sizes + tensors + t)
    width = tl.load(sizes + 2 * tensors + t)
    row_blocks = tl.cdiv(matrices * height, BLOCK)
    is_row = k < row_blocks
    kind = tl.where(is_row, 0, 1)  # columns lie one further in every table
    many = tl.where(is_row, matrices * height, matrices * width)
    parts = tl.where(is_row, tl.cdiv(width, BC), tl.cdiv(height, BR))
    size = tl.where(is_row, width, height)
    line = tl.where(is_row, k, k - row_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = line < many
    if skip == 0.0:
        source = scratch + tl.load(sizes + (3 + kind) * tensors + t)
        made = scratch + tl.load(sizes + (5 + kind) * tensors + t)
        state = tl.load(table + (2 + kind) * tensors + t).to(tl.pointer_type(S))
        total = tl.zeros((PARTS, BLOCK), WIDE)
        for first in range(0, parts, PARTS):
            j = (first + tl.arange(0, PARTS))[:, None]
            at = source + j * many + line[None, :]
            total += tl.load(at, mask=inside[None, :] & (j < parts), other=0.0)
        weight = tl.load(rows + t * NUMBERS + 1)
        old = tl.load(state + line, mask=inside, other=0.0).to(WIDE)
        new = old + weight * (tl.sum(total, 0) / size - old)
        tl.store(state + line, new.to(S), mask=inside)
        tl.store(made + line, new, mask=inside)


@triton.jit
def _means(sizes, matrices, count, tensors, scratch, BLOCK: tl.constexpr):
    """The mean over the rows of one matrix of its row moments."""
    t = tl.load(matrices + tl.program_id(0))
    b = tl.load(matrices + count + tl.program_id(0))
    height = tl.load(sizes + tensors + t)
    rows = scratch + tl.load(sizes + 5 * tensors + t) + b * height
    total = tl.zeros((BLOCK,), scratch.dtype.element_ty)
    for first in range(0, height, BLOCK):
        r = first + tl.arange(0, BLOCK)
        total += tl.load(rows + r, mask=r < height, other=0.0)
    tl.store(scratch + tl.load(sizes + 7 * tensors + t) + b, tl.sum(total, 0) / height)


@triton.jit
def _length(
    grads,
    sizes,
    tiles,
    count,
    tensors,
    rows,
    control,
    scratch,
    squares,
    G: tl.constexpr,
    NUMBERS: tl.constexpr,
    NB: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Σ u² of the tile."""
    t, b, r, c, matrices, height, width = _place(tiles, count, sizes, tensors, NB, BR, BC)
    WIDE: tl.constexpr = scratch.dtype.element_ty
    gscale, skip = _scaled(rows, control, t, NUMBERS)
    if skip == 0.0:
        inside = (b < matrices) & (r < height) & (c < width)
        g = _read(tl.load(grads + t), G, WIDE, b, r, c, matrices, height, width) * gscale
        eps1 = tl.load(rows + t * NUMBERS + 4)
        u = _quotient(g, b, r, c, sizes, scratch, tensors, t, matrices, height, width, eps1)
        u = tl.where(inside, u, 0.0)
        total = tl.sum(tl.sum(tl.sum(u * u, 2), 1), 0)
        tl.store(squares + count + tl.program_id(0), total.to(tl.float64))


@triton.jit
def _apply(
    table,
    grads,
    sizes,
    tiles,
    count,
    tensors,
    rows,
    control,
    scratch,
    P: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    NUMBERS: tl.constexpr,
    NB: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """The step, with the rate of the tensor; E is the type of its moving average, or None."""
    t, b, r, c, matrices, height, width = _place(tiles, count, sizes, tensors, NB, BR, BC)
    WIDE: tl.constexpr = scratch.dtype.element_ty
    gscale, skip = _scaled(rows, control, t, NUMBERS)
    if skip == 0.0:
        g = _read(tl.load(grads + t), G, WIDE, b, r, c, matrices, height, width) * gscale
        a_p = tl.load(table + tensors + t)
        p = _read(a_p, P, WIDE, b, r, c, matrices, height, width)
        keep = tl.load(rows + t * NUMBERS + 3)
        eps1 = tl.load(rows + t * NUMBERS + 4)
        rate = tl.load(rows + t * NUMBERS + 7)
        u = _quotient(g, b, r, c, sizes, scratch, tensors, t, matrices, height, width, eps1)
        new = keep * p - rate * u
        _write(a_p, new, P, b, r, c, matrices, height, width)
        if E is not None:
            a_e = tl.load(table + 4 * tensors + t)
            ema = _read(a_e, E, WIDE, b, r, c, matrices, height, width)
            ema = ema + tl.load(rows + t * NUMBERS + 8) * (new - ema)
            _write(a_e, ema, E, b, r, c, matrices, height, width)


@triton.jit
def _rates(squares, firsts, chunks, table, rows, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    """rate = ρ·max(ε₂, rms p) / max(1, rms u / d) of one tensor, from the sums of its pieces."""
    t = tl.program_id(0)
    pp, uu = squares_of_chunks(squares, firsts, chunks, t, BLOCK)
    size = tl.maximum(tl.load(table + t), 1).to(tl.float64)
    rho = tl.load(rows + t * NUMBERS + 2).to(tl.float64)
    eps2 = tl.load(rows + t * NUMBERS + 5).to(tl.float64)
    d = tl.load(rows + t * NUMBERS + 6).to(tl.float64)
    large = tl.sqrt(pp / size)
    large = tl.where(large > eps2, large, eps2)  # and not nan: see optim/factored.py
    long = tl.sqrt(uu / size) / d
    long = tl.where(long > 1.0, long, 1.0)
    tl.store(rows + t * NUMBERS + 7, rho * large / long)


sums, moments, means = Launchable(_sums), Launchable(_moments), Launchable(_means)
length, apply, rates = Launchable(_length), Launchable(_apply), Launchable(_rates)


def make_rates(
    squares: torch.Tensor, firsts: torch.Tensor, table: torch.Tensor, rows: torch.Tensor
) -> None:
    """The rate of every tensor into its row of numbers; ``squares`` has Σ p² of all pieces, then
    Σ u²."""
    grid, pieces = (table.shape[1],), len(squares) // 2
    rates(grid, squares, firsts, pieces, table, rows, NUMBERS=rows.shape[1], BLOCK=1024)


def step(
    at: Layout,
    table: torch.Tensor,
    grads: torch.Tensor,
    rows: torch.Tensor,
    control: torch.Tensor | None,
    types: Sequence[Any],
) -> None:
    """One step of all matrices; ``types`` are those of gradients, parameters, moments twice, and
    averages if there are any."""
    tensors, numbers, scratch = table.shape[1], rows.shape[1], at.scratch
    tiles, lines, matrices = (x.shape[1] for x in (at.tiles, at.lines, at.matrices))
    squares = torch.empty(2 * tiles, dtype=torch.float64, device=table.device)
    grad, param, state, _, *average = types
    tile = dict(zip(("NB", "BR", "BC"), at.tile, strict=True))
    tiled = {"NUMBERS": numbers, "G": grad, **tile, "warps": WARPS}
    common = (at.sizes, at.tiles, tiles, tensors, rows, control, scratch)
    sums((tiles,), table, grads, *common, squares, P=param, **tiled)
    moments(
        (lines,),
        table,
        at.sizes,
        at.lines,
        lines,
        tensors,
        rows,
        control,
        scratch,
        S=state,
        NUMBERS=numbers,
        BR=tile["BR"],
        BC=tile["BC"],
        PARTS=PARTS,
        BLOCK=BLOCK,
    )
    means((matrices,), at.sizes, at.matrices, matrices, tensors, scratch, BLOCK=1024)
    length((tiles,), grads, *common, squares, **tiled)
    make_rates(squares, at.firsts, table, rows)
    apply((tiles,), table, grads, *common, P=param, E=average[0] if average else None, **tiled)
