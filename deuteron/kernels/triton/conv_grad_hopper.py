"""dw = f(Σ grad · x, …) on Hopper, for windows of stride 1: the kernel of ``conv_grad.py`` with
specialised warps, as in ``conv_hopper.py``.

One warp loads tiles of pixels by the copy engine (TMA), which handles images of four dimensions and
reads zeros beside them: ``high`` rows of ``wide`` pixels in each of ``images`` images, of 64
channels. A tile of x comes with as many rows more as the window is high, so that all taps of one
column of the window are views of it: 3 × 3 taps read x three times from L2 and not nine times.

``tall`` groups of four warps multiply the same pixels. Each has the sums of 64 channels of grad, 64
of x and all taps of one column of the window.

Without ``halo``, where taps are far apart, a program has one tap, and ``blocks`` times 64 channels
of x. Tiles of pixels for which that tap lies beside the image are left out: of a window whose taps
are far apart these are many, and what is left of an image is a smaller one.

Programs split the pixels among them and store partial sums in float32, which ``product.add_up``
adds up in a fixed order: the same bits every time.

Beside an image both factors are zeros. A gradient that is infinite there has no place, but x may be
infinite where grad has no pixel: then taps are nan that should be finite; others of that channel
are infinite or nan anyway.

Barriers, each with a phase that flips when it is passed: ``full`` and ``free`` for every stage.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from deuteron.kernels.triton.conv_hopper import _images
from deuteron.kernels.triton.hopper import barriers, in_registers, in_shared, next_stage
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula, finish, in_parts

# rows, columns: of the result: channels of grad, and taps times channels of x; images; height,
# width: of one of x; down, across: of one of grad; channels: of x.
Sizes = namedtuple("Sizes", "rows columns images height width down across channels")
# A window: its taps, the zeros before x, and the dilations.
Window = namedtuple("Window", "kh kw ph pw dh dw")
# images, high, wide: images, rows and columns of a tile of pixels; tall: groups of warps; stages:
# of the ring; parts: of the split sum; halo: the taps of a column share a tile; blocks: so many
# times 64 channels of x; rows, columns and outs are those of ``add_up``.
Tile = namedtuple("Tile", "images high wide tall stages parts halo blocks rows columns outs CHAIN")
STEPS = gl.constexpr(64)  # channels at a time


@gluon.constexpr_function
def _below(kh, dh, halo):  # type: ignore[no-untyped-def]
    """Rows of x that a tile needs beyond its own."""
    return (kh - 1) * dh if halo else 0


@gluon.constexpr_function
def _rows(high, below, blocks):  # type: ignore[no-untyped-def]
    """Return how many rows of x a stage holds; blocks of other channels follow one below the
    other."""
    return high * blocks + below


@gluon.jit
def _live(size, out, tile, off):
    """Return, along one dimension, the first tile of grad for which a tap at offset ``off`` sees
    any of the image, and how many such tiles there are."""
    first = gl.maximum(-off, 0) // tile
    end = gl.minimum(gl.cdiv(gl.maximum(size - off, 0), tile), gl.cdiv(out, tile))
    return first, gl.maximum(end - first, 0)


@gluon.jit
def _share(size, T: gl.constexpr, W: gl.constexpr):
    """Return what a program has: its first channels of grad and of x, its column of the window, or
    its tap, its part of the sum, begin and end of its tiles of pixels, and where in an image these
    are: the first row and column of tiles, and how many there are."""
    TAPS: gl.constexpr = W.kw if T.halo else W.kh * W.kw
    deep = gl.cdiv(size.channels, STEPS * T.blocks)
    count = gl.cdiv(size.rows, STEPS * T.tall) * deep * TAPS
    tile, part = gl.program_id(0) % count, gl.program_id(0) // count
    s = tile % TAPS
    c = tile // TAPS % deep * (STEPS * T.blocks)
    k = tile // TAPS // deep * (STEPS * T.tall)
    if T.halo:
        i, j = 0, 0
        down, across = gl.cdiv(size.down, T.high), gl.cdiv(size.across, T.wide)
    else:
        i, down = _live(size.height, size.down, T.high, s // W.kw * W.dh - W.ph)
        j, across = _live(size.width, size.across, T.wide, s % W.kw * W.dw - W.pw)
    tiles = gl.cdiv(size.images, T.images) * down * across
    share = gl.cdiv(tiles, T.parts)
    end = gl.minimum(part * share + share, tiles)
    return k, c, s, part, part * share, end, (i, j, down, across)


@gluon.jit
def _bring(grad, x, a, b, full, free, size, T: gl.constexpr, W: gl.constexpr):
    """Run by one warp: load tiles of grad, and of x, with its halo or with all its channels."""
    below: gl.constexpr = _below(W.kh, W.dh, T.halo)
    CHUNK: gl.constexpr = below if below > 0 else T.high
    RW: gl.constexpr = T.images * T.wide
    ROWS: gl.constexpr = _rows(T.high, below, T.blocks)
    OWN: gl.constexpr = T.high * RW // 8
    UNITS: gl.constexpr = ROWS * RW // 8
    grads = (size.images, size.down, size.across, size.rows)
    left = _images(grad, grads, size.rows, grads[2] * size.rows, T.high, STEPS, T)
    given = (size.images, size.height, size.width, size.channels)
    image = _images(x, given, size.channels, given[2] * size.channels, CHUNK, STEPS, T)
    whole: gl.constexpr = [T.high, T.images, T.wide, STEPS]
    some: gl.constexpr = [CHUNK, T.images, T.wide, STEPS]
    k, c, s, _part, begin, end, place = _share(size, T, W)
    first, left_of, down, across = place
    stage = 0
    phase = 1
    for step in range(begin, end):
        j = (left_of + step % across) * T.wide
        i = (first + step // across % down) * T.high
        n = step // across // down * T.images
        bar = full.index(stage)
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(bar, 2 * STEPS * RW * (T.high * T.tall + ROWS))
        for m in gl.static_range(T.tall):
            to = a.index((stage * T.tall + m) * OWN)
            to = to._reinterpret(left.dtype, whole, in_shared(STEPS, 4))
            tma.async_copy_global_to_shared(left, [i, n, j, k + m * STEPS], bar, to)
        for row in gl.static_range(0, ROWS, CHUNK):
            to = b.index(stage * UNITS + row * RW // 8)
            to = to._reinterpret(image.dtype, some, in_shared(STEPS, 4))
            if T.halo:
                at = [i - W.ph + row, n, j + s * W.dw - W.pw, c]
            else:
                over = s // W.kw * W.dh - W.ph
                at = [i + over, n, j + s % W.kw * W.dw - W.pw, c + row // T.high * STEPS]
            tma.async_copy_global_to_shared(image, at, bar, to)
        stage, phase = next_stage(stage, phase, T.stages)


@gluon.jit
def _multiply(
    y, a, b, full, free, size, ME: gl.constexpr, T: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Run by each group of four warps: 64 channels of grad by 64 of x, for all taps of a column of
    the window, or by several times 64 for one tap."""
    RW: gl.constexpr = T.images * T.wide
    PIXELS: gl.constexpr = T.high * RW
    OWN: gl.constexpr = PIXELS // 8
    UNITS: gl.constexpr = _rows(T.high, _below(W.kh, W.dh, T.halo), T.blocks) * RW // 8
    SUMS: gl.constexpr = W.kh if T.halo else T.blocks
    NEXT: gl.constexpr = W.dh * RW // 8 if T.halo else OWN
    L: gl.constexpr = in_registers(STEPS)
    lines: gl.constexpr = [PIXELS, STEPS]
    k, c, s, part, begin, end, _place = _share(size, T, W)
    sums = ()
    for _ in gl.static_range(SUMS):
        sums = sums + (gl.zeros((STEPS, STEPS), gl.float32, L),)
    stage = 0
    phase = 0
    for step in range(begin, end):
        mbarrier.wait(full.index(stage), phase)
        g = a.index((stage * T.tall + ME) * OWN)
        g = g._reinterpret(a.dtype, lines, in_shared(STEPS, 2)).permute((1, 0))
        more = ()
        for r in gl.static_range(SUMS):
            x = b.index(stage * UNITS + r * NEXT)
            x = x._reinterpret(b.dtype, lines, in_shared(STEPS, 2))
            more = more + (warpgroup_mma(g, x, sums[r], use_acc=step > begin, is_async=True),)
        if SUMS == 1:
            sums = (warpgroup_mma_wait(1, deps=more),)
        else:
            sums = warpgroup_mma_wait(SUMS, deps=more)
        before = gl.where(stage == 0, T.stages - 1, stage - 1)
        mbarrier.arrive(free.index(before), pred=step > begin)
        stage, phase = next_stage(stage, phase, T.stages)
    if SUMS == 1:
        sums = (warpgroup_mma_wait(0, deps=sums),)
    else:
        sums = warpgroup_mma_wait(0, deps=sums)
    row = gl.expand_dims(k + ME * STEPS + gl.arange(0, STEPS, gl.SliceLayout(1, L)), 1)
    column = gl.expand_dims(c + gl.arange(0, STEPS, gl.SliceLayout(0, L)), 0)
    to = y + (part.to(gl.int64) * size.rows + row) * size.columns + column
    for r in gl.static_range(SUMS):
        if T.halo:
            known = (row < size.rows) & (column < size.channels)
            gl.store(to + (r * W.kw + s) * size.channels, sums[r], mask=known)
        else:
            known = (row < size.rows) & (column + r * STEPS < size.channels)
            gl.store(to + s * size.channels + r * STEPS, sums[r], mask=known)


