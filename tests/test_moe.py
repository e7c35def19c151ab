"""Mixtures of experts: against a loop over experts in float64, gradients by finite differences, all
sizes of groups, layers, modules of models, mistakes."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.functional.backward import Backward
from deuteron.functional.moe import EXPERTS, GROUPS, INNER, OUTER, ROUTE
from deuteron.ir.types import TensorType
from deuteron.plan import decide
from deuteron.policy import Policy
from tests.tolerances import DOUBLE, GRADIENT, SINGLE_LAYERS, allowed, error

f = dt.functional
SWEEP = pytest.mark.sweep
ACTS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu}


def by_a_loop(x, numbers, shares, w_in, w_out, activation="silu", gated=True):
    """As models write it."""
    y = torch.zeros(*x.shape[:-1], w_out.shape[1], dtype=x.dtype)
    for e in range(w_in.shape[0]):
        token, slot = torch.where(numbers == e)
        h = x[token] @ w_in[e].T
        gate, up = h.chunk(2, -1) if gated else (h, 1.0)
        made = (ACTS[activation](gate) * up) @ w_out[e].T
        y = y.index_add(0, token, (made * shares[token, slot, None]).to(y.dtype))
    return y


def layer(tokens=17, experts=5, top_k=2, features=12, inside=7, dtype=torch.float64, gated=True):
    """Tokens, the numbers of their experts, shares, and both matrices."""
    gen = torch.Generator().manual_seed(tokens + 31 * experts + top_k)
    x = torch.randn(tokens, features, generator=gen, dtype=torch.float64)
    logits = torch.randn(tokens, experts, generator=gen, dtype=torch.float64)
    w_in = torch.randn(experts, (1 + gated) * inside, features, generator=gen, dtype=torch.float64)
    w_out = torch.randn(experts, features, inside, generator=gen, dtype=torch.float64)
    shares, numbers = f.route(logits, top_k)
    return x.to(dtype), numbers, shares.to(dtype), (w_in / 3).to(dtype), (w_out / 3).to(dtype)


SIZES = {
    "usual": {},
    "one token": {"tokens": 1},
    "no tokens": {"tokens": 0},
    "all experts": {"top_k": 5},
    "one expert": {"experts": 1, "top_k": 1},
    "more experts than pairs": {"tokens": 3, "experts": 11},
    "many": {"tokens": 130, "experts": 6, "top_k": 3},
    "no gate": {"gated": False},
}


TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
OFTEN = {(name, torch.float32) for name in SIZES} | {("usual", torch.bfloat16)}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=() if (name, dtype) in OFTEN else SWEEP)
        for dtype in TYPES
        for name in SIZES
    ],
)
def test_errors_are_at_most_twice_torchs(name, dtype):
    how = SIZES[name]
    gated = how.get("gated", True)
    given = layer(**how, dtype=dtype)
    wide = [t.double() if t.is_floating_point() else t for t in given]

    def all_of(call, tensors):
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        y = call(*leaves)
        needed = [t for t in leaves if t.requires_grad]
        return [
            y,
            *torch.autograd.grad(y, needed, torch.linspace(-1, 1, y.numel()).to(y).view_as(y)),
        ]

    loop = lambda *ts: by_a_loop(*ts, gated=gated)  # noqa: E731
    exact, plain, ours = all_of(loop, wide), all_of(loop, given), all_of(f.experts, given)
    for mine, theirs, want in zip(ours, plain, exact, strict=True):
        assert mine.dtype == theirs.dtype
        assert error(mine, want) <= allowed(error(theirs, want), dtype)
    still = f.experts(*given)
    assert error(still, exact[0]) <= allowed(error(plain[0], exact[0]), dtype)
    assert torch.equal(still, f.experts(*given))


@pytest.mark.parametrize(
    "activation", ["silu", *(pytest.param(n, marks=SWEEP) for n in ("gelu", "relu"))]
)
def test_gradients_by_finite_differences(activation):
    x, numbers, shares, w_in, w_out = layer(tokens=4, experts=3, features=5, inside=3)
    leaves = [t.requires_grad_() for t in (x, shares, w_in, w_out)]

    def call(x, shares, w_in, w_out):
        return f.experts(x, numbers, shares, w_in, w_out, activation=activation)

    torch.autograd.gradcheck(call, leaves, atol=GRADIENT, rtol=GRADIENT)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalise", [True, False])
def test_routing(score, normalise):
    logits = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    want, places = scores.topk(3)
    want = want / want.sum(-1, keepdim=True) if normalise else want
    shares, numbers = f.route(logits, 3, score=score, normalise=normalise)
    assert torch.equal(numbers, places) and error(shares, want) <= DOUBLE
    low, _ = f.route(logits.bfloat16(), 3, score=score, normalise=normalise)
    assert low.dtype == torch.float32
    call = lambda t: f.route(t, 3, score=score, normalise=normalise)[0]  # noqa: E731
    torch.autograd.gradcheck(call, logits.requires_grad_(), atol=GRADIENT, rtol=GRADIENT)


def test_all_tokens_to_one_expert():
    x, numbers, shares, w_in, w_out = layer(top_k=1)
    numbers = torch.full_like(numbers, 3)
    w_in.requires_grad_()
    y = f.experts(x, numbers, shares, w_in, w_out)
    assert error(y, by_a_loop(x, numbers, shares, w_in, w_out)) <= DOUBLE
    (grad,) = torch.autograd.grad(y.sum(), w_in)
    assert grad[3].any() and not grad[[0, 1, 2, 4]].any()


def test_tensors_that_lie_otherwise():
    x, numbers, shares, w_in, w_out = given = layer(dtype=torch.float32)
    want = f.experts(*given)
    lines = torch.zeros(12, 17).T.copy_(x), torch.zeros(17, 24)[:, ::2].copy_(x)
    lists = numbers.T.contiguous().T, shares.T.contiguous().T
    turned = w_in.mT.contiguous().mT, w_out.mT.contiguous().mT
    apart = torch.zeros(5, 14, 24)[..., ::2].copy_(w_in)
    for each in lines:
        assert error(f.experts(each, *lists, *turned), want) <= SINGLE_LAYERS
    assert error(f.experts(x, numbers.int(), shares, apart, w_out), want) <= SINGLE_LAYERS
    cut = (t.reshape(1, 17, -1).expand(2, 17, -1) for t in (x, numbers, shares))
    several = f.experts(*cut, w_in, w_out)
    assert several.shape == (2, 17, 12)
    assert error(several[1], want) <= SINGLE_LAYERS
    leaves = [t.clone().requires_grad_() for t in (x, *turned)]
    f.experts(leaves[0], *lists, *leaves[1:]).sum().backward()  # a gradient without strides


def test_moe_is_routing_and_experts():
    x, _, _, w_in, w_out = layer()
    router = torch.randn(5, 12, dtype=torch.float64)
    shares, numbers = f.route(x @ router.T, 2)
    want = by_a_loop(x, numbers, shares, w_in, w_out)
    assert error(f.moe(x, router, w_in, w_out, top_k=2), want) <= DOUBLE


@SWEEP
@pytest.mark.parametrize("name", ["whole", "inner", "outer", "route"])
def test_opcheck(name):
    x, numbers, shares, w_in, w_out = layer(tokens=5, dtype=torch.float32)
    lists = GROUPS(numbers, groups=5)
    h = INNER.one(x, w_in, *lists, share=2)
    calls = {
        "whole": (EXPERTS, (x, numbers, shares, w_in, w_out), {"apart": False}),
        "inner": (INNER, (x, w_in, *lists), {"share": 2}),
        "outer": (OUTER, (h, numbers, shares, w_out, *lists), {"share": 2}),
        "route": (ROUTE, (x,), {"top_k": 2, "score": "softmax", "normalise": True}),
    }
    function, tensors, how = calls[name]
    how |= {"activation": "silu"} if name in ("whole", "outer") else {}
    given = [t.detach().requires_grad_(t.is_floating_point()) for t in tensors]
    torch.library.opcheck(function.op, given, how)


def test_compile():
    x, numbers, shares, w_in, w_out = layer(tokens=5, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (x, shares, w_in, w_out)]
    compiled = torch.compile(f.experts, backend="aot_eager", fullgraph=True)
    found = []
    for call in (f.experts, compiled):
        y = call(x, numbers, shares, w_in, w_out)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(error(b, a) <= SINGLE_LAYERS for a, b in zip(*found, strict=True))


def test_transforms_and_second_derivatives():
    x, numbers, shares, w_in, w_out = layer(tokens=4, experts=3, features=5, inside=3)
    several = [torch.stack((t, t.flip(0))) for t in (x, numbers, shares)]
    want = torch.stack([f.experts(*each, w_in, w_out) for each in zip(*several, strict=True)])
    found = torch.func.vmap(lambda *each: f.experts(*each, w_in, w_out))(*several)
    assert error(found, want) <= DOUBLE
    starts = torch.tensor([0, 1, 3, 4])
    with torch.no_grad():
        linear = torch.func.vmap(lambda x: f.grouped_linear(x, w_in, starts))(several[0])
    assert error(linear[0], f.grouped_linear(x, w_in, starts)) <= DOUBLE
    call = lambda x, w: f.experts(x, numbers, shares, w, w_out)  # noqa: E731
    leaves = x.requires_grad_(), w_in.requires_grad_()
    torch.autograd.gradgradcheck(call, leaves, atol=GRADIENT, rtol=GRADIENT)


def test_autocast():
    given = layer(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = f.experts(*given)
        low = f.moe(given[0], torch.randn(5, 12), *given[3:], top_k=2)
    assert y.dtype == low.dtype == torch.bfloat16
    assert error(y, f.experts(*given)) <= allowed(0.0, torch.bfloat16, 16)


def test_a_gate_with_its_gradient_is_generated():
    """What leaves in several sizes, h by its share and the gradient of both halves, is parted."""

    def of(*shape, kind="bf16"):
        return TensorType.of(shape, kind)

    lists = of(9, kind="i32"), *[of(8192, kind="i32")] * 2
    pairs = (of(4096, 2, kind=kind) for kind in ("i64", "f32"))
    types = of(8192, 2048), *pairs, of(8, 512, 1024), *lists
    how = {"activation": "silu", "share": 2}
    back = Backward(OUTER, types, how, (True, False, True, True, False, False, False))
    choices = decide(back.usual_graph(), dt.target("h200"), Policy()).choices
    run_by = {c.candidate.engine for c in choices if {"silu", "pad"} & {*c.region.ops}}
    assert run_by == {"triton_gen"}


# ---- mistakes


def test_mistakes():
    x, numbers, shares, w_in, w_out = layer()

    def wrong(*args, call=f.experts, **how):
        with pytest.raises(dt.DeuteronError) as info:
            call(*args, **how)
        return str(info.value)

    assert "5 is out of range" in wrong(x, numbers + 1, shares, w_in, w_out)
    assert "experts from 0 to 4" in wrong(x, numbers - 1, shares, w_in, w_out)
    assert "give them as [17, k]" in wrong(x, numbers[:3], shares[:3], w_in, w_out)
    assert "another shape than experts" in wrong(x, numbers, shares[:, :1], w_in, w_out)
    assert "does not take rows of 11" in wrong(x[:, 1:], numbers, shares, w_in, w_out)
    assert "[5, out, 14], or with a gate [5, out, 7]" in wrong(x, numbers, shares, w_in, w_out.mT)
    assert "weights are int64" in wrong(x, numbers, numbers, w_in, w_out)
    assert "one element type" in wrong(x.float(), numbers, shares, w_in, w_out)
    assert "the index is float64" in wrong(x, shares, shares, w_in, w_out)
    assert "x has rank 1" in wrong(x[0], numbers, shares, w_in, w_out)
    assert "no activation 'swish'" in wrong(x, numbers, shares, w_in, w_out, activation="swish")
    assert "w_out is a str, 'w', not a Tensor" in wrong(x, numbers, shares, w_in, "w")
    logits = torch.randn(4, 5)
    assert "6 of 5 experts" in wrong(logits, 6, call=f.route)
    assert "no score 'max'" in wrong(logits, 1, call=f.route, score="max")
    assert "[experts, K]" in wrong(x, torch.randn(12, 5), w_in, w_out, 2, call=f.moe)
    assert "rise from 0 to 17" in wrong(x, w_in, torch.arange(6), call=f.grouped_linear)
    assert "matrices for the 3 groups" in wrong(x, w_in, torch.arange(4), call=f.grouped_linear)
    assert "3 of 2 experts" in wrong(4, 4, 2, 3, call=dt.nn.MoE)


# ---- modules


class Mlp(nn.Module):
    def __init__(self, features=12, inside=7):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(features, inside, bias=False) for _ in "ab")
        self.w2 = nn.Linear(inside, features, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Dropping(Mlp):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return self.w2(self.dropout(F.silu(self.w1(x)) * self.w3(x)))


class OneByOne(nn.Module):
    """Experts as modules of their own, as models wrote them first."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(12, 5, bias=False)
        self.experts = nn.ModuleList(Mlp() for _ in range(5))

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        shares, numbers = self.gate(rows).softmax(-1).topk(2)
        shares, y = shares / shares.sum(-1, keepdim=True), torch.zeros_like(rows)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(numbers == e)
            y.index_add_(0, token, expert(rows[token]) * shares[token, slot, None])
        return y.reshape(x.shape)


