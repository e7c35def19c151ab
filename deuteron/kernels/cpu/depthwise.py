"""y[n, o, c] = act(Σₜ x[n, o·stride − padding + t·dilation, c] · w[c, t] + b[c] + r[n, o, c])

with channels innermost: one filter per channel, so vectors run along the channels. Lines and images
are volumes of one row or plane. A tile of output pixels of one row shares the input pixels that it
loads: for 3×3, stride 1 and 4 pixels 18 loads of x and 9 of w serve 36 multiplications. Memory
traffic is the least there is:

    bytes = size · (x + y · (1 + residual)) + w, the rows of x shared by windows from L1 or L2

Tiles that reach into the padding find their pixels through a list of addresses, in which a
pixel outside the image is a row of zeros. The last tile of a row overlaps the one before, and so
does the last vector of channels.

The gradient for x spreads each pixel over a window of the result. Pixels of the result that have
the same place modulo the stride are reached by the same taps, and are a convolution of stride 1
with these, in reverse order. The gradient of the weight,

    dw[c, t] = Σ dy[n, o, c] · x[n, o·stride − padding + t·dilation, c]

is a sum over all pixels with an accumulator for every tap; x has its padding around it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import gcd, prod
from operator import add

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I64, PTR, Code, Value, load_run, vec, width
from deuteron.kernels.cpu.conv import Image, Images, Window, frame, prepare_frame
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import SERIAL_FLOPS, zeros
from deuteron.kernels.cpu.product_rows import row_offsets
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import steps

Pixel = Callable[[Value | int, int, Value], Value]  # row of the window, column, channel → address
Volume = tuple[int, int, int]  # down through the planes, down a plane, and across
PARTS, PIXELS = 16, 64  # most parts of a sum over pixels, and fewest pixels of a part
HELD = 25  # sums of taps that are held in registers together
UNROLLED = 128  # multiplications written out; above this the rows of the window are a loop
BESIDE = 8  # taps of a row whose filters are held in registers together


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: the window, the output pixels of a tile, the channels of a
    vector, and the element type of the images."""

    kernel: Volume
    stride: Volume
    dilation: Volume
    pixels: int
    lanes: int
    stored: str = "f32"

    @property
    def columns(self) -> tuple[int, ...]:
        """Input columns that a tile looks at, from its first."""
        kw, s, d = self.kernel[2], self.stride[2], self.dilation[2]
        return tuple(sorted({p * s + k * d for p in range(self.pixels) for k in range(kw)}))


