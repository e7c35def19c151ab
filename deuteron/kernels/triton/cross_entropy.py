"""Cross-entropy of long rows with its gradient, one row to a program at a time.

For a row x whose target is class y, with q = (1 − ε) · weight[y] there and ε / C at every class:

    lse = log Σ exp x            loss = lse · Σ q − Σ q · x + z · lse²
    d loss / dx = softmax(x) · (Σ q + 2 · z · lse) − q,          times scale

A row is read twice and its gradient written once. The first read finds maximum and sum and tells L2
to keep the row, the second comes from there, so memory sees one read and one write: 8192 × 128256
in bf16 is 4.2 GB. Ignored rows are not read, and have loss, lse and gradient 0. A class that does
not exist makes its row nan. The gradient may be written over the logits.

Exponentials are powers of two: with k = max x · log₂e, rounded, the exponent x · log₂e − k is one
instruction that rounds once. As the same k is subtracted from every logit of a row, large logits
lose no digits.
"""

import math
from collections import namedtuple

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


# Pointers; inputs that a call does not have, and results that are not wanted, are None. z is one
# number; scale is one number, or one for each row.
Given = namedtuple("Given", "x target weight scale z loss lse grad")

# The numbers of a cross-entropy, the number of rows, and the row strides of the logits, the
# gradient and the scale (0 or 1). From ``classes`` to ``width`` a row of the gradient is 0.
Terms = namedtuple("Terms", "classes width ignore smoothing rows x_step grad_step scale_step")


@triton.jit
def _number(pointer, USUAL: tl.constexpr):
    """Load a number, or return the usual one where no pointer is given."""
    if pointer is None:
        return USUAL
    else:
        return tl.load(pointer).to(tl.float32)


@triton.jit
def _anchor(m):
    """Return what to subtract before exp: the maximum, or 0 where a row is all −inf so far."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _own_share(y, weight, terms):
    """Return what a target adds to q at its class, nan if there is no such class, and whether there
    is."""
    known = (y >= 0) & (y < terms.classes)
    own = 1.0 - terms.smoothing
    if weight is not None:
        own *= tl.load(weight + y, mask=known, other=0.0).to(tl.float32)
    return tl.where(known, own, float("nan")), known


@triton.jit
def _row_loss(own, picked, mass, spread, ref, k, power, z):
    """Return a row's loss, from k and power = log₂ of its sum; logits enter as differences only."""
    lse = (k + power) * LN2
    target = own * (power - (picked * LOG2E - k))
    rest = mass * (power - (ref * LOG2E - k))
    return (target + rest) * LN2 - spread + z * lse * lse


