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
        if type(module) is getattr(nn, name, None) and name in ours.__all__:
            module.__class__ = getattr(ours, name)
    return model
