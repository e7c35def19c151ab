"""Regions are measured with the caches as the others of their plan leave them."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

import deuteron as dt
from deuteron.codegen import openmp
from deuteron.engines import Forms
from deuteron.passes import fuse
from deuteron.plan import cache_state, find, timing
from deuteron.plan.choose import Choice, Survey, choose

decide = importlib.import_module("deuteron.plan.decide")

CPU = torch.device("cpu")


def two_products() -> dt.Graph:
    g = dt.Graph()
    x = g.tensor("x", (4, 48))
    for size, name in ((32, "v"), (16, "w")):
        x = g.relu(g.linear(x, g.constant(torch.randn(size, x.shape[-1]), name)))
    x.output("y")
    return g


@pytest.mark.skipif(not openmp.available(), reason="needs llvmlite")
@pytest.mark.parametrize("held", [1 << 40, 64])
def test_others_are_read_between_calls_if_the_caches_cannot_hold_all(tmp_path, monkeypatch, held):
    asked = []
    made = cache_state.amid

    def spy(others, near):
        asked.append((others, [tuple(t.shape) for t in near]))
        return made(others, near)

    monkeypatch.setattr(decide, "room", lambda: held)
    monkeypatch.setattr(find, "amid", spy)
    cache = dt.Cache.open(tmp_path / "measured.jsonl")
    plan = two_products().compile(device="cpu", find=True, cache=cache)
    first, second = plan.decision.regions
    if held > 64:
        assert not asked
        return
    assert all(c.option.measured_s for c in plan.decision.choices)
    # what one reads and writes is what lies between two runs of the other
    assert {others for others, _ in asked} >= {
        cache_state.moved([first]),
        cache_state.moved([second]),
    }
    assert [(4, 32), (4, 48)] in [near for _, near in asked]  # its result and its input, no weight
    x = torch.randn(4, 48)
    plan.run(x=x)
    again = two_products().compile(device="cpu", find=True, cache=cache)
    assert "measured: 0" in " ".join(again.decision.notes)
    # measured hot it would be another number: nothing is taken over from one kind for the other
    monkeypatch.setattr(decide, "room", lambda: 1 << 40)
    hot = two_products().compile(device="cpu", find=True, cache=cache)
    assert "remembered: 0" in " ".join(hot.decision.notes)


@pytest.mark.skipif(not openmp.available(), reason="needs llvmlite")
def test_reading_changes_nothing():
    x, gaps = torch.randn(3, 5, 7), torch.randn(8, 9)[:, :5]
    before = x.clone(), gaps.clone()
    cache_state.amid(1000, [x, gaps, torch.empty(0)])()
    assert torch.equal(x, before[0])
    assert torch.equal(gaps, before[1])


def test_what_comes_before_a_call_is_not_timed():
    done = []
    contenders = {name: (lambda name=name: done.append(name)) for name in "ab"}
    before = lambda: done.append("-") or torch.ones(200_000).sum()  # noqa: E731
    times = timing.interleaved(contenders, CPU, seconds=0.02, before=before)
    assert set(times) == {"a", "b"}
    assert max(times.values()) < 1e-4
    calls = [i for i, what in enumerate(done) if what != "-"]
    assert sum(i == 0 or done[i - 1] != "-" for i in calls) == len(contenders)  # to warm up
    assert len(calls) <= len(contenders) * (timing.MOST + 3)


@pytest.mark.skipif(not openmp.available(), reason="needs llvmlite")
@pytest.mark.parametrize("engine", ["cpu_kernels", "vendor_fused"])
def test_what_follows_a_product_is_apart_for_the_sake_of_another_kernel_only(engine):
    """The same kernel without it is no quicker, whatever was measured while others computed."""
    g = dt.Graph()
    x, w = g.tensor("x", (16, 64)), g.constant(torch.randn(32, 64), "w")
    g.relu(g.linear(x, w)).output("y")
    (region,) = fuse(g.ir())[0]
    survey = Survey(dt.target("cpu"), dt.Policy())

    def pick(region):
        options, refusals = survey.ask(region)
        wanted = "cpu_kernels" if len(region.nodes) == 2 else engine
        best = next((o for o in options if o.candidate.engine == wanted), options[0])
        seconds = 1.0 if len(region.nodes) == 2 else 0.1
        return Choice(region, replace(best, measured_s=seconds), options, refusals)

    assert len(choose(region, pick, survey)) == (1 if engine == "cpu_kernels" else 2)


def test_forms_that_are_asked_for_in_turn_lie_one_behind_another():
    forms, weights = Forms(), [torch.randn(5, 7), torch.randn(64), torch.randn(1024, 1024)]
    weights.append(torch.randn(3, 3))
    with torch.inference_mode():
        made = [forms.get(w, "same", torch.clone, 1e9) for w in weights[:2]]
    made += [forms.get(w, "same", torch.clone, 1e9) for w in weights[2:]]
    assert all(torch.equal(a, b) for a, b in zip(made, weights, strict=True))
    first, second, large, last = (t.data_ptr() for t in made)
    assert (second - first, last - second) == (192, 256)  # each begins with a line of memory
    assert not first <= large < last  # what fills a block by itself is left where it is
    turned = forms.get(weights[0], "turned", lambda w: w.T, 1e9)
    assert torch.equal(turned, weights[0].T)


def test_who_has_to_be_called_from_python_amid_native_code_is_the_slower_one():
    """Where both were predicted alike, and neither was measured; not where all fits a cache."""
    g = dt.Graph()
    x = g.tensor("x", (4, 8))
    (x * x).output("y")
    (region,) = fuse(g.ir())[0]
    survey = Survey(dt.target("cpu"), dt.Policy())
    found = {o.candidate.engine: replace(o, predicted_s=1e-6) for o in survey.ask(region)[0]}
    for beside in (0, 1 << 30):
        finder = find.Finder(survey, CPU, {}, None, 0.0, 0.0)
        finder.beside = beside
        ours, torchs = (finder._amid_others(region, found[e]) for e in ("cpu_gen", "torch"))
        assert ours == 1e-6 and (torchs > 10 * ours if beside else torchs == ours)
