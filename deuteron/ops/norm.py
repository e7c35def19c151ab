"""Layer, RMS, group and instance norm, and their gradients as operators of their own.

All are y = (x − mean) · rstd · weight + bias. They differ in which elements share a mean and in how
the weight broadcasts to x: a :class:`Grouping` says that, and one gradient rule serves all of them,
batch norm too. Statistics of 16-bit tensors are kept in float32, and variances come from centred
values, so that a mean far larger than the deviation does no harm.

The gradient, ``layer_norm_grad`` and its sisters, is one node:

    hat = (x − mean) · rstd                      inner = grad · weight
    dx = (inner − mean(inner) − hat · mean(inner · hat)) · rstd + extra
    dweight = Σ grad · hat                       dbias = Σ grad

dx sums along rows, dweight and dbias down the columns. As one operator they can share one pass over
x and grad; where no kernel does that, ``OpDef.expand`` writes them out. ``extra`` is a further
gradient of x, such as that of a residual stream, which is added to dx. If an activation follows the
norm, ``grad`` is the gradient of its result, and grad in the formulas above is that times the slope
of the activation at hat · weight + offset, where ``offset`` is the bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.activated import ACTIVATION, activation, canonical, with_activation
from deuteron.ops.checks import check_like_x, check_params, check_spread, check_x
from deuteron.ops.conv import memory_order
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.formula import TENSORS
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, OpDef, Vjp, elementwise_flops
from deuteron.ops.reference import wide_type, without_overflow
from deuteron.ops.samples import Arg, Sample, norm_samples

# ---- what may be asked -----------------------------------------------------------------------


def _check_dims(name: str, x: TensorType, attrs: Attributes) -> Shape:
    if not 1 <= attrs["dims"] <= x.rank:
        wrong = f"{name} over the last {attrs['dims']} dimensions of x, which has rank {x.rank}"
        raise GraphError(wrong, remedy=f"use dims from 1 to {x.rank}")
    return x.shape[-attrs["dims"] :]


def _check_groups(name: str, x: TensorType, attrs: Attributes) -> Shape:
    groups, channels = attrs["groups"], x.shape[1]
    if groups < 1 or channels % groups:
        wrong = f"{name} cannot divide {channels} channels into {groups} groups"
        raise GraphError(wrong, remedy=f"use groups that divide {channels}")
    return (channels,)


# ---- the order of dimensions in memory -------------------------------------------------------


def suggested(x: TensorType) -> str:
    """What torch calls the suggested memory format: "nhwc" for ranks 4 and 5 whose strides,
    gaps allowed, grow from the channels outwards."""
    return memory_order(x) if x.rank in (4, 5) else "contiguous"


def in_order(y: Tensor, x: Tensor) -> Tensor:
    """``y`` in the suggested order, whatever the device's kernel chose."""
    if suggested(TensorType.from_tensor(x)) != "nhwc":
        return y.contiguous()
    return y.movedim(1, -1).contiguous().movedim(-1, 1)  # vmap knows no memory formats


# ---- gradients -------------------------------------------------------------------------------


class Grouping(NamedTuple):
    """Which elements share a mean: ``work`` is the shape in which x is viewed, ``axes`` are those
    of its axes over which statistics are taken, and ``weight`` is the shape in which the weight
    broadcasts to it."""

    work: Shape
    axes: tuple[int, ...]
    weight: Shape


def _by_trailing(x: Shape, attrs: Attributes) -> Grouping:
    first = len(x) - attrs["dims"]
    return Grouping(x, tuple(range(first, len(x))), x[first:])


def _by_groups(x: Shape, attrs: Attributes) -> Grouping:
    groups, each = attrs["groups"], x[1] // attrs["groups"]
    work = (x[0], groups, each, *x[2:])
    return Grouping(work, tuple(range(2, len(work))), (1, groups, each, *(1 for _ in x[2:])))


