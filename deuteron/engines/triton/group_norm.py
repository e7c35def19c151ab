"""Group and instance norm with the activation that follows, and their gradients, on a GPU: the
recipes around ``kernels/triton/group_norm.py``, and how groups are cut into parts that fit in
registers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import modelled_seconds
from deuteron.engines.match import only_node
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, region_cost
from deuteron.engines.triton.common import picker, settings
from deuteron.engines.triton.norm import REACHED, refuse_types, sums_of
from deuteron.ir.region import Region
from deuteron.ops.activated import activation_text
from deuteron.policy import Policy
from deuteron.target import Target

NORMS = ("group_norm", "instance_norm")
GRADIENTS = {f"{name}_grad": name for name in NORMS}
# The part of a copy's bandwidth that is reached, as measured on an H200: where a program holds a
# group in registers and leaves room for other programs; where it leaves none; and where groups are
# cut into parts, which are read twice.
HELD, ALONE, PARTS = 0.88, 0.74, 0.62
AGAIN_ALONE, AGAIN_PARTS = 1.4, 1.8  # in the latter two, how often a gradient reads operands again

# ---- how groups are cut --------------------------------------------------------------------------

PER_THREAD = 8  # elements of a tile per thread: in 16 bits a load of 16 bytes
FEW, MOST = 7, 14  # tiles that fit in registers with two programs on a multiprocessor, and with one
LEAST_PART, MOST_PARTS = 1024, 4096  # fewest elements of a part, most parts of a group


@dataclass(frozen=True)
class Groups:
    """The work: ``rows`` groups in all, ``groups`` per sample, of ``each`` channels."""

    rows: int
    groups: int
    each: int
    positions: int  # of a channel
    eps: float
    size: int  # bytes of an element
    activation: str


@dataclass(frozen=True)
class Cut:
    """Parts of ``channels`` by ``positions``, which a program holds in tiles."""

    channels: int
    positions: int
    tile_channels: int
    tile_positions: int
    warps: int

    @property
    def tiles(self) -> int:
        return -(-self.channels // self.tile_channels) * -(-self.positions // self.tile_positions)

    def pieces(self, work: Groups) -> int:
        """How many parts a channel has."""
        return -(-work.positions // self.positions)

    def parts(self, work: Groups) -> int:
        """How many parts a group has."""
        return -(-work.each // self.channels) * self.pieces(work)

    def partial_results(self, work: Groups) -> int:
        """How many partial results there are for each channel."""
        return work.rows // work.groups * self.pieces(work)

    def scratch(self, work: Groups, sums: int, numbers: int) -> int:
        """Bytes for so many ``numbers`` per part, and for partial results of ``sums``
        parameters."""
        parts, count = self.parts(work), self.partial_results(work)
        of_parts = numbers * work.rows * parts if parts > 1 else 0
        partials = sums * count * work.groups * work.each if count > 1 else 0
        return 4 * (of_parts + partials)


def cuts(work: Groups) -> list[Cut]:
    """The ways worth trying: whole groups, if they fit in registers, with the fewest warps, as more
    programs on a multiprocessor hide each other's waiting for sums; and parts of groups."""
    ways = [*((FEW, warps) for warps in (1, 2, 4, 8)), (MOST, 8)]
    whole = [(most, _tiled(work.each, work.positions, warps)) for most, warps in ways]
    held = next(([cut] for most, cut in whole if cut.tiles <= most), [])
    parts = _cut_up(work)
    fair = parts.tiles <= MOST and 1 < parts.parts(work) <= MOST_PARTS
    return [*held, *([parts] if fair else [])]


