"""``as_strided`` counts from the memory of the tensor that a view is part of. In a graph each has
its own: what lies inside the tensor is the same there, and what lies beside it is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.errors import GraphError


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.linear = function, nn.Linear(6, 6)

    def forward(self, *args):
        return self.function(self.linear, *args)


INSIDE = {
    "the whole": lambda f, x: f(x).as_strided((4, 30), (30, 1)),
    "windows": lambda f, x: f(x).as_strided((4, 9, 12), (30, 2, 1)),
    "of a part": lambda f, x: x.sin()[2].as_strided((2, 3), (6, 1)),
    "from where it is": lambda f, x: x.sin()[2].as_strided((2, 3), (6, 1), 60),
    "from a place": lambda f, x: f(x).flatten()[7:].as_strided((2, 3), (6, 1)),
    "nothing": lambda f, x: x.sin()[:0].as_strided((0, 5), (5, 1)),
    "put back": lambda f, x: f(x)[1].as_strided_scatter(x.new_zeros(2, 3), (2, 3), (6, 1), 30),
}
BESIDE = {
    "before a part": lambda f, x: x.sin()[2].as_strided((2, 3), (6, 1), 0),
    "after a part": lambda f, x: x.sin()[2].as_strided((2, 3), (30, 1)),
    "before a product": lambda f, x: f(f(x).relu())[1].as_strided((2, 3), (6, 1), 0) * 2,
    "as large as a part": lambda f, x: x.sin()[2:3].as_strided((1, 5, 6), (30, 6, 1), 0),
    "at a place": lambda f, x: f(x).as_strided((2, 3), (6, 1), 3),
    "put back": lambda f, x: f(x)[1].as_strided_scatter(x.new_zeros(2, 3), (2, 3), (6, 1), 0),
    "a row of a number": lambda f, x: f(x)[x.sum((1, 2)).argmax()].as_strided((2, 3), (6, 1), 0),
}


@pytest.mark.parametrize("name", INSIDE)
def test_what_lies_inside_is_what_torch_gives(name):
    module, x = Called(INSIDE[name]).eval(), torch.randn(4, 5, 6)
    with torch.no_grad():
        torch.testing.assert_close(dt.optimize(module, x, find=False)(x), module(x))


@pytest.mark.parametrize("name", BESIDE)
def test_what_lies_beside_is_refused(name):
    with pytest.raises(GraphError, match=r"beside the tensor|only known when") as found:
        dt.optimize(Called(BESIDE[name]).eval(), torch.randn(4, 5, 6), find=False)
    assert "test_as_strided.py" in str(found.value)


@pytest.mark.parametrize("name", ["windows", "of a part", "from a place"])
def test_gradients_under_torch_compile(name):
    module, x = Called(INSIDE[name]), torch.randn(4, 5, 6)
    found = []
    for run in (module, torch.compile(module, backend="deuteron")):
        given = x.clone().requires_grad_()
        run(given).square().sum().backward()
        found.append(given.grad)
    torch.testing.assert_close(found[1], found[0])


def test_torch_compile_says_so_too():
    fast = torch.compile(Called(BESIDE["before a part"]), backend="deuteron")
    with pytest.raises(Exception, match="as_strided sees memory beside the tensor"):
        fast(torch.randn(4, 5, 6))
