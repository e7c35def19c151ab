"""Small results of the forward pass that a gradient reads instead of looking for them again. This
is done for GPUs, where our own kernels make and read them in passes over memory that they make
anyway.

Batch norm with relu keeps the signs of its result as bits, which is a sixteenth of the bytes at 16
bits per element; a max pool keeps, in one byte each, which element of each window won.

    y, … = batch_norm_act(x, …)                    y, …, signs = batch_norm_act(x, …, packed=…)
    batch_norm_act_grad(grad, x, …, y)       →     batch_norm_act_grad(grad, x, …, signs, packed=…)

    y = max_pool(x)                                y, winners = max_pool_with_winners(x)
    max_pool_grad(grad, x)                   →     max_pool_winners_grad(grad, winners)
"""

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ops import table
from deuteron.ops.conv import memory_order
from deuteron.ops.pool_winners import fits_a_byte
from deuteron.ops.signs import packing
from deuteron.passes.context import Context
from deuteron.target import has_triton


def keep_signs(graph: Graph, ctx: Context) -> Graph:
    """``graph`` in which relu's gradients read signs in the place of a result."""
    if not ctx.target.is_cuda or not has_triton():
        return graph
    asked = _asked(graph)
    if not asked:
        return graph
    build, names = start(graph, table.infer)
    signs: dict[str, str] = {}  # result → its signs
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
        names.update(zip(node.outputs, outs, strict=False))  # the signs have no old name
    return finish(build, names, graph)


_SLOTS = table.get("batch_norm_act_grad").inputs
_Y, _SIGNS = _SLOTS.index("y?"), _SLOTS.index("signs?")


def _read(node: Node) -> str | None:
    """The result that a gradient reads for the signs of relu; else None."""
    if node.op != "batch_norm_act_grad" or node.attrs["activation"] != "relu":
        return None
    return node.inputs[_Y] if len(node.inputs) > _Y else None


def _asked(graph: Graph) -> dict[str, str]:
    """Results that gradients read for their signs, and how these are to be packed."""
    norms = [n for n in graph.nodes if n.op == "batch_norm_act"]
    made = {n.outputs[0] for n in norms if n.attrs["activation"] == "relu"}
    asked = {y: packing(graph.types[y]) for y in map(_read, graph.nodes) if y in made}
    return {y: packed for y, packed in asked.items() if packed != "none"}


# ---- winners


def keep_winners(graph: Graph, ctx: Context) -> Graph:
    """``graph`` in which every max pool keeps its winners if its gradient is in the graph, too."""
    if not ctx.target.is_cuda or not has_triton():
        return graph
    pools = {_pool(n) for n in graph.nodes if _is_pool(graph, n)}
    asked = {_pool(n) for n in graph.nodes if n.op == "max_pool_grad"} & pools
    if not asked:
        return graph
    build, names = start(graph, table.infer)
    winners = {}
    for node in graph.nodes:
        forward, back = _is_pool(graph, node), node.op == "max_pool_grad"
        key = _pool(node) if forward or back else None
        if key not in asked:
            carry(build, names, node, graph)
        elif forward:
            op, given = "max_pool_with_winners", [names[node.uses[0]]]
            made = build.emit(op, given, node.attrs, source=node.source)
            names[node.outputs[0]], winners[key] = made
        else:
            x = graph.types[node.uses[1]]
            attrs = {**node.attrs, "shape": x.shape, "order": memory_order(x)}
            given = [names[node.uses[0]], winners[key]]
            made = build.emit("max_pool_winners_grad", given, attrs, source=node.source)
            names[node.output] = made[0]
            ctx.fired["winners instead of a search"] += 1
    return finish(build, names, graph)


def _pool(node: Node) -> tuple[str, str]:
    """What is pooled, and how: the same for a pool and its gradient."""
    return node.uses[-1], str(dict(node.attrs))


def _is_pool(graph: Graph, node: Node) -> bool:
    """Whether it is a max pool that the kernels take, and nothing reads its indices."""
    if node.op not in ("max_pool", "max_pool_with_indices"):
        return False
    rank = graph.types[node.uses[0]].rank
    if node.op == "max_pool_with_indices":
        places = node.outputs[1]
        if rank != 4 or places in graph.output_values or graph.users.get(places):
            return False  # rows with places may lie in another order in memory
    return rank < 5 and fits_a_byte(node.attrs["kernel"])
