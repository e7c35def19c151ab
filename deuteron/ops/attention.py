"""Scaled dot-product attention, softmax(scale · q·kᵀ + bias) · v, and its gradient.

Queries are [batch, heads, Sq, D], keys [batch, kv heads, Sk, D], values [batch, kv heads, Sk, Dv];
the batch may be missing. Each key and value head serves an equal run of query heads (one each is
plain multi-head attention, one for all is multi-query attention).

The score of query i and key j, where query i stands at position i + offset among the keys::

    s = scale · qᵢ·kⱼ                                 a number
    s = softcap · tanh(s / softcap)                   where there is a softcap
    s = s + bias − slope of the head · |i + offset − j|
    s = −∞  unless the bias, causal (j ≤ i + offset) and the window allow it

What softmax makes of it is dropped with probability ``dropout`` (ops/random.py: by the seed and the
place of the score), else divided by 1 − dropout, and weighs the values.

The references write the mathematics out, in float32 at least, for some queries at a time, so that
every engine has the same thing to answer to and no length is too much. A query that may look at no
key at all gives zeros, as ``F.scaled_dot_product_attention`` does on the CPU, and sends back no
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import bool_, float32, int64
from deuteron.ir.graph import Node
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import broadcast, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, Vjp, operator
from deuteron.ops.random import BITS, cutoff, words

ATTRS = {
    "causal": Attr("bool", False, "query i sees keys 0 … i + offset only"),
    "scale": Attr("float", None, "the factor on q·kᵀ; None is 1/√D"),
    "window": Attr(
        "ints",
        None,
        "(left, right): how many keys before and after its own position a query sees; -1 is all",
    ),
    "softcap": Attr("float", 0.0, "scores stay within ± this; 0 is no limit"),
    "offset": Attr("int", 0, "the position of the first query among the keys"),
    "dropout": Attr("float", 0.0, "the probability that a weight is dropped; needs a seed"),
}
SOME = 1 << 24  # scores that a reference has in memory at a time


def completed(query: int, types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    """Fills in the scale from the input ``query``. Without any features the scores are 0."""
    q = types[query]
    if attrs["scale"] is None and q is not None and q.rank:
        return attrs | {"scale": 1.0 / math.sqrt(max(q.shape[-1], 1))}
    return attrs


# ---- what may be asked -----------------------------------------------------------------------


def checked(
    name: str,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    bias: Given,
    slopes: Given = None,
    seed: Given = None,
    **how: Any,
) -> Shape:
    """The shape of the result, or what is wrong with the inputs."""
    one_dtype(name, q=q, k=k, v=v)
    if q.rank not in (3, 4) or not k.rank == v.rank == q.rank:
        wrong = f"{name} needs q, k and v of rank 4, not {q.rank}, {k.rank} and {v.rank}"
        remedy = "reshape them to [batch, heads, length, features]; all may be without a batch"
        raise GraphError(wrong, remedy=remedy)
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        wrong = f"{name} got batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]} in q, k and v"
        raise GraphError(wrong, remedy="give q, k and v one batch size (expand)")
    if q.shape[-1] != k.shape[-1]:
        wrong = f"q has {q.shape[-1]} features and k has {k.shape[-1]}"
        raise GraphError(wrong, remedy="the last sizes of q and k must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        wrong = f"k {list(k.shape)} and v {list(v.shape)} differ in heads or length"
        raise GraphError(wrong, remedy="give one value for each key")
    heads, shared = q.shape[-3], k.shape[-3]
    if heads % shared if shared else heads:
        wrong = f"{heads} query heads cannot share {shared} key heads"
        raise GraphError(wrong, remedy="the query heads must be a multiple of the key heads")
    scores = (*q.shape[:-1], k.shape[-2])
    if bias is not None and bias.dtype not in (bool_, float32, q.dtype):
        wrong = f"the bias of {name} is {bias.dtype.name}, q is {q.dtype.name}"
        remedy = "give bool (true: may look), float32 or the element type of q"
        raise GraphError(wrong, remedy=remedy)
    if bias is not None and (bias.rank > q.rank or broadcast(bias.shape, scores) != scores):
        wrong = f"the bias {list(bias.shape)} of {name} does not broadcast to scores {list(scores)}"
        raise GraphError(wrong, remedy="give [heads, Sq, Sk] sizes that are equal or 1")
    if slopes is not None and (slopes.shape, slopes.dtype) != ((heads,), float32):
        wrong = f"the slopes of {name} are {slopes}, and there are {heads} heads of queries"
        raise GraphError(wrong, remedy=f"give one float32 for each head, [{heads}]")
    _check_sight(name, seed, **how)
    return (*q.shape[:-1], v.shape[-1])


def _check_sight(
    name: str,
    seed: Given,
    window: Shape | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    **_: Any,
) -> None:
    if window is not None and (len(window) != 2 or min(window) < -1):
        wrong = f"the window {window} of {name} is not (left, right)"
        raise GraphError(wrong, remedy="give how many keys a query sees on each side, -1 for all")
    if not 0.0 <= softcap < math.inf:
        raise GraphError(f"softcap={softcap} of {name}", remedy="give a positive number, or 0")
    if not 0.0 <= dropout < 1.0:
        raise GraphError(f"dropout={dropout} of {name}", remedy="give a number from 0 to below 1")
    if dropout and seed is None:
        raise GraphError(f"dropout={dropout} of {name} without a seed", remedy="give a seed")
    if seed is not None and (seed.rank, seed.dtype) != (0, int64):
        raise GraphError(f"the seed is {seed}, not one int64", remedy="give a rank-0 int64 tensor")


def _like_queries(q: TensorType, shape: Shape) -> TensorType:
    """The result lies as the queries do: heads inside or outside the sequence. Attention
    kernels answer so, and the reshape that follows is then free."""
    if q.rank == 4 and min(q.shape) > 0 and min(q.shape[1:3]) > 1 and q.strides[1] < q.strides[2]:
        _, heads, rows, inner = shape
        strides = (rows * heads * inner, inner, heads * inner, 1)
        return TensorType.of(shape, q.dtype, strides=strides)
    return TensorType.of(shape, q.dtype)


# ---- the mathematics, written out --------------------------------------------------------------


class Besides(NamedTuple):
    """What scores are made of besides q and k."""

    bias: Tensor | None
    slopes: Tensor | None
    seed: Tensor | None


def widened(x: Tensor, heads: int) -> Tensor:
    """``x`` in float32 at least, each of its heads repeated for the query heads it serves."""
    x = x.float() if x.dtype.itemsize < 4 else x
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def rows_of(x: Tensor, queries: int, rows: slice) -> Tensor:
    """A part of the queries of something that broadcasts to scores."""
    return x[..., rows, :] if x.ndim > 1 and x.shape[-2] == queries > 1 else x


def scores_of(
    q: Tensor,
    k: Tensor,
    rows: slice,
    queries: int,
    given: Besides,
    causal: bool,
    scale: float,
    window: Shape | None,
    softcap: float,
    offset: int,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Scores of some queries, ``q`` and ``k`` already widened, −∞ where a query may not look; and
    the slope of the soft cap."""
    scores = q @ k.mT * scale
    slope = torch.ones((), dtype=scores.dtype, device=scores.device)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        slope = 1.0 - (scores / softcap).square()
    i = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + offset
    away = torch.arange(k.shape[-2], device=q.device) - i
    if given.slopes is not None:
        scores = scores - given.slopes.to(scores.dtype)[:, None, None] * away.abs()
    bias = None if given.bias is None else rows_of(given.bias, queries, rows)
    seen = _seen(away, causal, window)
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    elif bias is not None:
        scores = scores + bias
    return scores.masked_fill(~seen, -torch.inf), slope


