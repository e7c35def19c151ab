"""What a step owes to the other ranks where several processes train together.

Process groups, DDP, FSDP2 and DTensors are torch's, and so is when they talk. A step says which of
the batches that it adds up is the last: before that, ranks need not agree on gradients. What a step
does itself instead of DDP's hooks, so that it can be captured or sends fewer bytes, is in
distributed/reduction.py.
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
    """What makes gradients agree in place of DDP's hooks: where that was asked for, or where the
    step can be captured so."""
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
    """What keeps a step from being one CUDA Graph; "" where nothing does."""
    if policy.cuda_graph is False:
        return "Policy(cuda_graph=False)"
    wrapped = any(isinstance(part, DistributedDataParallel) for part in model.modules())
    if wrapped and agreed is None:
        return "DistributedDataParallel sums gradients from the host"
    return "several processes train together" if _several(policy) else ""


def _several(policy: Policy) -> bool:
    """Whether there are other ranks, and nobody has said that the step is captured all the same."""
    together = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return together and not (policy.cuda_graph and dist.get_backend() == "nccl")


@contextmanager
def gradients_agree(model: nn.Module, last: bool) -> Iterator[None]:
    """Within it, backward makes gradients equal over the ranks if this is the ``last`` batch of a
    step of the optimiser, and else adds up what this rank has: no_sync() of DDP, and the same of
    modules that ``fully_shard`` was called on."""
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
    """Ranks that each have a part of a parameter must have it of the same parameter: messages that
    do not fit end gloo without a word, and leave NCCL waiting. DDP looks by itself."""
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
    """Names the first parameter that differs, by the ranks of a group."""
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
    """Where the graph of a step is cut, leave tables that are spread over ranks to torch, with what
    adds their rows up behind them: between the two, DTensor keeps which rows were not there beside
    the tensor, and that does not go from one graph to another."""
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        spread = isinstance(module, nn.Embedding) and isinstance(module.weight, DTensor)
        if spread and module._forward_hooks and module._compiled_call_impl is None:
            module._compiled_call_impl = torch._dynamo.disable(module._call_impl)


@contextmanager
def lost_ranks_named(what: str = ASKED) -> Iterator[None]:
    """Within it, an error of communication says what it means: another rank is gone. This one must
    end as well, because no step can be made without the others."""
    try:
        yield
    except EngineError:  # it was named already
        raise
    except BaseException as error:
        said, kind = str(error), type(error).__name__  # torch's for checkpoints is no Exception
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
