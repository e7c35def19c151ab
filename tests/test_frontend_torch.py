"""From torch to a graph: every entry of the ATen table, whole models, calls and refusals."""

from __future__ import annotations

import logging
import operator
import warnings
from collections import OrderedDict
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from aten_cases import CASES, CUDA_ONLY, FILLED, KEPT, RMS_BACK, UNWRITTEN, Case
from tolerances import allowed, error
from torch import distributions as D
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from deuteron import zoo
from deuteron.errors import BindError, DeuteronError, GraphError
from deuteron.frontends import aten
from deuteron.frontends.torch_export import Fixed, import_module
from deuteron.frontends.torch_fx import Importer
from deuteron.ir import check, parse_graph
from deuteron.ops import infer
from deuteron.ops.evaluate import evaluate
from tests.sweeps import sweep_unless

WORK = 4096  # elements that meet in one, at most: what the error bound is told


def same(got, want) -> None:
    """Equal in shape and type, and in value up to rounding."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert error(got, want) <= allowed(0.0, want.dtype, WORK)


def sound(graph) -> None:
    """The graph passes the checker and survives being written and read."""
    check(graph, infer)
    tensors = {name: constant.data for name, constant in graph.constants.items()}
    assert parse_graph(str(graph), tensors) == graph


# ---- the ATen table, call by call ----------------------------------------------------------------


def one_call(case: Case):
    """An fx graph of the one call, imported; and how to run it."""
    target = operator.attrgetter(case.key)(torch.ops.aten)
    graph, mode, feed = fx.Graph(), FakeTensorMode(), {}
    nodes = []

    def placeholder(value):
        if not isinstance(value, torch.Tensor):
            return value
        node = graph.placeholder(f"x{len(feed)}")
        node.meta["val"] = mode.from_tensor(value)
        feed[node.name] = value
        nodes.append(node)
        return node

    args, kwargs = pytree.tree_map(placeholder, (case.args, case.kwargs))
    fakes = pytree.tree_map_only(fx.Node, lambda n: n.meta["val"], (args, kwargs))
    call = graph.call_function(target, args, kwargs)
    with mode:
        call.meta["val"] = target(*fakes[0], **fakes[1])
    results = [call]
    if isinstance(call.meta["val"], list | tuple):
        results = [graph.call_function(operator.getitem, (call, i)) for i in case.take]
    importer = Importer(case.key)
    for node in nodes:
        importer.input(node, node.name, feed[node.name])
    importer.run(graph.nodes)
    for i, node in enumerate(results):
        importer.build.output(f"y{i}", importer.entered(importer.value(node)).name)
    return SimpleNamespace(graph=importer.finish(), importer=importer, feed=feed, target=target)


def eager(case: Case, target):
    answer = target(*case.args, **case.kwargs)
    return [answer[i] for i in case.take] if isinstance(answer, list | tuple) else [answer]


def opaque_nodes(graph):
    return [node for node in graph.nodes if node.op == "aten"]


@pytest.mark.parametrize("case", CASES + FILLED, ids=str)
def test_a_call_becomes_our_operators(case):
    made = one_call(case)
    assert not made.importer.mismatches
    assert not opaque_nodes(made.graph), made.importer.why
    sound(made.graph)
    got = evaluate(made.graph, made.feed)
    for result, want in zip(got.values(), eager(case, made.target), strict=True):
        same(result, want)


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_a_call_we_cannot_say_stays_and_is_right(case):
    made = one_call(case)
    assert not made.importer.mismatches
    assert [n.attrs["target"] for n in opaque_nodes(made.graph)] == [f"aten.{case.key}"]
    assert made.importer.why[f"aten.{case.key}"]
    sound(made.graph)
    got = evaluate(made.graph, made.feed)
    for result, want in zip(got.values(), eager(case, made.target), strict=True):
        same(result, want)


@pytest.mark.parametrize("case", CUDA_ONLY, ids=str)
def test_attention_of_cuda_becomes_ours(case):
    made = one_call(case)
    assert [node.op for node in made.graph.nodes] == ["attention"]
    sound(made.graph)


def test_the_gradient_of_an_rms_norm_is_the_formula():
    """Which this torch has no kernel for on a CPU."""
    grad, x, _, rstd, weight, _ = RMS_BACK.args
    made = one_call(RMS_BACK)
    assert not opaque_nodes(made.graph), made.importer.why
    hat, inner = x * rstd, grad * weight
    dx = (inner - hat * (inner * hat).mean(-1, keepdim=True)) * rstd
    wanted = (dx, (grad * hat).sum((0, 1)))
    for got, want in zip(evaluate(made.graph, made.feed).values(), wanted, strict=True):
        same(got, want)


aten_ = torch.ops.aten
NORMS_BACK = {
    "layer_norm_grad": lambda x, g, w, b: aten_.native_layer_norm_backward(
        g, x, [6], *aten_.native_layer_norm(x, [6], w, b, 1e-3)[1:], w, b, [True] * 3
    ),
    "group_norm_grad": lambda x, g, w, b: aten_.native_group_norm_backward(
        g, x, *aten_.native_group_norm(x, w, b, 2, 6, 6, 3, 1e-3)[1:], w, 2, 6, 6, 3, [True] * 3
    ),
    "batch_norm_act_grad": lambda x, g, w, b: aten_.native_batch_norm_backward(
        g,
        x,
        w,
        None,
        None,
        *aten_._native_batch_norm_legit_functional(x, w, b, b, w, True, 0.1, 1e-3)[1:3],
        True,
        1e-3,
        [True] * 3,
    ),
}


@pytest.mark.parametrize("name", NORMS_BACK)
def test_a_norm_and_its_backward_call_become_our_gradient(name):
    """Statistics that the forward call keeps lead to its eps, so that nobody reads them."""
    gen = torch.Generator().manual_seed(5)
    x, g = (torch.randn(2, 6, 6, generator=gen) for _ in range(2))
    w, b = (torch.rand(6, generator=gen) + 0.5 for _ in range(2))
    made = imported(NORMS_BACK[name], x, g, w, b)
    ops = {node.op for node in made.graph.nodes}
    assert name in ops and not ops & {"aten", "rsqrt", "var"}, ops


@pytest.mark.parametrize("case", UNWRITTEN, ids=str)
def test_unwritten_memory_is_something(case):
    made = one_call(case)
    (got,) = evaluate(made.graph, made.feed).values()
    (want,) = eager(case, made.target)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)


def test_every_entry_is_exercised():
    tried = {f"aten.{case.key}" for case in [*CASES, *FILLED, *UNWRITTEN, *CUDA_ONLY, RMS_BACK]}
    every = aten.TABLE.keys() | aten.FILLS.keys()
    assert not {name for name in every - tried if not name.startswith("_c10d")}


def test_every_entry_names_a_call_of_this_torch():
    for name in [*aten.TABLE, *aten.FILLS, *aten.SILENT]:
        assert str(operator.attrgetter(name)(torch.ops)) == name


def test_random_calls_are_not_computed_ahead():
    made = one_call(Case("rand.default", ([2, 3],)))
    assert [n.attrs["target"] for n in opaque_nodes(made.graph)] == ["aten.rand.default"]
    made = one_call(Case("dropout.default", (torch.ones(4), 0.5, True)))
    assert made.importer.why["aten.dropout.default"] == "dropout in training mode"


# ---- whole modules -------------------------------------------------------------------------------


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def imported(module, *args, **kwargs):
    """Import, check, run by references and compare with eager; the import is returned."""
    return compared(module, args, kwargs)[0]


def compared(module, args, kwargs=None):
    """The import, and what eager returned, flat."""
    module, kwargs = module if isinstance(module, nn.Module) else Function(module), kwargs or {}
    result = import_module(module, args, kwargs)
    sound(result.graph)
    assert result.mismatches == 0
    with torch.no_grad():
        want = module(*args, **kwargs)
    tensors = result.flatten_call(args, kwargs)
    assert list(result.graph.inputs) == [i for i in result.inputs if isinstance(i, str)]
    outs = evaluate(result.graph, dict(zip(result.graph.inputs, tensors, strict=True)))
    got = result.unflatten_result(list(outs.values()))
    assert pytree.tree_structure(got) == pytree.tree_structure(want)
    for ours, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(want), strict=True):
        if isinstance(theirs, torch.Tensor):
            same(ours, theirs)
        else:
            assert type(ours) is type(theirs) and ours == theirs
    return result, pytree.tree_leaves(want)


IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
TOKENS = torch.randint(0, 500, (2, 12), generator=torch.Generator().manual_seed(3))
SMALL = {"num_hidden_layers": 2}
ZOO = [
    ("resnet18", {}, IMAGES),
    ("mobilenet_v2", {}, IMAGES),
    ("mobilenet_v3_large", {}, IMAGES),
    ("unet", {}, IMAGES),
    ("deeplabv3_resnet50", {}, IMAGES),
    ("bert", SMALL, TOKENS),
    ("llama_tiny", SMALL, TOKENS),
]


IN_TEST_API = ("resnet18", "bert", "llama_tiny")  # which optimises them, and finds no opaque node


@pytest.mark.parametrize(
    ("name", "sizes", "x"),
    [
        pytest.param(
            *model,
            marks=sweep_unless(
                model[0] not in (*IN_TEST_API, "mobilenet_v2", "deeplabv3_resnet50")
            ),
        )
        for model in ZOO
    ],
    ids=[name for name, *_ in ZOO],
)
def test_models_of_the_zoo_have_no_opaque_nodes(name, sizes, x):
    result, want = compared(zoo.build(name, **sizes), (x,))
    assert result.opaque == ()
    for (_, value), theirs in zip(result.graph.outputs, want, strict=True):
        assert result.graph.types[value].strides == theirs.stride()


def test_sources_and_constants_are_named_after_the_module():
    block = nn.Sequential(OrderedDict(conv1=nn.Conv2d(3, 4, 3), act=nn.ReLU()))
    result = imported(nn.Sequential(OrderedDict(layer1=nn.Sequential(block))), IMAGES)
    conv, relu = result.graph.nodes
    assert (conv.source, relu.source) == ("layer1.0.conv1", "layer1.0.act")
    assert conv.inputs[1:] == ("layer1_0_conv1_weight", "layer1_0_conv1_bias")
    assert result.graph.name == "Sequential"
    assert import_module(nn.ReLU(), (IMAGES,), name="act").graph.name == "act"


class Held(nn.Module):
    """Products with two tensors, the first of them twice."""

    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in (("a", first), ("b", second), ("c", first.detach())):
            self.register_buffer(name, tensor)

    def forward(self, x):
        return x @ self.a, x @ self.b, x @ self.c


def test_weights_without_numbers_are_one_constant_only_if_they_are_tied():
    weights = (torch.empty(8, 8, device="meta") for _ in range(2))
    graph = import_module(Held(*weights), (torch.empty(2, 8, device="meta"),)).graph
    assert [node.uses[1] for node in graph.nodes] == ["a", "b", "a"]


def test_a_weight_and_its_conjugate_are_two_constants():
    known = torch.randn(8, 8, dtype=torch.complex64)
    model, x = Held(known.imag, known.conj().imag), torch.randn(2, 8)
    graph = import_module(model, (x,)).graph
    for found, want in zip(evaluate(graph, {"x": x}).values(), model(x), strict=True):
        assert torch.equal(found, want)


def test_the_input_keeps_the_strides_of_the_example():
    x = IMAGES.to(memory_format=torch.channels_last)
    result = imported(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), x)
    assert result.graph.types[result.graph.inputs[0]].layout == "nhwc"
    assert result.graph.types[result.graph.outputs[0][1]].layout == "nhwc"


E4 = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(4))
MODULES = {
    "transformer layer": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
    "local response norm": nn.LocalResponseNorm(2),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(8, 3)),
    "batch norm without statistics": nn.BatchNorm1d(5, track_running_stats=False).eval(),
    "dropout": nn.Sequential(nn.Dropout(), nn.Linear(8, 3)).eval(),
    "softsign": nn.Sequential(nn.Softsign(), nn.Tanhshrink(), nn.Hardshrink(), nn.Softshrink()),
    "padding": nn.Conv1d(5, 4, 3, padding=1, padding_mode="reflect"),
    "shared": (lambda layer: nn.Sequential(layer, nn.ReLU(), layer))(nn.Linear(8, 8)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_without_opaque_nodes(name):
    assert imported(MODULES[name], E4).opaque == ()


def test_attention_module_with_two_results():
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    assert imported(layer, E4, E4, E4).opaque == ()
    assert imported(layer, E4, E4, E4, need_weights=False).opaque == ()


def writes_in_place(x):
    y = x.clone()
    y += 1
    y.mul_(2).relu_()
    y[:, 0] = 0.5
    y[:, 1:3] = y[:, 2:4] * 2
    y[..., -1].add_(3)
    return y


def makes_tensors(x):
    mask = torch.ones(5, 8).tril() * torch.arange(8) + torch.eye(5, 8)
    scale = torch.tensor([1.0, 2.0]).repeat(4) / x.new_full((), 2)
    return x * mask + scale + torch.linspace(0, 1, 8) + torch.zeros_like(x) + x.size(1)


def changes_types(x):
    wide = x.half().float().double() + x.to(torch.int32)
    return wide.masked_fill(wide.isnan(), 0.0), x.type_as(wide), (x > 0).float().mean()


def runs_in_autocast(x):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        y = x @ x.transpose(-1, -2)
    return y.float() + 1


def loops(x, times, shift=None):
    for i in range(times):
        x = x.renorm(2, -1, 1.0).logcumsumexp(-1) * i if i % 2 else x + i
    return x if shift is None else x + shift


def test_plain_functions():
    assert imported(writes_in_place, E4).opaque == ()
    made = imported(makes_tensors, E4)
    assert made.opaque == ()
    assert {node.op for node in made.graph.nodes} == {"add", "mul", "expand"}
    assert imported(changes_types, E4).opaque == ()
    assert imported(lambda x: x.flatten(1).chunk(4, 1)[2].t(), E4).opaque == ()
    assert imported(lambda x: F.normalize(x, dim=-1).logsumexp(1), E4).opaque == ()
    imported(runs_in_autocast, E4)


DISTRIBUTIONS = {
    "normal": lambda x: D.Normal(x, x.exp()).log_prob(x + 1),
    "categorical": lambda x: D.Categorical(logits=x).log_prob(x.argmax(-1)),
    "multivariate normal": lambda x: D.MultivariateNormal(x, torch.eye(8)).log_prob(x + 1),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_what_distributions_assert_is_no_branch(name, monkeypatch):
    """torch.compile switches these checks off for the whole process; here they are on."""
    monkeypatch.setattr(D.Distribution, "_validate_args", True)
    imported(DISTRIBUTIONS[name], E4)
    assert D.Distribution._validate_args
    with pytest.raises(DeuteronError, match="constraint GreaterThan"):
        imported(lambda x: D.Normal(x, -x.exp()).log_prob(x), E4)


def test_opaque_calls_between_known_ones():
    result = imported(loops, E4, 4)
    assert result.opaque == ("aten.renorm.default", "aten.logcumsumexp.default")
    assert result.why == dict.fromkeys(result.opaque, "the ATen table has no entry for it")
    # the attention before it gives strides that torch's own does not
    imported(lambda x: F.scaled_dot_product_attention(x, x, x).logcumsumexp(1), E4[None])
    imported(lambda x: F.scaled_dot_product_attention(x, x, x).as_strided((4,), (1,)), E4[None])


class Everything(nn.Module):
    """Tied weights, buffers of both kinds, a scalar parameter, constants, all sorts of results."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(4))
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)
        self.table = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, ids, flag, *, extra=None, how="twice"):
        x = self.embed(ids) * self.gain + self.shift
        x = torch.where(self.mask, x, x[..., :1]) * self.table
        if flag:
            x = x + 1
        if how == "twice":
            x = x * 2
        if extra is not None:
            x = x + extra["bias"][0]
        return {"logits": self.head(x), "all": (x, None, 3, ids, x.transpose(0, 1)), "w": self.gain}


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
BIAS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def test_calls_and_results_of_any_structure():
    module = Everything()
    result = imported(module, IDS, True, extra={"bias": [BIAS]})
    assert result.inputs == ("ids", Fixed(True), "extra_bias_0")
    assert result.paths == ("ids", "flag", "extra['bias'][0]")
    assert result.outputs == ("logits", "all_0", Fixed(None), Fixed(3), "all_3", "all_4", "w")
    assert result.opaque == ()
    weights = [v for v, c in result.graph.constants.items() if c.data.shape == (7, 4)]
    assert weights == ["embed_weight"] or weights == ["head_weight"]
    assert "gain" in result.graph.constants and "shift" in result.graph.constants
    assert not any(v.startswith("unused") for v in result.graph.constants)
    assert result.graph.constants["gain"].data.data_ptr() == module.gain.data_ptr()
    again = result.flatten_call((), {"extra": {"bias": [BIAS]}, "flag": True, "ids": IDS})
    assert [a is b for a, b in zip(again, (IDS, BIAS), strict=True)] == [True, True]
    assert not result.single_tensor_call()
    assert import_module(nn.ReLU(), (BIAS,)).single_tensor_call()