def window_mask(queries: int, keys: int, attrs: Attributes) -> Tensor:
    """Which keys each query sees, by causal and the window."""
    away = torch.arange(keys) - torch.arange(queries)[:, None] - attrs["offset"]
    return _seen(away, attrs["causal"], attrs["window"])


def _seen(away: Tensor, causal: bool, window: Shape | None) -> Tensor:
    """Whether keys that lie so far behind a query, or before it, are seen."""
    left, right = window or (-1, -1)
    seen = torch.ones_like(away, dtype=torch.bool)
    seen &= away <= 0 if causal else True
    seen &= away >= -left if left >= 0 else True
    seen &= away <= right if right >= 0 else True
    return seen


def kept_of(shape: Shape, rows: slice, queries: int, seed: Tensor, p: float) -> Tensor:
    """What dropout makes of the weights of some queries: 0, or 1 / (1 − p)."""
    *lead, count, keys = shape
    heads = torch.arange(math.prod(lead), device=seed.device).reshape(*lead, 1, 1)
    i = torch.arange(rows.start, rows.start + count, device=seed.device)[:, None]
    place = (heads * queries + i) * keys + torch.arange(keys, device=seed.device)
    keep = (words(seed, place) >> (32 - BITS)) >= cutoff(p)
    return keep / (1.0 - p)


