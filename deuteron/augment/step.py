"""The base class of a pipeline's steps, with checked arguments and a stage in the order; and the
steps that come last: Normalize, ToDtype and ToLayout."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, ClassVar

import torch

from deuteron.errors import GraphError
from deuteron.ir import dtype as element_type

Size = tuple[int, int]
Range = tuple[float, float]
Drawn = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One step of a pipeline. ``stage`` orders them: geometric steps (0), colours (1), Normalize
    (2), ToDtype (3), ToLayout (4)."""

    stage: ClassVar[int] = 0
    draws: ClassVar[int] = 1  # random numbers it takes per image

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                object.__setattr__(self, field.name, tuple(value))
        self.check()

    def check(self) -> None:
        """Raise a GraphError if an argument has no meaning."""
        p = getattr(self, "p", 0.0)
        if not (is_number(p) and 0.0 <= p <= 1.0):
            raise self.wrong(f"p={p!r} is not a probability", "use a number from 0 to 1")

    def parts(self) -> tuple[Step, ...]:
        """The simple steps that this one stands for."""
        return (self,)

    def wrong(self, what: str, remedy: str) -> GraphError:
        return GraphError(f"{type(self).__name__}: {what}", asked=repr(self), remedy=remedy)

    def interval(self, name: str, value: Any, low: float, high: float) -> None:
        fine = isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value))
        if not (fine and low <= value[0] <= value[1] <= high):
            wrong = f"{name}={value!r} is not a range between {low:g} and {high:g}"
            raise self.wrong(wrong, f"give two numbers, the lower one first: {name}=(low, high)")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def both_sides(value: Any) -> Any:
    """A single number stands for the range from −number to number."""
    return (-abs(value), abs(value)) if is_number(value) else value


def around(value: Any, centre: float) -> Any:
    """A single number stands for the range centre ± number; factors do not fall below 0."""
    if not is_number(value):
        return value
    low = centre - value
    return (max(low, 0.0) if centre else low, centre + value) if value >= 0 else value


def pick(u: torch.Tensor, bounds: Range) -> torch.Tensor:
    return bounds[0] + u * (bounds[1] - bounds[0])


# ---- the steps that come last


@dataclass(frozen=True)
class Normalize(Step):
    """(x − mean) / std for each channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    stage: ClassVar[int] = 2

    def check(self) -> None:
        lists = isinstance(self.mean, tuple) and isinstance(self.std, tuple)
        if not lists or len(self.mean) != len(self.std) or not self.mean:
            raise self.wrong("mean and std do not pair up", "give one of each per channel")
        if not all(map(is_number, (*self.mean, *self.std))) or 0 in self.std:
            raise self.wrong("mean or std is not finite, or std is 0", "give plain numbers")


@dataclass(frozen=True)
class ToDtype(Step):
    """The element type of the result, ``dtype``: floats from 0 to 1, or uint8 from 0 to 255."""

    dtype: Any
    stage: ClassVar[int] = 3

    def check(self) -> None:
        known = element_type(self.dtype)
        object.__setattr__(self, "dtype", known.short)
        if known.short not in ("u8", "f16", "bf16", "f32", "f64"):
            wrong = f"images of {known.short} are not made"
            raise self.wrong(wrong, "use uint8, float16, bfloat16, float32")


@dataclass(frozen=True)
class ToLayout(Step):
    """The memory order of the result, which stays [N, C, H, W]: ``layout`` "nhwc" or "nchw"."""

    layout: str
    stage: ClassVar[int] = 4

    def check(self) -> None:
        if self.layout not in ("nhwc", "nchw"):
            raise self.wrong(f"layout {self.layout!r} is not known", 'use "nhwc" or "nchw"')
