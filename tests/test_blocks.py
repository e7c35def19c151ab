"""Blocks of networks after ``dt.nn.replace``: norms take along the sum and the activation behind
them, and everything else is as the author wrote it."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import deuteron as dt
from deuteron.functional.batch_norm import IN_PLACE
from tests.test_replace import as_good, exactly, learned, shaken


class Residual(nn.Module):
    """As image networks have it: a sum in place, one activation for all, a shortcut or none."""

    def __init__(self, shortcut: bool) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(4, 4, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Conv2d(4, 4, 1) if shortcut else None

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            x = self.downsample(x)
        out += x
        return self.relu(out)


class Functional(nn.Module):
    """Functions in the place of modules, and a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(6), nn.BatchNorm2d(4)

    def first(self, x):
        return F.silu(self.norm(x))

    def forward(self, x):
        return torch.relu(torch.add(x, self.last(self.first(x))))


CONV = "convolution + norm"
MADE = {
    "a residual": (lambda: Residual(False), f"{CONV} + relu, {CONV} + sum + relu"),
    "with a shortcut": (lambda: Residual(True), f"{CONV} + relu, {CONV} + sum + relu"),
    "functions": (Functional, "norm + silu, norm + sum + relu"),
    "a sequence": (
        lambda: nn.Sequential(nn.Conv2d(4, 8, 1, bias=False), nn.BatchNorm2d(8), nn.Hardswish()),
        f"{CONV} + hardswish",
    ),
}


def images() -> torch.Tensor:
    return torch.randn(3, 4, 5, 6)


@pytest.mark.parametrize("name", MADE)
def test_a_block_trains_as_before(name):
    make, words = MADE[name]
    block, x = shaken(make()).train(), images()
    theirs = copy.deepcopy(block)
    exact, plain = exactly(block, x), learned(theirs, x)
    dt.nn.replace(block)
    (row,) = (r for r in dt.nn.report(block).replaced if not r.path)
    assert row.by == f"one call for {words}" and not dt.nn.report(block).kept
    with dt.functional.delegation(False):
        as_good(learned(block, x), plain, exact, torch.float32, 100)
    for ours, author in zip(block.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(ours, author)
    assert type(block).__name__ == type(theirs).__name__
    assert torch.equal(dt.nn.restore(block).eval()(x), block(x))
    assert type(block) is type(theirs)


def _changed(block: nn.Module, name: str) -> list[str]:
    """Change a block after it was replaced, and say what should then be heard."""
    heard: list[str] = []
    if name == "a hook":
        block.bn1.register_forward_hook(lambda *_: heard.append(name))
    elif name == "another activation":
        block.relu = nn.SiLU()
    elif name == "a shortcut":
        block.downsample = nn.Conv2d(4, 4, 1)
    elif name == "another norm":
        block.bn2 = nn.Identity()
    elif name == "a norm that adds before":
        block.bn2 = nn.GroupNorm(2, 4)
    elif name == "a forward of a norm":
        block.bn2.forward = torch.sin
    elif name == "a forward of an activation":
        block.relu.forward = torch.sin
    elif name == "a forward of a convolution":
        block.conv2.forward = torch.sin
    return heard


CHANGES = ["a hook", "another activation", "a shortcut", "another norm", "a norm that adds before"]
CHANGES += [f"a forward of {what}" for what in ("a norm", "an activation", "a convolution")]


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_later_is_heard(name):
    block, x = dt.nn.replace(Residual(False)).eval(), torch.randn(3, 4, 12, 12)
    with dt.functional.delegation(False), torch.no_grad():
        block(x)
        heard = _changed(block, name)
        found = block(x)
    assert heard == ([name] if name == "a hook" else [])
    torch.testing.assert_close(found, dt.nn.restore(copy.deepcopy(block))(x))


def test_a_sum_of_other_shapes_or_types_is_the_authors():
    class Added(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(4)

        def forward(self, x, y):
            return torch.relu(self.norm(x) + y)

    block, x = dt.nn.replace(Added()).eval(), images()
    for y in (torch.randn(4, 1, 1), x.double()):
        with dt.functional.delegation(False):
            found = block(x, y)
        want = dt.nn.restore(copy.deepcopy(block))(x, y)
        assert found.dtype == want.dtype
        torch.testing.assert_close(found, want)


class Counting(nn.Sequential):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Asking(Residual):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Drawing(Residual):
    def forward(self, x):
        return self.relu(self.bn1(x)) * torch.rand(())


class Training(Residual):
    def forward(self, x):
        return self.relu(self.bn1(x)) if self.training else self.bn1(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Counting(nn.BatchNorm2d(4), nn.ReLU()),
        lambda: Asking(False),
        lambda: Drawing(False),
        lambda: Training(False),
        lambda: nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.ReLU()),
    ],
)
def test_what_does_more_is_left_alone(make):
    block = make()
    dt.nn.replace(block)
    assert not [row for row in dt.nn.report(block).replaced if not row.path]


