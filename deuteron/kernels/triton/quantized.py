"""y = f(x · wᵀ, …) with w[n, k] = (q[n, k] − zero) · scale, where q is read in its stored form.

One row of x takes as long as reading the weight: K·N / 2 bytes with 4 bits, a quarter of what 16
bits take. The work for each number must not take longer than reading it, so q never goes through
shared memory in an unpacked form: a 32-bit word of a row holds 8 numbers of 4 bits, or 4 of 8, and
one thread unpacks these in pairs and multiplies them directly. A pair is q[i] and q[i + half],
because those are 16 bits apart in the word; a matrix unit expects pairs of neighbours, so the steps
of the sum are taken in another order, the same for x. Numbers become floats by their bits:
0x6400 | q is 1024 + q in float16, 0x4300 | q is 128 + q in bfloat16.

Few rows (``late``): the factors q − middle are exact, and their sums over part of a group are
scaled in float32. The zero is taken off there, too, times the sum of x, which the matrix unit
computes as well. Programs split the sum (split-K), and a second kernel adds up their parts in a
fixed order and applies f.

Many rows: w is computed and rounded to the type of x, as it would be in memory, and multiplied.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import EpilogueFormula, finish, in_parts

# Rows and columns of the result, steps of the sum, and the groups of steps that share a scale.
Sizes = namedtuple("Sizes", "rows columns steps groups")
# rows, columns: of a tile of the result; steps: at a time; times: so many of these make a group;
# parts: of the split sum; bits: of a number; late: sums are scaled, not numbers; paired: scales are
# read in pairs.
Tile = namedtuple("Tile", "rows columns steps times parts bits late stages paired outs CHAIN")


# ---- numbers that are stored as bits


@triton.jit
def _pair(word, BITS: tl.constexpr, KIND: tl.constexpr):
    """Return the numbers in the low bits of both halves of a word, less the one that stands for
    0."""
    MASK: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
    ONES: tl.constexpr = 0x64006400 if KIND == tl.float16 else 0x43004300
    LEAST: tl.constexpr = (1024.0 if KIND == tl.float16 else 128.0) + (8 if BITS == 4 else 128)
    both = (word & MASK) | ONES
    low = (both & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(KIND, bitcast=True)
    return tl.join(low, high) - tl.full((), LEAST, KIND)


@triton.jit
def _byte(word, shift: tl.constexpr):
    """Return a byte as float32, where 0x4B000000 | byte is 2²³ + byte: bfloat16 has too few digits
    for that."""
    whole = ((word >> shift) & 0xFF) | 0x4B000000
    return whole.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _numbers(word, KIND: tl.constexpr, T: tl.constexpr):
    """Unpack [columns, words] to numbers [columns, steps], in the order that matrix units
    expect."""
    if T.bits == 4:
        first = tl.join(_pair(word, 4, KIND), _pair(word >> 4, 4, KIND))
        last = tl.join(_pair(word >> 8, 4, KIND), _pair(word >> 12, 4, KIND))
        found = tl.join(first, last).reshape(T.columns, T.steps // 32, 4, 2, 2, 2)
        return tl.permute(found, 0, 1, 5, 4, 2, 3).reshape(T.columns, T.steps)
    else:
        word = word ^ -2139062144  # each of the bytes + 128
        if KIND == tl.float16:
            found = tl.join(_pair(word, 8, KIND), _pair(word >> 8, 8, KIND))
        else:
            even = tl.join(_byte(word, 0), _byte(word, 16))
            found = tl.join(even, tl.join(_byte(word, 8), _byte(word, 24)))
        found = found.reshape(T.columns, T.steps // 16, 4, 2, 2)
        return tl.permute(found, 0, 1, 4, 2, 3).reshape(T.columns, T.steps)


@triton.jit
def _in_that_order(x, T: tl.constexpr):
    """Return x [rows, steps] as [steps, rows], the steps in the order of :func:`_numbers`."""
    EACH: tl.constexpr = 32 // T.bits
    words = x.reshape(T.rows, T.steps // (4 * EACH), 4, 2, EACH // 2)
    return tl.permute(words, 0, 1, 4, 2, 3).reshape(T.rows, T.steps).T


@triton.jit
def _of_group(values, n, group, size, T: tl.constexpr):
    """Load a scale or a zero for each column. Those of 16 bits are loaded with their neighbour,
    because a copy that runs ahead of its use moves 4 bytes or more."""
    if T.paired:
        words = values.to(tl.pointer_type(tl.int32))
        both = tl.load(words + n * (size.groups // 2) + group // 2)
        found = (both >> (group % 2 * 16)).to(tl.int16).to(values.dtype.element_ty, bitcast=True)
    else:
        found = tl.load(values + n * size.groups + group)
    return found.to(tl.float32)[:, None]


# ---- kernels


@triton.jit
def _product(x, w, scale, zero, y, others, size, T: tl.constexpr, FINISH: tl.constexpr):
    enter(T.CHAIN, True)
    KIND: tl.constexpr = x.dtype.element_ty
    EACH: tl.constexpr = 32 // T.bits
    MIDDLE: tl.constexpr = 8 if T.bits == 4 else 0
    first_row, first_column = tl.program_id(1) * T.rows, tl.program_id(0) * T.columns
    row, column = first_row + tl.arange(0, T.rows), first_column + tl.arange(0, T.columns)
    inside = (row < size.rows)[:, None]  # where x has few rows, programs read few bytes of it
    n = tl.minimum(
        column, size.columns - 1
    )  # columns beyond the end repeat the last, and are not stored
    line = tl.multiple_of(size.steps // EACH, 4)
    words = w.to(tl.pointer_type(tl.int32)) + n.to(tl.int64)[:, None] * line
    words += tl.arange(0, T.steps // EACH)[None, :]
    lines = x + row.to(tl.int64)[:, None] * tl.multiple_of(size.steps, 32)
    lines += tl.arange(0, T.steps)[None, :]
    count = size.steps // T.steps
    share = tl.cdiv(count, T.parts)
    begin = tl.program_id(2) * share
    sums = tl.zeros((T.columns, T.rows), tl.float32)
    # with num_stages given, the loop also reads ahead what does not enter a product directly
    for step in tl.range(begin, min(begin + share, count), num_stages=T.stages):
        word = tl.load(words + step * (T.steps // EACH))
        a = _in_that_order(tl.load(lines + step * T.steps, mask=inside, other=0.0), T)
        by = _of_group(scale, n, step // T.times, size, T)
        q = _numbers(word, KIND, T)
        if T.late:
            found = tl.dot(q.to(KIND), a)
            if zero is not None:
                off = _of_group(zero, n, step // T.times, size, T) - MIDDLE
                found -= off * tl.dot(tl.full((T.columns, T.steps), 1.0, KIND), a)
            sums += by * found
        else:
            whole = q.to(tl.float32)
            if zero is not None:
                whole -= _of_group(zero, n, step // T.times, size, T) - MIDDLE
            sums = tl.dot((whole * by).to(KIND), a, sums)
    there = inside & (column < size.columns)[None, :]
    to = row.to(tl.int64)[:, None] * size.columns + column[None, :]
    found = sums.T
    if T.parts > 1:
        tl.store(y + tl.program_id(2) * (size.rows * size.columns) + to, found, mask=there)
    else:
        found = FINISH(found, found, others, 0, first_row, first_column, size, T, 0)
        tl.store(y + to, found.to(y.dtype.element_ty), mask=there)


_PRODUCT = Launchable(_product)


def product(size: Sizes, tile: Tile, after: EpilogueFormula, warps: int) -> Callable[..., None]:
    """Return a function (x, w, scale, zero, y, others); w is the weight as it is stored, zero may
    be None."""
    last = finish(after)
    grid = (-(-size.columns // tile.columns), -(-size.rows // tile.rows), tile.parts)
    how = {"warps": warps, "stages": tile.stages}

    def run(x: Any, w: Any, scale: Any, zero: Any, y: Any, others: Sequence[Any]) -> None:
        # the kernel reads these in words of 4 bytes
        w, scale, zero = (
            t.clone() if t is not None and t.data_ptr() & 3 else t for t in (w, scale, zero)
        )

        def leave(parts: Any, here: Tile) -> None:
            _PRODUCT(grid, x, w, scale, zero, parts, (), size, T=here, FINISH=None, **how)

        if tile.parts > 1:
            in_parts(leave, x, (y,), others, size, tile, last)
        else:
            _PRODUCT(grid, x, w, scale, zero, y, tuple(others), size, T=tile, FINISH=last, **how)

    return run
