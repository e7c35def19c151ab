"""Backward of LayerNorm and RMSNorm.

    hat = (x − mean) · rstd                      inner = grad · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ grad · hat                       dbias = Σ grad

The statistics are computed again from x. If the forward pass saved them, that would cost only 8
bytes a row, but couple the two passes; computing them is hidden behind the reads from memory.
The variance is that of centred values, so that mean/std = 1000 loses nothing.

Bytes, counted in tensors of the size of x:

a row fits in registers    read x, grad (extra), write dx                        3, with extra 4
long rows                  sums of each row first, then x and grad again, by     5, with extra 6
                           blocks of columns

Programs keep the sums for dweight and dbias of all their rows in registers and leave them as
partial results, [programs, N] in float32, which a second kernel adds up in a fixed order: no
atomics, the same bits every time.

Elementwise work around the norm is done in the same kernel: ``grad`` may be computed from other
tensors, as a sum of gradients is, and other tensors may be computed from dx, as the gradient before
a dropout is; one of these may be summed down the columns, too, for the gradient of a bias. Nothing
of that is read or written a second time.

Generated code makes dx in one kernel and each sum down the columns in another: 5 to 7 tensors where
this takes 3. On an H200 in bfloat16, 16384 × 4096, forward and backward take 0.78 of the time of
torch.compile for RMSNorm and 0.66 for LayerNorm (bench/results/norms-h200.md).
"""

from collections import namedtuple
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_load import formula_source, functions
from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.ops.formula import Traced

# What a kernel reads and writes; None where there is nothing, or where it is not wanted. sums: five
# numbers for each row, if rows are long. before: tensors that grad is computed from; after: tensors
# that enter, with dx, into ``made``, one of which is summed down the columns to dmade.
Operands = namedtuple(
    "Operands",
    "x grad weight extra dx dweight dbias sums before after made dmade",
    defaults=(None,) * 10,
)

# Elementwise work before and after the norm: functions of Triton, or None; MADE: results of AFTER;
# SUMMED: which of them is summed, or -1.
Around = namedtuple("Around", "BEFORE AFTER MADE SUMMED", defaults=(None, None, 0, -1))

# Constants: rows of N elements, in tiles of R rows and BLOCK columns; EVEN: all tiles are full;
# WIDE: the type of sums.
Rows = namedtuple("Rows", "N EPS CENTRED WIDE BLOCK R EVEN STAGES CHAIN")

SUMS = ("dweight", "dbias", "dmade")  # what is summed down the columns

# ---- pieces --------------------------------------------------------------------------------------


@triton.jit
def read(pointer, inside, EVEN: tl.constexpr):
    """Load, without a mask where every element is inside: then loads have 16 bytes."""
    if EVEN:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=inside, other=0.0)


