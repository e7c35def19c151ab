"""Pooling of equal windows in generated code on the CPU; how weighted pooling is written out."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.cpu.generated import CpuGen
from deuteron.ir import Graph, Region
from deuteron.ops import TABLE
from deuteron.ops.evaluate import evaluate
from deuteron.passes.expand import written_out
from deuteron.plan.tensors import poisoned
from deuteron.policy import Policy
from deuteron.target import target
from tests.sweeps import one_in
from tests.tolerances import allowed, error

CPU = torch.device("cpu")
# shape of x, window, stride, padding: rows that fill vectors and that do not, windows that overlap
# and that leave gaps
CASES = [
    ((2, 3, 12, 12), (3, 3), (2, 2), (1, 1)),
    ((2, 5, 7, 5), (2, 2), (2, 2), (0, 0)),
    ((1, 4, 9, 33), (3, 5), (1, 1), (1, 2)),
    ((3, 2, 17, 40), (4, 3), (3, 3), (2, 1)),
    ((2, 3, 6, 21), (2, 2), (5, 4), (0, 0)),
    ((2, 3, 40), (5,), (3,), (2,)),
    ((1, 2, 1, 1), (1, 1), (1, 1), (0, 0)),
    ((2, 2, 30, 70), (7, 7), (2, 3), (3, 3)),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def given(case, dtype: torch.dtype, shared: bool) -> dict[str, torch.Tensor]:
    """x, the weight and the gradient of a result."""
    shape, window, stride, padding = case
    gen = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=gen)
    w = torch.randn(window if shared else (shape[1], *window), generator=gen)
    space = (
        (n + 2 * p - k) // s + 1
        for n, k, s, p in zip(shape[2:], window, stride, padding, strict=True)
    )
    g = torch.randn((*shape[:2], *space), generator=gen)
    return {"g": g.to(dtype), "x": x.to(dtype), "w": w.to(dtype)}


def graph(op: str, feed: dict[str, torch.Tensor], **how) -> Graph:
    g = dt.Graph(op)
    syms = [g.tensor(name, t.shape, t.dtype, strides=t.stride()) for name, t in feed.items()]
    found = getattr(g, op)(*syms, **how)
    for i, y in enumerate(found if isinstance(found, tuple) else (found,)):
        y.output(f"y{i}")
    return g.ir()


def run(ir: Graph, feed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By generated code, into memory full of nan."""
    engine, region, machine = CpuGen(), Region(ir, frozenset(), 0), target("cpu")
    assert engine.refuse(region, machine, Policy()) is None
    (candidate,) = engine.candidates(region, machine, Policy())
    outs = [poisoned(region.graph.types[v], CPU) for v in region.outputs]
    kernel = engine.build(region, candidate, BuildContext(machine, CPU, Policy(), {}))
    kernel.fill([feed[name] for name in ir.inputs], outs)
    return dict(zip((name for name, _ in ir.outputs), outs, strict=True))


def gradients(feed: dict[str, torch.Tensor], **how) -> list[tuple[Graph, dict[str, torch.Tensor]]]:
    """Those of x and of the weight, each with what it reads."""
    x, window = feed["x"], tuple(feed["w"].shape[feed["w"].ndim - (feed["x"].ndim - 2) :])
    of_x, of_w = ({name: feed[name] for name in names} for names in ("gw", "gx"))
    dx = graph("weighted_pool_dx", of_x, shape=tuple(x.shape), **how)
    return [(dx, of_x), (graph("weighted_pool_dw", of_w, window=window, **how), of_w)]


def check(ir: Graph, feed: dict[str, torch.Tensor], n: int) -> None:
    exact, plain = evaluate(ir, feed, float64=True), evaluate(ir, feed)
    for name, out in run(ir, feed).items():
        bound = allowed(error(plain[name], exact[name]), out.dtype, n)
        assert error(out, exact[name]) <= bound, name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", one_in(2, [(c,) for c in CASES]))
@pytest.mark.each_value
def test_planes(case, dtype):
    pytest.importorskip("llvmlite")
    how = {"stride": case[2], "padding": case[3]}
    for shared in (True, False):
        feed = given(case, dtype, shared)
        taps = feed["w"][0].numel() if not shared else feed["w"].numel()
        ahead = {name: feed[name] for name in ("x", "w")}
        check(graph("weighted_pool", ahead, **how), ahead, taps)
        for ir, reads in gradients(feed, **how):
            check(ir, reads, taps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [c for c in CASES if c[1] != (4, 3)], ids=str)
@pytest.mark.each_value
def test_the_mean_and_the_largest_of_windows(case, dtype):
    """Of windows that may be padded, by at most half of them."""
    pytest.importorskip("llvmlite")
    shape, window, stride, padding = case
    feed = given(case, dtype, True)
    x, taps = {"x": feed["x"]}, feed["w"].numel()
    how = {"kernel": window, "stride": stride, "padding": padding}
    check(graph("avg_pool", x, **how), x, taps)
    check(graph("avg_pool", x, divisor=5, **how), x, taps)
    g = {"g": feed["g"]}
    check(graph("avg_pool_grad", g, shape=shape, **how), g, taps)
    x["x"] = (x["x"] * 2).round() / 2  # ties, and what is not a number
    flat = x["x"].view(-1)
    flat[::5], flat[1::7], flat[2::11] = torch.nan, torch.inf, -torch.inf
    check(graph("max_pool", x, **how), x, 1)


