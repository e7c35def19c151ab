"""Resizing and average pooling of images: a linear map along each axis.

    y[n, c, i, j] = Σ_k Σ_l wy[k, i] · wx[l, j] · x[n, c, top[i] + k, left[j] + l]

A table for each axis says what is read and with which weights (``kernels/resample_map.py``). The
gradient is the same map with inverted tables: every element gathers from those that read it, so
nothing is added by atomics and two runs agree to the last bit.

    bytes = size · (x + y): what several results read comes from memory once, then from the caches

A program makes a tile of y, for some planes, so that what it looks up in the tables serves many
results. Neighbouring threads make neighbours in memory: results along a row, each of which loads
what it reads, or vectors of channels where these are adjacent. The number of loads and instructions
limits the speed, the more so the more elements a result reads.

So where several results read the same rows, ``walk`` goes down the rows and keeps the last ones
that it read, blended along the row: upsampling by 2 loads one element for a result instead of four.

Generated code has windows whose places can be computed (``codegen/windows.py``): means, and
repeated elements. Only these kernels read with weights from a table, as bilinear resizing does.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl

from deuteron.ir.types import TensorType
from deuteron.kernels.resample_map import AxisMap
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.resample_tiles import UNROLLED, ResampleTile, is_last

UNROLL: tl.constexpr = tl.constexpr(UNROLLED)


# The tensors of an AxisMap, on a GPU.
Tables = namedtuple("Tables", "first count weights divisors")


# A program's planes, rows and columns; tall, broad: the most rows and columns that a result reads;
# last: channels are adjacent in y; adjacent: x has no gaps either along the axis that is adjacent
# in y; vector: a thread has so many neighbours; ragged: some results do not read all rows that are
# kept.
Shape = namedtuple("Shape", "planes rows columns tall broad last adjacent vector ragged")


@triton.jit
def _corner(channels, height, width, T: tl.constexpr):
    """Return the image of a program, and where its planes, rows and columns begin."""
    across = tl.cdiv(width, T.columns)
    pieces = tl.cdiv(height, T.rows) * across
    piece = tl.program_id(0) % pieces
    block = tl.program_id(0) // pieces
    blocks = tl.cdiv(channels, T.planes)
    n = (block // blocks).to(tl.int64)
    return n, block % blocks * T.planes, piece // across * T.rows, piece % across * T.columns


@triton.jit
def _narrow(y, total, divide_y, divide_x, row, column, height, width):
    """Return the result in the type of y, divided as a mean is, where there are divisors."""
    if divide_x is not None:
        by = tl.load(divide_x + column, mask=column < width, other=1.0)
        if divide_y is not None:
            by *= tl.load(divide_y + row, mask=row < height, other=1.0)
        total = total / by
    elif divide_y is not None:
        total = total / tl.load(divide_y + row, mask=row < height, other=1.0)
    return total.to(y.dtype.element_ty)


@triton.jit
def _along(n, AT: tl.constexpr, LAST: tl.constexpr):
    """Return numbers along one side of a tile, which is [rows, columns, planes] where channels are
    adjacent, else [columns, rows, planes]: the compiler knows nothing about loads whose places come
    from a table, and gives neighbours along the first side to neighbouring threads."""
    if AT == "plane":
        return n[None, None, :]
    elif (AT == "row") == LAST:
        return n[:, None, None]
    else:
        return n[None, :, None]


@triton.jit
def _weights(table, at, size, live, MOST: tl.constexpr):
    """Load all weights of some results, to keep them in registers."""
    found = ()
    for k in tl.static_range(MOST):
        found = found + (tl.load(table + (k * size + at), mask=live, other=0.0),)
    return found


@triton.jit
def _read(at, step, live, count, BROAD: tl.constexpr):
    """Load one row of each result's window. What the result does not read is 0."""
    found = ()
    for k in tl.static_range(BROAD):
        found = found + (tl.load(at + k * step, mask=live & (k < count), other=0.0),)
    return found


