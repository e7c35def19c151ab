"""Results that are written over an input that nobody needs any more: the gradient of an activation
over that activation, the gradient of logits over the logits.

A kernel declares (``over``) which of its results may be written over which of its inputs: it reads
nothing there after it has written, or it sums over ranks in place. The memory is free for that if
no later region reads it, through any view, and if it is the plan's own: made by a region, or an
input that the plan may consume. If such a result is an output of the plan, the memory leaves with
it.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from deuteron.engines import Kernel
from deuteron.ir.graph import Graph, Node
from deuteron.ir.region import Region
from deuteron.passes.in_place import Spot
from deuteron.plan.source import Spots, roots_of


def overwritten(
    graph: Graph,
    regions: Sequence[Region],
    kernels: Sequence[Kernel],
    spots: Spots,
    dying: Collection[str],
    free: Collection[str] = (),
) -> dict[str, Spot]:
    """Return where results lie that are written over other values. ``spots``: values that lie in
    the memory of others already; ``dying``: inputs that nobody needs after a run; ``free``: outputs
    of the plan that may lie anywhere."""
    roots = roots_of(regions, spots)
    last = {
        root: i
        for i, region in enumerate(regions)
        for value in (*region.inputs, *region.outputs)
        for root in roots.get(value, (value,))
    }
    leaving, pinned = (
        {root for value in values for root in roots.get(value, (value,))}
        for values in (graph.output_values, graph.output_values - set(free))
    )
    loose = leaving - pinned  # also the values that free outputs are views of
    kept = leaving | (set(graph.inputs) - set(dying)) | set(graph.constants) | set(spots)
    kept |= {spot.buffer for spot in spots.values()}
    begun = Counter(
        root
        for region, kernel in zip(regions, kernels, strict=True)
        if kernel.wait
        for root in {root for v in region.inputs for root in roots.get(v, (v,))}
    )
    nodes = (n for r in regions for n in r.nodes if n.op != "aten")
    views = {n.outputs[0]: n for n in nodes if n.outputs[0] in roots}
    found: dict[str, Spot] = {}
    for i, (region, kernel) in enumerate(zip(regions, kernels, strict=True)):
        for out, place in kernel.over if kernel.writes else ():
            value, given = region.outputs[out], region.inputs[place]
            base = _base(given, views)
            shared = [v for v in region.inputs if base in roots.get(v, (v,))] != [given]
            fixed = (value in kept and value not in loose) or value in spots or value in found
            others = begun[base] > (kernel.wait is not None)  # kernels under way that may read it
            if fixed or base in kept or base in roots or shared or others:
                continue
            if last[base] == i and _fits(graph, value, base):
                found[value] = Spot(base, 0, graph.types[value].strides)
                kept.add(base)
    return found


def _base(value: str, views: dict[str, Node]) -> str:
    """The value whose memory begins where this one's does: itself, or what it is a view of."""
    while value in views:
        node = views[value]
        if node.op not in ("reshape", "permute") and node.attrs.get("start") != 0:
            break
        value = node.uses[0]
    return value


def _fits(graph: Graph, value: str, base: str) -> bool:
    """Whether a value fills the memory of another exactly."""
    new, old = graph.types[value], graph.types[base]
    same = old.dtype == new.dtype and old.storage_numel == new.storage_numel
    return same and new.is_dense and old.is_dense
