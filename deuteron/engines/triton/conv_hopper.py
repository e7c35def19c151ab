"""Convolutions on Hopper: the recipe around ``kernels/triton/conv_hopper.py``; which tiles it
offers, and how long they should take."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import Statistics, refuse_uneven, settings
from deuteron.engines.triton.conv import CACHED, OPS, Convolved, as_convolution, refuse_gathered
from deuteron.engines.triton.multiplied import KINDS, follows
from deuteron.engines.triton.pixels import FEW, refuse_gaps
from deuteron.engines.triton.product import STEP_S, STORE_S, TILE_S
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

STEPS, PIXELS = 64, 128  # most channels of x at a time; pixels of a tile
LINE = 2 * STEPS  # bytes of these channels of a pixel, or of a filter, in shared memory
# images, rows and columns of pixels of a tile; a row of all images is a multiple of 8 pixels
SHAPES = ((2, 8, 8), (8, 4, 4), (1, 16, 8), (1, 8, 16), (4, 8, 4), (32, 2, 2), (16, 2, 4))
FILTERS = {64: 8, 128: 4}  # stages of weights where x has a halo, by channels of a tile
LEAST, MOST = 2, 6  # stages of x
REACHED = {64: 0.97, 128: 1.0}  # part of libraries' speed per multiprocessor, by channels of a tile
START_S = 1.5e-6  # seconds until the copy engine knows the tensors
NOTICED = 0.05  # part of the time of reading L2 that still shows where something else takes longer
BARRIERS = 1024  # bytes of shared memory
LINE_S = 4e-9  # seconds of the copy engine for a widened pixel, which overlaps the next


class Tiling(NamedTuple):
    """A tile of the result. ``halo``: x is loaded once per column of the window, with as many more
    rows as the window is high, and not once per tap."""

    images: int
    high: int
    wide: int
    columns: int
    halo: bool


def tilings() -> Iterator[Tiling]:
    for shape, columns, halo in product(SHAPES, FILTERS, (True, False)):
        yield Tiling(*shape, columns, halo)


class Read(NamedTuple):
    """An image and a window as the copy engine loads tiles of them: the image's size and channels;
    the distances from one pixel and one row to the next; the window, as the ``attrs`` of a
    convolution describe it; and the channels that are loaded at a time. ``many``: where x has few
    channels, each pixel is widened to so many; 0 if x is read as it is. Then all pixels under a row
    of a window are loaded as one pixel, and such pixels overlap."""

    height: int
    width: int
    channels: int
    line: int
    row: int
    taps: tuple[int, int]
    before: tuple[int, int]
    apart: tuple[int, int]
    stride: tuple[int, int]
    steps: int = STEPS
    many: int = 0

    @property
    def deep(self) -> int:
        """Channels of x that a tile adds up, rounded up to whole steps."""
        return -(-self.channels // self.steps) * self.steps

    @property
    def spans(self) -> list[int]:
        """For each phase of rows (row modulo stride) that has taps, how many rows below the first
        its taps reach."""
        high, before, apart, step = (
            pair[0] for pair in (self.taps, self.before, self.apart, self.stride)
        )
        rows = [r * apart + before * (step - 1) for r in range(high)]
        phases = [[row // step for row in rows if row % step == p] for p in range(step)]
        return [of[-1] - of[0] for of in phases if of]

    @property
    def is_apart(self) -> bool:
        """Whether the stride is above 1."""
        return self.stride != (1, 1)

    def weight(self, w: Any) -> Any:
        """A weight [K, C, kh, kw] as [K, kh, kw · many], with zeros up to a multiple of 8."""
        outs, channels, high, wide = w.shape
        made = w.new_zeros((outs, high, -(-wide * self.many // 8) * 8))
        rows = made[..., : wide * self.many].unflatten(-1, (wide, self.many))
        rows[..., :channels] = w.movedim(1, -1)
        return made


def _read(work: Convolved) -> Read:
    a, (_, height, width, channels) = work.node.attrs, work.x.shape
    (kh, kw), (ph, pw), (sh, sw) = work.weight.shape[2:], work.before, a["stride"]
    (dh, dw), line = a["dilation"], work.x.line or 0
    if channels > FEW:
        image = height, width, channels, line, width * line
        return Read(*image, (kh, kw), (ph, pw), (dh, dw), (sh, sw))
    many = 4 if channels <= 4 and sw % 2 == 0 else 8  # so windows begin at multiples of 16 bytes
    across = work.out.shape[2]
    wide = -(-((across - 1) * sw + kw) * many // 8) * 8
    window = (kh, 1), (ph, 0), (dh, 1), (sh, 1)
    steps = STEPS // 2 if kw * many <= STEPS // 2 else STEPS
    return Read(height, across, kw * many, sw * many, wide, *window, steps, many)


class Room(NamedTuple):
    """How shared memory is used: stages of x and of weights, and whether all weights stay in it."""

    stages: int
    filters: int
    kept: bool


def _room(work: Convolved, t: Tiling, target: Target) -> Room | None:
    """How a tiling uses shared memory; None if it does not fit."""
    r = _read(work)
    (kh, kw), depth, line = r.taps, r.deep // r.steps, 2 * r.steps
    filter_ = t.columns * line
    left = target.shared_bytes - 2 * PIXELS * t.columns * 2 - BARRIERS
    if not t.halo:
        stages = left // (PIXELS * line + filter_)
        return Room(min(stages, MOST), 1, False) if stages >= LEAST else None
    below = max(r.spans)
    rows = t.high + below
    each = rows * t.images * t.wide * line
    every = kh * kw * depth
    kept = work.out.shape[-1] <= t.columns and left - every * filter_ >= 3 * each
    filters = every if kept else FILTERS[t.columns]
    stages = (left - filters * filter_) // each
    return Room(min(stages, MOST), filters, kept) if stages >= LEAST else None


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(not target.has_warpgroups, "is for Hopper", quiet=True)
    work = as_convolution(region)
    refuse_gathered(work)
    kind, result = work.x.dtype, region.graph.types[region.outputs[0]].dtype
    refuse_if(kind.short not in KINDS, f"multiplies {' and '.join(KINDS)}, not {kind.short}")
    refuse_if(result != kind, f"the result is of {result.short}, x of {kind.short}")
    refuse_if(work.groups > 1, "has groups", quiet=True)
    refuse_if(set(work.weight.shape[2:]) == {1}, "windows of one pixel are products", quiet=True)
    r = _read(work)
    parted = r.height % r.stride[0] == 0 == r.width % r.stride[1]
    parted = parted and (r.channels % STEPS == 0 or not r.is_apart or r.many > 0)
    refuse_if(not parted, "windows lie apart, and sizes are no multiples of that", quiet=True)
    phases = work.spread and r.is_apart
    refuse_if(phases, "windows lie apart in the result", quiet=True)
    refuse_uneven("x", r.line, kind.bits)
    refuse_uneven("the result", work.line, kind.bits)
    if r.is_apart or r.many:
        refuse_gaps(work.x)
    if r.many:
        odd = work.spread or work.node.attrs["dilation"][1] > 1 or r.channels > STEPS
        refuse_if(odd, "a row of a window is no pixel of few channels", quiet=True)
    else:
        few = r.channels < STEPS // 2
        refuse_if(few, f"{r.channels} channels are few for tiles of {STEPS}", quiet=True)


# ---- tiles, and what they take


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The tilings with the lowest estimates, one with a halo and one without; shapes of tiles
    matter less."""
    work = as_convolution(region)
    fitting = [t for t in tilings() if tiling_fits(work, t, target)]
    ordered = sorted(fitting, key=lambda t: seconds_of(region, work, t, target))
    best = {t.halo: t for t in reversed(ordered)}
    return [t._asdict() for t in sorted(best.values(), key=ordered.index)]


