"""C[m, n] = act(Σₖ A[m, k] · B[k, n] + bias[n] + R[m, n]), packed, for products and convolutions.

Rows of A, C and R are found through tables of offsets, so that a convolution is this product
too: its stride, padding, dilation and im2col are in the table and cost nothing. A row of A is
``segments`` runs of ``length`` contiguous numbers; an offset below 0 stands for a run of zeros
(padding) in A and for a row that does not exist in C. A run that is padding for all rows of a
tile is skipped. A, C and R may have 16-bit numbers; registers and kept sums have 32 bits.

B comes in panels of NR columns (:mod:`deuteron.kernels.cpu.packing`). A tile of MR × NR results
stays in registers over a stretch of k, a stretch of a panel in L1 for all rows of a block, and a
block of rows in L2 for all panels; sums that wait for the next stretch are float32 beside it. The
next panel is fetched to L2 meanwhile. A and C move once, B once per block:

    bytes ≈ size · M·K + 4 · K·N · ⌈M / block⌉ + size · M·N · (1 + residual)

If neighbouring rows of A are contiguous and neighbouring k are not, as in the gradient of a weight,
A is packed in panels of MR rows too, and the product is a sum of outer products of a row of a panel
of A and one of B. Tables say where runs of k begin in panels, so a window's taps share one panel.

Rounding: sums are folded: after ``FOLD`` numbers a sum is added to the total and starts anew. The
error of a long sum is then that of a short one, as in libraries, which cut k for their caches.
Those sum a convolution tap by tap and lose even less, so a sum of several runs is folded twice as
often; they multiply a single row as dot products, in many sums, so that is folded four times as
often. A sum of outer products adds each number by itself, which loses most: its pieces are √K long.
The bias is added last: beside a large one the first numbers of a sum would be lost.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, product
from math import isqrt
from types import SimpleNamespace

import numpy as np
import torch

from deuteron.codegen import llvm
from deuteron.codegen import llvm_text as ir
from deuteron.codegen.calls import Call, Room, Word
from deuteron.codegen.llvm import F32, I8, I32, I64, PTR, VOID, Code, Value, by_lane, vec, width
from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.packing import Packed
from deuteron.kernels.cpu.product_rows import OuterRows, Rows, in_pieces
from deuteron.kernels.cpu.stored import Stored

L2_BYTES = 400_000  # the part of a core's L2 that a block of rows may fill
LINE = 64  # bytes of a cache line
AHEAD = 2  # the level of cache that the next panel is fetched to
FOLD = 256  # numbers of k in a sum that is then added to the sum of all
SERIAL_FLOPS = 1e5  # below this a second thread costs more than it brings


@dataclass(frozen=True)
class Tile:
    """Rows and vectors of columns that are held in registers."""

    rows: int
    vectors: int

    @property
    def columns(self) -> int:
        return self.vectors * width()


@dataclass(frozen=True)
class ProductKernel:
    """What a kernel is compiled for: ``stored`` is the element type of A, C and R, ``panel`` that
    of packed B; ``outer``: A is packed too, as float32; ``folded``: runs are longer than a sum may
    be and cannot be cut into equal pieces, so the kernel sums each in parts."""

    tile: Tile
    epilogue: Epilogue
    stored: str = "f32"
    panel: str = "f32"
    outer: bool = False
    folded: bool = False


Run = tuple[Value, Value]  # the address of a run's first row in a panel; floats from row to row
Ahead = tuple[Value, Value]  # memory to prefetch: a variable with its address; bytes per step


# ---- the kernel --------------------------------------------------------------------------------


def multiply(
    of: Stored,
    packed: Stored,
    acc: list[list[Value]],
    runs: list[Value],
    panel: Value,
    length: Value,
    ahead: Ahead | None = None,
) -> None:
    """acc[i] += runs[i][k] · panel[k] for k below ``length``. The rows are stored as ``of``, the
    panel as ``packed``; ``panel`` is a variable that ends up behind what was read. Memory ``ahead``
    is prefetched along the way. The numbers of a single row are shared out to four sums, which wait
    less for each other and lose less."""
    c, n, rows, vectors = of.c, width(), range(len(acc)), range(len(acc[0]))
    step = n if by_lane() else 4
    whole = c.sub(length, c.rem(length, step))
    together = step if len(vectors) == 1 else 1
    every = [acc] if len(acc) > 1 else [[[c.variable(vec(n)) for _ in vectors]] for _ in range(4)]
    if len(acc) == 1:
        for own in every:
            for j in vectors:
                c.b.store(c.f(0.0, n), own[0][j])

    def column(base: Value, k: int, j: int) -> Value:
        """A vector of row ``k`` of the panel."""
        return packed.load(packed.at(base, (k * len(vectors) + j) * n), n)

    def add(k: int, i: int, j: int, x: Value, here: Value) -> None:
        to = every[k % len(every)][i][j]
        c.b.store(c.fma(here, x, c.get(to, vec(n))), to)

    def spread(base: Value, lanes: range, *at: Value) -> None:
        """Multiply some numbers of each row, each loaded into all lanes, by as many panel rows."""
        here = [[column(base, lane, j) for j in vectors] for lane in lanes]
        for i, lane in product(rows, lanes):
            x = c.splat(of.load(of.at(runs[i], *at, lane)), n)
            for j in vectors:
                add(lane, i, j, x, here[lane - lanes.start][j])

    with c.loop(0, whole, step) as k:
        base = c.get(panel, PTR)
        if by_lane():  # a vector of each row, multiplied lane by lane
            xs = [of.load(of.at(runs[i], k), n) for i in rows]
            for lane, j in product(range(step), vectors):
                here = column(base, lane, j)
                for i in rows:
                    add(lane, i, j, c.lane(xs[i], lane), here)
        else:
            # many rows have more addresses than there are registers: each is loaded once a step
            for lane in range(0, step, together):
                spread(base, range(lane, lane + together), k)
        c.put(panel, packed.at(base, step * len(vectors) * n))
        if ahead is not None:
            place, pace = ahead
            there = c.get(place, PTR)
            with c.loop(0, pace, LINE) as further:
                prefetch(c, c.at(there, further, of=I8), AHEAD)
            c.put(place, c.at(there, pace, of=I8))
    with c.loop(whole, length) as k:
        base = c.get(panel, PTR)
        spread(base, range(1), k)
        c.put(panel, packed.at(base, len(vectors) * n))
    for j in vectors if len(acc) == 1 else ():
        one, two, three, four = (c.get(own[0][j], vec(n)) for own in every)
        both = c.b.fadd(c.b.fadd(one, two), c.b.fadd(three, four))
        c.b.store(c.b.fadd(c.get(acc[0][j], vec(n)), both), acc[0][j])


def together_in(columns: int) -> list[tuple[int, int]]:
    """Split columns into vectors of powers of two: where each vector begins, and its length."""
    sizes = [1 << k for k in reversed(range(columns.bit_length())) if columns >> k & 1]
    return list(zip(accumulate([0, *sizes[:-1]]), sizes, strict=True))


def multiply_outer(c: Code, acc: list[list[Value]], a: Run, b: Run, length: Value) -> None:
    """acc[i] += a[k][i] · b[k] for k below ``length``, where a and b are runs of panel rows."""
    n, vectors = width(), range(len(acc[0]))
    at_a, at_b = (c.variable(PTR, run[0]) for run in (a, b))

    def step(times: int) -> None:
        here, there = c.get(at_a, PTR), c.get(at_b, PTR)
        for _ in range(times):
            if by_lane() and len(acc) % n == 0:
                loaded = [c.load(c.at(here, i), n) for i in range(0, len(acc), n)]
                xs = [c.lane(loaded[i // n], i % n) for i in range(len(acc))]
            else:
                xs = [c.splat(c.load(c.at(here, i)), n) for i in range(len(acc))]
            for j in vectors:
                column = c.load(c.at(there, j * n), n)
                for row, x in zip(acc, xs, strict=True):
                    c.b.store(c.fma(column, x, c.get(row[j], vec(n))), row[j])
            here, there = c.at(here, a[1]), c.at(there, b[1])
        c.put(at_a, here)
        c.put(at_b, there)

    whole = c.sub(length, c.rem(length, 4))
    with c.loop(0, whole, 4):
        step(4)
    with c.loop(whole, length):
        step(1)


def prefetch(c: Code, where: Value, locality: int = 3) -> None:
    """Prefetch a cache line that is read later, into L1 (3) or L2 (2). (Not one that is written:
    whole lines are written without being read first, unless they were prefetched.)"""
    c.outside("llvm.prefetch.p0", VOID, where, *(ir.Constant(I32, x) for x in (0, locality, 1)))


# Of one tile: A, the table of its runs, how many runs, their length, runs (``folded``: numbers) per
# sum; B; C and its offsets; bias; R and its offsets; zeros, columns, kept sums, whether the first
# and the last stretch; memory ahead, bytes per step; floats between rows of packed A and of B
OPERANDS = """
a table segments length few b out outs bias res ress zeros columns sums first last ahead pace
step_a step_b
""".split()
WHOLE_NUMBERS = tuple("segments length few columns first last pace step_a step_b".split())


def _product(module: object, form: ProductKernel) -> Code:
    """Write the function of a tile: MR rows of up to NR results, or of unfinished sums if not
    ``last``; meanwhile it prefetches memory from ``ahead`` on, ``pace`` bytes per step."""
    tile, epilogue = form.tile, form.epilogue
    n, rows, vectors = width(), tile.rows, tile.vectors
    kinds = {name: I64 if name in WHOLE_NUMBERS else PTR for name in OPERANDS}
    c = Code(module, "tile", list(kinds.values()), internal=True)
    w = SimpleNamespace(**dict(zip(kinds, c.args, strict=True)))
    of, packed = Stored(c, form.stored), Stored(c, form.panel)
    acc = [[c.variable(vec(n)) for _ in range(vectors)] for _ in range(rows)]
    nowhere = c.variable(F32, count=tile.columns)
    parts = c.variable(F32, count=rows * tile.columns)  # the sum of what was folded
    every = [(*at, at[0] * tile.columns + at[1] * n) for at in product(range(rows), range(vectors))]

    def places(i: int | Value) -> tuple[Value, Value]:
        """Where row ``i`` of the result goes and where its residual is."""
        to = c.index(w.outs, i)
        to = c.b.select(c.cmp("<", to, 0), nowhere, of.at(w.out, to))
        if not epilogue.residual:
            return to, to
        other = c.index(w.ress, i)
        return to, c.b.select(c.cmp("<", other, 0), w.zeros, of.at(w.res, other))

    def resume(of: Value = w.sums) -> None:
        for i, j, at in every:
            c.b.store(c.load(c.at(of, at), n), acc[i][j])

    def clear() -> None:
        for i, j, _ in every:
            c.b.store(c.f(0.0, n), acc[i][j])

    def keep(to: Value = w.sums) -> None:
        for i, j, at in every:
            c.store(c.get(acc[i][j], vec(n)), c.at(to, at))

    def fold() -> None:
        for i, j, at in every:
            there = c.at(parts, at)
            c.store(c.b.fadd(c.load(there, n), c.get(acc[i][j], vec(n))), there)
        clear()

    c.either(c.cmp("!=", w.first, 0), clear, resume)
    if epilogue.residual:
        with c.when(c.cmp("!=", w.last, 0)):
            for i in range(rows):
                prefetch(c, places(i)[1])
    panel, next_lines = c.variable(PTR, w.b), (c.variable(PTR, w.ahead), w.pace)
    asks = rows > 1 or by_lane()  # x86-64 prefetches a single stream by itself, and sooner

    def pieces() -> Iterator[tuple[Value, Value]]:
        """Yield where the parts of a run begin that get a sum of their own, and their lengths."""
        if not form.folded:
            yield c.i(0), w.length
            return
        with c.loop(0, w.length, w.few) as k:
            yield k, c.least(w.few, c.sub(w.length, k))
            fold()

    def outer(s: Value) -> None:
        at = [c.index(w.table, c.add(c.mul(s, 2), i)) for i in (0, 1)]
        a, b = c.at(w.a, at[0]), c.at(w.b, at[1])
        for k, length in pieces():
            here = (c.at(a, c.mul(k, w.step_a)), w.step_a), (c.at(b, c.mul(k, w.step_b)), w.step_b)
            multiply_outer(c, acc, *here, length)

    def inner(s: Value) -> None:
        where = [c.index(w.table, c.add(c.mul(s, rows), i)) for i in range(rows)]
        everywhere = where[0]
        for one in where[1:]:
            everywhere = c.b.and_(everywhere, one)

        def skip() -> None:
            c.put(panel, packed.at(c.get(panel, PTR), c.mul(w.length, tile.columns)))

        def go() -> None:
            runs = [c.b.select(c.cmp("<", at, 0), w.zeros, of.at(w.a, at)) for at in where]
            for k, length in pieces():
                here = [of.at(run, k) for run in runs]
                multiply(of, packed, acc, here, panel, length, next_lines if asks else None)
            c.put(added, 1)

        c.either(c.cmp("<", everywhere, 0), skip, go)

    together = c.i(1) if form.folded else w.few
    several = c.b.or_(c.cmp("<", together, w.segments), c.cmp("==", w.first, 0))
    several = ir.Constant(several.type, 1) if form.folded else several
    with c.when(several):
        keep(parts)
        clear()
    added = c.variable(I64)  # whether there is something to fold: runs in the padding are skipped
    with c.loop(0, w.segments, together) as begin:
        end = c.least(w.segments, c.add(begin, together))
        c.put(added, int(form.outer))
        with c.loop(begin, end) as s:
            (outer if form.outer else inner)(s)
        with c.when(c.b.and_(several, c.cmp("!=", c.get(added), 0))):
            fold()
    with c.when(several):
        resume(parts)

    def at_once(columns: Value | None = None) -> None:
        """Write all of the tile, or its first ``columns``, without a loop."""
        masks = [of.first(c.sub(columns, j * n), n) if columns else None for j in range(vectors)]
        start = [c.load(c.at(w.bias, j * n), n) for j in range(vectors)]
        for i in range(rows):
            to, other = places(i)
            for j, mask in enumerate(masks):
                r = of.load(of.at(other, j * n), n, mask) if epilogue.residual else None
                x = epilogue.emit(c, c.b.fadd(c.get(acc[i][j], vec(n)), start[j]), r)
                of.store(x, of.at(to, j * n), mask)

    def in_a_loop(whole: bool = False) -> None:
        """Write row by row: ``whole`` rows several vectors at a time, which hides latency, others
        vector by vector, the last of which may be cut; nothing beyond ``columns`` is touched."""
        held = c.variable(F32, count=rows * tile.columns)
        keep(held)
        cut_in, cut_out = c.variable(F32, count=n), c.variable(F32, count=n)

        def write(i: Value, to: Value, other: Value, j: Value | int, lanes: int) -> None:
            mask = None if whole else of.first(c.sub(w.columns, j), lanes)
            r = of.load(of.at(other, j), lanes, mask) if epilogue.residual else None
            x = c.load(c.at(held, c.mul(i, tile.columns), j), lanes)
            x = epilogue.emit(c, c.b.fadd(x, c.load(c.at(w.bias, j), lanes)), r)
            of.store(x, of.at(to, j), mask)

        def write_cut(i: Value, to: Value, other: Value, j: Value) -> None:
            left = c.least(c.sub(w.columns, j), n)
            full = c.cmp("==", left, n)
            r = None
            if epilogue.residual:
                with c.when(c.b.not_(full)), c.loop(0, left) as k:
                    of.store(of.load(of.at(other, j, k)), of.at(cut_in, k))
                r = of.load(c.b.select(full, of.at(other, j), cut_in), n)
            x = c.load(c.at(held, c.mul(i, tile.columns), j), n)
            x = epilogue.emit(c, c.b.fadd(x, c.load(c.at(w.bias, j), n)), r)
            of.store(x, c.b.select(full, of.at(to, j), cut_out))
            with c.when(c.b.not_(full)), c.loop(0, left) as k:
                of.store(of.load(of.at(cut_out, k)), of.at(to, j, k))

        with c.loop(0, rows) as i:
            to, other = places(i)
            if whole:
                for at, lanes in together_in(tile.columns):
                    write(i, to, other, at, lanes)
                return
            with c.loop(0, w.columns, n) as j:
                (partial(write, lanes=n) if llvm.has_masks() else write_cut)(i, to, other, j)

    def finish() -> None:
        full = c.cmp("==", w.columns, tile.columns)
        if not llvm.has_masks():
            if epilogue.heavy:
                in_a_loop()
            else:
                c.either(full, at_once, in_a_loop)
        elif epilogue.heavy:
            c.either(full, partial(in_a_loop, True), in_a_loop)
        else:
            c.either(full, at_once, partial(at_once, w.columns))

    c.either(c.cmp("!=", w.last, 0), finish, keep)
    c.ret()
    return c


def _multiply(form: ProductKernel, c: Code, words: Value, thread: Value, threads: Value) -> None:
    tiles_of, tile = _product(c.module, form), form.tile
    wide, each, step = tile.columns, tile.rows * tile.columns, width() if by_lane() else 4
    a, table, b, out, outs, bias, res, ress, zeros, room, starts = c.pointers(words, 11)
    segments, length, count, columns, groups, block, stretch, across = c.words(words, 11, 8)
    depth_a, depth_b, step_a, step_b, few = c.words(words, 19, 5)
    of, packed = Stored(c, form.stored), Stored(c, form.panel)
    panels = c.div(c.add(columns, wide - 1), wide)
    wide_team, everything = c.least(across, threads), c.mul(groups, panels)
    tall_team = c.div(threads, wide_team)
    down, beside = c.split(thread, wide_team)
    mine = c.b.select(c.cmp("<", down, tall_team), count, c.i(0))  # threads left over have no rows
    p0, p1 = c.share(everything, beside, wide_team)
    m0, m1 = c.share(mine, down, tall_team)
    kept = c.at(room, c.mul(thread, everything, block, each))
    with c.loop(m0, m1, block) as top, c.loop(0, segments, stretch) as s, c.loop(p0, p1) as p:
        bottom = c.least(m1, c.add(top, block))
        here = c.least(c.sub(segments, s), stretch)
        first = c.b.zext(c.cmp("==", s, 0), I64)
        last = c.b.zext(c.cmp("==", c.add(s, here), segments), I64)
        group, inside = c.split(p, panels)
        column = c.mul(inside, wide)
        a_at, b_at, c_at, r_at = (c.word(starts, c.add(c.mul(group, 4), i)) for i in range(4))
        if form.outer:
            panel, factor = inside, c.at(b, b_at, c.mul(inside, depth_b))
        else:
            panel = c.add(c.mul(b_at, panels), inside)
            row = c.add(c.mul(panel, depth_b), c.mul(s, length))
            factor = packed.at(b, c.mul(row, wide))
        sums = c.at(kept, c.mul(c.sub(p, p0), block, each))
        # each tile of this panel prefetches an equal part of the next panel into L2
        tiles, stretch_bytes = c.sub(bottom, top), c.mul(here, length, wide * packed.bytes)
        pace = c.div(step * wide * packed.bytes, tiles)
        part = c.div(stretch_bytes, tiles)
        after = packed.at(factor, c.mul(depth_b, wide))
        with c.loop(top, bottom) as m:
            if form.outer:
                from_a = c.at(a, a_at, c.mul(m, depth_a))
                where = c.mul(s, 2)
            else:
                from_a, where = of.at(a, a_at), c.mul(c.add(c.mul(m, segments), s), tile.rows)
            rows_of_a = from_a, c.at(table, where, of=I32), here, length, few
            to = of.at(out, c_at, column), c.at(outs, c.mul(m, tile.rows), of=I32)
            added = c.at(bias, c.mul(panel, wide)), of.at(res, r_at, column)
            there = c.at(ress, c.mul(m, tile.rows), of=I32), zeros
            left = c.least(c.sub(columns, column), wide)
            kept_at = c.at(sums, c.mul(c.sub(m, top), each)), first, last
            soon = c.at(after, c.mul(c.sub(m, top), part), of=I8), pace
            at = *rows_of_a, factor, *to, *added, *there, left, *kept_at, *soon, step_a, step_b
            c.call(tiles_of, *at)


# ---- preparing calls ---------------------------------------------------------------------------


def in_tiles(offsets: np.ndarray, tile: Tile) -> torch.Tensor:
    """Return offsets [rows, segments] as the kernel reads them, [tile][segment][row]; rows that
    fill up the last tile do not exist: −1."""
    rows, segments = offsets.shape
    full = np.pad(offsets, ((0, -rows % tile.rows), (0, 0)), constant_values=-1)
    tiled = full.reshape(-1, tile.rows, segments).transpose(0, 2, 1)
    return torch.from_numpy(np.ascontiguousarray(tiled, np.int32))


@lru_cache(maxsize=64)
def zeros(length: int) -> torch.Tensor:
    return torch.zeros(length)


@dataclass(frozen=True)
class Prepared:
    """``calls(A, C, R, B, bias)`` takes their addresses; ``workspace`` is scratch memory in bytes.
    B and the bias are ignored if they were packed before."""

    calls: Callable[[Word, Word, Word, Word, Word], tuple[Call, ...]]
    workspace: int


def prepare(
    rows: Rows | OuterRows,
    columns: int,
    factor: Packed,
    bias: Packed,
    form: ProductKernel,
    across: int,
) -> Prepared:
    """Prepare a product of ``rows`` and a packed factor; ``across`` threads split ``columns``."""
    tile, count, groups = form.tile, len(rows.c), len(rows.groups)
    outer = isinstance(rows, OuterRows)
    fold = FOLD if rows.a.shape[1] == 1 else FOLD // 2
    fold = FOLD // 4 if tile.rows == 1 else fold
    if outer:  # numbers are added one by one: the error is least with parts of √K numbers
        fold = min(max(isqrt(rows.a.shape[1] * rows.length), FOLD // 8), FOLD // 2)
    offsets, length, stretch = in_pieces(rows.a, rows.length, rows.steps if outer else (1,), fold)
    form = replace(form, folded=length > fold)
    segments = offsets.shape[1]
    if outer:
        depths, steps = rows.pitch, rows.steps
        table = torch.from_numpy(np.ascontiguousarray(offsets.T, np.int32))
    else:
        depths, steps = (0, segments * length + rows.spare), (0, 0)
        table = in_tiles(offsets, tile)
    outs = in_tiles(rows.c, tile)
    ress = outs if rows.r is None else in_tiles(rows.r, tile)
    starts = torch.from_numpy(np.ascontiguousarray(rows.groups, np.int64))
    empty = zeros(max(length, tile.columns, 64))
    panels = groups * -(-columns // tile.columns)
    cut = stretch < segments
    # tiles whose A (one stretch) and sums or results fit in L2; fewer if all panels fit there, but
    # not all results, so that neighbouring results are written soon after each other
    wide = 4 * groups * columns
    near = not cut and wide * segments * length <= L2_BYTES < wide * count / 2
    together = 4 * min(stretch, segments) * length + (wide if cut or near else 0)
    fit = (L2_BYTES // 3 if near else L2_BYTES) // (max(together, 1) * tile.rows)
    block = max(1, min(fit, len(outs)))
    kept = panels * block * tile.rows * tile.columns if cut else 0
    room = Room("sums", 0, kept) if kept else 0
    threaded = 2.0 * count * groups * columns * segments * length > SERIAL_FLOPS
    size, key = f"{tile.rows}x{tile.vectors} of {width()}", form.epilogue.key
    kind = f"{'outer product' if outer else 'matmul'} {size} {key}{' folded' * form.folded}"
    code = llvm.load_run(f"{kind} {form.stored} by {form.panel}", partial(_multiply, form))
    sizes = (segments, length, len(outs), columns, groups, block, stretch, across)
    sizes += (*depths, *steps, fold if form.folded else max(1, fold // length))

    def calls(a: Word, out: Word, residual: Word, b: Word, start: Word) -> tuple[Call, ...]:
        (packing, panels), (beside, begin) = factor(b), bias(start)
        words = (a, table, panels, out, outs, begin, residual, ress, empty, room, starts, *sizes)
        return (*packing, *beside, Call(code, words, threaded))

    return Prepared(calls, 4 * kept * torch.get_num_threads())
