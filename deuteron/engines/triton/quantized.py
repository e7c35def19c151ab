"""Linear layers of 8- and 4-bit weights on a GPU: the recipe around
``kernels/triton/quantized.py``, and ``quantized_few.py`` for up to 8 rows.

With up to FEW rows the time is that of reading the weight once; everything else is small. With more
rows it is that of a product. With very many, it may be faster to turn the weight into floats at
every call and use a library's product: the reference does that, so torch's engine offers it.
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
FEW = 16  # up to so many rows, sums are scaled and not the numbers of the weight
LEAST = 32  # fewest numbers of a group that are taken at a time
STEPS, STEPS_OF_MANY = 128, 64  # most numbers that are taken at a time, for few rows and for many
MOST, LONGEST = 2**16 - 1, 2**31 - 2**10  # most programs side by side; most lines, in 32 bits
REACHED = 0.8  # part of the bandwidth of a copy
FILLED = 2.5  # programs of four warps that keep a multiprocessor busy while some of them wait
ADDED_S = 1.2e-6  # seconds that a second kernel adds, which is launched early
# Seconds of the kernel for few rows, whose warps take turns: of a call; of a program, before its
# first numbers arrive and after its last; of a multiprocessor for one instruction of a warp. Within
# 12 % of 69 cases on an H200.
CALLED_S, ENDS_S, INSTRUCTION_S = 2.5e-6, 0.5e-6, 0.3e-9
# seconds of a turn that waits only for its own loads, by how many turns are loaded at once; and the
# factor for weights of 8 bits
ALONE_S, OF_BYTES = {1: 0.6e-6, 2: 0.5e-6}, 1.4


class Tiling(NamedTuple):
    """Rows and columns of a tile, warps and stages. ``programs``: sums are split among up to so
    many programs per multiprocessor. ``reached``: the part of libraries' speed per multiprocessor,
    which follows from a count of instructions (about three for a number, with few rows) and was not
    measured."""

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int
    reached: float


TILINGS = (
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


class Direct(NamedTuple):
    """A tile of few rows, whose weight goes from memory straight to registers: rows; warps that
    split the sum; how many of its turns a warp loads ahead; most registers of a thread; and how
    many programs then fit on a multiprocessor."""

    rows: int
    warps: int
    ahead: int
    registers: int
    programs: int


DIRECT = (  # where estimates are equal, the first was the faster one
    Direct(8, 8, 1, 128, 2),
    Direct(8, 8, 2, 128, 2),
    Direct(8, 4, 2, 128, 4),
    Direct(8, 4, 1, 128, 4),
    Direct(8, 4, 1, 168, 3),
)
COLUMNS = 16  # columns of a program, in tiles of few rows


@dataclass(frozen=True)
class Work:
    """A region as a product by a stored weight, and an epilogue: a formula of that and of other
    values."""

    given: tuple[str | None, ...]  # x, weight, scale, zero
    rows: int
    columns: int
    steps: int
    group: int
    bits: int
    formula: Traced
    others: tuple[tuple[str, str], ...]

    @property
    def read(self) -> int:
        """How many rows of x the kernel for few rows reads."""
        return 1 if self.rows == 1 else DIRECT[0].rows

    @property
    def together(self) -> int:
        """Steps of the sum that are taken at a time, all of one group."""
        return min(STEPS if self.rows <= FEW else STEPS_OF_MANY, self.group & -self.group)

    def parts(self, t: Tiling, units: int) -> int:
        """Into how many parts of equal length the sum is split."""
        tiles = -(-self.rows // t.rows) * -(-self.columns // t.columns)
        count = self.steps // self.together
        most = max(1, min(count, t.programs * units // tiles))
        return -(-count // -(-count // most))


def as_quantized_product(region: Region) -> Work:
    """The region as such a product; refuses any other."""
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


NAMED = ("rows", "columns", "warps", "stages", "programs")


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """For few rows several ways to split the sum, the best guess first. With zero points twice as
    much is multiplied, for which only tiles of up to 64 columns leave room."""
    work = as_quantized_product(region)
    rows = next((t.rows for t in TILINGS if t.rows >= work.rows), TILINGS[-1].rows)
    wide = 64 if rows <= FEW and work.given[3] is not None else 256
    fitting = [t for t in TILINGS if t.rows == rows and t.columns <= wide]
    fitting = [t for t in fitting if _room(work, t, target) <= target.shared_bytes]
    return [knobs_of(t, *NAMED) for t in fitting]


def _refuse_few(region: Region, target: Target, policy: Policy) -> None:
    work = as_quantized_product(region)
    refuse_if(not target.has_tensor_cores, "there are no matrix units")
    refuse_if(work.rows > DIRECT[0].rows, f"{work.rows} rows are not few", quiet=True)
    parts = f"groups of {work.group} are no multiple of {STEPS}"
    refuse_if(work.group % STEPS > 0, parts, f"use groups of {STEPS}")
    refuse_if(not _fitting(work), "what is asked for at once leaves no registers", quiet=True)


def _knobs_few(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    return [t._asdict() for t in _fitting(as_quantized_product(region))]


def _fitting(work: Work) -> list[Direct]:
    """The tiles for which a thread has enough registers, also for what it loads ahead."""
    return [t for t in DIRECT if _held(work, t) <= t.registers]


def _held(work: Work, t: Direct) -> int:
    """Registers of a thread: for sums, addresses, factors, and twice what it loads at once."""
    zeros = 0 if work.given[3] is None else 21
    return 40 + 2 * t.rows + t.ahead * (zeros + 4 * (work.bits + work.read))


def _room(work: Work, t: Tiling, target: Target) -> int:
    """The most bytes of shared memory: for what is read ahead, for x in another order, and for the
    weight as floats, where matrix units do not take it from registers."""
    x, columns = 2 * t.rows * work.together, t.columns * work.together
    ahead = columns * work.bits // 8 + x + 8 * t.columns
    straight = target.has_warpgroups and t.rows <= FEW
    return (t.stages - 1) * ahead + x + (0 if straight else 2 * columns)


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    """Estimated seconds: the longer of memory traffic, with the weight as it is stored, and of all
    tiles; plus adding up parts of sums."""
    work, t = as_quantized_product(region), tiling_of(knobs, TILINGS)
    parts, cost = work.parts(t, target.units), region_cost(region)
    memory = cost.bytes / (REACHED * target.stream)
    tiles = -(-work.rows // t.rows) * -(-work.columns // t.columns)
    flops = 2.0 * tiles * t.rows * t.columns * work.steps
    idle = max(1.0, FILLED * target.units / (tiles * parts * t.warps / 4))
    seconds: float = max(memory, idle * flops / (t.reached * target.rate(KINDS[0], True)))
    if parts > 1:
        seconds += ADDED_S + 8.0 * parts * work.rows * work.columns / target.cache_bandwidth
    return seconds + target.launch


def _seconds_few(region: Region, target: Target, knobs: Knobs) -> float:
    """Estimated seconds of all programs, round by round: in each turn warps wait for their loads,
    for the bandwidth, or for each other's instructions; nothing is read while programs end."""
    work, t = as_quantized_product(region), tiling_of(knobs, DIRECT)
    stream = target.stream / target.units
    issue = INSTRUCTION_S * (110 + 13 * work.bits + 8 * work.read)
    each = max(issue, COLUMNS * STEPS * work.bits / 8 / stream)
    turns = -(-work.steps // (STEPS * t.warps))
    alone = ALONE_S[t.ahead] * (OF_BYTES if work.bits == 8 else 1.0)
    left, taken = -(-work.columns // COLUMNS), CALLED_S
    while left > 0:
        warps = min(left / target.units, t.programs) * t.warps
        left -= t.programs * target.units
        taken += ENDS_S + turns * max(alone, warps * each)
    return max(taken, region_cost(region).bytes / target.stream)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, t = as_quantized_product(region), tiling_of(knobs, TILINGS)
    parts = work.parts(t, ctx.target.units)
    scales = region.graph.types[work.given[2] or ""].dtype.bits
    call = _any(work, t, parts, scales, follows(region, work))
    room = 4 * parts * work.rows * work.columns if parts > 1 else 0
    note = f"tiles of {t.rows} × {t.columns}, {parts} parts of the sum"
    return Kernel(_placed(region, work, call), writes=True, workspace=room, note=note)


def _build_few(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, t = as_quantized_product(region), tiling_of(knobs, DIRECT)
    call = _few(work, t, follows(region, work))
    note = f"tiles of {t.rows} × {COLUMNS}, {t.warps} parts of the sum"
    return Kernel(_placed(region, work, call), writes=True, note=note)


def _placed(region: Region, work: Work, call: Any) -> Any:
    """``call`` as a function of the tensors of the region."""
    others = tuple(v for v, _ in work.others)
    tensors = tensors_of(region, (*work.given, *region.outputs, *others))

    def run(*given: Any) -> None:
        x, w, scale, zero, y, *rest = tensors(given)
        call(x, w, scale, zero, y, rest)

    return run


def _any(work: Work, t: Tiling, parts: int, scales: int, after: Any) -> Any:
    """The call of the kernel for any number of rows. ``scales``: bits of a scale."""
    from deuteron.kernels.triton.quantized import Sizes, Tile, product

    groups, steps, late = work.steps // work.group, work.together, t.rows <= FEW
    size = Sizes(work.rows, work.columns, work.steps, groups)
    paired = scales == 16 and groups % 2 == 0
    how = steps, work.group // steps, parts, work.bits, late, t.stages, paired, 1, False
    return product(size, Tile(t.rows, t.columns, *how), after, t.warps)


def _few(work: Work, t: Direct, after: Any) -> Any:
    from deuteron.kernels.triton.quantized_few import Sizes, Tile, product

    groups, line = work.steps // work.group, work.steps * work.bits // 32
    size = Sizes(work.rows, work.columns, work.steps, line, groups)
    how = t.ahead, work.group // STEPS, work.bits, work.read, False
    return product(size, Tile(t.rows, COLUMNS, t.warps, *how), after, t.registers)


QUANTIZED = (
    Recipe(OP, (OP,), taken_by(as_quantized_product), _build, _knobs, _seconds, 0.9),
    Recipe(f"{OP}_few", (OP,), _refuse_few, _build_few, _knobs_few, _seconds_few, 0.9),
)
