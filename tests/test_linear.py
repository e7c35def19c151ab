"""Planning takes time in proportion to the graph, whatever the graph is.

The work is counted: statements, terms, calls of Python functions. No test looks at a clock, so none
fails on a busy machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import deuteron as dt
from deuteron.codegen.index import Affine, Var, flatten, unflatten
from deuteron.codegen.lower import MOST_STEPS, MOST_TERMS, lower
from deuteron.engines import match
from deuteron.frontends import torch_trace
from deuteron.ir.region import Region
from deuteron.ops.emit import Sym
from deuteron.ops.evaluate import evaluate
from deuteron.ops.formula import CannotLower
from deuteron.passes import Context, fuse, run_passes
from deuteron.plan.choose import in_two
from deuteron.plan.decide import decide
from deuteron.policy import Policy
from tests.sweeps import one_in
from tests.tolerances import allowed, error

SHAPES = ((20, 36), (16, 45), (40, 18), (80, 9), (24, 30))  # of as many elements, oddly cut


def copied(g: dt.Graph, x: Sym, times: int) -> Sym:
    """Movement that no view can do; an index divided at one step is divided again at the next."""
    for i in range(times):
        x = g.relu(g.reshape(g.permute(x, dims=(1, 0)), shape=SHAPES[i % len(SHAPES)]))
    return x


def doubled(g: dt.Graph, x: Sym, times: int) -> Sym:
    """Each element is read at ever more places."""
    for i in range(times):
        padded = g.pad(x, low=(1, 1), high=(1, 1))
        rows = g.slice(padded, axis=0, start=2, stop=2 + x.shape[0])
        x = x + g.slice(rows, axis=1, start=i % 3, stop=i % 3 + x.shape[1])
    return x


def turned(g: dt.Graph, x: Sym, times: int) -> Sym:
    """Read as it lies, and mirrored."""
    for i in range(times):
        shape = SHAPES[i % len(SHAPES)]
        x = g.reshape(x, shape=shape) + g.reshape(g.flip(x, axes=(i % 2,)), shape=shape)
    return x


def read_by_many(g: dt.Graph, x: Sym, times: int) -> list[Sym]:
    return [g.sum(x * float(i + 2), axes=(1,)) for i in range(times)]


def joined(g: dt.Graph, x: Sym, times: int) -> Sym:
    return g.concat(*[g.relu(x * float(i)) for i in range(times)], axis=1)


def after_product(g: dt.Graph, x: Sym, times: int) -> Sym:
    for _ in range(times):
        x = g.tanh(g.linear(x, torch.randn(30, x.shape[1])))
        for _ in range(20):
            x = g.neg(g.exp(x))
    return x


LONG: dict[Callable[..., Any], int] = {copied: 16, doubled: 12, turned: 16}
GRAPHS = {**LONG, read_by_many: 20, joined: 12, after_product: 1}
H200 = dt.target("h200")


def graph_of(write: Callable[..., Any], times: int) -> dt.Graph:
    g = dt.Graph(write.__name__)
    made = write(g, g.tensor("x", (24, 30)), times)
    for i, y in enumerate(made if isinstance(made, list) else [made]):
        y.output(f"y{i}")
    return g


def calls(run: Callable[[], object]) -> int:
    """How many Python functions are called."""
    count = 0

    def seen(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


# ---- scalar programs


@pytest.mark.parametrize("write", LONG)
def test_a_scalar_program_does_not_grow_without_bound(write):
    """With every node it would double. Where it is given up, not much was done."""
    most, refused = 0, 0
    for times in (LONG[write], 2 * LONG[write]):
        region = Region(graph_of(write, times).ir())

        def ask(region: Region = region) -> None:
            nonlocal refused
            try:
                program = lower(region)
            except CannotLower as reason:
                assert reason.too_long
                refused += 1
            else:
                assert len(program.statements) <= 2 * MOST_STEPS
                assert all(e.size <= 4 * MOST_TERMS for e in program.accesses())

        most = max(most, calls(ask))
    assert refused and most < 400 * MOST_STEPS


def test_what_was_divided_is_put_together_again():
    i, j = (Affine.var(Var(name, size)) for name, size in (("i", 24), ("j", 30)))
    position = flatten((i, j), (24, 30))
    for shape in (*SHAPES, (2, 18, 20), (5, 9, 4, 4), (720,)):
        index = unflatten(position, shape)
        assert flatten(index, shape) == position
        assert all((e * 3 + 1).size == e.size <= 2 for e in index)


# ---- cutting what is too long


@pytest.mark.parametrize("machine", ["cpu", "h200"])
@pytest.mark.parametrize("write", LONG)
def test_parts_of_a_region_that_is_too_long_are_generated(write, machine):
    found = decide(graph_of(write, LONG[write]).ir(), dt.target(machine), Policy())
    generated = {"cpu": "cpu_gen", "h200": "triton_gen"}[machine]
    engines = [c.candidate.engine for c in found.choices]
    assert engines.count(generated) > len(engines) / 2 and found.choices[0].note


@pytest.mark.parametrize("write", LONG)
def test_the_parts_mean_the_same(write):
    graph, x = graph_of(write, LONG[write]), torch.randn(24, 30)
    (wanted,) = evaluate(graph.ir(), {"x": x.double()}).values()
    (found,) = graph.compile(device="cpu").run(x=x).values()
    (usual,) = evaluate(graph.ir(), {"x": x}).values()
    assert error(found, wanted) <= allowed(error(usual, wanted), torch.float32, 1 << LONG[write])


def test_a_region_is_cut_where_little_crosses():
    g = dt.Graph()
    x = g.tensor("x", (4, 64))
    for _ in range(3):
        x = g.tanh(x)
    narrow = g.slice(x, axis=1, start=0, stop=2)
    for _ in range(5):
        narrow = g.exp(narrow)
    narrow.output("y")
    head, tail = in_two(Region(g.ir()))
    assert head.outputs == tail.inputs and tail.graph.types[tail.inputs[0]].shape == (4, 2)


# ---- whole graphs


@pytest.mark.parametrize("write", one_in(4, GRAPHS))
def test_a_graph_twice_as_long_takes_about_twice_the_work(write):
    def work(times: int) -> int:
        graph = graph_of(write, GRAPHS[write] * times).ir()
        match._lowered.cache_clear()  # which other tests have filled
        return calls(lambda: decide(graph, H200, Policy()))

    once, twice = work(1), work(2)
    assert twice < 2.4 * once, (once, twice)


@pytest.mark.parametrize("write", [read_by_many, joined])
def test_values_with_many_readers_are_looked_at_once(write):
    def work(times: int) -> list[int]:
        graph, ctx = graph_of(write, times).ir(), Context(H200, Policy())
        return [calls(lambda: fuse(graph)), calls(lambda: run_passes(graph, ctx))]

    for once, twice in zip(work(150), work(300), strict=True):
        assert twice < 2.2 * once, (once, twice)


def test_modules_with_many_calls_are_recorded(monkeypatch):
    """What is answered with zeros costs nothing; a long module may compute more."""
    monkeypatch.setattr(torch_trace, "LIMIT", 500)
    x = torch.randn(4, 8)
    products = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20))).eval()
    torch_trace.trace(products, (x,), {})
    work = nn.Sequential(*(nn.ReLU() for _ in range(20))).eval()
    torch_trace.trace(work, (x,), {})
    monkeypatch.setattr(torch_trace, "EACH", 0)
    with pytest.raises(torch_trace.NeedsExport, match="too long"):
        torch_trace.trace(work, (x,), {})
    torch_trace.trace(products, (x,), {})
