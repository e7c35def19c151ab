"""The arena: what is alive never shares memory, and what may be a view keeps its base alive."""

from __future__ import annotations

from random import Random

import pytest
import torch
from fakes import FakeEngine, bit_equal, check_right, registered
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import JUMPS, random_graph
from tolerances import allowed, error

import deuteron as dt
from deuteron.ops import TABLE, infer
from deuteron.ops.evaluate import evaluate
from deuteron.plan import compile_graph
from deuteron.plan.memory import ALIGN, Buffer, aligned, pack, peak
from deuteron.plan.program import plan_memory
from deuteron.plan.tensors import duplicate, overlaps, restrided


@st.composite
def buffers(draw):
    spans = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=24))
    sizes = st.one_of(st.integers(0, 5000), st.sampled_from([0, 1, ALIGN, ALIGN + 1]))
    return [
        Buffer(f"b{i}", draw(sizes), first, first + length)
        for i, (first, length) in enumerate(spans)
    ]


@given(buffers())
@settings(max_examples=120)
def test_what_is_alive_together_never_overlaps(given_):
    offsets, total = pack(given_)
    assert set(offsets) == {b.name for b in given_}
    assert all(offset % ALIGN == 0 for offset in offsets.values())
    assert peak(given_) <= total <= sum(aligned(b.size) for b in given_)
    for b in given_:
        assert offsets[b.name] >= 0 and offsets[b.name] + b.size <= total
    for i, a in enumerate(given_):
        for b in given_[:i]:
            if a.first <= b.last and b.first <= a.last and a.size and b.size:
                low, high = sorted([(offsets[a.name], a.size), (offsets[b.name], b.size)])
                assert low[0] + low[1] <= high[0], (a, b)


def test_dead_memory_is_used_again():
    chain = [Buffer(f"b{i}", 1000, i, i + 1) for i in range(50)]
    assert pack(chain)[1] == 2 * aligned(1000) == peak(chain)


def everything(region: dt.Region) -> bool:
    """What a writing engine can take: no opaque calls, no result that repeats its memory."""
    types = [region.graph.types[v] for v in region.outputs]
    return "aten" not in region.ops and not any(overlaps(t) for t in types)


def written(g: dt.Graph, feed: dict[str, torch.Tensor]) -> dt.Plan:
    """The plan with every result in the arena that may be there, checked over several runs."""
    with registered(FakeEngine(wants=everything, writes=True)):
        plan = g.compile(device="cpu", policy=dt.Policy(layout="keep"))
    for _ in range(3):
        check_right(plan.run(feed), g.ir(), feed)
    return plan


def test_a_view_keeps_its_base_alive():
    """h is last read by the view; were its memory free then, the next product would take it."""
    g = dt.Graph()
    x, w = g.tensor("x", (16, 16)), g.tensor("w", (16, 16))
    h = x @ w
    turned = g.permute(g.reshape(h, shape=(4, 4, 16)), dims=(1, 0, 2))
    other = x
    for _ in range(4):
        other = other @ w
    g.sum(turned * g.reshape(other, shape=(4, 4, 16)), axes=0).output("y")
    feed = {"x": torch.randn(16, 16), "w": torch.randn(16, 16) / 4}
    plan = written(g, feed)
    memory = plan.program.memory
    assert h.name in memory.offsets and len(memory.offsets) >= 4
    assert memory.arena < len(memory.offsets) * aligned(16 * 16 * 4), "nothing was reused"


def test_whatever_an_opaque_call_reads_may_be_what_it_returns():
    """meshgrid answers with views of all its inputs, not only of the first."""
    g = dt.Graph()
    x, w = g.tensor("x", (16,)), g.tensor("w", (16, 16))
    a, b = x @ w, (x * 0.5) @ w
    types = ("f32[16,16]{1,0}", "f32[16,16]{0,1}")
    args = (("list", ("in", 0), ("in", 1)),)
    kwargs = (("indexing", "ij"),)
    rows, columns = g.aten(
        a, b, target="aten.meshgrid.indexing", args=args, kwargs=kwargs, out=types
    )
    other = x
    for _ in range(4):
        other = other @ w
    (rows + columns * other).output("y")
    written(g, {"x": torch.randn(16), "w": torch.randn(16, 16) / 4})


def test_what_leaves_is_never_in_the_arena():
    g = dt.Graph()
    x, w = g.tensor("x", (8, 8)), g.tensor("w", (8, 8))
    h = (x @ w).output("h")
    inner = h @ w
    g.slice(inner, axis=0, start=2, stop=5).output("part")
    (inner @ w).output("y")
    plan = written(g, {"x": torch.randn(8, 8), "w": torch.randn(8, 8)})
    assert not {h.name, inner.name} & set(plan.program.memory.offsets)


def test_a_value_without_elements_takes_no_room():
    g = dt.Graph()
    x, w = g.tensor("x", (0, 8)), g.tensor("w", (8, 8))
    ((x @ w) @ w).output("y")
    assert written(g, {"x": torch.randn(0, 8), "w": torch.randn(8, 8)}).program.memory.arena == 0


