"""Instance norm with running statistics: training, evaluation, state dicts, and what torch's does
not have."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from tests.sweeps import one_in
from tests.tolerances import DOUBLE, DOUBLE_GRADIENT, SINGLE, allowed, error

f = dt.functional
SHAPES = {1: (3, 4, 7), 2: (3, 4, 5, 3), 3: (2, 4, 3, 2, 5)}
BOTH = pytest.mark.parametrize("handed_on", [False, True], ids=["planned", "handed on"])


def pair(dims: int, **options) -> tuple[nn.Module, nn.Module]:
    """Ours and torch's with the same numbers in all parameters and statistics."""
    torch.manual_seed(0)
    name = f"InstanceNorm{dims}d"
    options = {"affine": True, "track_running_stats": True, **options}
    theirs = getattr(nn, name)(4, **options).double()
    with torch.no_grad():
        for t in (*theirs.parameters(), theirs.running_mean, theirs.running_var):
            t.uniform_(0.5, 2.0)
    ours = getattr(dt.nn, name)(4, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def same(ours: nn.Module, theirs: nn.Module, x: torch.Tensor, call=None) -> None:
    """Results, gradients and all that the modules keep. ``call``: what calls ``ours``."""
    a, b = x.detach().clone().requires_grad_(), x.detach().clone().requires_grad_()
    found, wanted = (ours if call is None else call)(a), theirs(b)
    assert error(found, wanted) <= DOUBLE
    found.sin().sum().backward()
    wanted.sin().sum().backward()
    assert error(a.grad, b.grad) <= DOUBLE_GRADIENT
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert error(p.grad, q.grad) <= DOUBLE_GRADIENT
    mine, yours = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(yours)
    for name, value in yours.items():
        assert error(mine[name], value) <= DOUBLE, name


@BOTH
@pytest.mark.parametrize("dims", one_in(2, SHAPES))
@pytest.mark.parametrize("options", [{}, {"momentum": 0.4, "affine": False}, {"momentum": None}])
@pytest.mark.each_pair
def test_training_and_evaluation_are_torchs(dims, options, handed_on):
    ours, theirs = pair(dims, **options)
    with f.delegation(handed_on):
        for step in range(3):
            same(ours, theirs, torch.randn(SHAPES[dims], dtype=torch.float64) * 2.0 + step)
        same(ours.eval(), theirs.eval(), torch.randn(SHAPES[dims], dtype=torch.float64))
        same(ours, theirs, torch.randn(SHAPES[dims][1:], dtype=torch.float64))
        same(ours.train(), theirs.train(), torch.randn(SHAPES[dims][1:], dtype=torch.float64))
    theirs.load_state_dict(ours.state_dict())
    assert repr(ours) == repr(theirs)


@BOTH
@pytest.mark.parametrize("training", [True, False])
def test_memory_orders(training, handed_on):
    ours, theirs = pair(2)
    ours.train(training), theirs.train(training)
    x = torch.randn(3, 4, 6, 10, dtype=torch.float64) + 3.0
    with f.delegation(handed_on):
        for view in (x.to(memory_format=torch.channels_last), x[..., ::2], x.transpose(2, 3)):
            same(ours, theirs, view)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("statistics", [torch.float32, None], ids=["wide", "same"])
def test_short_floats(dtype, training, statistics):
    """As close to float64 as torch's, twice over; statistics in float32 or in the type of x."""
    x = (torch.randn(4, 3, 9, 11) * 2.0 + 1.0).to(dtype)
    kept = [torch.tensor([0.5, -1.0, 2.0]), torch.tensor([1.5, 0.5, 2.0])]
    kept = [t.to(statistics or dtype) for t in kept]
    wide = [t.double() for t in kept]
    exact = F.instance_norm(x.double(), *wide, use_input_stats=training)
    ours, theirs = [t.clone() for t in kept], [t.clone() for t in kept]
    y = f.instance_norm(x, *ours, use_input_stats=training)
    want = F.instance_norm(x, *theirs, use_input_stats=training)
    assert y.dtype is dtype and error(y, exact) <= allowed(error(want, exact), dtype)
    for mine, yours, truth in zip(ours, theirs, wide, strict=True):
        assert mine.dtype is yours.dtype
        assert error(mine, truth) <= allowed(error(yours, truth), mine.dtype)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_a_residual_before_and_an_activation_after(activation, training):
    ours, theirs = pair(2)
    ours.activation = activation
    ours.train(training), theirs.train(training)
    x, r = (torch.randn(SHAPES[2], dtype=torch.float64, requires_grad=True) for _ in "xr")
    before = torch.randn(4, 1, 1, dtype=torch.float64, requires_grad=True)
    y, total = ours(x, residual=r, bias_before=before)
    act = getattr(F, activation) if activation else lambda t: t
    want = act(theirs(x + before + r))
    assert error(y, want) <= DOUBLE and error(total, x + before + r) <= DOUBLE
    given = (x, r, before, *ours.parameters())
    found = torch.autograd.grad(y.sin().sum() + total.cos().sum(), given)
    given = (x, r, before, *theirs.parameters())
    wanted = torch.autograd.grad(want.sin().sum() + (x + before + r).cos().sum(), given)
    for a, b in zip(found, wanted, strict=True):
        assert error(a, b) <= DOUBLE_GRADIENT
    assert error(ours.running_var, theirs.running_var) <= DOUBLE


@pytest.mark.parametrize("training", [True, False])
def test_gradients_by_finite_differences(training):
    mean, var = torch.randn(3).double(), torch.rand(3).double() + 0.5

    def call(x, w, b):
        return f.instance_norm(x, mean.clone(), var.clone(), w, b, training)

    given = [torch.randn(s, dtype=torch.float64) for s in ((2, 3, 4, 2), (3,), (3,))]
    assert torch.autograd.gradcheck(call, [t.requires_grad_() for t in given])
    assert torch.autograd.gradgradcheck(call, given)


def test_given_statistics_have_gradients_too():
    mean, var = torch.randn(3).double(), torch.rand(3).double() + 0.5
    x = torch.randn(2, 3, 5).double()

    def call(mean, var):
        return f.instance_norm(x, mean, var, use_input_stats=False)

    assert torch.autograd.gradcheck(call, (mean.requires_grad_(), var.requires_grad_()))


def test_one_statistic_is_enough_and_an_empty_batch_changes_none():
    x, mean, var = torch.randn(2, 3, 5), torch.zeros(3), torch.ones(3)
    f.instance_norm(x, mean)
    assert error(mean, 0.1 * x.mean((0, 2))) <= SINGLE
    f.instance_norm(x, None, var)
    assert error(var, 0.9 + 0.1 * x.var(2).mean(0)) <= SINGLE
    before = mean.clone(), var.clone()
    assert f.instance_norm(x[:0], mean, var).shape == (0, 3, 5)
    assert torch.equal(mean, before[0]) and torch.equal(var, before[1])


def test_a_large_mean_keeps_its_digits():
    x = torch.randn(2, 3, 64, 64) + 1000.0
    mean, var = torch.zeros(3), torch.ones(3)
    f.instance_norm(x, mean, var, momentum=1.0)
    assert error(mean, x.double().mean((0, 2, 3))) <= SINGLE
    assert error(var, x.double().var((2, 3)).mean(0)) <= SINGLE


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.sweep)])
def test_compiled(training):
    ours, theirs = pair(2)
    ours.train(training), theirs.train(training)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    same(ours, theirs, torch.randn(SHAPES[2], dtype=torch.float64), compiled)


