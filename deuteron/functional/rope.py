"""Rotary positions on queries and keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from deuteron.functional.delegate import delegates
from deuteron.functional.operators import operator

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
