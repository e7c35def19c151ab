"""Normalisation, with what usually stands around it: a bias and a residual before, an activation
after. One read of x, one write of the result; the sum, where a residual is given, is a second
result."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import _fused_rms_norm as rms_norm_kernel
from torch._C import _get_cudnn_enabled as may_use_cudnn

from deuteron.errors import BindError
from deuteron.functional.autocast import Cast
from deuteron.functional.batch_norm import check_given, check_written, is_read_right, overwrite
from deuteron.functional.core import Function
from deuteron.functional.library import ANY, delegates, is_launch_bound, several_calls_win
from deuteron.functional.operators import TORCHS, activated
from deuteron.functional.wrapper import Plain
from deuteron.ir.dtype import float32
from deuteron.ops import Ops, Sym
from deuteron.ops.norm import check_params

Tensor = torch.Tensor
USUAL_EPS = 1e-5  # torch's, of all norms but rms_norm


def _summed(b: Ops, x: Sym, before: Sym | None, residual: Sym | None) -> Sym:
    if before is not None:
        x = x + before
    return x if residual is None else x + residual


def _finished(
    b: Ops, y: Sym, total: Sym, residual: Sym | None, activation: str | None
) -> Sym | tuple[Sym, Sym]:
    y = activated(b, y, activation)
    return y if residual is None else (y, total)


def _layer_norm(
    b: Ops,
    x: Sym,
    weight: Sym | None,
    bias: Sym | None,
    before: Sym | None,
    residual: Sym | None,
    *,
    dims: int,
    eps: float,
    activation: str | None,
) -> Sym | tuple[Sym, Sym]:
    total = _summed(b, x, before, residual)
    y = b.one("layer_norm", total, weight, bias, dims=dims, eps=eps)
    return _finished(b, y, total, residual, activation)


def _widened(build: Callable[..., Sym | tuple[Sym, Sym]]) -> Callable[..., Any]:
    """A norm in float32 of a sum that stays in its type: the stream of a network."""
    parameters = inspect.signature(build)
    names = list(parameters.parameters)[1:]

    def wide(b: Ops, *tensors: Sym | None, **attrs: Any) -> Sym | tuple[Sym, Sym]:
        given = dict(zip(names, tensors, strict=False))
        before, residual = given.pop("before"), given.pop("residual")
        x = given.pop("x")
        assert x is not None
        total = _summed(b, x, before, residual)
        others = {k: None if t is None else b.upcast(t) for k, t in given.items()}
        y = build(b, b.upcast(total), **others, before=None, residual=None, **attrs)
        assert isinstance(y, Sym)
        return y if residual is None else (y, total)

    wide.__signature__ = parameters  # type: ignore[attr-defined]
    return wide


def _rms_norm(
    b: Ops,
    x: Sym,
    weight: Sym | None,
    before: Sym | None,
    residual: Sym | None,
    *,
    dims: int,
    eps: float,
    activation: str | None,
) -> Sym | tuple[Sym, Sym]:
    total = _summed(b, x, before, residual)
    wide = float32 if total.dtype.is_low else total.dtype
    if weight is not None and weight.dtype not in (total.dtype, wide):
        weight = b.to(weight, wide)  # of any type, as torch's may be
    y = b.one("rms_norm", total, weight, dims=dims, eps=eps)
    return _finished(b, y, total, residual, activation)


def _group_norm(
    b: Ops,
    x: Sym,
    weight: Sym | None,
    bias: Sym | None,
    before: Sym | None,
    residual: Sym | None,
    *,
    groups: int,
    eps: float,
    activation: str | None,
) -> Sym | tuple[Sym, Sym]:
    total = _summed(b, x, before, residual)
    y = b.one("group_norm", total, weight, bias, groups=groups, eps=eps)
    return _finished(b, y, total, residual, activation)


def _instance_norm(
    b: Ops,
    x: Sym,
    weight: Sym | None,
    bias: Sym | None,
    before: Sym | None,
    residual: Sym | None,
    *,
    eps: float,
    activation: str | None,
) -> Sym | tuple[Sym, Sym]:
    total = _summed(b, x, before, residual)
    y = b.one("instance_norm", total, weight, bias, eps=eps)
    return _finished(b, y, total, residual, activation)


def _instance_norm_tracked(
    b: Ops,
    x: Sym,
    weight: Sym | None,
    bias: Sym | None,
    running_mean: Sym | None,
    running_var: Sym | None,
    before: Sym | None,
    residual: Sym | None,
    *,
    momentum: float,
    eps: float,
    activation: str | None,
) -> tuple[Sym, ...]:
    """The running mean and variance, moved towards those of the images, and then the results. One
    mean over images and positions is the mean over the images of theirs."""
    total = _summed(b, x, before, residual)
    y = b.one("instance_norm", total, weight, bias, eps=eps)
    running = {"running_mean": running_mean, "running_var": running_var}
    types = {name: None if t is None else t.type for name, t in running.items()}
    check_params("instance_norm", total.type, total.shape[1:2], types)
    wide, positions = b.upcast(total), tuple(range(2, total.rank))
    mean = b.one("mean", wide, axes=(0, *positions))
    var = b.one("mean", b.one("var", wide, axes=positions, correction=1), axes=(0,))
    found = _finished(b, y, total, residual, activation)
    moved = (
        _moved(b, old, new, momentum) for old, new in ((running_mean, mean), (running_var, var))
    )
    return *moved, *(found if isinstance(found, tuple) else (found,))


def _moved(b: Ops, old: Sym | None, new: Sym, share: float) -> Sym:
    """``old`` with a share of ``new``, in its own type."""
    return new if old is None else b.to(b.upcast(old) * (1.0 - share) + new * share, old.dtype)


def _instance_norm_given(
    b: Ops,
    x: Sym,
    mean: Sym,
    var: Sym,
    weight: Sym | None,
    bias: Sym | None,
    before: Sym | None,
    residual: Sym | None,
    *,
    eps: float,
    activation: str | None,
) -> Sym | tuple[Sym, Sym]:
    total = _summed(b, x, before, residual)
    y = b.one("batch_norm", total, mean, var, weight, bias, eps=eps)
    return _finished(b, y, total, residual, activation)


LAYER = Cast("layer_norm", _layer_norm, _widened(_layer_norm))
RMS = Cast("rms_norm", _rms_norm, _widened(_rms_norm))
GROUP = Cast("group_norm", _group_norm, _widened(_group_norm))
INSTANCE = Function("instance_norm", _instance_norm)
INSTANCE_TRACKED = Function(
    "instance_norm_tracked",
    _instance_norm_tracked,
    silent=(0, 1),
    overwritten=("running_mean", "running_var"),
)
INSTANCE_GIVEN = Function("instance_norm_given", _instance_norm_given)


def _dims(name: str, x: Tensor, normalized_shape: int | Sequence[int]) -> int:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise BindError(
            f"normalized_shape {list(shape)} is not how x {list(x.shape)} ends",
            asked=f"{name}(x, {list(shape)})",
            remedy=f"use {list(x.shape[-1:])} for the last dimension",
        )
    return len(shape)


# ---- the same by torch's calls, for shapes where launches are all there is to pay


def _torch_around(
    norm: Callable[..., Tensor],
    given: tuple[Any, ...],
    x: Tensor,
    before: Tensor | None,
    residual: Tensor | None,
    activation: str | None,
) -> Any:
    """torch's norm, with further arguments, and what stands around it."""
    if before is not None:
        x = x + before
    if residual is not None:
        x = x + residual
    y = norm(x, *given)
    if activation is not None:
        y = TORCHS[activation](y)
    return y if residual is None else (y, x)


