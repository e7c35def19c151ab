"""Max pooling on a GPU: the kernels, and the function with its gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.target import target
from tests.test_max_pool import ADAPTIVE, CASES, MORE, wrong_with
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu
f = dt.functional


@pytest.mark.parametrize("case", CASES + MORE + ADAPTIVE, ids=str)
def test_kernels(case):
    failed = wrong_with(target("cuda"), "cuda", case, torch.float32, 1)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_element_types(case, dtype):
    failed = wrong_with(target("cuda"), "cuda", case, dtype, 1)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("case", CASES[1:3], ids=str)
def test_every_tile(case):
    failed = wrong_with(target("cuda"), "cuda", case, torch.bfloat16, 9)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("how", [(3, 2, 1), (2,), (3, 1, 1)], ids=str)
def test_the_function_and_its_gradient(how, order):
    gen = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(8, 64, 56, 58, device="cuda", generator=gen, dtype=torch.bfloat16)
    x = x.contiguous(memory_format=order)
    found = {}
    for name, pool, dtype in (
        ("exact", F.max_pool2d, torch.float64),
        ("theirs", F.max_pool2d, x.dtype),
        ("ours", f.max_pool2d, x.dtype),
    ):
        given = x.to(dtype, copy=True).requires_grad_()
        with f.delegation(False):
            y = pool(given, *how)
        if name == "ours":
            (kept,) = y.grad_fn.saved_tensors
            assert kept.dtype is torch.uint8
        gen.manual_seed(1)
        grad = torch.randn(y.shape, device="cuda", generator=gen).to(x.dtype)
        y.backward(grad.to(dtype))
        found[name] = y, given.grad
    for ours, theirs, exact in zip(found["ours"], found["theirs"], found["exact"], strict=True):
        assert ours.stride() == theirs.stride()
        assert error(ours, exact) <= allowed(error(theirs, exact), x.dtype)


def test_two_runs_agree_to_the_last_bit():
    x = torch.randn(4, 16, 60, 60, device="cuda", requires_grad=True)
    with f.delegation(False):
        runs = [torch.autograd.grad(f.max_pool2d(x, 3, 2, 1).square().sum(), x)[0] for _ in "ab"]
    assert torch.equal(*runs)


def test_more_than_two_to_the_31_elements(huge_images):
    from deuteron.kernels.triton.max_pool import Pooling, Tile, Window, backward, forward

    x, planes = huge_images, huge_images.shape[1]
    x[0, -2:, 3, 3] = 2.0
    y = torch.full((1, planes, 4, 4), 7.0, dtype=x.dtype, device="cuda")
    winners = torch.empty(y.shape, dtype=torch.uint8, device="cuda")
    window = Window(2, 2, 2, 2, 0, 0, 1, 1)
    pooling = Pooling(tuple(x.shape), x.stride(), (4, 4), y.stride(), window)
    forward(pooling, 2, Tile(32, 16, 4))(x, y, winners)
    assert x.numel() > 2**31 and (y[0, -2:, 1, 1] == 2.0).all() and y.sum(dtype=torch.float64) == 4
    dx = torch.full_like(x, 7.0)
    backward(pooling, y.stride(), 2, Tile(32, 16, 4))(y, winners, dx)
    assert torch.equal(dx, x)
