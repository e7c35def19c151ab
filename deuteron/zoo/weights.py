"""Random weights that behave like trained ones.

PyTorch's own defaults leave batch-norm statistics at 0 and 1, so that ignoring or misplacing them
goes unnoticed, and let activations grow or die with depth in evaluation mode.  ``randomise_``
gives every statistic and every parameter a value that matters and keeps activations near 1.
"""

from __future__ import annotations

import math
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .llama import RMSNorm


@runtime_checkable
class _Block(Protocol):
    """A block that adds a branch to what it is given."""

    def branch_end(self) -> tuple[Tensor, float]:
        """The weight that closes the branch, and what a random model scales it by."""


class _Filler:
    """Draws from one seeded stream, so that a module's values depend on seed and order only."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, tensor: Tensor | None, std: float) -> None:
        if tensor is not None:
            tensor.normal_(0.0, std, generator=self.generator)

    def uniform(self, tensor: Tensor | None, low: float, high: float) -> None:
        if tensor is not None:
            tensor.uniform_(low, high, generator=self.generator)

    def fill(self, module: nn.Module) -> None:
        """Set the parameters and buffers that ``module`` itself owns."""
        match module:
            case nn.Conv2d() | nn.ConvTranspose2d() | nn.Linear():
                self.normal(module.weight, math.sqrt(_power(module)))
                self.normal(module.bias, 0.1)
            case nn.Embedding():
                self.normal(module.weight, 0.5)
            case nn.BatchNorm2d() | nn.LayerNorm() | RMSNorm():
                self.uniform(module.weight, 0.8, 1.2)
                self.normal(getattr(module, "bias", None), 0.1)
                self.normal(getattr(module, "running_mean", None), 0.2)
                self.uniform(getattr(module, "running_var", None), 0.6, 1.6)
            case _ if any(True for _ in module.parameters(recurse=False)):
                kind = type(module).__name__
                raise TypeError(f"no rule to randomise the parameters of a {kind}")


def _power(module: nn.Conv2d | nn.ConvTranspose2d | nn.Linear) -> float:
    """The variance of weights that keeps activations near 1."""
    if isinstance(module, nn.ConvTranspose2d):
        taps = module.weight[0, 0].numel() / math.prod(module.stride)
        return 1 / (module.in_channels // module.groups * taps)
    # A convolution without a bias feeds a norm and a rectifier, which halves the power.
    rectified = isinstance(module, nn.Conv2d) and module.bias is None
    return (2.0 if rectified else 1.0) / module.weight[0].numel()


@torch.no_grad()
def randomise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Overwrite all weights and batch-norm statistics of ``model`` from ``seed``; return it.

    The model must be on the CPU.  Raises TypeError for a layer with parameters that it does not
    know, rather than leaving them as they are.
    """
    filler = _Filler(seed)
    for module in model.modules():
        filler.fill(module)
    for module in model.modules():
        if isinstance(module, _Block):
            weight, scale = module.branch_end()
            weight.mul_(scale)
    return model
