"""Our modules inside of ``torch.jit.script``, which reads Python and cannot read ours."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import nn

from deuteron.errors import BindError

EXTRAS = ("activation", "z_loss", "inplace_backward", "return_lse")  # torch's have none of these


def scriptable(modules: Iterable[Any]) -> None:
    """Let ``torch.jit.script`` find torch's module in the place of each of these classes."""
    for module in modules:
        if isinstance(module, type) and issubclass(module, nn.Module):
            module.__prepare_scriptable__ = as_torchs  # type: ignore[attr-defined]


def as_torchs(module: nn.Module) -> nn.Module:
    """The module of ``torch.nn`` that this one stands in for, with the same parameters."""
    kind = type(module)
    base = getattr(nn, kind.__name__, None) if kind.__module__.startswith(__package__) else None
    more = [name for name in EXTRAS if getattr(module, name, None)]
    if base is None or more:
        raise BindError(
            f"{kind.__name__}{f' with {more[0]}' if more else ''} cannot be read by TorchScript, "
            "and torch.nn has none to stand in for it",
            asked="torch.jit.script(…)",
            remedy="use torch.compile, or torch.jit.trace",
        )
    twin = copy.copy(module)
    twin.__class__ = base
    return twin
