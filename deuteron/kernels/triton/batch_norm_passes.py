"""Batch normalisation for training in Triton, with a residual and an activation.

    forward     z = (x − mean) · rstd · weight + bias + residual        y = act(z)
    gradient    dz = grad · act′(z)       dbias = Σ dz       dweight = rstd · Σ dz · (x − mean)
                dx = weight · rstd · (dz − Σ dz / n − (x − mean) · rstd² · Σ dz · (x − mean) / n)

Bytes, in tensors of the size of x: forward reads x, then x (and the residual) and writes y: 3 (4).
The gradient reads grad and x, then both again, and writes dx: 5. With a residual it reads grad, x
and y, writes dz, which the residual receives, then reads dz and x and writes dx: 7; of relu's y
the signs are enough, which the forward step keeps as bits: 6 and a little.

x is seen as rows of lanes. Channels last: a row is a pixel, its lanes are the channels. Channels
first: a row is an image, its lanes are the positions of one channel. A tile is [A rows, B lanes].
Every element of a tile keeps its own running mean and squared spread (Welford) over the tiles that
a program visits; rows, then programs, are merged with Chan's formula. All means are kept relative
to a pivot: of the channel's first values the one nearest to 0, or 0 if they lie on both sides of
it. It is never much larger than the mean, so a mean near 0 is not the small difference of two
large numbers, and where it is a thousand times the deviation the pivot takes that away. If the
pivot lies far off, statistics are still as exact as Welford's. There are no atomics: two runs give
the same bits.

A first pass goes through the tiles upwards, the second downwards: what the first read last is in
L2 still. What is small takes one launch, each program with all rows of its channels.

Where the GPU can (CHAIN), the merge and the second pass are launched at once and wait for their
turn on the multiprocessors: a launch costs more than a merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.batch_norm_parts import (
    act,
    act_grad,
    channel_of,
    number,
    read_signs,
    start,
    tile_at,
    total,
    write_signs,
)
from deuteron.kernels.triton.chain import enter

SAMPLES = tl.constexpr(8)  # values of a channel that its pivot is chosen from

# ---- pieces of the forward step ----------------------------------------------------------------


@triton.jit
def _pivot(x, c, rows, channels, units, LAST: tl.constexpr, V: tl.constexpr):
    """The number nearest to 0 between the least and the largest of the first values of each
    channel. They are compared one after another: nothing crosses threads."""
    lanes = units * V
    there = c < channels
    for k in tl.static_range(SAMPLES):
        if LAST:
            at, row = k * lanes + c, k
        else:
            row = k // lanes
            at = (row * channels + c).to(tl.int64) * lanes + k % lanes
        v = tl.load(x + at, mask=there & (row < rows), other=0.0).to(tl.float32)
        if k == 0:
            least, most = v, v
        else:
            v = tl.where(row < rows, v, least)
            least, most = tl.minimum(least, v), tl.maximum(most, v)
    pivot = tl.where(least > 0.0, least, tl.where(most < 0.0, most, 0.0))
    return tl.where(tl.abs(pivot) < float("inf"), pivot, 0.0)


@triton.jit
def _rstd(var, eps):
    """1 / √(var + eps); nan where squares overflowed, and not the 0 that makes y its bias."""
    return tl.where(var == float("inf"), float("nan"), 1.0 / tl.sqrt(var + eps))


@triton.jit
def _statistics(
    x,
    first,
    step,
    block,
    rows,
    tiles,
    channels,
    units,
    across,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Count, mean above the pivot and squared spread per channel over the tiles first,
    first + step, …"""
    pivot = _pivot(x, channel_of(block, across, LAST, B), rows, channels, units, LAST, V)
    mean = tl.zeros((A, B), tl.float32)
    spread = tl.zeros((A, B), tl.float32)
    seen = 0.0
    for t in tl.range(first, tiles, step, num_stages=STAGES):
        at, row, lane = tile_at(t, block, rows, channels, units, across, LAST, A, B, V)
        v = tl.load(x + at, mask=row & lane, other=0.0).to(tl.float32) - pivot
        seen += 1.0
        off = tl.where(row & lane, v - mean, 0.0)
        mean += off * (1.0 / seen)
        spread += off * (v - mean)
    last = first + (tiles - 1 - first) // step * step
    _, row, lane = tile_at(last, block, rows, channels, units, across, LAST, A, B, V)
    visits = tl.where(lane, seen - tl.where(row, 0.0, 1.0), 0.0)  # only the last tile has gaps
    count = total(visits, LAST)
    centre = total(visits * mean, LAST) / count
    away = mean - centre
    return count, centre, total(spread + visits * away * away, LAST)


