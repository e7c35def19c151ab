"""Kernels by hand in Triton: the gradients of norms, in the interpreter and compiled without a GPU;
when they are kept as one operator, when they are written out, and who is chosen to run them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.group_norm import Cut, Groups, cuts
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.engines.triton.norm import LONGEST, RowGradient, spreads
from deuteron.ir import GraphBuilder, TensorType
from deuteron.ir.region import Region
from deuteron.ops import infer
from deuteron.ops.evaluate import evaluate
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from deuteron.target import GPUS
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launches import compiled_only
from tests.norm_cases import Case
from tests.optimised import optimised
from tests.ptx import spilled
from tests.sweeps import sweep_unless
from tests.tolerances import allowed, error

H200 = GPUS["h200"]
HALF, BRAIN, F64 = torch.float16, torch.bfloat16, torch.float64


def test_in_the_interpreter():
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.norm_cases"), at_least=40)


# ---- compiled for GPUs that are not there


def compiled(work, how, dtype: torch.dtype, arch: int, monkeypatch, extra=False, back=True) -> list:
    """Every kernel that a call would launch, with all operands, as (name, kernel)."""
    from deuteron.kernels.triton import group_norm, norm

    found = compiled_only(monkeypatch, arch)
    t = torch.empty(8, dtype=dtype)
    rest = {"extra": t if extra else None, "dx": t, "dweight": t}
    if isinstance(work, RowGradient):
        bias = t if work.centred else None
        norm.backward(work, how)(norm.Operands(t, t, t, **rest, dbias=bias))
    elif back:
        group_norm.backward(work, how)(group_norm.Operands(t, t, offset=t, grad=t, **rest, dbias=t))
    else:
        group_norm.forward(work, how)(group_norm.Operands(t, t, t, t))
    return found


IN_EVERY_RUN = {0, 3, 5, 7, 9, 13}  # of those below: every kind of kernel, float64


def ways(work) -> list:
    return spreads(work, 132) if isinstance(work, RowGradient) else cuts(work)


MAIN = [  # the shapes that the table of the H200 holds, and the widest that registers take
    (RowGradient(16384, 4096, 1e-6, False, 2, 2), BRAIN, False),
    (RowGradient(16384, 4096, 1e-5, True, 2, 2), BRAIN, False),
    (RowGradient(16384, 4096, 1e-5, True, 2, 3), BRAIN, True),
    (RowGradient(16384, 8192, 1e-5, True, 2, 3), BRAIN, True),
    (RowGradient(16384, 8192, 1e-5, True, 4, 3), torch.float32, True),
    (RowGradient(4096, 2048, 1e-5, True, 8, 3), F64, True),
    (RowGradient(32768, 768, 1e-5, True, 2, 2), HALF, False),
    (RowGradient(4096, 16384, 1e-5, True, 2, 3), BRAIN, True),
    (Groups(64 * 32, 32, 8, 3136, 1e-5, 2, "none"), HALF, True),
    (Groups(32 * 64, 64, 1, 12544, 1e-5, 2, "relu"), BRAIN, False),
    (Groups(32 * 32, 32, 2, 12544, 1e-5, 2, "silu"), BRAIN, False),
    (Groups(32 * 64, 64, 1, 12544, 1e-5, 4, "silu"), torch.float32, True),
    (Groups(8 * 32, 32, 20, 1024, 1e-5, 2, "silu"), BRAIN, False),
    (Groups(32 * 8, 8, 8, 12544, 1e-5, 2, "silu"), BRAIN, False),
]


def without_spills(work, way, dtype, extra, arch: int, monkeypatch) -> None:
    for name, kernel in compiled(work, way, dtype, arch, monkeypatch, extra):
        assert spilled(kernel, arch) == 0, (name, way, arch)
        assert kernel.metadata.shared <= 99 << 10, (name, way, arch)
        if name == "_rows" and way.stages > 1:
            assert re.search(r"cp\.async\.cg\.shared\.global", kernel.asm["ptx"]), way


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize(
    "index", [pytest.param(k, marks=sweep_unless(k in IN_EVERY_RUN)) for k in range(len(MAIN))]
)
def test_main_kernels_compile_without_spills_and_prefetch(index, arch, monkeypatch):
    pytest.importorskip("triton")
    work, *how = MAIN[index]
    without_spills(work, ways(work)[0], *how, arch, monkeypatch)


@pytest.mark.parametrize("arch", [90, 80])
def test_what_is_around_a_gradient_compiles_without_spills(arch, monkeypatch):
    """As in a layer of BERT: a sum of gradients before, and dropout and a bias after it."""
    pytest.importorskip("triton")
    case = Case("layer_norm", (8, 256, 768), around=("sum", "dropout", "bias"))
    feed, engine, found = case.feed(), TritonKernels(), compiled_only(monkeypatch, arch)
    region = case.region(feed)
    candidate = engine.candidates(region, H200, Policy())[0]
    kernel = engine.build(region, candidate, BuildContext(H200, torch.device("cpu"), Policy(), {}))
    types = (region.graph.types[v] for v in region.outputs)
    outs = [torch.empty(t.shape, dtype=t.dtype.torch) for t in types]
    kernel.fn(*(feed[v] for v in region.inputs), *outs)
    assert [name for name, _ in found] == ["_rows", "_add_up"]
    for name, made in found:
        assert spilled(made, arch) == 0, name
        assert made.metadata.shared <= 99 << 10
    assert candidate.knobs["stages"] == 1 or "cp.async.cg" in found[0][1].asm["ptx"]


@pytest.mark.sweep
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("index", range(len(MAIN)))
def test_the_other_ways_compile_without_spills(index, arch, monkeypatch):
    pytest.importorskip("triton")
    work, *how = MAIN[index]
    for way in ways(work)[1:]:
        without_spills(work, way, *how, arch, monkeypatch)


GROUPS = [(1, 12544), (2, 12544), (8, 12544), (40, 256)]  # channels of a group, positions of each


@pytest.mark.parametrize(
    ("each", "positions", "dtype"),
    [
        pytest.param(*sizes, dtype, marks=sweep_unless(dtype == BRAIN and sizes[0] == 2))
        for sizes in GROUPS
        for dtype in (BRAIN, torch.float32)
    ],
)
@pytest.mark.parametrize("arch", [90, 80])
def test_norms_of_groups_compile_without_spills(each, positions, dtype, arch, monkeypatch):
    pytest.importorskip("triton")
    work = Groups(256, 32, each, positions, 1e-5, dtype.itemsize, "silu")
    for cut in cuts(work):
        for name, kernel in compiled(work, cut, dtype, arch, monkeypatch, back=False):
            assert spilled(kernel, arch) == 0, (name, cut, arch)


def test_sizes_decide_whether_rows_are_long():
    for size, longest in LONGEST.items():
        for columns in (longest, longest + 1):
            assert RowGradient(8, columns, 1e-5, True, size, 2).is_long == (columns > longest)


def test_groups_that_registers_hold():
    """The fewest warps that do; what is larger is cut, equally if that makes no small parts."""

    def first(each: int, positions: int) -> Cut:
        work = Groups(64, 32, each, positions, 1e-5, 2, "none")
        for cut in cuts(work):
            assert cut.channels * cut.positions * cut.parts(work) >= each * positions
            assert (
                cut.tiles * cut.tile_channels * cut.tile_positions >= cut.channels * cut.positions
            )
        return cuts(work)[0]

    assert first(1, 12544) == Cut(1, 12544, 1, 2048, warps=8)
    assert first(8, 49) == Cut(8, 49, 4, 64, warps=1)
    assert first(40, 256) == Cut(40, 256, 8, 256, warps=8)
    assert first(8, 12544) == Cut(1, 6272, 1, 1024, warps=4)
    assert first(40, 1024) == Cut(5, 1024, 1, 1024, warps=4)
    assert first(3, 14347) == Cut(1, 4783, 1, 1024, warps=4)  # a prime
    assert first(641, 49).channels > 1  # so is this


def test_one_program_for_little_work_and_few_ways_for_all():
    for rows, columns in ((8, 64), (1, 4096), (3, 5)):
        work = RowGradient(rows, columns, 1e-5, True, 2, 2)
        for way in ways(work):
            assert way.programs == 1 and way.stages == 1
            assert way.scratch(work, 2) == 0
    for rows in (1, 100, 16384, 10**7):
        for columns in (1, 33, 768, 4096, 8192, 9000, 10**6):
            offered = ways(RowGradient(rows, columns, 1e-5, True, 2, 2))
            assert 1 <= len(offered) <= 3
            for way in offered:
                assert way.programs <= max(4 * 132, -(-rows // way.rows))
                assert way.rows & (way.rows - 1) == 0 and way.warps <= 16


# ---- one operator, or written out


def block(norm: str, shape=(5, 8), kind="f32", residual=False, **attrs) -> dt.Graph:
    """y = norm(x [+ r]) · s, where s is x or the sum, so that x has a second gradient."""
    g = dt.Graph(norm)
    x = g.tensor("x", shape, kind)
    s = x + g.tensor("r", shape, kind) if residual else x
    size = shape[-1:] if norm in ("layer_norm", "rms_norm") else shape[1:2]
    params = [g.tensor(n, size, kind) for n in "wb"[: 1 if norm == "rms_norm" else 2]]
    y = getattr(g, norm)(s, *params, **attrs)
    (y * s if residual else y).output("y")
    return g.grad("y", wrt=["x", *"wb"[: len(params)]])


NORMS = [
    ("layer_norm", (5, 8), {}),
    ("rms_norm", (5, 8), {}),
    ("group_norm", (2, 4, 3, 3), {"groups": 2}),
    ("instance_norm", (2, 4, 3), {}),
]


def ops_after(graph: dt.Graph, target) -> list[str]:
    done, _ = optimised(graph.ir(), target)
    return [node.op for node in done.nodes]


@pytest.mark.parametrize(("norm", "shape", "attrs"), NORMS)
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_stays_whole_where_a_kernel_takes_it(norm, shape, attrs, kind):
    """On a GPU all but groups of float64; on the CPU those of float32; what is left is written
    out."""
    graph = block(norm, shape, kind, **attrs)
    assert [n.op for n in graph.ir().nodes].count(f"{norm}_grad") == 1
    if kind == "f32" or "dims" in dict(graph.ir().nodes[0].attrs):
        assert ops_after(graph, H200) == [norm, f"{norm}_grad"]
    on_cpu = ops_after(graph, dt.target("cpu"))
    whole = kind == "f32"
    assert (f"{norm}_grad" in on_cpu) == whole and ("rsqrt" in on_cpu) != whole


@pytest.mark.parametrize(("norm", "shape", "attrs"), NORMS)
@pytest.mark.parametrize("kind", ["f64", "f32"])
def test_written_out_or_whole_it_is_the_gradient(norm, shape, attrs, kind):
    graph = block(norm, shape, kind, residual=True, **attrs)
    gen = torch.Generator().manual_seed(0)
    dtype = dt.ir.dtype(kind).torch
    feed = {
        n: torch.randn(graph.ir().types[n].shape, generator=gen, dtype=F64).to(dtype)
        for n in graph.ir().inputs
    }
    leaves = {n: t.double().requires_grad_() for n, t in feed.items()}
    s = leaves["x"] + leaves["r"]
    w, b = leaves["w"], leaves.get("b")
    torch_way = {
        "layer_norm": lambda: F.layer_norm(s, shape[-1:], w, b),
        "rms_norm": lambda: F.rms_norm(s, shape[-1:], w, 1e-6),
        "group_norm": lambda: F.group_norm(s, 2, w, b),
        "instance_norm": lambda: F.group_norm(s, shape[1], w, b),
    }
    (torch_way[norm]() * s).backward(feed["grad_y"].double())
    want = {f"grad_{n}": leaves[n].grad for n in ("x", "w", "b") if n in leaves}
    for target in (H200, dt.target("cpu")):
        done, _ = optimised(graph.ir(), target)
        got = evaluate(done, feed)
        for name, exact in want.items():
            limit = allowed(0.0, dtype, exact.numel() * 8)
            assert error(got[name], exact) <= limit, (name, target.name)


def test_a_second_gradient_of_x_joins_on_a_gpu():
    graph = block("layer_norm", residual=True)
    done, records = optimised(graph.ir(), H200)
    node = next(n for n in done.nodes if n.op == "layer_norm_grad")
    assert len(node.inputs) == 4 and dict(done.outputs)["grad_x"] == node.outputs[0]
    fired = next(r for r in records if r.name == "expand").fired
    assert fired == {"sum of gradients joined": 1}
    assert "add" not in [n.op for n in done.nodes if "grad" in n.source]


def bent(norm: str, act: str, shape, kind="f32", wrt=None, **attrs) -> dt.Graph:
    """y = act(norm(x)) with weight and bias where the norm has them, and the gradients of all."""
    g = dt.Graph(norm)
    size = shape[-1:] if norm in ("layer_norm", "rms_norm") else shape[1:2]
    params = "w" if norm == "rms_norm" else "wb"
    given = [g.tensor(n, size, kind) for n in params]
    z = getattr(g, norm)(g.tensor("x", shape, kind), *given, **attrs)
    getattr(g, act)(z).output("y")
    return g.grad("y", wrt=wrt or ["x", *params])


ACTS = ("relu", "silu", "leaky_relu", "hardswish", "relu6", "gelu", "tanh")
TORCH_NORMS = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-6),
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b: F.group_norm(x, x.shape[1], w, b),
}


@pytest.mark.parametrize(("norm", "shape", "attrs"), NORMS)
def test_an_activation_is_part_of_the_gradient(norm, shape, attrs):
    """One operator takes the gradient through both; where no kernel does it is written out."""
    for act in ACTS:
        graph = bent(norm, act, shape, "f64", **attrs)
        gen = torch.Generator().manual_seed(1)
        types = graph.ir().types
        feed = {n: torch.randn(types[n].shape, generator=gen, dtype=F64) for n in graph.ir().inputs}
        leaves = {n: t.clone().requires_grad_() for n, t in feed.items() if n != "grad_y"}
        z = TORCH_NORMS[norm](*(leaves[n] for n in ("x", "w", "b") if n in leaves))
        getattr(F, act)(z).backward(feed["grad_y"])
        for target in (H200, dt.target("cpu")):
            done, _ = optimised(graph.ir(), target)
            whole = [n for n in done.nodes if n.attrs.get("activation", "none") == act]
            assert not whole, (act, target.name)  # no kernel takes float64
            got = evaluate(done, feed)
            for name, leaf in leaves.items():
                off = error(got[f"grad_{name}"], leaf.grad)
                assert off <= allowed(0.0, F64, leaf.numel() * 8), (act, name, target.name)


@pytest.mark.parametrize(("norm", "shape", "attrs"), NORMS)
def test_kernels_of_groups_take_the_activation_along(norm, shape, attrs):
    for act in ACTS:
        done, _ = optimised(bent(norm, act, shape, **attrs).ir(), H200)
        whole = [n for n in done.nodes if n.attrs.get("activation", "none") == act]
        assert len(whole) == (norm in ("group_norm", "instance_norm")), act


def test_an_activation_with_others_beside_it_is_not():
    """Whose gradient reads the norm's result, or whose norm gives a result of its own."""
    g = dt.Graph()
    x = g.tensor("x", (2, 4, 3, 3))
    z = g.instance_norm(x)
    (g.relu(z) + z).output("y")
    ops = [n for n in g.grad("y", wrt="x").ir().nodes if n.op == "instance_norm_grad"]
    assert [n.attrs["activation"] for n in ops] == ["none"]


