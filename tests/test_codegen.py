"""Scalar programs: index arithmetic, lowering, and the CPU renderer, against the references."""

from __future__ import annotations

import itertools
import math
import threading
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tolerances import allowed, error

import deuteron as dt
from deuteron.codegen import places, reductions, windows
from deuteron.codegen.index import Affine, Var, flatten, unflatten
from deuteron.codegen.lower import lower
from deuteron.codegen.scalar import ScalarProgram
from deuteron.engines import match
from deuteron.engines.base import BuildContext
from deuteron.engines.cpu.generated import CpuGen
from deuteron.engines.triton.generated import TritonGen
from deuteron.ir import GraphBuilder, Region, TensorType
from deuteron.ops import TABLE, infer
from deuteron.ops.evaluate import evaluate
from deuteron.ops.formula import CannotLower
from deuteron.passes import Context, fuse, run_passes
from deuteron.target import GPUS
from tests.codegen_cases import claims, compare, excused, graph_of, one_node, operator_cases
from tests.codegen_kept import kept_cases
from tests.scalar_interpreter import interpret
from tests.sweeps import one_in

CPU = torch.device("cpu")
FLOATS = ("f32", "f16", "bf16", "f64")


def value(e: Affine, at: dict[Var, int]) -> int:
    total = e.const
    for atom, f in e.terms:
        if isinstance(atom, Var):
            total += at[atom] * f
        else:
            inner = value(atom.of, at)
            total += (inner % atom.by if atom.rest else inner // atom.by) * f
    return total


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_reshaping_an_index_is_what_torch_does(shape, data):
    count = torch.Size(shape).numel()
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    first = data.draw(st.sampled_from(divisors))
    other = (first, count // first)
    axes = [Var(f"i{d}", n) for d, n in enumerate(shape)]
    index = unflatten(flatten(tuple(map(Affine.var, axes)), tuple(shape)), other)
    for point in itertools.product(*map(range, shape)):
        at = dict(zip(axes, point, strict=True))
        position = 0
        for p, n in zip(point, shape, strict=True):
            position = position * n + p
        assert tuple(value(i, at) for i in index) == divmod(position, other[1])


def test_equal_indices_have_one_form():
    i, j = Var("i", 4), Var("j", 5)
    a = Affine.var(i) * 5 + Affine.var(j)
    assert a.divided(5, rest=False) == Affine.var(i)
    assert a.divided(5, rest=True) == Affine.var(j)
    assert a + a * -1 == Affine()
    assert Affine.var(Var("one", 1)) == Affine()


def poisoned(t: TensorType) -> torch.Tensor:
    out = torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch)
    return out.fill_(float("nan")) if t.dtype.is_float else out


def agrees(region: Region, feed, outs) -> None:
    exact, plain = evaluate(region.graph, feed, float64=True), evaluate(region.graph, feed)
    rows = max(t.numel for t in region.graph.types.values())
    for out, (name, _) in zip(outs, region.graph.outputs, strict=True):
        bound = allowed(error(plain[name], exact[name]), out.dtype, rows)
        assert error(out, exact[name]) <= bound


@pytest.mark.parametrize("op", ["gelu", "ndtr"])
@pytest.mark.parametrize("near", [-8.0, -5.5, -5.0, -4.0, -3.0, -2.0, -1.0, -1e-3, 1e-3, 1.0])
def test_the_normal_distribution_keeps_its_digits(op, near):
    """Nothing else is in the tensor: what 1 + erf would lose is all there is."""
    build = GraphBuilder(infer, op)
    feed = {"x": near * torch.linspace(0.99, 1.01, 101)}
    build.input("x", TensorType.from_tensor(feed["x"]))
    build.output("y", build.emit(op, ["x"], {})[0])
    region = Region(build.finish())
    check_cpu(region, feed)
    interpret(
        lower(region), feed, out := {v: poisoned(region.graph.types[v]) for v in region.outputs}
    )
    agrees(region, feed, out.values())


@pytest.mark.parametrize("part", one_in(2, [9, 1]))
@pytest.mark.parametrize("op", [*filter(claims, TABLE.values())], ids=lambda op: op.name)
def test_what_claims_to_be_generated_is_on_every_sample_and_right(op, part):
    """On both machines, in every element type; the numbers of triton_gen are in test_triton_gen. A
    mere view is left to torch, so that another operator follows it here. One sample in so many is
    compiled."""
    then = "neg" if op.view else None
    for k, sample in enumerate(op.samples()):
        for kind in FLOATS:
            graph, feed = one_node(op, sample, kind, then)
            region = Region(graph)
            if excused(op, graph):
                continue
            on_gpu = TritonGen().refuse(region, GPUS["h200"], dt.Policy())
            assert on_gpu is None, f"{sample} {kind}: {on_gpu}"
            try:
                if kind == "f32":
                    outs = {v: poisoned(graph.types[v]) for v in region.outputs}
                    interpret(lower(region), feed, outs)
                    agrees(region, feed, outs.values())
                if op.name in ("conv", "conv_dx"):  # has a kernel of its own on a CPU
                    continue
                if k == 0 or (kind == "f32" and k % part == 0):
                    outs = run_cpu(region, feed)
                    assert outs is not None, "cpu_gen refuses"
                    agrees(region, feed, outs)
                else:
                    assert CpuGen().refuse(region, dt.target("cpu"), dt.Policy()) is None
            except AssertionError as fault:
                raise AssertionError(f"{op.name} {sample} {kind}: {fault}") from fault


def test_what_claims_nothing_is_not_generated():
    """Whatever can be fused claims to be generated but for a few, which are known."""
    for op in TABLE.values():
        if not claims(op):
            for sample in op.samples()[:1]:
                with pytest.raises(CannotLower, match="has no scalar form"):
                    lower(Region(one_node(op, sample, "f32")[0]))


@pytest.fixture
def forgetful():
    """Nothing that was lowered before is remembered, nor what is lowered now."""
    match._lowered.cache_clear()
    yield
    match._lowered.cache_clear()


@pytest.mark.parametrize("name", ["hardswish", "mish", "softsign", "softmax", "gather", "avg_pool"])
def test_a_form_that_is_lost_is_missed(name, monkeypatch, forgetful):
    """The tests above would fail: see that they can."""
    for forms in (places.PLACES, reductions.ROWS, windows.WINDOWS):
        if name in forms:
            monkeypatch.delitem(forms, name)
    monkeypatch.setitem(TABLE, name, replace(TABLE[name], formula=None))
    with pytest.raises(AssertionError, match="has no scalar form"):
        test_what_claims_to_be_generated_is_on_every_sample_and_right(TABLE[name], 3)
    with pytest.raises(CannotLower, match=f"{name} has no scalar form"):
        list(operator_cases("f32", every=1000))


def check_threads(region: Region, feed: dict[str, torch.Tensor]) -> None:
    """The same bits on any number of threads."""
    threads, found = torch.get_num_threads(), []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            found.append(run_cpu(region, feed))
    finally:
        torch.set_num_threads(threads)
    assert found[0] is not None
    for other in found[1:]:
        assert other is not None and all(map(torch.equal, found[0], other))


def check_cpu(region: Region, feed) -> None:
    outs = run_cpu(region, feed)
    if outs is not None:
        agrees(region, feed, outs)


def run_cpu(region: Region, feed) -> list[torch.Tensor] | None:
    """What the CPU engine gives for the region's outputs; None if it refuses."""
    pytest.importorskip("llvmlite")
    engine, target, policy = CpuGen(), dt.target("cpu"), dt.Policy()
    refusal = engine.refuse(region, target, policy)
    if refusal is not None:
        assert refusal.reason
        return None
    candidate = engine.candidates(region, target, policy)[0]
    kernel = engine.build(region, candidate, BuildContext(target, CPU, policy, {}))
    outs = [poisoned(region.graph.types[v]) for v in region.outputs]
    kernel.fill([feed[v] for v in region.inputs], outs)
    return outs


KEPT = list(kept_cases())


@pytest.mark.parametrize("case", one_in(3, KEPT), ids=[case.name for case in KEPT])
def test_kept_cases(case):
    outputs = case.empty_outputs()
    interpret(case.program, case.feed, outputs)
    assert not (wrong := compare(case, outputs)), f"{wrong}\n{case.program}"
    region = Region(case.graph)
    outs = run_cpu(region, case.feed)
    if outs is not None:
        assert not (wrong := compare(case, dict(zip(region.outputs, outs, strict=True)))), wrong


def test_the_judge_tells_rounding_from_cancellation():
    """What a function's roundings do to the variance after it passes, a variance in one pass
    does not, nor the right one of which a thousandth is missing."""
    torch.manual_seed(0)
    x = torch.randn(1542) * 1e-4
    case = graph_of(
        "var", lambda g, x: g.var(g.ndtr(x), axes=(0,), keepdim=True, correction=0), x=x
    )
    right = torch.special.ndtr(x)
    rounded = right + torch.where(x < 0, -(2.0**-26), 2.0**-26)
    once = (right * right).mean(0, keepdim=True) - right.mean(0, keepdim=True) ** 2
    plain = graph_of("var", lambda g, x: g.var(x, axes=(0,), keepdim=True, correction=0), x=right)
    for judge, found, fine in (
        (case, rounded.double().var(0, correction=0, keepdim=True).float(), True),
        (case, once, False),
        (plain, right.var(0, correction=0, keepdim=True), True),
        (plain, right.var(0, correction=0, keepdim=True) * 0.999, False),
    ):
        assert (compare(judge, {judge.graph.outputs[0][1]: found}) == "") == fine


def test_dropout_has_the_same_bits_everywhere():
    """Which elements survive is a function of seed and place, on every renderer."""
    for case in KEPT:
        if case.name.startswith("dropout"):
            want = evaluate(case.graph, case.feed)["y0"] == 0
            outputs = case.empty_outputs()
            interpret(case.program, case.feed, outputs)
            (got,) = outputs.values()
            assert torch.equal(got == 0, want)


def test_a_large_mean_does_no_harm_in_float64():
    """Against exact fractions: PyTorch's own float64 variance is off by 4e-14 here."""
    x = torch.randn(4, 50, dtype=torch.float64) + 1000.0
    build = GraphBuilder(infer, "far from zero")
    build.input("x", TensorType.from_tensor(x))
    build.output("y", *build.emit("var", ["x"], {"axes": (1,), "correction": 1}))
    region = Region(build.finish())
    exact = []
    for row in x.tolist():
        mean = sum(map(Fraction, row)) / len(row)
        exact.append(float(sum((Fraction(v) - mean) ** 2 for v in row) / (len(row) - 1)))
    outs = {v: poisoned(region.graph.types[v]) for v in region.outputs}
    interpret(lower(region), {"x": x}, outs)
    (got,) = outs.values()
    assert error(got, torch.tensor(exact, dtype=torch.float64)) <= allowed(0.0, got.dtype, 50)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda g, x, t: g.cross_entropy(x, t), "over positions"),
        (lambda g, x, t: g.pow(t, -1), "negative power"),
        (lambda g, x, t: g.remainder(t, 0), "divided by 0"),
        (lambda g, x, t: g.sum(g.softmax(x, axis=1), axes=(0,)), "different axes"),
        (lambda g, x, t: x + g.constant(torch.arange(5.0), "c"), "part of the region"),
        (lambda g, x, t: g.cumsum(x, axis=1), "no scalar form"),
    ],
)
def test_what_cannot_be_generated_says_why(write, reason):
    g = dt.Graph("refused")
    write(g, g.tensor("x", (3, 5)), g.tensor("t", (3,), "i64")).output("y")
    with pytest.raises(CannotLower) as refusal:
        lower(Region(g.ir()))
    assert reason in refusal.value.reason


