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

import math
import struct
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, I32, Code, Loaded, Value, entry, load, width
from deuteron.codegen.rows import FAR
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, LongSum, blocks, steps

NEXT_TO_NONE = 2.0**-18  # the part of a mean's roundings that adding them up may be off by

POINTERS = (
    "x", "grad", "weight", "bias", "residual", "y", "extra", "mean", "rstd", "running_mean",
    "running_var", "dx", "dz", "dweight", "dbias", "new_mean", "new_var",
)  # fmt: skip
NUMBERS = ("sets", "segments", "length", "set_step", "segment_step", "groups", "eps", "momentum")


@dataclass(frozen=True)
class Form:
    """What a kernel is compiled for: the types of x, of the parameters and of running statistics,
    whether segments have weights of their own (a group's), whether relu follows, and which tensors
    there are."""

    stored: str
    param: str
    running: str
    grouped: bool
    relu: bool
    given: frozenset[str]

    @property
    def name(self) -> str:
        kind = f"{self.stored} {self.param} {self.running} {self.grouped} {self.relu}"
        return f"{kind} {sorted(self.given)} of {width()}"


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


class _Sets:
    """What a thread does with one set after another."""

    def __init__(self, c: Code, form: Form, words: Value) -> None:
        self.c, self.form = c, form
        self.of, self.param = Stored(c, form.stored), Stored(c, form.param)
        self.at = {name: c.pointer(words, k) for k, name in enumerate(POINTERS)}
        given = {name: c.word(words, len(POINTERS) + k) for k, name in enumerate(NUMBERS)}
        for name in ("eps", "momentum"):
            given[name] = c.b.bitcast(c.b.trunc(given[name], I32), F32)
        self.n, self.length = given, given["length"]
        self.parts = c.pointer(words, len(POINTERS) + len(NUMBERS))
        self.count = c.b.sitofp(c.mul(given["segments"], self.length), F32)
        self.first, self.second = LongSum(c), LongSum(c)

    def has(self, name: str) -> bool:
        return name in self.form.given

    def load(self, name: str, at: Value, i: Value, lanes: int) -> Value:
        return self.of.load(self.of.at(self.at[name], at, i), lanes)

    def store(self, value: Value, name: str, at: Value, i: Value) -> None:
        self.of.store(value, self.of.at(self.at[name], at, i))

    def number(self, name: str, at: Value, otherwise: float) -> Value:
        """A parameter of a channel."""
        if not self.has(name):
            return self.c.f(otherwise)
        return self.param.load(self.param.at(self.at[name], at))

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
            blocks(
                c, self.length, lambda i, n: self.first.take(term(at, i, n), n), self.first.fold
            )  # fmt: skip
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
        root = c.intrinsic("sqrt", c.b.fadd(variance, self.n["eps"]))
        infinite = c.b.fcmp_ordered("==", variance, c.f(math.inf))  # squares overflowed: no bias
        rstd = c.b.select(infinite, c.f(math.nan), c.b.fdiv(c.f(1.0), root))
        return better, rest, variance, rstd

    # ---- forward

    def forward(self, channel: Value) -> None:
        c = self.c
        base = c.mul(channel, self.n["set_step"])
        mean, rest, variance, rstd = self.statistics(base)
        for name, value in (("mean", mean), ("rstd", rstd)):
            if self.has(name):
                c.store(value, c.at(self.at[name], channel))
        spread = c.b.fdiv(self.count, c.b.fsub(self.count, c.f(1.0)))
        self.move("mean", channel, mean)
        self.move("var", channel, c.b.fmul(variance, spread))
        if not self.has("y"):  # a gradient that computes the statistics again
            return
        scale = c.b.fmul(rstd, self.number("weight", channel, 1.0))
        shift = self.number("bias", channel, 0.0)
        if not self.form.relu or self.has("residual"):
            # for nothing; elsewhere the gradient finds relu's signs by the mean as it is stored
            shift = c.fma(c.b.fneg(rest), scale, shift)
        with self.segments(base) as (_, at):

            def write(i: Value, lanes: int) -> None:
                z = self.before(at, i, lanes, mean, scale, shift)
                if self.has("residual"):
                    z = c.b.fadd(z, self.load("residual", at, i, lanes))
                if self.form.relu:
                    z = c.fmax(z, c.f(0.0, lanes))
                self.store(z, "y", at, i)

            steps(c, self.length, write)

    def move(self, what: str, channel: Value, found: Value) -> None:
        """The new running statistic: the old one on its way to what was found."""
        c, new, old = self.c, f"new_{what}", f"running_{what}"
        of = Stored(c, self.form.running)
        if self.has(old):
            before = of.load(of.at(self.at[old], channel))
            found = c.fma(self.n["momentum"], c.b.fsub(found, before), before)
        if self.has(new):
            of.store(found, of.at(self.at[new], channel))

    def before(
        self, at: Value, i: Value, lanes: int, mean: Value, scale: Value, shift: Value
    ) -> Value:
        """(x − mean) · scale + shift, the same forward and backward."""
        c = self.c
        d = c.b.fsub(self.load("x", at, i, lanes), c.splat(mean, lanes))
        return c.fma(d, c.splat(scale, lanes), c.splat(shift, lanes))

    # ---- gradient

    def backward(self, index: Value) -> None:
        c, form = self.c, self.form
        base = c.mul(index, self.n["set_step"])
        if form.grouped:
            mean, _, _, rstd = self.statistics(base)
        else:
            mean, rstd = (c.load(c.at(self.at[name], index)) for name in ("mean", "rstd"))
        group = c.rem(index, self.n["groups"])
        first_channel = c.mul(group, self.n["segments"]) if form.grouped else group
        flat, slanted = c.variable(F32), c.variable(F32)
        for total in (flat, slanted):
            c.b.store(c.f(0.0), total)

        def channel(j: Value) -> Value:
            return c.add(first_channel, j) if form.grouped else first_channel

        def dz(at: Value, i: Value, lanes: int, weight: Value) -> Value:
            g = self.load("grad", at, i, lanes)
            if not form.relu:
                return g
            if self.has("y"):
                z = self.load("y", at, i, lanes)
            else:
                shift = self.number("bias", first_channel, 0.0)
                z = self.before(at, i, lanes, mean, c.b.fmul(rstd, weight), shift)
            off = c.b.fcmp_ordered("<=", z, c.f(0.0, lanes))
            return c.b.select(off, c.f(0.0, lanes), g)

        def hat(at: Value, i: Value, lanes: int) -> Value:
            d = c.b.fsub(self.load("x", at, i, lanes), c.splat(mean, lanes))
            return c.b.fmul(d, c.splat(rstd, lanes))

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
                self.second.take(d, lanes, hat(at, i, lanes))

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
                if not self.has("dx"):
                    return
                rest = c.b.fsub(c.b.fmul(d, c.splat(weight, lanes)), c.splat(level, lanes))
                rest = c.fma(c.b.fneg(hat(at, i, lanes)), c.splat(slope, lanes), rest)
                out = c.b.fmul(rest, c.splat(rstd, lanes))
                if self.has("extra"):
                    out = c.b.fadd(out, self.load("extra", at, i, lanes))
                self.store(out, "dx", at, i)

            steps(c, self.length, write)


