"""dt.optimize: any module in, the same answers out; and operators that users bring."""

from __future__ import annotations

import copy
import inspect
import threading
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fakes import bit_equal
from tolerances import SINGLE, allowed, error
from torch import nn
from torch.utils import _pytree as pytree

import deuteron as dt
from deuteron import api
from deuteron.model.plans import Plans
from deuteron.ops import Vjp, table
from deuteron.plan.plan import Plan
from tests.sweeps import one_in

Pair = namedtuple("Pair", "left right")


class Function(nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


def wide(module: nn.Module, args, kwargs):
    """What the module says in float64."""
    double = copy.deepcopy(module).double()
    args, kwargs = pytree.tree_map(
        lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t,
        (args, kwargs),
    )
    return double(*args, **kwargs)


def check(fast: dt.Optimized, module: nn.Module, *args, reduced: int = 4, **kwargs) -> None:
    """Same structure as eager, and within what the tolerances allow of float64."""
    with torch.no_grad():
        want, exact = module(*args, **kwargs), wide(module, args, kwargs)
        for _ in range(2):
            got = fast(*args, **kwargs)
            assert pytree.tree_structure(got) == pytree.tree_structure(want)
            leaves = (pytree.tree_leaves(t) for t in (got, want, exact))
            for ours, theirs, true in zip(*leaves, strict=True):
                if not isinstance(theirs, torch.Tensor):
                    assert ours == theirs
                    continue
                assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
                if theirs.is_floating_point():
                    limit = allowed(error(theirs, true), theirs.dtype, reduced)
                    assert error(ours, true) <= limit
                else:
                    assert torch.equal(ours, theirs)


IMAGE, TOKENS = torch.randn(2, 3, 48, 40), torch.randint(0, 500, (2, 12))
ZOO = {
    "resnet18": ({}, IMAGE, True),
    "bert": ({"num_hidden_layers": 1}, TOKENS, False),
    "llama_tiny": ({"num_hidden_layers": 1}, TOKENS, True),
}


@pytest.mark.parametrize("name", one_in(4, ZOO))
def test_models_of_the_zoo(name):
    sizes, x, find = ZOO[name]
    model = dt.zoo.build(name, **sizes)
    fast = dt.optimize(model, x, find=find, budget_s=0.5)
    assert fast.opaque == () and fast.plan.decision.mode == ("found" if find else "heuristic")
    check(fast, model, x, reduced=64)
    other = x.flip(-1)
    check(fast, model, other, reduced=64)
    assert {"import", "plan", "capture"} <= set(fast.seconds) and "Optimized" in repr(fast)


def test_an_image_in_another_memory_order_is_converted():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()).eval()
    for example in (IMAGE, IMAGE.contiguous(memory_format=torch.channels_last)):
        fast = dt.optimize(model, example, find=False)
        for x in (IMAGE, IMAGE.contiguous(memory_format=torch.channels_last), IMAGE.flip(0)):
            check(fast, model, x)
        wider = torch.randn(2, 3, 48, 80)[..., ::2]
        before = wider.clone()
        check(fast, model, wider)
        assert torch.equal(wider, before)


def test_an_expanded_example_does_not_bind_the_calls():
    model = nn.Linear(8, 4)
    fast = dt.optimize(model, torch.randn(1, 8).expand(3, 8), find=False)
    for x in (torch.randn(3, 8), torch.randn(1, 8).expand(3, 8), torch.randn(8, 3).t()):
        check(fast, model, x)


def nested(x, *, pair, scale=1.0, flag=True):
    both = pair.left @ x if flag else x
    return {"out": (both * scale, [x.sum(), None, "text", 3]), "pair": Pair(both, x.argmax())}


def test_arguments_and_results_of_any_structure():
    module = Function(nested)
    x, pair = torch.randn(4, 4), Pair(torch.randn(4, 4), torch.randn(4))
    fast = dt.optimize(module, (x,), {"pair": pair, "scale": 2.0}, find=False)
    check(fast, module, x, pair=pair, scale=2.0)
    check(fast, module, x.t(), scale=2.0, pair=Pair(pair.left.t(), pair.right))
    check(dt.optimize(module, (x,), {"pair": pair}, find=False), module, x, pair=pair)


