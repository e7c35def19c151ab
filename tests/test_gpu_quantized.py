"""Products by 8- and 4-bit weights on a GPU: few rows and many, every way to share out the sum, in
plans, functions and models."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import deuteron as dt
from tests.product_cases import compare
from tests.quantized_cases import cases, stored
from tests.sweeps import ways
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu
f = dt.functional


def straight(dtype, rows, weight, scale, zero=None, *, bits):
    """A function that runs the kernel in which numbers go straight to registers, and no other."""
    g = dt.Graph()
    given = {"w": weight, "s": scale} | ({} if zero is None else {"z": zero})
    x = g.tensor("x", (rows, weight.shape[1] * 8 // bits), dtype)
    named = [g.tensor(name, t.shape, t.dtype) for name, t in given.items()]
    g.linear_quantized(x, *named, bits=bits).output("y")
    only = dt.Policy(engines="triton_kernels/linear_quantized_few")
    plan = g.compile(device="cuda", find=True, policy=only)
    return lambda x, w, s, z=None: plan.run(x=x, w=w, s=s, **({} if z is None else {"z": z}))["y"]


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("dtype", "most"), ways(12))
def test_every_case(dtype, most, part):
    every = list(cases(dtype, large=True))[part::4]
    found = [compare(case, "cuda", most) for case in every]
    assert sum(count for count, _ in found) >= len(every)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("group", "rows"), [(32, 16), (128, 1), (128, 8), (128, 16)])
def test_unpacking_to_the_bit(dtype, bits, zeros, group, rows):
    """Every number in every place of a word, by rows of x of which one element is 1: nothing is
    added up, so that powers of two leave all exact."""
    low, kind = (-128, torch.int8) if bits == 8 else (0, torch.uint8)
    weight = torch.stack([torch.arange(256).roll(i) for i in range(16)]) + low
    steps = 256 * 8 // bits
    scale = torch.full((16, steps // group), 0.5, dtype=dtype)
    given = weight.to(kind).cuda(), scale.cuda(), (scale * 6).cuda() if zeros else None
    want = f.dequantize_weight(*given, bits=bits, group=group).double()
    call = partial(f.linear_quantized, bits=bits, group=group)
    direct = group == 128 and rows <= 8
    call = straight(dtype, rows, *given, bits=bits) if direct else call
    for first in range(0, steps, rows):
        eye = torch.eye(steps, dtype=dtype, device="cuda")[first : first + rows]
        assert torch.equal(call(eye, *given).double(), want.T[first : first + rows])
    eye = torch.eye(steps, dtype=dtype, device="cuda")
    y = f.linear_quantized(eye, *given, bits=bits, group=group)
    assert torch.equal(y.double(), want.T)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_infinite_x_gives_what_it_gives_by_the_weight_written_out(dtype, bits):
    gen = torch.Generator().manual_seed(1)
    given = {k: v.cuda() for k, v in stored(bits, 96, 512, 128, dtype, gen).items()}
    x = torch.randn(3, 512, generator=gen).to(dtype).cuda()
    x[1, 200], x[2, 7] = float("inf"), float("nan")
    whole = f.dequantize_weight(given["w"], given["s"], bits=bits)
    found = straight(dtype, 3, given["w"], given["s"], bits=bits)(x, given["w"], given["s"])
    want = nn.functional.linear(x.double(), whole.double())
    assert torch.equal(
        found[1].double().nan_to_num(7.0, 8.0, 9.0), want[1].nan_to_num(7.0, 8.0, 9.0)
    )
    assert found[2].isnan().all() and error(found[0], want[0]) <= allowed(0.0, dtype, 512)


def test_the_same_bits_every_time_and_in_a_graph():
    gen = torch.Generator().manual_seed(0)
    given = {k: v.cuda() for k, v in stored(4, 4096, 4096, 128, torch.bfloat16, gen).items()}
    x = torch.randn(4, 4096, generator=gen).bfloat16().cuda()
    call = lambda: f.linear_quantized(x, given["w"], given["s"], given["z"])  # noqa: E731
    want = call()
    report = f.explain(f.linear_quantized, x, given["w"], given["s"], given["z"])
    assert "triton_kernels" in str(report)
    assert all(torch.equal(call(), want) for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call()
    side.synchronize()
    with torch.cuda.graph(graph):
        y = call()
    graph.replay()
    assert torch.equal(y, want)


def test_memory_that_begins_anywhere():
    gen = torch.Generator().manual_seed(0)
    given = stored(4, 64, 256, 128, torch.bfloat16, gen)
    room = torch.zeros(given["w"].numel() + 1, dtype=torch.uint8, device="cuda")
    w = room[1:].view(64, 128).copy_(given["w"])
    places = torch.zeros(given["s"].numel() + 1, dtype=torch.bfloat16, device="cuda")
    s = places[1:].view(64, 2).copy_(given["s"])
    x = torch.randn(513, generator=gen).bfloat16().cuda()[1:].view(2, 256)
    assert torch.equal(f.linear_quantized(x, w, s), f.linear_quantized(x, w.clone(), s.clone()))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 200])
def test_a_model(bits, rows):
    torch.manual_seed(0)
    layers = nn.Linear(512, 1536), nn.SiLU(), nn.Linear(1536, 512)
    model = dt.nn.quantize(nn.Sequential(*layers), bits=bits).cuda().bfloat16().eval()
    x = torch.randn(rows, 512, device="cuda").bfloat16()
    with torch.no_grad():
        wide = nn.Sequential(nn.Linear(512, 1536), nn.SiLU(), nn.Linear(1536, 512)).cuda()
        for ours, theirs in zip(model, wide, strict=True):
            if isinstance(theirs, nn.Linear):
                held = ours.weight, ours.scale.float(), None, bits, ours.group
                theirs.weight.copy_(f.dequantize_weight(*held))
                theirs.bias.copy_(ours.bias)
        exact, plain = wide.double()(x.double()), wide.bfloat16()(x)
        bound = allowed(error(plain, exact), torch.bfloat16)
        assert error(model(x), exact) <= bound
        assert error(dt.optimize(model, x, budget_s=20)(x), exact) <= bound


def test_gradients():
    torch.manual_seed(0)
    linear = nn.Linear(256, 96).cuda()
    layer = dt.nn.QuantizedLinear.from_linear(linear, bits=8)
    x = torch.randn(7, 256, device="cuda").bfloat16().requires_grad_()
    layer.bfloat16()(x).sum().backward()
    whole = f.dequantize_weight(layer.weight, layer.scale, bits=8)
    want = whole.double().sum(0).expand(7, 256)
    theirs = torch.ones(7, 96, device="cuda").bfloat16() @ whole
    assert error(x.grad, want) <= allowed(error(theirs, want), torch.bfloat16)
