"""y = f(x · wᵀ, …) of 8-bit floats on Hopper, with or without scales for blocks.

One group of warps loads tiles of both factors by the copy engine (TMA) into a ring of stages. Two
groups of four warps share every tile of the result, 64 rows each. The matrix units keep about 14
bits of sums of 8-bit floats, so each group multiplies 128 columns by 128 steps, waits for these
sums, and adds them to its own in float32, scaled where there are scales; meanwhile the other group
multiplies. A tile of 256 columns reads less of the factors for each number of the result, but needs
registers for twice as many sums; with scales there are too few registers for that.

Barriers, each with a phase that flips when it is passed: ``full`` and ``free`` for every stage.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from deuteron.kernels.triton.hopper import barriers, next_stage
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula
from deuteron.kernels.triton.product_hopper import finish

# Rows and columns of the result, steps of the sum, row strides of x and w; block: numbers that
# share a scale; blocks: scales of a row.
Sizes = namedtuple("Sizes", "rows columns steps x_line w_line block blocks")
# rows, columns, steps: what one group multiplies at a time; stages: of the ring; halves: a tile has
# so many times 128 columns (1 or 2); group: rows of tiles walked together; scaled: there are
# scales.
Tile = namedtuple("Tile", "rows columns steps stages halves group scaled")
GROUPS = gl.constexpr(2)  # of warps that multiply
PART = 64, 128, 128  # rows, columns and steps that one group takes at a time


@gluon.jit
def _place(tile, size, T: gl.constexpr):
    """Return first row and column of a tile; T.group rows of tiles are walked together."""
    down = gl.cdiv(size.rows, GROUPS * T.rows)
    across = gl.cdiv(size.columns, T.halves * T.columns)
    first = tile // (T.group * across) * T.group
    high = gl.minimum(down - first, T.group)
    within = tile % (T.group * across)
    return (first + within % high) * (GROUPS * T.rows), within // high * (T.halves * T.columns)


@gluon.jit
def _tiles(size, T: gl.constexpr):
    down = gl.cdiv(size.rows, GROUPS * T.rows)
    return down * gl.cdiv(size.columns, T.halves * T.columns)


@gluon.jit
def _bring(left, right, xs, ws, bars, size, T: gl.constexpr):
    """Load tiles of the factors in the order in which they are multiplied."""
    full, free = bars
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        m, n = _place(tile, size, T)
        for k in range(0, size.steps, T.steps):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, T.steps * (GROUPS * T.rows + T.halves * T.columns))
            tma.async_copy_global_to_shared(left, [m, k], bar, xs.index(stage))
            tma.async_copy_global_to_shared(right, [n, k], bar, ws.index(stage))
            stage, phase = next_stage(stage, phase, T.stages)


@gluon.jit
def _leave(sums, out, c, others, m, n, size, F: gl.constexpr, T: gl.constexpr, L: gl.constexpr):
    """Apply the epilogue to the sums, and start the copy of the result to memory."""
    found = F(sums, sums, sums, others, 0, m, n, size, T, L, 0)
    c.store(found.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [m, n], c)


@gluon.jit
def _multiply(
    out, xs, ws, c, bars, scales, others, size, ME: gl.constexpr, T: gl.constexpr, F: gl.constexpr
):
    """Run by each group of four warps: 64 rows of every tile. F: the epilogue."""
    full, free = bars
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, T.columns, 32])
    stage = 0
    phase = 0
    part = gl.zeros((T.rows, T.columns), gl.float32, L)
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        m, n = _place(tile, size, T)
        m += ME * T.rows
        sums = gl.zeros((T.rows, T.columns), gl.float32, L)
        more = sums
        if T.scaled:
            row = m + gl.arange(0, T.rows, gl.SliceLayout(1, L))
            rows = scales[0] + gl.minimum(row, size.rows - 1).to(gl.int64) * size.blocks
            squares = scales[1] + n // size.block * size.blocks
        for k in range(0, size.steps, T.steps):
            if T.scaled:  # loaded before the wait for the tile
                block = k // size.block
                by = gl.expand_dims(gl.load(rows + block) * gl.load(squares + block), 1)
            mbarrier.wait(full.index(stage), phase)
            x = xs.index(stage).slice(ME * T.rows, T.rows, 0)
            w = ws.index(stage).slice(0, T.columns, 0).permute((1, 0))
            part = warpgroup_mma(x, w, part, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            if T.halves > 1:
                sums += part
                w = ws.index(stage).slice(T.columns, T.columns, 0).permute((1, 0))
                part = warpgroup_mma(x, w, part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                mbarrier.arrive(free.index(stage))
                more += part
            else:
                mbarrier.arrive(free.index(stage))
                if T.scaled:
                    sums += part * by
                else:
                    sums += part
            stage, phase = next_stage(stage, phase, T.stages)
        tma.store_wait(0)
        _leave(sums, out, c.index(T.halves * ME), others, m, n, size, F, T, L)
        if T.halves > 1:
            _leave(more, out, c.index(2 * ME + 1), others, m, n + T.columns, size, F, T, L)
    tma.store_wait(0)


@gluon.jit
def _product(x, w, y, scales, others, size, T: gl.constexpr, FINISH: gl.constexpr):
    M, N, K = size.rows, size.columns, size.steps
    high: gl.constexpr = GROUPS * T.rows
    wide: gl.constexpr = T.halves * T.columns
    LINES: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    kind: gl.constexpr = x.dtype.element_ty
    made: gl.constexpr = y.dtype.element_ty
    OUT: gl.constexpr = gl.NVMMASharedLayout(128, made.primitive_bitwidth, 2)
    left = tma.make_tensor_descriptor(x, [M, K], [size.x_line, 1], [high, T.steps], LINES)
    right = tma.make_tensor_descriptor(w, [N, K], [size.w_line, 1], [wide, T.steps], LINES)
    out = tma.make_tensor_descriptor(y, [M, N], [N, 1], [T.rows, T.columns], OUT)
    xs = gl.allocate_shared_memory(kind, [T.stages, high, T.steps], LINES)
    ws = gl.allocate_shared_memory(kind, [T.stages, wide, T.steps], LINES)
    c = gl.allocate_shared_memory(made, [GROUPS * T.halves, T.rows, T.columns], OUT)
    bars = barriers(T.stages, (1, GROUPS))
    fence_async_shared()
    gl.warp_specialize(
        [
            (_bring, (left, right, xs, ws, bars, size, T)),
            (_multiply, (out, xs, ws, c, bars, scales, others, size, 0, T, FINISH)),
            (_multiply, (out, xs, ws, c, bars, scales, others, size, 1, T, FINISH)),
        ],
        [4, 4],
        [232, 232],
    )


_run = Launchable(_product)


def product(size: Sizes, tile: Tile, after: EpilogueFormula, programs: int) -> Callable[..., None]:
    """Return a function (x, w, scales, y, others); scales: those of x and w, or empty."""
    last = finish(after)
    down, across = (
        -(-size.rows // (2 * tile.rows)),
        -(-size.columns // (tile.halves * tile.columns)),
    )
    grid = (min(programs, down * across),)

    def run(x: Any, w: Any, scales: Sequence[Any], y: Any, others: Sequence[Any]) -> None:
        given = (x, w, y, tuple(scales), tuple(others), size)
        _run(grid, *given, T=tile, FINISH=last, warps=4, stages=1)

    return run
