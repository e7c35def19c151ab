"""Batch normalisation for training with what follows it: y = act(batch_norm(x) + residual).

One operator for the forward step and one for its gradient, so that a kernel can do each in the
least number of passes over memory. Counted in tensors of the size of x, with a residual:

    forward     read x for the statistics; read x and the residual, write y              4
    gradient    read grad, x and y, write dz; read dz and x, write dx                    7
                read the signs of y instead, kept as bits by the forward step            6

dz is the gradient before the activation. It is what the residual receives, so writing it costs
nothing extra, and reading it again is one tensor less than working it out again from grad and y.
Without a residual nothing but grad and x is read: the sign before the activation follows from x,
5 tensors instead of 7. With one, the activations whose slope can be told from y read y, which the
next layer keeps anyway; the others read the residual. Of y relu wants to know the signs only
(``signs.py``): on a GPU they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.movement import lay
from deuteron.ops.norm import BATCH_TRAIN, Form, Wanted, gradients
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.signs import PACKED, pack, packed_of, signs_type, unpack, unpacked_of

Tensor = torch.Tensor

# ---- activations -------------------------------------------------------------------------------


class Act(NamedTuple):
    """An activation: its value, written over z; its gradient; whether y shows the slope at z."""

    value: Callable[[Tensor, float], Tensor]
    grad: Callable[[Tensor, Tensor, float], Tensor]  # of the gradient, z (or y) and the slope
    shown_by_y: Callable[[float], bool] = lambda slope: False


_aten = torch.ops.aten


def _silu_grad(g: Tensor, z: Tensor) -> Tensor:
    """torch's own formula, whose operator alone has no derivative."""
    s = torch.sigmoid(z)
    return g * s * (1.0 + z * (1.0 - s))


ACTIVATIONS: Mapping[str, Act] = {
    "none": Act(lambda z, slope: z, lambda g, z, slope: g, lambda slope: True),
    "relu": Act(
        lambda z, slope: F.relu(z, inplace=True),
        lambda g, z, slope: _aten.threshold_backward(g, z, 0.0),
        lambda slope: True,
    ),
    "relu6": Act(
        lambda z, slope: F.relu6(z, inplace=True),
        lambda g, z, slope: _aten.hardtanh_backward(g, z, 0.0, 6.0),
        lambda slope: True,
    ),
    "leaky_relu": Act(
        lambda z, slope: F.leaky_relu(z, slope, inplace=True),
        lambda g, z, slope: _aten.leaky_relu_backward(g, z, slope, False),
        lambda slope: slope > 0.0,
    ),
    "silu": Act(lambda z, slope: F.silu(z, inplace=True), lambda g, z, slope: _silu_grad(g, z)),
    "hardswish": Act(
        lambda z, slope: F.hardswish(z, inplace=True),
        lambda g, z, slope: _aten.hardswish_backward(g, z),
    ),
}

BEND = {
    "activation": Attr("str", "none", "what follows", choices=tuple(ACTIVATIONS)),
    "slope": Attr("float", 0.01, "the slope of leaky_relu below 0"),
}
_ATTRS = {
    **BEND,
    "packed": Attr("str", "none", "along what the signs after relu are bits", choices=PACKED),
}

# ---- forward -----------------------------------------------------------------------------------

_PARAMS = ("weight?", "bias?", "running_mean?", "running_var?")


def _same(what: str, t: TensorType | None, x: TensorType) -> None:
    """A tensor that goes with x, element by element."""
    if t is None:
        return
    if t.shape != x.shape:
        raise GraphError(
            f"{what} is {list(t.shape)}, x is {list(x.shape)}",
            remedy=f"expand or reshape {what} to {list(x.shape)}",
        )
    if t.dtype != x.dtype:
        raise GraphError(
            f"{what} is {t.dtype.name}, x is {x.dtype.name}",
            remedy=f'cast it: cast({what}, dtype="{x.dtype.short}")',
        )


def _infer(
    x: TensorType,
    *rest: TensorType | None,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    packed: str,
) -> tuple[TensorType, ...]:
    *params, residual = rest
    types = BATCH_TRAIN.infer(x, *params, momentum=momentum, eps=eps)
    _same("residual", residual, x)
    assert isinstance(types, tuple)
    return types if _kept(activation, packed) == "none" else (*types, signs_type(x.shape, packed))


def _kept(activation: str, packed: str) -> str:
    """``packed``, which only relu may have."""
    if packed != "none" and activation != "relu":
        raise GraphError(
            f"signs are kept of relu's results, not of those of {activation}",
            remedy='leave packed out, or use activation="relu"',
        )
    return packed


