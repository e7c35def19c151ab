"""Convolutions on a GPU with an elementwise epilogue: the recipe around ``kernels/triton/conv.py``;
which tiles it offers, and how long they should take. A transposed convolution, and the gradient for
the input, are the same with windows that lie in the result.

Windows of one pixel are left to products (``product.py``). Depthwise convolutions have nothing to
multiply as matrices (``depthwise.py``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import first_of
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, MOST, Statistics, Tiling, knobs_of, tiling_of
from deuteron.engines.triton.multiplied import (
    BYTES,
    KINDS,
    followed,
    follows,
    kind_of,
    refuse_overflow,
)
from deuteron.engines.triton.pixels import (
    FEW,
    Packed,
    channels_last,
    in_nhwc,
    packed,
    pixels_of,
    refuse_normalised,
)
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.conv import sides
from deuteron.ops.formula import Traced
from deuteron.policy import Policy
from deuteron.target import Target

OP, INTEGER = "conv", "conv_integer"
OPS = (OP, "conv_dx")
RANGES = {"i8": (-128, 127), "u8": (0, 255)}
GROUPED = 32  # narrow groups are taken together until they have at least so many channels
OFFERED = 2
PARTS = (2, 4, 8, 16)  # parts that a sum may be split into where there are few tiles
LEAST = 4  # fewest steps of a part
# seconds to begin and end a tile; per number of the result: to store it, and for each operation of
# the epilogue
FINISH_S, STORE_S, STEP_S = 0.1e-6, 0.075e-9, 0.0045e-9
CACHED = 1.8  # tiles were seen to be read at this many times the target's bandwidth of L2
NUMBERS = 5e9  # loads per second of a multiprocessor where each reads a number of x, or 4 bytes
PIXELS_APART = 1.5  # tiles that read 8 bytes at a time take this many times as long


# ``reached`` was seen on an H200
TILINGS = (
    Tiling(128, 128, 4, 3, 0.85),
    Tiling(128, 128, 8, 3, 0.82),
    Tiling(128, 64, 4, 4, 0.5),
    Tiling(64, 128, 4, 4, 0.5),
    Tiling(64, 64, 4, 4, 0.5),
    Tiling(128, 32, 4, 4, 0.35),
    Tiling(64, 32, 4, 4, 0.36),
    Tiling(128, 16, 4, 4, 0.2),
    Tiling(64, 16, 4, 4, 0.1),
)


@dataclass(frozen=True)
class Convolved:
    """A region as a convolution and an epilogue: a formula of its sums and of other values."""

    node: Node
    x: TensorType  # [N, H, W, C], or of volumes [N, D, H, W, C]
    weight: TensorType
    out: TensorType  # [N, P, Q, K]
    known: bool  # whether the weight is a constant, which may be stored in another form
    formula: Traced
    others: tuple[tuple[str, str], ...]
    line: int  # numbers from one pixel of the result, as it is stored, to the next

    @property
    def spread(self) -> bool:
        """Whether windows lie in the result: then the weight is [in, out, …]."""
        return (self.node.op == "conv_dx") != bool(self.node.attrs.get("transposed"))

    @property
    def taps(self) -> int:
        return prod(self.weight.shape[2:])

    @property
    def phases(self) -> int:
        """How many kinds of pixels the result has that differ in which taps reach them."""
        return prod(self.node.attrs["stride"]) if self.spread else 1

    @property
    def before(self) -> tuple[int, ...]:
        """Zeros before x in each dimension; for windows in the result, of stride 1, those of the
        plain convolution that computes the same."""
        a = self.node.attrs
        if not self.spread:
            return sides(a["padding"], len(a["stride"]))[0]
        each = zip(self.weight.shape[2:], a["dilation"], a["padding"], strict=True)
        return tuple((k - 1) * d - p for k, d, p in each)

    @property
    def per_group(self) -> int:
        """Channels of x in a group."""
        return self.x.shape[-1] // self.groups

    @property
    def rows(self) -> int:
        return prod(self.out.shape[:-1])

    @property
    def groups(self) -> int:
        return int(self.node.attrs["groups"])

    @cached_property
    def together(self) -> int:
        """How many groups are computed as one, with zero weights from one group to another."""
        channels = self.per_group
        fitting = (n for n in (1, 2, 4, 8, 16) if self.groups % n == 0)
        some = [n for n in fitting if n == 1 or channels * n <= 2 * GROUPED]
        enough = (n for n in some if n * channels >= GROUPED)
        short = self.x.dtype.is_float and self.x.dtype.bits == 8  # in_groups cannot index these
        return next(enough, some[-1]) if self.known and not self.spread and not short else 1

    @cached_property
    def packed(self) -> Packed:
        """How x is read if it has few channels and is widened."""
        a = self.node.attrs
        along = self.x.shape[-2], self.weight.shape[-1], a["stride"][-1], self.before[-1]
        return packed(self.per_group, *along, a["dilation"][-1])

    def channels(self, widened: bool) -> int:
        """Numbers of x that a group reads at a tap."""
        return self.packed.numbers if widened else self.per_group * self.together

    def deep(self, widened: bool) -> int:
        """The number of terms of a sum."""
        taps = self.taps // self.weight.shape[-1] * self.packed.wide if widened else self.taps
        return self.channels(widened) * taps

    def steps(self, widened: bool) -> int:
        """How many terms of the sum are taken at a time: the number that needs least padding."""
        wide = 64 * 16 // self.x.dtype.bits
        channels, deep = self.channels(widened), self.deep(widened)
        return min((wide, wide // 2), key=lambda n: (channels % n > 0, -(-deep // n) * n, -n))

    def length(self, widened: bool) -> int:
        """The number of terms of a sum with padding; if there are several phases, their mean."""
        deep, steps = self.deep(widened), self.steps(widened)
        return -(-deep // (steps * self.phases)) * steps


def as_convolution(region: Region) -> Convolved:
    """The region as a convolution with an epilogue; refuses any other."""
    node, x, weight, result = refuse_other_kinds(region, gathered=True)
    alone = x.shape[1] == node.attrs["groups"] > 1
    refuse_if(alone, "no channel sees another", quiet=True)
    for what, t in (("input", x), ("weight", weight), ("result", result)):
        in_order = t.is_layout("nhwc") if t is weight else pixels_of(t).line is not None
        refuse_if(not in_order, f"the {what} is not in nhwc", in_nhwc(x))
    return turned_over(region)


def refuse_gathered(work: Convolved) -> None:
    """Refuse, for other recipes, what only the kernel of this file takes: volumes and 8-bit
    numbers."""
    refuse_if(work.x.rank != 4, "convolves images, not volumes", quiet=True)
    refuse_if(work.x.dtype.bits == 8, "convolves no numbers of 8 bits", quiet=True)


def refuse_other_kinds(
    region: Region, gathered: bool = False
) -> tuple[Node, TensorType, TensorType, TensorType]:
    """The node that convolves images, and the types of x, of the weight and of the region's result.
    Refuses if there is no such node, or if our kernels cannot compute what follows it. With
    ``gathered``, for the kernel that gathers windows by pointers, volumes and 8-bit floats are
    allowed too."""
    refuse_normalised(region)
    node, types = first_of(region, (*OPS, INTEGER)), region.graph.types
    whole = node.op == INTEGER
    x, weight, out = (types[v] for v in (*node.uses[:2], node.output))
    refuse_if(x.rank not in (4, 5 if gathered else 4), "convolves images, not rows or volumes")
    result = types[region.outputs[0]]
    refuse_if(result.shape != out.shape, "what follows has another shape", "leave it outside")
    odd = not result.dtype.is_float or result.dtype.bits > 32
    if whole:
        odd = odd and len(region.nodes) > 1 and not _is_bytes(region)
        divided = "multiply by the reciprocal"
        refuse_if("div" in region.ops, "divides otherwise than PyTorch, in the last bit", divided)
    else:
        short = x.dtype.short not in (*KINDS, "f32", *(BYTES if gathered else ()))
        refuse_if(short, f"x is of {x.dtype.short}, not of 16 or 32 bits", "cast it to bfloat16")
        refuse_overflow(region)
    refuse_if(odd, f"the result is of {result.dtype.short}", "cast after the region")
    many = max(out.numel // max(out.shape[1], 1), prod(x.shape[1:]), weight.numel) > MOST
    refuse_if(many, "has more pixels, or more weights, than 32 bits count", "split the batch")
    return node, x, weight, result


def _is_bytes(region: Region) -> bool:
    """Whether the region ends with a clamp to the range of a byte and a cast to bytes."""
    last, kind = region.nodes[-1], region.graph.types[region.outputs[0]].dtype.short
    made = region.graph.producer.get(last.uses[0])
    if last.op != "cast" or kind not in RANGES or made is None or made.op != "clamp":
        return False
    low, high = made.attrs["min"], made.attrs["max"]
    least, most = RANGES[kind]
    return low is not None and high is not None and least <= low <= high <= most


def turned_over(region: Region) -> Convolved:
    """The region with images as they lie in memory, [N, …, C], and the epilogue as one formula."""
    if _is_bytes(region):  # the kernel's store does the last cast
        region = region.part(region.name, region.nodes[:-1], 0)
    node, turned = region.nodes[0], channels_last(region)
    types, weight = turned.graph.types, region.graph.types[node.uses[1]]
    biases = {node.output: node.uses[2]} if len(node.uses) > 2 and node.op != INTEGER else {}
    follows = followed(turned, [node], biases, lies=broadcasts_as)
    known = node.uses[1] in region.constants
    ends = types[node.uses[0]], weight, types[node.output]
    return Convolved(node, *ends, known, *follows, types[region.outputs[0]].line or 0)


def broadcasts_as(t: TensorType, out: TensorType) -> str:
    """How a value broadcasts to the result [N, P, Q, K]. The scales of squeeze-and-excite, one row
    of channels for each image, are "images"."""
    images = (out.shape[0], *[1] * (out.rank - 2), out.shape[-1])
    if t.shape == images and t.is_layout("contiguous") and t.dtype.is_float and t.dtype.bits <= 32:
        return "images" if out.shape[0] > 1 else "columns"
    return kind_of(t, out)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    work = as_convolution(region)
    refuse_exact(work.x.dtype.short, policy)
    short = work.x.dtype.is_float and work.x.dtype.bits == 8 and not target.has_fp8
    refuse_if(short, f"{target.name} multiplies no floats of 8 bits", "cast them to float16")
    if work.node.op == INTEGER:
        open_ = not set(work.node.uses[1:]) <= region.constants
        given = "the weight, or the bias, is an input of the plan"
        refuse_if(open_, given, "make it a constant: g.constant(w)")


def refuse_exact(kind: str, policy: Policy) -> None:
    """Refuse if the policy forbids that matrix units multiply numbers of this type."""
    exact = kind == "f32" and not policy.allow_tf32
    refuse_if(exact, "multiplies float32 as tf32 only", "Policy(float32='tf32')")


# ---- tiles, and what they take


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The tiles with the lowest estimates; if x has few channels, both with x read as it is and
    with x widened."""
    work = as_convolution(region)
    each = _each(work)
    fitting = [t for t in TILINGS if tiling_fits(work, t, target)] or [TILINGS[-1]]
    offers: list[Knobs] = []
    for widened in each:
        ways = [(t, n) for t in fitting for n in _parts(work, t, widened, target)]
        ordered = sorted(ways, key=lambda w: seconds_of(region, work, w[0], w[1], widened, target))
        for t, parts in ordered[:OFFERED]:
            offers.append(_named(t, parts, widened))
    return offers


