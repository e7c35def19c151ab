"""Random weights that behave like trained ones.

PyTorch's own defaults leave batch-norm statistics at 0 and 1, so that ignoring or misplacing them
goes unnoticed, and let activations grow or die with depth in evaluation mode.  ``randomise_``
gives every statistic and every parameter a value that matters and keeps activations near 1.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .llama import RMSNorm


def _fill(module: nn.Module, generator: torch.Generator) -> None:
    """Set the parameters and buffers that ``module`` itself owns."""

    def draw(name: str, how: str, *limits: float) -> None:
        tensor = getattr(module, name, None)
        if tensor is not None:
            getattr(tensor, how)(*limits, generator=generator)

    match module:
        case nn.Conv2d() | nn.ConvTranspose2d() | nn.Linear():
            draw("weight", "normal_", 0.0, math.sqrt(_power(module)))
            draw("bias", "normal_", 0.0, 0.1)
        case nn.Embedding():
            draw("weight", "normal_", 0.0, 0.5)
        case nn.BatchNorm2d() | nn.LayerNorm() | RMSNorm():
            draw("weight", "uniform_", 0.8, 1.2)
            draw("bias", "normal_", 0.0, 0.1)
            draw("running_mean", "normal_", 0.0, 0.2)
            draw("running_var", "uniform_", 0.6, 1.6)
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
    generator = torch.Generator().manual_seed(seed)  # values depend on seed and order only
    for module in model.modules():
        _fill(module, generator)
    # a block that adds a branch to what it is given says which weight closes it, and its scale
    for branch_end in (getattr(module, "branch_end", None) for module in model.modules()):
        if branch_end is not None:
            weight, scale = branch_end()
            weight.mul_(scale)
    return model
