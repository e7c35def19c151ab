"""Batch norm for training with what follows it: the kernels in the interpreter and compiled
without a GPU, who is chosen to run it, and the same numbers on the CPU in every element type."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import GraphBuilder, TensorType, check
from deuteron.ir.region import Region
from deuteron.ir.rewrite import start
from deuteron.kernels.triton.batch_norm_tiles import PIECES, divide
from deuteron.ops import Ops, infer
from deuteron.ops.activated import activation as activation_of
from deuteron.ops.batch_norm import batch_norm_act as ACT
from deuteron.ops.batch_norm import batch_norm_act_grad as ACT_GRAD
from deuteron.ops.batch_norm import told_by_result
from deuteron.ops.evaluate import evaluate
from deuteron.ops.signs import is_channels_last, signs_type
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from deuteron.target import GPUS
from tests.batch_norm_cases import ACTIVATIONS, calm
from tests.interpreted import assert_none_failed, found_in_interpreter
from tests.launches import compiled_only
from tests.optimised import optimised
from tests.ptx import spilled
from tests.sweeps import one_in, sweep_unless
from tests.test_ops import one_node_graph
from tests.tolerances import allowed, error

H200 = GPUS["h200"]
HALF, BRAIN, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
BIG = (64, 256, 56, 56)


@pytest.mark.parametrize(
    ("cases", "count"), [("some", 40), pytest.param("all", 85, marks=pytest.mark.sweep)]
)
def test_in_the_interpreter(cases, count):
    pytest.importorskip("triton")
    assert_none_failed(found_in_interpreter("tests.batch_norm_cases", cases), at_least=count)


# ---- compiled for GPUs that are not there


def compiled(
    division, dtype, residual, activation, arch, monkeypatch, signs=False, again=True
) -> dict:
    """Every kernel of a forward and a backward step, by name."""
    from deuteron.kernels.triton.batch_norm import Operands, backward, forward

    found = compiled_only(monkeypatch, arch, chain=arch >= 90)
    t, s = torch.empty(1, dtype=dtype), torch.empty(1)
    r, exact = t if residual else None, dtype == F32
    bits = torch.empty(1, dtype=torch.uint8) if signs else None
    learned = dict.fromkeys(("running_mean", "running_var", "new_mean", "new_var"), s)
    params = dict.fromkeys(("weight", "bias", "mean", "rstd"), s)
    step = Operands(t, t, r, bits, **params, **learned)
    forward(division, 0.1, 1e-5, activation, exact)(step)
    y = None if signs or not told_by_result(activation) else r
    made = {"dx": t, "dz": r, "dweight": s, "dbias": s, "again": None}
    if again and y is None:
        made["again"] = t
    rest = None if y is not None or (signs and not again) else r
    back = Operands(t, y, rest, bits, **params, grad=t, **made)
    backward(division, activation, y is not None, exact)(back)
    return dict(found)


IN_EVERY_RUN = {4, 6}  # of those below: either order, large and small, the largest tile
MAIN = [  # shape, channels last, element type, tile, residual, activation
    (BIG, True, HALF, 4096, False, "relu"),
    (BIG, True, HALF, 4096, True, "relu"),
    (BIG, False, HALF, 4096, True, "relu"),
    (BIG, True, F32, 2048, True, "silu"),
    (BIG, True, BRAIN, 8192, True, "hardswish"),
    ((8, 64, 7, 7), True, HALF, 4096, True, "relu6"),
    ((8, 64, 7, 7), False, F32, 2048, False, "leaky_relu"),
    (BIG, True, F32, 2048, True, "gelu"),
]


@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("shape", "last", "dtype", "tile", "residual", "act"),
    [pytest.param(*c, marks=sweep_unless(k in IN_EVERY_RUN)) for k, c in enumerate(MAIN)],
)
def test_compile_without_spills_and_move_16_bytes(
    arch, shape, last, dtype, tile, residual, act, monkeypatch
):
    pytest.importorskip("triton")
    d = divide(shape, last, H200.units, tile=tile, warps=8 if tile > 4096 else 4)
    for name, kernel in compiled(d, dtype, residual, act, arch, monkeypatch).items():
        assert spilled(kernel, arch) == 0, name
        follows = arch >= 90 and name.endswith(("merge", "apply"))
        assert kernel.metadata.launch_pdl == follows, name
        assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == follows, name
        if shape == BIG and "merge" not in name:
            wide = re.search(r"cp\.async\.cg.* 0x10|ld\.global[.\w:]*v4\.b32", kernel.asm["ptx"])
            assert wide, f"{name} does not load 16 bytes at a time"


@pytest.mark.parametrize("last", one_in(2, [True, False]))
def test_offsets_past_two_to_the_31_are_64_bit(last, monkeypatch):
    pytest.importorskip("triton")
    d = divide((1024, 256, 96, 96), last, H200.units)
    assert d.wide and not divide((512, 256, 96, 96), last, H200.units).wide
    for name, kernel in compiled(d, HALF, True, "relu", 90, monkeypatch, signs=True).items():
        if "merge" not in name:
            assert "i64" in kernel.asm["ttir"], name


# ---- how the work is divided


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        BIG,
        (64, 64, 112, 112),
        (2, 3, 1024, 2048),
        (256, 2048, 7, 7),
        (1, 5, 7),
        (9, 1001),
        (2, 70000, 2, 2),
        (1, 1, 4096, 4096),
        (128, 96, 14, 14),
    ],
)
def test_tiles_cover_everything_and_programs_are_many(shape, last):
    d = divide(shape, last, H200.units)
    assert d.tiles * d.a >= d.rows > (d.tiles - 1) * d.a
    assert d.blocks * d.b >= d.lanes if last else d.across * d.b >= d.lanes
    assert d.units * d.together == d.lanes
    assert 1 <= d.splits <= min(PIECES, d.tiles)
    if TensorType.of(shape, "f32").numel >= 2**24 and not d.once:
        assert d.splits * d.blocks >= H200.units


# ---- who runs it


def block(shape=BIG, dtype=dt.float16, layout="nhwc", residual=True, activation="relu", **attrs):
    g = dt.Graph("block")
    x = g.tensor("x", shape, dtype, layout=layout)
    r = g.tensor("r", shape, dtype, layout=layout) if residual else None
    kind = dt.float64 if dtype == dt.float64 else dt.float32
    w, b, m, v = (g.tensor(n, shape[1:2], kind) for n in "wbmv")
    y, mean, var, *_ = g.batch_norm_act(x, w, b, m, v, r, activation=activation, **attrs)
    y.output("y"), mean.output("mean"), var.output("var")
    return g.grad("y", wrt=["x", "w", "b", "r"] if residual else ["x", "w", "b"])


@pytest.mark.parametrize("layout", ["nhwc", "contiguous"])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("shape", [BIG, (4, 16, 7, 7)])
def test_a_plan_by_estimate_takes_the_kernels_on_a_gpu(shape, layout, residual):
    choices = decide(block(shape, layout=layout, residual=residual).ir(), H200, Policy()).choices
    *forward, backward = choices
    assert backward.region.ops == ("batch_norm_act_grad",)
    assert backward.candidate.engine == "triton_kernels"
    if shape == BIG and layout == "nhwc":  # generated code is as quick where rows are whole
        assert [c.region.ops for c in forward] == [("batch_norm_act",)]
    assert {c.candidate.engine for c in forward} <= {"triton_kernels", "triton_gen"}


def test_batch_norm_train_with_sum_and_activation_is_taken_as_one():
    g = dt.Graph()
    x, r = (g.tensor(n, BIG, dt.float16, layout="nhwc") for n in "xr")
    y, mean, *_ = g.batch_norm_train(x)
    g.leaky_relu(y + r, negative_slope=0.2).output("y")
    mean.output("mean")
    (choice,) = decide(g.ir(), H200, Policy()).choices
    assert choice.region.ops == ("batch_norm_train", "add", "leaky_relu")
    offered = TritonKernels().candidates(choice.region, H200, Policy())
    assert {c.knobs["recipe"] for c in offered} == {"batch_norm"}


def refusal(op, target, *types, **attrs):
    build = GraphBuilder(infer, "one")
    ins = [None if t is None else build.input(f"x{i}", t) for i, t in enumerate(types)]
    for i, out in enumerate(build.emit(op, ins, attrs)):
        build.output(f"y{i}", out)
    region = Region(build.finish())
    return TritonKernels().refuse(region, target, Policy())


def test_refuses_with_reasons():
    x = TensorType.of((2, 4, 3, 3), "f32")
    assert "GPU" in refusal("batch_norm_act", dt.target("cpu"), x).reason
    wide = refusal("batch_norm_act", H200, x.with_dtype(dt.float64))
    assert "f64" in wide.reason and "f32" in wide.remedy
    assert "size is 0" in refusal("batch_norm_act", H200, TensorType.of((0, 4, 3), "f32")).reason
    assert refusal("batch_norm_act", H200, x) is None
    assert "no kernel for relu" in refusal("relu", H200, x).reason


def test_one_position_is_a_matrix_and_one_channel_is_not():
    assert is_channels_last(TensorType.of((8, 64, 1, 1), "f16"))
    assert is_channels_last(TensorType.of((8, 64), "f16"))
    assert is_channels_last(TensorType.of((8, 64, 3, 3), "f16").with_layout("nhwc"))
    assert not is_channels_last(TensorType.of((8, 1, 3, 3), "f16").with_layout("nhwc"))
    assert not is_channels_last(TensorType.of((8, 64, 9), "f16"))


# ---- numbers on the CPU, and the operators as such


def feed_of(graph: dt.Graph) -> dict[str, torch.Tensor]:
    """Random inputs in the orders that the graph says, no gradient where rounding decides."""
    gen = torch.Generator().manual_seed(0)
    feed = {}
    for name in graph.ir().inputs:
        t = graph.ir().types[name]
        value = torch.randn(t.shape, generator=gen, dtype=F64)
        value = value.abs() + 0.5 if name == "v" else value
        feed[name] = torch.empty_strided(t.shape, t.strides, dtype=t.dtype.torch).copy_(value)
    feed["grad_y"].copy_(calm(feed["grad_y"], by_torch(feed, "none", F64)["y"]))
    return feed


def by_torch(feed, activation, dtype) -> dict[str, torch.Tensor]:
    """The same step by modules of PyTorch and its autograd."""
    leaves = {n: t.to(dtype if t.ndim > 1 or dtype == F64 else F32) for n, t in feed.items()}
    mean, var = leaves["m"].clone(), leaves["v"].clone()
    asked = [n for n in ("x", "w", "b", "r") if n in leaves]
    for n in asked:
        leaves[n] = leaves[n].detach().requires_grad_()
    y = F.batch_norm(leaves["x"], mean, var, leaves["w"], leaves["b"], True, 0.1, 1e-5)
    y = y + leaves["r"] if "r" in leaves else y
    act = activation_of(activation)
    y = y if act is None else act.op.reference(y, **act.attrs)
    y.backward(leaves["grad_y"])
    return {"y": y.detach(), "mean": mean, "var": var} | {
        f"grad_{n}": leaves[n].grad for n in asked
    }


KINDS = ("f32", "f64", "f16", "bf16")


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["nhwc", "contiguous"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_on_the_cpu_as_pytorch_and_its_autograd(activation, kind, layout):
    dtype = dt.ir.dtype(kind).torch
    for residual in (True, False):
        graph = block((3, 5, 4, 7), dt.ir.dtype(kind), layout, residual, activation)
        feed = feed_of(graph)
        got = graph.compile(device="cpu").run(**feed)
        exact, theirs = by_torch(feed, activation, F64), by_torch(feed, activation, dtype)
        for name, truth in exact.items():
            limit = allowed(error(theirs[name], truth), got[name].dtype, 3 * 4 * 7)
            assert error(got[name], truth) <= limit, (name, residual)


@pytest.mark.parametrize("op", [ACT, ACT_GRAD], ids=lambda op: op.name)
def test_written_out_it_is_the_same(op):
    for sample in op.samples():
        graph, feed = one_node_graph(op, sample, sample.tensors("f64"))
        build, names = start(graph, infer)
        ops = Ops(build)
        node = graph.nodes[0]
        ins = [None if v is None else ops.sym(names[v]) for v in node.inputs]
        ins += [None] * (len(op.inputs) - len(ins))
        for (name, _), found in zip(graph.outputs, op.expand(ops, ins, node.attrs), strict=True):
            found.output(name)
        want, got = evaluate(graph, feed), evaluate(check(build.finish(), infer), feed)
        for name, truth in want.items():
            assert error(got[name], truth) <= allowed(0.0, F64, 1000), (str(sample), name)


def test_statistics_and_weights_with_gaps_are_read_where_they_lie():
    """torch's kernel for a CPU walks over them as if they had none."""
    grad, x = torch.randn(2, 6, 4, dtype=F64)
    mean, rstd, weight = torch.rand(3, 4, dtype=F64)
    attrs = ACT_GRAD.normalise({"activation": "none"})
    wanted = ACT_GRAD.reference(grad, x, mean, rstd, weight, *[None] * 4, **attrs)
    apart = (torch.stack([t, torch.full_like(t, torch.nan)], 1)[:, 0] for t in (mean, rstd, weight))
    found = ACT_GRAD.reference(grad, x, *apart, *[None] * 4, **attrs)
    assert all(map(torch.equal, found, wanted))