def _torch_layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    bias_before: Tensor | None,
    activation: str | None,
) -> Any:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else normalized_shape
    if residual is None and bias_before is None and activation is None:
        if eps == USUAL_EPS:  # C++ takes 0.3 µs to read a number
            return torch.layer_norm(x, shape, weight, bias)
        return torch.layer_norm(x, shape, weight, bias, eps)
    if activation not in KNOWN or not several_calls_win(x, weight, bias, residual, bias_before):
        return NotImplemented
    return _torch_around(
        torch.layer_norm, (shape, weight, bias, eps), x, bias_before, residual, activation
    )


def _torch_rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    eps: float | None,
    residual: Tensor | None,
    bias_before: Tensor | None,
    activation: str | None,
) -> Any:
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if x.shape[-len(shape) :] != shape or not shape:
        return NotImplemented  # of which the kernel makes something
    if weight is not None and (weight.dtype is not x.dtype or weight.shape != shape):
        return NotImplemented  # torch answers in the wider type
    if residual is None and bias_before is None and activation is None:
        # what torch.rms_norm calls in turn
        return rms_norm_kernel(x, shape, weight, eps)[0]
    if activation not in KNOWN or not several_calls_win(x, weight, residual, bias_before):
        return NotImplemented
    return _torch_around(torch.rms_norm, (shape, weight, eps), x, bias_before, residual, activation)


