"""What would cut the graph of a step in pieces, told in a way that does not, as torch traces it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


def uncut(call: Callable[..., Any], *args: Any) -> Any:
    """A first call, compiled without what would cut the step in pieces: what a model warns of or
    logs once, gradients that are part of a loss, through which no gradient could be taken then, and
    values that modules of torch ask for: the number of batches by batch norms with
    ``momentum=None``, the mask by ``nn.Transformer`` and its halves."""
    config = torch._dynamo.config
    whole: Any = {"trace_autograd_ops": True} if hasattr(config, "trace_autograd_ops") else {}
    with config.patch(ignore_logger_methods=_Unsaid(), **whole), _nothing_asked():
        return call(*args)


class _Unsaid(str):
    """Warnings, and what loggers of transformers say once. torch.compile asks what to leave out by
    looking into it, and also writes all its settings down as JSON, for which it is an empty
    text."""

    def __iter__(self) -> Iterator[Any]:
        names = ("warning_once", "info_once")
        yield warnings.warn
        yield from (getattr(logging.Logger, n) for n in names if hasattr(logging.Logger, n))

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


_encode, _decode = nn.TransformerEncoder.forward, nn.TransformerDecoder.forward


def _encoded(self: Any, *args: Any, **named: Any) -> Any:
    """A mask is added as any other, unless the caller says that it hides what comes later: torch's
    own forward looks at all of it to find that out."""
    if len(args) < 4:
        named["is_causal"] = bool(named.get("is_causal"))
    return _encode(self, *args, **named)


def _decoded(self: Any, *args: Any, **named: Any) -> Any:
    if len(args) < 7:
        named["tgt_is_causal"] = bool(named.get("tgt_is_causal"))
    return _decode(self, *args, **named)


OURS: dict[Any, Callable[..., Any]] = {
    _BatchNorm: _averaging,
    nn.TransformerEncoder: _encoded,
    nn.TransformerDecoder: _decoded,
}


@contextmanager
def _nothing_asked() -> Iterator[None]:
    """Modules whose class has a forward of its own, as that of ranks together has, keep it."""
    before = {kind: kind.forward for kind in OURS}
    for kind, forward in OURS.items():
        kind.forward = forward
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward
