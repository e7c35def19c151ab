"""Batch normalisation: for inference, with given statistics; for training, with those of the batch;
and for training together with what follows it: y = act(batch_norm(x) + residual).

The last is one operator for the forward step and one for its gradient, so that a kernel can do each
in the least number of passes over memory. Counted in tensors of the size of x, with a residual:

    forward     read x for the statistics; read x and the residual, write y              4
    gradient    read grad, x and y, write dz; read dz and x, write dx                    7
                read the signs of y instead, kept as bits by the forward step            6

dz is the gradient of the activation's input. It is also the gradient of the residual, so writing it
costs nothing extra, and reading it again is one tensor less than computing it again from grad and
y. Without a residual the gradient reads only grad and x, because the activation's input follows
from x: 5 tensors instead of 7. With a residual, activations whose slope can be computed from y read
y, which the next layer keeps anyway; the others read the residual. relu needs only the signs of y
(``signs.py``): on a GPU the forward step keeps those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import TensorType
from deuteron.ops.activated import ACTIVATION, activation, canonical, with_activation
from deuteron.ops.checks import check_like_x, check_params, check_spread, check_x
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.formula import TENSORS
from deuteron.ops.norm import EPS, by_channels, gradients, in_order, shaped, suggested, summed
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Vjp, elementwise_flops, operator
from deuteron.ops.reference import lay, wide_type
from deuteron.ops.samples import Arg, Sample, norm_samples, samples
from deuteron.ops.signs import PACKED, pack, signs_type, unpack

# ---- statistics that are given -----------------------------------------------------------------

_KNOWN = ("mean", "var", "weight", "bias")


def _given_reference(x: Tensor, *params: Tensor | None, eps: float) -> Tensor:
    mean, var, weight, bias = (None if p is None else p.to(wide_type(x)) for p in params)
    return in_order(F.batch_norm(x, mean, var, weight, bias, eps=eps), x)


def _given_vjp(b: Ops, v: Vjp) -> Grads:
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

_OWN = ("weight", "bias", "running_mean", "running_var")
AGAIN = ("x", "weight?", "bias?", "residual?")  # with mean and rstd, y can be made again from these


def _train_reference(x: Tensor, *params: Any, momentum: float, eps: float) -> tuple[Tensor, ...]:
    running, wide = params[2:], wide_type(x)
    unknown = x.new_full(x.shape[1:2], torch.nan, dtype=wide)
    if not x.numel():  # nothing to learn from: the running statistics stay
        old = [unknown if r is None else r for r in running]
        return torch.empty_like(x), *(t.clone() for t in (*old, unknown, unknown))
    weight, bias = (None if p is None else p.to(wide) for p in params[:2])
    new = [torch.zeros_like(unknown) if r is None else r.to(wide, copy=True) for r in running]
    share = 1.0 if running[0] is None else momentum
    # on a CPU torch's kernel for channels last adds up all rows in one float32
    plain = x.contiguous() if x.is_cpu else x
    y, mean, rstd = torch.native_batch_norm(plain, weight, bias, new[0], new[1], True, share, eps)
    new = [n if r is None else n.to(r.dtype) for n, r in zip(new, running, strict=True)]
    return in_order(y, x), *new, mean, rstd


def _train_vjp(b: Ops, v: Vjp) -> Grads:
    """The gradient of ``batch_norm_act`` without a residual and an activation."""
    bare = replace(v, ins=(*v.ins, None), attrs={**v.attrs, "activation": "none", "packed": "none"})
    return _act_vjp(b, bare)[:5]


@operator(
    Fusion.BROADCAST,
    _given_reference,
    "x mean var weight? bias?",
    attrs={"eps": EPS},
    vjp=_given_vjp,
    flops=elementwise_flops(2),
    samples=norm_samples(_KNOWN, "xxxx xx-- xx-x", ({}, {"eps": 0.01}), "3x4"),
)
def batch_norm(x: TensorType, *params: Given, eps: float) -> TensorType:
    """(x − mean) / √(var + eps) · weight + bias for each channel (dimension 1), with statistics
    that are given: batch normalisation for inference."""
    check_x("batch_norm", x, 2, eps)
    check_params("batch_norm", x, x.shape[1:2], dict(zip(_KNOWN, params, strict=True)))
    return x.with_layout(suggested(x))


def _trained(x: TensorType, *params: Given, eps: float) -> tuple[TensorType, ...]:
    name, running = "batch_norm_train", params[2:]
    check_x(name, x, 2, eps)
    check_params(name, x, x.shape[1:2], dict(zip(_OWN, params, strict=True)))
    if (running[0] is None) != (running[1] is None):
        raise GraphError(f"{name} was given one running statistic", remedy="give both or neither")
    check_spread(name, x, x.shape[0] * prod(x.shape[2:]), "use a larger batch, or batch_norm")
    stat = TensorType.of(x.shape[1:2], float32 if x.dtype.is_low else x.dtype)
    new = (stat if r is None else stat.with_dtype(r.dtype) for r in running)
    return x.with_layout(suggested(x)), *new, stat, stat


_TRAIN = {"momentum": Attr("float", 0.1, "share of this batch in the new mean"), "eps": EPS}


@operator(
    Fusion.REDUCTION,
    _train_reference,
    "x weight? bias? running_mean? running_var?",
    attrs=_TRAIN,
    vjp=_train_vjp,
    again=(AGAIN, (3, 4), lambda *given: _again(*given)),
    flops=elementwise_flops(8),
    samples=norm_samples(_OWN, "xxxx xx-- ---- -xxx", ({}, {"momentum": 0.7, "eps": 0.01}), "3x4"),
)
def batch_norm_train(*types: TensorType, momentum: float, eps: float) -> tuple[TensorType, ...]:
    """Batch normalisation for training: returns y, the new running mean and variance, and the mean
    and 1/√(var + eps) of this batch. Nothing changes in place; running statistics left out start
    from this batch, with its unbiased variance. Gradients flow through y alone: the four statistics
    count as fixed."""
    return _trained(*types, eps=eps)


# ---- with a residual and an activation ----------------------------------------------------------

_ATTRS = {
    "activation": ACTIVATION,
    "packed": Attr("str", "none", "along what the signs after relu are bits", choices=PACKED),
}


def told_by_result(text: str) -> bool:
    """Whether the slope of an activation can be computed from y alone; also true for "none"."""
    act = activation(text)
    return act is None or act.told_by_result


def _check_packed(following: str, packed: str) -> None:
    if packed != "none" and following != "relu":
        wrong = f"signs are kept of relu's results, not of those of {following}"
        raise GraphError(wrong, remedy='leave packed out, or use activation="relu"')


def _act_reference(x: Tensor, *rest: Tensor | None, **attrs: Any) -> tuple[Tensor, ...]:
    *params, residual = rest
    packed, act = attrs["packed"], activation(attrs["activation"])
    y, *statistics = _train_reference(x, *params, momentum=attrs["momentum"], eps=attrs["eps"])
    like = TensorType.from_tensor(y)
    z = y if residual is None else y.add_(residual)  # y is new, so nobody else sees the change
    y = lay(z if act is None else act(TENSORS, z), like)
    return (y, *statistics) if packed == "none" else (y, *statistics, pack(y, packed))


def _act_implied(outs: Sequence[Tensor | None], attrs: Attributes) -> dict[int, Tensor]:
    y, packed = outs[0], attrs["packed"]
    return {} if y is None or packed == "none" else {5: pack(y, packed)}


def _act_vjp(b: Ops, v: Vjp) -> Grads:
    if v.grads[0] is None:  # only statistics reach the loss, and those count as fixed
        return [None] * len(v.ins)
    attrs = {name: v.attrs[name] for name in _ATTRS}
    bare, by_y = attrs["activation"] == "none", told_by_result(attrs["activation"])
    signs = None if attrs["packed"] == "none" else v.outs[5]
    y = v.outs[0] if v.has(5) and not bare and by_y and signs is None else None
    residual = v.arg(5) if v.has(5) and not by_y else None
    weight, bias = v.ins[1], v.ins[2]
    dx, dweight, dbias, dz = b.batch_norm_act_grad(
        v.grad, v.arg(0), v.outs[3], v.outs[4], weight, bias, y, residual, signs, **attrs
    )
    pairs = ((weight, dweight), (bias, dbias))
    params = [None if p is None else b.to(grad, p.dtype) for p, grad in pairs]
    return [dx, *params, None, None, (v.grad if bare else dz) if v.has(5) else None]


def _act_expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    """The three operators that it stands for: batch_norm_train, an addition, the activation."""
    *params, residual = ins
    act, packed = activation(attrs["activation"]), attrs["packed"]
    y, *statistics = b.batch_norm_train(*params, momentum=attrs["momentum"], eps=attrs["eps"])
    z = y if residual is None else y + residual
    y = z if act is None else act(b, z)
    return [y, *statistics, *([] if packed == "none" else [pack(y, packed, b)])]


# ---- gradient ----------------------------------------------------------------------------------


def _before_activation(b: Any, grad: Any, x: Any, params: Syms, rest: Syms, attrs: Any) -> Any:
    """dz, in float32 at least where there is an activation; for tensors, or for values of a graph.
    ``params``: mean, rstd, weight, bias; ``rest``: y, residual, signs. The mean is subtracted from
    x first: folded into the bias, a large mean would cost digits."""
    (y, residual, signs), act = rest, activation(attrs["activation"])
    if signs is not None:
        return b.where(unpack(signs, tuple(x.shape), attrs["packed"], b), grad, 0.0)
    if act is None:
        return grad
    z = y = None if y is None else b.upcast(y)
    if z is None:
        z = _normalised(b, x, params, residual)
        y = act(b, z)
    return act.pulled(b, b.upcast(grad), z, y)


def _normalised(b: Any, x: Any, params: Syms, residual: Any) -> Any:
    """The input of the activation, in float32 at least."""
    lies = by_channels(tuple(x.shape)).weight
    mean, rstd, weight, bias = (None if p is None else shaped(b, p, lies) for p in params)
    x, residual = (None if t is None else b.upcast(t) for t in (x, residual))
    z = (x - mean) * (rstd if weight is None else rstd * weight)
    z = z if bias is None else z + bias
    return z if residual is None else z + residual


def _remade(b: Any, given: Sequence[Any], attrs: Attributes) -> Any:
    """y, computed again from what its gradient reads anyway, in float32 at least."""
    x, weight, bias, residual, mean, rstd = given
    act = activation(attrs.get("activation", "none"))
    z = _normalised(b, x, (mean, rstd, weight, bias), residual)
    return z if act is None else act(b, z)


def _again(b: Ops, given: Syms, attrs: Attributes) -> Sym:
    assert given[0] is not None
    return b.to(_remade(b, given, attrs), given[0].dtype)


def _learned(x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """The same statistics, but computed from x if autograd is recording: a second derivative has to
    know that they depend on x. torch's backward of batch norm, used below, takes care of its part.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return mean, rstd
    axes = [i for i in range(x.ndim) if i != 1]
    var = x.var(axes, correction=0)
    return x.mean(axes), (var + (rstd**-2 - var).detach()).rsqrt()


