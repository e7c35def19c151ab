"""torch's dropout on the CPU, with the mask that torch would draw."""

from typing import Any

import torch

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu.product import BUILD_S, CALL_S, refuse_elsewhere, roof
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Knobs, Recipe, one_way
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

TARGET = "aten.native_dropout.default"
WORD_S = 0.9e-9  # seconds of one thread to make a random word; each element takes two words


def _drops(region: Region) -> tuple[float, Any]:
    """The probability of a zero, and whether the call is in training mode, so that it drops."""
    node = only_node(region, {"aten": None})
    refuse_if(node.attrs["target"] != TARGET, "is not dropout", quiet=True)
    _, p, train = node.attrs["args"]
    return float(p), train is not False


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    p, trains = _drops(region)
    refuse_elsewhere(region, target)
    refuse_if(not trains or not 0.0 < p < 1.0, "drops nothing, or all")
    (given,) = (region.graph.types[v] for v in region.inputs)
    refuse_if(given.dtype.short != "f32", f"element type {given.dtype.short}, not f32")
    refuse_if(not given.is_layout("contiguous"), "x is not contiguous", "make it contiguous")
    refuse_if(len(region.outputs) != 2, "nobody reads the mask")
    from deuteron.kernels.cpu.dropout import draws_like_torch

    refuse_if(not draws_like_torch(), "this torch draws its random numbers in another way")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    (x,) = (region.graph.types[v] for v in region.inputs)
    return roof(region, target, 2 * WORD_S * x.numel) + 16 * x.numel / target.stream + 4 * CALL_S


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu.dropout import prepare_dropout

    x = region.graph.types[region.inputs[0]]
    draw, floats = prepare_dropout(x.numel, _drops(region)[0])
    first = region.outputs.index(region.nodes[0].outputs[0])

    def run(x: torch.Tensor, *outs: torch.Tensor) -> None:
        draw(torch.default_generator, x, outs[first], outs[1 - first])

    return Kernel(run, writes=True, workspace=4 * floats)


DROPOUT = Recipe("dropout", ("aten",), _refuse, _build, one_way, _seconds, BUILD_S)
