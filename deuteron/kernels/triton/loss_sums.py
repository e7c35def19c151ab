"""The small launches around a loss: what its mean divides by, its sum, and its gradient scaled.

    totals: n targets read            add_up: n rows read            scale: nothing, or n twice

Sums over more than one program can do quickly are sums of parts, added up by a second launch: the
order never changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


@triton.jit
def kept(weight, y, real, classes):
    """The weights of targets that count and exist."""
    known = real & (y >= 0) & (y < classes)
    return tl.load(weight + y, mask=known, other=0.0).to(tl.float32)


@triton.jit
def store_totals(out, rows, whole, LATER: tl.constexpr):
    """Stores 1 over the weights and 1 over the number of rows that count (for the z part) for the
    loss, the same for the gradient, and what is left to multiply the gradient with; returns the
    first four. LATER leaves the division of the gradient for then: float16 would lose small
    numbers that a large scale of the loss was to save."""
    d0, d1 = 1.0 / whole, 1.0 / rows
    g0, g1, left = d0, d1, 1.0
    if LATER:
        g0, g1 = 1.0, whole / rows
        left = tl.where(rows == 0.0, 0.0, d0)  # no row, no gradient
    tl.store(out, d0)
    tl.store(out + 1, d1)
    tl.store(out + 2, g0)
    tl.store(out + 3, g1)
    tl.store(out + 4, left)
    return d0, d1, g0, g1


@triton.jit
def _count(target, weight, n, classes, ignore, BLOCK: tl.constexpr):
    """Number and weight of the targets that count, of this program's share of n."""
    count = tl.zeros((BLOCK,), tl.float32)
    heavy = tl.zeros((BLOCK,), tl.float32)
    for o in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = o + tl.arange(0, BLOCK)
        y = tl.load(target + i, mask=i < n, other=0).to(tl.int64)
        real = (i < n) & (y != ignore)
        count += real.to(tl.float32)
        if weight is not None:
            heavy += kept(weight, y, real, classes)
    rows = tl.sum(count, 0)
    whole = rows
    if weight is not None:
        whole = tl.sum(heavy, 0)
    return rows, whole


@triton.jit
def count_parts(target, weight, parts, n, classes, ignore, BLOCK: tl.constexpr):
    """Number and weight for each program, [2, programs]."""
    rows, whole = _count(target, weight, n, classes, ignore, BLOCK)
    tl.store(parts + tl.program_id(0), rows)
    tl.store(parts + tl.num_programs(0) + tl.program_id(0), whole)


@triton.jit
def totals(
    target, weight, parts, out, n, classes, ignore, LATER: tl.constexpr, BLOCK: tl.constexpr
):
    """What a mean over integer targets divides by, from n targets or from n parts."""
    if parts is None:
        rows, whole = _count(target, weight, n, classes, ignore, BLOCK)
    else:
        i = tl.arange(0, BLOCK)
        rows = tl.sum(tl.load(parts + i, mask=i < n, other=0.0), 0)
        whole = tl.sum(tl.load(parts + n + i, mask=i < n, other=0.0), 0)
    store_totals(out, rows, whole, LATER)


@triton.jit
def add_up(rows, out, n, BLOCK: tl.constexpr):
    """The sum of all rows, or for each of several programs that of its share."""
    s = tl.zeros((BLOCK,), tl.float32)
    for o in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        i = o + tl.arange(0, BLOCK)
        s += tl.load(rows + i, mask=i < n, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(s, 0).to(out.dtype.element_ty))


@triton.jit
def scale(x, up, total, n, BLOCK: tl.constexpr):
    """x · up · what ``totals`` left over, in place. Nothing is touched where that is 1, as it is at
    the root of a backward pass: the launch then costs its latency."""
    f = tl.load(up).to(tl.float32) * tl.load(total + 4)
    if f != 1.0:
        for o in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = o + tl.arange(0, BLOCK)
            v = tl.load(x + i, mask=i < n).to(tl.float32) * f
            tl.store(x + i, v.to(x.dtype.element_ty), mask=i < n)


_count_parts, _totals, _add_up, _scale = map(Launchable, (count_parts, totals, add_up, scale))
PARTS = 256  # programs of a sum that is too long for one
SCALERS = 512  # programs of a scaling: several for every processor of any GPU
ONE = 2**15  # what one program adds up as quickly as a second launch takes to start


def launch_totals(
    target: torch.Tensor, weight: torch.Tensor | None, classes: int, ignore: int, later: bool
) -> torch.Tensor:
    """The five numbers of ``store_totals``."""
    out = torch.empty(5, dtype=torch.float32, device=target.device)
    n = target.numel()
    if n <= ONE:
        block = _block(n)
        _totals(
            (1,), target, weight, None, out, n, classes, ignore, LATER=later, BLOCK=block, warps=8
        )
        return out
    parts = torch.empty((2, PARTS), dtype=torch.float32, device=target.device)
    _count_parts((PARTS,), target, weight, parts, n, classes, ignore, BLOCK=1024, warps=4)
    _totals((1,), None, None, parts, out, PARTS, classes, ignore, LATER=later, BLOCK=PARTS, warps=4)
    return out


def launch_add_up(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of float32 ``rows`` as a number of ``dtype``."""
    n = rows.numel()
    if n > ONE:
        parts = torch.empty(PARTS, dtype=torch.float32, device=rows.device)
        _add_up((PARTS,), rows, parts, n, BLOCK=1024, warps=4)
        rows, n = parts, PARTS
    out = torch.empty((), dtype=dtype, device=rows.device)
    _add_up((1,), rows, out, n, BLOCK=_block(n), warps=8)
    return out


def launch_scale(x: torch.Tensor, up: torch.Tensor, total: torch.Tensor) -> None:
    """Scales a dense tensor by numbers on the device, without waiting for them."""
    n = x.numel()
    programs = min(SCALERS, -(-n // 8192))
    if programs > 1:
        _scale((programs,), x, up, total, n, BLOCK=8192, warps=8)
    elif n:
        _scale((1,), x, up, total, n, BLOCK=_block(n) * 2, warps=4)


def _block(n: int) -> int:
    """A tile for n numbers: one of few sizes, as each is compiled."""
    return 128 if n <= 128 else 1024 if n <= 1024 else 4096
