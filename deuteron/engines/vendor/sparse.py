"""torch's own sparse kernels: threaded on a CPU, and cuSPARSE on a GPU."""

import warnings
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import SPARSE as OPS
from deuteron.engines.libraries import gathered_bytes
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import region_cost
from deuteron.engines.triton.common import tensors_of
from deuteron.ir.region import Region
from deuteron.ops.sparse import check_structure, column_count
from deuteron.policy import Policy
from deuteron.target import Target

REACHED = {"cpu": 0.7, "cuda": 1.0}  # part of a copy's speed at which rows are gathered
CALL_S = 2e-5  # seconds to make a sparse tensor and check its structure


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(len(region.nodes) > 1, "takes its operator by itself", quiet=True)
    node, types = region.nodes[0], region.graph.types
    kind = types[node.uses[3]].dtype.short
    if node.op == "spmm_csr":
        blocks = types[node.uses[2]].rank != 1
    else:
        blocks = bool(node.attrs["block"])
        low = not target.is_cuda and kind not in ("f32", "f64")
        refuse_if(low, f"torch samples no products of {kind}", "cast to float32")
    refuse_if(blocks, "torch multiplies blocks with MKL and on GPUs alone", "use numbers")
    empty = not all(types[v].numel for v in (*node.uses[:4], *region.outputs))
    refuse_if(empty, "there is nothing to compute: a size is 0")
    ordered = target.is_cuda and policy.deterministic
    refuse_if(ordered, "cuSPARSE may add in another order each time", "allow it in the policy")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    moved = max(gathered_bytes(region.graph, region.nodes[0]), region_cost(region).bytes)
    return moved / (REACHED[target.kind] * target.stream) + target.launch + CALL_S


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    """A structure that is known ahead is checked once, here; any other in every call on a CPU."""
    node, types = region.nodes[0], region.graph.types
    given = tensors_of(region, node.uses[:4])
    size = column_count(node, region.graph.in_types(node))
    shape = types[node.uses[0]].shape[0] - 1, size
    starts, columns = (ctx.constants.get(v) for v in node.uses[:2])
    if known := starts is not None and columns is not None:
        assert starts is not None and columns is not None
        check_structure(starts, columns, size, node.op)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns once that such tensors are a beta feature
        torch.sparse_csr_tensor([0, 0], [], [], size=(1, 1))
    looks = not known and ctx.device.type == "cpu"

    def matrix(starts: Any, columns: Any, values: Any) -> Any:
        if looks:
            check_structure(starts, columns, size, node.op)
        parts = starts, columns.to(starts.dtype), values
        return torch.sparse_csr_tensor(*parts, size=shape, check_invariants=False)

    def multiply(*tensors: Any) -> Any:
        starts, columns, values, x = given(tensors)
        a = matrix(starts, columns, values)
        return torch.sparse.mm(a, x, "sum") if x.is_cpu else torch.sparse.mm(a, x)

    def sample(*tensors: Any) -> Any:
        starts, columns, left, right = given(tensors)
        a = matrix(starts, columns, left.new_zeros(columns.shape))
        return torch.sparse.sampled_addmm(a, left, right.t(), beta=0.0).values()

    return Kernel(multiply if node.op == "spmm_csr" else sample)


RECIPES = tuple(
    Recipe("sparse", OPS, _refuse, _build, seconds=_seconds, kind=kind) for kind in REACHED
)
