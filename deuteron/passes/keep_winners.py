"""A max pool keeps which element of each window won, a byte, for its gradient to read instead of
looking for the winners in x again.

    y = max_pool(x)                          y, winners = max_pool_with_winners(x)
    max_pool_grad(grad, x)             →     max_pool_winners_grad(grad, winners)

It happens for GPUs, where a kernel of ours notes the winners on the way.
"""

from __future__ import annotations

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ops import table
from deuteron.ops.conv import memory_order
from deuteron.ops.pool_winners import fits
from deuteron.passes.context import Context
from deuteron.target import has_triton


def keep_winners(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with winners kept for every max pool whose gradient is in it, too."""
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
            given = [names[node.uses[0]]]
            names[node.outputs[0]], winners[key] = build.emit(
                "max_pool_with_winners", given, node.attrs, source=node.source
            )
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
    """Whether it is a max pool that the kernels take, and of which nobody reads the places."""
    if node.op not in ("max_pool", "max_pool_with_indices"):
        return False
    rank = graph.types[node.uses[0]].rank
    if node.op == "max_pool_with_indices":
        places = node.outputs[1]
        if rank != 4 or places in graph.output_values or graph.users.get(places):
            return False  # rows with places may lie in another order in memory
    return rank < 5 and fits(node.attrs["kernel"])
