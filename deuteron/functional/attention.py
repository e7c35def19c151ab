"""Attention, with all that may stand between scores and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.activation import seed_of
from deuteron.functional.autocast import lower
from deuteron.functional.context import any_requires_grad
from deuteron.functional.core import Function
from deuteron.functional.delegate import REFUSALS, delegates, delegation, told
from deuteron.functional.operators import schema
from deuteron.ops import Ops, Sym, table


def _build(b: Ops, *tensors: Sym | None, **attrs: Any) -> tuple[Sym, ...]:
    found: tuple[Sym, ...] = b.attention_lse(*tensors, **attrs)
    return found


_SCHEMA = schema(table.get("attention"))
ATTENTION = Function("attention", lambda b, *given, **attrs: b.attention(*given, **attrs), _SCHEMA)
TRAINED = Function("attention_trained", _build, _SCHEMA, handed=1)
WITH_SUMS = Function("attention_lse", _build, _SCHEMA)


@delegates()
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
    return_lse: bool = False,
) -> Any:
    """softmax(scale · q·kᵀ + bias) · v for q [batch, heads, Sq, D] and k, v [batch, kv heads, Sk,
    D], forward and backward without a matrix of scores in memory. Heads of k and v may be fewer,
    each for an equal run of query heads.

    bias       added to the scores, with a gradient, or bool: which keys a query may look at; sizes
               of 1 stand for all
    causal     query i sees keys up to i + ``offset``, the position of the first query among keys
    window     (left, right): how many keys before and after its own a query sees, -1 for all; what
               it does not see is not read
    softcap    scores are held within ± this by tanh
    slopes     of ALiBi, one float32 for each head: − slope · distance is added; without a gradient
    dropout    the probability that a weight is dropped, by a ``seed`` and its place: the same on
               every device; without a seed one is drawn from torch's generator
    return_lse also the logarithm of the sum of e^score of each query [batch, heads, Sq]

    A query that sees no key gives zeros. Plain attention is torch's own call.

    >>> y = dt.functional.attention(q, k, v, causal=True, window=(1024, 0), softcap=50.0)
    """
    q, k, v = lower(q, k, v)
    plain = (
        bias is None and slopes is None and window is None and not (softcap or offset or dropout)
    )
    if plain and not return_lse and delegation.allowed:
        try:
            grouped = q.shape[-3] != k.shape[-3]
            y = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped
            )
            return told(y, "attention", q, "plain attention is torch's own call")
        except REFUSALS:
            pass  # a plan of ours says what is wrong
    if dropout and not 0.0 <= dropout < 1.0:
        wrong = f"dropout={dropout} is not a probability below 1"
        raise BindError(wrong, asked=f"attention(…, dropout={dropout})", remedy="use 0 <= p < 1")
    drawn = seed_of(seed, q) if dropout else None
    how: Any = {"causal": causal, "scale": scale, "softcap": float(softcap), "offset": offset}
    how |= {"window": None if window is None else tuple(window), "dropout": float(dropout)}
    given = (q, k, v, bias, slopes, drawn)
    if return_lse:
        return WITH_SUMS(*given, **how)
    trained = torch.is_grad_enabled() and any_requires_grad(given)
    return (TRAINED if trained else ATTENTION).one(*given, **how)
