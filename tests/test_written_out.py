"""Attention and norms that models write out, and the operators that plans make of them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.engines import calibration
from deuteron.frontends.torch_export import import_module
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Context, differentiate, run_passes
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from tests.test_spellings import H200, Written, ops, planned
from tests.tolerances import EPS, SINGLE_LAYERS, error

INF, LOW = math.inf, torch.finfo(torch.float32).min
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
LATER = torch.zeros(7, 7).masked_fill(~CAUSAL, -1e4)
BIAS = torch.randn(1, 4, 7, 7, generator=torch.Generator().manual_seed(1))
SHIFTED = torch.where(torch.arange(4 * 7 * 7).reshape(4, 7, 7) % 5 == 1, -100.0, 0.0)


@pytest.fixture(autouse=True)
def plain_estimates(monkeypatch):
    """The cases are small, and a rule is taken where it is cheaper: by counting alone it is."""
    monkeypatch.setattr(calibration, "corrections", lambda name: {})


def heads(x, count=4):
    """[batch, tokens, 3 · features] as queries, keys and values of each head."""
    batch, tokens, width = x.shape
    return x.reshape(batch, tokens, 3, count, width // 3 // count).permute(2, 0, 3, 1, 4)


def merged(y):
    return y.transpose(1, 2).flatten(2)


# ---- spellings of attention; each takes x, and gives tokens


def eager(x):  # BERT, GPT-2, Llama: a scale, a mask that is added, softmax in float32
    q, k, v = heads(x)
    scores = torch.matmul(q, k.transpose(-1, -2)) * 0.3
    scores = scores + LATER.to(x.dtype)
    return merged(torch.matmul(scores.softmax(-1, dtype=torch.float32).to(x.dtype), v))


def divided(x):  # MobileViT, MPNet: no mask, dropout that does nothing
    q, k, v = heads(x)
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(5)
    return merged(F.dropout(scores.softmax(-1), 0.1, training=False) @ v)


def scaled_before(x):  # OPT, wav2vec2: queries scaled before heads are cut out of them
    q, k, v = x.chunk(3, -1)
    q, k, v = (t.view(*t.shape[:2], 4, -1).transpose(1, 2) for t in (q * 0.4, k, v))
    return merged((q @ k.transpose(2, 3)).softmax(-1) @ v)


def both_scaled(x):
    q, k, v = heads(x)
    return merged(((q * 0.6) @ (k / 1.7).mT).softmax(-1) @ v)


def bloom(x):  # one batch of all heads, a bias for each head by baddbmm, then a mask
    q, k, v = (t.reshape(-1, 7, t.shape[-1]) for t in heads(x))
    slopes = torch.linspace(0.1, 1.0, 4).to(x.dtype)
    alibi = slopes[:, None, None] * torch.arange(7).to(x.dtype)
    alibi = alibi.repeat(x.shape[0], 1, 1)
    scores = alibi.baddbmm(q, k.transpose(1, 2), beta=1.0, alpha=0.3).view(-1, 4, 7, 7)
    scores = scores + LATER.to(x.dtype)
    weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
    return merged(torch.bmm(weights.view(-1, 7, 7), v).view(-1, 4, 7, v.shape[-1]))


def falcon(x):  # a bias inside of the scale, one head of keys and values for all
    q, k, v = heads(x)
    k, v = k[:, :1], v[:, :1]
    scores = (q @ k.transpose(-1, -2) + torch.linspace(0, 1, 4).to(x.dtype)[:, None, None]) * 0.3
    return merged(scores.softmax(-1) @ v)


def nano(x):  # what comes later is filled in with −∞
    q, k, v = heads(x)
    scores = (q @ k.transpose(-2, -1)) * 0.4
    return merged(scores.masked_fill(~CAUSAL, -INF).softmax(-1) @ v)


def mpt(x):  # a bias, and masks filled in with the least number
    q, k, v = heads(x)
    scores = q @ k.transpose(-1, -2) * 0.4 + torch.arange(7).to(x.dtype) * 0.1
    scores = scores.masked_fill(~CAUSAL, torch.finfo(x.dtype).min)
    return merged(scores.softmax(-1) @ v)


def swin(x):  # windows: a bias for each head, and a mask for each window
    q, k, v = heads(x)
    scores = (q * 0.4) @ k.transpose(-2, -1) + BIAS.to(x.dtype)
    scores = scores.view(x.shape[0] // 4, 4, 4, 7, 7) + SHIFTED.to(x.dtype)[None, :, None]
    return merged(scores.view(-1, 4, 7, 7).softmax(-1) @ v)


def swin_v2(x):  # by the cosine, with a factor for each head
    q, k, v = heads(x)
    scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
    scores = scores * torch.linspace(1, 10, 4).to(x.dtype)[:, None, None]
    return merged((scores + BIAS.to(x.dtype)).softmax(-1) @ v)


def maxvit(x):  # by einsum, with windows as a dimension of their own
    q, k, v = (t.unsqueeze(0) for t in heads(x))
    scores = torch.einsum("bghid,bghjd->bghij", q, k * 0.4)
    weights = (scores + BIAS.to(x.dtype)).softmax(-1)
    return merged(torch.einsum("bghij,bghjd->bghid", weights, v)[0])


def widened(x):  # GPT-J: queries and keys in float32; in float64, to be exact, as they are
    q, k, v = heads(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * 0.4
    return merged(scores.softmax(-1).to(v.dtype) @ v)


SPELLINGS = (eager, divided, scaled_before, both_scaled, bloom, falcon, nano, mpt, swin, swin_v2)
SPELLINGS += (maxvit, widened)


def tokens(kind=torch.float32, batch=4):
    torch.manual_seed(0)
    return torch.randn(batch, 7, 3 * 4 * 6).to(kind)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_attention_is_one_operator(spelling):
    made = planned(Written(spelling), tokens(), within=EPS[torch.float32])
    assert ops(made).count("attention") == 1
    assert not {"matmul", "softmax"} & set(ops(made))
    (node,) = (n for n in made.nodes if n.op == "attention")
    assert node.attrs["causal"] == (spelling is nano)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.each_value
def test_attention_is_no_less_exact(spelling, kind):
    """On a CPU, as it runs; the exact answer is what was written, in float64."""
    module, x = Written(spelling).eval(), tokens(kind)
    fast = dt.optimize(module, x, find=False)
    with torch.no_grad():
        want, had = module(x.double()), module(x)
    assert error(fast(x), want) <= max(2 * error(had, want), 4 * EPS[kind])


def test_windows_share_a_bias_where_they_can():
    """One mask of all windows, however many images there are; heads without a mask are alike."""
    for batch, shape in ((4, (4, 4, 7, 7)), (8, (8, 4, 7, 7))):
        made = planned(Written(swin), tokens(batch=batch), within=EPS[torch.float32])
        (node,) = (n for n in made.nodes if n.op == "attention")
        assert made.types[node.uses[3]].shape == shape
    made = planned(Written(swin_v2), tokens(), within=EPS[torch.float32])
    (node,) = (n for n in made.nodes if n.op == "attention")
    assert made.types[node.uses[3]].shape == (1, 4, 7, 7)


def written(x, change):
    q, k, v = heads(x)
    return merged(change((q @ k.mT) * 0.4) @ v)


STAY = {
    "probabilities are an output": lambda s: s.softmax(-1),
    "a score has another reader": lambda s: (s + 1).softmax(-1) * s.amax(-1, keepdim=True),
    "over the queries": lambda s: s.softmax(-2),
    "a cap on the scores": lambda s: (s.tanh() * 5).softmax(-1),
    "a negative factor": lambda s: (s * -1.0).softmax(-1),
    "hidden by a moderate number": lambda s: s.masked_fill(~CAUSAL, -10.0).softmax(-1),
    "a row without keys": lambda s: s.masked_fill(CAUSAL, -INF).softmax(-1),
    "a row of low numbers": lambda s: s.masked_fill(CAUSAL, LOW).softmax(-1),
    "a row of infinite biases": lambda s: (
        s + torch.zeros(7, 7).masked_fill(CAUSAL, -INF).to(s.dtype)
    ).softmax(-1),
    "something after softmax": lambda s: s.softmax(-1) + 0.1,
}


@pytest.mark.parametrize("why", STAY)
def test_what_is_not_attention_stays(why):
    def run(x):
        return written(x, STAY[why])

    module, x = Written(run).eval(), tokens()
    if why == "probabilities are an output":

        def both(x):
            q, k, v = heads(x)
            weights = (q @ k.mT).softmax(-1)
            return merged(weights @ v), weights

        module = Written(both).eval()
    made = decide(import_module(module, (x,), {}).graph, H200, Policy()).graph
    assert "attention" not in ops(made)


def test_a_slower_form_is_not_taken():
    x = tokens()
    graph = import_module(Written(divided).eval(), (x,), {}).graph
    for worse in ("attention", "softmax"):

        def price(made, most, worse=worse):
            return 1.0 + (worse in ops(made))

        made, _ = run_passes(graph, Context(H200, Policy(), price=price))
        assert ("attention" in ops(made)) == (worse != "attention")


def given_mask(x, mask, fill):
    q, k, v = heads(x)
    scores = (q @ k.transpose(-2, -1)) * 0.4
    return merged(scores.masked_fill(mask[:, None] == 0, fill).softmax(-1) @ v)


def given_bias(x, mask, fill):
    q, k, v = heads(x)
    return merged(((q @ k.mT) * 0.4 + mask[:, None]).softmax(-1) @ v)


@pytest.mark.parametrize("fill", [-INF, -1e9, LOW])
@pytest.mark.parametrize("spelling", [given_mask, given_bias])
def test_rows_without_keys_are_as_written(spelling, fill):
    """A mask that comes with the tokens may hide all keys: nan for −∞, else all count alike."""
    x, seen = tokens(), torch.rand(4, 7, 7) > 0.5
    seen[0, 3] = False
    seen[1:, 3] = True
    mask = seen.long() if spelling is given_mask else torch.zeros(4, 7, 7).masked_fill(~seen, fill)
    module = Written(lambda x, mask: spelling(x, mask, fill)).eval()
    made = decide(import_module(module, (x, mask), {}).graph, H200, Policy()).graph
    assert "attention" in ops(made) and "softmax" not in ops(made)
    fast = dt.optimize(module, (x, mask), find=False)
    got, want = fast(x, mask), module(x, mask)
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS, equal_nan=True)
    assert bool(got[0, 3].isnan().all()) == (fill == -INF)


def hidden_twice(scores, mask):  # GPT-2 with padding in front
    return scores.where(CAUSAL, LOW) + (1.0 - mask[:, None, None].to(scores.dtype)) * LOW


def hidden_by_infinity(scores, mask):
    padding = torch.zeros(4, 7).masked_fill(~mask, -INF)
    return scores.where(CAUSAL, -1e9) + padding[:, None, None]


def hidden_lower(scores, mask):
    later = torch.zeros(7, 7).masked_fill(~CAUSAL, LOW)
    return (scores + later).masked_fill(~mask[:, None, None], -1e9)


@pytest.mark.parametrize("hide", [hidden_twice, hidden_by_infinity, hidden_lower])
def test_rows_that_two_masks_hide_are_as_written(hide):
    """Whoever fills in a number sees what is hidden by the highest one, and no nan."""

    def run(x, mask):
        q, k, v = heads(x)
        return merged(hide((q @ k.mT) * 0.4, mask).softmax(-1) @ v)

    x, mask = tokens(), (torch.arange(7) >= torch.arange(4)[:, None])
    module = Written(run).eval()
    got, want = dt.optimize(module, (x, mask), find=False)(x, mask), module(x, mask)
    torch.testing.assert_close(got, want, rtol=SINGLE_LAYERS, atol=SINGLE_LAYERS)


def test_a_bias_made_of_products_is_a_score():
    """As relative positions are: no number of it hides a key."""

    def run(x, places):
        q, k, v = heads(x)
        scores = q @ k.mT + (q @ places.mT).flip(-1)
        return merged(scores.where(CAUSAL, LOW).softmax(-1) @ v)

    made = planned(Written(run), tokens(), torch.rand(7, 6), within=EPS[torch.float32])
    assert "attention" in ops(made)


def test_a_bias_that_is_long_in_the_making_is_looked_at_once():
    """Each of these squares is read twice: by all ways from the last to the first, 2^60 of them."""

    def run(x, bias):
        q, k, v = heads(x)
        for _ in range(60):
            bias = bias * bias
        return merged((q @ k.mT + bias).softmax(-1) @ v)

    made = planned(Written(run), tokens(), torch.rand(7, 7), within=EPS[torch.float32])
    assert "attention" in ops(made)


def test_a_mask_that_hides_by_a_low_number_needs_nothing_more():
    """(1 − mask) · least, of a mask of booleans, is never −∞: no row has to be put right."""

    def run(x, mask):
        q, k, v = heads(x)
        bias = (1.0 - mask[:, None, None].to(x.dtype)) * LOW
        return merged((q @ k.mT + bias).softmax(-1) @ v)

    mask = torch.rand(4, 7) > 0.3
    made = planned(Written(run), tokens(), mask, within=EPS[torch.float32])
    assert "attention" in ops(made) and not {"where", "max"} & set(ops(made))


def gradient(function, x):
    """The gradient for x as a plan takes it, of the sum of squares, and as autograd does."""
    (graph, value) = (import_module(Written(function).eval(), (x,), {}).graph, x)
    (name,), ((out, _),) = graph.inputs, graph.outputs
    made = decide(differentiate(graph, out, [name]), H200, Policy()).graph
    x = value.double().requires_grad_()
    y = function(x)
    got = evaluate(made, {name: value, f"grad_{out}": 2 * y.detach()}, float64=True)
    return made, got[f"grad_{name}"], torch.autograd.grad(y.square().sum(), x)[0]


def test_gradients_take_the_probabilities_that_were_written():
    made, got, want = gradient(divided, tokens())
    assert "softmax" in ops(made) and error(got, want) <= EPS[torch.float32]


# ---- norms


def t5(x, w, b):
    h = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * (h.to(w.dtype) if w.dtype != torch.float32 else h)


def llama(x, w, b):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return w * h.to(x.dtype)


def gemma(x, w, b):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (h * (1.0 + w.float())).type_as(x)


def by_root(x, w, b):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w


def by_var(x, w, b):
    spread = torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
    return (x - x.mean(-1, keepdim=True)) / spread * w + b


def by_hand(x, w, b):
    centred = x - x.mean(-1, keepdim=True)
    return w * (centred * torch.rsqrt((centred**2).mean(-1, keepdim=True) + 1e-5)) + b


def convnext(x, w, b):  # of images, over the channels
    kind, x = x.dtype, x if x.dtype == torch.float64 else x.float()
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = ((x - u) / torch.sqrt(s + 1e-6)).to(kind)
    return w[:, None, None] * x + b[:, None, None]


RMS, LAYER = (t5, llama, gemma, by_root), (by_var, by_hand, convnext)


class Normed(nn.Module):
    """A norm between a residual and a product."""

    def __init__(self, norm, width=9):
        super().__init__()
        of_images = norm is convnext
        self.norm, self.w, self.b = norm, *(nn.Parameter(torch.rand(width)) for _ in range(2))
        self.before, self.after = (
            nn.Conv2d(width, width, 1) if of_images else nn.Linear(width, width) for _ in range(2)
        )

    def forward(self, x):
        y = self.before(x) + x
        return self.after(self.norm(y, self.w, self.b)) + y


def rows(norm, kind=torch.float32):
    torch.manual_seed(0)
    return torch.randn((2, 9, 5, 3) if norm is convnext else (5, 7, 9)).to(kind)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("norm", RMS + LAYER)
def test_norms_are_one_operator(norm, kind):
    module, x = Normed(norm).eval().to(kind), rows(norm, kind)
    made = decide(import_module(module, (x,), {}).graph, H200, Policy()).graph
    assert ("rms_norm" if norm in RMS else "layer_norm") in ops(made)
    assert not {"mean", "var", "sqrt", "rsqrt", "cast", "mul"} & set(ops(made))
    fast = dt.optimize(module, x, find=False)
    with torch.no_grad():
        had, got = module(x), fast(x)
        want = module.double()(x.double())
    assert error(got, want) <= max(2 * error(had, want), 8 * EPS[kind])


def test_a_norm_with_other_readers_stays():
    def run(x):
        spread = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * spread + spread

    assert "rms_norm" not in ops(planned(Written(run), torch.rand(3, 8)))


@pytest.mark.parametrize("kind", ["unbiased", "other axis", "other number", "channels alone"])
def test_what_is_not_a_norm_stays(kind):
    def run(x):
        mean, axis = x.mean(-1, keepdim=True), -2 if kind == "other axis" else -1
        if kind == "unbiased":
            return (x - mean) / torch.sqrt(x.var(-1, keepdim=True) + 1e-5)
        if kind == "other number":
            return x * torch.rsqrt((x**3).mean(-1, keepdim=True) + 1e-5)
        if kind == "channels alone":  # nothing puts channels last here
            return x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-5)
        return (x - mean) * torch.rsqrt((x - mean).pow(2).mean(axis, keepdim=True) + 1e-5)

    made = planned(Written(run), torch.rand(3, 4, 8), within=EPS[torch.float32])
    assert not {"rms_norm", "layer_norm"} & set(ops(made))


def test_gradients_of_norms_written_out():
    w, b = torch.rand(9).double(), torch.rand(9).double()
    _, got, want = gradient(lambda x: by_hand(x, w.to(x.dtype), b.to(x.dtype)), rows(by_hand))
    assert error(got, want) <= EPS[torch.float32]


def test_a_mask_made_of_one_number_is_known():
    """torch.full(...).triu(1): a number that was expanded, where a mask says."""
    module = Written(lambda x: x + torch.full((7, 7), -1e4).triu(1))
    assert set(ops(planned(module, torch.rand(3, 7, 7)))) == {"add"}
