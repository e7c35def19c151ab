"""Rotary positions in one launch: the recipe around ``kernels/triton/rope.py``."""

from collections.abc import Sequence

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.triton.common import MOST, one_operator, streamed, tensors_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.target import Target

REACHED = 0.85  # part of the bandwidth of a copy


def _refuse(region: Region, node: Node, target: Target) -> None:
    types = region.graph.types
    q, first = types[node.uses[0]], "to_layout(x) first"
    many = q.numel // q.shape[3] > MOST
    refuse_if(many, f"{q} has more rows than 32 bits count", "split the batch")
    for t in (types[v] for v in (*node.inputs[:2], *region.outputs) if v is not None):
        apart = t.strides[3] != 1 and t.shape[3] > 1
        refuse_if(apart, f"the features of {t} are not adjacent", first)
    apart = any(not types[v].is_layout("contiguous") for v in node.inputs[2:] if v is not None)
    refuse_if(apart, "a table or the positions are not contiguous", first)


def parts_of(region: Region) -> list[tuple[str, str]]:
    """Pairs (input, output) for q and for k, if the result is an output of the region."""
    node = region.nodes[0]
    pairs = zip((v for v in node.inputs[:2] if v is not None), node.outputs, strict=True)
    return [(source, out) for source, out in pairs if out in region.outputs]


def tables_of(node: Node) -> tuple[str | None, ...]:
    """cos, sin and positions, None where there are none."""
    return (*node.inputs, None, None, None, None)[2:5]


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    node, types = region.nodes[0], region.graph.types
    axis, q = node.attrs["axis"], types[node.uses[0]]
    heads = max(types[source].shape[3 - axis] for source, _ in parts_of(region))
    cos, _, positions = tables_of(node)
    tables = [True] if cos is not None else [False] if positions is not None else [True, False]
    sizes = (axis, heads, q.shape[0] * q.shape[axis], node.attrs["dims"])
    ways = ((*tile, table) for table in tables for tile in tiles(*sizes, table))
    return [{"tokens": t, "heads": h, "warps": w, "table": table} for t, h, w, table in ways]


def tiles(axis: int, heads: int, tokens: int, dims: int, table: bool) -> list[tuple[int, int, int]]:
    """Ways to cut the work into (tokens, heads, warps), most promising first.

    A tile of about 2048 pairs keeps two loads of 16 bytes in flight per thread of four warps;
    computing the angles takes registers, and then half of that. Where heads lie inside tokens
    (axis 1) a tile follows the heads; where tokens lie inside heads it follows the tokens, and
    takes a few heads along that use the same angles.
    """
    pairs, room, most = (power_of_two(max(n, 1)) for n in (dims // 2, heads, tokens))
    ways, found = ((2048, 4), (1024, 4), (4096, 8), (1024, 2)), []
    for size, warps in ways if table else ((1024, 4), (512, 2)):
        spots = max(size // pairs, 1)
        by_heads = min(room, spots, 8 if axis == 1 else 4)
        found.append((min(max(spots // by_heads, 1), most, 64), by_heads, warps))
    return list(dict.fromkeys(found))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.rope import prepare_rope

    node, types = region.nodes[0], region.graph.types
    parts, (cos, sin, positions) = parts_of(region), tables_of(node)
    pairs = [(types[source], types[out]) for source, out in parts]
    angles, places = types.get(cos or ""), types.get(positions or "")
    rotate = prepare_rope(pairs, angles, places, node.attrs, knobs, ctx.device)
    (q, q_out), (k, k_out) = (*parts, (None, None))[:2]
    given = tensors_of(region, (q, k, q_out, k_out, cos, sin, positions))
    return Kernel(lambda *tensors: rotate(*given(tensors)), writes=True, note="1 kernel")


ROPE = one_operator("rope", ("rope",), _refuse, _knobs, streamed(REACHED), _build)
