"""Cross-entropy of a linear layer's outputs, which never exist as a whole.

The exact way. The forward pass takes some tokens at a time: it computes their logits and the loss,
writes the gradient of the logits over the logits, and makes the gradient of the hidden states from
that. The backward pass takes some classes at a time: it computes the logits of all tokens once
more, their gradient from one number that the forward pass kept for each row, and the rows of the
weight's gradient from that. This is one product more than keeping the logits would take, and it
buys this: every element of every gradient is one product, rounded once, and no buffer in float32 is
needed to add up in.

The fast way makes all gradients in the forward pass, and adds those of the weight up over the
chunks of tokens, in the type of the weight: one product less, and one rounding for each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import custom_op

from deuteron.errors import BindError, GraphError
from deuteron.functional import linear_cross_entropy_chunks as chunks
from deuteron.functional.arguments import one_device, strided
from deuteron.functional.autocast import lower
from deuteron.functional.context import in_transform, is_differentiated, is_eager
from deuteron.functional.cross_entropy import (
    CPU_BYTES,
    FLOATS,
    check_terms,
    cross_entropy,
    refuse_second_derivative,
    result_type,
    scaled,
    torch_loss,
)
from deuteron.functional.delegate import delegates, is_small
from deuteron.functional.linear_cross_entropy_chunks import Given, Terms


def is_ours(hidden: Tensor, weight: Tensor) -> bool:
    """Whether there are so many logits that making them in parts is quicker than torch's calls."""
    if chunks.multiplies_slowly(hidden):
        return True
    logits = hidden.nbytes // hidden.shape[-1] * weight.shape[0]
    return not is_small(hidden, max(logits, weight.nbytes)) and (
        hidden.is_cuda or logits > CPU_BYTES
    )


def _torch_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **terms: Any
) -> Any:
    parts = terms.pop("chunk", None) is not None
    if parts or hidden.dim() != 2 or not hidden.shape[1] or is_ours(hidden, weight):
        return NotImplemented
    each, dtype = terms.pop("class_weight", None), terms.pop("dtype", None)
    whole = F.linear(hidden, weight, bias)
    return torch_loss(whole if dtype is None else whole.to(dtype), target, each, **terms)


