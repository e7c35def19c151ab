"""dw = f(Σ grad · x, …) where no channel sees another: the gradient for the weight of such a
convolution, a reduction over all pixels for every tap.

Bytes: grad and x once from memory, 4 for each number of 16 bits, and 2·kh·kw operations on it. What
costs time is to read x again for every tap, even from a cache. So a program walks down images: a
thread has a few channels of ``copies`` neighbours along a row, and holds what lies under all rows
of their windows. For the next row of windows it reads what came new, one row of x where windows lie
side by side, and multiplies it with the gradient for all taps.

Sums of every tap stay in registers until the end. Programs share the pixels out and leave parts of
the sums, which ``product.add_up`` adds up in a fixed order: the same bits every time.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.depthwise import _is_read
from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.kernels.triton.product import add_up, finish
from deuteron.ops.formula import Traced

# The result as a matrix of channels and taps; images, the size of one of x and of one of grad.
Sizes = namedtuple("Sizes", "rows columns images height width down across")
# A window: its taps, how far apart windows, the zeros before x, and how far apart its taps.
Window = namedtuple("Window", "kh kw sh sw ph pw dh dw")
# Strips and channels of a program, neighbours along a row, rows of grad in a strip, and how many
# programs there are for the same channels, each with a part of the sum; it has one result.
Tile = namedtuple("Tile", "rows columns copies long parts outs CHAIN")


@triton.jit
def _row(lines, i, j, live, known, size, W: tl.constexpr, T: tl.constexpr):
    """What lies under one row of the windows of all neighbours."""
    SPAN: tl.constexpr = (T.copies - 1) * W.sw + (W.kw - 1) * W.dw + 1
    inside = live & (i >= 0) & (i < size.height)
    found = ()
    for e in tl.static_range(SPAN):
        if _is_read(e, T.copies, W.kw, W.sw, W.dw):
            mask = (inside & (j + e >= 0) & (j + e < size.width))[:, None] & known
            at = ((i * size.width + j + e) * size.rows)[:, None]
            found = found + (tl.load(lines + at, mask=mask, other=0.0).to(tl.float32),)
        else:
            found = found + (tl.zeros((T.rows, T.columns), tl.float32),)
    return found


@triton.jit
def _weight_grad(grad, x, y, size, W: tl.constexpr, T: tl.constexpr):
    enter(T.CHAIN, True)
    SPAN: tl.constexpr = (T.copies - 1) * W.sw + (W.kw - 1) * W.dw + 1
    KEPT: tl.constexpr = max(W.kh - W.sh, 0) if W.dh == 1 else 0  # rows that the next window has
    blocks = tl.cdiv(size.rows, T.columns)
    channel = tl.program_id(0) % blocks * T.columns + tl.arange(0, T.columns)
    part = tl.program_id(0) // blocks
    known = (channel < size.rows)[None, :]
    along, high = tl.cdiv(size.across, T.copies), tl.cdiv(size.down, T.long)
    strips = size.images * high * along
    sums = ()
    for _ in tl.static_range(W.kh * W.kw):
        sums = sums + (tl.zeros((T.rows, T.columns), tl.float32),)
    strip = part * T.rows + tl.arange(0, T.rows)
    live = strip < strips
    image = (strip // along // high).to(tl.int64)
    first = strip // along % high * T.long
    q = strip % along * T.copies
    lines = x + (image * (size.height * size.width * size.rows))[:, None] + channel[None, :]
    grads = grad + (image * (size.down * size.across * size.rows))[:, None] + channel[None, :]
    j = q * W.sw - W.pw
    held = ()
    for _ in tl.static_range(KEPT):
        none = ()
        for _ in tl.static_range(SPAN):
            none = none + (tl.zeros((T.rows, T.columns), tl.float32),)
        held = held + (none,)
    BEFORE: tl.constexpr = (KEPT + W.sh - 1) // W.sh  # steps until all rows of a window are held
    for step in range(-BEFORE, T.long):
        o = first + step
        under = held
        for r in tl.static_range(KEPT, W.kh):
            i = o * W.sh - W.ph + r * W.dh
            under = under + (_row(lines, i, j, live, known, size, W, T),)
        on = live & (step >= 0) & (o < size.down)
        more = sums
        for c in tl.static_range(T.copies):
            mask = (on & (q + c < size.across))[:, None] & known
            at = ((o * size.across + q + c) * size.rows)[:, None]
            g = tl.load(grads + at, mask=mask, other=0.0).to(tl.float32)
            added = ()
            for t in tl.static_range(W.kh * W.kw):
                added = added + (more[t] + g * under[t // W.kw][c * W.sw + t % W.kw * W.dw],)
            more = added
        sums = more
        rest = ()
        for r in tl.static_range(KEPT):
            rest = rest + (under[r + W.sh],)
        held = rest
    to = y + part.to(tl.int64) * (size.rows * size.columns) + channel * size.columns
    for t in tl.static_range(W.kh * W.kw):
        tl.store(to + t, tl.sum(sums[t], 0), mask=channel < size.rows)


_run = Launchable(_weight_grad)


def weight_grad(
    size: Sizes,
    window: Window,
    tile: Tile,
    formula: Traced,
    operands: Sequence[str],
    warps: int,
    exact: bool,
) -> Callable[..., None]:
    """A function of grad, x, the gradient as [channels, kh, kw], and the other operands of what
    follows; images lie channels last."""
    last = finish(formula, tuple(operands), False, exact, plain=True)
    grid = (-(-size.rows // tile.columns) * tile.parts,)
    flat = size._replace(rows=1, columns=size.rows * size.columns)

    def run(grad: torch.Tensor, x: Any, y: Any, others: Sequence[Any]) -> None:
        here = tile._replace(CHAIN=chained(x.device))
        room = (tile.parts, 1, size.rows, size.columns)
        parts = torch.empty(room, dtype=torch.float32, device=x.device)
        _run(grid, grad, x, parts, size, T=here, W=window, warps=warps, stages=1)
        add_up(parts, (y,), others, flat, here, last)

    return run
