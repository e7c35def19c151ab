"""Matrix products on a GPU with all that follows them element by element: the recipe around
``kernels/triton/product.py``, ``product_hopper.py`` where the GPU is one, and
``product_strided.py`` for many products at once and for lines that the copy engine does not read;
which tiles it offers, and what they should take. Two products of one tensor whose results meet, as
a gate and what passes it do, are one kernel as well. Where there are fewer tiles of the result than
multiprocessors, sums are shared out, and a second kernel adds up the parts.

Libraries multiply as fast or faster, but few of them finish: of a gelu by the normal distribution,
a gate or a sum with a residual the product is written, read and written again. Whether one kernel
is quicker than a library's and a generated one depends on the sizes, and is measured.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import CONVOLUTIONS, main_dtype, region_cost, times
from deuteron.engines.triton.common import ADDED_S, MOST, Statistics, knobs_of, tiling_of
from deuteron.engines.triton.multiplied import PRODUCTS, SINGLE, Product, follows, found
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import Target


class Tiling(NamedTuple):
    """A tile of the result, the steps of the sum at a time, warps, stages, the part of what
    libraries get out of a multiprocessor that it reaches, as it was seen on an H200, whether warps
    divide the work, as Hopper's do, whether it is for a gate and what passes it, whether it is read
    by pointers, into how many parts a sum is shared out, and whether it is for 8-bit floats."""

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
OF_8_BITS = (  # floats on a Hopper
    Tiling(128, 256, 64, 4, 3, 0.95, divided=True, bytes_=True),
    Tiling(128, 128, 64, 4, 4, 0.85, divided=True, bytes_=True),
)
OFFERED = 2  # and one more where sums may be shared out
START_S = 3.5e-6  # until the copy engine has been told of all matrices
TILE_S = 0.6e-6  # what begins and ends a tile
# what follows, for each number: to store it, and for each operation of the formula, by the warps
# that do so while others multiply; and the part of it that all warps together take
STORE_S, STEP_S, TOGETHER = 0.03e-9, 0.0075e-9, 0.65
READ_S = 0.05e-9  # a number of another tensor, where it is read after all multiply; by pointers
READ_APART_S = 0.13e-9
NEAR = 1.25  # times what the quickest should take: one that does not divide the work may win yet
MOST_LIVE = 320  # numbers of a thread: results, and tensors of their shape that they read
GROUP = 8  # tiles of rows that are walked together
FEWEST = 256  # steps of a part of a sum: fewer are not worth adding up
MOST_PARTS = 16  # unless a sum is long: then each part has so many steps
LONG_PART = 2048
SKINNY = 64  # rows up to which a sum may be shared out among programs that read by pointers
PART_ROUNDS = 2  # programs of a multiprocessor that share out a sum by pointers
EVEN = 8  # numbers that are read at a time where all sizes are multiples of it
UNEVEN_STEPS = 32  # at a time where not: each number is read by itself, and takes a register
# bytes a second that one program reads of its factors, by the copy engine and by its warps
FED, FED_SLOWLY = 1e11, 4.5e10
UNEVEN = 0.4  # of the speed that is left where lines begin anywhere and are read number by number


def _refuse(
    bits: int, tilings: Sequence[Tiling], region: Region, target: Target, policy: Policy
) -> None:
    work = found(region)
    kind = region.graph.types[work.x].dtype
    refuse_if(kind.bits != bits, "is a matter of the other recipe", quiet=True)
    exact = bits == 32 and policy.float32 == "ieee"
    refuse_if(exact, "multiplies float32 by tensor cores only", "Policy(float32='tf32x3')")
    short = kind.is_float and bits == 8 and not target.has_fp8
    refuse_if(short, f"{target.name} multiplies no floats of 8 bits", "cast them to float16")
    some = any(fits(region, work, t, target) for t in tilings)
    refuse_if(not some, "no tile of our kernels holds what is read and stored for it", "cut it")


# ---- tiles, and what they take


def _knobs(
    tilings: Sequence[Tiling], region: Region, target: Target, policy: Policy
) -> Sequence[Knobs]:
    """The tiles that should be quickest, named by their sizes."""
    work = found(region)
    least = min(tilings, key=lambda t: t.rows).rows
    fitting = [t for t in tilings if t.rows <= max(least, 2 * work.rows)]
    fitting = [t for t in fitting if fits(region, work, t, target)]
    ways = [t._replace(parts=n) for t in fitting for n in _parts(region, work, t, target)]

    def price(t: Tiling) -> tuple[float, int]:  # of equals the one that computes less in vain
        seconds = round(1e7 * seconds_of(region, work, t, target))
        return seconds, work.tiles(t.rows, t.columns) * t.rows * t.columns

    ordered = sorted(ways, key=price)
    if any(t.divided and not t.bytes_ for t in ordered):
        most_s = NEAR * price(ordered[0])[0]
        ordered = [t for t in ordered if t.divided or t.strided or price(t)[0] <= most_s]
        first = {(t.divided, t.parts > 1): t for t in reversed(ordered)}  # of each kind
        ordered = [t for t in ordered if t in first.values()]
    named = ("rows", "columns", "stages", "divided", "strided", "parts")
    most = OFFERED + any(t.parts > 1 for t in ordered)
    wide = region.graph.types[work.x].dtype.short == SINGLE
    how = {"precision": policy.float32} if wide else {}
    return [knobs_of(t, *named) | how for t in ordered[:most]]


def _parts(region: Region, work: Product, t: Tiling, target: Target) -> Sequence[int]:
    """Into how many parts a sum may be shared out: as many as give every multiprocessor a tile."""
    bytes_ = region.graph.types[work.x].dtype.bits == 8
    tiles = work.tiles(t.rows, t.columns)
    whole = () if t.divided and not _is_narrow(region, work) else (1,)
    if work.line > work.columns and work.count == 1:
        return (1,)  # what adds up parts writes whole buffers
    if not (t.divided or t.strided) or bytes_ or work.w2 is not None or tiles >= target.units:
        return whole
    room = target.units * (PART_ROUNDS if t.strided else 1)
    depth = -(-work.steps // t.steps)
    few = max(MOST_PARTS, work.steps // LONG_PART)
    most = min(room // tiles, few, work.steps // FEWEST)
    if most < 2:
        return whole
    shared = -(-depth // -(-depth // most))  # none of them is empty
    return (shared,) if work.steps >= MOST_PARTS * LONG_PART // 2 else (*whole, shared)


def _is_narrow(region: Region, work: Product) -> bool:
    """Whether results are of the type of the factors, as the copy engine stores them."""
    types = region.graph.types
    return types[region.outputs[0]].dtype == types[work.x].dtype


def fits(region: Region, work: Product, t: Tiling, target: Target) -> bool:
    """Whether it reads such factors, its sums are in registers, and the tiles in shared memory:
    what is multiplied, in stages, and what goes in and out."""
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
        return False  # what is left to it are batches, odd lines, several results, sums in parts
    per_thread = t.rows * t.columns * factors // (32 * t.warps * (2 if t.bytes_ else 1))
    whole = [v for v, kind in work.others if kind == "all"]
    if several and per_thread * (len(region.outputs) + len(whole)) > MOST_LIVE * factors:
        return False  # what several results share is in registers until the last is stored
    moved = sum(types[v].dtype.bits for v in (*whole, *region.outputs)) // 8
    tiles = 0 if t.strided else t.rows * t.columns * (4 if t.divided else moved)
    if t.bytes_:
        tiles = t.rows * t.columns * types[region.outputs[0]].dtype.bits // 8
    bytes_ = t.stages * (t.rows + t.columns * factors) * t.steps * 2 + tiles + 2048
    # both parts of a float32 are in registers where the matrix units read them from there
    both = types[work.x].dtype.short == SINGLE and not target.has_warpgroups
    return per_thread <= (32 if both else 128) and bytes_ <= target.shared_bytes


def seconds_of(region: Region, work: Product, tiling: Tiling, target: Target) -> float:
    """Rounds of tiles at the rate of a multiprocessor, or what the memory takes if that is more."""
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
    if tiling.strided:  # several programs of a multiprocessor take turns
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
    if knobs.get("precision") == "tf32x3":  # as many products
        tiling = tiling._replace(reached=tiling.reached / 3)
    return seconds_of(region, found(region), tiling, target)


def _tiling(knobs: Knobs) -> Tiling:
    rest = {name: value for name, value in knobs.items() if name not in ("parts", "precision")}
    return tiling_of(rest, (*TILINGS, *OF_8_BITS))._replace(parts=knobs["parts"])


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, tiling = found(region), _tiling(knobs)
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
    over = over if len(region.outputs) == 1 else ()  # others are read after the first is written
    return Kernel(run, writes=True, workspace=room, note=note, over=over)


def _plain(work: Product, t: Tiling, after: Any, of: tuple[int, str], ctx: BuildContext) -> Any:
    """``of``: bytes of a number that is multiplied, and how float32 is."""
    from deuteron.kernels.triton.product import Sizes, Tile, product

    size = Sizes(work.rows, work.columns, work.steps, work.left.line, work.right.line, work.line)
    turned = work.left.turned, work.right.turned
    steps = t.steps * 2 // of[0]
    tile = Tile(t.rows, t.columns, steps, GROUP, *turned, work.w2 is not None, of[1])
    return product(size, tile, after, ctx.target.units, t.warps, t.stages)


def sizes_of(work: Product) -> Any:
    """The sizes as kernels of strided and of divided work take them."""
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
    """A product by itself, on a Hopper, which leaves statistics of its columns."""
    from deuteron.kernels.triton.statistics_hopper import shares

    work = found(region)
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


# A kernel for each size takes seconds to build: plans by estimate leave products to libraries, but
# for those of bytes, which libraries here do not have.
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
