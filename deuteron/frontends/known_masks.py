"""Masks of attention that a program makes of constants alone are replaced by their names: none, or
causal.

Models write out their masks, all true or a triangle, where they are traced. torch then chooses a
kernel that reads a mask and computes every score; and with dropout the call stays torch's, so that
no later pass could do better. But what such a mask holds can be computed here and now.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from deuteron.passes.spellings import hides_later

# the arguments of scaled_dot_product_attention after q, k and v
NAMES = ("attn_mask", "dropout_p", "is_causal")
# what masks are made with: nothing that draws numbers, or is written to
FUNCTIONS = {getattr(torch, name) for name in "arange ones zeros full tril triu where".split()}
FUNCTIONS |= {getattr(torch, f"logical_{name}") for name in ("and", "or", "not")}
FUNCTIONS |= {getattr(operator, name) for name in "add sub mul le lt ge gt eq ne and_ or_".split()}
FUNCTIONS |= {operator.invert, operator.getitem}
METHODS = set("expand view reshape unsqueeze to bool tril triu contiguous".split())


def name_known_masks(graph: fx.Graph) -> None:
    """Take masks that hide nothing, or just what comes later, out of calls of attention."""
    found: dict[fx.Node, bool | None] = {}
    for node in graph.nodes:
        if node.target is not F.scaled_dot_product_attention:
            continue
        given = {**dict(zip(NAMES, node.args[3:], strict=False)), **node.kwargs}
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal"):
            continue
        if mask not in found:
            values = _computed(mask)
            found[mask] = None if values is None else hides_later(values, *values.shape[-2:])
        if found[mask] is not None:
            node.args = node.args[:3]
            node.kwargs = {**given, "attn_mask": None, "is_causal": found[mask]}


def _computed(node: fx.Node) -> torch.Tensor | None:
    """The numbers of a mask; None if they depend on what is not known yet. Leading dimensions that
    were expanded have size 1."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    needed = {node}
    for step in reversed(node.graph.nodes):
        if step in needed:
            if not _is_plain(step):
                return None
            needed.update(step.all_input_nodes)
    known: dict[fx.Node, Any] = {}
    with unset_fake_temporarily(), torch.no_grad():
        for step in (n for n in node.graph.nodes if n in needed):
            args, kwargs = fx.map_arg((step.args, step.kwargs), known.__getitem__)
            call: Any = step.target
            call = call if step.op == "call_function" else getattr(type(args[0]), call)
            known[step] = call(*args, **kwargs)
    values = known[node]
    if not isinstance(values, torch.Tensor) or values.dim() < 2:
        return None
    once = (slice(0, 1) if s == 0 else slice(None) for s in values.stride()[:-2])
    found: torch.Tensor = values[tuple(once)]
    return found


def _is_plain(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in METHODS
    return node.op == "call_function" and node.target in FUNCTIONS
