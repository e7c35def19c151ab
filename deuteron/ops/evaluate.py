"""Run a graph by the references alone: the ground truth with which every engine is compared."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch

from deuteron.ir.graph import Graph, Node
from deuteron.ops import table
from deuteron.ops.opdef import Fusion

# Classes whose operators accept a rank-0 tensor on the CPU beside tensors on a GPU.
TAKES_NUMBERS = (Fusion.ELEMENTWISE, Fusion.BROADCAST)


def run_node(node: Node, args: list[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """The results of the reference for one node."""
    op = table.get(node.op)
    args = args if op.variadic else args + [None] * (len(op.inputs) - len(args))
    result: Any = op.reference(*args, **node.attrs)
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def _makes_floats(graph: Graph, node: Node) -> bool:
    """Whether an elementwise operator makes floats of integers, as sin and div do."""
    if table.get(node.op).fusion not in TAKES_NUMBERS:
        return False
    makes = graph.types[node.output].dtype.is_float
    return makes and not any(graph.types[v].dtype.is_float for v in node.uses)


def evaluate(
    graph: Graph,
    inputs: Mapping[str, torch.Tensor],
    *,
    float64: bool = False,
    differentiable: bool = False,
) -> dict[str, torch.Tensor]:
    """Outputs of ``graph`` by name. With ``float64`` every floating tensor is widened first,
    so that the result can serve as the exact answer. With ``differentiable``, autograd and any
    active torch.func transform see the references' torch operators."""
    held = [c.data for c in graph.constants.values() if not c.is_scalar]
    first = next(iter((*inputs.values(), *held)), None)
    device = first.device if first is not None else torch.device("cpu")

    def lift(t: torch.Tensor) -> torch.Tensor:
        if not float64:
            return t
        if t.is_complex():
            return t.to(torch.complex128)
        return t.double() if t.is_floating_point() else t

    env = {name: lift(t) for name, t in inputs.items()}
    for name, constant in graph.constants.items():
        env[name] = lift(constant.data if constant.is_scalar else constant.data.to(device))
    with nullcontext() if differentiable else torch.no_grad():
        for node in graph.nodes:
            args = [None if v is None else env[v] for v in node.inputs]
            if device.type != "cpu" and table.get(node.op).fusion not in TAKES_NUMBERS:
                args = [None if t is None else t.to(device) for t in args]
            if float64 and _makes_floats(graph, node):
                args = [None if t is None else t.double() for t in args]
            if float64 and node.op == "cast" and graph.types[node.output].dtype.is_float:
                env[node.output] = env[node.uses[0]].double()  # the exact answer is not rounded
                continue
            env.update(zip(node.outputs, map(lift, run_node(node, args)), strict=True))
    return {name: env[value] for name, value in graph.outputs}


def implied(graph: Graph, found: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """For those of the values ``found`` by one run that follow exactly from others of them
    (``OpDef.implied``): what they have to be."""
    wanted: dict[str, torch.Tensor] = {}
    for node in graph.nodes:
        rule = table.get(node.op).implied
        if rule is not None:
            follow = rule([found.get(v) for v in node.outputs], node.attrs)
            wanted.update({node.outputs[i]: t for i, t in follow.items()})
    return {v: t for v, t in wanted.items() if v in found}
