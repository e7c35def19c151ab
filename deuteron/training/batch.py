"""The batches of a step: checked against the example and flattened to a list of leaves."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from deuteron.errors import BindError
from deuteron.optim.batch import is_dense
from deuteron.training.checks import ASKED

Key = tuple[Any, ...]


class Batches:
    """How the arguments of a step are arranged: positional or keyword, as in the example."""

    def __init__(self, example: Any, with_target: bool) -> None:
        if isinstance(example, Mapping):
            self.args, self.names = 0, [str(name) for name in example]
            call: tuple[tuple[Any, ...], dict[str, Any]] = (), dict(example)
        else:
            call = tuple(example) if isinstance(example, tuple | list) else (example,), {}
            self.args, self.names = len(call[0]), []
        if with_target and not self.names and self.args < 2:
            remedy = "give (x, y), or loss_fn=None where the model returns its loss"
            raise BindError("the example has no target for loss_fn", asked=ASKED, remedy=remedy)
        paths, self.spec = pytree.tree_flatten_with_path(call)
        self.places = [f"batch{pytree.keystr(path[1:])}" for path, _ in paths]
        self.kinds = [_kind(leaf) for _, leaf in paths]
        self.shown = [_without_memory(leaf) for _, leaf in paths]  # the example on the device meta

    def taken(self, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Key, list[Any]]:
        """Check a batch; return a key that all batches of its size share, and its leaves."""
        if len(args) != self.args or named.keys() != set(self.names):
            wanted = self.names or f"{self.args} by position"
            raise _unlike(f"the step was made for {wanted}, and got {list(named) or len(args)}")
        leaves, spec = pytree.tree_flatten((args, {name: named[name] for name in self.names}))
        if spec != self.spec:
            raise _unlike(f"the batch is arranged as {spec}, and the example as {self.spec}")
        for i, (leaf, wanted) in enumerate(zip(leaves, self.kinds, strict=True)):
            if (kind := _kind(leaf)) != wanted:
                raise _unlike(f"it is {kind}, and in the example {wanted}", self.places[i])
            if isinstance(leaf, torch.Tensor) and leaf.is_meta:
                raise _unlike(
                    "it is on the device meta, where there are no numbers", self.places[i]
                )
            if isinstance(leaf, torch.Tensor) and not is_dense(leaf):
                leaves[i] = leaf.contiguous()
        return tuple(map(_size, leaves)), leaves

    def call(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments that these leaves came from."""
        args, named = pytree.tree_unflatten(leaves, self.spec)
        return args, named


def placed(leaves: list[Any], device: torch.device) -> list[Any]:
    """Copy the tensors among the leaves to a device, from pinned memory without waiting."""
    ahead = device.type == "cuda"
    return [
        leaf.detach().to(device, non_blocking=ahead) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def _without_memory(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype} of {leaf.ndim} dimensions"
    return f"a {type(leaf).__name__}"


def _size(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return (leaf.shape, leaf.stride())
    if not isinstance(leaf, Hashable):
        raise _unlike(f"it holds {_kind(leaf)}, and may hold tensors, numbers and text")
    return leaf


def _unlike(wrong: str, where: str = "a batch") -> BindError:
    remedy = "bring a batch like the example, or make another step for such batches"
    return BindError(wrong, asked=ASKED, where=where, remedy=remedy)
