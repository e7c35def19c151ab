"""Made-up inputs, on which candidates for a region are measured."""

from collections.abc import Mapping

import torch

from deuteron.engines.index_checks import LOSSES
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops.lookups import LOOKUPS
from deuteron.ops.moe import GROUPED, ROWS
from deuteron.ops.pool_winners import winners_of
from deuteron.ops.sparse import column_count
from deuteron.plan.tensors import random_tensor, restrided

SPARSE = ("spmm_csr", "sddmm_csr", "csr_transpose")
# by operator: the input that says where each row, or each group of rows, starts
STARTS = dict.fromkeys(SPARSE, 0) | dict.fromkeys(GROUPED, 2)
MOVES = ("reshape", "permute", "expand", "slice", "flip", "concat", "cast", "to_layout", "where")


def made_up(
    region: Region, constants: Mapping[str, torch.Tensor], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return random inputs of the right types, by name. Constants are the real ones; the winners of
    a max pool are those of a random image (at its edges a window is partly outside); and rows of a
    sparse matrix, or groups of rows, all have the same length."""
    gen = torch.Generator(device=device).manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for v in region.inputs:
        t, readers = region.graph.types[v], region.graph.users.get(v, ())
        pools = [n for n in readers if n.op == "max_pool_winners_grad" and n.inputs[1] == v]
        if v in region.constants:
            made[v] = constants[v]
        elif starting := [n for n in readers if n.op in STARTS and v == n.inputs[STARTS[n.op]]]:
            count = _entries(region, starting[0])
            ends = torch.linspace(0, count, t.numel, dtype=torch.float64, device=device)
            made[v] = ends.round().to(t.dtype.torch)
        elif pools:
            made[v] = restrided(winners_of(pools[0].attrs, device, gen), t)
        else:
            made[v] = random_tensor(t, device, gen, _index_limit(region, v))
    return made


def _entries(region: Region, node: Node) -> int:
    """The number of entries in all rows of a sparse matrix, or of pairs (row, expert) in all groups
    of experts."""
    if node.op in (*SPARSE, *ROWS):
        return region.graph.types[node.uses[1]].shape[0]
    rows = node.output if node.op == "grouped_linear" else node.uses[0]
    return region.graph.types[rows].shape[0]


def _index_limit(region: Region, value: str) -> int:
    """The bound that integers of an input must stay below, so as not to point outside of what they
    index."""
    limit = 1 << 30
    for node in region.graph.users.get(value, ()):
        types = region.graph.in_types(node)
        if node.op in LOOKUPS and node.inputs[0] == value:
            limit = min(limit, _index_limit(region, node.outputs[0]))  # a table of indices
        elif node.op in LOOKUPS:
            axis = node.attrs.get("axis", 0)
            assert types[0] is not None
            limit = min(limit, types[0].shape[axis])
        elif node.op in SPARSE:
            limit = min(limit, column_count(node, types))
        elif node.op == "group_rows":
            limit = min(limit, node.attrs["groups"])
        elif node.op in (*GROUPED, *ROWS):
            limit = min(limit, _entries(region, node))
        elif node.op == "embedding_grad":
            limit = min(limit, node.attrs["rows"])
        elif node.op == "scatter_add":
            limit = min(limit, node.attrs["shape"][node.attrs["axis"]])
        elif node.op == "aten":
            limit = 1  # what it indexes is not known, except that it has a first element
        elif node.op in LOSSES:
            assert types[0] is not None
            limit = min(limit, types[0].shape[1] if types[0].rank > 1 else 2)
        elif node.op in MOVES:
            limit = min(limit, _index_limit(region, node.outputs[0]))
        else:
            limit = min(limit, 100)
    return max(1, min(limit, 100) if value in region.outputs else limit)
