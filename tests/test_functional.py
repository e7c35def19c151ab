"""``dt.functional``: what torch says, in every type and memory order, with its gradient."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.errors import DeuteronError
from deuteron.frontends import torch_export
from deuteron.frontends.proxies import NeedsExport
from deuteron.functional.backward import Backward
from deuteron.functional.core import FUNCTIONS
from tests.functional_cases import CALLS, Call, gradients, results
from tests.sweeps import one_in, sweep_unless
from tests.tolerances import (
    DOUBLE,
    DOUBLE_GRADIENT,
    HARDSIGMOID_SLOPE,
    SAME_CODE,
    SINGLE,
    allowed,
    error,
)

f = dt.functional
EVERY = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)


def needing(call: Call, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in call.tensors(dtype)]


@pytest.mark.parametrize("call", one_in(2, CALLS.values()), ids=CALLS)
def test_results_and_gradients_are_torchs(call):
    x, y = needing(call), needing(call)
    ours, theirs = call.ours(f, *x), call.theirs(*y)
    limit = DOUBLE_GRADIENT if call.name != "hardsigmoid" else HARDSIGMOID_SLOPE
    for a, b in zip(results(ours), results(theirs), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype and a.requires_grad
        assert error(a, b) <= DOUBLE
    for a, b in zip(gradients(ours, x), gradients(theirs, y), strict=True):
        assert error(a, b) <= limit


@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.each_value
def test_errors_are_at_most_twice_torchs(call, dtype):
    x, y = needing(call, dtype), needing(call, dtype)
    wide = [t.detach().double().requires_grad_() for t in x]
    try:
        theirs = call.theirs(*y)
        their_grads = gradients(theirs, y)
    except RuntimeError:  # torch has no such kernel for 16 bits on a CPU
        theirs = call.theirs(*wide)
        their_grads = gradients(theirs, wide)
    exact = call.theirs(*wide)
    exact_grads = gradients(exact, wide)
    ours = call.ours(f, *x)
    for a, b, e in zip(results(ours), results(theirs), results(exact), strict=True):
        assert a.dtype == dtype
        assert error(a, e) <= allowed(error(b, e), dtype, 16)
    for a, b, e in zip(gradients(ours, x), their_grads, exact_grads, strict=True):
        assert error(a, e) <= allowed(error(b, e), dtype, 64)


@pytest.mark.parametrize("call", one_in(2, CALLS.values()), ids=CALLS)
def test_gradients_are_those_of_finite_differences(call):
    if call.frozen:
        pytest.skip("its gradient is zero by definition, not by calculus")
    x = needing(call)
    assert torch.autograd.gradcheck(lambda *t: call.ours(f, *t), x, fast_mode=True)


@EVERY
def test_any_memory_order(call):
    def strided(t: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype) if t.ndim else t
        view = wide[..., ::2].copy_(t) if t.ndim else t
        return view.detach()

    plain = call.tensors()
    turned = [strided(t).requires_grad_() for t in plain]
    want = call.ours(f, *plain)
    got = call.ours(f, *turned)
    for a, b in zip(results(got), results(want), strict=True):
        assert error(a, b) <= DOUBLE
    gradients(got, turned)


def some_functions() -> list[Any]:
    """The calls; every run has one of every second function, which the first word of a name says:
    for the compiler they are all alike."""
    first: dict[str, str] = {}
    for name in CALLS:
        first.setdefault(name.split()[0], name)
    some = [*first.values()][::2]
    return [
        pytest.param(call, id=name, marks=sweep_unless(name in some))
        for name, call in CALLS.items()
    ]


@pytest.mark.parametrize("call", some_functions())
def test_under_torch_compile(call):
    torch._dynamo.reset()
    fast = torch.compile(lambda *t: call.ours(f, *t), fullgraph=True, backend="aot_eager")
    x, y = needing(call), needing(call)
    got, want = fast(*x), call.ours(f, *y)
    for a, b in zip(results(got), results(want), strict=True):
        assert error(a, b) <= SAME_CODE
    for a, b in zip(gradients(got, x), gradients(want, y), strict=True):
        assert error(a, b) <= SAME_CODE


class Module(torch.nn.Module):
    """A call in a module, where ``dt.optimize`` finds it."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.call = call

    def forward(self, *tensors):
        return self.call.ours(f, *tensors)


