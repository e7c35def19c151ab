"""The contract every engine keeps.

An engine looks at a region and either refuses, with a reason and a remedy, or offers
candidates; it prices them, and builds the one that was chosen. Deciding must be cheap: no
engine imports anything heavy before ``build``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol, runtime_checkable

import torch

from deuteron.codegen.calls import Call, runner
from deuteron.ir.graph import Attrs
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target


@dataclass(frozen=True)
class Refusal:
    """Why an engine will not run a region, and the smallest change that would let it in.

    A ``quiet`` one is not shown to people: the engine is for another kind of machine or for other
    operators, so that there is nothing that they could change. Of a region that is ``too_long``
    the engine may run parts, which a plan then offers to it."""

    reason: str
    remedy: str = ""
    quiet: bool = False
    too_long: bool = False


class Refused(Exception):
    """Raised where somebody finds out why a region cannot be run. ``args``: the refusal."""


def refuse_if(wrong: object, reason: str, remedy: str = "", quiet: bool = False) -> None:
    """Stop with a refusal if something is wrong; who asked for a verdict makes it one."""
    if wrong:
        raise Refused(Refusal(reason, remedy, quiet))


def as_answer(check: Callable[..., Refusal | None]) -> Callable[..., Refusal | None]:
    """``check``, with a refusal that it raises as its answer."""

    @wraps(check)
    def asked(*args: Any) -> Refusal | None:
        try:
            return check(*args)
        except Refused as found:
            refusal: Refusal = found.args[0]
            return refusal

    return asked


@dataclass(frozen=True)
class Candidate:
    """One way an engine offers to run a region. Knobs change speed, never the mathematics."""

    engine: str
    version: str
    knobs: Mapping[str, Any] = field(default_factory=Attrs)
    build_s: float = 0.0  # expected seconds to build; the planner keeps its budget by it
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.knobs, Attrs):  # a plain dict is welcome
            object.__setattr__(self, "knobs", Attrs(self.knobs))

    def __str__(self) -> str:
        inside = ", ".join(f"{k}={v}" for k, v in self.knobs.items())
        return f"{self.engine}[{inside}]" if inside else self.engine


@dataclass(frozen=True)
class Kernel:
    """A region, built. ``fn`` takes the region's inputs in order.

    With ``writes`` it is handed the output tensors after the inputs (or, with ``out_keyword``,
    its one output as ``out=``) and fills them, so that the plan's arena can hold them. Without,
    it returns new tensors: one, or a tuple; vendor calls that allocate their result are of this
    kind. ``workspace`` is scratch memory in bytes that one call needs at most, for the policy
    to judge. ``calls`` is what a kernel of generated code does, as data: the plan hands such
    kernels that follow each other to one native call. ``over`` are pairs of a result and an input:
    that result may take the memory of that input, where nobody needs it any more.
    """

    fn: Callable[..., Any]
    writes: bool = False
    out_keyword: bool = False
    workspace: int = 0
    note: str = ""
    calls: tuple[Call, ...] = ()
    over: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def generated(calls: Sequence[Call], workspace: int = 0) -> Kernel:
        """A kernel that makes these calls; the arguments are the inputs, then the outputs."""
        return Kernel(runner(calls), writes=True, workspace=workspace, calls=tuple(calls))

    def fill(self, args: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Call a kernel that writes."""
        if self.out_keyword:
            self.fn(*args, out=outs[0])
        else:
            self.fn(*args, *outs)


@dataclass(frozen=True)
class BuildContext:
    """What a build may use: the device, the policy, and constants that will never change."""

    target: Target
    device: torch.device
    policy: Policy
    constants: Mapping[str, torch.Tensor]


@runtime_checkable
class Engine(Protocol):
    """Who can run a region. ``name`` and ``version`` are part of every remembered measurement:
    change the version when the same knobs may run at another speed."""

    name: str
    version: str

    def refuse(self, region: Region, target: Target, policy: Policy) -> Refusal | None:
        """None if this engine can run the region on this target, else why not."""

    def candidates(self, region: Region, target: Target, policy: Policy) -> Sequence[Candidate]:
        """The ways it offers, most promising first. Only called if it did not refuse."""

    def estimate(self, region: Region, target: Target, candidate: Candidate) -> float:
        """Seconds the candidate should take, by counting bytes and operations."""

    def build(self, region: Region, candidate: Candidate, ctx: BuildContext) -> Kernel:
        """Make it runnable."""
