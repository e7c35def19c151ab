"""Resampling where places follow from numbers: windows at equal steps, and elements repeated.

    mean     y[i, j] = Σ_k Σ_l x[i · step − before + k, j · step − before + l] / divisors
    repeat   y[i, j] = x[i // factor, j // factor] · scale

Means of windows, halving an image and the gradient of a nearest upsampling are of the first kind;
a nearest upsampling and the gradient of windows that do not overlap of the second. Nothing is
looked up before the first load, and all of a thread's elements lie side by side in memory: the
bytes, size · (x + y), move at the speed of a copy. Rows that several windows read come from L1.

Strides and the length of what is adjacent are given in units of V elements, so that the compiler
sees how many may travel together.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


@triton.jit
def corner(
    channels, height, width, PLANES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The image of a program, and where its planes, rows and columns begin."""
    across = tl.cdiv(width, COLUMNS)
    pieces = tl.cdiv(height, ROWS) * across
    piece = tl.program_id(0) % pieces
    block = tl.program_id(0) // pieces
    blocks = tl.cdiv(channels, PLANES)
    n = (block // blocks).to(tl.int64)
    return n, block % blocks * PLANES, piece // across * ROWS, piece % across * COLUMNS


@triton.jit
def narrow(y, total, divide_y, divide_x, row, column, height, width):
    """The result as it is stored, after the division of a mean."""
    if divide_x is not None:
        by = tl.load(divide_x + column, mask=column < width, other=1.0)
        if divide_y is not None:
            by *= tl.load(divide_y + row, mask=row < height, other=1.0)
        total = total / by
    elif divide_y is not None:
        total = total / tl.load(divide_y + row, mask=row < height, other=1.0)
    return total.to(y.dtype.element_ty)


@triton.jit
def _means_last(
    x,
    y,
    divide_y,
    divide_x,
    channels,
    height,
    width,
    lines,
    length,
    sn,
    sh,
    sw,
    tn,
    th,
    tw,
    TALL: tl.constexpr,
    BROAD: tl.constexpr,
    STEP_Y: tl.constexpr,
    STEP_X: tl.constexpr,
    BEFORE_Y: tl.constexpr,
    BEFORE_X: tl.constexpr,
    CUT_Y: tl.constexpr,
    CUT_X: tl.constexpr,
    V: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Means where channels are adjacent, in tiles of one image. ``lines`` and ``length``: the rows
    and columns of x. CUT: some windows reach beyond them."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    n, plane, upper, begin = corner(channels * V, height, width, PLANES, ROWS, COLUMNS)
    channel = plane + tl.arange(0, PLANES)[None, None, :]
    row = upper + tl.arange(0, ROWS)[:, None, None]
    column = begin + tl.arange(0, COLUMNS)[None, :, None]
    live = (channel < channels * V) & (row < height) & (column < width)
    top = row * STEP_Y - BEFORE_Y
    left = column * STEP_X - BEFORE_X
    source = x + n * sn * V + (top * sh + left * sw) * V + channel
    total = tl.zeros((ROWS, COLUMNS, PLANES), WIDE)
    for k in tl.static_range(TALL):
        for m in tl.static_range(BROAD):
            inside = live
            if CUT_Y:
                inside = inside & (top + k >= 0) & (top + k < lines)
            if CUT_X:
                inside = inside & (left + m >= 0) & (left + m < length)
            total += tl.load(source + (k * sh + m * sw) * V, mask=inside, other=0.0).to(WIDE)
    total = narrow(y, total, divide_y, divide_x, row, column, height, width)
    tl.store(y + n * tn * V + (row * th + column * tw) * V + channel, total, mask=live)


@triton.jit
def _means_pairs(
    x,
    y,
    divide_y,
    divide_x,
    planes,
    channels,
    height,
    width,
    lines,
    sn,
    sc,
    sh,
    tn,
    tc,
    th,
    TALL: tl.constexpr,
    STEP_Y: tl.constexpr,
    BEFORE_Y: tl.constexpr,
    CUT_Y: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Means of pairs of columns that are adjacent, and of TALL rows: rows of all planes, one after
    the other. Pairs are read side by side and parted in registers."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    width *= V
    across = tl.cdiv(width, COLUMNS)
    begin = tl.program_id(0) % across * COLUMNS
    r = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    there = r < planes * height
    row = r % height
    plane = r // height
    n, channel = (plane // channels).to(tl.int64), (plane % channels).to(tl.int64)
    either = 2 * begin + tl.arange(0, 2 * COLUMNS)[None, :]
    top = row * STEP_Y - BEFORE_Y
    source = x + (n * sn + channel * sc) * V + (top * sh * V + either)
    total = tl.zeros((ROWS, 2 * COLUMNS), WIDE)
    for k in tl.static_range(TALL):
        inside = there & (either < 2 * width)
        if CUT_Y:
            inside = inside & (top + k >= 0) & (top + k < lines)
        total += tl.load(source + k * sh * V, mask=inside, other=0.0).to(WIDE)
    even, odd = tl.split(tl.reshape(total, (ROWS, COLUMNS, 2)))
    column = begin + tl.arange(0, COLUMNS)[None, :]
    total = narrow(y, even + odd, divide_y, divide_x, row, column, height, width)
    place = y + (n * tn + channel * tc) * V + (row * th * V + column)
    tl.store(place, total, mask=there & (column < width))


@triton.jit
def _repeat_last(
    x,
    y,
    channels,
    lines,
    length,
    sn,
    sh,
    sw,
    tn,
    th,
    tw,
    SCALE: tl.constexpr,
    FACTOR_Y: tl.constexpr,
    FACTOR_X: tl.constexpr,
    V: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Every element of a tile of x is read once and written where it belongs, where channels are
    adjacent."""
    n, plane, upper, begin = corner(channels * V, lines, length, PLANES, ROWS, COLUMNS)
    channel = plane + tl.arange(0, PLANES)[None, None, :]
    row = upper + tl.arange(0, ROWS)[:, None, None]
    column = begin + tl.arange(0, COLUMNS)[None, :, None]
    live = (channel < channels * V) & (row < lines) & (column < length)
    source = x + n * sn * V + (row * sh + column * sw) * V + channel
    value = _scaled(tl.load(source, mask=live, other=0.0), SCALE)
    place = y + n * tn * V + (row * (FACTOR_Y * th) + column * (FACTOR_X * tw)) * V + channel
    for k in tl.static_range(FACTOR_Y):
        for m in tl.static_range(FACTOR_X):
            tl.store(place + (k * th + m * tw) * V, value, mask=live)


@triton.jit
def _repeat_rows(
    x,
    y,
    planes,
    channels,
    lines,
    width,
    sn,
    sc,
    sh,
    tn,
    tc,
    th,
    SCALE: tl.constexpr,
    FACTOR_Y: tl.constexpr,
    FACTOR_X: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows of x of all planes, one after the other, each written FACTOR_Y times. ``width``: the
    columns of y, whose elements come from the same places of x by L1."""
    width *= V
    across = tl.cdiv(width, COLUMNS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    r = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)[:, None]
    live = (r < planes * lines) & (column < width)
    row = r % lines
    plane = r // lines
    n, channel = (plane // channels).to(tl.int64), (plane % channels).to(tl.int64)
    source = x + (n * sn + channel * sc) * V + (row * sh * V + column // FACTOR_X)
    value = _scaled(tl.load(source, mask=live, other=0.0), SCALE)
    place = y + (n * tn + channel * tc) * V + (row * (FACTOR_Y * th * V) + column)
    for k in tl.static_range(FACTOR_Y):
        tl.store(place + k * th * V, value, mask=live)


@triton.jit
def _scaled(value, SCALE: tl.constexpr):
    """Times a number, in float32 at least, and back in the type that it has."""
    if SCALE == 1.0:
        return value
    elif value.dtype == tl.float64:
        return value * SCALE
    else:
        return (value.to(tl.float32) * SCALE).to(value.dtype)


means_last, means_pairs, repeat_last, repeat_rows = map(
    Launchable, (_means_last, _means_pairs, _repeat_last, _repeat_rows)
)
