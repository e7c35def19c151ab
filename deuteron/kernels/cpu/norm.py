"""Norms over elements that lie one after the other, in row-major order: the gradients of layer and
RMS norm over rows, those of group and instance norm, and batch norm in training with what follows
it and its gradient, over [N, C, S]. Where channels lie innermost it is ``channels_last_norm.py``.

    forward    y = act((x − mean) · rstd · weight + bias + residual)
    gradient   dz = grad · act'    hat = (x − mean) · rstd    inner = dz · weight
               dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
               dweight = Σ dz · hat    dbias = Σ dz

    bytes = size · (x + residual + y) and size · (x + grad + y + dz + dx + extra), where a set of
    elements that share their statistics fits in the cache: further passes over it come from there

A set is several segments: a row alone, the N pieces of a channel, or the channels of a group in one
image. Threads share the sets. Each row adds to dweight and dbias of its thread, which go on in
float64 every 32 rows; a group's share lies in a room of its own. A second call adds these up: so
the order of a sum depends on how many threads there are, if at all, and on nothing else.

Generated code makes dx in one pass over the rows and each sum down the columns in another. On a
Neoverse N1, with the forward step: rows of 768 in half the time, 8 × 64 × 56 × 56 in a third for
batch norm and in half for groups, in float32 as in bfloat16.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, I32, Code, Value, entry, lanes_of, load, vec, width
from deuteron.codegen.llvm_compute import inline
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, Sums, pivot, steps
from deuteron.ops.activated import activation

POINTERS = (
    *("x", "grad", "weight", "bias", "residual", "y", "extra", "mean", "rstd"),
    *("running_mean", "running_var", "dx", "dz", "dweight", "dbias", "new_mean", "new_var"),
)
SHORT = 32  # elements of a set of which so little is left in dx that hat is rounded as it is used
LONG = 1 << 15  # elements of a row from which on sums along it are made in parts, too
TOGETHER = 32  # rows that are added up in float32
OF_A_THREAD = 6  # rows that it keeps: two sums, and twice the width for each in float64


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for. ``sets``: "rows", "groups" or "channels" share statistics;
    ``there``: which tensors there are; then their types."""

    sets: str
    there: tuple[str, ...]
    stored: str
    param: str = "f32"
    running: str = "f32"
    of_weight: str = "f32"  # dweight and dbias
    of_bias: str = "f32"
    activation: str = "none"
    centred: bool = True
    short: bool = False
    long: bool = True

    @property
    def name(self) -> str:
        return f"{self} of {width()}"


# ---- what is done with a few elements ------------------------------------------------------------


class Numbers(NamedTuple):
    """What elements share, of a channel or one in each lane: statistics and parameters, and for dx
    mean(inner) and mean(inner · hat)."""

    mean: Value
    rstd: Value
    weight: Value
    bias: Value
    level: Value | None = None
    slope: Value | None = None