def test_a_division_of_integers_by_zero_still_raises():
    """Generated code cannot, so that a divisor which is a tensor stays with torch."""
    g = dt.Graph("division")
    g.floor_div(g.tensor("x", (3,), "i64"), g.tensor("y", (3,), "i64")).output("y")
    plan = g.compile(device="cpu")
    one = torch.ones(3, dtype=torch.int64)
    assert torch.equal(plan.run(x=one * 7, y=one * -2)["y"], one * -4)
    with pytest.raises(RuntimeError, match="ZeroDivision"):
        plan.run(x=one, y=one * 0)
    refusal = CpuGen().refuse(Region(g.ir()), dt.target("cpu"), dt.Policy())
    assert refusal is not None and "may hold a 0" in refusal.reason


def regions_of(g: dt.Graph) -> list[Region]:
    graph, _ = run_passes(g.ir(), Context(dt.target("cpu"), dt.Policy()))
    return list(fuse(graph)[0])


def chain(name: str, build, *shapes, layout="contiguous") -> tuple[Region, dict[str, torch.Tensor]]:
    g = dt.Graph(name)
    syms = [
        g.tensor(f"x{i}", s, layout=layout if len(s) == 4 else "contiguous")
        for i, s in enumerate(shapes)
    ]
    build(g, *syms).output("y")
    (region,) = regions_of(g)
    gen = torch.Generator().manual_seed(0)
    feed = {}
    for v in region.inputs:
        t = region.graph.types[v]
        feed[v] = torch.empty_strided(t.shape, t.strides).copy_(torch.randn(t.shape, generator=gen))
    return region, feed


