"""Every engine on every operator's samples, held against the reference in float64.

The cases come from the operator table and the list of engines; nothing here knows a kernel. The
longer chains that fused calls claim are in test_engines_fused.py.
"""

from __future__ import annotations

import importlib
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import FakeEngine, registered
from sweeps import one_in
from test_ops import one_node_graph
from tolerances import allowed, error

import deuteron as dt
from deuteron.engines import BuildContext, Candidate, Engine
from deuteron.engines.roofline import region_cost
from deuteron.errors import EngineError
from deuteron.ir import Region, TensorType
from deuteron.ir.types import same_strides
from deuteron.ops import TABLE, Fusion, OpDef
from deuteron.ops.evaluate import evaluate
from deuteron.passes import fuse
from deuteron.plan.choose import Survey
from deuteron.plan.tensors import poisoned
from deuteron.policy import Policy
from deuteron.target import names, target

CPU = torch.device("cpu")
FLOATS = ("f32", "f16", "bf16", "f64")
HEAVY = (Fusion.REDUCTION, Fusion.COMPLEX, Fusion.OPAQUE)
room = importlib.import_module("deuteron.engines")  # dt.engines is the function
PART = 16  # of the candidates that compile, one sample in so many is tried in each type
ENGINES = [e for e in room.BUILT_IN if e.name != "inductor"]

Tensors = dict[str, torch.Tensor]


def regions_of(op: OpDef, kind: str) -> Iterator[tuple[str, Region, Tensors]]:
    """One-node regions of the operator's samples; weights as inputs and as constants."""
    slots = [slot.strip("*?") for slot in op.inputs]
    for sample in op.samples():
        graph, feed = one_node_graph(op, sample, sample.tensors(kind))
        anchor = 0 if op.fusion in HEAVY else None
        fixed = {f"x{i}" for i, slot in enumerate(slots) if slot in ("weight", "bias")}
        yield str(sample), Region(graph, frozenset(), anchor), feed
        if "weight" in slots:
            yield f"{sample}, fixed", Region(graph, frozenset(fixed & feed.keys()), anchor), feed


def run(engine: Engine, candidate: Candidate, region: Region, feed: Tensors) -> list[torch.Tensor]:
    """What the built candidate answers. A kernel that writes is handed outputs full of nan."""
    fixed = {v: feed[v] for v in region.constants}
    kernel = engine.build(region, candidate, BuildContext(target("cpu"), CPU, Policy(), fixed))
    before = {v: t.clone() for v, t in feed.items()}
    args = [feed[v] for v in region.inputs]
    types = [region.graph.types[v] for v in region.outputs]
    assert kernel.workspace >= 0
    with torch.no_grad():
        if kernel.writes:
            outs = [poisoned(t, CPU) for t in types]
            kernel.fill(args, outs)
        else:
            result = kernel.fn(*args)
            outs = list(result) if isinstance(result, tuple) else [result]
    for out, kind in zip(outs, types, strict=True):
        got = TensorType.from_tensor(out)
        assert (got.shape, got.dtype) == (kind.shape, kind.dtype)
        if engine.name == "torch":
            assert same_strides(kind.shape, got.strides, kind.strides), (got, kind)
    for name, t in before.items():
        same = [u.float() if u.element_size() == 1 else u for u in (feed[name], t)]
        assert torch.equal(*(u.nan_to_num() for u in same)), f"{name} was written to"
    return outs


class Answers:
    """What a region must give: exactly, and what torch's rounding may make of it."""

    def __init__(self, region: Region, feed: Tensors) -> None:
        names = [name for name, _ in region.graph.outputs]
        exact, plain = evaluate(region.graph, feed, float64=True), evaluate(region.graph, feed)
        self.exact = [exact[name] for name in names]
        self.off = [error(plain[name], exact[name]) for name in names]
        elements = sum(t.numel() for t in self.exact)
        self.reduced = int(region_cost(region).flops / max(1, elements))


def right(
    engine: Engine,
    candidate: Candidate,
    region: Region,
    feed: Tensors,
    answers: Answers | None = None,
) -> None:
    """The candidate is at most twice as wrong as torch."""
    want = answers or Answers(region, feed)
    for out, exact, off in zip(
        run(engine, candidate, region, feed), want.exact, want.off, strict=True
    ):
        assert error(out, exact) <= allowed(off, out.dtype, want.reduced), candidate


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("op", TABLE.values(), ids=list(TABLE))
def test_every_engine_on_every_sample(op, kind):
    """In float32; in other types all of products, whose kernels depend on them, and a few else."""
    most = None if kind == "f32" or op.fusion is Fusion.COMPLEX else 4
    for i, (note, region, feed) in enumerate(islice(regions_of(op, kind), most)):
        if kind == "f64" and "offset" in note:
            continue  # the reference, itself in float64, is no more exact than the engines
        try:
            answers = Answers(region, feed)
        except (RuntimeError, NotImplementedError) as problem:
            assert "not implemented for" in str(problem), note  # torch has no such kernel
            continue
        for engine in ENGINES:
            if engine.refuse(region, target("cpu"), Policy()) is not None:
                continue
            for candidate in engine.candidates(region, target("cpu"), Policy()):
                if candidate.build_s and (i + FLOATS.index(kind)) % PART:
                    continue
                try:
                    right(engine, candidate, region, feed, answers)
                except AssertionError as fault:
                    raise AssertionError(f"{candidate} on {op.name} {note}: {fault}") from fault


