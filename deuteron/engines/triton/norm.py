"""Gradients of layer norm and RMS norm on a GPU: the recipe around ``kernels/triton/norm.py``, and
how the rows are spread over the multiprocessors.

The gradient of a norm sums along rows for dx and down the columns for dweight: one pass over
memory computes both, where generated code would take a pass for each. The same pass also does a sum
of gradients before it, and elementwise work on dx after it with a sum down the columns of that, as
for the gradient of a bias.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from deuteron.codegen.triton_render import power_of_two
from deuteron.engines.base import BuildContext, Kernel, refuse_if
from deuteron.engines.libraries import modelled_seconds
from deuteron.engines.match import operands, results
from deuteron.engines.recipes import Recipe
from deuteron.engines.roofline import main_dtype, region_cost
from deuteron.engines.triton.common import MOST, settings, tensors_of
from deuteron.ir.graph import Node
from deuteron.ir.region import Region
from deuteron.ops import table
from deuteron.ops.formula import CannotLower, Traced, is_scalar, trace
from deuteron.policy import Policy
from deuteron.target import Target

NORMS = {"layer_norm_grad": True, "rms_norm_grad": False}  # whether the statistics include a mean
SAME = ("cast", "reshape")  # these keep the numbers and change only their type or shape
REACHED = 0.92  # part of the bandwidth of a copy, as measured for kernels of this kind

# ---- how rows are spread -------------------------------------------------------------------------

LONGEST = {2: 8192, 4: 8192, 8: 2048}  # most columns that registers hold, by bytes of an element
LONGEST_PLAIN = 16384  # the same without a mean and in 16 bits, which takes fewer registers
SHARED = 96 << 10  # bytes of shared memory that every GPU since sm_80 has
IN_FLIGHT = 72 << 10  # bytes of loads that keep a multiprocessor busy: more compete with stores
MOST_STAGES = 5
COLUMNS = 512  # columns of a program, where rows are long
WAVES = 4  # programs per multiprocessor, where rows are long


@dataclass(frozen=True)
class RowGradient:
    """The work: the gradient of a norm over ``rows`` of ``columns`` elements that share
    statistics."""

    rows: int
    columns: int
    eps: float
    centred: bool
    size: int  # bytes of an element
    reads: int  # tensors of the size of x that are read: x, grad and perhaps extra

    @property
    def is_long(self) -> bool:
        """Whether a row does not fit in registers."""
        plain = self.size == 2 and not self.centred
        longest = LONGEST_PLAIN if plain else LONGEST[self.size]
        return power_of_two(self.columns) > longest


@dataclass(frozen=True)
class Spread:
    """How it runs: each of ``programs`` takes ``rows`` at a time, with loads in ``stages``."""

    rows: int
    programs: int
    warps: int
    stages: int

    def scratch(self, work: RowGradient, sums: int) -> int:
        """Bytes of partial results for ``sums`` parameters, and of the sums of long rows."""
        partials = 0 if self.programs == 1 else sums * self.programs * work.columns
        return max(work.size, 4) * (partials + (5 * work.rows if work.is_long else 0))


def spreads(work: RowGradient, units: int) -> list[Spread]:
    """The ways worth trying on a GPU with ``units`` multiprocessors, the best guess first.

    A tile of 4096 elements has 8 for each thread of 16 warps. Several smaller programs on a
    multiprocessor hide each other's waiting for sums along rows, which is better for short rows,
    and for a norm with a mean.
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
    """Rows grouped in tiles, with as many tiles in flight as shared memory holds."""
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


# ---- what is around it ---------------------------------------------------------------------------


