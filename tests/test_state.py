"""Caches and other objects that hold tensors: in a module's arguments, and changed by its call."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.errors import GraphError
from deuteron.frontends.state import Opened
from tests.tolerances import SINGLE


class Extent(NamedTuple):
    length: int
    most: int


class Layer:
    """Grows by concatenation, as a cache of keys does."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.seen = Extent(0, 99)

    def add(self, new: torch.Tensor) -> torch.Tensor:
        self.keys = new if self.keys is None else torch.cat([self.keys, new], 1)
        self.seen = Extent(self.seen.length + new.shape[1], 99)
        return self.keys


class Fixed:
    """Is written in place, where a tensor of its own says."""

    def __init__(self, size: int) -> None:
        self.kept, self.at = torch.zeros(2, size, 4), torch.tensor(0)

    def add(self, new: torch.Tensor) -> torch.Tensor:
        place = torch.arange(new.shape[1]) + self.at
        self.at.add_(new.shape[1])
        self.kept.index_copy_(1, place, new)
        return self.kept


class Memory:
    def __init__(self, *layers) -> None:
        self.layers, self.names = list(layers), {"first": "a"}


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, memory=None):
        memory = memory if memory is not None else Memory(Layer(), Layer())
        for layer, part in zip(self.layers, memory.layers, strict=True):
            x = layer(x) + part.add(x).sum(1, keepdim=True)
        return {"y": x, "memory": memory}


def planned(module, *args):
    return dt.optimize(module, args, find=False)


def test_a_module_that_makes_its_cache_is_followed_once(monkeypatch):
    followed = []
    usual = Remembers.forward
    monkeypatch.setattr(Remembers, "forward", lambda *args: (followed.append(1), usual(*args))[1])
    module, x = Remembers().eval(), torch.randn(2, 3, 4)
    answer = planned(module, x)
    assert len(followed) == 1
    with torch.no_grad():
        want, got = module(x), answer(x)
    torch.testing.assert_close(got["memory"].layers[1].keys, want["memory"].layers[1].keys)


def test_a_refusal_names_the_module_and_the_line_that_is_in_the_way():
    """Not what a module that returns a cache is wrapped in, nor what it looks at unless it is
    exported."""

    class Looks(Remembers):
        def forward(self, x):
            if not torch.compiler.is_compiling() and (x == 7).any():
                x = x * 2
            found = super().forward(x)
            if torch.isinf(found["y"]).any():  # in the way
                found["y"] = found["y"].clamp(-1, 1)
            return found

    with pytest.raises(GraphError) as caught:
        planned(Looks().eval(), torch.randn(2, 3, 4))
    assert "Stateless" not in str(caught.value)
    with open(__file__) as source:
        line = next(i for i, text in enumerate(source, 1) if "  # in the way" in text)
    assert f"{__file__}:{line}" in caught.value.where


def test_an_object_that_is_given_twice_is_one():
    class Twice(Remembers):
        def forward(self, x, memory=None):
            found = super().forward(x)
            own = Memory(Layer())
            own.layers[0].add(x)
            return found["memory"], memory, own, [found["memory"], own]

    module, x = Twice().eval(), torch.randn(2, 3, 4)
    for memory in (None, Memory(Layer(), Layer())):
        first, given, own, again = planned(module, x, memory)(x, memory)
        assert first is again[0] and own is again[1] and given is memory
        assert first is not own and torch.equal(own.layers[0].keys, x)


def test_what_torch_export_does_to_a_wrapper_is_no_change_of_the_module():
    class Selects(Remembers):
        def __init__(self):
            super().__init__()
            self.factor = 2.0

        def forward(self, x):
            if not torch.compiler.is_compiling() and (x == 7).any():
                x = x * self.factor
            found = super().forward(x)
            found["y"] = found["y"].masked_scatter(x > 1, x[x > 1])  # of a size that x decides
            return found

    with pytest.raises(GraphError, match=r"of shape|the size of what"):
        planned(Selects().eval(), torch.randn(2, 3, 4))


def test_other_weights_are_those_of_every_kind_of_calls():
    """With a cache and without: there are plans of both."""
    module, other, x = Remembers().eval(), Remembers().eval(), torch.randn(2, 3, 4)
    following = dt.optimize(module, x, find=False, follow=True)
    with torch.no_grad():
        following(x, copy.deepcopy(module(x)["memory"]))
        module.load_state_dict(other.state_dict())
        memory = module(x)["memory"]
        got, want = following(x, copy.deepcopy(memory)), module(x, memory)
    torch.testing.assert_close(got["y"], want["y"], rtol=SINGLE, atol=SINGLE)


@pytest.mark.parametrize("kind", [Layer, lambda: Fixed(7)], ids=["grows", "in place"])
def test_an_object_changes_as_the_module_changes_it(kind):
    module, x = Remembers().eval(), torch.randn(2, 3, 4)
    memory = Memory(kind(), kind())
    with torch.no_grad():
        module(x, memory)
        call = planned(module, x, memory)
        ours, theirs = copy.deepcopy(memory), copy.deepcopy(memory)
        inside = ours.layers[0]
        got, want = call(x, ours), module(x, theirs)
    assert got["memory"] is ours and ours.layers[0] is inside
    torch.testing.assert_close(got["y"], want["y"], rtol=SINGLE, atol=SINGLE)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert vars(a).keys() == vars(b).keys()
        for name, value in vars(b).items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(getattr(a, name), value, rtol=SINGLE, atol=SINGLE)
            else:
                assert getattr(a, name) == value


def test_an_object_of_the_modules_own_is_given():
    module, x = Remembers().eval(), torch.randn(2, 3, 4)
    with torch.no_grad():
        first, second = (planned(module, x)(x)["memory"] for _ in range(2))
    assert type(first) is Memory and first is not second
    assert first.layers[1].seen == Extent(3, 99) and first.names == {"first": "a"}


def test_what_the_caller_gave_is_left_alone_by_importing():
    module, x, memory = Remembers().eval(), torch.randn(2, 3, 4), Memory(Layer(), Fixed(7))
    with torch.no_grad():
        module(x, memory)
    before = copy.deepcopy(memory)
    planned(module, x, memory)
    assert torch.equal(before.layers[0].keys, memory.layers[0].keys)
    assert torch.equal(before.layers[1].kept, memory.layers[1].kept)


def test_what_holds_itself_is_refused():
    memory = Memory(Layer())
    memory.layers[0].whole = memory
    with pytest.raises(GraphError, match=r"holds itself, at \.layers\[0\]\.whole"):
        Opened.of(memory)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_tensor_put_into_a_list_or_dict_of_the_callers_is_refused(by_name):
    class Remembers(torch.nn.Module):
        def forward(self, x, seen):
            seen["all"].append(x + 1)
            return sum(seen["all"])

    class Pops(torch.nn.Module):
        def forward(self, x, seen):
            return x + seen.pop("all").pop()

    x = torch.ones(2)
    given = ((x,), {"seen": {"all": [x]}}) if by_name else ((x, {"all": [x]}),)
    with pytest.raises(dt.GraphError, match="puts a tensor into a list or dict") as caught:
        dt.optimize(Remembers().eval(), *given, find=False)
    home = "kwargs['seen']" if by_name else "args[1]"
    assert caught.value.where == f"{home}['all'][1]" and caught.value.remedy
    fast = dt.optimize(Pops().eval(), (x, {"all": [x]}), find=False)  # which nobody misses
    assert fast(x, {"all": [x]}).tolist() == [2.0, 2.0]
