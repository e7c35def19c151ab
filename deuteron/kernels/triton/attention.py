"""softmax(scale · q·kᵀ + bias) · v in one pass over the keys: no matrix of scores is in memory.

A program has a block of queries of one head and walks over the keys. It keeps, for each query, the
largest score so far, the sum of exponentials relative to it, and the sum of values weighted by
them; where a larger score turns up, it scales both sums down. Exponentials are powers of two: the
factor log₂ e is part of the scale. Keys that no query of the block sees, by ``causal``, a window or
a table of blocks, are never read, and only blocks at the edge of what is seen are masked. A query
that sees no key gives zeros.

``attention_parts.py`` says where a program begins and which blocks it walks over.

Queries may be rotated by their rotary positions as they are loaded, so that rotated queries are
never written to memory. Keys may be, too, but every block of queries then rotates them anew.

Where all keys of a sequence are one block, as in attention over small windows, a program computes a
head of several sequences one after the other: it loads the rows of the next one meanwhile, and
reads a bias that they share once.

Heads and positions may have any strides, features are adjacent: q, k and v that come out of one
projection are read in place. The copy engine (TMA) reads them or, where rows begin anywhere or a
descriptor would serve for one block only, the threads do. What is computed, and the names, are
those of ``ops/attention.py``.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import triton
import triton.language as tl

from deuteron.kernels.triton.attention_parts import (
    Also,
    at_entry,
    far,
    grid_of,
    in_turn,
    listed,
    own_part,
    programs,
    seen_keys,
)
from deuteron.kernels.triton.launch import Launchable
from deuteron.ops import random

# queries, keys: positions; features: of q and k; wide: features of v; heads: of queries; shared: so
# many of them share a head of keys; sequences: packed in one.
Lengths = namedtuple("Lengths", "queries keys features wide heads shared sequences")
# Strides of batches, heads and positions of q, k, v, the result, and the bias (of its keys, too; 0
# in dimensions that it does not have). Of a table of blocks, and of the transposed one: strides of
# batches, heads and rows.
Steps = namedtuple("Steps", "q k v out bias blocks turned")
# left, right: how many keys before and after its position a query sees; offset: the position of the
# first query; q_row, k_row: the first rows of queries and keys in the tables of rotary angles.
Sight = namedtuple("Sight", "left right offset q_row k_row")
# scale: on q·kᵀ; cap: the soft cap; cut: 16 random bits must reach it, or dropout removes a weight;
# factor: on the weights that stay.
Numbers = namedtuple("Numbers", "scale cap cut factor")
# queries, keys: of a block; features, wide: lanes for those of q and k, and of v; left, right:
# sight is limited before, after a query; bias: "none", "added", or "allowed", where it says which
# keys a query may see; brought: who reads the bias ("" threads, "tiled" the copy engine, "held"
# once for all sequences); even: numbers of a row that a thread reads at a time, 0 where the copy
# engine reads; cap, slopes, dropout: there are such; spans: lengths of sequences ("none", "lengths"
# or "packed"); end: queries stand at the end of the keys; side: of blocks in a table, or 0; score,
# slope, mask: a function of scores, its derivative and a mask function, or None; turn: what is
# rotated as it is loaded ("", "q" or "qk"); neighbours: rotary pairs are neighbours, not from the
# two halves.
Block = namedtuple(
    "Block",
    "queries keys features wide left right bias brought even cap slopes dropout "
    "spans end side score slope mask turn neighbours",
)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
GOLDEN, FIRST, SECOND = (tl.constexpr(n) for n in (random.GOLDEN, random.FIRST, random.SECOND))
HALF, APART = tl.constexpr(random.HALF), tl.constexpr(random.APART)
EVEN = tl.constexpr(0xFFFFFFFF ^ random.APART)
UP = tl.constexpr(random.HALF // random.APART)


@triton.jit
def _mix(h):
    h = h ^ (h >> 16)
    h = h * tl.cast(FIRST, tl.uint32)
    h = h ^ (h >> 15)
    h = h * tl.cast(SECOND, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def keyed(seed, B: tl.constexpr):
    """Return the two keys that random words are made of, besides their places."""
    b = tl.cast(0, tl.uint32)
    if B.dropout:
        start = tl.load(seed)
        low, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
        b = _mix(_mix(low + tl.cast(GOLDEN, tl.uint32)) ^ high)
    return b, _mix(b)


@triton.jit
def _stir(h):
    h = h * tl.cast(FIRST, tl.uint32)
    h = h ^ (h >> 15)
    return h * tl.cast(SECOND, tl.uint32)


@triton.jit
def kept(key, head, rows, columns, size, numbers):
    """Return which weights of a block dropout keeps, by the words of ``ops/random.py``. Two columns
    share a word, and one thread has both columns, so that it computes the word once."""
    b, c = key
    line = tl.cast(head, tl.uint32) * tl.cast(size.queries, tl.uint32) + rows.to(tl.uint32)
    j = columns.to(tl.uint32)
    word = _mix(_stir(line ^ b) ^ _stir((j & EVEN) ^ c))
    shift = ((j & APART) ^ APART) * UP  # the lower half moves up, the upper one stays
    return (word << shift) >= (tl.cast(numbers.cut, tl.uint32) << HALF)


@triton.jit
def nothing(numbers):
    """Return the 0 that dropped weights become. With a constant the compiler would select it after
    rounding, and could no longer round two weights by one instruction."""
    return numbers.factor * 0.0


@triton.jit
def biased(bias, step, batch, head, size, B: tl.constexpr):
    """Return the bias of a head: a descriptor that loads blocks where the copy engine reads it,
    else a pointer."""
    at = bias
    if B.bias != "none":
        at += far(batch) * step.bias[0] + far(head) * step.bias[1]
    if B.brought == "tiled":
        shape = [size.queries, size.keys]
        found = tl.make_tensor_descriptor(at, shape, [step.bias[2], 1], [B.queries, B.keys])
    else:
        found = at
    return found


@triton.jit
def _bias_of(bias, rows, columns, first, at, size, step, B: tl.constexpr, TURNED: tl.constexpr):
    """Return a block of the bias in the layout of the scores; 0 beyond its ends."""
    if B.brought == "tiled":
        found = bias.load([first, at])
        if TURNED:
            found = found.T
    elif B.brought == "held":
        found = bias
    else:
        inside = (rows < size.queries) & (columns < size.keys)
        place = rows.to(tl.int64) * step.bias[2] + columns * step.bias[3]
        found = tl.load(bias + place, mask=inside, other=0)
    return found


@triton.jit
def scored(
    s, bias, slope, also, own, head, rows, columns, first, at, size, step, numbers,
    B: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return the scores of a block, times log₂ e, from s = q·kᵀ, and the derivative of the soft cap
    or of the function of scores. The block begins at the query ``first`` and the key ``at``; rows
    and columns have the layout of s, which may be transposed."""
    bend = 1.0
    if B.cap:
        t = 1.0 - 2.0 / (tl.exp2(s * (numbers.scale / numbers.cap * 2.0 * LOG2_E)) + 1.0)
        s = t * (numbers.cap * LOG2_E)
        bend = 1.0 - t * t
    elif B.score is not None:
        s = s * numbers.scale
        i, j = rows - own.low_q, columns - own.low_k
        if B.slope is not None:
            bend = B.slope(s, own.number, head, i, j, also.t0, also.t1, also.t2)
        found = B.score(s, own.number, head, i, j, also.t0, also.t1, also.t2)
        s = tl.broadcast_to(found, s.shape) * LOG2_E
    else:
        s = s * (numbers.scale * LOG2_E)
    if B.slopes:
        # as exact as the float of the integer distance, but converted per row, not per score
        apart = (rows + (own.offset - at)).to(tl.float32) - (columns - at).to(tl.float32)
        s -= tl.abs(apart) * (slope * LOG2_E)
    if B.bias != "none":
        beside = _bias_of(bias, rows, columns, first, at, size, step, B, TURNED)
        if B.bias == "allowed":
            s = tl.where(beside != 0, s, float("-inf"))
        else:
            s += beside.to(tl.float32) * LOG2_E
    return s, bend


