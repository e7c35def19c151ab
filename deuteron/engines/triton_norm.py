"""Gradients of norms: the recipe around ``kernels/triton/norm.py``.

The gradient of a norm sums along rows for dx and down the columns for dweight: one pass over
memory makes both, where generated code would take one for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton_here import refuse_anywhere
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.kernels.triton.norm_ways import Way, Work, is_held, scratch, ways
from deuteron.policy import Policy
from deuteron.target import Target

NORMS = {  # operator → whether its statistics have a mean
    "layer_norm_grad": True,
    "rms_norm_grad": False,
    "group_norm_grad": True,
    "instance_norm_grad": True,
}
REACHED = 0.92  # of the bandwidth of a copy, as measured for kernels of this kind
# how often groups' operands are read once more, as measured: held by a program that has a unit to
# itself, in parts, and in tiles one after the other
AGAIN = {"held": 1.4, "parts": 1.8, "looped": 2.6}
ROWS_LIMIT = 2**31 - 2**20  # rows are counted in 32 bits, with room for the last step


def _refuse(region: Region, target: Target, policy: Policy) -> Refusal | None:
    refusal = refuse_anywhere(target)
    if refusal is not None:
        return refusal
    node = only_node(region, NORMS)
    if isinstance(node, Refusal):
        return node
    if "dims" in node.attrs and node.attrs["activation"] != "none":
        return Refusal("takes an activation along after group and instance norm alone")
    types = [region.graph.types[v] for v in (*node.uses, *region.outputs)]
    if not all(t.numel for t in types):
        return Refusal("there is nothing to compute: a size is 0")
    if not all(t.is_layout("contiguous") for t in types):
        return Refusal("a tensor is not in row-major order", 'use to_layout(x, "contiguous")')
    if _sizes(region)[0] > ROWS_LIMIT:
        return Refusal("has more than 2³¹ rows", "split the batch")
    return None


def _sizes(region: Region) -> tuple[int, int]:
    """Rows that share statistics, and elements of each."""
    node = region.nodes[0]
    x = region.graph.types[node.inputs[0] or ""]
    if "dims" in node.attrs:
        columns = prod(x.shape[x.rank - node.attrs["dims"] :])
        return x.numel // columns, columns
    rows = x.shape[0] * node.attrs.get("groups", x.shape[1])
    return rows, x.numel // rows


def _work(region: Region) -> Work:
    node = region.nodes[0]
    x = region.graph.types[node.inputs[0] or ""]
    rows, columns = _sizes(region)
    reads = 2 + (_given(node)[3] is not None)
    groups = 0 if "dims" in node.attrs else node.attrs.get("groups", x.shape[1])
    each = x.shape[1] // groups if groups else 0
    eps, size = node.attrs["eps"], x.dtype.bits // 8
    bend = (node.attrs["activation"], node.attrs["slope"])
    return Work(rows, columns, eps, NORMS[node.op], size, reads, groups, each, *bend)


def _given(node: Node) -> tuple[str | None, ...]:
    """x, grad, weight, extra and offset."""
    return (*node.inputs, None, None, None)[:5]


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    return [asdict(way) for way in ways(_work(region), target.units)]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The bytes at the speed that such kernels reach, once more for what long rows and large
    groups read again, and the launches. Fewer rows than programs leave multiprocessors idle."""
    work, cost = _work(region), region_cost(region)
    once = modelled_seconds(cost, main_dtype(region), REACHED, False, target)
    times = float(work.kind == "long")
    if work.kind == "groups" and not is_held(work, _way(knobs)):
        times = AGAIN["parts" if knobs["each"] else "held" if knobs["channels"] else "looped"]
    again = times * cost.reads / target.stream
    launches = (knobs["programs"] > 1 or work.kind == "groups") + (work.kind == "long")
    return once + again + launches * target.launch


def _way(knobs: Mapping[str, Any]) -> Way:
    return Way(**{k: v for k, v in knobs.items() if k != "recipe"})


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.norm import backward

    node = region.nodes[0]
    work = _work(region)
    way = _way(knobs)
    call = backward(work, way)
    wanted = iter(node.outputs[1:])
    *read, offset = _given(node)
    dweight = next(wanted) if read[2] is not None else None
    order = (*read, node.outputs[0], dweight, next(wanted, None), offset)
    given = (*region.inputs, *region.outputs)
    places = [given.index(v) if v in given else None for v in order]

    def run(*tensors: Any) -> None:
        call(*[None if p is None else tensors[p] for p in places])

    sums = sum(p is not None for p in places[5:7])
    return Kernel(run, writes=True, workspace=scratch(work, way, sums), note=work.kind)


NORM_BACKWARD = Recipe("norm_backward", _refuse, _build, _knobs, _seconds, build_s=0.4)
