"""Mean and squared spread of every channel of what a kernel with divided warps makes, taken while
the numbers are in registers, so that batch norm need not read them for its statistics.

Nothing crosses threads before the end: each keeps count, mean and spread of the rows that it holds
in the layout of the matrix units, tile after tile. Of a tile's rows the mean is taken first and the
spread around it after, and both are merged with what came before by Chan's formula, so that no
large sums are subtracted from one another. At the end the threads of a group of warps are merged
the same way: a part, as ``batch_norm_passes.forward_merge`` takes it. A program sees the same
columns in all its tiles; there are no atomics, and two runs give the same bits.

Beside multiplying that is four to five operations for each number of the result.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from deuteron.kernels.triton.hopper import in_registers

GROUPS = 2  # of warps that multiply, in one program


class Shares(NamedTuple):
    """How many programs there are, each of which sees the same columns in all its tiles, and how
    many parts of the statistics of a column they leave."""

    programs: int
    pieces: int


def shares(tiles: int, across: int, units: int) -> Shares:
    """For so many tiles, ``across`` of them side by side, on so many multiprocessors."""
    programs = min(tiles, max(units // across, 1) * across)
    return Shares(programs, programs // across * GROUPS)


@gluon.jit
def _by_rows(v, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Rows as sums of the matrix units lie: repeats, four warps, two halves of 8 lines, 8 lines."""
    return v.reshape([ROWS // 64, 4, 2, 8, COLUMNS])


@gluon.jit
def _own(v):
    """The sum over the rows of one thread."""
    return gl.sum(gl.sum(v, 2), 0)


@gluon.jit
def none_yet(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Count, mean and spread before the first tile. A thread has one count for all its columns."""
    L: gl.constexpr = in_registers(COLUMNS)
    zero = _own(_by_rows(gl.zeros((ROWS, COLUMNS), gl.float32, L), ROWS, COLUMNS))
    return gl.max(zero, 2), zero, zero


@gluon.jit
def with_tile(count, mean, spread, v, live, whole, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """After one more tile ``v`` [ROWS, COLUMNS] in float32, of which the rows ``live`` exist;
    ``whole``: all of them do."""
    more = _own(gl.where(live, 1.0, 0.0).reshape([ROWS // 64, 4, 2, 8]))
    more = gl.convert_layout(more, count.type.layout)  # where they are already
    live = gl.expand_dims(live, 1)
    if not whole:
        v = gl.where(live, v, 0.0)
    centre = _own(_by_rows(v, ROWS, COLUMNS)) * gl.expand_dims(1.0 / gl.maximum(more, 1.0), 2)
    away = _by_rows(v, ROWS, COLUMNS) - gl.expand_dims(gl.expand_dims(centre, 0), 2)
    if not whole:
        there = gl.where(live, gl.full_like(v, 1.0), 0.0)
        away *= _by_rows(there, ROWS, COLUMNS)
    total = count + more
    share = more / gl.maximum(total, 1.0)
    apart = centre - mean
    spread += _own(away * away) + apart * apart * gl.expand_dims(count * share, 2)
    return total, mean + apart * gl.expand_dims(share, 2), spread


@gluon.jit
def _all(v):
    """The sum over the threads of a group: within warps first, so that little is exchanged."""
    return gl.sum(gl.sum(v, 1), 0)


@gluon.jit
def leave(to, part, n, columns, count, mean, spread, COLUMNS: gl.constexpr):
    """Merge the threads of a group of warps, and write its part of the statistics ``to`` where the
    parts are, the counts, and how many parts there are."""
    parts, counts, pieces = to
    count = gl.expand_dims(count, 2)
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
