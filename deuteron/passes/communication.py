"""What talking to other ranks costs: a time to begin, and a time for every byte (α and β).

Ranks are numbered so that those of a node follow one another. A group of ranks is then known by how
many it has and by the step between their numbers: groups of tensor parallelism are neighbours,
those of data parallelism are a step apart. Within a node bytes go over the link of each machine,
between nodes over the network cards of those of its machines that are in the group; both at once,
so the slower of the two decides. Rings and trees of NCCL send that many bytes; ``REACH`` is the
part of the published rates that is supposed of them, and is not measured here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from deuteron.ir.graph import Graph, Node
from deuteron.ops.collective import payload
from deuteron.target import Target

REACH = 0.8  # of the published rates
TIMES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "broadcast": 1}
TIMES["send"] = 2  # of two ranks, each of which would keep half of what is gathered


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
    """Seconds of a collective alone on its links. ``nbytes`` is what a rank has of the whole: the
    tensor that is summed, all that was gathered, all that is scattered."""
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
    """Seconds that a collective of a graph spends on the links, of ranks that are neighbours; of
    one in chunks beside a product only the chunk that nothing is multiplied beside."""
    ins = [graph.types[v] for v in node.uses]
    kind, nbytes = payload(node, ins, graph.types[node.output])
    chunks = node.attrs.get("chunks", 1)
    return collective_seconds(kind, nbytes / chunks, Ranks(node.attrs["ranks"]), target)
