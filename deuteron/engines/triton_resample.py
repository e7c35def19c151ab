"""Resizing and average pooling with their gradients: the recipe around
``kernels/triton/resample.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.taps import Taps, cells, resized, untouched, windows
from deuteron.kernels.triton.resample_ways import Way, is_last, ways
from deuteron.policy import Policy
from deuteron.target import Target

# operator → whether it is the gradient
OPS = {
    "resize": False,
    "resize_grad": True,
    "avg_pool": False,
    "avg_pool_grad": True,
    "adaptive_avg_pool": False,
    "adaptive_avg_pool_grad": True,
}
MOST_TAPS = 64  # along an axis
REACHED = 0.8  # of the bandwidth of a copy, with few taps
REGULAR = 0.93  # and where places follow from numbers
UNITS = 132  # multiprocessors, for which times were measured
MOST = 2**31 - 2**20  # places within an image and programs are counted in 32 bits


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    node = refuse_anywhere(target) or only_node(region, OPS)
    if isinstance(node, Refusal):
        return node
    x, y = _ends(region)
    if x.rank == 5:
        return Refusal("resamples rows and images, not volumes", "resample slice by slice")
    if x.numel == 0 or y.numel == 0:
        return Refusal("there is nothing to compute: a size is 0")
    if _keeps_a_size(node, x, y):
        return Refusal("a size stays though a factor was given", "leave out the factor")
    if max(_reach(x), _reach(y)) > MOST or y.numel // min(y.shape[1], 8) > MOST:
        return Refusal("has more elements than 32 bits count", "split the batch or the image")
    most = max(taps.most for taps in axes(region))
    if most > MOST_TAPS:
        return Refusal(f"{most} taps along an axis are too many", f"at most {MOST_TAPS}")
    return None


def _ends(region: Region) -> tuple[TensorType, TensorType]:
    """The types of what is read and of what is written."""
    node, types = region.nodes[0], region.graph.types
    return types[node.uses[0]], types[node.output]


def _keeps_a_size(node: Node, x: TensorType, y: TensorType) -> bool:
    """Where a factor leaves a size as it is, torch copies on some machines and resamples on
    others."""
    factors = node.attrs.get("scale") or (1.0,) * (x.rank - 2)
    pairs = zip(x.shape[2:], y.shape[2:], factors, strict=True)
    return any(n == m and f != 1.0 for n, m, f in pairs)


def _reach(t: TensorType) -> int:
    """How many elements an image spans in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape[1:], t.strides[1:], strict=True))


def axes(region: Region) -> tuple[Taps, Taps]:
    """The taps along rows and columns; a signal is an image of one row."""
    node = region.nodes[0]
    x, y = _ends(region)
    back, double = OPS[node.op], x.dtype.short == "f64"
    before, after = (y.shape[2:], x.shape[2:]) if back else (x.shape[2:], y.shape[2:])
    found = [
        _along(node, at, n, m, double) for at, (n, m) in enumerate(zip(before, after, strict=True))
    ]
    down, across = (untouched(1), *(taps.transposed if back else taps for taps in found))[-2:]
    return down, across


def _along(node: Node, at: int, length: int, size: int, double: bool) -> Taps:
    """The taps of the operator itself along an axis, whose gradient the node may be."""
    a = node.attrs
    if "mode" in a:
        scale = None if a["scale"] is None else a["scale"][at]
        return resized(a["mode"], length, size, a["align_corners"], a["antialias"], scale, double)
    if "kernel" in a:
        divisor = a["divisor"] if at == 0 or a["divisor"] is None else 1
        return windows(
            length,
            size,
            a["kernel"][at],
            a["stride"][at],
            a["padding"][at],
            a["count_include_pad"],
            divisor,
            double,
        )
    return cells(length, size, double)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    return [asdict(way) for way in ways(*_ends(region), *axes(region))]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The bytes, or what loads and instructions cost, as measured on an H200: half where vectors
    are read."""
    _, y = _ends(region)
    down, across = axes(region)
    reached = REGULAR if knobs["regular"] else REACHED
    once = modelled_seconds(region_cost(region), main_dtype(region), reached, False, target)
    if knobs["regular"]:
        return once
    if knobs["walks"]:  # a row of x is blended once
        loads = across.most * down.length / down.results
        each = 4e-13 + 6e-13 * loads + 1e-13 * down.most
    else:
        each = 6e-13 + 3.5e-13 * down.most * across.most
    work = y.numel * each * UNITS / target.units * (0.5 if is_last(y) else 1.0)
    return max(once, work + target.launch)


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.resample import Map, resample

    x, y = _ends(region)
    way = Way(**{k: v for k, v in knobs.items() if k != "recipe"})
    run = resample(Map(y.shape, x.strides, y.strides, *axes(region)), way, ctx.device)
    return Kernel(run, writes=True, note="1 kernel")


RESAMPLE = Recipe("resample", _refuse, _build, _knobs, _seconds, build_s=0.4)
