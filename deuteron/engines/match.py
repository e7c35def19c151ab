"""Recognising the common shape of a region: a product, then a residual, then an activation.

All engines that fuse epilogues use these functions, so that they agree on what a region is.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from deuteron.codegen.lower import lower
from deuteron.codegen.scalar import ScalarProgram
from deuteron.engines.base import Refusal, Refused, refuse_if
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.formula import CannotLower


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

    @property
    def is_conv(self) -> bool:
        return self.anchor.op in ("conv", "conv_dx")

    @property
    def spreads(self) -> bool:
        """Whether each pixel of x is spread over a window of the result, instead of each pixel of
        the result being a sum over a window of x. True of a transposed convolution, and of the
        input gradient of one that is not transposed."""
        return self.is_conv and (self.anchor.op == "conv_dx") != self.anchor.attrs["transposed"]


def first_of(region: Region, ops: Collection[str]) -> Node:
    """The first node of a region; refuses unless it is one of ``ops`` and the region has a single
    output."""
    first = region.ops[0] if region.nodes else "nothing"
    starts = f"starts with {first}, not with {' or '.join(ops)}"
    refuse_if(first not in ops, starts, quiet=True)
    several = "let only one value of the region be read outside"
    refuse_if(len(region.outputs) != 1, f"has {len(region.outputs)} outputs", several)
    return region.nodes[0]


def chain(region: Region, anchors: tuple[str, ...]) -> Chain:
    """The region as a :class:`Chain`; refuses if it is not one."""
    anchor, types = first_of(region, anchors), region.graph.types
    value, residual, act = anchor.output, None, None
    dtype = types[value].dtype
    for node in region.nodes[1:]:
        changes = types[node.output].dtype != dtype
        refuse_if(changes, f"{node.op} changes the element type", "cast after the region")
        refuse_if(act is not None, f"{node.op} follows the activation {act and act.op}")
        refuse_if(value not in node.uses, f"{node.op} does not read the product")
        if node.op == "add" and residual is None:
            other = [v for v in node.uses if v != value and region.graph.scalar(v) is None]
            refuse_if(len(other) != 1, "adds the product to itself or to a number")
            (residual,) = other
            apart = types[residual].shape != types[value].shape
            refuse_if(apart, "adds a tensor of another shape", "expand it first")
            odd = types[residual].dtype != dtype
            refuse_if(odd, "adds a tensor of another element type", "cast it first")
        else:
            refuse_if(len(node.uses) != 1, f"{node.op} is not an epilogue of this engine")
            act = node
        value = node.output
    x, w = anchor.uses[:2]
    return Chain(anchor, residual, act, types[x], types[w], types[value])


def live_fraction(c: Chain) -> float:
    """The fraction of a convolution's taps that fall inside the image and not on its padding."""
    part = 1.0
    for d, taps in enumerate(c.weight.shape[2:]):
        inside = sum(len(reach(c, d, tap)[0]) for tap in range(taps))
        part *= inside / (taps * c.out.shape[2 + d])
    return part


def reach(c: Chain, d: int, tap: int) -> tuple[range, int]:
    """For one ``tap`` of the kernel along the spatial dimension ``d``: the window positions at
    which the pixel under the tap lies inside the image, and the offset of that pixel from
    position · stride."""
    image, windows = (c.out, c.x) if c.spreads else (c.x, c.out)
    a, size = c.anchor.attrs, image.shape[2 + d]
    shift, stride = tap * a["dilation"][d] - a["padding"][d], a["stride"][d]
    first, last = max(0, -(shift // stride)), (size - 1 - shift) // stride
    return range(first, min(windows.shape[2 + d], last + 1)), shift


@lru_cache(maxsize=4096)
def _lowered(region: Region) -> ScalarProgram | Refusal:
    try:
        return lower(region)
    except CannotLower as found:  # do not cache it: its traceback keeps the callers' tensors alive
        return Refusal(found.reason, found.remedy, too_long=found.too_long)


def scalar_program(region: Region) -> ScalarProgram:
    """What the region computes for one element and one row; refuses if it has no such form."""
    found = _lowered(region)
    if isinstance(found, Refusal):
        raise Refused(found)
    return found


def places_of(pairs: Iterable[tuple[str, str]], region: Region) -> tuple[tuple[int, int], ...]:
    """Turn pairs of names (result, input) into pairs of positions, as ``Kernel.over`` has them."""
    return tuple((region.outputs.index(out), region.inputs.index(v)) for out, v in pairs)


def only_node(region: Region, ops: Mapping[str, Any]) -> Node:
    """The region's only node; refuses if there are several, or if it is not among ``ops``."""
    runs, here = f"runs {', '.join(ops)}", " + ".join(region.ops)
    refuse_if(not set(region.ops) & set(ops), f"{runs}, not {here}", quiet=True)
    refuse_if(len(region.nodes) != 1, f"{runs} alone, not {here}")
    return region.nodes[0]


RESULTS = {  # what the kernels call the results of operators that have several
    "batch_norm_act": "y new_mean new_var mean rstd signs".split(),
    "batch_norm_train": "y new_mean new_var mean rstd".split(),
    "batch_norm_act_grad": "dx dweight dbias dz again".split(),
}


def operands(node: Node) -> dict[str, str]:
    """What a node reads, by the names of its inputs; inputs that are left out have no entry."""
    slots = (slot.rstrip("?") for slot in table.get(node.op).inputs)
    return {slot: v for slot, v in zip(slots, node.inputs, strict=False) if v is not None}


def results(region: Region, node: Node) -> dict[str, str]:
    """The results of a norm that are read outside the region, by the kernels' names for them."""
    weight = ["dweight"] if "weight" in operands(node) else []
    usual = ["dx", *weight, "dbias"] if node.op.endswith("_grad") else ["y"]
    names = RESULTS.get(node.op, usual)
    pairs = zip(names, node.outputs, strict=False)
    return {name: value for name, value in pairs if value in region.outputs}
