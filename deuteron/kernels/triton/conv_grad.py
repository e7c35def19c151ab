"""dw = f(Σ grad · x, …): the gradient of a convolution for its weight, in one kernel or two.

dw[k, r, s, c] = Σ grad[pixel, k] · x[pixel · stride − padding + (r, s) · dilation, c]

over all pixels is a matrix product. The steps of its sum are the pixels of the result, its rows the
channels of the result, its columns the taps and the channels of x. Nothing is copied for that: a
program takes a tile of one tap and loads, some pixels at a time, both factors from their places,
zeros where x is beside the image. Where there are few channels, a tile spans several taps. Volumes
have taps along their depth as well.

There are few tiles and many pixels, so several programs share a tile's sum (split-K). Each stores
its part in float32, and ``product.add_up`` adds them up in a fixed order: the same bits every time.

Bytes: grad and x once from memory, and from L2 once for every tap and tile. For a transposed
convolution grad and x change places.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import EpilogueFormula, finish, in_parts

# rows: channels of grad; columns: taps times channels of x in a group; steps: pixels of grad.
Sizes = namedtuple("Sizes", "rows columns steps")
# kh … dw: as in ``conv.Window``; channels, line: of x in a group and altogether; outs: channels of
# grad in a group; pixels, across: of an image of grad and of a row of it; height, width: of an
# image of x. Pixel numbers are divided by these at every step: by constants that is a
# multiplication. kd … dd: as in ``conv.Window``; flat: pixels of one of the images that a volume of
# the result is made of; depth: of x. Where so many pixels of a row are read as one, ``joined``,
# with zeros beside the ``few`` channels of each, the first ``lead`` of those under a window, and
# those beyond its ``taps``, are not in it.
Window = namedtuple(
    "Window",
    "kh kw sh sw ph pw dh dw channels line outs pixels across height width kd sd pd dd flat depth "
    "lead taps few joined",
)
# rows, columns: of a tile of the result; steps: pixels at a time; parts: of the split sum; outs: 1,
# the results.
Tile = namedtuple("Tile", "rows columns steps parts outs CHAIN")
FEW = tl.constexpr(16)  # with fewer channels of x a tile spans several taps


@triton.constexpr_function
def tiles_across(taps, channels, columns):
    """Return how many tiles lie side by side in the result of a group."""
    few = channels < FEW.value
    return -(-taps * channels // columns) if few else taps * -(-channels // columns)


@triton.jit
def _weight_grad(grad, x, y, others, size, W: tl.constexpr, T: tl.constexpr, FINISH: tl.constexpr):
    enter(T.CHAIN, True)
    TAPS: tl.constexpr = (W.kd if W.kd else 1) * W.kh * W.kw
    ACROSS: tl.constexpr = tiles_across(TAPS, W.channels, T.columns)
    HIGH: tl.constexpr = (W.outs + T.rows - 1) // T.rows
    tile = tl.program_id(0) % (HIGH * ACROSS)
    group = tl.program_id(0) // (HIGH * ACROSS)
    k = tile // ACROSS * T.rows + tl.arange(0, T.rows)
    known = k < W.outs
    k += group * W.outs
    column = tile % ACROSS * T.columns + tl.arange(0, T.columns)
    if W.channels < FEW:
        tap, c = column // W.channels, column % W.channels
        there = tap < TAPS
    else:
        WIDE: tl.constexpr = (W.channels + T.columns - 1) // T.columns
        tap = tile % ACROSS // WIDE
        c = column - tap * (WIDE * T.columns)
        there = c < W.channels
        column = tap * W.channels + c
    down = tap // W.kw
    if W.kd:
        back = down // W.kh * W.dd - W.pd
        down %= W.kh
    down, beside = down * W.dh - W.ph, tap % W.kw * W.dw - W.pw
    of = x + group * W.channels + c
    blocks = tl.cdiv(size.steps, T.steps)
    share = tl.cdiv(blocks, T.parts)
    begin = tl.program_id(1) * share
    sums = tl.zeros((T.rows, T.columns), tl.float32)
    for step in range(begin, min(begin + share, blocks)):
        pixel = step * T.steps + tl.arange(0, T.steps)
        live = pixel < size.steps
        image, place = pixel // W.pixels, pixel % W.pixels
        if W.kd:
            h = place // W.flat * W.sd
            place %= W.flat
        i, j = place // W.across * W.sh, place % W.across * W.sw
        at = pixel.to(tl.int64)[:, None] * size.rows + k[None, :]
        a = tl.load(grad + at, mask=live[:, None] & known[None, :], other=0.0)
        lines = image.to(tl.int64) * (W.depth * W.height * W.width * W.line)
        if W.channels < FEW:
            i, j = i[:, None] + down[None, :], j[:, None] + beside[None, :]
            inside = (i >= 0) & (i < W.height) & (j >= 0) & (j < W.width)
            if W.kd:
                h = h[:, None] + back[None, :]
                inside &= (h >= 0) & (h < W.depth)
                i += h * W.height
            at = lines[:, None] + (i * W.width + j) * W.line
            inside &= live[:, None]
        else:
            i, j = i + down, j + beside
            inside = (i >= 0) & (i < W.height) & (j >= 0) & (j < W.width) & live
            if W.kd:
                h += back
                inside &= (h >= 0) & (h < W.depth)
                i += h * W.height
            at, inside = (lines + (i * W.width + j) * W.line)[:, None], inside[:, None]
        b = tl.load(of[None, :] + at, mask=inside & there[None, :], other=0.0)
        sums = tl.dot(tl.trans(a), b, sums)
    if W.joined:
        MANY: tl.constexpr = W.channels // W.joined
        s, c = tap % W.kw * W.joined + c // MANY - W.lead, c % MANY
        there &= (s >= 0) & (s < W.taps) & (c < W.few)
        column = tl.where(there, (tap // W.kw * W.taps + s) * W.few + c, size.columns)
    to = k.to(tl.int64)[:, None] * size.columns + column[None, :]
    mask = known[:, None] & there[None, :]
    if T.parts > 1:
        tl.store(y + tl.program_id(1) * (size.rows * size.columns) + to, sums, mask=mask)
    else:
        m, n = k - tl.arange(0, T.rows), column - tl.arange(0, T.columns)
        found = FINISH(sums, sums, others, 0, m, n, size, T, 0)
        tl.store(y + to, found.to(y.dtype.element_ty), mask=mask)


_run = Launchable(_weight_grad)


def weight_grad(
    size: Sizes, window: Window, tile: Tile, after: EpilogueFormula, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (grad, x, y, others); y is the gradient as [out, …, kh, kw, in], and images
    lie channels last."""
    last = finish(after)
    high, groups = -(-window.outs // tile.rows), size.rows // window.outs
    taps = max(window.kd, 1) * window.kh * window.kw
    across = tiles_across.fn(taps, window.channels, tile.columns)
    grid = (groups * high * across, tile.parts)
    how = {"warps": warps, "stages": stages, "W": window}

    def run(grad: torch.Tensor, x: Any, y: Any, others: Sequence[Any]) -> None:
        def leave(parts: Any, here: Tile) -> None:
            _run(grid, grad, x, parts, (), size, T=here, FINISH=None, **how)

        if tile.parts > 1:
            in_parts(leave, x, (y,), others, size, tile, last)
        else:
            _run(grid, grad, x, y, tuple(others), size, T=tile, FINISH=last, **how)

    return run
