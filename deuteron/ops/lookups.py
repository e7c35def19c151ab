"""Where the index of an operator comes from that picks elements by it."""

from __future__ import annotations

from collections.abc import Mapping

from deuteron.ir.graph import Constant, Graph, Node

LOOKUPS = ("embedding", "index_select", "gather")
INDEX = 1  # the slot of the index in every operator that has one
SAME = ("reshape", "permute", "transpose", "expand", "squeeze", "unsqueeze", "to_layout")


def root_of(
    value: str, made: Mapping[str, Node], constants: Mapping[str, Constant], size: int
) -> tuple[str, bool]:
    """The value that has the same numbers as an index, further up, and whether those below 0 count
    from the end of ``size``. If it is in ``made`` as well, it is computed there."""
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
    """Indices that a graph computes, and what reads them on the way to where they are used.
    ``of_several``: only those that a choice makes, as an index of several dimensions is, which is
    none where one of them is none."""
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
    """The i of where(i < 0, i + size, i), if that is what a node gives."""
    if node.op != "where" or not all(v in made for v in node.uses[:2]):
        return None
    below, shifted, index = made[node.uses[0]], made[node.uses[1]], node.uses[2]

    def is_(made: Node, op: str, number: int) -> bool:
        known = constants.get(made.uses[-1])
        alone = known is not None and known.data.numel() == 1 and known.data.item() == number
        return made.op == op and made.uses[0] == index and alone

    return index if is_(below, "lt", 0) and is_(shifted, "add", size) else None


def size_of(node: Node, shape: tuple[int, ...]) -> int:
    """How many elements an index picks from, of a value of this shape."""
    if node.op == "embedding":
        return shape[0]
    axis: int = node.attrs.get("axis", min(1, len(shape) - 1))
    return shape[axis]
