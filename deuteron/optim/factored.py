"""Adafactor in torch's operators, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from deuteron.optim.batch import Batch


def step(batch: Batch, numbers: list[float]) -> None:
    """One step of every tensor of a batch. Norms stay on the device: tensors without dimensions."""
    gscale, weight, rho, keep, eps1, eps2, d, _, *ema_rate = numbers
    for home, grad, state in zip(batch.homes, batch.held, batch.states, strict=True):
        if not home.numel():
            continue
        wide = torch.promote_types(home.dtype, torch.float32)
        g, p = grad.to(wide) * gscale, home.to(wide)
        rate = _at_least(p.norm() / p.numel() ** 0.5, eps2) * rho
        u = g * _below(g, state, weight, eps1).clamp(min=eps1 * eps1).rsqrt()
        rate = rate / _at_least(u.norm() / (u.numel() ** 0.5 * d), 1.0)
        home.copy_(p * keep - rate * u)
        for part in ema_rate:
            state["ema"].lerp_(home.to(state["ema"].dtype), part)


def paces(
    squares: Sequence[Sequence[float]], sizes: Sequence[int], numbers: Sequence[float]
) -> list[float]:
    """The rate of every tensor, from Σ p² and Σ u²; a sum that is nan counts for nothing."""
    rho, eps2, d = (numbers[k] for k in (2, 5, 6))
    found = []
    for (p, u), size in zip(squares, sizes, strict=True):
        rms_p, rms_u = (math.sqrt(x / max(size, 1)) for x in (p, u))
        found.append(max(eps2, rms_p) * rho / max(1.0, rms_u / d))  # in this order, for nan
    return found


def _at_least(x: torch.Tensor, least: float) -> torch.Tensor:
    """The larger, or ``least`` if x is nan: a nan in one element does not reach the others of a
    vector through its norm, as in torch.optim.Adafactor."""
    return torch.where(x > least, x, least)


def _below(
    g: torch.Tensor, state: dict[str, torch.Tensor], weight: float, eps1: float
) -> torch.Tensor:
    """The second moment of every element, from the state as it is after this step."""
    if g.dim() < 2:
        new = state["variance"].to(g.dtype).lerp(g.square(), weight)
        state["variance"].copy_(new)
        return new
    squares = g.square()
    row, col = (
        state[key].to(g.dtype).lerp(squares.mean(dim, keepdim=True), weight)
        for key, dim in (("row_var", -1), ("col_var", -2))
    )
    state["row_var"].copy_(row)
    state["col_var"].copy_(col)
    return row * col / row.mean(dim=-2, keepdim=True).clamp(min=eps1)
