"""Pipelines on a GPU: turns a spec into the formulas that the kernels take, and launches them."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from deuteron.augment.colours import WIDTH, Colour, Pixel, grey
from deuteron.augment.emit import begun, finished
from deuteron.augment.spec import Spec, spec_of
from deuteron.codegen.triton_load import jitted
from deuteron.kernels.triton.augment import Colouring, Sampling, augment
from deuteron.kernels.triton.augment_grad import gather_grad
from deuteron.ops.formula import Formula, trace
from deuteron.ops.resample import cubic_weights

NOTHING = Spec((), "bilinear", "zeros").text
RGB = ("r", "g", "b")
NUMBERS = tuple(f"number{k}" for k in range(WIDTH))
# By interpolation: how many neighbouring pixels are read in one dimension, and the function that
# gives their weights from how far the place is past the pixel before it.
WEIGHTS: dict[str, tuple[int, Callable[[Any], Pixel] | None]] = {
    "nearest": (1, None),
    "bilinear": (2, lambda t: (1.0 - t, t)),
    "bicubic": (4, cubic_weights),
}


Code = tuple[Sampling, Colouring, Tensor | None]
Kind = torch.dtype


@lru_cache(maxsize=256)
def _code(spec: str, channels: int, given: Kind, kind: Kind, result: Kind, device: Any) -> Code:
    """Return how the spec samples an image, what it does to a pixel, and Normalize's scale and
    shift. The kernel's formulas always take three channels; a program that computes one channel
    passes it as the first."""
    made, own = spec_of(spec), 3 if channels == 3 else 1
    steps = [step for _, step in made.colours]

    def function(formula: Formula, *inputs: str) -> Any:
        return jitted(trace(formula, inputs, {}), False, wide=kind == torch.float64)

    def of_step(step: Colour) -> Any:
        def formula(b: Any, *values: Any) -> Pixel:
            return (*step.formula(b, values[:own], *values[3 : 4 + step.draws]), *values[own:3])

        return function(formula, *RGB, "mean", *NUMBERS)

    def finish(b: Any, x: Any, *normal: Any) -> Any:
        return finished(b, x, normal if made.normalize else None, result)

    colouring = Colouring(
        begin=function(lambda b, x: begun(b, x, given), "x"),
        steps=tuple(map(of_step, steps)),
        grey=function(lambda b, *rgb: grey(rgb[:own]), *RGB),
        finish=function(finish, "x", "scale", "shift"),
        mean_before=next((k for k, step in enumerate(steps) if step.needs_mean), -1),
    )
    normal = made.scale_and_shift(channels, kind)
    normal = None if normal is None else normal.to(device)
    if not made.geometric:
        return Sampling(), colouring, normal
    count, weights = WEIGHTS[made.interpolation]
    hat = (lambda b, d: b.maximum(1.0 - b.abs(d), 0.0)) if count == 2 else None
    sampling = Sampling(
        whole=function(lambda b, p: b.round(p) if count == 1 else b.floor(p), "p"),
        weights=weights and function(lambda b, t: weights(t), "t"),
        hat=hat and function(hat, "d"),
        neighbours=count,
        border=made.padding == "border",
        projective=made.projective,
    )
    return sampling, colouring, normal


def _code_for(x: Tensor, kind: torch.dtype, result: torch.dtype, spec: str) -> Code:
    """The formulas for images like ``x``, computing in ``kind``."""
    return _code(spec, x.shape[1], x.dtype, kind, result, x.device)


def forward(x: Tensor, table: Tensor, y: Tensor, spec: str, split: int | None = None) -> int:
    """Fill ``y`` by the whole spec; return how many launches that took."""
    return augment(x, table, y, *_code_for(x, table.dtype, y.dtype, spec), split)


def sampled(x: Tensor, table: Tensor, y: Tensor, spec: str) -> None:
    """Fill ``y``, which is floats, with the result of the gather alone."""
    sampling, _, _ = _code_for(x, y.dtype, y.dtype, spec)
    _, same, _ = _code_for(x, y.dtype, y.dtype, NOTHING)
    augment(x, table, y, sampling, same, None)


def backward(grad: Tensor, table: Tensor, dx: Tensor, spec: str, scaled: bool) -> None:
    """Fill ``dx`` by the gradient of the gather and, where it is ``scaled``, of Normalize."""
    sampling, _, normal = _code_for(dx, table.dtype, grad.dtype, spec)
    gather_grad(grad, table, dx, normal[0] if scaled and normal is not None else None, sampling)
