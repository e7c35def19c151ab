"""Norms whose statistics belong to channels where channels lie innermost: over [N, S, C] in
row-major order, the formulas of ``channel_norm.py``.

    bytes = size · (2 x + residual + y) forward, size · (2 x + 2 grad + 2 y + dx + extra) backward,
    or (2 x + grad + y + 2 dz + dx), and x once more for the statistics of groups: no cache holds
    all rows

Threads share parts of the rows, a number that does not depend on how many threads there are, so
that neither do the bits. In a part 64 rows at a time give sums of each channel, which go on in
float64. Rows are read two at a time: numbers of a channel are then loaded once for both, and
memory still sees few streams that go on (sixteen were three times as slow on a Neoverse N1).
A second call puts the parts together, a third walks over all rows again.

Statistics are those of distances from the mean of the first 8 of 64 rows, which is near enough: if
it is off by d, so are 8 rows from the others, the squares of the 64 add up to 7 d² at least, and
what is lost in 64 d² shows in them no more than a few roundings do. Blocks and parts are put
together as in Chan's algorithm: exact for a mean of any size. All images are one to batch norm.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, F64, Code, Value, entry, lanes_of, load
from deuteron.kernels.cpu.channel_terms import POINTERS, Form
from deuteron.kernels.cpu.channels_last_rows import APART, LINES, OF_ONE, Find, Rows
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, steps

PILOT = 8  # rows whose mean is taken off those that are summed together
FEWEST, UNITS = 64, 64  # rows of a part, and parts in all, where there are as many rows
NEXT_TO_NONE = 2.0**-40  # the part of a mean below which its rest is that of adding up

# what a channel of an image keeps from call to call
AFFINE, GRADIENT = ("mean", "scale", "shift"), ("mean", "rstd", "level", "slope")


class Sizes(NamedTuple):
    """Of what is normalised: images, rows of each, channels, channels of a group."""

    images: int
    rows: int
    channels: int
    each: int

    @property
    def parts(self) -> int:
        """Of the rows of an image; an even number, for two threads."""
        wanted = min(-(-UNITS // self.images), -(-self.rows // FEWEST))
        return wanted + wanted % 2 if wanted > 1 else 1

    @property
    def numel(self) -> int:
        return self.images * self.rows * self.channels


class _Norm(Rows):
    """What a thread does in each of the calls."""

    # ---- statistics

    def gather(self) -> None:
        """The sum of each channel in each part, and of its squares around the part's mean."""
        with self.units() as (image, part, first, stop):
            self.clear_sums(image, part)
            with self.blocks(first, stop) as (top, bottom):
                self.add_block(image, part, first, top, bottom)

    def clear_sums(self, image: Value, part: Value) -> None:
        def clear(i: Value, lanes: int) -> None:
            zero = self.of.lanes(F64(0.0), lanes)
            self.put_sums(image, part, i, (zero, zero))

        steps(self.c, self.channels, clear)

    def add_block(self, image: Value, part: Value, first: Value, top: Value, bottom: Value) -> None:
        """The rows from ``top`` on go to those from ``first`` on. The mean of the first few of them
        is off by what the distances from it add up to; an infinite one by nothing."""
        c, b, wide = self.c, self.c.b, self.of.lanes
        n, before = (b.sitofp(k, F64) for k in (c.sub(bottom, top), c.sub(top, first)))
        # numbers of all channels: a division for each of them would take as long as the sums
        part_of_block = b.fdiv(F64(1.0), n)
        pilot = c.least(c.add(top, PILOT), bottom)
        part_of_pilot = b.fdiv(c.f(1.0), b.sitofp(c.sub(pilot, top), F32))
        part_of_before = b.fdiv(F64(1.0), b.sitofp(c.most(c.sub(top, first), 1), F64))
        both = b.fdiv(b.fmul(n, before), b.fadd(n, before))

        def x(i: Value, lanes: int) -> Find:
            return lambda at: [(self.load("x", at, i, lanes), None)]

        def divide(i: Value, lanes: int) -> None:
            near = b.fmul(c.load(self.line(0, i), lanes), wide(part_of_pilot, lanes))
            c.store(near, self.line(0, i))

        def away(i: Value, lanes: int) -> Find:
            near = c.load(self.line(0, i), lanes)

            def find(at: Value) -> Sequence[tuple[Value, Value | None]]:
                d = b.fsub(self.load("x", at, i, lanes), near)
                return [(d, None), (d, d)]

            return find

        def join(i: Value, lanes: int) -> None:
            near, left, squares = (self.wider(c.load(self.line(k, i), lanes)) for k in range(LINES))
            total = b.fmul(near, wide(n, lanes))
            total = b.select(b.fcmp_ordered("ord", left, left), b.fadd(total, left), total)
            mean = b.fmul(total, wide(part_of_block, lanes))
            squares = b.fsub(squares, b.fmul(b.fmul(left, left), wide(part_of_block, lanes)))
            old_total, old_squares = self.sums_of(image, part, i, lanes)
            apart = b.fsub(mean, b.fmul(old_total, wide(part_of_before, lanes)))
            squares = b.fadd(squares, b.fmul(b.fmul(apart, apart), wide(both, lanes)))
            self.put_sums(image, part, i, (b.fadd(old_total, total), b.fadd(old_squares, squares)))

        self.down(image, top, pilot, (0,), x, OF_ONE)
        steps(c, self.channels, divide)
        self.down(image, top, bottom, (1, 2), away, OF_ONE)
        steps(c, self.channels, join)

    def joined(
        self,
        begin: Value | int,
        end: Value,
        lanes: int,
        count: Value,
        part: Callable[[Value], tuple[Value, Value, Value]],
    ) -> tuple[Value, Value]:
        """The sum and the squares around the mean of several parts, which have so many numbers
        each, and ``count`` in all."""
        b, wide = self.c.b, self.of.lanes
        (total,) = self.added(begin, end, lanes, 1, lambda k: part(k)[:1])
        mean = b.fmul(total, wide(b.fdiv(F64(1.0), b.sitofp(count, F64)), lanes))

        def around(k: Value) -> Sequence[Value]:
            own, squares, whole = part(k)
            n = b.sitofp(whole, F64)
            apart = b.fsub(b.fmul(own, wide(b.fdiv(F64(1.0), n), lanes)), mean)
            return [b.fadd(squares, b.fmul(b.fmul(apart, apart), wide(n, lanes)))]

        return total, self.added(begin, end, lanes, 1, around)[0]

    def of_channels(self, image: Value, i: Value, lanes: int) -> tuple[Value, Value]:
        """The sum and the squares of channels over all rows of an image."""
        c = self.c

        def part(k: Value) -> tuple[Value, Value, Value]:
            first, stop = c.share(self.rows, k, self.n_parts)
            own, squares = self.sums_of(image, k, i, lanes)
            return own, squares, c.sub(stop, first)

        return self.joined(0, self.n_parts, lanes, self.rows, part)

    def of_group(self, image: Value, first: Value) -> tuple[Value, Value]:
        """The same of a group, of whose channels it is known."""

        def channel(i: Value) -> tuple[Value, Value, Value]:
            own, squares = self.sums_of(image, 0, i)
            return own, squares, self.rows

        return self.joined(first, self.c.add(first, self.each), 1, self.count, channel)

    def settle(self) -> None:
        """The statistics of each set, and what the next pass wants of them."""
        c = self.c

        def know(image: Value, i: Value, lanes: int) -> None:
            found = self.of_channels(image, i, lanes)
            if self.form.grouped:
                self.put_sums(image, 0, i, found)
            else:
                self.put_statistics(image, i, *self.statistics(*found))

        first, stop = self.own_channels()
        with c.loop(0, self.images) as image:
            steps(c, c.sub(stop, first), lambda i, lanes: know(image, i, lanes), first)
            if self.form.grouped:
                with c.loop(first, stop, self.each) as group:
                    found = self.statistics(*self.of_group(image, group))
                    steps(
                        c,
                        self.each,
                        lambda i, lanes: self.put_statistics(
                            image, i, *(self.of.lanes(v, lanes) for v in found)
                        ),
                        group,
                    )

    def statistics(self, total: Value, squares: Value) -> tuple[Value, Value, Value, Value]:
        """Mean, what its type has no digits for, variance, and 1/√(variance + eps)."""
        c, b, lanes = self.c, self.c.b, lanes_of(total)
        count = self.double(self.count, lanes)
        exact = b.fdiv(total, count)
        mean = self.narrower(exact)
        rest = self.narrower(b.fsub(exact, self.wider(mean)))
        none = b.fmul(c.intrinsic("fabs", mean), c.f(NEXT_TO_NONE, lanes))
        small = b.fcmp_ordered("<=", c.intrinsic("fabs", rest), none)
        rest = b.select(small, c.f(0.0, lanes), rest)
        variance = c.fmax(self.narrower(b.fdiv(squares, count)), c.f(0.0, lanes))
        return mean, rest, variance, self.root(variance)

    def put_statistics(
        self, image: Value, i: Value, mean: Value, rest: Value, variance: Value, rstd: Value
    ) -> None:
        self.put_number("mean", mean, image, i)
        if "rstd" in self.kept:
            self.put_number("rstd", rstd, image, i)
            return
        if not self.form.grouped:
            self.keep(i, mean, variance, rstd, self.c.b.sitofp(self.count, F32))
        scale, shift = self.affine(i, rest, rstd)
        self.put_number("scale", scale, image, i)
        self.put_number("shift", shift, image, i)

    # ---- forward

    def apply(self) -> None:
        def write(image: Value, places: Sequence[Value], i: Value, lanes: int) -> None:
            mean, scale, shift = (self.number_of(name, image, i, lanes) for name in AFFINE)
            for at in places:
                self.finish(self.before(at, i, lanes, mean, scale, shift), at, i)

        self.walk(write)

    # ---- gradient

    def of_channel(self, image: Value, i: Value, lanes: int) -> tuple[Value, ...]:
        """mean, rstd, weight and bias."""
        mean, rstd = (self.number_of(name, image, i, lanes) for name in ("mean", "rstd"))
        weight = self.number("weight", i, 1.0, lanes)
        bias = self.number("bias", i, 0.0, lanes)
        return mean, rstd, weight, bias

    def gather_grad(self) -> None:
        """Σ dz and Σ dz · hat of each channel in each part."""
        c, b = self.c, self.c.b

        def terms(image: Value, i: Value, lanes: int) -> Find:
            mean, rstd, weight, bias = self.of_channel(image, i, lanes)

            def find(at: Value) -> Sequence[tuple[Value, Value | None]]:
                dz = self.dz(at, i, lanes, mean, rstd, weight, bias)
                if self.has("dz"):
                    self.store(dz, "dz", at, i)
                return [(dz, None), (dz, self.hat(at, i, lanes, mean, rstd))]

            return find

        def join(image: Value, part: Value, i: Value, lanes: int) -> None:
            more = [self.wider(c.load(self.line(k, i), lanes)) for k in (0, 1)]
            old = self.sums_of(image, part, i, lanes)
            self.put_sums(image, part, i, [b.fadd(*two) for two in zip(old, more, strict=True)])

        with self.units() as (image, part, first, stop):
            self.clear_sums(image, part)
            with self.blocks(first, stop) as (top, bottom):
                self.down(image, top, bottom, (0, 1), lambda i, lanes: terms(image, i, lanes))
                steps(c, self.channels, lambda i, lanes: join(image, part, i, lanes))

    def settle_grad(self) -> None:
        """The means that dx wants of each set, then the gradients of the parameters."""
        c, b = self.c, self.c.b
        first, stop = self.own_channels()

        def means(i: Value, sums: Sequence[Value], lanes: int) -> list[Value]:
            """Of what is summed with the weights, over the numbers of a set."""
            weight = b.fdiv(
                self.wider(self.number("weight", i, 1.0, lanes)), self.double(self.count, lanes)
            )
            return [b.fmul(s, weight) for s in sums]

        def put(image: Value, i: Value, lanes: int, found: Sequence[Value]) -> None:
            for name, value in zip(("level", "slope"), found, strict=True):
                self.put_number(name, self.of.lanes(self.narrower(value), lanes), image, i)

        def join(image: Value, i: Value, lanes: int) -> None:
            found = self.added(
                0, self.n_parts, lanes, 2, lambda part: self.sums_of(image, part, i, lanes)
            )
            self.put_sums(image, 0, i, found)
            if not self.form.grouped:
                put(image, i, lanes, means(i, found, lanes))

        with c.loop(0, self.images) as image:
            steps(c, c.sub(stop, first), lambda i, lanes: join(image, i, lanes), first)
            if self.form.grouped:
                with c.loop(first, stop, self.each) as group:
                    found = self.added(
                        group,
                        c.add(group, self.each),
                        1,
                        2,
                        lambda i: means(i, self.sums_of(image, 0, i), 1),
                    )
                    steps(c, self.each, lambda i, lanes: put(image, i, lanes, found), group)
        steps(c, c.sub(stop, first), self.put_gradients, first)

    def put_gradients(self, i: Value, lanes: int) -> None:
        """dweight and dbias: the sums of all images, in their order."""
        if not {"dweight", "dbias"} & self.form.given:
            return
        found = self.added(0, self.images, lanes, 2, lambda image: self.sums_of(image, 0, i, lanes))
        kinds = (self.form.of_bias, self.form.of_weight)
        for name, kind, value in zip(("dbias", "dweight"), kinds, found, strict=True):
            if self.has(name):
                of = Stored(self.c, kind)
                of.store(self.narrower(value), of.at(self.at[name], i))

    def apply_grad(self) -> None:
        def write(image: Value, places: Sequence[Value], i: Value, lanes: int) -> None:
            mean, rstd, weight, bias = self.of_channel(image, i, lanes)
            level, slope = (self.number_of(name, image, i, lanes) for name in ("level", "slope"))
            for at in places:
                if self.has("dz"):  # gather_grad wrote it: one tensor to read instead of two
                    dz = self.load("dz", at, i, lanes)
                else:
                    dz = self.dz(at, i, lanes, mean, rstd, weight, bias)
                hat = self.hat(at, i, lanes, mean, rstd)
                self.give(dz, hat, at, i, rstd, weight, level, slope)

        self.walk(write)


