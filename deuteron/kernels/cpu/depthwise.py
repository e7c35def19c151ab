"""y[n, o, c·m + j] = act(Σₜ x[n, o·stride − padding + t·dilation, c] · w[c, j, t] + b[…] + r[…])

Channels are innermost, and vectors run along them; a channel has m filters, mostly one. Images of
one or two dimensions are handled as volumes with a single row or plane. A tile of output pixels of
one row shares the input pixels that it loads: for 3×3, stride 1, 7 pixels and one filter 27 loads
of x serve 63 multiplications. Memory traffic is the least there is:

    bytes = size · (x + y · (1 + residual)) + w, the rows of x shared by windows from L1 or L2

One vector of channels walks along a stretch of a row, so that the filters of a small window stay in
registers. The next vector of channels reads the same cache lines, so a stretch is only as long as
these lines stay in L1: where pixels are a power of two apart, few cache lines can hold them, and a
stretch is a single tile. If rows are short and channels many, one strip of channels is computed for
all rows of the image before the next strip begins, so that its rows stay in L1, too. Tiles that
reach into the padding leave out the rows and columns that are not in the image. The last tile of a
row overlaps the one before, and so does the last vector of channels. If a channel has several
filters, each has a vector of sums; these vectors are interleaved when they are stored.

The gradient for x adds each pixel of dy to a window of the result. All pixels of the result that
have the same place modulo the stride are reached by the same taps: together they are a convolution
of stride 1 with these taps, in reverse order. The gradient of the weight,

    dw[c, j, t] = Σ dy[n, o, c·m + j] · x[n, o·stride − padding + t·dilation, c]

is a sum over all pixels with an accumulator for every tap; x is copied into a frame of zeros first
if there is padding.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from math import gcd, prod
from operator import add

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, Code, Value, lanes_of, load_run, vec, width
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu.conv import Image, Images, Window, frame, prepare_frame
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import SERIAL_FLOPS, zeros
from deuteron.kernels.cpu.product_rows import row_offsets
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, steps

Row = tuple[Value, Value]  # where a row of a window begins, and whether it is in the image
Volume = tuple[int, int, int]  # one number for the planes, one for the rows, one for the columns
PARTS, PIXELS = 16, 64  # a sum over pixels is made in at most PARTS parts of at least PIXELS pixels
HELD = 25  # sums of taps that are held in registers together
UNROLLED = 128  # multiplications written out; above this the rows of the window are a loop
BESIDE = 8  # taps of one row of the window, of all filters, that are held in registers together
KEPT = 18  # up to this many taps, of all filters, stay in registers all along a stretch
ZERO = -(1 << 31)  # the place of a number that is stored nowhere, because it is 0
LINE, SETS, WAYS = 64, 64, 8  # L1: bytes of a line; sets and ways that every machine has at least
BUSY = 0.8  # if rows keep threads busy for less than this part of the time, they split channels too
# NEAR: bytes of L1 kept for input rows that the next output row reads again. FEW: with fewer
# vectors of channels than this, splitting them into strips does not pay.
NEAR, FEW = 1 << 14, 12


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: the window, the output pixels per tile, the channels per
    vector, the filters per channel, and the element type of the images."""

    kernel: Volume
    stride: Volume
    dilation: Volume
    pixels: int
    lanes: int
    filters: int = 1
    stored: str = "f32"

    @property
    def columns(self) -> tuple[int, ...]:
        """The input columns that a tile reads, counted from its first."""
        kw, s, d = self.kernel[2], self.stride[2], self.dilation[2]
        return tuple(sorted({p * s + k * d for p in range(self.pixels) for k in range(kw)}))

    def met(self, column: int, taps: range) -> list[tuple[int, int]]:
        """Return the pixels of a tile whose window covers an input column, each with the one of the
        ``taps`` that meets it there."""
        s, d = self.stride[2], self.dilation[2]
        ends = [divmod(column - p * s, d) for p in range(self.pixels)]
        return [(p, tap) for p, (tap, odd) in enumerate(ends) if not odd and tap in taps]