def tiling_fits(work: Convolved, t: Tiling, target: Target) -> bool:
    images, down, across, columns = work.out.shape
    pairs = ((t.images, images), (t.high, down), (t.wide, across), (t.columns, columns))
    small = all(tile < 2 * size or tile <= 8 for tile, size in pairs[1:])
    r = _read(work)
    window = (r.taps[0] > 1 or not t.halo) and (t.wide >= 8 or not r.many)
    return t.images < 2 * images and small and window and _room(work, t, target) is not None


def live_tiles(
    size: int, out: int, tile: int, taps: int, before: int, apart: int, step: int = 1
) -> int:
    """The number of pairs of a tile and a tap, along one spatial dimension, for which any pixel
    under the tap is inside the image."""
    begins = (o + (k * apart - before) // step for o in range(0, out, tile) for k in range(taps))
    return sum(at + tile > 0 and at < size // step for at in begins)


def seconds_of(region: Region, work: Convolved, t: Tiling, target: Target) -> float:
    """Estimated seconds: the longest of all rounds of tiles at the rate of a multiprocessor, their
    reads from L2, and the memory traffic."""
    r, kind = _read(work), main_dtype(region)
    images, down, across, columns = work.out.shape
    taps, deep = r.taps, r.deep
    groups = -(-images // t.images) * -(-columns // t.columns)
    tiles = groups * -(-down // t.high) * -(-across // t.wide)
    if t.halo:
        brought, steps = float(taps[1] * tiles), tiles * taps[0] * taps[1]
        x_rows = sum(t.high + span for span in r.spans) / t.high
    else:
        along = (r.height, r.width), (down, across), (t.high, t.wide), taps, r.before, r.apart
        live = [live_tiles(*each) for each in zip(*along, r.stride, strict=True)]
        steps = groups * live[0] * live[1]
        brought, x_rows = float(steps), 1.0
    per_tile = steps / tiles
    flops = 2.0 * PIXELS * t.columns * deep * per_tile
    multiplies = flops / (REACHED[t.columns] * target.rate(kind, True) / target.units) + TILE_S / 4
    follows = PIXELS * t.columns * (STORE_S + STEP_S * work.formula.flops)
    room = _room(work, t, target)
    weights = 0.0 if room is not None and room.kept else steps * t.columns
    read = 2.0 * deep * (brought * PIXELS * x_rows + weights)
    from_cache = read / (CACHED * target.cache_bandwidth)
    rounds = -(-tiles // target.units)
    memory, _ = times(region_cost(region), kind, True, target)
    longest = max(rounds * max(multiplies, follows), from_cache, memory / 0.85)
    if r.many:  # one kernel widens x, and others the weight if it is no constant
        moved = work.x.nbytes + 2.0 * images * r.height * r.row
        longest = max(longest, LINE_S * brought * PIXELS * x_rows / target.units)
        longest += moved / target.stream + target.launch * (1 if work.known else 4)
    return float(longest + NOTICED * from_cache + START_S + target.launch)


def _tiling(knobs: Knobs) -> Tiling:
    return Tiling(**settings(knobs))


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return seconds_of(region, as_convolution(region), _tiling(knobs), target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    run, note = _made(region, _tiling(knobs), ctx, ctx.target.units)
    work = as_convolution(region)
    r, images = _read(work), region.graph.types[region.outputs[0]].shape[0]
    room = images * r.height * r.row * work.x.dtype.bits // 8 if r.many else 0
    return Kernel(run, writes=True, workspace=room, note=note)


def with_statistics(region: Region, t: Tiling, ctx: BuildContext) -> Statistics:
    """A convolution alone, which also computes statistics of its channels."""
    from deuteron.kernels.triton.statistics_hopper import shares

    images, down, across, columns = as_convolution(region).out.shape
    wide = -(-columns // t.columns)
    tiles = wide * -(-images // t.images) * -(-down // t.high) * -(-across // t.wide)
    programs, pieces = shares(tiles, wide, ctx.target.units)
    run, note = _made(region, t, ctx, programs)
    return Statistics(run, pieces, note)


def _made(region: Region, t: Tiling, ctx: BuildContext, programs: int) -> tuple[Any, str]:
    """The call of the kernel (``to``: where it is to write statistics), and a note that describes
    it."""
    from deuteron.kernels.triton.conv import widen
    from deuteron.kernels.triton.conv_hopper import Sizes, Tile, Window, conv

    work = as_convolution(region)
    r, room = _read(work), _room(work, t, ctx.target)
    assert room is not None
    images, height, width, channels = work.x.shape
    _, down, across, columns = work.out.shape
    image = r.height, r.width, down, across, r.channels, columns, r.line, r.row, work.line
    window = Window._make((*r.taps, *r.before, *r.apart, *r.stride, work.spread))
    tile = Tile(*t[:4], room.stages, room.filters, t.halo, room.kept, r.steps)
    call = conv(Sizes(images, *image), window, tile, follows(region, work), programs)
    x, w = (region.inputs.index(v) for v in work.node.uses[:2])
    others = [region.inputs.index(v) for v, _ in work.others]
    stored = None
    if r.many and work.known:
        stored = ctx.form(work.node.uses[1], r, r.weight)
    rows = images * height, width, channels, r.many, r.row // max(r.many, 1)

    def run(*given: Any, to: Any = None) -> None:
        of, weight = given[x], given[w] if stored is None else stored
        if r.many:
            of = widen(of, *rows, work.before[1])
            weight = r.weight(weight) if stored is None else weight
        call(of, weight, given[-1], [given[i] for i in others], to)

    note = f"tiles of {t.images} × {t.high} × {t.wide} pixels × {t.columns}, warps divide the work"
    note += ", taps share what they read" if t.halo else ""
    note += f", {r.channels} numbers under a row of a window together" if r.many else ""
    return run, note


_HOW = (_refuse, _build, _knobs, _seconds, 4.0)
CONV_HOPPER = Recipe("conv_hopper", OPS, *_HOW, by_estimate=False, strided=True)
