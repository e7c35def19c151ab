"""Norms, with what usually stands around them: a bias and a residual before, an activation after. x
is read once and the result written once; where a residual is given, the sum is a second result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.autocast import FLOAT32, Cast
from deuteron.functional.batch_norm import check_given, check_written, is_read_right, overwrite
from deuteron.functional.core import Function
from deuteron.functional.delegate import ANY, TRAINED, delegates, is_small
from deuteron.functional.operators import TORCHS, activated, schema
from deuteron.ir.dtype import float32
from deuteron.ops import Ops, Sym, table
from deuteron.ops.checks import check_params


def _write(
    name: str, in_float32: bool, b: Ops, x: Sym, *tensors: Sym | None, activation: Any, **attrs: Any
) -> tuple[Sym, ...]:
    """Write activation(norm(s)) with s = x + before + residual; return s as well where a residual
    is given. With ``in_float32`` the norm is computed in float32, while s, the residual stream of a
    network, keeps its type. ``offset`` is added to the weight, in float32 at least."""
    *params, before, residual = tensors
    offset = attrs.pop("offset", 0.0)
    total = x if before is None else x + before
    total = total if residual is None else total + residual
    of = total
    if in_float32:
        of, params = b.upcast(of), [None if t is None else b.upcast(t) for t in params]
    if name == "rms_norm" and params[0] is not None:
        wide, weight = float32 if of.dtype.is_low else of.dtype, params[0]
        weight = b.upcast(weight) + offset if offset else weight
        # the weight may be of any type, as torch's may
        params = [weight if weight.dtype in (of.dtype, wide) else b.to(weight, wide)]
    y = activated(b, b.one(name, of, *params, **attrs), activation)
    return (y,) if residual is None else (y, total)


def _norm(name: str, called: str = "") -> Function:
    """Return the operator ``name`` as an eager function that also adds a bias and a residual before
    it, and applies an activation after it."""
    build, called = partial(_write, name, False), called or name
    tensors, attrs = schema(table.get(name))
    more = {"offset": "float"} if name == "rms_norm" else {}
    around = tensors | AROUND, attrs | more | {"activation": "str | None"}
    if called in FLOAT32:
        return Cast(called, build, around, wide=partial(_write, name, True))
    return Function(called, build, around)


def _write_tracked(b: Ops, x: Sym, *tensors: Any, momentum: float, **attrs: Any) -> tuple[Sym, ...]:
    """Write an instance norm; return its new running mean and variance, which move towards those of
    the images, and then its results. The mean over images and positions at once is the mean of the
    images' means."""
    *own, before, residual, running_mean, running_var = tensors
    found = _write("instance_norm", False, b, x, *own, before, residual, **attrs)
    total = found[1] if residual is not None else x if before is None else x + before
    running = {"running_mean": running_mean, "running_var": running_var}
    types = {name: None if t is None else t.type for name, t in running.items()}
    check_params("instance_norm", total.type, total.shape[1:2], types)
    wide, positions = b.upcast(total), tuple(range(2, total.rank))
    mean = b.one("mean", wide, axes=(0, *positions))
    var = b.one("mean", b.one("var", wide, axes=positions, correction=1), axes=(0,))
    moved = (
        new if old is None else b.to(b.upcast(old) * (1.0 - momentum) + new * momentum, old.dtype)
        for old, new in ((running_mean, mean), (running_var, var))
    )
    return *moved, *found


AROUND = {"before": "Sym | None", "residual": "Sym | None"}
RUNNING = {"running_mean": "Sym | None", "running_var": "Sym | None"}
LAYER, RMS, GROUP, INSTANCE = map(_norm, "layer_norm rms_norm group_norm instance_norm".split())
INSTANCE_GIVEN = _norm("batch_norm", "instance_norm_given")
_TRACKED = INSTANCE.schema[0] | RUNNING, {"momentum": "float"} | INSTANCE.schema[1]
INSTANCE_TRACKED = Function(
    "instance_norm_tracked", _write_tracked, _TRACKED, silent=(0, 1), overwritten=tuple(RUNNING)
)


def _dims(name: str, x: Tensor, last: int | Sequence[int]) -> int:
    shape = (last,) if isinstance(last, int) else tuple(last)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        wrong = f"normalized_shape {list(shape)} is not how x {list(x.shape)} ends"
        remedy = f"use {list(x.shape[-1:])} for the last dimension"
        raise BindError(wrong, asked=f"{name}(x, {list(shape)})", remedy=remedy)
    return len(shape)


# ---- the same by torch's calls


