"""Recipes for batch normalisation in training: hand-written Triton kernels for ``batch_norm_act``,
its gradient, and ``batch_norm_train`` with the sum and the activation that the planner put behind
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.recipes import Recipe
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.engines.triton_norm import REACHED
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType, same_strides
from deuteron.kernels.triton.batch_norm_tiles import Division, divide
from deuteron.ops.batch_norm import ACTIVATIONS
from deuteron.ops.movement import lay
from deuteron.ops.signs import is_channels_last, side_by_side
from deuteron.policy import Policy
from deuteron.target import Target

TYPES = ("f32", "f16", "bf16")
TILE = 8192  # bytes; registers and shared memory then hold three programs on a multiprocessor
NARROW = 64  # channels of the gradient's tiles; 256 were 1 to 3 % slower on an H200
ALONE = 15e9  # bytes per second that one program moves; 128 of them reached 2 TB/s on an H200
BUILD_S = 0.5  # compiled at the first launch, and kept on disk by Triton


@dataclass(frozen=True)
class Step:
    """A region as one call of the kernels: values by place, None where there is none."""

    image: TensorType  # x's shape in the order that the result has
    images: tuple[str | None, ...]  # inputs of the size of x
    params: tuple[str | None, ...]
    results: tuple[str | None, ...]
    signs: str | None  # read or written
    attrs: Mapping[str, Any]


# ---- what a region is ----------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def forward_step(region: Region) -> Step | Refusal:
    """x and the residual; weight, bias and running statistics; y and the statistics."""
    if not region.nodes or region.nodes[0].op not in ("batch_norm_act", "batch_norm_train"):
        return Refusal("runs batch normalisation for training")
    anchor, *rest = region.nodes
    ins = (*anchor.inputs, *[None] * 6)[:6]
    attrs = {"activation": "none", "slope": 0.0, "packed": "none", **anchor.attrs}
    found = _epilogue(region, anchor, rest) if rest else (anchor.outputs[0], ins[5], attrs)
    if isinstance(found, Refusal):
        return found
    y, residual, attrs = found
    if y not in region.outputs:
        return Refusal("nobody reads y", "use mean and var for statistics alone")
    made = [v if v in region.outputs else None for v in (*anchor.outputs[1:], None)]
    image = region.graph.types[y]
    return Step(image, (ins[0], residual), ins[1:5], (y, *made[:4]), made[4], attrs)


def _epilogue(
    region: Region, anchor: Node, rest: Sequence[Node]
) -> tuple[str, str | None, dict[str, Any]] | Refusal:
    """What follows ``batch_norm_train``: a sum, an activation, or both. The last value, the
    residual, and the attributes of ``batch_norm_act``."""
    if anchor.op != "batch_norm_train":
        return Refusal("batch_norm_act has its own activation")
    types, value, residual = region.graph.types, anchor.outputs[0], None
    attrs = {**anchor.attrs, "activation": "none", "slope": 0.0, "packed": "none"}
    for node in rest:
        if attrs["activation"] != "none" or value not in node.uses or value in region.outputs:
            return Refusal(f"{node.op} is not a sum or an activation right after batch norm")
        if node.op == "add" and residual is None:
            residual = next((v for v in node.uses if v != value), None)
            if residual is None or types[residual].shape != types[value].shape:
                return Refusal("adds a tensor of another shape", "expand it first")
        elif node.op in ACTIVATIONS and len(node.uses) == 1:
            attrs["activation"] = node.op
            attrs["slope"] = node.attrs.get("negative_slope", 0.0)
        else:
            return Refusal(f"{node.op} is no activation of these kernels")
        value = node.outputs[0]
    if value in anchor.outputs or {types[v].dtype for v in (value, residual) if v} != {
        types[anchor.outputs[0]].dtype
    }:
        return Refusal("changes the element type", "cast after the region")
    return value, residual, attrs


@lru_cache(maxsize=1024)
def backward_step(region: Region) -> Step | Refusal:
    """grad, x, y and the residual; mean, rstd, weight and bias; the four gradients."""
    if region.ops != ("batch_norm_act_grad",):
        return Refusal("runs batch_norm_act_grad alone")
    node = region.nodes[0]
    grad, x, mean, rstd, weight, bias, y, residual, signs = (*node.inputs, *[None] * 9)[:9]
    results = tuple(v if v in region.outputs else None for v in node.outputs)
    image = region.graph.types[node.outputs[0]]
    params = (mean, rstd, weight, bias)
    return Step(image, (grad, x, y, residual), params, results, signs, node.attrs)


Read = Callable[[Region], Step | Refusal]


def _refuse(read: Read, region: Region, target: Target, policy: Policy) -> Refusal | None:
    step = read(region)
    if isinstance(step, Refusal):
        return step
    refusal = refuse_anywhere(target)
    if refusal is not None:
        return refusal
    values = (v for v in (*region.inputs, *region.outputs) if v != step.signs)
    types = [region.graph.types[v] for v in values]
    wrong = next((t.dtype.short for t in types if t.dtype.short not in TYPES), None)
    if wrong is not None:
        return Refusal(f"element type {wrong}", "use f16, bf16 or f32")
    if not step.image.numel:
        return Refusal("there is nothing to compute: a size is 0")
    if not set(region.inputs).isdisjoint(region.outputs):
        return Refusal("an output is also an input")
    return None if step.signs is None else _refuse_signs(step)


def _refuse_signs(step: Step) -> Refusal | None:
    """A tile holds the bits of whole bytes only along what lies side by side."""
    asked, usual = step.attrs["packed"], side_by_side(step.image)
    if asked == usual:
        return None
    if usual == "none":
        return Refusal("fewer than 8 elements side by side fill no byte", "leave packed out")
    return Refusal(f"signs along {asked} are not side by side", f'use packed="{usual}"')


# ---- how it is run -------------------------------------------------------------------------------


def _division(image: TensorType, target: Target, knobs: Mapping[str, Any]) -> Division:
    chosen = {k: v for k, v in knobs.items() if k not in ("recipe", "tile")}
    tile = knobs["tile"] * 8 // image.dtype.bits
    return divide(image.shape, is_channels_last(image), target.units, tile=tile, **chosen)


def _must(read: Read, region: Region) -> Step:
    step = read(region)
    assert isinstance(step, Step), "only called on regions that were accepted"
    return step


def _knobs(read: Read, region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    image = _must(read, region).image
    usual: dict[str, Any] = {"tile": TILE, "warps": 4}
    if _division(image, target, usual).once:
        return usual, {**usual, "warps": 8}, {**usual, "once": False}
    narrow = {"width": NARROW} if read is backward_step and is_channels_last(image) else {}
    return (
        {**usual, **narrow},
        {**usual, "waves": 3, "deep": 4, "stages": 4, "each": 1},
        {"tile": 2 * TILE, "warps": 8, "deep": 3},
    )


def _seconds(read: Read, region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """Every tensor once, what the second pass reads once more, and the launches."""
    step, types = _must(read, region), region.graph.types
    moved = sum(v is not None for v in step.images)
    written = sum(v is not None and types[v].shape == step.image.shape for v in step.results)
    again = 1 if read is forward_step else 2
    size = (moved + written + again) * step.image.nbytes
    size += types[step.signs].nbytes if step.signs else 0
    speed = target.cache_bandwidth if size < target.cache_bytes / 2 else target.stream
    speed = max(speed, target.stream) * REACHED
    d = _division(step.image, target, knobs)
    if d.once:
        return size / min(speed, d.blocks * ALONE) + target.launch
    return size / speed + 3 * target.launch


def _build(read: Read, region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.batch_norm import backward, forward

    step = _must(read, region)
    d = _division(step.image, ctx.target, knobs)
    given = (*region.inputs, *region.outputs)
    types = region.graph.types
    moved = {
        v: step.image if types[v].shape == step.image.shape else types[v].with_layout("contiguous")
        for v in (*step.images, *step.params, step.signs)
        if v is not None and not _lies_well(types[v], step.image)
    }
    slots = [
        (None if v is None else given.index(v), moved.get(v or ""))
        for v in (*step.images, *step.params, *step.results, step.signs)
    ]
    attrs = {name: value for name, value in step.attrs.items() if name != "packed"}
    call = partial(_forward if read is forward_step else _backward, d, attrs)
    run = forward if read is forward_step else backward

    def kernel(*tensors: torch.Tensor) -> None:
        call(run, [_fetch(tensors, at, order) for at, order in slots])

    copies = sum(types[v].nbytes for v in moved)
    note = "one kernel" if d.once else "a pass, a merge, a pass"
    return Kernel(kernel, writes=True, workspace=d.workspace + copies, note=note)


def _lies_well(t: TensorType, image: TensorType) -> bool:
    if t.shape != image.shape:
        return t.is_layout("contiguous")
    return same_strides(t.shape, t.strides, image.strides)


def _fetch(
    tensors: Sequence[torch.Tensor], at: int | None, order: TensorType | None
) -> torch.Tensor | None:
    if at is None:
        return None
    return tensors[at] if order is None else lay(tensors[at], order)


def _forward(
    d: Division,
    attrs: Mapping[str, Any],
    run: Callable[..., None],
    tensors: list[torch.Tensor | None],
) -> None:
    x, residual, weight, bias, old_mean, old_var, y, new_mean, new_var, mean, rstd, signs = tensors
    assert x is not None
    if mean is None or rstd is None:  # nobody reads them, the second pass does
        spare = torch.empty(2, d.channels, dtype=torch.float32, device=x.device)
        mean, rstd = (spare[0] if mean is None else mean), (spare[1] if rstd is None else rstd)
    given = (x, weight, bias, old_mean, old_var, residual)
    run(d, *given, y, new_mean, new_var, mean, rstd, signs, **attrs)


def _backward(
    d: Division,
    attrs: Mapping[str, Any],
    run: Callable[..., None],
    tensors: list[torch.Tensor | None],
) -> None:
    grad, x, y, residual, mean, rstd, weight, bias, dx, dweight, dbias, dz, signs = tensors
    given = (grad, x, mean, rstd, weight, bias, y, residual, signs)
    run(d, *given, dx, dweight, dbias, dz, **attrs)


def _recipe(name: str, read: Read) -> Recipe:
    return Recipe(
        name,
        partial(_refuse, read),
        partial(_build, read),
        partial(_knobs, read),
        partial(_seconds, read),
        build_s=BUILD_S,
    )


BATCH_NORM = (_recipe("batch_norm", forward_step), _recipe("batch_norm_backward", backward_step))
