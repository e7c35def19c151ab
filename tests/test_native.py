"""Regions of generated code in one native call: the same answers, on however many threads."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
import torch
from fakes import bit_equal, check_right, registered
from tolerances import SINGLE_LAYERS

import deuteron as dt
from deuteron.engines import BuildContext, Kernel, engine
from deuteron.plan.source import stretches

pytest.importorskip("llvmlite")

from deuteron.codegen import llvm, llvm_text, openmp, tape_driver

Feed = dict[str, torch.Tensor]


class Preferred:
    """A built-in engine that is chosen wherever it can run."""

    version = "1"

    def __init__(self, inner: str) -> None:
        self.inner, self.name = engine(inner), f"preferred_{inner}"
        self.refuse = self.inner.refuse

    def candidates(
        self, region: dt.Region, target: dt.Target, policy: dt.Policy
    ) -> list[dt.Candidate]:
        found = self.inner.candidates(region, target, policy)
        return [dt.Candidate(self.name, self.version, c.knobs) for c in found]

    def estimate(self, region: dt.Region, target: dt.Target, candidate: dt.Candidate) -> float:
        return 1e-12

    def build(self, region: dt.Region, candidate: dt.Candidate, ctx: BuildContext) -> Kernel:
        return self.inner.build(region, candidate, ctx)


@contextmanager
def generated() -> Iterator[None]:
    with ExitStack() as stack:
        for name in ("cpu_kernels", "cpu_gen"):
            stack.enter_context(registered(Preferred(name)))
        yield


def encoder() -> tuple[dt.Graph, Callable[[], Feed]]:
    """Views between products, a weight that is packed at every run, two results."""
    g = dt.Graph("encoder")
    x, w = g.tensor("x", (2, 20, 32)), g.tensor("w", (32, 32))

    def weight(*shape: int) -> dt.Sym:
        return g.constant(torch.randn(*shape) / 6)

    def heads(y: dt.Sym) -> dt.Sym:
        return g.permute(g.reshape(y, shape=(2, 20, 4, 8)), dims=(0, 2, 1, 3))

    h = g.layer_norm(x, g.constant(torch.rand(32)), g.constant(torch.randn(32)))
    q, k, v = (heads(g.linear(h, m)) for m in (weight(32, 32), w, weight(32, 32)))
    a = g.permute(g.attention(q, k, v, scale=0.3), dims=(0, 2, 1, 3))
    y = g.linear(g.reshape(a, shape=(2, 20, 32)), weight(32, 32), weight(32)) + x
    g.softmax(y, axis=-1).output("p")
    first = g.reshape(g.slice(y, axis=1, start=0, stop=1), shape=(2, 32))
    g.tanh(g.linear(first, weight(16, 32))).output("y")
    return g, lambda: {"x": torch.randn(2, 20, 32), "w": torch.randn(32, 32) / 6}


def network() -> tuple[dt.Graph, Callable[[], Feed]]:
    """A framed image, Winograd's algorithm in chunks or a product, a depthwise filter."""
    g = dt.Graph("network")
    x = g.tensor("x", (1, 3, 24, 24), layout="nhwc")

    def weight(*shape: int) -> dt.Sym:
        return g.constant(torch.randn(*shape) / 6)

    y = g.relu(g.conv(x, weight(16, 3, 3, 3), padding=1))
    y = g.relu(g.conv(y, weight(16, 16, 3, 3), padding=1)) + y
    y = g.relu(g.conv(y, weight(16, 1, 3, 3), bias=weight(16), padding=1, groups=16))
    g.mean(y, axes=(2, 3)).output("y")
    like = torch.channels_last
    return g, lambda: {"x": torch.randn(1, 3, 24, 24).contiguous(memory_format=like)}


GRAPHS = pytest.mark.parametrize("make", [encoder, network])


def planned(make: Callable[[], tuple[dt.Graph, Callable[[], Feed]]]):
    torch.manual_seed(0)
    g, feed = make()
    with generated():
        plan = g.compile(device="cpu")
        plan.run(feed())
    assert "\n    n0(arena" in plan.program.source
    return g, feed, plan


