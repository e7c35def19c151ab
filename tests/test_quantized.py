"""Weights of 8 and 4 bits: packing to the bit, products and gradients, layers, models, mistakes."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.engines.cpu.kernels import CpuKernels
from deuteron.ir import Region
from deuteron.kernels.cpu import quantized
from deuteron.policy import Policy
from deuteron.target import target
from tests.quantized_cases import cases, stored
from tests.test_engines import Answers, right
from tests.tolerances import EPS, GRADIENT, SAME_CODE, SINGLE_LAYERS, allowed, error

f = dt.functional
WIDTHS = pytest.mark.parametrize("bits", [4, 8])
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def plain(weight: torch.Tensor, bits: int) -> list[list[int]]:
    """The stored numbers, one by one."""
    if bits == 8:
        return weight.tolist()
    return [[n for byte in row for n in (byte % 16, byte // 16)] for row in weight.tolist()]


# ---- to the bit


@WIDTHS
@pytest.mark.parametrize("zeros", [False, True])
def test_unpacking_to_the_bit(bits, zeros):
    """Every number there is, in every place of a word, by powers of two, so that all is exact."""
    low, kind = (-128, torch.int8) if bits == 8 else (0, torch.uint8)
    weight = torch.arange(low, low + 256).to(kind).repeat(2, 1)
    group, steps = 32, weight.shape[1] * 8 // bits
    scale = 2.0 ** torch.arange(-2, -2 + 2 * steps // group).reshape(2, -1).remainder(5)
    zero = scale * 3 - 1
    given = (weight, scale, zero if zeros else None)
    numbers = torch.tensor(plain(weight, bits), dtype=torch.float64)
    moved = zero.double() if zeros else torch.full((), 8.0 if bits == 4 else 0.0).expand(zero.shape)
    want = (numbers - moved.repeat_interleave(group, 1)) * scale.repeat_interleave(group, 1)
    assert torch.equal(f.dequantize_weight(*given, bits=bits, group=group).double(), want)
    eye = torch.eye(steps)
    assert torch.equal(f.linear_quantized(eye, *given, bits=bits, group=group).double(), want.T)


@pytest.mark.parametrize("bits", [4, 8])
def test_packing_to_the_bit(bits):
    """Halves go to the even one, the ends are held, the even k is in the low half."""
    most = 7 if bits == 4 else 127
    rows = torch.tensor([[most, 0.5, 1.5, 2.5, -0.5, -1.5, -most, 0.49]])
    packed, scale, zero = f.quantize_weight(rows, bits=bits, group=8)
    assert scale.tolist() == [[1.0]] and zero is None
    want = [most, 0, 2, 2, 0, -2, -most, 0]
    assert plain(packed, bits) == [[n + 8 for n in want] if bits == 4 else want]
    if bits == 4:
        assert packed.tolist() == [[15 + 16 * 8, 10 + 16 * 10, 8 + 16 * 6, 1 + 16 * 8]]


@WIDTHS
def test_a_range_with_a_zero_in_it(bits):
    steps = 2**bits - 1
    least = 0 if bits == 4 else -128
    rows = torch.tensor(
        [[-1.0, steps - 1.0, 0.0, 0.5], [2.0, steps, 1.5, 2.5], [-steps, -1, -2, -3]]
    )
    packed, scale, zero = f.quantize_weight(rows, bits=bits, group=4, symmetric=False)
    assert scale.tolist() == [[1.0]] * 3
    assert zero is not None and (zero - least).flatten().tolist() == [1.0, 0.0, steps]
    want = [[0, steps, 1, 1], [2, steps, 2, 2], [0, steps - 1, steps - 2, steps - 3]]
    assert [[n - least for n in row] for row in plain(packed, bits)] == want


@WIDTHS
@TYPES
@pytest.mark.parametrize("symmetric", [True, False])
def test_there_and_back_is_half_a_step_away(bits, dtype, symmetric):
    w = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    w[2] = 0.0
    packed, scale, zero = f.quantize_weight(w, bits, 32, symmetric)
    assert scale.dtype == dtype and (zero is None) == symmetric
    back = f.dequantize_weight(packed, scale, zero, bits, 32)
    assert back.dtype == dtype and not back[2].any()
    step = scale.double().repeat_interleave(32, 1)
    # a scale that was rounded down, or a zero that was rounded up, leaves the largest number out
    slack = (0.5 if symmetric else 1.0) + 2 ** (bits - 1) * EPS[dtype]
    off = (back.double() - w.double()).abs()
    assert (off <= slack * step + w.double().abs() * EPS[dtype]).all()
    again = f.quantize_weight(back.double(), bits, 32, symmetric)
    if symmetric and dtype == torch.float32:
        assert torch.equal(again[0], packed)


# ---- products


@pytest.mark.each_pair
@WIDTHS
@TYPES
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_errors_are_at_most_twice_torchs(bits, dtype, zeros, rows):
    gen = torch.Generator().manual_seed(rows)
    given = stored(bits, 33, 192, 64, dtype, gen)
    weight = given["w"], given["s"], given["z"] if zeros else None
    x, bias = (torch.randn(n, generator=gen).to(dtype) for n in ((rows, 192), (33,)))
    whole = f.dequantize_weight(*weight, bits=bits, group=64)
    scale, zero = (None if t is None else t.double() for t in weight[1:])
    exact = f.dequantize_weight(weight[0], scale, zero, bits=bits, group=64)
    exact = F.linear(x.double(), exact, bias.double())
    ours = f.linear_quantized(x, *weight, bias, bits=bits, group=64)
    theirs = F.linear(x, whole, bias)
    assert ours.dtype == dtype
    assert error(ours, exact) <= allowed(error(theirs, exact), dtype)


@TYPES
def test_generated_code_for_the_cpu(dtype):
    """Whatever it takes of the cases of a GPU: sizes that fill no tile, zeros, scales of another
    type."""
    engine, machine, count = CpuKernels(), target("cpu"), 0
    for case in cases(dtype):
        region = case.region()
        if len(region.nodes) > 1:
            assert engine.refuse(region, machine, Policy()) is not None
            continue
        (candidate,) = engine.candidates(region, machine, Policy())
        right(engine, candidate, region, case.feed, Answers(region, case.feed))
        count += 1
    assert count >= 10


def test_what_generated_code_leaves_to_torch():
    def why(group: int, kind: str = "f32") -> str:
        g = dt.Graph()
        x, w = g.tensor("x", (2, 48), kind), g.tensor("w", (4, 24), "u8")
        g.linear_quantized(x, w, g.tensor("s", (4, 48 // group), kind), group=group).output("y")
        refusal = CpuKernels().refuse(Region(g.ir(), frozenset(), 0), target("cpu"), Policy())
        return "" if refusal is None else f"{refusal.reason}: {refusal.remedy}"

    assert why(16) == ""
    assert why(24) == "groups of 24 numbers: use groups of a multiple of 16"
    assert "element type f64" in why(16, "f64")


@WIDTHS
def test_gradients_against_finite_differences(bits):
    gen = torch.Generator().manual_seed(2)
    given = stored(bits, 5, 12, 4, torch.float64, gen)
    x, bias = torch.randn(2, 3, 12, generator=gen).double(), torch.randn(5, generator=gen).double()
    leaves = [t.requires_grad_() for t in (x, given["s"], given["z"], bias)]

    def layer(x, scale, zero, bias):
        return f.linear_quantized(x, given["w"], scale, zero, bias, bits=bits, group=4)

    assert torch.autograd.gradcheck(layer, leaves, rtol=GRADIENT)
    y = f.linear_quantized(x, given["w"], given["s"].detach(), bits=bits, group=4)
    y.sum().backward()
    whole = f.dequantize_weight(given["w"], given["s"].detach(), bits=bits, group=4)
    assert error(x.grad, whole.sum(0).expand_as(x)) <= SINGLE_LAYERS


@WIDTHS
def test_torch_knows_the_operator(bits):
    gen = torch.Generator().manual_seed(3)
    given = stored(bits, 5, 8, 4, torch.float32, gen)
    x = torch.randn(2, 8, requires_grad=True)
    call = torch.ops.deuteron.op_linear_quantized.default
    tensors = (x, given["w"], given["s"], given["z"], None)
    torch.library.opcheck(call, tensors, {"bits": bits, "group": 4})


def test_under_autocast_it_is_as_linear():
    w, x = torch.randn(8, 32), torch.randn(2, 32)
    packed = f.quantize_weight(w, group=32)
    halves = f.quantize_weight(w.half(), group=32)
    with torch.autocast("cpu", torch.bfloat16):
        assert f.linear_quantized(x, *packed, torch.zeros(8), group=32).dtype == torch.bfloat16
        assert f.linear_quantized(x, *halves, group=32).dtype == torch.bfloat16


# ---- layers and models


class Mlp(nn.Module):
    """A gated one, as models write them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@WIDTHS
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_layer_is_saved_and_loaded(bits, symmetric):
    linear = nn.Linear(64, 10).eval()
    how = {"bits": bits, "group": 32, "symmetric": symmetric}
    layer = dt.nn.QuantizedLinear.from_linear(linear, **how)
    assert not layer.training and layer.bias is linear.bias
    new = dt.nn.QuantizedLinear(64, 10, **how)
    x = torch.randn(3, 64)
    assert not new(x).any()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    new.load_state_dict(torch.load(file))
    assert torch.equal(new(x), layer(x)) and torch.equal(copy.deepcopy(layer)(x), layer(x))
    want = f"in_features=64, out_features=10, bias=True, bits={bits}, group=32"
    assert str(new) == f"QuantizedLinear({want}, symmetric={symmetric})"
    assert new.weight.nbytes == 64 * 10 * bits // 8
    half = new.bfloat16()
    assert half.weight.dtype in (torch.int8, torch.uint8) and half(x.bfloat16()).isfinite().all()


