"""C[m, n] = act(Σₖ A[m, k] · B[k, n] + bias[n] + R[m, n]), packed, for products and convolutions.

Rows of A, C and R are found through tables of offsets, so that a convolution is this product
too: its stride, padding, dilation and im2col are in the table and cost nothing. A row of A is
``segments`` runs of ``length`` contiguous numbers; an offset below 0 stands for a run of zeros
(padding) in A and for a row that does not exist in C.

B is packed once: panels of NR columns, [panel][k][NR], zeros beyond the last column. A tile of
MR × NR results stays in registers over all of k. Memory traffic: a panel (k · NR · 4 bytes) is
read from L1 or L2 for each tile of MR rows; a block of rows is sized to stay in L2 while all
panels pass by, so that A and C move once and B once per block:

    bytes ≈ 4 · (M·K + K·N · ⌈M / block⌉ + M·N · (1 + residual))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from deuteron.codegen import openmp
from deuteron.codegen.llvm import (
    F32,
    I32,
    I64,
    PTR,
    Code,
    Loaded,
    Value,
    entry,
    has_lanes,
    load,
    vec,
    width,
)
from deuteron.kernels.cpu.epilogue import Epilogue

L2_BYTES = 400_000  # the part of a core's L2 that a block of rows may fill
SERIAL_FLOPS = 1e5  # below this a second thread costs more than it brings


@dataclass(frozen=True)
class Tile:
    """Rows and vectors of columns that are held in registers."""

    rows: int
    vectors: int

    @property
    def columns(self) -> int:
        return self.vectors * width()


# ---- the kernel --------------------------------------------------------------------------------


def accumulate(
    c: Code, tile: Tile, acc: list[list[Value]], runs: list[Value], panel: Value, length: Value
) -> None:
    """acc[i] += runs[i][k] · panel[k] for k below ``length``; ``panel`` is a variable that ends
    up behind what was read."""
    n, rows, vectors = width(), tile.rows, tile.vectors
    step = n if has_lanes() else 4
    whole = c.sub(length, c.rem(length, step))

    def multiply(i: int, j: int, x: Value, column: Value) -> None:
        c.b.store(c.fma(column, x, c.get(acc[i][j], vec(n))), acc[i][j])

    def columns(base: Value, k: int) -> list[Value]:
        return [c.load(c.at(base, (k * vectors + j) * n), n) for j in range(vectors)]

    with c.loop(0, whole, step) as k:
        base = c.get(panel, PTR)
        if has_lanes():  # a vector of each row, multiplied lane by lane
            xs = [c.load(c.at(runs[i], k), n) for i in range(rows)]
            for lane in range(step):
                for j in range(vectors):
                    column = c.load(c.at(base, (lane * vectors + j) * n), n)
                    for i in range(rows):
                        multiply(i, j, c.lane(xs[i], lane), column)
        else:  # broadcasting loads
            for lane in range(step):
                here = columns(base, lane)
                for i in range(rows):
                    x = c.splat(c.load(c.at(runs[i], k, lane)), n)
                    for j in range(vectors):
                        multiply(i, j, x, here[j])
        c.put(panel, c.at(base, step * vectors * n))
    with c.loop(whole, length) as k:
        base = c.get(panel, PTR)
        here = columns(base, 0)
        for i in range(rows):
            x = c.splat(c.load(c.at(runs[i], k)), n)
            for j in range(vectors):
                multiply(i, j, x, here[j])
        c.put(panel, c.at(base, vectors * n))


def _product(module: object, tile: Tile, epilogue: Epilogue) -> Code:
    """One tile: (A, offsets, segments, length, B, C, C offsets, bias, R, R offsets, zeros,
    columns) → MR rows of up to NR results."""
    n, rows, vectors = width(), tile.rows, tile.vectors
    c = Code(module, "tile", [PTR, PTR, I64, I64] + [PTR] * 7 + [I64], internal=True)
    a, table, segments, length, b, out, outs, bias, res, ress, zeros, columns = c.args
    acc = [[c.variable(vec(n)) for _ in range(vectors)] for _ in range(rows)]
    for j in range(vectors):
        start = c.load(c.at(bias, j * n), n)
        for i in range(rows):
            c.b.store(start, acc[i][j])
    panel = c.variable(PTR, b)
    with c.loop(0, segments) as s:
        runs = []
        for i in range(rows):
            where = c.index(table, c.add(c.mul(s, rows), i))
            runs.append(c.b.select(c.cmp("<", where, 0), zeros, c.at(a, where)))
        accumulate(c, tile, acc, runs, panel, length)

    nowhere = c.variable(F32, count=tile.columns)

    def places(i: int | Value) -> tuple[Value, Value]:
        """Where row ``i`` of the result goes and where its residual is."""
        to = c.index(outs, i)
        to = c.b.select(c.cmp("<", to, 0), nowhere, c.at(out, to))
        if not epilogue.residual:
            return to, to
        other = c.index(ress, i)
        return to, c.b.select(c.cmp("<", other, 0), zeros, c.at(res, other))

    def at_once() -> None:
        for i in range(rows):
            to, other = places(i)
            for j in range(vectors):
                r = c.load(c.at(other, j * n), n) if epilogue.residual else None
                x = epilogue.emit(c, c.get(acc[i][j], vec(n)), r)
                c.store(x, c.at(to, j * n))

    def in_a_loop() -> None:
        """By vectors, the last of which may be cut; nothing beyond ``columns`` is touched."""
        held = c.variable(F32, count=rows * tile.columns)
        for i in range(rows):
            for j in range(vectors):
                c.store(c.get(acc[i][j], vec(n)), c.at(held, i * tile.columns + j * n))
        cut_in, cut_out = c.variable(F32, count=n), c.variable(F32, count=n)
        with c.loop(0, rows) as i:
            to, other = places(i)
            with c.loop(0, columns, n) as j:
                left = c.least(c.sub(columns, j), n)
                full = c.cmp("==", left, n)
                r = None
                if epilogue.residual:
                    with c.when(c.b.not_(full)), c.loop(0, left) as k:
                        c.store(c.load(c.at(other, j, k)), c.at(cut_in, k))
                    r = c.load(c.b.select(full, c.at(other, j), cut_in), n)
                x = epilogue.emit(c, c.load(c.at(held, c.mul(i, tile.columns), j), n), r)
                c.store(x, c.b.select(full, c.at(to, j), cut_out))
                with c.when(c.b.not_(full)), c.loop(0, left) as k:
                    c.store(c.load(c.at(cut_out, k)), c.at(to, j, k))

    if epilogue.heavy:
        in_a_loop()
    else:
        c.either(c.cmp("==", columns, tile.columns), at_once, in_a_loop)
    c.ret()
    return c


def _write(module: object, tile: Tile, epilogue: Epilogue) -> None:
    product = _product(module, tile, epilogue)
    wide = tile.columns

    def body(c: Code, words: Value, thread: Value, threads: Value) -> None:
        a, table, b, out, outs, bias, res, ress, zeros = (
            c.pointer(words, openmp.HEAD + i) for i in range(9)
        )
        segments, length, count, columns, groups, a_step, c_step, block, by_columns = (
            c.word(words, openmp.HEAD + 9 + i) for i in range(9)
        )
        depth = c.mul(segments, length)
        panels = c.div(c.add(columns, wide - 1), wide)
        everything = c.mul(groups, panels)
        split = c.cmp("!=", by_columns, 0)
        p_share, m_share = c.share(everything, thread, threads), c.share(count, thread, threads)
        p0, p1 = (c.b.select(split, mine, all_) for mine, all_ in zip(
            p_share, (c.i(0), everything), strict=True))  # fmt: skip
        m0, m1 = (c.b.select(split, all_, mine) for mine, all_ in zip(
            m_share, (c.i(0), count), strict=True))  # fmt: skip
        with c.loop(m0, m1, block) as first, c.loop(p0, p1) as p:
            last = c.least(m1, c.add(first, block))
            group = c.div(p, panels)
            column = c.mul(c.sub(p, c.mul(group, panels)), wide)
            here = c.least(c.sub(columns, column), wide)
            shift = c.add(c.mul(group, c_step), column)
            with c.loop(first, last) as m:
                c.call(
                    product,
                    c.at(a, c.mul(group, a_step)),
                    c.at(table, c.mul(m, segments, tile.rows), of=I32),
                    segments, length, c.at(b, c.mul(p, wide, depth)), c.at(out, shift),
                    c.at(outs, c.mul(m, tile.rows), of=I32), c.at(bias, c.mul(p, wide)),
                    c.at(res, shift), c.at(ress, c.mul(m, tile.rows), of=I32), zeros, here,
                )  # fmt: skip

    entry(module, "run", body)


def compiled(tile: Tile, epilogue: Epilogue) -> Loaded:
    """The kernel for a tile and an epilogue; every shape runs through it."""
    name = f"matmul {tile.rows}x{tile.vectors} of {width()} {epilogue.key}"
    return load(name, lambda module: _write(module, tile, epilogue))


# ---- what it is given --------------------------------------------------------------------------


def pack(weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[groups, N, K] → panels [groups · ⌈N / NR⌉, K, NR], zeros beyond N."""
    groups, n, k = weight.shape
    panels = -(-n // tile.columns)
    full = torch.zeros(groups, panels * tile.columns, k)
    full[:, :n] = weight
    split = full.view(groups, panels, tile.columns, k)
    return split.transpose(2, 3).reshape(groups * panels, k, tile.columns).contiguous()


def pack_bias(bias: torch.Tensor | None, groups: int, n: int, tile: Tile) -> torch.Tensor:
    panels = -(-n // tile.columns)
    full = torch.zeros(groups, panels * tile.columns)
    if bias is not None:
        full[:, :n] = bias.reshape(groups, n)
    return full.reshape(-1).contiguous()


def in_tiles(offsets: np.ndarray, tile: Tile) -> torch.Tensor:
    """Offsets [rows, segments] as the kernel reads them, [tile][segment][row]; rows that fill up
    the last tile do not exist."""
    rows, segments = offsets.shape
    full = np.full((-(-rows // tile.rows) * tile.rows, segments), -1, np.int32)
    full[:rows] = offsets
    return torch.from_numpy(
        np.ascontiguousarray(full.reshape(-1, tile.rows, segments).transpose(0, 2, 1))
    )


def row_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """The offset of every row, [rows, 1], in row-major order over ``shape``."""
    total = np.zeros((1,) * max(len(shape), 1), np.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        view = [1] * len(shape)
        view[dim] = size
        total = total + np.arange(size, dtype=np.int64).reshape(view) * stride
    return total.reshape(-1, 1)


@lru_cache(maxsize=64)
def zeros(length: int) -> torch.Tensor:
    return torch.zeros(length)


@dataclass(frozen=True)
class Rows:
    """Where the rows of a product are: offsets [rows, segments] of A, and [rows, 1] of C and R.
    ``a_step`` and ``c_step`` lead from one group to the next."""

    a: np.ndarray
    c: np.ndarray
    r: np.ndarray | None
    length: int
    a_step: int = 0
    c_step: int = 0


def prepare(
    rows: Rows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    tile: Tile,
    by_columns: bool,
) -> Callable[[int, int, int], None]:
    """``run(A, C, R)`` over addresses, for ``weight`` [groups, N, K] packed now."""
    groups, n, k = weight.shape
    count, segments = rows.a.shape
    panels, starts = pack(weight.float(), tile), pack_bias(bias, groups, n, tile)
    table, outs = in_tiles(rows.a, tile), in_tiles(rows.c, tile)
    ress = outs if rows.r is None else in_tiles(rows.r, tile)
    empty = zeros(max(rows.length, tile.columns, 64))
    block = max(1, L2_BYTES // (4 * max(k, 1) * tile.rows))
    threaded = 2.0 * count * groups * n * k > SERIAL_FLOPS
    call = openmp.launcher(compiled(tile, epilogue), "run", threaded)
    held = (panels, starts, table, outs, ress, empty)
    b, start, t, o, r, z = (tensor.data_ptr() for tensor in held)
    sizes = (segments, rows.length, table.shape[0], n, groups, rows.a_step, rows.c_step, block,
             int(by_columns))  # fmt: skip

    def run(a: int, out: int, residual: int, held: object = held) -> None:
        call(a, t, b, out, o, start, residual, r, z, *sizes)

    return run
