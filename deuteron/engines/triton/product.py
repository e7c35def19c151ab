"""Matrix products on a GPU with an elementwise epilogue: which tiles we offer, and how long they
should take. The kernels are ``kernels/triton/product.py``, ``product_hopper.py`` on Hopper, and
``product_strided.py`` for batches of products and for lines that the copy engine cannot read. Two
products of one tensor whose results are combined, such as a gate and the values that it gates, are
one kernel, too. Where a result has fewer tiles than there are multiprocessors, several programs
share a sum, and a second kernel adds up the parts.

Libraries multiply as fast or faster, but have few epilogues: for a gelu by the normal distribution,
a gate, or a sum with a residual, the product is written, read and written again. Whether one kernel
is faster than a library's and a generated one depends on the sizes, and is measured.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import CONVOLUTIONS, main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, MOST, Statistics, knobs_of, tiling_of
from deuteron.engines.triton.multiplied import PRODUCTS, SINGLE, Product, as_product, follows
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target


class Tiling(NamedTuple):
    """How a product is cut into tiles. ``steps``: terms of the sum that are taken at a time.
    ``reached``: the speed per multiprocessor as a part of what libraries reach, seen on an H200.
    ``divided``: the kernel for Hopper with specialised warps. ``gate``: for two products that are
    combined. ``strided``: the kernel that reads by pointers. ``parts``: into how many parts the sum
    is split. ``bytes_``: the Hopper kernel for 8-bit floats."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int
    reached: float
    divided: bool = False
    gate: bool = False
    strided: bool = False
    parts: int = 1
    bytes_: bool = False


TILINGS = (
    Tiling(128, 128, 64, 4, 5, 0.93, divided=True),
    Tiling(64, 128, 64, 4, 6, 0.80, divided=True),
    Tiling(128, 64, 64, 4, 7, 0.80, divided=True),
    Tiling(128, 64, 64, 4, 6, 1.0, divided=True, gate=True),
    Tiling(128, 256, 64, 8, 3, 0.86),
    Tiling(128, 128, 64, 8, 4, 0.80),
    Tiling(128, 128, 64, 8, 3, 0.70),
    Tiling(64, 128, 64, 4, 4, 0.58),
    Tiling(64, 64, 64, 4, 4, 0.38),
    Tiling(16, 64, 128, 4, 4, 0.12),
    Tiling(128, 128, 64, 8, 3, 0.6, strided=True),
    Tiling(64, 64, 64, 4, 3, 0.4, strided=True),
    Tiling(32, 64, 64, 4, 3, 0.25, strided=True),
    Tiling(16, 64, 128, 4, 4, 0.15, strided=True),
)
OF_8_BITS = (  # for 8-bit floats on Hopper
    Tiling(128, 256, 64, 4, 3, 0.95, divided=True, bytes_=True),
    Tiling(128, 128, 64, 4, 4, 0.85, divided=True, bytes_=True),
)
OFFERED = 2  # tilings that are offered, and one more where a sum may be split
START_S = 3.5e-6  # seconds until the copy engine knows all matrices
TILE_S = 0.6e-6  # seconds to begin and end a tile
# The epilogue, per number of the result: seconds to store it, and seconds for each operation of the
# formula, if one group of warps does so while others multiply; and the part of this time that
# remains if all warps do it together.
STORE_S, STEP_S, TOGETHER = 0.03e-9, 0.0075e-9, 0.65
# Seconds to read a number of another tensor in the epilogue, where all warps multiply first.
READ_S = 0.05e-9
READ_APART_S = 0.13e-9  # the same by pointers
NEAR = 1.25  # without specialised warps, a tiling is offered up to this times the best estimate
MOST_LIVE = 320  # most numbers of a thread: several results, and tensors of their shape they read
GROUP = 8  # rows of tiles that are walked together
FEWEST = 256  # fewest steps in a part of a split sum: fewer are not worth adding up
MOST_PARTS = 16  # most parts of a sum, unless it is so long that each part has LONG_PART steps
LONG_PART = 2048
SKINNY = 64  # most rows of an ordinary product for the kernel that reads by pointers
PART_ROUNDS = 2  # programs per multiprocessor where a sum is split and read by pointers
EVEN = 8  # numbers that are loaded at a time where all sizes are multiples of it
UNEVEN_STEPS = 32  # terms at a time where they are not: each number is a load and takes a register
# bytes per second that one program reads of its factors, by the copy engine and by its own warps
FED, FED_SLOWLY = 1e11, 4.5e10
UNEVEN = 0.4  # of the memory's speed is left where rows begin anywhere and numbers are single loads