def test_a_model_is_quantised_where_it_is_wanted():
    model = nn.Sequential(Mlp(), Mlp(), nn.Linear(64, 7))
    shared = model[0].up
    shared.register_forward_hook(lambda module, args, y: y + 1000.0)
    again = dt.nn.quantize(model, exclude=["2", "*.gate"], bits=8, group=32)
    assert again is model and model[0].up is shared
    kinds = {
        path: type(m).__name__ for path, m in model.named_modules() if "inear" in type(m).__name__
    }
    assert kinds["2"] == kinds["0.gate"] == kinds["1.gate"] == "Linear"
    assert kinds["0.up"] == kinds["1.down"] == "QuantizedLinear"
    assert shared(torch.zeros(1, 64)).min() == 1000.0
    assert [n for n, _ in model[1].down.named_parameters()] == ["bias"]
    assert str(model[1].down) == str(dt.nn.QuantizedLinear.from_linear(nn.Linear(96, 64), 8, 32))
    dt.nn.quantize(model, include=nn.Linear, group=32)
    assert not any(type(m) is nn.Linear for m in model.modules())
    dt.nn.replace(model)
    assert type(model[2]) is dt.nn.QuantizedLinear


def test_a_layer_whose_weight_is_computed_is_left_alone():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(64, 8)), nn.Linear(8, 4)).eval()
    want = model[0](x := torch.randn(2, 64))
    dt.nn.quantize(model, exclude="1", group=64)
    assert torch.equal(model[0](x), want)


