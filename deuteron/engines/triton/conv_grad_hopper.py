"""Gradients of convolutions of stride 1 for their weights on Hopper: the recipe around
``kernels/triton/conv_grad_hopper.py``; which tiles it offers, and how long they should take."""

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, refuse_uneven, settings
from deuteron.engines.triton.conv import CACHED
from deuteron.engines.triton.conv_grad import OP, FilterGradWork, as_filter_grad, call_of
from deuteron.engines.triton.conv_hopper import BARRIERS, LINE, SHAPES, START_S, STEPS, live_tiles
from deuteron.engines.triton.multiplied import KINDS, follows
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

MOST_ROWS = 5  # most rows of a window: a thread holds the sums of all of them
MOST_BLOCKS = 4  # most blocks of 64 channels whose sums a thread holds
LEAST, MOST = 2, 4  # stages
# The part of libraries' speed per multiprocessor that is reached with a halo; and without, by the
# number of groups of warps (a single group waits for its products).
REACHED, REACHED_APART = 0.75, {1: 0.46, 2: 0.66}
LEFT = 0.7  # part of the bandwidth of L2 at which parts of sums are written and read
OFFERED = 2
FEWEST = 2  # fewest tiles of pixels in a part


# most rounds of programs, by ``halo``: more without it, as programs then differ in their work
ROUNDS = {True: 4, False: 8}


class Tiling(NamedTuple):
    """A tile of pixels. ``tall``: groups of warps; ``halo``: x is loaded once for all taps of a
    column of the window; ``blocks``: times 64 channels of x at a time without a halo; ``parts``:
    into how many parts the sum is split."""

    images: int
    high: int
    wide: int
    tall: int
    halo: bool = True
    blocks: int = 1
    parts: int = 1


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(not target.has_warpgroups, "is for Hopper", quiet=True)
    work = as_filter_grad(region, alone=False)
    refuse_if(work.x.rank != 4, "convolves images, not volumes", quiet=True)
    kind = work.x.dtype
    refuse_if(kind.short not in KINDS, f"multiplies {' and '.join(KINDS)}, not {kind.short}")
    refuse_if(set(work.node.attrs["stride"]) != {1}, "windows lie apart", quiet=True)
    refuse_if(work.groups > 1, "has groups", quiet=True)
    refuse_if(set(work.taps) == {1}, "windows of one pixel are products", quiet=True)
    for what, t in (("x", work.x), ("the gradient", work.grad)):
        refuse_uneven(what, t.shape[1], kind.bits)
        few = t.shape[1] < STEPS // 2
        refuse_if(few, f"{t.shape[1]} channels are few for tiles of {STEPS}", quiet=True)
    fits = any(_stages(work, t, target) for t in _tilings(work))
    refuse_if(not fits, "no tile of pixels finds room", quiet=True)


