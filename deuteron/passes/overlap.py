"""Products that overlap with communication between ranks, in chunks of rows.

A product that is to be summed over ranks must be done before anything can be sent, and a product of
what was gathered from all ranks begins only when everything has arrived: links and multipliers take
turns. In chunks they need not: while the sum of one chunk is being sent, the next chunk is
multiplied. One operator does both (``linear_beside``) and writes the result in place, so that
nothing is copied for it.

The number of chunks follows from published numbers alone, because every rank must decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from deuteron.ir.dtype import DType
from deuteron.ir.graph import Graph, Node
from deuteron.ops import Ops, Sym, table
from deuteron.ops.collective import COLLECTIVES
from deuteron.passes.cleanup import dead_code
from deuteron.passes.communication import Ranks, collective_seconds
from deuteron.passes.context import Context, replaced
from deuteron.target import Target

PRODUCTS = ("linear", "matmul")
CHUNKS = (1, 2, 4, 8)
TILE = 128, 256  # rows and columns that a multiprocessor multiplies at a time
CHUNK_S = 3.5e-6  # seconds that each chunk adds to a product, measured in a CUDA Graph on an H200
LEAST = 0.97  # chunks must take less than this share of the time of both one after the other


@dataclass(frozen=True)
class Pair:
    """A product of matrices and the collective before or after it."""

    product: Node
    talk: Node
    x: str  # the rows of this rank
    shape: tuple[int, ...]  # of the result
    chunks: int


def products_beside(graph: Graph, ctx: Context) -> Graph:
    """Do a product in chunks if only its sum over ranks is read, or if it alone reads what was
    gathered, where that takes less time and no other work fills the time."""
    if not any(node.op in COLLECTIVES for node in graph.nodes):
        return graph
    found = {value: pair for value, pair in _pairs(graph, ctx.target) if pair.chunks > 1}
    if not found:
        return graph
    ctx.fired["product in chunks beside a collective"] += len(found)

    def both(ops: Ops, pair: Pair, names: dict[str, str]) -> Sym:
        x, weight, *bias = (ops.sym(names[v]) for v in (pair.x, *pair.product.uses[1:]))
        if x.rank != 2:
            x = ops.one("reshape", x, shape=(-1, graph.types[pair.product.uses[0]].shape[1]))
        if pair.product.op == "matmul":
            weight = ops.permute(weight, dims=(1, 0))
        group = {"group": pair.talk.attrs["group"], "ranks": pair.talk.attrs["ranks"]}
        how = {"way": pair.talk.op, "chunks": pair.chunks, **group}
        made: Sym = ops.linear_beside(x, weight, *bias, **how)
        return made if made.shape == pair.shape else ops.one("reshape", made, shape=pair.shape)

    return dead_code(replaced(graph, found, both), ctx)


def _pairs(graph: Graph, target: Target) -> Iterator[tuple[str, Pair]]:
    """All pairs, by the value that they make."""
    for node in graph.nodes:
        if node.op in ("all_reduce", "reduce_scatter"):
            pair = _sum(graph, node, target)
        elif node.op in PRODUCTS:
            pair = _gather(graph, node, target)
        else:
            continue
        if pair is not None:
            yield node.output, pair


def _sum(graph: Graph, talk: Node, target: Target) -> Pair | None:
    """Pair a sum over ranks with the product that it alone reads, perhaps after a reshape; None if
    that is not possible."""
    ranks, value = talk.attrs["ranks"], _reshaped(graph, talk.uses[0])
    product = graph.producer.get(value)
    if not _only_use(graph, value) or product is None or not _of_matrices(graph, product):
        return None
    if talk.attrs["reduce"] != "sum" or ranks == 1 or _filled(graph, talk, product):
        return None
    out = graph.types[value].shape
    scattered = talk.op == "reduce_scatter"
    if scattered and out[0] % ranks:
        return None  # ranks do not get whole rows of the product
    x = product.uses[0]
    work = *out, graph.types[x].shape[1]
    rows = out[0] // (ranks if scattered else 1)
    chunks = best_chunks(talk.op, work, rows, graph.types[x].dtype, ranks, target)
    return Pair(product, talk, x, graph.types[talk.output].shape, chunks)


def _gather(graph: Graph, product: Node, target: Target) -> Pair | None:
    """Pair a product with the all-gather whose result it alone reads; None if that is not
    possible."""
    talk = graph.producer.get(_reshaped(graph, product.uses[0]))
    if talk is None or talk.op != "all_gather" or talk.attrs["ranks"] == 1:
        return None
    if not _only_use(graph, talk.output) or not _of_matrices(graph, product):
        return None
    whole, shape = graph.types[product.uses[0]], graph.types[product.output].shape
    work, ranks = (*shape, whole.shape[1]), talk.attrs["ranks"]
    if shape[0] % ranks:
        return None  # ranks do not have whole rows
    chunks = best_chunks(talk.op, work, shape[0] // ranks, whole.dtype, ranks, target)
    return Pair(product, talk, talk.uses[0], shape, chunks)


def _reshaped(graph: Graph, value: str) -> str:
    """Return the value that ``value`` is a reshape of, going back while nothing else reads it."""
    while _only_use(graph, value) and graph.producer[value].op == "reshape":
        value = graph.producer[value].uses[0]
    return value


def _only_use(graph: Graph, value: str) -> bool:
    """Whether a value is made in the graph and read once."""
    once = len(graph.users.get(value, ())) == 1 and value not in graph.output_values
    return once and value in graph.producer


def _of_matrices(graph: Graph, node: Node) -> bool:
    types = [graph.types[v] for v in node.uses]
    kind = types[0].dtype
    alike = kind.is_float and kind.bits >= 16 and all(t.dtype == kind for t in types)
    return node.op in PRODUCTS and alike and types[0].rank == types[1].rank == 2


def _filled(graph: Graph, talk: Node, product: Node) -> bool:
    """Whether other products, which neither make what is sent nor need the result, do as much work
    before ranks meet again: these run beside the whole collective (plan/schedule.py), as gradients
    of weights do."""
    at, nodes = graph.places[talk.output], graph.nodes
    meet = [i for i, node in enumerate(nodes) if node.op in COLLECTIVES]
    begin = max((i for i in meet if i < at), default=-1)
    end = min((i for i in meet if i > at), default=len(nodes))
    needed, made = set(talk.uses), {talk.output}
    for node in reversed(nodes[begin + 1 : at]):
        if not needed.isdisjoint(node.outputs):
            needed.update(node.uses)
    work = 0.0
    for node in nodes[begin + 1 : end]:
        if not made.isdisjoint(node.uses):
            made.update(node.outputs)
        elif needed.isdisjoint(node.outputs) and node.op in PRODUCTS:
            work += _flops(graph, node)
    return work >= _flops(graph, product)


def _flops(graph: Graph, node: Node) -> float:
    return table.get(node.op).cost(graph.in_types(node), graph.out_types(node), node.attrs).flops


def best_chunks(
    kind: str, work: tuple[int, ...], rows: int, dtype: DType, ranks: int, target: Target
) -> int:
    """Return the number of chunks in which a product, of so many rows, columns and summed elements,
    and the collective beside it are done soonest: each chunk begins anew, on the links and on all
    multiprocessors. ``rows``: how many there are to divide. On a CPU, whose rates are measured and
    so may differ between ranks, a product is taken to last as long as what is sent."""
    high, wide, deep = work
    sent = dtype.nbytes(high * (deep if kind == "all_gather" else wide))

    def sends(chunks: int) -> float:
        return collective_seconds(kind, sent / chunks, Ranks(ranks), target)

    def multiplies(chunks: int) -> float:
        if not target.is_cuda:
            return sends(1) / chunks
        tiles = math.ceil(high / chunks / TILE[0]) * math.ceil(wide / TILE[1])
        waves = math.ceil(tiles / target.units)
        flops = 2 * waves * target.units * TILE[0] * TILE[1] * deep
        return flops / target.rate(dtype.short) + CHUNK_S

    def takes(chunks: int) -> float:
        one, talk = multiplies(chunks), sends(chunks)
        return max(chunks * one + talk, one + chunks * talk)

    best = min((c for c in CHUNKS if rows % c == 0), key=takes)
    return best if takes(best) < LEAST * takes(1) else 1
