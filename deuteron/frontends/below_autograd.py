"""Modules that take gradients in forward: forces of a potential, Jacobians, equations of physics.

torch.export records calls before autograd sees them, and so cannot follow ``torch.autograd.grad``
or ``torch.func``. Here forward runs on tensors without numbers, and what autograd makes of it is
recorded: the calls of the gradients are then calls like any others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from deuteron.frontends import refusals
from deuteron.frontends.proxies import NeedsExport
from deuteron.frontends.torch_fx_facts import without_dead_code
from deuteron.frontends.torch_trace import Trace


def trace_below_autograd(module: nn.Module, args: Sequence[Any], kwargs: Any) -> Trace:
    """Trace a call. Raises what torch says where it cannot, as where forward reads a number."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, spec = pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    weights = dict((*module.named_parameters(), *module.named_buffers()))
    returned: list[Any] = []  # in the last run

    def run(given: Sequence[torch.Tensor], held: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        for name, tensor in held.items():
            tensor.requires_grad_(weights[name].requires_grad)
        now = dict(zip(places, given, strict=True))
        call = pytree.tree_unflatten([now.get(i, a) for i, a in enumerate(leaves)], spec)
        returned[:] = pytree.tree_flatten(torch.func.functional_call(module, held, *call))
        return [r for r in returned[0] if isinstance(r, torch.Tensor)]

    example = [leaves[i] for i in places], weights
    how: Any = {"tracing_mode": "fake", "_allow_non_fake_inputs": True}
    try:
        with torch.no_grad():  # as plans run
            made = make_fx(run, **how)(*example)
    except RuntimeError:  # some take a gradient without asking for the mode in which there is one
        with torch.enable_grad():
            made = make_fx(run, **how)(*example)
    if any(map(_writes, made.graph.nodes)):
        with torch.no_grad():
            pure = torch.func.functionalize(made, remove="mutations")
            made = make_fx(pure, **how)(*example)
    without_dead_code(made.graph)  # torch infers shapes by calls on tensors without memory
    for node in filter(_writes, made.graph.nodes):
        raise NeedsExport(f"{node.target} writes to an input")
    results, out_spec = returned
    if not all(isinstance(r, torch.Tensor) or refusals.is_fixed(r) for r in results):
        raise NeedsExport("a result is neither a tensor nor a plain value")
    given = [node for node in made.graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(places, given, strict=False))
    bound = dict(zip(weights, given[len(places) :], strict=True))
    held = {name: (node, weights[name]) for name, node in bound.items()}
    for node in [n for n in made.graph.nodes if n.op == "get_attr"]:
        with made.graph.inserting_before(given[0] if given else node):
            place = made.graph.placeholder(node.name)
        node.replace_all_uses_with(place)
        held[f"constant.{node.name}"] = place, getattr(made, node.target)
        made.graph.erase_node(node)
    (last,) = (node for node in made.graph.nodes if node.op == "output")
    found = iter(last.args[0])
    answer = [next(found) if isinstance(r, torch.Tensor) else r for r in results]
    return Trace(made.graph, [inputs.get(i) for i in range(len(leaves))], held, answer, out_spec)


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable
