"""Reductions over any axes: deterministic, sums of 16-bit numbers kept in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deuteron.functional.core import Function
from deuteron.functional.library import ANY, WIDE, delegates
from deuteron.functional.operators import one
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor
Dims = int | Sequence[int] | None


def _axes(dim: Dims) -> tuple[int, ...] | None:
    return None if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)


def _torch_max(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Where torch writes () for all axes."""

    def run(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return call(x, () if dim is None else dim, keepdim)

    return run


def _torch_prod(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Any:
    if isinstance(dim, int):
        return torch.prod(x, dim, keepdim)
    return NotImplemented if dim is not None or keepdim else torch.prod(x)


def _torch_where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return torch.where(condition, x, y)
    return NotImplemented


def _torch_permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.permute(tuple(dims)).clone(memory_format=torch.contiguous_format)


@delegates(torch.sum, on_cpu=ANY)
def sum(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The sum along ``dim``: one axis, several, or all."""
    return one("sum", x, axes=_axes(dim), keepdim=keepdim)


@delegates(torch.mean)
def mean(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The mean along ``dim``: one axis, several, or all."""
    return one("mean", x, axes=_axes(dim), keepdim=keepdim)


@delegates(_torch_prod, on_cpu=WIDE)
def prod(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The product along ``dim``: one axis, several, or all."""
    return one("prod", x, axes=_axes(dim), keepdim=keepdim)


@delegates(torch.var)
def var(x: Tensor, dim: Dims = None, *, correction: int = 1, keepdim: bool = False) -> Tensor:
    """The variance along ``dim``, from centred values: exact where the mean is large."""
    return one("var", x, axes=_axes(dim), correction=correction, keepdim=keepdim)


@delegates(_torch_max(torch.amax))
def amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest value along ``dim``; nan if there is one. Equal ones share the gradient."""
    return one("max", x, axes=_axes(dim), keepdim=keepdim)


@delegates(_torch_max(torch.amin))
def amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest value along ``dim``; nan if there is one. Equal ones share the gradient."""
    return one("min", x, axes=_axes(dim), keepdim=keepdim)


@delegates(torch.argmax)
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest value stands, the first of equals; in all of x if ``dim`` is None."""
    return one("argmax", x, axis=dim, keepdim=keepdim)


@delegates(torch.argmin)
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


@delegates(torch.linalg.vector_norm)
def norm(x: Tensor, p: float = 2.0, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) along ``dim``; p may be ``float("inf")``."""
    return NORM.one(x, p=float(p), axes=_axes(dim), keepdim=keepdim)


@delegates(_torch_where)
def where(condition: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x where the condition holds, y elsewhere, broadcast."""
    return one("where", condition, x, y)


@delegates(_torch_permute, on_cpu=ANY)
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions of x in another order, as a tensor laid out in that order (not a view)."""
    return PERMUTE.one(x, dims=tuple(dims))


def _permute(b: Ops, x: Sym, *, dims: tuple[int, ...]) -> Sym:
    return b.one("to_layout", b.permute(x, dims=dims), layout="contiguous")


PERMUTE = Function("permute", _permute)