def parts_of(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Queries in parts whose scores fit in memory."""
    queries = q.shape[-2]
    each = max(1, SOME // max(1, q.numel() // max(1, queries * q.shape[-1]) * k.shape[-2]))
    yield from (slice(i, min(i + each, queries)) for i in range(0, queries, each))


def _reference(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **how: Any) -> Tensor:
    return _lse_reference(q, k, v, *given, **how)[0]


def _lse_reference(
    q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    heads, queries, rest = q.shape[-3], q.shape[-2], Besides(*given)
    wk, wv, p = widened(k, heads), widened(v, heads), how["dropout"]
    outs, sums = [], []
    for rows in parts_of(q, k):
        scores, _ = scores_of(widened(q[..., rows, :], heads), wk, rows, queries, rest, **how)
        lse = (
            scores.logsumexp(-1) if k.shape[-2] else scores.new_full(scores.shape[:-1], -torch.inf)
        )
        weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
        if p and rest.seed is not None:
            weights = weights * kept_of(
                tuple(scores.shape), rows, queries, rest.seed.to(q.device), p
            )
        outs.append((weights @ wv).to(q.dtype))
        sums.append(lse)
    wide = wk.dtype
    out = torch.cat(outs, -2) if outs else q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = torch.cat(sums, -1) if sums else q.new_empty(q.shape[:-1], dtype=wide)
    t = _like_queries(TensorType.from_tensor(q), tuple(out.shape))
    if out.requires_grad:  # somebody differentiates through these very operators
        return out, lse
    moved = torch.empty_strided(t.shape, t.strides, dtype=q.dtype, device=q.device).copy_(out)
    return moved, lse


# ---- gradients ---------------------------------------------------------------------------------


def _vjp(b: Ops, v: Vjp) -> Grads:
    """By way of the operator that keeps the sums of each query."""
    out, lse = b.attention_lse(*v.ins, **v.attrs)
    return _gradients(b, v, out, lse)


def _gradients(b: Ops, v: Vjp, out: Sym, lse: Sym) -> Grads:
    grads: Grads = [None] * 6
    if v.needs[4]:
        remedy = "detach them; learn a bias [heads, Sq, Sk] instead"
        raise GraphError("the slopes of attention have no gradient", remedy=remedy)
    grad, more = (*v.grads, None)[:2]
    came = grad if grad is not None else b.zeros(out.type)
    given = (came, *v.ins[:3], out, lse, *v.ins[3:], more)
    if any(v.needs[:3]):
        grads[:3] = b.attention_grad(*given, **v.attrs)
    if v.has(3) and v.needs[3] and v.arg(3).dtype.is_float:
        grads[3] = b.attention_bias_grad(*given, **v.attrs)
    return grads


# ---- cost and samples --------------------------------------------------------------------------


def flops(slot: int, over_d: int, over_dv: int, ins: Types, outs: Any, attrs: Attributes) -> float:
    """So many products over the D features and over the Dv features, for the pairs of a query and a
    key that see each other."""
    q, k, v = ins[slot : slot + 3]
    pairs = math.prod(q.shape[:-2]) * seen_pairs(q.shape[-2], k.shape[-2], attrs)
    return float(2.0 * pairs * (over_d * q.shape[-1] + over_dv * v.shape[-1]))


PLAIN = ("causal", "scale")


def is_plain(node: Node, *but: str) -> bool:
    """Whether attention is no more than torch's call has: a mask or a bias, causal, a scale; and
    whatever is named."""
    more = any(v is not None for v in node.inputs[4:])
    usual, known = attention.normalise({}), (*PLAIN, *but)
    return not more and all(node.attrs[name] == usual[name] for name in usual if name not in known)


def seen_pairs(queries: int, keys: int, attrs: Attributes) -> float:
    """How many pairs of a query and a key ``causal`` and the window leave, about."""
    left, right = attrs["window"] or (-1, -1)
    right = 0 if attrs["causal"] and right else right
    offset = attrs["offset"]

    def behind(reach: int) -> float:
        """Pairs with j ≤ i + offset + reach."""
        first, last = 1 + offset + reach, queries + offset + reach
        if last <= 0:
            return 0.0
        low, high = max(first, 0), min(last, keys)
        ramp = (low + high) / 2 * max(high - low + 1, 0) if low <= keys else 0.0
        return float(ramp + max(0, last - max(keys, low - 1)) * keys)

    total = behind(right) if right >= 0 else float(queries * keys)
    return max(total - behind(-left - 1), 0.0) if left >= 0 else total


_SEED = "scalar:index<1048576"


@operator(
    Fusion.COMPLEX,
    _reference,
    attrs=ATTRS,
    complete=partial(completed, 0),
    vjp=_vjp,
    flops=partial(flops, 0, 1, 1),
    samples=f"""2x2x3x3 2x2x4x3 2x2x4x2 _
        | 2x2x4x3@nhwc 2x2x4x3@nhwc 2x2x4x2@nhwc _ causal=True scale=0.7
        | 2x2x5x3@transposed 2x2x3x3@transposed 2x2x3x2@transposed _ causal=True
        | 2x4x3x3 2x2x4x3 2x2x4x2 4x3x1
        | 1x3x2x3@sliced 1x1x4x3@sliced 1x1x4x2@sliced 2x4:bool
        | 2x2x3x3 2x2x3x3 2x2x3x2 2x1x3x3 causal=True
        | 2x2x3x3@expanded 2x2x3x3@expanded 2x2x3x2@expanded 1x3:bool causal=True
        | 4x3x3 2x2x3 2x2x2 2 | 0x2x3x3 0x1x4x3 0x1x4x2 _ | 2x2x0x3 2x2x4x3 2x2x4x2 _ causal=True
        | 2x2x3x3 2x2x0x3 2x2x0x2 _ | 1x1x1x3 1x1x1x3 1x1x1x2 scalar
        | 2x2x2x3 2x2x2x3 2x2x2x2 2x2:f32 nograd
        | 1x2x5x3 1x2x6x3 1x2x6x2 _ window=(1,2) | 1x2x5x3 1x1x7x3 1x1x7x2 _ window=(2,-1) offset=2
        | 1x2x4x3 1x2x4x3 1x2x4x2 _ softcap=1.5 | 2x3x3 2x5x3 2x5x2 _ causal=True offset=2
        | 2x2x3x3 2x2x4x3 2x2x4x2 2x3x4 2:positive:f32 causal=True offset=1 softcap=2.0 nograd
        | 2x2x3x3 2x2x4x3 2x2x4x2 _ _ {_SEED} dropout=0.4
        | 1x4x5x3 1x2x5x3 1x2x5x2 5 4:positive:f32 {_SEED} dropout=0.3 window=(2,1) nograd""",
)
def attention(
    q: TensorType, k: TensorType, v: TensorType, bias: Given, slopes: Given, seed: Given, **how: Any
) -> TensorType:
    """softmax(scale · q·kᵀ + bias) · v for each head. A bool bias says which keys a query may look
    at, a float bias is added; ``slopes`` are those of ALiBi, one for each head. ``causal`` and the
    window count from position i + offset. A query that sees no key gives zeros."""
    return _like_queries(q, checked("attention", q, k, v, bias, slopes, seed, **how))


@operator(
    Fusion.COMPLEX,
    _lse_reference,
    attrs=ATTRS,
    complete=partial(completed, 0),
    vjp=lambda b, v: _gradients(b, v, *v.outs),
    flops=partial(flops, 0, 1, 1),
    samples=lambda: iter(attention.samples()),
)
def attention_lse(
    q: TensorType, k: TensorType, v: TensorType, bias: Given, slopes: Given, seed: Given, **how: Any
) -> tuple[TensorType, TensorType]:
    """:func:`attention`, and the logarithm of the sum of e^score over the keys of each query, −∞ of
    one that sees none: what the gradient needs instead of the scores."""
    shape = checked("attention_lse", q, k, v, bias, slopes, seed, **how)
    wide = float32 if q.dtype.is_low else q.dtype
    return _like_queries(q, shape), TensorType.of(q.shape[:-1], wide)
