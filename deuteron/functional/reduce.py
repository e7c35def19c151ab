"""Reductions over any axes: deterministic, sums of 16-bit numbers kept in float32."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import is_grad_enabled

from deuteron.errors import BindError
from deuteron.functional.autocast import Cast
from deuteron.functional.core import Function
from deuteron.functional.library import ANY, LOW, WIDE, delegates, is_differentiated
from deuteron.functional.operators import one
from deuteron.ops import Ops, Sym
from deuteron.ops.vector_norm import vector_norm

Tensor = torch.Tensor
Dims = int | Sequence[int] | None


def _axes(dim: Dims) -> tuple[int, ...] | None:
    """None for all of them, which torch also writes as ()."""
    if dim is None:
        return None
    dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    # 1.0 and False would find the plan of 1 and 0; a bool is refused there
    return tuple(d if isinstance(d, bool) else index(d) for d in dims) or None


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``x`` in the type in which it is to be added up, or in which the sum is wanted."""
    return x if dtype is None else x.to(dtype)


# ---- which large calls are torch's on a CPU
#
# Measured on two Neoverse-N1 cores, bench/results/delegation-cpu-aarch64.md. Along rows of float32
# torch reads memory as fast as anybody, and less is spent on finding its kernel; down columns, in
# 16 bits and with a gradient ours are the quicker ones, from some size on: a gradient of ours costs
# a node in Python.

MB = 1 << 20


def _down_columns(x: Tensor, dim: Dims) -> bool:
    """Whether rows that follow each other in memory are joined: the last axis stays."""
    axes, last = _axes(dim), x.ndim - 1
    if axes is None or not x.ndim:
        return False
    return x.is_contiguous() and all(a % x.ndim != last for a in axes)


def _along_rows(x: Tensor, dim: Dims) -> bool:
    """Whether numbers that follow each other in memory are joined. The usual dims are looked at
    first: where torch's kernel takes 100 µs, every question counts."""
    usual = dim is None or dim == -1
    return x.is_contiguous() and (usual or not _down_columns(x, dim))


def _sum_is_torchs(x: Tensor, dim: Dims) -> bool:
    """Its gradient is nothing but a view, which a node in Python makes no quicker."""
    wide = x.dtype not in LOW
    if wide and (dim is None or dim == -1 or x.dtype is not torch.float32):
        return True
    columns = _down_columns(x, dim)
    if wide and not columns:
        return True
    with_gradient = 2 * MB if columns else 4 * MB
    return x.nbytes < (with_gradient if is_differentiated(x) else MB)


def mean_is_torchs(x: Tensor, dim: Dims) -> bool:
    """Of the mean along ``dim``, or along rows where that is None."""
    if x.requires_grad and is_grad_enabled():
        return x.nbytes <= MB // 2
    return x.dtype in WIDE and x.nbytes < 8 * MB and _along_rows(x, dim)


def extreme_is_torchs(x: Tensor, dim: Dims) -> bool:
    """Of the largest or the smallest value along ``dim``, or along rows."""
    if x.requires_grad and is_grad_enabled():
        return x.nbytes <= MB // 4
    return x.dtype in WIDE and _along_rows(x, dim)


def _prod_is_torchs(x: Tensor, dim: Dims) -> bool:
    return x.dtype in WIDE or (x.requires_grad and is_grad_enabled())


# ---- the functions


