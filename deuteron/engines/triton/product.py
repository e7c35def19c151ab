"""Matrix products on a GPU with all that follows them element by element: the recipe around
``kernels/triton/product.py``, and ``product_hopper.py`` where the GPU is one; which tiles it
offers, and what they should take. Two products of one tensor whose results meet, as a gate and what
passes it do, are one kernel as well.

Libraries multiply as fast or faster, but few of them finish: of a gelu by the normal distribution,
a gate or a sum with a residual the product is written, read and written again. Whether one kernel
is quicker than a library's and a generated one depends on the sizes, and is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.recipes import Knobs, Recipe
from deuteron.engines.roofline import main_dtype, region_cost, times
from deuteron.engines.triton.common import refuse_elsewhere, refuse_empty, refuse_uneven, tiling_of
from deuteron.engines.triton.pixels import pixels_as_rows
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
    divide the work, as Hopper's do, and whether it is for a gate and what passes it."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int
    reached: float
    divided: bool = False
    gate: bool = False


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
)
OFFERED = 2
START_S = 3.5e-6  # until the copy engine has been told of all matrices
TILE_S = 0.6e-6  # what begins and ends a tile
# what follows, for each number: to store it, and for each step of the formula. While warps divide
# the work, others multiply meanwhile.
STORE_S, STEP_S = 0.03e-9, 0.009e-9
GROUP = 8  # tiles of rows that are walked together


class Matrix(NamedTuple):
    """A factor as lines of numbers side by side: whether it is turned, and how far apart they
    begin."""

    turned: bool
    line: int


@dataclass(frozen=True)
class Product:
    """A region as x · w, or as x · w and x · w₂, and a formula of that and of other values: how
    each of them lies."""

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


def found(region: Region) -> Product:
    """The region as a product with what follows it; refused if it is none. A convolution that sees
    one pixel at a time is one, too."""
    region = pixels_as_rows(region)
    first = region.ops[0] if region.nodes else "nothing"
    refuse_if(first not in PRODUCTS, f"starts with {first}, not with a product", quiet=True)
    several = "let only one value of the region be read outside"
    refuse_if(len(region.outputs) != 1, f"has {len(region.outputs)} outputs", several)
    types = region.graph.types
    node, *more = products = [n for n in region.nodes if n.op in PRODUCTS]
    x, w = node.uses[:2]
    out = types[node.output]
    refuse_if(types[w].rank != 2 or types[x].rank < 2, "is not a product of a matrix by a matrix")
    second = [n.uses[1] for n in more]
    alike = all(n.op == node.op and n.uses[0] == x and types[n.uses[1]] == types[w] for n in more)
    refuse_if(len(more) > 1 or not alike, f"multiplies {len(products)} times")
    steps, columns = types[x].shape[-1], out.shape[-1]
    rows = prod(out.shape[:-1])
    kind = types[x].dtype
    odd = kind.short not in (*KINDS, *BYTES)
    refuse_if(odd, f"the factors are of {kind.short}, not of 16 bits", "cast them to bfloat16")
    refuse_if(max(rows, columns, steps) > MOST, "a size is beyond 2³¹", "split the batch")
    left = _matrix("first factor", _rows(types[x]))
    right = _matrix("second factor", types[w])
    if node.op == "linear":
        right = right._replace(turned=not right.turned)
    across = kind.bits == 8 and (left.turned or not right.turned)
    refuse_if(across, "bytes that are summed do not lie side by side", "lay the factor otherwise")
    result = types[region.outputs[0]]
    refuse_if(result.shape != out.shape, "what follows has another shape", "leave it outside")
    refuse_if(not result.is_layout("contiguous"), "the result is not in row-major order")
    whole = len(region.nodes) == 1 and result == out
    odd = not whole and (not result.dtype.is_float or result.dtype.bits not in (16, 32))
    refuse_if(odd, f"the result is of {result.dtype.short}", "cast after the region")
    refuse_uneven("the result", columns, result.dtype.bits)
    biases = {n.output: n.uses[2] for n in products if len(n.uses) > 2}
    formula, others = followed(region, products, biases)
    sizes = left, right, rows, columns, steps
    return Product(x, w, second[0] if second else None, *sizes, formula, others)


def _rows(t: TensorType) -> TensorType:
    """A tensor as a matrix of its last dimension."""
    if t.rank == 2:
        return t
    refuse_if(not t.is_layout("contiguous"), "the first factor is not in row-major order")
    return TensorType.of((prod(t.shape[:-1]), t.shape[-1]), t.dtype)


def _matrix(what: str, t: TensorType) -> Matrix:
    """How a matrix lies in memory."""
    turned = t.strides[1] != 1 and t.shape[1] > 1
    beside, line = t.strides if turned else reversed(t.strides)
    long = t.shape[0] if turned else t.shape[1]
    across = t.shape[1] if turned else t.shape[0]
    refuse_if(beside != 1 and long > 1, f"the {what} has no numbers side by side", "copy it")
    line = line if across > 1 else long
    refuse_if(line < long, f"lines of the {what} share memory", "copy it")
    refuse_uneven(f"the {what}", line, t.dtype.bits)
    return Matrix(turned, line)


def followed(
    region: Region,
    products: Sequence[Node],
    biases: Mapping[str, str],
    even: bool = True,
    lies: Callable[[TensorType, TensorType], str] | None = None,
) -> tuple[Traced, tuple[tuple[str, str], ...]]:
    """What follows the products, first the ``biases`` of their results, as one formula, and the
    values that it reads besides, each with how it lies, which ``lies`` says of other ways than
    those of matrices. ``even``: the copy engine reads those of the shape of the result."""
    graph, rest = region.graph, [n for n in region.nodes if n not in products]
    out = graph.types[products[0].output]
    made = {n.output for n in region.nodes}
    read = dict.fromkeys(v for n in rest for v in n.uses if v not in made)
    given = [v for v in (*biases.values(), *read) if graph.scalar(v) is None]
    lies = lies or partial(kind_of, even=even)
    others = tuple((v, lies(graph.types[v], out)) for v in dict.fromkeys(given))
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


def kind_of(t: TensorType, out: TensorType, even: bool) -> str:
    """How a value lies against the result."""
    odd = not t.dtype.is_float or t.dtype.bits > 32
    refuse_if(odd, f"reads a tensor of {t.dtype.short}", "leave it outside")
    refuse_if(not t.is_layout("contiguous"), "reads a tensor that is not in row-major order")
    if t.numel == 1:
        return "one"
    shape = (1,) * (out.rank - t.rank) + t.shape
    if shape == out.shape:
        if even:
            refuse_uneven("a residual", t.shape[-1], t.dtype.bits)
        return "all"
    if shape[-1] == out.shape[-1] and prod(shape[:-1]) == 1:
        return "columns"
    refuse_if(shape != (*out.shape[:-1], 1), "reads a tensor of another shape", "expand it")
    return "rows"


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
    ordered = sorted(fitting, key=lambda t: _seconds_of(region, work, t, target))
    if any(t.divided for t in ordered):  # the others were never the quicker ones there
        ordered = [t for t in ordered if t.divided][:1]
    named = ("rows", "columns", "stages", "divided")
    return [{name: getattr(t, name) for name in named} for t in ordered[:OFFERED]]


def _fits(region: Region, work: Product, t: Tiling, target: Target) -> bool:
    """Whether its sums are in registers, and the tiles in shared memory: what is multiplied, in
    stages, and what goes in and out."""
    types, factors = region.graph.types, 1 if work.w2 is None else 2
    narrow = types[region.outputs[0]].dtype == types[work.x].dtype
    if t.divided and not (target.has_warpgroups and narrow and t.gate == (factors > 1)):
        return False
    per_thread = t.rows * t.columns * factors // (32 * t.warps)
    whole = [v for v, kind in work.others if kind == "all"]
    moved = sum(types[v].dtype.bits for v in (*whole, *region.outputs)) // 8
    tiles = t.rows * t.columns * (4 if t.divided else moved)
    bytes_ = t.stages * (t.rows + t.columns * factors) * t.steps * 2 + tiles + 2048
    return per_thread <= 128 and bytes_ <= target.shared_bytes


def _seconds_of(region: Region, work: Product, tiling: Tiling, target: Target) -> float:
    """Rounds of tiles at the rate of a multiprocessor, or what the memory takes if that is more."""
    kind = main_dtype(region)
    tiles = -(-work.rows // tiling.rows) * -(-work.columns // tiling.columns)
    each = 2.0 * tiling.rows * tiling.columns * max(work.steps, tiling.steps)
    each *= 1 if work.w2 is None else 2
    rate = tiling.reached * target.rate(kind, True) / target.units
    follows = tiling.rows * tiling.columns * (STORE_S + STEP_S * len(work.formula.statements))
    multiplies = each / rate + TILE_S
    tile = max(multiplies, follows) if tiling.divided else multiplies + follows
    rounds = -(-tiles // target.units)
    memory, _ = times(region_cost(region), kind, True, target)
    return max(rounds * tile, memory / 0.85) + START_S + target.launch


def _seconds(region: Region, target: Target, knobs: Knobs) -> float:
    return _seconds_of(region, found(region), tiling_of(knobs, TILINGS), target)


def _build(region: Region, knobs: Knobs, ctx: BuildContext) -> Kernel:
    work, tiling = found(region), tiling_of(knobs, TILINGS)
    types, out = region.graph.types, region.graph.types[region.outputs[0]]
    kinds = [kind for _, kind in work.others]
    alike = [kind == "all" and types[v].dtype == out.dtype for v, kind in work.others]
    call = (
        _divided(work, tiling, kinds, alike, ctx)
        if tiling.divided
        else _plain(work, tiling, kinds, out.dtype.bits > 16, types[work.x].dtype.bits // 8, ctx)
    )
    x, w, w2 = (region.inputs.index(v) for v in (work.x, work.w, work.w2 or work.w))
    others = [region.inputs.index(v) for v, _ in work.others]
    factors = (x, w, w2)
    over = tuple((0, i) for i, same in zip(others, alike, strict=True) if same and i not in factors)

    def run(*t: Any) -> None:
        call(t[x], t[w], t[w2], t[-1], [t[i] for i in others])

    sizes = f"{tiling.rows} × {tiling.columns} × {tiling.steps}"
    how = ", warps divide the work" if tiling.divided else ""
    return Kernel(run, writes=True, note=f"tiles of {sizes}{how}", over=over)


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


def _divided(
    work: Product, t: Tiling, kinds: Sequence[str], alike: Sequence[bool], ctx: BuildContext
) -> Any:
    from deuteron.kernels.triton.product import Sizes
    from deuteron.kernels.triton.product_hopper import Tile, product

    size = Sizes(work.rows, work.columns, work.steps, work.left.line, work.right.line, work.columns)
    turned = work.left.turned, work.right.turned
    residual = alike.index(True) if True in alike else None
    tile = Tile(t.rows, t.columns, t.steps, t.stages, GROUP, *turned, work.w2 is not None, residual)
    return product(size, tile, work.formula, kinds, ctx.target.units, exact=False)


# A kernel for each size takes seconds to build: plans by estimate leave products to libraries, but
# for those of bytes, which libraries here do not have.
_HOW = (_build, _knobs, _seconds, 0.9)
PRODUCT = (
    Recipe("product", (*PRODUCTS, "conv"), partial(_refuse, 16), *_HOW, by_estimate=False),
    Recipe("product_of_bytes", PRODUCTS, partial(_refuse, 8), *_HOW),
)
