"""Adafactor: second moments of a matrix as the product of a column and a row."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from deuteron.errors import BindError
from deuteron.kernels.optim import SQUARES, Extras, Numbers, Rule
from deuteron.optim.base import Fused, Ours
from deuteron.optim.batch import Batch
from deuteron.optim.machines import Control, Machine

RULE = Rule(SQUARES, Numbers((), (), ()), counts=True)


class Adafactor(Fused, torch.optim.Adafactor):
    """torch.optim.Adafactor: same arguments, groups and state dict.

    ``foreach`` is accepted and changes nothing. Its row and column sums make it several calls of
    torch's operators per tensor, not one launch; unlike torch's own it never waits for the device
    to learn a norm, and computes in float32 where parameters have 16 bits. Of the further arguments
    (:class:`deuteron.optim.Ours`) ``max_norm``, ``skip_nonfinite`` and ``ema_decay`` are there;
    with a GradScaler, ``max_norm`` or ``skip_nonfinite`` a step does wait once for the device.
    """

    def __init__(
        self, params: Any, lr: float | torch.Tensor = 1e-2, beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0,
        weight_decay: float = 0.0, *, foreach: bool | None = None, maximize: bool = False,
        **ours: Unpack[Ours],
    ) -> None:  # fmt: skip
        for name in ("state_dtype", "master_weights"):
            if ours.get(name):
                raise ValueError(f"Adafactor has no {name}; use AdamW for it")
        self._set(ours)
        torch.optim.Adafactor.__init__(
            self, params, lr, beta2_decay, eps, d, weight_decay, foreach=foreach, maximize=maximize
        )

    def _rule(self, group: dict[str, Any], extras: Extras) -> Rule:
        return RULE

    def _keys(self, group: dict[str, Any], p: torch.Tensor) -> tuple[str, ...]:
        return ("row_var", "col_var") if p.dim() > 1 else ("variance",)

    def _check(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        super()._check(p, grad)
        if p.is_complex():
            raise BindError(
                f"{p.dtype} has no factored second moment",
                asked=f"a step of Adafactor for a parameter of shape {tuple(p.shape)}",
                remedy="use Adam for it",
            )

    def _state_of(self, p: torch.Tensor, keys: tuple[str, ...], counts: bool) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if "step" not in state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            if p.dim() > 1:
                state["row_var"] = p.new_zeros((*p.shape[:-1], 1))
                state["col_var"] = p.new_zeros((*p.shape[:-2], 1, p.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(p)
        if "ema" in keys and "ema" not in state:
            state["ema"] = p.detach().to(self._stored_as(p, "ema"), copy=True)
        return state

    def _run(
        self, run: Machine, batch: Batch, group: dict[str, Any], control: Control | None
    ) -> None:
        factor, skip = control.pair.tolist() if control is not None else (1.0, 0.0)
        if skip:
            return
        step, sign = batch.advance(), -1.0 if group["maximize"] else 1.0
        decay = self.ours.get("ema_decay")
        for home, grad, state in zip(batch.homes, batch.held, batch.states, strict=True):
            if home.numel():
                _update(home, grad, state, group, step, factor * sign)
                if decay is not None:
                    state["ema"].lerp_(home.to(state["ema"].dtype), 1.0 - decay)


def _update(
    p: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any],
    step: float, factor: float,
) -> None:  # fmt: skip
    """One tensor. Norms stay on the device: they become tensors without dimensions."""
    wide = torch.promote_types(p.dtype, torch.float32)
    lr, (eps1, eps2) = float(group["lr"]), group["eps"]
    eps1 = torch.finfo(p.dtype).eps if eps1 is None else eps1
    weight = step ** group["beta2_decay"]
    g, w = grad.to(wide) * factor, p.to(wide)
    rate = (w.norm() / p.numel() ** 0.5).clamp(min=eps2) * min(lr, step**-0.5)
    if p.dim() > 1:
        squares = g.square()
        row, col = (
            state[key].to(wide).lerp(squares.mean(dim, keepdim=True), weight)
            for key, dim in (("row_var", -1), ("col_var", -2))
        )
        state["row_var"].copy_(row)
        state["col_var"].copy_(col)
        below = row * col / row.mean(dim=-2, keepdim=True).clamp(min=eps1)
    else:
        below = state["variance"].to(wide).lerp(g.square(), weight)
        state["variance"].copy_(below)
    u = g * below.clamp(min=eps1 * eps1).rsqrt()
    rate = rate / (u.norm() / (u.numel() ** 0.5 * group["d"])).clamp(min=1.0)
    p.copy_(w * (1.0 - lr * group["weight_decay"]) - rate * u)
