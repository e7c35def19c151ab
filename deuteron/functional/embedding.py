"""Tables that are looked up: learned and sinusoidal embeddings."""

from __future__ import annotations

from typing import Any

import torch

from deuteron.errors import BindError
from deuteron.functional.core import Function
from deuteron.functional.library import (
    ANY,
    LIMITS,
    Heard,
    delegates,
    delegation,
    heard,
    several_calls_win,
)
from deuteron.functional.wrapper import Plain
from deuteron.ops import Ops, Sym

Tensor = torch.Tensor
SMALL = "weight.nbytes * index.numel() <= LEAST"  # no result is larger, and no shape need be read


def _embedding(
    b: Ops,
    index: Sym,
    weight: Sym,
    position: Sym | None,
    *,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> Sym:
    y = b.one(
        "embedding", weight, index, padding_idx=padding_idx, scale_grad_by_freq=scale_grad_by_freq
    )
    return y if position is None else y + position


EMBEDDING = Function("embedding", _embedding)


def _torch_embedding(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    position: Tensor | None,
) -> Any:
    ours = weight.is_cuda or position is not None
    if ours and (scale_grad_by_freq or not _is_small(weight, index)):
        return NotImplemented
    if position is not None and not several_calls_win(weight, position):
        return NotImplemented
    return _looked_up(index, weight, padding_idx, scale_grad_by_freq, False, position)


def _looked_up(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    sparse: bool,
    position: Tensor | None,
) -> Tensor:
    """By torch's call, without arguments that have their defaults: it is quicker."""
    more: tuple[Any, ...] = () if padding_idx is None else (_row(padding_idx, weight),)
    if scale_grad_by_freq or sparse:
        more = (*(more or (-1,)), scale_grad_by_freq, sparse)
    y = torch.embedding(weight, index, *more)
    return y if position is None else y + position


def _shorten(index: Tensor, weight: Tensor, max_norm: float, norm_type: float) -> None:
    """Rows that ``index`` names and that are longer than ``max_norm`` get that length, in place."""
    _may_be_torchs("max_norm", max_norm)
    torch.embedding_renorm_(weight.detach(), index, max_norm, norm_type)
    if Heard.listeners:
        heard(None, "embedding_renorm_", weight, "max_norm writes to weight")


def _may_be_torchs(name: str, value: Any) -> None:
    """What an argument asks for only torch's call does: it must not be forbidden."""
    if not delegation.allowed:
        raise BindError(
            f"no plan of ours does {name}, and calls may not be handed on to torch's",
            asked=f"embedding(…, {name}={value}) within delegation(False)",
            remedy=f"leave {name} out, or allow it with dt.functional.delegation(True)",
        )


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
            "plain(weight, index, padding_idx)",
            where=f"padding_idx.__class__ is int and -1 < padding_idx < weight.size(0) and {SMALL}",
        ),
        Plain(
            torch.embedding,
            "plain(weight, index) + position",
            where=f"position is not None and {SMALL}",
            learns=("weight", "position"),
        ),
    ),
    without=("max_norm", "norm_type", "sparse"),
    single="position is None",
    keeps_type=True,
    on_cpu=ANY,
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
    """Rows of ``weight``, as ``torch.nn.functional.embedding``; the gradient is deterministic.

    ``position``, which must broadcast with the result, is added in the same pass: a learned or
    sinusoidal table.

    As torch's: the row ``padding_idx`` gets no gradient. With ``max_norm`` rows that are looked up
    and whose ``norm_type``-norm is larger are shortened to it first, in ``weight`` itself, by
    ``torch.embedding_renorm_``. ``scale_grad_by_freq`` divides the gradient of a row by how often
    ``index`` names it. ``sparse`` asks for a sparse gradient of ``weight``, which torch's own call
    gives.
    """
    if max_norm is not None:
        index = index.contiguous()
        _shorten(index, weight, max_norm, norm_type)
        return embedding(
            index,
            weight,
            padding_idx,
            scale_grad_by_freq=scale_grad_by_freq,
            sparse=sparse,
            position=position,
        )
    if sparse:
        return _with_sparse_gradient(index, weight, padding_idx, scale_grad_by_freq, position)
    pad = -1 if padding_idx is None else _row(padding_idx, weight)
    return EMBEDDING.one(
        index, weight, position, padding_idx=pad, scale_grad_by_freq=bool(scale_grad_by_freq)
    )


def _with_sparse_gradient(
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    scale_grad_by_freq: bool,
    position: Tensor | None,
) -> Tensor:
    _may_be_torchs("sparse", True)
    found = _looked_up(index, weight, padding_idx, scale_grad_by_freq, True, position)
    return heard(found, "embedding", weight, "its gradient is sparse") if Heard.listeners else found


def sinusoidal(
    length: int,
    dim: int,
    base: float = 10000.0,
    *,
    offset: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> Tensor:
    """The table [length, dim] of sin and cos of positions ``offset``, ``offset`` + 1, … over
    wavelengths up to 2π·base, sines in the even columns. Computed in float64, so exact to the last
    bit at any position, then cast to ``dtype``; ``device``: where it is to be.

    >>> x = x + dt.functional.sinusoidal(x.shape[1], x.shape[2])
    """
    place = torch.arange(offset, offset + length, dtype=torch.float64, device=device)
    rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = place[:, None] * rate
    both = torch.stack((angle.sin(), angle.cos()), dim=2).flatten(1)[:, :dim]
    return both.to(dtype)