def test_a_sum_of_gradients_joins_beside_an_offset():
    g = dt.Graph()
    x, w, b = g.tensor("x", (2, 4, 3, 3)), g.tensor("w", (4,)), g.tensor("b", (4,))
    s = g.relu(x)
    (g.silu(g.group_norm(s, w, b, groups=2)) + s).output("y")
    done, _ = optimised(g.grad("y", wrt="x").ir(), H200)
    (node,) = (n for n in done.nodes if n.op == "group_norm_grad")
    assert len(node.uses) == 5 and node.inputs[3] == "grad_y"


def test_second_gradients_through_an_activation():
    first = bent("group_norm", "silu", (2, 4, 3), "f64", ["x"], groups=2)
    second = first.grad("grad_x", wrt="w").ir()
    gen = torch.Generator().manual_seed(0)
    feed = {n: torch.randn(second.types[n].shape, generator=gen, dtype=F64) for n in second.inputs}
    leaves = {n: t.clone().requires_grad_() for n, t in feed.items()}
    y = F.silu(F.group_norm(leaves["x"], 2, leaves["w"], leaves["b"]))
    (dx,) = torch.autograd.grad(y, leaves["x"], feed["grad_y"], create_graph=True)
    (want,) = torch.autograd.grad(dx, leaves["w"], feed["grad_grad_x"])
    assert error(evaluate(second, feed)["grad_w"], want) <= allowed(0.0, F64, 24)


