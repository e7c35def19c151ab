"""An image with its padding around it: f[n, y + ph, x + pw, c] = x[n, y, x, c], zeros elsewhere.

    bytes = size · (x + frame)

A convolution over few channels reads it: there the taps of a row lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import Code, Loaded, Value, entry, load, width
from deuteron.ir.dtype import dtype
from deuteron.kernels.cpu.conv import Image, Window, frame
from deuteron.kernels.cpu.stored import Stored


def _write(module: object, short: str) -> None:
    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        x, to = c.pointers(words, 2)
        batch, height, breadth, channels, ph, pw, xn, xh, xw = c.words(words, 2, 9)
        of = Stored(c, short)

        def fill(where: Value, count: Value, source: Value | None) -> None:
            """Copy so many numbers, or write zeros."""
            whole = c.sub(count, c.rem(count, width()))
            for lanes, low, high in ((width(), c.i(0), whole), (1, whole, count)):
                with c.loop(low, high, lanes) as i:
                    value = c.f(0.0, lanes) if source is None else of.load(of.at(source, i), lanes)
                    of.store(value, of.at(where, i))

        lines, side = c.add(height, c.mul(ph, 2)), c.mul(pw, channels)
        across = c.add(c.mul(breadth, channels), c.mul(side, 2))
        begin, end = c.share(c.mul(batch, lines), thread, threads)
        with c.loop(begin, end) as line:
            n = c.div(line, lines)
            y = c.sub(c.sub(line, c.mul(n, lines)), ph)
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

    entry(module, "run", body)


def compiled(short: str) -> Loaded:
    return load(f"frame {short} of {width()}", lambda module: _write(module, short))


def prepare_frame(x: Image, window: Window, short: str) -> tuple[Callable[[Word], Call], Room]:
    """The call that frames an image of one or two dimensions, from the image's address; and the
    framed copy, which is good until the next is made."""
    size = dtype(short).nbytes(prod(frame(x, window).shape))
    line = (1, *x.shape[2:])[-2:], (0, *window.padding)[-2:], (0, *x.strides[2:])[-2:]
    sizes = (x.shape[0], *line[0], x.shape[1], *line[1], x.strides[0], *line[2])
    to, code = Room("frame", -(-size // 4)), compiled(short)
    return lambda source: Call(code, (source, to, *sizes)), to
