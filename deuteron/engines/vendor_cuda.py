"""Vendor calls on NVIDIA GPUs: cuDNN's fused convolutions, cuBLASLt's epilogues, SDPA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import Chain, chain
from deuteron.engines.numerics import numerics, under
from deuteron.engines.recipes import (
    Recipe,
    image_of,
    is_pointwise_conv,
    maybe,
    must_chain,
    place,
    rows_of,
)
from deuteron.engines.vendor_cpu import refuse_attention
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

TENSOR_CORE = ("f16", "bf16")


def on_gpu(region: Region, target: Target, anchors: tuple[str, ...]) -> Chain | Refusal:
    if not target.is_cuda:
        return Refusal("is a GPU call")
    c = chain(region, anchors)
    if isinstance(c, Refusal):
        return c
    if c.out.numel == 0 or c.x.numel == 0:
        return Refusal("the tensors are empty")
    if not c.x.dtype.is_float or c.x.dtype.short not in ("f16", "bf16", "f32"):
        return Refusal(f"element type {c.x.dtype.short}", "use f16, bf16 or f32")
    return c


# ---- cuDNN convolution + bias (+ residual) + ReLU


def _refuse_cudnn(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = on_gpu(region, target, ("conv",))
    if isinstance(c, Refusal):
        return c
    if c.act_name != "relu":
        return Refusal(f"cuDNN's fused call ends in ReLU, not in {c.act_name}")
    if c.anchor.attrs["transposed"] or c.x.rank not in (4, 5):
        return Refusal("only plain 2-D and 3-D convolutions have a fused call")
    if c.residual is not None and not region.graph.types[c.residual].is_layout(c.out.layout):
        return Refusal("the residual lies in another memory order than the result")
    return None


def build_cudnn(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = must_chain(region, ("conv",))
    a = c.anchor.attrs
    where = (a["stride"], a["padding"], a["dilation"], a["groups"])
    x, w = (place(region, v) for v in c.anchor.inputs[:2])
    b, z = maybe(region, c.bias), maybe(region, c.residual)
    benchmark, policy = bool(knobs["benchmark"]), ctx.policy

    def run(*t: Any) -> torch.Tensor:
        bias = None if b is None else t[b]
        with numerics(policy, benchmark):
            if z is None:
                return torch.cudnn_convolution_relu(t[x], t[w], bias, *where)
            return torch.cudnn_convolution_add_relu(t[x], t[w], t[z], 1.0, bias, *where)

    return Kernel(run)


def _cudnn_knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    # cuDNN's search may settle on another algorithm in another process: other last bits
    return ({"benchmark": not policy.deterministic},)


# ---- plain cuDNN convolution, algorithm searched


def _refuse_conv(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = on_gpu(region, target, ("conv",))
    if isinstance(c, Refusal):
        return c
    if len(region.nodes) > 1:
        return Refusal("more than the convolution")
    if policy.deterministic:
        return Refusal("a searched algorithm may differ from one process to the next")
    return None


def _build_conv(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node = region.nodes[0]
    a = node.attrs
    x, w = (place(region, v) for v in node.inputs[:2])
    b = maybe(region, (*node.inputs, None)[2])
    policy = ctx.policy

    def run(*t: Any) -> torch.Tensor:
        with numerics(policy, benchmark=True):
            return torch.convolution(
                t[x],
                t[w],
                None if b is None else t[b],
                a["stride"],
                a["padding"],
                a["dilation"],
                a["transposed"],
                a["output_padding"],
                a["groups"],
            )

    return Kernel(run)


# ---- cuBLASLt: matrix product with bias and activation in the epilogue


def _lt_act(c: Chain) -> Callable[..., torch.Tensor] | None:
    """The fused call for this epilogue, over (bias, rows, weight): None if there is none."""
    if c.act is None:
        return torch.addmm
    if c.act.op == "relu":
        return torch._addmm_activation
    if c.act.op == "gelu" and c.act.attrs["approximate"] == "tanh":
        return lambda b, x, w: torch._addmm_activation(b, x, w, use_gelu=True)
    return None


def _refuse_lt(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = on_gpu(region, target, ("conv", "linear"))
    if isinstance(c, Refusal):
        return c
    if c.x.dtype.short == "f32" and not policy.allow_tf32 and c.act is not None:
        return Refusal("float32 epilogues run as separate kernels", "Policy(allow_tf32=True)")
    if c.bias is None and c.act is not None:
        return Refusal("cuBLASLt's activations come with a bias", "give the product a bias")
    if c.residual is not None:
        return Refusal("cuBLASLt's epilogue has no residual beside a bias")
    if _lt_act(c) is None:
        return Refusal(
            f"cuBLASLt has no epilogue for {c.act_name}",
            "gelu(approximate='tanh') and relu have one" if c.act_name == "gelu" else "",
        )
    if c.anchor.op == "conv":
        wrong = is_pointwise_conv(c)
        if wrong is not None:
            return wrong
        if any(s != 1 for s in c.anchor.attrs["stride"]):
            return Refusal("a strided 1×1 convolution reads every second pixel")
        if not c.out.is_layout("nhwc"):
            return Refusal("the result is not in nhwc")
    elif not c.x.is_layout("contiguous"):
        return Refusal("the rows are not contiguous")
    return None


def _build_lt(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = must_chain(region, ("conv", "linear"))
    x, w = (place(region, v) for v in c.anchor.inputs[:2])
    b = maybe(region, c.bias)
    call, shape, image = _lt_act(c), c.out.shape, c.anchor.op == "conv"
    n, k = c.weight.shape[0], c.weight.shape[1]
    assert call is not None

    def run(*t: Any) -> torch.Tensor:
        rows = rows_of(t[x]) if image else t[x].reshape(-1, k)
        weight = t[w].reshape(n, k).t()
        out = torch.mm(rows, weight) if b is None else call(t[b], rows, weight)
        return image_of(out, shape) if image else out.view(shape)

    return Kernel(under(ctx.policy, run))


# ---- attention backends

_BACKENDS = ("flash", "cudnn", "efficient")


def _refuse_sdpa(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if not target.is_cuda:
        return Refusal("is a GPU call")
    return refuse_attention(region)


def _sdpa_knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    node = region.nodes[0]
    q = region.graph.types[node.inputs[0] or ""]
    masked = len(node.inputs) > 3 and node.inputs[3] is not None
    if q.dtype.short not in TENSOR_CORE:
        return ({"backend": "efficient"}, {"backend": "math"})
    names = [b for b in _BACKENDS if not (masked and b == "flash")]
    return tuple({"backend": b} for b in (*names, "math"))


def _build_sdpa(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    node = region.nodes[0]
    types = region.graph.types
    backend = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "math": SDPBackend.MATH,
    }[knobs["backend"]]
    q, k, v = (place(region, value) for value in node.inputs[:3])
    bias = maybe(region, (*node.inputs, None)[3])
    heads, kv = (types[node.inputs[i] or ""].shape[1] for i in (0, 1))
    scale, causal, grouped = node.attrs["scale"], node.attrs["causal"], heads != kv
    repeat = heads // kv if grouped and knobs["backend"] == "efficient" else 1
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def run(*t: Any) -> torch.Tensor:
        key, value = t[k], t[v]
        if repeat > 1:  # this backend knows no grouped heads
            key, value = (u.repeat_interleave(repeat, 1) for u in (key, value))
        with sdpa_kernel(backend):
            return sdpa(
                t[q],
                key,
                value,
                attn_mask=None if bias is None else t[bias],
                is_causal=causal,
                scale=scale,
                enable_gqa=grouped and repeat == 1,
            )

    return Kernel(under(ctx.policy, run))


CONV, PRODUCTS, ATTENTION = ("conv",), ("conv", "linear", "matmul"), ("attention",)
RECIPES = (
    Recipe("cudnn", CONV, _refuse_cudnn, build_cudnn, _cudnn_knobs, build_s=0.3),
    Recipe("cudnn_search", CONV, _refuse_conv, _build_conv, build_s=0.3),
    Recipe("cublaslt", PRODUCTS, _refuse_lt, _build_lt),
    Recipe("sdpa", ATTENTION, _refuse_sdpa, _build_sdpa, _sdpa_knobs),
)
