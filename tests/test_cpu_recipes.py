"""Norms of channels, and sums by index, in generated code on the CPU: every sample of theirs, in
every type."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from fakes import check_right
from test_engines import Answers, regions_of, right
from tolerances import SINGLE_LAYERS, allowed, error

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.cpu.kernels import CpuKernels
from deuteron.engines.cpu.norm import NORMS
from deuteron.ir.region import Region
from deuteron.ops import TABLE
from deuteron.policy import Policy
from deuteron.target import target
from tests.sweeps import one_in

CPU = target("cpu")
RECIPES = {**dict.fromkeys(NORMS, "norm"), "group_norm": "group_norm"}
KINDS = [(op, kind) for op in RECIPES for kind in ("f32", "f16", "bf16")]
RECIPES |= dict.fromkeys(("scatter_add", "embedding_grad"), "scatter_add")
KINDS += [("scatter_add", "f32"), ("embedding_grad", "f32")]


@pytest.mark.parametrize(("op", "kind"), KINDS)
def test_every_sample(op, kind):
    engine, count = CpuKernels(), 0
    for note, region, feed in regions_of(TABLE[op], kind):
        for candidate in engine.candidates(region, CPU, Policy()):
            if candidate.knobs["recipe"] == RECIPES[op]:
                count += 1
                try:
                    right(engine, candidate, region, feed, Answers(region, feed))
                except AssertionError as fault:
                    raise AssertionError(f"{op} {note}: {fault}") from fault
    assert count >= 3


def _why_not(graph):
    return CpuKernels().refuse(Region(graph.ir()), CPU, Policy()).reason


def test_refusals_say_why():
    g = dt.Graph("norm")
    x = g.tensor("x", (2, 4, 6), strides=(24, 1, 4))
    g.batch_norm_act(x, None, None, None, None, None)[0].output("y")
    assert "some are in row-major order and some in nhwc" in _why_not(g)
    g = dt.Graph("norm")
    x = g.tensor("x", (2, 4, 6, 5), strides=(120, 1, 4, 24))
    g.batch_norm_act(x, None, None, None, None, None)[0].output("y")
    assert "x is not in row-major order and not in nhwc" in _why_not(g)
    g = dt.Graph("norm")
    x, w = g.tensor("x", (2, 4, 6)), g.tensor("w", (4,), strides=(2,))
    g.batch_norm_act(x, w, None, None, None, None)[0].output("y")
    assert "weight has gaps" in _why_not(g)
    k = dt.Graph("norm")
    x, act = k.tensor("x", (2, 4, 9)), {"activation": "relu", "packed": "positions"}
    k.batch_norm_act(x, None, None, None, None, x, **act)[5].output("signs")
    assert "keeps no signs" in _why_not(k)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 4, 5, 7), (2, 6), (5, 2, 129), (1, 3, 2, 3, 4)])
@pytest.mark.each_value
def test_training_beside_torch_in_float64(shape, dtype):
    torch.manual_seed(0)
    large = 100 if dtype is torch.float32 else 2
    x = (torch.randn(shape) * 3 + large).to(dtype).requires_grad_()
    w, b = (torch.randn(shape[1]).to(dtype).requires_grad_() for _ in range(2))
    r, seed = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    f = dt.functional
    got = torch.autograd.grad(
        f.batch_norm(x, None, None, w, b, True, residual=r, activation="relu"), (x, w, b, r), seed
    )
    wide = [t.detach().double().requires_grad_() for t in (x, w, b, r)]
    y = torch.nn.functional.batch_norm(wide[0], None, None, wide[1], wide[2], True) + wide[3]
    want = torch.autograd.grad(y.relu(), wide, seed.double())
    plain = [t.detach().requires_grad_() for t in (x, w, b, r)]
    z = torch.nn.functional.batch_norm(plain[0], None, None, plain[1], plain[2], True) + plain[3]
    theirs = torch.autograd.grad(z.relu(), plain, seed)
    for mine, torchs, exact in zip(got, theirs, want, strict=True):
        off, reduced = error(torchs, exact), x.numel() // shape[1]
        assert error(mine, exact) <= allowed(off, mine.dtype, reduced)


@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (4,), (3, 4), (2, 3)])
def test_results_that_nobody_reads_are_not_written(wanted):
    """The gradient of a norm of few numbers computes the statistics again, and nothing else."""
    g = dt.Graph("norm")
    x, mean, var = g.tensor("x", (5, 8)), g.tensor("mean", (8,)), g.tensor("var", (8,))
    results = g.batch_norm_act(x, None, None, mean, var, None)
    for i in wanted:
        results[i].output(str(i))
    region, engine = Region(g.ir()), CpuKernels()
    (candidate,) = engine.candidates(region, CPU, Policy())
    context = BuildContext(CPU, torch.device("cpu"), Policy(), {})
    kernel = engine.build(region, candidate, context)
    feed = {"x": torch.randn(5, 8), "mean": torch.randn(8), "var": torch.rand(8)}
    want = TABLE["batch_norm_act"].reference(
        feed["x"],
        None,
        None,
        feed["mean"],
        feed["var"],
        None,
        momentum=0.1,
        eps=1e-5,
        activation="none",
        packed="none",
    )
    found = [torch.full_like(want[i], torch.nan) for i in wanted]
    kernel.fn(*(feed[name] for name in region.inputs), *found)
    for got, i in zip(found, wanted, strict=True):
        assert error(got, want[i]) <= allowed(0.0, torch.float32, 5)


@pytest.mark.parametrize("shape", [(5, 8), (3, 8, 2), (7, 3000)])
def test_the_gradient_of_few_numbers_per_channel(shape):
    x = torch.randn(shape, requires_grad=True)
    y = x.detach().double().requires_grad_()
    dt.functional.batch_norm(x, None, None, training=True).sin().sum().backward()
    torch.nn.functional.batch_norm(y, None, None, training=True).sin().sum().backward()
    assert error(x.grad, y.grad) <= SINGLE_LAYERS


def _results(call, tensors, grad):
    given = [t.clone().requires_grad_() for t in tensors]
    y = call(*given)
    y.backward(grad.to(y.dtype))
    return [y.detach(), *(t.grad for t in given)]


LONG = {  # ours, torch's
    "batch norm": (
        lambda x, w, b: dt.functional.batch_norm(x, None, None, w, b, training=True),
        lambda x, w, b: torch.nn.functional.batch_norm(x, None, None, w, b, training=True),
    ),
    "group norm": (
        lambda x, w, b: dt.functional.group_norm(x, 2, w, b, activation="silu"),
        lambda x, w, b: torch.nn.functional.silu(torch.nn.functional.group_norm(x, 2, w, b)),
    ),
    "layer norm": (
        lambda x, w, b: dt.functional.layer_norm(x.reshape(-1, 4), 4, w, b),
        lambda x, w, b: torch.nn.functional.layer_norm(x.reshape(-1, 4), (4,), w, b),
    ),
    "rms norm": (
        lambda x, w, b: dt.functional.rms_norm(x.reshape(-1, 4), 4, w) + b,
        lambda x, w, b: torch.nn.functional.rms_norm(x.reshape(-1, 4), (4,), w) + b,
    ),
}


@pytest.mark.parametrize("name", one_in(2, LONG))
def test_long_sums_are_no_less_exact_than_short_ones(name):
    """A few hundred thousand numbers around 3 for each channel or column: no bound that grows."""
    gen = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(16, 4, 150, 150, generator=gen) for _ in range(2))
    given = [x + 3, *(torch.randn(4, generator=gen) for _ in range(2))]
    ours, torchs = LONG[name]
    grad = grad if "norm" in name and name[0] in "bg" else grad.reshape(-1, 4)
    exact = _results(torchs, [t.double() for t in given], grad)
    with dt.functional.delegation(False):
        found = _results(ours, given, grad)
    for got, theirs, want in zip(found, _results(torchs, given, grad), exact, strict=True):
        assert error(got, want) <= allowed(error(theirs, want), torch.float32)


@pytest.mark.each_value
@pytest.mark.parametrize("wide", [8, 16])
@pytest.mark.parametrize("size", [3, 9, 24, 40, 77])
def test_wide_vectors_leave_parts_of_one(monkeypatch, wide, size):
    """As AVX2 and AVX-512 have them: what is left of a row is done four and eight at a time."""
    from deuteron.codegen import llvm

    torch.manual_seed(size)
    monkeypatch.setattr(llvm, "width", lambda: wide)
    written, load = [], llvm.load
    monkeypatch.setattr(llvm, "load", lambda name, make: written.append(name) or load(name, make))
    g = dt.Graph()
    x = g.tensor("x", (37, size))
    g.silu(x).output("y")
    g.mean(x, axes=(0,)).output("down")
    g.softmax(x).output("rows")
    plan = g.compile(device="cpu", policy=dt.Policy(engines=("cpu_gen",)))
    data = torch.randn(37, size)
    got = plan.run(x=data)
    assert written and all(f"{wide} lanes" in name for name in written if "program" in name)
    check_right(got, g.ir(), {"x": data})


@pytest.mark.parametrize("wide", [4, 16])
@pytest.mark.parametrize("channels", [3, 8, 24, 70])
def test_the_last_channels_of_a_depthwise_convolution(monkeypatch, wide, channels):
    from deuteron.kernels.cpu import depthwise

    torch.manual_seed(channels)
    monkeypatch.setattr(depthwise, "width", lambda: wide)
    x, w, r = (
        torch.randn(s) for s in ((2, channels, 9, 8), (channels, 1, 3, 3), (2, channels, 9, 8))
    )
    x, r = (t.contiguous(memory_format=torch.channels_last) for t in (x, r))
    g = dt.Graph()
    given = [g.tensor(n, t.shape, layout="nhwc") for n, t in (("x", x), ("r", r))]
    y = g.conv(given[0], g.constant(w, "w"), padding=1, groups=channels)
    g.relu(g.add(y, given[1])).output("y")
    plan = g.compile(device="cpu", policy=dt.Policy(engines=("cpu_kernels",)))
    check_right(plan.run(x=x, r=r), g.ir(), {"x": x, "r": r})


def test_known_bounds_without_an_instruction_for_both(monkeypatch):
    """As on x86-64: a bound that is known is compared with, and nan stays nan."""
    from deuteron.codegen import llvm

    monkeypatch.setattr(llvm, "width", lambda: 8)
    monkeypatch.setattr(llvm, "by_lane", lambda: False)
    g = dt.Graph()
    x = g.tensor("x", (3, 83))
    g.clamp(g.relu(x), max=6.0).output("y")
    g.clamp(x, min=-1.0, max=2.0).output("z")
    plan = g.compile(device="cpu", policy=dt.Policy(engines=("cpu_gen",)))
    data = torch.randn(3, 83) * 5
    data[0, :5] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0])
    got = plan.run(x=data)
    for name, want in (("y", data.relu().clamp(max=6.0)), ("z", data.clamp(-1.0, 2.0))):
        torch.testing.assert_close(got[name], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_sums_by_index_are_added_in_order_by_any_number_of_threads(threads):
    """Bit for bit torch's: rows in the order of the index. The second is for a team."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for entries, features, rows in ((40, 1, 3), (3000, 7, 50)):
            g = dt.Graph()
            index = g.tensor("index", (entries, 1), "i64")
            src = g.tensor("src", (entries, features))
            g.scatter_add(index, src, shape=(rows, features), axis=0).output("y")
            engine, region = CpuKernels(), Region(g.ir())
            (way,) = engine.candidates(region, CPU, Policy())
            kernel = engine.build(region, way, BuildContext(CPU, torch.device("cpu"), Policy(), {}))
            which, values = torch.randint(0, rows, (entries, 1)), torch.randn(entries, features)
            out = torch.full((rows, features), torch.nan)
            kernel.fill([which, values], [out])
            want = torch.zeros(rows, features).index_add(0, which[:, 0], values)
            assert torch.equal(out, want)
            which[3] = rows
            with pytest.raises(dt.BindError, match=f"index {rows} at \\[3, 0\\] is out of range"):
                kernel.fill([which, values], [out])
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("rate", [1.7e10, 1.2e12], ids=["no tiles", "tiles for it"])
def test_a_library_multiplies_what_a_cpu_has_tiles_for_and_the_rest_is_generated(monkeypatch, rate):
    """By estimate as well, whose numbers are of this machine: of a size that comes later, say."""
    cpu = target("cpu")
    machine = replace(cpu, peak={**cpu.peak, "bf16": rate})
    monkeypatch.setattr(sys.modules["deuteron.target"], "_cpu", lambda threads: machine)
    x = torch.randn(64, 512)
    for dtype, ours in ((torch.float32, True), (torch.bfloat16, rate < 1e11)):
        module = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.GELU()).to(dtype)
        fast = dt.optimize(module, x.to(dtype), find=False)
        engines = [c.candidate.engine for c in fast.plan.decision.choices]
        assert (engines == ["cpu_kernels"]) is ours, engines
        assert ours or engines[-1] == "cpu_gen"