class Tensors:
    """The operands of a kernel, and what is done with a few elements of them, whichever way they
    lie: numbers of a channel are the same in every lane, or each lane has its own."""

    def __init__(self, c: Code, kind: Kind, words: Value, numbers: Sequence[str]) -> None:
        self.c, self.kind, self.act = c, kind, activation(kind.activation)
        self.of, self.param = Stored(c, kind.stored), Stored(c, kind.param)
        self.at = {name: c.pointer(words, k) for k, name in enumerate(POINTERS)}
        self.n = {name: c.word(words, len(POINTERS) + k) for k, name in enumerate(numbers)}
        for name in ("eps", "momentum"):
            self.n[name] = c.b.bitcast(c.b.trunc(self.n[name], I32), F32)
        self.parts = c.pointer(words, len(POINTERS) + len(numbers))

    def has(self, name: str) -> bool:
        return name in self.kind.there

    def load(self, name: str, at: Value, i: Value, lanes: int) -> Value:
        return self.of.load(self.of.at(self.at[name], at, i), lanes)

    def store(self, value: Value, name: str, at: Value, i: Value) -> None:
        self.of.store(value, self.of.at(self.at[name], at, i))

    def number(self, name: str, at: Value, otherwise: float, lanes: int = 1) -> Value:
        """A parameter of a channel, or of as many as there are lanes."""
        if not self.has(name):
            return self.c.f(otherwise, lanes)
        return self.param.load(self.param.at(self.at[name], at), lanes)

    def root(self, variance: Value) -> Value:
        """1/√(variance + eps); nan where squares overflowed, and not a result that is the bias."""
        c, lanes = self.c, lanes_of(variance)
        root = c.intrinsic("sqrt", c.b.fadd(variance, self.of.lanes(self.n["eps"], lanes)))
        infinite = c.b.fcmp_ordered("==", variance, c.f(math.inf, lanes))
        return c.b.select(infinite, c.f(math.nan, lanes), c.b.fdiv(c.f(1.0, lanes), root))

    def keep(self, channel: Value, mean: Value, variance: Value, rstd: Value, count: Value) -> None:
        """The statistics that somebody reads, from the channel on."""
        c, lanes = self.c, lanes_of(mean)
        for name, value in (("mean", mean), ("rstd", rstd)):
            if self.has(name):
                c.store(value, c.at(self.at[name], channel))
        spread = c.b.fdiv(count, c.b.fsub(count, c.f(1.0)))
        self._move("mean", channel, mean)
        self._move("var", channel, c.b.fmul(variance, self.of.lanes(spread, lanes)))

    def _move(self, what: str, channel: Value, found: Value) -> None:
        """The new running statistic: the old one on its way to what was found. Two products, as in
        torch: one of their difference would round small numbers away beside large old ones."""
        c, new, old, lanes = self.c, f"new_{what}", f"running_{what}", lanes_of(found)
        of = Stored(c, self.kind.running)
        if self.has(old):
            before = of.load(of.at(self.at[old], channel), lanes)
            share = of.lanes(self.n["momentum"], lanes)
            kept = c.b.fmul(c.b.fsub(c.f(1.0, lanes), share), before)
            found = c.fma(share, found, kept)
        if self.has(new):
            of.store(found, of.at(self.at[new], channel))

    def affine(self, channel: Value, rest: Value, rstd: Value) -> tuple[Value, Value]:
        """What a distance from the mean is multiplied by, and what is added then. The rest of a
        mean, for which float32 has no digits, is taken off where the slope of the activation does
        not jump: where it does, the gradient must find the same z by the mean as it is stored."""
        c, lanes = self.c, lanes_of(rstd)
        scale = c.b.fmul(rstd, self.number("weight", channel, 1.0, lanes))
        shift = self.number("bias", channel, 0.0, lanes)
        if self.act is None or not self.act.jumps or self.has("residual"):
            shift = c.fma(c.b.fneg(rest), scale, shift)
        return scale, shift

    def away(self, at: Value, i: Value, lanes: int, mean: Value) -> Value:
        """x − mean."""
        return self.c.b.fsub(self.load("x", at, i, lanes), self.of.lanes(mean, lanes))

    def before(
        self, at: Value, i: Value, lanes: int, mean: Value, scale: Value, shift: Value
    ) -> Value:
        """(x − mean) · scale + shift, the same forward and backward."""
        d, wide = self.away(at, i, lanes, mean), self.of.lanes
        return self.c.fma(d, wide(scale, lanes), wide(shift, lanes))

    def finish(self, z: Value, at: Value, i: Value) -> None:
        """The result from what the norm gave."""
        c, lanes = self.c, lanes_of(z)
        if self.has("residual"):
            z = c.b.fadd(z, self.load("residual", at, i, lanes))
        if self.act is not None:
            z = inline(c, self.act.traced, z)
        self.store(z, "y", at, i)

    def dz(self, at: Value, i: Value, lanes: int, n: Numbers) -> Value:
        """The gradient before the activation."""
        c, g = self.c, self.load("grad", at, i, lanes)
        if self.act is None:
            return g
        if self.has("y"):
            z = self.load("y", at, i, lanes)
        else:
            z = self.before(at, i, lanes, n.mean, c.b.fmul(n.rstd, n.weight), n.bias)
            if self.has("residual"):
                z = c.b.fadd(z, self.load("residual", at, i, lanes))
        return inline(c, self.act.slope(self.has("y")), g, z)

    def give(self, dz: Value, hat: Value, at: Value, i: Value, n: Numbers) -> None:
        """dx, where somebody reads it."""
        c, lanes = self.c, lanes_of(dz)
        if not self.has("dx"):
            return
        _, rstd, weight, _, level, slope = (v and self.of.lanes(v, lanes) for v in n)
        rest = c.b.fmul(dz, weight)
        rest = c.b.fsub(rest, level) if self.kind.centred else rest
        out = c.b.fmul(c.fma(c.b.fneg(hat), slope, rest), rstd)
        if self.has("extra"):
            out = c.b.fadd(out, self.load("extra", at, i, lanes))
        self.store(out, "dx", at, i)


