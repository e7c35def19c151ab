"""What is cut off a product may join the reduction behind it.

Fusion gives elementwise work to the product before it. Where no kernel takes both, a library
multiplies, and that work, say the sum with a residual, would be a kernel of its own, and the norm
that reads it another. So for every such pair there is a second way: the product by itself, and the
rest with the reduction, in one pass. Both are priced, or measured, and the cheaper one is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deuteron.engines.roofline import is_product
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.passes.fuse import MAX_NODES
from deuteron.plan.choose import LIBRARY, MARGIN, Choice, Pick, Survey, choose, each_product

SIMPLE = (Fusion.ELEMENTWISE, Fusion.BROADCAST)


@dataclass(frozen=True)
class Join:
    """The places of a product's region and of a reduction's, and what they would be instead."""

    product: int
    reduction: int
    head: Region
    whole: Region


def joins(graph: Graph, regions: Sequence[Region]) -> list[Join]:
    """Every product whose rest could go to a reduction, each region once."""
    home = {out: i for i, r in enumerate(regions) for n in r.nodes for out in n.outputs}
    found: list[Join] = []
    taken: set[int] = set()
    for place, region in enumerate(regions):
        before = (home[v] for v in _rows(region) if v in home)
        for join in (j for i in before for j in _join(graph, regions, home, i, place)):
            if not taken & {join.product, join.reduction}:
                taken |= {join.product, join.reduction}
                found.append(join)
    return found


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
    if not fits or not is_product(graph, nodes[:1]) or each_product(product):
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
    yield Join(i, place, _region(graph, "head", [first], 0), _region(graph, "rest", joined, at))


def _region(graph: Graph, name: str, nodes: Sequence[Node], anchor: int) -> Region:
    sub = graph.subgraph(name, nodes)
    return Region(sub, frozenset(v for v in sub.inputs if v in graph.constants), anchor)


def chosen(
    regions: Sequence[Region], found: Sequence[Join], pick: Pick, survey: Survey
) -> list[Choice]:
    """Choices for all regions, with those joins that are cheaper."""
    each = [choose(region, pick, survey) for region in regions]
    for join in found:
        if [c.candidate.engine for c in each[join.product]] == [LIBRARY]:
            continue  # it takes along what follows for nothing
        head, whole = (choose(part, pick, survey) for part in (join.head, join.whole))
        usual = _seconds(each[join.product]) + _seconds(each[join.reduction])
        if _seconds(head) + _seconds(whole) < usual * MARGIN:
            each[join.product], each[join.reduction] = head, whole
    return [choice for choices in each for choice in choices]


def _seconds(choices: Sequence[Choice]) -> float:
    return sum(c.best_s for c in choices)
