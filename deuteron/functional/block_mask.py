"""Which blocks of scores attention computes: a table made from a mask, which is a function of
positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.score_trace import traced
from deuteron.kinds import checked
from deuteron.ops.score_program import Place, on_tensors

SOME = 1 << 24  # scores for which a mask is evaluated at a time


@dataclass(frozen=True)
class BlockMask:
    """A mask for ``dt.functional.attention(…, mask=…)`` with which kernels skip blocks that no
    query sees. :func:`block_mask` makes it.

    side      how many queries, and how many keys, a block has
    blocks    int32 [batch or 1, heads or 1, blocks of queries, 3 + blocks of keys]. The line of a
              block of queries holds: how many blocks of keys it sees in part; how many in part or
              whole; which line is computed in place of this one, so that the longest come first;
              and which blocks of keys, those seen in part first
    turned    the same for each block of keys, with the blocks of queries that see it
    text      the mask as a program, which kernels evaluate in blocks that are seen in part
    captured  the tensors that the program reads
    lengths   how many queries and how many keys there are

    >>> seen = dt.functional.block_mask(dt.functional.masks.window(512), None, None, 8192, 8192)
    >>> seen.density, seen.dense().shape
    """

    blocks: Tensor
    turned: Tensor
    side: int
    text: str
    captured: tuple[Tensor, ...]
    lengths: tuple[int, int]

    @property
    def density(self) -> float:
        """The fraction of all blocks that is computed."""
        lines, columns = self.blocks.shape[2], self.turned.shape[2]
        total = self.blocks.shape[0] * self.blocks.shape[1] * lines * columns
        return float(self.blocks[..., 1].sum()) / max(total, 1)

    def dense(self) -> Tensor:
        """Return the mask written out, to look at: bool [batch or 1, heads or 1, queries, keys]."""
        batch, heads = self.blocks.shape[:2]
        places = _places(batch, heads, range(self.lengths[0]), self.lengths[1], self.blocks.device)
        return _asked(self.text, places, self.captured)

    @classmethod
    def from_torch(cls, mask: Any) -> BlockMask:
        """Make the same mask as a ``BlockMask`` of FlexAttention, from the function that one was
        made of. Its blocks must have as many queries as keys."""
        batch, heads = mask.kv_num_blocks.shape[:2]
        side, other = mask.BLOCK_SIZE
        if side != other:
            wrong = f"blocks of {side} queries and {other} keys"
            remedy = "make it with one BLOCK_SIZE for both"
            raise BindError(wrong, asked="BlockMask.from_torch(…)", remedy=remedy)
        where = mask.kv_num_blocks.device
        return block_mask(mask.mask_mod, batch, heads, *mask.seq_lengths, device=where, block=side)

    def to(self, device: Any) -> BlockMask:
        """Return the same mask on another device."""
        moved = tuple(t.to(device) for t in self.captured)
        blocks, turned = self.blocks.to(device), self.turned.to(device)
        return BlockMask(blocks, turned, self.side, self.text, moved, self.lengths)


@checked()
def block_mask(
    mask: Callable[..., Any],
    batch: int | None,
    heads: int | None,
    queries: int,
    keys: int,
    *,
    device: Any = None,
    block: int = 128,
) -> BlockMask:
    """Evaluate a mask for every pair of query and key, once, and return the table of its blocks.

    mask           ``mask(b, h, i, j)``: whether query i sees key j, in batch b and head h
    batch, heads   how many there are, or None where the mask is the same for all
    queries, keys  how many there are
    block          how many queries and keys a block has: for kernels on a GPU a multiple of 64
    device         where the attention runs; by default the device of the tensors that the mask
                   captures

    Attention with this table computes only the blocks in which some query sees some key, and
    evaluates the mask again only in those in which not every query sees every key.
    :mod:`dt.functional.masks` has the usual masks.

    >>> seen = dt.functional.block_mask(dt.functional.masks.longformer(256, 64), None, None, n, n)
    >>> y = dt.functional.attention(q, k, v, mask=seen)
    """
    few = min(1 if n is None else n for n in (batch, heads))
    if block < 1 or few < 1 or min(queries, keys) < 0:
        wrong = f"block_mask of {queries} × {keys} in blocks of {block}"
        raise BindError(
            wrong, asked="block_mask(…)", remedy="give lengths from 0, and all else from 1"
        )
    captured: list[Tensor] = []
    text = traced(mask, captured, True)
    if device is None:
        device = captured[0].device if captured else torch.get_default_device()
    device = torch.device(device)
    captured = [t.detach().to(device) for t in captured]
    lines, columns = -(-queries // block), -(-keys // block)
    sizes = batch or 1, heads or 1
    some = torch.zeros((*sizes, lines, columns), dtype=torch.bool, device=device)
    whole = torch.zeros_like(some)
    each = max(1, SOME // max(1, sizes[0] * sizes[1] * block * columns * block))
    for first in range(0, lines, each):
        rows = range(first * block, min((first + each) * block, lines * block))
        at = _places(*sizes, rows, columns * block, device)
        seen = _asked(text, _within(at, queries, keys), captured)
        tiles = seen.unflatten(3, (columns, block)).unflatten(2, (-1, block))
        inside = (at.i < queries).unflatten(0, (-1, block))[:, :, :, None]  # rows that exist
        beyond = (at.j >= keys).unflatten(0, (columns, block))
        tiles = tiles & ~beyond
        some[:, :, first : first + each] = (tiles & inside).any(-1).any(3)
        whole[:, :, first : first + each] = (tiles | ~inside).all(-1).all(3)
    return BlockMask(
        _table(some, whole),
        _table(some.mT, whole.mT),
        block,
        text,
        tuple(captured),
        (queries, keys),
    )


def _places(batch: int, heads: int, rows: range, keys: int, device: Any) -> Place:
    def count(n: int, first: int = 0) -> Tensor:
        return torch.arange(first, first + n, dtype=torch.int32, device=device)

    own = count(len(rows), rows.start)[:, None]
    return Place(count(batch)[:, None, None, None], count(heads)[:, None, None], own, count(keys))


def _within(at: Place, queries: int, keys: int) -> Place:
    """Replace positions beyond the last one by the last, so that tensors that a mask reads have an
    element there."""
    i, j = at.i.clamp(max=max(queries - 1, 0)), at.j.clamp(max=max(keys - 1, 0))
    return at._replace(i=i, j=j)


def _asked(text: str, at: Place, captured: Any) -> Tensor:
    """Return what a mask says of all these places."""
    shape = torch.broadcast_shapes(*(t.shape for t in at))
    found = on_tensors(text, torch.zeros((), device=at.i.device), at, captured)[0]
    return torch.as_tensor(found, device=at.i.device).expand(shape)


def _table(some: Tensor, whole: Tensor) -> Tensor:
    """Return the lines of a :class:`BlockMask`: how many blocks are seen in part, how many in part
    or whole, which line is computed in place of this one so that the longest come first, and which
    blocks, those seen in part first."""
    part = some & ~whole
    order = torch.where(part, 0, torch.where(some, 1, 2))
    places = order.argsort(dim=-1, stable=True)
    counts = some.sum(-1)
    longest = counts.argsort(dim=-1, descending=True, stable=True)
    front = torch.stack([part.sum(-1), counts, longest], -1)
    return torch.cat([front, places], -1).to(torch.int32).contiguous()
