"""Losses on the road that all operators take: in graphs, in modules, and explained."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.functional import cross_entropy, delegation, explain, linear_cross_entropy
from deuteron.plan import decide
from tests.tolerances import EPS, allowed, error

LOSS = "cross_entropy_with_grad"


def training(shape, dtype="f32", square=False, **how):
    """A graph of a loss and its gradient for the logits."""
    g = dt.Graph("training")
    x, y = g.tensor("x", shape, dtype), g.tensor("y", (shape[0], *shape[2:]), "i64")
    loss = g.cross_entropy(x, y, **how)
    (loss * loss if square else loss).output("loss")
    return g.grad("loss", wrt=["x"])


def planned(graph, target):
    """The choices of a plan for a machine that need not be here."""
    return decide(graph.ir(), dt.target(target), dt.Policy()).choices


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_a_loss_and_its_gradient_are_one_pass_of_our_kernel_on_a_gpu(dtype):
    choices = planned(training((8192, 128256), dtype), "h200")
    (ours,) = [c for c in choices if LOSS in c.region.ops]
    assert ours.candidate.engine == "triton_kernels" and len(choices) == 3
    assert ours.region.ops == (LOSS,) and len(ours.region.outputs) == 2  # loss and gradient
    engines = {option.candidate.engine for option in ours.options}
    assert "triton_gen" in engines  # generated code bids as well


@pytest.mark.parametrize("target", ["h200", "cpu"])
@pytest.mark.parametrize("shape", [(4096, 1000), (8, 21, 64, 64), (64, 10)], ids=str)
def test_short_rows_and_images_are_one_generated_kernel(shape, target):
    choices = planned(training(shape, label_smoothing=0.1), target)
    (ours,) = [c for c in choices if LOSS in c.region.ops]
    assert ours.candidate.engine == ("triton_gen" if target == "h200" else "cpu_gen")
    assert not any("softmax" in op for c in choices for op in c.region.ops)


def test_logits_that_are_widened_for_the_loss_are_read_as_they_are():
    g = dt.Graph("widened")
    x, y = g.tensor("x", (512, 50304), "bf16"), g.tensor("y", (512,), "i64")
    g.cross_entropy(g.cast(x, dtype="f32"), y).output("loss")
    choices = planned(g.grad("loss", wrt=["x"]), "h200")
    (ours,) = [c for c in choices if LOSS in c.region.ops]
    assert ours.region.ops == (LOSS,)
    assert ours.candidate.engine == "triton_kernels"


def test_a_gradient_that_waits_for_the_loss_is_a_pass_of_its_own():
    choices = planned(training((8192, 128256), "bf16", square=True), "h200")
    assert sum(LOSS in c.region.ops for c in choices) == 2


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("square", [False, True])
def test_the_numbers_of_a_planned_loss(reduction, square):
    if square and reduction == "none":
        return
    torch.manual_seed(0)
    graph = training((7, 13), square=square, reduction=reduction, ignore_index=3)
    x, y = torch.randn(7, 13), torch.randint(13, (7,))
    y[2] = 3
    feed = {"x": x, "y": y}
    up = torch.rand(7) if reduction == "none" else torch.ones(())
    if reduction == "none":
        feed["grad_loss"] = up
    found = graph.compile(device="cpu").run(feed)
    exact = x.double().requires_grad_()
    loss = F.cross_entropy(exact, y, reduction=reduction, ignore_index=3)
    loss = loss * loss if square else loss
    loss.backward(up.double())
    assert error(found["loss"], loss.detach()) <= allowed(0.0, torch.float32, 16)
    assert error(found["grad_x"], exact.grad) <= allowed(0.0, torch.float32, 16)


def test_a_module_that_calls_our_loss_is_planned():
    class Head(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(16, 40)

        def forward(self, x, y):
            with delegation(False):
                return dt.functional.cross_entropy(self.linear(x), y, z_loss=0.1)

    head, x, y = Head().eval(), torch.randn(24, 16), torch.randint(40, (24,))
    fast = dt.optimize(head, (x, y), find=False)
    assert any(LOSS in region.ops for region in fast.plan.decision.regions)
    with torch.no_grad():
        assert error(fast(x, y), head(x, y)) <= 8 * EPS[torch.float32]


def test_explanations_say_what_ran():
    x, y = torch.randn(600, 2000, requires_grad=True), torch.randint(2000, (600,))
    said = explain(cross_entropy, x, y)
    assert LOSS in said and "cpu_gen" in said
    assert LOSS in explain(cross_entropy, x.detach(), y, return_lse=True)
    hidden, weight = torch.randn(600, 64), torch.randn(2000, 64, requires_grad=True)
    said = explain(linear_cross_entropy, hidden, weight, y, chunk=100)
    assert "6 chunks of up to 100 tokens" in said and said.count("plan for") <= 2
    assert LOSS in said and "cpu_gen" in said
    with delegation(True):
        assert "torch's own function" in explain(cross_entropy, x[:2, :3], y[:2] % 3)
