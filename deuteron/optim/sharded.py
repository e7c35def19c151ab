"""Parameters that are sharded over processes: DTensors of FSDP2 and of tensor parallelism.

An optimiser updates the part of each tensor that lies on this rank. State is a DTensor laid out
like its parameter, so that torch.distributed.checkpoint knows which rank has which part. Only what
concerns whole tensors needs communication: the norm by which gradients are clipped, and whether one
of them is inf or nan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist


def is_spread(x: Any) -> bool:
    """Whether a tensor is a DTensor, without importing the module that defines the class."""
    return hasattr(x, "device_mesh")


def local(x: Any) -> Any:
    """The part of a tensor that is on this rank: a DTensor's local tensor, or the tensor itself."""
    return x._local_tensor if is_spread(x) else x


def local_gradient(grad: Any, p: Any) -> torch.Tensor:
    """The part of a gradient that belongs to this rank's part of a parameter.

    A gradient may be a partial sum, each rank holding one term, or be laid out differently from its
    parameter; then it is first redistributed to the parameter's layout, which communicates.
    """
    if not is_spread(grad):
        return grad  # type: ignore[no-any-return]
    if grad.placements != p.placements:
        grad = grad.redistribute(placements=p.placements)
    part: torch.Tensor = grad.to_local()
    return part


class Spread(NamedTuple):
    """The ranks that hold the parts of a tensor: a device mesh, and those of its axes along which
    ranks hold different parts. Along the other axes they hold the same."""

    mesh: Any
    axes: tuple[int, ...]

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """Add a tensor up over the ranks that hold different parts, in place."""
        for axis in self.axes:
            dist.all_reduce(x, group=self.mesh.get_group(axis))
        return x


def _divides(placement: Any) -> bool:
    """Whether ranks along an axis of the mesh have different parts. FSDP2 over tensor parallelism
    divides in strides, which torch does not count as sharding."""
    return not (placement.is_replicate() or placement.is_partial())


def spread_of(x: Any) -> Spread | None:
    """The ranks that hold the parts of a DTensor; None for a tensor that is whole on this rank."""
    if not is_spread(x):
        return None
    axes = tuple(i for i, placement in enumerate(x.placements) if _divides(placement))
    return Spread(x.device_mesh, axes) if axes else None


def per_group(x: Any, length: int) -> torch.Tensor:
    """An empty tensor of one element for each ``length`` elements in memory. For a DTensor it is a
    DTensor too, of which every rank has as many elements as the one with the largest part needs, so
    that all local parts have the same size."""
    if not is_spread(x):
        return x.new_empty(-(-x.numel() // length))  # type: ignore[no-any-return]
    from torch.distributed.tensor import DTensor, Replicate, Shard

    shape = list(x.shape)
    for axis, placement in enumerate(x.placements):
        if _divides(placement):
            shape[placement.dim] = -(-shape[placement.dim] // x.device_mesh.size(axis))
    part = local(x).new_empty(-(-math.prod(shape) // length))
    along = [Shard(0) if _divides(placement) else Replicate() for placement in x.placements]
    made: torch.Tensor = DTensor.from_local(part, x.device_mesh, along, run_check=False)
    return made


def _full(x: Any) -> torch.Tensor:
    """The whole of a tensor, on every rank."""
    whole: torch.Tensor = x.full_tensor() if is_spread(x) else x
    return whole


def _dense(p: Any) -> Any:
    """Return the parameter; or, if its gradient is sparse, a stand-in whose ``grad`` is dense: the
    rows of that gradient, each once."""
    if not p.grad.is_sparse:
        return p
    p.grad = p.grad.coalesce()
    return SimpleNamespace(grad=p.grad.values())


def clip_grad_norm(params: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, and return their norm before. torch's
    function wants all parameters plain or all on one device mesh, and no sparse gradient; this one
    takes any mixture."""
    kinds: dict[Any, list[Any]] = {}
    shown = [_dense(p) for p in params if p.grad is not None]
    for p in shown:
        kinds.setdefault(getattr(p, "device_mesh", None), []).append(p)
    if len(kinds) <= 1:
        return _full(torch.nn.utils.clip_grad_norm_(shown, max_norm))
    grads = ([p.grad for p in some if p.grad is not None] for some in kinds.values())
    norms = [_full(torch.nn.utils.get_total_norm(some)) for some in grads]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for some in kinds.values():
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, norm)
    return norm
