"""Products over pixels (1×1 convolutions) that compute their input on the way in: the recipe around
``kernels/triton/separable.py``. The input comes from a depthwise convolution with an epilogue, or
from elementwise work, such as the scaling by squeeze-and-excite.

Fusion does not make such regions, because the operands of a product must be in memory, where
libraries find them. A plan offers them as an alternative to the two regions that they combine
(``plan/region_borders.py``), and measures both."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import torch

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import is_depthwise, main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, MOST, settings
from deuteron.engines.triton.conv import (
    OP,
    Convolved,
    broadcasts_as,
    refuse_exact,
    refuse_other_kinds,
    turned_over,
)
from deuteron.engines.triton.depthwise import BUSY, stored_by_taps
from deuteron.engines.triton.multiplied import followed, follows
from deuteron.engines.triton.pixels import channels_last, pixels_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.text import restride
from deuteron.ir.types import TensorType
from deuteron.ops.formula import Traced
from deuteron.policy import Policy
from deuteron.target import Target

RUNS = 64  # runs of neighbouring pixels of a program: rows that matrix units take at a time
COPIES = (1, 2)  # neighbouring pixels of a run; four were slower on an H200
MADE, READ = 32, 64  # channels at a time, where a convolution comes first, and where none does
WIDEST = 256  # most columns of a tile
WARPS = 4
# Sums, and numbers on their way to them, of a thread: so few that four programs fit on a
# multiprocessor, and at most.
NARROW, HELD = 120, 176
PARTS = (2, 4, 8, 16)
LEAST = 2  # fewest steps of a part
FILLED = 4  # programs that share a multiprocessor
REACHED = 0.75  # part of the bandwidth of a copy
MULTIPLIES = 0.3  # part of what libraries get out of matrix units
OFFERED = 2


class ProductInput(NamedTuple):
    """The input of a product, as a formula of sums over windows of x, or of x itself, and of other
    values."""

    node: Node | None  # the convolution, if there is one
    x: str
    formula: Traced
    others: tuple[tuple[str, str], ...]
    line: int = 0  # numbers from one pixel of x to the next, if there is no convolution


@dataclass(frozen=True)
class Separable:
    """A region as a product over pixels. ``made``: how its input is computed; ``first``: the
    convolution that does, if there is one."""

    made: ProductInput
    first: Convolved | None
    product: Convolved

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of x, channels last."""
        return (self.first or self.product).x.shape

    @property
    def line(self) -> int:
        """Numbers from one pixel of x to the next."""
        return self.made.line if self.first is None else self.first.x.line or 0

    @property
    def taps(self) -> tuple[int, ...]:
        return (1, 1) if self.first is None else self.first.weight.shape[2:]


def as_separable(region: Region) -> Separable:
    """The region as such a product; refuses any other."""
    convs = [i for i, n in enumerate(region.nodes) if n.op == OP]
    last = convs[-1] if convs else 0
    refuse_if(not last, "has no product of what it makes", quiet=True)
    node = region.nodes[last]
    made = region.part("made", region.nodes[:last], None)
    whole = made.outputs == node.uses[:1] and node.uses[0] not in node.uses[1:]
    refuse_if(not whole, "what the product reads is read elsewhere, or made elsewhere")
    second = region.part("product", region.nodes[last:], 0)
    _, x, weight, result = refuse_other_kinds(second)
    a = node.attrs
    plain = set(weight.shape[2:]) == set(a["stride"]) == {1} and not any(a["padding"])
    refuse_if(not plain or a["groups"] > 1, "the product is none of single pixels")
    in_lines = weight.strides[:2] == (weight.shape[1], 1) or weight.shape[1] == 1
    refuse_if(not in_lines, "the weight does not lie in lines", "store it in nhwc")
    for what, t in (("what is multiplied", x), ("result", result)):
        in_order = t.is_layout("nhwc") if t is x else pixels_of(t).line is not None
        refuse_if(not in_order, f"the {what} is not in nhwc", "Policy(layout='auto')")
    first = _depthwise(made) if made.ops[0] == OP else None
    if first is None:
        given = _elementwise(made)
    else:
        given = ProductInput(first.node, first.node.uses[0], first.formula, first.others)
    return Separable(given, first, turned_over(second))


