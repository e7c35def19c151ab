"""``dt.functional.attention`` and its operators: against plain torch in float64, gradients by
finite differences, parts of queries, what is refused."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.errors import DeuteronError
from deuteron.functional.explain import Recording
from deuteron.ir import Region
from deuteron.ops import attention as ops
from deuteron.ops import attention_math, random
from deuteron.passes import run_passes
from deuteron.plan.choose import Survey
from deuteron.plan.decide import context
from tests.tolerances import allowed, error

attention = dt.functional.attention
SLOPES = torch.tensor([0.4, 0.1, 0.3, 0.02])


checked = partial(torch.autograd.gradcheck, fast_mode=True)


def tensors(*shapes, dtype=torch.float64, grad=True):
    gen = torch.Generator().manual_seed(0)
    made = (torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes)
    return [t.requires_grad_(grad) for t in made]


def qkv(b=2, h=4, s=9, d=8, keys=None, heads=None, **how):
    side = (b, heads or h, keys or s, d)
    return tensors((b, h, s, d), side, side, **how)


def written_out(q, k, v, bias=None, causal=False, window=None, softcap=0.0, slopes=None, offset=0):
    """By one large mask, in float64."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT / math.sqrt(q.shape[-1])
    s = softcap * torch.tanh(s / softcap) if softcap else s
    away = torch.arange(k.shape[2]) - torch.arange(q.shape[2])[:, None] - offset
    s = s if slopes is None else s - slopes[:, None, None] * away.abs()
    seen = torch.ones_like(away, dtype=torch.bool)
    seen &= away <= 0 if causal else True
    if window is not None:
        seen &= (away >= -window[0]) if window[0] >= 0 else True
        seen &= (away <= window[1]) if window[1] >= 0 else True
    if bias is not None and bias.dtype == torch.bool:
        seen = seen & bias
    elif bias is not None:
        s = s + bias
    s = s.masked_fill(~seen, -math.inf)
    return s.softmax(-1).nan_to_num() @ v


WAYS = {
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "one side": {"window": (-1, 1)},
    "soft cap": {"softcap": 1.5},
    "slopes": {"slopes": SLOPES, "causal": True},
    "later": {"causal": True, "offset": 3, "window": (4, -1)},
    "all": {"causal": True, "window": (3, 0), "softcap": 2.0, "slopes": SLOPES},
}


@pytest.mark.parametrize("low", [-1e4, -1e9, torch.finfo(torch.float32).min])
def test_a_row_of_low_biases_weighs_to_one(low):
    """As padding is hidden by models of transformers: such a row is a mean of the values."""
    q, k, v = qkv(dtype=torch.float32, grad=False)
    bias = torch.zeros(9, 9).masked_fill(torch.arange(9)[:, None] == 3, low)
    exact, eager = (
        written_out(*(t.to(kind) for t in (q, k, v, bias)), slopes=SLOPES)
        for kind in (torch.float64, torch.float32)
    )
    if low < -1e4:  # float32 rounds all scores of the row to one number
        exact[:, :, 3] = v.double().mean(2)
    found = attention(q, k, v, bias, slopes=SLOPES)
    assert error(found, exact) <= allowed(error(eager, exact), torch.float32, 9)


