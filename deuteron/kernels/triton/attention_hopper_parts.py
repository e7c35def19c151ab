"""What attention on Hopper and its gradients share: which part a tile is, which blocks it walks
over one after the other, and the scores of a block.

A tile holds rows of queries while blocks of keys and values pass; or, for the gradients of these,
it holds keys and values while queries pass: ``OF`` is true if the held rows are of keys. Each group
of four warps has 64 of the held rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from deuteron.kernels.triton.attention import LOG2_E, hidden, scored
from deuteron.kernels.triton.attention_parts import (
    Own,
    at_entry,
    in_turn,
    listed,
    own_part,
    seen_keys,
)
from deuteron.kernels.triton.hopper import barriers, in_shared, next_stage

ROWS = gl.constexpr(64)  # held rows of each group
GROUPS = gl.constexpr(2)  # of warps that multiply
AHEAD = gl.constexpr(2)  # tiles that the warp that loads announces ahead


@gluon.jit
def matrix(buffer, LINES: gl.constexpr, WIDTH: gl.constexpr):
    """Return a matrix in shared memory as the copy engine sees it, of one batch and one head."""
    return buffer._reinterpret(buffer.dtype, [1, 1, LINES, WIDTH], in_shared(WIDTH, 4))


@gluon.jit
def described(x, batches, heads, lines, width, step, LINES: gl.constexpr, WIDTH: gl.constexpr):
    """Return the copy engine's descriptor of a tensor, which moves blocks of one head."""
    return tma.make_tensor_descriptor(
        x,
        [batches, heads, lines, width],
        [step[0], step[1], step[2], 1],
        [1, 1, LINES, WIDTH],
        in_shared(WIDTH, 4),
    )


@gluon.jit
def next_tile(i, counter, tiles):
    """Return the i-th tile of this program, a number beyond all tiles if there is none. Where the
    host does not know how long tiles take, there is a ``counter``, and a free program takes the
    next tile. Else the order of programs is reversed in every second round, so that the program
    with the longest tile of a round has the shortest of the next."""
    last = gl.num_programs(0) - 1
    tile = i * (last + 1) + gl.where(i % 2 == 1, last - gl.program_id(0), gl.program_id(0))
    if counter is not None:
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        taken = gl.atomic_add(counter + lanes, lanes * 0 + 1, mask=lanes == 0, sem="relaxed")
        tile = last + 1 + gl.sum(gl.where(lanes == 0, taken, 0), 0)
    return tile


