"""Counts of elements by range: the recipe around ``kernels/triton/histogram.py``."""

from collections.abc import Sequence

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.triton.common import one_operator, streamed
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.target import Target

READS = ("f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u8")
REACHED = 0.3  # part of the bandwidth of a copy, a guess until it is measured on a GPU
MOST_BINS = 1023  # most bins in the registers of a program, with one more for what lies outside
MOST = 2**38  # most elements: a program counts its own in 32 bits
ALONE = 8192  # up to so many elements, one program is faster than writing zeros and a second launch
BLOCK = 2048


def _refuse(region: Region, node: Node, target: Target) -> None:
    x, bins = region.graph.types[node.uses[0]], node.attrs["bins"]
    refuse_if(len(node.uses) > 1, "counts elements, and does not add up their weights")
    kind = x.dtype.short
    refuse_if(kind not in READS, f"does not read {kind}", "cast it to f32 first")
    refuse_if(bins > MOST_BINS, f"{bins} bins are too many", f"at most {MOST_BINS}")
    refuse_if(x.numel > MOST, "has more than 2³⁸ elements", "split it")
    refuse_if(not x.is_dense, "elements of x lie apart", "to_layout(x) first")


def _size(region: Region) -> int:
    return region.graph.types[region.nodes[0].uses[0]].numel


def programs(size: int, units: int) -> int:
    """How many programs: one, or as many as keep the GPU busy."""
    return 1 if size <= ALONE else min(-(-size // BLOCK), 8 * units)


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    return [{"programs": programs(_size(region), target.units), "warps": w} for w in (4, 8)]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    once = streamed(REACHED)(region, target, knobs)
    return once if knobs["programs"] == 1 else once + target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.histogram import Bins, count

    bins, low, high = (region.nodes[0].attrs[name] for name in ("bins", "low", "high"))
    slots = max(power_of_two(bins + 1), 32)
    range_of = Bins(bins, float(low), float(high), slots, BLOCK, knobs["programs"] > 1)
    run = count(_size(region), range_of, knobs["programs"], knobs["warps"])
    return Kernel(run, writes=True, note="1 kernel" if knobs["programs"] == 1 else "2 kernels")


HISTOGRAM = one_operator("histogram", ("histogram",), _refuse, _knobs, _seconds, _build)
