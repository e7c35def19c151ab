"""y = f(conv(x, w), …) of a depthwise convolution: every channel has weights of its own.

Nothing is multiplied as matrices, so reading limits the speed: x, w and y once from memory, 4 bytes
for each number of 16 bits, and 2·kh·kw operations on it. Generated code does that for small windows
(``codegen/windows.py``); it unrolls a window, and a large one makes long code. Here a program walks
down the rows of a window in a loop. A thread has a few channels of ``copies`` neighbours along a
row: it loads what lies under one row of all their windows once, converts it to float32 once, and
adds each number to as many sums as there are taps along the row.

Where the mean of y over each image is wanted as well, as for squeeze-and-excitation, programs store
the sums of what they wrote, and a second kernel adds these up in a fixed order.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.kernels.triton.product import EpilogueFormula, finishing

# images; height, width: of an image of x; down, across: of an image of the result.
Sizes = namedtuple("Sizes", "images height width down across")
# kh, kw: taps of a window; sh, sw: strides; ph, pw: zeros before x; dh, dw: dilations; channel,
# tap: from the weight of one channel, and of one tap, to the next; channels; line: from one pixel
# of x to the next; reverse: the taps are taken from the last to the first, as in the gradient for
# x.
Window = namedtuple(
    "Window", "kh kw sh sw ph pw dh dw channel tap channels line reverse", defaults=(False,)
)
# runs, channels: of a program; copies: neighbours along a row that make a run; summed: the result
# is also added up over each image.
Tile = namedtuple("Tile", "runs channels copies summed CHAIN")


@triton.constexpr_function
def _is_read(e, copies, kw, sw, dw):
    """Whether any window of a run has a tap ``e`` pixels behind where the first window begins."""
    return any(q * sw + t * dw == e for q in range(copies) for t in range(kw))


@triton.jit
def _row(
    sums, r, lines, taps, row, j, live, channel, known, size, W: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Return ``sums`` plus what row ``r`` of all windows of a run adds to them."""
    SPAN: tl.constexpr = (T.copies - 1) * W.sw + (W.kw - 1) * W.dw + 1
    i = row * W.sh - W.ph + r * W.dh
    inside = live & (i >= 0) & (i < size.height)
    under = ()
    for e in tl.static_range(SPAN):
        if _is_read(e, T.copies, W.kw, W.sw, W.dw):
            mask = (inside & (j + e >= 0) & (j + e < size.width))[:, None] & known
            at = ((i * size.width + j + e) * W.line)[:, None]
            under = under + (tl.load(lines + at, mask=mask, other=0.0).to(tl.float32),)
        else:
            under = under + (0.0,)
    for t in tl.static_range(W.kw):
        if taps is None:  # windows of one pixel, without weights
            weight = 1.0
        else:
            tap = r * W.kw + t
            if W.reverse:
                tap = W.kh * W.kw - 1 - tap
            at = taps + channel[None, :] * W.channel + tap * W.tap
            weight = tl.load(at, mask=known, other=0.0).to(tl.float32)
        more = ()
        for q in tl.static_range(T.copies):
            more = more + (sums[q] + under[q * W.sw + t * W.dw] * weight,)
        sums = more
    return sums


@triton.jit
def weighed(
    lines, taps, row, first, live, channel, known, size, W: tl.constexpr, T: tl.constexpr
):  # fmt: skip
    """Return the sums over windows for runs of neighbours, which begin at column ``first`` of a row
    of the result, and for some channels: one block [runs, channels] for each neighbour."""
    j = first * W.sw - W.pw
    sums = ()
    for _ in tl.static_range(T.copies):
        sums = sums + (tl.zeros((T.runs, T.channels), tl.float32),)
    for r in range(W.kh):
        sums = _row(sums, r, lines, taps, row, j, live, channel, known, size, W, T)
    return sums


