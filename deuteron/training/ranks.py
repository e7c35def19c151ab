"""What a step owes to the other ranks where several processes train together.

Process groups, DDP, FSDP2 and DTensors are torch's, and so is when they talk. A step only says
which of the batches that it adds up is the last: before that, ranks need not agree on gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def gradients_agree(model: nn.Module, last: bool) -> Iterator[None]:
    """Within it, backward makes gradients equal over the ranks if this is the ``last`` batch of a
    step of the optimiser, and else adds up what this rank has: no_sync() of DDP, and the same of
    modules that ``fully_shard`` was called on."""
    told: list[tuple[Any, str]] = []
    if not last:
        for module in model.modules():
            if isinstance(module, DistributedDataParallel) and module.require_backward_grad_sync:
                module.require_backward_grad_sync = False
                told.append((module, "ddp"))
            elif hasattr(module, "set_requires_gradient_sync"):
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
