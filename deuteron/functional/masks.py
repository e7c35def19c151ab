"""Masks for ``dt.functional.attention(…, mask=…)`` and ``dt.functional.block_mask``: each of these
gives a function of batch, head, query and key. ``both`` and ``either`` join them.

>>> mask = masks.both(masks.causal(), masks.documents(ids))
>>> seen = dt.functional.block_mask(mask, ids.shape[0], None, n, n)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError

Mask = Callable[[Any, Any, Any, Any], Any]


def causal(offset: int = 0) -> Mask:
    """Keys up to the query's own position, which is that of the key ``offset`` further on."""
    return lambda b, h, i, j: j <= i + offset


def window(left: int, right: int = 0) -> Mask:
    """So many keys before and after the query's own position."""
    return lambda b, h, i, j: (j >= i - left) & (j <= i + right)


def prefix(length: int | Tensor) -> Mask:
    """Causal, but for a prefix that everybody sees: one length, or one for each batch."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        end = length[b] if isinstance(length, Tensor) and length.ndim else length
        return (j <= i) | (j < end)

    return mask


def documents(ids: Tensor) -> Mask:
    """Keys of the same document, by a number for each position [tokens] or [batch, tokens]."""
    if ids.ndim == 1:
        return lambda b, h, i, j: ids[i] == ids[j]
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


def longformer(reach: int, first: int) -> Mask:
    """``reach`` keys on each side, and the ``first`` positions with everybody: they see all, and
    all see them."""
    return lambda b, h, i, j: ((i - j <= reach) & (j - i <= reach)) | (i < first) | (j < first)


def bigbird(
    length: int,
    block: int = 128,
    near: int = 1,
    first: int = 1,
    random: int = 3,
    seed: int = 0,
    device: Any = None,
) -> Mask:
    """In blocks of so many positions: ``near`` blocks on each side, the ``first`` blocks with
    everybody, and for each block of queries ``random`` others, drawn by a seed."""
    count = -(-length // block)
    if min(near, first, random) < 0 or block < 1:
        wrong = f"bigbird of blocks of {block} with {near}, {first} and {random} of them"
        raise BindError(
            wrong, asked="masks.bigbird(…)", remedy="give numbers from 0, blocks from 1"
        )
    draw = torch.rand(count, count, generator=torch.Generator().manual_seed(seed))
    at = torch.arange(count)
    known = ((at[:, None] - at).abs() <= near) | (at[:, None] < first) | (at < first)
    places = draw.masked_fill(known, -1.0).topk(min(random, count), dim=-1)
    extra = torch.zeros(count, count, dtype=torch.bool)
    extra.scatter_(-1, places.indices, places.values >= 0)
    seen = (known | extra).to(device)
    return lambda b, h, i, j: seen[i // block, j // block]


def both(*masks: Mask) -> Mask:
    """What all of them see."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        found: Any = True
        for each in masks:
            found = each(b, h, i, j) & found
        return found

    return mask


def either(*masks: Mask) -> Mask:
    """What any of them sees."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        found: Any = False
        for each in masks:
            found = each(b, h, i, j) | found
        return found

    return mask
