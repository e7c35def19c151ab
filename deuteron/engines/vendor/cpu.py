"""Vendor calls on the CPU: packed oneDNN, and plain matrix products where they are enough."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from deuteron.engines import recipes
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import Chain, chain, live_fraction, only_node, operands, reach
from deuteron.engines.recipes import (
    Recipe,
    library,
    place,
    place_or_none,
    refuse_uneven,
    required_chain,
    rows_of,
)
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.attention import attention, is_plain
from deuteron.policy import Policy
from deuteron.target import Target

CONV, PRODUCTS, ATTENTION = ("conv",), ("conv", "linear", "matmul"), ("attention",)
FILTERS = ("conv_dw",)
KEPT = ("attention_lse", "attention_grad")
aten = torch.ops.aten

# the name of our activation → that of oneDNN's post-op
POST_OPS = {"silu": "swish", "clamp": "hardtanh"}
POST_OPS |= {n: n for n in "relu sigmoid tanh hardswish hardsigmoid gelu leaky_relu".split()}


def _single(region: Region, anchors: tuple[str, ...]) -> Chain:
    """The region as a chain in float32 with constant parameters; refuses any other."""
    c = required_chain(region, anchors)
    wide = {c.x.dtype.short, c.weight.dtype.short} == {"f32"}
    refuse_if(not wide, f"element type {c.x.dtype.short}, not f32", "cast to float32")
    refuse_if(c.out.numel == 0 or c.x.numel == 0, "the tensors are empty")
    return c


def refuse_order(*images: TensorType) -> None:
    apart = not all(t.is_layout("nhwc") for t in images)
    refuse_if(apart, "the tensors are not in nhwc", "use Policy(layout='auto')")


def _post_op(c: Chain) -> tuple[str, list[float], str] | None:
    if c.act is None:
        return "none", [], ""
    a = c.act.attrs
    scalars = [a[k] for k in ("negative_slope", "min", "max") if k in a]
    if c.act.op not in POST_OPS or None in scalars:
        return None
    return POST_OPS[c.act.op], scalars, a.get("approximate", "")


# ---- oneDNN convolution with packed weights


def _refuse_packed(region: Region, target: Target, policy: Policy) -> None:
    c = _single(region, CONV)
    built = torch.backends.mkldnn.is_available()
    refuse_if(not built, "this torch was built without oneDNN")
    odd = c.anchor.attrs["transposed"] or c.x.rank != 4
    refuse_if(odd, "only plain 2-D convolutions can be packed")
    refuse_uneven(c)
    refuse_order(c.x, c.out)
    refuse_if(_post_op(c) is None, f"oneDNN has no post-op for {c.act_name}")
    if c.residual is not None:
        late = c.act_name not in ("none", "relu")
        refuse_if(late, f"oneDNN cannot add and then apply {c.act_name}")
        last = region.graph.types[c.residual].is_layout("nhwc")
        refuse_if(not last, "the residual is not in nhwc")
        one = c.out.is_layout("contiguous")  # oneDNN refuses it on x86-64
        refuse_if(one, "oneDNN cannot add images of one channel or one pixel everywhere")


def _build_packed(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
    a = c.anchor.attrs
    where = (list(a["padding"]), list(a["stride"]), list(a["dilation"]), a["groups"])
    packed = ctx.form(
        c.anchor.inputs[1],
        ("onednn", *map(str, where), c.x.shape),
        lambda weight: torch.ops.mkldnn._reorder_convolution_weight(
            weight.contiguous(memory_format=torch.channels_last), *where, list(c.x.shape)
        ),
    )
    bias = None if c.bias is None else ctx.constants[c.bias]
    x, z = place(region, c.anchor.inputs[0]), place_or_none(region, c.residual)
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
    c = chain(region, CONV)
    slow = {"gelu": 3.0, "silu": 2.0}.get(c.act_name, 1.0)
    groups = c.anchor.attrs["groups"]
    if groups == 1:
        return 0.8 * slow
    each, filters = c.x.shape[1] / groups, c.weight.shape[0] / groups
    return slow * (2.5 if each == filters == 1 else max(2.5, min(18.0, 90 / each)))


# ---- 1×1 convolution and linear as one matrix product


def _refuse_gemm(region: Region, target: Target, policy: Policy) -> None:
    c = _single(region, ("conv", "linear"))
    if c.anchor.op == "conv":
        recipes.refuse_windows(c)
        refuse_if(not c.out.is_layout("nhwc"), "the result is not in nhwc")
    else:
        dense = c.x.is_layout("contiguous") and c.out.is_layout("contiguous")
        refuse_if(not dense, "the rows are not contiguous")


def _gemm_penalty(region: Region, target: Target) -> float:
    """Faster than the library's convolution, but less so with few channels to sum over; for
    ``linear`` it is the same call that the library makes."""
    if region.ops[0] != "conv":
        return 1.0
    return 0.75 * (1.0 + 10.0 / chain(region, CONV).weight.shape[1])


def _build_gemm(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, ("conv", "linear"))
    transposed = ctx.form(
        c.anchor.inputs[1], "transposed", lambda weight: weight.flatten(1).t().contiguous()
    )
    bias = None if c.bias is None else ctx.constants[c.bias]
    x, z = place(region, c.anchor.inputs[0]), place_or_none(region, c.residual)
    act = recipes.activate(c.act)
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


# ---- the gradient of the weight of a 1×1 convolution as one matrix product


def _refuse_pixels(region: Region, target: Target, policy: Policy) -> None:
    node, types = only_node(region, dict.fromkeys(FILTERS)), region.graph.types
    a, out = node.attrs, types[node.output]
    images = [types[v] for v in node.uses]
    plain = {*a["stride"], *out.shape[2:], a["groups"]} == {1} and not any(a["padding"])
    refuse_if(not plain or a["transposed"], "is no product of pixels by pixels")
    refuse_if(out.dtype.short != "f32", f"element type {out.dtype.short}, not f32")
    refuse_if(not all(t.numel for t in images), "the tensors are empty")
    refuse_order(*images)


def _build_pixels(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    grad, x = (place(region, v) for v in region.nodes[0].uses)

    def run(*t: Any) -> None:
        torch.mm(rows_of(t[grad]).t(), rows_of(t[x]), out=t[-1].flatten(1))

    return Kernel(run, writes=True)


# ---- dilated convolution as shifted products, taps in the padding left out


def refuse_parts(c: Chain, into: str) -> None:
    """Refuse convolutions that are not a sum of products with shifted images."""
    a = c.anchor.attrs
    odd = a["transposed"] or a["groups"] != 1 or c.x.rank != 4 or any(s != 1 for s in a["stride"])
    refuse_if(odd, f"only plain 2-D convolutions of stride 1 {into}")


def _refuse_shifted(region: Region, target: Target, policy: Policy) -> None:
    c = _single(region, CONV)
    refuse_parts(c, "can be split into shifts")
    refuse_order(c.x, c.out)
    live = live_fraction(c)
    refuse_if(live > 0.95, "no tap falls into the padding often enough to be worth skipping")


Pixels = tuple[slice, slice]  # rows and columns


def taps(c: Chain) -> Iterator[tuple[int, int, Pixels, Pixels]]:
    """For each tap of a 2-D convolution that reads any pixels: its row and column, the pixels of
    the result that it adds to, and the pixels of the image that it reads."""
    rows, columns = c.weight.shape[2:]
    for tap in product(range(rows), range(columns)):
        found = [reach(c, d, t) for d, t in enumerate(tap)]
        if all(inside for inside, _ in found):
            to = [slice(inside.start, inside.stop) for inside, _ in found]
            of = [slice(inside.start + by, inside.stop + by) for inside, by in found]
            yield *tap, (to[0], to[1]), (of[0], of[1])


def _live(region: Region, knobs: Mapping[str, Any]) -> float:
    """The share of operations that is left, as taps in the padding are skipped."""
    return live_fraction(chain(region, CONV))


def _build_shifted(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
    bias = None if c.bias is None else ctx.constants[c.bias]
    matrices = ctx.form(
        c.anchor.inputs[1], "taps", lambda weight: weight.permute(2, 3, 1, 0).contiguous()
    )
    parts = [(matrices[i, j], to, of) for i, j, to, of in taps(c)]
    x, z = place(region, c.anchor.inputs[0]), place_or_none(region, c.residual)
    act = recipes.activate(c.act)
    channels, k = c.x.shape[1], c.out.shape[1]

    def run(*t: Any) -> None:
        source, out = t[x].permute(0, 2, 3, 1), t[-1].permute(0, 2, 3, 1)
        out[:] = 0.0 if bias is None else bias
        for matrix, to, of in parts:
            pixels = source[:, *of]
            shifted = torch.mm(pixels.reshape(-1, channels), matrix)
            out[:, *to] += shifted.view(*pixels.shape[:3], k)
        if z is not None:
            t[-1].add_(t[z])
        if act is not None:
            act(t[-1])

    scratch = 4 * c.x.numel + 4 * c.out.numel
    return Kernel(run, writes=True, workspace=scratch)


# ---- attention


def refuse_attention(region: Region, target: Target, policy: Policy, window: bool = False) -> None:
    """Refuse attention that torch's own call cannot do on any device. With ``window`` a window is
    allowed, because the caller makes a mask of it."""
    refuse_if(region.ops != ("attention",), "is not an attention alone")
    node, types = region.nodes[0], region.graph.types
    more = not window and not is_plain(node)
    refuse_if(more, "torch's call has no window, soft cap, slopes or seed")
    bias, q = (*node.inputs, None)[3], types[node.uses[0]]
    both = bias is not None and node.attrs["causal"]
    refuse_if(both, "torch takes a mask or causal, not both", "put the causal part in the mask")
    single = bias is not None and bias not in region.inputs
    refuse_if(single, "the mask is a single number", "leave it out, or expand it")
    refuse_if(q.rank != 4, f"rank {q.rank}, not 4", "add a batch dimension")
    refuse_if(q.numel == 0, "the tensors are empty")
    if bias is not None:
        low, kind = types[bias].rank < 2, types[bias].dtype
        refuse_if(low, "the bias has less than two dimensions", "reshape it to [queries, keys]")
        odd = kind.kind != "bool" and kind != q.dtype
        refuse_if(odd, "the bias has another element type than q", "cast it")


def attended(region: Region) -> tuple[list[int], int | None, dict[str, Any], tuple[int, int]]:
    """The positions of q, k and v among the kernel's arguments, that of the mask, the other
    arguments of torch's call, and how many heads q and k have."""
    node, types = region.nodes[0], region.graph.types
    places = [place(region, value) for value in node.inputs[:3]]
    heads, of_keys = (types[v].shape[1] for v in node.uses[:2])
    given = {"is_causal": node.attrs["causal"], "scale": node.attrs["scale"]}
    return places, place_or_none(region, (*node.inputs, None)[3]), given, (heads, of_keys)


