"""Small calls of ``dt.functional``, which torch's own functions answer."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch

import deuteron as dt
from deuteron.functional import autocast, delegate, shortcuts
from deuteron.functional.activation import SEEDS, _seeds
from deuteron.functional.core import FUNCTIONS
from deuteron.functional.explain import Recording
from tests import autocast_cases, tolerances
from tests.functional_cases import CALLS, gradients, results
from tests.sweeps import one_in
from tests.tolerances import DOUBLE, DOUBLE_GRADIENT, EPS, HARDSIGMOID_SLOPE, SINGLE_LAYERS, error

f = dt.functional


@pytest.fixture(autouse=True)
def allowed():
    with f.delegation(True):
        yield


@pytest.fixture
def planned_calls(monkeypatch):
    """The names of functions that were planned, or found their plan, meanwhile."""
    monkeypatch.setattr(shortcuts, "TRIES", 0)
    seen = []
    for function in FUNCTIONS.values():
        run = type(function).__call__

        def watched(self, *tensors, run=run, **attrs):
            seen.append(self.name)
            return run(self, *tensors, **attrs)

        monkeypatch.setattr(type(function), "__call__", watched)
        break
    return seen


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("dtype", one_in(2, [torch.float64, torch.float32, torch.bfloat16]))
def test_torchs_answers_are_ours(call, dtype):
    x, y = ([t.requires_grad_() for t in call.tensors(dtype)] for _ in range(2))
    got = call.ours(f, *x)
    with f.delegation(False):
        want = call.ours(f, *y)
    for a, b in zip(results(got), results(want), strict=True):
        assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad)
        assert dtype is not torch.float64 or error(a, b) <= DOUBLE
    if dtype is torch.float64:
        limit = DOUBLE_GRADIENT if call.name != "hardsigmoid" else HARDSIGMOID_SLOPE
        for a, b in zip(gradients(got, x), gradients(want, y), strict=True):
            assert error(a, b) <= limit


OURS_ALONE = {  # torch has no call, or too many, for them
    "softsign",
    "softmax masked",
    "rms_norm",  # on a CPU
    "rms_norm residual",
    "rope",
    "rope of q",
    "pyramid_pool2d",
}


@pytest.mark.parametrize("call", one_in(2, CALLS.values()), ids=CALLS)
def test_whose_gradients_torch_answers(call, planned_calls):
    call.ours(f, *[t.requires_grad_() for t in call.tensors(torch.float32)])
    assert bool(planned_calls) == (call.name in OURS_ALONE)


def test_several_calls_only_where_a_gradient_follows(planned_calls):
    x, r, w = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8), torch.randn(8)
    f.layer_norm(x, 8, w, residual=r)
    f.swiglu(x, r)
    assert not planned_calls
    with torch.no_grad():
        f.layer_norm(x, 8, w, residual=r)
        f.swiglu(x, r)
        assert planned_calls == ["layer_norm", "gate"]
        f.layer_norm(x, 8, w)  # one call is always quicker
    assert planned_calls == ["layer_norm", "gate"]


@pytest.mark.each_pair
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("scale", [0.25, 1.0, 2], ids=str)
@pytest.mark.parametrize("kind", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("learned", ["x", "mask"])
def test_a_mask_that_is_added(name, scale, kind, learned, planned_calls):
    """Of a wider type, of more dimensions, or the one that learns."""
    x, mask = torch.randn(4, 8, dtype=torch.float64), torch.randn(3, 1, 8).to(kind)
    one = x if learned == "x" else mask
    one.requires_grad_()
    call = getattr(f, name)
    got = call(x, mask=mask, scale=scale)
    assert not planned_calls
    with f.delegation(False):
        want = call(x, mask=mask, scale=scale)
    assert got.dtype == want.dtype and error(got, want) <= DOUBLE
    slope = torch.randn_like(got)
    a, b = (torch.autograd.grad(y, one, slope)[0] for y in (got, want))
    limit = DOUBLE_GRADIENT if one.dtype is torch.float64 else EPS[kind]
    assert a.dtype == b.dtype and error(a, b) <= limit


@pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])
def test_norms_whose_gradients_torch_answers_at_once(activation, planned_calls):
    x = torch.randn(2, 4, 3, 3, requires_grad=True)
    mean, var = torch.randn(4), torch.rand(4) + 0.5
    calls = (
        lambda: f.batch_norm(x, mean, var, activation=activation),
        lambda: f.instance_norm(x, activation=activation),
        lambda: f.layer_norm(x, (3, 3), activation=activation),
    )
    for call in calls:
        got = call()
        assert not planned_calls
        with f.delegation(False):
            want = call()
        planned_calls.clear()
        assert error(got, want) <= tolerances.SINGLE
    with torch.no_grad():
        f.instance_norm(x)
        f.batch_norm(x, mean, var, activation="relu")
    assert planned_calls == ["instance_norm", "batch_norm"]


def test_a_seed_that_would_be_drawn_is_a_call_too(planned_calls):
    x, bias = torch.zeros(64, 8), torch.ones(8)
    y = f.bias_dropout_residual(x, bias, x, 0.5)
    assert not planned_calls and set(y.unique().tolist()) == {0.0, 2.0}
    f.bias_dropout_residual(x, bias, x, 0.5, seed=1)
    f.bias_dropout_residual(x, bias, x, 0.5, training=False)
    assert planned_calls == ["dropout", "dropout"]


def test_seeds_are_read_from_a_table():
    table = _seeds(torch.device("cpu"), 0)
    assert table.dtype is torch.int64 and torch.equal(table, torch.arange(SEEDS))
    assert all(table[seed].data_ptr() % 16 == 0 for seed in (0, 1, 2, SEEDS - 1))


LARGE, SMALL = torch.randn(64, 512), torch.randn(4, 8)


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("sum", {"out": torch.empty(0)}),
        ("mean", {"axis": 0}),
        ("var", {"unbiased": False}),
        ("sigmoid", {"out": torch.empty(0)}),
        ("gelu", {"tanh": True}),
    ],
)
def test_arguments_that_are_not_ours_are_refused_whatever_the_size(name, kwargs, x):
    with pytest.raises(TypeError, match=next(iter(kwargs))):
        getattr(f, name)(x, **kwargs)


@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: f.gelu(), "missing"),
        (lambda x: f.cumsum(x), "missing.*'dim'"),
        (lambda x: f.layer_norm(input=x), "missing.*'normalized_shape'"),
        (lambda x: f.gelu(x, "none", x), "positional argument"),
        (lambda x: f.layer_norm(x, 8, None, None, 1e-5, x), "positional argument"),
        (lambda x: f.gelu(x, input=x), "both 'x' and 'input'"),
    ],
    ids=["none", "not all", "not all by name", "too many", "by place", "twice"],
)
def test_calls_that_do_not_fit_are_refused_whatever_the_size(call, words, x):
    with pytest.raises(TypeError, match=words):
        call(x)


def _anew(value):
    """An equal object, which is not the same one where Python can make another."""
    return float(repr(value)) if isinstance(value, float) else value


@pytest.mark.parametrize(
    "name",
    """leaky_relu elu celu softplus hardtanh softshrink hardshrink gelu glu softmax log_softmax sum
        mean prod var amax amin argmax argmin norm sort layer_norm cross_entropy
        avg_pool1d topk""".split(),
)
def test_a_default_that_is_given_changes_nothing(name, planned_calls):
    """Small calls leave out what has its default, which has to be torch's as well."""
    needed = {
        "layer_norm": (8,),
        "cross_entropy": (torch.arange(4),),
        "avg_pool1d": (2,),
        "topk": (2,),
    }
    function, given = getattr(f, name), needed.get(name, ())
    defaults = {
        p.name: _anew(p.default)
        for p in inspect.signature(function).parameters.values()
        if p.default is not p.empty and p.default is not None
    }
    results_of = [results(function(SMALL, *given, **more)) for more in ({}, defaults)]
    for a, b in zip(*results_of, strict=True):
        assert torch.equal(a, b)
    assert not planned_calls


