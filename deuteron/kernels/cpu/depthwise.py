"""y[n, o, c] = act(Σₜ x[n, o·stride − padding + t·dilation, c] · w[c, t] + b[c] + r[n, o, c])

with channels innermost: one filter per channel, so vectors run along the channels. A tile of
output pixels of one row shares the input pixels it loads: for 3×3, stride 1 and 4 pixels 18
loads of x and 9 of w serve 36 multiplications. Memory traffic is the least there is:

    bytes = size · (x + y · (1 + residual)) + w, the rows of x shared by windows from L1 or L2

Tiles that reach into the padding find their pixels through a list of addresses, in which a
pixel outside the image is a row of zeros. The last tile of a row overlaps the one before.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import I64, PTR, Code, Value, load_run, vec, width
from deuteron.kernels.cpu.conv import Image, Images, Window
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import SERIAL_FLOPS, zeros
from deuteron.kernels.cpu.stored import Stored

Pixel = Callable[[Value | int, int], Value]  # row and column → address
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
