"""y[n, o, c] = act(Σₜ Σₖ x[n, o·stride − padding + t·dilation, G·⌊c/G⌋ + k] · w[c, k, t] + b + r)

with channels innermost, where a channel of the result reads the G channels of its own group. A
group is no wider than a vector, so all that a vector of results reads of a pixel is one vector of
x. As rows of a product such sums are too short: finding where each begins takes half as long as
adding it up.

So they are computed as depthwise convolutions are: a tile is some output pixels of one row, and a
number of x that is once in a register serves all taps that read it. For 3×3, stride 1 and 14 pixels
16 loads of x and 3 of the weight serve 42 multiplications. If a group fills a vector, a number of x
is loaded into all lanes; with narrower groups each lane gets the k-th number of its own group. How
far pixels are apart is a constant of the code, so only the address of a row is computed; padding is
read from a buffer of zeros. A vector of channels goes down a block of rows whose input stays in L2,
and its weight stays in L1:

    bytes = size · (x + y · (1 + residual)) + 4 · w · blocks
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import Code, Value, load_run, vec
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu.conv import Images, Window
from deuteron.kernels.cpu.depthwise import Shape, lanes_for, three, volume
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import FOLD, L2_BYTES, SERIAL_FLOPS, prefetch, zeros
from deuteron.kernels.cpu.stored import Stored

FAIR = 4  # blocks of rows for each thread, at least


@dataclass(frozen=True)
class Grouped:
    """What a kernel is compiled for: the shape as of a depthwise kernel, the channels per group,
    the columns of padding before and behind, and how far apart the input pixels of a row are."""

    shape: Shape
    group: int
    before: int
    behind: int
    pitch: int


def _convolve(form: Grouped, epilogue: Epilogue, c: Code, words: Value, *thread: Value) -> None:
    shape, group = form.shape, form.group
    (kd, kh, kw), (sd, sh, sw), (dd, dh, _) = shape.kernel, shape.stride, shape.dilation
    columns, lanes, pixels = shape.columns, shape.lanes, range(shape.pixels)
    each = group * kw * lanes  # numbers of the weight for a row of the window
    folds = kd * kh * kw * group > FOLD
    x, weights, y, r, none = c.pointers(words, 5)
    batch, od, oh, ow, depth, height, breadth, channels = c.words(words, 5, 8)
    pd, ph, pw, xn, xd, xh, yn, yd, yh, yw, rn, rd, rh, rw, block = c.words(words, 13, 15)
    of = Stored(c, shape.stored)
    sizes = (channels, c.i(lanes)), (oh, block), (ow, c.i(shape.pixels))
    vectors, blocks, tiles = (c.div(c.add(n, by, -1), by) for n, by in sizes)

    def seen(first: Value, step: int, taps: int, size: Value) -> tuple[Value, Value]:
        """Return the range of taps, ``step`` apart from ``first`` on, that are inside the image."""
        begin = c.div(c.sub(step - 1, first), step)
        return c.most(begin, 0), c.least(c.div(c.add(c.sub(size, first), step - 1), step), taps)

    with c.loop(*c.share(c.mul(batch, od, blocks, vectors, tiles), *thread)) as strip:
        rest, tile = c.split(strip, tiles)
        rest, vector = c.split(rest, vectors)
        plane, part = c.split(rest, blocks)
        n, oz = c.split(plane, od)
        ox = c.least(c.mul(tile, shape.pixels), c.sub(ow, shape.pixels))
        iz, ix = c.sub(c.mul(oz, sd), pd), c.sub(c.mul(ox, sw), pw)
        ch = c.least(c.mul(vector, lanes), c.sub(channels, lanes))
        strip_x = of.at(x, c.mul(n, xn), c.mul(iz, xd), c.mul(ix, form.pitch), ch)
        strip_y = of.at(y, c.mul(n, yn), c.mul(oz, yd), c.mul(ox, yw), ch)
        strip_r = of.at(r, c.mul(n, rn), c.mul(oz, rd), c.mul(ox, rw), ch)
        bias = c.at(weights, c.mul(vector, kd * kh * each + lanes))
        own = c.at(bias, lanes)
        planes = seen(iz, dd, kd, depth)
        top = c.mul(part, block)
        with c.loop(top, c.least(c.add(top, block), oh)) as oy:
            iy = c.sub(c.mul(oy, sh), ph)
            rows = seen(iy, dh, kh, height)
            origin = of.at(strip_x, c.mul(iy, xh))
            for new in range(1, sh + 1):  # prefetch rows that only the next output row needs
                row = of.at(origin, c.mul(xh, (kh - 1) * dh + new))
                for column in columns:
                    prefetch(c, of.at(row, column * form.pitch))
            zero = c.f(0.0, lanes)
            sums = [c.variable(vec(lanes), zero) for _ in pixels]
            parts = [c.variable(vec(lanes), zero) for _ in pixels if folds]

            def multiply(row: Value, filters: Value) -> None:
                """Add the products of one row of the window, over all channels of a group."""
                places = {}
                for column in columns:
                    here = of.at(row, column * form.pitch)
                    if column < form.before or column > columns[-1] - form.behind:
                        inside = c.b.icmp_unsigned("<", c.add(ix, column), breadth)
                        here = c.b.select(inside, here, none)
                    places[column] = here

                def add(k: Value | int) -> None:
                    of_k = c.at(filters, c.mul(k, kw * lanes))
                    w = [c.load(c.at(of_k, tap * lanes), lanes) for tap in range(kw)]
                    for column, place in places.items():
                        pixel = _of_each_group(of, form, place, k)
                        for p, tap in shape.met(column, range(kw)):
                            now = c.get(sums[p], vec(lanes))
                            c.b.store(c.fma(pixel, w[tap], now), sums[p])

                if 2 * group < lanes:
                    for k in range(group):
                        add(k)
                    return
                with c.loop(0, group) as k:
                    add(k)

            with c.loop(*planes) as kz, c.loop(*rows) as ky:
                row = of.at(origin, c.mul(kz, dd, xd), c.mul(ky, dh, xh))
                multiply(row, c.at(own, c.mul(c.add(c.mul(kz, kh), ky), each)))
                for one, total in zip(sums, parts, strict=False):
                    both = c.b.fadd(c.get(one, vec(lanes)), c.get(total, vec(lanes)))
                    c.b.store(both, total)
                    c.b.store(zero, one)
            to, other = of.at(strip_y, c.mul(oy, yh)), of.at(strip_r, c.mul(oy, rh))
            start = c.load(bias, lanes)
            for p, one in enumerate(parts or sums):
                total = c.b.fadd(c.get(one, vec(lanes)), start)
                res = of.load(of.at(other, c.mul(rw, p)), lanes) if epilogue.residual else None
                of.store(epilogue.emit(c, total, res), of.at(to, c.mul(yw, p)))


def _of_each_group(of: Stored, form: Grouped, place: Value, k: Value | int) -> Value:
    """Return in each lane the ``k``-th number of its group, of the vector of channels at
    ``place``."""
    c, lanes, group = of.c, form.shape.lanes, form.group
    if isinstance(k, int):
        pixel = of.load(place, lanes)
        return c.shuffle(pixel, pixel, [lane // group * group + k for lane in range(lanes)])
    low = c.splat(of.load(of.at(place, k)), lanes)
    if group == lanes:
        return low
    high = c.splat(of.load(of.at(place, k, group)), lanes)
    upper = ir.Constant(vec(lanes, ir.I1), [int(lane >= group) for lane in range(lanes)])
    return c.b.select(upper, high, low)


def order_of(weight: tuple[int, ...]) -> list[int]:
    """The taps of a filter of a weight [filters, group, …kernel] as the kernel reads them: by row
    of the window, then by channel of the group, then along the row."""
    _, group, *_, across = weight
    number = np.arange(prod(weight[1:])).reshape(group, -1, across)
    return list(number.transpose(1, 0, 2).reshape(-1).tolist())


def prepare_grouped(
    images: Images, window: Window, epilogue: Epilogue, pixels: int, stored: str, threads: int
) -> Callable[[Word, Word, Word, Word], Call]:
    """Return ``call(x, y, residual, filters)``, which takes their addresses."""
    x, y, r = (volume(image) for image in (*images[:2], images[2] or images[1]))
    sides = window.kernel, window.stride, window.dilation
    kernel, stride, dilation = (three(of, 1) for of in sides)
    channels, group = x.shape[1], x.shape[1] // window.groups
    tile, lanes = min(pixels, y.shape[4]), lanes_for(channels)
    shape = Shape(kernel, stride, dilation, tile, lanes, 1, stored)
    form = Grouped(shape, group, window.padding[-1], window.behind[-1], x.strides[4])
    code = load_run(f"{form} {epilogue.key}", partial(_convolve, form, epilogue))
    threaded = 2.0 * prod(y.shape) * group * prod(kernel) > SERIAL_FLOPS
    strides = [s for i in (x, y, r) for s in (i.strides[0], *i.strides[2:])]
    del strides[3]
    line = channels * x.shape[4] * stride[1] * dtype(stored).nbytes(1)
    strips = y.shape[0] * y.shape[2] * -(-channels // lanes) * -(-y.shape[4] // tile)
    fair = y.shape[3] * strips // (FAIR * threads) if threads > 1 else y.shape[3]
    block = max(1, min(L2_BYTES // line, fair, y.shape[3]))
    sizes = (*y.shape[2:], *x.shape[2:], channels, *three(window.padding, 0), *strides, block)

    def call(t: Word, out: Word, residual: Word, weights: Word) -> Call:
        words = (t, weights, out, residual, zeros(64), x.shape[0], *sizes)
        return Call(code, words, threaded)

    return call
