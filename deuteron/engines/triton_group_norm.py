"""Group and instance norm with the activation that follows: the recipe around
``kernels/triton/norm_split.py``. Generated code reads x three times; these kernels read it once
where registers hold a group, and twice where they hold parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.kernels.triton.norm_ways import Way, Work, forward_ways, is_held, scratch
from deuteron.ops.batch_norm import ACTIVATIONS
from deuteron.policy import Policy
from deuteron.target import Target

NORMS = ("group_norm", "instance_norm")
# of the bandwidth of a copy, as measured on an H200: groups in registers with room for others,
# groups that leave none, parts of groups, which are read twice
HELD, ALONE, PARTS = 0.88, 0.74, 0.62


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    if not region.nodes or region.nodes[0].op not in NORMS:
        return Refusal(f"runs {' or '.join(NORMS)}, and an activation after it")
    refusal = refuse_anywhere(target) or _not_a_norm_and_its_activation(region)
    if refusal is not None:
        return refusal
    types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
    if not all(t.numel for t in types):
        return Refusal("there is nothing to compute: a size is 0")
    if not all(t.is_layout("contiguous") for t in types):
        return Refusal("a tensor is not in row-major order", 'use to_layout(x, "contiguous")')
    if not forward_ways(_work(region)):
        return Refusal("registers hold neither a group nor an equal part of one")
    return None


def _not_a_norm_and_its_activation(region: Region) -> Refusal | None:
    norm, *rest = region.nodes
    if len(rest) > 1 or (rest and (rest[0].op not in ACTIVATIONS or len(rest[0].uses) != 1)):
        return Refusal(f"takes one activation along, not {' + '.join(n.op for n in rest)}")
    if region.outputs != (region.nodes[-1].output,):
        return Refusal("the norm's own result is read, too", "let the activation alone read it")
    kinds = {region.graph.types[v].dtype for v in (norm.uses[0], region.outputs[0])}
    return Refusal("changes the element type", "cast after the region") if len(kinds) > 1 else None


def _given(node: Node) -> tuple[str | None, ...]:
    """x, weight and bias."""
    return (*node.inputs, None, None)[:3]


def _work(region: Region) -> Work:
    norm, *rest = region.nodes
    x = region.graph.types[norm.uses[0]]
    groups = norm.attrs.get("groups", x.shape[1])
    rows = x.shape[0] * groups
    act = rest[0].op if rest else "none"
    slope = rest[0].attrs.get("negative_slope", 0.0) if rest else 0.0
    return Work(
        rows,
        x.numel // rows,
        norm.attrs["eps"],
        True,
        x.dtype.bits // 8,
        1,
        groups,
        x.shape[1] // groups,
        act,
        slope,
    )


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    return [asdict(way) for way in forward_ways(_work(region))]


def _way(knobs: Mapping[str, Any]) -> Way:
    return Way(**{k: v for k, v in knobs.items() if k != "recipe"})


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The bytes at the speed that such kernels reach; parts take a second launch."""
    way = _way(knobs)
    reached = PARTS if way.each else HELD if is_held(_work(region), way) else ALONE
    once = modelled_seconds(region_cost(region), main_dtype(region), reached, False, target)
    return once + bool(way.each) * target.launch


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.norm import forward

    work, way = _work(region), _way(knobs)
    call = forward(work, way)
    given = (*region.inputs, *region.outputs)
    order = (*_given(region.nodes[0]), region.outputs[0])
    places = [None if v is None else given.index(v) for v in order]

    def run(*tensors: Any) -> None:
        call(*[None if p is None else tensors[p] for p in places])  # type: ignore[arg-type]

    note = "parts" if way.each else "held"
    return Kernel(run, writes=True, workspace=scratch(work, way, 0), note=note)


GROUP_NORM = Recipe("group_norm", _refuse, _build, _knobs, _seconds, build_s=0.4)