def _act_grad_reference(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, *rest: Tensor | None, **attrs: Any
) -> tuple[Tensor, ...]:
    (weight, bias, *others), t = rest, TensorType.from_tensor(x)
    image, wide = t.with_layout(suggested(t)), wide_type(x)
    # on a CPU torch reads these, and the weight, as if they had no gaps
    mean, rstd = mean.to(wide).contiguous(), rstd.to(wide).contiguous()
    if not x.numel():
        zero = torch.zeros_like(mean)
        empty = [lay(torch.empty_like(x), image) for _ in range(2 if attrs.get("again") else 1)]
        return empty.pop(), zero, zero.clone(), lay(grad.clone(), image), *empty
    stats = _learned(x.to(wide), mean, rstd)
    params = (*stats, weight, bias)
    dz = _before_activation(TENSORS, grad, x, params, others, attrs).to(x.dtype)
    dz = lay(dz.clone() if dz is grad else dz, image)
    scale = torch.ones_like(mean) if weight is None else weight.to(wide).contiguous()
    dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dz, lay(x, image), scale, None, None, mean, rstd, True, 0.0, [True] * 3
    )
    if not attrs.get("again"):
        return lay(dx, image), dweight, dbias, dz
    y = _remade(TENSORS, (x, weight, bias, others[1], *stats), attrs).to(x.dtype)
    return lay(dx, image), dweight, dbias, dz, lay(y, image)


