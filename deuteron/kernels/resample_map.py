"""Which elements of an axis each element of a result reads, and with which weights.

    y[i] = Σ_k weights[k, i] · x[first[i] + k] / divisors[i],  k < count[i]

Resizing by any rule and averaging are such maps, one along each axis, and so are their gradients,
which read the other way round. Places and weights are found as torch finds them on a GPU, in
float32, and in float64 for float64; nearest elements always in float32.

Weights of reads that fall on one element, as at the border of an image, are added up here. So an
infinite element there stays infinite where torch makes nan of ∞ − ∞.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from deuteron.ops.resample import cubic_far, cubic_near, cubic_weights

Tensor = torch.Tensor
Window = tuple[int, int, int]  # kernel, stride and padding
Scale = float | None  # the factor by which an axis is resized, if one was given


@dataclass(frozen=True, eq=False)
class AxisMap:
    """``length`` elements are read. Weights [most, n] and divisors [n] are left out where they
    are all 1."""

    length: int
    first: Tensor
    count: Tensor
    weights: Tensor | None = None
    divisors: Tensor | None = None

    @property
    def results(self) -> int:
        return self.first.numel()

    @cached_property
    def most(self) -> int:
        return max(int(self.count.max()), 1)

    @cached_property
    def has_gaps(self) -> bool:
        """Whether elements between those that two results read are skipped."""
        return bool((self.first[1:] > self.first[:-1] + self.most).any())

    @cached_property
    def is_ragged(self) -> bool:
        """Whether somebody reads fewer than most though there would be more."""
        room = (self.length - self.first).clamp(max=self.most)
        return bool((self.count < room).any())

    @cached_property
    def transposed(self) -> AxisMap:
        """Who reads each element, and with which weight: the map of the gradient. What results read
        never goes back along the axis, so an element's readers stand next to each other."""
        return self._trimmed()._turned()

    def _trimmed(self) -> AxisMap:
        """Without last reads of weight 0, as an upsampled image has one at its border."""
        if self.weights is None:
            return self
        lasting = (self.weights != 0).int() * torch.arange(1, self.most + 1)[:, None]
        count = lasting.amax(0).clamp(min=1).minimum(self.count).int()
        if ((self.first + count).diff() < 0).any():
            return self
        return AxisMap(self.length, self.first, count, self.weights[: int(count.max())])

    def _turned(self) -> AxisMap:
        each = torch.arange(self.length)
        first = torch.searchsorted(self.first + self.count, each, right=True)
        count = torch.searchsorted(self.first.contiguous(), each, right=True) - first
        found = AxisMap(self.results, first.int(), count.clamp(min=0).int())
        given = self.weights
        if self.divisors is not None:
            given = (1.0 / self.divisors).expand(self.most, -1)
        if given is None:
            return found
        step = torch.arange(self.most)[:, None].expand_as(given)
        reader = torch.arange(self.results).expand_as(given)
        element = (self.first + step).clamp(max=self.length - 1).long()
        there = step < self.count
        weights = given.new_zeros(found.most, self.length)
        weights[(reader - first[element])[there], element[there]] = given[there]
        return AxisMap(self.results, found.first, found.count, weights)


def _real(double: bool) -> torch.dtype:
    return torch.float64 if double else torch.float32


@lru_cache(256)
def untouched(length: int) -> AxisMap:
    """Every element is itself."""
    return AxisMap(length, torch.arange(length).int(), torch.ones(length).int())


# ---- means ---------------------------------------------------------------------------------------


