"""Rewrites of a graph that torch.compile captured, made before AOTAutograd turns it into calls of
ATen."""

from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from deuteron.frontends.known_masks import name_known_masks
from deuteron.functional.activation import dropout
from deuteron.ir.types import TensorType
from deuteron.plan.tensors import overlaps


def written_anew(graph: fx.Graph, seeded: torch.device | None) -> None:
    """Apply all rewrites to ``graph``, in place. ``seeded``: the device on which seeds for dropout
    are drawn; None if dropout takes no seeds."""
    if seeded is not None:
        _seed(graph, seeded)
    name_known_masks(graph)
    for node in graph.nodes:
        if node.target is F.scaled_dot_product_attention:
            node.target = _attention
    _lay_apart(graph)


def _lay_apart(graph: fx.Graph) -> None:
    """Copy results of the graph whose elements overlap in memory, such as overlapping windows:
    torch would give their gradients the same overlapping strides, and lose numbers."""
    output = graph.output_node()
    for node in output.all_input_nodes:
        value = node.meta.get("example_value")
        if (
            isinstance(value, torch.Tensor)
            and value.requires_grad
            and overlaps(TensorType.from_tensor(value))
        ):
            with graph.inserting_before(output):
                output.replace_input_with(node, graph.call_method("clone", (node,)))


def _attention(q: Any, k: Any, v: Any, attn_mask: Any = None, *rest: Any, **how: Any) -> Any:
    """torch's attention. A mask that is expanded along the keys is made contiguous before: torch
    has no kernel for it, and would hold all scores in memory."""
    if attn_mask is not None and attn_mask.is_cuda and attn_mask.stride(-1) != 1:
        attn_mask = attn_mask.contiguous()
    return F.scaled_dot_product_attention(q, k, v, attn_mask, *rest, **how)


def _dropout(
    seed: Any, x: Any, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if inplace:
        return F.dropout(x, p, training, inplace)
    return dropout(x, p, training, seed=seed)


def _seed(graph: fx.Graph, device: torch.device) -> None:
    """Give every call of dropout a seed; a single call draws all of them."""
    sites = [node for node in graph.nodes if node.target is F.dropout]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        how: Any = {"device": device}
        drawn = (torch.randint, (0, 2**62, (len(sites),)), how)
        seeds = graph.call_function(*drawn) if sites else None
        each = [graph.call_function(getitem, (seeds, i)) for i in range(len(sites))]
    for node, seed in zip(sites, each, strict=True):
        node.target, node.args = _dropout, (seed, *node.args)
