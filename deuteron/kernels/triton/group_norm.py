"""GroupNorm and InstanceNorm with an activation, forward and backward.

    hat = (x − mean) · rstd                      z = hat · weight + bias        y = act(z)
    g = grad · act′(z)                           inner = g · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ g · hat                          dbias = Σ g

The channels of a group lie one after the other in memory. A program takes a part of a group that
fits in registers, and starts the loads of all its tiles at once: the whole group, some of its
channels, or a piece of one channel. Bytes, counted in tensors of the size of x:

forward     one part: read x, write y                                                  2
            several: x for the moments; x again, last part first (L2), y               3
backward    one part: read x and grad (extra), write dx                                3
            several: x for the moments; x and grad for the sums; x and grad, dx        6

Moments of a part are the mean distance from the first element of its group, and the sum of squares
around that mean, by two passes over what registers hold. Those of all parts are merged exactly, by
Chan's formula: nothing cancels, however large the mean. Sums for dweight and dbias of each sample
are stored as partial results.

Generated code reads x three times forward. On an H200 in bfloat16, 32 × 64 × 112 × 112, group_norm
with silu and instance_norm with relu take two thirds of the time of torch.compile forward, and a
half and three fifths with the gradient (bench/results/functional-h200.md).
"""

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from deuteron.codegen.triton_load import jitted
from deuteron.codegen.triton_render import power_of_two
from deuteron.kernels.triton.launch import Launchable, chained, enter
from deuteron.kernels.triton.norm import over_root, read, wide_types, with_partial_sums, write
from deuteron.ops.activated import activation

# What a kernel reads and writes; None where there is nothing, or where it is not wanted. moments:
# of each part the mean distance and the squares around it; sums: Σ inner and Σ inner · hat.
Operands = namedtuple(
    "Operands",
    "x weight bias y grad extra offset dx dweight dbias moments sums",
    defaults=(None,) * 11,
)

# Constants: the GROUPS of a sample have EACH channels of HW positions. A part has CHANNELS and
# POSITIONS; EVEN: the last part does not have fewer. A channel has PIECES, a group PARTS; MANY is a
# power of two that is not less. A part is DOWN rows of ACROSS tiles, of C channels by H positions.
Parts = namedtuple(
    "Parts", "GROUPS EACH HW CHANNELS POSITIONS C H EVEN PIECES PARTS MANY DOWN ACROSS EPS CHAIN"
)

# A part: its number, that of its group, where the group and the part begin, and its first channel
# and position in the group.
Place = namedtuple("Place", "part group first base channel position")

# The first element of a group, its mean distance from that, and 1/√(var + eps).
Statistics = namedtuple("Statistics", "pivot mean rstd")


# ---- places --------------------------------------------------------------------------------------


@triton.constexpr_function
def is_full(i, G):
    """Whether all elements of a part's i-th tile exist. G arrives here as a plain tuple."""
    g = Parts(*G)
    return g.EVEN and g.CHANNELS % g.C == 0 and (i % g.ACROSS + 1) * g.H <= g.POSITIONS


@triton.jit
def _place(G: tl.constexpr, LAST_FIRST: tl.constexpr):
    part = tl.program_id(0)
    if LAST_FIRST:
        part = tl.num_programs(0) - 1 - part
    group, within = part // G.PARTS, part % G.PARTS
    channel, position = within // G.PIECES * G.CHANNELS, within % G.PIECES * G.POSITIONS
    first = group.to(tl.int64) * (G.EACH * G.HW)
    return Place(part, group, first, first + channel * G.HW + position, channel, position)


@triton.jit
def _tile(i: tl.constexpr, p, G: tl.constexpr):
    """Return offsets of the i-th tile of a part, and which of its elements exist."""
    j = i // G.ACROSS * G.C + tl.arange(0, G.C)[:, None]
    h = i % G.ACROSS * G.H + tl.arange(0, G.H)[None, :]
    there = (j < G.CHANNELS) & (h < G.POSITIONS)
    if not G.EVEN:
        there = there & (p.channel + j < G.EACH) & (p.position + h < G.HW)
    return j * G.HW + h, there


@triton.jit
def _tiles(of, p, G: tl.constexpr):
    """Load all tiles of a part at once."""
    found = ()
    for i in tl.static_range(G.DOWN * G.ACROSS):
        at, there = _tile(i, p, G)
        found = found + (read(of + p.base + at, there, is_full(i, G)),)
    return found


