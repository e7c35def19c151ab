"""Losses as modules: PyTorch's classes, running on our kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deuteron.functional.cross_entropy import cross_entropy
from deuteron.functional.linear_cross_entropy import linear_cross_entropy


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss``: the same arguments and state dict, and ``z_loss``,
    ``inplace_backward`` and ``return_lse``, which :func:`cross_entropy` adds."""

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        inplace_backward: bool = False,
        return_lse: bool = False,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.inplace_backward, self.return_lse = z_loss, inplace_backward, return_lse

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss of logits ``input``; with ``return_lse`` also log Σ exp of each row."""
        if not (self.z_loss or self.inplace_backward or self.return_lse):
            return cross_entropy(
                input,
                target,
                self.weight,
                reduction=self.reduction,
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
            )
        return cross_entropy(
            input,
            target,
            self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            inplace_backward=self.inplace_backward,
            return_lse=self.return_lse,
        )


class LinearCrossEntropy(torch.nn.CrossEntropyLoss):
    """Cross-entropy of a linear layer that it does not own: the layer's weight is an argument of
    the call, so that an output layer tied to an embedding stays tied.

    >>> loss = dt.nn.LinearCrossEntropy(ignore_index=0)
    >>> loss(hidden, head.weight, target, head.bias)

    The arguments are those of ``torch.nn.CrossEntropyLoss`` (``weight`` is that of the classes;
    ``size_average`` and ``reduce`` are its old names for ``reduction``) and of
    :func:`linear_cross_entropy`.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        return_lse: bool = False,
        chunk: int | None = None,
        accumulate: str | None = None,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss, self.return_lse, self.chunk = z_loss, return_lse, chunk
        self.accumulate = accumulate

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Any:
        """The loss of ``linear(hidden, weight, bias)``."""
        return linear_cross_entropy(
            hidden,
            weight,
            target,
            bias,
            class_weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            return_lse=self.return_lse,
            chunk=self.chunk,
            accumulate=self.accumulate,
        )