def _tiled(channels: int, positions: int, warps: int) -> Cut:
    """A part of ``channels`` by ``positions`` in tiles of the shape that needs the fewest tiles."""
    tile = warps * 32 * PER_THREAD
    wide = [1 << k for k in range(power_of_two(channels).bit_length()) if 1 << k <= tile]
    ways = [Cut(channels, positions, c, tile // c, warps) for c in wide]
    return min(ways, key=lambda cut: cut.tiles)


def _cut_up(work: Groups) -> Cut:
    """Parts of a group that fit in the registers of 4 warps: several channels, or a piece of one.
    The parts are equal if that does not make them too small."""
    warps = 4
    most = FEW * warps * 32 * PER_THREAD
    if work.positions <= most:
        # several channels take more registers
        fair = min(work.each, max(1, most * 6 // 7 // work.positions))
        equal = max(d for d in range(1, fair + 1) if work.each % d == 0)
        channels = equal if equal * work.positions >= LEAST_PART else fair
        return _tiled(channels, work.positions, warps)
    fewest = -(-work.positions // most)
    equally = range(fewest, work.positions // LEAST_PART + 1)
    count = next((q for q in equally if work.positions % q == 0), fewest)
    return _tiled(1, -(-work.positions // count), warps)


def is_held(cut: Cut, work: Groups) -> bool:
    """Whether a whole group stays in registers, with room for other programs."""
    return cut.parts(work) == 1 and cut.tiles <= FEW


# ---- the recipes ---------------------------------------------------------------------------------


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    starts = bool(region.nodes) and region.nodes[0].op in NORMS
    refuse_if(not starts, f"runs {' or '.join(NORMS)}, and an activation after it")
    norm, *rest = region.nodes
    texts = [activation_text(node.op, node.attrs) for node in rest]
    several = len(rest) > 1 or None in texts
    refuse_if(several, f"takes one activation along, not {' + '.join(n.op for n in rest)}")
    own = region.outputs != (region.nodes[-1].output,)
    refuse_if(own, "the norm's own result is read, too", "let the activation alone read it")
    kinds = {region.graph.types[v].dtype for v in (norm.uses[0], region.outputs[0])}
    refuse_if(len(kinds) > 1, "changes the element type", "cast after the region")
    _refuse_tensors(region, target)


def _refuse_grad(region: Region, target: Target, policy: Policy) -> None:
    only_node(region, GRADIENTS)
    _refuse_tensors(region, target)


def _refuse_tensors(region: Region, target: Target) -> None:
    refuse_types(region)
    work = _work(region)
    refuse_if(work.size > 4, "element type f64", "use f16, bf16 or f32")
    refuse_if(not cuts(work), "a group has too many parts that registers hold")


def _work(region: Region) -> Groups:
    norm, *rest = region.nodes
    x = region.graph.types[norm.uses[0]]
    groups = norm.attrs.get("groups", x.shape[1])
    rows, each = x.shape[0] * groups, x.shape[1] // groups
    following = norm.attrs.get("activation", "none")
    if rest:
        following = activation_text(rest[0].op, rest[0].attrs) or "none"
    positions = x.numel // (x.shape[0] * x.shape[1])
    return Groups(rows, groups, each, positions, norm.attrs["eps"], x.dtype.bits // 8, following)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    return [asdict(cut) for cut in cuts(_work(region))]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """Seconds of the memory traffic at the speed that such kernels reach; parts take a second
    launch."""
    cut, work = Cut(**settings(knobs)), _work(region)
    several = cut.parts(work) > 1
    reached = PARTS if several else HELD if is_held(cut, work) else ALONE
    once = modelled_seconds(region_cost(region), main_dtype(region), reached, False, target)
    return once + several * target.launch


def _gradient_seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The same for gradients, with what they read again."""
    cut, work, cost = Cut(**settings(knobs)), _work(region), region_cost(region)
    once = modelled_seconds(cost, main_dtype(region), REACHED, False, target)
    times = AGAIN_PARTS if cut.parts(work) > 1 else 0.0 if is_held(cut, work) else AGAIN_ALONE
    return once + times * cost.reads / target.stream + target.launch


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.group_norm import Operands, backward, forward

    work, cut, gradient = _work(region), Cut(**settings(knobs)), region.ops[0] in GRADIENTS
    if gradient:
        call, pick = backward(work, cut), picker(region, Operands)
        room = cut.scratch(work, sums_of(region, region.nodes[0]), 4)
    else:
        call, pick = forward(work, cut), picker(region, Operands, y=region.outputs[0])
        room = cut.scratch(work, 0, 2)
    note = "parts" if cut.parts(work) > 1 else "held"
    return Kernel(lambda *ts: call(pick(ts)), writes=True, workspace=room, note=note)


GROUP_NORM = (
    Recipe("group_norm", NORMS, _refuse, _build, _knobs, _seconds, 0.4),
    Recipe("group_norm_backward", GRADIENTS, _refuse_grad, _build, _knobs, _gradient_seconds, 0.4),
)
