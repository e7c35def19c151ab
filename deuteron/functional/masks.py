"""Masks for ``dt.functional.attention(…, mask=…)`` and ``dt.functional.block_mask``. Each function
here returns a mask, a function of batch, head, query and key; ``both`` and ``either`` combine
masks.

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
    """Query i sees the keys up to i + ``offset``, its own position among the keys."""
    return lambda b, h, i, j: j <= i + offset


def window(left: int, right: int = 0) -> Mask:
    """Query i sees key i, ``left`` keys before it and ``right`` keys after it."""
    return lambda b, h, i, j: (j >= i - left) & (j <= i + right)


def prefix(length: int | Tensor) -> Mask:
    """Causal, but every query also sees the first ``length`` keys: a number, or a tensor with one
    for each batch."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        end = length[b] if isinstance(length, Tensor) and length.ndim else length
        return (j <= i) | (j < end)

    return mask


def documents(ids: Tensor) -> Mask:
    """A query sees the keys of its own document. ``ids`` has the number of the document of each
    position, [tokens] or [batch, tokens]."""
    if ids.ndim == 1:
        return lambda b, h, i, j: ids[i] == ids[j]
    return lambda b, h, i, j: ids[b, i] == ids[b, j]


def longformer(reach: int, first: int) -> Mask:
    """A query sees ``reach`` keys on each side. The ``first`` positions see all keys, and every
    query sees them."""
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
    """In blocks of ``block`` positions, of ``length`` in all: a block of queries sees ``near``
    blocks on each side and ``random`` others, drawn by ``seed``. The ``first`` blocks see all
    blocks, and every block sees them. ``device``: where the attention runs."""
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
    """A query sees the keys that it sees by all of the masks."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        found: Any = True
        for each in masks:
            found = each(b, h, i, j) & found
        return found

    return mask


def either(*masks: Mask) -> Mask:
    """A query sees the keys that it sees by any of the masks."""

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        found: Any = False
        for each in masks:
            found = each(b, h, i, j) | found
        return found

    return mask
