"""y[n, o, k] = requantise(act(scale[k] · (Σ x[n, o·stride − padding + t·dilation, c] · w[k, c, t]
− zero · Σ w[k]) + bias[k])) of bytes, with channels innermost.

Four products of bytes at a time are added up in int32 by one instruction
(:mod:`deuteron.codegen.dots`). Rows are found through the table of pixels of
:mod:`deuteron.kernels.cpu.conv`, and a pixel in the padding is a run of ``zero``. A tile of pixels
by channels stays in registers over all taps; what follows the sum is done there as well, so that
bytes go in and bytes come out:

    bytes ≈ x · ⌈N / columns⌉ (from L1 or L2) + K·N + size of y · M·N

Bytes that the instruction cannot multiply as they are, runs whose length is no multiple of 4 and
short runs are read from a copy in a frame of padding, where the taps of a row of the window are one
run.

With one filter for each channel vectors run along the channels, and products of 16 bits are added
up in int32. Where uint8 is turned into int8, or int8 into uint8, ``zero`` is moved with it. Weights
are packed as [group][panel][run][⌈length / 4⌉][columns][4], zeros beyond the last channel and
behind each run.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.calls import Call, Word
from deuteron.codegen.dots import HIGHEST, TOGETHER, Dots
from deuteron.codegen.llvm import F32, I8, I32, PTR, Code, Value, constant, lanes_of, load_run, vec
from deuteron.kernels.cpu.conv import Image, Window, conv_rows, frame, pixel_offsets
from deuteron.kernels.cpu.int8_matmul import SERIAL, Lines, Sums, load, prepare_copy
from deuteron.kernels.cpu.matmul import Tile, in_tiles

AT_ONCE = (32, 16, 4, 1)  # depthwise channels in one step: the largest that they fill
FEW_CHANNELS = 32  # with fewer, taps are so short that a copy pays in which a row of them is a run
RANGES = {"u8": (0.0, 255.0), "i8": (-128.0, 127.0)}
LIMITS = {"none": (None, None), "relu": (0.0, None), "relu6": (0.0, 6.0)}


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: the type of x and of the result, and what follows the sum."""

    x: str
    out: str
    bias: bool
    act: str


class Prepared(NamedTuple):
    """``calls(x, panels, starts, scales, bias, y)`` takes their addresses: starts are what sums
    begin with. ``length``: of the runs that panels are made for."""

    calls: Callable[[Word, Word, Word, Word, Word, Word], list[Call]]
    length: int


