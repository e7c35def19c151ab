"""Cross-entropy of rows on whatever device they are: Triton's kernels on a GPU, a generated one on
a CPU where the classes are side by side, else torch.

The torch side goes through the logits in pieces, in float32 for 16-bit numbers, with one
exponential for each of them where torch's own loss and gradient take two. It serves images and
float64. All sides give the same things:

- ``total``: five numbers. 1 over what a mean divides the loss by and 1 over the rows that count
  (the z part's), the same two for the gradient, and what the gradient is still to be multiplied
  with. All ones for a sum. float16 leaves the division of the gradient to the end: it would lose
  small numbers that a large scale of the loss was to save.
- ``lse``: log Σ exp of every row, and ``masses``: Σ q, the wanted shares of a row added up; both
  0 where a row is ignored. A later look at a part of the classes needs no more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from deuteron.codegen import openmp
from deuteron.errors import GraphError
from deuteron.kernels.cpu import converts_half

PIECE = 2**23  # numbers of a piece: 32 MB of float32


class Terms(NamedTuple):
    """What is asked of a cross-entropy, besides its tensors."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0


def in_triton(x: Tensor) -> bool:
    """Whether our kernels run it."""
    return x.is_cuda and x.dtype != torch.float64


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def class_dim(x: Tensor) -> int:
    """The dimension of the classes: 1, or 0 of a single row."""
    return min(1, x.dim() - 1)


def totals(x: Tensor, classes: int, target: Tensor, weight: Tensor | None, terms: Terms) -> Tensor:
    """The five numbers for targets of logits like ``x``."""
    later = x.dtype == torch.float16
    probs = target.is_floating_point()
    if terms.reduction == "mean" and not probs and in_triton(x):
        from deuteron.kernels.triton.loss_sums import launch_totals

        return launch_totals(target, weight, classes, terms.ignore_index, later)
    out = torch.ones(5, dtype=wide(x.dtype), device=x.device)
    if terms.reduction != "mean":
        return out
    if probs:
        n = target.numel() // classes
        out[:2] = 1.0 / n if n else math.inf
        out[4 if later else slice(2, 4)] = 1.0 / n if n else math.inf
        return out
    counts = target != terms.ignore_index
    rows = counts.sum().to(out.dtype)
    whole = rows
    if weight is not None:
        safe = target.clamp(0, classes - 1).long()
        whole = torch.where(counts, weight.to(out.dtype)[safe], 0.0).sum()
    out[0], out[1] = 1.0 / whole, 1.0 / rows
    if later:
        out[3] = whole / rows
        out[4] = torch.where(rows == 0, 0.0, out[0])  # no row, no gradient
    else:
        out[2:4] = out[:2]
    return out


