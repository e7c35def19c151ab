"""Checks of the indices that a region receives: generated code uses them as addresses, so they must
be checked first. On a CPU the kernel checks them before it runs; on a GPU, where the host does not
wait for results, the generated code itself traps, as PyTorch's does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deuteron.engines.base import refuse_if
from deuteron.errors import BindError, GraphError
from deuteron.ir.region import Region
from deuteron.ops.lookups import INDEX, LOOKUPS, root_of, size_of

Run = Callable[..., Any]
LOSSES = ("nll_loss", "cross_entropy", "cross_entropy_with_grad")
OPERATORS = (*LOOKUPS, *LOSSES)


@dataclass(frozen=True)
class Lookup:
    """The index of one operator, which enters the region as ``value``. Valid are 0 to ``size`` − 1,
    ``ignored``, and with ``wraps`` also −``size`` to −1, which count from the end."""

    op: str
    value: str
    size: int
    ignored: int | None = None
    wraps: bool = False

    def check(self, index: torch.Tensor) -> None:
        """Raise if an index is out of range."""
        if index.numel() == 0:
            return
        low, high = torch.aminmax(index)
        first = -self.size if self.wraps else 0
        if int(low) >= first and int(high) < self.size:
            return
        index = index.long()  # compared with bytes, a size of 300 would be taken for 44
        bad = (index < first) | (index >= self.size)
        if self.ignored is not None:
            bad &= index != self.ignored
        if bad.any():
            at = [int(i) for i in bad.nonzero()[0]]
            found, last = int(index[tuple(at)]), self.size - 1
            if self.ignored is not None:
                wrong, where = f"class {found} is not one of {self.size}", f"the target at {at}"
                asked = f"{self.op.removesuffix('_with_grad')} over {self.size} classes"
                remedy = f"use classes from 0 to {last}, or {self.ignored} for what is ignored"
                raise GraphError(wrong, asked=asked, where=where, remedy=remedy)
            asked, remedy = f"{self.op} from {self.size}", f"use indices from {first} to {last}"
            raise BindError(f"index {found} at {at} is out of range", asked=asked, remedy=remedy)


def lookups(region: Region) -> list[Lookup]:
    """The lookups of the region; refuses if the region itself computes an index."""
    made = {out: node for node in region.nodes for out in node.outputs}
    found = []
    for node in region.nodes:
        value = node.inputs[INDEX] if node.op in OPERATORS else None
        if value is None or region.graph.types[value].dtype.is_float:  # classes as probabilities
            continue
        size = size_of(node, region.graph.types[node.uses[0]].shape)
        root, wraps = root_of(value, made, region.graph.constants, size)
        made_here = f"the index of {node.op} is computed in the region, where nobody can check it"
        refuse_if(root in made, made_here, "let it be a value of its own")
        refuse_if(
            root in region.graph.constants, f"the index of {node.op} is one number", quiet=True
        )
        found.append(Lookup(node.op, root, size, node.attrs.get("ignore_index"), wraps))
    return found


def explained(run: Run, found: Sequence[Lookup], inputs: Sequence[str]) -> Run:
    """``run``, which raises its own error for a wrong index, with our error in its place."""
    if not found:
        return run
    look = checked(lambda *tensors: None, found, inputs)

    def run_and_look(*tensors: torch.Tensor) -> Any:
        try:
            return run(*tensors)
        except (IndexError, RuntimeError):
            look(*tensors)
            raise

    return run_and_look


def checked(run: Run, found: Sequence[Lookup], inputs: Sequence[str]) -> Run:
    """A function that checks the indices among its arguments and then calls ``run``."""
    places = [(lookup, inputs.index(lookup.value)) for lookup in found]

    def look_and_run(*tensors: torch.Tensor) -> Any:
        for lookup, place in places:
            lookup.check(tensors[place])
        return run(*tensors)

    return look_and_run
