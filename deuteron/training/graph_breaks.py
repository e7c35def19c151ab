"""Keeps the graph of a step in one piece while torch traces it: replaces or leaves out code of
torch and of models that would break it."""

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
    """Make the first call of a compiled function, which compiles it, without these graph breaks:

    * warnings and messages that a model logs once: they are left out;
    * gradients that are part of a loss: they are traced. After a break no gradient could be taken
      through them;
    * tensor values that torch's modules read: the number of batches, by batch norms with
      ``momentum=None``; the mask, by ``nn.Transformer`` and its encoder and decoder."""
    config = torch._dynamo.config
    whole: Any = {"trace_autograd_ops": True} if hasattr(config, "trace_autograd_ops") else {}
    with config.patch(ignore_logger_methods=_Unsaid(), **whole), _nothing_asked():
        return call(*args)


class _Unsaid(str):
    """The functions that torch.compile leaves out of a graph: ``warnings.warn``, and the methods
    that transformers gives to loggers to log once. torch.compile uses it like a set of functions.
    But it also writes all its settings as JSON, and there this is an empty string."""

    def __iter__(self) -> Iterator[Any]:
        names = ("warning_once", "info_once")
        yield warnings.warn
        yield from (getattr(logging.Logger, n) for n in names if hasattr(logging.Logger, n))

    def __contains__(self, method: object) -> bool:
        return any(method is each for each in self)


_forward = _BatchNorm.forward


def _averaging(self: _BatchNorm, input: torch.Tensor) -> torch.Tensor:
    """Forward of a batch norm with ``momentum=None``, whose running statistics are means over all
    batches so far. Their number is a tensor; torch's forward reads its value, this one does not."""
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
    """Forward of an encoder that treats the mask as causal only if the caller says so: torch's own
    forward reads the whole mask to find that out. Otherwise the mask is added like any other."""
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
    """While it is open, the classes in OURS have our forward. A subclass with a forward of its own,
    such as batch norm over all ranks, keeps it."""
    before = {kind: kind.forward for kind in OURS}
    for kind, forward in OURS.items():
        kind.forward = forward
    try:
        yield
    finally:
        for kind, forward in before.items():
            kind.forward = forward
