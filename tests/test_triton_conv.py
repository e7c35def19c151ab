"""Convolutions with what follows them: in Triton's interpreter, compiled for GPUs that are not
there, what is refused, and how a plan takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import deuteron as dt
from deuteron.engines.triton import conv, conv_hopper, winograd
from deuteron.engines.triton.conv import as_convolution
from deuteron.engines.triton.generated import TritonGen
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.errors import EngineError, GraphError
from deuteron.ir import Region, TensorType
from deuteron.kernels.triton import launch
from deuteron.plan.choose import Survey, choose, heuristic
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launched import assert_none_spill, compiled, last, region_of
from tests.ptx import spilled

pytest.importorskip("triton")
H200 = target("h200")


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.conv_cases"), at_least=20)


@pytest.mark.sweep
def test_every_gradient_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.conv_cases", "pulled"), at_least=29)


def region(
    x: tuple[int, ...], w: tuple[int, ...], dtype: str = "f16", act: str = "silu", **how: Any
) -> Region:
    """conv + bias + activation, channels last, the weight unknown."""
    g = dt.Graph()
    y = g.conv(last(g, "x", x, dtype), last(g, "w", w, dtype), g.tensor("b", w[:1], dtype), **how)
    getattr(g, act)(y).output("y")
    return Region(g.ir(), frozenset(), 0)


SAME = region((32, 64, 56, 56), (64, 64, 3, 3), padding=1)
WINDOWS = {
    "3×3": SAME,
    "groups": region((32, 192, 28, 28), (192, 8, 3, 3), padding=1, groups=24),
    "few channels": region((8, 3, 224, 224), (64, 3, 7, 7), padding=3, stride=2),
    "depthwise": region((32, 96, 56, 56), (96, 1, 7, 7), padding=3, groups=96),
}


def block(channels: int, size: int, outs: int, scaled: bool = False) -> Region:
    """A depthwise and a pointwise convolution of MobileNet, or a scale of squeezing and exciting
    before the latter."""
    g = dt.Graph()
    x = last(g, "x", (32, channels, size, size))
    if scaled:
        made = x * last(g, "s", (32, channels, 1, 1))
    else:
        w = g.tensor("w", (channels, 1, 3, 3), "f16")
        made = g.hardswish(g.conv(x, w, padding=1, groups=channels))
    g.conv(made, last(g, "v", (outs, channels, 1, 1))).output("y")
    return Region(g.ir(), frozenset({"w", "v"} - ({"w"} if scaled else set())), 0)


MADE = {"depthwise": block(72, 56, 24), "a scale": block(672, 14, 112, scaled=True)}


@pytest.mark.parametrize(
    ("name", "arch"),
    [("depthwise", 90), *(pytest.param(n, a, marks=pytest.mark.sweep)
                          for n, a in (("depthwise", 80), ("a scale", 90), ("a scale", 80)))],
)  # fmt: skip
def test_what_a_product_reads_is_made_on_the_way_in(name, arch, monkeypatch):
    assert set(recipes(MADE[name], H200)) == {"separable"}
    kernels = compiled(MADE[name], arch, monkeypatch)
    assert_none_spill(kernels, arch)
    ptx = kernels[0].asm["ptx"]
    assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in ptx
    assert ("ld.global.v4" if name == "depthwise" else "cp.async.cg") in ptx  # 16 bytes at a time


def volume(op: str, **how: Any) -> Region:
    """A convolution over volumes, or a gradient of one."""
    x, w = (TensorType.of((2, 32, *(n,) * 3), "f16", "nhwc") for n in (8, 3))
    y = region_of("conv", x, w, **how).graph
    dy = y.types[y.outputs[0][1]]
    given = {"conv": (x, w), "conv_dx": (dy, w), "conv_dw": (dy, x)}[op]
    shape = {} if op == "conv" else {"shape": (x if op == "conv_dx" else w).shape}
    return region_of(op, *given, **shape, **how)


VOLUME = volume("conv", padding=1)


@pytest.mark.parametrize(
    ("op", "arch"),
    [("conv", 90), *(pytest.param(op, arch, marks=pytest.mark.sweep)
                     for op in ("conv", "conv_dx", "conv_dw") for arch in (80, 90)
                     if (op, arch) != ("conv", 90))],
)  # fmt: skip
def test_volumes_compile_without_spills(op, arch, monkeypatch):
    kernels = compiled(volume(op, padding=1, stride=2), arch, monkeypatch)
    assert_none_spill(kernels, arch)
    assert "mma" in kernels[0].asm["ptx"]


@pytest.mark.parametrize("channels", [64, pytest.param(3, marks=pytest.mark.sweep)])
def test_floats_of_8_bits_compile_without_spills(channels, monkeypatch):
    """With scale, relu, and the way back to 8 bits."""
    x, w = (
        TensorType.of(s, "f8e4m3", "nhwc") for s in ((8, channels, 28, 28), (64, channels, 3, 3))
    )
    g = dt.Graph()
    x, w = (g.tensor(n, t.shape, t.dtype, strides=t.strides) for n, t in (("x", x), ("w", w)))
    y = g.relu(g.conv(x, w, padding=1) * g.tensor("s", (64, 1, 1)))
    g.cast(g.clamp(y, min=-448.0, max=448.0), dtype="f8e4m3").output("y")
    whole = Region(g.ir(), frozenset({"w"}), 0)
    kernels = compiled(whole, 90, monkeypatch)
    assert_none_spill(kernels, 90)
    assert "e4m3" in kernels[-1].asm["ptx"] and "wgmma" in kernels[-1].asm["ptx"]
    older = TritonKernels().refuse(whole, target("a100"), Policy())
    assert older is not None and "multiplies no floats of 8 bits" in older.reason


def test_volumes_lie_channels_last_where_the_policy_says_so():
    g = dt.Graph()
    x, w = g.tensor("x", (2, 16, 8, 8, 8), "f16"), g.tensor("w", (32, 16, 3, 3, 3), "f16")
    g.relu(g.conv(x, w, padding=1)).output("y")
    for layout, order in (("auto", "contiguous"), ("nhwc", "nhwc")):
        policy = Policy(layout=layout)
        made = decide(g.ir(), H200, policy)
        (chosen,) = (c for c in made.choices if "conv" in c.region.ops)
        assert chosen.region.graph.types[chosen.region.outputs[0]].is_layout(order)
        ours = TritonKernels().refuse(chosen.region, H200, policy)
        assert ours is None if layout == "nhwc" else "layout='nhwc'" in ours.remedy


def recipes(whole: Region, machine: Any, **policy: Any) -> list[str]:
    offered = TritonKernels().candidates(whole, machine, Policy(**policy))
    return [str(c.knobs["recipe"]) for c in offered]


OFTEN = [("3×3", 90), ("groups", 80)]
OTHERS = [(name, arch) for name in WINDOWS for arch in (80, 90) if (name, arch) not in OFTEN]


@pytest.mark.parametrize(
    ("name", "arch"), [*OFTEN, *(pytest.param(*o, marks=pytest.mark.sweep) for o in OTHERS)]
)
def test_compiles_without_spills(name, arch, monkeypatch):
    kernels = compiled(WINDOWS[name], arch, monkeypatch, most=1)
    assert_none_spill(kernels, arch)
    ptx = kernels[-1].asm["ptx"]
    if name == "depthwise":
        assert "mma" not in ptx and "ld.global" in ptx
    else:
        assert ("wgmma.mma_async" if arch == 90 else "mma.sync") in ptx
    if name != "depthwise":  # pixels are copied by 16 bytes, ahead of their use
        assert "cp.async.cg" in ptx


@pytest.mark.sweep  # test_conv_batch_norm.py compiles the same kernel with statistics, in every run
@pytest.mark.parametrize("halo", [True, False])
def test_warps_divide_the_work_on_hopper(halo, monkeypatch):
    monkeypatch.setattr(TritonKernels, "every", (conv_hopper.CONV_HOPPER,))
    monkeypatch.setattr(conv_hopper, "tilings", lambda: [conv_hopper.Tiling(2, 8, 8, 64, halo)])
    kernels = compiled(SAME, 90, monkeypatch)
    assert_none_spill(kernels, 90)
    ptx = kernels[0].asm["ptx"]
    assert "cp.async.bulk.tensor.4d" in ptx and "wgmma.mma_async" in ptx and "setmaxnreg" in ptx


@pytest.mark.sweep
def test_windows_that_lie_apart_on_hopper(monkeypatch):
    apart = region((32, 128, 28, 28), (128, 128, 3, 3), padding=1, stride=2)
    monkeypatch.setattr(TritonKernels, "every", (conv_hopper.CONV_HOPPER,))
    kernels = compiled(apart, 90, monkeypatch)
    assert_none_spill(kernels, 90)
    assert "cp.async.bulk.tensor.5d" in kernels[0].asm["ptx"]


def test_rows_of_windows_are_read_as_pixels_on_hopper(monkeypatch):
    """Where there are few channels: 7 pixels of 4 numbers, which begin at every second one."""
    first = region((32, 3, 224, 224), (64, 3, 7, 7), padding=3, stride=2)
    monkeypatch.setattr(TritonKernels, "every", (conv_hopper.CONV_HOPPER,))
    read = conv_hopper._read(as_convolution(first))
    assert (read.channels, read.line, read.taps, read.steps) == (28, 8, (7, 1), 32)
    assert read.row >= 111 * 8 + 28 and read.row % 8 == 0
    w = torch.randn(64, 3, 7, 7)
    made = read.weight(w)
    assert made.shape == (64, 7, 32) and not made[..., 28:].any()
    assert torch.equal(made[..., :28].unflatten(-1, (7, 4))[..., :3].movedim(-1, 1), w)
    kernels = compiled(first, 90, monkeypatch)
    assert spilled(kernels[1], 90) <= 128  # by the warp that brings rows, which has few registers
    assert "cp.async.bulk.tensor.5d" in kernels[1].asm["ptx"]
    dilated = region((32, 3, 64, 64), (64, 3, 3, 3), padding=2, dilation=2)
    assert "no pixel of few channels" in str(
        conv_hopper.CONV_HOPPER.refuse(dilated, H200, Policy())
    )


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.sweep)])
def test_groups_that_are_taken_together_compile_without_spills(arch, monkeypatch):
    """With what multiplies them again one by one."""
    known = Region(WINDOWS["groups"].graph, frozenset({"w"}), 0)
    assert as_convolution(known).together > 1
    assert_none_spill(compiled(known, arch, monkeypatch, most=1), arch)


def test_who_takes_what():
    assert set(recipes(SAME, H200)) == {"conv", "conv_hopper"}
    assert set(recipes(SAME, target("a100"))) == {"conv"}
    assert set(recipes(WINDOWS["groups"], H200)) == {"conv"}
    known = Region(WINDOWS["groups"].graph, frozenset({"w"}), 0)
    assert set(recipes(known, H200)) == {"conv"}
    assert set(recipes(WINDOWS["depthwise"], H200)) == {"depthwise"}
    pixel = region((32, 64, 56, 56), (256, 64, 1, 1))
    assert recipes(pixel, H200)[0] == "product" and "conv_hopper" not in recipes(pixel, H200)
    strided = region((32, 64, 56, 56), (256, 64, 1, 1), stride=2)
    assert set(recipes(strided, H200)) == {"conv"}
    apart = region((32, 64, 56, 56), (64, 64, 3, 3), padding=1, stride=2)
    assert set(recipes(apart, H200)) == {"conv", "conv_hopper"}
    odd = region((32, 64, 55, 56), (64, 64, 3, 3), padding=1, stride=2)
    assert set(recipes(odd, H200)) == {"conv"}


def test_winograd_where_its_error_is_welcome():
    exact = region((8, 64, 56, 56), (64, 64, 3, 3), "f32", padding=1)
    exact, short = (Region(r.graph, frozenset({"w"}), 0) for r in (exact, SAME))

    def tiles(whole: Region, **policy: Any) -> list[int]:
        offered = TritonKernels().candidates(whole, H200, Policy(**policy))
        return [c.knobs["tile"] for c in offered if c.knobs["recipe"] == "winograd"]

    assert sorted(tiles(exact)) == [2, 4] and tiles(exact, max_error=1e-6) == []
    assert tiles(short) == [] and tiles(short, max_error=2e-3) == [2]
    assert sorted(tiles(short, max_error=1e-2)) == [2, 4]
    assert tiles(exact, float32="tf32") == []
    assert winograd._share(SAME, {"tile": 4}) == 0.25


def test_what_is_refused_of_whole_numbers():
    def why(kind: str, last: str = "clamp", known: bool = True) -> str:
        g = dt.Graph()
        t = torch.empty((2, 32, 8, 8), device="meta").contiguous(memory_format=torch.channels_last)
        x = g.tensor("x", t.shape, kind, strides=t.stride())
        w = g.tensor("w", (16, 32, 1, 1), "i8", strides=(32, 1, 32, 32))
        y = g.cast(g.conv_integer(x, w), dtype="f32")
        ends = {"clamp": lambda: g.clamp(y, min=-128.0, max=127.0), "div": lambda: y / 3.0}
        y = ends.get(last, lambda: y)()
        g.cast(y, dtype="f16" if last == "div" else "i8").output("y")
        whole = Region(g.ir(), frozenset({"w"} if known else ()), 0)
        refusal = TritonKernels().refuse(whole, H200, Policy())
        return "" if refusal is None else refusal.reason

    assert why("i8") == why("u8") == ""
    assert "divides otherwise" in why("i8", "div")
    assert "the result is of i8" in why("i8", "raw")
    assert "is an input of the plan" in why("i8", known=False)


def test_what_is_refused():
    def why(whole: Region, machine: Any = H200, **policy: Any) -> str:
        refusal = TritonKernels().refuse(whole, machine, Policy(**policy))
        return "" if refusal is None else refusal.reason

    single = region((2, 64, 8, 8), (64, 64, 3, 3), "f32", padding=1)
    assert "as tf32 only" in why(single) and why(single, float32="tf32") == ""
    g = dt.Graph()
    x, w = g.tensor("x", (2, 64, 8, 8), "f16"), g.tensor("w", (64, 64, 3, 3), "f16")
    g.conv(x, w, padding=1).output("y")
    assert "the input is not in nhwc" in why(Region(g.ir(), frozenset(), 0))
    volume = region_of("conv", *(TensorType.of((2, 8, 4, 4, 4), "f16"),) * 2)
    assert "the input is not in nhwc" in why(volume)
    assert why(VOLUME) == "" and set(recipes(VOLUME, H200)) == {"conv"}
    assert "a size is 0" in why(region((0, 64, 8, 8), (64, 64, 3, 3)))


def gradient(op: str, x: Any, w: Any, dtype: str = "bf16", **how: Any) -> Region:
    """Of a convolution, for its input or its weight, by itself."""
    images = TensorType.of(x, dtype, "nhwc"), TensorType.of(w, dtype, "nhwc")
    y = region_of("conv", *images, **how).graph
    dy, of_input = y.types[y.outputs[0][1]], op == "conv_dx"
    return region_of(op, dy, images[of_input], shape=(w, x)[of_input], **how)


def test_windows_of_many_taps_are_generated_only_where_they_have_no_kernel():
    """Written out they take seconds to compile, and ran no faster."""

    def is_generated(whole: Region) -> bool:
        return TritonGen().refuse(whole, H200, Policy()) is None

    shape = (8, 32, 28, 28)
    for taps, generated in ((5, True), (7, False)):
        how: dict[str, Any] = {"padding": taps // 2, "groups": 32}
        assert is_generated(region(shape, (32, 1, taps, taps), **how)) == generated
        assert is_generated(region(shape, (64, 1, taps, taps), **how))  # several results a channel
        assert is_generated(gradient("conv_dx", shape, (32, 1, taps, taps), **how, stride=2))
    known = region(shape, (32, 1, 7, 7), padding=3, groups=32)
    chosen = heuristic(Survey(H200, Policy()))(known)
    assert chosen.candidate.knobs["recipe"] == "depthwise"


def test_who_takes_gradients():
    def names(whole: Region, gpu: str = "h200") -> set[str]:
        return set(recipes(whole, target(gpu)))

    same = ((32, 64, 56, 56), (64, 64, 3, 3))
    assert names(gradient("conv_dx", *same, padding=1)) == {"conv", "conv_hopper"}
    assert names(gradient("conv_dx", *same, padding=1), "a100") == {"conv"}
    assert names(gradient("conv_dx", *same, padding=1, stride=2)) == {"conv"}
    assert names(gradient("conv_dw", *same, padding=1)) == {"conv_grad", "conv_grad_hopper"}
    assert names(gradient("conv_dw", *same, padding=1, stride=2)) == {"conv_grad"}
    pixel = ((32, 64, 56, 56), (256, 64, 1, 1))
    assert names(gradient("conv_dx", *pixel)) == {"product", "conv"}
    assert names(gradient("conv_dw", *pixel)) == {"product", "conv_grad"}
    alone = ((32, 96, 56, 56), (96, 1, 7, 7))
    assert names(gradient("conv_dw", *alone, padding=3, groups=96)) == {"depthwise_grad"}
    assert names(gradient("conv_dx", *alone, padding=3, groups=96)) == {"depthwise"}
    small = gradient("conv_dx", (32, 96, 56, 56), (96, 1, 3, 3), padding=1, groups=96)
    assert names(small) == set() and TritonGen().refuse(small, H200, Policy()) is None
    plain = gradient("conv_dw", *same, dtype="f32", padding=1)
    assert names(plain) == set() and recipes(plain, H200, float32="tf32") != []


PULLED = {
    "weight": ("conv_dw", (32, 64, 14, 14), (64, 64, 3, 3), {"padding": 1}),
    "input": ("conv_dx", (32, 64, 56, 56), (64, 64, 3, 3), {"padding": 1}),
    "input, two apart": ("conv_dx", (8, 128, 28, 28), (128, 128, 3, 3),
                         {"padding": 1, "stride": 2}),
    "weight of 128": ("conv_dw", (32, 128, 28, 28), (128, 128, 3, 3), {"padding": 1}),
    "weight, far apart": ("conv_dw", (4, 512, 64, 64), (256, 512, 3, 3),
                          {"padding": 24, "dilation": 24}),
    "weight, one pixel": ("conv_dw", (32, 64, 28, 28), (256, 64, 1, 1), {}),
    "weight, few channels": ("conv_dw", (8, 3, 112, 112), (64, 3, 7, 7),
                             {"padding": 3, "stride": 2}),
    "weight, alone": ("conv_dw", (8, 72, 28, 28), (72, 1, 3, 3), {"padding": 1, "groups": 72}),
    "weight, alone, two apart": ("conv_dw", (8, 72, 28, 28), (72, 1, 5, 5),
                                 {"padding": 2, "groups": 72, "stride": 2}),
}  # fmt: skip
SWEPT = [(n, arch) for n in PULLED for arch in (80, 90) if (n, arch) != ("weight", 80)]


@pytest.mark.parametrize(
    ("name", "arch"), [("weight", 80), *(pytest.param(*s, marks=pytest.mark.sweep) for s in SWEPT)]
)
def test_gradients_compile_without_spills(name, arch, monkeypatch):
    """All that is offered; on Hopper with warps that divide the work."""
    op, x, w, how = PULLED[name]
    whole = gradient(op, x, w, **how)
    assert_none_spill(compiled(whole, arch, monkeypatch, most=1 if arch == 80 else 9), arch)


def test_taps_that_see_nothing_are_left_out_of_a_weights_gradient():
    """Where taps are far apart, each has a program of its own; else those of a column share one."""

    def offers(size: int, far: int) -> list[tuple[float, Any]]:
        how = {"padding": far, "dilation": far}
        whole = gradient("conv_dw", (16, 256, size, size), (256, 256, 3, 3), **how)
        options, _ = Survey(H200, Policy(engines="triton_kernels/conv_grad_hopper")).ask(whole)
        return [(o.predicted_s, o.candidate.knobs) for o in options if not o.rejected]

    near, *_ = offers(64, 1)
    (seconds, far), *_ = offers(64, 36)
    assert near[1]["halo"] and not far["halo"] and seconds < 0.75 * near[0]


def test_a_librarys_gradients_are_priced_by_their_work():
    """A weight's gradient is few tiles, but a long sum, which libraries share out as well; and what
    no channel shares runs on vector units."""

    def price(op: str, w: tuple[int, ...], **how: Any) -> float:
        whole = gradient(op, (128, 64, 56, 56), w, padding=1, **how)
        options, _ = Survey(H200, Policy(engines="torch")).ask(whole)
        return min(o.predicted_s for o in options if not o.rejected)

    whole, alone = (64, 64, 3, 3), (64, 1, 3, 3)
    assert price("conv_dx", whole) / 3 < price("conv_dw", whole) < 3 * price("conv_dx", whole)
    for op in ("conv_dx", "conv_dw"):
        assert 0.3 * price(op, whole) < price(op, alone, groups=64)


def test_sums_of_many_pixels_are_shared_out():
    work = gradient("conv_dw", (128, 64, 56, 56), (256, 64, 1, 1))
    offered = TritonKernels().candidates(work, H200, Policy())
    assert max(int(c.knobs["parts"]) for c in offered if c.knobs["recipe"] == "product") > 16


def test_few_channels_are_widened_and_groups_taken_together():
    work = conv.as_convolution(WINDOWS["groups"])
    assert work.together == 1  # its weight is not known ahead
    known = Region(WINDOWS["groups"].graph, frozenset({"w"}), 0)
    assert conv.as_convolution(known).together == 4
    first, back = WINDOWS["few channels"], ("conv_dw", *PULLED["weight, few channels"][1:3])
    known = Region(first.graph, frozenset({"w"}), 0)
    for whole in (first, known, gradient(*back, padding=3, stride=2)):
        offered = TritonKernels().candidates(whole, H200, Policy())
        widened = [c.knobs["widened"] for c in offered if "widened" in c.knobs]
        assert widened == [True, True, False, False]


@pytest.mark.parametrize(("taps", "kernels"), [(1, 1), (3, 2)])
def test_windows_of_one_pixel_share_kernels(taps, kernels, monkeypatch):
    """Whatever the sizes are. With larger windows a kernel has to know its channels."""
    keys = set()

    def told(source: Any, options: Any, target: Any) -> None:
        keys.add(f"{source.hash()} {sorted(options.items())}")

    monkeypatch.setattr(launch, "compile_triton", told)
    for channels, outs, size in ((240, 40, 14), (232, 56, 15)):
        x, w = torch.empty(32, channels, size, size), torch.empty(outs, channels, taps, taps)
        given = [t.half().to(memory_format=torch.channels_last) for t in (x, w)]
        region = region_of("conv", *given, padding=taps // 2)
        tile = {"recipe": "conv", "rows": 64, "columns": 64, "parts": 1}
        compiled(region, 90, monkeypatch, **tile)
    assert len(keys) == kernels


def test_plans_by_estimate_leave_convolutions_to_libraries():
    survey = Survey(H200, Policy())
    chosen = choose(SAME, heuristic(survey), survey)
    assert "triton_kernels" not in {c.candidate.engine for c in chosen}


def test_engines_and_their_kernels_can_be_named_and_left_out():
    def taken(*names: str) -> set[str]:
        options, _ = Survey(H200, Policy(engines=names)).ask(SAME)
        return {str(o.candidate.knobs.get("recipe", "")) for o in options if not o.rejected}

    assert taken("torch") == {""}
    assert taken("-triton_kernels") & {"conv", "conv_hopper"} == set()
    assert taken("-triton_kernels/conv_hopper") >= {"conv"}
    assert taken("triton_kernels/conv_hopper") == {"conv_hopper"}
    with pytest.raises(EngineError, match="names 'triton_kernel'"):
        Survey(H200, Policy(engines="triton_kernel"))
    with pytest.raises(GraphError, match="are no names"):
        Policy(engines=())
    assert Policy.from_dict(Policy(engines="torch").as_dict()) == Policy(engines=("torch",))


def test_taps_beside_the_image_are_left_out():
    """Of a window whose taps lie 12 apart, over images of 16 pixels."""
    assert conv_hopper.live_tiles(16, 16, 4, 3, 12, 12) == 6 < 12
