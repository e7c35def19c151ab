"""The schedules of torch.distributed.pipelining, simulated event by event: what each rank of a
pipeline does, and when. Ranks begin messages and wait for them where torch 2.13 does.

Beside its work a rank has one queue of messages for every rank that it talks to, as NCCL has
streams, and one more for groups of messages. A message is under way when both of its ranks have
reached it in their queues. In 1F1B a rank also waits for what it sends: it sends a result together
with receiving what its neighbour owes it, and goes on when both are done. In the interleaved
schedule a message begins as soon as its content is computed, and a rank only waits for messages
that it reads; but a message must wait for all that its two ranks have begun between them before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deuteron.errors import GraphError


class Work(NamedTuple):
    """Work: the forward pass of one stage for one micro-batch or, with ``back``, the backward."""

    back: bool
    stage: int
    batch: int


class Message(NamedTuple):
    """What ``stage`` needs to begin: it comes from the stage before it or, in the backward pass
    (``back``), from the stage after it."""

    back: bool
    stage: int
    batch: int


GROUPS = -1  # the queue for groups of messages; other queues have the numbers of ranks


@dataclass
class Group:
    """Messages that begin together, after earlier ones in ``queue``. ``ready``: when the rank's
    work reached them; ``end``: when all of them have arrived."""

    messages: Sequence[Message]
    queue: int = GROUPS
    ready: float = -1.0
    end: float = -1.0
    begun: bool = False


class Wait(NamedTuple):
    """The rank's work goes on when these messages have arrived."""

    group: Group


Event = Work | Group | Wait  # a Group among them: the rank begins these messages


