"""Tracing without torch.export: the same graphs, and nothing traced that it would have refused."""

from __future__ import annotations

import itertools
import random
import re
import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import deuteron as dt
from deuteron import zoo
from deuteron.errors import DeuteronError, GraphError
from deuteron.frontends import torch_export, torch_trace
from deuteron.frontends.stands import NeedsExport
from deuteron.frontends.torch_export import import_module
from deuteron.frontends.torch_trace import trace
from deuteron.frontends.zeros import zeros_like_result

X = torch.linspace(-1, 1, 12).reshape(3, 4)
IMAGE = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)


class Several(nn.Module):
    """Weights under two names, arguments and results of many shapes, calls with several results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x, flag, *rest, Extra=None, how="twice", **others):
        a, b = self.norm(x).chunk(2, dim=1)
        y = self.second(torch.relu(self.first(torch.cat((b, a), 1)))) * 2.0 + self.shift
        y = F.dropout(y, 0.5, False) + torch.arange(4, device=x.device)
        if flag:
            y = y + rest[0] * others["gain"]
        return {"y": y * Extra["bias"][0], "more": (y.max(dim=1).values, None, 3, x, how)}


class Two(nn.Module):
    def forward(self, x, y):
        return x - y


class InPlace(nn.Module):
    """Writes over what it has computed, as most published networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.relu, self.six = nn.ReLU(inplace=True), nn.ReLU6(inplace=True)

    def forward(self, x):
        y = again = self.relu(self.norm(self.conv(x)))
        before = y * 2
        y += x
        y.mul_(before).clamp_(min=-1.0)
        return self.six(again), F.silu(before - 1, inplace=True)


ONE_PIXEL = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 4, 1), nn.SiLU(inplace=True))
NHWC = torch.channels_last
CALLS = {
    "in place": (InPlace(), (IMAGE,), {}),
    "one pixel": (ONE_PIXEL.to(memory_format=NHWC), (IMAGE.to(memory_format=NHWC),), {}),
    "lstm": (nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), (X[None],), {}),
    "two": (Two(), (X, X + 1), {}),
    "several": (Several(), (X, True, X + 1), {"Extra": {"bias": [X + 2]}, "gain": X + 3}),
    "transformer": (nn.TransformerEncoderLayer(8, 2, 16), (X.repeat(1, 2)[None],), {}),
    "resnet": (zoo.build("resnet18"), (IMAGE,), {}),
    "mobilenet": (zoo.build("mobilenet_v2"), (IMAGE,), {}),
}


def asks_export(*_):
    raise NeedsExport("")


@pytest.mark.parametrize("name", CALLS)
def test_the_graph_is_the_one_torch_export_gives(name, monkeypatch):
    module, args, kwargs = CALLS[name]
    module.eval()
    trace(module, args, kwargs)
    quick = import_module(module, args, kwargs)
    monkeypatch.setattr(torch_export, "trace", asks_export)
    slow = import_module(module, args, kwargs)
    # numbers that nobody reads in the end took a name on the way
    said = [re.sub(r"%k(_\d+)?\b", "%k", str(each.graph)) for each in (quick, slow)]
    assert said[0] == said[1]
    for field in ("inputs", "outputs", "in_spec", "out_spec", "paths", "opaque", "mismatches"):
        assert getattr(quick, field) == getattr(slow, field), field


@pytest.mark.parametrize("quick", [True, False])
def test_one_tensor_given_twice_is_two_inputs(quick, monkeypatch):
    if not quick:
        monkeypatch.setattr(torch_export, "trace", asks_export)
    module = CALLS["two"][0]
    graph = import_module(module.eval(), (X, X)).graph
    assert [node.inputs for node in graph.nodes] == [("x", "y")]


class Named(dict):
    """A dict of a class of its own, whose copy() is a plain one."""