OPTIONS = {  # ours(module, x), where torch's module has the same arguments
    "relu inplace": lambda m, x: m.relu(x, inplace=True),
    "selu inplace": lambda m, x: m.selu(x, True),
    "silu inplace": lambda m, x: m.silu(x, inplace=True),
    "leaky_relu inplace": lambda m, x: m.leaky_relu(x, 0.2, True),
    "elu inplace": lambda m, x: m.elu(x, 0.5, True),
    "celu inplace": lambda m, x: m.celu(x, 0.5, True),
    "hardtanh inplace": lambda m, x: m.hardtanh(x, -0.5, 0.5, True),
    "threshold inplace": lambda m, x: m.threshold(x, 0.1, -1.0, True),
    "dropout inplace": lambda m, x: m.dropout(x, 0.0, True, True),
    "gelu by name": lambda m, x: m.gelu(input=x, approximate="tanh"),
    "layer_norm by name": lambda m, x: m.layer_norm(input=x, normalized_shape=x.shape[-1:]),
    "cross_entropy by name": lambda m, x: m.cross_entropy(
        input=x, target=torch.zeros(len(x), dtype=torch.int64)
    ),
    "softmax dtype": lambda m, x: m.softmax(x.half(), dim=1, dtype=torch.float32),
    "log_softmax dtype": lambda m, x: m.log_softmax(x.bfloat16(), 1, dtype=torch.float64),
    "softmax of the usual dim": lambda m, x: m.softmax(x, dim=None),
    "instance_norm": lambda m, x: m.instance_norm(
        x[None], None, None, torch.ones(len(x)), torch.zeros(len(x)), True, 0.1, 1e-3
    ),
    "grid_sample": lambda m, x: m.grid_sample(
        x[None, None], torch.zeros(1, 2, 2, 2), align_corners=None
    ),
    "sum dtype": lambda m, x: m.sum(x.half(), 0, dtype=torch.float32),
    "mean dtype": lambda m, x: m.mean(x.int(), dim=0, dtype=torch.float32),
    "prod dtype": lambda m, x: m.prod(x[:, :5], 1, dtype=torch.float64),
    "cumsum dtype": lambda m, x: m.cumsum(x.half(), 1, dtype=torch.float64),
    "cumprod dtype": lambda m, x: m.cumprod(x[:, :5], 1, dtype=torch.float64),
    "sum of no axes": lambda m, x: m.sum(x, ()),
    "amax of no axes": lambda m, x: m.amax(x, (), True),
    "var": lambda m, x: m.var(x, 0, correction=None),
    "topk": lambda m, x: m.topk(x, 3, -1, True, True)[0],
    "where a number": lambda m, x: m.where(x > 0, x, 0.1),
    "where a number is first": lambda m, x: m.where(x > 0, 0.1, x.double()),
    "where an integer": lambda m, x: m.where(x > 0, x.half(), 3),
    "where numbers": lambda m, x: m.where(x > 0, 1.0, 2.0),
}


