"""Linear layers of 8-bit floats with a scale for each block on a GPU, and rounding numbers to such
floats: the recipes around ``kernels/triton/fp8.py``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import first_of, operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import region_cost, times
from deuteron.engines.triton.common import (
    LINE,
    MOST,
    Tiling,
    knobs_of,
    one_operator,
    room_for,
    streamed,
    tensors_of,
    tiling_of,
)
from deuteron.engines.triton.multiplied import followed, follows, refuse_overflow, refuse_result
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops.formula import Traced
from deuteron.ops.fp8 import MOST as LARGEST
from deuteron.ops.fp8 import blocks
from deuteron.policy import Policy
from deuteron.target import Target

OP = "linear_fp8"
LEAST, STEPS = 32, 128  # fewest and most numbers of a block that are taken at a time
PROGRAMS = 2**16 - 1  # most programs side by side
GROUP = 8  # rows of tiles that are walked together


# ``reached`` follows from a count of instructions and was not measured
TILINGS = (
    Tiling(128, 128, 4, 4, 0.8, divided=True),
    Tiling(128, 128, 8, 3, 0.5),
    Tiling(64, 128, 4, 4, 0.45),
    Tiling(16, 128, 4, 4, 0.2),
)


@dataclass(frozen=True)
class Work:
    """A region as such a product, and an epilogue: a formula of that and of other values."""

    given: tuple[str, ...]  # x, weight, x_scale, weight_scale
    rows: int
    columns: int
    steps: int
    block: int
    formula: Traced
    others: tuple[tuple[str, str], ...]

    @property
    def together(self) -> int:
        """Steps of the sum that are taken at a time, all of one block."""
        several = self.block < self.steps
        return min(STEPS, self.block & -self.block) if several else STEPS


def as_fp8_product(region: Region) -> Work:
    """The region as such a product; refuses any other."""
    node, types = first_of(region, (OP,)), region.graph.types
    values = operands(node)
    x, out, result = (types[v] for v in (values["x"], node.output, region.outputs[0]))
    block, steps = node.attrs["block"], x.shape[-1]
    wide = f"use blocks of a multiple of {LEAST}"
    refuse_if(block % LEAST > 0 and block < steps, f"blocks of {block} are read in parts", wide)
    rows, columns = prod(out.shape[:-1]), out.shape[-1]
    far = max(rows, columns, steps) > MOST
    refuse_if(far, f"[{rows}, {steps}] → {columns} is too large to count", "split the batch")
    given = tuple(values[name] for name in ("x", "weight", "x_scale", "weight_scale"))
    tensors = [types[v] for v in (*given, region.outputs[0])]
    apart = not all(t.is_layout("contiguous") for t in tensors)
    refuse_if(apart, "a tensor is not in row-major order", "make it contiguous")
    refuse_result(result, out)
    refuse_overflow(region)
    biases = {node.output: values["bias"]} if "bias" in values else {}
    what = followed(region, [node], biases)
    return Work(given, rows, columns, steps, block, *what)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    as_fp8_product(region)
    none = f"{target.name} multiplies no floats of 8 bits"
    refuse_if(not target.has_fp8, none, "cast them to float16")


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The largest tile that rows fill, and the next smaller one."""
    work = as_fp8_product(region)
    least = TILINGS[-1].rows
    fitting = [t for t in TILINGS if t.rows <= max(least, 2 * work.rows)]
    even = _even(region, work) and target.has_warpgroups
    fitting = [t for t in fitting if even or not t.divided]
    return [knobs_of(t, "rows", "columns", "stages", "divided") for t in fitting[:2]]


