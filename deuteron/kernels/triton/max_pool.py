"""The largest element of each window, which one of the window it was, and the gradient.

    y[n, c, i, j] = max over (t, u) of x[n, c, i·s − p + t·d, j·s − p + u·d]
    dx[n, c, h, w] = Σ over the windows that (h, w) wins of their gradients

Ties go to the first element, nan to the last, as in torch. What is kept of a winner is its number
in the window, t · k + u, in a byte: an eighth of an index, and the gradient needs nothing else.

    bytes there = size · (x + y) + y for the winners;  back = size · (dx + grad) + y for the winners

A tile is [outer, inner]: lines of an image and positions along them, or, where channels are
adjacent, positions and their channels. Few of a window's elements come from memory, the others were
read for its neighbours and are in the cache: what costs is the number of instructions. So windows
are written out, steps of two along a line are read and written as pairs, and a program has several
rows of windows, which share rows of x: what these come to along a window is found once.

Backwards a program takes cells of as many elements as a window moves on by, s × s: all elements of
a place in their cell are the same elements of the same windows, so a winner is compared with a
constant and a gradient is read once for a whole cell. Where there would be too many of these, an
element looks its windows up one by one. Nothing is added by atomics, so two runs agree to the last
bit.

Generated code has no windows: without these kernels torch pools. On an H200 (bench/results/
functional-h200.md, [32, 64, 112, 112] in bf16) 3 × 3 windows two apart take 17 µs instead of 105,
with their gradient 58 µs instead of 400, at 0.88 and 0.53 of a copy's speed.
"""

from collections import namedtuple
from collections.abc import Callable
from math import gcd
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

Pair = tuple[int, int]
Strides = tuple[int, int, int, int]
UNROLLED = 32  # elements of a window that are written out; more are gone through in a loop


# The size, step, padding and dilation of a window, down and along.
Window = namedtuple("Window", "kh kw sh sw ph pw dh dw")


# What is known of a tensor's lines: whether elements lie side by side, and of what number of
# elements the distance from line to line is a multiple.
Known = namedtuple("Known", "adjacent step")

# A program's lines and elements of each. last: a line's elements are channels; width, line and
# windows say of what number, up to 16, a size is a multiple: x's width, a line of positions, the
# windows along a row; what is known of x, y and grad; how and rows are for _pool, and _cells writes
# in pairs if that is how.
Tiles = namedtuple("Tiles", "outer inner last width line windows x y grad how rows")


@triton.constexpr_function
def _number(place, window, stride, padding, dilation, kernel):
    """Which of a window's elements the ``place``-th of a cell is, the window lying so many cells
    on; or -1."""
    along = place + padding - window * stride
    inside = along >= 0 and along % dilation == 0 and along // dilation < kernel
    return along // dilation if inside else -1


