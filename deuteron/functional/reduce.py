"""Reductions over any axes, and scans, sorting and counting along one: deterministic, with sums of
16-bit numbers kept in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor, return_types

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
    """Return ``dim`` as axes: None for all of them, which torch also writes as ()."""
    if dim is None:
        return None
    dims = tuple(dim) if isinstance(dim, Sequence) else (dim,)
    # 1.0 and False would find the plans of 1 and 0; the operator refuses a bool
    return tuple(d if isinstance(d, bool) else index(d) for d in dims) or None


# ---- which large calls are torch's on a CPU
#
# Measured on two Neoverse-N1 cores (delegation in bench/results). Along rows of float32 torch reads
# memory as fast as ours, and its kernel is found sooner. Down columns, in 16 bits and with a
# gradient ours is the quicker one from some size on, because a gradient of ours costs a node in
# Python.

MB = 1 << 20


def _down_columns(x: Tensor, dim: Dims) -> bool:
    """Whether the reduction joins rows that follow each other in memory: the last axis stays."""
    axes, last = _axes(dim), x.ndim - 1
    if axes is None or not x.ndim:
        return False
    return x.is_contiguous() and all(a % x.ndim != last for a in axes)


def _along_rows(x: Tensor, dim: Dims) -> bool:
    """Whether the reduction joins numbers that follow each other in memory."""
    return x.is_contiguous() and not _down_columns(x, dim)


def _sum_is_torchs(x: Tensor, dim: Dims = None, *_: Any, **__: Any) -> bool:
    """Whether torch sums on a CPU. The gradient of its sum is only a view, which our node in Python
    makes no quicker."""
    columns = _down_columns(x, dim)
    if x.dtype not in LOW and (not columns or x.dtype is not torch.float32):
        return True
    with_gradient = 2 * MB if columns else 4 * MB
    return x.nbytes < (with_gradient if is_differentiated(x) else MB)


def mean_is_torchs(x: Tensor, dim: Dims = None, *_: Any, **__: Any) -> bool:
    """Whether torch takes the mean on a CPU, along ``dim``, or along rows where that is None."""
    if is_differentiated(x):
        return x.nbytes <= MB // 2
    return x.dtype in WIDE and x.nbytes < 8 * MB and _along_rows(x, dim)


def extreme_is_torchs(x: Tensor, dim: Dims = None, *_: Any, **__: Any) -> bool:
    """Whether torch finds the largest or smallest value on a CPU, along ``dim``, or along rows."""
    if is_differentiated(x):
        return x.nbytes <= MB // 4
    return x.dtype in WIDE and _along_rows(x, dim)


# ---- the functions


def _reduction(op: str, called: str = "", **rule: Any) -> Callable[..., Tensor]:
    """Return an operator along axes, under torch's name."""
    planned, called = operator(op), called or op
    torchs, casts = getattr(torch, called), op in ("sum", "mean", "prod")

    def run(x: Tensor, **attrs: Any) -> Any:
        if attrs.get("axes") == ():  # which is how torch writes all of them, too
            attrs["axes"] = None
        return planned(x, **attrs)

    def of_all(x: Tensor, dim: Any = None, keepdim: bool = False, **dtype: Any) -> Any:
        """Call torch's function; those that cast have another signature for all axes."""
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
    """Return the variance along ``dim``, as ``torch.var``: the sum of squared distances from the
    mean, divided by the number of elements less ``correction`` (None: 1). The mean is subtracted
    first, so the result is exact where the mean is large. A bool for ``dim`` is torch's older
    ``unbiased``."""
    less = 1 if correction is None else correction
    if isinstance(dim, bool):
        less, dim = int(dim), None
    return VAR.one(x, axes=_axes(dim), correction=less, keepdim=keepdim)


NORM = Cast("norm", vector_norm)


