"""Convolutions on Hopper: the recipe around ``kernels/triton/conv_hopper.py``; which tiles it
offers, and what they should take."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import Statistics, refuse_uneven, settings
from deuteron.engines.triton.conv import OPS, Convolved, found, refuse_gathered
from deuteron.engines.triton.multiplied import KINDS, follows
from deuteron.engines.triton.pixels import refuse_gaps
from deuteron.engines.triton.product import STEP_S, STORE_S, TILE_S
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

STEPS, PIXELS = 64, 128  # channels of x at a time, and pixels of a tile
LINE = 2 * STEPS  # bytes of a pixel, or of a filter, in shared memory
# images, rows and columns of pixels of a tile; a row of all images is a multiple of 8 pixels
SHAPES = ((2, 8, 8), (8, 4, 4), (1, 16, 8), (1, 8, 16), (4, 8, 4), (32, 2, 2), (16, 2, 4))
FILTERS = {64: 8, 128: 4}  # stages of weights beside a halo, by channels of a tile
LEAST, MOST = 2, 6  # stages of x
REACHED = {64: 0.97, 128: 1.0}  # of what libraries get out of a multiprocessor
START_S = 1.5e-6  # until the copy engine has been told of the tensors
NOTICED = 0.05  # of the time of reading from L2, while something else takes longer
CACHED = 1.8  # times the bandwidth of L2 that tiles were seen to be read at
BARRIERS = 1024  # bytes


class Tiling(NamedTuple):
    """A tile of the result, and whether it is brought with a halo."""

    images: int
    high: int
    wide: int
    columns: int
    halo: bool


def tilings() -> Iterator[Tiling]:
    for shape, columns, halo in product(SHAPES, FILTERS, (True, False)):
        yield Tiling(*shape, columns, halo)


class Room(NamedTuple):
    """How shared memory is used: stages of x and of weights, and whether all weights stay."""

    stages: int
    filters: int
    kept: bool


def _room(work: Convolved, t: Tiling, target: Target) -> Room | None:
    """None where a tile finds no room."""
    (kh, kw), depth = work.weight.shape[2:], _deep(work) // STEPS
    filter_ = t.columns * LINE
    left = target.shared_bytes - 2 * PIXELS * t.columns * 2 - BARRIERS
    if not t.halo:
        stages = left // (PIXELS * LINE + filter_)
        return Room(min(stages, MOST), 1, False) if stages >= LEAST else None
    if _is_apart(work):
        return None
    below = (kh - 1) * work.node.attrs["dilation"][0]
    if below & below - 1 or t.high % below:  # which are brought by powers of two of rows
        return None
    rows = t.high + below
    each = rows * t.images * t.wide * LINE
    every = kh * kw * depth
    kept = work.out.shape[-1] <= t.columns and left - every * filter_ >= 3 * each
    filters = every if kept else FILTERS[t.columns]
    stages = (left - filters * filter_) // each
    return Room(min(stages, MOST), filters, kept) if stages >= LEAST else None


def _is_apart(work: Convolved) -> bool:
    """Whether windows lie further apart than pixels."""
    return set(work.node.attrs["stride"]) != {1}


def _deep(work: Convolved) -> int:
    """Channels of x that a tile adds up, with those that fill the last step."""
    return -(-work.x.shape[-1] // STEPS) * STEPS


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(not target.has_warpgroups, "is for Hopper", quiet=True)
    work = found(region)
    refuse_gathered(work)
    a, taps = work.node.attrs, work.weight.shape[2:]
    kind, result = work.x.dtype, region.graph.types[region.outputs[0]].dtype
    refuse_if(kind.short not in KINDS, f"multiplies {' and '.join(KINDS)}, not {kind.short}")
    refuse_if(result != kind, f"the result is of {result.short}, x of {kind.short}")
    parted = all(n % s == 0 for n, s in zip(work.x.shape[1:3], a["stride"], strict=True))
    parted = parted and (work.x.shape[-1] % STEPS == 0 or not _is_apart(work))
    refuse_if(not parted, "windows lie apart, and sizes are no multiples of that", quiet=True)
    phases = work.spread and _is_apart(work)
    refuse_if(phases, "windows lie apart in the result", quiet=True)
    refuse_if(work.groups > 1, "has groups", quiet=True)
    refuse_if(set(taps) == {1}, "windows of one pixel are products", quiet=True)
    refuse_uneven("x", work.x.line or 0, kind.bits)
    refuse_uneven("the result", work.line, kind.bits)
    if _is_apart(work):
        refuse_gaps(work.x)
    few = work.x.shape[-1] < STEPS // 2
    refuse_if(few, f"{work.x.shape[-1]} channels are few for tiles of {STEPS}", quiet=True)


# ---- tiles, and what they take


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The tiles that should be quickest, with a halo and without; shapes differ less."""
    work = found(region)
    fitting = [t for t in tilings() if fits(work, t, target)]
    ordered = sorted(fitting, key=lambda t: seconds_of(region, work, t, target))
    best = {t.halo: t for t in reversed(ordered)}
    return [t._asdict() for t in sorted(best.values(), key=ordered.index)]


