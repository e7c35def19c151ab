"""Cross-entropy for training: the gradient comes with the loss, in one pass over the logits.

On a GPU these are our Triton kernels; on the CPU, and for float64, torch's own operators on pieces
that stay in the cache. ``linear_cross_entropy`` is the same loss of a product whose logits never
exist whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _nn
from torch.autograd.graph import increment_version

from deuteron.errors import BindError, EngineError, GraphError
from deuteron.functional.context import (
    in_transform,
    is_differentiated,
    is_watched,
    under_autocast,
    without_memory,
)
from deuteron.functional.delegate import delegates
from deuteron.functional.loss_rows import Terms, class_dim, reduced_loss, scaled, wide

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CLASSES = (torch.int64, torch.int32, torch.uint8)
REDUCTIONS = ("mean", "sum", "none")
CPU_BYTES = 2**19  # of logits: up to here torch's calls take less than ours need for the targets


def _torch_cross_entropy(
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
    if z_loss or inplace_backward or return_lse:
        return NotImplemented
    return torch_loss(logits, target, weight, reduction, ignore_index, label_smoothing)


def torch_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Any:
    """What ``torch.nn.functional.cross_entropy`` calls."""
    number: Any = REDUCTION_NUMBERS.get(reduction)  # the stub of torch says that it is a str
    if number is None:
        return NotImplemented
    if ignore_index == -100 and label_smoothing == 0.0:  # C++ takes 0.3 µs to read a number
        return _nn.cross_entropy_loss(logits, target, weight, number)
    return _nn.cross_entropy_loss(logits, target, weight, number, ignore_index, label_smoothing)


REDUCTION_NUMBERS = {"none": 0, "mean": 1, "sum": 2}  # torch's


@delegates(_torch_cross_entropy, on_cpu=FLOATS, cpu_bytes=CPU_BYTES)
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
    target           classes (int64, int32, uint8) of the same shape without C; or probabilities
                     of the same shape as the logits. Where they need a gradient torch's
                     operators compute all of it, and inplace_backward is of no use
    weight           [C], a weight for each class
    reduction        "mean" (over the weights of the targets that count), "sum" or "none"
    ignore_index     the class of rows that do not count. Their gradient is 0, even of nan
    label_smoothing  from 0 to 1: this part of a target is shared evenly by all classes
    z_loss           adds z_loss · lse², lse = log Σ exp logits; "mean" divides it by the number
                     of rows that count. It keeps logits from drifting
    inplace_backward the gradient takes the memory of the logits: they hold no logits any more once
                     this returns. Only where logits need a gradient; not under torch.compile
    return_lse       also return lse, float32 (float64 of float64), 0 for ignored rows, without
                     gradient

    Arithmetic is float32 for 16-bit logits. The loss has the type of the logits; under autocast
    it is float32. A class that does not exist is an error on the CPU. On a GPU nobody looks before
    the kernel does, and the loss and gradient of that row are nan. There is no second derivative.

    Small losses without extras are ``torch.nn.functional``'s own (:class:`delegation`), with second
    derivatives. There nan in an ignored row reaches its gradient, and a class that does not exist
    stops the GPU.
    """
    terms = Terms(reduction, ignore_index, float(label_smoothing), float(z_loss))
    check("cross_entropy", logits, logits.shape, target, weight, terms)
    if by_torch_alone(target):
        both = by_torch(logits, target, weight, terms, result_type(logits, target))
        return both if return_lse else both[0]
    # kernels read memory, which such a view has with other signs; elsewhere these are themselves
    logits, target = logits.resolve_neg(), target.resolve_neg()
    if target.dtype is torch.uint8:  # of which 156 would equal an ignore_index of -100
        target = target.long()
    weight = None if weight is None else weight.resolve_neg()
    needs = logits.requires_grad and torch.is_grad_enabled()
    dtype = result_type(logits, target)
    if as_operator(logits, target, weight):
        if inplace_backward:
            raise EngineError(
                "the gradient cannot take the memory of the logits under torch.compile or a trace",
                asked="cross_entropy(…, inplace_backward=True)",
                remedy="leave inplace_backward out, or call it outside of the compiled function",
            )
        loss, lse, _, _ = _cross_entropy_op(logits, target, weight, *terms, dtype, needs)
    elif needs:
        if inplace_backward:
            _check_memory(logits)
        loss, lse = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
            logits, target, weight, terms, dtype, inplace_backward, return_lse
        )
    else:
        loss, lse, _ = _forward(logits, target, weight, terms, dtype, None, return_lse)
    return (loss, lse) if return_lse else loss


def result_type(logits: Tensor, target: Tensor) -> torch.dtype:
    """The type of the loss, as torch has it: under autocast float32, beside probabilities the wider
    of both."""
    kind = wide(logits.dtype) if under_autocast(logits) else logits.dtype
    return torch.promote_types(kind, target.dtype) if target.is_floating_point() else kind


