"""Losses over classes: the negative log-likelihood and cross-entropy.

Classes lie along dimension 1 (dimension 0 of a rank-1 input). A target is an integer class for
each position, or for cross-entropy also a float for each class: its probability.

With q the wanted distribution (the target, of which a share ``label_smoothing`` is spread evenly
over all classes), both losses are −Σ q · weight · log p. The mean over integer targets divides by
the sum of the weights of the targets that count, so it is nan if none does; over probabilities it
divides by the number of positions.

``cross_entropy_with_grad`` is what kernels compute: in one pass over the logits the loss of every
position, its lse = log Σ exp logits, and the gradient of the logits. The gradient of
``cross_entropy`` is written with it, and passes/combine.py then takes the loss from it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, float32, float64, int32, int64, uint8
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import check_float, check_shape
from deuteron.ops.emit import Grads, Ops, Sym, Syms
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Vjp, input_flops, operator
from deuteron.ops.samples import Arg, Sample

CLASSES = (int64, int32, uint8)

# ---- what may be asked -----------------------------------------------------------------------


def class_axis(x: Shape) -> int:
    """The dimension of the classes."""
    return min(1, len(x) - 1)


def positions(x: Shape) -> Shape:
    """The shape of the logits without their classes."""
    return x[: class_axis(x)] + x[class_axis(x) + 1 :]


def _with_one_class(x: Shape) -> Shape:
    return (*x[: class_axis(x)], 1, *x[class_axis(x) + 1 :])


def _along(x: Shape) -> Shape:
    """The shape of ``x`` with every size but that of the classes set to 1."""
    return tuple(size if i == class_axis(x) else 1 for i, size in enumerate(x))


def _check(name: str, x: TensorType, target: TensorType, weight: Given, attrs: Attributes) -> None:
    """Raise if the inputs have no meaning. For cross_entropy_with_grad, which has no reduction, the
    element types of logits, target and weight may differ."""
    check_float(name, x=x)
    mixed = "reduction" not in attrs
    axis, each = class_axis(x.shape), positions(x.shape)
    if x.rank == 0 or x.shape[axis] == 0:
        what = "a scalar" if x.rank == 0 else str(x)
        raise GraphError(f"{name} of {what}: there are no classes", remedy="give x of shape [N, C]")
    if not 0.0 <= attrs.get("label_smoothing", 0.0) <= 1.0:
        wrong = f"label_smoothing={attrs['label_smoothing']} is not a share"
        raise GraphError(wrong, remedy="use a number from 0 to 1")
    if target.dtype.is_float and name != "nll_loss":
        if target.shape != x.shape or (target.dtype != x.dtype and not mixed):
            wrong = f"the target of {name} holds probabilities and is {target}, the logits are {x}"
            remedy = f"give both one shape and type, or integer classes of shape {list(each)}"
            raise GraphError(wrong, remedy=remedy)
        if attrs["ignore_index"] >= 0:
            wrong = f"ignore_index={attrs['ignore_index']} cannot point into probabilities"
            raise GraphError(wrong, remedy="leave ignore_index out, or give integer classes")
    elif target.dtype not in CLASSES:
        wrong = f"the target of {name} is {target.dtype.name}, not integer classes"
        raise GraphError(wrong, remedy='cast it: cast(target, dtype="i64")')
    else:
        remedy = "give one class for each position; classes lie along dimension 1 of x"
        check_shape(f"the target of {name}", target, each, remedy)
    check_shape(f"the weight of {name}", weight, x.shape[axis : axis + 1], "one for each class")
    if weight is not None and not (weight.dtype.is_float if mixed else weight.dtype == x.dtype):
        wrong = f"the weight of {name} is {weight.dtype.name}, x is {x.dtype.name}"
        raise GraphError(wrong, remedy=f'cast(weight, dtype="{x.dtype.short}")')


# ---- what they mean --------------------------------------------------------------------------


def _reference(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reference(x: Tensor, target: Tensor, weight: Tensor | None, **attrs: Any) -> Tensor:
        classes = target if target.is_floating_point() else target.long()
        if x.dtype != torch.float16 or not attrs.get("label_smoothing"):
            return fn(x, classes, weight, **attrs).contiguous()
        # torch sums the logarithms of all classes in float16, which overflows for many classes
        wide = [t.float() if t.is_floating_point() else t for t in (x, classes)]
        weight = None if weight is None else weight.float()
        return fn(*wide, weight, **attrs).to(x.dtype).contiguous()

    return reference


def _reference_with_grad(
    x: Tensor, target: Tensor, *rest: Tensor | None, label_smoothing: float, ignore_index: int
) -> tuple[Tensor, Tensor, Tensor]:
    wide = x if x.dtype == torch.float64 else x.float()
    weight, scale, z = (None if t is None else t.to(wide) for t in rest)
    axis, probs = class_axis(x.shape), target.is_floating_point()
    classes = x.shape[axis]
    weight = wide.new_ones(classes) if weight is None else weight
    target = target.to(wide) if probs else target.long()
    how: Any = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    each = F.cross_entropy(wide, target, weight, reduction="none", **how)
    lse, live, q = wide.logsumexp(axis), None, target
    if not probs:
        live = target != ignore_index
        lse = torch.where(live, lse, 0.0)
        every = torch.arange(classes, device=x.device).view(_along(x.shape))
        q = (target.unsqueeze(axis) == every).to(wide)
    even = label_smoothing / max(classes, 1)
    q = (q * (1.0 - label_smoothing) + even) * weight.view(_along(x.shape))
    slope = q.sum(axis, keepdim=True)
    if z is not None:
        each = each + z * lse * lse
        slope = slope + 2.0 * z * lse.unsqueeze(axis)
    grad = wide.softmax(axis) * slope - q
    if scale is not None:
        grad = grad * (scale.unsqueeze(axis) if scale.dim() else scale)
    grad = grad if live is None else torch.where(live.unsqueeze(axis), grad, 0.0)
    return each.contiguous(), lse.contiguous(), torch.empty_like(x).copy_(grad)


# ---- gradients ---------------------------------------------------------------------------------


def divisor(b: Ops, x: TensorType, target: Sym, weight: Sym | None, ignored: int) -> Sym | float:
    """What the mean of a loss of logits ``x`` divides by: the number of positions, or the sum of
    the weights of the targets that count (1 for each if no weights are given). In a weight that is
    given, a class that does not exist counts 0."""
    classes, kind = x.shape[class_axis(x.shape)], sums_of(x)
    if target.dtype.is_float:
        return float(x.numel // max(classes, 1))
    target = b.to(target, int64)
    counts = b.ne(target, ignored)
    if weight is None:
        return b.one("sum", b.to(counts, kind))
    counts = b.logical_and(counts, b.logical_and(b.ge(target, 0), b.lt(target, classes)))
    place = b.reshape(b.where(counts, target, 0), shape=(target.type.numel,))
    of_class = b.index_select(b.to(weight, kind), place, axis=0)
    return b.one("sum", b.where(counts, b.reshape(of_class, shape=target.shape), 0.0))


def sums_of(x: TensorType) -> DType:
    """The type in which sums over logits ``x`` are kept."""
    return float64 if x.dtype == float64 else float32


def _vjp(b: Ops, v: Vjp) -> Grads:
    """One rule for all three operators: for log-probabilities the gradient is −q · weight, for
    logits a kernel computes it. The weight has a gradient too, which PyTorch leaves out."""
    x, outer, logits = v.arg(0), v.grad, "label_smoothing" in v.attrs
    if v.attrs.get("reduction") == "mean":
        share = v.arg(2) if v.has(2) else None
        parts = divisor(b, x.type, v.arg(1), share, v.attrs["ignore_index"])
        outer = b.upcast(v.grad) / parts
    out: Grads = [None] * len(v.ins)
    if v.needs[0] and logits:
        how = {name: v.attrs[name] for name in _HOW}
        out[0] = b.cross_entropy_with_grad(*v.ins[:3], outer, *v.ins[4:], **how)[2]
    if (v.needs[0] and not logits) or any(v.needs[1:3]):
        _by_formula(b, v, b.upcast(x), b.upcast(outer), out)
    return out


def _by_formula(b: Ops, v: Vjp, x: Sym, outer: Sym, out: Grads) -> None:
    """Fill in those gradients that are written with q: of log-probabilities, a target, weights."""
    axis, smooth = class_axis(x.shape), v.attrs.get("label_smoothing", 0.0)
    logits, probs = "label_smoothing" in v.attrs, v.arg(1).dtype.is_float
    weight = b.reshape(b.upcast(v.arg(2)), shape=_along(x.shape)) if v.has(2) else None
    outer = b.reshape(outer, shape=_with_one_class(x.shape)) if outer.rank else outer
    valid = hit = None
    if probs:
        q = b.upcast(v.arg(1))
    else:
        classes = b.constant(torch.arange(x.shape[axis]).reshape(_along(x.shape)), "classes")
        target = b.reshape(b.to(v.arg(1), int64), shape=_with_one_class(x.shape))
        valid = b.ne(target, v.attrs["ignore_index"])
        hit = b.logical_and(b.eq(target, classes), valid)
        q = b.to(hit, x.dtype)
    q = q * (1.0 - smooth) + smooth / max(x.shape[axis], 1) if smooth else q

    def counted(value: Sym) -> Sym:
        kept: Sym = value if valid is None else b.where(valid, value, 0.0)
        return kept

    if v.needs[0] and not logits:
        inner = q if weight is None else q * weight
        out[0] = b.to(counted(-inner * outer), v.arg(0).dtype)
    if v.needs[1] or v.needs[2]:
        surprise = -(b.log_softmax(x, axis=axis) if logits else x)
        if v.needs[1]:
            share = surprise * (outer * (1.0 - smooth))
            out[1] = b.to(share if weight is None else share * weight, v.arg(1).dtype)
        if v.needs[2]:
            each = b.where(b.eq(q, 0.0), 0.0, q * surprise)
            # the mean divides by the weights as well
            if hit is not None and v.attrs.get("reduction") == "mean":
                each = each - b.to(hit, x.dtype) * b.upcast(v.outs[0])
            dw = b.unbroadcast(counted(each * outer), TensorType.of(_along(x.shape), x.dtype))
            out[2] = b.to(b.reshape(dw, shape=v.arg(2).shape), v.arg(2).dtype)


def _vjp_with_grad(b: Ops, v: Vjp) -> Grads:
    if v.grads[1] is not None or v.grads[2] is not None:
        wrong = "cross_entropy_with_grad has no gradient for its lse and its gradient"
        raise GraphError(wrong, remedy="write them with log_softmax and nll_loss instead")
    out = _vjp(b, v)
    if v.needs[4]:
        out[4] = b.to(b.sum(b.upcast(v.grad) * b.square(v.outs[1])), v.arg(4).dtype)
    return out


def joined(b: Ops, each: Sym, x: TensorType, target: Sym, weight: Any, attrs: Attributes) -> Sym:
    """Reduce the losses of all positions as ``attrs["reduction"]`` says, in their own type."""
    if attrs["reduction"] == "none":
        return each
    total = b.one("sum", each)
    mean = attrs["reduction"] == "mean"
    return total / divisor(b, x, target, weight, attrs["ignore_index"]) if mean else total


def _expand(b: Ops, ins: Syms, attrs: Attributes) -> list[Sym]:
    """The loss of each position, then their sum or mean: two kernels that read the logits once,
    where a single one would have to wait for all positions. They are summed in float32."""
    x, target, weight = ins
    how = {name: attrs[name] for name in _HOW}
    each = b.cross_entropy_with_grad(x, target, weight, **how)[0]
    return [b.to(joined(b, each, x.type, target, weight, attrs), x.dtype)]


# ---- the operators -------------------------------------------------------------------------------

_HOW = {
    "label_smoothing": Attr("float", 0.0, "from 0 to 1"),
    "ignore_index": Attr("int", -100, "positions with this target do not count"),
}
_TAIL = {
    "ignore_index": _HOW["ignore_index"],
    "reduction": Attr("str", "mean", "how positions are joined", ("mean", "sum", "none")),
}

_NLL = """4x3 4:index<3 | 4x3@transposed 4:index<3 3:positive ignore_index=1
    | 2x3x4 2x4:index<3 3:positive reduction=none
    | 2x3x2x4@nhwc 2x2x4:index<3 reduction=none ignore_index=2
    | 5x3@sliced 5:index<3:i32 3:positive reduction=sum ignore_index=0
    | 3 scalar:index<3 | 0x3 0:index<3 reduction=sum
    | 3x4 3:index<1 ignore_index=0 nograd [none valid]"""


def _with_grad_samples() -> Iterator[Sample]:
    """The samples of cross_entropy, in turn without a scale, with one for all and with one for each
    position; every second one with z."""
    for k, s in enumerate(cross_entropy.samples()):
        x, target, weight = (*s.inputs, None)[:3]
        scale = (None, Arg((), "positive"), Arg(positions(s.args[0].shape)))[k % 3]
        z = Arg((), "positive") if k % 2 else None
        how = {name: v for name, v in s.attrs.items() if name != "reduction"}
        yield replace(s, inputs=(x, target, weight, scale, z), attrs=how)


@operator(
    Fusion.REDUCTION,
    _reference(F.nll_loss),
    attrs=_TAIL,
    vjp=_vjp,
    flops=lambda ins, outs, attrs: 2.0 * ins[1].numel,
    samples=_NLL,
)
def nll_loss(x: TensorType, target: TensorType, weight: Given, **attrs: Any) -> TensorType:
    """−weight · x at the target's class: the loss of log-probabilities [N, C, …] against integer
    classes [N, …], joined by their weighted mean, their sum, or not at all."""
    _check("nll_loss", x, target, weight, attrs)
    return TensorType.of(positions(x.shape) if attrs["reduction"] == "none" else (), x.dtype)


@operator(
    Fusion.REDUCTION,
    _reference(F.cross_entropy),
    attrs=_HOW | _TAIL,
    vjp=_vjp,
    expand=_expand,
    flops=input_flops(12),
    samples=f"""{_NLL} | 4x3@transposed 4:index<3 3:positive ignore_index=1 label_smoothing=0.2
        | 2x3x2x4@nhwc 2x2x4:index<3 reduction=none ignore_index=2 label_smoothing=0.2
        | 4x3 4x3:positive 3:positive label_smoothing=0.2
        | 2x3x4@transposed 2x3x4 reduction=none""",
)
def cross_entropy(logits: TensorType, target: TensorType, weight: Given, **a: Any) -> TensorType:
    """nll_loss of log_softmax(logits) along dimension 1, with a share label_smoothing of each
    target spread over all classes. Targets are integer classes [N, …], or probabilities in the
    shape of the logits."""
    _check("cross_entropy", logits, target, weight, a)
    return TensorType.of(positions(logits.shape) if a["reduction"] == "none" else (), logits.dtype)


@operator(
    Fusion.REDUCTION,
    _reference_with_grad,
    attrs=_HOW,
    vjp=_vjp_with_grad,
    flops=lambda ins, outs, attrs: 16.0 * outs[2].numel,
    samples=_with_grad_samples,
)
def cross_entropy_with_grad(
    logits: TensorType, target: TensorType, weight: Given, scale: Given, z: Given, **attrs: Any
) -> tuple[TensorType, ...]:
    """Returns the cross-entropy of each position, + z · lse²; its lse = log Σ exp logits, both in
    float32 (float64 for float64) and 0 where the target is ignored; and the gradient of the logits,
    if the gradient of each loss is scale: one number, or one for each position. A result that
    nobody reads is not computed."""
    _check("cross_entropy", logits, target, weight, attrs)
    each = positions(logits.shape)
    for what, given, shapes in (("scale", scale, ((), each)), ("z", z, ((),))):
        if given is not None and (not given.dtype.is_float or given.shape not in shapes):
            remedy = f"give a float of shape {' or '.join(str(list(s)) for s in shapes)}"
            raise GraphError(f"{what} of cross_entropy_with_grad is {given}", remedy=remedy)
    row = TensorType.of(each, sums_of(logits))
    return row, row, logits.dense_like()
