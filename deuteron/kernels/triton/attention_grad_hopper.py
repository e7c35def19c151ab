"""The gradients of attention on Hopper: ``attention_grad.py`` with specialised warps.

One kernel holds a tile of keys and values while queries and gradients pass; the other holds a tile
of queries and gradients while keys and values pass. One warp loads what is held and what passes by
the copy engine (TMA), the latter into a ring of stages; each of two groups of four warps has 64 of
the held rows. With h and p the two matrices that are held and the two that pass, a step is

    scores  s = h₀·p₀ᵀ     and     h₁·p₁ᵀ, from which come the weights w and the slopes d of scores
    of keys:    dv += w·p₁,  dk += d·p₀           of queries:    dq += d·p₀,  dbias = d

with weights and slopes in registers from one product to the next: 4 + 3 products where a single
kernel has 5, but no number is summed by more than one program, so runs give the same bits, and no
sums of dq pass through memory. Features, lengths, tables of blocks and functions of scores are
those of ``attention_grad.py``. Programs are persistent: each takes tile after tile.

Barriers, each with a phase that flips when it is passed: ``full`` and ``free`` for what is held,
for every stage of what passes (``full`` for each of its matrices), and for the bias.
"""

from collections import namedtuple
from collections.abc import Callable
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

from deuteron.kernels.triton.attention import LOG2_E, Block, Description, keyed
from deuteron.kernels.triton.attention_grad import Given, room_for, sloping, sums_of, weights
from deuteron.kernels.triton.attention_hopper_parts import (
    GROUPS,
    ROWS,
    announced,
    begin_of,
    bring,
    clear,
    described,
    for_parts,
    matrix,
    part_told,
    passing,
    scores_of,
)
from deuteron.kernels.triton.attention_parts import far, is_uneven, programs
from deuteron.kernels.triton.hopper import barriers, in_registers, in_shared, next_stage
from deuteron.kernels.triton.launch import Launchable

# stages: of what passes; bias: stages of a bias, 0 if there is none; ragged: blocks may reach
# beyond the last key; folded: the scale is applied within the exponential (nothing else changes the
# scores); early: a step's first products are started before the last ones of the step before; kept:
# what is held is in registers, which saves half of the reads of shared memory.
Tile = namedtuple("Tile", "stages bias ragged folded early kept")


@gluon.jit
def _ahead(sums, index, at, end, size, lanes, SIDE: gl.constexpr):
    """Load the two numbers of each query of a block: all the first ones, then all the second."""
    rows = at + lanes % SIDE
    place = far(index) * size.queries + rows
    first = lanes < SIDE
    other = gl.where(first, float("inf"), 0.0)
    where = gl.where(first, sums[0] + place, sums[1] + place)
    return gl.load(where, mask=rows < end, other=other)


@gluon.jit
def _of_step(n, first, walk, B: gl.constexpr, OF: gl.constexpr):
    """Return the head of queries of a step, and where the block that passes begins."""
    asking = first
    block = n
    if OF and not B.side:
        asking = first + n // walk[1]
        block = n % walk[1]
    return asking, begin_of(walk, block, B, OF)


@gluon.jit
def _ask(
    n, stage, phase, ahead, tile, held, sums, room, bars, size, ME: gl.constexpr,
    B: gl.constexpr, OF: gl.constexpr,
):  # fmt: skip
    """Start the first two products of a step, without a wait, and load the numbers of the queries
    of the next step."""
    batch, first, own, walk, total, lanes = tile
    _still_0, _still_1, moving_0, moving_1, two, _added, _marks, _left = room
    SIDE: gl.constexpr = B.queries if OF else B.keys
    none = gl.zeros((ROWS, SIDE), gl.float32, in_registers(SIDE))
    end = own.high_k
    if OF:
        end = own.high_q
        two.index(2 * ME + (n & 1)).store(ahead)
    if B.spans != "none":
        _asking, at = _of_step(n, first, walk, B, OF)
        mbarrier.wait(bars[2].index(stage), phase)
        mbarrier.wait(bars[3].index(stage), phase)
        if at + SIDE > end:
            clear(moving_0.index(stage), at, end, SIDE, B.features)
            clear(moving_1.index(stage), at, end, SIDE, B.wide)
            fence_async_shared()
    mbarrier.wait(bars[2].index(stage), phase)
    turned = moving_0.index(stage).permute((1, 0))
    s = warpgroup_mma(held[0], turned, none, use_acc=False, is_async=True)
    mbarrier.wait(bars[3].index(stage), phase)
    turned = moving_1.index(stage).permute((1, 0))
    dp = warpgroup_mma(held[1], turned, none, use_acc=False, is_async=True)
    if OF:
        later, at = _of_step(gl.minimum(n + 1, total - 1), first, walk, B, OF)
        ahead = _ahead(sums, batch * size.heads + later, at, own.high_q, size, lanes, SIDE)
    return s, dp, ahead


