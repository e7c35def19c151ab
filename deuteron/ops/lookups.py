"""Trace the index of a lookup (an operator that picks elements by index) to where it comes from."""

from __future__ import annotations

from collections.abc import Mapping

from deuteron.ir.graph import Constant, Graph, Node

LOOKUPS = ("embedding", "index_select", "gather")
INDEX = 1  # the slot of the index among the inputs of each of these operators
SAME = ("reshape", "permute", "transpose", "expand", "squeeze", "unsqueeze", "to_layout")


def root_of(
    value: str, made: Mapping[str, Node], constants: Mapping[str, Constant], size: int
) -> tuple[str, bool]:
    """Follow an index back to the first value that has the same numbers. Return that value, and
    whether its negative numbers count from the end of ``size``. If the value is itself in ``made``,
    a node computes it."""
    wraps = False
    while value in made:
        node = made[value]
        if node.op in SAME:
            value = node.uses[0]
            continue
        counted = None if wraps else _counted_from_end(node, made, constants, size)
        if counted is None:
            return value, wraps
        value, wraps = counted, True
    return value, wraps


def computed_indices(graph: Graph, of_several: bool) -> dict[str, set[str]]:
    """Map each index that a graph computes to the values on the way from it to the results of the
    lookups that use it. ``of_several``: only indices made by a ``where``, as the index into several
    dimensions is, which is out of range if one of the indices that it is made of is."""
    found: dict[str, set[str]] = {}
    for node in graph.nodes:
        if node.op not in LOOKUPS:
            continue
        index = str(node.inputs[INDEX])
        size = size_of(node, graph.types[node.uses[0]].shape)
        root, _ = root_of(index, graph.producer, graph.constants, size)
        made = graph.producer.get(root)
        if made is not None and (not of_several or made.op == "where"):
            between, left = found.setdefault(root, set()), [index]
            between.add(node.outputs[0])
            while left:
                value = left.pop()
                if value != root and value in graph.producer:
                    between.add(value)
                    left += graph.producer[value].uses
    return found


def _counted_from_end(
    node: Node, made: Mapping[str, Node], constants: Mapping[str, Constant], size: int
) -> str | None:
    """Return i if a node computes where(i < 0, i + size, i), else None."""
    if node.op != "where" or not all(v in made for v in node.uses[:2]):
        return None
    below, shifted, index = made[node.uses[0]], made[node.uses[1]], node.uses[2]

    def is_(made: Node, op: str, number: int) -> bool:
        known = constants.get(made.uses[-1])
        alone = known is not None and known.data.numel() == 1 and known.data.item() == number
        return made.op == op and made.uses[0] == index and alone

    return index if is_(below, "lt", 0) and is_(shifted, "add", size) else None


def size_of(node: Node, shape: tuple[int, ...]) -> int:
    """How many rows a lookup picks from, if it picks from a value of this shape."""
    if node.op == "embedding":
        return shape[0]
    axis: int = node.attrs.get("axis", min(1, len(shape) - 1))
    return shape[axis]
