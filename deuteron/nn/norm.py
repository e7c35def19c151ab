"""Normalisation layers: those of ``torch.nn`` with an optional residual, bias and activation."""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any

from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.nn.forward import as_leaf


class _Activated:
    """A layer that takes an activation besides torch's arguments."""

    activation: str | None = None

    def __init__(self, *args: Any, activation: str | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activation = activation

    def __init_subclass__(cls) -> None:
        """A class that adds nothing to the arguments gets them written out, for ``help``: those of
        torch's class, as the version that is installed has them, and ours."""
        super().__init_subclass__()
        torchs = next((base for base in cls.__mro__ if base.__module__.startswith("torch.")), None)
        if torchs is not None and cls.__init__ is _Activated.__init__:
            cls.__init__ = _with_activation(torchs)  # type: ignore[method-assign]


def _with_activation(torchs: type) -> Any:
    """``_Activated.__init__`` that shows the arguments of ``torchs``."""

    @wraps(_Activated.__init__)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _Activated.__init__(self, *args, **kwargs)

    theirs = inspect.signature(torchs.__init__)  # type: ignore[misc]
    ours = inspect.signature(_Activated.__init__).parameters["activation"]
    shown = theirs.replace(parameters=[*theirs.parameters.values(), ours])
    init.__signature__ = shown  # type: ignore[attr-defined]
    return init


class LayerNorm(_Activated, nn.LayerNorm):
    """``torch.nn.LayerNorm`` that takes more: ``residual`` is added first and the sum returned too,
    ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to the
    result.

    >>> y, stream = dt.nn.LayerNorm(768)(x, residual=stream)
    """

    def forward(
        self, input: Tensor, residual: Tensor | None = None, bias_before: Tensor | None = None
    ) -> Any:
        if residual is None and bias_before is None and self.activation is None:
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        return F.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            bias_before=bias_before,
            activation=self.activation,
        )


class RMSNorm(_Activated, nn.RMSNorm):
    """``torch.nn.RMSNorm`` that takes more: ``residual`` is added first and the sum returned too,
    ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to the
    result.

    >>> y, stream = dt.nn.RMSNorm(4096)(x, residual=stream)
    """

    def forward(
        self, input: Tensor, residual: Tensor | None = None, bias_before: Tensor | None = None
    ) -> Any:
        if residual is None and bias_before is None and self.activation is None:
            return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
        return F.rms_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.eps,
            residual=residual,
            bias_before=bias_before,
            activation=self.activation,
        )


class GroupNorm(_Activated, nn.GroupNorm):
    """``torch.nn.GroupNorm`` that takes more: ``residual`` is added first and the sum returned too,
    ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to the
    result.

    >>> y, stream = dt.nn.GroupNorm(8, 64)(x, residual=stream)
    """

    def forward(
        self, input: Tensor, residual: Tensor | None = None, bias_before: Tensor | None = None
    ) -> Any:
        return F.group_norm(
            input,
            self.num_groups,
            self.weight,
            self.bias,
            self.eps,
            residual=residual,
            bias_before=bias_before,
            activation=self.activation,
        )


class _InstanceNorm(_Activated):
    """What the three instance norms share."""

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
        return F.instance_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training or not self.track_running_stats,
            0.0 if self.momentum is None else self.momentum,
            self.eps,
            residual=residual,
            bias_before=bias_before,
            activation=self.activation,
        )


class InstanceNorm1d(_InstanceNorm, nn.InstanceNorm1d):
    """``torch.nn.InstanceNorm1d`` that takes more: ``residual`` is added first and the sum returned
    too, ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to
    the result.

    >>> y, stream = dt.nn.InstanceNorm1d(64)(x, residual=stream)
    """


class InstanceNorm2d(_InstanceNorm, nn.InstanceNorm2d):
    """``torch.nn.InstanceNorm2d`` that takes more: ``residual`` is added first and the sum returned
    too, ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to
    the result.

    >>> y, stream = dt.nn.InstanceNorm2d(64)(x, residual=stream)
    """


class InstanceNorm3d(_InstanceNorm, nn.InstanceNorm3d):
    """``torch.nn.InstanceNorm3d`` that takes more: ``residual`` is added first and the sum returned
    too, ``bias_before`` is added first, ``activation`` ("relu", "gelu", "silu", …) is applied to
    the result.

    >>> y, stream = dt.nn.InstanceNorm3d(64)(x, residual=stream)
    """


class _BatchNorm(_Activated):
    """What the three batch norms share."""

    def forward(self: Any, input: Tensor, residual: Tensor | None = None) -> Any:
        if (leaf := as_leaf(self, input, residual)) is not None:
            return leaf
        self._check_input_dim(input)
        share = self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:  # the mean of all batches so far
                share = 1.0 / float(self.num_batches_tracked)
        training = self.training or (self.running_mean is None and self.running_var is None)
        keeps = not self.training or self.track_running_stats
        return F.batch_norm(
            input,
            self.running_mean if keeps else None,
            self.running_var if keeps else None,
            self.weight,
            self.bias,
            training,
            0.0 if share is None else share,
            self.eps,
            residual=residual,
            activation=self.activation,
        )


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    """``torch.nn.BatchNorm1d`` that takes more: ``residual`` is added after it, then ``activation``
    ("relu", "silu", …) applied.

    >>> y = dt.nn.BatchNorm1d(64, activation="relu")(x, residual=shortcut)
    """


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    """``torch.nn.BatchNorm2d`` that takes more: ``residual`` is added after it, then ``activation``
    ("relu", "silu", …) applied.

    >>> y = dt.nn.BatchNorm2d(64, activation="relu")(x, residual=shortcut)
    """


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    """``torch.nn.BatchNorm3d`` that takes more: ``residual`` is added after it, then ``activation``
    ("relu", "silu", …) applied.

    >>> y = dt.nn.BatchNorm3d(64, activation="relu")(x, residual=shortcut)
    """
