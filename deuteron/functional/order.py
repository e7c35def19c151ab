"""Scans, sorting and counting. Sorting and top-k go to the library's call, which is the best there
is; the plan says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, return_types

from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, delegates
from deuteron.functional.operators import named, operator
from deuteron.functional.reduce import cast

Pair = Any  # torch.return_types: (values, indices), by name too


def _along(run: Function, x: Tensor, dim: int, **attrs: Any) -> Any:
    """The operator along ``dim``; of a scalar, which torch takes for a row, as the row it is."""
    if x.ndim:
        return run(x, axis=dim, **attrs)
    found = run(x.unsqueeze(0), axis=dim, **attrs)
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


def _is_one_long_row(x: Tensor, *_: Any, **__: Any) -> bool:
    """On a GPU torch adds those up in another order at every run."""
    return x.is_cuda and x.ndim == 1


def _scan(name: str, what: str) -> Callable[..., Tensor]:
    run = operator(name)

    def function(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
        return cast(_along(run, cast(x, dtype), dim), dtype)

    doc = (
        f"The {what} of all elements up to each one, along ``dim``; the same bits in every run.\n"
        f"``dtype``: x is cast to it first. As ``torch.{name}``."
    )
    handed = delegates(getattr(torch, name), unless=_is_one_long_row, on_cpu=ANY, autocast=True)
    return handed(named(function, name, doc))


def _extreme_so_far(name: str, what: str) -> Callable[..., Pair]:
    run, torchs = operator(name), getattr(torch, name)

    def function(x: Tensor, dim: int) -> Pair:
        return getattr(return_types, name)(_along(run, x, dim))

    doc = f"The {what} element so far along ``dim``, and where it stands. As ``torch.{name}``."
    return delegates(torchs, on_cpu=ANY, autocast=True)(named(function, name, doc))


cumsum, cumprod = _scan("cumsum", "sum"), _scan("cumprod", "product")
cummax, cummin = _extreme_so_far("cummax", "largest"), _extreme_so_far("cummin", "smallest")
SORT, TOPK, HISTOGRAM = operator("sort"), operator("topk"), operator("histogram")


def _torch_sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Pair:
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


@delegates(_torch_sort, on_cpu=ANY, autocast=True)
def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Pair:
    """x in order along ``dim``, the largest first if ``descending``, and the places the elements
    came from. As ``torch.sort``; equal elements keep their order unless ``stable`` is False."""
    return return_types.sort(_along(SORT, x, dim, descending=descending, stable=stable))


@delegates(torch.topk, on_cpu=ANY, autocast=True)
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """The ``k`` largest (or smallest) elements along ``dim``, best first (whether ``sorted`` or
    not), and their places. As ``torch.topk``."""
    return return_types.topk(_along(TOPK, x, dim, k=k, largest=largest))


def _torch_histogram(
    x: Tensor, bins: int, low: float, high: float, *, weight: Tensor | None = None
) -> Any:
    """torch's count, which is of the type of x. Casting it is one launch more; ours is one in
    all."""
    wide = x.dtype in (torch.float32, torch.float64)
    if x.is_cuda or not wide or weight is not None or not low < high:
        return NotImplemented
    return torch.histc(x, bins, low, high).long()


@delegates(_torch_histogram, autocast=True)
def histogram(
    x: Tensor, bins: int, low: float, high: float, *, weight: Tensor | None = None
) -> Tensor:
    """How many elements of x lie in each of ``bins`` equal parts of ``low`` to ``high``, or the sum
    of their ``weight``; the last part includes high, what lies outside is left out.

    >>> counts = dt.functional.histogram(x, 64, -3.0, 3.0)
    """
    return HISTOGRAM.one(x, weight, bins=bins, low=float(low), high=float(high))
