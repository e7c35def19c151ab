"""Gradients of parts of one tensor are joined where they were added with zeros around them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.passes import Context, run_passes
from tests.tolerances import SINGLE_LAYERS, allowed, error

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def simplified(write):
    g = dt.Graph("sum")
    write(g).output("y")
    graph, _ = run_passes(g.ir(), Context(dt.target("cpu"), dt.Policy()))
    return graph, g


def padded(g, name, low, size, whole=8):
    x = g.tensor(name, (3, size))
    return g.pad(x, low=(0, low), high=(0, whole - low - size), mode="constant", value=0.0)


@pytest.mark.parametrize(
    ("parts", "ops"),
    [
        ([(5, 3), (2, 3), (0, 2)], ["concat"]),  # side by side, in any order
        ([(4, 4), (0, 4), (4, 4)], ["add", "concat"]),  # two of one place
        ([(6, 1), (1, 2)], ["pad", "pad", "concat"]),  # with room between them
        ([(0, 4), (2, 4)], ["pad", "pad", "add"]),  # that overlap stay
    ],
)
def test_parts_are_joined(parts, ops):
    def write(g):
        first, *rest = (padded(g, f"x{i}", low, size) for i, (low, size) in enumerate(parts))
        for other in rest:
            first = first + other
        return first

    graph, g = simplified(write)
    assert sorted(node.op for node in graph.nodes) == sorted(ops)
    given = {f"x{i}": torch.randn(3, size) for i, (_, size) in enumerate(parts)}
    want = torch.zeros(3, 8)
    for (low, size), x in zip(parts, given.values(), strict=True):
        want[:, low : low + size] += x
    torch.testing.assert_close(g.compile().run(**given)["y"], want)


class Loop(nn.Module):
    """A state that goes through time, as recurrent networks are written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.take, self.keep = nn.Linear(4, 8), nn.Parameter(torch.rand(4))

    def forward(self, x):
        rate, value = self.take(x).chunk(2, -1)
        state, seen = torch.zeros_like(value[:, 0]), []
        for t in range(x.shape[1]):
            state = (rate[:, t].sigmoid() * self.keep) * state + value[:, t] * rate[:, t]
            seen.append(state)
        return torch.stack(seen, 1)


def test_a_loop_over_time_adds_no_zeros():
    model, x, y = Loop(), torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    plans = []
    fast = torch.compile(model, backend=dt.backend, options={"plans": plans})
    params = list(model.parameters())
    got, want = (torch.autograd.grad(F.mse_loss(f(x), y), params) for f in (fast, model))
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)
    ops = [node.op for plan in plans for node in plan.graph.nodes]
    assert "pad" not in ops and "aten" not in ops


@pytest.mark.each_value
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_a_squared_error(reduction, kind):
    def loss(x, y):
        return F.mse_loss(x * 2, y, reduction=reduction).sum()

    x, y = torch.randn(4, 5).to(kind).requires_grad_(), torch.randn(4, 5).to(kind)
    got = torch.autograd.grad(torch.compile(loss, backend=dt.backend)(x, y), x)[0]
    want = torch.autograd.grad(loss(x, y), x)[0]
    exact = torch.autograd.grad(loss(x.double(), y.double()), x)[0]
    assert error(got, exact) <= allowed(error(want, exact), kind)
