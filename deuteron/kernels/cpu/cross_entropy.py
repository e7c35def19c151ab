"""Cross-entropy of rows of logits with its gradient, each row while it lies in the cache.

    e = exp(x − max)    lse = max + log Σ e    part = Σ q · (x − max)    mass = Σ q
    loss = (mass · log Σ e − part) · t₀ + z · lse² · t₁
    grad = e / Σ e · (mass · t₂ + 2 · z · lse · t₃) − q · t₂

    bytes = size · (x + grad), and the target's where it is probabilities

q are the wanted shares of the classes: a target's own for a class, (1 − ε) · p + ε / C where they
are spread, all times the weights of the classes; t are the totals of the batch. One exponential
for each logit: they are kept in float32, in a row of each thread's own, until the sum is known.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from deuteron.codegen.calls import Argument, Call, Room, runner
from deuteron.codegen.llvm import F32, I8, I32, I64, Code, Loaded, Value, entry, load, width
from deuteron.codegen.llvm_math import exp_nonpositive, log
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, Gathered, LongSum, blocks, steps

POINTERS = ("x", "share", "weight", "place", "own", "live", "total", "loss", "lse", "mass", "grad")
LONG = 1 << 13  # classes from which on sums along a row are made in parts
NUMBERS = ("rows", "classes", "x_step", "share_step", "grad_step", "even", "sharp", "z")


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for."""

    stored: str  # the type of logits and gradient
    probabilities: str  # the type of the target's, or "" where it is classes
    spread: bool  # whether every class has a share
    weight: bool
    grad: bool
    long: bool  # rows: float32 cannot add up so many