@gluon.jit
def _weigh(
    s, n, steps, tile, mine, beside, room, bars, call, ME: gl.constexpr, B: gl.constexpr,
    T: gl.constexpr, OF: gl.constexpr,
):  # fmt: skip
    """Return the weights of a step from its first product, and what :func:`_slope` needs
    besides."""
    also, size, step, sight, numbers, _blocks, _tiles, _section, _counter = call
    batch, first, own, walk, _total, _lanes = tile
    its, base, _d = mine
    slopes, key = beside
    SIDE: gl.constexpr = B.queries if OF else B.keys
    L: gl.constexpr = in_registers(SIDE)
    asking, at = _of_step(n, first, walk, B, OF)
    down = gl.expand_dims(its + gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    across = gl.expand_dims(at + gl.arange(0, SIDE, gl.SliceLayout(0, L)), 0)
    r, c, top, left = down, across, its, at
    if OF:
        r, c, top, left = across, down, at, its
    slope = 0.0
    if B.slopes:
        slope = gl.load(slopes + asking)
    s, bend = scores_of(
        s, room[5], bars[5], bars[6], slope, also, own, asking, r, c, top, left, steps,
        n < walk[3], size, step, sight, numbers, ME, B, T, OF,
    )  # fmt: skip
    by = 1.0
    if T.folded:
        by = numbers.scale * LOG2_E
    if OF:
        own_two = room[4].index(2 * ME + (n & 1)).slice(0, SIDE)
        base = gl.expand_dims(own_two.load(gl.SliceLayout(0, L)), 0)
    p, used, stays = weights(
        s, by, base, key, own, batch * size.heads + asking, r, c, size, numbers, B
    )
    return p, used, stays, bend


@gluon.jit
def _slope(
    weighed, dp, n, mine, room, numbers, ME: gl.constexpr, B: gl.constexpr, OF: gl.constexpr
):
    """Return the gradients of a step's scores after and before the soft cap, from its weights and
    its second product."""
    SIDE: gl.constexpr = B.queries if OF else B.keys
    d = mine[2]
    if OF:
        own_two = room[4].index(2 * ME + (n & 1)).slice(SIDE, SIDE)
        d = gl.expand_dims(own_two.load(gl.SliceLayout(0, in_registers(SIDE))), 0)
    return sloping(weighed[0], weighed[2], dp, d, weighed[3], numbers, B)


@gluon.jit
def _added_up(sum_0, sum_1, OF: gl.constexpr):
    """Wait until all products are in the sums, and return these; for queries there is only one."""
    if OF:
        sum_0, sum_1 = warpgroup_mma_wait(0, deps=(sum_0, sum_1))
    else:
        sum_0 = warpgroup_mma_wait(0, deps=(sum_0,))
    return sum_0, sum_1


@gluon.jit
def _multiply(
    made, dbias, sums, beside, room, bars, call, ME: gl.constexpr, B: gl.constexpr,
    T: gl.constexpr, OF: gl.constexpr,
):  # fmt: skip
    """Run by each group of four warps: 64 rows of every tile."""
    also, size, step, sight, numbers, _blocks, _tiles, _section, _counter = call
    slopes, seed = beside
    still_0, still_1, moving_0, moving_1, _two, _added, marks, leaves = room
    h_full, h_free, _full_0, _full_1, free, _b_full, _b_free, parts = bars
    SIDE: gl.constexpr = B.queries if OF else B.keys
    D_0: gl.constexpr = in_registers(B.features)
    D_1: gl.constexpr = in_registers(B.wide if OF else 16)
    kind: gl.constexpr = still_0.dtype
    for_0: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D_0, k_width=2)
    for_1: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=D_1, k_width=2)
    asking: gl.constexpr = gl.DotOperandLayout(
        operand_index=0, parent=in_registers(SIDE), k_width=2
    )
    each: gl.constexpr = gl.BlockedLayout([2 * SIDE // 128], [32], [4], [0])
    lanes = gl.arange(0, 2 * SIDE, each)
    given = slopes, keyed(seed, B)
    stage = 0
    phase = 0
    several = 0
    steps = 0
    # heads of queries that pass one after the other: in a table each has a row of its own
    lines = size.shared if OF and B.side else 1
    alike = size.shared if OF and not B.side else 1
    part = announced(0, parts, B)
    while part[2] >= 0:
        batch, head, own, index = part_told(part, size, sight, B)
        its = own.first + ME * ROWS
        if OF:
            mine = its, 0.0, 0.0
        else:
            rows = its + gl.arange(0, ROWS, gl.SliceLayout(1, in_registers(SIDE)))
            place = far(index) * size.queries + rows
            base = gl.load(sums[0] + place, mask=rows < own.high_q, other=float("inf"))
            d = gl.load(sums[1] + place, mask=rows < own.high_q, other=0.0)
            mine = its, gl.expand_dims(base, 1), gl.expand_dims(d, 1)
        sum_0 = gl.zeros((ROWS, B.features), gl.float32, D_0)
        sum_1 = gl.zeros((ROWS, B.wide if OF else 16), gl.float32, D_1)
        mbarrier.wait(h_full.index(0), several & 1)
        several += 1
        held = still_0.index(ME), still_1.index(ME)
        if T.kept:
            held = held[0].load(asking), held[1].load(asking)
            mbarrier.arrive(h_free.index(0))
        for share in range(lines):
            first = head * size.shared + share if OF else head
            walk = passing(also, own, batch, first, size, step, sight, B, OF)
            total = walk[1] * alike
            its_own = batch, first, own, walk, total, lanes
            if OF:
                start = begin_of(walk, 0, B, OF)
                ahead = _ahead(
                    sums, batch * size.heads + first, start, own.high_q, size, lanes, SIDE
                )
            else:
                ahead = 0.0
            if T.early:
                if total > 0:
                    s, dp, ahead = _ask(
                        0, stage, phase, ahead, its_own, held, sums, room, bars, size, ME, B, OF
                    )
                    s = warpgroup_mma_wait(1, deps=(s,))
                    found = _weigh(
                        s, 0, steps, its_own, mine, given, room, bars, call, ME, B, T, OF
                    )
                    dp = warpgroup_mma_wait(0, deps=(dp,))
                    after, ds = _slope(found, dp, 0, mine, room, numbers, ME, B, OF)
                    steps += 1
                    if OF:
                        weigh = gl.convert_layout(found[1].to(kind), for_1)
                    bent = gl.convert_layout(ds.to(kind), for_0)
                    _leave(dbias, after, 0, its_own, its, leaves, ME, B, OF)
                    for n in range(1, total):
                        following, later = next_stage(stage, phase, T.stages)
                        s, dp, ahead = _ask(
                            n,
                            following,
                            later,
                            ahead,
                            its_own,
                            held,
                            sums,
                            room,
                            bars,
                            size,
                            ME,
                            B,
                            OF,
                        )
                        if OF:
                            sum_1 = warpgroup_mma(
                                weigh, moving_1.index(stage), sum_1, is_async=True
                            )
                        sum_0 = warpgroup_mma(bent, moving_0.index(stage), sum_0, is_async=True)
                        s = warpgroup_mma_wait(3 if OF else 2, deps=(s,))
                        found = _weigh(
                            s, n, steps, its_own, mine, given, room, bars, call, ME, B, T, OF
                        )
                        dp = warpgroup_mma_wait(2 if OF else 1, deps=(dp,))
                        after, ds = _slope(found, dp, n, mine, room, numbers, ME, B, OF)
                        steps += 1
                        # or the assembler would compute slopes after the wait
                        marks.index(ME).store(gl.sum(ds, 1))
                        sum_0, sum_1 = _added_up(sum_0, sum_1, OF)
                        if OF:
                            weigh = gl.convert_layout(found[1].to(kind), for_1)
                        mbarrier.arrive(free.index(stage))
                        bent = gl.convert_layout(ds.to(kind), for_0)
                        _leave(dbias, after, n, its_own, its, leaves, ME, B, OF)
                        stage = following
                        phase = later
                    if OF:
                        sum_1 = warpgroup_mma(weigh, moving_1.index(stage), sum_1, is_async=True)
                    sum_0 = warpgroup_mma(bent, moving_0.index(stage), sum_0, is_async=True)
                    sum_0, sum_1 = _added_up(sum_0, sum_1, OF)
                    mbarrier.arrive(free.index(stage))
                    stage, phase = next_stage(stage, phase, T.stages)
            else:
                for n in range(total):
                    s, dp, ahead = _ask(
                        n, stage, phase, ahead, its_own, held, sums, room, bars, size, ME, B, OF
                    )
                    s = warpgroup_mma_wait(1, deps=(s,))
                    found = _weigh(
                        s, n, steps, its_own, mine, given, room, bars, call, ME, B, T, OF
                    )
                    steps += 1
                    if OF:
                        weigh = gl.convert_layout(found[1].to(kind), for_1)
                        sum_1 = warpgroup_mma(weigh, moving_1.index(stage), sum_1, is_async=True)
                        dp = warpgroup_mma_wait(1, deps=(dp,))
                    else:
                        dp = warpgroup_mma_wait(0, deps=(dp,))
                    after, ds = _slope(found, dp, n, mine, room, numbers, ME, B, OF)
                    bent = gl.convert_layout(ds.to(kind), for_0)
                    sum_0 = warpgroup_mma(bent, moving_0.index(stage), sum_0, is_async=True)
                    sum_0, sum_1 = _added_up(sum_0, sum_1, OF)
                    mbarrier.arrive(free.index(stage))
                    _leave(dbias, after, n, its_own, its, leaves, ME, B, OF)
                    stage, phase = next_stage(stage, phase, T.stages)
        if not T.kept:
            mbarrier.arrive(h_free.index(0))
        length = size.keys if OF else size.queries
        high = own.high_k if OF else own.high_q
        _write(made[0], sum_0 * numbers.scale, index, its, length, high, size.features, B)
        if OF:
            _write(made[1], sum_1, index, its, length, high, size.wide, B)
        part = announced(several, parts, B)
    if dbias is not None:
        tma.store_wait(0)


@gluon.jit
def _leave(
    dbias, slopes, n, tile, its, leaves, ME: gl.constexpr, B: gl.constexpr, OF: gl.constexpr
):
    """Store the gradients of a step's scores: they are that of a bias with a number for each
    score."""
    if dbias is not None:
        batch, first, _own, walk, _total, _lanes = tile
        asking, at = _of_step(n, first, walk, B, OF)
        tma.store_wait(0)
        leaves.index(ME).store(slopes.to(dbias.dtype))
        fence_async_shared()
        block = matrix(leaves.index(ME), ROWS, B.keys)
        tma.async_copy_shared_to_global(dbias, [batch, asking, its, at], block)


@gluon.jit
def _write(made, found, index, first, length, high, width, B: gl.constexpr):
    """Store 64 rows of a result in row-major order, with zeros beyond the end of a padded
    sequence."""
    L: gl.constexpr = found.type.layout
    rows = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    columns = gl.expand_dims(gl.arange(0, found.shape[1], gl.SliceLayout(0, L)), 0)
    inside = (rows < length) & (columns < width)
    if B.spans == "packed":
        inside = (rows < high) & (columns < width)
    elif B.spans == "lengths":
        found = gl.where(rows < high, found, 0.0)
    place = (far(index) * length + rows) * width + columns
    gl.store(made + place, found.to(made.dtype.element_ty), mask=inside)


@gluon.jit
def _slide(
    t, sums, dq, dk, dv, dbias, size, step, sight, numbers, batches, blocks, section, counter,
    B: gl.constexpr, T: gl.constexpr, OF: gl.constexpr,
):  # fmt: skip
    shared = size.heads // size.shared
    SIDE: gl.constexpr = B.queries if OF else B.keys
    LINES_Q: gl.constexpr = B.queries if OF else ROWS
    LINES_K: gl.constexpr = ROWS if OF else B.keys
    q = described(
        t.q, batches, size.heads, size.queries, size.features, step.q, LINES_Q, B.features
    )
    grad = described(
        t.grad, batches, size.heads, size.queries, size.wide, step.grad, LINES_Q, B.wide
    )
    k = described(t.k, batches, shared, size.keys, size.features, step.k, LINES_K, B.features)
    v = described(t.v, batches, shared, size.keys, size.wide, step.v, LINES_K, B.wide)
    if T.bias:  # where batches or heads share it, only the first is read: any stride will do
        beside = (gl.maximum(step.bias[0], 8), gl.maximum(step.bias[1], 8), step.bias[2])
        rest = described(
            t.bias, batches, size.heads, size.queries, size.keys, beside, LINES_Q, LINES_K
        )
    else:
        rest = q
    kind: gl.constexpr = t.q.dtype.element_ty
    deep: gl.constexpr = in_shared(B.features, 2)
    wide: gl.constexpr = in_shared(B.wide, 2)
    line: gl.constexpr = LINES_K if T.bias else 16
    left: gl.constexpr = 16 if dbias is None else B.keys
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = (
        gl.allocate_shared_memory(kind, [GROUPS, ROWS, B.features], deep),
        gl.allocate_shared_memory(kind, [GROUPS, ROWS, B.wide], wide),
        gl.allocate_shared_memory(kind, [T.stages, SIDE, B.features], deep),
        gl.allocate_shared_memory(kind, [T.stages, SIDE, B.wide], wide),
        gl.allocate_shared_memory(gl.float32, [2 * GROUPS, 2 * SIDE], flat),
        gl.allocate_shared_memory(
            kind, [max(1, GROUPS * T.bias), LINES_Q, line], in_shared(line, 2)
        ),
        gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], flat),
        gl.allocate_shared_memory(kind, [GROUPS, ROWS, left], in_shared(left, 2)),
    )
    h_full, h_free = barriers(1, (1, GROUPS))
    full_0, full_1, free = barriers(T.stages, (1, 1, GROUPS))
    b_full, b_free = barriers(T.bias, (1, GROUPS))
    parts = for_parts()
    fence_async_shared()
    bars = (h_full, h_free, full_0, full_1, free, b_full, b_free, parts)
    heads = size.heads
    if OF:
        heads = shared
    call = (t.also, size, step, sight, numbers, blocks, batches * heads * blocks, section, counter)
    others = (t.slopes, t.seed)
    if OF:
        tensors = (k, v, q, grad, rest)
        made = (dk, dv)
    else:
        tensors = (q, grad, k, v, rest)
        made = (dq, dq)
    if dbias is not None:
        lines = (size.heads * size.queries * size.keys, size.queries * size.keys, size.keys)
        dbias = described(dbias, batches, size.heads, size.queries, size.keys, lines, ROWS, B.keys)
    gl.warp_specialize(
        [
            (_multiply, (made, dbias, sums, others, room, bars, call, 0, B, T, OF)),
            (_multiply, (made, dbias, sums, others, room, bars, call, 1, B, T, OF)),
            (bring, (tensors, room, bars, call, B, T, OF)),
        ],
        [4, 1],
        [240, 24],
    )