@pytest.mark.each_pair
@pytest.mark.filterwarnings("ignore:Implicit dimension choice", "ignore:Default grid_sample")
@pytest.mark.parametrize("x", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("call", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("delegated", [True, False], ids=["torch's", "planned"])
def test_torchs_arguments_mean_the_same(call, x, delegated):
    mine, theirs = x.clone(), x.clone()
    try:
        want = call(torch.nn.functional, theirs)
    except AttributeError:
        want = call(torch, theirs)
    with f.delegation(delegated):
        got = call(f, mine)
    assert got.dtype == want.dtype and error(got, want) <= SINGLE_LAYERS
    assert torch.equal(mine, theirs)  # written to, or not


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0, 2.0, 3.0, -1.0, float("inf"), float("-inf")])
def test_norms_of_every_kind(p):
    """Zeros among the numbers and a row of zeros, of which torch says that the slope is 0."""
    x = torch.randn(5, 7, dtype=torch.float64)
    x[2, 3] = 0.0
    x[4] = 0.0
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with f.delegation(False):
        y = f.norm(a, p, 1)
    want = torch.linalg.vector_norm(b, p, 1)
    assert error(y, want) <= DOUBLE
    if p:  # the number of elements has no slope
        y.sum().backward(), want.sum().backward()
        assert error(a.grad, b.grad) <= DOUBLE_GRADIENT


def test_a_wrong_call_leaves_nothing_behind():
    """False equals 0, so the right call has the key of the wrong one."""
    with f.delegation(False):
        with pytest.raises(dt.BindError, match="dim is False"):
            f.prod(LARGE, dim=False)
        assert f.prod(LARGE, dim=0).shape == (512,)


def test_large_calls_are_planned(planned_calls):
    edge = delegate.LIMITS[-1] // 4
    f.gelu(torch.zeros(edge))
    assert not planned_calls
    f.gelu(torch.zeros(edge + 1))
    assert planned_calls == ["op_gelu"]


