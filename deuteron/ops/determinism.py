"""Sums in one order on a GPU, for references whose torch call would otherwise use atomics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fixed_order(like: torch.Tensor) -> Iterator[None]:
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
