"""Choosing by measurement: what is measured, verified, remembered, and when it stops."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import signal
import sys
import time
from functools import partial

import pytest
import torch
from fakes import FakeEngine, check_right, registered, torch_alone

import deuteron as dt
from deuteron.passes import fuse
from deuteron.plan import acceptance, search_clock, timing
from deuteron.plan import find as find_module
from deuteron.plan.acceptance import too_wrong
from deuteron.plan.choose import Survey


@pytest.fixture(scope="module", autouse=True)
def warm():
    """The machine is measured once in its life; budgets are about what comes after."""
    dt.target("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    torch_alone(monkeypatch)


@pytest.fixture
def cache(tmp_path):
    return lambda: dt.Cache.open(tmp_path / "measured.jsonl")


def softmax_graph(shape=(6, 8)) -> dt.Graph:
    g = dt.Graph()
    g.softmax(g.tensor("x", shape), axis=-1).output("y")
    return g


def ladder(*widths: int) -> dt.Graph:
    """Products of different sizes that cannot fuse: a region each, all unlike."""
    g = dt.Graph()
    x = g.tensor("x", (4, widths[0]))
    for i, (k, n) in enumerate(itertools.pairwise(widths)):
        x = g.matmul(x, g.tensor(f"w{i}", (k, n)))
    x.output("y")
    return g


def ladder_feed(*widths: int) -> dict[str, torch.Tensor]:
    pairs = enumerate(itertools.pairwise(widths))
    return {"x": torch.randn(4, widths[0]), **{f"w{i}": torch.randn(k, n) for i, (k, n) in pairs}}


def compiled(g, cache, engine=None, budget_s=5.0, **kwargs):
    with registered(*([engine] if engine else [])):
        return g.compile(device="cpu", find=True, budget_s=budget_s, cache=cache, **kwargs)


def option_of(plan: dt.Plan, name: str, region: int = 0):
    (found,) = (o for o in plan.decision.choices[region].options if o.candidate.engine == name)
    return found


def test_a_search_says_what_its_seconds_were_spent_on(cache, monkeypatch):
    """Each second once: what a library sets up within a measurement is no measuring."""
    now = [0.0]

    def goes_on(seconds):
        now[0] += seconds

    monkeypatch.setattr(search_clock.time, "perf_counter", lambda: now[0])
    clock = search_clock.SearchClock()
    with clock.on(search_clock.MEASURING):
        goes_on(1.0)
        with clock.on(search_clock.LIBRARIES):
            goes_on(2.0)
        goes_on(0.5)
    goes_on(0.25)
    with clock.on(search_clock.BUILDERS):
        goes_on(4.0)
    said = "deciding 0.2 s, waiting for builders 4.0 s, setting up libraries 2.0 s, measuring 1.5 s"
    assert clock.told(7.7) == f"the search took 7.7 s: {said}"
    monkeypatch.undo()
    plan = compiled(softmax_graph(), cache())
    assert plan.decision.notes[0].startswith("the search took")
    assert "the search took" in str(plan.explain())


def test_who_races_alone_is_not_timed_for_long(cache, monkeypatch):
    """That decides nothing, and others wait for their turn."""
    asked = []

    def timed(thunks, device, seconds, before):
        asked.append((len(thunks), seconds))
        return dict.fromkeys(thunks, 1e-3)

    monkeypatch.setattr(find_module, "timed", timed)
    torch_alone(monkeypatch)
    compiled(softmax_graph(), cache())
    compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"], predicted=1e-9))
    assert [n for n, _ in asked] == [1, 2] and asked[0][1] < asked[1][1]


def test_find_measures_verifies_and_remembers(cache):
    engine = FakeEngine(wants=["softmax"], predicted=1e-9)
    plan = compiled(softmax_graph(), cache(), engine)
    assert plan.decision.mode == "found"
    for name in ("fake", "torch"):
        option = option_of(plan, name)
        assert option.measured_s > 0 and option.error is not None and not option.rejected
    assert plan.decision.choices[0].reference == "float64"
    assert engine.builds == 1 + (plan.decision.choices[0].candidate.engine == "fake")
    assert "regions measured: 1, remembered: 0" in plan.decision.notes

    again = FakeEngine(wants=["softmax"], predicted=1e-9)
    second = compiled(softmax_graph(), cache(), again)
    assert "regions measured: 0, remembered: 1" in second.decision.notes
    chosen = second.decision.choices[0]
    assert chosen.candidate == plan.decision.choices[0].candidate
    assert again.builds == (chosen.candidate.engine == "fake"), "built more than what runs"
    assert option_of(second, "torch").measured_s == option_of(plan, "torch").measured_s


def test_equal_regions_are_measured_once(cache):
    g = dt.Graph()
    x, w = g.tensor("x", (4, 8)), g.tensor("w", (8, 8))
    for _ in range(5):
        x = x @ w
    x.output("y")
    plan = compiled(g, cache())
    assert len(plan.decision.choices) == 5
    assert "regions measured: 1, remembered: 0" in plan.decision.notes


@pytest.mark.parametrize("knobs", [{"block": (64, 32)}, {"kind": torch.float16}, {"deep": [[1]]}])
def test_knobs_of_any_kind_are_remembered(cache, knobs, tmp_path):
    compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"], knobs=knobs))
    engine = FakeEngine(wants=["softmax"], knobs=knobs)
    plan = compiled(softmax_graph(), cache(), engine)
    assert "regions measured: 0, remembered: 1" in plan.decision.notes
    assert cache().problems == []


def test_a_new_version_is_measured_anew(cache):
    compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"]))
    plan = compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"], version="2"))
    assert "regions measured: 1, remembered: 0" in plan.decision.notes
    gone = compiled(softmax_graph(), cache())
    assert gone.decision.choices[0].candidate.engine == "torch"
    assert "regions measured: 0, remembered: 1" in gone.decision.notes


@pytest.mark.parametrize("policy", [dt.Policy(deterministic=True), dt.Policy(max_error=1e-3)])
def test_another_policy_is_measured_for_itself(cache, policy):
    compiled(softmax_graph(), cache())
    plan = compiled(softmax_graph(), cache(), policy=policy)
    assert "regions measured: 1, remembered: 0" in plan.decision.notes


# ---- the two per cent


@pytest.mark.parametrize(
    ("first", "second", "wins"),
    [(1.00, 0.99, "fake"), (1.00, 0.981, "fake"), (1.00, 0.97, "torch"), (1.0, 2.0, "fake")],
)
def test_a_choice_is_overturned_for_more_than_two_per_cent(cache, monkeypatch, first, second, wins):
    """The fake is expected to be first; torch must beat it by more than the margin."""

    def fixed(contenders, device, **kwargs):
        return {name: {"0": first, "1": second}[name] for name in contenders}

    monkeypatch.setattr(timing, "interleaved", fixed)
    plan = compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"], predicted=1e-9))
    assert plan.decision.choices[0].candidate.engine == wins


@pytest.mark.parametrize(("unseen", "wins"), [(0.0, "fake"), (0.5, "torch")])
def test_what_a_measurement_alone_does_not_show_counts(cache, monkeypatch, unseen, wins):
    monkeypatch.setattr(timing, "interleaved", lambda *_, **how: {"0": 1.0, "1": 1.2})
    fake = FakeEngine(wants=["softmax"], predicted=1e-9)
    fake.candidate = dataclasses.replace(fake.candidate, unseen_s=unseen)
    assert compiled(softmax_graph(), cache(), fake).decision.choices[0].candidate.engine == wins


# ---- engines that are no good


BAD = {
    "wrong numbers": ({"change": lambda t: t * 1.01}, "error"),
    "a last element": ({"change": lambda t: t.index_fill(1, torch.tensor(7), 0.5)}, "error"),
    "nan": ({"change": lambda t: t.index_fill(0, torch.tensor(0), float("nan"))}, "error inf"),
    "zeros": ({"change": torch.zeros_like}, "error"),
    "shape": ({"change": lambda t: t[:3]}, "f32[3,8]"),
    "dtype": ({"change": lambda t: t.double()}, "f64[6,8]"),
    "device": ({"change": lambda t: t.to("meta")}, "meta"),
    "too many": ({"change": lambda t: (t, t)}, "failed"),
    "not a tensor": ({"change": lambda t: t.tolist()}, "failed"),
    "build fails": ({"build_error": RuntimeError("no such intrinsic")}, "no such intrinsic"),
    "run fails": ({"run_error": ValueError("bad launch")}, "ValueError: bad launch"),
    "writes shape": ({"change": lambda t: t[:3], "writes": True}, "failed"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_engine_that_is_wrong_is_rejected_with_a_reason(cache, name):
    how, says = BAD[name]
    g, feed = softmax_graph(), {"x": torch.randn(6, 8)}
    for _ in range(2):  # measured, then remembered
        plan = compiled(g, cache(), FakeEngine(wants=["softmax"], **how))
        assert plan.decision.choices[0].candidate.engine == "torch"
        assert says in option_of(plan, "fake").rejected
        check_right(plan.run(feed), g.ir(), feed)
        assert says in plan.explain("json")


def test_an_engine_that_fails_only_while_it_is_timed(cache):
    calls = []

    def sometimes(t):
        calls.append(1)
        if len(calls) > 2:
            raise RuntimeError("worn out")
        return t

    plan = compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"], change=sometimes))
    assert plan.decision.choices[0].candidate.engine == "torch"
    assert "worn out" in option_of(plan, "fake").rejected
    assert option_of(plan, "torch").measured_s > 0


def test_an_engine_that_writes_to_its_inputs_is_rejected(cache):
    class Careless(FakeEngine):
        def build(self, region, candidate, ctx):
            return dt.Kernel(lambda x: x.mul_(1.0).softmax(-1))

    plan = compiled(softmax_graph(), cache(), Careless(wants=["softmax"]))
    assert "wrote to its inputs" in option_of(plan, "fake").rejected


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_an_estimate_that_is_no_time_is_a_refusal(cache, seconds):
    plan = compiled(softmax_graph(), cache(), FakeEngine(wants=["softmax"], predicted=seconds))
    (refusal,) = (r for name, r in plan.decision.choices[0].refusals if name == "fake")
    assert "estimates" in refusal.reason


def test_a_mask_beside_the_numbers_does_not_loosen_them(cache):
    """Each result is held to its own element type, not to that of the first."""
    g = dt.Graph()
    y = g.tensor("x", (16, 16)) * 3.0
    (y > 0.0).output("mask")
    y.output("y")

    def off(t):
        return t * 1.001 if t.is_floating_point() else t

    for i, extra in enumerate((off, lambda t: t if t.is_floating_point() else ~t)):
        new = dt.Cache(cache().path.with_name(f"{i}.jsonl"))
        plan = compiled(g, new, FakeEngine(wants=["gt"], change=extra))
        assert "error" in option_of(plan, "fake").rejected


def test_overflow_in_torch_does_not_let_everything_pass(cache):
    g = dt.Graph()
    x = g.tensor("x", (64,), "f16")
    g.pow(x, 40.0).output("y")  # inf in f16, finite in f64

    def wrong(t):
        return t * float("nan")

    plan = compiled(g, cache(), FakeEngine(wants=["pow"], change=wrong))
    assert plan.decision.choices[0].reference == "torch"
    assert option_of(plan, "fake").rejected


def test_an_absurd_promise_does_not_keep_torch_from_being_measured(cache):
    """Everything is 'far slower' than an engine that claims to need no time."""
    first = FakeEngine("first", ["softmax"], predicted=0.0, run_error=RuntimeError("no"))
    second = FakeEngine("second", ["softmax"], predicted=0.0, change=torch.zeros_like)
    with registered(first, second):
        plan = compiled(softmax_graph(), cache())
    assert plan.decision.choices[0].candidate.engine == "torch"
    assert option_of(plan, "torch").measured_s > 0


def test_a_region_whose_reference_fails_is_left_to_torch(cache, monkeypatch):
    def fails(*args, **kwargs):
        raise IndexError("out of range")

    monkeypatch.setattr(acceptance, "evaluate", fails)
    plan = compiled(softmax_graph(), cache())
    choice = plan.decision.choices[0]
    assert choice.candidate.engine == "torch" and "out of range" in choice.note
    assert cache().entries == {}


# ---- budget and interruption


def test_the_budget_is_kept(cache):
    widths = (8, 9, 10, 11, 12, 13, 14)
    engine = FakeEngine(wants=["matmul"], sleep=0.05)
    begin = time.perf_counter()
    plan = compiled(ladder(*widths), cache(), engine, budget_s=0.4)
    assert time.perf_counter() - begin < 4.0
    assert len(plan.decision.choices) == 6
    assert any("were not measured: the budget" in note for note in plan.decision.notes)
    feed = ladder_feed(*widths)
    check_right(plan.run(feed), ladder(*widths).ir(), feed)
    measured = len(cache().entries)
    assert 0 < measured < 6
    more = compiled(ladder(*widths), cache(), engine, budget_s=0.4)  # goes on where it stopped
    assert f"remembered: {measured}" in more.decision.notes[-1]
    assert len(cache().entries) > measured


def test_what_is_not_reached_is_priced_by_what_was_measured_of_its_kind(cache):
    """Of four alike products the last is said to take half a minute, so the budget does not allow
    to measure it. The others turn out to be a thousand times as quick as their estimates: so is it
    by all that is known, and the explanation says so. Another search remembers them, and knows."""

    class Modest(FakeEngine):
        def estimate(self, region, target, candidate):
            return 30.0 if "512" in region.text else 0.03

    engine, widths = Modest(wants=["matmul"]), (8, 9, 10, 11, 512)
    alone = {"policy": dt.Policy(engines="fake")}
    for _ in range(2):
        plan = compiled(ladder(*widths), cache(), engine, **alone)
        *measured, left = plan.decision.choices
        ratios = [c.option.measured_s / 0.03 for c in measured]
        assert left.option.measured_s is None
        assert min(ratios) <= left.best_s / 30.0 <= max(ratios)
        with registered(engine):
            report = plan.explain().report
        assert report.predicted_s == pytest.approx(sum(c.best_s for c in plan.decision.choices))
        assert "its estimate is taken" in report.regions[-1].note
        assert any("put right by what was measured" in note for note in report.notes)


def test_a_budget_of_nothing_measures_nothing(cache):
    engine = FakeEngine(wants=["softmax"])
    plan = compiled(softmax_graph(), cache(), engine, budget_s=0.0)
    assert cache().entries == {} and engine.calls == 0
    assert "not measured" in plan.decision.choices[0].note


def test_many_slow_candidates_do_not_outlast_the_budget(cache):
    class Many(FakeEngine):
        def candidates(self, region, target, policy):
            knobs = dt.ir.graph.Attrs
            return [dt.Candidate(self.name, "1", knobs({"block": i})) for i in range(50)]

    begin = time.perf_counter()
    plan = compiled(softmax_graph(), cache(), Many(wants=["softmax"], sleep=0.1), budget_s=0.5)
    assert time.perf_counter() - begin < 4.0  # 50 candidates of 0.1 s
    skipped = [o for o in plan.decision.choices[0].options if "not reached" in o.rejected]
    assert len(skipped) > 30


def test_what_is_slow_to_build_is_not_built(cache):
    engine = FakeEngine(wants=["softmax"], build_s=60.0)
    plan = compiled(softmax_graph(), cache(), engine, budget_s=5.0)
    assert engine.builds == 0 and "too slow to build" in option_of(plan, "fake").rejected


@pytest.mark.parametrize("interrupt", ["raise", "return"])
def test_an_interrupted_search_keeps_what_it_has_and_goes_on_later(cache, interrupt):
    widths = (8, 9, 10, 11, 12)
    engine = FakeEngine(wants=lambda region: "f32[10,11]" in region.text)
    engine.run_error = KeyboardInterrupt()
    if interrupt == "raise":
        with pytest.raises(KeyboardInterrupt):
            compiled(ladder(*widths), cache(), engine)
    else:
        plan = compiled(ladder(*widths), cache(), engine, interrupt="return")
        feed = ladder_feed(*widths)
        engine.run_error = None
        check_right(plan.run(feed), ladder(*widths).ir(), feed)
        assert any("stopped by the user" in note for note in plan.decision.notes)
    engine.run_error = None
    kept = len(cache().entries)
    assert kept < 4
    resumed = compiled(ladder(*widths), cache(), engine)
    assert resumed.decision.notes[-1] == f"regions measured: {4 - kept}, remembered: {kept}"


def test_an_interrupted_search_does_not_wait_for_slow_builds(cache):
    slow = FakeEngine("slow", ["softmax"], predicted=0.0, build_s=60.0)
    stop = FakeEngine("stop", ["softmax"], predicted=1.0, run_error=KeyboardInterrupt())
    with registered(slow, stop):
        plan = compiled(softmax_graph(), cache(), interrupt="return")
    assert plan.decision.choices[0].candidate.engine == "torch" and slow.builds == 0


def test_what_ctrl_c_does_is_one_of_two_things(cache):
    with pytest.raises(dt.BindError, match="interrupt='stop'") as caught:
        compiled(softmax_graph(), cache(), interrupt="stop")
    assert "'raise' or 'return'" in caught.value.remedy


def test_a_reference_has_no_error(cache, monkeypatch):
    monkeypatch.setitem(acceptance.EXACT_FLOPS, "cpu", 0)  # too long for float64
    plan = compiled(softmax_graph(), cache())
    (choice,) = plan.decision.choices
    assert choice.reference == "torch" and choice.torch_error is None
    assert option_of(plan, "torch").error is None


# ---- policies


def test_a_policy_that_nothing_keeps_is_an_error_that_names_the_region(cache):
    for _ in range(2):  # measured, then remembered
        with pytest.raises(dt.EngineError, match="no candidate keeps max_error") as caught:
            compiled(softmax_graph(), cache(), policy=dt.Policy(max_error=1e-15))
        assert "softmax" in caught.value.where and "max_error" in caught.value.remedy
        assert len(cache().entries) == 1, "what was measured is kept"


def test_a_policy_drops_what_errs_more(cache):
    engine = FakeEngine(wants=["softmax"], change=lambda t: t * 1.01)
    loose = compiled(softmax_graph(), cache(), engine, policy=dt.Policy(max_error=0.1))
    assert not option_of(loose, "fake").rejected
    tight = compiled(softmax_graph(), cache(), engine, policy=dt.Policy(max_error=1e-4))
    assert "max_error" in option_of(tight, "fake").rejected


def test_workspace_and_determinism_are_limits(cache):
    big = FakeEngine(wants=["softmax"], workspace=1000)
    for limit, rejected in ((999, True), ("1KB", False), (None, False)):
        plan = compiled(softmax_graph(), cache(), big, policy=dt.Policy(max_workspace=limit))
        assert ("1000 bytes of workspace" in option_of(plan, "fake").rejected) == rejected
    for limit, taken in ((999, False), (1000, True)):  # without a search as well
        with registered(big):
            plan = softmax_graph().compile(device="cpu", policy=dt.Policy(max_workspace=limit))
        (choice,) = plan.decision.choices
        assert (choice.candidate.engine == "fake") == taken
        assert choice.option.workspace == 1000 if taken else "1000 bytes" in choice.note
    dice = FakeEngine(wants=["softmax"], deterministic=False)
    for find in (False, True):
        with registered(dice):
            plan = softmax_graph().compile(
                device="cpu", find=find, cache=cache(), policy=dt.Policy(deterministic=True)
            )
        assert plan.decision.choices[0].candidate.engine == "torch"
    with registered(dice):
        assert (
            Survey(dt.target("cpu"), dt.Policy(deterministic=True))
            .ask(plan.decision.regions[0])[0][0]
            .rejected
            == "not deterministic"
        )


# ---- what error is accepted


def region_of(write) -> dt.Region:
    g = dt.Graph()
    write(g).output("y")
    (region,) = fuse(g.ir())[0]
    return region


def test_errors_are_held_to_twice_torchs_and_what_rounding_allows():
    """A sum of many numbers rounds often, an elementwise result a few times; a promise is kept to
    the letter."""
    eps = 2**-23
    few = region_of(lambda g: g.silu(g.tensor("x", (64, 64))))
    many = region_of(lambda g: g.sum(g.tensor("x", (64, 1 << 16)), axes=-1))
    assert too_wrong(few, [2e-5], [1e-5], None) == ""
    assert "twice PyTorch's own" in too_wrong(few, [2.2e-5], [1e-5], None)
    assert too_wrong(few, [4 * eps], [0.0], None) == ""
    assert too_wrong(few, [9 * eps], [0.0], None)
    assert too_wrong(many, [16 * eps], [0.0], None) == ""
    assert too_wrong(many, [128 * eps], [0.0], None)
    assert too_wrong(few, [9 * eps], None, None) == ""  # held to torch's, which errs as well
    assert too_wrong(few, [20 * eps], None, None)
    assert "max_error" in too_wrong(many, [2e-9], [1e-3], 1e-9)
    assert too_wrong(few, [math.inf], [1e-5], None) and too_wrong(few, [math.nan], [1e-5], None)


def test_what_torch_rounds_before_it_widens_counts_where_results_are_held_to_its():
    """Gradients in 16 bits are widened for float32 weights. A kernel that stores its sums as they
    are is as far from torch as torch's rounding is, which is no fault of the kernel's."""

    def write(g, dtype="bf16"):
        grad, x = (g.tensor(v, (2, 64, 8, 8), dtype) for v in ("grad", "x"))
        return g.cast(g.conv_dw(grad, x, shape=(64, 64, 3, 3), padding=1), "f32")

    eps = 2**-7
    assert too_wrong(region_of(write), [eps / 2], None, None) == ""
    assert too_wrong(region_of(write), [2 * eps], None, None)
    assert too_wrong(region_of(write), [eps / 2], [0.0], None)  # held to float64 it would be
    assert too_wrong(region_of(partial(write, dtype="f32")), [eps / 2], None, None)


@pytest.fixture
def interruptible():
    """Ctrl-C as in a terminal, also where the tests run in the background and it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_counts_even_if_python_drops_it(cache, monkeypatch, interruptible):
    """As in a destructor: what was raised there is said to be ignored."""
    picked = []

    class Dropping:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # it arrives in here

    pick = find_module.Finder.pick

    def measuring(self, region):
        picked.append(region)
        found = pick(self, region)
        if len(picked) == 1:
            Dropping()
        return found

    monkeypatch.setattr(find_module.Finder, "pick", measuring)
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        compiled(ladder(8, 16, 24, 32), cache())
    assert len(picked) == 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
