"""Calls like one that was answered before: who answers must not depend on having been asked."""

from __future__ import annotations

import threading

import pytest
import torch

import deuteron as dt
from deuteron.functional import shortcuts
from deuteron.functional.core import FUNCTIONS, Function
from deuteron.plan import tensors
from tests.functional_cases import CALLS, gradients, results
from tests.sweeps import one_in
from tests.tolerances import SINGLE, error

f = dt.functional


def repeated(call, times=4):
    """What the last of several calls answers."""
    for _ in range(times):
        found = call()
    return found


def with_gradients(call):
    tensors = [t.requires_grad_() for t in call.tensors(torch.float32)]
    found = call.ours(f, *tensors)
    return [*results(found), *gradients(found, tensors)]


@pytest.fixture
def looked_up(monkeypatch):
    """The names of functions that looked for a plan."""
    seen, run = [], Function.__call__

    def watched(self, *tensors, **attrs):
        seen.append(self.name)
        return run(self, *tensors, **attrs)

    monkeypatch.setattr(Function, "__call__", watched)
    return seen


def test_without_torchs_comparison_calls_are_looked_up(looked_up, monkeypatch):
    """It is no part of torch that is promised: one that lacks it answers all the same."""
    monkeypatch.setattr(tensors, "TensorGuards", None)
    x = torch.randn(4, 8, requires_grad=True)
    y = repeated(lambda: f.swiglu(x, x.detach()))
    want = torch.nn.functional.silu(x) * x.detach()
    assert error(y, want) <= SINGLE and looked_up == ["gate"] * 4
    for again in (True, True, False):
        (got,) = torch.autograd.grad(y.sum(), x, retain_graph=again)
        assert error(got, torch.autograd.grad(want.sum(), x, retain_graph=again)[0]) <= SINGLE


@pytest.mark.parametrize("call", one_in(2, CALLS.values()), ids=CALLS)
@pytest.mark.parametrize("allowed", [False, True])
def test_answers_stay_the_same(call, allowed):
    """Of the first call, of the one that is noted, and of those that are known."""
    with f.delegation(allowed):
        sought = with_gradients(call)
        with torch.no_grad():
            plain = results(call.ours(f, *call.tensors(torch.float32)))
        for _ in range(4):
            for a, b in zip(with_gradients(call), sought, strict=True):
                assert torch.equal(a, b) and a.requires_grad == b.requires_grad
            with torch.no_grad():
                for a, b in zip(
                    results(call.ours(f, *call.tensors(torch.float32))), plain, strict=True
                ):
                    assert torch.equal(a, b) and not a.requires_grad


def test_a_known_call_looks_for_no_plan(looked_up):
    x, r, w = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    repeated(lambda: f.layer_norm(x, (8,), w, residual=r))
    assert looked_up == ["layer_norm"] * 2
    y, total = f.layer_norm(x + 1, (8,), w + 1, residual=r + 1)
    assert looked_up == ["layer_norm"] * 2
    assert error(y, torch.nn.functional.layer_norm(x + r + 2, (8,), w + 1)) <= SINGLE
    assert torch.equal(total, x + 1 + (r + 1))


@pytest.mark.parametrize(
    "changed",
    [
        lambda x, r: (x.double(), r.double()),
        lambda x, r: (x.t().contiguous().t(), r),
        lambda x, r: (x[:2], r[:2]),
        lambda x, r: (x, r[:1]),
        lambda x, r: (x, x),
        lambda x, r: (torch._neg_view(x), r),
        lambda x, r: (x.requires_grad_(), r),
        lambda x, r: (x, None),
    ],
)
def test_what_differs_is_seen(changed):
    x, r = torch.randn(4, 4), torch.randn(4, 4)
    repeated(lambda: f.layer_norm(x, 4, residual=r, eps=1e-3))
    x, r = changed(x.clone(), r.clone())
    got = results(f.layer_norm(x, 4, residual=r, eps=1e-3))
    total = x if r is None else x + r
    want = torch.nn.functional.layer_norm(total, (4,), eps=1e-3)
    assert error(got[0], want) <= SINGLE and got[0].dtype is want.dtype
    assert got[0].requires_grad == want.requires_grad


def test_numbers_of_another_type_are_others():
    x = torch.randn(2, 8)
    repeated(lambda: f.softmax(x, 1, scale=1.5))
    repeated(lambda: f.sum(x, (1,), True))
    assert torch.allclose(f.sum(x, (1,), False), x.sum(1))
    with pytest.raises(dt.DeuteronError, match=r"dim"):
        f.sum(x, (1.0,), True)
    with pytest.raises(dt.DeuteronError, match=r"dim"):
        f.softmax(x, True, scale=1.5)
    assert torch.allclose(f.softmax(x, 0, scale=1.5), (x * 1.5).softmax(0))
    assert torch.allclose(f.softmax(x, 1, scale=2.5), (x * 2.5).softmax(1))


def test_a_list_that_is_changed_afterwards():
    x, dims = torch.randn(2, 3, 4), [0, 1]
    repeated(lambda: f.sum(x, dims))
    dims[1] = 2
    assert error(f.sum(x, dims), x.sum((0, 2))) <= SINGLE