@lru_cache(256)
def cells(length: int, size: int, double: bool) -> AxisMap:
    """Means over ``size`` cells that cover the axis, and overlap where they do not divide it."""
    i = torch.arange(size)
    first = i * length // size
    count = -(-(i + 1) * length // size) - first
    return AxisMap(length, first.int(), count.int(), None, count.to(_real(double)))


@lru_cache(256)
def windows(
    length: int, size: int, window: Window, padding_counts: bool, divisor: int | None, double: bool
) -> AxisMap:
    """Means over windows; ``divisor`` stands for the count."""
    kernel, stride, padding = window
    start = torch.arange(size) * stride - padding
    end = (start + kernel).clamp(max=length + padding)
    first, last = start.clamp(min=0, max=length), end.clamp(max=length)
    count = (last - first).clamp(min=0)
    by = end - start if padding_counts else count.clamp(min=1)
    if divisor is not None:
        by = torch.full_like(by, divisor)
    return AxisMap(length, first.int(), count.int(), None, by.to(_real(double)))


# ---- resizing ------------------------------------------------------------------------------------


@lru_cache(256)
def resized(
    mode: str, length: int, size: int, corners: bool, smooth: bool, scale: Scale, double: bool
) -> AxisMap:
    """An axis at another size, ``smooth`` where it is antialiased."""
    if length == size:
        return untouched(length)
    if mode == "area":
        return cells(length, size, double)
    if mode in ("nearest", "nearest-exact"):
        return _nearest(length, size, scale, 0.5 if mode == "nearest-exact" else 0.0)
    step = _step(length, size, corners, scale, double)
    if smooth:
        return _smoothed(length, size, step, *_FILTERS[mode])
    place = torch.arange(size, dtype=step.dtype)
    source = step * place if corners else step * (place + 0.5) - 0.5
    if mode == "bicubic":
        whole = source.floor()
        return _clamped(length, whole.int() - 1, torch.stack(cubic_weights(source - whole)))
    source = source.clamp(min=0, max=length - 1 + 0.5)
    whole = source.floor().clamp(max=length - 1)
    part = source - whole
    return _clamped(length, whole.int(), torch.stack((1 - part, part)))


def _step(length: int, size: int, corners: bool, scale: Scale, double: bool) -> Tensor:
    """How far apart the places of two results are in what is read."""
    kind = _real(double)
    if corners:
        return torch.tensor(length - 1 if size > 1 else 0, dtype=kind) / max(size - 1, 1)
    if scale is not None:
        return torch.tensor(1.0 / scale, dtype=kind)
    return torch.tensor(length, dtype=kind) / size


def _nearest(length: int, size: int, scale: Scale, half: float) -> AxisMap:
    place = torch.arange(size, dtype=torch.float32) + half
    source = (place * _step(length, size, False, scale, False)).floor()
    first = source.clamp(max=length - 1).int()
    return AxisMap(length, first, torch.ones_like(first))


def _clamped(length: int, first: Tensor, weights: Tensor) -> AxisMap:
    """What lies outside is read at the border, to whose weight its own is added."""
    wanted = first + torch.arange(len(weights))[:, None]
    begin = first.clamp(min=0, max=length - 1)
    count = (first + len(weights)).clamp(max=length) - begin
    total = torch.zeros_like(weights)
    total.scatter_add_(0, (wanted.clamp(0, length - 1) - begin).long(), weights)
    most = int(count.max())
    return AxisMap(length, begin.int(), count.int(), total[:most].contiguous())


def _soft_cubic(x: Tensor) -> Tensor:
    far = torch.where(x < 2, cubic_far(x, -0.5), torch.zeros_like(x))
    return torch.where(x < 1, cubic_near(x, -0.5), far)


Filter = Callable[[Tensor], Tensor]
# by mode the function of the distance, and how far it reaches
_FILTERS: dict[str, tuple[Filter, float]] = {
    "bilinear": (lambda x: (1 - x).clamp(min=0), 1.0),
    "bicubic": (_soft_cubic, 2.0),
}


def _smoothed(length: int, size: int, step: Tensor, shape: Filter, reach: float) -> AxisMap:
    """A filter as wide as the step between results, so that none of what is read is skipped."""
    wide = step.clamp(min=1.0)
    middle = step * (torch.arange(size, dtype=step.dtype) + 0.5)
    first = (middle - reach * wide + 0.5).int().clamp(min=0)
    count = (middle + reach * wide + 0.5).int().clamp(max=length) - first
    read = torch.arange(int(count.max()))[:, None]
    away = (read + (first - middle) + 0.5) * (1.0 / wide)
    weights = torch.where(read < count, shape(away.abs()), torch.zeros_like(away))
    total = weights.sum(0)
    return AxisMap(length, first, count, weights / torch.where(total == 0, 1.0, total))
