"""The kernels of a GPU: a recipe as the formulas that they take, and their launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from deuteron.augment.colours import WIDTH, Colour, Pixel, grey
from deuteron.augment.emit import begun, finished
from deuteron.augment.recipe import Recipe, recipe_of
from deuteron.codegen.triton_load import jitted
from deuteron.kernels.triton.augment import Colouring, Sampling, augment
from deuteron.kernels.triton.augment_grad import gather_grad
from deuteron.ops.formula import Formula, trace
from deuteron.ops.resample import cubic_weights

NOTHING = Recipe((), "bilinear", "zeros").text
RGB = ("r", "g", "b")
NUMBERS = tuple(f"number{k}" for k in range(WIDTH))
# By interpolation: how many neighbours a place has in one dimension, and their weights by how far
# it is past the whole place before it.
WEIGHTS: dict[str, tuple[int, Callable[[Any], Pixel] | None]] = {
    "nearest": (1, None),
    "bilinear": (2, lambda t: (1.0 - t, t)),
    "bicubic": (4, cubic_weights),
}


def _jitted(formula: Formula, inputs: Sequence[str], kind: torch.dtype) -> Any:
    """A formula as a function of Triton that computes in ``kind``."""
    return jitted(trace(formula, inputs, {}), False, kind == torch.float64)


@lru_cache(maxsize=256)
def sampling(recipe: str, kind: torch.dtype) -> Sampling:
    """How the recipe reads an image."""
    made = recipe_of(recipe)
    if not made.geometric:
        return Sampling()
    count, weights = WEIGHTS[made.interpolation]
    whole = (lambda b, p: b.round(p)) if count == 1 else (lambda b, p: b.floor(p))
    hat = (lambda b, d: b.maximum(1.0 - b.abs(d), 0.0)) if count == 2 else None
    return Sampling(
        whole=_jitted(whole, "p", kind),
        weights=weights and _jitted(lambda b, t: weights(t), "t", kind),
        hat=hat and _jitted(hat, "d", kind),
        neighbours=count,
        border=made.padding == "border",
        projective=made.projective,
    )


@lru_cache(maxsize=256)
def colouring(
    recipe: str, channels: int, given: torch.dtype, kind: torch.dtype, result: torch.dtype
) -> Colouring:
    """What the recipe makes of a pixel; a program that has one channel has it as the first."""
    made, own = recipe_of(recipe), 3 if channels == 3 else 1
    steps = [step for _, step in made.colours]

    def of_step(step: Colour) -> Any:
        def formula(b: Any, *values: Any) -> Pixel:
            return (*step.formula(b, values[:own], *values[3:]), *values[own:3])

        return _jitted(formula, (*RGB, "mean", *NUMBERS), kind)

    def finish(b: Any, x: Any, *normal: Any) -> Any:
        return finished(b, x, normal if made.normalize else None, result)

    return Colouring(
        begin=_jitted(lambda b, x: begun(b, x, given), "x", kind),
        steps=tuple(map(of_step, steps)),
        grey=_jitted(lambda b, *rgb: grey(rgb[:own]), RGB, kind),
        finish=_jitted(finish, ("x", "scale", "shift"), kind),
        mean_before=next((k for k, step in enumerate(steps) if step.needs_mean), -1),
    )


@lru_cache(maxsize=256)
def normal(
    recipe: str, channels: int, kind: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Scale and shift of Normalize where the kernels read them."""
    found = recipe_of(recipe).scale_and_shift(channels, kind)
    return None if found is None else found.to(device)


def forward(
    x: torch.Tensor, table: torch.Tensor, y: torch.Tensor, recipe: str, split: int | None = None
) -> int:
    """Fill ``y`` by the whole recipe; how many launches that took."""
    channels, kind = x.shape[1], table.dtype
    pixel = colouring(recipe, channels, x.dtype, kind, y.dtype)
    scale_and_shift = normal(recipe, channels, kind, x.device)
    return augment(x, table, y, scale_and_shift, sampling(recipe, kind), pixel, split)


def sampled(x: torch.Tensor, table: torch.Tensor, y: torch.Tensor, recipe: str) -> None:
    """Fill ``y`` with what the gather alone makes of floats."""
    same = colouring(NOTHING, x.shape[1], x.dtype, y.dtype, y.dtype)
    augment(x, table, y, None, sampling(recipe, y.dtype), same)


def backward(
    grad: torch.Tensor, table: torch.Tensor, dx: torch.Tensor, recipe: str, scaled: bool
) -> None:
    """Fill ``dx`` by the gradient of the gather and, where it is ``scaled``, of Normalize."""
    scale = normal(recipe, dx.shape[1], table.dtype, dx.device) if scaled else None
    gather_grad(grad, table, dx, None if scale is None else scale[0], sampling(recipe, table.dtype))
