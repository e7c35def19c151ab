"""Forward and backward in one plan, held against torch.autograd in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from tolerances import allowed, error

import deuteron as dt

Tensors = dict[str, torch.Tensor]
BLOCKS: dict[str, tuple[Callable[..., None], Callable[..., torch.Tensor], Tensors]] = {}


def block(name: str, torch_way: Callable[..., torch.Tensor], **tensors: torch.Tensor):
    """Registers a graph (the decorated function) with the same thing written in torch."""

    def add(build: Callable[..., None]) -> Callable[..., None]:
        BLOCKS[name] = (build, torch_way, tensors)
        return build

    return add


@block(
    "conv block",
    lambda x, w, b, v: F.relu(F.conv2d(F.relu(F.conv2d(x, w, b, padding=1)), v, stride=2) * 0.5),
    x=torch.Size([2, 3, 9, 7]),
    w=torch.Size([4, 3, 3, 3]),
    b=torch.Size([4]),
    v=torch.Size([5, 4, 3, 3]),
)
def conv_block(g, x, w, b, v):
    h = g.relu(g.conv(x, w, b, padding=1))
    return g.relu(g.conv(h, v, stride=2) * 0.5)


def torch_mlp(x, w, b, gamma, beta, v):
    h = F.layer_norm(F.linear(x, w, b), (12,), gamma, beta)
    return x + F.linear(F.gelu(h), v)


@block(
    "mlp with layer_norm and gelu",
    torch_mlp,
    x=torch.Size([5, 8]),
    w=torch.Size([12, 8]),
    b=torch.Size([12]),
    gamma=torch.Size([12]),
    beta=torch.Size([12]),
    v=torch.Size([8, 12]),
)
def mlp(g, x, w, b, gamma, beta, v):
    h = g.layer_norm(g.linear(x, w, b), gamma, beta)
    return x + g.linear(g.gelu(h), v)


@block(
    "attention",
    lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
    q=torch.Size([2, 4, 7, 8]),
    k=torch.Size([2, 2, 7, 8]),
    v=torch.Size([2, 2, 7, 8]),
)
def attention(g, q, k, v):
    return g.attention(q, k, v, causal=True)


@block(
    "cross-entropy",
    lambda x, w, labels: F.cross_entropy(F.linear(x, w), labels),
    x=torch.Size([6, 5]),
    w=torch.Size([9, 5]),
    labels=torch.tensor([0, 8, 3, 3, 1, 7]),
)
def cross_entropy(g, x, w, labels):
    loss = g.cross_entropy(g.linear(x, w), labels)
    return loss[0] if isinstance(loss, tuple) else loss


def tensors_of(spec: Mapping[str, torch.Size | torch.Tensor], dtype: torch.dtype) -> Tensors:
    gen = torch.Generator().manual_seed(3)
    return {
        n: s if isinstance(s, torch.Tensor) else torch.randn(s, generator=gen).to(dtype)
        for n, s in spec.items()
    }


def autograd(fn: Callable[..., torch.Tensor], feed: Tensors, seed: torch.Tensor | None) -> Tensors:
    """The result and the gradients of float inputs, by torch."""
    leaves = {
        n: t.detach().clone().requires_grad_() if t.is_floating_point() else t
        for n, t in feed.items()
    }
    out = fn(**leaves)
    out.backward(None if seed is None else seed.to(out.dtype))
    grads = {f"grad_{n}": t.grad for n, t in leaves.items() if t.is_floating_point()}
    return {"y": out.detach(), **grads}


@pytest.mark.parametrize("find", [False, True], ids=["heuristic", "find"])
@pytest.mark.parametrize("kind", ["f64", "f32"])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.each_value
def test_forward_and_backward_together(name, kind, find):
    build, torch_way, spec = BLOCKS[name]
    dtype = dt.ir.dtype(kind).torch
    feed = tensors_of(spec, dtype)
    g = dt.Graph(name)
    syms = {n: g.tensor(n, t.shape, t.dtype) for n, t in feed.items()}
    y = build(g, **syms).output("y")
    wrt = [n for n, t in feed.items() if t.is_floating_point()]
    both = g.grad("y", wrt=wrt)
    seed = None if y.type.numel == 1 else torch.randn(y.shape, dtype=dtype)
    plan = both.compile(device="cpu", find=find, budget_s=1.0)
    bound = feed if seed is None else {**feed, "grad_y": seed}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in feed.items()}
    exact, plain = autograd(torch_way, wide, seed), autograd(torch_way, feed, seed)
    for _ in range(3):
        out = plan.run(bound)
        assert list(out) == ["y", *(f"grad_{n}" for n in wrt)]
        for key, got in out.items():
            assert got.shape == exact[key].shape and got.dtype == dtype
            limit = allowed(error(plain[key], exact[key]), dtype, 16)
            assert error(got, exact[key]) <= limit, key


def test_gradients_by_handle_of_shared_and_of_unused_inputs():
    g = dt.Graph()
    x, w, idle = g.tensor("x", (4,), "f64"), g.tensor("w", (4,), "f64"), g.tensor("idle", (2, 3))
    y = (x * w + x * 3.0 + g.sum(x)).output("y")
    both = g.grad(y, wrt=[x, idle])
    plan = both.compile(device="cpu")
    feed = {"x": torch.randn(4).double(), "w": torch.randn(4).double()}
    seed = torch.randn(4).double()
    for _ in range(2):
        out = plan.run(feed, idle=torch.randn(2, 3), grad_y=seed)
        want = seed * (feed["w"] + 3.0) + seed.sum()
        assert error(out["grad_x"], want) <= allowed(0.0, torch.float64, 4)
        assert torch.equal(out["grad_idle"], torch.zeros(2, 3))
    one = g.grad("y", wrt="x").ir()  # a single name needs no list
    assert [name for name, _ in one.outputs] == ["y", "grad_x"]


@pytest.mark.parametrize(
    ("of", "wrt", "says"),
    [
        ("z", ["x"], "no output 'z'"),
        ("y", ["nobody"], "'nobody' is not an input"),
        ("y", ["n"], "only floats have gradients"),
    ],
)
def test_what_has_no_gradient_is_refused(of, wrt, says):
    g = dt.Graph()
    x, n = g.tensor("x", (4,)), g.tensor("n", (4,), "i64")
    (x * n).output("y")
    with pytest.raises(dt.GraphError) as caught:
        g.grad(of, wrt)
    assert says in str(caught.value)
