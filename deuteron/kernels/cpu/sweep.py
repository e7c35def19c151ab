"""Walks along a row: several vectors at a time, then one, then four elements, then single ones."""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.llvm import F32, F64, Code, Value, halves, vec, width

SERIAL = 1 << 14  # elements below which a team of threads costs more than it gains

Terms = Callable[[Value, int], Sequence[tuple[Value, Value | None]]]
Combine = Callable[[Value, Value], Value]


Write = Callable[[Value, int], None]  # of a column and a number of lanes


def spans(vectors: int = 4) -> tuple[int, ...]:
    """Return how many elements a step may take, largest first."""
    return tuple(dict.fromkeys((vectors * width(), width(), *halves(width())[-1:], 1)))


def steps(c: Code, columns: Value, write: Write, first: int | Value = 0, vectors: int = 4) -> None:
    """``write(column, lanes)`` for ``columns`` columns from the ``first`` on."""
    begin: Value = c.i(0)
    for lanes in spans(vectors):
        end = c.sub(columns, c.rem(columns, lanes))
        with c.loop(begin, end, lanes) as i:
            write(c.add(first, i), lanes)
        begin = end


def blocks(c: Code, columns: Value, write: Write, fold: Callable[[], None]) -> None:
    """Make :func:`steps`, and ``fold()`` after every 32 of the longest and at the end."""
    few = 32 * spans()[0]
    with c.loop(0, columns, few) as first:
        steps(c, c.least(c.i(few), c.sub(columns, first)), write, first)
        fold()


class Gathered:
    """Combines a number of every step, into a sum or a maximum, say. ``start`` is neutral to
    ``op``."""

    def __init__(self, c: Code, op: Combine, start: float, of: Any = F32) -> None:
        self.c, self.op, self.of, self.start = c, op, of, ir.Constant(of, start)
        self.rooms = {lanes: c.variable(vec(lanes, of)) for lanes in spans()}

    def clear(self) -> None:
        for lanes, room in self.rooms.items():
            self.c.b.store(self.c.splat(self.start, lanes), room)

    def take(self, value: Value, lanes: int, times: Value | None = None) -> None:
        """Combine with ``value``, or add ``value`` · ``times``."""
        room = self.rooms[lanes]
        now = self.c.get(room, vec(lanes, self.of))
        made = self.op(now, value) if times is None else self.c.fma(value, times, now)
        self.c.b.store(made, room)

    def total(self) -> Value:
        rooms = (self.c.get(room, vec(lanes, self.of)) for lanes, room in self.rooms.items())
        return reduce(self.op, (self.c.reduce(value, self.op) for value in rooms))


class LongSum(Gathered):
    """A sum of very many numbers: a few at a time in float32, which ``fold`` adds to a total in
    float64. Rounding errors grow with the length of a sum; here they stay those of a short one."""

    def __init__(self, c: Code) -> None:
        super().__init__(c, c.b.fadd, 0.0)
        self.all = Gathered(c, c.b.fadd, 0.0, F64)

    def clear(self) -> None:
        super().clear()
        self.all.clear()

    def fold(self) -> None:
        for lanes, room in self.rooms.items():
            few = self.c.get(room, vec(lanes))
            self.all.take(self.c.b.fpext(few, vec(lanes, F64)), lanes)
        super().clear()

    def total(self) -> Value:
        """Return the sum of all that was folded, as a float32."""
        return self.c.b.fptrunc(self.all.total(), F32)


class Sums:
    """Several sums along rows at once, each of single numbers or of products of two factors.
    ``long``: rows are so long that they are added up in parts."""

    def __init__(self, c: Code, count: int, long: bool = False) -> None:
        self.c, self.long = c, long
        self.each = [LongSum(c) if long else Gathered(c, c.b.fadd, 0.0) for _ in range(count)]

    def clear(self) -> None:
        for each in self.each:
            each.clear()

    def add(self, columns: Value, terms: Terms) -> None:
        """Add a row: ``terms(column, lanes)`` gives one number or two factors for each sum."""

        def write(i: Value, lanes: int) -> None:
            for each, (a, b) in zip(self.each, terms(i, lanes), strict=True):
                each.take(a, lanes, b)

        def fold() -> None:
            for each in self.each:
                if isinstance(each, LongSum):
                    each.fold()

        if self.long:
            blocks(self.c, columns, write, fold)
        else:
            steps(self.c, columns, write)

    def totals(self) -> list[Value]:
        return [each.total() for each in self.each]


def pivot(c: Code, a: Value, b: Value) -> Value:
    """Return the one of two elements of a row that is nearer to 0, or 0 if it lies between them.
    Distances from it sum to exactly 0 where all elements are equal, and a single large element
    among them does not cost the others their digits."""
    least, most = c.fmin(a, b), c.fmax(a, b)
    return c.b.fadd(c.fmax(least, c.f(0.0)), c.fmin(most, c.f(0.0)))
