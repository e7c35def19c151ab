"""Products of several matrices in the cheapest order.

    x · A · B · C = ((x · A) · B) · C = x · (A · (B · C)) = …

All orders give the same numbers but for rounding, and may differ a hundredfold in work: a weight of
low rank, W = A · B, is cheaper as two thin products unless there are few rows or the rank is high;
constant matrices are multiplied ahead of time, in float64, and rounded once. The cheapest order is
found as for any chain of products, from shorter chains to longer ones, by the time that a machine
of the target's bandwidth and rate takes; it is used where the engines' own estimates agree.

**A layer with a correction of low rank** (LoRA), where all its matrices are constants:

    linear(x, W, b) + s · linear(linear(x, A), B) → linear(x, W + s · B · A, b)

In float16 no order is changed, because an intermediate result might overflow, and a correction is
merged only where the weight stays finite.
"""

from ast import literal_eval
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym, table
from deuteron.passes.cleanup import dead_code
from deuteron.passes.context import Context, replaced

PRODUCTS = ("linear", "matmul")
MOST = 6  # the most matrices in a chain
# another order must cost less than this share of the written one: estimates are inexact
CLEARLY = 0.95


class Factor(NamedTuple):
    """A matrix of a chain; ``turned``: whether its transpose is meant."""

    value: str
    turned: bool = False


@dataclass(frozen=True)
class Chain:
    """x times matrices, and a bias of the last product."""

    factors: tuple[Factor, ...]  # the first is x
    bias: str | None
    order: Any  # as it was written: the place of a factor, or a pair of orders


