"""3×3 convolution of stride 1 by Winograd's algorithm, F(m×m, 3×3) for m = 2 or 4:

    Y = Aᵀ [ Σ_c (G g Gᵀ) ⊙ (Bᵀ d B) ] A + bias      for every m×m tile of the result

with t = m + 2: a tile takes t² products per channel pair where the direct sum takes 9 m², so
2.25× (m = 2) or 4× (m = 4) less arithmetic. The products are t² matrix products of [tiles, C]
and [C, K], run by :mod:`deuteron.kernels.cpu.matmul`. Memory traffic:

    bytes = 4 · (x + y · (1 + residual) + 2 · t²/m² · (x + y) through L2 + t² · C · K)

so the weights grow by t²/9: 1.8× and 4×. They are transformed in float64, once.

Numbers: the transforms magnify rounding. With the usual points 0, ±1, ±2 F(4×4) loses 4 to 8
times what the direct sum loses; the points 0, ±3/2, ±2/3 bring that down to 1 to 2 times
(largest error relative to the largest result, 64 to 512 random channels: ``WINOGRAD_ERROR``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import I64, PTR, Code, Value, load_run, width
from deuteron.kernels.cpu.conv import Images
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import ProductKernel, Rows, Tile, prepare, row_offsets, zeros
from deuteron.kernels.cpu.packing import Packed, bias_now, panels_of
from deuteron.kernels.cpu.sweep import steps
from deuteron.kernels.winograd_points import matrices

CHUNK_BYTES = 8_000_000  # transformed tiles that are in flight at a time


# ---- transforms in registers -------------------------------------------------------------------


def _combine(c: Code, terms: Sequence[tuple[float, Value]], lanes: int) -> Value:
    """Σ k · x, terms of weight 1 first."""
    out = None
    for k, x in sorted((t for t in terms if t[0] != 0), key=lambda t: t[0] != 1):
        if out is None:
            out = x if k == 1 else c.b.fmul(x, c.f(k, lanes))
        elif k in (1, -1):
            out = c.b.fadd(out, x) if k == 1 else c.b.fsub(out, x)
        else:
            out = c.fma(x, c.f(k, lanes), out)
    return out


def _pairs(m: int) -> range:
    """Where p and −p stand side by side."""
    return range(1, m + 1, 2)


def _input_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """Bᵀ · xs. The rows of p and −p share their even and their odd part."""
    b = matrices(m)[2]
    out: list[Value] = [None] * (m + 2)
    for row in (0, m + 1):
        out[row] = _combine(c, list(zip(b[row], xs, strict=True)), lanes)
    for row in _pairs(m):
        parts = (range(part, m + 2, 2) for part in (0, 1))
        even, odd = (_combine(c, [(b[row][k], xs[k]) for k in part], lanes) for part in parts)
        # Π (x − q) over the other points: which part changes sign depends on the degree
        flip = b[row][0] == -b[row + 1][0] and b[row][2] == -b[row + 1][2]
        out[row] = c.b.fadd(even, odd)
        out[row + 1] = c.b.fsub(odd, even) if flip else c.b.fsub(even, odd)
    return out


def _output_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """Aᵀ · xs. The columns of p and −p differ in sign in every other row."""
    a = matrices(m)[0]
    sums = {k: c.b.fadd(xs[k], xs[k + 1]) for k in _pairs(m)}
    differences = {k: c.b.fsub(xs[k], xs[k + 1]) for k in _pairs(m)}
    out = []
    for i, row in enumerate(a):
        shared = differences if i % 2 else sums
        terms = [(row[0], xs[0]), (row[-1], xs[-1])] + [(row[k], shared[k]) for k in _pairs(m)]
        out.append(_combine(c, terms, lanes))
    return out


Grid = list[list[Value]]
Side = Callable[[Code, int, Sequence[Value], int], list[Value]]


def _both_sides(one: Side, c: Code, m: int, grid: Grid, lanes: int) -> Grid:
    columns = [one(c, m, [row[j] for row in grid], lanes) for j in range(len(grid))]
    return [one(c, m, [column[i] for column in columns], lanes) for i in range(len(columns[0]))]


# ---- kernels -----------------------------------------------------------------------------------


@contextmanager
def _tiles(c: Code, sizes: Sequence[Value], *thread: Value) -> Iterator[tuple[Value, ...]]:
    """The tiles of this thread: the number of each in the chunk, its image, and its place there."""
    start, count, down, across = sizes
    with c.loop(*c.share(count, *thread)) as local:
        n, inside = c.split(c.add(start, local), c.mul(down, across))
        yield local, n, *c.split(inside, across)


Pair = tuple[Value, Value]  # down and across


def _addresses(
    c: Code, to: tuple[Value, int], base: Value, origin: Pair, steps: Pair, size: Pair, none: Value
) -> None:
    """Addresses of side² pixels from ``origin`` ``to`` a table (table, side); those not in the
    image are ``none``."""
    table, side = to
    with c.loop(0, side) as i:
        y = c.add(origin[0], i)
        row_in = c.b.and_(c.cmp(">=", y, 0), c.cmp("<", y, size[0]))
        for j in range(side):
            x = c.add(origin[1], j)
            here = c.b.and_(row_in, c.b.and_(c.cmp(">=", x, 0), c.cmp("<", x, size[1])))
            pixel = c.at(base, c.mul(y, steps[0]), c.mul(x, steps[1]))
            there = c.at(table, c.mul(i, side), j, of=I64)
            c.store(c.b.select(here, pixel, none), there)


def _input(m: int, c: Code, words: Value, *thread: Value) -> None:
    t, r = m + 2, range(m + 2)
    x, u, empty = c.pointers(words, 3)
    height, breadth, channels, ph, pw, xn, xh, xw, plane = c.words(words, 7, 9)
    table = c.variable(PTR, count=t * t)
    with _tiles(c, c.words(words, 3, 4), *thread) as (local, n, ty, tx):
        origin = c.sub(c.mul(ty, m), ph), c.sub(c.mul(tx, m), pw)
        image, size = c.at(x, c.mul(n, xn)), (height, breadth)
        _addresses(c, (table, t), image, origin, (xh, xw), size, empty)
        to = c.at(u, c.mul(local, channels))

        def transform(ch: Value, lanes: int) -> None:
            grid = [[c.load(c.at(c.pointer(table, i * t + j), ch), lanes) for j in r] for i in r]
            for i, row in enumerate(_both_sides(_input_side, c, m, grid, lanes)):
                for j, value in enumerate(row):
                    c.store(value, c.at(to, c.mul(plane, i * t + j), ch))

        steps(c, channels, transform, vectors=1)


def _output(m: int, epilogue: Epilogue, c: Code, words: Value, *thread: Value) -> None:
    t = m + 2
    product, y, bias, r, empty, nowhere = c.pointers(words, 6)
    height, breadth, channels, yn, yh, yw, rn, rh, rw, plane = c.words(words, 10, 10)
    outs, others = c.variable(PTR, count=m * m), c.variable(PTR, count=m * m)
    nowhere = c.at(nowhere, c.mul(thread[0], channels))
    with _tiles(c, c.words(words, 6, 4), *thread) as (local, n, ty, tx):
        origin, size = (c.mul(ty, m), c.mul(tx, m)), (height, breadth)
        _addresses(c, (outs, m), c.at(y, c.mul(n, yn)), origin, (yh, yw), size, nowhere)
        if epilogue.residual:
            _addresses(c, (others, m), c.at(r, c.mul(n, rn)), origin, (rh, rw), size, empty)
        source = c.at(product, c.mul(local, channels))

        def transform(ch: Value, lanes: int) -> None:
            grid = [
                [c.load(c.at(source, c.mul(plane, i * t + j), ch), lanes) for j in range(t)]
                for i in range(t)
            ]
            start = c.load(c.at(bias, ch), lanes)
            for i, row in enumerate(_both_sides(_output_side, c, m, grid, lanes)):
                for j, value in enumerate(row):
                    other = None
                    if epilogue.residual:
                        other = c.load(c.at(c.pointer(others, i * m + j), ch), lanes)
                    done = epilogue.emit(c, c.b.fadd(value, start), other)
                    c.store(done, c.at(c.pointer(outs, i * m + j), ch))

        steps(c, channels, transform, vectors=1)


def transformed(weight: torch.Tensor, m: int) -> torch.Tensor:
    """G g Gᵀ for a weight [K, C, 3, 3], as [t², K, C]."""
    g = torch.tensor(matrices(m)[1], dtype=torch.float64)
    out = torch.einsum("ia,kcab,jb->ijkc", g, weight.double(), g)
    return out.reshape(-1, *weight.shape[:2]).float()


def transformed_panels(weight: torch.Tensor, m: int, wide: int) -> torch.Tensor:
    """The same, packed for the products."""
    return panels_of(transformed(weight, m), wide)


def chunk_of(x: tuple[int, ...], y: tuple[int, ...], m: int) -> tuple[int, int]:
    """Tiles that are in flight at a time, and all there are."""
    total = y[0] * -(-y[2] // m) * -(-y[3] // m)
    per_tile = 4 * (m + 2) ** 2 * (x[1] + y[1])
    pieces = max(1, -(-total * per_tile // CHUNK_BYTES))
    return -(-total // pieces), total


def workspace(x: tuple[int, ...], y: tuple[int, ...], m: int, threads: int) -> int:
    """Floats that a call needs."""
    return chunk_of(x, y, m)[0] * (m + 2) ** 2 * (x[1] + y[1]) + threads * y[1]


Parameters = tuple[Packed, torch.Tensor | None]  # a weight that is transformed, and a bias


def prepare_winograd(
    images: Images, padding: tuple[int, int], of: Parameters, epilogue: Epilogue, tile: Tile, m: int
) -> Callable[[Word, Word, Word], list[Call]]:
    """The calls for x, y and residual, where each is."""
    (x, y, r), (factor, bias) = images, of
    r = y if r is None else r
    (_, channels, height, breadth), (_, k, oh, ow) = x.shape, y.shape
    chunk, total = chunk_of(x.shape, y.shape, m)
    inner = row_offsets((chunk,), (channels,)), row_offsets((chunk,), (k,))
    number = np.arange((m + 2) ** 2, dtype=np.int64)
    starts = np.stack([number * chunk * channels, number, number * chunk * k, number * 0], 1)
    rows, form = Rows(*inner, None, channels, starts), ProductKernel(tile, Epilogue())
    start = bias_now(None, len(number), k, tile.columns)
    product = prepare(rows, k, factor, start, form, by_columns=True).calls
    name = f"winograd {m} of {width()}"
    first = load_run(f"{name} input", partial(_input, m))
    last = load_run(f"{name} output {epilogue.key}", partial(_output, m, epilogue))
    start = torch.zeros(k) if bias is None else bias.contiguous()
    empty = zeros(max(channels, k, 64))
    down, across = -(-oh // m), -(-ow // m)
    u_size, p_size = chunk * (m + 2) ** 2 * channels, chunk * (m + 2) ** 2 * k
    parts = (0, u_size, u_size + p_size)
    u, p, nowhere = (Room("winograd", parts[2], k, 4 * begin) for begin in parts)
    xs, ys, rs = ((i.strides[0], i.strides[2], i.strides[3]) for i in (x, y, r))

    def calls(source: Word, to: Word, other: Word) -> list[Call]:
        found = []
        for begin in range(0, total, chunk):
            here = (begin, min(chunk, total - begin), down, across)
            size_in = (height, breadth, channels, *padding, *xs, chunk * channels)
            size_out = (oh, ow, k, *ys, *rs, chunk * k)
            found.append(Call(first, (source, u, empty, *here, *size_in)))
            found.extend(product(u, p, p, 0, 0))
            found.append(Call(last, (p, to, start, other, empty, nowhere, *here, *size_out)))
        return found

    return calls
