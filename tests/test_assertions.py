"""An assertion is no branch: the example's number answers it. An 'if' that raises is a branch."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from tests.tolerances import SINGLE_LAYERS, error


class Does(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.what, self.layer = what, nn.Linear(4, 4)

    def forward(self, x):
        return self.what(self, x)


def raises_at_once(self, x):
    if (x < -100).any():
        raise ValueError("too small")
    return self.layer(x)


def raises_with_words(self, x):
    if not torch.isfinite(x).all():
        raise ValueError(f"not finite: {list(x.shape)}, {x.dtype}")
    return self.layer(x)


def raises_behind(self, x):
    if x.abs().max().item() < 100:
        return self.layer(x)
    raise ValueError("too large")


def check_range(x):
    low, high = x.min(), x.max()
    if low < -100:
        raise ValueError("below")
    if high > 100:
        raise ValueError("above")


def raises_in_a_helper(self, x):
    check_range(x)
    return self.layer(x)


def torch_raises(self, x):
    return F.gaussian_nll_loss(self.layer(x), x, x * x + 1.0)


def a_distribution_does(self, x):
    return torch.distributions.Normal(self.layer(x), 2.0).log_prob(x)


def test_a_distribution_asserts():
    model, x = Does(a_distribution_does).eval(), torch.rand(3, 4)
    fast = dt.optimize(model, (x,), find=False)
    with torch.no_grad():
        for each in (x, torch.rand(3, 4)):
            assert error(fast(each), model(each)) <= SINGLE_LAYERS


RAISES = [raises_at_once, raises_with_words, raises_behind, raises_in_a_helper, torch_raises]


@pytest.mark.parametrize("what", RAISES, ids=lambda f: f.__name__)
def test_an_error_that_later_calls_may_raise_is_not_left_out(what):
    with pytest.raises(dt.GraphError, match="branches"):
        dt.optimize(Does(what).eval(), (torch.rand(3, 4),), find=False)


def returns_another(self, x):
    if x.max() > 100:
        return x
    return self.layer(x)


def caught(self, x):
    try:
        if x.max() > 100:
            raise ValueError("too large")
    except ValueError:
        return x
    return self.layer(x)


def caught_further_out(self, x):
    try:
        check_range(x)
    except ValueError:
        x = x.clamp(-100, 100)
    return self.layer(x)


def raises_or_returns(self, x):
    if x.max() > 100:
        if x.min() < 0:
            return x
        raise ValueError("too large")
    return self.layer(x)


def asks_twice(self, x):
    for _ in range(2):
        if x.max() > 100:
            continue
        x = self.layer(x)
    return x


@pytest.mark.parametrize(
    "what",
    [returns_another, caught, caught_further_out, raises_or_returns, asks_twice],
    ids=lambda f: f.__name__,
)
def test_what_may_go_on_in_another_way_is_never_fixed(what):
    """It is refused, or does as eager does on both sides."""
    model, x = Does(what).eval(), torch.rand(3, 4)
    try:
        fast = dt.optimize(model, (x,), find=False)
    except dt.GraphError as refused:
        assert "branches" in str(refused)
        return
    with torch.no_grad():
        for each in (x, x + 200, x * 400 - 200):
            assert error(fast(each), model(each)) <= SINGLE_LAYERS


def test_a_solver_still_checks_its_matrix_beside_what_reads_numbers():
    """torch.cov looks at numbers in a way that only the quick trace can follow."""

    def solved(self, x):
        return torch.linalg.inv(x) + torch.cov(x)

    model, x = Does(solved).eval(), torch.eye(4) * 2 + 0.1
    fast = dt.optimize(model, (x,), find=False)
    assert error(fast(x), model(x)) <= SINGLE_LAYERS
    with pytest.raises(torch.linalg.LinAlgError, match="inv"):
        fast(torch.zeros(4, 4))
