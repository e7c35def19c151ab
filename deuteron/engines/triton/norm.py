"""Gradients of layer norm and RMS norm on a GPU: the recipe around ``kernels/triton/norm.py``, and
how the rows are spread over the multiprocessors.

The gradient of a norm sums along rows for dx and down the columns for dweight: one pass over
memory makes both, where generated code would take one for each.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import only_node, operands, results
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, modelled_seconds, region_cost
from deuteron.engines.triton.common import MOST, picker, settings
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

NORMS = {"layer_norm_grad": True, "rms_norm_grad": False}  # whether statistics have a mean
REACHED = 0.92  # of the bandwidth of a copy, as measured for kernels of this kind

# ---- how rows are spread -------------------------------------------------------------------------

LONGEST = {2: 8192, 4: 8192, 8: 2048}  # columns that registers hold, by the bytes of an element
LONGEST_PLAIN = 16384  # without a mean and in 16 bits, which takes fewer registers
SHARED = 96 << 10  # bytes of shared memory that every GPU since sm_80 has
IN_FLIGHT = 72 << 10  # and those of loads that keep one busy: more take turns with the stores
MOST_STAGES = 5
COLUMNS = 512  # of a program, where rows are long
WAVES = 4  # programs per multiprocessor there


@dataclass(frozen=True)
class RowGradient:
    """What is asked for: the gradient of ``rows`` of ``columns`` elements that share statistics."""

    rows: int
    columns: int
    eps: float
    centred: bool
    size: int  # bytes of an element
    reads: int  # tensors of the size of x that are read: x, grad and perhaps extra

    @property
    def is_long(self) -> bool:
        """Whether registers do not hold a row."""
        plain = self.size == 2 and not self.centred
        longest = LONGEST_PLAIN if plain else LONGEST[self.size]
        return power_of_two(self.columns) > longest


@dataclass(frozen=True)
class Spread:
    """How it is run: ``rows`` at a time by each of ``programs``, with loads in ``stages``."""

    rows: int
    programs: int
    warps: int
    stages: int

    def scratch(self, work: RowGradient, sums: int) -> int:
        """Bytes of partial results for ``sums`` parameters, and of the sums of long rows."""
        partials = 0 if self.programs == 1 else sums * self.programs * work.columns
        return max(work.size, 4) * (partials + (5 * work.rows if work.is_long else 0))


def spreads(work: RowGradient, units: int) -> list[Spread]:
    """Those worth trying on a GPU of ``units`` multiprocessors, the best guess first.

    A tile of 4096 elements is 8 for each thread of 16 warps. Smaller programs on a multiprocessor
    cover each other's waiting for sums along rows: the better where rows are short, and for a norm
    with a mean.
    """
    if work.is_long:
        across = -(-work.columns // COLUMNS)
        return [Spread(4, max(1, min(work.rows // 16, WAVES * units // across)), 4, 3)]
    width = power_of_two(work.columns)
    shares = [(1, 16), (2, 8), (4, 4)]  # programs per unit, warps
    if width <= 1024:
        shares = [(4, 4), (8, 2), (2, 8)]
    elif work.centred:
        shares = [(2, 8), (1, 16)]
    fitting = [(p, w) for p, w in shares if p == 1 or width <= 512 * w]
    return list(dict.fromkeys(_shared_out(work, units, p, w) for p, w in fitting))


def _shared_out(work: RowGradient, units: int, per_unit: int, warps: int) -> Spread:
    """Rows in tiles, as many in flight as shared memory holds."""
    width = power_of_two(work.columns)
    tile = warps * 32 * (8 if work.size < 8 else 4)  # elements that suit the registers
    most = per_unit * units
    together = max(1, min(tile // width, work.rows // most))
    if work.rows * width <= tile:
        together = work.rows  # one program takes all, and there are no partial results
    rows = power_of_two(together)
    tiles = -(-work.rows // rows)
    stages = 1
    if tiles > most and width <= LONGEST[work.size]:
        each = per_unit * rows * width * work.size * work.reads
        stages += min(MOST_STAGES - 1, max(min(2, SHARED // each), IN_FLIGHT // each))
    return Spread(rows, min(tiles, most), max(1, min(warps, rows * width // 256)), stages)


# ---- the recipe ----------------------------------------------------------------------------------


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    node = only_node(region, NORMS)
    refuse_types(region)
    joined = node.attrs["activation"] != "none"
    refuse_if(joined, "takes no activation along", "leave it outside")
    refuse_if(_work(region).rows > MOST, "has more than 2³¹ rows", "split the batch")


def refuse_types(region: Region) -> None:
    """What kernels of norms want of their tensors."""
    types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
    apart = not all(t.is_layout("contiguous") for t in types)
    refuse_if(apart, "a tensor is not in row-major order", 'use to_layout(x, "contiguous")')


def _work(region: Region) -> RowGradient:
    node = region.nodes[0]
    x = region.graph.types[node.uses[0]]
    columns = prod(x.shape[x.rank - node.attrs["dims"] :])
    reads = 2 + ("extra" in operands(node))
    size = x.dtype.bits // 8
    return RowGradient(x.numel // columns, columns, node.attrs["eps"], NORMS[node.op], size, reads)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    return [asdict(spread) for spread in spreads(_work(region), target.units)]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """The bytes at the speed that such kernels reach, once more for what long rows read again, and
    the launches. Fewer rows than programs leave multiprocessors idle."""
    long, cost = _work(region).is_long, region_cost(region)
    once = modelled_seconds(cost, main_dtype(region), REACHED, False, target)
    again = long * cost.reads / target.stream
    launches = float((knobs["programs"] > 1) + long)
    return once + again + launches * target.launch


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.norm import Operands, backward

    work, spread = _work(region), Spread(**settings(knobs))
    call, pick = backward(work, spread), picker(region, Operands)
    room = spread.scratch(work, sums_of(region))
    note = "long" if work.is_long else "rows"
    return Kernel(lambda *ts: call(pick(ts)), writes=True, workspace=room, note=note)


def sums_of(region: Region) -> int:
    """How many gradients of parameters are asked for."""
    return len({"dweight", "dbias"} & set(results(region, region.nodes[0])))


NORM_BACKWARD = Recipe("norm_backward", NORMS, _refuse, _build, _knobs, _seconds, 0.4)