class Step(NamedTuple):
    """A region as one call. ``node``: the gradient of the norm. If its operand ``grad`` is computed
    on the way in, ``before`` lists the values and ``grad`` is the formula. If dx is used further,
    ``formula`` computes that from dx and the values ``after``; ``made`` says under which names its
    results are stored (None: not stored), and ``summed`` which result is summed down the columns
    (-1: none), into ``total``."""

    node: Node
    before: tuple[str, ...] = ()
    grad: Traced | None = None
    after: tuple[str, ...] = ()
    formula: Traced | None = None
    made: tuple[str | None, ...] = ()
    summed: int = -1
    total: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The values that have an element for every element of x."""
        given = operands(self.node)
        own = [given[n] for n in ("x", "grad", "extra") if n in given]
        made = () if self.grad is None else (given["grad"],)
        return (*(v for v in own if v not in made), *self.before, *self.after)


@lru_cache(maxsize=1024)
def step_of(region: Region) -> Step:
    """The gradient of a norm with the elementwise work before its ``grad`` and after its dx."""
    norms = [n for n in region.nodes if n.op in NORMS]
    here = " + ".join(region.ops)
    refuse_if(not norms, f"runs {', '.join(NORMS)}, not {here}", quiet=True)
    refuse_if(len(norms) > 1, f"runs one of {', '.join(NORMS)}, not {here}")
    (node,) = norms
    if len(region.nodes) == 1:
        return Step(node)
    read, before = set(node.uses), list[Node]()
    for n in reversed(region.nodes):
        if n is not node and not read.isdisjoint(n.outputs):
            read.update(n.uses)
            before.insert(0, n)
    after = [n for n in region.nodes if n is not node and n not in before]
    step, grad, dx = Step(node), operands(node)["grad"], node.outputs[0]
    made_before = {v for n in before for v in n.outputs}
    other = made_before & {*region.outputs, *node.uses[:1], *node.uses[2:]}
    refuse_if(bool(other), "what is before it makes more than its gradient", "leave it outside")
    if before:
        given, formula = _traced(region, node, before, (), (grad,))
        step = step._replace(before=given, grad=formula)
    sums = [n for n in after if n.op == "sum"]
    beyond = _beyond(sums, after)
    work = [n for n in after if n not in beyond]
    kept = tuple(n.output for n in work if n.output in region.outputs)
    if work:
        found = tuple(dict.fromkeys((*kept, *(n.uses[0] for n in sums))))
        given, formula = _traced(region, node, work, (dx,), found)
        made = tuple(v if v in kept else None for v in found)
        step = step._replace(after=given, formula=formula, made=made)
    if sums:
        step = step._replace(**_summed(region, node, beyond, found if work else ()))
    return step


def _beyond(sums: Sequence[Node], after: Sequence[Node]) -> list[Node]:
    """The sums, and all nodes that depend on them."""
    made, found = {n.output for n in sums}, list(sums)
    for n in after:
        if n not in sums and not made.isdisjoint(n.uses):
            made.add(n.output)
            found.append(n)
    return found


def _traced(
    region: Region,
    node: Node,
    nodes: Sequence[Node],
    first: tuple[str, ...],
    results: tuple[str, ...],
) -> tuple[tuple[str, ...], Traced]:
    """Elementwise ``nodes`` as a formula of ``first`` and of other values, which it returns too;
    all have the shape of x."""
    graph, made = region.graph, {*first, *(n.output for n in nodes)}
    numel = graph.types[node.uses[0]].numel
    read = dict.fromkeys(v for n in nodes for v in n.uses if v not in made)
    given = tuple(v for v in read if graph.scalar(v) is None)
    for value in (*given, *(n.output for n in nodes)):
        t = graph.types[value]
        apart = t.numel != numel or not t.is_layout("contiguous")
        refuse_if(apart, "what is around it is of another shape", "leave it outside")
        known = t.dtype.short == "bool" and value in given
        odd = not known and (not t.dtype.is_float or t.dtype.bits not in (16, 32))
        refuse_if(odd, f"what is around it is of {t.dtype.short}", "leave it outside")
    for n in nodes:
        there = n.op in SAME or is_scalar(table.get(n.op))
        refuse_if(not there or n.op == "dropout", f"{n.op} has no formula", "leave it outside")

    def formula(b: Any, *values: Any) -> Any:
        here = dict(zip((*first, *given), values, strict=True))
        for n in nodes:
            args = [None if v is None else here.get(v, graph.scalar(v)) for v in n.inputs]
            here[n.output] = args[0] if n.op in SAME else b.call(n.op, *args, **n.attrs)
        found = tuple(here[v] for v in results)
        return found if len(found) > 1 else found[0]

    names = (*(f"d{i}" for i in range(len(first))), *(f"o{i}" for i in range(len(given))))
    try:
        return given, trace(formula, names, {})
    except CannotLower as reason:
        refuse_if(True, reason.reason, reason.remedy)
        raise


def _summed(
    region: Region, node: Node, nodes: Sequence[Node], results: tuple[str, ...]
) -> dict[str, Any]:
    """Which of ``results`` is summed down its columns, and the name of the total."""
    total, *rest = nodes
    types = region.graph.types
    rows = types[total.uses[0]].shape
    down = tuple(total.attrs["axes"]) == tuple(range(len(rows) - 1))
    fits = down and rows[-1] == _columns(region, node) and total.uses[0] in results
    refuse_if(not fits, "a sum is not down the columns of what is made of dx", "leave it outside")
    value = total.output
    for n in rest:
        follows = n.op in SAME and n.uses[0] == value and value not in region.outputs
        refuse_if(not follows, f"{n.op} follows a sum", "leave it outside")
        value = n.output
    float_ = types[value].dtype.is_float and types[value].dtype.bits in (16, 32)
    refuse_if(not float_, f"a sum of {types[value].dtype.short}", "leave it outside")
    return {"summed": results.index(total.uses[0]), "total": value}


# ---- the recipe ----------------------------------------------------------------------------------


def _refuse(region: Region, target: Target, policy: Policy) -> None:
    step = step_of(region)
    refuse_types(region)
    joined = step.node.attrs["activation"] != "none"
    refuse_if(joined, "takes no activation along", "leave it outside")
    work = _work(region)
    refuse_if(work.rows > MOST, "has more than 2³¹ rows", "split the batch")
    alone = len(region.nodes) == 1 or not (work.is_long or work.size == 8)
    refuse_if(not alone, "takes long rows and float64 alone", "leave the rest outside")


def refuse_types(region: Region) -> None:
    """Refuse tensors in a memory order that kernels of norms cannot read."""
    types = [region.graph.types[v] for v in (*region.inputs, *region.outputs)]
    apart = not all(t.is_layout("contiguous") for t in types)
    refuse_if(apart, "a tensor is not in row-major order", 'use to_layout(x, "contiguous")')


def _columns(region: Region, node: Node) -> int:
    x = region.graph.types[node.uses[0]]
    return prod(x.shape[x.rank - node.attrs["dims"] :])


def _work(region: Region) -> RowGradient:
    step = step_of(region)
    node, x = step.node, region.graph.types[step.node.uses[0]]
    columns, size = _columns(region, node), x.dtype.bits // 8
    reads = -(-sum(region.graph.types[v].nbytes for v in step.reads) // max(x.nbytes, 1))
    return RowGradient(x.numel // columns, columns, node.attrs["eps"], NORMS[node.op], size, reads)


def _knobs(region: Region, target: Target, policy: Policy) -> Sequence[Mapping[str, Any]]:
    return [asdict(spread) for spread in spreads(_work(region), target.units)]


def _seconds(region: Region, target: Target, knobs: Mapping[str, Any]) -> float:
    """Seconds of the memory traffic at the speed that such kernels reach, of what long rows read a
    second time, and of the launches."""
    long, cost = _work(region).is_long, region_cost(region)
    once = modelled_seconds(cost, main_dtype(region), REACHED, False, target)
    again = long * cost.reads / target.stream
    launches = float((knobs["programs"] > 1) + long)
    return once + again + launches * target.launch


def _build(region: Region, knobs: Mapping[str, Any], ctx: BuildContext) -> Kernel:
    from deuteron.kernels.triton.norm import Operands, backward

    work, spread, step = _work(region), Spread(**settings(knobs)), step_of(region)
    after = None if step.formula is None else (step.formula, step.summed)
    call = backward(work, spread, step.grad, after)
    own = {**operands(step.node), **results(region, step.node), "dmade": step.total}
    pick = tensors_of(region, map(own.get, Operands._fields))
    before, beside, made = (tensors_of(region, v) for v in (step.before, step.after, step.made))

    def run(*tensors: Any) -> None:
        t = Operands(*pick(tensors))
        if len(region.nodes) > 1:
            around = (tuple(of(tensors)) or None for of in (before, beside, made))
            t = t._replace(**dict(zip(("before", "after", "made"), around, strict=True)))
        call(t)

    room = spread.scratch(work, sums_of(region, step.node) + (step.total is not None))
    return Kernel(run, writes=True, workspace=room, note="long" if work.is_long else "rows")


def sums_of(region: Region, node: Node) -> int:
    """How many gradients of parameters the region computes."""
    return len({"dweight", "dbias"} & set(results(region, node)))


NORM_BACKWARD = Recipe("norm_backward", NORMS, _refuse, _build, _knobs, _seconds, 0.4)
