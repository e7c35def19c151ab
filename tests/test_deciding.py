"""Numbers in tensors that decide what is computed, and such that are only checked."""

from __future__ import annotations

import torch
from torch import nn

import deuteron as dt


class Checks(nn.Module):
    """What torch.export has to follow, which writes checks of numbers down as calls."""

    def forward(self, x, n):
        torch._check_tensor_all(n < 9)
        return torch.vmap(lambda row: row * 2)(x) + n.sum()


def test_numbers_that_are_only_checked_are_not_asked_for():
    x, n = torch.randn(3, 4), torch.tensor([1, 2])
    fast = dt.optimize(Checks().eval(), (x, n), find=False)
    torch.testing.assert_close(fast(x, n + 1), Checks()(x, n + 1))
