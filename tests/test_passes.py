"""Every pass on graphs built for it: what it does, what it must leave alone, and that the
numbers stay. Batch norm and layout are in test_passes_spatial.py, fusion in test_fuse.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from random_graphs import JUMPS, graphs
from tolerances import allowed, error

import deuteron as dt
from deuteron.ir import Graph, TensorType, check
from deuteron.ir.types import same_strides
from deuteron.ops import infer
from deuteron.ops.evaluate import evaluate
from deuteron.passes import PASSES, Context, cleanup, run_passes
from deuteron.passes.cleanup import common_subexpressions, dead_code, fold_constants
from deuteron.passes.simplify import algebra, canonicalise
from deuteron.policy import Policy
from deuteron.target import GPUS

ODD = [0.0, -0.0, 1.0, -2.5, 1e-30, 1e30, float("inf"), -float("inf"), float("nan"), 88.0]


def context() -> Context:
    return Context(GPUS["h200"], Policy())


def run(step, g: dt.Graph | Graph) -> tuple[Graph, dict[str, int]]:
    """The graph after one pass, checked, and the rules that fired."""
    ctx = context()
    graph = g.ir() if isinstance(g, dt.Graph) else g
    out = check(step(graph, ctx), infer, "the pass")
    return out, {rule: count for rule, count in ctx.fired.items() if count}


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


def same_bits(before: Graph, after: Graph, **feed: torch.Tensor) -> None:
    """Both graphs give the same results to the last bit, the sign of 0 and nan included."""
    one, other = (evaluate(graph, feed) for graph in (before, after))
    for name, want in one.items():
        assert other[name].dtype == want.dtype
        assert torch.equal(other[name].nan_to_num(3.0), want.nan_to_num(3.0))
        assert torch.equal(other[name].signbit() & ~want.isnan(), want.signbit() & ~want.isnan())


# ---- housekeeping --------------------------------------------------------------------------------


def test_rules_that_fit_nowhere_give_the_graph_itself():
    g = dt.Graph()
    (g.exp(g.tensor("x", (3,))) + 1.0).output("y")
    graph = canonicalise(g.ir(), context())
    assert canonicalise(graph, context()) is graph


def test_dead_code_goes_and_inputs_stay():
    g = dt.Graph()
    x, unused = g.tensor("x", (1, 1, 4, 4)), g.tensor("unused", (3,))
    g.exp(unused + g.constant(torch.ones(3)))
    values, _ = g.max_pool_with_indices(x, kernel=2)  # one of two results is read: all stay
    values.output("y")
    graph, fired = run(dead_code, g)
    assert (
        ops(graph) == ["max_pool_with_indices"]
        and graph.inputs == ("x", "unused")
        and not graph.constants
    )
    assert fired == {"unused node": 2, "unused constant": 1}


def test_equal_work_is_done_once():
    g = dt.Graph()
    x, w = g.tensor("x", (1, 2, 4, 4)), torch.randn(4, 5)
    a, b = (g.matmul(g.relu(x), g.constant(w, "w")) for _ in range(2))
    (one, place), (other, same) = (g.max_pool_with_indices(v, kernel=2) for v in (a, b))
    (one + other).output("y")
    (place + same).output("places")
    (g.avg_pool(a, kernel=2) * g.constant(torch.tensor([1.0, -0.0]))).output("z")
    (g.avg_pool(b, kernel=3) * g.constant(torch.tensor([1.0, 0.0, 0.0])[:2])).output("w")
    graph, fired = run(common_subexpressions, g)
    assert fired == {"common subexpression": 3}  # relu, matmul, the maximum of 2
    assert sum(c.type.shape == (4, 5) for c in graph.constants.values()) == 1
    assert sum(c.type.shape == (2,) for c in graph.constants.values()) == 2, "−0 is not 0"
    same_bits(g.ir(), graph, x=torch.randn(1, 2, 4, 4))


@pytest.mark.parametrize("size", [3, 8])
def test_weights_without_numbers_are_equal_only_if_they_share_memory(size):
    first, second = (torch.empty(size, size, device="meta") for _ in range(2))
    g = dt.Graph()
    x = g.tensor("x", (2, size))
    for i, weight in enumerate((first, second, first.detach())):
        g.linear(x, g.constant(weight)).output(f"y{i}")
    graph, _ = run(common_subexpressions, g)
    assert [v for _, v in graph.outputs] == ["linear", "linear_1", "linear"]


def test_random_draws_are_neither_shared_nor_frozen():
    g = dt.Graph()
    c = g.constant(torch.ones(20), "c")
    call = {"target": "aten.rand_like.default", "args": (("in", 0),), "out": ("f32[20]",)}
    for i in range(2):
        g.aten(c, **call).output(f"y{i}")
    graph, _ = run_passes(g.ir(), context())
    assert ops(graph) == ["aten", "aten"]


def test_constants_are_computed_ahead():
    g = dt.Graph()
    x = g.tensor("x", (4, 4))
    w = g.permute(g.constant(torch.randn(4, 4), "w"), dims=(1, 0)) * 2.0
    image = g.reshape(w, shape=(1, 1, 4, 4))
    values, places = g.max_pool_with_indices(image, kernel=2)  # several results at once
    (g.matmul(x, w) + g.sum(values)).output("y")
    places.output("places")
    g.expand(g.constant(torch.ones(1)), shape=(1000,)).output("wide")
    graph, fired = run(fold_constants, g)
    assert fired == {"constant folded": 5}
    assert ops(graph) == ["matmul", "add", "expand"], "what can be broadcast is not stored"
    same_bits(g.ir(), graph, x=torch.randn(4, 4))


def test_however_large_a_constant_what_takes_its_place_is_computed_ahead(monkeypatch):
    """As the 7 by 7 windows of VGG's classifier, 411 MB, that were laid out again in every run."""
    monkeypatch.setattr(cleanup, "FOLD_LIMIT", 8)
    g = dt.Graph()
    w = g.constant(torch.randn(4, 3, 2, 2), "w")
    g.to_layout(w, layout="nhwc").output("y")
    g.cast(w, dtype="f64").output("twice")
    graph, fired = run(fold_constants, g)
    assert fired == {"constant folded": 1} and ops(graph) == ["cast"]


