"""Pools of equal windows, plane by plane: sums with weights, means, and the largest.

    y[n, c, o] = Σ w[c, t] · x[n, c, o·stride − padding + t]
    dx[n, c, i] = Σ w[c, t] · g[n, c, (i + padding − t) / stride], over t that divide
    dw[c, t] = Σ g[n, c, o] · x[n, c, o·stride − padding + t]

    bytes = size · (x + y) and size · (x + g + dx): frames stay in the cache

For images whose rows are adjacent in memory. A thread copies a plane into a frame of zeros, in
float32, its columns sorted by what is left of them after division by the stride: then what the t-th
elements of neighbouring windows are is adjacent, whatever the stride. The frame of g for dx has
zeros around it, too. Sums of dw go on in float64 after a few rows.

The mean and the largest of windows are the same walk with another step: there is no weight, and for
the largest the frame is one of −inf.

Generated code has no windows, and a depthwise convolution needs channels innermost: without these
kernels torch pools. On two cores (bench/results/cpu_operators-cpu-aarch64.md, float32) a max pool
takes 0.66 ms instead of 5.7, a mean 0.52 instead of 2.1 (with its gradient 1.6 instead of 4.3) and
weighted pooling 0.64 instead of 6.5 (2.0 instead of 17).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, Code, Loaded, Value, entry, load, vec, width
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, steps

FOLD = 512  # results of a row or some rows that a sum of dw takes in float32
VECTORS = 4  # of results that are made at a time, so that few wait for each other

Pair = tuple[int, int]


@dataclass(frozen=True)
class Windows:
    """What a kernel is compiled for; ``makes``: "y", or of "dx" and "dw" what is wanted. ``kind``:
    "weighted", "mean", whose sums are divided by ``divisor``, or "max"."""

    kernel: Pair
    stride: Pair
    padding: Pair
    makes: frozenset[str]
    stored: str
    kind: str = "weighted"
    divisor: float = 1.0

    @property
    def elements(self) -> list[Pair]:
        return [(ky, kx) for ky in range(self.kernel[0]) for kx in range(self.kernel[1])]

    @property
    def margin(self) -> Pair:
        """Zeros above and to the left of the frame of g."""
        return (self.kernel[0] - 1) // self.stride[0], (self.kernel[1] - 1) // self.stride[1]


@dataclass(frozen=True)
class Frames:
    """Rows and columns of the frame of x, for each rest of the columns by the stride, of the frame
    of g, and the floats of a line of dx with its padding."""

    x: Pair
    g: Pair
    line: int

    @staticmethod
    def of(windows: Windows, space: Pair, result: Pair) -> Frames:
        (h, w), (ph, pw), step = space, windows.padding, windows.stride[1]
        x = h + 2 * ph, -(-(w + 2 * pw) // step)
        if windows.makes == {"y"}:
            return Frames(x, (0, 0), 0)
        # one past the last row and column of g that dx could look at
        sides = zip(space, windows.padding, windows.stride, result, strict=True)
        down, across = (max((n - 1 + p) // s + 1, m) for n, p, s, m in sides)
        above, before = windows.margin
        spare = VECTORS * width()
        g = down + above, across + before + spare
        return Frames(x if "dw" in windows.makes else (0, x[1]), g, step * (across + spare))


class _Plane:
    """One kernel, a plane at a time."""

    def __init__(self, c: Code, windows: Windows, words: Value, thread: Value) -> None:
        self.c, self.windows, self.of = c, windows, Stored(c, windows.stored)
        self.x, self.w, self.g, self.to, self.dw, room = (c.pointer(words, i) for i in range(6))
        numbers = iter([c.word(words, 6 + i) for i in range(18)])
        self.batch, self.channels, self.height, self.breadth, self.down, self.across = (
            next(numbers) for _ in range(6)
        )
        self.w_step, self.columns, self.g_columns, x_floats, g_floats, each = (
            next(numbers) for _ in range(6)
        )
        self.x_steps, self.g_steps = ([next(numbers) for _ in range(3)] for _ in range(2))
        self.frame = c.at(room, c.mul(thread, each))
        self.frame_of_g = c.at(self.frame, x_floats)
        self.line = c.at(self.frame_of_g, g_floats)
        around = float("-inf") if windows.kind == "max" else 0.0
        floats = c.add(x_floats, g_floats)
        steps(c, floats, lambda i, n: c.store(c.f(around, n), c.at(self.frame, i)))

    def weights(self, channel: Value) -> list[Value]:
        """One for each element; where there are none, numbers that nobody looks at."""
        c, of, count = self.c, self.of, len(self.windows.elements)
        if self.windows.kind != "weighted":
            return [c.f(1.0)] * count
        here = c.mul(channel, self.w_step)
        return [of.load(of.at(self.w, here, t)) for t in range(count)]

    # ---- one step

    def start(self, lanes: int) -> Value:
        return self.c.f(float("-inf") if self.windows.kind == "max" else 0.0, lanes)

    def step(self, total: Value, value: Value, weight: Value) -> Value:
        c, kind = self.c, self.windows.kind
        if kind == "weighted":
            return c.fma(value, weight, total)
        return c.fmax(total, value) if kind == "max" else c.b.fadd(total, value)

    def result(self, total: Value, lanes: int) -> Value:
        if self.windows.divisor == 1.0:
            return total
        return self.c.b.fdiv(total, self.c.f(self.windows.divisor, lanes))

    # ---- frames

    def fill_frame(self, n: Value, channel: Value) -> None:
        """A plane of x, the columns that have the same rest by the stride side by side."""
        c, of, (ph, pw), by = self.c, self.of, self.windows.padding, self.windows.stride[1]
        sn, sc, sh = self.x_steps
        plane = of.at(self.x, c.mul(n, sn), c.mul(channel, sc))
        with c.loop(0, self.height) as row:
            source = of.at(plane, c.mul(row, sh))
            line = c.at(self.frame, c.mul(c.add(row, ph), self.columns, by))
            for rest in range(by):
                first = (rest - pw) % by
                to = c.at(line, c.mul(self.columns, rest), (first + pw) // by)
                count = c.div(c.sub(c.add(self.breadth, by - 1), first), by)
                self.pick(of.at(source, first), to, count, by)

    def pick(self, source: Value, to: Value, count: Value, by: int) -> None:
        """Every ``by``-th number; vectors as long as all of what they skip is there, too."""
        c, of = self.c, self.of
        safe = count if by == 1 else c.most(c.sub(count, 1), 0)
        whole = c.sub(safe, c.rem(safe, width()))
        for lanes, begin, end in ((width(), c.i(0), whole), (1, whole, count)):
            with c.loop(begin, end, lanes) as i:
                wide = of.load(of.at(source, c.mul(i, by)), lanes * by if lanes > 1 else 1)
                if lanes > 1 and by > 1:
                    wide = c.shuffle(wide, wide, range(0, lanes * by, by))
                c.store(wide, c.at(to, i))

    def fill_frame_of_g(self, n: Value, channel: Value) -> None:
        c, of, (sn, sc, sh), margin = self.c, self.of, self.g_steps, self.windows.margin
        plane = of.at(self.g, c.mul(n, sn), c.mul(channel, sc))
        with c.loop(0, self.down) as row:
            source = of.at(plane, c.mul(row, sh))
            line = c.at(self.frame_of_g, c.mul(c.add(row, margin[0]), self.g_columns), margin[1])
            self.pick(source, line, self.across, 1)

    def seen(self, row: Value, column: Value, element: Pair, lanes: int) -> Value:
        """What an element of the window is for results from a place on."""
        c, (ky, kx), (sh, sw) = self.c, element, self.windows.stride
        line = c.mul(c.add(c.mul(c.add(c.mul(row, sh), ky), sw), kx % sw), self.columns)
        return c.load(c.at(self.frame, line, column, kx // sw), lanes)

    # ---- results

    def forward(self, n: Value, channel: Value) -> None:
        c, of = self.c, self.of
        self.fill_frame(n, channel)
        one = self.weights(channel)
        wide = [c.splat(w, width()) for w in one]
        plane = c.mul(c.add(c.mul(n, self.channels), channel), self.down, self.across)
        with c.loop(0, self.down) as row:
            line = of.at(self.to, plane, c.mul(row, self.across))
            for column, vectors, lanes in _results(c, self.across):
                weights = wide if lanes > 1 else one
                for k in range(vectors):
                    total, here = self.start(lanes), c.add(column, k * lanes)
                    for element, w in zip(self.windows.elements, weights, strict=True):
                        total = self.step(total, self.seen(row, here, element, lanes), w)
                    of.store(self.result(total, lanes), of.at(line, here))

    def backward(self, channel: Value) -> None:
        c, makes, count = self.c, self.windows.makes, len(self.windows.elements)
        weights = [c.splat(w, width()) for w in self.weights(channel)] if "dx" in makes else []
        totals = [c.variable(F64) for _ in range(count)]
        for total in totals:
            c.b.store(F64(0.0), total)
        with c.loop(0, self.batch) as n:
            self.fill_frame_of_g(n, channel)
            if "dw" in makes:
                self.fill_frame(n, channel)
                self.add_to(totals)
            if "dx" in makes:
                self.spread(n, channel, weights)
        if "dw" in makes:
            for t, total in enumerate(totals):
                value = c.b.fptrunc(c.get(total, F64), F32)
                self.of.store(value, self.of.at(self.dw, c.mul(channel, count), t))

    def add_to(self, totals: Sequence[Value]) -> None:
        """This plane's part of dw."""
        c, elements, margin = self.c, self.windows.elements, self.windows.margin
        rooms = {n: [c.variable(vec(n)) for _ in elements] for n in (width(), 1)}
        few = c.most(c.div(c.i(FOLD), self.across), 1)
        with c.loop(0, self.down, few) as block:
            for lanes, some in rooms.items():
                for room in some:
                    c.b.store(c.f(0.0, lanes), room)
            with c.loop(block, c.least(c.add(block, few), self.down)) as row:
                line = c.mul(c.add(row, margin[0]), self.g_columns)
                whole = c.sub(self.across, c.rem(self.across, width()))
                for lanes, begin, end in ((width(), c.i(0), whole), (1, whole, self.across)):
                    with c.loop(begin, end, lanes) as column:
                        g = c.load(c.at(self.frame_of_g, line, margin[1], column), lanes)
                        for element, room in zip(elements, rooms[lanes], strict=True):
                            x = self.seen(row, column, element, lanes)
                            c.b.store(c.fma(g, x, c.get(room, vec(lanes))), room)
            for total, one, other in zip(totals, *rooms.values(), strict=True):
                lanes_joined = c.reduce(c.get(one, vec(width())), c.b.fadd)
                few_rows = c.b.fpext(c.b.fadd(lanes_joined, c.get(other, F32)), F64)
                c.b.store(c.b.fadd(c.get(total, F64), few_rows), total)

    def spread(self, n: Value, channel: Value, weights: Sequence[Value]) -> None:
        """dx of a plane, row by row: which elements of windows a row has depends on its rest by the
        stride."""
        c, of, (sh, _), (ph, pw) = self.c, self.of, self.windows.stride, self.windows.padding
        above_g, before_g = self.windows.margin
        plane = c.mul(c.add(c.mul(n, self.channels), channel), self.height, self.breadth)
        with c.loop(0, self.height) as row:
            above, rest = c.div(c.add(row, ph), sh), c.rem(c.add(row, ph), sh)
            for this in range(sh):
                with c.when(c.cmp("==", rest, this)):
                    self.line_of_dx(c.add(above, above_g), this, weights, before_g)
            to, line = of.at(self.to, plane, c.mul(row, self.breadth)), c.at(self.line, pw)
            steps(c, self.breadth, lambda i, n: of.store(c.load(c.at(line, i), n), of.at(to, i)))

    def line_of_dx(self, row: Value, rest: int, weights: Sequence[Value], before: int) -> None:
        """A row of dx with its padding, in the line; ``row`` of the frame has its first window."""
        c, (kh, kw), (sh, sw), lanes = self.c, self.windows.kernel, self.windows.stride, width()
        end = c.add(c.div(c.add(self.breadth, self.windows.padding[1] - 1), sw), 1)
        with c.loop(0, end, VECTORS * lanes) as start:
            for k in range(VECTORS):
                column, parts = c.add(start, k * lanes), []
                for rest_across in range(sw):
                    total = c.f(0.0, lanes)
                    for ky in range(rest, kh, sh):
                        for kx in range(rest_across, kw, sw):
                            line = c.mul(c.sub(row, ky // sh), self.g_columns)
                            there = c.at(self.frame_of_g, line, column, before - kx // sw)
                            total = self.step(total, c.load(there, lanes), weights[ky * kw + kx])
                    parts.append(self.result(total, lanes))
                self.weave(parts, c.at(self.line, c.mul(column, sw)))

    def weave(self, parts: Sequence[Value], to: Value) -> None:
        """One of each in turn."""
        c, lanes = self.c, width()
        if len(parts) == 1:
            c.store(parts[0], to)
        elif len(parts) == 2:
            c.store(c.shuffle(*parts, [i for k in range(lanes) for i in (k, lanes + k)]), to)
        else:
            for rest, part in enumerate(parts):
                for lane in range(lanes):
                    c.store(c.item(part, lane), c.at(to, lane * len(parts) + rest))


def _results(c: Code, count: Value) -> Iterator[tuple[Value, int, int]]:
    """A row of results: from which on, how many vectors, of so many lanes."""
    begin = c.i(0)
    for vectors, lanes in ((VECTORS, width()), (1, width()), (1, 1)):
        end = c.sub(count, c.rem(count, vectors * lanes))
        with c.loop(begin, end, vectors * lanes) as i:
            yield i, vectors, lanes
        begin = end


def _write(module: Any, windows: Windows) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        p = _Plane(c, windows, words, thread)
        if windows.makes == {"y"}:
            begin, end = c.share(c.mul(p.batch, p.channels), thread, threads)
            with c.loop(begin, end) as job:
                n = c.div(job, p.channels)
                p.forward(n, c.sub(job, c.mul(n, p.channels)))
            return
        begin, end = c.share(p.channels, thread, threads)  # each has the sums of its channels
        with c.loop(begin, end) as channel:
            p.backward(channel)

    entry(module, "run", body)


def compiled(windows: Windows) -> Loaded:
    shown = f"{replace(windows, makes=frozenset())} {sorted(windows.makes)}"
    return load(f"{shown} of {width()}", lambda module: _write(module, windows))


class Image(NamedTuple):
    """[N, C, H, W], as strides from batch to batch, channel to channel and row to row."""

    shape: tuple[int, int, int, int]
    steps: tuple[int, int, int]


def prepare_windows(
    windows: Windows, x: Image, y: Image, shared: bool
) -> tuple[Callable[[Word, Word, Word, Word, Word], Call], int]:
    """The call for x, weight, g, y or dx, and dw, where each is, and the floats of scratch for each
    thread. ``shared``: all channels have one weight. y, dx and dw are dense, and what is not read
    or made may be anywhere; g has the strides of ``y``."""
    frames = Frames.of(windows, x.shape[2:], y.shape[2:])
    x_floats, g_floats = prod(frames.x) * windows.stride[1], prod(frames.g)
    each = -(-(x_floats + g_floats + frames.line) // 16) * 16
    of_weight = 0 if shared else len(windows.elements)
    numbers = (
        *x.shape,
        *y.shape[2:],
        of_weight,
        frames.x[1],
        frames.g[1],
        x_floats,
        g_floats,
        each,
    )
    code, room = compiled(windows), Room("window pool", 0, each)
    words = (room, *numbers, *x.steps, *y.steps)
    many = prod(x.shape) > SERIAL
    return lambda x, w, g, to, dw: Call(code, (x, w, g, to, dw, *words), many), each
