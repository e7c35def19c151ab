"""Library calls on rearranged data: the same mathematics in a shape the library is good at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.numerics import numerics
from deuteron.engines.recipes import (
    Recipe,
    activate,
    fits,
    library,
    maybe,
    must_chain,
    place,
    rows_of,
)
from deuteron.engines.vendor_cpu import live_fraction, reach
from deuteron.engines.vendor_cuda import on_gpu
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.policy import Policy
from deuteron.target import Target

LANES = 8  # cuDNN's tensor-core kernels read channels in groups of this many


# ---- few input channels, padded with zeros


def _refuse_padded(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = on_gpu(region, target, ("conv",))
    if isinstance(c, Refusal):
        return c
    fitting = fits(region, ("conv",))
    if isinstance(fitting, Refusal):
        return fitting
    if c.act_name != "relu" or c.residual is not None:
        return Refusal("cuDNN's fused call is convolution, bias, ReLU")
    if c.x.dtype.bits != 16 or c.x.rank != 4 or not c.x.is_layout("nhwc"):
        return Refusal("only 16-bit nhwc images gain from padded channels")
    a = c.anchor.attrs
    if a["transposed"] or a["groups"] != 1 or c.x.shape[1] % LANES == 0:
        return Refusal(f"the input channels ({c.x.shape[1]}) fill the tensor cores already")
    if c.x.shape[1] > LANES:
        return Refusal("padding more than one group of channels is not worth the copy")
    return None


def _build_padded(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = must_chain(region, ("conv",))
    a = c.anchor.attrs
    where = (a["stride"], a["padding"], a["dilation"], a["groups"])
    x, b = place(region, c.anchor.inputs[0]), maybe(region, c.bias)
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    n, channels, height, width = c.x.shape
    extra = LANES - channels
    wide = torch.nn.functional.pad(weight, (0, 0, 0, 0, 0, extra)).contiguous(
        memory_format=torch.channels_last
    )
    policy = ctx.policy

    def run(*t: Any) -> torch.Tensor:
        image = torch.nn.functional.pad(t[x].permute(0, 2, 3, 1), (0, extra)).permute(0, 3, 1, 2)
        with numerics(policy, benchmark=not policy.deterministic):
            return torch.cudnn_convolution_relu(image, wide, None if b is None else t[b], *where)

    return Kernel(run, workspace=2 * n * LANES * height * width)


# ---- convolution as one large product, then a sum of shifted parts


def _refuse_taps(region: Region, target: Target, policy: Policy) -> Refusal | None:
    c = on_gpu(region, target, ("conv",))
    if isinstance(c, Refusal):
        return c
    fitting = fits(region, ("conv",))
    if isinstance(fitting, Refusal):
        return fitting
    a = c.anchor.attrs
    if a["transposed"] or a["groups"] != 1 or c.x.rank != 4 or any(s != 1 for s in a["stride"]):
        return Refusal("only plain 2-D convolutions of stride 1 split into taps")
    if c.x.dtype.bits != 16:
        return Refusal("only 16-bit products are faster this way")
    if not (c.x.is_layout("nhwc") and c.out.is_layout("nhwc")):
        return Refusal("the tensors are not in nhwc", "use Policy(layout='auto')")
    if max(a["dilation"]) < 8 or live_fraction(c) > 0.9:
        return Refusal("the library is good at small dilations")
    return None


def _build_taps(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    """One product [pixels, C] × [C, taps·K], then each tap's part added where it belongs."""
    c = must_chain(region, ("conv",))
    a = c.anchor.attrs
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    k, channels, rows, columns = weight.shape
    matrix = weight.permute(1, 2, 3, 0).reshape(channels, rows * columns * k).contiguous()
    (n, _, height, width), (_, _, oh, ow) = c.x.shape, c.out.shape
    taps = []
    for i in range(rows):
        for j in range(columns):
            dy = i * a["dilation"][0] - a["padding"][0]
            dx = j * a["dilation"][1] - a["padding"][1]
            ys, xs = reach(height, oh, dy), reach(width, ow, dx)
            if len(ys) and len(xs):
                taps.append(
                    (
                        i * columns + j,
                        slice(ys.start, ys.stop),
                        slice(xs.start, xs.stop),
                        slice(ys.start + dy, ys.stop + dy),
                        slice(xs.start + dx, xs.stop + dx),
                    )
                )
    taps.sort(key=lambda tap: (tap[1].start - tap[1].stop, tap[2].start - tap[2].stop))
    whole = taps[0][1] == slice(0, oh) and taps[0][2] == slice(0, ow)
    x, b, z = (place(region, c.anchor.inputs[0]), maybe(region, c.bias), maybe(region, c.residual))
    act = activate(c.act)
    wide = bool(knobs["wide"])  # sum in float32

    def run(*t: Any) -> torch.Tensor:
        parts = torch.mm(rows_of(t[x]), matrix).view(n, height, width, rows * columns, k)
        kind = torch.float32 if wide else parts.dtype
        start = 0
        if whole:
            tap, _, _, sy, sx = taps[0]
            out = parts[:, sy, sx, tap].to(kind, copy=True, memory_format=torch.contiguous_format)
            start = 1
        else:
            out = torch.zeros((n, oh, ow, k), dtype=kind, device=parts.device)
        for tap, oy, ox, sy, sx in taps[start:]:
            out[:, oy, ox] += parts[:, sy, sx, tap]
        if b is not None:
            out += t[b]
        image = out.to(parts.dtype).permute(0, 3, 1, 2)
        if z is not None:
            image += t[z]
        return image if act is None else act(image)

    return Kernel(run, workspace=2 * n * height * width * rows * columns * k)


def _taps_knobs(region: Region, target: Target, policy: Policy) -> tuple[dict[str, Any], ...]:
    return ({"wide": False}, {"wide": True})


# ---- resizing plane by plane


def _refuse_planar(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if not target.is_cuda:
        return Refusal("is a GPU call")
    if region.ops != ("resize",):
        return Refusal("is not a resize alone")
    x = region.graph.types[region.inputs[0]]
    if x.rank != 4 or x.layout != "nhwc" or x.numel == 0:
        return Refusal("the image is not in nhwc, so there is nothing to rearrange")
    return None


def _build_planar(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    node = region.nodes[0]
    reference, attrs = table.get("resize").reference, dict(node.attrs)
    out = region.graph.types[region.outputs[0]]

    def run(x: torch.Tensor, result: torch.Tensor) -> None:
        result.copy_(reference(x.contiguous(), **attrs))

    return Kernel(run, writes=True, workspace=out.nbytes)


PADDED_S = library(0.5, lambda region, target: target.launch)
TAPS_S = library(0.6, lambda region, target: 12 * target.launch)
RECIPES = (
    Recipe("cudnn_padded", ("conv",), _refuse_padded, _build_padded, seconds=PADDED_S),
    Recipe("taps", ("conv",), _refuse_taps, _build_taps, _taps_knobs, TAPS_S),
    Recipe("planar", ("resize",), _refuse_planar, _build_planar, seconds=library(0.65)),
)
