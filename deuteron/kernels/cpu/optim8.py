"""AdamW with its state in 8 bits: the rule of :mod:`deuteron.kernels.optim` on moments kept as

    m̂ = ±A·(q / 127)²,  A = max |m| of 256 elements;    v̂ = V·(q / 255)⁴,  V = max v

Groups of 256 elements go through twice, the second time from L1: the update with the largest of
the new moments, then their levels, up or down by chance. Bytes per element as in the Triton kernel
of the same name, whose hash and formulas these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir

from deuteron.codegen.calls import Argument, Call, Tape
from deuteron.codegen.llvm import F32, I8, I32, Code, Value, entry, lanes_of, load, vec, width
from deuteron.ir.dtype import DType, dtype
from deuteron.kernels.cpu.optim import BLOCK, Writer, filled
from deuteron.kernels.cpu.sweep import Gathered, steps
from deuteron.kernels.optim import Program, evaluate

GROUP = 256  # elements that share a scale
M_LEVELS, V_LEVELS = 127, 255
V_SALT = 0x51ED27
MOMENTS = ("m", "v")


class _Groups(Writer):
    """One kernel: groups of elements of one tensor after another."""

    def __init__(self, c: Code, program: Program, dtypes: Sequence[DType]) -> None:
        super().__init__(c, program, dtypes, wide=False)
        self.rooms = {k: c.variable(F32, count=GROUP) for k in MOMENTS}
        self.tops = {k: Gathered(c, c.fmax, 0.0) for k in MOMENTS}

    def _whole(self, x: int, like: Value) -> Value:
        return self.splat(ir.Constant(I32, x), lanes_of(like))

    def _share(self, q: Value, levels: int) -> Value:
        """q / levels for a whole number q, rounded as a division rounds it: the quotient by the
        reciprocal, corrected by its remainder. A third of a division's time."""
        c, inverse = self.c, self._number(1.0 / levels, q)
        near = c.b.fmul(q, inverse)
        rest = c.fma(near, self._number(-levels, q), q)
        return c.fma(rest, inverse, near)

    def _moment(self, role: str, base: Value, i: Value, scale: Value, lanes: int) -> Value:
        b = self.c.b
        raw = self.c.load(self.c.at(base, i, of=I8), lanes, of=I8)
        widen = b.sext if role == "m" else b.zext
        q = b.sitofp(widen(raw, vec(lanes, I32)), vec(lanes))
        part = self._share(q, M_LEVELS if role == "m" else V_LEVELS)
        square = b.fmul(part, self.c.intrinsic("fabs", part) if role == "m" else part)
        return b.fmul(self.splat(scale, lanes), square if role == "m" else b.fmul(square, square))

    def _noise(self, place: Value, lanes: int) -> Value:
        """Evenly in [0, 1), from the sum of an element's place and a seed."""
        b = self.c.b
        count = ir.Constant(vec(lanes, I32), list(range(lanes)) if lanes > 1 else 0)
        x = b.add(self.splat(place, lanes), count)
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = b.mul(b.xor(x, b.lshr(x, self._whole(shift, x))), self._whole(factor, x))
        x = b.xor(x, b.lshr(x, self._whole(16, x)))
        even = b.sitofp(b.lshr(x, self._whole(8, x)), vec(lanes))
        return b.fmul(even, self._number(1.0 / 16777216.0, even))

    def _level(self, x: Value, top: Value, noise: Value, levels: int, fourth: bool) -> Value:
        """x ≥ 0 as a level between 0 and ``levels``; a second moment above 0 has level 1 or more,
        because it is divided by."""
        c, b, zero = self.c, self.c.b, self._number(0.0, x)
        some = b.fcmp_ordered(">", top, zero)
        r = b.select(some, b.fdiv(x, top), zero)
        root = c.intrinsic("sqrt", c.intrinsic("sqrt", r) if fourth else r)
        low = c.intrinsic("floor", b.fmul(root, self._number(levels, x)))
        low = c.fmin(low, self._number(levels - 1, x))
        low = b.select(b.fcmp_unordered("uno", low, low), zero, low)
        next_ = b.fadd(low, self._number(1.0, x))
        below, above = (self._power(self._share(q, levels), fourth) for q in (low, next_))
        up = b.fcmp_ordered(">", b.fsub(r, below), b.fmul(noise, b.fsub(above, below)))
        level = b.select(up, next_, low)
        if not fourth:
            return level
        least = b.select(b.fcmp_ordered(">", x, zero), self._number(1.0, x), zero)
        return c.fmax(level, least)

    def _power(self, x: Value, fourth: bool) -> Value:
        square = self.c.b.fmul(x, x)
        return self.c.b.fmul(square, square) if fourth else square

    def update(
        self,
        count: Value,
        bases: dict[str, Value],
        scales: dict[str, Value],
        numbers: dict[str, Value],
    ) -> None:
        """The step of a group; its new moments stay in float32, the largest are kept."""
        c = self.c
        for top in self.tops.values():
            top.clear()

        def write(i: Value, lanes: int) -> None:
            values = {name: self.splat(value, lanes) for name, value in numbers.items()}
            for role in self.program.reads:
                values[role] = (
                    self._moment(role, bases[role], i, scales[role], lanes)
                    if role in MOMENTS
                    else self.read(role, bases[role], i, lanes)
                )
            made = evaluate(self.program.body, values, self.table)
            for role, name in self.program.writes:
                if role not in MOMENTS:
                    self.write(role, made[name], bases[role], i)
                    continue
                c.store(made[name], c.at(self.rooms[role], i))
                size = c.intrinsic("fabs", made[name]) if role == "m" else made[name]
                unknown = c.b.fcmp_unordered("uno", size, size)
                infinite = self._number(float("inf"), size)
                self.tops[role].take(c.b.select(unknown, infinite, size), lanes)

        steps(c, count, write)

    def keep(self, count: Value, bases: dict[str, Value], place: Value) -> None:
        """The levels of the group's new moments; ``place`` is its first element plus the seed."""
        c, b = self.c, self.c.b
        tops = {k: top.total() for k, top in self.tops.items()}
        for k, top in tops.items():
            c.store(top, bases[f"{k} scale"])

        def write(i: Value, lanes: int) -> None:
            here = b.add(place, b.trunc(i, I32))
            m, v = (c.load(c.at(self.rooms[k], i), lanes) for k in MOMENTS)
            m_top, v_top = (self.splat(tops[k], lanes) for k in MOMENTS)
            size = c.intrinsic("fabs", m)
            m_level = self._level(size, m_top, self._noise(here, lanes), M_LEVELS, False)
            salted = b.add(here, ir.Constant(I32, V_SALT))
            v_level = self._level(v, v_top, self._noise(salted, lanes), V_LEVELS, True)
            below = b.fcmp_ordered("<", m, self._number(0.0, m))
            m_level = b.select(below, b.fneg(m_level), m_level)
            for k, level in (("m", m_level), ("v", v_level)):
                stored = b.trunc(b.fptosi(level, vec(lanes, I32)), vec(lanes, I8))
                b.store(stored, c.at(bases[k], i, of=I8), align=1)

        steps(c, count, write)


