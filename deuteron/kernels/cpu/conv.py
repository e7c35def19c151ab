"""y[n, o, k] = act(Σ x[n, o·stride − padding + t·dilation, c] · w[k, c, t] + b[k] + r[n, o, k])

for images with channels innermost, as the product of :mod:`deuteron.kernels.cpu.matmul` over a
table of pixels: row (n, o) has a run of channels for every tap t. Nothing is copied:

    bytes = 4 · (x · (taps that meet in L2: once) + w + y · (1 + residual))

With few channels a run is too short to multiply well (a 7×7 over 3 channels has runs of 3). Then
``padded``: x is copied once into a frame of zeros, and the taps of a row lie side by side, one
run of 7 · 3. The copy costs 8 bytes per element of x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from deuteron.kernels.cpu.epilogue import Epilogue
from deuteron.kernels.cpu.matmul import Rows, Tile, prepare, row_offsets

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


def frame(x: Image, window: Window) -> Image:
    """``x`` with its padding around it, dense."""
    space = tuple(n + 2 * p for n, p in zip(x.shape[2:], window.padding, strict=True))
    channels = x.shape[1]
    strides = [channels * prod(space[i + 1 :]) for i in range(len(space))]
    return Image((x.shape[0], channels, *space), (channels * prod(space), 1, *strides))


def joins(x: Image, window: Window) -> bool:
    """Whether the taps along the last dimension lie side by side in memory."""
    side_by_side = x.strides[-1] == x.shape[1] and window.groups == 1
    return side_by_side and window.padding[-1] == 0 and window.dilation[-1] == 1


def pixel_offsets(x: Image, window: Window, out: Sequence[int], joined: bool) -> np.ndarray:
    """Offsets [rows, taps] of the pixel under each tap, −1 in the padding. With ``joined`` the
    last dimension counts as one tap."""
    dims = len(out)
    kernel = (*window.kernel[:-1], 1) if joined else window.kernel
    where = (np.arange(x.shape[0], dtype=np.int64) * x.strides[0]).reshape(-1, *[1] * (2 * dims))
    inside = np.ones((1,) * (2 * dims + 1), bool)
    for d in range(dims):
        at = (
            np.arange(out[d], dtype=np.int64)[:, None] * window.stride[d]
            - window.padding[d]
            + np.arange(kernel[d], dtype=np.int64) * window.dilation[d]
        )
        view = [1] * (2 * dims + 1)
        view[1 + d], view[1 + dims + d] = at.shape
        where = where + (at * x.strides[2 + d]).reshape(view)
        inside = inside & ((at >= 0) & (at < x.shape[2 + d])).reshape(view)
    return np.where(inside, where, -1).reshape(x.shape[0] * prod(out), prod(kernel))


def framed(x: torch.Tensor, padding: Ints) -> torch.Tensor:
    """A padded copy of an image, channels innermost."""
    sides = [side for p in reversed(padding) for side in (p, p)]
    pixels = x.permute(0, *range(2, x.ndim), 1)
    return torch.nn.functional.pad(pixels, [0, 0, *sides]).contiguous()


def prepare_conv(
    x: Image,
    y: Image,
    r: Image | None,
    window: Window,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epilogue: Epilogue,
    tile: Tile,
    by_columns: bool,
    padded: bool = False,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """``run(x, y, residual)`` for a weight [K, C / groups, …]."""
    padding = window.padding
    if padded:
        x = frame(x, window)
        window = Window(window.kernel, window.stride, (0,) * len(padding), window.dilation,
                        window.groups)  # fmt: skip
    joined = joins(x, window)
    groups, each = window.groups, weight.shape[1]
    offsets = pixel_offsets(x, window, y.shape[2:], joined)
    length = each * (window.kernel[-1] if joined else 1)
    rows = Rows(offsets, y.rows, None if r is None else r.rows, length, each,
                weight.shape[0] // groups)  # fmt: skip
    # [K, C, taps] → [groups, K / groups, taps · C]
    taps = weight.reshape(weight.shape[0], each, -1).transpose(1, 2)
    matrix = taps.reshape(groups, weight.shape[0] // groups, -1)
    run = prepare(rows, matrix, bias, epilogue, tile, by_columns)
    if padded:

        def with_frame(t: torch.Tensor, out: torch.Tensor, residual: torch.Tensor) -> None:
            copy = framed(t, padding)
            run(copy.data_ptr(), out.data_ptr(), residual.data_ptr())

        return with_frame
    return lambda t, out, residual: run(t.data_ptr(), out.data_ptr(), residual.data_ptr())
