"""Attention on Hopper: the kernel of ``attention.py`` with specialised warps.

One warp loads queries, keys and values by the copy engine (TMA), keys and values into a ring of
stages, a bias into a ring of its own. Each of two groups of four warps has 64 queries of a tile. It
starts the product for the scores of the next block of keys before it multiplies this block's
weights with the values, so that the matrix units compute scores while exponentials are taken.
Programs are persistent: each takes tile after tile, and loads of the next tile start while one
still ends.

Barriers, each with a phase that flips when it is passed: ``full`` and ``free`` for the queries and
for every stage of the keys, of the values and of the bias.
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

from deuteron.kernels.triton.attention import LN_2, LOG2_E, Block, Description, kept, keyed, nothing
from deuteron.kernels.triton.attention_hopper_parts import (
    GROUPS,
    ROWS,
    announced,
    begin_of,
    clear,
    described,
    for_parts,
    is_there,
    matrix,
    next_tile,
    part_of,
    part_told,
    passing,
    scores_of,
    tell,
    tell_end,
)
from deuteron.kernels.triton.attention_parts import Also, far, is_uneven, programs
from deuteron.kernels.triton.hopper import barriers, in_registers, in_shared, next_stage
from deuteron.kernels.triton.launch import Launchable

# stages: of keys and values; bias: stages of a bias, 0 if there is none; ragged: blocks may reach
# beyond the last key; folded: the scale is applied within the exponential (nothing else changes the
# scores); kept: queries stay in registers, which saves a third of the reads of shared memory.
Tile = namedtuple("Tile", "stages bias ragged folded kept")


@gluon.jit
def _blocks_of(own, batch, head, call, B: gl.constexpr):
    """Return the blocks of keys that a tile walks over: at least one, which may be masked
    wholly."""
    also, size, step, sight, _numbers, _down, _tiles, _section, _counter = call
    begin, count, line, some = passing(also, own, batch, head, size, step, sight, B, False)
    return begin, gl.maximum(count, 1), line, gl.where(count == 0, 1, some)


@gluon.jit
def _begin_of(walk, n, B: gl.constexpr):
    """Return where the n-th of them begins, from the last to the first, or in a table's order."""
    turn = n
    if not B.side:
        turn = walk[1] - 1 - n
    return begin_of(walk, turn, B, False)


