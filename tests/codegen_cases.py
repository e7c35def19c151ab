"""Cases for generated code: a region, its scalar program, tensors, and the verdict.

An engine's outputs are compared with the float64 reference under ``tolerances``; where the
result of a region is rounded on the way or jumps, the same holds with PyTorch's own error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random

import torch

from deuteron.codegen.lower import lower
from deuteron.codegen.scalar import ScalarProgram
from deuteron.codegen.triton_index import arranged
from deuteron.codegen.triton_knobs import choices
from deuteron.codegen.triton_render import Knobs, prepared
from deuteron.codegen.windows import WINDOWS
from deuteron.ir import Graph, GraphBuilder, TensorType
from deuteron.ir.region import Region
from deuteron.ops import TABLE, Fusion, OpDef, Ops, infer
from deuteron.ops.evaluate import evaluate, run_node
from deuteron.ops.formula import CannotLower
from deuteron.ops.samples import Sample
from tests.random_regions import random_region
from tests.tolerances import CANCELLED, EPS, allowed, error

SUMS = frozenset(
    {"sum", "mean", "var", "layer_norm", "group_norm", "instance_norm", "batch_norm_train"}
)
HUGE = 1e15  # numbers from which a few squares and products overflow in float32


@dataclass
class Case:
    """One region with tensors to run it on. Where it overflows on the way, a number may be nan
    (unless ``strict``), but not another number."""

    name: str
    graph: Graph
    feed: dict[str, torch.Tensor]
    program: ScalarProgram
    strict: bool = False

    @property
    def overflows(self) -> bool:
        """Whether a value is so large that few squares of it are left in float32."""
        g = self.graph
        values = tuple((v, v) for v, t in g.types.items() if t.dtype.is_float and t.numel)
        whole = Graph(g.name, g.inputs, values, g.nodes, g.types, g.constants)
        made = evaluate(whole, self.feed, float64=True).values()
        return any(((t.abs() > HUGE) & t.isfinite()).any() for t in made)

    @property
    def averages(self) -> bool:
        """Whether something is taken from its mean, of which nothing may be left."""
        return any(node.op in SUMS for node in self.graph.nodes)

    def empty_outputs(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        found = {}
        for _, value in self.graph.outputs:
            t = self.graph.types[value]
            fill = torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch, device=device)
            found[value] = fill.fill_(1) if t.dtype.kind == "bool" else fill.fill_(99)
        return found


def laid_out(values: torch.Tensor, strides: tuple[int, ...], device: str = "cpu") -> torch.Tensor:
    """A copy with these strides on a device, at an address as good or bad for vectors; along a
    stride of zero it holds one element."""
    once = values[tuple(slice(None) if step else slice(1) for step in strides)]
    first = int(values.data_ptr() % 16 != 0)
    span = first + 1 + sum((n - 1) * step for n, step in zip(once.shape, strides, strict=True))
    room = torch.empty(max(span, 0), dtype=values.dtype, device=device)
    return room.as_strided(once.shape, strides, first).copy_(once).expand(values.shape)


def case_of(name: str, graph: Graph, feed: dict[str, torch.Tensor]) -> Case | None:
    """A case, or None if the region has no scalar program."""
    try:
        return Case(name, graph, feed, prepared(lower(Region(graph))))
    except CannotLower:
        return None


def compare(case: Case, outputs: dict[str, torch.Tensor]) -> str:
    """What is wrong with ``outputs``, or nothing."""
    feed = {k: v.cpu() for k, v in case.feed.items()}
    exact = evaluate(case.graph, feed, float64=True)
    try:
        plain = evaluate(case.graph, feed)
    except (RuntimeError, NotImplementedError):
        plain = {}
    reduced = case.program.columns
    for name, value in case.graph.outputs:
        got, want = outputs[value].cpu(), exact[name]
        if got.is_floating_point():  # what the type cannot hold is infinite in it
            held = want.to(got.dtype)
            want = torch.where(held.isinf(), held.to(want.dtype), want)
        lost = got.isnan() & ~want.isnan()
        if lost.any() and not case.strict and case.overflows:
            got = torch.where(lost, want.to(got.dtype), got)
        if not got.is_floating_point():
            if not torch.equal(got, want.to(got.dtype)) and not _same(got, plain.get(name)):
                return f"{name}: {got.flatten()[:8].tolist()} for {want.flatten()[:8].tolist()}"
            continue
        own = error(plain[name], want) if name in plain else 0.0
        off, limit = error(got, want), allowed(own, got.dtype, reduced)
        if off > limit and not want.any() and case.averages:
            limit = CANCELLED * EPS[got.dtype]
            off = float(got.double().abs().max())
        if off > limit and not _same(got, plain.get(name)):
            limit += wobble(case, feed, name, want)
            if off > limit or (case.strict and off == math.inf):
                return f"{name} off by {off:.3g}, allowed {limit:.3g}"
    return ""


def wobble(case: Case, feed: dict[str, torch.Tensor], name: str, want: torch.Tensor) -> float:
    """How far one rounding after every node moves an output: what no arithmetic of that width
    can avoid where a graph cancels (the sum of a normalised row is nothing but that). Six times
    every number is moved to a side by chance, which the worst of all sides may exceed 8 times;
    then, because the rounding of a function goes with its argument, all large ones up and the
    others down, and the other way round, which is as bad as it gets: of that no more than twice.
    In float64 the reference rounds as well, and its inputs are moved too."""
    worst, graph, wide = 0.0, case.graph, case.program.wide
    unit, least = (2.0**-52, 0.0) if wide else (2.0**-24, 1e-30)  # 1 + 2⁻⁵³ would be 1 again
    gen = torch.Generator().manual_seed(0)

    def moved(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        up = torch.randint(0, 2, t.shape, generator=gen) if turn < 6 else t >= t.double().mean()
        side = (up * 2 - 1).double() * (-1 if turn == 7 else 1)
        found = t.double() * (1 + side * unit) + side * least
        return torch.where(found.isinf(), t.double(), found)  # the largest has no next one

    for turn in range(8):
        env = {
            k: moved(t) if wide else t.double() if t.is_floating_point() else t
            for k, t in feed.items()
        }
        env |= {k: c.data for k, c in graph.constants.items()}
        for node in graph.nodes:
            args = [None if v is None else env[v] for v in node.inputs]
            if node.op in SUMS and turn < 6:  # which round after every number they add
                args = [moved(args[0]), *args[1:]]
            outs = run_node(node, args)
            env.update(zip(node.outputs, map(moved, outs), strict=True))
        found = error(env[dict(graph.outputs)[name]], want)
        worst = max(worst, found * (8 if turn < 6 else 2))
    return worst


def _same(got: torch.Tensor, plain: torch.Tensor | None) -> bool:
    """Where float64 takes another branch than the working type, PyTorch in that type decides."""
    if plain is None or plain.dtype != got.dtype:
        return False
    return bool(((got == plain) | (got.isnan() & plain.isnan())).all())


# ---- one operator at a time

GENERATED = (Fusion.ELEMENTWISE, Fusion.BROADCAST, Fusion.INJECTIVE, Fusion.REDUCTION)
PLACES = {"max_pool_with_indices", "adaptive_max_pool_with_indices"}  # are left to torch
UNGENERATED = {"pixel_shuffle", "pixel_unshuffle"}  # moved by torch; in a chain they cost it all


def claims(op: OpDef) -> bool:
    """Whether the operator's record promises that it becomes generated code: it may be fused with
    its neighbours, which is of use only if somebody writes the whole chain as one kernel."""
    fused = op.fusion in GENERATED and op.name not in UNGENERATED | PLACES
    if op.name.endswith("_of_a_user"):  # which another test may have registered, without a formula
        return False
    return fused or op.name in WINDOWS


def excused(op: OpDef, graph: Graph) -> bool:
    """Whether one node of the operator is never asked to be generated: there is nothing to compute,
    or it is a loss of all positions, which a pass takes apart first, or it reads at places of its
    own, as resizing may, or the gradient of windows with gaps, or channels meet in it."""
    attrs = graph.nodes[0].attrs
    if op.name in ("conv", "conv_dx"):
        first = graph.nodes[0]
        channels, results = (graph.types[v].shape[1] for v in (first.uses[0], first.output))
        several = (op.name == "conv_dx" or attrs["transposed"]) and results != channels
        if attrs["groups"] != channels or several:
            return True
    joins = op.name == "cross_entropy" and attrs["reduction"] != "none"
    gaps = op.name.endswith("grad") and set(attrs.get("dilation", ())) - {1}
    if gaps or op.name.startswith("resize"):
        return case_of(op.name, graph, {}) is None
    return joins or any(t.numel == 0 for t in graph.types.values())


def one_node(
    op: OpDef, sample: Sample, float_type: str, then: str | None = None
) -> tuple[Graph, dict[str, torch.Tensor]]:
    """The operator on a sample's tensors, and perhaps another one after it."""
    build = GraphBuilder(infer, op.name)
    feed: dict[str, torch.Tensor] = {}
    ins: list[str | None] = []
    for i, t in enumerate(sample.tensors(float_type)):
        ins.append(None if t is None else build.input(f"x{i}", TensorType.from_tensor(t)))
        if t is not None:
            feed[f"x{i}"] = t
    for i, out in enumerate(build.emit(op.name, ins, sample.attrs)):
        build.output(f"y{i}", build.emit(then, [out], {})[0] if then else out)
    return build.finish(), feed


