"""Cross-entropy for training: the gradient comes with the loss, in one pass over the logits.

A call is a graph like any other, planned for its shapes. Where the logits need a gradient, that
graph computes it as well, for an upstream gradient of 1. The backward pass then multiplies it in
place by the upstream gradient that arrives, and has nothing to do if that is 1. Every other call
(without a gradient, under torch.compile, in transforms, or where targets or weights are learned,
too) is an ordinary :class:`Function`, whose backward pass reads the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _nn
from torch.autograd.graph import increment_version

from deuteron.errors import BindError, EngineError, GraphError
from deuteron.functional.arguments import readable
from deuteron.functional.context import are_batched, is_differentiated, is_eager, under_autocast
from deuteron.functional.core import Function, Planned
from deuteron.functional.delegate import delegates
from deuteron.ir.dtype import dtype as type_of
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym
from deuteron.ops.cross_entropy import class_axis, divisor, joined

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CPU_BYTES = 2**19  # of logits: up to this size torch's calls take less time than finding a plan
USUAL: dict[str, Any] = {"reduction": "mean", "ignore_index": -100, "label_smoothing": 0.0}
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # and torch's numbers for them


def _build(
    b: Ops,
    logits: Sym,
    target: Sym,
    weight: Sym | None,
    scale: Sym | None,
    z: Sym | None,
    *,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: str,
    gives: str,
) -> tuple[Sym, ...]:
    """Write the results that ``gives`` names: the ``loss``; ``lse``, log Σ exp of each row;
    ``grad``, the gradient of the logits where that of the loss is 1; and ``left``, the factor by
    which ``grad`` still has to be multiplied, the division of a mean. ``scale`` and ``z`` are given
    for a chunk of all logits, whose losses are not added up here: the factor of each position's
    gradient, and z_loss relative to that factor."""
    how: Any = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    kinds = [t.dtype for t in (logits, target, weight) if t is not None and t.dtype.is_float]
    if gives == "loss" and not z_loss and {*kinds} == {type_of(dtype)}:
        return (b.cross_entropy(logits, target, weight, reduction=reduction, **how),)
    now: Any = scale
    pull: Any = z_loss or None if z is None else z
    if reduction == "mean":
        whole = divisor(b, logits.type, target, weight, ignore_index)
        now = 1.0 / max(whole, 1.0) if isinstance(whole, float) else 1.0 / whole
        if z_loss and weight is not None and isinstance(whole, Sym):
            # the mean of z_loss divides by the number of positions that count, not by their weights
            pull = z_loss * whole / divisor(b, logits.type, target, None, ignore_index)
    at_once = now if "grad" in gives and "left" not in gives else None
    each, lse, grad = b.cross_entropy_with_grad(logits, target, weight, at_once, pull, **how)
    terms = {"reduction": reduction, "ignore_index": ignore_index}
    loss = b.to(joined(b, each, logits.type, target, weight, terms), type_of(dtype))
    found = {"loss": loss, "lse": lse, "grad": grad}
    if "left" in gives:  # where no position counts there is no gradient
        left = now if isinstance(now, Sym) else b.constant(torch.tensor(now))
        found["left"] = b.where(b.eq(left, float("inf")), 0.0, left)
    return tuple(found[name] for name in gives.split())


PLAIN = Function("cross_entropy", _build, silent=(1,))
TRAINED = Function("cross_entropy_trained", _build, eager=True)
IN_PLACE = Function("cross_entropy_in_place", _build, eager=True, into={1: "logits"})

# ---- the function ----------------------------------------------------------------------------


def torch_loss(logits: Tensor, target: Tensor, weight: Tensor | None = None, **terms: Any) -> Any:
    """Call what ``torch.nn.functional.cross_entropy`` calls, or return NotImplemented for terms
    that it does not have."""
    reduction, ignored, smoothing = [terms.pop(name, usual) for name, usual in USUAL.items()]
    number: Any = REDUCTIONS.get(reduction)  # the stub of torch says that it is a str
    if number is None or any(terms.values()) or not 0.0 <= smoothing <= 1.0:
        return NotImplemented
    return _nn.cross_entropy_loss(logits, target, weight, number, ignored, smoothing)


@delegates(torch_loss, on_cpu=FLOATS, cpu_bytes=CPU_BYTES, passes=20.0)
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    inplace_backward: bool = False,
    return_lse: bool = False,
) -> Any:
    """``torch.nn.functional.cross_entropy``, with its gradient computed along the way.

    logits           [C], [N, C] or [N, C, d1, …], of float64, float32, float16 or bfloat16
    target           classes (int64, int32, uint8), of the logits' shape without C; or probabilities
                     of the shape of the logits
    weight           [C], a weight for each class
    reduction        "mean" (over the weights of the targets that count), "sum" or "none"
    ignore_index     the class of rows that do not count. Their gradient is 0, even where logits are
                     nan
    label_smoothing  from 0 to 1: this part of each target is shared evenly by all classes
    z_loss           adds z_loss · lse² to the loss of a row, with lse = log Σ exp logits; "mean"
                     divides the sum of these terms by the number of rows that count. It keeps
                     logits from drifting
    inplace_backward
                     write the gradient over the logits, which are lost once this returns. Only
                     where the logits alone need a gradient; not under torch.compile
    return_lse       also return lse, float32 (float64 for float64 logits), 0 for ignored rows,
                     without gradient

    Arithmetic is float32 for 16-bit logits. The loss has the type of the logits; under autocast it
    is float32. A class that does not exist is an error on a CPU. On a GPU the host does not look at
    the targets, and the loss and gradient of such a row are nan. There is no second derivative.

    Small losses without extras are ``torch.nn.functional``'s own (:class:`delegation`), with second
    derivatives. There a nan in an ignored row reaches its gradient, and a class that does not exist
    stops the GPU.
    """
    check_terms("cross_entropy", reduction, z_loss)
    target = target if target.is_floating_point() else target.contiguous()
    gives = "loss lse" if return_lse else "loss"
    terms: dict[str, Any] = {"reduction": reduction, "ignore_index": ignore_index}
    terms |= {"label_smoothing": float(label_smoothing), "z_loss": float(z_loss)}
    terms["dtype"] = type_of(result_type(logits, target)).short
    tensors = (logits, target, weight, None, None)
    learned = target.requires_grad or (weight is not None and weight.requires_grad)
    if learned or not is_differentiated(logits) or not is_eager(logits, target, weight):
        if inplace_backward and torch.compiler.is_compiling():
            wrong = "the gradient cannot take the memory of the logits under torch.compile"
            remedy = "leave inplace_backward out, or call it outside of the compiled function"
            raise EngineError(wrong, asked="cross_entropy(…, inplace_backward=True)", remedy=remedy)
        return PLAIN(*tensors, **terms, gives=gives)
    if inplace_backward:
        _check_memory(logits)
    gives = gives.replace("loss", "loss grad")
    if logits.dtype is torch.float16 and reduction == "mean":
        # dividing at once would lose small numbers that the caller scaled the loss up to save
        gives = gives.replace("grad", "grad left")
    given = [readable("cross_entropy", t) for t in tensors]
    planned = (IN_PLACE if inplace_backward else TRAINED).plan(given, {**terms, "gives": gives})
    loss, lse = _Trained.apply(planned, inplace_backward, *given)  # type: ignore[no-untyped-call]
    return (loss, lse) if return_lse else loss


def result_type(logits: Tensor, target: Tensor) -> torch.dtype:
    """The type of the loss: that of the logits, float32 under autocast; for targets that are
    probabilities, the wider one of that and their type."""
    short = under_autocast(logits) and logits.dtype is not torch.float64
    kind = torch.float32 if short else logits.dtype
    probabilities = target.is_floating_point() and target.itemsize > 1
    return torch.promote_types(kind, target.dtype) if probabilities else kind


class _Trained(torch.autograd.Function):
    """A loss that was computed together with the gradient of its logits."""

    @staticmethod
    def forward(ctx: Any, planned: Planned, inplace: bool, *tensors: Tensor | None) -> Any:
        found = dict(zip(planned.attrs["gives"].split(), planned.run(tensors), strict=True))
        logits, grad, lse = tensors[0], found["grad"], found.get("lse")
        if inplace and logits is not None:
            if grad.data_ptr() != logits.data_ptr():  # no kernel could write there itself
                logits.detach().copy_(grad)
            grad = logits.detach()
            increment_version(logits)  # autograd raises if the logits were saved for a gradient
        ctx.save_for_backward(grad, found.get("left"))
        ctx.set_materialize_grads(False)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return found["loss"], lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, _: Any) -> Any:
        if up is None:
            return (None,) * 7
        refuse_second_derivative("cross_entropy")
        grad, left = ctx.saved_tensors
        up = up.unsqueeze(class_axis(grad.shape)) if grad.dim() == up.dim() + 1 > 1 else up
        return None, None, scaled(grad, up, left), *(None,) * 4


def scaled(grad: Tensor, up: Tensor, left: Tensor | None) -> Tensor:
    """Return grad · up · left, in the memory of ``grad`` unless the backward pass may run again
    (``retain_graph=True``). ``up``, the upstream gradient, is one number or broadcasts against
    grad; ``left``: the factor that is still missing, or None."""
    up = up.resolve_neg()
    if are_batched((up,)):
        return (grad * (up if left is None else up * left)).to(grad.dtype)
    if torch._C._autograd._get_current_graph_task_keep_graph():
        grad = grad.clone()
    if up.dim():
        return grad.mul_(up)
    if grad.is_cuda and grad.dtype != torch.float64 and TensorType.from_tensor(grad).is_dense:
        from deuteron.kernels.triton.cross_entropy import launch_scale

        launch_scale(grad, up, left)
        return grad
    factor = up if left is None else up * left
    return grad if not grad.is_cuda and float(factor) == 1.0 else grad.mul_(factor)


# ---- what may be asked -----------------------------------------------------------------------


def refuse_second_derivative(name: str) -> None:
    if torch.is_grad_enabled():
        wrong = f"{name} has no second derivative"
        remedy = "leave create_graph out, or use torch.nn.functional's cross_entropy"
        raise EngineError(wrong, asked="a backward pass with create_graph=True", remedy=remedy)


def check_terms(name: str, reduction: str, z_loss: float) -> None:
    """Refuse a reduction or a z_loss that has no meaning."""
    if reduction not in REDUCTIONS:
        wrong = f"{name} has no reduction {reduction!r}"
        asked = f"reduction={reduction!r}"
        raise GraphError(wrong, asked=asked, remedy="use 'mean', 'sum' or 'none'")
    if not 0.0 <= z_loss < float("inf"):
        wrong = f"{name} with z_loss={z_loss} is not defined"
        raise GraphError(wrong, remedy="use 0 or a small number")


def _check_memory(logits: Tensor) -> None:
    shape, strides = list(logits.shape), list(logits.stride())
    if any(s == 0 and n > 1 for s, n in zip(strides, shape, strict=True)):
        wrong = "the gradient cannot take the memory of logits that share it among themselves"
        asked = f"inplace_backward=True for logits of shape {shape} and strides {strides}"
        remedy = "leave inplace_backward out, or give logits.contiguous()"
        raise BindError(wrong, asked=asked, remedy=remedy)
