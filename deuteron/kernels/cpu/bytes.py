"""C[m, n] = Σₖ A[m, k] · B[n, k] + bias[n] of bytes, in int32: four products at a time are added up
by one instruction.

B is packed as panels of 16 columns, [⌈N / 16⌉][K / 4][16][4], with zeros beyond column N, so that
four numbers of a sum lie side by side for each column. A tile of 4 rows by 16 columns stays in
registers over all of k; a panel stays in L1 while the rows pass by:

    bytes ≈ M·K · ⌈N / 16⌉ (from L2) + K·N + 4 · M·N

Nothing is rounded, and sums wrap round at 2³² alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from llvmlite import ir

from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import I8, I32, PTR, Code, Value, load_run, vec

ROWS, VECTORS, LANES = 4, 4, 4  # of a tile, and int32 in a vector
TOGETHER = 4  # products that one instruction adds up
COLUMNS = VECTORS * LANES
SERIAL = 1e5  # fewer operations are done sooner than a second thread wakes up


def panels_of(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] as panels."""
    n, k = weight.shape
    filled = torch.nn.functional.pad(weight, (0, 0, 0, -n % COLUMNS))
    parts = filled.reshape(-1, COLUMNS, k // TOGETHER, TOGETHER)
    return parts.permute(0, 2, 1, 3).contiguous()


def _multiply(signed: bool, c: Code, words: Value, *thread: Value) -> None:
    x, w, bias, y = c.pointers(words, 4)
    rows, steps, columns = c.words(words, 4, 3)
    line, sums = c.mul(steps, TOGETHER), vec(LANES, I32)
    quad = vec(LANES * TOGETHER, I8)
    name = f"llvm.aarch64.neon.{'s' if signed else 'u'}dot.v4i32.v16i8"
    dot = ir.Function(c.module, ir.FunctionType(sums, [sums, quad, quad]), name)
    acc = [[c.variable(sums) for _ in range(VECTORS)] for _ in range(ROWS)]
    room = c.variable(I32, count=COLUMNS)
    panels, down = c.div(c.add(columns, COLUMNS - 1), COLUMNS), c.div(c.add(rows, ROWS - 1), ROWS)

    def load(where: Value, kind: Any) -> Value:
        return c.b.load(where, typ=kind, align=1)

    def add(there: Value, step: int, numbers: list[Value]) -> None:
        """Four numbers of each row, in every lane, by so many of each column."""
        for j in range(VECTORS):
            column = load(c.at(there, (step * VECTORS + j) * 4 * LANES, of=I8), quad)
            for i in range(ROWS):
                given = [c.get(acc[i][j], sums), column, c.b.bitcast(numbers[i], quad)]
                c.b.store(c.b.call(dot, given), acc[i][j])

    with c.loop(*c.share(c.mul(panels, down), *thread)) as job:
        panel, tile = c.split(job, down)
        first, column = c.mul(tile, ROWS), c.mul(panel, COLUMNS)
        last = c.sub(rows, 1)  # which rows that are not there repeat
        numbers = [c.least(c.add(first, i), last) for i in range(ROWS)]
        lines = [c.at(x, c.mul(row, line), of=I8) for row in numbers]
        here = c.variable(PTR, c.at(w, c.mul(column, line), of=I8))
        for i in range(ROWS):
            for j in range(VECTORS):
                c.b.store(ir.Constant(sums, [0] * LANES), acc[i][j])
        whole = c.sub(steps, c.rem(steps, LANES))
        with c.loop(0, whole, LANES) as k:
            there = c.get(here, PTR)
            runs = [load(c.at(each, c.mul(k, TOGETHER), of=I8), sums) for each in lines]
            for lane in range(LANES):
                add(there, lane, [c.lane(run, lane) for run in runs])
            c.put(here, c.at(there, LANES * COLUMNS * TOGETHER, of=I8))
        with c.loop(whole, steps) as k:
            there = c.get(here, PTR)
            ones = [load(c.at(each, c.mul(k, TOGETHER), of=I8), I32) for each in lines]
            add(there, 0, [c.splat(one, LANES) for one in ones])
            c.put(here, c.at(there, COLUMNS * TOGETHER, of=I8))
        for i in range(ROWS):
            row = c.add(first, i)
            to = c.at(y, c.add(c.mul(row, columns), column), of=I32)
            beside = c.at(bias, column, of=I32)

            def stored(i: int = i, to: Value = to, beside: Value = beside) -> None:
                for j in range(VECTORS):
                    more = load(c.at(beside, j * LANES, of=I32), sums)
                    found = c.b.add(c.get(acc[i][j], sums), more)
                    c.b.store(found, c.at(to, j * LANES, of=I32), align=4)

            def some(i: int = i, to: Value = to, beside: Value = beside) -> None:
                for j in range(VECTORS):
                    c.b.store(c.get(acc[i][j], sums), c.at(room, j * LANES, of=I32), align=4)
                with c.loop(0, c.sub(columns, column)) as n:
                    one, more = (load(c.at(of, n, of=I32), I32) for of in (room, beside))
                    c.store(c.b.add(one, more), c.at(to, n, of=I32))

            with c.when(c.cmp("<", row, rows)):
                c.either(c.cmp("<=", c.add(column, COLUMNS), columns), stored, some)


def prepare_bytes(
    rows: int, k: int, columns: int, signed: bool
) -> Callable[[Word, Word, Word, Word], Call]:
    """The call for A [rows, k], the panels of B, bias [columns] and C, where each is; k is a
    multiple of 4."""
    code = load_run(f"bytes {'signed' if signed else 'unsigned'}", partial(_multiply, signed))
    threaded = 2.0 * rows * k * columns > SERIAL
    sizes = rows, k // TOGETHER, columns
    return lambda x, w, bias, y: Call(code, (x, w, bias, y, *sizes), threaded)
