"""Rotary positions in one launch: the recipe around ``kernels/triton/rope.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe, maybe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = 0.85  # of the bandwidth of a copy, until a GPU says otherwise
MOST = 2**31 - 4096  # tokens and programs are counted in 32 bits


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    node = refuse_anywhere(target) or only_node(region, {"rope": None})
    if isinstance(node, Refusal):
        return node
    types = region.graph.types
    for value in (*node.inputs[:2], *region.outputs):
        if value is None:
            continue
        t = types[value]
        if t.numel == 0:
            return Refusal("the tensors are empty")
        if t.strides[3] != 1 and t.shape[3] > 1:
            return Refusal(f"the features of {t} are not adjacent", "to_layout(x) first")
    for value in node.inputs[2:]:
        if value is not None and not types[value].is_layout("contiguous"):
            return Refusal("a table or the positions are not contiguous", "to_layout(x) first")
    q = types[node.uses[0]]
    if q.numel // q.shape[3] >= MOST:
        return Refusal(f"{q} has more rows than 32 bits count", "split the batch")
    return None


def parts_of(region: Region) -> list[tuple[str, str]]:
    """(input, output) for q and for k, as far as somebody reads the result."""
    node = region.nodes[0]
    pairs = zip((v for v in node.inputs[:2] if v is not None), node.outputs, strict=True)
    return [(source, out) for source, out in pairs if out in region.outputs]


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    node, types = region.nodes[0], region.graph.types
    axis, q = node.attrs["axis"], types[node.uses[0]]
    heads = max(types[source].shape[3 - axis] for source, _ in parts_of(region))
    _, _, cos, _, positions = (*node.inputs, None, None, None, None)[:5]
    tables = [True] if cos is not None else [False] if positions is not None else [True, False]
    return [
        {"tokens": t, "heads": h, "warps": w, "table": table}
        for table in tables
        for t, h, w in tiles(axis, heads, q.shape[0] * q.shape[axis], node.attrs["dims"], table)
    ]


def tiles(
    axis: int, heads: int, tokens: int, dims: int, table: bool
) -> tuple[tuple[int, int, int], ...]:
    """Ways to cut the work into (tokens, heads, warps), most promising first.

    A tile of about 2048 pairs keeps two loads of 16 bytes in flight per thread of four warps;
    computing the angles takes registers, and then half of that. Where heads lie inside tokens
    (axis 1) a tile follows the heads; where tokens lie inside heads it follows the tokens, and
    takes a few heads along that use the same angles.
    """
    pairs, room, most = (_power(max(n, 1)) for n in (dims // 2, heads, tokens))
    found = []
    for size, warps in (
        ((2048, 4), (1024, 4), (4096, 8), (1024, 2)) if table else ((1024, 4), (512, 2))
    ):
        spots = max(size // pairs, 1)
        by_heads = min(room, spots, 8 if axis == 1 else 4)
        found.append((min(max(spots // by_heads, 1), most, 64), by_heads, warps))
    return tuple(dict.fromkeys(found))


def _power(n: int) -> int:
    """The smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def _type(region: Region, node: Node, slot: int) -> TensorType | None:
    value = (*node.inputs, None, None, None, None)[slot]
    return None if value is None else region.graph.types[value]


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.rope import Rotation, Way

    node, types = region.nodes[0], region.graph.types
    parts = parts_of(region)
    q, q_out, *others = [types[v] for part in parts for v in part]
    k, k_out = others or (None, None)
    way = Way(**{name: value for name, value in knobs.items() if name != "recipe"})
    cos, positions = _type(region, node, 2), _type(region, node, 4)
    rotation = Rotation(q, q_out, k, k_out, cos, positions, node.attrs, way, ctx.device)
    names = (*region.inputs, *region.outputs)
    at = [names.index(v) for part in parts for v in part]
    at += [-1] * (4 - len(at))
    at += [
        -1 if (i := maybe(region, v)) is None else i
        for v in (*node.inputs, None, None, None, None)[2:5]
    ]

    def run(*tensors: Any) -> None:
        given = (*tensors, None)  # the last stands for what is left out
        rotation(*[given[i] for i in at])

    return Kernel(run, writes=True, note="1 kernel")


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """q and k there and back, in one launch."""
    return modelled_seconds(region_cost(region), main_dtype(region), REACHED, False, target)


ROPE = Recipe("rope", _refuse, _build, _knobs, _seconds, build_s=0.4)
