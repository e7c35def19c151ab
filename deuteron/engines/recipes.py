"""A recipe: one call or kernel, the regions it fits, and how to build it.

``vendor_fused`` and ``cpu_kernels`` are lists of these. A recipe refuses like an engine does.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from deuteron.engines.base import BuildContext, Candidate, Kernel, Refusal, as_answer, refuse_if
from deuteron.engines.libraries import fused_seconds
from deuteron.engines.match import Chain, chain
from deuteron.engines.roofline import leaves_gaps
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.conv import is_uneven
from deuteron.policy import Policy
from deuteron.target import Target

WHOLE = "writes whole buffers, not parts of larger ones"
Refuse = Callable[[Region, Target, Policy], Refusal | None]
Build = Callable[[Region, Mapping[str, Any], BuildContext], Kernel]


def one_way(region: Region, target: Target, policy: Policy) -> Sequence[dict[str, Any]]:
    """No knobs: a single way to make the call."""
    return ({},)


Knobs = Mapping[str, Any]
Amount = float | Callable[[Region, Target], float]


def library(penalty: Amount = 1.0, overhead: Amount = 0.0) -> Callable[..., float]:
    """An estimate for a library call: what such calls usually take, with their distance from the
    roofline multiplied by ``penalty``, plus ``overhead`` seconds that the call costs however little
    it does."""

    def seconds(region: Region, target: Target, knobs: Knobs) -> float:
        factor = penalty if isinstance(penalty, int | float) else penalty(region, target)
        extra = overhead if isinstance(overhead, int | float) else overhead(region, target)
        return fused_seconds(region, target, factor) + extra

    return seconds


@dataclass(frozen=True)
class Recipe:
    """One kind of call or kernel. ``ops``: the operators it is for; a region without any of them is
    not offered to it. ``check`` refuses regions that it cannot run, ``build`` builds it, ``knobs``
    lists what can be tuned, ``seconds`` estimates its time, ``build_s`` is how long a build takes.
    ``kind``: the kind of machine it is for, "" for any. ``share``: the share of the plain
    algorithm's operations that it does. ``by_estimate``: a plan may choose it by estimate alone.
    ``strided``: it writes results with gaps, into part of a larger buffer. ``unseen``: see
    ``Candidate.unseen_s``."""

    name: str
    ops: Collection[str]
    check: Refuse
    build: Build
    knobs: Callable[[Region, Target, Policy], Sequence[Knobs]] = one_way
    seconds: Callable[[Region, Target, Knobs], float] = field(default=library())
    build_s: float = 0.0
    kind: str = ""
    share: Callable[[Region, Knobs], float] = lambda region, knobs: 1.0
    by_estimate: bool = True
    strided: bool = False
    unseen: Callable[[Region, Target, Knobs], float] = lambda region, target, knobs: 0.0

    def refuse(self, region: Region, target: Target, policy: Policy) -> Refusal | None:
        """None if it takes the region, else why not."""
        if self.kind not in ("", target.kind):
            return Refusal("is for another kind of machine", quiet=True)
        if not self.strided and leaves_gaps(region):
            return Refusal(WHOLE, quiet=True)
        return as_answer(self.check)(region, target, policy)


class RecipeEngine:
    """An engine that is a list of recipes; those that fit a region compete. ``every`` lists all of
    them. ``kind``: the kind of machine the engine is for, "" for any."""

    name: str
    version: str
    every: tuple[Recipe, ...]
    kind: str = ""
    strided = True  # each recipe says for itself whether it is

    def recipes(self, target: Target) -> tuple[Recipe, ...]:
        """The recipes for this kind of machine, the most promising first."""
        return tuple(r for r in self.every if r.kind in ("", target.kind))

    def check(self, region: Region, target: Target) -> None:
        """Refuse regions that no recipe can run. Subclasses override this."""

    def _asked(self, region: Region, target: Target) -> list[Recipe]:
        """The recipes that are for at least one operator of the region."""
        ops = set(region.ops)
        return [r for r in self.recipes(target) if not ops.isdisjoint(r.ops)]

    def refuse(self, region: Region, target: Target, policy: Policy) -> Refusal | None:
        if self.kind and target.kind != self.kind:
            place, device = ("GPUs", "cuda") if self.kind == "cuda" else ("the CPU", "cpu")
            return Refusal(f"is for {place}", f"plan for {place}: device={device!r}", quiet=True)
        asked = self._asked(region, target)
        if not asked:
            return Refusal(f"has no kernel for {' + '.join(region.ops)}", quiet=True)
        refusal = as_answer(self.check)(region, target)
        if refusal is not None:
            return refusal
        found: dict[str, Refusal] = {}
        for recipe in asked:
            refusal = recipe.refuse(region, target, policy)
            if refusal is None:
                return None
            found[recipe.name] = refusal
        loud = {name: r for name, r in found.items() if not r.quiet} or found
        first = next(iter(loud.values()))
        if len({r.reason for r in loud.values()}) == 1:
            return first
        reasons = "; ".join(f"{name}: {r.reason}" for name, r in loud.items())
        remedy = next((r.remedy for r in loud.values() if r.remedy), "")
        return Refusal(reasons, remedy, first.quiet)

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        if as_answer(self.check)(region, target) is not None:
            return []
        return [
            Candidate(
                self.name,
                self.version,
                {"recipe": recipe.name, **knobs},
                recipe.build_s,
                by_estimate=recipe.by_estimate,
                unseen_s=recipe.unseen(region, target, knobs),
            )
            for recipe in self._asked(region, target)
            if recipe.refuse(region, target, policy) is None
            for knobs in recipe.knobs(region, target, policy)
        ]

    def estimate(self, region: Region, target: Target, candidate: Candidate) -> float:
        return self._recipe(candidate, target).seconds(region, target, candidate.knobs)

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        return self._recipe(candidate, ctx.target).build(region, candidate.knobs, ctx)

    def share(self, region: Region, target: Target, candidate: Candidate) -> float:
        """The part of the plain algorithm's operations that a candidate executes."""
        return self._recipe(candidate, target).share(region, candidate.knobs)

    def writes_gaps(self, candidate: Candidate, target: Target) -> bool:
        """Whether a candidate can write its results with any strides, into part of a buffer."""
        return self._recipe(candidate, target).strided

    def _recipe(self, candidate: Candidate, target: Target) -> Recipe:
        wanted = candidate.knobs["recipe"]
        return next(r for r in self.recipes(target) if r.name == wanted)


