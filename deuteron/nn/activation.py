"""Softmax, dropout and gates: modules that take more than torch's, or that torch does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.kinds import checked
from deuteron.nn.authors import authors


def _normalised(module: Any, input: Tensor, mask: Tensor | None) -> Tensor:
    """Run a softmax module: by our function with a ``mask``, else by whichever of ours and torch's
    is quicker."""
    theirs: Any = authors(module, module._runs, input) if mask is None else None
    found: Tensor
    if theirs is not None:
        found = theirs.forward(module, input)
    else:
        found = module._runs(input, module.dim, mask=mask)
    return found


class Softmax(nn.Softmax):
    """``torch.nn.Softmax``, eˣ divided by its sum along ``dim``; a call also takes a ``mask``, as
    in :func:`softmax`."""

    _runs = staticmethod(F.softmax)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return _normalised(self, input, mask)


class LogSoftmax(nn.LogSoftmax):
    """``torch.nn.LogSoftmax``, the logarithm of softmax along ``dim``; a call also takes a
    ``mask``, as in :func:`softmax`."""

    _runs = staticmethod(F.log_softmax)

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return _normalised(self, input, mask)


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` whose mask is not stored but computed again in the backward pass. A call
    also takes a ``seed``: the same seed gives the same mask."""

    _runs = staticmethod(F.dropout)

    def forward(self, input: Tensor, seed: int | Tensor | None = None) -> Tensor:
        if self.inplace or not self.training or self.p == 0.0:
            return super().forward(input)
        return F.dropout(input, self.p) if seed is None else F.dropout(input, self.p, seed=seed)


# ---- what torch.nn does not have


class SwiGLU(nn.Module):
    """silu(gate) · up, called with two tensors, or with one whose halves along the last dimension
    are gate and up.

    >>> y = dt.nn.SwiGLU()(gate_proj(x), up_proj(x))
    """

    gated = staticmethod(F.swiglu)

    def __init__(self) -> None:
        super().__init__()

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return self.gated(gate, up)


class ReGLU(SwiGLU):
    """relu(gate) · up, called with two tensors, or with one whose halves along the last dimension
    are gate and up.

    >>> y = dt.nn.ReGLU()(gate_proj(x), up_proj(x))
    """

    gated = staticmethod(F.reglu)


class GeGLU(nn.Module):
    """gelu(gate) · up, called with two tensors, or with one whose halves along the last dimension
    are gate and up. ``approximate="tanh"`` takes gelu's approximation by tanh.

    >>> y = dt.nn.GeGLU()(gate_proj(x), up_proj(x))
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.geglu(gate, up, self.approximate)


class BiasAct(nn.Module):
    """activation(input + bias) with a learned bias along the last dimension of ``input``.

    features       the length of that dimension; the bias starts as zeros
    activation     as for :func:`bias_act`
    device, dtype  of the bias

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
