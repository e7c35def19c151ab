"""Pairs of regions that may be others: both ways are priced, or measured, and the cheaper is taken.

What is cut off a product may join the reduction behind it. Fusion gives elementwise work to the
product before it. Where no kernel takes both, a library multiplies, and that work, say the sum with
a residual, would be a kernel of its own, and the norm that reads it another. The second way: the
product by itself, and the rest with the reduction, in one pass.

Two regions may be one, for which there is a kernel, though no library has a call. What a product
over pixels reads may be made on the way in: by elementwise work, or by a convolution in which no
channel sees another. And such a convolution may give the mean of its result as well. Attention may
turn queries and keys by their rotary positions as it loads them. In training three may be one: the
gradient of a batch norm, and both products over pixels that read it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deuteron.engines.roofline import is_depthwise, is_product
from deuteron.explain.units import seconds
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.passes.fuse import MAX_NODES
from deuteron.plan.choose import (
    FALLBACKS,
    LIBRARY,
    MARGIN,
    Choice,
    Pick,
    Survey,
    choose,
    each_product,
)

ATTENTION = ("attention", "attention_lse")
SIMPLE = (Fusion.ELEMENTWISE, Fusion.BROADCAST)
FAR = 1.25  # times the price of the other way from which one is unlikely to win


@dataclass(frozen=True)
class Join:
    """The places of two regions or more, and what they would be instead: two others, or one, which
    runs in the ``place`` of one of them."""

    places: tuple[int, ...]
    parts: tuple[Region, ...]
    place: int


def joins(graph: Graph, regions: Sequence[Region]) -> list[Join]:
    """All regions that could be others, each region once."""
    home = {out: i for i, r in enumerate(regions) for n in r.nodes for out in n.outputs}
    found: list[Join] = []
    taken: set[int] = set()
    for place, region in enumerate(regions):
        before = (home[v] for v in _rows(region) if v in home)
        shared = (j for i in before for j in _join(graph, regions, home, i, place))
        whole = (_one, _pulled, _turned)
        one = (j for find in whole for j in find(graph, regions, home, place))
        for join in (*one, *shared):
            if taken.isdisjoint(join.places):
                taken.update(join.places)
                found.append(join)
    return found


def _one(
    graph: Graph, regions: Sequence[Region], home: dict[str, int], place: int
) -> Iterator[Join]:
    """The region with the one that makes what it reads, where one kernel may run both."""
    region = regions[place]
    node, value = region.nodes[0], (*region.nodes[0].uses, "")[0]
    if value not in home or home[value] == place:
        return
    first = home[value]
    before = regions[first]
    windows = is_depthwise(graph, before.nodes[0])
    simple = all(table.get(n.op).fusion in SIMPLE for n in before.nodes[windows:])
    if before.outputs != (value,) or not simple:
        return
    if len(before.nodes) + len(region.nodes) > MAX_NODES:
        return
    nodes = [graph.producer[n.outputs[0]] for n in (*before.nodes, *region.nodes)]
    anchor = len(before.nodes)
    if _is_of_pixels(graph, node):
        alone = all(u is graph.producer[node.output] for u in graph.users[value])
        if alone and value not in (*graph.output_values, *node.uses[1:]):
            yield Join((first, place), (_region(graph, "whole", nodes, anchor),), place)
    elif windows and region.ops == ("mean",) and tuple(node.attrs["axes"]) == (2, 3):
        yield Join((first, place), (_region(graph, "whole", nodes, 0),), first)


def _is_of_pixels(graph: Graph, node: Node, op: str = "conv") -> bool:
    """Whether it is a convolution of single pixels, one beside the other, or a gradient of one."""
    if node.op != op or graph.types[node.uses[1]].rank != 4 or node.attrs["transposed"]:
        return False
    a, weight = node.attrs, node.output if op == "conv_dw" else node.uses[1]
    single = {*graph.types[weight].shape[2:], *a["stride"], a["groups"]} == {1}
    return single and not any(a["padding"])


def _pulled(
    graph: Graph, regions: Sequence[Region], home: dict[str, int], place: int
) -> Iterator[Join]:
    """The gradient of a batch norm with both of the convolution that it is of, if these alone read
    it: they run in the place of the last, before anybody reads them."""
    norm = regions[place]
    if norm.ops != ("batch_norm_act_grad",):
        return
    value = norm.nodes[0].outputs[0]
    users = graph.users.get(value, ())
    both = zip(users, ("conv_dx", "conv_dw"), strict=False)
    if len(users) != 2 or not all(_is_of_pixels(graph, node, op) for node, op in both):
        return
    places = (place, *(home[node.output] for node in users))
    outside = any(regions[home[n.output]].ops[0] != n.op for n in users)
    if outside or len({*places}) < 3 or value in graph.output_values:
        return
    last = max(places)
    left = (v for p in places for v in regions[p].outputs)
    readers = {home[u.outputs[0]] for v in left for u in graph.users.get(v, ())}
    if min(readers - {*places}, default=last + 1) > last:
        nodes = [graph.producer[n.outputs[0]] for p in places for n in regions[p].nodes]
        nodes.sort(key=lambda n: graph.places[n.outputs[0]])
        yield Join(places, (_region(graph, "whole", nodes, 0),), last)


def _turned(
    graph: Graph, regions: Sequence[Region], home: dict[str, int], place: int
) -> Iterator[Join]:
    """Attention with the rotary positions of its queries, if it alone reads these, and of its keys,
    if nobody does before."""
    region = regions[place]
    if region.ops[0] not in ATTENTION or len(region.nodes) > 1:
        return
    q, k = region.nodes[0].uses[:2]
    turns = {v: home[v] for v in (q, k) if v in home and regions[home[v]].ops == ("rope",)}
    readers = {v: [home[u.outputs[0]] for u in graph.users[v]] for v in turns}
    if readers.get(q) != [place] or q in (k, *region.nodes[0].uses[2:], *graph.output_values):
        return
    if min(readers.get(k, [place])) < place:  # such as a cache
        del turns[k]
    places = (*dict.fromkeys(turns.values()), place)
    if {v for p in places[:-1] for v in regions[p].outputs} <= turns.keys():
        nodes = [graph.producer[n.outputs[0]] for p in places for n in regions[p].nodes]
        yield Join(places, (_region(graph, "whole", nodes, len(nodes) - 1),), place)


def _rows(region: Region) -> Iterator[str]:
    """What a reduction reads of the shape that it reduces."""
    if region.anchor is None:
        return
    anchor = region.nodes[region.anchor]
    if table.get(anchor.op).fusion is Fusion.REDUCTION:
        types = region.graph.types
        shape = types[anchor.uses[0]].shape
        yield from (v for v in region.inputs if types[v].shape == shape)


def _join(
    graph: Graph, regions: Sequence[Region], home: dict[str, int], i: int, place: int
) -> Iterator[Join]:
    product, region = regions[i], regions[place]
    assert region.anchor is not None
    nodes, tail = product.nodes, product.nodes[1:]
    fits = tail and product.anchor == 0 and len(tail) + len(region.nodes) <= MAX_NODES
    if not fits or not is_product(nodes[:1]) or each_product(product):
        return
    if not all(table.get(n.op).fusion in SIMPLE for n in tail):
        return
    made = [v for n in tail for v in n.outputs]
    readers = {home[u.outputs[0]] for v in made for u in graph.users.get(v, ())}
    if any(r < place and r != i for r in readers):
        return  # somebody reads it before the reduction can run
    anchor = region.nodes[region.anchor].outputs[0]
    joined = [graph.producer[n.outputs[0]] for n in (*tail, *region.nodes)]
    joined.sort(key=lambda n: graph.places[n.outputs[0]])
    at = next(k for k, n in enumerate(joined) if anchor in n.outputs)
    first = graph.producer[nodes[0].outputs[0]]
    parts = _region(graph, "head", [first], 0), _region(graph, "rest", joined, at)
    yield Join((i, place), parts, place)


def _region(graph: Graph, name: str, nodes: Sequence[Node], anchor: int) -> Region:
    sub = graph.subgraph(name, nodes)
    return Region(sub, frozenset(v for v in sub.inputs if v in graph.constants), anchor)


def chosen(
    regions: Sequence[Region], found: Sequence[Join], pick: Pick, survey: Survey
) -> list[Choice]:
    """Choices for all regions, with those joins that are cheaper."""
    each = [choose(region, pick, survey) for region in regions]
    for join in found:
        first = join.places[0]
        if len(join.parts) > 1 and [c.candidate.engine for c in each[first]] == [LIBRARY]:
            continue  # it takes along what follows for nothing
        parts = [choose(part, pick, survey) for part in join.parts]
        usual = sum(_seconds(each[i]) for i in join.places)
        told = _told(parts[0], usual) if len(parts) == 1 else ""
        if sum(map(_seconds, parts)) < usual * MARGIN:
            for i in join.places:
                each[i] = []
            each[join.place] = parts.pop()
            if parts:
                each[first] = parts.pop()
        if told:
            last = each[join.place][-1]
            each[join.place][-1] = replace(last, note=told)
    return [choice for choices in each for choice in choices]


def _told(whole: Sequence[Choice], apart: float) -> str:
    """What one kernel for all costs beside what they cost apart; if it is predicted to be quicker
    and was not taken, why."""
    hoped = [o for o in whole[0].options if not o.rejected and o.candidate.engine not in FALLBACKS]
    if not hoped or len(whole) > 1:
        return ""
    best = min(hoped, key=lambda o: o.best_s)
    told = f"{' + '.join(whole[0].region.ops)} as one: {seconds(best.best_s)}, "
    told += f"apart: {seconds(apart)}"
    waits = best.measured_s is None and not best.candidate.by_estimate
    return told + (", which a measurement decides" if waits and best.best_s < apart else "")


def unlikely(
    regions: Sequence[Region], found: Sequence[Join], pick: Pick, survey: Survey
) -> frozenset[str]:
    """Texts of the regions that ``pick`` prices far above what would be run instead: parts of a
    join, or what it joins."""
    each = [_seconds(choose(region, pick, survey)) for region in regions]
    left, likely = set[str](), set[str]()
    joined = {i for join in found for i in join.places}
    likely.update(r.text for i, r in enumerate(regions) if i not in joined)
    for join in found:
        usual = sum(each[i] for i in join.places)
        instead = sum(_seconds(choose(part, pick, survey)) for part in join.parts)
        places, parts = {regions[i].text for i in join.places}, {p.text for p in join.parts}
        (left if usual > FAR * instead else likely).update(places)
        (left if instead > FAR * usual else likely).update(parts)
    return frozenset(left - likely)


def _seconds(choices: Sequence[Choice]) -> float:
    return sum(c.best_s for c in choices)