@pytest.fixture(scope="module")
def made_of_nested():
    """What calls are refused by, and the example that it was made of."""
    x, pair = torch.randn(4, 4), Pair(torch.randn(4, 4), torch.randn(4))
    example = {"pair": pair, "scale": 2.0}
    return dt.optimize(Function(nested), (x,), example, find=False), x, pair


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {"pair": 0, "scale": 2.0}, "args[0] is missing"),
        ((0, 0), {"pair": 0, "scale": 2.0}, "was not in the example"),
        ((0,), {"pair": 0, "scale": 3.0}, "scale is 3.0"),
        ((0,), {"pair": 0}, "scale is missing"),
        ((0,), {"pair": 0, "scale": 2.0, "flag": False}, "flag was not in the example"),
        (("text",), {"pair": 0, "scale": 2.0}, "was a tensor in the example"),
        ((1,), {"pair": 0, "scale": 2.0}, "of shape [2, 4]"),
        ((2,), {"pair": 0, "scale": 2.0}, "is torch.float64"),
    ],
)
def test_calls_that_do_not_fit(made_of_nested, args, kwargs, says):
    fast, x, pair = made_of_nested
    given = {0: x, 1: x[:2], 2: x.double(), "text": "text"}
    kwargs = {k: pair if k == "pair" else v for k, v in kwargs.items()}
    with pytest.raises(dt.BindError) as caught:
        fast(*(given[a] for a in args), **kwargs)
    assert says in str(caught.value) and caught.value.remedy


def test_opaque_calls_run_among_known_ones():
    module = Function(lambda x: torch.relu(torch.renorm(x * 2.0, 2, 1, 1.0)).logcumsumexp(0) + 1.0)
    for find in (False, True):
        fast = dt.optimize(module, torch.randn(5, 6), find=find, budget_s=1.0)
        assert set(fast.opaque) == {"aten.renorm.default", "aten.logcumsumexp.default"}
        check(fast, module, torch.randn(5, 6))


def test_training_mode_is_respected():
    plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    check(dt.optimize(plain, torch.randn(2, 4), find=False), plain, torch.randn(2, 4))
    with_statistics = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).train()
    with pytest.raises(dt.GraphError, match="running_mean") as caught:
        dt.optimize(with_statistics, torch.randn(2, 4))
    assert "eval()" in caught.value.remedy
    frozen = with_statistics.eval()
    check(dt.optimize(frozen, torch.randn(2, 4), find=False), frozen, torch.randn(2, 4))


def test_weights_and_views_of_them_can_be_results():
    module = Function(None)
    module.weight = nn.Parameter(torch.randn(3, 3))
    module.function = lambda x: (module.weight, module.weight.t(), x, x[:1])
    fast = dt.optimize(module, torch.randn(2, 3), find=False)
    with torch.no_grad():
        first = fast(torch.randn(2, 3))
        first[0].zero_()
        first[1].zero_()
        again = fast(torch.randn(2, 3))
    assert bit_equal(again[0], module.weight.detach()) and module.weight.abs().sum() > 0


def test_gradients_are_not_lost_silently():
    fast = dt.optimize(nn.Linear(4, 4), torch.randn(2, 4), find=False)
    x = torch.randn(2, 4, requires_grad=True)
    with pytest.raises(dt.BindError, match="requires a gradient") as caught:
        fast(x)
    assert "no_grad" in caught.value.remedy
    with torch.no_grad():
        assert not fast(x).requires_grad
    assert not fast(x.detach()).requires_grad


@pytest.mark.parametrize(
    ("model", "example", "kind", "says"),
    [
        (nn.Linear(4, 4, device="meta"), torch.randn(2, 4), dt.BindError, "weight of the model"),
        (nn.Linear(4, 4), torch.randn(2, 4, device="meta"), dt.BindError, "example input 0"),
        (nn.Linear(4, 4, device="meta"), torch.randn(2, 4, device="meta"), dt.BindError, "meta"),
        (lambda x: x, torch.randn(2, 4), dt.BindError, "is a function, not an nn.Module"),
        (nn.Linear, torch.randn(2, 4), dt.BindError, "is a type, not an nn.Module"),
        ("model.onnx", torch.randn(2, 4), dt.DeuteronError, "a model file"),
        (nn.Linear(4, 4), torch.randn(2, 5), dt.DeuteronError, "Linear itself refuses"),
        (Function(lambda x: x if x.sum() > 0 else -x), torch.randn(3), dt.GraphError, "branches"),
    ],
)
def test_what_cannot_be_optimised_is_refused(model, example, kind, says):
    with pytest.raises(kind, match=says) as caught:
        dt.optimize(model, example, find=False)
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"policy": "fast"}, r"not a Policy or None(.*\n)*.*policy=dt.Policy\("),
        ({"budget_s": "2"}, "not a number"),
        ({"cache": "x.jsonl"}, r"cache=dt.Cache.open\('x.jsonl'\)"),
        ({"progress": 3}, "not a function"),
        ({"kwargs": "a"}, "kwargs is a str"),
    ],
)
def test_arguments_of_another_kind_are_refused(how, says):
    net, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(dt.BindError, match=says) as caught:
        dt.optimize(net, x, **how)
    assert caught.value.remedy and caught.value.asked.startswith("optimize(")
    if "policy" in how:
        with pytest.raises(dt.BindError, match=says):
            dt.train_step(net, F.mse_loss, torch.optim.SGD(net.parameters()), (x, x), **how)