def test_kept_whole_on_both_kinds_of_machine():
    for target in (H200, dt.target("cpu")):
        done, _ = optimised(block(BIG).ir(), target)
        assert [n.op for n in done.nodes] == ["batch_norm_act", "batch_norm_act_grad"]


def test_a_second_gradient_is_refused_because_it_would_be_wrong():
    once = block((3, 2, 4), dt.float64, "contiguous", activation="silu")
    with pytest.raises(dt.GraphError, match="no gradient of its own"):
        once.grad("grad_x", wrt=["grad_y", "w"])


X, C = TensorType.of((2, 4, 3), "f32"), TensorType.of((4,), "f32")
BITS, KEPT = signs_type(X.shape, "channels"), {"activation": "relu", "packed": "channels"}
WRONG = [  # operator, inputs, attributes, words of the message
    (
        "batch_norm_act",
        (X, None, None, None, None, TensorType.of((2, 4), "f32")),
        {},
        "residual of batch_norm_act is f32[2,4]",
    ),
    ("batch_norm_act", (X, None, None, None, None, X.with_dtype(dt.float16)), {}, "is f16"),
    ("batch_norm_act", (X,), {"activation": "softmax"}, "leaky_relu(negative_slope=0.2)"),
    ("batch_norm_act", (X,), {"activation": "relu("}, "is not known"),
    ("batch_norm_act", (X,), {"activation": "gelu('tanh')"}, "is not known"),
    ("batch_norm_act", (X,), {"activation": "elu(beta=1)"}, "is not known"),
    ("batch_norm_act", (X, None, None, C), {}, "one running statistic"),
    ("batch_norm_act", (TensorType.of((1, 4), "f32"),), {}, "one value per channel"),
    ("batch_norm_act", (TensorType.of((4,), "f32"),), {}, "rank 2"),
    ("batch_norm_act_grad", (TensorType.of((2, 4), "f32"), X, C, C), {}, "grad of"),
    ("batch_norm_act_grad", (X, X, TensorType.of((3,), "f32"), C), {}, "mean is f32[3]"),
    ("batch_norm_act_grad", (X, X, C, C, None, None, X), {"activation": "silu"}, "from y"),
    ("batch_norm_act", (X,), {"activation": "relu6", "packed": "channels"}, "relu6"),
    ("batch_norm_act", (X,), {"activation": "relu", "packed": "rows"}, "positions"),
    ("batch_norm_act_grad", (X, X, C, C), KEPT, "signs are missing"),
    ("batch_norm_act_grad", (X, X, C, C, *[None] * 4, BITS), {"activation": "relu"}, "needs none"),
    ("batch_norm_act_grad", (X, X, C, C, *[None] * 4, X), KEPT, "u8[2,3,1]"),
]


@pytest.mark.parametrize(("op", "types", "attrs", "words"), WRONG)
def test_wrong_input_is_answered_with_what_to_change(op, types, attrs, words):
    build = GraphBuilder(infer, "one")
    ins = [None if t is None else build.input(f"x{i}", t) for i, t in enumerate(types)]
    with pytest.raises(dt.GraphError) as caught:
        build.emit(op, ins, attrs)
    assert words in str(caught.value) and "remedy" in str(caught.value)
