"""Halves of a step as CUDA Graphs, with graphs that run on the CPU: whose memory results are."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from deuteron.plan import cuda_graph
from deuteron.plan.cuda_graph import Settled


class Replayed:
    """Work that writes its results to where they were at first, as a CUDA Graph does."""

    def __init__(self, work: Callable[[], list[torch.Tensor]]) -> None:
        self.work, self.out = work, work()

    def replay(self) -> None:
        for to, value in zip(self.out, self.work(), strict=True):
            to.copy_(value)


@pytest.fixture
def graphs(monkeypatch):
    """All graphs that were captured."""
    made = []

    def capture(work, **_):
        made.append(Replayed(work))
        return made[-1], made[-1].out

    monkeypatch.setattr(cuda_graph, "capture", capture)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    return made


@pytest.mark.parametrize("share", [0.0, 0.2, 0.6, 1.0])
def test_what_callers_hold_stays(graphs, share):
    """Graphs are replayed, captured a second time, and given up for others, and none writes to a
    result that somebody still holds."""
    draw, x = random.Random(0), torch.zeros(64)
    settled = Settled(lambda given: [given[0] * 2, (given[0] + 1).view(8, 8), given[0] - 1], [2])
    held: list[tuple[list[torch.Tensor], float]] = []
    for k in range(60):
        x.fill_(k)
        found = settled([x])
        if draw.random() < share:
            held.append((found[:2] if draw.random() < 0.5 else found[1:], float(k)))
        if held and draw.random() < 0.2:
            held.pop(draw.randrange(len(held)))
        assert [float(t.flatten()[5]) for t in found] == [2.0 * k, k + 1.0, k - 1.0]
        del found
        for tensors, of in held:
            for t in tensors:
                assert t.unique().tolist() in ([2 * of], [of + 1], [of - 1])
    assert graphs, settled.note
    if share == 0.0:
        assert len(graphs) == 1, "a graph whose results nobody held was not replayed"


def test_a_caller_may_write_to_results(graphs):
    x = torch.ones(16)
    settled = Settled(lambda given: [given[0] * 3], ())
    for _ in range(8):
        (found,) = settled([x])
        assert found.eq(3).all() and found._version == 0 and not found._is_view()
        found.zero_()
        del found
    assert len(graphs) == 1


def test_state_that_a_caller_looks_at_is_not_a_result(graphs):
    """A running mean is written in place, and others may hold it."""
    x, mean = torch.ones(16), torch.zeros(16)
    settled = Settled(lambda given: [given[0] * 2, given[1].add_(1)], (), written=[1])
    looks = [settled([x, mean]) and mean.detach() for _ in range(8)]
    assert len(graphs) == 1
    assert all(look.data_ptr() == mean.data_ptr() for look in looks)


def test_a_graph_that_is_no_longer_replayed_is_dropped(graphs):
    """Its inputs have moved for good: its memory is of no use to anybody."""
    x, y = torch.ones(16), torch.ones(16)
    settled = Settled(lambda given: [given[0] * 2], ())
    for k in range(2 * settled.IDLE):
        settled([x if k < 6 else y])
    (graph,) = settled.captured
    assert len(graphs) == 2 and graph.graph is graphs[1]