def required_chain(region: Region, anchors: tuple[str, ...], constant: bool = True) -> Chain:
    """The region as a chain that starts with one of ``anchors``; refuses any other. With
    ``constant`` the weight and the bias must be known when the plan is built."""
    found = chain(region, anchors)
    if constant:
        given = "the weight is an input of the plan, so it cannot be packed ahead"
        remedy = "make it a constant: g.constant(w), or dt.optimize a module that owns it"
        refuse_if(found.anchor.inputs[1] not in region.constants, given, remedy)
        open_bias = found.bias not in {None, *region.constants}
        refuse_if(open_bias, "the bias is an input of the plan", "make it a constant")
    return found


def place(region: Region, value: str | None) -> int:
    """The position of a value among the kernel's arguments."""
    assert value is not None
    return region.inputs.index(value)


def place_or_none(region: Region, value: str | None) -> int | None:
    """The same for a value that may be absent."""
    return None if value is None else region.inputs.index(value)


def activate(act: Node | None) -> Callable[[torch.Tensor], Any] | None:
    """A function that applies the activation in place, or None if there is no activation."""
    from deuteron.engines.torch_engine import INPLACE

    if act is None:
        return None
    if act.op in INPLACE:
        return partial(INPLACE[act.op], **act.attrs)
    reference = partial(table.get(act.op).reference, **act.attrs)
    return lambda t: t.copy_(reference(t))


def refuse_windows(c: Chain) -> None:
    """Refuse convolutions that are not a plain matrix product over pixels (1×1, no padding)."""
    a, kernel = c.anchor.attrs, c.weight.shape[2:]
    refuse_if(a["transposed"] or a["groups"] != 1, "is transposed or grouped")
    wide = any(k != 1 for k in kernel) or any(a["padding"])
    refuse_if(wide, f"has a {'×'.join(map(str, kernel))} kernel or padding")
    in_order = c.x.is_layout("nhwc")
    refuse_if(not in_order, "the input is not in nhwc", "use Policy(layout='auto')")


def refuse_uneven(c: Chain) -> None:
    """Refuse convolutions with more padding on one side of x than on the other."""
    refuse_if(is_uneven(c.anchor.attrs), "the library pads both sides alike", "pad first")


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """An nhwc tensor [N, C, H, W] as a matrix [N·H·W, C], without copying."""
    return x.permute(0, *range(2, x.ndim), 1).reshape(-1, x.shape[1])
