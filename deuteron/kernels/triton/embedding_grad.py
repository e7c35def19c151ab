"""Rows added to the rows of a table that an index names.

    table[r] += Σ rows[i] over all i with index[i] = r,  in the order of i within blocks of them

Bytes: every row is read once, every named row of the table is read and written once; rows that the
index does not name are not touched. Four launches. First the table is filled with zeros, or with
what the sums are added to, unless it holds that already. Then the entries are sorted by row. Then
blocks of sorted entries are added up; a row whose entries all lie in one block is written, and for
others partial sums are stored. Last these are added up in the order of the blocks. So two runs
agree to the last bit.

Sorting: an entry is a number, its row in the upper bits and its place in the lower ones, and its
rank is how many are smaller. That is entries² comparisons, which for the tens of thousands of a
batch is less work than it takes to launch the dozen kernels of a radix sort.
"""

from collections import namedtuple
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

# Entries of the index, numbers of a row, rows of the table, and the row that nothing is added to,
# or -1.
Size = namedtuple("Size", "entries wide rows zero")
# bits: of an entry's place; long: an entry's number has 64 bits; entries: of a block; wide: numbers
# of a row that a program adds up; ranked: entries that a program ranks; against: how many others at
# a time.
Block = namedtuple("Block", "bits long entries wide ranked against")
RANKED, AGAINST, ENTRIES, MOST_WIDE, BEGUN = 32, 256, 16, 256, 4096


