"""A region over images [N, C, …] that lie channels last, written with channels as the last
dimension, as they lie: then it is one over rows of pixels, and recipes for products read it."""

from dataclasses import replace

from deuteron.engines.base import refuse_if
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType


def channels_last(region: Region) -> Region:
    """``region``, which begins with a convolution, with all its images as [N, …, C]. The weight and
    the bias stay as they are."""
    types = region.graph.types
    first = region.nodes[0]
    own, rank = set(first.uses[1:]), types[first.output].rank
    shared = own & {v for n in region.nodes[1:] for v in n.uses}
    refuse_if(shared, "what follows reads the weight or the bias", "leave it outside")
    turned = {v: t if v in own or not t.rank else _turned(t, rank) for v, t in types.items()}
    return replace(region, graph=replace(region.graph, types=turned))


def _turned(t: TensorType, rank: int) -> TensorType:
    """A value that spreads over images of this rank, with what belongs to channels last."""
    more = (1,) * (rank - t.rank)
    shape, strides = more + t.shape, (0,) * len(more) + t.strides
    order = (0, *range(2, rank), 1)
    return TensorType(tuple(shape[d] for d in order), t.dtype, tuple(strides[d] for d in order))


NORMALISED = frozenset({"batch_norm_act", "batch_norm_train"})  # which want statistics of images


def refuse_normalised(region: Region) -> None:
    """Where the batch norm that reads a convolution is in the region."""
    has = not NORMALISED.isdisjoint(region.ops)
    refuse_if(has, "is a matter of the recipe conv_batch_norm", quiet=True)


def pixels_as_rows(region: Region) -> Region:
    """A region that begins with a convolution of windows of one pixel, one beside the other, as one
    that begins with a linear layer over its pixels; any other as it is."""
    first = region.nodes[0] if region.nodes else None
    if first is None or first.op != "conv":
        return region
    refuse_normalised(region)
    types, a = region.graph.types, first.attrs
    weight = types[first.uses[1]]
    plain = set(weight.shape[2:]) == {1} and set(a["stride"]) == {1} and not any(a["padding"])
    single = plain and a["groups"] == 1 and not a["transposed"]
    refuse_if(not single, "is no product of single pixels", quiet=True)
    in_order = types[first.uses[0]].is_layout("nhwc")
    refuse_if(not in_order, "the input is not in nhwc", "use Policy(layout='auto')")
    region = channels_last(region)
    matrix = TensorType(weight.shape[:2], weight.dtype, weight.strides[:2])
    graph = region.graph
    node = Node("linear", first.inputs, first.outputs)
    kinds = {**graph.types, first.uses[1]: matrix}
    return replace(region, graph=replace(graph, nodes=(node, *graph.nodes[1:]), types=kinds))
