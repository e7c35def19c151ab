"""Merges casts that do not depend on each other into one call.

A training step casts every weight to 16 bits before it multiplies, and every gradient to 32 bits in
the end. One by one these are hundreds of launches, each of which takes longer to begin than to move
its bytes. A cast can run anywhere between the region that makes its input and the first one that
reads its result. Casts for which these spans share a place run there together: just before the
first of their results is read or, if no region reads any, as soon as all inputs are there. A result
that is written earlier is in memory for longer, so only as many casts are merged as leave the peak
of memory about where it was, and those that are read first come first.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from deuteron.engines.roofline import region_cost
from deuteron.engines.vendor.copies import NAME, is_copy
from deuteron.ir.graph import Graph
from deuteron.ir.region import Region
from deuteron.plan.choose import FALLBACKS, Choice, Survey, at_once, heaviest
from deuteron.plan.memory import Buffer, peak
from deuteron.plan.source import roots_of

LEAST = 4  # casts for one call: fewer are launched as quickly with the regions around them
LARGE = 1 << 25  # casts that move more bytes stay alone: a launch is a small part of their time
ROOM, SPARE = 1.01, 1 << 25  # the peak of memory may grow by this factor, or by this many bytes


def together(
    choices: Sequence[Choice], graph: Graph, dying: Collection[str], survey: Survey
) -> list[Choice]:
    """Return the same work, with casts that can run at one place merged into one region, where that
    takes less time. ``dying``: inputs that nobody needs after a run."""
    cut = [(choice, _apart(choice, survey)) for choice in choices]
    order = [part for _, parts in cut for part in parts]
    kinds: dict[object, list[Choice]] = {}
    for choice in order:
        if is_copy(choice.region) and region_cost(choice.region).bytes < LARGE:
            kinds.setdefault(_kind(choice.region), []).append(choice)
    left = [waiting for waiting in kinds.values() if len(waiting) >= LEAST]
    if not left:
        return list(choices)
    least = _most_memory(order, graph, dying)
    room = max(ROOM * least, least + SPARE)
    for waiting in left:
        while waiting:
            spans = _spans(order)
            waiting.sort(key=lambda c: spans[c.region.outputs])
            end = spans[waiting[0].region.outputs][0]
            group = [c for c in waiting if spans[c.region.outputs][1] <= end]
            while len(group) >= LEAST:
                found = _merged(order, group, spans, graph, survey)
                if found is not None and _most_memory(found, graph, dying) <= room:
                    order = found
                    break
                group = group[: len(group) // 2]
            done = {id(c) for c in (group if len(group) >= LEAST else group[:1])}
            waiting = [c for c in waiting if id(c) not in done]
    there = {id(c) for c in order}
    two = ((c, parts) for c, parts in cut if len(parts) > 1)
    idle = [(c, parts) for c, parts in two if there.issuperset(map(id, parts))]
    whole = {id(head): choice for choice, (head, _) in idle}  # cut for nothing: put together again
    gone = {id(tail) for _, (_, tail) in idle}
    return [whole.get(id(c), c) for c in order if id(c) not in gone]


def _apart(choice: Choice, survey: Survey) -> list[Choice]:
    """Cut a region that torch runs node by node in two, which together cost the same: the nodes
    before, and the casts that end it, such as one that widens the gradient of a product. Any other
    region is left as it is."""
    region = choice.region
    inside = {v for node in region.nodes for v in node.uses}
    last = [n for n in region.nodes if n.op == "cast" and n.output not in inside]
    if choice.candidate.engine != FALLBACKS[0] or not last or is_copy(region):
        return [choice]
    casts = region.part(f"{region.name}b", last, None)
    if not is_copy(casts):
        return [choice]
    rest = [n for n in region.nodes if n not in last]
    head = region.part(f"{region.name}a", rest, heaviest(rest))
    (ends, _), (options, refusals) = survey.ask(casts), survey.ask(head)
    usable = (o for o in options if o.candidate.engine == FALLBACKS[0] and not o.rejected)
    same = next(usable, None)
    if same is None or all(o.rejected for o in ends):  # the policy may rule out engines for some
        return [choice]
    tail = Choice(casts, at_once(casts, ends), ends)
    left = max(choice.best_s - tail.best_s, 0.0)
    same = replace(same, predicted_s=left, error=choice.option.error)
    return [Choice(head, same, options, refusals, note=choice.note), tail]


def _kind(region: Region) -> object:
    """What casts must have in common for one call: both types, and the policy's engines for
    them."""
    types = region.graph.types
    return frozenset(
        (types[n.uses[0]].dtype, types[n.output].dtype, n.engines) for n in region.nodes
    )


def _spans(order: Sequence[Choice]) -> dict[tuple[str, ...], tuple[int, int]]:
    """For every region, by its results: the place of the first region that reads one of them,
    before which it has to run, and the first place where all its inputs have been made."""
    made = {v: i for i, c in enumerate(order) for v in c.region.outputs}
    read: dict[str, int] = {}
    for i, choice in enumerate(order):
        for value in choice.region.inputs:
            read.setdefault(value, i)
    return {
        c.region.outputs: (
            min((read.get(v, len(order)) for v in c.region.outputs), default=len(order)),
            max((made[v] + 1 for v in c.region.inputs if v in made), default=0),
        )
        for c in order
    }


def _merged(
    order: Sequence[Choice],
    group: Sequence[Choice],
    spans: dict[tuple[str, ...], tuple[int, int]],
    graph: Graph,
    survey: Survey,
) -> list[Choice] | None:
    """The order with a group as one region, or None if that takes no less time."""
    nodes = [graph.producer[n.output] for c in group for n in c.region.nodes]
    nodes.sort(key=lambda n: graph.places[n.output])
    whole = graph.subgraph("casts", nodes)
    region = Region(whole, frozenset(v for v in whole.inputs if v in graph.constants))
    options, refusals = survey.ask(region)
    usable = (o for o in options if o.candidate.knobs.get("recipe") == NAME and not o.rejected)
    option = next(usable, None)
    if option is None or option.best_s >= sum(c.best_s for c in group):
        return None
    errors = [c.option.error for c in group if c.option.error is not None]  # results are the same
    option = replace(option, error=max(errors) if len(errors) == len(group) else None)
    note = f"{len(nodes)} casts in one call, instead of one each"
    ends, begins = zip(*(spans[c.region.outputs] for c in group), strict=True)
    place = min(ends) if min(ends) < len(order) else max(begins)
    gone = {id(c) for c in group}
    head, tail = ([c for c in part if id(c) not in gone] for part in (order[:place], order[place:]))
    return [*head, Choice(region, option, options, refusals, note=note), *tail]


def _most_memory(order: Sequence[Choice], graph: Graph, dying: Collection[str]) -> int:
    """The most bytes in use at once: inputs, values until their last reader has run, and
    results."""
    regions = [choice.region for choice in order]
    roots, end = roots_of(regions), len(regions)
    first = {v: i for i, r in enumerate(regions) for v in r.outputs if v not in roots}
    first |= dict.fromkeys(graph.inputs, -1)
    last = dict.fromkeys(first, -1) | {v: end for v in graph.inputs if v not in dying}
    reads = [(v, i) for i, r in enumerate(regions) for v in (*r.inputs, *r.outputs)]
    for value, i in (*reads, *((v, end) for v in graph.output_values)):
        for root in roots.get(value, (value,)):
            if root in last:
                last[root] = max(last[root], i)
    return peak([Buffer(v, graph.types[v].nbytes, first[v], last[v]) for v in first])
