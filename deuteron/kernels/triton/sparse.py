"""A sparse matrix times a dense one, and the gradient of its values.

    y[i, :] = Σ values[e] · x[columns[e], :]             over the entries e of row i
    values[e] = Σ left[row of e, n] · right[columns[e], n]     over n

Entries are numbers, or blocks that tensor cores multiply. Bytes: a row of x for every entry. Those
come from L2 as long as x fits there, so speed depends on how many loads are under way: a program
has one row and a block of columns, loads several rows of x at once, and meanwhile the column
numbers of the next entries.

Rows may differ a lot in length. The list of entries is cut into chunks of one size, regardless of
rows. A row as long as two chunks holds at least one whole chunk. Separate programs add up the whole
chunks inside such rows, and a second kernel adds these sums and what is left at both ends, always
in the same order. So the work of any row is split without knowing its length before the launch.
Where the structure is known when the kernel is built, and no row is long, none of that is launched.

Nothing outside of x is read, whatever the structure says: starts are clamped, columns masked, and a
row for which that was needed is nan.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

# rows, entries, size: rows, entries and columns of the sparse matrix, counted in blocks if entries
# are blocks; n: columns of x and y; line, to_line, other: row strides of x, y and the second
# factor; steps: halvings of the interval until a search has found a row.
Matrix = namedtuple("Matrix", "rows entries size n line to_line other steps")

# The height and width of an entry, both 0 for numbers; columns of x and entries at a time; entries
# in a chunk; and how tensor cores multiply float32.
Tile = namedtuple("Tile", "h w columns entries chunk precision")


@triton.jit
def _row(starts, row, at):
    """Return begin and end of a row's entries, clamped, and whether its starts were valid."""
    begin = tl.load(starts + row).to(tl.int64)
    end = tl.load(starts + row + 1).to(tl.int64)
    sound = (begin >= 0) & (begin <= end) & (end <= at.entries)
    sound = sound & ((row > 0) | (begin == 0)) & ((row < at.rows - 1) | (end == at.entries))
    begin = tl.minimum(tl.maximum(begin, 0), at.entries)
    return begin, tl.minimum(tl.maximum(end, begin), at.entries), sound


@triton.jit
def _row_of(starts, entry, at):
    """Return the last row that starts at an entry or before it."""
    low, high = entry * 0, entry * 0 + at.rows
    for _ in range(at.steps):
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= entry
        low, high = tl.where(before, middle, low), tl.where(before, high, middle)
    return low


@triton.jit
def _numbers(columns, values, x, begin, end, n, at, T: tl.constexpr, WIDE: tl.constexpr):
    """Σ value · row of x, over entries that are numbers: [columns]."""
    several, inside_n = tl.arange(0, T.entries), (n < at.n)[None, :]
    acc = tl.zeros((T.entries, T.columns), WIDE)
    column = tl.load(columns + begin + several, mask=begin + several < end, other=0)
    value = tl.load(values + begin + several, mask=begin + several < end, other=0)
    for first in range(begin, end, T.entries):
        place = first + several
        live, soon = place < end, place + T.entries < end
        there = (column >= 0) & (column < at.size)
        line = x + column.to(tl.int64) * at.line
        part = tl.load(
            line[:, None] + n[None, :], mask=(live & there)[:, None] & inside_n, other=0
        ).to(WIDE)
        factor = tl.where(there, value.to(WIDE), float("nan"))
        column = tl.load(columns + place + T.entries, mask=soon, other=0)
        value = tl.load(values + place + T.entries, mask=soon, other=0)
        acc += factor[:, None] * part
    return tl.sum(acc, 0)


