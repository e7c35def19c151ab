"""Ways of ``cpu_gemm`` for what a plain product does badly: Winograd, depthwise, attention; and the
change of layout."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from deuteron.codegen.calls import Argument, runner
from deuteron.engines import cpu_product as cpu
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu_product import BUILD_S, CALL_S, PRODUCT, REACHED, chain_here, roof
from deuteron.engines.match import Chain, chain
from deuteron.engines.recipes import Knobs, Recipe, maybe, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import TILES, WINOGRAD_ERROR, WOVEN, lanes
from deuteron.policy import Policy
from deuteron.target import Target

CONV = ("conv",)

# ---- Winograd ----------------------------------------------------------------------------------


def _refuse_winograd(region: Region, target: Target, policy: Policy) -> None:
    c = chain_here(region, target, CONV, constant=True)
    a, kind, most = c.anchor.attrs, c.x.dtype.short, policy.max_error or 0.0
    refuse_if(kind != "f32", f"transforms f32, not {kind}", "cast to float32")
    refuse_if(c.x.rank != 4 or c.weight.shape[2:] != (3, 3), "only 3×3 windows")
    plain = {*a["stride"], *a["dilation"], a["groups"]} == {1}
    refuse_if(not plain, "is strided, dilated or grouped")
    few = min(c.weight.shape[:2]) < 8
    refuse_if(few, "has too few channels to pay for the transforms")
    held = _tiles_allowed(policy)
    refuse_if(not held, f"its error is not held under {most:.1e}", "raise Policy(max_error=…)")


def _tiles_allowed(policy: Policy) -> list[int]:
    limit = policy.max_error
    return [m for m, error in WINOGRAD_ERROR.items() if limit is None or error <= limit]


def _winograd_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    c = chain(region, CONV)
    found = []
    for m in _tiles_allowed(policy):
        count = _tiles(c, m)
        rows, vectors = min(
            (shape for shape in TILES[lanes()] if shape[1] == TILES[lanes()][0][1]),
            key=lambda shape: -(-count // shape[0]) * shape[0],
        )
        found.append({"tile": m, "rows": rows, "vectors": vectors})
    return found


def _tiles(c: Chain, m: int) -> int:
    n, _, height, breadth = c.out.shape
    return n * -(-height // m) * -(-breadth // m)


def _winograd_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """The products and the transforms. F(4×4) is never priced below F(2×2) and the direct sum: it
    loses more bits, so only a measurement, which checks the error as well, may choose it."""
    c = chain(region, CONV)
    m = knobs["tile"]
    count, points = _tiles(c, m), (m + 2) ** 2
    k, channels = c.weight.shape[:2]
    filled = -(-count // knobs["rows"]) * knobs["rows"]
    products = 2.0 * points * filled * k * channels / (target.rate("f32") * REACHED)
    weights = 4.0 * points * k * channels / target.stream
    moved = 8.0 * points * count * (k + channels) / max(target.stream, target.cache_bandwidth / 2)
    own = float(max(products, weights) + moved + 3 * CALL_S)
    if m == 2:
        return own
    direct = PRODUCT.seconds(region, target, PRODUCT.knobs(region, target, Policy())[0])
    smaller = min(
        _winograd_seconds(region, target, other)
        for other in _winograd_knobs(region, target, Policy())
        if other["tile"] < m
    )
    return max(own, 1.01 * min(direct, smaller))


def _build_winograd(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import matmul, winograd

    c = chain(region, CONV)
    bias = None if c.bias is None else ctx.constants[c.bias]
    given = ctx.constants[c.anchor.inputs[1] or ""], bias
    tile, padding = matmul.Tile(knobs["rows"], knobs["vectors"]), c.anchor.attrs["padding"]
    calls = winograd.prepare_winograd(
        cpu.images(region, c), padding, given, cpu.epilogue_of(c), tile, knobs["tile"]
    )
    floats = winograd.workspace(c.x.shape, c.out.shape, knobs["tile"], torch.get_num_threads())
    return Kernel.generated(calls(*cpu.operands(region, c)), workspace=4 * floats)


WINOGRAD = Recipe(
    "winograd", CONV, _refuse_winograd, _build_winograd, _winograd_knobs, _winograd_seconds, BUILD_S
)


# ---- depthwise ---------------------------------------------------------------------------------


def _refuse_depthwise(region: Region, target: Target, policy: Policy) -> None:
    why = cpu.why_not_depthwise(chain_here(region, target, CONV))
    refuse_if(why is not None, why or "")


def _depthwise_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """Pixels of a tile: as few as possible twice, as many as the registers hold."""
    breadth = chain(region, CONV).out.shape[-1]
    sizes = sorted({min(p, breadth) for p in (4, 7)}, key=lambda p: (-(-breadth // p) * p, -p))
    return [{"pixels": p} for p in sizes]


def _depthwise_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    c = chain(region, CONV)
    breadth, pixels = c.out.shape[-1], knobs["pixels"]
    again = -(-breadth // pixels) * pixels / breadth
    reached = 0.45 if c.anchor.attrs["stride"][-1] == 1 else 0.33
    reached *= 1.0 if pixels > 4 else 0.93
    seconds = region_cost(region).flops * again / (target.rate("f32") * reached)
    changes = {c.anchor.inputs[1], c.bias} - {None} - region.constants
    return roof(region, target, seconds) + 1e-5 * len(changes)


def _build_depthwise(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import depthwise

    c = chain(region, CONV)
    form = cpu.epilogue_of(c), knobs["pixels"], c.x.dtype.short
    call = depthwise.prepare_depthwise(cpu.images(region, c), cpu.window_of(c), *form)
    x, y, z = cpu.operands(region, c)
    taps, bias = c.anchor.inputs[1] or "", c.bias
    none = torch.zeros(c.x.shape[1])
    if {taps, bias} <= {*ctx.constants, None}:
        start = none if bias is None else depthwise.bias_of(ctx.constants[bias])
        return Kernel.generated([call(x, y, z, depthwise.taps_of(ctx.constants[taps]), start)])
    at, beside = place(region, taps), maybe(region, bias)
    run = runner([call(x, y, z, Argument(y.index + 1), Argument(y.index + 2))])

    def arranged(*t: torch.Tensor) -> None:
        """A filter that arrives with the call is put in order by torch first: it is small."""
        run(*t, depthwise.taps_of(t[at]), none if beside is None else depthwise.bias_of(t[beside]))

    return Kernel(arranged, writes=True)


_DEPTHWISE = (_refuse_depthwise, _build_depthwise, _depthwise_knobs, _depthwise_seconds)
DEPTHWISE = Recipe("depthwise", CONV, *_DEPTHWISE, BUILD_S)


# ---- attention ---------------------------------------------------------------------------------

LONGEST = 8192  # keys whose scores for four queries stay in L1 or L2


def _refuse_attention(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("attention",), "is not an attention alone")
    cpu.refuse_elsewhere(region, target)
    q, k, v, out, bias = _attended(region)
    for name, t in (("q", q), ("k", k), ("v", v), ("result", out)):
        apart = t.shape[-1] > 1 and t.strides[-1] != 1
        refuse_if(apart, f"the features of {name} are not side by side", "make it contiguous")
    keys = k.shape[-2]
    refuse_if(keys > LONGEST, f"{keys} keys are too many", "use a FlashAttention engine")
    if bias is not None:
        held = bias.shape[-1] if bias.rank else 1
        apart = held != keys or (held > 1 and bias.strides[-1] != 1)
        refuse_if(apart, "the bias is not stored key by key", "expand it and make it contiguous")


def _attended(
    region: Region,
) -> tuple[TensorType, TensorType, TensorType, TensorType, TensorType | None]:
    """The types of q, k, v, the result and the bias."""
    node, types = region.nodes[0], region.graph.types
    q, k, v = (types[value or ""] for value in node.inputs[:3])
    bias = node.inputs[3] if len(node.inputs) > 3 else None
    return q, k, v, types[node.output], None if bias is None else types[bias]


def _attention_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    q, k, v, _, _ = _attended(region)
    scores = q.numel // q.shape[-1] * k.shape[-2]
    products = region_cost(region).flops / (target.rate("f32") * 0.85)
    powers = 20.0 * scores / target.rate("f32")
    packing = 3.0 * (k.nbytes + v.nbytes) / target.stream
    return roof(region, target, products + powers + packing)


def _build_attention(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import attention

    q, k, v, out, bias = _attended(region)
    node = region.nodes[0]
    heads, queries, depth = q.shape[-3:]
    kind, none = "none" if bias is None else bias.dtype.short, (0, 0, 0)

    def outer(t: TensorType) -> Any:
        """Strides of batch, head and row; a dimension of size 1 or none does not move."""
        moves = [s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)]
        return tuple([0] * (4 - t.rank) + moves)[:3]

    of_keys = (k.shape[-2], depth, v.shape[-1])
    sizes = (q.shape[0] if q.rank == 4 else 1, heads, heads // k.shape[-3], queries, *of_keys)
    strides = (*map(outer, (q, k, v, out)), none if bias is None else outer(bias))
    form = attention.Form(node.attrs["causal"], kind, q.dtype.short)
    call = attention.prepare_attention(sizes, strides, form, node.attrs["scale"])
    query, key, value = (Argument(place(region, name)) for name in node.inputs[:3])
    beside = maybe(region, (*node.inputs, None)[3])
    added = 0 if beside is None else Argument(beside)
    room = 4 * attention.room_per_thread(*of_keys, 4 * lanes()) * torch.get_num_threads()
    calls = [call(query, key, value, Argument(len(region.inputs)), added)]
    return Kernel.generated(calls, workspace=room)


_ATTENTION = (_refuse_attention, _build_attention, one_way, _attention_seconds)
ATTENTION = Recipe("attention", ("attention",), *_ATTENTION, BUILD_S)


# ---- change of layout --------------------------------------------------------------------------

BLOCKS = 1.6  # times the memory's own time where blocks are turned: lines are touched out of order


def _refuse_layout(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("to_layout",), "is not a to_layout alone")
    cpu.refuse_elsewhere(region, target)
    usual = {t.layout for t in _ends(region)} == {"contiguous", "nhwc"}
    only = "moves between row-major order and nhwc only"
    refuse_if(not usual, only, "make it contiguous first")


def _ends(region: Region) -> tuple[TensorType, TensorType]:
    types = region.graph.types
    return types[region.inputs[0]], types[region.outputs[0]]


def _layout_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, y = _ends(region)
    woven = y.layout == "nhwc" and x.shape[1] <= WOVEN
    return roof(region, target, 0.0) * (1.0 if woven else BLOCKS)


def _build_layout(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.to_layout import prepare_to_layout

    x, y = _ends(region)
    channels, pixels = x.shape[1], prod(x.shape[2:])
    rows, columns = (channels, pixels) if y.layout == "nhwc" else (pixels, channels)
    call = prepare_to_layout(x.shape[0], rows, columns, x.dtype.bits)
    return Kernel.generated([call(Argument(0), Argument(1))])


_LAYOUT = (_refuse_layout, _build_layout, one_way, _layout_seconds)
TO_LAYOUT = Recipe("to_layout", ("to_layout",), *_LAYOUT, BUILD_S)
