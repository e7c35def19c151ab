"""Attention as models write it out becomes one operator, which never writes the scores to memory:

    softmax(scale · q·kᵀ + bias) · v

Between the products there may be, in any order: factors, also on q or k before, or one for each
head; biases and masks that are added; masks that replace scores by −∞ or a very low number; views
that merge or split batch, windows and heads; casts to float32 and back. The rule does not apply if
anything else reads a score or a probability, or if the plan would take longer.

Numbers: factors and biases are put together in float32, and nothing between the products is rounded
to 16 bits, so the result is at least as exact as what was written. A row that may look at no key is
nan if −∞ was filled in, and the mean of all values if a low number replaced its scores; the
operator gives zeros. If the mask is a constant with such a row, the rule does not apply; if it is
computed and could have one, the row is corrected afterwards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import start
from deuteron.ir.types import Shape
from deuteron.ops import Ops, Sym, table
from deuteron.passes.cleanup import FOLD_LIMIT, dead_code
from deuteron.passes.context import Context, replaced
from deuteron.passes.layout import choose_layout
from deuteron.passes.spellings import as_models_write

# a score that is filled in hides its key if it is this low, as the lowest number of every type is
HIDES = -6e4
MOVES = ("reshape", "permute", "slice")


class _Added(NamedTuple):
    """A bias and its factor, and the shape that the scores had where it was added. With ``fill`` it
    is a mask: where it is true (``inverted``: where it is false) the score is kept, elsewhere it is
    replaced by ``fill``."""

    value: str
    shape: Shape
    factor: float = 1.0
    fill: float | None = None
    inverted: bool = False


@dataclass(frozen=True)
class _Scores:
    """What lies between the first product and softmax, listed backwards from softmax."""

    nodes: tuple[Node, ...] = ()
    shapes: tuple[Shape, ...] = ()
    factor: float = 1.0
    rows: tuple[_Added, ...] = ()  # factors for each head or query
    added: tuple[_Added, ...] = ()


class _Operand(NamedTuple):
    """q, kᵀ or v before it was widened or scaled, the nodes that lead from there to the product,
    and the factor."""

    value: str
    nodes: tuple[Node, ...] = ()
    factor: float = 1.0


class _Found(NamedTuple):
    """Attention written out: its nodes, of which the last is the second product; q, kᵀ and v; batch
    and heads; factors for each head or query; the constant bias or mask; biases and masks that are
    not constant."""

    nodes: list[Node]
    operands: list[_Operand]
    scale: float
    lead: tuple[int, int]
    rows: tuple[_Added, ...]
    known: torch.Tensor | None
    rest: list[_Added]


def join_attention(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with attention as one operator, where that is cheaper."""
    graph = dead_code(graph)  # dead code would count as a reader
    ends = (node for node in graph.nodes if node.op == "matmul")
    found = {node.output: f for node in ends if (f := _found(graph, node)) is not None}
    chosen = {end: f for end, f in found.items() if _is_cheaper(graph, f, ctx)}
    if not chosen:
        return graph
    ctx.fired["attention written out"] += len(chosen)
    return dead_code(replaced(graph, chosen, partial(_joined, graph)))


def _is_cheaper(graph: Graph, found: _Found, ctx: Context) -> bool:
    if ctx.price is None:
        return True
    kinds = tuple((n.op, n.attrs, tuple(graph.in_types(n))) for n in found.nodes)
    key = ("attention", kinds, None if found.known is None else tuple(found.known.shape))
    if key not in ctx.forms:
        written = graph.subgraph("attention", found.nodes)
        build, names = start(written, table.infer)
        _joined(graph, Ops(build), found, names).output("y")
        alone = replace(ctx, fired=Counter(), promised={})
        joined = choose_layout(as_models_write(dead_code(build.finish()), alone), alone)
        apart = ctx.price(written, math.inf)
        ctx.forms[key] = "whole" if ctx.price(joined, apart) < apart else "written out"
    return ctx.forms[key] == "whole"


# ---- what was written ----------------------------------------------------------------------------


