"""The signs of relu's result y, kept as bits: all that its gradient needs of y.

A bit is set where the gradient passes, that is where y, rounded as it is stored, is above 0 or nan.
Eight bits make a byte, the first in its lowest bit, along the dimension whose elements are adjacent
in memory, so that one thread of a kernel has a byte to itself:

    packed="channels"     [N, …, ⌈C / 8⌉]      channels last: the channels of a position
    packed="positions"    [N, C, ⌈P / 8⌉]      channels first: the P positions of a channel

In 16 bits per element that is a sixteenth of y, and the gradient reads it instead of y.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from deuteron.ir.types import Shape, TensorType
from deuteron.ops.formula import TENSORS

PACKED = ("none", "channels", "positions")
FEWEST = 8  # adjacent elements that packing needs: fewer would leave most of their byte empty
WORTH = 4 << 20  # bytes of y from which packing pays: less takes a microsecond, or is in the cache


def is_channels_last(image: TensorType) -> bool:
    """Whether the channels of one position lie side by side."""
    if image.numel == image.shape[0] * image.shape[1]:
        return True  # one position: a matrix
    return image.shape[1] > 1 and image.is_layout("nhwc")


def side_by_side(y: TensorType) -> str:
    """Along what ("channels" or "positions") eight elements of ``y`` are adjacent, or "none"."""
    last = is_channels_last(y)
    lanes = y.shape[1] if last else prod(y.shape[2:])
    return "none" if lanes < FEWEST else "channels" if last else "positions"


def packing(y: TensorType) -> str:
    """How the signs of ``y`` are best kept on a GPU, or "none" where that is not worth it."""
    known = y.rank > 1 and y.dtype.short in ("f16", "bf16", "f32")
    return side_by_side(y) if known and y.nbytes >= WORTH else "none"


def signs_type(shape: Shape, packed: str) -> TensorType:
    """The type of the signs of a tensor of this shape."""
    *front, lanes = _rows(shape, packed)
    return TensorType.of((*front, -(-lanes // 8)), "u8")


def _rows(shape: Shape, packed: str) -> Shape:
    """The shape with the packed dimension last."""
    n, channels, *sizes = shape
    return (n, *sizes, channels) if packed == "channels" else (n, channels, prod(sizes))


# ---- of tensors, or of values of the graph that ``b`` writes ------------------------------------


def pack(y: Any, packed: str, b: Any = TENSORS) -> Any:
    """The signs of ``y`` as bits; the last byte of a row is filled up with zeros."""
    rows = _rows(tuple(y.shape), packed)
    kept = b.cast(b.logical_not(y <= 0.0), dtype="i32")
    if packed == "channels":
        kept = b.permute(kept, dims=(0, *range(2, len(y.shape)), 1))
    low, high = (0,) * len(rows), (*(0,) * (len(rows) - 1), -rows[-1] % 8)
    kept = b.pad(b.reshape(kept, shape=rows), low=low, high=high)
    kept = b.reshape(kept, shape=(*rows[:-1], -(-rows[-1] // 8), 8))
    return b.cast(b.sum(kept * _weights(b, y), axes=(len(rows),)), dtype="u8")


def unpack(signs: Any, shape: Shape, packed: str, b: Any = TENSORS) -> Any:
    """Where a tensor of this shape was above 0 or nan."""
    rows = _rows(shape, packed)
    count, last = -(-rows[-1] // 8), len(rows) - 1
    wide = b.reshape(b.cast(signs, dtype="i32"), shape=(*rows[:-1], count, 1))
    bits = b.remainder(b.floor_div(wide, _weights(b, signs)), 2)
    bits = b.reshape(bits, shape=(*rows[:-1], 8 * count))
    bits = b.gt(b.slice(bits, axis=last, start=0, stop=rows[-1], step=1), 0)
    if packed == "channels":
        return b.permute(bits, dims=(0, last, *range(1, last)))
    return b.reshape(bits, shape=shape)


def _weights(b: Any, like: Any) -> Any:
    """The values of the eight bits, made on the device that uses them: a CUDA Graph cannot capture
    a copy to a GPU."""
    places = torch.arange(8, dtype=torch.int32, device=getattr(like, "device", None))
    return b.constant(torch.ones_like(places) << places, "bits")
