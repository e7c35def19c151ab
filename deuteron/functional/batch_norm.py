"""Batch normalisation, followed by a residual and an activation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_cudnn_enabled as cudnn_enabled

from deuteron.errors import BindError
from deuteron.functional.arguments import has_memory
from deuteron.functional.context import any_requires_grad, gradient_follows, in_transform, is_seen
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, delegates, is_small
from deuteron.functional.operators import TORCHS, activated, schema
from deuteron.ops import Ops, Sym, table
from deuteron.ops.activated import can_follow
from deuteron.ops.norm import suggested
from deuteron.ops.signs import packing
from deuteron.target import has_triton


def _train(
    b: Ops, x: Sym, *tensors: Sym | None, activation: str | None, keep_signs: bool, **how: float
) -> tuple[Sym, ...]:
    inside = activation if activation and can_follow(activation) else "none"
    image = x.type.with_layout(suggested(x.type))
    packed = packing(image) if keep_signs and has_triton() else "none"
    y, *stats = b.batch_norm_act(x, *tensors, **how, activation=inside, packed=packed)
    return activated(b, y, None if inside == activation else activation), *stats


def _given(b: Ops, x: Sym, *tensors: Sym | None, eps: float, activation: str | None) -> Sym:
    *params, residual = tensors
    y = b.one("batch_norm", x, *params, eps=eps)
    return activated(b, y if residual is None else y + residual, activation)


RUNNING = ("running_mean", "running_var")
ATTRS = {"eps": "float", "activation": "str | None"}
_TRAINED_ATTRS = {"momentum": "float", "keep_signs": "bool"} | ATTRS
_TRAINED = schema(table.get("batch_norm_act"))[0], _TRAINED_ATTRS
SILENT = (1, 2, 3, 4, 5)
TRAIN = Function("batch_norm_train", _train, _TRAINED, silent=SILENT, overwritten=RUNNING)
# the same for eager calls: the kernel that computes the new running statistics overwrites the old
IN_PLACE = Function(
    "batch_norm_in_place",
    _train,
    _TRAINED,
    silent=SILENT,
    overwritten=RUNNING,
    eager=True,
    into=dict(enumerate(RUNNING, 1)),
    handed=1,
)
TENSORS = schema(table.get("batch_norm"))[0] | {"residual": "Sym | None"}
GIVEN = Function("batch_norm", _given, (TENSORS, ATTRS))


def is_read_right(x: Tensor, weight: Tensor | None, training: bool) -> bool:
    """Whether torch's batch norm on a CPU and its gradient read these memory layouts correctly. In
    training, channels last loses digits where the mean is large. A channels-last input that is one
    image, one row or one column (such as an image [H, W, C] that was permuted and unsqueezed) is
    taken for row-major by the gradient. And weights are read as if there were no gaps between
    them."""
    if weight is not None and not weight.is_contiguous():
        return False
    return x.is_contiguous() or not (training or 1 in x.shape)


def _wants_signs(x: Tensor, *others: Tensor | None, activation: str | None) -> bool:
    """Whether a gradient on a GPU will need the signs of relu's result after a residual."""
    if others[-1] is None or activation != "relu" or not torch.is_grad_enabled():
        return False
    return any_requires_grad((x, *others)) and x.is_cuda


def check_given(asked: str, remedy: str, *running: Tensor | None) -> None:
    """Refuse a call that would normalise by running statistics that are not given."""
    if any(t is None for t in running):
        raise BindError("running_mean and running_var are needed", asked=asked, remedy=remedy)


def check_written(asked: str, *running: Tensor | None) -> None:
    """Refuse running statistics that need a gradient, because the call writes to them."""
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in running):
        wrong = "running_mean and running_var are written to and have no gradient"
        asked = f"{asked} with running statistics that require one"
        remedy = "give running_mean.detach() and running_var.detach()"
        raise BindError(wrong, asked=asked, remedy=remedy)


def overwrite(running: Sequence[Tensor | None], new: Sequence[Tensor]) -> None:
    """Write the new running statistics over those that were given. Inside ``torch.func`` nothing
    may write to a tensor from outside, but to an alias of it, which is how torch's own norms do it;
    and vmap supports only one copy at a time."""
    pairs = [(r, n) for r, n in zip(running, new, strict=True) if r is not None]
    with torch.no_grad():
        if in_transform():
            for r, n in pairs:
                torch.ops.aten.alias(r).copy_(n)
        elif pairs:
            torch._foreach_copy_([r for r, _ in pairs], [n for _, n in pairs])


def _torch_batch_norm(
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
) -> Any:
    joined = residual is not None or activation is not None
    if training and x.numel() <= x.shape[1]:
        return NotImplemented  # torch would write statistics even of an empty batch
    if x.is_cpu and (training or joined) and not is_small(x):
        return NotImplemented
    if x.is_cpu and not is_read_right(x, weight, training):
        return NotImplemented
    # In training ours takes several launches, too. Otherwise torch's single launch takes a GPU
    # longer than ours does.
    if not training and (joined or x.is_cuda) and not gradient_follows(x, weight, bias, residual):
        return NotImplemented
    stats = (running_mean, running_var)
    # F.batch_norm calls this one, after checks that were made above
    y = torch.batch_norm(x, weight, bias, *stats, training, momentum, eps, cudnn_enabled())
    y = y if residual is None else y + residual
    return y if activation is None else TORCHS[activation](y)


def _joined(*_: Any, residual: Any = None, activation: Any = None, **__: Any) -> int:
    return (residual is not None) + (activation is not None)


@delegates(_torch_batch_norm, several=_joined, on_cpu=ANY, autocast=True, passes=8.0)
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
    """Return activation((x − mean) / √(var + eps) · weight + bias + residual), normalised by
    channel.

    As ``torch.nn.functional.batch_norm``. With ``training`` mean and var are those of the batch,
    and the running statistics are updated in place; without it the running statistics are used, and
    have to be given. In the same passes over memory, forward and backward:

    residual    is added after the norm
    activation  is applied last: "relu", "silu" or the name of another elementwise operator

    Running statistics that need a gradient are refused in training.
    """
    running = running_mean, running_var
    attrs: Any = {"eps": eps, "activation": activation}
    if not training:
        check_given("batch_norm(…, training=False)", "give both, or training=True", *running)
        return GIVEN.one(x, *running, weight, bias, residual, **attrs)
    check_written("batch_norm(…, training=True)", *running)
    attrs["keep_signs"] = _wants_signs(x, weight, bias, residual, activation=activation)
    if x.numel() and not is_seen() and has_memory(x):
        return IN_PLACE.one(x, weight, bias, *running, residual, momentum=momentum, **attrs)
    y, mean, var, *_ = TRAIN(x, weight, bias, *running, residual, momentum=momentum, **attrs)
    if x.numel():
        overwrite(running, (mean, var))
    result: Tensor = y
    return result
