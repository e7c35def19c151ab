"""Adam and AdamW."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule
from deuteron.kernels.optim_rules import adam
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch

Betas = tuple[float | torch.Tensor, float | torch.Tensor]


class _Adam(Fused):
    """What Adam and AdamW share."""

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        decoupled, decay = bool(group["decoupled_weight_decay"]), group["weight_decay"] != 0
        return adam(bool(group["amsgrad"]), decoupled, decay, extras)

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        return [*group["betas"], group["eps"], group["weight_decay"]]


class Adam(_Adam, torch.optim.Adam):
    """torch.optim.Adam, all tensors in one launch: same arguments, groups and state dict.

    ``foreach`` and ``fused`` are accepted and change nothing. Further arguments: see
    :class:`deuteron.optim.Ours`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        self._set(ours, differentiable)
        flags: Any = {"maximize": maximize, "foreach": foreach, "fused": fused}
        flags |= {"capturable": capturable, "decoupled_weight_decay": decoupled_weight_decay}
        torch.optim.Adam.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, **flags)


class AdamW(_Adam, torch.optim.AdamW):
    """torch.optim.AdamW, all tensors in one launch: same arguments, groups and state dict.

    ``foreach`` and ``fused`` are accepted and change nothing. Further arguments: see
    :class:`deuteron.optim.Ours`.

    >>> opt = dt.optim.AdamW(model.parameters(), lr=3e-4, max_norm=1.0, ema_decay=0.999)
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: Betas = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **ours: Unpack[Ours],
    ) -> None:
        self._set(ours, differentiable)
        flags: Any = {"maximize": maximize, "foreach": foreach, "fused": fused}
        flags |= {"capturable": capturable}
        torch.optim.AdamW.__init__(self, params, lr, betas, eps, weight_decay, amsgrad, **flags)
