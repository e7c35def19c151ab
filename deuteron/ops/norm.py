"""Normalisation: batch, layer, RMS, group and instance norm.

All are y = (x − mean) · rstd · weight + bias. They differ in which elements share a mean and in
how the weight lies: that is a :class:`Form`, and one gradient rule serves all forms. Statistics
of 16-bit tensors are kept in float32, and variances come from centred values, so that a mean far
larger than the deviation does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.squares import squarable

Tensor = torch.Tensor
Values = Mapping[str, Any]
Gradients = list[Sym | None]

# ---- what may be asked -----------------------------------------------------------------------


def check_x(name: str, x: TensorType, least_rank: int, eps: float) -> None:
    if not x.dtype.is_float or x.dtype.bits < 16:
        raise GraphError(
            f"{name} of {x.dtype.name} is not defined", remedy='cast first: cast(x, dtype="f32")'
        )
    if x.rank < least_rank:
        raise GraphError(
            f"{name} needs rank {least_rank} or more, x has rank {x.rank}",
            remedy="add the missing dimensions with reshape",
        )
    if not eps >= 0.0:
        raise GraphError(f"{name} needs eps of 0 or more, not {eps}", remedy="use eps=1e-5")


def check_params(name: str, x: TensorType, shape: Shape, params: Mapping[str, Any]) -> None:
    """Weights and statistics have one shape, and the element type of x or float32."""
    for slot, p in params.items():
        if p is not None and p.shape != shape:
            raise GraphError(
                f"{slot} of {name} is {list(p.shape)}, x {list(x.shape)} needs {list(shape)}",
                remedy=f"reshape {slot} to {list(shape)}",
            )
        if p is not None and p.dtype not in (x.dtype, float32 if x.dtype.is_low else x.dtype):
            raise GraphError(
                f"{slot} of {name} is {p.dtype.name}, x is {x.dtype.name}",
                remedy=f'cast it: cast({slot}, dtype="{x.dtype.short}")',
            )


def _check_dims(name: str, x: TensorType, attrs: Values) -> Shape:
    if not 1 <= attrs["dims"] <= x.rank:
        raise GraphError(
            f"{name} over the last {attrs['dims']} dimensions of x, which has rank {x.rank}",
            remedy=f"use dims from 1 to {x.rank}",
        )
    return x.shape[-attrs["dims"] :]


def _check_groups(name: str, x: TensorType, attrs: Values) -> Shape:
    groups, channels = attrs["groups"], x.shape[1]
    if groups < 1 or channels % groups:
        raise GraphError(
            f"{name} cannot divide {channels} channels into {groups} groups",
            remedy=f"use groups that divide {channels}",
        )
    return (channels,)


def _check_spread(name: str, x: TensorType, count: int, remedy: str) -> Shape:
    if count == 1:
        wrong = f"{name} of x {list(x.shape)} sees one value per channel, which has no variance"
        raise GraphError(wrong, remedy=remedy)
    return x.shape[1:2]


# ---- the order of dimensions in memory -------------------------------------------------------

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def suggested(x: TensorType) -> str:
    """What torch calls the suggested memory format: "nhwc" for ranks 4 and 5 whose strides,
    gaps allowed, grow from the channels outwards."""
    if x.rank not in _FORMATS or not x.numel or x.strides[1] == 0:
        return "contiguous"
    floor = 0
    for dim in (1, *range(x.rank - 1, 1, -1), 0):
        if x.strides[dim] < floor or (dim == 0 and floor == x.strides[1]):
            return "contiguous"
        floor = x.strides[dim] * x.shape[dim]
    return "nhwc"


def in_order(y: Tensor, x: Tensor) -> Tensor:
    """``y`` in the suggested order, whatever the device's kernel chose."""
    nhwc = suggested(TensorType.from_tensor(x)) == "nhwc"
    return y.contiguous(memory_format=_FORMATS[x.ndim] if nhwc else torch.contiguous_format)


# ---- gradients -------------------------------------------------------------------------------


class Form(NamedTuple):
    """How x is seen: in which shape, over which axes statistics run, how the weight lies."""

    work: Shape
    axes: tuple[int, ...]
    weight: Shape


