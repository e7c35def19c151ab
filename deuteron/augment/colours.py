"""Steps on the colour of each pixel: what each one draws, and its formula.

``formula(b, pixel, mean, *numbers)`` makes a new pixel of a pixel, which has a value per channel.
``mean`` is that of the grey image as it is at this step, for a step that ``needs_mean``;
``numbers`` are those that were drawn. Formulas are written as ``ops/formula.py`` describes: the
same lines become nodes of a graph, from which the gradient follows, and code in the GPU's kernel.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from deuteron.augment.step import Drawn, Range, Step, around, pick

WIDTH = 3  # numbers a colour step may have
GREY = (0.2989, 0.587, 0.114)  # how bright the eye finds red, green and blue

Pixel = tuple[Any, ...]


def grey(pixel: Pixel) -> Any:
    if len(pixel) == 1:
        return pixel[0]
    red, green, blue = pixel
    return red * GREY[0] + green * GREY[1] + blue * GREY[2]


def _unit(b: Any, x: Any) -> Any:
    return b.clamp(x, min=0.0, max=1.0)


def _blended(pixel: Pixel, other: Any, factor: Any) -> Pixel:
    """A blend that is the pixel at factor 1 and ``other`` at factor 0."""
    rest = (1.0 - factor) * other
    return tuple(x * factor + rest for x in pixel)


def _hue_and_range(b: Any, pixel: Pixel) -> tuple[Any, Any, Any]:
    """Hue in sixths of the circle, the largest channel, and its distance from the smallest."""
    red, green, blue = pixel
    top = b.maximum(b.maximum(red, green), blue)
    spread = top - b.minimum(b.minimum(red, green), blue)
    is_red, is_green = b.eq(top, red), b.eq(top, green)
    apart = b.where(is_red, green - blue, b.where(is_green, blue - red, red - green))
    hue = apart * (1.0 / b.maximum(spread, 1e-18))  # grey has no hue: apart is 0 there
    return b.where(is_red, hue, b.where(is_green, hue + 2.0, hue + 4.0)), top, spread


def _from_hue(b: Any, hue: Any, top: Any, spread: Any) -> Pixel:
    """A pixel of this hue. Each channel is below the largest by a trapezoid function of the hue,
    which is shifted by a third of a turn from channel to channel."""

    def channel(offset: float) -> Any:
        at = hue + offset
        at = at - b.floor(at * (1 / 6)) * 6.0
        return top - spread * _unit(b, b.minimum(at, 4.0 - at))

    return channel(5.0), channel(3.0), channel(1.0)


class Number(NamedTuple):
    """How a step draws one of its numbers: uniformly from the range that is its ``argument``, which
    must lie between ``low`` and ``high``; or the argument is one number, which stands for the range
    ``centre`` ± that number."""

    argument: str
    centre: float = 1.0
    low: float = 0.0
    high: float = 1e3


class Colour(Step):
    """A step on the colour of each pixel."""

    stage: ClassVar[int] = 1
    formula: ClassVar[Callable[..., Pixel]]
    numbers: ClassVar[dict[str, Number]] = {}
    channels: ClassVar[tuple[int, ...]] = (3,)  # how many it is defined for; (): any number
    needs_mean: ClassVar[bool] = False

    def _range(self, number: Number) -> Range:
        found: Range = around(getattr(self, number.argument), number.centre)
        return found

    def check(self) -> None:
        super().check()
        for number in self.numbers.values():
            self.interval(number.argument, self._range(number), number.low, number.high)

    def draw(self, u: torch.Tensor) -> Drawn:
        """The step's numbers for uniform ``u`` [images, many], in the order of the formula."""
        numbers = enumerate(self.numbers.items())
        return {name: pick(u[..., k], self._range(number)) for k, (name, number) in numbers}


@dataclass(frozen=True)
class Brightness(Colour):
    """clamp(factor · x), the factor drawn from 1 ± ``amount``, or from a range."""

    amount: float | Range = 0.0
    numbers: ClassVar[dict[str, Number]] = {"factor": Number("amount")}
    channels: ClassVar[tuple[int, ...]] = ()

    def formula(self, b: Any, pixel: Pixel, mean: Any, factor: Any) -> Pixel:
        return tuple(_unit(b, x * factor) for x in pixel)


