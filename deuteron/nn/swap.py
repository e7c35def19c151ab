"""Putting our modules where torch's stand."""

from __future__ import annotations

from torch import nn

from deuteron import nn as ours


def replace(model: nn.Module) -> nn.Module:
    """Turn every module of ``model`` that has a stand-in here into it, in place; ``model`` comes
    back for convenience. Parameters, hooks, names and state dicts stay as they are.

    Only exact classes of ``torch.nn`` are taken, never subclasses, which may do something else.
    """
    for module in model.modules():
        name = type(module).__name__
        if type(module) is getattr(nn, name, None) and name in ours.__all__ and _fits(module):
            module.__class__ = getattr(ours, name)
    return model


def _fits(module: nn.Module) -> bool:
    """Whether the stand-in does all that this module was made for."""
    if isinstance(module, nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d):
        return not module.track_running_stats
    return True