@triton.jit
def _learn(c, mean, var, share, unbiased, running_mean, running_var, new_mean, new_var, channels):
    """The running statistics after this batch."""
    keep = 1.0 - share
    if new_mean is not None:
        moved = mean
        if running_mean is not None:
            moved = keep * number(running_mean, c, channels, 0.0) + share * mean
        tl.store(new_mean + c, moved, mask=c < channels)
    if new_var is not None:
        grown = var * unbiased
        if running_var is not None:
            grown = keep * number(running_var, c, channels, 0.0) + share * grown
        tl.store(new_var + c, grown, mask=c < channels)


@triton.jit
def _normalise(x, residual, y, at, inside, mean, scale, bias, slope, ACT: tl.constexpr):
    """Writes y of a tile, and returns it as it was written."""
    z = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
    z = (z - mean) * scale + bias
    if residual is not None:
        z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    z = act(z, slope, ACT).to(y.dtype.element_ty)
    tl.store(y + at, z, mask=inside)
    return z


# ---- pieces of the gradient --------------------------------------------------------------------


@triton.jit
def _before(grad, x, y, residual, kept, at, inside, mean, scale, bias, slope, ACT: tl.constexpr):
    """The gradient before the activation, and x − mean."""
    g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean
    g = tl.where(kept == 0, 0.0, g)
    if ACT != "none":
        if y is not None:
            z = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        else:
            z = v * scale + bias
            if residual is not None:
                z += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        g = act_grad(g, z, slope, ACT)
    return g, v


