"""Casts that run as one call on a GPU, and what is written back to where it came from."""

from __future__ import annotations

import copy
import importlib
import math

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.engines import BuildContext, Candidate, build
from deuteron.engines.vendor.copies import NAME
from deuteron.plan import merged_casts, tensors
from deuteron.plan.choose import Survey
from deuteron.plan.cuda_graph import Settled
from deuteron.plan.decide import Decision, constants_on, decide
from deuteron.plan.pricing import make_report
from deuteron.plan.program import Program
from deuteron.plan.serialize import _decided_as, chosen
from tests.tolerances import SINGLE

DECIDE = importlib.import_module("deuteron.plan.decide")  # the package has a function of that name
H200, CPU = dt.target("h200"), torch.device("cpu")
NODE_BY_NODE = dt.Policy(engines=("torch", "vendor_fused", "-vendor_fused/wide"))


def step(layers: int = 4, width: int = 32, rows: int = 8, kept: bool = True) -> dt.Graph:
    """Products by weights that are rounded first, and with ``kept`` the rounded weights and
    gradients, widened, as results."""
    g = dt.Graph("step")
    x = g.tensor("x", (rows, width), dt.bfloat16)
    for i in range(layers):
        w = g.cast(g.tensor(f"w{i}", (width, width)), dtype="bf16")
        b = g.cast(g.tensor(f"b{i}", (width,)), dtype="bf16")
        y = g.linear(x, w, b)
        if kept:
            w.output(f"kept{i}")
            g.cast(g.matmul(g.permute(y, dims=(1, 0)), x), dtype="f32").output(f"grad{i}")
        x = y
    x.output("y")
    return g


def decided(g: dt.Graph, policy: dt.Policy = NODE_BY_NODE) -> Decision:
    return decide(g.ir(), H200, policy)


@pytest.fixture
def apart(monkeypatch):
    """Decisions in which every cast is a region by itself."""

    def made(g: dt.Graph, policy: dt.Policy = NODE_BY_NODE) -> Decision:
        with monkeypatch.context() as patched:
            patched.setattr(DECIDE, "together", lambda choices, *_: list(choices))
            return decided(g, policy)

    return made


def is_call(choice: object) -> bool:
    return choice.candidate.knobs.get("recipe") == NAME


def calls(decision: Decision) -> list[int]:
    """Of how many casts each call is."""
    return [len(c.region.nodes) for c in decision.choices if is_call(c)]


def alone(decision: Decision) -> int:
    return sum(c.region.ops == ("cast",) for c in decision.choices)