def test_a_folded_cast_has_the_type_it_was_cast_to():
    g = dt.Graph()
    g.cast(g.constant(torch.randn(3, dtype=torch.float64)), dtype="f32").output("y")
    graph, _ = run(fold_constants, g)
    assert [c.type.dtype.short for c in graph.constants.values()][-1] == "f32"


def test_folding_a_slice_re_infers_what_reads_it():
    g = dt.Graph()
    c = g.slice(g.constant(torch.randn(4, 6)), axis=1, step=2)  # strided until it is stored
    (g.tensor("x", (4, 3)) + g.permute(c, dims=(1, 0)).type.numel).output("z")
    g.reshape(g.permute(c, dims=(1, 0)), shape=(12,)).output("y")
    graph, _ = run(fold_constants, g)
    same_bits(g.ir(), graph, x=torch.randn(4, 3))


# ---- local rules ---------------------------------------------------------------------------------

# rule, what is built from x, the operators that are left (None: the rule must not fire)
F = [
    ("no-op dropped", lambda g, x: g.reshape(x, shape=(2, 5)), []),
    ("no-op dropped", lambda g, x: g.cast(x, dtype=x.dtype.short), []),
    ("no-op dropped", lambda g, x: g.slice(x, axis=0), []),
    ("no-op dropped", lambda g, x: g.to_layout(x), []),
    (
        "movement in the fewest steps",
        lambda g, x: g.reshape(g.reshape(x, shape=(10,)), shape=(5, 2)),
        ["reshape"],
    ),
    (
        "movement in the fewest steps",
        lambda g, x: g.permute(g.permute(x, dims=(1, 0)), dims=(1, 0)),
        [],
    ),
    (
        "movement in the fewest steps",  # what is merged and split again is never copied
        lambda g, x: g.reshape(g.reshape(g.permute(x, dims=(1, 0)), shape=(10,)), shape=(5, 2)),
        ["permute"],
    ),
    (
        "layout chain merged",
        lambda g, x: g.to_layout(g.to_layout(g.expand(x, shape=(3, 2, 5)), layout="nhwc")),
        ["expand", "to_layout"],
    ),
    ("clamp by its own name", lambda g, x: g.relu6(x), ["clamp"]),
    ("clamp by its own name", lambda g, x: g.hardtanh(x, min=-2.0, max=0.5), ["clamp"]),
    ("neutral element dropped", lambda g, x: x * 1.0, []),
    ("neutral element dropped", lambda g, x: 1.0 * x, []),
    ("neutral element dropped", lambda g, x: x / 1, []),
    ("neutral element dropped", lambda g, x: x**1.0, []),
    ("neutral element dropped", lambda g, x: x - 0.0, []),
    ("neutral element dropped", lambda g, x: x + -0.0, []),
    ("neutral element dropped", lambda g, x: x + 0.0, None),  # −0 + 0 is +0
    ("neutral element dropped", lambda g, x: x + g.constant(torch.tensor(0)), None),
    ("neutral element dropped", lambda g, x: x - -0.0, None),
    ("neutral element dropped", lambda g, x: 0.0 - x, None),
    ("neutral element dropped", lambda g, x: 1.0 / x, None),
    ("neutral element dropped", lambda g, x: x * 0.0, None),  # nan and inf stay
    ("neutral element dropped", lambda g, x: x * g.constant(torch.ones(1)), None),
    ("neutral element dropped", lambda g, x: g.slice(x, axis=1, step=2) * 1.0, None),  # a view
    ("undone or repeated", lambda g, x: g.neg(-x), []),
    ("undone or repeated", lambda g, x: g.relu(g.relu(x)), ["relu"]),
    ("undone or repeated", lambda g, x: g.abs(g.abs(x)), ["abs"]),
    ("undone or repeated", lambda g, x: g.logical_not(g.logical_not(g.gt(x, 0.0))), ["gt"]),
    ("undone or repeated", lambda g, x: g.logical_not(g.logical_not(x)), None),
    ("power by its own name", lambda g, x: x**2, ["square"]),
    ("power by its own name", lambda g, x: x**-1.0, ["reciprocal"]),
    ("power by its own name", lambda g, x: x**0.5, None),  # (−0)^½ is +0, √−0 is −0
    ("power by its own name", lambda g, x: 2.0**x, None),
    ("division by a power of two", lambda g, x: x / 8.0, ["mul"]),
    ("division by a power of two", lambda g, x: x / -0.25, ["mul"]),
    ("division by a power of two", lambda g, x: x / 3.0, None),
    ("division by a power of two", lambda g, x: x / 1e30, None),
    ("division by a power of two", lambda g, x: x / 0.0, None),
    ("division by a power of two", lambda g, x: x / float("inf"), None),
    ("division by a power of two", lambda g, x: g.gt(x, 0.0) / 2.0, None),  # a bool
    ("division by a power of two", lambda g, x: 2.0 / x, None),
]