def _each(work: Convolved) -> tuple[bool, ...]:
    """The ways to read x: widened, or as it is (False); both where it has few channels."""
    few = work.per_group < FEW and work.groups == 1 and not work.spread
    few = few and work.x.line == work.x.shape[-1]
    return (True, False) if few and work.channels(True) > work.per_group else (False,)


def in_one_part(region: Region, target: Target) -> Iterator[tuple[float, Knobs]]:
    """Every tiling that does not split sums: its estimate and its knobs."""
    work = as_convolution(region)
    for t, widened in product(TILINGS, _each(work)):
        if tiling_fits(work, t, target):
            yield seconds_of(region, work, t, 1, widened, target), _named(t, 1, widened)


def _named(t: Tiling, parts: int, widened: bool) -> Knobs:
    named = knobs_of(t, "rows", "columns", "warps", "stages")
    return named | {"parts": parts, "widened": widened}


def _parts(work: Convolved, t: Tiling, widened: bool, target: Target) -> list[int]:
    """Into how many parts the sum may be split: more than 1 if tiles leave multiprocessors idle."""
    steps = work.length(widened) // work.steps(widened)
    whole = work.node.op == INTEGER or work.line > work.out.shape[-1]
    room = 0 if whole else target.units * 2 // _tiles(work, t)
    return [1, *(n for n in PARTS if n <= room and steps >= LEAST * n and not widened)]


