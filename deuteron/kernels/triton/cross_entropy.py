"""Cross-entropy over rows of classes, with its gradient from the same launch.

For a row x with wanted shares q (one class, probabilities, smoothing and class weights together):

    lse = log Σ exp x            loss = lse · Σ q − Σ q · x + z · lse²
    d loss / dx = softmax(x) · (Σ q + 2 · z · lse) − q

Bytes: a long row (``cross_entropy_long``) is read twice and its gradient written once. The first
read finds maximum and sum, the second comes from L2, where the first asked the row to stay, so
memory sees one read and one write: 8192 × 128256 in bf16 is 4.2 GB. Short rows and images
(``cross_entropy_many``) are read once. The gradient may take the place of the logits.

Long rows that are ignored are not read. A class that does not exist makes its row nan.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton

from deuteron.kernels.triton.cross_entropy_long import one_row
from deuteron.kernels.triton.cross_entropy_many import many_rows, some_classes
from deuteron.kernels.triton.launch import Launchable

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
        x.device,
        x.shape,
        x.stride(),
        out.stride(),
        target.stride() if probs else None,
        weight is not None,
        smooth,
        together,
    )


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    shape: tuple[int, ...],
    x: tuple[int, ...],
    grad: tuple[int, ...],
    target: tuple[int, ...] | None,
    weighted: bool,
    smooth: bool,
    together: bool,
) -> Plan:
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
        fixed["AHEAD"] = programs < rows
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
        (plan.programs,),
        x,
        target,
        weight,
        total,
        loss,
        lse,
        masses,
        grad,
        *plan.numbers,
        *spec,
        **plan.constants,
        **how,
    )


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
        (x.shape[0],),
        x,
        target,
        weight,
        total,
        lse,
        masses,
        up,
        x.stride(0),
        target.stride(0) if probs else 0,
        min(up.dim(), 1),
        first,
        x.shape[1],
        classes,
        *spec,
        W=triton.next_power_of_2(min(x.shape[1], LONG)),
        PROBS=probs,
        SPREAD=probs or spec.smoothing != 0.0,
        warps=4,
    )


def _unit(stride: int) -> Any:
    """None for 1: the kernel is then compiled for neighbours."""
    return None if stride == 1 else stride
