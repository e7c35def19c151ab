"""The hand-written rope: in Triton's interpreter, and compiled for GPUs that are not there."""

from __future__ import annotations

import re

import pytest
import torch

import deuteron as dt
from deuteron.engines.triton_kernels import TritonKernels
from deuteron.engines.triton_rope import tiles
from deuteron.ir.region import Region
from deuteron.passes import Context, fuse, run_passes
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.rope_cases import Case

pytest.importorskip("triton")
H200 = target("h200")


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.rope_cases"), at_least=150)


# ---- compiled without a GPU ----------------------------------------------------------------------


def kinds(dtype, *, k=True, table=True, positions=False):
    """What the launch would look up: pointers, then numbers, all multiples of 16 but the counts."""
    x, f32, i64 = (dtype, True), (torch.float32, True), (torch.int64, True)
    pointers = [x, x if k else None, x, x if k else None]
    pace = (torch.float64, True) if dtype == torch.float64 else i64
    pointers += [f32, f32, None] if table else [None, None, pace]
    odd, even = ("i32", False), ("i32", True)
    return [
        *pointers,
        i64 if positions else None,
        even,
        even,
        *[odd] * 5,
        even,
        even,
        odd,
        *[even] * 12,
    ]


def constants(cut, dims, tail=0, interleaved=False):
    return {
        "TOKENS": cut[0],
        "HEADS": cut[1],
        "HALF": dims // 2,
        "PAIRS": 1 << (dims // 2 - 1).bit_length(),
        "TAIL": tail,
        "INTERLEAVED": interleaved,
        "INVERSE": False,
    }


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    ("dtype", "how", "axis", "dims", "tail", "interleaved"),
    [
        (torch.bfloat16, {}, 1, 128, 0, False),
        (torch.bfloat16, {}, 2, 128, 0, False),
        (torch.bfloat16, {"table": False}, 1, 128, 0, False),
        (torch.float16, {"table": False}, 1, 64, 64, True),
        (torch.float32, {"positions": True, "k": False}, 2, 96, 32, False),
        (torch.float64, {"table": False, "positions": True}, 1, 64, 0, True),
    ],
)
def test_compiles_without_spills_and_moves_16_bytes(
    arch, dtype, how, axis, dims, tail, interleaved
):
    from triton.backends.compiler import GPUTarget

    from deuteron.kernels.triton.rope import rope
    from tests.test_triton_gen import spilled

    for cut in tiles(axis, 32, 16384, dims, how.get("table", True)):
        given = constants(cut, dims, tail, interleaved)
        gpu = GPUTarget("cuda", arch, 32)
        kernel = rope.compile(kinds(dtype, **how), given, warps=cut[2], target=gpu)
        ptx = kernel.asm["ptx"]
        if dtype != torch.float64:  # whose sines keep numbers on the stack
            assert spilled(kernel, arch) == 0, cut
        if how.get("table", True):  # threads have nothing to tell each other
            assert kernel.metadata.shared == 0, cut
        assert re.search(r"ld\.global[.\w:]*v(4\.b32|2\.b64)", ptx), cut
        assert re.search(r"st\.global[.\w:]*v(4\.b32|2\.b64)", ptx), cut


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
    graph, _ = run_passes(g.ir(), Context(H200, Policy()))
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
