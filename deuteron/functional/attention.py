"""Attention, with all that models do between the scores and the values: biases, masks, windows,
soft caps, dropout, and rotary positions before them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.activation import seed_of
from deuteron.functional.autocast import lower
from deuteron.functional.block_mask import BlockMask
from deuteron.functional.context import any_requires_grad, is_captured, is_eager
from deuteron.functional.core import Function
from deuteron.functional.delegate import REFUSALS, delegates, may_delegate, recorded
from deuteron.functional.operators import operator, schema
from deuteron.functional.rope import ROPE
from deuteron.functional.score_trace import traced
from deuteron.ops import Ops, Sym, table
from deuteron.ops.score_program import READS

Spans = Tensor | tuple[Tensor | None, Tensor | None] | None


def _turned(
    q: Any, k: Any, cos: Any, sin: Any, *, offset: int, interleaved: bool, by: Any = ROPE
) -> tuple[Any, Any]:
    """Return q and k rotated by the angles of their positions; the positions of queries begin at
    ``offset``. q and k are tensors, or handles of a graph that ``by`` writes into."""
    how: dict[str, Any] = {"axis": 2, "interleaved": interleaved}
    if offset == 0 and q.shape[2] == k.shape[2]:
        both: tuple[Any, Any] = by(q, k, cos, sin, None, **how)
        return both
    return by(q, None, cos, sin, None, offset=offset, **how), by(k, None, cos, sin, None, **how)


def _build(op: str, b: Ops, q: Sym, k: Sym, *given: Sym | None, **attrs: Any) -> Any:
    """Write attention into a graph (``op`` may be "attention_lse", which also returns the
    logarithms of the softmax's sums). If there are tables ``cos`` and ``sin``, q and k are rotated
    first."""
    *rest, cos, sin = given
    interleaved = attrs.pop("interleaved", False)
    if cos is not None:
        q, k = _turned(q, k, cos, sin, offset=attrs["offset"], interleaved=interleaved, by=b.rope)
    return b.call(op, q, k, *rest, **attrs)


_TENSORS, _ATTRS = schema(table.get("attention"))
_SCHEMA = _TENSORS | dict.fromkeys(("cos", "sin"), "Sym | None"), _ATTRS | {"interleaved": "bool"}
ATTENTION = Function("attention", partial(_build, "attention"), _SCHEMA)
WITH_SUMS = Function("attention_lse", partial(_build, "attention_lse"), _SCHEMA)


@delegates(again=False)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    offset: int = 0,
    align: str = "start",
    lengths: Spans = None,
    starts: Spans = None,
    score: Callable[..., Any] | str | None = None,
    mask: Callable[..., Any] | BlockMask | str | None = None,
    rope: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
    return_lse: bool = False,
) -> Any:
    """Return softmax(scale · q·kᵀ + bias) · v. No matrix of scores is in memory, forward or
    backward.

    q          [batch, heads, Sq, D]
    k, v       [batch, kv heads, Sk, D]. There may be fewer kv heads than heads; each then serves a
               run of consecutive heads of q, all of them equally long
    bias       added to the scores, with a gradient; or bool, True where a query may see a key.
               Sizes of 1 stand for all
    causal     query i sees keys up to i + ``offset``
    offset     the position of the first query among the keys
    window     (left, right): how many keys before and after its own position a query sees, -1 for
               all. Keys that it does not see are not read
    scale      by default 1/√D
    softcap    c: a score becomes c · tanh(score / c), so that it stays within ±c; 0 for none
    slopes     ALiBi: one float32 for each head. slope · distance is subtracted from a score;
               without a gradient
    dropout    the probability, below 1, that a weight is dropped
    seed       decides, with its place, whether a weight is dropped: the same on every device.
               Without a seed one is drawn from torch's generator
    align      "start", or "end": the last query stands beside the last key, in each sequence
    lengths    of the sequences of a padded batch, int32 or int64 [batch]; or two such tensors, for
               queries and for keys (None for all). Padding is not read, and its results are zeros
    starts     for sequences that lie one behind the other in q [heads, tokens, D], k and v: where
               each begins and where the last one ends, [sequences + 1] ("cu_seqlens"); or two such
               tensors, for queries and for keys. Positions count from the start of each sequence
    score      ``score(s, b, h, i, j)``: a function that changes the score s = scale · q·k of batch
               (or sequence) b, head h, query i and key j. It is compiled into the kernel, and so is
               its derivative. It reads tensors that it captures by element: ``table[h, i - j]``
    mask       ``mask(b, h, i, j)``: whether query i sees key j; or what :func:`block_mask` made of
               such a function, so that kernels skip blocks in which nothing is seen
    rope       (cos, sin), tables [positions, pairs]: q and k are first rotated by the angles of
               their positions, as :func:`rope` does: key j by row j, query i by row i + ``offset``.
               Where that is quicker, the kernel of attention rotates them as it loads them, so that
               the rotated q and k are not written and read once more
    interleaved
               the pairs of ``rope`` are neighbours (2i, 2i + 1), not (i, i + pairs)
    return_lse also return the logarithm of the sum of e^score of each query, [batch, heads, Sq]

    Refused together: ``starts`` with ``lengths`` or a bias, ``score`` with ``softcap`` or
    ``slopes``, ``rope`` with ``starts`` or with ``align="end"`` of padded sequences. A query that
    sees no key gives zeros. Plain attention is torch's own call, and so is plain attention with
    dropout but no seed on a CPU. The values of starts and lengths are checked once, and again after
    each change, but not while a CUDA Graph is captured; kernels for 16-bit tensors on a GPU read
    them on the device.

    >>> y = dt.functional.attention(q, k, v, causal=True, window=(1024, 0), softcap=50.0)
    >>> y = dt.functional.attention(q, k, v, starts=cu_seqlens, causal=True)
    >>> y = dt.functional.attention(q, k, v, score=lambda s, b, h, i, j: s - slope[h] * (i - j))
    >>> y = dt.functional.attention(q, k, v, causal=True, rope=(cos, sin))
    """
    q, k, v = lower(q, k, v)
    ragged = lengths is not None or starts is not None
    if align == "end" and not ragged and q.ndim == k.ndim:
        offset, align = offset + k.shape[-2] - q.shape[-2], "start"
    angles = _angles(rope, interleaved, q, starts is not None or align == "end")
    needed = torch.is_grad_enabled() and any_requires_grad((q, k, v, bias, slopes, *angles))
    if needed and rope is not None:  # the gradient reads the rotated q and k
        q, k = _turned(q, k, *angles, offset=offset, interleaved=interleaved)
        rope, angles, interleaved = None, (None, None), False
    if dropout and not 0.0 <= dropout < 1.0:
        wrong = f"dropout={dropout} is not a probability below 1"
        raise BindError(wrong, asked=f"attention(…, dropout={dropout})", remedy="use 0 <= p < 1")
    plain = (
        slopes is None
        and window is None
        and score is None
        and mask is None
        and rope is None
        and not (softcap or offset or ragged)
        and align == "start"
    )
    if q.is_cpu and dropout and seed is None:  # we have no CPU kernel that drops weights
        plain, why = plain and not (causal and bias is not None), "dropout is torch's on a CPU"
    else:
        plain, why = plain and bias is None and not dropout, "plain attention is torch's own call"
    plain = plain and k.shape[-2:-1] == v.shape[-2:-1]  # not every kernel of torch's checks this
    if plain and not return_lse and may_delegate():
        try:
            grouped = q.shape[-3] != k.shape[-3]
            y = F.scaled_dot_product_attention(
                q, k, v, bias, dropout, is_causal=causal, scale=scale, enable_gqa=grouped
            )
            return recorded(y, "attention", q, why)
        except REFUSALS:
            pass  # planning the call below will say what is wrong
    drawn = seed_of(seed, q) if dropout else None
    how: Any = {"causal": causal, "scale": scale, "softcap": float(softcap), "offset": offset}
    how |= {"window": None if window is None else tuple(window), "dropout": float(dropout)}
    how |= {"align": align, "packed": starts is not None, "side": 0, "interleaved": interleaved}
    texts, table, captured = _functions(score, mask)
    how |= texts
    if isinstance(mask, BlockMask):
        how["side"] = mask.side
    spans = _spans(q, k, lengths, starts)
    given = (q, k, v, bias, slopes, drawn, *spans, *table, *captured, *angles)
    if return_lse or needed:  # the gradient reads the sums
        found = WITH_SUMS(*given, **how)
        return found if return_lse else found[0]
    return ATTENTION.one(*given, **how)


def _angles(
    rope: tuple[Tensor, Tensor] | None, interleaved: bool, q: Tensor, own: bool
) -> Sequence[Tensor | None]:
    """Return the tables (cos, sin) of ``rope`` after checking them, or (None, None). ``own``: each
    sequence counts positions from its own beginning or end."""
    asked = "attention(…, rope=(cos, sin))"
    if rope is None:
        if interleaved:
            remedy = "give rope=(cos, sin) as well"
            raise BindError("interleaved is about the pairs of rope", asked=asked, remedy=remedy)
        return None, None
    if len(rope) != 2 or not all(isinstance(t, Tensor) for t in rope):
        given = ", ".join(type(t).__name__ for t in rope)
        wrong = f"rope is ({given}), not two tensors"
        raise BindError(wrong, asked=asked, remedy="give (cos, sin)")
    turn = "turn q and k first: dt.functional.rope(q, k, cos, sin, positions=…, seq_dim=2)"
    if own:
        wrong = "rows of the tables count from the first token, starts and align='end' do not"
        raise BindError(wrong, asked=asked, remedy=turn)
    if q.ndim != 4:
        wrong = f"with rope q is [batch, heads, length, features], not {list(q.shape)}"
        raise BindError(wrong, asked=asked, remedy="give q, k and v a batch of 1: q[None]")
    pairs = q.shape[3] // 2
    for name, t in zip(("cos", "sin"), rope, strict=True):
        if t.ndim != 2 or t.shape[1] > pairs:
            wrong = f"{name} {list(t.shape)} is no table [positions, {pairs}]"
            remedy = f"of one that has every angle twice, give the first half: {name}[:, :{pairs}]"
            raise BindError(wrong, asked=asked, remedy=remedy)
    return rope


def _functions(
    score: Callable[..., Any] | str | None, mask: Callable[..., Any] | BlockMask | str | None
) -> tuple[dict[str, str], Sequence[Tensor | None], Sequence[Tensor | None]]:
    """Return the programs of ``score`` and ``mask``, the two tables of a block mask, and the
    tensors that the functions captured."""
    captured: list[Tensor] = []
    table: Sequence[Tensor | None] = (None, None)
    text = ""
    if isinstance(mask, BlockMask):
        captured.extend(mask.captured)
        table, text = (mask.blocks, mask.turned), mask.text
    elif mask is not None:
        text = traced(mask, captured, True)
    of_score = "" if score is None else traced(score, captured, False)
    there = [t.detach() for t in captured]
    return {"score": of_score, "mask": text}, table, [*there, *[None] * (READS - len(there))]


def _spans(q: Tensor, k: Tensor, lengths: Spans, starts: Spans) -> Sequence[Tensor | None]:
    """Return the lengths or starts of queries and keys. Their values are checked unless the call is
    traced or captured."""
    if lengths is None and starts is None:
        return None, None
    asked = "attention(…, lengths=…, starts=…)"
    if lengths is not None and starts is not None:
        raise BindError("lengths and starts at once", asked=asked, remedy="give one of them")
    given = starts if lengths is None else lengths
    pair = tuple(given) if isinstance(given, tuple | list) else (given, given)
    sizes = [t.shape[-2] if t.ndim > 1 else 0 for t in (q, k)]
    if isinstance(given, Tensor) and lengths is not None and sizes[0] != sizes[1]:
        wrong = f"one tensor of lengths for {sizes[0]} queries and {sizes[1]} keys"
        raise BindError(wrong, asked=asked, remedy="give (lengths of queries, lengths of keys)")
    for t, size in zip(pair, sizes, strict=True):
        if isinstance(t, Tensor) and is_eager(q, t) and not is_captured(q):
            _check_span(t, size, starts is not None)
    return pair


def _check_span(t: Tensor, size: int, packed: bool) -> None:
    """Refuse sequences that do not lie one behind the other inside the tensor. A tensor that was
    checked is checked again only after it has changed."""
    seen = None if t.is_inference() else (t._version, size, packed)
    known = getattr(t, "_deuteron_span", None)
    if not t.numel() or t.dtype.is_floating_point or (seen is not None and known == seen):
        return  # the operator says what is wrong with other types
    wrong = (t < 0) | (t > size)
    if packed:
        wrong[1:] |= t[1:] < t[:-1]
        wrong[0] |= t[0] != 0
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0, 0])
        what, most = ("start", "rise from 0 to") if packed else ("length", "are 0 to")
        raise BindError(
            f"{what} {at} is {int(t[at])}, and there are {size} positions",
            asked="attention(…, starts=…)" if packed else "attention(…, lengths=…)",
            remedy=f"{what}s {most} at most {size}",
        )
    if seen is not None:
        t._deuteron_span = seen  # type: ignore[attr-defined]


PAGED = operator("paged_attention")


@delegates(again=False)
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    window: int = -1,
    softcap: float = 0.0,
) -> Tensor:
    """Attention for generating: the last S positions of each sequence see its keys and values,
    which lie in pages. Without a gradient.

    q        [batch, heads, S, D]
    keys, values
             [pages, positions, kv heads, D]
    table    which pages each sequence has, in order [batch, most pages]
    lengths  how many keys each sequence has by now, including those of its queries [batch]
    window   how many keys before its own position a query sees; -1 for all
    scale, softcap
             those of :func:`attention`

    The entries of the table that are in use must name pages that exist. They are checked once, and
    again after each change of the table or the lengths, but not while a CUDA Graph is captured.
    :class:`dt.nn.PagedCache` keeps pages and tables.

    >>> y = dt.functional.paged_attention(q, cache.keys, cache.values, table, lengths)
    """
    if is_eager(q, table, lengths) and not is_captured(q):
        _check_table(keys, table, lengths)
    return PAGED.one(q, keys, values, table, lengths, scale=scale, window=window, softcap=softcap)


class Seen(NamedTuple):
    """What a table of pages was checked with: the shape of the pages, the lengths, and the versions
    of the lengths (``changed``) and of the table (``turned``), which torch counts up at each
    change."""

    pages: tuple[int, ...]
    lengths: Tensor
    changed: int
    turned: int

    def same(self, other: Seen) -> bool:
        alike = (self.pages, self.changed, self.turned) == (
            other.pages,
            other.changed,
            other.turned,
        )
        return alike and self.lengths is other.lengths


def _check_table(keys: Tensor, table: Tensor, lengths: Tensor) -> None:
    """Refuse pages that do not exist, and more keys than the table has pages for. A table that was
    checked is checked again only after it or the lengths have changed."""
    whole = not any(t.is_floating_point() or t.is_complex() for t in (table, lengths))
    if not whole or keys.ndim != 4 or table.ndim != 2 or lengths.shape != table.shape[:1]:
        return  # the operator says what is wrong
    seen = None
    if not (table.is_inference() or lengths.is_inference()):  # those do not count their changes
        seen = Seen(keys.shape, lengths, lengths._version, table._version)
    known = getattr(table, "_deuteron_seen", None)
    if not table.numel() or (seen is not None and known is not None and known.same(seen)):
        return
    pages, positions = keys.shape[:2]
    used = torch.arange(table.shape[1], device=table.device) * positions < lengths[:, None]
    wrong = used & ((table < 0) | (table >= pages))
    long = (lengths < 0) | (lengths > table.shape[1] * positions)
    if bool(torch.any(wrong) | torch.any(long)):
        asked = "paged_attention(…)"
        if bool(long.any()):
            at = int(long.nonzero()[0, 0])
            most = table.shape[1] * positions
            what = f"sequence {at} has {int(lengths[at])} keys, and its table room for 0 to {most}"
            raise BindError(what, asked=asked, remedy="give it more pages, or fewer keys")
        at, entry = wrong.nonzero()[0].tolist()
        what = f"entry {entry} of sequence {at} is page {int(table[at, entry])} of {pages}"
        raise BindError(what, asked=asked, remedy=f"name pages 0 to {pages - 1}")
    if seen is not None:
        table._deuteron_seen = seen  # type: ignore[attr-defined]
