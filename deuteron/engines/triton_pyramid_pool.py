"""Spatial-pyramid pooling in one launch: the recipe around ``kernels/triton/pyramid_pool.py``."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.recipes import Knobs, place
from deuteron.engines.triton_here import MOST, one_operator, streamed
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.target import Target

OPS = {"pyramid_pool": False, "pyramid_pool_grad": True}  # operator → whether it is the gradient
REACHED = 0.4  # of the bandwidth of a copy, until a GPU says otherwise
WIDEST = 512  # a row of the image, which a tile holds whole


def _refuse(region: Region, node: Node, target: Target) -> Refusal | None:
    image = _image(region)
    if image.rank == 5:
        return Refusal("pools rows and images, not volumes", "pool slice by slice")
    if OPS[node.op] and not region.graph.types[node.uses[0]].is_layout("contiguous"):
        return Refusal("the gradient is not in row-major order", "to_layout(grad) first")
    if image.shape[-1] > WIDEST:
        return Refusal(f"rows of {image.shape[-1]} are too long for a tile", f"at most {WIDEST}")
    if prod(image.shape[:-1]) > MOST or prod(image.shape[2:]) > MOST:
        return Refusal("has more rows than 32 bits count", "split the batch")
    return None


def _image(region: Region) -> TensorType:
    """The type of x, or of its gradient."""
    node = region.nodes[0]
    return region.graph.types[node.output if OPS[node.op] else node.uses[0]]


def tiles(image: TensorType) -> list[tuple[int, int, int, int]]:
    """(planes, rows, columns, warps) of a program, most promising first: as wide as the image, or
    along the channels where these are adjacent. One warp needs no barriers for its sums; eight
    elements of a thread are what its registers hold."""
    channels, width = power_of_two(image.shape[1]), power_of_two(image.shape[-1])
    height, found = power_of_two((1, *image.shape[2:])[-2]), []
    if image.strides[1] == 1 and image.shape[1] > 1:
        for planes, rows, columns, warps in ((32, 4, 8, 4), (32, 4, 8, 8), (64, 2, 8, 4)):
            found.append((min(planes, channels), min(rows, height), min(columns, width), warps))
        return list(dict.fromkeys(found))
    for elements, warps in ((256, 1), (512, 2), (1024, 4)):
        room = max(elements // width, 1)
        rows = min(height, room, 8)
        found.append((max(min(channels, room // rows), 1), rows, width, warps))
    return list(dict.fromkeys(found))


def _knobs(region: Region, target: Target) -> Sequence[Knobs]:
    names = ("planes", "rows", "columns", "warps")
    return [dict(zip(names, t, strict=True)) for t in tiles(_image(region))]


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """The image from memory once; a maximum's gradient looks for the winners in a launch more."""
    searches = len(region.nodes[0].uses) > 1
    return streamed(REACHED)(region, target, knobs) + searches * target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.pyramid_pool import Image, Tile, backward, forward

    node, types = region.nodes[0], region.graph.types
    tile, warps = Tile(knobs["planes"], knobs["rows"], knobs["columns"]), knobs["warps"]

    sizes = node.attrs["sizes"]
    image = Image.of(_image(region), sizes)
    if not OPS[node.op]:
        run = forward(image, node.attrs["kind"], tile, warps)
        return Kernel(run, writes=True, note="1 kernel")
    back, at = backward(image, tile, warps), [place(region, v) for v in node.uses]
    if len(at) == 1:
        return Kernel(lambda grad, dx: back(grad, None, dx), writes=True, note="1 kernel")
    x, cells = types[node.uses[1]], types[node.uses[0]]
    *sides, warps = tiles(x)[0]  # x may lie in another order
    find = forward(Image.of(x, sizes), "where", Tile(*sides), warps)

    def gradient(*tensors: torch.Tensor) -> None:
        grad, x, dx = tensors[at[0]], tensors[at[1]], tensors[-1]
        winners = torch.empty(cells.shape, dtype=torch.int32, device=grad.device)
        find(x, winners)
        back(grad, winners, dx)

    return Kernel(gradient, writes=True, workspace=4 * cells.numel, note="2 kernels")


PYRAMID_POOL = one_operator("pyramid", OPS, _refuse, _knobs, _seconds, _build)