@gluon.jit
def for_parts():
    """Allocate the room where the warp that loads announces the next tiles, and the barriers by
    which it and the warps that multiply wait for each other."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = gl.allocate_shared_memory(gl.int32, [AHEAD, 32], flat)
    full, free = barriers(AHEAD, (1, GROUPS))
    return room, full, free


@gluon.jit
def tell(part, n, parts):
    """Run by the warp that loads: announce which part the n-th tile of the program is."""
    room, full, free = parts
    batch, head, own, index = part
    given = (batch, head, index, own.first, own.number, own.low_q, own.high_q, own.low_k)
    given = given + (own.high_k, own.offset)
    lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    line = lanes
    for i in gl.static_range(len(given)):
        line = gl.where(lanes == i, given[i], line)
    mbarrier.wait(free.index(n % AHEAD), n // AHEAD & 1 ^ 1)
    room.index(n % AHEAD).store(line)
    mbarrier.arrive(full.index(n % AHEAD))


@gluon.jit
def tell_end(n, parts):
    """Run by the warp that loads: announce that there is no n-th tile."""
    tell((0, 0, Own(0, 0, 0, 0, 0, 0, 0), -1), n, parts)


@gluon.jit
def announced(n, parts, B: gl.constexpr):
    """Run by four warps: return what was announced of the n-th tile of the program."""
    room, full, free = parts
    mbarrier.wait(full.index(n % AHEAD), n // AHEAD & 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    COUNT: gl.constexpr = 4 if B.spans == "none" else 10
    found = ()
    for i in gl.static_range(COUNT):
        found = found + (gl.max(room.index(n % AHEAD).slice(i, 1).load(one), 0),)
    mbarrier.arrive(free.index(n % AHEAD))
    return found


@gluon.jit
def part_told(part, size, sight, B: gl.constexpr):
    """Return batch, head, part, and number among all heads of all batches, of an announced tile.
    Where all sequences have one length, most of the part is known without it."""
    batch, first = part[0], part[3]
    if B.spans == "none":
        offset = sight.offset
        if B.end:
            offset += size.keys - size.queries
        own = Own(batch, first, 0, size.queries, 0, size.keys, offset)
    else:
        own = Own(part[4], first, part[5], part[6], part[7], part[8], part[9])
    return batch, part[1], own, part[2]


@gluon.jit
def is_there(own, B: gl.constexpr, OF: gl.constexpr):
    """Whether a part has rows: with packed sequences some parts have none."""
    there = True
    if B.spans == "packed":
        there = own.first < (own.high_k if OF else own.high_q)
    return there


@gluon.jit
def part_of(tile, blocks, section, also, size, step, sight, B: gl.constexpr, OF: gl.constexpr):
    """Return batch and head of a tile, its part, and its number among all heads of all batches."""
    heads = size.heads
    if OF:
        heads = size.heads // size.shared
    within = tile % (section * blocks)
    block = within // section
    index = tile // (section * blocks) * section + within % section
    batch, head = index // heads, index % heads
    if B.side:
        if OF:
            block = in_turn(
                also.turned, step.turned, batch, head * size.shared, block, B.side, B.keys
            )
        else:
            block = in_turn(also.blocks, step.blocks, batch, head, block, B.side, B.queries)
    elif B.right and not OF:
        block = blocks - 1 - block  # those with the most keys first
    warps: gl.constexpr = gl.num_warps()
    lanes: gl.constexpr = gl.BlockedLayout([4 // warps], [32], [warps], [0])
    own = own_part(also, block, batch, size, sight, B, OF, gl.arange(0, 128, lanes))
    return batch, head, own, index


@gluon.jit
def passing(also, own, batch, head, size, step, sight, B: gl.constexpr, OF: gl.constexpr):
    """Return what passes a tile, for one head of queries: where it begins, how many blocks it is,
    the row of a table, and how many of its blocks are seen only in part."""
    SIDE: gl.constexpr = B.queries if OF else B.keys
    line, some, count = 0, 0, 0
    begin, end = own.low_q, own.high_q
    if B.side:
        PARTS: gl.constexpr = B.side // SIDE
        if OF:
            line, some, count = listed(also.turned, step.turned, batch, head, own.first // B.side)
        else:
            line, some, count = listed(also.blocks, step.blocks, batch, head, own.first // B.side)
        some, count = some * PARTS, count * PARTS
    else:
        if OF:
            if B.right:
                begin += max(0, own.first - own.offset - sight.right - own.low_q) // SIDE * SIDE
            if B.left:
                end = min(end, own.first + B.keys - own.offset + sight.left)
            if B.spans != "none":
                end = gl.where(own.first < own.high_k, end, begin)
        else:
            begin, _inner, _outer, end = seen_keys(own, sight, B)
        count = gl.cdiv(max(end - begin, 0), SIDE)
    return begin, count, line, some


@gluon.jit
def begin_of(walk, n, B: gl.constexpr, OF: gl.constexpr):
    """Return where the n-th of the blocks that pass begins."""
    SIDE: gl.constexpr = B.queries if OF else B.keys
    begin, _count, line, _some = walk
    if B.side:
        at = at_entry(line, n, B.side, SIDE)
    else:
        at = begin + n * SIDE
    return at


@gluon.jit
def clear(lines, at, end, LINES: gl.constexpr, WIDTH: gl.constexpr):
    """Set rows in shared memory to 0 from ``end`` on. They belong to another sequence, or to none,
    and may hold anything; even with a weight of 0 that may make nan. Both groups write the same."""
    across: gl.constexpr = min(32, WIDTH // 8)
    how: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])
    found = lines.load(how)
    rows = gl.expand_dims(at + gl.arange(0, LINES, gl.SliceLayout(1, how)), 1)
    lines.store(gl.where(rows < end, found, gl.zeros_like(found)))


@gluon.jit
def scores_of(
    s, added, b_full, b_free, slope, also, own, head, r, c, top, left, steps, some, size, step,
    sight, numbers, ME: gl.constexpr, B: gl.constexpr, T: gl.constexpr, OF: gl.constexpr,
):  # fmt: skip
    """Return scores and their derivative, as ``attention.scored``, from the products of a block
    that begins at the query ``top`` and the key ``left``. ``some``: a table says it is seen in
    part."""
    bend = 1.0
    if not T.folded:
        s, bend = scored(
            s, None, slope, also, own, head, r, c, top, left, size, step, numbers, B, OF
        )
    if T.bias:
        room_for = steps % T.bias
        mbarrier.wait(b_full.index(room_for), steps // T.bias & 1)
        its = added.index(ME * T.bias + room_for)
        if OF:
            its = its.permute((1, 0))
        s += its.load(s.type.layout).to(gl.float32) * LOG2_E
        mbarrier.arrive(b_free.index(room_for))
    ends: gl.constexpr = not OF and (T.ragged or B.spans != "none")  # keys beyond the end
    if B.left or B.right or B.side or ends:
        DOWN: gl.constexpr = B.queries if OF else ROWS
        ACROSS: gl.constexpr = ROWS if OF else B.keys
        whole = left + ACROSS <= own.high_k
        if B.left:
            whole = whole & (left >= top + DOWN - 1 + own.offset - sight.left)
        if B.right:
            whole = whole & (left + ACROSS - 1 <= top + own.offset + sight.right)
        if B.side:
            whole = whole & (not some)
        if whole:
            s = hidden(s, also, own, head, r, c, sight, B, False)
        else:
            s = hidden(s, also, own, head, r, c, sight, B, True)
    elif B.mask is not None:
        s = hidden(s, also, own, head, r, c, sight, B, False)
    return s, bend


@gluon.jit
def bring(tensors, room, bars, call, B: gl.constexpr, T: gl.constexpr, OF: gl.constexpr):
    """Run by one warp: load what is held, and what passes, in the order of multiplication."""
    held_0, held_1, passing_0, passing_1, bias = tensors
    also, size, step, sight, _numbers, blocks, tiles, section, counter = call
    still_0, still_1, moving_0, moving_1, _two, added, _marks, _left = room
    h_full, h_free, full_0, full_1, free, b_full, b_free, parts = bars
    SIDE: gl.constexpr = B.queries if OF else B.keys
    stage = 0
    phase = 1
    several = 0
    steps = 0
    # heads of queries that pass one after the other: in a table each has a row of its own (lines),
    # without one all see the same blocks (alike)
    lines = size.shared if OF and B.side else 1
    alike = size.shared if OF and not B.side else 1
    turn = 0
    tile = next_tile(0, None, tiles)
    while tile < tiles:
        part = part_of(tile, blocks, section, also, size, step, sight, B, OF)
        batch, head, own, _index = part
        if is_there(own, B, OF):
            tell(part, several, parts)
            mbarrier.wait(h_free.index(0), several & 1 ^ 1)
            mbarrier.expect(h_full.index(0), 2 * GROUPS * ROWS * (B.features + B.wide))
            for i in gl.static_range(GROUPS):
                place = [batch, head, own.first + i * ROWS, 0]
                of_0 = matrix(still_0.index(i), ROWS, B.features)
                of_1 = matrix(still_1.index(i), ROWS, B.wide)
                tma.async_copy_global_to_shared(held_0, place, h_full.index(0), of_0)
                tma.async_copy_global_to_shared(held_1, place, h_full.index(0), of_1)
            several += 1
            for share in range(lines):
                first = head * size.shared + share if OF else head
                walk = passing(also, own, batch, first, size, step, sight, B, OF)
                count = walk[1]
                for n in range(count * alike):
                    asking = first
                    block = n
                    if OF and not B.side:
                        asking = first + n // count
                        block = n % count
                    at = begin_of(walk, block, B, OF)
                    of = asking if OF else asking // size.shared
                    mbarrier.wait(free.index(stage), phase)
                    mbarrier.expect(full_0.index(stage), 2 * SIDE * B.features)
                    lines_0 = matrix(moving_0.index(stage), SIDE, B.features)
                    tma.async_copy_global_to_shared(
                        passing_0, [batch, of, at, 0], full_0.index(stage), lines_0
                    )
                    mbarrier.expect(full_1.index(stage), 2 * SIDE * B.wide)
                    lines_1 = matrix(moving_1.index(stage), SIDE, B.wide)
                    tma.async_copy_global_to_shared(
                        passing_1, [batch, of, at, 0], full_1.index(stage), lines_1
                    )
                    if T.bias:
                        room_for = steps % T.bias
                        mbarrier.wait(b_free.index(room_for), steps // T.bias & 1 ^ 1)
                        mbarrier.expect(b_full.index(room_for), 2 * GROUPS * ROWS * SIDE)
                        of_batch = gl.where(step.bias[0] > 0, batch, 0)
                        of_head = gl.where(step.bias[1] > 0, asking, 0)
                        for j in gl.static_range(GROUPS):
                            place = [of_batch, of_head, own.first + j * ROWS, at]
                            if OF:
                                place = [of_batch, of_head, at, own.first + j * ROWS]
                            its = added.index(j * T.bias + room_for)
                            its = matrix(its, SIDE if OF else ROWS, ROWS if OF else SIDE)
                            bar = b_full.index(room_for)
                            tma.async_copy_global_to_shared(bias, place, bar, its)
                        steps += 1
                    stage, phase = next_stage(stage, phase, T.stages)
        turn += 1
        tile = next_tile(turn, counter, tiles)
    tell_end(several, parts)