def _reference(
    x: Tensor,
    *rest: Tensor | None,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    packed: str,
) -> tuple[Tensor, ...]:
    *params, residual = rest
    y, *statistics = BATCH_TRAIN.reference(x, *params, momentum=momentum, eps=eps)
    like = TensorType.from_tensor(y)
    z = y if residual is None else y.add_(residual)  # y is new, and nobody else has it
    y = lay(ACTIVATIONS[activation].value(z, slope), like)
    return (y, *statistics) if packed == "none" else (y, *statistics, pack(y, packed))


def _implied(outs: Sequence[Tensor | None], attrs: Mapping[str, Any]) -> dict[int, Tensor]:
    y, packed = outs[0], attrs["packed"]
    return {} if y is None or packed == "none" else {5: pack(y, packed)}


def _vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    if v.grads[0] is None:  # only statistics reach the loss, and those count as fixed
        return [None] * len(v.ins)
    attrs = {name: v.attrs[name] for name in _ATTRS}
    bent = attrs["activation"] != "none"
    by_y = ACTIVATIONS[attrs["activation"]].shown_by_y(attrs["slope"])
    signs = None if attrs["packed"] == "none" else v.outs[5]
    y = v.outs[0] if v.has(5) and bent and by_y and signs is None else None
    residual = v.arg(5) if v.has(5) and not by_y else None
    weight, bias = v.ins[1], v.ins[2]
    dx, dweight, dbias, dz = b.batch_norm_act_grad(
        v.grad, v.arg(0), v.outs[3], v.outs[4], weight, bias, y, residual, signs, **attrs
    )
    return [
        dx,
        None if weight is None else b.to(dweight, weight.dtype),
        None if bias is None else b.to(dbias, bias.dtype),
        None,
        None,
        (dz if bent else v.grad) if v.has(5) else None,
    ]