def _act_grad_expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    """The gradient written with simpler operators, in float32 at least."""
    grad, x, mean, rstd, weight, bias, *rest = ins
    dz = _before_activation(b, b.upcast(grad), x, (mean, rstd, weight, bias), rest, attrs)
    stat = TensorType.of(x.shape[1:2], b.upcast(mean).dtype)
    grouping, wanted = by_channels(x.shape, 0), (True, stat, stat)
    found = gradients(b, x, dz, weight, grouping, 0.0, wanted, stats=(mean, rstd))
    remade = (x, weight, bias, rest[1], mean, rstd)
    y = [_again(b, remade, attrs)] if attrs.get("again") else []
    return [*(g for g in found if g is not None), b.to(dz, x.dtype), *y]


def _act_grad_vjp(b: Ops, v: Vjp) -> Grads:
    """Refused: mean and rstd count as fixed inputs here, though they depend on x. The first
    gradient takes that into account; a second one, derived from this formula, would be wrong."""
    remedy = "for second derivatives write batch norm with mean, square and rsqrt"
    raise GraphError("the gradient of batch_norm_act has no gradient of its own", remedy=remedy)


# ---- samples and definitions ---------------------------------------------------------------------

_SHAPES = samples(
    """2x4x3 | 2x4x3x2@nhwc | 2x4x2x3@transposed | 3x4 | 2x3x3@sliced | 1x4x2x1x3@nhwc | 0x4x3
    | 3x2x5 | 2x4x0"""
)
_FOLLOWING = (
    *("none", "relu", "relu6", "leaky_relu", "silu", "hardswish"),
    *("leaky_relu(negative_slope=-0.5)", "gelu(approximate='tanh')", "sigmoid", "elu", "tanh"),
)