@pytest.fixture(scope="module")
def everything():
    """A graph that calls are bound to, and that none of them changes."""
    return import_module(Everything(), (IDS, True), {"extra": {"bias": [BIAS]}})


@pytest.mark.parametrize(
    ("args", "kwargs", "path", "says"),
    [
        ((IDS,), {"extra": {"bias": [BIAS]}}, "flag", "missing"),
        ((IDS, True), {}, "extra['bias'][0]", "missing"),
        ((IDS, True), {"extra": {"bias": [BIAS, BIAS]}}, "extra['bias'][1]", "not in the example"),
        ((IDS, True), {"extra": {"bias": [BIAS]}, "how": "once"}, "how", "not in the example"),
        ((IDS, False), {"extra": {"bias": [BIAS]}}, "flag", "False, but the graph was made for"),
        ((IDS, 1), {"extra": {"bias": [BIAS]}}, "flag", "1, but the graph was made for"),
        ((3, True), {"extra": {"bias": [BIAS]}}, "ids", "was a tensor"),
        ((IDS, BIAS), {"extra": {"bias": [BIAS]}}, "flag", "a tensor of shape [4]"),
    ],
)
def test_a_call_that_does_not_fit_is_refused(everything, args, kwargs, path, says):
    with pytest.raises(BindError) as caught:
        everything.flatten_call(args, kwargs)
    assert caught.value.where == path and says in caught.value.wrong and caught.value.remedy


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


