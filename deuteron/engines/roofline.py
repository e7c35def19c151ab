"""Pricing: the least time a region can take on a target, from its bytes and operations.

time ≥ max(bytes / bandwidth, operations / rate)    plus the cost of launching it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from deuteron.engines.base import refuse_if
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.collective import COLLECTIVES
from deuteron.ops.opdef import GATHERING, Cost, Fusion
from deuteron.passes.communication import together_seconds
from deuteron.target import Target


@dataclass(frozen=True)
class Bound:
    """The roofline of a piece of work on one target."""

    flops: float
    bytes: int
    seconds: float
    kind: str  # what limits it: "memory", "compute", "launch" or "links"; "free" if nothing does


def shows(graph: Graph, node: Node) -> bool:
    """Whether a node is a view: its result is the memory of its input, and nothing is copied."""
    return table.get(node.op).shows(graph.in_types(node), graph.out_types(node))


def leaves_gaps(region: Region) -> bool:
    """Whether the region writes a result into part of a larger buffer: the elements of the result
    do not fill one block of memory, and the region is not just a view."""
    types = region.graph.types
    return not all(types[v].is_dense for v in region.outputs) and not all(
        shows(region.graph, node) for node in region.nodes
    )


def node_cost(graph: Graph, node: Node) -> Cost:
    ins = graph.in_types(node)
    if node.op in COLLECTIVES:  # the last input only orders them; it is not read
        ins = ins[: len(table.get(node.op).inputs) - 1]
    return table.get(node.op).cost(ins, graph.out_types(node), node.attrs)


@lru_cache(maxsize=4096)
def region_cost(region: Region) -> Cost:
    """Operations of all nodes, and the bytes of the region's inputs and outputs, each counted
    once."""
    graph = region.graph
    flops = sum(node_cost(graph, node).flops for node in region.nodes)
    if all(shows(graph, node) for node in region.nodes):
        return Cost(flops, 0, 0)
    writes = sum(graph.types[v].nbytes for v in region.outputs)
    if len(region.nodes) == 1:
        return Cost(flops, node_cost(graph, region.nodes[0]).reads, writes)
    return Cost(flops, sum(_bytes_read(graph, v) for v in region.inputs), writes)


def _bytes_read(graph: Graph, value: str) -> int:
    """The bytes of an input, or only those that are looked up if all its readers gather from it."""
    whole, looked_up = graph.types[value].nbytes, 0
    for node in graph.users.get(value, ()):
        if node.op not in GATHERING or node.inputs[0] != value:
            return whole
        looked_up += graph.types[node.output].nbytes
    return min(whole, looked_up) if looked_up else whole


def is_product(nodes: Sequence[Node]) -> bool:
    return any(table.get(node.op).fusion is Fusion.COMPLEX for node in nodes)


CONVOLUTIONS = ("conv", "conv_dx", "conv_dw")


def is_depthwise(graph: Graph, node: Node) -> bool:
    """Whether it is a depthwise convolution or a gradient of one: each channel is convolved
    alone."""
    if node.op not in CONVOLUTIONS or node.attrs["transposed"] or node.attrs["groups"] == 1:
        return False
    return bool(graph.types[node.inputs[0] or ""].shape[1] == node.attrs["groups"])


def refuse_product(region: Region) -> None:
    """Refuse regions with a product: generated loops over elements do not run those."""
    there = is_product(region.nodes)
    refuse_if(there, "products have kernels of their own", quiet=True)


def times(cost: Cost, dtype: str, product: bool, target: Target) -> tuple[float, float]:
    """Seconds for the bytes, and seconds for the operations, each alone at full speed."""
    # if all bytes fit in the last-level cache, the kernel before has just left them there
    speed = target.cache_bandwidth if cost.bytes < target.cache_bytes / 2 else target.stream
    return cost.bytes / max(speed, target.stream), cost.flops / target.rate(dtype, product)


def bound(cost: Cost, dtype: str, product: bool, target: Target, launches: int = 1) -> Bound:
    """The roofline for ``cost`` split over ``launches`` kernels."""
    if cost.bytes == 0 and cost.flops == 0:
        return Bound(0.0, 0, 0.0, "free")
    memory, compute = times(cost, dtype, product, target)
    launch = target.launch * launches
    kind = "compute" if compute > memory else "memory"
    kind = "launch" if launch > max(memory, compute) else kind
    return Bound(cost.flops, cost.bytes, max(memory, compute) + launch, kind)


def main_dtype(region: Region) -> str:
    """The element type of the arithmetic: that of the anchor's first input, else the output."""
    if region.anchor is not None:
        first = (*region.nodes[region.anchor].inputs, None)[0]
        if first is not None:
            return region.graph.types[first].dtype.short
    if region.outputs:
        return region.graph.types[region.outputs[0]].dtype.short
    return "f32"


def region_bound(region: Region, target: Target) -> Bound:
    """The roofline of the region as one fused kernel."""
    product = is_product(region.nodes)
    found = bound(region_cost(region), main_dtype(region), product, target)
    return _with_links(found, region, target)


def _with_links(found: Bound, region: Region, target: Target) -> Bound:
    """A bound with the time that collectives spend on the links to other ranks."""
    talk = [n for n in region.nodes if n.op in COLLECTIVES]
    seconds = sum(together_seconds(region.graph, node, target) for node in talk)
    return replace(found, seconds=found.seconds + seconds, kind="links") if seconds else found


def least_bound(region: Region, target: Target, share: float) -> Bound:
    """The roofline of an algorithm that needs a ``share`` of the plain one's operations, if
    everything that fits into the largest cache is already there: no kernel on a machine with the
    target's rates can take less time."""
    cost, product = region_cost(region), is_product(region.nodes)
    cost = Cost(share * cost.flops, cost.reads, cost.writes)
    found = bound(cost, main_dtype(region), product, target.at_best)
    return _with_links(found, region, target)
