"""Gradients of convolutions for their weights on a GPU: the recipes around
``kernels/triton/conv_grad.py`` and, for depthwise convolutions, ``depthwise_grad.py``; which tiles
they offer, and how long they should take. Gradients for the input are convolutions (``conv.py``),
and those of windows of one pixel are products (``product.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import first_of
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, MOST, Tiling, knobs_of, tiling_of
from deuteron.engines.triton.conv import CACHED, NUMBERS, refuse_exact
from deuteron.engines.triton.multiplied import KINDS, followed, follows, kind_of, refuse_result
from deuteron.engines.triton.pixels import Packed, in_nhwc, of_a_weight, packed
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.formula import Traced
from deuteron.policy import Policy
from deuteron.target import Target

OP = "conv_dw"
OFFERED = 2
FEW = 16  # if x has fewer channels than this, a tile spans several taps
LEAST = 4  # fewest steps of a part of the sum
ROUNDS = 2  # the sum is split among up to so many programs per multiprocessor
FINISH_S = 0.5e-6  # seconds to begin and end a tile, while other programs multiply


@dataclass(frozen=True)
class FilterGradWork:
    """A region as the gradient for a weight and an epilogue: a formula of its sums and of other
    values."""

    node: Node
    grad: TensorType  # [N, K, …]: each of its pixels has a window
    x: TensorType  # [N, C, …]: the windows lie in it
    taps: tuple[int, ...]
    formula: Traced
    others: tuple[tuple[str, str], ...]
    uses: tuple[str, ...]  # the values of grad and x

    @property
    def groups(self) -> int:
        return int(self.node.attrs["groups"])

    @property
    def channels(self) -> int:
        """Channels of x in a group."""
        return self.x.shape[1] // self.groups

    @property
    def outs(self) -> int:
        """Channels of grad in a group."""
        return self.grad.shape[1] // self.groups

    @property
    def pixels(self) -> int:
        return self.grad.numel // self.grad.shape[1]

    @property
    def numel(self) -> int:
        """How many numbers the result has."""
        return self.grad.shape[1] * self.channels * prod(self.taps)

    @property
    def along(self) -> tuple[tuple[int, ...], ...]:
        """Taps, stride, padding and dilation of windows, each with one number per dimension."""
        a = self.node.attrs
        return self.taps, a["stride"], a["padding"], a["dilation"]

    @property
    def packed(self) -> Packed | None:
        """How x may be widened if it has few channels; None if it has many, or it would not
        help."""
        along = self.x.shape[-1], *(each[-1] for each in self.along)
        made = packed(self.channels, *along)
        few = self.groups == 1 and self.x.rank == 4 and self.channels < made.numbers < FEW
        return made if few else None

    def columns(self, widened: bool) -> tuple[int, int]:
        """How many taps a window has, and how many numbers of x are read at each."""
        if widened and (p := self.packed) is not None:
            return prod(self.taps[:-1]) * p.wide, p.numbers
        return prod(self.taps), self.channels

    @property
    def window(self) -> tuple[int, ...]:
        """``along`` of the last two dimensions: of an image, or of the images of a volume."""
        return tuple(n for each in self.along for n in each[-2:])


def as_filter_grad(region: Region, alone: bool) -> FilterGradWork:
    """The region as the gradient for a weight with an epilogue; refuses any other. ``alone``:
    accept only depthwise convolutions of images; otherwise only the others."""
    node, types = first_of(region, (OP,)), region.graph.types
    uses = tuple(reversed(node.uses)) if node.attrs["transposed"] else node.uses
    grad, x = (types[v] for v in uses)
    out, result = types[node.output], types[region.outputs[0]]
    refuse_if(x.rank not in (4, 5), "convolves images, not rows")
    single = x.shape[1] == node.attrs["groups"] == grad.shape[1] > 1 and x.rank == 4
    refuse_if(single != alone, "channels see each other, or do not", quiet=True)
    odd = x.dtype.short not in (*KINDS, "f32")
    refuse_if(odd, f"x is of {x.dtype.short}, not of 16 or 32 bits", "cast it to bfloat16")
    refuse_result(result, out)
    for what, t in (("gradient", grad), ("input", x), ("result", result)):
        in_order = t.is_layout("nhwc")
        refuse_if(not in_order, f"the {what} is not in nhwc", in_nhwc(x))
    many = max(grad.numel // grad.shape[1], prod(x.shape[1:]), out.numel) > MOST
    refuse_if(many, "has more pixels, or more weights, than 32 bits count", "split the batch")
    follows = followed(of_a_weight(region), [node], {}, lies=_kind)
    return FilterGradWork(node, grad, x, out.shape[2:], *follows, uses)


def _kind(t: TensorType, out: TensorType) -> str:
    """How a value broadcasts to the result [K, kh, kw, C], which kernels see as a matrix of K rows:
    it has the same shape ("all"), or is a single number ("one")."""
    kind = kind_of(t, out)
    refuse_if(kind not in ("all", "one"), "reads a tensor of another shape", "expand it")
    return kind


# ---- all but depthwise convolutions


# ``reached`` follows from the instructions of the kernel, compared with the convolution's own
TILINGS = (
    Tiling(128, 128, 8, 3, 0.7),
    Tiling(128, 128, 4, 3, 0.7),
    Tiling(128, 64, 4, 4, 0.5),
    Tiling(64, 128, 4, 4, 0.5),
    Tiling(64, 64, 4, 4, 0.45),
    Tiling(64, 32, 4, 4, 0.3),
    Tiling(32, 32, 4, 4, 0.2),
    Tiling(16, 16, 2, 4, 0.05),
)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_exact(as_filter_grad(region, alone=False).x.dtype.short, policy)


def _steps(work: FilterGradWork, widened: bool) -> int:
    """Pixels at a time; fewer where each number of x is a load by itself and takes a register."""
    return (32 if work.channels < FEW and not widened else 64) * 16 // work.x.dtype.bits


def _tiles(work: FilterGradWork, t: Tiling, widened: bool) -> int:
    taps, channels = work.columns(widened)
    few = channels < FEW
    across = -(-taps * channels // t.columns) if few else taps * -(-channels // t.columns)
    return int(work.groups * -(-work.outs // t.rows) * across)


def _parts(work: FilterGradWork, t: Tiling, widened: bool, target: Target) -> list[int]:
    """Into how many parts the sum may be split, so that every multiprocessor has one program or a
    few."""
    tiles, depth = _tiles(work, t, widened), -(-work.pixels // _steps(work, widened))
    wanted = {n * target.units // tiles for n in range(1, ROUNDS + 1)}
    fitting = {min(n, depth // LEAST) for n in wanted}
    return sorted({1, *(-(-depth // -(-depth // n)) for n in fitting if n > 1)})


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The tiles with the lowest estimates; if x has few channels, both with x read as it is and
    with x widened."""
    work, offers = as_filter_grad(region, alone=False), list[Knobs]()
    for widened in (True, False) if work.packed else (False,):
        taps, channels = work.columns(widened)
        wide = channels if channels >= FEW else channels * taps
        fitting = [
            t
            for t in TILINGS
            if t.rows <= max(16, 2 * work.outs - 1)
            and t.columns <= max(16, 2 * wide - 1)
            and t.stages * (t.rows + t.columns) * 64 * 2 <= target.shared_bytes
        ]
        ways = [(t, n, widened) for t in fitting for n in _parts(work, t, widened, target)]
        ordered = sorted(ways, key=lambda w: _seconds_of(region, work, w[0], w[1], w[2], target))
        named = ("rows", "columns", "warps", "stages")
        for t, parts, _ in ordered[:OFFERED]:
            offers.append({**knobs_of(t, *named), "parts": parts, "widened": widened})
    return offers


