"""Adafactor over many matrices at once: what lies between the passes that are generated.

    sums of squares by row and by column of a tile   generated; reads g, p
    moments: adds them up, moves row and column       here
    means of the moments of the rows of a matrix      here
    the length of u, then the step                    generated; reads g, then g, p, writes p

A tile is a few matrices, or a piece of one. Bytes per element of fp32: g three times, p twice and
written, 24, and little more for the sums of tiles. Those are added up in a fixed order: no atomics,
so two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import jitted
from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.optim import Step, first_of, listed, matrices, with_scratch
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.optim import Tile
from deuteron.ops.formula import Traced

ELEMENTS, WIDEST, TALLEST = 2048, 128, 16
PARTS, BLOCK = 32, 64  # tiles, and rows or columns, that one program adds up at a time


def tile_for(shape: Sequence[int]) -> Tile:
    """The tile for matrices of this shape."""
    columns = min(power_of_two(max(shape[-1], 1)), WIDEST)
    rows = min(power_of_two(max(shape[-2], 1)), max(TALLEST, ELEMENTS // columns // 8))
    return max(ELEMENTS // (columns * rows), 1), rows, columns


@dataclass
class Layout:
    """Where everything of some matrices of similar size is; lists are (tensor, piece of it)."""

    shapes: Sequence[tuple[int, ...]]
    flat: torch.Tensor  # the table without scratch memory
    wide: torch.dtype
    tile: Tile = field(init=False)

    def __post_init__(self) -> None:
        nb, br, bc = self.tile = tile_for(self.shapes[0])
        sizes = [matrices(shape) for shape in self.shapes]
        parts = [(-(-width // bc), -(-height // br)) for _, height, width in sizes]
        self.table, self.scratch = with_scratch(self.flat, self.shapes, parts, self.wide)
        tiles = [-(-n // nb) * a * d for (n, _, _), (a, d) in zip(sizes, parts, strict=True)]
        lines = [-(-n * h // BLOCK) + -(-n * w // BLOCK) if h * w else 0 for n, h, w in sizes]
        each = [n if h * w else 0 for n, h, w in sizes]
        self.where, self.lines, self.matrices, self.firsts = (
            x.to(self.flat.device) for x in (*map(listed, (tiles, lines, each)), first_of(tiles))
        )
        self.chunks = sum(tiles)


@triton.jit
def _moments(
    table,
    lines,
    count,
    tensors,
    rows,
    control,
    WIDE: tl.constexpr,
    STATE: tl.constexpr,
    SCRATCH: tl.constexpr,
    NUMBERS: tl.constexpr,
    WEIGHT: tl.constexpr,
    MOVED: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK rows or columns of one tensor: their new moments, from the sums of the tiles; 1/√ of
    them goes to row and column, and those of rows also to where their sums were, for the mean."""
    t = tl.load(lines + tl.program_id(0))
    k = tl.load(lines + count + tl.program_id(0))
    skip = 0.0
    if control is not None:
        skip = tl.load(control + 1)
    matrices = tl.load(table + (SCRATCH + 5) * tensors + t)
    height = tl.load(table + (SCRATCH + 6) * tensors + t)
    width = tl.load(table + (SCRATCH + 7) * tensors + t)
    row_blocks = tl.cdiv(matrices * height, BLOCK)
    is_row = k < row_blocks
    kind = tl.where(is_row, 0, 1)  # columns lie one further in every table
    many = tl.where(is_row, matrices * height, matrices * width)
    parts = tl.where(is_row, tl.cdiv(width, BC), tl.cdiv(height, BR))
    size = tl.where(is_row, width, height)
    line = tl.where(is_row, k, k - row_blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = line < many
    if skip == 0.0:
        state = tl.load(table + (2 + kind) * tensors + t).to(tl.pointer_type(STATE))
        totals = tl.load(table + (SCRATCH + kind) * tensors + t).to(tl.pointer_type(WIDE))
        made = tl.load(table + (SCRATCH + 2 + kind) * tensors + t).to(tl.pointer_type(WIDE))
        total = tl.zeros((PARTS, BLOCK), WIDE)
        for first in range(0, parts, PARTS):
            j = (first + tl.arange(0, PARTS))[:, None]
            at = totals + j * many + line[None, :]
            total += tl.load(at, mask=inside[None, :] & (j < parts), other=0.0)
        weight = tl.load(rows + t * NUMBERS + WEIGHT)
        old = tl.load(state + line, mask=inside, other=0.0).to(WIDE)
        new = MOVED(old, tl.sum(total, 0) / size, weight)
        tl.store(state + line, new.to(STATE), mask=inside)
        tl.store(made + line, 1.0 / tl.sqrt(new), mask=inside)
        tl.store(totals + line, new, mask=inside)


@triton.jit
def _means(table, matrices, count, tensors, WIDE: tl.constexpr, SCRATCH: tl.constexpr):
    """The mean over the rows of one matrix of its row moments."""
    t = tl.load(matrices + tl.program_id(0))
    b = tl.load(matrices + count + tl.program_id(0))
    height = tl.load(table + (SCRATCH + 6) * tensors + t)
    rows = tl.load(table + SCRATCH * tensors + t).to(tl.pointer_type(WIDE)) + b * height
    total = tl.zeros((1024,), WIDE)
    for first in range(0, height, 1024):
        r = first + tl.arange(0, 1024)
        total += tl.load(rows + r, mask=r < height, other=0.0)
    mean = tl.load(table + (SCRATCH + 4) * tensors + t).to(tl.pointer_type(WIDE)) + b
    tl.store(mean, tl.sum(total, 0) / height)


moments, means = Launchable(_moments), Launchable(_means)


def constants(step: Step, tile: Tile, wide: torch.dtype, state: torch.dtype) -> dict[str, Any]:
    """What the kernels between the passes are compiled for."""
    formula = Traced(("old", "mean", "weight"), step.body.statements, step.body.results["new"])
    return {
        "WIDE": getattr(tl, str(wide).removeprefix("torch.")),
        "STATE": getattr(tl, str(state).removeprefix("torch.")),
        "SCRATCH": step.names.place("row_total"),
        "NUMBERS": len(step.names.numbers),
        "WEIGHT": step.names.numbers.index("weight"),
        "MOVED": jitted(formula, True),
        "BR": tile[1],
        "BC": tile[2],
        "PARTS": PARTS,
        "BLOCK": BLOCK,
    }


def move(
    at: Layout, step: Step, rows: torch.Tensor, control: torch.Tensor | None, state: torch.dtype
) -> None:
    """New moments of rows and columns, and the means of rows, from what the first pass left."""
    given = constants(step, at.tile, at.wide, state)
    tensors, lines, each = at.table.shape[1], at.lines.shape[1], at.matrices.shape[1]
    moments((lines,), at.table, at.lines, lines, tensors, rows, control, **given)
    few = {name: given[name] for name in ("WIDE", "SCRATCH")}
    means((each,), at.table, at.matrices, each, tensors, **few)
