"""Noticing that the weights of a module changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deuteron.frontends.sparse import parts_of


class Follower:
    """Looks at every parameter and buffer of a module, and at tensors that are plain attributes:
    whether each is still the same tensor in the same memory, and whether it was written to since.
    A tensor in the place of None counts as well, and so do further parameters and buffers.

    Torch counts what is written through its operators, by optimisers and ``load_state_dict`` too.
    Writing to ``parameter.data`` or by other libraries is not counted.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        owners = [each for m in module.modules() for each in (m._parameters, m._buffers, vars(m))]
        self._seen: list[tuple[dict[str, Any], str, Any, torch.Tensor, int, int | None]] = [
            (owner, name, t, part, part.data_ptr(), _written(part))
            for owner in owners
            for name, t in owner.items()
            if isinstance(t, torch.Tensor)
            for part in parts_of(t)
        ]
        self._none = [(owner, name) for owner in owners for name, t in owner.items() if t is None]
        tables = [table for m in module.modules() for table in (m._parameters, m._buffers)]
        self._sizes = [(table, len(table)) for table in tables]
        self._inside = [(m._modules, m._modules.copy()) for m in module.modules()]

    def changed(self) -> bool:
        """Whether anything changed. This runs in every call, so it does no more than it must."""
        for inside, was in self._inside:
            if inside != was:
                return True
        for table, size in self._sizes:
            if len(table) != size:
                return True
        for owner, name in self._none:
            now = owner.get(name)
            if now is not None and isinstance(now, torch.Tensor):
                return True
        for owner, name, tensor, part, place, version in self._seen:
            if owner.get(name) is not tensor or part.data_ptr() != place:
                return True
            if version is not None and part._version != version:
                return True
        return False


def _written(tensor: torch.Tensor) -> int | None:
    """How often a tensor was written to, if torch counts that."""
    return None if tensor.is_inference() else tensor._version
