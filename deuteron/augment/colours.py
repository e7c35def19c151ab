"""Steps on the colour of each pixel: a kind, whose formula is in ``emit.py``, and a few numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from deuteron.augment.step import Drawn, Range, Step, around, pick

WIDTH = 3  # numbers a colour step may have


class Colour(Step):
    """A step on the colour of each pixel; ``kind`` names its formula."""

    stage: ClassVar[int] = 1
    kind: ClassVar[str] = ""
    needs_rgb: ClassVar[bool] = False

    def draw(self, u: torch.Tensor) -> Drawn:
        """The step's numbers for uniform ``u`` [images, many], in the order of the formula."""
        raise NotImplementedError


@dataclass(frozen=True)
class Brightness(Colour):
    """clamp(factor · x), the factor from 1 ± amount or from a range."""

    amount: float | Range = 0.0
    kind: ClassVar[str] = "brightness"

    def check(self) -> None:
        self.interval("amount", around(self.amount, 1.0), 0.0, 1e3)

    def draw(self, u: torch.Tensor) -> Drawn:
        return {"factor": pick(u[..., 0], around(self.amount, 1.0))}


@dataclass(frozen=True)
class Contrast(Brightness):
    """clamp(factor · x + (1 − factor) · mean of the grey image as it is at this step), the factor
    from 1 ± amount or from a range."""

    kind: ClassVar[str] = "contrast"


@dataclass(frozen=True)
class Saturation(Brightness):
    """clamp(factor · x + (1 − factor) · grey of the pixel), the factor from 1 ± amount or from a
    range."""

    kind: ClassVar[str] = "saturation"
    needs_rgb: ClassVar[bool] = True


@dataclass(frozen=True)
class Hue(Colour):
    """Turn the hue by a part of the circle, drawn from ± amount or a range within ±0.5."""

    amount: float | Range = 0.0
    kind: ClassVar[str] = "hue"
    needs_rgb: ClassVar[bool] = True

    def check(self) -> None:
        self.interval("amount", around(self.amount, 0.0), -0.5, 0.5)

    def draw(self, u: torch.Tensor) -> Drawn:
        return {"turn": pick(u[..., 0], around(self.amount, 0.0))}


@dataclass(frozen=True)
class HSVShift(Colour):
    """Turn the hue, then multiply saturation and value, each held within 0 to 1."""

    hue: float | Range = 0.0
    saturation: float | Range = 0.0
    value: float | Range = 0.0
    kind: ClassVar[str] = "hsv"
    draws: ClassVar[int] = 3
    needs_rgb: ClassVar[bool] = True

    def check(self) -> None:
        self.interval("hue", around(self.hue, 0.0), -0.5, 0.5)
        self.interval("saturation", around(self.saturation, 1.0), 0.0, 1e3)
        self.interval("value", around(self.value, 1.0), 0.0, 1e3)

    def draw(self, u: torch.Tensor) -> Drawn:
        return {
            "turn": pick(u[..., 0], around(self.hue, 0.0)),
            "saturation": pick(u[..., 1], around(self.saturation, 1.0)),
            "value": pick(u[..., 2], around(self.value, 1.0)),
        }


@dataclass(frozen=True)
class Grayscale(Colour):
    """All three channels become the pixel's grey with probability ``p``; values below 0 and above 1
    stay what they are."""

    p: float = 0.1
    kind: ClassVar[str] = "grey"
    needs_rgb: ClassVar[bool] = True

    def check(self) -> None:
        self.probability(self.p)

    def draw(self, u: torch.Tensor) -> Drawn:
        return {"factor": (u[..., 0] >= self.p).to(u.dtype)}


@dataclass(frozen=True)
class ColorJitter(Colour):
    """``brightness``, ``contrast``, ``saturation`` and ``hue``, those that are not 0, always in
    this order; each as in the step of that name."""

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0

    def check(self) -> None:
        self.parts()

    def parts(self) -> tuple[Step, ...]:
        pairs: tuple[tuple[type[Brightness] | type[Hue], float | Range], ...] = (
            (Brightness, self.brightness),
            (Contrast, self.contrast),
            (Saturation, self.saturation),
            (Hue, self.hue),
        )
        return tuple(kind(amount) for kind, amount in pairs if amount != 0)
