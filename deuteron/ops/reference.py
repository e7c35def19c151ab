"""Helpers of the references, which have to be right and always the same: give results a memory
order, take sums in a fixed order, scale rows down before their squares overflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from deuteron.ir.types import TensorType, same_strides

LOW = (torch.float16, torch.bfloat16)


def wide_type(x: Tensor) -> torch.dtype:
    """The type in which elements of ``x`` are added up: float32 at least."""
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def lay(out: Tensor, like: TensorType) -> Tensor:
    """``out`` in the memory order of ``like``; copied only where torch chose another."""
    if same_strides(like.shape, like.strides, out.stride()):
        return out
    return out.new_empty_strided(like.shape, like.strides).copy_(out)


@contextmanager
def fixed_order(like: Tensor) -> Iterator[None]:
    """Inside this context torch adds up in the same order every time: it sorts and uses no atomics.

    By default, recent versions of torch use atomics for embedding gradients and ``index_put``, and
    scan one long row by combining blocks in the order in which they finish. On a CPU the order is
    fixed anyway, and nothing is switched.
    """
    if not like.is_cuda or torch.are_deterministic_algorithms_enabled():
        yield
        return
    only_warn = torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False, warn_only=only_warn)


def without_overflow(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Return x and None; but in float64, return x with those rows scaled down to 2¹⁰⁰ whose squares
    would overflow, and the power of two by which each row was multiplied. A row is what ``axes``
    run over.

    Normalising such a row gives the same: eps is nothing beside its variance, unless that is 0.
    """
    if x.dtype != torch.float64 or not x.numel():
        return x, None
    most = x.abs().amax(tuple(axes), keepdim=True) if axes else x.abs()
    far = most.isfinite() & (most > 2.0**500)
    # torch.where, not a branch: under torch.func a tensor has no truth value
    down = torch.where(far, torch.exp2(100.0 - torch.floor(torch.log2(most))), 1.0)
    return x * down, down
