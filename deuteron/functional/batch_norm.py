"""Batch normalisation, with a residual and an activation after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._C import _get_cudnn_enabled as may_use_cudnn

from deuteron.errors import BindError
from deuteron.functional.core import Function, any_requires_grad
from deuteron.functional.library import (
    ANY,
    delegates,
    in_transform,
    is_launch_bound,
    several_calls_win,
)
from deuteron.functional.operators import ACTIVATIONS, TORCHS, activated
from deuteron.functional.wrapper import Plain
from deuteron.ops import Ops, Sym
from deuteron.ops.norm import suggested
from deuteron.ops.signs import packing
from deuteron.target import has_triton

Tensor = torch.Tensor


def _train(
    b: Ops,
    x: Sym,
    weight: Sym | None,
    bias: Sym | None,
    running_mean: Sym | None,
    running_var: Sym | None,
    residual: Sym | None,
    *,
    momentum: float,
    eps: float,
    activation: str | None,
    keep_signs: bool,
) -> tuple[Sym, ...]:
    inside = activation if activation in ACTIVATIONS else "none"
    image = x.type.with_layout(suggested(x.type))
    y, *stats = b.batch_norm_act(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        residual,
        momentum=momentum,
        eps=eps,
        activation=inside,
        packed=packing(image) if keep_signs and has_triton() else "none",
    )
    return activated(b, y, None if inside == activation else activation), *stats


def _given(
    b: Ops,
    x: Sym,
    mean: Sym,
    var: Sym,
    weight: Sym | None,
    bias: Sym | None,
    residual: Sym | None,
    *,
    eps: float,
    activation: str | None,
) -> Sym:
    y = b.one("batch_norm", x, mean, var, weight, bias, eps=eps)
    return activated(b, y if residual is None else y + residual, activation)


TRAIN = Function(
    "batch_norm_train", _train, silent=(1, 2, 3, 4), overwritten=("running_mean", "running_var")
)
GIVEN = Function("batch_norm", _given)


def _torch_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    activation: str | None,
) -> Any:
    more = residual is not None or activation is not None
    on_gpu = x.is_cuda
    if activation not in KNOWN:
        return NotImplemented
    if (more or training) and not on_gpu and not is_launch_bound(x):
        return NotImplemented
    if x.is_cpu and not is_read_right(x, weight, training):
        return NotImplemented
    # in training ours is several launches, too; without, torch's one takes longer than ours
    one_of_ours = not training and (more or on_gpu)
    if one_of_ours and not several_calls_win(x, weight, bias, residual):
        return NotImplemented
    if eps <= 0.0 or (training and x.numel() <= x.shape[1]):
        return NotImplemented  # what torch.nn.functional's refuses, or looks at twice
    y = torch.batch_norm(
        x, weight, bias, running_mean, running_var, training, momentum, eps, may_use_cudnn()
    )
    if residual is not None:
        y = y + residual
    return y if activation is None else TORCHS[activation](y)


KNOWN = {None, *TORCHS}
CALL = "plain(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn())"
# what ``is_read_right`` asks, of what is the usual order
READ_RIGHT = "(x.is_cuda or x.is_contiguous() and (weight is None or weight.is_contiguous()))"
LEARNED = f"is_grad_enabled() and not training and eps > 0.0 and {READ_RIGHT}"
NAMES = {"cudnn": may_use_cudnn, "after": TORCHS}


def is_read_right(x: Tensor, weight: Tensor | None, training: bool) -> bool:
    """Whether torch's kernels on a CPU, and those of the gradient, find the numbers and keep their
    digits. Channels last lose those of a large mean in training; one image of them, or one row or
    column (an image [H, W, C] that was permuted and unsqueezed), is taken for row-major by the
    gradient; and weights are read as if there were no gaps between them."""
    if weight is not None and not weight.is_contiguous():
        return False
    return x.is_contiguous() or not (training or 1 in x.shape)


def _wants_signs(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> bool:
    """Whether a gradient will ask for the signs after relu, on a GPU."""
    if residual is None or activation != "relu" or not torch.is_grad_enabled():
        return False
    return any_requires_grad((x, weight, bias, residual)) and x.is_cuda


def check_given(asked: str, remedy: str, *running: Tensor | None) -> None:
    """Running statistics are normalised by: they have to be there."""
    if any(t is None for t in running):
        raise BindError("running_mean and running_var are needed", asked=asked, remedy=remedy)


def check_written(asked: str, *running: Tensor | None) -> None:
    """Running statistics are written to: they may not need a gradient."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in running):
        raise BindError(
            "running_mean and running_var are written to and have no gradient",
            asked=f"{asked} with running statistics that require one",
            remedy="give running_mean.detach() and running_var.detach()",
        )


def overwrite(running: Sequence[Tensor | None], new: Sequence[Tensor]) -> None:
    """Write new running statistics over those that were given. ``torch.func`` lets nobody write to
    a tensor from outside, but to another name of it, which torch's own norms use; and vmap knows no
    more than one copy at a time."""
    pairs = [(r, n) for r, n in zip(running, new, strict=True) if r is not None]
    with torch.no_grad():
        if in_transform():
            for r, n in pairs:
                torch.ops.aten.alias(r).copy_(n)
        elif pairs:
            torch._foreach_copy_([r for r, _ in pairs], [n for _, n in pairs])


@delegates(
    _torch_batch_norm,
    plain=(
        Plain(
            torch.batch_norm,
            CALL,
            where=f"training and eps > 0.0 and x.numel() > x.shape[1] and {READ_RIGHT}",
            given=NAMES,
        ),
        Plain(torch.batch_norm, CALL, where=LEARNED, given=NAMES, learns=("x",)),
        Plain(
            torch.batch_norm,
            f"after[activation]({CALL})",
            where=f"activation in after and {LEARNED}",
            given=NAMES,
            learns=("x",),
        ),
    ),
    keeps_type=True,
    on_cpu=ANY,
)
def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    activation: str | None = None,
) -> Tensor:
    """activation((x − mean) / √(var + eps) · weight + bias + residual) for each channel.

    As ``torch.nn.functional.batch_norm``, running statistics updated in place when training, and:
    ``residual`` is added after, then ``activation`` ("relu", "silu", …) applied, in the same
    passes over memory, forward and backward. Without training the running statistics are used.
    """
    if not training:
        asked, remedy = "batch_norm(…, training=False)", "give both, or training=True"
        check_given(asked, remedy, running_mean, running_var)
        return GIVEN.one(
            x, running_mean, running_var, weight, bias, residual, eps=eps, activation=activation
        )
    check_written("batch_norm(…, training=True)", running_mean, running_var)
    y, mean, var, *_ = TRAIN(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        residual,
        momentum=momentum,
        eps=eps,
        activation=activation,
        keep_signs=_wants_signs(x, weight, bias, residual, activation),
    )
    if x.numel():
        overwrite((running_mean, running_var), (mean, var))
    result: Tensor = y
    return result
