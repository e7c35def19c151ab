"""Walks over rows of images whose channels lie innermost, for ``channels_last_norm.py``: who takes
which rows, in what order they are read, and where sums and numbers of channels are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from deuteron.codegen.llvm import F64, Code, Value, lanes_of, vec
from deuteron.kernels.cpu.norm import POINTERS, Kind, Tensors
from deuteron.kernels.cpu.sweep import steps

TOGETHER = 64  # rows whose sums are float32
AT_ONCE = 2  # rows that are read side by side, of several tensors
OF_ONE = 4  # and of a single one
LINES = 3  # numbers of each channel that a thread keeps for the rows that it is at
APART = 32  # floats from those of one thread to those of the next, so that they share no line

NUMBERS = ("images", "rows", "channels", "each", "parts", "eps", "momentum")

Find = Callable[[Value], Sequence[tuple[Value, Value | None]]]  # what is added up, from a place
Terms = Callable[[Value, int], Find]  # of a channel and lanes
Several = Callable[[Value], Sequence[Value]]
Unit = tuple[Value, Value, Value, Value]  # image, part, and from which row to which
Strip = Callable[[Sequence[Value], Value, int], None]


class Rows(Tensors):
    """The rows of images, and what is kept of their channels."""

    def __init__(
        self, c: Code, kind: Kind, words: Value, thread: Value, threads: Value, kept: Sequence[str]
    ) -> None:
        super().__init__(c, kind, words, NUMBERS)
        self.thread, self.threads, self.kept = thread, threads, kept
        self.images, self.rows, self.channels, self.each, self.n_parts = (
            self.n[name] for name in NUMBERS[:5]
        )
        self.numbers = c.pointer(words, len(POINTERS) + len(NUMBERS) + 1)
        lines = c.pointer(words, len(POINTERS) + len(NUMBERS) + 2)
        self.lines = c.at(lines, c.mul(thread, c.add(c.mul(LINES, self.channels), APART)))
        self.count = c.mul(self.rows, self.each)

    # ---- where things are

    def at_row(self, image: Value, row: Value) -> Value:
        c = self.c
        return c.mul(c.add(c.mul(image, self.rows), row), self.channels)

    def sum_at(self, which: int, image: Value, part: Value | int, i: Value) -> Value:
        """The address of one of two sums of a part, a float64 for each channel."""
        c = self.c
        part = c.add(c.mul(image, self.n_parts), part)
        return c.at(self.parts, c.mul(c.add(c.mul(part, 2), which), self.channels), i, of=F64)

    def sums_of(self, image: Value, part: Value | int, i: Value, lanes: int = 1) -> list[Value]:
        return [self.c.load(self.sum_at(k, image, part, i), lanes, of=F64) for k in (0, 1)]

    def put_sums(self, image: Value, part: Value | int, i: Value, values: Sequence[Value]) -> None:
        for k, value in enumerate(values):
            self.c.store(value, self.sum_at(k, image, part, i))

    def number_at(self, name: str, image: Value, i: Value) -> Value:
        """The address of what is kept of a channel of an image."""
        c = self.c
        if "rstd" in self.kept and self.has(name):
            return c.at(self.at[name], i)  # the statistics of batch norm, which are operands
        k = self.kept.index(name)
        return c.at(self.numbers, c.mul(c.add(c.mul(self.images, k), image), self.channels), i)

    def put_number(self, name: str, value: Value, image: Value, i: Value) -> None:
        self.c.store(value, self.number_at(name, image, i))

    def number_of(self, name: str, image: Value, i: Value, lanes: int) -> Value:
        return self.c.load(self.number_at(name, image, i), lanes)

    def line(self, k: int, i: Value) -> Value:
        """The address of one of the numbers of a channel that this thread keeps."""
        return self.c.at(self.lines, self.c.mul(k, self.channels), i)

    # ---- who does what

    @contextmanager
    def units(self) -> Iterator[Unit]:
        """Image, part, and from which row to which, for the parts of this thread."""
        c = self.c
        begin, end = c.share(c.mul(self.images, self.n_parts), self.thread, self.threads)
        with c.loop(begin, end) as unit:
            part = c.rem(unit, self.n_parts)
            yield c.div(unit, self.n_parts), part, *c.share(self.rows, part, self.n_parts)

    def strips(
        self, image: Value, first: Value, stop: Value, write: Strip, at_once: int = AT_ONCE
    ) -> None:
        """``write(places of rows, channel, lanes)`` for all rows of a range and all channels, a
        few rows at a time and then the rest."""
        c = self.c
        begin = first
        for count in (at_once, 1):
            end = c.sub(stop, c.rem(c.sub(stop, begin), count))
            with c.loop(begin, end, count) as row:
                places = [self.at_row(image, c.add(row, k)) for k in range(count)]
                steps(c, self.channels, lambda i, lanes, at=places: write(at, i, lanes))
            begin = end

    def walk(self, write: Callable[[Value, Sequence[Value], Value, int], None]) -> None:
        """``write(image, places of rows, channel, lanes)`` for this thread's share of all rows."""
        c = self.c
        begin, end = c.share(c.mul(self.images, self.rows), self.thread, self.threads)
        last = c.div(c.add(end, c.sub(self.rows, 1)), self.rows)
        with c.loop(c.div(begin, self.rows), last) as image:
            before = c.mul(image, self.rows)
            first, stop = c.most(c.sub(begin, before), 0), c.least(c.sub(end, before), self.rows)
            self.strips(image, first, stop, lambda at, i, lanes: write(image, at, i, lanes))

    def own_channels(self) -> tuple[Value, Value]:
        """From which channel to which: whole groups for each thread."""
        c = self.c
        begin, end = c.share(c.div(self.channels, self.each), self.thread, self.threads)
        return c.mul(begin, self.each), c.mul(end, self.each)

    # ---- sums

    def gathered(self, unit: Unit, terms: Terms, at_once: int = AT_ONCE) -> None:
        """Two sums over rows of a part, of what ``terms(column, lanes)`` finds at each: products
        or single numbers: of 64 rows at a time as float32, of all as float64."""
        c, (image, part, first, stop) = self.c, unit

        def clear(i: Value, lanes: int) -> None:
            zero = self.of.lanes(F64(0.0), lanes)
            self.put_sums(image, part, i, (zero, zero))
            for k in (1, 2):
                c.store(c.f(0.0, lanes), self.line(k, i))

        def add(places: Sequence[Value], i: Value, lanes: int) -> None:
            find = terms(i, lanes)
            totals = [c.load(self.line(k, i), lanes) for k in (1, 2)]
            for at in places:
                for k, (a, b) in enumerate(find(at)):
                    totals[k] = c.b.fadd(totals[k], a) if b is None else c.fma(a, b, totals[k])
            for k, total in enumerate(totals, 1):
                c.store(total, self.line(k, i))

        def join(i: Value, lanes: int) -> None:
            more = [self.wider(c.load(self.line(k, i), lanes)) for k in (1, 2)]
            old = self.sums_of(image, part, i, lanes)
            self.put_sums(image, part, i, [c.b.fadd(*two) for two in zip(old, more, strict=True)])
            for k in (1, 2):
                c.store(c.f(0.0, lanes), self.line(k, i))

        steps(c, self.channels, clear)
        with c.loop(first, stop, TOGETHER) as top:
            self.strips(image, top, c.least(c.add(top, TOGETHER), stop), add, at_once)
            steps(c, self.channels, join)

    def added(
        self, begin: Value | int, end: Value, lanes: int, terms: Several, count: int = 2
    ) -> list[Value]:
        """``count`` sums in float64 of what ``terms(k)`` gives for each k of a range."""
        c, kind = self.c, vec(lanes, F64)
        rooms = [c.variable(kind) for _ in range(count)]
        for room in rooms:
            c.b.store(self.of.lanes(F64(0.0), lanes), room)
        with c.loop(begin, end) as k:
            for room, value in zip(rooms, terms(k), strict=True):
                c.b.store(c.b.fadd(c.get(room, kind), value), room)
        return [c.get(room, kind) for room in rooms]

    def over_parts(self, image: Value, i: Value, lanes: int) -> list[Value]:
        """The two sums of channels over all rows of an image."""
        return self.added(0, self.n_parts, lanes, lambda k: self.sums_of(image, k, i, lanes))

    def double(self, n: Value, lanes: int = 1) -> Value:
        """A whole number as a float64 in every lane."""
        return self.of.lanes(self.c.b.sitofp(n, F64), lanes)

    def wider(self, x: Value) -> Value:
        return self.c.b.fpext(x, vec(lanes_of(x), F64))

    def narrower(self, x: Value) -> Value:
        return self.c.b.fptrunc(x, vec(lanes_of(x)))
