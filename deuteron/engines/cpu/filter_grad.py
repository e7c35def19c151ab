"""The gradient of a convolution's weight on the CPU: a sum of outer products over all windows."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu import product as cpu
from deuteron.engines.cpu.product import BUILD_S, CALL_S, REACHED, in_tiles, roof
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Knobs, Recipe, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import OUTER_TILES, lanes, shared, tiles_allowed
from deuteron.policy import Policy
from deuteron.target import Target

FILTERS = ("conv_dw",)
FEW_FILTERS = 4  # most filters of a channel: their sums for a row of taps stay in registers
SCATTERED = 1.2  # Winograd's result is not in cache: writing it takes this times its memory time
AGAIN, TOGETHER = 1.0, 48.0  # sums that fit in no cache are moved AGAIN times per TOGETHER tiles


@dataclass(frozen=True)
class Filters:
    """A gradient of a weight. ``windows``: the type of the image with one pixel per window (the
    gradient); ``pixels``: that of the image under the windows (x); ``out``: that of the result."""

    node: Node
    windows: TensorType
    pixels: TensorType
    out: TensorType
    swapped: bool  # for a transposed convolution gradient and x change places

    @property
    def is_depthwise(self) -> bool:
        """Whether this is of a depthwise convolution with few filters per channel."""
        groups = self.node.attrs["groups"]
        alone = groups > 1 and groups == self.pixels.shape[1]
        return bool(alone and groups <= self.windows.shape[1] <= FEW_FILTERS * groups)

    @property
    def window(self) -> Any:
        from deuteron.kernels.cpu.conv import Window

        a = self.node.attrs
        sizes = self.out.shape[2:], a["stride"], a["padding"], a["padding"], a["dilation"]
        return Window(*sizes, a["groups"])

    def arguments(self, region: Region) -> tuple[Argument, Argument, Argument]:
        """Both operands and the result."""
        grad, x = (Argument(place(region, v)) for v in self.node.uses)
        pair = (x, grad) if self.swapped else (grad, x)
        return *pair, Argument(len(region.inputs))


def _filters(region: Region) -> Filters:
    node = only_node(region, dict.fromkeys(FILTERS))
    grad, x = (region.graph.types[v] for v in node.uses)
    swapped = node.attrs["transposed"]
    pair = (x, grad) if swapped else (grad, x)
    return Filters(node, *pair, region.graph.types[node.output], swapped)


def _refuse_filters(region: Region, target: Target, policy: Policy) -> None:
    f = _filters(region)
    cpu.refuse_elsewhere(region, target)
    for what, t in (("gradient", f.windows), ("input", f.pixels), ("result", f.out)):
        apart = t.shape[1] > 1 and t.strides[1] != 1
        refuse_if(apart, f"the {what} is not in nhwc", "use Policy(layout='auto')")
    refuse_if(f.is_depthwise, "is depthwise: there is no product in it")


def _filter_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    f = _filters(region)
    offers = [
        {"rows": r, "vectors": v, "across": across}
        for r, v in OUTER_TILES[lanes()]
        for across in cpu.ways_to_share(*_tiles(f, r, v), target)
    ]
    return cpu.with_a_chance(offers, partial(_filter_seconds, region, target), 2)


def _tiles(f: Filters, rows: int, vectors: int) -> tuple[int, int]:
    """The number of register tiles, down and across, of the products of all groups and taps."""
    groups = f.node.attrs["groups"]
    taps = math.prod(f.out.shape[2:])
    down = -(-f.out.shape[0] // groups // rows)
    return down, groups * taps * cpu.in_panels(f.out.shape[1], vectors)


def _filter_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the products, with the padding of panels, and of packing both images."""
    f = _filters(region)
    groups, taps = f.node.attrs["groups"], math.prod(f.out.shape[2:])
    k, channels = f.out.shape[0] // groups, f.out.shape[1]
    rows, vectors = knobs["rows"], knobs["vectors"]
    down, across = _tiles(f, rows, vectors)
    most = shared(down, across, target.units, knobs["across"])
    uneven = most * target.units / (down * across)
    depth = f.windows.numel // f.windows.shape[1]
    run = f.windows.shape[-1] if taps > 1 else 128
    each = in_tiles(k, channels, (rows, vectors))
    flops = 2.0 * groups * taps * each * depth * (1 + 0.5 / run) * uneven
    moved = sum((t.dtype.bits // 8 + 4) * t.numel for t in (f.windows, f.pixels))
    products = flops / (target.rate("f32") * REACHED)
    return roof(region, target, products) + moved / _near(target) + CALL_S


def _near(target: Target) -> float:
    """Bytes per second for data that was written just before."""
    return max(target.stream, target.cache_bandwidth / 2)


def _build_filters(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import filter_grad, matmul, packing
    from deuteron.kernels.cpu.epilogue import Epilogue

    f = _filters(region)
    tile, stored = matmul.Tile(knobs["rows"], knobs["vectors"]), f.out.dtype.short
    y, x, dw = (cpu.image(t) for t in (f.windows, f.pixels, f.out))
    made = filter_grad.prepare(y, x, dw, f.window, tile.columns, tile.rows)
    columns = made.pixels.columns
    a = packing.packed_at_call(made.windows, stored, tile.rows, "rows")
    b = packing.packed_at_call(made.pixels, stored, tile.columns, "factor")
    form = matmul.ProductKernel(tile, Epilogue(), stored, outer=True)
    start = packing.bias_now(None, 1, columns, tile.columns)
    prepared = matmul.prepare(made.rows, columns, b, start, form, knobs["across"])
    of_windows, of_pixels, to = f.arguments(region)
    packs, panels = a(of_windows)
    calls = (*packs, *prepared.calls(panels, to, to, of_pixels, 0))
    room = packing.room(made.windows, tile.rows) + packing.room(made.pixels, tile.columns)
    return Kernel.generated(calls, prepared.workspace + 4 * room)


_FILTERS = (_refuse_filters, _build_filters, _filter_knobs, _filter_seconds)
FILTER_GRAD = Recipe("filter_grad", FILTERS, *_FILTERS, BUILD_S)


# ---- Winograd ----------------------------------------------------------------------------------


def _refuse_winograd(region: Region, target: Target, policy: Policy) -> None:
    f = _filters(region)
    _refuse_filters(region, target, policy)
    a, kind = f.node.attrs, f.out.dtype.short
    refuse_if(kind != "f32", f"transforms f32, not {kind}", "cast to float32")
    refuse_if(f.out.rank != 4 or f.out.shape[2:] != (3, 3), "only 3×3 windows")
    plain = {*a["stride"], *a["dilation"], a["groups"]} == {1} and not f.swapped
    refuse_if(not plain, "is strided, dilated, grouped or transposed")
    few = min(f.out.shape[:2]) < 8
    refuse_if(few, "has too few channels to pay for the transforms")
    most, held = policy.max_error or 0.0, tiles_allowed(policy.max_error)
    refuse_if(not held, f"its error is not held under {most:.1e}", "raise Policy(max_error=…)")


def _winograd_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    k, channels = _filters(region).out.shape[:2]
    rows, vectors = min(OUTER_TILES[lanes()], key=partial(in_tiles, k, channels))
    return [{"tile": m, "rows": rows, "vectors": vectors} for m in tiles_allowed(policy.max_error)]


def _winograd_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the products, of what both transforms write, of sums or factors that are read
    again, and of the result. As in :mod:`deuteron.engines.cpu.convolution`, only a measurement
    chooses F(4×4)."""
    f, m = _filters(region), knobs["tile"]
    points, (k, channels) = (m + 2) ** 2, f.out.shape[:2]
    tiles = f.windows.shape[0] * math.prod(-(-size // m) for size in f.windows.shape[2:])
    each = in_tiles(k, channels, (knobs["rows"], knobs["vectors"]))
    products = 2.0 * points * tiles * each / (target.rate("f32") * REACHED)
    moved = 4.0 * points * tiles * (k + channels)
    sums = 4.0 * points * k * channels
    again = AGAIN * max(sums - target.cache_bytes, 0.0) * tiles / TOGETHER
    back = SCATTERED * f.out.nbytes / target.stream
    own = float(products + (moved + again) / _near(target) + back + 2 * CALL_S)
    if m == 2:
        return own
    direct = _filter_seconds(region, target, _filter_knobs(region, target, Policy())[0])
    smaller = _winograd_seconds(region, target, {**knobs, "tile": 2})
    return max(own, 1.01 * min(direct, smaller))


def _build_winograd(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import matmul, winograd_grad
    from deuteron.kernels.cpu.conv import Image

    f, tile = _filters(region), matmul.Tile(knobs["rows"], knobs["vectors"])
    images = cpu.image(f.windows), cpu.image(f.pixels), Image(f.out.shape, f.out.strides)
    calls, floats = winograd_grad.prepare_weight_grad(
        *images, f.window.padding, tile, knobs["tile"]
    )
    return Kernel.generated(calls(*f.arguments(region)), 4 * floats)


_WINOGRAD = (_refuse_winograd, _build_winograd, _winograd_knobs, _winograd_seconds)
WINOGRAD_GRAD = Recipe("winograd_grad", FILTERS, *_WINOGRAD, BUILD_S)


# ---- depthwise ---------------------------------------------------------------------------------


def _refuse_depthwise(region: Region, target: Target, policy: Policy) -> None:
    f = _filters(region)
    cpu.refuse_elsewhere(region, target)
    refuse_if(not f.is_depthwise, "is not a depthwise convolution")
    for what, t in (("gradient", f.windows), ("input", f.pixels)):
        refuse_if(t.strides[1] != 1, f"the {what} is not in nhwc", "use Policy(layout='auto')")
    refuse_if(not f.out.is_layout("contiguous"), "the result is not contiguous")


def _depthwise_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    f = _filters(region)
    framed = 2 * f.pixels.nbytes / target.stream if any(f.node.attrs["padding"]) else 0.0
    seconds = region_cost(region).flops / (0.3 * target.rate("f32"))
    return roof(region, target, seconds) + framed + 2 * CALL_S


def _build_depthwise(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import depthwise

    f = _filters(region)
    y, x, step = cpu.image(f.windows), cpu.image(f.pixels), f.out.strides[0]
    calls, floats = depthwise.prepare_weight_grad(y, x, f.window, step, f.out.dtype.short)
    return Kernel.generated(calls(*f.arguments(region)), 4 * floats)


_DEPTHWISE = (_refuse_depthwise, _build_depthwise, one_way, _depthwise_seconds)
DEPTHWISE_GRAD = Recipe("depthwise_grad", FILTERS, *_DEPTHWISE, BUILD_S)
