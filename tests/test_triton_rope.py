"""The hand-written rope: in Triton's interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import re

import pytest
import torch

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region, TensorType
from deuteron.passes import fuse
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launched import assert_none_spill, compiled
from tests.launched import region_of as region_of_types
from tests.optimised import optimised
from tests.rope_cases import Case

pytest.importorskip("triton")
H200 = target("h200")


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.rope_cases"), at_least=25)


# ---- compiled without a GPU ----------------------------------------------------------------------


PLACES = (None, None, TensorType.of((4, 4096), "i64"))


@pytest.mark.parametrize(
    ("arch", "dtype", "axis", "more", "attrs"),
    [
        pytest.param(80, "bf16", 1, (), {}, marks=pytest.mark.sweep),
        (90, "f16", 1, (), {"interleaved": True, "dims": 64}),
        pytest.param(90, "bf16", 2, (), {}, marks=pytest.mark.sweep),
        pytest.param(90, "f64", 1, PLACES, {"inverse": True}, marks=pytest.mark.sweep),
    ],
)
def test_compiles_without_spills_and_moves_16_bytes(arch, dtype, axis, more, attrs, monkeypatch):
    q, k = TensorType.of((4, 4096, 32, 128), dtype), TensorType.of((4, 4096, 8, 128), dtype)
    if axis == 2:
        q, k = (TensorType.of((4, t.shape[2], 4096, 128), dtype) for t in (q, k))
    region = region_of_types("rope", q, k, *more, axis=axis, **attrs)
    engine = TritonKernels()
    offered = engine.candidates(region, H200, Policy())
    kernels = compiled(region, arch, monkeypatch, most=len(offered))
    if dtype != "f64":  # whose sines keep numbers on the stack
        assert_none_spill(kernels, arch)
    for candidate, kernel in zip(offered, kernels, strict=True):
        if candidate.knobs["table"]:  # threads have nothing to tell each other
            assert kernel.metadata.shared == 0, candidate
        ptx = kernel.asm["ptx"]
        assert re.search(r"ld\.global[.\w:]*v(4\.b32|2\.b64)", ptx), candidate
        assert re.search(r"st\.global[.\w:]*v(4\.b32|2\.b64)", ptx), candidate


# ---- the recipe ----------------------------------------------------------------------------------


def region_of(axis=1, outputs=(0, 1), **more) -> Region:
    q, k = torch.empty(4, 4096, 32, 128), torch.empty(4, 4096, 8, 128)
    if axis == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    feed = {"q": q.bfloat16(), "k": k.bfloat16(), **more}
    return Region(Case("big", feed, {"axis": axis}).graph(outputs), frozenset(), 0)


@pytest.mark.parametrize("axis", [1, 2])
def test_offers_a_few_ways_and_expects_most_of_the_bandwidth(axis):
    engine, region = TritonKernels(), region_of(axis)
    assert engine.refuse(region, H200, Policy()) is None
    offered = engine.candidates(region, H200, Policy())
    assert 2 <= len(offered) <= 8
    moved = 2 * 2 * 4 * 4096 * 40 * 128
    for candidate in offered:
        seconds = engine.estimate(region, H200, candidate)
        assert moved / H200.stream < seconds < 1.5 * moved / H200.stream


def test_is_chosen_on_a_gpu_whole_and_in_one_region():
    g = dt.Graph("attention")
    q, k = g.tensor("q", (4, 128, 32, 64), "bf16"), g.tensor("k", (4, 128, 8, 64), "bf16")
    turned = [g.permute(x, dims=(0, 2, 1, 3)) for x in (q, k)]
    for name, out in zip("ab", g.rope(*turned, axis=2), strict=True):
        out.output(name)
    graph, _ = optimised(g.ir(), H200)
    regions, _ = fuse(graph)
    (region,) = [r for r in regions if "rope" in r.ops]
    engine = TritonKernels()
    assert engine.refuse(region, H200, Policy()) is None
    prices = {
        e.name: e.estimate(region, H200, e.candidates(region, H200, Policy())[0])
        for e in dt.engines()
        if e.refuse(region, H200, Policy()) is None and e.name != "inductor"
    }
    assert min(prices, key=prices.__getitem__) == "triton_kernels", prices


def test_refuses_with_a_reason():
    engine, cpu = TritonKernels(), target("cpu")
    assert "GPU" in engine.refuse(region_of(), cpu, Policy()).reason
    apart = torch.empty(2, 5, 8, 3).transpose(2, 3)
    region = Region(Case("apart", {"q": apart}, {}).graph(), frozenset(), 0)
    refusal = engine.refuse(region, H200, Policy())
    assert "not adjacent" in refusal.reason and "to_layout" in refusal.remedy