def as_operator(*tensors: Tensor | None) -> bool:
    """Whether the dispatcher must see the call, or alone knows what to do with the tensors."""
    return torch.compiler.is_compiling() or is_watched() or without_memory(*tensors)


def by_torch_alone(target: Tensor) -> bool:
    """Whether transforms must see the operators, or the target is learned, too: our kernels have a
    gradient for the logits only."""
    return in_transform() or is_differentiated(target)


def by_torch(
    logits: Tensor, target: Tensor, weight: Tensor | None, terms: Terms, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Loss and lse by torch's operators alone."""
    x, dim = logits.to(wide(logits.dtype)), class_dim(logits)
    probs = target.is_floating_point()
    loss = F.cross_entropy(
        x,
        target.to(x.dtype) if probs else target.long(),
        None if weight is None else weight.to(x),
        ignore_index=terms.ignore_index,
        reduction=terms.reduction,
        label_smoothing=terms.label_smoothing,
    )
    lse = x.logsumexp(dim)
    if not probs:
        lse = torch.where(target == terms.ignore_index, 0.0, lse)
    if terms.z_loss:
        z = terms.z_loss * lse * lse
        rows = lse.numel() if probs else (target != terms.ignore_index).sum()
        loss = loss + (
            z
            if terms.reduction == "none"
            else z.sum() / rows
            if terms.reduction == "mean"
            else z.sum()
        )
    return loss.to(dtype), lse.detach()


def _forward(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    terms: Terms,
    dtype: torch.dtype,
    grad: Tensor | None,
    needs_lse: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Loss, lse if it is needed, and the totals; the gradient into ``grad`` if that is given."""
    dim = class_dim(logits)
    if not target.is_floating_point():
        target = target.contiguous()
    shape = logits.shape[:dim] + logits.shape[dim + 1 :]
    sums = wide(logits.dtype)
    lse = torch.empty(shape, dtype=sums, device=logits.device) if needs_lse else None
    loss, total = reduced_loss(logits, target, weight, terms, dtype, lse, grad)
    return loss, lse, total


class _CrossEntropy(torch.autograd.Function):
    """The eager way: no dispatcher between the call and the launch."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        terms: Terms,
        dtype: torch.dtype,
        inplace: bool,
        needs_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        grad = logits.detach() if inplace else torch.empty_like(logits)
        source = grad if inplace else logits
        loss, lse, ctx.total = _forward(source, target, weight, terms, dtype, grad, needs_lse)
        if inplace:
            increment_version(logits)  # whoever saved the logits for a gradient hears of it
        ctx.grad, ctx.dim = grad, class_dim(logits)
        ctx.set_materialize_grads(False)
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, _: Any) -> Any:
        if up is None:
            return (None,) * 7
        refuse_second_derivative("cross_entropy")
        up = up.resolve_neg()
        keep = keeps_graph()
        grad = taken(ctx, "grad", keep)
        up = up.unsqueeze(ctx.dim) if grad.dim() == up.dim() + 1 and up.dim() else up
        return (scaled(grad, up, ctx.total, keep), *(None,) * 6)


def keeps_graph() -> bool:
    """Whether the running backward pass may be run again (``retain_graph=True``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def taken(ctx: Any, name: str, keep: bool) -> Any:
    """A gradient that was made in the forward pass. It is handed over, not copied, so there is
    no second time unless the graph is kept."""
    found = getattr(ctx, name)
    if found is None:
        raise EngineError(
            "the gradient of this loss was handed out already",
            asked="a second backward pass through the same loss",
            remedy="call backward(retain_graph=True) the first time",
        )
    if not keep:
        setattr(ctx, name, None)
    return found


def refuse_second_derivative(name: str) -> None:
    if torch.is_grad_enabled():
        raise EngineError(
            f"{name} has no second derivative",
            asked="a backward pass with create_graph=True",
            remedy=f"leave create_graph out, or use torch.nn.functional.{_IN_TORCH[name]}",
        )


_IN_TORCH = {"cross_entropy": "cross_entropy", "linear_cross_entropy": "linear and cross_entropy"}

# ---- under torch.compile ---------------------------------------------------------------------


@torch.library.custom_op("deuteron::cross_entropy", mutates_args=())
def _cross_entropy_op(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    terms = Terms(reduction, ignore_index, label_smoothing, z_loss)
    grad = torch.empty_like(logits) if needs_grad else None
    loss, lse, total = _forward(logits, target, weight, terms, dtype, grad, True)
    assert lse is not None
    return loss, lse, logits.new_empty(0) if grad is None else grad, total


@_cross_entropy_op.register_fake
def _(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dim = class_dim(logits)
    shape = logits.shape[:dim] + logits.shape[dim + 1 :]
    sums = wide(logits.dtype)
    loss = logits.new_empty(shape if reduction == "none" else (), dtype=dtype)
    grad = torch.empty_like(logits) if needs_grad else logits.new_empty(0)
    return loss, logits.new_empty(shape, dtype=sums), grad, logits.new_empty(5, dtype=sums)


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    _, lse, grad, total = output
    ctx.save_for_backward(grad, total)
    ctx.dim = class_dim(inputs[0])
    ctx.mark_non_differentiable(lse, grad, total)
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, up: Tensor | None, *_: Any) -> Any:
    grad, total = ctx.saved_tensors
    if up is None:
        return (None,) * 9
    factor = up.unsqueeze(ctx.dim) if up.dim() else up.to(total.dtype) * total[4]
    return (grad * factor.to(grad.dtype) if up.dim() else grad * factor, *(None,) * 8)


_cross_entropy_op.register_autograd(_pull, setup_context=_save)

# ---- what may be asked -----------------------------------------------------------------------


def check(
    name: str,
    logits: Tensor,
    shape: Sequence[int],
    target: Tensor,
    weight: Tensor | None,
    terms: Terms,
) -> None:
    """Raises for what has no meaning. ``shape`` is that of the logits, which for a product do not
    exist: then ``logits`` is its first factor."""
    if len(shape) < 1 or logits.dtype not in FLOATS:
        raise BindError(
            f"the logits of {name} are {logits.dtype} of shape {list(shape)}",
            remedy="give float32, float16, bfloat16 or float64 of shape [C], [N, C] or [N, C, …]",
        )
    dim = min(1, len(shape) - 1)
    classes = shape[dim]
    if classes == 0:
        raise BindError(
            f"the logits of {name} have no classes: {list(shape)}", remedy="give at least one class"
        )
    _check_target(
        name, logits, tuple(shape), tuple(shape[:dim]) + tuple(shape[dim + 1 :]), target, terms
    )
    if weight is not None and (
        tuple(weight.shape) != (classes,)
        or weight.device != logits.device
        or weight.dtype not in FLOATS
        or weight.requires_grad
    ):
        raise BindError(
            f"the class weights of {name} are {shown(weight)}, the logits have {classes} classes "
            f"and are on {logits.device}",
            remedy=f"give a floating-point tensor of shape [{classes}] there, without gradient",
        )
    _check_terms(name, terms)


def _check_target(
    name: str,
    logits: Tensor,
    shape: tuple[int, ...],
    without: tuple[int, ...],
    target: Tensor,
    terms: Terms,
) -> None:
    if target.device != logits.device:
        raise BindError(
            f"the target of {name} is on {target.device}, the logits are on {logits.device}",
            remedy=f"target.to({str(logits.device)!r})",
        )
    if target.is_floating_point():
        if tuple(target.shape) != shape or target.dtype not in FLOATS:
            raise BindError(
                f"the target of {name} is {shown(target)}, the logits are {list(shape)}",
                remedy=f"give probabilities of shape {list(shape)}, or int64 classes of shape "
                f"{list(without)}",
            )
        if terms.ignore_index >= 0:
            raise GraphError(
                f"{name} with probabilities has no class to ignore",
                asked=f"ignore_index={terms.ignore_index}",
                remedy="leave ignore_index out",
            )
    elif tuple(target.shape) != without or target.dtype not in CLASSES:
        raise BindError(
            f"the target of {name} is {shown(target)}, the logits are {list(shape)}",
            remedy=f"give int64 classes of shape {list(without)}, or probabilities of shape "
            f"{list(shape)}",
        )


def _check_terms(name: str, terms: Terms) -> None:
    if terms.reduction not in REDUCTIONS:
        raise GraphError(
            f"{name} has no reduction {terms.reduction!r}",
            asked=f"reduction={terms.reduction!r}",
            remedy="use 'mean', 'sum' or 'none'",
        )
    if not 0.0 <= terms.label_smoothing <= 1.0:
        raise GraphError(
            f"{name} with label_smoothing={terms.label_smoothing} is not defined",
            remedy="use a number from 0 to 1",
        )
    if not 0.0 <= terms.z_loss < float("inf"):
        raise GraphError(
            f"{name} with z_loss={terms.z_loss} is not defined", remedy="use 0 or a small number"
        )


def _check_memory(logits: Tensor) -> None:
    if any(s == 0 and n > 1 for s, n in zip(logits.stride(), logits.shape, strict=True)):
        raise BindError(
            "the gradient cannot take the memory of logits that share it among themselves",
            asked=f"inplace_backward=True for logits of shape {list(logits.shape)} and strides "
            f"{list(logits.stride())}",
            remedy="leave inplace_backward out, or give logits.contiguous()",
        )


def shown(x: Tensor) -> str:
    """A tensor in an error: type, shape and device."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"