def order_products(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with chains of products in their cheapest order, and corrections of low rank merged
    into the weights that they correct. Dead code goes first: it would count as a reader."""
    graph = _merged_corrections(dead_code(graph), ctx)
    chosen: dict[str, tuple[Chain, Any]] = {}
    inside: set[str] = set()
    for node in reversed(graph.nodes):  # the longest chains first
        if node.op not in PRODUCTS or node.output in inside:
            continue
        chain = _chain(graph, node)
        if chain is None or len(chain.factors) < 3 or graph.types[node.output].dtype.short == "f16":
            continue
        better = _better(graph, chain, ctx)
        if better is not None:
            chosen[node.output] = chain, better
            inside |= _made_of(graph, node.output, {f.value for f in chain.factors})

    def make(b: Ops, found: tuple[Chain, Any], names: dict[str, str]) -> Sym:
        chain, order = found
        held = {f.value: graph.constants[f.value].data for f in chain.factors if _known(graph, f)}
        given = {f.value: b.sym(names[f.value]) for f in chain.factors}
        bias = None if chain.bias is None else b.sym(names[chain.bias])
        return _written(b, chain, order, given, held, bias)

    ctx.fired["product of matrices in another order"] += len(chosen)
    return replaced(graph, chosen, make) if chosen else graph


# ---- what is a chain


def _known(graph: Graph, factor: Factor) -> bool:
    """Whether it is a constant matrix; x may be a batch of them, which is not multiplied ahead."""
    return factor.value in graph.constants and graph.types[factor.value].rank == 2


def _only_here(graph: Graph, value: str) -> bool:
    outside = any(value == v for _, v in graph.outputs)
    return len(graph.users.get(value, ())) == 1 and not outside


def _chain(graph: Graph, node: Node) -> Chain | None:
    """The chain of matrices that ends in this product, going back as long as nothing else reads
    what lies between."""
    x, w = node.uses[:2]
    kind = graph.types[node.output].dtype
    fits = kind.is_float and kind.bits >= 16 and graph.types[x].dtype == kind
    if not fits or graph.types[w].rank != 2 or graph.types[x].rank < 2:
        return None
    left = _left(graph, x)
    right, order = _matrices(graph, Factor(w, node.op == "linear"), len(left[0]))
    factors = (*left[0], *right)
    if len(factors) > MOST or any(not graph.types[f.value].numel for f in factors):
        return None
    return Chain(factors, node.uses[2] if len(node.uses) > 2 else None, (left[1], order))


def _left(graph: Graph, value: str) -> tuple[tuple[Factor, ...], Any]:
    """x and the matrices that it was multiplied by."""
    node = graph.producer.get(value)
    if node is None or node.op not in PRODUCTS or len(node.uses) > 2:
        return (Factor(value),), 0
    x, w = node.uses
    plain = graph.types[w].rank == 2 and graph.types[x].rank >= 2 and _only_here(graph, value)
    if not plain or graph.types[x].dtype != graph.types[value].dtype:
        return (Factor(value),), 0
    factors, order = _left(graph, x)
    right, inner = _matrices(graph, Factor(w, node.op == "linear"), len(factors))
    return (*factors, *right), (order, inner)


def _matrices(graph: Graph, factor: Factor, place: int) -> tuple[tuple[Factor, ...], Any]:
    """A matrix as the factors of the product that made it, and their order. ``place``: the place of
    its first factor in the chain."""
    node = graph.producer.get(factor.value)
    if node is None or not _only_here(graph, factor.value):
        return (factor,), place
    if node.op == "permute" and node.attrs["dims"] == (1, 0):
        return _matrices(graph, Factor(node.uses[0], not factor.turned), place)
    both = [graph.types[v].rank == 2 for v in node.uses]
    if node.op not in PRODUCTS or len(both) > 2 or not all(both):
        return (factor,), place
    first, second = Factor(node.uses[0]), Factor(node.uses[1], node.op == "linear")
    if factor.turned:
        first, second = (Factor(f.value, not f.turned) for f in (second, first))
    left, before = _matrices(graph, first, place)
    right, after = _matrices(graph, second, place + len(left))
    return (*left, *right), (before, after)


# ---- which order


def _sizes(chain: Chain, types: Sequence[TensorType]) -> list[int]:
    """The rows and the columns of x, and then the columns after each matrix."""
    rows, *rest = types
    turned = [f.turned for f in chain.factors[1:]]
    ends = [t.shape[0 if back else 1] for t, back in zip(rest, turned, strict=True)]
    return [prod(rows.shape[:-1]), rows.shape[-1], *ends]


def _better(graph: Graph, chain: Chain, ctx: Context) -> Any:
    """An order that is cheaper than the one that was written, or None."""
    if ctx.price is None:
        return None
    types = tuple(graph.types[f.value] for f in chain.factors)
    known = tuple(_known(graph, f) for f in chain.factors)
    turned = tuple(f.turned for f in chain.factors)
    key = ("order of products", types, known, turned, chain.order, chain.bias is None)
    if key not in ctx.forms:
        found = _cheapest(_sizes(chain, types), known, types[0], ctx)
        whole = ctx.price(_alone(chain, chain.order, types, known), float("inf"))
        most = CLEARLY * whole
        wins = found != chain.order and ctx.price(_alone(chain, found, types, known), most) < most
        ctx.forms[key] = repr(found) if wins else ""
    return literal_eval(ctx.forms[key]) if ctx.forms[key] else None


def _cheapest(sizes: Sequence[int], known: Sequence[bool], x: TensorType, ctx: Context) -> Any:
    """The order that takes least by bytes and operations, from shorter chains to longer ones."""
    rate, size = ctx.target.rate(x.dtype.short, True), x.dtype.bits / 8

    def once(rows: int, steps: int, columns: int) -> float:
        bytes_ = size * (rows * steps + steps * columns + rows * columns)
        seconds = max(2.0 * rows * steps * columns / rate, bytes_ / ctx.target.stream)
        return seconds + ctx.target.launch

    @cache
    def best(first: int, last: int) -> tuple[float, Any]:
        if first == last:
            return 0.0, first
        ways = []
        for cut in range(first, last):
            (left, a), (right, b) = best(first, cut), best(cut + 1, last)
            here = once(sizes[first], sizes[cut + 1], sizes[last + 1])
            now = all(known[first : last + 1])  # a product of constants costs nothing at run time
            ways.append((0.0 if now else left + right + here, (a, b)))
        return min(ways, key=lambda way: way[0])

    return best(0, len(known) - 1)[1]


# ---- writing one


def _alone(chain: Chain, order: Any, types: Sequence[TensorType], known: Sequence[bool]) -> Graph:
    """A chain in one order as a graph of its own, to be priced; products of constants become
    inputs."""
    build = GraphBuilder(table.infer, "chain")
    b, held = Ops(build), {}
    named = [f._replace(value=f"x{i}") for i, f in enumerate(chain.factors)]
    given: dict[str, Sym] = {}
    for f, t, now in zip(named, types, known, strict=True):
        given[f.value] = b.sym(build.input(f.value, t))
        if now:
            held[f.value] = torch.empty(t.shape, dtype=t.dtype.torch, device="meta")
    renamed = Chain(tuple(named), chain.bias, order)
    columns = _sizes(chain, types)[-1]
    bias = TensorType.of((columns,), types[0].dtype)
    last = None if chain.bias is None else b.sym(build.input("bias", bias))
    _written(b, renamed, order, given, held, last).output("y")
    return build.finish()


class _Made(NamedTuple):
    """Part of a chain: a value, or a constant matrix, stored transposed."""

    value: Sym | None
    turned: bool
    data: torch.Tensor | None = None


def _written(
    b: Ops,
    chain: Chain,
    order: Any,
    given: dict[str, Sym],
    held: dict[str, torch.Tensor],
    bias: Sym | None,
) -> Sym:
    kind = given[chain.factors[0].value].dtype

    def made(order: Any) -> _Made:
        if isinstance(order, int):
            f = chain.factors[order]
            data = held.get(f.value)
            return _Made(given[f.value], f.turned, data if data is None or f.turned else data.mT)
        left, right = made(order[0]), made(order[1])
        if left.data is not None and right.data is not None:
            wide = right.data.double() @ left.data.double()  # both are stored transposed
            return _Made(None, True, wide)
        return _Made(product(left, right), False)

    def symbol(part: _Made) -> Sym:
        if part.value is not None:
            return part.value
        assert part.data is not None
        data = part.data.to(kind.torch).contiguous()
        if data.is_meta:
            return b.sym(b.build.input(f"known{len(b.build.types)}", TensorType.from_tensor(data)))
        return b.sym(b.build.constant(data, "product"))

    def product(left: _Made, right: _Made, bias: Sym | None = None) -> Sym:
        x = symbol(left)
        if left.turned:
            x = b.one("permute", x, dims=(1, 0))
        if right.turned:
            return b.one("linear", x, symbol(right), *(() if bias is None else (bias,)))
        found = b.one("matmul", x, symbol(right))
        return found if bias is None else found + bias

    return product(made(order[0]), made(order[1]), bias)


# ---- corrections of low rank


class Term(NamedTuple):
    """scale · (x times constant matrices, plus a constant bias)."""

    chain: Chain
    scale: float


def _merged_corrections(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with sums of :class:`Term` over one x as one product, where that is cheaper."""
    chosen: dict[str, list[Term]] = {}
    inside: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op != "add" or node.output in inside or ctx.price is None:
            continue
        terms = _terms(graph, node.output, 1.0, True)
        if terms is None or len({t.chain.factors[0] for t in terms}) > 1:
            continue
        ends = {f.value for t in terms for f in t.chain.factors}
        ends |= {t.chain.bias for t in terms if t.chain.bias is not None}
        between = _made_of(graph, node.output, ends)
        nodes = [n for n in graph.nodes if n.outputs[0] in between]
        as_written = ctx.price(graph.subgraph("terms", nodes), float("inf"))
        merged = ctx.price(_one_product(graph, terms), CLEARLY * as_written)
        if merged < CLEARLY * as_written and bool(_weight(graph, terms).isfinite().all()):
            chosen[node.output] = terms
            inside |= between

    def make(b: Ops, terms: list[Term], names: dict[str, str]) -> Sym:
        x = b.sym(names[terms[0].chain.factors[0].value])
        bias = _bias(graph, terms)
        weight = b.constant(_weight(graph, terms), "merged")
        return b.one("linear", x, weight, *(() if bias is None else (b.constant(bias, "bias"),)))

    ctx.fired["correction of low rank in its weight"] += len(chosen)
    return replaced(graph, chosen, make) if chosen else graph


def _terms(graph: Graph, value: str, scale: float, top: bool = False) -> list[Term] | None:
    """A value as a sum of terms, or None."""
    node = graph.producer.get(value)
    if node is None or not (top or _only_here(graph, value)):
        return None
    if node.op == "add" and len({graph.types[v] for v in (*node.uses, value)}) == 1:
        left, right = (_terms(graph, v, scale) for v in node.uses)
        return None if left is None or right is None else left + right
    if node.op == "mul":
        for x, by in (node.uses, node.uses[::-1]):
            number = graph.scalar(by)
            if number is not None and graph.types[x] == graph.types[value]:
                return _terms(graph, x, scale * float(number))
        return None
    chain = _chain(graph, node) if node.op in PRODUCTS else None
    if chain is None or not all(_known(graph, f) for f in chain.factors[1:]):
        return None
    fits = chain.bias is None or chain.bias in graph.constants
    return [Term(chain, scale)] if fits else None


def _made_of(graph: Graph, value: str, ends: set[str]) -> set[str]:
    """All values that are computed on the way from ``ends`` to a value, including that one."""
    found, todo = set(), [value]
    while todo:
        value = todo.pop()
        if value not in ends and value not in found and value in graph.producer:
            found.add(value)
            todo += graph.producer[value].uses
    return found


def _weight(graph: Graph, terms: Sequence[Term]) -> torch.Tensor:
    """The sum of all terms as one weight [out, in], in float64 and rounded once."""
    total = None
    for chain, scale in terms:
        found = None
        for f in chain.factors[1:]:
            data = graph.constants[f.value].data.double()
            data = data if f.turned else data.mT
            found = data if found is None else data @ found
        assert found is not None
        total = scale * found if total is None else total + scale * found
    assert total is not None
    return total.to(graph.types[terms[0].chain.factors[0].value].dtype.torch).contiguous()


def _bias(graph: Graph, terms: Sequence[Term]) -> torch.Tensor | None:
    given = [(t.scale, graph.constants[t.chain.bias].data) for t in terms if t.chain.bias]
    if not given:
        return None
    total = torch.stack([scale * bias.double() for scale, bias in given]).sum(0)
    return total.to(given[0][1].dtype)


def _one_product(graph: Graph, terms: Sequence[Term]) -> Graph:
    build = GraphBuilder(table.infer, "merged")
    b, x = Ops(build), graph.types[terms[0].chain.factors[0].value]
    chain = terms[0].chain
    columns = _sizes(chain, [graph.types[f.value] for f in chain.factors])[-1]
    shapes = [(columns, x.shape[-1]), *([(columns,)] if any(t.chain.bias for t in terms) else [])]
    given = [build.input("x", x)]
    given += [build.input(f"w{i}", TensorType.of(s, x.dtype)) for i, s in enumerate(shapes)]
    b.one("linear", *map(b.sym, given)).output("y")
    return build.finish()
