"""Rotary positions on queries and keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deuteron.functional.core import Function
from deuteron.functional.delegate import delegates
from deuteron.functional.operators import operator
from deuteron.ir.dtype import dtype as type_of
from deuteron.ops import Ops, Sym

ROPE = operator("rope")


@delegates()
def rope(
    q: Tensor,
    k: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    offset: int = 0,
    seq_dim: int = 1,
    interleaved: bool = False,
    dims: int | None = None,
    base: float = 10000.0,
) -> Any:
    """Apply rotary positions to q [B, S, H, D], and to k, which may have another number of heads,
    in one launch. Return q, or (q, k).

    a' = a·cos θ − b·sin θ     b' = b·cos θ + a·sin θ     θ = position · base^(−2i / dims)

    for pair i, (a, b), of a head's features.

    positions    [B, S], the position of each token, for decoding; by default token s stands at
                 ``offset + s``
    cos, sin     tables [positions, dims/2] that the angles are read from; by default they come from
                 ``base``
    dims         rotate only so many features, the first ones
    interleaved  pairs are neighbours (2i, 2i + 1), not (i, i + dims/2)
    seq_dim      the dimension of positions: 2 for q and k [B, H, S, D]

    >>> q, k = dt.functional.rope(q, k, offset=cache_length)
    """
    attrs = {"interleaved": interleaved, "dims": dims, "base": base, "offset": offset}
    return ROPE(q, k, cos, sin, positions, axis=seq_dim, **attrs)


# ---- with an angle for each feature, as transformers passes them from layer to layer


def _rotate(
    b: Ops, q: Sym, k: Sym | None, cos: Sym, sin: Sym, *, axis: int, dtype: str
) -> tuple[Sym, ...]:
    features = cos.shape[-1]
    beside = (*cos.shape[:axis], 1, *cos.shape[axis:])
    tables = [b.upcast(b.reshape(t, beside)) for t in (cos, sin)]

    def halves(x: Sym) -> tuple[Sym, Sym]:
        middle = features // 2
        return b.slice(x, axis=-1, stop=middle), b.slice(x, axis=-1, start=middle, stop=features)

    def turned(x: Sym) -> Sym:
        (x1, x2), (c1, c2), (s1, s2) = halves(b.upcast(x)), *map(halves, tables)
        parts = [x1 * c1 - x2 * s1, x2 * c2 + x1 * s2]
        if x.shape[-1] > features:
            parts.append(b.upcast(b.slice(x, axis=-1, start=features)))
        return b.to(b.concat(parts, axis=-1), type_of(dtype))

    return tuple(turned(x) for x in (q, k) if x is not None)


ROTATE = Function("rotate", _rotate)


def _torch_rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int, dtype: torch.dtype
) -> Any:
    if cos.shape[-1] != q.shape[-1]:
        return NotImplemented
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return (x * cos + torch.cat((-b, a), -1) * sin).to(dtype)

    return turned(q), turned(k)


# On a CPU torch's small calls are together quicker than ours. On a GPU they are a dozen launches,
# and twice as many for the gradient.
@delegates(_torch_rotate, unless=lambda q, *_: q.is_cuda, autocast=True)
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int, dtype: torch.dtype) -> Any:
    """Return x · cos + (−x₂, x₁) · sin for q and for k [B, H, S, D]. x₁ and x₂ are the halves of
    those features that ``cos`` and ``sin`` [B or 1, S, features] have; further features stay as
    they are. ``axis`` is the dimension of the heads, which the tables do not have. Results are of
    type ``dtype``."""
    return ROTATE(q, k, cos, sin, axis=axis, dtype=type_of(dtype).short)
