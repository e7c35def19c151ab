"""y = f(x · wᵀ, …) with w[n, k] = (q[n, k] − zero) · scale, of which q is read as it is stored.

One row of x takes as long as the weight takes to read: K·N / 2 bytes of 4 bits are a quarter of
those of 16. What is left to do for each number must not take longer than that, so q never goes
through shared memory in another form: 32 bits of a row are 8 numbers of 4 bits, or 4 of 8, which
one thread takes apart in pairs and multiplies as they are. A pair is q[i] and q[i + half], because
those are 16 bits apart; a matrix unit wants pairs of neighbours, so the steps of the sum are
counted in another order, the same for x. Numbers become floats by their bits: 0x6400 | q is
1024 + q in float16, 0x4300 | q is 128 + q in bfloat16.

Few rows (``late``): sums of q − middle over part of a group, exact factors, are scaled and moved by
the zero in float32, for which the sums of x come from the matrix unit as well. Programs share out
the sum, and a second kernel adds up what they leave, in a fixed order, and goes on with f.

Many rows: w is rounded to the type of x, as it would be in memory, and multiplied.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable, enter
from deuteron.kernels.triton.product import Follows, finish, in_parts

# Rows and columns of the result, steps of the sum, and how many groups they are.
Sizes = namedtuple("Sizes", "rows columns steps groups")
# A tile of the result, the steps it takes at a time and how often to get through a group, into how
# many parts the sum is shared out, the bits of a number, whether sums are scaled, not numbers, and
# whether scales are read in pairs.
Tile = namedtuple("Tile", "rows columns steps times parts bits late stages paired outs CHAIN")


# ---- numbers that are stored as bits


@triton.jit
def _pair(word, BITS: tl.constexpr, KIND: tl.constexpr):
    """The numbers in the low bits of both halves of a word, less the one that stands for 0."""
    MASK: tl.constexpr = 0x000F000F if BITS == 4 else 0x00FF00FF
    ONES: tl.constexpr = 0x64006400 if KIND == tl.float16 else 0x43004300
    LEAST: tl.constexpr = (1024.0 if KIND == tl.float16 else 128.0) + (8 if BITS == 4 else 128)
    both = (word & MASK) | ONES
    low = (both & 0xFFFF).to(tl.uint16).to(KIND, bitcast=True)
    high = (both >> 16).to(tl.uint16).to(KIND, bitcast=True)
    return tl.join(low, high) - tl.full((), LEAST, KIND)


@triton.jit
def _byte(word, shift: tl.constexpr):
    """A byte as a float32, in which 0x4B000000 | byte is 2²³ + byte: bfloat16 has no digit left."""
    whole = ((word >> shift) & 0xFF) | 0x4B000000
    return whole.to(tl.float32, bitcast=True) - 8388736.0


@triton.jit
def _numbers(word, KIND: tl.constexpr, T: tl.constexpr):
    """Of [columns, words] the numbers [columns, steps], in the order of the matrix unit."""
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
    """[rows, steps] of x as [steps, rows], the steps in the order of the numbers."""
    EACH: tl.constexpr = 32 // T.bits
    words = x.reshape(T.rows, T.steps // (4 * EACH), 4, 2, EACH // 2)
    return tl.permute(words, 0, 1, 4, 2, 3).reshape(T.rows, T.steps).T


@triton.jit
def _of_group(values, n, group, size, T: tl.constexpr):
    """A scale or a zero for each column. Those of 16 bits come with their neighbour, because
    nothing smaller than 4 bytes is copied ahead of its use."""
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
    inside = (row < size.rows)[:, None]  # few rows of x are then few bytes, for every program
    n = tl.minimum(
        column, size.columns - 1
    )  # what is not there repeats the last, and is not stored
    line = tl.multiple_of(size.steps // EACH, 4)
    words = w.to(tl.pointer_type(tl.int32)) + n.to(tl.int64)[:, None] * line
    words += tl.arange(0, T.steps // EACH)[None, :]
    lines = x + row.to(tl.int64)[:, None] * tl.multiple_of(size.steps, 32)
    lines += tl.arange(0, T.steps)[None, :]
    count = size.steps // T.steps
    share = tl.cdiv(count, T.parts)
    begin = tl.program_id(2) * share
    sums = tl.zeros((T.columns, T.rows), tl.float32)
    # with its stages named, the loop reads ahead what is not multiplied itself as well
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


def product(size: Sizes, tile: Tile, after: Follows, warps: int) -> Callable[..., None]:
    """A function of x, the weight as it is stored, scale, zero or None, y and the other operands
    of what follows."""
    last = finish(after)
    grid = (-(-size.columns // tile.columns), -(-size.rows // tile.rows), tile.parts)
    how = {"warps": warps, "stages": tile.stages}

    def run(x: Any, w: Any, scale: Any, zero: Any, y: Any, others: Sequence[Any]) -> None:
        # these are read by words
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