@triton.jit
def _blend(read, weights, count, WIDE: tl.constexpr, MOST: tl.constexpr):
    """Return the sum of what was read, each times its weight if there are weights; of the first
    ``count`` only, if that is given."""
    total = None
    for k in tl.static_range(MOST):
        part = read[k].to(WIDE)
        if weights is not None:
            part *= weights[k]
        if count is not None:
            part = tl.where(k < count, part, 0.0)
        total = part if k == 0 else total + part
    return total


@triton.jit
def _line(
    k, source, steps, live, counts, weights, down, across, at, T: tl.constexpr, WIDE: tl.constexpr
):
    """Return the k-th row that each result reads, blended; many elements are read in a loop."""
    row, column, height, width = at
    here, live, count = source + k * steps[0], live & (k < counts[0]), counts[1]
    if T.broad > UNROLL:
        total = tl.zeros(live.shape, WIDE)
        for m in range(T.broad):
            v = tl.load(here + m * steps[1], mask=live & (m < count), other=0.0).to(WIDE)
            if across.weights is not None:
                v *= tl.load(across.weights + (m * width + column), mask=column < width, other=0.0)
            total += v
    else:
        read = _read(here, steps[1], live, count, T.broad)
        total = _blend(read, weights, None, WIDE, T.broad)
    if down.weights is not None:
        total *= tl.load(down.weights + (k * height + row), mask=row < height, other=0.0)
    return total


@triton.jit
def _tile(x, y, down, across, sizes, strides, T: tl.constexpr):
    """Compute a tile of some planes of one image."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    channels, height, width, _, one = sizes
    sn, sc, sh, sw, tn, tc, th = strides
    n, plane, upper, begin = _corner(channels, height, width, T)
    channel = _along(plane + tl.arange(0, T.planes), "plane", T.last)
    row = _along(upper + tl.arange(0, T.rows), "row", T.last)
    column = _along(begin + tl.arange(0, T.columns), "column", T.last)
    live = (channel < channels) & (row < height) & (column < width)
    top = tl.load(down.first + row, mask=row < height, other=0)
    tall = tl.load(down.count + row, mask=row < height, other=0)
    left = tl.load(across.first + column, mask=column < width, other=0)
    broad = tl.load(across.count + column, mask=column < width, other=0)
    weights = None
    if across.weights is not None and T.broad <= UNROLL:
        weights = _weights(across.weights, column, width, column < width, T.broad)
    step = 1 if T.adjacent and not T.last else sw
    aside = channel if T.adjacent and T.last else channel.to(tl.int64) * sc
    source = x + n * sn + (top * sh + left * step) + aside
    total = tl.zeros(
        (T.rows, T.columns, T.planes) if T.last else (T.columns, T.rows, T.planes), WIDE
    )
    steps, counts, at = (sh, step), (tall, broad), (row, column, height, width)
    if T.tall > UNROLL:
        for k in range(T.tall):
            total += _line(k, source, steps, live, counts, weights, down, across, at, T, WIDE)
    else:
        for k in tl.static_range(T.tall):
            line = _line(k, source, steps, live, counts, weights, down, across, at, T, WIDE)
            total = line if k == 0 else total + line
    # the compiler learns of no more alignment than ``vector``, and gives a thread so many
    # neighbours; with more it would load them in another layout and exchange them between threads
    place = y + n * tn + (one - 1) * T.vector
    if T.last:
        place = place + (row * th + column * tc) + channel
    else:
        place = place + channel.to(tl.int64) * tc + (row * th + column)
    total = _narrow(y, total, down.divisors, across.divisors, row, column, height, width)
    tl.store(place, total, mask=live)


@triton.jit
def _walk(x, y, down, across, sizes, strides, T: tl.constexpr):
    """Compute some rows of some planes of one image, one after another. The rows of x that a result
    reads are kept, blended along the row, and the next one is loaded while they are added up.
    ``length``: the rows of x."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    channels, height, width, length, one = sizes
    sn, sc, sh, sw, tn, tc, th = strides
    n, plane, upper, begin = _corner(channels, height, width, T)
    channel = (plane + tl.arange(0, T.planes))[None, :]
    column = (begin + tl.arange(0, T.columns))[:, None]
    live = (channel < channels) & (column < width)
    left = tl.load(across.first + column, mask=column < width, other=0)
    broad = tl.load(across.count + column, mask=column < width, other=0)
    weights = None
    if across.weights is not None:
        weights = _weights(across.weights, column, width, column < width, T.broad)
    step = 1 if T.adjacent and not T.last else sw
    aside = channel if T.adjacent and T.last else channel.to(tl.int64) * sc
    source = x + n * sn + left * step + aside
    place = y + n * tn + (one - 1) * T.vector
    if T.last:
        place = place + column * tc + channel
    else:
        place = place + channel.to(tl.int64) * tc + column
    lower = tl.minimum(upper + T.rows, height)
    end = tl.minimum(tl.load(down.first + lower - 1) + T.tall, length)
    top = tl.load(down.first + upper)
    ahead = _read(source + top * sh, step, live & (top < end), broad, T.broad)
    kept = (tl.zeros((T.columns, T.planes), WIDE),) * T.tall
    for row in range(upper, lower):
        top = tl.load(down.first + row)
        # looked up again, because Triton 3.6 loses a variable that goes from turn to turn and only
        # bounds an inner loop
        have = tl.load(down.first + tl.maximum(row - 1, upper)) + tl.where(row > upper, T.tall, 0)
        scales = None
        if down.weights is not None:
            scales = _weights(down.weights, row, height, True, T.tall)
        tall = None
        if T.ragged:
            tall = tl.load(down.count + row)
        for r in range(have, top + T.tall):
            line = _blend(ahead, weights, None, WIDE, T.broad)
            ahead = _read(source + (r + 1) * sh, step, live & (r + 1 < end), broad, T.broad)
            kept = kept[1:] + (line,)
        total = _blend(kept, scales, tall, WIDE, T.tall)
        total = _narrow(y, total, down.divisors, across.divisors, row, column, height, width)
        tl.store(place + row * th, total, mask=live)


