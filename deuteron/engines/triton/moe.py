"""Rows grouped by expert on a GPU: the recipes around ``kernels/triton/moe.py``.

Libraries multiply groups of one element type only, bfloat16, and neither gather rows nor have a
gate in their epilogue. torch's engine can only multiply all rows by all matrices, because it must
not wait for the sizes of groups. So plans may choose these recipes by estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import first_of, operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost
from deuteron.engines.triton.common import (
    MOST,
    Tiling,
    knobs_of,
    one_operator,
    taken_by,
    tensors_of,
    tiling_of,
)
from deuteron.engines.triton.multiplied import Matrix, followed, follows
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops.formula import Traced
from deuteron.policy import Policy
from deuteron.target import Target

LINEAR, OUTER = "grouped_linear", "grouped_outer"
KINDS = ("f16", "bf16", "f32")
MOST_GROUPS = 4095  # most groups: a program holds the starts of all in registers
GROUP = 8  # rows of tiles that are walked together
REACHED = 0.85  # part of the bandwidth of a copy, where there is little to multiply
HIDDEN = 0.1  # this part of the shorter of multiplying and memory traffic still shows
OF_OUTER = 0.65  # part of the rate that is left where both factors are read across rows
TIMES_F32 = 3  # products of matrix units for one of float32
WIDE = 64  # most columns of a float32 tile, as its three products take more registers
BLOCK = 1024  # pairs that are put into groups at a time
OFFERED = 3


# ``reached`` was seen on an H200 from 64 rows on
TILINGS = (
    Tiling(128, 256, 8, 3, 0.92, steps=64),
    Tiling(128, 128, 8, 4, 0.76, steps=64),
    Tiling(128, 128, 8, 3, 0.75, steps=64),
    Tiling(64, 128, 4, 4, 0.65, steps=64),
    Tiling(64, 64, 4, 4, 0.45, steps=64),
    Tiling(32, 128, 4, 4, 0.4, steps=64),
    Tiling(32, 64, 4, 4, 0.3, steps=64),
    Tiling(16, 128, 4, 4, 0.2, steps=128),
    Tiling(16, 64, 4, 4, 0.15, steps=128),
)


@dataclass(frozen=True)
class Work:
    """A region as products of groups of rows by one matrix each, or by two (a gate's and another),
    and an epilogue: a formula of that and of other values; or as the gradient of such matrices."""

    first: str  # x, or the gradient
    second: str  # the matrices, or x
    third: str | None  # further matrices
    starts: str
    order: str | None
    share: int
    rows: int
    columns: int
    steps: int
    groups: int
    lines: tuple[int, int, int]  # row strides of first and second; stride from matrix to matrix
    turned: bool = False
    formula: Traced | None = None
    others: tuple[tuple[str, str], ...] = ()

    @property
    def factors(self) -> int:
        return 1 if self.third is None else 2

    @property
    def filled(self) -> int:
        """How many groups can have rows, at most."""
        return min(self.groups, self.rows)


def _line(what: str, t: TensorType) -> int:
    """The row stride of a matrix; refuses if the numbers of a row are not adjacent."""
    apart = t.strides[1] != 1 and t.shape[1] > 1
    refuse_if(apart, f"numbers of a row of {what} are not adjacent", f"to_layout({what}) first")
    return t.strides[0] if t.shape[0] > 1 else t.shape[1]


def _matrices(t: TensorType) -> Matrix:
    """The matrices of all groups, each [out, in] or transposed."""
    whole, down, across = t.strides
    turned = across != 1 and t.shape[2] > 1
    beside, line, long = (down, across, t.shape[1]) if turned else (across, down, t.shape[2])
    refuse_if(beside != 1 and long > 1, "the weights have no numbers side by side", "copy them")
    return Matrix(turned, line, whole)


def _refuse_lists(region: Region, *values: str | None) -> None:
    types = region.graph.types
    apart = not all(types[v].is_layout("contiguous") for v in values if v is not None)
    refuse_if(apart, "a list of integers lies apart", "to_layout it first")


def _refuse_kind(t: TensorType) -> None:
    odd = t.dtype.short not in KINDS
    refuse_if(odd, f"the factors are of {t.dtype.short}", f"cast them to {KINDS[-1]}")


def _refuse_sizes(rows: int, columns: int, steps: int, groups: int) -> None:
    refuse_if(max(rows, columns, steps) > MOST, "a size is beyond 2³¹", "split the batch")
    refuse_if(groups > MOST_GROUPS, f"{groups} groups are too many", f"at most {MOST_GROUPS}")


def as_experts(region: Region) -> Work:
    """The region as such products; refuses any other."""
    first_of(region, (LINEAR,))
    types = region.graph.types
    node, *more = products = [n for n in region.nodes if n.op == LINEAR]
    values = operands(node)
    x, w, out = types[values["x"]], types[values["weight"]], types[node.output]
    alike = all(
        n.attrs == node.attrs
        and n.inputs[0] == node.inputs[0]
        and n.inputs[2:] == node.inputs[2:]
        and types[n.uses[1]] == w
        for n in more
    )
    refuse_if(len(more) > 1 or not alike, f"multiplies {len(products)} times")
    _refuse_kind(x)
    rows, columns, steps, groups = *out.shape, x.shape[1], w.shape[0]
    _refuse_sizes(rows, columns, steps, groups)
    _refuse_lists(region, values["starts"], values.get("order"))
    line, matrices, result = _line("x", x), _matrices(w), types[region.outputs[0]]
    across = bool(more) and matrices.turned
    refuse_if(across, "columns of a gate and of what passes it take turns, and lie side by side")
    refuse_if(result.shape != out.shape, "what follows has another shape", "leave it outside")
    refuse_if(not result.is_layout("contiguous"), "the result is not in row-major order")
    odd = not result.dtype.is_float or result.dtype.bits not in (16, 32)
    refuse_if(odd, f"the result is of {result.dtype.short}", "cast after the region")
    formula, others = followed(region, products, {})
    second = more[0].uses[1] if more else None
    lines = line, matrices.line, matrices.outer
    names = values["x"], values["weight"], second, values["starts"], values.get("order")
    sizes = node.attrs["share"], rows, columns, steps, groups
    return Work(*names, *sizes, lines, matrices.turned, formula, others)


def found_outer(region: Region) -> Work:
    """The gradient of such matrices."""
    refuse_if(len(region.nodes) > 1, "takes its operator by itself", quiet=True)
    node, types = region.nodes[0], region.graph.types
    values = operands(node)
    grad, x, out = types[values["grad"]], types[values["x"]], types[node.output]
    _refuse_kind(x)
    rows, (groups, columns, steps) = grad.shape[0], out.shape
    _refuse_sizes(rows, columns, steps, groups)
    _refuse_lists(region, values["starts"], values.get("order"))
    lines = _line("x", x), _line("grad", grad), columns * steps
    names = values["grad"], values["x"], None, values["starts"], values.get("order")
    return Work(*names, node.attrs["share"], rows, columns, steps, groups, lines)


# ---- tiles, and what they take


def _work(region: Region) -> Work:
    return found_outer(region) if region.ops == (OUTER,) else as_experts(region)


def _steps(region: Region, work: Work, t: Tiling) -> int:
    return t.steps * 16 // region.graph.types[work.first].dtype.bits


def _fits(region: Region, work: Work, t: Tiling, target: Target) -> bool:
    """Whether the sums fit in registers, and the factors, in stages, in shared memory."""
    per_thread = t.rows * t.columns * work.factors // (32 * t.warps)
    held = (t.rows + t.columns * work.factors) * t.steps * 2
    short = region.graph.types[work.first].dtype.bits == 16
    # without warpgroups registers hold factors, too
    most = 128 if target.has_warpgroups else 64 if short else 32
    narrow = short or t.columns <= WIDE
    return per_thread <= most and t.stages * held <= target.shared_bytes and narrow


def _seconds_of(region: Region, work: Work, t: Tiling, target: Target) -> float:
    """Estimated seconds, as if all groups were of one size: the longer of all tiles at the rate of
    a multiprocessor, and of the memory traffic with the matrices of those groups that have rows."""
    kind, cost = main_dtype(region), region_cost(region)
    if region.ops == (OUTER,):
        tiles = -(-work.columns // t.rows) * -(-work.steps // t.columns) * work.groups
        steps, unread = max(work.rows / work.groups, t.steps), 0.0
    else:
        high = -(-work.rows // (work.filled * t.rows))
        tiles = work.filled * high * -(-work.columns // t.columns)
        whole = region.graph.types[work.second].nbytes * work.factors
        steps, unread = max(work.steps, t.steps), whole * (1 - work.filled / work.groups)
    each = 2.0 * t.rows * t.columns * steps * work.factors
    rate = target.rate("f16" if kind == "f32" else kind, True) / target.units
    rate /= 2 * TIMES_F32 if kind == "f32" else 1
    mean = work.rows / work.filled
    rate *= max(0.5, mean / (mean + t.columns / 2))  # the start and end of each group cost time
    rate *= OF_OUTER if region.ops == (OUTER,) else 1
    rounds = max(1.0, tiles / target.units)
    memory = (cost.bytes - unread) / (REACHED * target.stream)
    multiplies = rounds * each / (t.reached * rate)
    hidden = HIDDEN * min(multiplies, memory)  # the shorter of both is not hidden completely
    return float(max(multiplies, memory) + hidden + target.launch)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, _work(region), tiling_of(knobs, TILINGS), target)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    work = _work(region)
    fitting = [t for t in TILINGS if _fits(region, work, t, target)]
    ordered = sorted(fitting, key=lambda t: _seconds_of(region, work, t, target))
    return [knobs_of(t, "rows", "columns", "stages") for t in ordered[:OFFERED]]


def _settings(region: Region, work: Work, t: Tiling, ctx: BuildContext) -> tuple[Any, Any]:
    """Sizes and tile, as the kernels take them."""
    from deuteron.kernels.triton.moe import Sizes, Tile

    tokens = region.graph.types[work.first if work.formula else work.second].shape[0]
    sizes = work.rows, work.columns, work.steps, tokens, work.groups, work.share
    steps = _steps(region, work, t)
    across = (work.steps, work.columns) if work.formula else (work.columns, work.steps)
    even = across[0] % (steps if work.formula else t.rows) == 0 == across[1] % t.columns
    precision = "tf32" if ctx.policy.allow_tf32 else "tf32x3"
    slots = power_of_two(work.groups + 1)
    how = slots, work.turned, work.third is not None, even, precision
    return Sizes(*sizes, *work.lines), Tile(t.rows, t.columns, steps, GROUP, *how)


def _note(t: Tiling) -> str:
    return f"tiles of {t.rows} × {t.columns} × {t.steps}"


def _build_linear(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.moe import prepare_linear

    work, t = as_experts(region), tiling_of(knobs, TILINGS)
    size, tile = _settings(region, work, t, ctx)
    call = prepare_linear(size, tile, follows(region, work), t.warps, t.stages)
    names = work.first, work.second, work.third or work.second, *region.outputs
    given = tensors_of(region, (*names, work.starts, work.order, *(v for v, _ in work.others)))

    def run(*tensors: Any) -> None:
        found = given(tensors)
        call(*found[:6], others=found[6:])

    return Kernel(run, writes=True, note=_note(t))


def _build_outer(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.moe import prepare_outer

    work, t = found_outer(region), tiling_of(knobs, TILINGS)
    # to gather a row takes two loads, one after the other: each has half of the stages
    stages = t.stages if work.order is None else 2 * t.stages - 1
    call = prepare_outer(*_settings(region, work, t, ctx), t.warps, stages)
    names = work.first, work.second, *region.outputs, work.starts, work.order
    given = tensors_of(region, names)
    return Kernel(lambda *tensors: call(*given(tensors)), writes=True, note=_note(t))


# ---- groups


def _refuse_groups(region: Region, node: Node, target: Target) -> None:
    _refuse_lists(region, node.uses[0])
    groups = node.attrs["groups"]
    refuse_if(groups > MOST_GROUPS, f"{groups} groups are too many", f"at most {MOST_GROUPS}")
    unread = len(region.outputs) < 3
    refuse_if(unread, "makes all three lists, of which one is not read", quiet=True)


def _group_seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Seconds in which every program reads all pairs twice, out of a cache."""
    pairs, groups = region.graph.types[region.nodes[0].uses[0]], region.nodes[0].attrs["groups"]
    seconds: float = 2.0 * pairs.nbytes * (groups + 1) / target.cache_bandwidth
    return seconds + 2 * target.launch


def _build_groups(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.moe import prepare_group

    node = region.nodes[0]
    count, groups = region.graph.types[node.uses[0]].numel, node.attrs["groups"]
    call = prepare_group(count, groups, min(BLOCK, power_of_two(count)), 4)
    given = tensors_of(region, (*node.uses, *node.outputs))
    return Kernel(lambda *tensors: call(*given(tensors)), writes=True, note="1 kernel")


MOE = (
    Recipe(LINEAR, (LINEAR,), taken_by(as_experts), _build_linear, _knobs, _seconds, 0.9),
    Recipe(OUTER, (OUTER,), taken_by(found_outer), _build_outer, _knobs, _seconds, 0.9),
    one_operator(
        "group_rows", ("group_rows",), _refuse_groups, None, _group_seconds, _build_groups
    ),
)