def test_what_is_one_operator_stays_torchs_on_a_cpu(planned_calls):
    x = torch.randn(1, 4, 96, 96, requires_grad=True)
    y = f.max_pool2d(x, 3, 2, 1)
    assert not planned_calls and y.grad_fn.name() == "MaxPool2DWithIndicesBackward0"
    text = f.explain(f.max_pool2d, x, 3, 2, 1)
    assert "torch's own function" in text and "nothing to fuse" in text
    with f.delegation(False):
        f.max_pool2d(x, 3, 2, 1)
    assert planned_calls == ["op_max_pool"]


MATRIX, IMAGE = (512, 1024), (8, 64, 32, 32)  # 2 MB of float32


@pytest.mark.parametrize(
    ("call", "shape", "dtype", "ours", "ours_to_train"),
    [
        (lambda x: f.sum(x, -1), MATRIX, torch.float32, False, False),
        (lambda x: f.sum(x, -1), MATRIX, torch.bfloat16, True, False),
        (lambda x: f.sum(x, 0), MATRIX, torch.float32, True, True),
        (lambda x: f.sum(x, (0, -2)), (8, 64, 1024), torch.float32, True, True),
        (lambda x: f.sum(x.t(), 0), MATRIX, torch.float32, False, False),
        (lambda x: f.sum(x, 0), MATRIX, torch.float64, False, False),
        (lambda x: f.sum(x), MATRIX, torch.float32, False, False),
        (lambda x: f.mean(x, 1), MATRIX, torch.float32, False, True),
        (lambda x: f.mean(x, ()), MATRIX, torch.bfloat16, True, True),
        (lambda x: f.amax(x, [-1]), MATRIX, torch.float32, False, True),
        (lambda x: f.amin(x, dim=0), MATRIX, torch.float32, True, True),
        (lambda x: f.adaptive_avg_pool2d(x, 1), IMAGE, torch.float32, False, True),
        (lambda x: f.adaptive_avg_pool2d(x, 1), IMAGE, torch.bfloat16, True, True),
        (f.global_max_pool, IMAGE, torch.float32, False, True),
        (lambda x: f.prelu(x, torch.ones(1, dtype=x.dtype)), MATRIX, torch.float32, False, True),
        (lambda x: f.prelu(x, torch.ones(1, dtype=x.dtype)), MATRIX, torch.bfloat16, True, True),
        (f.relu, MATRIX, torch.float32, False, False),
        (f.relu, MATRIX, torch.float16, True, True),
        (f.leaky_relu, MATRIX, torch.float16, False, False),
        (f.leaky_relu, MATRIX, torch.bfloat16, True, True),
        (f.hardtanh, (256, 256), torch.bfloat16, True, False),
        (f.sigmoid, (256, 256), torch.float32, True, False),
        (f.silu, (256, 256), torch.bfloat16, True, False),
        (f.silu, MATRIX, torch.float32, True, True),
        (lambda x: f.softmax(x, -1), (256, 256), torch.float32, True, False),
        (lambda x: f.layer_norm(x, (256,)), (256, 256), torch.float32, True, False),
        (lambda x: f.layer_norm(x, (256,)), (512, 256), torch.float32, True, True),
        (f.mish, (256, 256), torch.float32, True, True),
        (lambda x: f.avg_pool2d(x, 2), IMAGE, torch.float32, True, True),
        (lambda x: f.avg_pool2d(x, 2), IMAGE, torch.float64, False, False),
        (lambda x: f.max_pool2d(x, 3, 2, 1), IMAGE, torch.float16, True, False),
        (lambda x: f.max_pool2d(x, 3, return_indices=True), IMAGE, torch.float32, False, False),
    ],
)
def test_who_answers_large_calls_on_a_cpu(call, shape, dtype, ours, ours_to_train, planned_calls):
    x = torch.randn(shape).to(dtype)
    call(x)
    assert bool(planned_calls) == ours
    planned_calls.clear()
    call(x.requires_grad_())
    assert bool(planned_calls) == ours_to_train
    planned_calls.clear()
    with torch.no_grad():
        call(x)
    assert bool(planned_calls) == ours
    planned_calls.clear()
    with f.delegation(False):
        call(x)
    assert planned_calls


def test_channels_that_are_innermost_are_averaged_by_us(planned_calls):
    f.adaptive_avg_pool2d(torch.randn(IMAGE).to(memory_format=torch.channels_last), 1)
    assert planned_calls == ["op_adaptive_avg_pool"]