@gluon.jit
def _weight_grad(grad, x, y, size, T: gl.constexpr, W: gl.constexpr):
    if T.CHAIN:
        gdc_launch_dependents()
    RW: gl.constexpr = T.images * T.wide
    kind: gl.constexpr = x.dtype.element_ty
    OWN: gl.constexpr = T.high * RW // 8
    UNITS: gl.constexpr = _rows(T.high, _below(W.kh, W.dh, T.halo), T.blocks) * RW // 8
    a = gl.allocate_shared_memory(kind, [T.stages * T.tall * OWN, 8, STEPS], in_shared(STEPS, 2))
    b = gl.allocate_shared_memory(kind, [T.stages * UNITS, 8, STEPS], in_shared(STEPS, 2))
    full, free = barriers(T.stages, (1, T.tall))
    fence_async_shared()
    if T.tall == 1:
        gl.warp_specialize(
            [
                (_multiply, (y, a, b, full, free, size, 0, T, W)),
                (_bring, (grad, x, a, b, full, free, size, T, W)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (y, a, b, full, free, size, 0, T, W)),
                (_multiply, (y, a, b, full, free, size, 1, T, W)),
                (_bring, (grad, x, a, b, full, free, size, T, W)),
            ],
            [4, 1],
            [232, 24],
        )


_run = Launchable(_weight_grad)


def weight_grad(
    size: Sizes, window: Window, tile: Tile, after: EpilogueFormula
) -> Callable[..., None]:
    """Return a function (grad, x, y, others); y is the gradient as [out, kh, kw, in], and images
    lie channels last."""
    last = finish(after)
    taps = window.kw if tile.halo else window.kh * window.kw
    tiles = -(-size.rows // (64 * tile.tall)) * -(-size.channels // (64 * tile.blocks)) * taps
    grid = (tiles * tile.parts,)

    def run(grad: torch.Tensor, x: Any, y: Any, others: Sequence[Any]) -> None:
        def leave(parts: Any, here: Tile) -> None:
            _run(grid, grad, x, parts, size, T=here, W=window, warps=4, stages=1)

        in_parts(leave, x, (y,), others, size, tile, last)

    return run