def _convolve(shape: Shape, epilogue: Epilogue, c: Code, words: Value, *thread: Value) -> None:
    (kd, kh, kw), (sd, sh, sw), (dd, dh, _) = shape.kernel, shape.stride, shape.dilation
    columns, down, lanes, filters = shape.columns, kd * kh, shape.lanes, range(shape.filters)
    numbers = 1 + down * kw  # of a filter and channel: its bias and its taps
    unrolled = down * kw * len(filters) * shape.pixels <= UNROLLED
    keeps = unrolled and down * kw * len(filters) <= KEPT
    x, weights, y, r = c.pointers(words, 4)
    batch, od, oh, ow, depth, height, breadth, channels = c.words(words, 4, 8)
    pd, ph, pw, xn, xd, xh, xw, yn, yd, yh, yw, rn, rd, rh, rw = c.words(words, 12, 15)
    # output pixels of a stretch, vectors of channels of a strip, threads that split the channels
    stretch, strip, wide = c.words(words, 27, 3)
    of = Stored(c, shape.stored)
    vectors, stretches = _parts(c, channels, c.i(lanes)), _parts(c, ow, stretch)
    across = [c.mul(xw, column) for column in columns]
    of_plane, wide = c.mul(oh, stretches), c.least(wide, thread[1])
    member, group = c.split(thread[0], wide)
    tall = c.div(thread[1], wide)
    every = c.b.select(c.cmp("<", member, tall), c.mul(batch, od, of_plane), c.i(0))
    begin, end = c.share(every, member, tall)
    own_from, own_to = c.share(vectors, group, wide)

    @contextmanager
    def lines() -> Iterator[tuple[Value, Value, Value]]:
        """Loop over this thread's stretches of rows, plane by plane and strip by strip: yields the
        first vector of the strip, the plane, and the number of the stretch in the plane."""
        with c.loop(c.div(begin, of_plane), _parts(c, end, of_plane)) as plane:
            start = c.mul(plane, of_plane)
            first = c.most(c.sub(begin, start), 0)
            last = c.least(c.sub(end, start), of_plane)
            with c.loop(own_from, own_to, strip) as vector, c.loop(first, last) as line:
                yield vector, plane, line

    with lines() as (first, plane, line):
        oy, part = c.split(line, stretches)
        n, oz = c.split(plane, od)
        iz, iy = c.sub(c.mul(oz, sd), pd), c.sub(c.mul(oy, sh), ph)
        line_x = of.at(x, c.mul(n, xn), c.mul(iz, xd), c.mul(iy, xh))
        line_y = of.at(y, c.mul(n, yn), c.mul(oz, yd), c.mul(oy, yh))
        line_r = of.at(r, c.mul(n, rn), c.mul(oz, rd), c.mul(oy, rh))

        def row_of(row: Value | int) -> Row:
            kz, ky = divmod(row, kh) if isinstance(row, int) else c.split(row, kh)
            z, y = c.mul(kz, dd), c.mul(ky, dh)
            seen = c.b.icmp_unsigned("<", c.add(iz, z), depth)
            seen = c.b.and_(seen, c.b.icmp_unsigned("<", c.add(iy, y), height))
            return c.add(c.mul(z, xd), c.mul(y, xh)), seen

        rows = [row_of(row) for row in range(down)] if unrolled else []
        (_, seen_first), (_, seen_last) = row_of(0), row_of(down - 1)
        rows_seen = c.b.and_(seen_first, seen_last)
        x_from = c.mul(part, stretch)
        x_to = c.least(c.add(x_from, stretch), ow)
        with c.loop(first, c.least(c.add(first, strip), own_to)) as vector:
            ch = c.least(c.mul(vector, lanes), c.sub(channels, lanes))
            own = c.at(weights, c.mul(vector, len(filters) * numbers * lanes))

            def number(j: int, at: Value | int) -> Value:
                return c.load(c.at(own, c.mul(c.add(at, j * numbers), lanes)), lanes)

            early = product(filters, range(numbers if keeps else 1))
            kept = {(j, at): number(j, at) for j, at in early}
            line_at = of.at(line_x, ch)
            line_to, line_of = (of.at(t, c.mul(ch, len(filters))) for t in (line_y, line_r))
            with c.loop(x_from, x_to, shape.pixels) as next_x:
                ox = c.least(next_x, c.sub(ow, shape.pixels))
                ix = c.sub(c.mul(ox, sw), pw)
                origin = of.at(line_at, c.mul(ix, xw))
                sums = [
                    [c.variable(vec(lanes), kept[j, 0]) for j in filters]
                    for _ in range(shape.pixels)
                ]

                def multiply(together: Sequence[Value | int], taps: range, inside: bool) -> None:
                    """Add the products of ``taps`` in several rows of the window; check which rows
                    and columns are in the image unless all are ``inside``."""
                    places = [rows[row] if unrolled else row_of(row) for row in together]
                    starts = [of.at(origin, offset) for offset, _ in places]
                    w = {}
                    for (i, row), j, tap in product(enumerate(together), filters, taps):
                        at = 1 + row * kw + tap if unrolled else c.add(c.mul(row, kw), 1 + tap)
                        w[i, j, tap] = kept[j, at] if keeps else number(j, at)
                    for column, offset in zip(columns, across, strict=True):
                        met = shape.met(column, taps)
                        seen = c.b.icmp_unsigned("<", c.add(ix, column), breadth)
                        with c.when(seen) if met and not inside else nullcontext():
                            for i, start in enumerate(starts) if met else ():
                                with nullcontext() if inside else c.when(places[i][1]):
                                    pixel = of.load(of.at(start, offset), lanes)
                                    for (p, tap), j in product(met, filters):
                                        now = c.get(sums[p][j], vec(lanes))
                                        c.b.store(c.fma(pixel, w[i, j, tap], now), sums[p][j])

                def window(inside: bool) -> None:
                    if unrolled:  # at a border all rows at once, so that a column is checked once
                        every = range(down)
                        for together in [[row] for row in every] if inside else [every]:
                            multiply(together, range(kw), inside)
                        return
                    few = max(1, BESIDE // len(filters))
                    with c.loop(0, down) as row:
                        for tap in range(0, kw, few):
                            multiply([row], range(tap, min(kw, tap + few)), inside)

                inside = c.b.and_(rows_seen, c.cmp(">=", ix, 0))
                inside = c.b.and_(inside, c.cmp("<", c.add(ix, columns[-1]), breadth))
                c.either(inside, partial(window, True), partial(window, False))
                to, other = of.at(line_to, c.mul(ox, yw)), of.at(line_of, c.mul(ox, rw))
                for p, made in enumerate(sums):
                    woven = _woven(c, [c.get(one, vec(lanes)) for one in made])
                    for i, total in enumerate(woven):
                        r = None
                        if epilogue.residual:
                            r = of.load(of.at(other, c.mul(rw, p), i * lanes), lanes)
                        of.store(epilogue.emit(c, total, r), of.at(to, c.mul(yw, p), i * lanes))


def _parts(c: Code, total: Value, size: Value) -> Value:
    """Return how many parts of a size there are, the last of which may be smaller."""
    return c.div(c.add(total, c.sub(size, 1)), size)


def _woven(c: Code, vectors: list[Value], back: bool = False) -> list[Value]:
    """Interleave the lanes of several vectors: the first of each, the second of each, and so on;
    with ``back`` undo that."""
    many, lanes = len(vectors), lanes_of(vectors[0])
    if 1 in (many, lanes):
        return vectors
    if back:
        every = [c.item(vector, lane) for vector in vectors for lane in range(lanes)]
        pieces = [every[i::many] for i in range(many)]
    else:
        every = [c.item(vector, lane) for lane in range(lanes) for vector in vectors]
        pieces = [every[i * lanes : (i + 1) * lanes] for i in range(many)]
    return [c.joined(lanes, F32, piece.__getitem__) for piece in pieces]


def _weight_grad(
    kernel: Volume, many: int, short: str, c: Code, words: Value, *thread: Value
) -> None:
    """Compute the sums [part, tap, filter, channel], with ``many`` filters per channel. Each part
    covers a fixed share of all rows, whichever thread computes it."""
    dy, x, sums = c.pointers(words, 3)
    parts, lines, od, oh, ow, channels = c.words(words, 3, 6)
    yn, yd, yh, yw, xn, xd, xh, xw, through, down, across = c.words(words, 9, 11)
    of, (kd, kh, kw) = Stored(c, short), kernel
    rows = list(product(range(kd), range(kh)))
    held = [rows] if many * kd * kh * kw <= HELD else [[row] for row in rows]
    with c.loop(*c.share(parts, *thread)) as part:
        numbers = c.mul(channels, many * kd * kh * kw)
        to = c.at(sums, c.mul(part, numbers))
        steps(c, numbers, lambda i, lanes: c.store(c.f(0.0, lanes), c.at(to, i)))
        with c.loop(*c.share(lines, part, parts)) as line:
            plane, oy = c.split(line, oh)
            n, oz = c.split(plane, od)
            grads = of.at(dy, c.mul(n, yn), c.mul(oz, yd), c.mul(oy, yh))
            pixels = of.at(x, c.mul(n, xn), c.mul(oz, xd), c.mul(oy, xh))

            def add(ch: Value, lanes: int) -> None:
                for some in held:
                    taps = [(kz, ky, kx) for kz, ky in some for kx in range(kw)]
                    numbers = [(kz * kh + ky) * kw + kx for kz, ky, kx in taps]
                    order = [number * many + j for number in numbers for j in range(many)]
                    places = [c.at(to, c.mul(channels, number), ch) for number in order]
                    acc = [c.variable(vec(lanes), c.load(at, lanes)) for at in places]
                    with c.loop(0, ow) as ox:
                        at = of.at(grads, c.mul(ox, yw), c.mul(ch, many))
                        loaded = [of.load(of.at(at, j * lanes), lanes) for j in range(many)]
                        each = _woven(c, loaded, back=True)
                        here = of.at(pixels, c.mul(ox, xw), ch)
                        for i, (kz, ky, kx) in enumerate(taps):
                            moved = c.mul(through, kz), c.mul(down, ky), c.mul(across, kx)
                            there = of.load(of.at(here, *moved), lanes)
                            for g, one in zip(each, acc[i * many : (i + 1) * many], strict=True):
                                c.b.store(c.fma(g, there, c.get(one, vec(lanes))), one)
                    for at, one in zip(places, acc, strict=True):
                        c.store(c.get(one, vec(lanes)), at)

            steps(c, channels, add, vectors=1)


def _all_parts(short: str, c: Code, words: Value, *thread: Value) -> None:
    """dw[channel and filter, tap], the sum of all parts."""
    sums, to = c.pointers(words, 2)
    parts, channels, many, taps, step = c.words(words, 2, 5)
    of = Stored(c, short)
    with c.loop(*c.share(c.mul(many, channels), *thread)) as number, c.loop(0, taps) as tap:
        filter_, ch = c.split(number, channels)
        total = c.variable(F32, c.f(0.0))
        with c.loop(0, parts) as part:
            at = c.add(c.mul(c.add(c.mul(part, taps), tap), many, channels), number)
            c.b.store(c.b.fadd(c.get(total, F32), c.load(c.at(sums, at))), total)
        of.store(c.get(total, F32), of.at(to, c.mul(c.add(c.mul(ch, many), filter_), step), tap))


def volume(image: Image) -> Image:
    """An image of one or two dimensions as one of three."""
    (n, ch, *space), (sn, sc, *strides) = image.shape, image.strides
    while len(space) < 3:
        strides = [space[0] * strides[0], *strides]
        space = [1, *space]
    return Image((n, ch, *space), (sn, sc, *strides))


def three(sides: tuple[int, ...], filled: int) -> Volume:
    a, b, c = (filled, filled, *sides)[-3:]
    return a, b, c


def lanes_for(channels: int) -> int:
    return min(width(), 1 << channels.bit_length() - 1)


def filters_of(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    channels: int,
    parts: Sequence[Sequence[int]],
    zero: float = 0,
) -> list[torch.Tensor]:
    """Return a weight [C · m, 1, …], or [C, m, …] of a transposed convolution, in the order that
    the kernel reads, [vectors, m, bias and taps, lanes]: once for each part, with that part's taps.
    The number after that of the last tap stands for a tap of zeros."""
    taps = weight.detach().reshape(channels, -1, prod(weight.shape[2:]))
    none = taps.new_full((*taps.shape[:2], 1), zero)
    start = none if bias is None else bias.detach().reshape(none.shape)
    lanes = lanes_for(channels)
    first = torch.arange(0, channels, lanes).clamp(max=channels - lanes)
    every = torch.cat((start, taps, none), 2)[first[:, None] + torch.arange(lanes)]
    every = every.permute(0, 2, 3, 1)
    return [every[:, :, [0, *(1 + tap for tap in part)]].contiguous() for part in parts]


def _gather(short: str, c: Code, words: Value, *thread: Value) -> None:
    """Copy numbers of a weight by a table of places. A place below 0 is one of the bias, counted
    from −1 downwards, or ZERO."""
    weight, bias, zero, places, to = c.pointers(words, 5)
    (count,) = c.words(words, 5, 1)
    of = Stored(c, short)
    with c.loop(*c.share(count, *thread)) as i:
        at = c.index(places, i)
        other = c.b.select(c.cmp("==", at, ZERO), zero, of.at(bias, c.sub(-1, at)))
        c.store(of.load(c.b.select(c.cmp(">=", at, 0), of.at(weight, at), other)), c.at(to, i))


def filters_at_call(
    weight: Image, bias: int | None, channels: int, parts: Sequence[Sequence[int]], stored: str
) -> tuple[Callable[[Word, Word], Call], list[Room]]:
    """Return the function that makes the call which puts a weight and a bias into the order of
    :func:`filters_of`, and where the filters of each part are then. ``bias``: the stride of the
    bias."""
    numbers = torch.from_numpy(row_offsets(weight.shape, weight.strides)).reshape(weight.shape)
    made = prod(weight.shape[:2])
    start = None if bias is None else -1 - torch.arange(made) * bias
    found = filters_of(numbers, start, channels, parts, ZERO)
    places = torch.cat([part.reshape(-1) for part in found]).to(torch.int32)
    ends = [0, *accumulate(part.numel() for part in found)]
    rooms = [Room("filters", ends[-1], offset=4 * end) for end in ends[:-1]]
    code = load_run(f"depthwise filters {stored}", partial(_gather, stored))
    words = zeros(1), places, rooms[0], ends[-1]
    return lambda w, b: Call(code, (w, b, *words), ends[-1] > SERIAL), rooms


def prepare_depthwise(
    images: Images, window: Window, epilogue: Epilogue, pixels: int, stored: str
) -> Callable[[Word, Word, Word, Word], Call]:
    """Return ``call(x, y, residual, filters)``, which takes their addresses."""
    x, y, r = (volume(image) for image in (*images[:2], images[2] or images[1]))
    sides = window.kernel, window.stride, window.dilation
    kernel, stride, dilation = (three(of, 1) for of in sides)
    channels, breadth = x.shape[1], y.shape[4]
    tile, lanes, filters = min(pixels, breadth), lanes_for(channels), y.shape[1] // channels
    shape = Shape(kernel, stride, dilation, tile, lanes, filters, stored)
    threaded = 2.0 * prod(y.shape) * prod(kernel) > SERIAL_FLOPS
    code = load_run(f"depthwise {shape} {epilogue.key}", partial(_convolve, shape, epilogue))
    strides = [s for i in (x, y, r) for s in (i.strides[0], *i.strides[2:])]
    stretch, strip = _stretch(shape, breadth, x.strides[4] * dtype(stored).nbytes(1))
    rows, vectors = prod(y.shape) // y.shape[1] // breadth, -(-channels // lanes)
    even = -(-vectors // -(-vectors // strip))
    parts = stretch, even, _wide(rows * -(-breadth // stretch), torch.get_num_threads())
    sizes = (*y.shape[2:], *x.shape[2:], channels, *three(window.padding, 0), *strides, *parts)

    def call(t: Word, out: Word, residual: Word, weights: Word) -> Call:
        return Call(code, (t, weights, out, residual, x.shape[0], *sizes), threaded)

    return call


def _stretch(shape: Shape, breadth: int, apart: int) -> tuple[int, int]:
    """Return the output pixels of a stretch and the vectors of channels of a strip, as the module's
    docstring explains, for rows of ``breadth`` pixels whose inputs are ``apart`` bytes apart."""
    (kd, kh, kw), (_, _, s), (_, _, d) = shape.kernel, shape.stride, shape.dilation
    lines = SETS * WAYS // gcd(max(1, apart // LINE), SETS)
    fits = (3 * lines // (4 * kd * kh) - (kw - 1) * d) // s
    stretch = min(max(fits // shape.pixels, 1) * shape.pixels, breadth)
    vector = shape.lanes * dtype(shape.stored).nbytes(1)
    strip = NEAR // (kd * kh * (stretch * s + (kw - 1) * d) * vector)
    return stretch, strip if stretch == breadth and strip >= FEW else 1 << 30


def _wide(lines: int, threads: int) -> int:
    """Return how many threads split the work by channels; the rest split it by rows. We prefer
    rows, because the kernels before and after this one also split by rows, so each thread finds its
    input in its own cache. Channels are split only as far as needed to keep all threads busy."""

    def busy(wide: int) -> float:
        tall = threads // wide
        return lines * wide / (-(-lines // tall) * threads)

    ways = range(1, threads + 1)
    return next((wide for wide in ways if busy(wide) >= BUSY), max(ways, key=busy))


# ---- its gradients -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """The pixels of a result that have one place modulo the stride, as a convolution of stride 1:
    the place of the first, the window, and which taps of the whole window it has, in order."""

    first: tuple[int, ...]
    window: Window
    taps: tuple[int, ...]

    def of(self, image: Image, stride: tuple[int, ...]) -> tuple[Image, int]:
        """Return these pixels of ``image``, and the offset of the first."""
        along = list(zip(image.shape[2:], image.strides[2:], self.first, stride, strict=True))
        shape = (*image.shape[:2], *(-(-(size - at) // s) for size, _, at, s in along))
        strides = (*image.strides[:2], *(step * s for _, step, _, s in along))
        return Image(shape, strides), sum(step * at for _, step, at, _ in along)


def parts_of(window: Window, space: tuple[int, ...]) -> list[Part]:
    """Return the parts of a result of size ``space`` whose pixels receive from windows. Pixels that
    no tap reaches, where the window is smaller than the stride, are a part whose only tap reads
    outside the image; its filter is the one of zeros, whose number follows those of all taps."""
    found = []
    sizes = list(zip(window.kernel, window.stride, window.padding, window.dilation, strict=True))
    for first in product(*(range(min(s, n)) for (_, s, *_), n in zip(sizes, space, strict=True))):
        here = [
            [t for t in reversed(range(k)) if (at + p - t * d) % s == 0]
            for at, (k, s, p, d) in zip(first, sizes, strict=True)
        ]
        if not all(here):
            far, one = tuple(map(add, space, (1,) * len(space))), (1,) * len(first)
            beside = replace(window, kernel=one, stride=one, padding=far, behind=far, spread=False)
            found.append(Part(first, beside, (prod(window.kernel),)))
            continue
        before = tuple(
            -((at + p - taps[0] * d) // s)
            for at, taps, (_, s, p, d) in zip(first, here, sizes, strict=True)
        )
        numbers = row_offsets(window.kernel, _steps(window.kernel)).reshape(window.kernel)
        taps = numbers[np.ix_(*here)].reshape(-1).tolist()
        small = replace(window, kernel=tuple(map(len, here)), stride=(1,) * len(first))
        nearer = tuple(d // gcd(s, d) for _, s, _, d in sizes)
        small = replace(small, padding=before, behind=before, dilation=nearer, spread=False)
        found.append(Part(first, small, tuple(taps)))
    return found


def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(prod(shape[d + 1 :]) for d in range(len(shape)))


def prepare_weight_grad(
    y: Image, x: Image, window: Window, step: int, stored: str
) -> tuple[Callable[[Word, Word, Word], tuple[Call, ...]], int]:
    """Return ``calls(dy, x, dw)``, which takes their addresses, and the floats of scratch memory
    that they need. Filters of dw are ``step`` elements apart."""
    framed, copy, before = x, None, None
    if any(window.padding):
        before, copy = prepare_frame(x, window, stored)
        framed, window = frame(x, window)
    y, framed = volume(y), volume(framed)
    sides = window.kernel, window.stride, window.dilation
    kernel, stride, dilation = (three(of, 1) for of in sides)
    (n, made, *space), channels, taps = y.shape, x.shape[1], prod(kernel)
    many = made // channels
    lines = n * space[0] * space[1]
    parts = min(lines, PARTS, max(1, lines * space[2] // PIXELS))
    sums = Room("sums", parts * taps * made)
    name = f"depthwise weight {kernel} {many} {stored} of {width()}"
    code = load_run(name, partial(_weight_grad, kernel, many, stored))
    total = load_run(f"depthwise weight sum {stored}", partial(_all_parts, stored))
    by_stride, by_tap = (
        [step * s for step, s in zip(framed.strides[2:], of, strict=True)]
        for of in (stride, dilation)
    )
    moves = (framed.strides[0], *by_stride, *by_tap)
    sizes = (parts, lines, *space, channels, y.strides[0], *y.strides[2:], *moves)

    def calls(grad: Word, image: Word, to: Word) -> tuple[Call, ...]:
        source, first = (image, ()) if copy is None else (copy, (before(image),))
        made = Call(code, (grad, source, sums, *sizes), parts > 1)
        return *first, made, Call(total, (sums, to, parts, channels, many, taps, step), False)

    return calls, sums.floats + (0 if copy is None else copy.floats)
