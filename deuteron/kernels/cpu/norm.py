"""Gradients of norms over elements that lie one after the other, in row-major order: of layer and
RMS norm over rows, of group and instance norm over [N, C, S]. Gradients of norms of channels, and
of those where channels lie innermost, are generated code: ``engines/cpu/norm_stages.py``.

    hat = (x − mean) · rstd    inner = grad · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ grad · hat    dbias = Σ grad

    bytes = size · (x + grad + dx + extra), where a set of elements that share their statistics fits
    in the cache: further passes over it come from there

A set consists of segments: of a row alone, or of the channels of a group in one image. Threads
divide the sets among them. Each row is added to the dweight and dbias of its thread, which are
moved to float64 every 32 rows; a group's contributions have a place of their own. A second call
adds all of these up: so the order of a sum depends on the number of threads, if at all, and on
nothing else.

Generated code makes dx in one pass over the rows and each sum down the columns in another. It takes
1.2 to 3.5 times as long (``bench/results/by_hand-cpu-aarch64-2-threads.md``).
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, I32, Code, Value, load_run, vec, width
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, Sums, pivot, steps

POINTERS = "x grad weight extra dx dweight dbias".split()
NUMBERS = "sets segments length set_step segment_step groups eps".split()
# In sets with fewer elements so much cancels in dx that its sums take hat rounded as it is there
SHORT = 32
LONG = 1 << 15  # from this many elements on sums along a row are made in parts, too
TOGETHER = 32  # rows that are added up in float32
OF_A_THREAD = 6  # rows of scratch of a thread: two sums, and both in float64, twice as wide


@dataclass(frozen=True)
class Kind:
    """What a kernel is compiled for. ``sets``: "rows" or "groups" share statistics; ``there``:
    which tensors there are; then their types."""

    sets: str
    there: tuple[str, ...]
    stored: str
    param: str = "f32"
    of_weight: str = "f32"  # dweight and dbias
    of_bias: str = "f32"
    centred: bool = True
    short: bool = False
    long: bool = True


class Sizes(NamedTuple):
    """What is normalised: the number of sets, segments of a set, and elements of a segment; the
    steps from set to set and from segment to segment; and the groups of an image."""

    sets: int
    segments: int
    length: int
    set_step: int
    segment_step: int
    groups: int


class _Sets:
    """The code that a thread runs for one set after another."""

    def __init__(self, c: Code, kind: Kind, words: Value, thread: Value) -> None:
        self.c, self.kind, self.rows = c, kind, kind.sets == "rows"
        self.of, self.param = Stored(c, kind.stored), Stored(c, kind.param)
        self.at = {name: c.pointer(words, k) for k, name in enumerate(POINTERS)}
        self.n = {name: c.word(words, len(POINTERS) + k) for k, name in enumerate(NUMBERS)}
        self.eps = c.b.bitcast(c.b.trunc(self.n["eps"], I32), F32)
        self.parts = c.pointer(words, len(POINTERS) + len(NUMBERS))
        self.length = self.n["length"]
        self.count = c.b.sitofp(c.mul(self.n["segments"], self.length), F32)
        self.one, self.two, self.three = (Sums(c, k, kind.long) for k in (1, 2, 3))
        if self.rows:  # dweight and dbias of a few rows, then of all in float64
            self.few = c.at(self.parts, c.mul(thread, OF_A_THREAD, self.length))
            self.all = c.at(self.few, c.mul(2, self.length))

    def has(self, name: str) -> bool:
        return name in self.kind.there

    def load(self, name: str, at: Value, i: Value, lanes: int) -> Value:
        return self.of.load(self.of.at(self.at[name], at, i), lanes)

    def weight(self, at: Value, lanes: int) -> Value:
        """Return the weight of a channel, or of as many columns as there are lanes."""
        if not self.has("weight"):
            return self.c.f(1.0, lanes)
        return self.param.load(self.param.at(self.at["weight"], at), lanes)

    def root(self, variance: Value) -> Value:
        """1/√(variance + eps); nan where squares overflowed: 0 would make gradients of 0."""
        c = self.c
        root = c.intrinsic("sqrt", c.b.fadd(variance, self.eps))
        infinite = c.b.fcmp_ordered("==", variance, c.f(math.inf))
        return c.b.select(infinite, c.f(math.nan), c.b.fdiv(c.f(1.0), root))

    def away(self, at: Value, i: Value, lanes: int, mean: Value) -> Value:
        return self.c.b.fsub(self.load("x", at, i, lanes), self.of.lanes(mean, lanes))

    @contextmanager
    def segments(self, base: Value) -> Iterator[tuple[Value, Value]]:
        """Loop over the segments of a set: yields the number and the place of each."""
        with self.c.loop(0, self.n["segments"]) as j:
            yield j, self.c.add(base, self.c.mul(j, self.n["segment_step"]))

    def mean_of(self, base: Value, term: Callable[[Value, Value, int], Sequence[Any]]) -> Value:
        """The mean over a set of what ``term(place, column, lanes)`` gives."""
        self.one.clear()
        with self.segments(base) as (_, at):
            self.one.add(self.length, lambda i, lanes: [term(at, i, lanes)])
        return self.c.b.fdiv(self.one.totals()[0], self.count)

    def centre(self, base: Value) -> tuple[Value, Value | None]:
        """Return the mean, and the rest of it that float32 has no digits for. It is found by
        distances from one of the first elements, so that a large mean costs no digits."""
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

    def backward(self, index: Value) -> None:
        """Compute the gradients of one set. Squares and products are added up in one pass; those of
        a short set in two, so that hat is rounded in the products as it is in dx."""
        c, kind, grouped = self.c, self.kind, not self.rows
        base = c.mul(index, self.n["set_step"])
        first = c.mul(c.rem(index, self.n["groups"]), self.n["segments"])
        mean, rest = self.centre(base)
        rstd = self.root(self.variance(base, mean)) if kind.short else c.f(1.0)

        def weight_of(j: Value, i: Value, lanes: int) -> Value:
            """Return the weights of columns, or that of the channel that a segment is."""
            return self.weight(i, lanes) if self.rows else self.weight(c.add(first, j), 1)

        def distance(at: Value, i: Value, lanes: int) -> Value:
            return self.away(at, i, lanes, mean) if kind.centred else self.load("x", at, i, lanes)

        def hat(at: Value, i: Value, lanes: int, rstd: Value) -> Value:
            d, wide = distance(at, i, lanes), self.of.lanes(rstd, lanes)
            if rest is None:
                return c.b.fmul(d, wide)
            return c.fma(d, wide, self.of.lanes(c.b.fneg(c.b.fmul(rest, rstd)), lanes))

        sums = self.two if kind.short else self.three
        squares, level, slope = (c.variable(F32, c.f(0.0)) for _ in range(3))

        def add_to(total: Value, value: Value, times: Value) -> None:
            c.b.store(c.fma(value, times, c.get(total, F32)), total)

        def add_up(j: Value) -> None:
            """Finish Σ grad and Σ grad · hat of a row or channel, and add them to those of the set,
            times the channel's weight."""
            a, b, *of_squares = sums.totals()
            if not kind.short:
                add_to(squares, *of_squares, c.f(1.0))
                b = b if rest is None else c.fma(c.b.fneg(rest), a, b)
            w = c.f(1.0) if self.rows else weight_of(j, j, 1)
            add_to(level, a, w)
            add_to(slope, b, w)
            if grouped:
                for k, value in enumerate((b, a)):
                    c.store(value, self.part_at(k, index, j))

        sums.clear()
        with self.segments(base) as (j, at):
            if grouped:
                sums.clear()

            def terms(i: Value, lanes: int) -> Sequence[tuple[Value, Value | None]]:
                g = self.load("grad", at, i, lanes)
                if self.rows and self.has("weight"):
                    g = c.b.fmul(g, weight_of(j, i, lanes))
                if kind.short:
                    return [(g, None), (g, hat(at, i, lanes, rstd))]
                d = distance(at, i, lanes)
                return [(g, None), (g, d), (d, d)]

            sums.add(self.length, terms)
            if grouped:
                add_up(j)
        if not grouped:
            add_up(c.i(0))
        lean = c.b.fdiv(c.get(slope, F32), self.count)
        if not kind.short:
            rstd = self.root(c.b.fdiv(c.get(squares, F32), self.count))
            lean = c.b.fmul(lean, rstd)
            if grouped:
                with c.loop(0, self.n["segments"]) as j:
                    part = self.part_at(0, index, j)
                    c.store(c.b.fmul(c.load(part), rstd), part)
        flat = c.b.fdiv(c.get(level, F32), self.count)
        with self.segments(base) as (j, at):

            def write(i: Value, lanes: int) -> None:
                h, g, wide = hat(at, i, lanes, rstd), self.load("grad", at, i, lanes), self.of.lanes
                if self.has("dx"):
                    inner = c.b.fmul(g, wide(weight_of(j, i, lanes), lanes))
                    inner = c.b.fsub(inner, wide(flat, lanes)) if kind.centred else inner
                    out = c.fma(c.b.fneg(h), wide(lean, lanes), inner)
                    out = c.b.fmul(out, wide(rstd, lanes))
                    if self.has("extra"):
                        out = c.b.fadd(out, self.load("extra", at, i, lanes))
                    self.of.store(out, self.of.at(self.at["dx"], at, i))
                for k, name in enumerate(("dweight", "dbias")):
                    if self.rows and self.has(name):
                        room = c.at(self.few, c.mul(k, self.length), i)
                        now = c.load(room, lanes)
                        c.store(c.b.fadd(now, g) if k else c.fma(g, h, now), room)

            steps(c, self.length, write)

    def part_at(self, k: int, index: Value, j: Value) -> Value:
        """Return where a group's contribution to dweight (k = 0) or dbias (k = 1) lies."""
        c = self.c
        all_parts = c.mul(self.n["sets"], self.n["segments"])
        return c.at(self.parts, c.mul(index, self.n["segments"]), j, c.mul(k, all_parts))

    # ---- sums down the columns of rows

    def clear(self) -> None:
        c = self.c
        size = c.mul(OF_A_THREAD, self.length)
        steps(c, size, lambda i, lanes: c.store(c.f(0.0, lanes), c.at(self.few, i)))

    def fold(self) -> None:
        """Add the sums of a few rows to those of all, and start them again."""
        c = self.c

        def add(i: Value, lanes: int) -> None:
            few, total = c.at(self.few, i), c.at(self.all, i, of=F64)
            more = c.b.fpext(c.load(few, lanes), vec(lanes, F64))
            c.store(c.b.fadd(c.load(total, lanes, of=F64), more), total)
            c.store(c.f(0.0, lanes), few)

        steps(c, c.mul(2, self.length), add)