def test_a_model_stays_as_it_is_where_a_layer_does_not_fit():
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 8))
    with pytest.raises(
        dt.GraphError, match="cannot cut 48 numbers of a row into groups of 64"
    ) as e:
        dt.nn.quantize(model, group=64)
    assert "where: 1, a Linear(" in str(e.value) and "remedy: use group=48" in str(e.value)
    assert all(type(m) is nn.Linear for m in model)


@WIDTHS
def test_a_quantised_model_is_planned_whole(bits):
    torch.manual_seed(0)
    model, x = dt.nn.quantize(Mlp(), bits=bits, group=32).eval(), torch.randn(3, 64)
    with torch.no_grad():
        want, wide = model(x), copy.deepcopy(model).double()(x.double())
        fast = dt.optimize(model, x, budget_s=2)
        assert error(fast(x), wide) <= allowed(error(want, wide), torch.float32)
    regions = fast.explain().report.regions
    assert sum(r.ops.count("linear_quantized") for r in regions) == 3
    assert not any("aten" in r.ops for r in regions)


@WIDTHS
def test_under_torch_compile(bits):
    torch.manual_seed(0)
    model, x = dt.nn.quantize(Mlp(), bits=bits, group=32), torch.randn(3, 64)
    fast = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert error(fast(x), model(x)) <= SAME_CODE