CONTAINERS = {
    "dicts": ((IDS,), {"extra": {"a": BIAS, "b": [IDS, None]}, "flag": True}),
    "rows": (([IDS, (BIAS, 1.5)], "mode"), {}),
    "a dict alone": ((), {"how": {}, "x": BIAS}),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_a_call_as_in_the_example_is_read_without_a_walk(name, monkeypatch):
    args, kwargs = CONTAINERS[name]
    call = import_module(Function(lambda *args, **kwargs: BIAS + 1), args, kwargs)
    call.flatten_call(args, kwargs)  # the first call may do what it likes
    wanted = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    monkeypatch.setattr(pytree, "tree_flatten", None)
    found = call.flatten_call(args, dict(reversed(kwargs.items())))
    assert [t is w for t, w in zip(found, wanted, strict=True)] == [True] * len(wanted)


def test_what_is_written_otherwise_is_not_read_but_walked():
    call = import_module(Function(lambda x, how: x["a"] + x["b"][0]), ({"a": BIAS, "b": [BIAS]}, 2))
    other = OrderedDict(a=BIAS, b=[BIAS])
    assert len(call.read_call(({"b": [BIAS], "a": BIAS}, 2), {})) == 2
    for wrong in ((other, 2), ({"a": BIAS, "b": [BIAS]}, 3), ({"a": BIAS, "b": [BIAS]}, True)):
        assert call.read_call(wrong, {}) is None
    assert call.read_call(({"a": BIAS, "b": (BIAS,)}, 2), {}) is None
    pair = import_module(Function(lambda p: p.x + p.y), (Pair(BIAS, BIAS),))
    assert pair.read_call((Pair(BIAS, BIAS),), {}) is None
    assert len(pair.flatten_call((Pair(BIAS, BIAS),))) == 2


# ---- refusals ------------------------------------------------------------------------------------


def test_training_batch_norm_is_refused():
    with pytest.raises(GraphError, match=r"buffer '1.running_mean'") as caught:
        import_module(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), (IMAGES,))
    assert "model.eval()" in caught.value.remedy


