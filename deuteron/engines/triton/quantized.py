"""Linear layers of 8- and 4-bit weights on a GPU: the recipe around
``kernels/triton/quantized.py``, and ``quantized_few.py`` for up to 16 rows.

Up to FEW rows the weight is read once, and everything else is small beside that. Of more rows the
price is that of a product. Of very many, a weight that is written out at every call and a library's
product may be quicker: that is what the reference does, so torch's engine offers it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import first_of, operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import region_cost
from deuteron.engines.triton.common import knobs_of, taken_by, tensors_of, tiling_of
from deuteron.engines.triton.multiplied import KINDS, followed, follows, refuse_result
from deuteron.ir.region import Region
from deuteron.ops.formula import Traced
from deuteron.policy import Policy
from deuteron.target import Target

OP = "linear_quantized"
FEW = 16  # rows up to which sums are scaled, not numbers
LEAST = 32  # numbers of a group that are taken at a time, at least
STEPS, STEPS_OF_MANY = 128, 64  # and at most, for few rows and for many
MOST, LONGEST = 2**16 - 1, 2**31 - 2**10  # programs side by side, and lines counted in 32 bits
REACHED = 0.8  # of the bandwidth of a copy
FILLED = 2.5  # programs of four warps that keep a multiprocessor busy while some of them wait
ADDED_S = 1.2e-6  # a second kernel, which was launched early


class Tiling(NamedTuple):
    """Rows and columns of a tile, warps, stages, up to how many programs of a multiprocessor share
    out the sum, and the part of what libraries get out of it that it should reach: by its
    instructions, about three for a number of few rows, not as it was seen. ``direct``: numbers go
    from memory to registers, the sum is shared out to warps, and as many times 64 bytes of a row as
    there are stages are asked for ahead; ``early``: x as well."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int
    reached: float
    direct: bool = False
    early: bool = False


TILINGS = (
    Tiling(8, 16, 4, 4, 4, 0.4, direct=True),
    Tiling(8, 16, 8, 4, 2, 0.4, direct=True),
    Tiling(8, 16, 4, 4, 3, 0.4, direct=True),
    Tiling(8, 16, 4, 2, 4, 0.4, direct=True),
    Tiling(16, 16, 4, 2, 4, 0.4, direct=True),
    Tiling(16, 16, 8, 2, 2, 0.4, direct=True),
    Tiling(16, 16, 4, 2, 3, 0.4, direct=True),
    Tiling(16, 128, 4, 4, 3, 0.4),
    Tiling(16, 64, 4, 4, 4, 0.35),
    Tiling(16, 64, 4, 6, 4, 0.35),
    Tiling(16, 128, 4, 4, 2, 0.4),
    Tiling(16, 128, 4, 6, 1, 0.4),
    Tiling(16, 256, 8, 4, 2, 0.4),
    Tiling(16, 64, 4, 6, 2, 0.35),
    Tiling(16, 64, 4, 4, 7, 0.35),
    Tiling(32, 64, 4, 4, 4, 0.4),
    Tiling(64, 128, 4, 4, 2, 0.45),
    Tiling(128, 128, 8, 3, 1, 0.5),
)


