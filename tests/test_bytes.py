"""Products of narrow integers: sums in int32, by generated code where the CPU has an instruction
for it, and as torch has them where a graph is torch's."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from llvmlite import binding

import deuteron as dt
from deuteron.codegen import dots, llvm
from deuteron.codegen.llvm_text import Module
from deuteron.kernels.cpu import conv_quantized as conv
from deuteron.kernels.cpu import int8_matmul as bytes_
from tests.as_x86 import X86, as_x86

KINDS = {"i8": torch.int8, "u8": torch.uint8, "i16": torch.int16}


def numbers(kind: str, *shape: int) -> torch.Tensor:
    about = torch.iinfo(KINDS[kind])
    return torch.randint(about.min, about.max + 1, shape).to(KINDS[kind])


def planned(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, op: str) -> dt.Plan:
    g = dt.Graph()
    given = g.tensor("x", x.shape, x.dtype)
    if op == "linear":
        more = () if bias is None else (g.tensor("b", bias.shape, bias.dtype),)
        g.linear(given, g.constant(w, "w"), *more).output("y")
    else:
        g.matmul(given, g.constant(w.T.contiguous(), "w")).output("y")
    return g.compile(device="cpu")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "columns"),
    [((4, 16), 16), ((1, 1), 1), ((3, 5, 36), 17), ((2, 767), 50), ((5, 6), 8), ((25, 67), 33)],
)
@pytest.mark.parametrize("op", ["linear", "matmul"])
def test_sums_are_exact(kind, shape, columns, op):
    torch.manual_seed(0)
    x, w = numbers(kind, *shape), numbers(kind, columns, shape[-1])
    bias = torch.randint(-(2**20), 2**20, (columns,), dtype=torch.int32) if op == "linear" else None
    plan = planned(x, w, bias, op)
    want = (x.long() @ w.long().T + (0 if bias is None else bias)).int()
    got = plan.run(x=x, **({} if bias is None else {"b": bias}))["y"]
    assert got.dtype == torch.int32 and torch.equal(got, want)
    (region,) = plan.explain().report.regions
    have = dots.dots()  # of which x86-64's takes only weights with a sign
    able = have is not None and kind != "i16" and have.moved(kind, kind) is not None
    assert (region.engine == "cpu_kernels") == able


# ---- x86-64, whose instruction multiplies bytes without a sign by bytes with one ----------------


@pytest.mark.parametrize("machine", X86)
@pytest.mark.parametrize(("shape", "columns"), [((1, 5), 1), ((13, 67), 17), ((24, 64), 64)])
def test_sums_are_exact_by_the_instruction_of_x86(monkeypatch, machine, shape, columns):
    as_x86(monkeypatch, machine)
    torch.manual_seed(0)
    x, w = numbers("i8", *shape), numbers("i8", columns, shape[-1])
    bias = torch.randint(-(2**20), 2**20, (columns,), dtype=torch.int32)
    plan = planned(x, w, bias, "linear")
    assert plan.explain().report.regions[0].engine == "cpu_kernels"
    assert torch.equal(plan.run(x=x, b=bias)["y"], (x.long() @ w.long().T + bias).int())
    x, w = numbers("u8", *shape), numbers("u8", columns, shape[-1])
    plan = planned(x, w, None, "linear")  # whose weight has no sign: not by this instruction
    assert torch.equal(plan.run(x=x)["y"], (x.long() @ w.long().T).int())
    assert plan.explain().report.regions[0].engine == "torch"


@pytest.mark.parametrize("machine", X86)
def test_nothing_but_products_and_loads_is_in_the_loop(machine, monkeypatch):
    cpu, lanes, rows = X86[machine]
    monkeypatch.setattr(bytes_, "by_lane", lambda: False)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    instruction, triple = dots.Dots(lanes, rows, 2, True, 2.6), "x86_64-unknown-linux-gnu"
    forms = (
        partial(bytes_._multiply, bytes_.Form(instruction, True)),
        partial(conv._multiply, instruction, conv.Form("i8", "u8", True, "relu")),
    )
    for body in forms:
        module = Module(triple)
        llvm.entry(module, "run", body)
        parsed = binding.parse_assembly(str(module))
        target = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=1)
        text = target.emit_assembly(parsed)
        assert text.count("vpdpbusd") >= 2 * rows and "vpxor" not in _of_products(text)


def _of_products(text: str) -> str:
    """The blocks of assembly that multiply."""
    return "".join(block for block in text.split("\n.LBB") if "vpdpbusd" in block)


def test_the_largest_sums_do_not_wrap_round():
    x = torch.full((4, 4096), -128, dtype=torch.int8)
    y = planned(x, x, None, "linear").run(x=x)["y"]
    assert (y == 4096 * 128 * 128).all()


def test_a_bias_is_of_the_type_of_the_sums():
    g = dt.Graph()
    x, w = g.tensor("x", (4, 8), "i8"), g.tensor("w", (2, 8), "i8")
    with pytest.raises(dt.GraphError, match="bias of linear is int8, its sums are int32"):
        g.linear(x, w, g.tensor("b", (2,), "i8"))


class Product(torch.nn.Module):
    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.register_buffer("w", numbers("i8", 64, 24))
        self.exact = exact

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch._int_mm(x, self.w) if self.exact else x @ self.w


@pytest.mark.parametrize("exact", [False, True])
def test_a_graph_of_torchs_gives_what_torch_gives(exact):
    """Which wraps round at 8 bits, unless it is asked for sums in 32."""
    torch.manual_seed(0)
    module, x = Product(exact).eval(), numbers("i8", 32, 64)
    fast = dt.optimize(module, x, find=False)
    assert torch.equal(fast(x), module(x)) and fast(x).dtype == module(x).dtype
