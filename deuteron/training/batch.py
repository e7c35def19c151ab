"""Batches: checked against the example that a step was made with, and taken apart to tensors."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from deuteron.errors import BindError
from deuteron.optim.batch import is_dense

Key = tuple[Any, ...]


class Batches:
    """Arguments of a step: positions or keywords, as in the example."""

    def __init__(self, example: Any, with_target: bool) -> None:
        if isinstance(example, Mapping):
            self.args, self.names = 0, [str(name) for name in example]
            call: tuple[tuple[Any, ...], dict[str, Any]] = (), dict(example)
        else:
            call = tuple(example) if isinstance(example, tuple | list) else (example,), {}
            self.args, self.names = len(call[0]), []
        if with_target and not self.names and self.args < 2:
            wrong = "the example has no target, which loss_fn is called with"
            remedy = "give (x, y), or loss_fn=None where the model returns its loss"
            raise BindError(wrong, asked="train_step", remedy=remedy)
        paths, self.spec = pytree.tree_flatten_with_path(call)
        self.places = [_place(path) for path, _ in paths]
        self.kinds = [_kind(leaf) for _, leaf in paths]

    def taken(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Key, list[Any]]:
        """What batches of one size have in common, and the leaves of this one."""
        if len(args) != self.args or named.keys() != set(self.names):
            wanted = self.names or f"{self.args} by position"
            wrong = f"the step was made for {wanted}, and got {list(named) or len(args)}"
            raise BindError(wrong, asked="a call of a training step", remedy="bring such a batch")
        call = (args, {name: named[name] for name in self.names})
        leaves, spec = pytree.tree_flatten(call)
        if spec != self.spec:
            wrong = f"the batch is arranged as {spec}, and the example as {self.spec}"
            raise BindError(wrong, asked="a call of a training step", remedy="bring such a batch")
        for place, kind, leaf in zip(self.places, self.kinds, leaves, strict=True):
            if _kind(leaf) != kind:
                wrong = f"it is {_said(_kind(leaf))}, and in the example {_said(kind)}"
                remedy = "convert it, or make another step for such batches"
                asked = "a call of a training step"
                raise BindError(wrong, asked=asked, where=place, remedy=remedy)
        leaves = [
            leaf if not _is_tensor(leaf) or is_dense(leaf) else leaf.contiguous() for leaf in leaves
        ]
        return tuple(map(_size, leaves)), leaves

    def call(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positions and keywords of these leaves."""
        args, named = pytree.tree_unflatten(leaves, self.spec)
        return args, named


def placed(leaves: list[Any], device: torch.device) -> list[Any]:
    """The same on a device; from pinned memory without waiting for it."""
    return [
        leaf.detach().to(device, non_blocking=device.type == "cuda") if _is_tensor(leaf) else leaf
        for leaf in leaves
    ]


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor)


def _kind(leaf: Any) -> tuple[Any, int]:
    return (leaf.dtype, leaf.ndim) if _is_tensor(leaf) else (type(leaf), -1)


def _said(kind: tuple[Any, int]) -> str:
    return f"{kind[0]} of {kind[1]} dimensions" if kind[1] >= 0 else kind[0].__name__


def _size(leaf: Any) -> Hashable:
    if _is_tensor(leaf):
        return (leaf.shape, leaf.stride())
    if isinstance(leaf, Hashable):
        return leaf
    remedy = "pass tensors, and numbers or text beside them"
    raise BindError(f"a batch holds a {type(leaf).__name__}", asked="train_step", remedy=remedy)


def _place(path: tuple[Any, ...]) -> str:
    """Of a path through (args, named): ``batch[0]``, ``batch['labels']``."""
    return f"batch{pytree.keystr(path[1:])}"
