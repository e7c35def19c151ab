"""Cross-entropy of a linear layer's outputs, which never exist whole.

The exact way. Forward, some tokens at a time: their logits, the loss, and while the logits are
there their gradient in their place and from it the gradient of the hidden states. Backward, some
classes at a time: the logits of all tokens once more, their gradient from what the forward pass
kept of each row (one number), and from it the rows of the weight's gradient. That is one product
more than keeping the logits would take, and it buys this: every element of every gradient is one
product, rounded once, with no buffer in float32 to add up in.

The fast way makes all gradients in the forward pass and adds those of the weight up from chunk to
chunk of the tokens, in the type of the weight: one product less, and one rounding for each chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError, GraphError
from deuteron.functional.autocast import lower
from deuteron.functional.chunks import classes_at_once, tokens_at_once
from deuteron.functional.delegate import delegates
from deuteron.functional.loss import (
    CPU_BYTES,
    FLOATS,
    as_operator,
    by_torch,
    by_torch_alone,
    check,
    keeps_graph,
    refuse_second_derivative,
    result_type,
    shown,
    taken,
    torch_loss,
)
from deuteron.functional.loss_rows import Terms, added_up, rows, scaled, some_classes, totals, wide
from deuteron.functional.small import is_small


class Given(NamedTuple):
    """What the loss is computed from, the tokens in one dimension."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Tokens, features and classes."""
        return *self.hidden.shape, self.weight.shape[0]


def _torch_linear_cross_entropy(
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
) -> Any:
    if z_loss or return_lse or chunk is not None or accumulate is not None:
        return NotImplemented
    if _multiplies_slowly(hidden):
        return NotImplemented
    shape, table = hidden.shape, weight.nbytes
    if len(shape) != 2 or not shape[1]:
        return NotImplemented
    logits = shape[0] * table // shape[1]
    if not is_small(hidden, max(logits, table)) and (hidden.is_cuda or logits > CPU_BYTES):
        return NotImplemented
    return torch_loss(
        F.linear(hidden, weight, bias),
        target,
        class_weight,
        reduction,
        ignore_index,
        label_smoothing,
    )


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
) -> Any:
    """``cross_entropy(linear(hidden, weight, bias), target)`` without room for the logits.

    >>> loss = dt.functional.linear_cross_entropy(hidden, embedding.weight, tokens)

    hidden   […, H]; weight [C, H]; bias [C]; all of one type (under autocast they are cast)
    target   classes […], or probabilities […, C]: the classes are last here, as linear has them.
             If probabilities need a gradient, torch's operators compute all, logits and all
    chunk    tokens whose logits exist at a time; the backward pass holds no more numbers than that
             in its slices of the classes. By default what keeps products fast: half of H in the
             forward pass (an eighth if "fast"), and slices of about a sixteenth of the weight in
             the backward pass

    accumulate  how the gradients of weight and bias come about. "exact": in the backward pass, from
             logits computed again; each is rounded once. "fast": with the loss, added up over the
             chunks in the type of the weight, three products for four; one rounding more for each
             chunk (8192 tokens, 4096 → 128256 in bfloat16: the error of all gradients is 1.1e-3
             for 1.0e-3). It is for "mean" and "sum", and the default there. In float32 "exact" is
             off by 6e-8 of log Σ exp in each probability, where torch's gradients may be better

    The other arguments are those of :func:`cross_entropy`; ``class_weight`` is its ``weight``.
    Logits are rounded to the type of the inputs, as linear would. The gradient of ``hidden`` is
    computed with the loss. Under torch.compile all is "exact". There is no second derivative,
    except of small losses, which are torch's own as in ``cross_entropy``.
    """
    hidden, weight, *rest = lower(hidden, weight, *(() if bias is None else (bias,)))
    bias = rest[0] if rest else None
    terms = Terms(reduction, ignore_index, float(label_smoothing), float(z_loss))
    _check(hidden, weight, bias, target, class_weight, terms, chunk)
    fast = _is_fast(accumulate, reduction)
    if by_torch_alone(target):
        logits = F.linear(hidden, weight, bias).movedim(-1, min(1, hidden.dim() - 1))
        probs = target.is_floating_point()
        moved = target.movedim(-1, min(1, target.dim() - 1)) if probs else target
        both = by_torch(logits, moved, class_weight, terms, result_type(hidden, target))
        return both if return_lse else both[0]
    # kernels read memory, which such a view has with other signs; elsewhere these are themselves
    hidden, weight, target = hidden.resolve_neg(), weight.resolve_neg(), target.resolve_neg()
    bias, class_weight = (None if t is None else t.resolve_neg() for t in (bias, class_weight))
    classes, dtype = weight.shape[0], result_type(hidden, target)
    lead = hidden.shape[:-1]
    flat = hidden.reshape(-1, hidden.shape[-1])
    target = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
    given = Given(flat, weight, bias, target, class_weight)
    if as_operator(*given):
        needs = hidden.requires_grad and torch.is_grad_enabled()
        loss, lse, *_ = _linear_op(*given, *terms, dtype, needs, chunk)
    elif torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    ):
        way = _FastLinear if fast else _Linear
        loss, lse = way.apply(*given, terms, dtype, chunk)  # type: ignore[no-untyped-call]
    else:
        loss, lse, *_ = _forward(given, terms, dtype, False, chunk)
    loss = loss.view(lead) if reduction == "none" else loss
    return (loss, lse.view(lead)) if return_lse else loss


