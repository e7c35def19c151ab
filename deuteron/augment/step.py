"""What every step of a pipeline is: arguments that are checked, and a stage in the order."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, ClassVar

import torch

from deuteron.errors import GraphError

Size = tuple[int, int]
Range = tuple[float, float]
Drawn = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """One line of a pipeline. ``stage`` orders them: places, colours, numbers, type, layout."""

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
        """The simple steps this one stands for."""
        return (self,)

    def wrong(self, what: str, remedy: str) -> GraphError:
        return GraphError(f"{type(self).__name__}: {what}", asked=repr(self), remedy=remedy)

    def interval(self, name: str, value: Any, low: float, high: float) -> None:
        fine = isinstance(value, tuple) and len(value) == 2 and all(map(is_number, value))
        if not (fine and low <= value[0] <= value[1] <= high):
            raise self.wrong(
                f"{name}={value!r} is not a range between {low:g} and {high:g}",
                f"give two numbers, the lower one first: {name}=(low, high)",
            )


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