def ran(decision: Decision, given: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The plan for a GPU in its order, here: calls of many casts as they are, others by torch."""
    ctx, torchs = BuildContext(H200, CPU, decision.policy, {}), Candidate("torch", "1")
    kernels = [
        build(c.region, c.candidate if is_call(c) else torchs, ctx) for c in decision.choices
    ]
    graph = decision.graph
    program = Program(graph, decision.regions, kernels, constants_on(graph, CPU), CPU)
    program.run([given[v] for v in graph.inputs])  # checked; then as it is written down
    return program.run([given[v] for v in graph.inputs])


def random_inputs(decision: Decision) -> dict[str, torch.Tensor]:
    gen, types = torch.Generator().manual_seed(0), decision.graph.types
    return {v: tensors.random_tensor(types[v], CPU, gen) for v in decision.graph.inputs}


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.stride() == b.stride() and torch.equal(bits(a), bits(b))


def test_weights_are_rounded_by_one_call_and_gradients_widened_by_another(apart):
    decision, before = decided(step()), apart(step())
    assert calls(decision) == [8, 4] and alone(decision) == 0
    assert alone(before) >= 8 and len(before.choices) - len(decision.choices) >= 7
    assert sum(c.best_s for c in decision.choices) < sum(c.best_s for c in before.choices)
    assert "8 casts in one call" in repr(make_report(decision))  # of which explain shows a line
    given = random_inputs(decision)
    assert_same_bits(ran(decision, given), ran(before, given))


def test_casts_keep_every_bit_and_order(apart):
    """Odd numbers, images in either order, sizes of 1 whose strides mean nothing, a number, a cast
    of a cast, a tensor that is read twice, and one without elements."""
    g = dt.Graph("odd")
    shapes = {
        "a": (3, 5),
        "image": (4, 3, 3, 3),
        "pixel": (8, 4, 1, 1),
        "number": (),
        "none": (0, 2),
    }
    for name, shape in shapes.items():
        layout = "nhwc" if len(shape) == 4 else "contiguous"
        x = g.tensor(name, shape, dt.float32, layout=layout)
        short = g.cast(x, dtype="bf16")
        short.output(f"short_{name}")
        g.cast(short, dtype="f32").output(f"again_{name}")
        g.cast(x, dtype="f16").output(f"half_{name}")
    decision = decided(g)
    assert [n for n in calls(decision) if n >= 4], "not one call for several"
    given = random_inputs(decision)
    odd = torch.tensor(
        [math.nan, math.inf, -math.inf, -0.0, 1e-40, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8]
    )
    given["a"].view(-1)[:8] = odd
    assert_same_bits(ran(decision, given), ran(apart(g), given))


def test_only_what_is_worth_it_runs_together(apart):
    assert calls(decided(step(layers=1, kept=False))) == [], "two casts are no list"
    assert calls(decided(step(width=4096))) == [4], "launching large ones is a small part of it"
    assert calls(decided(step(), dt.Policy(engines=("torch",)))) == []
    cpu = decide(step().ir(), dt.target("cpu"), dt.Policy())
    assert calls(cpu) == []


def test_no_more_are_rounded_ahead_than_memory_allows(apart, monkeypatch):
    """Weights that nobody keeps: all at once would be half as much memory again."""
    monkeypatch.setattr(merged_casts, "SPARE", 1 << 19)
    g = step(layers=24, width=256, kept=False)
    decision, before = decided(g), apart(g)
    more, least = (merged_casts._most_memory(d.choices, d.graph, ()) for d in (decision, before))
    assert more <= least + merged_casts.SPARE < least + 24 * 256 * 256
    assert len(calls(decision)) > 1 and len(decision.choices) < len(before.choices) - 24
    given = random_inputs(decision)
    assert_same_bits(ran(decision, given), ran(before, given))


def test_a_saved_decision_is_read_as_it_was():
    decision = decided(step())
    graph, survey = decision.graph, Survey(H200, NODE_BY_NODE)
    again = _decided_as(chosen(decision, CPU), graph, graph, (), survey, CPU)
    assert not again.notes and calls(again) == calls(decision)
    assert [c.candidate for c in again.choices] == [c.candidate for c in decision.choices]


def test_many_elementwise_groups_of_one_number_are_full_one_after_another():
    g = dt.Graph("counters")
    one = g.tensor("one", (), dt.int64)
    for i in range(60):
        (g.tensor(f"n{i}", (), dt.int64) + one).output(f"m{i}")
    assert [len(c.region.nodes) for c in decided(g, dt.Policy()).choices] == [48, 12]


# ---- what is written back


def test_all_tensors_of_a_type_are_copied_by_one_call(monkeypatch):
    made = []
    real = torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda a, b: (made.append(len(a)), real(a, b)))
    new = [torch.randn(3), torch.tensor(7), torch.randn(0), torch.randn(2, 3, 2, 2)]
    new += [torch.tensor(9), new[3].to(memory_format=torch.channels_last)]
    old = [torch.empty(t.shape, dtype=t.dtype) for t in new]
    tensors.copy_all(zip(old, new, strict=True))
    assert sorted(made) == [1, 2, 3], "floats, whole numbers, and what lies in another order"
    assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))


class Counting(nn.Module):
    """Buffers that change, are shown as they were and as they are, and are read by others."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("last", torch.zeros(4, 6))
        self.register_buffer("twice", torch.zeros(6))
        self.register_buffer("none", torch.zeros(0))

    def forward(self, x):
        before = self.seen.clone()
        self.seen.add_(x.detach().sum(0))
        self.twice.copy_(self.seen)
        self.last.copy_(x.detach())
        self.none.mul_(2)
        y = self.linear(self.norm(x)) + before
        return y, before, self.seen.view(2, 3) + 0, self.seen.view(3, 2)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("training", [True, False])
def test_buffers_change_as_eagers(training, halves):
    torch.manual_seed(0)
    plain = Counting().train(training)
    ours = copy.deepcopy(plain)
    fast = torch.compile(ours, backend=dt.backend)
    kept = []
    for _ in range(4):
        x = torch.randn(4, 6)
        with torch.set_grad_enabled(training):
            both = plain(x), fast(x)
        if training:
            for y, *_ in both:
                y.sum().backward()
        kept.append(both)
        for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=SINGLE, atol=SINGLE)
    for theirs, mine in kept:  # also those of earlier steps
        torch.testing.assert_close(mine, theirs, rtol=SINGLE, atol=SINGLE)
    versions = [b._version for b in ours.buffers()]
    with torch.set_grad_enabled(training):
        fast(torch.randn(4, 6))
    changed = zip(versions, (b._version for b in ours.buffers()), strict=True)
    assert any(a < b for a, b in changed)
    assert halves[0].plan.program.into, "nothing was written in place"


def test_what_is_written_is_captured_only_where_it_stays():
    """A graph over a copy would write to the copy."""
    settled = Settled(lambda given: given, shown=(), written=[1])
    settled._calls, given = settled.CALLS, [torch.zeros(100), torch.zeros(1)]
    assert settled._may_capture(given, [True, True])
    assert not settled._may_capture(given, [True, False])