def test_autocast_counts_inside_forward_and_is_refused_around_it():
    class Inside(nn.Linear):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    model, x = Inside(4, 4).eval(), torch.randn(2, 4)
    with torch.no_grad():
        assert bit_equal(dt.optimize(model, x, find=False)(x), model(x))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(dt.BindError, match="autocast is on") as caught,
    ):
        dt.optimize(model, x, find=False)
    assert "inside forward" in caught.value.remedy


def test_an_optimised_module_is_saved_and_explained(tmp_path):
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval()
    x = torch.randn(5, 16)
    seen = []
    fast = dt.optimize(model, x, budget_s=1.0, progress=lambda *stage: seen.append(stage))
    assert seen and all(done <= total for _, done, total in seen)
    assert torch.equal(dt.load(fast.save(tmp_path / "m.json"))(x), fast(x))
    assert "linear" in str(fast.explain()) and "h200" in str(fast.explain(target="h200"))
    errors = fast.plan.measure_errors()
    assert set(errors) == {c.region.name for c in fast.plan.decision.choices}
    assert max(errors.values()) <= allowed(0.0, torch.float32, 4)
    assert fast.plan.measure(seconds=0.05) > 0


def test_methods_of_a_graph_have_real_signatures():
    conv = inspect.signature(dt.Graph.conv)
    assert list(conv.parameters)[:4] == ["self", "x", "weight", "bias"]
    assert conv.parameters["bias"].default is None
    assert conv.parameters["groups"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "stride" in dt.Graph.conv.__doc__ and dt.Graph.conv.__name__ == "conv"
    for name, op in table.TABLE.items():
        method = getattr(dt.Graph, name)
        assert inspect.signature(method) and op.doc.split("\n")[0] in method.__doc__


# ---- an operator of the user's own


def wave_gradient(ops, v: Vjp):
    """d/dx x·sin(fx) = sin(fx) + f·x·cos(fx)"""
    x, f = v.arg(0), v.attrs["frequency"]
    return [v.grad * (ops.sin(x * f) + ops.cos(x * f) * x * f)]


WAVE = dt.OpDef(
    name="wave_for_tests",
    doc="x · sin(frequency · x).",
    inputs=("x",),
    attrs={"frequency": dt.Attr("float", 1.0, "how fast it swings")},
    infer=lambda x, frequency: x.dense_like(),
    reference=lambda x, frequency: x * torch.sin(x * frequency),
    fusion=dt.Fusion.ELEMENTWISE,
    vjp=wave_gradient,
)


COMPOSED = {
    **{
        f"norm {p}": (
            lambda g, x, y, p=p: g.norm(x * y, p, axes=(1,)),
            lambda x, y, p=p: torch.linalg.vector_norm(x * y, p, 1),
        )
        for p in (0.0, 1.0, 2.0, 3.0, -1.5, float("inf"), float("-inf"))
    },
    "norm of all": (
        lambda g, x, y: g.norm(x, keepdim=True) * y,
        lambda x, y: torch.linalg.vector_norm(x, keepdim=True) * y,
    ),
    "swiglu": (lambda g, x, y: g.swiglu(x, y), lambda x, y: F.silu(x) * y),
    "geglu": (lambda g, x, y: g.geglu(x, y), lambda x, y: F.gelu(x) * y),
    "geglu tanh": (
        lambda g, x, y: g.geglu(x, y, approximate="tanh"),
        lambda x, y: F.gelu(x, approximate="tanh") * y,
    ),
    "reglu": (lambda g, x, y: g.reglu(x, y), lambda x, y: F.relu(x) * y),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_several_operators_make_in_a_graph(name):
    """A region of its own, and a gradient as torch's."""
    ours, torchs = COMPOSED[name]
    g = dt.Graph("composed")
    handles = [g.tensor(n, (37, 129)) for n in ("x", "y")]
    ours(g, *handles).output("z")
    assert len(g.compile(device="cpu").decision.choices) == 1
    x, y = (torch.randn(37, 129, dtype=torch.float64).requires_grad_() for _ in range(2))
    want = torchs(x, y)
    grad = torch.randn(want.shape)
    wanted = torch.autograd.grad(want, (x, y), grad.double(), materialize_grads=True)
    feed = {"x": x.detach().float(), "y": y.detach().float(), "grad_z": grad}
    found = g.grad("z", ["x", "y"]).compile(device="cpu").run(**feed)
    for key, exact in zip(("z", "grad_x", "grad_y"), (want, *wanted), strict=True):
        assert error(found[key], exact.detach()) <= allowed(0.0, torch.float32, 129), key


def test_norms_a_graph_does_not_have():
    g = dt.Graph("wrong")
    with pytest.raises(dt.errors.GraphError, match="norm of int64 is not defined"):
        g.norm(g.tensor("i", (3, 4), "i64"))
    with pytest.raises(dt.errors.GraphError, match="an empty one, has no answer"):
        g.norm(g.tensor("x", (3, 0)), float("inf"), axes=(1,))


@pytest.fixture
def wave():
    dt.register_op(WAVE)
    yield WAVE
    del table.TABLE[WAVE.name]
    delattr(dt.Graph, WAVE.name)
    table.infer.cache_clear()


def test_an_operator_of_ones_own(wave, tmp_path):
    g = dt.Graph()
    x = g.tensor("x", (6, 5), "f64")
    y = g.relu(g.wave_for_tests(x, frequency=3.0) + 1.0).output("y")
    assert y.shape == (6, 5) and "frequency: float; how fast" in dt.Graph.wave_for_tests.__doc__
    both = g.grad("y", wrt="x")
    tx, seed = torch.randn(6, 5).double(), torch.randn(6, 5).double()
    leaf = tx.clone().requires_grad_()
    want = F.relu(leaf * torch.sin(leaf * 3.0) + 1.0)
    want.backward(seed)
    for find in (False, True):
        plan = both.compile(device="cpu", find=find, budget_s=1.0)
        fused = [c.region.ops for c in plan.decision.choices]
        # it has no formula, so what is around it is generated without it
        assert any({"add", "relu"} <= set(ops) and "wave_for_tests" not in ops for ops in fused)
        again = dt.load_plan(plan.save(tmp_path / "wave.plan.json"), device="cpu")
        for each in (plan, again):
            out = each.run(x=tx, grad_y=seed)
            limit = allowed(0.0, torch.float64, 16)
            assert error(out["y"], want) <= limit and error(out["grad_x"], leaf.grad) <= limit
    with pytest.raises(dt.GraphError, match="frequency"):
        g.wave_for_tests(x, frequency="fast")


@pytest.mark.parametrize("name", ["compile", "tensor", "call", "relu", "My Op", "MyOp", "", "9x"])
def test_names_an_operator_cannot_have(name):
    before = dict(table.TABLE), vars(dt.Graph).get(name)
    taken = dt.OpDef(name, "doc", ("x",), lambda x: x, lambda x: x, dt.Fusion.ELEMENTWISE)
    with pytest.raises(dt.GraphError, match=r"name|exists|already"):
        dt.register_op(taken)
    assert (dict(table.TABLE), vars(dt.Graph).get(name)) == before


def test_weights_changed_later_do_not_reach_the_plan():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).eval()
    x = torch.randn(4, 8)
    fast = dt.optimize(model, x, find=False)
    before = fast(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    assert torch.equal(fast(x), before)


def test_where_no_search_helps_the_calls_of_eager_are_the_plan(monkeypatch):
    """The race itself is run on a GPU; here its outcome is made up."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten()).eval()
    x = torch.randn(2, 3, 8, 8)
    plans = Plans(model, torch.device("cpu"), dt.Policy())
    planned = plans.planned(plans.imported((x,), {}), find=False)
    tried = []

    def against(plan, eager):
        tried.append({c.candidate.engine for c in plan.decision.choices})
        return (1.0 if tried[-1] == {"torch"} else 2.0), 1.0

    monkeypatch.setattr(Plan, "capture", lambda plan: True)
    monkeypatch.setattr(Plan, "against", against)
    search = {"find": False, "budget_s": 1.0}
    found = api._not_slower(planned, plans, search, lambda p: p.plan.against(None))
    assert len(tried) == 3 and tried[-1] == {"torch"} != tried[0]
    assert [n.op for n in found.plan.graph.nodes] == [n.op for n in planned.imported.graph.nodes]
    torch.testing.assert_close(*found.plan.run(input=x).values(), model(x))


@torch.no_grad()
def test_on_a_cpu_the_calls_of_eager_are_the_plan_as_well(monkeypatch):
    """Where a plan by measurement loses, and a longer search is of no help."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten()).eval()
    x, tried = torch.randn(2, 3, 8, 8), list[set[str]]()
    monkeypatch.setattr(Plan, "against_calls", lambda plan, ours, eager, seconds: raced(plan, ours))
    wins = {"torch"}

    def raced(plan, ours):
        ours()
        tried.append({c.candidate.engine for c in plan.decision.choices})
        return (0.5 if tried[-1] <= wins else 2.0), 1.0

    fast = dt.optimize(model, x, budget_s=0.2)
    assert len(tried) == 3 and tried[-1] == {"torch"} != tried[0]
    assert {c.candidate.engine for c in fast.plan.decision.choices} == {"torch"}
    torch.testing.assert_close(fast(x), model(x))
    wins = set()  # nobody is quicker: the plan stays what it was
    again = dt.optimize(model, x, budget_s=0.2)
    assert len(tried) == 7 and {c.candidate.engine for c in again.plan.decision.choices} == tried[3]
    torch.testing.assert_close(again(x), model(x))


class Told(nn.Module):
    """Says how often it was called."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        type(self).calls += 1
        return self.linear(x)


@pytest.fixture
def called_itself(monkeypatch):
    """A module of which no plan is as quick as its own calls."""

    def raced(plan, ours, eager, seconds):
        before = Told.calls
        ours()
        return (1.0 if Told.calls > before else 2.0), 1.0

    monkeypatch.setattr(Plan, "against_calls", raced)
    model = Told().eval()
    return model, dt.optimize(model, torch.randn(2, 4), budget_s=0.1)


def by_itself(fast, x) -> bool:
    before = Told.calls
    with torch.no_grad():
        want = fast._plans.module.linear(x)
        torch.testing.assert_close(fast(x), want)
    return Told.calls == before + 1


def test_where_no_plan_is_as_quick_the_module_is_called(called_itself, tmp_path):
    model, fast = called_itself
    x = torch.randn(2, 4)
    fast(torch.randn(3, 4))  # of another size, which is planned first
    assert by_itself(fast, x) and by_itself(fast, torch.randn(3, 4))
    assert "the module, which is called instead" in " ".join(str(fast.explain()).split())
    assert not fast(x).requires_grad and fast(x).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fast(x).dtype == torch.float32  # as a plan has it
    with pytest.raises(dt.BindError, match="requires a gradient"):
        fast(torch.randn(2, 4, requires_grad=True))
    with pytest.raises(dt.BindError):
        fast(torch.randn(2, 4, dtype=torch.float64))
    fast.refit({name: t + 1 for name, t in model.state_dict().items()})
    assert by_itself(fast, x)
    assert not torch.allclose(fast(x), model(x))
    path = fast.save(tmp_path / "told.json")
    assert by_itself(dt.load(path, model), x)
    before = Told.calls
    torch.testing.assert_close(dt.load(path)(x), fast(x))  # a file alone holds no module
    assert Told.calls == before + 1
    fast.find(budget_s=0.1)


def test_a_change_of_the_module_is_followed_where_that_is_called(monkeypatch, called_itself):
    model = Told().eval()
    fast = dt.optimize(model, torch.randn(2, 4), follow=True, budget_s=0.1)
    with torch.no_grad():
        model.linear.weight.mul_(2.0)
        x = torch.randn(2, 4)
        torch.testing.assert_close(fast(x), model.linear(x))
    assert by_itself(fast, x)


def test_threads_may_optimise_at_once():
    """An import follows its module by hooks that all modules have meanwhile, those of other threads
    too."""
    found: list[Any] = []

    def optimised(width: int) -> None:
        net, x = nn.Sequential(nn.Linear(width, 4), nn.ReLU()).eval(), torch.randn(2, width)
        try:
            fast = dt.optimize(net, x, find=False)
            found.append(error(fast(x), net(x).detach().double()) <= SINGLE)
        except Exception as wrong:
            found.append(wrong)

    threads = [threading.Thread(target=optimised, args=(n,)) for n in range(3, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 5


@pytest.mark.parametrize("known", [0.0, -0.0])
def test_the_sign_of_a_zero_is_part_of_a_number(known):
    x = torch.ones(3)
    module = Function(lambda x, k: x / k)
    fast = dt.optimize(module, (x, known), find=False)
    assert torch.equal(fast(x, known), module(x, known))
    with pytest.raises(dt.BindError, match=r"is -?0\.0, but"):
        fast(x, -known)
