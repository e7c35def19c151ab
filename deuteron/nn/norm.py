"""Normalisation layers: those of ``torch.nn`` with an optional residual, bias and activation."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.nn.authors import authors
from deuteron.nn.stand_in import Extended, as_leaf


class _Activated(Extended):
    """A layer that takes an activation besides torch's arguments."""

    activation: str | None
    _extras = ("activation",)
    _more: ClassVar[str] = """that takes more: ``residual`` is added first and the sum returned too,
    ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to the
    result."""
    _example: ClassVar[str] = "y, stream = dt.nn.{}({})(x, residual=stream)"
    _sizes: ClassVar[str] = "64"
    _keeps: ClassVar[tuple[str, ...]]  # what of the module its function is called with

    def __init_subclass__(cls) -> None:
        """A stand-in for a class of torch's gets help of its own."""
        super().__init_subclass__()
        if any(base.__module__.startswith("torch.") for base in cls.__bases__):
            shown = cls._example.format(cls.__name__, cls._sizes)
            cls.__doc__ = f"``torch.nn.{cls.__name__}`` {cls._more}\n\n    >>> {shown}\n    "

    def forward(
        self, input: Tensor, residual: Tensor | None = None, bias_before: Tensor | None = None
    ) -> Any:
        if residual is None and bias_before is None and self.activation is None:
            if (theirs := authors(self, self._runs, input)) is not None:
                return theirs.forward(self, input)
            return self._runs(input, *self._own())
        return self.fused(input, self.activation, residual=residual, bias_before=bias_before)

    def _own(self: Any) -> list[Any]:
        """What it hands to its function; parameters are found sooner where they are kept."""
        held = self._parameters
        return [held[name] if name in held else getattr(self, name) for name in self._keeps]

    def fused(self, input: Tensor, activation: str | None, **around: Tensor | None) -> Any:
        """The norm with what stands around it, and this activation after it. Only what is there is
        handed on: without any of it, small calls go to torch."""
        return self._runs(input, *self._own(), **_there(activation=activation, **around))


def _there(**around: Any) -> dict[str, Any]:
    return {name: given for name, given in around.items() if given is not None}


def fuses(norm: Any) -> bool:
    """Whether a norm is one of ours that may take along what follows it: nobody wants to see what
    it gives by itself."""
    if not isinstance(norm, _Activated) or norm.activation is not None:
        return False
    watched: Any = norm
    return not (
        watched._forward_hooks
        or watched._forward_pre_hooks
        or watched._backward_hooks
        or watched._backward_pre_hooks
    )


class LayerNorm(_Activated, nn.LayerNorm):
    _runs, _sizes = staticmethod(F.layer_norm), "768"
    _keeps = ("normalized_shape", "weight", "bias", "eps")


class RMSNorm(_Activated, nn.RMSNorm):
    _runs, _sizes = staticmethod(F.rms_norm), "4096"
    _keeps = ("normalized_shape", "weight", "eps")


class GroupNorm(_Activated, nn.GroupNorm):
    _runs, _sizes = staticmethod(F.group_norm), "8, 64"
    _keeps = ("num_groups", "weight", "bias", "eps")


class _InstanceNorm(_Activated):
    """What the three instance norms share."""

    _runs = staticmethod(F.instance_norm)

    def forward(
        self: Any, input: Tensor, residual: Tensor | None = None, bias_before: Tensor | None = None
    ) -> Any:
        if (leaf := as_leaf(self, input, residual, bias_before)) is not None:
            return leaf
        self._check_input_dim(input)
        if input.dim() == self._get_no_batch_dim():
            if residual is not None or bias_before is not None:
                raise BindError("a residual needs a batch", remedy="unsqueeze(0) both")
            return self.forward(input.unsqueeze(0)).squeeze(0)
        share = 0.0 if self.momentum is None else self.momentum
        by_image = self.training or not self.track_running_stats
        running: Any = self.running_mean, self.running_var
        own: Any = self.weight, self.bias, by_image, share, self.eps
        around = _there(residual=residual, bias_before=bias_before, activation=self.activation)
        return self._runs(input, *running, *own, **around)


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d): ...


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d): ...


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d): ...


class _BatchNorm(_Activated):
    """What the three batch norms share."""

    _runs = staticmethod(F.batch_norm)
    _more = """that takes more: ``residual`` is added after it, then ``activation``
    ("relu", "silu", …) applied."""
    _example = 'y = dt.nn.{}({}, activation="relu")(x, residual=shortcut)'

    def forward(  # type: ignore[override]
        self: Any, input: Tensor, residual: Tensor | None = None
    ) -> Any:
        if (leaf := as_leaf(self, input, residual)) is not None:
            return leaf
        return self.fused(input, self.activation, residual=residual)

    def fused(self: Any, input: Tensor, activation: str | None, **around: Tensor | None) -> Any:
        self._check_input_dim(input)
        share = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:  # the mean of all batches so far
                share = 1.0 / float(self.num_batches_tracked)
        training = self.training or (self.running_mean is None and self.running_var is None)
        keeps = not self.training or self.track_running_stats
        running = (self.running_mean, self.running_var) if keeps else (None, None)
        own: Any = self.weight, self.bias, training, 0.0 if share is None else share, self.eps
        return self._runs(input, *running, *own, **_there(activation=activation, **around))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d): ...


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d): ...


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d): ...