def _tilings(work: FilterGradWork) -> Iterator[Tiling]:
    for shape, tall in product(SHAPES, (1, 2)):
        if tall == 1 or work.grad.shape[1] > STEPS:
            yield Tiling(*shape, tall)
            blocks = min(MOST_BLOCKS, -(-work.channels // STEPS))
            yield Tiling(*shape, tall, False, blocks)


def _stages(work: FilterGradWork, t: Tiling, target: Target) -> int:
    """How many stages fit in shared memory; 0 if too few do, or if the halo cannot be loaded."""
    below = (work.taps[0] - 1) * work.node.attrs["dilation"][0] if t.halo else 0
    if t.halo and work.taps[0] > MOST_ROWS:
        return 0
    if below and (below & below - 1 or t.high % below):  # halos are loaded in 2ⁿ rows at a time
        return 0
    each = t.images * t.wide * LINE * (t.high * (t.tall + t.blocks) + below)
    stages = (target.shared_bytes - BARRIERS) // each
    return min(stages, MOST) if stages >= LEAST else 0


def _tiles(work: FilterGradWork, t: Tiling) -> tuple[int, int]:
    """The number of tiles of the result, and of tiles of pixels."""
    images, outs, down, across = work.grad.shape
    rows = -(-outs // (STEPS * t.tall)) * -(-work.channels // (STEPS * t.blocks))
    pixels = -(-images // t.images) * -(-down // t.high) * -(-across // t.wide)
    return rows * (work.taps[1] if t.halo else prod(work.taps)), pixels


def _seen(work: FilterGradWork, t: Tiling) -> float:
    """The part of all pairs of a tile of pixels and a tap for which the tap reads any of the image;
    1 with a halo, which skips none."""
    if t.halo:
        return 1.0
    a, sizes = work.node.attrs, zip(work.x.shape[2:], work.grad.shape[2:], strict=True)
    every, seen = 1, 1
    for d, ((size, out), tile) in enumerate(zip(sizes, (t.high, t.wide), strict=True)):
        every *= -(-out // tile) * work.taps[d]
        seen *= live_tiles(size, out, tile, work.taps[d], a["padding"][d], a["dilation"][d])
    return seen / every


def _shared(work: FilterGradWork, t: Tiling, target: Target) -> Iterator[Tiling]:
    """The tiling with the sum split in several ways, such that programs fill all multiprocessors
    once or a few times."""
    tiles, pixels = _tiles(work, t)
    for rounds in range(1, ROUNDS[t.halo] + 1):
        parts = min(rounds * target.units // tiles, pixels // FEWEST)
        if parts:
            yield t._replace(parts=-(-pixels // -(-pixels // parts)))
    if tiles > target.units // 2:
        yield t


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The tilings with the lowest estimates, at most one for each pair of ``halo`` and ``tall``."""
    work = as_filter_grad(region, alone=False)
    images, _, down, across = work.grad.shape
    fitting = [
        s
        for t in _tilings(work)
        if _stages(work, t, target) and t.images < 2 * images
        if all(n < 2 * size or n <= 8 for n, size in ((t.high, down), (t.wide, across)))
        for s in _shared(work, t, target)
    ]
    ordered = sorted(fitting, key=lambda t: _seconds_of(region, work, t, target))
    best = {(t.halo, t.tall): t for t in reversed(ordered)}
    some = sorted(best.values(), key=ordered.index)[:OFFERED]
    return [t._asdict() for t in some]


def _seconds_of(region: Region, work: FilterGradWork, t: Tiling, target: Target) -> float:
    """Estimated seconds: the longest of all rounds of programs at the rate of a multiprocessor,
    their reads from L2, and the memory traffic; plus writing and adding up the parts of sums."""
    kind, (tiles, pixels) = main_dtype(region), _tiles(work, t)
    lines, share = t.images * t.high * t.wide, -(-pixels // t.parts)
    sums = work.taps[0] if t.halo else t.blocks
    flops = 2.0 * lines * STEPS * STEPS * sums * t.tall * share
    reached = REACHED if t.halo else REACHED_APART[t.tall]
    each = flops / (reached * target.rate(kind, True) / target.units)
    seen = _seen(work, t)
    rounds = -(-tiles * t.parts // target.units) * seen + (1.0 - seen) / 2  # some are longer
    below = (work.taps[0] - 1) * work.node.attrs["dilation"][0] / t.high if t.halo else 0.0
    read = seen * tiles * pixels * lines * LINE * (t.tall + t.blocks + below)
    memory, _ = times(region_cost(region), kind, True, target)
    longest = max(rounds * each, read / (CACHED * target.cache_bandwidth), memory / 0.85)
    left = 8.0 * t.parts * work.numel / (LEFT * target.cache_bandwidth)
    return float(longest + left + START_S + ADDED_S + target.launch)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(
        region, as_filter_grad(region, alone=False), Tiling(**settings(knobs)), target
    )


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.conv_grad_hopper import Sizes, Tile, Window, weight_grad

    work, t = as_filter_grad(region, alone=False), Tiling(**settings(knobs))
    stages = _stages(work, t, ctx.target)
    a, (images, outs, down, across) = work.node.attrs, work.grad.shape
    columns = work.channels * prod(work.taps)
    image = (*work.x.shape[2:], down, across)
    size = Sizes._make((outs, columns, images, *image, work.channels))
    window = Window(*work.taps, *a["padding"], *a["dilation"])
    tile = Tile(*t[:4], stages, t.parts, t.halo, t.blocks, STEPS, STEPS, 1, False)
    call = weight_grad(size, window, tile, follows(region, work))
    note = f"tiles of {t.images} × {t.high} × {t.wide} pixels, {t.parts} parts of the sum, "
    note += "warps divide the work" + (", taps share what they read" if t.halo else "")
    room = 4 * t.parts * work.numel
    return Kernel(call_of(region, work, call), writes=True, workspace=room, note=note)


CONV_GRAD_HOPPER = Recipe(
    "conv_grad_hopper", (OP,), _refuse, _build, _knobs, _seconds, 3.0, by_estimate=False
)
