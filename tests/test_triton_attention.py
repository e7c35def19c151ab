"""Attention in Triton: in the interpreter, compiled for GPUs that are not there, refusals."""

from __future__ import annotations

from itertools import product

import pytest

from deuteron.codegen import triton_scores
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import TensorType
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launched import GPUS, assert_none_spill, compiled, region_of
from tests.ptx import spilled

pytest.importorskip("triton")
H200 = target("h200")


@pytest.mark.parametrize(
    ("cases", "count"), [("some", 70), pytest.param("all", 108, marks=pytest.mark.sweep)]
)
def test_in_the_interpreter(cases, count):
    assert_none_failed(found_in_interpreter("tests.attention_cases", cases), at_least=count)


@pytest.mark.parametrize(
    ("arch", "features", "bias", "causal"),
    [
        (90, 64, "f32", False),
        (90, 64, "bf16", True),
        (80, 64, None, True),
        pytest.param(90, 128, None, True, marks=pytest.mark.sweep),
        pytest.param(90, 256, "bool", False, marks=pytest.mark.sweep),
    ],
)
def test_compiles_for_matrix_units_without_spills(arch, features, bias, causal, monkeypatch):
    shape = 4, 8, 512, features
    given = [TensorType.of(shape, "bf16") for _ in range(3)]
    more = [] if bias is None else [TensorType.of((8, 512, 512), bias)]
    region = region_of("attention", *given, *more, causal=causal)
    kernels = compiled(region, arch, monkeypatch, most=1)
    assert_none_spill(kernels, arch)
    ptx = kernels[0].asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in ptx


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "keys", [12, 49, *(pytest.param(n, marks=pytest.mark.sweep) for n in (30, 100))]
)
def test_short_sequences_compile_without_spills(arch, keys, monkeypatch):
    """Every size of a block that holds all keys; the next one is copied while one is computed."""
    shape = 2048, 4, keys, 32
    given = [TensorType.of(shape, "f16") for _ in range(3)]
    region = region_of("attention", *given, TensorType.of((4, keys, keys), "f16"))
    (kernel,) = compiled(region, arch, monkeypatch, short=True)
    assert_none_spill([kernel], arch)
    ptx = kernel.asm["ptx"]
    assert "cp.async" in ptx and "tensormap" not in ptx


@pytest.mark.parametrize(
    ("arch", "features", "op", "most"),
    [
        pytest.param(90, 64, "attention_grad", 256, marks=pytest.mark.sweep),
        pytest.param(80, 64, "attention_grad", 1100, marks=pytest.mark.sweep),
        pytest.param(90, 128, "attention_grad", 1800, marks=pytest.mark.sweep),
        pytest.param(80, 128, "attention_grad", 1400, marks=pytest.mark.sweep),
        pytest.param(90, 64, "attention_full_grad", 256, marks=pytest.mark.sweep),
        pytest.param(80, 64, "attention_full_grad", 256, marks=pytest.mark.sweep),
    ],
)
def test_gradients_compile_and_spill_little(arch, features, op, most, monkeypatch):
    """With all that attention may have."""
    shape = 2, 8, 512, features
    q, k, v, out, grad = (TensorType.of(shape, "bf16") for _ in range(5))
    lse, bias = TensorType.of(shape[:3], "f32"), TensorType.of((8, 512, 512), "bf16")
    seed = TensorType.of((), "i64")
    given = grad, q, k, v, out, lse, bias, None, seed
    region = region_of(op, *given, causal=True, window=(100, -1), softcap=5.0, dropout=0.1)
    kernels = compiled(region, arch, monkeypatch, most=1)
    assert len(kernels) == (3 if op == "attention_grad" else 4)
    assert max(spilled(kernel, arch) for kernel in kernels) <= most


@pytest.mark.sweep  # the same kernels compile below, with what is around plain attention
def test_plain_gradients_spill_nothing_on_hopper(monkeypatch):
    q, k, v, out, grad = (TensorType.of((2, 8, 512, 64), "bf16") for _ in range(5))
    given = grad, q, k, v, out, TensorType.of((2, 8, 512), "f32")
    region = region_of("attention_grad", *given, causal=True)
    assert_none_spill(compiled(region, 90, monkeypatch, most=1), 90)


KINDS = {
    "packed": ((None, None, None, (9,), (9,)), {"packed": True, "causal": True, "align": "end"}),
    "padded": ((None, None, None, (1,), (1,)), {}),
    "table": (
        (*[None] * 5, (1, 1, 32, 35), (1, 1, 32, 35)),
        {"side": 128, "mask": "n0=sub(i,j); c1=lt(n0,100); c2=lt(j,5); c3=logical_or(c1,c2); c3"},
    ),
    "score": (
        (*[None] * 7, (16,)),
        {"score": "n0=read0(h); f1=float(n0); f2=mul(s,f1); f3=tanh(f2); f3", "causal": True},
    ),
}


OFTEN: tuple[tuple[str, bool, int], ...] = ()


