"""Convolutions in which no channel sees another, on a GPU: the recipe around
``kernels/triton/depthwise.py``, for large windows, also the gradient for the input of one whose
windows lie side by side: that is such a convolution with its taps in reverse. Small ones are
generated (``codegen/windows.py``), which was quicker up to 5 × 5 taps on an H200, by a tenth to a
quarter."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import refuse_elsewhere, refuse_empty
from deuteron.engines.triton.conv import OPS, Convolved, refuse_other_kinds, turned_over
from deuteron.ir.region import Region
from deuteron.ir.text import restride
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

WARPS = 4
LEAST = 26  # taps of a window
COPIES = (7, 4, 2, 1)  # neighbours that a thread makes
LANES = 4  # channels of a thread
HELD = 160  # sums and numbers of x that a thread holds at most
REACHED = 0.8  # of the bandwidth of a copy
BUSY = 0.6  # of the instructions that a multiprocessor could do, as it was seen on an H200
OFFERED = 2


def found(region: Region) -> Convolved:
    """The region as such a convolution with what follows it; refused if it is none."""
    node, x, weight, result = refuse_other_kinds(region)
    alone = x.shape[1] == node.attrs["groups"] > 1
    refuse_if(not alone, "channels see each other", quiet=True)
    small = prod(weight.shape[2:]) < LEAST
    refuse_if(small, "small windows are generated", quiet=True)
    several = result.shape[1] != x.shape[1]
    refuse_if(several, "channels have several results each: that is generated", quiet=True)
    for what, t in (("input", x), ("result", result)):
        in_order = t.is_layout("nhwc")
        refuse_if(not in_order, f"the {what} is not in nhwc", "use Policy(layout='auto')")
    work = turned_over(region)
    apart = work.phases > 1
    refuse_if(apart, "windows lie apart in the result: that is generated", quiet=True)
    return work


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_elsewhere(target)
    refuse_empty(region)
    found(region)


def _tile(work: Convolved) -> tuple[int, int]:
    """Channels side by side, and runs, of a program."""
    channels = min(64, power_of_two(work.x.shape[-1]))
    return channels, 32 * WARPS * LANES // channels


def _held(work: Convolved, copies: int) -> int:
    """Numbers that a thread holds of each channel: sums, and what lies under a row of windows."""
    stride: int = work.node.attrs["stride"][1]
    return copies + (copies - 1) * stride + work.weight.shape[3]


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """As many neighbours as registers hold, those that fill rows first."""
    work = found(region)
    some = [n for n in COPIES if n <= work.out.shape[2] and LANES * _held(work, n) <= HELD]
    ordered = sorted(some or [1], key=lambda n: _seconds_of(region, work, n, target))
    return [{"copies": n} for n in ordered[:OFFERED]]


def _seconds_of(region: Region, work: Convolved, copies: int, target: Target) -> float:
    """What the memory takes, or the instructions: for every tap a number of x is read and made
    float32, shared by neighbours, and a sum goes on; and the rows that neighbours do not fill."""
    kind, (kh, kw) = main_dtype(region), work.weight.shape[2:]
    memory, _ = times(region_cost(region), kind, False, target)
    across = work.out.shape[2]
    empty = -(-across // copies) * copies / across
    span = _held(work, copies) - copies
    each = kh * (kw + (1.5 * span + kw) / copies) + 4 + len(work.formula.statements)
    computed = empty * each * work.out.numel / (BUSY * target.rate("f32", False) / 2)
    return float(max(memory / REACHED, computed)) + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, found(region), knobs["copies"], target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.depthwise import Sizes, Tile, Window, conv

    work, copies = found(region), int(knobs["copies"])
    a, (images, height, width, channels) = work.node.attrs, work.x.shape
    size = Sizes(images, height, width, *work.out.shape[1:3])
    kh, kw = work.weight.shape[2:]
    name, stored = work.node.uses[1], work.weight
    if work.known:  # those of neighbouring channels beside each other
        stored = TensorType(stored.shape, stored.dtype, (1, 1, kw * channels, channels))
    apart = stored.strides[0], stored.strides[3]
    where = (*a["stride"], *work.before, *a["dilation"], *apart)
    window = Window._make((kh, kw, *where, channels, work.spread))
    beside, runs = _tile(work)
    tile = Tile(runs, beside, copies)
    kinds = [kind for _, kind in work.others]
    exact = region.graph.types[region.outputs[0]].dtype.bits > 16
    call = conv(size, window, tile, work.formula, kinds, WARPS, exact)
    x, w = (region.inputs.index(v) for v in work.node.uses[:2])
    others = [region.inputs.index(v) for v, _ in work.others]
    make = partial(restride, type_=stored)
    form = ctx.form(name, ("strided", stored.strides), make) if work.known else None

    def run(*given: Any) -> None:
        call(given[x], given[w] if form is None else form, given[-1], [given[i] for i in others])

    return Kernel(run, writes=True, note=f"{copies} neighbours by one thread")


DEPTHWISE = Recipe("depthwise", OPS, _refuse, _build, _knobs, _seconds, 1.5, by_estimate=False)
