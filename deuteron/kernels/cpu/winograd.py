"""3×3 convolution of stride 1 by Winograd's algorithm, F(m×m, 3×3) for m = 2 or 4:

    Y = Aᵀ [ Σ_c (G g Gᵀ) ⊙ (Bᵀ d B) ] A + bias      for every m×m tile of the result

with t = m + 2: a tile takes t² products per channel pair where the direct sum takes 9 m², so
2.25× (m = 2) or 4× (m = 4) less arithmetic. The products are t² matrix products of [tiles, C]
and [C, K], run by :mod:`deuteron.kernels.cpu.matmul`. Memory traffic:

    bytes = 4 · (x + y · (1 + residual) + 2 · t²/m² · (x + y) through L2 + t² · C · K)

so the weights grow by t²/9: 1.8× and 4×. Weights that never change are transformed in float64,
once; those that arrive with a call are transformed each time, which moves 4 · (9 + t²) · C · K
bytes more.

The gradient for x of such a convolution, and a transposed one, are convolutions of stride 1 too:
with the taps in reverse order, the two channel dimensions of the weight exchanged, and a padding of
2 − padding. The gradient of the weight: :mod:`deuteron.kernels.cpu.winograd_grad`.

Numbers: the transforms magnify rounding. With the usual points 0, ±1, ±2 F(4×4) loses 4 to 8
times what the direct sum loses; the points 0, ±3/2, ±2/3 bring that down to 1 to 2 times
(largest error relative to the largest result, 64 to 512 random channels: ``WINOGRAD_ERROR``).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product as iterate

import numpy as np
import torch

from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I64, PTR, Code, Value, load_run, width
from deuteron.kernels.cpu import teams
from deuteron.kernels.cpu.conv import Image, Images
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import ProductKernel, Tile, prepare, zeros
from deuteron.kernels.cpu.packing import bias_now, panels_of
from deuteron.kernels.cpu.product_rows import Rows, row_offsets
from deuteron.kernels.cpu.sweep import steps
from deuteron.kernels.winograd_points import matrices

TILES_BYTES = 700_000  # the part of a core's L2 for tiles in flight and products by PART columns
LEAST = 48  # tiles in flight per thread: with fewer, weights are read too often
PART = 64  # columns that are multiplied and transformed back at a time
LINE = 16  # floats in a line of memory
SKEW = 1  # unused rows between panels written at once, so that these do not share sets of L1
DEPTH = 64  # channels of a weight that are transformed at a time


# ---- transforms in registers -------------------------------------------------------------------


def combine(c: Code, terms: Sequence[tuple[float, Value]], lanes: int) -> Value:
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
    """The indices of the points p that are followed by −p."""
    return range(1, m + 1, 2)


def _input_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """Bᵀ · xs. The rows for p and −p share their even and their odd part."""
    b = matrices(m)[2]
    out: list[Value] = [None] * (m + 2)
    for row in (0, m + 1):
        out[row] = combine(c, list(zip(b[row], xs, strict=True)), lanes)
    for row in _pairs(m):
        parts = (range(part, m + 2, 2) for part in (0, 1))
        even, odd = (combine(c, [(b[row][k], xs[k]) for k in part], lanes) for part in parts)
        # a row is Π (x − q) over the other points q: which part changes sign depends on the degree
        flip = b[row][0] == -b[row + 1][0] and b[row][2] == -b[row + 1][2]
        out[row] = c.b.fadd(even, odd)
        out[row + 1] = c.b.fsub(odd, even) if flip else c.b.fsub(even, odd)
    return out


def _filter_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """G · xs."""
    return [combine(c, list(zip(row, xs, strict=True)), lanes) for row in matrices(m)[1]]


def _gradient_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """A · xs. The rows for p and −p share their even and their odd part."""
    a = matrices(m)[0]
    out: list[Value] = [xs[0], *[None] * m, xs[-1]]
    for k in _pairs(m):
        parts = ([(a[i][k], xs[i]) for i in range(first, m, 2)] for first in (0, 1))
        even, odd = (combine(c, part, lanes) for part in parts)
        out[k], out[k + 1] = c.b.fadd(even, odd), c.b.fsub(even, odd)
    return out


def _output_side(c: Code, m: int, xs: Sequence[Value], lanes: int) -> list[Value]:
    """Aᵀ · xs. The columns for p and −p differ in sign in every other row."""
    a = matrices(m)[0]
    sums = {k: c.b.fadd(xs[k], xs[k + 1]) for k in _pairs(m)}
    differences = {k: c.b.fsub(xs[k], xs[k + 1]) for k in _pairs(m)}
    out = []
    for i, row in enumerate(a):
        shared = differences if i % 2 else sums
        terms = [(row[0], xs[0]), (row[-1], xs[-1])] + [(row[k], shared[k]) for k in _pairs(m)]
        out.append(combine(c, terms, lanes))
    return out


Grid = list[list[Value]]
Side = Callable[[Code, int, Sequence[Value], int], list[Value]]


def both_sides(one: Side, c: Code, m: int, grid: Grid, lanes: int) -> Grid:
    columns = [one(c, m, [row[j] for row in grid], lanes) for j in range(len(grid))]
    return [one(c, m, [column[i] for column in columns], lanes) for i in range(len(columns[0]))]


# ---- kernels -----------------------------------------------------------------------------------


@contextmanager
def _tiles(c: Code, sizes: Sequence[Value], *thread: Value) -> Iterator[tuple[Value, ...]]:
    """Loop over this thread's tiles: the number of each in the chunk, its image, its place
    there."""
    start, count, down, across = sizes
    with c.loop(*c.share(count, *thread)) as local:
        n, inside = c.split(c.add(start, local), c.mul(down, across))
        yield local, n, *c.split(inside, across)


Pair = tuple[Value, Value]  # down and across


def _addresses(
    c: Code, to: tuple[Value, int], base: Value, origin: Pair, steps: Pair, size: Pair, none: Value
) -> None:
    """Write the addresses of side² pixels from ``origin`` on into a table; ``to`` is (table, side).
    Pixels outside the image get the address ``none``."""
    table, side = to
    columns = [c.add(origin[1], j) for j in range(side)]
    inside = [c.b.and_(c.cmp(">=", x, 0), c.cmp("<", x, size[1])) for x in columns]
    offsets = [c.mul(x, steps[1]) for x in columns]
    with c.loop(0, side) as i:
        y = c.add(origin[0], i)
        row_in = c.b.and_(c.cmp(">=", y, 0), c.cmp("<", y, size[0]))
        row, there = c.at(base, c.mul(y, steps[0])), c.at(table, c.mul(i, side), of=I64)
        for j, (offset, column_in) in enumerate(zip(offsets, inside, strict=True)):
            pixel = c.b.select(c.b.and_(row_in, column_in), c.at(row, offset), none)
            c.store(pixel, c.at(there, j, of=I64))


def input_tiles(m: int, side: int, c: Code, words: Value, *thread: Value) -> None:
    """Transform tiles of x, which are t pixels high and wide, or of dy, which are m: ``side``."""
    t, r = m + 2, range(side)
    one = _input_side if side > m else _gradient_side
    x, u, empty = c.pointers(words, 3)
    height, breadth, channels, ph, pw, xn, xh, xw, plane = c.words(words, 7, 9)
    table = c.variable(PTR, count=side * side)
    with _tiles(c, c.words(words, 3, 4), *thread) as (local, n, ty, tx):
        origin = c.sub(c.mul(ty, m), ph), c.sub(c.mul(tx, m), pw)
        image, size = c.at(x, c.mul(n, xn)), (height, breadth)
        _addresses(c, (table, side), image, origin, (xh, xw), size, empty)
        to = c.at(u, c.mul(local, channels))

        def transform(ch: Value, lanes: int) -> None:
            at = [[c.pointer(table, i * side + j) for j in r] for i in r]
            grid = [[c.load(c.at(pixel, ch), lanes) for pixel in row] for row in at]
            for i, row in enumerate(both_sides(one, c, m, grid, lanes)):
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
            for i, row in enumerate(both_sides(_output_side, c, m, grid, lanes)):
                for j, value in enumerate(row):
                    other = None
                    if epilogue.residual:
                        other = c.load(c.at(c.pointer(others, i * m + j), ch), lanes)
                    done = epilogue.emit(c, c.b.fadd(value, start), other)
                    c.store(done, c.at(c.pointer(outs, i * m + j), ch))

        steps(c, channels, transform, vectors=1)


def _weights(m: int, wide: int, c: Code, words: Value, *thread: Value) -> None:
    """Write panels [t²][⌈N / wide⌉][depth][wide] of G g Gᵀ. ``plane``, from the panels of one point
    to those of the next, is no power of two, or they would evict each other from the cache."""
    t, lanes = m + 2, width()
    weight, to = c.pointers(words, 2)
    n, depth, step_n, step_k, down, across, step_panel, plane = c.words(words, 2, 8)
    panels = c.div(c.add(n, wide - 1), wide)

    def taps(column: Value, k: Value, together: bool) -> Grid:
        def tap(y: int, x: int) -> Value:
            first = c.at(weight, c.mul(k, step_k), c.mul(down, y), c.mul(across, x))
            if together:
                return c.load(c.at(first, column), lanes)
            # columns beyond the last repeat it, and nobody reads them
            each = [c.least(c.add(column, lane), c.sub(n, 1)) for lane in range(lanes)]
            return c.joined(lanes, F32, lambda i: c.load(c.at(first, c.mul(each[i], step_n))))

        return [[tap(y, x) for x in range(3)] for y in range(3)]

    with c.loop(*c.share(c.mul(panels, depth), *thread)) as job:
        panel, k = c.split(job, depth)
        first = c.mul(panel, wide)

        there = c.at(to, c.mul(panel, step_panel), c.mul(k, wide))

        def make(together: bool) -> None:
            with c.loop(0, wide, lanes) as j:
                grid = taps(c.add(first, j), k, together)
                for i, line in enumerate(both_sides(_filter_side, c, m, grid, lanes)):
                    for at, value in enumerate(line):
                        c.store(value, c.at(there, c.mul(plane, i * t + at), j))

        beside = c.b.and_(c.cmp("==", step_n, 1), c.cmp("<=", c.add(first, wide), n))
        c.either(beside, lambda: make(True), lambda: make(False))


@dataclass(frozen=True)
class Shape:
    """The products that a convolution takes: ``groups`` with ``channels`` and ``columns`` each; the
    ``total`` tiles of all images, and the ``chunk`` of them that is in flight at a time."""

    m: int
    groups: int
    channels: int
    columns: int
    total: int
    chunk: int
    tile: Tile

    @property
    def points(self) -> int:
        return (self.m + 2) ** 2

    @property
    def part(self) -> int:
        """Columns that are multiplied and transformed back at a time."""
        return part_of(self.columns, self.tile.columns)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The first column of each part, and how many it has."""
        return [(n, min(self.part, self.columns - n)) for n in range(0, self.columns, self.part)]

    @property
    def planes(self) -> tuple[int, int]:
        """Floats from the transformed tiles of one point to those of the next, and the same for
        their products."""
        return odd_lines(self.chunk * self.channels), odd_lines(self.chunk * self.part)

    def floats(self, columns: int, depth: int) -> int:
        """Return how many floats ``columns`` columns of a transformed weight take."""
        wide = self.tile.columns
        return self.points * -(-columns // wide) * wide * (depth + SKEW)


def odd_lines(floats: int) -> int:
    """Return ``floats``, rounded up to an odd number of cache lines. A transform writes to all
    points at once; if these lay as far apart as L1 is long, they would evict each other."""
    return (-(-floats // LINE) | 1) * LINE


def part_of(columns: int, wide: int) -> int:
    return min(-(-columns // wide), max(1, PART // wide)) * wide


def shape_of(
    x: tuple[int, ...], y: tuple[int, ...], groups: int, m: int, tile: Tile, threads: int
) -> Shape:
    """Choose how many tiles are in flight at a time: so few that a thread's tiles, and their
    products by a part of the columns, stay in its cache, but enough that reading the weights
    pays."""
    channels, columns = x[1] // groups, y[1] // groups
    total = y[0] * -(-y[2] // m) * -(-y[3] // m)
    each = 4 * (m + 2) ** 2 * (channels + part_of(columns, tile.columns))
    fit = max(TILES_BYTES // each, LEAST) * threads
    step = tile.rows * threads
    chunk = -(-total // max(1, round(total / fit)) // step) * step
    return Shape(m, groups, channels, columns, total, min(chunk, total), tile)


def workspace(shape: Shape, threads: int) -> int:
    """Return the floats of scratch memory that a call needs."""
    return shape.points * sum(shape.planes) + threads * shape.part


def filters_in_order(weight: torch.Tensor, spread: bool, groups: int) -> torch.Tensor:
    """Return a weight that never changes as [groups, C, 9, K], with the C and K of one group."""
    each = weight.unflatten(0, (groups, -1)).flatten(3)
    return each.permute(0, 1, 3, 2).flip(2) if spread else each.permute(0, 2, 3, 1)


def transformed(weight: torch.Tensor, m: int) -> torch.Tensor:
    """G g Gᵀ for a weight [..., 9, K], as [t², ..., K]."""
    g = torch.tensor(matrices(m)[1], dtype=torch.float64)
    both = torch.einsum("ia,jb->ijab", g, g).flatten(2).flatten(0, 1)
    return torch.einsum("pt,...tk->p...k", both, weight.double()).float()


# (group, first column, number of columns) → the panels to multiply by, one after the other
Filters = Callable[[int, int, int], list["Panels"]]


@dataclass(frozen=True)
class Panels:
    """The panels of ``depth`` channels of a part of the columns, from channel ``first`` on, and the
    calls that make them; ``spare``: rows at the end of a panel that are not read."""

    first: int
    depth: int
    where: Word
    made_by: tuple[Call, ...] = ()
    spare: int = 0


def filters_now(weight: torch.Tensor, spread: bool, shape: Shape) -> torch.Tensor:
    """Return panels [group][part][t²][⌈part / wide⌉][C][wide] of a weight that never changes."""
    found = []
    for group in filters_in_order(weight, spread, shape.groups):
        for first, count in shape.parts:
            here = transformed(group[..., first : first + count], shape.m)
            found.append(panels_of(here.transpose(1, 2), shape.tile.columns).flatten())
    return torch.cat(found)


def filters_of(ready: torch.Tensor, shape: Shape) -> Filters:
    """Return where the panels are that :func:`filters_now` made."""
    wide = shape.tile.columns
    filled = -(-shape.columns // wide) * wide

    def filters(group: int, first: int, count: int) -> list[Panels]:
        begin = shape.points * shape.channels * (group * filled + first)
        return [Panels(0, shape.channels, ready[begin:])]

    return filters


def filters_at_call(
    weight: Image, source: Word, spread: bool, shape: Shape
) -> tuple[list[Call], Filters, int]:
    """The same for a weight that arrives with every call: returns the calls that come before all
    others, where the panels are, and the floats they take. If every part is needed only once, a few
    of its channels are transformed at a time, which stay in the cache. ``spread``: the sum runs
    over the first dimension of the weight, and its taps are in reverse order."""
    wide, once = shape.tile.columns, shape.chunk == shape.total
    down, across = weight.strides[2:]
    step_k, step_n = weight.strides[:2] if spread else weight.strides[1::-1]
    back = 2 * (down + across) if spread else 0
    steps = step_n, step_k, *((-down, -across) if spread else (down, across))
    each = weight.shape[0] // shape.groups * weight.strides[0]
    kernel = partial(_weights, shape.m, wide)
    code = load_run(f"winograd {shape.m} weights in {wide} of {width()}", kernel)
    depth = min(shape.channels, DEPTH) if once else shape.channels
    of_part = shape.floats(shape.part, depth)
    room = Room("weights", of_part * (1 if once else shape.groups * len(shape.parts)))

    def made(group: int, first: int, count: int) -> list[Panels]:
        found = []
        number = 0 if once else group * len(shape.parts) + first // shape.part
        to = shifted(room, number * of_part)
        for k in range(0, shape.channels, depth):
            here = min(depth, shape.channels - k)
            taps = shifted(source, group * each + first * step_n + k * step_k + back)
            panel = (here + SKEW) * wide
            words = taps, to, count, here, *steps, panel, -(-count // wide) * panel
            found.append(Panels(k, here, to, (Call(code, words),), SKEW))
        return found

    if once:
        return [], made, room.floats
    every = [p for g in range(shape.groups) for part in shape.parts for p in made(g, *part)]
    first = [call for panels in every for call in panels.made_by]
    return first, lambda *part: [replace(p, made_by=()) for p in made(*part)], room.floats


def shifted(word: Word, floats: int) -> Word:
    """Return the address ``floats`` floats further on."""
    if isinstance(word, torch.Tensor):
        return word.flatten()[floats:]
    if isinstance(word, int):
        return word + 4 * floats
    return replace(word, offset=word.offset + 4 * floats)


Products = Callable[[Word, Word, Word, Word, Word], tuple[Call, ...]]


def prepare_winograd(
    images: Images, padding: tuple[int, int], shape: Shape, filters: Filters, epilogue: Epilogue
) -> Callable[[Word, Word, Word, Word], list[Call]]:
    """Return ``calls(x, y, residual, bias)``, which takes their addresses."""
    x, y, r = images
    r = y if r is None else r
    (height, breadth), (oh, ow), m, points = x.shape[2:], y.shape[2:], shape.m, shape.points
    channels, chunk, part, (of_u, of_p) = shape.channels, shape.chunk, shape.part, shape.planes
    number = np.arange(points, dtype=np.int64)
    sizes = points * (of_u + of_p), part
    begins = 0, points * of_u, sizes[0]
    u, p, nowhere = (Room("winograd", *sizes, 4 * begin) for begin in begins)
    name = f"winograd {m} of {width()}"
    first = load_run(f"{name} input", partial(input_tiles, m, m + 2))
    last = load_run(f"{name} output {epilogue.key}", partial(_output, m, epilogue))
    empty = zeros(max(channels, part, 64))
    down, across = -(-oh // m), -(-ow // m)
    xs, ys, rs = ((i.strides[0], i.strides[2], i.strides[3]) for i in (x, y, r))
    threads = torch.get_num_threads()

    @lru_cache
    def product(tiles: int, columns: int, depth: int, spare: int, more: bool) -> Products:
        """Multiply ``tiles`` tiles by ``columns`` columns; ``more``: add that to what is there."""
        inner = row_offsets((tiles,), (channels,)), row_offsets((tiles,), (columns,))
        to = number * of_p
        starts = np.stack([number * of_u, number, to, to], 1)
        rows = Rows(*inner, inner[1] if more else None, depth, starts, spare)
        form = ProductKernel(shape.tile, Epilogue(residual=more))
        start = bias_now(None, points, columns, shape.tile.columns)
        wide, high = shape.tile.columns, shape.tile.rows
        across = teams(-(-tiles // high), points * -(-columns // wide), threads)[0]
        return prepare(rows, columns, lambda w: ((), w), start, form, across).calls

    def calls(source: Word, to: Word, other: Word, bias: Word) -> list[Call]:
        found = []
        for group, begin in iterate(range(shape.groups), range(0, shape.total, chunk)):
            tiles = min(chunk, shape.total - begin)
            here = (begin, tiles, down, across)
            size_in = (height, breadth, channels, *padding, *xs, of_u)
            image = shifted(source, group * channels)
            found.append(Call(first, (image, u, empty, *here, *size_in)))
            for column, count in shape.parts:
                for panels in filters(group, column, count):
                    k = panels.first
                    run = product(tiles, count, panels.depth, panels.spare, k > 0)
                    found.extend(panels.made_by)
                    found.extend(run(shifted(u, k), p, p, panels.where, 0))
                at = group * shape.columns + column
                size_out = (oh, ow, count, *ys, *rs, of_p)
                places = (shifted(word, at) for word in (to, bias, other))
                found.append(Call(last, (p, *places, empty, nowhere, *here, *size_out)))
        return found

    return calls
