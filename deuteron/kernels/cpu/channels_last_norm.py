"""Norms whose statistics belong to channels where channels lie innermost: over [N, S, C] in
row-major order, the formulas of ``norm.py``.

    bytes = size · (2 x + residual + y) forward, size · (2 x + 2 grad + 2 y + dx + extra) backward,
    or (2 x + grad + y + 2 dz + dx), and x once more for the statistics of groups: no cache holds
    all rows

Threads share parts of the rows, a number that does not depend on how many threads there are, so
that neither do the bits. In a part 64 rows at a time give sums of each channel, which go on in
float64. Rows are read two at a time: numbers of a channel are then loaded once for both, and
memory still sees few streams that go on (sixteen were three times as slow on a Neoverse N1).
A second call puts the parts together, a third walks over all rows again.

Statistics are those of distances from the first row of an image, in float64 from 64 rows on: where
that is off from the mean by d, d² in 2²⁴ is lost, and d² shows in the variance itself, unless the
first row is nothing like the others. All images are one to batch norm.

Generated code reads every channel by itself, across the order of memory. On a Neoverse N1, with the
gradient, it takes 3 times as long for batch norm and 18 times for groups (8 × 64 × 56 × 56).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, Code, Value, entry, lanes_of, load
from deuteron.kernels.cpu.channels_last_rows import APART, LINES, OF_ONE, Find, Rows
from deuteron.kernels.cpu.norm import POINTERS, Kind, Numbers, numbers
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, steps

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

    @property
    def grouped(self) -> bool:
        return self.kind.sets == "groups"

    # ---- statistics

    def near(self, image: Value, i: Value, lanes: int) -> Value:
        """The first row of an image; 0 where that is not finite."""
        b, x = self.c.b, self.load("x", self.at_row(image, self.c.i(0)), i, lanes)
        none = b.fsub(x, x)  # 0, or nan
        return b.select(b.fcmp_ordered("==", none, none), x, self.c.f(0.0, lanes))

    def gather(self) -> None:
        """Σ d and Σ d² of each channel in each part, d being the distance from the first row."""
        c = self.c

        def away(i: Value, lanes: int) -> Find:
            near = c.load(self.line(0, i), lanes)

            def find(at: Value) -> Sequence[tuple[Value, Value | None]]:
                d = c.b.fsub(self.load("x", at, i, lanes), near)
                return [(d, None), (d, d)]

            return find

        with self.units() as unit:

            def keep(i: Value, lanes: int) -> None:
                c.store(self.near(unit[0], i, lanes), self.line(0, i))

            steps(c, self.channels, keep)
            self.gathered(unit, away, OF_ONE)

    def settle(self) -> None:
        """The statistics of each set, and what the next pass wants of them."""
        c, b = self.c, self.c.b

        def know(image: Value, i: Value, lanes: int) -> None:
            """Of a channel the sum, and the squares around its mean."""
            near = self.wider(self.near(image, i, lanes))
            far, squares = self.over_parts(image, i, lanes)
            n = self.double(self.rows, lanes)
            squares = b.fsub(squares, b.fdiv(b.fmul(far, far), n))
            total = b.fadd(b.fmul(near, n), far)
            if self.grouped:
                self.put_sums(image, 0, i, (total, squares))
            else:
                self.put_statistics(image, i, *self.statistics(total, squares))

        first, stop = self.own_channels()
        with c.loop(0, self.images) as image:
            steps(c, c.sub(stop, first), lambda i, lanes: know(image, i, lanes), first)
            if self.grouped:
                with c.loop(first, stop, self.each) as group:
                    found = self.statistics(*self.of_group(image, group))
                    self.spread(group, lambda i, wide: self.put_statistics(image, i, *wide), found)

    def of_group(self, image: Value, first: Value) -> tuple[Value, Value]:
        """The sum and the squares around the mean of a group, from those of its channels."""
        b, last, rows = self.c.b, self.c.add(first, self.each), self.double(self.rows)
        total, within = self.added(first, last, 1, lambda i: self.sums_of(image, 0, i))
        mean = b.fdiv(total, self.double(self.count))

        def between(i: Value) -> Sequence[Value]:
            apart = b.fsub(b.fdiv(self.sums_of(image, 0, i)[0], rows), mean)
            return [b.fmul(b.fmul(apart, apart), rows)]

        return total, b.fadd(within, self.added(first, last, 1, between, 1)[0])

    def spread(self, group: Value, put: Any, found: Sequence[Value]) -> None:
        """``put(channel, values)`` for the channels of a group, which have the same values."""

        def each(i: Value, lanes: int) -> None:
            put(i, [self.of.lanes(v, lanes) for v in found])

        steps(self.c, self.each, each, group)

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
        if not self.grouped:
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

    def shared(self, image: Value, i: Value, lanes: int, *more: str) -> Numbers:
        """The numbers of channels; ``more`` of what was kept."""
        mean, rstd = (self.number_of(name, image, i, lanes) for name in ("mean", "rstd"))
        weight, bias = self.number("weight", i, 1.0, lanes), self.number("bias", i, 0.0, lanes)
        kept = (self.number_of(name, image, i, lanes) for name in more)
        return Numbers(mean, rstd, weight, bias, *kept)

    def hat(self, at: Value, i: Value, lanes: int, n: Numbers) -> Value:
        return self.c.b.fmul(self.away(at, i, lanes, n.mean), n.rstd)

    def gather_grad(self) -> None:
        """Σ dz and Σ dz · hat of each channel in each part."""

        def terms(image: Value, i: Value, lanes: int) -> Find:
            n = self.shared(image, i, lanes)

            def find(at: Value) -> Sequence[tuple[Value, Value | None]]:
                dz = self.dz(at, i, lanes, n)
                if self.has("dz"):
                    self.store(dz, "dz", at, i)
                return [(dz, None), (dz, self.hat(at, i, lanes, n))]

            return find

        with self.units() as unit:
            self.gathered(unit, lambda i, lanes: terms(unit[0], i, lanes))

    def settle_grad(self) -> None:
        """The means that dx wants of each set, then the gradients of the parameters."""
        c, b = self.c, self.c.b
        first, stop = self.own_channels()

        def means(i: Value, sums: Sequence[Value], lanes: int) -> list[Value]:
            """Of what is summed with the weights, over the numbers of a set."""
            weight = self.wider(self.number("weight", i, 1.0, lanes))
            return [b.fmul(s, b.fdiv(weight, self.double(self.count, lanes))) for s in sums]

        def put(image: Value, i: Value, found: Sequence[Value]) -> None:
            for name, value in zip(("level", "slope"), found, strict=True):
                self.put_number(name, self.narrower(value), image, i)

        def join(image: Value, i: Value, lanes: int) -> None:
            found = self.over_parts(image, i, lanes)
            self.put_sums(image, 0, i, found)
            if not self.grouped:
                put(image, i, means(i, found, lanes))

        with c.loop(0, self.images) as image:
            steps(c, c.sub(stop, first), lambda i, lanes: join(image, i, lanes), first)
            if self.grouped:
                with c.loop(first, stop, self.each) as group:
                    end = c.add(group, self.each)
                    found = self.added(
                        group, end, 1, lambda i: means(i, self.sums_of(image, 0, i), 1)
                    )
                    self.spread(group, lambda i, wide: put(image, i, wide), found)
        steps(c, c.sub(stop, first), self.put_gradients, first)

    def put_gradients(self, i: Value, lanes: int) -> None:
        """dweight and dbias: the sums of all images, in their order."""
        if not {"dweight", "dbias"} & {*self.kind.there}:
            return
        found = self.added(0, self.images, lanes, lambda image: self.sums_of(image, 0, i, lanes))
        kinds = (("dbias", self.kind.of_bias), ("dweight", self.kind.of_weight))
        for (name, kind), value in zip(kinds, found, strict=True):
            if self.has(name):
                of = Stored(self.c, kind)
                of.store(self.narrower(value), of.at(self.at[name], i))

    def apply_grad(self) -> None:
        def write(image: Value, places: Sequence[Value], i: Value, lanes: int) -> None:
            n = self.shared(image, i, lanes, "level", "slope")
            for at in places:
                if self.has("dz"):  # gather_grad wrote it: one tensor to read instead of two
                    dz = self.load("dz", at, i, lanes)
                else:
                    dz = self.dz(at, i, lanes, n)
                self.give(dz, self.hat(at, i, lanes, n), at, i, n)

        self.walk(write)


def _call(step: str, kind: Kind, kept: Sequence[str], words: Sequence[Word], large: bool) -> Call:
    def write(module: Any) -> None:
        def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
            getattr(_Norm(c, kind, words, thread, threads, kept), step)()

        entry(module, "run", body)

    name = f"channels last norm {step} {' '.join(kept)} {kind.name}"
    return Call(load(name, write), tuple(words), large)


STEPS = {
    "affine": ("gather", "settle"),
    "forward": ("gather", "settle", "apply"),
    "backward": ("gather_grad", "settle_grad", "apply_grad"),
}


def prepare(
    way: str, kind: Kind, sizes: Sizes, eps: float, momentum: float, where: Mapping[str, Word]
) -> tuple[list[Call], dict[str, Room]]:
    """The calls of ``way`` for tensors that lie ``where``, and where they keep numbers of each
    channel of each image: mean, scale and shift of an affine one, (x − mean) · scale + shift."""
    kept = GRADIENT if way == "backward" else AFFINE
    sums = 4 * sizes.images * sizes.parts * sizes.channels  # two of float64
    each = sizes.images * sizes.channels
    floats = sums + len(kept) * each
    room = Room("channels last norm", floats, LINES * sizes.channels + APART)
    rooms = {n: replace(room, offset=4 * (sums + k * each)) for k, n in enumerate(kept)}
    words = (
        *(where.get(name, 0) for name in POINTERS),
        *(*sizes, sizes.parts, *numbers(eps, momentum)),
        *(room, rooms[kept[0]], replace(room, offset=4 * floats)),
    )
    names = STEPS[way]
    if way == "backward" and kind.sets == "groups":
        names = ("gather", "settle", *names)
    if ("dx" if way == "backward" else "y") not in kind.there:
        names = tuple(name for name in names if not name.startswith("apply"))
    large = sizes.numel > SERIAL
    return [_call(name, kind, kept, words, large) for name in names], rooms
