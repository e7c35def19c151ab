"""Cross-entropy of a linear layer chunk by chunk: the loss, and the gradients that come with it,
for some tokens at a time; and the gradients of weight and bias for some classes at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deuteron.functional.arguments import Tensors
from deuteron.functional.core import Function
from deuteron.functional.cross_entropy import IN_PLACE
from deuteron.functional.explain import RanInstead, Recording
from deuteron.ir.dtype import dtype as type_of
from deuteron.ops import Ops, Sym
from deuteron.target import target as target_of

SMALL = 2**25  # so many logits may be in memory at once: 64 MB of 16-bit numbers
SHARE = 512  # and so may as many as fit in a 512th of a GPU's memory


class Terms(NamedTuple):
    """The arguments of the loss besides its tensors."""

    reduction: str
    ignore_index: int
    label_smoothing: float
    z_loss: float
    chunk: int | None


class Given(NamedTuple):
    """The tensors that the loss is computed from, with the tokens in one dimension."""

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


# ---- some tokens at a time -------------------------------------------------------------------


def tokens_at_once(n: int, hidden: int, classes: int, chunk: int | None, fast: bool = False) -> int:
    """Return how many tokens to take at a time: enough rows for a product to run at full speed.
    With H / 2 of them the logits are half as large as the weight. The fast way, which holds the
    weight's gradient meanwhile, takes H / 8."""
    wanted = chunk or max(hidden // (8 if fast else 2), SMALL // classes, 1)
    parts = max(1, math.ceil(n / wanted))
    return max(1, math.ceil(n / parts))


@cache
def _room(device: int) -> int:
    """Return the bytes of logits that may be in memory at once on a GPU."""
    return target_of(f"cuda:{device}").memory_bytes // SHARE


def _all_at_once(given: Given, chunk: int | None) -> bool:
    """Whether the logits of all tokens may be in memory together. Then nothing is added up over
    chunks, and the host launches everything only once."""
    n, _, classes = given.sizes
    if chunk is not None:
        return n <= chunk
    logits = n * classes
    hidden = given.hidden
    return logits <= SMALL or (
        hidden.is_cuda and logits * hidden.element_size() <= _room(hidden.get_device())
    )


def _owns(given: Given, terms: Terms) -> tuple[Tensor, Tensor]:
    """Return which integer targets count, and their classes' weights, nan for classes out of
    range."""
    target, weight = given.target, given.class_weight
    known = (target >= 0) & (target < given.weight.shape[0])
    own = torch.ones(len(target), dtype=given.wide, device=target.device)
    if weight is not None:
        own = weight.to(given.wide)[torch.where(known, target, 0)]
    return target != terms.ignore_index, torch.where(known, own, math.nan)


def _scales(given: Given, terms: Terms) -> tuple[Tensor, Tensor]:
    """Return the factor of each token's loss, and z_loss relative to that."""
    scale = torch.ones((), dtype=given.wide, device=given.hidden.device)
    z = scale * terms.z_loss
    if terms.reduction != "mean":
        return scale, z
    if given.target.is_floating_point():
        return scale / len(given.target), z
    live, own = _owns(given, terms)
    whole, rows = torch.where(live, own, 0.0).nansum(), live.sum()
    return scale / whole, z * whole / rows


def divides_later(given: Given, terms: Terms) -> bool:
    """Whether the division of a mean is left to the backward pass: in float16, dividing at once
    would lose small numbers that the caller scaled the loss up to save."""
    return given.hidden.dtype is torch.float16 and terms.reduction == "mean"


def left_over(given: Given, terms: Terms) -> Tensor | None:
    """Return the factor, if any, that gradients which came with the loss still have to get."""
    return _scales(given, terms)[0] if divides_later(given, terms) else None


def forward(
    given: Given, terms: Terms, dtype: torch.dtype, needs_hidden: bool, sums: Tensors = (None, None)
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the loss, lse, the gradient of hidden (empty if it is not needed), and the factor by
    which gradients still have to be multiplied, if any. The gradients of weight and bias are
    written to ``sums`` where given."""
    hidden, weight, bias, target, class_weight = given
    (n, features, classes), (by_weight, by_bias) = given.sizes, sums
    grad = torch.empty_like(hidden if needs_hidden else hidden[:0])
    needs_any = needs_hidden or by_weight is not None or by_bias is not None
    if n and _all_at_once(given, terms.chunk):
        logits = hidden.new_empty((n, classes))
        _multiply(hidden, weight.t(), logits, bias)
        loss, lse, by_logits, left = _whole(given, logits, terms, dtype, needs_any)
        if needs_hidden:
            _multiply(by_logits, weight, grad)
        if by_weight is not None:
            _multiply(by_logits.t(), hidden, by_weight)
        if by_bias is not None:
            torch.sum(by_logits, 0, out=by_bias)
        return loss, lse, grad, left
    scale, z = _scales(given, terms)
    how: Any = {**terms._asdict(), "reduction": "none", "dtype": type_of(given.wide).short}
    how["gives"] = "loss grad lse" if needs_any else "loss lse"
    del how["chunk"]
    left = scale if divides_later(given, terms) else None
    now = scale if left is None else None
    step = tokens_at_once(n, features, classes, terms.chunk, by_weight is not None)
    room = hidden.new_empty((min(step, n), classes))
    losses, lse = hidden.new_empty((2, n), dtype=given.wide)
    for each in (by_weight, by_bias):
        if each is not None:
            each.zero_()
    if Recording.active:
        cut = f"linear_cross_entropy: {-(-n // step)} chunks of up to {step} tokens"
        Recording.add(RanInstead(f"{cut}; of each torch's product makes the logits, and then:"))
    for a in range(0, n, step):
        piece = slice(a, min(a + step, n))
        logits = room[: piece.stop - a]
        _multiply(hidden[piece], weight.t(), logits, bias)
        # ``explain`` shows the first chunk only: the others are like it
        with Recording() if Recording.active and a else nullcontext():
            tensors = (logits, target[piece], class_weight, now, z if terms.z_loss else None)
            found = IN_PLACE.plan(tensors, how).run(tensors)
        losses[piece], lse[piece] = found[0], found[-1]
        if needs_hidden:
            _multiply(found[1], weight, grad[piece])
        if by_weight is not None:
            _multiply(found[1].t(), hidden[piece], by_weight, by_weight)
        if by_bias is not None:
            by_bias.add_(found[1].sum(0))
    loss = losses if terms.reduction == "none" else losses.sum() * scale
    return loss.to(dtype), lse, grad, left


def _whole(
    given: Given, logits: Tensor, terms: Terms, dtype: torch.dtype, needs_any: bool
) -> tuple[Any, ...]:
    """Return the loss of all logits, lse, the gradient of the logits, and the factor by which it
    still has to be multiplied. All of it is one plan, and the gradient takes the memory of the
    logits."""
    gives = "loss lse"
    if needs_any:
        gives = "loss grad left lse" if divides_later(given, terms) else "loss grad lse"
    how: Any = {**terms._asdict(), "dtype": type_of(dtype).short, "gives": gives}
    del how["chunk"]
    tensors = (logits, given.target, given.class_weight, None, None)
    found = dict(zip(gives.split(), IN_PLACE.plan(tensors, how).run(tensors), strict=True))
    return tuple(found.get(name) for name in ("loss", "lse", "grad", "left"))


def multiplies_slowly(x: Tensor) -> bool:
    """Whether this CPU has no products of 16-bit numbers: torch then multiplies them one by one, a
    hundred times slower than in float32."""
    if x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    ask, short = torch.ops.mkldnn, x.dtype is torch.bfloat16
    return not (ask._is_mkldnn_bf16_supported if short else ask._is_mkldnn_fp16_supported)()


def _multiply(a: Tensor, b: Tensor, out: Tensor, start: Tensor | None = None) -> None:
    """Write start + a · b into ``out``, which may be ``start``; in float32 where that is
    quicker."""
    if multiplies_slowly(a):
        a, b = a.float(), b.float()
        if start is out:
            out.add_(a @ b)
        else:
            out.copy_(a @ b if start is None else torch.addmm(start.float(), a, b))
    elif start is None:
        torch.mm(a, b, out=out)
    else:
        torch.addmm(start, a, b, out=out)


# ---- some classes at a time ------------------------------------------------------------------


def classes_at_once(tokens: int, hidden: int, classes: int, chunk: int | None) -> int:
    """Return how many classes to take at a time: a power of two of them, whose logits are about a
    sixteenth of the weight; with a ``chunk``, no more numbers than the logits of a chunk."""
    if chunk:
        most = max(1, min(chunk, tokens) * classes // max(tokens, 1))
        return min(classes, 1 << (most.bit_length() - 1))
    wanted = max(hidden * classes // 16, SMALL) / max(tokens, 1)
    return min(classes, 1 << max(0, round(math.log2(wanted))))


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
    """Write the gradients of the logits of some classes. For each token that is softmax ·
    ``slope``, less ``own`` at the ``place`` of its target among these classes, less ``share`` times
    the part that each class has in its target (by ``probs`` or ``smoothing``)."""
    grad = b.exp(b.upcast(logits) - lse) * slope
    if place is not None:
        here = b.eq(place, b.constant(torch.arange(logits.shape[1]), "classes"))
        grad = grad - b.where(here, own, 0.0)
    if probs is not None or smoothing:
        q: Any = smoothing / classes
        q = q if probs is None else b.upcast(probs) * (1.0 - smoothing) + q
        grad = grad - share * (q if weight is None else b.upcast(weight) * q)
    # ignored tokens get 0, even where logits are nan
    return b.to(b.where(b.eq(share, 0.0), 0.0, grad), logits.dtype)


CLASSES = Function("linear_cross_entropy_classes", _build_classes, eager=True, into={0: "logits"})


def weight_grads(
    given: Given, lse: Tensor, up: Tensor, terms: Terms, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias; one that is not needed is empty."""
    hidden, weight, bias, target, class_weight = given
    n, features, classes = given.sizes
    by_weight = weight.new_empty(weight.shape if needs[0] else (0,))
    by_bias = weight.new_empty(classes if needs[1] else 0)
    step = classes_at_once(n, features, classes, terms.chunk)
    room = hidden.new_empty(n * step)
    rows = [t if t is None else t.unsqueeze(1) for t in _row_factors(given, lse, up, terms)]
    how = {"smoothing": terms.label_smoothing, "classes": classes}
    for a in range(0, classes, step):
        b = min(a + step, classes)
        logits = room[: n * (b - a)].view(n, b - a)
        _multiply(hidden, weight[a:b].t(), logits, None if bias is None else bias[a:b])
        probs, place = (target[:, a:b], None) if rows[3] is None else (None, target[:, None] - a)
        beside = None if class_weight is None else class_weight[a:b]
        tensors = (logits, *rows[:3], place, rows[3], probs, beside)
        (grad,) = CLASSES.plan(tensors, how).run(tensors)
        if needs[0]:
            _multiply(grad.t(), hidden, by_weight[a:b])
        if needs[1]:
            torch.sum(grad, 0, out=by_bias[a:b])
    return by_weight, by_bias


def _row_factors(given: Given, lse: Tensor, up: Tensor, terms: Terms) -> list[Tensor | None]:
    """Return the factors of :func:`_build_classes` for every token: lse, ``slope``, ``share``, and
    ``own`` for integer targets, which is subtracted at the target's class."""
    target, smooth, own = given.target, terms.label_smoothing, None
    weight = lse.new_ones(given.weight.shape[0])
    weight = weight if given.class_weight is None else given.class_weight.to(weight)
    scale, z = _scales(given, terms)
    share, mass = (up.to(weight) * scale).expand(len(target)), smooth * weight.mean()
    if target.is_floating_point():
        parts = target.split(max(1, SMALL // len(weight)))
        mass = mass + (1.0 - smooth) * torch.cat([p.to(weight) @ weight for p in parts])
    else:
        live, own = _owns(given, terms)
        own = (1.0 - smooth) * own
        share, mass = torch.where(live, share, 0.0), torch.where(live, mass + own, 0.0)
        own = torch.where(live, own * share, 0.0)
    return [lse, (mass + 2.0 * z * lse) * share, share, own]