def branches(x):
    return x + 1 if x.sum() > 0 else x - 1


def cond(x):
    return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.add_(1), "writes to its input"),
        (lambda x: x.sin().expand(2, *x.shape).masked_fill_(x > 0, 1), "share their memory"),
        (lambda x: x[x > 0], "shape [u0]"),
        (lambda x: x * x.sum().item(), "only known when the model runs"),
        (branches, "forward branches on the values of a tensor"),
        (cond, "'cond' is not an operation on tensors"),
    ],
)
def test_what_cannot_be_a_graph_is_refused(function, says):
    with pytest.raises(DeuteronError) as caught:
        import_module(Function(function), (E4.clone(),))
    assert says in str(caught.value) and caught.value.remedy and caught.value.where


def test_a_failed_export_names_the_line(capfd):
    with pytest.raises(DeuteronError) as caught:
        import_module(Function(branches), (E4,))
    assert "test_frontend_torch.py" in caught.value.where and "branches" in caught.value.where
    assert capfd.readouterr() == ("", "")


def test_an_example_that_is_no_tuple_is_refused():
    with pytest.raises(BindError, match=r"not a tuple"):
        import_module(nn.ReLU(), IMAGES)


def test_importing_is_quiet_and_leaves_no_trace(capfd):
    level, fast = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_module(MODULES["transformer layer"], (E4,))
    assert logging.root.manager.disable == level
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert capfd.readouterr() == ("", "")