def test_what_no_kernel_takes_is_written_out_on_a_gpu_as_well():
    graph = dt.Graph()
    x = graph.tensor("x", (4, 6), strides=(1, 4))
    graph.layer_norm(x).output("y")
    assert "layer_norm_grad" not in ops_after(graph.grad("y", wrt="x"), H200)
    graph = dt.Graph()  # the gradient of a sum is one number, everywhere
    graph.sum(graph.layer_norm(graph.tensor("x", (4, 6)))).output("y")
    assert "layer_norm_grad" not in ops_after(graph.grad("y", wrt="x"), H200)


def test_channels_last_are_laid_in_rows_where_a_kernel_takes_rows():
    graph = dt.Graph()  # after a convolution on a GPU channels are last
    x, k = graph.tensor("x", (32, 64, 56, 56), "f16"), graph.tensor("k", (64, 64, 3, 3), "f16")
    graph.group_norm(graph.conv(x, k, padding=1), groups=32).output("y")
    done, _ = optimised(graph.grad("y", wrt="x").ir(), H200)
    (node,) = (n for n in done.nodes if n.op == "group_norm_grad")
    assert all(done.types[v].is_layout("contiguous") for v in node.uses)


def test_gradients_of_gradients():
    graph = dt.Graph()
    x, w = graph.tensor("x", (4, 6), "f64"), graph.tensor("w", (6,), "f64")
    graph.layer_norm(x, w).output("y")
    first = graph.grad("y", wrt="x")
    second = first.grad("grad_x", wrt="w").ir()
    gen = torch.Generator().manual_seed(0)
    feed = {n: torch.randn(second.types[n].shape, generator=gen, dtype=F64) for n in second.inputs}
    leaves = {n: t.clone().requires_grad_() for n, t in feed.items()}
    y = F.layer_norm(leaves["x"], (6,), leaves["w"])
    (dx,) = torch.autograd.grad(y, leaves["x"], feed["grad_y"], create_graph=True)
    (want,) = torch.autograd.grad(dx, leaves["w"], feed["grad_grad_x"])
    assert error(evaluate(second, feed)["grad_w"], want) <= allowed(0.0, F64, 24)


