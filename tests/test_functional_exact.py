"""Calls of ``dt.functional`` on a CPU that PyTorch's own kernel would get wrong, or not survive."""

from __future__ import annotations

import itertools

import pytest
import torch

import deuteron as dt
from tests.tolerances import allowed, error, rounded_mean

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


NORMS = {
    "layer_norm": lambda f, x, w, b: f.layer_norm(x, x.shape[2:]) * w.view(1, -1, 1, 1) + b.sum(),
    "group_norm": lambda f, x, w, b: f.group_norm(x, 4, w, b),
    "instance_norm": lambda f, x, w, b: f.instance_norm(x, weight=w, bias=b),
    "batch_norm": lambda f, x, w, b: f.batch_norm(x, None, None, w, b, training=True),
}
SHAPES = [(4, 16, 24, 24), (2, 16, 3, 5), (3, 8, 1, 4)]
POINTS = (64, 8, 1, 1)  # of which layer and instance norm have nothing to normalise


@pytest.mark.parametrize(
    "name, shape",
    [*itertools.product(NORMS, SHAPES), ("group_norm", POINTS), ("batch_norm", POINTS)],
    ids=str,
)
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_norms_of_channels_last_with_a_large_mean(name, shape, mean, delegated):
    """As good as PyTorch's in row-major order, which centres numbers before it squares them."""
    torch.manual_seed(0)
    x, grad = torch.randn(shape) + mean, torch.randn(shape)
    given = (x, torch.randn(shape[1]), torch.randn(shape[1]), grad)
    exact = _trained(NORMS[name], torch.nn.functional, *(t.double() for t in given))
    plain = _trained(NORMS[name], torch.nn.functional, *given)
    last = [t.contiguous(memory_format=torch.channels_last) if t.ndim == 4 else t for t in given]
    found = _trained(NORMS[name], f, *last)
    alone = NORMS[name](f, *last[:3])
    least, reduced = rounded_mean(mean, torch.float32), x.numel() // shape[1]
    for got, torchs, want in zip(
        (alone, *found), plain[:1] + plain, exact[:1] + exact, strict=True
    ):
        torchs_error = max(error(torchs, want), least)
        assert error(got, want) <= allowed(torchs_error, torch.float32, reduced)


def test_norms_of_single_points(delegated):
    """Layer norm leaves nothing of them, and instance norm is refused, by torch as well."""
    x = torch.randn(POINTS) + 1000.0
    assert torch.equal(f.layer_norm(x, (1, 1)), torch.zeros(POINTS))
    with pytest.raises(ValueError, match="one value per channel"):
        f.instance_norm(x)
    with pytest.raises(ValueError, match="more than 1 spatial element"):
        torch.nn.functional.instance_norm(x)


def _trained(norm, functions, x, weight, bias, grad):
    """The result and the gradients."""
    given = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = norm(functions, *given)
    y.backward(grad)
    return y, *(t.grad for t in given)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_batch_norm_keeps_the_digits_of_a_large_mean(order):
    """What a mean was rounded by is taken out of the result, and is none of equal numbers'."""
    torch.manual_seed(0)
    x, weight, bias = torch.randn(4, 8, 24, 24) + 1000.0, torch.randn(8), torch.randn(8)
    x = x.contiguous(memory_format=order)
    exact = f.batch_norm(x.double(), None, None, weight.double(), bias.double(), training=True)
    with f.delegation(False):
        found = f.batch_norm(x, None, None, weight, bias, training=True)
        equal = f.batch_norm(torch.full_like(x, 1000.1), None, None, weight, bias, training=True)
        huge = f.batch_norm((x - 1000.0) * 1e25, None, None, weight, bias, training=True)
    assert error(found, exact) <= allowed(0.0, torch.float32)
    assert torch.equal(equal, bias.view(1, -1, 1, 1).expand_as(equal))
    assert huge.isnan().all()
