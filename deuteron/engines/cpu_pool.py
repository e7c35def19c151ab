"""Pooling of ``cpu_gemm``: the recipe around ``kernels/cpu/pyramid_pool.py`` and
``pyramid_pool_grad.py``."""

from __future__ import annotations

import torch

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.2  # of the arithmetic: rows of cells are short, and end in single elements


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if region.ops not in (("pyramid_pool",), ("pyramid_pool_grad",)):
        return Refusal("is not a pyramid_pool or its gradient alone")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    if _image(region).rank == 5:
        return Refusal("pools rows and images, not volumes", "pool slice by slice")
    x = _x(region)
    if x is not None and x.strides[-1] != 1 and x.strides[1] != 1:
        return Refusal("neither rows nor channels are adjacent", "to_layout(x) first")
    return None


def _x(region: Region) -> TensorType | None:
    """What is pooled; the gradient of a mean does not look at it."""
    node, types = region.nodes[0], region.graph.types
    if node.op == "pyramid_pool":
        return types[node.uses[0]]
    return types[node.uses[1]] if node.attrs["kind"] == "max" else None


def _image(region: Region) -> TensorType:
    """What is pooled, or its gradient."""
    node = region.nodes[0]
    return region.graph.types[node.output if node.op.endswith("grad") else node.uses[0]]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    node, x = region.nodes[0], _x(region)
    if node.op.endswith("grad"):
        return _build_grad(region, x)
    from deuteron.kernels.cpu.pyramid_pool import prepare_pyramid

    assert x is not None
    maximum = node.attrs["kind"] == "max"
    call = prepare_pyramid(x.shape, x.strides, node.attrs["sizes"], maximum, x.dtype.short)
    return Kernel.generated([call(Argument(0), Argument(1))])


def _build_grad(region: Region, x: TensorType | None) -> Kernel:
    from deuteron.kernels.cpu.pyramid_pool_grad import prepare_pyramid_grad

    node, types = region.nodes[0], region.graph.types
    g, dx = types[node.uses[0]], types[node.output]
    call, each = prepare_pyramid_grad(
        dx.shape,
        node.attrs["sizes"],
        dx.dtype.short,
        node.attrs["order"] == "nhwc",
        g.strides,
        None if x is None else x.strides,
    )
    places = [Argument(place(region, v)) for v in node.uses]
    words = [call(places[0], places[-1], Argument(len(region.inputs)))]
    return Kernel.generated(words, workspace=4 * each * torch.get_num_threads())


PYRAMID = generated("pyramid", _refuse, one_way, _seconds, _build)
