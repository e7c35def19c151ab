"""The arena: one block of memory, its parts reused as soon as their values are dead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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

    Walks through time with a list of free gaps, taking the smallest gap that fits; linear in
    the number of buffers but for the search in the gaps.
    """
    events = sorted(buffers, key=lambda b: (b.first, -b.size))
    live: list[tuple[int, int, int]] = []  # (last, offset, size)
    free: list[tuple[int, int]] = []  # (offset, size), disjoint, sorted by offset
    top = 0
    offsets: dict[str, int] = {}
    for buffer in events:
        ended = [entry for entry in live if entry[0] < buffer.first]
        if ended:
            live = [entry for entry in live if entry[0] >= buffer.first]
            free = _joined(free + [(offset, size) for _, offset, size in ended])
        size = aligned(buffer.size)
        fitting = [gap for gap in free if gap[1] >= size]
        if fitting:
            offset, gap = min(fitting, key=lambda g: g[1])
            free.remove((offset, gap))
            if gap > size:
                free = _joined([*free, (offset + size, gap - size)])
        else:
            tail = free[-1] if free and free[-1][0] + free[-1][1] == top else None
            offset = tail[0] if tail else top
            if tail:
                free.remove(tail)
            top = offset + size
        offsets[buffer.name] = offset
        if size:
            live.append((buffer.last, offset, size))
    return offsets, top


def _joined(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for offset, size in sorted(gaps):
        if out and out[-1][0] + out[-1][1] == offset:
            out[-1] = (out[-1][0], out[-1][1] + size)
        else:
            out.append((offset, size))
    return out


def peak(buffers: Sequence[Buffer]) -> int:
    """Largest sum of sizes alive at one step."""
    change: dict[int, int] = {}
    for b in buffers:
        change[b.first] = change.get(b.first, 0) + aligned(b.size)
        change[b.last + 1] = change.get(b.last + 1, 0) - aligned(b.size)
    level = best = 0
    for step in sorted(change):
        level += change[step]
        best = max(best, level)
    return best
