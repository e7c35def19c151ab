"""The gradients of layer norm and RMS norm over rows of float32, from one read of x and grad.

    d = x − mean    hat = d · rstd    inner = grad · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ grad · hat    dbias = Σ grad

    bytes = 4 · (x + grad + dx + extra), all further passes over a row from L1

Each thread takes a range of rows, and keeps sums for dweight and dbias of its own, which a second
call adds up. So the order of a sum depends on how many threads there are, and on nothing else. The
sums of 32 rows are added to those of all before, in float64: a rounding error grows with the
length of a sum, and so it stays that of 32 rows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, I32, Code, Loaded, Value, entry, load, vec, width
from deuteron.kernels.cpu.sweep import SERIAL, Terms, pivot, steps, sums

SHORT = 32  # columns
LONG = 1 << 15  # columns from which on sums along a row are made in parts, too
TOGETHER = 32  # rows that are added up in float32
PARTS = 6  # rows of float32 that a thread keeps: two sums, and twice the width for each in float64


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: the norm, which inputs there are, which results are read."""

    centred: bool
    weight: bool
    extra: bool
    dx: bool
    dweight: bool
    dbias: bool
    short: bool  # rows: little is left of dx, and inner · hat is rounded as it will be used
    long: bool  # rows: float32 cannot add up so many


class _Rows:
    """One thread's rows."""

    def __init__(self, c: Code, form: Form, words: Value, thread: Value) -> None:
        self.c, self.form = c, form
        self.x, self.grad, self.weight, self.extra, self.dx, parts = (
            c.pointer(words, i) for i in range(6)
        )
        self.rows, self.columns = c.word(words, 6), c.word(words, 7)
        self.eps = c.b.bitcast(c.b.trunc(c.word(words, 8), I32), F32)
        self.count = c.b.sitofp(self.columns, F32)
        # dweight and dbias of a few rows, then of all in float64
        self.few = c.at(parts, c.mul(thread, PARTS, self.columns))
        self.all = c.at(self.few, c.mul(2, self.columns))
        self.dweight, self.dbias = self.few, c.at(self.few, self.columns)

    def clear(self) -> None:
        c = self.c
        steps(
            c,
            c.mul(PARTS, self.columns),
            lambda i, lanes: c.store(c.f(0.0, lanes), c.at(self.few, i)),
        )

    def fold(self) -> None:
        """The sums of a few rows are added to those of all, and start again."""
        c = self.c

        def add(i: Value, lanes: int) -> None:
            few, all_ = c.at(self.few, i), c.at(self.all, i, of=F64)
            more = c.b.fpext(c.load(few, lanes), vec(lanes, F64))
            c.store(c.b.fadd(c.load(all_, lanes, of=F64), more), all_)
            c.store(c.f(0.0, lanes), few)

        steps(c, c.mul(2, self.columns), add)

    def row(self, at: Value) -> None:
        c, form = self.c, self.form

        def x(i: Value, lanes: int) -> Value:
            return c.load(c.at(self.x, at, i), lanes)

        def grad(i: Value, lanes: int) -> Value:
            return c.load(c.at(self.grad, at, i), lanes)

        mean = off = c.f(0.0)
        if form.centred:
            start = pivot(c, x(c.i(0), 1), x(c.least(c.i(1), c.sub(self.columns, 1)), 1))

            def away(i: Value, lanes: int) -> Sequence[tuple[Value, Value | None]]:
                return [(c.b.fsub(x(i, lanes), c.splat(start, lanes)), None)]

            (total,) = sums(c, self.columns, 1, away, form.long)
            more = c.b.fdiv(total, self.count)
            mean = c.b.fadd(start, more)
            off = c.b.fsub(more, c.b.fsub(mean, start))  # what a mean of 1000 has no digits for

        def deviation(i: Value, lanes: int) -> Value:
            here = x(i, lanes)
            return c.b.fsub(here, c.splat(mean, lanes)) if form.centred else here

        def inner(i: Value, lanes: int) -> Value:
            g = grad(i, lanes)
            return c.b.fmul(g, c.load(c.at(self.weight, i), lanes)) if form.weight else g

        def square(i: Value, lanes: int) -> Sequence[tuple[Value, Value | None]]:
            d = deviation(i, lanes)
            return [(d, d)]

        def hat_of(i: Value, lanes: int, rstd: Value) -> Value:
            d, scale = deviation(i, lanes), c.splat(rstd, lanes)
            if not form.centred:
                return c.b.fmul(d, scale)
            return c.fma(d, scale, c.splat(c.b.fneg(c.b.fmul(off, rstd)), lanes))

        def products(i: Value, lanes: int, rstd: Value | None) -> Sequence[Any]:
            part = inner(i, lanes)
            hat = deviation(i, lanes) if rstd is None else hat_of(i, lanes, rstd)
            return [(hat, part), (part, None)][: 1 + form.centred]

        def together(i: Value, lanes: int) -> Sequence[Any]:
            return [*square(i, lanes), *products(i, lanes, None)]

        def means(count: int, terms: Terms) -> list[Value]:
            found = sums(c, self.columns, count, terms, form.long)
            return [c.b.fdiv(s, self.count) for s in found]

        def inverse_root(variance: Value) -> Value:
            """Where squares overflowed it is nan, and not a gradient of 0."""
            root = c.b.fdiv(c.f(1.0), c.intrinsic("sqrt", c.b.fadd(variance, self.eps)))
            infinite = c.b.fcmp_ordered("==", variance, c.f(math.inf))
            return c.b.select(infinite, c.f(math.nan), root)

        rest: list[Value] = []
        if form.dx and not form.short:
            variance, *rest = means(2 + form.centred, together)
            rstd = inverse_root(variance)
            if form.centred:
                rest[0] = c.fma(c.b.fneg(off), rest[1], rest[0])
            rest[0] = c.b.fmul(rest[0], rstd)
        else:
            rstd = inverse_root(*means(1, square))
            if form.dx:
                rest = means(1 + form.centred, lambda i, lanes: products(i, lanes, rstd))

        def results(i: Value, lanes: int) -> None:
            hat = hat_of(i, lanes, rstd)
            if form.dx:
                flat = inner(i, lanes)
                if form.centred:
                    flat = c.b.fsub(flat, c.splat(rest[1], lanes))
                flat = c.fma(c.b.fneg(hat), c.splat(rest[0], lanes), flat)
                out = c.b.fmul(flat, c.splat(rstd, lanes))
                if form.extra:
                    out = c.b.fadd(out, c.load(c.at(self.extra, at, i), lanes))
                c.store(out, c.at(self.dx, at, i))
            g = grad(i, lanes)
            if form.dweight:
                room = c.at(self.dweight, i)
                c.store(c.fma(g, hat, c.load(room, lanes)), room)
            if form.dbias:
                room = c.at(self.dbias, i)
                c.store(c.b.fadd(c.load(room, lanes), g), room)

        steps(c, self.columns, results)


