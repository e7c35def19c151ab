"""Rows whose squares overflow float64: references, which have to be right, scale them first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor


def without_overflow(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """x, and None; or in float64 x with rows whose squares would overflow brought down to 2¹⁰⁰,
    and the power of two by which each row was multiplied. A row is what ``axes`` run over.

    The norm of such a row stays the same: eps is nothing beside its variance, unless that is 0.
    """
    if x.dtype != torch.float64 or not x.numel():
        return x, None
    most = x.abs().amax(tuple(axes), keepdim=True) if axes else x.abs()
    far = most.isfinite() & (most > 2.0**500)
    # chosen, not branched upon: under torch.func a tensor has no truth
    down = torch.where(far, torch.exp2(100.0 - torch.floor(torch.log2(most))), 1.0)
    return x * down, down
