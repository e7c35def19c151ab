"""Cross-entropy over rows of classes, with its gradient from the same launch.

For a row x with wanted shares q (one class, probabilities, smoothing and class weights together):

    lse = log Σ exp x            loss = lse · Σ q − Σ q · x + z · lse²
    d loss / dx = softmax(x) · (Σ q + 2 · z · lse) − q

Bytes: a row is read twice and its gradient written once. The first read finds maximum and sum,
the second comes from L2, where the first asked the row to stay, so memory sees one read and one
write: 8192 × 128256 in bf16 is 4.2 GB. The gradient may take the place of the logits.

Long rows that are ignored are not read. A class that does not exist makes its row nan.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.launch import Launchable

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))


@triton.jit
def _anchor(m):
    """What to subtract before exp: the maximum, or 0 where all of a row is −inf so far."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _online(v, m, s, AXIS: tl.constexpr):
    """Maximum and sum of exponentials so far, and a tile more: one rescale for the whole tile."""
    new = tl.maximum(m, tl.max(v, AXIS))
    base = _anchor(new)
    e = tl.exp2((v - tl.expand_dims(base, AXIS)) * LOG2E)
    return new, s * tl.exp2((m - base) * LOG2E) + tl.sum(e, AXIS)


@triton.jit
def _shares(probs, offset, weight, c, inside, smoothing, classes, PROBS: tl.constexpr):
    """q without what an integer target adds to its own class."""
    q = smoothing / classes
    if PROBS:
        q += (1.0 - smoothing) * tl.load(probs + offset, mask=inside, other=0.0).to(tl.float32)
    if weight is not None:
        q *= tl.load(weight + c, mask=(c >= 0) & (c < classes), other=0.0).to(tl.float32)
    return tl.where(inside, q, 0.0)


@triton.jit
def _own(y, weight, smoothing, classes):
    """What an integer target adds to q at its class, nan if there is no such class."""
    known = (y >= 0) & (y < classes)
    own = 1.0 - smoothing
    if weight is not None:
        own *= tl.load(weight + y, mask=known, other=0.0).to(tl.float32)
    return tl.where(known, own, float("nan")), known


@triton.jit
def _loss(own, picked, mass, spread, ref, base, log_sum, z, d0, d1):
    """The loss of a row; all logits enter as differences, so large ones lose no digits."""
    lse = base + log_sum
    whole = (own + mass) * log_sum - own * (picked - base) - (spread + mass * (ref - base))
    return whole * d0 + z * lse * lse * d1


@triton.jit
def _class_offset(c, stride):
    if stride is None:
        return c
    else:
        return c.to(tl.int64) * stride