def test_modes_that_must_see_the_call():
    x, r = torch.randn(4, 8), torch.randn(4, 8)

    def call(x):
        return f.swiglu(x, r[0] if x.ndim == 1 else r)

    want = repeated(lambda: call(x))
    slope = torch.func.jvp(call, (x,), (torch.ones_like(x),))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found = torch.autograd.forward_ad.unpack_dual(call(dual))
    assert torch.allclose(found.tangent, slope)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(call(x), torch._subclasses.FakeTensor)
    with torch.autocast("cpu"):
        assert f.prelu(x, x[0, :1]).dtype is torch.bfloat16
    assert torch.allclose(torch.vmap(lambda x: f.swiglu(x, r[0]))(x), f.swiglu(x, r[:1]))
    assert torch.equal(torch.jit.trace(call, (x,))(x + 1), call(x + 1))
    with torch.inference_mode():
        assert repeated(lambda: call(x)).is_inference()
    assert torch.equal(call(x), want) and not call(x).is_inference()


def test_autocast_to_another_type():
    """Its type is not among what is compared."""
    x, w = torch.randn(4, 8).bfloat16(), torch.rand(8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert repeated(lambda: f.prelu(x, w)).dtype is torch.bfloat16
    with torch.autocast("cpu", torch.float16):
        assert f.prelu(x, w).dtype is torch.float16


def test_running_statistics_move_each_time():
    x, mean, var = torch.randn(4, 3, 5), torch.zeros(3), torch.ones(3)
    other = torch.nn.BatchNorm1d(3).train()
    for k in range(6):
        f.batch_norm(x + k, mean, var, training=True)
        other(x + k)
        assert error(mean, other.running_mean) <= SINGLE
    assert mean._version == 6


def test_rows_are_shortened_each_time():
    """What a function does besides one plan is done by every call."""
    index = torch.arange(4)
    for _ in range(5):
        weight = torch.full((4, 8), 9.0)
        with f.delegation(True):
            f.embedding(index, weight, max_norm=1.0, position=torch.zeros(8))
        assert error(weight.norm(dim=1), torch.ones(4)) <= SINGLE


def test_values_are_looked_at_each_time():
    q = torch.randn(1, 1, 4, 8)
    repeated(lambda: f.attention(q, q, q, lengths=torch.tensor([4])))
    with pytest.raises(dt.DeuteronError):
        f.attention(q, q, q, lengths=torch.tensor([5]))


def test_explain_and_delegation_are_heard():
    x, r = torch.randn(4, 8), torch.randn(4, 8)
    with f.delegation(True):
        repeated(lambda: f.geglu(x.requires_grad_(), r))
        assert "torch's own function" in f.explain(f.geglu, x, r)
    repeated(lambda: f.geglu(x, r))
    assert "torch's own function" not in f.explain(f.geglu, x, r)


def test_few_kinds_are_noted_and_few_shapes_are_kept(monkeypatch):
    monkeypatch.setattr(shortcuts, "SHAPES", 3)
    for n in range(1, 9):
        x = torch.randn(n, 4)
        want = torch.nn.functional.silu(x) * x.flip(0)
        assert error(repeated(lambda x=x: f.swiglu(x, x.flip(0))), want) <= SINGLE
    assert all(len(shapes) <= 3 for shapes in shortcuts.Shapes.every)
    x = torch.randn(2, 4)
    for k in range(40):
        repeated(lambda k=k: f.softmax(x, scale=1.5 + k))
    kept = [calls for shapes in shortcuts.Shapes.every for calls in shapes.values()]
    assert max(map(len, kept)) <= shortcuts.TRIES


def test_several_threads():
    x, found = torch.randn(8, 16), []
    want = torch.nn.functional.silu(x) * x.flip(0)

    def work():
        found.append(max((f.swiglu(x, x.flip(0)) - want).abs().max().item() for _ in range(200)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4 and max(found) < 1e-5


def test_a_wrong_call_says_what_is_wrong_each_time():
    x = torch.randn(4, 8)
    for _ in range(4):
        with pytest.raises(dt.DeuteronError, match="normalized_shape"):
            f.layer_norm(x, (9,))
    assert "layer_norm" in FUNCTIONS


def test_gradients_of_other_strides_and_orders():
    """A backward pass is known by what was saved and what came; what differs is looked up."""
    x, r = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)

    def grads(call, came, **how):
        y = call(x, r)
        return torch.autograd.grad(y, (x, r), came, **how)

    def theirs(x, r):
        return torch.nn.functional.silu(x) * r

    came = torch.randn(4, 6)
    repeated(lambda: grads(f.swiglu, came))
    others = [came, came + 1, came.t().contiguous().t(), came[:1].expand(4, 6)]
    for other in (*others, torch._neg_view(came), x.detach(), x):
        got, want = grads(f.swiglu, other), grads(theirs, other)
        assert all(error(a, b) <= SINGLE for a, b in zip(got, want, strict=True))
    first, second = (
        torch.autograd.grad(grads(call, came, create_graph=True)[0].sum(), (x, r))
        for call in (f.swiglu, theirs)
    )
    assert all(error(a, b) <= SINGLE for a, b in zip(first, second, strict=True))


def test_a_result_without_a_gradient_after_one_with_both():
    x, r = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    came = torch.randn(4, 6)
    repeated(lambda: sum(map(torch.sum, f.layer_norm(x, 6, residual=r))).backward())
    for place in (0, 1):
        got = torch.autograd.grad(f.layer_norm(x, 6, residual=r)[place], (x, r), came)
        total = x + r
        y = (torch.nn.functional.layer_norm(total, (6,)), total)[place]
        want = torch.autograd.grad(y, (x, r), came)
        assert all(error(a, b) <= SINGLE for a, b in zip(got, want, strict=True))
