"""Rewriting regions over images [N, C, …] that are stored channels last: with channels as the last
dimension, as in memory, an image is a matrix with a row for each pixel, and recipes for products
can read the region."""

from dataclasses import replace
from typing import Any, NamedTuple

from deuteron.engines.base import refuse_if
from deuteron.engines.roofline import CONVOLUTIONS
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType


def channels_last(region: Region) -> Region:
    """``region``, which begins with a convolution, with all its images as [N, …, C]. The weight and
    the bias stay as they are."""
    return _all_turned(region, set(region.nodes[0].uses[1:]), "the weight or the bias")


def of_a_weight(region: Region) -> Region:
    """``region``, which begins with the gradient for a weight [out, in, …], with that gradient and
    all later values as [out, …, in]. The images stay as they are."""
    return _all_turned(region, set(region.nodes[0].uses), "an image")


def _all_turned(region: Region, own: set[str], what: str) -> Region:
    """``region`` with all values in channels-last order, except ``own``, which are operands of the
    first node and which no other node may read."""
    types = region.graph.types
    rank = types[region.nodes[0].output].rank
    shared = own & {v for n in region.nodes[1:] for v in n.uses}
    refuse_if(shared, f"what follows reads {what}", "leave it outside")
    turned = {v: t if v in own or not t.rank else _turned(t, rank) for v, t in types.items()}
    return replace(region, graph=replace(region.graph, types=turned))


def pixels_of(t: TensorType) -> TensorType:
    """An image [N, C, …] as [N, …, C]."""
    return _turned(t, t.rank)


def in_nhwc(x: TensorType) -> str:
    """The remedy for a user whose image, or volume, is not in nhwc."""
    return "use Policy(layout='auto')" if x.rank < 5 else "use Policy(layout='nhwc')"


def refuse_gaps(*images: TensorType) -> None:
    """Refuse images [N, …, C] with gaps between one pixel and the next."""
    apart = any(t.line != t.shape[-1] for t in images)
    refuse_if(apart, "reads pixels that are parts of larger ones", quiet=True)


def _turned(t: TensorType, rank: int) -> TensorType:
    """A value that broadcasts to images of this rank, with its channel dimension last."""
    more = (1,) * (rank - t.rank)
    shape, strides = more + t.shape, (0,) * len(more) + t.strides
    order = (0, *range(2, rank), 1)
    return TensorType(tuple(shape[d] for d in order), t.dtype, tuple(strides[d] for d in order))


NORMALISED = frozenset({"batch_norm_act", "batch_norm_train"})  # they need statistics of images


def refuse_normalised(region: Region) -> None:
    """Refuse regions that contain the batch norm after a convolution."""
    has = not NORMALISED.isdisjoint(region.ops)
    refuse_if(has, "is a matter of the recipe conv_batch_norm", quiet=True)


def pixels_as_rows(region: Region) -> Region:
    """A region that begins with a convolution of windows of one pixel and stride 1, or with a
    gradient of one, rewritten to begin with a product over its pixels. Refuses other convolutions,
    and returns regions that begin otherwise as they are.

    The gradient for x is that of the result times the weight; that for the weight is the gradient
    of the result, turned, times x: a sum over all pixels."""
    first = region.nodes[0] if region.nodes else None
    if first is None or first.op not in CONVOLUTIONS:
        return region
    refuse_normalised(region)
    types, a = region.graph.types, first.attrs
    of_weight = first.op == "conv_dw"
    weight = types[first.output if of_weight else first.uses[1]]
    plain = set(weight.shape[2:]) == {1} and set(a["stride"]) == {1} and not any(a["padding"])
    single = plain and a["groups"] == 1 and not any(a["output_padding"])
    refuse_if(not single, "is no product of single pixels", quiet=True)
    images = first.uses[: 2 if of_weight else 1]
    lies = [types[v].is_layout("nhwc") if of_weight else pixels_of(types[v]).line for v in images]
    refuse_if(not all(lies), "the input is not in nhwc", in_nhwc(types[images[0]]))
    if of_weight:
        return _sum_over_pixels(region)
    # the weight is [in, out] for a transposed convolution and for the gradient of a plain one
    turned = (first.op == "conv_dx") != a["transposed"]
    biased = turned and len(first.uses) > 2
    refuse_if(biased, "is transposed, with a bias", "add the bias after it", quiet=True)
    region = channels_last(region)
    matrix = TensorType(weight.shape[:2], weight.dtype, weight.strides[:2])
    graph = region.graph
    node = Node("matmul" if turned else "linear", first.inputs, first.outputs)
    kinds = {**graph.types, first.uses[1]: matrix}
    return replace(region, graph=replace(graph, nodes=(node, *graph.nodes[1:]), types=kinds))


def _sum_over_pixels(region: Region) -> Region:
    """The gradient for a weight of one tap [out, in, 1, …] as a product of two matrices; where the
    convolution is transposed, the weight is [in, out, …]."""
    first, types = region.nodes[0], region.graph.types
    ins = tuple(reversed(first.uses)) if first.attrs["transposed"] else first.uses
    refuse_if(len(set(ins)) < 2, "multiplies a tensor by itself")
    graph = of_a_weight(region).graph
    lines, columns = (types[v] for v in ins)
    pixels = lines.numel // lines.shape[1]
    left = TensorType((lines.shape[1], pixels), lines.dtype, (1, lines.shape[1]))
    right = TensorType.of((pixels, columns.shape[1]), columns.dtype)
    node = Node("matmul", ins, first.outputs)
    kinds = {**graph.types, ins[0]: left, ins[1]: right}
    return replace(region, graph=replace(graph, nodes=(node, *graph.nodes[1:]), types=kinds))


class Packed(NamedTuple):
    """How kernels read images of few channels. Each pixel is padded with zeros to ``many`` numbers,
    and ``pixels`` neighbours of a row, as many as the stride, are read as one wide pixel. Windows
    begin ``before`` wide pixels before x, which is ``lead`` pixels too early, and are ``wide`` wide
    pixels wide."""

    many: int
    pixels: int
    before: int
    lead: int
    wide: int

    @property
    def numbers(self) -> int:
        return self.many * self.pixels

    def weight(self, w: Any) -> Any:
        """A weight [K, C, …, kw] as [K, …, wide, numbers], with zeros for the padding."""
        outs, channels, *high, wide = w.shape
        made = w.new_zeros((outs, *high, self.wide * self.pixels, self.many))
        made[..., self.lead : self.lead + wide, :channels] = w.movedim(1, -1)
        return made


FEW = 8  # images with fewer channels are read number by number, or packed first
MOST_PACKED = 64  # most numbers of a wide pixel


def packed(channels: int, width: int, taps: int, step: int, before: int, apart: int) -> Packed:
    """How to pack x, from what is true along a row of it: its ``width`` in pixels, the taps of a
    window, the stride (``step``), the padding ``before`` it, and the dilation (``apart``)."""
    many = 4 if channels <= 4 else FEW
    joins = apart == 1 and width % step == 0 and step * many <= MOST_PACKED
    pixels = step if joins else 1
    first = -(-before // pixels)
    lead = first * pixels - before
    return Packed(many, pixels, first, lead, -(-(lead + taps) // pixels))