@triton.jit
def _blocks(columns, values, x, begin, end, n, at, T: tl.constexpr):
    """Σ block · rows of x, over entries that are blocks: [h, columns]."""
    down, across = tl.arange(0, T.h), tl.arange(0, T.w)
    acc = tl.zeros((T.h, T.columns), tl.float32)
    for entry in range(begin, end):
        column = tl.load(columns + entry)
        there = (column >= 0) & (column < at.size)
        block = tl.load(values + entry * (T.h * T.w) + down[:, None] * T.w + across[None, :])
        line = x + (column.to(tl.int64) * T.w + across) * at.line
        inside = there & (n < at.n)[None, :] & (across >= 0)[:, None]
        part = tl.load(line[:, None] + n[None, :], mask=inside, other=float("nan"))
        acc = tl.dot(block, part, acc, input_precision=T.precision)
    return acc


@triton.jit
def _added(columns, values, x, begin, end, n, at, T: tl.constexpr, WIDE: tl.constexpr):
    if T.h == 0:
        return _numbers(columns, values, x, begin, end, n, at, T, WIDE)
    else:
        return _blocks(columns, values, x, begin, end, n, at, T)


@triton.jit
def _place(index, n, line, T: tl.constexpr):
    """Return offsets of row ``index``, an int64, of a result, or of the rows of a block."""
    if T.h == 0:
        return index * line + n
    else:
        return (index * T.h + tl.arange(0, T.h))[:, None] * line + n[None, :]


@triton.jit
def _here(n, at, T: tl.constexpr):
    """Return which numbers at the offsets of :func:`_place` exist."""
    if T.h == 0:
        return n < at.n
    else:
        return (n < at.n)[None, :] & (tl.arange(0, T.h) >= 0)[:, None]


@triton.jit
def _spmm(starts, columns, values, x, y, sums, at, T: tl.constexpr, WIDE: tl.constexpr):
    """A program has one row that is not long, or one chunk of a long row, and a block of
    columns."""
    number, n = tl.program_id(0), tl.program_id(1) * T.columns + tl.arange(0, T.columns)
    here = _here(n, at, T)
    if number < at.rows:
        begin, end, sound = _row(starts, number, at)
        if sums is None or end - begin < 2 * T.chunk:
            acc = _added(columns, values, x, begin, end, n, at, T, WIDE)
            acc = tl.where(sound, acc, float("nan")).to(y.dtype.element_ty)
            tl.store(y + _place(number.to(tl.int64), n, at.to_line, T), acc, mask=here)
    elif sums is not None:
        chunk = (number - at.rows).to(tl.int64)
        first = chunk * T.chunk
        begin, end, _ = _row(starts, _row_of(starts, first, at), at)
        if (end - begin >= 2 * T.chunk) & (begin <= first) & (first + T.chunk <= end):
            acc = _added(columns, values, x, first, first + T.chunk, n, at, T, WIDE)
            tl.store(sums + _place(chunk, n, at.n, T), acc, mask=here)


@triton.jit
def _long(starts, columns, values, x, y, sums, at, T: tl.constexpr, WIDE: tl.constexpr):
    """A program has one row, if it is long, and a block of columns."""
    row, n = tl.program_id(0), tl.program_id(1) * T.columns + tl.arange(0, T.columns)
    begin, end, sound = _row(starts, row, at)
    if end - begin >= 2 * T.chunk:
        here = _here(n, at, T)
        first, last = (begin + T.chunk - 1) // T.chunk, end // T.chunk
        acc = _added(columns, values, x, begin, first * T.chunk, n, at, T, WIDE)
        acc += _added(columns, values, x, last * T.chunk, end, n, at, T, WIDE)
        for chunk in range(first, last):
            acc += tl.load(sums + _place(chunk, n, at.n, T), mask=here, other=0)
        acc = tl.where(sound, acc, float("nan")).to(y.dtype.element_ty)
        tl.store(y + _place(row.to(tl.int64), n, at.to_line, T), acc, mask=here)