# ---- sets of elements ----------------------------------------------------------------------------

NUMBERS = ("sets", "segments", "length", "set_step", "segment_step", "groups", "eps", "momentum")


class Sizes(NamedTuple):
    """Of what is normalised: sets, segments of a set, elements of a segment, from set to set and
    from segment to segment, and the groups of an image."""

    sets: int
    segments: int
    length: int
    set_step: int
    segment_step: int
    groups: int

    @staticmethod
    def of_rows(rows: int, columns: int) -> Sizes:
        return Sizes(rows, 1, columns, columns, columns, 1)

    @staticmethod
    def of_channels(n: int, channels: int, length: int) -> Sizes:
        return Sizes(channels, n, length, length, channels * length, channels)

    @staticmethod
    def of_groups(n: int, channels: int, length: int, groups: int) -> Sizes:
        each = channels // groups
        return Sizes(n * groups, each, length, each * length, length, groups)


class _Sets(Tensors):
    """What a thread does with one set after another."""

    def __init__(self, c: Code, kind: Kind, words: Value, thread: Value) -> None:
        super().__init__(c, kind, words, NUMBERS)
        self.length, self.rows = self.n["length"], kind.sets == "rows"
        self.count = c.b.sitofp(c.mul(self.n["segments"], self.length), F32)
        self.one, self.two, self.three = (Sums(c, k, kind.long) for k in (1, 2, 3))
        if self.rows:  # dweight and dbias of a few rows, then of all in float64
            self.few = c.at(self.parts, c.mul(thread, OF_A_THREAD, self.length))
            self.all = c.at(self.few, c.mul(2, self.length))

    @contextmanager
    def segments(self, base: Value) -> Iterator[tuple[Value, Value]]:
        """The number and the place of one segment after another."""
        with self.c.loop(0, self.n["segments"]) as j:
            yield j, self.c.add(base, self.c.mul(j, self.n["segment_step"]))

    def mean_of(self, base: Value, term: Callable[[Value, Value, int], Sequence[Any]]) -> Value:
        """The mean over a set of what ``term(place, column, lanes)`` gives."""
        self.one.clear()
        with self.segments(base) as (_, at):
            self.one.add(self.length, lambda i, lanes: [term(at, i, lanes)])
        return self.c.b.fdiv(self.one.totals()[0], self.count)

    def centre(self, base: Value) -> tuple[Value, Value | None]:
        """The mean, and what float32 has no digits for of it. It is found by distances from one of
        the first elements: exact for a large mean."""
        c = self.c
        if not self.kind.centred:
            return c.f(0.0), None
        second = c.least(c.i(1), c.sub(self.length, 1))
        start = pivot(c, *(self.load("x", base, i, 1) for i in (c.i(0), second)))
        more = self.mean_of(base, lambda at, i, n: (self.away(at, i, n, start), None))
        mean = c.b.fadd(start, more)
        return mean, c.b.fsub(more, c.b.fsub(mean, start))

    def variance(self, base: Value, mean: Value) -> Value:
        return self.mean_of(base, lambda at, i, n: (self.away(at, i, n, mean),) * 2)

    # ---- forward

    def forward(self, channel: Value) -> None:
        base = self.c.mul(channel, self.n["set_step"])
        mean, rest = self.centre(base)
        variance = self.variance(base, mean)
        rstd = self.root(variance)
        self.keep(channel, mean, variance, rstd, self.count)
        if not self.has("y"):
            return
        scale, shift = self.affine(channel, rest or self.c.f(0.0), rstd)
        with self.segments(base) as (_, at):

            def write(i: Value, lanes: int) -> None:
                self.finish(self.before(at, i, lanes, mean, scale, shift), at, i)

            steps(self.c, self.length, write)

    # ---- gradient

    def backward(self, index: Value) -> None:
        """Where statistics are not known, squares and products are added up in one pass; of a short
        set in two, so that hat is rounded in the products as it is in dx."""
        c, kind, known = self.c, self.kind, self.kind.sets == "channels"
        base = c.mul(index, self.n["set_step"])
        group = c.rem(index, self.n["groups"])
        first = c.mul(group, self.n["segments"]) if kind.sets == "groups" else group
        rest: Value | None = None  # batch norm keeps the mean as float32
        if known:
            mean, rstd = (c.load(c.at(self.at[name], index)) for name in ("mean", "rstd"))
        else:
            mean, rest = self.centre(base)
            rstd = self.root(self.variance(base, mean)) if kind.short else c.f(1.0)

        def shared(j: Value, i: Value, lanes: int) -> Numbers:
            """By the elements of a segment; weights are those of columns or of channels."""
            at, wide = (i, lanes) if self.rows else (first, 1)
            at = c.add(first, j) if kind.sets == "groups" else at
            weight, bias = self.number("weight", at, 1.0, wide), self.number("bias", at, 0.0, wide)
            return Numbers(mean, rstd, weight, bias)

        def hat(at: Value, i: Value, lanes: int, rstd: Value) -> Value:
            if rest is None:
                return c.b.fmul(distance(at, i, lanes), self.of.lanes(rstd, lanes))
            return self.before(at, i, lanes, mean, rstd, c.b.fneg(c.b.fmul(rest, rstd)))

        def distance(at: Value, i: Value, lanes: int) -> Value:
            return self.away(at, i, lanes, mean) if kind.centred else self.load("x", at, i, lanes)

        at_once = not known and not kind.short
        sums = self.three if at_once else self.two
        squares, level, slope = (c.variable(F32) for _ in range(3))
        for total in (squares, level, slope):
            c.b.store(c.f(0.0), total)

        def add_to(total: Value, value: Value, times: Value) -> None:
            c.b.store(c.fma(value, times, c.get(total, F32)), total)

        def add_up(j: Value) -> None:
            """Σ dz and Σ dz · hat of what was taken, for a channel and with its weight."""
            a, b, *of_squares = sums.totals()
            if at_once:
                add_to(squares, *of_squares, c.f(1.0))
                b = b if rest is None else c.fma(c.b.fneg(rest), a, b)
            w = c.f(1.0) if self.rows else shared(j, j, 1).weight
            add_to(level, a, w)
            add_to(slope, b, w)
            if kind.sets == "groups":
                for k, value in enumerate((b, a)):
                    c.store(value, self.part_at(k, index, j))
            elif known:
                for name, value in (("dweight", b), ("dbias", a)):
                    if self.has(name):
                        c.store(value, c.at(self.at[name], index))

        sums.clear()
        with self.segments(base) as (j, at):
            if kind.sets == "groups":
                sums.clear()

            def terms(i: Value, lanes: int) -> Sequence[tuple[Value, Value | None]]:
                n = shared(j, i, lanes)
                g = self.dz(at, i, lanes, n)
                g = c.b.fmul(g, n.weight) if self.rows and self.has("weight") else g
                if not at_once:
                    return [(g, None), (g, hat(at, i, lanes, rstd))]
                d = distance(at, i, lanes)
                return [(g, None), (g, d), (d, d)]

            sums.add(self.length, terms)
            if kind.sets == "groups":
                add_up(j)
        if kind.sets != "groups":
            add_up(c.i(0))
        lean = c.b.fdiv(c.get(slope, F32), self.count)
        if at_once:
            rstd = self.root(c.b.fdiv(c.get(squares, F32), self.count))
            lean = c.b.fmul(lean, rstd)
            if kind.sets == "groups":
                with c.loop(0, self.n["segments"]) as j:
                    part = self.part_at(0, index, j)
                    c.store(c.b.fmul(c.load(part), rstd), part)
        flat = c.b.fdiv(c.get(level, F32), self.count)
        with self.segments(base) as (j, at):

            def write(i: Value, lanes: int) -> None:
                n, h = shared(j, i, lanes), hat(at, i, lanes, rstd)
                d = self.dz(at, i, lanes, n)
                if self.has("dz"):
                    self.store(d, "dz", at, i)
                self.give(d, h, at, i, n._replace(level=flat, slope=lean))
                for k, name in enumerate(("dweight", "dbias")):
                    if self.rows and self.has(name):
                        room = c.at(self.few, c.mul(k, self.length), i)
                        now = c.load(room, lanes)
                        c.store(c.b.fadd(now, d) if k else c.fma(d, h, now), room)

            steps(c, self.length, write)

    def part_at(self, k: int, index: Value, j: Value) -> Value:
        """Where a group's share of dweight, and of dbias, lies."""
        c = self.c
        all_parts = c.mul(self.n["sets"], self.n["segments"])
        return c.at(self.parts, c.mul(index, self.n["segments"]), j, c.mul(k, all_parts))

    # ---- sums down the columns of rows

    def clear(self) -> None:
        c = self.c
        size = c.mul(OF_A_THREAD, self.length)
        steps(c, size, lambda i, lanes: c.store(c.f(0.0, lanes), c.at(self.few, i)))

    def fold(self) -> None:
        """The sums of a few rows are added to those of all, and start again."""
        c = self.c

        def add(i: Value, lanes: int) -> None:
            few, total = c.at(self.few, i), c.at(self.all, i, of=F64)
            more = c.b.fpext(c.load(few, lanes), vec(lanes, F64))
            c.store(c.b.fadd(c.load(total, lanes, of=F64), more), total)
            c.store(c.f(0.0, lanes), few)

        steps(c, c.mul(2, self.length), add)


