"""16-bit floats in generated code on the CPU: rounded as torch rounds them, and not at all where a
value is such a number already."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.codegen.llvm_plan import short_already
from deuteron.codegen.lower import lower
from deuteron.ir import Region
from tests.test_codegen import run_cpu


def region(build, dtype: str, *shape: int) -> Region:
    g = dt.Graph("short")
    build(g, g.tensor("x", shape, dtype)).output("y")
    return Region(g.ir())


def every_bf16() -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal numbers, zeros with their signs; any nan is as good as another."""
    number = ~b.isnan()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a[number].view(torch.int16), b[number].view(torch.int16)
    )


KEEP = {  # operators that only choose among numbers
    "relu6": (lambda g, x: g.relu6(x), torch.nn.functional.relu6),
    "abs": (lambda g, x: g.abs(x), torch.abs),
    "neg": (lambda g, x: g.neg(x), torch.neg),
    "where": (lambda g, x: g.where(g.gt(x, 1.0), x, -0.5), lambda x: torch.where(x > 1, x, -0.5)),
    "copy": (lambda g, x: g.to_layout(g.slice(x, axis=0, start=1), "contiguous"), lambda x: x[1:]),
}


@pytest.mark.parametrize("name", KEEP)
def test_numbers_that_are_chosen_are_not_rounded(name):
    pytest.importorskip("llvmlite")
    build, torchs = KEEP[name]
    x = every_bf16()
    this = region(build, "bf16", x.numel())
    program = lower(this)
    assert program.statements[-1].source in short_already(program)
    (y,) = run_cpu(this, {"x": x})
    want = torchs(x).to(torch.bfloat16)
    if name == "relu6":  # of -0.0 either zero is right: processors and torch's versions differ
        y, want = (torch.where(t == 0, torch.zeros_like(t), t) for t in (y, want))
    assert same_bits(y, want)


def test_numbers_that_are_computed_are_rounded():
    for build in (lambda g, x: x * 3.0, lambda g, x: g.maximum(x, 0.1), lambda g, x: g.exp(x)):
        program = lower(region(build, "bf16", 64))
        assert program.statements[-1].source not in short_already(program)


def test_a_number_that_is_too_long_for_16_bits_is_rounded():
    """6 is a bfloat16 number; 0.1, π and 1e300 are not."""
    for number, kept in ((6.0, True), (0.1, False), (3.14159, False), (float("inf"), True)):
        program = lower(region(lambda g, x, n=number: g.minimum(x, n), "bf16", 64))
        assert (program.statements[-1].source in short_already(program)) == kept


def test_rounding_is_torchs():
    """Every upper half with lower halves around the tie; nan with any payload stays nan."""
    pytest.importorskip("llvmlite")
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    lower_half = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    x = (upper | lower_half).view(torch.float32).flatten()
    (y,) = run_cpu(region(lambda g, x: g.cast(x, dtype="bf16"), "f32", x.numel()), {"x": x})
    assert same_bits(y, x.to(torch.bfloat16))


@pytest.mark.parametrize("of", ["f16", "bf16"])
def test_rounding_of_float64_is_torchs(of):
    """Numbers around ties of 16 bits, beyond the largest and below the smallest; every count of
    lanes that a row may end in. x86-64 has no instruction that makes float64 a float16."""
    pytest.importorskip("llvmlite")
    short = dt.ir.dtype(of).torch
    first = torch.arange(1, 2**15, 7, dtype=torch.int32).to(torch.int16).view(short).double()
    second = torch.arange(2, 2**15 + 1, 7, dtype=torch.int32).to(torch.int16).view(short).double()
    ties = (first + second) / 2
    x = torch.cat(
        [ties, -ties * (1 + 2**-50), ties * (1 - 2**-40), first.new_tensor([1e300, -0.0])]
    )
    for count in (x.numel(), 1, 7):
        (y,) = run_cpu(region(lambda g, x: g.cast(x, dtype=of), "f64", count), {"x": x[:count]})
        assert same_bits(y, x[:count].to(short))
