"""The switches of torch that change numbers, set to what the policy says and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deuteron.policy import Policy

# Operators whose torch kernels on a GPU add with atomics, so that the order of sums varies.
UNORDERED = frozenset(
    """
    scatter_add max_pool_grad max_pool_winners_grad avg_pool_grad adaptive_avg_pool_grad
    adaptive_max_pool_grad resize_grad grid_sample_grad
    """.split()
)


@contextmanager
def numerics(policy: Policy, benchmark: bool = False) -> Iterator[None]:
    """TF32 and determinism of cuDNN and cuBLAS for one call."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32
    matmul.allow_tf32 = policy.allow_tf32
    try:
        with torch.backends.cudnn.flags(
            enabled=True,
            benchmark=benchmark,
            deterministic=policy.deterministic,
            allow_tf32=policy.allow_tf32,
        ):
            yield
    finally:
        matmul.allow_tf32 = before


def under(policy: Policy, fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with those switches set around every call."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with numerics(policy):
            return fn(*args, **kwargs)

    return run
