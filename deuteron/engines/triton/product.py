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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import (
    LINE,
    refuse_elsewhere,
    refuse_empty,
    refuse_uneven,
    tiling_of,
)
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.formula import CannotLower, Traced, is_scalar, trace
from deuteron.policy import Policy
from deuteron.target import Target

PRODUCTS = ("linear", "matmul")
KINDS = ("f16", "bf16")
BYTES = ("i8", "f8e4m3", "f8e5m2")  # of which the sums have 32 bits
MOST = 2**31 - 1  # a size that kernels count in 32 bits


class Tiling(NamedTuple):
    """A tile of the result, the steps of the sum at a time, warps, stages, the part of what
    libraries get out of a multiprocessor that it reaches, as it was seen on an H200, whether warps
    divide the work, as Hopper's do, whether it is for a gate and what passes it, whether it is read
    by pointers, and into how many parts a sum is shared out."""

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


TILINGS = (
    Tiling(128, 128, 64, 4, 5, 0.93, divided=True),
    Tiling(64, 128, 64, 4, 6, 0.80, divided=True),
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
OFFERED = 3
START_S = 3.5e-6  # until the copy engine has been told of all matrices
TILE_S = 0.6e-6  # what begins and ends a tile
# what follows, for each number: to store it, and for each step of the formula. While warps divide
# the work, others multiply meanwhile.
STORE_S, STEP_S = 0.03e-9, 0.009e-9
GROUP = 8  # tiles of rows that are walked together
FEWEST = 256  # steps of a part of a sum: fewer are not worth adding up
MOST_PARTS = 16
SKINNY = 64  # rows up to which a sum may be shared out among programs that read by pointers
PART_ROUNDS = 2  # programs of a multiprocessor that share out a sum by pointers
ADDED_S = 1.5e-6  # a second kernel, which was launched early
EVEN = 8  # numbers that are read at a time where all sizes are multiples of it
UNEVEN_STEPS = 32  # at a time where not: each number is read by itself, and takes a register
UNEVEN = 0.3  # of the speed that is left where lines begin anywhere and are read number by number


class Matrix(NamedTuple):
    """A factor as lines of numbers side by side: whether it is turned, how far apart they begin,
    and how far apart its batches do, 0 where all share one."""

    turned: bool
    line: int
    outer: int = 0
    inner: int = 0


@dataclass(frozen=True)
class Product:
    """A region as x · w, or as x · w and x · w₂, and a formula of that and of other values: how
    each of them lies. ``batches``: how many products there are, as two numbers; ``even``: whether
    the copy engine can read and write all of it."""

    x: str
    w: str
    w2: str | None
    left: Matrix
    right: Matrix
    rows: int
    columns: int
    steps: int
    formula: Traced
    others: tuple[tuple[str, str], ...]  # a value, and how it lies
    batches: tuple[int, int] = (1, 1)
    even: bool = True

    @property
    def count(self) -> int:
        """How many products there are."""
        return prod(self.batches)

    def tiles(self, t: Tiling) -> int:
        """How many tiles the results are."""
        return self.count * -(-self.rows // t.rows) * -(-self.columns // t.columns)


def found(region: Region) -> Product:
    """The region as a product with what follows it; refused if it is none."""
    there = not set(region.ops).isdisjoint(PRODUCTS)
    refuse_if(not there, "has no product of matrices", quiet=True)
    several = "let only one value of the region be read outside"
    refuse_if(len(region.outputs) != 1, f"has {len(region.outputs)} outputs", several)
    types = region.graph.types
    node, *more = products = [n for n in region.nodes if n.op in PRODUCTS]
    x, w = node.uses[:2]
    out = types[node.output]
    refuse_if(min(types[x].rank, types[w].rank) < 2, "is not a product of a matrix by a matrix")
    second = [n.uses[1] for n in more]
    alike = all(n.op == node.op and n.uses[0] == x and types[n.uses[1]] == types[w] for n in more)
    refuse_if(len(more) > 1 or not alike, f"multiplies {len(products)} times")
    steps, kind = types[x].shape[-1], types[x].dtype
    odd = kind.short not in (*KINDS, *BYTES)
    refuse_if(odd, f"the factors are of {kind.short}, not of 16 bits", "cast them to bfloat16")
    biases = {n.output: n.uses[2] for n in products if len(n.uses) > 2}
    lead = _lead(region, products, biases)
    rows, columns = prod(out.shape[:-1]) // lead.products, out.shape[-1]
    far = max(rows, columns, steps, lead.products) > MOST
    refuse_if(far, "a size is beyond 2³¹", "split the batch")
    left = _matrix("first factor", _rows(types[x]) if lead.whole else types[x], lead)
    right = _matrix("second factor", types[w], lead)
    if node.op == "linear":
        right = right._replace(turned=not right.turned)
    result = types[region.outputs[0]]
    refuse_if(result.shape != out.shape, "what follows has another shape", "leave it outside")
    refuse_if(not result.is_layout("contiguous"), "the result is not in row-major order")
    whole = len(region.nodes) == 1 and result == out
    odd = not whole and (not result.dtype.is_float or result.dtype.bits not in (16, 32))
    refuse_if(odd, f"the result is of {result.dtype.short}", "cast after the region")
    far_apart = [(columns, result.dtype)]
    far_apart += [(step, kind) for m in (left, right) for step in (m.line, m.outer, m.inner)]
    even = all(step * k.bits // 8 % LINE == 0 for step, k in far_apart)
    if kind.bits == 8:
        refuse_if(not lead.whole, "is a batch of products of bytes", "multiply one by one")
        across = left.turned or not right.turned
        remedy = "lay the factor otherwise"
        refuse_if(across, "bytes that are summed do not lie side by side", remedy)
        refuse_uneven("a factor", (left.line | right.line), kind.bits)
        refuse_uneven("the result", columns, result.dtype.bits)
    formula, others = followed(region, products, biases, lead)
    sizes, w2 = (left, right, rows, columns, steps), second[0] if second else None
    return Product(x, w, w2, *sizes, formula, others, lead.batches, even)


# ---- batches


class Lead(NamedTuple):
    """The first sizes of a result, up to its rows, as two batches; ``whole``: there are none, and
    all but the last size are rows. ``inside``: which of the sizes are the inner batch."""

    batches: tuple[int, int] = (1, 1)
    whole: bool = True
    inside: tuple[bool, ...] = ()

    @property
    def products(self) -> int:
        """How many there are."""
        return prod(self.batches)


def _lead(region: Region, products: Sequence[Node], biases: Mapping[str, str]) -> Lead:
    """The sizes of a result that count products. Neighbours are one where every tensor goes from
    one of their places to the next by equal steps, or has but one for all; two may be left."""
    types, node = region.graph.types, products[0]
    x, w, out = (types[v] for v in (*node.uses[:2], node.output))
    if w.rank == 2 and (x.rank == 2 or x.is_layout("contiguous")):
        return Lead()
    sizes = out.shape[:-2]
    given = [x, w, out, *(types[v] for v in _beside(region, products, biases))]
    steps = [_steps(t, sizes) for t in given if t.rank >= 2]
    groups: list[list[int]] = []
    for d, size in enumerate(sizes):
        if size == 1:
            continue
        last = groups[-1][-1] if groups else None
        if last is not None and all(s[last] == s[d] * size for s in steps):
            groups[-1].append(d)
        else:
            groups.append([d])
    refuse_if(len(groups) > 2, "its batches lie in more than two steps", "make them contiguous")
    outer, inner = [[], *groups][-2:] if groups else ([], [])
    if len(groups) == 1:
        outer, inner = [], groups[0]
    counts = prod(sizes[d] for d in outer), prod(sizes[d] for d in inner)
    return Lead(counts, False, tuple(d in inner for d in range(len(sizes))))


def _steps(t: TensorType, sizes: Sequence[int]) -> list[int]:
    """How far apart a tensor's places lie along each of the first sizes of a result; 0 where it
    has one for all."""
    shape = (1,) * (len(sizes) - t.rank + 2) + t.shape[:-2]
    strides = (0,) * (len(sizes) - t.rank + 2) + t.strides[:-2]
    return [0 if n == 1 else step for n, step in zip(shape, strides, strict=True)]


def _beside(region: Region, products: Sequence[Node], biases: Mapping[str, str]) -> list[str]:
    """What a region reads besides the factors of its products, but for numbers known now."""
    rest = [n for n in region.nodes if n not in products]
    made = {n.output for n in region.nodes}
    read = dict.fromkeys(v for n in rest for v in n.uses if v not in made)
    given = dict.fromkeys((*biases.values(), *read))
    return [v for v in given if region.graph.scalar(v) is None]


def _rows(t: TensorType) -> TensorType:
    """A tensor as a matrix of its last dimension."""
    return TensorType.of((prod(t.shape[:-1]), t.shape[-1]), t.dtype) if t.rank > 2 else t


def _matrix(what: str, t: TensorType, lead: Lead) -> Matrix:
    """How a matrix lies in memory, or each of a batch of them."""
    (high, wide), (down, beside) = t.shape[-2:], t.strides[-2:]
    turned = beside != 1 and wide > 1
    if turned:
        high, wide, down, beside = wide, high, beside, down
    refuse_if(beside != 1 and wide > 1, f"the {what} has no numbers side by side", "copy it")
    line = down if high > 1 else wide
    refuse_if(line < wide, f"lines of the {what} share memory", "copy it")
    steps = _steps(t, lead.inside)
    pairs = [(s, inside) for s, inside in zip(steps, lead.inside, strict=True) if s]
    outer, inner = (min((s for s, i in pairs if i == is_it), default=0) for is_it in (False, True))
    return Matrix(turned, line, outer, inner)


def followed(
    region: Region, products: Sequence[Node], biases: Mapping[str, str], lead: Lead | None = None
) -> tuple[Traced, tuple[tuple[str, str], ...]]:
    """What follows the products, first the ``biases`` of their results, as one formula, and the
    values that it reads besides, each with how it lies, as in ``kernels/triton/product.LIES``."""
    graph, rest = region.graph, [n for n in region.nodes if n not in products]
    out, lead = graph.types[products[0].output], lead or Lead()
    given = _beside(region, products, biases)
    others = tuple((v, _kind(graph.types[v], out, lead)) for v in given)
    for n in rest:
        there = n.op == "cast" or is_scalar(table.get(n.op))
        refuse_if(not there, f"{n.op} has no formula", "leave it outside")
        t = graph.types[n.output]
        refuse_if(t.shape != out.shape or not t.dtype.is_float, f"{n.op} is of another kind")
    count = len(products)

    def formula(b: Any, *values: Any) -> Any:
        here = dict(zip((v for v, _ in others), values[count:], strict=True))
        for n, sums in zip(products, values, strict=False):
            bias = biases.get(n.output)
            here[n.output] = sums if bias is None else sums + here.get(bias, graph.scalar(bias))
        for n in rest:
            args = [None if v is None else here.get(v, graph.scalar(v)) for v in n.inputs]
            here[n.output] = args[0] if n.op == "cast" else b.call(n.op, *args, **n.attrs)
        return here[region.outputs[0]]

    names = ("sums", "more")[:count]
    try:
        traced = trace(formula, (*names, *(f"o{i}" for i in range(len(others)))), {})
    except CannotLower as reason:
        refuse_if(True, reason.reason, reason.remedy)
        raise
    unread = not all(map(traced.reads, names))
    refuse_if(unread, "what follows does not read the product")
    return traced, others


def _kind(t: TensorType, out: TensorType, lead: Lead) -> str:
    """How a value lies against the result."""
    odd = not t.dtype.is_float or t.dtype.bits > 32
    refuse_if(odd, f"reads a tensor of {t.dtype.short}", "leave it outside")
    refuse_if(not t.is_layout("contiguous"), "reads a tensor that is not in row-major order")
    if t.numel == 1:
        return "one"
    shape = (1,) * (out.rank - t.rank) + t.shape
    refuse_if(len(shape) > out.rank, "reads a tensor of another shape", "expand it")
    if shape == out.shape:
        return "all"
    if shape[-1] == out.shape[-1] and prod(shape[:-1]) == 1:
        return "columns"
    if lead.whole:
        refuse_if(shape != (*out.shape[:-1], 1), "reads a tensor of another shape", "expand it")
        return "rows"
    has = [n > 1 for n in shape]
    fits = all(n == of for n, of in zip(shape, out.shape, strict=True) if n > 1)
    refuse_if(not fits, "reads a tensor of another shape", "expand it")
    batches = [
        name
        for name, inside in (("o", False), ("i", True))
        if any(h for h, i in zip(has, lead.inside, strict=False) if i == inside)
    ]
    return "".join((*batches, "m" * has[-2], "n" * has[-1]))


def _refuse(bits: int, region: Region, target: Target, policy: Policy) -> None:
    refuse_elsewhere(target)
    refuse_empty(region)
    work = found(region)
    kind = region.graph.types[work.x].dtype
    refuse_if(kind.bits != bits, "is a matter of the other recipe", quiet=True)
    short = kind.is_float and bits == 8 and not target.has_fp8
    refuse_if(short, f"{target.name} multiplies no floats of 8 bits", "cast them to float16")


# ---- tiles, and what they take


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Knobs]:
    """The tiles that should be quickest, named by their sizes."""
    work = found(region)
    least = min(TILINGS, key=lambda t: t.rows).rows
    fitting = [t for t in TILINGS if t.rows <= max(least, 2 * work.rows)]
    fitting = [t for t in fitting if _fits(region, work, t, target)]
    ways = [t._replace(parts=n) for t in fitting for n in _parts(region, work, t, target)]
    ordered = sorted(ways, key=lambda t: seconds_of(region, work, t, target))
    if any(t.divided for t in ordered):  # the copy engine's others were never quicker there
        ordered = [t for t in ordered if t.divided or t.strided]
    first = {(t.divided, t.strided, t.parts > 1): t for t in reversed(ordered)}  # of each kind
    ordered = [t for t in ordered if t in first.values() or not (t.divided or t.strided)]
    named = ("rows", "columns", "stages", "divided", "strided", "parts")
    return [{name: getattr(t, name) for name in named} for t in ordered[:OFFERED]]


def _parts(region: Region, work: Product, t: Tiling, target: Target) -> Sequence[int]:
    """Into how many parts a sum may be shared out: as many as give every multiprocessor a tile."""
    bytes_ = region.graph.types[work.x].dtype.bits == 8
    tiles = work.tiles(t)
    if not (t.divided or t.strided) or bytes_ or work.w2 is not None or tiles >= target.units:
        return (1,)
    room = target.units * (PART_ROUNDS if t.strided else 1)
    depth = -(-work.steps // t.steps)
    most = min(room // tiles, MOST_PARTS, work.steps // FEWEST)
    if most < 2:
        return (1,)
    return (1, -(-depth // -(-depth // most)))  # none of them is empty


def _fits(region: Region, work: Product, t: Tiling, target: Target) -> bool:
    """Whether it reads such factors, its sums are in registers, and the tiles in shared memory:
    what is multiplied, in stages, and what goes in and out."""
    types, factors = region.graph.types, 1 if work.w2 is None else 2
    narrow = types[region.outputs[0]].dtype == types[work.x].dtype
    if types[work.x].dtype.bits == 8 if t.strided else not work.even:
        return False
    if t.divided and not (target.has_warpgroups and narrow and t.gate == (factors > 1)):
        return False
    if not t.divided and not t.strided and work.count > 1:
        return False
    if t.strided and work.count == 1 and work.even and work.rows > SKINNY:
        return False  # what is left to it are batches, odd lines, and sums in parts
    per_thread = t.rows * t.columns * factors // (32 * t.warps)
    whole = [v for v, kind in work.others if kind == "all"]
    moved = sum(types[v].dtype.bits for v in (*whole, *region.outputs)) // 8
    tiles = 0 if t.strided else t.rows * t.columns * (4 if t.divided else moved)
    bytes_ = t.stages * (t.rows + t.columns * factors) * t.steps * 2 + tiles + 2048
    return per_thread <= 128 and bytes_ <= target.shared_bytes


def seconds_of(region: Region, work: Product, tiling: Tiling, target: Target) -> float:
    """Rounds of tiles at the rate of a multiprocessor, or what the memory takes if that is more."""
    kind = main_dtype(region)
    tiles, steps = work.tiles(tiling) * tiling.parts, -(-work.steps // tiling.parts)
    each = 2.0 * tiling.rows * tiling.columns * max(steps, tiling.steps)
    each *= 1 if work.w2 is None else 2
    rate = tiling.reached * target.rate(kind, True) / target.units
    follows = tiling.rows * tiling.columns * (STORE_S + STEP_S * len(work.formula.statements))
    multiplies = each / rate + TILE_S
    tile = max(multiplies, follows) if tiling.divided else multiplies + follows
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
    return seconds_of(region, found(region), _tiling(knobs), target)


def _tiling(knobs: Knobs) -> Tiling:
    rest = {name: value for name, value in knobs.items() if name != "parts"}
    found: Tiling = tiling_of(rest, TILINGS)
    return found._replace(parts=knobs["parts"])


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, tiling = found(region), _tiling(knobs)
    types, out = region.graph.types, region.graph.types[region.outputs[0]]
    kinds = [kind for _, kind in work.others]
    alike = [kind == "all" and types[v].dtype == out.dtype for v, kind in work.others]
    made = (
        _divided(work, tiling, kinds, alike, ctx)
        if tiling.divided
        else _strided(work, tiling, kinds, out.dtype.bits > 16)
        if tiling.strided
        else _plain(work, tiling, kinds, out.dtype.bits > 16, types[work.x].dtype.bits // 8, ctx)
    )
    x, w, w2 = (region.inputs.index(v) for v in (work.x, work.w, work.w2 or work.w))
    others = [region.inputs.index(v) for v, _ in work.others]
    factors = (x, w, w2)
    over = tuple((0, i) for i, same in zip(others, alike, strict=True) if same and i not in factors)

    def run(*t: Any) -> None:
        made(t[x], t[w], t[w2], t[-1], [t[i] for i in others])

    note = f"tiles of {tiling.rows} × {tiling.columns} × {tiling.steps}"
    note += ", warps divide the work" if tiling.divided else ""
    note += f", {tiling.parts} parts of the sum" if tiling.parts > 1 else ""
    room = 4 * tiling.parts * out.numel if tiling.parts > 1 else 0
    return Kernel(run, writes=True, workspace=room, note=note, over=over)


def _plain(
    work: Product, t: Tiling, kinds: Sequence[str], exact: bool, size_of: int, ctx: BuildContext
) -> Any:
    from deuteron.kernels.triton.product import Sizes, Tile, product

    size = Sizes(work.rows, work.columns, work.steps, work.left.line, work.right.line, work.columns)
    turned = work.left.turned, work.right.turned
    steps = t.steps * 2 // size_of
    tile = Tile(t.rows, t.columns, steps, GROUP, *turned, work.w2 is not None)
    how = t.warps, t.stages, exact
    return product(size, tile, work.formula, kinds, ctx.target.units, *how)


def sizes_of(work: Product) -> Any:
    """The sizes as kernels of strided and of divided work take them."""
    from deuteron.kernels.triton.product_strided import Sizes

    apart = work.left[1:] + work.right[1:]
    return Sizes(work.rows, work.columns, work.steps, work.count, work.batches[1], *apart)


def _strided(work: Product, t: Tiling, kinds: Sequence[str], exact: bool) -> Any:
    from deuteron.kernels.triton.product_strided import Tile, product

    turned = work.left.turned, work.right.turned
    beside = {work.rows if turned[0] else work.steps, work.steps if turned[1] else work.columns}
    even = not any(n % EVEN for n in (*beside, *work.left[1:], *work.right[1:]))
    most = t.steps if even else min(t.steps, UNEVEN_STEPS)
    steps = min(most, max(16, power_of_two(work.steps)))
    how = work.w2 is not None, t.parts, even, False
    tile = Tile(t.rows, t.columns, steps, GROUP, *turned, *how)
    return product(sizes_of(work), tile, work.formula, kinds, t.warps, t.stages, exact)


def _divided(
    work: Product, t: Tiling, kinds: Sequence[str], alike: Sequence[bool], ctx: BuildContext
) -> Any:
    from deuteron.kernels.triton.product_hopper import Tile, product

    turned = work.left.turned, work.right.turned
    residual = alike.index(True) if True in alike else None
    how = work.w2 is not None, residual, work.count > 1, t.parts, None, False
    tile = Tile(t.rows, t.columns, t.steps, t.stages, GROUP, *turned, *how)
    return product(sizes_of(work), tile, work.formula, kinds, ctx.target.units, exact=False)


# A kernel for each size takes seconds to build: plans by estimate leave products to libraries, but
# for those of bytes, which libraries here do not have.
_HOW = (_build, _knobs, _seconds, 0.9)
PRODUCT = (
    Recipe("product", PRODUCTS, partial(_refuse, 16), *_HOW, by_estimate=False),
    Recipe("product_of_bytes", PRODUCTS, partial(_refuse, 8), *_HOW),
)
