"""A product, what follows it, and the layer or RMS norm of its rows, in one kernel on Hopper: the
recipe around ``normed_product`` of ``kernels/triton/product_hopper.py``.

The norm by itself reads and writes all of the result once more, 19 µs for 16384 rows of 768 numbers
whose product takes 28. Here the tiles of a row tell each other its statistics, and no number is
read twice. All tiles of a row must be at work at the same time, so that rows are at most as many
tiles long as there are multiprocessors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.match import operands
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.triton.common import refuse_elsewhere, refuse_empty, tiling_of
from deuteron.engines.triton.multiplied import KINDS, PRODUCTS, Product, found
from deuteron.engines.triton.product import GROUP, TILINGS, Tiling, seconds_of, sizes_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target

NORMS = {"layer_norm": True, "rms_norm": False}  # whether the mean is subtracted
OFFERED = tuple(t for t in TILINGS if t.divided and not t.gate)
MOST = 2**31 - 1  # parts of rows, which the kernel counts in 32 bits
MOST_STEPS = 8  # of what stands between the product and the norm: more spills registers
MEET_S = 2e-6  # until the tiles of the last rows know of each other
CLEAR_S = 1e-6  # a small kernel ahead, which sets counts to 0


@dataclass(frozen=True)
class Work:
    """A product with what follows it, ``inner``, and the norm behind it; ``kept``: whether others
    read what is normalised."""

    inner: Region
    product: Product
    norm: Node
    kept: bool


def whole(region: Region) -> Work:
    """The region as such; refused if it is something else."""
    *before, norm = region.nodes
    ends = norm.op in NORMS and bool(before) and before[0].op in PRODUCTS
    refuse_if(not ends, "is no product that ends in a norm of its rows", quiet=True)
    inner = region.part("product", before, 0)
    work, types, u = found(inner), region.graph.types, norm.uses[0]
    refuse_if(inner.outputs != (u,), "the norm reads something else", "leave it outside")
    odd = norm.attrs["dims"] != 1
    refuse_if(odd, "normalises over more than the last dimension", "reshape x")
    odd = types[work.x].dtype.short not in KINDS or work.w2 is not None or not work.even
    refuse_if(odd or work.count > 1, "is no product of two matrices with even lines of 16 bits")
    much = len(work.formula.statements) > MOST_STEPS
    refuse_if(much, "what stands between takes registers that the norm needs", "leave it outside")
    same = types[u].dtype == types[norm.output].dtype == types[work.x].dtype
    refuse_if(not same, "the norm reads or writes another type than the product")
    flat = all(types[v].is_layout("contiguous") for v in norm.uses[1:])
    refuse_if(not flat, "a weight of the norm is not in row-major order", "make it contiguous")
    return Work(inner, work, norm, u in region.outputs)


def _across(work: Work, t: Tiling) -> int:
    return -(-work.product.columns // t.columns)


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    refuse_elsewhere(target)
    refuse_empty(region)
    work = whole(region)
    refuse_if(not target.has_warpgroups, f"{target.name} has no warps that divide the work")
    far = max(_across(work, t) for t in OFFERED) > target.units
    refuse_if(far, "rows are longer than tiles of all multiprocessors", "normalise apart")
    parts = 2 * (work.product.rows + OFFERED[0].rows) * power_of_two(_across(work, OFFERED[0]))
    refuse_if(parts > MOST, "there are too many rows to count", "split the batch")


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    named = ("rows", "columns", "stages")
    ways = sorted(OFFERED, key=lambda t: _seconds_by(whole(region), t, target))
    return [{n: getattr(t, n) for n in named} for t in ways[:1]]


def _seconds_by(work: Work, t: Tiling, target: Target) -> float:
    """The product with what follows it; that others meet is hidden but for the last time."""
    return seconds_of(work.inner, work.product, t, target) + MEET_S + CLEAR_S + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_by(whole(region), tiling_of(knobs, OFFERED), target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.product_hopper import Norm, Tile, normed_product

    work, t = whole(region), tiling_of(knobs, OFFERED)
    types, p, across = region.graph.types, work.product, _across(work, t)
    kinds = [kind for _, kind in p.others]
    alike = [kind == "all" and types[v].dtype == types[p.x].dtype for v, kind in p.others]
    residual = alike.index(True) if True in alike else None
    group = max(1, min(GROUP, ctx.target.units // across))
    norm = Norm(NORMS[work.norm.op], work.norm.attrs["eps"], power_of_two(across), work.kept)
    how = p.left.turned, p.right.turned, False, residual, False, 1, norm, 1, False
    tile = Tile(t.rows, t.columns, t.steps, t.stages, group, *how)
    call = normed_product(sizes_of(p), tile, p.formula, kinds, ctx.target.units)
    there = (*region.inputs, *region.outputs)
    given = operands(work.norm)
    x, w = there.index(p.x), there.index(p.w)
    results = (work.norm.output, *work.norm.uses[:1]) if work.kept else (work.norm.output,)
    ys = [there.index(v) for v in results]
    beside = [there.index(v) for v, _ in p.others]
    last = [there.index(given[n]) if n in given else None for n in ("weight", "bias")]

    def run(*ts: Any) -> None:
        weights = (None if i is None else ts[i] for i in last)
        call(ts[x], ts[w], [ts[i] for i in ys], [ts[i] for i in beside], *weights)

    note = f"tiles of {t.rows} × {t.columns} × {t.steps}, which meet along rows"
    room = 8 * (p.rows + t.rows) * norm.across
    return Kernel(run, writes=True, workspace=room, note=note)


PRODUCT_NORM = Recipe(
    "product_norm", tuple(NORMS), _refuse, _build, _knobs, _seconds, 0.9, by_estimate=False
)
