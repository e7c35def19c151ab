"""Gradients as means over ranks: as sums, where the way back begins with a number that is smaller
by the count of the ranks, and nothing on the way is more than a factor."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.distributed import Reduction
from deuteron.passes.collective import Means, means_over_ranks
from deuteron.passes.linearity import follows_linearly
from tests.test_collectives import TWO, collectives, two_ranks  # noqa: F401
from tests.test_volumes import Sent
from tests.tolerances import SINGLE

HALF, WHOLE = {"dtype": dt.float16}, {"dtype": dt.float32}
ZEROS = torch.zeros(8, 8)
# what becomes of a gradient that begins with ``one``, and whether a factor of that is one of it
BEGUN = {
    "products": (lambda g, one, x: g.permute(x, dims=(1, 0)) @ (x * one), True),
    "a mean": (lambda g, one, x: g.mean(x * one, axes=(0,)) / 3.0, True),
    "the sum of two": (lambda g, one, x: x * one + g.neg(one * x), True),
    "where it counts": (lambda g, one, x: g.where(x > 0.0, x * one, g.constant(ZEROS, "o")), True),
    "zeros around it": (lambda g, one, x: g.pad(x * one, low=(1, 1), high=(1, 1)), True),
    "a norm's": (lambda g, one, x: g.layer_norm_grad(x, x * one, dims=1, bias="none"), True),
    "over ranks": (lambda g, one, x: g.all_reduce(x * one, **TWO), True),
    "clipped": (lambda g, one, x: g.clamp(x * one, min=-0.1, max=0.1), False),
    "squared": (lambda g, one, x: (x * one) * (x * one), False),
    "a divisor": (lambda g, one, x: x / (x * one), False),
    "the largest": (lambda g, one, x: g.max(x * one, axes=(0,)), False),
    "the largest of ranks": (lambda g, one, x: g.all_reduce(x * one, reduce="max", **TWO), False),
    "more beside it": (lambda g, one, x: x * one + x, False),
    "ones around it": (lambda g, one, x: g.pad(x * one, low=(1, 1), high=(1, 1), value=1.0), False),
    "whole numbers": (lambda g, one, x: g.cast(g.cast(x * one, dtype=dt.int32), **WHOLE), False),
    "of 16 bits": (lambda g, one, x: g.cast(g.cast(x * one, **HALF), **WHOLE), False),
    "without it": (lambda g, one, x: g.exp(x), False),
}


def begun(case):
    g = dt.Graph()
    BEGUN[case][0](g, g.constant(torch.ones(1), "one"), g.tensor("x", (8, 8))).output("grad")
    return g


@pytest.mark.parametrize("case", BEGUN)
def test_the_share_of_a_rank_is_a_factor_of_the_beginning(case):
    """Else of the result; the numbers are the same."""
    how = Means(frozenset(), "ranks", 2, None, True, 0.5)
    made = means_over_ranks(begun(case).ir(), {"grad"}, how, "one")
    last, divided = collectives(made)[-1], BEGUN[case][1]
    assert last.attrs["reduce"] == ("sum" if divided else "avg")
    assert made.constants["one"].data.item() == (0.5 if divided else 1.0)
    assert begun(case).ir().constants["one"].data.item() == 1.0


def test_a_gradient_that_is_no_mean_keeps_the_beginning():
    g = dt.Graph()
    one, x = g.constant(torch.ones(1), "one"), g.tensor("x", (8,))
    (x * one).output("mean")
    g.exp(x).output("loss")
    assert follows_linearly(g.ir(), "one", {g.ir().outputs[0][1]})
    (x / 2.0 * one).output("other")
    assert not follows_linearly(g.ir(), "one", {g.ir().outputs[0][1]})


class Clipped(torch.autograd.Function):
    """A layer of somebody's, whose gradient is not as large as it would be."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 1e-3)


class Behind(nn.Linear):
    def forward(self, x):
        return Clipped.apply(super().forward(x))


@pytest.mark.parametrize("kind", [nn.Linear, Behind])
def test_a_step_in_which_one_rank_has_all_the_gradient(kind, two_ranks):  # noqa: F811
    """Nobody adds anything to its half, and what is clipped is clipped before it is halved."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(kind(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    want = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    ddp = nn.parallel.DistributedDataParallel(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = dt.train_step(ddp, F.mse_loss, optimizer, (x, y), reduction=Reduction())
    step(x, y)
    assert len(step._means.popitem()[1]) == 6
    for p, was, whole in zip(model.parameters(), before, want, strict=True):
        torch.testing.assert_close(was - p.detach(), whole / 2, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("how", [Reduction("bfloat16"), Reduction("int8"), Reduction(every=2)])
def test_one_rank_sends_and_rounds_nothing(how):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    x, y = torch.randn(4, 8), torch.randn(4, 8)
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        made = []
        for given in ({}, {"reduction": how}):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
            called = nn.parallel.DistributedDataParallel(model) if given else model
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            step = dt.train_step(called, F.mse_loss, optimizer, (x, y), **given)
            with Sent() as sent:
                step(x, y)
                step(x, y)
            made.append([*model.parameters(), *model.buffers()])
            assert not sent.calls
        assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    finally:
        torch.distributed.destroy_process_group()
