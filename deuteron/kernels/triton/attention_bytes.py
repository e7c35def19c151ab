"""Attention on 8-bit numbers with scales (``ops/attention_bytes.py``), in one pass over the keys,
as in ``attention.py``: a program has a block of queries of one head.

Scores come out of the matrix units as int32, or, for 8-bit floats, as float32, and are multiplied
by the scales of their query and their key. Where values have 8 bits, weights are rounded to
multiples of 1/127 or to 8-bit floats of up to 448. The sums over a block of keys are added up in
float32 outside of the matrix units, which keep 14 bits of sums of 8-bit floats. The rounded weights
are what is added up for the denominator.
"""

from collections import namedtuple
from collections.abc import Callable

import triton
import triton.language as tl

from deuteron.kernels.triton.attention import LOG2_E
from deuteron.kernels.triton.attention_parts import far, lines_of
from deuteron.kernels.triton.launch import Launchable

# Queries, keys, features of q and of v, query heads, how many share a key head, and the position of
# query 0 among the keys.
Sizes = namedtuple("Sizes", "queries keys features wide heads shared offset")
# Strides of batches, heads and positions; those of v's scales are of batches, heads and features.
Steps = namedtuple("Steps", "q k v out q_scale k_scale v_scale")
# Queries, keys and lanes of a block; causal: a query sees no later keys; whole: q and k are
# integers; most: weights are multiplied by it before they are rounded to the type of v: 127, 448,
# or 1 where v has 16 bits or more.
Block = namedtuple("Block", "queries keys features wide causal whole most")


@triton.jit
def _attend(q, k, v, q_scale, k_scale, v_scale, out, size, step, scale, B: tl.constexpr):
    index, block = tl.program_id(1), tl.program_id(0)
    if B.causal:
        block = tl.num_programs(0) - 1 - block  # those with the most keys first
    batch, head = far(index // size.heads), index % size.heads
    of = far(head // size.shared)
    head = far(head)
    rows = block * B.queries + tl.arange(0, B.queries)
    there = rows < size.queries
    wide = tl.arange(0, B.wide)
    query = lines_of(q, step.q, batch, head, rows, size.queries, size.features, B.features)
    at = q_scale + batch * step.q_scale[0] + head * step.q_scale[1]
    by = tl.load(at + rows.to(tl.int64) * step.q_scale[2], mask=there, other=0.0)
    by = by * (scale * LOG2_E)
    k_scale += batch * step.k_scale[0] + of * step.k_scale[1]
    high = tl.full((B.queries,), float("-inf"), tl.float32)
    total = tl.zeros((B.queries,), tl.float32)
    found = tl.zeros((B.queries, B.wide), tl.float32)
    end = size.keys
    if B.causal:
        end = min(end, (block + 1) * B.queries + size.offset)
    for first in range(0, end, B.keys):
        j = first + tl.arange(0, B.keys)
        live = j < size.keys
        keys = lines_of(k, step.k, batch, of, j, size.keys, size.features, B.features)
        each = tl.load(k_scale + j.to(tl.int64) * step.k_scale[2], mask=live, other=0.0)
        if B.whole:
            s = tl.dot(query, keys.T, out_dtype=tl.int32).to(tl.float32)
        else:
            s = tl.dot(query, keys.T)
        s = s.to(tl.float32) * by[:, None] * each[None, :]
        seen = live[None, :]
        if B.causal:
            seen = seen & (j[None, :] <= rows[:, None] + size.offset)
        s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(high, tl.max(s, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - base[:, None])
        less = tl.exp2(high - base)
        values = lines_of(v, step.v, batch, of, j, size.keys, size.wide, B.wide)
        if B.most == 127:
            p = tl.floor(p * 127.0 + 0.5)
            found = found * less[:, None]
            found += tl.dot(p.to(tl.int8), values, out_dtype=tl.int32).to(tl.float32)
        elif B.most == 448:
            small = (p * 448.0).to(values.dtype)
            p = small.to(tl.float32)
            found = found * less[:, None] + tl.dot(small, values)
        else:
            found = tl.dot(p.to(values.dtype), values, found * less[:, None])
        total = total * less + tl.sum(p, 1)
        high = now
    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    if v_scale is not None:
        at = v_scale + batch * step.v_scale[0] + of * step.v_scale[1] + wide * step.v_scale[2]
        found = found * tl.load(at, mask=wide < size.wide, other=0.0)[None, :]
    at = out + batch * step.out[0] + head * step.out[1]
    at = at + rows.to(tl.int64)[:, None] * step.out[2] + wide[None, :]
    mask = there[:, None] & (wide < size.wide)[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=mask)


_run = Launchable(_attend)


def attention_bytes(
    size: Sizes, steps: Steps, scale: float, block: Block, batch: int, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (q, k, v, q_scale, k_scale, v_scale, out); v_scale may be None."""
    grid = (-(-size.queries // block.queries), batch * size.heads)
    return _run.over(grid, size, steps, scale, warps=warps, stages=stages, B=block)
