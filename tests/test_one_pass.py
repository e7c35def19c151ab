"""What joint plans for a GPU fuse: norms, losses and products with what lies around them."""

from __future__ import annotations

import torch

import deuteron as dt
from deuteron.ir import Graph
from deuteron.ops.evaluate import evaluate
from deuteron.passes import fuse, run_passes
from deuteron.passes.context import Context
from deuteron.plan import decide
from tests.tolerances import EPS, error


def test_what_a_norm_or_a_sum_makes_is_rounded_by_its_kernel_in_whatever_shape():
    g = dt.Graph()
    x, w = g.tensor("x", (4, 6, 64)), g.tensor("w", (64, 32), "bf16")
    rows = g.reshape(g.layer_norm(x, g.tensor("s", (64,))), shape=(24, 64))
    (g.cast(rows, dtype="bf16") @ w).output("y")
    total = g.sum(g.tensor("d", (24, 32), "bf16"), axes=(0,), keepdim=True)
    g.cast(g.reshape(total, shape=(32,)), dtype="f32").output("db")
    made = run_passes(g.ir(), Context(dt.target("h200"), dt.Policy()))[0]
    regions = {region.ops: region for region in fuse(made)[0]}
    assert ("layer_norm", "cast") in regions and ("sum", "cast") in regions
    feed = {v: torch.randn(g.ir().types[v].shape).to(g.ir().types[v].dtype.torch) for v in "xswd"}
    for name, value in evaluate(g.ir(), feed).items():
        assert torch.equal(evaluate(made, feed)[name], value)


def test_a_gradient_of_logits_is_written_with_its_zeros_alone():
    """By a loss over an odd number of words, for a bias as well as for two products."""
    g = dt.Graph()
    sizes = {"x": (64, 64), "w": (5003, 64), "b": (5003,)}
    x, w, b = (g.tensor(name, size, "bf16") for name, size in sizes.items())
    g.cross_entropy(g.linear(x, w, b), g.tensor("y", (64,), "i64")).output("loss")
    joint = g.grad("loss", wrt=["x", "w", "b"]).ir()
    decided = decide(joint, dt.target("h200"), dt.Policy())
    (ours,) = [r for r in decided.regions if "cross_entropy_with_grad" in r.ops]
    assert "pad" in ours.ops
    assert not any(r.ops == ("pad",) and (64, 5003) in _shapes(r) for r in decided.regions)
    feed = {v: torch.randn(joint.types[v].shape).bfloat16() / 8 for v in "xwb"}
    feed["y"] = torch.randint(0, 5003, (64,))
    wanted = evaluate(joint, {n: t.double() if n != "y" else t for n, t in feed.items()})
    for name, value in evaluate(decided.graph, feed).items():
        assert error(value, wanted[name]) <= 4 * EPS[torch.bfloat16], name


def _shapes(region):
    return [region.graph.types[v].shape for v in region.inputs]


def gpu_regions(g: dt.Graph) -> tuple[Graph, list[tuple[str, ...]]]:
    made = run_passes(g.ir(), Context(dt.target("h200"), dt.Policy()))[0]
    return made, [region.ops for region in fuse(made, gates=True)[0]]


def test_activations_follow_products_that_are_seen_in_another_shape():
    """As in BERT: products of rows, activations of a batch of them, and their gradients."""
    g = dt.Graph()
    x, w, v = (g.tensor(n, s, "bf16") for n, s in (("x", (24, 8)), ("w", (16, 8)), ("v", (5, 16))))
    h = g.reshape(g.linear(x, w), shape=(4, 6, 16))
    g.linear(g.reshape(g.gelu(h), shape=(24, 16)), v).output("y")
    turned = g.matmul(g.tensor("d", (24, 5), "bf16"), v)
    back = g.reshape(turned, shape=(4, 6, 16)) * g.tanh(h)
    g.matmul(g.permute(g.reshape(back, shape=(24, 16)), dims=(1, 0)), x).output("dw")
    made, regions = gpu_regions(g)
    assert ("linear", "gelu", "tanh", "mul") in regions  # which meets the other product
    feed = {n: torch.randn(g.ir().types[n].shape).bfloat16() for n in "xwvd"}
    for name, value in evaluate(g.ir(), feed).items():
        assert torch.equal(evaluate(made, feed)[name], value)


def test_gradients_are_added_up_and_dropped_where_a_norm_is_pulled_back():
    """Where ways meet after a norm, in front of dropout and a layer with a bias."""
    g = dt.Graph()
    x, extra = g.tensor("x", (4, 6, 32)), g.tensor("e", (4, 6, 32))
    one, two = (g.tensor(n, (24, 32), "bf16") for n in ("a", "b"))
    grad = extra
    for each in (one, two):
        grad = grad + g.cast(
            g.reshape(each @ g.tensor(f"w{each.name}", (32, 32), "bf16"), shape=(4, 6, 32)),
            dtype="f32",
        )
    dx, dweight = g.call("layer_norm_grad", x, grad, g.tensor("s", (32,)), bias="none")
    dropped = g.cast(dx, dtype="bf16") * g.cast(g.tensor("mask", (4, 6, 32), "bool"), dtype="bf16")
    rows = g.reshape(dropped * 1.25, shape=(24, 32))
    (rows @ g.tensor("v", (32, 8), "bf16")).output("y")
    g.cast(g.reshape(g.sum(rows, axes=(0,), keepdim=True), shape=(32,)), dtype="f32").output("db")
    dx.output("dx")
    dweight.output("dweight")
    _, regions = gpu_regions(g)
    (norm,) = (ops for ops in regions if "layer_norm_grad" in ops)
    assert norm.count("add") == 2 and norm[-2:] == ("sum", "cast") and norm.count("mul") == 2
    decided = decide(g.ir(), dt.target("h200"), dt.Policy())
    (ours,) = (c for c in decided.choices if "layer_norm_grad" in c.region.ops)
    assert ours.region.ops == norm and ours.candidate.engine == "triton_kernels"


def test_gradients_of_three_biases_are_added_up_at_once():
    """Of queries, keys and values, which one call makes."""
    g = dt.Graph()
    q, lse = (2, 2, 8, 4), (2, 2, 8)
    given = [g.tensor(f"x{i}", q) for i in range(5)]
    for i, each in enumerate(g.call("attention_grad", *given, g.tensor("lse", lse))):
        rows = g.reshape(g.permute(each, dims=(0, 2, 1, 3)), shape=(16, 8))
        g.sum(rows, axes=(0,), keepdim=False).output(f"db{i}")
        (rows @ g.tensor(f"w{i}", (8, 5))).output(f"y{i}")
    _, regions = gpu_regions(g)
    assert ("sum", "sum", "sum") in regions
