"""Blocks of convolutions: one with batch norm, a residual and an activation, and one in two
steps."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from deuteron.errors import BindError
from deuteron.functional.operators import TORCHS
from deuteron.kinds import checked
from deuteron.nn import norm as norms
from deuteron.nn.authors import is_bare
from deuteron.nn.blocks import MODULES
from deuteron.nn.folded import folded, folds
from deuteron.nn.norm import fusing
from deuteron.nn.stand_in import as_leaf

_CONVS: dict[tuple[int, bool], Any] = {
    (n, turned): getattr(nn, f"Conv{'Transpose' if turned else ''}{n}d")
    for n in (1, 2, 3)
    for turned in (False, True)
}
_NORMS: dict[int, Any] = {n: getattr(norms, f"BatchNorm{n}d") for n in (1, 2, 3)}


class ConvBNAct(nn.Module):
    """activation(bn(conv(input)) + residual): a convolution, batch norm, and an activation, with an
    optional ``residual`` that is added before the activation.

    The children ``conv``, a convolution of ``torch.nn``, and ``bn``, a batch norm, have the
    parameters, so the state dict is that of ``nn.Sequential(OrderedDict(conv=…, bn=…))``.

    in_channels, out_channels, kernel_size, stride, padding, dilation, groups
                as for ``torch.nn.Conv2d``
    bias        of the convolution; a norm in training makes it superfluous
    eps, momentum, affine, track_running_stats
                as for ``torch.nn.BatchNorm2d``
    activation  the name of a function ("relu", "silu", …), or None
    dims        over how many dimensions of space it goes: 1, 2 or 3
    transposed  makes it a transposed convolution, which takes ``output_padding``
    device, dtype
                of all parameters

    In training mode the statistics of the batch are used, and the running ones updated; a bn that
    was frozen (``block.bn.eval()``) uses the running ones, with gradients for all parameters. In
    evaluation, where no gradient is asked for, the norm is folded into the weight. ``bn`` may be a
    ``SyncBatchNorm``, whose statistics are those of all ranks.

    >>> block = dt.nn.ConvBNAct(64, 64, 3, padding=1)
    >>> y = block(x, residual=x)
    """

    conv: _ConvNd
    bn: _BatchNorm

    @checked(name="ConvBNAct")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = False,
        activation: str | None = "relu",
        *,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dims: int = 2,
        transposed: bool = False,
        output_padding: Any = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if dims not in _NORMS:
            wrong, remedy = f"dims={dims!r} dimensions of space", "use 1, 2 or 3"
            raise BindError(wrong, asked="ConvBNAct(…)", remedy=remedy)
        self.activation = _known(activation)
        where = {"device": device, "dtype": dtype}
        how: dict[str, Any] = {"groups": groups, "bias": bias, "dilation": dilation, **where}
        if transposed:
            how["output_padding"] = output_padding
        sizes = in_channels, out_channels, kernel_size, stride, padding
        self.conv = _CONVS[dims, transposed](*sizes, **how)
        kept = eps, momentum, affine, track_running_stats
        self.bn = _NORMS[dims](out_channels, *kept, **where)

    @classmethod
    def from_modules(
        cls, conv: nn.Module, bn: nn.Module, act: nn.Module | str | None = None
    ) -> ConvBNAct:
        """Make a block of modules that exist: a convolution of ``torch.nn``, a batch norm and, if
        one follows, an activation, as a module or by its name. Parameters, buffers and modes are
        theirs, not copies.

        >>> block = dt.nn.ConvBNAct.from_modules(net.conv1, net.bn1, net.relu)
        """
        if not isinstance(conv, _ConvNd) or not isinstance(bn, _BatchNorm):
            wrong = f"{type(conv).__name__} and {type(bn).__name__} are no convolution and its norm"
            remedy = "give a convolution of torch.nn and the batch norm that reads it"
            raise BindError(wrong, asked="ConvBNAct.from_modules(conv, bn)", remedy=remedy)
        if conv.out_channels != bn.num_features:
            wrong = f"conv makes {conv.out_channels} channels, bn takes {bn.num_features}"
            remedy = "give the norm of this convolution"
            raise BindError(wrong, asked="ConvBNAct.from_modules(conv, bn)", remedy=remedy)
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.activation = _named(act)
        made.conv, made.bn, made.training = conv, _ours(bn), bn.training
        return made

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        if (leaf := as_leaf(self, input, residual)) is not None:
            found: Tensor = leaf
            return found
        conv, bn = self.conv, self.bn
        around = {} if residual is None else {"residual": residual}
        if folds(conv, bn, input, residual):
            return folded(conv, bn, input, self.activation, residual)
        z = conv(input)
        if (kind := fusing(bn)) is not None:
            y: Tensor = kind.fused(bn, z, self.activation, **around)
            return y
        y = bn(z)
        y = y if residual is None else y + residual
        return y if self.activation is None else TORCHS[self.activation](y)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class SeparableConv(nn.Module):
    """A convolution in two steps, each a :class:`ConvBNAct` with batch norm and ``activation``:
    ``depthwise`` convolves each channel by itself, then ``pointwise`` mixes the channels pixel by
    pixel.

    in_channels, out_channels
                of ``input`` and of the result
    kernel_size, stride, padding, dilation
                those of the first step, as for ``torch.nn.Conv2d``
    bias, dims  those of both steps; ``dims``: over how many dimensions of space they go

    >>> block = dt.nn.SeparableConv(64, 128, 3, padding=1, activation="relu6")
    """

    @checked(name="SeparableConv")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        bias: bool = False,
        activation: str | None = "relu",
        dims: int = 2,
    ) -> None:
        super().__init__()
        window, own = (kernel_size, stride, padding, dilation), (bias, activation)
        sizes = in_channels, in_channels
        self.depthwise = ConvBNAct(*sizes, *window, in_channels, *own, dims=dims)
        self.pointwise = ConvBNAct(in_channels, out_channels, 1, 1, 0, 1, 1, *own, dims=dims)

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = self.pointwise(self.depthwise(input))
        return y


def _ours(bn: _BatchNorm) -> _BatchNorm:
    """Return a batch norm of torch's as one of ours, with the same parameters, that can do what
    follows it as well. Any other one, such as a synchronised one, is returned as it is."""
    kinds: Any = {getattr(nn, cls.__name__): cls for cls in _NORMS.values()}
    if type(bn) not in kinds or not is_bare(bn):
        return bn
    twin = copy.copy(bn)
    twin.__class__ = kinds[type(bn)]
    return twin


def _known(activation: str | None) -> str | None:
    if activation is not None and activation not in TORCHS:
        wrong, remedy = f"there is no activation {activation!r}", f"use one of {', '.join(TORCHS)}"
        raise BindError(wrong, asked="ConvBNAct(…)", remedy=remedy)
    return activation


def _named(act: nn.Module | str | None) -> str | None:
    """Return the name of an activation, which may be given as a module."""
    if act is None or isinstance(act, str):
        return _known(act)
    kinds: Any = {**MODULES, nn.Tanh: "tanh", nn.Sigmoid: "sigmoid", nn.Mish: "mish"}
    name: str | None = kinds.get(type(act))
    if name is None and type(act) is nn.GELU:
        name = "gelu_tanh" if act.approximate == "tanh" else "gelu"
    if name is None and type(act) is not nn.Identity:
        wrong = f"{type(act).__name__} has no name among the activations"
        remedy = "leave it out, and apply it to what the block gives"
        raise BindError(wrong, asked="ConvBNAct.from_modules(…, act)", remedy=remedy)
    return name
