"""The gradient of the gather in image augmentation, as a gather: no atomics, the same bits always.

With place(p) where pixel p of the result lies in the image and weight(·) that of the blend::

    dx[q] = scale · Σ_p weight(place(p), q) · dy[p]

Which p have a weight for q? Those whose place lies within reach of q (1 pixel for bilinear, a half
for nearest, 2 for bicubic). The inverse of the image's matrix takes the corners of that square to
the result, and the kernel searches the box around them: some 16 pixels where the scale is kept.
Every weight is computed from the place as in the forward pass, so a box too large only costs time.

Bytes: dy is read once from memory (and some 16 times from the caches), dx written once.
"""

import triton
import triton.language as tl
from torch import Tensor

from deuteron.kernels.triton.augment import Sampling, Work, for_tensors, place, within
from deuteron.kernels.triton.launch import Launchable

BLOCK, WARPS = 256, 4


@triton.jit
def _inverse(row):
    """Return the adjugate of the matrix: its inverse up to a factor, which the division cancels."""
    a, d, g = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    b, e, h = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    c, f, i = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    return (
        (e * i - f * h, c * h - b * i, b * f - c * e),
        (f * g - d * i, a * i - c * g, c * d - a * f),
        (d * h - e * g, b * g - a * h, a * e - b * d),
    )


@triton.jit
def _edge(at, length, reach, low, high, BORDER: tl.constexpr):
    """Return the first and the last place that may have a weight for pixel ``at``."""
    before, after = at - reach, at + reach
    if BORDER:  # all that lies beyond the edge belongs to the edge
        before = tl.where(at < reach, tl.minimum(before, low - 1.0), before)
        after = tl.where(at + reach > length - 1.0, tl.maximum(after, high + 1.0), after)
    return before, after