def _refuse(
    bits: int, tilings: Sequence[Tiling], region: Region, target: Target, policy: Policy
) -> None:
    work = as_product(region)
    kind = region.graph.types[work.x].dtype
    refuse_if(kind.bits != bits, "is a matter of the other recipe", quiet=True)
    exact = bits == 32 and policy.float32 == "ieee"
    refuse_if(exact, "multiplies float32 by tensor cores only", "Policy(float32='tf32x3')")
    short = kind.is_float and bits == 8 and not target.has_fp8
    refuse_if(short, f"{target.name} multiplies no floats of 8 bits", "cast them to float16")
    some = any(tiling_fits(region, work, t, target) for t in tilings)
    refuse_if(not some, "no tile of our kernels holds what is read and stored for it", "cut it")


# ---- tiles, and what they take


def _knobs(
    tilings: Sequence[Tiling], region: Region, target: Target, policy: Policy
) -> Sequence[Knobs]:
    """The tilings with the lowest estimates."""
    work = as_product(region)
    least = min(tilings, key=lambda t: t.rows).rows
    fitting = [t for t in tilings if t.rows <= max(least, 2 * work.rows)]
    fitting = [t for t in fitting if tiling_fits(region, work, t, target)]
    ways = [t._replace(parts=n) for t in fitting for n in _parts(region, work, t, target)]

    def price(t: Tiling) -> tuple[float, int]:  # ties: the one whose tiles reach less over the edge
        seconds = round(1e7 * seconds_of(region, work, t, target))
        return seconds, work.tiles(t.rows, t.columns) * t.rows * t.columns

    ordered = sorted(ways, key=price)
    if any(t.divided and not t.bytes_ for t in ordered):
        most_s = NEAR * price(ordered[0])[0]
        ordered = [t for t in ordered if t.divided or t.strided or price(t)[0] <= most_s]
        first = {(t.divided, t.parts > 1): t for t in reversed(ordered)}  # the best of each kind
        ordered = [t for t in ordered if t in first.values()]
    named = ("rows", "columns", "stages", "divided", "strided", "parts")
    most = OFFERED + any(t.parts > 1 for t in ordered)
    wide = region.graph.types[work.x].dtype.short == SINGLE
    how = {"precision": policy.float32} if wide else {}
    return [knobs_of(t, *named) | how for t in ordered[:most]]


