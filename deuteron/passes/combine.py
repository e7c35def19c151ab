"""Nodes that were written apart become one operator, whose kernel makes fewer passes over memory.

**A loss and its gradient.** ``cross_entropy_with_grad``, which differentiation writes, computes the
loss of every position. If it reads the same operands as a ``cross_entropy`` and does not wait for
the result of that one (as the gradient of a squared loss does), that loss becomes the sum or mean
of the losses it computed.

**Rotary positions** as models write them, queries and keys together:

    x · cos + concat(−x[d/2:], x[:d/2]) · sin → rope(x)

with constant tables that hold every angle twice, which is what "rotate half" does. The operator
computes in float32 at least and rounds once, where the written form rounds each product; it reads q
and k once and writes them once. It is used only where a kernel takes it whole; elsewhere the parts
stay.

**Products of one input**, as the queries, keys and values of attention, are one product:

    linear(x, w), linear(x, v) → slices of linear(x, [w; v])

where no reader minds that the results are not apart in memory.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.ops.activated import activation_text
from deuteron.ops.cross_entropy import joined
from deuteron.ops.opdef import Fusion
from deuteron.passes.context import Context
from deuteron.passes.expand import cheapest


def can_wait(graph: Graph, values: Iterable[str], end: Node) -> bool:
    """Whether nothing reads the values before ``end``, the place where they will be made."""
    place = graph.places[end.outputs[0]]
    readers = (reader for value in values for reader in graph.users.get(value, ()))
    return all(graph.places[reader.outputs[0]] > place for reader in readers)


# ---- a loss and its gradient ---------------------------------------------------------------------


def join_cross_entropy(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with losses taken from the pass that computes their gradients."""
    made = {_operands(n): n for n in graph.nodes if n.op == "cross_entropy_with_grad"}
    losses = (n for n in graph.nodes if n.op == "cross_entropy" and _operands(n) in made)
    pairs = {n.output: made[_operands(n)] for n in losses}
    pairs = {v: grad for v, grad in pairs.items() if not _waits(graph, grad, {v, *ctx.later})}
    if not pairs:
        return graph
    build, names = start(graph, table.infer)

    def write(node: Node) -> None:
        """Emit a node after what it reads, which for a gradient stands further down."""
        if node.outputs[0] in names:
            return
        partner = pairs.get(node.outputs[0])
        for value in node.uses if partner is None else (*node.uses, partner.outputs[0]):
            if value not in names:
                write(graph.producer[value])
        inputs = [None if v is None else names[v] for v in node.inputs]
        if partner is None:
            names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))
            return
        b = Ops(build, node.source)
        x, target, weight = (None if v is None else b.sym(v) for v in (*inputs, None)[:3])
        assert x is not None and target is not None
        each = b.sym(names[partner.outputs[0]])
        loss = joined(b, each, x.type, target, weight, node.attrs)
        names[node.output] = b.to(loss, x.dtype).name
        ctx.fired["loss from its gradient's pass"] += 1

    for node in graph.nodes:
        write(node)
    return finish(build, names, graph)


def _operands(node: Node) -> tuple[object, ...]:
    """What the loss of each position depends on: logits, target, weight, z and attributes."""
    given = (*node.inputs, *[None] * 5)
    return given[:3], given[4], node.attrs["label_smoothing"], node.attrs["ignore_index"]


def _waits(graph: Graph, node: Node, values: set[str]) -> bool:
    """Whether a node depends on one of the values."""
    _, read = replace(graph, outputs=(("", node.outputs[0]),)).needed()
    return not values.isdisjoint(read)


# ---- rotary positions ----------------------------------------------------------------------------


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
    return cheapest("rope", given, (), {"axis": group[0].axis}, ctx) == "whole"


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
    """The axis of x along which the rows of the table differ, if it is a table that holds every
    angle twice; else None."""
    shape = (*[1] * (4 - data.ndim), *data.shape)
    half = data.shape[-1] // 2 if data.ndim else 0
    if data.ndim > 4 or shape[0] != 1 or shape[3] != x.shape[3] or x.shape[3] % 2:
        return None
    if not data.is_floating_point() or not torch.equal(data[..., :half], data[..., half:]):
        return None
    if shape[1] == 1 and shape[2] == x.shape[2]:
        return 2
    return 1 if shape[2] == 1 and shape[1] == x.shape[1] else None


