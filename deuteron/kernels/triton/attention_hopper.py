"""Attention on Hopper: the kernel of ``attention.py`` with its work divided among warps.

One warp brings queries, keys and values by the copy engine, keys and values into a ring of stages,
and a bias into one of its own. Each of two groups of four warps has 64 queries of a tile. It asks
for the scores of the next block of keys before it weighs the values of this one, so that the matrix
units compute scores while exponentials are taken. Programs stay: each takes tile after tile, and
the first loads of a tile come while the one before still ends.

Barriers, each in a phase that flips when it is passed: ``full`` and ``free`` of the queries and of
every stage of the keys, of the values and of the bias.
"""

from collections import namedtuple
from collections.abc import Callable
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

from deuteron.kernels.triton.attention import (
    LN_2,
    LOG2_E,
    Block,
    Lengths,
    Numbers,
    Sight,
    Steps,
    kept,
    keyed,
)
from deuteron.kernels.triton.attention_hopper_parts import (
    ROWS,
    begin_of,
    clear,
    described,
    matrix,
    next_stage,
    own_tile,
    own_tiles,
    part_of,
    passing,
    scores_of,
)
from deuteron.kernels.triton.attention_parts import Also, far, programs
from deuteron.kernels.triton.hopper import in_registers, in_shared
from deuteron.kernels.triton.launch import Launchable

# Stages of keys and values, and of a bias, 0 if there is none, whether blocks may reach beyond the
# last key, and whether the scale is applied within the exponential (nothing else changes the
# scores); groups of warps that multiply, stages of queries.
Tile = namedtuple("Tile", "stages bias ragged folded groups asked turns")


@gluon.jit
def _block(walk, n, B: gl.constexpr):
    """Where the n-th block of keys of a tile begins: from the last one down, or as a table lists
    them. There is always one, which may be hidden altogether."""
    if B.side:
        at = gl.where(walk[1] > 0, begin_of(walk, n, B, False), 0)
    else:
        at = begin_of(walk, gl.maximum(walk[1], 1) - 1 - n, B, False)
    return at


@gluon.jit
def _bring(q, k, v, bias, room, bars, call, B: gl.constexpr, T: gl.constexpr):
    """One warp: queries, keys and values in the order in which they are multiplied."""
    also, size, step, sight, _numbers, down, tiles, section = call
    asked, keys, values, _made, added, _marks = room
    q_full, q_free, k_full, k_free, v_full, v_free, b_full, b_free, _turn = bars
    stage = 0
    phase = 1
    count = 0
    blocks = 0
    for turn_of in range(own_tiles(tiles)):
        batch, head, own, _index = part_of(
            own_tile(turn_of), down, section, also, size, step, sight, B, False
        )
        walk = passing(also, own, batch, head, size, step, sight, B, False)
        first = own.first
        of = head // size.shared
        of_q = count % T.asked
        mbarrier.wait(q_free.index(of_q), count // T.asked & 1 ^ 1)
        mbarrier.expect(q_full.index(of_q), 2 * B.queries * B.features)
        for i in gl.static_range(T.groups):
            tma.async_copy_global_to_shared(
                q,
                [batch, head, first + i * ROWS, 0],
                q_full.index(of_q),
                matrix(asked.index(of_q * T.groups + i), ROWS, B.features),
            )
        for i in range(gl.maximum(walk[1], 1)):
            at = _block(walk, i, B)
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
                for j in gl.static_range(T.groups):
                    tma.async_copy_global_to_shared(
                        bias,
                        [of_batch, of_head, first + j * ROWS, at],
                        bar,
                        matrix(added.index(j * T.bias + room_for), ROWS, B.keys),
                    )
                blocks += 1
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), 2 * B.keys * B.wide)
            rows = matrix(values.index(stage), B.keys, B.wide)
            tma.async_copy_global_to_shared(v, [batch, of, at, 0], v_full.index(stage), rows)
            stage, phase = next_stage(stage, phase, T)
        count += 1