def orders(ranks: int, stages: int, batches: int) -> list[list[Work]]:
    """The work of each rank, in its order: 1F1B if a rank has one stage, else interleaved."""
    each = stages // ranks
    rounds = max(1, batches // ranks)
    if each > 1 and batches % rounds:
        wrong = f"{batches} micro-batches on {ranks} ranks with {each} stages each"
        raise GraphError(wrong, asked="a pipeline", remedy=f"give a multiple of {rounds}")
    turn = batches // rounds  # micro-batches that a stage takes before the rank's next stage does
    found = []
    for rank in range(ranks):
        ahead = (each - 1) * turn + 2 * (ranks - 1 - rank) if each > 1 else ranks - 1 - rank
        ahead = min(ahead, batches * each)
        order = []
        for i in range(batches * each + ahead):
            if i < batches * each:
                order.append(_nth(False, i // turn % each, i, turn, each, ranks, rank))
            if i >= ahead:
                j = i - ahead
                order.append(_nth(True, each - 1 - j // turn % each, j, turn, each, ranks, rank))
        found.append(order)
    return found


def _nth(back: bool, local: int, i: int, turn: int, each: int, ranks: int, rank: int) -> Work:
    return Work(back, local * ranks + rank, i // (turn * each) * turn + i % turn)


def most_begun(orders: Sequence[Sequence[Work]], shares: Sequence[float]) -> float:
    """The most work, over all ranks, whose forward pass has begun and whose backward pass has not,
    with each stage weighted by its share."""
    most = 0.0
    for order in orders:
        now = 0.0
        for work in order:
            now += -shares[work.stage] if work.back else shares[work.stage]
            most = max(most, now)
    return most


def _needs(work: Work, stages: int) -> Message | None:
    """The message from another stage that this work needs, if any."""
    none = work.stage == (stages - 1 if work.back else 0)
    return None if none else Message(*work)


def _sends(work: Work, stages: int) -> Message | None:
    """The message that this work sends to the next stage, or back to the one before, if any."""
    to = work.stage + (-1 if work.back else 1)
    return Message(work.back, to, work.batch) if 0 <= to < stages else None


def _other(message: Message, rank: int) -> int:
    """The other rank of a message, where each rank has one stage."""
    to = message.stage
    return to if to != rank else to + (1 if message.back else -1)


def _one_after_another(order: Sequence[Work], rank: int, stages: int) -> Iterator[Event]:
    """The events of a rank in 1F1B, as torch's ``Schedule1F1B`` runs them."""
    first_back = next(i for i, work in enumerate(order) if work.back)
    last_ahead = max(i for i, work in enumerate(order) if not work.back)
    held: Message | None = None  # will be sent together with the next one that is received
    left: Group | None = None  # was sent, and is still to be waited for
    for i, work in enumerate(order):
        needed = _needs(work, stages)
        both = [message for message in (held, needed) if message is not None]
        if both:
            group = Group(both, GROUPS if len(both) > 1 else _other(both[0], rank))
            yield from (group, Wait(group))
        yield work
        if left is not None:
            yield Wait(left)
        left, held, sent = None, None, _sends(work, stages)
        if first_back - 1 <= i <= last_ahead:
            held = sent
        elif sent is not None:
            left = Group([sent], _other(sent, rank))
            yield left
    if left is not None:
        yield Wait(left)


def at_once(every: Sequence[Sequence[Work]], stages: int) -> list[list[Event]]:
    """The events of all ranks in the interleaved schedule, with messages between their work where
    torch's ``_add_send_recv`` puts them. It goes through the ranks in turns, and when one sends, it
    puts the receive at the end of what the other rank has so far."""
    found: list[list[Event]] = [[] for _ in every]
    coming: dict[Message, Group] = {}
    left = [deque(order) for order in every]
    while any(left):
        for rank, queue in enumerate(left):
            needed = _needs(queue[0], stages) if queue else None
            if not queue or (needed is not None and needed not in coming):
                continue
            if needed is not None:
                found[rank].append(Wait(coming[needed]))
            work = queue.popleft()
            found[rank].append(work)
            sent = _sends(work, stages)
            if sent is not None:
                to = sent.stage % len(every)
                found[rank].append(Group([sent], to))
                coming[sent] = Group([sent], rank)
                found[to].append(coming[sent])
    return found


@dataclass
class _Rank:
    """How far a rank has come: its remaining events, its time, and by queue the messages that have
    begun and the time when the last one was done."""

    events: deque[Event]
    now: float = 0.0
    begun: dict[int, deque[Group]] = field(default_factory=dict)
    free: dict[int, float] = field(default_factory=dict)


def makespan(
    orders: Sequence[Sequence[Work]],
    takes: Callable[[Work], float],
    sends: Callable[[Message], float],
) -> float:
    """Seconds from the beginning of a step until all ranks have done their work. ``takes`` gives
    the seconds of a piece of work, ``sends`` those of a message alone."""
    stages = 1 + max(work.stage for order in orders for work in order)
    if stages > len(orders):
        every = at_once(orders, stages)
    else:
        every = [list(_one_after_another(o, rank, stages)) for rank, o in enumerate(orders)]
    ranks = [_Rank(deque(events)) for events in every]
    met: dict[Message, list[float]] = {}  # times when its two ranks reached a message
    moved = True
    while moved:
        moved = False
        for rank in ranks:
            moved |= _messages_go_on(rank, met, sends) | _work_goes_on(rank, takes)
    assert not any(rank.events for rank in ranks), "ranks wait for one another"
    return max(rank.now for rank in ranks)


def _messages_go_on(
    rank: _Rank, met: dict[Message, list[float]], sends: Callable[[Message], float]
) -> bool:
    """Let a rank's messages go on until they wait for another rank. Return whether any did."""
    moved = False
    for queue, begun in rank.begun.items():
        while begun:
            group, free = begun[0], rank.free.get(queue, 0.0)
            if not group.begun:
                group.begun = moved = True
                for message in group.messages:
                    met.setdefault(message, []).append(max(group.ready, free))
            if any(len(met[message]) < 2 for message in group.messages):
                break
            group.end = max(max(met[message]) + sends(message) for message in group.messages)
            rank.free[queue] = group.end
            begun.popleft()
            moved = True
    return moved


def _work_goes_on(rank: _Rank, takes: Callable[[Work], float]) -> bool:
    """Let a rank's work go on until it waits for a message. Return whether it did."""
    moved = False
    while rank.events:
        event = rank.events[0]
        if isinstance(event, Wait):
            if event.group.end < 0.0:
                break
            rank.now = max(rank.now, event.group.end)
        elif isinstance(event, Work):
            rank.now += takes(event)
        else:
            event.ready = rank.now
            rank.begun.setdefault(event.queue, deque()).append(event)
        rank.events.popleft()
        moved = True
    return moved