def test_explain_says_that_and_why():
    x = torch.randn(4, 8)
    text = f.explain(f.gelu, x)
    assert "gelu(x: float32[4, 8])" in text and "torch's own function" in text
    assert "launch-bound" in text and "128 bytes" in text and "delegation(False)" in text
    with f.delegation(False):
        assert "torch's own function" not in f.explain(f.gelu, x)


def test_an_explanation_that_fails_leaves_nothing_behind():
    with pytest.raises(dt.DeuteronError):
        f.explain(f.gelu, [1.0])
    assert not Recording.active


def test_the_knob():
    f.delegation(False)
    try:
        assert "torch's own function" not in f.explain(f.gelu, torch.randn(4))
    finally:
        f.delegation(True)
    assert "torch's own function" in f.explain(f.gelu, torch.randn(4))


def test_the_knob_is_turned_for_one_thread():
    """Here blocks of two threads overlap: the first is left before the second."""
    turned, left, seen = threading.Event(), threading.Event(), []

    def other():
        seen.append(delegate.may_delegate())
        with f.delegation(False):
            turned.set()
            left.wait(10)
            seen.append(delegate.may_delegate())
        seen.append(delegate.may_delegate())

    thread = threading.Thread(target=other)
    with f.delegation(False):
        thread.start()
        turned.wait(10)
    left.set()
    thread.join()
    assert seen == [True, False, True] and delegate.may_delegate()


def test_limits_are_estimates_of_the_machine():
    h200 = dt.target("h200")
    assert delegate.small_bytes(h200) == int(3e-6 * h200.stream * 0.75 / 2)
    assert (
        delegate.small_bytes(dt.target("cpu")) == 16 * 1024
    )  # measured, and the same in every run


def test_what_torch_refuses_is_planned_or_explained(planned_calls):
    x = torch.randn(4, 8)
    assert f.layer_norm(x.bfloat16(), 8, torch.ones(8)).dtype == torch.bfloat16
    assert f.rms_norm(x.bfloat16(), 8, torch.ones(8)).dtype == torch.bfloat16
    with pytest.raises(dt.DeuteronError, match="not how x"):
        f.layer_norm(x, 9)
    with pytest.raises(dt.DeuteronError, match="x is a list"):
        f.gelu([1.0, 2.0])
    with pytest.raises(dt.DeuteronError, match="strided tensor is needed"):
        f.relu(torch.eye(3).to_sparse())
    with pytest.raises(dt.DeuteronError, match="not one of 8"):
        f.cross_entropy(x, torch.full((4,), 9))
    with pytest.raises(dt.DeuteronError, match="cannot be halved"):
        f.swiglu(torch.ones(2, 3, requires_grad=True))


def _autocast_knows(name: str) -> bool:
    """Whether autocast has a rule for an operator of torch's, on a GPU or on a CPU."""
    return any(
        torch._C._dispatch_has_kernel_for_dispatch_key(full, key)
        for full in torch._C._dispatch_get_all_op_names()
        if full.split(".")[0] == name
        for key in ("AutocastCUDA", "AutocastCPU")
    )


# torch's under autocast as well: its rule gives them the types that ours would have, which
# test_types_under_autocast_are_torchs compares
BY_RULE = tuple(
    "conv_bn_act layer_norm softmax log_softmax softplus prelu sum prod norm cumsum cumprod".split()
)
LOSSES = ("cross_entropy", "linear_cross_entropy")  # not planned, but they ask about autocast


@pytest.mark.parametrize(
    "call",
    one_in(2, [c for c in CALLS.values() if not c.name.startswith(LOSSES)]),
    ids=lambda c: c.name,
)
def test_what_autocast_would_change_is_ours(call, planned_calls):
    tensors = [t.requires_grad_() for t in call.tensors(torch.float32)]
    with torch.autograd.profiler.profile() as seen:
        call.ours(f, *tensors)
    outer = {e.name for e in seen.function_events if e.cpu_parent is None}
    by_rule = [name for name in outer if _autocast_knows(name)]
    planned_calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        results(call.ours(f, *tensors))
    assert planned_calls or not by_rule or call.name.startswith(BY_RULE)


@pytest.mark.parametrize("name", one_in(2, autocast_cases.CASES))
def test_types_under_autocast_are_torchs(name):
    assert not (found := autocast_cases.wrong(name, "cpu")), found