@pytest.mark.parametrize(
    ("kind", "back", "arch"),
    [
        pytest.param(*case, marks=() if case in OFTEN else pytest.mark.sweep)
        for case in product(KINDS, (False, True), (90, 80))
    ],
)
def test_other_kinds_compile_and_spill_little(kind, back, arch, monkeypatch):
    """Forward on Hopper nothing at all. There warps divide the work of so many queries."""
    more, how = KINDS[kind]
    q, lse = TensorType.of((1, 16, 4096, 64), "bf16"), TensorType.of((1, 16, 4096), "f32")
    given = [None if shape is None else TensorType.of(shape, "i32") for shape in more]
    first = (q, q, q, q, q, lse) if back else (q, q, q)
    region = region_of("attention_grad" if back else "attention_lse", *first, *given, **how)
    kernels = compiled(region, arch, monkeypatch, most=1)
    assert len(kernels) == (3 if back else 1)
    assert ("setmaxnreg" in kernels[-1].asm["ptx"]) == (arch == 90)
    spills = [spilled(kernel, arch) for kernel in kernels]
    most = {(90, False): 0, (90, True): 128, (80, False): 64, (80, True): 1100}[arch, back]
    assert sum(spills) <= most, spills


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("bf16", (2, 32, 1, 128)),
        *(
            pytest.param(kind, shape, marks=pytest.mark.sweep)
            for kind in ("bf16", "f32")
            for shape in ((2, 32, 1, 8), (2, 32, 1, 256), (2, 568, 1, 80), (1, 32, 500, 128))
        ),
    ],
)
def test_pages_compile_without_spills(arch, kind, shape, monkeypatch):
    q, out_of = TensorType.of(shape, kind), TensorType.of((512, 64, 8, shape[3]), kind)
    table, lengths = TensorType.of((shape[0], 64), "i32"), TensorType.of(shape[:1], "i32")
    region = region_of("paged_attention", q, out_of, out_of, table, lengths)
    kernels = compiled(region, arch, monkeypatch)
    assert len(kernels) == (
        2 if shape[2] == 1 else 1
    )  # few sequences are divided, and put together
    assert_none_spill(kernels, arch)
    assert all(k.metadata.shared <= GPUS[arch].shared_bytes for k in kernels)
    assert kind == "f32" or "mma.sync" in kernels[0].asm["ptx"] or "wgmma" in kernels[0].asm["ptx"]


@pytest.mark.parametrize(
    ("arch", "kind", "values", "features"),
    [
        (90, "i8", "i8", 40),
        *(
            pytest.param(arch, kind, values, features, marks=pytest.mark.sweep)
            for arch, kind in ((90, "i8"), (80, "i8"))
            for values in (kind, "bf16")
            for features in (64, 128, 256)
        ),
    ],
)
def test_bytes_compile_for_matrix_units(arch, kind, values, features, monkeypatch):
    shape = (2, 8, 1024, features)
    q, v = TensorType.of(shape, kind), TensorType.of(shape, values)
    lines, wide = TensorType.of(shape[:3], "f32"), TensorType.of((2, 8, features), "f32")
    scales = (lines, lines, wide if values == kind else None)
    region = region_of("attention_bytes", q, q, v, *scales, causal=True)
    kernels = compiled(region, arch, monkeypatch)
    assert_none_spill(kernels, arch)
    assert kernels[0].metadata.shared <= GPUS[arch].shared_bytes
    assert ".s32.s8.s8" in kernels[0].asm["ptx"]


def test_floats_of_8_bits_are_not_attended_to_by_a_kernel():
    shape = TensorType.of((2, 8, 64, 64), "f8e4m3")
    lines = TensorType.of((2, 8, 64), "f32")
    region = region_of("attention_bytes", shape, shape, shape, lines, lines, None)
    refusal = TritonKernels().refuse(region, target("h200"), Policy())
    assert refusal is not None and "floats of 8 bits" in str(refusal)


@pytest.mark.parametrize(
    ("shape", "kind", "wrong"),
    [
        ((1, 2, 8, 64), "f32", "not of 16 bits"),
        ((1, 2, 8, 512), "bf16", "more than 256 features"),
        ((1, 2, 0, 64), "bf16", "a size is 0"),
    ],
)
def test_what_is_left_to_others(shape, kind, wrong):
    region = region_of("attention", *(TensorType.of(shape, kind) for _ in range(3)))
    refusal = TritonKernels().refuse(region, H200, Policy())
    assert refusal is not None and wrong in refusal.reason


def test_floats_of_places_are_computed_as_floats() -> None:
    """One conversion for a line of scores, where all numbers on the way are exact."""
    far, five = "n0=sub(i,j); n1=abs(n0); f2=float(n1); f3=mul(s,f2); f3", "i"
    text = triton_scores.source(far, [None] * 3, "score", near=True)
    assert "i.to(tl.float32)" in text and "j.to(tl.float32)" in text and "i - j" not in text
    assert "i - j" in triton_scores.source(far, [None] * 3, "score", near=False)
    steps = []
    for n in range(4):
        steps.append(f"n{n}=add({five},j)")
        five = f"n{n}"
    sums = "; ".join([*steps, f"f4=float({five})", "f5=add(s,f4)", "f5"])
    assert "j.to(tl.float32)" not in triton_scores.source(sums, [None] * 3, "score", near=True)
    one = "n0=add(j,1); f1=float(n0); f2=add(s,f1); f2"
    text = triton_scores.source(one, [None] * 3, "score", near=True)
    assert "j.to(tl.float32)" in text and "+ 1.0" in text and "int32" not in text
