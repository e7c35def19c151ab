"""Gradients of the norms as operators: ``layer_norm_grad`` and its sisters for RMS, group and
instance norm, one node each.

    hat = (x − mean) · rstd                      inner = grad · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ grad · hat                       dbias = Σ grad

Where an activation follows the norm, ``grad`` is the gradient of its result, and what stands for
grad above is that times the slope at hat · weight + offset, where ``offset`` is the bias.

dx sums along rows, dweight and dbias down the columns. As one operator they can share one pass
over x and grad; where no kernel does that, :func:`OpDef.expand` writes them out. ``extra`` is a
further gradient of x, which a residual stream brings along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import Shape, TensorType
from deuteron.ops import table
from deuteron.ops.batch_norm import ACTIVATIONS, BEND, act_attrs
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.norm import (
    ROWS,
    Row,
    Wanted,
    check_params,
    check_x,
    gradients,
    in_order,
    suggested,
    wide_type,
)
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
_BIAS = Attr(
    "str",
    "none",
    "the bias whose gradient is asked for: none, of the same type as x, or f32",
    choices=("none", "same", "f32"),
)


_BENDS: tuple[dict[str, Any], ...] = (
    {"activation": "silu"},
    {"activation": "leaky_relu", "slope": 0.2},
    {"activation": "hardswish"},
    {"activation": "relu"},
)


def _split(attrs: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The choice of a bias, the attributes of the norm itself, those of the activation."""
    rest = dict(attrs)
    return rest.pop("bias"), rest, {name: rest.pop(name) for name in BEND}


def _check_offset(row: Row, offset: TensorType | None, activation: str) -> None:
    if offset is not None and not row.centred:
        raise GraphError(f"{row.name} has no bias", remedy="leave out offset")
    if offset is not None and activation == "none":
        raise GraphError(
            f"offset of {row.name}_grad is read where an activation follows alone",
            remedy="leave out offset, or say which activation follows",
        )


def _before_activation(b: Ops, z: Sym, grad: Sym, bend: Mapping[str, Any]) -> Sym:
    """The gradient of z, where ``grad`` is that of its activation."""
    op = table.get(bend["activation"])
    y = b.one(op.name, z, **act_attrs(bend))
    assert op.vjp is not None
    (found,) = op.vjp(b, Vjp((z,), (y,), (grad,), act_attrs(bend), (True,)))
    assert found is not None
    return found


def _bias_type(bias: str, x: TensorType, shape: Shape) -> TensorType | None:
    if bias == "none":
        return None
    return TensorType.of(shape, x.dtype if bias == "same" else float32)


def _check_like(name: str, x: TensorType, slot: str, given: TensorType | None) -> None:
    if given is not None and (given.shape, given.dtype) != (x.shape, x.dtype):
        raise GraphError(
            f"{slot} of {name} is {given.dtype.short}{list(given.shape)}, "
            f"x is {x.dtype.short}{list(x.shape)}",
            remedy=f"give {slot} the shape and element type of x",
        )


def _sums(t: Tensor, lies: Shape) -> Tensor:
    """``t`` summed down to how the parameter lies, in memory of its own."""
    lead = t.ndim - len(lies)
    axes = [d for d in range(t.ndim) if d < lead or (lies[d - lead] == 1 and t.shape[d] != 1)]
    return t.sum(axes) if axes else t.clone()


