"""A model that FSDP2 has divided among one rank, such as a script for many GPUs makes on one.

FSDP2 copies every parameter before its layer all the same, again for the way back, and every
gradient twice; and its hooks cut the graph of a step at every block. The part that one rank has of
a parameter is the parameter. So a step computes with the parts themselves, in one graph, with
nothing of FSDP2 between the blocks. Parameters and gradients stay DTensors to all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.func import functional_call


def units(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on, one by one."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def is_undivided(model: nn.Module) -> bool:
    """Whether FSDP2 has divided parameters among nobody, and does nothing else to them."""
    from torch.distributed.tensor import DTensor

    found = units(model)
    whole = all(
        isinstance(p, DTensor) and p.device_mesh.size() == 1 and _is_there(p)
        for p in model.parameters()
    )
    return bool(found) and whole and all(map(_only_divides, found))


def _is_there(p: Any) -> bool:
    """Whether a parameter is where it is computed with, not on the host."""
    return bool(p.device.type == p.device_mesh.device_type)


def _only_divides(module: Any) -> bool:
    """Whether nobody has asked FSDP2 to compute in other numbers, to divide gradients, or to run
    something of theirs between the ranks."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one at most
    if groups is None:
        groups = [group for group in (state._fsdp_param_group,) if group is not None]
    policy = state._mp_policy
    numbers = {policy.param_dtype, policy.reduce_dtype, policy.output_dtype} == {None}
    plain = all(g.gradient_divide_factor is None and g._all_reduce_hook is None for g in groups)
    return numbers and plain and len(_hooks(module)) == 2


def _hooks(module: Any) -> list[tuple[Any, Any]]:
    """FSDP2's own, before and behind the module, by where they are; none, where several modules are
    divided together."""
    state = module._get_fsdp_state()
    before, behind = state._pre_forward_hook_handle, state._post_forward_hook_handle
    kept = (module._forward_pre_hooks, before), (module._forward_hooks, behind)
    places = [(hooks, getattr(handle, "id", None)) for hooks, handle in kept]
    return [(hooks, number) for hooks, number in places if number in hooks]


def with_its_parts(model: nn.Module) -> Callable[..., Any]:
    """The model, computed with the part of each parameter that is on this rank."""

    def call(*args: Any, **named: Any) -> Any:
        params: Iterable[tuple[str, Any]] = model.named_parameters()
        parts = {name: p.to_local() for name, p in params}
        return functional_call(model, parts, args, named)

    return call


@contextmanager
def unhooked(model: nn.Module) -> Iterator[None]:
    """Within it, FSDP2 does not know that the model is called."""
    taken = [
        (hooks, dict(hooks), number) for module in units(model) for hooks, number in _hooks(module)
    ]
    for hooks, _, number in taken:
        del hooks[number]
    try:
        yield
    finally:
        for hooks, before, _ in taken:  # in the order that they had
            hooks.clear()
            hooks.update(before)