def operator_cases(float_type: str, every: int = 1) -> Iterator[Case]:
    """One in so many samples of every operator that claims to be generated; it is an error if one
    is not."""
    for op in filter(claims, TABLE.values()):
        for k, sample in enumerate(op.samples()):
            if k > 2 and float_type != "f32":
                break  # what differs here is the element type, not the shape
            if k % every:
                continue
            graph, feed = one_node(op, sample, float_type)
            if not excused(op, graph):
                name = f"{op.name}-{sample}-{float_type}"
                yield Case(name, graph, feed, lower(Region(graph)))


# ---- every kind, at sizes that divide by nothing


def graph_of(name: str, write, **tensors: torch.Tensor) -> Case:
    """``write(ops, **values)`` → values; each becomes an output."""
    build = GraphBuilder(infer, name)
    ops = Ops(build)
    given = {n: ops.sym(build.input(n, TensorType.from_tensor(t))) for n, t in tensors.items()}
    result = write(ops, **given)
    for i, out in enumerate(result if isinstance(result, tuple) else (result,)):
        out.output(f"y{i}")
    case = case_of(name, build.finish(), tensors)
    assert case is not None, name
    return case


def norm_case(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, draw=torch.randn
) -> Case:
    """bias + ReLU + LayerNorm."""
    return graph_of(
        f"norm {rows}x{columns}",
        lambda g, x, b, w, s: g.layer_norm(g.relu(g.add(x, b)), w, s, dims=1),
        x=draw(rows, columns).to(dtype),
        b=draw(columns).to(dtype),
        w=draw(columns).to(dtype),
        s=draw(columns).to(dtype),
    )


