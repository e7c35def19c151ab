"""Backward of LayerNorm and RMSNorm, and the calls for all norms; the kernels of GroupNorm and
InstanceNorm are in ``norm_groups.py``.

    hat = (x − mean) · rstd                      inner = grad · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ grad · hat                       dbias = Σ grad

The statistics are computed again from x. Saved by the forward they would cost 8 bytes a row, which
is nothing, but tie the two together; computing them costs arithmetic that hides behind the memory.
The variance is that of centred values, so that mean/std = 1000 loses nothing.

Bytes, counted in tensors of the size of x:

========  ===========================================================  =======================
rows      a row fits in registers: read x, grad (extra), write dx      3, with extra 4
long      rows that do not: sums of each row first, then x and grad    5, with extra 6
          again, by blocks of columns
========  ===========================================================  =======================

Programs keep the sums for dweight and dbias of all their rows in registers and leave them as
partial results, [programs, N] in float32, which a second kernel adds up in a fixed order: no
atomics, the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.chain import enter
from deuteron.kernels.triton.launch import Launchable, chained
from deuteron.kernels.triton.norm_groups import held, looped
from deuteron.kernels.triton.norm_parts import over_root, read, write
from deuteron.kernels.triton.norm_split import BACKWARD, FORWARD, MOMENTS, SUMS, WHOLE
from deuteron.kernels.triton.norm_ways import COLUMNS, Way, Work, samples, tile_of


@triton.jit
def _plus2(a, b, c, d):
    return a + c, b + d


@triton.jit
def _plus3(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def _two_sums(a, b):
    """Sums along rows of two tiles at once: warps then wait for each other once, not twice."""
    return tl.reduce((a, b), 1, _plus2, keep_dims=True)


@triton.jit
def _three_sums(a, b, c):
    return tl.reduce((a, b, c), 1, _plus3, keep_dims=True)


@triton.jit
def _plus4(a, b, c, d, e, f, g, h):
    return a + e, b + f, c + g, d + h


@triton.jit
def _four_sums(a, b, c, d):
    return tl.reduce((a, b, c, d), 1, _plus4, keep_dims=True)


@triton.jit
def _first_of_rows(x, tile, rows, N: tl.constexpr, R: tl.constexpr):
    """The first element of each row of a tile; 0 for rows that are not there."""
    r = tile * R + tl.arange(0, R)[:, None]
    return tl.load(x + r.to(tl.int64) * N, mask=(r >= 0) & (r < rows), other=0.0)


@triton.jit
def _rows(
    x,
    grad,
    weight,
    extra,
    dx,
    dweight,
    dbias,
    rows,
    N: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A persistent program takes R rows at a time, the last first, and keeps sums of its columns.

    A mean of 1000 is rounded by 3e-5 in float32, and so would be every centred value. What is left
    of the mean after subtracting it shows in the next sums and is taken out as well.

    Elements of 16 bits are coarser than that. They are taken relative to the first of their row,
    which is read while the row before is worked on: all sums are then found at once, and warps wait
    for each other once. The first element is at most √N deviations from the mean, so what the
    variance loses to cancellation is at most N roundings of float32, less than one of 16 bits."""
    enter(CHAIN, True)
    REFINE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth >= 32
    c = tl.arange(0, BLOCK)[None, :]
    column = c < N
    if weight is not None:
        w = read(weight + c, column, N == BLOCK).to(WIDE)
    if dweight is not None:
        sum_w = tl.zeros((R, BLOCK), WIDE)
    if dbias is not None:
        sum_b = tl.zeros((R, BLOCK), WIDE)
    tiles = tl.cdiv(rows, R)
    step = tl.num_programs(0)
    if CENTRED and not REFINE:
        next_pivot = _first_of_rows(x, tiles - 1 - tl.program_id(0), rows, N, R).to(WIDE)
    for t in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
        r = (tiles - 1 - t) * R + tl.arange(0, R)[:, None]
        inside = (r < rows) & column
        at = r.to(tl.int64) * N + c
        v = read(x + at, inside, EVEN).to(WIDE)
        g = read(grad + at, inside, EVEN).to(WIDE)
        inner = g
        if weight is not None:
            inner = g * w
        if CENTRED and not REFINE:
            pivot = next_pivot
            next_pivot = _first_of_rows(x, tiles - 1 - t - step, rows, N, R).to(WIDE)
            v -= pivot
            if not EVEN:
                v = tl.where(inside, v, 0.0)
            off, squares, products, of_inner = _four_sums(v, v * v, inner * v, inner)
            off /= N
            v -= off
            if not EVEN:
                v = tl.where(inside, v, 0.0)
            squares = tl.maximum(squares - off * off * N, 0.0, tl.PropagateNan.ALL)
            products -= off * of_inner
        elif CENTRED:
            mean, of_inner = _two_sums(v, inner)
            v -= mean / N
            if not EVEN:
                v = tl.where(inside, v, 0.0)
            off, squares, products = _three_sums(v, v * v, inner * v)
            off /= N
            v -= off
            if not EVEN:
                v = tl.where(inside, v, 0.0)
            squares -= off * off * N
            products -= off * of_inner
        else:
            squares, products = _two_sums(v * v, inner * v)
        rstd = over_root(squares / N + EPS)
        if not EVEN:
            rstd = tl.where(r < rows, rstd, 0.0)  # or eps = 0 makes nan of rows that are not there
        v *= rstd
        if dweight is not None:
            sum_w += g * v
        if dbias is not None:
            sum_b += g
        if dx is not None:
            d = inner - v * (products * rstd / N)
            if CENTRED:
                d -= of_inner / N
            d *= rstd
            if extra is not None:
                d += read(extra + at, inside, EVEN).to(WIDE)
            write(dx + at, d, inside, EVEN)
    out = tl.program_id(0) * N + tl.arange(0, BLOCK)
    if dweight is not None:
        write(dweight + out, tl.sum(sum_w, 0), tl.arange(0, BLOCK) < N, N == BLOCK)
    if dbias is not None:
        write(dbias + out, tl.sum(sum_b, 0), tl.arange(0, BLOCK) < N, N == BLOCK)


