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
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deuteron.errors import BindError, GraphError
from deuteron.functional.autocast import lower
from deuteron.functional.core import Function
from deuteron.functional.cross_entropy import (
    CPU_BYTES,
    FLOATS,
    check_terms,
    cross_entropy,
    is_eager,
    keeps_graph,
    refuse_second_derivative,
    result_type,
    scaled,
    scales,
    taken,
    torch_loss,
)
from deuteron.functional.library import LIMITS, Heard, delegates, in_transform, is_differentiated
from deuteron.ir.types import TensorType
from deuteron.ops import Ops, Sym

SMALL = 2**25  # logits that are no burden: 64 MB of 16-bit numbers


class Terms(NamedTuple):
    """What is asked of the loss, besides its tensors."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk: int | None


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

    @property
    def wide(self) -> torch.dtype:
        """The type of sums."""
        return torch.float64 if self.hidden.dtype is torch.float64 else torch.float32


class Kept(NamedTuple):
    """What the backward pass needs of the forward one: lse, what the loss of each token is
    multiplied with, and z."""

    lse: Tensor
    scale: Tensor
    z: Tensor


# ---- as graphs -------------------------------------------------------------------------------


def _build_scales(
    b: Ops,
    target: Sym,
    weight: Sym | None,
    *,
    classes: int,
    dtype: str,
    ignore_index: int,
    z_loss: float,
) -> tuple[Sym, ...]:
    """What the mean multiplies the loss of each token with, and z."""
    like = TensorType.of((target.shape[0], classes), dtype)
    scale, z = scales(b, like, target, weight, "mean", ignore_index, z_loss)
    assert isinstance(scale, Sym)
    return scale, z if isinstance(z, Sym) else scale * 0.0 + z_loss


def _build_tokens(
    b: Ops,
    logits: Sym,
    target: Sym,
    weight: Sym | None,
    scale: Sym | None,
    z: Sym | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    grad: bool,
) -> tuple[Sym, ...]:
    """Losses and lse of some tokens, and the gradient of their logits."""
    how: Any = {"label_smoothing": label_smoothing, "ignore_index": ignore_index}
    found = b.cross_entropy_with_grad(logits, target, weight, scale, z, **how)
    return tuple(found[: 3 if grad else 2])


def _build_classes(
    b: Ops,
    logits: Sym,
    lse: Sym,
    slope: Sym,
    share: Sym,
    place: Sym | None,
    own: Sym | None,
    probs: Sym | None,
    weight: Sym | None,
    *,
    smoothing: float,
    classes: int,
) -> Sym:
    """The gradients of the logits of some classes: of each token softmax · slope, less ``own`` at
    its ``place`` among them, less ``share`` times the shares that every class has."""
    grad = b.exp(b.upcast(logits) - lse) * slope
    if place is not None:
        here = b.eq(place, b.constant(torch.arange(logits.shape[1]), "classes"))
        grad = grad - b.where(here, own, 0.0)
    if probs is not None or smoothing:
        q: Any = smoothing / classes
        if probs is not None:
            q = b.upcast(probs) * (1.0 - smoothing) + q
        grad = grad - share * (q if weight is None else b.upcast(weight) * q)
    return b.to(b.where(b.eq(share, 0.0), 0.0, grad), logits.dtype)  # of nan, too, if ignored


SCALES = Function("linear_cross_entropy_scales", _build_scales, eager=True)
TOKENS = Function("linear_cross_entropy_tokens", _build_tokens, eager=True, into={2: "logits"})
CLASSES = Function("linear_cross_entropy_classes", _build_classes, eager=True, into={0: "logits"})

# ---- the function ----------------------------------------------------------------------------


def _torch_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    return_lse: bool,
    chunk: int | None,
    accumulate: str | None,
) -> Any:
    if z_loss or return_lse or chunk is not None or accumulate is not None:
        return NotImplemented
    shape, table = hidden.shape, weight.nbytes
    if _multiplies_slowly(hidden) or len(shape) != 2 or not shape[1]:
        return NotImplemented
    logits = shape[0] * table // shape[1]
    most = max(logits, table)
    small = most <= LIMITS.least or most <= LIMITS[hidden.get_device()]
    if not small and (hidden.is_cuda or logits > CPU_BYTES):
        return NotImplemented
    found = F.linear(hidden, weight, bias)
    return torch_loss(found, target, class_weight, reduction, ignore_index, label_smoothing)


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
             If probabilities or class weights need a gradient, the logits are computed whole
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
    terms = Terms(reduction, ignore_index, float(label_smoothing), float(z_loss), chunk)
    check_terms("linear_cross_entropy", reduction, z_loss)
    _check(hidden, weight, bias, target, chunk)
    fast = _is_fast(accumulate, reduction)
    learned = any(t is not None and is_differentiated(t) for t in (target, class_weight))
    if in_transform() or learned:
        logits = F.linear(hidden, weight, bias).movedim(-1, min(1, hidden.dim() - 1))
        if target.is_floating_point():
            target = target.movedim(-1, min(1, target.dim() - 1))
        how: Any = {**terms._asdict(), "return_lse": return_lse}
        del how["chunk"]
        return cross_entropy(logits, target, class_weight, **how)
    # kernels read memory, which such a view has with other signs; elsewhere these are themselves
    hidden, weight, target = hidden.resolve_neg(), weight.resolve_neg(), target.resolve_neg()
    bias, class_weight = (None if t is None else t.resolve_neg() for t in (bias, class_weight))
    classes, dtype, lead = weight.shape[0], result_type(hidden, target), hidden.shape[:-1]
    target = target.reshape(-1, classes) if target.is_floating_point() else target.reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    given = Given(flat, weight, bias, target.contiguous(), class_weight)
    needs = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (hidden, weight, bias)
    )
    if not is_eager(*given):
        wanted = hidden.requires_grad and torch.is_grad_enabled()
        loss, lse, *_ = _linear_op(*given, *terms, dtype, wanted)
    elif needs:
        loss, lse = _Linear.apply(fast, terms, dtype, *given)  # type: ignore[no-untyped-call]
    else:
        loss, (lse, *_), _ = _forward(given, terms, dtype, False)
    loss = loss.view(lead) if reduction == "none" else loss
    return (loss, lse.view(lead)) if return_lse else loss


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


# ---- chunk by chunk --------------------------------------------------------------------------


def tokens_at_once(
    tokens: int, hidden: int, classes: int, chunk: int | None, fast: bool = False
) -> int:
    """Enough rows for a product to run at full speed: half of H makes their logits half as large
    as the weight. The fast way holds the weight's gradient meanwhile and takes an eighth."""
    wanted = chunk or max(hidden // (8 if fast else 2), SMALL // classes, 1)
    parts = max(1, math.ceil(tokens / wanted))
    return max(1, math.ceil(tokens / parts))


def classes_at_once(tokens: int, hidden: int, classes: int, chunk: int | None) -> int:
    """A power of two of classes whose logits are about a sixteenth of the weight; with a chunk,
    no more numbers than it has."""
    if chunk:
        most = max(1, min(chunk, tokens) * classes // max(tokens, 1))
        return min(classes, 1 << (most.bit_length() - 1))
    wanted = max(hidden * classes // 16, SMALL) / max(tokens, 1)
    return min(classes, 1 << max(0, round(math.log2(wanted))))


@dataclass(frozen=True)
class Chunks:
    """How a call was cut, as ``explain`` shows it before the plan of one chunk."""

    count: int
    tokens: int
    classes: int

    def explain(self) -> str:
        return (
            f"linear_cross_entropy: {self.count} chunks of up to {self.tokens} tokens. Of each, "
            f"torch's product makes {self.classes} logits to a token, and then:"
        )


def _scales(given: Given, terms: Terms) -> tuple[Tensor, Tensor]:
    """What the loss of each token is multiplied with, and z."""
    n, _, classes = given.sizes
    if terms.reduction == "mean" and not given.target.is_floating_point():
        how = {"classes": classes, "dtype": str(given.wide).removeprefix("torch.")}
        how |= {"ignore_index": terms.ignore_index, "z_loss": terms.z_loss}
        scale, z = SCALES.run((given.target, given.class_weight), how)
        return scale, z
    mean = 1.0 if terms.reduction != "mean" else 1.0 / n if n else math.inf
    scale, z = torch.tensor([mean, terms.z_loss], dtype=given.wide).to(given.hidden.device)
    return scale, z.clone()


def _forward(
    given: Given,
    terms: Terms,
    dtype: torch.dtype,
    needs_hidden: bool,
    sums: Sequence[Tensor | None] = (None, None),
) -> tuple[Tensor, Kept, Tensor]:
    """The loss, what the backward pass needs, and the gradient of hidden (or nothing). Those of
    weight and bias are added to ``sums`` where given."""
    hidden, weight, bias, target, class_weight = given
    n, features, classes = given.sizes
    by_weight, by_bias = sums
    scale, z = _scales(given, terms)
    grad = torch.empty_like(hidden if needs_hidden else hidden[:0])
    how = {"ignore_index": terms.ignore_index, "label_smoothing": terms.label_smoothing}
    how["grad"] = needs_hidden or by_weight is not None or by_bias is not None
    beside = (class_weight, None if _is_later(given, terms) else scale, z if terms.z_loss else None)
    step = tokens_at_once(n, features, classes, terms.chunk, by_weight is not None)
    room = hidden.new_empty((min(step, n), classes))
    losses, lse = hidden.new_empty((2, n), dtype=given.wide)
    if Heard.listeners:
        Heard.add(Chunks(-(-n // step), step, classes))
    for a in range(0, n, step):
        piece = slice(a, min(a + step, n))
        logits = room[: piece.stop - a]
        _product(hidden[piece], weight, bias, logits)
        with Heard() if Heard.listeners and a else nullcontext():  # one is like the other
            found = TOKENS.run((logits, target[piece], *beside), how)
        losses[piece], lse[piece] = found[:2]
        if needs_hidden:
            _multiply(found[2], weight, grad[piece])
        if by_weight is not None:
            _multiply(found[2].t(), hidden[piece], by_weight, add=True)
        if by_bias is not None:
            by_bias.add_(found[2].sum(0))
    loss = losses if terms.reduction == "none" else losses.sum() * scale
    return loss.to(dtype), Kept(lse, scale, z), grad


def _is_later(given: Given, terms: Terms) -> bool:
    """Whether the division of a mean is left to the end: float16 would lose small numbers that a
    large scale of the loss was to save."""
    return given.hidden.dtype is torch.float16 and terms.reduction == "mean"


def _multiplies_slowly(x: Tensor) -> bool:
    """Whether this CPU has no products of 16-bit numbers: torch then does them one by one, and a
    hundred times slower than in float32."""
    if x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    ask, short = torch.ops.mkldnn, x.dtype is torch.bfloat16
    return not (ask._is_mkldnn_bf16_supported if short else ask._is_mkldnn_fp16_supported)()


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
    given: Given, kept: Kept, up: Tensor, terms: Terms, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """The gradients of weight and bias; one that is not needed is empty."""
    hidden, weight, bias, target, class_weight = given
    n, features, classes = given.sizes
    by_weight = weight.new_empty(weight.shape if needs[0] else (0,))
    by_bias = weight.new_empty(classes if needs[1] else 0)
    step = classes_at_once(n, features, classes, terms.chunk)
    room = hidden.new_empty(n * step)
    slope, share, own = _row_factors(given, kept, up, terms)
    rows = [t.unsqueeze(1) for t in (kept.lse, slope, share)]
    own = None if own is None else own.unsqueeze(1)
    how = {"smoothing": terms.label_smoothing, "classes": classes}
    for a in range(0, classes, step):
        b = min(a + step, classes)
        logits = room[: n * (b - a)].view(n, b - a)
        _product(hidden, weight[a:b], None if bias is None else bias[a:b], logits)
        place = None if own is None else (target - a).unsqueeze(1)
        probs = target[:, a:b] if own is None else None
        beside = None if class_weight is None else class_weight[a:b]
        (grad,) = CLASSES.run((logits, *rows, place, own, probs, beside), how)
        if needs[0]:
            _multiply(grad.t(), hidden, by_weight[a:b])
        if needs[1]:
            torch.sum(grad, 0, out=by_bias[a:b])
    return by_weight, by_bias


def _row_factors(
    given: Given, kept: Kept, up: Tensor, terms: Terms
) -> tuple[Tensor, Tensor, Tensor | None]:
    """For every token: the slope of its softmax, what the shares of all classes are multiplied
    with, and what an integer target takes from its own class, nan where there is none such."""
    target, weight, smooth = given.target, given.class_weight, terms.label_smoothing
    n, _, classes = given.sizes
    weight = None if weight is None else weight.to(given.wide)
    share = (up.to(given.wide) * kept.scale).expand(n)
    mass: Any = smooth if weight is None else smooth * weight.mean()
    own = None
    if target.is_floating_point():
        every = kept.lse.new_ones(classes) if weight is None else weight
        parts = target.split(max(1, SMALL // classes))
        mass = mass + (1.0 - smooth) * torch.cat([p.to(every) @ every for p in parts])
    else:
        live, known = target != terms.ignore_index, (target >= 0) & (target < classes)
        own = share.new_full((n,), 1.0 - smooth)
        if weight is not None:
            own = own * weight[torch.where(known, target, 0)]
        own = torch.where(known, own, math.nan)
        share, mass = torch.where(live, share, 0.0), torch.where(live, mass + own, 0.0)
        own = torch.where(live, own * share, 0.0)
    return (mass + 2.0 * kept.z * kept.lse) * share, share, own


class _Linear(torch.autograd.Function):
    """Fast, all gradients come with the loss, and the backward pass only scales them; else those
    of weight and bias are made there."""

    @staticmethod
    def forward(ctx: Any, fast: bool, terms: Terms, dtype: torch.dtype, *tensors: Any) -> Any:
        given, needs = Given(*tensors), ctx.needs_input_grad[3:6]
        sums: list[Tensor | None] = [
            torch.zeros_like(t) if fast and need and t is not None else None
            for t, need in zip((given.weight, given.bias), needs[1:], strict=True)
        ]
        loss, kept, by_hidden = _forward(given, terms, dtype, needs[0], sums)
        ctx.grads = (by_hidden if needs[0] else None, *sums)
        ctx.left = kept.scale if _is_later(given, terms) else None
        ctx.fast, ctx.terms = fast, terms
        if not fast:
            ctx.save_for_backward(*given, *kept)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(kept.lse)
        return loss, kept.lse

    @staticmethod
    def backward(ctx: Any, up: Tensor | None, _: Any) -> Any:
        if up is None:
            return (None,) * 8
        refuse_second_derivative("linear_cross_entropy")
        up, keep = up.resolve_neg(), keeps_graph()
        each = up.unsqueeze(1) if up.dim() else up
        grads = [
            None if g is None else scaled(g, each, ctx.left, keep)
            for g in taken(ctx, "grads", keep)
        ]
        needs = ctx.needs_input_grad[4:6]
        if not ctx.fast and any(needs):
            saved = ctx.saved_tensors
            made = _weight_grads(Given(*saved[:5]), Kept(*saved[5:]), up, ctx.terms, needs)
            grads[1:] = [g if need else None for g, need in zip(made, needs, strict=True)]
        return None, None, None, *grads, None, None


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
    chunk: int | None,
    dtype: torch.dtype,
    needs_hidden: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = Given(hidden, weight, bias, target, class_weight)
    terms = Terms(reduction, ignore_index, label_smoothing, z_loss, chunk)
    loss, kept, grad = _forward(given, terms, dtype, needs_hidden)
    return loss.clone(), *(t.clone() for t in kept), grad  # results may not share memory


@_linear_op.register_fake
def _(hidden: Tensor, *call: Any) -> Any:
    reduction, dtype, needs_hidden = call[4], *call[-2:]
    n, wide = hidden.shape[0], Given(hidden, *[hidden] * 4).wide
    loss = hidden.new_empty((n,) if reduction == "none" else (), dtype=dtype)
    kept = [hidden.new_empty(shape, dtype=wide) for shape in ((n,), (), ())]
    return loss, *kept, torch.empty_like(hidden if needs_hidden else hidden[:0])


@torch.library.custom_op("deuteron::linear_cross_entropy_backward", mutates_args=())
def _linear_backward_op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    class_weight: Tensor | None,
    lse: Tensor,
    scale: Tensor,
    z: Tensor,
    up: Tensor,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk: int | None,
    needs_weight: bool,
    needs_bias: bool,
) -> tuple[Tensor, Tensor]:
    given, kept = Given(hidden, weight, bias, target, class_weight), Kept(lse, scale, z)
    terms = Terms(reduction, ignore_index, label_smoothing, z_loss, chunk)
    return _weight_grads(given, kept, up, terms, (needs_weight, needs_bias))


@_linear_backward_op.register_fake
def _(hidden: Tensor, weight: Tensor, *call: Any) -> tuple[Tensor, Tensor]:
    by_weight = weight.new_empty(weight.shape if call[-2] else (0,))
    return by_weight, weight.new_empty(weight.shape[0] if call[-1] else 0)


def _save(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    ctx.terms = Terms(*inputs[5:10])
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _pull(ctx: Any, up: Tensor | None, *_: Any) -> Any:
    *saved, grad = ctx.saved_tensors
    if up is None:
        return (None,) * 12
    needs_hidden, *needs = ctx.needs_input_grad[:3]
    found: list[Tensor | None] = [None] * 3
    if needs_hidden:
        later = _is_later(Given(*saved[:5]), ctx.terms)
        factor = up.unsqueeze(1) if up.dim() else up * saved[6] if later else up
        found[0] = (grad * factor).to(grad.dtype)
    if any(needs):
        made = _linear_backward_op(*saved, up, *ctx.terms, *needs)
        found[1:] = [g if need else None for g, need in zip(made, needs, strict=True)]
    return *found, *(None,) * 9


_linear_op.register_autograd(_pull, setup_context=_save)

# ---- what may be asked -----------------------------------------------------------------------


def _check(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, chunk: int | None
) -> None:
    fits = hidden.dim() >= 1 and weight.dim() == 2 and hidden.shape[-1] == weight.shape[1]
    if not fits or weight.dtype != hidden.dtype or weight.device != hidden.device:
        raise BindError(
            f"linear_cross_entropy cannot multiply hidden {_shown(hidden)} by weight "
            f"{_shown(weight)}",
            remedy="give hidden […, H] and weight [C, H] of one type on one device",
        )
    classes = weight.shape[0]
    if bias is not None and (bias.shape, bias.dtype) != (weight.shape[:1], weight.dtype):
        raise BindError(
            f"the bias of linear_cross_entropy is {_shown(bias)}, its weight is {_shown(weight)}",
            remedy=f"give {weight.dtype} of shape [{classes}] on {weight.device}",
        )
    if chunk is not None and chunk < 1:
        raise BindError(
            f"linear_cross_entropy cannot take {chunk} tokens at a time",
            remedy="give chunk=1 or more, or leave it out",
        )
    shape = (*hidden.shape[:-1], classes)
    if tuple(target.shape) != (shape if target.is_floating_point() else shape[:-1]):
        raise BindError(
            f"the target of linear_cross_entropy is {_shown(target)}, hidden is {_shown(hidden)} "
            f"and there are {classes} classes",
            remedy=f"give int64 classes of shape {list(shape[:-1])}, or probabilities of shape "
            f"{list(shape)}",
        )


def _shown(x: Tensor) -> str:
    """A tensor in an error: type, shape and device."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)} on {x.device}"