@gluon.jit
def _bring(q, k, v, bias, room, bars, call, B: gl.constexpr, T: gl.constexpr):
    """Run by one warp: load queries, keys and values in the order in which they are multiplied."""
    also, size, step, sight, _numbers, down, tiles, section, counter = call
    asked, keys, values, _made, added = room
    q_full, q_free, k_full, k_free, v_full, v_free, b_full, b_free, parts = bars
    stage = 0
    phase = 1
    count = 0
    blocks = 0
    turn = 0
    tile = next_tile(0, None, tiles)
    while tile < tiles:
        part = part_of(tile, down, section, also, size, step, sight, B, False)
        batch, head, own, _index = part
        if is_there(own, B, False):
            tell(part, count, parts)
            walk = _blocks_of(own, batch, head, call, B)
            of = head // size.shared
            mbarrier.wait(q_free.index(0), count & 1 ^ 1)
            mbarrier.expect(q_full.index(0), 2 * B.queries * B.features)
            for i in gl.static_range(GROUPS):
                tma.async_copy_global_to_shared(
                    q,
                    [batch, head, own.first + i * ROWS, 0],
                    q_full.index(0),
                    matrix(asked.index(i), ROWS, B.features),
                )
            for i in range(walk[1]):
                at = _begin_of(walk, i, B)
                mbarrier.wait(k_free.index(stage), phase)
                mbarrier.expect(k_full.index(stage), 2 * B.keys * B.features)
                lines = matrix(keys.index(stage), B.keys, B.features)
                tma.async_copy_global_to_shared(k, [batch, of, at, 0], k_full.index(stage), lines)
                if T.bias:
                    room_for = blocks % T.bias
                    bar = b_full.index(room_for)
                    mbarrier.wait(b_free.index(room_for), blocks // T.bias & 1 ^ 1)
                    mbarrier.expect(bar, 2 * B.queries * B.keys)
                    of_batch = gl.where(step.bias[0] > 0, batch, 0)
                    of_head = gl.where(step.bias[1] > 0, head, 0)
                    for j in gl.static_range(GROUPS):
                        tma.async_copy_global_to_shared(
                            bias,
                            [of_batch, of_head, own.first + j * ROWS, at],
                            bar,
                            matrix(added.index(j * T.bias + room_for), ROWS, B.keys),
                        )
                    blocks += 1
                mbarrier.wait(v_free.index(stage), phase)
                mbarrier.expect(v_full.index(stage), 2 * B.keys * B.wide)
                rows = matrix(values.index(stage), B.keys, B.wide)
                tma.async_copy_global_to_shared(v, [batch, of, at, 0], v_full.index(stage), rows)
                stage, phase = next_stage(stage, phase, T.stages)
            count += 1
        turn += 1
        tile = next_tile(turn, counter, tiles)
    tell_end(count, parts)


@gluon.jit
def _weighed(
    s, high, beside, tile, n, blocks, bars, call, ME: gl.constexpr, B: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    """Return, from the products q·kᵀ of the n-th block of a tile, its exponentials, their sums, the
    factor for the sums so far, and the largest scores now. ``blocks``: blocks before, of all tiles.
    """
    added, slope, key, also = beside
    _also, size, step, sight, numbers, _down, _tiles, _section, _counter = call
    head, index, own, walk = tile
    first, at = own.first + ME * ROWS, _begin_of(walk, n, B)
    L: gl.constexpr = s.type.layout
    r = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(at + gl.arange(0, B.keys, gl.SliceLayout(0, L)), 0)
    s, _bend = scores_of(
        s, added, bars[6], bars[7], slope, also, own, head, r, c, first, at, blocks, n < walk[3],
        size, step, sight, numbers, ME, B, T, False,
    )  # fmt: skip
    now = gl.maximum(high, gl.max(s, 1))
    by = 1.0
    if T.folded:
        by = numbers.scale * LOG2_E
    base = now * by
    hides: gl.constexpr = B.left or B.right or T.ragged or B.spans != "none" or B.side > 0
    if not T.folded or hides or B.mask is not None:
        base = gl.where(now == float("-inf"), 0.0, base)  # of a query that has seen no key yet
    p = gl.exp2(s * by - gl.expand_dims(base, 1))
    less = gl.exp2(high * by - base)
    total = gl.sum(p, 1)
    if B.dropout:
        p = gl.where(kept(key, index, r, c, size, numbers), p, nothing(numbers))
    return p, total, less, now


@gluon.jit
def _arrived(values, v_full, stage, phase, tile, n, B: gl.constexpr):
    """Wait for the values of the n-th block of a tile, and set those beyond the end to 0."""
    mbarrier.wait(v_full.index(stage), phase)
    if B.spans != "none":
        _head, _index, own, walk = tile
        at = _begin_of(walk, n, B)
        if at + B.keys > own.high_k:
            clear(values.index(stage), at, own.high_k, B.keys, B.wide)
            fence_async_shared()


@gluon.jit
def _turn(lines, also, first, size, sight, B: gl.constexpr):
    """Run by four warps: rotate their queries in shared memory, as ``attention.py`` does it. A
    thread has both numbers of every pair, 8 adjacent bytes of each."""
    PAIRS: gl.constexpr = B.features // 2
    SEVERAL: gl.constexpr = 8 if B.neighbours else 4
    across: gl.constexpr = (B.features if B.neighbours else PAIRS) // SEVERAL
    how: gl.constexpr = gl.BlockedLayout([1, SEVERAL], [32 // across, across], [4, 1], [1, 0])
    found = lines.load(how)
    if B.neighbours:
        pairs = gl.reshape(found, (ROWS, PAIRS, 2))
    else:
        pairs = gl.permute(gl.reshape(found, (ROWS, 2, PAIRS)), (0, 2, 1))
    a, b = gl.split(pairs.to(gl.float32))
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, a.type.layout))
    columns = gl.arange(0, PAIRS, gl.SliceLayout(0, a.type.layout))
    place = gl.expand_dims((sight.q_row + rows).to(gl.int64) * PAIRS, 1)
    place = place + gl.expand_dims(columns, 0)
    there = gl.expand_dims(rows < size.queries, 1)
    c = gl.load(also.q_cos + place, mask=there, other=0.0).to(gl.float32)
    s = gl.load(also.q_sin + place, mask=there, other=0.0).to(gl.float32)
    pairs = gl.join(a * c - b * s, b * c + a * s).to(lines.dtype)
    if not B.neighbours:
        pairs = gl.permute(pairs, (0, 2, 1))
    lines.store(gl.convert_layout(gl.reshape(pairs, (ROWS, B.features)), how))
    fence_async_shared()


@gluon.jit
def _multiply(out, beside, room, bars, call, ME: gl.constexpr, B: gl.constexpr, T: gl.constexpr):
    """Run by each group of four warps: 64 queries of every tile."""
    also, size, step, sight, numbers, _down, _tiles, _section, _counter = call
    slopes, seed, there, lse = beside
    asked, keys, values, made, added = room
    q_full, q_free, k_full, k_free, v_full, v_free, _b_full, _b_free, parts = bars
    S: gl.constexpr = in_registers(B.keys)
    O: gl.constexpr = in_registers(B.wide)
    kind: gl.constexpr = asked.dtype
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    lines: gl.constexpr = gl.SliceLayout(1, S)
    key = keyed(seed, B)
    stage = 0
    phase = 0
    count = 0
    blocks = 0
    none = gl.zeros((ROWS, B.keys), gl.float32, S)
    asking: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=S, k_width=2)
    part = announced(0, parts, B)
    while part[2] >= 0:
        batch, head, own, index = part_told(part, size, sight, B)
        walk = _blocks_of(own, batch, head, call, B)
        first = own.first + ME * ROWS
        slope = 0.0
        if B.slopes:
            slope = gl.load(slopes + head)
        besides = added, slope, key, also
        tile = head, index, own, walk
        query = asked.index(ME)
        mbarrier.wait(q_full.index(0), count & 1)
        if B.turn != "":
            _turn(query, also, first, size, sight, B)
        if T.kept:
            query = query.load(asking)
            mbarrier.arrive(q_free.index(0))
        mbarrier.wait(k_full.index(stage), phase)
        s = warpgroup_mma(
            query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(stage))
        high = gl.full((ROWS,), float("-inf"), gl.float32, lines)
        p, total, _less, high = _weighed(s, high, besides, tile, 0, blocks, bars, call, ME, B, T)
        blocks += 1
        weigh = gl.convert_layout(p.to(kind), weights)
        found = gl.zeros((ROWS, B.wide), gl.float32, O)
        for n in range(1, walk[1]):
            following, later = next_stage(stage, phase, T.stages)
            mbarrier.wait(k_full.index(following), later)
            turned = keys.index(following).permute((1, 0))
            s = warpgroup_mma(query, turned, none, use_acc=False, is_async=True)
            _arrived(values, v_full, stage, phase, tile, n - 1, B)
            found = warpgroup_mma(weigh, values.index(stage), found, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            mbarrier.arrive(k_free.index(following))
            p, more, less, high = _weighed(s, high, besides, tile, n, blocks, bars, call, ME, B, T)
            blocks += 1
            total = total * less + more
            found = warpgroup_mma_wait(0, deps=(found,))
            mbarrier.arrive(v_free.index(stage))
            found = found * gl.expand_dims(gl.convert_layout(less, gl.SliceLayout(1, O)), 1)
            weigh = gl.convert_layout(p.to(kind), weights)
            stage = following
            phase = later
        if not T.kept:
            mbarrier.arrive(q_free.index(0))
        _arrived(values, v_full, stage, phase, tile, walk[1] - 1, B)
        found = warpgroup_mma(weigh, values.index(stage), found, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        mbarrier.arrive(v_free.index(stage))
        stage, phase = next_stage(stage, phase, T.stages)
        rows = first + gl.arange(0, ROWS, lines)
        end = size.queries
        if B.spans == "lengths":  # padding may hold anything
            total = gl.where(rows < own.high_q, total, 0.0)
        if B.spans == "packed":  # what lies behind belongs to the next sequence
            end = own.high_q
        by = numbers.factor / gl.where(total == 0.0, 1.0, total)
        found = found * gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(1, O)), 1)
        if B.spans == "none":
            _give(out, found, made.index(ME), batch, head, first, B)
        else:
            its = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, O)), 1)
            found = gl.where(its < own.high_q, found, 0.0)
            if first + ROWS <= end:
                _give(out, found, made.index(ME), batch, head, first, B)
            else:
                across = gl.expand_dims(gl.arange(0, B.wide, gl.SliceLayout(0, O)), 0)
                place = far(batch) * step.out[0] + far(head) * step.out[1]
                place = place + far(its) * step.out[2] + across
                inside = (its < end) & (across < size.wide)
                gl.store(there + place, found.to(kind), mask=inside)
        if lse is not None:
            base = high * LN_2
            if T.folded:
                base = high * numbers.scale
            sums = gl.where(total == 0.0, float("-inf"), base + gl.log2(total) * LN_2)
            gl.store(lse + far(index) * size.queries + rows, sums, mask=rows < end)
        count += 1
        part = announced(count, parts, B)
    tma.store_wait(0)


