"""Bad inputs of the products, convolutions, poolings and resamplings: each is refused with a
GraphError that names the fault. And what those operators promise beside their values: memory
order, arithmetic, and gradients in the type of their inputs."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir import GraphBuilder, TensorType, check
from deuteron.ir.text import parse_type
from deuteron.ir.types import same_strides, strides_for
from deuteron.ops import FAMILIES, TABLE, infer
from deuteron.ops.evaluate import evaluate
from deuteron.passes.differentiate import differentiate

OPS = [op for family in ("matmul", "conv", "pool", "resample") for op in FAMILIES[family]]

IMAGE, KERNEL = "f32[2,4,6,6]", "f32[8,4,3,3]"
BACK = "f32[2,8,4,4]"  # the gradient of conv(IMAGE, KERNEL)
UP, TWO = {"transposed": True}, {"kernel": 2}

BAD = [
    # operator, input types, attributes, what the message must name
    ("matmul", "f32[3,4] f32[5,6]", {}, "inner sizes"),
    ("matmul", "f32[3,4] f32[3]", {}, "has 3 rows"),
    ("matmul", "f32[2,3,4] f32[5,4,6]", {}, "do not broadcast"),
    ("matmul", "f32[] f32[4]", {}, "x is a scalar"),
    ("matmul", "f32[4,4] f32[]", {}, "y is a scalar"),
    ("matmul", "f32[3,4] f16[4,5]", {}, "y is float16"),
    ("matmul", "bool[3,4] bool[4,5]", {}, "not defined on bool"),
    ("matmul", "f8e4m3[3,4] f8e5m2[4,5]", {}, "float8_e5m2"),
    ("matmul", "f32[3,4]", {}, "1 given"),
    ("linear", "f32[3,4] f32[5,6]", {}, "takes 6"),
    ("linear", "f32[] f32[5,1]", {}, "rank 1 or more"),
    ("linear", "f32[3,4] f32[4]", {}, "weight [out, in]"),
    ("linear", "f32[3,4] f32[5,4] f32[4]", {}, "not [5]"),
    ("linear", "f32[3,4] f32[5,4] f16[5]", {}, "bias is float16"),
    ("conv", "f32[4,6,6] f32[8,4,3,3]", {}, "differ in rank"),
    ("conv", "f32[6,6] f32[3,3]", {}, "rank 3 to 5"),
    ("conv", f"{IMAGE} f32[8,3,3,3]", {}, "takes 3"),
    ("conv", f"{IMAGE} {KERNEL}", {"groups": 2}, "groups=2 takes 8"),
    ("conv", f"{IMAGE} f32[7,2,3,3]", {"groups": 2}, "groups=2 does not divide"),
    ("conv", f"{IMAGE} {KERNEL}", {"groups": 0}, "groups=(0,)"),
    ("conv", f"{IMAGE} {KERNEL} f32[4]", {}, "not [8]"),
    ("conv", f"{IMAGE} f16[8,4,3,3]", {}, "weight is float16"),
    ("conv", "i32[2,4,6,6] i32[8,4,3,3]", {}, "not defined on int32"),
    ("conv", f"{IMAGE} {KERNEL}", {"stride": 0}, "stride=(0, 0)"),
    ("conv", f"{IMAGE} {KERNEL}", {"stride": (1, 1, 1)}, "3 entries for 2"),
    ("conv", f"{IMAGE} {KERNEL}", {"padding": -1}, "padding=(-1, -1)"),
    ("conv", f"{IMAGE} {KERNEL}", {"padding": "same"}, "not of kind ints"),
    ("conv", f"{IMAGE} {KERNEL}", {"dilation": 4}, "too small for weight"),
    ("conv", f"{IMAGE} {KERNEL}", {"output_padding": 1}, "without transposed"),
    ("conv", "f32[2,4,0,6] f32[8,4,3,3]", {"padding": 3}, "too small for weight"),
    ("conv", "f32[2,0,6,6] f32[8,0,3,3]", {}, "weight_shape=(8, 0, 3, 3)"),
    ("conv", f"{IMAGE} f32[8,4,3,3]", UP, "takes 8"),
    ("conv", f"{IMAGE} f32[4,8,3,3]", {**UP, "output_padding": 1}, "not below stride"),
    ("conv", "f32[2,4,2,2] f32[4,8,3,3]", {**UP, "padding": 2}, "too small for weight"),
    ("conv_dx", f"{BACK} {KERNEL}", {"shape": (2, 4, 7, 7)}, "forward result [2, 8, 5, 5]"),
    ("conv_dx", f"{BACK} {KERNEL}", {"shape": (2, 4, 6)}, "differ in rank"),
    ("conv_dx", f"{BACK} f64[8,4,3,3]", {"shape": (2, 4, 6, 6)}, "weight is float64"),
    ("conv_dx", f"{BACK} {KERNEL}", {}, "needs the attribute 'shape'"),
    ("conv_dw", f"{BACK} {IMAGE}", {"shape": (8, 4, 2, 2)}, "forward result [2, 8, 5, 5]"),
    ("conv_dw", f"{BACK} f16[2,4,6,6]", {"shape": (8, 4, 3, 3)}, "x is float16"),
    ("conv_dw", f"f32[8,4] {IMAGE}", {"shape": (8, 4, 3, 3)}, "rank 3 to 5"),
    ("max_pool", "f32[4,6]", TWO, "rank 3 to 5"),
    ("max_pool", IMAGE, {}, "needs the attribute 'kernel'"),
    ("max_pool", IMAGE, {"kernel": (2, 2, 2)}, "3 entries for 2"),
    ("max_pool", IMAGE, {"kernel": 0}, "kernel=(0, 0)"),
    ("max_pool", IMAGE, {"kernel": 7}, "does not fit into x"),
    ("max_pool", IMAGE, {"kernel": 3, "padding": 2}, "more than half"),
    ("max_pool", IMAGE, {"kernel": 2, "stride": -1}, "stride=(-1, -1)"),
    ("max_pool", "f32[2,0,6,6]", TWO, "empty beside the batch"),
    ("max_pool", "i64[2,4,6,6]", TWO, "not defined on int64"),
    ("max_pool_with_indices", IMAGE, {"kernel": 2, "dilation": 6}, "does not fit into x"),
    ("max_pool_grad", f"{IMAGE} {IMAGE}", TWO, "forward result [2, 4, 3, 3]"),
    ("max_pool_grad", f"f16[2,4,3,3] {IMAGE}", TWO, "x is float32"),
    ("avg_pool", IMAGE, {"kernel": 2, "divisor": 0}, "divisor=0"),
    ("avg_pool", IMAGE, {"kernel": 2, "dilation": 2}, "no attribute 'dilation'"),
    ("avg_pool", "bool[2,4,6,6]", TWO, "not defined on bool"),
    ("avg_pool_grad", IMAGE, {"shape": (2, 4, 6, 6), **TWO}, "forward result [2, 4, 3, 3]"),
    ("avg_pool_grad", IMAGE, {"shape": (2, 4, 6), **TWO}, "differ in rank"),
    ("adaptive_avg_pool", IMAGE, {"size": (2, 2, 2)}, "size=(2, 2, 2)"),
    ("adaptive_avg_pool", IMAGE, {"size": 0}, "size=(0, 0)"),
    ("adaptive_avg_pool", IMAGE, {"size": "all"}, "size='all'"),
    ("adaptive_avg_pool", "f32[2,4,0,6]", {"size": 2}, "empty beside the batch"),
    ("adaptive_avg_pool_grad", IMAGE, {"shape": (2, 5, 9, 9)}, "forward result [2, 5, 6, 6]"),
    ("adaptive_max_pool", IMAGE, {"size": (2.5, 2)}, "size=(2.5, 2)"),
    ("adaptive_max_pool", "i32[2,4,6,6]", {"size": 2}, "not defined on int32"),
    ("adaptive_max_pool_with_indices", "f32[4,6]", {"size": 2}, "rank 3 to 5"),
    ("adaptive_max_pool_grad", f"{IMAGE} {IMAGE}", {"size": 2}, "forward result [2, 4, 2, 2]"),
    ("resize", IMAGE, {}, "needs size or scale"),
    ("resize", IMAGE, {"size": 8, "mode": "cubic"}, "mode='cubic'"),
    ("resize", IMAGE, {"size": 8, "mode": "linear"}, "mode 'linear' does not resize 2"),
    ("resize", "f32[2,4,6]", {"size": 8, "mode": "bicubic"}, "does not resize 1"),
    ("resize", IMAGE, {"size": 0}, "size=(0, 0)"),
    ("resize", IMAGE, {"size": (8, 8, 8)}, "3 entries for 2"),
    ("resize", IMAGE, {"size": 8, "scale": 2}, "into (12, 12), not (8, 8)"),
    ("resize", IMAGE, {"scale": (2.0, 2.0, 2.0)}, "not 2 positive numbers"),
    ("resize", IMAGE, {"scale": -1.0}, "not 2 positive numbers"),
    ("resize", IMAGE, {"scale": "2"}, "scale='2'"),
    ("resize", IMAGE, {"scale": 0.1}, "size=(0, 0)"),
    ("resize", IMAGE, {"size": 8, "align_corners": True}, "align_corners has no meaning"),
    ("resize", IMAGE, {"size": 8, "antialias": True}, "antialias has no meaning"),
    ("resize", "f32[4,6]", {"size": 8}, "rank 3 to 5"),
    ("resize", "i32[2,4,6,6]", {"size": 8}, "not defined on int32"),
    ("resize", "f32[2,0,6,6]", {"size": 8}, "shape_beside_batch=(0, 6, 6)"),
    ("resize_grad", IMAGE, {"shape": (2, 5, 3, 3)}, "does not fit the gradient"),
    ("resize_grad", IMAGE, {"shape": (2, 4, 3)}, "does not fit the gradient"),
    ("resize_grad", IMAGE, {"shape": (2, 4, 2, 2), "scale": 2}, "into (4, 4), not (6, 6)"),
    ("resize_grad", IMAGE, {"shape": (2, 4, 3, 3), "mode": "area"}, "mode='area'"),
    ("pixel_shuffle", IMAGE, {"factor": 3}, "4 channels are not a multiple of 3²"),
    ("pixel_shuffle", IMAGE, {"factor": 0}, "factor=(0,)"),
    ("pixel_shuffle", "f32[4,6]", {"factor": 2}, "[..., C, H, W]"),
    ("pixel_unshuffle", IMAGE, {"factor": 4}, "height 6 and width 6"),
    ("pixel_unshuffle", IMAGE, {}, "needs the attribute 'factor'"),
    ("grid_sample", f"{IMAGE} f32[2,3,3,3]", {}, "grid [2, 3, 3, 3] does not fit"),
    ("grid_sample", f"{IMAGE} f32[1,3,3,2]", {}, "grid [1, 3, 3, 2] does not fit"),
    ("grid_sample", "f32[2,4,6] f32[2,3,1]", {}, "does not fit x [2, 4, 6]"),
    ("grid_sample", f"{IMAGE} f16[2,3,3,2]", {}, "grid is float16"),
    ("grid_sample", f"{IMAGE} f32[2,3,3,2]", {"padding_mode": "wrap"}, "padding_mode='wrap'"),
    ("grid_sample", "f32[2,4,0,6] f32[2,3,3,2]", {}, "spatial_shape_of_x=(0, 6)"),
    ("grid_sample", "f32[1,2,3,3,3] f32[1,2,2,2,3]", {"mode": "bicubic"}, "not volumes"),
    ("grid_sample_grad", f"{IMAGE} {IMAGE} f32[2,3,3,2]", {}, "forward result [2, 4, 3, 3]"),
    ("grid_sample_grad", f"f16[2,4,3,3] {IMAGE} f32[2,3,3,2]", {}, "x is float32"),
]


@pytest.mark.parametrize(
    ("op", "types", "attrs", "names"), BAD, ids=[f"{b[0]}-{b[1]}-{b[2]}" for b in BAD]
)
def test_bad_input_is_refused_by_name(op, types, attrs, names):
    with pytest.raises(GraphError) as caught:
        infer(op, [parse_type(t) for t in types.split()], attrs)
    assert names in caught.value.wrong
    assert caught.value.remedy


def test_every_operator_here_refuses_something():
    assert {op.name for op in OPS} == {row[0] for row in BAD}


@pytest.mark.parametrize("op", [op for op in OPS if op.vjp], ids=lambda op: op.name)
def test_gradients_of_16_bit_inputs_are_16_bit(op):
    for sample in op.samples():
        tensors = sample.tensors("f16")
        if not sample.grad or not all(t is None or t.is_floating_point() for t in tensors):
            continue
        build = GraphBuilder(infer, op.name)
        ins = [
            None if t is None else build.input(f"x{i}", TensorType.from_tensor(t))
            for i, t in enumerate(tensors)
        ]
        build.output("y", build.emit(op.name, ins, sample.attrs)[0])
        back = differentiate(build.finish(), "y", build.inputs)
        check(back, infer)
        for name, value in back.outputs:
            if name.startswith("grad_"):
                expected = back.types[name.removeprefix("grad_")]
                assert (back.types[value].shape, back.types[value].dtype.short) == (
                    expected.shape,
                    "f16",
                )


# ---- memory order: PyTorch's own, not only what the references make of it -----------------------

PLAIN = [
    # operator, attributes, the plain call
    ("max_pool", {"kernel": 2}, lambda x: F.max_pool2d(x, 2)),
    ("avg_pool", {"kernel": 2}, lambda x: F.avg_pool2d(x, 2)),
    ("adaptive_avg_pool", {"size": (2, 1)}, lambda x: F.adaptive_avg_pool2d(x, (2, 1))),
    ("adaptive_max_pool", {"size": 2}, lambda x: F.adaptive_max_pool2d(x, 2)),
    ("resize", {"size": (3, 5)}, lambda x: F.interpolate(x, (3, 5))),
    (
        "resize",
        {"size": (3, 5), "mode": "bilinear"},
        lambda x: F.interpolate(x, (3, 5), mode="bilinear"),
    ),
    ("pixel_unshuffle", {"factor": 2}, lambda x: F.pixel_unshuffle(x, 2)),
]


def laid_out(shape, order):
    """A tensor whose dimensions lie in memory in the given order, outermost first."""
    dense = torch.randn([shape[dim] for dim in order])
    return dense.permute([order.index(dim) for dim in range(len(shape))])


@pytest.mark.parametrize(("op", "attrs", "plain"), PLAIN, ids=[f"{p[0]}-{p[1]}" for p in PLAIN])
def test_memory_order_is_what_torch_chooses(op, attrs, plain):
    for shape in ((2, 3, 4, 4), (2, 1, 4, 4), (1, 1, 4, 4), (1, 3, 4, 2)):
        for order in itertools.permutations(range(4)):
            x = laid_out(shape, order)
            _, (said,) = infer(op, [TensorType.from_tensor(x)], attrs)
            with torch.no_grad():
                got = plain(x)
            assert said.shape == tuple(got.shape)
            assert same_strides(said.shape, said.strides, tuple(got.stride())), (shape, order)


@pytest.mark.parametrize("transposed", [False, True])
def test_memory_order_of_conv_is_what_torch_chooses(transposed):
    call = F.conv_transpose2d if transposed else F.conv2d
    shapes = (2, 3, 4, 4), (2, 1, 4, 4)
    orders = (0, 1, 2, 3), (0, 2, 3, 1), (0, 1, 3, 2), (1, 0, 2, 3)
    for shape, x_order, w_order in itertools.product(shapes, orders, orders):
        x, weight = laid_out(shape, x_order), laid_out((shape[1], shape[1], 2, 2), w_order)
        types = [TensorType.from_tensor(x), TensorType.from_tensor(weight)]
        _, (said,) = infer("conv", types, {"transposed": transposed})
        with torch.no_grad():
            got = call(x, weight)
        assert same_strides(said.shape, said.strides, tuple(got.stride())), (x_order, w_order)


def test_one_row_of_nwc_stays_nwc_only_where_torch_keeps_it():
    x = torch.empty_strided((2, 3, 8), strides_for((2, 3, 8), "nhwc")).normal_()
    for op, attrs, plain in (
        ("max_pool", {"kernel": 2}, lambda: F.max_pool1d(x, 2)),
        ("avg_pool", {"kernel": 2}, lambda: F.avg_pool1d(x, 2)),
        ("resize", {"size": 5}, lambda: F.interpolate(x, 5)),
    ):
        _, (said,) = infer(op, [TensorType.from_tensor(x)], attrs)
        assert same_strides(said.shape, said.strides, tuple(plain().stride())), op


# ---- arithmetic and values ----------------------------------------------------------------------

FLOPS = [
    ("matmul", "f32[7,3,4] f32[4,5]", {}, 2 * 7 * 3 * 4 * 5),
    ("linear", "f32[7,3,4] f32[5,4] f32[5]", {}, 2 * 7 * 3 * 4 * 5),
    ("conv", f"{IMAGE} {KERNEL}", {}, 2 * 2 * 8 * 4 * 4 * 4 * 9),
    ("conv", f"{IMAGE} f32[8,2,3,3]", {"groups": 2, "padding": 1}, 2 * 2 * 8 * 36 * 2 * 9),
    ("conv", f"{IMAGE} f32[4,3,2,2]", {**UP, "groups": 2, "stride": 2}, 2 * 2 * 4 * 36 * 3 * 4),
    ("conv_dx", f"{BACK} {KERNEL}", {"shape": (2, 4, 6, 6)}, 2 * 2 * 8 * 4 * 4 * 4 * 9),
    ("conv_dw", f"{BACK} {IMAGE}", {"shape": (8, 4, 3, 3)}, 2 * 2 * 8 * 4 * 4 * 4 * 9),
    (
        "conv_dx",
        "f32[2,6,12,12] f32[4,3,2,2]",
        {"shape": (2, 4, 6, 6), **UP, "groups": 2, "stride": 2},
        2 * 2 * 4 * 36 * 3 * 4,
    ),
    ("max_pool", IMAGE, {"kernel": 3, "stride": 1}, 2 * 4 * 16 * 9),
    ("avg_pool_grad", "f32[2,4,3,3]", {"kernel": 2, "shape": (2, 4, 6, 6)}, 2 * 4 * 9 * 4),
    ("adaptive_avg_pool", IMAGE, {"size": 1}, 2 * 4 * 36),
    ("adaptive_avg_pool", "f32[1,1,5]", {"size": 2}, 6),  # windows 0…2 and 2…4
    ("resize", IMAGE, {"scale": 2}, 0),
    ("pixel_shuffle", IMAGE, {"factor": 2}, 0),
]


@pytest.mark.parametrize(
    ("op", "types", "attrs", "flops"), FLOPS, ids=[f"{f[0]}-{f[1]}-{f[2]}" for f in FLOPS]
)
def test_arithmetic_is_counted_exactly(op, types, attrs, flops):
    ins = [parse_type(t) for t in types.split()]
    full, outs = infer(op, ins, attrs)
    assert TABLE[op].cost(ins, outs, full).flops == flops


def run(op, tensors, attrs):
    build = GraphBuilder(infer, op)
    ins = [build.input(f"x{i}", TensorType.from_tensor(t)) for i, t in enumerate(tensors)]
    for i, out in enumerate(build.emit(op, ins, attrs)):
        build.output(f"y{i}", out)
    return evaluate(build.finish(), {f"x{i}": t for i, t in enumerate(tensors)})


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("scale", [1.7, 0.6, (1.3, 0.9)])
def test_scale_factors_reach_the_positions(mode, scale):
    x = torch.randn(1, 2, 7, 6, dtype=torch.float64)
    got = run("resize", [x], {"scale": scale, "mode": mode})["y0"]
    want = F.interpolate(x, scale_factor=scale, mode=mode)
    assert torch.equal(got, want)


def test_indices_name_the_winners():
    x = torch.randn(2, 3, 6, 5)
    for op, attrs in (
        ("max_pool_with_indices", {"kernel": 2}),
        ("adaptive_max_pool_with_indices", {"size": (4, 2)}),
    ):
        found = run(op, [x], attrs)
        picked = x.flatten(2).gather(2, found["y1"].flatten(2)).reshape(found["y0"].shape)
        assert torch.equal(picked, found["y0"])


def test_attributes_are_complete():
    x, weight = parse_type("f32[2,4,6,6,6]"), parse_type("f32[8,4,3,3,3]")
    full, _ = infer("conv", [x, weight], {"padding": 1})
    assert full["stride"] == full["dilation"] == full["padding"] == (1, 1, 1)
    full, _ = infer("max_pool", [x], {"kernel": (2, 1, 3)})
    assert full["stride"] == (2, 1, 3)
    full, _ = infer("adaptive_avg_pool", [x], {"size": (None, 2, 3)})
    assert full["size"] == (6, 2, 3)
    full, _ = infer("resize", [x], {"scale": 1.5})
    assert (full["size"], full["scale"]) == ((9, 9, 9), (1.5, 1.5, 1.5))