def test_torch_func():
    ours, theirs = pair(2)
    x = torch.randn(SHAPES[2], dtype=torch.float64)
    found = [torch.func.grad(lambda x, m=m: m(x).sin().sum())(x) for m in (ours, theirs)]
    assert error(*found) <= DOUBLE_GRADIENT
    assert error(ours.running_mean, theirs.running_mean) <= DOUBLE
    found = [torch.func.vmap(m.eval())(torch.stack((x, x + 1.0))) for m in (ours, theirs)]
    assert error(*found) <= DOUBLE


def test_copies_and_pickles_and_replacing():
    ours, theirs = pair(2)
    x = torch.randn(SHAPES[2], dtype=torch.float64)
    model = dt.nn.replace(nn.Sequential(copy.deepcopy(theirs)))
    assert type(model[0]) is dt.nn.InstanceNorm2d
    for module in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), model[0]):
        same(module, copy.deepcopy(theirs), x)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x, s: f.instance_norm(x, s, None, use_input_stats=False), "running_var are needed"),
        (lambda x, s: f.instance_norm(x, s.requires_grad_(), s), "have no gradient"),
        (lambda x, s: f.instance_norm(x, s[:2], s[:2]), r"running_mean .*\[2\]"),
        (lambda x, s: f.instance_norm(x[:, :1], s, s), r"running_mean .*\[3\]"),
        (lambda x, s: f.instance_norm(x, s, s.long()), "running_var .*int64"),
        (lambda x, s: f.instance_norm(x[..., :1], s, s), "one value per channel"),
    ],
)
def test_wrong_arguments(call, words):
    with pytest.raises(dt.DeuteronError, match=words):
        call(torch.randn(2, 3, 5), torch.ones(3))