def test_an_unbuilt_plan_has_a_memory_plan_too():
    g = dt.Graph()
    x, w = g.tensor("x", (64, 64)), g.tensor("w", (64, 64))
    for _ in range(6):
        x = x @ w
    x.output("y")
    decision = g.compile(device="cpu").decision
    kernels = [dt.Kernel(lambda: None, writes=True) for _ in decision.choices]
    memory = plan_memory(decision.graph, decision.regions, kernels)
    assert memory.arena == 2 * 64 * 64 * 4 and memory.separate == 6 * 64 * 64 * 4


def test_what_a_result_is_written_over_through_a_view_stays_until_then():
    """A library's result is read through a view alone, and the mean of that, which is as large,
    takes its memory: the first run had other memory for it, and the second raised."""
    g = dt.Graph()
    x, w = g.tensor("x", (4, 64)), g.constant(torch.randn(64, 64), "w")
    y = g.mean(g.reshape(g.softmax(x), (1, 4, 64)), axes=(0,))
    g.linear(y, w).output("y")
    with registered(FakeEngine(wants=["softmax"])):
        plan = g.compile(device="cpu")
    feed = {"x": torch.randn(4, 64)}
    assert plan.program.spots
    for _ in range(3):
        check_right(plan.run(feed), g.ir(), feed)


@pytest.mark.parametrize("writes", [False, True], ids=["as planned", "all in the arena"])
@pytest.mark.parametrize("seed", range(40))
def test_random_graphs_run_as_their_reference_says(seed, writes):
    graph, feed = random_graph(Random(seed), nodes=14, without=JUMPS - {"aten"})
    try:
        exact = evaluate(graph, feed)
    except (RuntimeError, IndexError) as refused:  # torch has no such kernel, or no such index
        pytest.skip(f"the reference does not run it: {refused}")
    before = {name: t.clone() for name, t in feed.items()}
    with registered(FakeEngine(wants=everything if writes else (), writes=True)):
        plan = compile_graph(graph, device="cpu")
    kept = []
    for _ in range(3):
        out = plan.run(feed)
        kept.append((out, {name: t.clone() for name, t in out.items()}))
        for name, want in exact.items():
            assert out[name].dtype == want.dtype
            limit = allowed(0.0, torch.float32, max(want.numel(), 64))
            assert error(out[name], want) <= limit, name
    for out, copies in kept:
        assert all(bit_equal(out[name], t) for name, t in copies.items()), "overwritten"
    assert all(bit_equal(feed[name], t) for name, t in before.items()), "an input was modified"


@pytest.mark.filterwarnings("ignore:var")
@pytest.mark.parametrize("name", TABLE)
def test_only_operators_that_say_so_answer_with_their_input(name):
    """The arena, and work done in place, rest on ``OpDef.view``."""
    op = TABLE[name]
    for sample in op.samples():
        tensors = sample.tensors("f32")
        types = [None if t is None else dt.TensorType.from_tensor(t) for t in tensors]
        attrs, _ = infer(name, types, sample.attrs)
        absent = [] if op.variadic else [None] * (len(op.inputs) - len(tensors))
        result = op.reference(*tensors, *absent, **attrs)
        memory = [t.untyped_storage().data_ptr() for t in tensors if t is not None]
        for out in result if isinstance(result, tuple | list) else (result,):
            place = out.untyped_storage().data_ptr()
            if out.numel() and place in memory:
                assert op.view and place == memory[0], sample


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(4, 3).t(),
        torch.randn(3, 8)[:, ::2],
        torch.randn(1, 4).expand(3, 4),
        torch.randn(9).as_strided((3, 4), (2, 1)),
        torch.randn(()),
        torch.randn(0, 4),
    ],
    ids=["dense", "transposed", "sliced", "expanded", "windows", "scalar", "empty"],
)
def test_copies_keep_strides_whatever_they_are(tensor):
    type_ = dt.TensorType.from_tensor(tensor)
    again = duplicate(tensor)
    assert again.stride() == tensor.stride() and torch.equal(again, tensor)
    if tensor.numel():
        assert again.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    laid = restrided(tensor.contiguous(), type_)
    assert dt.ir.types.same_strides(type_.shape, laid.stride(), type_.strides)
    assert torch.equal(laid, tensor)


def test_a_large_result_takes_memory_that_nobody_holds_any_more() -> None:
    g = dt.Graph("large")
    (g.tensor("x", (512, 512)) * 2.0).output("y")
    plan = g.compile(device="cpu")
    x = torch.randn(512, 512)
    plan.run(x=x)
    first = plan.run(x=x)["y"]
    place, row = first.data_ptr(), first[3]
    del first
    second = plan.run(x=-x)["y"]  # a row of the first is still there
    assert second.data_ptr() != place
    assert torch.equal(row, 2 * x[3])
    del row
    third = plan.run(x=x)["y"]
    assert third.data_ptr() == place
    assert torch.equal(second, -2 * x)
    assert third.add_(1) is third
    assert not third._is_view()
