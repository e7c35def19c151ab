"""y = f(x · w, …) for batches of products, and for split sums: the kernel of ``product.py`` with
pointers instead of descriptors.

The copy engine needs rows that begin at multiples of 16 bytes, and with one program per tile most
of a GPU is idle where a result has few tiles. Here x and w are batches of matrices at any distance
from each other, 0 if all share one, and a batch has two indices, such as image and head. Rows may
begin anywhere; where they begin at multiples of 16 bytes, they are loaded 16 bytes at a time. A
program computes one tile of one product, so that many small products are many programs, and several
of these share a multiprocessor: while some wait for memory, others multiply.

With ``parts`` several programs share the sum of a tile (split-K); each stores its part in float32,
and ``product.add_up`` adds them up in a fixed order. A result of 16 × 4096 out of a weight of 33 MB
has 64 tiles, too few programs to keep the memory busy; its parts are 0.26 MB each.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import EpilogueFormula, _added, _place, finish, in_parts

# Rows and columns of a result, steps of the sum, batches in all and along the inner index; *_line,
# *_outer, *_inner: strides of rows, outer and inner batches.
Sizes = namedtuple(
    "Sizes", "rows columns steps batches inner x_line x_outer x_inner w_line w_outer w_inner y_line"
)
# Fields that are not named here are those of ``product.Tile``. parts: of the split sum, 1 if it is
# not split; even: all row lengths and strides are multiples of 8, so that 16 bytes are read at a
# time; outs: results of the epilogue; CHAIN: see ``launch.py``.
Tile = namedtuple(
    "Tile", "rows columns steps group x_turned w_turned gate parts even outs precision CHAIN"
)


@triton.jit
def _block(start, line, place, lines, places, step, TURNED: tl.constexpr, EVEN: tl.constexpr):
    """Load a block of a matrix [lines, places]; ``step`` is the stride of its lines or, if it is
    TURNED, of its places."""
    if EVEN:  # the compiler sees from this that they are multiples of 8
        step = step // 8 * 8
        if TURNED:
            lines = lines // 8 * 8
        else:
            places = places // 8 * 8
    if TURNED:
        at = line.to(tl.int64)[:, None] + place.to(tl.int64)[None, :] * step
    else:
        at = line.to(tl.int64)[:, None] * step + place[None, :]
    return tl.load(start + at, mask=(line < lines)[:, None] & (place < places)[None, :], other=0.0)


@triton.jit
def _product(x, w, w2, ys, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    enter(T.CHAIN, True)
    M, N, K = size.rows, size.columns, size.steps
    down, across = tl.cdiv(M, T.rows), tl.cdiv(N, T.columns)
    b = tl.program_id(0) // (down * across)
    tile_row, tile_column = _place(tl.program_id(0) % (down * across), down, across, T.group)
    m, n = tile_row * T.rows, tile_column * T.columns
    outer, inner = (b // size.inner).to(tl.int64), (b % size.inner).to(tl.int64)
    x_first = outer * size.x_outer + inner * size.x_inner
    w_first = outer * size.w_outer + inner * size.w_inner
    if T.even:
        x_first, w_first = x_first // 8 * 8, w_first // 8 * 8
    x, w, w2 = x + x_first, w + w_first, w2 + w_first
    row, column = m + tl.arange(0, T.rows), n + tl.arange(0, T.columns)
    share = tl.cdiv(tl.cdiv(K, T.steps), T.parts) * T.steps
    begin = tl.program_id(1) * share
    end = min(begin + share, K)
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    sums = tl.zeros((T.rows, T.columns), kind)
    more = sums
    for k in range(begin, end, T.steps):
        step = k + tl.arange(0, T.steps)
        a = _block(x, row, step, M, K, size.x_line, T.x_turned, T.even)
        right = _block(w, step, column, K, N, size.w_line, T.w_turned, T.even)
        sums = _added(sums, a, right, kind, T)
        if T.gate:
            right = _block(w2, step, column, K, N, size.w_line, T.w_turned, T.even)
            more = _added(more, a, right, kind, T)
    there = (row < M)[:, None] & (column < N)[None, :]
    line = (b.to(tl.int64) * M + row)[:, None]
    if T.parts > 1:
        to = line * N + column[None, :]
        part = (tl.program_id(1) * size.batches).to(tl.int64) * M * N
        tl.store(ys[0] + part + to, sums, mask=there)
    else:
        for i in tl.static_range(T.outs):
            found = FINISH(sums, more, others, b, m, n, size, T, i)
            to = line * size.y_line + column[None, :]
            tl.store(ys[i] + to, found.to(ys[i].dtype.element_ty), mask=there)


_run = Launchable(_product)


def product(
    size: Sizes, tile: Tile, after: EpilogueFormula, warps: int, stages: int
) -> Callable[..., None]:
    """Return a function (x, w, w2, ys, others); without a gate w2 is w again."""
    last = finish(after, tile.gate)
    tiles = -(-size.rows // tile.rows) * -(-size.columns // tile.columns)
    grid = (tiles * size.batches, tile.parts)
    how = {"warps": warps, "stages": stages}

    def run(x: torch.Tensor, w: Any, w2: Any, ys: Sequence[Any], others: Sequence[Any]) -> None:
        def leave(parts: Any, here: Tile) -> None:
            _run(grid, x, w, w2, (parts,), (), size, T=here, FINISH=None, **how)

        if tile.parts > 1:
            in_parts(leave, x, ys, others, size, tile, last)
        else:
            _run(grid, x, w, w2, tuple(ys), tuple(others), size, T=tile, FINISH=last, **how)

    return run
