"""AdamW with its state in 8 bits."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.errors import BindError
from deuteron.kernels.optim import GROUP, GROUPS, Extras, Rule
from deuteron.kernels.optim_rules import ADAM, SCALES, adam, adam_in_8_bits
from deuteron.optim.base import Ours, OwnArguments
from deuteron.optim.batch import Batch, is_dense, same_memory_order

KINDS = dict(zip(ADAM.values(), (torch.int8, torch.uint8), strict=True))


class AdamW8bit(OwnArguments):
    """AdamW with a quarter of the state: 2.03 bytes per element instead of 8.

    Groups of 256 elements share a float32 scale. The first moment is kept as ±A·(q/127)², the
    second as V·(q/255)⁴, so that both resolve small values better than large ones. One store is off
    by at most one level: 2·√(|m|·A)/127 + A/127² for m, about 4·v/q for v. Levels are rounded
    up or down by chance (a hash of element and step, so runs repeat exactly) with the mean kept, so
    errors average out instead of adding up; expect single updates to be off by some per cent.
    An inf or nan takes the state of its group with it.

    Tensors of fewer than ``min_8bit_size`` elements keep their state as
    :class:`deuteron.optim.AdamW` does. On the CPU it saves memory, not time. Of the further
    arguments (:class:`deuteron.optim.Ours`) all but ``state_dtype`` are there; averages and master
    weights are in float32. ``params``, ``lr``, ``betas``, ``eps``, ``weight_decay``, ``maximize``
    and ``capturable`` are those of ``torch.optim.AdamW``.

    >>> opt = dt.optim.AdamW8bit(model.parameters(), lr=3e-4)
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        min_8bit_size: int = 4096,
        maximize: bool = False,
        capturable: bool = False,
        **ours: Unpack[Ours],
    ) -> None:
        if ours.get("state_dtype"):
            raise ValueError("AdamW8bit has no state_dtype; use AdamW for it")
        self.min_8bit_size = min_8bit_size
        given = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, ours, **given, maximize=maximize, capturable=capturable)

    def _is_large(self, p: torch.Tensor) -> bool:
        return p.numel() >= max(self.min_8bit_size, 1)

    def _rule(self, group: dict[str, Any], p: torch.Tensor, extras: Extras) -> Rule:
        return adam_in_8_bits(extras) if self._is_large(p) else adam(False, True, True, extras)

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[Any]:
        return [*group["betas"], group["eps"], group["weight_decay"]]

    def _check(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        super()._check(p, grad)
        if self._is_large(p) and (p.is_complex() or p.dtype == torch.float64):
            raise BindError(
                f"8 bits of state do not serve {p.dtype}",
                asked=f"a step of AdamW8bit for a parameter of shape {tuple(p.shape)}",
                remedy="use AdamW for it",
            )

    def _stored_as(self, p: torch.Tensor, key: str) -> torch.dtype:
        if key in SCALES.values():
            return torch.float32
        return KINDS[key] if key in KINDS and self._is_large(p) else super()._stored_as(p, key)

    def _like(self, p: torch.Tensor, key: str) -> torch.Tensor:
        groups = -(-p.numel() // GROUP)
        return p.new_empty(groups) if key in SCALES.values() else super()._like(p, key)

    def _state_of(self, p: torch.Tensor, rule: Rule) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if rule.walk == GROUPS and "exp_avg_scale" not in state:
            for key in ("step", *ADAM.values()):  # of an optimiser that kept them otherwise
                state.pop(key, None)
        elif rule.walk == GROUPS and is_dense(p) and not same_memory_order(state["exp_avg"], p):
            raise BindError(
                "its 8-bit state was saved in another memory order, and scales go by memory",
                asked=f"a step of AdamW8bit for a parameter of shape {tuple(p.shape)}",
                remedy="load the state before the parameter changes its memory format",
            )
        return super()._state_of(p, rule)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"min_8bit_size": self.min_8bit_size}
