"""Activations, gates, softmax and dropout: those of ``torch.nn``, fused and with our gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F
from deuteron.nn.forward import runs


@runs(F.relu)
class ReLU(nn.ReLU):
    """max(x, 0), as ``torch.nn.ReLU``. With ``inplace`` the result is written over the input."""


@runs(F.relu6)
class ReLU6(nn.ReLU6):
    """x held between 0 and 6, as ``torch.nn.ReLU6``."""


@runs(F.leaky_relu)
class LeakyReLU(nn.LeakyReLU):
    """x, times ``negative_slope`` below 0, as ``torch.nn.LeakyReLU``."""


@runs(F.prelu)
class PReLU(nn.PReLU):
    """x, times a learned slope below 0, as ``torch.nn.PReLU``."""


@runs(F.elu)
class ELU(nn.ELU):
    """x, or alpha · (eˣ − 1) below 0, as ``torch.nn.ELU``."""


@runs(F.celu)
class CELU(nn.CELU):
    """x, or alpha · (e^(x/alpha) − 1) below 0, as ``torch.nn.CELU``."""


@runs(F.selu)
class SELU(nn.SELU):
    """elu with the two constants of self-normalising networks, as ``torch.nn.SELU``."""


@runs(F.gelu)
class GELU(nn.GELU):
    """x · Φ(x), with Φ the normal distribution, as ``torch.nn.GELU``."""


@runs(F.silu)
class SiLU(nn.SiLU):
    """x · sigmoid(x), as ``torch.nn.SiLU``."""


@runs(F.mish)
class Mish(nn.Mish):
    """x · tanh(softplus(x)), as ``torch.nn.Mish``."""


@runs(F.sigmoid)
class Sigmoid(nn.Sigmoid):
    """1 / (1 + e⁻ˣ), as ``torch.nn.Sigmoid``."""


@runs(F.tanh)
class Tanh(nn.Tanh):
    """tanh x, as ``torch.nn.Tanh``."""


@runs(F.hardswish)
class Hardswish(nn.Hardswish):
    """x · hardsigmoid(x), as ``torch.nn.Hardswish``."""


@runs(F.hardsigmoid)
class Hardsigmoid(nn.Hardsigmoid):
    """x/6 + 1/2 held between 0 and 1, as ``torch.nn.Hardsigmoid``."""


@runs(F.hardtanh)
class Hardtanh(nn.Hardtanh):
    """x held between ``min_val`` and ``max_val``, as ``torch.nn.Hardtanh``."""


@runs(F.softplus)
class Softplus(nn.Softplus):
    """ln(1 + e^(beta·x)) / beta, as ``torch.nn.Softplus``."""


@runs(F.softsign)
class Softsign(nn.Softsign):
    """x / (1 + |x|), as ``torch.nn.Softsign``."""


@runs(F.softshrink)
class Softshrink(nn.Softshrink):
    """x moved towards 0 by ``lambd``, and 0 within it, as ``torch.nn.Softshrink``."""


@runs(F.hardshrink)
class Hardshrink(nn.Hardshrink):
    """x, but 0 where |x| ≤ ``lambd``, as ``torch.nn.Hardshrink``."""


@runs(F.tanhshrink)
class Tanhshrink(nn.Tanhshrink):
    """x − tanh x, as ``torch.nn.Tanhshrink``."""


@runs(F.threshold)
class Threshold(nn.Threshold):
    """x, but ``value`` where x ≤ ``threshold``, as ``torch.nn.Threshold``."""


@runs(F.log_sigmoid)
class LogSigmoid(nn.LogSigmoid):
    """ln sigmoid(x), as ``torch.nn.LogSigmoid``."""


@runs(F.glu)
class GLU(nn.GLU):
    """a · sigmoid(b), with a and b the halves of x along ``dim``, as ``torch.nn.GLU``."""


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


class SwiGLU(nn.Module):
    """silu(gate) · up, of two tensors or of the halves of one along the last dimension.

    >>> y = dt.nn.SwiGLU()(gate_proj(x), up_proj(x))
    """

    def __init__(self) -> None:
        super().__init__()

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


class ReGLU(nn.Module):
    """relu(gate) · up, of two tensors or of the halves of one along the last dimension.

    >>> y = dt.nn.ReGLU()(gate_proj(x), up_proj(x))
    """

    def __init__(self) -> None:
        super().__init__()

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
