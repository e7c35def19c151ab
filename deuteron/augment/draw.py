"""Random numbers of a pipeline: a function of seed, step and image, the same on every machine.

The generator is that of ``dropout`` (``ops/random.py``): words that depend on a seed and a place.
Here the seed is mixed with the training step (the count of calls of the pipeline), and the place is
made of the image's number, the place of a pipeline's step in its list, and the number of the draw.
So an image keeps its parameters in any batch, order or device, and a pipeline's step keeps its own
when the arguments of another one change.

All is drawn in float64 on the CPU; a GPU gets the finished table. Many training steps are drawn at
once and kept, so a training loop pays for a draw, and for a copy to the GPU, only every 16 batches
or more.
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch

from deuteron.augment.colours import WIDTH
from deuteron.augment.spec import MATRIX, Spec
from deuteron.augment.step import Size
from deuteron.ops.random import BITS, FIRST, GOLDEN, SECOND

AHEAD, MOST = 16, 256  # the least and the most training steps that are drawn at once
TOGETHER = 4096  # images that are drawn at once, within these bounds
DRAWS = 32  # random numbers for each image and step of the list
PLACES = 64  # steps that a list may have
KEPT = 8  # blocks of tables that are remembered

_Key = tuple[object, ...]
_Words = np.ndarray[Any, np.dtype[np.uint32]]
_blocks: OrderedDict[_Key, torch.Tensor] = OrderedDict()
_lock = Lock()


def _mix(h: _Words) -> _Words:
    h ^= h >> np.uint32(16)
    h *= np.uint32(FIRST)
    h ^= h >> np.uint32(15)
    h *= np.uint32(SECOND)
    h ^= h >> np.uint32(16)
    return h


def words(low: _Words, high: _Words, place: _Words, beyond: _Words) -> _Words:
    """``ops.random.words`` of the seed ``high``·2³² + ``low`` and the place ``beyond``·2³² +
    ``place``, in numpy's uint32, which wraps round by itself and takes a tenth of the time."""
    b = _mix(_mix(low + np.uint32(GOLDEN)) ^ high)
    c = _mix(b ^ beyond)
    return _mix(_mix(place ^ c) + b)


def _halves(numbers: torch.Tensor) -> tuple[_Words, _Words]:
    """The lower and the upper 32 bits of int64."""
    wide = numbers.numpy()
    return wide.astype(np.uint32), (wide >> 32).astype(np.uint32)


def uniform(
    seed: int, steps: torch.Tensor, images: torch.Tensor, wanted: Sequence[tuple[int, int]]
) -> list[torch.Tensor]:
    """Return uniform numbers in [0, 1), multiples of 2⁻²⁴: for each pair (place in the list, how
    many) in ``wanted``, a tensor [len(steps), len(images), how many]."""
    root = _halves(torch.tensor([seed]))
    high, low = words(*root, *_halves(2 * steps)), words(*root, *_halves(2 * steps + 1))
    draws = [place * DRAWS + k for place, many in wanted for k in range(many)]
    first, beyond = _halves(images * (PLACES * DRAWS))
    # an image's places begin at a multiple of 2¹¹, so they share the upper half
    at = first + np.array(draws, np.uint32)[:, None, None]
    found = words(low[:, None], high[:, None], at, beyond) >> np.uint32(32 - BITS)
    # steps compute with one draw of all images at a time, so that is adjacent in memory
    u = torch.from_numpy(found.astype(np.float64) * 2.0**-BITS).movedim(0, -1)
    return list(u.split([many for _, many in wanted], -1))


def drawn(
    spec: Spec, seed: int, steps: torch.Tensor, images: torch.Tensor, size: Size
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Draw every parameter; return them by name, and the table [steps, images, columns] of them."""
    named: dict[str, torch.Tensor] = {}
    matrix = torch.eye(3, dtype=torch.float64).expand(len(steps), len(images), 3, 3)
    random = (*spec.geometric, *spec.colours)
    uniforms = iter(uniform(seed, steps, images, [(place, s.draws) for place, s in random]))
    for (place, step), u in zip(spec.geometric, uniforms, strict=False):
        found, moves = step.draw(u, size)
        happens = u[..., 0] < step.p
        label = f"{place}.{type(step).__name__}"
        named |= {f"{label}.{k}": v for k, v in {"happens": happens, **found}.items()}
        matrix = torch.where(happens[..., None, None], matrix @ moves, matrix)
        size = step.result_size(size)
    table = torch.zeros(len(steps), len(images), spec.columns, dtype=torch.float64)
    table[..., :MATRIX] = matrix.mT.flatten(-2)
    for k, (place, colour) in enumerate(spec.colours):
        values = colour.draw(next(uniforms))
        named |= {f"{place}.{type(colour).__name__}.{name}": v for name, v in values.items()}
        for i, value in enumerate(values.values()):
            table[..., MATRIX + WIDTH * k + i] = value
    return {**named, "matrix": matrix}, table


def table_for(
    spec: Spec, seed: int, step: int, x: torch.Tensor, index: torch.Tensor | None
) -> torch.Tensor:
    """Return the table [images, columns] of one training step for images like ``x``, which are
    numbered from 0 or by ``index``. Without ``index`` later calls share it: do not write to it."""
    size, device, dtype = (x.shape[2], x.shape[3]), x.device, spec.compute_dtype(x.dtype)
    if index is not None:
        _, table = drawn(spec, seed, torch.tensor([step]), index.to("cpu", torch.int64), size)
        return table[0].to(dtype).to(device)
    images = x.shape[0]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    ahead = max(AHEAD, min(MOST, TOGETHER // max(images, 1)))
    key = (spec.text, seed, step // ahead, images, size, dtype, device, stream)
    with _lock:
        block = _blocks.get(key)
        if block is None:
            steps = torch.arange(step // ahead * ahead, (step // ahead + 1) * ahead)
            _, made = drawn(spec, seed, steps, torch.arange(images), size)
            block = _blocks[key] = made.to(dtype).to(device)
            while len(_blocks) > KEPT:
                _blocks.popitem(last=False)
        _blocks.move_to_end(key)
    return block[step % ahead]
