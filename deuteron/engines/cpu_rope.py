"""Rotary positions of ``cpu_gemm``: the recipe around ``kernels/cpu/rope.py``."""

from __future__ import annotations

from deuteron.codegen.calls import Argument, Word
from deuteron.engines.base import Kernel, Refusal
from deuteron.engines.cpu_product import one_operator
from deuteron.engines.recipes import place
from deuteron.engines.triton_rope import parts_of, refuse_layout, tables_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.rope import known_tables


def _refuse(region: Region, node: Node) -> Refusal | None:
    if tables_of(node)[2] is not None:
        return Refusal("reads positions from a tensor", "give an offset")
    return refuse_layout(region, node)


def _build(region: Region, node: Node) -> Kernel:
    from deuteron.kernels.cpu.rope import Part, Variant, prepare_rope

    attrs, axis, types = node.attrs, node.attrs["axis"], region.graph.types
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
    cos, sin, kind = _tables(region, node, length)
    variant = Variant(q.dtype.short, kind, attrs["interleaved"], attrs["inverse"], len(parts))
    sizes = (q.shape[0], length, half, q.shape[3] - 2 * half)
    return Kernel.generated([prepare_rope(variant, parts, cos, sin, sizes)])


def _tables(region: Region, node: Node, length: int) -> tuple[Word, Word, str]:
    """Where cos and sin of the first token lie, and their type: as given, or computed now."""
    attrs, given = node.attrs, tables_of(node)[:2]
    if given[0] is not None:
        t = region.graph.types[given[0]]
        skip = attrs["offset"] * t.shape[1] * t.dtype.bits // 8
        cos, sin = (Argument(place(region, v), skip) for v in given)
        return cos, sin, t.dtype.short
    made = known_tables(length, attrs["dims"], attrs["base"], attrs["offset"])
    return made[0].float(), made[1].float(), "f32"


ROPE = one_operator("rope", ("rope",), _refuse, _build)
