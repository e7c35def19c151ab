"""How many elements lie in each of several equal parts of a range.

    counts[i] = #{x : low ≤ x ≤ high, ⌊(x − low) · bins / (high − low)⌋ = i}, high in the last part

Bytes: every element is read once, the counts are written once. A program counts its blocks in
registers. A small tensor is one program's, which stores its counts; many programs add theirs to
zeros, and whole numbers come to the same whatever the order. Arithmetic is that of ``torch.histc``:
float32 in float32, and all narrower types and whole numbers in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


@triton.jit
def _histogram(
    x,
    counts,
    size,
    BINS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
):
    found = tl.zeros((SLOTS,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for begin in range(tl.program_id(0).to(tl.int64) * BLOCK, size, step):
        place = begin + tl.arange(0, BLOCK)
        value = tl.load(x + place, mask=place < size)
        if value.dtype == tl.float32:
            scaled = tl.div_rn((value - LOW) * BINS, tl.full((BLOCK,), HIGH - LOW, tl.float32))
        else:
            value = value.to(tl.float64)
            scaled = (value - LOW) * BINS / (HIGH - LOW)
        inside = (place < size) & (value >= LOW) & (value <= HIGH)
        # what lies outside, and nan, is counted in a slot of its own that nobody reads
        slot = tl.where(inside, tl.minimum(scaled, BINS - 1.0), BINS * 1.0).to(tl.int32)
        found += tl.histogram(slot, SLOTS)
    slots = tl.arange(0, SLOTS)
    if SHARED:
        tl.atomic_add(counts + slots, found.to(tl.int64), mask=slots < BINS, sem="relaxed")
    else:
        tl.store(counts + slots, found.to(tl.int64), mask=slots < BINS)


histogram = Launchable(_histogram)


def count(
    size: int, bins: int, low: float, high: float, slots: int, block: int, programs: int, warps: int
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """The counts of ``size`` elements that lie next to each other, in any order."""

    launch = histogram.settled(
        (programs,),
        size,
        warps=warps,
        BINS=bins,
        LOW=low,
        HIGH=high,
        SLOTS=slots,
        BLOCK=block,
        SHARED=programs > 1,
    )

    def add_up(x: torch.Tensor, counts: torch.Tensor) -> None:
        counts.zero_()
        launch(x, counts)

    return launch if programs == 1 else add_up
