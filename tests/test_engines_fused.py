"""Regions of several nodes: the chains that fused calls claim, and torch's own node by node."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from random_graphs import graphs
from test_engines import CPU, ENGINES, Answers, right, room, run
from test_passes import random

import deuteron as dt
from deuteron.engines import BuildContext, Candidate
from deuteron.engines.vendor.cpu import POST_OPS
from deuteron.ir import Region, parse_graph
from deuteron.ops import TABLE
from deuteron.ops.evaluate import evaluate
from deuteron.passes import fuse
from deuteron.policy import Policy
from deuteron.target import target
from tests.tolerances import allowed, error

TORCH, VENDOR = (next(e for e in ENGINES if e.name == name) for name in ("torch", "vendor_fused"))
Act = Callable[[dt.Graph, dt.Sym], dt.Sym]

ACTIVATIONS: dict[str, Act] = {
    "none": lambda g, y: y,
    "relu": lambda g, y: g.relu(y),
    "sigmoid": lambda g, y: g.sigmoid(y),
    "tanh": lambda g, y: g.tanh(y),
    "hardswish": lambda g, y: g.hardswish(y),
    "hardsigmoid": lambda g, y: g.hardsigmoid(y),
    "silu": lambda g, y: g.silu(y),
    "gelu": lambda g, y: g.gelu(y),
    "gelu tanh": lambda g, y: g.gelu(y, approximate="tanh"),
    "leaky_relu": lambda g, y: g.leaky_relu(y, negative_slope=0.2),
    "clamp": lambda g, y: g.clamp(y, min=-0.3, max=0.4),
    "clamp below": lambda g, y: g.clamp(y, min=-0.3),
    "elu": lambda g, y: g.elu(y, alpha=0.7),
    "mish": lambda g, y: g.mish(y),
    "square": lambda g, y: g.square(y),
}

# x, weight, attributes, and the recipes that take the bare convolution
CONVOLUTIONS = {
    "1x1": ((2, 8, 5, 6), (4, 8, 1, 1), {}, {"gemm", "onednn_packed"}),
    "1x1 strided": ((2, 8, 5, 6), (4, 8, 1, 1), {"stride": (2, 3)}, {"gemm", "onednn_packed"}),
    "one pixel": ((2, 8, 1, 1), (4, 8, 1, 1), {}, {"gemm", "onednn_packed"}),
    "one channel": ((2, 1, 5, 6), (1, 1, 1, 1), {}, {"gemm", "onednn_packed"}),
    "3x3": ((2, 8, 9, 40), (4, 8, 3, 3), {"padding": 0}, {"onednn_packed"}),
    "3x3 padded": ((2, 8, 5, 6), (4, 8, 3, 3), {"padding": 1}, {"onednn_packed", "shifted_gemm"}),
    "3x3 strided": ((2, 8, 9, 8), (4, 8, 3, 3), {"stride": 2, "padding": 1}, {"onednn_packed"}),
    "5x3": ((1, 4, 9, 8), (4, 4, 5, 3), {"padding": (2, 0)}, {"onednn_packed", "shifted_gemm"}),
    "dilated": (
        (1, 8, 9, 8),
        (4, 8, 3, 3),
        {"padding": 3, "dilation": 3},
        {"onednn_packed", "shifted_gemm"},
    ),
    "dead taps": (  # every tap but the middle one falls into the padding
        (1, 8, 5, 4),
        (4, 8, 3, 3),
        {"padding": 12, "dilation": 12},
        {"onednn_packed", "shifted_gemm"},
    ),
    "dead columns": (
        (1, 8, 9, 4),
        (4, 8, 3, 3),
        {"padding": (1, 7), "dilation": (1, 7)},
        {"onednn_packed", "shifted_gemm"},
    ),
    "depthwise": ((2, 8, 5, 6), (8, 1, 3, 3), {"groups": 8, "padding": 1}, {"onednn_packed"}),
    "grouped": ((2, 8, 5, 6), (4, 4, 3, 3), {"groups": 2, "padding": 1}, {"onednn_packed"}),
    "uneven": ((1, 8, 4, 5), (4, 8, 3, 3), {"padding": (2, 0, 1, 1)}, {"shifted_gemm"}),
    "7x9": ((2, 4, 9, 8), (6, 2, 7, 9), {"padding": (3, 4), "groups": 2}, {"onednn_packed", "fft"}),
    "7x7 uneven": ((1, 4, 9, 8), (4, 4, 7, 7), {"padding": (1, 6, 0, 3)}, {"shifted_gemm", "fft"}),
    "7x8 depthwise": ((1, 4, 9, 8), (8, 1, 7, 8), {"groups": 4}, {"onednn_packed", "fft"}),
    "padded 1x1": ((1, 8, 4, 4), (4, 8, 1, 1), {"padding": 1}, {"onednn_packed", "shifted_gemm"}),
}


def region_of(g: dt.Graph) -> tuple[Region, dict[str, torch.Tensor]]:
    """The one region of a graph, and tensors for it."""
    graph = g.ir()
    regions, _ = fuse(graph)
    assert len(regions) == 1, [r.ops for r in regions]
    feed = {v: random(graph.types[v]) for v in graph.inputs}
    return regions[0], feed | {v: graph.constants[v].data for v in regions[0].constants}


def offered(region: Region, engine=VENDOR) -> list[Candidate]:
    if engine.refuse(region, target("cpu"), Policy()) is not None:
        return []
    return list(engine.candidates(region, target("cpu"), Policy()))


def recipes(region: Region) -> set[str]:
    return {c.knobs["recipe"] for c in offered(region)}


def all_right(region: Region, feed: dict[str, torch.Tensor]) -> None:
    answers = Answers(region, feed)
    for candidate in offered(region):
        right(VENDOR, candidate, region, feed, answers)
    right(TORCH, *offered(region, TORCH), region, feed, answers)


def convolution(name: str, bias: bool, residual: bool, act: str, kind: str = "f32") -> dt.Graph:
    shape, weight, attrs, _ = CONVOLUTIONS[name]
    g = dt.Graph()
    x = g.tensor("x", shape, kind, layout="nhwc")
    dtype = x.dtype.torch
    channels = weight[0]
    b = torch.randn(channels).to(dtype) if bias else None
    w = torch.randn(weight).to(dtype).contiguous(memory_format=torch.channels_last)
    y = g.conv(x, w, b, **attrs)
    if residual:
        y = y + g.tensor("residual", y.shape, kind, strides=y.type.strides)
    ACTIVATIONS[act](g, y).output("y")
    return g


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_of_every_form(name):
    for bias in (True, False):
        for residual, act in ((False, "none"), (False, "relu"), (True, "none"), (True, "relu")):
            region, feed = region_of(convolution(name, bias, residual, act))
            plain = residual and name.startswith("one ")  # no memory order to tell oneDNN
            expected = CONVOLUTIONS[name][3] - ({"onednn_packed"} if plain else set())
            assert recipes(region) == expected, (bias, residual, act)
            all_right(region, feed)


def test_nan_stays_in_its_windows_by_fouriers_transform():
    region, feed = region_of(convolution("7x7 uneven", True, False, "none"))
    feed["x"][0, 1, 8, 7] = torch.nan
    (fft,) = (c for c in offered(region) if c.knobs["recipe"] == "fft")
    ctx = BuildContext(target("cpu"), torch.device("cpu"), Policy(), feed)
    kind = region.graph.types[region.outputs[0]]
    out = torch.empty_strided(kind.shape, kind.strides)
    VENDOR.build(region, fft, ctx).fill([feed[v] for v in region.inputs], [out])
    (exact,) = evaluate(region.graph, feed).values()
    assert torch.equal(out.isnan(), exact.isnan())
    assert not exact.isnan().all()


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_activation_after_a_convolution(act):
    for name in ("1x1", "3x3 padded", "depthwise"):
        for residual in (False, True):
            region, feed = region_of(convolution(name, True, residual, act))
            claimed = act == "none" or (act.split()[0] in POST_OPS and act != "clamp below")
            packed = claimed and (not residual or act in ("none", "relu"))
            assert ("onednn_packed" in recipes(region)) == packed
            all_right(region, feed)


def test_every_claimed_post_op_is_tried():
    assert {act.split()[0] for act in ACTIVATIONS} >= set(POST_OPS)


@pytest.mark.each_value
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(3, 8), (8,), (2, 3, 8), (2, 1, 2, 8)])
def test_linear_chains(shape, act):
    for bias in (torch.randn(5), None):
        for residual in (False, True):
            g = dt.Graph()
            y = g.linear(g.tensor("x", shape), torch.randn(5, 8), bias)
            y = y + g.tensor("residual", y.shape) if residual else y
            ACTIVATIONS[act](g, y).output("y")
            region, feed = region_of(g)
            assert recipes(region) == {"gemm"}
            all_right(region, feed)


def test_a_residual_may_be_the_input_itself():
    g = dt.Graph()
    x = g.tensor("x", (2, 8, 5, 6), layout="nhwc")
    g.relu(x + g.conv(x, torch.randn(8, 8, 1, 1), torch.randn(8))).output("y")
    region, feed = region_of(g)
    assert recipes(region) == {"gemm", "onednn_packed"}
    all_right(region, feed)


REFUSED: dict[str, tuple[Callable[[dt.Graph, dt.Sym], dt.Sym], str]] = {
    "other types": (lambda g, y: g.cast(y, dtype="f16"), "changes the element type"),
    "bools": (lambda g, y: g.isnan(y), "changes the element type"),
    "a wide residual": (lambda g, y: y + g.tensor("r", (2, 4), "f64"), "changes the element type"),
    "a narrow residual": (lambda g, y: y + g.tensor("r", (2, 4), "f16"), "another element type"),
    "a row": (lambda g, y: y + g.tensor("r", (2, 1)), "another shape"),
    "itself": (lambda g, y: y + y, "to itself or to a number"),
    "a number": (lambda g, y: y + 2.0, "to itself or to a number"),
    "a factor": (lambda g, y: y * g.tensor("r", (2, 4)), "is not an epilogue"),
    "two activations": (lambda g, y: g.exp(g.relu(y)), "follows the activation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_chain_is_refused_and_torch_runs_it(name):
    make, reason = REFUSED[name]
    g = dt.Graph()
    make(g, g.linear(g.tensor("x", (2, 3)), torch.randn(4, 3))).output("y")
    region, feed = region_of(g)
    assert reason in VENDOR.refuse(region, target("cpu"), Policy()).reason
    right(TORCH, *offered(region, TORCH), region, feed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "f16"}, "element type f16, not f32"),
        ({"layout": "contiguous"}, "not in nhwc"),
        ({"shape": (0, 8, 5, 6)}, "empty"),
        ({"free": True}, "the weight is an input of the plan"),
    ],
)
def test_convolutions_that_cannot_be_packed_say_why(change, reason):
    g = dt.Graph()
    kind, shape = change.get("dtype", "f32"), change.get("shape", (2, 8, 5, 6))
    x = g.tensor("x", shape, kind, layout=change.get("layout", "nhwc"))
    w = torch.randn(4, 8, 3, 3).to(x.dtype.torch)
    g.conv(x, g.tensor("w", w.shape) if change.get("free") else w).output("y")
    region, _ = region_of(g)
    assert reason in VENDOR.refuse(region, target("cpu"), Policy()).reason


# ---- torch, node by node -------------------------------------------------------------------------


@settings(max_examples=60)
@given(graphs(nodes=16, float_type="f32", without=frozenset({"pow"})))
def test_torch_runs_the_regions_of_random_graphs(made):
    """Bit for bit what the references give, one after another, in the same element type. Only
    pow is left out: torch takes a shorter way if the exponent is a number, as it is here."""
    graph, feed = made
    env = dict(feed) | {name: c.data for name, c in graph.constants.items()}
    for region in fuse(graph)[0]:
        inputs = {v: env[v] for v in region.inputs}
        plain = evaluate(region.graph, inputs)
        fixed = {v: env[v] for v in region.constants}
        (candidate,) = offered(region, TORCH)
        kernel = TORCH.build(region, candidate, BuildContext(target("cpu"), CPU, Policy(), fixed))
        if kernel.writes:
            outs = [torch.empty_like(plain[v]) for v in region.outputs]
            kernel.fill(list(inputs.values()), outs)
        else:
            found = kernel.fn(*inputs.values())
            outs = list(found) if isinstance(found, tuple) else [found]
        for name, out in zip(region.outputs, outs, strict=True):
            assert out.dtype == plain[name].dtype == graph.types[name].dtype.torch
            wide = [t.double().nan_to_num() for t in (out, plain[name])]  # bytes of 8 bits as well
            assert torch.equal(*wide), region.text
        env |= dict(zip(region.outputs, outs, strict=True))


@pytest.mark.parametrize("exponent", [-2.0, -1.0, -0.5, 0.5, 2.0, 2.5, 3.0])
def test_torch_takes_an_exponent_as_a_number(exponent):
    """Which is what ``x ** exponent`` does in torch."""
    g = dt.Graph()
    g.pow(g.tensor("x", (33,)), exponent).output("y")
    region, _ = region_of(g)
    (candidate,) = offered(region, TORCH)
    kernel = TORCH.build(region, candidate, BuildContext(target("cpu"), CPU, Policy(), {}))
    x, out = torch.rand(33) + 0.5, torch.empty(33)
    kernel.fill([x], [out])
    assert torch.equal(out, x**exponent)


IN_PLACE: dict[str, Act] = {
    "a view still looks at it": lambda g, x: _seen(g, g.exp(x)),
    "a view of it is added": lambda g, x: _turned(g, g.exp(x)),
    "a copy that copies nothing": lambda g, x: g.relu(g.cast(x, dtype="f32")),
    "the input itself": lambda g, x: g.relu(g.relu(x) + x) * x,
    "a longer chain": lambda g, x: g.sigmoid(g.tanh(g.silu(g.exp(x) - 1.0) * 2.0) / 3.0),
}


def _seen(g: dt.Graph, a: dt.Sym) -> dt.Sym:
    flat = g.reshape(a, shape=(16,))
    return g.reshape(g.neg(a), shape=(16,)) + flat


def _turned(g: dt.Graph, a: dt.Sym) -> dt.Sym:
    turned = g.permute(a, dims=(1, 0))
    return a + turned


@pytest.mark.parametrize("name", IN_PLACE)
def test_nothing_is_overwritten_that_is_still_read(name):
    g = dt.Graph()
    IN_PLACE[name](g, g.tensor("x", (4, 4), strides=(8, 2))).output("y")
    region, feed = region_of(g)
    right(TORCH, *offered(region, TORCH), region, feed)


NUMBERS = [(2.0, "f64"), (2.0, "f32"), (2.0, "f16"), (3, "i64"), (3, "i32"), (True, "bool")]
TWO = [op.name for op in TABLE.values() if op.inputs == ("x", "y") and op.name != "matmul"]


@pytest.mark.parametrize("op", [*TWO, "where"])
def test_scalar_constants_of_every_type_on_either_side(op):
    """What inference promises is what torch returns, however the scalar takes part."""
    for number, kind in NUMBERS:
        for other in ("f32", "f16", "i32", "bool"):
            for shape in ((3,), ()):
                for side in (0, 1):
                    g = dt.Graph()
                    x = g.tensor("x", shape, other)
                    k = g.constant(
                        torch.tensor(number).to(TABLE["cast"].infer(x.type, kind).dtype.torch)
                    )
                    pair = [x, k] if side == 0 else [k, x]
                    try:
                        if op == "where":
                            g.where(g.tensor("c", shape, "bool"), *pair).output("y")
                            g.where(g.tensor("d", shape, "bool"), k, k).output("both")
                        else:
                            g.call(op, *pair).output("y")
                    except dt.GraphError:
                        continue
                    for region in fuse(g.ir())[0]:
                        feed = {
                            v: torch.ones(shape).to(region.graph.types[v].dtype.torch)
                            for v in region.inputs
                        }
                        run(TORCH, offered(region, TORCH)[0], region, feed)


def test_inputs_may_come_in_any_order():
    g = dt.Graph()
    x, y = g.tensor("x", (3,)), g.tensor("y", (3,))
    g.sub(y, x).output("z")
    region = Region(g.ir())  # its inputs are (x, y), the node reads (y, x)
    right(TORCH, *offered(region, TORCH), region, {"x": torch.ones(3), "y": torch.randn(3)})


def test_attention_takes_masks_and_shared_heads():
    q, k = (2, 4, 5, 8), (2, 2, 6, 8)
    for bias, causal in ((None, False), (None, True), ("f32", False), ("bool", False)):
        g = dt.Graph()
        mask = None if bias is None else g.tensor("bias", (5, 6), bias)
        q_, k_, v_ = g.tensor("q", q), g.tensor("k", k), g.tensor("v", k)
        g.attention(q_, k_, v_, mask, causal=causal).output("y")
        region, feed = region_of(g)
        if bias == "bool":
            feed["bias"] = torch.rand(5, 6) > 0.5
            feed["bias"][2] = False  # a query that may look at nothing gives zeros
        assert recipes(region) == {"sdpa"}
        all_right(region, feed)


def test_nothing_is_lost_beside_nan_and_infinity():
    """The calls that we put together ourselves pass odd values on as torch does."""
    for name in ("1x1", "dead taps"):
        region, feed = region_of(convolution(name, True, False, "relu"))
        feed["x"][0, 0, 0, 0], feed["x"][0, 1, 1, 1] = math.nan, math.inf
        for candidate in offered(region):
            if candidate.knobs["recipe"] != "onednn_packed":
                right(VENDOR, candidate, region, feed)


def test_the_list_of_engines_has_no_name_twice():
    names = [e.name for e in room.BUILT_IN]
    assert len(set(names)) == len(names) and names[0] == "torch"


WINDOWS = {
    "channels alone": ((2, 6, 20, 17), (6, 1, 11, 9), {"padding": (5, 3, 4, 4), "groups": 6}),
    "all channels": ((2, 3, 20, 17), (5, 3, 9, 10), {"padding": 4}),
    "groups": ((2, 4, 20, 17), (6, 2, 9, 10), {"padding": 4, "groups": 2}),
    "rows": ((2, 3, 120), (4, 3, 101), {"padding": 50}),
}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("name", WINDOWS)
def test_large_windows_by_fourier_transforms(name, known):
    """As a GPU is offered them; the calls are those of any machine."""
    shape, taps, how = WINDOWS[name]
    torch.manual_seed(0)
    feed = {"x": torch.randn(shape), "w": torch.randn(taps) / 10, "b": torch.randn(taps[0])}
    g = dt.Graph()
    given = {n: g.tensor(n, t.shape) for n, t in feed.items()}
    g.silu(g.conv(given["x"], given["w"], given["b"], **how)).output("y")
    region = Region(g.ir(), frozenset({"w"} if known else ()), 0)
    h200, policy = target("h200"), Policy()
    offered = VENDOR.candidates(region, h200, policy)
    (way,) = (c for c in offered if c.knobs["recipe"] == "fft")
    assert not way.by_estimate and VENDOR.estimate(region, h200, way) > 0
    kernel = VENDOR.build(region, way, BuildContext(h200, CPU, policy, {"w": feed["w"]}))
    kind, want = region.graph.types[region.outputs[0]], Answers(region, feed)
    out = torch.empty_strided(kind.shape, kind.strides)
    kernel.fill([feed[v] for v in region.inputs], [out])
    assert error(out, want.exact[0]) <= allowed(want.off[0], out.dtype, want.reduced)


@pytest.mark.parametrize("other", [True, False], ids=["a tensor", "a number"])
def test_torch_writes_over_an_operand_whose_single_image_has_another_stride(other):
    """As views of what lies otherwise have: torch refuses two such tensors in one place."""
    kind = "f32[1,4,8,2]{1,2,8,1}"
    line, more = ("add(%x, %y)", f", %y: {kind}") if other else ("mul(%x, %k)", "")
    text = f'graph "g"(%x: {kind}{more}) {{\n  const %k: f32[] = 3.0\n  %s: {kind} = {line}\n'
    text = text if not other else text.replace("  const %k: f32[] = 3.0\n", "")
    region = Region(parse_graph(text + '  return "s"=%s\n}'))
    (candidate,) = TORCH.candidates(region, target("cpu"), Policy())
    kernel = TORCH.build(region, candidate, BuildContext(target("cpu"), CPU, Policy(), {}))
    assert kernel.over == ((0, 0), (0, 1))[: 1 + other]
    x, y = torch.randn(2, 64)
    out = x.as_strided((1, 4, 8, 2), (1, 2, 8, 1))
    given = [x.as_strided((1, 4, 8, 2), (64, 2, 8, 1)), y.as_strided((1, 4, 8, 2), (1, 2, 8, 1))]
    want = given[0] + given[1] if other else given[0] * 3.0
    kernel.fill(given[: 1 + other], [out])
    assert torch.equal(out, want)