@pytest.mark.parametrize("how", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("heads", [4, 2])
def test_values_and_gradients(how, heads):
    given = qkv(keys=11, heads=heads)
    (bias,) = tensors((4, 9, 11))
    grad = tensors((2, 4, 9, 8), grad=False)[0]
    mine, theirs = attention(*given, bias, **how), written_out(*given, bias, **how)
    torch.testing.assert_close(mine, theirs)
    leaves = (*given, bias)
    for a, b in zip(*(torch.autograd.grad(y, leaves, grad) for y in (mine, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (1, 1, 7), (2, 1, 5, 7), (3, 1, 1)])
def test_gradient_of_a_bias_that_stands_for_many(shape):
    given = qkv(b=2, h=3, s=5, d=4, keys=7)
    (bias,) = tensors(shape)
    assert checked(lambda *t: attention(*t), (*given, bias))


def test_dropout_is_a_matter_of_seed_and_place():
    given = qkv(s=5, d=4, keys=6)
    how = {"dropout": 0.4, "seed": 7, "window": (3, 2)}
    assert checked(lambda *t: attention(*t, **how), given)
    one, again = attention(*given, **how), attention(*given, **how)
    assert torch.equal(one, again)
    assert not torch.equal(one, attention(*given, **how | {"seed": 8}))
    torch.manual_seed(1)
    drawn = attention(*given, dropout=0.4)
    torch.manual_seed(1)
    assert torch.equal(drawn, attention(*given, dropout=0.4))
    weights = torch.eye(400).expand(1, 1, 400, 400)  # the values show what was kept
    zeros = torch.zeros(1, 1, 400, 8)
    kept = attention(zeros, zeros, weights.contiguous(), dropout=0.25, seed=3) * 400
    assert abs((kept == 0).float().mean() - 0.25) < 0.01
    torch.testing.assert_close(kept.max(), torch.tensor(1 / 0.75))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_weights_are_dropped_independently(p):
    """Of lines, of columns, of neighbours, of those that share a word, and of two seeds."""
    i, j = torch.arange(1024)[:, None], torch.arange(1024)
    kept = [random.keep_scores(torch.tensor(seed), i, j, p) for seed in (0, 1, 2**61 + 5)]
    one, *others = ((mask.double() - (1 - p)) / (p * (1 - p)) ** 0.5 for mask in kept)
    pairs = [one, *(one * other for other in others)]
    pairs += [one[:, d:] * one[:, :-d] for d in (1, 2, 8, 16)] + [
        one[d:] * one[:-d] for d in (1, 8)
    ]
    assert max(abs(float(x.mean())) * x.numel() ** 0.5 for x in pairs) < 4.5
    for each in (one, one.T):
        means = each.mean(1) * 1024**0.5  # those of lines are as far from 0 as chance makes them
        assert 0.8 < float(means.square().mean()) < 1.2
        alike = (each @ each.T / 1024**0.5).fill_diagonal_(0.0)
        assert float(alike.abs().max()) < 7


def test_sums_come_with_their_gradient():
    given = qkv(s=5, d=4)
    y, lse = attention(*given, return_lse=True, causal=True)
    assert y.shape == (2, 4, 5, 4) and lse.shape == (2, 4, 5)
    scores = given[0] @ given[1].mT / 2
    seen = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(lse, scores.masked_fill(~seen, -math.inf).logsumexp(-1))
    call = lambda *t: attention(*t, return_lse=True, window=(2, 1))  # noqa: E731
    assert checked(call, given)


@pytest.mark.parametrize("how", [{"window": (4, 0)}, {"return_lse": True}, {"softcap": 9.0}])
def test_a_gradient_reads_what_was_found_and_does_not_look_for_it_again(how):
    given = qkv(dtype=torch.float32)
    with Recording() as ran:
        y = attention(*given, **how)
        torch.autograd.grad(y[0].sum() if "return_lse" in how else y.sum(), given)
    there, back = ({node.op for node in plan.graph.nodes} for plan in ran)
    assert "attention_lse" in there and "attention_grad" in back
    assert not {"attention", "attention_lse"} & back


def test_queries_that_see_nothing_give_zeros_and_no_gradient():
    given = qkv(s=6)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False
    for how in ({"bias": mask}, {"causal": True, "offset": -3}):
        bias = how.pop("bias", None)
        y = attention(*given, bias, **how)
        grads = torch.autograd.grad(y.sum(), given)
        assert not any(t.isnan().any() for t in (y, *grads))
        blind = 2 if bias is not None else 0
        assert (y[:, :, blind] == 0).all() and (grads[0][:, :, blind] == 0).all()


@pytest.mark.parametrize(("s", "keys"), [(1, 1), (0, 4), (4, 0), (1, 300)])
def test_lengths_of_one_and_none(s, keys):
    q, k, v = tensors((2, 4, s, 8), (2, 2, keys, 8), (2, 2, keys, 8))
    y = attention(q, k, v, window=(5, 5), offset=keys - s)
    grads = torch.autograd.grad(y.sum(), (q, k, v))
    assert y.shape == q.shape and [g.shape for g in grads] == [q.shape, k.shape, v.shape]
    assert not any(t.isnan().any() for t in (y, *grads))
    if not keys:
        assert (y == 0).all()


def test_some_queries_at_a_time_are_as_good_as_all(monkeypatch):
    given, (bias,) = qkv(s=13), tensors((4, 13, 13))
    how = {"causal": True, "dropout": 0.3, "seed": 5, "softcap": 3.0}

    def both():
        y = attention(*given, bias, **how)
        return y, *torch.autograd.grad(y.sin().sum(), (*given, bias))

    whole = both()
    monkeypatch.setattr(attention_math, "SOME", 8 * 13 * 3)  # three queries
    for a, b in zip(whole, both(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_errors_are_no_larger_than_torchs(dtype):
    given = qkv(s=40, d=16, dtype=dtype, grad=False)
    (bias,) = tensors((4, 40, 40), dtype=dtype, grad=False)
    exact = written_out(*(t.double() for t in (*given, bias)))
    theirs = error(F.scaled_dot_product_attention(*given, attn_mask=bias), exact)
    assert error(attention(*given, bias), exact) <= allowed(theirs, dtype)


def test_plain_attention_is_torchs_and_a_plan_agrees():
    given = qkv(dtype=torch.float32, grad=False, heads=2)
    with dt.functional.delegation(False):
        mine = attention(*given, causal=True)
    with dt.functional.delegation(True):
        torch.testing.assert_close(attention(*given, causal=True), mine)
        shown = str(dt.functional.explain(attention, *given))
    assert "plain attention is torch's own call" in shown


def test_dropout_without_a_seed_is_torchs_on_a_cpu():
    """With a bias that has a gradient, and with a mask that leaves a query nothing."""
    q, k, v = qkv(s=5, d=4, keys=6, heads=2)
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[3] = False
    with dt.functional.delegation(True):
        for bias in (None, torch.randn(5, 6, dtype=q.dtype, requires_grad=True), mask):
            torch.manual_seed(1)
            mine = attention(q, k, v, bias, dropout=0.4)
            torch.manual_seed(1)
            groups = {"enable_gqa": q.shape[1] != k.shape[1]}
            theirs = F.scaled_dot_product_attention(q, k, v, bias, 0.4, **groups)
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        assert not mine[:, :, 3].any()
        shown = str(dt.functional.explain(attention, q, k, v, dropout=0.4))
        assert "dropout is torch's on a CPU" in shown
        seeded = str(dt.functional.explain(attention, q, k, v, dropout=0.4, seed=3))
        assert "torch's own function" not in seeded


def test_under_torch_compile_and_autocast():
    given = qkv(dtype=torch.float32)

    def run(q, k, v):
        return attention(q, k, v, causal=True, window=(4, 0)).sum()

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    want = torch.autograd.grad(run(*given), given)
    for a, b in zip(torch.autograd.grad(compiled(*given), given), want, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(*given, window=(4, 0)).dtype is torch.bfloat16


def test_a_graph_with_its_gradient_keeps_sums_and_no_scores():
    g = dt.Graph("loss")
    q, k, v = (g.tensor(n, (1, 2, 64, 16), "f32") for n in "qkv")
    g.attention(q, k, v, causal=True, window=(8, 0)).output("y")
    plan = g.grad("y", wrt=["q", "k", "v"]).compile(device="cpu")
    nodes = [node.op for node in plan.graph.nodes]
    assert nodes.count("attention_lse") == 1 and "attention" not in nodes
    feed = dict(zip("qkv", qkv(1, 2, 64, 16, dtype=torch.float32), strict=True))
    grad = torch.randn(1, 2, 64, 16)
    found = plan.run(**{n: t.detach() for n, t in feed.items()}, grad_y=grad)
    y = written_out(*feed.values(), causal=True, window=(8, 0))
    want = torch.autograd.grad(y, tuple(feed.values()), grad)
    for name, each in zip("qkv", want, strict=True):
        torch.testing.assert_close(found[f"grad_{name}"], each)


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ({"window": (3,)}, "not (left, right)"),
        ({"window": (3, -2)}, "not (left, right)"),
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"slopes": torch.ones(3)}, "there are 4 heads"),
        ({"dropout": 0.1, "seed": torch.tensor(1.0)}, "not one int64"),
        ({"bias": torch.ones(3, 9, 9)}, "do not broadcast"),
    ],
)
def test_what_is_wrong_is_said(how, wrong):
    given = qkv(grad=False)
    with pytest.raises(DeuteronError, match=r"attention") as told:
        attention(*given, how.pop("bias", None), **how)
    assert wrong in str(told.value) and "remedy" in str(told.value)


def test_slopes_are_not_learned():
    slopes = SLOPES.clone().requires_grad_()
    with pytest.raises(DeuteronError, match="no gradient"):
        attention(*qkv(), slopes=slopes).sum().backward()


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("keys", [1, 6, 9])
def test_pairs_that_see_each_other_are_counted(queries, keys):
    for causal in (False, True):
        for window in (None, (2, 1), (-1, 2), (3, -1), (0, 0)):
            for offset in (-3, 0, 2):
                away = torch.arange(keys) - torch.arange(queries)[:, None] - offset
                left, right = window or (-1, -1)
                seen = (away <= 0) | (not causal)
                seen &= (away >= -left) | (left < 0)
                seen &= (away <= right) | (right < 0)
                attrs = {"causal": causal, "window": window, "offset": offset}
                assert ops.seen_pairs(queries, keys, attrs) == seen.sum(), attrs


def test_a_known_mask_of_a_window_is_one_on_a_gpu():
    class Sliding(torch.nn.Module):
        def __init__(self, left, right):
            super().__init__()
            away = torch.arange(64) - torch.arange(64)[:, None]
            self.mask = torch.nn.Buffer(((away >= -left) & (away <= right))[None, None])

        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)

    for left, right in ((8, 0), (5, 3), (63, 2)):
        given = qkv(1, 2, 64, 16, dtype=torch.float32, grad=False)
        model = Sliding(left, right)
        fast = dt.optimize(model, tuple(given), find=False)
        torch.testing.assert_close(fast(*given), model(*given))
        (node,) = [n for n in _on_h200(fast).nodes if n.op == "attention"]
        assert len(node.uses) == 3 and node.attrs["causal"] == (right == 0)
        assert node.attrs["window"] == (left if left < 63 else -1, -1 if right == 0 else right)


def _on_h200(fast):
    survey = Survey(dt.target("h200"), dt.Policy())
    return run_passes(fast.plan.decision.source, context(survey))[0]


def test_a_window_is_a_mask_to_a_library():
    g = dt.Graph()
    q, k, v = (g.tensor(n, (1, 2, 512, 64), "bf16") for n in "qkv")
    g.attention(q, k, v, causal=True, window=(32, -1)).output("y")
    options, _ = Survey(dt.target("h200"), dt.Policy()).ask(Region(g.ir(), frozenset(), 0))
    assert {o.candidate.engine for o in options} >= {"vendor_fused", "triton_kernels"}
    seen = ops.window_mask(5, 5, {"causal": True, "window": (1, -1), "offset": 0})
    assert seen.tolist() == torch.ones(5, 5).tril().triu(-1).bool().tolist()
