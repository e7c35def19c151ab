"""Cross-entropy of many rows to a program, and of a slice of the classes.

Rows of few classes, and rows whose classes lie far apart (images, whose neighbours in memory are
rows), are tiles [rows, classes]. Where all classes fit in a tile it is read once and its gradient
written once, from registers; else it is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from deuteron.kernels.triton.cross_entropy_math import (
    LN2,
    LOG2E,
    anchor,
    class_offset,
    online,
    own_share,
    row_loss,
    shares,
)
from deuteron.kernels.triton.loss_sums import kept, store_totals


@triton.jit
def _tile(x, offset, inside):
    v = tl.load(x + offset, mask=inside, other=float("-inf"))
    return v.to(tl.float32)


@triton.jit
def many_rows(
    x,
    target,
    weight,
    total,
    loss,
    lse,
    masses,
    grad,
    inner,
    blocks,
    x_outer,
    x_inner,
    x_class,
    g_outer,
    g_inner,
    g_class,
    p_outer,
    p_inner,
    p_class,
    classes,
    ignore,
    smoothing,
    z,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
    ONCE: tl.constexpr,
    SUMMED: tl.constexpr,
    ALONE: tl.constexpr,
    LATER: tl.constexpr,
):
    """A program has several rows. ONCE: all classes are in one tile. SUMMED: ``loss`` gets the sum
    of the rows of a program, else each row. ALONE: there is one program for all rows, which finds
    the ``total`` itself, "sum" or "mean" (see ``store_totals`` for LATER), and needs nobody before
    or after."""
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    j = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    there = j < inner
    live = there
    row = outer * inner + j
    xo = outer * x_outer + class_offset(j, x_inner)
    po = outer * p_outer + class_offset(j, p_inner)
    own, picked, y = 0.0, 0.0, row
    if not PROBS:
        y = tl.load(target + row, mask=there, other=0).to(tl.int64)
        live = there & (y != ignore)
        own, known = own_share(y, weight, smoothing, classes)
        at = xo + class_offset(y, x_class)
        picked = tl.load(x + at, mask=known & live, other=0.0).to(tl.float32)
    reach = live
    if x_class is not None:  # neighbours in memory are rows: one left out would split the load
        reach = there
    if ALONE == "mean":
        number = tl.sum(live.to(tl.float32), 0)
        whole = number
        if not PROBS and weight is not None:
            whole = tl.sum(kept(weight, y, live, classes), 0)
        d0, d1, g0, g1 = store_totals(total, number, whole, LATER)
    elif ALONE == "sum":
        d0, d1, g0, g1 = 1.0, 1.0, 1.0, 1.0
        tl.store(total + 4, 1.0)
    else:
        d0, d1, g0, g1 = tl.load(total), tl.load(total + 1), tl.load(total + 2), tl.load(total + 3)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    ref = tl.zeros((ROWS,), tl.float32)
    if SPREAD:
        ref = anchor(tl.load(x + xo, mask=live, other=0.0).to(tl.float32))
    if ONCE:
        c = tl.arange(0, BLOCK)
        inside = reach[:, None] & (c < classes)[None, :]
        v = _tile(x, xo[:, None] + class_offset(c, x_class)[None, :], inside)
        k = anchor(tl.max(v, 1) * LOG2E)
        e = tl.exp2(v * LOG2E - k[:, None])
        s = tl.sum(e, 1)
        if SPREAD:
            p = po[:, None] + class_offset(c, p_class)[None, :]
            q = shares(target, p, weight, c[None, :], inside, smoothing, classes, PROBS)
            mass = tl.sum(q, 1)
            spread = tl.sum(tl.where(inside, q * (v - ref[:, None]), 0.0), 1)
    else:
        for o in range(0, classes, BLOCK):
            c = o + tl.arange(0, BLOCK)
            inside = reach[:, None] & (c < classes)[None, :]
            v = _tile(x, xo[:, None] + class_offset(c, x_class)[None, :], inside)
            m, s = online(v, m, s, 1)
            if SPREAD:
                p = po[:, None] + class_offset(c, p_class)[None, :]
                q = shares(target, p, weight, c[None, :], inside, smoothing, classes, PROBS)
                mass += tl.sum(q, 1)
                spread += tl.sum(tl.where(inside, q * (v - ref[:, None]), 0.0), 1)
        k = anchor(m)
    power = tl.log2(tl.where(live, s, 1.0))
    found = row_loss(own, picked, mass, spread, ref, k, power, z, d0, d1)
    found = tl.where(live, found, 0.0 * d0)
    if SUMMED:
        every = tl.sum(tl.where(there, found, 0.0), 0)
        tl.store(loss + tl.program_id(0), every.to(loss.dtype.element_ty))
    else:
        tl.store(loss + row, found.to(loss.dtype.element_ty), mask=there)
    if lse is not None:
        tl.store(lse + row, tl.where(live, (k + power) * LN2, 0.0), mask=there)
    if masses is not None:
        tl.store(masses + row, tl.where(live, own + mass, 0.0), mask=there)
    if grad is not None:
        go = outer * g_outer + class_offset(j, g_inner)
        rate = ((own + mass) * g0 + 2.0 * z * ((k + power) * LN2) * g1) / s
        if not PROBS:
            own *= g0
        tl.debug_barrier()  # picked and ref are read by all before a row is overwritten
        if ONCE:
            d = e * rate[:, None]
            if SPREAD:
                d -= g0 * q
            if not PROBS:
                d -= tl.where(c[None, :] == y[:, None], own[:, None], 0.0)
            d = tl.where(live[:, None], d, 0.0).to(grad.dtype.element_ty)
            to = grad + go[:, None] + class_offset(c, g_class)[None, :]
            tl.store(to, d, mask=there[:, None] & (c < classes)[None, :])
        else:
            for o in range(0, classes, BLOCK):
                c = o + tl.arange(0, BLOCK)
                inside = reach[:, None] & (c < classes)[None, :]
                v = _tile(x, xo[:, None] + class_offset(c, x_class)[None, :], inside)
                d = tl.exp2(v * LOG2E - k[:, None]) * rate[:, None]
                if SPREAD:
                    p = po[:, None] + class_offset(c, p_class)[None, :]
                    q = shares(target, p, weight, c[None, :], inside, smoothing, classes, PROBS)
                    d -= g0 * q
                if not PROBS:
                    d -= tl.where(c[None, :] == y[:, None], own[:, None], 0.0)
                d = tl.where(live[:, None], d, 0.0).to(grad.dtype.element_ty)
                to = grad + go[:, None] + class_offset(c, g_class)[None, :]
                tl.store(to, d, mask=there[:, None] & (c < classes)[None, :])


@triton.jit
def some_classes(
    x,
    target,
    weight,
    total,
    lse,
    masses,
    up,
    x_row,
    p_row,
    up_row,
    first,
    count,
    classes,
    ignore,
    smoothing,
    z,
    W: tl.constexpr,
    PROBS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Turns the logits of ``count`` classes, from ``first`` on, into their gradients, for rows
    whose lse and Σ q are known already."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_row
    own, live = 0.0, True
    y = row
    if PROBS:
        target += row * p_row
    else:
        y = tl.load(target + row).to(tl.int64)
        live = y != ignore
        own, _ = own_share(y, weight, smoothing, classes)
    d0, d1 = tl.load(total), tl.load(total + 1)
    u = tl.load(up + row * up_row).to(tl.float32)
    l = tl.load(lse + row)
    slope = (tl.load(masses + row) * d0 + 2.0 * z * l * d1) * u
    for o in range(0, count, W):
        i = o + tl.arange(0, W)
        inside = (i < count) & live
        c = first + i
        v = tl.load(x + i, mask=inside, other=float("-inf")).to(tl.float32)
        d = tl.exp2((v - l) * LOG2E) * slope
        if SPREAD:
            d -= u * d0 * shares(target, c, weight, c, inside, smoothing, classes, PROBS)
        if not PROBS:
            d -= tl.where(c == y, own * d0 * u, 0.0)
        tl.store(x + i, tl.where(live, d, 0.0).to(x.dtype.element_ty), mask=i < count)
