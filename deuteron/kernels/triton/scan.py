"""Running sums and products along rows that are adjacent in memory.

    y[r, i] = x[r, 0] ∘ … ∘ x[r, i]

Bytes: every element is read once and written once. A program takes a few rows and walks along them
in blocks; within a block Triton's scan combines neighbours in a fixed tree, and the running value
of a row is carried to its next block, so that two runs agree to the last bit. 16-bit floats are
combined in float32, and integers in int64.

Generated code has no scans: without this kernel torch computes them, for 16-bit numbers in three
passes (to float32, the scan, and back), and has to be told to keep one order. Tensors with fewer
rows than the GPU has multiprocessors are left to torch (bench/results/small-h200.md: a tie).
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


@triton.jit
def _scan(x, y, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRODUCT: tl.constexpr):
    kind = y.dtype.element_ty
    WIDE: tl.constexpr = tl.float32 if kind == tl.float16 or kind == tl.bfloat16 else kind
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    start = row.to(tl.int64)[:, None] * columns
    carried = tl.full((ROWS, 1), 1 if PRODUCT else 0, WIDE)
    last = tl.arange(0, COLUMNS)[None, :] == COLUMNS - 1
    for begin in range(0, columns, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        inside = live & (column < columns)
        block = tl.load(x + start + column, mask=inside, other=1 if PRODUCT else 0).to(WIDE)
        if PRODUCT:
            block = tl.cumprod(block, 1) * carried
        else:
            block = tl.cumsum(block, 1) + carried
        tl.store(y + start + column, block.to(kind), mask=inside)
        # only the last column counts; a sum with zeros picks it out
        carried = tl.sum(tl.where(last, block, tl.zeros_like(block)), 1, keep_dims=True)


scan = Launchable(_scan)


def row_scan(
    rows: int, columns: int, product: bool, block: tuple[int, int], warps: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return the scan of contiguous rows, a function (x, y); ``block``: rows and columns at a
    time."""
    grid = (triton.cdiv(rows, block[0]),)
    constants = {"ROWS": block[0], "COLUMNS": block[1], "PRODUCT": product}
    return scan.settled(grid, rows, columns, warps=warps, **constants)
