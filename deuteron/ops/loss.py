"""Losses over classes: the negative log-likelihood and cross-entropy.

Classes lie along dimension 1 (dimension 0 of a rank-1 input). A target is an integer class for
each position, or for cross_entropy also a float for each class: its probability.

With q the wanted distribution, made of the target and of ``label_smoothing`` shared evenly, both
losses are −Σ q · weight · log p. The mean over integer targets divides by the weights of the
targets that count, so it is nan where none does; over probabilities it divides by the positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.dtype import int32, int64, uint8
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp
from deuteron.ops.samples import Arg, Sample

Tensor = torch.Tensor
_CLASSES = (int64, int32, uint8)

# ---- what may be asked -----------------------------------------------------------------------


def _axis(x: Shape) -> int:
    """The dimension of the classes."""
    return min(1, len(x) - 1)


def _without_classes(x: Shape) -> Shape:
    return x[: _axis(x)] + x[_axis(x) + 1 :]


def _with_one_class(x: Shape) -> Shape:
    return (*x[: _axis(x)], 1, *x[_axis(x) + 1 :])


def _along(x: Shape) -> Shape:
    """The classes of ``x``, and 1 everywhere else."""
    return tuple(size if i == _axis(x) else 1 for i, size in enumerate(x))


def _check_target(name: str, x: TensorType, target: TensorType, attrs: Mapping[str, Any]) -> None:
    want = _without_classes(x.shape)
    if target.dtype.is_float and name == "cross_entropy":
        if target.shape != x.shape or target.dtype != x.dtype:
            raise GraphError(
                f"the target of {name} holds probabilities and is {target}, the logits are {x}",
                remedy="give both one shape and one element type, or integer classes of shape "
                f"{list(want)}",
            )
        if attrs["ignore_index"] >= 0:
            raise GraphError(
                f"ignore_index={attrs['ignore_index']} cannot point into probabilities",
                remedy="leave ignore_index out, or give integer classes",
            )
        return
    if target.dtype not in _CLASSES:
        raise GraphError(
            f"the target of {name} is {target.dtype.name}, not integer classes",
            remedy='cast it: cast(target, dtype="i64")',
        )
    if target.shape != want:
        raise GraphError(
            f"the target of {name} has shape {list(target.shape)}, x {list(x.shape)} needs "
            f"{list(want)}",
            remedy="give one class for each position; classes lie along dimension 1 of x",
        )


def _infer(name: str) -> Callable[..., TensorType]:
    def infer(
        x: TensorType, target: TensorType, weight: TensorType | None, **attrs: Any
    ) -> TensorType:
        if not x.dtype.is_float or x.dtype.bits < 16:
            raise GraphError(
                f"{name} of {x.dtype.name} is not defined",
                remedy='cast first: cast(x, dtype="f32")',
            )
        if x.rank == 0:
            raise GraphError(
                f"{name} of a scalar: there are no classes", remedy="give x of shape [N, C]"
            )
        if not 0.0 <= attrs.get("label_smoothing", 0.0) <= 1.0:
            raise GraphError(
                f"label_smoothing={attrs['label_smoothing']} is not a share",
                remedy="use a number from 0 to 1",
            )
        _check_target(name, x, target, attrs)
        classes = (x.shape[_axis(x.shape)],)
        if weight is not None and (weight.shape != classes or weight.dtype != x.dtype):
            raise GraphError(
                f"the weight of {name} is {weight}, x has {classes[0]} classes in {x.dtype.name}",
                remedy=f"give {x.dtype.short}{list(classes)}: one weight per class",
            )
        shape = _without_classes(x.shape) if attrs["reduction"] == "none" else ()
        return TensorType.of(shape, x.dtype)

    return infer


def _reference(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reference(x: Tensor, target: Tensor, weight: Tensor | None, **attrs: Any) -> Tensor:
        classes = target if target.is_floating_point() else target.long()
        return fn(x, classes, weight, **attrs).contiguous()

    return reference


# ---- gradients ---------------------------------------------------------------------------------


class Wanted(NamedTuple):
    """What the target asks for, each shaped like x or with one class."""

    q: Sym  # the wanted distribution
    valid: Sym | None  # positions that count; None where all do
    hit: Sym | None  # the class of each target that counts; None for probabilities
    divisor: Sym | float  # what the mean divides by


def _wanted(b: Ops, v: Vjp, x: Sym, weight: Sym | None) -> Wanted:
    axis, smooth = _axis(x.shape), v.attrs.get("label_smoothing", 0.0)
    number, ignored = x.shape[axis], v.attrs["ignore_index"]
    even = smooth / max(number, 1)
    if v.arg(1).dtype.is_float:
        q = b.upcast(v.arg(1)) * (1.0 - smooth) + even if smooth else b.upcast(v.arg(1))
        return Wanted(q, None, None, float(x.type.numel // max(number, 1)))
    classes = b.constant(torch.arange(number).reshape(_along(x.shape)), "classes")
    target = b.reshape(b.to(v.arg(1), int64), shape=_with_one_class(x.shape))
    valid, hit = b.ne(target, ignored), b.eq(target, classes)
    if 0 <= ignored < number:  # any other number meets no class anyway
        hit = b.logical_and(hit, valid)
    divisor: Sym | float = 1.0
    if v.attrs["reduction"] == "mean":
        divisor = b.sum(b.to(valid, x.dtype) if weight is None else b.where(hit, weight, 0.0))
    q = b.to(hit, x.dtype)
    return Wanted(q * (1.0 - smooth) + even if smooth else q, valid, hit, divisor)


def _outer(b: Ops, v: Vjp, divisor: Sym | float) -> Sym:
    """The gradient that reaches each position's −Σ q · weight · log p."""
    grad = b.upcast(v.grad)
    if v.attrs["reduction"] == "none":
        out: Sym = b.reshape(grad, shape=_with_one_class(v.arg(0).shape))
        return out
    return grad / divisor if v.attrs["reduction"] == "mean" else grad


