"""Cross-entropy of long rows, one to a program at a time.

A row is read twice and its gradient written once. The first read finds maximum and sum and asks L2
to keep the row, the second comes from there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.cross_entropy_math import (
    LN2,
    LOG2E,
    anchor,
    online,
    own_share,
    row_loss,
    shares,
)


@triton.jit
def _to_16_bytes(p):
    """The pointer at the multiple of 16 bytes before p, and how many elements that is before."""
    back = (p.to(tl.int64) % 16).to(tl.int32) // (p.dtype.element_ty.primitive_bitwidth // 8)
    return tl.multiple_of(p - back, 16), back


@triton.jit
def _piece(x, i, low, high, EDGE: tl.constexpr, SHIFTED: tl.constexpr, POLICY: tl.constexpr):
    """Logits at i as float32, −inf outside of [low, high), which only a tile at an EDGE can be.
    A shifted row is read in whole 16 bytes, with what lies before it; ``high`` is then a multiple
    of them, as after the last row there may be nothing."""
    if not EDGE:
        v = tl.load(x + i, eviction_policy=POLICY).to(tl.float32)
    elif SHIFTED:
        wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
        end = tl.multiple_of(high, wide)
        v = tl.load(x + i, mask=i < end, other=float("-inf"), eviction_policy=POLICY)
        v = tl.where(i >= low, v.to(tl.float32), float("-inf"))
    else:
        v = tl.load(x + i, mask=i < high, other=float("-inf"), eviction_policy=POLICY)
        v = v.to(tl.float32)
    return v


@triton.jit
def _read(
    x,
    i,
    low,
    high,
    target,
    weight,
    m,
    s,
    masses,
    spreads,
    ref,
    smoothing,
    classes,
    EDGE: tl.constexpr,
    SHIFTED: tl.constexpr,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The first read of a tile. Shares that are the same for all classes need no sum of their
    own."""
    v = _piece(x, i, low, high, EDGE, SHIFTED, "evict_last")
    return _seen(
        v,
        i,
        low,
        high,
        target,
        weight,
        m,
        s,
        masses,
        spreads,
        ref,
        smoothing,
        classes,
        EDGE,
        PROBS,
        SPREAD,
    )