@EVERY
def test_a_module_that_calls_ours_is_planned_whole(call):
    """Its calls become operators of one graph, none of them opaque. A loss that goes through its
    logits in chunks is refused."""
    tensors = tuple(call.tensors())
    if "linear_cross_entropy" in call.name:
        with f.delegation(False), pytest.raises(DeuteronError, match="outside of what"):
            dt.optimize(Module(call).eval(), tensors, find=False)
        return
    with f.delegation(False):
        want = call.ours(f, *tensors)
        fast = dt.optimize(Module(call).eval(), tensors, find=False)
    assert not fast.opaque
    for a, b in zip(results(fast(*tensors)), results(want), strict=True):
        assert a.dtype == b.dtype and error(a, b) <= DOUBLE


@pytest.mark.parametrize("exported", [False, True], ids=["traced", "exported"])
def test_a_trained_module_is_planned(exported, monkeypatch):
    """After training with modules of ours, in 16 bits too, traced either way."""
    if exported:

        def gives_up(*_):
            raise NeedsExport("asked for")

        monkeypatch.setattr(torch_export, "trace", gives_up)
    made = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.GroupNorm(2, 8),
        torch.nn.SiLU(),
        torch.nn.Dropout(),
        torch.nn.Softmax(1),
    )
    x = torch.randn(4, 3, 40, 40, generator=torch.Generator().manual_seed(0))
    model = dt.nn.replace(made)
    model(x).sum().backward()
    for dtype in (torch.float32, torch.bfloat16):
        model.eval().to(dtype)
        eager, fast = model(x.to(dtype)), dt.optimize(model, x.to(dtype), find=False)
        exact = copy.deepcopy(model).double()(x.to(dtype).double())
        assert not fast.opaque
        assert error(fast(x.to(dtype)), exact) <= allowed(error(eager, exact), dtype, 64)


def test_a_loss_in_a_module_is_refused_by_name():
    call = CALLS["linear_cross_entropy"]
    with f.delegation(False), pytest.raises(dt.GraphError, match="outside of what is optimised"):
        dt.optimize(Module(call).eval(), tuple(call.tensors()), find=False)


def test_attributes_have_names_that_inductor_leaves_free():
    """It hands them on by name, beside arguments of its own: ``kernel`` was one, and every pool
    failed under torch.compile's default backend."""
    from torch._inductor.ir import FallbackKernel

    makers = (FallbackKernel.create, FallbackKernel.process_kernel)
    taken = {name for maker in makers for name in inspect.signature(maker).parameters}
    for function in FUNCTIONS.values():
        words = {a.name for a in function.op._schema.arguments if a.kwarg_only}
        assert not words & taken, function.name


CHECKED = (
    "layer_norm with all",
    "rms_norm residual",
    "softmax masked",
    "swiglu",
    "max_pool2d",
    "gelu",
    "bilinear",
    "norm 2.0",
    "embedding",
    "group_norm",
    "permute",
)


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name, monkeypatch):
    call, seen = CALLS[name], []
    monkeypatch.setattr("deuteron.functional.core.is_seen", lambda: True)
    for function in FUNCTIONS.values():

        def watched(*tensors, op=function.op, **attrs):
            seen.append((op, tensors, attrs))
            return op(*tensors, **attrs)

        monkeypatch.setattr(function, "op", watched)
    call.ours(f, *needing(call, torch.float32))
    monkeypatch.undo()
    assert seen
    for op, tensors, attrs in seen:
        torch.library.opcheck(op, tensors, attrs)


# ---- what is saved