# ---- refusals and estimates ----------------------------------------------------------------------


def test_of_a_table_only_the_rows_that_are_looked_up_cost_bytes():
    g = dt.Graph("look up")
    table, index = g.tensor("table", (1000, 8)), g.tensor("index", (3,), "i64")
    shift = g.tensor("shift", (8,))
    (g.embedding(table, index) + shift).output("y")
    (region,), _ = fuse(g.ir())
    assert region_cost(region).bytes == 3 * 8 + 4 * (3 * 8 + 8 + 3 * 8)


@lru_cache
def everything() -> tuple[Region, ...]:
    """Regions of all samples, and a few longer ones."""
    found = [region for op in TABLE.values() for _, region, _ in regions_of(op, "f32")]
    g = dt.Graph()
    x, w = (
        g.tensor("x", (2, 8, 9, 9), "f16", layout="nhwc"),
        g.constant(torch.randn(8, 8, 3, 3).half()),
    )
    y = g.relu(g.conv(x, w, padding=12, dilation=12) + x)
    g.softmax(g.exp(g.reshape(y, shape=(16, 81)))).output("y")
    return (*found, *fuse(g.ir())[0])


@pytest.mark.parametrize("batch", [(), (3, 4)])
def test_torch_is_priced_by_how_matrices_lie(batch):
    """Where a machine takes longer to multiply by what lies column by column, as was measured."""
    slow = replace(target("cpu"), by_columns=2e-4)

    def seconds(*turned: int) -> float:
        g = dt.Graph()
        rows = torch.empty(*batch, 32, 32)
        orders = [(rows.mT if i in turned else rows).stride() for i in range(2)]
        x, y = (g.tensor(f"x{i}", rows.shape, strides=order) for i, order in enumerate(orders))
        g.matmul(x, y).output("out")
        region = fuse(g.ir())[0][0]
        torchs = next(e for e in room.BUILT_IN if e.name == "torch")
        return torchs.estimate(region, slow, torchs.candidates(region, slow, Policy())[0])

    def linear(features: int) -> float:
        g = dt.Graph()
        x, w = g.tensor("x", (*batch, 32, features)), g.tensor("w", (32, features))
        g.linear(x, w).output("out")
        (region,), _ = fuse(g.ir())
        torchs = next(e for e in room.BUILT_IN if e.name == "torch")
        way = torchs.candidates(region, slow, Policy())[0]
        usual = torchs.estimate(region, replace(slow, by_columns=0.0), way)
        return torchs.estimate(region, slow, way) - usual

    assert linear(9) == pytest.approx(2e-4)  # one product of all rows
    assert linear(8) == 0.0  # torch does that by itself
    matrices = math.prod(batch)
    assert seconds(1) - seconds() == pytest.approx(2e-4 * matrices)
    assert seconds(0) == seconds(0, 1) == seconds()


def test_torch_clamps_whole_numbers_where_they_are():
    g = dt.Graph()
    g.clamp(g.tensor("x", (7,), "i64") - 1, min=0, max=3).output("y")
    plan = g.compile(device="cpu", policy=Policy(engines="torch"))
    assert plan.run(x=torch.arange(-2, 5))["y"].tolist() == [0, 0, 0, 0, 1, 2, 3]


def test_small_work_of_several_steps_is_generated_on_a_cpu():
    """Python takes longer to call torch for each of them than the work takes. Views alone cost
    nothing: nobody is called for those."""

    def cheapest(part: dt.Graph) -> tuple[str, float]:
        (region,), _ = fuse(part.ir())
        offers, _ = Survey(target("cpu"), Policy(engines=("torch", "cpu_gen"))).ask(region)
        best = next(o for o in offers if not o.rejected)
        return best.candidate.engine, best.predicted_s

    g, views = dt.Graph(), dt.Graph()
    some = g.slice(g.tensor("x", (1, 64, 7, 7), layout="nhwc"), 1, 0, 16)
    g.to_layout(some, layout="nhwc").output("y")
    views.permute(views.slice(views.tensor("x", (4, 6)), 0, 1, 3), dims=(1, 0)).output("y")
    assert cheapest(g)[0] == "cpu_gen"
    assert cheapest(views) == ("torch", 0.0)