# ---- mistakes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": torch.zeros(4, 8, dtype=torch.int8)}, "stored as uint8 \\[out, in / 2\\]"),
        ({"bits": 3}, "bits=3"),
        ({"group": 5}, "into groups of 5(.|\n)*remedy: use group=4"),
        ({"group": 0}, "into groups of 0"),
        ({"x": torch.zeros(2, 8)}, "of 4 bits takes 16 numbers in its last dimension"),
        ({"x": torch.zeros(2, 16, dtype=torch.int32)}, "of int32 is not defined"),
        ({"scale": torch.ones(4, 3)}, "scale of linear_quantized has shape \\[4, 3\\]"),
        ({"scale": torch.ones(4, 2).bfloat16()}, "scale of linear_quantized is bfloat16"),
        ({"zero": torch.ones(4, 2).double()}, "zero is float64, scale is float32"),
        ({"zero": torch.ones(4)}, "zero of linear_quantized has shape"),
        ({"bias": torch.ones(5)}, "bias of linear_quantized"),
        ({"bias": torch.ones(4).half()}, "bias of linear_quantized is float16"),
    ],
)
def test_mistakes_are_named(change, words):
    good = {"weight": torch.zeros(4, 8, dtype=torch.uint8), "scale": torch.ones(4, 2), "group": 8}
    given = {"x": torch.zeros(2, 16), "zero": None, "bias": None} | good | change
    with pytest.raises(dt.GraphError, match=words) as e:
        f.linear_quantized(given.pop("x"), **given)
    assert "asked: linear_quantized(" in str(e.value) and e.value.remedy


@pytest.mark.parametrize(
    ("weight", "how", "words"),
    [
        (torch.zeros(4), {}, "not a matrix"),
        (torch.zeros(4, 8, dtype=torch.int8), {}, "int8\\[4, 8\\], not a matrix"),
        (torch.zeros(4, 8), {}, "cannot cut 8 numbers of a row into groups of 128"),
        (torch.zeros(4, 8), {"bits": 2, "group": 8}, "bits=2"),
        (torch.zeros(4, 9), {"group": 9}, "rows of 9 numbers do not fill bytes of two"),
        (torch.full((4, 8), torch.nan), {"group": 8}, "nan or inf"),
    ],
)
def test_weights_that_cannot_be_quantised(weight, how, words):
    with pytest.raises(dt.errors.DeuteronError, match=words) as e:
        f.quantize_weight(weight, **how)
    assert e.value.asked.startswith("quantize_weight(") and e.value.remedy


@pytest.mark.parametrize("wide", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 200])
def test_sums_of_a_tile_do_not_wait_for_each_other(monkeypatch, wide, rows):
    """Two multiply-adds begin in a cycle and take four: eight sums must be under way."""
    monkeypatch.setattr(quantized, "width", lambda: wide)
    high, across = quantized.tile_of(rows)
    assert high * across * (quantized.STEP // wide) >= 8
    assert high == 1 if rows == 1 else high <= -(-rows // 4) * 4