def test_the_sum_is_saved_in_place_of_its_parts():
    x, r = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    w = torch.randn(8, requires_grad=True)
    y, s = f.rms_norm(x, 8, w, residual=r)
    kept = [t.data_ptr() for t in y.grad_fn.saved_tensors]
    assert sorted(kept) == sorted([w.data_ptr(), s.data_ptr()])
    (y.sum() + s.sum()).backward()
    assert x.grad.data_ptr() != x.data_ptr() and torch.equal(x.grad, r.grad)


def test_softmax_saves_its_result_and_nothing_else():
    x = torch.randn(4, 8, requires_grad=True)
    y = f.softmax(x)
    assert [t.data_ptr() for t in y.grad_fn.saved_tensors] == [y.data_ptr()]


def test_a_gradient_for_one_result_only():
    x, r = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)
    y, s = f.layer_norm(x, 8, residual=r)
    (a,) = torch.autograd.grad(s.sum(), x)
    assert torch.equal(a, torch.ones_like(x)) and y.requires_grad


def test_a_saved_result_that_was_changed_is_noticed():
    x = torch.randn(3, 4, requires_grad=True)
    y = f.softmax(x)
    y.detach().mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- edges


@pytest.mark.parametrize("shape", [(0, 5), (3, 0)])
def test_nothing(shape):
    x = torch.empty(shape, requires_grad=True)
    for name in ("gelu", "softmax", "relu"):
        y = getattr(f, name)(x)
        assert y.shape == shape
        y.sum().backward()
    assert f.layer_norm(torch.empty(0, 5), 5).shape == (0, 5)


def test_a_row_with_nothing_left_is_zero():
    x = torch.randn(2, 3, requires_grad=True)
    mask = torch.tensor([[True, False, True], [False, False, False]])
    y = f.softmax(x, mask=mask)
    assert torch.equal(y[1], torch.zeros(3)) and y[0, 1].item() == 0.0
    y.square().sum().backward()
    assert torch.isfinite(x.grad).all() and torch.equal(x.grad[1], torch.zeros(3))


def test_a_mean_a_thousand_times_the_deviation():
    x = (torch.randn(16, 512) + 1000.0).requires_grad_()
    wide = x.detach().double().requires_grad_()
    ours, exact = f.layer_norm(x, 512), F.layer_norm(wide, (512,))
    theirs = F.layer_norm(x, (512,))
    assert error(ours, exact) <= allowed(error(theirs, exact), torch.float32, 64)


@pytest.mark.parametrize(
    ("norm", "last"),
    [
        (lambda x, w, b: f.layer_norm(x, 48, w, b), True),
        (lambda x, w, b: f.group_norm(x, 3, w, b), False),
        (lambda x, w, b: f.batch_norm(x, None, None, w, b, training=True), False),
        (
            lambda x, w, b: f.batch_norm(x, None, None, w, b, training=True, activation="relu"),
            False,
        ),
    ],
    ids=("layer", "group", "batch", "batch+relu"),
)
def test_norms_of_equal_numbers_are_their_bias(norm, last):
    """And the gradient of their weight is 0, exactly."""
    x = torch.full((2, 48, 50, 48), 0.731, requires_grad=True)
    w = torch.randn(48, requires_grad=True)
    b = torch.rand(48, requires_grad=True)
    with f.delegation(False):
        y = norm(x, w, b)
        y.backward(torch.randn(y.shape))
    assert torch.equal(y, (b if last else b.reshape(-1, 1, 1)).expand_as(y)) and not w.grad.any()


@pytest.mark.parametrize("name", ["gelu", "softmax"])
def test_hooks_may_keep_what_was_saved_in_another_memory_order(name):
    """As ``save_on_cpu(pin_memory=True)`` does."""
    x, slope = torch.randn(7, 5).t().requires_grad_(), torch.randn(5, 7)
    (want,) = torch.autograd.grad(getattr(f, name)(x), x, slope)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda t: t):
        y = getattr(f, name)(x)
    assert torch.equal(torch.autograd.grad(y, x, slope)[0], want)