def _trailing_form(x: Shape, attrs: Values) -> Form:
    first = len(x) - attrs["dims"]
    return Form(x, tuple(range(first, len(x))), x[first:])


def _group_form(x: Shape, attrs: Values) -> Form:
    groups, each = attrs["groups"], x[1] // attrs["groups"]
    work = (x[0], groups, each, *x[2:])
    return Form(work, tuple(range(2, len(work))), (1, groups, each, *(1 for _ in x[2:])))


def _channel_form(x: Shape, attrs: Values, *also: int) -> Form:
    return Form(x, (*also, *range(2, len(x))), (1, x[1], *(1 for _ in x[2:])))


def _as(b: Ops, x: Sym, shape: Shape) -> Sym:
    x = b.upcast(x)
    return x if x.shape == shape else b.reshape(x, shape=shape)


def _summed(b: Ops, grad: Sym, lies: Shape, param: TensorType) -> Sym:
    """``grad`` summed to how a parameter lies in the form, then in that parameter's type."""
    total = b.unbroadcast(grad, TensorType.of(lies, grad.dtype))
    return b.to(_as(b, total, param.shape), param.dtype)


def _over_root(b: Ops, square: Sym) -> Sym:
    """1 / √square; nan where it is infinite: there squares overflowed, and 0 would make gradients
    of 0 out of any others."""
    out: Sym = b.where(b.isinf(square), math.nan, b.rsqrt(square))
    return out


class Wanted(NamedTuple):
    """Which gradients are asked for: that of x, and of parameters by the types they have."""

    x: bool
    weight: TensorType | None
    bias: TensorType | None


def gradients(
    b: Ops,
    x: Sym,
    grad: Sym,
    weight: Sym | None,
    form: Form,
    eps: float,
    wanted: Wanted,
    *,
    centred: bool = True,
    stats: tuple[Sym | None, Sym] | None = None,
) -> Gradients:
    """Gradients for x, weight and bias, through the statistics too. Where ``stats`` gives mean
    and rstd they are not computed again."""
    source, x, grad = x.type, _as(b, x, form.work), _as(b, grad, form.work)

    def mean(of: Sym) -> Sym:
        out: Sym = b.mean(of, axes=form.axes, keepdim=True)
        return out

    if stats is not None:
        lies = tuple(1 if d in form.axes else n for d, n in enumerate(form.work))
        x = x if stats[0] is None else x - _as(b, stats[0], lies)
        rstd = _as(b, stats[1], lies)
    else:
        x = x - mean(x) if centred else x
        rstd = _over_root(b, mean(b.square(x)) + eps)
    hat = x * rstd
    out: Gradients = [None, None, None]
    if wanted.x:
        inner = grad if weight is None else grad * _as(b, weight, form.weight)
        flat = inner - mean(inner) if centred else inner
        dx = (flat - hat * mean(inner * hat)) * rstd
        out[0] = b.to(_as(b, dx, source.shape), source.dtype)
    if wanted.weight is not None:
        out[1] = _summed(b, grad * hat, form.weight, wanted.weight)
    if wanted.bias is not None:
        out[2] = _summed(b, grad, form.weight, wanted.bias)
    return out


# ---- samples, shared by all norms --------------------------------------------------------------

_SHAPES = (
    ((2, 4, 3), "contiguous", "normal"),
    ((2, 4, 5), "contiguous", "offset"),
    ((2, 4, 3), "transposed", "normal"),
    ((2, 4, 3), "sliced", "normal"),
    ((2, 4, 3, 2), "nhwc", "normal"),
    ((2, 4, 2, 3), "transposed", "normal"),
    ((1, 4, 2, 1, 3), "nhwc", "normal"),
    ((2, 4, 3), "expanded", "normal"),
    ((0, 4, 3), "contiguous", "normal"),
    ((2, 4, 0), "contiguous", "normal"),
)


