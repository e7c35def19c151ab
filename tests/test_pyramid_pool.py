"""Pyramid pooling by hand: in Triton's interpreter, compiled for GPUs that are not there, on the
CPU, and offered.

``python -m tests.test_pyramid_pool`` runs the cases in the interpreter and prints what is wrong.
"""

from __future__ import annotations

import json

import pytest
import torch

import deuteron as dt
from deuteron.engines.base import BuildContext, Engine
from deuteron.engines.cpu_gemm import CpuGemm
from deuteron.engines.triton_kernels import TritonKernels
from deuteron.functional.operators import operator
from deuteron.ir import Region, TensorType
from deuteron.ops import TABLE
from deuteron.ops.evaluate import evaluate
from deuteron.passes.expand import written_out
from deuteron.plan.tensors import poisoned
from deuteron.policy import Policy
from deuteron.target import Target, target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.tolerances import allowed, error

H200 = target("h200")
# shape, grids, memory order; sizes that divide, that do not, and more cells than elements
CASES = [
    ((2, 3, 12, 12), (1, 2, 3, 6), "contiguous"),
    ((2, 5, 7, 5), (1, 2, 3, 6), "contiguous"),
    ((2, 5, 7, 5), (1, 3), "nhwc"),
    ((1, 70, 9, 4), (2, 3), "nhwc"),
    ((1, 1, 3, 2), (5, 1), "contiguous"),
    ((3, 2, 40), (1, 4, 6), "contiguous"),
    ((2, 6, 10), (3,), "nhwc"),
]
# rows of cells and channels last, sizes that divide and do not, single rows: for the interpreter
SMALL = [
    ((1, 2, 5, 7), (1, 3), "contiguous"),
    ((1, 5, 4, 6), (2, 3), "nhwc"),
    ((2, 2, 9), (1, 4), "contiguous"),
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


def regions(shape, sizes, order, kind: str, dtype: torch.dtype):
    """The pool and its gradient alone, each with tensors to feed it."""
    x = data(shape, order, dtype, 0, kind == "max")
    g = dt.Graph("pool")
    given = g.tensor("x", x.shape, x.dtype, strides=x.stride())
    y = g.pyramid_pool(given, sizes=sizes, kind=kind).output("y")
    yield Region(g.ir(), frozenset(), 0), {"x": x}
    grad = data(y.shape, "contiguous", dtype, 1, False)
    g = dt.Graph("back")
    feed = {"g": g.tensor("g", grad.shape, grad.dtype)}
    if kind == "max":
        feed["x"] = g.tensor("x", x.shape, x.dtype, strides=x.stride())
    how = {"shape": x.shape, "order": order, "sizes": sizes, "kind": kind}
    g.pyramid_pool_grad(*feed.values(), **how).output("y")
    yield Region(g.ir(), frozenset(), 0), {"g": grad, "x": x} if kind == "max" else {"g": grad}


def wrong_with(
    engine: Engine, machine: Target, device: str, shape, sizes, order, kind: str, dtype, most: int
) -> list[str]:
    bad = []
    for region, feed in regions(shape, sizes, order, kind, dtype):
        exact = evaluate(region.graph, feed, float64=True)["y"]
        plain = evaluate(region.graph, feed)["y"]
        assert engine.refuse(region, machine, Policy()) is None
        ways = engine.candidates(region, machine, Policy())
        for candidate in ways[:most]:
            ctx = BuildContext(machine, torch.device(device), Policy(), {})
            (out,) = (poisoned(region.graph.types[v], torch.device(device)) for v in region.outputs)
            engine.build(region, candidate, ctx).fill([t.to(device) for t in feed.values()], [out])
            off, bound = error(out, exact), allowed(error(plain, exact), dtype, x_per_cell(shape))
            if not off <= bound:
                bad.append(
                    f"{region.ops} {shape} {sizes} {order} {kind} {dtype} {candidate}: "
                    f"{off:.3g} > {bound:.3g}"
                )
    return bad


def x_per_cell(shape) -> int:
    return max(torch.Size(shape[2:]).numel(), 1)


def all_wrong(engine: Engine, machine: Target, device: str, dtypes, most: int) -> list[str]:
    return [
        wrong
        for case in CASES
        for kind in ("avg", "max")
        for dtype in dtypes
        for wrong in wrong_with(engine, machine, device, *case, kind, dtype, most)
    ]


def main() -> None:
    from tests.triton_interpreter import install

    install()
    failed = []
    for case in SMALL:
        for kind in ("avg", "max"):
            failed += wrong_with(TritonKernels(), H200, "cpu", *case, kind, torch.float32, 1)
    for kind, dtype in (("avg", torch.bfloat16), ("max", torch.float64)):
        failed += wrong_with(TritonKernels(), H200, "cpu", *SMALL[0], kind, dtype, 2)
    print(json.dumps({"failed": failed}))


def test_in_the_interpreter():
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.test_pyramid_pool"))


@pytest.mark.parametrize(
    ("arch", "dtype", "order"), [(80, "bf16", "contiguous"), (90, "bf16", "nhwc")]
)
@pytest.mark.parametrize("kind", ["avg", "max"])
def test_compiles_without_spills(arch, dtype, order, kind, monkeypatch):
    pytest.importorskip("triton")
    from tests.launched import assert_none_spill, compiled, region_of

    x = TensorType.of((4, 256, 50, 60), dtype, order)
    pool = region_of("pyramid_pool", x, kind=kind)
    y = pool.graph.types[pool.outputs[0]]
    how = {"shape": x.shape, "order": order, "kind": kind}
    back = region_of("pyramid_pool_grad", y, x if kind == "max" else None, **how)
    kernels = [k for region in (pool, back) for k in compiled(region, arch, monkeypatch)]
    assert len(kernels) == (3 if kind == "max" else 2)
    assert_none_spill(kernels, arch)


def test_the_gradient_written_out_is_the_gradient():
    op = TABLE["pyramid_pool_grad"]
    for sample in op.samples():
        grad, x = sample.tensors("f64")
        g = dt.Graph("back")
        feed = {"g": grad} if x is None else {"g": grad, "x": x}
        given = [g.tensor(n, t.shape, t.dtype, strides=t.stride()) for n, t in feed.items()]
        g.pyramid_pool_grad(*given, **sample.attrs).output("y")
        parts = written_out(g.ir())
        assert "pyramid_pool_grad" not in {n.op for n in parts.nodes}
        exact = evaluate(g.ir(), feed)["y"]
        assert error(evaluate(parts, feed)["y"], exact) <= allowed(0.0, torch.float64), sample


def test_refuses_volumes():
    engine = TritonKernels()
    g = dt.Graph("pool")
    g.pyramid_pool(g.tensor("x", (2, 3, 4, 4, 4)), sizes=(1, 2)).output("y")
    refusal = engine.refuse(Region(g.ir(), frozenset(), 0), H200, Policy())
    assert "volumes" in refusal.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_the_cpu(dtype):
    pytest.importorskip("llvmlite")
    failed = all_wrong(CpuGemm(), target("cpu"), "cpu", (dtype,), 1)
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("kind", ["avg", "max"])
def test_on_the_cpu_with_any_strides(kind):
    """x with gaps between rows or channels, in no order at all, or with one channel next to which
    there is a row of the same column; a gradient of one number."""
    pytest.importorskip("llvmlite")
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
        wrong
        for case in CASES[1:4]
        for kind in ("avg", "max")
        for wrong in wrong_with(TritonKernels(), target("cuda"), "cuda", *case, kind, dtype, 1)
    ]
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements(huge_images):
    from deuteron.kernels.triton.pyramid_pool import Image, Tile, backward, forward

    x, planes = huge_images, huge_images.shape[1]
    x[0, -2:] = 2.0
    image, tile = Image.of(TensorType.from_tensor(x), (1, 2)), Tile(8, 8, 8)
    y = torch.full((1, planes, 5), 7.0, dtype=x.dtype, device="cuda")
    forward(image, "max", tile, 1)(x, y)
    assert x.numel() > 2**31 and (y[0, -2:] == 2.0).all() and not y[0, :-2].any()
    dx = torch.full_like(x, 7.0)
    backward(image, tile, 1)(y, None, dx)
    share = 2.0 / 64 + 2.0 / 16
    assert (dx[0, -2:] == share).all() and not dx[0, :-2].any()


if __name__ == "__main__":
    main()