@triton.jit
def hidden(s, also, own, head, rows, columns, sight, B: tl.constexpr, MASK: tl.constexpr):
    """Set scores to −∞ that sight, the number of keys or a mask function rules out. Without
    ``MASK`` the whole block is in sight, and a table of blocks, if there is one, says that all is
    seen."""
    if MASK:
        seen = columns < own.high_k
        if B.left:
            seen = seen & (columns >= rows + (own.offset - sight.left))
        if B.right:
            seen = seen & (columns <= rows + (own.offset + sight.right))
        s = tl.where(seen, s, float("-inf"))
    if B.mask is not None:
        if MASK or B.side == 0:
            i, j = rows - own.low_q, columns - own.low_k
            seen = B.mask(own.number, head, i, j, also.t0, also.t1, also.t2)
            s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _turned(x, cos, sin, rows, count, first_row, B: tl.constexpr):
    """Return rows of queries or keys, rotated and rounded as ``ops/rope.py`` does it."""
    PAIRS: tl.constexpr = B.features // 2
    place = far(first_row + rows)[:, None] * PAIRS + tl.arange(0, PAIRS)[None, :]
    there = (rows < count)[:, None]
    c = tl.load(cos + place, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin + place, mask=there, other=0.0).to(tl.float32)
    if B.neighbours:
        pairs = tl.reshape(x, (x.shape[0], PAIRS, 2))
    else:
        pairs = tl.permute(tl.reshape(x, (x.shape[0], 2, PAIRS)), (0, 2, 1))
    a, b = tl.split(pairs.to(tl.float32))
    pairs = tl.join(a * c - b * s, b * c + a * s).to(x.dtype)
    if not B.neighbours:
        pairs = tl.permute(pairs, (0, 2, 1))
    return tl.reshape(pairs, x.shape)


