"""``x[i]`` by whole numbers that a model computes, or is given as tensors: a view in torch, which
asks for the number; a row that a graph selects, and puts back where it was written to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.errors import DeuteronError, GraphError


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 30).reshape(6, 5))
        self.register_buffer("seen", torch.zeros(6, 5))

    def forward(self, *args):
        return self.function(self, *args)


def sets_a_row(m, x, i):
    y = x.clone()
    before = y[i] + 0
    y[i] = 3.0
    return y, before, y[i]


def writes_to_a_column(m, x, i):
    y = x * 2
    column = y[:, i]
    flat = y.view(-1)
    column.mul_(3)
    y[1, i] += 1
    return y, column, flat + 1


def fills(m, x, i):
    y = torch.zeros(4, 5, 6)
    for k in range(3):
        best = x[k].sum(1).argmax()
        y[k, best] = x[k, best] * 2
    y[i, :, [0, 2]] = torch.ones(2, 5).t()
    return y


def counts(m, x, i):
    y, at = x * 1, i * 0
    first = y[at]
    for _ in range(3):
        y[at] = y[at] + at
        at += 1
    return y, first, at


def swaps(m, x, i):
    y = x * 1
    y[i], y[0] = y[0], y[i]  # both are views, and the second sees what the first wrote
    return y


def writes_to_halves(m, x, i):
    y = x * 1
    a, b = y[i].chunk(2, dim=1)
    a.zero_()
    b.add_(2)
    y[i][x[0] > 0] = 4
    y[i][i - 1][0] = 9
    return y, a, b


def writes_to_what_it_selects(m, x, i):
    y = x * 1
    part = y.select(-2, i)
    part += 1
    y[[i, 0], :, [0, i]] = 2
    y[:, [i, 1], 0] = y[:, [1, i], 1]
    return y, part, y.select(0, 1)


def is_written_to_later(m, x, i):
    y = x * 1
    row, again = y[i], y[i - 1]
    y += 1
    row += 5
    return row, again, y


def counts_afterwards(m, x, i):
    y, at = x * 1, i.clone()
    row = y[at]
    at += 1
    at.sub_(2)
    row.add_(1)
    return y, row, y[at]


SAME = {
    "a row": lambda m, x, i: x[i] * 2,
    "a column": lambda m, x, i: x[:, i] + x[:, i, None].squeeze(1),
    "of the last": lambda m, x, i: x[..., i],
    "int32": lambda m, x, i: x[i.int()],
    "two": lambda m, x, i: x[i, :, i + 1],
    "beside others": lambda m, x, i: x[0, ..., i] + x[1:2, :, i][0],
    "new dimensions": lambda m, x, i: x[None, i, None],
    "beside indices": lambda m, x, i: (x[i, :, [0, 3]], x[[0, 1], i, [2, 3]]),
    "beside a mask": lambda m, x, i: x[torch.tensor([True, False, True, False]), i],
    "of weights": lambda m, x, i: m.weight[i] + m.seen[i],
    "computed": lambda m, x, i: x[x.sum((1, 2)).argmax()],
    "in a loop": lambda m, x, i: torch.stack([x[j] for j in x.sum((1, 2)).argsort()]),
    "of a view": lambda m, x, i: x.transpose(0, 2)[i].t()[i],
    "sets a row": sets_a_row,
    "writes to a column": writes_to_a_column,
    "fills": fills,
    "counts": counts,
    "swaps": swaps,
    "writes to halves": writes_to_halves,
    "writes to what it selects": writes_to_what_it_selects,
    "lists": lambda m, x, i: (x[:, [i, 0, -1]], x[[i, 1], [0, i]], x[..., [i], 1:3]),
    "selected": lambda m, x, i: (x.select(0, i), x.select(-1, i + 1) * 2, x.select(1, 3)),
    "is written to later": is_written_to_later,
    "counts afterwards": counts_afterwards,
    "into whole numbers": lambda m, x, i: (x * 10).long().index_put((i,), x[i].long()),
}


@pytest.mark.parametrize("name", SAME)
def test_it_is_what_torch_gives(name):
    module = Called(SAME[name]).eval()
    x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(0))
    fast = dt.optimize(module, (x, torch.tensor(2)), find=False)
    for number in (2, 0, 3, -1, -2):
        call = x + number, torch.tensor(number)
        with torch.no_grad():
            wanted = module(*call)
        torch.testing.assert_close(fast(*call), wanted)


@pytest.mark.parametrize("number", [4, -5, 2**40])
@pytest.mark.parametrize("name", ["a row", "sets a row"])
def test_out_of_range_is_an_error(name, number):
    x = torch.randn(4, 5, 6)
    fast = dt.optimize(Called(SAME[name]).eval(), (x, torch.tensor(2)), find=False)
    with pytest.raises((IndexError, DeuteronError), match=r"index .* is out of"):
        fast(x, torch.tensor(number))


def sets_what_it_was_given(m, x, i):
    x[i] = 0
    return x


def adds_to_what_it_was_given(m, x, i):
    row = x[:, i]
    row += 1
    return row


def sets_a_buffer(m, x, i):
    m.seen[i] = 1
    return x


@pytest.mark.parametrize(
    "function", [sets_what_it_was_given, adds_to_what_it_was_given, sets_a_buffer]
)
def test_what_is_not_its_own_is_not_written_to(function):
    module, x = Called(function).eval(), torch.randn(4, 5, 6)
    before = copy.deepcopy((module.state_dict(), x))
    with pytest.raises(GraphError, match="writes to its"):
        dt.optimize(module, (x, torch.tensor(2)), find=False)
    torch.testing.assert_close((module.state_dict(), x), before)


def test_too_many_are_torchs_error():
    module = Called(lambda m, x, i: x[0, 0, 0, i]).eval()
    with pytest.raises(DeuteronError, match="too many indices"):
        dt.optimize(module, (torch.randn(4, 5, 6), torch.tensor(2)), find=False)
    module = Called(lambda m, x, i: x.select(3, i)).eval()
    with pytest.raises(DeuteronError, match=r"[Dd]imension"):
        dt.optimize(module, (torch.randn(4, 5, 6), torch.tensor(2)), find=False)
