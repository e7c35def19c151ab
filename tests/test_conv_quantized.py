"""Convolutions of bytes, bit for bit against a program of integers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deuteron as dt
from deuteron.codegen import dots
from deuteron.ops.evaluate import evaluate
from deuteron.plan.decide import decide
from tests.as_x86 import X86, as_x86
from tests.tolerances import SINGLE

Shape = tuple[int, ...]
f = dt.functional
SHORT = {"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}

# x, weight, attributes: runs that are no multiple of 4 or 16, columns that fill no panel, padding
# that is not 0, groups, one filter for each channel, one to three dimensions
CASES: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 8, 6, 5), (6, 8, 3, 3), {"padding": 1, "zero": 7}),
    (
        (2, 3, 9, 7),
        (17, 3, 3, 3),
        {"padding": (1, 0, 0, 2), "stride": 2, "dtype": "i8", "zero": 255},
    ),
    ((1, 3, 20, 17), (11, 3, 7, 7), {"act": "relu", "dtype": "u8"}),
    ((1, 16, 9, 9), (32, 8, 3, 3), {"padding": 2, "dilation": 2, "groups": 2, "act": "relu6"}),
    ((2, 37, 5, 4), (19, 37, 1, 1), {"zero": 128, "dtype": "u8", "stride": (1, 2)}),
    ((1, 20, 9), (33, 20, 3), {"padding": 1, "dtype": "i8", "zero": 1}),
    ((1, 5, 4, 5, 6), (7, 5, 2, 3, 3), {"padding": 1, "dtype": "u8", "zero": 200}),
    ((2, 19, 9, 8), (19, 1, 3, 3), {"padding": 1, "groups": 19, "dtype": "u8", "zero": 3}),
    ((1, 7, 6, 5), (7, 1, 3, 3), {"padding": 1, "groups": 7, "dtype": "i8", "act": "relu"}),
    ((1, 3, 6, 5), (3, 1, 3, 3), {"padding": 1, "groups": 3}),
    ((1, 35, 6, 5), (35, 1, 3, 3), {"padding": 1, "groups": 35, "dtype": "u8"}),
    ((1, 15, 7, 6), (9, 5, 2, 3), {"groups": 3, "dtype": "i8", "padding": (0, 1), "zero": 130}),
    ((1, 4, 8, 6), (70, 4, 3, 3), {"padding": 1, "stride": (2, 1), "zero": 9}),
    ((1, 6, 5, 5), (12, 1, 3, 3), {"groups": 6, "stride": 2, "act": "relu"}),
]


def exact(x: torch.Tensor, given: list[torch.Tensor], how: dict[str, Any]) -> torch.Tensor:
    """Sums of int64, and what follows them number by number."""
    weight, scale, *bias = given
    how = {"zero": 0, "act": "none", "dtype": "f32", **how}
    space = x.ndim - 2
    pads = how.get("padding", 0)
    pads = (pads,) * (2 * space) if isinstance(pads, int) else tuple(pads)
    before, behind = pads[:space], pads[-space:]
    ends = [n for pair in zip(reversed(before), reversed(behind), strict=True) for n in pair]
    numbers = torch.nn.functional.pad(x.long() - how["zero"], ends)
    conv = getattr(torch.nn.functional, f"conv{space}d")
    window = {name: how[name] for name in ("stride", "dilation", "groups") if name in how}
    sums = conv(numbers, weight.long(), **window).to(torch.int32)
    each = (-1, *[1] * space)
    y = sums.float() * scale.view(each)
    for more in bias:
        y = y + more.view(each)
    y = y if how["act"] == "none" else y.clamp(0, 6 if how["act"] == "relu6" else None)
    if how["dtype"] == "f32":
        return y
    low, high, kind = (0, 255, torch.uint8) if how["dtype"] == "u8" else (-128, 127, torch.int8)
    fake = torch.fake_quantize_per_tensor_affine(y, 0.05, 3, low, high)
    return (fake / 0.05).round().add(3).to(kind)


@pytest.mark.each_value
@pytest.mark.parametrize("machine", ["this", "avx2"])
@pytest.mark.parametrize(("x", "w", "how"), CASES)
def test_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch, x: Shape, w: Shape, how: dict[str, Any], machine: str
) -> None:
    if machine in X86:
        as_x86(monkeypatch, machine)
    signed = len(x) != 4 or x[0] == 1
    gen = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, x, generator=gen).to(torch.uint8)
    how = dict(how)
    if signed:
        data = data.view(torch.int8)
        how["zero"] = how.get("zero", 0) - 128
    given = [torch.randint(-127, 128, w, generator=gen).to(torch.int8)]
    given += [torch.rand(w[0], generator=gen) * 1e-3, torch.randn(w[0], generator=gen)]
    given = given[: 2 + (w[0] % 2)]
    g = dt.Graph()
    found = g.tensor("x", x, data.dtype)
    ends = {} if how.get("dtype", "f32") == "f32" else {"out_scale": 0.05, "out_zero": 3}
    g.conv_quantized(found, *map(g.constant, given), **how, **ends).output("y")
    plan = g.compile(device="cpu")
    assert torch.equal(plan.run(x=data)["y"], exact(data, given, how))
    (ran,) = (c for c in plan.decision.choices if "conv_quantized" in c.region.ops)
    assert ran.candidate.engine == ("cpu_kernels" if dots.dots() else "torch")


# as on a GPU, where everything around the sums is written out
HALVES: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 8, 6, 5), (6, 4, 3, 3), {"padding": 1, "zero": 7, "dtype": "u8"}),
    ((1, 16, 9), (34, 4, 3), {"padding": 1, "groups": 2, "act": "relu6"}),
    ((1, 6, 4, 5, 3), (5, 3, 2, 3, 3), {"stride": 2, "dtype": "i8"}),
]


@pytest.mark.parametrize("machine", ["cpu", "h200"])
@pytest.mark.parametrize(("x", "w", "how"), HALVES)
def test_weights_of_4_bits_bit_for_bit(
    x: Shape, w: Shape, how: dict[str, Any], machine: str
) -> None:
    gen = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, x, generator=gen).to(torch.uint8)
    packed = torch.randint(0, 256, w, generator=gen).to(torch.uint8)
    whole = torch.empty(w[0], 2 * w[1], *w[2:], dtype=torch.int8)
    whole[:, 0::2], whole[:, 1::2] = (packed & 15).char() - 8, (packed >> 4).char() - 8
    rest = [torch.rand(w[0], generator=gen) * 1e-2, torch.randn(w[0], generator=gen)]
    want = exact(data, [whole, *rest], how)
    g = dt.Graph()
    ends = {} if how.get("dtype", "f32") == "f32" else {"out_scale": 0.05, "out_zero": 3}
    given = [g.constant(t) for t in (packed, *rest)]
    g.conv_quantized(g.tensor("x", x, "u8"), *given, bits=4, **how, **ends).output("y")
    if machine == "cpu":
        plan = g.compile(device="cpu")
        assert torch.equal(plan.run(x=data)["y"], want)
        (ran,) = (c for c in plan.decision.choices if "conv_quantized" in c.region.ops)
        assert ran.candidate.engine == ("cpu_kernels" if dots.dots() else "torch")
        assert torch.equal(f.conv_quantized(data, packed, *rest, bits=4, **how, **ends), want)
        return
    made = decide(g.ir(), dt.target(machine), dt.Policy(layout="nhwc"))
    assert torch.equal(evaluate(made.graph, {"x": data})["y"], want)
    (ran,) = (c for c in made.choices if "conv_integer" in c.region.ops)
    assert len(ran.region.ops) > 3 and ran.candidate.knobs["recipe"] == "conv_integer"


@pytest.mark.parametrize("kind", ["f8e4m3", "f8e5m2"])
def test_floats_of_8_bits(kind: str) -> None:
    """On a CPU our kernels of float32 run them, on a GPU that multiplies them the implicit one."""
    gen, short = torch.Generator().manual_seed(3), getattr(torch, SHORT[kind])
    x = torch.randn(2, 8, 9, 7, generator=gen).to(short)
    w = torch.randn(12, 8, 3, 3, generator=gen).to(short)
    scale, bias = torch.rand(12, generator=gen), torch.randn(12, generator=gen)
    how: dict[str, Any] = {"padding": 1, "act": "relu", "dtype": kind, "out_scale": 0.07}
    each = (-1, 1, 1)
    sums = torch.conv2d(x.float(), w.float(), padding=1) * scale.view(each) + bias.view(each)
    most = torch.finfo(short).max
    want = (sums.relu() * (1 / torch.tensor(0.07))).clamp(-most, most).to(short)
    g = dt.Graph()
    given = [g.constant(t) for t in (w, scale, bias)]
    g.conv_quantized(g.tensor("x", x.shape, kind), *given, **how).output("y")
    plan = g.compile(device="cpu")
    (ran,) = (c for c in plan.decision.choices if "conv" in c.region.ops)
    assert ran.candidate.engine == "cpu_kernels"
    for got in (plan.run(x=x)["y"], f.conv_quantized(x, w, scale, bias, **how)):
        assert got.dtype == short
        steps = (got.view(torch.uint8).int() - want.view(torch.uint8).int()).abs()
        assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 0.01  # other sums
    made = decide(g.ir(), dt.target("h200"), dt.Policy())
    (ran,) = (c for c in made.choices if "conv" in c.region.ops)
    assert "conv" in {o.candidate.knobs.get("recipe") for o in ran.options}


def test_a_batch_norm_leaves_weights_of_8_bits_alone() -> None:
    g, kind = dt.Graph(), torch.float8_e4m3fn
    w = g.constant(torch.randn(4, 3, 1, 1).to(kind))
    y = g.conv(g.tensor("x", (1, 3, 4, 4), kind), w)
    mean, var = (g.constant(torch.rand(4) + 0.5) for _ in range(2))
    g.batch_norm(y, mean, var).output("y")
    made = decide(g.ir(), dt.target("h200"), dt.Policy()).graph
    feed = {"x": torch.randn(1, 3, 4, 4).to(kind)}
    want, got = (evaluate(graph, feed, float64=True)["y"] for graph in (g.ir(), made))
    torch.testing.assert_close(got, want, rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bits": 4}, "weight of uint8 for bits=4"),
        ({"bits": 3}, "bits=3"),
        ({"dtype": "f8e4m3", "out_zero": 1}, "out_zero=1"),
        ({"zero": 256}, "zero=256"),
        ({"act": "gelu"}, "activation 'gelu'"),
        ({"dtype": "f16"}, "cannot be float16"),
        ({"dtype": "u8", "out_scale": 0.0}, "out_scale=0"),
        ({"dtype": "i8", "out_zero": 200}, "out_zero=200"),
    ],
)
def test_mistakes_are_named(wrong: dict[str, Any], said: str) -> None:
    g = dt.Graph()
    x, w = g.tensor("x", (1, 4, 5, 5), dt.uint8), g.tensor("w", (8, 4, 3, 3), dt.int8)
    with pytest.raises(dt.GraphError, match=said):
        g.conv_quantized(x, w, g.tensor("s", (8,), dt.float32), **wrong)
