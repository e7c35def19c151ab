"""y[m, n] = Σ_g scale[n, g] · Σ_k x[m, k] · (q[n, k] − zero[n, g]) + bias[n], k in group g, of a
weight that is read as it is stored, in 8 or 4 bits.

A tile of a few rows by a few columns is summed over 16 steps at a time, in float32: numbers are
widened once for all of its rows, x is loaded once for all of its columns. Sums of a group are
scaled when it ends. Threads take columns, so that each reads its part of the weight once:

    bytes ≈ N·K · bits / 8 + size of x · M·K · ⌈N / columns⌉ (from L1 or L2) + size of y · M·N
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from deuteron.codegen.calls import Call, Word
from deuteron.codegen.llvm import I8, I32, Code, Value, by_lane, constant, load_run, vec, width
from deuteron.kernels.cpu.stored import Stored

STEP = 16  # numbers that are widened together
PART = 4  # lanes of sums that are kept from group to group
SERIAL = 1e5  # fewer operations take less time than waking up a second thread
# Floats in a vector → rows and columns of a tile: for a product with one row, with a few, with
# more. Each addition waits for the one before it to the same sum: wide vectors need more sums at
# once
TILES = {4: ((1, 4), (4, 1), (4, 1)), 8: ((1, 4), (4, 2), (4, 2)), 16: ((1, 8), (4, 4), (8, 2))}


class Form(NamedTuple):
    """What a kernel is made for: the bits of a number, the types of x and of the scales, whether
    there are zeros and a bias, and the tile."""

    bits: int
    kind: str
    scale: str
    zero: bool
    bias: bool
    rows: int
    columns: int


def tile_of(rows: int) -> tuple[int, int]:
    """Return the rows and columns of a tile for a product of ``rows`` rows."""
    one, few, many = TILES[width()]
    return one if rows == 1 else few if rows <= few[0] else many


def _numbers(c: Code, bits: int, line: Value, block: Value) -> Value:
    """Return the next 16 numbers of a row as floats, less the number that stands for 0. The bits
    0x4B000000 | n are 2²³ + n: aarch64 takes several times as long to convert."""
    if bits == 8:
        whole = c.load(c.at(line, c.mul(block, STEP), of=I8), STEP, I8)
        if not by_lane():
            return c.b.sitofp(c.b.sext(whole, vec(STEP, I32)), vec(STEP))
        whole = c.b.xor(whole, constant(I8, -128, STEP))
    else:
        both = c.load(c.at(line, c.mul(block, STEP // 2), of=I8), STEP // 2, I8)
        low = c.b.and_(both, constant(I8, 15, both))
        high = c.b.lshr(both, constant(I8, 4, both))
        whole = c.shuffle(low, high, [i // 2 + i % 2 * STEP // 2 for i in range(STEP)])
    wide = c.b.or_(c.b.zext(whole, vec(STEP, I32)), constant(I32, 0x4B000000, STEP))
    return c.b.fsub(c.b.bitcast(wide, vec(STEP)), c.f(2.0**23 + 2 ** (bits - 1), STEP))


def _folded(c: Code, sums: Value) -> Value:
    half = STEP
    while half > PART:
        half //= 2
        low, high = (c.shuffle(sums, sums, range(n, n + half)) for n in (0, half))
        sums = c.b.fadd(low, high)
    return sums


def _multiply(form: Form, c: Code, words: Value, *thread: Value) -> None:
    x, w, scale, zero, bias, y = c.pointers(words, 6)
    rows, columns, groups, blocks = c.words(words, 6, 4)
    given, scales = Stored(c, form.kind), Stored(c, form.scale)
    steps = c.mul(groups, blocks, STEP)
    tile = [(i, j) for i in range(form.rows) for j in range(form.columns)]
    sums = {at: c.variable(vec(STEP)) for at in tile}
    totals = {at: c.variable(vec(PART)) for at in tile}
    middle = c.f(8.0 if form.bits == 4 else 0.0, STEP)  # already subtracted from the numbers

    def clear(variables: dict[Any, Value], lanes: int) -> None:
        for variable in variables.values():
            c.b.store(c.f(0.0, lanes), variable)

    jobs = c.div(c.add(columns, form.columns - 1), form.columns)
    with c.loop(*c.share(jobs, *thread)) as job:
        # columns and rows that are not there repeat the last one, and are not stored
        column = [c.add(c.mul(job, form.columns), j) for j in range(form.columns)]
        held = [c.least(n, c.sub(columns, 1)) for n in column]
        lines = [c.at(w, c.div(c.mul(n, steps, form.bits), 8), of=I8) for n in held]
        with c.loop(0, rows, form.rows) as first:
            row = [c.add(first, i) for i in range(form.rows)]
            last = c.sub(rows, 1)
            from_x = [given.at(x, c.mul(c.least(m, last), steps)) for m in row]
            clear(totals, PART)
            with c.loop(0, groups) as group:
                places = [c.add(c.mul(n, groups), group) for n in held]
                off = []
                if form.zero:
                    found = (c.splat(scales.load(scales.at(zero, at)), STEP) for at in places)
                    off = [c.b.fsub(each, middle) for each in found]
                clear(sums, STEP)
                with c.loop(c.mul(group, blocks), c.mul(c.add(group, 1), blocks)) as block:
                    at = c.mul(block, STEP)
                    loaded = [given.load(given.at(each, at), STEP) for each in from_x]
                    for j in range(form.columns):
                        numbers = _numbers(c, form.bits, lines[j], block)
                        if form.zero:
                            numbers = c.b.fsub(numbers, off[j])
                        for i in range(form.rows):
                            found = c.fma(loaded[i], numbers, c.get(sums[i, j], vec(STEP)))
                            c.b.store(found, sums[i, j])
                by = [c.splat(scales.load(scales.at(scale, at)), PART) for at in places]
                for i, j in tile:
                    part = _folded(c, c.get(sums[i, j], vec(STEP)))
                    whole = c.fma(by[j], part, c.get(totals[i, j], vec(PART)))
                    c.b.store(whole, totals[i, j])
            for i, j in tile:
                found = c.reduce(c.get(totals[i, j], vec(PART)), c.b.fadd)
                if form.bias:
                    found = c.b.fadd(found, given.load(given.at(bias, held[j])))
                there = c.b.and_(c.cmp("<", row[i], rows), c.cmp("<", column[j], columns))
                with c.when(there):
                    given.store(found, given.at(y, c.add(c.mul(row[i], columns), column[j])))


def prepare(form: Form, rows: int, columns: int, groups: int, group: int) -> Callable[..., Call]:
    """Return ``call(x, weight, scale, zero, bias, y)``, which takes their addresses, and that of x
    in place of what is absent. The size of groups is a multiple of 16."""
    code = load_run(f"quantized {tuple(form)}", partial(_multiply, form))
    threaded = 2.0 * rows * columns * groups * group > SERIAL
    sizes = rows, columns, groups, group // STEP

    def call(*operands: Word) -> Call:
        return Call(code, (*operands, *sizes), threaded)

    return call
