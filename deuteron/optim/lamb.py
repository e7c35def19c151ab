"""LAMB: Adam with a rate per tensor."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule
from deuteron.kernels.optim_rules import lamb
from deuteron.optim.base import Ours, OwnArguments
from deuteron.optim.batch import Batch


class LAMB(OwnArguments):
    """u = m̂ / (√v̂ + ε) + λ·p;  p ← p − lr · ‖p‖ / ‖u‖ · u, norms per tensor, 1 where one is 0 or
    nan: a nan in one element does not reach the others.

    ("Large Batch Optimization for Deep Learning", 2019.) State: ``step``, ``exp_avg``,
    ``exp_avg_sq``. Groups without decay, such as biases and norms, are not adapted unless
    ``always_adapt``. ``params``, ``lr``, ``betas``, ``eps`` (ε), ``weight_decay`` (λ), ``maximize``
    and ``capturable`` are those of ``torch.optim.AdamW``. Its usual clipping is ``max_norm=1.0``;
    further arguments: see :class:`deuteron.optim.Ours`. The state of float16 parameters is float32:
    squares of gradients underflow in float16, and the norms would not be those of the update.

    >>> opt = dt.optim.LAMB(model.parameters(), lr=2e-3, weight_decay=0.01, max_norm=1.0)

    Three launches per batch on a GPU: moments and sums, ratios, update; one if it is not adapted.
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
        if ours.get("state_dtype") is torch.float16:
            raise ValueError(
                "LAMB has no state_dtype float16, in which squares of gradients underflow; use "
                "bfloat16 or float32"
            )
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        flags = {"maximize": maximize, "capturable": capturable}
        super().__init__(params, ours, **given, always_adapt=always_adapt, **flags)

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        return lamb(group["weight_decay"] != 0 or bool(group["always_adapt"]), extras)

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        kind = super()._stored_as(p, key)
        return torch.float32 if kind is torch.float16 else kind

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        return [*group["betas"], group["eps"], group["weight_decay"]]
