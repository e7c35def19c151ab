"""Fusion: regions cover the graph, run in their order, and every refusal is explained."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import JUMPS, graphs
from test_passes import random
from tolerances import allowed, error

import deuteron as dt
from deuteron.ir import Graph, Region
from deuteron.ops import TABLE, Fusion
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Veto, fuse
from deuteron.passes.after_products import MAX_LEFT
from deuteron.passes.fuse import MAX_NODES, Fuser
from deuteron.passes.fusion_rules import RULES

Fused = tuple[tuple[Region, ...], tuple[Veto, ...]]


def sound(graph: Graph) -> Fused:
    """Fuse and check what must hold for every graph, also where products take along more."""
    checked(graph, gates=True)
    return checked(graph)


def checked(graph: Graph, gates: bool = False) -> Fused:
    regions, vetoes = fuse(graph, gates)
    placed = [id(node) for region in regions for node in region.nodes]
    assert sorted(placed) == sorted(map(id, graph.nodes)), "every node is in exactly one region"
    known = {*graph.inputs, *graph.constants}
    for region in regions:
        assert set(region.inputs) <= known, "regions run in their order"
        assert region.constants == {v for v in region.inputs if v in graph.constants}
        known.update(region.outputs)
        made = known.union(*(node.outputs for node in region.nodes))
        assert all(set(node.uses) <= made | set(region.graph.constants) for node in region.nodes)
        assert len(region.nodes) <= MAX_NODES
        heavy = [i for i, n in enumerate(region.nodes) if TABLE[n.op].fusion in HEAVY]
        assert len(heavy) <= 1 + gates
        assert region.anchor in heavy if heavy else region.anchor is None
        products = sum(TABLE[n.op].fusion is Fusion.COMPLEX for n in region.nodes)
        assert not gates or not products or len(region.outputs) <= MAX_LEFT
    assert {value for _, value in graph.outputs} <= known
    for veto in vetoes:
        assert veto.reason and veto.producer and veto.consumer
        assert veto.bytes in (0, 2 * graph.types[veto.value].nbytes)
    return regions, vetoes


HEAVY = (Fusion.REDUCTION, Fusion.COMPLEX, Fusion.OPAQUE)


def shape_of(fused: Fused) -> list[tuple[str, ...]]:
    return [region.ops for region in fused[0]]


def by_regions(graph: Graph, feed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The graph computed region by region, in float64."""
    env = dict(feed) | {name: c.data for name, c in graph.constants.items()}
    for region in fuse(graph)[0]:
        env |= evaluate(region.graph, {v: env[v] for v in region.inputs}, float64=True)
    return {name: env[value] for name, value in graph.outputs}


# ---- any graph -----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(graphs(nodes=24))
def test_random_graphs_fuse_soundly(made):
    sound(made[0])


@settings(max_examples=50)
@given(graphs(nodes=12, without=JUMPS))
def test_regions_compute_what_the_graph_does(made):
    graph, feed = made
    exact = evaluate(graph, feed, float64=True)
    for name, got in by_regions(graph, feed).items():
        assert error(got, exact[name]) <= allowed(0.0, torch.float64), name


def tangle(random: Random, size: int) -> Graph:
    """A dense graph of a few operators of every class over one square shape."""
    g = dt.Graph()
    values = [g.tensor(f"x{i}", (4, 4)) for i in range(3)]
    for _ in range(size):
        near = values[-6:] if random.random() < 0.7 else values
        a, b, c = (random.choice(near) for _ in range(3))
        make = random.choice(
            [
                lambda a, b, c: g.relu(a),
                lambda a, b, c: a + b,
                lambda a, b, c: g.where(g.gt(a, 0.0), b, c),
                lambda a, b, c: g.permute(a, dims=(1, 0)),
                lambda a, b, c: g.slice(g.concat([a, b, c], axis=0), axis=0, stop=4),
                lambda a, b, c: b + g.sum(a, axes=(1,), keepdim=True),
                lambda a, b, c: g.softmax(a),
                lambda a, b, c: g.matmul(a, b),
            ]
        )
        values.append(make(a, b, c))
    for i, value in enumerate(values[-3:]):
        value.output(f"y{i}")
    return g.ir()


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60))
def test_tangled_graphs_have_no_cycles(seed, size):
    sound(tangle(Random(seed), size))