def _convolve(shape: Shape, epilogue: Epilogue, c: Code, words: Value, *thread: Value) -> None:
    (kd, kh, kw), (sd, sh, sw), (dd, dh, gap) = shape.kernel, shape.stride, shape.dilation
    columns, down = shape.columns, kd * kh
    unrolled = down * kw * shape.pixels <= UNROLLED
    x, weight, bias, y, r, empty = c.pointers(words, 6)
    batch, od, oh, ow, depth, height, breadth, channels = c.words(words, 6, 8)
    pd, ph, pw, xn, xd, xh, xw, yn, yd, yh, yw, rn, rd, rh, rw = c.words(words, 14, 15)
    of = Stored(c, shape.stored)
    table = c.variable(PTR, count=down * len(columns))
    lanes, lines = shape.lanes, c.share(c.mul(batch, od, oh), *thread)

    def windows(acc: list[Value], ch: Value, pixel: Pixel) -> None:
        def some(row: Value | int, beside: range) -> None:
            """Taps of one row of the window."""

            at, w = c.at(weight, c.mul(channels, c.add(c.mul(row, kw), beside[0])), ch), {}
            for k in beside:
                w[k] = c.load(at, lanes)
                at = c.at(at, channels)
            for i, column in enumerate(columns):
                ends = [divmod(column - p * sw, gap) for p in range(shape.pixels)]
                met = [(p, k) for p, (k, odd) in enumerate(ends) if not odd and k in w]
                if met:
                    x = of.load(pixel(row, i, ch), lanes)
                for p, k in met:
                    c.b.store(c.fma(x, w[k], c.get(acc[p], vec(lanes))), acc[p])

        def all_of(row: Value | int) -> None:
            for first in range(0, kw, BESIDE):
                some(row, range(first, min(kw, first + BESIDE)))

        if unrolled:
            for row in range(down):
                all_of(row)
        else:
            with c.loop(0, down) as row:
                all_of(row)

    with c.loop(*lines) as line, c.loop(0, ow, shape.pixels) as x_from:
        plane, oy = c.split(line, oh)
        n, oz = c.split(plane, od)
        ox = c.least(x_from, c.sub(ow, shape.pixels))
        iz, iy = c.sub(c.mul(oz, sd), pd), c.sub(c.mul(oy, sh), ph)
        ix = c.sub(c.mul(ox, sw), pw)
        image = of.at(x, c.mul(n, xn))
        origin = of.at(image, c.mul(iz, xd), c.mul(iy, xh), c.mul(ix, xw))
        outs, others = (
            [
                of.at(base, c.mul(n, sn), c.mul(oz, sz), c.mul(oy, sy), c.mul(c.add(ox, p), sx))
                for p in range(shape.pixels)
            ]
            for base, sn, sz, sy, sx in ((y, yn, yd, yh, yw), (r, rn, rd, rh, rw))
        )
        inside = c.cmp(">=", ix, 0)
        ends = (iz, (kd - 1) * dd, depth), (iy, (kh - 1) * dh, height), (ix, columns[-1], breadth)
        for first, reach, size in ends:
            inside = c.b.and_(inside, c.cmp(">=", first, 0))
            inside = c.b.and_(inside, c.cmp("<", c.add(first, reach), size))

        def run(pixel: Pixel) -> None:
            """A tile over all channels; ``pixel(row, column, channel)`` is an address."""
            with c.loop(0, channels, lanes) as first:
                ch = c.least(first, c.sub(channels, lanes))
                start = c.load(c.at(bias, ch), lanes)
                acc = [c.variable(vec(lanes), start) for _ in range(shape.pixels)]
                windows(acc, ch, pixel)
                for p, one in enumerate(acc):
                    r = of.load(of.at(others[p], ch), lanes) if epilogue.residual else None
                    made = epilogue.emit(c, c.get(one, vec(lanes)), r)
                    of.store(made, of.at(outs[p], ch))

        def inside_all() -> None:
            """Addresses are sums of two that are known before the loop over channels."""
            across = [c.mul(xw, column) for column in columns]
            rows = [start_of(row) for row in range(down)] if unrolled else []

            def pixel(row: Value | int, i: int, ch: Value) -> Value:
                start = rows[row] if isinstance(row, int) else start_of(row)
                return of.at(start, across[i], ch)

            run(pixel)

        def start_of(row: Value | int) -> Value:
            kz, ky = divmod(row, kh) if isinstance(row, int) else c.split(row, kh)
            return of.at(origin, c.mul(kz, dd, xd), c.mul(ky, dh, xh))

        def border() -> None:
            with c.loop(0, down) as row:
                kz, ky = c.split(row, kh)
                at_z, at_y = c.add(iz, c.mul(kz, dd)), c.add(iy, c.mul(ky, dh))
                row_in = c.b.and_(c.cmp(">=", at_z, 0), c.cmp("<", at_z, depth))
                for limit in (c.cmp(">=", at_y, 0), c.cmp("<", at_y, height)):
                    row_in = c.b.and_(row_in, limit)
                for i, column in enumerate(columns):
                    at = c.add(ix, column)
                    here = c.b.and_(c.cmp(">=", at, 0), c.cmp("<", at, breadth))
                    address = of.at(image, c.mul(at_z, xd), c.mul(at_y, xh), c.mul(at, xw))
                    chosen = c.b.select(c.b.and_(row_in, here), address, empty)
                    c.store(chosen, c.at(table, c.mul(row, len(columns)), i, of=I64))

            def pixel(row: Value | int, i: int, ch: Value) -> Value:
                return of.at(c.pointer(table, c.add(c.mul(row, len(columns)), i)), ch)

            run(pixel)

        c.either(inside, inside_all, border)