class Simple(nn.Module):
    def __init__(self, stride: int = 1, **kept) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(4, 4, 3, stride, 1), nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        vars(self).update(kept)

    def first(self, x):
        return self.act(self.bn(self.conv(x)))


class Choosing(Simple):
    """``add`` is a method of tensors, too."""

    def forward(self, x):
        return self.first(x) + x if self.add else self.first(x)


class Weighing(Simple):
    def forward(self, x):
        return self.first(x) * self.std


class Striding(Simple):
    def forward(self, x):
        return self.first(x) * 2.0 if self.conv.stride[0] == 1 else self.first(x)


class Watched(Simple):
    """``std`` is a method of its own that keeps something."""

    def forward(self, x):
        return self.first(x) * self.std()

    def std(self):
        vars(self)["calls"] = vars(self).get("calls", 0) + 1
        return float(self.calls)


class Halving(Simple):
    def forward(self, x):
        return self.act(torch.add(self.bn(x), x, alpha=0.5))


class Writing(Simple):
    def forward(self, x):
        y = x
        y += self.bn(x)
        return self.act(y) + x


class Between(Simple):
    def forward(self, x):
        y = self.bn(x)
        return y + F.relu(x.view(x.shape), inplace=True)


class Constant(Simple):
    def forward(self, x):
        return self.first(x) * GAIN


class Again(Simple):
    def forward(self, x, times: int = 2):
        return self.forward(self.first(x), times - 1) if times else x


GAIN = 2.5
MEANT = {
    "a flag with the name of a method": lambda: nn.Sequential(Choosing(add=1), Choosing(add=0)),
    "a number with such a name": lambda: nn.Sequential(Weighing(std=2.0), Weighing(std=3.0)),
    "an attribute of a child": lambda: nn.Sequential(Striding(1), Striding(2)),
    "a method that keeps something": Watched,
    "a sum with a factor": Halving,
    "a sum in the place of the input": Writing,
    "a write between a norm and a sum": Between,
    "a constant of the file": Constant,
    "a method that calls itself": Again,
}


@pytest.mark.parametrize("name", MEANT)
def test_a_forward_means_what_it_meant(name):
    block, x = shaken(MEANT[name]()).eval(), images()
    theirs = copy.deepcopy(block)
    dt.nn.replace(block)
    for _ in range(2):
        given, same = x.clone(), x.clone()
        torch.testing.assert_close(block(given), theirs(same))
        torch.testing.assert_close(given, same)


def test_a_sum_in_place_has_the_type_of_the_norm():
    class Added(Simple):
        def forward(self, x, y):
            z = self.bn(x)
            z += y
            return self.act(z)

    block, x = dt.nn.replace(Added().bfloat16()).eval(), images()
    theirs = dt.nn.restore(copy.deepcopy(block))
    torch.testing.assert_close(block(x.bfloat16(), x), theirs(x.bfloat16(), x))


class Apart(Simple):
    def forward(self, x):
        with torch.no_grad():
            shortcut = x * 2.0
        return self.first(x) + shortcut


class Learning(Simple):
    def forward(self, x):
        return self.first(x) * 2.0 if torch.is_grad_enabled() else self.first(x)


