"""Cases of cross-entropy, and whether a result for one of them is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from deuteron.functional.cross_entropy import cross_entropy
from tests.tolerances import allowed, error

# shape, kind of target, weighted, reduction, label smoothing, z loss
Case = tuple[tuple[int, ...], str, bool, str, float, float]
SHAPES = [(7,), (5, 13), (3, 6, 5), (2, 3, 5, 4)]


def cases(shape: tuple[int, ...]) -> Iterator[Case]:
    for kind, weighted, reduction, smoothing, z in itertools.product(
        ("classes", "int32", "probabilities"),
        (False, True),
        ("mean", "sum", "none"),
        (0.0, 0.1),
        (0.0, 0.05),
    ):
        yield shape, kind, weighted, reduction, smoothing, z


def inputs(
    shape: tuple[int, ...], kind: str, weighted: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Logits, target and class weights in float64; some rows are ignored."""
    dim = min(1, len(shape) - 1)
    logits = torch.randn(shape, dtype=torch.float64) * 2
    if kind == "probabilities":
        target = torch.rand(shape, dtype=torch.float64).softmax(dim)
    else:
        target = torch.randint(shape[dim], shape[:dim] + shape[dim + 1 :])
        if target.dim():
            target.view(-1)[1::4] = -100
        target = target.int() if kind == "int32" else target
    return logits, target, torch.rand(shape[dim]).double() + 0.1 if weighted else None


def reference(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, case: Case
) -> torch.Tensor:
    """The same by torch's operators, in the type of ``x``."""
    _, kind, _, reduction, smoothing, z = case
    probs = kind == "probabilities"
    target = target if probs else target.long()
    loss = F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)
    if not z:
        return loss
    lse = torch.logsumexp(x, min(1, x.dim() - 1))
    counts = torch.ones_like(lse, dtype=torch.bool) if probs else target != -100
    extra = z * torch.where(counts, lse * lse, 0.0)
    if reduction != "none":
        extra = extra.sum() / (counts.sum() if reduction == "mean" else 1)
    return loss + extra


def wrong(
    case: Case,
    dtype: torch.dtype,
    device: str = "cpu",
    ours: Callable[..., Any] = cross_entropy,
    **options: Any,
) -> str:
    """What is wrong with loss and gradient of a case in an element type, or nothing."""
    torch.manual_seed(0)
    shape, kind, weighted, reduction, smoothing, z = case
    wide = inputs(shape, kind, weighted)
    narrow = [t if t is None or not t.is_floating_point() else t.to(dtype) for t in wide]
    results = []
    for name, tensors in (("ours", narrow), ("torch", narrow), ("exact", None)):
        if tensors is None:  # what the narrow numbers say, computed in float64
            tensors = [t.double() if t is not None and t.is_floating_point() else t for t in narrow]
        x, target, weight = (None if t is None else t.to(device) for t in tensors)
        x = x.clone().requires_grad_()
        if name == "ours":
            loss = ours(
                x,
                target,
                weight,
                reduction=reduction,
                label_smoothing=smoothing,
                z_loss=z,
                **options,
            )
        else:
            loss = reference(x, target, weight, case)
        torch.manual_seed(1)
        up = torch.randn(loss.shape, dtype=torch.float64).to(dtype).to(loss)
        results.append((loss, *torch.autograd.grad(loss, x, up)))
    for what, mine, theirs, right in zip(("loss", "gradient"), *results, strict=True):
        off, bound = error(mine, right), allowed(error(theirs, right), dtype)
        if not off <= bound:
            return f"{what} of {case} in {dtype}: {off:.3g} > {bound:.3g}"
    return ""
