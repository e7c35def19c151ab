"""1-D signals ("lines") are treated as images of one row.

A convolution over a line [N, C, L] is one over the image [N, C, 1, L], and so are its gradients. As
an image it benefits from everything that images have: channels innermost, the kernels of 2-D
convolutions, batch norms that are folded. Elementwise work around it, its norms and its pools stay
images as well, so that values are reshaped to lines at the edges only, which moves no number.
"""

from typing import Any

from deuteron.ir.graph import Graph, Node
from deuteron.ir.rewrite import carry, finish, start
from deuteron.ops import table
from deuteron.ops.opdef import Fusion
from deuteron.passes.context import Context

CONVOLUTIONS = ("conv", "conv_dx", "conv_dw", "conv_quantized")
IMAGES = ("batch_norm", "group_norm", "max_pool", "avg_pool")  # operators over lines and images
# attributes of windows, and their values along the added dimension of one row
ALONG = {"stride": 1, "dilation": 1, "kernel": 1, "padding": 0, "output_padding": 0}


def lines_as_images(graph: Graph, ctx: Context) -> Graph:
    """``graph`` in which convolutions over lines, and the work around them, are done on images."""
    convolved = [n for n in graph.nodes if n.op in CONVOLUTIONS and _is_line(graph, n)]
    if not convolved or ctx.policy.layout == "keep":
        return graph
    build, names = start(graph, table.infer)
    images: dict[str, str] = {}  # line → the same value as an image

    def image(value: str) -> str:
        n, c, width = graph.types[value].shape
        if value in graph.constants and value not in images:
            known = graph.constants[value].data.unsqueeze(2)
            images[value] = build.constant(known, f"{value}_image")
        elif value not in images:
            (images[value],) = build.emit("reshape", [names[value]], {"shape": (n, c, 1, width)})
        return images[value]

    for node in graph.nodes:
        taken = _taken(graph, node, images)
        if taken is None:
            carry(build, names, node, graph)
            continue
        inputs = [v and (image(v) if v in taken else names[v]) for v in node.inputs]
        attrs = {k: _along(k, v) for k, v in node.attrs.items()}
        (made,) = build.emit(node.op, inputs, attrs, source=node.source)
        images[node.output] = made
        shape = {"shape": graph.types[node.output].shape}
        (names[node.output],) = build.emit("reshape", [made], shape, source=node.source)
        ctx.fired["lines as images"] += node.op in CONVOLUTIONS
    return finish(build, names, graph)


def _is_line(graph: Graph, node: Node) -> bool:
    return graph.types[node.uses[0]].rank == 3


def _along(name: str, value: Any) -> Any:
    """An attribute of windows over a line as that of windows over an image."""
    if name == "shape":  # the shape of the tensor that a gradient is for
        return (*value[:2], 1, *value[2:])
    if name not in ALONG:
        return value
    return tuple(n for side in value for n in (ALONG[name], side))


def _taken(graph: Graph, node: Node, images: dict[str, str]) -> tuple[str, ...] | None:
    """The inputs that a node takes as images, or None where it stays as it is."""
    if len(node.outputs) != 1 or graph.types[node.output].rank != 3:
        return None
    if node.op in CONVOLUTIONS:
        return node.uses[:2]
    if not any(v in images for v in node.uses):
        return None
    if node.op in IMAGES:
        return node.uses[:1] if node.uses[0] in images else None
    types = {v: graph.types[v] for v in node.uses}
    alike = {t.shape for t in types.values() if t.rank} == {graph.types[node.output].shape}
    if not alike or table.get(node.op).fusion is not Fusion.ELEMENTWISE:
        return None
    return tuple(v for v, t in types.items() if t.rank)