def _write(module: Any, kind: Kind, way: str) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        sets = _Sets(c, kind, words, thread)
        begin, end = c.share(sets.n["sets"], thread, threads)
        if not sets.rows:
            with c.loop(begin, end) as index:
                getattr(sets, way)(index)
            return
        sets.clear()
        with c.loop(begin, end, TOGETHER) as first:
            with c.loop(first, c.least(c.add(first, TOGETHER), end)) as index:
                sets.backward(index)
            sets.fold()

    entry(module, "run", body)


def _write_totals(module: Any, kind: Kind) -> None:
    """dweight and dbias: the sums of all threads, or of all images, each thread some columns."""

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        parts, *outs = (c.pointer(words, k) for k in range(3))
        images, columns = c.word(words, 3), c.word(words, 4)
        rows = kind.sets == "rows"
        begin, end = c.share(columns, thread, threads)
        kinds = (("dweight", kind.of_weight), ("dbias", kind.of_bias))
        for k, (out, (name, short)) in enumerate(zip(outs, kinds, strict=True)):
            if name not in kind.there:
                continue
            of = Stored(c, short)
            with c.loop(begin, end) as i:
                total = c.variable(F64)
                c.b.store(F64(0.0), total)
                with c.loop(0, threads if rows else images) as n:
                    if rows:
                        own = c.at(parts, c.mul(c.add(c.mul(n, OF_A_THREAD), 2), columns))
                        more = c.load(c.at(own, c.mul(k, columns), i, of=F64), of=F64)
                    else:
                        own = c.at(parts, c.mul(c.add(c.mul(images, k), n), columns), i)
                        more = c.b.fpext(c.load(own), F64)
                    c.b.store(c.b.fadd(c.get(total, F64), more), total)
                of.store(c.b.fptrunc(c.get(total, F64), F32), of.at(out, i))

    entry(module, "run", body)


