"""Softmax and its logarithm, with the scale and the mask that usually come before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deuteron.functional.autocast import Cast
from deuteron.functional.delegate import TRAINED, P, delegates
from deuteron.ir.dtype import dtype as to_dtype
from deuteron.ops import Ops, Sym


def _build(name: str, masked: float) -> Callable[..., Sym]:
    """Return what writes the operator ``name`` with scale and mask. ``masked``: the result where a
    bool mask is False, even for a whole row, which would be nan otherwise."""

    def run(b: Ops, x: Sym, mask: Sym | None, *, dim: int, scale: float, dtype: str | None) -> Sym:
        if dtype is not None:
            x = b.to(x, to_dtype(dtype))
        x = x * scale if scale != 1.0 else x
        if mask is None or mask.dtype.kind != "bool":
            return b.one(name, x if mask is None else x + mask, axis=dim)
        return b.one("where", mask, b.one(name, b.where(mask, x, -math.inf), axis=dim), masked)

    return run


SOFTMAX = Cast("softmax", _build("softmax", 0.0))
LOG_SOFTMAX = Cast("log_softmax", _build("log_softmax", -math.inf))


def _joined(*_: Any, mask: Tensor | None = None, scale: float = 1.0, **__: Any) -> int:
    """How many calls torch needs before its softmax: a scale and a mask are one together."""
    return int(mask is not None or scale != 1.0)


def _by_torch(call: Callable[..., Tensor]) -> Callable[..., Any]:
    """Return torch's softmax after a scale and an added mask; a bool mask takes too many calls."""

    def run(
        x: Tensor, dim: Any = -1, *, mask: Any = None, scale: float = 1.0, dtype: Any = None
    ) -> Any:
        if mask is None and scale == 1.0:
            return call(x, dim, dtype=dtype) if dim is not None else NotImplemented
        if dim is None or dtype is not None or (mask is not None and mask.dtype is torch.bool):
            return NotImplemented
        return call(x * scale if mask is None else torch.add(mask, x, alpha=scale), dim)

    return run


def _run(function: Cast, x: Tensor, dim: int | None, mask: Any, scale: float, dtype: Any) -> Tensor:
    usual = 0 if x.ndim in (0, 1, 3) else 1  # torch's choice, if dim is None
    short = None if dtype is None else to_dtype(dtype).short
    return function.one(x, mask, dim=usual if dim is None else dim, scale=scale, dtype=short)


def _delegates(call: Callable[..., Tensor]) -> Callable[[Callable[P, Tensor]], Callable[P, Tensor]]:
    plain, joined = (lambda x, dim=-1: call(x, dim)), _by_torch(call)
    how: Any = {"autocast": True, "passes": 9.0, "trained": TRAINED}
    return delegates(plain, joined=joined, several=_joined, **how)


@_delegates(torch.softmax)
def softmax(
    x: Tensor,
    dim: int | None = -1,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return e^(scale·x) divided by its sum along ``dim``, for rows of any length.

    mask   bool: what is False is left out, and is 0 in the result, as is a whole row without a
           True. Of another type: it is added to scale · x, like a bias of attention. It broadcasts
           with x
    dtype  x is cast to it first, in the same pass
    """
    return _run(SOFTMAX, x, dim, mask, scale, dtype)


@_delegates(torch.log_softmax)
def log_softmax(
    x: Tensor,
    dim: int | None = -1,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the logarithm of :func:`softmax`, exact even where the softmax itself would be 0."""
    return _run(LOG_SOFTMAX, x, dim, mask, scale, dtype)
