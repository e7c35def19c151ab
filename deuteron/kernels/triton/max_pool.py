"""The largest element of each window, which one of the window it was, and the gradient.

    y[n, c, i, j] = max over (t, u) of x[n, c, i·s − p + t·d, j·s − p + u·d]
    dx[n, c, h, w] = Σ over the windows that (h, w) wins of their gradients

Ties go to the first element, nan to the last, as in torch. Of a winner only its number in the
window, t · k + u, is kept, in a byte: an eighth of an index, and the gradient needs nothing else.

    bytes there = size · (x + y) + y for the winners;  back = size · (dx + grad) + y for the winners

A tile is [outer, inner]: rows of an image and positions along them, or, where channels are
adjacent, positions and their channels. Few of a window's elements come from memory, the others were
read for its neighbours and are in the cache: what costs is the number of instructions. So windows
are unrolled, at stride two along a row elements are read and written in pairs, and a program has
several rows of windows, which share rows of x: the largest along each of these is found only once.

For the gradient a program takes cells of s × s elements, s being the stride of the windows: the
elements at one place of their cells are the same elements of the same windows, so a winner is
compared with a constant, and a gradient is read once for a whole cell. Where windows or cells are
too large for that, an element looks its windows up one by one. Nothing is added by atomics, so two
runs agree to the last bit.

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
UNROLLED = 32  # the most elements of a window that are unrolled; for more there is a loop


# The size, step, padding and dilation of a window, down and along.
Window = namedtuple("Window", "kh kw sh sw ph pw dh dw")


# What is known of a tensor's lines (rows, or channels): adjacent: elements lie side by side; step:
# the stride from line to line is a multiple of it.
Known = namedtuple("Known", "adjacent step")

# outer, inner: a program's lines, and elements of each; last: a line's elements are channels;
# width, line, windows: numbers up to 16 that divide x's width, the length of a line, and the
# windows along a row; x, y, grad: what is known of these; how, rows: see _pool; _cells writes pairs
# if how says so.
Tiles = namedtuple("Tiles", "outer inner last width line windows x y grad how rows")


@triton.constexpr_function
def _number(place, window, stride, padding, dilation, kernel):
    """Return which element of a window is at ``place`` in a cell, or -1; the window lies ``window``
    cells on from the cell."""
    along = place + padding - window * stride
    inside = along >= 0 and along % dilation == 0 and along // dilation < kernel
    return along // dilation if inside else -1


@triton.constexpr_function
def _first(kernel, stride, padding, dilation):
    """Return the first window that holds elements of a cell, relative to the cell."""
    return -(((kernel - 1) * dilation - padding) // stride)


@triton.constexpr_function
def _end(stride, padding):
    """Return one past the last window that holds elements of a cell."""
    return (stride - 1 + padding) // stride + 1


@triton.jit
def _places(channels, down, across, lines, T: tl.constexpr):
    """Return image, channel, row and column of a tile; lines beyond the last repeat the last."""
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
    """Return where the lines of a tile begin, known to the compiler as multiples of STEP."""
    sn, sc, sh, sw = strides
    if LAST:
        far = n.to(tl.int64) * sn + i.to(tl.int64) * sh + j.to(tl.int64) * sw
    else:
        far = n.to(tl.int64) * sn + c.to(tl.int64) * sc + i.to(tl.int64) * sh
    return tl.multiple_of(far, (STEP, STEP))


@triton.jit
def _near(c, j, strides, ADJACENT: tl.constexpr, LAST: tl.constexpr):
    """Return the offsets of elements within their line."""
    if LAST:
        return c if ADJACENT else c.to(tl.int64) * strides[1]
    else:
        return j if ADJACENT else j.to(tl.int64) * strides[3]


@triton.jit
def _whole(width, STEP: tl.constexpr):
    """Return a size so that the compiler knows it to be a multiple of STEP: then masks hold for
    whole vectors."""
    return width // STEP * STEP


@triton.jit
def _steps(strides, STEP: tl.constexpr, LAST: tl.constexpr):
    """Return the strides, those of rows and columns in 64 bits, as steps over several rows may need
    that; strides from line to line are known to the compiler as multiples of STEP."""
    sn, sc, sh, sw = strides
    sh, sw = sh.to(tl.int64), sw.to(tl.int64)
    return sn, sc, _whole(sh, STEP), _whole(sw, STEP) if LAST else sw


@triton.jit
def _take(best, number, v, of_v, KEEP: tl.constexpr):
    """Return the largest elements, and their numbers, after one more element of every window."""
    if KEEP:
        wins = (v > best) | (v != v)
        return tl.where(wins, v, best), tl.where(wins, of_v, number)
    else:
        return tl.maximum(best, v, propagate_nan=tl.PropagateNan.ALL), number


@triton.jit
def _read(at, inside, WIDE: tl.constexpr, KEEP: tl.constexpr):
    """Load an element of every window; −∞, which never wins, outside of x. With KEEP bfloat16 is
    widened by bit operations: a compiler that sees the conversion selects in 16 bits, which takes
    longer. Where only the largest value is wanted, 16 bits are quicker."""
    v = tl.load(at, mask=inside, other=float("-inf"))
    if KEEP and v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(WIDE)


@triton.jit
def _pairs_of_a_row(
    line, two, first, ahead, width, W: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr
):
    """Return the largest along one row of every window, and its number in the row; ``first`` is the
    first one inside. Windows are two apart, and their elements are read in pairs ``two``."""
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
    """The same, but elements, ``step`` apart in memory, are loaded one after the other."""
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
    """Store the largest element of every window, and where it was."""
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
    """Fill y, unless it is None, and ``winners`` with their numbers in the windows, or, if it has
    64 bits, with their places in the planes. ``how``: elements are read one by one ("single"), in
    pairs for windows two apart ("pairs"), or in a loop, if they are many or far apart ("loop"). A
    program has T.rows rows of windows for each of its lines: it finds the largest along a row of x
    once for all windows that share the row."""
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
    """Fill dx in cells of as many elements as the stride of the windows."""
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
                        # the compiler merges equal loads: no more than one for a window
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
    """Fill dx; every element goes through the windows that hold it."""
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


# Lines, elements of each, and warps of a program; rows: of windows for each line, only forwards.
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
        """Whether a window is unrolled."""
        return self.window.kh * self.window.kw <= UNROLLED

    @property
    def in_pairs(self) -> bool:
        """Whether x can be read or written in pairs, one for each window of stride 2."""
        return not self.is_last and self.strides[3] == 1 and self.window.sw == 2

    @property
    def is_last(self) -> bool:
        """Whether a tile's lines are channels, which lie side by side."""
        return self.strides[1] == 1 and self.shape[1] > 1

    def tiles(
        self, tile: Tile, positions: Pair, size: int, grad: Strides, how: str, rows: int = 1
    ) -> tuple[Tiles, tuple[int, ...], tuple[int]]:
        """Return tiles over ``positions`` of each plane, sizes as the kernels take them, and the
        grid, for elements of ``size`` bytes; ``grad``: the strides of the result's gradient. A
        thread takes the same number of elements of all tensors at once, or they would have to move
        between threads."""
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
    """Return ``run(x, y, winners)`` for elements of ``size`` bytes: see :func:`_pool`."""
    w = p.window
    in_pairs = p.in_pairs and w.dw == 1 and w.kw > 1
    far = not p.is_small or w.dh > 1
    how = "loop" if far else "pairs" if in_pairs else "single"
    rows = tile.rows if w.kh > w.sh and not far else 1  # several only if they share rows of x
    positions = (-(-p.out[0] // rows), p.out[1])
    tiles, sizes, grid = p.tiles(tile, positions, size, p.out_strides, how, rows)
    return pool.over(grid, sizes, p.strides, p.out_strides, warps=tile.warps, W=w, T=tiles)


def backward(
    p: Pooling, grad_strides: Strides, size: int, tile: Tile
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return ``run(grad, winners, dx)``; winners are numbers in the windows."""
    w = p.window
    if p.is_small and w.sh * w.sw <= 16:
        kernel, how = cells, "pairs" if p.in_pairs else "single"
        down, across = -(-p.shape[2] // w.sh), -(-p.shape[3] // w.sw)
    else:
        kernel, how, (down, across) = each, "loop", p.shape[2:]
    tiles, sizes, grid = p.tiles(tile, (down, across), size, grad_strides, how)
    strides = (grad_strides, p.out_strides, p.strides)
    return kernel.over(grid, sizes, strides, warps=tile.warps, W=w, T=tiles)
