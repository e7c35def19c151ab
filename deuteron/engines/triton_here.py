"""What every kernel in Triton needs of the machine, and recipes for one operator at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from deuteron.engines.base import BuildContext, Kernel, Refusal
from deuteron.engines.recipes import ALONE, Knobs, Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target, has_triton

MOST = 2**31 - 2**20  # lines, places and programs, which kernels count in 32 bits


def refuse_anywhere(target: Target) -> Refusal | None:
    """Why nothing in Triton can run there, if so."""
    if not target.is_cuda:
        return Refusal("Triton runs on a GPU", "plan for a CUDA device", quiet=True)
    if not has_triton():
        return Refusal("Triton is not installed", "pip install triton")
    return None


def one_operator(
    name: str,
    ops: Collection[str],
    refuse: Callable[[Region, Node, Target], Refusal | None],
    knobs: Callable[[Region, Target], Sequence[Knobs]],
    seconds: Callable[[Region, Target, Knobs], float],
    build: Callable[[Region, Knobs, BuildContext], Kernel],
    build_s: float = 0.4,
) -> Recipe:
    """A recipe for each of ``ops`` by itself; ``refuse`` and ``knobs`` are asked where there is
    something to compute, on a GPU."""

    def wrong(region: Region, target: Target, policy: Policy) -> Refusal | None:
        if len(region.nodes) > 1:
            return ALONE
        if (elsewhere := refuse_anywhere(target)) is not None:
            return elsewhere
        if any(region.graph.types[v].numel == 0 for v in (*region.inputs, *region.outputs)):
            return Refusal("there is nothing to compute: a size is 0")
        return refuse(region, region.nodes[0], target)

    def ways(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
        return knobs(region, target)

    return Recipe(name, ops, wrong, build, ways, seconds, build_s)


def streamed(reached: float) -> Callable[[Region, Target, Knobs], float]:
    """An estimate: every tensor moved once, at a part of the bandwidth of a copy."""

    def seconds(region: Region, target: Target, knobs: Knobs) -> float:
        return modelled_seconds(region_cost(region), main_dtype(region), reached, False, target)

    return seconds


def settings(knobs: Knobs) -> dict[str, Any]:
    """The knobs without the name of the recipe."""
    return {name: value for name, value in knobs.items() if name != "recipe"}
