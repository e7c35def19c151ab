"""The kernel of cross-entropy: in Triton's interpreter, and compiled for GPUs that are absent."""

from __future__ import annotations

import re

import pytest
import torch

from tests.interpreted import assert_none_failed, found_in_interpreter


@pytest.mark.parametrize(
    "dtype", ["f32", *(pytest.param(t, marks=pytest.mark.sweep) for t in ("bf16", "f16"))]
)
def test_in_the_interpreter(dtype):
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.loss_interpreter", dtype), at_least=28)


NUMBER, ROUND, SCALAR = ("i32", False), ("i32", True), ("fp32", False)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", ["plain", "odd", "even", "ragged"])
@pytest.mark.each_value
def test_compiles_without_spills(kind, arch):
    """Rows of 128256 classes that start at multiples of 16, anywhere, with shares of all, and that
    end anywhere."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from deuteron.kernels.triton.cross_entropy import Given, Terms, one_row
    from deuteron.kernels.triton.launch import Launchable
    from tests.ptx import spilled

    half, single, classes = (torch.bfloat16, True), (torch.float32, True), (torch.int64, True)
    given = Given(half, classes, None, single, None, single, single, half)
    step = NUMBER if kind == "odd" else ROUND
    size = NUMBER if kind == "ragged" else step
    terms = Terms(size, step, NUMBER, SCALAR, ROUND, step, step, ROUND)
    deep, lanes, warps = (4, 4096, 16) if kind == "odd" else (4 - 2 * (kind == "even"), 8192, 32)
    how = {"R": deep, "W": lanes, "EVEN": kind == "even"}
    how |= {"SHIFTED": kind == "odd", "AHEAD": kind != "odd", "RAGGED": kind == "ragged"}
    target = GPUTarget("cuda", arch, 32)
    kernel = Launchable(one_row).compile([given, terms], how, warps, 2, target)
    assert spilled(kernel, arch) == 0
    assert re.search(r"ld\.global[.\w:]*v4\.b32", kernel.asm["ptx"])
    assert re.search(r"st\.global[.\w:]*v4\.b32", kernel.asm["ptx"])


@pytest.mark.parametrize("arch", [80, 90])
def test_the_scaling_compiles(arch):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from deuteron.kernels.triton.cross_entropy import _scale

    half, single = (torch.bfloat16, True), (torch.float32, True)
    for left, size in ((None, "i32"), (single, "i64")):
        kinds = [half, half, left, (size, False)]
        _scale.compile(kinds, {"BLOCK": 8192}, 8, 2, GPUTarget("cuda", arch, 32))