def _seconds_of(
    region: Region, work: FilterGradWork, t: Tiling, parts: int, widened: bool, target: Target
) -> float:
    """Estimated seconds: the longest of all rounds of tiles at the rate of a multiprocessor, their
    reads from L2, and the memory traffic."""
    kind, size = main_dtype(region), work.x.dtype.bits // 8
    tiles = _tiles(work, t, widened)
    each = 2.0 * t.rows * t.columns * work.pixels / parts
    rate = t.reached * target.rate(kind, True, allow_tf32=True) / target.units
    rounds = -(-tiles * parts // target.units)
    read = tiles * (t.rows + t.columns) * work.pixels * size
    memory, _ = times(region_cost(region), kind, True, target)
    total = max(
        rounds * (each / rate + FINISH_S), memory / 0.85, read / (CACHED * target.cache_bandwidth)
    )
    if work.columns(widened)[1] * size % 8:  # x is loaded number by number
        total = max(total, tiles * t.columns * work.pixels / (NUMBERS * target.units))
    if widened and (p := work.packed) is not None:
        pixels = work.x.numel // work.channels
        total += pixels * size * (work.channels + p.many) / target.stream + target.launch
    if parts > 1:
        total += ADDED_S + 8.0 * parts * work.numel / target.cache_bandwidth
    return total + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    work, tiling = as_filter_grad(region, alone=False), tiling_of(knobs, TILINGS)
    return _seconds_of(region, work, tiling, knobs["parts"], knobs["widened"], target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.conv import NO_DEPTH, widen
    from deuteron.kernels.triton.conv_grad import Sizes, Tile, Window, weight_grad

    work = as_filter_grad(region, alone=False)
    t, parts = tiling_of(knobs, TILINGS), int(knobs["parts"])
    _, outs, *to = work.grad.shape
    p = work.packed if knobs["widened"] else None
    size = Sizes(outs, work.channels * prod(work.taps), work.pixels)
    channels, where, wide = (work.channels, work.x.shape[1], work.outs), [*work.window], 1
    joined = (0, 0, 0, 0)
    if p is not None:
        channels, wide = (p.numbers, p.numbers, work.outs), p.pixels
        where[1], where[3], where[5] = p.wide, where[3] // p.pixels, p.before
        joined = p.lead, work.taps[-1], work.channels, p.pixels
    volume = len(to) == 3
    along = [each[0] for each in work.along] if volume else NO_DEPTH
    image = (prod(to), to[-1], work.x.shape[-2], work.x.shape[-1] // wide)
    deep = prod(to[-2:]), work.x.shape[2] if volume else 1
    window = Window._make((*where, *channels, *image, *along, *deep, *joined))
    tile = Tile(t.rows, t.columns, _steps(work, p is not None), parts, 1, False)
    call = weight_grad(size, window, tile, follows(region, work), t.warps, t.stages)
    room = 4 * parts * work.numel if parts > 1 else 0
    note = f"tiles of {t.rows} × {t.columns}, {parts} parts of the sum"
    run = call_of(region, work, call)
    if p is not None:
        pixels, across = work.x.numel // work.channels, work.x.shape[-1]
        if p.many > work.channels:
            how = pixels // across, across, work.channels, p.many
            run = call_of(region, work, call, lambda x: widen(x, *how))
            room += pixels * p.many * work.x.dtype.bits // 8
        note += f", {p.numbers} numbers of x at a time"
    return Kernel(run, writes=True, workspace=room, note=note)


def call_of(region: Region, work: FilterGradWork, call: Any, prepare: Any = None) -> Any:
    """``call``, which takes grad, x, the result and other operands, as a function of the region's
    tensors. ``prepare`` is applied to x first."""
    grad, x = (region.inputs.index(v) for v in work.uses)
    others = [region.inputs.index(v) for v, _ in work.others]

    def run(*t: Any) -> None:
        call(t[grad], t[x] if prepare is None else prepare(t[x]), t[-1], [t[i] for i in others])

    return run


# ---- depthwise convolutions

WARPS = 4
MOST_TAPS = 49
HELD = {4: 130, 2: 175, 1: 200}  # most numbers that a thread holds, by its number of channels
COPIES = (7, 4, 2, 1)  # neighbouring pixels of a row that a thread computes at a time
SHORTEST = 7  # fewest rows of a strip: its first rows are only read for the windows below them
BUSY = 6  # programs per multiprocessor that we want
REACHED = 0.6  # part of a copy's bandwidth


def _refuse_alone(region: Region, target: Target, policy: Policy) -> None:
    taps = prod(as_filter_grad(region, alone=True).taps)
    refuse_if(taps > MOST_TAPS, f"sums of {taps} taps are more than registers hold")


def _held(work: FilterGradWork, copies: int) -> int:
    """How many numbers of a channel a thread holds: those of x under all its windows, the sums of
    all taps, and the gradient of each of its ``copies`` pixels."""
    (kh, kw), a = work.taps, work.node.attrs
    span: int = (copies - 1) * a["stride"][1] + (kw - 1) * a["dilation"][1] + 1
    return kh * span + kh * kw + copies


def _beside(channels: int) -> int:
    """Channels of a program: a number that leaves few lanes idle, but is large enough that memory
    is read in long pieces."""
    fitting = (n for n in (16, 32, 64) if n < 2 * channels)
    return min(fitting, key=lambda n: -(-channels // n) * (n + 8), default=16)


def _lanes(work: FilterGradWork, copies: int) -> int:
    """How many channels a thread computes."""
    return next((n for n, most in HELD.items() if n * _held(work, copies) <= most), 1)


def _knobs_alone(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """As many neighbours per thread as registers hold; first the numbers that divide rows best."""
    work = as_filter_grad(region, alone=True)
    across = work.grad.shape[3]
    some = [n for n in COPIES if n <= across and _held(work, n) <= HELD[1]] or [1]
    ordered = sorted(some, key=lambda n: (-(-across // n) * (n + 2), n))
    return [{"copies": n} for n in ordered[:OFFERED]]


def _seconds_alone(region: Region, target: Target, knobs: Knobs) -> float:
    work = as_filter_grad(region, alone=True)
    memory, _ = times(region_cost(region), main_dtype(region), False, target)
    across, copies = work.grad.shape[3], knobs["copies"]
    empty = -(-across // copies) * copies / across
    computed = 2.0 * empty * prod(work.taps) * work.grad.numel / target.rate("f32", False)
    return float(max(memory / REACHED, 2 * computed)) + ADDED_S + target.launch


def _build_alone(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.depthwise_grad import Sizes, Tile, Window, weight_grad

    work, copies = as_filter_grad(region, alone=True), int(knobs["copies"])
    images, channels, down, across = work.grad.shape
    image = (*work.x.shape[2:], down, across)
    size = Sizes._make((channels, prod(work.taps), images, *image))
    beside = _beside(channels)
    strips = 32 * WARPS * _lanes(work, copies) // beside
    wanted = -(-BUSY * ctx.target.units * beside // channels)  # programs for the same channels
    short = -(-wanted * strips // (images * -(-across // copies)))  # strips of an image's column
    long = max(min(SHORTEST, down), -(-down // short))
    parts = -(-images * -(-down // long) * -(-across // copies) // strips)
    tile = Tile(strips, beside, copies, long, parts, 1, False)
    window = Window._make((*work.window, channels))
    call = weight_grad(size, window, tile, follows(region, work), WARPS)
    note = f"{copies} neighbours by one thread, {parts} parts of the sum"
    room = 4 * parts * work.numel
    return Kernel(call_of(region, work, call), writes=True, workspace=room, note=note)


# A kernel takes seconds to build for each size, so plans made by estimate leave these gradients to
# libraries, and so does a search that did not measure our kernel. Not so for depthwise
# convolutions: there cuDNN compiles a kernel for each size as well, or takes one that is several
# times slower.
CONV_GRAD = (
    Recipe("conv_grad", (OP,), _refuse, _build, _knobs, _seconds, 0.9, by_estimate=False),
    Recipe("depthwise_grad", (OP,), _refuse_alone, _build_alone, _knobs_alone, _seconds_alone, 1.5),
)