def _vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    """One rule for both losses: for log-probabilities the gradient is −q · weight, for logits
    p · (Σ q · weight) − q · weight. The weight has one too, which PyTorch leaves out."""
    x, axis, logits = b.upcast(v.arg(0)), _axis(v.arg(0).shape), "label_smoothing" in v.attrs
    weight = b.reshape(b.upcast(v.arg(2)), shape=_along(x.shape)) if v.has(2) else None
    want = _wanted(b, v, x, weight)
    outer = _outer(b, v, want.divisor)
    out: list[Sym | None] = [None, None, None]

    def counted(value: Sym) -> Sym:
        kept: Sym = value if want.valid is None else b.where(want.valid, value, 0.0)
        return kept

    if v.needs[0]:
        inner = want.q if weight is None else want.q * weight
        dx = -inner
        if logits:
            p = b.softmax(x, axis=axis)
            sums_to_one = weight is None and want.hit is not None
            dx = (p if sums_to_one else p * b.sum(inner, axes=(axis,), keepdim=True)) - inner
        out[0] = b.to(counted(dx * outer), v.arg(0).dtype)
    if v.needs[1] or v.needs[2]:
        surprise = -(b.log_softmax(x, axis=axis) if logits else x)
        if v.needs[1]:
            share = outer * (1.0 - v.attrs["label_smoothing"])
            dt = surprise * share if weight is None else surprise * share * weight
            out[1] = b.to(dt, v.arg(1).dtype)
        if v.needs[2]:
            each = b.where(b.eq(want.q, 0.0), 0.0, want.q * surprise)
            if want.hit is not None and v.attrs["reduction"] == "mean":  # weights divide as well
                each = each - b.to(want.hit, x.dtype) * b.upcast(v.outs[0])
            like = TensorType.of(_along(x.shape), x.dtype)
            dw = b.unbroadcast(counted(each * outer), like)
            out[2] = b.to(b.reshape(dw, shape=v.arg(2).shape), v.arg(2).dtype)
    return out


# ---- positions joined afterwards ----


def _joined_after(b: Ops, ins: Sequence[Sym | None], attrs: Mapping[str, Any]) -> list[Sym]:
    """The loss of each position, then their sum or mean: two kernels that read the logits once,
    where one would have to wait for all others. Positions are summed in float32."""
    x, target, weight = ins
    assert x is not None and target is not None
    given = b.upcast(target) if target.dtype.is_float else target
    share = None if weight is None else b.upcast(weight)
    each = b.cross_entropy(b.upcast(x), given, share, **{**attrs, "reduction": "none"})
    total = b.sum(each)
    if attrs["reduction"] == "mean":
        total = total / _divisor(b, each, target, share, attrs["ignore_index"])
    return [b.to(total, x.dtype)]


