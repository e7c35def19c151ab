"""Pieces that the kernels of norms share: reading, writing, 1 / √v."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read(pointer, inside, EVEN: tl.constexpr):
    """Without a mask where every element is inside: loads of 16 bytes."""
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
    """1 / √v; the approximation that the GPU has for float64 is not as exact as float64. Where v is
    infinite its squares overflowed: nan, and not a gradient of 0."""
    if v.dtype == tl.float64:
        r = 1.0 / tl.sqrt(v)
    else:
        r = tl.rsqrt(v)
    return tl.where(v == float("inf"), float("nan"), r)
