"""Resizing and average pooling with their gradients: the recipe around
``kernels/triton/resample.py``."""

from collections.abc import Sequence
from dataclasses import asdict

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.triton.common import MOST, one_operator, settings, streamed
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.resample_map import AxisMap, cells, resized, untouched, windows
from deuteron.kernels.triton.resample_tiles import ResampleTile, cuts, is_last
from deuteron.target import Target

MAPS = ("resize", "avg_pool", "adaptive_avg_pool")
OPS = dict.fromkeys(MAPS, False) | {f"{op}_grad": True for op in MAPS}  # whether it is the gradient
MOST_READ = 64  # most elements along an axis that a result reads
REACHED = 0.8  # part of the bandwidth of a copy, where a result reads few elements
UNITS = 132  # multiprocessors of the GPU for which the times in _seconds were measured


def _refuse(region: Region, node: Node, target: Target) -> None:
    x, y = _ends(region)
    volumes = "resamples rows and images, not volumes"
    refuse_if(x.rank == 5, volumes, "resample slice by slice")
    stays = _keeps_a_size(node, x, y)
    refuse_if(stays, "a size stays though a factor was given", "leave out the factor")
    many = max(_reach(x), _reach(y)) > MOST or y.numel // min(y.shape[1], 8) > MOST
    refuse_if(many, "has more elements than 32 bits count", "split the batch or the image")
    most = max(along.most for along in axes(region))
    large = f"{most} elements along an axis are too many"
    refuse_if(most > MOST_READ, large, f"at most {MOST_READ}")


def _ends(region: Region) -> tuple[TensorType, TensorType]:
    """The types of the input and of the result."""
    node, types = region.nodes[0], region.graph.types
    return types[node.uses[0]], types[node.output]


def _keeps_a_size(node: Node, x: TensorType, y: TensorType) -> bool:
    """Whether a factor other than 1 leaves a size as it is: then torch copies on some machines and
    resamples on others."""
    factors = node.attrs.get("scale") or (1.0,) * (x.rank - 2)
    pairs = zip(x.shape[2:], y.shape[2:], factors, strict=True)
    return any(n == m and f != 1.0 for n, m, f in pairs)


def _reach(t: TensorType) -> int:
    """How many elements an image spans in memory."""
    return 1 + sum((n - 1) * s for n, s in zip(t.shape[1:], t.strides[1:], strict=True))


def axes(region: Region) -> tuple[AxisMap, AxisMap]:
    """The maps of both axes, down and across; a 1-D signal is an image of one row."""
    node = region.nodes[0]
    x, y = _ends(region)
    back, double = OPS[node.op], x.dtype.short == "f64"
    before, after = (y.shape[2:], x.shape[2:]) if back else (x.shape[2:], y.shape[2:])
    sizes = enumerate(zip(before, after, strict=True))
    found = [_along(node, at, n, m, double) for at, (n, m) in sizes]
    down, across = (untouched(1), *(along.transposed if back else along for along in found))[-2:]
    return down, across


def _along(node: Node, at: int, length: int, size: int, double: bool) -> AxisMap:
    """The map of the forward operator along an axis, also if the node is its gradient."""
    a = node.attrs
    if "mode" in a:
        scale = None if a["scale"] is None else a["scale"][at]
        return resized(a["mode"], length, size, a["align_corners"], a["antialias"], scale, double)
    if "kernel" in a:
        divisor = a["divisor"] if at == 0 or a["divisor"] is None else 1
        window = a["kernel"][at], a["stride"][at], a["padding"][at]
        return windows(length, size, window, a["count_include_pad"], divisor, double)
    return cells(length, size, double)


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    return [asdict(cut) for cut in cuts(_ends(region)[1], *axes(region))]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the memory traffic, or of loads and instructions as measured on an H200, whichever
    is longer; the latter count half where vectors are loaded."""
    _, y = _ends(region)
    down, across = axes(region)
    if knobs["walks"]:  # each row of x is interpolated only once
        loads = across.most * down.length / down.results
        each = 4e-13 + 6e-13 * loads + 1e-13 * down.most
    else:
        each = 6e-13 + 3.5e-13 * down.most * across.most
    work = y.numel * each * UNITS / target.units * (0.5 if is_last(y) else 1.0)
    return max(streamed(REACHED)(region, target, knobs), work + target.launch)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.resample import resample

    run = resample(*_ends(region), axes(region), ResampleTile(**settings(knobs)), ctx.device)
    return Kernel(run, writes=True, note="1 kernel")


RESAMPLE = one_operator("resample", OPS, _refuse, _knobs, _seconds, _build)