CHAINS = {
    "bias+gelu+residual+layer_norm": (
        lambda g, x, b, r, w: g.layer_norm(g.gelu(x + b) + r, w, b),
        (37, 101),
        (101,),
        (37, 101),
        (101,),
    ),
    "long rows": (lambda g, x: g.softmax(g.exp(x) * 0.1), (3, 5001)),
    "one long axis": (lambda g, x, y: g.silu(x) * y + 1.0, (70001,), (70001,)),
    "columns": (lambda g, x: g.sum(g.relu(x), axes=(0,)), (301, 67)),
    "middle axis": (lambda g, x: g.max(g.abs(x), axes=(1,)), (5, 33, 19)),
    "transposed": (lambda g, x: g.tanh(g.permute(x, (1, 0))) * 2.0, (65, 43)),
    "concat of slices": (
        lambda g, x, y: g.relu(g.concat(g.slice(x, axis=1, start=1, stop=20), y, axis=1)),
        (7, 30),
        (7, 9),
    ),
    "pad both sides": (lambda g, x: g.pad(x, low=(1, 3), high=(2, 4), value=1.5) * 2.0, (6, 21)),
    "broadcast down and across": (lambda g, x, r, c: x * r + c, (9, 50), (50,), (9, 1)),
    "variance": (lambda g, x: g.var(x, axes=(1,), correction=1), (11, 130)),
    "rotary halves": (
        lambda g, x, c: (
            x * c + g.concat(g.neg(g.slice(x, axis=1, start=8)), g.slice(x, axis=1, stop=8), axis=1)
        ),
        (40, 16),
        (40, 16),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chains_become_one_kernel_that_is_right(name):
    build, *shapes = CHAINS[name]
    check_cpu(*chain(name, build, *shapes))


def test_nhwc_chain_walks_memory_in_order():
    region, feed = chain(
        "nhwc", lambda g, x, b: g.relu(x * b), (2, 7, 5, 6), (7, 1, 1), layout="nhwc"
    )
    program = lower(region)
    assert len(program.outer) == 2  # pixels, channels
    check_cpu(region, feed)


def test_a_dear_value_is_kept_and_a_cheap_one_is_not():
    pytest.importorskip("llvmlite")
    from deuteron.codegen.llvm_plan import plan

    region, _ = chain("dear", lambda g, x: g.layer_norm(g.gelu(x)), (8, 256))
    assert len(plan(lower(region)).kept) == 1
    region, _ = chain("cheap", lambda g, x: g.layer_norm(x), (8, 256))
    assert plan(lower(region)).kept == ()


def relu_gradient(g, y, dy):
    """The gradient of relu, and of the bias before it."""
    dx = g.where(y <= 0.0, 0.0, dy)
    return dx, g.sum(dx, axes=(0,))


def two_sums_of_scaled(g, x, v):
    """Two reductions that read a number computed once for each column."""
    y = x * g.rsqrt(g.abs(v) + 0.5)
    return g.sum(y, axes=(0,)), g.max(y * y, axes=(0,))


DOWN = {
    "gradient beside its sum": (relu_gradient, (77, 67), (77, 67)),
    "columns of several panels": (relu_gradient, (33, 9001), (33, 9001)),
    "two reductions": (two_sums_of_scaled, (101, 145), (145,)),
    "something after the sum": (
        lambda g, x, v: (g.exp(g.mean(x * v, axes=(0,))) + v,),
        (64, 139),
        (139,),
    ),
    "middle axis": (lambda g, x: (g.sum(x, axes=(1,)), g.neg(x)), (3, 50, 37)),
    "two axes that lie apart": (lambda g, x: (g.sum(x, axes=(0, 2)),), (3, 4, 40, 135)),
    "least": (lambda g, x: (g.min(x, axes=(0,)), g.prod(x, axes=(0,))), (40, 131)),
}


def made(build, shapes, dtype: str) -> tuple[Region, dict[str, torch.Tensor]]:
    """A region of what ``build`` makes of inputs of these shapes, and tensors for them."""
    g = dt.Graph("rows")
    found = build(g, *(g.tensor(f"x{i}", s, dtype) for i, s in enumerate(shapes)))
    for i, y in enumerate(found):
        y.output(f"y{i}")
    region, gen = Region(g.ir()), torch.Generator().manual_seed(1)
    types = {v: region.graph.types[v] for v in region.inputs}
    return region, {
        v: torch.randn(t.shape, generator=gen).to(t.dtype.torch) for v, t in types.items()
    }


def walk_down(name: str, dtype: str) -> tuple[Region, dict[str, torch.Tensor]]:
    build, *shapes = DOWN[name]
    return made(build, shapes, dtype)


DOWN_FLOATS = [(name, dtype) for name in DOWN for dtype in FLOATS]
WHOLE = [(name, "i32") for name in ("middle axis", "two axes that lie apart", "least")]


@pytest.mark.each_value
@pytest.mark.parametrize(("name", "dtype"), DOWN_FLOATS + WHOLE)
def test_columns_are_reduced_in_the_order_of_memory(name, dtype):
    pytest.importorskip("llvmlite")
    from deuteron.codegen.llvm_plan import plan

    region, feed = walk_down(name, dtype)
    assert plan(lower(region)).in_order
    check_cpu(region, feed)


def test_a_walk_down_the_rows_ends_with_the_last_reduction():
    """Where an element waits for the sum of its column, one walk is not enough."""
    pytest.importorskip("llvmlite")
    from deuteron.codegen.llvm_plan import plan

    for build in (lambda g, x: g.var(x, axes=(0,)), lambda g, x: x - g.sum(x, axes=(0,))):
        region, feed = chain("twice", build, (50, 40))
        assert not plan(lower(region)).in_order
        check_cpu(region, feed)


def test_sums_of_columns_have_the_same_bits_on_any_number_of_threads():
    check_threads(*walk_down("columns of several panels", "f32"))


def test_nan_stays_in_its_column():
    region, feed = walk_down("gradient beside its sum", "f32")
    feed["x1"][5, 3], feed["x1"][6, 4] = torch.nan, torch.inf
    feed["x0"][5:7, 3:5] = 1.0
    check_cpu(region, feed)


def test_programs_print_what_they_do():
    region, _ = chain("shown", lambda g, x: g.softmax(x), (4, 9))
    text = str(lower(region))
    assert "reduced" in text and "max(" in text and "exp(" in text and "store" in text


def test_machine_code_is_told_apart_by_element_type():
    """Two programs that print alike but load other types must not share code."""
    pytest.importorskip("llvmlite")
    from deuteron.codegen.llvm_render import signature

    programs = []
    for dtype in ("f32", "f16"):
        g = dt.Graph("t")
        g.relu(g.tensor("x", (8, 8), dtype)).output("y")
        found = lower(regions_of(g)[0])
        assert isinstance(found, ScalarProgram)
        programs.append(signature(found))
    assert programs[0] != programs[1]


@pytest.mark.parametrize("number", [0.0, -0.0])
def test_programs_that_differ_in_the_sign_of_a_zero_are_two(number):
    """In either order: the second must not get the program of the first."""
    pytest.importorskip("llvmlite")
    for value in (number, -number):
        g = dt.Graph("zero")
        x = g.tensor("x", (5,))
        g.pad(x, low=(1,), high=(1,), value=value).output("y")
        plan = g.compile(device="cpu", policy=dt.Policy(engines="cpu_gen"))
        found = plan.run(x=torch.ones(5))["y"]
        want = torch.nn.functional.pad(torch.ones(5), (1, 1), value=value)
        assert torch.equal(found.view(torch.int32), want.view(torch.int32))


def test_two_threads_share_a_kernel():
    region, feed = chain("threads", lambda g, x: g.layer_norm(g.gelu(x)), (64, 512))
    pytest.importorskip("llvmlite")
    engine, target, policy = CpuGen(), dt.target("cpu"), dt.Policy()
    candidate = engine.candidates(region, target, policy)[0]
    kernel = engine.build(region, candidate, BuildContext(target, CPU, policy, {}))
    args = [feed[v] for v in region.inputs]
    want = torch.empty(64, 512)
    kernel.fill(args, [want])
    wrong = []

    def work() -> None:
        out = torch.empty(64, 512)
        for _ in range(50):
            out.fill_(float("nan"))
            kernel.fill(args, [out])
            if not torch.equal(out, want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_shortest_and_the_longest_of_uneven_windows():
    for size, count in itertools.product(range(1, 20), range(1, 30)):
        lengths = [-(-(o + 1) * size // count) - o * size // count for o in range(count)]
        assert windows.spans(size, count) == (min(lengths), max(lengths))


@pytest.mark.parametrize("op", ["adaptive_avg_pool", "adaptive_max_pool"])
@pytest.mark.parametrize("size", [(9, 2**30), (2**30, 9), (2**30, 2**30 - 3)])
def test_planning_takes_no_longer_for_more_windows(op, size):
    """Nothing is counted up: a search through these would take minutes."""
    g = dt.Graph()
    x = g.tensor("x", (1, 2, size[0]))
    getattr(g, op)(x, size=size[1:]).output("y")
    g.grad("y", wrt=["x"])
    assert g.compile(device="cpu").explain()


@pytest.mark.parametrize(("kind", "near"), [(torch.float16, 2049), (torch.bfloat16, 257)])
def test_whole_numbers_beside_short_floats_are_rounded_first(kind, near):
    """As in torch, so that comparisons have one answer, fused or not."""
    whole = torch.tensor([near, -near, 70000, 3] * 16)
    x = torch.tensor([near - 1, -near, math.inf, 3] * 16, dtype=kind)
    case = graph_of("mixed", lambda g, n, x: (g.eq(n, x), n - x, g.lt(n, x)), n=whole, x=x)
    outs = run_cpu(Region(case.graph), case.feed)
    for got, want in zip(outs, (whole == x, whole - x, whole < x), strict=True):
        assert torch.equal(got.float().nan_to_num(7), want.float().nan_to_num(7))
