"""Adafactor of matrices: how they are cut into chunks, and what lies between their passes.

A chunk is some rows of a matrix, or several small matrices. The first pass leaves the sums of its
rows and, for every chunk of a matrix, of its columns; :func:`moments` adds those up, moves the
moments and leaves 1/√ of them, so that no element costs a root or a division afterwards.

    bytes = size · (3 · g + 3 · p), of which size · (g + 2 · p) from memory
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deuteron.codegen.llvm import F64, Value, lanes_of, vec
from deuteron.kernels.cpu.optim_rows import Pass, Row, Writer
from deuteron.kernels.cpu.sweep import Gathered, blocks, steps
from deuteron.kernels.optim import first_of, listed, matrices, with_scratch

CHUNK = 16384  # elements
TALL = 256  # rows of a chunk: sums of columns are that long before they go on in float64


def cut(
    table: torch.Tensor, shapes: Sequence[Sequence[int]], wide: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """The table, the list of chunks and the first of each, and scratch memory. The table has, after the sizes of matrices,
    rows of a chunk, chunks of a matrix and matrices of a chunk."""
    cuts, counts = [], []
    for shape in shapes:
        many, height, width = matrices(shape)
        tall = max(1, min(height, TALL, CHUNK // max(width, 1)))
        parts = -(-height // tall)
        together = 1 if parts > 1 else max(1, CHUNK // max(height * width, 1))
        cuts.append((tall, parts, together))
        counts.append(-(-many // together) * parts if height * width else 0)
    more = zip(*cuts, strict=True)
    parts_of = [(1, parts) for _, parts, _ in cuts]
    made, memory = with_scratch(table, shapes, parts_of, wide, *more)
    return made, listed(counts), first_of(counts), memory


class _Cut:
    """The matrices and rows of a chunk."""

    def __init__(self, w: Writer, number: Value) -> None:
        c, first = w.c, w.step.names.place("mean") + 1
        self.c = c
        self.matrices, self.height, self.width, self.tall, self.parts, self.together = (
            w.entry(first + k) for k in range(6)
        )
        self.part, span = c.rem(number, self.parts), c.div(number, self.parts)
        self.begin = c.mul(span, self.together)
        self.end = c.least(c.add(self.begin, self.together), self.matrices)


def rows(w: Pass, number: Value) -> None:
    """The rows of a chunk."""
    c, cut = w.c, _Cut(w, number)
    with c.loop(cut.begin, cut.end) as b:
        column = c.mul(b, cut.width)
        part = c.mul(c.add(c.mul(b, cut.parts), cut.part), cut.width)
        if "column_total" in w.step.writes:
            clear(w, w.homes["column_total"], part, cut.width)
        low = c.mul(cut.part, cut.tall)
        high = c.least(c.add(low, cut.tall), cut.height)
        base = c.mul(b, cut.height)
        with c.loop(c.add(base, low), c.add(base, high)) as row:
            places = {"row": row, "column": column, "part": part, "matrix": b}
            w.row(Row(c.mul(row, cut.width), cut.width, places))


def clear(w: Writer, home: Value, at: Value, count: Value) -> None:
    zero = vec(1, w.float)(0.0)
    steps(w.c, count, lambda i, n: w.write("mean", w.splat(zero, n), home, w.c.add(at, i)))


def moments(w: Writer, number: Value) -> None:
    """All matrices of which this is the first chunk."""
    c, cut = w.c, _Cut(w, number)
    homes = {name: w.home(name) for name in w.step.names.tensors if name != "g"}
    with c.when(c.cmp("==", cut.part, 0)), c.loop(cut.begin, cut.end) as b:
        row, column = c.mul(b, cut.height), c.mul(b, cut.width)
        total, sums = w.zero(), Gathered(c, c.b.fadd, 0.0, w.float)
        sums.clear()

        def fold() -> None:
            c.b.store(c.b.fadd(c.get(total, F64), w.wide(sums.total())), total)
            sums.clear()

        def of_rows(i: Value, lanes: int) -> None:
            at = c.add(row, i)
            mean = _mean(w, w.wide(w.read("row_total", homes["row_total"], at, lanes)), cut.width)
            sums.take(_moved(w, homes, "row", at, mean), lanes)

        def of_columns(i: Value, lanes: int) -> None:
            all_, wide = c.variable(vec(lanes, F64)), vec(lanes, F64)
            c.b.store(wide(None), all_)
            with c.loop(0, cut.parts) as part:
                at = c.add(c.mul(c.add(c.mul(b, cut.parts), part), cut.width), i)
                more = w.wide(w.read("column_total", homes["column_total"], at, lanes))
                c.b.store(c.b.fadd(c.get(all_, wide), more), all_)
            _moved(w, homes, "column", c.add(column, i), _mean(w, c.get(all_, wide), cut.height))

        blocks(c, cut.height, of_rows, fold)
        steps(c, cut.width, of_columns)
        w.write("mean", _mean(w, c.get(total, F64), cut.height), homes["mean"], b)


def _mean(w: Writer, total: Value, count: Value) -> Value:
    """Of numbers that were added up in float64."""
    lanes = lanes_of(total)
    return w.narrow(w.c.b.fdiv(total, w.splat(w.c.b.sitofp(count, F64), lanes)))


def _moved(w: Writer, homes: dict[str, Value], name: str, at: Value, mean: Value) -> Value:
    """The new moment, which is stored, as its 1/√ is for the passes."""
    lanes, key = lanes_of(mean), {"row": "row_var", "column": "col_var"}[name]
    known = {n: w.splat(v, lanes) for n, v in w.numbers(w.t).items()}
    known |= {"old": w.read(key, homes[key], at, lanes), "mean": mean}
    for s in w.step.body.statements:
        known[s.name] = w.compute(s, [w.value(a, lanes, known) for a in s.args])
    new = known[w.step.body.results["new"]]
    one = w.splat(vec(1, w.float)(1.0), lanes)
    w.write(key, new, homes[key], at)
    w.write(name, w.c.b.fdiv(one, w.c.intrinsic("sqrt", new)), homes[name], at)
    return new
