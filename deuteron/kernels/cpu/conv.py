"""y[n, o, k] = act(Σ x[n, o·stride − padding + t·dilation, c] · w[k, c, t] + b[k] + r[n, o, k])

for images with channels innermost, computed as the product of :mod:`deuteron.kernels.cpu.matmul`
over a table of pixels: row (n, o) has a run of channels for every tap t. Nothing is copied:

    bytes = size · (x · (taps that meet in L2: once) + y · (1 + residual)) + 4 · w

With few channels a run is too short to multiply well (a 7×7 over 3 channels has runs of 3). Then
x is copied once into a frame of zeros, f[n, y + ph, x + pw, c] = x[n, y, x, c], and the taps of a
row lie side by side, one run of 7 · 3:

    bytes = size · (x + frame)

The gradient for x, and a transposed convolution, spread each pixel over a window of the result:

    y[n, o, c] = Σ x[n, (o + padding − t·dilation) / stride, k] · w[k, c, t]

over the taps t for which the index of x is whole and inside the image. With a stride most taps fail
that, but which of them depends on o mod stride only: rows are sorted by that, and the product skips
the taps that fail. Where windows do not overlap, as in U-Net, every tap is a product of all pixels
by itself.

Large dilations: taps that are in the padding for all rows of a tile are skipped by the product, so
a 3×3 window of dilation 24 over 64×64 pixels costs 56 % of its multiplications, dilation 36 39 %.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import Code, Value, load_run, width
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu.packing import Factor
from deuteron.kernels.cpu.product_rows import Rows, row_offsets
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import steps

Ints = tuple[int, ...]
TURN = 120  # consecutive rows that the same taps reach: a whole number of tiles of most heights


@dataclass(frozen=True)
class Window:
    """A convolution's geometry; every tuple has one entry per spatial dimension."""

    kernel: Ints
    stride: Ints
    padding: Ints  # before the image
    behind: Ints  # padding behind it
    dilation: Ints
    groups: int = 1
    spread: bool = False  # windows lie in the result, not in the input


@dataclass(frozen=True)
class Image:
    """An image tensor [N, C, …]: shape and strides in elements; channels have stride 1."""

    shape: Ints
    strides: Ints

    @property
    def rows(self) -> np.ndarray:
        """Offsets of all pixels."""
        return row_offsets((self.shape[0], *self.shape[2:]), (self.strides[0], *self.strides[2:]))


Images = tuple[Image, Image, Image | None]  # input, result and residual


def frame(x: Image, window: Window) -> tuple[Image, Window]:
    """Return ``x`` with its padding around it, dense, and the window that reads it from there."""
    space = tuple(map(sum, zip(x.shape[2:], window.padding, window.behind, strict=True)))
    channels = x.shape[1]
    strides = [channels * prod(space[i + 1 :]) for i in range(len(space))]
    framed = Image((x.shape[0], channels, *space), (channels * prod(space), 1, *strides))
    none = (0,) * len(space)
    return framed, replace(window, padding=none, behind=none)


def pixel_offsets(x: Image, window: Window, out: Sequence[int], joined: bool) -> np.ndarray:
    """Return offsets [rows, taps] of the pixel under each tap, −1 in the padding. With ``joined``
    all taps along the last dimension count as one."""
    dims = len(out)
    kernel = (*window.kernel[:-1], 1) if joined else window.kernel
    where = (np.arange(x.shape[0], dtype=np.int64) * x.strides[0]).reshape(-1, *[1] * (2 * dims))
    inside = np.ones((1,) * (2 * dims + 1), bool)
    for d in range(dims):
        stride, padding = window.stride[d], window.padding[d]
        tap = np.arange(kernel[d], dtype=np.int64) * window.dilation[d]
        place = np.arange(out[d], dtype=np.int64)[:, None]
        if window.spread:
            at, over = np.divmod(place + padding - tap, stride)
        else:
            at, over = place * stride - padding + tap, 0
        view = [1] * (2 * dims + 1)
        view[1 + d], view[1 + dims + d] = at.shape
        where = where + (at * x.strides[2 + d]).reshape(view)
        inside = inside & ((at >= 0) & (at < x.shape[2 + d]) & (over == 0)).reshape(view)
    return np.where(inside, where, -1).reshape(x.shape[0] * prod(out), prod(kernel))


def side_by_side(x: Sequence[int], y: Sequence[int], window: Window) -> bool:
    """Whether every pixel of a result lies in exactly one window, that of a pixel of x."""
    alone = window.spread and window.groups == 1 and window.kernel == window.stride
    covered = tuple(n * s for n, s in zip(x[2:], window.stride, strict=True)) == tuple(y[2:])
    plain = set(window.dilation) == {1} and not any(window.padding)
    return alone and covered and plain and max(window.stride) > 1


def weight_factor(weight: Image, window: Window, beside: bool = False) -> Factor:
    """Return where a weight lies that arrives with every call; ``beside``: one matrix per tap."""
    if beside:
        k, n = weight.shape[:2]
        taps = row_offsets(weight.shape[2:], weight.strides[2:]).reshape(-1)
        places = np.arange(k, dtype=np.int64) * weight.strides[0]
        return Factor(taps, places, weight.strides[1], n)
    each = weight.shape[0] // window.groups
    starts = np.arange(window.groups, dtype=np.int64) * each * weight.strides[0]
    taps = row_offsets(weight.shape[2:], weight.strides[2:])
    k, n = (each, weight.shape[1]) if window.spread else (weight.shape[1], each)
    along, step = weight.strides[:2] if window.spread else weight.strides[1::-1]
    places = taps + np.arange(k, dtype=np.int64) * along
    return Factor(starts, places.reshape(-1), step, n)


