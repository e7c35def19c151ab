"""Reductions over any axes: deterministic, sums of 16-bit numbers kept in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.autocast import Cast
from deuteron.functional.context import is_differentiated
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, LOW, WIDE, delegates
from deuteron.functional.operators import named, operator
from deuteron.ops import Ops, Sym
from deuteron.ops.vector_norm import vector_norm

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
    """Whether numbers that follow each other in memory are joined."""
    return x.is_contiguous() and not _down_columns(x, dim)


def _sum_is_torchs(x: Tensor, dim: Dims = None, *_: Any, **__: Any) -> bool:
    """Its gradient is nothing but a view, which a node in Python makes no quicker."""
    columns = _down_columns(x, dim)
    if x.dtype not in LOW and (not columns or x.dtype is not torch.float32):
        return True
    with_gradient = 2 * MB if columns else 4 * MB
    return x.nbytes < (with_gradient if is_differentiated(x) else MB)


def mean_is_torchs(x: Tensor, dim: Dims = None, *_: Any, **__: Any) -> bool:
    """Of the mean along ``dim``, or along rows where that is None."""
    if is_differentiated(x):
        return x.nbytes <= MB // 2
    return x.dtype in WIDE and x.nbytes < 8 * MB and _along_rows(x, dim)


def extreme_is_torchs(x: Tensor, dim: Dims = None, *_: Any, **__: Any) -> bool:
    """Of the largest or the smallest value along ``dim``, or along rows."""
    if is_differentiated(x):
        return x.nbytes <= MB // 4
    return x.dtype in WIDE and _along_rows(x, dim)


def _prod_is_torchs(x: Tensor, *_: Any, **__: Any) -> bool:
    return x.dtype in WIDE or is_differentiated(x)


# ---- the functions


def _added_up(name: str, what: str, on_cpu: Callable[..., bool]) -> Callable[..., Tensor]:
    """A reduction that may cast x first."""
    run, torchs = operator(name), getattr(torch, name)

    def call(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
        rest = () if dim is None and not keepdim else (dim, keepdim)  # prod takes no dim of None
        return torchs(x, *rest, dtype=dtype)  # type: ignore[no-any-return]

    def function(
        x: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return cast(run.one(cast(x, dtype), axes=_axes(dim), keepdim=keepdim), dtype)

    doc = (
        f"The {what} along ``dim``: one axis, several, or all. ``keepdim`` leaves them with size 1."
        f"\n``dtype``: x is cast to it first. As ``torch.{name}``."
    )
    return delegates(call, on_cpu=on_cpu, autocast=True)(named(function, name, doc))


def _extreme(name: str, op: str, what: str) -> Callable[..., Tensor]:
    run = operator(op)

    def function(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Tensor:
        return run.one(x, axes=_axes(dim), keepdim=keepdim)

    doc = (
        f"The {what} value along ``dim``; nan if there is one. Equal ones share the gradient. As\n"
        f"``torch.{name}``."
    )
    handed = delegates(getattr(torch, name), on_cpu=extreme_is_torchs, autocast=True)
    return handed(named(function, name, doc))


def _place(name: str, what: str) -> Callable[..., Tensor]:
    run = operator(name)

    def function(x: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
        return run.one(x, axis=dim, keepdim=keepdim)

    doc = (
        f"Where the {what} value stands, the first of equals; in all of x if ``dim`` is None. As\n"
        f"``torch.{name}``."
    )
    return delegates(getattr(torch, name), autocast=True)(named(function, name, doc))


sum = _added_up("sum", "sum", _sum_is_torchs)
mean = _added_up("mean", "mean", mean_is_torchs)
prod = _added_up("prod", "product", _prod_is_torchs)
amax, amin = _extreme("amax", "max", "largest"), _extreme("amin", "min", "smallest")
argmax, argmin = _place("argmax", "largest"), _place("argmin", "smallest")
VAR, WHERE = operator("var"), operator("where")


@delegates(torch.var, autocast=True)
def var(
    x: Tensor, dim: Dims = None, *, correction: int | None = 1, keepdim: bool = False
) -> Tensor:
    """The variance along ``dim``, from centred values: exact where the mean is large. The sum of
    squares is divided by the number of elements less ``correction`` (None: 1). A bool for ``dim``
    is torch's older ``unbiased``. As ``torch.var``."""
    less = 1 if correction is None else correction
    if isinstance(dim, bool):
        less, dim = int(dim), None
    return VAR.one(x, axes=_axes(dim), correction=less, keepdim=keepdim)


def _norm(b: Ops, x: Sym, *, p: float, axes: tuple[int, ...] | None, keepdim: bool) -> Sym:
    return vector_norm(b, x, p, axes, keepdim)


NORM = Cast("norm", _norm)


def _torch_norm(x: Tensor, p: float = 2.0, *args: Any, **named: Any) -> Tensor:
    return torch.linalg.vector_norm(x, p, *args, **named)  # type: ignore[no-any-return]


@delegates(_torch_norm, autocast=True)
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


def _torch_where(condition: Tensor, x: Any, y: Any) -> Tensor:
    return torch.where(condition, x, y)


@delegates(_torch_where, autocast=True)
def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    """x where ``condition`` holds, y elsewhere, broadcast; either may be a number. As
    ``torch.where``."""
    return WHERE.one(condition, _tensor(x, y, condition), _tensor(y, x, condition))


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


def _permute(b: Ops, x: Sym, *, dims: tuple[int, ...]) -> Sym:
    return b.one("to_layout", b.permute(x, dims=dims), layout="contiguous")


PERMUTE = Function("permute", _permute)


@delegates(torch.permute_copy, on_cpu=ANY, autocast=True)
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """The dimensions of x in the order ``dims``, as a tensor laid out in that order (not a view, as
    ``torch.permute`` gives)."""
    return PERMUTE.one(x, dims=tuple(dims))