def _torch_group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    bias_before: Tensor | None,
    activation: str | None,
) -> Any:
    if activation not in KNOWN or not several_calls_win(x, weight, bias, residual, bias_before):
        return NotImplemented  # a single one is several launches in torch, too
    if weight is None and bias is not None:
        return NotImplemented  # torch's gradient fails without a weight
    if x.is_cpu and x.ndim > 3 and x.stride(1) <= x.stride(-1):
        return NotImplemented  # channels last, where torch's kernel is wrong for a large mean
    joined = residual is not None or bias_before is not None or activation is not None
    if joined and not x.is_cuda and not is_launch_bound(x):
        return NotImplemented
    return _torch_around(
        torch.group_norm, (num_groups, weight, bias, eps), x, bias_before, residual, activation
    )


def _torch_instance_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    bias_before: Tensor | None,
    activation: str | None,
) -> Any:
    if activation not in KNOWN or not several_calls_win(x, weight, bias, residual, bias_before):
        return NotImplemented
    if not use_input_stats and (running_mean is None or running_var is None):
        return NotImplemented
    if use_input_stats and x.numel() <= x.shape[0] * x.shape[1]:
        return NotImplemented  # torch refuses channels of one element
    if x.is_cpu and not use_input_stats and not is_read_right(x, weight, False):
        return NotImplemented
    given = (
        weight,
        bias,
        running_mean,
        running_var,
        use_input_stats,
        momentum,
        eps,
        may_use_cudnn(),
    )
    # given statistics torch's instance_norm writes back, rounded once more
    norm = torch.instance_norm if use_input_stats else torch.batch_norm
    return _torch_around(norm, given, x, bias_before, residual, activation)


KNOWN = {None, *TORCHS}
ALONE = "residual is None and bias_before is None and activation is None"
NAMES = {"cudnn": may_use_cudnn, "after": TORCHS}
OWN_STATISTICS = "plain(x, weight, bias, None, None, True, momentum, eps, cudnn())"
FILLED = "(shape := x.shape).numel() > shape[0] * shape[1]"  # torch refuses channels of one element


