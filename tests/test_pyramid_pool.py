"""Pyramid pooling, written out as adaptive pools that are pooled from each other where grids nest:
by plans, by the pools alone in generated code, and on a GPU."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.functional.operators import operator
from deuteron.ir.builder import GraphBuilder
from deuteron.ops import TABLE, Ops
from deuteron.ops.evaluate import evaluate
from deuteron.ops.table import infer
from tests.sweeps import one_in
from tests.tolerances import allowed, error

# shape, grids, memory order; sizes that divide, that do not, and more cells than elements
CASES = [
    ((2, 3, 12, 12), (1, 2, 3, 6), "contiguous"),
    ((2, 5, 7, 5), (1, 2, 3, 6), "contiguous"),
    ((2, 5, 7, 5), (1, 3), "nhwc"),
    ((1, 70, 9, 4), (2, 3), "nhwc"),
    ((1, 1, 3, 2), (5, 1), "contiguous"),
    ((3, 2, 40), (1, 4, 6), "contiguous"),
    ((2, 6, 10), (3,), "nhwc"),
    ((1, 18, 60, 48), (1, 2, 3, 6), "contiguous"),
    ((1, 18, 60, 48), (6, 4, 1), "nhwc"),
    ((1, 2, 4, 6, 5), (1, 2), "contiguous"),
]


def data(shape, order: str, dtype: torch.dtype, seed: int, odd: bool) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen, dtype=torch.float64)
    if odd:  # ties, and what is not a number
        x = (x * 2).round() / 2
        flat = x.view(shape[0], shape[1], -1)
        flat[0, 0, ::5] = float("nan")
        flat[-1, -1] = -float("inf")
    x = x.to(dtype)
    if order == "nhwc":
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x


def wrong_with(device: str, shape, sizes, order, kind: str, dtype) -> list[str]:
    """What a plan gets wrong, forward and back."""
    x, g, bad = data(shape, order, dtype, 0, kind == "max"), dt.Graph("pool"), []
    y = g.pyramid_pool(g.tensor("x", x.shape, x.dtype, strides=x.stride()), sizes=sizes, kind=kind)
    plan = g.grad(y.output("y"), wrt="x").compile(device=device)
    feed = {"x": x, "grad_y": data(y.shape, "contiguous", dtype, 1, False)}
    exact, plain = evaluate(plan.graph, feed, float64=True), evaluate(plan.graph, feed)
    found = plan.run(**{name: t.to(device) for name, t in feed.items()})
    for name, out in found.items():
        n = max(torch.Size(shape[2:]).numel(), 1)
        off, bound = error(out, exact[name]), allowed(error(plain[name], exact[name]), dtype, n)
        if not off <= bound:
            bad.append(f"{name} {shape} {sizes} {order} {kind} {dtype}: {off:.3g} > {bound:.3g}")
    return bad


@pytest.mark.parametrize("kind", ["avg", "max"])
@pytest.mark.parametrize("dtype", one_in(2, [torch.float32, torch.float16, torch.bfloat16]))
@pytest.mark.each_value
def test_a_plan_on_the_cpu(kind, dtype):
    failed = [bad for case in CASES for bad in wrong_with("cpu", *case, kind, dtype)]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize(
    "op", ["pyramid_pool", "adaptive_avg_pool", "adaptive_max_pool", "adaptive_avg_pool_grad"]
)
def test_written_out_it_is_the_same(op):
    """To the type: the graph around it does not see the difference."""
    for sample in TABLE[op].samples():
        (x,) = sample.tensors("f64")
        g = dt.Graph("whole")
        y = getattr(g, op)(g.tensor("x", x.shape, x.dtype, strides=x.stride()), **sample.attrs)
        y.output("y")
        exact, out = evaluate(g.ir(), {"x": x}), GraphBuilder(infer, "parts")
        b = Ops(out)
        (made,) = TABLE[op].expand(
            b, [b.sym(out.input("x", g.ir().types["x"]))], g.ir().nodes[0].attrs
        )
        assert made.output("y").type == y.type, sample
        found = evaluate(out.finish(), {"x": x})
        assert error(found["y"], exact["y"]) <= allowed(0.0, torch.float64, x.numel() or 1), sample


def test_a_large_image_is_generated_and_read_once():
    """Grids of 3, 2 and 1 are pooled from that of 6, whose windows are too large for one piece."""
    pytest.importorskip("llvmlite")
    g = dt.Graph("pool")
    g.pyramid_pool(g.tensor("x", (1, 512, 60, 60)), kind="max").output("y")
    plan = g.compile(device="cpu")
    readers = [c for c in plan.decision.choices if "x" in c.region.inputs]
    assert [c.candidate.engine for c in readers] == ["cpu_gen"]


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_any_strides(kind):
    """x with gaps between rows or channels, in no order at all, or with one channel next to which
    there is a row of the same column; a gradient of one number."""
    base = data((2, 9, 14, 10), "contiguous", torch.float32, 2, False)
    views = [
        base[:, :, 1:12, 2:9],
        base.movedim(1, -1).contiguous().movedim(-1, 1)[:, 1:6],
        base.transpose(2, 3),
        base[:, :, :, 0],
        base[:, :1].movedim(3, 1).contiguous().movedim(1, 3),
    ]
    for view in views:
        wanted = view.detach().double().requires_grad_()
        pool = getattr(torch.nn.functional, f"adaptive_{kind}_pool{view.ndim - 2}d")
        exact = torch.cat([pool(wanted, s).flatten(2) for s in (1, 3, 4)], 2)
        exact.sum().backward()
        x = view.detach().requires_grad_()
        y = operator("pyramid_pool").one(x, sizes=(1, 3, 4), kind=kind)
        y.sum().backward()
        assert error(y, exact) <= allowed(0.0, torch.float32, 140), (view.shape, kind)
        assert error(x.grad, wanted.grad) <= allowed(0.0, torch.float32), (view.shape, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(dtype):
    failed = [
        bad
        for case in CASES
        for kind in ("avg", "max")
        for bad in wrong_with("cuda", *case, kind, dtype)
    ]
    assert not failed, "\n".join(failed)