def softmax_case(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, draw=torch.randn
) -> Case:
    x = draw(rows, columns)
    x[0, : columns // 2] = -torch.inf  # the running maximum starts at nothing
    if rows > 2:
        x[1], x[2] = -torch.inf, torch.finfo(dtype).min  # and may stay there
    return graph_of(f"softmax {rows}x{columns}", lambda g, x: g.softmax(x, axis=-1), x=x.to(dtype))


def kind_cases(dtype: str) -> Iterator[tuple[Case, Knobs]]:
    """Cases and the knobs that force every kind on them."""
    dt = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[dtype]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dt)

    chain = graph_of("chain", lambda g, x, b: g.gelu(g.add(x, b)), x=randn(7, 131), b=randn(131))
    yield chain, Knobs("flat", 256)
    turned = graph_of(
        "transpose",
        lambda g, x, y: g.add(g.permute(x, dims=(0, 2, 1)), y),
        x=randn(3, 37, 29),
        y=randn(3, 29, 37),
    )
    for rows, block in ((16, 32), (32, 16)):
        yield turned, Knobs("tile", block, rows=rows)
    yield turned, Knobs("flat", 1024)
    sizes = ((13, 100), (5, 128), (1, 77))
    for rows, columns in sizes if dtype == "f32" else sizes[:1]:
        for case in (norm_case(rows, columns, dt), softmax_case(rows, columns, dt)):
            yield case, Knobs("rows", 128, rows=1)
            yield case, Knobs("rows", 128, rows=4)
            yield case, Knobs("loop", 32, rows=2, unroll=2)
            yield case, Knobs("loop", 16, unroll=3)
            yield case, Knobs("split", 16, splits=3, unroll=2)
            yield case, Knobs("split", 32, rows=4, splits=2)
    down = graph_of(
        "columns", lambda g, x: g.sum(g.mul(x, x), axes=(0,), keepdim=False), x=randn(67, 45)
    )
    mixed = graph_of("mixed", lambda g, x: g.softmax(x, axis=1), x=randn(3, 50, 21))
    yield mixed, Knobs("loop", 1, rows=32, unroll=50)  # all of a column at once
    for case in (down, mixed):
        yield case, Knobs("loop", 16, rows=32)
        yield case, Knobs("rows", 128, rows=16)
        yield case, Knobs("split", 8, rows=16, splits=5)
        yield case, Knobs("split", 1, rows=32, splits=300, unroll=2)  # read by few rows at a time
    groups = graph_of(
        "groups",
        lambda g, x, w, b: g.silu(g.group_norm(x, w, b, groups=3)),
        x=randn(2, 6, 5, 9),
        w=randn(6),
        b=randn(6),
    )
    weighted = graph_of(
        "weighted sum of channels",
        lambda g, x, w: g.sum(g.mul(x, w), axes=(1, 2), keepdim=False),
        x=randn(3, 4, 32),
        w=randn(4, 1),
    )
    for case in (groups, weighted):  # read stretch by stretch, the last one with a mask and without
        for knobs in (Knobs("loop", 16, unroll=4), Knobs("loop", 32, rows=2), Knobs("rows", 128)):
            yield case, knobs
        yield case, Knobs("split", 16, unroll=2, splits=2)
    both = graph_of(
        "two outputs",
        lambda g, x: (
            g.mean(x, axes=(1,), keepdim=True),
            g.sub(x, g.max(x, axes=(1,), keepdim=True)),
        ),
        x=randn(6, 93),
    )
    for knobs in (Knobs("rows", 128), Knobs("loop", 32), Knobs("split", 32, splits=2)):
        yield both, knobs
    odd = randn(4, 50)
    odd[1, 3], odd[2, 7] = torch.nan, torch.inf
    most = graph_of(
        "nan",
        lambda g, x: (g.max(x, axes=(1,), keepdim=False), g.min(x, axes=(1,), keepdim=False)),
        x=odd,
    )
    for knobs in (Knobs("rows", 64, rows=2), Knobs("loop", 16), Knobs("split", 16, splits=2)):
        yield most, knobs


# ---- random regions


def some_way(case: Case) -> Knobs:
    """A way to write the case, drawn by its name: one that would be offered, or one for far longer
    rows, so that loops and split rows are met at sizes that are quickly run."""
    program = arranged(case.program)
    ways = choices(program)
    if program.inner:
        block = 16 if program.columns < 256 else 256
        ways += [
            Knobs("loop", block, rows=2, unroll=2),
            Knobs("loop", block),
            Knobs("loop", 8, rows=16),
            Knobs("split", block, splits=3, unroll=2),
            Knobs("split", block, rows=4, splits=2),
        ]
    return Random(case.name).choice(ways)


def random_cases(seeds: Iterable[int]) -> Iterator[Case]:
    for seed in seeds:
        graph, feed = random_region(seed)
        if graph.nodes:
            case = case_of(f"seed {seed}", graph, feed)
            if case is not None:
                yield case
