"""y[n, o, c] = act(Σₜ x[n, o·stride − padding + t·dilation, c] · w[c, t] + b[c] + r[n, o, c])

with channels innermost: one filter per channel, so vectors run along the channels. A tile of
output pixels of one row shares the input pixels it loads: for 3×3, stride 1 and 4 pixels 18
loads of x and 9 of w serve 36 multiplications. Memory traffic is the least there is:

    bytes = size · (x + y · (1 + residual)) + w, the rows of x shared by windows from L1 or L2

Tiles that reach into the padding find their pixels through a list of addresses, in which a
pixel outside the image is a row of zeros. The last tile of a row overlaps the one before.

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

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I64, PTR, Code, Value, load_run, vec, width
from deuteron.kernels.cpu.conv import Image, Images, Window, frame, prepare_frame
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import SERIAL_FLOPS, row_offsets, zeros
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import steps

Pixel = Callable[[Value | int, int], Value]  # row and column → address
PARTS, PIXELS = 16, 64  # most parts of a sum over pixels, and fewest pixels of a part
HELD = 25  # sums of taps that are held in registers together
UNROLLED = 128  # multiplications written out; above this the rows of the window are a loop


@dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for: the window, the output pixels of a tile, and the element
    type of the images."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    dilation: tuple[int, int]
    pixels: int
    stored: str = "f32"

    @property
    def columns(self) -> tuple[int, ...]:
        """Input columns that a tile looks at, from its first."""
        (_, kw), (_, s), (_, d) = self.kernel, self.stride, self.dilation
        return tuple(sorted({p * s + k * d for p in range(self.pixels) for k in range(kw)}))


def _convolve(shape: Shape, epilogue: Epilogue, c: Code, words: Value, *thread: Value) -> None:
    (kh, kw), (sh, sw), (dh, gap) = shape.kernel, shape.stride, shape.dilation
    columns = shape.columns
    x, weight, bias, y, r, empty = c.pointers(words, 6)
    batch, oh, ow, height, breadth, channels, ph, pw = c.words(words, 6, 8)
    xn, xh, xw, yn, yh, yw, rn, rh, rw = c.words(words, 14, 9)
    of = Stored(c, shape.stored)
    table = c.variable(PTR, count=kh * len(columns))
    whole = c.sub(channels, c.rem(channels, width()))
    lines = c.share(c.mul(batch, oh), *thread)

    def windows(acc: list[Value], ch: Value, lanes: int, pixel: Pixel) -> None:
        def row(ky: Value | int) -> None:
            def tap(k: int) -> Value:
                return c.load(c.at(weight, c.mul(c.add(c.mul(ky, kw), k), channels), ch), lanes)

            w = [tap(k) for k in range(kw)]
            for i, column in enumerate(columns):
                x = of.load(of.at(pixel(ky, i), ch), lanes)
                for p in range(shape.pixels):
                    k, odd = divmod(column - p * sw, gap)
                    if not odd and 0 <= k < kw:
                        c.b.store(c.fma(x, w[k], c.get(acc[p], vec(lanes))), acc[p])

        if kh * kw * shape.pixels <= UNROLLED:
            for ky in range(kh):
                row(ky)
        else:
            with c.loop(0, kh) as ky:
                row(ky)

    with c.loop(*lines) as line, c.loop(0, ow, shape.pixels) as x_from:
        n, oy = c.split(line, oh)
        ox = c.least(x_from, c.sub(ow, shape.pixels))
        iy, ix = c.sub(c.mul(oy, sh), ph), c.sub(c.mul(ox, sw), pw)
        image = of.at(x, c.mul(n, xn))
        origin = of.at(image, c.mul(iy, xh), c.mul(ix, xw))
        outs, others = (
            [
                of.at(base, c.mul(n, sn), c.mul(oy, sy), c.mul(c.add(ox, p), sx))
                for p in range(shape.pixels)
            ]
            for base, sn, sy, sx in ((y, yn, yh, yw), (r, rn, rh, rw))
        )
        inside = c.b.and_(c.cmp(">=", iy, 0), c.cmp(">=", ix, 0))
        for first, reach, size in ((iy, (kh - 1) * dh, height), (ix, columns[-1], breadth)):
            inside = c.b.and_(inside, c.cmp("<", c.add(first, reach), size))

        def run(pixel: Pixel) -> None:
            """A tile over all channels; ``pixel(row, column)`` is its address."""
            for lanes, a, b in ((width(), c.i(0), whole), (1, whole, channels)):
                with c.loop(a, b, lanes) as ch:
                    start = c.load(c.at(bias, ch), lanes)
                    acc = [c.variable(vec(lanes), start) for _ in range(shape.pixels)]
                    windows(acc, ch, lanes, pixel)
                    for p, one in enumerate(acc):
                        r = of.load(of.at(others[p], ch), lanes) if epilogue.residual else None
                        made = epilogue.emit(c, c.get(one, vec(lanes)), r)
                        of.store(made, of.at(outs[p], ch))

        def middle() -> None:
            run(lambda ky, i: of.at(origin, c.mul(ky, dh, xh), c.mul(xw, columns[i])))

        def border() -> None:
            with c.loop(0, kh) as ky:
                row = c.add(iy, c.mul(ky, dh))
                row_in = c.b.and_(c.cmp(">=", row, 0), c.cmp("<", row, height))
                for i, column in enumerate(columns):
                    at = c.add(ix, column)
                    here = c.b.and_(c.cmp(">=", at, 0), c.cmp("<", at, breadth))
                    address = of.at(image, c.mul(row, xh), c.mul(at, xw))
                    chosen = c.b.select(c.b.and_(row_in, here), address, empty)
                    c.store(chosen, c.at(table, c.mul(ky, len(columns)), i, of=I64))
            run(lambda ky, i: c.pointer(table, c.add(c.mul(ky, len(columns)), i)))

        c.either(inside, middle, border)


def _weight_grad(
    kernel: tuple[int, int], short: str, c: Code, words: Value, *thread: Value
) -> None:
    """Sums [part, tap, channel] of so many parts of all lines, whichever thread makes them."""
    dy, x, sums = c.pointers(words, 3)
    parts, lines, oh, ow, channels = c.words(words, 3, 5)
    yn, yh, yw, xn, xh, xw, down, across = c.words(words, 8, 8)
    of, (kh, kw) = Stored(c, short), kernel
    rows = [range(kh)] if kh * kw <= HELD else [range(ky, ky + 1) for ky in range(kh)]
    with c.loop(*c.share(parts, *thread)) as part:
        to = c.at(sums, c.mul(part, channels, kh * kw))
        steps(c, c.mul(channels, kh * kw), lambda i, lanes: c.store(c.f(0.0, lanes), c.at(to, i)))
        with c.loop(*c.share(lines, part, parts)) as line:
            n, oy = c.split(line, oh)
            grads, pixels = of.at(dy, c.mul(n, yn), c.mul(oy, yh)), of.at(x, c.mul(n, xn))
            pixels = of.at(pixels, c.mul(oy, xh))

            def add(ch: Value, lanes: int) -> None:
                for some in rows:
                    taps = [(ky, kx) for ky in some for kx in range(kw)]
                    places = [c.at(to, c.mul(channels, ky * kw + kx), ch) for ky, kx in taps]
                    acc = [c.variable(vec(lanes), c.load(at, lanes)) for at in places]
                    with c.loop(0, ow) as ox:
                        g = of.load(of.at(grads, c.mul(ox, yw), ch), lanes)
                        here = of.at(pixels, c.mul(ox, xw), ch)
                        for (ky, kx), one in zip(taps, acc, strict=True):
                            there = of.at(here, c.mul(down, ky), c.mul(across, kx))
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


def _plane(image: Image) -> Image:
    """A one-dimensional image as one of a single row."""
    if len(image.shape) == 4:
        return image
    (n, ch, w), (sn, sc, sw) = image.shape, image.strides
    return Image((n, ch, 1, w), (sn, sc, w * sw, sw))


def taps_of(weight: torch.Tensor) -> torch.Tensor:
    """A weight [C, 1, …] as the kernel reads it: float32 [taps, C]."""
    return weight.detach().reshape(weight.shape[0], -1).t().to(torch.float32).contiguous()


def bias_of(bias: torch.Tensor) -> torch.Tensor:
    return bias.detach().to(torch.float32).contiguous()


def prepare_depthwise(
    images: Images, window: Window, epilogue: Epilogue, pixels: int, stored: str
) -> Callable[[Word, Word, Word, Word, Word], Call]:
    """The call for x, y, residual, taps and bias, where each is; taps and bias are float32."""
    x, y, r = images
    sides = window.kernel, window.stride, window.dilation
    kernel, stride, dilation = ((1, *of)[-2:] for of in sides)
    padding = (0, *window.padding)[-2:]
    x, y, r = _plane(x), _plane(y), _plane(y if r is None else r)
    shape = Shape(kernel, stride, dilation, min(pixels, y.shape[3]), stored)
    channels = x.shape[1]
    empty = zeros(max(channels, 64))
    flops = 2.0 * y.shape[0] * y.shape[2] * y.shape[3] * channels * kernel[0] * kernel[1]
    name, threaded = f"depthwise {shape} of {width()} {epilogue.key}", flops > SERIAL_FLOPS
    code = load_run(name, partial(_convolve, shape, epilogue))
    strides = [s for i in (x, y, r) for s in (i.strides[0], i.strides[2], i.strides[3])]
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


def covers(window: Window) -> bool:
    """Whether every pixel is reached by some tap of a window that is spread over the result."""
    each = zip(window.kernel, window.stride, window.dilation, strict=True)
    return all(s == 1 or (k >= s and gcd(s, d) == 1) for k, s, d in each)


def parts_of(window: Window, space: tuple[int, ...]) -> list[Part]:
    """The parts of a result of that size over which a window is spread."""
    found = []
    sizes = list(zip(window.kernel, window.stride, window.padding, window.dilation, strict=True))
    for first in product(*(range(min(s, n)) for (_, s, *_), n in zip(sizes, space, strict=True))):
        here = [
            [t for t in reversed(range(k)) if (at + p - t * d) % s == 0]
            for at, (k, s, p, d) in zip(first, sizes, strict=True)
        ]
        before = tuple(
            -((at + p - taps[0] * d) // s)
            for at, taps, (_, s, p, d) in zip(first, here, sizes, strict=True)
        )
        numbers = row_offsets(window.kernel, _steps(window.kernel)).reshape(window.kernel)
        taps = numbers[np.ix_(*here)].reshape(-1).tolist()
        small = replace(window, kernel=tuple(map(len, here)), stride=(1,) * len(first))
        small = replace(small, padding=before, behind=before, spread=False)
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
    y, framed = _plane(y), _plane(framed)
    kernel, stride, dilation = (
        (1, *of)[-2:] for of in (window.kernel, window.stride, window.dilation)
    )
    (n, channels, oh, ow), taps = y.shape, kernel[0] * kernel[1]
    parts = min(n * oh, PARTS, max(1, n * oh * ow // PIXELS))
    sums = Room("sums", parts * taps * channels)
    name = f"depthwise weight {kernel} {stored} of {width()}"
    code = load_run(name, partial(_weight_grad, kernel, stored))
    total = load_run(f"depthwise weight sum {stored}", partial(_all_parts, stored))
    xn, _, xh, xw = framed.strides
    moves = (xn, xh * stride[0], xw * stride[1], xh * dilation[0], xw * dilation[1])
    sizes = (parts, n * oh, oh, ow, channels, y.strides[0], *y.strides[2:], *moves)

    def calls(grad: Word, image: Word, to: Word) -> tuple[Call, ...]:
        source, first = (image, ()) if copy is None else (copy, (before(image),))
        made = Call(code, (grad, source, sums, *sizes), parts > 1)
        return *first, made, Call(total, (sums, to, parts, channels, taps, step), False)

    return calls, sums.floats + (0 if copy is None else copy.floats)