def act_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the activation as an operator of its own."""
    return {"negative_slope": attrs["slope"]} if attrs["activation"] == "leaky_relu" else {}


def _expand(b: Ops, ins: Sequence[Sym | None], attrs: Mapping[str, Any]) -> list[Sym]:
    """The three operators that it stands for."""
    *given, residual = ins
    momentum, eps, act = attrs["momentum"], attrs["eps"], attrs["activation"]
    y, *statistics = b.batch_norm_train(*given, momentum=momentum, eps=eps)
    z = y if residual is None else y + residual
    y = z if act == "none" else b.call(act, z, **act_attrs(attrs))
    packed = attrs["packed"]
    return [y, *statistics, *([] if packed == "none" else [packed_of(b, y, packed)])]


# ---- gradient ----------------------------------------------------------------------------------


def _grad_infer(
    grad: TensorType,
    x: TensorType,
    *rest: TensorType | None,
    activation: str,
    slope: float,
    packed: str,
) -> tuple[TensorType, ...]:
    mean, rstd, weight, bias, y, residual, signs = rest
    types = BATCH_TRAIN.infer(x, weight, bias, None, None, momentum=0.1, eps=0.0)
    assert isinstance(types, tuple)
    image, stat = types[0], types[3]
    for what, t in (("grad", grad), ("y", y), ("residual", residual)):
        _same(what, t, x)
    for what, s in (("mean", mean), ("rstd", rstd)):
        assert s is not None
        if s.shape != stat.shape or s.dtype not in (stat.dtype, x.dtype):
            raise GraphError(
                f"{what} is {s.dtype.short}{list(s.shape)}, x {list(x.shape)} needs "
                f"{stat.dtype.short}{list(stat.shape)}",
                remedy="give what batch_norm_act returned",
            )
    if y is not None and not ACTIVATIONS[activation].shown_by_y(slope):
        raise GraphError(
            f"the gradient of {activation} cannot be told from y", remedy="give the residual"
        )
    _check_signs(x, signs, _kept(activation, packed))
    return image, stat, stat, image


def _check_signs(x: TensorType, signs: TensorType | None, packed: str) -> None:
    if signs is None and packed == "none":
        return
    if signs is None or packed == "none":
        raise GraphError(
            f"signs are {'missing' if signs is None else 'given'}, packed is {packed!r}",
            remedy="give the signs and the packed of batch_norm_act, or neither",
        )
    wanted = signs_type(x.shape, packed)
    if (signs.shape, signs.dtype) != (wanted.shape, wanted.dtype):
        raise GraphError(
            f"signs are {signs.dtype.short}{list(signs.shape)}, those of {list(x.shape)} along "
            f"{packed} are {wanted.dtype.short}{list(wanted.shape)}",
            remedy="give what batch_norm_act returned",
        )


def _grad_reference(
    grad: Tensor, x: Tensor, *rest: Tensor | None, activation: str, slope: float, packed: str
) -> tuple[Tensor, ...]:
    mean, rstd, weight, bias, y, residual, signs = rest
    assert mean is not None and rstd is not None
    image, stat, *_ = _grad_infer(
        *(t if t is None else TensorType.from_tensor(t) for t in (grad, x, *rest)),  # type: ignore[arg-type]
        activation=activation,
        slope=slope,
        packed=packed,
    )
    mean, rstd = mean.to(stat.dtype.torch), rstd.to(stat.dtype.torch)
    if not x.numel():
        zero = torch.zeros_like(mean)
        return lay(torch.empty_like(x), image), zero, zero.clone(), lay(grad.clone(), image)
    dz = grad
    if signs is not None:
        dz = torch.where(unpack(signs, tuple(x.shape), packed), grad, 0.0).to(x.dtype)
    elif activation != "none":
        z = y if y is not None else _before(x, mean, rstd, weight, bias, residual)
        dz = ACTIVATIONS[activation].grad(grad.to(mean.dtype), z.to(mean.dtype), slope).to(x.dtype)
    dz = lay(dz.clone() if dz is grad else dz, image)
    scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
    dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dz, lay(x, image), scale, None, None, mean, rstd, True, 0.0, [True] * 3
    )
    return lay(dx, image), dweight, dbias, dz


def _grad_expand(b: Ops, ins: Sequence[Sym | None], attrs: Mapping[str, Any]) -> list[Sym]:
    """Its formula in simpler operators, in float32 at least."""
    grad, x, mean, rstd, weight, bias, y, residual, signs = ins
    assert grad is not None and x is not None and mean is not None and rstd is not None
    shape, dtype = x.shape, x.dtype
    lies = (1, shape[1], *(1 for _ in shape[2:]))

    def spread(t: Sym) -> Sym:
        return b.one("reshape", b.upcast(t), shape=lies)

    dz = b.upcast(grad)
    if signs is not None:
        dz = b.one("where", unpacked_of(b, signs, shape, attrs["packed"]), dz, 0.0)
    elif attrs["activation"] != "none":
        z = None if y is None else b.upcast(y)
        if z is None:
            z = (b.upcast(x) - spread(mean)) * spread(rstd)
            z = z if weight is None else z * spread(weight)
            z = z if bias is None else z + spread(bias)
            z = z if residual is None else z + b.upcast(residual)
        act = table.get(attrs["activation"])
        assert act.vjp is not None
        (found,) = act.vjp(b, Vjp((z,), (z,), (dz,), act_attrs(attrs), (True,)))
        assert found is not None
        dz = found
    axes = (0, *range(2, len(shape)))
    stat = TensorType.of(shape[1:2], b.upcast(mean).dtype)
    dx, dweight, dbias = gradients(
        b, x, dz, weight, Form(shape, axes, lies), 0.0, Wanted(True, stat, stat), stats=(mean, rstd)
    )
    assert dx is not None and dweight is not None and dbias is not None
    return [dx, dweight, dbias, b.to(dz, dtype)]


def _grad_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    """Refused: mean and rstd count as fixed here, though they depend on x. The first gradient has
    that worked in; a second one, taken from this formula, would be wrong."""
    raise GraphError(
        "the gradient of batch_norm_act has no gradient of its own",
        remedy="for second derivatives write batch norm with mean, square and rsqrt",
    )


def _before(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Tensor:
    """What went into the activation, in the type of the statistics. The mean is taken off first:
    folded into the bias it would cost digits where it is large."""
    lies = (1, -1, *(1 for _ in x.shape[2:]))
    scale = rstd if weight is None else rstd * weight.to(mean.dtype)
    z = (x.to(mean.dtype) - mean.view(lies)).mul_(scale.view(lies))
    z = z if bias is None else z.add_(bias.to(mean.dtype).view(lies))
    return z if residual is None else z.add_(residual)


# ---- samples and definitions ---------------------------------------------------------------------

_SHAPES = (
    ((2, 4, 3), "contiguous"),
    ((2, 4, 3, 2), "nhwc"),
    ((2, 4, 2, 3), "transposed"),
    ((3, 4), "contiguous"),
    ((2, 3, 3), "sliced"),
    ((1, 4, 2, 1, 3), "nhwc"),
    ((0, 4, 3), "contiguous"),
    ((3, 2, 5), "contiguous"),
    ((2, 4, 0), "contiguous"),
)


_KEPT = (  # with signs: bytes that are full and that are not, nothing at all, a matrix
    ((2, 9, 3, 2), "nhwc", "channels"),
    ((2, 8, 3), "contiguous", "positions"),
    ((2, 3, 5, 5), "contiguous", "positions"),
    ((3, 4), "contiguous", "channels"),
    ((2, 4, 3, 3), "contiguous", "channels"),
    ((0, 8, 3), "contiguous", "positions"),
)


def _cases() -> Iterator[tuple[tuple[int, ...], str, dict[str, Any], bool]]:
    """Shapes, orders, activations in turn, without and with a residual; then those with signs."""
    acts: list[dict[str, Any]] = [{"activation": name} for name in ACTIVATIONS]
    acts += [{"activation": "leaky_relu", "slope": -0.5}]
    for i in range(2 * len(acts)):
        shape, layout = _SHAPES[i % len(_SHAPES)]
        yield shape, layout, acts[i % len(acts)], i >= len(acts)
    for i, (lengths, layout, packed) in enumerate(_KEPT):
        yield lengths, layout, {"activation": "relu", "packed": packed}, i < 4


def _samples() -> Sequence[Sample]:
    found = []
    for i, (shape, layout, act, joined) in enumerate(_cases()):
        c = shape[1:2]
        params = [Arg(c), Arg(c), Arg(c), Arg(c, "positive")]
        given = [
            p if m == "x" else None
            for p, m in zip(params, ("xxxx", "xx--", "----")[i % 3], strict=True)
        ]
        kind = "offset" if i % 5 == 4 else "normal"
        residual = Arg(shape, layout="contiguous" if i % 4 else layout) if joined else None
        found.append(Sample((Arg(shape, kind, layout=layout), *given, residual), act))
    return found


def _grad_samples() -> Sequence[Sample]:
    found = []
    for i, (shape, layout, act, joined) in enumerate(_cases()):
        c, x = shape[1:2], Arg(shape, layout=layout)
        params = [Arg(c), Arg(c)] if i % 3 else [None, None]
        by_y = ACTIVATIONS[act["activation"]].shown_by_y(act.get("slope", 0.01))
        packed = act.get("packed", "none")
        y = Arg(shape, "away", layout=layout) if joined and by_y and packed == "none" else None
        residual = Arg(shape) if joined and not by_y else None
        signs = None if packed == "none" else Arg(signs_type(shape, packed).shape, dtype="u8")
        inputs = (Arg(shape), x, Arg(c), Arg(c, "positive"), *params, y, residual, signs)
        found.append(Sample(inputs, act, grad=False))
    return found


ACT = OpDef(
    name="batch_norm_act",
    doc="Batch normalisation for training, a residual and an activation in one: "
    "y = activation(batch_norm(x) + residual). Returns what batch_norm_train returns: y, the new "
    "running mean and variance, the mean and 1/√(var + eps) of this batch; with packed also the "
    "signs of y as bits, which is all that the gradient of relu wants of it. Nothing changes in "
    "place, and gradients flow through y alone.",
    inputs=("x", *_PARAMS, "residual?"),
    attrs={**BATCH_TRAIN.attrs, **_ATTRS},
    infer=_infer,
    reference=_reference,
    fusion=Fusion.OPAQUE,
    vjp=_vjp,
    expand=_expand,
    flops=elementwise_flops(10),
    samples=_samples,
    implied=_implied,
)

ACT_GRAD = OpDef(
    name="batch_norm_act_grad",
    doc="The gradient of batch_norm_act: dx, dweight, dbias, and dz, the gradient before the "
    "activation, which is the residual's. mean and rstd are what batch_norm_act returned. Where "
    "it had a residual, relu, relu6 and leaky_relu (with a slope above 0) want its y, or relu its "
    "signs, the other activations want the residual again.",
    inputs=("grad", "x", "mean", "rstd", "weight?", "bias?", "y?", "residual?", "signs?"),
    attrs=_ATTRS,
    infer=_grad_infer,
    reference=_grad_reference,
    fusion=Fusion.OPAQUE,
    vjp=_grad_vjp,
    expand=_grad_expand,
    flops=elementwise_flops(14),
    samples=_grad_samples,
)

OPS = (ACT, ACT_GRAD)