def _paired(graph: Graph, found: Sequence[_Rotation]) -> list[list[_Rotation]]:
    """Pair rotations that follow each other and use the same tables: they are done together."""
    groups: list[list[_Rotation]] = []
    for rotation in found:
        alone = bool(groups) and len(groups[-1]) == 1
        if alone and _go_together(graph, groups[-1][0], rotation):
            groups[-1].append(rotation)
        else:
            groups.append([rotation])
    return groups


def _go_together(graph: Graph, q: _Rotation, k: _Rotation) -> bool:
    heads = 3 - q.axis
    shapes = [[n for d, n in enumerate(graph.types[r.x].shape) if d != heads] for r in (q, k)]
    alike = (q.cos, q.sin, q.axis) == (k.cos, k.sin, k.axis) and shapes[0] == shapes[1]
    alike = alike and graph.types[q.x].dtype == graph.types[k.x].dtype
    return alike and can_wait(graph, [q.total.output], k.total)


# ---- who reads what ------------------------------------------------------------------------------


def activation_after(graph: Graph, node: Node) -> tuple[Node, str] | None:
    """If an activation is the only reader of a node's first result, return it as a node and as an
    attribute; else None."""
    reader = only_reader(graph, node)
    text = None if reader is None else activation_text(reader.op, reader.attrs)
    return None if reader is None or text is None else (reader, text)


def only_reader(graph: Graph, node: Node) -> Node | None:
    """Return the only node that reads the first result; None if there are several, or it is an
    output."""
    value = node.outputs[0]
    readers = graph.users.get(value, ())
    return readers[0] if len(readers) == 1 and value not in graph.output_values else None


# ---- products of one input -----------------------------------------------------------------------

VIEWS = ("reshape", "permute", "slice", "attention", "rope")  # readers that take rows with gaps
FUSED = ("relu", "gelu")  # activations that a product's epilogue takes


def join_products(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with one product for several of the same input."""
    found: dict[str, list[Node]] = {}
    for node in graph.nodes:
        known = node.op == "linear" and all(v in graph.constants for v in node.uses[1:])
        if known and all(_takes_gaps(n, ctx) for n in graph.users.get(node.output, (node,))):
            found.setdefault(node.uses[0], []).append(node)
    groups = [nodes for nodes in found.values() if len(nodes) > 1]
    if not groups:
        return graph
    build, names = start(graph, table.infer)
    group_of = {node.output: nodes for nodes in groups for node in nodes}
    for node in graph.nodes:
        nodes = group_of.get(node.output if node.op == "linear" else "", [])
        if not nodes:
            carry(build, names, node, graph)
        elif node is nodes[0]:
            ops = Ops(build)
            whole = ops.linear(ops.sym(names[node.uses[0]]), *_together(graph, ops, nodes))
            at = 0
            for each in nodes:
                end = at + graph.types[each.output].shape[-1]
                names[each.output] = ops.slice(whole, axis=-1, start=at, stop=end).name
                at = end
            ctx.fired["products of one input"] += len(nodes)
    return finish(build, names, graph)


def _takes_gaps(reader: Node, ctx: Context) -> bool:
    if reader.op in VIEWS or not ctx.target.is_cuda:
        return reader.op in VIEWS  # on a CPU, products take what follows them as an epilogue
    return table.get(reader.op).fusion is Fusion.ELEMENTWISE and reader.op not in FUSED


def _together(graph: Graph, ops: Ops, nodes: Sequence[Node]) -> list[Sym]:
    """The weights of products one below the other, and their biases, zeros where one has none."""
    weights = [graph.constants[node.uses[1]].data for node in nodes]
    made = [ops.constant(torch.cat(weights), "weights")]
    if any(len(node.uses) > 2 for node in nodes):
        biases = [
            graph.constants[node.uses[2]].data if len(node.uses) > 2 else weight.new_zeros(size)
            for node, weight, size in zip(nodes, weights, map(len, weights), strict=True)
        ]
        made.append(ops.constant(torch.cat(biases), "biases"))
    return made
