"""The frozen vocabulary: element types, tensor types, nodes, graphs, regions.

Read in this order: dtype, types, graph, region, builder, spec, text, rewrite.
"""

from deuteron.ir.builder import GraphBuilder as GraphBuilder
from deuteron.ir.dtype import DType as DType
from deuteron.ir.dtype import dtype as dtype
from deuteron.ir.graph import Attrs as Attrs
from deuteron.ir.graph import Constant as Constant
from deuteron.ir.graph import Graph as Graph
from deuteron.ir.graph import Node as Node
from deuteron.ir.region import Region as Region
from deuteron.ir.rewrite import Rewriter as Rewriter
from deuteron.ir.rewrite import Rule as Rule
from deuteron.ir.rewrite import rewrite as rewrite
from deuteron.ir.spec import check as check
from deuteron.ir.text import parse_graph as parse_graph
from deuteron.ir.text import print_graph as print_graph
from deuteron.ir.types import TensorType as TensorType
