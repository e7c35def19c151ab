"""Steps of rules over many tensors, all of them in one call.

The tensors' addresses lie in a table; threads share a list of chunks (tensor, chunk of that tensor)
and run a formula over the rows of a chunk (``optim_rows``). Every element is read once and written
once in a pass, so the bytes are those of :mod:`deuteron.kernels.optim`; where a rule has several
passes, tensors go through all of them in bundles that stay in L2. Sums are made by chunk: they do
not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from deuteron.codegen.calls import Call, Tape
from deuteron.codegen.llvm import F32, F64, Code, Loaded, Value, entry, load, width
from deuteron.ir.dtype import DType, dtype
from deuteron.kernels.cpu import adafactor
from deuteron.kernels.cpu.optim_rows import POINTERS, Pass, Row, Writer
from deuteron.kernels.optim import FLAT, GROUP, MATRICES, Rule, Step

BLOCK = 8192  # elements of a chunk: the reading of a table is lost in them
SERIAL = 32768  # elements below which a team of threads costs more than it gains
BUNDLE = 1 << 17  # elements


class Chunks(NamedTuple):
    """The tensors' addresses and sizes, the list of their chunks, and the first of each."""

    table: torch.Tensor
    where: torch.Tensor
    firsts: torch.Tensor


def _rows(w: Pass, number: Value) -> None:
    """The rows of a chunk of a tensor that is taken as one long row, or as groups."""
    c = w.c
    start = c.mul(number, BLOCK)
    end = c.least(c.add(start, BLOCK), w.entry(0))
    if w.step.walk == FLAT:
        w.row(Row(start, c.sub(end, start)))
        return
    with c.loop(start, end, GROUP) as at:
        w.row(Row(at, c.least(c.sub(end, at), GROUP), {"row": c.div(at, GROUP)}))


def _write(module: Any, step: Step, kinds: Mapping[str, DType]) -> None:
    wide = any(kind.short == "f64" for kind in kinds.values())
    of = F64 if wide or step.kind == "finish" else F32

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        w = (Pass if step.kind == "pass" else Writer)(c, step, words, kinds, of)
        with w.items(thread, threads) as item:
            if step.kind == "finish":
                _finish(w, item)
                return
            number = w.chunk(item)
            if step.kind == "moments":
                adafactor.moments(w, number)
                return
            w.begin()
            (adafactor.rows if step.walk == MATRICES else _rows)(w, number)
            w.end(item)

    entry(module, "run", body)


def _finish(w: Writer, t: Value) -> None:
    """One number of a tensor, from the sums of its chunks."""
    c, b, names = w.c, w.c.b, w.step.names
    totals = [w.zero() for _ in names.sums]
    firsts, chunks = w.given["firsts"], w.count["chunks"]
    with c.loop(c.index(firsts, t), c.index(firsts, c.add(t, 1))) as chunk:
        for k, total in enumerate(totals):
            more = c.load(c.at(w.given["sums"], c.mul(chunks, k), chunk, of=F64), of=F64)
            b.store(b.fadd(c.get(total, F64), more), total)
    w.t = t
    known = w.numbers(t) | {"size": b.sitofp(w.entry(0), F64)}
    known |= {name: c.get(total, F64) for name, total in zip(names.sums, totals, strict=True)}
    for name, value in w.run(w.step.body, known).items():
        place = c.add(c.mul(t, w.count["stride"]), names.numbers.index(name))
        b.store(value, c.at(w.given["rows"], place, of=F64))


@lru_cache
def compiled(step: Step, dtypes: tuple[torch.dtype, ...]) -> Loaded:
    """The code of a step; ``dtypes`` in the order of the tensors' names."""
    kinds = dict(zip(step.names.tensors, map(dtype, dtypes), strict=True))
    shorts = {name: kind.short for name, kind in kinds.items()}
    name = f"optim {step.kind} {step.walk} {step.names} {step.body} {shorts} of {width()}"
    return load(name, lambda module: _write(module, step, kinds))


class Steps:
    """All steps of a rule over some tensors as one call; gradients and numbers are still open."""

    def __init__(
        self,
        rule: Rule,
        dtypes: tuple[torch.dtype, ...],
        chunks: Chunks,
        shapes: Sequence[Sequence[int]],
        sizes: Sequence[int],
    ) -> None:
        if rule.walk == MATRICES:
            *made, self.scratch = adafactor.cut(chunks.table, shapes, dtypes[-1])
            chunks = Chunks(*made)
        names, count, total = rule.names, chunks.table.shape[1], chunks.where.shape[1]
        many = count if rule.finished else 1  # rows of numbers
        self.sums = torch.zeros(len(names.sums), total, dtype=torch.float64)
        rows = torch.empty(many, len(names.numbers), dtype=torch.float64)
        known = [chunks.table, chunks.table, chunks.where, rows, self.sums, chunks.firsts]
        counts = [count, total, len(names.numbers) if many > 1 else 0]
        header = torch.tensor([*(x.data_ptr() for x in known), *counts])
        self.rows, self.header = rows.numpy(), header.numpy()
        self.held = (*known, header)  # which the calls point to
        calls = []
        firsts = chunks.firsts.tolist()
        for first, last in _bundles(sizes) if len(rule.steps) > 1 else [(0, count)]:
            threaded = sum(sizes[first:last]) > SERIAL
            for step in rule.steps:
                of = (first, last) if step.kind == "finish" else (firsts[first], firsts[last])
                calls.append(Call(compiled(step, dtypes), (header, *of), threaded))
        self.tape = Tape(calls)

    def run(self, grads: torch.Tensor, numbers: Sequence[float]) -> None:
        self.rows[:] = numbers
        self.header[POINTERS.index("grads")] = grads.data_ptr()
        self.tape.run(self.tape.words())


def _bundles(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Which tensors go through all steps together."""
    made, begin, size = [], 0, 0
    for i, more in enumerate(sizes):
        size += more
        if size >= BUNDLE or i == len(sizes) - 1:
            made.append((begin, i + 1))
            begin, size = i + 1, 0
    return made