def test_long_chains_are_cut_and_cheap():
    """Joining looks at few groups however long the graph is: no search grows with it."""

    def steps(length: int) -> int:
        g = dt.Graph()
        y = x = g.tensor("x", (4, 4))
        for i in range(length):
            y = g.matmul(y, x) if i % 3 == 2 else g.relu(y) + x
        y.output("y")
        fuser, looked = Fuser(g.ir()), 0
        find = fuser.find

        def counted(group: int) -> int:
            nonlocal looked
            looked += 1
            return find(group)

        fuser.find = counted
        fuser.run()
        return looked

    assert steps(2000) <= 2.2 * steps(1000)
    g = dt.Graph()
    y = g.tensor("x", (4,))
    for _ in range(3 * MAX_NODES):
        y = g.relu(y)
    y.output("y")
    regions, vetoes = sound(g.ir())
    assert [len(r.nodes) for r in regions] == [MAX_NODES] * 3
    assert [v.reason for v in vetoes] == [f"the region would pass {MAX_NODES} nodes"] * 2


# ---- cycles ------------------------------------------------------------------------------------


def test_a_concat_does_not_swallow_what_its_other_input_needs():
    """relu(x) may not join the concat: the product between them would wait for itself."""
    g = dt.Graph()
    x, z, w = (g.tensor(n, (4, 4)) for n in "xzw")
    early = g.relu(x)
    g.concat([g.exp(z), g.matmul(early, w), early], axis=0).output("y")
    regions = shape_of(sound(g.ir()))
    assert regions == [("relu",), ("matmul",), ("exp", "concat")]


def test_a_group_that_grew_late_still_counts():
    """add joins relu after the product read relu: what joins the sum must see that path."""
    g = dt.Graph()
    x, v, z = g.tensor("x", (2, 8)), g.tensor("v", (1, 2)), g.tensor("z", (1, 8))
    a = g.relu(x)
    b = g.matmul(v, a)
    r = g.sum(z, axes=(1,), keepdim=True)
    (a + r).output("d")
    (b + r).output("n")
    sound(g.ir())


# ---- patterns ------------------------------------------------------------------------------------


def block(g: dt.Graph, x: dt.Sym, act: bool = True) -> dt.Sym:
    y = g.conv(x, torch.randn(4, 4, 1, 1), torch.randn(4))
    return g.relu(y) if act else y


def test_a_residual_joins_the_last_product():
    g = dt.Graph()
    x = g.tensor("x", (1, 4, 3, 3))
    g.relu(block(g, block(g, x), act=False) + x).output("y")
    assert shape_of(sound(g.ir())) == [("conv", "relu"), ("conv", "add", "relu")]


def test_a_diamond_joins_one_side_and_reads_the_other():
    g = dt.Graph()
    x = g.tensor("x", (1, 4, 3, 3))
    g.relu(block(g, x, act=False) + block(g, x, act=False)).output("y")
    regions, vetoes = sound(g.ir())
    assert [r.ops for r in regions] == [("conv",), ("conv", "add", "relu")]
    assert [(v.value, v.reason) for v in vetoes] == [
        ("conv", "the node already joined the region of another input")
    ]
    assert vetoes[0].bytes == 2 * 4 * 36


def test_gating_stays_inside():
    g = dt.Graph()
    y = block(g, g.tensor("x", (1, 4, 3, 3)), act=False)
    (y * g.sigmoid(y)).output("y")
    assert shape_of(sound(g.ir())) == [("conv", "sigmoid", "mul")]


def test_gradients_of_a_product_share_what_they_read():
    g = dt.Graph("gate")
    gate, up = (g.tensor(n, (6, 5)) for n in ("gate", "up"))
    (g.silu(gate) * up).output("y")
    regions, _ = sound(g.grad("y", wrt=["gate", "up"]).ir())
    assert len(regions) == 1


def test_readers_of_one_tensor_stay_apart_in_another_order_or_behind_a_third():
    g = dt.Graph("apart")
    x, w = g.tensor("x", (6, 6)), g.tensor("w", (6, 6))
    g.permute(g.relu(x), dims=(1, 0)).output("turned")
    (g.matmul(g.exp(x), w) + x).output("after")
    regions, _ = sound(g.ir())
    assert len(regions) == 3  # exp is needed before the sum, and the turned one is in another order


