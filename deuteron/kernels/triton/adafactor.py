"""Adafactor over many matrices at once: how they are cut into tiles, and the kernels between the
generated passes.

    sums of squares by row and by column of a tile    generated; reads g, p
    moments: adds them up, moves row and column       here
    means of the moments of the rows of a matrix      here
    the length of u, then the step                    generated; reads g, then g, p, writes p

A tile is a few matrices, or a piece of one. Bytes per element of fp32: g three times, p read twice
and written, 24, and little more for the sums of tiles. Those are added up in a fixed order: no
atomics, so two runs give the same bits.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch

from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.optim import Step, first_of, listed, with_scratch
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.optim import Math, Tile, kernel, name_of

ELEMENTS, WIDEST, TALLEST = 2048, 128, 16
PARTS, BLOCK = 32, 64  # tiles, and rows or columns, that one program adds up at a time


def tile_for(shape: Sequence[int]) -> Tile:
    columns = min(power_of_two(max(shape[-1], 1)), WIDEST)
    rows = min(power_of_two(max(shape[-2], 1)), max(TALLEST, ELEMENTS // columns // 8))
    return max(ELEMENTS // (columns * rows), 1), rows, columns


class Tiles:
    """The table of addresses, the scratch and the lists of work for matrices of similar size; a
    list has pairs (tensor, piece of it)."""

    def __init__(self, shapes: Sequence[Sequence[int]], flat: torch.Tensor, wide: torch.dtype):
        nb, br, bc = self.tile = tile_for(shapes[0])
        sizes = [(prod(shape[:-2]), *shape[-2:]) for shape in shapes]
        parts = [(-(-width // bc), -(-height // br)) for _, height, width in sizes]
        self.table, self.scratch = with_scratch(flat, sizes, parts, wide)
        tiles = [-(-n // nb) * a * d for (n, _, _), (a, d) in zip(sizes, parts, strict=True)]
        lines = [-(-n * h // BLOCK) + -(-n * w // BLOCK) if h * w else 0 for n, h, w in sizes]
        each = [n if h * w else 0 for n, h, w in sizes]
        self.where, self.lines, self.matrices, self.firsts = (
            x.to(flat.device) for x in (*map(listed, (tiles, lines, each)), first_of(tiles))
        )
        self.chunks = sum(tiles)

    def move(self, step: Step, rows: torch.Tensor, control: torch.Tensor | None, dtypes) -> None:
        """Compute new moments of rows and columns, and the means of those of rows, from the sums
        that the first pass stored."""
        move, mean = moments(step, dtypes, self.tile)
        tensors, lines, each = self.table.shape[1], self.lines.shape[1], self.matrices.shape[1]
        move((lines,), self.table, self.lines, lines, tensors, rows, control)
        mean((each,), self.table, self.matrices, each, tensors)


@lru_cache
def moments(step: Step, dtypes: tuple[torch.dtype, ...], tile: Tile) -> tuple[Launchable, ...]:
    """Return two kernels. ``run(table, lines, count, tensors, rows, control)``: a program computes
    the new moments of BLOCK rows or columns of one tensor from the sums of the tiles; 1/√ of them
    goes to row and column, and the moments themselves to where the sums were. ``run(table, each,
    count, tensors)``: a program computes the mean of the moments of one matrix's rows."""
    rule, math = step.rule, Math(torch.float64 in dtypes)
    wide, first = math.float, rule.place("row_total")
    state = name_of(dtypes[rule.tensors.index("row_var")])
    sizes = f"""
t = tl.load(list + tl.program_id(0))
k = tl.load(list + count + tl.program_id(0))
matrices = tl.load(table + {first + 5} * tensors + t)
height = tl.load(table + {first + 6} * tensors + t)
width = tl.load(table + {first + 7} * tensors + t)
"""
    text = f"""{sizes}
skip = 0.0
if control is not None:
    skip = tl.load(control + 1)
row_blocks = tl.cdiv(matrices * height, {BLOCK})
is_row = k < row_blocks
kind = tl.where(is_row, 0, 1)  # columns lie one further in every table
many = tl.where(is_row, matrices * height, matrices * width)
parts = tl.where(is_row, tl.cdiv(width, {tile[2]}), tl.cdiv(height, {tile[1]}))
size = tl.where(is_row, width, height)
line = tl.where(is_row, k, k - row_blocks) * {BLOCK} + tl.arange(0, {BLOCK})
inside = line < many
weight = tl.load(rows + t * {len(rule.numbers)} + {step.numbers["weight"]})
if skip == 0.0:
    state = tl.load(table + (2 + kind) * tensors + t).to(tl.pointer_type({state}))
    totals = tl.load(table + ({first} + kind) * tensors + t).to(tl.pointer_type({wide}))
    made = tl.load(table + ({first + 2} + kind) * tensors + t).to(tl.pointer_type({wide}))
    total = tl.zeros(({PARTS}, {BLOCK}), {wide})
    for first in range(0, parts, {PARTS}):
        j = (first + tl.arange(0, {PARTS}))[:, None]
        at = totals + j * many + line[None, :]
        total += tl.load(at, mask=inside[None, :] & (j < parts), other=0.0)
    old = tl.load(state + line, mask=inside, other=0.0).to({wide})
    mean = tl.sum(total, 0) / size
"""
    new = step.body.results["new"]
    lines = [*text.splitlines(), *(f"    {line}" for line in math.lines(step.body))]
    lines += [f"    tl.store(state + line, {new}.to({state}), mask=inside)"]
    lines += [f"    tl.store(made + line, 1.0 / tl.sqrt({new}), mask=inside)"]
    lines += [f"    tl.store(totals + line, {new}, mask=inside)"]
    means = f"""{sizes}
rows = tl.load(table + {first} * tensors + t).to(tl.pointer_type({wide})) + k * height
total = tl.zeros((1024,), {wide})
for first in range(0, height, 1024):
    r = first + tl.arange(0, 1024)
    total += tl.load(rows + r, mask=r < height, other=0.0)
mean = tl.load(table + {first + 4} * tensors + t).to(tl.pointer_type({wide})) + k
tl.store(mean, tl.sum(total, 0) / height)
"""
    moved = kernel("table, list, count, tensors, rows, control", lines, math)
    return moved, kernel("table, list, count, tensors", means, math)
