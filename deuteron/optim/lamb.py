"""LAMB: Adam with a rate per tensor."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule, lamb_apply, lamb_moments
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch
from deuteron.optim.lion import check_common
from deuteron.optim.machines import Control, Machine


class LAMB(Fused):
    """u = m̂ / (√v̂ + ε) + λ·p;  p ← p − lr · ‖p‖ / ‖u‖ · u, norms per tensor, 1 where one is 0 or
    nan: a nan in one element does not reach the others.

    ("Large Batch Optimization for Deep Learning", 2019.) State: ``step``, ``exp_avg``,
    ``exp_avg_sq``. Groups without decay, such as biases and norms, are not adapted unless
    ``always_adapt``. ``params``, ``lr``, ``betas``, ``eps`` (ε), ``weight_decay`` (λ), ``maximize``
    and ``capturable`` are those of ``torch.optim.AdamW``. Its usual clipping is ``max_norm=1.0``;
    further arguments: see :class:`deuteron.optim.Ours`. The state of float16 parameters is float32:
    squares of gradients underflow in float16, and the norms would not be those of the update.

    >>> opt = dt.optim.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_norm=1.0)

    Three launches per batch on a GPU: moments and sums, ratios, update.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        always_adapt: bool = False,
        maximize: bool = False,
        capturable: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        check_common(lr, betas, weight_decay)
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        if ours.get("state_dtype") is torch.float16:
            raise ValueError(
                "LAMB has no state_dtype float16, in which squares of gradients underflow; use "
                "bfloat16 or float32"
            )
        self._set(ours)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "always_adapt": always_adapt,
                "maximize": maximize,
                "capturable": capturable,
            },
        )

    def _rule(self, group: dict[str, Any], extras: Extras) -> Rule:
        return lamb_moments(extras)

    def _keys(self, group: dict[str, Any], p: torch.Tensor) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        kind = super()._stored_as(p, key)
        return torch.float32 if kind is torch.float16 else kind

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[float]:
        return [*group["betas"], group["eps"], group["weight_decay"], 1.0]

    def _run(
        self, run: Machine, batch: Batch, group: dict[str, Any], control: Control | None
    ) -> None:
        adapt = group["weight_decay"] != 0 or bool(group["always_adapt"])
        apply = lamb_apply(self._extras(batch.params[0]))
        constants = self._all_constants(group, batch)
        run.step_by_ratio(batch, apply, constants, group["lr"], control, adapt)