def fits(work: Convolved, t: Tiling, target: Target) -> bool:
    images, down, across, columns = work.out.shape
    pairs = ((t.images, images), (t.high, down), (t.wide, across), (t.columns, columns))
    small = all(tile < 2 * size or tile <= 8 for tile, size in pairs[1:])
    window = work.weight.shape[2] > 1 or not t.halo
    return t.images < 2 * images and small and window and _room(work, t, target) is not None


def live_tiles(
    size: int, out: int, tile: int, taps: int, before: int, apart: int, step: int = 1
) -> int:
    """Of all tiles along a dimension of space, the taps that see any of the image."""
    begins = (o + (k * apart - before) // step for o in range(0, out, tile) for k in range(taps))
    return sum(at + tile > 0 and at < size // step for at in begins)


def seconds_of(region: Region, work: Convolved, t: Tiling, target: Target) -> float:
    """Rounds of tiles at the rate of a multiprocessor, what they read from L2, or what the memory
    takes, whichever is most."""
    a, kind, taps = work.node.attrs, main_dtype(region), work.weight.shape[2:]
    images, down, across, columns = work.out.shape
    before, apart = work.before, a["dilation"]
    deep = _deep(work)
    groups = -(-images // t.images) * -(-columns // t.columns)
    tiles = groups * -(-down // t.high) * -(-across // t.wide)
    if t.halo:
        brought, steps = float(taps[1] * tiles), tiles * taps[0] * taps[1]
        x_rows = (t.high + (taps[0] - 1) * apart[0]) / t.high
    else:
        each = zip(work.x.shape[1:3], (down, across), (t.high, t.wide), taps, strict=True)
        live = [live_tiles(*s, before[d], apart[d], a["stride"][d]) for d, s in enumerate(each)]
        steps = groups * live[0] * live[1]
        brought, x_rows = float(steps), 1.0
    per_tile = steps / tiles
    flops = 2.0 * PIXELS * t.columns * deep * per_tile
    multiplies = flops / (REACHED[t.columns] * target.rate(kind, True) / target.units) + TILE_S / 4
    follows = PIXELS * t.columns * (STORE_S + STEP_S * len(work.formula.statements))
    room = _room(work, t, target)
    weights = 0.0 if room is not None and room.kept else steps * t.columns
    read = 2.0 * deep * (brought * PIXELS * x_rows + weights)
    from_cache = read / (CACHED * target.cache_bandwidth)
    rounds = -(-tiles // target.units)
    memory, _ = times(region_cost(region), kind, True, target)
    longest = max(rounds * max(multiplies, follows), from_cache, memory / 0.85)
    return float(longest + NOTICED * from_cache + START_S + target.launch)


def _tiling(knobs: Knobs) -> Tiling:
    return Tiling(**settings(knobs))


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return seconds_of(region, found(region), _tiling(knobs), target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    run, note = _made(region, _tiling(knobs), ctx, ctx.target.units)
    return Kernel(run, writes=True, note=note)


def with_statistics(region: Region, t: Tiling, ctx: BuildContext) -> Statistics:
    """A convolution by itself, which leaves statistics."""
    from deuteron.kernels.triton.statistics_hopper import shares

    images, down, across, columns = found(region).out.shape
    wide = -(-columns // t.columns)
    tiles = wide * -(-images // t.images) * -(-down // t.high) * -(-across // t.wide)
    programs, pieces = shares(tiles, wide, ctx.target.units)
    run, note = _made(region, t, ctx, programs)
    return Statistics(run, pieces, note)


def _made(region: Region, t: Tiling, ctx: BuildContext, programs: int) -> tuple[Any, str]:
    """The call of the kernel, which may be told where statistics go, and what to say of it."""
    from deuteron.kernels.triton.conv_hopper import Sizes, Tile, Window, conv

    work = found(region)
    room = _room(work, t, ctx.target)
    assert room is not None
    a, (images, height, width, channels) = work.node.attrs, work.x.shape
    _, down, across, columns = work.out.shape
    lines = work.x.line, work.line
    size = Sizes(images, height, width, down, across, channels, columns, *lines)
    where = (*work.weight.shape[2:], *work.before, *a["dilation"], *a["stride"])
    window = Window._make((*where, work.spread))
    tile = Tile(*t[:4], room.stages, room.filters, t.halo, room.kept)
    call = conv(size, window, tile, follows(region, work), programs)
    x, w = (region.inputs.index(v) for v in work.node.uses[:2])
    others = [region.inputs.index(v) for v, _ in work.others]

    def run(*given: Any, to: Any = None) -> None:
        call(given[x], given[w], given[-1], [given[i] for i in others], to)

    note = f"tiles of {t.images} × {t.high} × {t.wide} pixels × {t.columns}, warps divide the work"
    note += ", taps share what they read" if t.halo else ""
    return run, note


_HOW = (_refuse, _build, _knobs, _seconds, 4.0)
CONV_HOPPER = Recipe("conv_hopper", OPS, *_HOW, by_estimate=False, strided=True)
