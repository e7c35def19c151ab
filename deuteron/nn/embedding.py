"""Embeddings: learned, as ``torch.nn.Embedding``, sinusoidal, and rotary."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.kinds import checked
from deuteron.nn.stand_in import as_leaf


class Embedding(nn.Embedding):
    """``torch.nn.Embedding`` with a deterministic gradient; a call can add a table of positions in
    the same pass.

    >>> tokens = dt.nn.Embedding(50257, 768, padding_idx=0)
    >>> x = tokens(index, position=places.weight[: index.shape[1]])

    Arguments and state dict are torch's. ``max_norm`` shortens rows of ``weight`` in place as they
    are looked up; ``sparse`` gives a sparse gradient, by torch's own call.
    """

    _runs = staticmethod(F.embedding)

    def forward(self, input: Tensor, position: Tensor | None = None) -> Tensor:
        how = self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
        return F.embedding(input, self.weight, *how, position=position)


class SinusoidalEmbedding(nn.Module):
    """Adds the sines and cosines of positions to x [batch, length, dim]; nothing is learned or
    saved.

    dim         the features of x
    max_length  how many positions there are; a call that goes beyond them is refused
    base        wavelengths go up to 2π·base
    offset      of a call: the position of the first token of x

    >>> x = dt.nn.SinusoidalEmbedding(512)(tokens(index))
    """

    table: Tensor

    @checked(name="SinusoidalEmbedding")
    def __init__(self, dim: int, max_length: int = 4096, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("table", F.sinusoidal(max_length, dim, base), persistent=False)

    def forward(self, x: Tensor, offset: int = 0) -> Any:
        if (leaf := as_leaf(self, x, offset)) is not None:
            return leaf
        length = x.shape[-2]
        if offset < 0 or offset + length > self.table.shape[0]:
            wrong = f"positions {offset} to {offset + length} are beyond {self.table.shape[0]}"
            raise BindError(wrong, remedy="make the module with a larger max_length")
        return x + self.table[offset : offset + length].to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Applies rotary positions to q and k [B, S, H, D] in one launch; nothing is learned or saved.

    dim         how many features of each head are rotated, the first ones
    max_length  how many positions there are
    base, interleaved, seq_dim, and of a call positions, offset
                those of :func:`rope`

    >>> rotary = dt.nn.RotaryEmbedding(128)
    >>> q, k = rotary(q, k, offset=cache_length)
    """

    cos: Tensor
    sin: Tensor

    @checked(name="RotaryEmbedding")
    def __init__(
        self,
        dim: int,
        max_length: int = 4096,
        base: float = 10000.0,
        interleaved: bool = False,
        seq_dim: int = 1,
    ) -> None:
        super().__init__()
        if dim % 2:
            wrong, remedy = f"{dim} features are no pairs", f"use dim={dim - 1} or {dim + 1}"
            raise BindError(wrong, asked=f"RotaryEmbedding({dim})", remedy=remedy)
        rate = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(max_length, dtype=torch.float64)[:, None] * rate
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)
        self.interleaved, self.seq_dim = interleaved, seq_dim

    def forward(
        self, q: Tensor, k: Tensor | None = None, positions: Tensor | None = None, offset: int = 0
    ) -> Any:
        own: Any = {"seq_dim": self.seq_dim, "interleaved": self.interleaved}
        own |= {"dims": 2 * self.cos.shape[1], "positions": positions, "offset": offset}
        return F.rope(q, k, self.cos, self.sin, **own)
