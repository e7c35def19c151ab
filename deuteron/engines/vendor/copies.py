"""Many tensors cast from one element type to another by one call: torch's kernel for lists of
tensors, which takes 64 tensors, or 320 chunks of them, per launch.

That kernel walks over memory and knows no strides. All sources must have one element type, all
results one too, and both tensors of a pair must be without gaps and in the same order; other pairs
torch copies one by one.
"""

import math
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import separate_seconds
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.ir.region import Region
from deuteron.ir.types import same_strides
from deuteron.policy import Policy
from deuteron.target import Target

FLOATS = ("f16", "bf16", "f32", "f64")
TENSORS, CHUNKS, CHUNK = 64, 320, 65536  # per launch, and the elements of a chunk


def is_copy(region: Region) -> bool:
    """Whether a region only casts floats to other floats, and each result has the memory order of
    its input."""
    for node in region.nodes:
        if node.op != "cast" or node.uses[0] not in region.inputs:
            return False
        old, new = (region.graph.types[v] for v in (node.uses[0], node.output))
        floats = old.dtype.short in FLOATS and new.dtype.short in FLOATS
        same = same_strides(new.shape, old.strides, new.strides)
        if not (floats and same and old.is_dense and new.is_dense and new.numel):
            return False
    return True


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(len(region.nodes) < 2 or not is_copy(region), "is not a list of casts", quiet=True)
    types = region.graph.types
    kinds = {(types[n.uses[0]].dtype, types[n.output].dtype) for n in region.nodes}
    refuse_if(len(kinds) > 1, "the casts are not between the same two types", quiet=True)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    alone = separate_seconds(region, target) - len(region.nodes) * target.launch
    chunks = sum(math.ceil(region.graph.types[v].numel / CHUNK) for v in region.outputs)
    launches = max(math.ceil(len(region.nodes) / TENSORS), math.ceil(chunks / CHUNKS))
    return alone + launches * target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    types, places = region.graph.types, (*region.inputs, *region.outputs)
    pairs = [(node.uses[0], node.output) for node in region.nodes]
    read, written = ([places.index(pair[i]) for pair in pairs] for i in (0, 1))
    # strides of axes of size 1 have no meaning, but torch compares them
    odd = [i for i, (old, new) in enumerate(pairs) if types[old].strides != types[new].strides]

    def run(*tensors: Any) -> None:
        new, old = [tensors[i] for i in written], [tensors[i] for i in read]
        for i in odd:
            old[i] = old[i].as_strided(new[i].shape, new[i].stride())
        torch._foreach_copy_(new, old)

    return Kernel(run, writes=True)


NAME = "copies"
COPIES = (Recipe(NAME, ("cast",), _refuse, _build, seconds=_seconds, kind="cuda"),)
