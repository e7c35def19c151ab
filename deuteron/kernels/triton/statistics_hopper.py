"""Mean and squared spread of every channel of the result of a warp-specialised kernel, taken while
the numbers are in registers, so that batch norm need not read them for its statistics.

Nothing crosses threads before the end. For the rows that a thread holds in the layout of the matrix
units, it adds up, tile after tile, the distances from a pivot, which is the first of its numbers,
and their squares. As the pivot is one of the numbers, the square of its distance from their mean is
at most as many times their variance as there are numbers; so a mean a thousand times the deviation
loses nothing. At the end the sums of a thread become its mean and spread, and the threads of a
group of warps are merged by Chan's formula to one part, as ``batch_norm_passes.forward_merge``
expects it. A program has the same columns in all its tiles; there are no atomics, and two runs give
the same bits.

This adds four operations for each number of the result.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deuteron.kernels.triton.hopper import in_registers

GROUPS = 2  # of warps that multiply, in one program


class Shares(NamedTuple):
    """The number of programs, each of which has the same columns in all its tiles, and how many
    parts of the statistics of a column they store."""

    programs: int
    pieces: int


def shares(tiles: int, across: int, units: int) -> Shares:
    """Return the shares for ``tiles``, ``across`` of them side by side, on ``units``
    multiprocessors."""
    programs = min(tiles, max(units // across, 1) * across)
    return Shares(programs, programs // across * GROUPS)


@gluon.jit
def _by_rows(v, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Split rows as matrix units lay out sums: repeats, four warps, two halves of 8 rows, 8
    rows."""
    return v.reshape([ROWS // 64, 4, 2, 8, COLUMNS])


@gluon.jit
def _own(v):
    """Return the sum over the rows of one thread."""
    return gl.sum(gl.sum(v, 2), 0)


@gluon.jit
def _former(a, b):
    return a


@gluon.jit
def _lowest(v):
    """Return the first row of one thread. In its tile all others lie below it or beside it: if it
    is beyond the end, they are, too."""
    return gl.reduce(gl.reduce(v, 2, _former), 0, _former)


@gluon.jit
def none_yet(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return count, pivot and both sums before the first tile. A thread has one count for all its
    columns."""
    L: gl.constexpr = in_registers(COLUMNS)
    zero = _own(_by_rows(gl.zeros((ROWS, COLUMNS), gl.float32, L), ROWS, COLUMNS))
    return gl.max(zero, 2), zero, zero, zero


@gluon.jit
def with_tile(seen, v, live, whole, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Return count, pivot and sums after one more tile ``v`` [ROWS, COLUMNS] in float32, of which
    the rows ``live`` exist; ``whole``: all of them do."""
    count, pivot, first, second = seen
    more = _own(gl.where(live, 1.0, 0.0).reshape([ROWS // 64, 4, 2, 8]))
    more = gl.convert_layout(more, count.type.layout)  # where they are already
    rows = _by_rows(v, ROWS, COLUMNS)
    pivot = gl.where(gl.expand_dims(count, 2) == 0.0, _lowest(rows), pivot)
    above = rows - gl.expand_dims(gl.expand_dims(pivot, 0), 2)
    if not whole:
        there = gl.where(gl.expand_dims(live, 1), gl.full_like(v, 1.0), 0.0)
        above = gl.where(_by_rows(there, ROWS, COLUMNS) > 0.0, above, 0.0)
    return count + more, pivot, first + _own(above), second + _own(above * above)


@gluon.jit
def _all(v):
    """Return the sum over the threads of a group: within warps first, so that little is
    exchanged."""
    return gl.sum(gl.sum(v, 1), 0)


@gluon.jit
def leave(to, part, n, columns, seen, COLUMNS: gl.constexpr):
    """Merge the threads of a group of warps, and store its part of the statistics; ``to``: where
    the parts go, where the counts go, and how many parts there are."""
    parts, counts, pieces = to
    count, pivot, first, second = seen
    count = gl.expand_dims(count, 2)
    beyond = first / gl.maximum(count, 1.0)
    mean, spread = pivot + beyond, second - first * beyond
    total = _all(count + gl.zeros_like(mean))
    share = 1.0 / gl.maximum(total, 1.0)
    centre = _all(count * mean) * share
    away = mean - gl.expand_dims(gl.expand_dims(centre, 0), 1)
    rest = _all(count * away)  # what rounding left: of equal values the mean is the value itself
    square = _all(spread + count * away * away) - rest * rest * share
    centre += rest * share
    L: gl.constexpr = gl.SliceLayout(0, in_registers(COLUMNS))
    column = n + gl.arange(0, COLUMNS, L)
    there = column < columns
    at = parts + part * columns + column
    gl.store(at, gl.convert_layout(centre, L), mask=there)
    gl.store(at + pieces * columns, gl.convert_layout(square, L), mask=there)
    gl.store(counts + part + 0 * column, gl.convert_layout(total, L), mask=column == 0)