def _weight_grad(kernel: Volume, short: str, c: Code, words: Value, *thread: Value) -> None:
    """Sums [part, tap, channel] of so many parts of all lines, whichever thread makes them."""
    dy, x, sums = c.pointers(words, 3)
    parts, lines, od, oh, ow, channels = c.words(words, 3, 6)
    yn, yd, yh, yw, xn, xd, xh, xw, through, down, across = c.words(words, 9, 11)
    of, (kd, kh, kw) = Stored(c, short), kernel
    rows = list(product(range(kd), range(kh)))
    held = [rows] if kd * kh * kw <= HELD else [[row] for row in rows]
    taps_in_all = kd * kh * kw
    with c.loop(*c.share(parts, *thread)) as part:
        to = c.at(sums, c.mul(part, channels, taps_in_all))
        many = c.mul(channels, taps_in_all)
        steps(c, many, lambda i, lanes: c.store(c.f(0.0, lanes), c.at(to, i)))
        with c.loop(*c.share(lines, part, parts)) as line:
            plane, oy = c.split(line, oh)
            n, oz = c.split(plane, od)
            grads = of.at(dy, c.mul(n, yn), c.mul(oz, yd), c.mul(oy, yh))
            pixels = of.at(x, c.mul(n, xn), c.mul(oz, xd), c.mul(oy, xh))

            def add(ch: Value, lanes: int) -> None:
                for some in held:
                    taps = [(kz, ky, kx) for kz, ky in some for kx in range(kw)]
                    numbers = [(kz * kh + ky) * kw + kx for kz, ky, kx in taps]
                    places = [c.at(to, c.mul(channels, number), ch) for number in numbers]
                    acc = [c.variable(vec(lanes), c.load(at, lanes)) for at in places]
                    with c.loop(0, ow) as ox:
                        g = of.load(of.at(grads, c.mul(ox, yw), ch), lanes)
                        here = of.at(pixels, c.mul(ox, xw), ch)
                        for (kz, ky, kx), one in zip(taps, acc, strict=True):
                            moved = c.mul(through, kz), c.mul(down, ky), c.mul(across, kx)
                            there = of.at(here, *moved)
                            made = c.fma(g, of.load(there, lanes), c.get(one, vec(lanes)))
                            c.b.store(made, one)
                    for at, one in zip(places, acc, strict=True):
                        c.store(c.get(one, vec(lanes)), at)

            steps(c, channels, add, vectors=1)


def _all_parts(short: str, c: Code, words: Value, *thread: Value) -> None:
    """dw[channel, tap], the sum of all parts."""
    sums, to = c.pointers(words, 2)
    parts, channels, taps, step = c.words(words, 2, 4)
    of = Stored(c, short)
    with c.loop(*c.share(channels, *thread)) as ch, c.loop(0, taps) as tap:
        total = c.variable(F32, c.f(0.0))
        with c.loop(0, parts) as part:
            at = c.add(c.mul(c.add(c.mul(part, taps), tap), channels), ch)
            c.b.store(c.b.fadd(c.get(total, F32), c.load(c.at(sums, at))), total)
        of.store(c.get(total, F32), of.at(to, c.mul(ch, step), tap))


def _volume(image: Image) -> Image:
    """An image of one or two dimensions as one of three."""
    (n, ch, *space), (sn, sc, *strides) = image.shape, image.strides
    while len(space) < 3:
        strides = [space[0] * strides[0], *strides]
        space = [1, *space]
    return Image((n, ch, *space), (sn, sc, *strides))


