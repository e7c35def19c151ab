"""The gradients of attention: weights are computed again, block by block, from the sums that the
forward pass kept, so that no matrix of scores is in memory.

With p the weights, g the gradient of the result, and δ the sum of g · result for each query, less
the gradient of its logarithm of sums, the gradient of the scores is p · (g·vᵀ − δ). Three kernels:
δ; a block of keys and values walks over the queries that see it, of all heads that share it; a
block of queries walks over its keys. Each number is summed by one program in one order, so runs
give the same bits. The gradient of a bias is a fourth: a block of the bias walks over all that it
is added to.
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
    Lengths,
    Numbers,
    Sight,
    biased,
    far,
    hidden,
    kept,
    keyed,
    scored,
    seen_keys,
)
from deuteron.kernels.triton.launch import Launchable

# As those of the forward pass, with the gradient; dq, dk and dv lie in row-major order.
Steps = namedtuple("Steps", "q k v out bias grad")
# The tensors that are read: bias, slopes and seed may be any where there are none.
Given = namedtuple("Given", "grad q k v out lse bias slopes seed")


@triton.jit
def _delta(grad, out, more, delta, size, step, B: tl.constexpr):
    index = tl.program_id(1)
    head, batch = far(index % size.heads), far(index // size.heads)
    rows = tl.program_id(0) * B.queries + tl.arange(0, B.queries)
    lanes = tl.arange(0, B.wide)
    inside = (rows < size.queries)[:, None] & (lanes < size.wide)[None, :]
    at = rows.to(tl.int64)[:, None]
    grad += batch * step.grad[0] + head * step.grad[1]
    out += batch * step.out[0] + head * step.out[1]
    g = tl.load(grad + at * step.grad[2] + lanes[None, :], mask=inside, other=0.0)
    o = tl.load(out + at * step.out[2] + lanes[None, :], mask=inside, other=0.0)
    found = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    place = far(index) * size.queries + rows
    if more is not None:
        found -= tl.load(more + place, mask=rows < size.queries, other=0.0)
    tl.store(delta + place, found, mask=rows < size.queries)


@triton.jit
def _lines(x, step, batch, head, rows, count, features, LANES: tl.constexpr):
    """Some positions of a head, 0 beyond its end."""
    x += far(batch) * step[0] + far(head) * step[1]
    lanes = tl.arange(0, LANES)
    inside = (rows < count)[:, None] & (lanes < features)[None, :]
    return tl.load(
        x + rows.to(tl.int64)[:, None] * step[2] + lanes[None, :], mask=inside, other=0.0
    )


@triton.jit
def _of_rows(x, index, rows, size, other):
    """A number for each query of a head."""
    return tl.load(x + far(index) * size.queries + rows, mask=rows < size.queries, other=other)


@triton.jit
def _slopes(
    s, dp, t, delta, bias, key, index, head, first, at, rows, r, c, size, step, sight, numbers,
    B: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Of a block: what weighs the values, and the gradients of the scores after and before the soft
    cap. ``s`` is q·kᵀ and ``dp`` g·vᵀ, or both turned, from the query ``first`` and the key ``at``
    on; r and c are the rows and columns as they lie there."""
    slope = 0.0
    if B.slopes:
        slope = tl.load(t.slopes + head)
    s, bend = scored(s, bias, slope, r, c, first, at, size, step, sight, numbers, B, TURNED)
    s = hidden(s, r, c, size, sight, B)
    base = _of_rows(t.lse, index, rows, size, float("inf")) * LOG2_E
    base = tl.where(base == float("-inf"), 0.0, base)
    d = _of_rows(delta, index, rows, size, 0.0)
    if TURNED:
        base, d = base[None, :], d[None, :]
    else:
        base, d = base[:, None], d[:, None]
    p = tl.exp2(s - base)
    used = p
    if B.dropout:
        stays = kept(key, index, r, c, size, numbers, B)
        used = tl.where(stays, p * numbers.factor, 0.0)
        dp = tl.where(stays, dp * numbers.factor, 0.0)
    after = p * (dp - d)
    return used, after, after * bend