def by_channels(x: Shape, *also: int) -> Grouping:
    """Statistics over the positions of each channel, and over the dimensions in ``also``."""
    return Grouping(x, (*also, *range(2, len(x))), (1, x[1], *(1 for _ in x[2:])))


def shaped(b: Ops, x: Sym, shape: Shape) -> Sym:
    """Return ``x`` in float32 at least, reshaped to ``shape``."""
    x = b.upcast(x)
    return x if x.shape == shape else b.reshape(x, shape=shape)


def summed(b: Ops, grad: Sym, lies: Shape, param: TensorType) -> Sym:
    """Sum ``grad`` to ``lies``, the shape in which a parameter broadcasts to x; return the sum in
    the parameter's own shape and element type."""
    total = b.unbroadcast(grad, TensorType.of(lies, grad.dtype))
    return b.to(shaped(b, total, param.shape), param.dtype)


def gradients(
    b: Ops,
    x: Sym,
    grad: Sym,
    weight: Sym | None,
    grouping: Grouping,
    eps: float,
    wanted: tuple[bool, Given, Given],
    *,
    centred: bool = True,
    stats: tuple[Sym | None, Sym] | None = None,
) -> Grads:
    """Gradients for x, weight and bias, through the statistics too. ``wanted``: whether x needs
    one, and the types of weight and bias if these need one. ``stats``: mean and rstd, if known."""
    source, (work, axes, lies), (of_x, of_weight, of_bias) = x.type, grouping, wanted
    x, grad = shaped(b, x, work), shaped(b, grad, work)

    def mean(of: Sym) -> Sym:
        return b.one("mean", of, axes=axes, keepdim=True)

    if stats is not None:
        one_each = tuple(1 if d in axes else n for d, n in enumerate(work))
        x = x if stats[0] is None else x - shaped(b, stats[0], one_each)
        rstd = shaped(b, stats[1], one_each)
    else:
        # the second time subtracts what rounding left over, which is much if the mean is large
        for _ in range((2 if source.dtype.bits >= 32 else 1) if centred else 0):
            x = x - mean(x)
        square = mean(b.square(x)) + eps
        # nan where squares overflowed: rstd would be 0 there, and so would any gradient
        rstd = b.where(b.isinf(square), math.nan, b.rsqrt(square))
    hat = x * rstd
    out: Grads = [None, None, None]
    if of_x:
        inner = grad if weight is None else grad * shaped(b, weight, lies)
        flat = inner - mean(inner) if centred else inner
        dx = (flat - hat * mean(inner * hat)) * rstd
        out[0] = b.to(shaped(b, dx, source.shape), source.dtype)
    if of_weight is not None:
        out[1] = summed(b, grad * hat, lies, of_weight)
    if of_bias is not None:
        out[2] = summed(b, grad, lies, of_bias)
    return out


# ---- the four norms, and their gradients -------------------------------------------------------

EPS = Attr("float", 1e-5, "added to the variance under the root, e.g. 1e-5")
_WHICH = "the bias whose gradient is asked for: none, of the same type as x, or f32"
_BIAS = Attr("str", "none", _WHICH, choices=("none", "same", "f32"))
_FOLLOWING = ("silu", "leaky_relu(negative_slope=0.2)", "hardswish", "relu", "tanh", "gelu")


