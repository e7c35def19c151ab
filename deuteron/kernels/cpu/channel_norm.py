"""Norms whose statistics belong to channels: batch norm in training with what follows it, and the
gradients of batch, group and instance norm, over [N, C, S] in row-major order.

    forward    y = act((x − mean) · rstd · weight + bias + residual)
    gradient   dz = grad · act'    hat = (x − mean) · rstd    inner = dz · weight
               dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
               dweight = Σ dz · hat    dbias = Σ dz

    bytes = size · (x + residual + y) and size · (x + grad + y + dz + dx + extra), where a set of
    elements that share their statistics fits in the cache: further passes over it come from there

A set is several segments of S elements: the N pieces of a channel, or the channels of a group in
one image. Threads share the sets. Sums go on in float64 every 32 steps. A group's share of dweight
and dbias lies in a room of its own until a second call adds up those of all images, in their order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, Code, Loaded, Value, entry, load
from deuteron.codegen.rows import FAR, NEXT_TO_NONE
from deuteron.kernels.cpu.channel_terms import POINTERS, Form, Tensors
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, LongSum, blocks, steps

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


def batch_sizes(n: int, channels: int, length: int) -> Sizes:
    return Sizes(channels, n, length, length, channels * length, channels)


def group_sizes(n: int, channels: int, length: int, groups: int) -> Sizes:
    each = channels // groups
    return Sizes(n * groups, each, length, each * length, length, groups)


class _Sets(Tensors):
    """What a thread does with one set after another."""

    def __init__(self, c: Code, form: Form, words: Value) -> None:
        super().__init__(c, form, words, NUMBERS)
        self.length = self.n["length"]
        self.count = c.b.sitofp(c.mul(self.n["segments"], self.length), F32)
        self.first, self.second = LongSum(c), LongSum(c)

    @contextmanager
    def segments(self, base: Value) -> Any:
        """The number and the place of one segment after another."""
        with self.c.loop(0, self.n["segments"]) as j:
            yield j, self.c.add(base, self.c.mul(j, self.n["segment_step"]))

    def mean_of(self, base: Value, term: Callable[[Value, Value, int], Value]) -> Value:
        """The mean over a set of what ``term(place, column, lanes)`` gives."""
        c = self.c
        self.first.clear()
        with self.segments(base) as (_, at):
            blocks(c, self.length, lambda i, n: self.first.take(term(at, i, n), n), self.first.fold)
        return c.b.fdiv(self.first.total(), self.count)

    def statistics(self, base: Value) -> tuple[Value, Value, Value, Value]:
        """Mean, what its type has no digits for, variance, and 1/√(variance + eps): centred first,
        so exact for a large mean. Where it is so large that its roundings show, they are taken out,
        as in ``codegen/rows.py``. There is no rest where it may be that of adding up: equal numbers
        are exactly 0 from their mean."""
        c = self.c
        mean = self.mean_of(base, lambda at, i, n: self.load("x", at, i, n))

        def away(at: Value, i: Value, lanes: int) -> Value:
            return c.b.fsub(self.load("x", at, i, lanes), c.splat(mean, lanes))

        def square(at: Value, i: Value, lanes: int) -> Value:
            d = away(at, i, lanes)
            return c.b.fmul(d, d)

        variance, left = self.mean_of(base, square), c.variable(F32)
        c.b.store(c.f(0.0), left)
        most = c.b.fmul(c.b.fmul(mean, mean), c.f(1.0 / FAR**2))
        with c.when(c.b.fcmp_ordered("<=", variance, most)):
            c.b.store(self.mean_of(base, away), left)
        off = c.get(left, F32)
        better = c.b.fadd(mean, off)
        rest = c.b.fsub(off, c.b.fsub(better, mean))
        none = c.b.fmul(c.intrinsic("fabs", off), c.f(NEXT_TO_NONE))
        small = c.b.fcmp_ordered("<=", c.intrinsic("fabs", rest), none)
        rest = c.b.select(small, c.f(0.0), rest)
        variance = c.fmax(c.b.fsub(variance, c.b.fmul(off, off)), c.f(0.0))
        return better, rest, variance, self.root(variance)

    # ---- forward

    def forward(self, channel: Value) -> None:
        c = self.c
        base = c.mul(channel, self.n["set_step"])
        mean, rest, variance, rstd = self.statistics(base)
        self.keep(channel, mean, variance, rstd, self.count)
        if not self.has("y"):  # a gradient that computes the statistics again
            return
        scale, shift = self.affine(channel, rest, rstd)
        with self.segments(base) as (_, at):
            steps(
                c,
                self.length,
                lambda i, lanes: self.finish(self.before(at, i, lanes, mean, scale, shift), at, i),
            )

    # ---- gradient

    def backward(self, index: Value) -> None:
        c, form = self.c, self.form
        base = c.mul(index, self.n["set_step"])
        shift: Value | None
        if form.grouped:
            mean, rest, _, rstd = self.statistics(base)
            shift = c.b.fneg(c.b.fmul(rest, rstd))
        else:
            mean, rstd = (c.load(c.at(self.at[name], index)) for name in ("mean", "rstd"))
            shift = None  # of a mean that was kept nobody knows
        group = c.rem(index, self.n["groups"])
        first_channel = c.mul(group, self.n["segments"]) if form.grouped else group
        flat, slanted = c.variable(F32), c.variable(F32)
        for total in (flat, slanted):
            c.b.store(c.f(0.0), total)

        def channel(j: Value) -> Value:
            return c.add(first_channel, j) if form.grouped else first_channel

        def dz(at: Value, i: Value, lanes: int, weight: Value) -> Value:
            bias = self.number("bias", first_channel, 0.0)
            return self.dz(at, i, lanes, mean, rstd, weight, bias)

        def add_up(j: Value, at: Value) -> None:
            """Σ dz and Σ dz · hat of what was taken, for a channel and with its weight."""
            a, b = self.first.total(), self.second.total()
            weight = self.number("weight", channel(j), 1.0)
            c.b.store(c.fma(a, weight, c.get(flat, F32)), flat)
            c.b.store(c.fma(b, weight, c.get(slanted, F32)), slanted)
            if form.grouped:
                here = c.add(c.mul(index, self.n["segments"]), j)
                all_parts = c.mul(self.n["sets"], self.n["segments"])
                c.store(b, c.at(self.parts, here))
                c.store(a, c.at(self.parts, here, all_parts))
            else:
                for name, value in (("dweight", b), ("dbias", a)):
                    if self.has(name):
                        c.store(value, c.at(self.at[name], index))

        def clear() -> None:
            self.first.clear()
            self.second.clear()

        clear()
        with self.segments(base) as (j, at):
            if form.grouped:
                clear()
            weight = self.number("weight", channel(j), 1.0)

            def take(i: Value, lanes: int) -> None:
                d = dz(at, i, lanes, weight)
                self.first.take(d, lanes)
                self.second.take(d, lanes, self.hat(at, i, lanes, mean, rstd, shift))

            def fold() -> None:
                self.first.fold()
                self.second.fold()

            blocks(c, self.length, take, fold)
            if form.grouped:
                add_up(j, at)
        if not form.grouped:
            add_up(c.i(0), base)
        level, slope = (c.b.fdiv(c.get(total, F32), self.count) for total in (flat, slanted))
        with self.segments(base) as (j, at):
            weight = self.number("weight", channel(j), 1.0)

            def write(i: Value, lanes: int) -> None:
                d = dz(at, i, lanes, weight)
                if self.has("dz"):
                    self.store(d, "dz", at, i)
                hat = self.hat(at, i, lanes, mean, rstd, shift)
                self.give(d, hat, at, i, rstd, weight, level, slope)

            steps(c, self.length, write)


def _write(module: Any, form: Form, way: str) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        sets = _Sets(c, form, words)
        begin, end = c.share(sets.n["sets"], thread, threads)
        with c.loop(begin, end) as index:
            getattr(sets, way)(index)

    entry(module, "run", body)


def _write_totals(module: Any, form: Form) -> None:
    """dweight and dbias from the sums of all images, each thread a range of channels."""

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        parts, dweight, dbias = (c.pointer(words, k) for k in range(3))
        images, channels = c.word(words, 3), c.word(words, 4)
        begin, end = c.share(channels, thread, threads)
        for k, (name, out, kind) in enumerate(
            (("dweight", dweight, form.of_weight), ("dbias", dbias, form.of_bias))
        ):
            if name not in form.given:
                continue
            of = Stored(c, kind)
            with c.loop(begin, end) as i:
                total = c.variable(F64)
                c.b.store(F64(0.0), total)
                with c.loop(0, images) as image:
                    here = c.at(parts, c.mul(c.add(c.mul(images, k), image), channels), i)
                    more = c.b.fpext(c.load(here), F64)
                    c.b.store(c.b.fadd(c.get(total, F64), more), total)
                of.store(c.b.fptrunc(c.get(total, F64), F32), of.at(out, i))

    entry(module, "run", body)


def compiled(form: Form, way: str) -> Loaded:
    return load(f"channel norm {way} {form.name}", lambda module: _write(module, form, way))


def prepare(
    way: str, form: Form, sizes: Sizes, eps: float, momentum: float, where: Mapping[str, Word]
) -> list[Call]:
    """The calls of ``way`` "forward" or "backward" for tensors that lie ``where``."""
    floats = struct.unpack("<2i", struct.pack("<2f", eps, momentum))
    each = sizes.sets * sizes.segments
    parts: Word = Room("channel norm", 2 * each) if form.grouped else 0
    words = (*(where.get(name, 0) for name in POINTERS), *sizes, *floats, parts)
    threaded = each * sizes.length > SERIAL
    calls = [Call(compiled(form, way), words, threaded)]
    if form.grouped and {"dweight", "dbias"} & form.given:
        name = f"channel norm totals {form.name}"
        totals = load(name, lambda module: _write_totals(module, form))
        images, channels = sizes.sets // sizes.groups, sizes.groups * sizes.segments
        out = (where.get("dweight", 0), where.get("dbias", 0))
        calls.append(Call(totals, (parts, *out, images, channels), threaded))
    return calls