@triton.constexpr_function
def _first(kernel, stride, padding, dilation):
    """The first window that holds elements of a cell, counted from the cell."""
    return -(((kernel - 1) * dilation - padding) // stride)


@triton.constexpr_function
def _end(stride, padding):
    """One past the last window that does."""
    return (stride - 1 + padding) // stride + 1


@triton.jit
def _places(channels, down, across, lines, T: tl.constexpr):
    """Image, channel, row and column of a tile; of lines beyond the last, those of the last."""
    along = channels if T.last else across
    blocks = tl.cdiv(along, T.inner)
    outer = tl.program_id(0) // blocks * T.outer + tl.arange(0, T.outer)[:, None]
    inner = tl.program_id(0) % blocks * T.inner + tl.arange(0, T.inner)[None, :]
    live = (outer < lines) & (inner < along)
    outer = tl.minimum(outer, lines - 1)
    if T.last:
        rows = outer // across
        return rows // down, inner, rows % down, outer % across, live
    else:
        planes = outer // down
        return planes // channels, planes % channels, outer % down, inner, live


@triton.jit
def _far(n, c, i, j, strides, STEP: tl.constexpr, LAST: tl.constexpr):
    """Where the lines of a tile begin, known to be multiples of STEP."""
    sn, sc, sh, sw = strides
    if LAST:
        far = n.to(tl.int64) * sn + i.to(tl.int64) * sh + j.to(tl.int64) * sw
    else:
        far = n.to(tl.int64) * sn + c.to(tl.int64) * sc + i.to(tl.int64) * sh
    return tl.multiple_of(far, (STEP, STEP))


@triton.jit
def _near(c, j, strides, ADJACENT: tl.constexpr, LAST: tl.constexpr):
    """How far along a line elements are."""
    if LAST:
        return c if ADJACENT else c.to(tl.int64) * strides[1]
    else:
        return j if ADJACENT else j.to(tl.int64) * strides[3]


@triton.jit
def _whole(width, STEP: tl.constexpr):
    """A size that is known to be a multiple of STEP, so that masks hold for whole vectors."""
    return width // STEP * STEP


@triton.jit
def _steps(strides, STEP: tl.constexpr, LAST: tl.constexpr):
    """Strides, those down and along in 64 bits, which steps of several rows may need; those from
    line to line known to be multiples of STEP."""
    sn, sc, sh, sw = strides
    sh, sw = sh.to(tl.int64), sw.to(tl.int64)
    return sn, sc, _whole(sh, STEP), _whole(sw, STEP) if LAST else sw


@triton.jit
def _take(best, number, v, of_v, KEEP: tl.constexpr):
    """One more element of every window joins what was found before."""
    if KEEP:
        wins = (v > best) | (v != v)
        return tl.where(wins, v, best), tl.where(wins, of_v, number)
    else:
        return tl.maximum(best, v, propagate_nan=tl.PropagateNan.ALL), number


@triton.jit
def _read(at, inside, WIDE: tl.constexpr, KEEP: tl.constexpr):
    """An element of every window; outside of x nothing wins. Numbers of bfloat16 that are selected
    are made wide by hand: the compiler, if it sees what they were, selects in 16 bits, and that
    takes longer. Where only the largest is wanted that is quicker."""
    v = tl.load(at, mask=inside, other=float("-inf"))
    if KEEP and v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(WIDE)


@triton.jit
def _pairs_of_a_row(
    line, two, first, ahead, width, W: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr
):
    """The largest along one row of every window, and its number in the row; ``first`` is the first
    one inside. Windows are two apart, and their elements are read in pairs ``two``."""
    best, number = float("-inf"), first
    for e in tl.static_range(-W.pw // 2, (W.kw - W.pw + 1) // 2):
        at = two + 2 * e
        inside = ahead & (at < width)
        if e < 0:
            inside = inside & (at >= 0)
        v = _read(line + at, inside, WIDE, KEEP)
        one, other = tl.split(tl.reshape(v, (v.shape[0], v.shape[1] // 2, 2)))
        if 2 * e + W.pw == 0:
            best = one
        elif 2 * e + W.pw > 0:
            best, number = _take(best, number, one, 2 * e + W.pw, KEEP)
        if 2 * e + W.pw + 1 == 0:
            best = other
        elif 2 * e + W.pw + 1 < W.kw:
            best, number = _take(best, number, other, 2 * e + W.pw + 1, KEEP)
    return best, number


@triton.jit
def _row(
    line, left, first, ahead, width, step, W: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr
):
    """The same one element after the other, which are ``step`` apart in memory."""
    best, number = float("-inf"), first
    for u in tl.static_range(W.kw):
        inside = ahead & (left + u * W.dw >= 0) & (left + u * W.dw < width)
        v = _read(line + u * W.dw * step, inside, WIDE, KEEP)
        if u == 0:
            best = v
        else:
            best, number = _take(best, number, v, u, KEEP)
    return best, number


@triton.jit
def _put(y, winners, best, number, out, live, top, left, width, W: tl.constexpr):
    """What was found of every window."""
    if y is not None:
        tl.store(y + out, best.to(y.dtype.element_ty), mask=live)
    if winners is not None:
        if winners.dtype.element_ty == tl.int64:
            row, column = top + number // W.kw * W.dh, left + number % W.kw * W.dw
            tl.store(winners + out, row.to(tl.int64) * width + column, mask=live)
        else:
            tl.store(winners + out, number.to(tl.uint8), mask=live)


@triton.jit
def _pool(x, y, winners, size, x_strides, y_strides, W: tl.constexpr, T: tl.constexpr):
    """y, unless it is None, and into ``winners`` their numbers in the windows, or, if it is of 64
    bits, their places in the planes. ``how``: elements one by one ("single"), those of windows two
    apart in pairs ("pairs"), or many, or far apart, in a loop ("loop"). A program has some rows of
    windows for each of its lines: what the row of one window comes to it does not look at again
    for the next."""
    WIDE: tl.constexpr = tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32
    KEEP: tl.constexpr = winners is not None
    channels, height, width, tall, _, groups, wide, lines = size
    if T.last:
        channels = _whole(channels, T.line)
    else:
        wide = _whole(wide, T.line)
    n, c, group, j, live = _places(channels, groups, wide, lines, T)
    xs, ys = _steps(x_strides, T.x.step, T.last), _steps(y_strides, T.y.step, T.last)
    width = _whole(width, T.width)
    i = group * T.rows
    top, left = i * W.sh - W.ph, j * W.sw - W.pw
    line = x + _far(n, c, tl.zeros_like(top), left, xs, T.x.step, T.last)
    out = _far(n, c, i, j, ys, T.y.step, T.last) + _near(c, j, ys, T.y.adjacent, T.last)
    # before any element: the first one inside
    first = tl.broadcast_to(tl.cdiv(tl.maximum(-left, 0), W.dw), (T.outer, T.inner))
    begin = tl.program_id(0) % tl.cdiv(wide, T.inner) * (2 * T.inner)
    two = begin + tl.arange(0, 2 * T.inner)[None, :]
    ahead = c < channels if T.last else tl.full((1, 1), 1, tl.int1)
    if T.how != "pairs":
        line += _near(c, left, xs, T.x.adjacent, T.last)
    if T.how == "loop":
        best = tl.full((T.outer, T.inner), float("-inf"), WIDE)
        number = first + tl.cdiv(tl.maximum(-top, 0), W.dh) * W.kw
        for t in range(W.kh):
            in_row = (top + t * W.dh >= 0) & (top + t * W.dh < height) & ahead
            at = line + (top + t * W.dh).to(tl.int64) * xs[2]
            for u in range(W.kw):
                inside = in_row & (left + u * W.dw >= 0) & (left + u * W.dw < width)
                v = _read(at, inside, WIDE, KEEP)
                best, number = _take(best, number, v, t * W.kw + u, KEEP)
                at += W.dw * xs[3]
        _put(y, winners, best, number, out, live, top, left, width, W)
    else:
        rows, numbers, downs = (), (), ()
        for t in tl.static_range((T.rows - 1) * W.sh + W.kh):
            # a row outside is the nearest one inside, which its window has as well
            row = tl.minimum(tl.maximum(top + t, 0), height - 1)
            here = line + row.to(tl.int64) * xs[2]
            if T.how == "pairs":
                best, number = _pairs_of_a_row(here, two, first, ahead, width, W, WIDE, KEEP)
            elif T.x.adjacent and not T.last:
                best, number = _row(here, left, first, ahead, width, 1, W, WIDE, KEEP)
            else:
                best, number = _row(here, left, first, ahead, width, xs[3], W, WIDE, KEEP)
            rows, numbers, downs = rows + (best,), numbers + (number,), downs + (row - top,)
        for r in tl.static_range(T.rows):
            best, number = rows[r * W.sh], numbers[r * W.sh] + (downs[r * W.sh] - r * W.sh) * W.kw
            for t in tl.static_range(r * W.sh + 1, r * W.sh + W.kh):
                other = numbers[t] + (downs[t] - r * W.sh) * W.kw
                best, number = _take(best, number, rows[t], other, KEEP)
            inside = live if T.rows == 1 else live & (i + r < tall)
            at = out if r == 0 else out + r * ys[2]
            _put(y, winners, best, number, at, inside, top + r * W.sh, left, width, W)


@triton.jit
def _cells(grad, winners, dx, size, strides, W: tl.constexpr, T: tl.constexpr):
    """dx in cells of as many elements as a window moves on by."""
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    channels, height, width, tall, wide, down, across, lines = size
    if T.last:
        channels = _whole(channels, T.line)
    else:
        across, wide = _whole(across, T.line), _whole(wide, T.windows)
    n, c, i, j, live = _places(channels, down, across, lines, T)
    gs, ys = _steps(strides[0], T.grad.step, T.last), _steps(strides[1], T.y.step, T.last)
    xs = _steps(strides[2], T.x.step, T.last)
    ahead = c < channels if T.last else tl.full((1, 1), 1, tl.int1)
    g = grad + _far(n, c, i, j, gs, T.grad.step, T.last)
    g += _near(c, j, gs, T.grad.adjacent, T.last)
    w = winners + _far(n, c, i, j, ys, T.y.step, T.last)
    w += _near(c, j, ys, T.y.adjacent, T.last)
    done = ()
    for a in tl.static_range(W.sh):
        for b in tl.static_range(W.sw):
            total = tl.zeros((T.outer, T.inner), WIDE)
            for di in tl.static_range(_first(W.kh, W.sh, W.ph, W.dh), _end(W.sh, W.ph)):
                for dj in tl.static_range(_first(W.kw, W.sw, W.pw, W.dw), _end(W.sw, W.pw)):
                    t = _number(a, di, W.sh, W.ph, W.dh, W.kh)
                    u = _number(b, dj, W.sw, W.pw, W.dw, W.kw)
                    if t >= 0 and u >= 0:
                        inside = (i + di >= 0) & (i + di < tall) & (j + dj < wide) & ahead
                        if dj < 0:
                            inside = inside & (j + dj >= 0)
                        # equal reads are merged: no more than one for a window
                        from_g = (
                            g + di * gs[2] + (dj if T.grad.adjacent and not T.last else dj * gs[3])
                        )
                        from_w = (
                            w + di * ys[2] + (dj if T.y.adjacent and not T.last else dj * ys[3])
                        )
                        v = tl.load(from_g, mask=inside, other=0.0).to(WIDE)
                        winner = tl.load(from_w, mask=inside, other=255)
                        total += tl.where(winner == t * W.kw + u, v, 0.0)
            done = done + (total.to(dx.dtype.element_ty),)
    width = _whole(width, T.width)
    row, column = i * W.sh, j * W.sw
    out = dx + _far(n, c, row, column, xs, T.x.step, T.last)
    if T.how == "pairs":
        blocks = tl.cdiv(across, T.inner)
        two = tl.program_id(0) % blocks * (2 * T.inner) + tl.arange(0, 2 * T.inner)[None, :]
        real = tl.program_id(0) // blocks * T.outer + tl.arange(0, T.outer)[:, None]
        for a in tl.static_range(W.sh):
            pair = tl.reshape(tl.join(done[2 * a], done[2 * a + 1]), (T.outer, 2 * T.inner))
            inside = (two < width) & (row + a < height) & (real < lines)
            tl.store(out + a * xs[2] + two, pair, mask=inside)
    else:
        out += _near(c, column, xs, T.x.adjacent, T.last)
        for a in tl.static_range(W.sh):
            for b in tl.static_range(W.sw):
                at = out + a * xs[2] + (b if T.x.adjacent and not T.last else b * xs[3])
                inside = live & (row + a < height) & (column + b < width)
                tl.store(at, done[a * W.sw + b], mask=inside)


@triton.jit
def _each(grad, winners, dx, size, strides, W: tl.constexpr, T: tl.constexpr):
    """dx where every element goes through its windows."""
    g_strides, y_strides, x_strides = strides
    WIDE: tl.constexpr = tl.float64 if dx.dtype.element_ty == tl.float64 else tl.float32
    channels, _, _, tall, wide, height, width, lines = size
    n, c, row, column, live = _places(channels, height, width, lines, T)
    total = tl.zeros((T.outer, T.inner), WIDE)
    for di in range(tl.cdiv((W.kh - 1) * W.dh + 1, W.sh)):
        i = (row + W.ph) // W.sh - di
        down = row + W.ph - i * W.sh
        in_row = live & (i >= 0) & (i < tall) & (down % W.dh == 0) & (down < W.kh * W.dh)
        for dj in range(tl.cdiv((W.kw - 1) * W.dw + 1, W.sw)):
            j = (column + W.pw) // W.sw - dj
            along = column + W.pw - j * W.sw
            inside = in_row & (j >= 0) & (j < wide) & (along % W.dw == 0) & (along < W.kw * W.dw)
            from_g = _far(n, c, i, j, g_strides, 1, T.last) + _near(c, j, g_strides, False, T.last)
            from_w = _far(n, c, i, j, y_strides, 1, T.last) + _near(c, j, y_strides, False, T.last)
            v = tl.load(grad + from_g, mask=inside, other=0.0).to(WIDE)
            winner = tl.load(winners + from_w, mask=inside, other=255)
            total += tl.where(winner == down // W.dh * W.kw + along // W.dw, v, 0.0)
    out = _far(n, c, row, column, x_strides, T.x.step, T.last)
    out += _near(c, column, x_strides, T.x.adjacent, T.last)
    tl.store(dx + out, total.to(dx.dtype.element_ty), mask=live)


pool, cells, each = Launchable(_pool), Launchable(_cells), Launchable(_each)


# Lines, elements of each, and warps of a program; and forwards rows of windows for a line.
Tile = namedtuple("Tile", "outer inner warps rows", defaults=(1,))


class Pooling(NamedTuple):
    """An image [N, C, H, W] and the windows over it, ``out`` of them down and along. Strides are
    those of x or of its gradient, ``out_strides`` those of the result."""

    shape: tuple[int, int, int, int]
    strides: Strides
    out: Pair
    out_strides: Strides
    window: Window

    @property
    def is_small(self) -> bool:
        """Whether a window is written out."""
        return self.window.kh * self.window.kw <= UNROLLED

    @property
    def in_pairs(self) -> bool:
        """Whether x can be read or written two elements for a window."""
        return not self.is_last and self.strides[3] == 1 and self.window.sw == 2

    @property
    def is_last(self) -> bool:
        """Whether a tile's lines are channels, which lie side by side."""
        return self.strides[1] == 1 and self.shape[1] > 1

    def tiles(
        self, tile: Tile, positions: Pair, size: int, grad: Strides, how: str, rows: int = 1
    ) -> tuple[Tiles, tuple[int, ...], tuple[int]]:
        """Tiles over ``positions`` of each plane, sizes as the kernels take them, and programs, for
        elements of ``size`` bytes; ``grad``: the strides of the result's gradient. A thread takes
        as many elements of all tensors at once, or they change hands."""
        (n, c, _, width), (down, across), last = self.shape, positions, self.is_last
        along, lines = (c, n * down * across) if last else (across, n * down * c)
        vector = 16 // size
        some = vector // 2 if how == "pairs" else vector if last or self.window.sw == 1 else 1

        def known(strides: Strides, most: int) -> Known:
            n, c, h, w = strides
            inner, outer = (c, (n, h, w)) if last else (w, (n, c, h))
            return Known(inner == 1, gcd(most, *outer))

        multiples = (gcd(16, n) for n in (width, along, self.out[1]))
        tensors = ((self.strides, vector), (self.out_strides, some), (grad, some))
        facts = (known(*tensor) for tensor in tensors)
        tiles = Tiles(tile.outer, tile.inner, last, *multiples, *facts, how, rows)
        programs = -(-lines // tile.outer) * -(-along // tile.inner)
        return tiles, (*self.shape[1:], *self.out, down, across, lines), (programs,)


def forward(p: Pooling, size: int, tile: Tile) -> Callable[..., None]:
    """``run(x, y, winners)`` for elements of ``size`` bytes: see :func:`_pool`."""
    w = p.window
    in_pairs = p.in_pairs and w.dw == 1 and w.kw > 1
    far = not p.is_small or w.dh > 1
    how = "loop" if far else "pairs" if in_pairs else "single"
    rows = tile.rows if w.kh > w.sh and not far else 1  # which share rows of x
    positions = (-(-p.out[0] // rows), p.out[1])
    tiles, sizes, grid = p.tiles(tile, positions, size, p.out_strides, how, rows)
    return pool.over(grid, sizes, p.strides, p.out_strides, warps=tile.warps, W=w, T=tiles)


def backward(
    p: Pooling, grad_strides: Strides, size: int, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """``run(grad, winners, dx)``, with the winners' numbers in the windows."""
    w = p.window
    if p.is_small and w.sh * w.sw <= 16:
        kernel, how = cells, "pairs" if p.in_pairs else "single"
        down, across = -(-p.shape[2] // w.sh), -(-p.shape[3] // w.sw)
    else:
        kernel, how, (down, across) = each, "loop", p.shape[2:]
    tiles, sizes, grid = p.tiles(tile, (down, across), size, grad_strides, how)
    strides = (grad_strides, p.out_strides, p.strides)
    return kernel.over(grid, sizes, strides, warps=tile.warps, W=w, T=tiles)
