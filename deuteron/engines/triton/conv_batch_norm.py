"""A convolution and the batch norm in training that reads it, with a residual and an activation:
the recipe around those convolution kernels that also compute statistics of their result.

    z = conv(x, w) and, of each channel, parts of its mean and spread;  a merge of the parts;
    y = activation(batch norm of z by these + residual)

Batch norm alone reads z twice, once for the statistics: that pass is saved here. z is written for
the second pass, and for the gradient, which needs it anyway. On Hopper a kernel with specialised
warps convolves (windows of one pixel as a product); on other GPUs, and with strides that it
refuses, the portable kernel does.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.triton import batch_norm, conv, conv_hopper, product
from deuteron.engines.triton.batch_norm import TILE, Step, forward_step
from deuteron.engines.triton.common import Statistics, settings, tiling_of
from deuteron.engines.triton.multiplied import as_product as found_product
from deuteron.engines.triton.norm import REACHED
from deuteron.engines.triton.pixels import NORMALISED
from deuteron.ir.region import Region
from deuteron.kernels.triton.batch_norm_tiles import divide
from deuteron.policy import Policy
from deuteron.target import Target

SHARED = 4096  # bytes of shared memory through which threads exchange their statistics
COLUMNS = 64  # most columns of a tile: with more, sums and statistics do not fit in registers
PRODUCTS = (product.Tiling(128, COLUMNS, 64, 4, 6, 0.8, divided=True),)
OFFERED = 2
SLOWER = 1.1  # a convolution that also computes statistics takes this many times as long


class Parts(NamedTuple):
    """The region as a convolution, and as the norm of its result."""

    head: Region
    tail: Region
    step: Step
    z: str


@lru_cache(maxsize=1024)
def parts(region: Region) -> Parts:
    """The region as :class:`Parts`; refuses any other."""
    ops = region.ops[:2]
    fits = len(ops) == 2 and ops[0] == "conv" and ops[1] in NORMALISED
    refuse_if(not fits, "is no convolution with a batch norm in training behind it", quiet=True)
    first, *rest = region.nodes
    spread = first.attrs["transposed"]
    refuse_if(spread, "a transposed convolution is made in phases, which leave no statistics")
    head, tail = region.part("conv", [first], 0), region.part("norm", rest, 0)
    step = forward_step(tail)
    apart = step.read["x"] != first.output
    refuse_if(apart, "the norm is of another value", quiet=True)
    again = step.read.get("residual") == first.output
    refuse_if(again, "what follows the norm reads the convolution", "leave it outside")
    return Parts(head, tail, step, first.output)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    found = parts(region)
    refusal = batch_norm.BATCH_NORM[0].refuse(found.tail, target, policy)
    refuse_if(refusal, refusal.reason if refusal else "", refusal.remedy if refusal else "")
    same = found.step.image.strides == region.graph.types[found.z].strides
    refuse_if(not same, "the norm lies in another order than the convolution")
    refuse_if(not _ways(region, target, policy), "no kernel that leaves statistics makes it")


# ---- which kernel convolves, and what it should take


Ways = list[tuple[float, Knobs]]


def _ways(region: Region, target: Target, policy: Policy) -> Ways:
    """Seconds and knobs of the convolutions that also compute statistics, the fastest first."""
    head, less = parts(region).head, _with_room(target)
    ways: Ways = []
    if target.has_warpgroups and product.PRODUCT[0].refuse(head, less, policy) is None:
        ways = _as_product(head, less)
    elif conv_hopper.CONV_HOPPER.refuse(head, less, policy) is None:
        ways = _on_hopper(head, less)
    if not ways and conv.CONV[0].refuse(head, target, policy) is None:
        ways = [(s, {"by": "conv", **knobs}) for s, knobs in conv.in_one_part(head, target)]
    return sorted(ways, key=lambda way: way[0])[:OFFERED]


def _as_product(head: Region, target: Target) -> Ways:
    work = found_product(head)
    return [
        (product.seconds_of(head, work, t, target), {"by": "product", "columns": t.columns})
        for t in PRODUCTS
        if product.tiling_fits(head, work, t, target)
    ]


def _on_hopper(head: Region, target: Target) -> Ways:
    """The best tiling with a halo, and the best without one."""
    work, best = conv.as_convolution(head), dict[bool, tuple[float, Knobs]]()
    for t in conv_hopper.tilings():
        if t.columns <= COLUMNS and conv_hopper.tiling_fits(work, t, target):
            seconds = conv_hopper.seconds_of(head, work, t, target)
            if t.halo not in best or seconds < best[t.halo][0]:
                best[t.halo] = seconds, {"by": "conv_hopper", **t._asdict()}
    return [*best.values()]


def _with_room(target: Target) -> Target:
    return replace(target, shared_bytes=target.shared_bytes - SHARED)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    return [knobs for _, knobs in _ways(region, target, policy)]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the convolution and of the pass that normalises; the merge is little more than a
    launch."""
    ways = _ways(region, target, Policy(float32="tf32"))
    convolves = next(seconds for seconds, way in ways if way == settings(knobs))
    step, types = parts(region).step, region.graph.types
    moved = 2 + ("residual" in step.read)
    size = moved * step.image.nbytes
    size += types[step.values["signs"]].nbytes if "signs" in step.values else 0
    speed = target.cache_bandwidth if size < target.cache_bytes / 2 else target.stream
    applies = size / (max(speed, target.stream) * REACHED)
    return SLOWER * convolves + applies + 2 * target.launch