def conv_rows(x: Image, y: Image, r: Image | None, window: Window) -> Rows:
    """Return the rows of a convolution that is computed as a product. If a window without padding
    reads a dense image, its taps along the last dimension are one run."""
    if side_by_side(x.shape, y.shape, window):
        return _each_tap(x, y, r, window)
    groups = window.groups
    dense = x.strides[-1] == x.shape[1] and groups == 1
    inside = window.padding[-1] == window.behind[-1] == 0
    joined = dense and inside and window.dilation[-1] == 1 and not window.spread
    each, columns = x.shape[1] // groups, y.shape[1] // groups
    offsets = pixel_offsets(x, window, y.shape[2:], joined)
    number = np.arange(groups, dtype=np.int64)
    starts = np.stack([number * each, number, number * columns, number * columns], 1)
    length = each * (window.kernel[-1] if joined else 1)
    rows = Rows(offsets, y.rows, None if r is None else r.rows, length, starts)
    return _by_taps(rows, y, window) if window.spread and max(window.stride) > 1 else rows


def _each_tap(x: Image, y: Image, r: Image | None, window: Window) -> Rows:
    """Return the pixels of x as rows of several products: one for each tap of the window."""

    def corners(image: Image) -> np.ndarray:
        """Where the window of each pixel of x begins."""
        steps = [step * s for step, s in zip(image.strides[2:], window.stride, strict=True)]
        return row_offsets((x.shape[0], *x.shape[2:]), (image.strides[0], *steps))

    ends = [row_offsets(window.kernel, i.strides[2:]).reshape(-1) for i in (y, r or y)]
    number = np.arange(prod(window.kernel), dtype=np.int64)
    starts = np.stack([number * 0, number, *ends], 1)
    return Rows(x.rows, corners(y), None if r is None else corners(r), x.shape[1], starts)


def _by_taps(rows: Rows, y: Image, window: Window) -> Rows:
    """Sort the rows so that those reached by the same taps follow each other. Some are reached by
    more taps than others: TURN rows of each kind take turns, so that threads with equal numbers of
    rows have equal work."""
    phase = np.zeros((), np.int64)
    for size, stride in zip((y.shape[0], *y.shape[2:]), (1, *window.stride), strict=True):
        phase = np.add.outer(phase * stride, np.arange(size, dtype=np.int64) % stride)
    phase = phase.reshape(-1)
    order = np.argsort(phase, kind="stable")
    _, counts = np.unique(phase, return_counts=True)
    turn = np.concatenate([np.arange(count) for count in counts]) // TURN
    order = order[np.argsort(turn, kind="stable")]
    r = None if rows.r is None else rows.r[order]
    return replace(rows, a=rows.a[order], c=rows.c[order], r=r)


# ---- the frame ---------------------------------------------------------------------------------


def _frame(short: str, c: Code, words: Value, *thread: Value) -> None:
    x, to = c.pointers(words, 2)
    batch, depth, height, breadth, channels, pd, ph, pw = c.words(words, 2, 8)
    xn, xd, xh, xw, planes, lines, columns = c.words(words, 10, 7)
    of = Stored(c, short)

    def fill(where: Value, count: Value, source: Value | None) -> None:
        """Copy ``count`` numbers, or write zeros."""

        def write(i: Value, lanes: int) -> None:
            value = c.f(0.0, lanes) if source is None else of.load(of.at(source, i), lanes)
            of.store(value, of.at(where, i))

        steps(c, count, write, vectors=1)

    side, inner, across = (c.mul(n, channels) for n in (pw, breadth, columns))
    other = c.sub(across, c.add(side, inner))
    with c.loop(*c.share(c.mul(batch, planes, lines), *thread)) as line:
        plane, framed_y = c.split(line, lines)
        n, framed_z = c.split(plane, planes)
        z, y = c.sub(framed_z, pd), c.sub(framed_y, ph)
        here = of.at(to, c.mul(line, across))

        def copied() -> None:
            source = of.at(x, c.mul(n, xn), c.mul(z, xd), c.mul(y, xh))
            fill(here, side, None)
            with c.when(c.cmp("==", xw, channels)):
                fill(of.at(here, side), inner, source)
            with c.when(c.cmp("!=", xw, channels)), c.loop(0, breadth) as i:
                there = of.at(here, side, c.mul(i, channels))
                fill(there, channels, of.at(source, c.mul(i, xw)))
            fill(of.at(here, side, inner), other, None)

        inside = c.b.and_(c.cmp(">=", y, 0), c.cmp("<", y, height))
        for limit in (c.cmp(">=", z, 0), c.cmp("<", z, depth)):
            inside = c.b.and_(inside, limit)
        c.either(inside, copied, lambda: fill(here, across, None))


def prepare_frame(x: Image, window: Window, short: str) -> tuple[Callable[[Word], Call], Room]:
    """Return a function from the address of an image to the call that copies it into a frame, and
    where the copy is; it is valid until the next one is made."""
    framed, _ = frame(x, window)
    size = dtype(short).nbytes(prod(framed.shape))
    space, padding = (1, 1, *x.shape[2:])[-3:], (0, 0, *window.padding)[-3:]
    strides, across = (0, 0, *x.strides[2:])[-3:], (1, 1, *framed.shape[2:])[-3:]
    sizes = (x.shape[0], *space, x.shape[1], *padding, x.strides[0], *strides, *across)
    to = Room("frame", -(-size // 4))
    code = load_run(f"frame {short} of {width()}", partial(_frame, short))
    return lambda source: Call(code, (source, to, *sizes)), to
