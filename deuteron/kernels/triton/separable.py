"""y = g(f(x) · w, …): a product over pixels whose first factor f(x) is computed in the same kernel.

f is elementwise work, such as the scale of squeeze-and-excitation, or a depthwise convolution of x
with its epilogue, as in ``depthwise.py``: a depthwise and a pointwise convolution then are one
kernel, and the tensor between them is never in memory.

A program makes a tile of y: runs of neighbours along rows of pixels, and some columns. It walks
over channels: it computes f for its pixels, rounds it to the type of x, as if it had been stored,
and multiplies. Each neighbour of a run has sums of its own, so that no number moves between
threads. f is computed again for every tile of columns, so these are wide; where there are few
tiles, programs split the channels (split-K), and ``product.add_up`` adds up the parts.

Bytes: x, w and y once from memory; what neighbours share of x comes from L1 and L2.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton import product
from deuteron.kernels.triton.depthwise import Window, finish, weighed
from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import EpilogueFormula

# rows, columns: pixels and channels of the result; images; height, width: of one of x; down,
# across: of one of the result; pixels: of one of the result; line: from one of its pixels to the
# next.
Sizes = namedtuple("Sizes", "rows columns images height width down across pixels line")
# runs, columns: of a tile; copies: neighbours of a run; channels: at a time; parts: of the split
# sum; rows, outs (1) and CHAIN are for ``product.add_up``.
Tile = namedtuple("Tile", "runs copies columns channels parts rows outs CHAIN")
Result = namedtuple("Result", "channels")


@triton.jit
def _separable(
    x, taps, w, y, makes, others, size, W: tl.constexpr, T: tl.constexpr, R: tl.constexpr,
    MAKE: tl.constexpr, FINISH: tl.constexpr,
):  # fmt: skip
    enter(T.CHAIN, True)
    wide = tl.cdiv(R.channels, T.columns)
    along = tl.cdiv(size.across, T.copies)  # runs of a row
    run = tl.program_id(0) // wide * T.runs + tl.arange(0, T.runs)
    column = tl.program_id(0) % wide * T.columns + tl.arange(0, T.columns)
    live = run < size.images * size.down * along
    image, row = run // along // size.down, run // along % size.down
    first = run % along * T.copies
    lines = x + image.to(tl.int64) * (size.height * size.width * W.line)
    sums = ()
    for _ in tl.static_range(T.copies):
        sums = sums + (tl.zeros((T.runs, T.columns), tl.float32),)
    BLOCKS: tl.constexpr = (W.channels + T.channels - 1) // T.channels
    share: tl.constexpr = (BLOCKS + T.parts - 1) // T.parts
    begin = tl.program_id(1) * share
    for block in range(begin, min(begin + share, BLOCKS)):
        channel = block * T.channels + tl.arange(0, T.channels)
        known = channel < W.channels
        from_ = lines[:, None] + channel[None, :]
        made = weighed(from_, taps, row, first, live, channel, known[None, :], size, W, T)
        there = known[:, None] & (column < R.channels)[None, :]
        b = tl.load(w + column[None, :] * W.channels + channel[:, None], mask=there, other=0.0)
        more = ()
        for q in tl.static_range(T.copies):
            pixel = (image * size.down + row) * size.across + first + q
            mask = (live & (first + q < size.across))[:, None] & known[None, :]
            a = MAKE(made[q], makes, pixel, image, channel, mask, W)
            if W.channels % T.channels != 0:
                a = tl.where(known[None, :], a, 0.0)
            more = more + (tl.dot(a.to(x.dtype.element_ty), b, sums[q]),)
        sums = more
    for q in tl.static_range(T.copies):
        pixel = (image * size.down + row) * size.across + first + q
        mask = (live & (first + q < size.across))[:, None] & (column < R.channels)[None, :]
        if T.parts > 1:
            to = y + pixel.to(tl.int64)[:, None] * R.channels + column[None, :]
            part = tl.program_id(1).to(tl.int64) * size.rows * R.channels
            tl.store(to + part, sums[q], mask=mask)
        else:
            found = FINISH(sums[q], others, pixel, image, column, mask, R)
            to = y + pixel.to(tl.int64)[:, None] * size.line + column[None, :]
            tl.store(to, found.to(y.dtype.element_ty), mask=mask)


# Four programs share a multiprocessor where threads have no more registers than this: while some
# wait for x, others compute.
REGISTERS = 128
_run, _run_wide = Launchable(_separable, registers=REGISTERS), Launchable(_separable)


def separable(
    size: Sizes,
    window: Window,
    tile: Tile,
    make: EpilogueFormula,
    after: EpilogueFormula,
    warps: int,
    stages: int,
    wide: bool,
) -> Callable[..., None]:
    """Return a function (x, taps, w, y, makes, others): taps are the weights of windows, or None; w
    is [out, in]; makes and others: operands of the epilogues ``make``, of windows, and ``after``,
    of sums. All lie channels last. ``wide``: a tile may use all registers that there are."""
    launch = _run_wide if wide else _run
    made, last, added = finish(make), finish(after), product.finish(after)
    runs = size.images * size.down * -(-size.across // tile.copies)
    grid = (-(-runs // tile.runs) * -(-size.columns // tile.columns), tile.parts)
    result = Result(size.columns)
    how = {"warps": warps, "stages": stages, "W": window, "R": result, "MAKE": made}

    def run(x: torch.Tensor, taps: Any, w: Any, y: Any, makes: Any, others: Any) -> None:
        def leave(parts: Any, here: Tile) -> None:
            launch(grid, x, taps, w, parts, tuple(makes), (), size, T=here, FINISH=None, **how)

        if tile.parts > 1:
            product.in_parts(leave, x, (y,), others, size, tile, added)
            return
        given = (x, taps, w, y, tuple(makes), tuple(others), size)
        launch(grid, *given, T=tile, FINISH=last, **how)

    return run
