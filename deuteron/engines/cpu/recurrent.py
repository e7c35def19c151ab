"""Recurrent layers on the CPU: the recipe around ``kernels/cpu/recurrent.py``."""

from functools import partial

import torch

from deuteron.codegen.calls import Argument, Room, Word
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.cpu.product import BUILD_S, refuse_elsewhere, roof
from deuteron.engines.recipes import Knobs, Recipe, one_way, place
from deuteron.engines.roofline import region_cost
from deuteron.ir.region import Region
from deuteron.ops.recurrent import GATES
from deuteron.policy import Policy
from deuteron.target import Target

WEIGHTS = {1: "weight", 4: "bias", 5: "projection"}  # by position among the node's inputs


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_if(region.ops != ("recurrence",), "is not a recurrence alone")
    refuse_elsewhere(region, target)
    node = region.nodes[0]
    for at, name in WEIGHTS.items():
        value = (*node.inputs, None, None, None)[at]
        given = f"the {name} is an input of the plan, so it cannot be packed ahead"
        remedy = "make it a constant: g.constant(w), or dt.optimize a module that owns it"
        refuse_if(value not in {None, *region.constants}, given, remedy)
    x = region.graph.types[node.uses[0]]
    apart = x.shape[-1] > 1 and x.strides[-1] != 1
    refuse_if(apart, "the gates of x are not side by side", "make it contiguous")


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """The longer of the arithmetic and of reading the weight, once per time step."""
    types, node = region.graph.types, region.nodes[0]
    x, weight = (types[v] for v in node.uses[:2])
    cached = weight.nbytes < target.cache_bytes / 2
    speed = target.cache_bandwidth if cached else target.stream
    products = region_cost(region).flops / (target.rate("f32") * 0.7)
    return roof(region, target, max(products, x.shape[0] * weight.nbytes / speed))


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.cpu import recurrent

    types, node = region.graph.types, region.nodes[0]
    inputs = (*node.inputs, None, None, None)[:6]
    x, weight, h = (types[v or ""] for v in inputs[:3])
    cell, (ways, rows, features) = node.attrs["cell"], weight.shape
    gates = GATES[cell]
    sizes = (*x.shape[:2], ways, rows // gates, features)
    form = recurrent.Recurrence(
        cell, recurrent.rows_together(x.shape[1], gates), inputs[5] is not None, x.dtype.short
    )

    def packed(at: int, gates: int) -> torch.Tensor | None:
        if inputs[at] is None:
            return None
        return ctx.form(inputs[at], ("recurrence", gates), partial(recurrent.panels, gates=gates))

    weights = packed(1, gates), packed(4, gates), packed(5, 1)
    y = types[node.outputs[0]]
    steps = (*x.strides[:2], *y.strides[:2], *h.strides)
    steps += (0, 0, 0) if inputs[3] is None else types[inputs[3]].strides
    calls = recurrent.prepare_recurrence(form, sizes, steps, weights)
    results: list[Word] = [
        Argument(len(region.inputs) + region.outputs.index(v)) if v in region.outputs else 0
        for v in (*node.outputs, None)[:3]
    ]
    memory: Word = 0 if inputs[3] is None else Argument(place(region, inputs[3]))
    states = Argument(place(region, inputs[2])), memory
    made = calls(Argument(place(region, inputs[0])), results[0], *states, *results[1:])
    rooms = sum(4 * word.floats for word in made[-1].words if isinstance(word, Room))
    return Kernel.generated(made, workspace=rooms)


RECURRENCE = Recipe("recurrence", ("recurrence",), _refuse, _build, one_way, _seconds, BUILD_S)
