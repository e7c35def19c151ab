"""What a training step does for the other ranks where several processes train together.

Process groups, DDP, FSDP2 and DTensors are torch's, and torch decides when they communicate. A step
only tells them which of its accumulated batches is the last: before it, ranks need not average
gradients. What a step does itself in place of DDP's hooks, so that it can be captured or sends
fewer bytes, is in distributed/reduction.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deuteron.distributed.reduction import Agreement, Reduction, why_not
from deuteron.errors import EngineError, GraphError
from deuteron.policy import Policy
from deuteron.training.checks import ASKED


def agreement(
    model: nn.Module,
    reduction: Reduction | None,
    scaler: torch.amp.GradScaler | None,
    device: torch.device,
    policy: Policy,
) -> Agreement | None:
    """Return what averages gradients over ranks in place of DDP's hooks, or None to leave that to
    DDP. It is used where the caller gave a ``reduction``, or where it lets the step be captured."""
    asked = reduction is not None
    if not isinstance(model, DistributedDataParallel):
        if asked:
            wrong = "reduction=…, and the model is not in DistributedDataParallel"
            remedy = "wrap it, or use MixedPrecisionPolicy(reduce_dtype=…) of FSDP2"
            raise GraphError(wrong, asked=ASKED, remedy=remedy)
        return None
    found = why_not(model)
    if asked and found:
        remedy = "leave that out, or the reduction"
        raise GraphError(f"reduction=…, and the model is in DDP with {found}", remedy=remedy)
    if reduction is not None and reduction.numbers == "int8" and scaler is not None:
        wrong = 'Reduction("int8") with a scaled loss: rests of gradients have an old scale'
        raise GraphError(wrong, asked=ASKED, remedy="use bfloat16, which needs no scale")
    captured = device.type == "cuda" and not _several(policy) and policy.cuda_graph is not False
    if asked or (captured and not found):
        return Agreement(model, reduction or Reduction())
    return None


def why_not_captured(policy: Policy, model: nn.Module, agreed: Agreement | None) -> str:
    """Why a step cannot be one CUDA Graph because of the policy or other ranks; "" if it can."""
    if policy.cuda_graph is False:
        return "Policy(cuda_graph=False)"
    wrapped = any(isinstance(part, DistributedDataParallel) for part in model.modules())
    if wrapped and agreed is None:
        return "DistributedDataParallel sums gradients from the host"
    return "several processes train together" if _several(policy) else ""


def _several(policy: Policy) -> bool:
    """Whether there are other ranks, and not both NCCL and a policy that asks for a capture."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return together and not (policy.cuda_graph and dist.get_backend() == "nccl")


@contextmanager
def gradients_agree(model: nn.Module, last: bool) -> Iterator[None]:
    """While it is open, backward averages gradients over the ranks only if this is the ``last``
    batch before the optimiser steps; else it adds to this rank's own. That is what no_sync() of DDP
    does, and the same for modules that ``fully_shard`` was called on."""
    told: list[tuple[Any, str]] = []
    if not last and dist.is_available():
        from torch.distributed.fsdp import FSDPModule

        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
                module.require_backward_grad_sync = False
                told.append((module, "ddp"))
            elif isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(False, recurse=False)
                told.append((module, "fsdp"))
    try:
        yield
    finally:
        for module, kind in told:
            if kind == "ddp":
                module.require_backward_grad_sync = True
            else:
                module.set_requires_gradient_sync(True, recurse=False)


def check_alike(model: nn.Module, device: torch.device) -> None:
    """Raise an error unless the ranks of each device mesh hold parts of the same parameters. If
    they do not, their messages differ in size: then gloo dies without an error, and NCCL waits for
    ever. DDP checks this itself."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.tensor import DTensor

    lists: dict[dist.ProcessGroup, list[str]] = {}
    for name, p in model.named_parameters():
        for group in p.device_mesh.get_all_groups() if isinstance(p, DTensor) else ():
            lists.setdefault(group, []).append(f"{name} {list(p.shape)} {p.dtype}")
    for group, own in lists.items():
        known = int(hashlib.sha256("\n".join(own).encode()).hexdigest()[:12], 16)
        ends = torch.tensor([known, -known], device=device)
        dist.all_reduce(ends, dist.ReduceOp.MAX, group)
        if ends.sum():
            every: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(every, own, group)
            raise _unlike(every)


def _unlike(every: Sequence[Sequence[str]]) -> GraphError:
    """Return an error that names the first parameter that differs between the ranks of a group."""
    pairs = (
        (rank, *pair)
        for rank, lines in enumerate(every)
        for pair in zip_longest(every[0], lines, fillvalue="nothing")
    )
    rank, one, other = next(found for found in pairs if found[1] != found[2])
    wrong = f"ranks have parts of different models: rank 0 has {one}, and rank {rank} {other}"
    remedy = "make the same model on all ranks of a mesh, and wrap it in the same way"
    return GraphError(wrong, asked=ASKED, remedy=remedy)


def look_up_as_torch_does(model: nn.Module) -> None:
    """Let torch run embeddings whose tables are DTensors eagerly, together with the hook behind
    each that sums the rows over ranks. This is for steps that are several graphs. Between lookup
    and sum DTensor keeps a mask of the rows that this rank does not have beside the tensor, and
    that mask is lost from one graph to the next."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        spread = isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor)
        if spread and module._forward_hooks and module._compiled_call_impl is None:
            module._compiled_call_impl = torch._dynamo.disable(module._call_impl)


@contextmanager
def lost_ranks_named(what: str = ASKED) -> Iterator[None]:
    """While it is open, turn an error of communication into one that says what it means: another
    rank is gone. This rank must end as well, because no step can be made without the others."""
    try:
        yield
    except EngineError:  # it is one of ours already
        raise
    except BaseException as error:
        said, kind = str(error), type(error).__name__  # CheckpointException is no Exception
        told = isinstance(error, RuntimeError) or kind == "CheckpointException"
        broken = isinstance(error, dist.DistError) or "gloo" in said.lower() or "NCCL" in said
        if not (told and broken and dist.is_initialized() and dist.get_world_size() > 1):
            raise
        first = next((line for line in said.splitlines() if "gloo" in line.lower()), said)
        wrong = f"another rank is gone or does not answer: {first.strip()[-200:]}"
        asked = f"{what} on rank {dist.get_rank()} of {dist.get_world_size()}"
        restart = "start all ranks again, as torchrun --max-restarts does"
        remedy = f"{restart}, and go on from the last checkpoint (dt.Checkpoints)"
        raise EngineError(wrong, asked=asked, remedy=remedy) from error
