"""Random numbers of a pipeline: a function of seed, step and image, the same on every machine.

The generator is that of ``dropout`` (``ops/random.py``): words that depend on a seed and a place.
Here the seed is folded with the step of the pipeline, and the place is made of the image's number,
the step's place in the list, and the number of the draw. So an image keeps its parameters in any
batch, order or device, and a step keeps its own when the arguments of another one change.

All is drawn in float64 on the CPU; a GPU gets the finished table. Many steps are drawn at once
and kept, so a training loop pays for a draw, and for a copy to the GPU, every ``AHEAD`` batches.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import torch

from deuteron.augment.colours import WIDTH
from deuteron.augment.recipe import MATRIX, Recipe
from deuteron.augment.step import Size
from deuteron.ops.random import BITS, words

AHEAD = 16  # steps drawn together
DRAWS = 32  # random numbers per image and step of the list
PLACES = 64  # steps a list may have
KEPT = 8  # blocks of tables that are remembered

_Key = tuple[object, ...]
_blocks: OrderedDict[_Key, torch.Tensor] = OrderedDict()
_lock = Lock()


def uniform(seed: int, steps: torch.Tensor, images: torch.Tensor, place: int) -> torch.Tensor:
    """[len(steps), len(images), DRAWS] numbers from 0 to below 1, multiples of 2⁻²⁴."""
    root = torch.tensor(seed, dtype=torch.int64)
    high, low = words(root, 2 * steps), words(root, 2 * steps + 1)
    key = ((high << 32) | low)[:, None, None]
    at = (images[:, None] * PLACES + place) * DRAWS + torch.arange(DRAWS)
    return (words(key, at) >> (32 - BITS)).to(torch.float64) * 2.0**-BITS


def drawn(
    recipe: Recipe, seed: int, steps: torch.Tensor, images: torch.Tensor, size: Size
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Every parameter by name, and the table [steps, images, columns] made from them."""
    named: dict[str, torch.Tensor] = {}
    matrix = torch.eye(3, dtype=torch.float64).expand(len(steps), len(images), 3, 3)
    for place, step in recipe.geometric:
        u = uniform(seed, steps, images, place)
        found = step.draw(u, size)
        happens = u[..., 0] < step.p
        label = f"{place}.{type(step).__name__}"
        named |= {f"{label}.{k}": v for k, v in {"happens": happens, **found}.items()}
        moved = matrix @ step.matrix(found, size)
        matrix = torch.where(happens[..., None, None], moved, matrix)
        size = step.result_size(size)
    columns = [matrix.mT.flatten(-2)]
    for place, colour in recipe.colours:
        values = colour.draw(uniform(seed, steps, images, place))
        named |= {f"{place}.{type(colour).__name__}.{k}": v for k, v in values.items()}
        block = torch.zeros(len(steps), len(images), WIDTH, dtype=torch.float64)
        for i, value in enumerate(values.values()):
            block[..., i] = value
        columns.append(block)
    named["matrix"] = matrix
    table = torch.cat(columns, -1)
    assert table.shape[-1] == MATRIX + WIDTH * len(recipe.colours)
    return named, table


def table_for(
    recipe: Recipe,
    seed: int,
    step: int,
    images: int | torch.Tensor,
    size: Size,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """The table [images, columns] of one step. It is shared with later calls: do not write to it.

    ``images`` is how many, numbered from 0, or a tensor of their numbers.
    """
    if isinstance(images, torch.Tensor):
        which = images.to("cpu", torch.int64)
        _, table = drawn(recipe, seed, torch.tensor([step]), which, size)
        return table[0].to(dtype).to(device)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = (recipe.text, seed, step // AHEAD, images, size, dtype, device, stream)
    with _lock:
        block = _blocks.get(key)
        if block is None:
            block = _draw_block(recipe, seed, step // AHEAD, images, size).to(dtype).to(device)
            _blocks[key] = block
            while len(_blocks) > KEPT:
                _blocks.popitem(last=False)
        _blocks.move_to_end(key)
    return block[step % AHEAD]


def _draw_block(recipe: Recipe, seed: int, block: int, images: int, size: Size) -> torch.Tensor:
    steps = torch.arange(block * AHEAD, (block + 1) * AHEAD)
    return drawn(recipe, seed, steps, torch.arange(images), size)[1]
