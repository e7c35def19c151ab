"""Softmax and its logarithm, with the scale and the mask that usually stand before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from deuteron.functional.core import Function
from deuteron.functional.library import delegates, several_calls_win
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor


def _masked(b: Ops, x: Sym, mask: Sym | None, scale: float) -> Sym:
    if scale != 1.0:
        x = x * scale
    if mask is None:
        return x
    return b.where(mask, x, -math.inf) if mask.dtype.kind == "bool" else x + mask


def _softmax(b: Ops, x: Sym, mask: Sym | None, *, dim: int, scale: float) -> Sym:
    y = b.one("softmax", _masked(b, x, mask, scale), axis=dim)
    if mask is not None and mask.dtype.kind == "bool":
        y = b.where(mask, y, 0.0)  # a row with nothing left is zero, not nan
    return y


def _log_softmax(b: Ops, x: Sym, mask: Sym | None, *, dim: int, scale: float) -> Sym:
    y = b.one("log_softmax", _masked(b, x, mask, scale), axis=dim)
    if mask is not None and mask.dtype.kind == "bool":
        y = b.where(mask, y, -math.inf)
    return y


SOFTMAX = Function("softmax", _softmax)
LOG_SOFTMAX = Function("log_softmax", _log_softmax)


def _torchs(call: Callable[[Tensor, int], Tensor]) -> Callable[..., Any]:
    """torch's softmax with a scale and a mask that is added; a bool mask takes too many calls."""

    def run(x: Tensor, dim: int = -1, *, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        if mask is None and scale == 1.0:
            return call(x, dim)
        if not several_calls_win(x, mask):
            return NotImplemented
        if mask is None:
            return call(x * scale, dim)
        return NotImplemented if mask.dtype is torch.bool else call(x * scale + mask, dim)

    return run


@delegates(_torchs(torch.softmax))
def softmax(x: Tensor, dim: int = -1, *, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """e^(scale·x) over its sum along ``dim``, for rows of any length.

    A bool ``mask`` (broadcast with x) keeps what is True; what is masked, and a row of which
    nothing is left, is 0. Any other mask is added, like a bias of attention.
    """
    return SOFTMAX.one(x, mask, dim=dim, scale=scale)


@delegates(_torchs(torch.log_softmax))
def log_softmax(
    x: Tensor, dim: int = -1, *, mask: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """The logarithm of :func:`softmax`, exact where the softmax itself would be 0."""
    return LOG_SOFTMAX.one(x, mask, dim=dim, scale=scale)
