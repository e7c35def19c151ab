"""A formula of a rule as vector code: the statements, and the walk along a row of elements.

Rows are what a pass goes through: a flat chunk is one, a state in 8 bits has rows of 256 elements,
matrices have theirs. Sums are made in float64 after a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from llvmlite import ir

from deuteron.codegen.llvm import F64, I32, I64, Code, Value, lanes_of, vec
from deuteron.codegen.llvm_compute import Arithmetic
from deuteron.codegen.llvm_math import mix
from deuteron.codegen.llvm_types import STORED
from deuteron.codegen.scalar import Reduce
from deuteron.ir.dtype import DType
from deuteron.kernels.cpu.sweep import Gathered, blocks, steps
from deuteron.kernels.optim import GROUP, SEED, Body, Step, arguments
from deuteron.ops import random
from deuteron.ops.formula import Const

POINTERS = "table grads where rows sums firsts".split()
COUNTS = "tensors chunks stride".split()


class Row(NamedTuple):
    """A row of elements: where it begins in its tensor, how many there are, and the numbers of the
    row, of the first element of the columns, and of the matrix."""

    at: Value
    count: Value
    places: Mapping[str, Value] = {}


class Writer(Arithmetic):
    """A kernel under construction; the words of its call are the header, first and last item."""

    def __init__(self, c: Code, step: Step, words: Value, kinds: Mapping[str, DType], of: Any):
        self.c, self.step, self.kinds, self.float = c, step, kinds, of
        header = c.pointer(words, 0)
        self.first, self.last = c.word(words, 1), c.word(words, 2)
        self.given = {name: c.pointer(header, k) for k, name in enumerate(POINTERS)}
        self.count = {name: c.word(header, len(POINTERS) + k) for k, name in enumerate(COUNTS)}

    @contextmanager
    def items(self, thread: Value, threads: Value) -> Iterator[Value]:
        """A thread's share of the chunks or tensors."""
        c = self.c
        begin, end = c.share(c.sub(self.last, self.first), thread, threads)
        with c.loop(c.add(self.first, begin), c.add(self.first, end)) as item:
            yield item

    def chunk(self, chunk: Value) -> Value:
        """Look up the chunk's tensor and its numbers; answers the chunk's number in the tensor."""
        c, where = self.c, self.given["where"]
        self.t = c.index(where, chunk)
        self.known: dict[Any, Value] = self.numbers(self.t)
        return c.index(where, c.add(self.count["chunks"], chunk))

    def numbers(self, t: Value) -> dict[Any, Value]:
        c, found = self.c, {}
        row = c.at(self.given["rows"], c.mul(t, self.count["stride"]), of=F64)
        for name, k in self.step.numbers.items():
            value = c.load(c.at(row, k, of=F64), of=F64)
            found[name] = self.narrow(value)
        return found

    def entry(self, row: int) -> Value:
        """What a row of the table has for the tensor, as a number."""
        return self.c.word(self.given["table"], self._in_table(row))

    def home(self, name: str) -> Value:
        """The address of one of the tensor's tensors."""
        c = self.c
        if name == "g":
            return c.pointer(self.given["grads"], self.t)
        return c.pointer(self.given["table"], self._in_table(self.step.names.place(name)))

    def _in_table(self, row: int) -> Value:
        return self.c.add(self.c.mul(self.count["tensors"], row), self.t)

    # memory and numbers

    def read(self, name: str, base: Value, i: Value, lanes: int = 1) -> Value:
        b, kind = self.c.b, self.kinds[name]
        where, stored = self._at(name, base, i), vec(lanes, STORED[kind.short])
        raw = b.load(where, typ=stored, align=kind.bits // 8)
        if kind.is_float:
            return self.from_memory(raw, kind)
        whole = (b.zext if kind.kind == "uint" else b.sext)(raw, vec(lanes, I32))
        return b.sitofp(whole, vec(lanes, self.float))

    def write(self, name: str, value: Value, base: Value, i: Value) -> None:
        b, kind = self.c.b, self.kinds[name]
        if not kind.is_float:
            lanes = lanes_of(value)
            value = b.trunc(b.fptosi(value, vec(lanes, I32)), vec(lanes, STORED[kind.short]))
        else:
            value = self.to_memory(value, kind)
        b.store(value, self._at(name, base, i), align=kind.bits // 8)

    def _at(self, name: str, base: Value, i: Value) -> Value:
        return self.c.at(base, i, of=STORED[self.kinds[name].short])

    def wide(self, x: Value) -> Value:
        lanes = lanes_of(x)
        return x if self.float == F64 else self.c.b.fpext(x, vec(lanes, F64))

    def narrow(self, x: Value) -> Value:
        return x if self.float == F64 else self.c.b.fptrunc(x, vec(lanes_of(x), self.float))

    def zero(self) -> Value:
        """A variable in float64, 0 now."""
        room = self.c.variable(F64)
        self.c.b.store(ir.Constant(F64, 0.0), room)
        return room

    def value(self, a: Any, lanes: int, here: Mapping[Any, Value]) -> Value:
        if isinstance(a, Const):
            return self.splat(self.number(a.value, a.kind), lanes)
        return here[a] if a in here else self.splat(self.known[a], lanes)

    def run(self, body: Body, known: dict[Any, Value]) -> dict[str, Value]:
        """The results of a formula of single numbers."""
        self.known = known
        for s in body.statements:
            known[s.name] = self.compute(s, [self.value(a, 1, known) for a in s.args])
        return {name: known[a] for name, a in body.results.items()}

    def compute(self, s: Any, args: list[Value]) -> Value:
        if s.op == "div" and isinstance(s.args[1], Const):
            return self._quotient(args[0], float(s.args[1].value))
        return super().compute(s, args)

    def _quotient(self, x: Value, y: float) -> Value:
        """The product with the reciprocal, corrected by its remainder: rounded as a division where
        x is a whole number, as levels of 8 bits are, in a third of the time."""
        c, lanes = self.c, lanes_of(x)
        inverse, minus = (self.splat(ir.Constant(self.float, k), lanes) for k in (1.0 / y, -y))
        near = c.b.fmul(x, inverse)
        return c.fma(c.fma(near, minus, x), inverse, near)

    def noise(self, s: Any, row: Row, i: Value, lanes: int) -> Value:
        """See deuteron.kernels.optim."""
        c, b = self.c, self.c.b
        seed = c.mul(b.fptosi(self.known[s.args[0]], I64), SEED)
        place = b.trunc(c.add(seed, self.t, row.at, i, int(s.args[1].value)), I32)
        count = ir.Constant(vec(lanes, I32), list(range(lanes)) if lanes > 1 else 0)
        drop = self.splat(ir.Constant(I32, 32 - random.BITS), lanes)
        bits = b.lshr(mix(c, b.add(self.splat(place, lanes), count)), drop)
        unit = self.splat(ir.Constant(self.float, 2.0**-random.BITS), lanes)
        return b.fmul(b.sitofp(bits, vec(lanes, self.float)), unit)


class Order:
    """In which order the statements of a pass are computed: numbers of the row that are known
    before its elements, the elements, numbers of the row that come from them, and the elements once
    more where these are needed for them. ``kept`` has what the first walk makes for the second."""

    def __init__(self, step: Step) -> None:
        body, fast = step.body, {n for n in step.reads if step.level(n) in ("element", "column")}
        self.before, self.between = [], []
        self.walks: tuple[list[Any], list[Any]] = ([], [])
        late: set[Any] = set()
        for s in body.statements:
            used = set(arguments(s))
            if isinstance(s, Reduce):
                self.walks[0].append(s)
            elif used & fast or s.op == "noise":
                self.walks[bool(used & late)].append(s)
                fast.add(s.name)
            else:
                (self.between if used & late else self.before).append(s)
            if isinstance(s, Reduce) or used & late:
                late.add(s.name)
        results = set(body.results.values())
        for s in reversed(self.walks[0].copy()):  # what only the second walk needs is made there
            users = [u for u in self.walks[0] if s.name in arguments(u)]
            if not isinstance(s, Reduce) and not users and s.name not in results:
                self.walks[0].remove(s)
                self.walks[1].insert(0, s)
        made = {s.name for s in self.walks[0] if not isinstance(s, Reduce)}
        self.kept = sorted({a for s in self.walks[1] for a in arguments(s) if a in made})
        elements = {n: v for n, v in step.writes.items() if step.level(n) == "element"}
        self.writes = [{n: v for n, v in elements.items() if (v in late) == k} for k in (0, 1)]
        self.writes_row = {n: v for n, v in step.writes.items() if step.level(n) == "row"}
        self.reads = [
            [n for n in step.reads if n in fast and any(n in arguments(s) for s in walk)]
            for walk in self.walks
        ]


class Reduced:
    """A sum or the largest of many numbers: in the type of arithmetic of a few of them, then in
    float64."""

    def __init__(self, w: Writer, op: str) -> None:
        self.w, c = w, w.c
        self.op = c.fmax if op == "row_max" else c.b.fadd
        self.few, self.all = Gathered(c, self.op, 0.0, w.float), c.variable(F64)

    def clear(self) -> None:
        self.few.clear()
        self.w.c.b.store(ir.Constant(F64, 0.0), self.all)

    def fold(self) -> None:
        c = self.w.c
        c.b.store(self.op(c.get(self.all, F64), self.w.wide(self.few.total())), self.all)
        self.few.clear()


class Pass(Writer):
    """A pass over elements, a row at a time."""

    def __init__(self, c: Code, step: Step, words: Value, kinds: Mapping[str, DType], of: Any):
        super().__init__(c, step, words, kinds, of)
        self.order = Order(step)
        self.rooms = {name: c.variable(of, count=GROUP) for name in self.order.kept}
        reduced = [s for s in self.order.walks[0] if isinstance(s, Reduce)]
        self.of_rows = {s.name: Reduced(self, s.op) for s in reduced if s.op != "column_sum"}
        self.of_chunk = {k: Reduced(self, "sum") for k in step.sums}
        self.all = (*self.of_rows.values(), *self.of_chunk.values())

    def begin(self) -> None:
        """Of a chunk, once its tensor is known."""
        self.homes = {name: self.home(name) for name in self.step.touches}
        for one in self.of_chunk.values():
            one.clear()

    def end(self, chunk: Value) -> None:
        c = self.c
        for k, one in self.of_chunk.items():
            place = c.add(c.mul(self.count["chunks"], k), chunk)
            c.b.store(c.get(one.all, F64), c.at(self.given["sums"], place, of=F64))

    def row(self, row: Row) -> None:
        c, step, before = self.c, self.step, dict(self.known)
        for name in step.reads:
            if (level := step.level(name)) in ("row", "matrix"):
                self.known[name] = self.read(name, self.homes[name], row.places[level])
        self._numbers(self.order.before)
        for one in self.of_rows.values():
            one.clear()

        def fold() -> None:
            for one in self.all:
                one.fold()

        blocks(c, row.count, lambda i, lanes: self._elements(0, row, i, lanes), fold)
        for name, one in self.of_rows.items():
            self.known[name] = self.narrow(c.get(one.all, F64))
        self._numbers(self.order.between)
        for name, value in self.order.writes_row.items():
            self.write(name, self.known[value], self.homes[name], row.places["row"])
        if self.order.walks[1]:
            steps(c, row.count, lambda i, lanes: self._elements(1, row, i, lanes))
        self.known = before

    def _numbers(self, statements: Sequence[Any]) -> None:
        for s in statements:
            self.known[s.name] = self.compute(s, [self.value(a, 1, self.known) for a in s.args])

    def _elements(self, walk: int, row: Row, i: Value, lanes: int) -> None:
        """``lanes`` elements, the first of them element ``i`` of the row."""
        c, order = self.c, self.order
        here: dict[Any, Value] = {}
        for name in order.reads[walk]:
            level = self.step.level(name)
            first = row.at if level == "element" else row.places[level]
            here[name] = self.read(name, self.homes[name], c.add(first, i), lanes)
        for name, room in self.rooms.items() if walk else ():
            here[name] = c.load(c.at(room, i, of=self.float), lanes, of=self.float)
        for s in order.walks[walk]:
            if isinstance(s, Reduce):
                self._reduce(s, row, i, self.value(s.source, lanes, here))
            elif s.op == "noise":
                here[s.name] = self.noise(s, row, i, lanes)
            else:
                here[s.name] = self.compute(s, [self.value(a, lanes, here) for a in s.args])
        for name, room in self.rooms.items() if not walk else ():
            c.b.store(here[name], c.at(room, i, of=self.float), align=4)
        for name, value in order.writes[walk].items():
            self.write(name, here[value], self.homes[name], c.add(row.at, i))
        for k, value in self.step.sums.items() if not walk else ():
            self.of_chunk[k].few.take(here[value], lanes)

    def _reduce(self, s: Reduce, row: Row, i: Value, value: Value) -> None:
        if s.name in self.of_rows:
            self.of_rows[s.name].few.take(value, lanes_of(value))
            return
        # of columns: in memory, from row to row
        (name,) = (n for n, v in self.step.writes.items() if v == s.name)
        home, at = self.homes[name], self.c.add(row.places["part"], i)
        old = self.read(name, home, at, lanes_of(value))
        self.write(name, self.c.b.fadd(old, value), home, at)
