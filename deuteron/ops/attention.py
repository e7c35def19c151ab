"""Scaled dot-product attention, softmax(scale · q·kᵀ + bias) · v, and its gradient.

Queries are [batch, heads, Sq, D], keys [batch, kv heads, Sk, D], values [batch, kv heads, Sk, Dv];
the batch may be missing. Each key and value head serves an equal run of query heads (one each is
plain multi-head attention, one for all is multi-query attention).

The score of query i and key j, where query i stands at position i + offset among the keys::

    s = scale · qᵢ·kⱼ                                 a number
    s = softcap · tanh(s / softcap)                   where there is a softcap
    s = s + bias − slope of the head · |i + offset − j|
    s = −∞  unless the bias, causal (j ≤ i + offset) and the window allow it

A user may pass two functions of the score and its position (score_program.py): ``score`` takes the
place of the soft cap and the slopes, and ``mask`` says which keys a query may see, in addition to
the rules above.

``q_lengths`` and ``k_lengths`` [batch] say how long each sequence of a padded batch is: positions
after its end are not read, and their results are 0. With ``packed``, several sequences lie one
after another in q and in k, without a batch, and the two tensors [sequences + 1] hold where each
sequence begins and where the last one ends; i and j count from the beginning of their sequence.
``align`` "end" puts the last query of each sequence beside its last key.

A table of blocks says which blocks of ``side`` × ``side`` scores are computed. ``blocks`` [batch or
1, heads or 1, blocks of queries, 3 + blocks of keys] has one line for each block of queries: how
many blocks of keys it sees in part; how many in part or whole; which line to compute in place of
this one, so that the longest come first; and then the numbers of these blocks of keys, those seen
in part first. ``turned`` is the transposed table, with the blocks of queries for each block of
keys; the gradient uses it.

Softmax turns scores into weights. A weight is dropped with probability ``dropout`` (ops/random.py:
the seed and the position of the score decide), else divided by 1 − dropout. The values are then
summed with these weights.

The references write the mathematics out, in float32 at least, and every engine is compared with
them. They take some queries at a time, so that no sequence is too long for them. A query that may
look at no key at all gives zeros, as ``F.scaled_dot_product_attention`` does on the CPU, and sends
back no gradient.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.graph import Node
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.attention_checks import checked
from deuteron.ops.attention_math import (
    OtherInputs,
    Part,
    kept_of,
    parts_of,
    scores_of,
    seen_at,
    sequences,
    settled,
    widened,
)
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, Vjp, operator
from deuteron.ops.samples import Arg, Sample, samples

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
    "packed": Attr("bool", False, "several sequences lie in one, and lengths say where they begin"),
    "align": Attr("str", "start", "where queries stand among the keys", ("start", "end")),
    "score": Attr("str", "", "what becomes of a score: a program, score_program.py"),
    "mask": Attr("str", "", "which scores count: a program"),
    "side": Attr("int", 0, "queries and keys of a block in the table of blocks"),
}


def completed(query: int, types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    """Fill in a missing scale from q, which is input number ``query``. If q has no features, we
    take D = 1: the scores are 0 anyway."""
    q = types[query]
    if attrs["scale"] is None and q is not None and q.rank:
        return attrs | {"scale": 1.0 / math.sqrt(max(q.shape[-1], 1))}
    return attrs


def _like_queries(q: TensorType, shape: Shape) -> TensorType:
    """The type of the result, in the memory order of the queries: with the heads inside or outside
    the sequence. Attention kernels return it so, and the reshape that follows is then free."""
    if q.rank == 4 and min(q.shape) > 0 and min(q.shape[1:3]) > 1 and q.strides[1] < q.strides[2]:
        _, heads, rows, inner = shape
        strides = (rows * heads * inner, inner, heads * inner, 1)
        return TensorType.of(shape, q.dtype, strides=strides)
    return TensorType.of(shape, q.dtype)


# ---- the mathematics, written out (attention_math.py) -------------------------------------------


def window_mask(queries: int, keys: int, attrs: Attributes) -> Tensor:
    """Which keys each query sees by ``causal`` and the window, as bool [queries, keys]."""
    away = torch.arange(keys) - torch.arange(queries)[:, None] - attrs["offset"]
    return seen_at(away, attrs["causal"], attrs["window"])


def _reference(q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **how: Any) -> Tensor:
    return _lse_reference(q, k, v, *given, **how)[0]


def _lse_reference(
    q: Tensor, k: Tensor, v: Tensor, *given: Tensor | None, **how: Any
) -> tuple[Tensor, Tensor]:
    rest, wide = OtherInputs(*given), torch.float32 if q.dtype.itemsize < 4 else q.dtype
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=wide)
    for part in sequences(q, k, rest, how):
        mine = part.of_queries(q), part.of_keys(k), part.of_keys(v)
        y, sums = _of_one(*mine, part.of(rest), part, settled(how, part))
        if y.shape == out.shape:
            out, lse = y, sums
        else:
            part.of_queries(out).copy_(y)
            part.of_sums(lse).copy_(sums)
    t = _like_queries(TensorType.from_tensor(q), tuple(out.shape))
    if out.requires_grad:  # autograd records these very operators
        return out, lse
    # made from ``out``, so that if vmap has batched ``out``, the copy's target is batched as well
    return out.new_empty_strided(t.shape, t.strides, dtype=q.dtype).copy_(out), lse


def _of_one(
    q: Tensor, k: Tensor, v: Tensor, rest: OtherInputs, part: Part, how: Attributes
) -> tuple[Tensor, Tensor]:
    """The result of one sequence, and for each query the logarithm of its sum of e^score."""
    heads, p = q.shape[-3], how["dropout"]
    wk, wv = widened(k, heads), widened(v, heads)
    outs, sums = [], []
    for rows, columns in parts_of(q, k, rest, how):
        some, keys = widened(q[..., rows, :], heads), wk[..., columns, :]
        scores, _ = scores_of(some, keys, rows, columns, rest, part, how)
        none = not keys.shape[-2]
        lse = scores.new_full(scores.shape[:-1], -torch.inf) if none else scores.logsumexp(-1)
        # not by lse, which of very low scores is rounded: rows of them would not sum to 1
        weights = scores.softmax(-1).masked_fill(lse.isneginf()[..., None], 0.0)
        if p and rest.seed is not None:
            seed = rest.seed.to(q.device)
            weights = weights * kept_of(tuple(scores.shape), rows, columns, seed, p, part)
        outs.append((weights @ wv[..., columns, :]).to(q.dtype))
        sums.append(lse)
    out = torch.cat(outs, -2) if outs else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, torch.cat(sums, -1) if sums else q.new_empty(q.shape[:-1], dtype=wk.dtype)


# ---- gradients ---------------------------------------------------------------------------------


def _vjp(b: Ops, v: Vjp) -> Grads:
    """By way of ``attention_lse``, which also returns the log-sum of each query."""
    out, lse = b.attention_lse(*v.ins, **v.attrs)
    return _gradients(b, v, out, lse)


def _gradients(b: Ops, v: Vjp, out: Sym, lse: Sym) -> Grads:
    ins = (*v.ins, *[None] * (len(attention.inputs) - len(v.ins)))
    grads: Grads = [None] * len(ins)
    if len(v.ins) > 10 and any(v.needs[10:]):
        remedy = "detach it; learn a bias [heads, Sq, Sk] instead"
        raise GraphError("what a function of scores captured has no gradient", remedy=remedy)
    if v.needs[4]:
        remedy = "detach them; learn a bias [heads, Sq, Sk] instead"
        raise GraphError("the slopes of attention have no gradient", remedy=remedy)
    grad, more = (*v.grads, None)[:2]
    came = grad if grad is not None else b.zeros(out.type)
    given = (came, *ins[:3], out, lse, *ins[3:], more)
    learned = v.has(3) and v.needs[3] and v.arg(3).dtype.is_float
    if learned:
        grads[:4] = b.attention_full_grad(*given, **v.attrs)
    elif any(v.needs[:3]):
        grads[:3] = b.attention_grad(*given, **v.attrs)
    return grads


# ---- cost and samples --------------------------------------------------------------------------


def flops(slot: int, over_d: int, over_dv: int, ins: Types, outs: Any, attrs: Attributes) -> float:
    """The operations of ``over_d`` products over the D features and ``over_dv`` products over the
    Dv features, for every pair of a query and a key that it sees. q is input number ``slot``."""
    q, k, v = ins[slot : slot + 3]
    pairs = math.prod(q.shape[:-2]) * seen_pairs(q.shape[-2], k.shape[-2], attrs)
    return float(2.0 * pairs * (over_d * q.shape[-1] + over_dv * v.shape[-1]))


PLAIN = ("causal", "scale")


def is_plain(node: Node, *but: str) -> bool:
    """Whether a node uses no more than torch's call offers: a mask or a bias, causal and a scale.
    Attributes named in ``but`` may have any value."""
    more = any(v is not None for v in node.inputs[4:])
    usual, known = attention.normalise({}), (*PLAIN, *but)
    return not more and all(node.attrs[name] == usual[name] for name in usual if name not in known)


def seen_pairs(queries: int, keys: int, attrs: Attributes) -> float:
    """About how many pairs of a query and a key ``causal`` and the window leave."""
    left, right = attrs["window"] or (-1, -1)
    right = 0 if attrs["causal"] and right else right
    offset = attrs["offset"]

    def behind(reach: int) -> float:
        """The number of pairs with j ≤ i + offset + reach."""
        first, last = 1 + offset + reach, queries + offset + reach
        if last <= 0:
            return 0.0
        low, high = max(first, 0), min(last, keys)
        ramp = (low + high) / 2 * max(high - low + 1, 0) if low <= keys else 0.0
        return float(ramp + max(0, last - max(keys, low - 1)) * keys)

    total = behind(right) if right >= 0 else float(queries * keys)
    return max(total - behind(-left - 1), 0.0) if left >= 0 else total


_SEED = "scalar:index<1048576"
_NONE = "_ _ _"  # no bias, slopes or seed
BESIDES = "slopes? seed? q_lengths? k_lengths? blocks? turned? t0? t1? t2?"
INPUTS = f"q k v bias? {BESIDES}"
_SAMPLES = f"""2x2x3x3 2x2x4x3 2x2x4x2 _
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
    | 1x4x5x3 1x2x5x3 1x2x5x2 5 4:positive:f32 {_SEED} dropout=0.3 window=(2,1) nograd
    | 4x9x3 2x8x3 2x8x2 {_NONE} 4:starts<9:i32 4:starts<8:i32 packed=True causal=True align=end
    | 1x2x6x3 1x2x6x3 1x2x6x2 _ _ {_SEED} 3:starts<6 3:starts<6 packed=True dropout=0.2
    | 3x2x4x3 3x1x5x3 3x1x5x2 4x5 _ _ 3:index<5:i32 3:index<6:i32 align=end window=(2,1)
    | 2x2x4x3 2x2x4x3 2x2x4x2 _ _ _ _ 2:index<5 causal=True"""
_SCORE = "f0=read0(h); f1=mul(s,f0); f2=tanh(f1); f2"
_MASK = "n0=sub(i,j); c1=lt(n0,2); c1"
_GIVEN = (Arg((2, 2, 3, 3)), Arg((2, 1, 4, 3)), Arg((2, 1, 4, 2)), *[None] * 7)
_BY_FUNCTIONS = (
    Sample((*_GIVEN, Arg((2,), "positive")), {"score": _SCORE, "mask": _MASK}, grad=False),
    Sample(_GIVEN[:3], {"mask": _MASK}),
    Sample(_GIVEN[:3], {"score": "f0=tanh(s); f0", "causal": True}),
)


@operator(
    Fusion.COMPLEX,
    _reference,
    INPUTS,
    attrs=ATTRS,
    complete=partial(completed, 0),
    vjp=_vjp,
    flops=partial(flops, 0, 1, 1),
    samples=lambda: (*samples(_SAMPLES)(), *_BY_FUNCTIONS),
)
def attention(*types: Given, **how: Any) -> TensorType:
    """softmax(scale · q·kᵀ + bias) · v for each head. A bool bias says which keys a query may look
    at, a float bias is added; ``slopes`` are those of ALiBi, one for each head. ``causal`` and the
    window count from position i + offset. A query that sees no key gives zeros."""
    given: Any = types
    return _like_queries(given[0], checked("attention", *given, **how))


@operator(
    Fusion.COMPLEX,
    _lse_reference,
    INPUTS,
    attrs=ATTRS,
    complete=partial(completed, 0),
    vjp=lambda b, v: _gradients(b, v, *v.outs),
    flops=partial(flops, 0, 1, 1),
    samples=lambda: iter(attention.samples()),
)
def attention_lse(*types: Given, **how: Any) -> tuple[TensorType, TensorType]:
    """:func:`attention`, and the logarithm of the sum of e^score over the keys of each query, −∞
    for a query that sees none: the gradient needs it in place of the scores."""
    given: Any = types
    q, shape = given[0], checked("attention_lse", *given, **how)
    wide = float32 if q.dtype.is_low else q.dtype
    return _like_queries(q, shape), TensorType.of(q.shape[:-1], wide)
