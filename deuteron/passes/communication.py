"""What communication between ranks costs: a time to begin, and a time for every byte (α and β).

The ranks of a node have consecutive numbers. So a group of ranks is described by how many it has
and by the step between their numbers: groups of tensor parallelism are neighbours, those of data
parallelism are a step apart. Within a node bytes go over the link of each machine, between nodes
over the network cards of those of its machines that are in the group; both at once, so the slower
of the two decides. NCCL's rings and trees send that many bytes; ``REACH`` is the share of the
published rates that they are assumed to reach, and is not measured here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from deuteron.ir.graph import Graph, Node
from deuteron.ops.collective import payload
from deuteron.target import Target

REACH = 0.8  # of the published rates
TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1}
TIMES["send"] = 2  # between two ranks; (2 − 1) / 2 of the bytes, twice, is all of them


class Ranks(NamedTuple):
    """A group: how many ranks, and the step between their numbers."""

    size: int
    step: int = 1

    def in_node(self, target: Target) -> int:
        """How many of them are in one node."""
        return max(1, min(self.size, target.per_node // self.step))

    def nodes(self, target: Target) -> int:
        return math.ceil(self.size / self.in_node(target))


def collective_seconds(kind: str, nbytes: float, ranks: Ranks, target: Target) -> float:
    """Seconds of a collective that has the links to itself. ``nbytes``: the size of the whole on
    one rank, which is the tensor that is summed, all that was gathered, or all that is to be
    scattered."""
    if ranks.size == 1:
        return 0.0
    near, nodes = ranks.in_node(target), ranks.nodes(target)
    times = TIMES[kind]
    seconds = times * (ranks.size - 1) / ranks.size * nbytes / (REACH * target.link)
    begin = times * math.ceil(math.log2(near)) * target.link_latency
    if nodes > 1:
        cards = REACH * target.network * near
        seconds = max(seconds, times * (nodes - 1) / nodes * nbytes / cards)
        begin += times * math.ceil(math.log2(nodes)) * target.network_latency
    return seconds + begin


def together_seconds(graph: Graph, node: Node, target: Target) -> float:
    """Seconds that a collective of a graph spends on the links, among ranks that are neighbours. Of
    a collective in chunks beside a product, only the one chunk counts that no product overlaps."""
    ins = [graph.types[v] for v in node.uses]
    kind, nbytes = payload(node, ins, graph.types[node.output])
    chunks = node.attrs.get("chunks", 1)
    return collective_seconds(kind, nbytes / chunks, Ranks(node.attrs["ranks"]), target)
