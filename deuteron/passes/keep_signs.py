"""Batch norm with relu keeps the signs of its result as bits, for its gradient to read instead of
the result: a sixteenth of the bytes in 16 bits per element.

    y, … = batch_norm_act(x, …)                    y, …, signs = batch_norm_act(x, …, packed=…)
    batch_norm_act_grad(grad, x, …, y)       →     batch_norm_act_grad(grad, x, …, signs, packed=…)

It happens for GPUs, where kernels of ours make and read them in passes that they make anyway.
"""

from __future__ import annotations

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ops import table
from deuteron.ops.signs import packing
from deuteron.passes.context import Context
from deuteron.target import has_triton


def keep_signs(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with signs in the place of every result that relu's gradient asks for."""
    if not ctx.target.is_cuda or not has_triton():
        return graph
    asked = _asked(graph)
    if not asked:
        return graph
    build, names = start(graph, table.infer)
    signs: dict[str, str] = {}  # of a result
    for node in graph.nodes:
        inputs = [None if v is None else names[v] for v in node.inputs]
        y = _read(node)
        if node.outputs[0] in asked:
            attrs = {**node.attrs, "packed": asked[node.outputs[0]]}
            outs = build.emit(node.op, inputs, attrs, source=node.source)
            signs[node.outputs[0]] = outs[-1]
        elif y in asked:
            inputs = [*inputs, *[None] * (len(_SLOTS) - len(inputs))]
            inputs[_Y], inputs[_SIGNS] = None, signs[y]
            attrs = {**node.attrs, "packed": asked[y]}
            outs = build.emit(node.op, inputs, attrs, source=node.source)
            ctx.fired["signs instead of a result"] += 1
        else:
            carry(build, names, node, graph)
            continue
        names.update(zip(node.outputs, outs, strict=False))  # the signs are new
    return finish(build, names, graph)


_SLOTS = table.get("batch_norm_act_grad").inputs
_Y, _SIGNS = _SLOTS.index("y?"), _SLOTS.index("signs?")


def _read(node: Node) -> str | None:
    """The result that a gradient reads for the signs of relu."""
    if node.op != "batch_norm_act_grad" or node.attrs["activation"] != "relu":
        return None
    return node.inputs[_Y] if len(node.inputs) > _Y else None


def _asked(graph: Graph) -> dict[str, str]:
    """Results that gradients read for their signs, and how these are to be packed."""
    made = {
        n.outputs[0]
        for n in graph.nodes
        if n.op == "batch_norm_act" and n.attrs["activation"] == "relu"
    }
    asked = {y: packing(graph.types[y]) for y in map(_read, graph.nodes) if y in made}
    return {y: packed for y, packed in asked.items() if packed != "none"}
