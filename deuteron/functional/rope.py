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
    """Rotary positions on q [B, S, H, D], and on k with its own number of heads, in one launch.

    Token s stands at ``offset + s``, or where ``positions`` [B, S] says: for decoding. Angles come
    from tables ``cos`` and ``sin`` [positions, dims/2], or from ``base``. ``dims`` rotates only the
    first features. Pairs are (i, i + dims/2), or neighbours where ``interleaved``. ``seq_dim=2``
    takes [B, H, S, D]. Returns q, or (q, k).

    >>> q, k = dt.functional.rope(q, k, offset=cache_length)
    """
    attrs = {"interleaved": interleaved, "dims": dims, "base": base, "offset": offset}
    return ROPE(q, k, cos, sin, positions, axis=seq_dim, **attrs)


# ---- with an angle for each feature, as transformers hands them from layer to layer


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


# on a CPU torch's small calls are quicker than ours together; on a GPU they are a dozen launches,
# and twice as many for the gradient
@delegates(_torch_rotate, unless=lambda q, *_: q.is_cuda, autocast=True)
def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int, dtype: torch.dtype) -> Any:
    """x · cos + (−x₂, x₁) · sin of q and k [B, H, S, D], where x₁ and x₂ are the halves of the
    features that ``cos`` and ``sin`` [B or 1, S, features] have; others stay as they are. ``axis``
    is that of the heads, which the tables do not have. Results are of type ``dtype``."""
    return ROTATE(q, k, cos, sin, axis=axis, dtype=type_of(dtype).short)
