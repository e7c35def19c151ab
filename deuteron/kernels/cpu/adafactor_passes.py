"""Adafactor of matrices: their second moments as the product of a column and a row.

    row ← row + w·(mean of g² along rows − row)    col likewise    U = row·col / max(mean row, ε₁)
    u = g / √max(U, ε₁²)    p ← keep·p − ρ·max(rms p, ε₂) / max(1, rms u / d)·u

1/√U is a product of two numbers, one of the row and one of the column, so no element costs a root
or a division. Five passes share a list of chunks (rows of a matrix, or several small matrices):

    sums      row, the chunk's sums by column, Σ p²        reads g, p
    moments   col, and the numbers of rows and columns     reads what sums left
    length    Σ u²                                         reads g
    rates     the pace of a tensor
    apply     p, and its average                           reads g, p, writes p

    bytes = size · (3 · g + 3 · p), of which size · (g + 2 · p) from memory: tensors go through all
    passes in bundles that stay in L2

Sums are added up by chunk, so the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from math import prod
from typing import Any

from llvmlite import ir

from deuteron.codegen.llvm import F64, Code, Loaded, Value, entry, lanes_of, load, vec, width
from deuteron.ir.dtype import DType
from deuteron.kernels.cpu.optim import Writer
from deuteron.kernels.cpu.sweep import Gathered, blocks, steps
from deuteron.kernels.optim import Program

CHUNK = 16384  # elements
TALL = 256  # rows of a chunk: sums of columns are that long before they go on in float64
POINTERS = (
    "table",
    "grads",
    "numbers",
    "tensors",
    "chunks",
    "spans",
    "rows",
    "columns",
    "parts",
    "p_squares",
    "u_squares",
    "paces",
)
COUNTS = ("tensors", "chunks", "spans")


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut into chunks. Column sums, and numbers of rows and columns, are at
    places of their own in memory that the next bundle takes over."""

    rows: int
    columns: int
    matrices: int
    tall: int  # rows of a chunk
    parts: int  # chunks of a matrix
    together: int  # matrices of a chunk
    row_at: int
    column_at: int
    part_at: int
    first: int  # chunk
    last: int  # chunk, the first of the next tensor

    @property
    def spans(self) -> int:
        """Groups of matrices that are in the same chunks."""
        return -(-self.matrices // self.together) if self.rows and self.columns else 0

    @property
    def ends(self) -> tuple[int, int, int]:
        """Where the numbers of rows, of columns, and the sums of the next tensor may begin."""
        return (
            self.row_at + self.matrices * self.rows,
            self.column_at + self.matrices * self.columns,
            self.part_at + self.matrices * self.parts * self.columns,
        )


def cut(shape: Sequence[int], at: tuple[int, int, int], first: int) -> Cut:
    *outer, rows, columns = shape
    tall = max(1, min(rows, TALL, CHUNK // max(columns, 1)))
    parts = -(-rows // tall)
    together = 1 if parts > 1 else max(1, CHUNK // max(rows * columns, 1))
    made = Cut(rows, columns, prod(outer), tall, parts, together, *at, first, first)
    return Cut(*astuple(made)[:-1], first + made.spans * parts)


# ---- the passes


class _Pass(Writer):
    """One pass under construction; ``v`` is the role of row and column."""

    def __init__(
        self, c: Code, program: Program, dtypes: Sequence[DType], wide: bool, words: Value
    ) -> None:
        super().__init__(c, program, dtypes, wide)
        header = c.pointer(words, 0)
        self.first, self.last = c.word(words, 1), c.word(words, 2)
        self.given = {name: c.pointer(header, k) for k, name in enumerate(POINTERS)}
        self.count = {name: c.word(header, len(POINTERS) + k) for k, name in enumerate(COUNTS)}
        self.n = self.numbers(self.given["numbers"])

    def _home(self, place: int, t: Value) -> Value:
        """Of the tensor's parameter (1), row (2), column (3) or average (4)."""
        c = self.c
        return c.pointer(self.given["table"], c.add(c.mul(self.count["tensors"], place), t))

    def _cut(self, t: Value) -> dict[str, Value]:
        c, tensors = self.c, self.count["tensors"]
        names = [field.name for field in fields(Cut)]
        return {
            name: c.word(self.given["tensors"], c.add(c.mul(tensors, k), t))
            for k, name in enumerate(names)
        }

    def _kept(self, name: str, *offset: Value) -> Value:
        """An address in the memory of ``rows``, ``columns`` or ``parts``."""
        return self.c.at(self.given[name], *offset, of=self.float)

    def _load(self, where: Value, i: Value, lanes: int = 1) -> Value:
        return self.c.load(self.c.at(where, i, of=self.float), lanes, of=self.float)

    def _store(self, value: Value, where: Value, i: Value) -> None:
        self.c.store(value, self.c.at(where, i, of=self.float))

    def _narrow(self, x: Value) -> Value:
        return x if self.float == F64 else self.c.b.fptrunc(x, vec(lanes_of(x)))

    def _widen(self, x: Value) -> Value:
        return x if self.float == F64 else self.c.b.fpext(x, vec(lanes_of(x), F64))

    def _mean(self, total: Value, count: Value) -> Value:
        """Of numbers that were added up in float64."""
        over = self.splat(self.c.b.sitofp(count, F64), lanes_of(total))
        return self._narrow(self.c.b.fdiv(total, over))

    def _moved(self, old: Value, mean: Value) -> Value:
        """A moment after this step."""
        b, weight = self.c.b, self.splat(self.n["weight"], lanes_of(old))
        return b.fadd(old, b.fmul(weight, b.fsub(mean, old)))

    def _inverse_root(self, x: Value) -> Value:
        return self.c.b.fdiv(self._number(1.0, x), self.c.intrinsic("sqrt", x))

    def _totals(self, count: Value, terms: Sequence[Value], each: Callable[..., Any]) -> None:
        """Add what ``each(i, lanes)`` gives, for all i, to variables in float64."""
        c = self.c
        found = [Gathered(c, c.b.fadd, 0.0, self.float) for _ in terms]
        for part in found:
            part.clear()

        def write(i: Value, lanes: int) -> None:
            for part, value in zip(found, each(i, lanes), strict=True):
                part.take(value, lanes)

        def fold() -> None:
            for part, total in zip(found, terms, strict=True):
                c.b.store(c.b.fadd(c.get(total, F64), self._widen(part.total())), total)
                part.clear()

        blocks(c, count, write, fold)

    def _zero(self) -> Value:
        """A variable in float64, 0 now."""
        room = self.c.variable(F64)
        self.c.b.store(ir.Constant(F64, 0.0), room)
        return room

    @contextmanager
    def _of_chunks(self, thread: Value, threads: Value) -> Iterator[tuple[Value, Value, Value]]:
        """A thread's chunks: the chunk, its tensor, its number in the tensor."""
        c, total = self.c, self.count["chunks"]
        begin, end = c.share(c.sub(self.last, self.first), thread, threads)
        with c.loop(c.add(self.first, begin), c.add(self.first, end)) as chunk:
            where = self.given["chunks"]
            yield chunk, c.index(where, chunk), c.index(where, c.add(total, chunk))

    def _matrices(self, cut: dict[str, Value], span: Value) -> tuple[Value, Value]:
        low = self.c.mul(span, cut["together"])
        return low, self.c.least(self.c.add(low, cut["together"]), cut["matrices"])

    @contextmanager
    def _of_rows(self, cut: dict[str, Value], b: Value, part: Value) -> Iterator[Value]:
        """The rows of one matrix that a chunk has, counted through the tensor."""
        c = self.c
        low = c.mul(part, cut["tall"])
        high = c.least(c.add(low, cut["tall"]), cut["rows"])
        base = c.mul(b, cut["rows"])
        with c.loop(c.add(base, low), c.add(base, high)) as row:
            yield row

    def _grad(self, base: Value, i: Value, lanes: int) -> Value:
        g = self.read("g", base, i, lanes)
        return self.c.b.fmul(g, self.splat(self.n["gscale"], lanes))

    # what each of them writes

    def sums(self, thread: Value, threads: Value) -> None:
        c = self.c
        with self._of_chunks(thread, threads) as (chunk, t, k):
            cut, squares = self._cut(t), self._zero()
            g, p, moments = c.pointer(self.given["grads"], t), self._home(1, t), self._home(2, t)
            columns, part = cut["columns"], c.rem(k, cut["parts"])
            with c.loop(*self._matrices(cut, c.div(k, cut["parts"]))) as b:
                place = c.mul(c.add(c.mul(b, cut["parts"]), part), columns)
                below = self._kept("parts", cut["part_at"], place)
                steps(c, columns, lambda i, n: self._store(self._zeros(n), below, i))
                with self._of_rows(cut, b, part) as row:
                    total, at = self._zero(), c.mul(row, columns)

                    def each(i: Value, lanes: int) -> Any:
                        here, old = c.add(at, i), self._load(below, i, lanes)
                        grad, param = self._grad(g, here, lanes), self.read("p", p, here, lanes)
                        square = c.b.fmul(grad, grad)
                        self._store(c.b.fadd(old, square), below, i)
                        return square, c.b.fmul(param, param)

                    self._totals(columns, [total, squares], each)
                    mean = self._mean(c.get(total, F64), columns)
                    new = self._moved(self.read("v", moments, row, 1), mean)
                    self.write("v", new, moments, row)
                    self._store(new, self._kept("rows", cut["row_at"]), row)
            c.b.store(c.get(squares, F64), c.at(self.given["p_squares"], chunk, of=F64))

    def _zeros(self, lanes: int) -> Value:
        return ir.Constant(vec(lanes, self.float), None)

    def moments(self, thread: Value, threads: Value) -> None:
        c = self.c
        begin, end = c.share(c.sub(self.last, self.first), thread, threads)
        with c.loop(c.add(self.first, begin), c.add(self.first, end)) as item:
            where = self.given["spans"]
            t, span = c.index(where, item), c.index(where, c.add(self.count["spans"], item))
            cut = self._cut(t)
            with c.loop(*self._matrices(cut, span)) as b:
                self._rows_of(cut, b)
                self._columns_of(cut, b, self._home(3, t))

    def _rows_of(self, cut: dict[str, Value], b: Value) -> None:
        """The number of each row: 1/√(row / max(mean row, ε₁))."""
        c, total = self.c, self._zero()
        rows = self._kept("rows", cut["row_at"], c.mul(b, cut["rows"]))
        self._totals(cut["rows"], [total], lambda i, lanes: [self._load(rows, i, lanes)])
        mean = c.fmax(self._mean(c.get(total, F64), cut["rows"]), self.n["eps1"])

        def each(i: Value, lanes: int) -> None:
            share = c.b.fdiv(self._load(rows, i, lanes), self.splat(mean, lanes))
            self._store(self._inverse_root(share), rows, i)

        steps(c, cut["rows"], each)

    def _columns_of(self, cut: dict[str, Value], b: Value, moments: Value) -> None:
        """The moment of each column, and its number: 1/√col."""
        c, columns = self.c, cut["columns"]
        at = c.mul(b, columns)
        numbers = self._kept("columns", cut["column_at"], at)
        below = self._kept("parts", cut["part_at"], c.mul(at, cut["parts"]))

        def each(i: Value, lanes: int) -> None:
            total = c.variable(vec(lanes, F64))
            c.b.store(ir.Constant(vec(lanes, F64), None), total)
            with c.loop(0, cut["parts"]) as part:
                more = self._load(below, c.add(c.mul(part, columns), i), lanes)
                c.b.store(c.b.fadd(c.get(total, vec(lanes, F64)), self._widen(more)), total)
            mean = self._mean(c.get(total, vec(lanes, F64)), cut["rows"])
            new = self._moved(self.read("v", moments, c.add(at, i), lanes), mean)
            self.write("v", new, moments, c.add(at, i))
            self._store(self._inverse_root(new), numbers, i)

        steps(c, columns, each)

    def _updates(self, thread: Value, threads: Value, row_of: Callable[..., None]) -> None:
        """``row_of(tensor, columns, first element, u)`` for all rows; u(i, lanes) is in the row."""
        c = self.c
        most = c.b.fdiv(self._number(1.0, self.n["eps1"]), self.n["eps1"])
        with self._of_chunks(thread, threads) as (chunk, t, k):
            cut, g = self._cut(t), c.pointer(self.given["grads"], t)
            columns, part = cut["columns"], c.rem(k, cut["parts"])
            with c.loop(*self._matrices(cut, c.div(k, cut["parts"]))) as b:
                numbers = self._kept("columns", cut["column_at"], c.mul(b, columns))
                with self._of_rows(cut, b, part) as row:
                    own = self._load(self._kept("rows", cut["row_at"]), row)
                    at = c.mul(row, columns)

                    def u(i: Value, lanes: int) -> Value:
                        both = c.b.fmul(self._load(numbers, i, lanes), self.splat(own, lanes))
                        both = c.fmin(both, self.splat(most, lanes))
                        return c.b.fmul(self._grad(g, c.add(at, i), lanes), both)

                    row_of(chunk, t, columns, at, u)

    def length(self, thread: Value, threads: Value) -> None:
        c = self.c

        def row_of(chunk: Value, t: Value, columns: Value, at: Value, u: Any) -> None:
            def square(i: Value, lanes: int) -> list[Value]:
                value = u(i, lanes)
                return [c.b.fmul(value, value)]

            self._totals(columns, [c.at(self.given["u_squares"], chunk, of=F64)], square)

        begin, end = c.share(c.sub(self.last, self.first), thread, threads)
        with c.loop(c.add(self.first, begin), c.add(self.first, end)) as chunk:
            c.b.store(ir.Constant(F64, 0.0), c.at(self.given["u_squares"], chunk, of=F64))
        self._updates(thread, threads, row_of)

    def rates(self, thread: Value, threads: Value) -> None:
        c, b = self.c, self.c.b
        begin, end = c.share(c.sub(self.last, self.first), thread, threads)
        rho, eps2, d = (self._widen(self.n[k]) for k in ("rho", "eps2", "d"))
        with c.loop(c.add(self.first, begin), c.add(self.first, end)) as t:
            cut, totals = self._cut(t), [self._zero(), self._zero()]
            with c.loop(cut["first"], cut["last"]) as chunk:
                for total, name in zip(totals, ("p_squares", "u_squares"), strict=True):
                    more = c.load(c.at(self.given[name], chunk, of=F64), of=F64)
                    b.store(b.fadd(c.get(total, F64), more), total)
            size = b.sitofp(c.word(self.given["table"], t), F64)
            p, u = (c.intrinsic("sqrt", b.fdiv(c.get(x, F64), size)) for x in totals)
            # of a nan and a number this maximum is the number: see optim/factored.py
            over = c.intrinsic("maxnum", b.fdiv(u, d), ir.Constant(F64, 1.0))
            pace = b.fdiv(b.fmul(rho, c.intrinsic("maxnum", p, eps2)), over)
            b.store(pace, c.at(self.given["paces"], t, of=F64))

    def apply(self, thread: Value, threads: Value) -> None:
        c, b = self.c, self.c.b

        def row_of(chunk: Value, t: Value, columns: Value, at: Value, u: Any) -> None:
            p, pace = self._home(1, t), c.load(c.at(self.given["paces"], t, of=F64), of=F64)
            pace = self._narrow(pace)

            def each(i: Value, lanes: int) -> None:
                here = c.add(at, i)
                kept = b.fmul(self.splat(self.n["keep"], lanes), self.read("p", p, here, lanes))
                new = b.fsub(kept, b.fmul(self.splat(pace, lanes), u(i, lanes)))
                self.write("p", new, p, here)
                if "ema" in self.dtypes:
                    average = self._home(4, t)
                    old = self.read("ema", average, here, lanes)
                    part = b.fmul(self.splat(self.n["ema_rate"], lanes), b.fsub(new, old))
                    self.write("ema", b.fadd(old, part), average, here)

            steps(c, columns, each)

        self._updates(thread, threads, row_of)


PASSES = {
    "sums": "chunk",
    "moments": "span",
    "length": "chunk",
    "rates": "tensor",
    "apply": "chunk",
}


def compiled(name: str, program: Program, dtypes: Sequence[DType]) -> Loaded:
    wide = any(d.short == "f64" for d in dtypes)

    def make(module: Any) -> None:
        def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
            getattr(_Pass(c, program, dtypes, wide, words), name)(thread, threads)

        entry(module, "run", body)

    kinds = [d.short for d in dtypes]
    return load(f"adafactor {name} {program.roles} {kinds} of {width()}", make)
