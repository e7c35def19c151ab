"""Rotary positions within attention: which regions may be one, what is chosen and why, what it
computes, and what is refused."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron import zoo
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.frontends.torch_export import import_module
from deuteron.ir import Region
from deuteron.ops.evaluate import evaluate
from deuteron.passes import fuse
from deuteron.plan.decide import decide
from deuteron.plan.region_borders import joins
from deuteron.policy import Policy
from deuteron.target import target
from tests.launched import assert_none_spill, compiled
from tests.optimised import optimised
from tests.tolerances import SINGLE, allowed, error

f = dt.functional
H200 = target("h200")


def graph_of(shape=(1, 4, 96, 64), of=2, keys=0, kind="bf16", pairs=False, then=None, **how):
    """rope(q), rope(k) → attention, and ``then`` of (graph, q, k and y)."""
    b, _, s, d = shape
    g, long = dt.Graph(), keys or s
    q = g.tensor("q", shape, kind)
    k, v = (g.tensor(name, (b, of, long, d), kind) for name in "kv")
    cos, sin = (g.tensor(name, (max(s, long), d // 2), "f32") for name in ("cos", "sin"))
    turn = {"axis": 2, "interleaved": pairs}
    if s == long:
        q, k = g.rope(q, k, cos, sin, **turn)
    else:
        q = g.rope(q, None, cos, sin, offset=long - s, **turn)
        k = g.rope(k, None, cos, sin, **turn)
        how |= {"offset": long - s}
    y = g.attention(q, k, v, **how)
    (then(g, q, k, y) if then else y).output("y")
    return g.ir()


def joined(graph):
    regions, _ = fuse(graph, gates=True)
    return [part.ops for join in joins(graph, regions) for part in join.parts]


def planned(**how):
    """The regions, by their operators, and what is turned as it is loaded."""
    choices = decide(graph_of(**how), H200, Policy()).choices
    return [(c.region.ops, c.candidate.knobs.get("rope")) for c in choices]


def test_what_may_be_one():
    assert joined(graph_of()) == [("rope", "attention")]
    assert joined(graph_of(keys=100)) == [("rope", "rope", "attention")]
    # the queries are read elsewhere, too, and so are keys, before: as by a cache
    assert joined(graph_of(then=lambda g, q, k, y: y + q)) == []
    g = dt.Graph()
    q, k, old = (g.tensor(name, (1, 2, 8, 64), "bf16") for name in ("q", "k", "old"))
    q, k = g.rope(q, k, axis=2)
    every = g.concat([old, k], axis=2)
    g.attention(q, every, every, causal=True, offset=8).output("y")
    assert joined(g.ir()) == []


def test_tokens_before_heads():
    """As some models write it: attention reads heads first, and so is turned what it reads."""
    g = dt.Graph()
    q, k = g.tensor("q", (2, 9, 4, 16), "f32"), g.tensor("k", (2, 9, 2, 16), "f32")
    turned = [g.permute(x, dims=(0, 2, 1, 3)) for x in g.rope(q, k, axis=1)]
    g.attention(*turned, turned[1]).output("y")
    graph, _ = optimised(g.ir(), H200)
    assert [n.attrs["axis"] for n in graph.nodes if n.op == "rope"] == [2]
    assert graph.nodes[-1].op == "attention"
    assert {graph.producer[v].op for v in graph.nodes[-1].uses} == {"rope"}
    feed = {"q": torch.randn(2, 9, 4, 16), "k": torch.randn(2, 9, 2, 16)}
    had, want = (evaluate(each, feed)["y"] for each in (graph, g.ir()))
    assert error(had, want) <= SINGLE


def test_few_keys_are_turned_by_every_block_many_ahead():
    """By estimate, where libraries have no kernel of their own, here because of a soft cap."""
    one = ("rope", "attention")
    assert planned(shape=(1, 32, 128, 64), of=8, causal=True, softcap=9.0) == [(one, "qk")]
    assert planned(shape=(1, 32, 4096, 64), of=8, causal=True, softcap=9.0) == [(one, "q")]


def test_one_query_does_not_turn_all_keys_of_a_cache_for_every_head():
    found = dict(planned(shape=(1, 32, 1, 128), of=8, keys=4096, causal=True))
    assert "qk" not in found.values()


def test_a_llama_says_what_one_kernel_would_cost():
    """Plain attention is the libraries' until a measurement says otherwise."""
    model = zoo.build("llama_tiny", num_hidden_layers=1).eval().to(torch.bfloat16)
    graph = import_module(model, (torch.zeros(2, 128, dtype=torch.int64),), {}).graph
    found = {c.region.ops: c for c in decide(graph, H200, Policy()).choices}
    assert ("rope",) in found
    note = found["attention",].note
    assert note.startswith("rope + attention as one: ") and "apart: " in note
    assert note.endswith("which a measurement decides")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"dims": 32}, "turns 32 of 64 features"),
        ({"inverse": True}, "turns back"),
        ({"positions": True}, "goes by a tensor of positions"),
    ],
)
def test_what_stays_apart(how, reason):
    g = dt.Graph()
    q, k, v = (g.tensor(name, (1, 2, 40, 64), "bf16") for name in "qkv")
    places = g.tensor("p", (1, 40), "i64") if how.pop("positions", False) else None
    q, k = g.rope(q, k, None, None, places, axis=2, **how)
    g.attention(q, k, v).output("y")
    refusal = TritonKernels().refuse(Region(g.ir(), frozenset(), 1), H200, Policy())
    assert refusal is not None and reason in refusal.reason and refusal.remedy


