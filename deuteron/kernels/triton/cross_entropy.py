"""Cross-entropy over rows of classes, with its gradient from the same launch.

For a row x with wanted shares q (one class, probabilities, smoothing and class weights together):

    lse = log Σ exp x            loss = lse · Σ q − Σ q · x + z · lse²
    d loss / dx = softmax(x) · (Σ q + 2 · z · lse) − q

Bytes: a long row (here) is read twice and its gradient written once. The first read finds maximum
and sum, the second comes from L2, where the first asked the row to stay, so memory sees one read
and one write: 8192 × 128256 in bf16 is 4.2 GB. Short rows and images (``cross_entropy_many``) are
read once. The gradient may take the place of the logits.

Long rows that are ignored are not read. A class that does not exist makes its row nan.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from deuteron.kernels.triton.cross_entropy_many import many_rows, some_classes
from deuteron.kernels.triton.cross_entropy_math import (
    LN2,
    LOG2E,
    anchor,
    online,
    own_share,
    row_loss,
    shares,
)
from deuteron.kernels.triton.launch import Launchable


@triton.jit
def _to_16_bytes(p):
    """The pointer at the multiple of 16 bytes before p, and how many elements that is before."""
    back = (p.to(tl.int64) % 16).to(tl.int32) // (p.dtype.element_ty.primitive_bitwidth // 8)
    return tl.multiple_of(p - back, 16), back


@triton.jit
def _piece(x, i, low, high, EDGE: tl.constexpr, SHIFTED: tl.constexpr, POLICY: tl.constexpr):
    """Logits at i as float32, −inf outside of [low, high), which only a tile at an EDGE can be.
    A shifted row is read in whole 16 bytes, with what lies beside it."""
    if not EDGE:
        v = tl.load(x + i, eviction_policy=POLICY).to(tl.float32)
    elif SHIFTED:
        wide: tl.constexpr = 128 // x.dtype.element_ty.primitive_bitwidth
        end = tl.multiple_of((high + wide - 1) // wide * wide, wide)
        v = tl.load(x + i, mask=i < end, other=float("-inf"), eviction_policy=POLICY)
        v = tl.where((i >= low) & (i < high), v.to(tl.float32), float("-inf"))
    else:
        v = tl.load(x + i, mask=i < high, other=float("-inf"), eviction_policy=POLICY)
        v = v.to(tl.float32)
    return v


@triton.jit
def _read(
    x, i, low, high, target, weight, m, s, masses, spreads, ref, smoothing, classes,
    EDGE: tl.constexpr, SHIFTED: tl.constexpr, PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The first read of a tile. Shares that are the same for all classes need no sum of their
    own."""
    v = _piece(x, i, low, high, EDGE, SHIFTED, "evict_last")
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
    x, grad, i, low, high, target, weight, k, rate, g0, smoothing, classes,
    EDGE: tl.constexpr, SHIFTED: tl.constexpr, PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
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
    v, c, target, weight, k, rate, g0, smoothing, classes,
    PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
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
    x, grad, low, high, target, weight, k, rate, g0, smoothing, classes,
    PROBS: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
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
def one_row(
    x, target, weight, total, loss, lse, masses, grad, rows, inner,
    x_outer, x_inner, g_outer, g_inner, p_outer, p_inner,
    classes, ignore, smoothing, z,
    R: tl.constexpr, W: tl.constexpr, PROBS: tl.constexpr, SPREAD: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """A program has one long row at a time, whose classes lie side by side. Lane by lane it keeps a
    maximum and a sum of its own, so nothing crosses lanes before the end of the row. Only the tiles
    at the edges of a row have masks. The target of the next row is asked for a row ahead: with one
    program to a processor nothing else would hide that wait.

    SHIFTED rows may start anywhere, but x and grad at the same places of 16 bytes."""
    i = tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :]
    d0, d1, g0, g1 = tl.load(total), tl.load(total + 1), tl.load(total + 2), tl.load(total + 3)
    step = tl.num_programs(0)
    coming = tl.program_id(0).to(tl.int64)
    if not PROBS:
        coming = tl.load(target + coming).to(tl.int64)
    for row in range(tl.program_id(0).to(tl.int64), rows, step):
        outer, rest = row // inner, row % inner
        y, skip = coming, False
        if not PROBS:
            skip = y == ignore
            coming = tl.load(target + row + step, mask=row + step < rows, other=0).to(tl.int64)
        at = x + outer * x_outer + rest * x_inner
        to = at
        if grad is not None:
            to = grad + outer * g_outer + rest * g_inner
        if skip:
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
            begin = whole
            if SHIFTED:
                begin = 0  # both ends are edges, at 0 and at whole
            m = tl.full((W,), float("-inf"), tl.float32)
            s = tl.zeros((W,), tl.float32)
            ms = tl.zeros((W,), tl.float32)
            ss = tl.zeros((W,), tl.float32)
            for o in range(begin, high, apart):
                m, s, ms, ss = _read(
                    at, o + i, low, high, shared, weight, m, s, ms, ss, ref, smoothing, classes,
                    True, SHIFTED, PROBS, SPREAD,
                )  # fmt: skip
            for o in range(first, whole, R * W):
                m, s, ms, ss = _read(
                    at, o + i, low, high, shared, weight, m, s, ms, ss, ref, smoothing, classes,
                    False, SHIFTED, PROBS, SPREAD,
                )  # fmt: skip
            k = anchor(tl.max(m, 0))
            s1 = tl.sum(s * tl.exp2(m - k), 0)
            power = tl.log2(s1)
            if SPREAD:
                mass, spread = tl.sum(ms, 0), tl.sum(ss, 0)
                if not PROBS and weight is None:
                    mass, spread = smoothing, spread * (smoothing / classes)
            found = row_loss(own, picked, mass, spread, ref, k, power, z, d0, d1)
            tl.store(loss + row, found.to(loss.dtype.element_ty))
            if lse is not None:
                tl.store(lse + row, (k + power) * LN2)
            if masses is not None:
                tl.store(masses + row, own + mass)
            if grad is not None:
                slope = (own + mass) * g0 + 2.0 * z * ((k + power) * LN2) * g1
                rate = slope / s1
                tl.debug_barrier()  # the row is read by all before any of it is overwritten
                for o in range(first, whole, R * W):  # backwards: what was read last is nearest
                    _write(
                        at, to, whole - R * W - (o - first) + i, low, high, shared, weight, k, rate,
                        g0, smoothing, classes, False, SHIFTED, PROBS, SPREAD,
                    )  # fmt: skip
                for o in range(begin, high, apart):
                    _write(
                        at, to, o + i, low, high, shared, weight, k, rate, g0, smoothing, classes,
                        True, SHIFTED, PROBS, SPREAD,
                    )  # fmt: skip
                if SHIFTED:
                    _write_ends(
                        at, to, low, high, shared, weight, k, rate, g0, smoothing, classes, PROBS,
                        SPREAD,
                    )  # fmt: skip
                if not PROBS:
                    there = tl.where(known, y, 0)
                    d = tl.exp2(picked * LOG2E - k) * rate - own * g0
                    if SPREAD:
                        d -= g0 * shares(at, there, weight, there, known, smoothing, classes, False)
                    tl.debug_barrier()
                    tl.store(to + low + y, d.to(grad.dtype.element_ty), mask=known)