def _write_rows(module: Any, form: Form) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        w = _Rows(c, form, words, thread)
        w.clear()
        begin, end = c.share(w.rows, thread, threads)
        with c.loop(begin, end, TOGETHER) as first:
            with c.loop(first, c.least(c.add(first, TOGETHER), end)) as row:
                w.row(c.mul(row, w.columns))
            if form.dweight or form.dbias:
                w.fold()

    entry(module, "run", body)


def _write_totals(module: Any, form: Form) -> None:
    """The sums of all threads, each thread a range of columns."""

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        parts, *outs = (c.pointer(words, i) for i in range(3))
        columns = c.word(words, 3)
        begin, end = c.share(columns, thread, threads)
        for k, (out, wanted) in enumerate(zip(outs, (form.dweight, form.dbias), strict=True)):
            if not wanted:
                continue
            with c.loop(begin, end) as i:
                total = c.variable(F64)
                c.b.store(F64(0.0), total)
                with c.loop(0, threads) as t:
                    mine = c.at(parts, c.mul(c.add(c.mul(t, PARTS), 2), columns))
                    here = c.load(c.at(mine, c.mul(k, columns), i, of=F64), of=F64)
                    c.b.store(c.b.fadd(c.get(total, F64), here), total)
                c.store(c.b.fptrunc(c.get(total, F64), F32), c.at(out, i))

    entry(module, "run", body)


def compiled(form: Form) -> tuple[Loaded, Loaded]:
    """The pass over the rows, and what adds up the sums of the threads."""
    name = f"{form} of {width()}"
    return (
        load(f"norm gradient rows {name}", lambda module: _write_rows(module, form)),
        load(f"norm gradient totals {name}", lambda module: _write_totals(module, form)),
    )


def prepare_norm_grad(form: Form, rows: int, columns: int, eps: float) -> Callable[..., list[Call]]:
    """The calls for x, grad, weight, extra, dx, dweight and dbias, where each is; 0 for none."""
    first, second = compiled(form)
    (bits,) = struct.unpack("<i", struct.pack("<f", eps))
    parts = Room("norm gradient", 0, per_thread=PARTS * columns)
    threaded = rows * columns > SERIAL

    def calls(
        x: Word, grad: Word, weight: Word, extra: Word, dx: Word, dweight: Word, dbias: Word
    ) -> list[Call]:
        words = (x, grad, weight, extra, dx, parts, rows, columns, bits)
        found = [Call(first, words, threaded)]
        if form.dweight or form.dbias:
            found.append(Call(second, (parts, dweight, dbias, columns), threaded))
        return found

    return calls
