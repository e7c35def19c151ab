"""Changes of memory order on the CPU: the recipe around ``kernels/cpu/to_layout.py``."""

from math import prod

from deuteron.codegen.calls import Argument
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu import product as cpu
from deuteron.engines.cpu.product import BUILD_S, roof
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType, view_strides
from deuteron.kernels.cpu import WOVEN
from deuteron.policy import Policy
from deuteron.target import Target

BLOCKS = 1.6  # transposing blocks takes this times the memory's time: it touches lines out of order


def _refuse_layout(region: Region, target: Target, policy: Policy) -> None:
    """The region may also have reshapes that are views, as where a line is an image of one row."""
    types, nodes = region.graph.types, region.graph.nodes
    several = "let only one value of the region be read outside"
    refuse_if(len(region.outputs) != 1, f"has {len(region.outputs)} outputs", several)
    moves = [n for n in nodes if n.op != "reshape"]
    refuse_if([n.op for n in moves] != ["to_layout"], "is not a to_layout alone")
    cpu.refuse_elsewhere(region, target)
    for node in nodes:
        x, y = types[node.uses[0]], types[node.output]
        copies = node.op == "reshape" and view_strides(x.shape, x.strides, y.shape) is None
        refuse_if(copies, "a reshape copies", "reshape before the order changes")
    x, y = _ends(region)
    pairs = ("contiguous", "nhwc"), ("nhwc", "contiguous")
    usual = any(x.is_layout(a) and y.is_layout(b) and not x.is_layout(b) for a, b in pairs)
    only = "moves between row-major order and nhwc only"
    refuse_if(not usual, only, "make it contiguous first")


def _ends(region: Region) -> tuple[TensorType, TensorType]:
    types = region.graph.types
    (node,) = (n for n in region.graph.nodes if n.op == "to_layout")
    return types[node.uses[0]], types[node.output]


def _layout_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    x, y = _ends(region)
    woven = y.is_layout("nhwc") and x.shape[1] <= WOVEN
    return roof(region, target, 0.0) * (1.0 if woven else BLOCKS)


def _build_layout(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.to_layout import prepare_to_layout

    x, y = _ends(region)
    channels, pixels = x.shape[1], prod(x.shape[2:])
    rows, columns = (channels, pixels) if y.is_layout("nhwc") else (pixels, channels)
    call = prepare_to_layout(x.shape[0], rows, columns, x.dtype.bits)
    return Kernel.generated([call(Argument(0), Argument(1))])


_LAYOUT = (_refuse_layout, _build_layout, one_way, _layout_seconds)
TO_LAYOUT = Recipe("to_layout", ("to_layout",), *_LAYOUT, BUILD_S)
