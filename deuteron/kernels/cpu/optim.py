"""Update rules over many tensors in one call.

The tensors' addresses lie in a table; threads share a list of chunks (tensor, chunk of that
tensor) and run the rule's statements over vectors of elements. Every element is read once and
written once, so the bytes are those of :mod:`deuteron.kernels.optim`. Sums are kept in float64 and
stored per chunk: the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from llvmlite import ir

from deuteron.codegen.calls import Argument, Call, Tape
from deuteron.codegen.llvm import F32, F64, I64, Code, Value, entry, lanes_of, load, vec, width
from deuteron.codegen.llvm_types import STORED, Registers
from deuteron.ir.dtype import DType, dtype
from deuteron.kernels.optim import Program, evaluate

BLOCK = 8192  # elements of a chunk: the reading of a table is lost in them
SERIAL = 32768  # elements below which a team of threads costs more than it gains


class Writer(Registers):
    """One kernel: the program's statements as instructions on vectors."""

    def __init__(self, c: Code, program: Program, dtypes: Sequence[DType], wide: bool) -> None:
        self.c, self.program = c, program
        self.float = F64 if wide else F32
        self.dtypes = dict(zip(program.roles, dtypes, strict=True))

    def _number(self, x: float, like: Value) -> Value:
        return self.splat(ir.Constant(self.float, x), lanes_of(like))

    def _sign(self, x: Value) -> Value:
        b, zero = self.c.b, self._number(0.0, x)
        below = b.select(b.fcmp_ordered("<", x, zero), self._number(-1.0, x), zero)
        return b.select(b.fcmp_ordered(">", x, zero), self._number(1.0, x), below)

    @property
    def table(self) -> dict[str, Callable[..., Value]]:
        b = self.c.b
        return {
            "add": b.fadd,
            "sub": b.fsub,
            "mul": b.fmul,
            "div": b.fdiv,
            "sign": self._sign,
            "sqrt": lambda x: self.c.intrinsic("sqrt", x),
            "max": self.c.fmax,
        }

    def numbers(self, row: Value) -> dict[str, Value]:
        """The numbers of a tensor, which lie side by side in float64."""
        c, found = self.c, {}
        for k, name in enumerate(self.program.numbers):
            value = c.load(c.at(row, k, of=F64), of=F64)
            found[name] = value if self.float == F64 else c.b.fptrunc(value, F32)
        return found

    def at(self, role: str, base: Value, i: Value) -> Value:
        return self.c.at(base, i, of=STORED[self.dtypes[role].short])

    def read(self, role: str, base: Value, i: Value, lanes: int) -> Value:
        kind = self.dtypes[role]
        where, stored = self.at(role, base, i), vec(lanes, STORED[kind.short])
        return self.from_memory(self.c.b.load(where, typ=stored, align=kind.bits // 8), kind)

    def write(self, role: str, value: Value, base: Value, i: Value) -> None:
        kind = self.dtypes[role]
        where = self.at(role, base, i)
        self.c.b.store(self.to_memory(value, kind), where, align=kind.bits // 8)

    def span(
        self,
        begin: Value,
        end: Value,
        lanes: int,
        bases: dict[str, Value],
        numbers: dict[str, Value],
        totals: Sequence[Value],
    ) -> None:
        """Elements ``begin`` … ``end``, ``lanes`` at a time."""
        c = self.c
        spread = {name: self.splat(value, lanes) for name, value in numbers.items()}
        with c.loop(begin, end, lanes) as i:
            values = dict(spread)
            for role in self.program.reads:
                values[role] = self.read(role, bases[role], i, lanes)
            made = evaluate(self.program.body, values, self.table)
            for role, name in self.program.writes:
                self.write(role, made[name], bases[role], i)
            for name, total in zip(self.program.sums, totals, strict=True):
                value = made[name]
                if self.float == F32:
                    value = c.b.fpext(value, vec(lanes, F64))
                c.b.store(c.b.fadd(c.b.load(total, typ=vec(lanes, F64)), value), total)


def _write(module: Any, program: Program, dtypes: Sequence[DType], wide: bool) -> None:
    lanes = width() // 2 if wide else width()

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        w = Writer(c, program, dtypes, wide)
        table, grads, where, rows, sums = (c.pointer(words, i) for i in range(5))
        tensors, chunks, stride = (c.word(words, 5 + i) for i in range(3))
        first, last = c.share(chunks, thread, threads)
        with c.loop(first, last) as chunk:
            t = c.index(where, chunk)
            start = c.mul(c.index(where, c.add(chunks, chunk)), BLOCK)
            count = c.least(c.sub(c.word(table, t), start), BLOCK)
            bases, place = {}, 0
            for role in program.roles:
                place += role != "g"
                base = (
                    c.pointer(grads, t)
                    if role == "g"
                    else c.pointer(table, c.add(c.mul(tensors, place), t))
                )
                bases[role] = w.at(role, base, start)
            numbers = w.numbers(c.at(rows, c.mul(t, stride), of=F64))
            whole = c.sub(count, c.rem(count, lanes))
            parts: list[list[Value]] = [[] for _ in program.sums]
            for step, begin, end in ((lanes, c.i(0), whole), (1, whole, count)):
                totals = [c.variable(vec(step, F64)) for _ in program.sums]
                for total in totals:
                    c.b.store(ir.Constant(vec(step, F64), None), total)
                w.span(begin, end, step, bases, numbers, totals)
                for part, total in zip(parts, totals, strict=True):
                    part.append(c.reduce(c.b.load(total, typ=vec(step, F64)), c.b.fadd))
            for k, (most, rest) in enumerate(parts):
                here = c.at(sums, c.add(c.mul(chunks, k), chunk), of=I64)
                c.b.store(c.b.fadd(most, rest), here, align=8)

    entry(module, "run", body)


def filled(tape: Tape) -> Callable[..., None]:
    """The tape as a function of the words that are its arguments."""

    def run(*given: int) -> None:
        words = tape.words()
        for (at, _), word in zip(tape.arguments, given, strict=True):
            words[at] = word
        tape.run(words)

    return run


@lru_cache
def update(
    program: Program, dtypes: tuple[torch.dtype, ...], threaded: bool
) -> Callable[..., None]:
    """``run(table, grads, where, rows, sums, tensors, chunks, stride of rows)``, in addresses."""
    kinds = [dtype(d) for d in dtypes]
    wide = torch.float64 in dtypes
    name = f"optim {program} {[k.short for k in kinds]} of {width()}"
    loaded = load(name, lambda module: _write(module, program, kinds, wide))
    return filled(Tape([Call(loaded, tuple(map(Argument, range(8))), threaded)]))
