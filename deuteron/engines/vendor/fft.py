"""Convolutions of large windows by the library's Fourier transforms:

    y = F⁻¹( Σ_c F(x_c) · conj F(w_kc) )

over images with the zeros beside them, in float32 whatever the type. A window of any size costs the
same, so that large ones gain; weights that are known are transformed once. What is infinite or nan
in an image reaches all of its results, not only those whose windows see it.
"""

from collections.abc import Mapping
from functools import partial
from math import log2, prod
from typing import Any

import torch
from torch.nn.functional import pad

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import Chain, chain
from deuteron.engines.recipes import Recipe, activate, fits, maybe, place
from deuteron.engines.roofline import is_depthwise
from deuteron.engines.torch_engine import under
from deuteron.ir.region import Region
from deuteron.ops.conv import sides
from deuteron.policy import Policy
from deuteron.target import Target

CONV = ("conv",)
LEAST = 81  # taps of a window: fewer are quicker one by one
PASSES = 5  # times that a transform, with the zeros and the copies around it, moves its numbers
REACHED = 0.5  # of the bandwidth of a copy, and of the arithmetic
LAUNCHES = 10


def _fast(n: int) -> int:
    """The first size from ``n`` on that has no other factors than 2, 3, 5 and 7."""
    while True:
        rest = n
        for factor in (2, 3, 5, 7):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return n
        n += 1


def _sizes(c: Chain) -> list[int]:
    """Of what is transformed, by dimension of space."""
    before, behind = sides(c.anchor.attrs["padding"], c.x.rank - 2)
    ends = zip(before, c.x.shape[2:], behind, strict=True)
    return [_fast(sum(each)) for each in ends]


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    c = fits(region, CONV, constant=False)
    a, taps = c.anchor.attrs, c.weight.shape[2:]
    small = prod(taps) < LEAST
    refuse_if(small, f"windows of {prod(taps)} taps are quicker one by one", quiet=True)
    refuse_if(c.x.numel == 0 or c.out.numel == 0, "the tensors are empty")
    refuse_if(c.x.rank > 4, "transforms rows and images")
    apart = {*a["stride"], *a["dilation"]} != {1} or a["transposed"]
    refuse_if(apart, "windows, or their taps, lie apart")
    alone = is_depthwise(region.graph, c.anchor) and c.weight.shape[0] == c.x.shape[1]
    refuse_if(not alone and a["groups"] > 1, "has groups of several channels")
    kind = c.x.dtype.short
    refuse_if(kind not in ("f32", "f16", "bf16"), f"transforms float32, not {kind}")


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    c = chain(region, CONV)
    images, (count, channels, *_) = c.x.shape[0], c.weight.shape
    alone, space = c.anchor.attrs["groups"] > 1, prod(_sizes(c))
    planes = images * (c.x.shape[1] + count)
    planes += 0 if c.anchor.uses[1] in region.constants else count * channels
    moved = 4.0 * planes * space * PASSES / target.stream
    flops = 2.5 * planes * space * log2(space)
    flops += 4.0 * space * images * count * (1 if alone else channels)
    computed = flops / target.rate("f32", False)
    return float(max(moved, computed) / REACHED + LAUNCHES * target.launch)


def transformed(weight: torch.Tensor, sizes: list[int], alone: bool) -> torch.Tensor:
    """A weight [K, C, …] by frequency: [frequencies, C, K], or where no channel sees another [K,
    frequencies …]."""
    found: torch.Tensor = torch.fft.rfftn(weight.float(), sizes, dim=_space(weight)).conj()
    found = found.squeeze(1) if alone else found.flatten(2).permute(2, 1, 0)
    return found.resolve_conj().contiguous()


def _space(t: torch.Tensor) -> list[int]:
    return list(range(2, t.ndim))


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
    sizes, alone = _sizes(c), c.anchor.attrs["groups"] > 1
    name = c.anchor.inputs[1]
    assert name is not None
    x, w = (place(region, v) for v in c.anchor.inputs[:2])
    b, z = maybe(region, c.bias), maybe(region, c.residual)
    before, _ = sides(c.anchor.attrs["padding"], c.x.rank - 2)
    first = [n for side in reversed(before) for n in (side, 0)]
    act, kind, shape = activate(c.act), c.out.dtype.torch, c.out.shape
    known = name in region.constants
    make = partial(transformed, sizes=sizes, alone=alone)
    form = ctx.form(name, ("fft", *sizes), make) if known else None

    def run(*t: Any) -> Any:
        image = pad(t[x].float(), first)
        seen = torch.fft.rfftn(image, sizes, dim=_space(image))
        weight = make(t[w]) if form is None else form
        if alone:
            found = seen * weight
        else:
            by_frequency = seen.flatten(2).permute(2, 0, 1)
            found = torch.bmm(by_frequency, weight).permute(1, 2, 0)
            found = found.unflatten(2, seen.shape[2:])
        y = torch.fft.irfftn(found, sizes, dim=_space(seen))
        y = y[tuple(map(slice, shape))]
        if b is not None:
            y = y + t[b].view(-1, *[1] * (len(shape) - 2))
        if z is not None:
            y = y + t[z]
        y = y.contiguous()
        return (y if act is None else act(y)).to(kind)

    planes = c.x.shape[0] * (c.x.shape[1] + shape[1])
    return Kernel(under(ctx.policy, run), workspace=4 * 4 * planes * prod(sizes))


RECIPES = (Recipe("fft", CONV, _refuse, _build, seconds=_seconds, kind="cuda", by_estimate=False),)
