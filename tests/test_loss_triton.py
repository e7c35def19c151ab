"""The kernels of cross-entropy: in Triton's interpreter, and compiled for GPUs that are absent."""

from __future__ import annotations

import re

import pytest
import torch

from tests.interpreted import assert_none_failed, found_in_interpreter


@pytest.mark.parametrize("group", ["f32", "f16", "bf16", "slices"])
def test_in_the_interpreter(group):
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.loss_interpreter", group), at_least=8)


NUMBER, ROUND, SCALAR = ("i32", False), ("i32", True), ("fp32", False)


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize(
    "kind", ["plain", "odd", "even", "smooth", "probabilities", "short", "image"]
)
def test_compiles_without_spills(kind, arch):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from deuteron.kernels.triton import cross_entropy as ce
    from tests.ptx import spilled

    half, single = (torch.bfloat16, True), (torch.float32, True)
    probs, spread = kind == "probabilities", kind in ("even", "smooth", "probabilities")
    wanted = half if probs else (torch.int64, True)
    share = single if kind in ("smooth", "probabilities") else None
    tensors = [half, wanted, share, single, single, single, None, half]
    numbers = [NUMBER if kind == "odd" else ROUND, NUMBER, SCALAR, SCALAR]
    fixed = {"PROBS": probs, "SPREAD": spread}
    target = GPUTarget("cuda", arch, 32)
    if kind in ("short", "image"):
        strides = [ROUND, ROUND, None] if kind == "short" else [ROUND, None, ROUND]
        kinds = [*tensors, ROUND, NUMBER, *strides, *strides, ROUND, ROUND, None, *numbers]
        tile = {"ROWS": 4, "BLOCK": 1024} if kind == "short" else {"ROWS": 256, "BLOCK": 32}
        how = {"ONCE": True, "SUMMED": True, "ALONE": "", "LATER": False}
        kernel = ce._many_rows.compile(kinds, tile | fixed | how, 4, 2, target)
    else:
        step = NUMBER if kind == "odd" else ROUND
        kinds = [*tensors, ROUND, ROUND, ROUND, step, ROUND, step, ROUND, step, *numbers]
        deep, wide, warps = ce.tile_of(128256, kind in ("plain", "even"), spread)
        ahead = warps == 32
        tile = {"R": deep, "W": wide, "SHIFTED": kind == "odd", "AHEAD": ahead}
        kernel = ce._one_row.compile(kinds, tile | fixed, warps, 2, target)
    assert spilled(kernel, arch) == 0
    assert re.search(r"ld\.global[.\w:]*v4\.b32", kernel.asm["ptx"])
    assert re.search(r"st\.global[.\w:]*v4\.b32", kernel.asm["ptx"])


@pytest.mark.parametrize("arch", [80, 90])
def test_the_small_kernels_compile(arch):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget

    from deuteron.kernels.triton import cross_entropy as ce
    from deuteron.kernels.triton import loss_sums as sums

    half, single, classes = (torch.bfloat16, True), (torch.float32, True), (torch.int64, True)
    target = GPUTarget("cuda", arch, 32)
    for probs, spread in ((False, False), (False, True), (True, True)):
        kinds = [
            half,
            half if probs else classes,
            single,
            single,
            single,
            single,
            half,
            ROUND,
            ROUND,
            ROUND,
            NUMBER,
            ROUND,
            ROUND,
            NUMBER,
            SCALAR,
            SCALAR,
        ]
        fixed = {"W": 4096, "PROBS": probs, "SPREAD": spread}
        ce._some_classes.compile(kinds, fixed, 4, 2, target)
    for weight in (None, half):
        kinds = [classes, weight, None, single, NUMBER, NUMBER, NUMBER]
        parts = [None, None, single, single, NUMBER, NUMBER, NUMBER]
        for later in (False, True):
            sums._totals.compile(kinds, {"LATER": later, "BLOCK": 4096}, 8, 2, target)
            sums._totals.compile(parts, {"LATER": later, "BLOCK": 256}, 4, 2, target)
        kinds = [classes, weight, single, NUMBER, NUMBER, NUMBER]
        sums._count_parts.compile(kinds, {"BLOCK": 1024}, 4, 2, target)
    sums._add_up.compile([single, half, NUMBER], {"BLOCK": 4096}, 8, 2, target)
    for size in ("i32", "i64"):
        kinds = [half, half, single, (size, False)]
        sums._scale.compile(kinds, {"BLOCK": 8192}, 8, 2, target)
