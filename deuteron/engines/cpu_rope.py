"""Rotary positions of ``cpu_gemm``: the recipe around ``kernels/cpu/rope.py``."""

from __future__ import annotations

import torch

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.cpu_product import generated, on_this_cpu, roof
from deuteron.engines.recipes import Knobs, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.engines.triton_rope import parts_of
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.position import rotation_tables
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.2  # of the arithmetic: rows are short


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if region.ops != ("rope",):
        return Refusal("is not a rope alone")
    wrong = on_this_cpu(region, target)
    if wrong is not None:
        return wrong
    node, types = region.nodes[0], region.graph.types
    if len(node.inputs) > 4 and node.inputs[4] is not None:
        return Refusal("reads positions from a tensor", "give an offset")
    for source, out in parts_of(region):
        for t in (types[source], types[out]):
            if t.strides[3] != 1 and t.shape[3] > 1:
                return Refusal(f"the features of {t} are not adjacent", "to_layout(x) first")
    if any(not types[v].is_layout("contiguous") for v in node.inputs[2:4] if v is not None):
        return Refusal("a table is not contiguous", "to_layout(x) first")
    return None


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return roof(region, target, region_cost(region).flops / (target.rate("f32") * REACHED))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.rope import Form, Part, prepare_rope

    node, types = region.nodes[0], region.graph.types
    attrs, axis = node.attrs, node.attrs["axis"]
    q = types[node.uses[0]]
    length, half = q.shape[axis], attrs["dims"] // 2

    def steps(t: TensorType) -> tuple[int, int, int]:
        return t.strides[0], t.strides[axis], t.strides[3 - axis]

    parts = [
        Part(
            Argument(place(region, source)),
            Argument(len(region.inputs) + region.outputs.index(out)),
            types[source].shape[3 - axis],
            steps(types[source]),
            steps(types[out]),
        )
        for source, out in parts_of(region)
    ]
    cos, sin, kind = _tables(region, length)
    form = Form(q.dtype.short, kind, attrs["interleaved"], attrs["inverse"], len(parts))
    sizes = (q.shape[0], length, half, q.shape[3] - 2 * half)
    return Kernel.generated([prepare_rope(form, parts, cos, sin, sizes)])


def _tables(region: Region, length: int) -> tuple[Word, Word, str]:
    """Where cos and sin of the first token lie, and their type: as given, or computed now."""
    node, attrs = region.nodes[0], region.nodes[0].attrs
    given = node.inputs[2:4]
    if len(given) == 2 and given[0] is not None:
        t = region.graph.types[given[0]]
        skip = attrs["offset"] * t.shape[1] * t.dtype.bits // 8
        cos, sin = (Argument(place(region, v), skip) for v in given)
        return cos, sin, t.dtype.short
    made = rotation_tables(
        None, None, None, length, attrs["dims"], attrs["base"], attrs["offset"], torch.device("cpu")
    )
    return made[0].float().contiguous(), made[1].float().contiguous(), "f32"


ROPE = generated("rope", _refuse, one_way, _seconds, _build)
