"""The arena: one block of memory, its parts reused as soon as their values are dead."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

ALIGN = 256


@dataclass(frozen=True)
class Buffer:
    """A value that needs memory from step ``first`` to step ``last``, both included."""

    name: str
    size: int
    first: int
    last: int


def aligned(size: int) -> int:
    return (size + ALIGN - 1) // ALIGN * ALIGN


def pack(buffers: Sequence[Buffer]) -> tuple[dict[str, int], int]:
    """Offsets for every buffer and the size of the block.

    Walks through time. Each buffer takes the smallest gap that fits between those alive with it;
    where none does, the block grows at its end.
    """
    live: list[tuple[int, int, int]] = []  # (offset, end, last)
    top = 0
    offsets: dict[str, int] = {}
    for buffer in sorted(buffers, key=lambda b: (b.first, -b.size)):
        live = sorted(entry for entry in live if entry[2] >= buffer.first)
        size = aligned(buffer.size)
        begins = [0, *(end for _, end, _ in live)]
        ends = [*(offset for offset, _, _ in live), top]
        gaps = [(b - a, a) for a, b in zip(begins, ends, strict=True) if b - a >= size]
        _, offset = min(gaps, default=(0, begins[-1]))
        offsets[buffer.name], top = offset, max(top, offset + size)
        if size:
            live.append((offset, offset + size, buffer.last))
    return offsets, top


def peak(buffers: Sequence[Buffer]) -> int:
    """Largest sum of sizes alive at one step."""
    change: Counter[int] = Counter()
    for b in buffers:
        change[b.first] += aligned(b.size)
        change[b.last + 1] -= aligned(b.size)
    return max(accumulate(change[step] for step in sorted(change)), default=0)