def _found(graph: Graph, end: Node) -> _Found | None:
    """The attention that ends with the product ``end`` of probabilities and values; else None."""
    weights, nodes, out = end.uses[0], [end], graph.types[end.output]
    while (node := _alone(graph, weights)) is not None and _is_passed(graph, node):
        nodes.append(node)
        weights = node.uses[0]
    if node is None or node.op != "softmax" or not out.dtype.is_float:
        return None
    scores = _scores(graph, node.uses[0], _Scores())
    if scores is None or node.attrs["axis"] != len(scores.shapes[0]) - 1:
        return None
    nodes += [node, *scores.nodes]
    product, kinds = nodes[-1], {graph.types[n.output].dtype for n in nodes}
    if not _is_batched(graph, product) or not _is_batched(graph, end):
        return None
    if any(kind.bits > max(32, out.dtype.bits) for kind in kinds):
        return None  # float64 was asked for, to be exact
    for operands in (
        [*(_source(graph, v, True) for v in product.uses), _source(graph, end.uses[1], False)],
        [_Operand(v) for v in (*product.uses, end.uses[1])],
    ):
        if {graph.types[operand.value].dtype for operand in operands} == {out.dtype}:
            break
    else:
        return None
    scale = scores.factor * math.prod(operand.factor for operand in operands)
    lead = max((shape[:-2] for shape in scores.shapes), key=len)
    pair = (math.prod(lead[:-1]), lead[-1] if lead else 1)
    bias = _biases(graph, scores, pair, out.dtype.torch)
    if bias is None or not 0 < scale < math.inf or not out.numel * math.prod(scores.shapes[0]):
        return None
    nodes += [n for operand in operands for n in operand.nodes]
    nodes.sort(key=lambda n: graph.places[n.outputs[0]])
    return _Found(nodes, operands, scale, pair, scores.rows, *bias)


def _alone(graph: Graph, value: str) -> Node | None:
    """The node that made ``value``, if that is read only once."""
    read = len(graph.users.get(value, ())) + (value in graph.output_values)
    return graph.producer.get(value) if read == 1 else None


def _is_passed(graph: Graph, node: Node) -> bool:
    """Whether a node only views scores with other batch dimensions, or casts them."""
    if node.op not in ("reshape", "cast"):
        return False
    of, to = graph.types[node.uses[0]], graph.types[node.output]
    if node.op == "cast":
        return of.dtype.is_float and to.dtype.is_float
    return min(of.rank, to.rank) >= 2 and of.shape[-2:] == to.shape[-2:]


def _is_batched(graph: Graph, product: Node) -> bool:
    """Whether each matrix of the first operand meets one of the second, which may be shared."""
    (x, y), out = (graph.types[v].shape for v in product.uses), graph.types[product.output].shape
    return min(len(x), len(y)) >= 2 and x[:-2] == out[:-2]


def _scores(graph: Graph, value: str, found: _Scores) -> _Scores | None:
    """Collect what lies between softmax and the first product, going back from the input of
    softmax."""
    node, shape = _alone(graph, value), graph.types[value].shape
    if node is None or len(shape) < 2:
        return None
    found = replace(found, nodes=(*found.nodes, node), shapes=(*found.shapes, shape))
    if node.op == "matmul":
        return found
    if _is_passed(graph, node):
        return _scores(graph, node.uses[0], found)
    if node.op not in ("add", "mul", "div", "where"):
        return None
    x, y = node.uses[-2:]
    for inner, other in ((x, y), (y, x))[: 1 if node.op == "div" else 2]:
        more = _with(graph, node, other, shape, found)
        if more is not None and graph.types[inner].shape == shape:
            made = _scores(graph, inner, more)
            if made is not None:
                return made
    return None


def _with(graph: Graph, node: Node, other: str, shape: Shape, found: _Scores) -> _Scores | None:
    """What was found, plus a step that combines scores of a shape with another operand; None if it
    does not fit."""
    number, kind = graph.scalar(other), graph.types[other]
    if node.op in ("mul", "div") and number is not None:
        if isinstance(number, bool) or not 0 < number < math.inf:
            return None
        times = float(number) if node.op == "mul" else 1.0 / number
        return replace(found, factor=found.factor * times)
    if node.op == "mul" and kind.dtype.is_float and kind.shape[-1:] == (1,):
        return replace(found, rows=(*found.rows, _Added(other, shape)))
    if found.rows or node.op in ("mul", "div"):
        return None  # what was added before such factors would be multiplied by them, too
    if node.op == "add" and kind.dtype.is_float:
        return replace(found, added=(*found.added, _Added(other, shape, found.factor)))
    low = math.nan if number is None else number * found.factor
    if node.op != "where" or not low <= HIDES:
        return None
    mask = _Added(node.uses[0], shape, fill=low, inverted=other == node.uses[1])
    return replace(found, added=(*found.added, mask))


def _source(graph: Graph, value: str, scaled: bool) -> _Operand:
    """An operand before it was widened and, if ``scaled``, multiplied by a number. What others read
    as well is taken as it is."""
    passed, factor, best = list[Node](), 1.0, _Operand(value)
    while (node := _alone(graph, value)) is not None:
        of, to = graph.types[node.uses[0]].dtype, graph.types[node.outputs[0]].dtype
        by = graph.scalar(node.uses[1]) if scaled and node.op in ("mul", "div") else None
        passed.insert(0, node)
        value = node.uses[0]
        if by is not None and not isinstance(by, bool) and by > 0 and of == to:
            factor *= float(by) if node.op == "mul" else 1.0 / by
        elif not (node.op == "cast" and of.is_low and to.short == "f32"):
            if node.op not in MOVES:
                break
            continue
        best = _Operand(value, tuple(passed), factor)
    return best


