"""Concatenations whose parts are written where the whole lies: the spellings of networks, results
against float64, and when a plan does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import deuteron as dt
from deuteron.ir.graph import Graph
from deuteron.ir.types import same_strides
from deuteron.ops.evaluate import evaluate
from deuteron.passes import Context, run_passes
from deuteron.passes.in_place import concats_in_place
from deuteron.plan import in_place
from deuteron.policy import Policy
from deuteron.target import target
from tests.tolerances import allowed, error

CPU = target("cpu")
Write = Callable[[dt.Graph, Any, Callable[..., Any]], Any]


def conv(g: dt.Graph, x: Any, w: Any, **how: Any) -> Any:
    return g.relu(g.conv(x, w, padding=w.shape[-1] // 2, **how))


def dense_block(g: dt.Graph, x: Any, w: Any) -> Any:
    """Every layer reads all that came before it."""
    found = [conv(g, x, w(16, 8, 1, 1))]
    for _ in range(2):
        joined = g.concat(found, axis=1)
        found.append(
            conv(g, g.relu(joined * w(1, joined.shape[1], 1, 1)), w(8, joined.shape[1], 3, 3))
        )
    return g.concat(found, axis=1) * 2.0


def unet(g: dt.Graph, x: Any, w: Any) -> Any:
    """What the way down leaves is read by the way up as well."""
    skip = conv(g, x, w(16, 8, 3, 3))
    down = conv(g, g.max_pool(skip, kernel=(2, 2), stride=(2, 2)), w(32, 16, 3, 3))
    up = g.conv(down, w(32, 16, 2, 2), stride=2, transposed=True)
    return conv(g, g.concat([skip, up], axis=1), w(8, 32, 3, 3))


def inception(g: dt.Graph, x: Any, w: Any) -> Any:
    x = conv(g, x, w(8, 8, 1, 1))
    pooled = g.avg_pool(x, kernel=(3, 3), stride=(1, 1), padding=(1, 1))
    branches = [
        conv(g, x, w(12, 8, 1, 1)),
        conv(g, x, w(16, 8, 5, 5)),
        conv(g, pooled, w(5, 8, 1, 1)),
    ]
    return conv(g, g.concat([*branches, g.max_pool(x, kernel=3, stride=1, padding=1)], axis=1),
                w(8, 41, 1, 1))  # fmt: skip


def ghost(g: dt.Graph, x: Any, w: Any) -> Any:
    first = conv(g, x, w(16, 8, 1, 1))
    return g.concat([first, conv(g, first, w(16, 1, 3, 3), groups=16)], axis=1) + 1.0


def cross_stage(g: dt.Graph, x: Any, w: Any) -> Any:
    """Two halves of a tensor, as chunk gives them, and what is made of the second."""
    whole = conv(g, x, w(16, 8, 1, 1))
    one, two = g.slice(whole, axis=1, stop=8), g.slice(whole, axis=1, start=8)
    return conv(g, g.concat([one, two, conv(g, two, w(8, 8, 3, 3))], axis=1), w(8, 24, 1, 1))


def several(g: dt.Graph, x: Any, w: Any) -> Any:
    """A value twice, an input, a concatenation in another, an empty part, one read as a view."""
    a, b = conv(g, x, w(8, 8, 1, 1)), conv(g, x, w(4, 8, 3, 3))
    inner = g.concat([a, b, g.slice(a, axis=1, stop=0)], axis=1)
    turned = g.reshape(g.permute(inner, (0, 2, 3, 1)), (-1, 12))
    whole = g.concat([x, inner, a, inner], axis=1)
    return conv(g, whole, w(6, 40, 1, 1)) + g.mean(turned) + g.mean(conv(g, inner, w(6, 12, 1, 1)))


def leaves(g: dt.Graph, x: Any, w: Any) -> Any:
    """The whole and one of its parts are results, which later runs must not change."""
    parts = [conv(g, x, w(8, 8, 1, 1)), conv(g, x, w(8, 8, 3, 3))]
    whole = g.concat(parts, axis=1)
    parts[0].output("part")
    whole.output("whole")
    return g.relu(g.slice(whole, axis=1, start=4, stop=12) - 0.5)


# and how many concatenations move nothing
SPELLINGS: dict[Write, int] = {dense_block: 2, unet: 1, inception: 1, ghost: 1, cross_stage: 1}
SPELLINGS |= {several: 2, leaves: 1}


def graph_of(write: Write, dtype: str = "f32", size: tuple[int, int] = (6, 10)) -> dt.Graph:
    g, gen = dt.Graph(write.__name__), torch.Generator().manual_seed(0)

    def weight(*shape: int) -> Any:
        scale = (shape[1] * shape[2] * shape[3]) ** -0.5
        data = torch.randn(shape, generator=gen) * scale
        return g.constant(data.to(getattr(torch, {"f32": "float32", "bf16": "bfloat16"}[dtype])))

    write(g, g.tensor("x", (2, 8, *size), dtype), weight).output("y")
    return g


def _optimised(g: dt.Graph) -> Graph:
    return run_passes(g.ir(), Context(CPU, Policy()))[0]


def is_right(g: dt.Graph, plan: dt.Plan) -> None:
    ir, gen = g.ir(), torch.Generator().manual_seed(1)
    feeds = [
        {
            v: torch.randn(ir.types[v].shape, generator=gen).to(ir.types[v].dtype.torch)
            for v in ir.inputs
        }
        for _ in range(2)
    ]
    outs = [plan.run(**feeds[i]) for i in (0, 1, 0)]  # the second as one function
    for i, out in zip((0, 1, 0), outs, strict=True):
        exact, plain = evaluate(ir, feeds[i], float64=True), evaluate(ir, feeds[i])
        for name, got in out.items():
            assert same_strides(got.shape, got.stride(), ir.types[dict(ir.outputs)[name]].strides)
            bound = allowed(error(plain[name], exact[name]), got.dtype, 400)
            assert error(got, exact[name]) <= bound, name


@pytest.fixture
def whatever_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "WORTH", float("inf"))
    monkeypatch.setattr(in_place, "_dearer", lambda *given: [])


SLOW = pytest.mark.sweep


@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        pytest.param(
            write, dtype, marks=SLOW if dtype != "f32" or write in (inception, ghost) else ()
        )
        for write in SPELLINGS
        for dtype in ("f32", "bf16")
    ],
    ids=lambda given: given if isinstance(given, str) else given.__name__,
)
def test_spellings(write: Write, dtype: str, whatever_it_costs: None):
    g = graph_of(write, dtype)
    plan = g.compile(device="cpu")
    ops = [op for region in plan.decision.regions for op in region.ops]
    assert ops.count("concat_in_place") == SPELLINGS[write]
    is_right(g, plan)


def test_a_dense_block_has_one_buffer():
    placed = concats_in_place(_optimised(graph_of(dense_block)))
    (buffer,) = placed.wholes
    wholes = [placed.spots[v] for v in placed.wholes[buffer]]
    assert {(s.buffer, s.offset) for s in wholes} == {(buffer, 0)} and len(wholes) == 2
    parts = sorted(placed.spots[v].offset for v in placed.parts(buffer))
    assert parts == [0, 16, 24] and not placed.copies


def test_parts_begin_at_lines_that_kernels_read():
    """On a GPU parts that begin at no multiple of 16 bytes are copied."""
    graph = _optimised(graph_of(inception))
    assert len(concats_in_place(graph).copies) == 0
    lines = concats_in_place(graph, line=16)
    assert not lines.wholes  # 41 channels: no pixel begins at such a line
    even = concats_in_place(_optimised(graph_of(unet)), line=16)
    assert even.wholes and not even.copies


def test_a_plan_does_it_where_that_is_cheaper_and_says_so(tmp_path: Any):
    g = graph_of(unet, size=(24, 32))
    plan = g.compile(device="cpu")
    assert "concat" not in [op for region in plan.decision.regions for op in region.ops]
    assert "concat in place" in plan.explain("text", full=True)
    (fired,) = (record.fired for record in plan.decision.passes if record.name == in_place.NAME)
    assert fired["part written in place"] == 2
    is_right(g, plan)
    loaded = dt.load_plan(plan.save(tmp_path / "unet.plan.json"), device="cpu")
    assert not loaded.decision.notes
    assert loaded.decision.placed is not None and plan.decision.placed is not None
    assert loaded.decision.placed.spots == plan.decision.placed.spots
    is_right(g, loaded)


def test_what_nobody_makes_is_joined_by_a_copy():
    """Of inputs alone a concatenation stays what it is, and so it does where all of it is fused."""
    for write in (
        lambda g, x, w: g.concat([x, x], axis=1),
        lambda g, x, w: g.relu(g.concat([x, x * 2.0], axis=1)),
    ):
        g = graph_of(write)
        plan = g.compile(device="cpu")
        assert "concat" in [op for region in plan.decision.regions for op in region.ops]
        is_right(g, plan)


def test_gradients(whatever_it_costs: None):
    """Parts of the way there and of the way back, in one plan."""
    g = graph_of(ghost)
    g = g.grad("y", wrt=["x"])
    plan = g.compile(device="cpu")
    assert plan.decision.placed is not None and plan.decision.placed.wholes
    is_right(g, plan)