def test_dropout_is_a_function_of_its_seed():
    x = torch.ones(64, 64, requires_grad=True)
    a, b, c = f.dropout(x, 0.25, seed=1), f.dropout(x, 0.25, seed=1), f.dropout(x, 0.25, seed=2)
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert 0.7 < float((a > 0).float().mean()) < 0.8
    a.sum().backward()
    assert torch.equal(x.grad, a.detach())
    torch.manual_seed(3)
    first = f.dropout(x, 0.5)
    torch.manual_seed(3)
    assert torch.equal(first, f.dropout(x, 0.5))
    assert torch.equal(f.dropout(x, 0.5, training=False), x)
    r, bias = torch.randn(64, 64), torch.randn(64)
    y = f.bias_dropout_residual(x, bias, r, 0.5, seed=4)
    kept = f.dropout(torch.ones(64, 64), 0.5, seed=4)
    assert error(y.detach(), kept * (x.detach() + bias) + r) <= SINGLE


@pytest.mark.parametrize("allowed", [True, False])
def test_where_nothing_is_dropped_the_result_is_a_copy(allowed):
    x = torch.zeros(4, 4)
    with f.delegation(allowed):
        for y in (f.dropout(x, 0.0), f.bias_dropout_residual(x, None, None, 0.0)):
            y.add_(1.0)
    assert not x.any()


@pytest.mark.parametrize("rows", [2, 300])
def test_nothing_is_drawn_where_nothing_is_dropped(rows):
    """An evaluation between two steps does not change the masks of the next one."""
    x = torch.randn(rows, 64)
    f.dropout(x, 0.5, training=False)  # the first call of a shape plans it
    before = torch.get_rng_state()
    f.dropout(x, 0.5, training=False)
    f.bias_dropout_residual(x, x[0], x, 0.5, training=False)
    f.bias_dropout_residual(x, x[0], x, 0.0, seed=None)
    dt.nn.Dropout(0.5).eval()(x)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "again, compiled", [(False, False), (True, False), (False, True)], ids=["", "again", "compiled"]
)
def test_a_gradient_that_stays_the_same_is_not_copied(again, compiled):
    """That of a residual; also where it is differentiated again, or the only one asked for."""
    x, bias, r = (torch.randn(s, requires_grad=True) for s in ((8, 16), (16,), (8, 16)))
    g, kept = torch.randn(8, 16), f.dropout(torch.ones(8, 16), 0.5, seed=4)

    def function(x, bias, r):
        return f.bias_dropout_residual(x, bias, r, 0.5, seed=4)

    call = torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function
    dx, db, dr = torch.autograd.grad(call(x, bias, r), (x, bias, r), g, create_graph=again)
    assert error(dx, kept * g) <= SINGLE and error(db, (kept * g).sum(0)) <= SINGLE
    assert torch.equal(dr, g) and (compiled or dr.data_ptr() == g.data_ptr())
    (alone,) = torch.autograd.grad(call(x.detach(), None, r), r, g)
    assert torch.equal(alone, g)


def test_indices_come_along_without_gradients():
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    y, where = f.max_pool2d(x, 2, return_indices=True)
    z, at = F.max_pool2d(x, 2, return_indices=True)
    assert torch.equal(y, z) and torch.equal(where, at) and not where.requires_grad
    y.sum().backward()
    assert torch.equal(f.argmax(x, 1), x.argmax(1)) and torch.equal(f.argmin(x), x.argmin())


def test_sinusoids():
    table = f.sinusoidal(50, 7)
    assert table.shape == (50, 7)
    assert math.isclose(float(table[3, 0]), math.sin(3), rel_tol=SINGLE)
    assert math.isclose(float(table[3, 3]), math.cos(3 * 10000 ** (-2 / 7)), rel_tol=SINGLE)
    assert torch.equal(f.sinusoidal(5, 8, offset=10), f.sinusoidal(15, 8)[10:])