@triton.jit
def _for_keys(t, delta, dk, dv, size, step, sight, numbers, B: tl.constexpr):
    of = tl.program_id(1)
    serving = size.heads // size.shared
    batch, of = of // serving, of % serving
    first = tl.program_id(0) * B.keys
    columns = first + tl.arange(0, B.keys)
    k = _lines(t.k, step.k, batch, of, columns, size.keys, size.features, B.features)
    v = _lines(t.v, step.v, batch, of, columns, size.keys, size.wide, B.wide)
    c = columns[:, None]
    sum_k = tl.zeros((B.keys, B.features), tl.float32)
    sum_v = tl.zeros((B.keys, B.wide), tl.float32)
    key = keyed(t.seed, B)
    begin, end = 0, size.queries
    if B.right:
        begin = max(0, first - sight.offset - sight.right) // B.queries * B.queries
    if B.left:
        end = min(end, first + B.keys - sight.offset + sight.left)
    for share in range(size.shared):
        head = of * size.shared + share
        index = batch * size.heads + head
        bias = biased(t.bias, step, batch, head, size, B)
        for start in range(begin, end, B.queries):
            rows = start + tl.arange(0, B.queries)
            q = _lines(t.q, step.q, batch, head, rows, size.queries, size.features, B.features)
            g = _lines(t.grad, step.grad, batch, head, rows, size.queries, size.wide, B.wide)
            s, dp = tl.dot(k, q.T), tl.dot(v, g.T)
            used, _after, ds = _slopes(
                s, dp, t, delta, bias, key, index, head, start, first, rows, rows[None, :], c, size,
                step, sight, numbers, B, True,
            )  # fmt: skip
            sum_v = tl.dot(used.to(g.dtype), g, sum_v)
            sum_k = tl.dot(ds.to(q.dtype), q, sum_k)
    place = far(batch * serving + of) * size.keys + columns
    inside = columns < size.keys
    lanes, wide = tl.arange(0, B.features), tl.arange(0, B.wide)
    tl.store(
        dk + place[:, None] * size.features + lanes[None, :],
        (sum_k * numbers.scale).to(dk.dtype.element_ty),
        mask=inside[:, None] & (lanes < size.features)[None, :],
    )
    tl.store(
        dv + place[:, None] * size.wide + wide[None, :],
        sum_v.to(dv.dtype.element_ty),
        mask=inside[:, None] & (wide < size.wide)[None, :],
    )


@triton.jit
def _for_queries(t, delta, dq, size, step, sight, numbers, B: tl.constexpr):
    index = tl.program_id(1)
    head, batch = index % size.heads, index // size.heads
    of = head // size.shared
    first = tl.program_id(0) * B.queries
    bias, key = biased(t.bias, step, batch, head, size, B), keyed(t.seed, B)
    rows = first + tl.arange(0, B.queries)
    q = _lines(t.q, step.q, batch, head, rows, size.queries, size.features, B.features)
    g = _lines(t.grad, step.grad, batch, head, rows, size.queries, size.wide, B.wide)
    total = tl.zeros((B.queries, B.features), tl.float32)
    begin, _inner, _outer, end = seen_keys(first, size, sight, B)
    for at in range(begin, end, B.keys):
        columns = at + tl.arange(0, B.keys)
        k = _lines(t.k, step.k, batch, of, columns, size.keys, size.features, B.features)
        v = _lines(t.v, step.v, batch, of, columns, size.keys, size.wide, B.wide)
        s, dp = tl.dot(q, k.T), tl.dot(g, v.T)
        _used, _after, ds = _slopes(
            s, dp, t, delta, bias, key, index, head, first, at, rows, rows[:, None],
            columns[None, :], size, step, sight, numbers, B, False,
        )  # fmt: skip
        total = tl.dot(ds.to(k.dtype), k, total)
    lanes = tl.arange(0, B.features)
    place = far(index) * size.queries + rows
    tl.store(
        dq + place[:, None] * size.features + lanes[None, :],
        (total * numbers.scale).to(dq.dtype.element_ty),
        mask=(rows < size.queries)[:, None] & (lanes < size.features)[None, :],
    )


