"""Running sums and products of rows: the recipe around ``kernels/triton/scan.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

OPS = {"cumsum": False, "cumprod": True}  # operator → whether it multiplies
REACHED = 0.75  # of the bandwidth of a copy, until a GPU says otherwise
ROWS_LIMIT = 2**31 - 2**20  # rows are counted in 32 bits
ELEMENTS = 4096  # of one block
LONGEST = 2048  # columns of one block


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    node = refuse_anywhere(target) or only_node(region, OPS)
    if isinstance(node, Refusal):
        return node
    x = region.graph.types[node.uses[0]]
    if x.numel == 0:
        return Refusal("there is nothing to compute: a size is 0")
    if node.attrs["axis"] != x.rank - 1 or not x.is_layout("contiguous"):
        return Refusal("the scan is not along adjacent elements", "permute, then to_layout(x)")
    if x.numel // x.shape[-1] < target.units:
        return Refusal(f"fewer rows than the {target.units} units of the GPU")
    if x.numel // x.shape[-1] > ROWS_LIMIT or x.shape[-1] > ROWS_LIMIT:
        return Refusal("has more than 2³¹ rows or columns", "split the batch")
    return None


def _x(region: Region) -> TensorType:
    return region.graph.types[region.nodes[0].uses[0]]


def blocks(rows: int, columns: int) -> list[tuple[int, int]]:
    """(rows, columns) of one block, most promising first."""
    wide = min(1 << (columns - 1).bit_length(), LONGEST)
    found = []
    for elements in (ELEMENTS, ELEMENTS // 4):
        width = min(wide, elements)
        found.append((max(min(elements // width, 1 << (rows - 1).bit_length(), 64), 1), width))
    return list(dict.fromkeys(found))


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    x = _x(region)
    ways = blocks(x.numel // x.shape[-1], x.shape[-1])
    return [{"rows": r, "columns": c, "warps": w} for r, c in ways for w in (4, 8)]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    return modelled_seconds(region_cost(region), main_dtype(region), REACHED, False, target)


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.scan import row_scan

    x, product = _x(region), OPS[region.nodes[0].op]
    rows, columns = x.numel // x.shape[-1], x.shape[-1]
    block = (knobs["rows"], knobs["columns"])
    run = row_scan(rows, columns, product, block, knobs["warps"])
    return Kernel(run, writes=True, note="1 kernel")


SCAN = Recipe("scan", _refuse, _build, _knobs, _seconds, build_s=0.4)
