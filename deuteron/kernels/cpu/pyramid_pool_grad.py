"""dx of pyramid pooling: each cell's gradient shared out evenly, or handed to its winner.

    mean     dx[n, c, i] = Σ g[n, c, cell] / size(cell), over the cells that hold i
    maximum  dx[n, c, i] = Σ g[n, c, cell], over the cells whose winner is i

    bytes = size · (g + dx), and size · x for a maximum: the grids after the first from the cache

Threads share the planes (n, c), or bundles of them where channels are adjacent in memory. The edges
of all cells cut an image into patches in which every element lies in the same cells: a mean's
gradient is added up once for a patch and written to all of it. A maximum's is zero but for
a few winners. Cells that share a winner meet in float32 in a plane of the thread's own, which is
zero before and after. Ties go to the first, nan to the last, as in torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I32, I64, Code, Loaded, Value, entry, load, vec, width
from deuteron.kernels.cpu.pyramid_pool import SERIAL, boxes, by_channels, spans
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import steps

NOWHERE = 2**31 - 1  # no winner yet


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    maximum: bool
    grids: int
    vectors: int  # of channels that a thread takes along; 0: one plane at a time
    last: bool  # whether channels are adjacent in dx; else rows are
    stored: str

    @property
    def bundle(self) -> int:
        return self.vectors * width() or 1


@dataclass(frozen=True)
class Grid:
    """Its first cell, its rows and columns of cells, and the columns of the grids before."""

    first: Value
    down: Value
    across: Value
    before: Value


# from, to, and where the numbers are
Range = tuple[Value, Value, Callable[[Value], Value]]


class _Planes(ABC):
    """What both kinds share: where things are, and how the planes are shared out."""

    def __init__(self, c: Code, form: Form, words: Value, thread: Value) -> None:
        self.c, self.form, self.of = c, form, Stored(c, form.stored)
        self.g, self.x, self.dx, room = (c.pointer(words, i) for i in range(4))
        numbers = (c.word(words, i) for i in count(4))

        def some(n: int) -> list[Value]:
            return [next(numbers) for _ in range(n)]

        self.batch, self.channels, self.height, self.breadth, self.cells, each = some(6)
        self.g_steps, self.x_steps, (self.dn, self.dc, self.step) = some(3), some(4), some(3)
        self.grids = [Grid(*some(4)) for _ in range(form.grids)]
        self.room = c.at(room, c.mul(thread, each))

    @abstractmethod
    def take(self, n: Value, channel: Value, lanes: int) -> None:
        """dx of ``lanes`` channels from one on."""

    def all(self, thread: Value, threads: Value) -> None:
        """Every bundle of this thread's share, and what is left of the channels one by one."""
        c, bundle = self.c, self.form.bundle
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

    def gradient(self, n: Value, channel: Value, cell: Value) -> Value:
        places = zip((n, channel, cell), self.g_steps, strict=True)
        return self.of.load(self.of.at(self.g, *(self.c.mul(i, step) for i, step in places)))

    def target(self, n: Value, channel: Value) -> Value:
        """Where a plane of dx begins."""
        return self.of.at(self.dx, self.c.mul(n, self.dn), self.c.mul(channel, self.dc))

    def put(self, values: Sequence[Value], target: Value, pixel: Value) -> None:
        """Vectors of channels that are side by side, at a pixel."""
        for k, value in enumerate(values):
            here = self.of.at(target, self.c.mul(pixel, self.step), k * width())
            self.of.store(value, here)


