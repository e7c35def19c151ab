"""Library calls on rearranged data: the same mathematics in a shape the library is good at."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import Chain, chain
from deuteron.engines.numerics import numerics
from deuteron.engines.recipes import Recipe, activate, fits, library, maybe, place, rows_of
from deuteron.engines.vendor_cpu import CONV, live_fraction, refuse_order, refuse_parts, taps
from deuteron.engines.vendor_cuda import floats
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.policy import Policy
from deuteron.target import Target

LANES = 8  # cuDNN's tensor-core kernels read channels in groups of this many


# ---- few input channels, padded with zeros


def _refuse_padded(region: Region, target: Target, policy: Policy) -> None:
    c = _constant_floats(region)
    plain = c.act_name == "relu" and c.residual is None
    refuse_if(not plain, "cuDNN's fused call is convolution, bias, ReLU")
    image = c.x.dtype.bits == 16 and c.x.rank == 4 and c.x.is_layout("nhwc")
    refuse_if(not image, "only 16-bit nhwc images gain from padded channels")
    a, channels = c.anchor.attrs, c.x.shape[1]
    full = a["transposed"] or a["groups"] != 1 or channels % LANES == 0
    refuse_if(full, f"the input channels ({channels}) fill the tensor cores already")
    many = channels > LANES
    refuse_if(many, "padding more than one group of channels is not worth the copy")


def _constant_floats(region: Region) -> Chain:
    floats(region, CONV)
    return fits(region, CONV)


def _build_padded(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
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


def _refuse_taps(region: Region, target: Target, policy: Policy) -> None:
    c = _constant_floats(region)
    refuse_parts(c, "split into taps")
    refuse_if(c.x.dtype.bits != 16, "only 16-bit products are faster this way")
    refuse_order(c.x, c.out)
    near = max(c.anchor.attrs["dilation"]) < 8 or live_fraction(c) > 0.9
    refuse_if(near, "the library is good at small dilations")


def _build_taps(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    """One product [pixels, C] × [C, taps·K], then each tap's part added where it belongs."""
    c = chain(region, CONV)
    weight = ctx.constants[c.anchor.inputs[1] or ""]
    k, channels, rows, columns = weight.shape
    matrix = weight.permute(1, 2, 3, 0).reshape(channels, rows * columns * k).contiguous()
    (n, _, height, width), (_, _, oh, ow) = c.x.shape, c.out.shape
    parts = [(i * columns + j, to, of) for i, j, to, of in taps(c)]
    parts.sort(key=lambda part: [s.start - s.stop for s in part[1]])
    whole = parts[0][1] == (slice(0, oh), slice(0, ow))
    x, b, z = (place(region, c.anchor.inputs[0]), maybe(region, c.bias), maybe(region, c.residual))
    act = activate(c.act)
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


def _taps_knobs(region: Region, target: Target, policy: Policy) -> tuple[dict[str, Any], ...]:
    return ({"wide": False}, {"wide": True})


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


PADDED_S = library(0.5, lambda region, target: target.launch)
TAPS_S = library(0.6, lambda region, target: 12 * target.launch)
_gpu = partial(Recipe, kind="cuda")
RECIPES = (
    _gpu("cudnn_padded", CONV, _refuse_padded, _build_padded, seconds=PADDED_S),
    _gpu("taps", CONV, _refuse_taps, _build_taps, _taps_knobs, TAPS_S),
    _gpu("planar", ("resize",), _refuse_planar, _build_planar, seconds=library(0.65)),
)
