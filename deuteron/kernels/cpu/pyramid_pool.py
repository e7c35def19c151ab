"""y[n, c, cell] = mean or max of x[n, c, top:bottom, left:right], the cells of all grids in a call.

    bytes = size · (x + y), the grids after the first from the cache

Threads share the planes (n, c), or bundles of them. Where rows are adjacent in memory a vector runs
along the row of a cell; where channels are, along a bundle of channels. Sums are kept in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import F32, Code, Loaded, Value, entry, load, vec, width
from deuteron.kernels.cpu.stored import Stored

SERIAL = 1 << 15  # elements below which a team of threads costs more than it gains


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    maximum: bool
    vectors: int  # of channels that a thread takes along; 0 where rows are adjacent
    stored: str


class _Writer:
    """One kernel: a cell of some planes at a time."""

    def __init__(self, c: Code, form: Form, x: Value, y: Value, strides: Sequence[Value]) -> None:
        self.c, self.form, self.x, self.y = c, form, x, y
        self.sn, self.sc, self.sh, self.sw = strides
        self.of = Stored(c, form.stored)

    def combine(self, a: Value, b: Value) -> Value:
        return self.c.fmax(a, b) if self.form.maximum else self.c.b.fadd(a, b)

    def started(self, lanes: int) -> Value:
        room = self.c.variable(vec(lanes))
        self.restart(room, lanes)
        return room

    def restart(self, room: Value, lanes: int) -> None:
        self.c.b.store(self.c.f(float("-inf") if self.form.maximum else 0.0, lanes), room)

    def take(self, room: Value, where: Value, lanes: int) -> None:
        value = self.of.load(where, lanes)
        self.c.b.store(self.combine(self.c.get(room, vec(lanes)), value), room)

    def join(self, total: Value, row: Value, lanes: int) -> None:
        """A row's result joins that of the rows before: two short sums round less than a long."""
        both = self.combine(self.c.get(total, vec(lanes)), self.c.get(row, vec(lanes)))
        self.c.b.store(both, total)

    def put(self, value: Value, count: Value, at: Value) -> None:
        if not self.form.maximum:
            value = self.c.b.fdiv(value, self.c.b.sitofp(count, F32))
        self.of.store(value, self.of.at(self.y, at))

    def along_rows(self, plane: Value, at: Value, box: Sequence[Value], count: Value) -> None:
        """One plane: the vector's lanes are neighbours in a row."""
        c, (top, bottom, left, right) = self.c, box
        wide, rest, row_wide = self.started(width()), self.started(1), self.started(width())
        whole = c.add(left, c.mul(c.div(c.sub(right, left), width()), width()))
        with c.loop(top, bottom) as row:
            line = c.add(plane, c.mul(row, self.sh))
            self.restart(row_wide, width())
            parts = ((width(), row_wide, left, whole), (1, rest, whole, right))
            for lanes, room, low, high in parts:
                with c.loop(low, high, lanes) as column:
                    self.take(room, self.of.at(self.x, line, c.mul(column, self.sw)), lanes)
            self.join(wide, row_wide, width())
        lanes_joined = c.reduce(c.get(wide, vec(width())), self.combine)
        self.put(self.combine(lanes_joined, c.get(rest, F32)), count, at)

    def along_channels(
        self, plane: Value, at: Value, cells: Value, lanes: int, box: Sequence[Value], count: Value
    ) -> None:
        """``lanes`` channels from one on: the vector's lanes are planes."""
        c, (top, bottom, left, right) = self.c, box
        each = min(lanes, width())
        rooms, rows = ([self.started(each) for _ in range(lanes // each)] for _ in range(2))
        with c.loop(top, bottom) as row:
            for room in rows:
                self.restart(room, each)
            with c.loop(left, right) as column:
                pixel = c.add(plane, c.mul(row, self.sh), c.mul(column, self.sw))
                for k, room in enumerate(rows):
                    self.take(room, self.of.at(self.x, pixel, k * each), each)
            for total, room in zip(rooms, rows, strict=True):
                self.join(total, room, each)
        for k, room in enumerate(rooms):
            for lane in range(each):
                value = c.item(c.get(room, vec(each)), lane)
                self.put(value, count, c.add(at, c.mul(cells, k * each + lane)))


def _write(module: Any, form: Form) -> None:
    bundle = form.vectors * width() or 1

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        x, y, boxes = (c.pointer(words, i) for i in range(3))
        batch, channels, cells, *strides = (c.word(words, 3 + i) for i in range(7))
        w = _Writer(c, form, x, y, strides)
        bundles = c.div(c.add(channels, bundle - 1), bundle)
        begin, end = c.share(c.mul(batch, bundles), thread, threads)
        with c.loop(begin, end) as job:
            n = c.div(job, bundles)
            first = c.mul(c.sub(job, c.mul(n, bundles)), bundle)
            plane = c.add(c.mul(n, w.sn), c.mul(first, w.sc))
            out = c.mul(c.add(c.mul(n, channels), first), cells)
            with c.loop(0, cells) as cell:
                box = [c.word(boxes, c.add(c.mul(cell, 4), i)) for i in range(4)]
                count = c.mul(c.sub(box[1], box[0]), c.sub(box[3], box[2]))
                at = c.add(out, cell)
                if form.vectors:
                    left = c.sub(channels, first)

                    def whole() -> None:
                        w.along_channels(plane, at, cells, bundle, box, count)

                    def single() -> None:
                        with c.loop(0, left) as k:
                            there = c.add(at, c.mul(k, cells))
                            w.along_channels(c.add(plane, k), there, cells, 1, box, count)

                    c.either(c.cmp(">=", left, bundle), whole, single)
                else:
                    w.along_rows(plane, at, box, count)

    entry(module, "run", body)


def compiled(form: Form) -> Loaded:
    return load(f"pyramid {form} of {width()}", lambda module: _write(module, form))


def spans(length: int, cells: int) -> list[tuple[int, int]]:
    """Where each of so many cells begins and ends."""
    return [(i * length // cells, -(-(i + 1) * length // cells)) for i in range(cells)]


def boxes(space: tuple[int, int], grids: Sequence[tuple[int, int]]) -> torch.Tensor:
    """(top, bottom, left, right) of every cell of every grid."""
    found = [
        (*rows, *columns)
        for grid in grids
        for rows in spans(space[0], grid[0])
        for columns in spans(space[1], grid[1])
    ]
    return torch.tensor(found, dtype=torch.int64)


def _vectors(channels: int) -> int:
    """As many as there are, up to half of the registers: the wider, the fewer lines of the cache
    are touched twice."""
    return next((n for n in (16, 8, 4, 2) if n * width() <= channels), 1)


def by_channels(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a vector runs along channels: they are adjacent in memory, and if there is but one,
    of which that is no news, then rows are not."""
    return strides[1] == 1 and (shape[1] > 1 or strides[-1] != 1)


def prepare_pyramid(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    sizes: tuple[int, ...],
    maximum: bool,
    stored: str,
) -> Callable[[Word, Word], Call]:
    """The call for x and y, where each is, for [N, C, H, W] or [N, C, W]."""
    flat = len(shape) == 3
    space, steps = (1, *shape[2:])[-2:], (0, *strides[2:])[-2:]
    table = boxes((space[0], space[1]), [(1 if flat else s, s) for s in sizes])
    form = Form(maximum, _vectors(shape[1]) if by_channels(shape, strides) else 0, stored)
    work = len(sizes) * shape[0] * shape[1] * space[0] * space[1]
    code, numbers = compiled(form), (shape[0], shape[1], len(table), *strides[:2], *steps)
    return lambda x, y: Call(code, (x, y, table, *numbers), work > SERIAL)