def test_a_view_whose_signs_are_still_to_be_turned():
    z = torch.randn(64, 64, dtype=torch.complex64).conj().imag
    assert z.is_neg()
    assert error(f.swiglu(z, z), F.silu(z) * z) <= 1e-6
    x = torch.randn(64, 64, requires_grad=True)
    f.swiglu(x, x.detach()).backward(z)
    y = x.detach().clone().requires_grad_()
    (F.silu(y) * y.detach()).backward(z)
    assert error(x.grad, y.grad) <= 1e-6


# ---- being told what is wrong


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: f.layer_norm(torch.ones(3, 4), (5,)), "not how x"),
        (lambda: f.layer_norm(torch.ones(3, 4), 4, torch.ones(3)), "weight of layer_norm"),
        (lambda: f.layer_norm(torch.ones(3, 4), 4, activation="rele"), "no activation 'rele'"),
        (lambda: f.swiglu(torch.ones(3, 5)), "cannot be halved"),
        (lambda: f.swiglu(torch.ones(3, 4), torch.ones(3, 5)), "do not broadcast"),
        (lambda: f.softmax(torch.ones(3), 1), "out of range"),
        (lambda: f.interpolate(torch.ones(1, 1, 2, 2), mode="best", size=3), "no mode 'best'"),
        (lambda: f.interpolate(torch.ones(1, 1, 2, 2)), "one of size and scale_factor"),
        (lambda: f.max_pool2d(torch.ones(2, 2), 2), "rank 2"),
        (lambda: f.gelu(torch.ones(3, dtype=torch.int64)), "gelu"),
        (lambda: f.dropout(torch.ones(3), 1.5), "not a probability"),
        (lambda: f.gelu([1.0, 2.0]), "x is a list"),
        (lambda: f.gelu(torch.eye(3).to_sparse()), "strided tensor is needed"),
        (lambda: f.embedding(torch.ones(3), torch.ones(4, 2)), "embedding"),
    ],
)
def test_wrong_arguments(wrong, words):
    with pytest.raises(dt.DeuteronError, match=words):
        wrong()


def test_explain_says_what_runs():
    text = f.explain(f.swiglu, torch.randn(64, 64), torch.randn(64, 64))
    assert "silu+mul" in text and "cpu_gen" in text


def test_plans_are_kept_and_do_not_pile_up(monkeypatch):
    function = FUNCTIONS["gate"]
    before = dict(function.planned)
    x = torch.randn(3, 5)
    f.swiglu(x, x)
    many = len(function.planned)
    f.swiglu(x, x)
    assert len(function.planned) == many
    monkeypatch.setattr("deuteron.functional.backward.KEPT", many)
    f.swiglu(torch.randn(3, 6), torch.randn(3, 6))
    assert len(function.planned) == many
    function.planned.update(before)


def test_a_backward_pass_is_plain_text():
    x = torch.randn(3, 4)
    attrs = {"dim": -1, "scale": 1.0, "dtype": None}
    found = FUNCTIONS["softmax"].plan((x, None), attrs).backward((True, False))
    assert isinstance(found, Backward) and '"softmax"' in found.spec


def test_padded_means_of_channels_last_are_not_torchs_on_a_gpu(monkeypatch):
    """Whose gradient forgets the padding there; on a CPU it does not."""
    pool = importlib.import_module("deuteron.functional.pool")
    x = torch.randn(1, 2, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()

    def is_wrong(x, padding):
        return pool.mean_gradient_is_wrong(2, x, 2, padding=padding)

    assert not is_wrong(x, 1)
    monkeypatch.setattr(pool, "mean_gradient_faults", lambda x: not x.is_contiguous())
    assert is_wrong(x, 1) and is_wrong(x, (0, 1))
    assert not any(map(is_wrong, (x.detach(), x.contiguous(), x), (1, 1, 0)))
    with f.delegation(True):
        said = f.explain(f.avg_pool2d, x, 2, padding=1)
        assert "torch's own" not in said
        assert "torch's own" in f.explain(f.avg_pool2d, x, 2)
    y = f.avg_pool2d(x, 2, padding=1)
    assert torch.equal(y, F.avg_pool2d(x, 2, padding=1))
