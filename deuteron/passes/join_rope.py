"""Rotary positions as models write them become one operator, queries and keys together:

    x · cos + concat(−x[d/2:], x[:d/2]) · sin → rope(x)

with tables that are known now and hold every angle twice, which is what "rotate half" does. The
operator computes in float32 at least and rounds once, where the written form rounds each product;
it reads q and k once and writes them once. Only where a kernel takes it: elsewhere the parts
stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.passes.context import Context
from deuteron.passes.expand import cheapest


class _Rotation(NamedTuple):
    """A sum that rotates x; ``axis`` is that of the positions."""

    total: Node
    x: str
    cos: str
    sin: str
    axis: int


def join_rope(graph: Graph, ctx: Context) -> Graph:
    found = [r for node in graph.nodes if (r := _rotation(graph, node)) is not None]
    groups = [group for group in _paired(graph, found) if _is_cheaper(graph, group, ctx)]
    if not groups:
        return graph
    ends = {id(group[-1].total): group for group in groups}
    inside = {id(r.total) for group in groups for r in group} - set(ends)
    build, names = start(graph, table.infer)
    tables: dict[str, str] = {}

    def half(value: str) -> str:
        """The table [positions, dims/2] for one that holds every angle twice."""
        if value not in tables:
            full = graph.constants[value].data
            rows = full.reshape(-1, full.shape[-1])[:, : full.shape[-1] // 2]
            tables[value] = build.constant(rows.contiguous(), f"{value}_half")
        return tables[value]

    for node in graph.nodes:
        if id(node) in inside:
            continue
        group = ends.get(id(node))
        if group is None:
            carry(build, names, node, graph)
            continue
        q, *rest = (names[r.x] for r in group)
        inputs = [q, rest[0] if rest else None, half(group[0].cos), half(group[0].sin)]
        made = build.emit("rope", inputs, {"axis": group[0].axis}, source=node.source)
        names.update(zip((r.total.output for r in group), made, strict=True))
    ctx.fired["rotary positions"] += len(groups)
    return finish(build, names, graph)


def _is_cheaper(graph: Graph, group: Sequence[_Rotation], ctx: Context) -> bool:
    """Whether a kernel takes the rotation whole, for less than the parts cost."""
    types = [graph.types[r.x] for r in group]
    rows, width = types[0].shape[group[0].axis], types[0].shape[-1]
    angles = TensorType.of((rows, width // 2), graph.types[group[0].cos].dtype)
    given = [types[0], types[1] if len(types) > 1 else None, angles, angles]
    return cheapest("rope", given, {"axis": group[0].axis}, ctx) == "whole"


# ---- what it looks like --------------------------------------------------------------------------


def _rotation(graph: Graph, node: Node) -> _Rotation | None:
    if node.op != "add":
        return None
    for straight, turned in (node.uses, node.uses[::-1]):
        one, two = _times_constant(graph, straight), _times_constant(graph, turned)
        if one is None or two is None or _turned_from(graph, two[0]) != one[0]:
            continue
        x, cos, sin = one[0], one[1], two[1]
        kind, out = graph.types[x], graph.types[node.output]
        if kind.rank != 4 or (kind.shape, kind.dtype) != (out.shape, out.dtype):
            continue
        axes = [_position_axis(graph.constants[t].data, kind) for t in (cos, sin)]
        if axes[0] is not None and axes[0] == axes[1]:
            return _Rotation(node, x, cos, sin, axes[0])
    return None


def _times_constant(graph: Graph, value: str) -> tuple[str, str] | None:
    """(x, constant) where ``value`` is their product."""
    node = graph.producer.get(value)
    if node is None or node.op != "mul":
        return None
    for x, constant in (node.uses, node.uses[::-1]):
        if constant in graph.constants and x not in graph.constants:
            return x, constant
    return None


def _turned_from(graph: Graph, value: str) -> str | None:
    """x, where ``value`` is concat(−x[d/2:], x[:d/2]) along the last axis."""
    node = graph.producer.get(value)
    if node is None or node.op != "concat" or len(node.uses) != 2:
        return None
    minus, first = (graph.producer.get(v) for v in node.uses)
    second = None if minus is None or minus.op != "neg" else graph.producer.get(minus.uses[0])
    if first is None or second is None or first.op != "slice" or second.op != "slice":
        return None
    last, size = graph.types[value].rank - 1, graph.types[value].shape[-1]
    wanted = ((first, 0, size // 2), (second, size // 2, size))
    for part, begin, end in wanted:
        a = part.attrs
        if (a["axis"], a["start"], a["stop"], a["step"]) != (last, begin, end, 1):
            return None
    same = first.uses[0] == second.uses[0] and node.attrs["axis"] == last
    return first.uses[0] if same else None


def _position_axis(data: torch.Tensor, x: TensorType) -> int | None:
    """The axis of x whose rows the table tells apart, if it is a table with every angle twice."""
    shape = (*[1] * (4 - data.ndim), *data.shape)
    half = data.shape[-1] // 2 if data.ndim else 0
    if data.ndim > 4 or shape[0] != 1 or shape[3] != x.shape[3] or x.shape[3] % 2:
        return None
    if not data.is_floating_point() or not torch.equal(data[..., :half], data[..., half:]):
        return None
    if shape[1] == 1 and shape[2] == x.shape[2]:
        return 2
    return 1 if shape[2] == 1 and shape[1] == x.shape[1] else None


# ---- queries and keys ----------------------------------------------------------------------------


def _paired(graph: Graph, found: Sequence[_Rotation]) -> Iterator[list[_Rotation]]:
    """Two that follow each other, by the same tables, are rotated together."""
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    waiting: _Rotation | None = None
    for rotation in found:
        if waiting is not None and _go_together(graph, waiting, rotation, order):
            yield [waiting, rotation]
            waiting = None
            continue
        if waiting is not None:
            yield [waiting]
        waiting = rotation
    if waiting is not None:
        yield [waiting]


def _go_together(graph: Graph, q: _Rotation, k: _Rotation, order: dict[int, int]) -> bool:
    heads = 3 - q.axis
    shapes = [[n for d, n in enumerate(graph.types[r.x].shape) if d != heads] for r in (q, k)]
    alike = (q.cos, q.sin, q.axis) == (k.cos, k.sin, k.axis) and shapes[0] == shapes[1]
    end = order[id(k.total)]
    readers = graph.users.get(q.total.output, ())
    waits = all(order[id(reader)] > end for reader in readers)
    return alike and waits and graph.types[q.x].dtype == graph.types[k.x].dtype