def test_elementwise_work_joins_the_reduction_it_feeds_and_follows():
    g = dt.Graph()
    x = g.tensor("x", (8, 16))
    y = g.softmax(g.relu(x) * 2.0) + x
    y.output("y")
    g.sum(g.exp(g.permute(x, dims=(1, 0))), axes=(0,)).output("moved")
    assert shape_of(sound(g.ir())) == [
        ("relu", "mul", "softmax", "add"),
        ("permute", "exp"),
        ("sum",),
    ]


def words(vetoes: Sequence[Veto]) -> str:
    return "; ".join(v.reason for v in vetoes)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda g, x: g.matmul(g.relu(x), x), "a product starts a region"),
        (lambda g, x: g.sum(g.matmul(x, x)), "needs whole rows"),
        (lambda g, x: g.permute(g.matmul(x, x), dims=(1, 0)), "out of the tile"),
        (lambda g, x: g.permute(g.softmax(x), dims=(1, 0)), "complete only at the end"),
        (lambda g, x: g.softmax(g.softmax(x)), "second reduction"),
        (lambda g, x: g.relu(g.matmul(x, x).output("z")), "is an output of the graph"),
        (lambda g, x: g.relu(g.softmax(x)) + g.tensor("t", (2, 4, 4)), "the reduction on"),
        (lambda g, x: g.matmul(x, g.tensor("v", (4, 1))) + x, "changes the shape"),
        (lambda g, x: g.layer_norm(x, g.relu(g.tensor("w", (4,)))), "by a side input"),
        (lambda g, x: g.sum(g.permute(g.exp(x), dims=(1, 0)), axes=(0,)), "moves elements before"),
    ],
)
def test_every_refusal_says_why(make, reason):
    g = dt.Graph()
    make(g, g.tensor("x", (4, 4))).output("y")
    _, vetoes = sound(g.ir())
    assert reason in words(vetoes)


def test_a_product_read_twice_is_written_once():
    g = dt.Graph()
    y = g.matmul(g.tensor("x", (4, 4)), g.tensor("w", (4, 4)))
    g.softmax(g.relu(y)).output("a")
    g.matmul(y, y).output("b")
    _, vetoes = sound(g.ir())
    assert "is read by matmul as well" in words(vetoes)


def test_a_widened_copy_is_made_where_it_is_read():
    g = dt.Graph()
    g.softmax(g.tensor("x", (4, 6), "bf16"), axis=-1).output("y")
    regions, _ = sound(g.grad("y", wrt="x").ir())
    assert [r.ops[0] for r in regions] == ["softmax", "cast"] and len(regions[0].nodes) == 1
    through = {v for r in regions for v in r.outputs}
    assert {regions[0].graph.types[v].dtype.short for v in regions[0].outputs} == {"bf16"}
    assert through == {regions[0].outputs[0], regions[1].outputs[0]}


def test_what_one_reduction_reads_beside_its_rows_is_computed_there():
    g = dt.Graph()
    x, grad = g.tensor("x", (4, 6), "bf16"), g.tensor("grad", (4, 6), "bf16")
    wide = g.exp(g.cast(grad, dtype="f32"))
    (g.cast(g.softmax(x, axis=-1), dtype="f32") * wide).output("y")
    regions, vetoes = sound(g.ir())
    assert len(regions) == 1 and not vetoes
    g = dt.Graph()  # the gradient of log_softmax
    y, grad = g.tensor("y", (4, 6), "f32"), g.tensor("grad", (4, 6), "f32")
    (grad - g.exp(y) * g.sum(grad, axes=(1,), keepdim=True)).output("z")
    assert [r.ops for r in sound(g.ir())[0]] == [("exp", "sum", "mul", "sub")]


