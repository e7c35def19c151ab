"""Models that FSDP2 shards over a single rank, as when a script for many GPUs runs on one.

Even then FSDP2 copies every parameter before its layer runs and again for the backward pass, and
every gradient twice; and its hooks cut the graph of a step at every block. But the shard that the
only rank holds is the whole parameter. So a step computes with the shards themselves, in one graph,
without FSDP2's hooks between the blocks. For all other code parameters and gradients stay DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def units(model: nn.Module) -> list[Any]:
    """All modules inside the model that ``fully_shard`` was called on."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_undivided(model: nn.Module) -> bool:
    """Whether FSDP2 shards all parameters over one rank only, and does nothing else to them."""
    from torch.distributed.tensor import DTensor

    found = units(model)
    whole = all(
        isinstance(p, DTensor) and p.device_mesh.size() == 1 and _is_there(p)
        for p in model.parameters()
    )
    return bool(found) and whole and all(map(_only_divides, found))


def _is_there(p: Any) -> bool:
    """Whether a parameter is on its mesh's device, and not offloaded to the host."""
    return bool(p.device.type == p.device_mesh.device_type)


def _only_divides(module: Any) -> bool:
    """Whether FSDP2 only shards this module: nobody has asked it to compute in other element types,
    to divide gradients by a factor, or to run an all-reduce hook."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    policy = state._mp_policy
    numbers = {policy.param_dtype, policy.reduce_dtype, policy.output_dtype} == {None}
    plain = all(g.gradient_divide_factor is None and g._all_reduce_hook is None for g in groups)
    return numbers and plain and len(_hooks(module)) == 2


def _hooks(module: Any) -> list[tuple[Any, Any]]:
    """FSDP2's forward pre-hook and forward hook of a module, each as the dictionary that holds it
    and its key there. Empty where ``fully_shard`` took several modules as one group."""
    state = module._get_fsdp_state()
    before, behind = state._pre_forward_hook_handle, state._post_forward_hook_handle
    kept = (module._forward_pre_hooks, before), (module._forward_hooks, behind)
    places = [(hooks, getattr(handle, "id", None)) for hooks, handle in kept]
    return [(hooks, number) for hooks, number in places if number in hooks]


def with_its_parts(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the model with this rank's local part of each parameter."""

    def call(*args: Any, **named: Any) -> Any:
        params: Iterable[tuple[str, Any]] = model.named_parameters()
        parts = {name: p.to_local() for name, p in params}
        return functional_call(model, parts, args, named)

    return call


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Remove FSDP2's hooks while it is open, so that FSDP2 does not see calls of the model."""
    taken = [
        (hooks, dict(hooks), number) for module in units(model) for hooks, number in _hooks(module)
    ]
    for hooks, _, number in taken:
        del hooks[number]
    try:
        yield
    finally:
        for hooks, before, _ in taken:  # restores their order, too
            hooks.clear()
            hooks.update(before)
