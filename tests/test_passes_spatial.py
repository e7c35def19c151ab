"""Batch normalisation folded into products, and memory order chosen for convolutions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_passes import close, context, ops, promises_kept, random, run
from tolerances import allowed, error

import deuteron as dt
from deuteron.ir import Graph
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Context, run_passes
from deuteron.passes.cleanup import dead_code
from deuteron.passes.layout import choose_layout
from deuteron.passes.simplify import fold_batch_norm
from deuteron.policy import Policy
from deuteron.target import GPUS

INTO, APART = "batch norm into product", "batch norm as multiply and add"

# ---- batch norm ----------------------------------------------------------------------------------


def normed(g: dt.Graph, y: dt.Sym, affine: str = "xx", kind: str | None = None, **how) -> dt.Sym:
    """Batch norm of ``y`` with constant statistics; ``affine`` says which of weight and bias."""
    size, dtype = (y.shape[1],), dt.Graph().tensor("t", (), kind or y.dtype).dtype.torch
    stats = [torch.randn(size), torch.rand(size) + 0.1]
    stats += [torch.randn(size) if given == "x" else None for given in affine]
    return g.batch_norm(y, *(s if s is None else s.to(dtype) for s in stats), **how)


CONVOLUTIONS = {
    "plain": ((2, 4, 6, 5), (6, 4, 3, 3), 6, {"padding": 1}),
    "strided": ((2, 4, 6, 5), (6, 4, 2, 2), 6, {"stride": 2}),
    "grouped": ((2, 4, 6, 5), (6, 2, 3, 3), 6, {"groups": 2}),
    "depthwise": ((2, 4, 6, 5), (4, 1, 3, 3), 4, {"groups": 4}),
    "transposed": ((2, 4, 3, 4), (4, 6, 3, 3), 6, {"transposed": True, "stride": 2}),
    "transposed, grouped": (
        (2, 4, 3, 4),
        (4, 3, 3, 2),
        6,
        {"transposed": True, "stride": 2, "groups": 2, "output_padding": 1},
    ),
    "one dimension": ((2, 4, 7), (6, 4, 3), 6, {}),
    "three dimensions": ((1, 2, 3, 4, 3), (3, 2, 2, 2, 2), 3, {}),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", ["xx", "--", "x-", "-x"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_batch_norm_folds_into_convolutions(name, affine, bias):
    shape, weight, channels, attrs = CONVOLUTIONS[name]
    g = dt.Graph()
    x = g.tensor("x", shape, "f64")
    b = torch.randn(channels, dtype=torch.float64) if bias else None
    y = g.conv(x, torch.randn(weight, dtype=torch.float64), b, **attrs)
    normed(g, y, affine, eps=0.01).output("y")
    after, fired = run(fold_batch_norm, g)
    after, _ = run(dead_code, after)
    assert fired == {INTO: 1} and ops(after) == ["conv"]
    close(g.ir(), after, {"x": random(x.type)}, 100)


def test_batch_norm_folds_into_linear_of_rank_2_only():
    for shape, folds in (((3, 4), True), ((3, 5, 4), False)):
        g = dt.Graph()
        x = g.tensor("x", shape, "f64")
        normed(g, g.linear(x, torch.randn(5, 4, dtype=torch.float64))).output("y")
        after, fired = run(fold_batch_norm, g)
        assert fired == ({INTO: 1} if folds else {APART: 1})
        close(g.ir(), run(dead_code, after)[0], {"x": random(x.type)}, 100)


def test_batch_norm_of_rows_folds_into_what_made_them():
    """As in LeViT; but not where columns became rows, or others read what was not normed."""
    for shape, read, folds in (
        ((15, 8), False, True),
        ((30, 4), False, False),
        ((15, 8), True, False),
    ):
        g = dt.Graph()
        x = g.tensor("x", (3, 5, 4), "f64")
        rows = g.reshape(g.linear(x, torch.randn(8, 4, dtype=torch.float64)), shape=shape)
        if read:
            rows.output("rows")
        normed(g, rows).output("y")
        after, fired = run(fold_batch_norm, g)
        assert fired == ({INTO: 1} if folds else {APART: 1})
        close(g.ir(), run(dead_code, after)[0], {"x": random(x.type)}, 100)


def conv(g: dt.Graph, kind: str = "f64", weight: object = None) -> dt.Sym:
    x = g.tensor("x", (2, 4, 6, 5), kind)
    w = torch.randn(6, 4, 3, 3).to(x.dtype.torch) if weight is None else weight
    return g.conv(x, w, padding=1)


def test_a_product_that_others_read_is_not_folded_into():
    g = dt.Graph()
    y = conv(g)
    normed(g, y).output("y")
    g.relu(y).output("z")
    after, fired = run(fold_batch_norm, g)
    assert fired == {APART: 1} and ops(after).count("conv") == 1
    close(g.ir(), after, {"x": random(g.ir().types["x"])}, 100)
    g = dt.Graph()
    y = conv(g).output("product")
    normed(g, y).output("y")
    assert run(fold_batch_norm, g)[1] == {APART: 1}


def test_statistics_and_weights_that_are_inputs_stay():
    g = dt.Graph()
    y = conv(g)
    g.batch_norm(y, g.tensor("mean", (6,), "f64"), torch.ones(6).double()).output("y")
    assert run(fold_batch_norm, g)[1] == {}
    g = dt.Graph()
    normed(g, conv(g, weight=g.tensor("w", (6, 4, 3, 3), "f64"))).output("y")
    assert run(fold_batch_norm, g)[1] == {APART: 1}
    g = dt.Graph()
    x, w = g.tensor("x", (2, 4, 6, 5), "f64"), torch.randn(6, 4, 3, 3).double()
    normed(g, g.conv(x, w, g.tensor("b", (6,), "f64"))).output("y")
    assert run(fold_batch_norm, g)[1] == {APART: 1}


@pytest.mark.parametrize("params", ["f16", "f32"])
def test_batch_norm_folds_in_half_precision(params):
    g = dt.Graph()
    normed(g, conv(g, "f16"), kind=params).output("y")
    after, fired = run(fold_batch_norm, g)
    assert fired == {INTO: 1}
    feed = {"x": random(after.types["x"])}
    exact = evaluate(g.ir(), feed, float64=True)["y"]
    plain, folded = (error(evaluate(graph, feed)["y"], exact) for graph in (g.ir(), after))
    assert folded <= allowed(plain, torch.float16, 36)
    assert after.types[after.outputs[0][1]].dtype.short == "f16"


def test_a_mean_far_from_the_sum_costs_a_transposed_one_no_digits():
    """Folded, it is a bias, beside which a sum that started from it would be rounded."""
    torch.manual_seed(0)
    g = dt.Graph()
    y = g.conv(
        g.tensor("x", (2, 32, 6, 5), "f16"), (torch.randn(32, 8, 2, 2) / 64).half(), transposed=True
    )
    stats = torch.full((8,), 3.0), torch.ones(8)
    g.batch_norm(y, *(x.half() for x in stats)).output("y")
    after, fired = run(fold_batch_norm, g)
    assert fired == {INTO: 1}
    feed = {"x": random(after.types["x"])}
    exact = evaluate(g.ir(), feed, float64=True)["y"]
    plain, folded = (error(evaluate(graph, feed)["y"], exact) for graph in (g.ir(), after))
    assert folded <= allowed(plain, torch.float16)


def test_batch_norm_alone_is_one_multiply_and_add():
    for kind, want in (("f32", ["mul", "add"]), ("f64", ["mul", "add"]), ("f16", ["batch_norm"])):
        for shape in ((3, 4), (2, 4, 3), (2, 4, 3, 5)):
            g = dt.Graph()
            normed(g, g.tensor("x", shape, kind)).output("y")
            after, _ = run(fold_batch_norm, g)
            assert ops(after) == want
            if kind == "f64":
                close(g.ir(), after, {"x": random(after.types["x"])})


def test_a_factor_too_large_for_the_type_is_not_folded():
    g = dt.Graph()
    y = g.conv(g.tensor("x", (1, 2, 3, 3), "f16"), torch.full((2, 2, 1, 1), 100.0).half())
    g.batch_norm(y, torch.zeros(2), torch.zeros(2), eps=1e-8).output("y")
    assert run(fold_batch_norm, g)[1] == {}


# ---- layout --------------------------------------------------------------------------------------


def network(layout: str = "contiguous", dtype: str = "f32") -> dt.Graph:
    """Two residual blocks, a head that pools, and an output in the middle."""
    g = dt.Graph()
    x = g.tensor("x", (2, 4, 6, 5), dtype, layout=layout)
    y = g.relu(g.conv(x, torch.randn(4, 4, 3, 3).to(x.dtype.torch), padding=1))
    y = g.relu(g.conv(y, torch.randn(4, 4, 3, 3).to(x.dtype.torch), padding=1) + x)
    y.output("middle")
    z = g.max_pool(g.conv(y, torch.randn(8, 4, 1, 1).to(x.dtype.torch)), kernel=2)
    z = g.reshape(g.adaptive_avg_pool(z, size=1), shape=(2, 8))
    g.linear(z, torch.randn(3, 8).to(x.dtype.torch)).output("y")
    return g


def planned(g: dt.Graph, **policy) -> Graph:
    return run_passes(g.ir(), Context(GPUS["h200"], Policy(**policy)))[0]


def test_conversions_are_at_the_edges():
    g = network()
    after = planned(g)
    turned = [node for node in after.nodes if node.op == "to_layout"]
    assert [node.attrs["layout"] for node in turned] == ["nhwc", "contiguous"]
    assert turned[0].inputs == ("x",) and turned[1].outputs[0] == dict(after.outputs)["middle"]
    for node in after.nodes:
        if node.op == "conv":
            assert all(after.types[v].is_layout("nhwc") for v in (*node.uses[:2], node.output))
    promises_kept(g.ir(), after)
    feed = {"x": random(after.types["x"])}
    close(g.ir(), after, feed, 100)


def test_a_residual_joins_in_its_converted_form():
    add = next(node for node in planned(network()).nodes if node.op == "add")
    assert "x" not in add.inputs


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bound", [True, False])
def test_an_operand_is_converted_where_its_sum_would_be(bound, first):
    """As heads of attention are, to which a convolution is added; on the way to another one."""
    g = dt.Graph()
    x, heads = g.tensor("x", (1, 8, 4, 4)), g.tensor("heads", (1, 2, 16, 4))
    local = g.conv(x, torch.randn(8, 8, 3, 3), padding=1)
    others = g.reshape(g.permute(heads, dims=(0, 1, 3, 2)), (1, 8, 4, 4))
    total = g.gelu(g.resize(others + local if first else local + others, size=(8, 8)))
    (g.conv(total, torch.randn(4, 8, 1, 1)) if bound else g.softmax(total)).output("y")
    after = planned(g)
    resized = next(node for node in after.nodes if node.op == "resize")
    assert after.types[resized.uses[0]].is_layout("nhwc" if bound or not first else "contiguous")
    turned = [after.types[n.output].shape for n in after.nodes if n.op == "to_layout"]
    assert not bound or (1, 8, 8, 8) not in turned
    promises_kept(g.ir(), after)
    close(g.ir(), after, {v: random(after.types[v]) for v in after.inputs}, 100)


def test_nhwc_inputs_need_no_conversion():
    assert "to_layout" not in ops(planned(network("nhwc")))


def test_policy_keep_and_wide_types_change_nothing():
    for g, policy in ((network(), {"layout": "keep"}), (network(dtype="f64"), {})):
        after = planned(g, **policy)
        assert "to_layout" not in ops(after)
        assert all(
            after.types[n.output].layout == "contiguous" for n in after.nodes if n.op == "conv"
        )


def test_outputs_come_back_in_the_order_that_was_promised():
    """Also where a rule before the layout pass changed it: one pixel, repeated, has stride 0."""
    g = dt.Graph()
    x = g.tensor("x", (2, 3, 4, 4), layout="nhwc")
    g.resize(g.adaptive_avg_pool(x, size=1), size=(4, 4)).output("repeated")
    g.conv(x, torch.randn(3, 3, 1, 1)).output("turned")
    g.permute(g.conv(x, torch.randn(3, 3, 1, 1)), dims=(0, 2, 3, 1)).output("view")
    for policy in ({}, {"layout": "keep"}):
        after = planned(g, **policy)
        promises_kept(g.ir(), after)
        close(g.ir(), after, {"x": random(x.type)}, 16)


def test_a_value_named_like_a_conversion_is_no_trouble():
    g = dt.Graph()
    y = g.relu(g.conv(g.tensor("x", (2, 3, 4, 4)), torch.randn(4, 3, 3, 3)))
    g.to_layout(y, layout="nhwc").output("y")
    promises_kept(g.ir(), planned(g))


def test_backward_convolutions_run_in_nhwc_too():
    g = dt.Graph()
    x, w = g.tensor("x", (2, 4, 6, 5)), g.tensor("w", (4, 4, 3, 3))
    g.conv(x, w, padding=1).output("y")
    back = g.grad("y", [x, w])
    after = planned(back)
    for node in after.nodes:
        if node.op.startswith("conv"):
            assert all(after.types[v].is_layout("nhwc") for v in (*node.uses, node.output))
    promises_kept(back.ir(), after)
    close(back.ir(), after, {v: random(after.types[v]) for v in after.inputs}, 100)


def test_each_value_is_converted_once():
    g = dt.Graph()
    x = g.tensor("x", (2, 4, 6, 5))
    for i in range(3):
        g.relu(g.conv(x, torch.randn(4, 4, 1, 1))).output(f"y{i}")
    _, fired = run(choose_layout, g)
    assert fired["output converted back"] == 3
    assert ops(planned(g)).count("to_layout") == 4


def test_one_bias_for_two_added_convolutions():
    def built(first: str = "f64", second: str = "f64", read: bool = False) -> dict[str, int]:
        g = dt.Graph()
        made = []
        for i, kind in enumerate((first, second)):
            x = g.tensor(f"x{i}", (2, 4, 6, 5), kind)
            dtype = x.dtype.torch
            made.append(g.conv(x, torch.randn(3, 4, 1, 1).to(dtype), torch.randn(3).to(dtype)))
        (made[0] + made[1]).output("y")
        if read:
            made[0].output("z")
        after, records = run_passes(g.ir(), replace(context(), policy=Policy(layout="keep")))
        close(g.ir(), after, {v: random(after.types[v]) for v in after.inputs}, 100)
        return {rule: n for r in records for rule, n in r.fired.items()}

    rule = "one bias for two added convolutions"
    assert built()[rule] == 1
    assert rule not in built(read=True)
    assert rule not in built("f32", "f64")


def test_channels_that_are_cut_joined_and_shuffled_stay_with_their_pixels():
    g = dt.Graph()
    y = x = g.tensor("x", (2, 8, 5, 6), layout="nhwc")
    for weight in torch.randn(3, 4, 4, 1, 1):
        kept, made = g.slice(y, 1, 0, 4), g.conv(g.slice(y, 1, 4, 8), weight)
        parts = g.reshape(g.concat(kept, made, axis=1), shape=(2, 2, 4, 5, 6))
        y = g.reshape(g.permute(parts, dims=(0, 2, 1, 3, 4)), shape=x.shape)
    y.output("y")
    after = planned(g)
    joined = [node.output for node in after.nodes if node.op == "concat"]
    assert len(joined) == 3 and all(after.types[v].is_layout("nhwc") for v in joined)
    turned = [node.attrs["layout"] for node in after.nodes if node.op == "to_layout"]
    assert turned.count("contiguous") <= 1  # for the caller
    promises_kept(g.ir(), after)
    close(g.ir(), after, {"x": random(after.types["x"])}, 100)
