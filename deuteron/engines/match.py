"""Recognising the common shape of a region: a product, then residual, activation, in a chain.

Every engine that fuses epilogues asks here, so that they agree on what they saw.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from deuteron.engines.base import Refusal
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table


@dataclass(frozen=True)
class Chain:
    """``act(anchor(...) + residual)``; residual and activation may be absent."""

    anchor: Node
    residual: str | None
    act: Node | None
    x: TensorType
    weight: TensorType
    out: TensorType

    @property
    def bias(self) -> str | None:
        return self.anchor.inputs[2] if len(self.anchor.inputs) > 2 else None

    @property
    def act_name(self) -> str:
        return self.act.op if self.act is not None else "none"


def chain(region: Region, anchors: tuple[str, ...]) -> Chain | Refusal:
    """The region as a :class:`Chain`, or the reason why it is not one."""
    if not region.nodes or region.nodes[0].op not in anchors:
        found = region.ops[0] if region.nodes else "nothing"
        return Refusal(f"starts with {found}, not with {' or '.join(anchors)}", quiet=True)
    if len(region.outputs) != 1:
        return Refusal(
            f"has {len(region.outputs)} outputs", "let only one value of the region be read outside"
        )
    anchor, *rest = region.nodes
    value, residual, act = anchor.output, None, None
    dtype = region.graph.types[value].dtype
    for node in rest:
        if region.graph.types[node.output].dtype != dtype:
            return Refusal(f"{node.op} changes the element type", "cast after the region")
        if act is not None:
            return Refusal(f"{node.op} follows the activation {act.op}")
        if value not in node.uses:
            return Refusal(f"{node.op} does not read the product")
        if node.op == "add" and residual is None:
            other = [v for v in node.inputs if v != value]
            if len(other) != 1 or other[0] is None or region.graph.scalar(other[0]) is not None:
                return Refusal("adds the product to itself or to a number")
            if region.graph.types[other[0]].shape != region.graph.types[value].shape:
                return Refusal("adds a tensor of another shape", "expand it first")
            if region.graph.types[other[0]].dtype != dtype:
                return Refusal("adds a tensor of another element type", "cast it first")
            residual = other[0]
        elif len(node.uses) == 1:
            act = node
        else:
            return Refusal(f"{node.op} is not an epilogue of this engine")
        value = node.output
    x, w = anchor.inputs[0], anchor.inputs[1]
    assert x is not None and w is not None
    types = region.graph.types
    return Chain(anchor, residual, act, types[x], types[w], types[value])


def places_of(pairs: Iterable[tuple[str, str]], region: Region) -> tuple[tuple[int, int], ...]:
    """Pairs of a result and an input by their places, as :class:`Kernel` has them."""
    return tuple((region.outputs.index(out), region.inputs.index(v)) for out, v in pairs)


def only_node(region: Region, ops: Mapping[str, Any]) -> Node | Refusal:
    """The region's one node if it is among ``ops``."""
    if not set(region.ops) & set(ops):
        return Refusal(f"runs {', '.join(ops)}, not {' + '.join(region.ops)}", quiet=True)
    if len(region.nodes) != 1:
        return Refusal(f"runs {', '.join(ops)} alone, not {' + '.join(region.ops)}")
    return region.nodes[0]


RESULTS = {  # of operators that have several, as kernels call them
    "batch_norm_act": "y new_mean new_var mean rstd signs".split(),
    "batch_norm_train": "y new_mean new_var mean rstd".split(),
    "batch_norm_act_grad": "dx dweight dbias dz".split(),
}


def operands(node: Node) -> dict[str, str]:
    """What a node reads, by the names of its inputs; what is left out is not there."""
    slots = (slot.rstrip("?") for slot in table.get(node.op).inputs)
    return {slot: v for slot, v in zip(slots, node.inputs, strict=False) if v is not None}


def results(region: Region, node: Node) -> dict[str, str]:
    """What a norm makes that is read outside of the region, by the kernels' names for it."""
    weight = ["dweight"] if "weight" in operands(node) else []
    usual = ["dx", *weight, "dbias"] if node.op.endswith("_grad") else ["y"]
    names = RESULTS.get(node.op, usual)
    pairs = zip(names, node.outputs, strict=False)
    return {name: value for name, value in pairs if value in region.outputs}
