"""C[m, n] = Σₖ A[m, k] · B[n, k] + bias[n] of bytes, in int32: four products at a time are added up
by one instruction (:mod:`deuteron.codegen.dots`).

B is packed into panels of ``columns`` columns, [⌈N / columns⌉][⌈K / 4⌉][columns][4], with zeros
beyond column N and row K, so that four numbers of a sum lie side by side for each column. A tile of
rows by columns stays in registers over all of k; a panel stays in L1 while all rows are multiplied
by it:

    bytes ≈ M·K · ⌈N / columns⌉ (from L2) + K·N + 4 · M·N

If the instruction cannot multiply the bytes of A as they are, their highest bits are flipped first,
in a copy: to flip those of every word as it is read costs x86-64 half as much as the products. Rows
whose length is no multiple of four bytes are copied so that each begins at one.

Nothing is rounded; sums wrap around at 2³² only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.dots import HIGHEST, TOGETHER, Dots
from deuteron.codegen.llvm import I8, I32, PTR, Code, Value, by_lane, constant, load_run, vec

SERIAL = 1e5  # fewer operations take less time than waking up a second thread
AT_ONCE, FEW = 64, 4  # bytes copied in one step; and in one step of shorter runs


def load(c: Code, where: Value, kind: Any) -> Value:
    """Load from an address that need not be aligned."""
    return c.b.load(where, typ=kind, align=1)


class Sums:
    """A tile of sums in registers."""

    def __init__(self, c: Code, dots: Dots, signed: bool = True) -> None:
        self.c, self.dots, self.signed = c, dots, signed
        self.kind = vec(dots.lanes, I32)
        each = range(dots.vectors)
        self.all = [[c.variable(self.kind) for _ in each] for _ in range(dots.rows)]

    def begin(self, start: Value) -> None:
        """Start all rows with the numbers at ``start``, one for each column."""
        for j in range(self.dots.vectors):
            first = load(self.c, self.c.at(start, j * self.dots.lanes, of=I32), self.kind)
            for row in self.all:
                self.c.b.store(first, row[j])

    def row(self, i: int) -> list[Value]:
        return [self.c.get(each, self.kind) for each in self.all[i]]

    def add(self, panel: Value, step: int, word: Callable[[int], Value]) -> None:
        """Add products: four numbers of each row, the same in every lane, times the four of each
        column at ``step`` of a panel."""
        c, d = self.c, self.dots
        first = [(step * d.vectors + j) * TOGETHER * d.lanes for j in range(d.vectors)]
        columns = [load(c, c.at(panel, at, of=I8), self.kind) for at in first]
        for i, row in enumerate(self.all):
            x = word(i)
            for total, w in zip(row, columns, strict=True):
                c.b.store(d.add(c, c.get(total, self.kind), x, w, self.signed), total)

    def add_one(self, here: Value, word: Callable[[int], Value]) -> None:
        """Do :meth:`add` for one word of each row, and move ``here``, a variable that points into
        the panel, on."""
        c, panel = self.c, self.c.get(here, PTR)
        self.add(panel, 0, lambda i: c.splat(word(i), self.dots.lanes))
        c.put(here, c.at(panel, self.dots.columns * TOGETHER, of=I8))

    def add_all(self, here: Value, runs: list[Value], steps: Value) -> None:
        """Add the products of ``steps`` words of four bytes of each run."""
        c, lanes, whole = self.c, self.dots.lanes, self.c.i(0)

        def words(i: int, k: Value, kind: Any) -> Value:
            return load(c, c.at(runs[i], c.mul(k, TOGETHER), of=I8), kind)

        if by_lane():  # a vector of each row, multiplied lane by lane
            whole = c.sub(steps, c.rem(steps, lanes))
            with c.loop(0, whole, lanes) as k:
                panel = c.get(here, PTR)
                lines = [words(i, k, self.kind) for i in range(len(runs))]
                for lane in range(lanes):
                    self.add(panel, lane, lambda i, lane=lane: c.lane(lines[i], lane))
                c.put(here, c.at(panel, lanes * self.dots.columns * TOGETHER, of=I8))
        with c.loop(whole, steps) as k:
            self.add_one(here, lambda i: words(i, k, I32))


def panels_of(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """Return [N, K] as panels of ``columns`` columns."""
    n, k = weight.shape
    filled = torch.nn.functional.pad(weight, (0, -k % TOGETHER, 0, -n % columns))
    parts = filled.reshape(-1, columns, filled.shape[1] // TOGETHER, TOGETHER)
    return parts.permute(0, 2, 1, 3).contiguous()


def starts_of(weight: torch.Tensor, columns: int, moved: int) -> torch.Tensor:
    """Return what sums begin with if ``moved`` is added to all numbers that [N, K] is multiplied
    by."""
    sums = weight.sum(1, dtype=torch.int64) * -moved
    return torch.nn.functional.pad(sums, (0, -len(sums) % columns)).to(torch.int32)


# ---- what is copied first ----------------------------------------------------------------------


@dataclass(frozen=True)
class Lines:
    """A copy of lines: ``length`` bytes from each place of ``table`` (below 0: there is no source)
    go into a line of ``line`` bytes, behind ``before`` others; these and the rest of the line are
    filled."""

    table: np.ndarray
    length: int
    line: int
    before: int = 0


def _copy(turn: bool, c: Code, words: Value, *thread: Value) -> None:
    x, y, table = c.pointers(words, 3)
    lines, length, line, before, fill = c.words(words, 3, 5)

    def put(to: Value, count: Value, source: Value | None, lanes: int) -> None:
        """Copy or fill ``count`` bytes; the last step overlaps the one before it."""
        with c.loop(0, count, lanes) as i:
            at = c.least(i, c.sub(count, lanes))
            if source is None:
                found = c.splat(c.b.trunc(fill, I8), lanes)
            else:
                found = load(c, c.at(source, at, of=I8), vec(lanes, I8))
                if turn:
                    found = c.b.xor(found, constant(I8, HIGHEST[I8], found))
            c.b.store(found, c.at(to, at, of=I8), align=1)

    def write(*what: Value | None) -> None:
        def some() -> None:
            few = c.cmp(">=", what[1], FEW)
            c.either(few, lambda: put(*what, FEW), lambda: put(*what, 1))

        c.either(c.cmp(">=", what[1], AT_ONCE), lambda: put(*what, AT_ONCE), some)

    with c.loop(*c.share(lines, *thread)) as number:
        at, to = c.index(table, number), c.at(y, c.mul(number, line), of=I8)
        after = c.add(before, length)

        def copied(at: Value = at, to: Value = to, after: Value = after) -> None:
            write(to, before, None)
            write(c.at(to, before, of=I8), length, c.at(x, at, of=I8))
            write(c.at(to, after, of=I8), c.sub(line, after), None)

        c.either(c.cmp(">=", at, 0), copied, lambda to=to: write(to, line, None))


def prepare_copy(lines: Lines, turn: bool, fill: int = 0) -> tuple[Callable[[Word], Call], Room]:
    """Return a function from the source's address to the call that copies it, with the highest bits
    flipped if ``turn``, and where the copy is. A few bytes behind the copy may be read."""
    code = load_run(f"bytes copied {turn}", partial(_copy, turn))
    count = len(lines.table)
    to = Room("bytes", count * lines.line // TOGETHER + 2)
    table = torch.from_numpy(np.ascontiguousarray(lines.table, np.int32))
    sizes = count, lines.length, lines.line, lines.before, fill
    threaded = count * lines.line > SERIAL
    return lambda x: Call(code, (x, to, table, *sizes), threaded), to


# ---- the product -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: the instruction to use, and whether bytes have a sign."""

    dots: Dots
    signed: bool


