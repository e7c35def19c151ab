"""Rope, scans and order on a real GPU."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.ops import TABLE
from deuteron.policy import Policy
from tests.rope_cases import Case, cases, compare
from tests.tolerances import EPS, allowed, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16", "f64"])
def test_every_case(kind):
    wrong, count = [], 0
    for case in cases(kind):
        ran, bad = compare(case, "cuda", most=2)  # half a second each to compile
        count, wrong = count + ran, wrong + bad
    assert count >= 20 and not wrong, "\n".join(wrong)


def test_every_way_at_the_size_of_the_table():
    gen = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(2, 1024, h, 128, generator=gen, device="cuda").bfloat16() for h in (32, 8))
    wrong = []
    for axis in (1, 2):
        for more in ({}, {"positions": torch.randint(0, 9999, (2, 1024), device="cuda")}):
            feed = {"q": q, "k": k}
            if axis == 2:
                feed = {n: x.transpose(1, 2) for n, x in feed.items()}
            wrong += compare(Case(f"axis {axis}", {**feed, **more}, {"axis": axis}), "cuda")[1]
    assert not wrong, "\n".join(wrong)


def test_a_plan_with_its_gradient_uses_the_kernel_and_is_captured():
    g = dt.Graph("loss")
    q, k = g.tensor("q", (2, 256, 8, 64), "bf16"), g.tensor("k", (2, 256, 2, 64), "bf16")
    a, b = g.rope(q, k)
    (g.sum(g.cast(a * a, "f32")) + g.sum(g.cast(b * b, "f32"))).output("loss")
    plan = g.grad("loss", wrt=["q", "k"]).compile(device="cuda")
    used = [c.candidate.engine for c in plan.decision.choices if "rope" in c.region.ops]
    assert used == ["triton_kernels"] * 2, [str(c.candidate) for c in plan.decision.choices]
    feed = {
        n: torch.randn(s, device="cuda").bfloat16()
        for n, s in (("q", (2, 256, 8, 64)), ("k", (2, 256, 2, 64)))
    }
    for _ in range(3):
        got = plan.run(**feed)
    assert error(got["grad_q"], 2 * feed["q"]) <= 4 * EPS[torch.bfloat16]


def test_more_than_two_to_the_31_elements():
    heads, length = 16, 2**20 + 3
    q = torch.zeros(1, length, heads, 128, dtype=torch.bfloat16, device="cuda")
    q[0, -3:] = 1.0
    case = Case("big", {"q": q}, {})
    from deuteron.engines.base import BuildContext
    from deuteron.engines.triton.kernels import TritonKernels
    from deuteron.ir.region import Region

    region, engine, gpu = Region(case.graph(), frozenset(), 0), TritonKernels(), dt.target("cuda")
    assert q.numel() > 2**31 and engine.refuse(region, gpu, Policy()) is None
    out = torch.full_like(q, 7.0)
    candidate = engine.candidates(region, gpu, Policy())[-1]  # angles computed
    engine.build(region, candidate, BuildContext(gpu, q.device, Policy(), {})).fill([q], [out])
    want = TABLE["rope"].reference(
        q[:, -3:],
        None,
        None,
        None,
        None,
        axis=1,
        interleaved=False,
        dims=128,
        base=10000.0,
        offset=length - 3,
        inverse=False,
    )
    assert error(out[:, -3:], want) <= 4 * EPS[torch.bfloat16]
    assert not out[:, :-3].any()


# ---- what torch is asked to do, on a GPU ---------------------------------------------------------

DELEGATED = """cumsum cumprod cumprod_grad cummax cummin sort topk histogram scatter sinusoidal
    embedding_grad pyramid_pool weighted_pool""".split()


@pytest.mark.parametrize("name", DELEGATED)
def test_delegated_operators_are_right(name):
    op, wrong = TABLE[name], []
    for sample in op.samples():
        given = [None if x is None else x.cuda() for x in sample.tensors("f32")]
        given += [None] * (len(op.inputs) - len(given))  # optional ones at the end are left out
        wide = [x.double() if x is not None and x.is_floating_point() else x for x in given]
        full = op.normalise(sample.attrs)
        if op.complete is not None:
            from deuteron.functional.arguments import types_of

            full = op.complete(types_of(given), full)
        got, exact = op.reference(*given, **full), op.reference(*wide, **full)
        got, exact = (r if isinstance(r, tuple) else (r,) for r in (got, exact))
        for i, (have, want) in enumerate(zip(got, exact, strict=True)):
            off = error(have, want)
            if not off <= allowed(0.0, have.dtype, 64):
                wrong.append(f"{name} {sample} output {i}: off by {off:.3g}\n{have}\n{want}")
    assert not wrong, "\n".join(wrong)


def test_sums_by_index_do_not_vary():
    gen = torch.Generator("cuda").manual_seed(0)
    grad = torch.randn(200_000, 64, generator=gen, device="cuda")
    index = torch.randint(0, 50, (200_000,), generator=gen, device="cuda")
    line = torch.randn(3_000_000, generator=gen, device="cuda")
    weights = torch.rand(3_000_000, generator=gen, device="cuda")
    calls = {
        "embedding_grad": lambda: TABLE["embedding_grad"].reference(grad, index, None, 50, -1),
        "cumsum": lambda: TABLE["cumsum"].reference(line, axis=0),
        "histogram": lambda: TABLE["histogram"].reference(
            line, weights, bins=100, low=-3.0, high=3.0
        ),
    }
    varied = [
        n
        for n, call in calls.items()
        if len({call().sum().item() for _ in range(8)}) > 1
        or any(not torch.equal(call(), call()) for _ in range(8))
    ]
    assert not varied, varied
