"""When collectives begin and when they are waited for.

A collective runs on a stream or threads of its own, from where it stands to the first region that
reads its result (plan/source.py). Regions that neither make what it sends nor need what it brings
are moved between the two: those behind it, up to the next collective, come before whoever waits,
and those before it, back to the one before, come after it. As many are moved as are done while it
runs, by estimate, because what is computed early or late is kept for longer.

Ranks need not agree on this: each meets the others in the order of the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from deuteron.ops.collective import STARTS
from deuteron.passes.communication import together_seconds
from deuteron.plan.choose import Choice
from deuteron.target import Target


def scheduled(choices: Sequence[Choice], target: Target) -> list[Choice]:
    """The same regions in an order in which more of them run beside collectives."""
    order = list(choices)
    for talk in [c for c in choices if _talks(c)]:
        at = order.index(talk)
        (node,) = talk.region.nodes
        wanted = together_seconds(talk.region.graph, node, target)
        behind = _independent(order, at)
        early, wanted = _taken(behind, wanted)
        late, wanted = _taken(_not_needed(order, at)[::-1], wanted)
        late.reverse()
        moved = {id(c) for c in (*early, *late)}
        head = [c for c in order[:at] if id(c) not in moved]
        tail = [c for c in order[at + 1 :] if id(c) not in moved]
        note = f"runs beside {len(moved)} other regions" if moved else "is waited for"
        order = [*head, replace(talk, note=talk.note or note), *late, *early, *tail]
    return order


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


def _independent(order: Sequence[Choice], at: int) -> list[Choice]:
    """Regions behind a collective, up to the next, that need nothing of it."""
    made, found = set(order[at].region.outputs), []
    for choice in order[at + 1 :]:
        if _talks(choice):
            break
        if made.isdisjoint(choice.region.inputs):
            found.append(choice)
        else:
            made.update(choice.region.outputs)
    return found


def _not_needed(order: Sequence[Choice], at: int) -> list[Choice]:
    """Regions before a collective, back to the one before, that it does not need."""
    needed, found = set(order[at].region.inputs), []
    for choice in order[:at][::-1]:
        if _talks(choice):
            break
        if needed.isdisjoint(choice.region.outputs):
            found.append(choice)
        else:
            needed.update(choice.region.inputs)
    return found[::-1]
