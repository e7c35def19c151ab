"""How many elements lie in each of several equal parts of a range.

    counts[i] = #{x : low ≤ x ≤ high, ⌊(x − low) · bins / (high − low)⌋ = i}, high in the last part

Bytes: every element is read once, the counts are written once. A program counts its blocks in
registers. For a small tensor one program counts everything and stores the counts. For a large one
many programs add theirs to zeros by atomics, and sums of integers do not depend on the order.
Arithmetic is that of ``torch.histc``: float32 in float32, all narrower types and integers in
float64.

Generated code cannot count: without this kernel torch computes every element's bin and scatters
ones, in a dozen passes. On an H200 a small histogram takes 22 µs instead of 24 (bench/results/
small-h200.md), and keeps bfloat16 right, which ``torch.histc`` does not.
"""

from collections import namedtuple
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

# count: equal parts of low … high; slots: counters, in registers, of which one is for values
# outside of the range; block: elements at a time; shared: several programs add to the same counts.
Bins = namedtuple("Bins", "count low high slots block shared")


@triton.jit
def _histogram(x, counts, size, B: tl.constexpr):
    found = tl.zeros((B.slots,), tl.int32)
    step = tl.num_programs(0).to(tl.int64) * B.block
    for begin in range(tl.program_id(0).to(tl.int64) * B.block, size, step):
        place = begin + tl.arange(0, B.block)
        value = tl.load(x + place, mask=place < size)
        if value.dtype == tl.float32:
            scaled = tl.div_rn(
                (value - B.low) * B.count, tl.full((B.block,), B.high - B.low, tl.float32)
            )
        else:
            value = value.to(tl.float64)
            scaled = (value - B.low) * B.count / (B.high - B.low)
        inside = (place < size) & (value >= B.low) & (value <= B.high)
        # values outside of the range, and nan, are counted in a slot that is never read
        slot = tl.where(inside, tl.minimum(scaled, B.count - 1.0), B.count * 1.0).to(tl.int32)
        found += tl.histogram(slot, B.slots)
    slots = tl.arange(0, B.slots)
    if B.shared:
        tl.atomic_add(counts + slots, found.to(tl.int64), mask=slots < B.count, sem="relaxed")
    else:
        tl.store(counts + slots, found.to(tl.int64), mask=slots < B.count)


histogram = Launchable(_histogram)


def count(size: int, bins: Bins, programs: int, warps: int) -> Callable[..., None]:
    """Return a function (x, counts) for ``size`` elements without gaps, in any memory order."""
    launch = histogram.settled((programs,), size, warps=warps, B=bins)

    def add_up(x: torch.Tensor, counts: torch.Tensor) -> None:
        counts.zero_()
        launch(x, counts)

    return launch if programs == 1 else add_up
