"""Batch norm for training on a real GPU: shapes, orders, element types, extreme values, sizes past
2³¹ elements, the same bits twice, and inside a plan."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import pytest
import torch

import deuteron as dt
from deuteron.kernels.triton.batch_norm_tiles import divide
from deuteron.ops.signs import pack, signs_type
from tests.batch_norm_cases import ACTIVATIONS, FORWARD, Case, calm, cases, run
from tests.test_batch_norm_kernels import block, by_torch, feed_of
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")
HALF, BRAIN, F32 = torch.float16, torch.bfloat16, torch.float32
PATIENT = 300.0  # seconds: what is found must not depend on who else compiles on the machine


def failures(some) -> str:
    """Every case is run, so that one visit shows all that is wrong; threads share the compiling."""
    units, some = torch.cuda.get_device_properties(0).multi_processor_count, list(some)

    def verdict(case: Case) -> str:
        try:
            return run(case, "cuda", units)
        except Exception:
            return traceback.format_exc(limit=-6)

    with ThreadPoolExecutor(8) as pool:
        found = zip(some, pool.map(verdict, some), strict=True)
        return "\n".join(f"{case}\n    {wrong}" for case, wrong in found if wrong)


def test_small_shapes():
    assert not (wrong := failures(list(cases())[::2])), wrong


@pytest.mark.parametrize("dtype", [F32, HALF, BRAIN], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_shapes_of_networks_and_shapes_that_divide_by_nothing(dtype, last):
    shapes = [
        (16, 64, 56, 56),
        (8, 2048, 7, 7),
        (4, 96, 31, 17),
        (3, 321, 28, 28),
        (2, 3, 255, 257),
        (33, 1000),
        (2, 70000, 2, 2),
    ]
    kinds = ("normal", "offset", "edge")
    some = [
        Case(shape, dtype, last, ACTIVATIONS[i % len(ACTIVATIONS)], bool(i % 2), kind=kinds[i % 3])
        for i, shape in enumerate(shapes)
    ]
    some += [
        Case((16, 64, 28, 28), dtype, last, "relu", r, knobs=knobs)
        for r, knobs in product(
            (True, False),
            ((("stages", 4), ("each", 8)), (("tile", 8192), ("warps", 8), ("waves", 2))),
        )
    ]
    some += [
        Case(shape, dtype, last, "relu", True, knobs=knobs, signs=True)
        for shape in ((16, 64, 28, 28), (4, 96, 31, 17), (3, 321, 28, 28), (8, 40, 255, 7))
        for knobs in ((), (("width", 64), ("once", False)), (("tile", 8192), ("warps", 8)))
    ]
    assert not (wrong := failures(some)), wrong


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_two_runs_give_the_same_bits(last):
    from deuteron.kernels.triton.batch_norm import Operands, forward

    x = torch.randn(8, 100, 30, 30, device="cuda", dtype=HALF)
    x = x.to(memory_format=torch.channels_last) if last else x
    d = divide(tuple(x.shape), last, 132)
    seen = []
    for _ in range(3):
        y, *stats = torch.empty_like(x), *(torch.empty(100, device="cuda") for _ in range(4))
        made = dict(zip(FORWARD, (y, *stats), strict=True))
        forward(d, 0.1, 1e-5, "none", False)(Operands(x, **made))
        seen.append((y, *stats))
    assert all(torch.equal(a, b) for again in seen[1:] for a, b in zip(seen[0], again, strict=True))


@pytest.mark.parametrize("residual", [True, False], ids=["residual", "alone"])
@pytest.mark.parametrize("layout", ["nhwc", "contiguous"])
def test_find_accepts_the_kernels(layout, residual):
    """A measured plan verifies before it times: whoever errs more than twice torch is not used."""
    graph = block((16, 64, 56, 56), dt.float16, layout, residual, "relu")
    plan = graph.compile(device="cuda", find=True, budget_s=PATIENT)
    refused = [
        f"{o.candidate}: {o.rejected}"
        for choice in plan.decision.choices
        for o in choice.options
        if o.candidate.engine == "triton_kernels" and o.rejected not in ("", "predicted far slower")
    ]
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize("kind", ["f64", "f32", "f16", "bf16"])
@pytest.mark.parametrize("layout", ["nhwc", "contiguous"])
@pytest.mark.parametrize("find", [False, True], ids=["estimate", "find"])
def test_in_a_plan_as_pytorch_and_its_autograd(kind, layout, find):
    dtype = dt.ir.dtype(kind).torch
    wrong = []
    for activation, residual in (("relu", True), ("relu", False), ("silu", True)):
        for shape in ((3, 5, 4, 7), (32, 70, 33, 31)):
            graph = block(shape, dt.ir.dtype(kind), layout, residual, activation)
            feed = {n: t.cuda() for n, t in feed_of(graph).items()}
            plan = graph.compile(device="cuda", find=find, budget_s=PATIENT)
            got = plan.run(**feed)
            exact, theirs = (by_torch(feed, activation, t) for t in (torch.float64, dtype))
            for name, truth in exact.items():
                depth = shape[0] * shape[2] * shape[3]
                limit = allowed(error(theirs[name], truth), got[name].dtype, depth)
                off = error(got[name], truth)
                if not off <= limit:
                    by = [str(c.candidate) for c in plan.decision.choices]
                    wrong.append(
                        f"{activation} {residual} {shape} {name}: {off:.2e} > {limit:.2e} by {by}"
                    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format], ids=str)
@pytest.mark.parametrize("kind", [HALF, BRAIN, F32], ids=str)
def test_the_function_saves_signs_and_its_gradients_are_torchs(kind, layout):
    gen = torch.Generator(device="cuda").manual_seed(0)
    x, r, grad = (
        torch.randn(16, 96, 57, 33, generator=gen, device="cuda").to(kind).to(memory_format=layout)
        for _ in range(3)
    )
    w, b = (torch.randn(96, generator=gen, device="cuda") for _ in range(2))
    asked = [t.requires_grad_() for t in (x, w, b, r)]

    def step(f, *leaves):
        x, w, b, r = leaves
        y = f(x, w, b, r)
        return y.detach(), *torch.autograd.grad(y, leaves, calmed.to(y.dtype))

    def ours(x, w, b, r):
        return dt.functional.batch_norm(x, None, None, w, b, True, residual=r, activation="relu")

    def torchs(x, w, b, r):
        return torch.relu(torch.nn.functional.batch_norm(x, None, None, w, b, True) + r)

    wide = [t.detach().double().requires_grad_() for t in asked]
    flat = torch.nn.functional.batch_norm(*wide[:1], None, None, *wide[1:3], True) + wide[3]
    calmed = calm(grad, flat.detach())
    with dt.functional.delegation(False):
        got = step(ours, *asked)
        y = ours(*asked)
    exact, theirs = step(torchs, *wide), step(torchs, *asked)
    for name, a, truth, other in zip(("y", "x", "w", "b", "r"), got, exact, theirs, strict=True):
        assert error(a, truth) <= allowed(error(other, truth), a.dtype, 16 * 57 * 33), name
    saved = y.grad_fn.saved_tensors
    assert sum(t.dtype == torch.uint8 for t in saved) == 1
    assert sum(t.shape == x.shape for t in saved) == 1  # x, and not y


@pytest.mark.parametrize("kind", [HALF, F32], ids=str)
@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_signs_say_the_same_as_y(last, kind):
    """At the size of the benchmark, to the last bit."""
    from deuteron.kernels.triton.batch_norm import Operands, backward, forward

    shape, packed = (64, 256, 56, 56), "channels" if last else "positions"
    order = torch.channels_last if last else torch.contiguous_format
    x, r, grad = (
        torch.randn(shape, device="cuda").to(kind).to(memory_format=order) for _ in range(3)
    )
    y, params = torch.empty_like(x), [torch.randn(256, device="cuda") for _ in range(2)]
    stats = [torch.empty(256, device="cuda") for _ in range(4)]
    signs = torch.empty(signs_type(shape, packed).shape, dtype=torch.uint8, device="cuda")
    d = divide(shape, last, 132, tile=8192 // kind.itemsize, width=64)
    params = {"weight": params[0], "bias": params[1]}
    made = dict(zip(FORWARD, (y, *stats), strict=True))
    exact, known = kind == F32, {"mean": stats[2], "rstd": stats[3]}
    forward(d, 0.1, 1e-5, "relu", exact)(Operands(x, residual=r, signs=signs, **params, **made))
    assert torch.equal(signs, pack(y, packed))
    found = []
    for given in ({"y": y}, {"signs": signs}):
        outs = [torch.empty_like(x), *(torch.empty(256, device="cuda") for _ in range(2))]
        outs.append(torch.empty_like(x))
        made = dict(zip(("dx", "dweight", "dbias", "dz"), outs, strict=True))
        t = Operands(x, grad=grad, **params, **known, **given, **made)
        backward(d, "relu", "y" in given, exact)(t)
        found.append(outs)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("last", [True, False], ids=["last", "first"])
def test_more_than_two_to_the_31_elements(last):
    from deuteron.kernels.triton.batch_norm import Operands, backward, forward

    n, c, side = 129, 64, 512  # 2³¹ + 2²⁴ elements
    x = torch.empty(n, c, side, side, device="cuda", dtype=HALF)
    x = x.to(memory_format=torch.channels_last) if last else x
    for i in range(n):
        x[i].normal_()
    x[-1] += 3.0  # beyond 2³¹: read at all, and from the right place
    d = divide(tuple(x.shape), last, 132)
    assert d.wide
    y, grad = torch.empty_like(x), x
    new_mean, new_var, mean, rstd = (torch.empty(c, device="cuda") for _ in range(4))
    packed = "channels" if last else "positions"
    signs = torch.empty(signs_type(tuple(x.shape), packed).shape, dtype=torch.uint8, device="cuda")
    learned = {"new_mean": new_mean, "new_var": new_var, "mean": mean, "rstd": rstd}
    forward(d, 0.1, 1e-5, "relu", False)(Operands(x, y, signs=signs, **learned))
    want = torch.stack([image.double().mean((1, 2)) for image in x]).mean(0)
    assert error(mean, want) <= allowed(0.0, F32, n * side * side)
    for i in (0, n // 2, n - 1):
        z = (x[i].float() - mean.view(c, 1, 1)) * rstd.view(c, 1, 1)
        assert error(y[i], torch.relu(z)) <= allowed(0.0, HALF), i
        assert torch.equal(signs[i : i + 1], pack(y[i : i + 1], packed)), i
    dweight, dbias, dx = torch.empty_like(mean), torch.empty_like(mean), y
    back = backward(d, "relu", False, False)
    t = Operands(x, mean=mean, rstd=rstd, grad=grad, dx=dx, dweight=dweight, dbias=dbias)
    back(t)
    by_signs = torch.empty_like(mean)
    back(t._replace(signs=signs, dbias=by_signs))
    assert error(by_signs, dbias) <= allowed(0.0, F32, n * side * side)
    total = torch.zeros(c, dtype=torch.float64, device="cuda")
    for image in x:
        total += torch.where(image > mean.view(c, 1, 1), image, 0.0).double().sum((1, 2))
    assert error(dbias, total) <= allowed(0.0, F32, n * side * side)
    hat = (x[-1].float() - mean.view(c, 1, 1)) * rstd.view(c, 1, 1)
    dz = torch.where(hat > 0, x[-1].float(), 0.0)
    count = n * side * side
    tail = dz - (dbias / count).view(c, 1, 1) - hat * (dweight / count).view(c, 1, 1)
    assert error(dx[-1], tail * rstd.view(c, 1, 1)) <= allowed(0.0, HALF)