@delegates(
    _torch_layer_norm,
    plain=(
        Plain(
            torch.layer_norm,
            "plain(x, normalized_shape, weight, bias)",
            where="normalized_shape.__class__ is tuple",
        ),
        Plain(
            torch.layer_norm,
            "after[activation](plain(x, normalized_shape, weight, bias))",
            where="normalized_shape.__class__ is tuple and activation in after",
            given={"after": TORCHS},
            learns=("x",),
        ),
    ),
    single=ALONE,
)
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = USUAL_EPS,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """(s − mean) / √(var + eps) · weight + bias over the last dimensions, with
    s = x + bias_before + residual.

    As ``torch.nn.functional.layer_norm``, and: ``residual`` is added first, and the sum is
    returned too, (y, s), for the next block; ``bias_before`` is added first; ``activation``
    ("relu", "gelu", "silu", …) is applied to y. All of it is one kernel, forward and backward.

    >>> y, stream = dt.functional.layer_norm(x, (768,), w, b, residual=stream)
    """
    dims = _dims("layer_norm", x, normalized_shape)
    return LAYER(x, weight, bias, bias_before, residual, dims=dims, eps=eps, activation=activation)


@delegates(
    _torch_rms_norm,
    plain=Plain(
        rms_norm_kernel,
        "plain(x, normalized_shape, weight, eps)[0]",
        # which nobody else compares: the kernel makes something of any shapes
        where="normalized_shape.__class__ is tuple and len(normalized_shape) == 1 and "
        "x.shape[-1] == normalized_shape[0] and "
        "(weight is None or weight.shape == normalized_shape and weight.dtype is x.dtype)",
    ),
    single=ALONE,
)
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """s / √(mean(s²) + eps) · weight over the last dimensions, with s = x + bias_before + residual.

    As ``torch.nn.functional.rms_norm`` (eps None: the smallest step above 1 of the type that is
    computed in, float32 for 16-bit x), with the further arguments of :func:`layer_norm`.
    """
    dims = _dims("rms_norm", x, normalized_shape)
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    return RMS(x, weight, bias_before, residual, dims=dims, eps=eps, activation=activation)


@delegates(_torch_group_norm, several=True, single="False", on_cpu=ANY)
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = USUAL_EPS,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Normalises groups of channels, as ``torch.nn.functional.group_norm``, with the further
    arguments of :func:`layer_norm`. ``bias_before`` must broadcast with x: [C, 1, 1] for images."""
    return GROUP(
        x, weight, bias, bias_before, residual, groups=num_groups, eps=eps, activation=activation
    )


@delegates(
    _torch_instance_norm,
    plain=(
        Plain(torch.instance_norm, OWN_STATISTICS, where=FILLED, given=NAMES, learns=("x",)),
        Plain(
            torch.instance_norm,
            f"after[activation]({OWN_STATISTICS})",
            where=f"activation in after and {FILLED}",
            given=NAMES,
            learns=("x",),
        ),
    ),
    several=True,
    single="False",
)
def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = USUAL_EPS,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Normalises each channel of each image by its own statistics, as
    ``torch.nn.functional.instance_norm``, with the further arguments of :func:`layer_norm`.

    ``running_mean`` and ``running_var`` [C] are moved by ``momentum`` towards the mean over the
    batch of the images' means and unbiased variances, in place; of an empty batch they stay as
    they are. With ``use_input_stats=False`` they are what is normalised by, and stay.
    """
    if not use_input_stats:
        asked = "instance_norm(…, use_input_stats=False)"
        check_given(asked, "give both, or use_input_stats=True", running_mean, running_var)
        return INSTANCE_GIVEN(
            x,
            running_mean,
            running_var,
            weight,
            bias,
            bias_before,
            residual,
            eps=eps,
            activation=activation,
        )
    if running_mean is None and running_var is None:
        return INSTANCE(x, weight, bias, bias_before, residual, eps=eps, activation=activation)
    check_written("instance_norm(…)", running_mean, running_var)
    mean, var, *found = INSTANCE_TRACKED(
        x,
        weight,
        bias,
        running_mean,
        running_var,
        bias_before,
        residual,
        momentum=momentum,
        eps=eps,
        activation=activation,
    )
    if x.numel():
        overwrite((running_mean, running_var), (mean, var))
    return found[0] if len(found) == 1 else tuple(found)
