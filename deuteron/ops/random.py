"""Random numbers that are functions: the same seed and place give the same bits everywhere.

A generator with a state would give each device, each tiling and each fusion its own numbers.
Here a random word depends on nothing but the seed and the element's place in row-major order,
so a mask is never stored: the backward pass computes it again, fused or not, on any device.

With 32-bit words that wrap around, ``lo``/``hi`` the halves of a 64-bit number, and i the place::

    a = mix(lo(seed) + GOLDEN)                  once per call
    b = mix(a ^ hi(seed))
    c = mix(b ^ hi(i))                          constant within 2³² elements
    word(seed, i) = mix(mix(lo(i) ^ c) + b)     two rounds per element

    mix(h): h ^= h >> 16;  h *= FIRST;  h ^= h >> 15;  h *= SECOND;  h ^= h >> 16

We need two rounds with two keys, because after one round the masks of two seeds would be
permutations of each other. The upper 24 bits of a word, compared with :func:`cutoff`, decide
whether the element is kept.

Attention has so many scores that even this would take longer than their products. So the line and
the column of a score are hashed (``stir``) separately, each once for many scores; and one word
decides on two scores, with 16 bits each, that are 8 columns apart: both are in the registers of one
thread, however the matrix units lay them out::

    word(seed, i, j) = mix(stir(lo(i) ^ b) ^ stir(j' ^ mix(b)))       j' = j without its bit 3
    stir(h): h *= FIRST;  h ^= h >> 15;  h *= SECOND
"""

from __future__ import annotations

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64
from deuteron.ir.types import TensorType
from deuteron.ops.elementwise import floats
from deuteron.ops.opdef import Attr, Fusion, elementwise_flops, operator

GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x7FEB352D, 0x846CA68B
BITS = 24  # how many bits of a word decide: they fit a signed 32-bit integer and a float32
HALF, APART = 16, 8  # bits for a score, and columns between two that share a word
_WORD = 0xFFFFFFFF


def mix(h: torch.Tensor) -> torch.Tensor:
    """A bijection on 32-bit words, held in int64, that flips each result bit half the time."""
    h = h ^ (h >> 16)
    h = (h * FIRST) & _WORD
    h = h ^ (h >> 15)
    h = (h * (SECOND - 2**32)) & _WORD  # the same modulo 2³², and |product| < 2⁶³
    return h ^ (h >> 16)


def _key(seed: torch.Tensor) -> torch.Tensor:
    a = mix(((seed & _WORD) + GOLDEN) & _WORD)
    return mix(a ^ ((seed >> 32) & _WORD))


def words(seed: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Random 32-bit words, as int64, for a rank-0 int64 seed and int64 places."""
    b = _key(seed)
    c = mix(b ^ ((place >> 32) & _WORD))
    return mix((mix((place & _WORD) ^ c) + b) & _WORD)


def _stir(h: torch.Tensor) -> torch.Tensor:
    h = ((h & _WORD) * FIRST) & _WORD
    h = h ^ (h >> 15)
    return (h * (SECOND - 2**32)) & _WORD


def keep_scores(
    seed: torch.Tensor, line: torch.Tensor, column: torch.Tensor, p: float
) -> torch.Tensor:
    """Which scores survive, as bool; line and column int64 that broadcast."""
    b = _key(seed)
    word = mix(_stir(line ^ b) ^ _stir((column & ~APART) ^ mix(b)))
    part = torch.where((column & APART) > 0, word >> HALF, word & ((1 << HALF) - 1))
    return part >= cutoff(p, HALF)


def cutoff(p: float, bits: int = BITS) -> int:
    """An element is dropped if the number in ``bits`` bits of its word is below this."""
    return round(p * (1 << bits))


def keep_mask(shape: tuple[int, ...], seed: torch.Tensor, p: float) -> torch.Tensor:
    """Which elements of a tensor of this shape survive, as bool, on the device of ``seed``."""
    place = torch.arange(torch.Size(shape).numel(), device=seed.device).reshape(shape)
    return (words(seed, place) >> (32 - BITS)) >= cutoff(p)


def _reference(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    keep = keep_mask(tuple(x.shape), seed.to(x.device), p)
    scaled = x * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return scaled.masked_fill_(~keep, 0.0)  # in place: the memory order of x stays


_SEED = "scalar:index<1048576"


@operator(
    Fusion.BROADCAST,
    _reference,
    attrs={"p": Attr("float", 0.5, "the probability of a zero, from 0 to 1")},
    vjp=lambda b, v: [b.dropout(v.grad, v.arg(1), p=v.attrs["p"]), None],
    flops=elementwise_flops(16),
    samples=f"""p=0.5; 3x5 {_SEED} | 3x5 {_SEED} p=0.0 | 3x5 {_SEED} p=1.0 | scalar {_SEED} p=0.1
        | 0x4 {_SEED} p=0.1 | 1x1x7 {_SEED} p=0.9 | 3x5@transposed {_SEED} p=0.3
        | 3x5@sliced {_SEED} p=0.3 | 3x5@expanded {_SEED} p=0.3 | 2x3x4x5@nhwc {_SEED} p=0.25
        | 33:extreme {_SEED} nograd""",
)
def dropout(x: TensorType, seed: TensorType, p: float) -> TensorType:
    """Each element is zero with probability p, else x / (1 − p). Which ones depends only on the
    seed and on their place in row-major order: equal on every device, whatever the strides."""
    if not 0.0 <= p <= 1.0:
        raise GraphError(f"p={p} is not a probability", remedy="use a number from 0 to 1")
    if (seed.rank, seed.dtype) != (0, int64):
        raise GraphError(f"the seed is {seed}, not one int64", remedy="give a rank-0 int64 tensor")
    return x.dense_like(dt=floats("dropout", x))