class Norm(NamedTuple):
    """One of the norms below: its checks, its grouping and torch's function for it."""

    name: str
    attrs: Mapping[str, Attr]
    least_rank: int
    check: Callable[[str, TensorType, Attributes], Shape]  # the shape of the weight
    grouping: Callable[[Shape, Attributes], Grouping]
    torch: Callable[..., Tensor]  # of x, weight, bias and the attributes
    keeps_nhwc: bool
    samples: Callable[[], Sequence[Sample]]
    doc: str
    centred: bool = True

    @property
    def slots(self) -> tuple[str, ...]:
        return ("weight", "bias") if self.centred else ("weight",)

    # ---- the norm

    def checked(self, name: str, x: TensorType, attrs: Attributes) -> tuple[Shape, TensorType]:
        """The shape of the weight, and the type of the result."""
        check_x(name, x, self.least_rank, attrs["eps"])
        order = suggested(x) if self.keeps_nhwc else "contiguous"
        return self.check(name, x, attrs), x.with_layout(order)

    def infer(self, x: TensorType, *params: Given, **attrs: Any) -> TensorType:
        shape, y = self.checked(self.name, x, attrs)
        check_params(self.name, x, shape, dict(zip(self.slots, params, strict=True)))
        return y

    def reference(self, x: Tensor, *params: Tensor | None, **attrs: Any) -> Tensor:
        mixed = any(p is not None and p.dtype != x.dtype for p in params)
        v = x
        if x.dtype == torch.float64:
            work, axes, _ = self.grouping(tuple(x.shape), attrs)
            v = without_overflow(x.reshape(work), axes)[0].reshape(x.shape)
        args = (None if t is None else t.float() if mixed else t for t in (v, *params))
        y = self.torch(*args, **attrs).to(x.dtype)
        return in_order(y, x) if self.keeps_nhwc else y.contiguous()

    def vjp(self, b: Ops, v: Vjp) -> Grads:
        """One node for all gradients, so that x and ``v.grad`` are read once for dx and the sums.
        If the attributes name an activation, ``v.grad`` is the gradient of its result."""
        weight, bias = v.arg(1) if v.has(1) else None, "none"
        if v.has(2) and v.needs[2]:
            bias = "same" if v.arg(2).dtype == v.arg(0).dtype else v.arg(2).dtype.short
        offset = v.arg(2) if v.has(2) and "activation" in v.attrs else None
        ins = (v.arg(0), v.grad, weight, None, offset)
        made = b.call(f"{self.name}_grad", *ins, bias=bias, **v.attrs)
        rest = iter(made if isinstance(made, tuple) else (made,))
        out: Grads = [next(rest), None if weight is None else next(rest)]
        return [*out, *rest, *[None] * len(v.ins)][: len(v.ins)]

    # ---- its gradient

    def split(self, attrs: Attributes) -> tuple[str, str, dict[str, Any]]:
        """Return the attribute ``bias``, the activation, and the attributes of the norm itself."""
        return attrs["bias"], attrs["activation"], {name: attrs[name] for name in self.attrs}

    def grad_infer(self, x: TensorType, *others: Given, **attrs: Any) -> tuple[TensorType, ...]:
        name, (grad, weight, extra, offset) = f"{self.name}_grad", others
        bias, following, own = self.split(attrs)
        shape, dx = self.checked(name, x, own)
        of_bias = _bias_type(bias, x, shape)
        check_params(name, x, shape, {"weight": weight, "bias": of_bias, "offset": offset})
        if offset is not None and self.centred and following == "none":
            wrong = f"offset of {name} is read where an activation follows alone"
            raise GraphError(wrong, remedy="leave out offset, or say which activation follows")
        check_like_x(name, x, grad=grad, extra=extra)
        if not self.centred and (offset is not None or of_bias is not None):
            raise GraphError(f"{self.name} has no bias", remedy='use bias="none" and no offset')
        of_weight = None if weight is None else TensorType.of(shape, weight.dtype)
        return dx, *(t for t in (of_weight, of_bias) if t is not None)

    def grad_reference(self, x: Tensor, grad: Tensor, *others: Tensor | None, **attrs: Any) -> Any:
        weight, extra, offset = others
        bias, following, own = self.split(attrs)
        (work, axes, lies), wide = self.grouping(tuple(x.shape), own), wide_type(x)
        v, g = (t.to(wide).reshape(work) for t in (x, grad))
        scale, shift = (None if p is None else p.to(wide).reshape(lies) for p in (weight, offset))
        v = v - v.mean(axes, keepdim=True) if self.centred else v
        rstd = torch.rsqrt(v.square().mean(axes, keepdim=True) + own["eps"])
        hat, act = v * rstd, activation(following)
        if act is not None:
            z = hat if scale is None else hat * scale
            z = z if shift is None else z + shift
            g = act.pulled(TENSORS, g, z, act(TENSORS, z))
        inner = g if scale is None else g * scale
        flat = inner - inner.mean(axes, keepdim=True) if self.centred else inner
        dx = (flat - hat * (inner * hat).mean(axes, keepdim=True)) * rstd
        dx = dx.reshape(x.shape) if extra is None else dx.reshape(x.shape) + extra.to(wide)
        dx = dx.to(x.dtype)
        out = [in_order(dx, x) if self.keeps_nhwc else dx.contiguous()]
        shape = x.shape[-own["dims"] :] if "dims" in own else x.shape[1:2]
        if weight is not None:
            out.append((g * hat).sum_to_size(lies).reshape(shape).to(weight.dtype))
        if bias != "none":
            kind = x.dtype if bias == "same" or x.dtype.itemsize > 4 else torch.float32
            out.append(g.sum_to_size(lies).reshape(shape).to(kind, copy=True))
        return tuple(out)

    def grad_expand(self, b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
        x, grad, weight, extra, offset = ins
        bias, following, own = self.split(attrs)
        act = activation(following)
        if act is not None:
            params = (weight, offset) if self.centred else (weight,)
            z = b.one(self.name, x, *params, **own)
            assert act.op.vjp is not None
            (before,) = act.op.vjp(b, Vjp((z,), (act(b, z),), (grad,), act.attrs, (True,)))
            made = b.call(f"{self.name}_grad", x, before, weight, extra, bias=bias, **own)
            return list(made) if isinstance(made, tuple) else [made]
        shape = self.check(self.name, x.type, own)
        wanted = (True, None if weight is None else weight.type, _bias_type(bias, x.type, shape))
        grouping = self.grouping(x.shape, own)
        found = gradients(b, x, grad, weight, grouping, own["eps"], wanted, centred=self.centred)
        if extra is not None:
            assert found[0] is not None
            found[0] = found[0] + extra
        return [g for g in found if g is not None]

    def grad_samples(self) -> Sequence[Sample]:
        found = []
        for k, s in enumerate(self.samples()):
            x, (weight, offset) = s.args[0], (*s.inputs[1:], None)[:2]
            like = Arg(x.shape, dtype=x.dtype)
            attrs = {**s.attrs, "bias": "none" if offset is None else offset.dtype or "same"}
            grad = replace(like, layout="transposed" if k == 2 else "contiguous")
            ins = (x, grad, weight, like if k % 3 == 1 else None)
            found.append(Sample(ins, attrs))
            if k < len(_FOLLOWING):
                attrs = {**attrs, "activation": _FOLLOWING[k]}
                found.append(Sample((*ins, offset if self.centred else None), attrs))
        return found

    # ---- as operators

    def defined(self) -> tuple[OpDef, OpDef]:
        return (
            OpDef(
                name=self.name,
                doc=self.doc,
                inputs=("x", *(f"{slot}?" for slot in self.slots)),
                attrs=self.attrs,
                infer=self.infer,
                reference=self.reference,
                fusion=Fusion.REDUCTION,
                vjp=self.vjp,
                flops=elementwise_flops(8 if self.centred else 4),
                samples=self.samples,
            ),
            OpDef(
                name=f"{self.name}_grad",
                doc=f"The gradients of {self.name}: dx, with ``extra`` added to it, dweight if "
                "there is a weight, dbias if ``bias`` says of which type. With an activation "
                "``grad`` is the gradient of activation(norm), whose bias is ``offset``.",
                inputs=("x", "grad", "weight?", "extra?", "offset?"),
                attrs={**self.attrs, "bias": _BIAS, "activation": ACTIVATION},
                complete=canonical,
                infer=self.grad_infer,
                reference=self.grad_reference,
                fusion=Fusion.OPAQUE,  # a kernel that computes it whole fuses nothing else
                expand=self.grad_expand,
                flops=with_activation(16 if self.centred else 10),
                samples=self.grad_samples,
            ),
        )


def _bias_type(bias: str, x: TensorType, shape: Shape) -> TensorType | None:
    if bias == "none":
        return None
    return TensorType.of(shape, x.dtype if bias == "same" else float32)


def _torch_group_norm(x: Tensor, weight: Any, bias: Any, groups: int, eps: float) -> Tensor:
    """On a CPU torch's kernel for channels last computes the variance from squares that are not
    centred, and goes badly wrong if the mean is large. With all positions in one row, x has only
    one memory order, and torch does not choose that kernel."""
    rows = x.reshape(*x.shape[:2], prod(x.shape[2:])) if x.is_cpu and x.ndim > 3 else x
    return torch.group_norm(rows, groups, weight, bias, eps).reshape(x.shape)


def _torch_instance_norm(x: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
    """torch.instance_norm subtracts the mean; group_norm multiplies by a factor and adds a number,
    so that a large mean costs it digits. But it takes empty tensors, which instance_norm refuses.
    """
    if not x.numel():
        return _torch_group_norm(x, weight, bias, max(x.shape[1], 1), eps)
    cudnn = torch.backends.cudnn.enabled
    return torch.instance_norm(x, weight, bias, None, None, True, 0.0, eps, cudnn)


_DIMS = Attr("int", 1, "how many trailing dimensions are normalised together, at least 1")
_TRAILING = ({"dims": 1}, {"dims": 2, "eps": 0.01}, {"dims": 1})
_OVER_THE_LAST = 1, _check_dims, _by_trailing
_PAIR = ("weight", "bias"), "xx -- x- -x"

NORMS = (
    Norm(
        "layer_norm",
        {"dims": _DIMS, "eps": EPS},
        *_OVER_THE_LAST,
        lambda x, w, b, dims, eps: F.layer_norm(x, x.shape[-dims:], w, b, eps),
        False,
        norm_samples(*_PAIR, _TRAILING, "5"),
        "(x − mean) / √(var + eps) · weight + bias over the last ``dims`` dimensions; weight "
        "and bias have the shape of these.",
    ),
    Norm(
        "rms_norm",
        {"dims": _DIMS, "eps": Attr("float", 1e-6, "added to the mean square, e.g. 1e-6")},
        *_OVER_THE_LAST,
        lambda x, w, dims, eps: F.rms_norm(x, x.shape[-dims:], w, eps),
        False,
        norm_samples(("weight",), "x x -", _TRAILING, "5"),
        "x / √(mean of x² + eps) · weight over the last ``dims`` dimensions.",
        centred=False,
    ),
    Norm(
        "group_norm",
        {"groups": Attr("int", doc="a divisor of the number of channels"), "eps": EPS},
        2,
        _check_groups,
        _by_groups,
        _torch_group_norm,
        True,
        norm_samples(*_PAIR, ({"groups": 2}, {"groups": 1, "eps": 0.01}), "3x4"),
        "Each sample's channels (dimension 1) in ``groups`` equal groups, each normalised over "
        "its channels and positions, then · weight + bias per channel.",
    ),
    Norm(
        "instance_norm",
        {"eps": EPS},
        3,
        lambda name, x, attrs: check_spread(name, x, prod(x.shape[2:]), "use group_norm"),
        lambda x, attrs: by_channels(x),
        _torch_instance_norm,
        True,
        norm_samples(*_PAIR, ({}, {"eps": 0.01})),
        "Each channel of each sample normalised over its positions, then · weight + bias per "
        "channel.",
    ),
)

OPS = tuple(op for norm in NORMS for op in norm.defined())