def _samples(
    slots: Sequence[str], masks: Sequence[str], attrs: Sequence[Values], more: Sequence[Shape] = ()
) -> Callable[[], Sequence[Sample]]:
    """Every shape with the next of ``masks`` ("x": the parameter is given) and ``attrs``."""

    def case(x: Arg, mask: str, extra: Values) -> Sample:
        size = x.shape[-extra["dims"] :] if "dims" in extra else x.shape[1:2]
        params = [Arg(size, "positive" if "var" in slot else "normal") for slot in slots]
        given = (p if m == "x" else None for p, m in zip(params, mask, strict=True))
        return Sample((x, *given), extra)

    def build() -> Sequence[Sample]:
        rows = zip(_SHAPES, cycle(masks), cycle(attrs), strict=False)
        shapes = [case(Arg(s, kind, None, layout), m, a) for (s, layout, kind), m, a in rows]
        shapes += [case(Arg(shape), masks[0], attrs[0]) for shape in more]
        wide = (Arg((4,), "positive", "f32") for _ in slots)
        return (*shapes, Sample((Arg((2, 4, 4), dtype="bf16"), *wide), attrs[0], grad=False))

    return build


# ---- batch norm ------------------------------------------------------------------------------

_EPS = Attr("float", 1e-5, "added to the variance under the root, e.g. 1e-5")
_SLOW = {"momentum": 0.7, "eps": 0.01}
_GIVEN = ("mean", "var", "weight", "bias")
_RUNNING = ("weight", "bias", "running_mean", "running_var")