@dataclass(frozen=True)
class Work:
    """A region as a product by a stored weight, and a formula of that and of other values."""

    given: tuple[str | None, ...]  # x, weight, scale, zero
    rows: int
    columns: int
    steps: int
    group: int
    bits: int
    formula: Traced
    others: tuple[tuple[str, str], ...]

    @property
    def together(self) -> int:
        """Steps of the sum that are taken at a time, all of one group."""
        return min(STEPS if self.rows <= FEW else STEPS_OF_MANY, self.group & -self.group)

    def parts(self, t: Tiling, units: int) -> int:
        """Into how many parts the sum is shared out, each of as many steps."""
        tiles = -(-self.rows // t.rows) * -(-self.columns // t.columns)
        count = self.steps // self.together
        most = max(1, min(count, t.programs * units // tiles))
        return -(-count // -(-count // most))


def found(region: Region) -> Work:
    """The region as such a product; refused if it is none."""
    node, types = first_of(region, (OP,)), region.graph.types
    values = operands(node)
    x, out, result = (types[v] for v in (values["x"], node.output, region.outputs[0]))
    odd = x.dtype.short not in KINDS
    refuse_if(odd, f"x is of {x.dtype.short}, not of 16 bits", "cast it to bfloat16")
    group, steps = node.attrs["group"], x.shape[-1]
    wide = f"use groups of a multiple of {LEAST}"
    refuse_if(group % LEAST > 0, f"groups of {group} numbers are read in parts", wide)
    rows, columns = prod(out.shape[:-1]), out.shape[-1]
    many = rows > MOST * TILINGS[-1].rows or max(columns, steps) > LONGEST
    refuse_if(many, f"[{rows}, {steps}] → {columns} is too large to count", "split the batch")
    given = tuple(values.get(name) for name in ("x", "weight", "scale", "zero"))
    tensors = [types[v] for v in (*given, region.outputs[0]) if v is not None]
    apart = not all(t.is_layout("contiguous") for t in tensors)
    refuse_if(apart, "a tensor is not in row-major order", "make it contiguous")
    refuse_result(result, out)
    biases = {node.output: values["bias"]} if "bias" in values else {}
    what = followed(region, [node], biases)
    return Work(given, rows, columns, steps, group, node.attrs["bits"], *what)


NAMED = ("rows", "columns", "warps", "stages", "programs", "direct", "early")


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """For few rows several ways to share out the sum, the best guess first. With zeros twice as
    much is multiplied, for which 64 columns leave room."""
    work = found(region)
    plain = [t for t in TILINGS if not t.direct]
    rows = next((t.rows for t in plain if t.rows >= work.rows), plain[-1].rows)
    wide = 64 if rows <= FEW and work.given[3] is not None else 256
    fitting = [t for t in plain if t.rows == rows and t.columns <= wide]
    fitting = [t for t in fitting if _room(work, t, target) <= target.shared_bytes]
    return [knobs_of(t, *NAMED) for t in fitting]


def _refuse_few(region: Region, target: Target, policy: Policy) -> None:
    work = found(region)
    refuse_if(not target.has_tensor_cores, "there are no matrix units")
    refuse_if(work.rows > FEW, f"{work.rows} rows are not few", quiet=True)
    parts = f"groups of {work.group} are no multiple of {STEPS}"
    refuse_if(work.group % STEPS > 0, parts, f"use groups of {STEPS}")


def _knobs_few(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """Those with as many rows, and registers for what is asked for ahead."""
    work = found(region)
    direct = [t for t in TILINGS if t.direct]
    rows = next(t.rows for t in direct if t.rows >= work.rows)
    more = 56 if work.given[3] is None else 72 + 2 * rows
    room = [t for t in direct if 8 * t.stages + 3 * t.rows + more <= registers(t)]
    return [knobs_of(t, *NAMED) for t in room if t.rows == rows]


def registers(t: Tiling) -> int:
    """What each thread has of a multiprocessor's."""
    return 2**16 // (32 * t.warps * t.programs) // 8 * 8


def _room(work: Work, t: Tiling, target: Target) -> int:
    """Bytes of shared memory, at most: what is read ahead, x in another order, and the numbers
    themselves where matrix units do not take them from registers."""
    x, columns = 2 * t.rows * work.together, t.columns * work.together
    ahead = columns * work.bits // 8 + x + 8 * t.columns
    direct = target.has_warpgroups and t.rows <= FEW
    return (t.stages - 1) * ahead + x + (0 if direct else 2 * columns)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """What the memory takes, the weight as it is stored and sums that are added up later; or what
    the tiles take, if that is more."""
    work, t = found(region), tiling_of(knobs, TILINGS)
    parts, cost = 1 if t.direct else work.parts(t, target.units), region_cost(region)
    memory = cost.bytes / (REACHED * target.stream)
    tiles = -(-work.rows // t.rows) * -(-work.columns // t.columns)
    flops = 2.0 * tiles * t.rows * t.columns * work.steps
    idle = max(1.0, FILLED * target.units / (tiles * parts * t.warps / 4))
    seconds: float = max(memory, idle * flops / (t.reached * target.rate(KINDS[0], True)))
    if parts > 1:
        seconds += ADDED_S + 8.0 * parts * work.rows * work.columns / target.cache_bandwidth
    return seconds + target.launch


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, t = found(region), tiling_of(knobs, TILINGS)
    parts = 1 if t.direct else work.parts(t, ctx.target.units)
    scales = region.graph.types[work.given[2] or ""].dtype.bits
    after = follows(region, work)
    call = _few(work, t, after) if t.direct else _any(work, t, parts, scales, after)
    others = tuple(v for v, _ in work.others)
    tensors = tensors_of(region, (*work.given, *region.outputs, *others))

    def run(*given: Any) -> None:
        x, w, scale, zero, y, *rest = tensors(given)
        call(x, w, scale, zero, y, rest)

    room = 4 * parts * work.rows * work.columns if parts > 1 else 0
    note = f"tiles of {t.rows} × {t.columns}, {t.warps if t.direct else parts} parts of the sum"
    return Kernel(run, writes=True, workspace=room, note=note)


def _any(work: Work, t: Tiling, parts: int, scales: int, after: Any) -> Any:
    """``scales``: bits of one."""
    from deuteron.kernels.triton.quantized import Sizes, Tile, product

    groups, steps, late = work.steps // work.group, work.together, t.rows <= FEW
    size = Sizes(work.rows, work.columns, work.steps, groups)
    paired = scales == 16 and groups % 2 == 0
    how = steps, work.group // steps, parts, work.bits, late, t.stages, paired, 1, False
    return product(size, Tile(t.rows, t.columns, *how), after, t.warps)


def _few(work: Work, t: Tiling, after: Any) -> Any:
    from deuteron.kernels.triton.quantized_few import Sizes, Tile, product

    groups, line = work.steps // work.group, work.steps * work.bits // 32
    size = Sizes(work.rows, work.columns, work.steps, line, groups)
    ahead = max(t.stages * 4 // work.bits, 1)
    how = t.warps, ahead, work.group // STEPS, work.bits, t.early, True, False
    return product(size, Tile(t.rows, t.columns, *how), after, registers(t))


# The second is quicker where it was tried, but is taken only where a search measures it.
QUANTIZED = (
    Recipe(OP, (OP,), taken_by(found), _build, _knobs, _seconds, 0.9),
    Recipe(f"{OP}_few", (OP,), _refuse_few, _build, _knobs_few, _seconds, 0.9, by_estimate=False),
)
