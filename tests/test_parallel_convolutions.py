"""Branches of one image that are added up: one convolution, with the numbers of all of them."""

from __future__ import annotations

import pytest
import torch
from test_passes import context, ops
from tolerances import DOUBLE, allowed, error

import deuteron as dt
from deuteron.ops.evaluate import evaluate
from deuteron.passes.parallel_convolutions import add_convolutions
from tests.test_passes_spatial import normed

C = 6


def weight(*window: int, into: int = C, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(C, into, *window, dtype=dtype)


def repvgg(g, x):
    return normed(g, g.conv(x, weight(3, 3), padding=1)) + g.conv(x, weight(1, 1)) + normed(g, x)


def strided(g, x):
    wide = g.conv(x, weight(3, 3), torch.randn(C).double(), stride=2, padding=1)
    return normed(g, wide + g.conv(x, weight(1, 1), stride=2))


def mobileone(g, x):
    one = weight(1, 1, into=1)
    sums = g.conv(x, one, groups=C) + normed(g, x)
    for _ in range(3):
        sums = sums + g.conv(x, weight(3, 3, into=1), padding=1, groups=C)
    return sums


def fastvit(g, x):
    scale = torch.rand(C, 1, 1).double()
    mixed = g.conv(x, weight(5, 3, into=2), padding=(2, 1), groups=3)
    return x + (mixed - normed(g, x)) * g.constant(scale) * 0.5


def far_apart(g, x):
    far = g.conv(x, weight(3, 3), padding=2, dilation=2)
    return far - g.conv(x, weight(3, 1), padding=(2, 0), dilation=2) + beside(g, x)


def beside(g, x):
    return g.conv(x, weight(1, 2), padding=(0, 0, 0, 1))


def uneven(g, x):
    return g.conv(x, weight(2, 2), padding=(0, 1, 1, 0)) + g.conv(x, weight(1, 1))


def lines(g, x):
    x = g.reshape(x, shape=(2, C, 42))
    return g.conv(x, weight(5), padding=2) - x


ONE = {f.__name__: f for f in (repvgg, strided, mobileone, fastvit, uneven, lines)}


def made(build, kind="f64", shape=(2, C, 7, 6)):
    """The graph before and after, and what both give for random numbers."""
    torch.manual_seed(0)
    g = dt.Graph()
    x = g.tensor("x", shape, kind)
    build(g, x).output("y")
    before = g.ir()
    after = add_convolutions(before, context())
    data = torch.randn(shape).to(before.types["x"].dtype.torch)
    ((want,), (got,)) = (
        evaluate(each, {"x": data}, float64=True).values() for each in (before, after)
    )
    return after, got, want


@pytest.mark.parametrize("name", ONE)
def test_branches_are_one_convolution(name):
    after, got, want = made(ONE[name])
    assert [op for op in ops(after) if op != "reshape"] == ["conv"]
    assert error(got, want) <= DOUBLE


def read_twice(g, x):
    y = g.conv(x, weight(3, 3), padding=1)
    return g.conv(x, weight(1, 1)) + y + g.relu(y)


def crossed(g, x):  # neither has room for the other
    across = g.conv(x, weight(1, 3), padding=(0, 1))
    return across + g.conv(x, weight(3, 1), padding=(1, 0))


def other_groups(g, x):
    return g.conv(x, weight(3, 3, into=1), padding=1, groups=C) + g.conv(x, weight(1, 1))


def other_image(g, x):
    return g.conv(x, weight(1, 1)) + g.conv(g.relu(x), weight(1, 1))


def other_steps(g, x):  # sizes agree, and places do not
    x = g.slice(g.slice(x, axis=2, start=0, stop=3), axis=3, start=0, stop=3)
    return g.conv(x, weight(3, 3), padding=2, stride=2) + x


APART = (read_twice, crossed, other_groups, other_image, other_steps)


@pytest.mark.parametrize("build", APART, ids=lambda f: f.__name__)
def test_what_is_not_one_convolution_stays(build):
    after, got, want = made(build)
    assert ops(after).count("conv") >= 1 + (build is not other_steps)
    assert "add" in ops(after) and error(got, want) <= DOUBLE


def test_a_sum_that_has_no_room_for_all_has_it_for_some():
    after, got, want = made(far_apart)
    assert ops(after).count("conv") == 2 and error(got, want) <= DOUBLE


def test_in_16_bits_the_image_itself_is_added_as_it_is():
    def branches(g, x):
        wide = g.conv(x, weight(3, 3, dtype=torch.bfloat16), padding=1)
        return wide + g.conv(x, weight(1, 1, dtype=torch.bfloat16)) + x

    after, *_ = made(branches, "bf16")
    assert sorted(ops(after)) == ["add", "conv"]


def test_what_would_overflow_stays():
    def branches(g, x):
        large = torch.full((C, C, 1, 1), 6e4, dtype=torch.float16)
        return g.conv(x, large) + g.conv(x, large)

    assert ops(made(branches, "f16")[0]).count("conv") == 2


@pytest.mark.parametrize("dims", [1, 2])
def test_a_whole_block_is_one_convolution_and_right(dims):
    """On the CPU, against the module in float64, with a weight for each branch."""
    torch.manual_seed(0)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            conv, norm = (getattr(torch.nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
            self.wide = conv(8, 8, 3, padding=1, bias=False)
            self.one = conv(8, 8, 1, bias=False)
            self.norms = torch.nn.ModuleList(norm(8) for _ in range(3))

        def forward(self, x):
            a, b, c = self.norms
            return torch.relu(a(self.wide(x)) + b(self.one(x)) + c(x))

    block, x = Block().eval(), torch.randn(2, 8, *(9, 10)[:dims])
    fast = dt.optimize(block, x, find=False)
    with torch.no_grad():
        had, want = block(x), block.double()(x.double())
    made = ops(fast.plan.decision.graph)
    assert made.count("conv") == 1 and "add" not in made
    assert error(fast(x), want) <= allowed(error(had, want), torch.float32, 72)
