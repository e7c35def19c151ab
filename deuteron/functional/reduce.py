"""Reductions over any axes: deterministic, sums of 16-bit numbers kept in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deuteron.functional.core import Function
from deuteron.functional.operators import one
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor
Dims = int | Sequence[int] | None


def _axes(dim: Dims) -> tuple[int, ...] | None:
    return None if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)


def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum along ``dim``: one axis, several, or all."""
    return one("sum", x, axes=_axes(dim), keepdim=keepdim)


def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean along ``dim``: one axis, several, or all."""
    return one("mean", x, axes=_axes(dim), keepdim=keepdim)


def prod(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The product along ``dim``: one axis, several, or all."""
    return one("prod", x, axes=_axes(dim), keepdim=keepdim)


def var(x: Tensor, dim: Dims = None, *, correction: int = 1, keepdim: bool = False) -> Tensor:
    """The variance along ``dim``, from centred values: exact where the mean is large."""
    return one("var", x, axes=_axes(dim), correction=correction, keepdim=keepdim)


def amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest value along ``dim``; nan if there is one. Equal ones share the gradient."""
    return one("max", x, axes=_axes(dim), keepdim=keepdim)


def amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest value along ``dim``; nan if there is one. Equal ones share the gradient."""
    return one("min", x, axes=_axes(dim), keepdim=keepdim)


def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest value stands, the first of equals; in all of x if ``dim`` is None."""
    return one("argmax", x, axis=dim, keepdim=keepdim)


def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest value stands, the first of equals; in all of x if ``dim`` is None."""
    return one("argmin", x, axis=dim, keepdim=keepdim)


def _norm(b: Ops, x: Sym, *, p: float, axes: tuple[int, ...] | None, keepdim: bool) -> Sym:
    along = {"axes": axes, "keepdim": keepdim}
    wide = b.upcast(x)
    if p == float("inf"):
        y = b.one("max", b.abs(wide), **along)
    elif p == 1.0:
        y = b.one("sum", b.abs(wide), **along)
    elif p == 2.0:
        y = b.one("sqrt", b.sum(b.square(wide), **along))
    else:
        y = b.one("pow", b.sum(b.pow(b.abs(wide), p), **along), 1.0 / p)
    return b.to(y, x.dtype)


NORM = Function("norm", _norm)


def norm(x: Tensor, p: float = 2.0, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) along ``dim``; p may be ``float("inf")``."""
    return NORM.one(x, p=float(p), axes=_axes(dim), keepdim=keepdim)


def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where the condition holds, y elsewhere, broadcast."""
    return one("where", condition, x, y)


def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions of x in another order, as a tensor laid out in that order (not a view)."""
    return PERMUTE.one(x, dims=tuple(dims))


def _permute(b: Ops, x: Sym, *, dims: tuple[int, ...]) -> Sym:
    return b.one("to_layout", b.permute(x, dims=dims), layout="contiguous")


PERMUTE = Function("permute", _permute)
