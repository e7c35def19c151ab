"""Mixtures of experts on a GPU: the kernels, the same bits every time, in a CUDA graph, and what a
token gets whose expert does not exist."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from tests.moe_cases import cases, grouped
from tests.product_cases import compare
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu
f = dt.functional


def layer(tokens: int, experts: int, share: int, dtype: torch.dtype, steps: int = 256):
    """Tokens, a router and the matrices of experts."""
    gen = torch.Generator().manual_seed(0)
    shapes = (tokens, steps), (experts, steps), (experts, 2 * 160, steps), (experts, steps, 160)
    return [
        (torch.randn(shape, generator=gen) / (1 if i == 0 else shape[-1] ** 0.5)).cuda().to(dtype)
        for i, shape in enumerate(shapes)
    ]


def by_a_loop(x, numbers, shares, w_in, w_out):
    """As models write it."""
    y = torch.zeros_like(x)
    for e in range(w_in.shape[0]):
        token, slot = torch.where(numbers == e)
        gate, up = (x[token] @ w_in[e].T).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * up) @ w_out[e].T
        y = y.index_add(0, token, (made * shares[token, slot, None]).to(y.dtype))
    return y


@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_case(dtype, part):
    every = list(cases(dtype, large=True))[part::3]
    found = [compare(case, "cuda", most=3) for case in every]
    assert sum(count for count, _ in found) >= len(every)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("tokens", "experts", "share"), [(1, 8, 2), (37, 60, 4), (3000, 7, 3)])
def test_forward_and_backward(tokens, experts, share, dtype):
    given = layer(tokens, experts, share, dtype)
    shares, numbers = f.route(given[0] @ given[1].T, share)
    seed = torch.randn(given[0].shape, device="cuda").to(dtype)

    def gradients(call, kind):
        leaves = [t.detach().to(kind).requires_grad_() for t in (given[0], shares, *given[2:])]
        y = call(leaves[0], numbers, leaves[1], *leaves[2:])
        return [y.detach(), *torch.autograd.grad(y, leaves, seed.to(kind))]

    exact = gradients(by_a_loop, torch.float64)
    plain, ours = gradients(by_a_loop, dtype), gradients(f.experts, dtype)
    for mine, theirs, want in zip(ours, plain, exact, strict=True):
        assert error(mine, want) <= allowed(error(theirs, want), dtype)
    still = f.experts(given[0], numbers, shares, *given[2:])
    assert error(still, exact[0]) <= allowed(error(plain[0], exact[0]), dtype)


def test_the_same_bits_every_time_and_in_a_graph():
    given = layer(500, 16, 4, torch.bfloat16)
    call = lambda: f.moe(*given, top_k=4)  # noqa: E731
    want = call()
    report = f.explain(f.moe, *given, top_k=4)
    assert "grouped_linear" in str(report) and "triton_kernels" in str(report)
    assert all(torch.equal(call(), want) for _ in range(5))
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    assert torch.equal(y, want)
    given[0].copy_(given[0].flip(0))  # other groups, of other sizes
    graph.replay()
    assert torch.equal(y, call())


def test_an_expert_that_does_not_exist_is_nan():
    x, _, w_in, w_out = layer(9, 4, 2, torch.bfloat16)
    numbers = torch.randint(0, 4, (9, 2), device="cuda")
    want = f.experts(x, numbers, torch.ones(9, 2, device="cuda"), w_in, w_out)
    numbers[3, 1], numbers[7, 0] = 4, -1
    y = f.experts(x, numbers, torch.ones(9, 2, device="cuda"), w_in, w_out)
    assert y[[3, 7]].isnan().all()
    rest = [i for i in range(9) if i not in (3, 7)]
    assert torch.equal(y[rest], want[rest])


def test_starts_that_do_not_rise_are_nan():
    x, _, w_in, _ = layer(8, 4, 2, torch.float16)
    assert f.grouped_linear(x, w_in, grouped((5, 4, 0, -1)).cuda()).isnan().all()
    short = f.grouped_linear(x, w_in, grouped((2, 0, 3, 0)).cuda())
    assert short[5:].isnan().all() and short[:5].isfinite().all()


@pytest.mark.parametrize("counts", [(2800, 0, 3600, 1, 0, 1792), (0, 0, 8193, 0, 0, 0)])
def test_large_groups_are_the_librarys(counts):
    """Some of them empty, for which the gradient is zeros."""
    rows, starts = sum(counts), grouped(counts).cuda()
    x, g = (torch.randn(rows, n, device="cuda").bfloat16() for n in (1024, 2048))
    w = torch.randn(6, 2048, 1024, device="cuda").bfloat16().requires_grad_()
    y = f.grouped_linear(x, w, starts)
    (dw,) = torch.autograd.grad(y, w, g)
    cut, ends = x.split(counts), g.split(counts)
    want = torch.cat([rows @ m.T for rows, m in zip(cut, w, strict=True)])
    exact = torch.cat([rows.double() @ m.double().T for rows, m in zip(cut, w, strict=True)])
    assert error(y, exact) <= allowed(error(want, exact), torch.bfloat16)
    sums = torch.stack([a.double().T @ b.double() for a, b in zip(ends, cut, strict=True)])
    plain = torch.stack([a.T @ b for a, b in zip(ends, cut, strict=True)])
    assert error(dw, sums) <= allowed(error(plain, sums), torch.bfloat16)
    assert not dw[[i for i, count in enumerate(counts) if not count]].any()
    assert "grouped_mm" in str(f.explain(f.grouped_linear, x, w.detach(), starts))