class Does(nn.Module):
    """Runs a function on itself and a tensor."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.seen, self.count = function, [], 1000
        self.register_buffer("state", torch.zeros(4))
        self.table = torch.ones(4)
        self.named, self.inside, self.met = Named(half=0.5), {"calls": ([],)}, set()

    def forward(self, x):
        return self.function(self, x)


def sets_an_attribute(module, x):
    module.last = x * 2
    return x


def counts(module, x):
    module.count += 1
    return x * module.count


def keeps_in_a_list(module, x):
    module.seen.append(x * 2)
    return x


def counts_inside(module, x):
    module.inside["calls"][0].append(1)
    return x * len(module.inside["calls"][0])


def counts_in_a_set(module, x):
    module.met.add(len(module.met))
    return x * len(module.met)


def replaces_a_buffer(module, x):
    module.state = module.state + 1
    return x + module.state


def hides_an_error(module, x):
    try:
        return x * x.sum().item()
    except Exception:
        return x


def under_autocast(module, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x.T


CHANGES = [
    (sets_an_attribute, "changes 'last'"),
    (counts, "changes 'count'"),
    (keeps_in_a_list, "changes 'seen'"),
    (counts_inside, "changes 'inside'"),
    (counts_in_a_set, "changes 'met'"),
    (lambda m, x: x.add_(1), "writes to its input"),
    (lambda m, x: torch.relu_(x.view(-1)), "writes to its input"),
    (lambda m, x: torch.relu_(F.dropout(x, 0.5, False)), "writes to its input"),
    (lambda m, x: m.state.copy_(x[0]), "buffer 'state'"),
    (lambda m, x: (y := x * 1, setattr(y, "data", x * 3))[0], "sets the data"),
    (lambda m, x: setattr(m.state, "data", m.state * 2) or x + m.state, "sets the data"),
    (lambda m, x: setattr(m.table, "data", x[0]) or x + m.table, "sets the data"),
    (lambda m, x: x + m.state.view(2, 2).fill_(2.0).view(4), "buffer 'state'"),
]

MORE_THAN_COMPUTING = [
    lambda m, x: ASSERTING["asserts_in_a_branch"](m, x),
    replaces_a_buffer,
    hides_an_error,
    under_autocast,
    lambda m, x: (y := x * 1, y.unfold(1, 2, 1)[0].relu_())[0],
    lambda m, x: (y := torch.relu(x @ x.T), y.diagonal().zero_())[0],
    lambda m, x: torch.relu_((x @ x.T).t_()),
    lambda m, x: (x * 1).copy_(x.double()).t_(),
    lambda m, x: torch.as_strided(x * 1, (3,), (5,)).zero_(),
    lambda m, x: (y := x * 1, z := x * 2, y.set_(z), z.add_(1))[0],
    lambda m, x: x * x.sum().item(),
    lambda m, x: x * x.tolist()[0][0],
    lambda m, x: x * float(x.numpy()[0, 0]),
    lambda m, x: x + 1 if x.sum() > 0 else x - 1,
    lambda m, x: (x, object()),
]


def sets_itself_up(module, x):
    """Once, as a module does that keeps a table for each size it meets."""
    module.ready = True
    cached = getattr(module, "tables", {})
    if x.shape[-1] not in cached:
        cached[x.shape[-1]] = torch.arange(x.shape[-1], dtype=x.dtype)
    module.__dict__.setdefault("tables", cached)
    return x * cached[x.shape[-1]]


def fills_a_mask(module, x):
    """As those of shifted windows are: known numbers in known places, then read with others."""
    mask = x.new_zeros(4)
    before = mask * 1
    mask[1:3] = 2
    mask.view(2, 2)[1].add_(mask[0] + 1)
    between = x * mask
    mask.mul_(3)
    return between + mask + before, mask


def forgets_masks(module, x):
    """Memory of a mask that nobody has any more serves what is computed from inputs next."""
    for k in range(30):
        mask = x.new_zeros(x.shape)
        mask[:, 1:3] = k
        y = x * (mask - mask + 1)
        del mask
        x = (y * 2) - y
    return x


def writes_through_views(module, x):
    """Parts of a tensor, and parts of parts, each of which is read after the other was written."""
    y = torch.zeros(2, 3, 4)
    y[1] = x
    y[:, 1:, ::2] += x[1:, ::2] * 2
    row, column = y[0, 1], y.transpose(0, 2)[3]
    row.view(2, 2)[:, 0] = x[0, 1]
    column.mul_(3)
    first, *rest = y.permute(2, 0, 1).unbind(0)
    first -= rest[0]
    left, right = y.split([1, 3], -1)
    right.squeeze(0).unsqueeze(1).data.add_(left.unsqueeze(1))
    y.flatten()[5:7].copy_(x[2, 0])
    return y * 2, row, column, first, left, y


def writes_to_parts(module, x):
    """One after another, of all kinds, read before and after through other views."""
    y = x * 1
    rows, flat, turned = y.unbind(0), y.view(-1), y.t()
    before = flat * 2
    y[1:, ::2] += 1
    rows[0].mul_(rows[1])
    turned[3] = x.sum()
    y.permute(1, 0)[0:2].clamp_(min=0.1)
    y.split(2, dim=1)[1].neg_()
    for part in y.narrow(0, 1, 2).chunk(3, 1):
        part.unsqueeze(0).squeeze(0).add_(flat[2])
    y.masked_fill_(x > 0.9, 7.0)
    return y, rows[2], flat, turned * 1, before


def fills_rows(module, x):
    """As recurrences do: known numbers first, then what is computed, then known ones again."""
    out = x.new_zeros(5, 4)
    out[0] = 1
    out[1:4] = x
    last = out[3]
    out[4] = last * 2 + out[0]
    out[3, 1:] = 5
    return out, last


def looks_at_values(module, x):
    """Unless it is exported, as models do that warn of padding."""
    if not torch.compiler.is_compiling() and (x == 7).any():
        module.seen.append("padding")
    return x * 2


ASSERTING = {"__name__": "theirs", "torch": torch}  # what pytest rewrites asserts nothing any more
exec(
    """