def _parts(lanes: int) -> tuple[int, int]:
    """How many vectors, and the lanes of each."""
    return (lanes // width(), width()) if lanes > 1 else (1, 1)


class _Mean(_Planes):
    def __init__(self, c: Code, form: Form, words: Value, thread: Value) -> None:
        super().__init__(c, form, words, thread)
        at = 20 + 4 * form.grids
        self.rows, self.columns, self.sizes = (c.pointer(words, at + i) for i in range(3))
        self.down, self.across = (c.word(words, at + 3 + i) for i in range(2))

    def take(self, n: Value, channel: Value, lanes: int) -> None:
        """Cells that stand one above the other are joined first, for a band of rows; then for each
        patch of it those side by side."""
        c, of, target = self.c, self.of, self.target(n, channel)
        line = c.at(self.room, c.mul(self.cells, lanes))
        with c.loop(0, self.cells) as cell:
            size = c.load(c.at(self.sizes, cell))
            for k in range(lanes):
                share = c.b.fdiv(self.gradient(n, c.add(channel, k), cell), size)
                c.store(share, c.at(self.room, c.mul(cell, lanes), k))
        with c.loop(0, self.down) as band:
            (top, bottom), rows = self.patch(self.rows, band)
            for grid, (begin, end) in zip(self.grids, rows, strict=True):
                with c.loop(0, grid.across) as j:

                    def above(i: Value, grid: Grid = grid, j: Value = j) -> Value:
                        return c.add(grid.first, c.mul(i, grid.across), j)

                    joined = self.total(self.room, lanes, [(begin, end, above)])
                    for k, value in enumerate(joined):
                        c.store(value, c.at(line, c.mul(c.add(grid.before, j), lanes), k * width()))
            with c.loop(0, self.across) as piece:
                (left, right), columns = self.patch(self.columns, piece)
                ranges: list[Range] = [
                    (begin, end, lambda j, grid=grid: c.add(grid.before, j))
                    for grid, (begin, end) in zip(self.grids, columns, strict=True)
                ]
                values = self.total(line, lanes, ranges)
                # where rows are adjacent the first of a band is written, and copied below
                with c.loop(top, bottom if self.form.last else c.add(top, 1)) as row:
                    with c.loop(left, right) as column:
                        self.put(values, target, c.add(c.mul(row, self.breadth), column))
            if not self.form.last:
                first = of.at(target, c.mul(top, self.breadth))
                with c.loop(c.add(top, 1), bottom) as row:
                    self.copy(first, of.at(target, c.mul(row, self.breadth)))

    def patch(self, table: Value, index: Value) -> tuple[list[Value], list[list[Value]]]:
        """Where it begins and ends, and the range of cells of each grid that hold it."""
        c, size = self.c, 2 * (1 + self.form.grids)
        words = [c.word(table, c.add(c.mul(index, size), i)) for i in range(size)]
        return words[:2], [words[i : i + 2] for i in range(2, size, 2)]

    def total(self, base: Value, lanes: int, ranges: Sequence[Range]) -> list[Value]:
        """The sum of numbers in ranges, each ``where(i)`` from ``base``, in vectors."""
        c, (vectors, each) = self.c, _parts(lanes)
        rooms = [c.variable(vec(each)) for _ in range(vectors)]
        for room in rooms:
            c.b.store(c.f(0.0, each), room)
        for begin, end, where in ranges:
            with c.loop(begin, end) as i:
                here = c.mul(where(i), lanes)
                for k, room in enumerate(rooms):
                    value = c.load(c.at(base, here, k * each), each)
                    c.b.store(c.b.fadd(c.get(room, vec(each)), value), room)
        return [c.get(room, vec(each)) for room in rooms]

    def copy(self, source: Value, to: Value) -> None:
        """A row as it is in memory."""
        of, b = self.of, self.c.b

        def write(i: Value, lanes: int) -> None:
            raw = b.load(of.at(source, i), typ=vec(lanes, of.kind), align=of.bytes)
            b.store(raw, of.at(to, i), align=of.bytes)

        steps(self.c, self.breadth, write)


class _Maximum(_Planes):
    def __init__(self, c: Code, form: Form, words: Value, thread: Value) -> None:
        super().__init__(c, form, words, thread)
        self.boxes = c.pointer(words, 20 + 4 * form.grids)
        self.pixels = c.mul(self.height, self.breadth)
        self.best = c.at(self.room, self.pixels)
        self.row_of_best = c.at(self.best, self.breadth)
        self.winners = c.at(self.row_of_best, self.breadth)
        steps(c, self.pixels, lambda i, n: c.store(c.f(0.0, n), c.at(self.room, i)))

    def take(self, n: Value, channel: Value, lanes: int) -> None:
        c, (sn, sc, _, _) = self.c, self.x_steps
        self.clear(n, channel, lanes)
        plane = self.of.at(self.x, c.mul(n, sn), c.mul(channel, sc))
        if self.form.vectors:
            self.find_along_channels(plane, lanes)
        else:
            self.find_along_rows(plane)
        with c.loop(0, lanes) as k:
            self.hand_out(n, c.add(channel, k), k, lanes)

    def clear(self, n: Value, channel: Value, lanes: int) -> None:
        c, (vectors, each) = self.c, _parts(lanes)
        if self.form.last:
            target, zeros = self.target(n, channel), [c.f(0.0, each)] * vectors
            with c.loop(0, self.pixels) as pixel:
                self.put(zeros, target, pixel)
            return
        with c.loop(0, lanes) as k:
            plane = self.target(n, c.add(channel, k))
            steps(c, self.pixels, lambda i, n: self.of.store(c.f(0.0, n), self.of.at(plane, i)))

    def hand_out(self, n: Value, channel: Value, lane: Value, lanes: int) -> None:
        """Each cell's gradient to its winner, all of them before any is rounded."""
        c, of, target = self.c, self.of, self.target(n, channel)

        def each_winner(write: Callable[[Value, Value], None]) -> None:
            with c.loop(0, self.cells) as cell:
                write(cell, c.index(self.winners, c.add(c.mul(cell, lanes), lane)))

        def add(cell: Value, pixel: Value) -> None:
            here = c.at(self.room, pixel)
            c.store(c.b.fadd(c.load(here), self.gradient(n, channel, cell)), here)

        each_winner(add)
        each_winner(
            lambda cell, pixel: of.store(
                c.load(c.at(self.room, pixel)), of.at(target, c.mul(pixel, self.step))
            )
        )
        each_winner(lambda cell, pixel: c.store(c.f(0.0), c.at(self.room, pixel)))

    def box(self, cell: Value) -> list[Value]:
        """Its top, bottom, left and right."""
        return [self.c.word(self.boxes, self.c.add(self.c.mul(cell, 4), i)) for i in range(4)]

    def find_along_channels(self, plane: Value, lanes: int) -> None:
        """The winners of every cell: the vector's lanes are planes."""
        c, (_, _, sh, sw), (vectors, each) = self.c, self.x_steps, _parts(lanes)
        found = [_Leader(c, each) for _ in range(vectors)]
        with c.loop(0, self.cells) as cell:
            top, bottom, left, right = self.box(cell)
            for leader in found:
                leader.start(c.add(c.mul(top, self.breadth), left))
            with c.loop(top, bottom) as row, c.loop(left, right) as column:
                pixel = self.of.at(plane, c.mul(row, sh), c.mul(column, sw))
                here = c.add(c.mul(row, self.breadth), column)
                for k, leader in enumerate(found):
                    leader.take(self.of.load(self.of.at(pixel, k * each), each), here)
            for k, leader in enumerate(found):
                at = c.at(self.winners, c.mul(cell, lanes), k * each, of=I32)
                c.store(leader.place, at)

    def find_along_rows(self, plane: Value) -> None:
        """The winners of every cell: of the columns of a row of cells first, in vectors."""
        c = self.c
        for grid in self.grids:
            with c.loop(0, grid.down) as i:
                row = c.add(grid.first, c.mul(i, grid.across))
                top, bottom, _, _ = self.box(row)
                self.find_in_columns(plane, top, bottom)
                with c.loop(0, grid.across) as j:
                    _, _, left, right = self.box(c.add(row, j))
                    place = self.first_of_columns(left, right)
                    c.store(c.b.trunc(place, I32), c.at(self.winners, c.add(row, j), of=I32))

    def find_in_columns(self, plane: Value, top: Value, bottom: Value) -> None:
        c, step = self.c, self.x_steps[2]

        def write(column: Value, lanes: int) -> None:
            leader = _Leader(c, lanes)
            leader.start(top)
            with c.loop(top, bottom) as row:
                value = self.of.load(self.of.at(plane, c.mul(row, step), column), lanes)
                leader.take(value, row)
            c.store(leader.value, c.at(self.best, column))
            c.store(leader.place, c.at(self.row_of_best, column, of=I32))

        steps(c, self.breadth, write)

    def first_of_columns(self, left: Value, right: Value) -> Value:
        """The pixel that wins among the winners of columns: they are not in order."""
        c, b = self.c, self.c.b
        best, place = c.variable(F32, c.f(float("-inf"))), c.variable(I64, NOWHERE)
        with c.loop(left, right) as column:
            value, now, at = c.load(c.at(self.best, column)), c.get(best, F32), c.get(place)
            here = c.add(c.mul(c.index(self.row_of_best, column), self.breadth), column)
            first = b.and_(b.fcmp_ordered("==", value, now), c.cmp("<", here, at))
            later = b.or_(b.fcmp_ordered("==", now, now), c.cmp(">", here, at))
            odd = b.and_(b.fcmp_unordered("uno", value, value), later)
            wins = b.or_(b.or_(b.fcmp_ordered(">", value, now), first), odd)
            b.store(b.select(wins, value, now), best)
            c.put(place, b.select(wins, here, at))
        return c.get(place)


class _Leader:
    """The largest so far in every lane, and where it was; nan is larger than anything."""

    def __init__(self, c: Code, lanes: int) -> None:
        self.c, self.lanes = c, lanes
        self._value, self._place = c.variable(vec(lanes)), c.variable(vec(lanes, I32))

    def start(self, place: Value) -> None:
        """Nothing was seen; if nothing is larger than −inf, the first is to win."""
        self.c.b.store(self.c.f(float("-inf"), self.lanes), self._value)
        self.c.b.store(self._splat(place), self._place)

    def take(self, value: Value, place: Value) -> None:
        b, now = self.c.b, self.value
        wins = b.or_(b.fcmp_ordered(">", value, now), b.fcmp_unordered("uno", value, value))
        b.store(b.select(wins, value, now), self._value)
        b.store(b.select(wins, self._splat(place), self.place), self._place)

    def _splat(self, place: Value) -> Value:
        return self.c.splat(self.c.b.trunc(place, I32), self.lanes)

    @property
    def value(self) -> Value:
        return self.c.get(self._value, vec(self.lanes))

    @property
    def place(self) -> Value:
        return self.c.get(self._place, vec(self.lanes, I32))


def _write(module: Any, form: Form) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        (_Maximum if form.maximum else _Mean)(c, form, words, thread).all(thread, threads)

    entry(module, "run", body)


def compiled(form: Form) -> Loaded:
    return load(f"pyramid gradient {form} of {width()}", lambda module: _write(module, form))


def patches(length: int, counts: Sequence[int]) -> torch.Tensor:
    """The stretches of a side between edges of cells: begin and end, and for each grid of so many
    cells the first that holds the stretch and the one after the last."""
    edges = sorted({e for count in counts for span in spans(length, count) for e in span})
    found = [
        [begin, end, *(e for n in counts for e in (begin * n // length, -(-end * n // length)))]
        for begin, end in pairwise(edges)
    ]
    return torch.tensor(found, dtype=torch.int64)


def prepare_pyramid_grad(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    stored: str,
    last: bool,
    g_strides: tuple[int, ...],
    x_strides: tuple[int, ...] | None,
) -> tuple[Callable[[Word, Word, Word], Call], int]:
    """The call for g, x and dx, where each is, and the floats of scratch for each thread. ``shape``
    is [N, C, H, W] or [N, C, W]; ``last`` says that channels are adjacent in dx, which is dense;
    without strides of x the pool is a mean, and x is not looked at."""
    flat, (batch, channels, *space) = len(shape) == 3, shape
    height, breadth = (1, *space)[-2:]
    downs = [1 if flat else s for s in sizes]
    table = boxes((height, breadth), list(zip(downs, sizes, strict=True)))
    bundled = last if x_strides is None else by_channels(shape, x_strides)
    form = Form(
        x_strides is not None, len(sizes), _vectors(channels) if bundled else 0, last, stored
    )
    pixels, cells, lanes = height * breadth, len(table), form.bundle
    each = cells * lanes + (sum(sizes) * lanes if x_strides is None else pixels + 2 * breadth)
    each = -(-each // 16) * 16
    steps_of_x = (0,) * 4 if x_strides is None else (*x_strides[:2], *(0, *x_strides[2:])[-2:])
    grids, first, before = [], 0, 0
    for down, across in zip(downs, sizes, strict=True):
        grids += (first, down, across, before)
        first, before = first + down * across, before + across
    steps_of_dx = (channels * pixels, 1, channels) if last else (channels * pixels, pixels, 1)
    numbers = (
        batch,
        channels,
        height,
        breadth,
        cells,
        each,
        *g_strides,
        *steps_of_x,
        *steps_of_dx,
        *grids,
    )
    if x_strides is None:
        area = (table[:, 1] - table[:, 0]) * (table[:, 3] - table[:, 2])
        down, across = patches(height, downs), patches(breadth, sizes)
        tables: tuple[Word, ...] = (down, across, area.float(), len(down), len(across))
    else:
        tables = (table,)
    code, room = compiled(form), Room("pyramid gradient", 0, each)
    many = len(sizes) * batch * channels * pixels > SERIAL
    return lambda g, x, dx: Call(code, (g, x, dx, room, *numbers, *tables), many), each


def _vectors(channels: int) -> int:
    """As many as there are, up to a quarter of the registers: a winner takes two of them."""
    return next((n for n in (8, 4, 2) if n * width() <= channels), 1)