@triton.jit
def _channels(k, p, G: tl.constexpr):
    """Return the channels of the k-th row of tiles, as a column, and which of them exist."""
    j = k * G.C + tl.arange(0, G.C)[:, None]
    there = j < G.CHANNELS
    if not G.EVEN:
        there = there & (p.channel + j < G.EACH)
    return p.group % G.GROUPS * G.EACH + p.channel + j, there


@triton.jit
def _number(of, k, p, G: tl.constexpr, WIDE: tl.constexpr):
    """Load a number for each channel of the k-th row of tiles."""
    c, there = _channels(k, p, G)
    return read(of + c, there, is_full(0, G)).to(WIDE)


# ---- statistics ----------------------------------------------------------------------------------


@triton.jit
def _away(tile, mean, i: tl.constexpr, p, G: tl.constexpr):
    """Return the i-th tile less the mean; 0 outside of the part."""
    v = tile.to(mean.dtype) - mean
    if not is_full(i, G):
        _, there = _tile(i, p, G)
        v = tl.where(there, v, 0.0)
    return v


@triton.jit
def _centred(tile, pivot, mean, i: tl.constexpr, p, G: tl.constexpr):
    """Return the i-th tile less the mean, pivot + mean. It is subtracted in two steps, as one would
    lose digits; for numbers of 16 bits, which are coarser than that, one step is enough."""
    if tile.dtype.primitive_bitwidth < 32:
        return _away(tile, pivot + mean, i, p, G)
    else:
        return _away(tile.to(pivot.dtype) - pivot, mean, i, p, G)


@triton.jit
def _size(p, G: tl.constexpr):
    """Return how many elements a part has."""
    if G.EVEN:
        return G.CHANNELS * G.POSITIONS
    else:
        channels = tl.minimum(G.CHANNELS, G.EACH - p.channel)
        return channels * tl.minimum(G.POSITIONS, G.HW - p.position)


@triton.jit
def _moments_of(tiles, pivot, p, G: tl.constexpr):
    """Return the mean distance from ``pivot``, and the sum of squares around that mean."""
    total = _away(tiles[0], pivot, 0, p, G)
    for i in tl.static_range(1, G.DOWN * G.ACROSS):
        total += _away(tiles[i], pivot, i, p, G)
    mean = tl.sum(total) / _size(p, G)
    squares = tl.zeros_like(total)
    for i in tl.static_range(G.DOWN * G.ACROSS):
        v = _centred(tiles[i], pivot, mean, i, p, G)
        squares += v * v
    return mean, tl.sum(squares)