@pytest.mark.parametrize("kind", ["f32", "f16", "f64"])
@pytest.mark.parametrize(
    ("rule", "make", "left"), F, ids=[f"{rule.split()[0]}-{i}" for i, (rule, *_) in enumerate(F)]
)
def test_rules_keep_every_number(rule, make, left, kind):
    g = dt.Graph()
    x = g.tensor("x", (2, 5), kind)
    make(g, x).output("y")
    before = g.ir()
    middle, one = run(canonicalise, g)
    after, two = run(algebra, middle)
    after, _ = run(dead_code, after)
    assert (rule in one | two) == (left is not None)
    assert left is None or ops(after) == left
    same_bits(before, after, x=torch.tensor(ODD).reshape(2, 5).to(x.dtype.torch))


@pytest.mark.parametrize(
    "make", [make for rule, make, _ in F if rule[:2] in ("ne", "un", "po", "di")]
)
def test_rules_keep_the_type_of_a_scalar(make):
    """Beside a rank-0 tensor a constant takes part in promotion: no rule may widen it."""
    for build in (make, lambda g, x: x / g.constant(torch.tensor(2.0)), lambda g, x: x**2.0):
        g = dt.Graph()
        x = g.tensor("x", ())
        try:
            build(g, x).output("y")
        except dt.GraphError:
            continue  # needs axes
        after, _ = run(algebra, g)
        same_bits(g.ir(), after, x=torch.tensor(-3.0))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_of_short_floats_are_taken_as_they_were(kind):
    """As the gradient of a bias is written for a GPU."""
    g = dt.Graph()
    x = g.tensor("x", (40, 3), kind)
    wide = g.sum(g.cast(x, dtype="f32"), axes=(0,), keepdim=True)
    g.cast(g.cast(g.reshape(wide, shape=(3,)), dtype=kind), dtype="f32").output("y")
    g.mean(g.cast(x, dtype="f32"), axes=(1,)).output("z")
    found, fired = run(canonicalise, g)
    found, _ = run(dead_code, found)
    left = ["sum", "reshape", "cast", "cast", "mean"]
    assert fired == {"summed as it was": 1} and ops(found) == left
    same_bits(g.ir(), found, x=torch.randn(40, 3).to(x.dtype.torch))


