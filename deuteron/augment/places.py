"""Geometric steps: what each one draws, and the matrix that follows from it.

A geometric step is a 3×3 matrix that maps places of its result to places of its input, both
counted from −1 to 1 between the outer edges of the image, as in ``grid_sample`` with
``align_corners=False``. Matrices multiply, so any number of them costs one gather. All numbers are
drawn in float64 on the CPU from uniform ones that depend on nothing but seed, step and image.
"""

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch

from deuteron.augment.step import Drawn, Range, Size, Step, both_sides, is_number, pick

TRIES = 10  # boxes that RandomResizedCrop draws before it takes one in the middle


def _affine(*cells: torch.Tensor | float) -> torch.Tensor:
    """[…, 3, 3] from two rows of three; the last row is (0, 0, 1)."""
    parts = (torch.as_tensor(c, dtype=torch.float64) for c in (*cells, 0.0, 0.0, 1.0))
    flat = torch.stack(torch.broadcast_tensors(*parts), -1)
    return flat.reshape(*flat.shape[:-1], 3, 3)


def _in_pixels(matrix: torch.Tensor, size: Size) -> torch.Tensor:
    """Convert a matrix for pixels counted from the centre to one for places from −1 to 1."""
    scale = matrix.new_tensor([size[1] / 2, size[0] / 2, 1.0])
    return matrix * scale / scale[:, None]


