"""The vocabulary of an explanation: plain data that a plan fills in and renderers read.

All times are seconds, all sizes bytes, all counts plain numbers; what was not measured is None.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deuteron.passes import PassRecord, Veto


@dataclass(frozen=True)
class OptionReport:
    """One way a region could have been run."""

    candidate: str  # "vendor_fused[recipe=cudnn, benchmark=True]"
    predicted_s: float
    measured_s: float | None = None
    error: float | None = None
    rejected: str = ""  # why it was out of the race, if it was
    workspace: int = 0  # bytes of scratch memory, known once it is built


@dataclass(frozen=True)
class RefusalReport:
    """An engine that would not run the region."""

    engine: str
    reason: str
    remedy: str = ""


@dataclass(frozen=True)
class RegionReport:
    """One region of the plan, priced.

    ``flops`` are the operations of the chosen algorithm; ``roofline_s`` is the least time that
    they and the bytes need at the rates that the target is described with; ``predicted_s`` what the
    chosen engine should take; ``measured_s`` what it took, run by itself. ``error`` is the largest
    error relative to the largest value, and ``torch_error`` PyTorch's own in the same element type.
    ``reference`` says what both were measured against ("torch" has no error against itself), and
    ``off`` how far predictions of this kind have been from measurements.
    """

    name: str
    ops: tuple[str, ...]
    source: str
    shape: str  # the type of the first output, as text
    engine: str
    candidate: str
    flops: float
    bytes: int
    bound: str  # "memory", "compute", "launch", "links" or "free"
    roofline_s: float
    predicted_s: float
    measured_s: float | None = None
    error: float | None = None
    torch_error: float | None = None
    reference: str = ""
    options: tuple[OptionReport, ...] = ()
    refusals: tuple[RefusalReport, ...] = ()
    note: str = ""
    off: str = ""

    @property
    def intensity(self) -> float:
        """Operations per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def best_s(self) -> float:
        """The measured time, or the prediction where nothing was measured."""
        return self.predicted_s if self.measured_s is None else self.measured_s

    @property
    def fraction(self) -> float:
        """The part of the roofline reached (measured where possible); 1 is perfect. NaN if the
        region ran faster than the roofline: the target's rates are too low then, and tell no bound.
        """
        part = self.roofline_s / self.best_s if self.best_s else 1.0
        return part if part <= 1.0 else math.nan


@dataclass(frozen=True)
class VetoReport(Veto):
    """A value that goes through memory, and what that costs on the target."""

    seconds: float


@dataclass(frozen=True)
class OrderReport:
    """A value that a pass converted to another memory order."""

    value: str
    order: str  # "nhwc" or "contiguous"
    reason: str
    bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """Where memory goes: weights, the planned arena, and what is allocated beside it."""

    weights: int
    arena: int  # one block, reused by lifetimes
    unplanned: int  # largest sum of values beside the arena alive at once
    separate: int  # all intermediate values, if no memory were reused
    packed: int = 0  # weights in other forms, folded or packed, which kernels read instead
    peak: int = 0  # half of a training step: all memory in use, with what the other half has left


@dataclass(frozen=True)
class AlternativeReport:
    """A plan to choose from: :class:`deuteron.plan.alternatives.Whole` without its choices."""

    names: tuple[str, ...]
    seconds: float
    workspace: int
    error: float | None
    changed: int


@dataclass(frozen=True)
class Report:
    """A whole plan, explained."""

    name: str
    target: str
    device: str  # "cpu", "cuda:0", or "" when planned for a machine that is not here
    mode: str  # "heuristic", "found", "loaded"
    cuda_graph: str  # "yes", or why not
    regions: tuple[RegionReport, ...]
    vetoes: tuple[VetoReport, ...]
    passes: tuple[PassRecord, ...]
    memory: MemoryReport
    nodes_before: int
    nodes_after: int
    plan_s: float  # seconds it took to make the plan
    total_measured_s: float | None = None  # the whole plan, timed as one
    eager_s: float | None = None  # the module that the plan was made of, timed in turns with it
    eager: str = ""  # how that was timed, or why it was not
    inputs: tuple[str, ...] = ()  # name and type of each
    machine: str = ""  # the name of the device
    orders: tuple[OrderReport, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    wholes: tuple[AlternativeReport, ...] = ()  # plans to choose from, the quickest first

    @property
    def predicted_s(self) -> float:
        return sum(r.best_s for r in self.regions)

    @property
    def roofline_s(self) -> float:
        return sum(r.roofline_s for r in self.regions)

    @property
    def flops(self) -> float:
        return sum(r.flops for r in self.regions)

    @property
    def bytes(self) -> int:
        return sum(r.bytes for r in self.regions)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data, derived figures included."""
        data = asdict(self)
        for region, plain in zip(self.regions, data["regions"], strict=True):
            plain["intensity"], plain["fraction"] = region.intensity, region.fraction
        totals = ("predicted_s", "roofline_s", "flops", "bytes")
        data["totals"] = {name: getattr(self, name) for name in totals}
        return data

    def to_json(self) -> str:
        """The report as strict JSON (no NaN or Infinity)."""
        return json.dumps(_finite(self.as_dict()), indent=1, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