tile, walk = Launchable(_tile), Launchable(_walk)


def call(
    x: TensorType, y: TensorType, down: AxisMap, across: AxisMap, cut: ResampleTile
) -> tuple[Launchable, int, tuple[Tables, ...], tuple[tuple[int, ...], ...], Shape]:
    """Return the kernel that makes y of x, [N, C, H, W] or [N, C, W], by the maps along both axes,
    the number of programs, and its arguments after x and y: tables, numbers and constants."""
    (images, channels, *space), last = y.shape, is_last(y)
    height, width = (1, *space)[-2:]
    (sn, sc, *steps), (tn, tc, *to) = x.strides, y.strides
    (sh, sw), (th, tw) = (0, *steps)[-2:], (0, *to)[-2:]
    pieces = -(-height // cut.rows) * -(-width // cut.columns)
    beside, unit = (tw, sc) if last else (tc, sw)
    vector = 8 if last else max(cut.columns // (32 * cut.warps), 1)
    read, ragged = (down.most, across.most), cut.walks and down.is_ragged
    sides = (cut.planes, cut.rows, cut.columns)
    constants = Shape(*sides, *read, last, unit == 1, vector, ragged)
    tables = tuple(Tables(a.first, a.count, a.weights, a.divisors) for a in (down, across))
    numbers = (channels, height, width, down.length, 1), (sn, sc, sh, sw, tn, beside, th)
    programs = images * -(-channels // cut.planes) * pieces
    return walk if cut.walks else tile, programs, tables, numbers, constants


def resample(
    x: TensorType, y: TensorType, axes: Sequence[AxisMap], cut: ResampleTile, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return ``run(x, y)``."""
    kernel, programs, tables, numbers, constants = call(x, y, *axes, cut)
    there = [[t if t is None else t.contiguous().to(device) for t in table] for table in tables]
    known = [*(Tables(*table) for table in there), *numbers]

    def run(x: torch.Tensor, y: torch.Tensor) -> None:
        kernel((programs,), x, y, *known, warps=cut.warps, T=constants)

    return run
