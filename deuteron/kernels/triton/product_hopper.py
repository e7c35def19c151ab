"""y = f(x · w, …) on Hopper: the kernel of ``product.py`` with its work divided among warps.

One warp brings tiles of both factors by the copy engine into a ring of stages. Two groups of four
warps multiply, each on every second tile of the result: while one finishes its tile, applies what
follows and stores it, the other keeps the matrix units busy. A residual comes by the copy engine
too, into the memory that the result of the tile leaves by.

With ``gate`` there are two second factors, and what follows is a formula of both products:
y = f(x · w, x · w₂, …).

Barriers, each in a phase that flips when it is passed: ``full`` and ``free`` of every stage,
``came`` and ``gone`` of each group's residual, and ``turn``, by which the groups start multiplying
one after the other.
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

from deuteron.codegen.triton_load import formula_source, functions
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import Sizes
from deuteron.ops.formula import Traced

# A tile of the result, how much of the sum it takes at a time, stages, tiles of rows that are
# walked together, which factors lie transposed, whether there are two second factors, and which of
# the other operands comes by tiles as the result leaves, or None.
Tile = namedtuple("Tile", "rows columns steps stages group x_turned w_turned gate residual")
GROUPS = gl.constexpr(2)  # of warps that multiply
REGISTERS = 232, 24  # of a thread that multiplies, and of one that brings tiles


@gluon.constexpr_function
def _sums(columns):  # type: ignore[no-untyped-def]
    """How sums lie in the registers of four warps."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def _shared(lines, width):  # type: ignore[no-untyped-def]
    """How lines of ``width`` numbers of 16 bits lie in shared memory."""
    return gl.NVMMASharedLayout(min(128, 2 * width), 16, 2)


@gluon.jit
def _place(tile, size, T: gl.constexpr):
    """First row and column of a tile, walked in groups of T.group tiles of rows."""
    down, across = gl.cdiv(size.rows, T.rows), gl.cdiv(size.columns, T.columns)
    first = tile // (T.group * across) * T.group
    high = gl.minimum(down - first, T.group)
    within = tile % (T.group * across)
    return (first + within % high) * T.rows, within // high * T.columns


@gluon.jit
def _tiles(size, T: gl.constexpr):
    return gl.cdiv(size.rows, T.rows) * gl.cdiv(size.columns, T.columns)


