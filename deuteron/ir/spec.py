"""The checker that runs between stages: a graph that breaks a rule goes no further."""

from typing import Any

from deuteron.errors import DeuteronError, GraphError
from deuteron.ir.builder import Infer
from deuteron.ir.graph import Graph
from deuteron.ir.types import same_strides

# id of a node → the node and the types of its inputs and results, as a check accepted them.
Right = dict[int, tuple[Any, ...]]


def check(graph: Graph, infer: Infer, stage: str = "", right: Right | None = None) -> Graph:
    """Return ``graph`` if it is well formed, else raise GraphError naming the first fault.

    Every value is made once and before it is read; every value has a type; every node's
    operator exists and infers the types that the graph says (strides may be refined by the
    layout pass only where the memory order stays dense). ``right`` holds what earlier checks, of
    other graphs too, accepted: such nodes are not inferred again. This check adds what it accepts.
    """
    right = {} if right is None else right
    where = f"graph {graph.name!r}" + (f" after {stage}" if stage else "")
    known = set(graph.inputs)
    if len(known) != len(graph.inputs):
        raise GraphError("an input is listed twice", where=where)
    for name in graph.inputs:
        if name not in graph.types:
            raise GraphError(f"input {name!r} has no type", where=where)
    for name, constant in graph.constants.items():
        if name in known:
            raise GraphError(f"value {name!r} is both input and constant", where=where)
        if (said := graph.types.get(name)) != constant.type:
            wrong = f"constant {name!r} is {constant.type}, the graph says {said}"
            raise GraphError(wrong, where=where)
        known.add(name)
    for index, node in enumerate(graph.nodes):
        uses = node.uses
        same = (node, *map(graph.types.get, (*uses, *node.outputs)))
        in_order = known.issuperset(uses) and known.isdisjoint(node.outputs)
        if in_order and right.get(id(node)) == same:
            known.update(node.outputs)
            continue
        here = f"{where}, node {index} ({node.op} → {', '.join(node.outputs)})"
        for value in uses:
            if value not in known:
                wrong = f"{node.op} reads {value!r} before it is made"
                raise GraphError(wrong, where=here, remedy="list nodes in an order that runs")
        try:
            attrs, types = infer(node.op, graph.in_types(node), node.attrs)
        except DeuteronError as error:
            raise error.at(here) from None
        if attrs != node.attrs:
            raise GraphError(f"attributes {node.attrs} should be {attrs}", where=here)
        if len(types) != len(node.outputs):
            wrong = f"{node.op} makes {len(types)} results, {len(node.outputs)} are named"
            raise GraphError(wrong, where=here)
        for value, inferred in zip(node.outputs, types, strict=True):
            if value in known:
                raise GraphError(f"value {value!r} is made twice", where=here)
            known.add(value)
            said = graph.types.get(value)
            if said is None:
                raise GraphError(f"value {value!r} has no type", where=here)
            alike = (said.shape, said.dtype) == (inferred.shape, inferred.dtype)
            if not (alike and same_strides(said.shape, said.strides, inferred.strides)):
                wrong = f"{value!r} is {inferred} by inference, the graph says {said}"
                raise GraphError(wrong, where=here)
        right[id(node)] = same
    if len({name for name, _ in graph.outputs}) != len(graph.outputs):
        raise GraphError("two outputs have one name", where=where)
    for name, value in graph.outputs:
        if value not in known:
            raise GraphError(f"output {name!r} is {value!r}, which nothing makes", where=where)
    if set(graph.types) != known:
        extra = sorted(set(graph.types) - known)[:5]
        raise GraphError(f"types for values that do not exist: {extra}", where=where)
    return graph