@pytest.mark.parametrize("make", [Apart, Learning])
@pytest.mark.parametrize("grad", [False, True])
def test_whether_gradients_are_recorded_is_heard(make, grad):
    block, x = shaken(make()).eval(), images().requires_grad_(grad)
    theirs = copy.deepcopy(block)
    dt.nn.replace(block)
    with torch.set_grad_enabled(grad):
        found, want = block(x), theirs(x)
    torch.testing.assert_close(found, want)
    if grad:
        of = (torch.autograd.grad(y.sum(), x) for y in (found, want))
        torch.testing.assert_close(*of)


class Shortcut(Simple):
    def forward(self, x, residual=None):
        if residual is None:
            residual = x
        return self.act(self.bn(self.conv(x)) + residual)


class Scaled(Simple):
    def forward(self, x, scale=None):
        return self.first(x) if scale is None else self.first(x) * scale


class Twice(Simple):
    def forward(self, x, other):
        return self.first(x) * 2.0 if x is other else self.first(x) + other


class Optional(Simple):
    def forward(self, x):
        return self.first(x) if self.factor is None else self.first(x) * self.factor


def test_an_attribute_that_is_no_longer_none_is_heard():
    block, x = dt.nn.replace(Optional(factor=None)).eval(), images()
    y = block(x)
    block.factor = 2.0
    torch.testing.assert_close(block(x), y * 2.0)


@pytest.mark.parametrize("make", [Shortcut, Scaled, Twice])
def test_arguments_that_are_left_out_none_or_the_same(make):
    block, x, other = shaken(make()).eval(), images(), images()
    theirs = copy.deepcopy(block)
    dt.nn.replace(block)
    for given in ([x], [x, None], [x, other], [x, x])[2 * (make is Twice) :]:
        torch.testing.assert_close(block(*given), theirs(*given))
    assert make is Twice or "norm" in str(dt.nn.report(block))


def test_copies_and_files():
    block, x = dt.nn.replace(Residual(True)).eval(), images()
    for twin in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert type(twin) is type(block) and torch.equal(twin(x), block(x))


def test_running_statistics_are_written_in_the_call():
    """And autograd knows of it: who kept them for a gradient is told."""
    x, mean, var = torch.randn(6, 4, 3, 3), torch.zeros(4), torch.ones(4)
    kept = torch.ones(4, requires_grad=True)
    used = (kept * mean).sum()
    with dt.functional.delegation(False):
        y = dt.functional.batch_norm(x.requires_grad_(), mean, var, training=True)
    want = torch.zeros(4), torch.ones(4)
    F.batch_norm(x, *want, training=True)
    assert IN_PLACE.planned and y.requires_grad
    for found, exact in zip((mean, var), want, strict=True):
        torch.testing.assert_close(found, exact)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        used.backward()


def test_a_report_prices_for_a_gpu():
    model = nn.Sequential(Residual(False), nn.LayerNorm(6), nn.GELU())
    before = dt.nn.report(model, target="h200")
    after = dt.nn.report(dt.nn.replace(model), target="h200")
    assert {row.kind for row in before.kept} == {"BatchNorm2d", "GELU"}  # on a GPU they would stay
    assert [row for row in after if row.kind not in ("BatchNorm2d", "GELU")] == before.replaced
    gains = {row.kind: row.gain for row in after if row.gain}
    block, norm, gelu = gains["Residual"], gains["LayerNorm"], gains["GELU"]
    assert block.times > 1.5 and norm.times > gelu.times == 1.0
    # a call by itself the sooner the slower torch's are, in a model where the GPU is late
    assert norm.least < gelu.least and norm.least < block.least
    assert f"{block.times:.1f}×, from {block.least / 1e6:.0f} MB on" in str(after)
    assert not any(row.gain for row in dt.nn.report(model))  # this one is on a CPU


@pytest.mark.parametrize("include", [None, "Residual"], ids=["norms of ours", "norms of torch's"])
def test_compiled_in_one_graph(include):
    block, x = dt.nn.replace(Residual(True), include=include), images()
    for each in (block, pickle.loads(pickle.dumps(block))):
        compiled = torch.compile(each, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), dt.nn.restore(copy.deepcopy(each))(x))
