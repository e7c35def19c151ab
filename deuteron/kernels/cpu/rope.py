"""Rotary positions on q and k in one call: each pair (a, b) of a head turned by its token's angle.

    a' = a · cos − b · sin    b' = b · cos + a · sin

    bytes = 2 · size · (q + k), the tables from the cache

Threads share the tokens; the angles of a token serve all its heads. Pairs are (i, i + dims/2), or
neighbours, which are woven apart and together again in registers. What lies behind the rotated
features is copied.

Written out, rope with pairs (i, i + dims/2) is generated code that takes 1.2 to 1.4 times as long;
neighbours, which no generated code puts together again, stay with torch: 2.8 ms instead of 0.4 in
bf16 on two cores (bench/results/cpu_operators-cpu-aarch64.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import Code, Loaded, Value, entry, load, width
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import SERIAL, steps


@dataclass(frozen=True)
class Variant:
    """What a kernel is compiled for; ``parts`` counts q and k."""

    stored: str
    table: str
    interleaved: bool
    inverse: bool
    parts: int


class Part(NamedTuple):
    """q or k: where it lies and where its result goes, its heads, and the steps from batch to
    batch, token to token and head to head of both."""

    source: Word
    result: Word
    heads: int
    steps: tuple[int, int, int]
    result_steps: tuple[int, int, int]


WORDS = len(Part._fields) + 4  # of a part, its steps one by one


class _Tokens:
    def __init__(self, c: Code, variant: Variant, words: Value) -> None:
        self.c, self.variant, self.words = c, variant, words
        self.of, self.table = Stored(c, variant.stored), Stored(c, variant.table)
        first = variant.parts * WORDS
        self.cos, self.sin = (c.pointer(words, first + k) for k in range(2))
        self.batch, self.length, self.half, self.rest = (
            c.word(words, first + 2 + k) for k in range(4)
        )

    def token(self, b: Value, s: Value) -> None:
        c = self.c
        angle = c.mul(s, self.half)
        for p in range(self.variant.parts):
            at = p * WORDS
            source, result = c.pointer(self.words, at), c.pointer(self.words, at + 1)
            heads, *step = (c.word(self.words, at + 2 + k) for k in range(7))
            with c.loop(0, heads) as h:
                here, there = (
                    self.of.at(base, c.mul(b, by[0]), c.mul(s, by[1]), c.mul(h, by[2]))
                    for base, by in ((source, step[:3]), (result, step[3:]))
                )
                self.head(here, there, angle)

    def head(self, here: Value, there: Value, angle: Value) -> None:
        c, of = self.c, self.of

        def turn(i: Value, lanes: int) -> None:
            cos, sin = (
                self.table.load(self.table.at(t, angle, i), lanes) for t in (self.cos, self.sin)
            )
            if self.variant.inverse:
                sin = c.b.fneg(sin)
            a, b = self.pair(here, i, lanes)
            first = c.fma(c.b.fneg(b), sin, c.b.fmul(a, cos))
            second = c.fma(a, sin, c.b.fmul(b, cos))
            self.put(there, i, lanes, first, second)

        steps(c, self.half, turn)
        done = c.mul(self.half, 2)
        steps(
            c,
            self.rest,
            lambda i, n: of.store(of.load(of.at(here, done, i), n), of.at(there, done, i)),
        )

    def pair(self, here: Value, i: Value, lanes: int) -> tuple[Value, Value]:
        c, of = self.c, self.of
        if not self.variant.interleaved:
            return of.load(of.at(here, i), lanes), of.load(of.at(here, self.half, i), lanes)
        place = c.mul(i, 2)
        if lanes == 1:
            return of.load(of.at(here, place)), of.load(of.at(here, place, 1))
        both = of.load(of.at(here, place), 2 * lanes)
        return (
            c.shuffle(both, both, range(0, 2 * lanes, 2)),
            c.shuffle(both, both, range(1, 2 * lanes, 2)),
        )

    def put(self, there: Value, i: Value, lanes: int, first: Value, second: Value) -> None:
        c, of = self.c, self.of
        if not self.variant.interleaved:
            of.store(first, of.at(there, i))
            of.store(second, of.at(there, self.half, i))
            return
        place = c.mul(i, 2)
        if lanes == 1:
            of.store(first, of.at(there, place))
            of.store(second, of.at(there, place, 1))
            return
        order = [k for j in range(lanes) for k in (j, lanes + j)]
        of.store(c.shuffle(first, second, order), of.at(there, place))


def _write(module: Any, variant: Variant) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        tokens = _Tokens(c, variant, words)
        begin, end = c.share(c.mul(tokens.batch, tokens.length), thread, threads)
        with c.loop(begin, end) as token:
            b = c.div(token, tokens.length)
            tokens.token(b, c.sub(token, c.mul(b, tokens.length)))

    entry(module, "run", body)


def compiled(variant: Variant) -> Loaded:
    return load(f"rope {variant} of {width()}", lambda module: _write(module, variant))


def prepare_rope(
    variant: Variant, parts: Sequence[Part], cos: Word, sin: Word, sizes: tuple[int, int, int, int]
) -> Call:
    """The call; ``sizes`` are batch, tokens, pairs that are turned, and features that are not.
    The tables begin with the first token's row."""
    batch, length, half, rest = sizes
    words: list[Word] = []
    for part in parts:
        words += (part.source, part.result, part.heads, *part.steps, *part.result_steps)
    work = batch * length * (2 * half + rest) * sum(part.heads for part in parts)
    return Call(compiled(variant), (*words, cos, sin, *sizes), work > SERIAL)