# full bytes and partly filled ones, an empty tensor, a matrix
_WITH_SIGNS = samples(
    """2x9x3x2@nhwc packed=channels | 2x8x3 packed=positions | 2x3x5x5 packed=positions
    | 3x4 packed=channels | 2x4x3x3 packed=channels | 0x8x3 packed=positions""",
    activation="relu",
)


def _cases() -> Iterator[tuple[Arg, Attributes, bool]]:
    """Yield x, attributes, and whether there is a residual: all activations without and then with
    one, on the shapes in turn; at the end the cases with signs."""
    plain = zip(cycle(_SHAPES()), _FOLLOWING * 2, strict=False)
    cases = [*(replace(s, attrs={"activation": act}) for s, act in plain), *_WITH_SIGNS()]
    joined = (*(False,) * len(_FOLLOWING), *(True,) * (len(_FOLLOWING) + 4), False, False)
    for s, with_residual in zip(cases, joined, strict=True):
        yield s.args[0], s.attrs, with_residual


def _act_samples() -> Iterator[Sample]:
    for i, (x, act, joined) in enumerate(_cases()):
        c, mask = x.shape[1:2], ("xxxx", "xx--", "----")[i % 3]
        params = [Arg(c), Arg(c), Arg(c), Arg(c, "positive")]
        there = [p if m == "x" else None for p, m in zip(params, mask, strict=True)]
        residual = replace(x, layout="contiguous" if i % 4 else x.layout) if joined else None
        x = replace(x, kind="offset") if i % 5 == 4 else x
        yield Sample((x, *there, residual), act)


