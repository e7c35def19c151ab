"""y = f(conv(x, w), …): a convolution and its elementwise epilogue, in one kernel.

Channels are adjacent, so a convolution is a matrix product: its rows are the pixels of the result,
its columns the channels of the result, and a step of its sum is a channel of a pixel under the
window. Nothing is copied for that: a program takes a tile of pixels, and for every part of the
window loads what lies under it from its place in x, zeros where that is beside the image. Stride,
padding, dilation and groups only change where a window begins. So does the third dimension of a
volume, whose taps along the depth move by whole images.

A transposed convolution, and the gradient of a plain one for x, is the same with windows that lie
in the result (``spread``): the taps of a pixel are those windows that it lies in, and w is read as
[in, …, kh, kw, out]. With a stride s the pixels of the result fall into s · s phases, each with
taps of its own: a program takes pixels of one phase, so that nothing is multiplied in vain.

The steps of the sum, taps times channels, are taken some at a time. Where these are a part of one
tap, all pixels of a tile move by the same offset; where there are few channels, several taps are
taken together, so that matrix units have enough to add up.

The number of channels is a constant of the kernel, unless windows are of one pixel: then a
convolution is a plain product; networks have these in many sizes, and all sizes share one kernel.

``to``, where it is given, receives the statistics of the result for batch norm: from the pixels of
every tile, while they are in registers, each channel's mean and then its squared spread around
that.

Bytes: x, w and y once from memory, and x once for every tap from L2. The epilogue, a
:class:`~deuteron.ops.formula.Traced`, is applied to the sums while they are in registers.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import EpilogueFormula, finish, in_parts

# rows, columns: pixels and channels of the result; height, width: of an image of x; down, across:
# of an image of the result; pixels: of an image (volume) of the result; line: from one pixel of the
# result to the next; depth, deep: of volumes of x and of the result; channels: of x; x_line: from
# one pixel of x to the next.
Sizes = namedtuple(
    "Sizes", "rows columns height width down across pixels line depth deep channels x_line"
)
# kh, kw: taps of a window; sh, sw: strides; ph, pw: zeros before x; dh, dw: dilations; channels,
# line: of x in a group and altogether; outs: channels of the result in a group; together: so many
# groups, which do not see each other, are taken as one, with zeros for weights between them;
# spread: windows lie in the result, not in x; fill: the value beside x; kd, sd, pd, dd: taps,
# stride, zeros and dilation along the depth of a volume. Without groups and with windows of one
# pixel channels, line and outs are 0, and :class:`Sizes` has them. Where so many ``pixels`` of a
# row are read as one, the first ``lead`` of those under a window, and those beyond its ``taps``,
# are not in it, and have zeros for weights.
Window = namedtuple(
    "Window",
    "kh kw sh sw ph pw dh dw channels line outs together spread fill kd sd pd dd lead taps pixels",
)
NO_DEPTH = (0, 1, 0, 1)  # no taps along it: an image
# rows, columns: of a tile of the result; steps: of the sum at a time; parts: of the split sum,
# which a second kernel adds up; outs: 1, the results.
Tile = namedtuple("Tile", "rows columns steps parts outs CHAIN")


@triton.constexpr_function
def _shared(stride, dilation):
    """The greatest common divisor."""
    return max(n for n in range(1, stride + 1) if stride % n == 0 == dilation % n)


@triton.constexpr_function
def _every(stride, dilation, spread):
    """Return n, where every n-th tap along a dimension reaches the pixels of one phase."""
    return stride // _shared(stride, dilation) if spread else 1


@triton.constexpr_function
def _apart(stride, dilation, spread):
    """Return the distance in x between what lies under one such tap and under the next."""
    return -(dilation // _shared(stride, dilation)) if spread else dilation


@triton.constexpr_function
def _taps(deep, high, wide):
    """Return the number of taps of a window of an image, or of a volume."""
    return max(deep, 1) * high * wide


@triton.constexpr_function
def _is_ragged(taps, channels, phases, steps):
    """Whether the last step of a sum may reach beyond the taps."""
    return channels % steps > 0 if phases > 1 else taps * channels % steps > 0


@triton.jit
def _along(
    phase, K: tl.constexpr, S: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SPREAD: tl.constexpr
):
    """Return, along one dimension, the first tap of a phase, how many taps the phase has, and where
    in x the first tap of the first pixel lies. K taps, D apart, of windows S apart, which begin P
    before the image."""
    if SPREAD:
        EVERY: tl.constexpr = _every(S, D, SPREAD)
        first = phase * 0 + K  # no tap at all
        for t in tl.static_range(EVERY):
            first = tl.where((phase + P - t * D) % S == 0, t, first)
        return first, (K - first + EVERY - 1) // EVERY, (phase + P - first * D) // S
    else:
        return phase * 0, phase * 0 + K, phase * 0 - P


@triton.jit
def _inside(h, i, j, size, W: tl.constexpr):
    """Return the offset of a pixel in an image, and whether it exists; h is the number of the image
    in a volume."""
    there = (i >= 0) & (i < size.height) & (j >= 0) & (j < size.width)
    if W.kd:
        there &= (h >= 0) & (h < size.depth)
        i += h * size.height
    if W.line:
        return (i * size.width + j) * W.line, there
    else:
        return (i * size.width + j) * size.x_line, there


@triton.jit
def _under(lines, h, i, j, k, counts, size, W: tl.constexpr, T: tl.constexpr):
    """Load what lies under a part of the window, from step ``k`` on, for every pixel of a tile. h,
    i and j: where the windows of these pixels begin; ``counts``: how many taps they have, how many
    in a column, and how many in a row."""
    taps, high, wide = counts
    PHASES: tl.constexpr = W.sd * W.sh * W.sw if W.spread else 1
    BACK: tl.constexpr = _apart(W.sd, W.dd, W.spread)
    DOWN: tl.constexpr = _apart(W.sh, W.dh, W.spread)
    ACROSS: tl.constexpr = _apart(W.sw, W.dw, W.spread)
    if not W.line:  # the only tap
        at, inside = _inside(h, i, j, size, W)
        k += tl.arange(0, T.steps)
        inside = inside[:, None] & (k < size.channels)[None, :]
        return tl.load(lines[:, None] + at[:, None] + k[None, :], mask=inside, other=W.fill)
    elif W.channels % T.steps == 0:  # a part of one tap
        tap = k // W.channels
        down = tap // wide
        if W.kd:
            h += down // high * BACK
            down %= high
        i += down * DOWN
        j += tap % wide * ACROSS
        at, inside = _inside(h, i, j, size, W)
        PARTS: tl.constexpr = W.channels // T.steps
        at += k // T.steps % PARTS * T.steps
        at = at[:, None] + tl.arange(0, T.steps)[None, :]
        return tl.load(lines[:, None] + at, mask=inside[:, None], other=W.fill)
    else:
        k += tl.arange(0, T.steps)
        tap = k // W.channels
        down = tap // wide
        if W.kd:
            h = h[:, None] + (down // high * BACK)[None, :]
            down %= high
        i = i[:, None] + (down * DOWN)[None, :]
        j = j[:, None] + (tap % wide * ACROSS)[None, :]
        at, inside = _inside(h, i, j, size, W)
        if _is_ragged(_taps(W.kd, W.kh, W.kw), W.channels, PHASES, T.steps):
            inside &= (tap < taps)[None, :]
        at += (k % W.channels)[None, :]
        return tl.load(lines[:, None] + at, mask=inside, other=W.fill)


@triton.jit
def _weights(filters, k, there, counts, first, size, W: tl.constexpr, T: tl.constexpr):
    """Load the weights of steps ``k`` for every channel of a tile; ``first``: a phase's first
    tap."""
    taps, high, wide = counts
    known = there[None, :]
    PHASES: tl.constexpr = W.sd * W.sh * W.sw if W.spread else 1
    TAPS: tl.constexpr = _taps(W.kd, W.kh, W.kw)
    NONE: tl.constexpr = W.fill * 0  # an integer or a float, as weights are
    if W.spread:
        EVERY_D: tl.constexpr = _every(W.sd, W.dd, W.spread)
        EVERY_H: tl.constexpr = _every(W.sh, W.dh, W.spread)
        EVERY_W: tl.constexpr = _every(W.sw, W.dw, W.spread)
        tap = k // W.channels
        if _is_ragged(TAPS, W.channels, PHASES, T.steps):
            known &= (tap < taps)[:, None]
        down = tap // wide
        if W.kd:
            first += down // high * (EVERY_D * W.kh * W.kw)
            down %= high
        tap = first + down * (EVERY_H * W.kw) + tap % wide * EVERY_W
        at = (k % W.channels * TAPS + tap) * W.outs
        return tl.load(filters + at[:, None], mask=known, other=NONE)
    else:
        if not W.channels:
            known &= (k < size.channels)[:, None]
        elif _is_ragged(TAPS, W.channels, PHASES, T.steps):
            known &= (k < TAPS * W.channels)[:, None]
        return tl.load(filters + k[:, None], mask=known, other=NONE)


@triton.jit
def _is_odd(x):
    """Return which numbers are infinite or nan, by their bits."""
    return (x.to(tl.int32, bitcast=True) & 0x7F800000) == 0x7F800000


@triton.jit
def _added(
    lines, filters, h, i, j, there, begin, end, part, counts, first, size, W: tl.constexpr,
    T: tl.constexpr, ALONE: tl.constexpr,
):  # fmt: skip
    """Return the sums of a tile over some steps. ``ALONE``: of groups that are taken together, add
    up only what group ``part`` reads; of pixels that are read as one, only those in windows."""
    kind: tl.constexpr = tl.int32 if filters.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros((T.rows, T.columns), kind)
    for step in range(begin, end):
        a = _under(lines, h, i, j, step * T.steps, counts, size, W, T)
        if a.dtype == tl.uint8:  # 128 less, as int8: matrix units take signed numbers
            a = (a ^ 128).to(tl.int8, bitcast=True)
        k = step * T.steps + tl.arange(0, T.steps)
        if ALONE:
            of = k % W.channels // (W.channels // (W.together * W.pixels))
            keep = of == part
            if W.pixels > 1:
                of += k // W.channels % W.kw * W.pixels - W.lead
                keep = (of >= 0) & (of < W.taps)
            a = tl.where(keep[None, :], a, 0.0)
        b = _weights(filters, k, there, counts, first, size, W, T)
        # matrix units keep few bits of sums of 8-bit floats: sums go to float32 after every step
        some: tl.constexpr = T.steps if filters.dtype.element_ty.is_fp8() else 0
        sums = tl.dot(a, b, sums, max_num_imprecise_acc=some, out_dtype=kind)
    return sums


@triton.jit
def _leave(to, part, v, known, channel, there, size):
    """Store the statistics of a tile ``v``, as one part of those of its channels; ``to``: where the
    parts go, where the counts go, and how many parts there are."""
    parts, counts, pieces = to
    count = tl.sum(tl.where(known, 1.0, 0.0), 0)
    share = 1.0 / tl.maximum(count, 1.0)
    mean = tl.sum(tl.where(known, v, 0.0), 0) * share
    away = tl.where(known, v - mean[None, :], 0.0)
    rest = tl.sum(away, 0)  # what rounding left: of equal values the mean is the value itself
    at = parts + part * size.columns + channel
    tl.store(at, mean + rest * share, mask=there)
    spread = tl.sum(away * away, 0) - rest * rest * share
    tl.store(at + pieces * size.columns, spread, mask=there)
    tl.store(counts + part + 0 * channel, count, mask=channel == 0)


@triton.jit
def _conv(
    x, w, start, y, others, to, size, W: tl.constexpr, T: tl.constexpr, FINISH: tl.constexpr
):  # fmt: skip
    enter(T.CHAIN, True)
    # programs of the same pixels come one after another
    if W.line:
        channels, line, outs = W.channels, W.line, W.outs
        TILES: tl.constexpr = (W.outs + T.columns - 1) // T.columns
        across = size.columns // W.outs * TILES
        column = tl.program_id(0) % across
        group = column // TILES
        n = group * W.outs + column % TILES * T.columns
    else:
        channels, line, outs = size.channels, size.x_line, size.columns
        across = (size.columns + T.columns - 1) // T.columns
        group = 0
        n = tl.program_id(0) % across * T.columns
    m = tl.program_id(0) // across * T.rows
    row = m + tl.arange(0, T.rows)
    # pixels of a phase; there is only one phase unless windows lie in the result, and apart
    SH: tl.constexpr = W.sh if W.spread else 1
    SW: tl.constexpr = W.sw if W.spread else 1
    down, beside, h = tl.program_id(2) // SW, tl.program_id(2) % SW, 0
    if W.kd:
        SD: tl.constexpr = W.sd if W.spread else 1
        back = down // SH
        down %= SH
    first_h, taps_h, i = _along(down, W.kh, W.sh, W.ph, W.dh, W.spread)
    first_w, wide, j = _along(beside, W.kw, W.sw, W.pw, W.dw, W.spread)
    taps, first = taps_h * wide, first_h * W.kw + first_w
    if W.kd:
        first_d, taps_d, h = _along(back, W.kd, W.sd, W.pd, W.dd, W.spread)
        taps *= taps_d
        first += first_d * (W.kh * W.kw)
    counts = taps, taps_h, wide
    if W.spread:
        high, long = (size.down + SH - 1) // SH, (size.across + SW - 1) // SW
        flat = high * long  # pixels of one image of a volume
        each = flat
        if W.kd:
            each *= (size.deep + SD - 1) // SD
        image, place = row // each, row % each
        if W.kd:
            h, back, place = h + place // flat, back + place // flat * SD, place % flat
        i, j = i + place // long, j + place % long
        down, beside = down + place // long * SH, beside + place % long * SW
        live = (image * size.pixels < size.rows) & (down < size.down) & (beside < size.across)
        if W.kd:
            live &= back < size.deep
            down += back * size.down
        row = tl.where(live, image * size.pixels + down * size.across + beside, size.rows)
        m = row - tl.arange(0, T.rows)  # rows of a phase do not lie one after another
    else:
        image, place = row // size.pixels, row % size.pixels
        if W.kd:
            flat = size.down * size.across
            h, place = h + place // flat * W.sd, place % flat
        i, j = i + place // size.across * W.sh, j + place % size.across * W.sw
    i = tl.where(row < size.rows, i, -(2**30))  # above every image: nothing is read
    whole = size.height * size.width * line
    if W.kd:
        whole *= size.depth
    lines = x + image.to(tl.int64) * whole + group * channels
    channel = n + tl.arange(0, T.columns)
    there = channel < group * outs + outs
    TAPS: tl.constexpr = _taps(W.kd, W.kh, W.kw)
    if W.spread:
        filters = w + group * (channels * TAPS * outs)
        filters += (channel - group * outs)[None, :]
    else:
        filters = w + channel[None, :] * (TAPS * channels)
    blocks = (taps * channels + T.steps - 1) // T.steps
    share = (blocks + T.parts - 1) // T.parts
    begin = tl.program_id(1) * share
    end = min(begin + share, blocks)
    sums = _added(lines, filters, h, i, j, there, begin, end, 0, counts, first, size, W, T, False)
    if start is not None:  # only of integers, whose sums are exact in any order
        sums += tl.load(start + channel, mask=there, other=0)[None, :]
    elif W.together > 1:
        # zero times infinity, or nan, is nan: what one group holds must not reach the others
        if tl.max(_is_odd(sums).to(tl.int32)) > 0:
            own = (channel - group * outs) // (outs // W.together)
            for part in range(W.together):
                alone = _added(
                    lines, filters, h, i, j, there, begin, end, part, counts, first, size, W, T,
                    True,
                )  # fmt: skip
                sums = tl.where((own == part)[None, :], alone, sums)
    elif W.pixels > 1:  # the same of pixels beside a window
        if tl.max(_is_odd(sums).to(tl.int32)) > 0:
            sums = _added(
                lines, filters, h, i, j, there, begin, end, 0, counts, first, size, W, T, True
            )
    known = (row < size.rows)[:, None] & there[None, :]
    if T.parts > 1:
        at = y + row.to(tl.int64)[:, None] * size.columns + channel[None, :]
        tl.store(at + tl.program_id(1) * (size.rows * size.columns), sums, mask=known)
    else:
        if FINISH is None:
            found = sums.to(y.dtype.element_ty)
        else:
            floats = sums.to(tl.float32)
            found = FINISH(floats, floats, others, 0, m, n, size, T, 0).to(y.dtype.element_ty)
        at = y + row.to(tl.int64)[:, None] * size.line + channel[None, :]
        tl.store(at, found, mask=known)
        if to is not None:
            part = tl.program_id(0) // across
            _leave(to, part, found.to(tl.float32), known, channel, there, size)


_run, _run_apart = Launchable(_conv), Launchable(_conv, apart=True)


def conv(
    size: Sizes, window: Window, tile: Tile, after: EpilogueFormula, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (x, w, y, others, start, to). w is [out, …, kh, kw, in], or, where windows
    lie in the result, [in, …, kh, kw, out]; start: for integers, what sums begin with; to: None, or
    where the statistics go, of which every tile of rows is a part. All lie channels last."""
    last = finish(after)
    outs = window.outs or size.columns
    across = size.columns // outs * -(-outs // tile.columns)
    apart = (window.sd, window.sh, window.sw) if window.spread else (1, 1, 1)
    places = zip((size.deep, size.down, size.across), apart, strict=True)
    rows = size.rows // size.pixels * prod(-(-n // s) for n, s in places)
    grid = (-(-rows // tile.rows) * across, tile.parts, prod(apart))
    how = {"warps": warps, "stages": stages, "W": window}

    def run(
        x: torch.Tensor, w: Any, y: Any, others: Sequence[Any], start: Any = None, to: Any = None
    ) -> None:
        def leave(parts: Any, here: Tile) -> None:
            _run(grid, x, w, None, parts, (), None, size, T=here, FINISH=None, **how)

        if tile.parts > 1:
            in_parts(leave, x, (y,), others, size, tile, last)
            return
        launch, raw = (_run, False) if start is None else (_run_apart, y.dtype == start.dtype)
        ends = None if raw else last
        launch(grid, x, w, start, y, tuple(others), to, size, T=tile, FINISH=ends, **how)

    return run


# ---- zeros for channels and pixels that x does not have


@triton.jit
def _widen(
    x, y, pixels, width, across, before,
    FEW: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = pixel % across - before
    c = tl.arange(0, MANY)[None, :]
    mask = (pixel < pixels)[:, None]
    there = mask & ((place >= 0) & (place < width))[:, None] & (c < FEW)
    at = (pixel // across).to(tl.int64) * width + place
    found = tl.load(x + at[:, None] * FEW + c, mask=there, other=0.0)
    tl.store(y + pixel.to(tl.int64)[:, None] * MANY + c, found, mask=mask)


_widened = Launchable(_widen)
BLOCK = 256  # pixels of a program


def widen(
    x: torch.Tensor, rows: int, width: int, few: int, many: int, across: int = 0, before: int = 0
) -> torch.Tensor:
    """Return x with its ``few`` channels padded by zeros to ``many``, so that each pixel begins at
    a whole word; rows may get pixels of zeros, too, ``before`` them and behind, ``across`` in
    all."""
    across = across or width
    pixels = rows * across
    y = torch.empty((pixels, many), dtype=x.dtype, device=x.device)
    how = {"FEW": few, "MANY": many, "BLOCK": BLOCK}
    _widened((-(-pixels // BLOCK),), x, y, pixels, width, across, before, **how)
    return y