@triton.jit
def _piece(x, i, span, EDGE: tl.constexpr, SHIFTED: tl.constexpr, POLICY: tl.constexpr):
    """Load the logits at i as float32, −inf outside of the span, where only a tile at an EDGE can
    reach. A SHIFTED row is read in whole 16 bytes, together with what lies before it; but its span
    ends at a multiple of these, as there may be no memory after the last row."""
    low, high = span
    if not EDGE:
        v = tl.load(x + i, eviction_policy=POLICY).to(tl.float32)
    elif SHIFTED:
        end = tl.multiple_of(high, 128 // x.dtype.element_ty.primitive_bitwidth)
        v = tl.load(x + i, mask=i < end, other=float("-inf"), eviction_policy=POLICY)
        v = tl.where(i >= low, v.to(tl.float32), float("-inf"))
    else:
        v = tl.load(x + i, mask=i < high, other=float("-inf"), eviction_policy=POLICY)
        v = v.to(tl.float32)
    return v


@triton.jit
def _seen(v, i, span, ref, so_far, EDGE: tl.constexpr, EVEN: tl.constexpr):
    """Return what is known of a row after one more tile of logits v, lane by lane: the maximum,
    times log₂e; the sum of exponentials, rescaled once for the tile; and, if smoothing gives all
    classes EVEN shares, Σ (v − ref)."""
    m, s, spread = so_far
    low, high = span
    new = tl.maximum(m, tl.max(v, 0) * LOG2E)
    k = _anchor(new)
    s = s * tl.exp2(m - k) + tl.sum(tl.exp2(v * LOG2E - k[None, :]), 0)
    if EVEN:
        apart = v - ref
        if EDGE:
            apart = tl.where((i >= low) & (i < high), apart, 0.0)
        spread += tl.sum(apart, 0)
    return new, s, spread


@triton.jit
def _read(x, i, span, ref, so_far, EDGE, SHIFTED, EVEN):
    """Read a tile for the first time; return what is known of the row then."""
    v = _piece(x, i, span, EDGE, SHIFTED, "evict_last")
    return _seen(v, i, span, ref, so_far, EDGE, EVEN)


@triton.jit
def _slope(v, rates, EVEN: tl.constexpr):
    """Return the gradient, without what the target subtracts at its own class."""
    k, rate, even = rates
    d = tl.exp2(v * LOG2E - k) * rate
    if EVEN:
        d -= even
    return d


@triton.jit
def _write(x, grad, i, span, rates, EDGE, SHIFTED, EVEN):
    """Read a tile for the second time, and write its gradient. At an edge of a SHIFTED row only
    whole 16 bytes are written: what lies beside them belongs to other rows."""
    low, high = span
    v = _piece(x, i, span, EDGE, SHIFTED, "evict_first")
    d = _slope(v, rates, EVEN).to(grad.dtype.element_ty)
    if not EDGE:
        tl.store(grad + i, d, eviction_policy="evict_first")
    elif SHIFTED:
        wide: tl.constexpr = 128 // grad.dtype.element_ty.primitive_bitwidth
        part = i // wide
        inside = (part >= (low + wide - 1) // wide) & (part < high // wide)
        tl.store(grad + i, d, mask=inside, eviction_policy="evict_first")
    else:
        tl.store(grad + i, d, mask=i < high, eviction_policy="evict_first")


@triton.jit
def _write_ends(x, grad, span, rates, EVEN):
    """Write the gradient of a row before its first and after its last whole 16 bytes."""
    low, high = span
    wide: tl.constexpr = 128 // grad.dtype.element_ty.primitive_bitwidth
    for end in tl.static_range(2):
        i = tl.arange(0, wide) + (high // wide * wide if end else 0)
        inside = (i >= low) & (i < high)
        if not end:
            inside = inside & (low > 0)
        v = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad + i, _slope(v, rates, EVEN).to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _read_end(x, stop, span, ref, EVEN):
    """Return maximum, sum and spread of what a row has after its last whole 16 bytes."""
    wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    i = (stop + tl.arange(0, wide))[None, :]
    zero = tl.zeros((wide,), tl.float32)
    m, s, spread = _read(x, i, span, ref, (zero + float("-inf"), zero, zero), True, False, EVEN)
    top = tl.max(m, 0)
    return top, tl.sum(s * tl.exp2(m - _anchor(top)), 0), tl.sum(spread, 0)


@triton.jit
def one_row(
    given,
    terms,
    R: tl.constexpr,
    W: tl.constexpr,
    EVEN: tl.constexpr,
    SHIFTED: tl.constexpr,
    RAGGED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program has one long row at a time, whose classes are adjacent. Each lane keeps a maximum
    and a sum of its own, so nothing crosses lanes before the end of the row. Only the tiles at the
    edges of a row have masks. The target of the next row is loaded a row ahead: with one program on
    each multiprocessor nothing else would hide that wait. With AHEAD the first tile of the next row
    is, too, before the gradient of this row is written: memory is read and written at the same
    time.

    SHIFTED rows may start anywhere, but x and grad at the same offset within 16 bytes. RAGGED rows
    start at multiples of 16 bytes and end anywhere."""
    x, target, loss, lse, grad = given.x, given.target, given.loss, given.lse, given.grad
    i = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    z = _number(given.z, 0.0)
    step = tl.num_programs(0)
    first_row = tl.program_id(0).to(tl.int64)
    ahead = i
    if AHEAD:
        ahead = tl.load(x + first_row * terms.x_step + i, eviction_policy="evict_last")
    coming = tl.load(target + first_row).to(tl.int64)
    for row in range(tl.program_id(0), terms.rows, step):
        y = coming
        coming = tl.load(target + row + step, mask=row + step < terms.rows, other=0).to(tl.int64)
        scale = 1.0
        if given.scale is not None:
            scale = tl.load(given.scale + row * terms.scale_step).to(tl.float32)
        at = x + tl.cast(row, tl.int64) * terms.x_step
        to = at
        if grad is not None:
            to = grad + tl.cast(row, tl.int64) * terms.grad_step
        following = tl.where(row + step < terms.rows, row + step, row).to(tl.int64)
        following = x + following * terms.x_step
        if y == terms.ignore:
            if AHEAD:
                ahead = tl.load(following + i, eviction_policy="evict_last")
            if loss is not None:
                tl.store(loss + row, tl.zeros((), loss.dtype.element_ty))
            if lse is not None:
                tl.store(lse + row, 0.0)
            if grad is not None:
                zero = tl.zeros((R, W), grad.dtype.element_ty)
                for o in range(0, terms.width, R * W):
                    tl.store(to + o + i, zero, mask=o + i < terms.width)
        else:
            mass, spread, ref = 0.0, 0.0, 0.0
            own, known = _own_share(y, given.weight, terms)
            picked = tl.load(at + y, mask=known, other=0.0).to(tl.float32)
            if EVEN:
                ref = _anchor(tl.load(at).to(tl.float32))
            low, first = 0, 0
            if SHIFTED:  # start at the multiple of 16 bytes before the row
                size: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
                low = (at.to(tl.int64) % 16).to(tl.int32) // size
                at = tl.multiple_of(at - low, 16)
                first = R * W
                if grad is not None:
                    to = tl.multiple_of(to - low, 16)
            high = low + terms.classes
            whole = high // (R * W) * (R * W)
            apart = tl.maximum(whole, R * W)
            begin, stop = whole, high
            if SHIFTED:  # the tiles at 0 and at whole are edges
                begin = 0
            if SHIFTED or RAGGED:
                wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
                stop = tl.multiple_of(high // wide * wide, wide)
            span, edges = (low, high), (low, stop)
            none = tl.zeros((W,), tl.float32)
            so_far = (none + float("-inf"), none, none)
            start = first
            if AHEAD:
                start = R * W
                so_far = _seen(ahead.to(tl.float32), i, span, ref, so_far, False, EVEN)
            else:
                for o in range(begin, stop, apart):
                    so_far = _read(at, o + i, edges, ref, so_far, True, SHIFTED, EVEN)
            for o in range(start, whole, R * W):
                so_far = _read(at, o + i, span, ref, so_far, False, SHIFTED, EVEN)
            if AHEAD:
                for o in range(begin, stop, apart):
                    so_far = _read(at, o + i, edges, ref, so_far, True, SHIFTED, EVEN)
            m, s, ss = so_far
            top = tl.max(m, 0)
            if SHIFTED or RAGGED:
                last, s2, spread = _read_end(at, stop, span, ref, EVEN)
                top = tl.maximum(top, last)
            k = _anchor(top)
            s1 = tl.sum(s * tl.exp2(m - k), 0)
            if SHIFTED or RAGGED:
                s1 += s2 * tl.exp2(last - k)
            power = tl.log2(s1)
            even = terms.smoothing / terms.classes
            if EVEN:
                mass, spread = terms.smoothing, (spread + tl.sum(ss, 0)) * even
            if loss is not None:
                found = _row_loss(own, picked, mass, spread, ref, k, power, z)
                tl.store(loss + row, found.to(loss.dtype.element_ty))
            if lse is not None:
                tl.store(lse + row, (k + power) * LN2)
            if AHEAD:
                ahead = tl.load(following + i, eviction_policy="evict_last")
            if grad is not None:
                rate = (own + mass + 2.0 * z * ((k + power) * LN2)) * scale / s1
                rates = (k, rate, scale * even)
                tl.debug_barrier()  # all threads read the row before any overwrites it
                for o in range(first, whole, R * W):  # backwards: what was read last is cached
                    j = whole - R * W - (o - first) + i
                    _write(at, to, j, span, rates, False, SHIFTED, EVEN)
                for o in range(begin, stop, apart):
                    _write(at, to, o + i, edges, rates, True, SHIFTED, EVEN)
                if SHIFTED or RAGGED:
                    _write_ends(at, to, span, rates, EVEN)
                d = _slope(picked, rates, EVEN) - own * scale
                tl.debug_barrier()
                tl.store(to + low + y, d.to(grad.dtype.element_ty), mask=known)
                for o in range(terms.classes, terms.width, 16):
                    j = o + tl.arange(0, 16)
                    zero = tl.zeros((16,), grad.dtype.element_ty)
                    tl.store(to + low + j, zero, mask=j < terms.width)


@triton.jit
def scale(x, up, left, n, BLOCK: tl.constexpr):
    """Multiply x by up · left in place. Where that is 1, as at the root of a backward pass, no
    memory is touched: the launch then costs only its latency."""
    f = _number(up, 1.0) * _number(left, 1.0)
    if f != 1.0:
        for o in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
            i = o + tl.arange(0, BLOCK)
            v = tl.load(x + i, mask=i < n).to(tl.float32) * f
            tl.store(x + i, v.to(x.dtype.element_ty), mask=i < n)


ONE_ROW, _scale = Launchable(one_row), Launchable(scale)
SCALERS = 512  # programs of a scaling: several for every processor of any GPU


def launch_scale(x: torch.Tensor, up: torch.Tensor, left: torch.Tensor | None) -> None:
    """Scale a dense tensor by numbers on the device, without waiting for these."""
    programs = min(SCALERS, -(-x.numel() // 8192))
    _scale((programs,), x, up, left, x.numel(), BLOCK=8192, warps=8)
