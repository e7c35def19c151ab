"""Operands of convolutions in too few bits are widened to numbers that the machine multiplies.

Constant weights of 4 bits become int8, which every engine for int8 can run. Floats of 8 bits become
float32 where the machine does not multiply them: that is what such a convolution computes by its
definition, and every engine that convolves float32 can run it.
"""

from deuteron.ir.dtype import float32
from deuteron.ir.graph import Graph, Node
from deuteron.ops import table
from deuteron.ops.conv_quantized import whole_numbers
from deuteron.ops.emit import Ops, Sym
from deuteron.passes.context import Context, replaced

QUANTIZED = "conv_quantized"


def widen_short_numbers(graph: Graph, ctx: Context) -> Graph:
    """``graph`` with such convolutions done on wider numbers."""

    def is_packed(node: Node) -> bool:
        packed = node.op == QUANTIZED and node.attrs["bits"] == 4
        return packed and node.uses[1] in graph.constants

    def is_short(node: Node) -> bool:
        convolves = node.op in ("conv", QUANTIZED) and not ctx.target.has_fp8
        kind = graph.types[node.uses[0]].dtype if convolves else float32
        return kind.is_float and kind.bits == 8

    def make(b: Ops, node: Node, names: dict[str, str]) -> Sym:
        x, weight, *rest = (b.sym(names[v]) for v in node.uses)
        if is_packed(node):
            numbers = whole_numbers(graph.constants[node.uses[1]].data, 4)
            weight = b.sym(b.build.constant(numbers, f"{node.uses[1]}_int8"))
            return b.one(node.op, x, weight, *rest, **{**node.attrs, "bits": 8})
        x, weight = b.to(x, float32), b.to(weight, float32)
        if node.op == "conv":
            return b.one("conv", x, weight, *rest, **node.attrs)
        rule = table.get(node.op).expand
        assert rule is not None
        return rule(b, [x, weight, *rest, *[None] * (2 - len(rest))], node.attrs)[0]

    chosen = {n.output: n for n in graph.nodes if is_packed(n) or is_short(n)}
    ctx.fired["short numbers widened"] += len(chosen)
    return replaced(graph, chosen, make) if chosen else graph
