"""Batch, group and instance norm of channels last on the CPU: numbers, gradients, statistics, bits,
and that our kernels made them."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from test_engines import right
from tolerances import allowed, error

import deuteron as dt
from deuteron.engines.cpu.kernels import CpuKernels
from deuteron.functional.explain import Recording
from deuteron.ir.dtype import dtype
from deuteron.ir.region import Region
from deuteron.policy import Policy
from deuteron.target import _cpu_target, target

f = dt.functional
SHAPES = [(3, 7, 5, 9), (2, 64, 13, 11), (5, 18, 8, 8), (4, 37, 3, 3), (2, 6, 3, 4, 5)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTS = {None: lambda z: z, "relu": F.relu, "silu": F.silu}


@pytest.fixture(autouse=True)
def quiet_machine(monkeypatch):
    """Who runs what follows from facts that are measured, on a busy machine from odd ones."""
    facts = {"f32": 7e10, "f64": 3.5e10, "memory": 2.5e10, "cache": 6e10, "call": 1.5e-6}
    facts |= {"by_columns": 1e-12, "f16": 1.7e10, "bf16": 1.7e10}
    module = sys.modules["deuteron.target"]
    monkeypatch.setattr(module, "_cpu", lambda threads: _cpu_target(**facts))


def last(x):
    return x.contiguous(
        memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d
    )


def drawn(shape, kind, mean=0.0):
    """x around a mean, weight, bias, residual and a gradient."""
    gen = torch.Generator().manual_seed(0)
    x, r, g = (last(torch.randn(shape, generator=gen)) for _ in range(3))
    w, b = (torch.randn(shape[1], generator=gen) for _ in range(2))
    return [t.to(kind) for t in (x + mean, w, b, r, g)]


def gradients(call, given, grad):
    """The result, then the gradients of all that was given."""
    given = [t.clone().requires_grad_() for t in given]
    y = call(*given)
    return [y.detach(), *torch.autograd.grad(y, given, grad.to(y.dtype))]


def heard(call):
    """What ``call`` returns, and who ran which operators in it."""
    with Recording() as parts:
        found = call()
    choices = [c for plan in parts for c in plan.decision.choices]
    return found, [(c.candidate.knobs.get("recipe", c.candidate.engine), c.region) for c in choices]


def compare(ours, theirs, given, grad, reduced):
    """Ours and torch's, both beside torch's in float64; torch's in row-major order, which is the
    one that it gets right. Who ran it."""
    with dt.functional.delegation(False):
        found, ways = heard(lambda: gradients(ours, given, grad))
    plain = [t.contiguous() for t in given]
    torchs = gradients(theirs, plain, grad.contiguous())
    exact = gradients(theirs, [t.double() for t in plain], grad.contiguous().double())
    for mine, other, want in zip(found, torchs, exact, strict=True):
        assert error(mine, want) <= allowed(error(other, want), mine.dtype, reduced)
    return ways


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("act, joined", [(None, False), ("relu", False), ("relu", True)])
@pytest.mark.each_value
def test_batch_norm_in_training(shape, dtype, act, joined):
    mean = 1000.0 if dtype is torch.float32 else 20.0
    x, w, b, r, grad = drawn(shape, dtype, mean)
    given = [x, w, b, r] if joined else [x, w, b]

    def ours(x, w, b, r=None):
        return f.batch_norm(x, None, None, w, b, True, residual=r, activation=act)

    def theirs(x, w, b, r=None):
        y = F.batch_norm(x, None, None, w, b, True)
        return ACTS[act](y if r is None else y + r)

    if act == "relu" and not joined:
        grad = away_from_steps(theirs, given, grad)
    ways = compare(ours, theirs, given, grad, x.numel() // shape[1])
    norms = [way for way, region in ways if region.ops[0].startswith("batch_norm")]
    assert norms[-1] == "norm" and set(norms) <= {"norm", "cpu_gen"}  # small ones are generated


@pytest.mark.parametrize("order", ["nhwc", "contiguous"])
@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("act", ["relu6", "leaky_relu", "silu", "hardswish"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.each_value
def test_batch_norm_with_other_activations(act, joined, order, dtype):
    x, w, b, r, grad = drawn((5, 18, 8, 9), dtype, 1.0)
    x, r, grad = (t if order == "nhwc" else t.contiguous() for t in (x * 3, r, grad))
    given = [x, w, b, r] if joined else [x, w, b]

    def ours(x, w, b, r=None):
        return f.batch_norm(x, None, None, w * 3, b, True, residual=r, activation=act)

    def theirs(x, w, b, r=None):
        y = F.batch_norm(x, None, None, w * 3, b, True)
        return getattr(F, act)(y if r is None else y + r)

    ways = compare(ours, theirs, given, grad, x.numel() // 18)
    norms = [way for way, region in ways if region.ops[0].startswith("batch_norm")]
    assert norms[-1] == "norm" and set(norms) <= {"norm", "cpu_gen"}  # small ones are generated


def away_from_steps(theirs, given, grad):
    """The gradient without what arrives where relu has its step: a rounding decides there."""
    near = theirs(*(t.double() for t in given)) < 0.01
    return torch.where(near & (theirs(*(t.double() for t in given)) > 0), 0.0, grad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("act, joined", [(None, False), ("silu", False), ("silu", True)])
@pytest.mark.each_value
def test_group_norm(shape, dtype, act, joined):
    groups = next(g for g in (32, 6, 7, 1) if shape[1] % g == 0)
    x, w, b, r, grad = drawn(shape, dtype, 1000.0 if dtype is torch.float32 and not joined else 2.0)
    given = [x, w, b, r] if joined else [x, w, b]

    def ours(x, w, b, r=None):
        y = f.group_norm(x, groups, w, b, residual=r, activation=act)
        return y if r is None else y[0]

    def theirs(x, w, b, r=None):
        return ACTS[act](F.group_norm(x if r is None else x + r, groups, w, b))

    ways = compare(ours, theirs, given, grad, x.numel() // (shape[0] * groups))
    assert {way for way, region in ways if "group_norm_grad" in region.ops} == {"norm"}


def test_group_norm_goes_by_rows():
    x, w, b, r, _ = drawn((2, 64, 16, 16), torch.float32)
    _, ways = heard(lambda: f.group_norm(x, 32, w, b, residual=r, activation="silu"))
    assert [way for way, _ in ways] == ["group_norm"]


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_instance_norm(shape):
    x, w, b, _, grad = drawn(shape, torch.float32, 1000.0)
    ways = compare(
        lambda x, w, b: f.instance_norm(x, None, None, w, b),
        lambda x, w, b: F.instance_norm(x, None, None, w, b),
        [x, w, b],
        grad,
        x[0, 0].numel(),
    )
    assert {way for way, region in ways if "instance_norm_grad" in region.ops} == {"norm"}
    forward = {way for way, region in ways if "instance_norm" in region.ops}
    assert forward <= {"group_norm", "cpu_gen"}


def test_running_statistics_and_eval():
    x, w, b, _, _ = drawn((5, 19, 6, 7), torch.float32, 30.0)
    mine, theirs = ([torch.zeros(19), torch.ones(19)] for _ in range(2))
    wide = [t.double() for t in theirs]
    for _ in range(2):
        f.batch_norm(x, *mine, w, b, True, momentum=0.3)
        F.batch_norm(x.contiguous(), *theirs, w, b, True, momentum=0.3)
        F.batch_norm(x.double(), *wide, w.double(), b.double(), True, momentum=0.3)
    for got, other, want in zip(mine, theirs, wide, strict=True):
        assert error(got, want) <= allowed(error(other, want), torch.float32)
    y = f.batch_norm(x, *mine, w, b)
    assert y.is_contiguous(memory_format=torch.channels_last)
    want = F.batch_norm(x.double(), *(t.double() for t in (*mine, w, b)))
    assert error(y, want) <= allowed(0.0, torch.float32)


@pytest.mark.parametrize("order", ["nhwc", "contiguous"])
@pytest.mark.parametrize("op", ["batch_norm_act", "batch_norm_act_grad"])
def test_every_result_has_memory_of_its_own(op, order):
    """Without running statistics the new ones are those of the batch; without an activation dz is
    the gradient."""
    g = dt.Graph("norm")
    x = g.tensor("x", (3, 20, 9, 10), layout=order)
    stats = [g.tensor(name, (20,)) for name in ("mean", "rstd")] if op.endswith("grad") else []
    made = getattr(g, op)(*([x, x, *stats] if stats else [x]))
    for i, y in enumerate(made):
        y.output(str(i))
    region, engine = Region(g.ir()), CpuKernels()
    gen = torch.Generator().manual_seed(0)
    types = region.graph.types
    feed = {v: torch.randn(types[v].shape, generator=gen).abs() for v in region.inputs}
    feed["x"] = last(feed["x"] - 0.5) if order == "nhwc" else feed["x"] - 0.5
    (candidate,) = engine.candidates(region, target("cpu"), Policy())
    right(engine, candidate, region, feed)


@pytest.mark.parametrize("kind", ["nan", "inf", "huge", "equal"])
def test_odd_numbers_are_as_in_row_major_order(kind):
    x, w, b, _, grad = drawn((4, 20, 10, 10), torch.float32)
    if kind == "equal":
        x[:, 3] = 1234.567
    else:
        x[2, 3, 5, 5] = {"nan": torch.nan, "inf": torch.inf, "huge": 1e30}[kind]
    for call in (
        lambda x, w, b: f.batch_norm(x, None, None, w, b, True),
        lambda x, w, b: f.group_norm(x, 5, w, b),
        lambda x, w, b: f.instance_norm(x, None, None, w, b),
    ):
        with dt.functional.delegation(False):
            found = gradients(call, [x, w, b], grad)
            want = gradients(call, [x.contiguous(), w, b], grad.contiguous())
        for got, plain in zip(found, want, strict=True):
            assert torch.equal(got.isnan(), plain.isnan())
            usual = ~plain.isnan()
            assert error(got[usual], plain[usual]) <= allowed(0.0, torch.float32, x.numel())
    running = [[torch.zeros(20), torch.ones(20)] for _ in range(2)]
    y = f.batch_norm(x, *running[0], w, b, True)
    F.batch_norm(x.contiguous(), *running[1], w, b, True)
    if kind == "equal":
        assert torch.equal(y[:, 3], b[3].expand_as(y[:, 3]))
    if kind != "huge":  # of which we say nan, and not that it varies by infinity
        for got, plain in zip(*running, strict=True):
            assert error(got, plain) <= allowed(0.0, torch.float32, x.numel())


def test_a_mean_that_jumps_between_rows_loses_nothing():
    """Rows are compared with the first few of them: these may be far from all others."""
    x, w, b, _, grad = drawn((2, 12, 40, 40), torch.float32)
    x[0, :, :1] += 5000.0  # a few rows of the first block
    x[1, :, 20:] -= 3000.0
    for ours, theirs in (
        (
            lambda x, w, b: f.batch_norm(x, None, None, w, b, True),
            lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        ),
        (lambda x, w, b: f.group_norm(x, 4, w, b), lambda x, w, b: F.group_norm(x, 4, w, b)),
        (
            lambda x, w, b: f.instance_norm(x, None, None, w, b),
            lambda x, w, b: F.instance_norm(x, None, None, w, b),
        ),
    ):
        compare(ours, theirs, [x, w, b], grad, x.numel() // 12)


def test_bits_do_not_depend_on_the_number_of_threads():
    x, w, b, r, grad = drawn((4, 48, 30, 31), torch.float32, 3.0)
    calls = (
        lambda x, w, b, r: f.batch_norm(x, None, None, w, b, True, residual=r, activation="relu"),
        lambda x, w, b, r: f.group_norm(x, 16, w, b, residual=r, activation="silu")[0],
        lambda x, w, b, r: f.instance_norm(x, None, None, w, b, residual=r, activation="relu")[0],
    )
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append([t for call in calls for t in gradients(call, [x, w, b, r], grad)])
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_what_is_asked_for_alone():
    x, w, b, _, grad = drawn((3, 20, 9, 9), torch.float32)
    for call in (
        lambda x, w, b: f.batch_norm(x, None, None, w, b, True, activation="relu"),
        lambda x, w, b: f.group_norm(x, 4, w, b),
        lambda x, w, b: f.instance_norm(x, None, None, w, b),
    ):
        whole = gradients(call, [x, w, b], grad)[1:]
        for i in range(3):
            given = [t.clone().requires_grad_(k == i) for k, t in enumerate((x, w, b))]
            (alone,) = torch.autograd.grad(call(*given), given[i], grad)
            assert torch.equal(alone, whole[i])


def test_no_weight_no_bias_and_a_view_with_gaps():
    x, _, _, _, grad = drawn((3, 20, 9, 10), torch.float32, 4.0)
    for theirs, ours in (
        (
            lambda x: F.batch_norm(x, None, None, training=True),
            lambda x: f.batch_norm(x, None, None, training=True),
        ),
        (lambda x: F.group_norm(x, 5), lambda x: f.group_norm(x, 5)),
        (lambda x: F.instance_norm(x), lambda x: f.instance_norm(x, None, None)),
    ):
        compare(ours, theirs, [x], grad, x.numel() // 20)
        with dt.functional.delegation(False):
            got = ours(x[:, ::2, 1:])
        assert error(got, theirs(x[:, ::2, 1:].double())) <= allowed(0.0, torch.float32, 300)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("given", ["", "w", "wb"])
@pytest.mark.parametrize("sums", [0, 1])
@pytest.mark.parametrize("op", ["group_norm", "instance_norm"])
@pytest.mark.each_pair
def test_a_norm_in_the_middle_of_a_region(op, kind, given, sums):
    """Something before, whose result others may read, and something after."""
    g = dt.Graph("norm")
    x, y = (g.tensor(n, (2, 12, 5, 7), dtype(kind), layout="nhwc") for n in "xy")
    total = g.relu(x) + y
    for _ in range(sums):
        total.output("total")
    w, b = (g.tensor(n, (12,), dtype(kind)) if n in given else None for n in "wb")
    groups = {"groups": 4} if op == "group_norm" else {}
    (g.silu(getattr(g, op)(total, w, b, **groups)) * y).output("z")
    region, engine = Region(g.ir()), CpuKernels()
    gen = torch.Generator().manual_seed(0)
    feed = {
        name: torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch).copy_(
            torch.randn(t.shape, generator=gen)
        )
        for name, t in ((v, region.graph.types[v]) for v in region.inputs)
    }
    (candidate,) = engine.candidates(region, target("cpu"), Policy())
    assert candidate.knobs["recipe"] == "group_norm"
    right(engine, candidate, region, feed)


def test_group_norm_says_why_it_is_not_by_rows():
    def reason(**given):
        g = dt.Graph("norm")
        x = g.tensor("x", (2, 8, 3, 3), **given)
        w = g.tensor("w", (8,), strides=(2,) if given.get("layout") else None)
        g.group_norm(x, w, None, groups=4).output("y")
        (choice,) = g.compile(device="cpu").decision.choices
        return dict(choice.refusals)["cpu_kernels"].reason

    assert "not in nhwc" in reason()
    assert "has gaps" in reason(layout="nhwc")


@pytest.mark.parametrize("groups", [0, 5])
def test_a_gradient_in_another_order_is_laid_beside_x(groups):
    x, w, b, _, grad = drawn((3, 20, 9, 10), torch.float32, 4.0)

    def ours(x, w, b):
        if groups:
            return f.group_norm(x, groups, w, b)
        return f.batch_norm(x, None, None, w, b, True)

    want = gradients(ours, [x, w, b], grad)
    with dt.functional.delegation(False):
        found, ways = heard(lambda: gradients(ours, [x, w, b], grad.contiguous()))
    assert [way for way, region in ways if region.ops[0].endswith("_grad")] == ["norm"]
    assert all(map(torch.equal, found, want))
