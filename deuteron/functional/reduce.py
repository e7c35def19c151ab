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
from deuteron.functional.operators import from_table, operator
from deuteron.ops import Ops, Sym
from deuteron.ops.reduce import vector_norm

Dims = int | Sequence[int] | None


def _axes(dim: Dims) -> tuple[int, ...] | None:
    """None for all of them, which torch also writes as ()."""
    if dim is None:
        return None
    dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    # 1.0 and False would find the plan of 1 and 0; a bool is refused there
    return tuple(d if isinstance(d, bool) else index(d) for d in dims) or None


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


# ---- the functions


def _reduction(op: str, called: str = "", **rule: Any) -> Callable[..., Tensor]:
    """An operator along axes, under torch's name."""
    planned, called = operator(op), called or op
    torchs, casts = getattr(torch, called), op in ("sum", "mean", "prod")

    def run(x: Tensor, **attrs: Any) -> Any:
        if attrs.get("axes") == ():  # which is how torch writes all of them, too
            attrs["axes"] = None
        return planned(x, **attrs)

    def of_all(x: Tensor, dim: Any = None, keepdim: bool = False, **dtype: Any) -> Any:
        """torch's functions that cast have another signature for all of the axes."""
        rest = () if dim is None and not keepdim else (dim, keepdim) if keepdim else (dim,)
        return torchs(x, *rest, **dtype)

    rule |= {"call": of_all} if casts else {}
    rename = {"axes": "dim", "axis": "dim"}
    return from_table(op, called, home=torch, rename=rename, casts=casts, run=run, **rule)


MADE = {
    "sum": _reduction("sum", on_cpu=_sum_is_torchs),
    "mean": _reduction("mean", on_cpu=mean_is_torchs),
    "prod": _reduction("prod", on_cpu=lambda x, *_, **__: x.dtype in WIDE or is_differentiated(x)),
    **{f"a{op}": _reduction(op, f"a{op}", on_cpu=extreme_is_torchs) for op in ("max", "min")},
    **{op: _reduction(op) for op in ("argmax", "argmin")},
}
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


@delegates(
    lambda x, p=2.0, *args, **named: torch.linalg.vector_norm(x, p, *args, **named), autocast=True
)
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
    x = x if dtype is None else x.to(dtype)
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise BindError(f"norm of {kind} is not defined", asked="norm(…)", remedy="x.float()")
    if not isinstance(p, int | float):
        raise BindError(
            f"p={p!r} is not a number", asked=f"norm(…, p={p!r})", remedy="Frobenius' is p=2.0"
        )
    found = NORM.one(x, p=float(p), axes=_axes(dim), keepdim=keepdim)
    return found if dtype is None else found.to(dtype)


@delegates(lambda condition, x, y: torch.where(condition, x, y), autocast=True)
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


_says = "Laid out in that order, not a view as ``torch.permute`` gives."
_rule: Any = {"call": torch.permute_copy, "on_cpu": ANY, "autocast": True}
MADE["permute"] = from_table("permute", run=Function("permute", _permute), see=_says, **_rule)