def _tiles(work: Convolved, t: Tiling) -> int:
    outs = _outs(work)
    groups = work.out.shape[-1] // outs
    return -(-work.rows // t.rows) * -(-outs // t.columns) * groups


def _outs(work: Convolved) -> int:
    """Channels of the result in a group, counting groups that are taken together as one."""
    return work.out.shape[-1] // work.groups * work.together


def tiling_fits(work: Convolved, t: Tiling, target: Target) -> bool:
    """Whether the tiles fit in shared memory and are less than twice as large as the result."""
    bytes_ = t.stages * (t.rows + t.columns) * 64 * 2
    narrow = t.columns <= max(16, 2 * _outs(work) - 1) and t.rows <= max(64, 2 * work.rows - 1)
    return narrow and bytes_ <= target.shared_bytes


def seconds_of(
    region: Region, work: Convolved, t: Tiling, parts: int, widened: bool, target: Target
) -> float:
    """Estimated seconds: the longest of all rounds of tiles at the rate of a multiprocessor, their
    reads from L2, and the memory traffic."""
    kind, size = main_dtype(region), work.x.dtype.bits // 8
    deep, tiles = work.length(widened), _tiles(work, t)
    each = 2.0 * t.rows * t.columns * deep / parts
    rate = t.reached * target.rate(kind, True, allow_tf32=True) / target.units
    rounds = -(-tiles * parts // target.units)
    from_cache = tiles * (t.rows + t.columns) * deep * size / (CACHED * target.cache_bandwidth)
    scattered = work.channels(widened) * size % 8 > 0  # loads of a single number, or of 4 bytes
    beside = 2 if size == 2 and work.channels(widened) % 2 == 0 else 1
    memory, _ = times(region_cost(region), kind, True, target)
    finish = FINISH_S + t.rows * t.columns * (STORE_S + STEP_S * work.formula.flops)
    total = max(rounds * (each / rate + finish), memory / 0.85, from_cache)
    if scattered:
        total = max(total, tiles * t.rows * deep / (beside * NUMBERS * target.units))
    if widened:
        total *= PIXELS_APART if work.packed.numbers * size < 16 else 1.0
        pixels = prod(work.x.shape[:-1])
        total += pixels * size * (work.x.shape[-1] + work.packed.many) / target.stream
        total += target.launch * (1 if work.known else 3)
    if parts > 1:
        total += ADDED_S + 8.0 * parts * work.out.numel / target.cache_bandwidth
    return total + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    work = as_convolution(region)
    how = int(knobs["parts"]), bool(knobs["widened"])
    return seconds_of(region, work, tiling_of(knobs, TILINGS), *how, target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    run, room, note = _made(region, knobs, ctx)
    return Kernel(run, writes=True, workspace=room, note=note)


def with_statistics(region: Region, knobs: Knobs, ctx: BuildContext) -> Statistics:
    """A convolution alone, with unsplit sums, which also computes statistics of its channels."""
    run, _, note = _made(region, knobs, ctx)
    return Statistics(run, -(-as_convolution(region).rows // tiling_of(knobs, TILINGS).rows), note)


def _made(region: Region, knobs: Knobs, ctx: BuildContext) -> tuple[Any, int, str]:
    """The call of the kernel (``to``: where it is to write statistics), the bytes of its workspace,
    and a note that describes it."""
    from deuteron.kernels.triton.conv import NO_DEPTH, Sizes, Tile, Window, conv, widen
    from deuteron.kernels.triton.launch import Line, Size

    work, t, widened = as_convolution(region), tiling_of(knobs, TILINGS), bool(knobs["widened"])
    a, (images, *space, channels) = work.node.attrs, work.x.shape
    _, *to, columns = work.out.shape
    volume = len(space) == 3
    p = work.packed if widened else Packed(channels, 1, 0, 0, 0)
    deep = (space[0], to[0]) if volume else (1, 1)
    many, steps, together = work.channels(widened), work.steps(widened), work.together
    line = many if widened else work.x.line or 0
    product = work.taps == work.groups == 1 and not work.spread and not widened
    channels_of = (0, 0, 0, 1) if product else (many, line, _outs(work), together)
    before = sides(a["padding"], len(space))[0]
    every = (work.weight.shape[2:], a["stride"], before, a["dilation"])
    where = [n for each in every for n in each[-2:]]
    wide, unused = space[-1], (0, 0, 1)  # unused: see ``Window`` for pixels that are read as one
    if widened:
        where[1], where[5] = p.wide, p.before
        unused = p.lead, work.weight.shape[-1], p.pixels
        if p.pixels > 1:
            wide, where[3] = wide // p.pixels, 1
    image = map(Size, (*space[-2:-1], wide, *to[-2:], prod(to)))
    ends = *map(Size, deep), Line(many), Line(line)
    size = Sizes._make((Size(work.rows), Line(columns), *image, Line(work.line), *ends))
    along = [each[0] for each in every] if volume else NO_DEPTH
    window = (*where, *channels_of, work.spread, a.get("zero", 0.0), *along, *unused)
    parts = int(knobs["parts"])
    tile = Tile(t.rows, t.columns, steps, parts, 1, False)
    # stages that never hold anything would only keep other programs off the multiprocessor
    long = work.length(widened) // tile.steps
    stages = min(t.stages, max(2, long)) if not product or long <= 2 else t.stages
    call = conv(size, Window._make(window), tile, follows(region, work), t.warps, stages)
    x, w = (region.inputs.index(v) for v in work.node.uses[:2])
    others = [region.inputs.index(v) for v, _ in work.others]
    stored, start = None, _start(work, ctx) if work.node.op == INTEGER else None
    if widened and work.known:
        stored = ctx.form(work.node.uses[1], p, p.weight)
    elif together > 1:
        make = partial(in_groups, many=many, together=together, outs=columns // work.groups)
        stored = ctx.form(work.node.uses[1], ("channels", many, together), make)
    pixels = images * prod(space)

    def run(*given: Any, to: Any = None) -> None:
        of, weight = given[x], given[w] if stored is None else stored
        if widened and p.many > channels:
            of = widen(of, pixels // space[-1], space[-1], channels, p.many)
        if widened and stored is None:
            weight = p.weight(weight)
        call(of, weight, given[-1], [given[i] for i in others], start, to)

    room = pixels * p.many * work.x.dtype.bits // 8 if widened else 0
    room += 4 * parts * work.out.numel if parts > 1 else 0
    note = f"tiles of {t.rows} × {t.columns} × {tile.steps}"
    note += f", {together} groups together" if together > 1 else ""
    note += f", {parts} parts of the sum" if parts > 1 else ""
    note += f", {p.many} channels instead of {channels}" if widened else ""
    note += f", {p.pixels} pixels at a time" if widened and p.pixels > 1 else ""
    return run, room, note


def _start(work: Convolved, ctx: BuildContext) -> torch.Tensor:
    """What the sums of integers begin with: minus the zero point times the weights, so that padding
    adds nothing to the result; and the bias."""
    _, name, *bias = work.node.uses
    weight, zero = ctx.constants[name], work.node.attrs["zero"]
    zero -= 128 if work.x.dtype.short == "u8" else 0  # the kernel subtracts 128 to get int8
    start: torch.Tensor = -zero * weight.to(torch.int32).flatten(1).sum(1, dtype=torch.int32)
    return start + ctx.constants[bias[0]] if bias else start


def in_groups(weight: torch.Tensor, many: int, together: int, outs: int) -> torch.Tensor:
    """A weight [K, C, …] as [K, …, many], with zeros for channels that x does not have, and for
    those of the other groups that are taken together."""
    count, channels, *taps = weight.shape
    wide = weight.new_zeros((count, *taps, together, many // together))
    which = torch.arange(count, device=weight.device)
    group = which // outs % together
    wide.movedim(-2, 1)[which, group, ..., :channels] = weight.movedim(1, -1)
    return wide.flatten(-2)


# A kernel takes seconds to build for each size, so plans made by estimate leave convolutions to the
# libraries, except those of integers, which the libraries do not have.
_HOW = (_refuse, _build, _knobs, _seconds, 0.9)
CONV = (
    Recipe("conv", OPS, *_HOW, by_estimate=False, strided=True),
    Recipe(INTEGER, (INTEGER,), *_HOW, strided=True),
)
