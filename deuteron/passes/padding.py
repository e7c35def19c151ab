"""``pad`` of images moves into the convolutions and pools that read it.

Padding copies a whole image for the sake of its edge. A convolution can assume zeros around its
image, a mean of windows as well, and a maximum ignores what lies outside; so a pad that only such
windows read goes into their own ``padding``. Every window begins where it did, and holds the same
numbers.

Pools pad both sides alike. Where the pad is uneven, as with TensorFlow's "same", only the beginning
matters: whether there is a last window that hangs over the end is what ``ceil_mode`` says. For
convolutions, not every library takes an uneven edge, so there the context's ``price`` chooses.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf, prod
from operator import add
from typing import Any

from deuteron.errors import GraphError
from deuteron.ir.builder import GraphBuilder
from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import Rewriter, Rule, carry, finish, start
from deuteron.ir.types import Shape
from deuteron.ops import Ops, table
from deuteron.ops.conv import sides
from deuteron.passes.context import Context, by_rules
from deuteron.passes.layout import wants_nhwc

Settings = dict[str, Any]
CLEARLY = 0.98  # without the pad, it must cost less than this share of the price with it
NOT_NEGATIVE = frozenset("relu relu6 sigmoid hardsigmoid abs square exp softmax".split())


def into_windows(graph: Graph, ctx: Context) -> Graph:
    """``graph`` without pads that all of their readers can take over."""
    chosen: dict[str, tuple[Node, Settings]] = {}  # keyed by what the reader makes
    for pad in graph.nodes:
        if pad.op == "pad":
            chosen |= _taken_over(graph, pad, ctx)
    if chosen:
        build, names = start(graph, table.infer)
        for node in graph.nodes:
            if node.outputs[0] not in chosen:
                carry(build, names, node, graph)
                continue
            pad, attrs = chosen[node.outputs[0]]
            given = (pad.uses[0] if v == pad.output else v for v in node.inputs)
            inputs = [None if v is None else names[v] for v in given]
            names[node.output] = build.emit(node.op, inputs, attrs, source=node.source)[0]
            ctx.fired[f"padding into {node.op}"] += 1
        graph = finish(build, names, graph)
    return _gradients(graph, ctx)


def _taken_over(graph: Graph, pad: Node, ctx: Context) -> dict[str, tuple[Node, Settings]]:
    """The readers of a pad, with attributes that make the pad needless; none if one reader cannot
    do so."""
    low, high = pad.attrs["low"], pad.attrs["high"]
    around = 3 <= len(low) <= 5 and not any((*low[:2], *high[:2])) and min(*low, *high) >= 0
    if not around or pad.attrs["mode"] != "constant" or pad.output in graph.output_values:
        return {}
    found = {}
    for reader in graph.users.get(pad.output, ()):
        slot, forms = READERS.get(reader.op, (0, None))
        if forms is None or [i for i, v in enumerate(reader.inputs) if v == pad.output] != [slot]:
            return {}
        types = list(graph.in_types(reader))
        types[slot] = graph.types[pad.uses[0]]
        same = (
            attrs
            for attrs in forms(graph, reader, pad, ctx)
            if _shape(reader.op, types, attrs) == graph.types[reader.output].shape
        )
        attrs = next(same, None)
        if attrs is None:
            return {}
        found[reader.output] = pad, attrs
    return found


def _shape(op: str, types: Sequence[Any], attrs: Settings) -> Shape | None:
    try:
        return table.infer(op, types, attrs)[1][0].shape
    except GraphError:  # for one, a pool may pad no more than half of its window
        return None


# ---- ways to write a reader without the pad, the best first


def _convolved(graph: Graph, node: Node, pad: Node, ctx: Context) -> Iterator[Settings]:
    space = graph.types[pad.output].rank - 2
    both = zip(sides(node.attrs["padding"], space), _edges(pad), strict=True)
    before, behind = (tuple(map(add, own, more)) for own, more in both)
    if pad.attrs["value"] != 0 or node.attrs["transposed"]:
        return
    attrs = {**node.attrs, "padding": before if before == behind else (*before, *behind)}
    if before == behind or (node.op == "conv" and _cheaper(graph, node, pad, attrs, ctx)):
        yield attrs


def _largest(graph: Graph, node: Node, pad: Node, ctx: Context) -> Iterator[Settings]:
    """A padded value that is no larger than any element of the image does not change a maximum."""
    if pad.attrs["value"] <= _least(graph.producer.get(pad.uses[0])):
        yield from _beginning_alike(node, pad)


def _least(made: Node | None) -> float:
    """A lower bound for everything that the node makes."""
    if made is not None and made.op == "clamp":
        low, high = made.attrs["min"], made.attrs["max"]
        return min(-inf if low is None else low, inf if high is None else high)
    return 0.0 if made is not None and made.op in NOT_NEGATIVE else -inf


def _mean(graph: Graph, node: Node, pad: Node, ctx: Context) -> Iterator[Settings]:
    """Padded zeros count as elements. Where there are more of them at one end, windows are still
    divided by their full size, which must have been the case before."""
    a, sizes = node.attrs, graph.types[pad.output].shape[2:]
    counts, counted = graph.types[node.output].shape[2:], a["count_include_pad"]
    each = zip(sizes, counts, a["kernel"], a["stride"], a["padding"], strict=True)
    full = all((count - 1) * s + k <= n + 2 * p for n, count, k, s, p in each)
    known = a["divisor"] is not None or (full and (counted or not any(a["padding"])))
    if pad.attrs["value"] != 0 or not known:
        return
    low, high = _edges(pad)
    if low == high and full:
        padding = tuple(map(add, a["padding"], low))
        yield {**a, "padding": padding, "ceil_mode": False, "count_include_pad": True}
    else:
        divisor = a["divisor"] or prod(a["kernel"])
        yield from ({**attrs, "divisor": divisor} for attrs in _beginning_alike(node, pad))


def _beginning_alike(node: Node, pad: Node) -> Iterator[Settings]:
    padding = tuple(map(add, node.attrs["padding"], _edges(pad)[0]))
    for ceil in (False, True):
        yield {**node.attrs, "padding": padding, "ceil_mode": ceil}


def _edges(pad: Node) -> tuple[Shape, Shape]:
    """What is added before the image and after it."""
    return pad.attrs["low"][2:], pad.attrs["high"][2:]


Forms = Callable[[Graph, Node, Node, Context], Iterator[Settings]]
# operators that look at images through windows: which input the image is, and how to write them
READERS: dict[str, tuple[int, Forms]] = {
    "conv": (0, _convolved),
    "conv_dw": (1, _convolved),
    "max_pool": (0, _largest),
    "avg_pool": (0, _mean),
}


# ---- the price of an uneven edge


def _cheaper(graph: Graph, node: Node, pad: Node, attrs: Settings, ctx: Context) -> bool:
    if ctx.price is None:
        return False
    given = pad.uses[0] in graph.inputs
    kinds = (graph.types[v] for v in (pad.uses[0], *node.uses))
    key = ("padding", given, *kinds, pad.attrs, node.attrs)
    if key not in ctx.forms:
        padded = ctx.price(_alone(graph, node, pad, None, ctx), inf)
        whole = ctx.price(_alone(graph, node, pad, attrs, ctx), inf)
        ctx.forms[key] = "whole" if whole < CLEARLY * padded else "padded"
    return ctx.forms[key] == "whole"


def _alone(graph: Graph, node: Node, pad: Node, attrs: Settings | None, ctx: Context) -> Graph:
    """The convolution as a graph of its own, to be priced, with a pad or with other attributes. Its
    image is in the memory order in which the convolution will get it; an input of the graph is
    converted first."""
    build = GraphBuilder(table.infer, node.op)
    b, kind = Ops(build), graph.types[pad.uses[0]]
    turned = wants_nhwc(kind, ctx)
    given = kind if pad.uses[0] in graph.inputs or not turned else kind.with_layout("nhwc")
    x = b.sym(build.input("x", given))
    rest = [b.sym(build.input(f"w{i}", graph.types[v])) for i, v in enumerate(node.uses[1:])]
    if attrs is None:
        x, attrs = b.one("pad", x, **pad.attrs), dict(node.attrs)
    if turned and not x.type.is_layout("nhwc"):
        x = b.to_layout(x, "nhwc")
    b.one("conv", x, *rest, **attrs).output("y")
    return build.finish()


# ---- gradients


def _not_of_the_edge(rw: Rewriter, node: Node) -> Sequence[str] | None:
    """The gradient of an image without its edge is that of a convolution with padding."""
    made, a = rw.made_by(node.uses[0], "conv_dx"), node.attrs
    if made is None or not rw.only_use(made.output) or a["axis"] < 2 or a["step"] != 1:
        return None
    shape, padding = list(made.attrs["shape"]), list(made.attrs["padding"])
    if a["start"] != shape[a["axis"]] - a["stop"] or made.attrs["transposed"]:
        return None
    shape[a["axis"]] = a["stop"] - a["start"]
    padding[a["axis"] - 2] += a["start"]
    less = {"shape": tuple(shape), "padding": tuple(padding)}
    return [rw.emit("conv_dx", made.inputs, {**made.attrs, **less})]


_gradients = by_rules((Rule("edge left out of a gradient", ("slice",), _not_of_the_edge),))
