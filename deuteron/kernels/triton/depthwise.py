"""y = f(conv(x, w), …) where no channel sees another: windows weighed channel by channel.

Nothing is multiplied as matrices, so this is about reading: x, w and y once from memory, 4 bytes
for each number of 16 bits, and 2·kh·kw operations on it. Generated code does that for small windows
(``codegen/windows.py``); it writes a window out, and a large one is long code. Here a program walks
down the rows of a window in a loop. A thread has a few channels of ``copies`` neighbours along a
row: it reads what lies under one row of all their windows once, makes it float32 once, and each
number takes part in as many sums as there are taps along the row.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import formula_source, functions
from deuteron.kernels.triton.launch import Launchable
from deuteron.ops.formula import Traced

# Images, the size of one of x and of one of the result.
Sizes = namedtuple("Sizes", "images height width down across")
# A window: its taps, how far apart windows, the zeros before x, how far apart its taps; how far the
# weights of neighbouring channels and of neighbouring taps lie from each other; the channels; and
# whether the taps are taken from the last to the first, as in the gradient for x.
Window = namedtuple("Window", "kh kw sh sw ph pw dh dw channel tap channels reverse")
# Runs of neighbours and channels of a program, and neighbours of a run.
Tile = namedtuple("Tile", "runs channels copies")


@triton.constexpr_function
def _is_read(e, copies, kw, sw, dw):
    """Whether any window of a run has a tap that many pixels behind the first one's begin."""
    return any(q * sw + t * dw == e for q in range(copies) for t in range(kw))


@triton.jit
def _conv(x, w, y, others, size, W: tl.constexpr, T: tl.constexpr, FINISH: tl.constexpr):
    SPAN: tl.constexpr = (T.copies - 1) * W.sw + (W.kw - 1) * W.dw + 1
    blocks = tl.cdiv(W.channels, T.channels)
    along = tl.cdiv(size.across, T.copies)  # runs of a row
    run = tl.program_id(0) // blocks * T.runs + tl.arange(0, T.runs)
    channel = tl.program_id(0) % blocks * T.channels + tl.arange(0, T.channels)
    live = run < size.images * size.down * along
    image, row = run // along // size.down, run // along % size.down
    first = run % along * T.copies
    known = (channel < W.channels)[None, :]
    lines = x + image.to(tl.int64) * (size.height * size.width * W.channels)
    lines = lines[:, None] + channel[None, :]
    j = first * W.sw - W.pw
    sums = ()
    for _ in tl.static_range(T.copies):
        sums = sums + (tl.zeros((T.runs, T.channels), tl.float32),)
    for r in range(W.kh):
        i = row * W.sh - W.ph + r * W.dh
        inside = live & (i >= 0) & (i < size.height)
        under = ()
        for e in tl.static_range(SPAN):
            if _is_read(e, T.copies, W.kw, W.sw, W.dw):
                mask = (inside & (j + e >= 0) & (j + e < size.width))[:, None] & known
                at = ((i * size.width + j + e) * W.channels)[:, None]
                under = under + (tl.load(lines + at, mask=mask, other=0.0).to(tl.float32),)
            else:
                under = under + (0.0,)
        for t in tl.static_range(W.kw):
            tap = r * W.kw + t
            if W.reverse:
                tap = W.kh * W.kw - 1 - tap
            at = w + channel[None, :] * W.channel + tap * W.tap
            weight = tl.load(at, mask=known, other=0.0).to(tl.float32)
            more = ()
            for q in tl.static_range(T.copies):
                more = more + (sums[q] + under[q * W.sw + t * W.dw] * weight,)
            sums = more
    for q in tl.static_range(T.copies):
        pixel = (image * size.down + row) * size.across + first + q
        mask = (live & (first + q < size.across))[:, None] & known
        found = FINISH(sums[q], others, pixel, image, channel, mask, W)
        to = y + pixel.to(tl.int64)[:, None] * W.channels + channel[None, :]
        tl.store(to, found.to(y.dtype.element_ty), mask=mask)


_run = Launchable(_conv)

# How another operand of what follows lies against the result, and what reads it.
READS = {
    "columns": "tl.load({p} + channel, mask=channel < W.channels, other=0.0)[None, :]",
    "rows": "tl.load({p} + pixel[:, None] + 0 * channel[None, :], mask=mask, other=0.0)",
    "all": "tl.load({p} + pixel.to(tl.int64)[:, None] * W.channels + channel[None, :], "
    "mask=mask, other=0.0)",
    "images": "tl.load({p} + (image * W.channels)[:, None] + channel[None, :], mask=mask, "
    "other=0.0)",
    "one": "tl.load({p})",
}


@lru_cache(maxsize=512)
def finish(formula: Traced, operands: tuple[str, ...], exact: bool) -> Any:
    """What is made of sums, as a Triton function: ``formula`` of them and of the other operands,
    each of a kind of :data:`READS`."""
    names = [f"o{i}" for i in range(len(operands))]
    lines = [
        f"    {name} = {READS[kind].format(p=f'others[{i}]')}.to(tl.float32)\n"
        for i, (name, kind) in enumerate(zip(names, operands, strict=True))
    ]
    head = "@triton.jit\ndef finish(sums, others, pixel, image, channel, mask, W: tl.constexpr):\n"
    body = f"{head}{''.join(lines)}    return formula({', '.join(('sums', *names))})\n"
    return functions(f"{formula_source(formula, exact, divides=False)}\n\n{body}")["finish"]


def conv(
    size: Sizes,
    window: Window,
    tile: Tile,
    formula: Traced,
    operands: Sequence[str],
    warps: int,
    exact: bool,
) -> Callable[..., None]:
    """A function of x, w, y and the other operands of what follows; all lie channels last, w as the
    window says."""
    last = finish(formula, tuple(operands), exact)
    runs = size.images * size.down * -(-size.across // tile.copies)
    grid = (-(-runs // tile.runs) * -(-window.channels // tile.channels),)

    def run(x: torch.Tensor, w: Any, y: Any, others: Sequence[Any]) -> None:
        given = (x, w, y, tuple(others), size)
        _run(grid, *given, warps=warps, stages=1, W=window, T=tile, FINISH=last)

    return run
