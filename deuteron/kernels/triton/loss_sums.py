"""The small launches around a loss: what its mean divides by, its sum, and its gradient scaled.

    totals: n targets read            add_up: n rows read            scale: nothing, or n twice

The first two are one program each, so that the order of the sums never changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable


@triton.jit
def totals(target, weight, out, n, classes, ignore, LATER: tl.constexpr, BLOCK: tl.constexpr):
    """What a mean over integer targets divides by: the weights of those that count, and for the z
    part their number. ``out`` has 1 over each for the loss, the same for the gradient, and what is
    left to multiply the gradient with. LATER leaves the division of the gradient for then: float16
    would lose small numbers that a large scale of the loss was to save."""
    count = tl.zeros((BLOCK,), tl.int32)
    heavy = tl.zeros((BLOCK,), tl.float32)
    for o in range(0, n, BLOCK):
        i = o + tl.arange(0, BLOCK)
        y = tl.load(target + i, mask=i < n, other=0).to(tl.int64)
        real = (i < n) & (y != ignore)
        count += real.to(tl.int32)
        if weight is not None:
            known = real & (y >= 0) & (y < classes)
            heavy += tl.load(weight + y, mask=known, other=0.0).to(tl.float32)
    rows = tl.sum(count, 0).to(tl.float32)
    whole = rows
    if weight is not None:
        whole = tl.sum(heavy, 0)
    tl.store(out, 1.0 / whole)
    tl.store(out + 1, 1.0 / rows)
    if LATER:
        tl.store(out + 2, 1.0)
        tl.store(out + 3, whole / rows)
        tl.store(out + 4, tl.where(rows == 0.0, 0.0, 1.0 / whole))  # no row, no gradient
    else:
        tl.store(out + 2, 1.0 / whole)
        tl.store(out + 3, 1.0 / rows)
        tl.store(out + 4, 1.0)


@triton.jit
def add_up(rows, out, n, BLOCK: tl.constexpr):
    """The sum of all rows, always in the same order."""
    s = tl.zeros((BLOCK,), tl.float32)
    for o in range(0, n, BLOCK):
        i = o + tl.arange(0, BLOCK)
        s += tl.load(rows + i, mask=i < n, other=0.0)
    tl.store(out, tl.sum(s, 0).to(out.dtype.element_ty))


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


_totals, _add_up, _scale = map(Launchable, (totals, add_up, scale))
SCALERS = 1024  # programs of a scaling: several for every SM of any GPU


def launch_totals(
    target: torch.Tensor, weight: torch.Tensor | None, classes: int, ignore: int, later: bool
) -> torch.Tensor:
    """The five numbers of ``totals``."""
    out = torch.empty(5, dtype=torch.float32, device=target.device)
    n = target.numel()
    block = min(4096, max(128, triton.next_power_of_2(n)))
    _totals((1,), target, weight, out, n, classes, ignore, LATER=later, BLOCK=block, warps=8)
    return out


def launch_add_up(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of float32 ``rows`` as a number of ``dtype``."""
    out = torch.empty((), dtype=dtype, device=rows.device)
    n = rows.numel()
    _add_up((1,), rows, out, n, BLOCK=min(4096, max(128, triton.next_power_of_2(n))), warps=8)
    return out


def launch_scale(x: torch.Tensor, up: torch.Tensor, total: torch.Tensor) -> None:
    """Scales a dense tensor by numbers on the device, without waiting for them."""
    n = x.numel()
    _scale((min(SCALERS, triton.cdiv(n, 8192)),), x, up, total, n, BLOCK=8192, warps=8)