def _define(row: Row) -> OpDef:
    name = f"{row.name}_grad"

    def infer(
        x: TensorType,
        grad: TensorType,
        weight: TensorType | None,
        extra: TensorType | None,
        offset: TensorType | None,
        **attrs: Any,
    ) -> tuple[TensorType, ...]:
        bias, rest, bend = _split(attrs)
        check_x(name, x, row.least_rank, rest["eps"])
        shape = row.check(name, x, rest)
        of_bias = _bias_type(bias, x, shape)
        check_params(name, x, shape, {"weight": weight, "bias": of_bias, "offset": offset})
        _check_offset(row, offset, bend["activation"])
        _check_like(name, x, "grad", grad)
        _check_like(name, x, "extra", extra)
        if of_bias is not None and not row.centred:
            raise GraphError(f"{row.name} has no bias", remedy='use bias="none"')
        of_weight = None if weight is None else TensorType.of(shape, weight.dtype)
        dx = x.with_layout(suggested(x) if row.keeps_nhwc else "contiguous")
        return dx, *(t for t in (of_weight, of_bias) if t is not None)

    def reference(
        x: Tensor,
        grad: Tensor,
        weight: Tensor | None,
        extra: Tensor | None,
        offset: Tensor | None,
        **attrs: Any,
    ) -> tuple[Tensor, ...]:
        bias, rest, bend = _split(attrs)
        form, wide = row.form(tuple(x.shape), rest), wide_type(x)
        v, given = (t.to(wide).reshape(form.work) for t in (x, grad))
        scale, shift = (
            None if p is None else p.to(wide).reshape(form.weight) for p in (weight, offset)
        )
        v = v - v.mean(form.axes, keepdim=True) if row.centred else v
        rstd = torch.rsqrt(v.square().mean(form.axes, keepdim=True) + rest["eps"])
        hat = v * rstd
        if bend["activation"] != "none":
            z = hat if scale is None else hat * scale
            z = z if shift is None else z + shift
            given = ACTIVATIONS[bend["activation"]].grad(given, z, bend["slope"])
        inner = given if scale is None else given * scale
        flat = inner - inner.mean(form.axes, keepdim=True) if row.centred else inner
        dx = (flat - hat * (inner * hat).mean(form.axes, keepdim=True)) * rstd
        dx = dx.reshape(x.shape) if extra is None else dx.reshape(x.shape) + extra.to(wide)
        dx = dx.to(x.dtype)
        out = [in_order(dx, x) if row.keeps_nhwc else dx.contiguous()]
        if weight is not None:
            out.append(_sums(given * hat, form.weight).reshape(weight.shape).to(weight.dtype))
        if bias != "none":
            shape = x.shape[-rest["dims"] :] if "dims" in rest else x.shape[1:2]
            kind = x.dtype if bias == "same" or x.dtype.itemsize > 4 else torch.float32
            out.append(_sums(given, form.weight).reshape(shape).to(kind))
        return tuple(out)

    def expand(b: Ops, ins: Sequence[Sym | None], attrs: Mapping[str, Any]) -> list[Sym]:
        x, grad, weight, extra, offset = ins
        assert x is not None and grad is not None
        bias, rest, bend = _split(attrs)
        if bend["activation"] != "none":
            given = (weight, offset) if row.centred else (weight,)
            grad = _before_activation(b, b.one(row.name, x, *given, **rest), grad, bend)
            made = b.call(name, x, grad, weight, extra, bias=bias, **rest)
            return list(made) if isinstance(made, tuple) else [made]
        shape = row.check(name, x.type, rest)
        of_weight = None if weight is None else weight.type
        wanted = Wanted(True, of_weight, _bias_type(bias, x.type, shape))
        form = row.form(x.shape, rest)
        found = gradients(b, x, grad, weight, form, rest["eps"], wanted, centred=row.centred)
        if extra is not None:
            assert found[0] is not None
            found[0] = found[0] + extra
        return [g for g in found if g is not None]

    def samples() -> Sequence[Sample]:
        found = []
        for k, s in enumerate(row.samples()):
            x, *params = s.inputs
            assert x is not None
            like = Arg(x.shape, dtype=x.dtype)
            weight, given = [*params, None][:2]
            bias = "none" if given is None else given.dtype or "same"
            extra = like if k % 3 == 1 else None
            turned = replace(like, layout="transposed" if k == 2 else "contiguous")
            attrs = {**s.attrs, "bias": bias}
            found.append(Sample((x, turned, weight, extra), attrs))
            if k < len(_BENDS):
                offset = given if row.centred else None
                found.append(Sample((x, turned, weight, extra, offset), {**attrs, **_BENDS[k]}))
        return found

    return OpDef(
        name=name,
        doc=f"The gradients of {row.name}: dx, with ``extra`` added to it, then dweight if there "
        "is a weight, then dbias if ``bias`` says of which type. With an activation ``grad`` is "
        "the gradient of activation(norm), whose bias is ``offset``.",
        inputs=("x", "grad", "weight?", "extra?", "offset?"),
        attrs={**row.attrs, "bias": _BIAS, **BEND},
        infer=infer,
        reference=reference,
        fusion=Fusion.OPAQUE,  # the kernel that takes it whole takes nothing else
        expand=expand,
        flops=elementwise_flops(16 if row.centred else 10),
        samples=samples,
    )


OPS = tuple(map(_define, ROWS))
