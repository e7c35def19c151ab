"""Max pooling, its winners and its gradient: the recipe around ``kernels/triton/max_pool.py``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs
from deuteron.engines.triton.common import MOST, one_operator, settings, streamed, tensors_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.pool_winners import MOST_NUMBERED, fits_a_byte
from deuteron.target import Target

if TYPE_CHECKING:
    from deuteron.kernels.triton.max_pool import Pooling, Tile

SEARCHING = ("max_pool_grad", "adaptive_max_pool_grad")  # gradients that search x for the winners
WINNERS = ("max_pool_with_indices", "max_pool_with_winners", "adaptive_max_pool_with_indices")
# operator → its results: the maxima, also which elements these are (the winners), or the gradient
OPS = dict.fromkeys(("max_pool", "adaptive_max_pool"), "y") | dict.fromkeys(WINNERS, "y, winners")
OPS |= dict.fromkeys((*SEARCHING, "max_pool_winners_grad"), "dx")
# The part of a copy's bandwidth that is reached on an H200, with 3 × 3 windows of stride 2. To find
# the position of a maximum costs more than its value, and to find the winners again for a gradient
# costs as much again.
REACHED = {"y": 0.9, "y, winners": 0.7, "dx": 0.65}
REACHED_SEARCHING = 0.5


def _refuse(region: Region, node: Node, target: Target) -> None:
    x, y = _ends(region)
    refuse_if(x.rank == 5, "pools rows and images, not volumes", "pool slice by slice")
    space, out = list(x.shape[2:]), list(y.shape[2:])
    uneven = "size" in node.attrs and any(n % m for n, m in zip(space, out, strict=True))
    unlike = f"{out} windows over {space} are not all of one size"
    refuse_if(uneven, unlike, "a size that divides x's")
    large = f"windows have more than {MOST_NUMBERED} elements"
    refuse_if(not fits_a_byte(window(node, x, y)[0]), large, "reduce them: amax")
    many = prod(x.shape[:-1]) > MOST or prod(x.shape) // x.shape[1] > MOST
    refuse_if(many, "has more lines than 32 bits count", "split the batch")


def _ends(region: Region) -> tuple[TensorType, TensorType]:
    """The types of x and of the result, or of their gradients."""
    node, types = region.nodes[0], region.graph.types
    read, made = types[node.uses[0]], types[node.outputs[0]]
    return (made, read) if OPS[node.op] == "dx" else (read, made)


def window(node: Node, x: TensorType, y: TensorType) -> tuple[tuple[int, ...], ...]:
    """Kernel, stride, padding and dilation, also of adaptive windows, which must all have one
    size."""
    if "size" not in node.attrs:
        return tuple(node.attrs[name] for name in ("kernel", "stride", "padding", "dilation"))
    each = tuple(n // m for n, m in zip(x.shape[2:], y.shape[2:], strict=True))
    return each, each, (0,) * len(each), (1,) * len(each)


def tiles(x: TensorType, along: int) -> list[tuple[int, int, int, int]]:
    """(lines, elements of each, warps, rows of windows) of a program, most promising first. A
    thread has a vector of 16 bytes, or half of one where a line is not of channels but of ``along``
    windows."""
    vector = 128 // x.dtype.bits
    if x.strides[1] == 1 and x.shape[1] > 1:
        inner = min(power_of_two(x.shape[1]), 64)
        once = max(128 * vector // inner, 1)
        return [(once, inner, 4, 4), (once, inner, 4, 2), (once, inner, 4, 1)]
    # as wide as leaves the fewest threads idle
    inner = min((64, 32, 16), key=lambda n: (-(-along // n) * n, -n))
    once = max(64 * vector // inner, 1)
    return [(once, inner, 4, 4), (once, inner, 4, 2), (2 * once, inner, 4, 1)]


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    names = ("outer", "inner", "warps", "rows")
    x, y = _ends(region)
    return [dict(zip(names, tile, strict=True)) for tile in tiles(x, y.shape[-1])]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds to move every tensor once; a gradient that searches for the winners does so in
    another launch."""
    op = region.nodes[0].op
    reached = REACHED_SEARCHING if op in SEARCHING else REACHED[OPS[op]]
    return streamed(reached)(region, target, knobs) + (op in SEARCHING) * target.launch


def pooling(node: Node, x: TensorType, y: TensorType) -> Pooling:
    """The geometry as the kernels take it; a 1-D signal is an image of height 1."""
    from deuteron.kernels.triton.max_pool import Pooling, Window

    def image(numbers: Sequence[int], one: int) -> Any:
        *front, last = numbers
        return (*front, last) if x.rank == 4 else (*front, one, last)

    kernel, stride, padding, dilation = window(node, x, y)
    sides = image(kernel, 1), image(stride, 1), image(padding, 0), image(dilation, 1)
    of = Window(*(n for side in sides for n in side))
    out = image(y.shape, 1)[2:]
    return Pooling(image(x.shape, 1), image(x.strides, 0), out, image(y.strides, 0), of)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.max_pool import Tile, forward

    node, (x, y), tile = region.nodes[0], _ends(region), Tile(**settings(knobs))
    if OPS[node.op] == "dx":
        return _gradient(region, tile)
    run = forward(pooling(node, x, y), x.dtype.bits // 8, tile)
    given = tensors_of(region, (node.uses[0], *(*node.outputs, None)[:2]))
    return Kernel(lambda *tensors: run(*given(tensors)), writes=True, note="1 kernel")


def _gradient(region: Region, tile: Tile) -> Kernel:
    """A kernel for the gradient. The winners are an input, or a first launch finds them and writes
    them to scratch memory."""
    from deuteron.kernels.triton.max_pool import backward, forward

    node, (dx, grad) = region.nodes[0], _ends(region)
    second = region.graph.types[node.uses[1]]
    size, search = dx.dtype.bits // 8, node.op in SEARCHING
    order = "nhwc" if dx.is_layout("nhwc") else "contiguous"
    winners = TensorType.of(grad.shape, "u8", order) if search else second
    grad_strides = pooling(node, dx, grad).out_strides
    spread = backward(pooling(node, dx, winners), grad_strides, size, tile)
    given = tensors_of(region, (*node.uses, node.outputs[0]))
    if not search:
        return Kernel(lambda *tensors: spread(*given(tensors)), writes=True, note="1 kernel")
    find = forward(pooling(node, second, winners), size, tile)

    def run(*tensors: torch.Tensor) -> None:
        of, x, to = given(tensors)
        room = {"dtype": torch.uint8, "device": of.device}
        found = torch.empty_strided(winners.shape, winners.strides, **room)
        find(x, None, found)
        spread(of, found, to)

    return Kernel(run, writes=True, workspace=winners.numel, note="2 kernels")


MAX_POOL = one_operator("max_pool", OPS, _refuse, _knobs, _seconds, _build, build_s=1.0)
