"""Collectives: fewer calls where they are small, and the same order on all ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Constant, Graph, Node
from deuteron.ir.rewrite import Rewriter, Rule, carry, finish, start
from deuteron.ops import Ops, Sym, table
from deuteron.ops.collective import COLLECTIVES
from deuteron.passes.cleanup import dead_code
from deuteron.passes.context import Context, by_rules
from deuteron.passes.linearity import follows_linearly


def _of_the_sum(rw: Rewriter, node: Node) -> list[str] | None:
    """The sum of two sums over ranks is one sum over ranks of half the bytes, be they all-reduces
    or reduce-scatters. The gradients of a tensor that several column-parallel products read are
    such sums."""
    one, other = (rw.made_by(v, "all_reduce", "reduce_scatter") for v in node.inputs)
    if one is None or other is None or one is other:
        return None
    if one.op != other.op or one.attrs != other.attrs:
        return None
    x, y = (rw.build.types[each.uses[0]] for each in (one, other))
    alone = all(rw.only_use(each.output) for each in (one, other))
    if not alone or x.shape != y.shape or x.dtype != y.dtype or one.attrs["reduce"] != "sum":
        return None
    total = rw.emit("add", [one.uses[0], other.uses[0]])
    return [rw.emit(one.op, [total], dict(one.attrs))]


_sum_first = by_rules([Rule("one sum over ranks of a sum", ("add",), _of_the_sum)])


def sums_over_ranks(graph: Graph, ctx: Context) -> Graph:
    """Reduce the number of sums over ranks as far as possible."""
    if not any(node.op in COLLECTIVES for node in graph.nodes):
        return graph
    return merge_small(dead_code(_sum_first(graph, ctx)), ctx)


def merge_small(graph: Graph, ctx: Context) -> Graph:
    """Merge sums over ranks that follow one another and do not depend on one another, because a
    small one takes as long as its latency. They are merged as long as sending all of it takes less
    than one latency by the target's published numbers, so that every rank decides alike."""
    limit = ctx.target.link_latency * ctx.target.link
    while (pair := next(_pairs(graph, limit, set(ctx.later)), None)) is not None:
        graph = _merged(graph, *pair)
        ctx.fired["sums over ranks merged"] += 1
    return graph


def _pairs(graph: Graph, limit: float, late: set[str]) -> Iterator[tuple[int, int]]:
    """Yield places of sums over ranks that can be merged: the second is the next collective after
    the first, and both are in the same half of a step. ``late``: inputs that only the second half
    has."""
    for node in graph.nodes:
        if not late.isdisjoint(node.uses):
            late.update(node.outputs)
    together = [i for i, node in enumerate(graph.nodes) if node.op in COLLECTIVES]
    for i, j in pairwise(together):
        one, other = graph.nodes[i], graph.nodes[j]
        x, y = (graph.types[node.uses[0]] for node in (one, other))
        alike = one.op == other.op == "all_reduce" and one.attrs == other.attrs
        small = x.nbytes + y.nbytes <= limit and x.numel and y.numel
        small = small and (one.output in late) == (other.output in late)
        if alike and small and x.dtype == y.dtype and j not in _reached(graph, i, j):
            yield i, j


def _reached(graph: Graph, i: int, j: int) -> set[int]:
    """Places, up to ``j``, of nodes that depend on the result of node ``i``."""
    values, places = set(graph.nodes[i].outputs), set[int]()
    for k in range(i + 1, j + 1):
        if not values.isdisjoint(graph.nodes[k].uses):
            values.update(graph.nodes[k].outputs)
            places.add(k)
    return places