def is_depthwise(weight: torch.Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[:2] == (groups, 1)


def moved(dots: Dots, form: Form, weight: torch.Tensor, groups: int) -> int:
    """Return what is added to x before it is multiplied."""
    if is_depthwise(weight, groups):
        return -128 if form.x == "u8" else 0
    return dots.moved(form.x, "i8") or 0


def panels_of(weight: torch.Tensor, groups: int, length: int, columns: int) -> torch.Tensor:
    """Return a weight [K, C / groups, …] as panels of ``columns`` columns, whose runs of taps and
    channels are ``length`` long; one filter for each channel as [taps, K]."""
    k, each = weight.shape[0] // groups, weight[0].numel()
    if is_depthwise(weight, groups):
        return weight.flatten(1).t().contiguous()
    rows = weight.movedim(1, -1).reshape(groups, k, each // length, length)
    full = torch.nn.functional.pad(rows, (0, -length % TOGETHER, 0, 0, 0, -k % columns))
    steps = full.shape[-1] // TOGETHER
    parts = full.view(groups, -1, columns, each // length, steps, TOGETHER)
    return parts.permute(0, 1, 3, 4, 2, 5).contiguous()


def starts_of(weight: torch.Tensor, groups: int, zero: int, columns: int) -> torch.Tensor:
    """Return what sums begin with: −zero · Σ w, in panels."""
    sums = weight.long().flatten(1).sum(1).view(groups, -1)
    wide = 1 if is_depthwise(weight, groups) else columns
    filled = torch.nn.functional.pad(sums * -zero, (0, -sums.shape[1] % wide))
    return filled.to(torch.int32).contiguous()


def numbers_of(
    numbers: torch.Tensor, weight: torch.Tensor, groups: int, columns: int
) -> torch.Tensor:
    """One float for each output channel, in panels."""
    each = numbers.detach().float().view(groups, -1)
    wide = 1 if is_depthwise(weight, groups) else columns
    return torch.nn.functional.pad(each, (0, -each.shape[1] % wide)).contiguous()


@dataclass(frozen=True)
class Epilogue:
    """What follows sums, and the words that it reads: scales, bias, step and zero of the result."""

    form: Form
    scale: Value
    bias: Value
    step: Value  # the bits of 1 / out_scale as a float32
    zero: Value

    @property
    def size(self) -> int:
        return 4 if self.form.out == "f32" else 1

    def emit(self, c: Code, value: Value, at: Value) -> Value:
        """The channels from ``at`` on, as they are stored."""
        form, lanes = self.form, lanes_of(value)
        f = c.b.sitofp(value, vec(lanes))
        f = c.b.fmul(f, c.load(c.at(self.scale, at), lanes))
        if form.bias:
            f = c.b.fadd(f, c.load(c.at(self.bias, at), lanes))
        low, high = LIMITS[form.act]
        f = f if low is None else c.fmax(f, c.f(low, lanes))
        f = f if high is None else c.fmin(f, c.f(high, lanes))
        if form.out == "f32":
            return f
        by = c.b.bitcast(c.b.trunc(self.step, I32), F32)
        q = c.intrinsic("roundeven", c.b.fmul(f, c.splat(by, lanes)))
        q = c.b.fadd(q, c.splat(c.b.sitofp(self.zero, F32), lanes))
        least, most = (c.f(x, lanes) for x in RANGES[form.out])
        whole = c.b.fptosi(c.fmin(c.fmax(q, least), most), vec(lanes, I32))
        return c.b.trunc(whole, vec(lanes, I8))


def _multiply(dots: Dots, form: Form, c: Code, words: Value, *thread: Value) -> None:
    x, table, w, y, outs, start, scale, bias, padding, firsts = c.pointers(words, 10)
    segments, steps, tiles, columns, groups, step, zero = c.words(words, 10, 7)
    sums = Sums(c, dots)
    after = Epilogue(form, scale, bias, step, zero)
    size, each = after.size, range(dots.rows)
    room = c.variable(I32, count=dots.columns)
    panels = c.div(c.add(columns, dots.columns - 1), dots.columns)
    with c.loop(*c.share(c.mul(groups, panels, tiles), *thread)) as job:
        panel, tile = c.split(job, tiles)
        group, inside = c.split(panel, panels)
        column, channel = c.mul(inside, dots.columns), c.mul(panel, dots.columns)
        from_x = c.at(x, c.word(firsts, c.mul(group, 4)), of=I8)
        packed = c.mul(panel, segments, steps, TOGETHER * dots.columns)
        here = c.variable(PTR, c.at(w, packed, of=I8))
        sums.begin(c.at(start, channel, of=I32))
        with c.loop(0, segments) as s:
            row = c.mul(c.add(c.mul(tile, segments), s), dots.rows)
            at = [c.index(table, c.add(row, i)) for i in each]
            runs = [c.b.select(c.cmp("<", a, 0), padding, c.at(from_x, a, of=I8)) for a in at]
            sums.add_all(here, runs, steps)
        to_group = c.at(y, c.mul(c.word(firsts, c.add(c.mul(group, 4), 2)), size), of=I8)
        for i in each:
            place = c.index(outs, c.add(c.mul(tile, dots.rows), i))
            to = c.at(to_group, c.mul(c.add(place, column), size), of=I8)
            done = [
                after.emit(c, total, c.add(channel, j * dots.lanes))
                for j, total in enumerate(sums.row(i))
            ]

            def stored(to: Value = to, done: list[Value] = done) -> None:
                for j, value in enumerate(done):
                    c.b.store(value, c.at(to, j * dots.lanes * size, of=I8), align=size)

            def some(to: Value = to, done: list[Value] = done) -> None:
                for j, value in enumerate(done):
                    c.b.store(value, c.at(room, j * dots.lanes * size, of=I8), align=size)
                with c.loop(0, c.mul(c.sub(columns, column), size)) as n:
                    c.store(load(c, c.at(room, n, of=I8), I8), c.at(to, n, of=I8))

            with c.when(c.cmp(">=", place, 0)):
                c.either(c.cmp("<=", c.add(column, dots.columns), columns), stored, some)


def _depthwise(_: Dots, form: Form, c: Code, words: Value, *thread: Value) -> None:
    """One filter for each channel: vectors run along the channels, pixel by pixel."""
    x, table, w, y, outs, start, scale, bias, padding, _ = c.pointers(words, 10)
    taps, _, rows, channels, _, step, zero = c.words(words, 10, 7)
    after = Epilogue(form, scale, bias, step, zero)

    def each(row: Value, lanes: int) -> None:
        """Compute all channels of a pixel; the last vector may overlap the one before."""
        to = c.at(y, c.mul(c.index(outs, row), after.size), of=I8)
        short, sums = vec(lanes, ir.I16), vec(lanes, I32)
        total = c.variable(sums)
        with c.loop(0, channels, lanes) as begin:
            ch = c.least(begin, c.sub(channels, lanes))
            c.b.store(c.load(c.at(start, ch, of=I32), lanes, I32), total)
            with c.loop(0, taps) as tap:
                at = c.index(table, c.add(c.mul(row, taps), tap))
                run = c.b.select(c.cmp("<", at, 0), padding, c.at(x, at, ch, of=I8))
                pixel = c.load(run, lanes, I8)
                if form.x == "u8":
                    pixel = c.b.xor(pixel, constant(I8, HIGHEST[I8], pixel))
                weight = c.load(c.at(w, c.mul(tap, channels), ch, of=I8), lanes, I8)
                made = c.b.mul(c.b.sext(pixel, short), c.b.sext(weight, short))
                c.b.store(c.b.add(c.get(total, sums), c.b.sext(made, sums)), total)
            done = after.emit(c, c.get(total, sums), ch)
            c.b.store(done, c.at(to, c.mul(ch, after.size), of=I8), align=after.size)

    def some(row: Value, left: int) -> None:
        wide, *narrower = AT_ONCE[len(AT_ONCE) - left :]
        if not narrower:
            each(row, wide)
            return
        enough = c.cmp(">=", channels, wide)
        c.either(enough, lambda: each(row, wide), lambda: some(row, left - 1))

    with c.loop(*c.share(rows, *thread)) as row:
        some(row, len(AT_ONCE))


def copied(x: Image, window: Window) -> tuple[Lines, Image, Window]:
    """Return how an image is copied into a frame of padding, and the image and window
    afterwards."""
    framed, inside = frame(x, window)
    space, channels = framed.shape[2:], x.shape[1]
    ones = (1,) * len(space)
    every = replace(window, kernel=ones, stride=ones, dilation=ones)
    pixels = pixel_offsets(x, every, space, joined=False).reshape(-1, space[-1])
    if x.strides[-1] != channels:  # gaps between pixels
        return Lines(pixels.reshape(-1), channels, channels), framed, inside
    before = window.padding[-1]
    lines = Lines(
        pixels[:, before], x.shape[-1] * channels, space[-1] * channels, before * channels
    )
    return lines, framed, inside


def prepare(
    dots: Dots, form: Form, x: Image, y: Image, window: Window, zero: int, out: tuple[float, int]
) -> Prepared:
    """Prepare the calls for images x and y. ``zero`` is what stands for 0 in x; ``out`` has the
    step of the result, and what stands for 0 in it."""
    groups, each, columns = window.groups, x.shape[1] // window.groups, y.shape[1] // window.groups
    alone = groups > 1 and each == columns == 1
    more = 0 if alone else dots.moved(form.x, "i8") or 0
    short = each % TOGETHER > 0 or (each < FEW_CHANNELS and window.kernel[-1] > 1 == groups)
    lines = None
    if not alone and (more or short):
        lines, x, window = copied(x, window)
    rows = conv_rows(x, y, None, window)
    tile = Tile(1 if alone else dots.rows, dots.vectors)
    table, outs = in_tiles(rows.a, tile), in_tiles(rows.c, tile)
    firsts = torch.from_numpy(np.ascontiguousarray(rows.groups, np.int64))
    filled = torch.full((max(rows.length, AT_ONCE[0]) + TOGETHER,), zero + more)
    padding = filled.to(torch.uint8)
    step = int((np.float32(1.0) / np.float32(out[0])).view(np.int32))
    make = _depthwise if alone else _multiply
    code = load_run(f"quantized{make.__name__} {dots} {form}", partial(make, dots, form))
    segments, steps = rows.a.shape[1], -(-rows.length // TOGETHER)
    sizes = (segments, steps, len(outs), groups if alone else columns, groups, step, out[1])
    threaded = 2.0 * len(rows.a) * segments * rows.length * columns * groups > SERIAL
    copy = None if lines is None else prepare_copy(lines, bool(more), int(padding[0]))

    def calls(x: Word, panels: Word, start: Word, scale: Word, bias: Word, y: Word) -> list[Call]:
        first, given = ([], x) if copy is None else ([copy[0](x)], copy[1])
        words = (given, table, panels, y, outs, start, scale, bias, padding, firsts, *sizes)
        return [*first, Call(code, words, threaded)]

    return Prepared(calls, rows.length)
