"""Losses as modules: PyTorch's classes, running on our kernels."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

import torch
from torch import Tensor

from deuteron.functional.cross_entropy import cross_entropy
from deuteron.functional.linear_cross_entropy import linear_cross_entropy


def _shown(cls: type[CrossEntropyLoss]) -> Signature:
    """The arguments of torch's class, then the extras by name."""
    known = signature(CrossEntropyLoss.__init__).parameters.values()
    kept = [p for p in known if p.name != "self" and p.kind is not p.VAR_KEYWORD]
    own = [Parameter(n, Parameter.KEYWORD_ONLY, default=d) for n, d in cls.extras.items()]
    return Signature([*kept, *own])


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """``torch.nn.CrossEntropyLoss``: the same arguments and state dict, and ``z_loss``,
    ``inplace_backward`` and ``return_lse``, which :func:`cross_entropy` adds."""

    extras: ClassVar[Mapping[str, Any]] = {
        "z_loss": 0.0,
        "inplace_backward": False,
        "return_lse": False,
    }

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **extras: Any,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        if unknown := extras.keys() - self.extras.keys():
            raise TypeError(f"{type(self).__name__} has no argument {unknown.pop()!r}")
        vars(self).update(dict(self.extras) | extras)

    def __init_subclass__(cls) -> None:
        cls.__signature__ = _shown(cls)  # type: ignore[attr-defined]

    def terms(self) -> dict[str, Any]:
        """What is asked of the function, besides its tensors."""
        names = ("reduction", "ignore_index", "label_smoothing", *self.extras)
        return {name: getattr(self, name) for name in names}

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss of logits ``input``; with ``return_lse`` also log Σ exp of each row."""
        return cross_entropy(input, target, self.weight, **self.terms())


class LinearCrossEntropy(CrossEntropyLoss):
    """Cross-entropy of a linear layer that it does not own: the layer's weight is an argument of
    the call, so that an output layer tied to an embedding stays tied.

    >>> loss = dt.nn.LinearCrossEntropy(ignore_index=0)
    >>> loss(hidden, head.weight, target, head.bias)

    The arguments are those of ``torch.nn.CrossEntropyLoss`` (``weight`` is that of the classes;
    ``size_average`` and ``reduce`` are its old names for ``reduction``), and ``z_loss``,
    ``return_lse``, ``chunk`` and ``accumulate`` as in :func:`linear_cross_entropy`.
    """

    extras: ClassVar[Mapping[str, Any]] = {
        "z_loss": 0.0,
        "return_lse": False,
        "chunk": None,
        "accumulate": None,
    }

    def forward(  # type: ignore[override]
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None
    ) -> Any:
        """The loss of ``linear(hidden, weight, bias)``."""
        given = (hidden, weight, target, bias)
        return linear_cross_entropy(*given, class_weight=self.weight, **self.terms())


CrossEntropyLoss.__signature__ = _shown(CrossEntropyLoss)  # type: ignore[attr-defined]