def _depthwise(made: Region) -> Convolved:
    node, x, weight, result = refuse_other_kinds(made)
    alone = is_depthwise(made.graph, node) and weight.shape[0] == x.shape[1]
    refuse_if(not alone, "channels see each other before the product", quiet=True)
    for what, t in (("input", x), ("result", result)):
        in_order = t.is_layout("nhwc") if t is result else pixels_of(t).line is not None
        refuse_if(not in_order, f"the {what} is not in nhwc", "Policy(layout='auto')")
    return turned_over(made)


def _elementwise(made: Region) -> ProductInput:
    """Elementwise work, written as the epilogue of a pretended first node that gives its image."""
    types, out = made.graph.types, made.graph.types[made.outputs[0]]
    alike = [v for v in made.inputs if (types[v].shape, types[v].dtype) == (out.shape, out.dtype)]
    images = [v for v in alike if pixels_of(types[v]).line is not None]
    images.sort(key=lambda v: types[v] == out)  # other operands must have the strides of the result
    refuse_if(not images or out.rank != 4, "reads no image of the shape of what it makes")
    x, name = images[0], f"{images[0]} as it is"
    start = Node(OP, (x,), (name,))
    nodes = [replace(n, inputs=tuple(name if v == x else v for v in n.inputs)) for n in made.nodes]
    graph = replace(made.graph, nodes=(start, *nodes), types={**types, name: out})
    turned = channels_last(Region(graph, made.constants))
    return ProductInput(
        None, x, *followed(turned, [start], {}, lies=broadcasts_as), pixels_of(types[x]).line or 0
    )


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    work = as_separable(region)
    refuse_exact(work.product.x.dtype.short, policy)
    many = prod(work.shape[:3]) > MOST
    refuse_if(many, "has more pixels than 32 bits count", "split the batch")


# ---- tiles, and what they take


class Tiling(NamedTuple):
    """Neighbouring pixels of a run, columns, channels at a time, stages, and parts of the sum."""

    copies: int
    columns: int
    channels: int
    stages: int
    parts: int