# ---- the engine


@pytest.mark.parametrize(
    ("norm", "shape", "attrs"),
    [
        ("layer_norm", (16384, 4096), {}),
        ("rms_norm", (16384, 4096), {}),
        ("layer_norm", (4096, 16384), {}),
        ("group_norm", (64, 256, 56, 56), {"groups": 32}),
    ],
)
def test_a_heuristic_plan_picks_the_kernel(norm, shape, attrs):
    decision = decide(block(norm, shape, "bf16", **attrs).ir(), H200, Policy())
    chosen = {c.region.ops: c.candidate.engine for c in decision.choices}
    forward = "triton_kernels" if norm == "group_norm" else "triton_gen"
    assert chosen == {(norm,): forward, (f"{norm}_grad",): "triton_kernels"}


def test_a_norm_of_groups_takes_one_activation_along():
    engine = TritonKernels()

    def reason(*ops: str, shape=(2, 4, 8, 8), read_both=False) -> str | None:
        g = dt.Graph()
        x = z = g.group_norm(g.tensor("x", shape), groups=2)
        for op in ops:
            x = getattr(g, op)(x)
        x.output("y")
        if read_both:
            z.output("z")
        refusal = engine.refuse(Region(g.ir(), anchor=0), H200, Policy())
        return None if refusal is None else refusal.reason

    assert reason() is None and reason("silu") is None and reason("relu") is None
    assert "one activation along, not relu + relu" in str(reason("relu", "relu"))
    assert reason("exp") is None
    assert "one activation along, not softmax" in str(reason("softmax"))
    assert "is read, too" in str(reason("relu", read_both=True))
    assert "too many parts" in str(reason(shape=(2, 4, 10000, 10000)))


