"""Resizing and average pooling with their gradients: the recipe around
``kernels/triton/resample.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.taps import Taps, cells, resized, untouched, windows
from deuteron.policy import Policy
from deuteron.target import Target

# operator → whether it is the gradient
OPS = {
    "resize": False, "resize_grad": True, "avg_pool": False, "avg_pool_grad": True,
    "adaptive_avg_pool": False, "adaptive_avg_pool_grad": True,
}  # fmt: skip
MOST_TAPS, UNROLLED = 64, 8  # along an axis: at all, and to be kept in registers
REACHED = 0.8  # of the bandwidth of a copy, with few taps
UNITS = 132  # multiprocessors, for which times were measured
FEW = 2**21  # results: with fewer, large programs would leave multiprocessors idle
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
        return windows(length, size, a["kernel"][at], a["stride"][at], a["padding"][at],
                       a["count_include_pad"], divisor, double)  # fmt: skip
    return cells(length, size, double)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    _, y = _ends(region)
    names = ("planes", "rows", "columns", "warps", "walks")
    return [dict(zip(names, way, strict=True)) for way in ways(y, *axes(region))]


Shape = tuple[int, int, int, int, bool]  # planes, rows and columns, warps, whether it walks


def ways(y: TensorType, down: Taps, across: Taps) -> list[Shape]:
    return [*walks(y, down, across), *tiles(y, down, across)]


def walks(y: TensorType, down: Taps, across: Taps) -> list[Shape]:
    """Programs that go down the rows, where some are read again, most promising first."""
    height, most = (1, *y.shape[2:])[-2], max(down.most, across.most)
    if down.has_gaps or most > UNROLLED or down.most * height <= down.length:
        return []
    each = 8 if most == 1 or _is_last(y) else 16 if most == 2 else 8 if most <= 4 else 4
    planes, columns = _sides(y, _held(y, each) * 128)
    lengths = (32, 16) if most > 2 and height > down.length else (16, 8)
    if y.numel < FEW:
        lengths = (8, 4)
    return [(planes, rows, columns, 4, True) for rows in lengths]


def tiles(y: TensorType, down: Taps, across: Taps) -> list[Shape]:
    """Programs that read all taps of their results, most promising first. The more taps, the fewer
    results a thread has registers for."""
    height, most = (1, *y.shape[2:])[-2], max(down.most, across.most)
    each = _held(y, 16 if most <= 2 else 8 if most <= 4 else 4)
    found = []
    for rows in (4, 2) if each > 4 else (2, 1):
        rows = min(rows, power_of_two(height))
        planes, columns = _sides(y, each * 128 // rows * (2 if _is_last(y) else 1))
        found.append((planes, rows, columns, 4, False))
    return list(dict.fromkeys(found))


def _held(y: TensorType, each: int) -> int:
    """Results of a thread: fewer where numbers are wide, or where there are few results."""
    return max(each >> (y.dtype.short == "f64") >> 2 * (y.numel < FEW), 1)


def _sides(y: TensorType, room: int) -> tuple[int, int]:
    """Planes and columns: as many as fit of what is adjacent in memory."""
    channels, width = y.shape[1], y.shape[-1]
    if _is_last(y):
        planes = _evenly(channels, 64, 8)
        return planes, max(min(room // planes, 1024 // planes, power_of_two(width)), 1)
    columns = _evenly(width, 256, 32)
    return max(min(room // columns, power_of_two(channels)), 1), columns


def _is_last(y: TensorType) -> bool:
    return y.strides[1] == 1 and y.shape[1] > 1


def _evenly(length: int, most: int, least: int) -> int:
    """A power of two, as large as may be, in whose multiples little of a length is left over."""
    size = min(power_of_two(length), most)
    while size > least and -(-length // size) * size > 1.25 * length:
        size //= 2
    return size


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The bytes, or what loads and instructions cost, as measured on an H200: half where vectors
    are read."""
    _, y = _ends(region)
    down, across = axes(region)
    if knobs["walks"]:  # a row of x is blended once
        loads = across.most * down.length / down.results
        each = 4e-13 + 6e-13 * loads + 1e-13 * down.most
    else:
        each = 6e-13 + 3.5e-13 * down.most * across.most
    work = y.numel * each * UNITS / target.units * (0.5 if _is_last(y) else 1.0)
    once = modelled_seconds(region_cost(region), main_dtype(region), REACHED, False, target)
    return max(once, work + target.launch)


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.resample import Map, Way, resample

    x, y = _ends(region)
    way = Way(**{k: v for k, v in knobs.items() if k != "recipe"})
    run = resample(Map(y.shape, x.strides, y.strides, *axes(region)), way, ctx.device)
    return Kernel(run, writes=True, note="1 kernel")


RESAMPLE = Recipe("resample", _refuse, _build, _knobs, _seconds, build_s=0.4)