def _call(way: str, form: Form, kept: Sequence[str], words: Sequence[Word], large: bool) -> Call:
    def write(module: Any) -> None:
        def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
            getattr(_Norm(c, form, words, thread, threads, kept), way)()

        entry(module, "run", body)

    name = f"channels last norm {way} {' '.join(kept)} {form.name}"
    return Call(load(name, write), tuple(words), large)


WAYS = {
    "affine": ("gather", "settle"),
    "forward": ("gather", "settle", "apply"),
    "backward": ("gather_grad", "settle_grad", "apply_grad"),
}


def prepare(
    way: str, form: Form, sizes: Sizes, eps: float, momentum: float, where: Mapping[str, Word]
) -> tuple[list[Call], dict[str, Room]]:
    """The calls of ``way`` for tensors that lie ``where``, and where they keep numbers of each
    channel of each image: mean, scale and shift of an affine one, (x − mean) · scale + shift."""
    kept = GRADIENT if way == "backward" else AFFINE
    floats = struct.unpack("<2i", struct.pack("<2f", eps, momentum))
    sums = 4 * sizes.images * sizes.parts * sizes.channels  # two of float64
    each = sizes.images * sizes.channels
    numbers = sums + len(kept) * each
    room = Room("channels last norm", numbers, LINES * sizes.channels + APART)
    rooms = {n: replace(room, offset=4 * (sums + k * each)) for k, n in enumerate(kept)}
    words = (
        *(where.get(name, 0) for name in POINTERS),
        *sizes,
        sizes.parts,
        *floats,
        room,
        rooms[kept[0]],
        replace(room, offset=4 * numbers),
    )
    ways = WAYS[way]
    if way == "backward" and form.grouped:
        ways = ("gather", "settle", *ways)
    if ("dx" if way == "backward" else "y") not in form.given:
        ways = tuple(w for w in ways if not w.startswith("apply"))
    large = sizes.numel > SERIAL
    return [_call(w, form, kept, words, large) for w in ways], rooms
