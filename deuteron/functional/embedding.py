"""Embeddings: rows of a learned table, and a sinusoidal table of positions."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, delegates, is_small, may_delegate, recorded
from deuteron.functional.operators import schema
from deuteron.kinds import checked
from deuteron.ops import Ops, Sym, table


def _embedding(b: Ops, index: Sym, weight: Sym, position: Sym | None, **how: Any) -> Sym:
    y = b.one("embedding", weight, index, **how)
    return y if position is None else y + position


TENSORS = {"index": "Sym", "weight": "Sym", "position": "Sym | None"}
EMBEDDING = Function("embedding", _embedding, (TENSORS, schema(table.get("embedding"))[1]))


def _torch_embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    position: Tensor | None = None,
) -> Any:
    """torch's call. On a GPU, and with a position, it answers only where table and result are
    small. What torch alone does (``max_norm``, ``sparse``) is left to ``embedding``, which tells
    ``explain``."""
    if max_norm is not None or sparse:
        return NotImplemented
    if weight.is_cuda or position is not None:
        row = weight.nbytes // max(weight.shape[0], 1)  # the gradient has the size of the table
        small = is_small(index, weight.nbytes) and is_small(index, index.numel() * row)
        if scale_grad_by_freq or not small:
            return NotImplemented
    y = F.embedding(index, weight, padding_idx, scale_grad_by_freq=scale_grad_by_freq)
    return y if position is None else y + position


def _may_be_torchs(name: str, value: Any) -> None:
    """Refuse an argument that only torch's own call supports if calls may not go to torch."""
    if not may_delegate():
        wrong = f"no plan of ours does {name}, and calls may not be handed on to torch's"
        asked = f"embedding(…, {name}={value}) within delegation(False)"
        remedy = f"leave {name} out, or allow it with dt.functional.delegation(True)"
        raise BindError(wrong, asked=asked, remedy=remedy)


def _row(padding_idx: int, weight: Tensor) -> int:
    """Return the row that ``padding_idx`` names, counted from 0."""
    rows = weight.shape[0]
    if not -rows <= padding_idx < rows:
        wrong = f"padding_idx={padding_idx} is not one of {rows} rows"
        asked = f"embedding(…, padding_idx={padding_idx})"
        raise BindError(wrong, asked=asked, remedy=f"use {-rows} to {rows - 1}, or None")
    return padding_idx % rows


@delegates(
    _torch_embedding,
    several=lambda *_, position=None, **__: int(position is not None),
    on_cpu=ANY,
    autocast=True,
)
def embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    position: Tensor | None = None,
) -> Tensor:
    """Return the rows of ``weight`` that ``index`` names, plus ``position``; the gradient is
    deterministic.

    index        whole numbers, of any shape
    weight       [rows, features]: the result has the shape of index, followed by features
    position     added in the same pass: a learned or sinusoidal table that broadcasts with the
                 result
    padding_idx  a row that gets no gradient
    max_norm     rows that are looked up and whose ``norm_type``-norm is larger are shortened to it
                 first, in ``weight`` itself, by ``torch.embedding_renorm_``
    scale_grad_by_freq
                 divide the gradient of a row by how often ``index`` names it
    sparse       ask for a sparse gradient of ``weight``, which torch's own call gives

    All but ``position`` are those of ``torch.nn.functional.embedding``.
    """
    if max_norm is not None:
        index = index.contiguous()
        _may_be_torchs("max_norm", max_norm)
        torch.embedding_renorm_(weight.detach(), index, max_norm, norm_type)
        recorded(None, "embedding_renorm_", weight, "max_norm writes to weight")
        rest = None, 2.0, scale_grad_by_freq, sparse
        return embedding(index, weight, padding_idx, *rest, position=position)
    row = None if padding_idx is None else _row(padding_idx, weight)
    if sparse:
        _may_be_torchs("sparse", True)
        y = F.embedding(index, weight, row, None, 2.0, scale_grad_by_freq, True)
        found = y if position is None else y + position
        return recorded(found, "embedding", weight, "its gradient is sparse")
    pad, by_frequency = -1 if row is None else row, bool(scale_grad_by_freq)
    return EMBEDDING.one(index, weight, position, padding_idx=pad, scale_grad_by_freq=by_frequency)


@checked()
def sinusoidal(
    length: int,
    dim: int,
    base: float = 10000.0,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return the table [length, dim] of sines and cosines of positions, the first of which is
    ``offset``.

    table[s, 2i] = sin((offset + s) · base^(−2i / dim)), and the cosine of the same angle in column
    2i + 1

    Wavelengths go up to 2π·base. All is computed in float64, so it is exact to the last bit at any
    position, and then cast to ``dtype``; ``device``: where the table is to be.

    >>> x = x + dt.functional.sinusoidal(x.shape[1], x.shape[2])
    """
    if length < 0 or dim < 1 or not 0.0 < base < math.inf:
        wrong = f"there is no table of {length} positions, {dim} features and the base {base}"
        asked = f"sinusoidal({length}, {dim}, {base})"
        raise BindError(wrong, asked=asked, remedy="use length >= 0, dim >= 1 and base > 0")
    place = torch.arange(offset, offset + length, dtype=torch.float64, device=device)
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = place[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)[:, :dim].to(dtype)