@triton.jit
def _seen(
    v,
    i,
    low,
    high,
    target,
    weight,
    m,
    s,
    masses,
    spreads,
    ref,
    smoothing,
    classes,
    EDGE: tl.constexpr,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """What is known of a row after a tile v of it more."""
    m, s = online(v, m, s, 0)
    if SPREAD:
        inside = (i >= low) & (i < high)
        if PROBS or weight is not None:
            c = i - low
            q = shares(target, c, weight, c, inside, smoothing, classes, PROBS)
            masses += tl.sum(q, 0)
            spreads += tl.sum(tl.where(inside, q * (v - ref), 0.0), 0)
        elif EDGE:
            spreads += tl.sum(tl.where(inside, v - ref, 0.0), 0)
        else:
            spreads += tl.sum(v - ref, 0)
    return m, s, masses, spreads


@triton.jit
def _write(
    x,
    grad,
    i,
    low,
    high,
    target,
    weight,
    k,
    rate,
    g0,
    smoothing,
    classes,
    EDGE: tl.constexpr,
    SHIFTED: tl.constexpr,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The second read of a tile, and its gradient. At an edge of a shifted row only whole 16 bytes
    are written: what lies beside belongs to others."""
    v = _piece(x, i, low, high, EDGE, SHIFTED, "evict_first")
    d = _slope(v, i - low, target, weight, k, rate, g0, smoothing, classes, PROBS, SPREAD)
    d = d.to(grad.dtype.element_ty)
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
def _slope(
    v, c, target, weight, k, rate, g0, smoothing, classes, PROBS: tl.constexpr, SPREAD: tl.constexpr
):
    """The gradient at classes c, without what an integer target takes from its own."""
    d = tl.exp2(v * LOG2E - k) * rate
    if SPREAD:
        if PROBS or weight is not None:
            inside = (c >= 0) & (c < classes)
            d -= g0 * shares(target, c, weight, c, inside, smoothing, classes, PROBS)
        else:
            d -= g0 * (smoothing / classes)
    return d


@triton.jit
def _write_ends(
    x,
    grad,
    low,
    high,
    target,
    weight,
    k,
    rate,
    g0,
    smoothing,
    classes,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """The elements of a shifted row before its first and after its last whole 16 bytes."""
    wide: tl.constexpr = 128 // grad.dtype.element_ty.primitive_bitwidth
    for end in tl.static_range(2):
        i = tl.arange(0, wide) + (high // wide * wide if end else 0)
        inside = (i >= low) & (i < high)
        if not end:
            inside = inside & (low > 0)
        v = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
        d = _slope(v, i - low, target, weight, k, rate, g0, smoothing, classes, PROBS, SPREAD)
        tl.store(grad + i, d.to(grad.dtype.element_ty), mask=inside)


@triton.jit
def _whole_16_bytes(x, n):
    wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    return n // wide * wide


@triton.jit
def _read_end(
    x,
    stop,
    high,
    low,
    target,
    weight,
    ref,
    smoothing,
    classes,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Maximum, sum and shares of what a shifted row has after its last whole 16 bytes."""
    wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
    i = (stop + tl.arange(0, wide))[None, :]
    zero = tl.zeros((wide,), tl.float32)
    m, s, ms, ss = _read(
        x,
        i,
        low,
        high,
        target,
        weight,
        zero + float("-inf"),
        zero,
        zero,
        zero,
        ref,
        smoothing,
        classes,
        True,
        False,
        PROBS,
        SPREAD,
    )
    top = tl.max(m, 0)
    return top, tl.sum(s * tl.exp2(m - anchor(top)), 0), tl.sum(ms, 0), tl.sum(ss, 0)


@triton.jit
def _first_tile(x, row, inner, x_outer, x_inner, i):
    at = x + (row // inner).to(tl.int64) * x_outer + (row % inner).to(tl.int64) * x_inner
    return tl.load(at + i, eviction_policy="evict_last")


@triton.jit
def one_row(
    x,
    target,
    weight,
    total,
    loss,
    lse,
    masses,
    grad,
    rows,
    inner,
    x_outer,
    x_inner,
    g_outer,
    g_inner,
    p_outer,
    p_inner,
    classes,
    ignore,
    smoothing,
    z,
    R: tl.constexpr,
    W: tl.constexpr,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
    SHIFTED: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A program has one long row at a time, whose classes lie side by side. Lane by lane it keeps a
    maximum and a sum of its own, so nothing crosses lanes before the end of the row. Only the tiles
    at the edges of a row have masks. The target of the next row is asked for a row ahead: with one
    program to a processor nothing else would hide that wait. AHEAD its first tile is as well, and
    before the gradient of this row is written: memory is read and written at the same time.

    SHIFTED rows may start anywhere, but x and grad at the same places of 16 bytes."""
    i = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    d0, d1, g0, g1 = tl.load(total), tl.load(total + 1), tl.load(total + 2), tl.load(total + 3)
    step = tl.num_programs(0)
    coming = tl.program_id(0).to(tl.int64)
    ahead = i
    if AHEAD:
        ahead = _first_tile(x, tl.program_id(0), inner, x_outer, x_inner, i)
    if not PROBS:
        coming = tl.load(target + coming).to(tl.int64)
    for row in range(tl.program_id(0), rows, step):
        outer, rest = (row // inner).to(tl.int64), (row % inner).to(tl.int64)
        y, skip = coming, False
        if not PROBS:
            skip = y == ignore
            coming = tl.load(target + row + step, mask=row + step < rows, other=0).to(tl.int64)
        at = x + outer * x_outer + rest * x_inner
        to = at
        if grad is not None:
            to = grad + outer * g_outer + rest * g_inner
        following = tl.where(row + step < rows, row + step, row)
        if skip:
            if AHEAD:
                ahead = _first_tile(x, following, inner, x_outer, x_inner, i)
            tl.store(loss + row, (0.0 * d0).to(loss.dtype.element_ty))
            if lse is not None:
                tl.store(lse + row, 0.0)
            if masses is not None:
                tl.store(masses + row, 0.0)
            if grad is not None:
                zero = tl.zeros((R, W), grad.dtype.element_ty)
                for o in range(0, classes, R * W):
                    tl.store(to + o + i, zero, mask=o + i < classes)
        else:
            own, picked, mass, spread, ref = 0.0, 0.0, 0.0, 0.0, 0.0
            shared = target
            known = True
            if PROBS:
                shared = target + outer * p_outer + rest * p_inner
            else:
                own, known = own_share(y, weight, smoothing, classes)
                picked = tl.load(at + y, mask=known, other=0.0).to(tl.float32)
            if SPREAD:
                ref = anchor(tl.load(at).to(tl.float32))
            low, first = 0, 0
            if SHIFTED:
                at, low = _to_16_bytes(at)
                first = R * W
                if grad is not None:
                    to = tl.multiple_of(to - low, 16)
            high = low + classes
            whole = high // (R * W) * (R * W)
            apart = tl.maximum(whole, R * W)
            begin, stop = whole, high
            if SHIFTED:
                begin, stop = 0, _whole_16_bytes(x, high)  # edges at 0 and at whole
            m = tl.full((W,), float("-inf"), tl.float32)
            s = tl.zeros((W,), tl.float32)
            ms = tl.zeros((W,), tl.float32)
            ss = tl.zeros((W,), tl.float32)
            start = first
            if AHEAD:
                start = R * W
                m, s, ms, ss = _seen(
                    ahead.to(tl.float32),
                    i,
                    low,
                    high,
                    shared,
                    weight,
                    m,
                    s,
                    ms,
                    ss,
                    ref,
                    smoothing,
                    classes,
                    False,
                    PROBS,
                    SPREAD,
                )
            else:
                for o in range(begin, stop, apart):
                    m, s, ms, ss = _read(
                        at,
                        o + i,
                        low,
                        stop,
                        shared,
                        weight,
                        m,
                        s,
                        ms,
                        ss,
                        ref,
                        smoothing,
                        classes,
                        True,
                        SHIFTED,
                        PROBS,
                        SPREAD,
                    )
            for o in range(start, whole, R * W):
                m, s, ms, ss = _read(
                    at,
                    o + i,
                    low,
                    high,
                    shared,
                    weight,
                    m,
                    s,
                    ms,
                    ss,
                    ref,
                    smoothing,
                    classes,
                    False,
                    SHIFTED,
                    PROBS,
                    SPREAD,
                )
            if AHEAD:
                for o in range(begin, stop, apart):
                    m, s, ms, ss = _read(
                        at,
                        o + i,
                        low,
                        stop,
                        shared,
                        weight,
                        m,
                        s,
                        ms,
                        ss,
                        ref,
                        smoothing,
                        classes,
                        True,
                        SHIFTED,
                        PROBS,
                        SPREAD,
                    )
            top = tl.max(m, 0)
            if SHIFTED:
                last, s2, mass, spread = _read_end(
                    at, stop, high, low, shared, weight, ref, smoothing, classes, PROBS, SPREAD
                )
                top = tl.maximum(top, last)
            k = anchor(top)
            s1 = tl.sum(s * tl.exp2(m - k), 0)
            if SHIFTED:
                s1 += s2 * tl.exp2(last - k)
            power = tl.log2(s1)
            if SPREAD:
                mass += tl.sum(ms, 0)
                spread += tl.sum(ss, 0)
                if not PROBS and weight is None:
                    mass, spread = smoothing, spread * (smoothing / classes)
            found = row_loss(own, picked, mass, spread, ref, k, power, z, d0, d1)
            tl.store(loss + row, found.to(loss.dtype.element_ty))
            if lse is not None:
                tl.store(lse + row, (k + power) * LN2)
            if masses is not None:
                tl.store(masses + row, own + mass)
            if AHEAD:
                ahead = _first_tile(x, following, inner, x_outer, x_inner, i)
            if grad is not None:
                slope = (own + mass) * g0 + 2.0 * z * ((k + power) * LN2) * g1
                rate = slope / s1
                tl.debug_barrier()  # the row is read by all before any of it is overwritten
                for o in range(first, whole, R * W):  # backwards: what was read last is nearest
                    _write(
                        at,
                        to,
                        whole - R * W - (o - first) + i,
                        low,
                        high,
                        shared,
                        weight,
                        k,
                        rate,
                        g0,
                        smoothing,
                        classes,
                        False,
                        SHIFTED,
                        PROBS,
                        SPREAD,
                    )
                for o in range(begin, stop, apart):
                    _write(
                        at,
                        to,
                        o + i,
                        low,
                        stop,
                        shared,
                        weight,
                        k,
                        rate,
                        g0,
                        smoothing,
                        classes,
                        True,
                        SHIFTED,
                        PROBS,
                        SPREAD,
                    )
                if SHIFTED:
                    _write_ends(
                        at,
                        to,
                        low,
                        high,
                        shared,
                        weight,
                        k,
                        rate,
                        g0,
                        smoothing,
                        classes,
                        PROBS,
                        SPREAD,
                    )
                if not PROBS:
                    there = tl.where(known, y, 0)
                    d = tl.exp2(picked * LOG2E - k) * rate - own * g0
                    if SPREAD:
                        d -= g0 * shares(at, there, weight, there, known, smoothing, classes, False)
                    tl.debug_barrier()
                    tl.store(to + low + y, d.to(grad.dtype.element_ty), mask=known)