@triton.jit
def _sums_of_rows(
    x,
    grad,
    weight,
    sums,
    N: tl.constexpr,
    EPS: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """The mean, what its rounding left of it, rstd, mean(inner · hat) and mean(inner) of one row,
    read block by block; what is read again comes from L2."""
    enter(CHAIN, True)
    r = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    x += r * N
    grad += r * N
    mean = tl.sum(tl.zeros((BLOCK,), WIDE), 0)
    if CENTRED:
        total = tl.zeros((BLOCK,), WIDE)
        for o in range(0, N, BLOCK):
            total += read(x + o + c, o + c < N, N % BLOCK == 0).to(WIDE)
        mean = tl.sum(total, 0) / N
    left = tl.zeros((BLOCK,), WIDE)
    squares = tl.zeros((BLOCK,), WIDE)
    products = tl.zeros((BLOCK,), WIDE)
    inner = tl.zeros((BLOCK,), WIDE)
    for o in range(0, N, BLOCK):
        inside = o + c < N
        v = read(x + o + c, inside, N % BLOCK == 0).to(WIDE) - mean
        g = read(grad + o + c, inside, N % BLOCK == 0).to(WIDE)
        if weight is not None:
            g *= read(weight + o + c, inside, N % BLOCK == 0).to(WIDE)
        if N % BLOCK != 0:
            v = tl.where(inside, v, 0.0)
        left += v
        squares += v * v
        products += g * v
        inner += g
    off = mean  # 0 where there is no mean
    if CENTRED:
        off = tl.sum(left, 0) / N
    of_inner = tl.sum(inner, 0) / N
    rstd = over_root(tl.sum(squares, 0) / N - off * off + EPS)
    sums += r * 5
    tl.store(sums, mean)
    tl.store(sums + 1, off)
    tl.store(sums + 2, rstd)
    tl.store(sums + 3, (tl.sum(products, 0) / N - off * of_inner) * rstd)
    tl.store(sums + 4, of_inner)


@triton.jit
def _long(
    x,
    grad,
    weight,
    extra,
    dx,
    dweight,
    dbias,
    sums,
    rows,
    N: tl.constexpr,
    CENTRED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    R: tl.constexpr,
    STAGES: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A block of columns of every so-manieth row; the sums of the rows are known."""
    enter(CHAIN, False)
    EVEN: tl.constexpr = N % BLOCK == 0
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    column = c < N
    if weight is not None:
        w = read(weight + c, column, EVEN).to(WIDE)
    if dweight is not None:
        sum_w = tl.zeros((R, BLOCK), WIDE)
    if dbias is not None:
        sum_b = tl.zeros((R, BLOCK), WIDE)
    step = tl.num_programs(1) * R
    for first in tl.range(tl.program_id(1) * R, rows, step, num_stages=STAGES):
        r = first + tl.arange(0, R)[:, None]
        inside = (r < rows) & column
        at = r.to(tl.int64) * N + c
        of = sums + r.to(tl.int64) * 5
        v = tl.load(x + at, mask=inside, other=0.0).to(WIDE)
        g = tl.load(grad + at, mask=inside, other=0.0).to(WIDE)
        rstd = tl.load(of + 2, mask=r < rows, other=0.0)
        if CENTRED:
            v -= tl.load(of, mask=r < rows, other=0.0)
            v -= tl.load(of + 1, mask=r < rows, other=0.0)
        v *= rstd
        if dweight is not None:
            sum_w += g * v
        if dbias is not None:
            sum_b += g
        if dx is not None:
            if weight is not None:
                g *= w
            d = g - v * tl.load(of + 3, mask=r < rows, other=0.0)
            if CENTRED:
                d -= tl.load(of + 4, mask=r < rows, other=0.0)
            d *= rstd
            if extra is not None:
                d += tl.load(extra + at, mask=inside, other=0.0).to(WIDE)
            write(dx + at, d, inside, False)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    out = tl.program_id(1) * N + c
    if dweight is not None:
        write(dweight + out, tl.sum(sum_w, 0), c < N, EVEN)
    if dbias is not None:
        write(dbias + out, tl.sum(sum_b, 0), c < N, EVEN)


@triton.jit
def _add_up(
    partial_w,
    partial_b,
    dweight,
    dbias,
    count,
    n,
    R: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Partial results [count, n] summed down the columns."""
    enter(CHAIN, False)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if dweight is not None:
        write(dweight + c, _column_sums(partial_w, count, n, c, R, BLOCK), c < n, False)
    if dbias is not None:
        write(dbias + c, _column_sums(partial_b, count, n, c, R, BLOCK), c < n, False)


@triton.jit
def _column_sums(partials, count, n, c, R: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros((R, BLOCK), partials.dtype.element_ty)
    for first in range(0, count, R):
        r = first + tl.arange(0, R)[:, None]
        at = r.to(tl.int64) * n + c[None, :]
        total += tl.load(partials + at, mask=(r < count) & (c[None, :] < n), other=0.0)
    return tl.sum(total, 0)


ROWS, SUMS_OF_ROWS, HELD, LOOPED = map(Launchable, (_rows, _sums_of_rows, held, looped))
LONG, ADD_UP = Launchable(_long, follows=True), Launchable(_add_up, follows=True)


# ---- the calls


Tensor = torch.Tensor
Maybe = Tensor | None
Call = Callable[..., None]


def backward(work: Work, way: Way) -> Call:
    """A function of x, grad, weight, extra, dx, dweight, dbias and offset that fills dx, dweight
    and dbias. Any but x and grad may be None; a result that is None is not computed."""
    wide = _wide(work)
    constants: dict[str, Any] = {"EPS": work.eps, "WIDE": _kind(work)}
    first: Callable[..., None]
    if work.kind == "groups":
        count, n = samples(work, way), work.groups * work.each
        first = (_split_call if way.each else _groups_call)(work, way, constants)
    else:
        count, n = way.programs, work.columns
        constants |= {"N": n, "CENTRED": work.centred}
        long = work.kind == "long"
        first = _long_call(work, way, constants) if long else _rows_call(work, way, constants)

    def run(
        x: Tensor,
        grad: Tensor,
        weight: Maybe,
        extra: Maybe,
        dx: Maybe,
        dweight: Maybe,
        dbias: Maybe,
        offset: Maybe = None,
    ) -> None:
        chain = chained(x.device)
        given = (x, grad, weight, offset) if work.kind == "groups" else (x, grad, weight)
        if count == 1 or (dweight is None and dbias is None):
            first(*given, extra, dx, dweight, dbias, CHAIN=chain)
            return
        w, b = (
            None if p is None else torch.empty((count, n), dtype=wide, device=x.device)
            for p in (dweight, dbias)
        )
        first(*given, extra, dx, w, b, CHAIN=chain)
        ADD_UP((-(-n // 32),), w, b, dweight, dbias, count, n, R=64, BLOCK=32, CHAIN=chain, warps=8)

    return run


def _wide(work: Work) -> torch.dtype:
    """The type of sums."""
    return torch.float64 if work.size == 8 else torch.float32


def _kind(work: Work) -> tl.dtype:
    """The same as Triton calls it."""
    return tl.float64 if work.size == 8 else tl.float32


def _groups_call(work: Work, way: Way, constants: dict[str, Any]) -> Callable[..., None]:
    kernel, (channels, positions) = HELD if way.channels else LOOPED, tile_of(work, way)
    return partial(
        kernel,
        (work.rows,),
        warps=way.warps,
        GROUPS=work.groups,
        EACH=work.each,
        HW=work.columns // work.each,
        ACT=work.activation,
        SLOPE=work.slope,
        C=channels,
        H=positions,
        **constants,
    )


def _split_call(work: Work, way: Way, constants: dict[str, Any]) -> Callable[..., None]:
    programs, common, rest = _parts(work, way, constants)

    def run(
        x: Tensor,
        grad: Tensor,
        weight: Maybe,
        offset: Maybe,
        extra: Maybe,
        dx: Maybe,
        dweight: Maybe,
        dbias: Maybe,
        CHAIN: bool,
    ) -> None:
        wide = _wide(work)
        moments, sums = (torch.empty((programs, 2), dtype=wide, device=x.device) for _ in range(2))
        given = (x, grad, weight, offset)
        MOMENTS((programs,), x, moments, CHAIN=CHAIN, **common)
        SUMS((programs,), *given, moments, sums, dweight, dbias, CHAIN=CHAIN, **common, **rest)
        if dx is not None:
            BACKWARD((programs,), *given, extra, dx, moments, sums, CHAIN=CHAIN, **common, **rest)

    return run


def _parts(
    work: Work, way: Way, constants: dict[str, Any]
) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """How many parts all groups have, and the constants of kernels that take parts: those for
    moments, and further ones."""
    each = way.each or work.each
    positions = way.positions or work.columns // work.each
    parts = work.columns // (each * positions)
    common = {
        "ALL": work.each,
        "POSITIONS": work.columns // work.each,
        "PARTS": parts,
        "EACH": each,
        "HW": positions,
        "WIDE": constants["WIDE"],
        "C": way.channels,
        "H": way.tile // way.channels,
        "warps": way.warps,
    }
    rest = {
        "GROUPS": work.groups,
        "MANY": power_of_two(parts),
        "EPS": work.eps,
        "ACT": work.activation,
        "SLOPE": work.slope,
    }
    return work.rows * parts, common, rest


def forward(work: Work, way: Way) -> Callable[[Tensor, Maybe, Maybe, Tensor], None]:
    """A function of x, weight, bias and y that fills y: a norm of groups and its activation."""
    programs, common, rest = _parts(work, way, {"WIDE": _kind(work)})

    def run(x: Tensor, weight: Maybe, bias: Maybe, y: Tensor) -> None:
        if not way.each:
            WHOLE((programs,), x, weight, bias, y, None, CHAIN=False, **common, **rest)
            return
        chain = chained(x.device)
        moments = torch.empty((programs, 2), dtype=_wide(work), device=x.device)
        MOMENTS((programs,), x, moments, CHAIN=chain, **common)
        FORWARD((programs,), x, weight, bias, y, moments, CHAIN=chain, **common, **rest)

    return run


def _rows_call(work: Work, way: Way, constants: dict[str, Any]) -> Callable[..., None]:
    block = power_of_two(work.columns)
    even = block == work.columns and work.rows % way.rows == 0
    call = partial(
        ROWS,
        (way.programs,),
        warps=way.warps,
        BLOCK=block,
        R=way.rows,
        EVEN=even,
        STAGES=way.stages,
        **constants,
    )
    return lambda *tensors, CHAIN: call(*tensors, work.rows, CHAIN=CHAIN)


def _long_call(work: Work, way: Way, constants: dict[str, Any]) -> Callable[..., None]:
    n, rows, wide = work.columns, work.rows, _wide(work)
    sums_of_rows = partial(SUMS_OF_ROWS, (rows,), warps=8, BLOCK=4096, **constants)
    constants = {k: v for k, v in constants.items() if k != "EPS"}
    columns = partial(
        LONG,
        (-(-n // COLUMNS), way.programs),
        warps=way.warps,
        BLOCK=COLUMNS,
        R=way.rows,
        STAGES=way.stages,
        **constants,
    )

    def run(x: Tensor, grad: Tensor, weight: Maybe, *rest: Maybe, CHAIN: bool) -> None:
        sums = torch.empty((rows, 5), dtype=wide, device=x.device)
        sums_of_rows(x, grad, weight, sums, CHAIN=CHAIN)
        columns(x, grad, weight, *rest, sums, rows, CHAIN=CHAIN)

    return run
