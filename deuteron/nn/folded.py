"""Batch norm in evaluation inside of the convolution before it: whether, and the call."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from deuteron import functional as F
from deuteron.functional.context import any_requires_grad, under_autocast
from deuteron.functional.delegate import is_small
from deuteron.nn.norm import fusing

CONVS = tuple(getattr(nn, f"Conv{kind}{n}d") for kind in ("", "Transpose") for n in (1, 2, 3))
WEIGHTS = 4  # times the bytes of the weight that the result has, at least: that is read and written


def folds(conv: Any, bn: Any, x: Tensor, residual: Any = None) -> bool:
    """Whether the norm goes into the weight: it uses running statistics, nobody asks for a gradient
    or listens in between, the convolution does nothing beside what ours does, and what is saved,
    one pass over the result, is more than a weight that is written anew."""
    if bn.training or type(conv) not in CONVS or fusing(bn) is None:
        return False
    if getattr(bn, "running_mean", None) is None:
        return False
    plain = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    heard = conv._forward_hooks or conv._forward_pre_hooks
    if heard or not plain or x.dim() != conv.weight.dim():
        return False
    casts = under_autocast(x)
    kind = torch.get_autocast_dtype(x.device.type) if casts else x.dtype
    if not casts and kind != conv.weight.dtype:
        return False
    if residual is not None and not (isinstance(residual, Tensor) and residual.dtype == kind):
        return False  # what is added decides on the type of the sum
    own = (conv.weight, conv.bias, bn.weight, bn.bias)
    if torch.is_grad_enabled() and any_requires_grad((x, residual, *own)):
        return False
    pixels = x.numel() // max(x.shape[1], 1)
    pixels = pixels * prod(conv.stride) if conv.transposed else pixels // prod(conv.stride)
    made = pixels * conv.out_channels * x.element_size()
    return made >= WEIGHTS * conv.weight.nbytes and not is_small(x, made)


def folded(conv: Any, bn: Any, x: Tensor, activation: str | None, residual: Any) -> Tensor:
    """A convolution and its norm by one call."""
    return F.conv_bn_act(
        x,
        conv.weight,
        bn.running_mean,
        bn.running_var,
        bn.weight,
        bn.bias,
        bias=conv.bias,
        stride=conv.stride,
        padding=conv.padding,
        dilation=conv.dilation,
        groups=conv.groups,
        transposed=isinstance(conv, _ConvTransposeNd),
        output_padding=conv.output_padding,
        eps=bn.eps,
        residual=residual,
        activation=activation,
    )