@triton.jit
def _begin(onto, table, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if onto is None:
        tl.store(table + at, tl.zeros((BLOCK,), table.dtype.element_ty), mask=at < size)
    else:
        tl.store(table + at, tl.load(onto + at, mask=at < size), mask=at < size)


@triton.jit
def _number(index, at, s, B: tl.constexpr):
    """Return the sort key of an entry: larger than all others beyond the last entry, and behind the
    table's rows where nothing is to be added."""
    row = tl.load(index + at, mask=at < s.entries, other=0).to(tl.int64)
    row = tl.where((row != s.zero) & (row >= 0) & (row < s.rows), row, s.rows)
    number = tl.where(at < s.entries, (row << B.bits) | at, (s.rows + 1).to(tl.int64) << B.bits)
    return number if B.long else number.to(tl.int32)


@triton.jit
def _rank(index, sorted_, s, B: tl.constexpr):
    at = tl.program_id(0) * B.ranked + tl.arange(0, B.ranked)
    own = _number(index, at, s, B)
    smaller = tl.zeros((B.ranked, B.against), tl.int32)
    for begin in range(0, s.entries, B.against):
        other = begin + tl.arange(0, B.against)
        smaller += (_number(index, other, s, B)[None, :] < own[:, None]).to(tl.int32)
    tl.store(sorted_ + tl.sum(smaller, 1), own, mask=at < s.entries)


@triton.jit
def _row(sorted_, at, s, B: tl.constexpr):
    """Return the row of a sorted entry; -1 before the first entry, and beyond all rows after the
    last."""
    inside = (at >= 0) & (at < s.entries)
    row = (tl.load(sorted_ + at, mask=inside, other=0) >> B.bits).to(tl.int32)
    return tl.where(inside, row, tl.where(at < 0, -1, s.rows + 1))


@triton.jit
def _together(first, sum_, second, more):
    """Combine two stretches of running sums; a sum starts anew where a new row does."""
    return first | second, tl.where(second, more, sum_ + more)


@triton.jit
def _add(rows, sorted_, table, heads, tails, s, B: tl.constexpr):
    block = tl.program_id(0)
    at = block * B.entries + tl.arange(0, B.entries)
    row, before, behind = (
        _row(sorted_, at, s, B),
        _row(sorted_, at - 1, s, B),
        _row(sorted_, at + 1, s, B),
    )
    place = tl.load(sorted_ + at, mask=at < s.entries, other=0) & ((1 << B.bits) - 1)
    column = tl.program_id(1) * B.wide + tl.arange(0, B.wide)
    inside = (column < s.wide)[None, :]
    wanted = (row < s.rows)[:, None] & inside
    value = tl.load(
        rows + place.to(tl.int64)[:, None] * s.wide + column[None, :], mask=wanted, other=0.0
    ).to(tl.float32)
    new = tl.broadcast_to((row != before)[:, None], (B.entries, B.wide))
    _, total = tl.associative_scan((new, value), 0, _together)
    first = _row(sorted_, block * B.entries, s, B)
    begun = first == _row(sorted_, block * B.entries - 1, s, B)  # in a block before
    ends, head = row != behind, (row == first) & begun
    here = (ends & ~head)[:, None] & wanted
    to = table + row.to(tl.int64)[:, None] * s.wide + column[None, :]
    old = tl.load(to, mask=here, other=0.0)
    tl.store(to, (old.to(tl.float32) + total).to(old.dtype), mask=here)
    part = block.to(tl.int64) * s.wide + column[None, :] + tl.zeros_like(row)[:, None]
    tl.store(heads + part, total, mask=(ends & head)[:, None] & wanted)
    last = tl.arange(0, B.entries) == B.entries - 1
    tl.store(tails + part, total, mask=(last & ~ends)[:, None] & wanted)


@triton.jit
def _join(sorted_, table, heads, tails, s, B: tl.constexpr):
    """Finish the row that has its last entries in this block, and its others in blocks before."""
    block = tl.program_id(0)
    row = _row(sorted_, block * B.entries, s, B)
    begun = row == _row(sorted_, block * B.entries - 1, s, B)
    ends = row != _row(sorted_, (block + 1) * B.entries, s, B)
    column = tl.program_id(1) * B.wide + tl.arange(0, B.wide)
    inside = column < s.wide
    if begun & ends & (row < s.rows):
        total = tl.zeros((B.wide,), tl.float32)
        until, found = block, 1
        while found > 0:
            earlier = until - B.entries + tl.arange(0, B.entries)
            same = _row(sorted_, (earlier + 1) * B.entries - 1, s, B) == row
            same &= earlier >= 0
            part = earlier.to(tl.int64)[:, None] * s.wide + column[None, :]
            held = tl.load(tails + part, mask=same[:, None] & inside[None, :], other=0.0)
            total += tl.sum(held, 0)
            until -= B.entries
            found = tl.sum(same.to(tl.int32), 0) // B.entries  # all of them: look further back
        total += tl.load(heads + block.to(tl.int64) * s.wide + column, mask=inside, other=0.0)
        to = table + row.to(tl.int64) * s.wide + column
        old = tl.load(to, mask=inside, other=0.0)
        tl.store(to, (old.to(tl.float32) + total).to(old.dtype), mask=inside)


begin, rank, add, join = (Launchable(fn) for fn in (_begin, _rank, _add, _join))


def add_rows(size: Size) -> tuple[Callable[..., None], int]:
    """Return a function (rows, index, onto, table), and its bytes of scratch; onto: what the rows
    are added to, or None."""
    bits = (size.entries - 1).bit_length()
    long = (size.rows + 1) << bits >= 2**31
    wide = min(triton.next_power_of_2(size.wide), MOST_WIDE)
    block = Block(bits, long, ENTRIES, wide, RANKED, AGAINST)
    blocks, across = triton.cdiv(size.entries, ENTRIES), triton.cdiv(size.wide, wide)
    how = {"B": block, "warps": max(wide // 128, 1)}
    numbers, kind = size.rows * size.wide, torch.int64 if long else torch.int32

    def run(
        rows: torch.Tensor, index: torch.Tensor, onto: torch.Tensor | None, table: torch.Tensor
    ):
        if onto is None or onto.data_ptr() != table.data_ptr():
            begin((triton.cdiv(numbers, BEGUN),), onto, table, numbers, BLOCK=BEGUN, warps=8)
        ranks = torch.empty(size.entries, dtype=kind, device=rows.device)
        parts = torch.empty((2, blocks, size.wide), dtype=torch.float32, device=rows.device)
        rank((triton.cdiv(size.entries, RANKED),), index, ranks, size, B=block)
        add((blocks, across), rows, ranks, table, *parts, size, **how)
        join((blocks, across), ranks, table, *parts, size, **how)

    return run, size.entries * kind.itemsize + 8 * blocks * size.wide
