"""Activations, gates, softmax and dropout: those of ``torch.nn``, fused and with our gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F


class _Bare:
    """A module that takes no arguments, and says so."""

    def __init__(self) -> None:
        super().__init__()


class ReLU(nn.ReLU):
    """max(x, 0), as ``torch.nn.ReLU``. With ``inplace`` the result is written over the input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.relu(input)


class ReLU6(nn.ReLU6):
    """x held between 0 and 6, as ``torch.nn.ReLU6``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.relu6(input)


class LeakyReLU(nn.LeakyReLU):
    """x, times ``negative_slope`` below 0, as ``torch.nn.LeakyReLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.leaky_relu(input, self.negative_slope)


class PReLU(nn.PReLU):
    """x, times a learned slope below 0, as ``torch.nn.PReLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.prelu(input, self.weight)


class ELU(nn.ELU):
    """x, or alpha · (eˣ − 1) below 0, as ``torch.nn.ELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.elu(input, self.alpha)


class CELU(nn.CELU):
    """x, or alpha · (e^(x/alpha) − 1) below 0, as ``torch.nn.CELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.celu(input, self.alpha)


class SELU(nn.SELU):
    """elu with the two constants of self-normalising networks, as ``torch.nn.SELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.selu(input)


class GELU(nn.GELU):
    """x · Φ(x), with Φ the normal distribution, as ``torch.nn.GELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate)


class SiLU(nn.SiLU):
    """x · sigmoid(x), as ``torch.nn.SiLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.silu(input)


class Mish(nn.Mish):
    """x · tanh(softplus(x)), as ``torch.nn.Mish``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.mish(input)


class Sigmoid(_Bare, nn.Sigmoid):
    """1 / (1 + e⁻ˣ), as ``torch.nn.Sigmoid``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.sigmoid(input)


class Tanh(_Bare, nn.Tanh):
    """tanh x, as ``torch.nn.Tanh``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.tanh(input)


class Hardswish(nn.Hardswish):
    """x · hardsigmoid(x), as ``torch.nn.Hardswish``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.hardswish(input)


class Hardsigmoid(nn.Hardsigmoid):
    """x/6 + 1/2 held between 0 and 1, as ``torch.nn.Hardsigmoid``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.hardsigmoid(input)


class Hardtanh(nn.Hardtanh):
    """x held between ``min_val`` and ``max_val``, as ``torch.nn.Hardtanh``."""

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace:
            return super().forward(input)
        return F.hardtanh(input, self.min_val, self.max_val)


class Softplus(nn.Softplus):
    """ln(1 + e^(beta·x)) / beta, as ``torch.nn.Softplus``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(input, self.beta, self.threshold)


class Softsign(_Bare, nn.Softsign):
    """x / (1 + |x|), as ``torch.nn.Softsign``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softsign(input)


class Softshrink(nn.Softshrink):
    """x moved towards 0 by ``lambd``, and 0 within it, as ``torch.nn.Softshrink``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softshrink(input, self.lambd)


class Hardshrink(nn.Hardshrink):
    """x, but 0 where |x| ≤ ``lambd``, as ``torch.nn.Hardshrink``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardshrink(input, self.lambd)


class Tanhshrink(_Bare, nn.Tanhshrink):
    """x − tanh x, as ``torch.nn.Tanhshrink``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.tanhshrink(input)


class Threshold(nn.Threshold):
    """x, but ``value`` where x ≤ ``threshold``, as ``torch.nn.Threshold``."""

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace:
            return super().forward(input)
        return F.threshold(input, self.threshold, self.value)


class LogSigmoid(_Bare, nn.LogSigmoid):
    """ln sigmoid(x), as ``torch.nn.LogSigmoid``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.log_sigmoid(input)


class GLU(nn.GLU):
    """a · sigmoid(b), with a and b the halves of x along ``dim``, as ``torch.nn.GLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.glu(input, self.dim)


class Softmax(nn.Softmax):
    """eˣ over its sum along ``dim``, as ``torch.nn.Softmax``; ``mask`` as in :func:`softmax`."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return F.softmax(input, self.dim)
        return F.softmax(input, self.dim, mask=mask)


class LogSoftmax(nn.LogSoftmax):
    """The logarithm of softmax along ``dim``, as ``torch.nn.LogSoftmax``; ``mask`` as in
    :func:`softmax`."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return F.log_softmax(input, self.dim)
        return F.log_softmax(input, self.dim, mask=mask)


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` whose mask is computed again in the backward pass, not stored; the same
    mask for the same ``seed``."""

    def forward(self, input: Tensor, seed: int | Tensor | None = None) -> Tensor:
        if self.inplace or not self.training or self.p == 0.0:
            return super().forward(input)
        return F.dropout(input, self.p, seed=seed)


# ---- what torch.nn does not have


class SwiGLU(_Bare, nn.Module):
    """silu(gate) · up, of two tensors or of the halves of one along the last dimension.

    >>> y = dt.nn.SwiGLU()(gate_proj(x), up_proj(x))
    """

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.swiglu(gate, up)


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


class ReGLU(_Bare, nn.Module):
    """relu(gate) · up, of two tensors or of the halves of one along the last dimension.

    >>> y = dt.nn.ReGLU()(gate_proj(x), up_proj(x))
    """

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.reglu(gate, up)


class BiasAct(nn.Module):
    """activation(x + bias) with a learned bias [features] along the last dimension of ``input``,
    zeros at first, made on ``device`` in ``dtype``.

    >>> layer = torch.nn.Sequential(torch.nn.Linear(64, 256, bias=False), dt.nn.BiasAct(256))
    """

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
