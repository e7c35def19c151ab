"""y = f(conv(x, w), …): a convolution with whatever follows it element by element, in one kernel.

Channels lie side by side, so a convolution is a product: its rows are the pixels of the result, its
columns the channels of the result, and a step of its sum is a channel of a pixel under the window.
Nothing is copied to make it one: a program takes a tile of pixels, and for every part of the window
reads what lies under it where it lies, zeros where that is beside the image. Any stride, padding,
dilation and number of groups is a matter of where a window begins.

The steps of the sum, taps times channels, are taken some at a time. Where these are a part of one
tap, all pixels of a tile move together; where there are few channels, several taps are taken
together, so that matrix units have enough to add up.

Bytes: x, w and y once from memory, and x once for every tap from L2. What follows, a
:class:`~deuteron.ops.formula.Traced`, is applied to the sums while they are in registers.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.kernels.triton.product import add_up, finish
from deuteron.ops.formula import Traced

# Pixels and channels of the result, the size of an image of x and of one of the result, and the
# pixels of that.
Sizes = namedtuple("Sizes", "rows columns height width down across pixels")
# A window: its taps, how far apart windows, the zeros before x, how far apart its taps; channels of
# x in a group and altogether, channels of the result in a group, how many groups that do not see
# each other are taken as one, with zeros for weights between them, and what lies beside x.
Window = namedtuple(
    "Window", "kh kw sh sw ph pw dh dw channels line outs together fill", defaults=(0,)
)
# A tile of the result, how much of the sum it takes at a time, and into how many parts the sum is
# shared out, which a second kernel adds up; it has one result.
Tile = namedtuple("Tile", "rows columns steps parts outs CHAIN")


@triton.jit
def _under(lines, i, j, k, size, W: tl.constexpr, T: tl.constexpr):
    """What lies under a part of the window, from step ``k`` on, for every pixel of a tile. i and j:
    where the windows of these pixels begin."""
    if W.channels % T.steps == 0:  # a part of one tap
        tap = k // W.channels
        i += tap // W.kw * W.dh
        j += tap % W.kw * W.dw
        inside = (i >= 0) & (i < size.height) & (j >= 0) & (j < size.width)
        PARTS: tl.constexpr = W.channels // T.steps
        at = (i * size.width + j) * W.line + k // T.steps % PARTS * T.steps
        at = at[:, None] + tl.arange(0, T.steps)[None, :]
        return tl.load(lines[:, None] + at, mask=inside[:, None], other=W.fill)
    else:
        k += tl.arange(0, T.steps)
        tap = k // W.channels
        down = i[:, None] + (tap // W.kw * W.dh)[None, :]
        across = j[:, None] + (tap % W.kw * W.dw)[None, :]
        inside = (down >= 0) & (down < size.height) & (across >= 0) & (across < size.width)
        if W.kh * W.kw * W.channels % T.steps != 0:
            inside &= (tap < W.kh * W.kw)[None, :]
        at = (down * size.width + across) * W.line + (k % W.channels)[None, :]
        return tl.load(lines[:, None] + at, mask=inside, other=W.fill)


@triton.jit
def _is_odd(x):
    """Which are infinite or nan, by their bits."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000


@triton.jit
def _added(
    lines, filters, i, j, there, begin, end, part, size, W: tl.constexpr, T: tl.constexpr,
    ALONE: tl.constexpr,
):  # fmt: skip
    """The sums of a tile over some steps; ``ALONE``: of the groups that are taken together, only
    what the one of number ``part`` reads."""
    DEEP: tl.constexpr = W.kh * W.kw * W.channels
    kind: tl.constexpr = tl.int32 if filters.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros((T.rows, T.columns), kind)
    for step in range(begin, end):
        a = _under(lines, i, j, step * T.steps, size, W, T)
        if a.dtype == tl.uint8:  # 128 less, as matrix units take numbers of both signs
            a = (a ^ 128).to(tl.int8, bitcast=True)
        k = step * T.steps + tl.arange(0, T.steps)
        if ALONE:
            of = k % W.channels // (W.channels // W.together)
            a = tl.where((of == part)[None, :], a, 0.0)
        k = k[:, None]
        known = there[None, :]
        if DEEP % T.steps != 0:
            known &= k < DEEP
        sums = tl.dot(a, tl.load(filters + k, mask=known, other=0), sums, out_dtype=kind)
    return sums


