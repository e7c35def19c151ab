"""8-bit floats with a scale for each block: products of them, and quantisation to them.

    y = f(Σ_b xs[m, b] · ws[n / block, b] · Σ_{k in b} x[m, k] · w[n, k], …)

The matrix units keep about 14 bits of sums of 8-bit floats. So each block is summed by itself, and
its sum is scaled and added to the others in float32. That takes 2 · M · N · K / block operations
beside the 2 · M · N · K of the product, and M · N numbers more in registers.

The kernel loads by pointers and runs on any GPU that multiplies 8-bit floats.

    scale = max |x| of a block / 448        q = x / scale, rounded

reads each number once and writes one byte: the block stays in registers between the two steps.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula, _place, finish

# Rows and columns of the result, steps of the sum; block: numbers that share a scale; blocks:
# scales of a row.
Sizes = namedtuple("Sizes", "rows columns steps block blocks")
# rows, columns: of a tile of the result; steps: at a time, all of one block; group: rows of tiles
# that are walked together.
Tile = namedtuple("Tile", "rows columns steps group")


@triton.jit
def _product(x, w, xs, ws, y, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    M, N, K = size.rows, size.columns, size.steps
    down, across = tl.cdiv(M, T.rows), tl.cdiv(N, T.columns)
    tile_row, tile_column = _place(tl.program_id(0), down, across, T.group)
    m, n = tile_row * T.rows, tile_column * T.columns
    row, column = m + tl.arange(0, T.rows), n + tl.arange(0, T.columns)
    step = tl.arange(0, T.steps)
    here, there = row < M, column < N
    left = x + row.to(tl.int64)[:, None] * K + step[None, :]
    right = w + column.to(tl.int64)[None, :] * K + step[:, None]
    rows = xs + row.to(tl.int64) * size.blocks
    squares = ws + (column // size.block).to(tl.int64) * size.blocks
    sums = tl.zeros((T.rows, T.columns), tl.float32)
    for k in range(0, K, T.steps):
        inside = step < K - k
        a = tl.load(left + k, mask=here[:, None] & inside[None, :], other=0.0)
        b = tl.load(right + k, mask=there[None, :] & inside[:, None], other=0.0)
        by_row = tl.load(rows + k // size.block, mask=here, other=0.0)
        by_square = tl.load(squares + k // size.block, mask=there, other=0.0)
        sums += tl.dot(a, b) * (by_row[:, None] * by_square[None, :])
    to = row.to(tl.int64)[:, None] * N + column[None, :]
    found = FINISH(sums, sums, others, 0, m, n, size, T, 0)
    tl.store(y + to, found.to(y.dtype.element_ty), mask=here[:, None] & there[None, :])


_PRODUCT = Launchable(_product)


def product(
    size: Sizes, tile: Tile, after: EpilogueFormula, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (x, w, scales, y, others); scales: those of x and w."""
    last = finish(after)
    grid = (-(-size.rows // tile.rows) * -(-size.columns // tile.columns),)

    def run(x: Any, w: Any, scales: Sequence[Any], y: Any, others: Sequence[Any]) -> None:
        given = (x, w, *scales, y, tuple(others), size)
        _PRODUCT(grid, *given, T=tile, FINISH=last, warps=warps, stages=stages)

    return run


# ---- quantisation

# Rows and columns of each matrix of x; across: blocks of a row.
Numbers = namedtuple("Numbers", "rows columns across")
# Rows and columns of a block; count: blocks that a program has side by side; high, wide: the next
# powers of two of rows and columns; most: the largest 8-bit float.
Blocks = namedtuple("Blocks", "rows columns count high wide most")


@triton.jit
def _quantize(x, q, scale, size, T: tl.constexpr):
    down = tl.cdiv(size.rows, T.rows)
    batch, line = tl.program_id(1) // down, tl.program_id(1) % down
    first = tl.program_id(0) * T.count
    i = tl.arange(0, T.high)[:, None, None]
    row = line * T.rows + i
    block = (first + tl.arange(0, T.count))[None, :, None]
    j = tl.arange(0, T.wide)[None, None, :]
    column = block * T.columns + j
    there = (row < size.rows) & (i < T.rows) & (column < size.columns) & (j < T.columns)
    start = (batch.to(tl.int64) * size.rows + line * T.rows) * size.columns
    at = i * size.columns + column
    numbers = tl.load(x + start + at, mask=there, other=0.0).to(tl.float32)
    largest = tl.abs(numbers)
    # reduced in two steps; nan wins over every number, as in torch
    largest = tl.reduce(tl.reduce(largest, 2, _larger), 0, _larger)
    by = tl.div_rn(largest, T.most)
    by = tl.where(by == 0.0, 1.0, by)
    found = tl.div_rn(numbers, by[None, :, None])
    found = tl.where(found != found, found, tl.clamp(found, -T.most, T.most))
    tl.store(q + start + at, found.to(q.dtype.element_ty), mask=there)
    many = first + tl.arange(0, T.count)
    to = (batch.to(tl.int64) * down + line) * size.across + many
    tl.store(scale + to, by, mask=many < size.across)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, tl.PropagateNan.ALL)


_QUANTIZE = Launchable(_quantize)


def quantize(
    batches: int, size: Numbers, tile: Blocks, warps: int
) -> Callable[[Any, Any, Any], None]:
    """Return a function (x, q, scales)."""
    grid = (-(-size.across // tile.count), batches * -(-size.rows // tile.rows))
    return _QUANTIZE.over(grid, size, T=tile, warps=warps)
