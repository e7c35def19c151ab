"""Kernels built by other processes: found by this one, without a GPU; nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

import deuteron as dt
from deuteron.engines import Candidate
from deuteron.ir.graph import Attrs
from deuteron.ir.region import Region
from deuteron.passes import fuse
from deuteron.plan import builders, find
from deuteron.plan.builders import BUILT, Builders
from deuteron.plan.cache import Cache
from deuteron.plan.choose import Choice, Option, Survey, choose, heuristic
from deuteron.plan.search import begin, search
from deuteron.policy import Policy

pytest.importorskip("triton")

from triton.backends.nvidia.compiler import CUDABackend

H200 = dt.target("h200")


def first_choices(write) -> list[tuple[Region, Candidate]]:
    g = dt.Graph()
    write(g).output("y")
    (region,) = fuse(g.ir())[0]
    options, _ = Survey(H200, Policy()).ask(region)
    return [(region, o.candidate) for o in options if o.candidate.engine in BUILT][:1]


def built(pool: Builders, region: Region, candidate: Candidate) -> bool:
    return -1 in pool._built and pool.is_built(region, candidate)


def silu(g):
    return g.silu(g.tensor("x", (1024, 1024), "f16"))


def layer_norm_grad(g):
    x, y = g.tensor("x", (512, 2048), "bf16"), g.tensor("y", (512, 2048), "bf16")
    return g.layer_norm_grad(y, x, dims=1)


@pytest.mark.parametrize("write", [layer_norm_grad, pytest.param(silu, marks=pytest.mark.sweep)])
def test_what_is_built_elsewhere_is_found_here(write, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pool = Builders(2)
    try:
        for region, candidate in first_choices(write):
            pool.ask(region, candidate, H200, Policy(), 90)
            assert pool.wait(partial(built, pool, region, candidate), 100)
            assert not pool.has_failed(region, candidate)
            pool._asked.clear()
            pool.ask(region, candidate, replace(H200, shared_bytes=1), Policy(), 90)
            assert pool.wait(partial(pool.is_built, region, candidate), 100)
            assert pool.has_failed(region, candidate) == (write is layer_norm_grad)
    finally:
        pool.close()
    assert [*tmp_path.rglob("*.cubin")], "compiled to the end"


def test_what_cannot_be_built_is_answered():
    """Whoever asked then builds it and meets the error. What nobody waits for any more is dropped,
    and not in the way of what is."""
    pool = Builders(1)
    try:
        (region, candidate), *_ = first_choices(silu)
        ones = [Candidate(candidate.engine, candidate.version, {"kind": k}) for k in "abcd"]
        for wrong in ones:
            pool.ask(region, wrong, H200, Policy(), 90)
        pool.forget(but={(region.text, ones[2])})
        assert [pool.is_asked(region, wrong) for wrong in ones] == [False, False, True, False]
        pool.ask(region, ones[3], H200, Policy(), 90)
        assert all(pool.wait(partial(built, pool, region, wrong), 100) for wrong in ones[2:])
        assert pool._built == {-1, 2, 4}  # of the first two none was begun
    finally:
        pool.close()


def test_a_kernel_that_tasks_share_is_compiled_once(tmp_path, monkeypatch):
    """Sizes that make no difference to the code: the second task waits for the first, which does
    not keep a third from being built."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    make, made = CUDABackend.make_ptx, tmp_path / "made"

    def together(backend, *how):  # in processes that are forked from this one
        with open(made, "a") as file:
            file.write("kernel\n")
        begun = len(made.read_text().split())  # the first is what they warm up with
        end = time.monotonic() + 60
        while 1 < begun < 3 and time.monotonic() < end:
            time.sleep(0.01)
            begun = len(made.read_text().split())
        return make(backend, *how)

    monkeypatch.setattr(CUDABackend, "make_ptx", together)
    pool = Builders(2)
    sizes = (1024, 1024), (2048, 512), (512, 2048)
    asked = [first_choices(lambda g, s=s: g.silu(g.tensor("x", s, "f16")))[0] for s in sizes]
    asked += first_choices(lambda g: g.gelu(g.tensor("x", (1024, 1024), "f16")))
    try:
        for region, candidate in asked:
            pool.ask(region, candidate, H200, Policy(), 90)
        assert pool.wait(lambda: all(built(pool, *one) for one in asked), 50)
    finally:
        pool.close()
    assert len(made.read_text().split()) == 3