@gluon.jit
def _bring(left, right, right2, rest, a, b, b2, c, bars, size, T: gl.constexpr):
    """One warp: tiles of the factors in the order in which they are multiplied."""
    full, free, came, gone, _turn = bars
    stage = 0
    phase = 1
    count = 0
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        m, n = _place(tile, size, T)
        for k in range(0, size.steps, T.steps):
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), phase)
            mbarrier.expect(bar, 2 * T.steps * (T.rows + T.columns * (2 if T.gate else 1)))
            if T.x_turned:
                tma.async_copy_global_to_shared(left, [k, m], bar, a.index(stage))
            else:
                tma.async_copy_global_to_shared(left, [m, k], bar, a.index(stage))
            if T.w_turned:
                tma.async_copy_global_to_shared(right, [n, k], bar, b.index(stage))
                if T.gate:
                    tma.async_copy_global_to_shared(right2, [n, k], bar, b2.index(stage))
            else:
                tma.async_copy_global_to_shared(right, [k, n], bar, b.index(stage))
                if T.gate:
                    tma.async_copy_global_to_shared(right2, [k, n], bar, b2.index(stage))
            stage += 1
            phase = gl.where(stage == T.stages, phase ^ 1, phase)
            stage = gl.where(stage == T.stages, 0, stage)
        if T.residual is not None:
            mine = count % GROUPS
            mbarrier.wait(gone.index(mine), count // GROUPS & 1 ^ 1)
            mbarrier.expect(came.index(mine), 2 * T.rows * T.columns)
            tma.async_copy_global_to_shared(rest, [m, n], came.index(mine), c.index(mine))
        count += 1


@gluon.jit
def _multiply(
    out, a, b, b2, c, bars, others, size, ME: gl.constexpr, T: gl.constexpr, FINISH: gl.constexpr
):
    """Four warps: every second tile of the result."""
    full, free, came, gone, turn = bars
    L: gl.constexpr = _sums(T.columns)
    stage = 0
    phase = 0
    count = 0
    depth = gl.cdiv(size.steps, T.steps)
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        if count % GROUPS == ME:
            m, n = _place(tile, size, T)
            mine = c.index(ME)
            tma.store_wait(0)
            if T.residual is not None:
                mbarrier.arrive(gone.index(ME), pred=count >= GROUPS)
            sums = gl.zeros((T.rows, T.columns), gl.float32, L)
            more = sums
            mbarrier.wait(turn.index(ME), count // GROUPS & 1)
            for k in range(depth):
                mbarrier.wait(full.index(stage), phase)
                if T.x_turned:
                    x = a.index(stage).permute((1, 0))
                else:
                    x = a.index(stage)
                if T.w_turned:
                    w = b.index(stage).permute((1, 0))
                    w2 = b2.index(stage).permute((1, 0))
                else:
                    w = b.index(stage)
                    w2 = b2.index(stage)
                sums = warpgroup_mma(x, w, sums, use_acc=k > 0, is_async=True)
                if T.gate:
                    more = warpgroup_mma(x, w2, more, use_acc=k > 0, is_async=True)
                    sums, more = warpgroup_mma_wait(2, deps=(sums, more))
                else:
                    sums = warpgroup_mma_wait(1, deps=(sums,))
                before = gl.where(stage == 0, T.stages - 1, stage - 1)
                mbarrier.arrive(free.index(before), pred=k > 0)
                stage += 1
                phase = gl.where(stage == T.stages, phase ^ 1, phase)
                stage = gl.where(stage == T.stages, 0, stage)
            if T.gate:
                sums, more = warpgroup_mma_wait(0, deps=(sums, more))
            else:
                sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(free.index(gl.where(stage == 0, T.stages - 1, stage - 1)))
            mbarrier.arrive(turn.index(GROUPS - 1 - ME))
            if T.residual is not None:
                mbarrier.wait(came.index(ME), count // GROUPS & 1)
            found = FINISH(sums, more, mine, others, m, n, size, T, L)
            mine.store(found.to(out.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [m, n], mine)
        else:
            skipped = stage + depth
            phase = phase ^ (skipped // T.stages & 1)
            stage = skipped % T.stages
        count += 1
    tma.store_wait(0)


@gluon.jit
def _described(x, lines, long, step, LINES: gl.constexpr, LONG: gl.constexpr):
    """A matrix for the copy engine, by blocks."""
    return tma.make_tensor_descriptor(
        x, [lines, long], [step, 1], [LINES, LONG], _shared(LINES, LONG)
    )


@gluon.jit
def _product(x, w, w2, y, rest, others, size, T: gl.constexpr, FINISH: gl.constexpr):
    M, N, K = size.rows, size.columns, size.steps
    tall: gl.constexpr = T.steps if T.x_turned else T.rows
    long: gl.constexpr = T.rows if T.x_turned else T.steps
    if T.x_turned:
        left = _described(x, K, M, size.x_line, tall, long)
    else:
        left = _described(x, M, K, size.x_line, tall, long)
    high: gl.constexpr = T.columns if T.w_turned else T.steps
    flat: gl.constexpr = T.steps if T.w_turned else T.columns
    if T.w_turned:
        right = _described(w, N, K, size.w_line, high, flat)
        right2 = _described(w2, N, K, size.w_line, high, flat) if T.gate else right
    else:
        right = _described(w, K, N, size.w_line, high, flat)
        right2 = _described(w2, K, N, size.w_line, high, flat) if T.gate else right
    out = _described(y, M, N, size.y_line, T.rows, T.columns)
    given = (
        _described(rest, M, N, size.y_line, T.rows, T.columns) if T.residual is not None else out
    )
    kind: gl.constexpr = y.dtype.element_ty
    a = gl.allocate_shared_memory(kind, [T.stages, tall, long], _shared(tall, long))
    b = gl.allocate_shared_memory(kind, [T.stages, high, flat], _shared(high, flat))
    if T.gate:
        b2 = gl.allocate_shared_memory(kind, [T.stages, high, flat], _shared(high, flat))
    else:
        b2 = b
    c = gl.allocate_shared_memory(kind, [GROUPS, T.rows, T.columns], _shared(T.rows, T.columns))
    B: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [T.stages, 1], B)
    free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], B)
    came = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], B)
    gone = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], B)
    turn = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], B)
    for i in gl.static_range(T.stages):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    for i in gl.static_range(GROUPS):
        mbarrier.init(came.index(i), count=1)
        mbarrier.init(gone.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    fence_async_shared()
    mbarrier.arrive(turn.index(0))
    bars = (full, free, came, gone, turn)
    gl.warp_specialize(
        [
            (_multiply, (out, a, b, b2, c, bars, others, size, 0, T, FINISH)),
            (_multiply, (out, a, b, b2, c, bars, others, size, 1, T, FINISH)),
            (_bring, (left, right, right2, given, a, b, b2, c, bars, size, T)),
        ],
        [4, 1],
        [232, 24],
    )


_run = Launchable(_product)

# How another operand of what follows lies against the result, and what reads it for a tile.
_ROW = "gl.expand_dims(m + gl.arange(0, T.rows, gl.SliceLayout(1, L)), 1)"
_COLUMN = "gl.expand_dims(n + gl.arange(0, T.columns, gl.SliceLayout(0, L)), 0)"
READS = {
    "columns": f"gl.load({{p}} + {_COLUMN}, mask={_COLUMN} < size.columns, other=0.0)",
    "rows": f"gl.load({{p}} + {_ROW}, mask={_ROW} < size.rows, other=0.0)",
    "all": f"gl.load({{p}} + {_ROW}.to(gl.int64) * size.columns + {_COLUMN}, "
    f"mask=({_ROW} < size.rows) & ({_COLUMN} < size.columns), other=0.0)",
    "tile": "mine.load(L)",
    "one": "gl.load({p})",
}
HEAD = "from triton.experimental import gluon\nfrom triton.experimental.gluon import language as gl"


@lru_cache(maxsize=512)
def finish(formula: Traced, operands: tuple[str, ...], gate: bool, exact: bool) -> Any:
    """What is made of the sums of a tile: ``formula`` of the sums, of both if there is a ``gate``,
    and of the other operands, each of a kind of :data:`READS`."""
    names = [f"o{i}" for i in range(len(operands))]
    lines = [
        f"    {name} = {READS[kind].format(p=f'others[{i}]')}.to(gl.float32)\n"
        for i, (name, kind) in enumerate(zip(names, operands, strict=True))
    ]
    head = "@gluon.jit\ndef finish(sums, more, mine, others, m, n, size, T: gl.constexpr, "
    given = ", ".join(("sums", *(("more",) if gate else ()), *names))
    body = f"{head}L: gl.constexpr):\n{''.join(lines)}    return formula({given})\n"
    text = formula_source(formula, exact, divides=False).replace("@triton.jit", "@gluon.jit")
    return functions(f"{HEAD}\n{text}\n\n{body}")["finish"]


def product(
    size: Sizes, tile: Tile, formula: Traced, operands: Sequence[str], programs: int, exact: bool
) -> Callable[..., None]:
    """A function of x, w, w₂ or w again, y and the other operands."""
    kinds, whole = list(operands), tile.residual
    if whole is not None:
        kinds[whole] = "tile"
    last = finish(formula, tuple(kinds), tile.gate, exact)
    tiles = -(-size.rows // tile.rows) * -(-size.columns // tile.columns)
    grid = (min(programs, tiles),)

    def run(x: torch.Tensor, w: Any, w2: Any, y: Any, others: Sequence[Any]) -> None:
        rest = y if whole is None else others[whole]
        given = (x, w, w2, y, rest, tuple(others), size)
        _run(grid, *given, warps=4, stages=1, T=tile, FINISH=last)

    return run