_run = Launchable(_slide)


def attention_grad(
    asked: Description,
    blocks: tuple[Block, Block],
    tiles: tuple[Tile, Tile],
    batch: int,
    sections: tuple[int, int],
    units: int,
    for_bias: Callable[..., None] | None = None,
) -> Callable[..., None]:
    """Return a function (t, more, dq, dk, dv, dbias); more: the gradient of the log-sums, or None;
    gradients that are not wanted are None. dbias has a number for each score, unless ``for_bias``
    makes it. Of ``blocks``, ``tiles`` and ``sections`` the first is for the gradients of keys, the
    second for queries. Section: heads walked together, so that what passes stays in the cache."""
    sums, size = sums_of(asked, blocks[0], batch), asked.size
    down = (
        programs(size.keys, blocks[0].keys, size, blocks[0]),
        programs(size.queries, blocks[1].queries, size, blocks[1]),
    )
    heads = batch * size.heads // size.shared, batch * size.heads
    partial = blocks[1].left or blocks[1].right or blocks[1].spans != "none"
    uneven = is_uneven(blocks[0])

    def run(t: Given, more: Any, dq: Any, dk: Any, dv: Any, dbias: Any = None) -> None:
        counters = torch.empty(2, dtype=torch.int32, device=t.q.device) if uneven else None
        found = sums(t, more, counters)

        def launch(of: int, *made: Any) -> None:
            grid = (min(units, down[of] * heads[of]),)
            counter = None if counters is None else counters[of:]
            given = (t, found, *made, *asked, batch, down[of], sections[of], counter)
            _run(grid, *given, warps=4, stages=1, B=blocks[of], T=tiles[of], OF=of == 0)

        if dk is not None or dv is not None:
            launch(0, None, room_for(t.k, dk), room_for(t.v, dv), None)
        direct = dbias if for_bias is None else None
        if dq is not None or direct is not None:
            if direct is not None and partial:
                direct.zero_()  # scores that no query sees are not computed
            launch(1, room_for(t.q, dq), None, None, direct)
        if dbias is not None and for_bias is not None:
            for_bias(t, found, dbias)

    return run
