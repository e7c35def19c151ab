"""y = f(x · w, …) on Hopper: the kernel of ``product.py`` with specialised warps.

One warp loads tiles of both factors by the copy engine (TMA) into a ring of stages in shared
memory. Two groups of four warps multiply, each computing every second tile of the result: while one
group applies the epilogue to its tile and stores it, the other keeps the matrix units busy. The
copy engine loads a residual, too, into the shared memory from which the tile's result is then
stored.

With ``gate`` there are two second factors, and the epilogue is a formula of both products:
y = f(x · w, x · w₂, …). With ``batched`` x, w and y are batches of matrices, which the copy engine
sees as tensors of four dimensions, so that a tile that reaches over the edge of one matrix does
not touch the next. With ``parts`` several programs share the sum of a tile (split-K); each stores
its part in float32, and ``product.add_up`` adds them up. ``to``, where it is given, receives the
statistics of the columns, see ``statistics_hopper.py``; ``group`` is 1 then.

Barriers, each with a phase that flips when it is passed: ``full`` and ``free`` for every stage,
``came`` and ``gone`` for each group's residual, and ``turn``, by which the two groups take turns at
multiplying.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from deuteron.kernels.triton.hopper import barriers, in_registers, in_shared, next_stage, rounded
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula, finishing, in_parts, reading
from deuteron.kernels.triton.product import finish as plain_finish
from deuteron.kernels.triton.product_strided import Sizes
from deuteron.kernels.triton.statistics_hopper import leave, none_yet, with_tile

# rows, columns: of a tile of the result; steps: of the sum at a time; stages: of the ring;
# residual: the index of the operand that the copy engine loads as tiles, or None; batched: there
# are batches; parts: of the split sum; outs: results, at most three; the others are those of
# ``product.Tile``.
Tile = namedtuple(
    "Tile",
    "rows columns steps stages group x_turned w_turned gate residual batched parts outs CHAIN",
)
GROUPS = gl.constexpr(2)  # of warps that multiply


@gluon.jit
def _place(index, size, T: gl.constexpr):
    """Return batch, first row and first column of a tile, and begin and end of its steps; T.group
    rows of tiles are walked together."""
    down, across = gl.cdiv(size.rows, T.rows), gl.cdiv(size.columns, T.columns)
    tile = index % (down * across)
    first = tile // (T.group * across) * T.group
    high = gl.minimum(down - first, T.group)
    within = tile % (T.group * across)
    b = index // (down * across)
    depth = gl.cdiv(size.steps, T.steps)
    share = gl.cdiv(depth, T.parts)
    begin = b // size.batches * share
    end = gl.minimum(begin + share, depth)
    m, n = (first + within % high) * T.rows, within // high * T.columns
    return b % size.batches, m, n, begin, end


@gluon.jit
def _tiles(size, T: gl.constexpr):
    tiles = gl.cdiv(size.rows, T.rows) * gl.cdiv(size.columns, T.columns)
    return tiles * size.batches * T.parts


@gluon.jit
def _load(matrix, b, line, place, outer, inner, size, bar, to, T: gl.constexpr):
    """Start the copy of a block of a matrix. Where the matrix has no outer or inner batches (stride
    0), that index is 0."""
    if T.batched:
        first = gl.where(outer != 0, b // size.inner, 0)
        second = gl.where(inner != 0, b % size.inner, 0)
        whole = to._reinterpret(to.dtype, [1, 1, to.shape[0], to.shape[1]], matrix.layout)
        tma.async_copy_global_to_shared(matrix, [first, second, line, place], bar, whole)
    else:
        tma.async_copy_global_to_shared(matrix, [line, place], bar, to)


@gluon.jit
def _bring(left, right, right2, rest, a, w, w2, c, bars, size, T: gl.constexpr):
    """Run by one warp: load tiles of the factors in the order in which they are multiplied."""
    full, free, came, gone, _turn = bars
    stage = 0
    phase = 1
    count = 0
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        b, m, n, begin, end = _place(tile, size, T)
        for step in range(begin, end):
            k = step * T.steps
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, 2 * T.steps * (T.rows + T.columns * (2 if T.gate else 1)))
            if T.x_turned:
                _load(left, b, k, m, size.x_outer, size.x_inner, size, bar, a.index(stage), T)
            else:
                _load(left, b, m, k, size.x_outer, size.x_inner, size, bar, a.index(stage), T)
            if T.w_turned:
                _load(right, b, n, k, size.w_outer, size.w_inner, size, bar, w.index(stage), T)
                if T.gate:
                    _load(
                        right2, b, n, k, size.w_outer, size.w_inner, size, bar, w2.index(stage), T
                    )
            else:
                _load(right, b, k, n, size.w_outer, size.w_inner, size, bar, w.index(stage), T)
                if T.gate:
                    _load(
                        right2, b, k, n, size.w_outer, size.w_inner, size, bar, w2.index(stage), T
                    )
            stage, phase = next_stage(stage, phase, T.stages)
            if T.residual is not None:
                # as early as this warp need not wait: a stage of this tile is free again, so the
                # group has begun to multiply it, after it had stored its previous result
                if step == gl.minimum(begin + T.stages, end - 1):
                    mine = count % GROUPS
                    mbarrier.wait(gone.index(mine), count // GROUPS & 1 ^ 1)
                    mbarrier.expect(came.index(mine), 2 * T.rows * T.columns)
                    _load(rest, b, m, n, 1, 1, size, came.index(mine), c.index(mine), T)
        count += 1


@gluon.jit
def _multiply(
    outs, y, xs, ws, w2s, c, bars, others, to, size,
    ME: gl.constexpr, T: gl.constexpr, F: gl.constexpr
):  # fmt: skip
    """Run by each group of four warps: every second tile of the result. F: the epilogue."""
    full, free, came, gone, turn = bars
    L: gl.constexpr = in_registers(T.columns)
    stage = 0
    phase = 0
    count = 0
    if to is not None:
        seen = none_yet(T.rows, T.columns)
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        b, m, n, begin, end = _place(tile, size, T)
        if count % GROUPS == ME:
            if T.parts == 1:
                tma.store_wait(0)
            if T.residual is not None:
                mbarrier.arrive(gone.index(ME), pred=count >= GROUPS)
            sums = gl.zeros((T.rows, T.columns), gl.float32, L)
            more = sums
            mbarrier.wait(turn.index(ME), count // GROUPS & 1)
            for k in range(begin, end):
                mbarrier.wait(full.index(stage), phase)
                if T.x_turned:
                    x = xs.index(stage).permute((1, 0))
                else:
                    x = xs.index(stage)
                if T.w_turned:
                    w = ws.index(stage).permute((1, 0))
                    w2 = w2s.index(stage).permute((1, 0))
                else:
                    w = ws.index(stage)
                    w2 = w2s.index(stage)
                sums = warpgroup_mma(x, w, sums, use_acc=k > begin, is_async=True)
                if T.gate:
                    more = warpgroup_mma(x, w2, more, use_acc=k > begin, is_async=True)
                    sums, more = warpgroup_mma_wait(2, deps=(sums, more))
                else:
                    sums = warpgroup_mma_wait(1, deps=(sums,))
                before = gl.where(stage == 0, T.stages - 1, stage - 1)
                mbarrier.arrive(free.index(before), pred=k > begin)
                stage, phase = next_stage(stage, phase, T.stages)
            if T.gate:
                sums, more = warpgroup_mma_wait(0, deps=(sums, more))
            else:
                sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(free.index(gl.where(stage == 0, T.stages - 1, stage - 1)))
            mbarrier.arrive(turn.index(GROUPS - 1 - ME))
            if T.parts > 1:
                row = gl.expand_dims(m + gl.arange(0, T.rows, gl.SliceLayout(1, L)), 1)
                column = gl.expand_dims(n + gl.arange(0, T.columns, gl.SliceLayout(0, L)), 0)
                part = tile // (_tiles(size, T) // T.parts) * size.batches + b
                place = (part.to(gl.int64) * size.rows + row) * size.columns + column
                gl.store(y + place, sums, mask=(row < size.rows) & (column < size.columns))
            else:
                mine = c.index(ME)
                if T.residual is not None:
                    mbarrier.wait(came.index(ME), count // GROUPS & 1)
                rest = sums
                if T.residual is not None:
                    rest = mine.load(L)
                for i in gl.static_range(T.outs):
                    found = F(sums, more, rest, others, b, m, n, size, T, L, i)
                    if i > 0:
                        tma.store_wait(0)
                    found = rounded(found, outs[i].dtype)
                    mine.store(found)
                    fence_async_shared()
                    if T.batched:
                        shape: gl.constexpr = [1, 1, T.rows, T.columns]
                        whole = mine._reinterpret(outs[i].dtype, shape, outs[i].layout)
                        at = [b // size.inner, b % size.inner, m, n]
                        tma.async_copy_shared_to_global(outs[i], at, whole)
                    else:
                        tma.async_copy_shared_to_global(outs[i], [m, n], mine)
                    if to is not None:
                        v = found.to(gl.float32)
                        live = m + gl.arange(0, T.rows, gl.SliceLayout(1, L)) < size.rows
                        whole = m + T.rows <= size.rows
                        seen = with_tile(seen, v, live, whole, T.rows, T.columns)
        else:
            skipped = stage + end - begin
            phase = phase ^ (skipped // T.stages & 1)
            stage = skipped % T.stages
        count += 1
    if to is not None:
        wide = gl.cdiv(size.columns, T.columns)
        part = gl.program_id(0) // wide * GROUPS + ME
        n = gl.program_id(0) % wide * T.columns
        leave(to, part, n, size.columns, seen, T.columns)
    if T.parts == 1:
        tma.store_wait(0)


@gluon.jit
def _described(
    x, lines, long, step, outer, inner, size, LINES: gl.constexpr, LONG: gl.constexpr,
    T: gl.constexpr
):  # fmt: skip
    """Return the copy engine's descriptor of a matrix, or of its batches, that moves blocks."""
    if T.batched:
        outers = gl.where(outer != 0, size.batches // size.inner, 1)
        inners = gl.where(inner != 0, size.inner, 1)
        outer, inner = gl.where(outer != 0, outer, step), gl.where(inner != 0, inner, step)
        return tma.make_tensor_descriptor(
            x,
            [outers, inners, lines, long],
            [outer, inner, step, 1],
            [1, 1, LINES, LONG],
            in_shared(LONG, 4),
        )
    else:
        return tma.make_tensor_descriptor(
            x, [lines, long], [step, 1], [LINES, LONG], in_shared(LONG, 2)
        )


@gluon.jit
def _product(x, w, w2, ys, rest, others, to, size, T: gl.constexpr, FINISH: gl.constexpr):
    if T.CHAIN:
        gdc_launch_dependents()
    M, N, K = size.rows, size.columns, size.steps
    tall: gl.constexpr = T.steps if T.x_turned else T.rows
    long: gl.constexpr = T.rows if T.x_turned else T.steps
    if T.x_turned:
        left = _described(x, K, M, size.x_line, size.x_outer, size.x_inner, size, tall, long, T)
    else:
        left = _described(x, M, K, size.x_line, size.x_outer, size.x_inner, size, tall, long, T)
    high: gl.constexpr = T.columns if T.w_turned else T.steps
    flat: gl.constexpr = T.steps if T.w_turned else T.columns
    lines, wide = (N, K) if T.w_turned else (K, N)
    right = _described(w, lines, wide, size.w_line, size.w_outer, size.w_inner, size, high, flat, T)
    right2 = right
    if T.gate:
        right2 = _described(
            w2, lines, wide, size.w_line, size.w_outer, size.w_inner, size, high, flat, T
        )
    kind: gl.constexpr = x.dtype.element_ty
    a = gl.allocate_shared_memory(kind, [T.stages, tall, long], in_shared(long, 2))
    b = gl.allocate_shared_memory(kind, [T.stages, high, flat], in_shared(flat, 2))
    b2 = b
    if T.gate:
        b2 = gl.allocate_shared_memory(kind, [T.stages, high, flat], in_shared(flat, 2))
    if T.parts > 1:
        out, out2, out3, given, c = left, left, left, left, a
    else:
        each = M.to(gl.int64) * N
        line = size.y_line
        out = _described(ys[0], M, N, line, each * size.inner, each, size, T.rows, T.columns, T)
        out2, out3, given = out, out, out
        if T.outs > 1:
            out2 = _described(ys[1], M, N, N, each * size.inner, each, size, T.rows, T.columns, T)
        if T.outs > 2:
            out3 = _described(ys[2], M, N, N, each * size.inner, each, size, T.rows, T.columns, T)
        if T.residual is not None:
            given = _described(rest, M, N, N, each * size.inner, each, size, T.rows, T.columns, T)
        c = gl.allocate_shared_memory(kind, [GROUPS, T.rows, T.columns], in_shared(T.columns, 2))
    full, free = barriers(T.stages, (1, 1))
    came, gone, turn = barriers(GROUPS, (1, 1, 1))
    fence_async_shared()
    mbarrier.arrive(turn.index(0))
    bars = (full, free, came, gone, turn)
    outs = (out, out2, out3)
    gl.warp_specialize(
        [
            (_multiply, (outs, ys[0], a, b, b2, c, bars, others, to, size, 0, T, FINISH)),
            (_multiply, (outs, ys[0], a, b, b2, c, bars, others, to, size, 1, T, FINISH)),
            (_bring, (left, right, right2, given, a, b, b2, c, bars, size, T)),
        ],
        [4, 1],
        [232, 24],
    )


_run = Launchable(_product)

ROW = "gl.expand_dims(m + gl.arange(0, T.rows, gl.SliceLayout(1, L)), 1)"
COLUMN = "gl.expand_dims(n + gl.arange(0, T.columns, gl.SliceLayout(0, L)), 0)"


@lru_cache(maxsize=512)
def finish(after: EpilogueFormula, gate: bool = False) -> Any:
    """Return the epilogue of a tile's sums. An operand of the kind "tile" is ``rest``, which the
    copy engine has loaded to where the result is stored from."""

    def read(pointer: str, kind: str) -> str:
        return "rest" if kind == "tile" else reading(kind, pointer, ROW, COLUMN, "gl")

    given = "sums, more, rest, others, b, m, n, size, T: gl.constexpr, L: gl.constexpr, "
    return finishing(after, f"{given}I: gl.constexpr", read, gate, "gl")


def product(size: Sizes, tile: Tile, after: EpilogueFormula, programs: int) -> Callable[..., None]:
    """Return a function (x, w, w2, ys, others, to); without a gate w2 is w again. ``to``: None, or
    where statistics go (``statistics_hopper``); then ``group`` and ``parts`` are 1."""
    whole = tile.residual
    tiles = -(-size.rows // tile.rows) * -(-size.columns // tile.columns)
    grid = (min(programs, tiles * size.batches * tile.parts),)
    how = {"warps": 4, "stages": 1}
    if tile.parts > 1:
        last = plain_finish(after, tile.gate)
    else:
        kinds = ("tile" if i == whole else kind for i, kind in enumerate(after.operands))
        last = finish(after._replace(operands=tuple(kinds)), tile.gate)

    def run(
        x: torch.Tensor, w: Any, w2: Any, ys: Sequence[Any], others: Sequence[Any], to: Any = None
    ) -> None:
        def leave(parts: Any, here: Tile) -> None:
            _run(grid, x, w, w2, (parts,), parts, (), None, size, T=here, FINISH=None, **how)

        if tile.parts > 1:
            in_parts(leave, x, ys, others, size, tile._replace(residual=None), last)
            return
        rest = ys[0] if whole is None else others[whole]
        given = (x, w, w2, tuple(ys), rest, tuple(others), to, size)
        _run(grid, *given, T=tile, FINISH=last, **how)

    return run
