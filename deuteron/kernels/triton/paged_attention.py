"""Attention over pages of keys and values (``ops/paged_attention.py``): each page is read once for
all query heads that share it, and long sequences are divided among programs.

A program has the queries of all heads that share a key head, as rows of one block, or of several
where they are many, and walks over its part of the keys as ``attention.py`` does. Where a sequence
is divided, programs store results of their parts, and a second kernel merges these, each weighted
by the sum of its exponentials.

An entry of the table that is no page reads page 0 or the last one: never outside of the memory.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.attention import LOG2_E, Numbers, far
from deuteron.kernels.triton.launch import Launchable

# Queries of a head, query heads and key heads, features of q and of v, pages, positions of a page,
# and entries of a row of the table of pages.
Sizes = namedtuple("Sizes", "queries heads of_keys features wide pages positions entries")
# Strides of batches, heads and queries (q, out), and of pages, positions and heads (k, v).
Steps = namedtuple("Steps", "q out k v")
# Rows, keys and lanes of a block, parts of a sequence, whether there are a window and a soft cap,
# and how float32 is multiplied.
Block = namedtuple("Block", "rows keys features wide parts window cap float32")


@triton.jit
def _paged(
    q, keys, values, table, lengths, out, sums, size, step, window, numbers, B: tl.constexpr
):
    index, part = tl.program_id(0), tl.program_id(1)
    batch, of = index // size.of_keys, index % size.of_keys
    shared = size.heads // size.of_keys
    rows = tl.program_id(2) * B.rows + tl.arange(0, B.rows)
    there = rows < shared * size.queries
    head, i = of * shared + rows // size.queries, rows % size.queries
    length = tl.load(lengths + batch).to(tl.int32)
    length = min(length, size.entries * size.positions)
    own = tl.where(there, length - size.queries + i, -1)  # the position of each query
    lanes, wide = tl.arange(0, B.features), tl.arange(0, B.wide)
    at = far(batch) * step.q[0] + head.to(tl.int64) * step.q[1] + i.to(tl.int64) * step.q[2]
    inside = there[:, None] & (lanes < size.features)[None, :]
    query = tl.load(q + at[:, None] + lanes[None, :], mask=inside, other=0.0)
    each = tl.cdiv(tl.cdiv(length, B.keys), B.parts) * B.keys
    begin, end = part * each, min(tl.max(own, 0) + 1, (part + 1) * each)
    if B.window:
        earliest = tl.min(tl.where(there, own, length), 0) - window
        begin = max(begin, max(0, earliest) // B.keys * B.keys)
    high = tl.full((B.rows,), float("-inf"), tl.float32)
    total = tl.zeros((B.rows,), tl.float32)
    found = tl.zeros((B.rows, B.wide), tl.float32)
    for first in range(begin, end, B.keys):
        j = first + tl.arange(0, B.keys)
        live = j < end
        page = tl.load(table + far(batch) * size.entries + j // size.positions, mask=live, other=0)
        page = tl.minimum(tl.maximum(page.to(tl.int64), 0), size.pages - 1)
        slot = (j % size.positions).to(tl.int64)
        place = page * step.k[0] + slot * step.k[1] + of * step.k[2]
        mask = live[:, None] & (lanes < size.features)[None, :]
        k = tl.load(keys + place[:, None] + lanes[None, :], mask=mask, other=0.0)
        place = page * step.v[0] + slot * step.v[1] + of * step.v[2]
        mask = live[:, None] & (wide < size.wide)[None, :]
        v = tl.load(values + place[:, None] + wide[None, :], mask=mask, other=0.0)
        s = tl.dot(query, k.T, input_precision=B.float32)
        if B.cap:
            t = 1.0 - 2.0 / (tl.exp2(s * (numbers.scale / numbers.cap * 2.0 * LOG2_E)) + 1.0)
            s = t * (numbers.cap * LOG2_E)
        else:
            s = s * (numbers.scale * LOG2_E)
        seen = live[None, :] & (j[None, :] <= own[:, None])
        if B.window:
            seen = seen & (j[None, :] >= own[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        now = tl.maximum(high, tl.max(s, 1))
        base = tl.where(now == float("-inf"), 0.0, now)
        p = tl.exp2(s - base[:, None])
        less = tl.exp2(high - base)
        total = total * less + tl.sum(p, 1)
        found = tl.dot(p.to(v.dtype), v, found * less[:, None], input_precision=B.float32)
        high = now
    found = found / tl.where(total == 0.0, 1.0, total)[:, None]
    mask = there[:, None] & (wide < size.wide)[None, :]
    if B.parts == 1:
        at = far(batch) * step.out[0] + head.to(tl.int64) * step.out[1] + i * step.out[2]
        tl.store(out + at[:, None] + wide[None, :], found.to(out.dtype.element_ty), mask=mask)
    else:
        row = (far(batch) * size.heads + head) * size.queries + i
        all_rows = far(tl.num_programs(0) // size.of_keys) * size.heads * size.queries
        place = row + far(part) * all_rows
        tl.store(out + place[:, None] * size.wide + wide[None, :], found, mask=mask)
        lse = tl.where(total == 0.0, float("-inf"), high + tl.log2(total))
        tl.store(sums + place, lse, mask=there)


@triton.jit
def _together(parts, sums, out, size, step, B: tl.constexpr):
    """Merge what the parts of a sequence found for one query."""
    row = far(tl.program_id(0))
    all_rows = far(tl.num_programs(0))
    several, wide = tl.arange(0, B.parts), tl.arange(0, B.wide)
    lse = tl.load(sums + row + several * all_rows)
    high = tl.max(lse, 0)
    weight = tl.exp2(lse - tl.where(high == float("-inf"), 0.0, high))
    whole = tl.sum(weight, 0)
    mask = (several >= 0)[:, None] & (wide < size.wide)[None, :]
    at = (row + several[:, None] * all_rows) * size.wide + wide[None, :]
    found = tl.sum(tl.load(parts + at, mask=mask, other=0.0) * weight[:, None], 0)
    found = found / tl.where(whole == 0.0, 1.0, whole)
    i, head = row % size.queries, row // size.queries % size.heads
    batch = row // (size.queries * size.heads)
    place = batch * step.out[0] + head * step.out[1] + i * step.out[2] + wide
    tl.store(out + place, found.to(out.dtype.element_ty), mask=wide < size.wide)


_run, _merge = Launchable(_paged), Launchable(_together)


def paged_attention(
    size: Sizes,
    steps: Steps,
    window: int,
    numbers: Numbers,
    block: Block,
    batch: int,
    warps: int,
    stages: int,
) -> Callable[..., None]:
    """Return a function (q, keys, values, table, lengths, out)."""
    rows = batch * size.heads * size.queries
    several = size.heads // size.of_keys * size.queries
    grid = (batch * size.of_keys, block.parts, -(-several // block.rows))
    how: dict[str, Any] = {"warps": warps, "stages": stages, "B": block}

    def run(q: Any, keys: Any, values: Any, table: Any, lengths: Any, out: Any) -> None:
        given, settled = (q, keys, values, table, lengths), (size, steps, window, numbers)
        if block.parts == 1:
            _run(grid, *given, out, out, *settled, **how)
            return
        new = {"dtype": torch.float32, "device": q.device}
        parts = torch.empty((block.parts, rows, size.wide), **new)
        sums = torch.empty((block.parts, rows), **new)
        _run(grid, *given, parts, sums, *settled, **how)
        _merge((rows,), parts, sums, out, size, steps, warps=1, stages=1, B=block)

    return run