# ---- launches --------------------------------------------------------------------------------

_one_row, _many_rows, _some_classes = map(Launchable, (one_row, many_rows, some_classes))

LONG = 4096  # classes, from where a row is worth a program of its own
LONGEST = 32768  # and from where it is worth all the warps there are
HELD = 8192  # numbers of a tile that four warps hold in registers, beside what they become
FEW = 256  # classes far apart that are held in registers


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


class Plan(NamedTuple):
    """How rows are launched: the kernel's grid, its numbers (strides and sizes), its constants."""

    kernel: Launchable
    programs: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def sums(self) -> bool:
        """Whether programs have several rows, and may sum up their losses."""
        return self.kernel is _many_rows


@lru_cache(maxsize=1024)
def layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout | None:
    """The rows of logits [C], [N, C] or [N, C, d1, …], or None where one stride for the trailing
    dimensions does not exist."""
    sizes, strides = list(shape), list(stride)
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


def tile_of(classes: int, plain: bool, spread: bool) -> tuple[int, int, int]:
    """Numbers to a lane, lanes and warps for a long row. With 32 warps a thread has 64 registers,
    which is enough for ``plain`` rows: they start at multiples of 16, and shares are not read."""
    deep = 2 if spread else 4
    if classes <= LONGEST:
        return (4 if plain else 2), 2048, 8
    return (deep, 8192, 32) if plain else (deep, 4096, 16)