@triton.jit
def _sddmm(starts, columns, left, right, out, at, T: tl.constexpr, WIDE: tl.constexpr):
    """A program has several entries that are numbers, or one entry that is a block."""
    several = tl.arange(0, T.columns)
    if T.h == 0:
        entry = tl.program_id(0).to(tl.int64) * T.entries + tl.arange(0, T.entries)
        live = entry < at.entries
        safe = tl.minimum(entry, at.entries - 1)
    else:
        safe = tl.program_id(0).to(tl.int64)
    row, column = _row_of(starts, safe, at), tl.load(columns + safe).to(tl.int64)
    begin, end = tl.load(starts + row), tl.load(starts + row + 1)
    sound = (begin <= safe) & (safe < end) & (column >= 0) & (column < at.size)
    column = tl.where(sound, column, 0)
    if T.h == 0:
        a, b = left + row * at.line, right + column * at.other
        acc = tl.zeros((T.entries, T.columns), WIDE)
        for first in range(0, at.n, T.columns):
            n = (first + several)[None, :]
            inside = live[:, None] & (n < at.n)
            p = tl.load(a[:, None] + n, mask=inside, other=0).to(WIDE)
            acc += p * tl.load(b[:, None] + n, mask=inside, other=0).to(WIDE)
        total = tl.where(sound, tl.sum(acc, 1), float("nan"))
        tl.store(out + entry, total.to(out.dtype.element_ty), mask=live)
    else:
        down, across = tl.arange(0, T.h), tl.arange(0, T.w)
        a, b = left + (row * T.h + down) * at.line, right + (column * T.w + across) * at.other
        acc = tl.zeros((T.h, T.w), tl.float32)
        for first in range(0, at.n, T.columns):
            n = first + several
            p = tl.load(a[:, None] + n[None, :], mask=(n < at.n)[None, :], other=0)
            q = tl.load(b[None, :] + n[:, None], mask=(n < at.n)[:, None], other=0)
            acc = tl.dot(p, q, acc, input_precision=T.precision)
        acc = tl.where(sound, acc, float("nan")).to(out.dtype.element_ty)
        place = safe * (T.h * T.w) + down[:, None] * T.w + across[None, :]
        tl.store(out + place, acc)


spmm, long_rows, sddmm = Launchable(_spmm), Launchable(_long), Launchable(_sddmm)


def _wide(dtype: torch.dtype) -> tuple[Any, torch.dtype]:
    """Return the type of sums, Triton's and torch's."""
    double = dtype == torch.float64
    return (tl.float64, torch.float64) if double else (tl.float32, torch.float32)


def prepare_spmm(
    at: Matrix, tile: Tile, dtype: torch.dtype, split: bool, warps: int, stages: int
) -> tuple[Callable[..., None], int]:
    """Return ``run(starts, columns, values, x, y)`` and the bytes of scratch it needs. ``split``:
    there may be long rows."""
    chunks = at.entries // tile.chunk if split and at.entries >= 2 * tile.chunk else 0
    across, (wide, kept) = -(-at.n // tile.columns), _wide(dtype)
    how: dict[str, Any] = {"T": tile, "WIDE": wide, "warps": warps, "stages": stages}
    numbers = chunks * max(tile.h, 1) * at.n

    def run(starts: Any, columns: Any, values: Any, x: Any, y: Any) -> None:
        sums = torch.empty(numbers, dtype=kept, device=x.device) if chunks else None
        given = (starts, columns, values, x, y, sums, at)
        spmm((at.rows + chunks, across), *given, **how)
        if chunks:
            long_rows((at.rows, across), *given, **how)

    return run, numbers * kept.itemsize


def prepare_sddmm(
    at: Matrix, tile: Tile, dtype: torch.dtype, warps: int, stages: int
) -> Callable[..., None]:
    """Return ``run(starts, columns, left, right, values)``."""
    grid = (at.entries if tile.h else -(-at.entries // tile.entries),)
    how: dict[str, Any] = {"T": tile, "WIDE": _wide(dtype)[0], "warps": warps, "stages": stages}
    return sddmm.over(grid, at, **how)