@pytest.mark.parametrize("other", ["an output", "another reader", "moved", "other rows"])
def test_what_is_needed_elsewhere_or_is_not_of_the_rows_stays_outside(other):
    g = dt.Graph()
    x = g.tensor("x", (6, 6), "f32")
    first = g.tensor("first", (6, 1) if other == "other rows" else (6, 6), "f32")
    beside = g.exp(g.relu(g.permute(first, dims=(1, 0)) if other == "moved" else first))
    if other == "an output":
        beside.output("z")
    if other == "another reader":
        g.matmul(beside, x).output("z")
    (g.sum(x, axes=(0,), keepdim=True) * beside).output("y")
    regions, _ = sound(g.ir())
    assert not any({"sum", "exp"} <= set(r.ops) for r in regions)


def test_a_widened_copy_stays_where_the_narrow_value_goes_nowhere():
    g = dt.Graph()
    wide = g.cast(g.relu(g.tensor("x", (4, 6), "bf16")), dtype="f32")
    g.matmul(wide, g.tensor("w", (6, 2))).output("y")
    regions, _ = sound(g.ir())
    assert [r.ops for r in regions] == [("relu", "cast"), ("matmul",)]


def test_opaque_calls_run_alone():
    g = dt.Graph()
    call = {"target": "aten.roll.default", "args": (("in", 0), 1), "out": ("f32[4,4]",)}
    g.relu(g.aten(g.relu(g.tensor("x", (4, 4))), **call)).output("y")
    regions, vetoes = sound(g.ir())
    assert [r.ops for r in regions] == [("relu",), ("aten",), ("relu",)]
    assert words(vetoes) == "; ".join(["an opaque operator runs alone"] * 2)


def test_a_view_costs_nothing_to_keep_apart():
    g = dt.Graph()
    g.reshape(g.matmul(g.tensor("x", (4, 4)), g.tensor("w", (4, 4))), shape=(16,)).output("y")
    (veto,) = sound(g.ir())[1]
    assert veto.bytes == 0


def test_the_table_has_a_rule_for_every_pair():
    kinds = set(Fusion)
    groups = kinds - {
        Fusion.BROADCAST,
        Fusion.INJECTIVE,
    }  # what such work starts counts as elementwise
    assert set(RULES) >= {(group, kind) for group in groups for kind in kinds}


def test_regions_know_their_constants_and_scalars():
    g = dt.Graph()
    x = g.tensor("x", (4, 4))
    (g.linear(x, g.constant(torch.randn(4, 4), "w")) * 0.5).output("y")
    ((region,), _) = sound(g.ir())
    assert region.inputs == ("x", "w") and region.constants == {"w"}
    assert len(region.graph.constants) == 1, "numbers travel along as literals"
    feed = {"x": random(x.type)}
    want = evaluate(g.ir(), feed, float64=True)["y"]
    assert error(by_regions(g.ir(), feed)["y"], want) <= allowed(0.0, torch.float64)


def test_training_keeps_what_an_activation_is_of_and_goes_back_through_it_with_the_product():
    g = dt.Graph()
    x, w = g.tensor("x", (64, 32), "bf16"), g.tensor("w", (48, 32), "bf16")
    z = g.linear(x, w)
    g.gelu(z).output("h")
    z.output("z")
    assert shape_of(checked(g.ir())) == [("linear",), ("gelu",)]
    assert shape_of(checked(g.ir(), gates=True)) == [("linear", "gelu")]
    back = dt.Graph()
    dy, w = back.tensor("dy", (64, 32), "bf16"), back.tensor("w", (32, 48), "bf16")
    z = back.cast(back.tensor("z", (64, 48), "bf16"), dtype="f32")
    slope = back.sigmoid(z) * z
    back.cast(back.cast(back.matmul(dy, w), dtype="f32") * slope, dtype="bf16").output("dz")
    assert ("matmul",) in shape_of(checked(back.ir()))
    ((region,), _) = checked(back.ir(), gates=True)
    assert region.nodes[region.anchor or 0].op == "matmul" and len(region.outputs) == 1


def test_a_gate_in_training_is_one_region():
    g = dt.Graph()
    x = g.tensor("x", (64, 32), "bf16")
    one, two = (g.linear(x, g.tensor(n, (48, 32), "bf16")) for n in "wu")
    (g.silu(one) * two).output("h")
    one.output("one")
    two.output("two")
    ((region,), _) = checked(g.ir(), gates=True)
    assert sorted(region.ops) == ["linear", "linear", "mul", "silu"] and len(region.outputs) == 3