def plan_rows(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    grad: torch.Tensor | None,
    smooth: bool,
) -> Plan:
    """The launch for logits x. All of x, float targets and grad must have a layout."""
    probs = target.is_floating_point()
    out = x if grad is None else grad
    together = x.dtype == out.dtype and (x is out or not (x.data_ptr() ^ out.data_ptr()) & 15)
    return _plan(
        x.device, x.shape, x.stride(), out.stride(), target.stride() if probs else None,
        weight is not None, smooth, together,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device, shape: tuple[int, ...], x: tuple[int, ...], grad: tuple[int, ...],
    target: tuple[int, ...] | None, weighted: bool, smooth: bool, together: bool,
) -> Plan:  # fmt: skip
    probs = target is not None
    where, there = layout(shape, x), layout(shape, grad)
    wanted = layout(shape, target) if target is not None else Layout(0, 0, 0, 0, 1)
    assert where is not None and there is not None and wanted is not None
    classes = shape[min(1, len(shape) - 1)]
    fixed: dict[str, Any] = {"PROBS": probs, "SPREAD": probs or smooth}
    rows = where.outer * where.inner
    if classes > LONG and where.by_class == there.by_class == wanted.by_class == 1:
        steps = (where.by_outer, where.by_inner, there.by_outer, there.by_inner)
        even = all(n % 16 == 0 for n in (classes, *steps))
        plain = even and not probs and not (smooth and weighted)
        deep, lanes, warps = tile_of(classes, plain, probs or smooth)
        fixed |= {"R": deep, "W": lanes, "warps": warps}
        fixed["SHIFTED"] = together and not even and steps[:2] == steps[2:]
        numbers = (rows, where.inner, *steps, wanted.by_outer, wanted.by_inner, classes)
        programs = rows if warps < 32 else min(rows, processors(device))
        return Plan(_one_row, programs, numbers, fixed)
    block = triton.next_power_of_2(classes)
    if where.by_class == 1 and classes <= LONG:
        each = max(1, min(LONG // block, 64))
    elif classes <= FEW:
        each = min(512, HELD // block)
    else:
        each, block = 64, 64
    fixed |= {"ROWS": each, "BLOCK": block, "ONCE": block >= classes, "warps": 4}
    blocks = triton.cdiv(where.inner, each)
    strides: list[Any] = []
    for _, _, by_outer, by_inner, by_class in (where, there, wanted):
        strides += by_outer, _unit(by_inner), _unit(by_class)
    numbers = (where.inner, blocks, *strides, classes)
    return Plan(_many_rows, where.outer * blocks, numbers, fixed)


def launch_rows(
    plan: Plan,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    total: torch.Tensor,
    loss: torch.Tensor,
    lse: torch.Tensor | None,
    masses: torch.Tensor | None,
    grad: torch.Tensor | None,
    spec: Spec,
    summed: bool = False,
    alone: str = "",
    later: bool = False,
) -> None:
    """The loss of every row, or ``summed`` of every program; also lse, Σ q and the gradient where
    there is a tensor for them, which for the gradient may be ``x``. ``total`` comes from
    ``loss_sums``, or, if one program is ``alone`` and knows the reduction, from here. Integer
    targets must be contiguous."""
    how = {"SUMMED": summed, "ALONE": alone, "LATER": later} if plan.sums else {}
    plan.kernel(
        (plan.programs,), x, target, weight, total, loss, lse, masses, grad, *plan.numbers, *spec,
        **plan.constants, **how,
    )  # fmt: skip


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    """Of a GPU; in Triton's interpreter two, so that programs have more than one row."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count


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