SCRIPT = """
import time
from deuteron.plan.builders import Builders
print(Builders(2).pid, flush=True)
time.sleep(100)
"""


def test_builders_keep_no_files_and_end_when_nobody_asks(monkeypatch, tmp_path):
    """They are forked, and what the script has open is none of their business."""
    monkeypatch.setattr(builders, "IDLE_S", 0.1)
    with open(tmp_path / "open", "w"):
        pool = Builders(2)
        try:
            assert pool.wait(lambda: pool.is_ready, 100)
            with suppress(OSError):  # they may have ended by now
                held = [os.readlink(fd) for fd in Path(f"/proc/{pool.pid}/fd").iterdir()]
                assert not [name for name in held if str(tmp_path) in name]
            assert pool.wait(lambda: pool.is_gone, 100)
            (region, candidate), *_ = first_choices(silu)
            pool.ask(region, candidate, H200, Policy(), 90)
            assert pool.is_built(region, candidate)  # by this process
        finally:
            pool.close()


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_builders_end_with_the_process_that_started_them():
    ours = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    assert ours.stdout is not None
    theirs = int(ours.stdout.readline())
    ours.send_signal(signal.SIGKILL)
    ours.communicate()
    for _ in range(200):
        if not Path(f"/proc/{theirs}").exists() or _is_dead(theirs):
            return
        time.sleep(0.1)
    os.kill(theirs, signal.SIGKILL)
    raise AssertionError("it is still there")


