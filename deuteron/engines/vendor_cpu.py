"""Vendor calls on the CPU: packed oneDNN, and plain matrix products where they are enough."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import Chain
from deuteron.engines.recipes import (
    Recipe,
    activate,
    fits,
    is_pointwise_conv,
    library,
    maybe,
    must_chain,
    place,
    rows_of,
)
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

# our activation → oneDNN's post-op: (name, scalars, algorithm)
POST_OPS: dict[str, Callable[[Node], tuple[str, list[float], str] | None]] = {
    "relu": lambda n: ("relu", [], ""),
    "sigmoid": lambda n: ("sigmoid", [], ""),
    "tanh": lambda n: ("tanh", [], ""),
    "hardswish": lambda n: ("hardswish", [], ""),
    "hardsigmoid": lambda n: ("hardsigmoid", [], ""),
    "silu": lambda n: ("swish", [], ""),
    "gelu": lambda n: ("gelu", [], n.attrs["approximate"]),
    "leaky_relu": lambda n: ("leaky_relu", [n.attrs["negative_slope"]], ""),
    "clamp": lambda n: (
        None
        if n.attrs["min"] is None or n.attrs["max"] is None
        else ("hardtanh", [n.attrs["min"], n.attrs["max"]], "")
    ),
}


def _cpu_float(target: Target, c: Chain) -> Refusal | None:
    if target.is_cuda:
        return Refusal("is a CPU call")
    if c.x.dtype.short != "f32" or c.weight.dtype.short != "f32":
        return Refusal(f"element type {c.x.dtype.short}, not f32", "cast to float32")
    if c.out.numel == 0 or c.x.numel == 0:
        return Refusal("the tensors are empty")
    return None


def _post_op(c: Chain) -> tuple[str, list[float], str] | None:
    if c.act is None:
        return "none", [], ""
    make = POST_OPS.get(c.act.op)
    return make(c.act) if make is not None else None


# ---- oneDNN convolution with packed weights


def _refuse_packed(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = fits(region, ("conv",))
    if isinstance(c, Refusal):
        return c
    wrong = _cpu_float(target, c)
    if wrong is not None:
        return wrong
    if not torch.backends.mkldnn.is_available():
        return Refusal("this torch was built without oneDNN")
    if c.anchor.attrs["transposed"] or c.x.rank != 4:
        return Refusal("only plain 2-D convolutions can be packed")
    if not (c.x.is_layout("nhwc") and c.out.is_layout("nhwc")):
        return Refusal("the tensors are not in nhwc", "use Policy(layout='auto')")
    if _post_op(c) is None:
        return Refusal(f"oneDNN has no post-op for {c.act_name}")
    if c.residual is not None and c.act_name not in ("none", "relu"):
        return Refusal(f"oneDNN cannot add and then apply {c.act_name}")
    if c.residual is not None and not region.graph.types[c.residual].is_layout("nhwc"):
        return Refusal("the residual is not in nhwc")
    if c.residual is not None and c.out.is_layout("contiguous"):  # oneDNN refuses it on x86-64
        return Refusal("oneDNN cannot add images of one channel or one pixel everywhere")
    return None


def _build_packed(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = must_chain(region, ("conv",))
    a = c.anchor.attrs
    where = (list(a["padding"]), list(a["stride"]), list(a["dilation"]), a["groups"])
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        weight.contiguous(memory_format=torch.channels_last), *where, list(c.x.shape)
    )
    bias = None if c.bias is None else ctx.constants[c.bias]
    x, z = place(region, c.anchor.inputs[0]), maybe(region, c.residual)
    if z is None:
        post = _post_op(c)
        assert post is not None
        attr, scalars, algorithm = post
        conv = torch.ops.mkldnn._convolution_pointwise.default
        return Kernel(lambda *t: conv(t[x], packed, bias, *where, attr, scalars, algorithm))
    add = torch.ops.mkldnn._convolution_pointwise.binary
    unary = "relu" if c.act is not None else None
    return Kernel(lambda *t: add(t[x], t[z], packed, bias, *where, "add", 1.0, unary, [], None))


def _packed_penalty(region: Region, target: Target) -> float:
    c = must_chain(region, ("conv",))
    slow = {"gelu": 3.0, "silu": 2.0}.get(c.act_name, 1.0)
    depthwise = 2.5 if c.anchor.attrs["groups"] > 1 else 0.8
    return slow * depthwise


# ---- 1×1 convolution and linear as one matrix product


def _refuse_gemm(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = fits(region, ("conv", "linear"))
    if isinstance(c, Refusal):
        return c
    wrong = _cpu_float(target, c)
    if wrong is not None:
        return wrong
    if c.anchor.op == "conv":
        wrong = is_pointwise_conv(c)
        if wrong is None and not c.out.is_layout("nhwc"):
            wrong = Refusal("the result is not in nhwc")
        return wrong
    if not (c.x.is_layout("contiguous") and c.out.is_layout("contiguous")):
        return Refusal("the rows are not contiguous")
    return None


def _gemm_penalty(region: Region, target: Target) -> float:
    """Better than the convolution of the library, less so for short sums; for ``linear`` it is
    what the library does."""
    if region.ops[0] != "conv":
        return 1.0
    return 0.75 * (1.0 + 10.0 / must_chain(region, ("conv",)).weight.shape[1])


def _build_gemm(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = must_chain(region, ("conv", "linear"))
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    k, n = weight.shape[1], weight.shape[0]
    transposed = weight.reshape(n, k).t().contiguous()
    bias = None if c.bias is None else ctx.constants[c.bias]
    x, z = place(region, c.anchor.inputs[0]), maybe(region, c.residual)
    act = activate(c.act)
    stride = c.anchor.attrs["stride"] if c.anchor.op == "conv" else ()
    skip = any(s != 1 for s in stride)
    image = c.anchor.op == "conv"

    def rows(t: torch.Tensor) -> torch.Tensor:
        return rows_of(t) if image else t.reshape(-1, t.shape[-1])

    def run(*t: Any) -> None:
        out = rows(t[-1])
        source = t[x]
        if skip:
            source = source[(slice(None), slice(None), *(slice(None, None, s) for s in stride))]
        if bias is not None:
            torch.addmm(bias, rows(source), transposed, out=out)
        else:
            torch.mm(rows(source), transposed, out=out)
        if z is not None:
            out.add_(rows(t[z]))
        if act is not None:
            act(out)

    return Kernel(run, writes=True)


# ---- dilated convolution as shifted products, taps in the padding left out


def _refuse_shifted(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = fits(region, ("conv",))
    if isinstance(c, Refusal):
        return c
    wrong = _cpu_float(target, c)
    if wrong is not None:
        return wrong
    a = c.anchor.attrs
    if a["transposed"] or a["groups"] != 1 or c.x.rank != 4 or any(s != 1 for s in a["stride"]):
        return Refusal("only plain 2-D convolutions of stride 1 can be split into shifts")
    if not (c.x.is_layout("nhwc") and c.out.is_layout("nhwc")):
        return Refusal("the tensors are not in nhwc", "use Policy(layout='auto')")
    if live_fraction(c) > 0.95:
        return Refusal("no tap falls into the padding often enough to be worth skipping")
    return None


def live_fraction(c: Chain) -> float:
    """The part of the kernel's taps that read pixels rather than padding."""
    part = 1.0
    for size, out, k, pad, step in zip(
        c.x.shape[2:],
        c.out.shape[2:],
        c.weight.shape[2:],
        c.anchor.attrs["padding"],
        c.anchor.attrs["dilation"],
        strict=True,
    ):
        live = sum(len(reach(size, out, t * step - pad)) for t in range(k))
        part *= live / max(k * out, 1)
    return part


