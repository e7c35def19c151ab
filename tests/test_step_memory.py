"""How long memory of a training step lives: what is handed over, written over, computed late."""

from __future__ import annotations

import copy
import gc
import weakref
from itertools import accumulate

import pytest
import torch
from fakes import FakeEngine, check_right, registered
from tolerances import SINGLE_LAYERS, error
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.passes.split import Split
from deuteron.plan import compile_graph
from deuteron.plan.program import Program

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def products(count: int) -> dt.Graph:
    """x @ w @ w …; x is read by the first product alone."""
    g = dt.Graph()
    x, w = g.tensor("x", (8, 8)), g.tensor("w", (8, 8))
    for _ in range(count):
        x = x @ w
    x.output("y")
    return g


def test_what_is_handed_over_is_gone_when_it_has_been_read():
    engine = FakeEngine(wants=("matmul",), writes=True)
    with registered(engine):
        plan = compile_graph(products(4).ir(), device="cpu", dying=("x",))
    w = torch.randn(8, 8)
    for _ in range(3):  # the first run, which is checked, and those that were written down
        given = [torch.randn(8, 8), w]
        before, gone = engine.calls, []
        weakref.finalize(given[0], lambda gone=gone: gone.append(engine.calls))
        wanted = given[0] @ w @ w @ w @ w
        (out,) = plan.run_checked(given)
        assert given == [] and gone[0] - before <= 2, "it waits for the rest of the plan"
        assert error(out, wanted) <= SINGLE_LAYERS


def written_over(given_up: tuple[str, ...]) -> tuple[dt.Plan, dt.Graph]:
    g = dt.Graph()
    x, w = g.tensor("x", (512, 512)), g.tensor("w", (512, 512))
    (g.exp(x * 0.5) @ w).output("y")
    return compile_graph(g.ir(), device="cpu", dying=given_up), g


def test_a_result_is_written_over_what_dies_with_it():
    feed = {"x": torch.randn(512, 512), "w": torch.randn(512, 512)}
    plan, g = written_over(("x",))
    for _ in range(3):
        x = feed["x"].clone()
        check_right({"y": plan.run_checked([x, feed["w"]])[0]}, g.ir(), feed)
        assert not torch.equal(x, feed["x"]) and plan.program.memory.arena == 0
    plan, g = written_over(())
    for _ in range(3):
        x = feed["x"].clone()
        check_right({"y": plan.run_checked([x, feed["w"]])[0]}, g.ir(), feed)
        assert torch.equal(x, feed["x"])


def test_a_result_that_leaves_a_half_is_written_over_what_dies_with_it():
    """The gradient of logits over the logits, where a loss makes it."""
    g = dt.Graph()
    x, w = g.tensor("x", (64, 64)), g.tensor("w", (64, 512))
    g.softmax(x @ w).output("y")
    feed = {"x": torch.randn(64, 64), "w": torch.randn(64, 512)}
    plan = compile_graph(g.ir(), device="cpu", dying=())
    (leaving,) = plan.program.graph.output_values
    assert leaving in plan.program.spots and plan.program.memory.arena == 0
    made = [plan.run_checked([feed["x"], feed["w"]])[0] for _ in range(3)]
    for y in made:  # memory of its own, run after run
        check_right({"y": y}, g.ir(), feed)
    assert len({y.data_ptr() for y in made}) == 3


@pytest.mark.parametrize("read", ["later", "through a view", "twice"])
def test_nothing_is_written_over_what_is_read_elsewhere(read):
    g = dt.Graph()
    x, w = g.tensor("x", (256, 256)), g.tensor("w", (256, 256))
    other = {"later": x, "through a view": g.permute(x, dims=(1, 0)), "twice": x}[read]
    h = g.exp(x + g.permute(x, dims=(1, 0))) if read == "twice" else g.exp(x)
    ((h @ w) @ other).output("y")
    plan = compile_graph(g.ir(), device="cpu", dying=("x",))
    feed = {"x": torch.randn(256, 256) / 16, "w": torch.randn(256, 256) / 16}
    for _ in range(3):
        check_right({"y": plan.run_checked([feed["x"].clone(), feed["w"]])[0]}, g.ir(), feed)


