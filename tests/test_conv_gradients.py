"""Gradients of convolutions, and transposed ones, by the CPU's own kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import deuteron as dt
from deuteron.codegen.calls import Argument
from deuteron.engines import BuildContext, engine
from deuteron.ir.types import TensorType
from deuteron.kernels.cpu import OUTER_TILES, lanes
from deuteron.ops.evaluate import evaluate
from deuteron.plan.tensors import poisoned
from tests.test_cpu_kernels import CPU, ENGINE, LOW, POLICY, built, check, feed, region_of, t
from tests.tolerances import allowed, error

Shape = tuple[int, ...]

# x, weight and attributes: odd sizes, strides that leave pixels out, windows that overlap or do not
CASES: list[tuple[Shape, Shape, dict[str, Any]]] = [
    ((2, 5, 9, 7), (3, 5, 1, 1), {"stride": 2}),
    ((2, 16, 9, 11), (24, 16, 3, 3), {"padding": 1}),
    ((1, 9, 8, 8), (17, 9, 3, 3), {"padding": (1, 0), "stride": 2}),
    ((2, 6, 12, 9), (8, 6, 3, 2), {"padding": (2, 1), "stride": (2, 3), "dilation": (3, 2)}),
    ((1, 8, 10, 10), (12, 4, 3, 3), {"padding": 1, "groups": 2, "stride": 2}),
    ((1, 3, 20, 17), (11, 3, 7, 7), {"padding": 3, "stride": 2}),
    ((1, 4, 6, 6), (4, 4, 3, 3), {"padding": 12, "dilation": 12}),
    ((1, 130, 5, 6), (70, 130, 3, 3), {"padding": 1}),
    ((2, 3, 9), (5, 3, 4), {"padding": 1, "stride": 2}),
    ((1, 4, 5, 4, 6), (6, 4, 2, 3, 3), {"padding": 1, "stride": (1, 2, 1)}),
    ((2, 5, 9, 8), (5, 1, 3, 3), {"padding": 1, "groups": 5}),
    ((1, 18, 9, 7), (18, 1, 3, 3), {"padding": 1, "groups": 18, "stride": 2}),
    ((2, 9, 8, 7), (18, 1, 3, 3), {"padding": 1, "groups": 9}),
    ((1, 5, 9, 8), (20, 1, 3, 5), {"padding": (1, 2), "groups": 5, "stride": (1, 2)}),
    ((1, 6, 9, 21), (6, 1, 2, 19), {"padding": (0, 9), "groups": 6, "stride": (3, 2)}),
    ((2, 4, 13), (4, 1, 3), {"groups": 4, "dilation": 2}),
    ((1, 6, 5, 4, 6), (6, 1, 3, 2, 3), {"groups": 6, "padding": 1, "stride": (1, 2, 2)}),
]


def image(shape: Shape, of: str = "f32") -> TensorType:
    return t(*shape, layout="nhwc", of=of)


def result(x: Shape, w: Shape, attrs: dict[str, Any]) -> Shape:
    """The shape of the convolution itself."""
    region = region_of("conv", [("x", image(x), False), ("w", image(w), False)], attrs)
    return region.graph.types[region.outputs[0]].shape


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(("x", "w", "attrs"), CASES)
@pytest.mark.each_value
def test_of_the_input(x: Shape, w: Shape, attrs: dict[str, Any], known: bool) -> None:
    inputs = [("dy", image(result(x, w, attrs)), False), ("w", image(w), known)]
    attrs = {"shape": x, **attrs}
    check(region_of("conv_dx", inputs, attrs, residual=known), math.prod((w[0], *w[2:])))


IMAGES = [case for case in CASES if len(case[0]) > 3 or "groups" in case[2]]


@pytest.mark.parametrize(("x", "w", "attrs"), IMAGES)
def test_of_the_weight(x: Shape, w: Shape, attrs: dict[str, Any]) -> None:
    y = result(x, w, attrs)
    inputs = [("dy", image(y), False), ("x", image(x), False)]
    check(region_of("conv_dw", inputs, {"shape": w, **attrs}), math.prod((y[0], *y[2:])))


@pytest.mark.parametrize(
    ("x", "w", "attrs", "taken"),
    [
        ((2, 5, 9, 7), (3, 5, 1, 1), {}, True),
        ((1, 6, 13), (4, 6, 1), {}, True),
        ((2, 5, 9, 7), (3, 5, 1, 1), {"stride": 2}, False),
        ((2, 6, 5, 4), (4, 3, 1, 1), {"groups": 2}, False),
        ((2, 6, 5, 4), (4, 6, 1, 1), {"padding": 1}, False),
        ((2, 6, 5, 4), (4, 6, 1, 3), {}, False),
    ],
)
def test_of_the_weight_of_single_pixels_as_one_product(
    x: Shape, w: Shape, attrs: dict[str, Any], taken: bool
) -> None:
    """By the library, which copies no image into panels."""
    y, vendor = result(x, w, attrs), engine("vendor_fused")
    inputs = [("dy", image(y), False), ("x", image(x), False)]
    region = region_of("conv_dw", inputs, {"shape": w, **attrs})
    assert (vendor.refuse(region, CPU, POLICY) is None) == taken
    if not taken:
        return
    tensors = feed(region)
    exact, own = (evaluate(region.graph, tensors, float64=wide)["y"] for wide in (True, False))
    (candidate,) = vendor.candidates(region, CPU, POLICY)
    kernel = vendor.build(region, candidate, BuildContext(CPU, torch.device("cpu"), POLICY, {}))
    out = poisoned(region.graph.types[region.outputs[0]], torch.device("cpu"))
    kernel.fill([tensors[v] for v in region.inputs], [out])
    bound = allowed(error(own, exact), torch.float32, math.prod((y[0], *y[2:])))
    assert error(out, exact) <= bound


def test_outer_products_fit_in_registers() -> None:
    """Sums, a number of every row in all lanes, and a vector of columns: 32 with AVX-512. Where
    channels are few there is a tile that is as narrow."""
    tiles = OUTER_TILES[16]
    assert all(rows * vectors + rows + 1 <= 32 for rows, vectors in tiles)
    assert min(vectors for _, vectors in tiles) == 1


@pytest.mark.parametrize("of", LOW)
@pytest.mark.parametrize(("x", "w", "attrs"), [CASES[1], CASES[2], CASES[11]])
@pytest.mark.each_value
def test_of_16_bits(x: Shape, w: Shape, attrs: dict[str, Any], of: str) -> None:
    y = result(x, w, attrs)
    inputs = [("dy", image(y, of), False), ("w", image(w, of), False)]
    check(region_of("conv_dx", inputs, {"shape": x, **attrs}), math.prod(w))
    inputs = [("dy", image(y, of), False), ("x", image(x, of), False)]
    check(region_of("conv_dw", inputs, {"shape": w, **attrs}), math.prod(y))


@pytest.mark.parametrize(
    ("w", "attrs"),
    [
        ((6, 5, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((6, 3, 2, 4), {"stride": (2, 1), "groups": 2}),
        ((6, 21, 2, 3), {"stride": (2, 3)}),
        ((6, 1, 3, 3), {"stride": 2, "padding": 1, "groups": 6}),
        ((6, 1, 2, 2), {"stride": 3, "groups": 6, "dilation": (1, 3)}),
    ],
)
def test_transposed(w: Shape, attrs: dict[str, Any]) -> None:
    """The convolution and both of its gradients, as somebody trains it."""
    attrs = {"transposed": True, **attrs}
    x = (2, 6, 5, 7)
    region = region_of("conv", [("x", image(x), False), ("w", image(w), False)], attrs)
    check(region, math.prod(w))
    y = region.graph.types[region.outputs[0]].shape
    inputs = [("dy", image(y), False), ("w", image(w), False)]
    check(region_of("conv_dx", inputs, {"shape": x, **attrs}), math.prod(w))
    inputs = [("dy", image(y), False), ("x", image(x), False)]
    check(region_of("conv_dw", inputs, {"shape": w, **attrs}), math.prod(y))


def test_long_sums_are_as_exact_as_those_of_libraries() -> None:
    """All terms of one sign: a sum that went on and on would lose digits."""
    x, w = t(4, 8192), t(16, 8192)
    region = region_of("linear", [("x", x, False), ("w", w, False)])
    ones = {name: torch.rand(8192 * n).view(n, 8192) for name, n in (("x", 4), ("w", 16))}
    exact = ones["x"].double() @ ones["w"].double().t()
    for candidate in ENGINE.candidates(region, CPU, POLICY):
        out = torch.empty(4, 16)
        built(region, candidate, ones).fill([ones["x"], ones["w"]], [out])
        assert float(((out - exact) / exact).abs().max()) < 1e-6


@pytest.mark.parametrize(("width", "window", "stride"), [(14, 1, 2), (7, 3, 1), (40, 3, 1)])
def test_sums_of_any_length_err_no_more_than_twice_as_much_as_torchs(width, window, stride) -> None:
    torch.manual_seed(0)
    pad, out = window // 2, (width - 1) // stride + 1
    shape, last = (256, 128, window, window), torch.channels_last
    dy, x = torch.randn(4, 256, out, out), torch.randn(4, 128, width, width)
    g = dt.Graph()
    given = g.tensor("dy", dy.shape, layout="nhwc"), g.tensor("x", x.shape, layout="nhwc")
    how = {"stride": (stride,) * 2, "padding": (pad,) * 2}
    g.conv_dw(*given, shape=shape, **how).output("dw")
    dy, x = dy.contiguous(memory_format=last), x.contiguous(memory_format=last)
    plan = g.compile(device="cpu")
    assert plan.decision.choices[0].candidate.engine == "cpu_kernels"
    ours = plan.run(dy=dy, x=x)["dw"]
    grad = partial(torch.nn.grad.conv2d_weight, weight_size=shape, stride=stride, padding=pad)
    exact = grad(x.double(), grad_output=dy.double())
    assert error(ours, exact) <= 2 * error(grad(x, grad_output=dy), exact)


# sizes of x and of the weight along each dimension, filters, and how it is convolved
KINDS: dict[str, tuple[int, int, tuple[int, int], dict[str, Any]]] = {
    "plain": (7, 3, (8, 8), {"padding": 1}),
    "depthwise": (7, 3, (8, 1), {"padding": 1, "groups": 8, "stride": 2}),
    "transposed": (4, 2, (8, 8), {"stride": 2, "transposed": True}),
}


@pytest.mark.parametrize("part", ["dx", "dw"])
@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_lines_and_volumes_run_our_kernels_too(kind: str, dims: int, part: str) -> None:
    """As they come from row-major tensors."""
    size, window, (first, second), how = KINDS[kind]
    x, w = (2, 8, *[size] * dims), (first, second, *[window] * dims)
    g = dt.Graph()
    made = {name: g.tensor(name, shape) for name, shape in {"x": x, "w": w}.items()}
    grad = g.tensor("grad", g.conv(*made.values(), **how).shape)
    other, shape = (made["w"], x) if part == "dx" else (made["x"], w)
    getattr(g, f"conv_{part}")(grad, other, shape=shape, **how).output("y")
    plan = g.compile(device="cpu")
    (ran,) = (c for c in plan.decision.choices if any("conv" in op for op in c.region.ops))
    assert any(o.candidate.engine == "cpu_kernels" for o in ran.options)
    assert max(plan.measure_errors().values()) < 1e-6


@pytest.mark.parametrize(("least", "several"), [(8, "chunks"), (100, "parts")])
def test_the_weights_gradient_by_winograd_in_several_parts(
    monkeypatch: pytest.MonkeyPatch, least: int, several: str
) -> None:
    """Some tiles at a time; or all of them, some filters and some channels, which are finished
    before sums of the next are made, while their own are in a core's cache."""
    from deuteron.kernels.cpu import winograd_grad
    from deuteron.kernels.cpu.conv import Image
    from deuteron.kernels.cpu.matmul import Tile

    monkeypatch.setattr(winograd_grad, "GRAD_BYTES", 20_000)
    monkeypatch.setattr(winograd_grad, "GRAD_LEAST", least)
    x, y, w = image((2, 70, 13, 10)), image((2, 35, 13, 10)), t(35, 70, 3, 3)
    images = [Image(of.shape, of.strides) for of in (y, x, w)]
    tile = Tile(*OUTER_TILES[lanes()][0])
    calls, _ = winograd_grad.prepare_weight_grad(*images, (1, 1), tile, 4)
    made = calls(*map(Argument, range(3)))
    # what a call reads or writes: 0 the gradient, 1 the image, 2 the result; products none of them
    said = ["".join(str(w.index) for w in call.words if isinstance(w, Argument)) for call in made]
    chunk = ["1", "0", ""]
    if several == "chunks":
        count = said.count("1")
        assert count > 1 and said == chunk * count + ["2"]
    else:
        count = said.count("2")
        assert count > 1 and said == chunk[:2] + ["", "2"] * count
        size = winograd_grad.grad_block(35, 70, 4, tile)
        assert size[0] < 35 and size[1] < 70 and count == -(-35 // size[0]) * -(-70 // size[1])

    region = region_of(
        "conv_dw", [("dy", y, False), ("x", x, False)], {"shape": w.shape, "padding": 1}
    )
    found = check(region, 260)
    assert {c.knobs.get("tile") for c in found} == {None, 2, 4}


MACHINE = replace(
    CPU, units=1, peak={"f32": 137e9}, bandwidth=12e9, cache_bandwidth=48e9, cache_bytes=2**20
)


@pytest.mark.parametrize(
    ("batch", "channels", "size", "quicker"),
    [(1, 64, 56, 1.67), (4, 256, 14, 1.44), (4, 16, 56, 1.19), (1, 512, 7, 0.85)],
)
def test_price_of_the_weights_gradient_by_winograd(
    batch: int, channels: int, size: int, quicker: float
) -> None:
    """How many times as quick as the direct sum F(2×2) is, as a Xeon with AVX-512 measured it."""
    shape, w = (batch, channels, size, size), (channels, channels, 3, 3)
    inputs = [("dy", image(shape), False), ("x", image(shape), False)]
    region = region_of("conv_dw", inputs, {"shape": w, "padding": 1})
    priced: dict[int | None, float] = {}
    for candidate in ENGINE.candidates(region, MACHINE, POLICY):
        wide = candidate.knobs["vectors"] * lanes()
        assert channels >= 64 or wide <= 16, "few channels have narrow tiles"
        priced.setdefault(candidate.knobs.get("tile"), ENGINE.estimate(region, MACHINE, candidate))
    assert priced[None] / priced[2] == pytest.approx(quicker, rel=0.25)
    assert priced[4] > min(priced[None], priced[2])  # which loses bits: only a measurement


def test_threads_that_have_half_the_rows_have_half_the_work() -> None:
    """A 3×3 window spread with stride 2 reaches pixels by one, two or four taps."""
    from deuteron.kernels.cpu.conv import Image, Window, conv_rows

    two, one = (2, 2), (1, 1)
    window = Window((3, 3), two, one, one, one, spread=True)
    x = Image((1, 8, 28, 28), (6272, 1, 224, 8))
    rows = conv_rows(x, Image((1, 8, 56, 56), (25088, 1, 448, 8)), None, window)
    live = (rows.a >= 0).sum(1)
    assert 0.45 < live[: len(live) // 2].sum() / live.sum() < 0.55
    assert all(len({*tile}) < 3 for tile in (rows.a >= 0).reshape(-1, 4, 9).sum(2))


def test_each_channel_spread_by_several_filters() -> None:
    how = {"groups": 11, "transposed": True, "stride": (3, 2), "padding": 2}
    inputs = [("x", image((1, 11, 3, 8)), False), ("w", image((11, 2, 4, 3)), False)]
    found = check(region_of("conv", inputs, how), 12)
    assert {c.knobs["recipe"] for c in found} == {"depthwise"}


@pytest.mark.parametrize("groups", [1, 3])
def test_a_bias_with_gaps_between_its_numbers(groups: int) -> None:
    g, torch_ = dt.Graph(), torch.nn.functional
    x, w, b = torch.randn(2, 24, 9, 7), torch.randn(27, 24 // groups, 3, 3), torch.randn(54)[::2]
    given = {"x": x, "w": w, "b": b}
    made = [g.tensor(name, v.shape, strides=v.stride()) for name, v in given.items()]
    g.conv(*made, padding=1, groups=groups).output("y")
    plan = g.compile(device="cpu")
    assert any(
        o.candidate.engine == "cpu_kernels" for c in plan.decision.choices for o in c.options
    )
    exact = torch_.conv2d(*(v.double() for v in given.values()), padding=1, groups=groups)
    assert error(plan.run(**given)["y"], exact) < 1e-6