def _by_torch(norm: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's ``norm`` with the sums that come before it and the activation that comes after
    it."""

    def call(x: Tensor, *args: Any, **named: Any) -> Any:
        around = ("bias_before", "residual", "activation")
        bias_before, residual, activation = [named.pop(name, None) for name in around]
        x = x if bias_before is None else x + bias_before
        x = x if residual is None else x + residual
        y = norm(x, *args, **named)
        if y is not NotImplemented and activation is not None:
            y = TORCHS[activation](y)
        return y if residual is None or y is NotImplemented else (y, x)

    return call


def _joined(
    *_: Any, residual: Any = None, bias_before: Any = None, activation: Any = None, **__: Any
) -> int:
    """How many of torch's calls stand around a norm."""
    return (residual is not None) + (bias_before is not None) + (activation is not None)


def _torch_layer_norm(x: Tensor, normalized_shape: Any, *args: Any, **named: Any) -> Tensor:
    shape = (normalized_shape,) if normalized_shape.__class__ is int else normalized_shape
    return torch.layer_norm(x, shape, *args, **named)


def _torch_rms_norm(
    x: Tensor, normalized_shape: Any, weight: Any = None, eps: Any = None, *, offset: float = 0.0
) -> Any:
    if weight is not None and weight.dtype is not x.dtype:
        return NotImplemented  # torch answers in the wider type
    if weight is not None and offset:
        if weight.itemsize < 4:
            return NotImplemented  # the sum would be rounded
        weight = weight + offset
    shape = (normalized_shape,) if normalized_shape.__class__ is int else normalized_shape
    return torch.rms_norm(x, shape, weight, eps)


def _group_norm_is_ours(
    x: Tensor, num_groups: int, weight: Any = None, bias: Any = None, *_: Any, **named: Any
) -> bool:
    if weight is None and bias is not None:
        return True  # torch's gradient fails without a weight
    if x.is_cpu and x.ndim > 3 and x.stride(1) <= x.stride(-1):
        return True  # channels last: torch's kernel is wrong where the mean is large
    return x.is_cpu and _joined(**named) > 0 and not is_small(x)


@_by_torch
def _torch_instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if use_input_stats and x.numel():  # torch would write statistics even of an empty batch
        return F.instance_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    if use_input_stats or (x.is_cpu and not is_read_right(x, weight, False)):
        return NotImplemented
    # torch's instance_norm would write the given statistics back, rounded once more
    return F.batch_norm(x, running_mean, running_var, weight, bias, False, momentum, eps)


# ---- the functions


@delegates(
    _torch_layer_norm,
    joined=_by_torch(_torch_layer_norm),
    several=_joined,
    trained=TRAINED // 2,
    autocast=True,
    passes=10.0,
)
def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Return (s − mean) / √(var + eps) · weight + bias over the last dimensions, with s = x +
    bias_before + residual.

    As ``torch.nn.functional.layer_norm``, and in the same kernel, forward and backward:

    residual     is added to x first. The sum is returned too, for the next block: (y, s)
    bias_before  is added to x first
    activation   is applied to y: "relu", "gelu", "silu" or the name of another elementwise operator

    >>> y, stream = dt.functional.layer_norm(x, (768,), w, b, residual=stream)
    """
    dims = _dims("layer_norm", x, normalized_shape)
    return LAYER(x, weight, bias, bias_before, residual, dims=dims, eps=eps, activation=activation)


_in_parts: Any = {"on_cpu": None, "passes": 10.0}  # on a CPU torch's is half a dozen calls


@delegates(_torch_rms_norm, joined=_by_torch(_torch_rms_norm), several=_joined, **_in_parts)
def rms_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
    offset: float = 0.0,
) -> Any:
    """Return s / √(mean(s²) + eps) · weight over the last dimensions, with s = x + bias_before +
    residual.

    As ``torch.nn.functional.rms_norm``; residual, bias_before and activation as for
    :func:`layer_norm`.

    eps     None: the distance from 1 to the next number in the type that is computed in, which is
            float32 for 16-bit x
    offset  is added to the weight: 1 for Gemma's weights, which are stored as distances from 1
    """
    dims = _dims("rms_norm", x, normalized_shape)
    if eps is None:
        eps = torch.finfo(torch.float64 if x.dtype is torch.float64 else torch.float32).eps
    how = {"dims": dims, "eps": eps, "offset": float(offset), "activation": activation}
    return RMS(x, weight, bias_before, residual, **how)


# torch, too, takes two launches for a single norm of images
@delegates(_by_torch(F.group_norm), several=1, unless=_group_norm_is_ours, on_cpu=ANY, passes=10.0)
def group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Normalise groups of channels, as ``torch.nn.functional.group_norm``; residual, bias_before
    and activation as for :func:`layer_norm`. ``bias_before`` must broadcast with x: [C, 1, 1] for
    images."""
    attrs = {"groups": num_groups, "eps": eps, "activation": activation}
    return GROUP(x, weight, bias, bias_before, residual, **attrs)


@delegates(_torch_instance_norm, several=1, passes=10.0)
def instance_norm(
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    bias_before: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Normalise each channel of each image by its own statistics, as
    ``torch.nn.functional.instance_norm``; residual, bias_before and activation as for
    :func:`layer_norm`.

    ``running_mean`` and ``running_var`` [C] are moved in place, by ``momentum``, towards the means
    over the batch of the images' means and unbiased variances; an empty batch leaves them as they
    are. With ``use_input_stats=False`` x is normalised by them instead, and they stay as they are.
    """
    running, attrs = (running_mean, running_var), {"eps": eps, "activation": activation}
    around = (weight, bias, bias_before, residual)
    if not use_input_stats:
        asked = "instance_norm(…, use_input_stats=False)"
        check_given(asked, "give both, or use_input_stats=True", *running)
        return INSTANCE_GIVEN(x, *running, *around, **attrs)
    if running_mean is None and running_var is None:
        return INSTANCE(x, *around, **attrs)
    check_written("instance_norm(…)", *running)
    mean, var, *found = INSTANCE_TRACKED(x, *around, *running, momentum=momentum, **attrs)
    if x.numel():
        overwrite(running, (mean, var))
    return found[0] if len(found) == 1 else tuple(found)