def test_a_gradient_can_be_taken_twice(halves):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.GELU())
    ours, x = copy.deepcopy(model), torch.randn(512, 64)
    loss, fast = model(x).square().sum(), torch.compile(ours, backend=dt.backend)(x).square().sum()
    params = list(ours.parameters())
    first = torch.autograd.grad(fast, params, retain_graph=True)
    again = torch.autograd.grad(fast, params)
    backward = halves[1].plan.program
    taken = {spot.buffer for spot in backward.spots.values()} & set(backward.graph.inputs)
    assert taken, "nothing was written over what forward left"
    for a, b, c in zip(first, again, torch.autograd.grad(loss, model.parameters()), strict=True):
        assert torch.equal(a, b) and error(a, c) <= SINGLE_LAYERS


def test_what_the_user_sees_is_not_written_over():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    shown = torch.compile(model, backend=dt.backend)(torch.randn(8, 32))
    before = shown.detach().clone()
    shown.square().sum().backward()
    assert torch.equal(shown, before)


def test_what_takes_memory_waits_until_it_is_read():
    g = dt.Graph()
    x, w = g.tensor("x", (4, 64)), g.tensor("w", (64, 64))
    wide = g.exp(g.expand(g.reshape(x, shape=(4, 1, 64)), shape=(4, 16, 64)) * 2.0)
    h = x
    for _ in range(4):
        h = h @ w
    y = g.reshape(wide, shape=(64, 64)) @ g.permute(h, dims=(1, 0))
    y.output("y")
    plan = g.compile(device="cpu")
    order = [region.ops for region in plan.decision.regions if set(region.ops) - {"permute"}]
    assert "exp" in order[-2], order
    feed = {"x": torch.randn(4, 64), "w": torch.randn(64, 64) / 8}
    check_right(plan.run(feed), g.ir(), feed)


def test_of_a_view_its_base_is_saved():
    g = dt.Graph()
    x, w, late = g.tensor("x", (8, 8)), g.tensor("w", (8, 9)), g.tensor("late", (8, 8))
    h = x @ w
    part = g.slice(h, axis=1, start=0, stop=8)
    g.sum(part).output("first")
    (part * late).output("second")
    cut = Split(g.ir(), {"first"}, ["late"]).halves()
    assert cut.saved == (h.name,) and cut.dying == {h.name}


def test_a_chain_that_both_halves_would_write_is_saved():
    """Sums of residuals: halves of 16 bits are smaller, but all sums would be there at once."""
    g = dt.Graph()
    x, late = g.tensor("x", (64, 64)), g.tensor("late", (64, 64))
    w, scale = g.tensor("w", (64, 64), dt.float16), g.tensor("scale", (64,))
    total, read = x, []
    for _ in range(4):
        total = total + g.cast(g.cast(g.layer_norm(total, scale), dtype="f16") @ w, dtype="f32")
        read.append(total)
    total.output("first")
    for i, each in enumerate(read):
        (each @ late).output(f"later_{i}")
    cut = Split(g.ir(), {"first"}, ["late"]).halves()
    sums = [node for node in cut.again if node.op == "add"]
    again = {node.output for node in sums}
    assert all(again.isdisjoint(node.uses) for node in sums)


def test_the_peak_is_what_a_run_takes(halves, monkeypatch):
    """By torch's own account of what it allocates and frees."""
    monkeypatch.setattr(Program, "_recycles", lambda self, value: False)
    torch.manual_seed(0)
    layers = [
        part for _ in range(2) for part in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))
    ]
    model, x, y = nn.Sequential(*layers), torch.randn(2048, 128), torch.randn(2048, 128)
    fast = torch.compile(lambda: F.mse_loss(model(x), y), backend=dt.backend)
    for _ in range(2):
        fast().backward()
    model.zero_grad()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=kinds, profile_memory=True) as profile:
        fast().backward()
    events = (e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]")
    taken = max(accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))
    forward, backward = (half.plan.program.memory for half in halves)
    predicted = max(forward.peak - forward.arena, backward.peak - backward.arena)  # arenas stay
    assert abs(taken - predicted) < 0.05 * predicted
    assert "peak" in str(halves[1].plan.explain(full=True))


def test_plans_go_with_their_step():
    """Torch keeps all that it has compiled, and with what options."""
    x, y = torch.randn(4, 6), torch.randint(5, (4,))

    def step_of(model):
        return dt.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters()), (x, y))

    step = step_of(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))
    step(x, y)
    plans = [weakref.ref(plan) for plan in step.plans]
    del step
    gc.collect()
    other = step_of(nn.Linear(6, 5))
    other(x, y)
    gc.collect()
    assert plans and not any(plan() for plan in plans)
    other(x, y)  # what was forgotten is nobody else's
    assert len(other.plans) == 2
