"""Lion: the sign of a momentum, and half of Adam's state."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule
from deuteron.kernels.optim_rules import lion
from deuteron.optim.base import Ours, OwnArguments
from deuteron.optim.batch import Batch


class Lion(OwnArguments):
    """p ← (1 − lr·λ)·p − lr·sign(β₁·m + (1 − β₁)·g); m ← β₂·m + (1 − β₂)·g, λ being
    ``weight_decay``.

    ("Symbolic Discovery of Optimization Algorithms", 2023.) State: ``exp_avg``. Decay is decoupled.
    ``params``, ``lr``, ``betas``, ``maximize`` and ``capturable`` are those of
    ``torch.optim.AdamW``; further arguments: see :class:`deuteron.optim.Ours`.

    >>> opt = dt.optim.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        capturable: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        given = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, ours, **given, maximize=maximize, capturable=capturable)

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        return lion(extras)

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        return [*group["betas"], group["weight_decay"]]
