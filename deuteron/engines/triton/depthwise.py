"""Depthwise convolutions on a GPU: the recipe around ``kernels/triton/depthwise.py``. It is for
large windows, also for the gradient for the input with stride 1, which is such a convolution with
its taps in reverse; and for windows of any size if the region also has the mean over each image.
Other small windows are generated (``codegen/windows.py``), which was faster up to 5 × 5 taps on an
H200, by a tenth to a quarter."""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import prod
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, Refused, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import leaves_gaps, main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, taken_by
from deuteron.engines.triton.conv import OPS, Convolved, refuse_other_kinds, turned_over
from deuteron.engines.triton.multiplied import follows
from deuteron.engines.triton.pixels import pixels_of
from deuteron.ir.region import Region
from deuteron.ir.text import restride
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

WARPS = 4
LEAST = 26  # fewest taps of a large window
COPIES = (7, 4, 2, 1)  # neighbouring pixels of a row that a thread computes
LANES = 4  # channels of a thread
HELD = 160  # most sums and numbers of x that a thread holds
REACHED = 0.8  # part of the bandwidth of a copy
BUSY = 0.6  # part of a multiprocessor's instruction rate that was reached on an H200
OFFERED = 2


def as_depthwise(region: Region) -> Convolved:
    """The region as such a convolution with an epilogue; refuses any other."""
    summed = is_summed(region)
    region = _without_mean(region) if summed else region
    node, x, weight, result = refuse_other_kinds(region)
    alone = x.shape[1] == node.attrs["groups"] > 1
    refuse_if(not alone, "channels see each other", quiet=True)
    small = prod(weight.shape[2:]) < LEAST and not summed
    refuse_if(small, "small windows are generated", quiet=True)
    several = result.shape[1] != x.shape[1]
    refuse_if(several, "channels have several results each: that is generated", quiet=True)
    for what, t in (("input", x), ("result", result)):
        in_order = pixels_of(t).line is not None
        refuse_if(not in_order, f"the {what} is not in nhwc", "use Policy(layout='auto')")
    work = turned_over(region)
    apart = work.phases > 1
    refuse_if(apart, "windows lie apart in the result: that is generated", quiet=True)
    return work


def takes_window(region: Region) -> bool:
    """Whether the region is such a convolution with a large window, so that it is not generated."""
    with suppress(Refused):
        return prod(as_depthwise(region).weight.shape[2:]) >= LEAST and not leaves_gaps(region)
    return False


def is_summed(region: Region) -> bool:
    """Whether the region ends with the mean over each image of its other result."""
    last = region.nodes[-1] if region.nodes else None
    if last is None or last.op != "mean" or len(region.outputs) != 2:
        return False
    kind = region.graph.types[last.output]
    plain = kind.dtype.is_float and kind.dtype.bits <= 32 and kind.is_layout("contiguous")
    over = tuple(last.attrs["axes"]) == (2, 3)
    return over and plain and region.outputs == (last.uses[0], last.output)


def _without_mean(region: Region) -> Region:
    return region.part("conv", region.nodes[:-1], 0)


def _tile(work: Convolved) -> tuple[int, int]:
    """How many channels, and how many runs of neighbouring pixels, a program computes."""
    channels = min(64, power_of_two(work.x.shape[-1]))
    return channels, 32 * WARPS * LANES // channels


def _held(work: Convolved, copies: int) -> int:
    """How many numbers a thread holds for each channel: sums, and x under a row of its windows."""
    stride: int = work.node.attrs["stride"][1]
    return copies + (copies - 1) * stride + work.weight.shape[3]


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """As many neighbours per thread as registers hold, the lowest estimates first."""
    work = as_depthwise(region)
    some = [n for n in COPIES if n <= work.out.shape[2] and LANES * _held(work, n) <= HELD]
    ordered = sorted(some or [1], key=lambda n: _seconds_of(region, work, n, target))
    return [{"copies": n} for n in ordered[:OFFERED]]


def _seconds_of(region: Region, work: Convolved, copies: int, target: Target) -> float:
    """Estimated seconds: the longer of memory traffic and instructions. For every tap, a number of
    x is read and made float32, which neighbours share, and added to a sum; rows that neighbours do
    not divide take more."""
    kind, (kh, kw) = main_dtype(region), work.weight.shape[2:]
    memory, _ = times(region_cost(region), kind, False, target)
    across = work.out.shape[2]
    empty = -(-across // copies) * copies / across
    span = _held(work, copies) - copies
    each = kh * (kw + (1.5 * span + kw) / copies) + 4 + len(work.formula.statements)
    computed = empty * each * work.out.numel / (BUSY * target.rate("f32", False) / 2)
    merged = ADDED_S if is_summed(region) else 0.0
    return float(max(memory / REACHED, computed)) + merged + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, as_depthwise(region), knobs["copies"], target)


def stored_by_taps(work: Convolved) -> tuple[Any, TensorType]:
    """The windows as kernels take them, and the type of the weight as it is stored: if it is a
    constant, with the weights of neighbouring channels adjacent in memory."""
    from deuteron.kernels.triton.depthwise import Window

    a, channels, stored = work.node.attrs, work.x.shape[-1], work.weight
    kh, kw = stored.shape[2:]
    if work.known:
        stored = TensorType(stored.shape, stored.dtype, (1, 1, kw * channels, channels))
    apart = stored.strides[0], stored.strides[3]
    where = (*a["stride"], *work.before, *a["dilation"], *apart)
    return Window._make((kh, kw, *where, channels, work.x.line, work.spread)), stored


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.depthwise import Sizes, Tile, conv

    work, copies = as_depthwise(region), int(knobs["copies"])
    images, height, width, _ = work.x.shape
    size = Sizes(images, height, width, *work.out.shape[1:3])
    name, (window, stored) = work.node.uses[1], stored_by_taps(work)
    beside, runs = _tile(work)
    summed = is_summed(region)
    tile = Tile(runs, beside, copies, summed, False)
    call = conv(size, window, tile, follows(region, work), WARPS)
    x, w = (region.inputs.index(v) for v in work.node.uses[:2])
    others = [region.inputs.index(v) for v, _ in work.others]
    make = partial(restride, type_=stored)
    form = ctx.form(name, ("strided", stored.strides), make) if work.known else None

    def run(*given: Any) -> None:
        weights = given[w] if form is None else form
        results = given[len(region.inputs) :]
        call(given[x], weights, *(*results, None)[:2], [given[i] for i in others])

    note = f"{copies} neighbours by one thread" + (", and the mean of each image" * summed)
    runs_of = -(-work.out.shape[1] * -(-work.out.shape[2] // copies) // runs)
    room = 4 * images * runs_of * work.out.shape[-1] if summed else 0
    return Kernel(run, writes=True, workspace=room, note=note)


DEPTHWISE = Recipe("depthwise", OPS, taken_by(as_depthwise), _build, _knobs, _seconds, 1.0)
