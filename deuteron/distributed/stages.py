"""The stages of a pipeline in a prediction: which nodes each has, and what is sent between them.
Module schedule.py says when each rank runs what.

Stages are cut between repeated blocks, so that the slowest stage takes as little time as possible.
With n ranks, rank i has stage i and, if there are more stages than ranks (interleaved), stages
i + n, i + 2n and so on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from deuteron.distributed.layout import Layout
from deuteron.distributed.tensor_parallel import Shared
from deuteron.distributed.trace import Traced
from deuteron.errors import GraphError
from deuteron.ir.graph import Graph, Node


def cut_evenly(costs: Sequence[float], parts: int) -> list[int]:
    """Cut a list of costs into ``parts`` of consecutive ones, so that the largest sum of a part is
    as small as possible; return where the second part and all later ones begin."""
    best: dict[tuple[int, int], tuple[float, list[int]]] = {}
    total = [0.0]
    for cost in costs:
        total.append(total[-1] + cost)
    for end in range(1, len(costs) + 1):
        best[1, end] = total[end], []
        for n in range(2, min(parts, end) + 1):
            tried = (
                (max(best[n - 1, at][0], total[end] - total[at]), [*best[n - 1, at][1], at])
                for at in range(n - 1, end)
            )
            best[n, end] = min(tried, key=lambda found: found[0])
    return best[parts, len(costs)][1]


class Crossing(NamedTuple):
    """A value of one micro-batch that stage ``made`` computes and stage ``read``, on another rank,
    reads. ``trained``: whether its gradient is sent back."""

    made: int
    read: int
    nbytes: int
    trained: bool


@dataclass(frozen=True)
class Stages:
    """A forward graph, cut into ``count`` stages for ``ranks``. ``names``: its repeated blocks, in
    order; ``costs``: one for each of its nodes, in any unit."""

    graphs: Traced
    names: tuple[str, ...]
    costs: tuple[float, ...]
    ranks: int
    count: int

    @classmethod
    def of(
        cls, graphs: Traced, names: Sequence[str], costs: Sequence[float], layout: Layout
    ) -> Stages:
        count = layout.pp * layout.stages
        if count > max(len(names), 1):
            wrong = f"{count} stages of a model with {len(names)} repeated blocks"
            remedy = f"use at most {max(len(names), 1)} stages"
            raise GraphError(wrong, asked=f"layout {str(layout)!r}", remedy=remedy)
        return cls(graphs, tuple(names), tuple(costs), layout.pp, count)

    @property
    def graph(self) -> Graph:
        return self.graphs.forward

    @cached_property
    def _stages(self) -> dict[str, int]:
        """The stage of each node, by the node's first output. Nodes that are in no block belong to
        the block before them, or to the first."""
        places = {name: i for i, name in enumerate(self.names)}
        inside, at = dict[str, int](), 0
        each = [0.0] * max(len(self.names), 1)
        for node, cost in zip(self.graph.nodes, self.costs, strict=True):
            at = max(at, places.get(node.source, 0))
            inside[node.outputs[0]] = at
            each[at] += cost
        begins = cut_evenly(each, self.count)
        return {value: sum(i >= b for b in begins) for value, i in inside.items()}

    def stage_of(self, node: Node) -> int:
        return self._stages[node.outputs[0]]

    @cached_property
    def shares(self) -> list[float]:
        """The fraction of the work that each stage does."""
        found = [0.0] * self.count
        for node, cost in zip(self.graph.nodes, self.costs, strict=True):
            found[self.stage_of(node)] += cost
        return [share / sum(found) for share in found]

    def rank_of(self, node: Node) -> int:
        return self.stage_of(node) % self.ranks

    @property
    def busiest(self) -> float:
        """The fraction of the work that the slowest rank does."""
        return max(sum(self.shares[i :: self.ranks]) for i in range(self.ranks))

    def held(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes of each parameter on the rank whose parameters are largest together."""
        own = [{name: sizes[name] for name in names} for names in self._read]
        return max(own, key=lambda one: sum(one.values()))

    def copied(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Bytes of each parameter that several ranks read and train: they must sum its gradient."""
        often = Counter(name for names in self._read for name in names)
        return {n: sizes[n] for n, times in often.items() if times > 1 and n in self.graphs.grads}

    @cached_property
    def _read(self) -> list[set[str]]:
        """Names of the parameters that each rank reads."""
        named = {value: name for name, value in self.graphs.params.items()}
        found: list[set[str]] = [set() for _ in range(self.ranks)]
        for node in self.graph.nodes:
            found[self.rank_of(node)].update(named[v] for v in node.uses if v in named)
        return found

    def most(self, groups: Sequence[Shared]) -> list[Shared]:
        """Of the groups of products that ranks share, those on the rank that has most of them."""
        own: list[list[Shared]] = [[] for _ in range(self.ranks)]
        for group in groups:
            own[self.rank_of(group.columns[0])].append(group)
        return max(own, key=len)

    @property
    def sends(self) -> tuple[int, int]:
        """Bytes of one micro-batch that the rank that sends most forward sends forward, and that
        the rank that sends most back sends back, as gradients of what it received."""
        ahead, back = [0] * self.ranks, [0] * self.ranks
        for one in self.crossings:
            ahead[one.made % self.ranks] += one.nbytes
            back[one.read % self.ranks] += one.nbytes * one.trained
        return max(ahead), max(back)

    def comes(self, back: bool) -> list[int]:
        """Bytes of one micro-batch that each stage receives in the forward pass or, with ``back``,
        as gradients in the backward pass."""
        found = [0] * self.count
        for one in self.crossings:
            found[one.made if back else one.read] += one.nbytes * (one.trained or not back)
        return found

    @cached_property
    def crossings(self) -> list[Crossing]:
        trained = {self.graphs.params[name] for name in self.graphs.grads}
        found = dict[tuple[str, int], Crossing]()
        for node in self.graph.nodes:
            if not trained.isdisjoint(node.uses):
                trained.update(node.outputs)
            to = self.stage_of(node)
            for value in node.uses:
                maker = self.graph.producer.get(value)
                if maker is not None and self.rank_of(maker) != to % self.ranks:
                    nbytes = self.graph.types[value].nbytes
                    one = Crossing(self.stage_of(maker), to, nbytes, value in trained)
                    found.setdefault((value, to), one)
        return list(found.values())
