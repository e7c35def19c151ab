"""The kernels of cross-entropy in Triton's interpreter, in a process of its own:
``python -m tests.loss_interpreter group`` prints the failures of a group."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from deuteron.functional import delegation, linear_loss, loss, loss_rows
from tests import triton_interpreter
from tests.loss_cases import Case, cases, wrong
from tests.tolerances import EPS, allowed, error

TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def rows_cases() -> Iterator[tuple[Case, dict]]:
    """Short rows, images, and long rows in both sizes of tile; some in place."""
    for shape in ((5, 13), (3, 6, 5), (7,)):
        for i, case in enumerate(cases(shape)):
            if i % 5 == 0:
                yield case, {"inplace_backward": i % 2 == 1}
    for columns in (4099, 33001):
        for kind, weighted, smoothing in (
            ("classes", False, 0.0),
            ("int32", True, 0.1),
            ("probabilities", True, 0.1),
        ):
            yield ((3, columns), kind, weighted, "mean", smoothing, 0.01), {}
    for shape in ((2, 300, 5), (1, 3, 33001)):  # classes in pieces; sums in parts
        yield (shape, "int32", True, "mean", 0.1, 0.01), {"inplace_backward": True}
    yield ((2, 21, 300), "probabilities", False, "mean", 0.0, 0.0), {}
    aligned = (4, 33008)  # rows that start at multiples of 16
    yield (aligned, "classes", False, "none", 0.0, 0.0), {"inplace_backward": True}


def failures(group: str) -> Iterator[str]:
    dtype = TYPES[group]
    for case, options in rows_cases():
        yield wrong(case, dtype, **options)
    yield from views(dtype)


def views(dtype: torch.dtype) -> Iterator[str]:
    """Logits that are views, in place; classes that do not exist; nothing that counts."""
    for x in (
        torch.randn(6, 40).to(dtype)[::2, 3:20],
        torch.randn(3, 4, 17).to(dtype).transpose(1, 2),
        torch.randn(2, 4, 5, 7).to(dtype).permute(0, 3, 2, 1),
    ):
        y = torch.randint(x.shape[1], (x.shape[0], *x.shape[2:]))
        exact = x.double().requires_grad_()
        (want,) = torch.autograd.grad(F.cross_entropy(exact, y), exact)
        mine = x.detach().requires_grad_()
        (got,) = torch.autograd.grad(loss.cross_entropy(mine, y, inplace_backward=True), mine)
        off = error(got, want)
        yield "" if off <= 4 * EPS[dtype] and got.data_ptr() == x.data_ptr() else f"view: {off}"
    for columns in (9, 5000):
        x = torch.randn(4, columns).to(dtype).requires_grad_()
        y = torch.tensor([1, columns, -1, -100])
        found = loss.cross_entropy(x, y, reduction="none")
        (grad,) = torch.autograd.grad(found.sum(), x)
        rows = [bool(grad[i].isnan().all()) for i in range(4)]
        right = found.isnan().tolist() == [False, True, True, False] == rows
        yield "" if right and not grad[3].any() else f"classes that do not exist: {found} {rows}"
        nothing = loss.cross_entropy(x, torch.full((4,), -100))
        (grad,) = torch.autograd.grad(nothing, x)
        yield "" if nothing.isnan() and not grad.any() else f"nothing counts: {nothing}"
    yield from strange(dtype)


def strange(dtype: torch.dtype) -> Iterator[str]:
    nan, inf = float("nan"), float("inf")
    for columns in (4, 5000):
        x = torch.randn(6, columns).to(dtype)
        x[0, 1], x[1, 1], x[2, 0], x[3, 2] = nan, inf, -inf, -inf
        x[4] = -inf
        y = torch.tensor([1, 1, 1, 2, 0, 3])
        for smoothing in (0.0, 0.1):
            got = loss.cross_entropy(x, y, reduction="none", label_smoothing=smoothing)
            exact = x.double()
            want = F.cross_entropy(exact, y, reduction="none", label_smoothing=smoothing)
            off = error(got, want)
            yield "" if off <= 4 * EPS[dtype] else f"nan and inf: {off} {got} {want}"


def slices() -> Iterator[str]:
    """Linear + cross-entropy, whose backward pass sees a slice of the classes at a time."""
    for dtype in TYPES.values():
        for reduction, smoothing, probs in (
            ("mean", 0.0, False),
            ("sum", 0.1, False),
            ("none", 0.1, True),
            ("mean", 0.0, True),
        ):
            torch.manual_seed(0)
            h = torch.randn(7, 8).to(dtype).requires_grad_()
            w = torch.randn(21, 8).to(dtype).requires_grad_()
            b = torch.randn(21).to(dtype).requires_grad_()
            y = torch.rand(7, 21).to(dtype).softmax(1) if probs else torch.randint(21, (7,))
            if not probs:
                y[2] = -100
            share = torch.rand(21).to(dtype)
            options = {"reduction": reduction, "label_smoothing": smoothing}
            results = []
            for name in ("ours", "torch", "exact"):
                given = [h, w, b, share, y]
                if name == "exact":
                    given = [t.detach().double() if t.is_floating_point() else t for t in given]
                    for t in given[:3]:
                        t.requires_grad_()
                p, q, r, s, t = given
                if name == "ours":
                    found = linear_loss.linear_cross_entropy(
                        p, q, t, r, class_weight=s, chunk=3, **options
                    )
                else:
                    found = F.cross_entropy(F.linear(p, q, r), t, s, **options)
                up = torch.linspace(0.5, 2, max(found.numel(), 1)).to(found).view(found.shape)
                results.append((found, *torch.autograd.grad(found, (p, q, r), up)))
            for what, mine, theirs, right in zip(("loss", "h", "w", "b"), *results, strict=True):
                off, bound = error(mine, right), allowed(error(theirs, right), dtype)
                yield "" if off <= bound else f"{what} {dtype} {options} {probs}: {off} > {bound}"


def main() -> None:
    warnings.simplefilter("ignore")
    np.seterr(all="ignore")
    triton_interpreter.install()
    loss_rows.in_triton = lambda x: x.dtype != torch.float64
    delegation(False)  # small losses would be torch's
    group = sys.argv[1]
    found = list(slices() if group == "slices" else failures(group))
    print(json.dumps({"count": len(found), "failed": [text for text in found if text]}))


if __name__ == "__main__":
    main()