def _divisor(b: Ops, each: Sym, target: Sym, weight: Sym | None, ignored: int) -> Sym | float:
    """What the mean divides by: all positions, or the weights of the targets that count."""
    count = each.type.numel
    if target.dtype.is_float:
        return float(count)
    target = b.reshape(b.to(target, int64), shape=(count,))
    valid = b.ne(target, ignored)
    counts = b.to(valid, each.dtype)
    if weight is not None:
        of_class = b.index_select(weight, b.where(valid, target, 0), axis=0)
        counts = b.where(valid, of_class, 0.0)
    out: Sym = b.sum(counts)
    return out


# ---- the operators -------------------------------------------------------------------------------

_TAIL = {
    "ignore_index": Attr("int", -100, "positions with this target do not count"),
    "reduction": Attr("str", "mean", "how positions are joined", ("mean", "sum", "none")),
}


def _class_samples() -> tuple[Sample, ...]:
    def case(
        shape: Shape, weighted: bool = False, layout: str = "contiguous", **how: Any
    ) -> Sample:
        number = shape[_axis(shape)]
        target = Arg(_without_classes(shape), "index", how.pop("of", None), high=number)
        weight = (Arg((number,), "positive"),) if weighted else ()
        return Sample((Arg(shape, layout=layout), target, *weight), how)

    return (
        case((4, 3)),
        case((4, 3), weighted=True, layout="transposed", ignore_index=1),
        case((2, 3, 4), weighted=True, reduction="none"),
        case((2, 3, 2, 4), layout="nhwc", reduction="none", ignore_index=2),
        case((5, 3), weighted=True, layout="sliced", reduction="sum", ignore_index=0, of="i32"),
        case((3,)),
        case((0, 3), reduction="sum"),
    )


def _nll_samples() -> Sequence[Sample]:
    none = Sample(
        (Arg((3, 4)), Arg((3,), "index", high=1)), {"ignore_index": 0}, False, "none valid"
    )
    return (*_class_samples(), none)


def _cross_entropy_samples() -> Sequence[Sample]:
    smooth = {"label_smoothing": 0.2}
    few = _nll_samples()
    return (
        *few,
        replace(few[1], attrs={**few[1].attrs, **smooth}),
        replace(few[3], attrs={**few[3].attrs, **smooth}),
        Sample((Arg((4, 3)), Arg((4, 3), "positive"), Arg((3,), "positive")), smooth),
        Sample((Arg((2, 3, 4), layout="transposed"), Arg((2, 3, 4))), {"reduction": "none"}),
    )


NLL = OpDef(
    name="nll_loss",
    doc="−weight · x at the target's class: the loss of log-probabilities [N, C, …] against "
    "integer classes [N, …], joined by their weighted mean, their sum, or not at all.",
    inputs=("x", "target", "weight?"),
    attrs=_TAIL,
    infer=_infer("nll_loss"),
    reference=_reference(F.nll_loss),
    fusion=Fusion.REDUCTION,
    vjp=_vjp,
    flops=lambda ins, outs, attrs: 2.0 * (ins[1].numel if ins[1] is not None else 0),
    samples=_nll_samples,
)

CROSS_ENTROPY = OpDef(
    name="cross_entropy",
    doc="nll_loss of log_softmax(logits) along dimension 1, with a share label_smoothing of each "
    "target spread over all classes. Targets are integer classes [N, …], or probabilities in the "
    "shape of the logits.",
    inputs=("logits", "target", "weight?"),
    attrs={"label_smoothing": Attr("float", 0.0, "from 0 to 1"), **_TAIL},
    infer=_infer("cross_entropy"),
    reference=_reference(F.cross_entropy),
    fusion=Fusion.REDUCTION,
    vjp=_vjp,
    expand=_joined_after,
    flops=lambda ins, outs, attrs: 12.0 * (ins[0].numel if ins[0] is not None else 0),
    samples=_cross_entropy_samples,
)

OPS = (NLL, CROSS_ENTROPY)
