"""Pages of keys and values for sequences that grow independently of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.kinds import checked


class PagedCache(nn.Module):
    """Keys and values of many sequences in pages of one size. Sequences get pages as they grow and
    give them back when they end, so that memory holds what is there, not the longest that might
    come.

    pages      how many there are, for all sequences together
    positions  how many of them a page holds
    kv_heads, features, dtype, device
               of the keys and the values

    >>> cache = dt.nn.PagedCache(4096, 64, kv_heads=8, features=128, device="cuda")
    >>> one, two = cache.add(), cache.add()
    >>> cache.append([one, two], k, v)          # k, v [2, kv heads, new positions, features]
    >>> y = cache([one, two], q)                # q [2, heads, new positions, features]
    >>> cache.remove(one)
    """

    keys: Tensor
    values: Tensor

    @checked(name="PagedCache")
    def __init__(
        self,
        pages: int,
        positions: int = 64,
        *,
        kv_heads: int,
        features: int,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        shape = (pages, positions, kv_heads, features)
        for name in ("keys", "values"):
            room = torch.zeros(shape, dtype=dtype, device=device)
            self.register_buffer(name, room, persistent=False)
        self._free = list(range(pages - 1, -1, -1))
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0
        self._known: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def extra_repr(self) -> str:
        pages, positions, heads, features = self.keys.shape
        used = pages - len(self._free)
        return f"{used} of {pages} pages of {positions} positions, {heads} heads of {features}"

    def add(self) -> int:
        """Begin a new sequence without any keys, and return its number."""
        number, self._next = self._next, self._next + 1
        self._pages[number], self._lengths[number] = [], 0
        return number

    def remove(self, sequence: int) -> None:
        """End a sequence, and take its pages back."""
        self._free += reversed(self._pages_of(sequence))
        del self._pages[sequence], self._lengths[sequence]
        self._known = None

    def length(self, sequence: int) -> int:
        """Return how many keys a sequence has."""
        self._pages_of(sequence)
        return self._lengths[sequence]

    def _pages_of(self, sequence: int) -> list[int]:
        if sequence not in self._pages:
            known = ", ".join(map(str, self._pages)) or "none"
            wrong = f"there is no sequence {sequence!r}"
            raise BindError(wrong, asked="PagedCache", remedy=f"add() one; there are {known}")
        return self._pages[sequence]

    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Put keys and values [sequences, kv heads, new positions, features] behind those that are
        there. If there are too few pages, nothing is written and an error says so."""
        _, positions, heads, features = self.keys.shape
        count = k.shape[2] if k.ndim == 4 else -1
        if k.shape != (len(sequences), heads, count, features) or v.shape != k.shape:
            wrong = f"k {list(k.shape)} and v {list(v.shape)} for {len(sequences)} sequences"
            remedy = f"give [{len(sequences)}, {heads}, new positions, {features}]"
            raise BindError(wrong, asked="PagedCache.append", remedy=remedy)
        if len(set(sequences)) < len(sequences):
            wrong = "a sequence is named twice"
            raise BindError(wrong, asked="PagedCache.append", remedy="append to it once")
        lacking = {
            s: -(-(self.length(s) + count) // positions) - len(self._pages[s]) for s in sequences
        }
        if sum(lacking.values()) > len(self._free):
            wrong = f"{sum(lacking.values())} more pages are needed, {len(self._free)} are free"
            remedy = "remove() sequences that have ended, or make the cache larger"
            raise BindError(wrong, asked="PagedCache.append", remedy=remedy)
        slots: list[int] = []
        for s, more in lacking.items():
            self._pages[s] += [self._free.pop() for _ in range(more)]
            at = range(self._lengths[s], self._lengths[s] + count)
            slots += [self._pages[s][i // positions] * positions + i % positions for i in at]
            self._lengths[s] += count
        self._known = None
        index = torch.tensor(slots, dtype=torch.int64, device=self.keys.device)
        for pages, new in ((self.keys, k), (self.values, v)):
            rows = new.transpose(1, 2).reshape(-1, heads, features).to(pages.dtype)
            pages.view(-1, heads, features).index_copy_(0, index, rows)

    def tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the table [sequences, most pages] and lengths that ``paged_attention`` takes."""
        asked, known = tuple(sequences), self._known
        if known is None or known[0] != asked or known[1].device != self.keys.device:
            rows = [self._pages_of(s) for s in asked]
            most = max((len(row) for row in rows), default=0)
            table = [row + [0] * (max(most, 1) - len(row)) for row in rows]
            lengths = [self._lengths[s] for s in asked]
            new: Any = {"dtype": torch.int32, "device": self.keys.device}
            known = asked, torch.tensor(table, **new), torch.tensor(lengths, **new)
            self._known = known
        return known[1:]

    def forward(
        self,
        sequences: Sequence[int],
        q: Tensor,
        *,
        scale: float | None = None,
        window: int = -1,
        softcap: float = 0.0,
    ) -> Tensor:
        """Return the attention of q [sequences, heads, S, features], the last S positions of each
        sequence; scale, window and softcap are those of :func:`dt.functional.paged_attention`."""
        how: Any = {"scale": scale, "window": window, "softcap": softcap}
        return F.paged_attention(q, self.keys, self.values, *self.tables(sequences), **how)