@pytest.mark.parametrize("name", one_in(6, names()))
def test_refusals_have_reasons_and_estimates_are_times(name):
    """For every target, none of which need be here. GPUs of one kind differ in numbers alone: one
    with fp8 sees every region, the others every fifth."""
    machine = target(name)
    every = 1 if name in ("cpu", "h200") else 5
    policies = Policy(), Policy(deterministic=True)
    for region in everything()[::every]:
        free = all(TABLE[op].view for op in region.ops) or not region_cost(region).bytes
        for engine in room.BUILT_IN:
            for policy in policies:
                refusal = engine.refuse(region, machine, policy)
                if refusal is not None:
                    assert len(refusal.reason) > 5, (engine.name, region.text)
                    continue
                offered = list(engine.candidates(region, machine, policy))
                assert offered, f"{engine.name} neither refuses nor offers {region.text}"
                assert len({str(c) for c in offered}) == len(offered)
                for candidate in offered:
                    assert (candidate.engine, candidate.version) == (engine.name, engine.version)
                    seconds = engine.estimate(region, machine, candidate)
                    assert math.isfinite(seconds) and (seconds > 0 or free), (
                        engine.name,
                        region.text,
                    )


def test_recipes_stay_on_their_own_machine():
    vendor = next(e for e in room.BUILT_IN if e.name == "vendor_fused")
    pairs = [(target(here), target(there)) for here, there in (("cpu", "h200"), ("h200", "cpu"))]
    policy = Policy()
    for region in everything():
        for here, there in pairs:
            for recipe in vendor.recipes(there):
                refusal = recipe.refuse(region, here, policy)
                assert refusal is not None and refusal.reason, recipe.name


@pytest.mark.sweep
def test_deciding_imports_nothing_heavy(repo):
    """Asking all engines about regions on a GPU, in a process of its own."""
    program = """
import sys, torch
before = set(sys.modules)
import deuteron as dt
from deuteron.plan.choose import Survey
from deuteron.passes import fuse
g = dt.Graph()
x = g.tensor("x", (2, 8, 9, 9), "f16", layout="nhwc")
g.softmax(g.reshape(g.relu(g.conv(x, torch.randn(8, 8, 3, 3).half())), shape=(16, 49))).output("y")
norm = dt.Graph()
norm.layer_norm(norm.tensor("x", (4096, 1024))).output("y")
for region in (*fuse(g.ir())[0], *fuse(norm.grad("y", wrt="x").ir())[0]):
    Survey(dt.target("h200"), dt.Policy()).ask(region)
heavy = ("triton", "llvmlite", "torch._inductor.compile_fx", "onnx", "cuda")
print([name for name in heavy if name in sys.modules and name not in before])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=repo, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


# ---- inductor ------------------------------------------------------------------------------------


def chain() -> tuple[Region, Tensors]:
    g = dt.Graph()
    x = g.tensor("x", (8, 64))
    (g.softmax(g.gelu(x) * 2.0) + x).output("y")
    ((region,), _) = fuse(g.ir())
    return region, {"x": torch.randn(8, 64)}


INDUCTOR = next(e for e in room.BUILT_IN if e.name == "inductor")


def test_inductor_says_what_it_lacks(monkeypatch):
    region, _ = chain()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    refusal = INDUCTOR.refuse(region, target("cpu"), Policy())
    assert "no C++ compiler" in refusal.reason and "g++" in refusal.remedy
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert INDUCTOR.refuse(region, target("cpu"), Policy()) is None
    module = importlib.import_module("deuteron.engines.inductor")
    monkeypatch.setattr(module, "has_triton", lambda: False)
    assert "Triton" in INDUCTOR.refuse(region, target("h200"), Policy()).reason


def test_inductor_leaves_products_single_and_opaque_operators_alone():
    _, region, _ = next(regions_of(TABLE["relu"], "f32"))
    assert "single operator" in INDUCTOR.refuse(region, target("h200"), Policy()).reason
    g = dt.Graph()
    g.relu(g.linear(g.tensor("x", (3, 4)), torch.randn(4, 4))).output("y")
    ((region,), _) = fuse(g.ir())
    assert "products" in INDUCTOR.refuse(region, target("h200"), Policy()).reason


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="no C++ compiler here"
)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_inductor_compiles_a_region(backend, monkeypatch):
    """Traced in every run, which shows what it is handed; through g++, which takes 15 s, rarely."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    region, feed = chain()
    (candidate,) = INDUCTOR.candidates(region, target("cpu"), Policy())
    right(INDUCTOR, candidate, region, feed)


