"""Which part of an attention a program computes: where it begins, where its sequence ends, which
blocks it walks over.

Sequences of different lengths, padded or packed, differ only in where a program begins and which
ends it assumes (:class:`Own`). For packed ones the host does not know how many blocks each has:
sequence n takes block numbers from start // block + n on, which leaves room for all of its blocks
and at most two over, whose programs find nothing to do. In a table of blocks a row may be as long
as 100 others (the first ones, which see everything): the long rows of all heads are computed first,
lest the last of them run on alone.
"""

from collections import namedtuple
from typing import Any

import triton
import triton.language as tl

# Lengths (padded) or starts (packed) of queries and keys, the table of blocks and the transposed
# one, tensors that functions of scores captured (t0 … t2), cosines and sines of the rotary angles
# of queries and keys; None for what is not there.
Also = namedtuple("Also", "q_lengths k_lengths blocks turned t0 t1 t2 q_cos q_sin k_cos k_sin")
# A program's sequence: its number, the first query or key of its block, where its queries and its
# keys begin and end, and the position of query 0 among the keys.
Own = namedtuple("Own", "number first low_q high_q low_k high_k offset")


@triton.jit
def far(n):
    """Return n as int64, for offsets in large tensors."""
    return tl.cast(n, tl.int64)


@triton.jit
def lines_of(x, step, batch, head, rows, count, features, LANES: tl.constexpr):
    """Load some positions (rows) of a head; 0 beyond its end."""
    x += far(batch) * step[0] + far(head) * step[1]
    lanes = tl.arange(0, LANES)
    inside = (rows < count)[:, None] & (lanes < features)[None, :]
    return tl.load(
        x + rows.to(tl.int64)[:, None] * step[2] + lanes[None, :], mask=inside, other=0.0
    )


@triton.jit
def _within(n, most):
    return tl.minimum(tl.maximum(n.to(tl.int32), 0), most)


@triton.jit
def _sequence(starts, at, count, lanes, SIDE: tl.constexpr):
    """Return the sequence that block number ``at`` belongs to; sequence n takes block numbers from
    start // SIDE + n on."""
    found = 0
    for begin in range(0, count, 128):
        n = begin + lanes
        start = tl.load(starts + n, mask=n < count, other=0).to(tl.int32)
        found += tl.sum(((start // SIDE + n <= at) & (n < count)).to(tl.int32), 0)
    return max(found - 1, 0)


@triton.jit
def own_part(also, block, batch, size, sight, B: tl.constexpr, OF_KEYS: tl.constexpr, lanes=None):
    """Return the part of a program with this block of queries, or of keys. What lies behind the
    last packed sequence counts as one more sequence, which sees nothing. ``lanes``: the numbers
    from 0 to 127, where they need a layout of their own."""
    SIDE: tl.constexpr = B.keys if OF_KEYS else B.queries
    number, first = batch, block * SIDE
    low_q, low_k = 0, 0
    high_q, high_k = size.queries, size.keys
    if B.spans == "packed":
        starts = also.k_lengths if OF_KEYS else also.q_lengths
        if lanes is None:
            lanes = tl.arange(0, 128)
        number = _sequence(starts, block, size.sequences + 1, lanes, SIDE)
        more = number < size.sequences
        most = size.keys if OF_KEYS else size.queries
        begin = _within(tl.load(starts + number), most)
        first = begin + max(block - (begin // SIDE + number), 0) * SIDE
        low_q = _within(tl.load(also.q_lengths + number), size.queries)
        low_k = _within(tl.load(also.k_lengths + number), size.keys)
        high_q = _within(
            tl.load(also.q_lengths + number + 1, mask=more, other=1 << 30), size.queries
        )
        high_k = _within(tl.load(also.k_lengths + number + 1, mask=more, other=1 << 30), size.keys)
        if OF_KEYS:
            high_q = tl.where(more, high_q, low_q)
        else:
            high_k = tl.where(more, high_k, low_k)
    if B.spans == "lengths":
        if also.q_lengths is not None:
            high_q = _within(tl.load(also.q_lengths + batch), size.queries)
        if also.k_lengths is not None:
            high_k = _within(tl.load(also.k_lengths + batch), size.keys)
    offset = sight.offset + low_k - low_q
    if B.end:
        offset += (high_k - low_k) - (high_q - low_q)
    return Own(number, first, low_q, high_q, low_k, high_k, offset)


@triton.jit
def seen_keys(own, sight, B: tl.constexpr):
    """Return, for a block of queries, where the keys begin that any query sees, where those begin
    and end that all queries see, and where the last one ends, in whole blocks of keys."""
    first, last = own.first, own.first + B.queries - 1
    begin, end = own.low_k, own.high_k
    if B.left:
        begin += max(0, first + own.offset - sight.left - own.low_k) // B.keys * B.keys
    if B.right:
        end = min(end, last + own.offset + sight.right + 1)
    if B.spans != "none":
        end = tl.where(first < own.high_q, end, begin)
    inner, outer = begin, own.high_k
    if B.left:
        near = max(0, last + own.offset - sight.left - own.low_k)
        inner = max(begin, own.low_k + tl.cdiv(near, B.keys) * B.keys)
    if B.right:
        outer = min(outer, max(own.low_k, first + own.offset + sight.right + 1))
    outer = max(own.low_k + (outer - own.low_k) // B.keys * B.keys, inner)
    return begin, min(inner, end), min(outer, end), end


@triton.jit
def listed(table, step, batch, head, block):
    """Return a row of a table of blocks: a pointer to its blocks, how many of these, the first
    ones, are seen in part, and how many blocks there are in all."""
    line = table + far(batch) * step[0] + far(head) * step[1] + far(block) * step[2]
    return line + 3, tl.load(line), tl.load(line + 1)


@triton.jit
def in_turn(table, step, batch, head, turn, SIDE: tl.constexpr, PART: tl.constexpr):
    """Return the block that a program computes, by the table's order, longest rows first; blocks
    are counted in parts, PART long, of the table's blocks."""
    PARTS: tl.constexpr = SIDE // PART
    line = table + far(batch) * step[0] + far(head) * step[1] + far(turn // PARTS) * step[2]
    return tl.load(line + 2) * PARTS + turn % PARTS


@triton.jit
def at_entry(line, n, SIDE: tl.constexpr, PART: tl.constexpr):
    """Return the position where the n-th block of a table's row begins; n counts parts of
    blocks."""
    PARTS: tl.constexpr = SIDE // PART
    return tl.load(line + n // PARTS) * SIDE + n % PARTS * PART


def grid_of(blocks: int, heads: int, block: Any) -> tuple[int, int]:
    """Return the grid. With a table of blocks heads are the first dimension: programs along it
    start one after the other."""
    return (heads, blocks) if block.side else (blocks, heads)


def is_uneven(block: Any) -> bool:
    """Whether the host does not know how many blocks each program walks over."""
    return block.side > 0 or block.spans != "none"


def programs(length: int, side: int, size: Any, block: Any) -> int:
    """Return how many blocks ``length`` positions take: with packed sequences also those that are
    not filled, and one for what lies behind the last; with a table all parts of its blocks."""
    if block.side:
        return -(-length // block.side) * (block.side // side)
    if block.spans == "packed":
        return length // side + size.sequences + 1
    return -(-length // side)