def _parts(region: Region, work: Product, t: Tiling, target: Target) -> Sequence[int]:
    """Into how many parts a sum may be split, so that every multiprocessor has a tile."""
    bytes_ = region.graph.types[work.x].dtype.bits == 8
    tiles = work.tiles(t.rows, t.columns)
    whole = () if t.divided and not _is_narrow(region, work) else (1,)
    if work.line > work.columns and work.count == 1:
        return (1,)  # the kernel that adds up parts cannot leave gaps between rows
    if not (t.divided or t.strided) or bytes_ or work.w2 is not None or tiles >= target.units:
        return whole
    room = target.units * (PART_ROUNDS if t.strided else 1)
    depth = -(-work.steps // t.steps)
    few = max(MOST_PARTS, work.steps // LONG_PART)
    most = min(room // tiles, few, work.steps // FEWEST)
    if most < 2:
        return whole
    shared = -(-depth // -(-depth // most))  # so that no part is empty
    return (shared,) if work.steps >= MOST_PARTS * LONG_PART // 2 else (*whole, shared)


def _is_narrow(region: Region, work: Product) -> bool:
    """Whether the result has the type of the factors: the copy engine stores no other."""
    types = region.graph.types
    return types[region.outputs[0]].dtype == types[work.x].dtype


def tiling_fits(region: Region, work: Product, t: Tiling, target: Target) -> bool:
    """Whether a tiling can compute this product: its kernel reads such factors, the sums fit in
    registers, and all tiles in shared memory (the factors in stages, operands of the epilogue,
    results)."""
    types, factors = region.graph.types, 1 if work.w2 is None else 2
    if types[work.x].dtype.bits == 8 if t.strided else not work.even:
        return False
    if work.tiles(t.rows, t.columns) > MOST:
        return False
    kind = types[work.x].dtype
    narrow = _is_narrow(region, work) or bool(_parts(region, work, t, target))
    if t.divided and (not target.has_warpgroups or t.bytes_ != (kind.bits == 8)):
        return False
    if t.bytes_ and (not kind.is_float or factors > 1 or len(region.outputs) > 1):
        return False
    usual = narrow and kind.bits == 16 and t.gate == (factors > 1)
    if t.divided and not t.bytes_ and not usual:
        return False
    if not t.divided and not t.strided and work.count > 1:
        return False
    several = len(region.outputs) > 1
    if several and not t.divided and not t.strided:
        return False
    usual = work.count == 1 and work.even and not (several and not target.has_warpgroups)
    if t.strided and usual and work.rows > SKINNY:
        return False  # pointers: for batches, unaligned rows, several results and split sums only
    per_thread = t.rows * t.columns * factors // (32 * t.warps * (2 if t.bytes_ else 1))
    whole = [v for v, kind in work.others if kind == "all"]
    if several and per_thread * (len(region.outputs) + len(whole)) > MOST_LIVE * factors:
        return False  # values that several results share stay in registers until all are stored
    moved = sum(types[v].dtype.bits for v in (*whole, *region.outputs)) // 8
    tiles = 0 if t.strided else t.rows * t.columns * (4 if t.divided else moved)
    if t.bytes_:
        tiles = t.rows * t.columns * types[region.outputs[0]].dtype.bits // 8
    bytes_ = t.stages * (t.rows + t.columns * factors) * t.steps * 2 + tiles + 2048
    # without warpgroups, matrix units read factors from registers: a float32 is two numbers there
    both = types[work.x].dtype.short == SINGLE and not target.has_warpgroups
    return per_thread <= (32 if both else 128) and bytes_ <= target.shared_bytes


def seconds_of(region: Region, work: Product, tiling: Tiling, target: Target) -> float:
    """Seconds of all rounds of tiles at the rate of a multiprocessor, or of the memory traffic if
    that takes longer."""
    kind = main_dtype(region)
    tiles = work.tiles(tiling.rows, tiling.columns) * tiling.parts
    steps = -(-work.steps // tiling.parts)
    each = 2.0 * tiling.rows * tiling.columns * max(steps, tiling.steps)
    each *= 1 if work.w2 is None else 2
    of = region.graph.types[work.x].dtype
    rate = tiling.reached * target.rate(kind, True, allow_tf32=of.short == SINGLE) / target.units
    follows = tiling.rows * tiling.columns * (STORE_S + STEP_S * work.formula.flops)
    bytes_ = of.bits // 8 * (tiling.rows + tiling.columns) * steps
    fed = bytes_ / (FED if tiling.divided else FED_SLOWLY)
    multiplies = max(each / rate, fed)
    whole = sum(kind == "all" for _, kind in work.others)
    reads = tiling.rows * tiling.columns * whole * (READ_APART_S if tiling.strided else READ_S)
    alone = multiplies + TOGETHER * follows + reads
    tile = max(multiplies, follows) if tiling.divided else alone
    tile += TILE_S
    rounds = -(-tiles // target.units)
    memory, _ = times(region_cost(region), kind, True, target)
    if tiling.strided:  # several programs share a multiprocessor and hide each other's waiting
        tile, memory = tile - TILE_S / 2, memory / (1.0 if work.even else UNEVEN)
    seconds = max(rounds * tile, memory / 0.85) + target.launch
    if not tiling.strided:
        seconds += START_S
    if tiling.parts > 1:
        left = 4.0 * work.count * work.rows * work.columns * (2 * tiling.parts)
        seconds += ADDED_S + left / target.cache_bandwidth
    return seconds


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    tiling = _tiling(knobs)
    if knobs.get("precision") == "tf32x3":  # three products instead of one
        tiling = tiling._replace(reached=tiling.reached / 3)
    return seconds_of(region, as_product(region), tiling, target)


def _tiling(knobs: Knobs) -> Tiling:
    rest = {name: value for name, value in knobs.items() if name not in ("parts", "precision")}
    return tiling_of(rest, (*TILINGS, *OF_8_BITS))._replace(parts=knobs["parts"])


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, tiling = as_product(region), _tiling(knobs)
    types, out = region.graph.types, region.graph.types[region.outputs[0]]
    after, outs = follows(region, work), len(region.outputs)
    alike = [kind == "all" and types[v].dtype == out.dtype for v, kind in work.others]
    of = types[work.x].dtype.bits // 8, knobs.get("precision", "tf32")
    made = (
        _of_bytes(work, tiling, after, ctx)
        if tiling.bytes_
        else _divided(work, tiling, after, alike, outs, ctx.target.units)
        if tiling.divided
        else _strided(work, tiling, after, outs, of)
        if tiling.strided
        else _plain(work, tiling, after, of, ctx)
    )
    x, w, w2 = (region.inputs.index(v) for v in (work.x, work.w, work.w2 or work.w))
    others = [region.inputs.index(v) for v, _ in work.others]
    factors = (x, w, w2)
    over = tuple((0, i) for i, same in zip(others, alike, strict=True) if same and i not in factors)
    first = len(region.inputs)

    def run(*t: Any) -> None:
        ys = t[first:] if tiling.divided or tiling.strided else t[first]
        ys = ys[0] if tiling.bytes_ else ys
        made(t[x], t[w], t[w2], ys, [t[i] for i in others])

    note = f"tiles of {tiling.rows} × {tiling.columns} × {tiling.steps}"
    note += ", warps divide the work" if tiling.divided else ""
    note += f", {tiling.parts} parts of the sum" if tiling.parts > 1 else ""
    room = 4 * tiling.parts * out.numel if tiling.parts > 1 else 0
    # of several results, later ones read operands after the first result is written
    over = over if len(region.outputs) == 1 else ()
    return Kernel(run, writes=True, workspace=room, note=note, over=over)


def _plain(work: Product, t: Tiling, after: Any, of: tuple[int, str], ctx: BuildContext) -> Any:
    """The call of the kernel with descriptors. ``of``: bytes of a number of the factors, and how
    float32 is multiplied."""
    from deuteron.kernels.triton.product import Sizes, Tile, product

    size = Sizes(work.rows, work.columns, work.steps, work.left.line, work.right.line, work.line)
    turned = work.left.turned, work.right.turned
    steps = t.steps * 2 // of[0]
    tile = Tile(t.rows, t.columns, steps, GROUP, *turned, work.w2 is not None, of[1])
    return product(size, tile, after, ctx.target.units, t.warps, t.stages)


def sizes_of(work: Product) -> Any:
    """The sizes as the strided and the divided kernels take them."""
    from deuteron.kernels.triton.product_strided import Sizes

    apart = work.left[1:] + work.right[1:]
    size = work.rows, work.columns, work.steps, work.count, work.batches[1]
    return Sizes(*size, *apart, work.line)


def _strided(work: Product, t: Tiling, after: Any, outs: int, of: tuple[int, str]) -> Any:
    from deuteron.kernels.triton.product_strided import Tile, product

    turned = work.left.turned, work.right.turned
    beside = {work.rows if turned[0] else work.steps, work.steps if turned[1] else work.columns}
    even = not any(n % EVEN for n in (*beside, *work.left[1:], *work.right[1:]))
    most = t.steps * 2 // of[0]
    most = most if even else min(most, UNEVEN_STEPS)
    steps = min(most, max(16, power_of_two(work.steps)))
    how = work.w2 is not None, t.parts, even, outs, of[1], False
    tile = Tile(t.rows, t.columns, steps, GROUP, *turned, *how)
    return product(sizes_of(work), tile, after, t.warps, t.stages)


def _divided(
    work: Product,
    t: Tiling,
    after: Any,
    alike: Sequence[bool],
    outs: int,
    programs: int,
    group: int = GROUP,
) -> Any:
    from deuteron.kernels.triton.product_hopper import Tile, product

    turned = work.left.turned, work.right.turned
    residual = alike.index(True) if True in alike else None
    how = work.w2 is not None, residual, work.count > 1, t.parts, outs, False
    tile = Tile(t.rows, t.columns, t.steps, t.stages, group, *turned, *how)
    return product(sizes_of(work), tile, after, programs)


def with_statistics(region: Region, t: Tiling, ctx: BuildContext) -> Statistics:
    """A product alone, on Hopper, which also computes statistics of its columns."""
    from deuteron.kernels.triton.statistics_hopper import shares

    work = as_product(region)
    tiles, across = work.tiles(t.rows, t.columns), -(-work.columns // t.columns)
    programs, pieces = shares(tiles, across, ctx.target.units)
    made = _divided(work, t, follows(region, work), [], 1, programs, group=1)
    x, w = (region.inputs.index(v) for v in (work.x, work.w))
    others = [region.inputs.index(v) for v, _ in work.others]

    def run(*given: Any, to: Any) -> None:
        made(given[x], given[w], given[w], given[-1:], [given[i] for i in others], to)

    return Statistics(run, pieces, f"tiles of {t.rows} × {t.columns} × {t.steps}")


def _of_bytes(work: Product, t: Tiling, after: Any, ctx: BuildContext) -> Any:
    from deuteron.kernels.triton.product_hopper_bytes import PART, Sizes, Tile, product

    size = Sizes(work.rows, work.columns, work.steps, work.left.line, work.right.line, 1, 1)
    tile = Tile(*PART, t.stages, t.columns // PART[1], GROUP, False)
    call = product(size, tile, after, ctx.target.units)
    return lambda x, w, w2, y, others: call(x, w, (), y, others)


# A kernel takes seconds to build for each size, so plans made by estimate leave products to the
# libraries, except products of bytes, which the libraries do not have.
def _recipe(
    name: str, ops: Sequence[str], bits: int, tilings: Sequence[Tiling], by_estimate: bool
) -> Recipe:
    how = _build, partial(_knobs, tilings), _seconds, 0.9
    refuse = partial(_refuse, bits, tilings)
    return Recipe(name, ops, refuse, *how, by_estimate=by_estimate, strided=bits != 8)


PRODUCT = (
    _recipe("product", (*PRODUCTS, *CONVOLUTIONS), 16, TILINGS, by_estimate=False),
    _recipe("product_of_bytes", PRODUCTS, 8, TILINGS, by_estimate=True),
    _recipe("product_of_8_bits", PRODUCTS, 8, OF_8_BITS, by_estimate=False),
    _recipe("product_of_floats", PRODUCTS, 32, TILINGS, by_estimate=False),
)
