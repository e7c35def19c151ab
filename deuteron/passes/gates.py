"""Gates on the channels of a single image, as in squeeze-and-excite, move into the weight of the
convolution that follows.

A convolution of x · g, where g is one number for each channel, equals the convolution of x by a
weight whose channels are multiplied by g. With several images each would need a weight of its own.
With one image the sum is the same but for rounding, and a small weight is multiplied instead of a
large image, which is then neither read nor written another time:

    bytes saved = 2 · x − 2 · w, and a weight that is packed at every call
"""

from typing import NamedTuple

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ops import Ops, Sym, table
from deuteron.passes.context import Context, replaced

# the image must be this many times as large as the weight, which is packed at every call
LARGER = 8


class Gated(NamedTuple):
    """A convolution, and the two factors of its input: ``image`` · ``gate``."""

    conv: Node
    image: str
    gate: str


def gates_into_weights(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with weights multiplied instead of images, where that is cheaper."""
    found = (_gated(graph, node, ctx) for node in graph.nodes if node.op == "conv")
    chosen = {g.conv.output: g for g in found if g is not None and _cheaper(graph, g, ctx)}

    def make(b: Ops, gated: Gated, names: dict[str, str]) -> Sym:
        _, *others = (b.sym(names[v]) for v in gated.conv.uses)
        return _by_weight(
            b, gated.conv, b.sym(names[gated.image]), b.sym(names[gated.gate]), others
        )

    ctx.fired["gate into weight"] += len(chosen)
    return replaced(graph, chosen, make) if chosen else graph


def _gated(graph: Graph, node: Node, ctx: Context) -> Gated | None:
    """Return the convolution with the factors of its input, if that input is one image times one
    number for each channel and nothing else reads it."""
    x, weight = node.uses[:2]
    made, a = graph.producer.get(x), node.attrs
    if made is None or made.op != "mul" or ctx.price is None or a["groups"] != 1:
        return None
    alone = len(graph.users[x]) == 1 and x not in graph.output_values
    whole, known = graph.types[x], weight in graph.constants
    if not (alone and known) or a["transposed"] or whole.rank < 3 or whole.shape[0] != 1:
        return None
    if whole.numel < LARGER * graph.types[weight].numel:
        return None
    per_channel = (1, whole.shape[1], *(1,) * (whole.rank - 2))
    for image, gate in (made.uses, made.uses[::-1]):
        of_image, of_gate = graph.types[image], graph.types[gate]
        same = of_image.dtype == of_gate.dtype == whole.dtype == graph.types[weight].dtype
        # others read the image, too, such as the mean that the gate comes from: so it is in memory
        # anyway
        full = of_image.shape == whole.shape != per_channel and len(graph.users[image]) > 1
        if full and same and of_gate.shape == per_channel and whole.dtype.short == "f32":
            return Gated(node, image, gate)
    return None


def _cheaper(graph: Graph, gated: Gated, ctx: Context) -> bool:
    """Whether multiplying the weight is cheaper, by estimate."""
    values = (gated.image, gated.gate, *gated.conv.uses[1:])
    kinds = tuple(graph.types[v] for v in values)
    key = ("gate into weight", kinds, gated.conv.attrs)
    if key not in ctx.forms and ctx.price is not None:
        whole = ctx.price(_alone(graph, gated, values, False), float("inf"))
        better = ctx.price(_alone(graph, gated, values, True), whole) < whole
        ctx.forms[key] = "weight" if better else "image"
    return ctx.forms[key] == "weight"


def _alone(graph: Graph, gated: Gated, values: tuple[str, ...], by_weight: bool) -> Graph:
    """Return one of the two ways as a graph of its own, to be priced."""
    build = GraphBuilder(table.infer, "gate")
    b = Ops(build)
    known = graph.constants
    x, gate, *others = (
        b.sym(build.constant(known[v], v) if v in known else build.input(f"x{i}", graph.types[v]))
        for i, v in enumerate(values)
    )
    if by_weight:
        _by_weight(b, gated.conv, x, gate, others).output("y")
    else:
        b.one("conv", b.mul(x, gate), *others, **gated.conv.attrs).output("y")
    return build.finish()


def _by_weight(b: Ops, conv: Node, x: Sym, gate: Sym, others: list[Sym]) -> Sym:
    weight, *bias = others
    made: Sym = b.one("conv", x, b.mul(weight, gate), *bias, **conv.attrs)
    return made