@gluon.jit
def _weighed(
    s, high, n, blocks, tile, beside, room, bars, call, ME: gl.constexpr, B: gl.constexpr,
    T: gl.constexpr,
):  # fmt: skip
    """Of the products q·kᵀ of the n-th block of a tile: its exponentials, their sums, what those so
    far must be scaled by, and the largest scores now. ``blocks``: how many came before, of all
    tiles."""
    also, size, step, sight, numbers, _down, _tiles, _section = call
    slopes, key = beside
    head, index, own, walk = tile
    first, at = own.first + ME * ROWS, _block(walk, n, B)
    L: gl.constexpr = s.type.layout
    r = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, L)), 1)
    c = gl.expand_dims(at + gl.arange(0, B.keys, gl.SliceLayout(0, L)), 0)
    slope = 0.0
    if B.slopes:
        slope = gl.load(slopes + head)
    s, _bend = scores_of(
        s, room[4], bars[6], bars[7], slope, also, own, head, r, c, first, at, blocks,
        n < walk[3], size, step, sight, numbers, ME, B, T, False,
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
        p = gl.where(kept(key, index, r, c, size, numbers, B), p, 0.0)
    return p, total, less, now


@gluon.jit
def _arrived(lines, full, stage, phase, n, tile, WIDTH: gl.constexpr, B: gl.constexpr):
    """Waits for the n-th block of a tile, and makes lines that are none of its sequence 0."""
    mbarrier.wait(full.index(stage), phase)
    if B.spans != "none":
        _head, _index, own, walk = tile
        at = _block(walk, n, B)
        if at + B.keys > own.high_k:
            clear(lines.index(stage), at, own.high_k, B.keys, WIDTH)
            fence_async_shared()


@gluon.jit
def _multiply(
    out, made_of, lse, beside, room, bars, call, ME: gl.constexpr, B: gl.constexpr, T: gl.constexpr
):
    """Four warps: 64 queries of every tile."""
    also, size, step, sight, numbers, down, tiles, section = call
    slopes, seed = beside
    asked, keys, values, made, _added, marks = room
    q_full, q_free, k_full, k_free, v_full, v_free, _b_full, _b_free, turn = bars
    S: gl.constexpr = in_registers(B.keys)
    O: gl.constexpr = in_registers(B.wide)
    kind: gl.constexpr = asked.dtype
    weights: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    lines: gl.constexpr = gl.SliceLayout(1, S)
    given = slopes, keyed(seed, B)
    stage = 0
    phase = 0
    count = 0
    blocks = 0
    turns = 0
    none = gl.zeros((ROWS, B.keys), gl.float32, S)
    for turn_of in range(own_tiles(tiles)):
        batch, head, own, index = part_of(
            own_tile(turn_of), down, section, also, size, step, sight, B, False
        )
        walk = passing(also, own, batch, head, size, step, sight, B, False)
        first = own.first + ME * ROWS
        its = head, index, own, walk
        of_q = count % T.asked
        query = asked.index(of_q * T.groups + ME)
        mbarrier.wait(q_full.index(of_q), count // T.asked & 1)
        _arrived(keys, k_full, stage, phase, 0, its, B.features, B)
        s = warpgroup_mma(
            query, keys.index(stage).permute((1, 0)), none, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=(s,))
        mbarrier.arrive(k_free.index(stage))
        high = gl.full((ROWS,), float("-inf"), gl.float32, lines)
        p, total, _less, high = _weighed(s, high, 0, blocks, its, given, room, bars, call, ME, B, T)
        blocks += 1
        weigh = gl.convert_layout(p.to(kind), weights)
        found = gl.zeros((ROWS, B.wide), gl.float32, O)
        for n in range(1, gl.maximum(walk[1], 1)):
            following, later = next_stage(stage, phase, T)
            _arrived(keys, k_full, following, later, n, its, B.features, B)
            turned = keys.index(following).permute((1, 0))
            if T.turns:
                mbarrier.wait(turn.index(ME), turns & 1)
                turns += 1
            s = warpgroup_mma(query, turned, none, use_acc=False, is_async=True)
            _arrived(values, v_full, stage, phase, n - 1, its, B.wide, B)
            found = warpgroup_mma(weigh, values.index(stage), found, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            if T.turns:
                mbarrier.arrive(turn.index((ME + 1) % T.groups))
            mbarrier.arrive(k_free.index(following))
            p, more, less, high = _weighed(
                s, high, n, blocks, its, given, room, bars, call, ME, B, T
            )
            blocks += 1
            total = total * less + more
            marks.index(ME).store(more)  # or the assembler takes exponentials after the wait
            found = warpgroup_mma_wait(0, deps=(found,))
            mbarrier.arrive(v_free.index(stage))
            found = found * gl.expand_dims(gl.convert_layout(less, gl.SliceLayout(1, O)), 1)
            weigh = gl.convert_layout(p.to(kind), weights)
            stage = following
            phase = later
        mbarrier.arrive(q_free.index(of_q))
        _arrived(values, v_full, stage, phase, gl.maximum(walk[1], 1) - 1, its, B.wide, B)
        found = warpgroup_mma(weigh, values.index(stage), found, is_async=True)
        found = warpgroup_mma_wait(0, deps=(found,))
        mbarrier.arrive(v_free.index(stage))
        stage, phase = next_stage(stage, phase, T)
        rows = first + gl.arange(0, ROWS, lines)
        end = size.queries
        if B.spans == "lengths":  # padding may hold anything
            total = gl.where(rows < own.high_q, total, 0.0)
        elif B.spans == "packed":  # and what lies behind is the next one's
            end = own.high_q
        by = numbers.factor / gl.where(total == 0.0, 1.0, total)
        found = found * gl.expand_dims(gl.convert_layout(by, gl.SliceLayout(1, O)), 1)
        lined = gl.expand_dims(first + gl.arange(0, ROWS, gl.SliceLayout(1, O)), 1)
        if B.spans == "lengths":
            found = gl.where(lined < own.high_q, found, 0.0)
        if B.spans == "packed":
            across = gl.expand_dims(gl.arange(0, B.wide, gl.SliceLayout(0, O)), 0)
            start = made_of + far(batch) * step.out[0] + far(head) * step.out[1]
            inside = (lined < end) & (across < size.wide)
            gl.store(start + far(lined) * step.out[2] + across, found.to(kind), mask=inside)
        else:
            leaves = made.index(ME)
            tma.store_wait(0)
            leaves.store(found.to(kind))
            fence_async_shared()
            tma.async_copy_shared_to_global(
                out, [batch, head, first, 0], matrix(leaves, ROWS, B.wide)
            )
        if lse is not None:
            base = high * LN_2
            if T.folded:
                base = high * numbers.scale
            sums = gl.where(total == 0.0, float("-inf"), base + gl.log2(total) * LN_2)
            gl.store(lse + far(index) * size.queries + rows, sums, mask=rows < end)
        count += 1
    tma.store_wait(0)


@gluon.jit
def _attend(
    q, k, v, bias, slopes, seed, also, out, lse, size, step, sight, numbers, batches, down, section,
    B: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    shared = size.heads // size.shared
    asked = described(q, batches, size.heads, size.queries, size.features, step.q, ROWS, B.features)
    keys = described(k, batches, shared, size.keys, size.features, step.k, B.keys, B.features)
    values = described(v, batches, shared, size.keys, size.wide, step.v, B.keys, B.wide)
    made = described(out, batches, size.heads, size.queries, size.wide, step.out, ROWS, B.wide)
    if T.bias:  # of a batch or a head that shares it only the first is read: any step will do
        beside = (gl.maximum(step.bias[0], 8), gl.maximum(step.bias[1], 8), step.bias[2])
        rest = described(bias, batches, size.heads, size.queries, size.keys, beside, ROWS, B.keys)
    else:
        rest = asked
    kind: gl.constexpr = q.dtype.element_ty
    deep: gl.constexpr = in_shared(B.features, 2)
    wide: gl.constexpr = in_shared(B.wide, 2)
    line: gl.constexpr = B.keys if T.bias else 16
    room = (
        gl.allocate_shared_memory(kind, [T.asked * T.groups, ROWS, B.features], deep),
        gl.allocate_shared_memory(kind, [T.stages, B.keys, B.features], deep),
        gl.allocate_shared_memory(kind, [T.stages, B.keys, B.wide], wide),
        gl.allocate_shared_memory(kind, [T.groups, ROWS, B.wide], wide),
        gl.allocate_shared_memory(
            kind, [max(1, T.groups * T.bias), ROWS, line], in_shared(line, 2)
        ),
        gl.allocate_shared_memory(
            gl.float32, [T.groups, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
        ),
    )
    bar: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [T.asked, 1], bar)
    q_free = gl.allocate_shared_memory(gl.int64, [T.asked, 1], bar)
    turn = gl.allocate_shared_memory(gl.int64, [T.groups, 1], bar)
    k_full = gl.allocate_shared_memory(gl.int64, [T.stages, 1], bar)
    k_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], bar)
    v_full = gl.allocate_shared_memory(gl.int64, [T.stages, 1], bar)
    v_free = gl.allocate_shared_memory(gl.int64, [T.stages, 1], bar)
    b_full = gl.allocate_shared_memory(gl.int64, [max(1, T.bias), 1], bar)
    b_free = gl.allocate_shared_memory(gl.int64, [max(1, T.bias), 1], bar)
    for i in gl.static_range(T.asked):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=T.groups)
    for i in gl.static_range(T.groups):
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(T.stages):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=T.groups)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=T.groups)
    for i in gl.static_range(T.bias):
        mbarrier.init(b_full.index(i), count=1)
        mbarrier.init(b_free.index(i), count=T.groups)
    fence_async_shared()
    if T.turns:
        mbarrier.arrive(turn.index(0))
    bars = (q_full, q_free, k_full, k_free, v_full, v_free, b_full, b_free, turn)
    others = (slopes, seed)
    call = (also, size, step, sight, numbers, down, batches * size.heads * down, section)
    if T.groups == 2:
        gl.warp_specialize(
            [
                (_multiply, (made, out, lse, others, room, bars, call, 0, B, T)),
                (_multiply, (made, out, lse, others, room, bars, call, 1, B, T)),
                (_bring, (asked, keys, values, rest, room, bars, call, B, T)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (made, out, lse, others, room, bars, call, 0, B, T)),
                (_multiply, (made, out, lse, others, room, bars, call, 1, B, T)),
                (_multiply, (made, out, lse, others, room, bars, call, 2, B, T)),
                (_bring, (asked, keys, values, rest, room, bars, call, B, T)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


_run = Launchable(_attend)


def attention(
    size: Lengths,
    steps: Steps,
    sight: Sight,
    numbers: Numbers,
    block: Block,
    tile: Tile,
    batch: int,
    section: int,
    units: int,
) -> Callable[..., None]:
    """``section``: heads that are walked together so that their keys stay in the cache.

    A function of q, k, v, bias, slopes and seed, or None for each, what functions of scores
    captured, the result, and where the sums of each query go, or None."""
    down = programs(size.queries, block.queries, size, block)
    grid = (min(units, down * batch * size.heads),)

    def run(
        q: Any, k: Any, v: Any, bias: Any, slopes: Any, seed: Any, also: Also, out: Any, lse: Any
    ) -> None:
        beside = [q if t is None else t for t in (bias, slopes, seed)]
        given = (
            q,
            k,
            v,
            *beside,
            also,
            out,
            lse,
            size,
            steps,
            sight,
            numbers,
            batch,
            down,
            section,
        )
        _run(grid, *given, warps=4, stages=1, B=block, T=tile)

    return run
