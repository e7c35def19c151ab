"""Running sums and products of rows: the recipe around ``kernels/triton/scan.py``."""

from collections.abc import Sequence

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.triton.common import MOST, one_operator, streamed
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.target import Target

OPS = {"cumsum": False, "cumprod": True}  # operator → whether it multiplies
REACHED = 0.75  # part of the bandwidth of a copy, a guess until it is measured on a GPU
ELEMENTS = 4096  # elements of one block
LONGEST = 2048  # most columns of one block


def _rows(region: Region) -> tuple[int, int]:
    """How many rows there are, and their length."""
    x = region.graph.types[region.nodes[0].uses[0]]
    return x.numel // x.shape[-1], x.shape[-1]


def _refuse(region: Region, node: Node, target: Target) -> None:
    x, (rows, columns) = region.graph.types[node.uses[0]], _rows(region)
    apart = node.attrs["axis"] != x.rank - 1 or not x.is_layout("contiguous")
    refuse_if(apart, "the scan is not along adjacent elements", "permute, then to_layout(x)")
    refuse_if(rows < target.units, f"fewer rows than the {target.units} units of the GPU")
    many = max(rows, columns) > MOST
    refuse_if(many, "has more rows or columns than 32 bits count", "split the batch")


def blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    """(rows, columns) of one block, most promising first."""
    wide, found = min(power_of_two(columns), LONGEST), []
    for elements in (ELEMENTS, ELEMENTS // 4):
        width = min(wide, elements)
        found.append((max(min(elements // width, power_of_two(rows), 64), 1), width))
    return list(dict.fromkeys(found))


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    ways = blocks(*_rows(region))
    return [{"rows": r, "columns": c, "warps": w} for r, c in ways for w in (4, 8)]


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.scan import row_scan

    block, product = (knobs["rows"], knobs["columns"]), OPS[region.nodes[0].op]
    run = row_scan(*_rows(region), product, block, knobs["warps"])
    return Kernel(run, writes=True, note="1 kernel")


SCAN = one_operator("scan", OPS, _refuse, _knobs, streamed(REACHED), _build)
