"""Backward of GroupNorm and InstanceNorm, and of an activation that follows.

    hat = (x − mean) · rstd                      z = hat · weight + offset
    g = grad · act'(z)                           inner = g · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ g · hat                          dbias = Σ g

A program takes one group of one sample: EACH channels of HW positions, which lie one after the
other in memory, in tiles of C channels × H positions. Sums for dweight and dbias of a sample are
left as partial results. Bytes, counted in tensors of the size of x:

held      all tiles stay in registers: read x and grad (extra), write dx       3, with extra 4
looped    x is read three times and grad twice, all but the first time from    3 from memory,
          the caches                                                           3 from there
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.batch_norm_parts import act_grad
from deuteron.kernels.triton.chain import enter
from deuteron.kernels.triton.norm_parts import over_root, read, write


@triton.jit
def of_channels(p, channel, k, EACH: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr):
    """The numbers of a tile's channels, a column."""
    j = k + tl.arange(0, C)[:, None]
    return read(p + channel + j, j < EACH, EACH % C == 0).to(WIDE)


@triton.jit
def bent_tile(
    g,
    v,
    w,
    weight,
    offset,
    channel,
    k,
    EACH: tl.constexpr,
    C: tl.constexpr,
    ACT: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
):
    """The gradient before the activation, of a tile whose normalised values are v."""
    if ACT == "none":
        return g
    else:
        z = v
        if weight is not None:
            z *= w
        if offset is not None:
            z += of_channels(offset, channel, k, EACH, C, WIDE)
        return act_grad(g, z, SLOPE, ACT)


