"""Folding a batch norm in evaluation into the convolution before it: when it is done, and the
call."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from deuteron import functional as F
from deuteron.functional.context import any_requires_grad, under_autocast
from deuteron.functional.delegate import is_small
from deuteron.nn.authors import is_bare
from deuteron.nn.norm import fusing

CONVS = tuple(getattr(nn, f"Conv{kind}{n}d") for kind in ("", "Transpose") for n in (1, 2, 3))
WEIGHTS = 4  # the result has at least so many times the bytes of the weight, which is rewritten


def folds(conv: Any, bn: Any, x: Tensor, residual: Any = None) -> bool:
    """Whether the norm is folded into the weight. It must use running statistics; no gradient may
    be needed, and no hook may watch what lies between; the convolution must do nothing that ours
    does not; and what is saved, one pass over the result, must be more than writing the weight anew
    costs."""
    if bn.training or type(conv) not in CONVS or fusing(bn) is None:
        return False
    if getattr(bn, "running_mean", None) is None:
        return False
    plain = conv.padding_mode == "zeros" and not isinstance(conv.padding, str)
    if not is_bare(conv) or not plain or x.dim() != conv.weight.dim():
        return False
    casts = under_autocast(x)
    kind = torch.get_autocast_dtype(x.device.type) if casts else x.dtype
    if not casts and kind != conv.weight.dtype:
        return False
    if residual is not None and not (isinstance(residual, Tensor) and residual.dtype == kind):
        return False  # the residual's type would decide on the type of the sum
    own = (conv.weight, conv.bias, bn.weight, bn.bias)
    if torch.is_grad_enabled() and any_requires_grad((x, residual, *own)):
        return False
    pixels = x.numel() // max(x.shape[1], 1)
    pixels = pixels * prod(conv.stride) if conv.transposed else pixels // prod(conv.stride)
    made = pixels * conv.out_channels * x.element_size()
    return made >= WEIGHTS * conv.weight.nbytes and not is_small(x, made)


def folded(conv: Any, bn: Any, x: Tensor, activation: str | None, residual: Any) -> Tensor:
    """Run a convolution and its norm by one call."""
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
