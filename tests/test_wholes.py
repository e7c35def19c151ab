"""Whole plans to choose from: what a search measured, put together under other wishes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.engines import Candidate
from deuteron.errors import DeuteronError
from deuteron.ir.region import Region
from deuteron.plan.alternatives import named, wholes
from deuteron.plan.choose import Choice, Option
from tests.tolerances import allowed, error


def option(engine: str, seconds: float | None, off: float | None = 1e-7, room: int = 0, **how):
    knobs = {"recipe": how.pop("recipe", "")}
    return Option(Candidate(engine, "1", knobs, **how), 1.0, seconds, off, workspace=room)


@pytest.fixture
def region() -> Region:
    g = dt.Graph()
    g.relu(g.tensor("x", (4,))).output("y")
    return Region(g.ir())


def test_each_wish_is_granted_at_the_least_time(region):
    torch_, product = option("torch", 9.0), option("cpu_kernels", 3.0, recipe="product")
    winograd = option("cpu_kernels", 1.0, 8e-6, 640, recipe="winograd")
    wild = option("vendor_fused", 2.0, 1e-7, 64, deterministic=False)
    slow = option("cpu_gen", 4.0, 1.2e-7)
    wrong = Option(Candidate("cpu_gen", "2"), 1.0, 0.1, 0.0, rejected="error 3 is over twice")
    first = Choice(region, winograd, (winograd, wild, product, slow, torch_, wrong))
    second = Choice(region, slow, (slow, torch_))
    found = wholes([first, second])
    picked = {name: w.choices[0].option for w in found for name in w.names}
    assert picked["quickest"] == picked["deterministic"] == winograd
    assert picked["least workspace"] == product
    assert picked["most exact"] == picked["libraries alone"] == wild  # about as exact as any
    assert found[0].names == ("quickest", "deterministic")
    assert [(w.seconds, w.workspace, w.error, w.changed) for w in found] == [
        (5.0, 640, 8e-6, 0),
        (6.0, 64, 1.2e-7, 1),
        (7.0, 0, 1.2e-7, 1),
        (11.0, 64, 1e-7, 2),
    ]
    left = Choice(region, winograd, (option("cpu_gen", None, None), option("torch", None, None)))
    (one,) = named(wholes([first, left]), "libraries alone").choices[1:]
    assert one.candidate.engine == "torch" and one.best_s == 1.0  # as predicted
    unsure = Choice(region, wild, (wild,))
    with pytest.raises(DeuteronError, match="no plan is 'deterministic'"):
        named(wholes([first, unsure]), "deterministic")
    again = wholes(named(found, "least workspace").choices)  # one that was picked knows them all
    assert {w.names: w.seconds for w in again} == {w.names: w.seconds for w in found}


def test_a_plan_that_is_picked_runs(tmp_path):
    torch.manual_seed(0)
    g = dt.Graph("layer")
    x = g.tensor("x", (1, 32, 12, 12), layout="nhwc")
    w = torch.randn(32, 32, 3, 3) / 17
    g.relu(g.conv(x, g.constant(w, "w"), padding=1)).output("y")
    plan = g.compile(device="cpu", find=True, cache=dt.plan.Cache(tmp_path / "cache.jsonl"))
    given = torch.randn(1, 32, 12, 12).to(memory_format=torch.channels_last)
    want = F.relu(F.conv2d(given.double(), w.double(), padding=1))
    own = error(F.relu(F.conv2d(given, w, padding=1)), want)
    names = [name for whole in plan.alternatives() for name in whole.names]
    assert sorted(names) == sorted({*names}) and {"quickest", "libraries alone"} <= {*names}
    for name in names:
        other = plan.pick(name)
        assert error(other.run(x=given)["y"], want) <= allowed(own, torch.float32, 288), name
        assert any(n.startswith("picked from") and name in n for n in other.decision.notes)
    alone = plan.pick("libraries alone")
    assert {c.candidate.engine for c in alone.decision.choices} <= {"torch", "vendor_fused"}
    assert "libraries alone" in str(plan.explain(full=True)), "with its time"
    assert "libraries alone" in plan.explain("html") and "wholes" in plan.explain("json")
    with pytest.raises(DeuteronError, match=r"no plan 'fast'(.*\n)*.*pick one of 'quickest'"):
        plan.pick("fast")


def test_nothing_to_choose_from_without_a_search():
    model = torch.nn.ReLU()
    fast = dt.optimize(model, torch.randn(4), find=False)
    assert fast.plan.alternatives() == ()
    with pytest.raises(DeuteronError, match="no candidate was measured"):
        fast.pick("quickest")
    fast.find(budget_s=1.0)
    fast.pick("libraries alone")
    assert {c.candidate.engine for c in fast.plan.decision.choices} == {"torch"}
    torch.testing.assert_close(fast(torch.tensor([-1.0, 0, 1, 2])), torch.tensor([0.0, 0, 1, 2]))
