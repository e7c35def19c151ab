"""Which node may join which group in a region: a table over the class of a group and the class of a
node that reads one of its results. Each check returns None, or why not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from deuteron.ir.graph import Node
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.ops.opdef import Fusion
from deuteron.passes.after_products import AROUND
from deuteron.passes.in_place import IN_PLACE, SIDE_BY_SIDE

if TYPE_CHECKING:
    from deuteron.passes.fuse import Fuser, Group

TOGETHER = "ranks meet here: what goes to others, or comes from them, is in memory"
Check = Callable[["Fuser", "Group", Node, str], "str | None"]


def _same_space(f: Fuser, group: Group, node: Node, value: str) -> str | None:
    """Elementwise work joins elementwise work over the same elements."""
    out, through = f.graph.types[node.outputs[0]], f.graph.types[value]
    if through.numel <= out.numel:
        return None
    return f"works on {list(out.shape)}, its producer on {list(through.shape)}"


def _epilogue(f: Fuser, group: Group, node: Node, value: str) -> str | None:
    """Elementwise work joins the product before it while the tile is still on the chip."""
    assert group.anchor is not None
    if f.graph.nodes[group.anchor].op in COLLECTIVES:
        return TOGETHER
    made = f.graph.types[f.graph.nodes[group.anchor].outputs[0]]
    if f.graph.types[node.outputs[0]].shape != made.shape:
        return f"changes the shape {list(made.shape)} that the product is tiled over"
    if value in f.graph.output_values:
        return f"%{value} is an output of the graph, so it is written anyway"
    if _widened_by_readers(f, node):
        return "is widened by who reads it: half of the bytes go through memory"
    for user in (u for u in f.graph.users.get(value, ()) if u is not node):
        # x · sigmoid(x) reads the product twice and both reads can stay on the chip
        joined = set(user.uses) & set(node.outputs) or set(node.uses) & set(user.outputs)
        if not joined or f.graph.types[user.outputs[0]].shape != made.shape:
            return f"%{value} is read by {user.op} as well, so it is written anyway"
    return None


def _widened_by_readers(f: Fuser, node: Node) -> bool:
    """Whether a node is a cast to a wider type that all its readers can do themselves, perhaps
    after a reshape."""
    if node.op != "cast":
        return False
    wider = f.graph.types[node.output].dtype.bits > f.graph.types[node.uses[0]].dtype.bits
    return wider and _is_read_on_the_way(f, node.output)


def _is_read_on_the_way(f: Fuser, value: str) -> bool:
    """Whether all readers of a value, directly or through a reshape, can compute it on the way."""
    readers = f.graph.users.get(value, ())
    if value in f.graph.output_values or not readers:
        return False
    return all(
        _is_read_on_the_way(f, n.output)
        if n.op == "reshape"
        else table.get(n.op).fusion in (E, B, R)
        or (f.gates and n.op in AROUND and len(readers) == 1 and value == n.uses[1])
        for n in readers
    )


def after_reduction(f: Fuser, group: Group, node: Node, value: str) -> str | None:
    """Elementwise work joins a reduction if it covers the same rows."""
    assert group.anchor is not None
    anchor = f.graph.nodes[group.anchor]
    assert anchor.inputs[0] is not None
    rows = f.graph.types[anchor.inputs[0]].shape
    result = f.graph.types[anchor.outputs[0]].shape
    shape = f.graph.types[node.outputs[0]].shape
    if shape in (rows, result):
        return None
    return f"works on {list(shape)}, the reduction on {list(rows)}"


def _into_reduction(f: Fuser, group: Group, node: Node, value: str) -> str | None:
    """Elementwise work joins the reduction that reads it."""
    if node.inputs[0] != value:
        return "feeds the reduction by a side input"
    rows = f.graph.types[value]
    for i in group.nodes:
        moved = f.graph.nodes[i]
        made = f.graph.types[moved.outputs[0]]
        if made.numel > rows.numel:
            return f"works on {list(made.shape)}, the reduction on {list(rows.shape)}"
        if table.get(moved.op).fusion is M and not keeps_rows(f, moved, node):
            return "moves elements before the reduction reads them"
    return None


def keeps_rows(f: Fuser, moved: Node, reduction: Node) -> bool:
    """Whether a reshape keeps the rows that a reduction reads, as one does that only splits a batch
    into sentences, or that only adds axes of size 1."""
    rows, attrs = f.graph.types[reduction.uses[0]].shape, reduction.attrs
    axes = attrs.get("axes", (attrs.get("axis"),))
    last = attrs.get("dims") == 1 or tuple(axes) == (len(rows) - 1,)
    before, after = f.graph.types[moved.uses[0]].shape, f.graph.types[moved.output].shape
    if moved.op == "reshape" and [n for n in before if n > 1] == [n for n in after if n > 1]:
        return True
    return last and moved.op == "reshape" and before[-1:] == after[-1:] == rows[-1:]


def _into_longer_rows(f: Fuser, group: Group, node: Node, value: str) -> str | None:
    """A loss may also write its gradient into longer rows: those of a product of padded width. And
    what a reduction found for a row may be expanded to each element of the row."""
    assert group.anchor is not None
    if node.op == "expand" and after_reduction(f, group, node, value) is None:
        return None
    anchor, graph = f.graph.nodes[group.anchor], f.graph
    padded = anchor.op == "cross_entropy_with_grad" and node.op == "pad"
    alone = len(graph.users[value]) == 1 and value not in graph.output_values
    if padded and alone and value == anchor.outputs[2] and not any(node.attrs["low"]):
        return None
    return "moves the result of a reduction, which is complete only at the end"


def _always(reason: str | None) -> Check:
    return lambda f, group, node, value: reason


E, B, M = Fusion.ELEMENTWISE, Fusion.BROADCAST, Fusion.INJECTIVE
R, C, X = Fusion.REDUCTION, Fusion.COMPLEX, Fusion.OPAQUE
_product = _always("a product starts a region of its own: its operands must be in memory")


def _alone(f: Fuser, group: Group, node: Node, value: str) -> str | None:
    ops = {f.graph.producer[value].op, node.op}
    opaque = SIDE_BY_SIDE if IN_PLACE in ops else "an opaque operator runs alone"
    return opaque if ops.isdisjoint(COLLECTIVES) else TOGETHER


RULES: dict[tuple[Fusion, Fusion], Check] = {
    # (what the group is, what wants to join)
    (E, E): _same_space,
    (E, B): _same_space,
    (E, M): _always(None),  # movement joins elementwise work
    (E, R): _into_reduction,
    (R, E): after_reduction,
    (R, B): after_reduction,
    (R, M): _into_longer_rows,
    (R, R): _always("a second reduction needs the first to be complete"),
    (C, E): _epilogue,
    (C, B): _epilogue,
    (C, M): _always("moves elements out of the tile of the product"),
    (C, R): _always("a reduction after a product needs whole rows, the product makes tiles"),
    **{(kind, C): _product for kind in (E, R, C)},
    **{(kind, X): _alone for kind in (E, R, C, X)},
    **{(X, kind): _alone for kind in (E, B, M, R, C)},
}


def goes_along(f: Fuser, group: Group, reduction: Group) -> bool:
    """Whether elementwise work after a reduction covers the reduction's rows throughout, and reads
    rows that the reduction has at hand."""
    assert reduction.anchor is not None
    anchor = f.graph.nodes[reduction.anchor]
    rows = f.graph.types[anchor.uses[0]].shape
    nodes, others = ([f.graph.nodes[i] for i in g.nodes] for g in (group, reduction))
    held = {v for n in others for v in (*n.uses, *n.outputs) if f.graph.types[v].shape == rows}
    computes = (n for n in nodes if table.get(n.op).fusion is not M)
    return any(not held.isdisjoint(n.uses) for n in computes) and all(
        keeps_rows(f, n, anchor)
        if table.get(n.op).fusion is M
        else after_reduction(f, reduction, n, n.output) is None
        for n in nodes
    )