def _merged(graph: Graph, i: int, j: int) -> Graph:
    """Return the graph with sums ``i`` and ``j`` merged at the place of the second; nodes that
    depend on the first move behind it."""
    later = _reached(graph, i, j)
    build, names = start(graph, table.infer)

    for k, node in enumerate(graph.nodes):
        if k == i or k in later:
            continue
        if k != j:
            carry(build, names, node, graph)
            continue
        pair, flat, source = (graph.nodes[i], node), list[str](), node.source
        for one in pair:
            count = math.prod(graph.types[one.uses[0]].shape)
            line = {"shape": (count,)}
            flat += build.emit("reshape", [names[one.uses[0]]], line, source=source)
        (joined,) = build.emit("concat", flat, {"axis": 0}, source=source)
        (total,) = build.emit("all_reduce", [joined], dict(node.attrs), source=source)
        begin = 0
        for one in pair:
            shape = graph.types[one.output].shape
            end = begin + math.prod(shape)
            cut = {"axis": 0, "start": begin, "stop": end, "step": 1}
            (part,) = build.emit("slice", [total], cut, source=source)
            (names[one.output],) = build.emit("reshape", [part], {"shape": shape}, source=source)
            begin = end
        for place in sorted(later):
            carry(build, names, graph.nodes[place], graph)
    return finish(build, names, graph)


@dataclass(frozen=True)
class Means:
    """How to turn those outputs of a graph that are gradients into means over ranks. ``params``:
    the ids of their parameters; ``group`` and ``ranks``: over whom; ``dtype``: the element type in
    which they are sent, None for their own; ``averages``: whether the library can compute means;
    ``share``: the factor that makes a sum over ranks the mean; ``done`` collects the ids of those
    that were found."""

    params: frozenset[int]
    group: str
    ranks: int
    dtype: str | None
    averages: bool
    share: float
    done: set[int] = field(default_factory=set)


def means_over_ranks(
    graph: Graph, outputs: Collection[str], how: Means, begins: str | None
) -> Graph:
    """Return the graph with these outputs as means over ranks. Each is sent as soon as it is made,
    and only whoever takes the results waits for it.

    ``begins``: the gradient that the backward pass begins with, where it is a constant. If these
    outputs are all that depends on it, and each is linear in it, that one number is multiplied by
    ``how.share`` and sums over ranks are means: no gradient needs a multiplication of its own."""
    wanted = {value for name, value in graph.outputs if name in outputs}
    divided = begins in graph.constants and follows_linearly(graph, str(begins), wanted)
    if begins is not None and divided:
        number = Constant(graph.constants[begins].data * how.share)
        graph = replace(graph, constants={**graph.constants, begins: number})
    build, names = start(graph, table.infer)
    means = {value: _mean(build, value, how, divided) for value in wanted & names.keys()}
    for node in graph.nodes:
        carry(build, names, node, graph)
        for value in wanted & set(node.outputs):
            means[value] = _mean(build, names[value], how, divided)
    return finish(build, names | means, graph)


def _mean(build: GraphBuilder, value: str, how: Means, divided: bool) -> str:
    """``divided``: whether the terms of the sum have been divided already."""
    x = Ops(build).sym(value)
    own = x.type.dtype.short
    kind = how.dtype or own
    sent = x if kind == own else x.ops.cast(x, dtype=kind)
    sent = sent if divided or how.averages else sent * how.share
    reduce = "avg" if how.averages and not divided else "sum"
    mean: Sym = x.ops.all_reduce(sent, reduce=reduce, group=how.group, ranks=how.ranks)
    return (mean if kind == own else x.ops.cast(mean, dtype=own)).name


def in_order(graph: Graph) -> Graph:
    """Make every collective wait for the one before it in the graph: each rank may fuse and
    schedule what is between them in its own way, but all ranks must meet in the same order."""
    last: str | None = None
    nodes = []
    for node in graph.nodes:
        if node.op in COLLECTIVES:
            count = len(table.get(node.op).inputs) - 1
            given = (*node.inputs, *[None] * count)[:count]
            node = Node(node.op, (*given, last), node.outputs, node.attrs, node.source)
            last = node.output
        nodes.append(node)
    return graph.only(nodes, graph.inputs, graph.outputs, graph.constants)