def wide_type(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype.itemsize < 4 else x.dtype


def _batch_infer(x: TensorType, *params: TensorType | None, eps: float) -> TensorType:
    check_x("batch_norm", x, 2, eps)
    check_params("batch_norm", x, x.shape[1:2], dict(zip(_GIVEN, params, strict=True)))
    return x.with_layout(suggested(x))


def _batch_reference(x: Tensor, *params: Tensor | None, eps: float) -> Tensor:
    mean, var, weight, bias = (None if p is None else p.to(wide_type(x)) for p in params)
    return in_order(F.batch_norm(x, mean, var, weight, bias, eps=eps), x)


def _batch_vjp(b: Ops, v: Vjp) -> Gradients:
    x, grad = b.upcast(v.arg(0)), b.upcast(v.grad)
    lies = _channel_form(x.shape, v.attrs, 0).weight
    rstd = _as(b, b.rsqrt(b.upcast(v.arg(2)) + v.attrs["eps"]), lies)
    scale = rstd * _as(b, v.arg(3), lies) if v.has(3) else rstd
    centred = x - _as(b, v.arg(1), lies)
    rules: tuple[Callable[[], Sym], ...] = (
        lambda: -grad * scale,
        lambda: grad * centred * (scale * b.square(rstd) * -0.5),
        lambda: grad * centred * rstd,
        lambda: grad,
    )
    params = [
        _summed(b, rule(), lies, v.arg(i).type) if v.has(i) and v.needs[i] else None
        for i, rule in enumerate(rules, 1)
    ]
    return [b.to(grad * scale, v.arg(0).dtype) if v.needs[0] else None, *params]


def _train_infer(x: TensorType, *params: TensorType | None, **attrs: Any) -> tuple[TensorType, ...]:
    name, running = "batch_norm_train", params[2:]
    check_x(name, x, 2, attrs["eps"])
    check_params(name, x, x.shape[1:2], dict(zip(_RUNNING, params, strict=True)))
    if (running[0] is None) != (running[1] is None):
        raise GraphError(f"{name} was given one running statistic", remedy="give both or neither")
    _check_spread(name, x, x.shape[0] * prod(x.shape[2:]), "use a larger batch, or batch_norm")
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
    if x.is_cpu and not x.is_contiguous():
        y, mean, rstd, *found = _in_two_passes(x, weight, bias, eps)
        # as torch does, and not by lerp, which makes nan of an infinity
        new = [share * s + (1.0 - share) * n for n, s in zip(new, found, strict=True)]
    else:
        y, mean, rstd = torch.native_batch_norm(x, weight, bias, new[0], new[1], True, share, eps)
    new = [n if r is None else n.to(r.dtype) for n, r in zip(new, running, strict=True)]
    return in_order(y, x), *new, mean, rstd


def _in_two_passes(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """y, mean and rstd, then the mean and the unbiased variance for running statistics. On a CPU
    torch's kernel for channels last adds up all rows in one float32, and is off where the mean is
    large; here the rest of a mean that was rounded is taken from the distances, not from it."""
    axes, lies = (0, *range(2, x.ndim)), (1, -1, *(1 for _ in x.shape[2:]))
    wide = x.to(wide_type(x))
    mean = wide.mean(axes)
    d = wide - mean.view(lies)
    rest = d.mean(axes).nan_to_num(0.0, 0.0, 0.0)  # the mean of infinities stays one
    d = d.sub_(rest.view(lies))
    var = d.square().mean(axes)
    rstd = torch.where(var.isinf(), torch.nan, torch.rsqrt(var + eps))
    scale = rstd if weight is None else rstd * weight
    if bias is None:
        y = d * scale.view(lies)
    else:
        y = torch.addcmul(bias.view(lies), d, scale.view(lies))
    count = x.numel() // x.shape[1]
    mean, rstd, var = (t.detach() for t in (mean + rest, rstd, var * (count / (count - 1))))
    return y.to(x.dtype), mean, rstd, mean, var


def _train_vjp(b: Ops, v: Vjp) -> Gradients:
    if v.grads[0] is None:  # only statistics reach the loss, and those count as fixed
        return [None] * len(v.ins)
    form = _channel_form(v.arg(0).shape, v.attrs, 0)
    weight, bias = (v.arg(i).type if v.has(i) and v.needs[i] else None for i in (1, 2))
    found = gradients(
        b,
        v.arg(0),
        v.grad,
        v.arg(1) if v.has(1) else None,
        form,
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
    attrs={"eps": _EPS},
    infer=_batch_infer,
    reference=_batch_reference,
    fusion=Fusion.BROADCAST,
    vjp=_batch_vjp,
    flops=elementwise_flops(2),
    samples=_samples(_GIVEN, ("xxxx", "xx--", "xx-x"), ({}, {"eps": 0.01}), more=((3, 4),)),
)

BATCH_TRAIN = OpDef(
    name="batch_norm_train",
    doc="Batch normalisation for training: returns y, the new running mean and variance, and "
    "the mean and 1/√(var + eps) of this batch. Nothing changes in place; running statistics "
    "left out start from this batch, with its unbiased variance. Gradients flow through y alone: "
    "the four statistics count as fixed.",
    inputs=("x", *(f"{slot}?" for slot in _RUNNING)),
    attrs={"momentum": Attr("float", 0.1, "share of this batch in the new mean"), "eps": _EPS},
    infer=_train_infer,
    reference=_train_reference,
    fusion=Fusion.REDUCTION,
    vjp=_train_vjp,
    flops=elementwise_flops(8),
    samples=_samples(_RUNNING, ("xxxx", "xx--", "----", "-xxx"), ({}, _SLOW), more=((3, 4),)),
)

# ---- norms that need nothing but x -------------------------------------------------------------


def _by_groups(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> Tensor:
    """On a CPU torch's kernel for channels last takes a variance from squares that are not
    centred, and makes anything of a large mean: positions in one row have one order only."""
    rows = x.reshape(*x.shape[:2], prod(x.shape[2:])) if x.is_cpu and x.ndim > 3 else x
    return torch.group_norm(rows, groups, weight, bias, eps).reshape(x.shape)


class Row(NamedTuple):
    """One of the norms below: its checks, its form and torch's function for it."""

    name: str
    attrs: Mapping[str, Attr]
    least_rank: int
    check: Callable[[str, TensorType, Values], Shape]  # the shape of the weight
    form: Callable[[Shape, Values], Form]
    torch: Callable[..., Tensor]  # of x, weight, bias and the attributes
    keeps_nhwc: bool
    samples: Callable[[], Sequence[Sample]]
    doc: str
    centred: bool = True


def _define(row: Row) -> OpDef:
    slots = ("weight", "bias") if row.centred else ("weight",)

    def vjp(b: Ops, v: Vjp) -> Gradients:
        """One node for all: x and the gradient are then read once for dx and for the sums. Where
        the attributes name an activation, the gradient is that of its result."""
        weight = v.arg(1) if v.has(1) else None
        bias = "none"
        if v.has(2) and v.needs[2]:
            bias = "same" if v.arg(2).dtype == v.arg(0).dtype else v.arg(2).dtype.short
        offset = v.arg(2) if v.has(2) and "activation" in v.attrs else None
        given = (v.arg(0), v.grad, weight, None, offset)
        results = b.call(f"{row.name}_grad", *given, bias=bias, **v.attrs)
        rest = iter(results if isinstance(results, tuple) else (results,))
        out: Gradients = [next(rest), None if weight is None else next(rest)]
        return [*out, *rest, *[None] * len(v.ins)][: len(v.ins)]

    def infer(x: TensorType, *params: TensorType | None, **attrs: Any) -> TensorType:
        check_x(row.name, x, row.least_rank, attrs["eps"])
        shape = row.check(row.name, x, attrs)
        check_params(row.name, x, shape, dict(zip(slots, params, strict=True)))
        return x.with_layout(suggested(x)) if row.keeps_nhwc else x.with_layout("contiguous")

    def reference(x: Tensor, *params: Tensor | None, **attrs: Any) -> Tensor:
        mixed = any(p is not None and p.dtype != x.dtype for p in params)
        v = x
        if x.dtype == torch.float64:
            form = row.form(tuple(x.shape), attrs)
            v = squarable(x.reshape(form.work), form.axes)[0].reshape(x.shape)
        args = (None if t is None else t.float() if mixed else t for t in (v, *params))
        y = row.torch(*args, **attrs).to(x.dtype)
        return in_order(y, x) if row.keeps_nhwc else y.contiguous()

    return OpDef(
        name=row.name,
        doc=row.doc,
        inputs=("x", *(f"{slot}?" for slot in slots)),
        attrs=row.attrs,
        infer=infer,
        reference=reference,
        fusion=Fusion.REDUCTION,
        vjp=vjp,
        flops=elementwise_flops(8 if row.centred else 4),
        samples=row.samples,
    )


_DIMS = Attr("int", 1, "how many trailing dimensions are normalised together, at least 1")
_TRAILING = ({"dims": 1}, {"dims": 2, "eps": 0.01}, {"dims": 1})
_PAIR = ("weight", "bias"), ("xx", "--", "x-", "-x")

ROWS = (
    Row(
        "layer_norm",
        {"dims": _DIMS, "eps": _EPS},
        1,
        _check_dims,
        _trailing_form,
        lambda x, w, b, dims, eps: F.layer_norm(x, x.shape[-dims:], w, b, eps),
        False,
        _samples(*_PAIR, _TRAILING, ((5,),)),
        "(x − mean) / √(var + eps) · weight + bias over the last ``dims`` dimensions; weight "
        "and bias have the shape of these.",
    ),
    Row(
        "rms_norm",
        {"dims": _DIMS, "eps": Attr("float", 1e-6, "added to the mean square, e.g. 1e-6")},
        1,
        _check_dims,
        _trailing_form,
        lambda x, w, dims, eps: F.rms_norm(x, x.shape[-dims:], w, eps),
        False,
        _samples(("weight",), ("x", "x", "-"), _TRAILING, ((5,),)),
        "x / √(mean of x² + eps) · weight over the last ``dims`` dimensions.",
        centred=False,
    ),
    Row(
        "group_norm",
        {"groups": Attr("int", doc="a divisor of the number of channels"), "eps": _EPS},
        2,
        _check_groups,
        _group_form,
        _by_groups,
        True,
        _samples(*_PAIR, ({"groups": 2}, {"groups": 1, "eps": 0.01}), ((3, 4),)),
        "Each sample's channels (dimension 1) in ``groups`` equal groups, each normalised over "
        "its channels and positions, then · weight + bias per channel.",
    ),
    Row(
        "instance_norm",
        {"eps": _EPS},
        3,
        lambda name, x, attrs: _check_spread(name, x, prod(x.shape[2:]), "use group_norm"),
        _channel_form,
        lambda x, w, b, eps: _by_groups(x, w, b, max(x.shape[1], 1), eps),
        False,
        _samples(*_PAIR, ({}, {"eps": 0.01})),
        "Each channel of each sample normalised over its positions, then · weight + bias per "
        "channel.",
    ),
)

OPS = (BATCH, BATCH_TRAIN, *map(_define, ROWS))