def test_all_that_reads_a_gradient_of_a_gate_goes_with_the_product():
    """It is not written, then."""
    g = dt.Graph()
    dy, w = g.tensor("dy", (64, 32), "bf16"), g.tensor("w", (32, 48), "bf16")
    a, b = (g.tensor(n, (64, 48), "bf16") for n in "ab")
    dh = g.matmul(dy, w)
    (dh * g.silu(a)).output("db")
    g.cast(g.cast(dh * b, dtype="f32") * g.cast(g.sigmoid(a), dtype="f32"), dtype="bf16").output(
        "x"
    )
    ((region,), _) = checked(g.ir(), gates=True)
    assert len(region.outputs) == 2 and "matmul" in region.ops


def test_wide_values_do_not_leave_with_a_product():
    """A cast to float32 that a sum reads is computed there: half of the bytes go through memory."""
    g = dt.Graph()
    x, w = g.tensor("x", (64, 32), "bf16"), g.tensor("w", (48, 32), "bf16")
    g.sum(g.cast(g.linear(x, w), dtype="f32"), axes=0).output("y")
    assert shape_of(checked(g.ir(), gates=True)) == [("linear",), ("cast", "sum")]


def test_a_norm_after_a_reshape_is_one_region_and_so_is_its_gradient():
    """As a transformer writes RMS norm after a projection, whose result has no batch: only the sum
    over rows for the weight's gradient needs another."""
    g = dt.Graph()
    x, r = g.tensor("x", (12, 8), "bf16"), g.tensor("r", (3, 4, 8), "f32")
    w, dy = g.tensor("w", (8,), "f32"), g.tensor("dy", (12, 8), "bf16")
    h = g.cast(g.reshape(x, shape=(3, 4, 8)), dtype="f32") + r
    h.output("h")
    scale = g.rsqrt(g.mean(h * h, axes=(2,), keepdim=True) + 1e-5)
    (h * scale * w).output("y")
    grad = g.cast(g.reshape(dy, shape=(3, 4, 8)), dtype="f32")
    inner = grad * w
    along = g.expand(g.sum(inner * h, axes=(2,), keepdim=True) * scale, shape=(3, 4, 8))
    (inner * scale - along * (h * 2.0)).output("dh")
    g.sum(grad * (h * scale), axes=(0, 1)).output("dw")
    forward, backward, weight = sound(g.ir())[0]
    assert forward.ops[0] == "reshape" and "mean" in forward.ops
    assert backward.ops[-2:] == ("sub", "mul") and len(backward.outputs) == 2
    assert weight.ops == ("sum",)


def test_results_of_several_sizes_are_parted():
    """Queries and fewer keys that are turned by the same angles, which others read as well; and a
    gate for pixels beside the gradient of its own, which is summed over the batch."""
    g = dt.Graph()
    angle = g.tensor("angle", (1, 1, 6, 8), "f32")
    cos, sin = g.cos(angle), g.sin(angle)
    cos.output("cos")
    sin.output("sin")
    for name, heads in (("q", 4), ("k", 2)):
        x = g.tensor(name, (2, heads, 6, 8), "f32")
        halves = [g.slice(x, axis=3, start=a, stop=a + 4) for a in (4, 0)]
        (x * cos + g.concat(-halves[0], halves[1], axis=3) * sin).output(f"turned {name}")
    regions, _ = sound(g.ir())
    sizes = [{r.graph.types[v].numel for v in r.outputs} for r in regions]
    assert sizes == [{48}, {384}, {192}] or sizes == [{48}, {192}, {384}]

    g = dt.Graph()
    z, x, dz = (
        g.tensor("z", (4, 3, 1, 1)),
        g.tensor("x", (4, 3, 5, 5)),
        g.tensor("dz", (4, 3, 1, 1)),
    )
    gate = g.sigmoid(z)
    (x * gate).output("y")
    slope = dz * gate * (1.0 - gate)
    slope.output("dz")
    g.sum(slope, axes=(0, 2, 3)).output("db")
    regions, _ = sound(g.ir())
    assert all(len({r.graph.types[v].numel for v in r.outputs}) == 1 for r in regions)
    (total,) = [r for r in regions if "sum" in r.ops]
    assert total.ops == ("sum",)
