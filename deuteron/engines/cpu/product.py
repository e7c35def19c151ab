"""What the recipes of ``cpu_kernels`` share, and the first of them: the packed product."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch

from deuteron.codegen import openmp
from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import Chain, chain, live_fraction
from deuteron.engines.recipes import Knobs, Recipe, place, place_or_none, required_chain
from deuteron.engines.roofline import region_cost, times
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import ONE_ROW, OUTER_TILES, TILES, converts_half, lanes, shared, teams
from deuteron.ops import table
from deuteron.ops.conv import sides
from deuteron.ops.formula import is_scalar
from deuteron.policy import Policy
from deuteron.target import Target

ANCHORS = ("conv", "conv_dx", "linear", "matmul")
REACHED = 1.02  # part of the rate of torch's largest products that these kernels reach
NARROW = 1.7  # tiles of one vector take this many times as long for a multiplication as wide tiles
LOADED = 0.6  # in_tiles: of a multiply-add's time, added for each load per multiply-add above 1/2
CHANCE = 1.3  # a candidate priced at up to this many times the best may turn out to be faster
CALL_S = 5e-6  # seconds of a call: Python, arguments and waking the team of threads
STORED = ("f32", "f16", "bf16", "bool")  # element types that kernels load and store
MOST = 2**31 - 1  # most elements of a tensor: offsets are 32-bit
WIDEST = 63  # most taps in a row of a window of a depthwise kernel
FILTERS = 16  # most filters of a channel: a depthwise kernel holds their sums in registers together
BUILD_S = 0.15  # seconds to compile a kernel on this machine


def refuse_elsewhere(region: Region, target: Target) -> None:
    """Refuse what none of the CPU kernels can run."""
    off = target.is_cuda
    refuse_if(off, "generates code for the CPU", "plan for the CPU: device='cpu'", quiet=True)
    refuse_if(not openmp.available(), "llvmlite is not installed", "pip install llvmlite")
    for t in (region.graph.types[v] for v in (*region.inputs, *region.outputs)):
        kind = t.dtype.short
        odd = kind not in STORED
        refuse_if(odd, f"element type {kind}, not f32, f16 or bf16", "cast to float32")
        half = kind == "f16" and not converts_half()
        refuse_if(half, "this CPU has no conversion from f16", "use bfloat16 or float32")
        nothing = "nothing to do: torch's own operators run it"
        refuse_if(t.numel == 0, "a tensor is empty", nothing)
        large = "a tensor has more elements than a 32-bit offset reaches"
        fewer = "split the batch so that every tensor has fewer than 2**31 elements"
        refuse_if(t.storage_numel > MOST, large, fewer)


def chain_here(region: Region, target: Target, anchors: tuple[str, ...]) -> Chain:
    """The region as a product with an epilogue that can be generated; refuses any other."""
    refuse_elsewhere(region, target)
    c, types = required_chain(region, anchors, False), region.graph.types
    formula = c.act is None or is_scalar(table.get(c.act.op))
    refuse_if(not formula, f"{c.act_name} has no formula", "give its OpDef one")
    conv = c.is_conv
    named = {"result": c.out} | ({"input": c.x} if conv else {})
    if c.residual is not None:
        named["residual"] = types[c.residual]
    inner = 1 if conv else -1
    for what, t in named.items():
        apart = t.rank and t.shape[inner] > 1 and t.strides[inner] != 1
        refuse_if(apart and conv, f"the {what} is not in nhwc", "use Policy(layout='auto')")
        refuse_if(apart, f"the rows of the {what} are not contiguous", "make it contiguous")
    return c


def epilogue_of(c: Chain) -> Any:
    from deuteron.kernels.cpu.epilogue import Epilogue

    attrs = () if c.act is None else tuple(c.act.attrs.items())
    return Epilogue(c.residual is not None, c.act_name, attrs)


def image(t: TensorType) -> Any:
    """A tensor's geometry for the kernels; a single channel may have any stride."""
    from deuteron.kernels.cpu.conv import Image

    strides = list(t.strides)
    strides[1] = 1
    for d in (0, *range(2, t.rank)):
        if t.shape[d] == 1:
            strides[d] = t.shape[1] * math.prod(t.shape[d + 1 :]) if d else t.storage_numel
    return Image(t.shape, tuple(strides))


def window_of(c: Chain) -> Any:
    from deuteron.kernels.cpu.conv import Window

    a, kernel = c.anchor.attrs, c.weight.shape[2:]
    before, behind = sides(a["padding"], len(kernel))
    return Window(kernel, a["stride"], before, behind, a["dilation"], a["groups"], c.spreads)


