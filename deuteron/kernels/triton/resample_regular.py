"""Resampling where places follow from numbers: windows at equal steps, and elements repeated.

    mean     y[i, j] = Σ_k Σ_l x[i · step − before + k, j · step − before + l] / divisors
    repeat   y[i, j] = x[i // factor, j // factor] · scale

Means of windows, halving an image and the gradient of a nearest upsampling are of the first kind;
a nearest upsampling and the gradient of windows that do not overlap of the second. Nothing is
looked up before the first load, and all of a thread's elements lie side by side in memory: the
bytes, size · (x + y), move at the speed of a copy. Rows that several windows read come from L1.

Strides and the length of what is adjacent are given in units of ``v`` elements, so that the
compiler sees how many may travel together.

Over the kernels that look places up these win the last tenth to fifth: 2 × 2 means of [32, 64, 112,
112] in bf16 run at 0.88 (rows) and 0.90 (channels last) of a copy's speed on an H200, 3 × 3 means,
which only channels last have here, at 0.57 and 0.75 (bench/results/functional-h200.md).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


class Windows(NamedTuple):
    """A program's planes, rows and columns, and the windows along both axes: how many elements they
    have, how far apart they begin and how far before x, and whether some reach beyond it."""

    planes: int
    rows: int
    columns: int
    v: int
    tall: int
    broad: int
    step_y: int
    step_x: int
    before_y: int
    before_x: int
    cut_y: bool
    cut_x: bool


class Copies(NamedTuple):
    """A program's planes, rows and columns, and how often an element is repeated, times what."""

    planes: int
    rows: int
    columns: int
    v: int
    scale: float
    factor_y: int
    factor_x: int


@triton.jit
def corner(channels, height, width, T: tl.constexpr):
    """The image of a program, and where its planes, rows and columns begin."""
    across = tl.cdiv(width, T.columns)
    pieces = tl.cdiv(height, T.rows) * across
    piece = tl.program_id(0) % pieces
    block = tl.program_id(0) // pieces
    blocks = tl.cdiv(channels, T.planes)
    n = (block // blocks).to(tl.int64)
    return n, block % blocks * T.planes, piece // across * T.rows, piece % across * T.columns


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
def _line(planes, channels, height, width, T: tl.constexpr):
    """Where rows of all planes follow each other: those of a program, whether they are there, their
    row, image and channel, and the first column."""
    across = tl.cdiv(width, T.columns)
    begin = tl.program_id(0) % across * T.columns
    r = tl.program_id(0) // across * T.rows + tl.arange(0, T.rows)[:, None]
    there = r < planes * height
    row = r % height
    plane = r // height
    n, channel = (plane // channels).to(tl.int64), (plane % channels).to(tl.int64)
    return there, row, n, channel, begin


@triton.jit
def _means_last(x, y, divide_y, divide_x, sizes, strides, T: tl.constexpr):
    """Means where channels are adjacent, in tiles of one image. ``lines`` and ``length``: the rows
    and columns of x."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    channels, height, width, lines, length = sizes
    sn, sh, sw, tn, th, tw = strides
    n, plane, upper, begin = corner(channels * T.v, height, width, T)
    channel = plane + tl.arange(0, T.planes)[None, None, :]
    row = upper + tl.arange(0, T.rows)[:, None, None]
    column = begin + tl.arange(0, T.columns)[None, :, None]
    live = (channel < channels * T.v) & (row < height) & (column < width)
    top = row * T.step_y - T.before_y
    left = column * T.step_x - T.before_x
    source = x + n * sn * T.v + (top * sh + left * sw) * T.v + channel
    total = tl.zeros((T.rows, T.columns, T.planes), WIDE)
    for k in tl.static_range(T.tall):
        for m in tl.static_range(T.broad):
            inside = live
            if T.cut_y:
                inside = inside & (top + k >= 0) & (top + k < lines)
            if T.cut_x:
                inside = inside & (left + m >= 0) & (left + m < length)
            total += tl.load(source + (k * sh + m * sw) * T.v, mask=inside, other=0.0).to(WIDE)
    total = narrow(y, total, divide_y, divide_x, row, column, height, width)
    tl.store(y + n * tn * T.v + (row * th + column * tw) * T.v + channel, total, mask=live)


@triton.jit
def _means_pairs(x, y, divide_y, divide_x, sizes, strides, T: tl.constexpr):
    """Means of pairs of columns that are adjacent, and of some rows: rows of all planes, one after
    the other. Pairs are read side by side and parted in registers."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    planes, channels, height, width, lines = sizes
    sn, sc, sh, tn, tc, th = strides
    width *= T.v
    there, row, n, channel, begin = _line(planes, channels, height, width, T)
    either = 2 * begin + tl.arange(0, 2 * T.columns)[None, :]
    top = row * T.step_y - T.before_y
    source = x + (n * sn + channel * sc) * T.v + (top * sh * T.v + either)
    total = tl.zeros((T.rows, 2 * T.columns), WIDE)
    for k in tl.static_range(T.tall):
        inside = there & (either < 2 * width)
        if T.cut_y:
            inside = inside & (top + k >= 0) & (top + k < lines)
        total += tl.load(source + k * sh * T.v, mask=inside, other=0.0).to(WIDE)
    even, odd = tl.split(tl.reshape(total, (T.rows, T.columns, 2)))
    column = begin + tl.arange(0, T.columns)[None, :]
    total = narrow(y, even + odd, divide_y, divide_x, row, column, height, width)
    place = y + (n * tn + channel * tc) * T.v + (row * th * T.v + column)
    tl.store(place, total, mask=there & (column < width))


@triton.jit
def _repeat_last(x, y, sizes, strides, T: tl.constexpr):
    """Every element of a tile of x is read once and written where it belongs, where channels are
    adjacent."""
    channels, lines, length = sizes
    sn, sh, sw, tn, th, tw = strides
    n, plane, upper, begin = corner(channels * T.v, lines, length, T)
    channel = plane + tl.arange(0, T.planes)[None, None, :]
    row = upper + tl.arange(0, T.rows)[:, None, None]
    column = begin + tl.arange(0, T.columns)[None, :, None]
    live = (channel < channels * T.v) & (row < lines) & (column < length)
    source = x + n * sn * T.v + (row * sh + column * sw) * T.v + channel
    value = _scaled(tl.load(source, mask=live, other=0.0), T.scale)
    far = (row * (T.factor_y * th) + column * (T.factor_x * tw)) * T.v
    place = y + n * tn * T.v + far + channel
    for k in tl.static_range(T.factor_y):
        for m in tl.static_range(T.factor_x):
            tl.store(place + (k * th + m * tw) * T.v, value, mask=live)


@triton.jit
def _repeat_rows(x, y, sizes, strides, T: tl.constexpr):
    """Rows of x of all planes, one after the other, each written as often as it is repeated.
    ``width``: the columns of y, whose elements come from the same places of x by L1."""
    planes, channels, lines, width = sizes
    sn, sc, sh, tn, tc, th = strides
    width *= T.v
    there, row, n, channel, begin = _line(planes, channels, lines, width, T)
    column = begin + tl.arange(0, T.columns)[None, :]
    live = there & (column < width)
    source = x + (n * sn + channel * sc) * T.v + (row * sh * T.v + column // T.factor_x)
    value = _scaled(tl.load(source, mask=live, other=0.0), T.scale)
    place = y + (n * tn + channel * tc) * T.v + (row * (T.factor_y * th * T.v) + column)
    for k in tl.static_range(T.factor_y):
        tl.store(place + k * th * T.v, value, mask=live)


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
