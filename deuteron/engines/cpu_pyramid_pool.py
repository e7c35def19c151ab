"""Spatial-pyramid pooling of ``cpu_gemm``: the recipe around ``kernels/cpu/pyramid_pool.py``."""

from __future__ import annotations

import torch

from deuteron.codegen.calls import Argument
from deuteron.engines.base import Kernel, Refusal
from deuteron.engines.cpu_product import one_operator
from deuteron.engines.recipes import place
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType


def _parts(region: Region, node: Node) -> tuple[TensorType | None, TensorType | None, TensorType]:
    """x, which the gradient of a mean does not look at; the gradient; and the image that x is."""
    types, back = region.graph.types, node.op.endswith("grad")
    x = types[node.uses[-1]] if not back or node.attrs["kind"] == "max" else None
    grad = types[node.uses[0]] if back else None
    return x, grad, types[node.output if back else node.uses[0]]


def _refuse(region: Region, node: Node) -> Refusal | None:
    x, _, image = _parts(region, node)
    if image.rank == 5:
        return Refusal("pools rows and images, not volumes", "pool slice by slice")
    if x is not None and x.strides[-1] != 1 and x.strides[1] != 1:
        return Refusal("neither rows nor channels are adjacent", "to_layout(x) first")
    return None


def _build(region: Region, node: Node) -> Kernel:
    from deuteron.kernels.cpu.pyramid_pool import prepare_pyramid

    x, grad, image = _parts(region, node)
    makes = {"avg": "mean", "max": "max"}[node.attrs["kind"]] + ("_grad" if grad else "")
    call, each = prepare_pyramid(
        makes,
        image.shape,
        node.attrs["sizes"],
        image.dtype.short,
        None if x is None else x.strides,
        (0, 0, 0) if grad is None else grad.strides,
        node.attrs.get("order") == "nhwc",
    )
    given = [Argument(place(region, v)) for v in node.uses]
    words = [call(given[-1], given[0], Argument(len(region.inputs)))]
    return Kernel.generated(words, workspace=4 * each * torch.get_num_threads())


PYRAMID = one_operator("pyramid", ("pyramid_pool", "pyramid_pool_grad"), _refuse, _build)
