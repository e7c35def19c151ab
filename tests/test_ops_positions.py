"""Positions, scans and order: what their samples alone do not show."""

from __future__ import annotations

import pytest
import torch
from tolerances import EPS, GRADIENT, allowed, error

import deuteron as dt
from deuteron.errors import GraphError
from deuteron.ops import TABLE
from deuteron.ops.evaluate import evaluate
from deuteron.ops.rope import frequencies
from deuteron.passes import Context, run_passes
from deuteron.plan import compile_graph
from deuteron.policy import Policy

f64 = torch.float64


def t(*shape: int, seed: int = 0, dtype: torch.dtype = f64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=f64).to(dtype)


def rope_of(feed, **attrs) -> dt.Graph:
    """A graph of one rope; names of the tensors are those of its inputs."""
    g = dt.Graph("rope")
    handles = {n: g.tensor(n, x.shape, x.dtype, strides=x.stride()) for n, x in feed.items()}
    outs = g.rope(**handles, **attrs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    for name, out in zip(("y_q", "y_k"), outs, strict=False):
        out.output(name)
    return g


def by_hand(x, positions, dims, base, interleaved):
    """[B, S, H, D], pair by pair, from the definition."""
    out = x.clone()
    for i, f in enumerate(frequencies(dims, base).tolist()):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + dims // 2)
        angle = (positions.double() * f)[..., None]
        out[..., a] = x[..., a] * angle.cos() - x[..., b] * angle.sin()
        out[..., b] = x[..., b] * angle.cos() + x[..., a] * angle.sin()
    return out


# ---- rope ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("axis", [1, 2])
def test_rope_is_what_its_definition_says(axis, interleaved):
    q, k, where = t(2, 5, 3, 10), t(2, 5, 2, 10, seed=1), torch.randint(0, 999, (2, 5))
    feed = {"q": q, "k": k, "positions": where}
    if axis == 2:
        feed |= {"q": q.transpose(1, 2), "k": k.transpose(1, 2)}
    graph = rope_of(feed, axis=axis, interleaved=interleaved, dims=6, base=500.0, offset=7).ir()
    got = evaluate(graph, feed)
    for name, x in (("y_q", q), ("y_k", k)):
        want = by_hand(x, where + 7, 6, 500.0, interleaved)
        have = got[name].transpose(1, 2) if axis == 2 else got[name]
        assert error(have, want) <= 8 * EPS[f64]


def test_rope_agrees_with_rotate_half():
    """The composition that published models use, tables with each angle twice."""
    q, length, d = t(2, 4, 9, 16), 9, 16
    angles = torch.arange(length, dtype=f64)[:, None] * frequencies(d, 10000.0)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    first, second = q.chunk(2, -1)
    want = q * cos + torch.cat([-second, first], -1) * sin
    feed = {"q": q, "cos": angles.cos(), "sin": angles.sin()}
    (got,) = evaluate(rope_of(feed, axis=2).ir(), feed).values()
    assert error(got, want) <= 8 * EPS[f64]


@pytest.mark.parametrize("reads", [("y_q",), ("y_k",), ("y_q", "y_k")])
def test_every_input_of_rope_has_a_gradient_through_every_output(reads):
    cos, sin = t(9, 4, seed=3), t(9, 4, seed=4)
    feed = {"q": t(2, 3, 5, 8), "k": t(2, 1, 5, 8, seed=1), "cos": cos, "sin": sin}
    feed["positions"] = torch.tensor([[0, 1, 2, 3, 4], [4, 4, 2, 7, 7]])
    attrs = {"axis": 2, "interleaved": True, "offset": 1}
    g = rope_of(feed, **attrs)
    wrt = ["q", "k", "cos", "sin"]
    loss = dt.Graph("loss")
    handles = {n: loss.tensor(n, x.shape, x.dtype, strides=x.stride()) for n, x in feed.items()}
    outs = dict(zip(("y_q", "y_k"), loss.rope(**handles, **attrs), strict=True))
    total = sum(
        (loss.sum(loss.square(outs[n])) * (i + 1.0) for i, n in enumerate(reads)),
        start=loss.sum(loss.square(handles["q"])),
    )
    total.output("loss")
    got = evaluate(loss.grad("loss", wrt=wrt).ir(), feed)

    def value(*given: torch.Tensor) -> torch.Tensor:
        q, k, c, s = given
        where = feed["positions"] + 1
        c, s = c[where][:, None], s[where][:, None]
        parts = [q.square().sum()]
        for i, name in enumerate(reads):
            x = q if name == "y_q" else k
            a, b = x[..., ::2], x[..., 1::2]
            parts.append((i + 1.0) * ((a * c - b * s).square() + (b * c + a * s).square()).sum())
        return torch.stack(parts).sum()

    leaves = [feed[n].clone().requires_grad_() for n in wrt]
    want = torch.autograd.grad(value(*leaves), leaves, allow_unused=True)
    for name, w in zip(wrt, want, strict=True):
        w = torch.zeros_like(feed[name]) if w is None else w
        assert error(got[f"grad_{name}"], w) <= GRADIENT, name
    assert evaluate(g.ir(), feed)["y_q"].shape == feed["q"].shape


def test_the_gradient_of_rope_is_one_rope():
    feed = {"q": t(1, 4, 2, 8), "k": t(1, 4, 1, 8)}
    g = rope_of(feed)
    loss = dt.Graph("loss")
    q, k = (loss.tensor(n, x.shape, x.dtype) for n, x in feed.items())
    a, b = loss.rope(q, k)
    (loss.sum(a) + loss.sum(b)).output("loss")
    back = [n for n in loss.grad("loss", wrt=["q", "k"]).ir().nodes if n.op == "rope"]
    assert [n.attrs["inverse"] for n in back] == [False, True]
    assert len(back[1].outputs) == 2
    assert [n.op for n in g.ir().nodes] == ["rope"]


def test_angles_are_right_at_large_positions():
    feed = {"q": t(1, 2, 1, 64, dtype=torch.float32)}
    exact = evaluate(rope_of(feed, offset=1_000_000).ir(), feed, float64=True)["y_q"]
    got = evaluate(rope_of(feed, offset=1_000_000).ir(), feed)["y_q"]
    assert error(got, exact) <= 4 * EPS[torch.float32]


@pytest.mark.parametrize("sample", TABLE["rope"].samples(), ids=str)
@pytest.mark.parametrize("kind", ["f32", "bf16", "f64"])
def test_rope_written_out_is_the_same(sample, kind):
    """A plan takes it apart where that is cheaper; the parts give the same numbers."""
    names = [n.strip("?") for n in TABLE["rope"].inputs]
    pairs = zip(names, sample.tensors(kind), strict=False)
    feed = {n: x for n, x in pairs if x is not None}
    g = rope_of(feed, **sample.attrs)

    def price(graph, most=0.0) -> float:
        return float(any(node.op == "rope" for node in graph.nodes))

    parts, _ = run_passes(g.ir(), Context(dt.target("cpu"), Policy(), price=price))
    assert not price(parts)
    plan = compile_graph(parts, device="cpu")
    exact, plain = evaluate(g.ir(), feed, float64=True), evaluate(g.ir(), feed)
    got = plan.run(**feed)
    for name, want in exact.items():
        bound = allowed(error(plain[name], want), got[name].dtype)
        assert error(got[name], want) <= bound, (name, plan.decision.choices)


@pytest.mark.parametrize(
    ("shapes", "attrs", "says", "remedy"),
    [
        ({"q": (2, 5, 8)}, {}, "rank 4", "reshape"),
        ({"q": (2, 5, 3, 8)}, {"axis": 3}, "axis=3", "axis=1"),
        ({"q": (2, 5, 3, 7)}, {}, "7 of 7", "even"),
        ({"q": (2, 5, 3, 8)}, {"dims": 10}, "10 of 8", "from 2 to 8"),
        ({"q": (2, 5, 3, 8), "k": (2, 4, 3, 8)}, {}, "does not fit q", "heads"),
        ({"q": (2, 5, 3, 8), "cos": (9, 4)}, {}, "one table", "both"),
        ({"q": (2, 5, 3, 8), "cos": (9, 8), "sin": (9, 8)}, {"dims": 8}, "one column", "half"),
        ({"q": (2, 5, 3, 8), "cos": (9, 4), "sin": (9, 4)}, {"offset": 6}, "up to 10", "11 rows"),
        ({"q": (2, 5, 3, 8)}, {"offset": -1}, "offset=-1", "≥ 0"),
        ({"q": (2, 5, 3, 8), "positions": (5,)}, {}, "index is", "i64"),
    ],
)
def test_rope_says_what_is_wrong(shapes, attrs, says, remedy):
    feed = {n: torch.zeros(s) for n, s in shapes.items()}
    with pytest.raises(GraphError, match=says) as caught:
        rope_of(feed, **attrs)
    assert remedy in str(caught.value)


def test_positions_of_another_length_are_refused():
    feed = {"q": torch.zeros(2, 5, 3, 8), "positions": torch.zeros(3, 5, dtype=torch.long)}
    with pytest.raises(GraphError, match=r"positions \[3, 5\]"):
        rope_of(feed)


# ---- sinusoidal ----------------------------------------------------------------------------------


def test_a_sinusoidal_table_becomes_a_constant():
    g = dt.Graph("table")
    x = g.tensor("x", (2, 7, 6))
    (x + g.sinusoidal(g.constant(torch.arange(7)), dim=6, interleaved=True)).output("y")
    plan = g.compile(device="cpu")
    assert all("sinusoidal" not in c.region.ops for c in plan.decision.choices)
    angles = torch.arange(7, dtype=f64)[:, None] * frequencies(6, 10000.0)
    want = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    got = plan.run(x=torch.zeros(2, 7, 6))["y"]
    assert error(got, want.expand(2, 7, 6)) <= 4 * EPS[torch.float32]


# ---- scans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("zeros", [0, 1, 2])
def test_the_gradient_of_cumprod_needs_no_division(zeros):
    x = t(3, 7)
    for row in range(zeros):
        x[:, 2 + row] = 0.0
    x[0, 0] = 0.0 if zeros else x[0, 0]
    leaf, seed = x.clone().requires_grad_(), t(3, 7, seed=1)
    (want,) = torch.autograd.grad(torch.cumprod(leaf, 1), leaf, seed)
    got = TABLE["cumprod_grad"].reference(seed, x, axis=1)
    assert error(got, want) <= GRADIENT


def test_16_bit_sums_do_not_stop_growing():
    ones = torch.ones(5000, dtype=torch.bfloat16)
    total = TABLE["cumsum"].reference(ones, axis=0)
    assert total[-1] == 4992  # 5000 in bfloat16; added up in it, the sum stays at 256


# ---- order ---------------------------------------------------------------------------------------


def test_histogram_counts_as_histc_does():
    x = t(1000, dtype=torch.float32)
    x[:4] = torch.tensor([-1.0, 2.0, float("nan"), float("inf")])
    got = TABLE["histogram"].reference(x, None, bins=7, low=-1.0, high=2.0)
    assert torch.equal(got.float(), torch.histc(x, 7, -1.0, 2.0))
    whole = torch.randint(0, 6, (500,))
    assert torch.equal(
        TABLE["histogram"].reference(whole, None, bins=6, low=0.0, high=6.0), torch.bincount(whole)
    )
    weights = t(500)
    sums = TABLE["histogram"].reference(whole, weights, bins=6, low=0.0, high=6.0)
    assert error(sums, torch.bincount(whole, weights)) <= 100 * EPS[f64]


def test_what_is_delegated_says_so():
    """Sorting and scanning are torch's on the CPU, and a plan shows it."""
    g = dt.Graph("order")
    x = g.tensor("x", (4, 9))
    values, _ = g.topk(g.cumsum(x, axis=1), k=3)
    g.sort(values)[0].output("y")
    plan = g.compile(device="cpu", policy=Policy(deterministic=True))
    assert {c.candidate.engine for c in plan.decision.choices} == {"torch"}
    data = t(4, 9, dtype=torch.float32)
    want = torch.cumsum(data, 1).topk(3).values.sort().values
    assert error(plan.run(x=data)["y"], want) <= 4 * EPS[torch.float32]


@pytest.mark.parametrize(
    ("op", "attrs", "says"),
    [
        ("topk", {"k": 9}, "k=9"),
        ("cumsum", {"axis": 5}, "axis 5"),
        ("histogram", {"bins": 0, "low": 0, "high": 1}, "bins=0"),
        ("histogram", {"bins": 3, "low": 1, "high": 1}, "low=1"),
        ("sinusoidal", {"dim": 5}, "dim=5"),
    ],
)
def test_wrong_settings_are_named(op, attrs, says):
    g = dt.Graph("wrong")
    with pytest.raises(GraphError, match=says):
        getattr(g, op)(g.tensor("x", (3, 4)), **attrs)
