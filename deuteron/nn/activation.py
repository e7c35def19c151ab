"""Softmax, dropout and gates: where a module takes more than torch's, or torch has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.kinds import checked
from deuteron.nn.authors import authors


def _normalised(module: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """What a softmax makes of its input: by ours with a ``mask``, else by whoever is quicker."""
    theirs: Any = authors(module, module._runs, input) if mask is None else None
    found: Tensor
    if theirs is not None:
        found = theirs.forward(module, input)
    else:
        found = module._runs(input, module.dim, mask=mask)
    return found


class Softmax(nn.Softmax):
    """eˣ over its sum along ``dim``, as ``torch.nn.Softmax``; ``mask`` as in :func:`softmax`."""

    _runs = staticmethod(F.softmax)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return _normalised(self, input, mask)


class LogSoftmax(nn.LogSoftmax):
    """The logarithm of softmax along ``dim``, as ``torch.nn.LogSoftmax``; ``mask`` as in
    :func:`softmax`."""

    _runs = staticmethod(F.log_softmax)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return _normalised(self, input, mask)


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` whose mask is computed again in the backward pass, not stored; the same
    mask for the same ``seed``."""

    _runs = staticmethod(F.dropout)

    def forward(self, input: Tensor, seed: int | Tensor | None = None) -> Tensor:
        if self.inplace or not self.training or self.p == 0.0:
            return super().forward(input)
        return F.dropout(input, self.p) if seed is None else F.dropout(input, self.p, seed=seed)


# ---- what torch.nn does not have


class SwiGLU(nn.Module):
    """silu(gate) · up, of two tensors or of the halves of one along the last dimension.

    >>> y = dt.nn.SwiGLU()(gate_proj(x), up_proj(x))
    """

    gated = staticmethod(F.swiglu)

    def __init__(self) -> None:
        super().__init__()

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return self.gated(gate, up)


class ReGLU(SwiGLU):
    """relu(gate) · up, of two tensors or of the halves of one along the last dimension.

    >>> y = dt.nn.ReGLU()(gate_proj(x), up_proj(x))
    """

    gated = staticmethod(F.reglu)


class GeGLU(nn.Module):
    """gelu(gate) · up, of two tensors or of the halves of one along the last dimension.
    ``approximate="tanh"`` takes that of gelu.

    >>> y = dt.nn.GeGLU()(gate_proj(x), up_proj(x))
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.geglu(gate, up, self.approximate)


class BiasAct(nn.Module):
    """activation(x + bias) with a learned bias [features] along the last dimension of ``input``,
    zeros at first, made on ``device`` in ``dtype``.

    >>> layer = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), dt.nn.BiasAct(256))
    """

    @checked(name="BiasAct")
    def __init__(
        self,
        features: int,
        activation: str = "gelu",
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))
        self.activation = activation

    def forward(self, input: Tensor) -> Tensor:
        return F.bias_act(input, self.bias, self.activation)
