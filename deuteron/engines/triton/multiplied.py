"""A region as a product of matrices, or of batches of them, with an epilogue: all that kernels
which multiply need to know of it.

The leading sizes of a result count its products; each factor may lack some of them and is then
broadcast. Kernels have two batch dimensions, an outer and an inner one; for each factor we note its
strides from one matrix to the next along both.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

from deuteron.engines.base import refuse_if
from deuteron.engines.triton.common import LINE, refuse_uneven
from deuteron.engines.triton.pixels import pixels_as_rows
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.formula import CannotLower, Traced, is_scalar, trace
from deuteron.ops.fp8 import overflows

PRODUCTS = ("linear", "matmul")
KINDS = ("f16", "bf16")
SINGLE = "f32"  # matrix units multiply it as the policy allows
BYTES = ("i8", "f8e4m3", "f8e5m2")  # types whose sums have 32 bits
MOST_RESULTS = 3  # such as a gated unit's two products, kept for the gradient, and its result
MOST = 2**31 - 1  # largest size: kernels count in 32 bits


class Matrix(NamedTuple):
    """A factor as contiguous lines of numbers: whether it is transposed, the stride from line to
    line, and the strides of the outer and inner batch, 0 where all products share one matrix."""

    turned: bool
    line: int
    outer: int = 0
    inner: int = 0


@dataclass(frozen=True)
class Product:
    """A region as x · w, or as x · w and x · w₂, and an epilogue: a formula of that and of other
    values. ``batches``: how many products there are, as outer and inner batch; ``even``: whether
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
    others: tuple[tuple[str, str], ...]  # a value, and how it broadcasts to the result
    batches: tuple[int, int] = (1, 1)
    even: bool = True
    line: int = 0  # numbers from one row of the result to the next

    @property
    def count(self) -> int:
        """How many products there are."""
        return prod(self.batches)

    def tiles(self, rows: int, columns: int) -> int:
        """How many tiles of ``rows`` × ``columns`` cover the results."""
        return self.count * -(-self.rows // rows) * -(-self.columns // columns)


def as_product(region: Region) -> Product:
    """The region as a product with an epilogue; refuses any other. A convolution with windows of
    one pixel counts as a product, too."""
    region = pixels_as_rows(region)
    there = not set(region.ops).isdisjoint(PRODUCTS)
    refuse_if(not there, "has no product of matrices", quiet=True)
    several = f"let {MOST_RESULTS} values of the region be read outside"
    count = len(region.outputs)
    refuse_if(not 0 < count <= MOST_RESULTS, f"has {count} outputs", several)
    types = region.graph.types
    node, *more = products = [n for n in region.nodes if n.op in PRODUCTS]
    x, w = node.uses[:2]
    out = types[node.output]
    refuse_if(min(types[x].rank, types[w].rank) < 2, "is not a product of a matrix by a matrix")
    second = [n.uses[1] for n in more]
    alike = all(n.op == node.op and n.uses[0] == x and types[n.uses[1]] == types[w] for n in more)
    refuse_if(len(more) > 1 or not alike, f"multiplies {len(products)} times")
    steps, kind = types[x].shape[-1], types[x].dtype
    odd = kind.short not in (*KINDS, *BYTES, SINGLE)
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
    result, *beside = (types[v] for v in region.outputs)
    for each in (result, *beside):
        refuse_if(each.shape != out.shape, "what follows has another shape", "leave it outside")
        in_lines = each.is_layout("contiguous") or (lead.whole and not beside and each.line)
        refuse_if(not in_lines, "the result is not in row-major order")
    line = (result.line if lead.whole else None) or columns
    apart = beside and {t.dtype for t in (result, *beside)} != {kind}
    refuse_if(apart, "of several results some are of another type", "leave casts outside")
    whole = len(region.nodes) == 1 and result == out
    odd = not whole and (not result.dtype.is_float or result.dtype.bits > 32)
    refuse_if(odd, f"the result is of {result.dtype.short}", "cast after the region")
    refuse_overflow(region)
    far_apart = [(line, result.dtype)]
    far_apart += [(step, kind) for m in (left, right) for step in (m.line, m.outer, m.inner)]
    even = all(step * k.bits // 8 % LINE == 0 for step, k in far_apart)
    if kind.bits == 8:
        refuse_if(not lead.whole, "is a batch of products of bytes", "multiply one by one")
        across = left.turned or not right.turned
        remedy = "lay the factor otherwise"
        refuse_if(across, "bytes that are summed do not lie side by side", remedy)
        refuse_uneven("a factor", (left.line | right.line), kind.bits)
        refuse_uneven("the result", line, result.dtype.bits)
    formula, others = followed(region, products, biases, partial(kind_of, lead=lead))
    sizes, w2 = (left, right, rows, columns, steps), second[0] if second else None
    return Product(x, w, w2, *sizes, formula, others, lead.batches, even, line)


def refuse_overflow(region: Region) -> None:
    """Refuse regions in which rounding a result to 8 bits may overflow."""
    for v in region.outputs:
        remedy = overflows(region.graph, v)
        refuse_if(bool(remedy), f"{region.graph.types[v].dtype.name} may overflow", remedy)


# ---- batches


class Lead(NamedTuple):
    """The leading sizes of a result, before its rows, as two batches. ``whole``: there are none;
    all sizes but the last are rows. ``inside``: which of the sizes belong to the inner batch."""

    batches: tuple[int, int] = (1, 1)
    whole: bool = True
    inside: tuple[bool, ...] = ()

    @property
    def products(self) -> int:
        """How many there are."""
        return prod(self.batches)


ONE = Lead()  # no batches


def _lead(region: Region, products: Sequence[Node], biases: Mapping[str, str]) -> Lead:
    """The leading sizes of a result, which count its products, merged into two batches; refuses if
    more are left. Neighbouring sizes merge if every tensor steps through both with one stride (0
    where it has one matrix for all)."""
    types, node = region.graph.types, products[0]
    x, w, out = (types[v] for v in (*node.uses[:2], node.output))
    if w.rank == 2 and (x.rank == 2 or x.line):
        return ONE
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
    """A tensor's stride along each of the leading ``sizes`` of a result; 0 where it has size 1 and
    is broadcast."""
    shape = (1,) * (len(sizes) - t.rank + 2) + t.shape[:-2]
    strides = (0,) * (len(sizes) - t.rank + 2) + t.strides[:-2]
    return [0 if n == 1 else step for n, step in zip(shape, strides, strict=True)]


def _beside(region: Region, products: Sequence[Node], biases: Mapping[str, str]) -> list[str]:
    """What a region reads besides the factors of its products, except constant numbers."""
    rest = [n for n in region.nodes if n not in products]
    made = {n.output for n in region.nodes}
    read = dict.fromkeys(v for n in rest for v in n.uses if v not in made)
    given = dict.fromkeys((*biases.values(), *read))
    return [v for v in given if region.graph.scalar(v) is None]


def _rows(t: TensorType) -> TensorType:
    """A tensor as a matrix: all dimensions but the last become rows."""
    if t.rank == 2:
        return t
    shape = prod(t.shape[:-1]), t.shape[-1]
    return TensorType.of(shape, t.dtype, strides=(t.line or shape[1], 1))


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
    region: Region,
    products: Sequence[Node],
    biases: Mapping[str, str],
    lies: Callable[[TensorType, TensorType], str] | None = None,
) -> tuple[Traced, tuple[tuple[str, str], ...]]:
    """The epilogue of the products as one formula, which begins by adding their ``biases``, and the
    other values that it reads, each with how it broadcasts to the result, in the words of
    ``kernels/triton/product.LIES``. ``lies`` determines that; by default the result is one
    matrix."""
    graph, rest = region.graph, [n for n in region.nodes if n not in products]
    out, lies = graph.types[products[0].output], lies or kind_of
    given = _beside(region, products, biases)
    others = tuple((v, lies(graph.types[v], out)) for v in given)
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
        results = tuple(here[v] for v in region.outputs)
        return results if len(results) > 1 else results[0]

    names = ("sums", "more")[:count]
    try:
        traced = trace(formula, (*names, *(f"o{i}" for i in range(len(others)))), {})
    except CannotLower as reason:
        refuse_if(True, reason.reason, reason.remedy)
        raise
    unread = not all(map(traced.reads, names))
    refuse_if(unread, "what follows does not read the product")
    return traced, others


def refuse_result(result: TensorType, out: TensorType) -> None:
    """Refuse a result that our kernels cannot store: its shape is not that of the sums ``out``, or
    its type is no float of up to 32 bits."""
    refuse_if(result.shape != out.shape, "what follows has another shape", "leave it outside")
    odd = not result.dtype.is_float or result.dtype.bits > 32
    refuse_if(odd, f"the result is of {result.dtype.short}", "cast after the region")


def follows(region: Region, work: Any) -> Any:
    """The epilogue of ``work`` in the form that kernels take; the first result of the region
    decides whether results are float32."""
    from deuteron.kernels.triton.product import EpilogueFormula

    wide = region.graph.types[region.outputs[0]].dtype.bits > 16
    return EpilogueFormula(work.formula, tuple(kind for _, kind in work.others), wide)


def kind_of(t: TensorType, out: TensorType, lead: Lead = ONE) -> str:
    """How a value broadcasts to the result, in the words of ``kernels/triton/product.LIES``."""
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
