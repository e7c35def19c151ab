"""A loss and its gradient from one pass over the logits.

``cross_entropy_with_grad``, which differentiation writes, knows the loss of every position. Where
it has the operands of a ``cross_entropy`` and does not wait for its result (as the gradient of a
squared loss does), that one becomes the sum or mean of what the other made.
"""

from __future__ import annotations

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import finish, start
from deuteron.ops import Ops, table
from deuteron.ops.cross_entropy import joined
from deuteron.passes.context import Context


def join_cross_entropy(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with losses taken from their gradients' passes."""
    made = {_operands(n): n for n in graph.nodes if n.op == "cross_entropy_with_grad"}
    losses = (n for n in graph.nodes if n.op == "cross_entropy" and _operands(n) in made)
    pairs = {n.output: made[_operands(n)] for n in losses}
    pairs = {value: grad for value, grad in pairs.items() if not _waits(graph, grad, value)}
    if not pairs:
        return graph
    build, names = start(graph, table.infer)

    def write(node: Node) -> None:
        """The node, after what it reads, which for a gradient stands further down."""
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
    """What decides about the loss of each position: logits, target, weight, z and attributes."""
    given = (*node.inputs, *[None] * 5)
    return given[:3], given[4], node.attrs["label_smoothing"], node.attrs["ignore_index"]


def _waits(graph: Graph, node: Node, value: str) -> bool:
    """Whether a node needs a value to be known."""
    stack, seen = list(node.uses), set[str]()
    while stack:
        v = stack.pop()
        if v == value:
            return True
        if v not in seen and v in graph.producer:
            seen.add(v)
            stack.extend(graph.producer[v].uses)
    return False
