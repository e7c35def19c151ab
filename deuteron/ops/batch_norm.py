"""Batch normalisation: with statistics that are given, for inference, and with those of the batch,
for training. What follows it in training is in ``batch_norm_act.py``."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import TensorType
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.norm import (
    EPS,
    Gradients,
    Wanted,
    by_channels,
    check_params,
    check_spread,
    check_x,
    gradients,
    in_order,
    shaped,
    suggested,
    summed,
    wide_type,
)
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops
from deuteron.ops.samples import norm_samples

Tensor = torch.Tensor

# ---- statistics that are given -----------------------------------------------------------------

_KNOWN = ("mean", "var", "weight", "bias")


def _infer(x: TensorType, *params: TensorType | None, eps: float) -> TensorType:
    check_x("batch_norm", x, 2, eps)
    check_params("batch_norm", x, x.shape[1:2], dict(zip(_KNOWN, params, strict=True)))
    return x.with_layout(suggested(x))


def _reference(x: Tensor, *params: Tensor | None, eps: float) -> Tensor:
    mean, var, weight, bias = (None if p is None else p.to(wide_type(x)) for p in params)
    return in_order(F.batch_norm(x, mean, var, weight, bias, eps=eps), x)


def _vjp(b: Ops, v: Vjp) -> Gradients:
    x, grad = b.upcast(v.arg(0)), b.upcast(v.grad)
    lies = by_channels(x.shape).weight
    rstd = shaped(b, b.rsqrt(b.upcast(v.arg(2)) + v.attrs["eps"]), lies)
    scale = rstd * shaped(b, v.arg(3), lies) if v.has(3) else rstd
    centred = x - shaped(b, v.arg(1), lies)
    rules: tuple[Callable[[], Sym], ...] = (
        lambda: -grad * scale,
        lambda: grad * centred * (scale * b.square(rstd) * -0.5),
        lambda: grad * centred * rstd,
        lambda: grad,
    )
    params = [
        summed(b, rule(), lies, v.arg(i).type) if v.has(i) and v.needs[i] else None
        for i, rule in enumerate(rules, 1)
    ]
    return [b.to(grad * scale, v.arg(0).dtype) if v.needs[0] else None, *params]


# ---- those of the batch --------------------------------------------------------------------------

_PARAMS = ("weight", "bias", "running_mean", "running_var")


def _train_infer(x: TensorType, *params: TensorType | None, **attrs: Any) -> tuple[TensorType, ...]:
    name, running = "batch_norm_train", params[2:]
    check_x(name, x, 2, attrs["eps"])
    check_params(name, x, x.shape[1:2], dict(zip(_PARAMS, params, strict=True)))
    if (running[0] is None) != (running[1] is None):
        raise GraphError(f"{name} was given one running statistic", remedy="give both or neither")
    check_spread(name, x, x.shape[0] * prod(x.shape[2:]), "use a larger batch, or batch_norm")
    stat = TensorType.of(x.shape[1:2], float32 if x.dtype.is_low else x.dtype)
    new = (stat if r is None else stat.with_dtype(r.dtype) for r in running)
    return x.with_layout(suggested(x)), *new, stat, stat


def _train_reference(
    x: Tensor, *params: Tensor | None, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    running = params[2:]
    unknown = x.new_full(x.shape[1:2], torch.nan, dtype=wide_type(x))
    if not x.numel():  # nothing to learn from: the running statistics stay
        old = [unknown if r is None else r for r in running]
        return torch.empty_like(x), *(t.clone() for t in (*old, unknown, unknown))
    weight, bias = (None if p is None else p.to(wide_type(x)) for p in params[:2])
    new = [
        torch.zeros_like(unknown) if r is None else r.to(wide_type(x), copy=True) for r in running
    ]
    share = 1.0 if running[0] is None else momentum
    # on a CPU torch's kernel for channels last adds up all rows in one float32
    plain = x.contiguous() if x.is_cpu else x
    y, mean, rstd = torch.native_batch_norm(plain, weight, bias, *new, True, share, eps)
    new = [n if r is None else n.to(r.dtype) for n, r in zip(new, running, strict=True)]
    return in_order(y, x), *new, mean, rstd


def _train_vjp(b: Ops, v: Vjp) -> Gradients:
    if v.grads[0] is None:  # only statistics reach the loss, and those count as fixed
        return [None] * len(v.ins)
    weight, bias = (v.arg(i).type if v.has(i) and v.needs[i] else None for i in (1, 2))
    found = gradients(
        b,
        v.arg(0),
        v.grad,
        v.arg(1) if v.has(1) else None,
        by_channels(v.arg(0).shape, 0),
        v.attrs["eps"],
        Wanted(v.needs[0], weight, bias),
        stats=(v.outs[3], v.outs[4]),
    )
    return [*found, None, None]


BATCH = OpDef(
    name="batch_norm",
    doc="(x − mean) / √(var + eps) · weight + bias for each channel (dimension 1), with "
    "statistics that are given: batch normalisation for inference.",
    inputs=("x", "mean", "var", "weight?", "bias?"),
    attrs={"eps": EPS},
    infer=_infer,
    reference=_reference,
    fusion=Fusion.BROADCAST,
    vjp=_vjp,
    flops=elementwise_flops(2),
    samples=norm_samples(_KNOWN, ("xxxx", "xx--", "xx-x"), ({}, {"eps": 0.01}), more=((3, 4),)),
)

BATCH_TRAIN = OpDef(
    name="batch_norm_train",
    doc="Batch normalisation for training: returns y, the new running mean and variance, and "
    "the mean and 1/√(var + eps) of this batch. Nothing changes in place; running statistics "
    "left out start from this batch, with its unbiased variance. Gradients flow through y alone: "
    "the four statistics count as fixed.",
    inputs=("x", *(f"{slot}?" for slot in _PARAMS)),
    attrs={"momentum": Attr("float", 0.1, "share of this batch in the new mean"), "eps": EPS},
    infer=_train_infer,
    reference=_train_reference,
    fusion=Fusion.REDUCTION,
    vjp=_train_vjp,
    flops=elementwise_flops(8),
    samples=norm_samples(
        _PARAMS,
        ("xxxx", "xx--", "----", "-xxx"),
        ({}, {"momentum": 0.7, "eps": 0.01}),
        more=((3, 4),),
    ),
)

OPS = (BATCH, BATCH_TRAIN)