@pytest.mark.parametrize("keepdim", [False, True])
def test_a_bias_before_a_batch_norm_has_no_gradient(keepdim):
    """Nothing but rounding would be summed up; nan stays. Of another tensor's statistics it is no
    such sum."""
    g = dt.Graph()
    x, dy = (g.tensor(n, (4, 3, 5, 5), "f32", layout="nhwc") for n in ("x", "dy"))
    w = g.tensor("w", (3,), "f32")
    y, _, _, mean, rstd = g.batch_norm_train(x, w, w)
    y.output("y")
    for name, image in (("own", x), ("other", g.relu(x))):
        dx, *_ = g.batch_norm_act_grad(dy, image, mean, rstd, w)
        dx.output(f"{name} dx")
        g.sum(dx, axes=(0, 2, 3), keepdim=keepdim).output(name)
    found, fired = run(algebra, g)
    assert fired == {"nothing in all from a batch norm": 1} and ops(found).count("sum") == 1
    feed = {"x": torch.randn(4, 3, 5, 5), "dy": torch.randn(4, 3, 5, 5), "w": torch.ones(3)}
    feed = {
        v: t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t
        for v, t in feed.items()
    }
    before, after = evaluate(g.ir(), feed, float64=True), evaluate(found, feed)
    assert not after["own"].any() and before["own"].abs().max() < 1e-12
    assert after["own"].shape == before["own"].shape
    assert torch.allclose(after["other"].double(), before["other"], atol=1e-4)
    feed["x"][0, 1] = torch.nan
    assert evaluate(found, feed)["own"].flatten().isnan().tolist() == [False, True, False]


def test_pooling_to_a_pixel_is_a_mean_and_resizing_a_pixel_repeats_it():
    g = dt.Graph()
    x = g.tensor("x", (2, 3, 4, 5), "f64", layout="nhwc")
    pooled = g.adaptive_avg_pool(x, size=1)
    for mode in ("nearest", "bilinear", "bicubic"):
        g.resize(pooled, size=(6, 7), mode=mode).output(mode)
    g.adaptive_avg_pool(x, size=(2, 1)).output("more than one")
    after, _ = run_passes(g.ir(), context())
    assert "resize" not in ops(after) and ops(after).count("mean") == 1
    assert ops(after).count("adaptive_avg_pool") == 1
    close(g.ir(), after, {"x": random(x.type)}, 20)


def test_products_with_a_transposed_matrix_are_linear():
    g = dt.Graph()
    x, w, b = (
        g.tensor("x", (2, 3, 4), "f64"),
        g.tensor("w", (5, 4), "f64"),
        g.tensor("b", (5,), "f64"),
    )
    turned = g.permute(w, dims=(1, 0))
    (b + g.matmul(x, turned)).output("y")
    g.matmul(g.relu(x), turned).output("plain")
    shared = g.linear(x, w)
    shared.output("shared")
    (shared + b).output("not joined")  # the bare product is wanted too
    (g.linear(x, w, b) + b).output("has one")
    after, fired = run(canonicalise, g)
    assert fired["product with transposed matrix is linear"] == 2
    assert fired["bias joins linear"] == 1
    close(g.ir(), run(dead_code, after)[0], {n: random(after.types[n]) for n in "xwb"}, 4)