def _is_dead(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except OSError:
        return True


class Pool:
    """Builders that were asked for everything, and have built what the test says."""

    def __init__(self, built: bool) -> None:
        self.built, self.asked = built, {}  # in the order in which it was asked for

    def ask(self, region, candidate, *how):
        self.asked[region.text, candidate] = how

    def is_asked(self, region, candidate):
        return (region.text, candidate) in self.asked

    def is_built(self, region, candidate):
        return self.built or not self.is_asked(region, candidate)

    def has_failed(self, region, candidate):
        return candidate in self.failed

    def wait(self, enough, seconds=None):
        return enough()

    is_ready, failed = True, ()


@pytest.mark.parametrize("built", [True, False])
@pytest.mark.parametrize("budget_s", [5.0, 0.0])
def test_what_is_not_built_is_not_waited_for(built, budget_s, monkeypatch, tmp_path):
    """Measured or not, a region runs the best of what is there, unless something that came too late
    is predicted to be far better than what was measured."""
    monkeypatch.setattr(find, "BUILT", ("cpu_gen",))
    monkeypatch.setattr(find, "HOPED", 20.0)
    monkeypatch.setattr(find, "arch_of", lambda device: 90)
    as_predicted = lambda raced, *_: {i: float(i + 1) for i in raced}  # noqa: E731
    monkeypatch.setattr(find, "timed", as_predicted)
    g = dt.Graph()
    x = g.tensor("x", (64, 1024))
    g.gelu(g.silu(x) * 2.0 + x).output("y")
    regions = fuse(g.ir())[0]
    survey, cpu = Survey(dt.target("cpu"), Policy()), torch.device("cpu")
    finder = find.Finder(survey, cpu, {}, Cache(tmp_path / "cache"), budget_s, pool=Pool(built))
    notes = search(regions, heuristic(survey), finder, None)
    choice = finder.pick(regions[0])
    hoped = bool(budget_s) and not built  # all that was measured took a second and more
    assert (choice.candidate.engine == "cpu_gen") == (built or hoped)
    assert (choice.option.measured_s is None) == (budget_s == 0.0 or hoped)
    assert ("predicted much faster" in choice.note) == hoped
    left = {o.rejected for o in choice.options if o.candidate.engine == "cpu_gen"}
    assert left == ({find.NOT_REACHED} if budget_s and not built else {""})
    assert any(("not measured" if not budget_s else "measured: 1") in note for note in notes)


@pytest.mark.parametrize("taps", [(3, 1), (5, 2)])
def test_weights_of_lone_channels_are_not_left_to_a_library_that_was_not_measured(taps, tmp_path):
    """cuDNN compiles a kernel for each size of these as well, in this process, or takes a slow one;
    so it is neither searched nor waited for, and where nobody builds elsewhere it runs them."""
    (k, stride), channels = taps, 120
    g = dt.Graph()
    dy = g.tensor("dy", (128, channels, 28, 28), "bf16", layout="nhwc")
    x = g.tensor("x", (128, channels, 28 * stride, 28 * stride), "bf16", layout="nhwc")
    how = {"padding": k // 2, "stride": stride, "groups": channels}
    g.cast(g.conv_dw(dy, x, shape=(channels, 1, k, k), **how), "f32").output("y")
    (region,), _ = fuse(g.ir())
    survey, cpu = Survey(dt.target("h200"), Policy()), torch.device("cpu")
    for pool, chosen in ((Pool(False), "depthwise_grad"), (None, None)):
        finder = find.Finder(survey, cpu, {}, Cache(tmp_path / "cache"), 0.0, pool=pool)
        assert finder.pick(region).candidate.knobs.get("recipe") == chosen
    (plain,) = (o for o in survey.ask(region)[0] if o.candidate.engine == "torch")
    assert plain.candidate.build_s > find.WAIT_S
    whole = Survey(dt.target("h200"), Policy()).ask(region.part("dw", region.nodes[:1], 0))
    assert "vendor_fused" in dict(whole[1])


def test_a_part_that_was_measured_slow_does_not_speak_for_the_whole():
    """Torch's operators for all of a region are at least as slow as it was measured to be for a
    part, even if they are predicted to be quicker."""
    g = dt.Graph()
    x = g.tensor("x", (8, 16, 28, 28), "bf16", layout="nhwc")
    w = g.tensor("w", (32, 16, 3, 3), "bf16", layout="nhwc")
    each = [g.tensor(name, (32,), "f32") for name in "mvab"]
    for i, value in enumerate(g.batch_norm_train(g.conv(x, w, padding=1), *each)):
        value.output(f"y{i}")
    (region,), _ = fuse(g.ir(), gates=True)
    assert region.ops == ("conv", "batch_norm_train")
    theirs, ours = Candidate("torch", "1"), Candidate("triton_kernels", "1")
    options = {
        ("conv", "batch_norm_train"): [Option(theirs, 280e-6)],
        ("conv",): [Option(theirs, 140e-6, measured_s=281e-6)],
        ("batch_norm_train",): [Option(ours, 46e-6), Option(theirs, 90e-6)],
    }

    def pick(region):
        return Choice(region, options[region.ops][0], tuple(options[region.ops]))

    survey = Survey(dt.target("h200"), Policy())
    assert [c.candidate for c in choose(region, pick, survey)] == [theirs, ours]
    options[region.ops] = [Option(theirs, 280e-6, measured_s=280e-6)]  # which would be a surprise
    assert [c.candidate for c in choose(region, pick, survey)] == [theirs]


def test_what_is_built_elsewhere_may_take_its_time(monkeypatch, tmp_path):
    """Of a region that our kernels take whole, the product by itself is a library's; and what takes
    little is built in one way."""
    monkeypatch.setattr(find, "arch_of", lambda device: 90)
    monkeypatch.setattr(import_module("deuteron.plan.search"), "SMALL", 0.5)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(find.Finder, "wait", stop)
    g = dt.Graph()
    t = torch.empty((8, 64, 56, 56), device="meta").contiguous(memory_format=torch.channels_last)
    x = g.tensor("x", t.shape, "f16", strides=t.stride())
    w = g.tensor("w", (64, 64, 3, 3), "f16", strides=(576, 1, 192, 64))
    g.silu(g.conv(x, w, padding=1)).output("y")
    g.exp(g.tensor("z", (64,), "f16")).output("e")
    regions = fuse(g.ir())[0]
    survey, pool = Survey(H200, Policy()), Pool(False)
    finder = find.Finder(survey, torch.device("cpu"), {}, Cache(tmp_path / "c"), 5.0, pool=pool)
    with pytest.raises(KeyboardInterrupt):
        search(regions, heuristic(survey), finder, None)
    of = {r.ops: [c for text, c in pool.asked if text == r.text] for r in regions}
    assert len(of["conv", "silu"]) == 2 and len(of["exp",]) == 1
    assert "conv_hopper" in {c.knobs["recipe"] for c in of["conv", "silu"]}
    assert not [c for text, c in pool.asked if "conv(" in text and "silu" not in text]


class Waited(Pool):
    """Builders that have built convolutions when they are waited for, but one candidate of each."""

    def __init__(self) -> None:
        super().__init__(True)
        self.order, self.waited = {}, False

    def ask(self, region, candidate, *how):
        super().ask(region, candidate)
        self.order.setdefault(region.ops, candidate)

    def is_built(self, region, candidate):
        first = self.order.get(region.ops)
        return "conv" not in region.ops or (self.waited and candidate == first)

    def wait(self, enough, seconds=None):
        self.waited = self.waited or not enough()
        return enough()


@pytest.mark.parametrize("budget_s", [0.3, 50.0])
def test_what_may_fall_most_is_measured_first(budget_s, monkeypatch, tmp_path):
    """A convolution that a library runs slowly is less of the time than a norm whose kernel is
    chosen already, and comes later. It is waited for, unless there is time for both, and its second
    candidate is not waited for. Views and what has one candidate come last."""
    monkeypatch.setattr(find, "arch_of", lambda device: 90)
    monkeypatch.setattr(find.Finder, "inputs", lambda self, region: {})
    monkeypatch.setattr(find, "TIMING_S", {"cpu": 0.2})
    measured = []

    def measure(self, region, options):
        measured.append(region.ops)
        return find.Measured([replace(o, measured_s=o.predicted_s) for o in options], 0.0, "torch")

    monkeypatch.setattr(find.Finder, "_measure", measure)
    g = dt.Graph()
    t = torch.empty((8, 256, 28, 28), device="meta").contiguous(memory_format=torch.channels_last)
    x = g.tensor("x", t.shape, "f16", strides=t.stride())
    w = g.tensor("w", (256, 256, 3, 3), "f16", strides=(2304, 1, 768, 256))
    g.conv(x, w, padding=24, dilation=24).output("y")
    g.layer_norm(g.tensor("z", (1 << 17, 1024), "f16")).output("n")
    g.permute(g.tensor("p", (8, 8)), dims=(1, 0)).output("q")
    regions, survey, pool = fuse(g.ir())[0], Survey(H200, Policy()), Waited()
    cache = Cache(tmp_path / "c")
    finder = find.Finder(survey, torch.device("cpu"), {}, cache, budget_s, pool=pool)
    search(regions, heuristic(survey), finder, None)
    pairs = [("conv",), ("layer_norm",)]
    assert pool.waited
    assert [ops for ops in measured if ops in pairs][:2] == pairs[:: 1 if budget_s < 1 else -1]
    assert budget_s > 1 or ("permute",) not in measured[:2]


def test_what_libraries_are_slowest_at_is_built_first(monkeypatch, tmp_path):
    """A second kernel for a convolution saves less than the only one for a norm, though the first
    saves more; and what is probably run otherwise comes last."""
    monkeypatch.setattr(find, "arch_of", lambda device: 90)
    g = dt.Graph()
    x = g.tensor("x", (2, 256, 28, 28), "f16", layout="nhwc")
    w = g.tensor("w", (256, 256, 3, 3), "f16", layout="nhwc")
    g.conv(x, w, padding=24, dilation=24).output("y")
    for name, rows in (("few", 8192), ("many", 1 << 15)):
        g.layer_norm(g.tensor(name, (rows, 1024), "f16")).output(name)
    regions, survey = fuse(g.ir())[0], Survey(H200, Policy())
    conv, few, many = (region.text for region in regions)

    def order(unlikely):
        pool, cache = Pool(False), Cache(tmp_path / "c")
        finder = find.Finder(survey, torch.device("cpu"), {}, cache, 5.0, pool=pool)
        finder.unlikely = frozenset(unlikely)
        begin(regions, heuristic(survey), finder)
        return [text for text, _ in pool.asked]

    assert order([]) == [many, conv, few, conv]
    assert order([conv]) == [many, few, conv, conv]


class Slow(Pool):
    """Builders that have built the first candidate of a region, and others once they are waited
    for."""

    def __init__(self) -> None:
        super().__init__(True)
        self.waits, self.of = 0, {}

    def ask(self, region, candidate, *how):
        super().ask(region, candidate)
        self.of.setdefault(region.text, []).append(candidate)

    def is_built(self, region, candidate):
        return self.waits > 0 or candidate in self.of.get(region.text, [candidate])[:1]

    def wait(self, enough, seconds=None):
        self.waits += 1
        return enough()


def test_what_is_built_late_races_all_the_same(monkeypatch, tmp_path):
    """Where the budget allows it, also if it takes little of all time: then another search
    remembers all that was offered."""
    monkeypatch.setattr(find, "arch_of", lambda device: 90)

    def measure(self, region, options):
        states = [(o, self._state(region, o)) for o in options]
        done = [replace(o, rejected=s, measured_s=None if s else o.predicted_s) for o, s in states]
        return find.Measured(done, 0.0, "torch")

    monkeypatch.setattr(find.Finder, "_measure", measure)
    monkeypatch.setattr(find.Finder, "inputs", lambda self, region: {})
    monkeypatch.setattr(sys.modules[search.__module__], "WORTH", 2.0)  # nothing takes so much
    g = dt.Graph()
    t = torch.empty((4, 64, 56, 56), device="meta").contiguous(memory_format=torch.channels_last)
    x = g.tensor("x", t.shape, "f16", strides=t.stride())
    w = g.tensor("w", (64, 64, 3, 3), "f16", strides=(576, 1, 192, 64))
    g.conv(x, w, padding=1).output("y")
    regions, survey, cache = fuse(g.ir())[0], Survey(H200, Policy()), Cache(tmp_path / "c")
    finder = find.Finder(survey, torch.device("cpu"), {}, cache, 50.0, pool=Slow())
    search(regions, heuristic(survey), finder, None)
    assert max(map(len, finder.pool.of.values())) > 1
    assert find.NOT_REACHED not in {o.rejected for c in finder.known.values() for o in c.options}


@pytest.mark.parametrize("raced", ["torch", "triton_gen"])
def test_what_nobody_built_is_taken_where_only_libraries_raced(raced, tmp_path):
    """A part of a region that was to be run whole, whose own kernel was not built: torch's
    operators are many times as slow as it is predicted to be."""
    (region, _), *_ = first_choices(silu)
    made = [
        Candidate(engine, "1", Attrs({"n": n})) for n, engine in enumerate(("triton_gen", raced))
    ]
    aside = Option(made[0], 1e-5, rejected=find.SET_ASIDE)
    measured = find.Measured([aside, Option(made[1], 1e-5, measured_s=1e-4)], None, "")
    survey = Survey(H200, Policy(), {region.text: ((aside,), ())})
    cache = Cache(tmp_path / "cache")
    finder = find.Finder(survey, torch.device("cpu"), {}, cache, 5.0, pool=Pool(True))
    base = Choice(region, aside, (aside,), ())
    chosen = finder._decide(base, measured)
    assert chosen.candidate == made[0 if raced == "torch" else 1]
    assert not chosen.option.rejected


@pytest.mark.parametrize(("kinds", "built"), [(("conv", "conv"), 1), (("conv", "product"), 2)])
def test_other_tiles_of_a_kernel_wait(kinds, built, tmp_path):
    """Unless they are of another kernel, whose prediction strays in another way; where time is
    left, they are built all the same."""
    (region, _), *_ = first_choices(silu)
    how = [{"recipe": kind, "rows": k} for k, kind in enumerate(kinds)]
    made = [Candidate("triton_kernels", "1", Attrs(knobs)) for knobs in how]
    options = tuple(map(Option, made, (1.0, 1.1)))
    survey = Survey(H200, Policy(), {region.text: (options, ())})
    cache = Cache(tmp_path / "cache")
    finder = find.Finder(survey, torch.device("cpu"), {}, cache, 5.0, pool=Pool(True))
    assert finder.first(region) == built
    assert [o.candidate for o in finder._in_order(region)] == made


@pytest.mark.parametrize(("seen", "built"), [(3, True), (2, True), (3, False)])
def test_a_kernel_that_was_measured_elsewhere_runs_what_was_not_reached(seen, built, tmp_path):
    """The budget did not reach a region. Its kernel is one that only measurements may choose, but
    several of its kind were measured in this search, it is built, and it is far ahead."""
    (region, _), *_ = first_choices(silu)
    ours = Option(Candidate("triton_kernels", "1", by_estimate=False), 1e-5)
    options = ours, Option(Candidate("torch", "1"), 3e-5)
    survey = Survey(H200, Policy(), {region.text: (options, ())})
    cache, pool = Cache(tmp_path / "cache"), Pool(built)
    pool.ask(region, ours.candidate)
    finder = find.Finder(survey, torch.device("cpu"), {}, cache, 0.0, pool=pool)
    for _ in range(seen):
        finder.learned.add(region, replace(ours, measured_s=1.5e-5))
    chosen = finder.pick(region)
    assert (chosen.candidate == ours.candidate) == (seen == 3 and built)
    assert chosen.option.measured_s is None and "not measured" in chosen.note


@pytest.mark.parametrize(
    ("torch_s", "pooled", "fits"),
    [(4e-5, True, True), (3e-5, True, True), (4e-5, False, True), (4e-5, True, False)],
)
def test_a_kernel_far_ahead_runs_what_was_not_reached(torch_s, pooled, fits, tmp_path):
    """As DeepLabV3's far-apart windows, of which cuDNN took several times as long: what only
    measurements may choose is chosen without where even a stray estimate leaves it ahead, and
    builders are there to build it."""
    (region, _), *_ = first_choices(silu)
    ours = Option(Candidate("triton_kernels", "1", build_s=3.0, by_estimate=False), 1e-5)
    options = ours, Option(Candidate("torch", "1"), torch_s)
    survey = Survey(H200, Policy(), {region.text: (options, ())})
    pool = Pool(False) if pooled else None
    if not fits:
        pool.ask(region, ours.candidate)
        pool.failed = (ours.candidate,)
    finder = find.Finder(survey, torch.device("cpu"), {}, Cache(tmp_path / "c"), 0.0, pool=pool)
    chosen = finder.pick(region)
    assert (chosen.candidate == ours.candidate) == (torch_s == 4e-5 and pooled and fits)


class Late(Pool):
    """Builders that have not started when they are first waited for."""

    def __init__(self, starts: bool) -> None:
        super().__init__(True)
        self.starts, self.is_ready = starts, False

    def is_built(self, region, candidate):
        return self.is_ready or not self.is_asked(region, candidate)

    def wait(self, enough, seconds=None):
        self.is_ready = self.starts
        return enough()


@pytest.mark.parametrize("starts", [True, False])
def test_builders_that_start_late_are_waited_for(starts, monkeypatch, tmp_path):
    """What takes its time while they start leaves some of the budget for measuring; if they never
    start, this process builds."""
    monkeypatch.setattr(find, "BUILT", ("cpu_gen",))
    monkeypatch.setattr(find, "arch_of", lambda device: 90)
    g = dt.Graph()
    x = g.tensor("x", (64, 1024))
    g.gelu(g.silu(x) * 2.0 + x).output("y")
    regions = fuse(g.ir())[0]
    survey, cpu, done = Survey(dt.target("cpu"), Policy()), torch.device("cpu"), []
    pool = Late(starts)

    def meanwhile() -> None:
        done.append(len(pool.asked))
        finder.begin -= 100.0  # as if it had taken that long

    given = survey, cpu, {}, Cache(tmp_path / "cache"), 5.0
    finder = find.Finder(*given, meanwhile=meanwhile, pool=pool)
    notes = search(regions, heuristic(survey), finder, None)
    choice = finder.pick(regions[0])
    assert done == [1] and (finder.pool is pool) == starts  # ordered, and nothing measured yet
    assert choice.option.measured_s is not None and "regions measured: 1" in notes[-1]


def test_what_was_chosen_stays_if_a_second_round_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(find, "BUILT", ("cpu_gen",))
    monkeypatch.setattr(find, "arch_of", lambda device: 90)
    g = dt.Graph()
    g.silu(g.tensor("x", (64, 1024)) * 2.0).output("y")
    (region,) = fuse(g.ir())[0]
    survey, cpu = Survey(dt.target("cpu"), Policy()), torch.device("cpu")
    finder = find.Finder(survey, cpu, {}, Cache(tmp_path / "cache"), 5.0, pool=Pool(True))
    first = finder.pick(region)
    aside = [replace(o, rejected=find.SET_ASIDE, measured_s=None) for o in first.options]
    finder.known[region.text] = replace(first, options=tuple(aside))

    def fails(*args):
        raise RuntimeError

    monkeypatch.setattr(finder, "_measure", fails)
    finder.again(region, find.SET_ASIDE)
    assert finder.pick(region).option == first.option
    monkeypatch.setattr(finder.pool, "wait", fails)
    finder.pool.built = False
    finder.known.clear()
    monkeypatch.setattr(finder, "_remembered", lambda *_: None)
    assert "not measured" in finder.pick(region).note
