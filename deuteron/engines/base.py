"""The contract every engine keeps.

An engine looks at a region and either refuses, with a reason and a remedy, or offers
candidates; it prices them, and builds the one that was chosen. Deciding must be cheap: no
engine imports anything heavy before ``build``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Protocol, runtime_checkable

import torch

from deuteron.codegen.calls import Call, runner
from deuteron.errors import EngineError
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
    by_estimate: bool = field(default=True, compare=False)  # or taken only once it was measured
    # seconds that it costs a plan and a measurement of it alone does not show: estimates have them
    unseen_s: float = field(default=0.0, compare=False)

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
    kernels that follow each other to one native call. So it does with kernels that only launch what
    Triton compiled, which ``launches`` says. ``over`` are pairs of a result and an input: that
    result may take the memory of that input, where nobody needs it any more. ``wait``: the kernel
    only begins to make its one result, out of inputs that stay as they are until then, but for one
    that the result is written ``over``; whoever reads the result, or a view of it, calls this with
    it before.
    """

    fn: Callable[..., Any]
    writes: bool = False
    out_keyword: bool = False
    workspace: int = 0
    note: str = ""
    calls: tuple[Call, ...] = ()
    over: tuple[tuple[int, int], ...] = ()
    launches: bool = False
    wait: Callable[[torch.Tensor], torch.Tensor] | None = None

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


LINE, BLOCK = 64, 1 << 22  # bytes: where forms begin, and of memory for several


class Forms:
    """Constants in the forms that kernels read in their place: packed, transposed, transformed.

    A form is made once and lives as long as a kernel holds it, so plans that read the same
    constant in the same way share it. On a CPU those that are asked for one after another lie one
    behind another: a kernel that asks for memory ahead of time reaches what the next one reads.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)  # what is left of one
        # by constant and form: the form, and the constant, whose address is part of the key
        self._made: dict[Hashable, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self.nbytes = 0  # of all that live now

    def get(
        self,
        constant: torch.Tensor,
        how: Hashable,
        make: Callable[[torch.Tensor], torch.Tensor],
        limit: float,
    ) -> torch.Tensor:
        """``make(constant)``, or what that gave before under the same name ``how``."""
        place = constant.data_ptr(), constant.dtype, constant.shape, constant.stride()
        key = (*place, how)
        known = self._made.get(key)
        form = None if known is None else known[0]()
        if form is None:
            form = self._placed(make(constant))
            total = self.nbytes + form.nbytes
            if total > limit:
                wrong = f"its weight in another form takes {form.nbytes} bytes"
                remedy = "raise Policy(max_packed=…)"
                raise EngineError(f"{wrong}, more than max_packed leaves", remedy=remedy)
            gone = partial(self._gone, key, form.nbytes)
            self._made[key], self.nbytes = (weakref.ref(form, gone), constant), total
        return form

    def _placed(self, form: torch.Tensor) -> torch.Tensor:
        """The same behind the one before."""
        plain = form.device.type == "cpu" and form.layout is torch.strided and form.is_contiguous()
        size = -(-form.nbytes // LINE) * LINE if plain else 0
        if not 0 < size <= BLOCK // 2:
            return form
        with torch.inference_mode(False), torch.no_grad():  # later ones may come in another mode
            if len(self._block) < size:
                self._block = torch.empty(BLOCK, dtype=torch.uint8)
            place, self._block = self._block[: form.nbytes], self._block[size:]
            return place.view(form.dtype).view(form.shape).copy_(form)

    def _gone(self, key: Hashable, nbytes: int, form: weakref.ref[torch.Tensor]) -> None:
        self.nbytes -= nbytes
        if key in self._made and self._made[key][0] is form:
            del self._made[key]


@dataclass(frozen=True)
class BuildContext:
    """What a build may use: the device, the policy, and constants that will never change.

    A kernel that reads a constant in another form asks :meth:`form` for it, which plans share;
    ``taken`` lists those that were asked for.
    """

    target: Target
    device: torch.device
    policy: Policy
    constants: Mapping[str, torch.Tensor]
    forms: Forms = field(default_factory=Forms)
    taken: list[torch.Tensor] = field(default_factory=list)

    def form(
        self, value: str | None, how: Hashable, make: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """The constant ``value`` as ``make`` arranges it; ``how`` names all that depends on."""
        limit = self.policy.packed_limit
        found = self.forms.get(self.constants[value or ""], how, make, limit)
        self.taken.append(found)
        return found


@runtime_checkable
class Engine(Protocol):
    """Who can run a region. ``name`` and ``version`` are part of every remembered measurement:
    change the version when the same knobs may run at another speed. An engine whose kernels write
    results with any strides, so also into part of a larger buffer, says so by an attribute
    ``strided`` that is true; others are not asked about such regions."""

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
