"""Pooling of ``cpu_gemm``: the recipe around ``kernels/cpu/pyramid_pool.py``."""

from __future__ import annotations

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.2  # of the arithmetic: rows of cells are short, and end in single elements


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if region.ops != ("pyramid_pool",):
        return Refusal("is not a pyramid_pool alone")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    x = _x(region)
    if x.rank == 5:
        return Refusal("pools rows and images, not volumes", "pool slice by slice")
    if x.strides[-1] != 1 and x.strides[1] != 1:
        return Refusal("neither rows nor channels are adjacent", "to_layout(x) first")
    return None


def _x(region: Region) -> TensorType:
    return region.graph.types[region.nodes[0].uses[0]]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.pyramid_pool import prepare_pyramid

    x, attrs = _x(region), region.nodes[0].attrs
    maximum = attrs["kind"] == "max"
    call = prepare_pyramid(x.shape, x.strides, attrs["sizes"], maximum, x.dtype.short)
    return Kernel.generated([call(Argument(0), Argument(1))])


PYRAMID = generated("pyramid", _refuse, one_way, _seconds, _build)