def asserts(module, x):
    assert x.max().item() <= 1, f"too large: {x.max().item()}"
    assert torch.isfinite(x).all()
    torch._check_tensor_all_with(ValueError, x < 2)
    assert (
        abs(x.sum()) < 1e3
    )
    return x * 2

def asserts_in_a_branch(module, x):
    if x.sum() > -1e3:
        assert x.ndim == 2
        x = x + 1
    return x
""",
    ASSERTING,
)


RECORDED = [
    lambda m, x: x.reshape((torch.tensor(x.shape).flip(0) * torch.tensor([1, 1])).tolist()),
    ASSERTING["asserts"],
    writes_through_views,
    lambda m, x: torch.relu_((x * 1)[0]),
    lambda m, x: (y := x * 1, y.view(-1), y.relu_())[1],
    lambda m, x: (y := x * 1, [t.relu_() for t in y.chunk(2)])[0],
    lambda m, x: torch.zeros(4).copy_(x[0])[:2].fill_(1.0),
    lambda m, x: (z := torch.zeros(3, 4), z[0].add_(1), z[1].add_(x[0]), z[2].add_(z[0]))[3] + z,
    fills_a_mask,
    writes_to_parts,
    fills_rows,
    looks_at_values,
    lambda m, x: torch.zeros(4).add_(1).add_(x[0]),
    forgets_masks,
    sets_itself_up,
    lambda m, x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]),
    lambda m, x: x * m.table,
    lambda m, x: x * m.named["half"],
    lambda m, x: setattr(m.state, "data", m.state.data) or x + m.state,
    lambda m, x: torch.linalg.svdvals(x),
    lambda m, x: torch.roll(x, 1, 0) + torch.einsum("ij,kj->ik", x, x).sum(),
    lambda m, x: F.dropout(x.view(-1), 0.5, False, inplace=True) * 2,
    lambda m, x: x * 2 if torch.diff(torch.arange(4)).sum() == 3 else x,
    lambda m, x: x[torch.tensor([True, False]).nonzero().numel() :],
    lambda m, x: x[torch.arange(3) % 2 == 0] * 2,
]


@pytest.mark.parametrize("function", RECORDED)
def test_what_only_computes_is_recorded(function):
    """Also calls without an entry, which are taken apart or stay as they are, and numbers that do
    not depend on inputs and steer Python."""
    module = Does(function).eval()
    want = module(X)
    trace(module, (X,), {})
    torch.testing.assert_close(dt.optimize(Does(function).eval(), X, find=False)(X), want)
    torch.testing.assert_close(dt.optimize(module, X, find=False)(X), want)


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x[x > 0].sum(),
        lambda m, x: torch.nonzero(x).float(),
        lambda m, x: x.unique(),
        lambda m, x: torch.masked_select(x, x > 0),
    ],
)
def test_sizes_that_depend_on_values_are_refused_with_the_line(function):
    with pytest.raises(dt.DeuteronError, match="depends on the values") as raised:
        dt.optimize(Does(function).eval(), X, find=False)
    assert f"{__file__}:" in str(raised.value)


@pytest.mark.parametrize("function", MORE_THAN_COMPUTING)
def test_what_takes_more_care_is_left_to_torch_export(function):
    with unchanged(function) as (module, x):
        needs_export(module, x)


@pytest.mark.parametrize(("function", "says"), CHANGES)
def test_what_forward_changes_is_refused_with_the_line_and_undone(function, says):
    with unchanged(function) as (module, x), pytest.raises(GraphError, match=says) as caught:
        trace(module, (x,), {})
    assert caught.value.remedy
    if "writes" in says:
        assert f"{__file__}:" in caught.value.where


def test_setting_data_is_refused_where_torch_export_traces():
    module = Does(lambda m, x: (y := x * 1, setattr(y, "data", x * 3))[0]).train()
    with pytest.raises(GraphError, match="sets the data"):
        import_module(module, (X,))


@pytest.mark.parametrize(
    "function", [lambda m, x: x + torch.rand(4), lambda m, x: F.dropout(x * 1, 0.5, True)]
)
def test_random_numbers_are_recorded_and_none_are_used_up(function):
    with unchanged(function) as (module, x):
        trace(module, (x,), {})
    fast = dt.optimize(Does(function).eval(), X, find=False)
    assert not torch.equal(fast(X), fast(X))


def needs_export(module, x):
    with pytest.raises(NeedsExport):
        trace(module, (x,), {})


@contextmanager
def unchanged(function):
    """A module and an example that are afterwards what they were."""
    module = Does(function).eval()
    before, state, random = dict(vars(module)), module.state, torch.get_rng_state()
    x = X.clone()
    yield module, x
    assert dict(vars(module)) == before and module.state is state and module.count == 1000
    assert torch.equal(x, X) and torch.equal(state, torch.zeros(4))
    assert torch.equal(torch.get_rng_state(), random)


class LeavesOutLayers(nn.Module):
    """Draws before it asks whether it is in training, as MusicGen does."""

    def forward(self, x):
        chance = random.uniform(0, 1)
        if self.training and chance < 0.1:
            return x
        return x + 1


class LeavesOutLayersByNumPy(nn.Module):
    """The same, as VITS does."""

    def forward(self, x):
        chance = np.random.uniform(0, 1)
        if self.training and chance < 0.1:
            return x
        return x + 1


@pytest.mark.parametrize("kind", [LeavesOutLayers, LeavesOutLayersByNumPy])
def test_chance_that_nobody_looks_at_is_no_matter(kind):
    before = random.getstate(), repr(np.random.get_state(legacy=False))
    graph = import_module(kind().eval(), (X,)).graph
    assert [node.op for node in graph.nodes] == ["add"]
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before


@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: x if random.random() < 0.5 else -x,
        lambda m, x: x * random.gauss(0, 1),
        lambda m, x: x + torch.full_like(x, random.random()),
        lambda m, x: x * random.choice([1, 2]),
        lambda m, x: x * np.random.uniform(0, 1),
        lambda m, x: x * float(np.random.permutation(3)[0]),
    ],
)
def test_chance_that_matters_is_refused(function):
    with pytest.raises(DeuteronError, match="draws from Python's"):
        import_module(Does(function).eval(), (X,))


def test_a_module_in_training_is_left_to_torch_export():
    needs_export(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), X)


def test_special_tensors_are_left_to_torch_export():
    needs_export(nn.Linear(4, 4).eval(), X.to_sparse())


def test_a_long_run_is_left_to_torch_export(monkeypatch):
    chain = nn.Sequential(*(nn.ReLU() for _ in range(4))).eval()
    trace(chain, (X,), {})
    monkeypatch.setattr(torch_trace, "LIMIT", 2 * X.numel())
    monkeypatch.setattr(torch_trace, "EACH", 0)
    needs_export(chain, X)


def test_shapes_that_do_not_fit_are_refused_in_the_words_of_torch():
    with pytest.raises(DeuteronError, match="Linear itself refuses this example: RuntimeError"):
        import_module(nn.Linear(5, 4).eval(), (X,))


def test_a_refusal_says_that_the_module_ran_without_gradients():
    def force(m, x):
        x = x.requires_grad_()
        return torch.autograd.grad((x**2).sum(), x)[0]

    with pytest.raises(DeuteronError, match=r"does not require grad(?s:.*)under torch.no_grad"):
        import_module(Does(force), (X.clone(),))


def test_other_threads_may_run_modules_meanwhile():
    busy, stop = nn.Linear(4, 4), threading.Event()

    def work() -> None:
        while not stop.is_set():
            busy(X)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(20):
            graph = import_module(nn.Sequential(nn.ReLU(), nn.Linear(4, 4)).eval(), (X,)).graph
            assert [node.source for node in graph.nodes] == ["0", "1"]
    finally:
        stop.set()
        thread.join()


HEAVY = {
    "stride": (F.conv2d, ((2, 4, 9, 7), (6, 2, 3, 3), (6,)), {"stride": (2, 1), "groups": 2}),
    "dilation": (F.conv2d, ((1, 4, 9, 9), (3, 4, 3, 3)), {"dilation": 2, "padding": [3, 1]}),
    "row": (F.conv1d, ((2, 3, 11), (5, 3, 4), (5,)), {"padding": 1, "stride": 3}),
    "volume": (F.conv3d, ((1, 2, 4, 5, 6), (3, 2, 1, 2, 3)), {}),
    "linear": (F.linear, ((2, 3, 4), (5, 4), (5,)), {}),
    "vector": (F.linear, ((4,), (5, 4)), {}),
    "empty": (F.linear, ((0, 4), (5, 4)), {}),
}


@pytest.mark.parametrize("case", HEAVY.values(), ids=HEAVY)
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "turned"])
def test_what_computes_long_is_known_by_its_shape(case, turned):
    function, shapes, attrs = case
    op = getattr(torch.ops.aten, function.__name__.split(".")[-1]).default
    tensors = [torch.randn(shape) for shape in shapes]
    if turned:
        tensors[0] = tensors[0].transpose(0, -1).contiguous().transpose(0, -1)
    want = function(*tensors, **attrs)
    got = zeros_like_result(op, tensors, attrs)
    if not tensors[0].is_contiguous() and function is not F.conv2d:
        assert got is None  # its order in memory is torch's to say
        return
    assert got is not None and not got.any()
    assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_images_have_the_memory_order_that_torch_gives_them(kernel, groups, dtype):
    """Which depends on the library that it asks, and on the orders of image and weight."""
    for order, of_weight in itertools.product(("nchw", "nhwc", "other"), ("nchw", "nhwc")):
        x = torch.randn(2, 15, 8, 16).transpose(1, 2)
        weight = torch.randn(16, 8 // groups, kernel, kernel)
        memory = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
        x = x.contiguous(memory_format=memory[order]) if order in memory else x
        given = [x, weight.contiguous(memory_format=memory[of_weight]), torch.randn(16)]
        given = [t.to(dtype) for t in given]
        got = zeros_like_result(torch.ops.aten.conv2d.default, given, {"groups": groups})
        want = F.conv2d(*given, groups=groups)
        assert got is not None and (got.shape, got.stride()) == (want.shape, want.stride())


@pytest.mark.parametrize(
    "shapes", [((1, 3, 9, 9), (6, 4, 3, 3)), ((1, 4, 2, 2), (6, 4, 3, 3)), ((9,), (6, 4, 3, 3))]
)
def test_what_torch_would_refuse_is_left_to_torch(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    assert zeros_like_result(torch.ops.aten.conv2d.default, tensors, {}) is None
    wide = [torch.randn(2, 4), torch.randn(5, 4, dtype=torch.float64)]
    assert zeros_like_result(torch.ops.aten.linear.default, wide, {}) is None
