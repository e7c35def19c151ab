"""What would cut the graph of a step in pieces, told in a way that does not, as torch traces it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


def uncut(call: Callable[..., Any], *args: Any) -> Any:
    """A first call, compiled without what would cut the step in pieces: what a model logs once,
    gradients that are part of a loss, through which no gradient could be taken then, and the number
    of batches that a batch norm with ``momentum=None`` asks for."""
    config = torch._dynamo.config
    whole: Any = {"trace_autograd_ops": True} if hasattr(config, "trace_autograd_ops") else {}
    with config.patch(ignore_logger_methods=_Once(), **whole), _counts_on_the_device():
        return call(*args)


class _Once(str):
    """What loggers of transformers say once. torch.compile asks what to leave out by looking into
    it, and also writes all its settings down as JSON, for which it is an empty text."""

    def __iter__(self) -> Iterator[Any]:
        names = ("warning_once", "info_once")
        return (getattr(logging.Logger, n) for n in names if hasattr(logging.Logger, n))

    def __contains__(self, method: object) -> bool:
        return any(method is each for each in self)


_forward = _BatchNorm.forward


def _averaging(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Batch norm whose running statistics are means over all batches so far: how many these are is
    a tensor, of which torch's own forward asks the value."""
    counts = self.training and self.track_running_stats and self.momentum is None
    mean, var, count = self.running_mean, self.running_var, self.num_batches_tracked
    if not counts or mean is None or var is None or count is None:
        return _forward(self, input)
    self._check_input_dim(input)
    count.add_(1)
    share = count.to(torch.promote_types(mean.dtype, torch.float32)).reciprocal()
    now = torch.zeros_like(mean), torch.zeros_like(var)
    out = F.batch_norm(input, *now, self.weight, self.bias, True, 1.0, self.eps)
    for running, of_batch in zip((mean, var), now, strict=True):
        running.copy_(running * (1.0 - share) + of_batch * share)
    return out


@contextmanager
def _counts_on_the_device() -> Iterator[None]:
    """Modules whose class has a forward of its own, as that of ranks together has, keep it."""
    _BatchNorm.forward = _averaging  # type: ignore[method-assign]
    try:
        yield
    finally:
        _BatchNorm.forward = _forward  # type: ignore[method-assign]
