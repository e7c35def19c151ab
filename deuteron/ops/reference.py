"""What references need beside torch's calls, because they have to be right and always the same: a
memory order, sums in one order, rows scaled before their squares overflow."""

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
    """Within, torch adds up in the same order every time, by sorting instead of by atomics.

    Recent versions of torch use atomics for embedding gradients and ``index_put`` unless asked
    not to, and a scan of one long row that combines blocks as they finish. On a CPU the order
    is fixed anyway, and nothing is switched.
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
    """x, and None; or in float64 x with rows whose squares would overflow brought down to 2¹⁰⁰,
    and the power of two by which each row was multiplied. A row is what ``axes`` run over.

    The norm of such a row stays the same: eps is nothing beside its variance, unless that is 0.
    """
    if x.dtype != torch.float64 or not x.numel():
        return x, None
    most = x.abs().amax(tuple(axes), keepdim=True) if axes else x.abs()
    far = most.isfinite() & (most > 2.0**500)
    # chosen, not branched upon: under torch.func a tensor has no truth
    down = torch.where(far, torch.exp2(100.0 - torch.floor(torch.log2(most))), 1.0)
    return x * down, down
