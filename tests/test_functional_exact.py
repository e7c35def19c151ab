"""Calls of ``dt.functional`` on a CPU that PyTorch's own kernel would get wrong, or not survive."""

from __future__ import annotations

import itertools

import pytest
import torch

import deuteron as dt
from tests.tolerances import allowed, error

f = dt.functional


@pytest.fixture(params=[True, False], ids=["delegated", "planned"])
def delegated(request):
    with f.delegation(request.param):
        yield request.param


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_nearest_volumes_of_16_bits(mode, dtype, delegated):
    """PyTorch's kernel, for one channel or channels last, is an illegal instruction somewhere."""
    orders = (torch.contiguous_format, torch.channels_last_3d)
    for channels, order in itertools.product((1, 3), orders):
        x = torch.randn(2, channels, 1, 11, 5).to(dtype).contiguous(memory_format=order)
        grad = torch.randn(2, channels, 4, 2, 13).to(dtype).contiguous(memory_format=order)
        found = _resized_gradient(x, grad, mode)
        exact = _resized_gradient(x.double(), grad.double(), mode)
        assert found.dtype is dtype and error(found, exact) <= allowed(0.0, dtype)


def _resized_gradient(x, grad, mode):
    x = x.detach().requires_grad_()
    f.interpolate(x, size=grad.shape[2:], mode=mode).backward(grad)
    return x.grad


def test_transforms_of_nearest_volumes_of_16_bits():
    def total(x):
        return f.interpolate(x, size=(4, 2, 13), mode="nearest").float().sum()

    x = torch.randn(1, 1, 1, 11, 5)
    assert torch.equal(torch.func.grad(total)(x.half()), torch.func.grad(total)(x).half())