def rows(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor,
    terms: Terms,
    loss: Tensor,
    lse: Tensor | None,
    masses: Tensor | None,
    grad: Tensor | None,
) -> None:
    """Fills loss, and lse, masses and grad where given; ``grad`` may be ``x``.

    Classes are along dimension 1 (0 of a single row); the other tensors have a number for each
    row, in order. Integer targets are contiguous.
    """
    if in_triton(x):
        _rows_in_triton(x, target, weight, total, terms, loss, lse, masses, grad)
        return
    if _has_rows(x) and (grad is None or _has_rows(grad)):
        _rows_generated(x, target, weight, total, terms, loss, lse, masses, grad)
        return
    logits, out = _flat(x), None if grad is None else _flat(grad)
    n, classes, inner = logits.shape
    wanted = (n, classes, inner) if target.is_floating_point() else (n, inner)
    target = target.reshape(wanted)
    losses = loss.view(n, inner)
    step = max(1, PIECE // max(1, classes * inner))
    for a in range(0, n, step):
        piece = slice(a, a + step)
        losses[piece], found, mass = _rows_in_torch(
            logits[piece], target[piece], weight, total, terms, None if out is None else out[piece]
        )
        if lse is not None:
            lse.view(n, inner)[piece] = found
        if masses is not None:
            masses.view(n, inner)[piece] = mass
    if grad is not None and out is not None and out.data_ptr() != grad.data_ptr():
        grad.copy_(out.view(grad.shape))


def _has_rows(x: Tensor) -> bool:
    """Whether the generated kernel takes logits or a gradient like ``x``."""
    if x.is_cuda or x.dtype not in SHORT or x.dim() > 2 or not x.numel() or x.stride(-1) != 1:
        return False
    return openmp.available() and (x.dtype is not torch.float16 or converts_half())


def _rows_generated(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor,
    terms: Terms,
    loss: Tensor,
    lse: Tensor | None,
    masses: Tensor | None,
    grad: Tensor | None,
) -> None:
    from deuteron.kernels.cpu.cross_entropy import LONG, Form, prepare_rows

    classes, probs = x.shape[-1], target.is_floating_point()
    n, smoothing = x.numel() // classes, terms.label_smoothing
    found = {name: torch.empty(n) for name in ("loss", "lse", "mass")}
    given = {"x": x, "total": total, **found}
    if weight is not None:
        weight = given["weight"] = weight.to(total.dtype).contiguous()
    if probs:
        share = target.to(x.dtype) if target.dtype not in SHORT else target
        target = given["share"] = share if share.stride(-1) == 1 else share.contiguous()
        given["live"] = torch.ones(n, dtype=torch.bool)
    else:
        owns = _owns(target.reshape(n), weight, terms, classes, total.dtype)
        given |= dict(zip(("live", "place", "own"), owns, strict=True))
    if grad is not None:
        given["grad"] = grad
    form = Form(
        SHORT[x.dtype],
        SHORT[target.dtype] if probs else "",
        probs or smoothing != 0.0,
        weight is not None,
        grad is not None,
        classes >= LONG,
    )
    by_row = [0 if t is None or t.dim() < 2 else t.stride(0) for t in (x, target, grad)]
    fill = prepare_rows(
        form,
        frozenset(given),
        (n, classes, *by_row),
        (smoothing / classes, 1.0 - smoothing, terms.z_loss),
    )
    fill(given)
    loss.copy_(found["loss"].view(loss.shape))
    if lse is not None:
        lse.copy_(found["lse"].view(lse.shape))
    if masses is not None:
        masses.copy_(found["mass"].view(masses.shape))


SHORT = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


def _flat(x: Tensor) -> Tensor:
    """Logits as [N, C, the rest]: a view, or a copy where there is none."""
    if x.dim() == 1:
        return x[None, :, None]
    return x.reshape(x.shape[0], x.shape[1], math.prod(x.shape[2:]))


def _rows_in_triton(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor,
    terms: Terms,
    loss: Tensor,
    lse: Tensor | None,
    masses: Tensor | None,
    grad: Tensor | None,
) -> None:
    from deuteron.kernels.triton.cross_entropy import Spec, launch_rows, plan_rows

    x, target, out = _with_layouts(x, target, grad)
    plan = plan_rows(x, target, weight, out, terms.label_smoothing != 0.0)
    launch_rows(plan, x, target, weight, total, loss, lse, masses, out, Spec(*terms[1:]))
    if grad is not None and out is not None and out is not grad:
        grad.copy_(out)


def reduced_loss(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    terms: Terms,
    dtype: torch.dtype,
    lse: Tensor | None,
    grad: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The loss as it is returned, and the totals; fills lse and grad where given."""
    if in_triton(x) and x.numel():
        return _loss_in_triton(x, target, weight, terms, dtype, lse, grad)
    dim = class_dim(x)
    total = totals(x, x.shape[dim], target, weight, terms)
    each = dtype if terms.reduction == "none" else total.dtype
    losses = torch.empty(x.shape[:dim] + x.shape[dim + 1 :], dtype=each, device=x.device)
    rows(x, target, weight, total, terms, losses, lse, None, grad)
    return added_up(losses, terms.reduction, dtype), total


def _loss_in_triton(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    terms: Terms,
    dtype: torch.dtype,
    lse: Tensor | None,
    grad: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Few rows are one launch; else programs of several rows hand on the sums of their losses."""
    from deuteron.kernels.triton.cross_entropy import Spec, launch_rows, plan_rows

    x, target, out = _with_layouts(x, target, grad)
    plan = plan_rows(x, target, weight, out, terms.label_smoothing != 0.0)
    spec, reduction, device = Spec(*terms[1:]), terms.reduction, x.device
    if plan.sums and plan.programs == 1 and reduction != "none":
        loss = torch.empty((), dtype=dtype, device=device)
        total = torch.empty(5, dtype=torch.float32, device=device)
        later = x.dtype == torch.float16
        launch_rows(
            plan, x, target, weight, total, loss, lse, None, out, spec, True, reduction, later
        )
    else:
        dim = class_dim(x)
        total = totals(x, x.shape[dim], target, weight, terms)
        summed = plan.sums and reduction != "none"
        shape = (plan.programs,) if summed else x.shape[:dim] + x.shape[dim + 1 :]
        each = dtype if reduction == "none" else torch.float32
        losses = torch.empty(shape, dtype=each, device=device)
        launch_rows(plan, x, target, weight, total, losses, lse, None, out, spec, summed)
        loss = added_up(losses, reduction, dtype)
    if grad is not None and out is not None and out is not grad:
        grad.copy_(out)
    return loss, total


def _with_layouts(
    x: Tensor, target: Tensor, grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logits, target and room for the gradient as the kernels can address them: themselves, or
    copies where rows are not at equal distances."""
    from deuteron.kernels.triton.cross_entropy import layout

    if layout(x.shape, x.stride()) is None:
        x = x.contiguous()
    if target.is_floating_point():
        places = layout(target.shape, target.stride())
        side_by_side = places is not None and places.by_class == 1
        if places is None or (x.stride(class_dim(x)) == 1 and not side_by_side):
            dim = class_dim(x)
            target = target.movedim(dim, -1).contiguous().movedim(-1, dim)
    if grad is not None and layout(grad.shape, grad.stride()) is None:
        grad = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    return x, target, grad


def _shares(
    target: Tensor, weight: Tensor | None, terms: Terms, first: int, last: int, classes: int
) -> Tensor | float:
    """q for the classes from first to last, without what integer targets add to their own."""
    even = terms.label_smoothing / classes
    q: Tensor | float = even
    if target.is_floating_point():
        q = (1.0 - terms.label_smoothing) * target[:, first:last] + even
    if weight is not None:
        q = q * weight[first:last, None]
    return q


def _owns(
    target: Tensor, weight: Tensor | None, terms: Terms, classes: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """For integer targets: which rows count, a class that exists, and its share; nan for a class
    that does not exist."""
    live = target != terms.ignore_index
    known = (target >= 0) & (target < classes)
    if not target.is_cuda and not bool((known | ~live).all()):
        bad = int(target[live & ~known][0])
        raise GraphError(
            f"class {bad} is not one of {classes}",
            asked=f"cross_entropy over {classes} classes, ignore_index={terms.ignore_index}",
            remedy=f"use classes from 0 to {classes - 1}, or {terms.ignore_index} for rows that "
            "do not count",
        )
    safe = torch.where(known, target, 0).long()
    own = torch.full(target.shape, 1.0 - terms.label_smoothing, dtype=dtype, device=target.device)
    if weight is not None:
        own = own * weight[safe]
    return live, safe, torch.where(known, own, math.nan)


def _silence(d: Tensor, live: Tensor) -> None:
    """No gradient for rows that do not count."""
    if d.is_cuda or not bool(live.all()):
        d.masked_fill_(~live[:, None], 0.0)


def _rows_in_torch(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor,
    terms: Terms,
    grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, lse and masses of a piece of logits [N, C, rest], and its gradient into ``grad``."""
    classes, probs = x.shape[1], target.is_floating_point()
    x = x.to(total.dtype)
    weight = None if weight is None else weight.to(total.dtype)
    top = x.amax(1)
    top = torch.where(top == -math.inf, 0.0, top)
    x = x - top[:, None]
    spread = probs or terms.label_smoothing != 0.0
    mass, part = torch.zeros_like(top), torch.zeros_like(top)
    if spread:
        q = _shares(target.to(x.dtype) if probs else target, weight, terms, 0, classes, classes)
        mass = mass + (q.sum(-2) if isinstance(q, Tensor) else q * classes)
        part = (x * q).sum(1)
    if not probs:
        live, safe, own = _owns(target, weight, terms, classes, x.dtype)
        mass = mass + own
        part = part + own * x.gather(1, safe[:, None])[:, 0]
    e = x.exp_()
    s = e.sum(1)
    log_sum = s.log()
    lse = top + log_sum
    loss = (mass * log_sum - part) * total[0]
    slope = mass * total[2]
    if terms.z_loss:
        loss = loss + terms.z_loss * lse * lse * total[1]
        slope = slope + 2.0 * terms.z_loss * lse * total[3]
    if grad is not None:
        direct = grad.dtype == e.dtype
        d = torch.mul(e, (slope / s)[:, None], out=grad if direct else e)
        if spread:
            d.sub_(q * total[2])
        if not probs:
            d.scatter_add_(1, safe[:, None], (-own * total[2])[:, None])
            _silence(d, live)
        if not direct:
            grad.copy_(d)
    if not probs:
        loss = torch.where(live, loss, 0.0 * total[0])
        lse, mass = lse.masked_fill(~live, 0.0), mass.masked_fill(~live, 0.0)
    return loss, lse, mass


def some_classes(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    total: Tensor,
    terms: Terms,
    lse: Tensor,
    masses: Tensor,
    up: Tensor,
    first: int,
    classes: int,
) -> None:
    """Turns logits [N, count] of the classes from ``first`` on into gradients, for an ``up`` that
    is one number or one for each row."""
    if in_triton(x):
        from deuteron.kernels.triton.cross_entropy import Spec, launch_some_classes

        spec = Spec(*terms[1:])
        launch_some_classes(x, target, weight, total, lse, masses, up, first, classes, spec)
        return
    last, probs = first + x.shape[1], target.is_floating_point()
    weight = None if weight is None else weight.to(total.dtype)
    up = up.to(total.dtype)
    slope = (masses * total[0] + 2.0 * terms.z_loss * lse * total[1]) * up
    d = (x.to(total.dtype) - lse[:, None]).exp_().mul_(slope[:, None])
    share = (up * total[0]).expand(lse.shape)
    if probs or terms.label_smoothing != 0.0:
        wanted = target.to(total.dtype)[:, :, None] if probs else target
        q = _shares(wanted, weight, terms, first, last, classes)
        d.sub_((q[..., 0] if isinstance(q, Tensor) else q) * share[:, None])
    if not probs:
        live, safe, own = _owns(target, weight, terms, classes, d.dtype)
        here = (safe >= first) & (safe < last)
        place = (safe - first).clamp(0, x.shape[1] - 1)
        d.scatter_add_(1, place[:, None], torch.where(here, -own * share, 0.0)[:, None])
        _silence(d, live)
    x.copy_(d)


def added_up(losses: Tensor, reduction: str, dtype: torch.dtype) -> Tensor:
    """The loss that is returned: the rows themselves, or their sum."""
    if reduction == "none":
        return losses
    if reduction == "mean" and not losses.numel():
        return torch.full((), math.nan, dtype=dtype, device=losses.device)
    if in_triton(losses):
        from deuteron.kernels.triton.loss_sums import launch_add_up

        return launch_add_up(losses, dtype)
    return losses.sum().to(dtype)


def scaled(grad: Tensor, up: Tensor, total: Tensor, keep: bool) -> Tensor:
    """grad · up · what is left over in ``total``: in its own memory unless ``keep``. ``up`` is one
    number, or broadcasts against the gradient."""
    if keep:
        grad = grad.clone()
    if up.dim():
        return grad.mul_(up)
    if in_triton(grad) and _dense(grad):
        from deuteron.kernels.triton.loss_sums import launch_scale

        launch_scale(grad, up, total)
        return grad
    factor = up.to(total.dtype) * total[4]
    if not grad.is_cuda and float(factor) == 1.0:
        return grad
    return grad.mul_(factor)


def _dense(x: Tensor) -> bool:
    """Whether the elements fill their memory without gaps, in whatever order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
