"""Products by 8- and 4-bit weights: in Triton's interpreter, compiled for GPUs that are not there,
what is refused, how the sum is shared out, and when the kernel is taken."""

from __future__ import annotations

import pytest

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.engines.triton.quantized import QUANTIZED, TILINGS, as_quantized_product
from deuteron.ir import Region
from deuteron.plan.choose import Survey, choose, heuristic
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launched import assert_none_spill, compiled
from tests.ptx import asked_ahead, first_wait, spilled

pytest.importorskip("triton")
product = pytest.importorskip("deuteron.kernels.triton.product")
H200 = target("h200")


def region(
    rows: int = 1,
    bits: int = 4,
    dtype: str = "bf16",
    columns: int = 4096,
    steps: int = 4096,
    group: int = 128,
    zeros: bool = False,
) -> Region:
    """With a bias, and silu after it."""
    g = dt.Graph()
    kind = "i8" if bits == 8 else "u8"
    x, w = g.tensor("x", (rows, steps), dtype), g.tensor("w", (columns, steps * bits // 8), kind)
    s, z = (g.tensor(name, (columns, steps // group), dtype) for name in "sz")
    b = g.tensor("b", (columns,), dtype)
    how = {"bits": bits, "group": group}
    g.silu(g.linear_quantized(x, w, s, z if zeros else None, b, **how)).output("y")
    return Region(g.ir(), frozenset(), 0)


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.quantized_cases"), at_least=25)


SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("arch", "dtype", "bits", "rows", "zeros"),
    [
        (90, "bf16", 4, 16, False),
        (80, "bf16", 8, 64, True),
        *(
            pytest.param(arch, dtype, bits, rows, zeros, marks=SWEEP)
            for arch in (90, 80)
            for dtype in ("bf16", "f16")
            for bits in (4, 8)
            for rows in (16, 32, 64, 512)
            for zeros in (False, True)
        ),
    ],
)
def test_compiles_for_matrix_units_without_spills(arch, dtype, bits, rows, zeros, monkeypatch):
    monkeypatch.setattr(product, "chained", lambda device: arch >= 90)
    kernels = compiled(region(rows, bits, dtype, zeros=zeros), arch, monkeypatch)
    assert_none_spill(kernels, arch)
    assert not any(kernel.metadata.global_scratch_size for kernel in kernels)  # for descriptors
    if arch == 90 and len(kernels) > 1:  # what adds up is launched early, and waits
        first, second = (kernel.asm["ptx"] for kernel in kernels)
        assert "griddepcontrol.launch_dependents" in first and "griddepcontrol.wait" in second
        assert "griddepcontrol.wait" not in first and kernels[1].metadata.launch_pdl
    ptx, ttgir = (kernels[0].asm[kind] for kind in ("ptx", "ttgir"))
    assert "cp.async.cg.shared.global" in ptx  # 16 bytes of the weight at a time, ahead
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in ptx
    if arch == 90 and rows <= 16:  # numbers go from where they were copied to into the product
        words = 128 * bits // 32
        wide = [line for line in ttgir.splitlines() if "local_alloc %" in line]
        assert wide and not any(f"x{words}xi32" in line or "64x128x" in line for line in wide)


@pytest.mark.parametrize(
    ("arch", "dtype", "bits", "rows", "zeros", "most"),
    [
        (90, "bf16", 4, 1, False, 2),
        (80, "f16", 8, 8, True, 2),
        *(
            pytest.param(arch, dtype, bits, rows, zeros, 9, marks=SWEEP)
            for arch in (90, 80)
            for dtype in ("bf16", "f16")
            for bits in (4, 8)
            for rows, zeros in ((1, False), (1, True), (8, False), (8, True))
        ),
    ],
)
def test_numbers_of_few_rows_stay_in_registers(arch, dtype, bits, rows, zeros, most, monkeypatch):
    """Words of 16 bytes from memory, those of the next turns before any is multiplied, and nothing
    through shared memory but x of a turn and what warps add up."""
    monkeypatch.setattr(TritonKernels, "every", (QUANTIZED[1],))
    few = region(rows, bits, dtype, zeros=zeros)
    kernels = compiled(few, arch, monkeypatch, most=most)
    assert_none_spill(kernels, arch, most=16)
    candidates = TritonKernels().candidates(few, H200, Policy())[:most]
    for kernel, candidate in zip(kernels, candidates, strict=True):
        ptx = kernel.asm["ptx"]
        assert "ld.global.cg.v4.b32" in ptx and "mma.sync" in ptx and "lop3" in ptx
        assert kernel.metadata.shared <= kernel.metadata.num_warps * 256 * max(rows, 2)
        assert asked_ahead(kernel, arch) >= bits * candidate.knobs["ahead"]
        # nothing waits for what was just asked for, unless registers are so few that some spill
        assert arch < 90 or first_wait(kernel, arch) > 0.5 or spilled(kernel, arch)


def test_few_rows_are_launched_early(monkeypatch):
    few = pytest.importorskip("deuteron.kernels.triton.quantized_few")
    monkeypatch.setattr(few, "chained", lambda device: True)
    monkeypatch.setattr(TritonKernels, "every", (QUANTIZED[1],))
    (kernel,) = compiled(region(), 90, monkeypatch)
    before, _, after = kernel.asm["ptx"].partition("griddepcontrol.wait")
    assert kernel.metadata.launch_pdl and "griddepcontrol.launch_dependents" in before
    assert "ld.global" not in before and "ld.global" in after


def test_what_is_refused():
    def why(**how) -> str:
        refusal = TritonKernels().refuse(region(**how), H200, Policy())
        return "" if refusal is None else refusal.reason

    assert why() == why(rows=300, bits=8, dtype="f16", zeros=True) == ""
    assert "x is of f32, not of 16 bits" in why(dtype="f32")
    assert "groups of 16 numbers" in why(group=16)
    assert "a size is 0" in why(rows=0)
    assert "too large to count" in why(rows=2**24, columns=32, steps=32, group=32)


@pytest.mark.parametrize("columns", [64, 1024, 4096, 14336, 128256])
@pytest.mark.parametrize("rows", [1, 16, 40, 8192])
def test_all_of_the_sum_is_shared_out(rows, columns):
    work = as_quantized_product(region(rows, columns=columns, steps=11008))
    for t in TILINGS:
        parts, count = work.parts(t, H200.units), 11008 // work.together
        share = -(-count // parts)
        assert 1 <= parts <= count and (parts - 1) * share < count
        tiles = -(-rows // t.rows) * -(-columns // t.columns)
        assert parts == 1 or parts * tiles <= t.programs * H200.units


@pytest.mark.parametrize("rows", [1, 20, 60, 500])
def test_every_gpu_has_room_for_some(rows):
    for name in ("h200", "a100", "l4"):
        for bits in (4, 8):
            assert TritonKernels().candidates(region(rows, bits), target(name), Policy())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_plans_by_estimate_take_it_and_what_follows(rows, bits):
    survey = Survey(H200, Policy())
    (choice,) = choose(region(rows, bits), heuristic(survey), survey)
    assert choice.candidate.engine == "triton_kernels"


def test_the_price_is_that_of_the_stored_weight():
    """A row by 4 bits takes about half of one by 8, and less than a library takes by 16."""

    def seconds(bits: int) -> float:
        each, engine = region(1, bits, columns=14336), TritonKernels()
        first = engine.candidates(each, H200, Policy())[0]
        return engine.estimate(each, H200, first)

    whole = 2 * 4096 * 14336 / H200.stream
    assert seconds(4) < 0.7 * seconds(8) < 0.7 * whole
