"""Resizing and average pooling of images: a linear map along each axis.

    y[n, c, i, j] = Σ_k Σ_l wy[k, i] · wx[l, j] · x[n, c, top[i] + k, left[j] + l]

What is read and with which weights stands in a table for each axis (``kernels/taps.py``). The
gradient is the same map with the tables turned round: every element gathers from those that read
it, so nothing is added by atomics and two runs agree to the last bit.

    bytes = size · (x + y): taps come from memory once, and again from the caches

A program makes a tile of y, for some planes, so that what it looks up in the tables serves many
results. Neighbouring threads make neighbours in memory: results along a row, which each load their
taps, or vectors of channels where these are adjacent. What limits it is the number of loads and
instructions, the more so the more taps there are.

So where rows are read again, ``walk`` goes down the rows and keeps what it read of the last ones,
blended along the row: upsampling by 2 loads one element for a result instead of four.

Where places need no table, ``resample_regular.py`` has kernels that come near to a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.kernels.taps import Taps
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.resample_regular import (
    corner,
    means_last,
    means_pairs,
    narrow,
    repeat_last,
    repeat_rows,
)
from deuteron.kernels.triton.resample_ways import UNROLLED, Way


@triton.jit
def _along(n, AT: tl.constexpr, LAST: tl.constexpr):
    """Numbers along one side of a tile, which is [rows, columns, planes] where channels are
    adjacent, else [columns, rows, planes]: of loads from places in a table the compiler knows
    nothing, and gives neighbours along the first side to neighbouring threads."""
    if AT == "plane":
        return n[None, None, :]
    elif (AT == "row") == LAST:
        return n[:, None, None]
    else:
        return n[None, :, None]


@triton.jit
def _weights(table, at, size, live, MOST: tl.constexpr):
    """The weights of all taps at some places, to be kept in registers."""
    found = (tl.load(table + at, mask=live, other=0.0),)
    for k in tl.static_range(1, MOST):
        found = found + (tl.load(table + (k * size + at), mask=live, other=0.0),)
    return found


@triton.jit
def _read(at, step, live, count, BROAD: tl.constexpr):
    """One row of each result's window. What is not read counts as 0."""
    found = (tl.load(at, mask=live & (count > 0), other=0.0),)
    for k in tl.static_range(1, BROAD):
        found = found + (tl.load(at + k * step, mask=live & (k < count), other=0.0),)
    return found


@triton.jit
def _blend(taps, weights, WIDE: tl.constexpr, BROAD: tl.constexpr):
    """The sum of what was read, each times its weight if there are weights."""
    total = taps[0].to(WIDE)
    if weights is not None:
        total *= weights[0]
    for k in tl.static_range(1, BROAD):
        if weights is not None:
            total += taps[k].to(WIDE) * weights[k]
        else:
            total += taps[k].to(WIDE)
    return total


@triton.jit
def _sum_across(
    at, step, live, count, table, column, size, WIDE: tl.constexpr, BROAD: tl.constexpr
):
    """The same of a row of many taps, one after another."""
    total = tl.zeros(live.shape, WIDE)
    for k in range(BROAD):
        v = tl.load(at + k * step, mask=live & (k < count), other=0.0).to(WIDE)
        if table is not None:
            v *= tl.load(table + (k * size + column), mask=column < size, other=0.0)
        total += v
    return total


@triton.jit
def _across(
    at,
    step,
    live,
    count,
    weights,
    table,
    column,
    size,
    WIDE: tl.constexpr,
    BROAD: tl.constexpr,
    UNROLL: tl.constexpr,
):
    if BROAD > UNROLL:
        return _sum_across(at, step, live, count, table, column, size, WIDE, BROAD)
    else:
        return _blend(_read(at, step, live, count, BROAD), weights, WIDE, BROAD)


