"""Losses as modules: PyTorch's classes, which run our functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from deuteron.functional.cross_entropy import cross_entropy
from deuteron.functional.linear_cross_entropy import linear_cross_entropy
from deuteron.nn.stand_in import Extended


class CrossEntropyLoss(Extended, torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss`` with the same arguments and state dict, and with ``z_loss``,
    ``inplace_backward`` and ``return_lse``, which are those of :func:`cross_entropy`."""

    _runs: ClassVar[Callable[..., Any]] = staticmethod(cross_entropy)
    _extras: ClassVar[tuple[str, ...]] = ("z_loss", "inplace_backward", "return_lse")

    def terms(self) -> dict[str, Any]:
        """The arguments of the function besides its tensors."""
        names = ("reduction", "ignore_index", "label_smoothing", *self._extras)
        return {name: getattr(self, name) for name in names}

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """Return the loss of logits ``input``; with ``return_lse`` also log Σ exp of each row."""
        return self._runs(input, target, self.weight, **self.terms())


class LinearCrossEntropy(CrossEntropyLoss):
    """Cross-entropy of a linear layer that this module does not own: the layer's weight is an
    argument of the call, so that an output layer tied to an embedding stays tied.

    >>> loss = dt.nn.LinearCrossEntropy(ignore_index=0)
    >>> loss(hidden, head.weight, target, head.bias)

    The arguments are those of ``torch.nn.CrossEntropyLoss`` (``weight`` has a weight for each
    class; ``size_average`` and ``reduce`` are its old names for ``reduction``), and ``z_loss``,
    ``return_lse``, ``chunk`` and ``accumulate`` as in :func:`linear_cross_entropy`.
    """

    _runs = staticmethod(linear_cross_entropy)
    _extras = ("z_loss", "return_lse", "chunk", "accumulate")

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Any:
        """Return the loss of ``linear(hidden, weight, bias)``."""
        given = (hidden, weight, target, bias)
        return self._runs(*given, class_weight=self.weight, **self.terms())