@pytest.mark.parametrize(
    ("shape", "kind"), [((5, 4), "f64"), ((2, 5, 4), "f64"), ((5,), "f32"), ((4,), "f64")]
)
def test_what_is_no_bias_does_not_join(shape, kind):
    g = dt.Graph()
    x, w, b = (
        g.tensor("x", (2, 5, 3), "f64"),
        g.tensor("w", (4, 3), "f64"),
        g.tensor("b", shape, kind),
    )
    if shape == (5,):
        x, w = g.tensor("x5", (2, 5), "f32"), g.tensor("w5", (1, 5), "f32")
    (g.linear(x, w) + b).output("y")
    _, fired = run(canonicalise, g)
    assert bool(fired) == (shape == (4,))


def test_a_single_number_that_is_padded_has_no_ends():
    g = dt.Graph("number")
    x = g.tanh(g.tensor("x", ()))
    g.pad(x, low=(), high=(), mode="constant", value=0.0).output("y")
    g.exp(x).output("z")
    graph, _ = run_passes(g.ir(), context())
    same_bits(g.ir(), graph, x=torch.tensor(0.5))


# ---- all of them ---------------------------------------------------------------------------------


def random(type_: TensorType) -> torch.Tensor:
    flat = torch.randn(max(type_.storage_numel, 1), dtype=torch.float64).to(type_.dtype.torch)
    return flat.as_strided(type_.shape, type_.strides)


def close(before: Graph, after: Graph, feed: dict[str, torch.Tensor], reduced: int = 1) -> None:
    """Both graphs mean the same numbers: they agree in float64 up to reordered sums."""
    one, other = (evaluate(graph, feed, float64=True) for graph in (before, after))
    for name, want in one.items():
        assert error(other[name], want) <= allowed(0.0, torch.float64, reduced), name


def promises_kept(before: Graph, after: Graph) -> None:
    """Inputs and outputs are what the user knows: names, shapes, types, and memory order."""
    assert before.inputs == after.inputs
    assert [n for n, _ in before.outputs] == [n for n, _ in after.outputs]
    for (_, old), (_, new) in zip(before.outputs, after.outputs, strict=True):
        said, got = before.types[old], after.types[new]
        assert (said.shape, said.dtype) == (got.shape, got.dtype)
        if said.layout != "strided":
            assert same_strides(said.shape, said.strides, got.strides), (said, got)


@settings(max_examples=60)
@given(graphs(nodes=12, without=JUMPS))
def test_random_graphs_mean_the_same_after_all_passes(made):
    graph, feed = made
    after, records = run_passes(graph, context())
    assert [r.name for r in records] == [p.name for p in PASSES]
    promises_kept(graph, after)
    close(graph, after, feed, 10_000)
    again, records = run_passes(after, context())
    assert again == after, "running the passes twice changes nothing"


@settings(max_examples=60)
@given(graphs(nodes=8, without=JUMPS, float_type="f32", constants=0.0))
def test_random_graphs_mean_the_same_in_another_layout(made):
    graph, feed = made
    after, _ = run_passes(graph, context())
    promises_kept(graph, after)
    close(graph, after, feed, 10_000)


def test_equal_readers_do_not_hide_a_rule():
    """Two equal sums read one product: once they are one, the bias can join."""
    g = dt.Graph()
    x, w, b = g.tensor("x", (2, 4)), g.tensor("w", (5, 4)), g.tensor("b", (5,))
    product = g.linear(x, w)
    (g.relu(product + b) + g.exp(product + b)).output("y")
    after, _ = run_passes(g.ir(), context())
    assert ops(after) == ["linear", "relu", "exp", "add"]


def test_logits_that_are_widened_twice_do_not_part_a_loss_from_its_gradient():
    g = dt.Graph()
    x, t = g.tensor("x", (6, 9), "bf16"), g.tensor("t", (6,), "i64")
    g.cross_entropy(g.cast(x, dtype="f32"), t).output("loss")
    pull = g.constant(torch.tensor(1 / 6))
    _, _, grad = g.cross_entropy_with_grad(g.cast(x, dtype="f32"), t, None, pull)
    g.cast(grad, dtype="bf16").output("grad")
    after, _ = run_passes(g.ir(), context())
    assert ops(after).count("cross_entropy_with_grad") == 1 and "cross_entropy" not in ops(after)


