"""GroupNorm and InstanceNorm with an activation, forward; and backward of groups in parts.

    y = act((x − mean) · rstd · weight + bias)

A group is cut into parts that registers hold, of EACH channels × HW positions, which lie one after
the other in memory; a program takes one. Bytes, counted in tensors of the size of x:

forward     one part: read x, write y                                                  2
            several: x for the moments; x, y, what was read last first, out of L2      3
backward    x for the moments; x and grad for the sums; x and grad, dx                 6

Moments of a part are the mean distance from the first element of its group and the squares around
that mean, by two passes over what registers hold. Those of all parts are put together exactly
(Chan): nothing cancels, however large the mean.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.batch_norm_parts import act
from deuteron.kernels.triton.chain import enter
from deuteron.kernels.triton.launch import Launchable
from deuteron.kernels.triton.norm_groups import bent_tile, distance, of_channels, place, tiles_of
from deuteron.kernels.triton.norm_parts import over_root, read, write


@triton.jit
def _part(
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    HW: tl.constexpr,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    LAST_FIRST: tl.constexpr,
):
    """The part of a program, its group, where both begin, and the first channel. ALL: channels of a
    group, HW: positions of each, SIZE: elements of a part."""
    part = tl.program_id(0)
    if LAST_FIRST:
        part = tl.num_programs(0) - 1 - part
    row = part // PARTS
    group = row.to(tl.int64) * (ALL * HW)
    within = part % PARTS * SIZE
    return part, row, group, group + within, row % GROUPS * ALL + within // HW


@triton.jit
def _moments_of(
    tiles, pivot, EACH: tl.constexpr, HW: tl.constexpr, C: tl.constexpr, H: tl.constexpr
):
    """The mean distance from ``pivot``, and the sum of squares around that mean."""
    ACROSS: tl.constexpr = (HW + H - 1) // H
    COUNT: tl.constexpr = (EACH + C - 1) // C * ACROSS
    total = distance(tiles[0], pivot, 0, EACH, HW, C, H)
    for i in tl.static_range(1, COUNT):
        total += distance(tiles[i], pivot, i, EACH, HW, C, H)
    mean = tl.sum(total) / (EACH * HW)
    squares = tl.zeros_like(total)
    for i in tl.static_range(COUNT):
        v = distance(tiles[i], pivot, i, EACH, HW, C, H) - mean
        if EACH % C != 0 or (i % ACROSS + 1) * H > HW:
            _, inside = place(i, EACH, HW, C, H)
            v = tl.where(inside, v, 0.0)
        squares += v * v
    return mean, tl.sum(squares)


@triton.jit
def _merged(
    moments, row, EPS: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr, MANY: tl.constexpr
):
    """The mean distance of a group from its first element, and rstd."""
    p = tl.arange(0, MANY)
    there = p < PARTS
    at = moments + (row.to(tl.int64) * PARTS + p) * 2
    means = tl.load(at, mask=there, other=0.0)
    squares = tl.load(at + 1, mask=there, other=0.0)
    mean = tl.sum(means, 0) / PARTS
    apart = tl.where(there, means - mean, 0.0)
    var = tl.sum(squares + apart * apart * SIZE, 0) / (PARTS * SIZE)
    return mean, over_root(var + EPS)


@triton.jit
def _moments(
    x,
    moments,
    ALL: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    EACH: tl.constexpr,
    HW: tl.constexpr,
    WIDE: tl.constexpr,
    C: tl.constexpr,
    H: tl.constexpr,
    CHAIN: tl.constexpr,
):
    enter(CHAIN, True)
    part, _, group, base, _ = _part(1, ALL, POSITIONS, PARTS, EACH * HW, False)
    tiles = tiles_of(x + base, EACH, HW, C, H)
    mean, squares = _moments_of(tiles, tl.load(x + group).to(WIDE), EACH, HW, C, H)
    at = moments + part.to(tl.int64) * 2
    tl.store(at, mean)
    tl.store(at + 1, squares)


@triton.jit
def _forward(
    x,
    weight,
    bias,
    y,
    moments,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    MANY: tl.constexpr,
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
    """Without moments the part is the whole group."""
    enter(CHAIN, moments is None)
    SIZE: tl.constexpr = EACH * HW
    ACROSS: tl.constexpr = (HW + H - 1) // H
    _, row, group, base, channel = _part(GROUPS, ALL, POSITIONS, PARTS, SIZE, moments is not None)
    tiles = tiles_of(x + base, EACH, HW, C, H)
    pivot = tl.load(x + group).to(WIDE)
    if moments is None:
        mean, squares = _moments_of(tiles, pivot, EACH, HW, C, H)
        rstd = over_root(squares / SIZE + EPS)
    else:
        mean, rstd = _merged(moments, row, EPS, PARTS, SIZE, MANY)
    for i in tl.static_range((EACH + C - 1) // C * ACROSS):
        z = (tiles[i].to(WIDE) - pivot - mean) * rstd
        if weight is not None:
            z *= of_channels(weight, channel, i // ACROSS * C, EACH, C, WIDE)
        if bias is not None:
            z += of_channels(bias, channel, i // ACROSS * C, EACH, C, WIDE)
        at, inside = place(i, EACH, HW, C, H)
        z = act(z, SLOPE, ACT)
        write(y + base + at, z, inside, EACH % C == 0 and (i % ACROSS + 1) * H <= HW)


@triton.jit
def _sums(
    x,
    grad,
    weight,
    offset,
    moments,
    sums,
    dweight,
    dbias,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    MANY: tl.constexpr,
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
    """The sums of inner and inner · hat over a part; those of g and g · hat for each channel are
    partial results, [samples · pieces of a channel, channels]."""
    enter(CHAIN, False)
    ACROSS: tl.constexpr = (HW + H - 1) // H
    DOWN: tl.constexpr = (EACH + C - 1) // C
    PIECES: tl.constexpr = POSITIONS // HW
    part, row, group, base, channel = _part(GROUPS, ALL, POSITIONS, PARTS, EACH * HW, True)
    tiles = tiles_of(x + base, EACH, HW, C, H)
    grads = tiles_of(grad + base, EACH, HW, C, H)
    pivot = tl.load(x + group).to(WIDE)
    mean, rstd = _merged(moments, row, EPS, PARTS, EACH * HW, MANY)
    partials = row // GROUPS * PIECES + part % PIECES
    partials = partials.to(tl.int64) * (GROUPS * ALL) + channel
    all_g = tl.zeros((C, 1), WIDE)
    all_gv = tl.zeros((C, 1), WIDE)
    w = tl.full((C, 1), 1.0, WIDE)
    for k in tl.static_range(DOWN):
        sum_g = tl.zeros((C, H), WIDE)
        sum_gv = tl.zeros((C, H), WIDE)
        if weight is not None:
            w = of_channels(weight, channel, k * C, EACH, C, WIDE)
        for o in tl.static_range(ACROSS):
            v = (tiles[k * ACROSS + o].to(WIDE) - pivot - mean) * rstd
            g = grads[k * ACROSS + o].to(WIDE)
            g = bent_tile(g, v, w, weight, offset, channel, k * C, EACH, C, ACT, SLOPE, WIDE)
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
    at = sums + part.to(tl.int64) * 2
    tl.store(at, tl.sum(all_g))
    tl.store(at + 1, tl.sum(all_gv))


@triton.jit
def _backward(
    x,
    grad,
    weight,
    offset,
    extra,
    dx,
    moments,
    sums,
    GROUPS: tl.constexpr,
    ALL: tl.constexpr,
    POSITIONS: tl.constexpr,
    PARTS: tl.constexpr,
    MANY: tl.constexpr,
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
    """dx of a part, whose group's moments and sums are known."""
    enter(CHAIN, False)
    L: tl.constexpr = PARTS * EACH * HW
    ACROSS: tl.constexpr = (HW + H - 1) // H
    _, row, group, base, channel = _part(GROUPS, ALL, POSITIONS, PARTS, EACH * HW, False)
    tiles = tiles_of(x + base, EACH, HW, C, H)
    grads = tiles_of(grad + base, EACH, HW, C, H)
    pivot = tl.load(x + group).to(WIDE)
    mean, rstd = _merged(moments, row, EPS, PARTS, EACH * HW, MANY)
    p = tl.arange(0, MANY)
    of = sums + (row.to(tl.int64) * PARTS + p) * 2
    mean_g = tl.sum(tl.load(of, mask=p < PARTS, other=0.0), 0) / L
    mean_gv = tl.sum(tl.load(of + 1, mask=p < PARTS, other=0.0), 0) / L
    w = tl.full((C, 1), 1.0, WIDE)
    for k in tl.static_range((EACH + C - 1) // C):
        if weight is not None:
            w = of_channels(weight, channel, k * C, EACH, C, WIDE)
        for o in tl.static_range(ACROSS):
            v = (tiles[k * ACROSS + o].to(WIDE) - pivot - mean) * rstd
            g = grads[k * ACROSS + o].to(WIDE)
            g = bent_tile(g, v, w, weight, offset, channel, k * C, EACH, C, ACT, SLOPE, WIDE)
            d = (g * w - mean_g - v * mean_gv) * rstd
            at, inside = place(k * ACROSS + o, EACH, HW, C, H)
            if extra is not None:
                more = read(extra + base + at, inside, EACH % C == 0 and (o + 1) * H <= HW)
                d += more.to(WIDE)
            write(dx + base + at, d, inside, EACH % C == 0 and (o + 1) * H <= HW)


MOMENTS, WHOLE = Launchable(_moments), Launchable(_forward)
FORWARD, SUMS, BACKWARD = (Launchable(fn, follows=True) for fn in (_forward, _sums, _backward))
