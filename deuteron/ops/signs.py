"""The signs of what relu gave, kept as bits: all that its gradient needs of y.

A bit is set where the gradient passes, that is where y, rounded as it is stored, is above 0 or nan.
Eight of them make a
byte, the first in its lowest bit, along the dimension whose elements lie side by side, so that one
thread of a kernel has a byte to itself:

    packed="channels"     [N, …, ⌈C / 8⌉]      channels last: the channels of a position
    packed="positions"    [N, C, ⌈P / 8⌉]      channels first: the P positions of a channel

In 16 bits per element that is a sixteenth of y, and the gradient reads it instead of y.
"""

from __future__ import annotations

from math import prod

import torch
import torch.nn.functional as F

from deuteron.ir.dtype import dtype
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.emit import Ops, Sym

PACKED = ("none", "channels", "positions")
FEWEST = 8  # elements side by side: fewer would leave most of their byte empty
WORTH = (
    4 << 20
)  # bytes of y; a smaller one takes a GPU a microsecond to read, or comes from its cache


def is_channels_last(image: TensorType) -> bool:
    """Whether the channels of one position lie side by side."""
    if image.numel == image.shape[0] * image.shape[1]:
        return True  # one position: a matrix
    return image.shape[1] > 1 and image.is_layout("nhwc")


def side_by_side(y: TensorType) -> str:
    """Along what eight elements of ``y`` lie side by side, or "none"."""
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


# ---- on tensors ----------------------------------------------------------------------------------


def pack(y: torch.Tensor, packed: str) -> torch.Tensor:
    """The signs of ``y``; the last byte of a row is filled up with zeros."""
    kept = torch.logical_not(y <= 0).to(torch.uint8)
    kept = kept.movedim(1, -1) if packed == "channels" else kept
    rows = _rows(tuple(y.shape), packed)
    kept = F.pad(kept.reshape(rows), (0, -rows[-1] % 8))
    kept = kept.reshape(*rows[:-1], -(-rows[-1] // 8), 8)
    return (kept << _places(kept)).sum(-1, dtype=torch.uint8)


def unpack(signs: torch.Tensor, shape: Shape, packed: str) -> torch.Tensor:
    """Where a tensor of this shape was above 0 or nan."""
    bits = (signs.unsqueeze(-1) >> _places(signs)).bitwise_and(1).bool()
    rows = _rows(shape, packed)
    bits = bits.flatten(-2)[..., : rows[-1]]
    return bits.movedim(-1, 1) if packed == "channels" else bits.reshape(shape)


def _places(like: torch.Tensor) -> torch.Tensor:
    """The numbers of the bits, made where they are used: a CUDA Graph captures no copy to a GPU."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)


# ---- in simpler operators ------------------------------------------------------------------------


def packed_of(b: Ops, y: Sym, packed: str) -> Sym:
    """:func:`pack` as nodes of a graph."""
    kept = b.to(b.one("logical_not", y <= 0.0), dtype("i32"))
    if packed == "channels":
        kept = b.one("permute", kept, dims=(0, *range(2, y.rank), 1))
    rows = _rows(y.shape, packed)
    low, high = [0] * len(rows), [*[0] * (len(rows) - 1), -rows[-1] % 8]
    kept = b.one("pad", b.one("reshape", kept, shape=rows), low=low, high=high)
    kept = b.one("reshape", kept, shape=(*rows[:-1], -(-rows[-1] // 8), 8))
    bits = kept * _weights(b)
    return b.to(b.one("sum", bits, axes=(-1,)), dtype("u8"))


def unpacked_of(b: Ops, signs: Sym, shape: Shape, packed: str) -> Sym:
    """:func:`unpack` as nodes of a graph."""
    rows = _rows(shape, packed)
    groups = (*rows[:-1], -(-rows[-1] // 8))
    wide = b.one("reshape", b.to(signs, dtype("i32")), shape=(*groups, 1))
    bits = b.one("remainder", b.one("floor_div", wide, _weights(b)), 2)
    bits = b.one("reshape", bits, shape=(*rows[:-1], 8 * groups[-1]))
    bits = b.one("slice", bits, axis=-1, stop=rows[-1]) > 0
    if packed == "channels":
        return b.one("permute", bits, dims=(0, len(rows) - 1, *range(1, len(rows) - 1)))
    return b.one("reshape", bits, shape=shape)


def _weights(b: Ops) -> Sym:
    return b.constant(torch.tensor([1 << k for k in range(8)], dtype=torch.int32), "bits")
