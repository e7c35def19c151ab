"""8-bit floats with scales for blocks: rounding to the bit, products, plans, mistakes."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region
from deuteron.policy import Policy
from deuteron.target import target
from tests.launched import assert_none_spill, compiled, region_of
from tests.tolerances import allowed, error

f = dt.functional
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def nearest(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Every number's nearest among all there are, the one with the even last bit of two, found by
    looking at all of them."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(kind).double()
    keep = values.isfinite() & ~(codes == 128)  # -0 is the same number as 0
    codes, values = codes[keep], values[keep]
    off = (x.double().flatten()[:, None] - values).abs()
    ties = off == off.amin(1, keepdim=True)
    best = torch.where(ties, 2 - (codes % 2 == 0).int(), 9).argmin(1)
    return values[best].reshape(x.shape)


@pytest.mark.parametrize("kind", [E4M3, E5M2])
@pytest.mark.parametrize("block", [(1, 16), (4, 8), (3, 5)])
def test_rounding_to_the_bit(kind, block):
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(10, 33, generator=gen) * torch.randn(10, 33, generator=gen).mul(4).exp2()
    x[:4, :16] = 0.0
    q, scale = f.quantize_fp8(x, block=block, dtype=kind)
    rows, columns = block
    most = torch.finfo(kind).max
    assert q.dtype == kind and scale.dtype == torch.float32
    assert scale.shape == (-(-10 // rows), -(-33 // columns))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            want = x[at].abs().max() / most
            want = torch.ones(()) if want == 0 else want
            assert scale[i, j] == want
            assert torch.equal(q[at].double(), nearest((x[at] / want).clamp(-most, most), kind))
    back = f.dequantize_fp8(q, scale, block=block)
    step = torch.finfo(kind).eps / 2
    allowance = step * x.abs() + torch.finfo(kind).smallest_normal * step * 448
    near = f.dequantize_fp8(torch.ones_like(q), scale, block=block) * allowance.clamp(min=0)
    assert ((back - x).abs() <= torch.maximum(step * x.abs() * 1.01, near * 2)).all()


def test_halves_go_to_the_even_one_and_blocks_with_nan_are_nan():
    x = torch.tensor([[448.0, 17.0, 19.0, 1.0625, 0.0, -448.0, 2.0**-10, 3 * 2.0**-10]])
    q, scale = f.quantize_fp8(x, block=(1, 8))
    assert scale.tolist() == [[1.0]]
    assert q.float().tolist() == [[448.0, 16.0, 20.0, 1.0, 0.0, -448.0, 0.0, 2.0**-8]]
    for odd in (float("nan"), float("inf")):
        q, scale = f.quantize_fp8(torch.tensor([[1.0, odd, 1.0, 2.0]]), block=(1, 2))
        back = f.dequantize_fp8(q, scale, block=(1, 2))
        assert back[0, :2].isnan().all() and back[0, 2:].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_numbers_written_out(dtype):
    gen = torch.Generator().manual_seed(1)
    x, w = torch.randn(2, 5, 70, generator=gen), torch.randn(40, 70, generator=gen)
    bias = torch.randn(40, generator=gen)
    x8, xs = f.quantize_fp8(x, block=(1, 32))
    w8, ws = f.quantize_fp8(w, block=(32, 32))
    exact = f.dequantize_fp8(x8, xs, block=(1, 32)).double()
    exact = exact @ f.dequantize_fp8(w8, ws, block=(32, 32)).double().T + bias.double()
    y = f.linear_fp8(x8, w8, xs, ws, bias, block=32, dtype=dtype)
    assert y.dtype == dtype and error(y, exact) <= allowed(0.0, dtype, 70)
    # and not far from those of the numbers themselves: 3 bits of each factor were kept
    assert error(y, x @ w.T + bias) <= 2.0**-4


def test_torch_knows_the_operators():
    """What torch's own check makes of tensors it cannot add on a CPU is left out."""
    q, scale = f.quantize_fp8(torch.randn(2, 8))
    for call, given, how in (
        (torch.ops.deuteron.op_linear_fp8, (q, q, scale, scale[:1], None), {"block": 128}),
        (torch.ops.deuteron.op_quantize_fp8, (torch.randn(2, 8),), {"block": [1, 8]}),
    ):
        kind = {"dtype": "f32" if len(given) > 1 else "f8e4m3"}
        torch.library.opcheck(call.default, given, how | kind, test_utils="test_faketensor")


def test_a_gradient_is_refused():
    x8, xs = f.quantize_fp8(torch.randn(2, 8))
    bias = torch.zeros(2, requires_grad=True)
    with pytest.raises(dt.GraphError, match="8 bits has no gradient"):
        f.linear_fp8(x8, x8, xs, xs[:1], bias).sum().backward()


