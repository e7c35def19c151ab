"""The second factor of a product in panels [matrix][⌈N / NR⌉][K][NR], with zeros beyond column N.

A factor that never changes is packed once, when the plan is built. One that arrives with every
call is packed into scratch memory by a kernel of this file first:

    bytes = (size of an element + 4) · K · N per call

in one of four ways: ``along`` if neighbouring columns are contiguous in memory (a row of a panel is
then a run of memory) and k comes in equal steps, ``placed`` if the columns are contiguous and a
table says where each k is, ``across`` if neighbouring k are contiguous (blocks of 4×4 are
transposed in registers), ``scattered`` otherwise. A place below 0 in the table stands for a k whose
numbers are all 0, such as padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import Code, Value, load_run, width
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.to_layout import turned

# from the address of a factor: the calls that pack it, and the address of its panels
Packed = Callable[[Word], tuple[tuple[Call, ...], Word]]
SERIAL_NUMBERS = 8192  # packing fewer takes less time than waking up a second thread


def together(wide: int) -> int:
    """Return how many narrow panels are written together, so that cache lines are read whole."""
    return max(1, 16 // wide)


# ---- writing panels ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Panels:
    """Writes panels of ``wide`` columns from ``to`` on; the factor's numbers are stored as
    ``of``."""

    of: Stored
    to: Value
    wide: int

    def across(self, source: Value, step: Value, columns: Value, depth: Value) -> None:
        """Pack a factor whose k is contiguous and whose columns are ``step`` apart."""
        c, of, wide = self.of.c, self.of, self.wide
        whole_n, whole_k = (c.sub(x, c.rem(x, 4)) for x in (columns, depth))

        def place(column: Value, k: Value) -> Value:
            panel, inside = c.split(column, wide)
            return c.at(self.to, c.mul(c.add(c.mul(panel, depth), k), wide), inside)

        with c.loop(0, whole_n, 4) as n:
            with c.loop(0, whole_k, 4) as k:
                rows = [of.load(of.at(source, c.mul(c.add(n, i), step), k), 4) for i in range(4)]
                for i, row in enumerate(turned(c, rows)):
                    c.store(row, place(n, c.add(k, i)))
            with c.loop(whole_k, depth) as k:
                for i in range(4):
                    one = of.load(of.at(source, c.mul(c.add(n, i), step), k))
                    c.store(one, place(c.add(n, i), k))
        with c.loop(whole_n, columns) as n, c.loop(0, depth) as k:
            c.store(of.load(of.at(source, c.mul(n, step), k)), place(n, k))
        filled = c.mul(c.div(c.add(columns, wide - 1), wide), wide)
        with c.loop(columns, filled) as n, c.loop(0, depth) as k:
            c.store(c.f(0.0), place(n, k))

    def along(self, row_of: Callable[[Value], Value], depth: Value, columns: Value) -> None:
        """Pack a factor whose columns are contiguous; ``row_of(k)`` is where those of a k begin."""
        c, of, to, wide = self.of.c, self.of, self.to, self.wide
        n = gcd(wide, width())
        whole = c.mul(c.div(columns, wide), wide)
        with c.loop(0, depth) as k:
            row = row_of(k)
            with c.loop(0, whole, wide) as column:
                for j in range(0, wide, n):
                    there = c.at(to, c.mul(column, depth), c.mul(k, wide), j)
                    c.store(of.load(of.at(row, column, j), n), there)
            with c.when(c.cmp("<", whole, columns)):
                there = c.at(to, c.mul(whole, depth), c.mul(k, wide))
                for j in range(0, wide, n):
                    c.store(c.f(0.0, n), c.at(there, j))
                with c.loop(whole, columns) as column:
                    c.store(of.load(of.at(row, column)), c.at(there, c.sub(column, whole)))

    def scattered(self, first: Value, step: Value, depth: Value, columns: Value, at: Value) -> None:
        """Pack one panel, number by number; ``at`` has the offset of every k."""
        c, of, wide = self.of.c, self.of, self.wide
        with c.loop(0, depth) as k:
            row, there = of.at(first, c.index(at, k)), c.at(self.to, c.mul(k, wide))
            with c.loop(0, columns) as n:
                c.store(of.load(of.at(row, c.mul(n, step))), c.at(there, n))
            with c.loop(columns, wide) as n:
                c.store(c.f(0.0), c.at(there, n))


def _pack(way: str, short: str, wide: int, c: Code, words: Value, *thread: Value) -> None:
    source, to, starts, places, empty = c.pointers(words, 5)
    matrices, columns, depth, step_n, step_k = c.words(words, 5, 5)
    of = Stored(c, short)
    few = together(wide) if way in ("along", "placed") else 1
    panels = c.div(c.add(columns, wide - 1), wide)
    jobs = c.div(c.add(panels, few - 1), few)
    with c.loop(*c.share(c.mul(matrices, jobs), *thread)) as job:
        matrix, part = c.split(job, jobs)
        panel = c.mul(part, few)
        column = c.mul(panel, wide)
        here = c.least(c.sub(columns, column), few * wide)
        first = of.at(source, c.word(starts, matrix), c.mul(column, step_n))
        begin = c.mul(c.add(c.mul(matrix, panels), panel), depth, wide)
        made = Panels(of, c.at(to, begin), wide)

        def placed(k: Value) -> Value:
            at = c.index(places, k)
            return c.b.select(c.cmp("<", at, 0), empty, of.at(first, at))

        if way == "across":
            made.across(first, step_n, here, depth)
        elif way == "along":
            made.along(lambda k: of.at(first, c.mul(k, step_k)), depth, here)
        elif way == "placed":
            made.along(placed, depth, here)
        else:
            made.scattered(first, step_n, depth, here, places)


# ---- preparing a factor ------------------------------------------------------------------------


@dataclass(frozen=True)
class Factor:
    """Where B[matrix, k, n] lies: ``starts[matrix] + places[k] + n · step``, in elements. A place
    below 0 stands for zeros."""

    starts: np.ndarray
    places: np.ndarray
    step: int
    columns: int


def way_of(factor: Factor) -> tuple[str, int]:
    """Return the way a factor is packed, and the step from one k to the next if that way has
    one."""
    gaps = set(np.diff(factor.places).tolist())
    gap = gaps.pop() if gaps else 1
    if factor.columns > 1 and factor.step != 1:
        return ("scattered", 0) if gaps or gap != 1 else ("across", 1)
    return ("placed", 0) if gaps or min(factor.places, default=0) < 0 else ("along", gap)


def room(factor: Factor, wide: int) -> int:
    """Floats that the panels take."""
    return len(factor.starts) * -(-factor.columns // wide) * wide * len(factor.places)


def packed_at_call(factor: Factor, short: str, wide: int, name: str) -> Packed:
    """Return what packs the factor anew at each call, into scratch memory called ``name``."""
    way, gap = way_of(factor)
    starts = torch.from_numpy(np.ascontiguousarray(factor.starts, np.int64))
    places = torch.from_numpy(np.ascontiguousarray(factor.places, np.int32))
    kernel = f"pack {way} {short} in {wide} of {width()}"
    to, code = Room(name, room(factor, wide)), load_run(kernel, partial(_pack, way, short, wide))
    sizes = (len(starts), factor.columns, len(places), factor.step, gap)
    threaded, empty = to.floats > SERIAL_NUMBERS, torch.zeros(together(wide) * wide)
    words = to, starts, places, empty, *sizes
    return lambda source: ((Call(code, (source, *words), threaded),), to)


def panels_of(weight: torch.Tensor, wide: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the panels of a factor [matrices, N, K] that never changes."""
    matrices, n, k = weight.shape
    panels = -(-n // wide)
    if n == panels * wide:
        return weight.to(kind).unflatten(1, (panels, wide)).transpose(2, 3).contiguous()
    full = torch.zeros(matrices, panels * wide, k, dtype=kind)
    full[:, :n] = weight
    return full.view(matrices, panels, wide, k).transpose(2, 3).contiguous()


def packed(panels: torch.Tensor) -> Packed:
    """Return the same for a factor that is packed already."""
    return lambda _: ((), panels)


def bias_now(bias: torch.Tensor | None, matrices: int, n: int, wide: int) -> Packed:
    """Return the bias as panels of a single k, in float32; zeros if there is none."""
    given = torch.zeros(matrices, n) if bias is None else bias.reshape(matrices, n).float()
    return packed(panels_of(given.unsqueeze(2), wide))