def reach(size: int, out: int, shift: int) -> range:
    """Output positions whose source ``position + shift`` lies inside the image."""
    return range(max(0, -shift), max(0, -shift, min(out, size - shift)))


def _build_shifted(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = must_chain(region, ("conv",))
    a = c.anchor.attrs
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    bias = None if c.bias is None else ctx.constants[c.bias]
    (height, width), (oh, ow) = c.x.shape[2:], c.out.shape[2:]
    taps = []
    for i in range(weight.shape[2]):
        for j in range(weight.shape[3]):
            dy = i * a["dilation"][0] - a["padding"][0]
            dx = j * a["dilation"][1] - a["padding"][1]
            ys, xs = reach(height, oh, dy), reach(width, ow, dx)
            if len(ys) and len(xs):
                matrix = weight[:, :, i, j].t().contiguous()
                taps.append(
                    (
                        slice(ys.start, ys.stop),
                        slice(ys.start + dy, ys.stop + dy),
                        slice(xs.start, xs.stop),
                        slice(xs.start + dx, xs.stop + dx),
                        matrix,
                    )
                )
    x, z = place(region, c.anchor.inputs[0]), maybe(region, c.residual)
    act = activate(c.act)
    channels, k = c.x.shape[1], c.out.shape[1]

    def run(*t: Any) -> None:
        source, out = t[x].permute(0, 2, 3, 1), t[-1].permute(0, 2, 3, 1)
        if bias is not None:
            out.copy_(bias.expand(out.shape))
        else:
            out.zero_()
        for oy, sy, ox, sx, matrix in taps:
            pixels = source[:, sy, sx]
            product = torch.mm(pixels.reshape(-1, channels), matrix)
            out[:, oy, ox] += product.view(*pixels.shape[:3], k)
        if z is not None:
            t[-1].add_(t[z])
        if act is not None:
            act(t[-1])

    scratch = 4 * c.x.numel + 4 * c.out.numel
    return Kernel(run, writes=True, workspace=scratch)


# ---- attention


def _refuse_sdpa(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if target.is_cuda:
        return Refusal("is a CPU call")
    return refuse_attention(region)


def refuse_attention(region: Region) -> Refusal | None:
    """What torch's own attention call cannot do, on any device."""
    if region.ops != ("attention",):
        return Refusal("is not an attention alone")
    node = region.nodes[0]
    bias = node.inputs[3] if len(node.inputs) > 3 else None
    if bias is not None and node.attrs["causal"]:
        return Refusal("torch takes a mask or causal, not both", "put the causal part in the mask")
    types = region.graph.types
    if bias is not None and bias not in region.inputs:
        return Refusal("the mask is a single number", "leave it out, or expand it")
    q = types[node.inputs[0] or ""]
    if q.rank != 4:
        return Refusal(f"rank {q.rank}, not 4", "add a batch dimension")
    if q.numel == 0:
        return Refusal("the tensors are empty")
    if bias is not None and types[bias].rank < 2:
        return Refusal("the bias has less than two dimensions", "reshape it to [queries, keys]")
    if bias is not None and types[bias].dtype.kind != "bool" and types[bias].dtype != q.dtype:
        return Refusal("the bias has another element type than q", "cast it")
    return None


def _build_sdpa(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node = region.nodes[0]
    types = region.graph.types
    q, k, v = (place(region, value) for value in node.inputs[:3])
    bias = maybe(region, (*node.inputs, None)[3])
    grouped = types[node.inputs[0] or ""].shape[1] != types[node.inputs[1] or ""].shape[1]
    scale, causal = node.attrs["scale"], node.attrs["causal"]
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def run(*t: Any) -> torch.Tensor:
        mask = None if bias is None else t[bias]
        return sdpa(
            t[q], t[k], t[v], attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )

    return Kernel(run)


def _shifted_penalty(region: Region, target: Target) -> float:
    return 0.8 * live_fraction(must_chain(region, ("conv",)))


def _shifted_overhead(region: Region, target: Target) -> float:
    """Three calls a tap: gather the pixels, multiply, add to the result."""
    k = must_chain(region, ("conv",)).weight.shape
    return 3 * k[2] * k[3] * 8 * target.call


CONV, PRODUCTS, ATTENTION = ("conv",), ("conv", "linear", "matmul"), ("attention",)
PACKED_S = library(_packed_penalty, 1e-4)  # oneDNN looks its primitive up at every call
GEMM_S, SHIFTED_S = library(_gemm_penalty, 1e-5), library(_shifted_penalty, _shifted_overhead)
RECIPES = (
    Recipe("onednn_packed", CONV, _refuse_packed, _build_packed, seconds=PACKED_S),
    Recipe("gemm", PRODUCTS, _refuse_gemm, _build_gemm, seconds=GEMM_S),
    Recipe("shifted_gemm", CONV, _refuse_shifted, _build_shifted, seconds=SHIFTED_S),
    Recipe("sdpa", ATTENTION, _refuse_sdpa, _build_sdpa),
)