@triton.jit
def _sums(
    grad,
    x,
    y,
    residual,
    signs,
    dz,
    first,
    step,
    block,
    mean,
    scale,
    bias,
    slope,
    rows,
    tiles,
    channels,
    units,
    across,
    AGAIN: tl.constexpr,
    ACT: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Σ dz and Σ dz · (x − mean) per channel over the tiles first, first + step, … If dz will be
    read AGAIN the sums are those of its rounded values, or dx would not sum to 0."""
    plain = tl.zeros((A, B), tl.float32)
    along = tl.zeros((A, B), tl.float32)
    for t in tl.range(first, tiles, step, num_stages=STAGES):
        at, row, lane = tile_at(t, block, rows, channels, units, across, LAST, A, B, V)
        inside = row & lane
        kept = read_signs(signs, t, block, rows, channels, units, across, LAST, A, B, V)
        g, v = _before(grad, x, y, residual, kept, at, inside, mean, scale, bias, slope, ACT)
        if dz is not None:
            rounded = g.to(dz.dtype.element_ty)
            tl.store(dz + at, rounded, mask=inside)
            if AGAIN:
                g = rounded.to(tl.float32)
        g = tl.where(inside, g, 0.0)
        plain += g
        along += g * tl.where(inside, v, 0.0)
    return total(plain, LAST), total(along, LAST)


@triton.jit
def _input_gradient(
    grad,
    x,
    y,
    residual,
    kept,
    dz,
    dx,
    at,
    inside,
    mean,
    scale,
    bias,
    centre,
    lean,
    slope,
    ACT: tl.constexpr,
):
    """dx of a tile, from dz where it was written, else from grad once more."""
    if dz is not None:
        g = tl.load(dz + at, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + at, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        v -= mean
    else:
        g, v = _before(grad, x, y, residual, kept, at, inside, mean, scale, bias, slope, ACT)
    tl.store(dx + at, scale * (g - centre - v * lean), mask=inside)


# ---- kernels: everything in one launch ---------------------------------------------------------


@triton.jit
def forward_once(
    x,
    residual,
    y,
    signs,
    weight,
    bias,
    running_mean,
    running_var,
    new_mean,
    new_var,
    mean_out,
    rstd_out,
    share,
    unbiased,
    eps,
    slope,
    rows,
    tiles,
    channels,
    units,
    ACT: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
):
    """A program owns its channels: statistics over all rows, then all rows once more."""
    block = tl.program_id(0)
    c = channel_of(block, 1, LAST, B)
    n, mean, spread = _statistics(x, 0, 1, block, rows, tiles, channels, units, 1, LAST, A, B, V, 2)
    mean += _pivot(x, c, rows, channels, units, LAST, V)
    var = spread / n
    rstd = _rstd(var, eps)
    tl.store(mean_out + c, mean, mask=c < channels)
    tl.store(rstd_out + c, rstd, mask=c < channels)
    _learn(c, mean, var, share, unbiased, running_mean, running_var, new_mean, new_var, channels)
    scale = rstd * number(weight, c, channels, 1.0)
    shift = number(bias, c, channels, 0.0)
    for t in tl.range(0, tiles):
        up = tiles - 1 - t
        at, row, lane = tile_at(up, block, rows, channels, units, 1, LAST, A, B, V)
        z = _normalise(x, residual, y, at, row & lane, mean, scale, shift, slope, ACT)
        write_signs(signs, z, row & lane, up, block, rows, channels, units, 1, LAST, A, B, V)


@triton.jit
def backward_once(
    grad,
    x,
    y,
    residual,
    signs,
    dz,
    dx,
    weight,
    bias,
    mean_in,
    rstd_in,
    dweight,
    dbias,
    part,
    slope,
    rows,
    tiles,
    channels,
    units,
    ACT: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
):
    """The same for the gradient. dz, where it is wanted, is written and not read again."""
    block = tl.program_id(0)
    c = channel_of(block, 1, LAST, B)
    mean, rstd = number(mean_in, c, channels, 0.0), number(rstd_in, c, channels, 0.0)
    scale, shift = rstd * number(weight, c, channels, 1.0), number(bias, c, channels, 0.0)
    plain, along = _sums(
        grad,
        x,
        y,
        residual,
        signs,
        dz,
        0,
        1,
        block,
        mean,
        scale,
        shift,
        slope,
        rows,
        tiles,
        channels,
        units,
        1,
        False,
        ACT,
        LAST,
        A,
        B,
        V,
        2,
    )
    if dweight is not None:
        tl.store(dweight + c, along * rstd, mask=c < channels)
    if dbias is not None:
        tl.store(dbias + c, plain, mask=c < channels)
    if dx is not None:
        centre, lean = plain * part, along * rstd * rstd * part
        for t in tl.range(0, tiles):
            up = tiles - 1 - t
            at, row, lane = tile_at(up, block, rows, channels, units, 1, LAST, A, B, V)
            kept = read_signs(signs, up, block, rows, channels, units, 1, LAST, A, B, V)
            _input_gradient(
                grad,
                x,
                y,
                residual,
                kept,
                None,
                dx,
                at,
                row & lane,
                mean,
                scale,
                shift,
                centre,
                lean,
                slope,
                ACT,
            )


# ---- kernels: a pass over x, a merge, a second pass --------------------------------------------


@triton.jit
def forward_statistics(
    x,
    parts,
    counts,
    blocks,
    splits,
    rows,
    tiles,
    channels,
    units,
    across,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """parts[0] and parts[1]: mean above the pivot and squared spread of each program's rows;
    counts: how many values that were."""
    enter(CHAIN, True)
    split, block = start(blocks, WIDE)
    n, mean, spread = _statistics(
        x, split, splits, block, rows, tiles, channels, units, across, LAST, A, B, V, STAGES
    )
    c = channel_of(block, across, LAST, B)
    part = split if LAST else split * across + block % across
    pieces = splits if LAST else splits * across
    tl.store(parts + part * channels + c, mean, mask=c < channels)
    tl.store(parts + (pieces + part) * channels + c, spread, mask=c < channels)
    tl.store(counts + part + 0 * c, n, mask=c == 0)


@triton.jit
def forward_merge(
    x,
    parts,
    counts,
    running_mean,
    running_var,
    new_mean,
    new_var,
    mean_out,
    rstd_out,
    n,
    share,
    unbiased,
    eps,
    pieces,
    rows,
    channels,
    units,
    LAST: tl.constexpr,
    V: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Chan's formula over the parts of B channels."""
    enter(CHAIN, False)
    c = (tl.program_id(0) * B + tl.arange(0, B))[None, :]
    p = tl.arange(0, P)[:, None]
    sums = tl.zeros((P, B), tl.float32)
    for first in tl.range(0, pieces, P):
        inside = (first + p < pieces) & (c < channels)
        count = tl.load(counts + first + p, mask=first + p < pieces, other=0.0)
        at = parts + (first + p) * channels + c
        sums += count * tl.load(at, mask=inside, other=0.0)
    mean = tl.sum(sums, 0, keep_dims=True) / n
    sums = tl.zeros((P, B), tl.float32)
    for first in tl.range(0, pieces, P):
        inside = (first + p < pieces) & (c < channels)
        count = tl.load(counts + first + p, mask=first + p < pieces, other=0.0)
        at = parts + (first + p) * channels + c
        away = tl.load(at, mask=inside, other=0.0) - mean
        spread = tl.load(at + pieces * channels, mask=inside, other=0.0)
        sums += tl.where(inside, spread + count * away * away, 0.0)
    var = tl.sum(sums, 0, keep_dims=True) / n
    mean += _pivot(x, c, rows, channels, units, LAST, V)
    tl.store(mean_out + c, mean, mask=c < channels)
    tl.store(rstd_out + c, _rstd(var, eps), mask=c < channels)
    _learn(c, mean, var, share, unbiased, running_mean, running_var, new_mean, new_var, channels)


@triton.jit
def forward_apply(
    x,
    residual,
    y,
    signs,
    weight,
    bias,
    mean_in,
    rstd_in,
    slope,
    blocks,
    last,
    each,
    rows,
    tiles,
    channels,
    units,
    across,
    ACT: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """y of ``each`` tiles in a row, the last tiles of x first."""
    enter(CHAIN, False)
    split, block = start(blocks, WIDE)
    first = (last - split) * each
    c = channel_of(block, across, LAST, B)
    mean, shift = number(mean_in, c, channels, 0.0), number(bias, c, channels, 0.0)
    scale = number(rstd_in, c, channels, 0.0) * number(weight, c, channels, 1.0)
    for t in tl.range(first, tl.minimum(first + each, tiles), num_stages=STAGES):
        at, row, lane = tile_at(t, block, rows, channels, units, across, LAST, A, B, V)
        z = _normalise(x, residual, y, at, row & lane, mean, scale, shift, slope, ACT)
        write_signs(signs, z, row & lane, t, block, rows, channels, units, across, LAST, A, B, V)


@triton.jit
def backward_sums(
    grad,
    x,
    y,
    residual,
    signs,
    dz,
    weight,
    bias,
    mean_in,
    rstd_in,
    parts,
    slope,
    blocks,
    splits,
    rows,
    tiles,
    channels,
    units,
    across,
    ACT: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """parts[0] and parts[1]: Σ dz and Σ dz · (x − mean) of each program's rows."""
    enter(CHAIN, True)
    split, block = start(blocks, WIDE)
    c = channel_of(block, across, LAST, B)
    mean, shift = number(mean_in, c, channels, 0.0), number(bias, c, channels, 0.0)
    scale = number(rstd_in, c, channels, 0.0) * number(weight, c, channels, 1.0)
    plain, along = _sums(
        grad,
        x,
        y,
        residual,
        signs,
        dz,
        split,
        splits,
        block,
        mean,
        scale,
        shift,
        slope,
        rows,
        tiles,
        channels,
        units,
        across,
        True,
        ACT,
        LAST,
        A,
        B,
        V,
        STAGES,
    )
    part = split if LAST else split * across + block % across
    pieces = splits if LAST else splits * across
    tl.store(parts + part * channels + c, plain, mask=c < channels)
    tl.store(parts + (pieces + part) * channels + c, along, mask=c < channels)


@triton.jit
def backward_merge(
    parts,
    rstd_in,
    dweight,
    dbias,
    means,
    share,
    pieces,
    channels,
    P: tl.constexpr,
    B: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """The sums of B channels, and what the second pass needs of them: means[0] = Σ dz / n and
    means[1] = rstd² · Σ dz · (x − mean) / n."""
    enter(CHAIN, False)
    c = (tl.program_id(0) * B + tl.arange(0, B))[None, :]
    p = tl.arange(0, P)[:, None]
    plain = tl.zeros((P, B), tl.float32)
    along = tl.zeros((P, B), tl.float32)
    for first in tl.range(0, pieces, P):
        inside = (first + p < pieces) & (c < channels)
        at = parts + (first + p) * channels + c
        plain += tl.load(at, mask=inside, other=0.0)
        along += tl.load(at + pieces * channels, mask=inside, other=0.0)
    rstd = number(rstd_in, c, channels, 0.0)
    dz, lean = tl.sum(plain, 0, keep_dims=True), tl.sum(along, 0, keep_dims=True) * rstd
    if dweight is not None:
        tl.store(dweight + c, lean, mask=c < channels)
    if dbias is not None:
        tl.store(dbias + c, dz, mask=c < channels)
    tl.store(means + c, dz * share, mask=c < channels)
    tl.store(means + channels + c, lean * rstd * share, mask=c < channels)


@triton.jit
def backward_apply(
    grad,
    x,
    y,
    residual,
    signs,
    dz,
    dx,
    weight,
    bias,
    mean_in,
    rstd_in,
    means,
    slope,
    blocks,
    last,
    each,
    rows,
    tiles,
    channels,
    units,
    across,
    ACT: tl.constexpr,
    LAST: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """dx of ``each`` tiles in a row, the last tiles of x first."""
    enter(CHAIN, False)
    split, block = start(blocks, WIDE)
    first = (last - split) * each
    c = channel_of(block, across, LAST, B)
    mean, shift = number(mean_in, c, channels, 0.0), number(bias, c, channels, 0.0)
    scale = number(rstd_in, c, channels, 0.0) * number(weight, c, channels, 1.0)
    centre = number(means, c, channels, 0.0)
    lean = number(means + channels, c, channels, 0.0)
    for t in tl.range(first, tl.minimum(first + each, tiles), num_stages=STAGES):
        at, row, lane = tile_at(t, block, rows, channels, units, across, LAST, A, B, V)
        kept = read_signs(signs, t, block, rows, channels, units, across, LAST, A, B, V)
        _input_gradient(
            grad,
            x,
            y,
            residual,
            kept,
            dz,
            dx,
            at,
            row & lane,
            mean,
            scale,
            shift,
            centre,
            lean,
            slope,
            ACT,
        )
