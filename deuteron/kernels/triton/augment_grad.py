"""The gradient of the gather in image augmentation, as a gather: no atomics, the same bits always.

With place(p) where pixel p of the result lies in the image and weight(·) that of the blend::

    dx[q] = scale · Σ_p weight(place(p), q) · dy[p]

Which p have a weight for q? Those whose place lies within reach of q (1 pixel for bilinear, a half
for nearest, 2 for bicubic). The inverse of the image's matrix takes the corners of that square to
the result, and the box around them is searched: some 16 pixels where the scale is kept. Every
weight is computed from the place as the forward pass has it, so a box too large costs time only.

Bytes: dy is read once from memory (and some 16 times from the caches), dx written once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.augment import MODES, cubic, place, rint
from deuteron.kernels.triton.launch import INT32, Launchable

BLOCK, WARPS = 256, 4
REACH = {1: 0.5, 2: 1.0, 3: 2.0}  # by mode


@triton.jit
def _inverse(row):
    """The adjugate of the matrix: its inverse up to a factor, which the quotient forgets."""
    a, d, g = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    b, e, h = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    c, f, i = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    return (
        e * i - f * h,
        c * h - b * i,
        b * f - c * e,
        f * g - d * i,
        a * i - c * g,
        c * d - a * f,
        d * h - e * g,
        b * g - a * h,
        a * e - b * d,
    )


@triton.jit
def _edge(at, size, reach, low, high, BORDER: tl.constexpr):
    """How far before and after pixel ``at`` places have a weight for it."""
    before, after = at - reach, at + reach
    if BORDER:  # all that lies beyond the edge belongs to the edge
        before = tl.where(at < reach, tl.minimum(before, low - 1.0), before)
        after = tl.where(at + reach > size - 1.0, tl.maximum(after, high + 1.0), after)
    return before, after


@triton.jit
def _one_weight(p, at, size, MODE: tl.constexpr, BORDER: tl.constexpr):
    """The weight along one dimension that a place p gives the pixel ``at``."""
    if BORDER and MODE != 3:
        p = tl.minimum(tl.maximum(p, 0.0), size - 1.0)
    if MODE == 1:
        weight = tl.where(rint(p) == at, 1.0, 0.0)
    elif MODE == 2:
        weight = tl.maximum(1.0 - tl.abs(p - at), 0.0)
    else:
        first = tl.floor(p)
        weight = tl.zeros_like(p)
        for k in tl.static_range(4):
            tap = first + (k - 1)
            if BORDER:
                tap = tl.minimum(tl.maximum(tap, 0.0), size - 1.0)
            weight += tl.where(tap == at, cubic(p - first, k), 0.0)
    return weight


@triton.jit
def _box(
    row, i, j, H, W, HO, WO, REACH: tl.constexpr, BORDER: tl.constexpr, PROJECTIVE: tl.constexpr
):
    """First and last row and column of the result that may have read pixel (i, j)."""
    kind: tl.constexpr = row.dtype.element_ty
    zero = tl.zeros([], kind)
    low_y, low_x = place(row, zero, zero, H, W, HO, WO, PROJECTIVE)
    high_y, high_x = low_y, low_x
    for k in tl.static_range(1, 4):
        py, px = place(
            row, zero + (HO - 1) * (k // 2), zero + (WO - 1) * (k % 2), H, W, HO, WO, PROJECTIVE
        )
        low_y, high_y = tl.minimum(low_y, py), tl.maximum(high_y, py)
        low_x, high_x = tl.minimum(low_x, px), tl.maximum(high_x, px)
    top, bottom = _edge(i, H, REACH, low_y, high_y, BORDER)
    left, right = _edge(j, W, REACH, low_x, high_x, BORDER)
    a, b, c, d, e, f, g, h, s = _inverse(row)
    # the sign of w over the image: where a corner has another, the box has no end
    sign = tl.where(s < 0.0, -1.0, 1.0)
    first_i, last_i = tl.zeros_like(i) + HO, tl.zeros_like(i) - 1.0
    first_j, last_j = tl.zeros_like(i) + WO, tl.zeros_like(i) - 1.0
    endless = i < -1.0
    for k in tl.static_range(4):
        y, x = bottom if k // 2 else top, right if k % 2 else left
        v, u = (2.0 * y + 1.0) / H.to(kind) - 1.0, (2.0 * x + 1.0) / W.to(kind) - 1.0
        w = g * u + h * v + s
        endless = endless | (w * sign <= 0.0)
        at_i = (((d * u + e * v + f) / w + 1.0) * HO - 1.0) * 0.5
        at_j = (((a * u + b * v + c) / w + 1.0) * WO - 1.0) * 0.5
        first_i, last_i = tl.minimum(first_i, at_i), tl.maximum(last_i, at_i)
        first_j, last_j = tl.minimum(first_j, at_j), tl.maximum(last_j, at_j)
    if BORDER and PROJECTIVE:  # what lies behind the horizon is folded onto the edge
        rim = (i < REACH) | (j < REACH) | (i + REACH > H - 1.0) | (j + REACH > W - 1.0)
        endless = endless | rim
    # a tenth of a pixel more than rounding can move a corner
    first_i = tl.where(endless, 0.0, tl.maximum(tl.ceil(first_i - 0.1), 0.0))
    first_j = tl.where(endless, 0.0, tl.maximum(tl.ceil(first_j - 0.1), 0.0))
    last_i = tl.where(endless, HO - 1.0, tl.minimum(tl.floor(last_i + 0.1), HO - 1.0))
    last_j = tl.where(endless, WO - 1.0, tl.minimum(tl.floor(last_j + 0.1), WO - 1.0))
    return first_i, last_i, first_j, last_j


@triton.jit
def _gather(
    dy,
    table,
    scale,
    dx,
    columns,
    H,
    W,
    HO,
    WO,
    gn,
    gc,
    gh,
    gw,
    xn,
    xc,
    xh,
    xw,
    parts,
    channels,
    MODE: tl.constexpr,
    REACH: tl.constexpr,
    BORDER: tl.constexpr,
    PROJECTIVE: tl.constexpr,
    RGB: tl.constexpr,
    BIG: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of pixels of the image, of its three channels or, without RGB, of one channel."""
    kind: tl.constexpr = table.dtype.element_ty
    groups = 1 if RGB else channels
    image = tl.program_id(0) // parts
    n, channel = (image // groups).to(tl.int64), image % groups
    row = table + n * columns
    dy += n * gn + channel.to(tl.int64) * gc
    dx += n * xn + channel.to(tl.int64) * xc
    pixel = tl.program_id(0) % parts * BLOCK + tl.arange(0, BLOCK)
    live = pixel < H * W
    whole_i, whole_j = pixel // W, pixel % W
    i, j = whole_i.to(kind), whole_j.to(kind)
    first_i, last_i, first_j, last_j = _box(row, i, j, H, W, HO, WO, REACH, BORDER, PROJECTIVE)
    rows = tl.max(tl.where(live, last_i - first_i + 1.0, 0.0)).to(tl.int32)
    across = tl.max(tl.where(live, last_j - first_j + 1.0, 0.0)).to(tl.int32)
    r = tl.zeros([BLOCK], kind)
    g, b = r, r
    for down in range(rows):
        at_i = first_i + down
        for right in range(across):
            at_j = first_j + right
            py, px = place(row, at_i, at_j, H, W, HO, WO, PROJECTIVE)
            weight = _one_weight(py, i, H, MODE, BORDER) * _one_weight(px, j, W, MODE, BORDER)
            # a pixel without weight is not read: nan times 0 would be nan
            read = live & (at_i <= last_i) & (at_j <= last_j) & (weight != 0.0)
            line, column = at_i.to(tl.int32), at_j.to(tl.int32)
            if BIG:
                line, column = line.to(tl.int64), column.to(tl.int64)
            at = dy + line * gh + column * gw
            r += tl.where(read, weight * tl.load(at, read, 0.0).to(kind), 0.0)
            if RGB:
                g += tl.where(read, weight * tl.load(at + gc, read, 0.0).to(kind), 0.0)
                b += tl.where(read, weight * tl.load(at + 2 * gc, read, 0.0).to(kind), 0.0)
    if scale is not None:
        r *= tl.load(scale + channel)
        if RGB:
            g, b = g * tl.load(scale + 1), b * tl.load(scale + 2)
    if BIG:
        whole_i, whole_j = whole_i.to(tl.int64), whole_j.to(tl.int64)
    at = dx + whole_i * xh + whole_j * xw
    tl.store(at, r.to(dx.dtype.element_ty), live)
    if RGB:
        tl.store(at + xc, g.to(dx.dtype.element_ty), live)
        tl.store(at + 2 * xc, b.to(dx.dtype.element_ty), live)


@lru_cache(maxsize=1)
def kernel() -> Launchable:
    return Launchable(_gather)


def constants(dy: torch.Tensor, dx: torch.Tensor, mode: str, padding: str, projective: bool) -> Any:
    """What the code of the kernel depends on beside element types."""
    span = max(
        sum((size - 1) * s for size, s in zip(t.shape[1:], t.stride()[1:], strict=True))
        for t in (dy, dx)
    )
    return {
        "MODE": MODES[mode],
        "REACH": REACH[MODES[mode]],
        "BORDER": padding == "border",
        "PROJECTIVE": projective,
        "RGB": dx.shape[1] == 3,
        "BIG": span >= INT32,
        "BLOCK": BLOCK,
    }


def gather_grad(
    dy: torch.Tensor,
    table: torch.Tensor,
    dx: torch.Tensor,
    scale: torch.Tensor | None,
    mode: str,
    padding: str,
    projective: bool,
) -> None:
    """Fill ``dx`` [N, C, H, W] from ``dy`` [N, C, h, w]; ``scale`` has a factor per channel."""
    (n, channels, height, width), (ho, wo) = dx.shape, dy.shape[2:]
    parts = triton.cdiv(height * width, BLOCK)
    groups = 1 if channels == 3 else channels
    kernel()(
        (n * groups * parts,),
        dy,
        table,
        scale,
        dx,
        table.stride(0),
        height,
        width,
        ho,
        wo,
        *dy.stride(),
        *dx.stride(),
        parts,
        channels,
        **constants(dy, dx, mode, padding, projective),
        warps=WARPS,
    )
