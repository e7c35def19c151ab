"""softmax(scale · q·kᵀ + bias) · v in one pass over the keys: no matrix of scores is in memory.

A program has a block of queries of one head and walks over the keys. It keeps, for each query, the
largest score so far, the sum of exponentials below it and the sum of values weighed by them; where
a larger score turns up, both sums are scaled down. Scores are counted in powers of two: the factor
log₂ e is part of the scale. With ``causal`` keys behind the block are never read, and only blocks
on the diagonal are masked. A query that sees no key gives zeros.

Heads and positions may lie in any order, features lie side by side: q, k and v as they come out of
one projection are read where they are.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

# Queries, keys, features of q and k, and of v; query heads, and how many of them share keys.
Lengths = namedtuple("Lengths", "queries keys features wide heads shared")
# From one batch, head and position to the next, of q, k, v, the result, and the bias (there from
# one key to the next, too; 0 along what it does not have).
Steps = namedtuple("Steps", "q k v out bias")
# Queries and keys of a block, lanes for the features, whether it is causal, and what the bias is:
# "none", "added", or "allowed", where it says which keys a query may look at.
Block = namedtuple("Block", "queries keys features wide causal bias")
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(q, k, bias, rows, columns, scale, size, step, B: tl.constexpr, MASK: tl.constexpr):
    """Scores of a block in powers of two, −∞ where a query may not look."""
    s = tl.dot(q, k.T) * scale
    inside = (rows < size.queries)[:, None] & (columns < size.keys)[None, :]
    if B.bias != "none":
        at = rows[:, None].to(tl.int64) * step.bias[2] + columns[None, :] * step.bias[3]
        if B.bias == "allowed":
            may = tl.load(bias + at, mask=inside, other=0)
            s = tl.where(may != 0, s, float("-inf"))
        else:
            s += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32) * LOG2_E
    if MASK:
        seen = (columns < size.keys)[None, :]
        if B.causal:
            seen = seen & (rows[:, None] >= columns[None, :])
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def _add(
    state,
    q,
    keys,
    values,
    bias,
    rows,
    first,
    scale,
    size,
    step,
    B: tl.constexpr,
    MASK: tl.constexpr,
):
    """The largest scores, sums and weighed values after another block of keys."""
    high, total, out = state
    columns = first + tl.arange(0, B.keys)
    s = _scores(q, keys.load([first, 0]), bias, rows, columns, scale, size, step, B, MASK)
    now = tl.maximum(high, tl.max(s, 1))
    base = tl.where(now == float("-inf"), 0.0, now)  # of a query that has seen no key yet
    p = tl.exp2(s - base[:, None])
    less = tl.exp2(high - base)
    v = values.load([first, 0])
    out = tl.dot(p.to(v.dtype), v, out * less[:, None])
    return now, total * less + tl.sum(p, 1), out


@triton.jit
def _attend(q, k, v, bias, out, scale, size, step, B: tl.constexpr):
    head, batch = tl.program_id(1) % size.heads, tl.program_id(1) // size.heads
    first = tl.program_id(0) * B.queries
    b, h, of = batch.to(tl.int64), head.to(tl.int64), (head // size.shared).to(tl.int64)
    q += b * step.q[0] + h * step.q[1]
    k += b * step.k[0] + of * step.k[1]
    v += b * step.v[0] + of * step.v[1]
    out += b * step.out[0] + h * step.out[1]
    if B.bias != "none":
        bias += b * step.bias[0] + h * step.bias[1]
    lanes: tl.constexpr = B.features
    wide: tl.constexpr = B.wide
    asked = tl.make_tensor_descriptor(
        q, [size.queries, size.features], [step.q[2], 1], [B.queries, lanes]
    )
    keys = tl.make_tensor_descriptor(k, [size.keys, size.features], [step.k[2], 1], [B.keys, lanes])
    values = tl.make_tensor_descriptor(v, [size.keys, size.wide], [step.v[2], 1], [B.keys, wide])
    made = tl.make_tensor_descriptor(
        out, [size.queries, size.wide], [step.out[2], 1], [B.queries, wide]
    )
    rows = first + tl.arange(0, B.queries)
    query = asked.load([first, 0])
    state = (
        tl.full((B.queries,), float("-inf"), tl.float32),
        tl.zeros((B.queries,), tl.float32),
        tl.zeros((B.queries, wide), tl.float32),
    )
    end = size.keys
    whole = size.keys // B.keys * B.keys
    if B.causal:
        end = min(size.keys, first + B.queries)
        whole = min(whole, first // B.keys * B.keys)
    for at in range(0, whole, B.keys):
        state = _add(state, query, keys, values, bias, rows, at, scale, size, step, B, False)
    for at in range(whole, end, B.keys):
        state = _add(state, query, keys, values, bias, rows, at, scale, size, step, B, True)
    total = state[1]
    found = state[2] / tl.where(total == 0.0, 1.0, total)[:, None]
    made.store([first, 0], found.to(out.dtype.element_ty))


_run = Launchable(_attend)


def attention(
    size: Lengths, steps: Steps, block: Block, scale: float, batch: int, warps: int, stages: int
) -> Callable[..., None]:
    """A function of q, k, v, the bias or None, and the result."""
    grid = (-(-size.queries // block.queries), batch * size.heads)

    def run(q: torch.Tensor, k: Any, v: Any, bias: Any, out: Any) -> None:
        given = (q, k, v, q if bias is None else bias, out, scale * LOG2_E.value, size, steps)
        _run(grid, *given, warps=warps, stages=stages, B=block)

    return run
