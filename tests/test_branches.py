"""An ``if`` on numbers of a tensor that only gives new values to names is both ways in one graph;
any other is refused, with its line. Each function here is called with numbers of both kinds."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron.errors import GraphError

LIMIT = 2.0


def overwritten(x):
    y = torch.sin(x)
    if x.dtype == torch.float32 and not torch.isfinite(x).all():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-limit, max=limit)
    return x.mean(-1), y


def either(x):
    x = x * 2
    if torch.isinf(x).any() or (torch.isnan(x).any() and x.ndim == 2):
        x = torch.nan_to_num(x, posinf=LIMIT)
    return x + 1


def not_both(x):
    if not (torch.isfinite(x).all() and x.amax() < 10):
        x, _low = F.relu(x), x.amin()
    return x - 1


def in_a_loop(x):
    seen = []
    for i in range(3):
        before = x
        if x.ndim == i:
            x = x + 1
        elif x.sum() > i:
            x = x.tanh()
        seen.append(before - x)
    return seen


def never(x):
    if x.isinf().any() and x.ndim == 3:
        x = x * 0
    return x.exp()


def always(x):
    if x.isinf().any() or x.ndim == 2:
        x = x * 0
    return x.cos()


def made_inside(x):
    def clamped(y):
        if y.isinf().any():
            y = y.clamp(-LIMIT, LIMIT)
        return y

    return clamped(x) + clamped(x * 2)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.calls, self.dropout = function, 0, nn.Dropout()

    def forward(self, x):
        return self.function(x) if self.function.__name__ != "of_module" else self.function(self, x)


INF = torch.tensor([[0.5, float("inf"), -1.0]])
NAN = torch.tensor([[0.5, float("nan"), -1.0]])
NUMBERS = INF, NAN, -INF, torch.tensor([[0.5, 2.0, -1.0]]), torch.tensor([[-0.5, -2.0, 1.0]])
JOINED = overwritten, either, not_both, in_a_loop, never, always, made_inside


@pytest.mark.parametrize("function", JOINED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("example", [0, 3])
def test_both_ways_are_one_graph(function, example):
    module = Function(function).eval()
    fast = dt.optimize(module, NUMBERS[example], find=False)
    for x in NUMBERS:
        torch.testing.assert_close(fast(x), module(x), equal_nan=True)


# ---- what is not of that kind


def with_else(x):
    if x.sum() > 0:
        x = x + 1
    else:
        x = x - 1
    return x


def returns(x):
    if x.sum() > 0:
        return x
    return x + 1


def of_another_shape(x):
    if x.sum() > 0:
        x = x[:, :1]
    return x


def of_another_kind(x):
    scale = 1
    if x.sum() > 0:
        scale = 2
    return x * scale


def read_where_it_may_not_be(x):
    if x.sum() > 0:
        y = x + 1
    return y


def calls_what_may_do_anything(x):
    if x.sum() > 0:
        x = either(x)
    return x


def sets_an_element(x):
    seen = [x]
    if x.sum() > 0:
        seen[0] = x + 1
    return seen[0]


def writes_in_place(x):
    x = x + 1
    y = x
    if x.sum() > 0:
        x = x.mul_(2)
    return y


def writes_later(x):
    x = x + 1
    y = x
    if x.sum() > 0:
        x = x * 2
    x += 1  # which is y as well, or is not
    return y


def writes_to_the_other(x):
    x = x + 1
    y = x
    if x.sum() > 0:
        x = x * 2
    y += 1
    return x


def draws(x):
    if x.sum() > 0:
        x = F.dropout(x, 0.5)
    return x


def of_module(self, x):
    if x.sum() > 0:
        self.calls = x
    return x


def as_long_as(x):
    while x.sum() < 100:
        x = x + 1
    return x


REFUSED = [with_else, returns, of_another_shape, of_another_kind, read_where_it_may_not_be]
REFUSED += [calls_what_may_do_anything, sets_an_element, writes_in_place, writes_later]
REFUSED += [writes_to_the_other, draws, of_module, as_long_as]


@pytest.mark.parametrize("function", REFUSED, ids=lambda f: f.__name__)
def test_all_else_is_refused_with_its_line(function):
    with pytest.raises(GraphError, match="branches on the values of a tensor") as caught:
        dt.optimize(Function(function).eval(), NUMBERS[3], find=False)
    assert "test_branches.py:" in caught.value.where
    assert "torch.compile(model, backend='deuteron')" in caught.value.remedy


def test_a_source_that_is_another_now_is_not_read(tmp_path):
    file = tmp_path / "changed.py"
    file.write_text("def f(x):\n    if x.sum() > 0:\n        x = x + 1\n    return x\n")
    code = compile(file.read_text(), str(file), "exec")
    file.write_text("def f(x):\n    if x.sum() > 0:\n        x = x - 1\n    return x\n")
    names: dict = {"__name__": "changed"}
    exec(code, names)
    with pytest.raises(GraphError, match="branches on the values of a tensor"):
        dt.optimize(Function(names["f"]).eval(), NUMBERS[3], find=False)


def test_a_module_in_training_mode_is_told_what_helps():
    """It takes another way in, which knows no branches."""

    class Clamped(nn.Module):
        def forward(self, x):
            return overwritten(x)

    with pytest.raises(GraphError) as caught:
        dt.optimize(Clamped(), torch.randn(2, 3))
    assert caught.value.remedy.startswith("call model.eval() first")
    dt.optimize(Clamped().eval(), torch.randn(2, 3), find=False)
