"""AdamW with its state in 8 bits."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.errors import BindError
from deuteron.kernels.optim import Extras, Rule, adam
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch, is_dense, same_memory_order
from deuteron.optim.lion import check_common
from deuteron.optim.machines import Control, Machine

GROUP = 256  # elements that share a scale
KEYS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


class AdamW8bit(Fused):
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
        check_common(lr, betas, weight_decay)
        if not eps >= 0.0:
            raise ValueError(f"Invalid epsilon value: {eps}")
        if ours.get("state_dtype"):
            raise ValueError("AdamW8bit has no state_dtype; use AdamW for it")
        self._set(ours)
        self.min_8bit_size = min_8bit_size
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "capturable": capturable,
            },
        )

    def _rule(self, group: dict[str, Any], extras: Extras) -> Rule:
        return adam(False, True, True, extras)

    def _is_large(self, p: torch.Tensor) -> bool:
        return p.numel() >= max(self.min_8bit_size, 1)

    def _keys(self, group: dict[str, Any], p: torch.Tensor) -> tuple[str, ...]:
        return KEYS if self._is_large(p) else KEYS[:2]

    def _constants(self, group: dict[str, Any], batch: Batch) -> list[float]:
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
        return torch.float32 if key.endswith("scale") else super()._stored_as(p, key)

    def _state_of(self, p: torch.Tensor, keys: tuple[str, ...], counts: bool) -> dict[str, Any]:
        if keys[: len(KEYS)] != KEYS:
            return super()._state_of(p, keys, counts)
        state: dict[str, Any] = self.state[p]
        if "exp_avg_scale" not in state:
            groups = -(-p.numel() // GROUP)
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, dtype=torch.int8)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.uint8)
            for key in KEYS[2:]:
                state[key] = torch.zeros(groups, dtype=torch.float32, device=p.device)
        if is_dense(p) and not same_memory_order(state["exp_avg"], p):
            raise BindError(
                "its 8-bit state was saved in another memory order, and scales go by memory",
                asked=f"a step of AdamW8bit for a parameter of shape {tuple(p.shape)}",
                remedy="load the state before the parameter changes its memory format",
            )
        return super()._state_of(p, keys[len(KEYS) :], counts)

    def _run(
        self, run: Machine, batch: Batch, group: dict[str, Any], control: Control | None
    ) -> None:
        if batch.keys[: len(KEYS)] != KEYS:
            super()._run(run, batch, group, control)
            return
        run.step_8bit(batch, self._all_constants(group, batch), group["lr"], control)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"min_8bit_size": self.min_8bit_size}
