"""Products of rows grouped by expert: in Triton's interpreter, compiled for GPUs that are not
there, what is refused, and when the kernels are taken."""

from __future__ import annotations

import pytest

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.engines.triton.moe import TILINGS
from deuteron.ir import Region
from deuteron.ops.moe import GROUPED
from deuteron.passes import fuse
from deuteron.plan.choose import Survey, choose, heuristic
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launched import assert_none_spill, compiled

pytest.importorskip("triton")
moe = pytest.importorskip("deuteron.kernels.triton.moe")
H200 = target("h200")
SWEEP = pytest.mark.sweep


def gate_region(
    tokens: int = 4096,
    experts: int = 8,
    share: int = 2,
    dtype: str = "bf16",
    steps: int = 4096,
    columns: int = 14336,
) -> Region:
    """silu(gate) · up · a number for each pair, as it is fused out of a larger graph."""
    g = dt.Graph()
    x = g.tensor("x", (tokens, steps), dtype)
    w = g.tensor("w", (experts, 2 * columns, steps), dtype)
    s, o = g.tensor("s", (experts + 1,), "i32"), g.tensor("o", (tokens * share,), "i32")
    r = g.tensor("r", (tokens * share, 1), "f32")
    halves = g.slice(w, 1, 0, columns), g.slice(w, 1, columns, 2 * columns)
    one, two = (g.grouped_linear(x, half, s, o, share=share) for half in halves)
    y = g.silu(one) * two * r
    g.cast(y, dtype).output("y")
    regions, _ = fuse(g.ir(), gates=True)
    (found,) = [region for region in regions if "grouped_linear" in region.ops]
    assert found.ops.count("grouped_linear") == 2
    return found


def outer_region(rows: int = 8192, experts: int = 8, dtype: str = "bf16") -> Region:
    g = dt.Graph()
    d, x = g.tensor("d", (rows, 1024), dtype), g.tensor("x", (rows // 2, 2048), dtype)
    s, o = g.tensor("s", (experts + 1,), "i32"), g.tensor("o", (rows,), "i32")
    g.grouped_outer(d, x, s, o, share=2).output("y")
    return Region(g.ir(), frozenset(), 0)


def down_region(rows: int = 8192, experts: int = 8, dtype: str = "bf16") -> Region:
    """With matrices that lie as those of a gradient do."""
    g = dt.Graph()
    x, w = g.tensor("x", (rows, 1024), dtype), g.tensor("w", (experts, 1024, 2048), dtype)
    s = g.tensor("s", (experts + 1,), "i32")
    g.grouped_linear(x, g.permute(w, (0, 2, 1)), s).output("y")
    regions, _ = fuse(g.ir(), gates=True)
    return next(region for region in regions if "grouped_linear" in region.ops)


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.moe_cases"), at_least=15)


@pytest.mark.parametrize(
    ("arch", "dtype", "make", "size"),
    [
        (90, "bf16", gate_region, 4096),
        (80, "bf16", outer_region, 8192),
        *(
            pytest.param(arch, dtype, make, size, marks=SWEEP)
            for arch in (90, 80)
            for dtype in ("bf16", "f16", "f32")
            for make in (gate_region, outer_region, down_region)
            for size in (16, 256, 8192)
        ),
    ],
)
def test_compiles_for_matrix_units_without_spills(arch, dtype, make, size, monkeypatch):
    most = 1 if size == 4096 or make is not gate_region else 3
    kernels = compiled(make(size, dtype=dtype), arch, monkeypatch, most=most)
    assert_none_spill(kernels, arch)
    for kernel in kernels:
        assert "cp.async.cg.shared.global" in kernel.asm["ptx"]  # 16 bytes at a time, ahead
        whole = arch == 90 and dtype != "f32" and size >= 4096  # tiles of 64 rows or more
        assert ("wgmma.mma_async" if whole else "mma") in kernel.asm["ptx"]


def test_what_is_refused():
    def why(region: Region) -> str:
        refusal = TritonKernels().refuse(region, H200, Policy())
        return "" if refusal is None else refusal.reason

    assert why(gate_region()) == why(outer_region()) == why(down_region(dtype="f32")) == ""
    assert "of f64" in why(down_region(dtype="f64"))
    assert "a size is 0" in why(outer_region(rows=0))
    assert "5000 groups are too many" in why(gate_region(experts=5000))


@pytest.mark.parametrize("make", [gate_region, outer_region, down_region])
def test_plans_by_estimate(make):
    """Few rows of bfloat16 are ours, and all of float16; large groups are the library's, which
    multiplies nothing else; a GPU that is not Hopper has ours."""

    def engines(machine: str, size: int, dtype: str) -> set[str]:
        survey = Survey(target(machine), Policy())
        choices = choose(make(size, dtype=dtype), heuristic(survey), survey)
        return {c.candidate.engine for c in choices if {*c.region.ops} & {*GROUPED}}

    for size in (2, 64, 8192):
        assert engines("h200", size, "f16") == engines("a100", size, "bf16") == {"triton_kernels"}
    assert engines("h200", 16, "bf16") == {"triton_kernels"}
    assert engines("h200", 8192, "bf16") == {"vendor_fused"}


@pytest.mark.parametrize("name", ["h200", "a100", "l4"])
def test_every_gpu_has_room_for_some(name):
    for dtype in ("bf16", "f32"):
        for make in (gate_region, outer_region, down_region):
            assert TritonKernels().candidates(make(64, dtype=dtype), target(name), Policy())


def test_no_groups_have_more_tiles_than_there_are_programs():
    for height in {t.rows for t in TILINGS}:
        for counts in ([1] * 9, [0, 0, 65], [64, 64], [17] * 5, [1, 127, 0, 129], [0]):
            tiles = sum(-(-count // height) for count in counts)
            assert tiles <= moe.most_tiles(sum(counts), len(counts), height)
