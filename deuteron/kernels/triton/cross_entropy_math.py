"""What the kernels of cross-entropy have in common, for a row or for many.

Exponents are kept in powers of two: k = max x · log₂e, rounded, is what is subtracted, and
x · log₂e − k is one instruction that rounds once. As every logit of a row meets the same k, large
logits lose no digits.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def anchor(m):
    """What to subtract before exp: the maximum, or 0 where all of a row is −inf so far."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def online(v, m, s, AXIS: tl.constexpr):
    """Maximum (in powers of two) and sum of exponentials so far, and a tile more: one rescale for
    the whole tile."""
    new = tl.maximum(m, tl.max(v, AXIS) * LOG2E)
    k = anchor(new)
    e = tl.exp2(v * LOG2E - tl.expand_dims(k, AXIS))
    return new, s * tl.exp2(m - k) + tl.sum(e, AXIS)


@triton.jit
def shares(probs, offset, weight, c, inside, smoothing, classes, PROBS: tl.constexpr):
    """q without what an integer target adds to its own class."""
    q = smoothing / classes
    if PROBS:
        q += (1.0 - smoothing) * tl.load(probs + offset, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        q *= tl.load(weight + c, mask=(c >= 0) & (c < classes), other=0.0).to(tl.float32)
    return tl.where(inside, q, 0.0)


@triton.jit
def own_share(y, weight, smoothing, classes):
    """What an integer target adds to q at its class, nan if there is no such class."""
    known = (y >= 0) & (y < classes)
    own = 1.0 - smoothing
    if weight is not None:
        own *= tl.load(weight + y, mask=known, other=0.0).to(tl.float32)
    return tl.where(known, own, float("nan")), known


@triton.jit
def row_loss(own, picked, mass, spread, ref, k, power, z, d0, d1):
    """The loss of a row from k and power = log₂ of its sum; logits enter as differences only."""
    lse = (k + power) * LN2
    target = own * (power - (picked * LOG2E - k))
    rest = mass * (power - (ref * LOG2E - k))
    return ((target + rest) * LN2 - spread) * d0 + z * lse * lse * d1


@triton.jit
def class_offset(c, stride):
    if stride is None:
        return c
    else:
        return c.to(tl.int64) * stride