def _act_grad_samples() -> Iterator[Sample]:
    for i, (x, act, joined) in enumerate(_cases()):
        shape, c = x.shape, x.shape[1:2]
        params = [Arg(c), Arg(c)] if i % 3 else [None, None]
        by_y, packed = told_by_result(act["activation"]), act.get("packed", "none")
        y = replace(x, kind="away") if joined and by_y and packed == "none" else None
        residual = Arg(shape) if joined and not by_y else None
        signs = None if packed == "none" else Arg(signs_type(shape, packed).shape, dtype="u8")
        inputs = (Arg(shape), x, Arg(c), Arg(c, "positive"), *params, y, residual, signs)
        yield Sample(inputs, act, grad=False)
        if y is None and i % 2:
            beside = (*inputs[:7], Arg(shape) if joined else None, signs)
            yield Sample(beside, {**act, "again": True}, grad=False)


@operator(
    Fusion.OPAQUE,
    _act_reference,
    "x weight? bias? running_mean? running_var? residual?",
    attrs=_TRAIN | _ATTRS,
    complete=canonical,
    vjp=_act_vjp,
    expand=_act_expand,
    again=(AGAIN, (3, 4), _again),
    flops=with_activation(10),
    samples=_act_samples,
    implied=_act_implied,
)
def batch_norm_act(
    x: TensorType, *rest: Given, activation: str, packed: str, eps: float, **how: Any
) -> tuple[TensorType, ...]:
    """Batch normalisation for training, a residual and an activation in one:
    y = activation(batch_norm(x) + residual). Returns what batch_norm_train returns: y, the new
    running mean and variance, the mean and 1/√(var + eps) of this batch; with packed also the signs
    of y as bits, which are all that the gradient of relu needs of y. Nothing changes in place, and
    gradients flow through y alone."""
    *params, residual = rest
    _check_packed(activation, packed)
    types = _trained(x, *params, eps=eps)
    check_like_x("batch_norm_act", x, residual=residual)
    return types if packed == "none" else (*types, signs_type(x.shape, packed))


@operator(
    Fusion.OPAQUE,
    _act_grad_reference,
    "grad x mean rstd weight? bias? y? residual? signs?",
    attrs=_ATTRS | {"again": Attr("bool", False, "whether y is made once more, as a fifth result")},
    complete=canonical,
    vjp=_act_grad_vjp,
    expand=_act_grad_expand,
    flops=with_activation(14),
    samples=_act_grad_samples,
)
def batch_norm_act_grad(
    grad: TensorType, x: TensorType, *rest: Given, activation: str, packed: str, again: bool = False
) -> tuple[TensorType, ...]:
    """The gradient of batch_norm_act: dx, dweight, dbias, and dz, the gradient of the activation's
    input, which is also the residual's. mean and rstd are what batch_norm_act returned. If it had a
    residual, give y for activations whose slope follows from y (relu, tanh, leaky_relu with a slope
    above 0, …), or for relu its signs; for the others give the residual. With again, y is computed
    once more, from x and the residual if there was one, for other operators that read it."""
    mean, rstd, weight, bias, y, residual, signs = rest
    image, _, _, stat, _ = _trained(x, weight, bias, None, None, eps=0.0)
    check_like_x("batch_norm_act_grad", x, grad=grad, y=y, residual=residual)
    for what, s in (("mean", mean), ("rstd", rstd)):
        assert s is not None
        if s.shape != stat.shape or s.dtype not in (stat.dtype, x.dtype):
            wrong = f"{what} is {s}, x {list(x.shape)} needs {stat}"
            raise GraphError(wrong, remedy="give what batch_norm_act returned")
    if y is not None and not told_by_result(activation):
        wrong = f"the gradient of {activation} cannot be told from y"
        raise GraphError(wrong, remedy="give the residual")
    _check_packed(activation, packed)
    wanted = None if packed == "none" else signs_type(x.shape, packed)
    kinds = [None if t is None else (t.shape, t.dtype) for t in (signs, wanted)]
    if kinds[0] != kinds[1]:
        wrong = f"signs are {signs or 'missing'}, packed={packed!r} needs {wanted or 'none'}"
        remedy = "give the signs and the packed of batch_norm_act, or neither"
        raise GraphError(wrong, remedy=remedy)
    if again and y is not None:
        raise GraphError("y is given, and is to be made again", remedy="leave out again")
    return image, stat, stat, image, *([image] if again else [])