def _write(module: Any, program: Program, dtypes: Sequence[DType]) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        w = _Groups(c, program, dtypes)
        table, grads, where, row = (c.pointer(words, i) for i in range(4))
        tensors, chunks, seed = (c.word(words, 4 + i) for i in range(3))
        numbers = w.numbers(row)
        first, last = c.share(chunks, thread, threads)
        with c.loop(first, last) as chunk:
            t = c.index(where, chunk)
            start = c.mul(c.index(where, c.add(chunks, chunk)), BLOCK)
            end = c.least(c.add(start, BLOCK), c.word(table, t))
            # the table has the scales after the moments, and master weights after these
            order = ("p", *MOMENTS, "m scale", "v scale", *program.roles[4:])
            homes = {
                name: c.pointer(table, c.add(c.mul(tensors, 1 + k), t))
                for k, name in enumerate(order)
            }
            homes["g"] = c.pointer(grads, t)
            with c.loop(start, end, GROUP) as at:
                count = c.least(c.sub(end, at), GROUP)
                group = c.div(at, GROUP)
                bases = {role: w.at(role, homes[role], at) for role in program.roles}
                for k in MOMENTS:
                    bases[f"{k} scale"] = c.at(homes[f"{k} scale"], group)
                scales = {k: c.load(bases[f"{k} scale"]) for k in MOMENTS}
                w.update(count, bases, scales, numbers)
                w.keep(count, bases, c.b.trunc(c.add(at, seed, t), I32))

    entry(module, "run", body)


@lru_cache
def update(
    program: Program, dtypes: tuple[torch.dtype, ...], threaded: bool
) -> Callable[..., None]:
    """``run(table, grads, where, row, tensors, chunks, seed)``: addresses, then numbers."""
    kinds = [dtype(d) for d in dtypes]
    name = f"optim8 {program} {[k.short for k in kinds]} of {width()}"
    loaded = load(name, lambda module: _write(module, program, kinds))
    return filled(Tape([Call(loaded, tuple(map(Argument, range(7))), threaded)]))
