"""y[n, o, k] = act(Σ x[n, o·stride − padding + t·dilation, c] · w[k, c, t] + b[k] + r[n, o, k])

for images with channels innermost, as the product of :mod:`deuteron.kernels.cpu.matmul` over a
table of pixels: row (n, o) has a run of channels for every tap t. Nothing is copied:

    bytes = size · (x · (taps that meet in L2: once) + y · (1 + residual)) + 4 · w

With few channels a run is too short to multiply well (a 7×7 over 3 channels has runs of 3). Then
x is copied once into a frame of zeros (:mod:`deuteron.kernels.cpu.frame`), and the taps of a row
lie side by side, one run of 7 · 3.

Far dilation: taps that are in the padding for all rows of a tile are skipped by the product, so
a 3×3 window of dilation 24 over 64×64 pixels costs 56 % of its multiplications, dilation 36 39 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch

from deuteron.kernels.cpu.matmul import Rows, row_offsets
from deuteron.kernels.cpu.packing import Factor

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Window:
    """A convolution's geometry; every tuple has one entry per spatial dimension."""

    kernel: Ints
    stride: Ints
    padding: Ints
    dilation: Ints
    groups: int = 1


@dataclass(frozen=True)
class Image:
    """An image tensor [N, C, …]: shape and strides in elements; channels have stride 1."""

    shape: Ints
    strides: Ints

    @property
    def rows(self) -> np.ndarray:
        """Offsets of all pixels."""
        return row_offsets((self.shape[0], *self.shape[2:]), (self.strides[0], *self.strides[2:]))


Images = tuple[Image, Image, Image | None]  # input, result and residual


def frame(x: Image, window: Window) -> Image:
    """``x`` with its padding around it, dense."""
    space = tuple(n + 2 * p for n, p in zip(x.shape[2:], window.padding, strict=True))
    channels = x.shape[1]
    strides = [channels * prod(space[i + 1 :]) for i in range(len(space))]
    return Image((x.shape[0], channels, *space), (channels * prod(space), 1, *strides))


def pixel_offsets(x: Image, window: Window, out: Sequence[int], joined: bool) -> np.ndarray:
    """Offsets [rows, taps] of the pixel under each tap, −1 in the padding. With ``joined`` the
    last dimension counts as one tap."""
    dims = len(out)
    kernel = (*window.kernel[:-1], 1) if joined else window.kernel
    where = (np.arange(x.shape[0], dtype=np.int64) * x.strides[0]).reshape(-1, *[1] * (2 * dims))
    inside = np.ones((1,) * (2 * dims + 1), bool)
    for d in range(dims):
        first = np.arange(out[d], dtype=np.int64)[:, None] * window.stride[d] - window.padding[d]
        at = first + np.arange(kernel[d], dtype=np.int64) * window.dilation[d]
        view = [1] * (2 * dims + 1)
        view[1 + d], view[1 + dims + d] = at.shape
        where = where + (at * x.strides[2 + d]).reshape(view)
        inside = inside & ((at >= 0) & (at < x.shape[2 + d])).reshape(view)
    return np.where(inside, where, -1).reshape(x.shape[0] * prod(out), prod(kernel))


def weight_now(weight: torch.Tensor, groups: int) -> torch.Tensor:
    """A weight [K, C / groups, …] as matrices [groups, K / groups, taps · C]."""
    taps = weight.reshape(*weight.shape[:2], -1).transpose(1, 2)
    return taps.reshape(groups, weight.shape[0] // groups, -1)


def weight_factor(weight: Image, groups: int) -> Factor:
    """Where such a weight lies that arrives with every call."""
    columns = weight.shape[0] // groups
    taps = row_offsets(weight.shape[2:], weight.strides[2:])
    places = taps + np.arange(weight.shape[1], dtype=np.int64) * weight.strides[1]
    starts = np.arange(groups, dtype=np.int64) * columns * weight.strides[0]
    return Factor(starts, places.reshape(-1), weight.strides[0], columns)


def conv_rows(x: Image, y: Image, r: Image | None, window: Window, k: int) -> Rows:
    """The rows of a convolution with ``k`` filters, as a product. A window without padding over
    a dense image takes the taps along the last dimension as one run."""
    groups = window.groups
    dense = x.strides[-1] == x.shape[1] and groups == 1
    joined = dense and window.padding[-1] == 0 and window.dilation[-1] == 1
    each, columns = x.shape[1] // groups, k // groups
    offsets = pixel_offsets(x, window, y.shape[2:], joined)
    number = np.arange(groups, dtype=np.int64)
    starts = np.stack([number * each, number, number * columns, number * columns], 1)
    length = each * (window.kernel[-1] if joined else 1)
    return Rows(offsets, y.rows, None if r is None else r.rows, length, starts)


def without_padding(window: Window) -> Window:
    """The window as it looks at a framed image."""
    return replace(window, padding=(0,) * len(window.padding))
