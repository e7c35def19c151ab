"""dw = f(Σ grad · x, …) of a depthwise convolution: the gradient for its weight, a sum over all
pixels for every tap.

Bytes: grad and x once from memory, 4 for each number of 16 bits, and 2·kh·kw operations on it. What
costs time is to read x again for every tap, even from a cache. So a program walks down images: a
thread has a few channels of ``copies`` neighbours along a row, and holds what lies under all rows
of their windows. For the next row of windows it loads only what is new, one row of x at stride 1,
a step ahead of its use, and multiplies what it holds with the gradient for all taps.

Sums of every tap stay in registers until the end. Programs split the pixels among them and store
partial sums, which ``product.add_up`` adds up in a fixed order: the same bits every time.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.depthwise import _is_read
from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import EpilogueFormula, finish, in_parts

# rows, columns: of the result: channels and taps; images; height, width: of one of x; down, across:
# of one of grad.
Sizes = namedtuple("Sizes", "rows columns images height width down across")
# A window: its taps, the strides, the zeros before x, the dilations; and the channels.
Window = namedtuple("Window", "kh kw sh sw ph pw dh dw channels")
# rows, columns: strips and channels of a program; copies: neighbours along a row, the width of a
# strip; long: rows of grad in a strip; parts: programs for the same channels, each with a part of
# the sum; outs: 1, the results.
Tile = namedtuple("Tile", "rows columns copies long parts outs CHAIN")


@triton.jit
def _brought(lines, grads, o, j, q, live, known, size, W: tl.constexpr, T: tl.constexpr):
    """Load what the windows of row ``o`` need and the row of windows before did not: new rows of x,
    a number for each place that lies under a tap of a neighbour, and then each neighbour's
    gradient."""
    SPAN: tl.constexpr = (T.copies - 1) * W.sw + (W.kw - 1) * W.dw + 1
    KEPT: tl.constexpr = _kept(W.kh, W.sh, W.dh)
    found = ()
    for r in tl.static_range(KEPT, W.kh):
        i = o * W.sh - W.ph + r * W.dh
        inside = live & (i >= 0) & (i < size.height)
        line = lines + ((i * size.width + j) * W.channels)[:, None]
        for e in tl.static_range(SPAN):
            if _is_read(e, T.copies, W.kw, W.sw, W.dw):
                mask = (inside & (j + e >= 0) & (j + e < size.width))[:, None] & known
                found = found + (tl.load(line + e * W.channels, mask=mask, other=0.0),)
    line = grads + ((o * size.across + q) * W.channels)[:, None]
    for c in tl.static_range(T.copies):
        mask = (live & (o >= 0) & (o < size.down) & (q + c < size.across))[:, None] & known
        found = found + (tl.load(line + c * W.channels, mask=mask, other=0.0),)
    return found


@triton.constexpr_function
def _kept(kh, sh, dh):
    """Return how many rows of x a window shares with the next one below."""
    return max(kh - sh, 0) if dh == 1 else 0


@triton.constexpr_function
def _under(tap, copy, copies, kw, sw, dw):
    """Return which of all places that are read lies under a tap of the window of neighbour
    ``copy``."""
    read = sorted({q * sw + t * dw for q in range(copies) for t in range(kw)})
    return tap // kw * len(read) + read.index(copy * sw + tap % kw * dw)


@triton.constexpr_function
def _places(copies, kw, sw, dw):
    """Return how many places in a row are read."""
    return len({q * sw + t * dw for q in range(copies) for t in range(kw)})


@triton.jit
def _weight_grad(grad, x, y, size, W: tl.constexpr, T: tl.constexpr):
    enter(T.CHAIN, True)
    READ: tl.constexpr = _places(T.copies, W.kw, W.sw, W.dw)
    KEPT: tl.constexpr = _kept(W.kh, W.sh, W.dh)
    blocks: tl.constexpr = (W.channels + T.columns - 1) // T.columns
    channel = tl.program_id(0) % blocks * T.columns + tl.arange(0, T.columns)
    part = tl.program_id(0) // blocks
    known = (channel < W.channels)[None, :]
    along, high = tl.cdiv(size.across, T.copies), tl.cdiv(size.down, T.long)
    strip = part * T.rows + tl.arange(0, T.rows)
    live = strip < size.images * high * along
    image = (strip // along // high).to(tl.int64)
    first = strip // along % high * T.long
    q = strip % along * T.copies
    lines = x + (image * (size.height * size.width * W.channels))[:, None] + channel[None, :]
    grads = grad + (image * (size.down * size.across * W.channels))[:, None] + channel[None, :]
    j = q * W.sw - W.pw
    sums = ()
    for _ in tl.static_range(W.kh * W.kw):
        sums = sums + (tl.zeros((T.rows, T.columns), tl.float32),)
    held = ()
    for _ in tl.static_range(KEPT * READ):
        held = held + (tl.zeros((T.rows, T.columns), tl.float32),)
    now = ()
    for _ in tl.static_range((W.kh - KEPT) * READ + T.copies):
        now = now + (tl.zeros((T.rows, T.columns), x.dtype.element_ty),)
    BEFORE: tl.constexpr = (KEPT + W.sh - 1) // W.sh  # steps until all rows of a window are held
    for step in range(-BEFORE - 1, T.long):
        # loads for the next step run while this one computes; the first step computes in vain
        o = first + step + 1
        on = live & (step + 1 < T.long)
        more = _brought(lines, grads, o, j, q, on, known, size, W, T)
        under = held
        for e in tl.static_range((W.kh - KEPT) * READ):
            under = under + (now[e].to(tl.float32),)
        for c in tl.static_range(T.copies):
            g = now[(W.kh - KEPT) * READ + c].to(tl.float32)
            g = tl.where(step >= 0, g, 0.0)  # rows above a strip are those of another
            added = ()
            for t in tl.static_range(W.kh * W.kw):
                x_t = under[_under(t, c, T.copies, W.kw, W.sw, W.dw)]
                added = added + (sums[t] + g * x_t,)
            sums = added
        rest = ()
        for e in tl.static_range(KEPT * READ):
            rest = rest + (under[e + W.sh * READ],)
        held = rest
        now = more
    to = y + part.to(tl.int64) * (size.rows * size.columns) + channel * size.columns
    for t in tl.static_range(W.kh * W.kw):
        tl.store(to + t, tl.sum(sums[t], 0), mask=channel < W.channels)


_run = Launchable(_weight_grad)


def weight_grad(
    size: Sizes, window: Window, tile: Tile, after: EpilogueFormula, warps: int
) -> Callable[..., None]:
    """Return a function (grad, x, y, others); y is the gradient as [channels, kh, kw], and images
    lie channels last."""
    last = finish(after)
    grid = (-(-size.rows // tile.columns) * tile.parts,)
    flat = size._replace(rows=1, columns=size.rows * size.columns)

    def run(grad: torch.Tensor, x: Any, y: Any, others: Sequence[Any]) -> None:
        def leave(parts: Any, here: Tile) -> None:
            _run(grid, grad, x, parts, size, T=here, W=window, warps=warps, stages=1)

        in_parts(leave, x, (y,), others, flat, tile, last)

    return run