@triton.jit
def write(pointer, value, inside, EVEN: tl.constexpr):
    if EVEN:
        tl.store(pointer, value.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def over_root(v):
    """Return 1 / √v, for float64 without the GPU's approximation, which is not exact enough. Where
    v is infinite, squares have overflowed: that gives nan, not a gradient of 0."""
    if v.dtype == tl.float64:
        r = 1.0 / tl.sqrt(v)
    else:
        r = tl.rsqrt(v)
    return tl.where(v == float("inf"), float("nan"), r)


# for sums of several values along rows in one reduction: warps then wait for each other only once


@triton.jit
def _plus2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _plus3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _plus4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _first_of_rows(x, tile, rows, C: tl.constexpr):
    """Load the first element of each row of a tile; 0 for rows that do not exist."""
    r = tile * C.R + tl.arange(0, C.R)[:, None]
    return tl.load(x + r.to(tl.int64) * C.N, mask=(r >= 0) & (r < rows), other=0.0).to(C.WIDE)


@triton.jit
def _only(v, inside, C: tl.constexpr):
    """Return v, and 0 where it is not inside."""
    if C.EVEN:
        return v
    else:
        return tl.where(inside, v, 0.0)


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _rows(t, rows, C: tl.constexpr, A: tl.constexpr):
    """A persistent program takes R rows at a time, the last first, and keeps sums of its columns:
    of all columns, or of a block of them where rows are so long that their sums were computed
    before.

    A mean of 1000 is rounded by 3e-5 in float32, and so would be every centred value. What is left
    of the mean after subtracting it shows in the next sums and is taken out as well.

    Elements of 16 bits are coarser than that. They are taken relative to the first one of their
    row, which is loaded while the row before is worked on: then all sums are one reduction, and
    warps wait for each other only once. The first element is at most √N deviations from the mean,
    so what the variance loses to cancellation is at most N roundings of float32, less than one of
    16 bits."""
    LONG: tl.constexpr = t.sums is not None
    enter(C.CHAIN, not LONG)
    COARSE: tl.constexpr = t.x.dtype.element_ty.primitive_bitwidth < 32 and C.CENTRED and not LONG
    ACROSS: tl.constexpr = 1 if LONG else 0  # programs of neighbouring columns start together
    first, step = tl.program_id(ACROSS), tl.num_programs(ACROSS)
    c = tl.arange(0, C.BLOCK)[None, :]
    if LONG:
        c += tl.program_id(0) * C.BLOCK
    column = c < C.N
    if t.weight is not None:
        w = read(t.weight + c, column, C.N % C.BLOCK == 0).to(C.WIDE)
    if t.dweight is not None:
        sum_w = tl.zeros((C.R, C.BLOCK), C.WIDE)
    if t.dbias is not None:
        sum_b = tl.zeros((C.R, C.BLOCK), C.WIDE)
    if t.dmade is not None:
        sum_m = tl.zeros((C.R, C.BLOCK), C.WIDE)
    tiles = tl.cdiv(rows, C.R)
    if COARSE:
        next_pivot = _first_of_rows(t.x, tiles - 1 - first, rows, C)
    for i in tl.range(first, tiles, step, num_stages=C.STAGES):
        r = (tiles - 1 - i) * C.R + tl.arange(0, C.R)[:, None]
        inside = (r < rows) & column
        at = r.to(tl.int64) * C.N + c
        v = read(t.x + at, inside, C.EVEN).to(C.WIDE)
        if A.BEFORE is None:
            g = read(t.grad + at, inside, C.EVEN).to(C.WIDE)
        else:
            g = _only(A.BEFORE(t.before, at, inside), inside, C)
        inner = g
        if t.weight is not None:
            inner = g * w
        if LONG:
            of = t.sums + r.to(tl.int64) * 5
            rstd = read(of + 2, r < rows, C.EVEN)
            if C.CENTRED:
                v -= read(of, r < rows, C.EVEN)
                v -= read(of + 1, r < rows, C.EVEN)
                level = read(of + 4, r < rows, C.EVEN)
            slope = read(of + 3, r < rows, C.EVEN)
        else:
            if COARSE:
                pivot = next_pivot
                next_pivot = _first_of_rows(t.x, tiles - 1 - i - step, rows, C)
                v = _only(v - pivot, inside, C)
                terms = (v, v * v, inner * v, inner)
                off, squares, products, of_inner = tl.reduce(terms, 1, _plus4, keep_dims=True)
                off /= C.N
                v = _only(v - off, inside, C)
                squares = tl.maximum(squares - off * off * C.N, 0.0, tl.PropagateNan.ALL)
                products -= off * of_inner
            elif C.CENTRED:
                mean, of_inner = tl.reduce((v, inner), 1, _plus2, keep_dims=True)
                v = _only(v - mean / C.N, inside, C)
                terms = (v, v * v, inner * v)
                off, squares, products = tl.reduce(terms, 1, _plus3, keep_dims=True)
                off /= C.N
                v = _only(v - off, inside, C)
                squares -= off * off * C.N
                products -= off * of_inner
            else:
                squares, products = tl.reduce((v * v, inner * v), 1, _plus2, keep_dims=True)
            rstd = over_root(squares / C.N + C.EPS)
            if not C.EVEN:  # or eps = 0 makes nan of rows that are not there
                rstd = tl.where(r < rows, rstd, 0.0)
            slope = products * rstd / C.N
            if C.CENTRED:
                level = of_inner / C.N
        v *= rstd
        if t.dweight is not None:
            sum_w += g * v
        if t.dbias is not None:
            sum_b += g
        if t.dx is not None or A.AFTER is not None:
            d = inner - v * slope
            if C.CENTRED:
                d -= level
            d *= rstd
            if t.extra is not None:
                d += read(t.extra + at, inside, C.EVEN).to(C.WIDE)
            if t.dx is not None:
                write(t.dx + at, d, inside, C.EVEN)
            for k in tl.static_range(A.MADE):
                m = A.AFTER(d, t.after, at, inside, k)
                if t.made[k] is not None:
                    write(t.made[k] + at, m, inside, C.EVEN)
                if A.SUMMED == k:
                    sum_m += _only(m, inside, C)
    c = tl.arange(0, C.BLOCK)
    if LONG:
        c += tl.program_id(0) * C.BLOCK
    out = first * C.N + c
    if t.dweight is not None:
        write(t.dweight + out, tl.sum(sum_w, 0), c < C.N, C.N % C.BLOCK == 0)
    if t.dbias is not None:
        write(t.dbias + out, tl.sum(sum_b, 0), c < C.N, C.N % C.BLOCK == 0)
    if t.dmade is not None:
        write(t.dmade + out, tl.sum(sum_m, 0), c < C.N, C.N % C.BLOCK == 0)


@triton.jit
def _sums_of_rows(t, C: tl.constexpr):
    """Store the mean, what its rounding left of it, rstd, mean(inner · hat) and mean(inner) of one
    row, which is read block by block, the second time from L2."""
    enter(C.CHAIN, True)
    EVEN: tl.constexpr = C.N % C.BLOCK == 0
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, C.BLOCK)
    x, grad = t.x + r * C.N, t.grad + r * C.N
    mean = tl.sum(tl.zeros((C.BLOCK,), C.WIDE), 0)
    if C.CENTRED:
        total = tl.zeros((C.BLOCK,), C.WIDE)
        for o in range(0, C.N, C.BLOCK):
            total += read(x + o + c, o + c < C.N, EVEN).to(C.WIDE)
        mean = tl.sum(total, 0) / C.N
    left = tl.zeros((C.BLOCK,), C.WIDE)
    squares = tl.zeros((C.BLOCK,), C.WIDE)
    products = tl.zeros((C.BLOCK,), C.WIDE)
    inner = tl.zeros((C.BLOCK,), C.WIDE)
    for o in range(0, C.N, C.BLOCK):
        inside = o + c < C.N
        v = read(x + o + c, inside, EVEN).to(C.WIDE) - mean
        g = read(grad + o + c, inside, EVEN).to(C.WIDE)
        if t.weight is not None:
            g *= read(t.weight + o + c, inside, EVEN).to(C.WIDE)
        if not EVEN:
            v = tl.where(inside, v, 0.0)
        left += v
        squares += v * v
        products += g * v
        inner += g
    off = mean  # 0 where there is no mean
    if C.CENTRED:
        off = tl.sum(left, 0) / C.N
    of_inner = tl.sum(inner, 0) / C.N
    rstd = over_root(tl.sum(squares, 0) / C.N - off * off + C.EPS)
    sums = t.sums + r * 5
    tl.store(sums, mean)
    tl.store(sums + 1, off)
    tl.store(sums + 2, rstd)
    tl.store(sums + 3, (tl.sum(products, 0) / C.N - off * of_inner) * rstd)
    tl.store(sums + 4, of_inner)


