"""Histograms by hand: in Triton's interpreter, compiled for GPUs that are not there, and offered.

``python -m tests.interpreted tests.test_triton_histogram`` runs the cases in the interpreter.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region
from deuteron.ops.evaluate import evaluate
from deuteron.plan.tensors import poisoned
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter, tell
from tests.launched import assert_none_spill, compiled

pytest.importorskip("triton")
H200 = target("h200")
SHAPES = ((1,), (7, 33), (3, 50, 129))  # the last one is more than a program counts alone
RANGES = ((16, -2.0, 2.0), (1, -1.0, 1.0), (1023, -3.0, 3.1))
KINDS = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8)


def region_of(x: torch.Tensor, bins: int = 16, low: float = -2.0, high: float = 2.0) -> Region:
    g = dt.Graph("histogram")
    held = g.tensor("x", x.shape, x.dtype, strides=x.stride())
    g.histogram(held, bins=bins, low=low, high=high).output("y")
    return Region(g.ir(), frozenset(), 0)


def case(shape, dtype) -> torch.Tensor:
    """Numbers inside, outside and at the edges of the ranges, and what is no number."""
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=gen, dtype=torch.float64) * 1.5
    if not dtype.is_floating_point:
        return (x * 2).abs().to(dtype)
    odd = torch.tensor([2.0, -2.0, 1.0, -1.0, 3.1, float("nan"), float("inf"), float("-inf"), 0.25])
    x.view(-1)[: odd.numel()] = odd[: x.numel()]
    return x.to(dtype)


def wrong_with(x: torch.Tensor, bins: int, low: float, high: float, device: str) -> list[str]:
    """Counts are whole numbers, and have to be the reference's."""
    region, engine, bad = region_of(x, bins, low, high), TritonKernels(), []
    want = evaluate(region.graph, {"x": x})["y"]
    for candidate in engine.candidates(region, H200, Policy())[: 1 if device == "cpu" else None]:
        ctx = BuildContext(H200, torch.device(device), Policy(), {})
        (out,) = (poisoned(region.graph.types[v], torch.device(device)) for v in region.outputs)
        engine.build(region, candidate, ctx).fill([x.to(device)], [out])
        if not torch.equal(out.cpu(), want):
            off = (out.cpu() - want).abs().sum().item()
            bad.append(f"{list(x.shape)} {x.dtype} {bins} bins {candidate}: {off} off")
    return bad


def wrong_on(device: str, some: int = 1) -> list[str]:
    """Every so-manieth of the cases."""
    cases = list(product(SHAPES, KINDS, RANGES))[::some]
    failed = [w for s, k, given in cases for w in wrong_with(case(s, k), *given, device)]
    return failed + wrong_with(case((40, 33), torch.float32).t(), 5, -1.0, 2.0, device)


def main() -> None:
    tell([(0, wrong_on("cpu", 7))])


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.test_triton_histogram"))


@pytest.mark.parametrize(
    ("arch", "dtype", "size"), [(80, torch.float32, 8192), (90, torch.bfloat16, 100000)]
)
def test_compiles_without_spills(arch, dtype, size, monkeypatch):
    """One program alone, and several that add up their counts, in many bins."""
    x = torch.empty(size, dtype=dtype, device="meta")
    kernels = compiled(region_of(x, 1023), arch, monkeypatch)
    assert_none_spill(kernels, arch)


def test_offers_counts_and_refuses_the_rest():
    engine, x = TritonKernels(), torch.empty(64, 32)
    assert engine.refuse(region_of(x), H200, Policy()) is None
    assert engine.refuse(region_of(x.t()), H200, Policy()) is None
    for other, bins, reason in (
        (x[:, ::2], 16, "apart"),
        (x, 1024, "too many"),
        (x[:0], 16, "nothing"),
    ):
        assert reason in engine.refuse(region_of(other, bins), H200, Policy()).reason
    g = dt.Graph("weighted")
    both = (g.tensor(name, (64,), torch.float32) for name in ("x", "w"))
    g.histogram(*both, bins=4, low=0.0, high=1.0).output("y")
    assert "weights" in engine.refuse(Region(g.ir(), frozenset(), 0), H200, Policy()).reason


def test_is_chosen_by_estimate():
    g = dt.Graph("histogram")
    g.histogram(g.tensor("x", (8, 64), torch.float32), bins=16, low=-2.0, high=2.0).output("y")
    (region,) = g.compile(device="cpu").explain(target="h200").report.regions
    assert region.candidate.startswith("triton_kernels[recipe=histogram")


@pytest.mark.gpu
def test_on_a_gpu():
    failed = wrong_on("cuda")
    failed += wrong_with(case((3000, 1001), torch.float32), 100, -2.0, 2.0, "cuda")
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
def test_the_function_on_a_gpu():
    x = case((8, 64), torch.float32)
    got = dt.functional.histogram(x.cuda(), 16, -2.0, 2.0)
    assert torch.equal(got.cpu(), torch.histc(x[x.isfinite()], 16, -2.0, 2.0).long())


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    x = torch.zeros(2**31 + 5000, dtype=torch.uint8, device="cuda")
    x[-3:] = 2
    got = dt.functional.histogram(x, 3, 0.0, 3.0)
    assert got.tolist() == [x.numel() - 3, 0, 3]


def test_a_settled_launch_hands_over_the_same(monkeypatch):
    """On a GPU that is not there: what is compiled, and what its launcher gets."""
    from deuteron.kernels.triton import launch
    from deuteron.kernels.triton.histogram import Bins, histogram

    seen: list = []
    monkeypatch.setattr(launch, "bound", lambda kernel: lambda *args: seen.append(args))
    monkeypatch.setattr(launch.Launchable, "compile", lambda self, *how: seen.append(how))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(histogram, "ready", {})
    x, counts = torch.randn(65), torch.empty(16, dtype=torch.int64)
    constants = {"B": Bins(16, -2.0, 2.0, 32, 64, False)}
    settled = histogram.settled((1,), 64, warps=4, **constants)
    for view in (x[:64], x[:64], x[1:]):  # the last one is not aligned
        settled(view, counts)
    found, again = list(seen), len(seen)
    for view in (x[:64], x[:64]):
        histogram((1,), view, counts, 64, warps=4, **constants)
    assert again == 5 and found[:3] == seen[again:]  # compiled once, launched twice
    assert found[3][0][0] == (torch.float32, False)


if __name__ == "__main__":
    main()
