"""Adam and AdamW."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Unpack

import torch

from deuteron.kernels.optim import Extras, Rule
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch

Betas = tuple[float | torch.Tensor, float | torch.Tensor]


def moments(g: Any, m: Any, v: Any, b1: Any, c1: Any, b2: Any, c2: Any) -> dict[str, Any]:
    """m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²"""
    return {"m": b1 * m + c1 * g, "v": b2 * v + c2 * (g * g)}


def bias_numbers(b: Any, step: Any, b1: Any, b2: Any, eps: Any) -> dict[str, Any]:
    """What the moments and the root of the second are multiplied with."""
    root = 1.0 / b.sqrt(1.0 - b2**step)
    return {"b1": b1, "c1": 1.0 - b1, "b2": b2, "c2": 1.0 - b2, "root": root, "eps": eps}


@lru_cache
def adam(amsgrad: bool, decoupled: bool, decay: bool, extras: Extras) -> Rule:
    """p ← (1 − γ·λ)·p − γ / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε), or λ·p added to g"""

    def update(b: Any, p: Any, g: Any, root: Any, eps: Any, size: Any, **x: Any) -> dict[str, Any]:
        more, old, highest = (x.pop(k, None) for k in ("decay", "keep", "vmax"))
        made = moments(g + more * p if decay and not decoupled else g, **x)
        if amsgrad:
            made["vmax"] = b.maximum(highest, made["v"])
        below = b.sqrt(made["vmax" if amsgrad else "v"]) * root + eps
        return made | {"p": (old * p if decoupled else p) - size * (made["m"] / below)}

    def derive(
        b: Any, lr: Any, step: Any, b1: Any, b2: Any, eps: Any, decay: Any
    ) -> dict[str, Any]:
        made = bias_numbers(b, step, b1, b2, eps) | {"size": lr / (1.0 - b1**step)}
        return made | ({"keep": 1.0 - lr * decay} if decoupled else {"decay": decay})

    state = {"m": "exp_avg", "v": "exp_avg_sq"}
    return Rule(
        state=state | ({"vmax": "max_exp_avg_sq"} if amsgrad else {}),
        constants="b1 b2 eps decay",
        derive=derive,
        formulas=(("pass", "Adam", update),),
        extras=extras,
        counts=True,
    )


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
