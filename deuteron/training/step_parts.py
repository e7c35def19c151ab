"""Parts of a training step that do not depend on the class TrainStep."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch

from deuteron.optim.base import Fused


def loss_of(model: Callable[..., Any], loss_fn: Callable[..., Any] | None) -> Callable[..., Any]:
    def loss(args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if loss_fn is not None and named:
            return loss_fn(model(**named), named)
        if loss_fn is not None:
            return loss_fn(model(*args[:-1]), args[-1])
        result = model(*args, **named)
        if isinstance(result, torch.Tensor):
            return result
        if isinstance(result, Mapping):
            return result.get("loss")
        return getattr(result, "loss", None)

    return loss


@contextmanager
def clipping(optimizer: torch.optim.Optimizer, max_norm: float | None) -> Iterator[None]:
    """While it is open, an optimiser of dt.optim clips to ``max_norm`` itself, in the pass over
    memory in which it updates. Other optimisers are left alone."""
    if max_norm is None or not isinstance(optimizer, Fused):
        yield
        return
    before = optimizer.ours
    optimizer.ours = {**before, "max_norm": max_norm}
    try:
        yield
    finally:
        optimizer.ours = before


def forget_failure(optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
    """Remove what a step that failed may have left behind: the scaler's note that gradients are
    unscaled already, and the optimiser's scale and inf flag."""
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)
        optimizer.__dict__.pop("grad_scale", None)
        optimizer.__dict__.pop("found_inf", None)


def forget_with(function: FunctionType, options: dict[str, Any]) -> None:
    """Delete what torch.compile has compiled for a function when the function is deleted. torch
    keeps all compiled code together with its options, and so would keep the plans of deleted
    steps."""
    from torch._dynamo.eval_frame import remove_from_cache

    def forget(code: CodeType) -> None:
        remove_from_cache(code)
        options.clear()

    weakref.finalize(function, forget, function.__code__).atexit = False
