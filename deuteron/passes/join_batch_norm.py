"""Batch norm in training takes along what follows it: ``batch_norm_train``, a sum and an activation
become one ``batch_norm_act``, whose gradient is one operator too.

    act(batch_norm_train(x) + residual) → batch_norm_act(x, residual, activation=act)

It happens before differentiation. Afterwards it would be too late: the parts have gradients of
their own by then, which pass over memory once each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, start
from deuteron.ops import table
from deuteron.ops.batch_norm import ACTIVATIONS

BENDING = tuple(name for name in ACTIVATIONS if name != "none")


class _Chain(NamedTuple):
    """A norm, and the sum and the activation that alone read what it makes, if they are there."""

    norm: Node
    total: Node | None
    act: Node | None

    @property
    def last(self) -> Node:
        return self.act or self.total or self.norm

    @property
    def residual(self) -> str | None:
        if self.total is None:
            return None
        first, second = self.total.uses
        return second if first == self.norm.outputs[0] else first


def join_batch_norm(graph: Graph) -> Graph:
    """``graph`` with every ``batch_norm_train`` joined with what follows it."""
    order = {id(node): i for i, node in enumerate(graph.nodes)}
    ends: dict[int, _Chain] = {}
    for node in graph.nodes:
        if node.op != "batch_norm_train":
            continue
        chain = _chain(graph, node)
        if id(chain.last) in ends:  # the sum of two norms: it goes with the first
            chain = _Chain(node, None, None)
        if _statistics_can_wait(graph, chain, order):
            ends[id(chain.last)] = chain
    if not ends:
        return graph
    chains = list(ends.values())
    inside = {id(n) for c in chains for n in (c.norm, c.total) if n is not None} - set(ends)
    build, names = start(graph, table.infer)
    for node in graph.nodes:
        if id(node) in inside:
            continue
        found = ends.get(id(node))
        if found is None:
            carry(build, names, node, graph)
            continue
        norm, act = found.norm, found.act
        given = [*norm.inputs, *[None] * (5 - len(norm.inputs)), found.residual]
        attrs = dict(norm.attrs)
        if act is not None:
            attrs |= bend_of(act)
        inputs = [None if v is None else names[v] for v in given]
        while inputs[-1] is None:
            inputs.pop()
        made = build.emit("batch_norm_act", inputs, attrs, source=node.source or norm.source)
        stand_for = (node.outputs[0], *norm.outputs[1:])
        names.update(zip(stand_for, made, strict=True))
    for name, value in graph.outputs:
        build.output(name, names[value])
    return build.finish()


def bend_of(act: Node) -> dict[str, Any]:
    """An activation as the attributes of the operator that takes it along."""
    slope = {"slope": act.attrs["negative_slope"]} if act.op == "leaky_relu" else {}
    return {"activation": act.op, **slope}


def _chain(graph: Graph, norm: Node) -> _Chain:
    total = only_reader(graph, norm, "add")
    if total is not None:
        kinds = [(graph.types[v].shape, graph.types[v].dtype) for v in (*total.uses, total.output)]
        if len(set(kinds)) > 1 or total.uses[0] == total.uses[1]:
            total = None
    return _Chain(norm, total, only_reader(graph, total or norm, *BENDING))


def only_reader(graph: Graph, node: Node, *ops: str) -> Node | None:
    """The one node that reads the first result, if it is one of ``ops``."""
    value = node.outputs[0]
    readers = graph.users.get(value, ())
    if len(readers) != 1 or value in graph.output_values or readers[0].op not in ops:
        return None
    return readers[0]


def _statistics_can_wait(graph: Graph, chain: _Chain, order: dict[int, int]) -> bool:
    """Whether nobody reads the statistics before the end of the chain, which is to make them."""
    end = order[id(chain.last)]
    return all(
        order[id(reader)] > end
        for value in chain.norm.outputs[1:]
        for reader in graph.users.get(value, ())
    )