def operands(region: Region, c: Chain) -> tuple[Argument, ...]:
    """Input, result, residual, weight and bias among the kernel's arguments. If there is no
    residual or no bias, the input's address is passed in its place, and the kernel does not read
    it."""
    x = place(region, c.anchor.inputs[0])
    others = (place_or_none(region, value) for value in (c.residual, c.anchor.inputs[1], c.bias))
    given = (Argument(x if i is None else i) for i in others)
    return Argument(x), Argument(len(region.inputs)), *given


def images(region: Region, c: Chain) -> tuple[Any, Any, Any]:
    """Input, result and residual of a convolution."""
    other = None if c.residual is None else image(region.graph.types[c.residual])
    return image(c.x), image(c.out), other


def roof(region: Region, target: Target, seconds: float) -> float:
    """The longer of ``seconds``, for the arithmetic, and the time of the memory traffic, plus the
    time of the call."""
    memory, _ = times(region_cost(region), "f32", False, target)
    return max(seconds, memory / 0.85) + CALL_S


def in_tiles(rows: int, columns: int, tile: tuple[int, int]) -> float:
    """The cost of one step along k for a result of rows × columns, in multiply-adds: with the rows
    and columns that pad the register tiles (rows, vectors of columns), and the cost of loads."""
    tall, vectors = tile
    wide = vectors * lanes()
    filled = -(-rows // tall) * tall * -(-columns // wide) * wide
    return filled * (1 + LOADED * (1 / tall + 1 / vectors - 1 / 2))


# ---- the packed product ------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """A chain as ``groups`` products of [rows, segments · length] and [segments · length, columns].
    The part ``live`` of all segments is not padding."""

    rows: int
    columns: int
    groups: int
    segments: int
    length: int
    live: float = 1.0


def sizes(c: Chain, padded: bool = False) -> Sizes:
    if not c.is_conv:
        groups = math.prod(c.weight.shape[:-2])
        rows = c.out.numel // c.out.shape[-1] // groups
        return Sizes(rows, c.out.shape[-1], groups, 1, c.x.shape[-1])
    a, kernel = c.anchor.attrs, c.weight.shape[2:]
    taps, each = math.prod(kernel), c.x.shape[1] // a["groups"]
    wholly_inside = not any(side[-1] for side in sides(a["padding"], len(kernel)))
    joined = a["groups"] == 1 and a["dilation"][-1] == 1 and (padded or wholly_inside)
    run = kernel[-1] if joined and not c.spreads else 1
    if _side_by_side(c):
        return Sizes(c.x.numel // c.x.shape[1], c.out.shape[1], taps, 1, c.x.shape[1])
    groups, live = a["groups"], 1.0 if padded else live_fraction(c)
    rows, columns = c.out.numel // c.out.shape[1], c.out.shape[1] // groups
    return Sizes(rows, columns, groups, taps // run, each * run, live)


def _side_by_side(c: Chain) -> bool:
    """Whether each tap of a window is a product of its own: so it is where windows lie in the
    result and cover it without overlapping."""
    from deuteron.kernels.cpu.conv import side_by_side

    return c.is_conv and c.spreads and side_by_side(c.x.shape, c.out.shape, window_of(c))


def _refuse_product(region: Region, target: Target, policy: Policy) -> None:
    c = chain_here(region, target, ANCHORS)
    vector = c.anchor.op == "matmul" and c.weight.rank < 2
    refuse_if(vector, "the second factor is a vector", "multiply by a matrix of one column")
    refuse_if(why_not_depthwise(c) is None, "is depthwise: there is no product in it")


def why_not_depthwise(c: Chain) -> str | None:
    """None if this is a depthwise convolution that we generate code for, else the reason."""
    if not c.is_conv or c.anchor.attrs["groups"] != c.x.shape[1] or c.x.shape[1] == 1:
        return "is not a depthwise convolution"
    if c.out.shape[1] > FILTERS * c.x.shape[1]:
        return f"has more than {FILTERS} filters per channel"
    return "only windows up to 63 wide" if c.weight.shape[-1] > WIDEST else None


def _arithmetic_s(c: Chain, target: Target, knobs: Knobs) -> float:
    """Seconds of arithmetic, from a count of the kernel's cycles, with the rows and columns that
    pad tiles: a step along k takes rows · vectors / 2 cycles, each run and each tile a few more."""
    s = sizes(c, bool(knobs["padded"]))
    rows, vectors = knobs["rows"], knobs["vectors"]
    wide = vectors * lanes()
    down, across = -(-s.rows // rows), s.groups * in_panels(s.columns, vectors)
    least = rows * vectors / 2
    # one vector: as many loads as multiplications, which are fetched half as fast
    step = NARROW * least if vectors == 1 and rows > 1 else least
    tail = s.length % 4
    run = (s.length - tail) * step + tail * (step + rows) + 2 + rows
    # a tile that stores more than four rows, or reads a residual, waits for memory
    store = (3.0 if rows <= 4 else 4.5) * (3.0 if c.residual is not None else 1.0)
    tile = s.segments * s.live * run + 10 + store * rows * vectors
    most = shared(down, across, target.units, knobs["across"])
    uneven = most * target.units / (down * across)
    flops = 2 * rows * wide * down * across * tile / least * uneven
    small = 1.0 if rows > 1 else 1.6  # one row reads the weight faster than it can multiply
    widened = 1.0 if c.x.dtype.short == "f32" else 1.07
    return float(small * widened * flops) / (target.rate("f32") * REACHED)


def _preparing_s(region: Region, c: Chain, target: Target, knobs: Knobs) -> float:
    """Seconds of the steps before the product: copying x into a frame of zeros, packing a factor at
    every call, packing the rows of x where their numbers are not adjacent."""
    total = 0.0
    if knobs["padded"]:
        total += 2 * c.x.nbytes / target.stream + CALL_S
    if c.anchor.inputs[1] not in region.constants:
        moved = (c.weight.dtype.bits // 8 + 4) * c.weight.numel
        slow = 1.0 if packs_by_vectors(c) else 12.0
        total += slow * moved / target.stream + CALL_S
    if c.bias is not None and c.bias not in region.constants:
        total += CALL_S
    if _turned(c):
        slow = 1.0 if 1 in c.x.strides[-2:] else 12.0
        total += slow * 8 * c.x.numel / target.stream + CALL_S
    return total


def packs_by_vectors(c: Chain) -> bool:
    """Whether the weight is contiguous along its columns or along k, so that packing it can use
    vectors."""
    if c.anchor.op == "matmul":
        return 1 in c.weight.strides[-2:]
    return c.weight.strides[1] == 1 or math.prod(c.weight.shape[2:]) == 1


def _turned(c: Chain) -> bool:
    """Whether the numbers of a row of x are not adjacent in memory, so that x must be packed
    too."""
    return not c.is_conv and c.x.shape[-1] > 1 and c.x.strides[-1] != 1


def product_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Estimate the time of the packed product."""
    c = chain(region, ANCHORS)
    inside = roof(region, target, _arithmetic_s(c, target, knobs))
    return inside + _preparing_s(region, c, target, knobs) + _handed_s(region, target, knobs)


def _handed_s(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds to read data from the caches of other threads. Nearly every other kernel splits its
    work by rows, so a thread has just written the rows that it reads, and finds them in its own
    cache. If several threads split the columns here, each reads rows that others wrote."""
    c = chain(region, ANCHORS)
    others = 1 / (target.units // knobs["across"]) - 1 / target.units
    return float(others * (c.x.nbytes + c.out.nbytes) / target.handed)


def _product_share(region: Region, knobs: Knobs) -> float:
    """The share of operations that is left, as the kernel skips runs of taps in the padding."""
    return sizes(chain(region, ANCHORS), bool(knobs["padded"])).live


def in_panels(columns: int, vectors: int) -> int:
    return -(-columns // (vectors * lanes()))


def ways_to_share(down: int, across: int, target: Target) -> list[int]:
    """How many threads split the columns: the best number for a grid of ``down`` × ``across``
    tiles, and the best one that is at least twice or at most half of that."""
    first, *others = teams(down, across, target.units)
    other = (n for n in others if not first < 2 * n < 4 * first)
    return [first, *islice(other, 1)]


def with_a_chance(
    offers: Sequence[Knobs], price: Callable[[Knobs], float], most: int
) -> Sequence[Knobs]:
    """The ``offers`` worth building, the best by estimate first: at most ``most``, and none that is
    priced above CHANCE times the best."""
    best = sorted(offers, key=price)[:most]
    return [knobs for knobs in best if price(knobs) <= CHANCE * price(best[0])]


def _product_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The two best ways by estimate; three if the columns do not fill whole panels."""
    c = chain(region, ANCHORS)
    s = sizes(c)
    tiles = (OUTER_TILES if _turned(c) else TILES)[lanes()]
    shapes = [ONE_ROW] if s.rows == 1 else list(tiles)
    frames: tuple[bool, ...] = (False,)
    if c.is_conv and not c.spreads and c.x.rank < 5 and s.segments > 1 and s.length < 16:
        frames = (True, False) if s.groups == 1 else frames
    offers = [
        {"rows": r, "vectors": v, "across": across, "padded": padded}
        for (r, v), padded in product(shapes, frames)
        for across in ways_to_share(-(-s.rows // r), s.groups * in_panels(s.columns, v), target)
    ]
    odd = s.columns % (TILES[lanes()][0][1] * lanes()) != 0
    return with_a_chance(offers, partial(product_seconds, region, target), 3 if odd else 2)


# ---- building it -------------------------------------------------------------------------------


def _build_product(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import matmul, packing

    c = chain(region, ANCHORS)
    stored, one_row = c.x.dtype.short, knobs["rows"] == 1
    tile = matmul.Tile(knobs["rows"], knobs["vectors"])
    known = ctx.constants.get(c.anchor.inputs[1] or "")
    turned, conv = _turned(c), c.is_conv
    # one row takes as long as reading the weight, so its panels keep the type that it is stored in
    narrow = one_row and known is not None and not turned
    panel = stored if narrow else "f32"
    form = matmul.ProductKernel(tile, epilogue_of(c), stored, panel, turned)
    parts = _conv_parts(region, c, knobs) if conv else _matrix_parts(region, c)
    rows, matrices, factor = parts
    if turned:
        rows, source = _outer_parts(region, c, tile)
    extra = 0
    if known is not None:
        kind = known.dtype if narrow else torch.float32
        how = "panels", c.anchor.op, c.spreads, matrices, tile.columns, kind
        panels = packing.packed(
            ctx.form(
                c.anchor.inputs[1],
                how,
                lambda weight: packing.panels_of(_as_matrices(c, weight), tile.columns, kind),
            )
        )
    else:
        panels = packing.packed_at_call(factor, stored, tile.columns, "factor")
        extra = 4 * packing.room(factor, tile.columns)
    columns, beside = factor.columns, _side_by_side(c)
    if c.bias is not None and c.bias not in ctx.constants:
        (step,) = region.graph.types[c.bias].strides
        first = np.arange(matrices) * (0 if beside else columns * step)
        where = packing.Factor(first, np.zeros(1, np.int64), step, columns)
        bias = packing.packed_at_call(where, stored, tile.columns, "bias")
    else:
        given = None if c.bias is None else ctx.constants[c.bias]
        given = given.repeat(matrices) if given is not None and beside else given
        bias = packing.bias_now(given, matrices, columns, tile.columns)
    prepared = matmul.prepare(rows, columns, panels, bias, form, knobs["across"])
    x, y, *others = operands(region, c)
    if knobs["padded"]:
        from deuteron.kernels.cpu.conv import prepare_frame

        framed, copy = prepare_frame(image(c.x), window_of(c), stored)
        calls = (framed(x), *prepared.calls(copy, y, *others))
        return Kernel.generated(calls, prepared.workspace + extra + 4 * copy.floats)
    calls = prepared.calls(x, y, *others)
    if turned:
        packs, panels_of_x = packing.packed_at_call(source, stored, tile.rows, "rows")(x)
        calls = (*packs, *prepared.calls(panels_of_x, y, *others))
        extra += 4 * packing.room(source, tile.rows)
    return Kernel.generated(calls, prepared.workspace + extra)


def _as_matrices(c: Chain, weight: torch.Tensor) -> torch.Tensor:
    """A constant weight as a tensor [matrices, N, K]."""
    if _side_by_side(c):
        return weight.flatten(2).permute(2, 1, 0)
    if c.is_conv:  # K = taps · C
        groups = c.anchor.attrs["groups"]
        grouped = weight.reshape(groups, -1, weight.shape[1], math.prod(weight.shape[2:]))
        order = (0, 2, 3, 1) if c.spreads else (0, 1, 3, 2)
        return grouped.permute(order).flatten(2)
    if c.anchor.op == "linear":
        return weight.unsqueeze(0)
    return weight.reshape(-1, *weight.shape[-2:]).transpose(1, 2)


def _conv_parts(region: Region, c: Chain, knobs: Knobs) -> tuple[Any, int, Any]:
    """Rows of a convolution, how many matrices its weight has, and where the weight lies."""
    from deuteron.kernels.cpu import conv

    x, y, r = images(region, c)
    window = window_of(c)
    if knobs["padded"]:
        x, window = conv.frame(x, window)
    weight = conv.Image(c.weight.shape, c.weight.strides)
    rows, beside = conv.conv_rows(x, y, r, window), _side_by_side(c)
    matrices = math.prod(window.kernel) if beside else window.groups
    return rows, matrices, conv.weight_factor(weight, window, beside)


def _matrix_parts(region: Region, c: Chain) -> tuple[Any, int, Any]:
    """The same as :func:`_conv_parts` for ``linear`` and ``matmul``; batches broadcast as in
    torch."""
    from deuteron.kernels.cpu.packing import Factor
    from deuteron.kernels.cpu.product_rows import Rows, row_offsets

    w = c.weight
    n, k = (-2, -1) if c.anchor.op == "linear" else (-1, -2)
    starts = row_offsets(w.shape[:-2], w.strides[:-2]).reshape(-1)
    places = row_offsets((w.shape[k],), (w.strides[k],)).reshape(-1)
    factor = Factor(starts, places, w.strides[n], w.shape[n])
    x, out = c.x, c.out
    r = None if c.residual is None else region.graph.types[c.residual]

    def table(t: TensorType, first: int) -> Any:
        """Offsets of the rows of one product, over the dimensions from ``first`` to the last."""
        return row_offsets(t.shape[first:-1], t.strides[first:-1])

    if len(starts) == 1:
        other = None if r is None else table(r, 0)
        return Rows(table(x, 0), table(out, 0), other, x.shape[-1]), 1, factor
    rank = 1 if x.rank == 1 else 2  # a vector is a row without a dimension of its own
    lead = out.shape[:-rank]
    begins = [
        _spread(lead, x.shape[:-rank], x.strides[:-rank]),
        _spread(lead, w.shape[:-2], _numbers(w.shape[:-2])),
        *(_spread(lead, lead, t.strides[:-rank]) for t in (out, out if r is None else r)),
    ]
    other = None if r is None else table(r, -rank)
    rows = Rows(table(x, -rank), table(out, -rank), other, x.shape[-1], np.stack(begins, 1))
    return rows, len(starts), factor


def _outer_parts(region: Region, c: Chain, tile: Any) -> tuple[Any, Any]:
    """The rows of a product whose first factor is packed too, and where that factor lies."""
    from deuteron.kernels.cpu.packing import Factor
    from deuteron.kernels.cpu.product_rows import OuterRows, row_offsets

    x, w, out, rank = c.x, c.weight, c.out, min(c.x.rank, 2)
    m, step = (x.shape[-2], x.strides[-2]) if rank == 2 else (1, 1)
    k, n, lead = x.shape[-1], out.shape[-1], out.shape[:-rank]
    starts = row_offsets(x.shape[:-rank], x.strides[:-rank]).reshape(-1)
    places = row_offsets((k,), (x.strides[-1],)).reshape(-1)
    r = out if c.residual is None else region.graph.types[c.residual]
    steps = tile.rows, tile.columns
    pitch = k * steps[0], k * steps[1]
    begins = [
        _spread(lead, x.shape[:-rank], _numbers(x.shape[:-rank])) * -(-m // steps[0]) * pitch[0],
        _spread(lead, w.shape[:-2], _numbers(w.shape[:-2])) * -(-n // steps[1]) * pitch[1],
        *(_spread(lead, lead, t.strides[:-rank]) for t in (out, r)),
    ]
    to, other = (row_offsets(t.shape[-rank:-1], t.strides[-rank:-1]) for t in (out, r))
    added = None if c.residual is None else other
    runs = np.zeros((2, 1), np.int64)
    rows = OuterRows(runs, to, added, k, pitch, steps, np.stack(begins, 1))
    return rows, Factor(starts, places, step, m)


def _numbers(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides for ``shape`` that number the matrices of a batch."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _spread(lead: Sequence[int], shape: Sequence[int], steps: Sequence[int]) -> Any:
    """The offset of each of the ``lead`` products, for an operand that is broadcast to them."""
    from deuteron.kernels.cpu.product_rows import row_offsets

    front = [0] * (len(lead) - len(shape))
    moves = [0 if size == 1 else step for size, step in zip(shape, steps, strict=True)]
    return row_offsets(tuple(lead), (*front, *moves)).reshape(-1)


_PRODUCT = (_refuse_product, _build_product, _product_knobs, product_seconds)
PRODUCT = Recipe(
    "product", ANCHORS, *_PRODUCT, BUILD_S, share=_product_share, strided=True, unseen=_handed_s
)
