"""A loss and its gradient from one pass over the logits.

``cross_entropy_with_grad``, which differentiation writes, knows the loss of every position. Where
it has the operands of a ``cross_entropy`` and does not wait for its result (as the gradient of a
squared loss does), that one becomes the sum or mean of what the other made.
"""

from __future__ import annotations

from collections.abc import Mapping

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import start
from deuteron.ops import Ops, table
from deuteron.ops.cross_entropy import joined
from deuteron.passes.context import Context


def join_cross_entropy(graph: Graph, ctx: Context) -> Graph:
    pairs = _pairs(graph)
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
        x, target, weight = ([None if v is None else b.sym(v) for v in inputs] + [None])[:3]
        assert x is not None and target is not None
        each = b.sym(names[partner.outputs[0]])
        loss = joined(b, each, x.type, target, weight, node.attrs)
        names[node.output] = b.to(loss, x.dtype).name
        ctx.fired["loss from its gradient's pass"] += 1

    for node in graph.nodes:
        write(node)
    for name, value in graph.outputs:
        build.output(name, names[value])
    return build.finish()


def _pairs(graph: Graph) -> Mapping[str, Node]:
    """The results of losses, and for each the gradient that knows it."""
    found = {}
    grads = [n for n in graph.nodes if n.op == "cross_entropy_with_grad" and not _has_z(n)]
    for loss in (n for n in graph.nodes if grads and n.op == "cross_entropy"):
        for grad in grads:
            if _operands(grad) == _operands(loss) and not _waits(graph, grad, loss.output):
                found[loss.output] = grad
                break
    return found


def _has_z(node: Node) -> bool:
    return len(node.inputs) > 4 and node.inputs[4] is not None


def _operands(node: Node) -> tuple[object, ...]:
    attrs = node.attrs
    return (*node.inputs, None)[:3], attrs["label_smoothing"], attrs["ignore_index"]


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