@triton.jit
def one_row(
    x, target, weight, total, loss, lse, masses, grad, inner,
    x_outer, x_inner, g_outer, g_inner, p_outer, p_inner,
    classes, ignore, smoothing, z,
    R: tl.constexpr, W: tl.constexpr, PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """A program has one long row, whose classes lie side by side. Lane by lane it keeps a maximum
    and a sum of its own, so nothing crosses lanes before the end of the row."""
    row = tl.program_id(0).to(tl.int64)
    outer, rest = row // inner, row % inner
    x += outer * x_outer + rest * x_inner
    skip = False
    if not PROBS:
        y = tl.load(target + row).to(tl.int64)
        skip = y == ignore
    if grad is not None:
        grad += outer * g_outer + rest * g_inner
    i = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    d0, d1, g0, g1 = tl.load(total), tl.load(total + 1), tl.load(total + 2), tl.load(total + 3)
    if skip:
        tl.store(loss + row, (0.0 * d0).to(loss.dtype.element_ty))
        tl.store(lse + row, 0.0)
        if masses is not None:
            tl.store(masses + row, 0.0)
        if grad is not None:
            zero = tl.zeros((R, W), grad.dtype.element_ty)
            for o in range(0, classes, R * W):
                tl.store(grad + o + i, zero, mask=o + i < classes)
    else:
        own, picked, mass, spread, ref = 0.0, 0.0, 0.0, 0.0, 0.0
        if PROBS:
            target += outer * p_outer + rest * p_inner
        else:
            own, known = _own(y, weight, smoothing, classes)
            picked = tl.load(x + y, mask=known, other=0.0).to(tl.float32)
        m = tl.full((W,), float("-inf"), tl.float32)
        s = tl.zeros((W,), tl.float32)
        if SPREAD:
            ref = _anchor(tl.load(x).to(tl.float32))
            masses_so_far = tl.zeros((W,), tl.float32)
            spread_so_far = tl.zeros((W,), tl.float32)
        for o in range(0, classes, R * W):
            c = o + i
            inside = c < classes
            v = tl.load(x + c, mask=inside, other=float("-inf"), eviction_policy="evict_last")
            v = v.to(tl.float32)
            m, s = _online(v, m, s, 0)
            if SPREAD:
                q = _shares(target, c, weight, c, inside, smoothing, classes, PROBS)
                masses_so_far += tl.sum(q, 0)
                spread_so_far += tl.sum(tl.where(inside, q * (v - ref), 0.0), 0)
        base = _anchor(tl.max(m, 0))
        power = tl.log2(tl.sum(s * tl.exp2((m - base) * LOG2E), 0))
        if SPREAD:
            mass = tl.sum(masses_so_far, 0)
            spread = tl.sum(spread_so_far, 0)
        log_sum = power * LN2
        found = _loss(own, picked, mass, spread, ref, base, log_sum, z, d0, d1)
        tl.store(loss + row, found.to(loss.dtype.element_ty))
        tl.store(lse + row, base + log_sum)
        if masses is not None:
            tl.store(masses + row, own + mass)
        if grad is not None:
            slope = (own + mass) * g0 + 2.0 * z * (base + log_sum) * g1
            tl.debug_barrier()  # the row is read by all before any of it is overwritten
            steps = tl.cdiv(classes, R * W)
            for t in range(steps):  # backwards: what was read last is nearest
                c = (steps - 1 - t) * (R * W) + i
                inside = c < classes
                v = tl.load(x + c, mask=inside, eviction_policy="evict_first").to(tl.float32)
                d = tl.exp2((v - base) * LOG2E - power) * slope
                if SPREAD:
                    d -= g0 * _shares(target, c, weight, c, inside, smoothing, classes, PROBS)
                d = d.to(grad.dtype.element_ty)
                tl.store(grad + c, d, mask=inside, eviction_policy="evict_first")
            if not PROBS:
                d = tl.exp2((picked - base) * LOG2E - power) * slope - own * g0
                if SPREAD:
                    d -= g0 * _shares(x, y, weight, y, known, smoothing, classes, False)
                tl.debug_barrier()
                tl.store(grad + y, d.to(grad.dtype.element_ty), mask=known)


@triton.jit
def _tile(x, offset, inside):
    v = tl.load(x + offset, mask=inside, other=float("-inf"))
    return v.to(tl.float32)


@triton.jit
def many_rows(
    x, target, weight, total, loss, lse, masses, grad, inner, blocks,
    x_outer, x_inner, x_class, g_outer, g_inner, g_class, p_outer, p_inner, p_class,
    classes, ignore, smoothing, z,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """A program has several rows, of few classes or with classes far apart in memory."""
    outer = (tl.program_id(0) // blocks).to(tl.int64)
    j = (tl.program_id(0) % blocks) * ROWS + tl.arange(0, ROWS)
    there = j < inner
    live = there
    row = outer * inner + j
    xo = outer * x_outer + _class_offset(j, x_inner)
    po = outer * p_outer + _class_offset(j, p_inner)
    own, picked, y = 0.0, 0.0, row
    if not PROBS:
        y = tl.load(target + row, mask=there, other=0).to(tl.int64)
        live = there & (y != ignore)
        own, known = _own(y, weight, smoothing, classes)
        at = xo + _class_offset(y, x_class)
        picked = tl.load(x + at, mask=known & live, other=0.0).to(tl.float32)
    reach = live
    if x_class is not None:  # neighbours in memory are rows: one left out would split the load
        reach = there
    d0, d1, g0, g1 = tl.load(total), tl.load(total + 1), tl.load(total + 2), tl.load(total + 3)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    s = tl.zeros((ROWS,), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    spread = tl.zeros((ROWS,), tl.float32)
    ref = tl.zeros((ROWS,), tl.float32)
    if SPREAD:
        ref = _anchor(tl.load(x + xo, mask=live, other=0.0).to(tl.float32))
    for o in range(0, classes, BLOCK):
        c = o + tl.arange(0, BLOCK)
        inside = reach[:, None] & (c < classes)[None, :]
        v = _tile(x, xo[:, None] + _class_offset(c, x_class)[None, :], inside)
        m, s = _online(v, m, s, 1)
        if SPREAD:
            p = po[:, None] + _class_offset(c, p_class)[None, :]
            q = _shares(target, p, weight, c[None, :], inside, smoothing, classes, PROBS)
            mass += tl.sum(q, 1)
            spread += tl.sum(tl.where(inside, q * (v - ref[:, None]), 0.0), 1)
    base = _anchor(m)
    power = tl.log2(tl.where(live, s, 1.0))
    log_sum = power * LN2
    found = _loss(own, picked, mass, spread, ref, base, log_sum, z, d0, d1)
    found = tl.where(live, found, 0.0 * d0)
    tl.store(loss + row, found.to(loss.dtype.element_ty), mask=there)
    tl.store(lse + row, tl.where(live, base + log_sum, 0.0), mask=there)
    if masses is not None:
        tl.store(masses + row, tl.where(live, own + mass, 0.0), mask=there)
    if grad is not None:
        go = outer * g_outer + _class_offset(j, g_inner)
        slope = (own + mass) * g0 + 2.0 * z * (base + log_sum) * g1
        tl.debug_barrier()  # picked and ref are read by all before a row is overwritten
        for o in range(0, classes, BLOCK):
            c = o + tl.arange(0, BLOCK)
            inside = reach[:, None] & (c < classes)[None, :]
            v = _tile(x, xo[:, None] + _class_offset(c, x_class)[None, :], inside)
            d = tl.exp2((v - base[:, None]) * LOG2E - power[:, None]) * slope[:, None]
            if SPREAD:
                p = po[:, None] + _class_offset(c, p_class)[None, :]
                q = _shares(target, p, weight, c[None, :], inside, smoothing, classes, PROBS)
                d -= g0 * q
            if not PROBS:
                d -= tl.where(c[None, :] == y[:, None], own[:, None] * g0, 0.0)
            d = tl.where(live[:, None], d, 0.0).to(grad.dtype.element_ty)
            to = grad + go[:, None] + _class_offset(c, g_class)[None, :]
            tl.store(to, d, mask=there[:, None] & (c < classes)[None, :])


@triton.jit
def some_classes(
    x, target, weight, total, lse, masses, up, x_row, p_row, up_row,
    first, count, classes, ignore, smoothing, z,
    W: tl.constexpr, PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
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
        own, _ = _own(y, weight, smoothing, classes)
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
            d -= u * d0 * _shares(target, c, weight, c, inside, smoothing, classes, PROBS)
        if not PROBS:
            d -= tl.where(c == y, own * d0 * u, 0.0)
        tl.store(x + i, tl.where(live, d, 0.0).to(x.dtype.element_ty), mask=i < count)


# ---- launches --------------------------------------------------------------------------------

_one_row, _many_rows, _some_classes = map(Launchable, (one_row, many_rows, some_classes))

LONG = 4096  # classes, from where a row is worth a program of its own
LONGEST = 32768  # and from where it is worth all the warps there are


class Layout(NamedTuple):
    """Where the rows of a tensor are: ``outer`` groups of ``inner`` rows, and their strides."""

    outer: int
    inner: int
    by_outer: int
    by_inner: int
    by_class: int


class Spec(NamedTuple):
    """The numbers of a cross-entropy."""

    ignore: int
    smoothing: float
    z: float


def layout(x: torch.Tensor) -> Layout | None:
    """The rows of logits [C], [N, C] or [N, C, d1, …], or None where one stride for the trailing
    dimensions does not exist."""
    sizes, strides = list(x.shape), list(x.stride())
    while len(sizes) > 2 and sizes[-1] == 1:
        sizes.pop()
        strides.pop()
    if len(sizes) == 1:
        return Layout(1, 1, 0, 0, strides[0])
    if len(sizes) == 2:
        return Layout(1, sizes[0], 0, strides[0], strides[1])
    tail = [(n, s) for n, s in zip(sizes[2:], strides[2:], strict=True) if n != 1]
    for (_, before), (n, s) in pairwise(tail):
        if before != n * s:
            return None
    return Layout(sizes[0], math.prod(sizes[2:]), strides[0], tail[-1][1], strides[1])


def tile_of(classes: int, plain: bool) -> tuple[int, int]:
    """Lanes and warps for a long row. With 32 warps a thread has 64 registers, which is enough for
    one class per row in rows that start at multiples of 16, and for nothing else."""
    if classes <= LONGEST:
        return 2048, 8
    return (8192, 32) if plain else (4096, 16)


def launch_rows(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor,
    masses: torch.Tensor | None,
    grad: torch.Tensor | None,
    spec: Spec,
) -> None:
    """Loss and lse of every row; also Σ q and the gradient where there is a tensor for them, which
    for the gradient may be ``x``. ``total`` comes from ``loss_sums``. All of x, float targets and
    grad must have a layout; integer targets must be contiguous."""
    probs = target.is_floating_point()
    where, there = layout(x), layout(x if grad is None else grad)
    wanted = layout(target) if probs else Layout(0, 0, 0, 0, 1)
    assert where is not None and there is not None and wanted is not None
    classes = x.shape[min(1, x.dim() - 1)]
    spread = probs or spec.smoothing != 0.0
    numbers = (classes, *spec)
    given = (x, target, weight, total, loss, lse, masses, grad, where.inner)
    if classes > LONG and where.by_class == there.by_class == wanted.by_class == 1:
        wide, warps = tile_of(classes, plain=not spread and where.by_inner % 16 == 0)
        _one_row(
            (where.outer * where.inner,), *given, where.by_outer, where.by_inner,
            there.by_outer, there.by_inner, wanted.by_outer, wanted.by_inner, *numbers,
            R=4, W=wide, PROBS=probs, SPREAD=spread, warps=warps,
        )  # fmt: skip
        return
    if where.by_class == 1:
        block = triton.next_power_of_2(min(classes, LONG))
        rows = max(1, min(LONG // block, 64))
    else:
        rows, block = 64, min(64, triton.next_power_of_2(classes))
    blocks = triton.cdiv(where.inner, rows)
    strides: list[Any] = []
    for _, _, by_outer, by_inner, by_class in (where, there, wanted):
        strides += by_outer, _unit(by_inner), _unit(by_class)
    _many_rows(
        (where.outer * blocks,), *given, blocks, *strides, *numbers,
        ROWS=rows, BLOCK=block, PROBS=probs, SPREAD=spread, warps=4,
    )  # fmt: skip


def launch_some_classes(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    lse: torch.Tensor,
    masses: torch.Tensor,
    up: torch.Tensor,
    first: int,
    classes: int,
    spec: Spec,
) -> None:
    """Logits [N, count] of the classes from ``first`` on become their gradients; ``up`` is the
    gradient of the loss, one number or one for each row. Rows of x and of float targets must be
    contiguous."""
    probs = target.is_floating_point()
    _some_classes(
        (x.shape[0],), x, target, weight, total, lse, masses, up, x.stride(0),
        target.stride(0) if probs else 0, min(up.dim(), 1), first, x.shape[1], classes,
        *spec, W=triton.next_power_of_2(min(x.shape[1], LONG)), PROBS=probs,
        SPREAD=probs or spec.smoothing != 0.0, warps=4,
    )  # fmt: skip


def _unit(stride: int) -> Any:
    """None for 1: the kernel is then compiled for neighbours."""
    return None if stride == 1 else stride