def _multiply(form: Form, c: Code, words: Value, *thread: Value) -> None:
    x, w, start, bias, y = c.pointers(words, 5)
    rows, steps, columns = c.words(words, 5, 3)
    dots, line = form.dots, c.mul(steps, TOGETHER)
    sums = Sums(c, dots, form.signed)
    room = c.variable(I32, count=dots.columns)
    panels = c.div(c.add(columns, dots.columns - 1), dots.columns)
    down = c.div(c.add(rows, dots.rows - 1), dots.rows)
    with c.loop(*c.share(c.mul(panels, down), *thread)) as job:
        panel, tile = c.split(job, down)
        first, column = c.mul(tile, dots.rows), c.mul(panel, dots.columns)
        last = c.sub(rows, 1)  # rows that fill up the tile repeat it
        numbers = [c.least(c.add(first, i), last) for i in range(dots.rows)]
        lines = [c.at(x, c.mul(row, line), of=I8) for row in numbers]
        sums.begin(c.at(start, column, of=I32))
        sums.add_all(c.variable(PTR, c.at(w, c.mul(column, line), of=I8)), lines, steps)
        for i in range(dots.rows):
            row = c.add(first, i)
            to = c.at(y, c.add(c.mul(row, columns), column), of=I32)
            beside = c.at(bias, column, of=I32)

            def stored(i: int = i, to: Value = to, beside: Value = beside) -> None:
                for j, total in enumerate(sums.row(i)):
                    more = load(c, c.at(beside, j * dots.lanes, of=I32), sums.kind)
                    c.b.store(c.b.add(total, more), c.at(to, j * dots.lanes, of=I32), align=4)

            def some(i: int = i, to: Value = to, beside: Value = beside) -> None:
                for j, total in enumerate(sums.row(i)):
                    c.b.store(total, c.at(room, j * dots.lanes, of=I32), align=4)
                with c.loop(0, c.sub(columns, column)) as n:
                    one, more = (load(c, c.at(of, n, of=I32), I32) for of in (room, beside))
                    c.store(c.b.add(one, more), c.at(to, n, of=I32))

            with c.when(c.cmp("<", row, rows)):
                c.either(c.cmp("<=", c.add(column, dots.columns), columns), stored, some)


def prepare_bytes(
    form: Form, turn: bool, rows: int, k: int, columns: int
) -> Callable[[Word, Word, Word, Word, Word], list[Call]]:
    """Return ``calls(A, panels of B, what sums begin with, bias, C)``, which takes their addresses.
    ``turn``: the highest bits of A [rows, k] are flipped first."""
    code = load_run(f"bytes {form}", partial(_multiply, form))
    threaded = 2.0 * rows * k * columns > SERIAL
    steps = -(-k // TOGETHER)
    lines = Lines(np.arange(rows) * k, k, steps * TOGETHER)
    copied = prepare_copy(lines, turn) if turn or k % TOGETHER else None

    def calls(x: Word, w: Word, start: Word, bias: Word, y: Word) -> list[Call]:
        first = [] if copied is None else [copied[0](x)]
        given = x if copied is None else copied[1]
        words = (given, w, start, bias, y, rows, steps, columns)
        return [*first, Call(code, words, threaded)]

    return calls