def _even(region: Region, work: Work) -> bool:
    """Whether the copy engine can read and write all tensors, and all columns of a tile are in one
    block."""
    result = region.graph.types[region.outputs[0]].dtype
    lines = work.steps % LINE == 0 == work.columns * result.bits // 8 % LINE
    return lines and work.together == STEPS and work.block % TILINGS[0].columns == 0


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Estimated seconds: the longer of all rounds of tiles at the rate of a multiprocessor, and of
    the memory traffic."""
    work, t = as_fp8_product(region), tiling_of(knobs, TILINGS)
    kind = region.graph.types[work.given[0]].dtype.short
    tiles = -(-work.rows // t.rows) * -(-work.columns // t.columns)
    rate = t.reached * target.rate(kind, True) / target.units
    each = 2.0 * t.rows * t.columns * work.steps / rate
    memory, _ = times(region_cost(region), kind, True, target)
    seconds: float = max(-(-tiles // target.units) * each, memory / 0.8)
    return seconds + target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, t = as_fp8_product(region), tiling_of(knobs, TILINGS)
    across = region.graph.types[work.given[2]].shape[-1]
    call = (_divided if t.divided else _plain)(work, t, across, follows(region, work), ctx)
    others = tuple(v for v, _ in work.others)
    tensors = tensors_of(region, (*work.given, *region.outputs, *others))

    def run(*given: Any) -> None:
        x, w, xs, ws, y, *rest = tensors(given)
        call(x, w, (xs, ws), y, rest)

    note = f"tiles of {t.rows} × {t.columns}, sums scaled after {work.together} numbers"
    return Kernel(run, writes=True, note=note + (", warps divide the work" if t.divided else ""))


def _plain(work: Work, t: Tiling, across: int, after: Any, ctx: BuildContext) -> Any:
    from deuteron.kernels.triton.fp8 import Sizes, Tile, product

    size = Sizes(work.rows, work.columns, work.steps, work.block, across)
    tile = Tile(t.rows, t.columns, work.together, GROUP)
    return product(size, tile, after, t.warps, t.stages)


def _divided(work: Work, t: Tiling, across: int, after: Any, ctx: BuildContext) -> Any:
    from deuteron.kernels.triton.product_hopper_bytes import PART, Sizes, Tile, product

    lines = work.steps, work.steps
    size = Sizes(work.rows, work.columns, work.steps, *lines, work.block, across)
    tile = Tile(*PART, t.stages, t.columns // PART[1], GROUP, True)
    return product(size, tile, after, ctx.target.units)


# ---- rounding to floats of 8 bits

QUANTIZE = "quantize_fp8"
TOGETHER, MOST_TOGETHER = 2048, 2**15  # numbers that a program takes: usually, and at most
PER_WARP = 1024


def _refuse_quantize(region: Region, node: Node, target: Target) -> None:
    x, q = (region.graph.types[v] for v in (node.uses[0], node.outputs[0]))
    refuse_if(not target.has_fp8, f"{target.name} has no floats of 8 bits", "use another GPU")
    odd = x.dtype.bits > 32
    refuse_if(odd, f"x is of {x.dtype.short}", "cast it to float32")
    refuse_if(not x.is_layout("contiguous"), "x is not in row-major order", "make it contiguous")
    rows, columns = node.attrs["block"]
    held = power_of_two(rows) * power_of_two(columns)
    refuse_if(held > MOST_TOGETHER, f"blocks of {rows} × {columns} fit no program", "cut them")
    lines = prod(q.shape[:-1])
    far = lines > PROGRAMS * rows or rows * q.shape[-1] > MOST
    refuse_if(far, f"{lines} rows of {q.shape[-1]} are too many to count", "split the batch")


def _build_quantize(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.fp8 import Blocks, Numbers, quantize

    node, types = region.nodes[0], region.graph.types
    x, (rows, columns) = types[node.uses[0]], node.attrs["block"]
    lines, long = prod(x.shape[:-1]), x.shape[-1]
    high = x.shape[-2] if x.rank > 1 and rows > 1 else lines
    size = Numbers(high, long, blocks(long, columns))
    tall, wide = power_of_two(rows), power_of_two(columns)
    count = max(1, min(TOGETHER // (tall * wide), power_of_two(size.across)))
    most = LARGEST[types[node.outputs[0]].dtype.short]
    tile = Blocks(rows, columns, count, tall, wide, most)
    warps = max(1, min(16, tall * wide * count // PER_WARP))
    call = quantize(lines // max(high, 1), size, tile, warps)
    tensors = tensors_of(region, (node.uses[0], *node.outputs))
    spare = types[node.outputs[1]], types[node.outputs[0]]

    def run(*given: Any) -> None:
        found, q, scale = tensors(given)
        scale = room_for(spare[0], found) if scale is None else scale
        call(found, room_for(spare[1], found) if q is None else q, scale)

    return Kernel(run, writes=True, note=f"{count} blocks at a time")


_rounding = one_operator(
    QUANTIZE, (QUANTIZE,), _refuse_quantize, None, streamed(0.85), _build_quantize
)
# Their estimates have not been compared with measurements yet, so only a search chooses them.
FP8 = (
    Recipe(OP, (OP,), _refuse, _build, _knobs, _seconds, 0.9, by_estimate=False),
    replace(_rounding, by_estimate=False),
)