# ---- biases and masks ----------------------------------------------------------------------------


def _known(graph: Graph, value: str) -> torch.Tensor | None:
    """The numbers of a constant, or of the constant that was expanded to ``value``; else None."""
    node = graph.producer.get(value)
    value = node.uses[0] if node is not None and node.op == "expand" else value
    return graph.constants[value].data if value in graph.constants else None


def _laid(data: torch.Tensor, at: Shape, lead: tuple[int, int]) -> torch.Tensor:
    """Reshape a constant that meets scores of the shape ``at`` to [batch, heads, queries, keys],
    with 1 for batch or heads if it is the same for all of them."""
    data = data.reshape((1,) * (len(at) - data.ndim) + tuple(data.shape))
    last = tuple(data.shape[-2:])
    if math.prod(data.shape[:-2]) == 1:
        return data.reshape(1, 1, *last)
    data = data.expand(*at[:-2], *last).reshape(*lead, *last)
    for d in (0, 1):
        first = data.narrow(d, 0, 1)
        data = first if torch.equal(data, first.expand_as(data)) else data
    return data


def _biases(
    graph: Graph, scores: _Scores, lead: tuple[int, int], kind: torch.dtype
) -> tuple[torch.Tensor | None, list[_Added]] | None:
    """Return all constant biases and masks combined into one, in an element type that rounds no
    more than what was written, and the biases and masks that are not constant. None where a row
    could end up with other numbers than were written."""
    rest = [a for a in scores.added if _known(graph, a.value) is None]
    total, seen, keeps = None, None, True
    for a in scores.added:
        data = _known(graph, a.value)
        if data is None:
            continue
        if math.prod((*lead, *a.shape[-2:])) > FOLD_LIMIT:
            return None
        data = _laid(data, a.shape, lead)
        if a.fill is not None:
            data = ~data if a.inverted else data
            seen = data if seen is None else seen & data
            continue
        keeps = keeps and (data.dtype == kind or torch.equal(data.to(kind).to(data.dtype), data))
        data = data.to(torch.promote_types(kind, torch.float32)) * a.factor
        total = data if total is None else total + data
    masks = [a for a in rest if a.fill is not None]
    if masks and (seen is not None or len(rest) > 1 or scores.added[0] is not masks[0]):
        return None
    # where nothing is seen, a number that was filled in meets what was added
    filled = any(a.fill is not None and a.fill > -math.inf for a in scores.added)
    if seen is not None and filled and any(_may_hide(graph, a) for a in rest):
        return None
    if seen is not None and (total is not None or rest):
        total = torch.where(seen, torch.zeros(()) if total is None else total, -math.inf)
    if total is not None:
        total = total.to(kind if keeps else torch.float32)
        hidden = total <= (HIDES if filled else -math.inf)
        if bool(hidden.any()) and (masks or bool(hidden.all(-1).any())):
            return None
    elif seen is not None and not bool(seen.any(-1).all()):
        return None
    made = seen if total is None else total
    if made is not None:
        made = made.expand(*made.shape[:-1], scores.shapes[0][-1]).contiguous()
    return made, rest


def _may_hide(graph: Graph, bias: _Added) -> bool:
    """Whether a bias that is not constant may hide keys: its numbers may be low enough or, where
    nodes do not tell, come from outside. What was computed of products counts as a score."""
    found = _least(graph, bias.value, {})
    if found is not None:
        return found[0] * bias.factor <= HIDES
    asked, known = [bias.value], set[str]()
    while asked:
        node = graph.producer.get(value := asked.pop())
        if node is None and (value not in graph.constants or _is_low(graph, value)):
            return True
        if node is not None and node.op in ("add", *BOUNDS) and value not in known:
            asked += node.uses[1:] if node.op == "where" else node.uses
        known.add(value)
    return False


def _is_low(graph: Graph, constant: str) -> bool:
    """Whether a constant, perhaps with the other sign, holds numbers that hide a key."""
    return bool((graph.constants[constant].data.abs() >= -HIDES).any())


Range = tuple[float, float] | None


def _least(graph: Graph, value: str, seen: dict[str, Range]) -> Range:
    """The least and the largest number that a value can hold, or None where its nodes do not tell.
    ``seen`` holds what is known already: many nodes may read a value."""
    if value not in seen:
        seen[value] = _least_of(graph, value, seen)
    return seen[value]


