"""Norms: those of ``torch.nn`` that also take a residual, a bias and an activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.nn.authors import authors, is_bare
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
    _keeps: ClassVar[tuple[str, ...]]  # attributes of the module that its function is called with

    def __init_subclass__(cls) -> None:
        """Give a stand-in for a class of torch's a help text of its own."""
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
            return self._runs(input, *self._own(self))
        around = {"residual": residual, "bias_before": bias_before}
        return self.fused(self, input, self.activation, **around)

    @classmethod
    def _own(cls, norm: Any) -> list[Any]:
        """Return the arguments that a norm passes to its function."""
        return held(norm, cls._keeps)

    @classmethod
    def fused(
        cls, norm: Any, input: Tensor, activation: str | None, **around: Tensor | None
    ) -> Any:
        """Call the function for ``norm``, a module of this class or of torch's, with this
        activation and, in ``around``, what is added before. Arguments that are None are left out,
        because without any of them small calls go to torch."""
        return cls._runs(input, *cls._own(norm), **_there(activation=activation, **around))


def held(module: nn.Module, names: Sequence[str]) -> list[Any]:
    """Return the attributes of a module with these names. Parameters and buffers are found sooner
    in the dictionaries that keep them."""
    own, buffers = module._parameters, module._buffers
    return [
        own[name] if name in own else buffers[name] if name in buffers else getattr(module, name)
        for name in names
    ]


def _there(**around: Any) -> dict[str, Any]:
    return {name: given for name, given in around.items() if given is not None}


def fusing(norm: Any) -> Any:
    """Return the class of ours by which a norm, of that class or of torch's, does what follows it
    as well. None where a hook wants to see the norm's own result, or it has an activation or a
    forward of its own."""
    kind = type(norm)
    if issubclass(kind, _Activated):
        found: Any = kind if norm.activation is None else None
    else:
        found = _TORCHS.get(kind)
    return found if found is not None and is_bare(norm) else None


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


_OF_A_BATCH = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


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
        return self.fused(self, input, self.activation, residual=residual)

    @classmethod
    def fused(
        cls, norm: Any, input: Tensor, activation: str | None, **around: Tensor | None
    ) -> Any:
        norm._check_input_dim(input)
        share, trains, tracks = norm.momentum, norm.training, norm.track_running_stats
        weight, bias, mean, var, batches = held(norm, _OF_A_BATCH)
        if trains and tracks and batches is not None:
            batches.add_(1)
            if share is None:  # the mean of all batches so far
                share = 1.0 / float(batches)
        training = trains or (mean is None and var is None)
        running = (mean, var) if tracks or not trains else (None, None)
        own: Any = weight, bias, training, 0.0 if share is None else share, norm.eps
        return cls._runs(input, *running, *own, **_there(activation=activation, **around))


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d): ...


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d): ...


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d): ...


# torch's classes, and those that stand in for them
_TORCHS: dict[type, Any] = {
    getattr(nn, cls.__name__): cls
    for cls in (LayerNorm, RMSNorm, GroupNorm, BatchNorm1d, BatchNorm2d, BatchNorm3d)
}