@triton.jit
def _one_weight(p, at, length, S: tl.constexpr):
    """Return the weight that a place p gives to the pixel ``at``, along one dimension."""
    if S.border and S.neighbours < 4:
        p = within(p, length)
    if S.hat is not None:
        weight = S.hat(p - at)
    elif S.neighbours == 1:
        weight = tl.where(S.whole(p) == at, 1.0, 0.0).to(p.dtype)
    else:
        first = S.whole(p)
        weights, weight = S.weights(p - first), tl.zeros_like(p)
        for k in tl.static_range(S.neighbours):
            neighbour = first + (k - S.neighbours // 4)
            if S.border:
                neighbour = within(neighbour, length)
            weight += tl.where(neighbour == at, weights[k], 0.0)
    return weight


@triton.jit
def _box(row, i, j, work, S: tl.constexpr):
    """Return first and last row and column of the result that may have read pixel (i, j)."""
    kind: tl.constexpr = row.dtype.element_ty
    reach: tl.constexpr = S.neighbours * 0.5
    zero = tl.zeros([], kind)
    low_y, low_x = place(row, zero, zero, work, S.projective)
    high_y, high_x = low_y, low_x
    for k in tl.static_range(1, 4):
        bottom, right = zero + (work.rows - 1) * (k // 2), zero + (work.columns - 1) * (k % 2)
        py, px = place(row, bottom, right, work, S.projective)
        low_y, high_y = tl.minimum(low_y, py), tl.maximum(high_y, py)
        low_x, high_x = tl.minimum(low_x, px), tl.maximum(high_x, px)
    top, bottom = _edge(i, work.height, reach, low_y, high_y, S.border)
    left, right = _edge(j, work.width, reach, low_x, high_x, S.border)
    to_j, to_i, to_w = _inverse(row)
    # the sign of w over the image: where a corner has another sign, the box is unbounded
    sign = tl.where(to_w[2] < 0.0, -1.0, 1.0)
    first_i, last_i = tl.zeros_like(i) + work.rows, tl.zeros_like(i) - 1.0
    first_j, last_j = tl.zeros_like(i) + work.columns, tl.zeros_like(i) - 1.0
    endless = i < -1.0
    for k in tl.static_range(4):
        y, x = bottom if k // 2 else top, right if k % 2 else left
        v = (2.0 * y + 1.0) / work.height.to(kind) - 1.0
        u = (2.0 * x + 1.0) / work.width.to(kind) - 1.0
        w = to_w[0] * u + to_w[1] * v + to_w[2]
        endless = endless | (w * sign <= 0.0)
        at_i = (((to_i[0] * u + to_i[1] * v + to_i[2]) / w + 1.0) * work.rows - 1.0) * 0.5
        at_j = (((to_j[0] * u + to_j[1] * v + to_j[2]) / w + 1.0) * work.columns - 1.0) * 0.5
        first_i, last_i = tl.minimum(first_i, at_i), tl.maximum(last_i, at_i)
        first_j, last_j = tl.minimum(first_j, at_j), tl.maximum(last_j, at_j)
    if S.border and S.projective:  # what lies behind the horizon is folded onto the edge
        high, wide = work.height - 1.0, work.width - 1.0
        endless = endless | (i < reach) | (j < reach) | (i + reach > high) | (j + reach > wide)
    # a tenth of a pixel more than rounding can move a corner
    first_i = tl.where(endless, 0.0, tl.maximum(tl.ceil(first_i - 0.1), 0.0))
    first_j = tl.where(endless, 0.0, tl.maximum(tl.ceil(first_j - 0.1), 0.0))
    most_i, most_j = work.rows - 1.0, work.columns - 1.0
    last_i = tl.where(endless, most_i, tl.minimum(tl.floor(last_i + 0.1), most_i))
    last_j = tl.where(endless, most_j, tl.minimum(tl.floor(last_j + 0.1), most_j))
    return first_i, last_i, first_j, last_j


@triton.jit
def _read(at, weight, read):
    """Return what a pixel of the result adds; it is not read without weight: nan · 0 is nan."""
    return tl.where(read, weight * tl.load(at, read, 0.0).to(weight.dtype), 0.0)


@triton.jit
def _gather(dy, table, scale, dx, work, strides, to, S: tl.constexpr):
    """Fill a block of the image's pixels, in its three channels or, without rgb, in one channel."""
    kind: tl.constexpr = table.dtype.element_ty
    groups = 1 if S.rgb else work.channels
    image = tl.program_id(0) // work.programs
    n, channel = (image // groups).to(tl.int64), image % groups
    row = table + n * work.table
    dy += n * strides[0] + channel.to(tl.int64) * strides[1]
    dx += n * to[0] + channel.to(tl.int64) * to[1]
    pixel = tl.program_id(0) % work.programs * S.block + tl.arange(0, S.block)
    live = pixel < work.height * work.width
    whole_i, whole_j = pixel // work.width, pixel % work.width
    i, j = whole_i.to(kind), whole_j.to(kind)
    first_i, last_i, first_j, last_j = _box(row, i, j, work, S)
    rows = tl.max(tl.where(live, last_i - first_i + 1.0, 0.0)).to(tl.int32)
    across = tl.max(tl.where(live, last_j - first_j + 1.0, 0.0)).to(tl.int32)
    r = tl.zeros([S.block], kind)
    g, b = r, r
    for down in range(rows):
        at_i = first_i + down
        for right in range(across):
            at_j = first_j + right
            py, px = place(row, at_i, at_j, work, S.projective)
            weight = _one_weight(py, i, work.height, S) * _one_weight(px, j, work.width, S)
            read = live & (at_i <= last_i) & (at_j <= last_j) & (weight != 0.0)
            line, column = at_i.to(tl.int32), at_j.to(tl.int32)
            if S.big:
                line, column = line.to(tl.int64), column.to(tl.int64)
            at = dy + line * strides[2] + column * strides[3]
            r += _read(at, weight, read)
            if S.rgb:
                g += _read(at + strides[1], weight, read)
                b += _read(at + 2 * strides[1], weight, read)
    if scale is not None:
        r *= tl.load(scale + channel)
        if S.rgb:
            g, b = g * tl.load(scale + 1), b * tl.load(scale + 2)
    if S.big:
        whole_i, whole_j = whole_i.to(tl.int64), whole_j.to(tl.int64)
    at = dx + whole_i * to[2] + whole_j * to[3]
    tl.store(at, r.to(dx.dtype.element_ty), live)
    if S.rgb:
        tl.store(at + to[1], g.to(dx.dtype.element_ty), live)
        tl.store(at + 2 * to[1], b.to(dx.dtype.element_ty), live)


kernel = Launchable(_gather)


def gather_grad(dy: Tensor, table: Tensor, dx: Tensor, scale: Tensor | None, how: Sampling) -> None:
    """Fill ``dx`` [N, C, H, W] from ``dy`` [N, C, h, w]; ``scale`` has a factor per channel."""
    (n, channels, height, width), columns = dx.shape, table.stride(0)
    parts = triton.cdiv(height * width, BLOCK)
    work = Work(height, width, *dy.shape[2:], channels, columns, parts)
    programs = n * parts * (1 if channels == 3 else channels)
    code = for_tensors(how, BLOCK, dy, dx)
    kernel((programs,), dy, table, scale, dx, work, dy.stride(), dx.stride(), S=code, warps=WARPS)
