"""Vendor calls on NVIDIA GPUs: cuDNN's fused convolutions, cuBLASLt's epilogues, SDPA, and calls on
rearranged data."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from deuteron.engines import recipes
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import fused_seconds, separate_seconds
from deuteron.engines.match import Chain, chain, live_fraction, operands
from deuteron.engines.recipes import Recipe, library, place, place_or_none, required_chain, rows_of
from deuteron.engines.roofline import is_depthwise, region_cost, times
from deuteron.engines.torch_engine import numerics, under
from deuteron.engines.vendor import cpu as shared
from deuteron.engines.vendor.cpu import ATTENTION, CONV, KEPT, PRODUCTS
from deuteron.engines.vendor.scaled import SCALED
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.attention import is_plain, seen_pairs, window_mask
from deuteron.policy import Policy
from deuteron.target import Target

TENSOR_CORE = ("f16", "bf16")
GRADIENTS = ("conv_dx", "conv_dw")
LANES = 8  # channels of 16 bits that tensor cores read at a time
ALONE = "no channel sees another: a search takes long and finds the plain call"
SEARCH_S = 0.06  # seconds that cuDNN takes to try its algorithms


def floats(region: Region, anchors: tuple[str, ...], constant: bool = False) -> Chain:
    """The region as a chain of an element type that the libraries multiply; refuses any other. With
    ``constant`` the weights must be known ahead."""
    c = required_chain(region, anchors, constant)
    refuse_if(c.out.numel == 0 or c.x.numel == 0, "the tensors are empty")
    kind = c.x.dtype.short
    refuse_if(kind not in (*TENSOR_CORE, "f32"), f"element type {kind}", "use f16, bf16 or f32")
    return c


# ---- cuDNN convolution + bias (+ residual) + ReLU


def _many_channels(region: Region) -> Chain:
    c = floats(region, CONV)
    refuse_if(is_depthwise(region.graph, c.anchor), ALONE)
    recipes.refuse_uneven(c)
    return c


def _refuse_cudnn(region: Region, target: Target, policy: Policy) -> None:
    c = _many_channels(region)
    refuse_if(c.act_name != "relu", f"cuDNN's fused call ends in ReLU, not in {c.act_name}")
    odd = c.anchor.attrs["transposed"] or c.x.rank not in (4, 5)
    refuse_if(odd, "only plain 2-D and 3-D convolutions have a fused call")
    added = c.out if c.residual is None else region.graph.types[c.residual]
    apart = not added.is_layout(c.out.layout)
    refuse_if(apart, "the residual lies in another memory order than the result")


def _fused_call(region: Region, c: Chain, policy: Policy, search: bool) -> Callable[..., Any]:
    """The fused call as a function of an image, a weight, and all arguments of the kernel, among
    which it finds bias and residual."""
    a = c.anchor.attrs
    where = (a["stride"], a["padding"], a["dilation"], a["groups"])
    b, z = place_or_none(region, c.bias), place_or_none(region, c.residual)
    short = c.x.dtype.bits == 16

    def run(image: torch.Tensor, weight: torch.Tensor, t: Sequence[Any]) -> torch.Tensor:
        bias = None if b is None else t[b]
        with numerics(policy, search, short):
            if z is None:
                return torch.cudnn_convolution_relu(image, weight, bias, *where)
            return torch.cudnn_convolution_add_relu(image, weight, t[z], 1.0, bias, *where)

    return run


def build_cudnn(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
    x, w = (place(region, v) for v in c.anchor.inputs[:2])
    run = _fused_call(region, c, ctx.policy, bool(knobs["benchmark"]))
    return Kernel(lambda *t: run(t[x], t[w], t))


def _cudnn_knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    # cuDNN's search may choose another algorithm in another process, which changes the last bits
    return ({"benchmark": not policy.deterministic},)


# ---- plain cuDNN convolution, algorithm searched


def _refuse_conv(region: Region, target: Target, policy: Policy) -> None:
    _many_channels(region)
    refuse_if(len(region.nodes) > 1, "more than the convolution")
    varies = "a searched algorithm may differ from one process to the next"
    refuse_if(policy.deterministic, varies)


def _build_conv(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node, policy = region.nodes[0], ctx.policy
    x, w = (place(region, v) for v in node.inputs[:2])
    b = place_or_none(region, (*node.inputs, None)[2])
    names = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
    attrs = [node.attrs[name] for name in names]
    short = region.graph.types[node.output].dtype.bits == 16

    def run(*t: Any) -> torch.Tensor:
        with numerics(policy, benchmark=True, short=short):
            return torch.convolution(t[x], t[w], None if b is None else t[b], *attrs)

    return Kernel(run)


# ---- gradients of convolutions, algorithm searched


def _refuse_grads(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(len(region.nodes) > 1, "more than the convolution")
    refuse_if(is_depthwise(region.graph, region.nodes[0]), ALONE)
    types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
    refuse_if(not all(t.numel and t.rank in (4, 5) for t in types), "only 2-D and 3-D images")
    short = {t.dtype.short for t in types} <= {*TENSOR_CORE, "f32"}
    refuse_if(not short, "element types other than f16, bf16 and f32")
    varies = "a searched algorithm may differ from one process to the next"
    refuse_if(policy.deterministic, varies)


def _build_grads(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node, policy = region.nodes[0], ctx.policy
    reference, attrs = table.get(node.op).reference, dict(node.attrs)
    grad, other = (place(region, v) for v in node.inputs[:2])
    short = region.graph.types[node.output].dtype.bits == 16

    def run(*t: Any) -> Any:
        with numerics(policy, benchmark=True, short=short):
            return reference(t[grad], t[other], **attrs)

    return Kernel(run)


# ---- cuBLASLt: matrix product with bias and activation in the epilogue


def _lt_act(c: Chain) -> Callable[..., torch.Tensor] | None:
    """The fused call for this epilogue, with arguments (bias, rows, weight), or None."""
    if c.act is None:
        return torch.addmm
    if c.act.op == "relu":
        return torch._addmm_activation
    if c.act.op == "gelu" and c.act.attrs["approximate"] == "tanh":
        return lambda b, x, w: torch._addmm_activation(b, x, w, use_gelu=True)
    return None


def _refuse_lt(region: Region, target: Target, policy: Policy) -> None:
    c = floats(region, ("conv", "linear"))
    exact = c.x.dtype.short == "f32" and not policy.allow_tf32 and c.act is not None
    refuse_if(exact, "float32 epilogues run as separate kernels", "Policy(float32='tf32')")
    bare = c.bias is None and c.act is not None
    refuse_if(bare, "cuBLASLt's activations come with a bias", "give the product a bias")
    refuse_if(c.residual is not None, "cuBLASLt's epilogue has no residual beside a bias")
    other = "gelu(approximate='tanh') and relu have one" if c.act_name == "gelu" else ""
    refuse_if(_lt_act(c) is None, f"cuBLASLt has no epilogue for {c.act_name}", other)
    if c.anchor.op == "conv":
        recipes.refuse_windows(c)
        strided = any(s != 1 for s in c.anchor.attrs["stride"])
        refuse_if(strided, "a strided 1×1 convolution reads every second pixel")
        refuse_if(not c.out.is_layout("nhwc"), "the result is not in nhwc")
    else:
        refuse_if(not c.x.is_layout("contiguous"), "the rows are not contiguous")


def _build_lt(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, ("conv", "linear"))
    x, w = (place(region, v) for v in c.anchor.inputs[:2])
    b = place_or_none(region, c.bias)
    call, shape, image = _lt_act(c), c.out.shape, c.anchor.op == "conv"
    n, k = c.weight.shape[0], c.weight.shape[1]
    stored, order = (shape[0], *shape[2:], n), (0, len(shape) - 1, *range(1, len(shape) - 1))
    assert call is not None

    def run(*t: Any) -> torch.Tensor:
        rows = rows_of(t[x]) if image else t[x].reshape(-1, k)
        weight = t[w].reshape(n, k).t()
        out = torch.mm(rows, weight) if b is None else call(t[b], rows, weight)
        return out.view(stored).permute(order) if image else out.view(shape)

    return Kernel(under(ctx.policy, run))


# ---- 16-bit products that are cast to float32: the float32 sums are written without rounding


def _refuse_wide(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("matmul", "cast"), "is not a product that is cast, and nothing else")
    product, cast = region.nodes
    types = region.graph.types
    a, b, made = (types[v] for v in (*product.uses, cast.output))
    short = a.dtype.short in TENSOR_CORE and a.dtype == b.dtype and made.dtype.short == "f32"
    refuse_if(not short, "is not of two factors of 16 bits in float32")
    refuse_if(a.rank != 2 or b.rank != 2 or 0 in (a.numel, b.numel), "is not of two full matrices")
    refuse_if(product.output in region.outputs, "the product is read in 16 bits, too")


def _build_wide(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    a, b = (place(region, v) for v in region.nodes[0].uses)

    def run(*t: Any) -> torch.Tensor:
        return torch.mm(t[a], t[b], out_dtype=torch.float32)

    return Kernel(under(ctx.policy, run))


def _wide_seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The seconds of the product alone."""
    alone = region.graph.subgraph("product", region.nodes[:1])
    return separate_seconds(Region(alone), target)


