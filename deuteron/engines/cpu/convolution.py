"""Convolutions on the CPU that do not run as a plain product: by Winograd's algorithm, depthwise,
or in narrow groups."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from deuteron.codegen.calls import Call, Word
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu import product as cpu
from deuteron.engines.cpu.product import (
    BUILD_S,
    CALL_S,
    PRODUCT,
    REACHED,
    chain_here,
    in_tiles,
    roof,
)
from deuteron.engines.match import Chain, chain
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.kernels.cpu import TILES, lanes, tiles_allowed
from deuteron.policy import Policy
from deuteron.target import Target

BOTH = ("conv", "conv_dx")
# Transforming a weight at every call takes this many times as long as moving its bytes: SCATTERED
# since it is written to many panels at once, GATHERED if columns that are needed together also lie
# apart in memory.
SCATTERED, GATHERED = 0.4, 0.8
ACROSS = 7  # most taps in a row of a window: for narrow groups their filters stay in registers
READ = 1.5  # reading alone is this many times as fast as copying

# ---- Winograd ----------------------------------------------------------------------------------


def _refuse_winograd(region: Region, target: Target, policy: Policy) -> None:
    c = chain_here(region, target, BOTH)
    a, kind, most = c.anchor.attrs, c.x.dtype.short, policy.max_error or 0.0
    refuse_if(kind != "f32", f"transforms f32, not {kind}", "cast to float32")
    refuse_if(c.x.rank != 4 or c.weight.shape[2:] != (3, 3), "only 3×3 windows")
    plain = {*a["stride"], *a["dilation"]} == {1}
    refuse_if(not plain, "is strided or dilated")
    few = min(c.x.shape[1], c.out.shape[1]) // a["groups"] < 8
    refuse_if(few, "has too few channels to pay for the transforms")
    open_ = [region.graph.types[v] for v in (c.bias,) if v and v not in region.constants]
    apart = not all(t.is_layout("contiguous") for t in open_)
    refuse_if(apart, "the numbers of the bias do not lie side by side", "make it contiguous")
    held = tiles_allowed(policy.max_error)
    refuse_if(not held, f"its error is not held under {most:.1e}", "raise Policy(max_error=…)")


def _winograd_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """For each tile size that the policy allows, the register tile that rows and columns fill
    best."""
    c, found = chain(region, BOTH), []
    for m in tiles_allowed(policy.max_error):
        sizes = _tiles(c, m), c.out.shape[1] // c.anchor.attrs["groups"]
        rows, vectors = min(TILES[lanes()], key=partial(in_tiles, *sizes))
        found.append({"tile": m, "rows": rows, "vectors": vectors})
    return found


def _tiles(c: Chain, m: int) -> int:
    n, _, height, breadth = c.out.shape
    return n * -(-height // m) * -(-breadth // m)


def _winograd_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the products and the transforms. F(4×4) is never priced below F(2×2) and the
    direct sum: it loses more bits, so only a measurement, which checks the error too, may choose
    it."""
    c = chain(region, BOTH)
    m, rows, vectors = (knobs[name] for name in ("tile", "rows", "vectors"))
    groups = c.anchor.attrs["groups"]
    count, points = _tiles(c, m), (m + 2) ** 2
    k, channels = c.out.shape[1], c.x.shape[1] // groups
    ends = 1 + (6.0 * rows * vectors + 24) / (channels * rows * vectors)  # start and end of tiles
    filled = points * groups * channels * in_tiles(count, k // groups, (rows, vectors))
    products = 2.0 * filled * ends / (target.rate("f32") * REACHED)
    weights = 4.0 * points * k * channels / (READ * target.stream)
    cache = max(target.stream, target.cache_bandwidth / 2)
    moved = 4.0 * points * count * (k + c.x.shape[1]) / cache
    own = float(max(products, weights) + moved + 2 * CALL_S)
    if c.anchor.inputs[1] not in region.constants:
        columns = c.weight.strides[1 if c.spreads else 0]
        slow = SCATTERED if columns == 1 else GATHERED
        own += slow * 4.0 * (9 + points) * k * channels / target.stream + CALL_S
    if m == 2:
        return own
    direct = PRODUCT.seconds(region, target, PRODUCT.knobs(region, target, Policy())[0])
    ways = _winograd_knobs(region, target, Policy())
    smaller = min(_winograd_seconds(region, target, way) for way in ways if way["tile"] < m)
    return max(own, 1.01 * min(direct, smaller))


def _build_winograd(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import matmul, winograd
    from deuteron.kernels.cpu.conv import Image

    c, threads = chain(region, BOTH), torch.get_num_threads()
    m, tile, groups = (
        knobs["tile"],
        matmul.Tile(knobs["rows"], knobs["vectors"]),
        c.anchor.attrs["groups"],
    )
    x, y, z, weight, bias = cpu.operands(region, c)
    shape = winograd.shape_of(c.x.shape, c.out.shape, groups, m, tile, threads)
    floats = winograd.workspace(shape, threads)
    first: list[Call] = []
    if c.anchor.inputs[1] in ctx.constants:
        ready = ctx.form(
            c.anchor.inputs[1],
            ("winograd", c.spreads, m, groups, tile.columns),
            lambda weight: winograd.filters_now(weight, c.spreads, shape),
        )
        filters = winograd.filters_of(ready, shape)
    else:
        image = Image(c.weight.shape, c.weight.strides)
        first, filters, room = winograd.filters_at_call(image, weight, c.spreads, shape)
        floats += room
    start: Word = bias
    if c.bias is None or c.bias in ctx.constants:
        none = torch.zeros(c.out.shape[1])
        start = none if c.bias is None else ctx.constants[c.bias].contiguous()
    padding = cpu.window_of(c).padding
    padding = tuple(2 - p for p in padding) if c.spreads else padding
    form = padding, shape, filters, cpu.epilogue_of(c)
    calls = winograd.prepare_winograd(cpu.images(region, c), *form)
    return Kernel.generated((*first, *calls(x, y, z, start)), workspace=4 * floats)


def _winograd_share(region: Region, knobs: Knobs) -> float:
    """(m+2)² products for a tile of m² results, instead of 9 per result; without the transforms."""
    c, m = chain(region, BOTH), knobs["tile"]
    pixels = c.out.numel // c.out.shape[1]
    return float(_tiles(c, m) * (m + 2) ** 2 / (9 * pixels))


_WINOGRAD = (_refuse_winograd, _build_winograd, _winograd_knobs, _winograd_seconds)
WINOGRAD = Recipe("winograd", BOTH, *_WINOGRAD, BUILD_S, share=_winograd_share, strided=True)


# ---- depthwise ---------------------------------------------------------------------------------


def _refuse_depthwise(region: Region, target: Target, policy: Policy) -> None:
    c = chain_here(region, target, BOTH)
    why = cpu.why_not_depthwise(c)
    refuse_if(why is not None, why or "")


def _depthwise_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """Pixels of a tile: sizes that registers can hold. First comes the size with which tiles
    compute the fewest pixels in all (the last tile of a row overlaps), then the larger one."""
    c = chain(region, BOTH)
    breadth = c.out.shape[-1]
    breadth = -(-breadth // c.anchor.attrs["stride"][-1]) if c.spreads else breadth
    each = c.out.shape[1] // c.x.shape[1]
    sums = (4, 7) if each == 1 else (8 // each, 16 // each)
    pixels = {min(max(p, 1), breadth) for p in sums}
    return [{"pixels": p} for p in sorted(pixels, key=lambda p: (-(-breadth // p) * p, -p))]


def _depthwise_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    c = chain(region, BOTH)
    breadth, pixels = c.out.shape[-1], knobs["pixels"]
    again = -(-breadth // pixels) * pixels / breadth
    reached = 0.45 if c.anchor.attrs["stride"][-1] == 1 else 0.33
    reached *= 1.0 if pixels > 4 else 0.93
    seconds = region_cost(region).flops * again / (target.rate("f32") * reached)
    changes = {c.anchor.inputs[1], c.bias} - {None} - region.constants
    return roof(region, target, seconds) + (CALL_S if changes else 0.0)


def _build_depthwise(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import depthwise
    from deuteron.kernels.cpu.conv import Image

    c, window = chain(region, BOTH), cpu.window_of(chain(region, BOTH))
    form = cpu.epilogue_of(c), knobs["pixels"], c.x.dtype.short
    x_image, y_image, z_image = cpu.images(region, c)
    x, y, z, w, b = cpu.operands(region, c)
    weight, bias = c.anchor.inputs[1] or "", c.bias
    channels, size = c.x.shape[1], c.x.dtype.bits // 8
    dims = len(window.kernel)
    if c.spreads:
        parts, step = depthwise.parts_of(window, y_image.shape[2:]), window.stride
    else:
        every = tuple(range(math.prod(window.kernel)))
        parts, step = [depthwise.Part((0,) * dims, window, every)], (1,) * dims
    taps = [part.taps for part in parts]

    def calls(filters: Sequence[Word]) -> list[Call]:
        found = []
        for part, own in zip(parts, filters, strict=True):
            to, y_at = part.of(y_image, step)
            other, z_at = (None, 0) if z_image is None else part.of(z_image, step)
            call = depthwise.prepare_depthwise((x_image, to, other), part.window, *form)
            into, beside = replace(y, offset=size * y_at), replace(z, offset=size * z_at)
            found.append(call(x, into, beside, own))
        return found

    if {weight, bias} <= {*ctx.constants, None}:
        start = None if bias is None else ctx.constants[bias].float()
        known = depthwise.filters_of(ctx.constants[weight].float(), start, channels, taps)
        return Kernel.generated(calls(known))
    apart = None if bias is None else region.graph.types[bias].strides[0]
    given = Image(c.weight.shape, c.weight.strides)
    ordered, rooms = depthwise.filters_at_call(given, apart, channels, taps, c.x.dtype.short)
    return Kernel.generated((ordered(w, b), *calls(rooms)), workspace=4 * rooms[0].floats)


_DEPTHWISE = (_refuse_depthwise, _build_depthwise, _depthwise_knobs, _depthwise_seconds)
DEPTHWISE = Recipe("depthwise", BOTH, *_DEPTHWISE, BUILD_S, strided=True)


# ---- narrow groups -------------------------------------------------------------------------------


def _refuse_grouped(region: Region, target: Target, policy: Policy) -> None:
    c = chain_here(region, target, ("conv",))
    each = c.out.shape[1] // c.anchor.attrs["groups"]
    refuse_if(c.spreads, "is transposed", quiet=True)
    refuse_if(c.weight.shape[1] != each, "groups have not as many channels as filters", quiet=True)
    narrow = each in (2, 4, 8, 16) and each <= lanes()
    refuse_if(not narrow, f"{each} channels of a group do not divide a vector", quiet=True)
    refuse_if(c.weight.shape[-1] > ACROSS, f"only windows up to {ACROSS} wide", quiet=True)


def _grouped_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """Pixels of a tile: as many as the registers hold, and half of that, each reduced so that the
    tiles of a row are of equal width."""
    breadth, most = chain(region, ("conv",)).out.shape[-1], 14 if lanes() == 16 else 7
    tiles = (-(-breadth // p) for p in (most, most // 2))
    return [{"pixels": p} for p in dict.fromkeys(-(-breadth // count) for count in tiles)]


def _grouped_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    c = chain(region, ("conv",))
    breadth, pixels, group = c.out.shape[-1], knobs["pixels"], c.weight.shape[1]
    again = -(-breadth // pixels) * pixels / breadth
    (stride, across), alike = (c.anchor.attrs["stride"][-1], c.weight.shape[-1]), group == lanes()
    # for each multiplication, what puts a number of x into its lanes, and what hangs on the last
    shared = 1 if alike else 1 + min(stride, across) / across
    reached = REACHED / shared * (0.95 if pixels > 8 else 0.88) * (1.0 if stride == 1 else 0.9)
    seconds = region_cost(region).flops * again / (target.rate("f32") * reached)
    changes = {c.anchor.inputs[1], c.bias} - {None} - region.constants
    packed = 12.0 * 8 * c.weight.numel / target.stream + CALL_S if changes else 0.0
    return roof(region, target, seconds) + packed


def _build_grouped(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import depthwise, grouped
    from deuteron.kernels.cpu.conv import Image

    c, window = chain(region, ("conv",)), cpu.window_of(chain(region, ("conv",)))
    x, y, z, w, b = cpu.operands(region, c)
    how = window, cpu.epilogue_of(c), knobs["pixels"], c.x.dtype.short
    call = grouped.prepare_grouped(cpu.images(region, c), *how, torch.get_num_threads())
    channels, taps = c.x.shape[1], [grouped.order_of(c.weight.shape)]
    weight, bias = c.anchor.inputs[1] or "", c.bias
    if {weight, bias} <= {*ctx.constants, None}:
        start = None if bias is None else ctx.constants[bias].float()
        numbers = ctx.constants[weight].float().unsqueeze(1)
        (filters,) = depthwise.filters_of(numbers, start, channels, taps)
        return Kernel.generated((call(x, y, z, filters),))
    apart = None if bias is None else region.graph.types[bias].strides[0]
    shape, strides = c.weight.shape, c.weight.strides
    given = Image((shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:]))
    order, (room,) = depthwise.filters_at_call(given, apart, channels, taps, c.x.dtype.short)
    return Kernel.generated((order(w, b), call(x, y, z, room)), workspace=4 * room.floats)


_GROUPED = (_refuse_grouped, _build_grouped, _grouped_knobs, _grouped_seconds)
GROUPED = Recipe("grouped", ("conv",), *_GROUPED, BUILD_S, strided=True)