def layer(rows: int = 512, steps: int = 1024, columns: int = 768, held: bool = True) -> Region:
    """A product of blocks, silu, and back to 8 bits."""
    g = dt.Graph()
    x, w = g.tensor("x", (rows, steps), "f8e4m3"), g.tensor("w", (columns, steps), "f8e4m3")
    xs, ws = g.tensor("xs", (rows, steps // 128)), g.tensor("ws", (columns // 128, steps // 128))
    y = g.silu(g.linear_fp8(x, w, xs, ws, dtype="f32"))
    y = g.clamp(y, min=-448.0, max=448.0) if held else y
    g.cast(y, dtype="f8e4m3").output("y")
    return Region(g.ir(), frozenset(), 0)


def test_it_compiles_for_matrix_units(monkeypatch):
    pytest.importorskip("triton")
    (kernel,) = compiled(layer(), 90, monkeypatch)
    assert_none_spill([kernel], 90)
    assert "wgmma.mma_async" in kernel.asm["ptx"] and "e4m3" in kernel.asm["ptx"]


@pytest.mark.parametrize(
    "block", [(1, 128), pytest.param((128, 128), marks=pytest.mark.sweep)], ids=str
)
def test_rounding_compiles(block, monkeypatch):
    pytest.importorskip("triton")
    x = torch.empty(64, 1000, dtype=torch.bfloat16, device="meta")
    made = compiled(region_of("quantize_fp8", x, block=block), 90, monkeypatch)
    assert_none_spill(made, 90)
    assert "cvt.rn.satfinite.e4m3x2.f32" in made[0].asm["ptx"]


def test_who_takes_it():
    def why(region: Region, gpu: str = "h200") -> str:
        refusal = TritonKernels().refuse(region, target(gpu), Policy())
        return "" if refusal is None else f"{refusal.reason}: {refusal.remedy}"

    assert why(layer()) == ""
    assert "multiplies no floats of 8 bits" in why(layer(), "a100")
    assert why(layer(held=False)) == "float8_e4m3 may overflow: clamp to ±448 before the cast"
    g = dt.Graph("layer")
    x, w = g.tensor("x", (4096, 1024), "bf16"), g.tensor("w", (512, 1024), "f8e4m3")
    q, s = g.quantize_fp8(g.gelu(x))
    g.linear_fp8(q, w, s, g.tensor("ws", (4, 8))).output("y")
    shown = g.compile(device="cpu").explain(target="h200")
    by_estimate = (
        [("gelu",), "triton_gen"],
        [("quantize_fp8",), "torch"],
        [("linear_fp8",), "torch"],
    )
    assert [[r.ops, r.engine] for r in shown.report.regions] == list(by_estimate)
    for region in (layer(), region_of("quantize_fp8", torch.empty(8, 256, device="meta"))):
        assert TritonKernels().candidates(region, target("h200"), Policy())


def test_the_library_is_in_the_race():
    """PyTorch's scaled product, of rows and columns and of blocks, where it has one."""
    (vendor,) = (e for e in dt.engines() if e.name == "vendor_fused")

    def offers(write, gpu: str = "h200") -> str:
        g = dt.Graph()
        write(g).output("y")
        region = Region(g.ir(), frozenset(), 0)
        refusal = vendor.refuse(region, target(gpu), Policy())
        if refusal is not None:
            return refusal.reason
        (candidate,) = vendor.candidates(region, target(gpu), Policy())
        return str(candidate.knobs["recipe"])

    def rows(g, kind="f8e4m3", out="bf16", swapped=False, columns=384):
        y = g.linear(g.tensor("x", (256, 512), kind), g.tensor("w", (columns, 512), kind))
        r, c = g.tensor("r", (256, 1)), g.tensor("c", (columns,))
        return g.cast(y * c * r if swapped else y * r * c, dtype=out)

    def blocks(g, block=128):
        x, w = g.tensor("x", (256, 512), "f8e4m3"), g.tensor("w", (384, 512), "f8e4m3")
        scales = (256, 512 // block), (384 // block, 512 // block)
        a, b = (g.tensor(n, s) for n, s in zip("ab", scales, strict=True))
        return g.linear_fp8(x, w, a, b, block=block)

    assert offers(rows) == offers(lambda g: rows(g, swapped=True)) == "scaled"
    assert offers(blocks) == "scaled_blocks"
    assert "blocks of 64" in offers(lambda g: blocks(g, 64))
    assert "the result is of f16" in offers(lambda g: rows(g, out="f16"))
    assert "e5m2" in offers(lambda g: rows(g, "f8e5m2"))
    assert "no multiples of 16" in offers(lambda g: rows(g, columns=100))
    assert "Hopper only" in offers(rows, "l4")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": torch.zeros(2, 16)}, "x is float32, weight is float8_e4m3"),
        ({"weight": torch.zeros(4, 8).to(E4M3)}, "the weight \\[4, 8\\]"),
        (
            {"x_scale": torch.ones(2, 1)},
            "x_scale of linear_fp8 has shape \\[2, 1\\], not \\[2, 2\\]",
        ),
        ({"weight_scale": torch.ones(4, 2)}, "weight_scale of linear_fp8 has shape"),
        ({"weight_scale": torch.ones(1, 2).half()}, "weight_scale of linear_fp8 is float16"),
        ({"bias": torch.ones(3)}, "bias of linear_fp8 has shape"),
        ({"block": 0}, "blocks of \\(0, 0\\)"),
        ({"dtype": torch.float64}, "gives no float64"),
    ],
)
def test_mistakes_are_named(change, words):
    good = {"x": torch.zeros(2, 16).to(E4M3), "weight": torch.zeros(4, 16).to(E4M3)}
    good |= {"x_scale": torch.ones(2, 2), "weight_scale": torch.ones(1, 2), "block": 8}
    with pytest.raises(dt.GraphError, match=words) as e:
        f.linear_fp8(**(good | change))
    assert e.value.remedy
    with pytest.raises(dt.errors.DeuteronError, match="have other sizes"):
        f.dequantize_fp8(good["x"], good["x_scale"])