# ---- attention backends

# the name of a backend in knobs → its name in torch; those for tensor cores first
BACKENDS = {"flash": "FLASH_ATTENTION", "cudnn": "CUDNN_ATTENTION"}
BACKENDS |= {"efficient": "EFFICIENT_ATTENTION", "math": "MATH"}


def _sdpa_knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    node = region.nodes[0]
    q = region.graph.types[node.inputs[0] or ""]
    masked = len(node.uses) > 3 or node.attrs["window"] is not None
    if q.dtype.short not in TENSOR_CORE:
        return ({"backend": "efficient"}, {"backend": "math"})
    return tuple({"backend": b} for b in BACKENDS if not (masked and b == "flash"))


def _build_sdpa(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = getattr(SDPBackend, BACKENDS[knobs["backend"]])
    (q, k, v), bias, given, (heads, of_keys) = shared.attended(region)
    # "efficient" does not support query heads that share keys, so keys and values are repeated
    repeat = heads // of_keys if knobs["backend"] == "efficient" else 1
    grouped = heads != of_keys and repeat == 1
    call: Any = partial(scaled_dot_product_attention, enable_gqa=grouped, **given)
    node, mask = region.nodes[0], None
    if node.attrs["window"] is not None:
        queries, keys = (region.graph.types[u].shape[2] for u in node.uses[:2])
        mask = window_mask(queries, keys, node.attrs).to(ctx.device)
        call = partial(call, is_causal=False)

    def run(*t: Any) -> Any:
        key, value = t[k], t[v]
        if repeat > 1:
            key, value = (u.repeat_interleave(repeat, 1) for u in (key, value))
        with sdpa_kernel(backend):
            return call(t[q], key, value, attn_mask=mask if bias is None else t[bias])

    return Kernel(under(ctx.policy, run))


def _refuse_sdpa(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("attention",), "is not an attention alone")
    node = region.nodes[0]
    window = node.attrs["window"] is not None and is_plain(node, "window") and len(node.uses) == 3
    shared.refuse_attention(region, target, policy, window)


def _sdpa_seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The call computes all scores, even those that a window hides."""
    node = region.nodes[0]
    if node.attrs["window"] is None:
        return fused_seconds(region, target)
    queries, keys = (region.graph.types[v].shape[-2] for v in node.uses[:2])
    return fused_seconds(region, target, queries * keys / seen_pairs(queries, keys, node.attrs))


# ---- attention that returns the log-sum-exp of each query, and its gradient


def _refuse_kept(region: Region, target: Target, policy: Policy) -> None:
    shared.refuse_kept(region, grouped=True)
    node, given = region.nodes[0], operands(region.nodes[0])
    q, k = (region.graph.types[given[name]] for name in "qk")
    refuse_if(q.dtype.short not in TENSOR_CORE, f"q is of {q.dtype.short}, not of 16 bits")
    features = q.shape[3]
    refuse_if(features % LANES > 0 or features > 256, f"heads of {features} features")
    square = q.shape[2] == k.shape[2] or not node.attrs["causal"]
    refuse_if(not square, "causal attention of queries and keys of different number")
    varies = "adds up the gradients of queries in an order that varies"
    refuse_if(policy.deterministic and node.op == KEPT[1], varies, "use another engine")


def _kept_knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    """We offer cuDNN's kernels on Hopper only, for lengths that are whole blocks of 64, with which
    they were seen to work."""
    given = operands(region.nodes[0])
    q, k = (region.graph.types[given[name]].shape for name in "qk")
    fast = target.has_warpgroups and q[3] <= 128 and q[2] % 64 == 0 == k[2] % 64
    return ({"backend": "cudnn"}, {"backend": "flash"}) if fast else ({"backend": "flash"},)


def _build_kept(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node, given = region.nodes[0], operands(region.nodes[0])
    wanted = [node.outputs.index(v) for v in region.outputs]
    causal, how = node.attrs["causal"], {"scale": node.attrs["scale"]}
    q, k, v = (place(region, given[name]) for name in "qkv")
    queries, keys = (region.graph.types[given[name]].shape[2] for name in "qk")
    seed = torch.zeros((), dtype=torch.int64, device=ctx.device)  # for dropout, which is off
    aten: Any = torch.ops.aten
    name = f"_scaled_dot_product_{knobs['backend']}_attention"
    call = getattr(aten, name if node.op == KEPT[0] else f"{name}_backward")
    by_cudnn = knobs["backend"] == "cudnn"
    if node.op == KEPT[0]:
        more = (None, True) if by_cudnn else ()

        def forward(*t: Any) -> Any:
            out, lse, *_ = call(t[q], t[k], t[v], *more, 0.0, causal, **how)
            return tuple((out, lse.view(lse.shape[:3]))[i] for i in wanted)

        return Kernel(under(ctx.policy, forward))
    grad, out, lse = (place(region, given[name]) for name in ("grad", "out", "lse"))

    def back(*t: Any) -> Any:
        sums = t[lse].unsqueeze(-1) if by_cudnn else t[lse]
        several = (None, None, queries, keys, 0.0, causal)
        rest = (seed, seed, None, *several) if by_cudnn else (*several, seed, seed)
        found = call(t[grad], t[q], t[k], t[v], t[out], sums, *rest, **how)
        return tuple(found[i] for i in wanted)

    return Kernel(under(ctx.policy, back))


def _kept_seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """As measured on an H200: attention reaches a part of the rate of products, its gradient a
    smaller part, and heads of fewer features still smaller ones. There FlashAttention 2 gets about
    half of what cuDNN's kernels get."""
    node = region.nodes[0]
    q = region.graph.types[operands(node)["q"]]
    memory, compute = times(region_cost(region), q.dtype.short, True, target)
    reached: float = (0.74 if node.op == KEPT[1] else 0.88) * min(1.0, q.shape[3] / 128) ** 0.5
    behind = knobs["backend"] == "flash" and target.has_warpgroups
    return max(compute / reached, memory / 0.8) * (1.8 if behind else 1.0) + target.launch


# ---- on rearranged data: the same mathematics in a shape that the library is good at

# ---- few input channels, padded with zeros


def _refuse_padded(region: Region, target: Target, policy: Policy) -> None:
    c = floats(region, CONV, constant=True)
    plain = c.act_name == "relu" and c.residual is None
    refuse_if(not plain, "cuDNN's fused call is convolution, bias, ReLU")
    image = c.x.dtype.bits == 16 and c.x.rank == 4 and c.x.is_layout("nhwc")
    refuse_if(not image, "only 16-bit nhwc images gain from padded channels")
    a, channels = c.anchor.attrs, c.x.shape[1]
    full = a["transposed"] or a["groups"] != 1 or channels % LANES == 0
    refuse_if(full, f"the input channels ({channels}) fill the tensor cores already")
    many = channels > LANES
    refuse_if(many, "padding more than one group of channels is not worth the copy")
    recipes.refuse_uneven(c)


def _build_padded(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
    x, (n, channels, height, width) = place(region, c.anchor.inputs[0]), c.x.shape
    extra, last = LANES - channels, torch.channels_last

    def padded(weight: torch.Tensor) -> torch.Tensor:
        return pad(weight, (0, 0, 0, 0, 0, extra)).contiguous(memory_format=last)

    wide = ctx.form(c.anchor.inputs[1], ("padded", LANES), padded)
    call = _fused_call(region, c, ctx.policy, not ctx.policy.deterministic)

    def run(*t: Any) -> Any:
        image = pad(t[x].permute(0, 2, 3, 1), (0, extra)).permute(0, 3, 1, 2)
        return call(image, wide, t)

    return Kernel(run, workspace=2 * n * LANES * height * width)


# ---- convolution as one large product, then a sum of shifted parts


def _refuse_taps(region: Region, target: Target, policy: Policy) -> None:
    c = floats(region, CONV, constant=True)
    shared.refuse_parts(c, "split into taps")
    refuse_if(c.x.dtype.bits != 16, "only 16-bit products are faster this way")
    shared.refuse_order(c.x, c.out)
    near = max(c.anchor.attrs["dilation"]) < 8 or live_fraction(c) > 0.9
    refuse_if(near, "the library is good at small dilations")


def _build_taps(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    """One product [pixels, C] × [C, taps·K], then each tap's part added where it belongs."""
    c = chain(region, CONV)
    k, channels, rows, columns = c.weight.shape

    def product(weight: torch.Tensor) -> torch.Tensor:
        return weight.permute(1, 2, 3, 0).reshape(channels, rows * columns * k).contiguous()

    matrix = ctx.form(c.anchor.inputs[1], "taps side by side", product)
    (n, _, height, width), (_, _, oh, ow) = c.x.shape, c.out.shape
    parts = [(i * columns + j, to, of) for i, j, to, of in shared.taps(c)]
    parts.sort(key=lambda part: [s.start - s.stop for s in part[1]])
    whole = parts[0][1] == (slice(0, oh), slice(0, ow))
    x = place(region, c.anchor.inputs[0])
    b, z = place_or_none(region, c.bias), place_or_none(region, c.residual)
    act = recipes.activate(c.act)
    wide = bool(knobs["wide"])  # sum in float32

    def run(*t: Any) -> torch.Tensor:
        found = torch.mm(rows_of(t[x]), matrix).view(n, height, width, rows * columns, k)
        kind = torch.float32 if wide else found.dtype
        if whole:
            tap, _, of = parts[0]
            out = found[:, *of, tap].to(kind, copy=True, memory_format=torch.contiguous_format)
        else:
            out = torch.zeros((n, oh, ow, k), dtype=kind, device=found.device)
        for tap, to, of in parts[whole:]:
            out[:, *to] += found[:, *of, tap]
        if b is not None:
            out += t[b]
        image = out.to(found.dtype).permute(0, 3, 1, 2)
        if z is not None:
            image += t[z]
        return image if act is None else act(image)

    return Kernel(run, workspace=2 * n * height * width * rows * columns * k)


# ---- resizing plane by plane


def _refuse_planar(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("resize",), "is not a resize alone")
    x = region.graph.types[region.inputs[0]]
    odd = x.rank != 4 or x.layout != "nhwc" or x.numel == 0
    refuse_if(odd, "the image is not in nhwc, so there is nothing to rearrange")


def _build_planar(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node = region.nodes[0]
    reference, attrs = table.get("resize").reference, dict(node.attrs)
    out = region.graph.types[region.outputs[0]]

    def run(x: torch.Tensor, result: torch.Tensor) -> None:
        result.copy_(reference(x.contiguous(), **attrs))

    return Kernel(run, writes=True, workspace=out.nbytes)


TAPS_WIDE = ({"wide": False}, {"wide": True})
PADDED_S = library(0.5, lambda region, target: target.launch)
TAPS_S = library(0.6, lambda region, target: 12 * target.launch)
_gpu = partial(Recipe, kind="cuda")
RECIPES = (
    _gpu("cudnn", CONV, _refuse_cudnn, build_cudnn, _cudnn_knobs, build_s=SEARCH_S),
    _gpu("cudnn_search", CONV, _refuse_conv, _build_conv, build_s=SEARCH_S),
    _gpu("cudnn_grads", GRADIENTS, _refuse_grads, _build_grads, build_s=SEARCH_S),
    _gpu("cublaslt", PRODUCTS, _refuse_lt, _build_lt),
    _gpu("wide", ("matmul",), _refuse_wide, _build_wide, seconds=_wide_seconds),
    _gpu("sdpa", ATTENTION, _refuse_sdpa, _build_sdpa, _sdpa_knobs, _sdpa_seconds),
    _gpu("kept", KEPT, _refuse_kept, _build_kept, _kept_knobs, _kept_seconds),
    _gpu("cudnn_padded", CONV, _refuse_padded, _build_padded, seconds=PADDED_S),
    _gpu("taps", CONV, _refuse_taps, _build_taps, lambda *_: TAPS_WIDE, TAPS_S),
    _gpu("planar", ("resize",), _refuse_planar, _build_planar, seconds=library(0.65)),
    *SCALED,
)
