"""Walks along a row: several vectors at a time, then one, then single elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from deuteron.codegen.llvm import Code, Value, vec, width

Terms = Callable[[Value, int], Sequence[tuple[Value, Value | None]]]
Combine = Callable[[Value, Value], Value]


def spans() -> tuple[int, int, int]:
    """Elements that a step takes, largest first."""
    return 4 * width(), width(), 1


def steps(c: Code, columns: Value, write: Callable[[Value, int], None]) -> None:
    """``write(column, lanes)`` for all columns."""
    begin: Value = c.i(0)
    for lanes in spans():
        end = c.sub(columns, c.rem(columns, lanes))
        with c.loop(begin, end, lanes) as i:
            write(i, lanes)
        begin = end


class Gathered:
    """A number of every step, combined: a sum or the largest, say. ``op`` ignores ``start``."""

    def __init__(self, c: Code, op: Combine, start: float) -> None:
        self.c, self.op, self.start = c, op, start
        self.rooms = {lanes: c.variable(vec(lanes)) for lanes in spans()}

    def clear(self) -> None:
        for lanes, room in self.rooms.items():
            self.c.b.store(self.c.f(self.start, lanes), room)

    def take(self, value: Value, lanes: int, times: Value | None = None) -> None:
        """Combine with ``value``, or add ``value`` · ``times``."""
        room = self.rooms[lanes]
        now = self.c.get(room, vec(lanes))
        made = self.op(now, value) if times is None else self.c.fma(value, times, now)
        self.c.b.store(made, room)

    def total(self) -> Value:
        first, *rest = (
            self.c.reduce(self.c.get(room, vec(lanes)), self.op)
            for lanes, room in self.rooms.items()
        )
        for other in rest:
            first = self.op(first, other)
        return first


def sums(c: Code, columns: Value, count: int, terms: Terms) -> list[Value]:
    """``count`` sums along a row, of products of two factors or of single numbers."""
    found = [Gathered(c, c.b.fadd, 0.0) for _ in range(count)]
    for each in found:
        each.clear()

    def write(i: Value, lanes: int) -> None:
        for each, (a, b) in zip(found, terms(i, lanes), strict=True):
            each.take(a, lanes, b)

    steps(c, columns, write)
    return [each.total() for each in found]