@delegates(lambda x, p=2.0, *a, **how: torch.linalg.vector_norm(x, p, *a, **how), autocast=True)
def norm(
    x: Tensor,
    p: float = 2.0,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return (Σ |x|ᵖ)^(1/p) along ``dim``, as ``torch.linalg.vector_norm``, whose ``ord`` is ``p``
    here: for p = ±inf the largest or smallest |x|, for 0 the number of elements that are not 0.
    ``dtype``: x is cast to it first. Whole numbers are refused."""
    x = x if dtype is None else x.to(dtype)
    if not x.is_floating_point():
        kind = str(x.dtype).removeprefix("torch.")
        raise BindError(f"norm of {kind} is not defined", asked="norm(…)", remedy="x.float()")
    found = NORM.one(x, p=float(p), axes=_axes(dim), keepdim=keepdim)
    return found if dtype is None else found.to(dtype)


@delegates(lambda condition, x, y: torch.where(condition, x, y), autocast=True)
def where(condition: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
    """Return x where ``condition`` holds and y elsewhere, broadcast, as ``torch.where``; x or y may
    be a number."""
    return WHERE.one(condition, _tensor(x, y, condition), _tensor(y, x, condition))


def _tensor(value: Any, other: Any, condition: Tensor) -> Tensor:
    """Return ``value`` as a tensor; a number gets the type that torch gives it beside ``other``."""
    if not isinstance(value, int | float):
        return value  # type: ignore[no-any-return]
    kind = _beside(other.dtype, value) if isinstance(other, Tensor) else None
    return torch.tensor(value, dtype=kind, device=condition.device)


def _beside(dtype: torch.dtype, value: object) -> torch.dtype:
    """Return torch.result_type of a tensor's type and a number, because torch.compile cannot look
    into that: a number widens a type only where it is of a higher kind, a float beside integers or
    an integer beside bools."""
    if isinstance(value, float):
        is_wide = dtype.is_floating_point or dtype.is_complex
        return dtype if is_wide else torch.get_default_dtype()
    return torch.int64 if dtype is torch.bool and not isinstance(value, bool) else dtype


def _permute(b: Ops, x: Sym, *, dims: tuple[int, ...]) -> Sym:
    return b.one("to_layout", b.permute(x, dims=dims), layout="contiguous")


_says = "Laid out in that order, not a view as ``torch.permute`` gives."
_rule: Any = {"call": torch.permute_copy, "on_cpu": ANY, "autocast": True}
MADE["permute"] = from_table("permute", run=Function("permute", _permute), see=_says, **_rule)


# ---- scans, sorting and counting
#
# Sorting and top-k go to the library's call, which is the best there is; the plan says so.

SAYS = {
    "topk": "Best first, whether ``sorted`` or not.",
    "sort": "Equal elements keep their order unless ``stable`` is False.",
    "cumsum": "The same bits in every run.",
}


def _along(name: str, **rule: Any) -> Callable[..., Any]:
    """Return an operator along one axis ``dim``; a pair of results has torch's names."""
    planned, pair = operator(name), getattr(return_types, name, None)

    def run(x: Tensor, **attrs: Any) -> Any:
        attrs.pop("sorted", None)  # our results always are
        if x.ndim:
            found = planned(x, **attrs)
        else:  # a scalar, which torch takes for a row
            of_row = planned(x.unsqueeze(0), **attrs)
            many = isinstance(of_row, tuple)
            found = tuple(t.squeeze(0) for t in of_row) if many else of_row.squeeze(0)
        return found if pair is None else pair(found)

    rule |= {"home": torch, "rename": {"axis": "dim"}, "see": SAYS.get(name, ""), "on_cpu": ANY}
    rule["more"] = {"sorted": True} if name == "topk" else None
    returns = "Tensor" if pair is None else "Any"
    return from_table(name, casts=pair is None, returns=returns, run=run, **rule)


def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


# On a GPU torch adds up a single long row in another order at every run.
_TOTALS: Any = {"unless": lambda x, *_, **__: x.is_cuda and x.ndim == 1}
MADE |= {
    **{name: _along(name, **_TOTALS) for name in ("cumsum", "cumprod")},
    **{name: _along(name) for name in ("cummax", "cummin", "topk")},
    "sort": _along("sort", call=_sort),
}
HISTOGRAM = operator("histogram")


def _torch_histogram(x: Tensor, bins: int, low: float, high: float, weight: Any = None) -> Any:
    """torch's count has the type of x. Casting it takes one launch more; ours takes one in all."""
    wide = x.dtype in (torch.float32, torch.float64)
    if x.is_cuda or not wide or weight is not None or not low < high:
        return NotImplemented
    return torch.histc(x, bins, low, high).long()


@delegates(_torch_histogram, autocast=True)
def histogram(
    x: Tensor, bins: int, low: float, high: float, *, weight: Tensor | None = None
) -> Tensor:
    """Count the elements of x in each of ``bins`` equal parts of the range from ``low`` to
    ``high``, or add up their ``weight``. The last part includes ``high``; elements outside of the
    range are left out.

    >>> counts = dt.functional.histogram(x, 64, -3.0, 3.0)
    """
    return HISTOGRAM.one(x, weight, bins=bins, low=float(low), high=float(high))
