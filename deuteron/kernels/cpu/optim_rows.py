"""A formula of a rule as vector code: its statements, and the walk along a row of elements.

A pass goes through rows: a flat chunk is a single one, a state in 8 bits has rows of 256 elements,
matrices have their own. After a few numbers sums go on in float64.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.llvm import F64, I32, I64, Code, Value, lanes_of, vec
from deuteron.codegen.llvm_compute import STORED, Arithmetic
from deuteron.codegen.llvm_math import mix
from deuteron.codegen.scalar import Reduce
from deuteron.ir.dtype import DType
from deuteron.kernels.cpu.sweep import Gathered, blocks, steps
from deuteron.kernels.optim import GROUP, GROUPS, SEED, Step, arguments, level_of
from deuteron.ops import random
from deuteron.ops.formula import Const

POINTERS = "table grads where rows sums firsts".split()
COUNTS = "tensors chunks stride".split()
Known = dict[Any, Value]  # values by the names of a formula


class Writer(Arithmetic):
    """A kernel under construction; the words of its call are the header, first and last item."""

    def __init__(self, c: Code, step: Step, words: Value, kinds: Mapping[str, DType], of: Any):
        self.c, self.step, self.kinds, self.float = c, step, kinds, of
        header = c.pointer(words, 0)
        self.first, self.last = c.word(words, 1), c.word(words, 2)
        self.given = {name: c.pointer(header, k) for k, name in enumerate(POINTERS)}
        self.count = {name: c.word(header, len(POINTERS) + k) for k, name in enumerate(COUNTS)}
        self.known: Known = {}  # numbers that are the same for a row, or for the whole tensor

    def begin(self, t: Value) -> None:
        """Begin a tensor: load its numbers, and the addresses of all that belongs to it."""
        c, rule = self.c, self.step.rule
        self.t, self.homes, self.known = t, {"g": c.pointer(self.given["grads"], t)}, {}
        for name in (n for n in rule.tensors if n != "g"):
            at = c.add(c.mul(self.count["tensors"], rule.place(name)), t)
            self.homes[name] = c.pointer(self.given["table"], at)
        row = c.at(self.given["rows"], c.mul(t, self.count["stride"]), of=F64)
        for name, k in self.step.numbers.items():
            self.known[name] = self.narrow(c.load(c.at(row, k, of=F64), of=F64))

    def entry(self, row: int) -> Value:
        """Return what a row of the table holds for the current tensor, as a number."""
        c = self.c
        return c.word(self.given["table"], c.add(c.mul(self.count["tensors"], row), self.t))

    # memory

    def read(self, name: str, i: Value, lanes: int = 1) -> Value:
        b, kind = self.c.b, self.kinds[name]
        where = self.c.at(self.homes[name], i, of=STORED[kind.short])
        raw = b.load(where, typ=vec(lanes, STORED[kind.short]), align=kind.bits // 8)
        if kind.is_float:
            return self.from_memory(raw, kind)
        whole = (b.zext if kind.kind == "uint" else b.sext)(raw, vec(lanes, I32))
        return b.sitofp(whole, vec(lanes, self.float))

    def write(self, name: str, value: Value, i: Value) -> None:
        b, kind, lanes = self.c.b, self.kinds[name], lanes_of(value)
        if kind.is_float:
            value = self.to_memory(value, kind)
        else:
            value = b.trunc(b.fptosi(value, vec(lanes, I32)), vec(lanes, STORED[kind.short]))
        where = self.c.at(self.homes[name], i, of=STORED[kind.short])
        b.store(value, where, align=kind.bits // 8)

    # numbers

    def constant(self, value: float, lanes: int) -> Value:
        return self.splat(ir.Constant(self.float, value), lanes)

    def wide(self, x: Value) -> Value:
        return x if self.float == F64 else self.c.b.fpext(x, vec(lanes_of(x), F64))

    def narrow(self, x: Value) -> Value:
        return x if self.float == F64 else self.c.b.fptrunc(x, vec(lanes_of(x), self.float))

    def run(self, statements: Sequence[Any], here: Known, lanes: int = 1) -> Known:
        """Add the results of statements to ``here``, and return it."""
        for s in statements:
            here[s.name] = self.compute(s, [self.value(a, here, lanes) for a in s.args])
        return here

    def value(self, a: Any, here: Known, lanes: int) -> Value:
        if isinstance(a, Const):
            return self.splat(self.number(a.value, a.kind), lanes)
        return here[a] if a in here else self.splat(self.known[a], lanes)

    def compute(self, s: Any, args: list[Value]) -> Value:
        if s.op != "div" or not isinstance(s.args[1], Const):
            return super().compute(s, args)
        # The product with the reciprocal, corrected by its remainder: rounded as a division where x
        # is a whole number, as levels of 8 bits are, in a third of the time.
        c, x, y = self.c, args[0], float(s.args[1].value)
        inverse, minus = (self.constant(k, lanes_of(x)) for k in (1.0 / y, -y))
        near = c.b.fmul(x, inverse)
        return c.fma(c.fma(near, minus, x), inverse, near)

    def noise(self, s: Any, place: Value, lanes: int) -> Value:
        """Return the noise of the element at ``place`` and of those after it; see
        deuteron.kernels.optim."""
        c, b = self.c, self.c.b
        seed = c.mul(b.fptosi(self.known[s.args[0]], I64), SEED)
        first = b.trunc(c.add(seed, self.t, place, int(s.args[1].value)), I32)
        count = ir.Constant(vec(lanes, I32), list(range(lanes)) if lanes > 1 else 0)
        drop = self.splat(ir.Constant(I32, 32 - random.BITS), lanes)
        bits = b.lshr(mix(c, b.add(self.splat(first, lanes), count)), drop)
        return b.fmul(b.sitofp(bits, vec(lanes, self.float)), self.constant(2**-random.BITS, lanes))


class Reduced:
    """A sum or a maximum of many numbers: of a few in the type of the arithmetic, which ``fold``
    takes into one of all in float64."""

    def __init__(self, w: Writer, op: str = "sum") -> None:
        self.w, self.op = w, w.c.fmax if op == "row_max" else w.c.b.fadd
        self.few, self.all = Gathered(w.c, self.op, 0.0, w.float), w.c.variable(F64)

    def clear(self) -> None:
        self.few.clear()
        self.w.c.b.store(ir.Constant(F64, 0.0), self.all)

    def fold(self) -> None:
        self.w.c.b.store(self.op(self.total(), self.w.wide(self.few.total())), self.all)
        self.few.clear()

    def total(self) -> Value:
        return self.w.c.get(self.all, F64)


class Pass(Writer):
    """A pass over elements, a row at a time. If elements need a number that comes from their whole
    row, such as its maximum, the row is walked twice; a group is short, so what the second walk
    needs of the first is kept."""

    def __init__(self, c: Code, step: Step, words: Value, kinds: Mapping[str, DType], of: Any):
        super().__init__(c, step, words, kinds, of)
        reduced = [s for s in step.body.statements if isinstance(s, Reduce)]
        self.of_rows = {s.name: Reduced(self, s.op) for s in reduced if s.op != "column_sum"}
        self.of_chunk = {k: Reduced(self) for k in step.sums}
        self.elements = {n: v for n, v in step.writes.items() if level_of(n) == "element"}
        self._order(step, [s.name for s in reduced])

    def _order(self, step: Step, reduced: list[str]) -> None:
        """Divide up the statements: of rows before and after their elements, of elements by
        walk."""
        fast = {n for n in step.reads if level_of(n) in ("element", "column")}
        late, self.before, self.between = set(self.of_rows), [], []
        for s in step.body.statements:
            used = set(arguments(s))
            late |= {s.name} if used & late else set()
            if used & fast or s.op == "noise":
                fast |= {s.name} - set(self.of_rows)
            elif s.name not in self.of_rows:
                (self.between if s.name in late else self.before).append(s)
        last = list(self.elements.values())
        twice = any(name in late for name in last)
        first = [*reduced, *step.sums.values(), *(() if twice else last)]
        walks = [step.body.needed(first), step.body.needed(last, self.of_rows) if twice else []]
        self.kept = {}
        if twice and step.rule.walk == GROUPS:
            done = {s.name for s in walks[0] if s.op != "noise" and s.kind == "float"}
            done &= fast
            later = {a for s in walks[1] if s.name not in done for a in arguments(s)}
            self.kept = {n: self.c.variable(self.float, count=GROUP) for n in sorted(done & later)}
            walks[1] = step.body.needed(last, {**self.of_rows, **self.kept})
        self.walks = [[s for s in walk if s.name in {*fast, *reduced}] for walk in walks]

    def row(self, at: Value, count: Value, **places: Value) -> None:
        """``count`` elements from ``at`` on; ``places`` are the numbers of the row and the matrix,
        and where the numbers of its columns and their sums begin."""
        c, step, before = self.c, self.step, dict(self.known)
        for name in step.reads:
            if (level := level_of(name)) in ("row", "matrix"):
                self.known[name] = self.read(name, places[level])
        self.run(self.before, self.known)
        for one in self.of_rows.values():
            one.clear()

        def fold() -> None:
            for one in (*self.of_rows.values(), *self.of_chunk.values()):
                one.fold()

        blocks(c, count, lambda i, lanes: self._elements(0, at, i, lanes, places), fold)
        self.known |= {name: self.narrow(one.total()) for name, one in self.of_rows.items()}
        self.run(self.between, self.known)
        for name, value in step.writes.items():
            if level_of(name) == "row":
                self.write(name, self.known[value], places["row"])
        if self.walks[1]:
            steps(c, count, lambda i, lanes: self._elements(1, at, i, lanes, places))
        self.known = before

    def _elements(self, walk: int, at: Value, i: Value, lanes: int, places: Any) -> None:
        """``lanes`` elements, the first of them element ``i`` of the row."""
        c, step, here = self.c, self.step, {}
        here_at = {"element": c.add(at, i)}
        here_at |= {of: c.add(places[of], i) for of in ("column", "part") if of in places}
        for name in step.reads:
            if (level := level_of(name)) in here_at:
                if any(name in arguments(s) for s in self.walks[walk]):
                    here[name] = self.read(name, here_at[level], lanes)
        kept = {name: c.at(room, i, of=self.float) for name, room in self.kept.items()}
        if walk:
            here |= {n: c.b.load(at, typ=vec(lanes, self.float), align=4) for n, at in kept.items()}
        for s in self.walks[walk]:
            if s.name in self.of_rows:
                self.of_rows[s.name].few.take(self.value(s.source, here, lanes), lanes)
            elif isinstance(s, Reduce):  # of columns: the sums are in memory, from row to row
                old = self.read("column_total", here_at["part"], lanes)
                new = c.b.fadd(old, self.value(s.source, here, lanes))
                self.write("column_total", new, here_at["part"])
            elif s.op == "noise":
                here[s.name] = self.noise(s, here_at["element"], lanes)
            else:
                self.run([s], here, lanes)
        for name, at in kept.items() if not walk else ():
            c.b.store(here[name], at, align=4)
        if walk or not self.walks[1]:
            for name, value in self.elements.items():
                self.write(name, here[value], here_at["element"])
        for k, value in step.sums.items() if not walk else ():
            self.of_chunk[k].few.take(here[value], lanes)
