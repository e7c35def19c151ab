"""Softmax and its logarithm, with the scale and the mask that usually stand before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from deuteron.functional.autocast import Cast
from deuteron.functional.library import delegates, several_calls_win
from deuteron.functional.wrapper import Plain
from deuteron.ir.dtype import dtype as to_dtype
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor


def _masked(b: Ops, x: Sym, mask: Sym | None, scale: float, dtype: str | None) -> Sym:
    if dtype is not None:
        x = b.to(x, to_dtype(dtype))
    if scale != 1.0:
        x = x * scale
    if mask is None:
        return x
    return b.where(mask, x, -math.inf) if mask.dtype.kind == "bool" else x + mask


def _softmax(b: Ops, x: Sym, mask: Sym | None, *, dim: int, scale: float, dtype: str | None) -> Sym:
    y = b.one("softmax", _masked(b, x, mask, scale, dtype), axis=dim)
    if mask is not None and mask.dtype.kind == "bool":
        y = b.where(mask, y, 0.0)  # a row with nothing left is zero, not nan
    return y


def _log_softmax(
    b: Ops, x: Sym, mask: Sym | None, *, dim: int, scale: float, dtype: str | None
) -> Sym:
    y = b.one("log_softmax", _masked(b, x, mask, scale, dtype), axis=dim)
    if mask is not None and mask.dtype.kind == "bool":
        y = b.where(mask, y, -math.inf)
    return y


SOFTMAX = Cast("softmax", _softmax)
LOG_SOFTMAX = Cast("log_softmax", _log_softmax)


def _torchs(call: Callable[..., Tensor]) -> Callable[..., Any]:
    """torch's softmax with a scale and a mask that is added; a bool mask takes too many calls."""

    def run(
        x: Tensor, dim: int | None, mask: Tensor | None, scale: float, dtype: torch.dtype | None
    ) -> Any:
        if dim is None:
            return NotImplemented
        if mask is None and scale == 1.0:
            return call(x, dim) if dtype is None else call(x, dim, dtype)
        if dtype is not None or (mask is not None and mask.dtype is torch.bool):
            return NotImplemented
        if not several_calls_win(x, mask):
            return NotImplemented
        return call(x * scale if mask is None else x * scale + mask, dim)

    return run


def _plain(call: Callable[..., Tensor], inner: Callable[..., Tensor]) -> tuple[Plain, Plain]:
    """The bare function by what it calls in turn, which autocast does not know, and the function of
    an x with a mask that is added, where a gradient follows: scaling and adding are one call."""
    return Plain(inner, "plain(x, dim, False)", where="not autocasting()"), Plain(
        call,
        "plain(add(mask, x, alpha=scale), dim)",
        where="mask is not None and scale.__class__ is float and mask.dtype is not boolean",
        given={"add": torch.add, "boolean": torch.bool},
        learns=("x", "mask"),
    )


BARE: dict[str, Any] = {"single": "mask is None", "keeps_type": True}


def _attributes(
    x: Tensor, dim: int | None, scale: float, dtype: torch.dtype | None
) -> dict[str, Any]:
    usual = 0 if x.ndim in (0, 1, 3) else 1  # torch's choice, where nothing is said
    short = None if dtype is None else to_dtype(dtype).short
    return {"dim": usual if dim is None else dim, "scale": scale, "dtype": short}


@delegates(_torchs(torch.softmax), plain=_plain(torch.softmax, torch._softmax), **BARE)
def softmax(
    x: Tensor,
    dim: int | None = -1,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """e^(scale·x) over its sum along ``dim``, for rows of any length.

    A bool ``mask`` (broadcast with x) keeps what is True; what is masked, and a row of which
    nothing is left, is 0. Any other mask is added, like a bias of attention. ``dtype``: x is cast
    to it first, in the same pass.
    """
    return SOFTMAX.one(x, mask, **_attributes(x, dim, scale, dtype))


@delegates(_torchs(torch.log_softmax), plain=_plain(torch.log_softmax, torch._log_softmax), **BARE)
def log_softmax(
    x: Tensor,
    dim: int | None = -1,
    *,
    mask: Tensor | None = None,
    scale: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The logarithm of :func:`softmax`, exact where the softmax itself would be 0."""
    return LOG_SOFTMAX.one(x, mask, **_attributes(x, dim, scale, dtype))
