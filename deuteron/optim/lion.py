"""Lion: the sign of a momentum, and half of Adam's state."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule, lion
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch


def check_common(lr: float | torch.Tensor, betas: tuple[float, float], decay: float) -> None:
    """The bounds that torch.optim sets, for classes that it does not have."""
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if len(betas) != 2:
        raise ValueError(f"Invalid betas: {betas}; there are two of them")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {i}: {beta}")
    if not decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {decay}")


class Lion(Fused):
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
        check_common(lr, betas, weight_decay)
        self._set(ours)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "capturable": capturable,
            },
        )

    def _rule(self, group: dict[str, Any], extras: Extras) -> Rule:
        return lion(extras)

    def _keys(self, group: dict[str, Any], p: torch.Tensor) -> tuple[str, ...]:
        return ("exp_avg",)

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[float]:
        return [*group["betas"], group["weight_decay"]]
