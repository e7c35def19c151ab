"""Adafactor of matrices: how they are cut into chunks, and what is done between the passes.

A chunk is some rows of a matrix, or several small matrices. The first pass stores the sums of its
rows and, for every chunk of a matrix, the sums of its columns; :func:`moments` adds those up,
updates the moments and stores 1/√ of them, so that no element costs a root or a division
afterwards.

    bytes = size · (3 · g + 3 · p), of which size · (g + 2 · p) from memory
"""

from math import prod

import torch

from deuteron.codegen.llvm import F64, Value, lanes_of, vec
from deuteron.kernels.cpu.optim_rows import Pass, Reduced, Writer
from deuteron.kernels.cpu.sweep import blocks, steps
from deuteron.kernels.optim import Shapes, first_of, listed, with_scratch

CHUNK = 16384  # elements
TALL = 256  # rows of a chunk at most: sums of columns are that long before they go on in float64


def cut(table: torch.Tensor, shapes: Shapes, wide: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the table, the list of chunks, the first of each tensor, and scratch memory. After the
    sizes of matrices the table has the rows of a chunk, chunks of a matrix and matrices of a
    chunk."""
    sizes, cuts, counts = [(prod(shape[:-2]), *shape[-2:]) for shape in shapes], [], []
    for many, height, width in sizes:
        tall = max(1, min(height, TALL, CHUNK // max(width, 1)))
        parts = -(-height // tall)
        together = 1 if parts > 1 else max(1, CHUNK // max(height * width, 1))
        cuts.append((tall, parts, together))
        counts.append(-(-many // together) * parts if height * width else 0)
    more = zip(*cuts, strict=True)
    table, memory = with_scratch(table, sizes, [(1, parts) for _, parts, _ in cuts], wide, *more)
    return table, listed(counts), first_of(counts), memory


class _Cut:
    """The matrices and rows of a chunk."""

    def __init__(self, w: Writer, number: Value) -> None:
        c, first = w.c, w.step.rule.place("mean") + 1
        rows = (w.entry(first + k) for k in range(6))
        self.matrices, self.height, self.width, self.tall, self.parts, together = rows
        self.part = c.rem(number, self.parts)
        self.begin = c.mul(c.div(number, self.parts), together)
        self.end = c.least(c.add(self.begin, together), self.matrices)


def rows(w: Pass, number: Value) -> None:
    """Make a pass over the rows of a chunk."""
    c, cut = w.c, _Cut(w, number)
    low = c.mul(cut.part, cut.tall)
    high = c.least(c.add(low, cut.tall), cut.height)
    with c.loop(cut.begin, cut.end) as b:
        column, base = c.mul(b, cut.width), c.mul(b, cut.height)
        part = c.mul(c.add(c.mul(b, cut.parts), cut.part), cut.width)

        def clear(i: Value, lanes: int) -> None:
            w.write("column_total", w.constant(0.0, lanes), c.add(part, i))

        if "column_total" in w.step.writes:
            steps(c, cut.width, clear)
        with c.loop(c.add(base, low), c.add(base, high)) as row:
            w.row(c.mul(row, cut.width), cut.width, row=row, column=column, part=part, matrix=b)


def moments(w: Writer, number: Value) -> None:
    """Update the moments of all matrices whose first chunk this is."""
    c, cut, total = w.c, _Cut(w, number), Reduced(w)
    with c.when(c.cmp("==", cut.part, 0)), c.loop(cut.begin, cut.end) as b:
        row, column = c.mul(b, cut.height), c.mul(b, cut.width)
        total.clear()

        def of_rows(i: Value, lanes: int) -> None:
            at = c.add(row, i)
            mean = _mean(w, w.wide(w.read("row_total", at, lanes)), cut.width)
            total.few.take(_moved(w, "row", "row_var", at, mean), lanes)

        def of_columns(i: Value, lanes: int) -> None:
            wide = vec(lanes, F64)
            sums = c.variable(wide, wide(None))
            with c.loop(0, cut.parts) as part:
                at = c.add(c.mul(c.add(c.mul(b, cut.parts), part), cut.width), i)
                more = w.wide(w.read("column_total", at, lanes))
                c.b.store(c.b.fadd(c.get(sums, wide), more), sums)
            mean = _mean(w, c.get(sums, wide), cut.height)
            _moved(w, "column", "col_var", c.add(column, i), mean)

        blocks(c, cut.height, of_rows, total.fold)
        steps(c, cut.width, of_columns)
        w.write("mean", _mean(w, total.total(), cut.height), b)


def _mean(w: Writer, total: Value, count: Value) -> Value:
    over = w.splat(w.c.b.sitofp(count, F64), lanes_of(total))
    return w.narrow(w.c.b.fdiv(total, over))


def _moved(w: Writer, name: str, key: str, at: Value, mean: Value) -> Value:
    """Return the new moment; store it, and its 1/√ for the passes."""
    lanes, body = lanes_of(mean), w.step.body
    here = w.run(body.statements, {"old": w.read(key, at, lanes), "mean": mean}, lanes)
    new = here[body.results["new"]]
    w.write(key, new, at)
    w.write(name, w.c.b.fdiv(w.constant(1.0, lanes), w.c.intrinsic("sqrt", new)), at)
    return new
