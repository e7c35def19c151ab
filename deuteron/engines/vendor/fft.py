"""Convolutions of large windows by the library's Fourier transforms:

    y = F⁻¹( Σ_c F(x_c) · conj F(w_kc) )

over images with their padding, in float32 whatever the type. All window sizes cost the same, so
large windows gain; weights that are known ahead are transformed once. An inf or nan in an image
would reach all results of that image, not only those whose windows see it. On a CPU, where looking
at the result does not stall anything, such images are convolved directly instead.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import log2, prod
from typing import Any

import torch
from torch.nn.functional import pad

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import Chain, chain
from deuteron.engines.recipes import Recipe, activate, place, place_or_none, required_chain
from deuteron.engines.torch_engine import under
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.conv import sides
from deuteron.policy import Policy
from deuteron.target import Target

CONV = ("conv",)
LEAST = {"cpu": 49, "cuda": 81}  # taps: smaller windows are faster as direct sums
FACTORS = {"cpu": (2, 3, 5), "cuda": (2, 3, 5, 7)}  # prime factors of sizes that transform fast
SPECTRUM = 64 << 20  # most bytes of a transformed weight on a CPU
# On a GPU: how often a transform, with its padding and copies, moves its numbers; the part of a
# copy's bandwidth, and of the arithmetic rate, that it reaches; the number of launches.
PASSES, REACHED, LAUNCHES = 5, 0.5, 10
# On a CPU: the parts of the rate of torch's largest products that transforms reach, and that
# products of frequencies reach; the number of calls.
TRANSFORMS, PRODUCTS, CALLS = 0.05, 0.3, 30


def _fast(n: int, factors: Sequence[int]) -> int:
    """The smallest size from ``n`` on that has no prime factors but ``factors``."""
    while True:
        rest = n
        for factor in factors:
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return n
        n += 1


def _sizes(c: Chain, target: Target) -> list[int]:
    """The sizes of the images that are transformed, one for each spatial dimension."""
    before, behind = sides(c.anchor.attrs["padding"], c.x.rank - 2)
    ends = zip(before, c.x.shape[2:], behind, strict=True)
    return [_fast(sum(each), FACTORS[target.kind]) for each in ends]


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    c = required_chain(region, CONV, constant=not target.is_cuda)
    a, taps = c.anchor.attrs, c.weight.shape[2:]
    small = prod(taps) < LEAST[target.kind]
    refuse_if(small, f"windows of {prod(taps)} taps are quicker one by one", quiet=True)
    refuse_if(c.x.numel == 0 or c.out.numel == 0, "the tensors are empty")
    refuse_if(c.x.rank > 4, "transforms rows and images")
    apart = {*a["stride"], *a["dilation"]} != {1} or a["transposed"]
    refuse_if(apart, "windows, or their taps, lie apart")
    kind = c.x.dtype.short
    refuse_if(kind not in ("f32", "f16", "bf16"), f"transforms float32, not {kind}")
    large = not target.is_cuda and 4 * prod(c.weight.shape[:2]) * prod(_sizes(c, target)) > SPECTRUM
    refuse_if(large, "the transformed weight takes more than 64 MB")


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    c = chain(region, CONV)
    images, (count, channels, *_), space = c.x.shape[0], c.weight.shape, prod(_sizes(c, target))
    planes = images * (c.x.shape[1] + count)
    planes += 0 if c.anchor.uses[1] in region.constants else count * channels
    transforms = 2.5 * planes * space * log2(space)
    products = 4.0 * space * images * count * channels
    if not target.is_cuda:
        computed = transforms / TRANSFORMS + products / PRODUCTS
        return computed / target.rate("f32") + CALLS * target.call
    moved = 4.0 * planes * space * PASSES / target.stream
    computed = (transforms + products) / target.rate("f32", False)
    return float(max(moved, computed) / REACHED + LAUNCHES * target.launch)


def _space(t: torch.Tensor) -> list[int]:
    return list(range(2, t.ndim))


def transformed(weight: torch.Tensor, sizes: list[int], groups: int) -> torch.Tensor:
    """The transform of a weight [K, C, …]: [frequencies · groups, C, K / groups], or for a
    depthwise convolution [groups, K / groups, frequencies …]."""
    count, channels = weight.shape[0] // groups, weight.shape[1]
    found: torch.Tensor = torch.fft.rfftn(weight.float(), sizes, dim=_space(weight)).conj()
    if channels == 1:
        found = found.reshape(groups, count, *found.shape[2:])
    else:
        found = found.reshape(groups, count, channels, -1).permute(3, 0, 2, 1).flatten(0, 1)
    return found.resolve_conj().contiguous()


def _multiplied(seen: torch.Tensor, weight: torch.Tensor, groups: int) -> torch.Tensor:
    """Images [N, C, frequencies …] times a transformed weight: [N, K, frequencies …]."""
    images, channels, *bands = seen.shape
    if channels == groups:
        return (seen.unsqueeze(2) * weight).flatten(1, 2)
    rows = seen.reshape(images, groups, channels // groups, -1).permute(3, 1, 0, 2).flatten(0, 1)
    found: torch.Tensor = torch.bmm(rows, weight).unflatten(0, (-1, groups))
    return found.permute(2, 1, 3, 0).reshape(images, -1, *bands)


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    c = chain(region, CONV)
    sizes, groups, shape = _sizes(c, ctx.target), c.anchor.attrs["groups"], c.out.shape
    name = c.anchor.inputs[1]
    assert name is not None
    x, w = (place(region, v) for v in c.anchor.inputs[:2])
    b, z = place_or_none(region, c.bias), place_or_none(region, c.residual)
    before, _ = sides(c.anchor.attrs["padding"], c.x.rank - 2)
    rest = (n - m - side for n, m, side in zip(sizes, c.x.shape[2:], before, strict=True))
    zeros = [n for ends in [*zip(before, rest, strict=True)][::-1] for n in ends]
    act, summed_up = activate(c.act), partial(table.get("conv").reference, **c.anchor.attrs)
    make = partial(transformed, sizes=sizes, groups=groups)
    known = name in region.constants
    form = ctx.form(name, ("fft", groups, *sizes), make) if known else None

    def run(*t: Any) -> None:
        image = pad(t[x].float(), zeros)
        seen = torch.fft.rfftn(image, dim=_space(image))
        found = _multiplied(seen, make(t[w]) if form is None else form, groups)
        y = torch.fft.irfftn(found, sizes, dim=_space(seen))[tuple(map(slice, shape))]
        if y.is_cpu and not bool(y.sum().isfinite()):
            y = summed_up(t[x], t[w], None).float()
        if b is not None:
            y += t[b].view(-1, *[1] * (len(shape) - 2))
        if z is not None:
            y += t[z]
        if act is not None:
            act(y)
        t[-1].copy_(y)

    planes = c.x.shape[0] * (c.x.shape[1] + shape[1])
    room = 4 * 4 * planes * prod(sizes)
    return Kernel(under(ctx.policy, run), writes=True, workspace=room)


RECIPES = (Recipe("fft", CONV, _refuse, _build, seconds=_seconds, by_estimate=False),)
