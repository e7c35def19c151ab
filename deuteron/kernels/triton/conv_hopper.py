"""y = f(conv(x, w), …) on Hopper, with specialised warps, as in ``product_hopper.py``.

One warp loads tiles by the copy engine (TMA), which handles images of four dimensions and reads
zeros beside them. Two groups of four warps multiply, each computing every second tile of the
result: while one group applies the epilogue to its tile and stores it, the other keeps the matrix
units busy.

A tile is ``high`` rows of ``wide`` pixels in each of ``images`` images, 128 pixels together, and
the copy engine sees images as [height, image, width, channels]: then a row of a tile fills whole
blocks of 8 pixels, and the tile that lies one row below is a view of the same memory, some blocks
on.

With ``halo`` a tile is loaded once for every column of the window, with as many rows more as the
window is high: the taps of that column are views of it. So 3 × 3 taps read x three times from L2
instead of nine times. ``kept``: all weights stay in shared memory.

Without ``halo`` a tile is loaded for every tap with the weights of that tap. Taps for which the
whole tile lies beside the image are left out; windows whose taps are far apart have many of these.

Windows may lie ``sh`` rows and ``sw`` columns apart: the copy engine sees images as
[height / sh, sh, image, width / sw, sw · channels], and what a tap reads for neighbouring windows
is one block. A halo is then loaded for every phase of rows, which some of the taps share.

Where there are few channels, all pixels under a window's row make one step: x is padded with zeros
beside its rows, and the copy engine's descriptor has pixels that reach over those that follow. What
lies under one row of a window is then like the channels of one pixel, and the window one pixel
wide.

With ``turned`` the weight is [in, kh, kw, out] and its taps are read from the last to the first: so
the gradient of a convolution for x is a convolution of the gradient of its result.

``to``, where it is given, receives the statistics of the result for batch norm: see
``statistics_hopper.py``.

Barriers, each with a phase that flips when it is passed: ``full`` and ``free`` for every stage of
x, ``there`` and ``gone`` for every stage of weights, and ``turn``, by which the two groups take
turns at multiplying.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import lru_cache
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

from deuteron.kernels.triton.conv_hopper_rows import (
    chunk_of,
    count_of,
    most_below,
    phases_of,
    row_of,
    rows_of,
    tap_of,
)
from deuteron.kernels.triton.hopper import barriers, in_registers, in_shared, next_stage, rounded
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.product import EpilogueFormula, finishing
from deuteron.kernels.triton.statistics_hopper import leave, none_yet, with_tile

# images; height, width: of one of x; down, across: of one of the result; channels, columns: of x
# and of the result; x_line, x_row: from one pixel, and from one row, of x to the next; y_line: from
# one pixel of the result to the next.
Sizes = namedtuple("Sizes", "images height width down across channels columns x_line x_row y_line")
# kh, kw: taps of a window; ph, pw: zeros before x; dh, dw: dilations; sh, sw: strides; turned: see
# above.
Window = namedtuple("Window", "kh kw ph pw dh dw sh sw turned")
# images, high, wide: images, rows and columns of pixels of a tile of the result; columns: its
# channels; stages: of x; filters: stages of the weights if there is a halo; steps: channels of x at
# a time.
Tile = namedtuple("Tile", "images high wide columns stages filters halo kept steps")
GROUPS = gl.constexpr(2)  # of warps that multiply


@gluon.constexpr_function
def _taps_block(columns, steps, turned):  # type: ignore[no-untyped-def]
    """Return rows and row length of the weights of a tap in shared memory."""
    return (steps, columns) if turned else (columns, steps)


@gluon.constexpr_function
def _block(high, images, wide, steps, apart):  # type: ignore[no-untyped-def]
    """Return the shape of a tile of x in shared memory."""
    return [high, 1, images, wide, steps] if apart else [high, images, wide, steps]


@gluon.jit
def _tiles(size, T: gl.constexpr):
    down, across = gl.cdiv(size.down, T.high), gl.cdiv(size.across, T.wide)
    return gl.cdiv(size.images, T.images) * down * across * gl.cdiv(size.columns, T.columns)


@gluon.jit
def _place(tile, size, T: gl.constexpr):
    """Return first image, row, column and channel of a tile; tiles of the same pixels come one
    after another."""
    across, wide = gl.cdiv(size.across, T.wide), gl.cdiv(size.columns, T.columns)
    down = gl.cdiv(size.down, T.high)
    n = tile % wide * T.columns
    tile = tile // wide
    j = tile % across * T.wide
    tile = tile // across
    return tile // down * T.images, tile % down * T.high, j, n


@gluon.jit
def _seen(i, j, tap, size, T: gl.constexpr, W: gl.constexpr):
    """Return where the tile under a tap begins in x, whether any of it lies in the image, and which
    row and column, of the sh rows and sw columns from one window to the next, it takes."""
    down = tap // W.kw * W.dh + W.ph * (W.sh - 1)  # counted from sh · ph rows before x
    across = tap % W.kw * W.dw + W.pw * (W.sw - 1)
    i += down // W.sh - W.ph
    j += across // W.sw - W.pw
    inside = (i + T.high > 0) & (i < size.height // W.sh)
    inside &= (j + T.wide > 0) & (j < size.width // W.sw)
    return i, j, inside, down % W.sh, across % W.sw


# ---- loading


@gluon.jit
def _bring(x, w, a, b, bars, size, T: gl.constexpr, W: gl.constexpr):
    """Run by one warp: load tiles of x and weights in the order in which they are multiplied. Warps
    make the descriptors that they use themselves, so that none waits until all are made."""
    HIGH: gl.constexpr = chunk_of(W.kh, W.dh, W.ph, W.sh, T.high) if T.halo else T.high
    given = (size.images, size.height, size.width, size.channels)
    if W.sh * W.sw > 1:
        image = _apart(x, size, HIGH, T, W)
    else:
        image = _images(x, given, size.x_line, size.x_row, HIGH, T.steps, T)
    TAPS: gl.constexpr = W.kh * W.kw
    lines, long = size.columns, gl.cdiv(size.channels, 8) * 8
    if W.turned:
        lines, long = size.channels, size.columns
    block: gl.constexpr = _taps_block(T.columns, T.steps, W.turned)
    weight = tma.make_tensor_descriptor(
        w,
        [lines, TAPS, long],
        [TAPS * long, long, 1],
        [block[0], 1, block[1]],
        in_shared(block[1], 3),
    )
    if T.halo:
        _bring_columns(image, weight, a, b, bars, size, T, W)
    else:
        _bring_taps(image, weight, a, b, bars, size, T, W)


@gluon.jit
def _filter(weight, n, tap, k, bar, to, T: gl.constexpr, W: gl.constexpr):
    """Start the copy of the weights of a tap, for a tile's channels and some of x's."""
    block: gl.constexpr = _taps_block(T.columns, T.steps, W.turned)
    found = to._reinterpret(weight.dtype, [block[0], 1, block[1]], in_shared(block[1], 3))
    if W.turned:
        at = [k, W.kh * W.kw - 1 - tap, n]
    else:
        at = [n, tap, k]
    tma.async_copy_global_to_shared(weight, at, bar, found)


@gluon.jit
def _bring_columns(image, weight, a, b, bars, size, T: gl.constexpr, W: gl.constexpr):
    full, free, there, gone, _turn = bars
    RW: gl.constexpr = T.images * T.wide
    UNITS: gl.constexpr = (T.high + most_below(W.kh, W.dh, W.ph, W.sh, T.halo)) * RW // 8
    CHUNK: gl.constexpr = chunk_of(W.kh, W.dh, W.ph, W.sh, T.high)
    APART: gl.constexpr = W.sh * W.sw > 1
    some: gl.constexpr = _block(CHUNK, T.images, T.wide, T.steps, APART)
    depth = gl.cdiv(size.channels, T.steps)
    stage = 0
    phase = 1
    w_stage = 0
    w_phase = 1
    if T.kept:
        mbarrier.expect(there.index(0), 2 * T.steps * T.columns * T.filters)
        for t in range(T.filters):
            _filter(weight, 0, t // depth, t % depth * T.steps, there.index(0), b.index(t), T, W)
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        g, i, j, n = _place(tile, size, T)
        for step in range(depth * W.kw):
            k = step // W.kw * T.steps
            s = step % W.kw
            across = s * W.dw + W.pw * (W.sw - 1)
            at = j + across // W.sw - W.pw
            for p in gl.static_range(W.sh):
                if count_of(W.kh, W.dh, W.ph, W.sh, p) > 0:
                    bar = full.index(stage)
                    mbarrier.wait(free.index(stage), phase)
                    mbarrier.expect(
                        bar, 2 * T.steps * RW * rows_of(W.kh, W.dh, W.ph, W.sh, p, T.high)
                    )
                    first = i + row_of(W.kh, W.dh, W.ph, W.sh, p, 0)
                    for row in gl.static_range(
                        0, rows_of(W.kh, W.dh, W.ph, W.sh, p, T.high), CHUNK
                    ):
                        to = a.index(stage * UNITS + row * RW // 8)
                        to = to._reinterpret(
                            image.dtype, some, in_shared(T.steps, 5 if APART else 4)
                        )
                        if APART:
                            c = across % W.sw * size.channels + k
                            place = [first + row, p, g, at, c]
                        else:
                            place = [first + row, g, at, k]
                        tma.async_copy_global_to_shared(image, place, bar, to)
                    stage, phase = next_stage(stage, phase, T.stages)
                    if not T.kept:
                        for m in gl.static_range(count_of(W.kh, W.dh, W.ph, W.sh, p)):
                            mbarrier.wait(gone.index(w_stage), w_phase)
                            mbarrier.expect(there.index(w_stage), 2 * T.steps * T.columns)
                            bar = there.index(w_stage)
                            r = tap_of(W.kh, W.dh, W.ph, W.sh, p, m)
                            _filter(weight, n, r * W.kw + s, k, bar, b.index(w_stage), T, W)
                            w_stage, w_phase = next_stage(w_stage, w_phase, T.filters)


@gluon.jit
def _bring_taps(image, weight, a, b, bars, size, T: gl.constexpr, W: gl.constexpr):
    full, free, _there, _gone, _turn = bars
    RW: gl.constexpr = T.images * T.wide
    UNITS: gl.constexpr = T.high * RW // 8
    APART: gl.constexpr = W.sh * W.sw > 1
    own: gl.constexpr = _block(T.high, T.images, T.wide, T.steps, APART)
    stage = 0
    phase = 1
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        g, i, j, n = _place(tile, size, T)
        for tap in range(W.kh * W.kw):
            down, at, inside, row, column = _seen(i, j, tap, size, T, W)
            if inside:
                for k in range(0, size.channels, T.steps):
                    bar = full.index(stage)
                    mbarrier.wait(free.index(stage), phase)
                    mbarrier.expect(bar, 2 * T.steps * (RW * T.high + T.columns))
                    to = a.index(stage * UNITS)
                    if APART:
                        to = to._reinterpret(image.dtype, own, in_shared(T.steps, 5))
                        c = column * size.channels + k
                        tma.async_copy_global_to_shared(image, [down, row, g, at, c], bar, to)
                    else:
                        to = to._reinterpret(image.dtype, own, in_shared(T.steps, 4))
                        tma.async_copy_global_to_shared(image, [down, g, at, k], bar, to)
                    _filter(weight, n, tap, k, bar, b.index(stage), T, W)
                    stage, phase = next_stage(stage, phase, T.stages)


# ---- multiplying


@gluon.jit
def _multiply(
    y, a, b, c, bars, others, to, size, ME: gl.constexpr, T: gl.constexpr, W: gl.constexpr,
    FINISH: gl.constexpr,
):  # fmt: skip
    """Run by each group of four warps: every second tile of the result."""
    full, free, there, gone, turn = bars
    RW: gl.constexpr = T.images * T.wide
    M: gl.constexpr = T.high * RW
    UNITS: gl.constexpr = (T.high + most_below(W.kh, W.dh, W.ph, W.sh, T.halo)) * RW // 8
    L: gl.constexpr = in_registers(T.columns)
    kind: gl.constexpr = y.dtype.element_ty
    made = (size.images, size.down, size.across, size.columns)
    out = _images(y, made, size.y_line, size.across * size.y_line, T.high, T.columns, T)
    depth = gl.cdiv(size.channels, T.steps)
    stage = 0
    phase = 0
    w_stage = 0
    w_phase = 0
    count = 0
    if to is not None:
        seen = none_yet(M, T.columns)
    if T.kept:
        mbarrier.wait(there.index(0), 0)
    for tile in range(gl.program_id(0), _tiles(size, T), gl.num_programs(0)):
        g, i, j, n = _place(tile, size, T)
        steps = depth * W.kw
        if not T.halo:
            steps = 0
            for tap in range(W.kh * W.kw):
                _down, _at, inside, _row, _column = _seen(i, j, tap, size, T, W)
                steps += gl.where(inside, depth, 0)
        if count % GROUPS == ME:
            sums = gl.zeros((M, T.columns), gl.float32, L)
            mbarrier.wait(turn.index(ME), count // GROUPS & 1)
            for step in range(steps):
                if T.halo:
                    more = step > 0
                    for p in gl.static_range(W.sh):
                        if count_of(W.kh, W.dh, W.ph, W.sh, p) > 0:
                            mbarrier.wait(full.index(stage), phase)
                            before = gl.where(stage == 0, T.stages - 1, stage - 1)
                            others_too = more
                            for m in gl.static_range(count_of(W.kh, W.dh, W.ph, W.sh, p)):
                                r = tap_of(W.kh, W.dh, W.ph, W.sh, p, m)
                                if T.kept:
                                    w = b.index((r * W.kw + step % W.kw) * depth + step // W.kw)
                                else:
                                    mbarrier.wait(there.index(w_stage), w_phase)
                                    w = b.index(w_stage)
                                down = row_of(W.kh, W.dh, W.ph, W.sh, p, m) - row_of(
                                    W.kh, W.dh, W.ph, W.sh, p, 0
                                )
                                x = a.index(stage * UNITS + down * (RW // 8))
                                x = x._reinterpret(kind, [M, T.steps], in_shared(T.steps, 2))
                                if not W.turned:
                                    w = w.permute((1, 0))
                                sums = warpgroup_mma(x, w, sums, use_acc=more, is_async=True)
                                sums = warpgroup_mma_wait(1, deps=(sums,))
                                if not T.kept:
                                    last = gl.where(w_stage == 0, T.filters - 1, w_stage - 1)
                                    mbarrier.arrive(gone.index(last), pred=more)
                                    w_stage, w_phase = next_stage(w_stage, w_phase, T.filters)
                                if m == 0:
                                    mbarrier.arrive(free.index(before), pred=others_too)
                                more = step >= 0
                            stage, phase = next_stage(stage, phase, T.stages)
                else:
                    mbarrier.wait(full.index(stage), phase)
                    before = gl.where(stage == 0, T.stages - 1, stage - 1)
                    x = a.index(stage * UNITS)
                    x = x._reinterpret(kind, [M, T.steps], in_shared(T.steps, 2))
                    w = b.index(stage)
                    if not W.turned:
                        w = w.permute((1, 0))
                    sums = warpgroup_mma(x, w, sums, use_acc=step > 0, is_async=True)
                    sums = warpgroup_mma_wait(1, deps=(sums,))
                    mbarrier.arrive(free.index(before), pred=step > 0)
                    stage, phase = next_stage(stage, phase, T.stages)
            sums = warpgroup_mma_wait(0, deps=(sums,))
            mbarrier.arrive(
                free.index(gl.where(stage == 0, T.stages - 1, stage - 1)), pred=steps > 0
            )
            if T.halo and not T.kept:
                mbarrier.arrive(gone.index(gl.where(w_stage == 0, T.filters - 1, w_stage - 1)))
            mbarrier.arrive(turn.index(GROUPS - 1 - ME))
            row = gl.arange(0, M, gl.SliceLayout(1, L))
            image, down = g + row // T.wide % T.images, i + row // RW
            across = j + row % T.wide
            live = (image < size.images) & (down < size.down) & (across < size.across)
            pixel = (image * size.down + down) * size.across + across
            found = FINISH(sums, others, pixel, image, live, n, size, T, L)
            found = rounded(found, kind)
            mine = c.index(ME)
            tma.store_wait(0)
            mine.reshape([M, T.columns]).store(found)
            fence_async_shared()
            tma.async_copy_shared_to_global(out, [i, g, j, n], mine)
            if to is not None:
                v = found.to(gl.float32)
                whole = (g + T.images <= size.images) & (i + T.high <= size.down)
                whole = whole & (j + T.wide <= size.across)
                seen = with_tile(seen, v, live, whole, M, T.columns)
        else:
            skipped = stage + steps * (phases_of(W.kh, W.dh, W.ph, W.sh) if T.halo else 1)
            phase = phase ^ (skipped // T.stages & 1)
            stage = skipped % T.stages
            skipped = w_stage + steps * W.kh
            w_phase = w_phase ^ (skipped // T.filters & 1)
            w_stage = skipped % T.filters
        count += 1
    if to is not None:
        wide = gl.cdiv(size.columns, T.columns)
        part = gl.program_id(0) // wide * GROUPS + ME
        n = gl.program_id(0) % wide * T.columns
        leave(to, part, n, size.columns, seen, T.columns)
    tma.store_wait(0)


@gluon.jit
def _images(x, size, step, row, HIGH: gl.constexpr, LONG: gl.constexpr, T: gl.constexpr):
    """Return the copy engine's descriptor of images [height, image, width, channels], which moves
    blocks of HIGH rows and LONG channels; ``step`` and ``row``: strides of pixels and of rows."""
    images, height, width, channels = size
    return tma.make_tensor_descriptor(
        x,
        [height, images, width, channels],
        [row, height * row, step, 1],
        [HIGH, T.images, T.wide, LONG],
        in_shared(LONG, 4),
    )


@gluon.jit
def _apart(x, size, HIGH: gl.constexpr, T: gl.constexpr, W: gl.constexpr):
    """Return the copy engine's descriptor of images in which the ``sh`` rows and ``sw`` columns
    from one window to the next are dimensions of their own."""
    row = size.x_row
    return tma.make_tensor_descriptor(
        x,
        [size.height // W.sh, W.sh, size.images, size.width // W.sw, W.sw * size.channels],
        [W.sh * row, row, size.height * row, W.sw * size.x_line, 1],
        [HIGH, 1, T.images, T.wide, T.steps],
        in_shared(T.steps, 5),
    )


@gluon.jit
def _conv(x, w, y, others, to, size, T: gl.constexpr, W: gl.constexpr, FINISH: gl.constexpr):
    RW: gl.constexpr = T.images * T.wide
    kind: gl.constexpr = y.dtype.element_ty
    UNITS: gl.constexpr = (T.high + most_below(W.kh, W.dh, W.ph, W.sh, T.halo)) * RW // 8
    BRINGS: gl.constexpr = T.filters if T.halo else T.stages
    a = gl.allocate_shared_memory(kind, [T.stages * UNITS, 8, T.steps], in_shared(T.steps, 2))
    block: gl.constexpr = _taps_block(T.columns, T.steps, W.turned)
    b = gl.allocate_shared_memory(kind, [BRINGS, block[0], block[1]], in_shared(block[1], 2))
    c = gl.allocate_shared_memory(
        kind, [GROUPS, T.high, T.images, T.wide, T.columns], in_shared(T.columns, 4)
    )
    full, free = barriers(T.stages, (1, 1))
    there, gone = barriers(BRINGS, (1, 1))
    turn = barriers(GROUPS, (1,))[0]
    fence_async_shared()
    mbarrier.arrive(turn.index(0))
    bars = (full, free, there, gone, turn)
    gl.warp_specialize(
        [
            (_multiply, (y, a, b, c, bars, others, to, size, 0, T, W, FINISH)),
            (_multiply, (y, a, b, c, bars, others, to, size, 1, T, W, FINISH)),
            (_bring, (x, w, a, b, bars, size, T, W)),
        ],
        [4, 1],
        [232, 24],
    )


_run = Launchable(_conv)

# The kinds of operands that an epilogue may have, and the code that loads one for a tile.
_CHANNEL = "gl.expand_dims(n + gl.arange(0, T.columns, gl.SliceLayout(0, L)), 0)"
_LIVE = f"gl.expand_dims(live, 1) & ({_CHANNEL} < size.columns)"
READS = {
    "columns": f"gl.load({{p}} + {_CHANNEL}, mask={_CHANNEL} < size.columns, other=0.0)",
    "rows": "gl.expand_dims(gl.load({p} + pixel, mask=live, other=0.0), 1)",
    "all": f"gl.load({{p}} + gl.expand_dims(pixel, 1).to(gl.int64) * size.columns + {_CHANNEL}, "
    f"mask={_LIVE}, other=0.0)",
    "images": f"gl.load({{p}} + gl.expand_dims(image, 1) * size.columns + {_CHANNEL}, "
    f"mask={_LIVE}, other=0.0)",
    "one": "gl.load({p})",
}


@lru_cache(maxsize=512)
def finish(after: EpilogueFormula) -> Any:
    """Return the epilogue of a tile's sums, with operands of the kinds of :data:`READS`."""
    given = "sums, others, pixel, image, live, n, size, T: gl.constexpr, L: gl.constexpr"
    return finishing(after, given, lambda p, kind: READS[kind].format(p=p), language="gl")


def conv(
    size: Sizes, window: Window, tile: Tile, after: EpilogueFormula, programs: int
) -> Callable[..., None]:
    """Return a function (x, w, y, others, to): w is [out, kh, kw, in], or turned; to: None, or
    where the statistics go (``statistics_hopper``). All lie channels last."""
    last = finish(after)
    pairs = ((size.images, tile.images), (size.down, tile.high), (size.across, tile.wide))
    tiles = -(-size.columns // tile.columns)
    for n, each in pairs:
        tiles *= -(-n // each)
    grid = (min(programs, tiles),)

    def run(x: torch.Tensor, w: Any, y: Any, others: Sequence[Any], to: Any = None) -> None:
        given = (x, w, y, tuple(others), to, size)
        _run(grid, *given, warps=4, stages=1, T=tile, W=window, FINISH=last)

    return run
