"""Spatial-pyramid pooling in one launch: the recipe around ``kernels/triton/pyramid_pool.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.policy import Policy
from deuteron.target import Target

OPS = {"pyramid_pool": False, "pyramid_pool_grad": True}  # operator → whether it is the gradient
REACHED = 0.4  # of the bandwidth of a copy, until a GPU says otherwise
MOST = 2**31 - 2**20  # planes, places and programs are counted in 32 bits
WIDEST = 512  # a row of the image, which a tile holds whole


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    node = refuse_anywhere(target) or only_node(region, OPS)
    if isinstance(node, Refusal):
        return node
    image = _image(region)
    if image.rank == 5:
        return Refusal("pools rows and images, not volumes", "pool slice by slice")
    if image.numel == 0:
        return Refusal("there is nothing to compute: a size is 0")
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
    height = power_of_two((1, *image.shape[2:])[-2])
    if image.strides[1] == 1 and image.shape[1] > 1:
        shapes = ((32, 4, 8, 4), (32, 4, 8, 8), (64, 2, 8, 4))
        return list(
            dict.fromkeys(
                (min(p, channels), min(r, height), min(c, width), w) for p, r, c, w in shapes
            )
        )
    found = []
    for elements, warps in ((256, 1), (512, 2), (1024, 4)):
        room = max(elements // width, 1)
        rows = min(height, room, 8)
        found.append((max(min(channels, room // rows), 1), rows, width, warps))
    return list(dict.fromkeys(found))


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    names = ("planes", "rows", "columns", "warps")
    return [dict(zip(names, t, strict=True)) for t in tiles(_image(region))]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The image from memory once; a maximum's gradient looks for the winners in a launch more."""
    once = modelled_seconds(region_cost(region), main_dtype(region), REACHED, False, target)
    return once + (len(region.nodes[0].uses) > 1) * target.launch


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.pyramid_pool import Image, Way, backward, forward

    node, types = region.nodes[0], region.graph.types
    way = Way(**{k: v for k, v in knobs.items() if k != "recipe"})

    def image(t: TensorType) -> Image:
        return Image(t.shape, t.strides, node.attrs["sizes"])

    if not OPS[node.op]:
        run = forward(image(_image(region)), node.attrs["kind"], way)
        return Kernel(run, writes=True, note="1 kernel")
    x = node.uses[1] if len(node.uses) > 1 else None
    of_x = None if x is None else Way(*tiles(types[x])[0])  # which may lie in another order
    find = None if x is None or of_x is None else forward(image(types[x]), "where", of_x)
    back = backward(image(_image(region)), way, find)
    at = [region.inputs.index(v) for v in node.uses]

    def gradient(*tensors: Any) -> None:
        back(tensors[at[0]], None if x is None else tensors[at[1]], tensors[-1])

    scratch = 0 if x is None else 4 * types[node.uses[0]].numel
    note = "1 kernel" if x is None else "2 kernels"
    return Kernel(gradient, writes=True, workspace=scratch, note=note)


PYRAMID = Recipe("pyramid", _refuse, _build, _knobs, _seconds, build_s=0.4)