@triton.jit
def _conv(x, w, start, y, others, size, W: tl.constexpr, T: tl.constexpr, FINISH: tl.constexpr):
    enter(T.CHAIN, True)
    DEEP: tl.constexpr = W.kh * W.kw * W.channels
    BLOCKS: tl.constexpr = (DEEP + T.steps - 1) // T.steps
    WIDE: tl.constexpr = (W.outs + T.columns - 1) // T.columns
    across = size.columns // W.outs * WIDE  # programs of the same pixels come one after another
    m = tl.program_id(0) // across * T.rows
    column = tl.program_id(0) % across
    group = column // WIDE
    n = group * W.outs + column % WIDE * T.columns
    row = m + tl.arange(0, T.rows)
    image, place = row // size.pixels, row % size.pixels
    i = place // size.across * W.sh - W.ph
    i = tl.where(row < size.rows, i, size.height)  # below every image: nothing is read
    j = place % size.across * W.sw - W.pw
    lines = x + image.to(tl.int64) * (size.height * size.width * W.line) + group * W.channels
    channel = n + tl.arange(0, T.columns)
    there = channel < group * W.outs + W.outs
    filters = w + channel[None, :] * DEEP
    share: tl.constexpr = (BLOCKS + T.parts - 1) // T.parts
    begin = tl.program_id(1) * share
    end = min(begin + share, BLOCKS)
    sums = _added(lines, filters, i, j, there, begin, end, 0, size, W, T, False)
    if start is not None:  # of whole numbers, whose sums are exact in any order
        sums += tl.load(start + channel, mask=there, other=0)[None, :]
    elif W.together > 1:
        # zero times infinity, or nan, is nan: what one group holds must not reach the others
        if tl.max(_is_odd(sums).to(tl.int32)) > 0:
            own = (channel - group * W.outs) // (W.outs // W.together)
            for part in range(W.together):
                alone = _added(lines, filters, i, j, there, begin, end, part, size, W, T, True)
                sums = tl.where((own == part)[None, :], alone, sums)
    to = y + row.to(tl.int64)[:, None] * size.columns + channel[None, :]
    known = (row < size.rows)[:, None] & there[None, :]
    if T.parts > 1:
        tl.store(to + tl.program_id(1) * (size.rows * size.columns), sums, mask=known)
    else:
        if FINISH is None:
            found = sums
        else:
            floats = sums.to(tl.float32)
            found = FINISH(floats, floats, others, 0, m, n, size, T, 0)
        tl.store(to, found.to(y.dtype.element_ty), mask=known)


_run, _run_apart = Launchable(_conv), Launchable(_conv, apart=True)


def conv(
    size: Sizes,
    window: Window,
    tile: Tile,
    formula: Traced,
    operands: Sequence[str],
    warps: int,
    stages: int,
    exact: bool,
) -> Callable[..., None]:
    """A function of x, w as [out, kh, kw, in], y, the other operands of what follows, and for whole
    numbers what sums begin with; all lie channels last."""
    last = finish(formula, tuple(operands), False, exact, plain=True)
    across = size.columns // window.outs * -(-window.outs // tile.columns)
    grid = (-(-size.rows // tile.rows) * across, tile.parts)
    how = {"warps": warps, "stages": stages, "W": window}

    def run(x: torch.Tensor, w: Any, y: Any, others: Sequence[Any], start: Any = None) -> None:
        here = tile._replace(CHAIN=tile.parts > 1 and chained(x.device))
        if tile.parts == 1:
            launch, raw = (_run, False) if start is None else (_run_apart, y.dtype == start.dtype)
            ends = None if raw else last
            launch(grid, x, w, start, y, tuple(others), size, T=here, FINISH=ends, **how)
            return
        room = (tile.parts, 1, size.rows, size.columns)
        parts = torch.empty(room, dtype=torch.float32, device=x.device)
        _run(grid, x, w, None, parts, (), size, T=here, FINISH=None, **how)
        add_up(parts, (y,), others, size, here, last)

    return run


# ---- channels beside those that are there


@triton.jit
def _widen(x, y, pixels, FEW: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr):
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c = tl.arange(0, MANY)[None, :]
    mask = (pixel < pixels)[:, None]
    found = tl.load(x + pixel.to(tl.int64)[:, None] * FEW + c, mask=mask & (c < FEW), other=0.0)
    tl.store(y + pixel.to(tl.int64)[:, None] * MANY + c, found, mask=mask)


_widened = Launchable(_widen)
BLOCK = 256  # pixels of a program


def widen(x: torch.Tensor, pixels: int, few: int, many: int) -> torch.Tensor:
    """Pixels of ``few`` channels with zeros beside them, so that each begins at a whole word."""
    y = torch.empty((pixels, many), dtype=x.dtype, device=x.device)
    _widened((-(-pixels // BLOCK),), x, y, pixels, FEW=few, MANY=many, BLOCK=BLOCK)
    return y