# ---- building


def _convolution(head: Region, knobs: Knobs, ctx: BuildContext) -> Statistics:
    """The convolution kernel that the knobs name."""
    by, own = knobs["by"], {n: v for n, v in settings(knobs).items() if n != "by"}
    if by == "conv":
        return conv.with_statistics(head, own, ctx)
    less = replace(ctx, target=_with_room(ctx.target))
    if by == "product":
        return product.with_statistics(head, tiling_of(own, PRODUCTS), less)
    return conv_hopper.with_statistics(head, conv_hopper.Tiling(**own), less)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.batch_norm import forward

    head, _, step, z = parts(region)
    made, types, image = _convolution(head, knobs, ctx), region.graph.types, step.image
    tile = TILE * 8 // image.dtype.bits
    d = divide(image.shape, True, ctx.target.units, tile=tile, once=False)
    how = step.attrs["activation"], image.dtype.short == "f32", made.pieces
    normalise = forward(d, step.attrs["momentum"], step.attrs["eps"], *how)
    picked, copies = batch_norm.picker(region, step)
    places = [region.inputs.index(v) for v in head.inputs]
    own, numbers = z not in region.outputs, 2 * made.pieces * d.channels
    of = types[z]

    def run(*tensors: Any) -> None:
        t = picked(tensors)
        x = tensors[0].new_empty_strided(of.shape, of.strides, dtype=of.dtype.torch) if own else t.x
        scratch = x.new_empty(numbers + made.pieces, dtype=torch.float32)
        counts = scratch[numbers:]
        made.run(*(tensors[i] for i in places), x, to=(scratch, counts, made.pieces))
        normalise(t._replace(x=x, parts=scratch, counts=counts))

    room = 4 * (numbers + made.pieces) + copies + (of.nbytes if own else 0)
    note = f"{made.note}, which leave statistics; a merge, a pass"
    over = batch_norm.over_old(region, step)
    return Kernel(run, writes=True, workspace=room, note=note, over=over)


# A kernel takes seconds to build for each size: plans by estimate leave convolutions to libraries.
CONV_BATCH_NORM = Recipe(
    "conv_batch_norm", NORMALISED, _refuse, _build, _knobs, _seconds, 4.5, by_estimate=False
)
