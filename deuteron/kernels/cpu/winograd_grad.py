"""The gradient of the weight of a 3×3 convolution of stride 1 by Winograd's algorithm: a sum over
all tiles, and only that sum is transformed back:

    dg = Gᵀ [ Σ_tiles (A dY Aᵀ) ⊙ (Bᵀ d B) ] G

Transformed tiles are multiplied where they lie. Memory traffic, if the sums of all filters stay in
a core's cache or are finished one part after the other:

    bytes = 4 · (x + y + 9 · C · K + t²/m² · (x + y) through L2)

If there are more tiles than fit in one chunk, t² · C · K sums are read and written for each chunk
but the first.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import product as iterate
from math import isqrt

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import Code, Value, load_run, width
from deuteron.kernels.cpu import teams
from deuteron.kernels.cpu.conv import Image
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import ProductKernel, Tile, prepare, zeros
from deuteron.kernels.cpu.packing import bias_now
from deuteron.kernels.cpu.product_rows import OuterRows, row_offsets
from deuteron.kernels.cpu.sweep import steps
from deuteron.kernels.cpu.winograd import (
    Products,
    both_sides,
    combine,
    input_tiles,
    odd_lines,
    shifted,
)
from deuteron.kernels.winograd_points import matrices

GRAD_BYTES = 700_000  # the part of a core's L2 for both factors
GRAD_LEAST = 48  # tiles per thread added up at a time: with fewer, sums are read too often


def _taps_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """Gᵀ · xs."""
    g = matrices(m)[1]
    return [combine(c, [(g[j][i], x) for j, x in enumerate(xs)], lanes) for i in range(3)]


def _filters(m: int, c: Code, words: Value, *thread: Value) -> None:
    """dw[k, c] = Gᵀ · sums[·, k, c] · G."""
    t = m + 2
    sums, to = c.pointers(words, 2)
    rows, channels, step_k, step_c, down, across, plane = c.words(words, 2, 7)
    with c.loop(*c.share(rows, *thread)) as k:

        def transform(ch: Value, lanes: int, k: Value = k) -> None:
            at = c.add(c.mul(k, channels), ch)
            points = [c.at(sums, c.mul(plane, p), at) for p in range(t * t)]
            grid = [[c.load(p, lanes) for p in points[i * t : i * t + t]] for i in range(t)]
            taps = [value for row in both_sides(_taps_side, c, m, grid, lanes) for value in row]
            places = [c.add(c.mul(down, y), c.mul(across, x)) for y in range(3) for x in range(3)]
            first = c.at(to, c.mul(k, step_k), c.mul(ch, step_c))

            def side_by_side() -> None:
                for value, place in zip(taps, places, strict=True):
                    c.store(value, c.at(first, place))

            def apart() -> None:
                for lane in range(lanes):
                    there = c.at(first, c.mul(step_c, lane))
                    for value, place in zip(taps, places, strict=True):
                        c.store(c.item(value, lane), c.at(there, place))

            c.either(c.cmp("==", step_c, 1), side_by_side, apart)

        steps(c, channels, transform, vectors=1)


def grad_chunk(x: tuple[int, ...], y: tuple[int, ...], m: int, threads: int) -> tuple[int, int]:
    """Return how many tiles are in flight at a time, and how many there are."""
    total = y[0] * -(-y[2] // m) * -(-y[3] // m)
    fit = max(GRAD_BYTES // (4 * (m + 2) ** 2 * (x[1] + y[1])), GRAD_LEAST) * threads
    return -(-total // max(1, round(total / fit))), total


def grad_block(k: int, channels: int, m: int, tile: Tile) -> tuple[int, int]:
    """Return numbers of filters and channels whose sums fit into a core's cache: about as many
    filters as channels, because both factors are read again for each block."""
    fit = GRAD_BYTES // (4 * (m + 2) ** 2)
    some = min(channels, max(1, isqrt(fit) // tile.columns) * tile.columns)
    return min(k, max(1, fit // (some * tile.rows)) * tile.rows), some


def prepare_weight_grad(
    y: Image, x: Image, dw: Image, padding: tuple[int, int], tile: Tile, m: int
) -> tuple[Callable[[Word, Word, Word], list[Call]], int]:
    """Return ``calls(dy, x, dw)``, which takes their addresses, and the floats of scratch memory
    they need. They compute dg = Gᵀ [ Σ_tiles (A dY Aᵀ) ⊙ (Bᵀ d B) ] G, with t² sums of outer
    products over all tiles, some at a time. Transformed tiles are multiplied where they lie; a
    panel that reaches beyond their channels reads whatever comes next, for results that nobody
    keeps."""
    t2, (_, k, oh, ow), (_, channels, height, breadth) = (m + 2) ** 2, y.shape, x.shape
    chunk, total = grad_chunk(x.shape, y.shape, m, torch.get_num_threads())
    down, across = -(-oh // m), -(-ow // m)
    of_v, of_u = odd_lines(chunk * k + tile.rows), odd_lines(chunk * channels + tile.columns)
    v, u = (Room("winograd", t2 * (of_v + of_u), 0, begin) for begin in (0, 4 * t2 * of_v))
    # filters and channels whose sums are made at a time
    part, some = grad_block(k, channels, m, tile) if chunk == total else (k, channels)
    of_sums = odd_lines(part * some)
    sums = Room("products", t2 * of_sums)
    name, empty = f"winograd {m} of {width()}", zeros(max(channels, k, 64))
    of_x = load_run(f"{name} input", partial(input_tiles, m, m + 2))
    of_y = load_run(f"{name} gradient", partial(input_tiles, m, m))
    last = load_run(f"{name} filters", partial(_filters, m))
    xs, ys = ((i.strides[0], i.strides[2], i.strides[3]) for i in (x, y))
    number = np.arange(t2, dtype=np.int64)
    run = np.zeros((2, 1), np.int64)
    starts = np.stack([number * of_v, number * of_u, *[number * of_sums] * 2], 1)
    none = bias_now(None, t2, channels, tile.columns)

    @lru_cache
    def product(count: int, filters: int, beside: int, more: bool) -> Products:
        """Multiply ``count`` tiles for so many filters and channels; ``more``: add to what is
        there."""
        to = row_offsets((filters,), (beside,))
        pitch, steps = (tile.rows, tile.columns), (k, channels)
        rows = OuterRows(run, to, to if more else None, count, pitch, steps, starts)
        form = ProductKernel(tile, Epilogue(residual=more), outer=True)
        down, across = -(-filters // tile.rows), t2 * -(-beside // tile.columns)
        columns = teams(down, across, torch.get_num_threads())[0]
        return prepare(rows, beside, lambda b: ((), b), none, form, columns).calls

    def calls(grad: Word, image: Word, to: Word) -> list[Call]:
        found = []
        for begin in range(0, total, chunk):
            count = min(chunk, total - begin)
            here = (begin, count, down, across)
            size_x = (height, breadth, channels, *padding, *xs, of_u)
            found.append(Call(of_x, (image, u, empty, *here, *size_x)))
            size_y = (oh, ow, k, 0, 0, *ys, of_v)
            found.append(Call(of_y, (grad, v, empty, *here, *size_y)))
            for i, j in iterate(range(0, k, part), range(0, channels, some)):
                size = min(part, k - i), min(some, channels - j)
                multiply = product(count, *size, begin > 0)
                found.extend(multiply(shifted(v, i), sums, sums, shifted(u, j), 0))
                if begin + count == total:
                    there = shifted(to, i * dw.strides[0] + j * dw.strides[1])
                    words = (sums, there, *size, *dw.strides, of_sums)
                    found.append(Call(last, words))
        return found

    return calls, u.floats + sums.floats
