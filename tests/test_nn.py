"""``dt.nn``: drop-in for ``torch.nn``: arguments, state dicts, numbers."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import deuteron as dt
from tests.tolerances import (
    DOUBLE,
    DOUBLE_GRADIENT,
    HARDSIGMOID_SLOPE,
    SINGLE,
    SINGLE_LAYERS,
    error,
)

SHARED = [name for name in dt.nn.__all__ if hasattr(nn, name)]
IMAGE, ROWS, SIGNAL, VOLUME = (2, 4, 8, 8), (3, 10), (2, 4, 8), (1, 4, 4, 6, 6)
MADE = {  # arguments and the shape of an input
    "LayerNorm": ((10,), ROWS),
    "RMSNorm": ((10,), ROWS),
    "GroupNorm": ((2, 4), IMAGE),
    "InstanceNorm1d": ((4,), SIGNAL),
    "InstanceNorm2d": ((4, 1e-5, 0.1, True), IMAGE),
    "InstanceNorm3d": ((4,), VOLUME),
    "Threshold": ((0.1, 2.0), ROWS),
    "GLU": ((), ROWS),
    "Softmax": ((-1,), ROWS),
    "LogSoftmax": ((1,), ROWS),
    "MaxPool1d": ((2,), SIGNAL),
    "MaxPool2d": ((3, 2, 1), IMAGE),
    "MaxPool3d": ((2,), VOLUME),
    "AvgPool1d": ((2,), SIGNAL),
    "AvgPool2d": ((3, 2, 1), IMAGE),
    "AvgPool3d": ((2,), VOLUME),
    "AdaptiveAvgPool1d": ((3,), SIGNAL),
    "AdaptiveAvgPool2d": (((3, None),), IMAGE),
    "AdaptiveAvgPool3d": ((2,), VOLUME),
    "AdaptiveMaxPool1d": ((3,), SIGNAL),
    "AdaptiveMaxPool2d": ((3,), IMAGE),
    "AdaptiveMaxPool3d": ((2,), VOLUME),
    "PixelShuffle": ((2,), IMAGE),
    "PixelUnshuffle": ((2,), IMAGE),
    "Upsample": ((None, 2.0, "bilinear"), IMAGE),
    "Embedding": ((7, 5), None),
    "Dropout": ((0.0,), ROWS),
    "PReLU": ((4,), IMAGE),
    "BatchNorm1d": ((4,), SIGNAL),
    "BatchNorm2d": ((4,), IMAGE),
    "BatchNorm3d": ((4, 1e-3, None), VOLUME),
}
# those that take more than one tensor, or several processes: test_loss.py, test_multihead.py and
# test_distributed.py
ELSEWHERE = ("MultiheadAttention", "SyncBatchNorm")
HERE = [n for n in SHARED if not n.endswith("Loss") and n not in ELSEWHERE]


def pair(name: str) -> tuple[nn.Module, nn.Module, torch.Tensor]:
    args, shape = MADE.get(name, ((), ROWS))
    torch.manual_seed(0)
    theirs = getattr(nn, name)(*args).double()
    torch.manual_seed(0)
    ours = getattr(dt.nn, name)(*args).double()
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    x = torch.tensor([[1, 0, 6]]) if shape is None else torch.randn(shape, dtype=torch.float64)
    return ours, theirs, x


@pytest.mark.parametrize("name", HERE)
def test_a_module_is_torchs(name):
    ours, theirs, x = pair(name)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert error(ours(x), theirs(x)) <= DOUBLE
    assert isinstance(ours, getattr(nn, name))
    if x.is_floating_point():
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ours(a).sin().sum().backward()
        theirs(b).sin().sum().backward()
        limit = HARDSIGMOID_SLOPE if name == "Hardsigmoid" else DOUBLE_GRADIENT
        assert error(a.grad, b.grad) <= limit
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert error(p.grad, q.grad) <= DOUBLE_GRADIENT


@pytest.mark.parametrize("momentum", [0.3, None])
def test_running_statistics_are_torchs(momentum):
    ours, theirs = dt.nn.BatchNorm2d(3, momentum=momentum), nn.BatchNorm2d(3, momentum=momentum)
    for step in range(3):
        x = torch.randn(4, 3, 5, 5) * (step + 1) + step
        ours(x), theirs(x)
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert error(a, b) <= SINGLE
    x = torch.randn(2, 3, 5, 5)
    assert error(ours.eval()(x), theirs.eval()(x)) <= SINGLE
    r = torch.randn(4, 3, 5, 5)
    last = dt.nn.BatchNorm2d(3, activation="relu")
    assert float(last(x, residual=r[:2]).detach().min()) == 0.0


@pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu"])
@pytest.mark.parametrize("rows", [5, 40])
def test_running_statistics_may_change_before_the_backward_pass(rows, activation):
    """With few rows statistics are computed again, and gelu is not part of the operator: neither
    may ask for the running statistics, which the forward pass has overwritten."""
    ours = dt.nn.BatchNorm1d(3, activation=activation).double()
    theirs, act = nn.BatchNorm1d(3).double(), getattr(nn.functional, activation or "relu")
    a = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)
    b = a.detach().clone().requires_grad_()
    ours(a).sin().sum().backward()
    y = theirs(b)
    (act(y) if activation else y).sin().sum().backward()
    assert error(a.grad, b.grad) <= DOUBLE_GRADIENT
    assert error(ours.running_var, theirs.running_var) <= DOUBLE


@pytest.mark.parametrize("name", HERE)
def test_a_module_takes_torchs_arguments(name):
    theirs = inspect.signature(getattr(nn, name)).parameters.values()
    ours = inspect.signature(getattr(dt.nn, name)).parameters
    for p in theirs:
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
            assert ours[p.name].default == p.default and ours[p.name].kind is p.kind


def test_replacing_keeps_everything_but_the_class():
    model = nn.Sequential(
        nn.Embedding(9, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.GELU(),
        nn.Dropout(0.0),
        nn.Sequential(nn.RMSNorm(8), nn.SiLU()),
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    x = torch.tensor([[1, 5, 8]])
    want = model(x)
    assert dt.nn.replace(model) is model
    assert type(model[1]) is dt.nn.LayerNorm and type(model[5][0]) is dt.nn.RMSNorm
    assert type(model[2]) is nn.Linear
    assert error(model(x).detach(), want.detach()) <= SINGLE_LAYERS
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)


def test_what_torchs_do_not_have():
    x, r = torch.randn(3, 8), torch.randn(3, 8)
    y, s = dt.nn.LayerNorm(8, activation="relu")(x, residual=r)
    assert torch.equal(s, x + r) and float(y.min()) == 0.0
    y, s = dt.nn.GroupNorm(2, 8)(x[..., None], residual=r[..., None])
    assert y.shape == (3, 8, 1)
    assert dt.nn.SwiGLU()(x).shape == (3, 4) and dt.nn.GeGLU("tanh")(x, r).shape == (3, 8)
    assert dt.nn.ReGLU()(x).shape == (3, 4) and dt.nn.BiasAct(8)(x).shape == (3, 8)
    where = dt.nn.SinusoidalEmbedding(8, 16)
    assert torch.equal(where(torch.zeros(2, 4, 8), offset=3)[0], dt.functional.sinusoidal(7, 8)[3:])
    assert not where.state_dict()
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 1, 8)
    a, b = dt.nn.RotaryEmbedding(8, 64)(q, k, offset=2)
    c, d = dt.functional.rope(q, k, offset=2)
    assert error(a, c) <= SINGLE_LAYERS and error(b, d) <= SINGLE_LAYERS


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(lambda: dt.nn.SinusoidalEmbedding(8, 4)(torch.zeros(1, 5, 8)), "beyond 4")],
)
def test_wrong_arguments(wrong, words):
    with pytest.raises(dt.BindError, match=words):
        wrong()
