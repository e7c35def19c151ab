"""Activations, gates, softmax and dropout: those of ``torch.nn``, fused and with our gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deuteron import functional as F


class ReLU(nn.ReLU):
    """``torch.nn.ReLU``. With ``inplace`` the result is written over the input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.relu(input)


class ReLU6(nn.ReLU6):
    """``torch.nn.ReLU6``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.relu6(input)


class LeakyReLU(nn.LeakyReLU):
    """``torch.nn.LeakyReLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.leaky_relu(input, self.negative_slope)


class PReLU(nn.PReLU):
    """``torch.nn.PReLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.prelu(input, self.weight)


class ELU(nn.ELU):
    """``torch.nn.ELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.elu(input, self.alpha)


class CELU(nn.CELU):
    """``torch.nn.CELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.celu(input, self.alpha)


class SELU(nn.SELU):
    """``torch.nn.SELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.selu(input)


class GELU(nn.GELU):
    """``torch.nn.GELU``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate)


class SiLU(nn.SiLU):
    """``torch.nn.SiLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.silu(input)


class Mish(nn.Mish):
    """``torch.nn.Mish``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.mish(input)


class Sigmoid(nn.Sigmoid):
    """``torch.nn.Sigmoid``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.sigmoid(input)


class Tanh(nn.Tanh):
    """``torch.nn.Tanh``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.tanh(input)


class Hardswish(nn.Hardswish):
    """``torch.nn.Hardswish``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.hardswish(input)


class Hardsigmoid(nn.Hardsigmoid):
    """``torch.nn.Hardsigmoid``."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) if self.inplace else F.hardsigmoid(input)


class Hardtanh(nn.Hardtanh):
    """``torch.nn.Hardtanh``."""

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace:
            return super().forward(input)
        return F.hardtanh(input, self.min_val, self.max_val)


class Softplus(nn.Softplus):
    """``torch.nn.Softplus``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(input, self.beta, self.threshold)


class Softsign(nn.Softsign):
    """``torch.nn.Softsign``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softsign(input)


class Softshrink(nn.Softshrink):
    """``torch.nn.Softshrink``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.softshrink(input, self.lambd)


class Hardshrink(nn.Hardshrink):
    """``torch.nn.Hardshrink``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.hardshrink(input, self.lambd)


class Tanhshrink(nn.Tanhshrink):
    """``torch.nn.Tanhshrink``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.tanhshrink(input)


class Threshold(nn.Threshold):
    """``torch.nn.Threshold``."""

    def forward(self, input: Tensor) -> Tensor:
        if self.inplace:
            return super().forward(input)
        return F.threshold(input, self.threshold, self.value)


class LogSigmoid(nn.LogSigmoid):
    """``torch.nn.LogSigmoid``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.log_sigmoid(input)


class GLU(nn.GLU):
    """``torch.nn.GLU``."""

    def forward(self, input: Tensor) -> Tensor:
        return F.glu(input, self.dim)


class Softmax(nn.Softmax):
    """``torch.nn.Softmax``, with an optional mask."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return F.softmax(input, self.dim)
        return F.softmax(input, self.dim, mask=mask)


class LogSoftmax(nn.LogSoftmax):
    """``torch.nn.LogSoftmax``, with an optional mask."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return F.log_softmax(input, self.dim)
        return F.log_softmax(input, self.dim, mask=mask)


class Dropout(nn.Dropout):
    """``torch.nn.Dropout`` whose mask is computed again in the backward pass, not stored."""

    def forward(self, input: Tensor, seed: int | Tensor | None = None) -> Tensor:
        if self.inplace or not self.training or self.p == 0.0:
            return super().forward(input)
        return F.dropout(input, self.p, seed=seed)


# ---- what torch.nn does not have


class SwiGLU(nn.Module):
    """silu(gate) · up, of two tensors or of the halves of one."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.swiglu(gate, up)


class GeGLU(nn.Module):
    """gelu(gate) · up, of two tensors or of the halves of one."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.geglu(gate, up, self.approximate)


class ReGLU(nn.Module):
    """relu(gate) · up, of two tensors or of the halves of one."""

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.reglu(gate, up)


class BiasAct(nn.Module):
    """activation(x + bias) with a learned bias along the last dimension."""

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
