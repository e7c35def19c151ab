"""dw[k, c, t] = Σ dy[n, o, k] · x[n, o·stride − padding + t·dilation, c]

for images with channels innermost: a sum of outer products over all windows (n, o), by the kernel
of :mod:`deuteron.kernels.cpu.matmul`. dy is packed in panels of rows k, and x, with its padding
around it, in panels of columns c; a tap t is a shift along the panels of x, so all taps share them:

    bytes = (size + 4) · (dy + frame) + size · w, and both panels from L2 for every tap

For the gradient of a transposed convolution x and dy change places: its windows lie in the result.
"""

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from deuteron.kernels.cpu.conv import Image, Window, pixel_offsets
from deuteron.kernels.cpu.packing import Factor
from deuteron.kernels.cpu.product_rows import OuterRows, row_offsets


@dataclass(frozen=True)
class FilterGrad:
    """The gradient of a weight [K, C, …] as a sum of outer products: where the pixels lie that have
    a window [N, K, …], and the pixels under the windows [N, C, …], both as factors to be packed;
    and where runs of both begin."""

    windows: Factor
    pixels: Factor
    rows: OuterRows


def prepare(y: Image, x: Image, dw: Image, window: Window, wide: int, high: int) -> FilterGrad:
    """Return the gradient for panels of ``wide`` columns of C, and of ``high`` rows of K."""
    dims, groups, taps = range(len(window.kernel)), window.groups, prod(window.kernel)
    k, each = y.shape[1] // groups, x.shape[1] // groups
    space, number = y.shape[2:], np.arange(groups, dtype=np.int64)
    if taps == 1:  # the pixels under the windows alone, in one run
        pixels = pixel_offsets(x, window, space, joined=False).reshape(-1)
        begins, length, step, shifts = np.zeros((2, 1), np.int64), len(pixels), 1, np.zeros(1)
    else:
        spans = [(space[d] - 1) * window.stride[d] for d in dims]
        taps_at = [np.arange(window.kernel[d]) * window.dilation[d] for d in dims]
        frame = tuple(spans[d] + int(taps_at[d][-1]) + 1 for d in dims)
        ones = (1,) * len(dims)
        every = replace(window, kernel=ones, stride=ones, dilation=ones)
        pixels = pixel_offsets(x, every, frame, joined=False).reshape(-1)
        steps = [prod(frame[d + 1 :]) for d in dims]
        shifts = row_offsets((), ())[0, :1]
        for d in dims:
            shifts = np.add.outer(shifts, taps_at[d] * steps[d]).reshape(-1)
        images = (y.shape[0], *space[:-1])
        along = tuple(window.stride[d] * steps[d] for d in dims[:-1])
        length, step = space[-1], window.stride[-1]
        runs = row_offsets(images, (prod(frame), *along)).reshape(-1)
        begins = np.stack([np.arange(len(runs)) * length, runs])
    begins = begins * np.array([[high], [wide]])
    windows = Factor(number * k, y.rows.reshape(-1), 1, k)
    under = Factor(number * each, pixels, 1, each)
    pitch = len(windows.places) * high, len(pixels) * wide
    firsts = -(-k // high) * pitch[0], -(-each // wide) * pitch[1]
    to = row_offsets(dw.shape[2:], dw.strides[2:]).reshape(-1)
    starts = [
        np.repeat(number * firsts[0], taps),
        np.add.outer(number * firsts[1], shifts * wide).reshape(-1),
        np.add.outer(number * k * dw.strides[0], to).reshape(-1),
        np.zeros(groups * taps),
    ]
    offsets = row_offsets((k,), (dw.strides[0],))
    table = np.stack(starts, 1).astype(np.int64)
    return FilterGrad(
        windows, under, OuterRows(begins, offsets, None, length, pitch, (high, step * wide), table)
    )
