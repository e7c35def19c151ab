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

    A ``quiet`` refusal is not shown to users: the engine is for another kind of machine or for
    other operators, so there is nothing that they could change. ``too_long``: the region is too
    long for the engine, but it may run parts of it, so the plan cuts the region and asks again."""

    reason: str
    remedy: str = ""
    quiet: bool = False
    too_long: bool = False


class Refused(Exception):
    """Raised by a check that finds out why a region cannot be run. ``args[0]`` is the refusal."""


def refuse_if(wrong: object, reason: str, remedy: str = "", quiet: bool = False) -> None:
    """Raise :class:`Refused` if ``wrong`` is true; :func:`as_answer` turns it into a result."""
    if wrong:
        raise Refused(Refusal(reason, remedy, quiet))


def as_answer(check: Callable[..., Refusal | None]) -> Callable[..., Refusal | None]:
    """A function that calls ``check`` and returns the refusal that it raises, if it raises one."""

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
    build_s: float = 0.0  # expected seconds to build; the planner uses it to keep its budget
    deterministic: bool = True
    # whether a plan may choose it by its estimate alone; if not, only after it was measured
    by_estimate: bool = field(default=True, compare=False)
    # seconds that it costs inside a plan but that a measurement of it alone does not show; they are
    # added to measured times, estimates already include them
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

    With ``writes`` it receives the output tensors after the inputs (or, with ``out_keyword``, its
    one output as ``out=``) and fills them, so that the plan's arena can hold them. Without it,
    ``fn`` returns new tensors, one or a tuple; vendor calls that allocate their result are of this
    kind. ``workspace`` is the most scratch memory in bytes that one call needs; the policy limits
    it. ``calls`` describes what a kernel of generated code does, as data: the plan runs consecutive
    kernels of this kind by one native call. It does the same with kernels that only launch what
    Triton compiled; ``launches`` marks those. ``over`` lists pairs (result, input): the result may
    take the memory of that input if nothing reads the input any more. ``wait``: the kernel is
    asynchronous and only starts to make its one result. Until the result is there, its inputs must
    not change (except one that the result is written ``over``), and before anything reads the
    result, or a view of it, ``wait`` is called on it.
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


LINE, BLOCK = 64, 1 << 22  # bytes: alignment of forms, and size of a block that holds several


class Forms:
    """Constants in other forms (packed, transposed, transformed), which kernels read instead.

    A form is made once and lives as long as a kernel holds it, so plans that read the same
    constant in the same way share it. On a CPU, forms that are requested one after another lie next
    to each other in memory: a kernel that prefetches past its own weights then prefetches those of
    the next kernel.
    """

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)  # the unused rest of the current block
        # by constant and form: the form, and the constant itself, kept alive since its address is
        # part of the key
        self._made: dict[Hashable, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}
        self.nbytes = 0  # of all forms that are alive

    def get(
        self,
        constant: torch.Tensor,
        how: Hashable,
        make: Callable[[torch.Tensor], torch.Tensor],
        limit: float,
    ) -> torch.Tensor:
        """``make(constant)``, or the form that it made earlier under the same name ``how``.
        Raises if all living forms together would take more than ``limit`` bytes."""
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
        """A copy of ``form`` right behind the previous one in the current block, if it is small and
        on a CPU; otherwise ``form`` itself."""
        plain = form.device.type == "cpu" and form.layout is torch.strided and form.is_contiguous()
        size = -(-form.nbytes // LINE) * LINE if plain else 0
        if not 0 < size <= BLOCK // 2:
            return form
        # the block must be no inference tensor: later forms may be placed outside inference mode
        with torch.inference_mode(False), torch.no_grad():
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

    A kernel that reads a constant in another form gets it from :meth:`form`; plans share these
    forms. ``taken`` lists the forms that this build requested.
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
        """The constant ``value`` as ``make`` arranges it. ``how`` must name everything that the
        arrangement depends on: it is the key under which plans share the form."""
        limit = self.policy.packed_limit
        found = self.forms.get(self.constants[value or ""], how, make, limit)
        self.taken.append(found)
        return found


@runtime_checkable
class Engine(Protocol):
    """Anything that can run a region. ``name`` and ``version`` are part of every remembered
    measurement: change the version when the same knobs may run at another speed. An engine whose
    kernels write results with any strides, and so also into part of a larger buffer, has a true
    attribute ``strided``; the plan does not offer such regions to other engines."""

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
