"""Tables that are looked up: learned and sinusoidal embeddings."""

from __future__ import annotations

from typing import Any

import torch

from deuteron.errors import BindError
from deuteron.functional.core import Function
from deuteron.functional.library import ANY, LIMITS, delegates, several_calls_win
from deuteron.functional.wrapper import Plain
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor
SMALL = "weight.nbytes * index.numel() <= LEAST"  # no result is larger, and no shape need be read


def _embedding(b: Ops, index: Sym, weight: Sym, position: Sym | None, *, padding_idx: int) -> Sym:
    y = b.one("embedding", weight, index, padding_idx=padding_idx)
    return y if position is None else y + position


EMBEDDING = Function("embedding", _embedding)


def _torch_embedding(
    index: Tensor, weight: Tensor, padding_idx: int | None, position: Tensor | None
) -> Any:
    if not _is_small(weight, index) and (weight.is_cuda or position is not None):
        return NotImplemented
    pad = () if padding_idx is None else (_row(padding_idx, weight),)
    if position is None:
        return torch.embedding(weight, index, *pad)
    if not several_calls_win(weight, position):
        return NotImplemented
    return torch.embedding(weight, index, *pad) + position


def _row(padding_idx: int, weight: Tensor) -> int:
    """The row that ``padding_idx`` names, counted from 0."""
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        raise BindError(
            f"padding_idx={padding_idx} is not one of {rows} rows",
            asked=f"embedding(…, padding_idx={padding_idx})",
            remedy=f"use {-rows} to {rows - 1}, or None",
        )
    return padding_idx % rows


def _is_small(weight: Tensor, index: Tensor) -> bool:
    """Whether the gradient, of the size of the table, and the result are."""
    table, rows = weight.nbytes, index.numel()
    if table * rows <= LIMITS.least:  # no result is larger, and no shape need be read
        return True
    limit = LIMITS[index.get_device()]
    return table <= limit and rows * (table // max(weight.shape[0], 1)) <= limit


@delegates(
    _torch_embedding,
    plain=(
        Plain(torch.embedding, "plain(weight, index)", SMALL),
        Plain(
            torch.embedding,
            "plain(weight, index) + position",
            where=f"position is not None and {SMALL}",
            learns=("weight", "position"),
        ),
    ),
    single="position is None",
    keeps_type=True,
    on_cpu=ANY,
)
def embedding(
    index: Tensor, weight: Tensor, padding_idx: int | None = None, *, position: Tensor | None = None
) -> Tensor:
    """Rows of ``weight``, as ``torch.nn.functional.embedding``; the gradient is deterministic.

    ``position``, which must broadcast with the result, is added in the same pass: a learned or
    sinusoidal table.
    """
    pad = -1 if padding_idx is None else _row(padding_idx, weight)
    return EMBEDDING.one(index, weight, position, padding_idx=pad)


def sinusoidal(
    length: int,
    dim: int,
    base: float = 10000.0,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table [length, dim] of sin and cos of positions over wavelengths up to 2π·base, sines in
    the even columns. Computed in float64: exact to the last bit at any position."""
    place = torch.arange(offset, offset + length, dtype=torch.float64, device=device)
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = place[:, None] * rate
    both = torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)[:, :dim]
    return both.to(dtype)
