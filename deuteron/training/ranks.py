"""What a step owes to the other ranks where several processes train together.

Process groups, DDP, FSDP2 and DTensors are torch's, and so is when they talk. A step only says
which of the batches that it adds up is the last: before that, ranks need not agree on gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deuteron.errors import EngineError


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


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """Within it, an error of communication says what it means: another rank is gone. This one must
    end as well, because no step can be made without the others."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        broken = isinstance(error, dist.DistError) or "gloo" in said or "NCCL" in said
        if not (broken and dist.is_initialized() and dist.get_world_size() > 1):
            raise
        wrong = f"another rank is gone or does not answer: {said.splitlines()[0][-200:]}"
        asked = f"a training step on rank {dist.get_rank()} of {dist.get_world_size()}"
        restart = "start all ranks again, as torchrun --max-restarts does"
        remedy = f"{restart}, and go on from the last checkpoint (dt.Checkpoints)"
        raise EngineError(wrong, asked=asked, remedy=remedy) from error
