"""An image with its padding around it: f[n, y + ph, x + pw, c] = x[n, y, x, c], zeros elsewhere.

    bytes = size · (x + frame)

A convolution over few channels reads it: there the taps of a row lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import Code, Value, load_run, width
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu.conv import Image, Window, frame
from deuteron.kernels.cpu.stored import Stored
from deuteron.kernels.cpu.sweep import steps


def _frame(short: str, c: Code, words: Value, thread: Value, threads: Value) -> None:
    x, to = c.pointers(words, 2)
    batch, height, breadth, channels, ph, pw, xn, xh, xw = c.words(words, 2, 9)
    of = Stored(c, short)

    def fill(where: Value, count: Value, source: Value | None) -> None:
        """Copy so many numbers, or write zeros."""

        def write(i: Value, lanes: int) -> None:
            value = c.f(0.0, lanes) if source is None else of.load(of.at(source, i), lanes)
            of.store(value, of.at(where, i))

        steps(c, count, write, vectors=1)

    lines, side = c.add(height, c.mul(ph, 2)), c.mul(pw, channels)
    across = c.add(c.mul(breadth, channels), c.mul(side, 2))
    with c.loop(*c.share(c.mul(batch, lines), thread, threads)) as line:
        n, framed_y = c.split(line, lines)
        y = c.sub(framed_y, ph)
        here = of.at(to, c.mul(line, across))

        def copied() -> None:
            source = of.at(x, c.mul(n, xn), c.mul(y, xh))
            fill(here, side, None)
            with c.when(c.cmp("==", xw, channels)):
                fill(of.at(here, side), c.mul(breadth, channels), source)
            with c.when(c.cmp("!=", xw, channels)), c.loop(0, breadth) as i:
                there = of.at(here, side, c.mul(i, channels))
                fill(there, channels, of.at(source, c.mul(i, xw)))
            fill(of.at(here, side, c.mul(breadth, channels)), side, None)

        inside = c.b.and_(c.cmp(">=", y, 0), c.cmp("<", y, height))
        c.either(inside, copied, lambda: fill(here, across, None))


def prepare_frame(x: Image, window: Window, short: str) -> tuple[Callable[[Word], Call], Room]:
    """The call that frames an image of one or two dimensions, from the image's address; and the
    framed copy, which is good until the next is made."""
    size = dtype(short).nbytes(prod(frame(x, window).shape))
    line = (1, *x.shape[2:])[-2:], (0, *window.padding)[-2:], (0, *x.strides[2:])[-2:]
    sizes = (x.shape[0], *line[0], x.shape[1], *line[1], x.strides[0], *line[2])
    to = Room("frame", -(-size // 4))
    code = load_run(f"frame {short} of {width()}", partial(_frame, short))
    return lambda source: Call(code, (source, to, *sizes)), to
