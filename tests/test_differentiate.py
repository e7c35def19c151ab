"""Gradients of whole graphs against PyTorch's autograd in float64. Each operator's own rule is
checked by finite differences in test_ops.py."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_passes import close, context, random
from tolerances import DOUBLE, DOUBLE_GRADIENT, allowed, error

import deuteron as dt
from deuteron.errors import GraphError
from deuteron.ir import Graph, check
from deuteron.ops import TABLE, Fusion, OpDef, infer, table
from deuteron.ops.evaluate import evaluate
from deuteron.passes import differentiate, pullback, run_passes


def agrees(graph: Graph, feed: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """The ``grad_`` outputs are ``want``, before and after all passes."""
    check(graph, infer)
    got = evaluate(graph, feed)
    for name, exact in want.items():
        assert error(got[f"grad_{name}"], exact) <= allowed(0.0, torch.float64, 1000), name
    close(graph, run_passes(graph, context())[0], feed, 1000)


def leaves(graph: Graph) -> dict[str, torch.Tensor]:
    return {v: random(graph.types[v]).requires_grad_() for v in graph.inputs}


def values(feed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in feed.items()}


def mlp() -> dt.Graph:
    g = dt.Graph()
    x, w1, b1 = (
        g.tensor("x", (5, 4), "f64"),
        g.tensor("w1", (6, 4), "f64"),
        g.tensor("b1", (6,), "f64"),
    )
    w2, t = g.tensor("w2", (3, 6), "f64"), g.tensor("t", (5, 3), "f64")
    y = g.linear(g.gelu(g.linear(x, w1, b1)), w2).output("y")
    g.mean(g.square(y - t)).output("loss")
    return g


def test_a_small_network():
    graph = mlp().ir()
    feed = leaves(graph)
    hidden = F.gelu(F.linear(feed["x"], feed["w1"], feed["b1"]))
    loss = F.mse_loss(F.linear(hidden, feed["w2"]), feed["t"])
    names = list(graph.inputs)
    want = dict(zip(names, torch.autograd.grad(loss, list(feed.values())), strict=True))
    back = differentiate(graph, "loss", names)
    assert back.inputs == graph.inputs, "one number needs no seed"
    agrees(back, values(feed), want)


def test_a_seed_is_an_input_of_the_outputs_shape():
    graph = mlp().ir()
    back = differentiate(graph, "y", ["x"])
    assert back.inputs == (*graph.inputs, "grad_y")
    assert back.types["grad_y"].shape == (5, 3)
    feed, seed = leaves(graph), torch.randn(5, 3).double()
    y = F.linear(F.gelu(F.linear(feed["x"], feed["w1"], feed["b1"])), feed["w2"])
    (want,) = torch.autograd.grad(y, feed["x"], seed)
    agrees(back, values(feed) | {"grad_y": seed}, {"x": want})


def test_a_convolution_block_with_shared_and_residual_paths():
    g = dt.Graph()
    x, w = g.tensor("x", (2, 4, 5, 5), "f64", layout="nhwc"), g.tensor("w", (4, 4, 3, 3), "f64")
    scale, shift = g.tensor("scale", (4,), "f64"), g.tensor("shift", (4,), "f64")
    y = g.conv(x, w, padding=1)
    y, *_ = g.batch_norm_train(y, scale, shift, None, None)
    y = g.relu(g.conv(y, w, padding=1) + x)  # the weight is used twice
    y = g.conv(y, g.constant(torch.randn(4, 2, 2, 2).double(), "up"), transposed=True, stride=2)
    g.sum(g.square(g.max_pool(y, kernel=2))).output("loss")
    graph = g.ir()
    feed = leaves(graph)
    y = F.conv2d(feed["x"], feed["w"], padding=1)
    y = F.batch_norm(y, None, None, feed["scale"], feed["shift"], training=True)
    y = F.relu(F.conv2d(y, feed["w"], padding=1) + feed["x"])
    y = F.conv_transpose2d(y, graph.constants["up"].data, stride=2)
    loss = F.max_pool2d(y, 2).square().sum()
    want = dict(zip(feed, torch.autograd.grad(loss, list(feed.values())), strict=True))
    agrees(differentiate(graph, "loss", list(feed)), values(feed), want)


def test_second_derivatives_through_a_convolution():
    g = dt.Graph()
    x, w = g.tensor("x", (1, 2, 5, 5), "f64"), g.tensor("w", (3, 2, 3, 3), "f64")
    g.sum(g.tanh(g.conv(x, w, stride=2, padding=1))).output("loss")
    once = dt.Graph.of(differentiate(g.ir(), "loss", ["x"]))
    slope = once.sym(dict(once.build.outputs)["grad_x"])
    once.sum(once.square(slope)).output("penalty")
    twice = differentiate(once.ir(), "penalty", ["w"])
    feed = leaves(g.ir())
    loss = F.conv2d(feed["x"], feed["w"], stride=2, padding=1).tanh().sum()
    (first,) = torch.autograd.grad(loss, feed["x"], create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), feed["w"])
    agrees(twice, values(feed), {"w": want})


def test_inputs_that_do_not_reach_the_output_have_gradient_zero():
    g = dt.Graph()
    x, other = g.tensor("x", (3, 4), "f64"), g.tensor("other", (2, 5), "f64")
    g.relu(other).output("elsewhere")
    g.floor(x).output("flat")
    g.sum(x).output("loss")
    back = differentiate(g.ir(), "loss", ["other", "x"])
    got = evaluate(back, values(leaves(g.ir())))
    assert torch.equal(got["grad_other"], torch.zeros(2, 5).double())
    assert torch.equal(got["grad_x"], torch.ones(3, 4).double())
    flat = differentiate(g.ir(), "flat", ["x"])
    assert not evaluate(flat, values(leaves(flat)))["grad_x"].any()


def test_an_output_that_is_an_input_passes_its_seed_on():
    g = dt.Graph()
    x = g.tensor("x", (3,), "f64").output("y")
    assert (x * 1.0).dtype == x.dtype
    back = differentiate(g.ir(), "y", ["x"])
    assert dict(back.outputs)["grad_x"] == "grad_y"


def test_constants_can_be_differentiated_too():
    g = dt.Graph()
    w = g.constant(torch.randn(4, 4).double(), "w")
    g.sum(g.matmul(g.tensor("x", (3, 4), "f64"), w)).output("loss")
    feed = values(leaves(g.ir()))
    want = feed["x"].sum(0)[:, None].expand(4, 4)
    agrees(differentiate(g.ir(), "loss", ["w"]), feed, {"w": want})


def test_a_scalar_loss_keeps_its_type():
    """Numbers beside a rank-0 tensor of float32 do not turn it, or its gradient, to float64."""
    g = dt.Graph()
    x = g.tensor("x", (3, 4))
    loss = 1.0 - g.log(g.mean(g.square(x)) * 0.5 + 1) / 2
    loss.output("loss")
    assert loss.dtype == dt.float32
    back = check(differentiate(g.ir(), "loss", ["x"]), infer)
    assert not any(t.dtype == dt.float64 and t.rank for t in back.types.values())
    feed = {"x": torch.randn(3, 4)}
    for name, got in evaluate(back, feed).items():
        assert got.dtype == torch.float32, name


@pytest.mark.parametrize(
    ("of", "wrt", "wrong"),
    [
        ("nothing", ["x"], "no output 'nothing'"),
        ("y", ["z"], "'z' is not an input"),
        ("y", ["index"], "int64: only floats have gradients"),
        ("places", ["x"], "not a float"),
        ("y", ["x", "x"], "already an output"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(of, wrt, wrong):
    g = dt.Graph()
    x, index = g.tensor("x", (3, 4)), g.tensor("index", (2,), "i64")
    g.index_select(x, index, axis=0).output("y")
    (index + 1).output("places")
    with pytest.raises(GraphError, match=wrong):
        differentiate(g.ir(), of, wrt)


def test_an_operator_without_a_rule_is_named_only_if_it_is_needed(monkeypatch):
    x_type = TABLE["relu"].infer
    op = OpDef("steep", "x, with no rule.", ("x",), x_type, torch.clone, Fusion.ELEMENTWISE)
    monkeypatch.setitem(table.TABLE, "steep", op)
    g = dt.Graph()
    x, y = g.tensor("x", (3,)), g.tensor("y", (3,))
    g.sum(g.call("steep", y) * x).output("loss")
    differentiate(g.ir(), "loss", ["x"])
    with pytest.raises(GraphError, match="steep has no gradient rule"):
        differentiate(g.ir(), "loss", ["y"])


def test_a_rule_that_gives_another_type_is_named(monkeypatch):
    op = OpDef(
        "bent",
        "x, with a wrong rule.",
        ("x",),
        TABLE["relu"].infer,
        torch.clone,
        Fusion.ELEMENTWISE,
        vjp=lambda b, v: [b.sum(v.grad)],
    )
    monkeypatch.setitem(table.TABLE, "bent", op)
    g = dt.Graph()
    g.sum(g.call("bent", g.tensor("x", (3,)))).output("loss")
    with pytest.raises(GraphError, match="gradient of bent for 'x'"):
        differentiate(g.ir(), "loss", ["x"])


@pytest.mark.parametrize("which", [1, 2, 3, 4])
def test_a_later_result_alone_may_reach_the_loss(which):
    g = dt.Graph()
    results = g.batch_norm_train(g.tensor("x", (3, 4)), None, None, None, None)
    g.sum(results[which]).output("loss")
    back = differentiate(g.ir(), "loss", ["x"])  # the statistics count as fixed
    assert not evaluate(back, {"x": torch.randn(3, 4)})["grad_x"].any()


def test_a_gradient_that_is_one_operator_can_be_differentiated_again():
    """``layer_norm_grad`` has no gradient rule of its own: it is written out first."""
    g = dt.Graph()
    x, seed = g.tensor("x", (3, 5), "f64"), g.tensor("seed", (3, 5), "f64")
    g.call("layer_norm_grad", x, seed, None, bias="none").output("y")
    graph = g.ir()
    feed = leaves(graph)
    y = F.layer_norm(feed["x"], (5,))
    (dx,) = torch.autograd.grad(y, feed["x"], feed["seed"], create_graph=True)
    way = random(graph.types["x"])
    want = dict(zip(feed, torch.autograd.grad(dx, list(feed.values()), way), strict=True))
    given = values(feed) | {"grad_y": way}
    agrees(differentiate(graph, "y", list(feed)), given, want)
    agrees(pullback(graph, {"y": graph.types["x"]}, list(feed)), given, want)


@pytest.mark.parametrize("act", [None, "relu", "leaky_relu", "silu"])
@pytest.mark.parametrize("joined", [False, True], ids=["alone", "residual"])
def test_batch_norm_takes_along_what_follows_it(act, joined):
    """One operator each way, and the gradients and statistics of the parts."""
    gen = torch.Generator().manual_seed(0)
    shape = (3, 4, 5, 2)
    x, r = (torch.randn(shape, generator=gen, dtype=torch.float64) for _ in range(2))
    w, b, mean, var = (torch.rand(4, generator=gen, dtype=torch.float64) + 0.5 for _ in range(4))
    g = dt.Graph("norm")
    feed = {"x": x, "r": r, "w": w, "b": b, "mean": mean, "var": var}
    s = {name: g.tensor(name, t.shape, t.dtype) for name, t in feed.items()}
    y, new_mean, new_var, *_ = g.batch_norm_train(s["x"], s["w"], s["b"], s["mean"], s["var"])
    z = s["r"] + y if joined else y
    z = z if act is None else g.call(act, z)
    g.sum(z * z).output("loss")
    new_mean.output("new_mean")
    new_var.output("new_var")
    back = g.grad("loss", wrt=["x", "r", "w", "b"]).ir()
    ops = {node.op for node in back.nodes}
    assert {"batch_norm_act", "batch_norm_act_grad"} <= ops and "batch_norm_train" not in ops
    assert act is None or act not in ops
    leaves = {n: feed[n].clone().requires_grad_() for n in ("x", "r", "w", "b")}
    kept = [mean.clone(), var.clone()]
    out = F.batch_norm(leaves["x"], *kept, leaves["w"], leaves["b"], True)
    out = leaves["r"] + out if joined else out
    out = out if act is None else getattr(F, act)(out)
    out.square().sum().backward()
    got = evaluate(back, feed)
    for name, leaf in leaves.items():
        want = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert error(got[f"grad_{name}"], want) <= DOUBLE_GRADIENT, name
    for name, want in zip(("new_mean", "new_var"), kept, strict=True):
        assert error(got[name], want) <= DOUBLE, name


def test_a_sum_of_two_batch_norms_goes_with_one_of_them():
    g = dt.Graph("block")
    x, y = (g.tensor(n, (3, 4, 5), dt.float64) for n in "xy")
    total = g.batch_norm_train(x)[0] + g.batch_norm_train(y)[0]
    g.sum(g.square(g.relu(total))).output("loss")
    back = g.grad("loss", wrt=["x", "y"]).ir()
    assert [n.op for n in back.nodes].count("batch_norm_act") == 2
    feed = {n: random(back.types[n]) for n in "xy"}
    a, b = (feed[n].clone().requires_grad_() for n in "xy")
    norm = [F.batch_norm(t, None, None, training=True) for t in (a, b)]
    F.relu(norm[0] + norm[1]).square().sum().backward()
    agrees(back, feed, {"x": a.grad, "y": b.grad})


def test_a_batch_norm_may_read_another():
    g, data = dt.Graph(), torch.randn(4, 3, dtype=torch.float64)
    y = g.batch_norm_train(g.batch_norm_train(g.tensor("x", (4, 3), "f64"))[0])[0]
    g.sum(y * y * y).output("loss")
    leaf = data.clone().requires_grad_()
    want = F.batch_norm(F.batch_norm(leaf, None, None, training=True), None, None, training=True)
    want.pow(3).sum().backward()
    found = evaluate(differentiate(g.ir(), "loss", ["x"]), {"x": data})["grad_x"]
    assert error(found, leaf.grad) <= DOUBLE_GRADIENT
