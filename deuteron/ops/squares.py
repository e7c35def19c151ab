"""Numbers whose squares overflow float64: what references do about them, being what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def squarable(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """x, and None; or in float64 x with rows whose squares would overflow brought down to 2¹⁰⁰,
    and the power of two that did it for each row. A row is what ``axes`` run over.

    The norm of such a row stays the same: eps is nothing beside its variance, unless that is 0.
    """
    if x.dtype != torch.float64 or not x.numel():
        return x, None
    most = x.abs().amax(tuple(axes), keepdim=True) if axes else x.abs()
    far = most.isfinite() & (most > 2.0**500)
    if not far.any():
        return x, None
    down = torch.exp2(100.0 - torch.frexp(most).exponent.double())
    down = torch.where(far, down, 1.0)
    return x * down, down
