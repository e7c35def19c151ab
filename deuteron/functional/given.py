"""The tensors of a call: what a plan depends on, and whether a kernel can read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from deuteron.errors import BindError
from deuteron.ir.types import TensorType

Tensors = Sequence[torch.Tensor | None]
Types = tuple[TensorType | None, ...]
Attributes = dict[str, Any]


def signature(tensors: Tensors, attrs: Attributes) -> Any:
    """All that a plan depends on. What is no strided tensor, or one whose signs are still to be
    turned, or of a class that may have no memory, has a signature that no plan is kept under."""
    try:
        return (
            *[
                None
                if t is None
                else NEGATIVE
                if t.is_neg() or t.__class__ not in OWN_MEMORY
                else (t.shape, t.stride(), t.dtype, t.device)
                for t in tensors
            ],
            *attrs.values(),
        )
    except (AttributeError, RuntimeError):
        return NEGATIVE


NEGATIVE = "not plain memory"
OWN_MEMORY = frozenset((torch.Tensor, torch.nn.Parameter))


def strided(name: str, t: torch.Tensor | None) -> torch.Tensor | None:
    """A strided tensor, or None where one may be left out."""
    if t is not None and (not isinstance(t, torch.Tensor) or t.layout is not torch.strided):
        kind = str(t.layout) if isinstance(t, torch.Tensor) else type(t).__name__
        raise BindError(
            f"a {kind} was given where a strided tensor is needed",
            asked=f"{name}(…)",
            remedy="pass a torch.Tensor; to_dense() makes a sparse one strided",
        )
    return t


def a_tensor(name: str, t: torch.Tensor | None) -> torch.Tensor:
    """A strided tensor, which may not be left out."""
    t = strided(name, t)
    if t is None:
        raise _nothing(name)
    return t


def _nothing(name: str) -> BindError:
    return BindError("no tensor was given", asked=f"{name}(…)", remedy="pass one")


def plain(name: str, t: torch.Tensor | None) -> torch.Tensor | None:
    """A tensor whose memory holds its values: kernels read nothing else."""
    t = strided(name, t)
    if t is None:
        return None
    if t.__class__ not in OWN_MEMORY:
        t = t.as_subclass(torch.Tensor)
    return t.resolve_neg() if t.is_neg() else t


def types_of(tensors: Iterable[torch.Tensor | None]) -> Types:
    return tuple(
        None
        if t is None
        else TensorType.of(tuple(map(int, t.shape)), t.dtype, strides=tuple(map(int, t.stride())))
        for t in tensors
    )


def one_device(name: str, tensors: Tensors) -> torch.device:
    found = {t.device for t in tensors if t is not None}
    if not found:
        raise _nothing(name)
    if len(found) != 1:
        listed = ", ".join(sorted(map(str, found)))
        raise BindError(
            f"tensors are on several devices: {listed}",
            asked=f"{name}(…)",
            remedy="move them to one",
        )
    return found.pop()
