"""Scans, sorting and counting. Sorting and top-k go to the library's call, which is the best there
is; the plan says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, return_types

from deuteron.functional.delegate import ANY, delegates
from deuteron.functional.operators import from_table, operator

SAYS = {
    "topk": "Best first, whether ``sorted`` or not.",
    "sort": "Equal elements keep their order unless ``stable`` is False.",
    "cumsum": "The same bits in every run.",
}


def _along(name: str, **rule: Any) -> Callable[..., Any]:
    """An operator along one axis ``dim``, whose pair of results has torch's names."""
    planned, pair = operator(name), getattr(return_types, name, None)

    def run(x: Tensor, **attrs: Any) -> Any:
        attrs.pop("sorted", None)  # ours always are
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


def _is_one_row(x: Tensor, *_: Any, **__: Any) -> bool:
    """One long row torch adds up in another order at every run, on a GPU."""
    return x.is_cuda and x.ndim == 1


def _sort(x: Tensor, dim: int = -1, descending: bool = False, stable: bool = True) -> Any:
    return torch.sort(x, dim=dim, descending=descending, stable=stable)


MADE = {
    **{name: _along(name, unless=_is_one_row) for name in ("cumsum", "cumprod")},
    **{name: _along(name) for name in ("cummax", "cummin", "topk")},
    "sort": _along("sort", call=_sort),
}
HISTOGRAM = operator("histogram")


def _torch_histogram(x: Tensor, bins: int, low: float, high: float, weight: Any = None) -> Any:
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
