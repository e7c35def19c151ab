"""Batch norm in training takes along what follows it: ``batch_norm_train``, a sum and an activation
become one ``batch_norm_act``, whose gradient is one operator too.

    act(batch_norm_train(x) + residual) → batch_norm_act(x, residual, activation=act)

It happens before differentiation. Afterwards it would be too late: the parts have gradients of
their own by then, which pass over memory once each.
"""

from __future__ import annotations

from typing import NamedTuple

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ops import table
from deuteron.ops.activated import activation_text


class _Chain(NamedTuple):
    """A norm, the sum that alone reads what it makes, if there is one, the last node of the chain,
    and the activation that this is, or "none"."""

    norm: Node
    total: Node | None
    last: Node
    activation: str = "none"

    @property
    def residual(self) -> str | None:
        if self.total is None:
            return None
        return next(v for v in self.total.uses if v != self.norm.outputs[0])


def join_batch_norm(graph: Graph) -> Graph:
    """``graph`` with every ``batch_norm_train`` joined with what follows it."""
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    ends: dict[int, _Chain] = {}
    for node in graph.nodes:
        if node.op != "batch_norm_train":
            continue
        chain = _chain(graph, node)
        if id(chain.last) in ends:  # the sum of two norms: it goes with the first
            chain = _Chain(node, None, node)
        if _statistics_can_wait(graph, chain, order):
            ends[id(chain.last)] = chain
    if not ends:
        return graph
    inside = {id(n) for c in ends.values() for n in (c.norm, c.total) if n is not None} - set(ends)
    build, names = start(graph, table.infer)
    for node in graph.nodes:
        if id(node) in inside:
            continue
        found = ends.get(id(node))
        if found is None:
            carry(build, names, node, graph)
            continue
        norm = found.norm
        inputs = [*norm.inputs, *[None] * (5 - len(norm.inputs)), found.residual]
        while inputs[-1] is None:
            inputs.pop()
        made = build.emit(
            "batch_norm_act",
            [None if v is None else names[v] for v in inputs],
            {**norm.attrs, "activation": found.activation},
            source=node.source or norm.source,
        )
        names.update(zip((node.outputs[0], *norm.outputs[1:]), made, strict=True))
    return finish(build, names, graph)


def _chain(graph: Graph, norm: Node) -> _Chain:
    total = _only_reader(graph, norm)
    if total is not None:
        kinds = {(graph.types[v].shape, graph.types[v].dtype) for v in (*total.uses, total.output)}
        if total.op != "add" or len(kinds) > 1 or total.uses[0] == total.uses[1]:
            total = None
    after = activation_after(graph, total or norm)
    return _Chain(norm, total, total or norm) if after is None else _Chain(norm, total, *after)


def activation_after(graph: Graph, node: Node) -> tuple[Node, str] | None:
    """The activation that alone reads the first result of a node, as a node and as an attribute."""
    reader = _only_reader(graph, node)
    text = None if reader is None else activation_text(reader.op, reader.attrs)
    return None if reader is None or text is None else (reader, text)


def _only_reader(graph: Graph, node: Node) -> Node | None:
    """The one node that reads the first result, if nothing else does."""
    value = node.outputs[0]
    readers = graph.users.get(value, ())
    return readers[0] if len(readers) == 1 and value not in graph.output_values else None


def _statistics_can_wait(graph: Graph, chain: _Chain, order: dict[int, int]) -> bool:
    """Whether nobody reads the statistics before the end of the chain, which is to make them."""
    end = order[id(chain.last)]
    return all(
        order[id(reader)] > end
        for value in chain.norm.outputs[1:]
        for reader in graph.users.get(value, ())
    )