@delegates(_torch_linear_cross_entropy, on_cpu=FLOATS)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    return_lse: bool = False,
    chunk: int | None = None,
    accumulate: str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Return ``cross_entropy(linear(hidden, weight, bias), target)`` without memory for all the
    logits.

    >>> loss = dt.functional.linear_cross_entropy(hidden, embedding.weight, tokens)

    hidden   […, H]; weight [C, H]; bias [C]; all of one type (under autocast they are cast)
    target   classes […], or probabilities […, C]: the classes are last here, as linear has them. If
             probabilities or class weights need a gradient, the logits are computed whole
    chunk    how many tokens have their logits in memory at a time; the slices of classes of the
             backward pass then hold no more numbers than that. By default all tokens, if their
             logits take no more than 64 MB or a 512th of a GPU's memory; else what keeps products
             fast: H / 2 tokens in the forward pass (H / 8 if "fast"), and slices of about a
             sixteenth of the weight in the backward pass
    accumulate
             how the gradients of weight and bias are made. "exact": in the backward pass, from
             logits that are computed again; each is rounded once. "fast": with the loss, added up
             over the chunks in the type of the weight: three products instead of four, and one
             rounding more for each chunk (8192 tokens, 4096 → 128256 in bfloat16: the error of all
             gradients is 1.1e-3 instead of 1.0e-3). "fast" is for "mean" and "sum", and the default
             there. In float32 "exact" is off by 6e-8 of log Σ exp in each probability, where
             torch's gradients may be better
    dtype    of the loss, such as float32 where it would be rounded to 16 bits as the logits are

    The other arguments are those of :func:`cross_entropy`; ``class_weight`` is its ``weight``.
    Logits are rounded to the type of the inputs, as linear would. The gradient of ``hidden`` is
    computed with the loss. Under torch.compile all is "exact". There is no second derivative,
    except of small losses, which are torch's own as in ``cross_entropy``.
    """
    hidden, weight, *rest = lower(hidden, weight, *(() if bias is None else (bias,)))
    bias = rest[0] if rest else None
    terms = Terms(reduction, ignore_index, float(label_smoothing), float(z_loss), chunk)
    check_terms("linear_cross_entropy", reduction, z_loss)
    one_device("linear_cross_entropy", (hidden, weight, bias, target, class_weight))
    _check(chunk, hidden, weight, bias, target, class_weight)
    fast = _is_fast(accumulate, reduction)
    probs, classes, lead = target.is_floating_point(), weight.shape[0], hidden.shape[:-1]
    learned = [t for t in (target, class_weight) if t is not None and is_differentiated(t)]
    if learned or in_transform():
        logits = F.linear(hidden, weight, bias).movedim(-1, min(1, len(lead)))
        target = target.movedim(-1, min(1, len(lead))) if probs else target
        how: Any = {**terms._asdict(), "return_lse": return_lse}
        del how["chunk"]
        logits = logits if dtype is None else logits.to(dtype)
        return cross_entropy(logits, target, class_weight, **how)
    # Kernels read memory, where a lazily negated view has the other signs. All other tensors stay.
    tensors = [t if t is None else t.resolve_neg() for t in (weight, bias, target, class_weight)]
    given = Given(hidden.reshape(-1, hidden.shape[-1]).resolve_neg(), *tensors)  # type: ignore[arg-type]
    flat = given.target.reshape(-1, classes) if probs else given.target.reshape(-1)
    given = given._replace(target=flat.contiguous())
    dtype, learning = dtype or result_type(hidden, target), torch.is_grad_enabled()
    if not is_eager(*given):
        loss, lse, _ = _linear_op(*given, *terms, dtype, learning and hidden.requires_grad)
    elif learning and any(t is not None and t.requires_grad for t in given[:3]):
        loss, lse = _linear(fast, terms, dtype, *given)
    else:
        loss, lse, *_ = chunks.forward(given, terms, dtype, False)
    loss = loss.view(lead) if reduction == "none" else loss
    return (loss, lse.view(lead)) if return_lse else loss


def _is_fast(accumulate: str | None, reduction: str) -> bool:
    """Whether the gradients of weight and bias are added up over the chunks of tokens."""
    if accumulate not in (None, "exact", "fast"):
        wrong = f"linear_cross_entropy cannot accumulate {accumulate!r}"
        asked = f"accumulate={accumulate!r}"
        raise GraphError(wrong, asked=asked, remedy="use 'exact' or 'fast', or leave it out")
    if accumulate == "fast" and reduction == "none":
        wrong = "a gradient that is added up with the loss cannot be weighed row by row later"
        asked = "linear_cross_entropy(…, accumulate='fast', reduction='none')"
        remedy = "use accumulate='exact', or reduction='sum' or 'mean'"
        raise GraphError(wrong, asked=asked, remedy=remedy)
    return reduction != "none" if accumulate is None else accumulate == "fast"


def _check(chunk: int | None, *tensors: Any) -> None:
    hidden, weight, bias, target, class_weight = tensors
    for t in tensors[: 4 if class_weight is None else 5]:
        strided("linear_cross_entropy", t)
    kinds = ("None" if t is None else f"{t.dtype}{list(t.shape)}" for t in tensors[:4])
    shown = "hidden {}, weight {}, bias {} and target {}".format(*kinds).replace("torch.", "")
    fits = hidden.dim() >= 1 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if not fits or any(t is not None and t.dtype != hidden.dtype for t in (weight, bias)):
        wrong = f"linear_cross_entropy cannot multiply {shown}"
        raise BindError(wrong, remedy="give hidden […, H], weight [C, H] and bias [C] of one type")
    each = (*hidden.shape[:-1], weight.shape[0])
    if tuple(target.shape) != (each if target.is_floating_point() else each[:-1]):
        remedy = f"give int64 classes of shape {list(each[:-1])}, or probabilities of {list(each)}"
        raise BindError(f"linear_cross_entropy has {shown}", remedy=remedy)
    if not weight.shape[0] or target.is_complex():
        wrong = f"linear_cross_entropy has {shown}: there is no class to choose"
        raise BindError(wrong, remedy="give a weight with a row for each class, and their numbers")
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        wrong = f"class_weight is {list(class_weight.shape)}, and there are {len(weight)} classes"
        raise BindError(wrong, remedy="give one weight for each class")
    if chunk is not None and chunk < 1:
        wrong = f"linear_cross_entropy cannot take {chunk} tokens at a time"
        raise BindError(wrong, remedy="give chunk=1 or more, or leave it out")


# ---- gradients -------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """The autograd node. If ``fast``, all gradients come with the loss, and the backward pass only
    scales them; else it makes those of weight and bias."""

    @staticmethod
    def forward(ctx: Any, fast: bool, terms: Terms, dtype: torch.dtype, *tensors: Any) -> Any:
        given, needs = Given(*tensors), ctx.needs_input_grad[3:6]
        sums = _where(given[1:3], [fast and need for need in needs[1:]])
        sums = [None if t is None else torch.empty_like(t) for t in sums]
        loss, lse, by_hidden, left = chunks.forward(given, terms, dtype, needs[0], sums)
        ctx.fast, ctx.terms = fast, terms
        ctx.save_for_backward(by_hidden, *sums, left, *given, lse)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, _: Any) -> Any:
        if up is None:
            return (None,) * 8
        refuse_second_derivative("linear_cross_entropy")
        *grads, left = (saved := ctx.saved_tensors)[:4]
        needs, each = ctx.needs_input_grad[3:6], up.unsqueeze(1) if up.dim() else up
        grads = [g if g is None else scaled(g, each, left) for g in _where(grads, needs)]
        if not ctx.fast and any(needs[1:]):
            *given, lse = saved[4:]
            up = up.resolve_neg()
            grads[1:] = chunks.weight_grads(Given(*given), lse, up, ctx.terms, needs[1:])
        return *(None,) * 3, *_where(grads, needs), None, None


# Function.apply without its check for transforms, which was made before
_linear: Any = super(torch.autograd.Function, _Linear).apply


def _where(found: Iterable[Tensor | None], needs: Iterable[bool]) -> list[Tensor | None]:
    return [t if need else None for t, need in zip(found, needs, strict=True)]


_GIVEN = "Tensor hidden, Tensor weight, Tensor? bias, Tensor target, Tensor? class_weight"
_TERMS = "str reduction, int ignore_index, float label_smoothing, float z_loss, int? chunk"
_FORWARD = f"({_GIVEN}, {_TERMS}, ScalarType dtype, bool needs_hidden) -> (Tensor, Tensor, Tensor)"
_BACKWARD = f"({_GIVEN}, Tensor lse, Tensor up, {_TERMS}, bool[] needs) -> (Tensor, Tensor)"


@custom_op("deuteron::linear_cross_entropy", mutates_args=(), schema=_FORWARD)
def _linear_op(*call: Any) -> Any:
    """The loss under torch.compile; the gradients of weight and bias are exact."""
    loss, lse, grad, _ = chunks.forward(Given(*call[:5]), Terms(*call[5:10]), *call[10:])
    return loss.clone(), lse.clone(), grad  # results may not share memory


@_linear_op.register_fake
def _(*call: Any) -> Any:
    given, (dtype, needs_hidden) = Given(*call[:5]), call[10:]
    hidden, each = given.hidden, given.hidden.shape[:1]
    loss = hidden.new_empty(each if call[5] == "none" else (), dtype=dtype)
    grad = torch.empty_like(hidden if needs_hidden else hidden[:0])
    return loss, hidden.new_empty(each, dtype=given.wide), grad


@custom_op("deuteron::linear_cross_entropy_backward", mutates_args=(), schema=_BACKWARD)
def _linear_backward_op(*call: Any) -> Any:
    return chunks.weight_grads(Given(*call[:5]), call[5], call[6], Terms(*call[7:12]), call[12])


@_linear_backward_op.register_fake
def _(*call: Any) -> Any:
    weight, needs = call[1], call[12]
    by_weight = weight.new_empty(weight.shape if needs[0] else (0,))
    return by_weight, weight.new_empty(weight.shape[0] if needs[1] else 0)


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.terms = Terms(*inputs[5:10])
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, up: Tensor | None, *_: Any) -> Any:
    *given, lse, grad = ctx.saved_tensors
    if up is None:
        return (None,) * 12
    needs_hidden, *needs = ctx.needs_input_grad[:3]
    found: list[Tensor | None] = [None] * 3
    if any(needs):
        found[1:] = _linear_backward_op(*given, lse, up, *ctx.terms, needs)
    if needs_hidden:
        left = chunks.left_over(Given(*given), ctx.terms)
        factor = up.unsqueeze(1) if up.dim() else up if left is None else up * left
        found[0] = (grad * factor).to(grad.dtype)
    return *_where(found, ctx.needs_input_grad[:3]), *(None,) * 9


_linear_op.register_autograd(_pull, setup_context=_save)