class _Rows:
    """One thread's rows."""

    def __init__(self, c: Code, form: Form, words: Value, thread: Value) -> None:
        self.c, self.form, self.of = c, form, Stored(c, form.stored)
        self.at = {name: c.pointer(words, k) for k, name in enumerate(POINTERS)}
        given = {name: c.word(words, len(POINTERS) + k) for k, name in enumerate(NUMBERS)}
        for name in ("even", "sharp", "z"):
            given[name] = c.b.bitcast(c.b.trunc(given[name], I32), F32)
        self.given, self.classes = given, given["classes"]
        room = c.pointer(words, len(POINTERS) + len(NUMBERS))
        self.kept = c.at(room, c.mul(thread, self.classes))
        self.totals = [c.load(c.at(self.at["total"], k)) for k in range(4)]
        self.best = Gathered(c, c.fmax, float("-inf"))
        self.power, self.part, self.mass = self.sums = [
            LongSum(c) if form.long else Gathered(c, c.b.fadd, 0.0) for _ in range(3)
        ]

    def logit(self, row: Value, i: Value, lanes: int) -> Value:
        where = self.of.at(self.at["x"], self.c.mul(row, self.given["x_step"]), i)
        return self.of.load(where, lanes)

    def share(self, row: Value, i: Value, lanes: int) -> Value:
        """What is wanted of classes, without what a target that is a class adds to its own."""
        c, form = self.c, self.form
        q = c.splat(self.given["even"], lanes)
        if form.probabilities:
            of = Stored(c, form.probabilities)
            where = of.at(self.at["share"], c.mul(row, self.given["share_step"]), i)
            q = c.fma(of.load(where, lanes), c.splat(self.given["sharp"], lanes), q)
        if form.weight:
            q = c.b.fmul(q, c.load(c.at(self.at["weight"], i), lanes))
        return q

    def row(self, row: Value) -> None:
        c, form, t = self.c, self.form, self.totals
        for each in (self.best, *self.sums):
            each.clear()
        steps(c, self.classes, lambda i, n: self.best.take(self.logit(row, i, n), n))
        top = self.best.total()
        blind = c.b.fcmp_ordered("==", top, c.f(float("-inf")))
        top = c.b.select(blind, c.f(0.0), top)

        def powers(i: Value, lanes: int) -> None:
            less = c.b.fsub(self.logit(row, i, lanes), c.splat(top, lanes))
            e = exp_nonpositive(c, less)
            self.power.take(e, lanes)
            if form.grad:
                c.store(e, c.at(self.kept, i))
            if form.spread:
                q = self.share(row, i, lanes)
                self.part.take(less, lanes, q)
                self.mass.take(q, lanes)

        def fold() -> None:
            for each in self.sums:
                if isinstance(each, LongSum):
                    each.fold()

        if form.long:
            blocks(c, self.classes, powers, fold)
        else:
            steps(c, self.classes, powers)
        part, mass, power = self.part.total(), self.mass.total(), self.power.total()
        place: Value = c.i(0)
        own: Value = c.f(0.0)
        if not form.probabilities:
            place = c.load(c.at(self.at["place"], row, of=I64), of=I64)
            own = c.load(c.at(self.at["own"], row))
            part = c.fma(own, c.b.fsub(self.logit(row, place, 1), top), part)
            mass = c.b.fadd(mass, own)
        log_sum, z = log(c, power), self.given["z"]
        lse = c.b.fadd(top, log_sum)
        loss = c.b.fmul(c.b.fsub(c.b.fmul(mass, log_sum), part), t[0])
        pull = c.b.fmul(z, lse)
        loss = c.fma(c.b.fmul(pull, lse), t[1], loss)
        slope = c.fma(c.b.fmul(c.f(2.0), pull), t[3], c.b.fmul(mass, t[2]))
        live = c.cmp("!=", c.b.zext(c.load(c.at(self.at["live"], row, of=I8), of=I8), I64), 0)
        for name, value, otherwise in (
            ("loss", loss, c.b.fmul(c.f(0.0), t[0])),
            ("lse", lse, c.f(0.0)),
            ("mass", mass, c.f(0.0)),
        ):
            c.store(c.b.select(live, value, otherwise), c.at(self.at[name], row))
        if form.grad:
            c.either(
                live,
                lambda: self.gradient(row, c.b.fdiv(slope, power), place, own),
                lambda: self.nothing(row),
            )

    def result(self, row: Value, i: Value) -> Value:
        return self.of.at(self.at["grad"], self.c.mul(row, self.given["grad_step"]), i)

    def gradient(self, row: Value, scale: Value, place: Value, own: Value) -> None:
        c, form = self.c, self.form
        share = self.totals[2]

        def one(i: Value, lanes: int) -> Value:
            d = c.b.fmul(c.load(c.at(self.kept, i), lanes), c.splat(scale, lanes))
            if form.spread:
                d = c.b.fsub(d, c.b.fmul(self.share(row, i, lanes), c.splat(share, lanes)))
            return d

        steps(c, self.classes, lambda i, n: self.of.store(one(i, n), self.result(row, i)))
        if not form.probabilities:
            d = c.b.fsub(one(place, 1), c.b.fmul(own, share))
            self.of.store(d, self.result(row, place))

    def nothing(self, row: Value) -> None:
        c = self.c
        steps(c, self.classes, lambda i, n: self.of.store(c.f(0.0, n), self.result(row, i)))


def _write(module: Any, form: Form) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        rows = _Rows(c, form, words, thread)
        begin, end = c.share(rows.given["rows"], thread, threads)
        with c.loop(begin, end) as row:
            rows.row(row)

    entry(module, "run", body)


def compiled(form: Form) -> Loaded:
    return load(f"cross entropy {form} of {width()}", lambda module: _write(module, form))


@lru_cache(maxsize=256)
def prepare_rows(
    form: Form,
    names: frozenset[str],
    sizes: tuple[int, int, int, int, int],
    numbers: tuple[float, float, float],
) -> Callable[[Mapping[str, torch.Tensor]], None]:
    """A function that fills loss, lse, mass and grad among tensors called by ``names``, some of
    POINTERS. ``sizes`` are rows, classes, and from row to row of logits, target and gradient;
    ``numbers`` are ε / C, 1 − ε and z."""
    rows, classes, *_ = sizes
    used = [name for name in POINTERS if name in names]
    words = [Argument(used.index(name)) if name in names else 0 for name in POINTERS]
    bits = struct.unpack("<3i", struct.pack("<3f", *numbers))
    room = Room("cross entropy", 0, classes if form.grad else 0)
    call = Call(compiled(form), (*words, *sizes, *bits, room), rows * classes > SERIAL)
    run = runner([call])
    return lambda tensors: run(*(tensors[name] for name in used))
