"""Chains of products in their cheapest order, and corrections of low rank merged into weights."""

from __future__ import annotations

import torch
from torch import nn

import deuteron as dt
from tests.tolerances import allowed, error


def planned(write, shapes: dict[str, tuple[int, ...]], known: str = "", dtype=torch.float32):
    """What runs, and the plan's error beside torch's; ``known`` are constants."""
    gen = torch.Generator().manual_seed(0)
    data = {
        name: (torch.randn(s, generator=gen) / s[-1] ** 0.5).to(dtype) for name, s in shapes.items()
    }
    g = dt.Graph()
    given = {
        n: g.constant(t, n) if n in known else g.tensor(n, t.shape, t.dtype)
        for n, t in data.items()
    }
    write(g, **given).output("y")
    plan = g.compile(device="cpu")
    found = plan.run(**{n: t for n, t in data.items() if n not in known})["y"]
    names = {n: t.double() for n, t in data.items()}
    exact = eager(write, names)
    assert error(found, exact) <= allowed(error(eager(write, data), exact), dtype, 1024)
    return [op for r in plan.explain().report.regions for op in r.ops], plan


def eager(write, data):
    class Torch:
        matmul, permute = staticmethod(torch.matmul), staticmethod(torch.permute)
        linear = staticmethod(nn.functional.linear)

    return write(Torch, **data)


def sizes(plan: dt.Plan) -> list[tuple[int, ...]]:
    """Of all results, in order."""
    return [c.region.graph.types[v].shape for c in plan.decision.choices for v in c.region.outputs]


def test_a_weight_of_low_rank_stays_two_thin_matrices():
    low = {"x": (64, 1024), "a": (1024, 16), "b": (16, 1024)}
    for known in ("", "ab"):
        ops, plan = planned(lambda g, x, a, b: g.matmul(x, g.matmul(a, b)), low, known)
        assert ops == ["matmul", "matmul"] and sizes(plan) == [(64, 16), (64, 1024)]
    turned = {"x": (3, 32, 1024), "a": (16, 1024), "b": (1024, 16), "c": (1024,)}
    ops, plan = planned(lambda g, x, a, b, c: g.linear(x, g.matmul(b, a), c), turned, "abc")
    assert ops == ["linear", "linear"] and sizes(plan)[0] == (3, 32, 16)


def test_a_high_rank_and_short_chains_are_multiplied_ahead():
    high = {"x": (64, 1024), "a": (1024, 900), "b": (900, 1024)}
    ops, _ = planned(lambda g, x, a, b: g.matmul(g.matmul(x, a), b), high, "ab")
    assert ops == ["linear"]
    # as inputs they cannot be
    ops, plan = planned(lambda g, x, a, b: g.matmul(g.matmul(x, a), b), high)
    assert ops == ["matmul", "matmul"] and sizes(plan)[0] == (64, 900)


def test_a_long_chain_goes_through_its_narrowest():
    wide = {"x": (512, 600), "a": (600, 500), "b": (500, 8), "c": (700, 8)}
    ops, plan = planned(lambda g, x, a, b, c: g.linear(g.matmul(g.matmul(x, a), b), c), wide)
    assert len(ops) == 3 and sizes(plan)[:2] == [(600, 8), (512, 8)]


def test_what_is_read_elsewhere_and_what_might_overflow_stays():
    low = {"x": (64, 512), "a": (512, 16), "b": (16, 512)}

    def shared(g, x, a, b):
        w = g.matmul(a, b)
        return g.matmul(g.matmul(x, w), w)

    ops, plan = planned(shared, low)
    assert len(ops) == 3 and sizes(plan)[0] == (512, 512)
    small = {"x": (4, 256), "a": (256, 2), "b": (2, 256)}
    half, _ = planned(lambda g, x, a, b: g.matmul(x, g.matmul(a, b)), small, "ab", torch.float16)
    assert half == ["matmul"]


def test_a_constant_batch_of_matrices_may_begin_a_chain():
    shapes = {"c": (3, 64, 256), "b": (256, 256), "x": (256, 8)}
    _, plan = planned(lambda g, c, b, x: g.matmul(c, g.matmul(b, x)), shapes, "cb")
    assert sizes(plan) == [(256, 8), (3, 64, 8)]


class Corrected(nn.Module):
    """As low-rank adapters write it."""

    def __init__(self, rank: int = 8) -> None:
        super().__init__()
        self.base, self.scale = nn.Linear(256, 384), 0.5
        self.a, self.b = nn.Linear(256, rank, bias=False), nn.Linear(rank, 384, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.base(x) + self.b(self.a(x)) * self.scale)


def test_a_correction_of_low_rank_is_merged():
    torch.manual_seed(0)
    model, x = Corrected().eval(), torch.randn(4, 16, 256)
    with torch.no_grad():
        fast, want = dt.optimize(model, x, find=False), model(x)
        found, exact = fast(x), model.double()(x.double())
    assert error(found, exact) <= allowed(error(want, exact), torch.float32, 256)
    ops = [op for r in fast.explain().report.regions for op in r.ops]
    assert ops.count("linear") == 1 and "add" not in ops


def test_a_correction_is_merged_beside_a_node_of_several_results():
    g, matrix = dt.Graph(), torch.randn(256, 256) / 16
    x = g.tensor("x", (64, 256))
    low = g.linear(g.linear(x, g.constant(matrix[:8])), g.constant(matrix[:, :8].contiguous()))
    g.relu(g.linear(x, g.constant(matrix)) + low).output("y")
    g.topk(x, k=2)[1].output("places")
    plan, data = g.compile(device="cpu"), torch.randn(64, 256)
    found, weight = plan.run(x=data), matrix.double() + matrix[:, :8].double() @ matrix[:8].double()
    assert error(found["y"], (data.double() @ weight.mT).relu()) <= allowed(0.0, data.dtype, 256)
    assert [op for r in plan.explain().report.regions for op in r.ops].count("linear") == 1
