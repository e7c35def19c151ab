"""Indices out of range: generated code never reads what they point to."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.codegen.lower import lower
from deuteron.codegen.triton_knobs import choices
from deuteron.codegen.triton_render import render
from deuteron.engines.cpu.generated import CpuGen
from deuteron.engines.index_checks import LOSSES
from deuteron.errors import BindError, GraphError
from deuteron.frontends.torch_export import import_module
from deuteron.ir.region import Region
from deuteron.passes import fuse
from deuteron.policy import Policy
from deuteron.target import target

pytest.importorskip("llvmlite")

OPERATORS = {
    "embedding": ((10, 6), (3,), lambda g, x, i: g.embedding(x, i)),
    "gather": ((10, 6), (3, 6), lambda g, x, i: g.gather(x, i, axis=0)),
    "gather by rows": ((3, 10), (3, 4), lambda g, x, i: g.gather(x, i, axis=1)),
    "index_select": ((10, 6), (3,), lambda g, x, i: g.index_select(x, i, axis=0)),
    "nll_loss": ((3, 10), (3,), lambda g, x, i: g.nll_loss(x, i, reduction="none")),
    "cross_entropy": ((3, 10), (3,), lambda g, x, i: g.cross_entropy(x, i, reduction="none")),
    "reshaped": ((10, 6), (3, 1), lambda g, x, i: g.embedding(x, g.reshape(i, shape=(3,)))),
}


def region_of(name: str, kind: str = "i64") -> Region:
    shape, index, write = OPERATORS[name]
    g = dt.Graph(name)
    x, i = g.tensor("x", shape), g.tensor("i", index, kind)
    g.relu(write(g, x, i)).output("y")
    return Region(g.ir())


def run(region: Region, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    from deuteron.engines.base import BuildContext

    engine, cpu, policy = CpuGen(), target("cpu"), Policy()
    assert engine.refuse(region, cpu, policy) is None
    ctx = BuildContext(cpu, torch.device("cpu"), policy, {})
    kernel = engine.build(region, engine.candidates(region, cpu, policy)[0], ctx)
    assert not kernel.calls  # data alone would look at nothing
    (y,) = region.outputs
    out = torch.empty(region.graph.types[y].shape)
    kernel.fill([{"x": x, "i": i}[v] for v in region.inputs], [out])
    return out


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("bad", [-1, 10, 2**40])
def test_an_index_out_of_range_is_an_error(name, bad):
    shape, index, _ = OPERATORS[name]
    x, i = torch.randn(shape), torch.zeros(index, dtype=torch.int64)
    region = region_of(name)
    assert run(region, x, i).isfinite().all()
    i.view(-1)[-1] = bad
    said = f"class {bad} is not one of 10" if name in LOSSES else f"index {bad} at .* out of range"
    with pytest.raises((BindError, GraphError), match=said):
        run(region, x, i)


def test_what_is_ignored_is_no_error():
    x, i = torch.randn(3, 10), torch.tensor([4, -100, 9])
    assert run(region_of("cross_entropy"), x, i)[1] == 0.0
    with pytest.raises(GraphError, match="or -100 for what is ignored"):
        run(region_of("cross_entropy"), x, torch.tensor([4, -100, 10]))


def test_empty_indices_are_fine():
    g = dt.Graph("none")
    g.relu(g.embedding(g.tensor("x", (10, 6)), g.tensor("i", (0,), "i64"))).output("y")
    plan = g.compile(device="cpu")
    none = torch.zeros(0, dtype=torch.int64)
    assert plan.run(x=torch.randn(10, 6), i=none)["y"].shape == (0, 6)


def from_the_end(g: dt.Graph, x, i, end: int = 10):
    return g.embedding(x, g.where(g.lt(i, 0), g.add(i, end), i))


def test_an_index_from_the_end_is_looked_at_where_it_comes_from(monkeypatch):
    monkeypatch.setitem(OPERATORS, "from the end", ((10, 6), (3,), from_the_end))
    region = region_of("from the end")
    x, i = torch.randn(10, 6), torch.tensor([-10, 9, -1])
    torch.testing.assert_close(run(region, x, i), x[i].relu(), rtol=0, atol=0)
    for bad in (-11, 10, 2**40):
        with pytest.raises(BindError, match=f"index {bad} at \\[2\\] is out of range"):
            run(region, x, torch.tensor([0, 1, bad]))


@pytest.mark.parametrize("end", [9, 11])
def test_another_shift_of_an_index_is_computed_on_the_way(end):
    g = dt.Graph("shifted")
    x, i = g.tensor("x", (10, 6)), g.tensor("i", (3,), "i64")
    g.relu(from_the_end(g, x, i, end)).output("y")
    refusal = CpuGen().refuse(Region(g.ir()), target("cpu"), Policy())
    assert refusal is not None and "nobody can check" in refusal.reason


@torch.no_grad()
def test_rows_that_a_module_picks_are_one_measured_kernel():
    class Pick(torch.nn.Module):
        def forward(self, x, i):
            return x[i].relu() + 1.0

    x, i = torch.randn(40, 64), torch.tensor([3, -1, 39, -40])
    fast = dt.optimize(Pick(), (x, i), budget_s=0.5)
    (choice,) = fast.plan.decision.choices
    assert choice.candidate.engine == "cpu_gen"
    assert all(o.measured_s is not None for o in choice.options if not o.rejected)
    assert torch.equal(fast(x, i), Pick()(x, i))
    with pytest.raises(BindError, match="index -41 at"):
        fast(x, torch.tensor([3, -1, 39, -41]))


def test_an_index_that_is_computed_on_the_way_is_refused():
    g = dt.Graph("computed")
    x, i = g.tensor("x", (10, 6)), g.tensor("i", (3,), "i64")
    g.embedding(x, i + 1).output("y")
    refusal = CpuGen().refuse(Region(g.ir()), target("cpu"), Policy())
    assert refusal is not None and "nobody can check" in refusal.reason
    plan = g.compile(device="cpu")
    with pytest.raises((IndexError, BindError)):
        plan.run(x=torch.randn(10, 6), i=torch.tensor([1, 2, 9]))


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "cross_entropy"])
def test_on_a_gpu_the_kernel_traps_and_reads_nothing(name):
    program = lower(region_of(name))
    source = render(program, choices(program)[0]).source
    assert "tl.device_assert(" in source
    (load,) = [line for line in source.splitlines() if "tl.load(" in line and "< 10" in line][:1]
    assert ">= 0) & (" in load


def test_a_class_that_does_not_exist_makes_its_row_nan_on_a_gpu():
    program = lower(region_of("cross_entropy"))
    source = render(program, choices(program)[0]).source
    assert "device_assert" not in source and 'float("nan")' in source


def test_edges_that_we_compute_are_not_looked_at():
    g = dt.Graph("edges")
    g.pad(g.tensor("x", (4, 8)), low=(0, 2), high=(0, 2), mode="reflect").output("y")
    program = lower(Region(g.ir()))
    assert "device_assert" not in render(program, choices(program)[0]).source


@pytest.mark.parametrize(
    ("shape", "pick", "sizes"),
    [
        ((5, 7, 3), lambda x, i, j: x[i, j], (5, 7)),
        ((2, 5, 7, 3), lambda x, i, j: x[:, i[:, None], j], (5, 7)),
        ((5, 3, 7), lambda x, i, j: x[i, :, j], (5, 7)),
        ((5, 7), lambda x, i, j: x.t()[i, j], (7, 5)),
        ((5, 7, 3), lambda x, i, j: x[i.int(), j] * 2, (5, 7)),
    ],
)
@torch.no_grad()
def test_rows_are_picked_by_several_indices_at_once(shape, pick, sizes):
    class Pick(torch.nn.Module):
        def forward(self, x, i, j):
            return pick(x, i, j).relu()

    x = torch.randn(shape)
    i, j = (torch.randint(-n, n, (40,)) for n in sizes)
    fast = dt.optimize(Pick(), (x, i, j), find=False)
    assert not fast.opaque
    assert torch.equal(fast(x, i, j), Pick()(x, i, j))
    for wrong in (sizes[0], -sizes[0] - 1):  # although it would be a row of the next dimension
        with pytest.raises((IndexError, BindError)):
            fast(x, torch.full_like(i, wrong), j)
    with pytest.raises((IndexError, BindError)):
        fast(x, i, torch.full_like(j, sizes[1]))


def test_a_few_elements_of_what_lies_apart_are_left_to_torch():
    class Pick(torch.nn.Module):
        def forward(self, x, i, j):
            return x[i, :, j]

    given = torch.randn(50, 8, 60), torch.tensor([3]), torch.tensor([-2])
    fast = dt.optimize(Pick(), given, find=False)
    assert fast.opaque == ("aten.index.Tensor",)
    assert torch.equal(fast(*given), Pick()(*given))


@pytest.mark.parametrize("gates", [False, True])
def test_an_index_of_several_dimensions_is_in_memory_before_it_is_used(gates):
    """Also on a GPU, where one out of range ends the process."""

    class Pick(torch.nn.Module):
        def forward(self, x, i, j):
            return (x[i, j] * 2).relu(), x[j, i].exp()

    given = torch.randn(5, 5, 3), torch.tensor([3, 0]), torch.tensor([-2, 1])
    graph = import_module(Pick(), given).graph
    regions, _ = fuse(graph, gates)
    for region in regions:
        assert not ("logical_and" in region.ops and "index_select" in region.ops)
