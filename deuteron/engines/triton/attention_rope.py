"""Rotary positions before attention in one region: what the kernels of attention need to know.

The kernel rotates ("turns") queries once, as it loads them. It may rotate keys as well ("qk"), but
then every block of queries rotates them anew, which pays if there are few blocks. Or the kernel of
rope rotates the keys before ("q"): one more launch, but each key is rotated once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from deuteron.engines.base import BuildContext, refuse_if
from deuteron.engines.match import operands
from deuteron.engines.triton.common import tensors_of
from deuteron.engines.triton.rope import ROPE, tables_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops.attention import seen_pairs
from deuteron.ops.rope import known_tables
from deuteron.policy import Policy
from deuteron.target import Target

OP, AXIS = "rope", 2  # heads come before positions
LANES = (16, 32, 64, 128, 256)  # numbers of features whose halves fill lanes
# What rotating a number costs, in operations of vector units: about 5 instructions, and 8 bytes
# that pass through shared memory, which takes as long as 16 operations. Calculated, not measured.
TURNING = 25.0


class Turns(NamedTuple):
    """The nodes of a region that rotate the queries and the keys of its attention, if any."""

    q: Node | None
    k: Node | None


def turns(region: Region) -> Turns:
    made = {v: node for node in region.nodes[:-1] for v in node.outputs}
    given = operands(region.nodes[-1])
    return Turns(made.get(given["q"]), made.get(given["k"]))


def ways(region: Region) -> tuple[str, ...]:
    """What the kernel may rotate as it loads it: nothing, queries, or both."""
    found = turns(region)
    if found.q is None:
        return ("",)
    written = operands(region.nodes[-1])["k"] in region.outputs
    return ("q",) if found.k is None or written else ("q", "qk")


def read(region: Region, way: str) -> dict[str, str]:
    """What the kernel reads, by name; for operands that it rotates itself, the unrotated value."""
    given = operands(region.nodes[-1])
    for name, node in turns(region)._asdict().items():
        if node is not None and name in way:
            given[name] = _source(node, given[name])
    return given


def _source(node: Node, value: str) -> str:
    return [v for v in node.inputs[:2] if v is not None][node.outputs.index(value)]


def refuse(region: Region) -> None:
    """Refuse rotations that kernels of attention cannot do."""
    found = turns(region)
    for node in region.nodes[:-1]:
        ours = node.op == OP and node in found and found.q is not None
        refuse_if(not ours, "is not attention alone", quiet=True)
        a, types = node.attrs, region.graph.types
        features, positions = types[node.outputs[0]].shape[3], tables_of(node)[2]
        refuse_if(a["axis"] != AXIS, "positions come before heads", "permute before rope")
        odd = features not in LANES or a["dims"] != features
        refuse_if(odd, f"turns {a['dims']} of {features} features", "run rope by itself")
        refuse_if(positions is not None, "goes by a tensor of positions", "run rope by itself")
        refuse_if(a["inverse"], "turns back, as a gradient does", "run rope by itself")
        for t in [types[v] for v in node.inputs[2:4] if v is not None]:
            known = t.is_layout("contiguous") and t.dtype.bits <= 32
            refuse_if(
                not known, f"{t} is no table in row-major order of 32 bits at most", "copy it"
            )
    kinds = {node.attrs["interleaved"] for node in found if node is not None}
    refuse_if(len(kinds) > 1, "turns other pairs of q than of k")


class Angles(NamedTuple):
    """The rows of the first positions of q and k in their tables, whether pairs are neighbours, and
    a function that picks the tables from the arguments of a call."""

    q_row: int
    k_row: int
    neighbours: bool
    tables: Callable[..., list[Any]]


def angles(region: Region, way: str, device: torch.device) -> Angles:
    """The angles for what the kernel rotates as it loads it. Tables that rope would compute are
    computed here."""
    rows, values, known, neighbours = [0, 0], list[str | None](), list[Any](), False
    for i, (name, node) in enumerate(turns(region)._asdict().items()):
        pair: Sequence[str | None] = (None, None)
        made: Sequence[torch.Tensor | None] = (None, None)
        if node is not None and name in way:
            a, pair, neighbours = node.attrs, tables_of(node)[:2], node.attrs["interleaved"]
            if pair[0] is None:
                length = region.graph.types[node.outputs[0]].shape[AXIS]
                exact = known_tables(length, a["dims"], a["base"], a["offset"])
                made = [t.to(device, torch.float32) for t in exact]
            else:
                rows[i] = a["offset"]
        values, known = [*values, *pair], [*known, *made]
    get = tensors_of(region, values)

    def tables(tensors: Any) -> list[Any]:
        both = zip(get(tensors), known, strict=True)
        return [given if made is None else made for given, made in both]

    return Angles(rows[0], rows[1], neighbours, tables)


def _of_keys(region: Region) -> Region | None:
    """The rotation of the keys as a region of its own."""
    node, value = turns(region).k, operands(region.nodes[-1])["k"]
    if node is None:
        return None
    alone = replace(node, inputs=(_source(node, value), None, *node.inputs[2:]), outputs=(value,))
    graph = region.graph.only([alone], alone.uses, ((value, value),), {})
    return Region(graph, region.constants & {*graph.inputs}, 0)


def keys_rotated_ahead(region: Region, way: str, ctx: BuildContext) -> Callable[..., Any] | None:
    """A function that rotates the keys among the arguments of a call and returns them; None if they
    are rotated as they are loaded, or not at all."""
    keys = _of_keys(region) if way == "q" else None
    if keys is None:
        return None
    knobs = ROPE.knobs(keys, ctx.target, ctx.policy)[0]
    turn, kind = ROPE.build(keys, knobs, ctx), keys.graph.types[keys.outputs[0]]
    get = tensors_of(region, (*keys.inputs, *keys.outputs))

    def run(tensors: Any) -> Any:
        *given, out = get(tensors)
        if out is None:  # nothing else reads the rotated keys
            out = given[0].new_empty_strided(kind.shape, kind.strides)
        turn.fn(*given, out)
        return out

    return run


def seconds(
    region: Region, way: str, queries: int, keys: int, target: Target
) -> tuple[float, float]:
    """The seconds that rotating adds inside the kernel, with blocks of so many queries and keys,
    and those that it adds before the kernel, where keys are rotated ahead."""
    types, found = region.graph.types, operands(region.nodes[-1])
    if not way:
        return 0.0, 0.0
    batch, heads, lines, features = types[found["q"]].shape
    length = types[found["k"]].shape[2]
    blocks = -(-lines // queries)
    turned = float(blocks * queries)
    if way == "qk":
        seen = seen_pairs(lines, length, region.nodes[-1].attrs) / lines
        turned += blocks * min(seen + keys, -(-length // keys) * keys)
    rate = target.rate("f32", product=False)
    inside = TURNING * batch * heads * features * turned / rate
    alone = _of_keys(region) if way == "q" else None
    if alone is None:
        return inside, 0.0
    return inside, ROPE.seconds(alone, target, ROPE.knobs(alone, target, Policy())[0])