def _gradients(kind: Kind, c: Code, words: Value, thread: Value, threads: Value) -> None:
    sets = _Sets(c, kind, words, thread)
    begin, end = c.share(sets.n["sets"], thread, threads)
    if not sets.rows:
        with c.loop(begin, end) as index:
            sets.backward(index)
        return
    sets.clear()
    with c.loop(begin, end, TOGETHER) as first:
        with c.loop(first, c.least(c.add(first, TOGETHER), end)) as index:
            sets.backward(index)
        sets.fold()


def _totals(kind: Kind, c: Code, words: Value, thread: Value, threads: Value) -> None:
    """Write dweight and dbias: add up those of all threads, or of all images. Threads split the
    columns."""
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
            total = c.variable(F64, F64(0.0))
            with c.loop(0, threads if rows else images) as n:
                if rows:
                    own = c.at(parts, c.mul(c.add(c.mul(n, OF_A_THREAD), 2), columns))
                    more = c.load(c.at(own, c.mul(k, columns), i, of=F64), of=F64)
                else:
                    own = c.at(parts, c.mul(c.add(c.mul(images, k), n), columns), i)
                    more = c.b.fpext(c.load(own), F64)
                c.b.store(c.b.fadd(c.get(total, F64), more), total)
            of.store(c.b.fptrunc(c.get(total, F64), F32), of.at(out, i))


def prepare(kind: Kind, sizes: Sizes, eps: float, where: Mapping[str, Word]) -> list[Call]:
    """Return the calls for tensors whose addresses are in ``where``."""
    each = sizes.sets * sizes.segments
    if kind.sets == "rows":
        columns, parts = sizes.length, Room("norm", 0, per_thread=OF_A_THREAD * sizes.length)
    else:
        columns, parts = sizes.groups * sizes.segments, Room("norm", 2 * each)
    (as_word,) = struct.unpack("<i", struct.pack("<f", eps))
    words = (*(where.get(name, 0) for name in POINTERS), *sizes, as_word, parts)
    threaded = each * sizes.length > SERIAL
    name = f"{kind} of {width()}"
    run = load_run(f"norm gradient {name}", partial(_gradients, kind))
    calls = [Call(run, words, threaded)]
    if {"dweight", "dbias"} & {*kind.there}:
        totals = load_run(f"norm totals {name}", partial(_totals, kind))
        out = (where.get("dweight", 0), where.get("dbias", 0))
        words = (parts, *out, sizes.sets // sizes.groups, columns)
        calls.append(Call(totals, words, threaded))
    return calls