@gluon.jit
def _give(out, found, leaves, batch, head, first, B: gl.constexpr):
    """Store 64 rows of the result by the copy engine, which stops at the end of the tensor."""
    tma.store_wait(0)
    leaves.store(found.to(leaves.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [batch, head, first, 0], matrix(leaves, ROWS, B.wide))


@gluon.jit
def _attend(
    q, k, v, bias, slopes, seed, also, out, lse, size, step, sight, numbers, batches, down, section,
    counter, B: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    shared = size.heads // size.shared
    asked = described(q, batches, size.heads, size.queries, size.features, step.q, ROWS, B.features)
    keys = described(k, batches, shared, size.keys, size.features, step.k, B.keys, B.features)
    values = described(v, batches, shared, size.keys, size.wide, step.v, B.keys, B.wide)
    made = described(out, batches, size.heads, size.queries, size.wide, step.out, ROWS, B.wide)
    if T.bias:  # where batches or heads share it, only the first is read: any stride will do
        beside = (gl.maximum(step.bias[0], 8), gl.maximum(step.bias[1], 8), step.bias[2])
        rest = described(bias, batches, size.heads, size.queries, size.keys, beside, ROWS, B.keys)
    else:
        rest = asked
    kind: gl.constexpr = q.dtype.element_ty
    deep: gl.constexpr = in_shared(B.features, 2)
    wide: gl.constexpr = in_shared(B.wide, 2)
    line: gl.constexpr = B.keys if T.bias else 16
    room = (
        gl.allocate_shared_memory(kind, [GROUPS, ROWS, B.features], deep),
        gl.allocate_shared_memory(kind, [T.stages, B.keys, B.features], deep),
        gl.allocate_shared_memory(kind, [T.stages, B.keys, B.wide], wide),
        gl.allocate_shared_memory(kind, [GROUPS, ROWS, B.wide], wide),
        gl.allocate_shared_memory(kind, [max(1, GROUPS * T.bias), ROWS, line], in_shared(line, 2)),
    )
    q_full, q_free = barriers(1, (1, GROUPS))
    k_full, k_free, v_full, v_free = barriers(T.stages, (1, GROUPS, 1, GROUPS))
    b_full, b_free = barriers(T.bias, (1, GROUPS))
    parts = for_parts()
    fence_async_shared()
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, b_full, b_free, parts)
    others = (slopes, seed, out, lse)
    tiles = batches * size.heads * down
    call = (also, size, step, sight, numbers, down, tiles, section, counter)
    gl.warp_specialize(
        [
            (_multiply, (made, others, room, bars, call, 0, B, T)),
            (_multiply, (made, others, room, bars, call, 1, B, T)),
            (_bring, (asked, keys, values, rest, room, bars, call, B, T)),
        ],
        [4, 1],
        [240, 24],
    )


_run = Launchable(_attend)


def attention(
    asked: Description, block: Block, tile: Tile, batch: int, section: int, units: int
) -> Callable[..., None]:
    """Return a function (q, k, v, bias, slopes, seed, also, out, lse); bias, slopes, seed and lse
    may be None; lse receives the logarithm of each query's sum of exponentials.

    ``section``: heads that are walked together so that their keys stay in the cache."""
    size = asked.size
    down = programs(size.queries, block.queries, size, block)
    grid = (min(units, down * batch * size.heads),)
    uneven = is_uneven(block)

    def run(
        q: Any, k: Any, v: Any, bias: Any, slopes: Any, seed: Any, also: Also, out: Any, lse: Any
    ) -> None:
        beside = [q if t is None else t for t in (bias, slopes, seed)]
        counter = torch.zeros(1, dtype=torch.int32, device=q.device) if uneven else None
        given = (q, k, v, *beside, also, out, lse, *asked, batch, down, section, counter)
        _run(grid, *given, warps=4, stages=1, B=block, T=tile)

    return run