# ---- engines of others ---------------------------------------------------------------------------


def product() -> dt.Graph:
    g = dt.Graph()
    g.softmax(g.linear(g.tensor("x", (3, 4)), torch.randn(4, 4))).output("y")
    return g


def test_an_engine_of_the_user_s_competes_and_wins():
    mine = FakeEngine("mine", ["softmax"])
    with registered(mine):
        assert room.engine("mine") is mine and room.engines()[-1] is mine
        plan = product().compile(device="cpu")
        assert [c.candidate.engine for c in plan.decision.choices][-1] == "mine"
        x = torch.randn(3, 4)
        want = evaluate(plan.decision.source, {"x": x})["y"]
        assert error(plan.run(x=x)["y"], want) <= allowed(0.0, torch.float32, 4) and mine.calls
    with pytest.raises(EngineError, match=r"no engine 'mine'[\s\S]*known: torch"):
        room.engine("mine")


def test_an_engine_of_the_same_name_replaces_the_first():
    first, second = FakeEngine("mine"), FakeEngine("mine", version="2")
    with registered(first):
        dt.register_engine(second)
        assert room.engine("mine") is second
        assert sum(e.name == "mine" for e in room.engines()) == 1


@pytest.mark.parametrize(
    ("engine", "wrong"),
    [
        (SimpleNamespace(name="half", version="1"), "lacks refuse, candidates, estimate, build"),
        (FakeEngine("torch"), "'torch' is taken"),
        (object(), "lacks name"),
    ],
)
def test_what_is_no_engine_is_refused(engine, wrong):
    with pytest.raises(EngineError, match=wrong):
        dt.register_engine(engine)
    with pytest.raises(EngineError, match="no engine 'nobody'"):
        dt.unregister_engine("nobody")


@pytest.mark.parametrize("part", ["refuse", "candidates", "estimate"])
def test_an_engine_that_raises_while_deciding_is_left_out(part, monkeypatch):
    broken = FakeEngine("broken", ["softmax"])
    monkeypatch.setattr(broken, part, lambda *args: 1 / 0)
    with registered(broken):
        plan = product().compile(device="cpu")
    refusals = dict(plan.decision.choices[-1].refusals)
    assert "ZeroDivisionError" in refusals["broken"].reason
    assert plan.run(x=torch.randn(3, 4))["y"].shape == (3, 4)


def test_wrong_numbers_are_found_out(tmp_path):
    liar = FakeEngine("liar", ["softmax"], change=lambda t: t * 1.01)
    with registered(liar):
        plan = product().compile(device="cpu", find=True, cache=dt.Cache.open(tmp_path / "c.jsonl"))
    choice = plan.decision.choices[-1]
    assert choice.candidate.engine != "liar"
    (rejected,) = [o.rejected for o in choice.options if o.candidate.engine == "liar"]
    assert "error" in rejected


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages with engines are installed."""

    def install(**entries: Any) -> None:
        found = [
            SimpleNamespace(name=name, load=load if callable(load) else lambda load=load: load)
            for name, load in entries.items()
        ]
        monkeypatch.setattr(
            importlib.metadata, "entry_points", lambda group: found * (group == "deuteron.engines")
        )
        room._from_entry_points.cache_clear()

    yield install
    monkeypatch.undo()
    room._from_entry_points.cache_clear()


def test_installed_engines_compete_and_broken_ones_are_reported(installed):
    def missing() -> None:
        raise ImportError("no such package")

    good = FakeEngine("good")
    installed(
        good=lambda: good,
        by_class=lambda: type("ByClass", (FakeEngine,), {}),
        missing=missing,
        half=lambda: SimpleNamespace(name="half"),
        shadow=lambda: FakeEngine("torch"),
    )
    with pytest.warns(UserWarning) as told:
        names = [e.name for e in room.engines()]
    assert names == [*(e.name for e in room.BUILT_IN), "good", "fake"]
    said = " ".join(str(w.message) for w in told)
    assert all(name in said for name in ("'missing'", "no such package", "'half'", "'shadow'"))
    mine = FakeEngine("good")
    with registered(mine):
        assert [e for e in room.engines() if e.name == "good"] == [mine]


def test_a_survey_remembers_its_answers():
    counted = FakeEngine("counted", ["softmax"])
    asked = []
    counted.refuse = lambda region, machine, policy: asked.append(region) or dt.Refusal("no thanks")
    with registered(counted):
        survey = Survey(target("cpu"), Policy())
        region, _ = chain()
        assert survey.ask(region) is survey.ask(region)
    assert len(asked) == 1