@triton.jit
def _tile(
    x,
    y,
    first_y,
    count_y,
    weight_y,
    divide_y,
    first_x,
    count_x,
    weight_x,
    divide_x,
    channels,
    height,
    width,
    sn,
    sc,
    sh,
    sw,
    tn,
    tc,
    th,
    one,
    TALL: tl.constexpr,
    BROAD: tl.constexpr,
    LAST: tl.constexpr,
    ADJACENT: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A tile of some planes of one image. LAST: channels are adjacent in y. ADJACENT: along the
    axis that is the last one in y, x has no gaps either."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    n, plane, upper, begin = corner(channels, height, width, PLANES, ROWS, COLUMNS)
    channel = _along(plane + tl.arange(0, PLANES), "plane", LAST)
    row = _along(upper + tl.arange(0, ROWS), "row", LAST)
    column = _along(begin + tl.arange(0, COLUMNS), "column", LAST)
    live = (channel < channels) & (row < height) & (column < width)
    top = tl.load(first_y + row, mask=row < height, other=0)
    tall = tl.load(count_y + row, mask=row < height, other=0)
    left = tl.load(first_x + column, mask=column < width, other=0)
    broad = tl.load(count_x + column, mask=column < width, other=0)
    weights = None
    if weight_x is not None and BROAD <= UNROLL:
        weights = _weights(weight_x, column, width, column < width, BROAD)
    step = 1 if ADJACENT and not LAST else sw
    aside = channel if ADJACENT and LAST else channel.to(tl.int64) * sc
    source = x + n * sn + (top * sh + left * step) + aside
    total = tl.zeros((ROWS, COLUMNS, PLANES) if LAST else (COLUMNS, ROWS, PLANES), WIDE)
    if TALL > UNROLL:
        for k in range(TALL):
            line = _across(
                source + k * sh,
                step,
                live & (k < tall),
                broad,
                weights,
                weight_x,
                column,
                width,
                WIDE,
                BROAD,
                UNROLL,
            )
            if weight_y is not None:
                line *= tl.load(weight_y + (k * height + row), mask=row < height, other=0.0)
            total += line
    else:
        for k in tl.static_range(TALL):
            line = _across(
                source + k * sh,
                step,
                live & (k < tall),
                broad,
                weights,
                weight_x,
                column,
                width,
                WIDE,
                BROAD,
                UNROLL,
            )
            if weight_y is not None:
                line *= tl.load(weight_y + (k * height + row), mask=row < height, other=0.0)
            total = line if k == 0 else total + line
    # the compiler learns of no more alignment than VECTOR: so many neighbours are a thread's, as
    # with more it would read them apart and exchange them
    place = y + n * tn + (one - 1) * VECTOR
    if LAST:
        at = place + (row * th + column * tc) + channel
    else:
        at = place + channel.to(tl.int64) * tc + (row * th + column)
    total = narrow(y, total, divide_y, divide_x, row, column, height, width)
    tl.store(at, total, mask=live)


@triton.jit
def _gathered(rows, scales, count, TALL: tl.constexpr, RAGGED: tl.constexpr):
    """The sum of rows, those that are read."""
    total = rows[0]
    if scales is not None:
        total *= scales[0]
    if RAGGED:
        total = tl.where(count > 0, total, 0.0)
    for k in tl.static_range(1, TALL):
        line = rows[k]
        if scales is not None:
            line *= scales[k]
        if RAGGED:
            line = tl.where(k < count, line, 0.0)
        total += line
    return total


@triton.jit
def _walk(
    x,
    y,
    first_y,
    count_y,
    weight_y,
    divide_y,
    first_x,
    count_x,
    weight_x,
    divide_x,
    channels,
    height,
    width,
    sn,
    sc,
    sh,
    sw,
    tn,
    tc,
    th,
    one,
    length,
    TALL: tl.constexpr,
    BROAD: tl.constexpr,
    LAST: tl.constexpr,
    ADJACENT: tl.constexpr,
    PLANES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    VECTOR: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """ROWS rows of some planes of one image, one after another. The rows of x that a result reads
    are kept, blended along the row, and the next one is on its way while they are added up.
    ``length``: the rows of x. RAGGED: there are rows among those kept that a result does not read.
    """
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    n, plane, upper, begin = corner(channels, height, width, PLANES, ROWS, COLUMNS)
    channel = (plane + tl.arange(0, PLANES))[None, :]
    column = (begin + tl.arange(0, COLUMNS))[:, None]
    live = (channel < channels) & (column < width)
    left = tl.load(first_x + column, mask=column < width, other=0)
    broad = tl.load(count_x + column, mask=column < width, other=0)
    weights = None
    if weight_x is not None:
        weights = _weights(weight_x, column, width, column < width, BROAD)
    step = 1 if ADJACENT and not LAST else sw
    aside = channel if ADJACENT and LAST else channel.to(tl.int64) * sc
    source = x + n * sn + left * step + aside
    place = y + n * tn + (one - 1) * VECTOR
    if LAST:
        place = place + column * tc + channel
    else:
        place = place + channel.to(tl.int64) * tc + column
    lower = tl.minimum(upper + ROWS, height)
    end = tl.minimum(tl.load(first_y + lower - 1) + TALL, length)
    top = tl.load(first_y + upper)
    ahead = _read(source + top * sh, step, live & (top < end), broad, BROAD)
    kept = (tl.zeros((COLUMNS, PLANES), WIDE),) * TALL
    for row in range(upper, lower):
        top = tl.load(first_y + row)
        # looked up again, because Triton 3.6 loses a variable that goes from turn to turn and only
        # bounds an inner loop
        have = tl.load(first_y + tl.maximum(row - 1, upper)) + tl.where(row > upper, TALL, 0)
        scales = None
        if weight_y is not None:
            scales = _weights(weight_y, row, height, True, TALL)
        tall = TALL
        if RAGGED:
            tall = tl.load(count_y + row)
        for r in range(have, top + TALL):
            line = _blend(ahead, weights, WIDE, BROAD)
            ahead = _read(source + (r + 1) * sh, step, live & (r + 1 < end), broad, BROAD)
            kept = kept[1:] + (line,)
        total = _gathered(kept, scales, tall, TALL, RAGGED)
        total = narrow(y, total, divide_y, divide_x, row, column, height, width)
        tl.store(place + row * th, total, mask=live)


tile, walk = Launchable(_tile), Launchable(_walk)


class Call(NamedTuple):
    """A kernel, its programs, and after x and y the tables, numbers and constants that it takes."""

    kernel: Launchable
    programs: int
    tables: tuple[torch.Tensor | None, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


@dataclass(frozen=True)
class Map:
    """From x to y, [N, C, H, W] or [N, C, W] in memory, with the taps along both axes."""

    shape: tuple[int, ...]  # of y
    of_x: tuple[int, ...]  # strides
    of_y: tuple[int, ...]
    down: Taps
    across: Taps

    @property
    def space(self) -> tuple[int, int]:
        """Rows and columns of y."""
        height, width = (1, *self.shape[2:])[-2:]
        return height, width

    @property
    def strides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of x and of y, for images, rows of which there is one where there are none."""
        (sn, sc, *steps), (tn, tc, *to) = self.of_x, self.of_y
        return (sn, sc, *(0, *steps)[-2:]), (tn, tc, *(0, *to)[-2:])

    @property
    def last(self) -> bool:
        """Whether channels are adjacent in y."""
        return self.of_y[1] == 1 and self.shape[1] > 1

    def call(self, way: Way) -> Call:
        """The kernel and all that it is given besides x and y."""
        return self._regular(way) if way.regular else self._by_tables(way)

    def _by_tables(self, way: Way) -> Call:
        (sn, sc, sh, sw), (tn, tc, th, tw) = self.strides
        beside, unit = (tw, sc) if self.last else (tc, sw)
        numbers = (self.shape[1], *self.space, sn, sc, sh, sw, tn, beside, th, 1)
        constants = {
            "TALL": self.down.most,
            "BROAD": self.across.most,
            "LAST": self.last,
            "ADJACENT": unit == 1,
            "PLANES": way.planes,
            "ROWS": way.rows,
            "COLUMNS": way.columns,
            "VECTOR": 8 if self.last else max(way.columns // (32 * way.warps), 1),
        }
        tables = (*self.down.tables, *self.across.tables)
        programs = self._tiles(way, self.space)
        if not way.walks:
            return Call(tile, programs, tables, numbers, {**constants, "UNROLL": UNROLLED})
        numbers, constants = (
            (*numbers, self.down.length),
            constants | {"RAGGED": self.down.is_ragged},
        )
        return Call(walk, programs, tables, numbers, constants)

    def _regular(self, way: Way) -> Call:
        (sn, sc, sh, sw), (tn, tc, th, tw) = self.strides
        down, across, (height, width) = self.down, self.across, self.space
        images, channels = self.shape[:2]
        read, repeats = (down.length, across.length), way.regular.startswith("repeat")
        side = (sn, sh, sw, tn, th, tw) if self.last else (sn, sc, sh, tn, tc, th)
        adjacent = channels if self.last else width
        v = gcd(16, adjacent, *side)
        side, adjacent = tuple(s // v for s in side), adjacent // v
        constants: dict[str, Any] = {"V": v, "ROWS": way.rows, "COLUMNS": way.columns}
        constants |= _repeated(down, across) if repeats else _averaged(down, across, self.last)
        tables = () if repeats else (down.divisors, across.divisors)
        if self.last:
            constants["PLANES"] = way.planes
            space = read if repeats else self.space
            numbers = (adjacent, *(() if repeats else self.space), *read, *side)
            kernel = repeat_last if repeats else means_last
            return Call(kernel, self._tiles(way, space), tables, numbers, constants)
        rows = down.length if repeats else height
        lines = () if repeats else (down.length,)
        numbers = (images * channels, channels, rows, adjacent, *lines, *side)
        kernel = repeat_rows if repeats else means_pairs
        return Call(kernel, self._rows(way, rows), tables, numbers, constants)

    def _tiles(self, way: Way, space: tuple[int, int]) -> int:
        """How many there are of some planes of images with so many rows and columns."""
        pieces = -(-space[0] // way.rows) * -(-space[1] // way.columns)
        return self.shape[0] * -(-self.shape[1] // way.planes) * pieces

    def _rows(self, way: Way, height: int) -> int:
        """The same where the rows of all planes follow each other."""
        rows = self.shape[0] * self.shape[1] * height
        return -(-rows // way.rows) * -(-self.space[1] // way.columns)


def _repeated(down: Taps, across: Taps) -> dict[str, Any]:
    """What the kernels that repeat elements want to know of the axes."""
    scale = down.scale * across.scale
    return {"SCALE": scale, "FACTOR_Y": down.factor, "FACTOR_X": across.factor}


def _averaged(down: Taps, across: Taps, last: bool) -> dict[str, Any]:
    """What the kernels of windows want to know of the axes."""
    assert down.steps is not None and across.steps is not None
    (step_y, before_y), (step_x, before_x) = down.steps, across.steps
    found = {"TALL": down.most, "STEP_Y": step_y, "BEFORE_Y": before_y, "CUT_Y": down.is_cut}
    if last:
        found |= {"BROAD": across.most, "STEP_X": step_x, "BEFORE_X": before_x}
        found["CUT_X"] = across.is_cut
    return found


def resample(
    of: Map, way: Way, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """``run(x, y)``."""
    kernel, programs, tables, numbers, constants = of.call(way)
    given = [None if t is None else t.contiguous().to(device) for t in tables]

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel((programs,), x, y, *given, *numbers, warps=way.warps, **constants)

    return run