@triton.jit
def _whole(n, B: tl.constexpr):
    """Return n, a multiple of what threads read at a time, so that the compiler sees that it is."""
    if B.even > 1:
        n = n // B.even * B.even
    return n


@triton.jit
def _placed(x, lines, features, line, LINES: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr):
    """Return a matrix as :func:`_block` reads it: a descriptor, or a pointer with its sizes."""
    if B.even == 0:
        found = tl.make_tensor_descriptor(x, [lines, features], [line, 1], [LINES, LANES])
    else:
        found = (x, lines, _whole(features, B), _whole(line, B))
    return found


@triton.jit
def _place(x, rows, lanes):
    """Return addresses and mask of some rows that threads read or write."""
    start, count, features, line = x
    inside = (rows < count)[:, None] & (lanes < features)[None, :]
    return start + rows.to(tl.int64)[:, None] * line + lanes[None, :], inside


@triton.jit
def _block(x, at, LINES: tl.constexpr, LANES: tl.constexpr, B: tl.constexpr):
    """Load rows from ``at`` on; 0 beyond their end."""
    if B.even == 0:
        found = x.load([at, 0])
    else:
        place, inside = _place(x, at + tl.arange(0, LINES), tl.arange(0, LANES))
        found = tl.load(place, mask=inside, other=0.0)
    return found


@triton.jit
def _at(x, step, batch, head, B: tl.constexpr):
    """Return a pointer to where a head of a sequence begins."""
    return x + _whole(far(batch) * step[0] + far(head) * step[1], B)


@triton.jit
def _add(state, at, block, call, B: tl.constexpr, MASK: tl.constexpr):
    """Return the largest scores, sums and weighted values of a block of queries after one more
    block of keys, which begins at ``at``."""
    high, total, out = state
    q, keys, values, bias, slope, key, index, rows, also, own = block
    size, step, sight, numbers = call
    head = index % size.heads
    r, c = rows[:, None], (at + tl.arange(0, B.keys))[None, :]
    k = _block(keys, at, B.keys, B.features, B)
    if B.turn == "qk":
        lines = at + tl.arange(0, B.keys)
        k = _turned(k, also.k_cos, also.k_sin, lines, size.keys, sight.k_row, B)
    s = tl.dot(q, k.T)
    s, _bend = scored(
        s, bias, slope, also, own, head, r, c, own.first, at, size, step, numbers, B, False
    )
    s = hidden(s, also, own, head, r, c, sight, B, MASK)
    now = tl.maximum(high, tl.max(s, 1))
    base = tl.where(now == float("-inf"), 0.0, now)  # of a query that has seen no key yet
    p = tl.exp2(s - base[:, None])
    less = tl.exp2(high - base)
    total = total * less + tl.sum(p, 1)
    if B.dropout:
        p = tl.where(kept(key, index, r, c, size, numbers), p, nothing(numbers))
    v = _block(values, at, B.keys, B.wide, B)
    out = tl.dot(p.to(v.dtype), v, out * less[:, None])
    return now, total, out


