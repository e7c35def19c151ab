"""The frozen vocabulary: element types, tensor types, nodes, graphs, regions.

Read in this order: dtype, types, graph, region, builder, spec, text, rewrite.
"""

from deuteron.ir.builder import GraphBuilder
from deuteron.ir.dtype import DType, dtype
from deuteron.ir.graph import Attrs, Constant, Graph, Node
from deuteron.ir.region import Region
from deuteron.ir.rewrite import Rewriter, Rule, rewrite
from deuteron.ir.spec import check
from deuteron.ir.text import parse_graph, print_graph
from deuteron.ir.types import TensorType

__all__ = ["Attrs", "Constant", "DType", "Graph", "GraphBuilder", "Node", "Region", "Rewriter"]
__all__ += ["Rule", "TensorType", "check", "dtype", "parse_graph", "print_graph", "rewrite"]