# How partial results are summed: KINDS of them, in tiles of R rows and BLOCK columns.
Totals = namedtuple("Totals", "KINDS R BLOCK CHAIN")


@triton.jit
def _add_up(partials, results, count, n, C: tl.constexpr):
    """Sum several kinds of partial results [count, n] down the columns."""
    enter(C.CHAIN, False)
    c = tl.program_id(0) * C.BLOCK + tl.arange(0, C.BLOCK)
    for k in tl.static_range(C.KINDS):
        total = tl.zeros((C.R, C.BLOCK), partials[k].dtype.element_ty)
        for first in range(0, count, C.R):
            r = first + tl.arange(0, C.R)[:, None]
            at = r.to(tl.int64) * n + c[None, :]
            there = (r < count) & (c[None, :] < n)
            total += tl.load(partials[k] + at, mask=there, other=0.0)
        write(results[k] + c, tl.sum(total, 0), c < n, False)


ROWS, SUMS_OF_ROWS = Launchable(_rows), Launchable(_sums_of_rows)
LONG, ADD_UP = Launchable(_rows, follows=True), Launchable(_add_up, follows=True)

# ---- the calls

COLUMNS = 512  # columns of a program, where rows are long


def wide_types(size: int) -> tuple[torch.dtype, tl.dtype]:
    """Return the type of sums where elements have ``size`` bytes, torch's and Triton's."""
    return (torch.float64, tl.float64) if size == 8 else (torch.float32, tl.float32)