def _three(sides: tuple[int, ...], filled: int) -> Volume:
    a, b, c = (filled, filled, *sides)[-3:]
    return a, b, c


def taps_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight [C, 1, …] as the kernel reads it: float32 [taps + 1, C], the last of zeros."""
    taps = weight.detach().reshape(weight.shape[0], -1).t().to(torch.float32)
    return torch.cat((taps, taps.new_zeros(1, taps.shape[1])))


def bias_of(bias: torch.Tensor) -> torch.Tensor:
    return bias.detach().to(torch.float32).contiguous()


def prepare_depthwise(
    images: Images, window: Window, epilogue: Epilogue, pixels: int, stored: str
) -> Callable[[Word, Word, Word, Word, Word], Call]:
    """The call for x, y, residual, taps and bias, where each is; taps and bias are float32."""
    x, y, r = images
    sides = window.kernel, window.stride, window.dilation
    kernel, stride, dilation = (_three(of, 1) for of in sides)
    x, y, r = _volume(x), _volume(y), _volume(y if r is None else r)
    channels = x.shape[1]
    tile = min(pixels, y.shape[4])
    lanes = min(width(), 1 << channels.bit_length() - 1)
    shape = Shape(kernel, stride, dilation, tile, lanes, stored)
    empty = zeros(max(channels, 64))
    flops = 2.0 * prod(y.shape) * prod(kernel)
    name, threaded = f"depthwise {shape} {epilogue.key}", flops > SERIAL_FLOPS
    code = load_run(name, partial(_convolve, shape, epilogue))
    strides = [s for i in (x, y, r) for s in (i.strides[0], *i.strides[2:])]
    padding = _three(window.padding, 0)
    sizes = (x.shape[0], *y.shape[2:], *x.shape[2:], channels, *padding, *strides)

    def call(t: Word, out: Word, residual: Word, taps: Word, bias: Word) -> Call:
        return Call(code, (t, taps, bias, out, residual, empty, *sizes), threaded)

    return call


# ---- its gradients -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Every so-manieth pixel of a result, as a convolution of stride 1: where the first of them is,
    the window, and which taps of the whole window it has, in order."""

    first: tuple[int, ...]
    window: Window
    taps: tuple[int, ...]

    def of(self, image: Image, stride: tuple[int, ...]) -> tuple[Image, int]:
        """These pixels of ``image``, and the offset of the first."""
        along = list(zip(image.shape[2:], image.strides[2:], self.first, stride, strict=True))
        shape = (*image.shape[:2], *(-(-(size - at) // s) for size, _, at, s in along))
        strides = (*image.strides[:2], *(step * s for _, step, _, s in along))
        return Image(shape, strides), sum(step * at for _, step, at, _ in along)


def parts_of(window: Window, space: tuple[int, ...]) -> list[Part]:
    """The parts of a result of that size over which a window is spread. Pixels that no tap reaches,
    where the window is smaller than the stride, are a part whose only tap looks beside the image;
    it has a filter of zeros, the number after those of all taps."""
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
    """The calls for dy, x and dw, whose channels are ``step`` apart, and the floats they need."""
    framed, copy, before = x, None, None
    if any(window.padding):
        before, copy = prepare_frame(x, window, stored)
        framed, window = frame(x, window)
    y, framed = _volume(y), _volume(framed)
    sides = window.kernel, window.stride, window.dilation
    kernel, stride, dilation = (_three(of, 1) for of in sides)
    (n, channels, *space), taps = y.shape, prod(kernel)
    lines = n * space[0] * space[1]
    parts = min(lines, PARTS, max(1, lines * space[2] // PIXELS))
    sums = Room("sums", parts * taps * channels)
    name = f"depthwise weight {kernel} {stored} of {width()}"
    code = load_run(name, partial(_weight_grad, kernel, stored))
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
        return *first, made, Call(total, (sums, to, parts, channels, taps, step), False)

    return calls, sums.floats + (0 if copy is None else copy.floats)