def test_windows_that_see_nothing_but_infinity():
    pytest.importorskip("llvmlite")
    x = {"x": torch.full((1, 2, 8, 8), -torch.inf)}
    check(graph("max_pool", x, kernel=3, stride=2, padding=1), x, 1)


def test_rows_with_gaps_between_them():
    pytest.importorskip("llvmlite")
    x = torch.randn(2, 4, 20, 30, generator=torch.Generator().manual_seed(3))[:, 1:3, 2:15, 5:24]
    feed = {"x": x, "w": torch.full((3, 3), 1 / 9)}
    check(graph("weighted_pool", feed, stride=1, padding=1), feed, 9)


@pytest.mark.parametrize("op", ["avg_pool", "weighted_pool", "weighted_pool_dw"])
def test_what_the_region_computes_is_zero_in_the_padding(op):
    """x is cos of what is read, and cos of the zero that stands beside the image would be 1."""
    pytest.importorskip("llvmlite")
    feed, g = given(((2, 3, 7, 9), (3, 3), (2, 2), (1, 1)), torch.float32, False), dt.Graph(op)
    syms = {name: g.tensor(name, t.shape) for name, t in feed.items()}
    x, how = g.cos(syms["x"]), {"stride": 2, "padding": 1}
    found = {
        "avg_pool": lambda: (g.avg_pool(x, kernel=3, **how),),
        "weighted_pool": lambda: (g.weighted_pool(x, syms["w"], **how),),
        "weighted_pool_dw": lambda: g.weighted_pool_dw(syms["g"], x, window=(3, 3), **how),
    }[op]()
    for i, y in enumerate(found):
        y.output(f"y{i}")
    check(g.ir(), feed, 9)


def test_sums_over_many_pixels_far_from_zero():
    pytest.importorskip("llvmlite")
    feed = given(((4, 2, 128, 96), (3, 3), (1, 1), (1, 1)), torch.float32, False)
    feed["x"], feed["g"] = feed["x"] + 1000.0, feed["g"] + 1.0
    check(*gradients(feed, stride=1, padding=1)[1], 1)


def test_columns_that_no_window_reaches_stay_out_of_the_weight():
    """The last column of x is in no window: an infinity there is in no sum."""
    pytest.importorskip("llvmlite")
    feed = given(((1, 2, 6, 6), (2, 2), (3, 3), (0, 0)), torch.float32, False)
    feed["x"][..., -1], feed["x"][..., -1, :] = torch.inf, torch.nan
    for ir, reads in gradients(feed, stride=3):
        assert all(found.isfinite().all() for found in run(ir, reads).values())


@pytest.mark.parametrize("op", ["weighted_pool_dx", "weighted_pool_dw"])
def test_the_gradients_written_out_are_the_gradients(op):
    for sample in TABLE[op].samples():
        feed = dict(zip("ab", sample.tensors("f64"), strict=True))
        ir = graph(op, feed, **sample.attrs)
        parts, exact = written_out(ir), evaluate(ir, feed)
        assert op not in {n.op for n in parts.nodes}
        for name, out in evaluate(parts, feed).items():
            assert error(out, exact[name]) <= allowed(0.0, torch.float64), (sample, name)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_both_orders_train(order):
    gen = torch.Generator().manual_seed(5)
    x = torch.randn(3, 32, 24, 18, generator=gen).contiguous(memory_format=order)
    w = torch.rand(32, 3, 3, generator=gen)
    ours, wanted = (
        [t.detach().to(k).requires_grad_() for t in (x, w)] for k in (torch.float32, torch.float64)
    )
    with dt.functional.delegation(False):
        y = dt.functional.weighted_pool2d(*ours, stride=2, padding=1)
    z = torch.conv2d(wanted[0], wanted[1][:, None], None, 2, 1, 1, 32)
    assert error(y, z) <= allowed(0.0, torch.float32, 9)
    assert y.is_contiguous(memory_format=order)
    y.square().sum().backward()
    z.square().sum().backward()
    for t, exact in zip(ours, wanted, strict=True):
        assert error(t.grad, exact.grad) <= allowed(0.0, torch.float32, x[:, 0].numel())


def test_says_what_it_does_not_take():
    pytest.importorskip("llvmlite")
    feed = {"x": torch.zeros(1, 1, 20, 20), "w": torch.zeros(9, 9)}
    region = Region(graph("weighted_pool", feed), frozenset(), 0)
    assert "more than 64" in CpuGen().refuse(region, target("cpu"), Policy()).reason


def test_a_gradient_of_another_shape_is_an_error():
    g = dt.Graph("back")
    x, w = g.tensor("x", (1, 2, 8, 8)), g.tensor("w", (2, 2))
    with pytest.raises(dt.GraphError, match=r"\[1, 2, 8, 8\], the forward result \[1, 2, 4, 4\]"):
        g.weighted_pool_dx(x, w, shape=(1, 2, 8, 8))
    with pytest.raises(dt.GraphError, match=r"\[1, 2, 8, 8\], the forward result \[1, 2, 4, 4\]"):
        g.weighted_pool_dw(x, x, window=(2, 2))
