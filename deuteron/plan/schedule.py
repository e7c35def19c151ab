"""The order in which regions run: those that take memory run as late as possible, and other work
runs beside collectives.

A region whose results are larger than the values that die with it waits until the first region that
reads one of them is due. So a value that backward computes again is not in memory before its
layer's turn has come.

A collective runs on a stream or threads of its own, from its place in the order to the first region
that reads its result (plan/source.py). Regions that neither make what it sends nor need what it
receives are moved between the two: regions behind it, up to the next collective, move ahead of the
region that waits for it, and regions before it, back to the previous collective, move behind its
start. Only as many are moved as can finish while it runs, by estimate, because a value that is
computed earlier or read later is in memory for longer. A result that no other region waits for,
such as a mean that was sent in fewer bits and then cast to its own type, is computed last of all.

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
    """Return the same regions in an order in which more of them run beside collectives."""
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
    """Return the same regions with those moved to the end that read nothing but results of
    collectives, and whose own results no other region reads."""
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
    """Return the same regions in an order in which those that take more memory than they free run
    as late as possible. ``dying``: inputs whose memory is free once the last region has read them.
    """
    regions = [choice.region for choice in choices]
    roots, leaving = roots_of(regions), graph.output_values
    made = {v: i for i, region in enumerate(regions) for v in region.outputs}
    kept = {root for v in leaving for root in roots.get(v, (v,))}
    kept |= (set(graph.inputs) - set(dying)) | set(graph.constants)
    reads = [{root for v in r.inputs for root in roots.get(v, (v,))} - kept for r in regions]
    unread: dict[str, set[int]] = {}  # value → regions that read it and have not run yet
    for i, values in enumerate(reads):
        for value in values:
            unread.setdefault(value, set()).add(i)
    order, waiting = list[int](), set[int]()

    def grows(some: set[int]) -> bool:
        """Whether more memory is in use after these regions than before, or they allocate none."""
        new = {v for i in some for v in regions[i].outputs if v not in roots}
        old = {v for i in some for v in reads[i] if unread[v] <= some}
        takes, dies = (sum(graph.types[v].nbytes for v in values) for values in (new, old))
        return takes > dies or not takes

    def run(some: set[int]) -> set[str]:
        """Append regions to the order, after the waiting ones that they need. Returns all values
        that these regions read."""
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
        while look:  # run waiting regions, too, that alone keep a value alive, if that frees memory
            last = unread[look.pop()]
            if last and last <= waiting and not grows(last):
                look += sorted(run(set(last)))
    return [choices[i] for i in (*order, *sorted(waiting))]


def _talks(choice: Choice) -> bool:
    first = choice.region.nodes[0]
    return first.op in STARTS and first.attrs["ranks"] > 1


def _taken(found: Sequence[Choice], seconds: float) -> tuple[list[Choice], float]:
    """Return the first regions that fill ``seconds``, and the seconds that are left to be
    filled."""
    taken = []
    for choice in found:
        if seconds <= 0:
            break
        taken.append(choice)
        seconds -= choice.best_s
    return taken, seconds


def _unrelated(first: Choice, others: Iterable[Choice], ends: str, touching: str) -> list[Choice]:
    """Return the regions up to the next collective that do not depend on the first. With
    ``touching`` "inputs" and ``ends`` "outputs": what they read was not made by the first, nor by a
    region that depends on it. With the two exchanged: regions that the first does not depend on."""
    related, found = set(getattr(first.region, ends)), []
    for choice in others:
        if _talks(choice):
            break
        if related.isdisjoint(getattr(choice.region, touching)):
            found.append(choice)
        else:
            related.update(getattr(choice.region, ends))
    return found
