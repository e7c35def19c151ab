"""The steps that come last, and the names of all steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from deuteron.augment.colours import COLOURS
from deuteron.augment.places import PLACES
from deuteron.augment.step import Step, is_number
from deuteron.ir import dtype as element_type


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
            raise self.wrong(
                f"images of {known.short} are not made", "use uint8, float16, bfloat16, float32"
            )


@dataclass(frozen=True)
class ToLayout(Step):
    """The memory order of the result, which stays [N, C, H, W]: ``layout`` "nhwc" or "nchw"."""

    layout: str
    stage: ClassVar[int] = 4

    def check(self) -> None:
        if self.layout not in ("nhwc", "nchw"):
            raise self.wrong(f"layout {self.layout!r} is not known", 'use "nhwc" or "nchw"')


STEPS: dict[str, type[Step]] = {
    kind.__name__: kind for kind in (*PLACES, *COLOURS, Normalize, ToDtype, ToLayout)
}
