"""torch's grouped products, by CUTLASS on Hopper: rows of bfloat16, in groups given by their ends.

These calls gather no rows and have no epilogue, so rows are copied first, and what follows is
another kernel; for large groups they are worth that. Groups of few rows, float16 and float32 are
left to our own kernels.
"""

from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import region_cost
from deuteron.engines.triton.common import tensors_of
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.moe import GROUPED
from deuteron.policy import Policy
from deuteron.target import Target, has_triton

EVEN = 8  # lines must begin at multiples of so many numbers of bfloat16, which is 16 bytes
# The part of the rate of one large product that groups of r rows reach:
# min(MOST, GROWS · r / (r + HALF)).
MOST, GROWS, HALF = 0.95, 1.15, 216
REACHED = 0.6  # part of a copy's bandwidth that is reached where there is little to multiply
LISTS = 4  # small kernels that compute where groups end (see ``ends``)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(len(region.nodes) > 1, "takes its operator by itself", quiet=True)
    refuse_if(not target.has_warpgroups, "is for GPUs from Hopper on", quiet=True)
    refuse_if(not hasattr(torch.nn.functional, "grouped_mm"), "this torch has no grouped products")
    node, types = region.nodes[0], region.graph.types
    alone = node.op != GROUPED[0] and not has_triton()
    refuse_if(alone, "empty groups are cleared by a kernel in Triton", "pip install triton")
    first, second = (types[v] for v in node.uses[:2])
    refuse_if(first.dtype.short != "bf16", "multiplies bfloat16", "cast to bfloat16")
    for t in (first, second, types[node.output]):
        refuse_if(not t.numel, "there is nothing to compute: a size is 0")
        refuse_if(_is_odd(t), f"lines of {t} do not begin at multiples of 16 bytes", "pad them")


def _is_odd(t: TensorType) -> bool:
    """Whether neither of the last two dimensions is contiguous with lines that all begin at
    multiples of 16 bytes."""
    matrix, steps = t.shape[-2:], t.strides[-2:]
    for inner, outer in ((1, 0), (0, 1)):
        if steps[inner] == 1 and steps[outer] % EVEN == 0 and matrix[inner] % EVEN == 0:
            return t.rank == 3 and t.strides[0] % EVEN != 0
    return True


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    node, types = region.nodes[0], region.graph.types
    values, cost = operands(node), region_cost(region)
    pairs = types[node.output if node.op == GROUPED[0] else node.uses[0]].shape[0]
    groups = types[values["starts"]].shape[0] - 1
    rows = pairs / min(groups, pairs)
    reached = min(MOST, GROWS * rows / (rows + HALF))
    multiplies = cost.flops / (reached * target.rate("bf16", True))
    gathers = 0.0
    if "order" in values:
        moved = 4.0 * pairs * types[values["x"]].shape[1]
        gathers = moved / (0.75 * target.stream) + 2 * target.launch
    memory = cost.bytes / (REACHED * target.stream)
    return float(max(multiplies, memory) + gathers + (1 + LISTS) * target.launch)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    node = region.nodes[0]
    values, share = operands(node), node.attrs["share"]
    other = "weight" if node.op == GROUPED[0] else "grad"
    given = tensors_of(region, (values["x"], values[other], values["starts"], values.get("order")))
    multiply = torch.nn.functional.grouped_mm
    if node.op != GROUPED[0]:
        from deuteron.kernels.triton.moe import clear_empty

    def ends(starts: Any, rows: int) -> Any:
        """Where groups end. Whatever the input says, the ends are in order and within the rows, so
        that the product reads nothing else."""
        return starts[1:].clamp(0, rows).cummax(0).values.int()

    def gathered(x: Any, order: Any) -> Any:
        return x if order is None else x.index_select(0, order // share)

    def linear(*tensors: Any) -> Any:
        x, weight, starts, order = given(tensors)
        rows = gathered(x, order)
        return multiply(rows, weight.mT, offs=ends(starts, rows.shape[0]))

    def outer(*tensors: Any) -> Any:
        x, grad, starts, order = given(tensors)
        made = multiply(grad.mT, gathered(x, order), offs=ends(starts, grad.shape[0])).contiguous()
        clear_empty(made, starts)  # torch does not promise zeros for groups without rows
        return made

    return Kernel(linear if node.op == GROUPED[0] else outer)


RECIPES = (Recipe("grouped_mm", GROUPED, _refuse, _build, seconds=_seconds, kind="cuda"),)
