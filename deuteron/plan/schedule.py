"""In which order regions run: what takes memory no sooner than it is read, and when collectives
begin and are waited for.

A region whose results are larger than what dies with it waits for the first that reads one of them.
So what a gradient computes again is not there before its layer's turn has come.

A collective runs on a stream or threads of its own, from where it stands to the first region that
reads its result (plan/source.py). Regions that neither make what it sends nor need what it brings
are moved between the two: those behind it, up to the next collective, come before whoever waits,
and those before it, back to the one before, come after it. As many are moved as are done while it
runs, by estimate, because what is computed early or late is kept for longer. What nobody waits for,
such as a mean that was sent in fewer bits and is a result in its own type, comes behind all else.

Ranks need not agree on this: each meets the others in the order of the collectives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from deuteron.ir.graph import Graph
from deuteron.ops.collective import STARTS
from deuteron.passes.communication import together_seconds
from deuteron.passes.split import ONCE
from deuteron.plan.choose import Choice
from deuteron.plan.source import roots_of
from deuteron.target import Target


def scheduled(choices: Sequence[Choice], target: Target) -> list[Choice]:
    """The same regions in an order in which more of them run beside collectives."""
    order = _last(choices)
    for talk in [c for c in choices if _talks(c)]:
        at = order.index(talk)
        (node,) = talk.region.nodes
        wanted = together_seconds(talk.region.graph, node, target)
        behind = _unrelated(order[at], order[at + 1 :], "outputs", "inputs")
        early, wanted = _taken(behind, wanted)
        before = _unrelated(order[at], order[:at][::-1], "inputs", "outputs")
        late, wanted = _taken(before, wanted)
        late.reverse()
        moved = {id(c) for c in (*early, *late)}
        head = [c for c in order[:at] if id(c) not in moved]
        tail = [c for c in order[at + 1 :] if id(c) not in moved]
        note = f"runs beside {len(moved)} other regions" if moved else "is waited for"
        order = [*head, replace(talk, note=talk.note or note), *late, *early, *tail]
    return order


def _last(choices: Sequence[Choice]) -> list[Choice]:
    """The same regions, last those that read nothing but what collectives bring, and that no other
    reads."""
    brought = {v for c in choices if _talks(c) for v in c.region.outputs}
    if not brought:
        return list(choices)
    roots = roots_of([c.region for c in choices])
    read = {v for c in choices for v in c.region.inputs}

    def late(c: Choice) -> bool:
        given = {r for v in c.region.inputs for r in roots.get(v, (v,))} - set(c.region.constants)
        return brought.issuperset(given) and read.isdisjoint(c.region.outputs) and not _talks(c)

    return sorted(choices, key=late)


def when_read(choices: Sequence[Choice], graph: Graph, dying: Collection[str]) -> list[Choice]:
    """The same regions, those that take more memory than they free as late as possible. ``dying``:
    inputs of which nobody reads anything after the last region that does."""
    regions = [choice.region for choice in choices]
    roots, leaving = roots_of(regions), graph.output_values
    made = {v: i for i, region in enumerate(regions) for v in region.outputs}
    kept = {root for v in leaving for root in roots.get(v, (v,))}
    kept |= (set(graph.inputs) - set(dying)) | set(graph.constants)
    reads = [{root for v in r.inputs for root in roots.get(v, (v,))} - kept for r in regions]
    unread: dict[str, set[int]] = {}  # by which regions, of those that have not run
    for i, values in enumerate(reads):
        for value in values:
            unread.setdefault(value, set()).add(i)
    order, waiting = list[int](), set[int]()

    def grows(some: set[int]) -> bool:
        """Whether more memory is in use after these regions than before."""
        new = {v for i in some for v in regions[i].outputs if v not in roots}
        old = {v for i in some for v in reads[i] if unread[v] <= some}
        takes, dies = (sum(graph.types[v].nbytes for v in values) for values in (new, old))
        return takes > dies or not takes

    def run(some: set[int]) -> set[str]:
        """Run regions after those that they wait for; all that was read."""
        due, asked = set(some), list(some)
        while asked:
            found = {made[v] for v in regions[asked.pop()].inputs if made.get(v) in waiting} - due
            due |= found
            asked += found
        waiting.difference_update(due)
        order.extend(sorted(due))
        for i in due:
            for value in reads[i]:
                unread[value].discard(i)
        return {value for i in due for value in reads[i]}

    for i, region in enumerate(regions):
        waiting.add(i)
        waits = leaving.isdisjoint(region.outputs) and ONCE.isdisjoint(region.ops) and grows({i})
        look = sorted(reads[i] if waits else run({i}))
        while look:  # for what nobody but those that wait still reads, so that it lives for them
            last = unread[look.pop()]
            if last and last <= waiting and not grows(last):
                look += sorted(run(set(last)))
    return [choices[i] for i in (*order, *sorted(waiting))]


def _talks(choice: Choice) -> bool:
    first = choice.region.nodes[0]
    return first.op in STARTS and first.attrs["ranks"] > 1


def _taken(found: Sequence[Choice], seconds: float) -> tuple[list[Choice], float]:
    """The first of them that fill so many seconds, and how many are left."""
    taken = []
    for choice in found:
        if seconds <= 0:
            break
        taken.append(choice)
        seconds -= choice.best_s
    return taken, seconds


def _unrelated(first: Choice, others: Iterable[Choice], ends: str, touching: str) -> list[Choice]:
    """Regions up to the next collective that do not depend on the first: what these read
    (``touching``) was not made (``ends``) by it, nor by one that does; or the other way round."""
    related, found = set(getattr(first.region, ends)), []
    for choice in others:
        if _talks(choice):
            break
        if related.isdisjoint(getattr(choice.region, touching)):
            found.append(choice)
        else:
            related.update(getattr(choice.region, ends))
    return found
