"""Ways of ``cpu_gemm`` for what a plain product does badly: Winograd, depthwise, attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deuteron.codegen.calls import Argument, runner
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import (
    CALL_S,
    PRODUCT,
    REACHED,
    chain_here,
    epilogue_of,
    generated,
    images,
    is_depthwise,
    on_this_cpu,
    operands,
    roof,
    window_of,
)
from deuteron.engines.match import Chain
from deuteron.engines.recipes import Knobs, maybe, must_chain, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import TILES, WINOGRAD_ERROR, lanes
from deuteron.policy import Policy
from deuteron.target import Target

# ---- Winograd ----------------------------------------------------------------------------------


def _refuse_winograd(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = chain_here(region, target, ("conv",), constant=True)
    if isinstance(c, Refusal):
        return c
    if c.x.dtype.short != "f32":
        return Refusal(f"transforms f32, not {c.x.dtype.short}", "cast to float32")
    a = c.anchor.attrs
    if c.x.rank != 4 or c.weight.shape[2:] != (3, 3):
        return Refusal("only 3×3 windows")
    if set(a["stride"]) != {1} or set(a["dilation"]) != {1} or a["groups"] != 1:
        return Refusal("is strided, dilated or grouped")
    if min(c.weight.shape[:2]) < 8:
        return Refusal("has too few channels to pay for the transforms")
    if not _tiles_allowed(policy):
        return Refusal(
            f"its error is not held under {policy.max_error:.1e}", "raise Policy(max_error=…)"
        )
    return None


def _tiles_allowed(policy: Policy) -> list[int]:
    limit = policy.max_error
    return [m for m, error in WINOGRAD_ERROR.items() if limit is None or error <= limit]


def _winograd_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    c = must_chain(region, ("conv",))
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
    c = must_chain(region, ("conv",))
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

    c = must_chain(region, ("conv",))
    bias = None if c.bias is None else ctx.constants[c.bias]
    calls = winograd.prepare_winograd(
        *images(region, c),
        c.anchor.attrs["padding"],
        ctx.constants[c.anchor.inputs[1] or ""],
        bias,
        epilogue_of(c),
        matmul.Tile(knobs["rows"], knobs["vectors"]),
        knobs["tile"],
    )
    floats = winograd.workspace(c.x.shape, c.out.shape, knobs["tile"], torch.get_num_threads())
    return Kernel.generated(calls(*operands(region, c)), workspace=4 * floats)


WINOGRAD = generated(
    "winograd", _refuse_winograd, _winograd_knobs, _winograd_seconds, _build_winograd, ("conv",)
)


# ---- depthwise ---------------------------------------------------------------------------------


def _refuse_depthwise(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = chain_here(region, target, ("conv",))
    return c if isinstance(c, Refusal) else is_depthwise(c)


def _depthwise_knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """Pixels of a tile: as few as possible twice, as many as the registers hold."""
    breadth = must_chain(region, ("conv",)).out.shape[-1]
    sizes = sorted({min(p, breadth) for p in (4, 7)}, key=lambda p: (-(-breadth // p) * p, -p))
    return [{"pixels": p} for p in sizes]


def _depthwise_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    c = must_chain(region, ("conv",))
    breadth, pixels = c.out.shape[-1], knobs["pixels"]
    again = -(-breadth // pixels) * pixels / breadth
    reached = 0.45 if c.anchor.attrs["stride"][-1] == 1 else 0.33
    reached *= 1.0 if pixels > 4 else 0.93
    seconds = region_cost(region).flops * again / (target.rate("f32") * reached)
    changes = {c.anchor.inputs[1], c.bias} - {None} - region.constants
    return roof(region, target, seconds) + 1e-5 * len(changes)


def _build_depthwise(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import depthwise

    c = must_chain(region, ("conv",))
    call = depthwise.prepare_depthwise(
        *images(region, c), window_of(c), epilogue_of(c), knobs["pixels"], c.x.dtype.short
    )
    x, y, z = operands(region, c)
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


DEPTHWISE = generated(
    "depthwise",
    _refuse_depthwise,
    _depthwise_knobs,
    _depthwise_seconds,
    _build_depthwise,
    ("conv",),
)


# ---- attention ---------------------------------------------------------------------------------

LONGEST = 8192  # keys whose scores for four queries stay in L1 or L2


def _refuse_attention(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if region.ops != ("attention",):
        return Refusal("is not an attention alone")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    q, k, v, out, bias = _attended(region)
    for name, t in (("q", q), ("k", k), ("v", v), ("result", out)):
        if t.shape[-1] > 1 and t.strides[-1] != 1:
            return Refusal(f"the features of {name} are not side by side", "make it contiguous")
    if k.shape[-2] > LONGEST:
        return Refusal(f"{k.shape[-2]} keys are too many", "use a FlashAttention engine")
    if bias is not None:
        keys = bias.shape[-1] if bias.rank else 1
        if keys != k.shape[-2] or (keys > 1 and bias.strides[-1] != 1):
            return Refusal("the bias is not stored key by key", "expand it and make it contiguous")
    return None


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
    batch = q.shape[0] if q.rank == 4 else 1

    def outer(t: TensorType) -> Any:
        """Strides of batch, head and row; a dimension of size 1 or none does not move."""
        padded = [0] * (4 - t.rank) + [
            s if n > 1 else 0 for n, s in zip(t.shape, t.strides, strict=True)
        ]
        return tuple(padded[:3])

    sizes = (
        batch,
        q.shape[-3],
        q.shape[-3] // k.shape[-3],
        q.shape[-2],
        k.shape[-2],
        q.shape[-1],
        v.shape[-1],
    )
    kind = "none" if bias is None else bias.dtype.short
    none = (0, 0, 0)
    strides = (*map(outer, (q, k, v, out)), none if bias is None else outer(bias))
    call = attention.prepare_attention(
        sizes,
        strides,
        attention.Form(node.attrs["causal"], kind, q.dtype.short),
        node.attrs["scale"],
    )
    query, key, value = (Argument(place(region, name)) for name in node.inputs[:3])
    beside = maybe(region, (*node.inputs, None)[3])
    added = 0 if beside is None else Argument(beside)
    per_thread = attention.room_per_thread(*sizes[4:], 4 * lanes())
    return Kernel.generated(
        [call(query, key, value, Argument(len(region.inputs)), added)],
        workspace=4 * per_thread * torch.get_num_threads(),
    )


ATTENTION = generated(
    "attention", _refuse_attention, one_way, _attention_seconds, _build_attention, ("attention",)
)
