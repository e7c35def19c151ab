"""A convolution with the batch norm, the residual and the activation that follow it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.autocast import lower
from deuteron.functional.batch_norm import ATTRS, batch_norm, check_given
from deuteron.functional.context import any_requires_grad
from deuteron.functional.core import Function
from deuteron.functional.delegate import delegates
from deuteron.functional.operators import activated, schema
from deuteron.ops import Ops, Sym, table
from deuteron.ops.checks import check_params

Sizes = int | Sequence[int]
_CONV = schema(table.get("conv"))
_NORM = ("running_mean", "running_var", "norm_weight", "norm_bias")


def _folded(
    b: Ops, x: Sym, weight: Sym, bias: Sym | None, *rest: Sym | None, eps: float,
    activation: str | None, **how: Any,
) -> Sym:  # fmt: skip
    """Write a convolution whose weight and bias include the norm, computed in float32 at least, so
    that the images are read and written only once."""
    mean, var, scale, shift, residual = rest
    assert mean is not None and var is not None
    made = weight.shape[1] * how["groups"] if how["transposed"] else weight.shape[0]
    types = {n: None if t is None else t.type for n, t in zip(_NORM, rest, strict=False)}
    check_params("conv_bn_act", x.type, (made,), types)
    factor = b.rsqrt(b.upcast(var) + eps)
    factor = factor if scale is None else factor * b.upcast(scale)
    first = b.upcast(mean) if bias is None else b.upcast(mean) - b.upcast(bias)
    added = -first * factor if shift is None else b.upcast(shift) - first * factor
    taps = weight.rank - 2
    if how["transposed"]:  # [in, out/groups, …]: channels of a group follow each other
        groups, rows, outs = how["groups"], weight.shape[0], weight.shape[1]
        each = b.reshape(factor, shape=(groups, 1, outs))
        each = b.expand(each, shape=(groups, rows // groups, outs))
        spread = b.reshape(each, shape=(rows, outs, *(1,) * taps))
    else:
        spread = b.reshape(factor, shape=(-1, 1, *(1,) * taps))
    kernel = b.to(b.upcast(weight) * spread, weight.dtype)
    y = b.one("conv", x, kernel, b.to(added, x.dtype), **how)
    return activated(b, y if residual is None else y + residual, activation)


_TENSORS = _CONV[0] | dict.fromkeys(_NORM[:2], "Sym")
_TENSORS |= dict.fromkeys((*_NORM[2:], "residual"), "Sym | None")
FOLDED = Function("conv_bn_act", _folded, (_TENSORS, _CONV[1] | ATTRS))


@delegates()
def conv_bn_act(
    x: Tensor,
    weight: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Sizes = 0,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """Return activation(batch_norm(conv(x)) + residual), the block that most networks of images are
    made of, over 1, 2 or 3 dimensions of space.

    weight, bias, stride, padding, dilation, groups
                  those of ``torch.nn.functional.conv2d``
    transposed    make it a transposed convolution: then these, and ``output_padding``, are those of
                  ``conv_transpose2d``
    norm_weight, norm_bias
                  [C], the factor and the offset of the norm for each channel
    running_mean, running_var, training, momentum, eps
                  those of ``torch.nn.functional.batch_norm``
    residual      is added after the norm
    activation    is applied last: "relu", "silu" or the name of another elementwise operator

    With ``training`` the norm uses the statistics of the batch and updates the running ones in
    place. Without it, it uses the running ones, which have to be given; if no gradient is needed
    either, the norm is folded into the weight, so that one kernel does it all. In a plan
    (``dt.train_step``, ``torch.compile(backend="deuteron")``) with ``find=True`` the kernel of the
    convolution may take the statistics as it runs.

    >>> y = dt.functional.conv_bn_act(x, w, mean, var, gamma, beta, padding=1, training=True,
    ...                               residual=x, activation="relu")
    """
    space = weight.dim() - 2
    if not 1 <= space <= 3 or x.dim() != weight.dim():
        wrong = f"x has {x.dim()} dimensions and the weight {weight.dim()}"
        remedy = "both are [N, C, …] with 1, 2 or 3 dimensions of space"
        raise BindError(wrong, asked="conv_bn_act(x, weight, …)", remedy=remedy)
    named = {"stride": stride, "padding": padding, "dilation": dilation}
    how = {name: _each(value, space) for name, value in named.items()}
    how["output_padding"] = _each(output_padding, space)
    norm = (running_mean, running_var, norm_weight, norm_bias)
    residual = None if residual is None else lower(residual)[0]  # of the convolution's type
    if not training:
        remedy = "give both, or training=True"
        check_given("conv_bn_act(…, training=False)", remedy, running_mean, running_var)
        if not (torch.is_grad_enabled() and any_requires_grad((x, weight, bias, *norm, residual))):
            low = [None if t is None else lower(t)[0] for t in (x, weight, bias)]
            attrs: Any = {**how, "groups": groups, "transposed": transposed, "eps": eps}
            return FOLDED.one(*low, *norm, residual, **attrs, activation=activation)
    z = torch.convolution(
        x, weight, bias, how["stride"], how["padding"], how["dilation"], transposed,
        how["output_padding"], groups,
    )  # fmt: skip
    return batch_norm(z, *norm, training, momentum, eps, residual=residual, activation=activation)


def _each(value: Sizes, space: int) -> tuple[int, ...]:
    return (value,) * space if isinstance(value, int) else tuple(value)
