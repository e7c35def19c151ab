"""Scans, sorting and counting. Sorting and top-k go to the library's call, which is the best there
is; the plan says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import return_types

from deuteron.functional.library import ANY, delegates
from deuteron.functional.operators import OPERATORS, call
from deuteron.functional.reduce import cast
from deuteron.functional.wrapper import Plain

Tensor = torch.Tensor
Pair = Any  # torch.return_types: (values, indices), by name too
OF_ROWS = "plain(x, dim)", "x.ndim > 1"


def _torch_scan(call: Callable[..., Tensor]) -> Callable[..., Any]:
    """torch's scan of rows; that of one long row on a GPU adds in another order at every run."""

    def run(x: Tensor, dim: int, dtype: torch.dtype | None) -> Any:
        if x.ndim == 1 and x.is_cuda:
            return NotImplemented
        return call(x, dim) if dtype is None else call(x, dim, dtype=dtype)

    return run


def _torch_sort(x: Tensor, dim: int, descending: bool, stable: bool) -> Pair:
    if dim == -1 and not descending:
        return torch.sort(x, stable=stable)
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


def _along(name: str, x: Tensor, dim: int, **attrs: Any) -> Any:
    """The operator along ``dim``; of a scalar, which torch takes for a row, as the row it is."""
    if x.ndim:
        return call(name, x, axis=dim, **attrs)
    found = call(name, x.unsqueeze(0), axis=dim, **attrs)
    return tuple(t.squeeze(0) for t in found) if isinstance(found, tuple) else found.squeeze(0)


@delegates(
    _torch_scan(torch.cumsum), plain=Plain(torch.cumsum, *OF_ROWS), keeps_type=True, on_cpu=ANY
)
def cumsum(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum of all elements up to each one, along ``dim``; the same bits in every run. ``dtype``:
    x is cast to it first. As ``torch.cumsum``."""
    return cast(_along("cumsum", cast(x, dtype), dim), dtype)


@delegates(
    _torch_scan(torch.cumprod), plain=Plain(torch.cumprod, *OF_ROWS), keeps_type=True, on_cpu=ANY
)
def cumprod(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The product of all elements up to each one, along ``dim``. ``dtype``: x is cast to it first.
    As ``torch.cumprod``."""
    return cast(_along("cumprod", cast(x, dtype), dim), dtype)


@delegates(torch.cummax, keeps_type=True, on_cpu=ANY)
def cummax(x: Tensor, dim: int) -> Pair:
    """The largest element so far along ``dim``, and where it stands. As ``torch.cummax``."""
    return return_types.cummax(_along("cummax", x, dim))


@delegates(torch.cummin, keeps_type=True, on_cpu=ANY)
def cummin(x: Tensor, dim: int) -> Pair:
    """The smallest element so far along ``dim``, and where it stands. As ``torch.cummin``."""
    return return_types.cummin(_along("cummin", x, dim))


@delegates(_torch_sort, keeps_type=True, on_cpu=ANY)
def sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Pair:
    """x in order along ``dim``, the largest first if ``descending``, and the places the elements
    came from. As ``torch.sort``; equal elements keep their order unless ``stable`` is False."""
    return return_types.sort(_along("sort", x, dim, descending=descending, stable=stable))


@delegates(torch.topk, keeps_type=True, on_cpu=ANY)
def topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Pair:
    """The ``k`` largest (or smallest) elements along ``dim``, best first (whether ``sorted`` or
    not), and their places. As ``torch.topk``."""
    return return_types.topk(_along("topk", x, dim, k=k, largest=largest))


def _torch_histogram(x: Tensor, bins: int, low: float, high: float) -> Any:
    """torch's count, which is of the type of x. Casting it is one launch more; ours is one in
    all."""
    if x.is_cuda or x.dtype not in COUNTED or not low < high:
        return NotImplemented
    return torch.histc(x, bins, low, high).long()


COUNTED = {torch.float32, torch.float64}


@delegates(_torch_histogram, without=("weight",), keeps_type=True)
def histogram(
    x: Tensor, bins: int, low: float, high: float, *, weight: Tensor | None = None
) -> Tensor:
    """How many elements of x lie in each of ``bins`` equal parts of ``low`` to ``high``, or the sum
    of their ``weight``; the last part includes high, what lies outside is left out.

    >>> counts = dt.functional.histogram(x, 64, -3.0, 3.0)
    """
    return OPERATORS["histogram"].one(x, weight, bins=bins, low=float(low), high=float(high))