@GRAPHS
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_answers_are_right_and_stay(make, threads):
    g, feed, plan = planned(make)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        feeds = [feed() for _ in range(3)]
        results = [plan.run(f) for f in feeds]
    finally:
        torch.set_num_threads(before)
    for f, result in zip(feeds, results, strict=True):
        check_right(result, g.ir(), f)
        again = plan.run(f)
        assert all(bit_equal(again[name], out) for name, out in result.items())


@GRAPHS
def test_without_a_team(make, monkeypatch):
    monkeypatch.setattr(openmp, "runtime", lambda: None)
    g, feed, plan = planned(make)
    f = feed()
    check_right(plan.run(f), g.ir(), f)


@GRAPHS
def test_every_run_in_flight_has_words_of_its_own(make):
    _, feed, plan = planned(make)
    feeds = [feed() for _ in range(3)]
    alone = [plan.run(f) for f in feeds]
    wrong: list[int] = []

    def many(which: int) -> None:
        for _ in range(50):
            got = plan.run(feeds[which])
            if any(not bit_equal(got[name], out) for name, out in alone[which].items()):
                wrong.append(which)

    threads = [threading.Thread(target=many, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_every_region_stands_in_the_source():
    _, _, plan = planned(encoder)
    source = plan.program.source
    assert all(source.count(f"# {region.name}:") == 1 for region in plan.program.regions)
    views = [line for line in source.splitlines() if "permute" in line]
    assert views and all(line.startswith("    #") for line in views), "an address, not a call"


def test_a_view_that_others_read_is_made_as_well():
    g = dt.Graph()
    x = g.tensor("x", (4, 6))
    y = g.softmax(x, axis=-1)
    turned = g.permute(y, dims=(1, 0)).output("turned")
    g.softmax(turned, axis=-1).output("z")
    with generated():
        plan = g.compile(device="cpu")
        for _ in range(3):
            feed = {"x": torch.randn(4, 6)}
            check_right(plan.run(feed), g.ir(), feed)


def test_a_view_of_a_view_that_others_read_is_made_as_well():
    """Queries and keys, cut out of one product, are read by a native call and by others."""

    class Cosines(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(96, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k = self.linear(x).reshape(49, 64, 2, 3, 32).permute(2, 0, 3, 1, 4).unbind()
            q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
            return (q @ k.mT).tanh()

    module, x = Cosines().eval(), torch.randn(49, 64, 96)
    fast = dt.optimize(module, x, find=False)
    with torch.no_grad():
        first = fast(x)
        assert torch.equal(fast(x), first) and torch.allclose(first, module(x), atol=SINGLE_LAYERS)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("", []),
        ("o", [1]),
        ("nn", [2]),
        ("nvn", [3]),
        ("nvvo", [1, 1, 1, 1]),
        ("vnvnnvon", [1, 4, 1, 1, 1]),
    ],
)
def test_what_follows_each_other(kinds, found):
    names = {"n": "native", "v": "view", "o": "other"}
    got = stretches([names[k] for k in kinds])
    assert [len(part) for part in got] == found
    assert [i for part in got for i in part] == list(range(len(kinds)))


def test_a_stretch_ends_where_something_is_waited_for():
    assert stretches(["native", "view", "native", "native"], {3}) == [range(3), range(3, 4)]


# ---- one kernel for many sizes -------------------------------------------------------------------


def silu(g: dt.Graph, rows: int, columns: int) -> dt.Sym:
    return g.silu(g.tensor("x", (rows, columns)))


def layer_norm(g: dt.Graph, rows: int, columns: int) -> dt.Sym:
    scale = g.tensor("weight", (columns,))
    return g.layer_norm(g.tensor("x", (rows, columns)), scale, dims=1)


def sum_of_columns(g: dt.Graph, rows: int, columns: int) -> dt.Sym:
    return g.sum(g.sigmoid(g.tensor("x", (rows, columns))), axes=(0,))


def softmax_of_strided(g: dt.Graph, rows: int, columns: int) -> dt.Sym:
    x = g.slice(g.tensor("x", (rows, columns, 6)), axis=2, start=5, stop=6)
    return g.softmax(g.reshape(x, shape=(rows, columns)) * (1.0 / columns), axis=-1)


@pytest.mark.parametrize("make", [silu, layer_norm, sum_of_columns, softmax_of_strided])
def test_sizes_are_numbers_of_the_call(make, monkeypatch):
    """Machine code is made once for all sizes that leave no rest, and is right for each."""
    sizes, texts = [(64, 768), (4096, 1280), (80, 1536), (300, 1792)], set[str]()
    compile_text = llvm.compile_text

    def compile_and_note(text: str) -> bytes:
        assert (rows, columns) == sizes[0] or text in texts, "other sizes are other code"
        texts.add(text)
        return compile_text(text)

    tape_driver.driver()  # which every plan needs
    monkeypatch.setattr(llvm, "_kept", lambda name: None)
    monkeypatch.setattr(llvm, "compile_text", compile_and_note)
    for rows, columns in sizes:
        g = dt.Graph()
        make(g, rows, columns).output("y")
        with generated():
            plan = g.compile(device="cpu")
        feed = {name: torch.randn(t.shape) for name, t in plan.inputs.items()}
        check_right(plan.run(feed), g.ir(), feed, columns)
    assert texts


@pytest.mark.parametrize("number", [0.1, -0.0, math.pi * 1e5, 1e39, -1e39, math.inf, math.nan])
def test_constants_are_rounded_to_their_type(number):
    kinds = {llvm_text.F16: torch.half, llvm.F32: torch.float, llvm.F64: torch.double}

    def make(module):
        c = llvm.Code(module, "f", [llvm.PTR])
        for k, kind in enumerate(kinds):
            wide = c.b.fpext(llvm_text.Constant(kind, number), llvm.F64)
            c.b.store(wide, c.at(c.args[0], k, of=llvm.F64))
        c.ret()

    found = torch.zeros(3, dtype=torch.float64)
    address = llvm.load(f"constants {number}", make)["f"]
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)(found.data_ptr())
    exact = torch.tensor(number, dtype=torch.float64)
    assert bit_equal(found, torch.stack([exact.to(kind).double() for kind in kinds.values()]))


def test_views_one_after_another_are_shown_by_one_call_wherever_an_input_lies():
    g = dt.Graph("views")
    x = g.tensor("x", (4, 10, 6))
    part = g.slice(g.reshape(g.slice(x, axis=1, start=2, stop=8), shape=(4, 3, 2, 6)), 2, 1, 2)
    g.permute(part, dims=(3, 0, 1, 2)).output("part")
    plan = g.compile(device="cpu")
    for lead in (0, 7):
        x = torch.arange(240.0 + lead)[lead:].view(4, 10, 6)
        want = x[:, 2:8].reshape(4, 3, 2, 6)[:, :, 1:2].permute(3, 0, 1, 2)
        for _ in range(3):
            found = plan.run(x=x)["part"]
            assert torch.equal(found, want) and found.data_ptr() == want.data_ptr()
    assert len(plan.program.steps) == 1 and plan.program.steps[0].view is not None


@torch.no_grad()
def test_views_of_what_never_changes_are_made_once():
    class Onto(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(3))

        def forward(self, x, i):
            ones = self.weight.expand(4, 3)
            return torch.kthvalue(ones, 2).values, x.scatter(0, i, ones)

    module, x = Onto(), torch.randn(4, 3)
    i = torch.randint(0, 4, (4, 3))
    fast = dt.optimize(module, (x, i), find=False)
    for _ in range(3):
        for found, want in zip(fast(x, i), module(x, i), strict=True):
            assert torch.equal(found, want)
    known = [step.view.known for step in fast.plan.program.steps if step.view is not None]
    assert len(known) == 1 and known[0] is not None
