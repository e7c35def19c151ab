"""Other ways to draw the border between neighbouring regions, or to remove it. Both ways are
priced, or measured, and the cheaper one is taken.

The epilogue of a product may join the reduction behind it. Fusion attaches elementwise work to the
product before it. Where no kernel runs both, a library multiplies, and the elementwise work, say
adding a residual, is a kernel of its own, and the norm that reads its result another. The second
way: the product by itself, and the rest together with the reduction, in one pass.

Two regions may become one, if we have a kernel for both, though no library has a call. A 1×1
convolution may compute its input as it loads it: by elementwise work, or by a depthwise
convolution. A depthwise convolution may give the mean of its result as well. Attention may apply
rotary positions to queries and keys as it loads them. In training three regions may become one: the
gradient of a batch norm, and both gradients of a 1×1 convolution, which read it.
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
FAR = 1.25  # a way that costs more than this times the other way is unlikely to win


@dataclass(frozen=True)
class Join:
    """The places of two regions or more, and the ``parts`` that may replace them: two regions, or
    one. The last part runs at ``place``, the place of one of them."""

    places: tuple[int, ...]
    parts: tuple[Region, ...]
    place: int


def joins(graph: Graph, regions: Sequence[Region]) -> list[Join]:
    """All joins that are possible, such that each region is in one of them at most."""
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
    """Join the region with the one that makes its first input, if one kernel may run both."""
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
    """Whether the node is a 1×1 convolution with stride 1, without padding or groups; with another
    ``op``, whether it is that gradient of one."""
    if node.op != op or graph.types[node.uses[1]].rank != 4 or node.attrs["transposed"]:
        return False
    a, weight = node.attrs, node.output if op == "conv_dw" else node.uses[1]
    single = {*graph.types[weight].shape[2:], *a["stride"], a["groups"]} == {1}
    return single and not any(a["padding"])


def _pulled(
    graph: Graph, regions: Sequence[Region], home: dict[str, int], place: int
) -> Iterator[Join]:
    """Join the gradient of a batch norm with both gradients of the convolution before that norm, if
    only these read it. All run at the place of the last one, if no other region reads their results
    before that."""
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
    """Join attention with the region that applies rotary positions to its queries, if no other
    region reads those, and with the one for its keys, if no region reads those earlier."""
    region = regions[place]
    if region.ops[0] not in ATTENTION or len(region.nodes) > 1:
        return
    q, k = region.nodes[0].uses[:2]
    turns = {v: home[v] for v in (q, k) if v in home and regions[home[v]].ops == ("rope",)}
    readers = {v: [home[u.outputs[0]] for u in graph.users[v]] for v in turns}
    if readers.get(q) != [place] or q in (k, *region.nodes[0].uses[2:], *graph.output_values):
        return
    if min(readers.get(k, [place])) < place:  # an earlier reader of the keys, such as a cache
        del turns[k]
    places = (*dict.fromkeys(turns.values()), place)
    if {v for p in places[:-1] for v in regions[p].outputs} <= turns.keys():
        nodes = [graph.producer[n.outputs[0]] for p in places for n in regions[p].nodes]
        yield Join(places, (_region(graph, "whole", nodes, len(nodes) - 1),), place)


def _rows(region: Region) -> Iterator[str]:
    """Yield the inputs of a reduction's region that have the shape of what it reduces."""
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
        return  # another region reads the epilogue's results before the reduction can run
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
            continue  # the library runs the epilogue at no extra cost
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
    """A note that compares the cost of one kernel for all regions with their cost apart. If the
    kernel is predicted to be quicker, but only a measurement may choose it, the note says so."""
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
    """Texts of the regions that will probably not run, because ``pick`` prices them far above the
    other way: the regions of a join, or the parts that would replace them."""
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