def _multiplies_slowly(x: Tensor) -> bool:
    """Whether this CPU has no products of 16-bit numbers: torch then does them one by one, and a
    hundred times slower than in float32."""
    if x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    ask = torch.ops.mkldnn
    has = (
        ask._is_mkldnn_bf16_supported
        if x.dtype is torch.bfloat16
        else (ask._is_mkldnn_fp16_supported)
    )
    return not has()


def _is_fast(accumulate: str | None, reduction: str) -> bool:
    """Whether the weight's gradient is added up over chunks of tokens."""
    if accumulate is None:
        return reduction != "none"
    if accumulate not in ("exact", "fast"):
        raise GraphError(
            f"linear_cross_entropy cannot accumulate {accumulate!r}",
            asked=f"accumulate={accumulate!r}",
            remedy="use 'exact' or 'fast', or leave it out",
        )
    if accumulate == "fast" and reduction == "none":
        raise GraphError(
            "a gradient that is added up with the loss cannot be weighed row by row later",
            asked="linear_cross_entropy(…, accumulate='fast', reduction='none')",
            remedy="use accumulate='exact', or reduction='sum' or 'mean'",
        )
    return accumulate == "fast"


def _forward(
    given: Given,
    terms: Terms,
    dtype: torch.dtype,
    needs_hidden: bool,
    chunk: int | None,
    by_weight: Tensor | None = None,
    by_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss, lse and masses of every row, the gradient of hidden (or nothing), the totals. The
    gradients of weight and bias are added to ``by_weight`` and ``by_bias`` where given."""
    hidden, weight, bias, target, class_weight = given
    n, features, classes = given.sizes
    target = target.contiguous()
    total = totals(hidden, classes, target, class_weight, terms)
    lse, masses = torch.empty((2, n), dtype=total.dtype, device=hidden.device)
    each = dtype if terms.reduction == "none" else total.dtype
    losses = torch.empty(n, dtype=each, device=hidden.device)
    grad = torch.empty(
        hidden.shape if needs_hidden else (0,), dtype=hidden.dtype, device=hidden.device
    )
    needs_any = needs_hidden or by_weight is not None or by_bias is not None
    step = tokens_at_once(n, features, classes, chunk, by_weight is not None)
    room = torch.empty((min(step, n), classes), dtype=hidden.dtype, device=hidden.device)
    for a in range(0, n, step):
        piece = slice(a, min(a + step, n))
        logits = room[: piece.stop - a]
        _product(hidden[piece], weight, bias, logits)
        rows(
            logits,
            target[piece],
            class_weight,
            total,
            terms,
            losses[piece],
            lse[piece],
            masses[piece],
            logits if needs_any else None,
        )
        if needs_hidden:
            _multiply(logits, weight, grad[piece])
        if by_weight is not None:
            _multiply(logits.t(), hidden[piece], by_weight, add=True)
        if by_bias is not None:
            by_bias.add_(logits.sum(0))
    return added_up(losses, terms.reduction, dtype), lse, masses, grad, total


def _product(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        _multiply(hidden, weight.t(), out)
    elif _multiplies_slowly(hidden):
        out.copy_(torch.addmm(bias.float(), hidden.float(), weight.float().t()))
    else:
        torch.addmm(bias, hidden, weight.t(), out=out)


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """a · b into ``out``, or added to it; in float32 where narrower products are slow."""
    if _multiplies_slowly(a):
        found = a.float() @ b.float()
        out.add_(found) if add else out.copy_(found)
    elif add:
        out.addmm_(a, b)
    else:
        torch.mm(a, b, out=out)


def _weight_grads(
    given: Given,
    lse: Tensor,
    masses: Tensor,
    total: Tensor,
    up: Tensor,
    terms: Terms,
    needs_weight: bool,
    needs_bias: bool,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias; one that is not needed is empty."""
    hidden, weight, bias, target, class_weight = given
    n, features, classes = given.sizes
    target, up = target.contiguous(), up.contiguous()
    by_weight = weight.new_empty(weight.shape if needs_weight else (0,))
    by_bias = weight.new_empty(classes if needs_bias else 0)
    step = classes_at_once(n, features, classes, chunk)
    room = torch.empty(n * step, dtype=hidden.dtype, device=hidden.device)
    for a in range(0, classes, step):
        b = min(a + step, classes)
        logits = room[: n * (b - a)].view(n, b - a)
        _product(hidden, weight[a:b], None if bias is None else bias[a:b], logits)
        some_classes(logits, target, class_weight, total, terms, lse, masses, up, a, classes)
        if needs_weight:
            _multiply(logits.t(), hidden, by_weight[a:b])
        if needs_bias:
            torch.sum(logits, 0, out=by_bias[a:b])
    return by_weight, by_bias


class _Linear(torch.autograd.Function):
    """The eager way: no dispatcher between the call and the launches."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        given, (terms, dtype, chunk) = Given(*call[:5]), call[5:]
        loss, lse, masses, ctx.grad, total = _forward(
            given, terms, dtype, ctx.needs_input_grad[0], chunk
        )
        ctx.save_for_backward(*given, lse, masses, total)
        ctx.terms, ctx.chunk = terms, chunk
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, _: Any) -> Any:
        if up is None:
            return (None,) * 8
        refuse_second_derivative("linear_cross_entropy")
        up = up.resolve_neg()
        *given, lse, masses, total = ctx.saved_tensors
        by_hidden = by_weight = by_bias = None
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_hidden:
            keep = keeps_graph()
            each = up[:, None] if up.dim() else up
            by_hidden = scaled(taken(ctx, "grad", keep), each, total, keep)
        if needs_weight or needs_bias:
            by_weight, by_bias = _weight_grads(
                Given(*given),
                lse,
                masses,
                total,
                up,
                ctx.terms,
                needs_weight,
                needs_bias,
                ctx.chunk,
            )
        return (
            by_hidden,
            by_weight if needs_weight else None,
            by_bias if needs_bias else None,
            *(None,) * 5,
        )


class _FastLinear(torch.autograd.Function):
    """All gradients with the loss; the backward pass only scales them."""

    @staticmethod
    def forward(ctx: Any, *call: Any) -> tuple[Tensor, Tensor]:
        given, (terms, dtype, chunk) = Given(*call[:5]), call[5:]
        needs = ctx.needs_input_grad[:3]
        sums = [
            torch.zeros_like(t) if need and t is not None else None
            for t, need in zip((given.weight, given.bias), needs[1:], strict=True)
        ]
        loss, lse, _, by_hidden, ctx.total = _forward(given, terms, dtype, needs[0], chunk, *sums)
        ctx.grads = (by_hidden if needs[0] else None, *sums)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(lse)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, _: Any) -> Any:
        if up is None:
            return (None,) * 8
        refuse_second_derivative("linear_cross_entropy")
        up = up.resolve_neg()
        keep = keeps_graph()
        grads = taken(ctx, "grads", keep)
        return (
            *(None if g is None else scaled(g, up, ctx.total, keep) for g in grads),
            *(None,) * 5,
        )


# ---- under torch.compile ---------------------------------------------------------------------


@torch.library.custom_op("deuteron::linear_cross_entropy", mutates_args=())
def _linear_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    dtype: torch.dtype,
    needs_hidden: bool,
    chunk: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    terms = Terms(reduction, ignore_index, label_smoothing, z_loss)
    given = Given(hidden, weight, bias, target, class_weight)
    loss, lse, masses, grad, total = _forward(given, terms, dtype, needs_hidden, chunk)
    return loss, lse.clone(), masses.clone(), grad, total  # results may not share memory


@_linear_op.register_fake
def _(hidden: Tensor, *call: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    *_, reduction, _, _, _, dtype, needs_hidden, _ = call
    n, sums = hidden.shape[0], wide(hidden.dtype)
    loss = hidden.new_empty((n,) if reduction == "none" else (), dtype=dtype)
    grad = hidden.new_empty(hidden.shape if needs_hidden else (0,))
    lse, masses = hidden.new_empty(n, dtype=sums), hidden.new_empty(n, dtype=sums)
    return loss, lse, masses, grad, hidden.new_empty(5, dtype=sums)


@torch.library.custom_op("deuteron::linear_cross_entropy_backward", mutates_args=())
def _linear_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    masses: Tensor,
    total: Tensor,
    up: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    needs_weight: bool,
    needs_bias: bool,
    chunk: int | None,
) -> tuple[Tensor, Tensor]:
    terms = Terms(reduction, ignore_index, label_smoothing, z_loss)
    given = Given(hidden, weight, bias, target, class_weight)
    return _weight_grads(given, lse, masses, total, up, terms, needs_weight, needs_bias, chunk)


@_linear_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    *_, needs_weight, needs_bias, _ = given
    by_weight = weight.new_empty(weight.shape if needs_weight else (0,))
    return by_weight, weight.new_empty(weight.shape[0] if needs_bias else 0)


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    given, ctx.terms, ctx.chunk = inputs[:5], inputs[5:9], inputs[-1]
    _, lse, masses, grad, total = output
    ctx.save_for_backward(*given, lse, masses, total, grad)
    ctx.mark_non_differentiable(lse, masses, grad, total)
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, up: Tensor | None, *_: Any) -> Any:
    *saved, total, grad = ctx.saved_tensors
    if up is None:
        return (None,) * 12
    by_hidden = by_weight = by_bias = None
    needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if needs_hidden:
        by_hidden = grad * (up[:, None].to(grad.dtype) if up.dim() else up * total[4])
    if needs_weight or needs_bias:
        by_weight, by_bias = _linear_backward_op(
            *saved, total, up, *ctx.terms, needs_weight, needs_bias, ctx.chunk
        )
    return (
        by_hidden,
        by_weight if needs_weight else None,
        by_bias if needs_bias else None,
        *(None,) * 9,
    )


_linear_op.register_autograd(_pull, setup_context=_save)

# ---- what may be asked -----------------------------------------------------------------------


def _check(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    terms: Terms,
    chunk: int | None,
) -> None:
    fits = hidden.dim() >= 1 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise BindError(
            f"linear_cross_entropy cannot multiply hidden {shown(hidden)} by weight "
            f"{shown(weight)}",
            remedy="give hidden […, H] and weight [C, H] of one type on one device",
        )
    classes = weight.shape[0]
    if bias is not None and (
        tuple(bias.shape) != (classes,)
        or bias.dtype != weight.dtype
        or bias.device != weight.device
    ):
        raise BindError(
            f"the bias of linear_cross_entropy is {shown(bias)}, its weight is {shown(weight)}",
            remedy=f"give {weight.dtype} of shape [{classes}] on {weight.device}",
        )
    if chunk is not None and chunk < 1:
        raise BindError(
            f"linear_cross_entropy cannot take {chunk} tokens at a time",
            remedy="give chunk=1 or more, or leave it out",
        )
    n = math.prod(hidden.shape[:-1])
    shape = (*hidden.shape[:-1], classes)
    want = shape if target.is_floating_point() else shape[:-1]
    if tuple(target.shape) != tuple(want):
        raise BindError(
            f"the target of linear_cross_entropy is {shown(target)}, hidden is {shown(hidden)} "
            f"and there are {classes} classes",
            remedy=f"give int64 classes of shape {list(shape[:-1])}, or probabilities of shape "
            f"{list(shape)}",
        )
    flat = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
    check("linear_cross_entropy", hidden, (n, classes), flat, class_weight, terms)