@triton.jit
def _conv(
    x, w, y, left, others, size, W: tl.constexpr, T: tl.constexpr, FINISH: tl.constexpr
):  # fmt: skip
    enter(T.CHAIN, True)
    blocks = tl.cdiv(W.channels, T.channels)
    along = tl.cdiv(size.across, T.copies)  # runs of a row
    run = tl.program_id(0) // blocks * T.runs + tl.arange(0, T.runs)
    channel = tl.program_id(0) % blocks * T.channels + tl.arange(0, T.channels)
    if T.summed:  # a program stays in one image
        image = run * 0 + tl.program_id(1)
        live = run < size.down * along
        row = run // along
    else:
        live = run < size.images * size.down * along
        image, row = run // along // size.down, run // along % size.down
    first = run % along * T.copies
    known = (channel < W.channels)[None, :]
    lines = x + image.to(tl.int64) * (size.height * size.width * W.line)
    lines = lines[:, None] + channel[None, :]
    sums = weighed(lines, w, row, first, live, channel, known, size, W, T)
    total = tl.zeros((T.runs, T.channels), tl.float32)
    for q in tl.static_range(T.copies):
        pixel = (image * size.down + row) * size.across + first + q
        mask = (live & (first + q < size.across))[:, None] & known
        found = FINISH(sums[q], others, pixel, image, channel, mask, W)
        to = y + pixel.to(tl.int64)[:, None] * W.channels + channel[None, :]
        tl.store(to, found.to(y.dtype.element_ty), mask=mask)
        if T.summed:
            total += tl.where(mask, found, 0.0)
    if T.summed:
        part = tl.program_id(1) * (tl.num_programs(0) // blocks) + tl.program_id(0) // blocks
        to = left + part * W.channels + channel
        tl.store(to, tl.sum(total, 0), mask=channel < W.channels)


_run = Launchable(_conv)

# The kinds of operands that an epilogue may have, and the code that loads one.
READS = {
    "columns": "tl.load({p} + channel, mask=channel < W.channels, other=0.0)[None, :]",
    "rows": "tl.load({p} + pixel[:, None] + 0 * channel[None, :], mask=mask, other=0.0)",
    "all": "tl.load({p} + pixel.to(tl.int64)[:, None] * W.channels + channel[None, :], "
    "mask=mask, other=0.0)",
    "images": "tl.load({p} + (image * W.channels)[:, None] + channel[None, :], mask=mask, "
    "other=0.0)",
    "one": "tl.load({p})",
}


@lru_cache(maxsize=512)
def finish(after: EpilogueFormula) -> Any:
    """Return the epilogue of sums, with operands of the kinds of :data:`READS`."""
    given = "sums, others, pixel, image, channel, mask, W: tl.constexpr"
    return finishing(after, given, lambda p, kind: READS[kind].format(p=p))


def conv(
    size: Sizes, window: Window, tile: Tile, after: EpilogueFormula, warps: int
) -> Callable[..., None]:
    """Return a function (x, w, y, mean, others); mean: of y over each image, or None. All lie
    channels last, w as the window says."""
    last = finish(after)
    runs = size.down * -(-size.across // tile.copies) * (1 if tile.summed else size.images)
    blocks, parts = -(-window.channels // tile.channels), -(-runs // tile.runs)
    grid = (parts * blocks, size.images if tile.summed else 1)
    pixels = size.down * size.across

    def run(x: torch.Tensor, w: Any, y: Any, mean: Any, others: Sequence[Any]) -> None:
        here = tile._replace(CHAIN=tile.summed and chained(x.device))
        left, how = None, {"W": window, "T": here}
        if tile.summed:
            room = (size.images, parts, window.channels)
            left = torch.empty(room, dtype=torch.float32, device=x.device)
        given = (x, w, y, left, tuple(others), size)
        _run(grid, *given, warps=warps, stages=1, FINISH=last, **how)
        if tile.summed:
            merge = (-(-window.channels // MERGED[1]), size.images)
            _mean_of(merge, left, mean, parts, pixels, **how, PARTS=MERGED[0], BLOCK=MERGED[1])

    return run


# ---- the mean over each image, from the sums that programs stored


@triton.jit
def _mean(
    left, mean, parts, pixels, W: tl.constexpr, T: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    enter(T.CHAIN, False)
    image = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = channel < W.channels
    total = tl.zeros((PARTS, BLOCK), tl.float32)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        at = (image * parts + part)[:, None] * W.channels + channel[None, :]
        total += tl.load(left + at, mask=(part < parts)[:, None] & known[None, :], other=0.0)
    found = tl.sum(total, 0) / pixels
    tl.store(mean + image * W.channels + channel, found.to(mean.dtype.element_ty), mask=known)


_mean_of = Launchable(_mean, follows=True)
MERGED = 32, 32  # parts and channels that a program of it adds up at a time