def test_what_autocast_wants_in_float32_on_a_gpu(monkeypatch):
    """By the same rules on the CPU: cast in the kernel, exact, with gradients of the right type,
    while the sum with a residual stays as it is."""
    here = dict.fromkeys(autocast.FLOAT32, frozenset({"cpu"}))
    monkeypatch.setattr(autocast, "FLOAT32", here)
    x = torch.randn(64, 32, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(32)
    wide = x.detach().double().requires_grad_()
    for ours, theirs in (
        (lambda x: f.softmax(x, 1), lambda x: torch.softmax(x, 1)),
        (
            lambda x: f.layer_norm(x, (32,), w, w),
            lambda x: torch.layer_norm(x, (32,), w.double(), w.double()),
        ),
        (
            lambda x: f.rms_norm(x, (32,), w, 1e-6),
            lambda x: torch.rms_norm(x, (32,), w.double(), 1e-6),
        ),
        (lambda x: f.cumsum(x, 1), lambda x: x.cumsum(1)),
        (lambda x: f.norm(x, dim=1), lambda x: torch.linalg.vector_norm(x, dim=1)),
        (lambda x: f.softplus(x), torch.nn.functional.softplus),
    ):
        with torch.autocast("cpu", torch.bfloat16), f.delegation(False):
            y = ours(x)
        exact = theirs(wide)
        assert y.dtype is torch.float32
        assert error(y, exact) <= tolerances.allowed(0.0, torch.float32, 32)
        (grad,) = torch.autograd.grad(y.sum(), x)
        (exact_grad,) = torch.autograd.grad(exact.sum(), wide)
        assert grad.dtype is torch.bfloat16
        assert float((grad.double() - exact_grad).abs().max()) <= 2 * EPS[torch.bfloat16]
    with torch.autocast("cpu", torch.bfloat16), f.delegation(False):
        y, total = f.layer_norm(x, (32,), w, w, residual=x)
    assert (y.dtype, total.dtype) == (torch.float32, torch.bfloat16)


def test_results_are_never_their_arguments():
    x = torch.randn(4, 4)
    for y in (f.permute(x, (0, 1)), f.dropout(x, 0.5, training=False), f.pixel_shuffle(x[None], 1)):
        assert y.data_ptr() != x.data_ptr()


def test_refused_by_torch_and_by_us():
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(dt.DeuteronError, match="min"):
        f.hardtanh(x, 2.0, 1.0)
    with pytest.raises(dt.DeuteronError, match="mode"):
        f.interpolate(x, 2, mode="cubic")
    with pytest.raises(dt.DeuteronError, match="one of size and scale_factor"):
        f.interpolate(x)
    with pytest.raises(dt.DeuteronError, match="mode"):
        f.grid_sample(x, torch.zeros(1, 2, 2, 2), mode="linear")
    with pytest.raises(dt.DeuteronError, match="reduction"):
        f.cross_entropy(x[0, 0], torch.zeros(4, dtype=torch.int64), reduction="average")
    with pytest.raises(dt.DeuteronError, match="windows for 3"):
        f.weighted_pool2d(x, torch.ones(3, 2, 2))
    with pytest.raises(dt.DeuteronError, match="low"):
        f.histogram(x, 4, 1.0, 1.0)
    with pytest.raises(dt.DeuteronError, match="no variance"):
        f.batch_norm(torch.randn(1, 2, 1, 1), None, None, training=True)


HOW = (
    {"size": 5},
    {"size": (3, 7)},
    {"scale_factor": 1.5},
    {"scale_factor": (2.0, 0.75)},
    {"scale_factor": 1.7, "recompute_scale_factor": True},
    {"size": 3, "antialias": True},
    {"scale_factor": 0.6, "antialias": True},
)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic", "area"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_resampled_as_by_torch(mode, how):
    x = torch.randn(2, 3, 6, 5)
    linear = mode.startswith("bi")
    if "antialias" in how and not linear:
        for interpolate in (f.interpolate, torch.nn.functional.interpolate):
            with pytest.raises((dt.DeuteronError, ValueError), match=r"(?i)anti-?alias"):
                interpolate(x, mode=mode, **how)
        return
    corners = (None, False, True) if linear else (None,)
    for align in corners:
        given = {"mode": mode, "align_corners": align, **how}
        assert torch.equal(f.interpolate(x, **given), torch.nn.functional.interpolate(x, **given))


def test_an_order_that_must_be_the_same_is_ours(planned_calls):
    torch.use_deterministic_algorithms(True)
    try:
        f.adaptive_avg_pool2d(torch.randn(1, 2, 4, 4, requires_grad=True), 2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert planned_calls == ["op_adaptive_avg_pool"]
