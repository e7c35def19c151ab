"""Spatial-pyramid pooling: the cells of all grids of a plane while it is in the cache, and back.

    y[n, c, cell] = mean or max of x[n, c, top:bottom, left:right]
    mean     dx[n, c, i] = Σ g[n, c, cell] / size(cell), over the cells that hold i
    maximum  dx[n, c, i] = Σ g[n, c, cell], over the cells whose winner is i

    bytes = size · (x + y) and size · (g + dx), for a maximum + x: grids after the first are cached

Threads share the planes (n, c), or bundles of them where channels are adjacent: then a vector runs
along the channels, cell by cell. Else it runs along the rows: those of a row of cells are joined
column by column, and then the columns of each cell. Sums are kept in float32.

Backwards all rows between two edges of cells have the same gradient of a mean: it is added up once
in a line and copied. A maximum's is zero but for the winners. Cells that share a winner meet in
float32 in a plane of the thread's own, which is zero before and after. Ties go to the first, nan to
the last, as in torch.

Written out, this is torch's adaptive pools and a concatenation; generated code has no windows. On
two cores (bench/results/cpu_operators-cpu-aarch64.md) means take 0.8 ms instead of 1.7 and maxima
1.0 instead of 8.4, with their gradients 1.6 instead of 4.8 and 2.8 instead of 10.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I32, I64, Code, Loaded, Value, entry, load, vec, width
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import steps

SERIAL = 1 << 15  # elements below which a team of threads costs more than it gains
NOWHERE = 2**31 - 1  # no winner yet
Done = Callable[[Value, int, Value], None]


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for: ``makes`` is "mean", "max", "mean_grad" or "max_grad"."""

    makes: str
    grids: int
    vectors: int  # of channels that a thread takes along; 0: one plane at a time
    last: bool  # whether channels are adjacent in dx; else rows are
    stored: str

    @property
    def bundle(self) -> int:
        return self.vectors * width() or 1


class _Held:
    """What a vector of elements came to so far: their sum, the largest, or the largest and where it
    was, in which nan is larger than anything."""

    def __init__(self, c: Code, what: str, lanes: int) -> None:
        self.c, self.what, self.lanes = c, what, lanes
        self.room = c.variable(vec(lanes))
        self.where = c.variable(vec(lanes, I32)) if what == "where" else None

    def start(self, place: Value | None = None) -> _Held:
        """Nothing was seen; if nothing is larger than −inf, ``place`` is to win."""
        first = 0.0 if self.what == "sum" else float("-inf")
        self.c.b.store(self.c.f(first, self.lanes), self.room)
        if self.where is not None and place is not None:
            self.c.b.store(self._splat(place), self.where)
        return self

    def take(self, value: Value, place: Value | None = None) -> None:
        b, now = self.c.b, self.value
        if self.where is None or place is None:
            made = b.fadd(now, value) if self.what == "sum" else self.c.fmax(now, value)
            b.store(made, self.room)
            return
        wins = b.or_(b.fcmp_ordered(">", value, now), b.fcmp_unordered("uno", value, value))
        b.store(b.select(wins, value, now), self.room)
        b.store(b.select(wins, self._splat(place), self.place), self.where)

    def _splat(self, place: Value) -> Value:
        return self.c.splat(self.c.b.trunc(place, I32), self.lanes)

    @property
    def value(self) -> Value:
        return self.c.get(self.room, vec(self.lanes))

    @property
    def place(self) -> Value:
        return self.c.get(self.where, vec(self.lanes, I32))


