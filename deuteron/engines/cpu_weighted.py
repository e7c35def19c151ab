"""Weighted pooling of ``cpu_gemm``: the recipe around ``kernels/cpu/weighted_pool.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.2  # of the arithmetic: planes are copied into frames first
MOST_TAPS = 64  # all of them are written out


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if region.ops not in (("weighted_pool",), ("weighted_pool_grad",)):
        return Refusal("is not a weighted_pool or its gradient alone")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    images, weight = _operands(region)
    for t in images:
        if t.rank == 5:
            return Refusal("pools rows and images, not volumes", "pool slice by slice")
        if t.shape[-1] > 1 and t.strides[-1] != 1:
            return Refusal(f"the rows of {t} are not adjacent", "call .contiguous()")
    x = images[-1]
    if not region.graph.types[region.outputs[0]].is_layout("contiguous"):
        return Refusal("the result is in nhwc", "call .contiguous()")
    if not weight.is_layout("contiguous"):
        return Refusal("the weight is not in row-major order", "call .contiguous()")
    taps = weight.numel // (weight.shape[0] if weight.rank == x.rank - 1 else 1)
    if taps > MOST_TAPS:
        return Refusal(f"a window of {taps} taps", f"up to {MOST_TAPS} are generated")
    return None


def _operands(region: Region) -> tuple[list[TensorType], TensorType]:
    """The images that are read, x last, and the weight."""
    *images, weight = (region.graph.types[v] for v in region.nodes[0].uses)
    return images, weight


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.weighted_pool import Form, Sizes, prepare_weighted

    node, types = region.nodes[0], region.graph.types
    images, weight = _operands(region)
    x, back = images[-1], node.op.endswith("grad")
    y = images[0] if back else types[node.output]
    names = dict(zip(node.outputs, ("dx", "dw") if back else ("y",), strict=True))
    window = weight.shape[weight.rank - (x.rank - 2) :]
    form = Form(
        _two(window), _two(node.attrs["stride"]), _two(node.attrs["padding"], 0),
        frozenset(names[v] for v in region.outputs), x.dtype.short,
    )  # fmt: skip
    sizes = Sizes(x.shape[0], x.shape[1], _two(x.shape[2:]), _two(y.shape[2:]))
    shared = weight.rank < x.rank - 1
    call, each = prepare_weighted(form, sizes, shared, *(_steps(t) for t in reversed(images)))
    made: dict[str, Word] = {
        names[v]: Argument(len(region.inputs) + i) for i, v in enumerate(region.outputs)
    }
    *first, source, taps = (Argument(place(region, v)) for v in node.uses)
    to = made.get("y", made.get("dx", 0))
    words = call(source, taps, first[0] if first else 0, to, made.get("dw", 0))
    return Kernel.generated([words], workspace=4 * each * torch.get_num_threads())


def _two(numbers: Sequence[int], first: int = 1) -> tuple[int, int]:
    """One for rows and one for columns: a row is an image of a single one."""
    return (first, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def _steps(t: TensorType) -> tuple[int, int, int]:
    """From image to image, channel to channel and row to row."""
    return t.strides[0], t.strides[1], t.strides[2] if t.rank == 4 else 0


WEIGHTED = generated("weighted", _refuse, one_way, _seconds, _build)
