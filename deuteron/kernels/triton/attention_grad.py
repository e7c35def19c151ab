"""The gradients of attention: weights are computed again, block by block, from the log-sums (lse)
that the forward pass kept, so that no matrix of scores is in memory.

With p the weights, g the gradient of the result, and δ the sum of g · result for each query, less
the gradient of its log-sum, the gradient of the scores is p · (g·vᵀ − δ). The first kernel computes
δ, and the log-sums in powers of two. In the second a program with a block of keys and values walks
over the queries that see it, of all heads that share it; in the third a program with a block of
queries walks over its keys. One program adds up each number in one order, so runs give the same
bits. A fourth kernel makes the gradient of a bias: a program with a block of the bias walks over
all that it is added to. Sequences of different lengths and tables of blocks are treated as in the
forward pass; a block of keys uses the transposed table.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.attention import (
    LOG2_E,
    Block,
    Description,
    biased,
    hidden,
    kept,
    keyed,
    scored,
)
from deuteron.kernels.triton.attention_parts import (
    at_entry,
    far,
    grid_of,
    in_turn,
    lines_of,
    listed,
    own_part,
    programs,
    seen_keys,
)
from deuteron.kernels.triton.launch import Launchable

# Those of the forward pass, and of the result's gradient; dq, dk and dv lie in row-major order.
Steps = namedtuple("Steps", "q k v out bias blocks turned grad")
# The tensors that are read. Where there is no bias, slopes or seed, any tensor may stand in for it;
# also: the other optional tensors.
Given = namedtuple("Given", "grad q k v out lse bias slopes seed also")


@triton.jit
def _sums(grad, out, lse, more, sums, counters, size, step, B: tl.constexpr):
    """Store two numbers for each query: what is subtracted from its scores, in powers of two, so
    that they become weights, and δ. The first is 0 for a query that saw no key, whose scores are
    all −∞. Sets the two ``counters`` to 0."""
    index = tl.program_id(1)
    head, batch = index % size.heads, index // size.heads
    rows = tl.program_id(0) * B.queries + tl.arange(0, B.queries)
    g = lines_of(grad, step.grad, batch, head, rows, size.queries, size.wide, B.wide)
    o = lines_of(out, step.out, batch, head, rows, size.queries, size.wide, B.wide)
    found = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    place = far(index) * size.queries + rows
    there = rows < size.queries
    if more is not None:
        found -= tl.load(more + place, mask=there, other=0.0)
    base = tl.load(lse + place, mask=there, other=0.0) * LOG2_E
    tl.store(sums[0] + place, tl.where(base == float("-inf"), 0.0, base), mask=there)
    tl.store(sums[1] + place, found, mask=there)
    if counters is not None:
        if (index == 0) & (tl.program_id(0) == 0):
            tl.store(counters + tl.arange(0, 2), tl.zeros((2,), tl.int32))


@triton.jit
def _write(made, found, place, inside, width, LANES: tl.constexpr):
    """Store those rows of a result in row-major order that are ``inside``, each at its place."""
    lanes = tl.arange(0, LANES)
    at = made + place[:, None] * width + lanes[None, :]
    mask = inside[:, None] & (lanes < width)[None, :]
    tl.store(at, found.to(made.dtype.element_ty), mask=mask)


@triton.jit
def weights(s, by, base, key, own, index, r, c, size, numbers, B: tl.constexpr):
    """Return the weights of a block, the weights after dropout, with its factor, and which of them
    dropout keeps. s · ``by`` are scores in powers of two; ``base`` is the first of the two numbers
    of each query; r and c are rows and columns; all have the layout of s."""
    p = tl.exp2(s * by - base)
    if B.score is not None:  # it may make nan of queries beyond the end
        p = tl.where(r < own.high_q, p, 0.0)
    used, stays = p, r
    if B.dropout:
        stays = kept(key, index, r, c, size, numbers)
        used = tl.where(stays, p * numbers.factor, 0.0)
    return p, used, stays


@triton.jit
def sloping(p, stays, dp, d, bend, numbers, B: tl.constexpr):
    """Return the gradients of scores after and before the soft cap, from weights, ``dp`` = g·vᵀ and
    the second number of each query, δ."""
    if B.dropout:
        dp = tl.where(stays, dp * numbers.factor, 0.0)
    after = p * (dp - d)
    before = after * bend
    if B.slope is not None:  # derivatives may be anything, nan too, at hidden keys
        before = tl.where(p == 0.0, 0.0, before)
    return after, before


@triton.jit
def _slopes(
    s, dp, t, sums, bias, key, own, index, head, first, at, rows, r, c, call,
    B: tl.constexpr, MASK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Return, for a block, the weights on the values, and the gradients of the scores after and
    before the soft cap. ``s`` is q·kᵀ and ``dp`` is g·vᵀ, or both are transposed, from the query
    ``first`` and the key ``at`` on; r and c are rows and columns in the layout of s."""
    size, step, sight, numbers = call
    slope = 0.0
    if B.slopes:
        slope = tl.load(t.slopes + head)
    s, bend = scored(
        s, bias, slope, t.also, own, head, r, c, first, at, size, step, numbers, B, TURNED
    )
    s = hidden(s, t.also, own, head, r, c, sight, B, MASK)
    place, there = far(index) * size.queries + rows, rows < own.high_q
    base = tl.load(sums[0] + place, mask=there, other=float("inf"))
    d = tl.load(sums[1] + place, mask=there, other=0.0)
    if TURNED:
        base, d = base[None, :], d[None, :]
    else:
        base, d = base[:, None], d[:, None]
    p, used, stays = weights(s, 1.0, base, key, own, index, r, c, size, numbers, B)
    after, before = sloping(p, stays, dp, d, bend, numbers, B)
    return used, after, before