class _Planes:
    """What all kernels share: where things are, and how planes are shared out and cells read."""

    def __init__(self, c: Code, variant: Variant, words: Value, thread: Value) -> None:
        self.c, self.variant, self.of = c, variant, Stored(c, variant.stored)
        self.x, self.g, self.to, self.boxes, bands, room = (c.pointer(words, i) for i in range(6))
        numbers = [c.word(words, 6 + i) for i in range(17 + 3 * variant.grids)]
        self.batch, self.channels, self.height, self.breadth, self.cells, each = numbers[:6]
        self.x_steps, self.g_steps, self.to_steps = numbers[6:10], numbers[10:13], numbers[13:16]
        self.bands, self.count = bands, numbers[16]
        # of each grid the first cell, and its rows and columns of cells
        self.grids = [numbers[i : i + 3] for i in range(17, len(numbers), 3)]
        self.pixels = c.mul(self.height, self.breadth)
        self.room = c.at(room, c.mul(thread, each))
        self.line = c.at(self.room, self.pixels) if variant.makes == "max_grad" else self.room
        self.rows_of_line = c.at(self.line, self.breadth)

    def take(self, n: Value, channel: Value, lanes: int) -> None:
        """All of ``lanes`` channels from one on."""
        raise NotImplementedError

    def all(self, thread: Value, threads: Value) -> None:
        """Every bundle of this thread's share, and what is left of the channels one by one."""
        c, bundle = self.c, self.variant.bundle
        bundles = c.div(c.add(self.channels, bundle - 1), bundle)
        begin, end = c.share(c.mul(self.batch, bundles), thread, threads)
        with c.loop(begin, end) as job:
            n = c.div(job, bundles)
            first = c.mul(c.sub(job, c.mul(n, bundles)), bundle)
            left = c.sub(self.channels, first)

            def singles() -> None:
                with c.loop(0, left) as k:
                    self.take(n, c.add(first, k), 1)

            whole = c.cmp(">=", left, bundle)
            c.either(whole, lambda: self.take(n, first, bundle), singles)

    def parts(self, lanes: int) -> tuple[int, int]:
        """How many vectors, and the lanes of each."""
        return (lanes // width(), width()) if lanes > 1 else (1, 1)

    def plane(self, base: Value, steps: Sequence[Value], n: Value, channel: Value) -> Value:
        return self.of.at(base, self.c.mul(n, steps[0]), self.c.mul(channel, steps[1]))

    def box(self, cell: Value) -> list[Value]:
        """Its top, bottom, left and right."""
        return [self.c.word(self.boxes, self.c.add(self.c.mul(cell, 4), i)) for i in range(4)]

    def size(self, cell: Value) -> Value:
        """How many elements it has."""
        c, (top, bottom, left, right) = self.c, self.box(cell)
        return c.b.sitofp(c.mul(c.sub(bottom, top), c.sub(right, left)), F32)

    # ---- cells that are read

    def each_cell(self, what: str, n: Value, channel: Value, lanes: int, done: Done) -> None:
        """``done(cell, k, found)`` for every cell: its sum, the largest or the winner's pixel, the
        k-th vector of it."""
        walk = self.cells_of_channels if self.variant.vectors else self.cells_of_rows
        walk(what, self.plane(self.x, self.x_steps, n, channel), lanes, done)

    def cells_of_channels(self, what: str, plane: Value, lanes: int, done: Done) -> None:
        """The vector's lanes are planes. Sums of rows are added up by themselves: two short sums
        round less than a long."""
        c, (_, _, sh, sw), (vectors, each) = self.c, self.x_steps, self.parts(lanes)
        found, line = ([_Held(c, what, each) for _ in range(vectors)] for _ in range(2))
        with c.loop(0, self.cells) as cell:
            top, bottom, left, right = self.box(cell)
            for held in found:
                held.start(c.add(c.mul(top, self.breadth), left))
            with c.loop(top, bottom) as row:
                if what == "sum":
                    for held in line:
                        held.start()
                with c.loop(left, right) as column:
                    pixel = self.of.at(plane, c.mul(row, sh), c.mul(column, sw))
                    here = c.add(c.mul(row, self.breadth), column)
                    for k, held in enumerate(line if what == "sum" else found):
                        held.take(self.of.load(self.of.at(pixel, k * each), each), here)
                if what == "sum":
                    for total, held in zip(found, line, strict=True):
                        total.take(held.value)
            for k, held in enumerate(found):
                done(cell, k, held.place if what == "where" else held.value)

    def cells_of_rows(self, what: str, plane: Value, lanes: int, done: Done) -> None:
        """The vector's lanes are columns, joined for a row of cells; then those of each cell."""
        c, joined = self.c, self.winner if what == "where" else self.joined
        for first, down, across in self.grids:
            with c.loop(0, down) as i:
                row = c.add(first, c.mul(i, across))
                self.join_rows(what, plane, *self.box(row)[:2])
                with c.loop(row, c.add(row, across)) as cell:
                    done(cell, 0, joined(what, *self.box(cell)[2:]))

    def join_rows(self, what: str, plane: Value, top: Value, bottom: Value) -> None:
        c, step = self.c, self.x_steps[2]

        def write(column: Value, lanes: int) -> None:
            held = _Held(c, what, lanes).start(top)
            with c.loop(top, bottom) as row:
                held.take(self.of.load(self.of.at(plane, c.mul(row, step), column), lanes), row)
            c.store(held.value, c.at(self.line, column))
            if what == "where":
                c.store(held.place, c.at(self.rows_of_line, column, of=I32))

        steps(c, self.breadth, write)

    def joined(self, what: str, left: Value, right: Value) -> Value:
        held = _Held(self.c, what, 1).start()
        with self.c.loop(left, right) as column:
            held.take(self.c.load(self.c.at(self.line, column)))
        return held.value

    def winner(self, what: str, left: Value, right: Value) -> Value:
        """The pixel that wins among the winners of columns: they are not in order."""
        c, b = self.c, self.c.b
        best, place = c.variable(F32, c.f(float("-inf"))), c.variable(I64, NOWHERE)
        with c.loop(left, right) as column:
            value, now, at = c.load(c.at(self.line, column)), c.get(best, F32), c.get(place)
            here = c.add(c.mul(c.index(self.rows_of_line, column), self.breadth), column)
            first = b.and_(b.fcmp_ordered("==", value, now), c.cmp("<", here, at))
            later = b.or_(b.fcmp_ordered("==", now, now), c.cmp(">", here, at))
            odd = b.and_(b.fcmp_unordered("uno", value, value), later)
            wins = b.or_(b.or_(b.fcmp_ordered(">", value, now), first), odd)
            b.store(b.select(wins, value, now), best)
            c.put(place, b.select(wins, here, at))
        return b.trunc(c.get(place), I32)


class _Forward(_Planes):
    def take(self, n: Value, channel: Value, lanes: int) -> None:
        c, of, each = self.c, self.of, self.parts(lanes)[1]
        mean = self.variant.makes == "mean"
        y = self.plane(self.to, self.to_steps, n, channel)

        def done(cell: Value, k: int, found: Value) -> None:
            if mean:
                found = c.b.fdiv(found, c.splat(self.size(cell), each))
            for lane in range(each):
                far = c.mul(self.to_steps[1], k * each + lane)
                of.store(c.item(found, lane), of.at(y, cell, far))

        self.each_cell("sum" if mean else "max", n, channel, lanes, done)


class _Backward(_Planes):
    def gradient(self, n: Value, channel: Value, cell: Value) -> Value:
        g = self.plane(self.g, self.g_steps, n, channel)
        return self.of.load(self.of.at(g, self.c.mul(cell, self.g_steps[2])))

    def each_vector(self, lanes: int, write: Callable[[Value, Value, int], None]) -> None:
        """``write(i, at, m)`` for all of a row of dx: m numbers, the i-th of [columns, lanes] and
        further ones, which lie ``at`` so many elements from its beginning."""
        c, (vectors, each) = self.c, self.parts(lanes)
        if not self.variant.last:
            steps(c, self.breadth, lambda i, m: write(i, i, m))
            return
        with c.loop(0, self.breadth) as column:
            for k in range(vectors):
                at = c.add(c.mul(column, self.channels), k * each)
                write(c.add(c.mul(column, lanes), k * each), at, each)


class _MeanGrad(_Backward):
    def take(self, n: Value, channel: Value, lanes: int) -> None:
        """For every band of rows that lie in the same cells a line, copied to all of them."""
        c, of = self.c, self.of
        target = self.plane(self.to, self.to_steps, n, channel)
        line, shares = self.room, c.at(self.room, c.mul(self.breadth, lanes))
        with c.loop(0, self.cells) as cell:
            size = self.size(cell)
            for k in range(lanes):
                share = c.b.fdiv(self.gradient(n, c.add(channel, k), cell), size)
                c.store(share, c.at(shares, c.mul(cell, lanes), k))
        with c.loop(0, self.count) as band:
            words = 2 * (1 + self.variant.grids)
            top, bottom, *ranges = (
                c.word(self.bands, c.add(c.mul(band, words), i)) for i in range(words)
            )
            floats = c.mul(self.breadth, lanes)
            steps(c, floats, lambda i, m: c.store(c.f(0.0, m), c.at(line, i)))
            for grid, *rows in zip(self.grids, ranges[::2], ranges[1::2], strict=True):
                begin, end = (c.add(grid[0], c.mul(i, grid[2])) for i in rows)
                with c.loop(begin, end) as cell:
                    self.add_to_line(cell, c.at(shares, c.mul(cell, lanes)), lanes)
            # rounded in place: no number is longer than before
            steps(c, floats, lambda i, m: of.store(c.load(c.at(line, i), m), of.at(line, i)))
            with c.loop(top, bottom) as row:
                to = of.at(target, c.mul(row, self.breadth, self.to_steps[2]))

                def copy(i: Value, at: Value, m: int) -> None:
                    raw = c.b.load(of.at(line, i), typ=vec(m, of.kind), align=of.bytes)
                    c.b.store(raw, of.at(to, at), align=of.bytes)

                self.each_vector(lanes, copy)

    def add_to_line(self, cell: Value, share: Value, lanes: int) -> None:
        """A cell's share of the gradient to all columns that it has."""
        c, (vectors, each) = self.c, self.parts(lanes)
        _, _, left, right = self.box(cell)
        values = [c.load(c.at(share, k * each), each) for k in range(vectors)]

        def add(value: Value, at: Value, m: int) -> None:
            c.store(c.b.fadd(c.load(at, m), value), at)

        def wide(i: Value, m: int) -> None:
            add(c.splat(values[0], m), c.at(self.room, i), m)

        if lanes == 1:
            steps(c, c.sub(right, left), wide, left)
            return
        with c.loop(left, right) as column:
            for k, value in enumerate(values):
                add(value, c.at(self.room, c.mul(column, lanes), k * each), each)


class _MaxGrad(_Backward):
    def __init__(self, c: Code, variant: Variant, words: Value, thread: Value) -> None:
        super().__init__(c, variant, words, thread)
        self.winners = c.at(self.rows_of_line, self.breadth)
        steps(c, self.pixels, lambda i, n: c.store(c.f(0.0, n), c.at(self.room, i)))

    def take(self, n: Value, channel: Value, lanes: int) -> None:
        c, of, each = self.c, self.of, self.parts(lanes)[1]
        with c.loop(0, 1 if self.variant.last else lanes) as k, c.loop(0, self.height) as row:
            plane = self.plane(self.to, self.to_steps, n, c.add(channel, k))
            to = of.at(plane, c.mul(row, self.breadth, self.to_steps[2]))
            self.each_vector(lanes, lambda i, at, m: of.store(c.f(0.0, m), of.at(to, at)))

        def done(cell: Value, k: int, found: Value) -> None:
            c.store(found, c.at(self.winners, c.mul(cell, lanes), k * each, of=I32))

        self.each_cell("where", n, channel, lanes, done)
        with c.loop(0, lanes) as k:
            self.hand_out(n, c.add(channel, k), k, lanes)

    def hand_out(self, n: Value, channel: Value, lane: Value, lanes: int) -> None:
        """Each cell's gradient to its winner, all of them before any is rounded."""
        c, of, target = self.c, self.of, self.plane(self.to, self.to_steps, n, channel)

        def each_winner(write: Callable[[Value, Value, Value], None]) -> None:
            with c.loop(0, self.cells) as cell:
                pixel = c.index(self.winners, c.add(c.mul(cell, lanes), lane))
                write(cell, pixel, c.at(self.room, pixel))

        def add(cell: Value, pixel: Value, here: Value) -> None:
            c.store(c.b.fadd(c.load(here), self.gradient(n, channel, cell)), here)

        def put(cell: Value, pixel: Value, here: Value) -> None:
            of.store(c.load(here), of.at(target, c.mul(pixel, self.to_steps[2])))

        each_winner(add)
        each_winner(put)
        each_winner(lambda cell, pixel, here: c.store(c.f(0.0), here))


def _write(module: Any, variant: Variant) -> None:
    kinds: dict[str, type[_Planes]] = {"mean_grad": _MeanGrad, "max_grad": _MaxGrad}

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        kind = kinds.get(variant.makes, _Forward)
        kind(c, variant, words, thread).all(thread, threads)

    entry(module, "run", body)


def compiled(variant: Variant) -> Loaded:
    return load(f"pyramid pool {variant} of {width()}", lambda module: _write(module, variant))


# ---- tables and calls ----------------------------------------------------------------------------


def spans(length: int, cells: int) -> list[tuple[int, int]]:
    """Where each of so many cells begins and ends."""
    return [(i * length // cells, -(-(i + 1) * length // cells)) for i in range(cells)]


def _bands(length: int, counts: Sequence[int]) -> torch.Tensor:
    """The stretches of a side between edges of cells: begin and end, and for each grid of so many
    cells the first that holds the stretch and the one after the last."""
    edges = sorted({e for count in counts for span in spans(length, count) for e in span})
    found = [
        [begin, end, *(e for n in counts for e in (begin * n // length, -(-end * n // length)))]
        for begin, end in pairwise(edges)
    ]
    return torch.tensor(found, dtype=torch.int64)


def by_channels(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a vector runs along channels: they are adjacent in memory, and if there is but one,
    of which that is no news, then rows are not."""
    return strides[1] == 1 and (shape[1] > 1 or strides[-1] != 1)


def prepare_pyramid(
    makes: str,
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    stored: str,
    x_strides: tuple[int, ...] | None,
    g_strides: tuple[int, ...] = (0, 0, 0),
    last: bool = False,
) -> tuple[Callable[[Word, Word, Word], Call], int]:
    """The call for x, g and y or dx, where each is, and the floats of scratch for each thread; see
    :class:`Variant`. ``shape`` is that of x, [N, C, H, W] or [N, C, W]; ``last`` says that channels
    are adjacent in dx. y and dx are dense, and a mean's gradient has no x."""
    flat, (batch, channels, *space) = len(shape) == 3, shape
    height, breadth = (1, *space)[-2:]
    pixels, downs = height * breadth, [1 if flat else s for s in sizes]
    grids = list(zip(downs, sizes, strict=True))
    found = [
        (*rows, *columns)
        for down, across in grids
        for rows in spans(height, down)
        for columns in spans(breadth, across)
    ]
    boxes, bands, cells = torch.tensor(found), _bands(height, downs), len(found)
    bundled = last if x_strides is None else by_channels(shape, x_strides)
    # as many vectors as there are, up to half of the registers, or a quarter: a winner takes two
    most = 8 if makes.endswith("grad") else 16
    vectors = next((n for n in (16, 8, 4, 2) if n <= most and n * width() <= channels), 1)
    variant = Variant(makes, len(sizes), vectors if bundled else 0, last, stored)
    lanes, line = variant.bundle, 2 * breadth
    each = {"max_grad": pixels + line + cells * lanes, "mean_grad": (breadth + cells) * lanes}
    floats = -(-each.get(makes, line) // 16) * 16
    steps_of_x = (0,) * 4 if x_strides is None else (*x_strides[:2], *(0, *x_strides[2:])[-2:])
    if makes.endswith("grad"):
        to = (channels * pixels, 1, channels) if last else (channels * pixels, pixels, 1)
    else:
        to = (channels * cells, cells, 1)
    numbers = [batch, channels, height, breadth, cells, floats, *steps_of_x, *g_strides, *to]
    numbers.append(len(bands))
    first = 0
    for down, across in grids:
        numbers += (first, down, across)
        first += down * across
    code, room = compiled(variant), Room("pyramid pool", 0, floats)
    many = len(sizes) * batch * channels * pixels > SERIAL
    return lambda x, g, to: Call(code, (x, g, to, boxes, bands, room, *numbers), many), floats
