"""Numbers in tensors that decide what is computed: a plan is for those of one call."""

from __future__ import annotations

from functools import cached_property, lru_cache

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.errors import BindError, GraphError
from deuteron.model.plans import DECIDED
from tests.tolerances import SINGLE


class Checks(nn.Module):
    """What torch.export has to follow, which writes checks of numbers down as calls."""

    def forward(self, x, n):
        torch._check_tensor_all(n < 9)
        return torch.vmap(lambda row: row * 2)(x) + n.sum()


class Images(nn.Module):
    """Rows of several images of different sizes, each normalised by itself."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, grid):
        parts = torch.split(self.linear(x), grid.prod(1).tolist())
        heights = torch.repeat_interleave(grid[:, 0], grid.prod(1))
        return torch.cat([part.softmax(0) for part in parts]) + heights[:, None]


GRID = torch.tensor([[2, 3], [1, 4]])


def rows(grid):
    return torch.randn(int(grid.prod(1).sum()), 4)


def close(fast, module, grid, **how):
    x = rows(grid)
    with torch.no_grad():
        torch.testing.assert_close(fast(x, grid), module(x, grid), rtol=SINGLE, atol=SINGLE)


def kinds(fast):
    return len(fast._plans.others)


@pytest.fixture
def module():
    return Images().eval()


@pytest.fixture
def fast(module):
    return dt.optimize(module, (rows(GRID), GRID.clone()), find=False)


def test_numbers_that_are_only_checked_are_not_asked_for():
    x, n = torch.randn(3, 4), torch.tensor([1, 2])
    fast = dt.optimize(Checks().eval(), (x, n), find=False)
    torch.testing.assert_close(fast(x, n + 1), Checks()(x, n + 1))


def test_other_numbers_have_a_plan_once_they_came_twice(fast, module):
    assert "the numbers of grid decide" in str(fast.explain())
    close(fast, module, GRID)
    for other in (GRID.flip(0), torch.tensor([[5, 1]])):  # of the same size, and of another
        before = kinds(fast)
        close(fast, module, other)
        assert kinds(fast) == before
        close(fast, module, other)
        assert kinds(fast) == before + 1
        close(fast, module, other)
    with torch.no_grad():
        x = rows(other)
        torch.testing.assert_close(fast(grid=other, x=x), module(x, other))
    assert kinds(fast) == 2
    close(fast, module, GRID)


def test_plans_for_numbers_are_a_few(fast, module):
    for height in range(1, DECIDED + 3):
        for _ in range(2):
            close(fast, module, torch.tensor([[height, 2]]))
    assert kinds(fast) == DECIDED


def test_several_examples_may_have_several_numbers(module):
    calls = [(rows(grid), grid) for grid in (GRID, GRID.flip(0), torch.tensor([[2, 2]]), GRID)]
    fast = dt.optimize(module, calls, find=False)
    assert kinds(fast) == 2
    for _, grid in calls:
        close(fast, module, grid)
    assert kinds(fast) == 2


def test_the_example_may_be_written_to(module):
    grid = GRID.clone()
    fast = dt.optimize(module, (rows(grid), grid), find=False)
    grid.copy_(grid.flip(0))
    close(fast, module, grid)
    close(fast, module, GRID)


@pytest.mark.parametrize("grid", [None, 3, GRID.float()], ids=["none", "number", "floats"])
def test_what_is_no_such_tensor_is_refused(fast, grid):
    with pytest.raises(BindError, match="grid"):
        fast(rows(GRID), grid)


def test_fixed_shapes_fix_such_numbers(module):
    policy = dt.Policy(shapes="fixed")
    fast = dt.optimize(module, (rows(GRID), GRID), find=False, policy=policy)
    close(fast, module, GRID)
    with pytest.raises(BindError, match="grid has not the numbers"):
        fast(rows(GRID), GRID.flip(0))


def test_they_are_saved_and_other_weights_come_to_all(fast, module, tmp_path):
    other = GRID.flip(0)
    for _ in range(2):
        close(fast, module, other)
    fast.save(tmp_path / "model.json")
    alone = dt.load(tmp_path / "model.json")
    close(alone, module, GRID)
    with pytest.raises(BindError, match="grid has not the numbers"):
        alone(rows(GRID), other)
    around = dt.load(tmp_path / "model.json", Images().eval())
    for _ in range(2):
        close(around, module, other)
    changed = Images().eval()
    fast.refit(changed.state_dict())
    close(fast, changed, GRID)
    close(fast, changed, other)


def test_real_numbers_are_data():
    class Masked(nn.Module):
        def forward(self, x, grid):
            return x[x > 0] * grid.sum()

    with pytest.raises(GraphError, match="depends on the values"):
        dt.optimize(Masked().eval(), (rows(GRID), GRID), find=False)


def test_numbers_are_fixed_only_where_torch_export_asks_for_them_too():
    """A mask that a model looks at only while it does not export is none of them."""

    class Padded(Images):
        def forward(self, x, grid, mask):
            if not torch.compiler.is_exporting():
                for hidden in mask == 0:
                    if hidden:
                        x = x.clone()
            return super().forward(x, grid) * mask[:, None]

    module, x, mask = Padded().eval(), rows(GRID), torch.ones(10, dtype=torch.int64)
    fast = dt.optimize(module, (x, GRID, mask), find=False)
    mask[3:] = 0
    with torch.no_grad():
        torch.testing.assert_close(fast(x, GRID, mask), module(x, GRID, mask))
    assert not kinds(fast) and len(fast._plans.call.deciding) == 1


def test_what_is_only_for_export_is_left_alone():
    """Many models do there what others take longer for, such as a loop for a triangular solve."""

    class Solves(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                for row in x:
                    if row.isnan().any():
                        raise ValueError
            return x * 0 if torch.compiler.is_exporting() else x * 2

    x = torch.randn(3, 4)
    torch.testing.assert_close(dt.optimize(Solves().eval(), x, find=False)(x + 1), 2 * x + 2)


def test_an_object_may_keep_what_it_computes_once():
    """Also where the call is followed in two ways: the first leaves nothing behind."""

    class Words:
        def __init__(self):
            self.kept = {}

        @cached_property
        def table(self):
            table = torch.zeros(4, dtype=torch.int64)
            for i in range(4):
                table[i] = 3 - i
            return table

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = Words()

        def forward(self, x, grid):
            first = self.words.kept.setdefault("first", self.words.table[:2])
            return x * len(range(int(grid.sum()))) + (first + self.words.table[grid]).sum()

    x, module = torch.randn(3), Looks().eval()
    fast = dt.optimize(module, (x, GRID - 1), find=False)
    for grid in (GRID - 1, GRID.flip(0) - 1):  # the second by the module
        torch.testing.assert_close(fast(x, grid), module(x, grid))


def test_a_cache_of_the_users_is_no_trap():
    """It keeps what stood for a tensor while the module was followed."""

    @lru_cache
    def table(size):
        return torch.arange(size) * 2.0

    class Adds(nn.Module):
        def forward(self, x, n):
            return x * int(n) + table(4), table(4)[0].item()

    module, x = Adds().eval(), torch.randn(4)
    fast = dt.optimize(module, (x, torch.tensor(3)), find=False)
    for n in (3, 5):
        for each in (x, torch.randn(2, 4)):
            got, want = fast(each, torch.tensor(n)), module(each, torch.tensor(n))
            torch.testing.assert_close(got[0], want[0])
            assert got[1] == want[1] == 0.0
    again = dt.optimize(module, (x, torch.tensor(4)), find=False)
    torch.testing.assert_close(again(x, torch.tensor(4))[0], x * 4 + torch.arange(4) * 2.0)


def test_a_tensor_of_computed_numbers():
    class Lengths(nn.Module):
        def forward(self, x):
            return x / torch.tensor([x.sum(), 2, x.max()], dtype=torch.float32)[0]

    x = torch.rand(3)
    fast = dt.optimize(Lengths().eval(), x, find=False)
    torch.testing.assert_close(fast(x + 1), Lengths()(x + 1))


class Packed(nn.Module):
    """Sequences of unequal length through a recurrent layer, as torch's own tutorials have it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(6, 8, batch_first=True, bidirectional=True)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        out, (h, _) = self.layer(packed)
        back, lengths = nn.utils.rnn.pad_packed_sequence(out, True, padding_value=-1.0)
        return back, lengths, h


@pytest.mark.parametrize("given", [torch.tensor, list], ids=["tensor", "list"])
def test_sequences_are_packed_and_padded_again(given):
    module, x = Packed().eval(), torch.randn(4, 9, 6)
    fast = dt.optimize(module, (x, given([8, 3, 7, 1])), find=False)
    others = ([8, 3, 7, 1], [2, 9, 5, 4]) if given is torch.tensor else ([8, 3, 7, 1],)
    for lengths in others:
        with torch.no_grad():
            found, want = fast(x, given(lengths)), module(x, given(lengths))
        for mine, torchs in zip(found, want, strict=True):
            torch.testing.assert_close(mine, torchs, rtol=SINGLE, atol=SINGLE)