@lru_cache(maxsize=512)
def elementwise(formula: Traced, exact: bool, even: bool, first: str = "") -> Any:
    """Return a Triton function that applies a formula to the elements of tensors at one place; the
    formula's input ``first``, if given, is a value in registers. It returns result number I."""
    names = formula.inputs[bool(first) :]
    mask = "" if even else ", mask=inside, other=0"
    lines = [
        f"    {v} = tl.load(given[{i}] + at{mask}).to(tl.float32)" for i, v in enumerate(names)
    ]
    which = "[I]" if formula.others else ""
    lines.append(f"    return formula({', '.join(formula.inputs)}){which}")
    given = f"{first}, given, at, inside, I: tl.constexpr" if first else "given, at, inside"
    body = "\n".join((f"@triton.jit\ndef apply({given}):", *lines))
    return functions(f"{formula_source(formula, exact)}\n\n{body}\n")["apply"]


def backward(work: Any, way: Any, before: Any = None, after: Any = None) -> Callable[..., None]:
    """Return a function that fills dx, dweight and dbias, those that are there. ``work`` and
    ``way`` are those of ``engines/triton/norm.py``. ``before``: a formula for grad; ``after``: a
    formula with dx as its first input, and the number of the result that is summed."""
    n, rows, is_long = work.columns, work.rows, work.is_long
    kind, wide = wide_types(work.size)
    block = COLUMNS if is_long else power_of_two(n)
    even = n % block == 0 and rows % way.rows == 0
    common, exact, around = (n, work.eps, work.centred, wide), work.size > 2, Around()
    if before is not None:
        around = around._replace(BEFORE=elementwise(before, exact, even))
    if after is not None:
        formula, summed = after
        last = elementwise(formula, exact, even, formula.inputs[0])
        around = around._replace(AFTER=last, MADE=1 + len(formula.others), SUMMED=summed)

    def run(t: Operands, chain: bool) -> None:
        constants = Rows(*common, block, way.rows, even, way.stages, chain)
        if not is_long:
            ROWS((way.programs,), t, rows, C=constants, A=around, warps=way.warps)
            return
        sums = torch.empty((rows, 5), dtype=kind, device=t.x.device)
        read = Operands(t.x, t.grad, t.weight, sums=sums)
        SUMS_OF_ROWS((rows,), read, C=Rows(*common, 4096, 1, False, 1, chain), warps=8)
        grid = (-(-n // COLUMNS), way.programs)
        LONG(grid, t._replace(sums=sums), rows, C=constants, A=around, warps=way.warps)

    return with_partial_sums(run, way.programs, n, kind)


def with_partial_sums(
    first: Callable[[Any, bool], None], count: int, n: int, wide: torch.dtype
) -> Callable[[Any], None]:
    """Return a call that makes sums down the columns, from ``first``, which fills [count, n]
    partial results of each."""

    def run(t: Any) -> None:
        chain = chained(t.x.device)
        asked = {name: getattr(t, name, None) for name in SUMS}
        results = {name: total for name, total in asked.items() if total is not None}
        if count == 1 or not results:
            first(t, chain)
            return
        partials = {name: t.x.new_empty((count, n), dtype=wide) for name in results}
        first(t._replace(**partials), chain)
        grid, tile = (-(-n // 32),), Totals(len(results), 64, 32, chain)
        ADD_UP(grid, tuple(partials.values()), tuple(results.values()), count, n, C=tile, warps=8)

    return run