def numbers(eps: float, momentum: float) -> tuple[int, int]:
    """As words of a call."""
    first, second = struct.unpack("<2i", struct.pack("<2f", eps, momentum))
    return first, second


def prepare(
    way: str, kind: Kind, sizes: Sizes, eps: float, momentum: float, where: Mapping[str, Word]
) -> list[Call]:
    """The calls of ``way`` "forward" or "backward" for tensors that lie ``where``."""
    each = sizes.sets * sizes.segments
    columns = sizes.groups * sizes.segments
    parts: Word = 0
    if kind.sets == "rows":
        columns, parts = sizes.length, Room("norm", 0, per_thread=OF_A_THREAD * sizes.length)
    elif kind.sets == "groups":
        parts = Room("norm", 2 * each)
    words = (*(where.get(name, 0) for name in POINTERS), *sizes, *numbers(eps, momentum), parts)
    threaded = each * sizes.length > SERIAL
    run = load(f"norm {way} {kind.name}", lambda module: _write(module, kind, way))
    calls = [Call(run, words, threaded)]
    if kind.sets != "channels" and {"dweight", "dbias"} & {*kind.there}:
        totals = load(f"norm totals {kind.name}", lambda module: _write_totals(module, kind))
        out = (where.get("dweight", 0), where.get("dbias", 0))
        words = (parts, *out, sizes.sets // sizes.groups, columns)
        calls.append(Call(totals, words, threaded))
    return calls
