"""One step of an optimiser, by its rule, over many tensors in one call.

The tensors' addresses lie in a table; threads share a list of chunks (tensor, chunk of that tensor)
and run a formula over the rows of a chunk (``optim_rows``). Every element is read once and written
once in a pass, so the bytes are those of :mod:`deuteron.kernels.optim`; where a rule has several
passes, tensors go through all of them in bundles that stay in L2. Sums are made by chunk: they do
not depend on the number of threads.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from deuteron.codegen.calls import Call, Tape
from deuteron.codegen.llvm import F32, F64, Code, Loaded, Value, load_run, width
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu import adafactor
from deuteron.kernels.cpu.optim_rows import POINTERS, Pass, Writer
from deuteron.kernels.optim import FLAT, GROUP, MATRICES, DTypes, Ints, Rule, Shapes, Step

BLOCK = 8192  # elements of a chunk: enough to make the time for reading the table negligible
SERIAL = 32768  # elements below which a team of threads costs more than it gains
BUNDLE = 1 << 17  # elements of tensors that go through all passes together


class Chunks(NamedTuple):
    """The tensors' addresses and sizes, the list of their chunks, and the first of each."""

    table: torch.Tensor
    where: torch.Tensor
    firsts: torch.Tensor


def _rows(w: Pass, number: Value) -> None:
    """Make a pass over the rows of a chunk of a tensor that is taken as one long row, or as
    groups."""
    c = w.c
    start = c.mul(number, BLOCK)
    end = c.least(c.add(start, BLOCK), w.entry(0))
    if w.step.rule.walk == FLAT:
        w.row(start, c.sub(end, start))
        return
    with c.loop(start, end, GROUP) as at:
        w.row(at, c.least(c.sub(end, at), GROUP), row=c.div(at, GROUP))


def _pass(w: Pass, chunk: Value, number: Value) -> None:
    c = w.c
    for one in w.of_chunk.values():
        one.clear()
    (adafactor.rows if w.step.rule.walk == MATRICES else _rows)(w, number)
    for k, one in w.of_chunk.items():
        place = c.add(c.mul(w.count["chunks"], k), chunk)
        c.b.store(one.total(), c.at(w.given["sums"], place, of=F64))


def _finish(w: Writer, t: Value) -> None:
    """Compute the one number of a tensor that follows from the sums of its chunks."""
    c, b, rule, firsts = w.c, w.c.b, w.step.rule, w.given["firsts"]
    totals = {name: c.variable(F64, F64(0.0)) for name in rule.sums}
    with c.loop(c.index(firsts, t), c.index(firsts, c.add(t, 1))) as chunk:
        for k, total in enumerate(totals.values()):
            at = c.add(c.mul(w.count["chunks"], k), chunk)
            more = c.load(c.at(w.given["sums"], at, of=F64), of=F64)
            b.store(b.fadd(c.get(total, F64), more), total)
    here = {name: c.get(total, F64) for name, total in totals.items()}
    here = w.run(w.step.body.statements, here | {"size": b.sitofp(w.entry(0), F64)})
    for name, value in w.step.body.results.items():
        place = c.add(c.mul(t, w.count["stride"]), rule.numbers.index(name))
        b.store(here[value], c.at(w.given["rows"], place, of=F64))


@lru_cache
def compiled(step: Step, dtypes: DTypes) -> Loaded:
    """The code of a step; ``dtypes`` in the order of the tensors' names."""
    kinds = dict(zip(step.rule.tensors, map(dtype, dtypes), strict=True))
    of = F64 if torch.float64 in dtypes or step.kind == "finish" else F32

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        w = (Pass if step.kind == "pass" else Writer)(c, step, words, kinds, of)
        first, last = c.share(c.sub(w.last, w.first), thread, threads)
        with c.loop(c.add(w.first, first), c.add(w.first, last)) as item:
            if step.kind == "finish":
                w.begin(item)
                _finish(w, item)
                return
            w.begin(c.index(w.given["where"], item))
            number = c.index(w.given["where"], c.add(w.count["chunks"], item))
            if step.kind == "moments":
                adafactor.moments(w, number)
            else:
                _pass(w, item, number)

    rule, shorts = step.rule, [kind.short for kind in kinds.values()]
    names = (step.kind, rule.walk, rule.tensors, rule.numbers, rule.sums)
    name = f"optim {names} {step.body} {shorts} of {width()}"
    return load_run(name, body)


class Steps:
    """All steps of a rule over some tensors as one call; :meth:`run` is given gradients and
    numbers."""

    def __init__(self, rule: Rule, dtypes: DTypes, chunks: Chunks, shapes: Shapes, sizes: Ints):
        if rule.walk == MATRICES:
            *made, self.scratch = adafactor.cut(chunks.table, shapes, dtypes[-1])
            chunks = Chunks(*made)
        table, where, firsts = chunks
        count, total = table.shape[1], where.shape[1]
        many = count if rule.finished else 1  # rows of numbers
        self.sums = torch.zeros(len(rule.sums), total, dtype=torch.float64)
        rows = torch.empty(many, len(rule.numbers), dtype=torch.float64)
        known = (table, table, where, rows, self.sums, firsts)
        counts = (count, total, len(rule.numbers) if many > 1 else 0)
        header = torch.tensor([*(x.data_ptr() for x in known), *counts])
        self.rows, self.header = rows.numpy(), header.numpy()
        self.held = (*known, header)  # the calls point to these, which have to stay alive
        calls, place = [], firsts.tolist()
        for first, last in _bundles(sizes) if len(rule.steps) > 1 else [(0, count)]:
            threaded = sum(sizes[first:last]) > SERIAL
            for step in rule.steps:
                of = (first, last) if step.kind == "finish" else (place[first], place[last])
                calls.append(Call(compiled(step, dtypes), (header, *of), threaded))
        self.tape = Tape(calls)

    def run(self, grads: torch.Tensor, numbers: Sequence[float]) -> None:
        self.rows[:] = numbers
        self.header[POINTERS.index("grads")] = grads.data_ptr()
        self.tape.run(self.tape.words())


def _bundles(sizes: Ints) -> list[tuple[int, int]]:
    """Return the ranges of tensors that go through all steps together."""
    made, begin = [], 0
    for end in range(1, len(sizes) + 1):
        if end == len(sizes) or sum(sizes[begin:end]) >= BUNDLE:
            made.append((begin, end))
            begin = end
    return made