def _least_of(graph: Graph, value: str, seen: dict[str, Range]) -> Range:
    node, kind = graph.producer.get(value), graph.types[value].dtype
    if value in graph.constants:
        data = graph.constants[value].data.double()
        found: Range = (float(data.min()), float(data.max()))
    elif node is None:
        found = (0.0, 1.0) if kind.kind == "bool" else None
    elif kind.kind == "bool":
        found = (0.0, 1.0)
    elif node.op not in BOUNDS:
        found = None
    else:
        read = node.uses[1:] if node.op == "where" else node.uses
        inside = [_least(graph, v, seen) for v in read]
        found = None if None in inside else BOUNDS[node.op](*inside)
    if found is None or not kind.is_float:
        return found
    most = torch.finfo(kind.torch).max
    return found if -most <= found[0] and found[1] <= most else None


def _hull(*parts: tuple[float, float]) -> tuple[float, float]:
    return min(p[0] for p in parts), max(p[1] for p in parts)


def _products(x: tuple[float, float], y: tuple[float, float]) -> tuple[float, float]:
    each = [a * b for a in x for b in y]
    return min(each), max(each)


BOUNDS: dict[str, Any] = dict.fromkeys(("where", "cast", "expand", *MOVES), _hull)
BOUNDS |= {"mul": _products, "sub": lambda x, y: (x[0] - y[1], x[1] - y[0])}


# ---- what is made of it --------------------------------------------------------------------------


def _four(b: Ops, x: Sym, at: Shape, lead: tuple[int, int]) -> Sym:
    """As :func:`_laid`, for a value that is not constant."""
    last = ((1,) * (2 - x.rank) + x.shape)[-2:]
    outer = (1,) * (len(at) - max(x.rank, 2)) + x.shape[:-2]
    if math.prod(outer) == 1:
        return b.one("reshape", x, shape=(1, 1, *last))
    if at[:-2] != lead:
        x, outer = b.one("expand", x, shape=(*at[:-2], *last)), lead
    return b.one("reshape", x, shape=(*outer, *last))


def _joined(graph: Graph, b: Ops, found: _Found, names: Mapping[str, str]) -> Sym:
    """Emit the operator, and correct rows that see nothing."""

    def moved(operand: _Operand) -> Sym:
        x = b.sym(names[operand.value])
        for node in operand.nodes:
            x = b.one(node.op, x, **node.attrs) if node.op in MOVES else x
        return x

    def laid(x: Sym, shared: bool = False) -> Sym:
        """An operand as [batch, heads, rows, features], with one head if it has one for all."""
        *outer, rows, features = x.shape
        if shared:
            return b.one("reshape", x, shape=(batch, 1, rows, features))
        if math.prod(outer) != batch * heads:
            x = b.one("expand", x, shape=(*whole, rows, features))
        return b.one("reshape", x, shape=(batch, heads, rows, features))

    (batch, heads), end = found.lead, found.nodes[-1]
    q, k, v = (moved(operand) for operand in found.operands)
    k = b.one("permute", k, dims=(*range(k.rank - 2), k.rank - 1, k.rank - 2))
    whole = q.shape[:-2]
    shared = heads > 1 and all(x.shape[:-2] == (batch, 1) for x in (k, v))
    q, k = laid(q), laid(k, shared)
    whole = graph.types[end.uses[0]].shape[:-2]
    v = laid(v, shared)
    for row in found.rows:
        if (data := _known(graph, row.value)) is not None:
            factor = b.constant(_laid(data, row.shape, found.lead), "factor")
        else:
            factor = _four(b, b.sym(names[row.value]), row.shape, found.lead)
        q = b.to(b.one("mul", q, factor), q.dtype)
    bias = None if found.known is None else b.constant(found.known, "bias")
    unsure, masks = False, list[tuple[float, Sym]]()
    for a in found.rest:
        other = _four(b, b.sym(names[a.value]), a.shape, found.lead)
        if a.fill is not None:
            masks.append((a.fill, b.one("logical_not", other) if a.inverted else other))
            continue
        unsure = unsure or _least(graph, a.value, {}) is None
        other = other if a.factor == 1.0 else other * a.factor
        bias = other if bias is None else b.one("add", bias, other)
    for _, seen in masks:
        bias = seen if bias is None else b.one("where", seen, bias, -math.inf)
    out = b.one("attention", q, k, v, bias, scale=found.scale)
    for fill, seen in masks:
        all_alike = b.one("mean", v, axes=(2,), keepdim=True) if fill > -math.inf else math.nan
        out = b.one("where", b.one("any", seen, axes=(3,), keepdim=True), out, all_alike)
    if unsure:
        best = b.one("max", bias, axes=(3,), keepdim=True)
        out = b.one("where", b.one("eq", best, -math.inf), math.nan, out)
    return b.one("reshape", out, shape=graph.types[end.output].shape)
