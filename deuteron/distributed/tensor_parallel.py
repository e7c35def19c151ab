"""Finds the matrix products that ranks can share, each computing some of the features.

Ranks can share a product by a weight *by columns*, each computing some of the result's features, if
everything up to the next products works on each feature, or each head, alone. The products that
read the outcome are shared *by rows*: each rank multiplies the features that it has, and the sum
over ranks is the result. So ranks communicate twice for each such pair: in the forward pass for
that sum, and in the backward pass for the gradient of what the products by columns read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from deuteron.ir.graph import Graph, Node
from deuteron.ops import table
from deuteron.ops.opdef import Fusion

PRODUCTS = ("matmul", "linear")
PER_FEATURE = (Fusion.ELEMENTWISE, Fusion.BROADCAST, Fusion.INJECTIVE)
PER_HEAD = ("attention", "softmax", "rope")


@dataclass
class Shared:
    """A group of products that ranks share: those by ``columns``, which all read the value ``x``,
    those by ``rows`` that follow, and the values ``between`` them. ``weights``: the graph's inputs
    of which each rank has a part."""

    x: str
    columns: list[Node]
    rows: list[Node] = field(default_factory=list)
    between: set[str] = field(default_factory=set)
    weights: set[str] = field(default_factory=set)

    @property
    def nodes(self) -> list[Node]:
        return [*self.columns, *self.rows]


def shared(graph: Graph, params: Collection[str], ranks: int) -> list[Shared]:
    """All groups of products in a forward graph that ``ranks`` many ranks can share."""
    known = set(params)
    weights: dict[str, list[str]] = {}  # product's output → the parameters it multiplies by
    for node in graph.nodes:
        if node.op in PRODUCTS:
            owners = [p for v in node.uses[1:] if (p := _parameter(graph, v, known))]
            if owners:
                weights[node.output] = owners
    groups: dict[str, Shared] = {}
    for node in graph.nodes:
        if node.op in PRODUCTS and node.output in weights:
            x = _seen(graph, node.uses[0])
            groups.setdefault(x, Shared(x, [])).columns.append(node)
    taken: set[str] = set()
    found = []
    for group in groups.values():
        group.columns = [node for node in group.columns if node.output not in taken]
        if group.columns and _follow(graph, group, weights, known, ranks):
            for node in group.nodes:
                whole = node in group.rows  # their bias is whole: it is added once, to the sum
                owned = (p for p in weights[node.output] if not whole or graph.types[p].rank > 1)
                group.weights.update(owned)
            taken.update(node.output for node in group.rows)
            found.append(group)
    return found


def _seen(graph: Graph, value: str) -> str:
    """The value that this one is a reshape or copy of, or itself."""
    while (node := graph.producer.get(value)) is not None and node.op in ("reshape", "to_layout"):
        value = node.uses[0]
    return value


def _parameter(graph: Graph, value: str, params: Collection[str]) -> str | None:
    """The parameter that a value is, perhaps transposed, reshaped or cast; else None."""
    while (node := graph.producer.get(value)) is not None:
        if node.op not in ("permute", "reshape", "cast"):
            return None
        value = node.uses[0]
    return value if value in params else None


def _follow(
    graph: Graph, group: Shared, weights: dict[str, list[str]], params: set[str], ranks: int
) -> bool:
    """Fill in the rest of a group from its products by columns. Return whether ranks can divide all
    that is computed from them until products by rows read it."""
    own = {node.output for node in group.columns}
    if any(graph.types[v].shape[-1] % ranks for v in own):
        return False
    group.between |= own
    results = graph.output_values
    for node in graph.nodes:
        read = [v for v in node.uses if v in group.between]
        if not read or not own.isdisjoint(node.outputs):
            continue
        if node.op in PRODUCTS and node.outputs[0] in weights:
            if read != [node.uses[0]]:
                return False
            group.rows.append(node)
            continue
        if not _divides(graph, node, group.between, params, ranks):
            return False
        wide = {graph.types[v].shape[-1] for v in own}
        added = (p for v in node.uses if (p := _parameter(graph, v, params)) is not None)
        group.weights.update(p for p in added if graph.types[p].shape in {(n,) for n in wide})
        group.between.update(node.outputs)
    return bool(group.rows) and group.between.isdisjoint(results)


def _divides(
    graph: Graph, node: Node, between: set[str], params: Collection[str], ranks: int
) -> bool:
    """Whether each rank can compute its part of a node by itself."""
    name = node.attrs["target"] if node.op == "aten" else node.op
    if any(word in name for word in PER_HEAD):
        heads = graph.types[node.uses[0]]
        return heads.rank < 3 or heads.shape[1] % ranks == 0
    if node.op in PRODUCTS:  # scores and values of attention that is written out
        return all(v in between for v in node.uses[:2])
    if table.get(node.op).fusion not in PER_FEATURE:
        return False
    largest = max(graph.types[v].numel for v in node.uses if v in between)
    others = [v for v in node.uses if v not in between and v not in graph.constants]
    return all(
        graph.types[v].numel < largest or _parameter(graph, v, params) is not None for v in others
    )
