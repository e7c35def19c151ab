"""Reductions down the columns of a tensor whose rows lie contiguous, on the CPU.

The result of a column is complete only after the last row, but memory is fast only along rows. So a
thread takes a panel of neighbouring columns, keeps a total of each in the L1 cache, and walks
down the rows in order. Every element is read once, and what the region stores of
it (a gradient beside its own sum) is written in the same pass.

Sums are in float32 for a block of rows and then go on in float64. Each column belongs to one
thread, which adds its rows in order: the bits do not depend on the number of threads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from deuteron.codegen.index import Var
from deuteron.codegen.llvm import F64, Code, Value, vec
from deuteron.codegen.llvm_loops import STRETCH, Axes, Env, Place, Where
from deuteron.codegen.llvm_plan import plan
from deuteron.codegen.llvm_render import Renderer
from deuteron.codegen.scalar import Reduce, ScalarProgram, reads
from deuteron.ops.formula import Compute

PANEL = 4096  # numbers that a thread holds for its columns and reads in every row: 16 KB of float32


def renderer(program: ScalarProgram) -> Renderer:
    """Return the renderer that suits the program."""
    return (ColumnRenderer if plan(program).in_order else Renderer)(program)


@dataclass(frozen=True)
class Line:
    """Room on the stack for one number of each column of the panel."""

    base: Value
    kind: Any


class ColumnRenderer(Renderer):
    """Writes the kernel of a program that takes a single walk down the rows."""

    def _body(self, code: Code, words: Value, thread: Value, threads: Value) -> None:
        self._open(code, words, thread)
        self.late = self.p.after_reductions
        reductions, shared = self.p.reductions, self._shared()
        steps = PANEL // (self.shape.lanes * (len(reductions) + len(shared)))
        self.panel = max(1, steps) * self.shape.lanes  # columns that a thread takes at a time
        self.near = {s.name: self._line(self.type_of(s.kind)) for s in reductions}
        sums = (s.name for s in reductions if s.op == "sum" and s.kind == "float")
        self.far = {name: self._line(F64) for name in sums}
        self.held = {name: self._line(self.float) for name in shared}
        for at, start, stop in self._panels(thread, threads):
            self.start = start
            for place in self._vectors(at, start, stop, False):
                self._begin(place)
            for block, begin, end in self._blocks(at, self.shape.columns):
                with code.loop(begin, end) as row:
                    here = {**block, self.shape.columns[-1]: row}
                    for cell in self._vectors(here, start, stop, False):
                        self._cell(cell)
                for place in self._vectors(at, start, stop, False) if self.far else ():
                    self._widen(place)
            for place in self._vectors(at, start, stop, False):
                self._finish(place)

    def _shared(self) -> list[str]:
        """Values computed once for a column and read in every row of it."""
        element = [s for name, s in self.p.made.items() if self.p.level[name] == "element"]
        read = {name for s in element for name in reads(s)} - self.late
        made = [s for s in self.p.made.values() if isinstance(s, Compute) and s.kind == "float"]
        return [s.name for s in made if s.name in read and self.p.level[s.name] == "row"]

    # ---- the loops

    def _panels(self, thread: Value, threads: Value) -> Iterator[tuple[Where, Value, Value]]:
        """The share of this thread: where it is in the other outer axes, and from which column to
        which. Threads share the columns by whole steps."""
        c, lanes, size = self.c, self.shape.lanes, self._axis.size
        count, most = -(-size // lanes), self.panel // lanes
        work = prod(v.size for v in self.shape.rows) * count
        begin, end = c.share(self.given("steps", work), thread, threads)
        steps = self.given("steps of a row", count)
        with c.loop(c.div(begin, steps), c.div(c.sub(c.add(end, steps), 1), steps)) as line:
            first = c.most(c.sub(begin, c.mul(line, steps)), 0)
            last = c.least(c.sub(end, c.mul(line, steps)), steps)
            with c.loop(first, last, most) as step:
                stop = c.mul(c.least(c.add(step, most), last), lanes)
                yield self._decode(line), c.mul(step, lanes), c.least(stop, self.size(self._axis))

    def _blocks(self, at: Where, axes: Axes) -> Iterator[tuple[Where, Value, Value]]:
        """Blocks of rows: where the other reduced axes are, and a range of the last one."""
        c, v, others = self.c, axes[0], axes[1:]
        with c.loop(0, self.size(v), 1 if others else STRETCH) as i:
            if others:
                yield from self._blocks({**at, v: i}, others)
            else:
                yield at, i, c.least(c.add(i, STRETCH), self.size(v))

    # ---- a few vectors of columns

    def _begin(self, place: Place) -> None:
        for s in self.p.reductions:
            for line in filter(None, (self.near[s.name], self.far.get(s.name))):
                self._put(line, self._identity(s, line.kind)[0], place)
        env = self._early(place)
        for name, line in self.held.items():
            self._put(line, env[name], place)

    def _cell(self, cell: Place) -> None:
        """One row: what it stores, and what it adds to the totals."""
        b = self.c.b
        local = {name: self._get(line, cell) for name, line in self.held.items()}
        for s in self.p.reductions:
            line = self.near[s.name]
            room = self.c.variable(vec(cell.lanes, line.kind))
            b.store(self._get(line, cell), room)
            self._accumulate(s, room, cell, local, set())
            self._put(line, b.load(room, typ=vec(cell.lanes, line.kind)), cell)
        self._store_cell(cell, local, set())

    def _widen(self, place: Place) -> None:
        """Add what has been summed in float32 so far to the sums in float64, and start again."""
        b = self.c.b
        for name, line in self.far.items():
            near = self.of_width(self._get(self.near[name], place), F64)
            self._put(line, b.fadd(self._get(line, place), near), place)
            self._put(self.near[name], self.number(0.0, "float"), place)

    def _finish(self, place: Place) -> None:
        """The results of a column, once all its rows are in the totals."""
        env = self._early(place)
        for name, s in self.p.made.items():
            if isinstance(s, Reduce):
                total = self._get(self.far.get(name, self.near[name]), place)
                env[name] = self.of_width(total, self.float) if name in self.far else total
            elif name in self.late:
                env[name] = self._evaluate(s, place, env)
        for store in self.p.row_stores:
            self._store(store, place, env)

    def _early(self, place: Place) -> Env:
        """The values of a column that do not wait for a reduction."""
        env: Env = {}
        for name, s in self.p.made.items():
            if self.p.level[name] == "row" and name not in self.late:
                env[name] = self._evaluate(s, place, env)
        return env

    # ---- numbers of the columns

    @property
    def _axis(self) -> Var:
        assert self.shape.vector is not None
        return self.shape.vector

    def _line(self, kind: Any) -> Line:
        return Line(self.c.variable(kind, count=self.panel), kind)

    def _where(self, line: Line, place: Place) -> Value:
        return self.c.at(line.base, self.c.sub(place.at[self._axis], self.start), of=line.kind)

    def _get(self, line: Line, place: Place) -> Value:
        return self.c.b.load(self._where(line, place), typ=vec(place.lanes, line.kind), align=4)

    def _put(self, line: Line, value: Value, place: Place) -> None:
        self.c.b.store(self.lanes(value, place.lanes), self._where(line, place), align=4)
