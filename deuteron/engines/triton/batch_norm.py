"""Recipes for batch normalisation in training: hand-written Triton kernels for ``batch_norm_act``,
its gradient, and ``batch_norm_train`` with the sum and the activation that the planner fused with
it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import operands, results
from deuteron.engines.recipes import Recipe
from deuteron.engines.triton.common import tensors_of
from deuteron.engines.triton.norm import REACHED
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType, same_strides
from deuteron.kernels.triton.batch_norm_tiles import Division, divide
from deuteron.ops.activated import activation_text
from deuteron.ops.reference import lay
from deuteron.ops.signs import is_channels_last, side_by_side
from deuteron.policy import Policy
from deuteron.target import Target

TYPES = ("f32", "f16", "bf16")
TILE = 8192  # bytes of a tile: then three programs fit on a multiprocessor
NARROW = 64  # channels of the gradient's tiles; 256 were 1 to 3 % slower on an H200
ALONE = 15e9  # bytes per second that one program moves; 128 of them reached 2 TB/s on an H200
BUILD_S = 0.5  # seconds; compiled at the first launch, and kept on disk by Triton
FORWARD = ("batch_norm_act", "batch_norm_train")


@dataclass(frozen=True)
class Step:
    """A region as one call of the kernels: its values by the names that the kernels use."""

    image: TensorType  # the shape of x in the memory order of the result
    read: Mapping[str, str]
    made: Mapping[str, str]  # results that are read outside the region
    attrs: Mapping[str, Any]

    @property
    def values(self) -> dict[str, str]:
        return {**self.read, **self.made}


# ---- what a region is ----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def forward_step(region: Region) -> Step:
    """Batch norm in training, and the sum and the activation that follow ``batch_norm_train``."""
    starts = bool(region.nodes) and region.nodes[0].op in FORWARD
    refuse_if(not starts, "runs batch normalisation for training", quiet=True)
    anchor, *rest = region.nodes
    read, types = operands(anchor), region.graph.types
    attrs = {"activation": "none", "packed": "none", **anchor.attrs}
    y, followed = anchor.outputs[0], anchor.op == "batch_norm_act"
    for node in rest:
        following = activation_text(node.op, node.attrs)
        apart = followed or y not in node.uses or y in region.outputs
        refuse_if(apart, f"{node.op} is not a sum or an activation right after batch norm")
        if node.op == "add" and "residual" not in read:
            other = next((v for v in node.uses if v != y), None)
            odd = other is None or types[other].shape != types[y].shape
            refuse_if(odd, "adds a tensor of another shape", "expand it first")
            read["residual"] = other or ""
        else:
            refuse_if(following is None, f"{node.op} has no formula", "leave it outside")
            attrs["activation"], followed = following, True
        y = node.outputs[0]
    kinds = {types[v].dtype for v in (y, read.get("residual", y), anchor.outputs[0])}
    refuse_if(len(kinds) > 1, "changes the element type", "cast after the region")
    unread = y not in region.outputs
    refuse_if(unread, "nobody reads y", "use mean and var for statistics alone")
    return Step(types[y], read, {**results(region, anchor), "y": y}, attrs)


@lru_cache(maxsize=1024)
def backward_step(region: Region) -> Step:
    refuse_if(region.ops != ("batch_norm_act_grad",), "runs batch_norm_act_grad alone")
    (node,) = region.nodes
    image = region.graph.types[node.outputs[0]]
    return Step(image, operands(node), results(region, node), node.attrs)


Read = Callable[[Region], Step]


def _refuse(read: Read, region: Region, target: Target, policy: Policy) -> None:
    step = read(region)
    signs = step.values.get("signs")
    values = [v for v in (*region.inputs, *region.outputs) if v != signs]
    for kind in (region.graph.types[v].dtype.short for v in values):
        refuse_if(kind not in TYPES, f"element type {kind}", "use f16, bf16 or f32")
    same = not set(region.inputs).isdisjoint(region.outputs)
    refuse_if(same, "an output is also an input")
    if signs is not None:  # tiles hold all bits of a byte only if these are adjacent in memory
        asked, usual = step.attrs["packed"], side_by_side(step.image)
        few = asked != usual == "none"
        refuse_if(few, "fewer than 8 elements side by side fill no byte", "leave packed out")
        wrong = f"signs along {asked} are not side by side"
        refuse_if(asked != usual, wrong, f'use packed="{usual}"')


# ---- how it is run -------------------------------------------------------------------------------


def _division(image: TensorType, target: Target, knobs: Mapping[str, Any]) -> Division:
    chosen = {k: v for k, v in knobs.items() if k not in ("recipe", "tile")}
    tile = knobs["tile"] * 8 // image.dtype.bits
    return divide(image.shape, is_channels_last(image), target.units, tile=tile, **chosen)


def _knobs(read: Read, region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    image = read(region).image
    usual: dict[str, Any] = {"tile": TILE, "warps": 4}
    if _division(image, target, usual).once:
        return usual, {**usual, "warps": 8}, {**usual, "once": False}
    narrow = {"width": NARROW} if read is backward_step and is_channels_last(image) else {}
    deeper = {**usual, "waves": 3, "deep": 4, "stages": 4, "each": 1}
    return {**usual, **narrow}, deeper, {"tile": 2 * TILE, "warps": 8, "deep": 3}


def _seconds(read: Read, region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """Seconds to move every tensor once, to read again what the second pass needs, and to
    launch."""
    step, types = read(region), region.graph.types
    moved = sum(types[v].shape == step.image.shape for v in step.values.values())
    size = (moved + (1 if read is forward_step else 2)) * step.image.nbytes
    size += types[step.values["signs"]].nbytes if "signs" in step.values else 0
    speed = target.cache_bandwidth if size < target.cache_bytes / 2 else target.stream
    speed = max(speed, target.stream) * REACHED
    d = _division(step.image, target, knobs)
    if d.once:
        return size / min(speed, d.blocks * ALONE) + target.launch
    return size / speed + 3 * target.launch


def _build(read: Read, region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.batch_norm import backward, forward

    step, attrs = read(region), read(region).attrs
    d = _division(step.image, ctx.target, knobs)
    picked, copies = picker(region, step)
    following, exact = attrs["activation"], step.image.dtype.short == "f32"
    if read is backward_step:
        call = backward(d, following, "y" in step.read, exact)
    else:
        call = forward(d, attrs["momentum"], attrs["eps"], following, exact)
    note = "one kernel" if d.once else "a pass, a merge, a pass"
    room = d.workspace + copies
    over = over_old(region, step) if read is forward_step else ()
    return Kernel(lambda *ts: call(picked(ts)), writes=True, workspace=room, note=note, over=over)


def picker(region: Region, step: Step) -> tuple[Callable[[Sequence[Any]], Any], int]:
    """A function that makes the kernels' operands from the arguments of ``region``, copied to the
    memory order that the kernels need, and the bytes of these copies."""
    from deuteron.kernels.triton.batch_norm_passes import Operands

    types = region.graph.types
    given = tensors_of(region, map(step.values.get, Operands._fields))
    laid = {name: _laid(types[v], step.image) for name, v in step.read.items()}
    moved = {name: order for name, order in laid.items() if order is not None}
    spare = [name for name in ("mean", "rstd") if name not in step.values]
    channels = step.image.shape[1]

    def picked(tensors: Sequence[torch.Tensor]) -> Operands:
        t = Operands(*given(tensors))
        more = {name: lay(getattr(t, name), order) for name, order in moved.items()}
        for name in spare:  # not outputs of the region, but the second pass reads them
            more[name] = tensors[0].new_empty(channels, dtype=torch.float32)
        return t._replace(**more) if more else t

    return picked, sum(types[step.read[name]].nbytes for name in moved)


def over_old(region: Region, step: Step) -> tuple[tuple[int, int], ...]:
    """Pairs for ``Kernel.over``: new running statistics may take the memory of the old ones,
    because the program that writes one has read it before, and no other program reads it."""
    pairs = ((f"new_{name}", f"running_{name}") for name in ("mean", "var"))
    return tuple(
        (region.outputs.index(step.made[new]), region.inputs.index(step.read[old]))
        for new, old in pairs
        if step.made.get(new) in region.outputs and step.read.get(old) in region.inputs
    )


def _laid(t: TensorType, image: TensorType) -> TensorType | None:
    """The type to which an operand must be copied, or None if its memory order is right."""
    if t.shape != image.shape:
        return None if t.is_layout("contiguous") else t.with_layout("contiguous")
    return None if same_strides(t.shape, t.strides, image.strides) else image


def _recipe(name: str, read: Read, *ops: str) -> Recipe:
    refuse, build = partial(_refuse, read), partial(_build, read)
    return Recipe(name, ops, refuse, build, partial(_knobs, read), partial(_seconds, read), BUILD_S)


BATCH_NORM = (
    _recipe("batch_norm", forward_step, "batch_norm_train", "batch_norm_act"),
    _recipe("batch_norm_backward", backward_step, "batch_norm_act_grad"),
)