def _build_sdpa(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    (q, k, v), bias, given, (heads, of_keys) = attended(region)
    call: Any = partial(scaled_dot_product_attention, enable_gqa=heads != of_keys, **given)
    return Kernel(lambda *t: call(t[q], t[k], t[v], attn_mask=None if bias is None else t[bias]))


PLAIN = {"q", "k", "v", "grad", "out", "lse"}


def refuse_kept(region: Region, grouped: bool = False) -> None:
    """Refuse what torch's calls cannot do that return the log-sum-exp of each query, or compute the
    gradient from it. ``grouped``: the calls support query heads that share keys."""
    refuse_if(len(region.nodes) > 1 or region.ops[0] not in KEPT, "is no attention alone")
    node, given = region.nodes[0], operands(region.nodes[0])
    usual = {**node.attrs, "causal": False, "scale": None} == dict(attention.normalise({}))
    refuse_if(not usual or not PLAIN.issuperset(given), "torch's call is for plain attention")
    q, k, v = (region.graph.types[given[name]] for name in "qkv")
    refuse_if(q.rank != 4 or min(q.numel, k.numel) == 0, "not of rank 4, or empty")
    alike = (grouped or q.shape[1] == k.shape[1]) and q.shape[3] == v.shape[3]
    refuse_if(not alike, "heads are shared, or values have other features than keys")
    for name in PLAIN & given.keys() - {"lse"}:
        apart = region.graph.types[given[name]].strides[3] != 1
        refuse_if(apart, f"features of {name} do not lie side by side", "copy it")


def _refuse_flash(region: Region, target: Target, policy: Policy) -> None:
    refuse_kept(region)


def _build_flash(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    """torch's blocked kernels, which return the log-sum-exp of each query, or compute the gradient
    from it."""
    node, given = region.nodes[0], operands(region.nodes[0])
    back = node.op == "attention_grad"
    call: Any = aten._scaled_dot_product_flash_attention_for_cpu
    call = aten._scaled_dot_product_flash_attention_for_cpu_backward if back else call
    names = ("grad", "q", "k", "v", "out", "lse") if back else ("q", "k", "v")
    places = [place(region, given[name]) for name in names]
    wanted = [node.outputs.index(v) for v in region.outputs]
    causal, scale = node.attrs["causal"], node.attrs["scale"]

    def run(*t: Any) -> Any:
        found = call(*(t[i] for i in places), 0.0, causal, scale=scale)
        return tuple(found[i] for i in wanted)

    return Kernel(run)


def _shifted_overhead(region: Region, target: Target) -> float:
    """Three calls per tap: gather the pixels, multiply, add to the result."""
    k = chain(region, CONV).weight.shape
    return 3 * k[2] * k[3] * 8 * target.call


PACKED_S = library(_packed_penalty, 1e-4)  # oneDNN looks up its primitive at every call
GEMM_S = library(_gemm_penalty, 1e-5)
SDPA_S = library(overhead=3e-5)  # torch checks masks and memory orders before it begins
SHIFTED_S = library(lambda r, target: 0.8 * live_fraction(chain(r, CONV)), _shifted_overhead)
_cpu = partial(Recipe, kind="cpu")
RECIPES = (
    _cpu("onednn_packed", CONV, _refuse_packed, _build_packed, seconds=PACKED_S),
    _cpu("gemm", PRODUCTS, _refuse_gemm, _build_gemm, seconds=GEMM_S),
    _cpu("pixels", FILTERS, _refuse_pixels, _build_pixels, seconds=library(0.75)),
    _cpu("shifted_gemm", CONV, _refuse_shifted, _build_shifted, seconds=SHIFTED_S, share=_live),
    _cpu("sdpa", ATTENTION, refuse_attention, _build_sdpa, seconds=SDPA_S),
    _cpu("flash", KEPT, _refuse_flash, _build_flash),
)