def _sin_cos(
    degrees: torch.Tensor, times: torch.Tensor | float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.deg2rad(degrees)
    return angle.sin() * times, angle.cos() * times


class Geometric(Step):
    """A step that moves pixels. ``p`` is the probability that it happens to an image."""

    leaves_the_image: ClassVar[bool] = True  # it reads far beyond the edge: pad with zeros
    projective: ClassVar[bool] = False  # places are divided by their third coordinate
    p: float

    def draw(self, u: torch.Tensor, size: Size) -> tuple[Drawn, torch.Tensor]:
        """From uniform numbers ``u`` [images, many] and the size of the step's input, return the
        step's numbers by name, and the matrices [images, 3, 3] that map places of the result to
        places of the input."""
        raise NotImplementedError

    def result_size(self, size: Size) -> Size:
        return size


@dataclass(frozen=True)
class RandomAffine(Geometric):
    """Rotate, move, scale and shear about the centre, by torchvision's definition.

    ``degrees`` (clockwise) and ``shear`` (degrees as well) are a number, which stands for the range
    from −number to number, or a range; shear may also be four numbers, a range across and a range
    down. ``translate`` is the largest move as a part of width and height; ``scale`` is a range of
    factors. ``p``: the probability that it happens to an image.
    """

    degrees: float | Range = 0.0
    translate: Range | None = None
    scale: Range | None = None
    shear: float | Range | tuple[float, float, float, float] | None = None
    p: float = 1.0
    draws: ClassVar[int] = 7

    def check(self) -> None:
        super().check()
        self.interval("degrees", both_sides(self.degrees), -360.0, 360.0)
        move = (0.0, 0.0) if self.translate is None else self.translate
        two = isinstance(move, tuple) and len(move) == 2
        if not (two and all(is_number(t) and 0 <= t <= 1 for t in move)):
            raise self.wrong(f"translate={move!r} is not two parts of the size", "e.g. (0.1, 0.1)")
        if self.scale is not None:
            self.interval("scale", self.scale, 1e-3, 1e3)
        for bounds in self._shears():
            self.interval("shear", bounds, -89.0, 89.0)

    def _shears(self) -> tuple[Range, Range]:
        if self.shear is None:
            return (0.0, 0.0), (0.0, 0.0)
        given = both_sides(self.shear)
        if isinstance(given, tuple) and len(given) == 4:
            return given[:2], given[2:]
        return given, (0.0, 0.0)

    def draw(self, u: torch.Tensor, size: Size) -> tuple[Drawn, torch.Tensor]:
        """The matrix is the inverse of move · turn · shear down · shear across · scale.

        With t and d the tangents of the shears and (x, y) the move, multiplied out::

            1/scale · [1 + t·d, t; d, 1] · [cos, sin; −sin, cos] · [1, 0, −x; 0, 1, −y]
        """
        move, shears = self.translate or (0.0, 0.0), self._shears()
        found = {
            "angle": pick(u[..., 1], both_sides(self.degrees)),
            "translate_x": pick(u[..., 2], both_sides(move[0] * size[1])),
            "translate_y": pick(u[..., 3], both_sides(move[1] * size[0])),
            "scale": pick(u[..., 4], self.scale or (1.0, 1.0)),
            "shear_x": pick(u[..., 5], shears[0]),
            "shear_y": pick(u[..., 6], shears[1]),
        }
        angle, x, y, scale, across, down = found.values()
        sin, cos = _sin_cos(angle, 1 / scale)
        t, d = torch.deg2rad(across).tan(), torch.deg2rad(down).tan()
        both = 1 + t * d
        a, b = both * cos - t * sin, both * sin + t * cos
        c, e = d * cos - sin, d * sin + cos
        return found, _in_pixels(_affine(a, b, -(a * x + b * y), c, e, -(c * x + e * y)), size)


@dataclass(frozen=True)
class Rotate(Geometric):
    """Turn about the centre, counter-clockwise, with probability ``p``. ``degrees``: a range to
    draw from, or a number, which stands for the range from −number to number."""

    degrees: float | Range = 0.0
    p: float = 1.0
    draws: ClassVar[int] = 2

    def check(self) -> None:
        super().check()
        self.interval("degrees", both_sides(self.degrees), -360.0, 360.0)

    def draw(self, u: torch.Tensor, size: Size) -> tuple[Drawn, torch.Tensor]:
        angle = pick(u[..., 1], both_sides(self.degrees))
        sin, cos = _sin_cos(angle)
        return {"angle": angle}, _in_pixels(_affine(cos, -sin, 0.0, sin, cos, 0.0), size)


@dataclass(frozen=True)
class Perspective(Geometric):
    """Pull each corner inwards by up to ``distortion`` times half the width and height, with
    probability ``p``."""

    distortion: float = 0.5
    p: float = 0.5
    draws: ClassVar[int] = 9
    projective: ClassVar[bool] = True

    def check(self) -> None:
        super().check()
        if not (is_number(self.distortion) and 0 <= self.distortion < 1):
            wrong = f"distortion={self.distortion!r} may fold the image"
            raise self.wrong(wrong, "use a number below 1, from 0")

    def draw(self, u: torch.Tensor, size: Size) -> tuple[Drawn, torch.Tensor]:
        """The matrix is the projective map that takes the drawn corners to those of the image."""
        pulled = u[..., 1:9].reshape(*u.shape[:-1], 4, 2) * self.distortion
        to = pulled.new_tensor([[-1, -1], [1, -1], [1, 1], [-1, 1]]).expand_as(pulled)
        at = to * (1 - pulled)
        one, zero = torch.ones_like(at[..., :1]), torch.zeros_like(at)
        known = torch.cat([at, one], -1)
        first = torch.cat([known, zero, zero[..., :1], -at * to[..., :1]], -1)
        second = torch.cat([zero, zero[..., :1], known, -at * to[..., 1:]], -1)
        both = torch.cat([first, second], -2)
        found = torch.linalg.solve(both, torch.cat([to[..., 0], to[..., 1]], -1))
        matrix = torch.cat([found, one[..., 0, :]], -1).reshape(*at.shape[:-2], 3, 3)
        return {"corners": at}, matrix


@dataclass(frozen=True)
class RandomResizedCrop(Geometric):
    """Crop a box of random area and shape at a random place, and resize it to ``size``.

    ``scale`` is the range of the box's area as a part of the image's, ``ratio`` the range of width
    to height. As in torchvision, ten boxes are drawn and the first that fits is taken, or else the
    largest in the middle that has an allowed shape. The box is sampled at points, without averaging
    while it shrinks. With probability 1 − ``p`` the whole image is resized to ``size``.
    """

    size: int | Size = 224
    scale: Range = (0.08, 1.0)
    ratio: Range = (3 / 4, 4 / 3)
    p: float = 1.0
    draws: ClassVar[int] = 3 + 2 * TRIES
    leaves_the_image: ClassVar[bool] = False

    def check(self) -> None:
        super().check()
        self.interval("scale", self.scale, 1e-6, 1.0)
        self.interval("ratio", self.ratio, 1e-3, 1e3)
        both = self.size if isinstance(self.size, tuple) else (self.size,) * 2
        if len(both) != 2 or any(not isinstance(s, int) or s < 1 for s in both):
            raise self.wrong(f"size={self.size!r} is no size of an image", "e.g. 224 or (224, 320)")

    def result_size(self, size: Size) -> Size:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    def draw(self, u: torch.Tensor, size: Size) -> tuple[Drawn, torch.Tensor]:
        height, width = size
        shape = u[..., 3 : 3 + 2 * TRIES].reshape(*u.shape[:-1], TRIES, 2)
        area = pick(shape[..., 0], self.scale) * height * width
        ratio = pick(shape[..., 1], (log(self.ratio[0]), log(self.ratio[1]))).exp()
        w, h = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
        fits = (w >= 1) & (w <= width) & (h >= 1) & (h <= height)
        first = fits.to(torch.int64).argmax(-1, keepdim=True)
        # the largest box in the middle that has an allowed shape
        wide, tall = width / height > self.ratio[1], width / height < self.ratio[0]
        most_w = max(1.0, round(height * self.ratio[1])) if wide else width
        most_h = max(1.0, round(width / self.ratio[0])) if tall else height
        any_fits = fits.any(-1)
        h = torch.where(any_fits, h.gather(-1, first)[..., 0], float(most_h))
        w = torch.where(any_fits, w.gather(-1, first)[..., 0], float(most_w))
        top = torch.where(any_fits, (u[..., 1] * (height - h + 1)).floor(), (height - h) // 2)
        left = torch.where(any_fits, (u[..., 2] * (width - w + 1)).floor(), (width - w) // 2)
        x, y = (2 * left + w) / width - 1, (2 * top + h) / height - 1
        found = {"top": top, "left": left, "height": h, "width": w}
        return found, _affine(w / width, 0.0, x, 0.0, h / height, y)


@dataclass(frozen=True)
class HorizontalFlip(Geometric):
    """Left becomes right with probability ``p``."""

    p: float = 0.5
    leaves_the_image: ClassVar[bool] = False
    signs: ClassVar[Range] = (-1.0, 1.0)

    def draw(self, u: torch.Tensor, size: Size) -> tuple[Drawn, torch.Tensor]:
        return {}, _affine(self.signs[0], 0.0, 0.0, 0.0, self.signs[1], 0.0)


@dataclass(frozen=True)
class VerticalFlip(HorizontalFlip):
    """Top becomes bottom with probability ``p``."""

    signs: ClassVar[Range] = (1.0, -1.0)


PLACES = (RandomAffine, Rotate, Perspective, RandomResizedCrop, HorizontalFlip, VerticalFlip)