def test_prices_are_near_the_bytes():
    engine, region = TritonKernels(), Case("rms_norm", (16, 4096), BRAIN).region()
    for candidate in engine.candidates(region, H200, Policy()):
        assert 2e-6 < engine.estimate(region, H200, candidate) < 6e-6
    big = decide(block("rms_norm", (16384, 4096), "bf16").ir(), H200, Policy()).choices[-1]
    assert 95e-6 < big.option.predicted_s < 112e-6


def test_refuses_with_reasons():
    engine, region = TritonKernels(), Case("layer_norm", (4, 8)).region()
    assert engine.refuse(region, H200, Policy()) is None
    assert "GPU" in engine.refuse(region, dt.target("cpu"), Policy()).reason
    empty = engine.refuse(Case("layer_norm", (0, 8)).region(), H200, Policy())
    assert "size is 0" in empty.reason
    forward = decide(block("layer_norm").ir(), H200, Policy()).choices[0].region
    refusal = engine.refuse(forward, H200, Policy())
    assert refusal.quiet and "no kernel for layer_norm" in refusal.reason


# ---- bad input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda g, x, w: g.layer_norm_grad(x, w),
            "grad of layer_norm_grad is f32[8], x is f32[5,8]",
        ),
        (lambda g, x, w: g.layer_norm_grad(x, x, x), "weight of layer_norm_grad"),
        (lambda g, x, w: g.layer_norm_grad(x, x, w, w), "extra of layer_norm_grad"),
        (lambda g, x, w: g.rms_norm_grad(x, x, w, bias="same"), "rms_norm has no bias"),
        (lambda g, x, w: g.layer_norm_grad(x, x, bias="f16"), "attribute bias='f16'"),
        (lambda g, x, w: g.layer_norm_grad(x, x, w, None, w), "where an activation follows alone"),
        (
            lambda g, x, w: g.rms_norm_grad(x, x, w, None, w, activation="relu"),
            "rms_norm has no bias",
        ),
    ],
)
def test_wrong_arguments_are_named(make, says):
    g = dt.Graph()
    with pytest.raises(dt.GraphError, match=re.escape(says)):
        make(g, g.tensor("x", (5, 8)), g.tensor("w", (8,)))


def test_more_than_two_to_the_31_rows_are_refused_and_as_many_elements_are_not():
    engine = TritonKernels()
    for shape, refused in (((2**31, 1), True), ((2**20, 2**13), False)):
        build = GraphBuilder(infer, "many")
        x = build.input("x", TensorType.of(shape, "bf16"))
        (dx,) = build.emit("rms_norm_grad", [x, x])
        build.output("dx", dx)
        refusal = engine.refuse(Region(build.finish(), anchor=0), H200, Policy())
        assert (refusal is not None) == refused
        assert refusal is None or "rows" in refusal.reason
