"""Attention written out, for some queries of one sequence at a time. The references of
``attention.py`` and ``attention_grad.py`` are built from these functions.

Each part of the queries is computed without the keys that none of its queries may look at (by
causal, a window or a table of blocks), so that no sequence is too long and little work is wasted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deuteron.ir.types import Shape
from deuteron.ops.opdef import Attributes
from deuteron.ops.random import keep_scores
from deuteron.ops.score_program import Place, on_tensors

SOME = 1 << 24  # scores that a reference has in memory at a time
Columns = Any  # a slice of the keys, or a tensor of their indices
ALL = slice(None)


class OtherInputs(NamedTuple):
    """The inputs of attention besides q, k and v; None for those that are not given."""

    bias: Tensor | None = None
    slopes: Tensor | None = None
    seed: Tensor | None = None
    q_lengths: Tensor | None = None
    k_lengths: Tensor | None = None
    blocks: Tensor | None = None
    turned: Tensor | None = None
    t0: Tensor | None = None
    t1: Tensor | None = None
    t2: Tensor | None = None


class Part(NamedTuple):
    """One sequence: its number, where it lies in the batch, its queries and its keys. Dropout
    numbers the scores by ``base``, the number of the sequence's first head, and by ``all_queries``,
    the length of the whole q."""

    number: int
    batch: slice
    queries: slice
    keys: slice
    base: int
    all_queries: int

    def of_queries(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.queries] if x.ndim > 3 else x[:, self.queries]

    def of_sums(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.queries] if x.ndim > 2 else x[:, self.queries]

    def of_keys(self, x: Tensor) -> Tensor:
        return x[self.batch, :, self.keys] if x.ndim > 3 else x[:, self.keys]

    def of_scores(self, x: Tensor) -> Tensor:
        """The part of ``x``, which broadcasts to scores, for this sequence; a dimension of size 1
        stands for all positions and stays."""
        places = self.batch, ALL, self.queries, self.keys
        sizes = zip(reversed(places), reversed(x.shape), strict=False)
        return x[tuple(ALL if n == 1 else place for place, n in sizes)[::-1]]

    def of(self, rest: OtherInputs) -> OtherInputs:
        return rest if rest.bias is None else rest._replace(bias=self.of_scores(rest.bias))


def sequences(q: Tensor, k: Tensor, rest: OtherInputs, how: Attributes) -> Iterator[Part]:
    """Yield everything as one part, or each sequence if the batch is padded or packed."""
    lengths = q.shape[-2], k.shape[-2]
    ends = [None if t is None else t.tolist() for t in (rest.q_lengths, rest.k_lengths)]
    if ends == [None, None]:
        yield Part(0, ALL, slice(0, lengths[0]), slice(0, lengths[1]), 0, lengths[0])
    elif how["packed"]:
        firsts, others = ends
        assert firsts is not None and others is not None
        pairs = zip(firsts, firsts[1:], others, others[1:], strict=False)
        for n, (a, b, c, d) in enumerate(pairs):
            yield Part(n, ALL, slice(a, b), slice(c, d), 0, lengths[0])
    else:
        for n in range(q.shape[0]):
            a, b = (
                size if found is None else min(max(found[n], 0), size)
                for found, size in zip(ends, lengths, strict=True)
            )
            yield Part(n, slice(n, n + 1), slice(0, a), slice(0, b), n * q.shape[1], lengths[0])


def settled(how: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """The attributes for one sequence: with align="end", the offset that puts its last query beside
    its last key is added."""
    queries, keys = (s.stop - s.start for s in (part.queries, part.keys))
    at_end = keys - queries if how["align"] == "end" else 0
    return {**how, "offset": how["offset"] + at_end}


def widened(x: Tensor, heads: int) -> Tensor:
    """``x`` in float32 at least, each of its heads repeated for the query heads it serves."""
    x = x.float() if x.dtype.itemsize < 4 else x
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def rows_of(x: Tensor, queries: int, rows: slice) -> Tensor:
    """The rows of ``x``, which broadcasts to scores, that belong to some of the queries."""
    return x[..., rows, :] if x.ndim > 1 and x.shape[-2] == queries > 1 else x


def _columns_of(x: Tensor, keys: int, columns: Columns) -> Tensor:
    return x[..., columns] if x.ndim and x.shape[-1] == keys > 1 else x


def scores_of(
    q: Tensor,
    k: Tensor,
    rows: slice,
    columns: Columns,
    rest: OtherInputs,
    part: Part,
    how: Attributes,
) -> tuple[Tensor, Tensor]:
    """The scores of some queries and keys, both already widened, −∞ where a query may not look; and
    the derivative of each score with respect to scale · q·k."""
    scores = q @ k.mT * how["scale"]
    slope = torch.ones((), dtype=scores.dtype, device=scores.device)
    softcap, score, mask = how["softcap"], how["score"], how["mask"]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        slope = 1.0 - (scores / softcap).square()
    queries, keys = (s.stop - s.start for s in (part.queries, part.keys))
    own = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)[columns]
    away = j - own - how["offset"]
    if rest.slopes is not None:
        scores = scores - rest.slopes.to(scores.dtype)[:, None, None] * away.abs()
    seen = seen_at(away, how["causal"], how["window"])
    if score or mask:
        batches = torch.arange(q.shape[0] if q.ndim > 3 else 1, device=q.device) + part.number
        heads = torch.arange(q.shape[-3], device=q.device)
        numbers = batches[:, None, None, None], heads[:, None, None], own, j
        if q.ndim == 3:
            numbers = batches[0], *numbers[1:]
        at = Place(*(n.to(torch.int32) for n in numbers))
        captured = rest[-3:]
        if score:
            made, slope = on_tensors(score, scores, at, captured)
            scores = made.expand(scores.shape)
        allowed = on_tensors(mask, scores, at, captured)[0] if mask else True
    else:
        allowed = True
    if rest.blocks is not None:
        kinds = _kinds(rest.blocks, how["side"], rows, keys)[..., columns]
        kinds = kinds if q.ndim > 3 else kinds[0]
        seen = seen & ((kinds == 2) | ((kinds == 1) & allowed))
    else:
        seen = seen & allowed
    bias = None
    if rest.bias is not None:
        bias = _columns_of(rows_of(rest.bias, queries, rows), keys, columns)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + bias
    return torch.where(seen, scores, -torch.inf), slope


def seen_at(away: Tensor, causal: bool, window: Shape | None) -> Tensor:
    """Whether a query sees keys that lie ``away`` positions after it (before it, if negative)."""
    left, right = window or (-1, -1)
    seen = torch.ones_like(away, dtype=torch.bool)
    seen &= away <= 0 if causal else True
    seen &= away >= -left if left >= 0 else True
    seen &= away <= right if right >= 0 else True
    return seen


def _kinds(blocks: Tensor, side: int, rows: slice, keys: int) -> Tensor:
    """For some queries and each key: 0, 1 or 2 where the key's block is left out, seen in part or
    seen as a whole."""
    first, last = rows.start // side, -(-rows.stop // side)
    lines = blocks[:, :, first:last]
    room = -(-keys // side) + 1  # one more than there are blocks: unused entries write there
    place = torch.arange(lines.shape[-1] - 3, device=blocks.device)
    used = place < lines[..., 1:2]
    kind = torch.where(place < lines[..., :1], 1, 2)
    at = torch.where(used, lines[..., 3:].long(), room - 1)
    found = at.new_zeros((*lines.shape[:3], room)).scatter_(-1, at, kind)[..., : room - 1]
    whole = found.repeat_interleave(side, -1)[..., :keys].repeat_interleave(side, -2)
    return whole[..., rows.start - first * side : rows.stop - first * side, :]


def kept_of(shape: Shape, rows: slice, columns: Columns, seed: Tensor, p: float, part: Part) -> Any:
    """The factors by which dropout multiplies the weights of some queries: 0, or 1 / (1 − p)."""
    *lead, count, _ = shape
    heads = torch.arange(math.prod(lead), device=seed.device).reshape(*lead, 1, 1) + part.base
    i = torch.arange(rows.start, rows.start + count, device=seed.device)[:, None]
    j = torch.arange(part.keys.start, part.keys.stop, device=seed.device)[columns]
    line = heads * part.all_queries + i + part.queries.start
    return keep_scores(seed, line, j, p) / (1.0 - p)


def parts_of(
    q: Tensor, k: Tensor, rest: OtherInputs, how: Attributes
) -> Iterator[tuple[slice, Columns]]:
    """Yield parts of the queries whose scores fit in memory, each with the keys that any of its
    queries may see."""
    queries, keys = q.shape[-2], k.shape[-2]
    each = max(1, SOME // max(1, q.numel() // max(1, queries * q.shape[-1]) * keys))
    side = how["side"] if rest.blocks is not None else 0
    narrow = side or (how["window"] is not None and -1 not in how["window"])
    each = min(each, max(side, 512)) if narrow else each
    each = max(side, each // side * side) if side else each
    for first in range(0, queries, each):
        rows = slice(first, min(first + each, queries))
        yield rows, _table_columns(rest, side, rows, keys) if side else _sight(rows, keys, how)


def _sight(rows: slice, keys: int, how: Attributes) -> slice:
    left, right = how["window"] or (-1, -1)
    right = 0 if how["causal"] and right else right
    begin = max(0, rows.start + how["offset"] - left) if left >= 0 else 0
    end = min(keys, max(0, rows.stop + how["offset"] + right)) if right >= 0 else keys
    return slice(min(begin, end), end)


def _table_columns(rest: OtherInputs, side: int, rows: slice, keys: int) -> Tensor:
    assert rest.blocks is not None
    kinds = _kinds(rest.blocks, side, rows, keys)[..., ::side, :]
    return kinds.flatten(0, -2).any(0).nonzero()[:, 0]