@triton.jit
def _add_query(found, start, block, t, sums, call, B: tl.constexpr, MASK: tl.constexpr):
    """Return the gradients of a block of keys and values after one more block of queries, which
    begins at ``start``."""
    sum_k, sum_v = found
    k, v, bias, key, own, batch, head, c = block
    size, step, _sight, _numbers = call
    index = batch * size.heads + head
    rows = start + tl.arange(0, B.queries)
    q = lines_of(t.q, step.q, batch, head, rows, own.high_q, size.features, B.features)
    g = lines_of(t.grad, step.grad, batch, head, rows, own.high_q, size.wide, B.wide)
    s, dp = tl.dot(k, q.T), tl.dot(v, g.T)
    used, _after, ds = _slopes(
        s, dp, t, sums, bias, key, own, index, head, start, own.first, rows, rows[None, :], c, call,
        B, MASK, True,
    )  # fmt: skip
    sum_v = tl.dot(used.to(g.dtype), g, sum_v)
    sum_k = tl.dot(ds.to(q.dtype), q, sum_k)
    return sum_k, sum_v


@triton.jit
def _for_keys(t, sums, dk, dv, size, step, sight, numbers, B: tl.constexpr):
    serving = size.heads // size.shared
    if B.side:  # in the order of the first head that shares it
        of, turn = tl.program_id(0), tl.program_id(1)
        batch, of = of // serving, of % serving
        block = in_turn(t.also.turned, step.turned, batch, of * size.shared, turn, B.side, B.keys)
    else:
        of, block = tl.program_id(1), tl.program_id(0)
        batch, of = of // serving, of % serving
    own = own_part(t.also, block, batch, size, sight, B, True)
    first = own.first
    columns = first + tl.arange(0, B.keys)
    k = lines_of(t.k, step.k, batch, of, columns, own.high_k, size.features, B.features)
    v = lines_of(t.v, step.v, batch, of, columns, own.high_k, size.wide, B.wide)
    c = columns[:, None]
    call = (size, step, sight, numbers)
    found = tl.zeros((B.keys, B.features), tl.float32), tl.zeros((B.keys, B.wide), tl.float32)
    key = keyed(t.seed, B)
    begin, end = own.low_q, own.high_q
    if B.right:
        begin += max(0, first - own.offset - sight.right - own.low_q) // B.queries * B.queries
    if B.left:
        end = min(end, first + B.keys - own.offset + sight.left)
    if B.spans != "none":
        end = tl.where(first < own.high_k, end, begin)
    for share in range(size.shared):
        head = of * size.shared + share
        bias = biased(t.bias, step, batch, head, size, B)
        mine = (k, v, bias, key, own, batch, head, c)
        if B.side:
            PARTS: tl.constexpr = B.side // B.queries
            line, some, every = listed(t.also.turned, step.turned, batch, head, first // B.side)
            for n in range(some * PARTS):
                start = at_entry(line, n, B.side, B.queries)
                found = _add_query(found, start, mine, t, sums, call, B, True)
            for n in range(some * PARTS, every * PARTS):
                start = at_entry(line, n, B.side, B.queries)
                found = _add_query(found, start, mine, t, sums, call, B, False)
        else:
            for start in range(begin, end, B.queries):
                found = _add_query(found, start, mine, t, sums, call, B, True)
    sum_k, sum_v = found
    place = far(batch * serving + of) * size.keys + columns
    inside = columns < (own.high_k if B.spans == "packed" else size.keys)
    _write(dk, sum_k * numbers.scale, place, inside, size.features, B.features)
    _write(dv, sum_v, place, inside, size.wide, B.wide)


@triton.jit
def _by_keys(at, block, t, sums, call, B: tl.constexpr, MASK: tl.constexpr):
    """Return, for a block of queries and the block of keys that begins at ``at``, the keys, and the
    gradients of the scores after and before the soft cap."""
    q, g, bias, key, own, batch, index, head, first, rows = block
    size, step, _sight, _numbers = call
    of = head // size.shared
    columns = at + tl.arange(0, B.keys)
    k = lines_of(t.k, step.k, batch, of, columns, own.high_k, size.features, B.features)
    v = lines_of(t.v, step.v, batch, of, columns, own.high_k, size.wide, B.wide)
    s, dp = tl.dot(q, k.T), tl.dot(g, v.T)
    _used, after, ds = _slopes(
        s, dp, t, sums, bias, key, own, index, head, first, at, rows, rows[:, None],
        columns[None, :], call, B, MASK, False,
    )  # fmt: skip
    return k, after, ds


@triton.jit
def _add_key(total, at, block, t, sums, call, B: tl.constexpr, MASK: tl.constexpr):
    """Return the gradient of a block of queries after one more block of keys, which begins at
    ``at``."""
    k, _after, ds = _by_keys(at, block, t, sums, call, B, MASK)
    return tl.dot(ds.to(k.dtype), k, total)


@triton.jit
def _for_queries(t, sums, dq, size, step, sight, numbers, B: tl.constexpr):
    if B.side:
        index, block = tl.program_id(0), tl.program_id(1)
    else:
        index, block = tl.program_id(1), tl.program_id(0)
    head, batch = index % size.heads, index // size.heads
    if B.side:
        block = in_turn(t.also.blocks, step.blocks, batch, head, block, B.side, B.queries)
    elif B.right:
        block = tl.num_programs(0) - 1 - block  # those with the most keys first
    own = own_part(t.also, block, batch, size, sight, B, False)
    bias, key = biased(t.bias, step, batch, head, size, B), keyed(t.seed, B)
    rows = own.first + tl.arange(0, B.queries)
    q = lines_of(t.q, step.q, batch, head, rows, own.high_q, size.features, B.features)
    g = lines_of(t.grad, step.grad, batch, head, rows, own.high_q, size.wide, B.wide)
    total = tl.zeros((B.queries, B.features), tl.float32)
    mine = (q, g, bias, key, own, batch, index, head, own.first, rows)
    call = (size, step, sight, numbers)
    if B.side:
        PARTS: tl.constexpr = B.side // B.keys
        line, some, every = listed(t.also.blocks, step.blocks, batch, head, own.first // B.side)
        for n in range(some * PARTS):
            at = at_entry(line, n, B.side, B.keys)
            total = _add_key(total, at, mine, t, sums, call, B, True)
        for n in range(some * PARTS, every * PARTS):
            at = at_entry(line, n, B.side, B.keys)
            total = _add_key(total, at, mine, t, sums, call, B, False)
    else:
        begin, _inner, _outer, end = seen_keys(own, sight, B)
        for at in range(begin, end, B.keys):
            total = _add_key(total, at, mine, t, sums, call, B, True)
    place = far(index) * size.queries + rows
    inside = rows < (own.high_q if B.spans == "packed" else size.queries)
    _write(dq, total * numbers.scale, place, inside, size.features, B.features)


@triton.jit
def _for_bias(t, sums, dbias, shape, batches, size, step, sight, numbers, B: tl.constexpr):
    """``shape``: that of the bias; in dimensions of size 1 the sum goes over all that it is added
    to."""
    index = tl.program_id(2)
    own_batch, own_head = index // shape[1], index % shape[1]
    low_b, high_b = own_batch, own_batch + 1
    if shape[0] == 1:
        low_b, high_b = 0, batches
    low_h, high_h = own_head, own_head + 1
    if shape[1] == 1:
        low_h, high_h = 0, size.heads
    low_q, high_q = tl.program_id(0) * B.queries, (tl.program_id(0) + 1) * B.queries
    if shape[2] == 1:
        low_q, high_q = 0, size.queries
    low_k, high_k = tl.program_id(1) * B.keys, (tl.program_id(1) + 1) * B.keys
    if shape[3] == 1:
        low_k, high_k = 0, size.keys
    total = tl.zeros((B.queries, B.keys), tl.float32)
    call = (size, step, sight, numbers)
    key = keyed(t.seed, B)
    for batch in range(low_b, high_b):
        own = own_part(t.also, 0, batch, size, sight, B, False)
        for head in range(low_h, high_h):
            asking = batch * size.heads + head
            bias = biased(t.bias, step, batch, head, size, B)
            for first in range(low_q, high_q, B.queries):
                rows = first + tl.arange(0, B.queries)
                q = lines_of(t.q, step.q, batch, head, rows, own.high_q, size.features, B.features)
                g = lines_of(t.grad, step.grad, batch, head, rows, own.high_q, size.wide, B.wide)
                mine = (q, g, bias, key, own, batch, asking, head, first, rows)
                for at in range(low_k, high_k, B.keys):
                    _k, after, _ds = _by_keys(at, mine, t, sums, call, B, True)
                    columns = at + tl.arange(0, B.keys)
                    inside = (rows < size.queries)[:, None] & (columns < size.keys)[None, :]
                    total += tl.where(inside, after, 0.0)
    rows = tl.program_id(0) * B.queries + tl.arange(0, B.queries)
    columns = tl.program_id(1) * B.keys + tl.arange(0, B.keys)
    start = dbias + far(index) * shape[2] * shape[3]
    at = rows.to(tl.int64)[:, None] * shape[3] + columns[None, :]
    if shape[2] == 1:
        total = tl.broadcast_to(tl.sum(total, 0)[None, :], (B.queries, B.keys))
    if shape[3] == 1:
        total = tl.broadcast_to(tl.sum(total, 1)[:, None], (B.queries, B.keys))
    inside = (rows < shape[2])[:, None] & (columns < shape[3])[None, :]
    tl.store(start + at, total.to(dbias.dtype.element_ty), mask=inside)


_run_sums, _run_keys, _run_queries, _run_bias = map(
    Launchable, (_sums, _for_keys, _for_queries, _for_bias)
)


Shape = tuple[int, ...]


def sums_of(
    asked: Description, block: Block, batch: int
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function (t, more, counters) that makes the two numbers of each query; more: the
    gradient of the log-sums, or None; counters: two that are set to 0, or None."""
    size = asked.size
    shape = (batch, size.heads, size.queries)
    whole = (-(-size.queries // block.queries), batch * size.heads)

    def run(t: Given, more: Any, counters: Any = None) -> tuple[torch.Tensor, ...]:
        found = tuple(torch.empty(shape, dtype=torch.float32, device=t.q.device) for _ in range(2))
        given = t.grad, t.out, t.lse, more, found, counters
        _run_sums(whole, *given, size, asked.steps, stages=1, B=block)
        return found

    return run


def attention_grad(
    asked: Description,
    block: Block,
    batch: int,
    warps: int,
    stages: int,
    shape: Shape | None = None,
) -> Callable[..., None]:
    """Return a function (t, more, dq, dk, dv, dbias); more: the gradient of the log-sums, or None;
    gradients that are not wanted are None. ``shape``: that of the bias."""
    sums, size = sums_of(asked, block, batch), asked.size
    serving = batch * size.heads // size.shared
    of_keys = grid_of(programs(size.keys, block.keys, size, block), serving, block)
    of_queries = grid_of(
        programs(size.queries, block.queries, size, block), batch * size.heads, block
    )
    how: Any = {"warps": warps, "stages": stages, "B": block}
    for_bias = bias_grad(asked, block, batch, warps, stages, shape)

    def run(t: Given, more: Any, dq: Any, dk: Any, dv: Any, dbias: Any = None) -> None:
        found = sums(t, more)
        if dk is not None or dv is not None:
            _run_keys(of_keys, t, found, room_for(t.k, dk), room_for(t.v, dv), *asked, **how)
        if dq is not None:
            _run_queries(of_queries, t, found, dq, *asked, **how)
        if dbias is not None:
            for_bias(t, found, dbias)

    return run


def room_for(x: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    """Return ``grad``, or, where it is not wanted, scratch memory for it."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device) if grad is None else grad


def bias_grad(
    asked: Description, block: Block, batch: int, warps: int, stages: int, shape: Shape | None
) -> Callable[..., None]:
    """Return a function of what is read, the two numbers of each query, and the gradient of a bias
    of this shape."""
    lines, columns, each = (0, 0, 0) if shape is None else (*shape[2:], shape[0] * shape[1])
    grid = (-(-lines // block.queries), -(-columns // block.keys), each)
    return _run_bias.over(grid, shape, batch, *asked, warps=warps, stages=stages, B=block)