@delegates(torch.sum, by_name=("dtype",), keeps_type=True, on_cpu=_sum_is_torchs)
def sum(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The sum along ``dim``: one axis, several, or all. ``keepdim`` leaves them with size 1.
    ``dtype``: x is cast to it first. As ``torch.sum``."""
    return cast(one("sum", cast(x, dtype), axes=_axes(dim), keepdim=keepdim), dtype)


@delegates(torch.mean, by_name=("dtype",), keeps_type=True, on_cpu=mean_is_torchs)
def mean(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The mean along ``dim``: one axis, several, or all. ``keepdim`` leaves them with size 1.
    ``dtype``: x is cast to it first. As ``torch.mean``."""
    return one("mean", cast(x, dtype), axes=_axes(dim), keepdim=keepdim)


@delegates(torch.prod, by_name=("dtype",), keeps_type=True, on_cpu=_prod_is_torchs)
def prod(
    x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The product along ``dim``: one axis, several, or all. ``keepdim`` leaves them with size 1.
    ``dtype``: x is cast to it first. As ``torch.prod``."""
    return cast(one("prod", cast(x, dtype), axes=_axes(dim), keepdim=keepdim), dtype)


@delegates(torch.var, by_name=("correction", "keepdim"), keeps_type=True)
def var(
    x: Tensor, dim: Dims = None, *, correction: int | None = 1, keepdim: bool = False
) -> Tensor:
    """The variance along ``dim``, from centred values: exact where the mean is large. The sum of
    squares is divided by the number of elements less ``correction`` (None: 1). A bool for ``dim``
    is torch's older ``unbiased``. As ``torch.var``."""
    less = 1 if correction is None else correction
    if isinstance(dim, bool):
        less, dim = int(dim), None
    return one("var", x, axes=_axes(dim), correction=less, keepdim=keepdim)


@delegates(torch.amax, keeps_type=True, on_cpu=extreme_is_torchs)
def amax(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The largest value along ``dim``; nan if there is one. Equal ones share the gradient. As
    ``torch.amax``."""
    return one("max", x, axes=_axes(dim), keepdim=keepdim)


@delegates(torch.amin, keeps_type=True, on_cpu=extreme_is_torchs)
def amin(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """The smallest value along ``dim``; nan if there is one. Equal ones share the gradient. As
    ``torch.amin``."""
    return one("min", x, axes=_axes(dim), keepdim=keepdim)


@delegates(torch.argmax, keeps_type=True)
def argmax(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the largest value stands, the first of equals; in all of x if ``dim`` is None. As
    ``torch.argmax``."""
    return one("argmax", x, axis=dim, keepdim=keepdim)


@delegates(torch.argmin, keeps_type=True)
def argmin(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the smallest value stands, the first of equals; in all of x if ``dim`` is None. As
    ``torch.argmin``."""
    return one("argmin", x, axis=dim, keepdim=keepdim)


def _norm(b: Ops, x: Sym, *, p: float, axes: tuple[int, ...] | None, keepdim: bool) -> Sym:
    return vector_norm(b, x, p, axes, keepdim)


NORM = Cast("norm", _norm)


@delegates(torch.linalg.vector_norm, by_name=("dtype",), keeps_type=True)
def norm(
    x: Tensor,
    p: float = 2.0,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(Σ |x|ᵖ)^(1/p) along ``dim``; of p = ±inf the largest or smallest |x|, of 0 the number of
    elements that are not 0. ``dtype``: x is cast to it first. As ``torch.linalg.vector_norm``,
    whose ``ord`` is ``p``."""
    x = cast(x, dtype)
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise BindError(f"norm of {kind} is not defined", asked="norm(…)", remedy="x.float()")
    if not isinstance(p, int | float):
        raise BindError(
            f"p={p!r} is not a number",
            asked=f"norm(…, p={p!r})",
            remedy="use p=2.0, which is Frobenius' norm, too" if p == "fro" else "use p=2.0",
        )
    return cast(NORM.one(x, p=float(p), axes=_axes(dim), keepdim=keepdim), dtype)


@delegates(torch.where, keeps_type=True)
def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    """x where ``condition`` holds, y elsewhere, broadcast; either may be a number. As
    ``torch.where``."""
    return one("where", condition, _tensor(x, y, condition), _tensor(y, x, condition))


def _tensor(value: Any, other: Any, condition: Tensor) -> Tensor:
    """``value``, a number as a tensor of the type that it has beside ``other``."""
    if not isinstance(value, int | float):
        return value  # type: ignore[no-any-return]
    kind = _beside(other.dtype, value) if isinstance(other, Tensor) else None
    return torch.tensor(value, dtype=kind, device=condition.device)


def _beside(dtype: torch.dtype, value: object) -> torch.dtype:
    """torch.result_type, into which torch.compile cannot look: a number widens a type only where it
    is of a higher kind, a float beside integers or an integer beside bools."""
    if isinstance(value, float):
        is_wide = dtype.is_floating_point or dtype.is_complex
        return dtype if is_wide else torch.get_default_dtype()
    is_lower = dtype is torch.bool and not isinstance(value, bool)
    return torch.int64 if is_lower else dtype


@delegates(torch.permute_copy, keeps_type=True, on_cpu=ANY)
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions of x in the order ``dims``, as a tensor laid out in that order (not a view, as
    ``torch.permute`` gives)."""
    return PERMUTE.one(x, dims=tuple(dims))


def _permute(b: Ops, x: Sym, *, dims: tuple[int, ...]) -> Sym:
    return b.one("to_layout", b.permute(x, dims=dims), layout="contiguous")


PERMUTE = Function("permute", _permute)