def _tilings(work: Separable, target: Target) -> Sequence[Tiling]:
    outs, channels = work.product.out.shape[-1], work.shape[-1]
    widest = min(WIDEST, max(16, power_of_two(outs)))
    columns = {widest, max(64, widest // 2)} if widest > 64 else {widest}
    most, stages = (READ, 3) if work.first is None else (MADE, 1)
    deep = min(most, max(16, power_of_two(channels)))
    found = []
    for n, wide in product(COPIES, columns):
        one = Tiling(n, wide, deep, stages, 1)
        if n <= work.product.out.shape[2] and _held(work, one) <= HELD:
            tiles, blocks = _tiles(work, one), -(-channels // deep)
            parts = [p for p in PARTS if p * tiles <= FILLED * target.units and blocks >= LEAST * p]
            parts = parts if work.product.line == outs else []  # adding up parts cannot leave gaps
            found += [one._replace(parts=p) for p in (1, *parts)]
    return found


def _span(work: Separable, copies: int) -> int:
    """How many pixels of a row the windows of a run cover."""
    stride = 1 if work.made.node is None else work.made.node.attrs["stride"][1]
    return int((copies - 1) * stride + work.taps[1])


def _held(work: Separable, t: Tiling) -> int:
    """How many numbers a thread holds: sums of its windows, x under a row of them, and sums of the
    product. Without a convolution only the latter; inputs are loaded when they are needed."""
    lanes = RUNS * t.channels // (32 * WARPS)
    under = 0 if work.first is None else lanes * (t.copies + _span(work, t.copies))
    return under + RUNS * t.columns * t.copies // (32 * WARPS)


def _tiles(work: Separable, t: Tiling) -> int:
    images, down, across, outs = work.product.out.shape
    runs = images * down * -(-across // t.copies)
    return -(-runs // RUNS) * -(-outs // t.columns)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    work = as_separable(region)
    ordered = sorted(_tilings(work, target), key=lambda t: _seconds_of(region, work, t, target))
    return [t._asdict() for t in ordered[:OFFERED]]


def _seconds_of(region: Region, work: Separable, t: Tiling, target: Target) -> float:
    """Estimated seconds: the longer of memory traffic and of all rounds of tiles. A tile takes
    instructions to compute its input (for every tap, a number of x is read and made float32, which
    neighbours share) and the products."""
    kind, channels, (kh, kw) = main_dtype(region), work.shape[-1], work.taps
    memory, _ = times(region_cost(region), kind, False, target)
    each = kh * (kw + (1.5 * _span(work, t.copies) + kw) / t.copies)
    each += 8 + len(work.made.formula.statements)
    blocks = -(-channels // t.channels)
    deep = -(-blocks // t.parts) * t.channels
    pixels = RUNS * t.copies
    makes = pixels * deep * each / (BUSY * target.rate("f32", False) / 2)
    follows = pixels * t.columns * (4 + len(work.product.formula.statements))
    makes += follows / (BUSY * target.rate("f32", False) / 2)
    multiplies = 2.0 * pixels * deep * t.columns / (MULTIPLIES * target.rate(kind, True, True))
    programs = _tiles(work, t) * t.parts
    filled = -(-programs // target.units) * target.units  # the last round takes as long as others
    seconds = max(memory / REACHED, filled * (makes + multiplies)) + target.launch
    if t.parts > 1:
        seconds += ADDED_S + 8.0 * t.parts * work.product.out.numel / target.cache_bandwidth
    return float(seconds)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, as_separable(region), Tiling(**settings(knobs)), target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.depthwise import Window
    from deuteron.kernels.triton.separable import Sizes, Tile, separable

    work, t = as_separable(region), Tiling(**settings(knobs))
    (_, height, width, channels), out = work.shape, work.product.out
    images, down, across, columns = out.shape
    pixels, line = down * across, work.product.line
    size = Sizes(images * pixels, columns, images, height, width, down, across, pixels, line)
    taps, form, window = None, None, Window(1, 1, 1, 1, 0, 0, 1, 1, 0, 0, channels, work.line)
    if work.first is not None:
        taps = region.inputs.index(work.first.node.uses[1])
        window, stored = stored_by_taps(work.first)
        if work.first.known:
            name = work.first.node.uses[1]
            form = ctx.form(name, ("taps", *stored.strides), partial(_taps, type_=stored))
    tile = Tile(RUNS, t.copies, t.columns, t.channels, t.parts, RUNS * t.copies, 1, False)
    made, last = work.made, work.product
    after = follows(region, made), follows(region, last)
    wide = work.first is None or _held(work, t) > NARROW  # reading ahead takes registers
    call = separable(size, window, tile, *after, WARPS, t.stages, wide)
    x, w = region.inputs.index(made.x), region.inputs.index(last.node.uses[1])
    makes, others = ([region.inputs.index(v) for v, _ in o] for o in (made.others, last.others))

    def run(*given: Any) -> None:
        weights = form if form is not None else None if taps is None else given[taps]
        rest = [given[i] for i in makes], [given[i] for i in others]
        call(given[x], weights, given[w], given[-1], *rest)

    note = f"tiles of {RUNS * t.copies} pixels × {t.columns}, made {t.channels} channels at a time"
    note += f", {t.parts} parts of the sum" if t.parts > 1 else ""
    room = 4 * t.parts * out.numel if t.parts > 1 else 0
    return Kernel(run, writes=True, workspace=room, note=note)


def _taps(weight: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """The weights as float32, so that threads do not convert them again and again."""
    return restride(weight, type_=type_).float()


_HOW = (_refuse, _build, _knobs, _seconds, 1.5)
SEPARABLE = Recipe("separable", (OP,), *_HOW, by_estimate=False, strided=True)