class Together(nn.Module):
    """All experts as two parameters, as models write them now."""

    def __init__(self, turned=False):
        super().__init__()
        self.turned, self.act_fn, self.count = turned, nn.SiLU(), 5
        shapes = (5, 14, 12), (5, 12, 7)
        self.gate_up_proj, self.down_proj = (
            nn.Parameter(torch.randn(shape).mT.contiguous() if turned else torch.randn(shape))
            for shape in shapes
        )

    def forward(self, hidden_states, top_k_index, top_k_weights):
        y = torch.zeros_like(hidden_states)
        for e in range(self.count):
            token, slot = torch.where(top_k_index == e)
            a, b = self.gate_up_proj[e], self.down_proj[e]
            a, b = (a, b) if self.turned else (a.T, b.T)
            gate, up = (hidden_states[token] @ a).chunk(2, -1)
            made = (self.act_fn(gate) * up) @ b * top_k_weights[token, slot, None]
            y.index_add_(0, token, made.to(y.dtype))
        return y


class Wide(Together):
    """Their sum has the wider type of tokens and shares."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        kind = torch.promote_types(hidden_states.dtype, top_k_weights.dtype)
        each = [
            super(Wide, self).forward(hidden_states, one, share).to(kind)
            for one, share in zip(top_k_index.split(1, -1), top_k_weights.split(1, -1), strict=True)
        ]
        return sum(each)


class Clamped(Together):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states.clamp(-50.0, 50.0), top_k_index, top_k_weights)


class Counted(Together):
    calls = 0

    def forward(self, hidden_states, top_k_index, top_k_weights):
        self.calls += 1
        return super().forward(hidden_states, top_k_index, top_k_weights)


class Interleaved(Together):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        return super().forward(hidden_states, top_k_index, top_k_weights.sqrt())


def test_a_layer_loads_both_spellings():
    torch.manual_seed(0)
    block, x = OneByOne(), torch.randn(3, 4, 12)
    want = block(x)
    ours = dt.nn.MoE(12, 7, experts=5, top_k=2)
    ours.load_state_dict(block.state_dict())
    assert error(ours(x), want) <= SINGLE_LAYERS
    again = dt.nn.MoE(12, 7, experts=5, top_k=2)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(again(x), ours(x))
    made = dt.nn.MoE.from_experts(block.gate, block.experts, top_k=2)
    assert error(made(x), want) <= SINGLE_LAYERS
    assert "experts=5, top_k=2" in str(made)
    assert pickle.loads(pickle.dumps(made)).state_dict().keys() == ours.state_dict().keys()
    with pytest.raises(dt.DeuteronError, match="no gated MLP without biases"):
        dt.nn.MoE.from_experts(block.gate, [nn.Linear(3, 3)], top_k=1)
    with pytest.raises(dt.DeuteronError, match="no gated MLP without biases and dropout"):
        dt.nn.MoE.from_experts(block.gate, [Dropping()], top_k=1)
    (row,) = (row for row in dt.nn.report(Doubled()) if row.kind == "Doubled")
    assert "dt.nn.MoE.from_experts(layer.gate, layer.experts, top_k)" in row.why
    fast = dt.optimize(made, x, find=False)
    assert error(fast(x), want) <= SINGLE_LAYERS


class Doubled(OneByOne):
    def forward(self, x):
        return super().forward(x) * 2


class Listed(OneByOne):
    """As Mixtral was first written: logits come back, and shares need not add up to 1."""

    def __init__(self, top_k=3, normalise=False):
        super().__init__()
        self.top_k, self.normalise = top_k, normalise

    def forward(self, x):
        rows = x.view(-1, x.shape[-1])
        logits, y = self.gate(rows), torch.zeros_like(rows)
        shares, numbers = F.softmax(logits, dim=1, dtype=torch.float).topk(self.top_k)
        shares = shares / shares.sum(-1, keepdim=True) if self.normalise else shares
        mask = F.one_hot(numbers, num_classes=len(self.experts)).permute(2, 1, 0)
        for e, expert in enumerate(self.experts):
            slot, token = torch.where(mask[e])
            made = expert(rows[None, token].reshape(-1, x.shape[-1])) * shares[token, slot, None]
            y.index_add_(0, token, made.to(y.dtype))
        return y.reshape(x.shape), logits


class Widened(Listed):
    def forward(self, x):
        y, logits = super().forward(x)
        return y.float(), logits


def test_experts_of_a_list_whose_result_has_another_type_are_called_one_by_one():
    torch.manual_seed(0)
    block, x = Widened().bfloat16(), torch.randn(2, 9, 12, dtype=torch.bfloat16)
    want = block(x)[0]
    torch.testing.assert_close(dt.nn.replace(block, exclude="Mlp")(x)[0], want)


@pytest.mark.parametrize("make", [Listed, pytest.param(OneByOne, marks=SWEEP)])
def test_experts_of_a_list_run_together(make):
    """Results and gradients, while an optimiser writes into parameters that stay the same."""
    torch.manual_seed(0)
    theirs, x = make(), torch.randn(2, 9, 12)
    ours = dt.nn.replace(copy.deepcopy(theirs))
    (row,) = (row for row in dt.nn.report(ours) if row.path == "")
    assert row.by == "dt.functional.experts of all that are in experts, silu"
    names, kept = [*theirs.state_dict()], [*ours.parameters()]
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for _ in range(2):
        found, want = ([y] if isinstance(y, torch.Tensor) else y for y in (ours(x), theirs(x)))
        for a, b in zip(found, want, strict=True):
            assert a.shape == b.shape and error(a, b) <= SINGLE_LAYERS
        for y, step in zip((found, want), steps, strict=True):
            step.zero_grad()
            y[0].square().sum().backward()
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert error(p.grad, q.grad) <= 10 * SINGLE_LAYERS
        for step in steps:
            step.step()
    assert [*ours.state_dict()] == names
    assert all(p is q for p, q in zip(ours.parameters(), kept, strict=True))
    whole = ours.experts[0].w2.weight.untyped_storage().data_ptr()
    assert ours.experts[4].w2.weight.untyped_storage().data_ptr() == whole  # nothing is copied
    moved = copy.deepcopy(ours).double()
    moved.load_state_dict(theirs.double().state_dict())
    assert error(moved(x.double())[0], theirs(x.double())[0]) <= SINGLE_LAYERS
    dt.nn.restore(ours)
    assert type(ours) is type(theirs)


def test_experts_that_somebody_listens_to_are_called_one_by_one():
    torch.manual_seed(0)
    block, seen = dt.nn.replace(OneByOne()), []
    x = torch.randn(9, 12)
    want = block(x)
    handle = block.experts[1].register_forward_hook(lambda *_: seen.append(1))
    assert error(block(x), want) <= SINGLE_LAYERS and seen
    handle.remove()
    y = block(x)
    with torch.no_grad():
        block.experts[2].w1.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    shared = nn.Parameter(block.experts[0].w1.weight.detach())  # looks into the same memory
    block.experts[1].w1.weight = shared
    assert error(block(x), dt.nn.restore(copy.deepcopy(block))(x)) <= SINGLE_LAYERS
    assert shared.data_ptr() == block.experts[0].w1.weight.data_ptr()


@SWEEP
def test_a_loop_over_experts_under_torch_compile():
    """The graph breaks at the loop, which adds to zeros that a graph of ours has made."""
    torch.manual_seed(0)
    block, x = OneByOne(), torch.randn(3, 4, 12)
    torch._dynamo.reset()
    with torch.no_grad():
        found = [torch.compile(block, backend="deuteron")(x) for _ in range(2)]
        assert all(error(y, block(x)) <= SINGLE_LAYERS for y in found)


@pytest.mark.parametrize("turned", [False, True])
def test_experts_of_models_are_replaced(turned):
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Together(turned)})
    x, numbers, shares, *_ = layer(dtype=torch.float32)
    want, keys = model["experts"](x, numbers, shares), list(model.state_dict())
    dt.nn.replace(model)
    (row,) = dt.nn.report(model)
    assert row.by == "dt.functional.experts, silu"
    module = model["experts"]
    for each in (module, copy.deepcopy(module)):
        assert error(each(x, top_k_index=numbers, top_k_weights=shares), want) <= SINGLE_LAYERS
    assert list(model.state_dict()) == keys
    module(x, numbers, shares).sum().backward()
    assert module.gate_up_proj.grad is not None
    module.act_fn.register_forward_hook(lambda *given: None)  # somebody listens: the author's
    assert error(module(x, numbers, shares), want) <= SINGLE_LAYERS
    dt.nn.restore(model)
    assert type(module) is Together


FORMULA = "share · down(activation(gate) · up)"


@pytest.mark.parametrize(
    ("make", "why"),
    [(Interleaved, FORMULA), (Clamped, FORMULA), (Counted, "changes what the module keeps")],
)
def test_other_experts_are_kept_with_a_reason(make, why):
    (row,) = dt.nn.report(nn.ModuleDict({"experts": make()}), exclude="SiLU")[:1]
    assert why in row.why


def test_the_type_of_experts_is_the_authors():
    module = Wide().bfloat16()
    x, numbers, shares, *_ = layer(dtype=torch.float32)
    x = x.bfloat16()
    want = [module(x, numbers, shares.to(kind)) for kind in (torch.float32, torch.bfloat16)]
    dt.nn.replace(module)
    assert "experts, silu" in str(dt.nn.report(module))
    for y in want:
        found = module(x, numbers, shares.to(y.dtype))
        assert found.dtype == y.dtype and error(found, y) <= allowed(0.0, torch.bfloat16, 4)


def test_a_step_of_training_holds_experts_and_their_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(dt.nn.RMSNorm(12), dt.nn.MoE(12, 7, experts=5, top_k=2))
    twin, x, y = copy.deepcopy(model), torch.randn(9, 12), torch.randn(9, 12)
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
    step = dt.train_step(model, F.mse_loss, dt.optim.SGD(model.parameters(), lr=0.1), (x, y))
    for _ in range(2):
        loss = F.mse_loss(twin(x), y)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert error(step(x, y), loss) <= SINGLE_LAYERS
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert error(mine, other) <= SINGLE_LAYERS