@triton.jit
def looped(
    x,
    grad,
    weight,
    offset,
    extra,
    dx,
    dweight,
    dbias,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    HW: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Mean and variance in one pass: values are taken relative to the mean of the first tile. That
    mean differs from the group's by at most √(tiles) deviations, so little cancels."""
    enter(CHAIN, True)
    row = tl.program_id(0).to(tl.int64)
    L: tl.constexpr = EACH * HW
    BLOCK: tl.constexpr = C * H
    base = row * L
    c = tl.arange(0, BLOCK)
    shift = tl.sum(read(x + base + c, c < L, L % BLOCK == 0).to(WIDE), 0) / min(L, BLOCK)
    first = tl.zeros((BLOCK,), WIDE)
    second = tl.zeros((BLOCK,), WIDE)
    for o in range(0, L, BLOCK):
        v = read(x + base + o + c, o + c < L, L % BLOCK == 0).to(WIDE) - shift
        if L % BLOCK != 0:
            v = tl.where(o + c < L, v, 0.0)
        first += v
        second += v * v
    off = tl.sum(first, 0) / L
    var = tl.maximum(tl.sum(second, 0) / L - off * off, 0.0, tl.PropagateNan.ALL)
    rstd = over_root(var + EPS)
    channel = (row % GROUPS) * EACH
    partials = (row // GROUPS) * (GROUPS * EACH) + channel
    j = tl.arange(0, C)[:, None]
    h = tl.arange(0, H)[None, :]
    EVEN: tl.constexpr = EACH % C == 0 and HW % H == 0
    total = tl.zeros((C, 1), WIDE)
    products = tl.zeros((C, 1), WIDE)
    w = tl.full((C, 1), 1.0, WIDE)
    for k in range(0, EACH, C):
        sum_g = tl.zeros((C, H), WIDE)
        sum_gv = tl.zeros((C, H), WIDE)
        if weight is not None:
            w = of_channels(weight, channel, k, EACH, C, WIDE)
        for o in range(0, HW, H):
            at = base + (k + j) * HW + o + h
            inside = (k + j < EACH) & (o + h < HW)
            v = (read(x + at, inside, EVEN).to(WIDE) - shift - off) * rstd
            g = read(grad + at, inside, EVEN).to(WIDE)
            if not EVEN:
                v = tl.where(inside, v, 0.0)
            g = bent_tile(g, v, w, weight, offset, channel, k, EACH, C, ACT, SLOPE, WIDE)
            sum_g += g
            sum_gv += g * v
        of_g = tl.sum(sum_g, 1, keep_dims=True)
        of_gv = tl.sum(sum_gv, 1, keep_dims=True)
        if dweight is not None:
            write(dweight + partials + k + j, of_gv, k + j < EACH, EACH % C == 0)
        if dbias is not None:
            write(dbias + partials + k + j, of_g, k + j < EACH, EACH % C == 0)
        total += of_g * w
        products += of_gv * w
    if dx is not None:
        all_g = tl.sum(total) / L
        all_gv = tl.sum(products) / L
        for k in range(0, EACH, C):
            if weight is not None:
                w = of_channels(weight, channel, k, EACH, C, WIDE)
            for o in range(0, HW, H):
                at = base + (k + j) * HW + o + h
                inside = (k + j < EACH) & (o + h < HW)
                v = (read(x + at, inside, EVEN).to(WIDE) - shift - off) * rstd
                g = read(grad + at, inside, EVEN).to(WIDE)
                g = bent_tile(g, v, w, weight, offset, channel, k, EACH, C, ACT, SLOPE, WIDE)
                d = (g * w - all_g - v * all_gv) * rstd
                if extra is not None:
                    d += read(extra + at, inside, EVEN).to(WIDE)
                write(dx + at, d, inside, EVEN)


@triton.jit
def place(i, EACH: tl.constexpr, HW: tl.constexpr, C: tl.constexpr, H: tl.constexpr):
    """Offsets of the i-th tile of a group, and which of its elements are inside."""
    ACROSS: tl.constexpr = (HW + H - 1) // H
    j = i // ACROSS * C + tl.arange(0, C)[:, None]
    h = i % ACROSS * H + tl.arange(0, H)[None, :]
    return j * HW + h, (j < EACH) & (h < HW)


@triton.jit
def tiles_of(p, EACH: tl.constexpr, HW: tl.constexpr, C: tl.constexpr, H: tl.constexpr):
    """All tiles of a group, on their way at once."""
    ACROSS: tl.constexpr = (HW + H - 1) // H
    at, inside = place(0, EACH, HW, C, H)
    found = (read(p + at, inside, EACH % C == 0 and H <= HW),)
    for i in tl.static_range(1, (EACH + C - 1) // C * ACROSS):
        at, inside = place(i, EACH, HW, C, H)
        found = found + (read(p + at, inside, EACH % C == 0 and (i % ACROSS + 1) * H <= HW),)
    return found


@triton.jit
def distance(
    tile,
    mean,
    I: tl.constexpr,
    EACH: tl.constexpr,
    HW: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
):
    """The I-th tile less the mean; 0 outside of the group."""
    ACROSS: tl.constexpr = (HW + H - 1) // H
    v = tile.to(mean.dtype) - mean
    if EACH % C != 0 or (I % ACROSS + 1) * H > HW:
        _, inside = place(I, EACH, HW, C, H)
        v = tl.where(inside, v, 0.0)
    return v


@triton.jit
def held(
    x,
    grad,
    weight,
    offset,
    extra,
    dx,
    dweight,
    dbias,
    GROUPS: tl.constexpr,
    EACH: tl.constexpr,
    HW: tl.constexpr,
    EPS: tl.constexpr,
    ACT: tl.constexpr,
    SLOPE: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """The variance is that of centred values. A mean of 1000 is rounded by 3e-5 in float32; what is
    left of it is taken out where the elements are fine enough to show it."""
    enter(CHAIN, True)
    REFINE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth >= 32
    L: tl.constexpr = EACH * HW
    ACROSS: tl.constexpr = (HW + H - 1) // H
    DOWN: tl.constexpr = (EACH + C - 1) // C
    row = tl.program_id(0).to(tl.int64)
    base = row * L
    xs = tiles_of(x + base, EACH, HW, C, H)
    gs = tiles_of(grad + base, EACH, HW, C, H)
    total = xs[0].to(WIDE)
    for i in tl.static_range(1, DOWN * ACROSS):
        total += xs[i].to(WIDE)
    mean = tl.sum(total) / L
    squares = tl.zeros((C, H), WIDE)
    left = tl.zeros((C, H), WIDE)
    for i in tl.static_range(DOWN * ACROSS):
        v = distance(xs[i], mean, i, EACH, HW, C, H)
        squares += v * v
        if REFINE:
            left += v
    var = tl.sum(squares) / L
    if REFINE:
        off = tl.sum(left) / L
        var = tl.maximum(var - off * off, 0.0, tl.PropagateNan.ALL)
    rstd = over_root(var + EPS)
    channel = (row % GROUPS) * EACH
    partials = (row // GROUPS) * (GROUPS * EACH) + channel
    all_g = tl.zeros((C, 1), WIDE)
    all_gv = tl.zeros((C, 1), WIDE)
    w = tl.full((C, 1), 1.0, WIDE)
    bent = ()
    for k in tl.static_range(DOWN):
        sum_g = tl.zeros((C, H), WIDE)
        sum_gv = tl.zeros((C, H), WIDE)
        if weight is not None:
            w = of_channels(weight, channel, k * C, EACH, C, WIDE)
        for o in tl.static_range(ACROSS):
            v = distance(xs[k * ACROSS + o], mean, k * ACROSS + o, EACH, HW, C, H)
            if REFINE:
                v -= off
            v *= rstd
            g = gs[k * ACROSS + o].to(WIDE)
            g = bent_tile(g, v, w, weight, offset, channel, k * C, EACH, C, ACT, SLOPE, WIDE)
            bent = bent + (g,)
            sum_g += g
            sum_gv += g * v
        of_g = tl.sum(sum_g, 1, keep_dims=True)
        of_gv = tl.sum(sum_gv, 1, keep_dims=True)
        j = k * C + tl.arange(0, C)[:, None]
        if dweight is not None:
            write(dweight + partials + j, of_gv, j < EACH, EACH % C == 0)
        if dbias is not None:
            write(dbias + partials + j, of_g, j < EACH, EACH % C == 0)
        all_g += of_g * w
        all_gv += of_gv * w
    if dx is not None:
        mean_g = tl.sum(all_g) / L
        mean_gv = tl.sum(all_gv) / L
        for k in tl.static_range(DOWN):
            if weight is not None:
                w = of_channels(weight, channel, k * C, EACH, C, WIDE)
            for o in tl.static_range(ACROSS):
                v = xs[k * ACROSS + o].to(WIDE) - mean
                if REFINE:
                    v -= off
                v *= rstd
                d = (bent[k * ACROSS + o] * w - mean_g - v * mean_gv) * rstd
                at, inside = place(k * ACROSS + o, EACH, HW, C, H)
                if extra is not None:
                    more = read(extra + base + at, inside, EACH % C == 0 and (o + 1) * H <= HW)
                    d += more.to(WIDE)
                write(dx + base + at, d, inside, EACH % C == 0 and (o + 1) * H <= HW)
