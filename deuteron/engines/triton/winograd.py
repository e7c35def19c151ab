"""Convolutions of 3 × 3 windows on a GPU by Winograd's algorithm: the recipe around
``kernels/triton/winograd.py``. The transforms are ours; a library computes the batch of products.

Transforms magnify rounding: in float32 not more than another order of summation does, but in 16
bits to more than twice the error of PyTorch's convolution, so there the policy has to allow the
error.
"""

from collections.abc import Sequence
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import efficiency
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.torch_engine import numerics
from deuteron.engines.triton.conv import OP, Convolved, as_convolution, refuse_gathered
from deuteron.engines.triton.multiplied import follows
from deuteron.engines.triton.pixels import refuse_gaps
from deuteron.ir.region import Region
from deuteron.ops.conv import sides
from deuteron.policy import Policy
from deuteron.target import Target

# The largest error relative to the largest result, for random numbers with 64 to 512 channels, by
# element type and by size of a tile. tf32 has 10 bits, and so the error of float16.
ERRORS = {
    "f32": {2: 2e-6, 4: 5e-6},
    "tf32": {2: 1e-3, 4: 4e-3},
    "f16": {2: 1e-3, 4: 4e-3},
    "bf16": {2: 8e-3, 4: 3e-2},
}
LEAST = 32  # fewest channels: fewer do not pay for the transforms
REACHED = 0.75  # part of a copy's bandwidth that the transforms reach


def _allowed(kind: str, policy: Policy) -> list[int]:
    """Sizes of tiles whose error the policy permits."""
    errors = ERRORS["tf32" if kind == "f32" and policy.allow_tf32 else kind]
    limit = policy.max_error
    if limit is None:
        return list(errors) if errors is ERRORS["f32"] else []
    return [m for m, error in errors.items() if error <= limit]


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    work = as_convolution(region)
    refuse_gathered(work)
    refuse_gaps(work.x)
    a, kind = work.node.attrs, work.x.dtype.short
    plain = {*a["stride"], *a["dilation"], a["groups"]} == {1}
    square = work.weight.shape[2:] == (3, 3)
    refuse_if(not square or not plain, "is for plain windows of 3 × 3", quiet=True)
    few = min(work.weight.shape[:2]) < LEAST
    refuse_if(few, "has too few channels to pay for the transforms", quiet=True)
    given = "the weight is an input of the plan, so it cannot be transformed ahead"
    refuse_if(not work.known, given, "make it a constant: g.constant(w)")
    least = min(ERRORS["tf32" if kind == "f32" else kind].values())
    remedy = f"Policy(max_error={least:.0e}) permits it"
    refuse_if(not _allowed(kind, policy), "errs more than twice as much as PyTorch", remedy)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    kind = as_convolution(region).x.dtype.short
    ways = [{"tile": m} for m in _allowed(kind, policy)]
    return sorted(ways, key=lambda way: _seconds(region, target, way))


def _tiles(work: Convolved, m: int) -> int:
    images, down, across, _ = work.out.shape
    return images * -(-down // m) * -(-across // m)


def _room(work: Convolved, m: int) -> int:
    """Bytes that the transformed image and the sums take."""
    numbers = _tiles(work, m) * (m + 2) ** 2 * (work.x.shape[-1] + work.out.shape[-1])
    return numbers * work.x.dtype.bits // 8


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds of the products, and of what the transforms move, which the products move again."""
    work, m = as_convolution(region), int(knobs["tile"])
    kind, channels, columns = work.x.dtype.short, work.x.shape[-1], work.out.shape[-1]
    flops = 2.0 * (m + 2) ** 2 * _tiles(work, m) * channels * columns
    rate = efficiency(region, work.node, target) * target.rate(kind, True)
    room = _room(work, m)
    speed = target.cache_bandwidth if room < target.cache_bytes / 2 else target.stream
    ends = (work.x.nbytes + work.out.nbytes) / target.stream
    products = max(flops / rate, room / speed)
    return float(products + (room / speed + ends) / REACHED + 3 * target.launch)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.winograd import Sizes, conv, transformed

    work, m = as_convolution(region), int(knobs["tile"])
    a, (images, height, width, channels) = work.node.attrs, work.x.shape
    _, down, across, columns = work.out.shape
    tiles = -(-down // m), -(-across // m)
    size = Sizes(images, height, width, down, across, *tiles, *sides(a["padding"], 2)[0])
    name = work.node.uses[1]
    weight = ctx.form(name, ("winograd", m), lambda w: transformed(w, m))

    def multiply(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with numerics(ctx.policy):
            return torch.bmm(x, w)

    call = conv(size, m, channels, columns, follows(region, work), multiply)
    x = region.inputs.index(work.node.uses[0])
    others = [region.inputs.index(v) for v, _ in work.others]

    def run(*given: Any) -> None:
        call(given[x], weight, given[-1], [given[i] for i in others])

    return Kernel(run, writes=True, workspace=_room(work, m), note=f"F({m} × {m}, 3 × 3)")


def _share(region: Region, knobs: Knobs) -> float:
    """(m+2)² products for a tile of m² results, instead of 9 per result; without the transforms."""
    work, m = as_convolution(region), int(knobs["tile"])
    return _tiles(work, m) * (m + 2) ** 2 / (9 * work.rows)


WINOGRAD = Recipe(
    "winograd", (OP,), _refuse, _build, _knobs, _seconds, 0.9, share=_share, by_estimate=False
)