@triton.jit
def _for_bias(t, delta, dbias, shape, batches, size, step, sight, numbers, B: tl.constexpr):
    """``shape``: that of the bias; where it is 1, all that it is added to is summed."""
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
    key = keyed(t.seed, B)
    for batch in range(low_b, high_b):
        for head in range(low_h, high_h):
            of = head // size.shared
            bias = biased(t.bias, step, batch, head, size, B)
            for first in range(low_q, high_q, B.queries):
                rows = first + tl.arange(0, B.queries)
                q = _lines(t.q, step.q, batch, head, rows, size.queries, size.features, B.features)
                g = _lines(t.grad, step.grad, batch, head, rows, size.queries, size.wide, B.wide)
                for at in range(low_k, high_k, B.keys):
                    columns = at + tl.arange(0, B.keys)
                    k = _lines(
                        t.k, step.k, batch, of, columns, size.keys, size.features, B.features
                    )
                    v = _lines(t.v, step.v, batch, of, columns, size.keys, size.wide, B.wide)
                    s, dp = tl.dot(q, k.T), tl.dot(g, v.T)
                    _used, after, _ds = _slopes(
                        s, dp, t, delta, bias, key, batch * size.heads + head, head, first, at,
                        rows, rows[:, None], columns[None, :], size, step, sight, numbers, B, False,
                    )  # fmt: skip
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


_run_delta, _run_keys, _run_queries, _run_bias = map(
    Launchable, (_delta, _for_keys, _for_queries, _for_bias)
)


def _launcher(
    size: Lengths,
    steps: Steps,
    sight: Sight,
    numbers: Numbers,
    block: Block,
    batch: int,
    warps: int,
    stages: int,
) -> tuple[Callable[..., None], Callable[[Given, Any], torch.Tensor]]:
    """What launches a kernel with all of this, and what makes δ."""
    settled = (size, steps, sight, numbers)
    whole = (-(-size.queries // block.queries), batch * size.heads)

    def delta(t: Given, more: Any) -> torch.Tensor:
        found = torch.empty(
            (batch, size.heads, size.queries), dtype=torch.float32, device=t.q.device
        )
        _run_delta(whole, t.grad, t.out, more, found, size, steps, warps=4, stages=1, B=block)
        return found

    def launch(kernel: Launchable, grid: tuple[int, ...], *given: Any) -> None:
        kernel(grid, *given, *settled, warps=warps, stages=stages, B=block)

    return launch, delta


def attention_grad(
    size: Lengths, steps: Steps, sight: Sight, numbers: Numbers, block: Block, batch: int, *how: int
) -> Callable[..., None]:
    """A function of what is read, the gradient of the sums or None, dq, dk and dv."""
    launch, delta = _launcher(size, steps, sight, numbers, block, batch, *how)
    of_keys = (-(-size.keys // block.keys), batch * size.heads // size.shared)
    of_queries = (-(-size.queries // block.queries), batch * size.heads)

    def run(t: Given, more: Any, dq: Any, dk: Any, dv: Any) -> None:
        d = delta(t, more)
        launch(_run_keys, of_keys, t, d, dk, dv)
        launch(_run_queries, of_queries, t, d, dq)

    return run


def attention_bias_grad(
    size: Lengths,
    steps: Steps,
    sight: Sight,
    numbers: Numbers,
    block: Block,
    batch: int,
    *how: int,
    shape: tuple[int, ...],
) -> Callable[..., None]:
    """A function of what is read, the gradient of the sums or None, and that of a bias of this
    shape."""
    launch, delta = _launcher(size, steps, sight, numbers, block, batch, *how)
    grid = (-(-shape[2] // block.queries), -(-shape[3] // block.keys), shape[0] * shape[1])

    def run(t: Given, more: Any, dbias: Any) -> None:
        launch(_run_bias, grid, t, delta(t, more), dbias, shape, batch)

    return run
