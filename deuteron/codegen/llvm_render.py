"""A scalar program as LLVM IR for the CPU.

One axis is the vector axis: the one along which vectors save most. Arithmetic is done for all lanes
at once; numbers that are not contiguous in memory are put into their lanes one by one. If the
vector axis is a reduced axis, lanes are columns and a reduction ends with a sum across lanes; if it
is an outer axis, lanes are rows and nothing crosses them. The other outer axes are flattened and
shared out to the threads. Each reduction is a pass over the row; element values that several passes
need and that cost more than a load are kept in a row of scratch memory.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

from deuteron.codegen import llvm, llvm_math, scalar
from deuteron.codegen import llvm_text as ir
from deuteron.codegen.llvm import F32, F64, I32, Code, Value, constant, vec
from deuteron.codegen.llvm_compute import FLOAT, I1, INTEGER, STORED
from deuteron.codegen.llvm_loops import STRETCH, Env, Loops, Numbers, Place
from deuteron.codegen.llvm_plan import multiply_adds, plan, reached, short_already
from deuteron.codegen.scalar import Load, Reduce, ScalarProgram, Statement, Store, reads
from deuteron.ops.formula import Arg, Compute

JOINED = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum"}


def signature(program: ScalarProgram) -> str:
    """Everything the machine code depends on: the name under which it is kept."""
    return f"scalar program, {llvm.width()} lanes\n{program!r}"


class Renderer(Loops):
    """Writes one kernel: ``name(words, thread, threads)`` with the tensors in the words."""

    def __init__(self, program: ScalarProgram) -> None:
        self.p, self.shape = program, plan(program)
        self.float = F64 if program.wide else F32
        # e^(x − max x), which is never above 1, and the sums of it: they are at least 1, so that a
        # division by one of them may be a product with its reciprocal
        pairs, shifted = scalar.softmaxes(program)
        self.shifted = frozenset() if program.wide else shifted
        self.totals = frozenset(() if program.wide else (p.total.name for p in pairs))
        self.joined = multiply_adds(program, self.shape.kept)
        self.short = frozenset() if program.wide else short_already(program)

    def __call__(self, module: Any) -> list[int]:
        """Write the kernel, and return the numbers that its calls pass to it."""
        llvm.entry(module, "run", self._body)
        return self.numbers.values

    def _body(self, code: Code, words: Value, thread: Value, threads: Value) -> None:
        self._open(code, words, thread)
        for place in self._rows(thread, threads):
            self._row(place)

    def _open(self, code: Code, words: Value, thread: Value) -> None:
        """Find the tensors, and this thread's part of the scratch memory."""
        self.c = code
        tensors = (*self.p.inputs, *self.p.outputs)
        self.base = {t: code.pointer(words, i) for i, t in enumerate(tensors)}
        self.scratch = None
        self.numbers = Numbers(code, words, len(tensors) + bool(self.shape.kept))
        if self.shape.kept:
            room = code.pointer(words, len(tensors))
            size = self.p.columns * max(1, 1 if self.shape.inner_vector else self.shape.lanes)
            start = code.mul(thread, self.given("kept", size * len(self.shape.kept)))
            self.scratch = code.at(room, start, of=self.float)
            self.row_size = size

    # ---- one row

    def _row(self, place: Place) -> None:
        env: Env = {}
        stored: set[str] = set()
        for name, s in self.p.made.items():
            if isinstance(s, Reduce):
                walk = self._seldom if s.seldom else self._reduce
                env[name] = walk(s, place, env, stored)
            elif self.p.level[name] == "row":
                env[name] = self._evaluate(s, place, env)
        self._store_all(self.p.row_stores, place, env)
        if self.p.element_stores:
            spot, wanted = self._spot() or ("", "")
            elsewhere = {spot: ir.Constant(I1, 0)} if spot else {}
            for cell in self._cells(place, self.shape.columns):
                self._store_cell(cell, {**env, **elsewhere}, stored)
            if spot:
                self._store_spot(spot, env[wanted], place, env, stored)

    def _spot(self) -> tuple[str, str] | None:
        """Find a comparison of an element's place in its row with a number of the row, such as the
        class of a target; return the names of both. It holds for one element at most: the row is
        stored as if it held for none, and then that one element is stored again."""
        v = self.shape.vector
        if self.p.inner != (v,) or self._reads_over():
            return None
        for s in self.p.statements:
            if isinstance(s, Compute) and s.op == "eq":
                for where, number in (s.args, s.args[::-1]):
                    at = self.p.made.get(str(where))
                    same = isinstance(number, str) and self.p.level[number] == "row"
                    if isinstance(at, scalar.Position) and at.index.terms == ((v, 1),) and same:
                        return s.name, str(number)
        return None

    def _reads_over(self) -> bool:
        """Whether what is stored for a row is computed from an input that it may overwrite."""
        over = {tensor for _, tensor in scalar.overwritable(self.p)}
        roots = [s.source for s in self.p.element_stores if isinstance(s.source, str)]
        read = reached(self.p, roots, self.shape.kept)
        return any(s.name in read for s in self.p.loads if s.tensor in over)

    def _store_spot(self, spot: str, at: Value, place: Place, env: Env, stored: set[str]) -> None:
        c, v = self.c, self.shape.vector
        assert v is not None
        with c.when(c.b.and_(c.cmp(">=", at, 0), c.cmp("<", at, self.size(v)))):
            cell = Place({**place.at, v: at}, 1, place.known)
            self._store_cell(cell, {**env, spot: ir.Constant(I1, 1)}, stored)

    def _store_cell(self, cell: Place, local: Env, stored: set[str]) -> None:
        """Compute all values of an element before storing any, since that may overwrite an
        input."""
        for s in self.p.element_stores:
            if isinstance(s.source, str):
                self._need(s.source, cell, local, stored)
        for s in self.p.element_stores:
            self._store(s, cell, local)

    def _reduce(self, s: Reduce, place: Place, env: Env, stored: set[str]) -> Value:
        """Make one pass over the row: accumulate lane by lane, and combine the lanes at the end."""
        c = self.c
        kind = self.type_of(s.kind)
        start, combine = self._identity(s, kind)
        sizes = self.shape.steps if self.shape.inner_vector else (place.lanes,)
        acc = {n: c.variable(vec(n, kind), self.splat(start, n)) for n in sizes}
        far = self._far_sums(s, acc)
        keep = [k for k in self.shape.kept if k not in stored and not s.seldom]
        pause = partial(self._move, acc, far) if far else None
        for cell in self._cells(place, self.shape.columns, pause):
            local = dict(env)
            self._accumulate(s, acc[cell.lanes], cell, local, stored)
            for k in keep:
                if k in local:
                    value, align = self.lanes(local[k], cell.lanes), 8 if self.p.wide else 4
                    c.b.store(value, self._slot(k, cell), align=align)
        stored |= reached(self.p, [s.source], stored).intersection(keep)
        wide = F64 if far else kind
        totals = [c.b.load(room, typ=vec(lanes, wide)) for lanes, room in (far or acc).items()]
        if self.shape.inner_vector:
            # halves first: errors grow with depth
            first, *others = (c.reduce(t, combine) for t in totals)
            totals = [reduce(combine, reversed(others), first)]
        return self.of_width(totals[0], kind) if far else totals[0]

    def _accumulate(self, s: Reduce, acc: Value, cell: Place, local: Env, stored: set[str]) -> None:
        """Compute the source of a reduction at this cell and add it to the accumulator."""
        c, kind, factors = self.c, self.type_of(s.kind), self._factors(s)
        for name in factors or (s.source,):
            self._need(name, cell, local, stored)
        total = c.b.load(acc, typ=vec(cell.lanes, kind))
        if factors:
            x, y = (self.lanes(local[name], cell.lanes) for name in factors)
            c.b.store(c.fma(x, y, total), acc)
        else:
            combine = self._identity(s, kind)[1]
            c.b.store(combine(total, self.lanes(local[s.source], cell.lanes)), acc)

    def _seldom(self, s: Reduce, place: Place, env: Env, stored: set[str]) -> Value:
        """Make a pass only if the number ``s.seldom`` of the row is infinite in some lane."""
        c, first = self.c, env[s.seldom]
        lanes, kind = llvm.lanes_of(first), first.type
        infinite = c.b.fcmp_ordered("==", first, self.splat(self.number(math.inf, s.kind), lanes))
        if lanes > 1:
            infinite = c.reduce(infinite, c.b.or_)
        room = c.variable(kind, ir.Constant(kind, None))
        with c.when(infinite):
            c.b.store(self._reduce(s, place, env, stored), room)
        return c.b.load(room, typ=kind)

    def _far_sums(self, s: Reduce, acc: dict[int, Value]) -> dict[int, Value]:
        """For a long sum, return a second accumulator in float64 for each accumulator: what was
        summed is moved there from time to time, so that the error does not grow with the length.
        For short sums there are none."""
        steps = self._steps(self.shape.columns)
        if s.op != "sum" or s.kind != "float" or steps <= 2 * STRETCH:
            return {}
        return {n: self.c.variable(vec(n, F64), constant(F64, 0.0, n)) for n in acc}

    def _move(self, acc: dict[int, Value], far: dict[int, Value]) -> None:
        """Add what has been summed in float32 so far to the sum in float64, and start again."""
        b = self.c.b
        for lanes, room in acc.items():
            kind = vec(lanes, self.float)
            near, total = b.load(room, typ=kind), b.load(far[lanes], typ=vec(lanes, F64))
            b.store(b.fadd(total, self.of_width(near, F64)), far[lanes])
            b.store(constant(self.float, 0.0, lanes), room)

    def _factors(self, s: Reduce) -> tuple[str, str] | None:
        """Return the two factors of a sum of products, for multiply-adds, which do not round in
        between; None if the products are kept."""
        product = self.p.made[s.source]
        if s.op != "sum" or s.kind != "float" or s.source in self.shape.kept:
            return None
        if not isinstance(product, Compute) or product.op != "mul":
            return None
        x, y = product.args
        return (x, y) if isinstance(x, str) and isinstance(y, str) else None

    def _identity(self, s: Reduce, kind: Any) -> tuple[Value, Callable[[Value, Value], Value]]:
        """Return what a reduction starts with, and what joins two parts of it."""
        start = ir.Constant(kind, scalar.start(s.op, s.kind))
        if s.kind == "bool":
            return start, self.c.b.or_ if s.op == "any" else self.c.b.and_
        join = (FLOAT if s.kind == "float" else INTEGER)[JOINED[s.op]]
        return start, lambda x, y: join(self.c, x, y)

    # ---- kept values

    def _slot(self, name: str, cell: Place) -> Value:
        c = self.c
        column = c.i(0)
        for v in self.p.inner:
            column = c.add(c.mul(column, self.size(v)), cell.at[v])
        if not self.shape.inner_vector:
            column = c.mul(column, self.shape.lanes)
        which = self.given("kept row", self.shape.kept.index(name) * self.row_size)
        assert self.scratch is not None
        return c.at(self.scratch, which, column, of=self.float)

    # ---- statements

    def _need(self, name: str, cell: Place, local: Env, stored: set[str]) -> None:
        """Compute ``name`` and what it reads at this cell, or take it from scratch memory."""
        if name in local:
            return
        if name in stored:
            align = 8 if self.p.wide else 4
            where = self._slot(name, cell)
            local[name] = self.c.b.load(where, typ=vec(cell.lanes, self.float), align=align)
            return
        s = self.p.made[name]
        for other in reads(s):
            self._need(other, cell, local, stored)
        local[name] = self._evaluate(s, cell, local)

    def _evaluate(self, s: Statement, place: Place, env: Env) -> Value:
        place = replace(place, env=env)
        if isinstance(s, Load):
            return self._load(s, place)
        if isinstance(s, scalar.Inside):
            return self._inside(s.guards, place)
        if isinstance(s, scalar.Position):
            return self._position(s.index, place)
        assert isinstance(s, Compute)
        if s.name in self.joined:
            args = [env[name] for name in self.joined[s.name]]
            widest = max(llvm.lanes_of(a) for a in args)
            return self.c.fma(*(self.lanes(a, widest) for a in args))
        if s.op == "rounded" and dict(s.attrs)["dtype"] == "bf16" and s.args[0] in self.short:
            return env[str(s.args[0])]
        args = [self._arg(a, s, env) for a in s.args]
        if s.op == "div" and s.args[1] in self.totals:
            one = self.splat(self.number(1.0, "float"), llvm.lanes_of(args[1]))
            args[1] = self.c.b.fdiv(one, args[1])  # once for each row: LLVM takes it out of loops
            s = replace(s, op="mul")
        widest = max(llvm.lanes_of(a) for a in args)
        # a condition that is the same for all lanes stays a single one: LLVM takes it out of loops
        alone = int(s.op == "select" and llvm.lanes_of(args[0]) == 1)
        args = [*args[:alone], *(self.lanes(a, widest) for a in args[alone:])]
        if s.name in self.shifted:
            return llvm_math.exp_nonpositive(self.c, args[0])
        return self.compute(s, args)

    def _arg(self, a: Arg, s: Compute, env: Env) -> Value:
        if isinstance(a, str):
            return env[a]
        other = next((env[x] for x in s.args if isinstance(x, str)), None)
        kind = a.kind
        if kind != "bool" and other is not None and s.op != "select":
            kind = "float" if llvm.element_of(other) in (F32, F64) else kind
        kind = "float" if s.kind == "float" and kind == "int" else kind
        if s.op in ("mul", "div") and kind == "float":
            return self._factor(float(a.value))
        return self.number(a.value, kind)

    def _factor(self, value: float) -> Value:
        """A factor or a divisor: a number of the call, because it may depend on sizes, as that of a
        mean does. Powers of two are constants of the code: LLVM knows how to divide by them."""
        wide, b = self.p.wide, self.c.b
        try:
            (bits,) = struct.unpack("<q", struct.pack("<d" if wide else "<fxxxx", value))
        except OverflowError:  # infinite in float32
            bits = 0
        if bits == 0 or abs(math.frexp(value)[0]) == 0.5:
            return self.number(value, "float")
        word = self.given("factor", bits)
        return b.bitcast(word if wide else b.trunc(word, I32), self.float)

    # ---- memory

    def _load(self, s: Load, place: Place) -> Value:
        c = self.c
        if any(place.known.get(g) is False for g in s.guards):
            return self.number(0, scalar.KINDS[s.dtype.kind])
        open_guards = tuple(g for g in s.guards if g not in place.known)
        if open_guards:
            return self._guarded(s, open_guards, place)
        stored, step = STORED[s.dtype.short], self._step(s.offset, place)
        align = max(s.dtype.bits // 8, 1)
        base = self.base[s.tensor]

        def one(at: Value, *more: int | Value) -> Value:
            return c.b.load(c.at(at, *more, of=stored), typ=stored, align=align)

        if place.lanes > 1 and self._scattered(s.offset, place):

            def found(lane: int) -> Value:
                return one(base, c.add(self._index(s.offset, place, lane), lane * step))

            return self.from_memory(c.joined(place.lanes, stored, found), s.dtype)
        where = c.at(base, self._index(s.offset, place), of=stored)
        if step in (0, 1):
            raw = c.b.load(where, typ=vec(place.lanes if step else 1, stored), align=align)
        elif step == 2:
            raw = self._every_second(where, stored, place.lanes, align)
        else:
            raw = c.joined(place.lanes, stored, lambda lane: one(where, lane * step))
        return self.from_memory(raw, s.dtype)

    def _every_second(self, where: Value, stored: Any, lanes: int, align: int) -> Value:
        """Load elements 0, 2, 4, … by two vectors, the second of which ends with the last of them:
        nothing beyond is touched."""
        c = self.c
        starts = (where, c.at(where, lanes - 1, of=stored))
        first, second = (c.b.load(at, typ=vec(lanes, stored), align=align) for at in starts)
        return c.shuffle(first, second, [k + (k >= lanes) for k in range(0, 2 * lanes, 2)])

    def _guarded(self, s: Load, guards: tuple[scalar.Guard, ...], place: Place) -> Value:
        """Load only where the guards hold; these do not vary along the lanes."""
        kind = scalar.KINDS[s.dtype.kind]
        moves = self._step(s.offset, place) or self._scattered(s.offset, place)
        lanes = place.lanes if moves else 1
        zero = self.splat(self.number(0, kind), lanes)
        room = self.c.variable(vec(lanes, self.type_of(kind)), zero)
        plain = replace(s, guards=())
        with self.c.when(self._inside(guards, place)):
            self.c.b.store(self.lanes(self._load(plain, place), lanes), room)
        return self.c.b.load(room, typ=vec(lanes, self.type_of(kind)))

    def _store_all(self, stores: Sequence[Store], place: Place, env: Env) -> None:
        """Make all stores; two that go to every second element and to those between become one."""
        pairs: dict[Any, list[Store]] = {}
        for s in stores:
            halves = self._step(s.offset, place) == 2
            pairs.setdefault((s.tensor, s.offset.terms) if halves else s, []).append(s)
        for pair in pairs.values():
            if len(pair) == 2 and pair[1].offset.const == pair[0].offset.const + 1:
                self._store(pair[0], place, env, pair[1])
            else:
                for s in pair:
                    self._store(s, place, env)

    def _source(self, s: Store, env: Env) -> Value:
        kind = scalar.KINDS[s.dtype.kind]
        return env[s.source] if isinstance(s.source, str) else self.number(s.source.value, kind)

    def _store(self, s: Store, place: Place, env: Env, between: Store | None = None) -> None:
        value, lanes, step = self._source(s, env), place.lanes, self._step(s.offset, place)
        stored = STORED[s.dtype.short]
        align = max(s.dtype.bits // 8, 1)
        where = self.c.at(self.base[s.tensor], self._index(s.offset, place), of=stored)
        if step == 0:
            one = self.c.item(value, 0) if llvm.lanes_of(value) > 1 else value
            self.c.b.store(self._narrow(s, one), where, align=align)
            return
        raw = self._narrow(s, self.lanes(value, lanes))
        if between is not None:
            other = self._narrow(between, self.lanes(self._source(between, env), lanes))
            order = [k for lane in range(lanes) for k in (lane, lanes + lane)]
            raw, step = self.c.shuffle(raw, other, order), 1
        if step == 1:
            self.c.b.store(raw, where, align=align)
            return
        for lane in range(lanes):
            one = self.c.item(raw, lane)
            self.c.b.store(one, self.c.at(where, lane * step, of=stored), align=align)

    def _narrow(self, s: Store, value: Value) -> Value:
        """Convert a value to the type in which it is stored."""
        if s.dtype.short == "bf16" and s.source in self.short:
            return self.upper_half(value)
        return self.to_memory(value, s.dtype)