def _write(module: Any, form: Form, way: str) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        sets = _Sets(c, form, words)
        begin, end = c.share(sets.n["sets"], thread, threads)
        with c.loop(begin, end) as index:
            getattr(sets, way)(index)

    entry(module, "run", body)


def _write_totals(module: Any, form: Form, of_bias: str) -> None:
    """dweight and dbias from the sums of all images, each thread a range of channels."""

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        parts, dweight, dbias = (c.pointer(words, k) for k in range(3))
        images, channels = c.word(words, 3), c.word(words, 4)
        begin, end = c.share(channels, thread, threads)
        for k, (name, out, kind) in enumerate(
            (("dweight", dweight, form.param), ("dbias", dbias, of_bias))
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
    way: str, form: Form, sizes: Sizes, eps: float, momentum: float, where: Mapping[str, Word],
    of_bias: str = "f32",
) -> list[Call]:  # fmt: skip
    """The calls of ``way`` "forward" or "backward" for tensors that lie ``where``; ``of_bias`` is
    the type of a group's dbias."""
    floats = struct.unpack("<2i", struct.pack("<2f", eps, momentum))
    each = sizes.sets * sizes.segments
    parts: Word = Room("channel norm", 2 * each) if form.grouped else 0
    words = (*(where.get(name, 0) for name in POINTERS), *sizes, *floats, parts)
    threaded = each * sizes.length > SERIAL
    calls = [Call(compiled(form, way), words, threaded)]
    if form.grouped and {"dweight", "dbias"} & form.given:
        name = f"channel norm totals {of_bias} {form.name}"
        totals = load(name, lambda module: _write_totals(module, form, of_bias))
        images, channels = sizes.sets // sizes.groups, sizes.groups * sizes.segments
        out = (where.get("dweight", 0), where.get("dbias", 0))
        calls.append(Call(totals, (parts, *out, images, channels), threaded))
    return calls