@dataclass(frozen=True)
class Contrast(Brightness):
    """clamp(factor · x + (1 − factor) · mean of the grey image as it is at this step), the factor
    drawn from 1 ± ``amount``, or from a range."""

    channels: ClassVar[tuple[int, ...]] = (1, 3)
    needs_mean: ClassVar[bool] = True

    def formula(self, b: Any, pixel: Pixel, mean: Any, factor: Any) -> Pixel:
        return tuple(_unit(b, (x - mean) * factor + mean) for x in pixel)


@dataclass(frozen=True)
class Saturation(Brightness):
    """clamp(factor · x + (1 − factor) · grey of the pixel), the factor drawn from 1 ± ``amount``,
    or from a range."""

    channels: ClassVar[tuple[int, ...]] = (3,)

    def formula(self, b: Any, pixel: Pixel, mean: Any, factor: Any) -> Pixel:
        return tuple(_unit(b, x) for x in _blended(pixel, grey(pixel), factor))


@dataclass(frozen=True)
class Hue(Colour):
    """Turn the hue by a part of the circle, drawn from ± ``amount`` or a range within ±0.5."""

    amount: float | Range = 0.0
    numbers: ClassVar[dict[str, Number]] = {"turn": Number("amount", 0.0, -0.5, 0.5)}

    def formula(self, b: Any, pixel: Pixel, mean: Any, turn: Any) -> Pixel:
        hue, top, spread = _hue_and_range(b, pixel)
        return _from_hue(b, hue + turn * 6.0, top, spread)


@dataclass(frozen=True)
class HSVShift(Colour):
    """Turn the hue, then multiply saturation and value by factors and clamp both to 0…1.

    ``hue``: the turn, as in :class:`Hue`. ``saturation``, ``value``: their factors, each drawn from
    1 ± that number, or from a range.
    """

    hue: float | Range = 0.0
    saturation: float | Range = 0.0
    value: float | Range = 0.0
    draws: ClassVar[int] = 3
    numbers: ClassVar[dict[str, Number]] = {
        "turn": Number("hue", 0.0, -0.5, 0.5),
        "saturation": Number("saturation"),
        "value": Number("value"),
    }

    def formula(self, b: Any, pixel: Pixel, mean: Any, turn: Any, more: Any, light: Any) -> Pixel:
        hue, top, spread = _hue_and_range(b, pixel)
        saturation = spread * (1.0 / b.where(b.eq(top, 0.0), 1.0, top))
        value = _unit(b, top * light)
        return _from_hue(b, hue + turn * 6.0, value, _unit(b, saturation * more) * value)


@dataclass(frozen=True)
class Grayscale(Colour):
    """All three channels become the pixel's grey with probability ``p``. Values below 0 and above 1
    are not clamped."""

    p: float = 0.1

    def draw(self, u: torch.Tensor) -> Drawn:
        return {"factor": (u[..., 0] >= self.p).to(u.dtype)}

    def formula(self, b: Any, pixel: Pixel, mean: Any, factor: Any) -> Pixel:
        return _blended(pixel, grey(pixel), factor)


@dataclass(frozen=True)
class ColorJitter(Colour):
    """Change ``brightness``, ``contrast``, ``saturation`` and ``hue``, always in this order, as the
    steps of these names do; those that are 0 are left out."""

    brightness: float | Range = 0.0
    contrast: float | Range = 0.0
    saturation: float | Range = 0.0
    hue: float | Range = 0.0

    def check(self) -> None:
        self.parts()

    def parts(self) -> tuple[Step, ...]:
        kinds = (Brightness, Contrast, Saturation, Hue)
        amounts = (self.brightness, self.contrast, self.saturation, self.hue)
        return tuple(k(amount) for k, amount in zip(kinds, amounts, strict=True) if amount != 0)


COLOURS = (Brightness, Contrast, Saturation, Hue, HSVShift, Grayscale, ColorJitter)