@triton.jit
def _merged(moments, p, G: tl.constexpr):
    """Return the mean distance of a group from its first element, and its variance."""
    k = tl.arange(0, G.MANY)
    there = k < G.PARTS
    at = moments + (p.group.to(tl.int64) * G.PARTS + k) * 2
    means = tl.load(at, mask=there, other=0.0)
    squares = tl.load(at + 1, mask=there, other=0.0)
    if G.EVEN:
        size = G.CHANNELS * G.POSITIONS
        mean = tl.sum(means, 0) / G.PARTS
    else:
        channels = tl.minimum(G.CHANNELS, G.EACH - k // G.PIECES * G.CHANNELS)
        size = channels * tl.minimum(G.POSITIONS, G.HW - k % G.PIECES * G.POSITIONS)
        mean = tl.sum(means * size, 0) / (G.EACH * G.HW)
    apart = tl.where(there, means - mean, 0.0)
    return mean, tl.sum(squares + apart * apart * size, 0) / (G.EACH * G.HW)


@triton.jit
def _statistics(t, tiles, p, G: tl.constexpr, WIDE: tl.constexpr):
    """Return the statistics of the group: from the tiles, if they are all of it, else from the
    moments of its parts."""
    pivot = tl.load(t.x + p.first).to(WIDE)
    if t.moments is None:
        mean, squares = _moments_of(tiles, pivot, p, G)
        var = squares / (G.EACH * G.HW)
    else:
        mean, var = _merged(t.moments, p, G)
    return Statistics(pivot, mean, over_root(var + G.EPS))


@triton.jit
def _hat(tile, s, i: tl.constexpr, p, G: tl.constexpr):
    """Return the i-th tile normalised; 0 outside of the part."""
    return _centred(tile, s.pivot, s.mean, i, p, G) * s.rstd


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def _moments(t, G: tl.constexpr, WIDE: tl.constexpr):
    enter(G.CHAIN, True)
    p = _place(G, False)
    pivot = tl.load(t.x + p.first).to(WIDE)
    mean, squares = _moments_of(_tiles(t.x, p, G), pivot, p, G)
    at = t.moments + p.part.to(tl.int64) * 2
    tl.store(at, mean)
    tl.store(at + 1, squares)


@triton.jit
def _forward(t, G: tl.constexpr, WIDE: tl.constexpr, ACT: tl.constexpr):
    """Without moments the part is the whole group."""
    enter(G.CHAIN, t.moments is None)
    p = _place(G, t.moments is not None)
    tiles = _tiles(t.x, p, G)
    s = _statistics(t, tiles, p, G, WIDE)
    for k in tl.static_range(G.DOWN):
        if t.weight is not None:
            w = _number(t.weight, k, p, G, WIDE)
        if t.bias is not None:
            b = _number(t.bias, k, p, G, WIDE)
        for i in tl.static_range(k * G.ACROSS, (k + 1) * G.ACROSS):
            z = _hat(tiles[i], s, i, p, G)
            if t.weight is not None:
                z *= w
            if t.bias is not None:
                z += b
            if ACT is not None:
                z = ACT(z)
            at, there = _tile(i, p, G)
            write(t.y + p.base + at, z, there, is_full(i, G))


@triton.jit
def _before(t, grad, v, w, k, p, G: tl.constexpr, WIDE: tl.constexpr, SLOPE: tl.constexpr):
    """Return the gradient before the activation, of a tile in the k-th row whose normalised values
    are v."""
    g = grad.to(WIDE)
    if SLOPE is not None:
        z = v
        if t.weight is not None:
            z *= w
        if t.offset is not None:
            z += _number(t.offset, k, p, G, WIDE)
        g = SLOPE(g, z)
    return g


@triton.jit
def _backward(t, G: tl.constexpr, WIDE: tl.constexpr, SLOPE: tl.constexpr, PASS: tl.constexpr):
    """PASS "whole": a group at once. Else a program has a part: pass "sums" stores its sums, and
    pass "dx" adds up those of all parts of the group. Σ g and Σ g · hat of each channel are partial
    results, [samples · pieces, channels]."""
    enter(G.CHAIN, PASS == "whole")
    p = _place(G, PASS == "sums")
    tiles = _tiles(t.x, p, G)
    grads = _tiles(t.grad, p, G)
    s = _statistics(t, tiles, p, G, WIDE)
    w = tl.full((G.C, 1), 1.0, WIDE)
    before = ()
    if PASS == "dx":
        k = tl.arange(0, G.MANY)
        of = t.sums + (p.group.to(tl.int64) * G.PARTS + k) * 2
        level = tl.sum(tl.load(of, mask=k < G.PARTS, other=0.0), 0) / (G.EACH * G.HW)
        slope = tl.sum(tl.load(of + 1, mask=k < G.PARTS, other=0.0), 0) / (G.EACH * G.HW)
    else:
        row = p.group // G.GROUPS * G.PIECES + p.part % G.PIECES
        partials = row.to(tl.int64) * (G.GROUPS * G.EACH)
        all_g = tl.zeros((G.C, 1), WIDE)
        all_gv = tl.zeros((G.C, 1), WIDE)
        for k in tl.static_range(G.DOWN):
            sum_g = tl.zeros((G.C, G.H), WIDE)
            sum_gv = tl.zeros((G.C, G.H), WIDE)
            if t.weight is not None:
                w = _number(t.weight, k, p, G, WIDE)
            for i in tl.static_range(k * G.ACROSS, (k + 1) * G.ACROSS):
                v = _hat(tiles[i], s, i, p, G)
                g = _before(t, grads[i], v, w, k, p, G, WIDE, SLOPE)
                before = before + (g,)
                sum_g += g
                sum_gv += g * v
            of_g = tl.sum(sum_g, 1, keep_dims=True)
            of_gv = tl.sum(sum_gv, 1, keep_dims=True)
            c, there = _channels(k, p, G)
            if t.dweight is not None:
                write(t.dweight + partials + c, of_gv, there, is_full(0, G))
            if t.dbias is not None:
                write(t.dbias + partials + c, of_g, there, is_full(0, G))
            all_g += of_g * w
            all_gv += of_gv * w
        level, slope = tl.sum(all_g), tl.sum(all_gv)
        if PASS == "sums":
            at = t.sums + p.part.to(tl.int64) * 2
            tl.store(at, level)
            tl.store(at + 1, slope)
        level, slope = level / (G.EACH * G.HW), slope / (G.EACH * G.HW)
    if PASS != "sums" and t.dx is not None:
        for k in tl.static_range(G.DOWN):
            if t.weight is not None:
                w = _number(t.weight, k, p, G, WIDE)
            for i in tl.static_range(k * G.ACROSS, (k + 1) * G.ACROSS):
                v = _hat(tiles[i], s, i, p, G)
                if PASS == "whole":
                    g = before[i]
                else:
                    g = _before(t, grads[i], v, w, k, p, G, WIDE, SLOPE)
                d = (g * w - level - v * slope) * s.rstd
                at, there = _tile(i, p, G)
                if t.extra is not None:
                    d += read(t.extra + p.base + at, there, is_full(i, G)).to(WIDE)
                write(t.dx + p.base + at, d, there, is_full(i, G))


MOMENTS, WHOLE, BACKWARD = Launchable(_moments), Launchable(_forward), Launchable(_backward)
FORWARD, LATER = Launchable(_forward, follows=True), Launchable(_backward, follows=True)

# ---- the calls; ``work`` and ``cut`` are those of ``engines/triton/group_norm.py``


def _constants(work: Any, cut: Any, chain: bool) -> Parts:
    tiles = (-(-cut.channels // cut.tile_channels), -(-cut.positions // cut.tile_positions))
    pieces, parts = cut.pieces(work), cut.parts(work)
    return Parts(
        *(work.groups, work.each, work.positions, cut.channels, cut.positions),
        *(cut.tile_channels, cut.tile_positions),
        work.each % cut.channels == 0 and work.positions % cut.positions == 0,
        *(pieces, parts, power_of_two(parts), *tiles),
        work.eps,
        chain,
    )


def forward(work: Any, cut: Any) -> Callable[[Operands], None]:
    """Return a function that fills y: a norm of groups and its activation."""
    parts, act = cut.parts(work), activation(work.activation)
    kind, wide = wide_types(work.size)
    f = None if act is None else jitted(act.traced, work.size == 4, divides=False)

    def run(t: Operands) -> None:
        chain = parts > 1 and chained(t.x.device)
        constants = {"G": _constants(work, cut, chain), "WIDE": wide, "warps": cut.warps}
        grid, moments = (work.rows * parts,), None
        if parts > 1:
            moments = t.x.new_empty((work.rows * parts, 2), dtype=kind)
            MOMENTS(grid, Operands(t.x, moments=moments), **constants)
        (FORWARD if parts > 1 else WHOLE)(grid, t._replace(moments=moments), ACT=f, **constants)

    return run


def backward(work: Any, cut: Any) -> Callable[[Operands], None]:
    """Return a function that fills dx, dweight and dbias, those that are there."""
    parts, act = cut.parts(work), activation(work.activation)
    kind, wide = wide_types(work.size)
    f = None if act is None else jitted(act.slope(), work.size == 4, divides=False)

    def run(t: Operands, chain: bool) -> None:
        constants = {"G": _constants(work, cut, chain), "WIDE": wide, "warps": cut.warps}
        grid = (work.rows * parts,)
        if parts == 1:
            BACKWARD(grid, t, SLOPE=f, PASS="whole", **constants)
            return
        rooms = (t.x.new_empty((work.rows * parts, 2), dtype=kind) for _ in range(2))
        t = t._replace(moments=next(rooms), sums=next(rooms))
        MOMENTS(grid, Operands(t.x, moments=t.moments), **constants)
        LATER(grid, t._replace(extra=None, dx=None), SLOPE=f, PASS="sums", **constants)
        if t.dx is not None:
            last = t._replace(dweight=None, dbias=None)
            LATER(grid, last, SLOPE=f, PASS="dx", **constants)

    count = cut.partial_results(work)
    return with_partial_sums(run, count, work.groups * work.each, kind)