sweep = pytest.mark.sweep
PTX = {"divided": "setmaxnreg", 90: "wgmma.mma_async", 80: "mma.sync"}


@pytest.mark.parametrize(
    ("arch", "features", "pairs", "knobs"),
    [
        (90, 32, False, {"rope": "qk"}),
        (90, 32, True, {"divided": True}),
        pytest.param(80, 32, True, {"rope": "qk"}, marks=sweep),
        *(
            pytest.param(arch, features, False, {"rope": "qk"}, marks=sweep)
            for arch in (80, 90)
            for features in (64, 128)
        ),
        pytest.param(80, 64, True, {"rope": "q"}, marks=sweep),
        pytest.param(90, 64, False, {"divided": True}, marks=sweep),
        pytest.param(90, 128, True, {"divided": True}, marks=sweep),
    ],
)
def test_compiles(arch, features, pairs, knobs, monkeypatch):
    """Keys that are turned ahead are a launch before. On Ampere what is turned spills a little."""
    pytest.importorskip("triton")
    graph = graph_of((4, 32, 512, features), 8, pairs=pairs, causal=True)
    many = graph_of((4, 32, 4096, features), 8, pairs=pairs, causal=True)
    region = Region(many if "divided" in knobs else graph, frozenset(), 1)
    kernels = compiled(region, arch, monkeypatch, **knobs)
    assert len(kernels) == (1 if knobs.get("rope") == "qk" else 2)
    assert_none_spill(kernels, arch, most=128 if arch == 80 else 0)
    ptx = kernels[-1].asm["ptx"]
    assert PTX[arch] in ptx and (PTX["divided"] in ptx) == ("divided" in knobs)


# ---- as a function


def tables(rows: int, pairs: int, dtype: torch.dtype = torch.float64):
    gen = torch.Generator().manual_seed(7)
    angles = torch.randn(rows, pairs, generator=gen, dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def heads(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "of", "keys", "how"),
    [
        ((2, 4, 7, 16), 2, 7, {"causal": True}),
        ((1, 2, 3, 8), 1, 9, {"causal": True, "offset": 6, "interleaved": True}),
        ((1, 2, 5, 12), 2, 5, {"window": (2, 1), "narrow": 4}),
    ],
)
def test_a_call_with_gradients_beside_float64(shape, of, keys, how, dtype):
    how = dict(how)
    b, d = shape[0], shape[3]
    pairs = how.pop("narrow", d // 2)
    given = [heads(*shape, dtype=dtype, seed=0)]
    given += [heads(b, of, keys, d, dtype=dtype, seed=n) for n in (1, 2)]
    results = []
    for kind, apart in ((torch.float64, True), (dtype, True), (dtype, False)):
        q, k, v = (t.detach().to(kind).requires_grad_() for t in given)
        angles = tables(keys, pairs, kind)
        more = dict(how)
        if apart:
            turn = {"seq_dim": 2, "interleaved": more.pop("interleaved", False)}
            qt = f.rope(q, None, *angles, offset=how.get("offset", 0), **turn)
            y = f.attention(qt, f.rope(k, None, *angles, **turn), v, **more)
        else:
            y = f.attention(q, k, v, rope=angles, **more)
        torch.manual_seed(3)
        y.backward(torch.randn(y.shape, dtype=torch.float64).to(kind))
        with torch.no_grad():  # one plan for all of it
            alone = y if apart else f.attention(q, k, v, rope=angles, **more)
        results.append([y.detach(), alone.detach(), *(t.grad for t in (q, k, v))])
    for exact, plain, got in zip(*results, strict=True):
        assert error(got, exact) <= allowed(error(plain, exact), dtype, keys * d)


def test_gradients_by_differences():
    q, k = (heads(1, h, 3, 4, dtype=torch.float64, seed=h) for h in (2, 1))
    angles = [t.requires_grad_() for t in tables(3, 2)]

    def call(q, k, cos, sin):
        return f.attention(q, k, k, causal=True, rope=(cos, sin), return_lse=True)

    assert torch.autograd.gradcheck(call, (q, k, *angles))


def test_under_torch_compile():
    q, k = (heads(1, h, 5, 8, dtype=torch.float32, seed=h).detach() for h in (2, 1))
    angles = tables(5, 4, torch.float32)

    def call(q, k):
        return f.attention(q, k, k, causal=True, rope=angles)

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    assert torch.equal(compiled(q, k), call(q, k))


Q, TABLE = torch.ones(1, 2, 5, 8), torch.ones(5, 4)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: f.attention(Q, Q, Q, rope=(TABLE,)), "not two tensors"),
        (lambda: f.attention(Q, Q, Q, interleaved=True), "rope=(cos, sin) as well"),
        (lambda: f.attention(Q[0], Q[0], Q[0], rope=(TABLE, TABLE)), "q[None]"),
        (lambda: f.attention(Q, Q, Q, rope=(torch.ones(5, 8),) * 2), "cos[:, :4]"),
        (lambda: f.attention(Q, Q, Q, rope=(TABLE[:3],) * 2), "tables of 5 rows"),
        (
            lambda: f.attention(Q[0], Q[0], Q[0], rope=(TABLE, TABLE), starts=torch.tensor([0, 5])),
            "dt.functional.rope(q, k, cos, sin",
        ),
    ],
)
def test_what_is_wrong(call, said):
    with pytest.raises(dt.DeuteronError) as caught:
        call()
    assert said in str(caught.value)