@triton.jit
def _unseen(B: tl.constexpr):
    """Return the state of a block of queries that has seen no key."""
    high = tl.full((B.queries,), float("-inf"), tl.float32)
    total = tl.zeros((B.queries,), tl.float32)
    return high, total, tl.zeros((B.queries, B.wide), tl.float32)


@triton.jit
def _finish(made, out, lse, state, index, rows, first, lines, size, numbers, B: tl.constexpr):
    """Store the result, and lse, of a block of queries that begins at ``first``."""
    kind: tl.constexpr = out.dtype.element_ty
    high, total, found = state
    found = found * (numbers.factor / tl.where(total == 0.0, 1.0, total))[:, None]
    if B.even == 0:
        made.store([first, 0], found.to(kind))
    else:
        place, inside = _place(made, rows, tl.arange(0, B.wide))
        tl.store(place, found.to(kind), mask=inside)
    if lse is not None:
        sums = (high + tl.log2(total)) * LN_2
        sums = tl.where(total == 0.0, float("-inf"), sums)
        tl.store(lse + far(index) * size.queries + rows, sums, mask=rows < lines)


@triton.jit
def _attend(
    q, k, v, bias, slopes, seed, also, out, lse, size, step, sight, numbers, B: tl.constexpr
):
    if B.side:
        index, block = tl.program_id(0), tl.program_id(1)
    else:
        index, block = tl.program_id(1), tl.program_id(0)
    head, batch = index % size.heads, index // size.heads
    if B.side:
        block = in_turn(also.blocks, step.blocks, batch, head, block, B.side, B.queries)
    elif B.right:
        block = tl.num_programs(0) - 1 - block  # those with the most keys first
    own = own_part(also, block, batch, size, sight, B, False)
    first = own.first
    q = _at(q, step.q, batch, head, B)
    k = _at(k, step.k, batch, head // size.shared, B)
    v = _at(v, step.v, batch, head // size.shared, B)
    out = _at(out, step.out, batch, head, B)
    slope = 0.0
    if B.slopes:
        slope = tl.load(slopes + head)
    bias = biased(bias, step, batch, head, size, B)
    key = keyed(seed, B)
    lanes: tl.constexpr = B.features
    wide: tl.constexpr = B.wide
    lines_q, lines_k, lines_out = size.queries, size.keys, size.queries
    if B.spans != "none":  # what lies behind the end of a sequence is read as 0
        lines_q, lines_k = max(own.high_q, 1), max(own.high_k, 1)
    if B.spans == "packed":  # and not written: it belongs to the next sequence
        lines_out = lines_q
    asked = _placed(q, lines_q, size.features, step.q[2], B.queries, lanes, B)
    keys = _placed(k, lines_k, size.features, step.k[2], B.keys, lanes, B)
    values = _placed(v, lines_k, size.wide, step.v[2], B.keys, wide, B)
    made = _placed(out, lines_out, size.wide, step.out[2], B.queries, wide, B)
    rows = first + tl.arange(0, B.queries)
    query = _block(asked, first, B.queries, lanes, B)
    if B.turn != "":
        query = _turned(query, also.q_cos, also.q_sin, rows, size.queries, sight.q_row, B)
    state = _unseen(B)
    mine = (query, keys, values, bias, slope, key, index, rows, also, own)
    call = (size, step, sight, numbers)
    if B.side:
        PARTS: tl.constexpr = B.side // B.keys
        line, some, every = listed(also.blocks, step.blocks, batch, head, first // B.side)
        at = at_entry(line, 0, B.side, B.keys)
        for n in range(some * PARTS):
            later = at_entry(line, min(n + 1, every * PARTS - 1), B.side, B.keys)
            state = _add(state, at, mine, call, B, True)
            at = later
        for n in range(some * PARTS, every * PARTS):
            later = at_entry(line, min(n + 1, every * PARTS - 1), B.side, B.keys)
            state = _add(state, at, mine, call, B, False)
            at = later
    else:
        begin, inner, outer, end = seen_keys(own, sight, B)
        if B.left:
            for at in range(begin, inner, B.keys):
                state = _add(state, at, mine, call, B, True)
        for at in range(inner, outer, B.keys):
            state = _add(state, at, mine, call, B, False)
        for at in range(outer, end, B.keys):
            state = _add(state, at, mine, call, B, True)
    high, total, found = state
    if B.spans == "lengths":  # padding may hold anything
        found = tl.where((rows < own.high_q)[:, None], found, 0.0)
        total = tl.where(rows < own.high_q, total, 0.0)
    state = (high, total, found)
    if B.spans == "packed":
        if first < own.high_q:
            _finish(made, out, lse, state, index, rows, first, lines_out, size, numbers, B)
    else:
        _finish(made, out, lse, state, index, rows, first, lines_out, size, numbers, B)


@triton.jit
def _attend_short(
    q, k, v, bias, slopes, seed, also, out, lse, size, step, sight, numbers, batches, several,
    B: tl.constexpr,
):  # fmt: skip
    """Compute a head of ``several`` sequences, each of which has all its keys in one block."""
    head, begin, block = tl.program_id(0), tl.program_id(1) * several, tl.program_id(2)
    slope = 0.0
    if B.slopes:
        slope = tl.load(slopes + head)
    key = keyed(seed, B)
    first = block * B.queries
    rows = first + tl.arange(0, B.queries)
    r, c = rows[:, None], tl.arange(0, B.keys)[None, :]
    shared = bias
    if B.brought == "held":
        place = biased(bias, step, 0, head, size, B)
        inside = (r < size.queries) & (c < size.keys)
        place += r.to(tl.int64) * step.bias[2] + c * step.bias[3]
        shared = tl.load(place, mask=inside, other=0)
    call = (size, step, sight, numbers)
    for batch in range(begin, min(begin + several, batches)):
        own = own_part(also, block, batch, size, sight, B, False)
        there = _at(q, step.q, batch, head, B)
        asked = _placed(there, size.queries, size.features, step.q[2], B.queries, B.features, B)
        there = _at(k, step.k, batch, head // size.shared, B)
        keys = _placed(there, size.keys, size.features, step.k[2], B.keys, B.features, B)
        there = _at(v, step.v, batch, head // size.shared, B)
        values = _placed(there, size.keys, size.wide, step.v[2], B.keys, B.wide, B)
        there = _at(out, step.out, batch, head, B)
        made = _placed(there, size.queries, size.wide, step.out[2], B.queries, B.wide, B)
        beside = shared
        if B.brought == "":
            beside = biased(bias, step, batch, head, size, B)
        index = batch * size.heads + head
        query = _block(asked, first, B.queries, B.features, B)
        mine = (query, keys, values, beside, slope, key, index, rows, also, own)
        state = _add(_unseen(B), 0, mine, call, B, True)
        _finish(made, out, lse, state, index, rows, first, size.queries, size, numbers, B)


_run, _run_short = Launchable(_attend), Launchable(_attend_short)


class Description(NamedTuple):
    """The arguments that describe an attention; for a gradient ``steps`` are those of
    ``attention_grad.py``."""

    size: Lengths
    steps: Any
    sight: Sight
    numbers: Numbers


def attention(
    asked: Description, block: Block, batch: int, warps: int, stages: int, several: int = 0
) -> Callable[..., None]:
    """Return a function (q, k, v, bias, slopes, seed, also, out, lse). bias, slopes, seed and lse
    may be None; lse receives the logarithm of each query's sum of exponentials. ``several``:
    sequences of a program where all keys of one are a block; 0 where they are several blocks."""
    size = asked.size
    blocks = programs(size.queries, block.queries, size, block)
    grid: tuple[int, ...] = grid_of(blocks, batch * size.heads, block)
    if several:
        grid = size.heads, -(-batch // several), blocks

    def run(
        q: Any, k: Any, v: Any, bias: Any, slopes: Any, seed: Any, also: Also, out: Any, lse: Any
    ) -> None:
        beside = [q if t is None else t for t in (bias, slopes, seed)]
        given = (q, k, v, *beside, also, out, lse, *asked)
        if several:
            _run_short(grid, *given, batch, several, warps=warps, stages=stages, B=block)
        else:
            _run(grid, *given, warps=warps, stages=stages, B=block)

    return run