# ---- written out


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("shape", "ignored", "kind"),
    [
        ((5, 7), -100, "classes"),
        ((2, 7, 3), 2, "classes"),
        ((4, 3), 1, "all ignored"),
        ((7,), -100, "classes"),
        ((5, 7), -100, "probabilities"),
    ],
)
def test_a_loss_that_joins_positions_becomes_rows_and_their_sum(
    reduction, weighted, shape, ignored, kind
):
    g, classes = dt.Graph("loss"), shape[min(1, len(shape) - 1)]
    positions = shape[:1] * (len(shape) > 1) + shape[2:]
    feed = {"x": torch.randn(shape), "t": torch.randint(0, classes, positions)}
    if kind == "probabilities":
        feed["t"] = torch.rand(shape)
    if kind == "all ignored":
        feed["t"] = torch.full(positions, ignored)
    if weighted:
        feed["w"] = torch.rand(classes) + 0.5
    given = [g.tensor(n, tuple(t.shape), t.dtype) for n, t in feed.items()]
    loss = g.cross_entropy(*given, reduction=reduction, ignore_index=ignored, label_smoothing=0.1)
    loss.output("y")

    def price(graph: Graph, most: float) -> float:
        return float("cross_entropy" in ops(graph))

    after, _ = run_passes(g.ir(), Context(GPUS["h200"], Policy(), price=price))
    assert ops(after).count("cross_entropy_with_grad") == 1 and "cross_entropy" not in ops(after)
    before = evaluate(g.ir(), feed, float64=True)["y"]
    bound = allowed(error(evaluate(g.ir(), feed)["y"], before), torch.float32, feed["x"].numel())
    assert error(evaluate(after, feed)["y"], before) <= bound


@pytest.mark.parametrize(("shape", "padding"), [((40,), -1), ((2, 9), 3), ((0, 2), -1), ((), 0)])
@pytest.mark.parametrize("kind", ["f32", "bf16", "known"])
def test_the_gradient_of_a_small_table_becomes_sums(shape, padding, kind):
    """Also of places that are known, as those of words in a sentence are."""
    g = dt.Graph()
    known = torch.randint(0, 5, shape) if kind == "known" else None
    grad = g.tensor("grad", (*shape, 6), "f32" if kind == "known" else kind)
    index = g.tensor("index", shape, "i64") if known is None else g.constant(known)
    g.embedding_grad(grad, index, rows=5, padding_idx=padding).output("y")
    feed = {"grad": torch.randn(*shape, 6).to(grad.dtype.torch)}
    feed |= {"index": torch.randint(0, 5, shape)} if known is None else {}

    def price(graph: Graph, most: float) -> float:
        return float("embedding_grad" in ops(graph))

    after, _ = run_passes(g.ir(), Context(GPUS["h200"], Policy(), price=price))
    assert "embedding_grad" not in ops(after)
    exact = evaluate(g.ir(), feed, float64=True)["y"]
    bound = allowed(error(evaluate(g.ir(), feed)["y"], exact), grad.dtype.torch, 40)
    assert error(evaluate(after, feed)["y"], exact) <= bound


@pytest.mark.parametrize(("images", "moved"), [(1, (8, 32, 1, 1)), (2, (2, 32, 112, 112))])
def test_a_gate_on_channels_goes_into_a_small_weight(images: int, moved: tuple[int, ...]) -> None:
    """Of one image; of two images it would be another weight for each."""
    g, gen = dt.Graph("gated"), torch.Generator().manual_seed(0)
    each, weight = (torch.randn(*shape, generator=gen) for shape in ((32, 1, 3, 3), (8, 32, 1, 1)))
    x = g.conv(g.tensor("x", (images, 32, 114, 114)), g.constant(each, "each"), groups=32)
    gate = g.sigmoid(g.mean(x, axes=(2, 3), keepdim=True))
    g.conv(g.mul(x, gate), g.constant(weight, "w")).output("y")
    plan = g.compile(device="cpu")
    graphs = [choice.region.graph for choice in plan.decision.choices]
    muls = [h.types[n.output].shape for h in graphs for n in h.nodes if n.op == "mul"]
    assert [shape for shape in muls if shape[-1] != 1 or images == 1] == [moved]
    given = torch.randn(images, 32, 114, 114, generator=gen)
    image = torch.nn.functional.conv2d(given.double(), each.double(), groups=32)
    image = image * image.mean((2, 3), keepdim=True).sigmoid()
    exact = torch.nn.functional.conv2d(image, weight.double())
    assert error(plan.run(x=given)["y"], exact) < 1e-6
