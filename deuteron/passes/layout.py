"""Memory order: convolutions run in nhwc, attention reads features side by side, and conversions
sit at the edges of the graph.

A conversion is inserted only where an operator wants another order than it gets; everything after
it keeps the order it is given. So the conversions that remain are at inputs, at outputs that the
user expects in another order, and where a reshape really mixes pixels.
"""

from deuteron.ir.graph import Graph
from deuteron.ir.rewrite import start
from deuteron.ir.text import parse_type
from deuteron.ir.types import TensorType, view_strides
from deuteron.ops import table
from deuteron.ops.conv import memory_order
from deuteron.ops.emit import Ops
from deuteron.ops.opdef import Fusion
from deuteron.passes.context import Context

FOLLOWS = (Fusion.ELEMENTWISE, Fusion.BROADCAST)  # work that takes any order, if all agree

_PIXELS = "convolutions read the channels of a pixel side by side"
# Why a value was converted, by the operator that reads it.
CONVOLUTIONS = ("conv", "conv_dx", "conv_dw", "conv_integer", "conv_quantized")
ORDERS = dict.fromkeys(CONVOLUTIONS, _PIXELS)
FEATURES = ("q", "k", "v", "bias", "out", "grad")  # of attention and its gradients
ORDERS |= {"attention": "attention reads the features of a head side by side"}
ORDERS |= {"output": "the caller expects that order, or all readers have it"}


def wants_nhwc(x: TensorType, ctx: Context) -> bool:
    """Whether a convolution over ``x`` is faster with channels innermost.

    On a GPU the tensor cores read nhwc; on a CPU a 1×1 convolution is then a plain matrix
    product and depthwise ones vectorise over channels. Volumes are left as they are on a GPU,
    where nobody has measured them, unless the policy says otherwise.
    """
    layout = ctx.policy.layout
    images = x.rank == 4 or (x.rank == 5 and (layout == "nhwc" or not ctx.target.is_cuda))
    return layout != "keep" and images and x.dtype.bits <= 32


def only_channels(x: TensorType, shape: tuple[int, ...]) -> bool:
    """Whether a reshape of ``x``, whose channels are innermost, copies it only to put channels in
    another order, as a channel shuffle does: the channels can then stay with their pixels."""
    images = len(shape) == 4 <= x.rank and (shape[0], *shape[2:]) == (x.shape[0], *x.shape[-2:])
    if not images or view_strides(x.shape, x.strides, shape) is not None:
        return False
    steps = [step if size > 1 else 0 for step, size in zip(x.strides, x.shape, strict=True)]
    apart = [step for step in steps[-2:] if step]
    return bool(apart) and max(steps[1:-2]) < min(apart)


def _bound_for_convolutions(graph: Graph, ctx: Context) -> set[str]:
    """Images that a convolution reads, directly or after work that keeps nhwc."""
    found: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op in CONVOLUTIONS and node.inputs[0] is not None:
            found |= {node.inputs[0]} if wants_nhwc(graph.types[node.inputs[0]], ctx) else set()
        elif found.intersection(node.outputs):
            types: dict[str | None, TensorType] = {v: graph.types[v] for v in node.uses}
            rank = graph.types[node.outputs[0]].rank
            images = {v: t for v, t in types.items() if t.rank == rank}
            types |= {v: TensorType.of(t.shape, t.dtype, "nhwc") for v, t in images.items()}
            _, made = table.infer(node.op, [types.get(v) for v in node.inputs], node.attrs)
            found |= {v for v in images if v} if made[0].layout == "nhwc" else set()
    return found


def choose_layout(graph: Graph, ctx: Context) -> Graph:
    """Insert ``to_layout`` before convolutions and at outputs; re-infer what lies between."""
    build, names = start(graph, table.infer)
    bound = _bound_for_convolutions(graph, ctx)
    converted: dict[str, str] = {}  # value → its nhwc copy

    def nhwc(value: str, source: str) -> str:
        kind = build.types[value]
        # an image of one row may be in nhwc order although its strides do not tell torch so
        known = memory_order(kind) == "nhwc" or kind.is_layout("contiguous")
        if kind.is_layout("nhwc") and known:
            return value
        if value not in converted:
            attrs = {"layout": "nhwc"}
            (converted[value],) = build.emit("to_layout", [value], attrs, source=source)
            ctx.fired["converted to nhwc"] += 1
        return converted[value]

    def features_together(value: str, source: str) -> str:
        """Make the last dimension dense: no fused attention reads a head's features, or a row of
        its bias, from several places."""
        kind = build.types[value]
        repeats = any(
            not step and size > 1 for step, size in zip(kind.strides, kind.shape, strict=True)
        )
        if not kind.rank or kind.strides[-1] == 1 or kind.shape[-1] == 1 or repeats:
            return value
        ctx.fired["features laid together"] += 1
        return build.emit("to_layout", [value], {"layout": "contiguous"}, source=source)[0]

    def as_torch_saw(value: str, seen: str, source: str) -> str:
        b = Ops(build, source)
        return b.laid_as(b.sym(value), parse_type(seen)).name

    for node in graph.nodes:
        inputs = [None if v is None else names[v] for v in node.inputs]
        if node.op in CONVOLUTIONS:
            for slot in (0, 1):
                value = inputs[slot]
                if value is not None and wants_nhwc(build.types[value], ctx):
                    inputs[slot] = nhwc(value, node.source)
        elif node.op.startswith("attention"):
            slots = (slot.rstrip("?") for slot in table.get(node.op).inputs)
            named = zip(slots, inputs, strict=False)
            inputs = [
                features_together(v, node.source) if v and slot in FEATURES else v
                for slot, v in named
            ]
        elif node.op == "aten" and node.attrs["seen"]:
            pairs = zip(inputs, node.attrs["seen"], strict=True)
            inputs = [v and as_torch_saw(v, seen, node.source) for v, seen in pairs]
        elif table.get(node.op).fusion in FOLLOWS:
            # a residual that was converted for a convolution joins in its converted form
            types = {v: build.types[v] for v in inputs if v is not None}
            shapes = {t.shape for t in types.values() if t.layout == "nhwc"}
            joining = [v for v, t in types.items() if v in converted and t.shape in shapes]
            inputs = [converted[v] if v is not None and v in joining else v for v in inputs]
            # convert an operand now, so that the result need not be converted later
            if shapes and node.output in bound:
                shape = graph.types[node.output].shape
                whole = [v for v, t in types.items() if t.shape == shape and v not in joining]
                turned = {v: nhwc(v, node.source) for v in whole}
                inputs = [turned.get(v, v) if v is not None else v for v in inputs]
        names.update(zip(node.outputs, build.follow(node, inputs, graph), strict=True))
        made = build.types[names[node.outputs[0]]]
        read = build.types[inputs[0]] if node.op == "reshape" and inputs[0] else None
        if read is not None and wants_nhwc(made, ctx) and only_channels(read, made.shape):
            names[node.output] = nhwc(names[node.output], node.source)
    for name, value in graph.outputs:
        new, said = names[value], ctx.promised.get(name, graph.types[value])
        got = build.types[new]
        if got != said and said.layout in ("contiguous", "nhwc") and not got.is_layout(said.layout):
            (new,) = build.emit("to_layout", [new], {"layout": said.layout})
            ctx.fired["output converted back"] += 1
        build.output(name, new)
    return build.finish()
