"""The backward of norms on a real GPU: every kind of kernel, odd and large sizes, in plans."""

from __future__ import annotations

import traceback
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import deuteron as dt
from deuteron.engines.triton.norm import RowGradient, spreads
from tests.norm_cases import Case, Forward, forward_cases, small_cases, wrong, wrong_forward
from tests.tolerances import allowed, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")

HALF, BRAIN, F64 = torch.float16, torch.bfloat16, torch.float64


def failures(cases) -> str:
    """Every case is run, so that one visit shows all that is wrong; threads share the compiling."""
    target, cases = dt.target("cuda"), list(cases)

    def verdict(case: Case) -> str:
        try:
            return wrong(case, target, "cuda")
        except Exception:
            return traceback.format_exc(limit=-6)

    with ThreadPoolExecutor(8) as pool:
        found = list(zip(cases, pool.map(verdict, cases), strict=True))
    return "\n\n".join(f"{case}\n{text}" for case, text in found if text)


def test_small_cases():
    assert not (text := failures(small_cases())), text


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN, F64])
def test_rows_of_many_lengths(dtype):
    sizes = [
        (1, 1000),
        (300, 768),
        (1001, 769),
        (1056, 4096),
        (133, 8192),
        (7, 50257),
        (3, 131072),
        (20003, 33),
    ]
    assert not (
        text := failures(
            Case(norm, size, dtype, extra=k % 2 == 0)
            for k, size in enumerate(sizes)
            for norm in ("layer_norm", "rms_norm")
        )
    ), text


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN])
def test_groups_of_many_sizes(dtype):
    assert not (
        text := failures(
            [
                Case("group_norm", (8, 256, 56, 56), dtype, attrs={"groups": 32}),
                Case("group_norm", (2, 320, 17, 13), dtype, attrs={"groups": 32}, extra=True),
                Case("group_norm", (3, 512, 7, 7), dtype, attrs={"groups": 1}),
                Case("group_norm", (5, 96), dtype, attrs={"groups": 4}),
                Case("instance_norm", (4, 33, 129, 65), dtype),
                Case("instance_norm", (1, 3, 1000), dtype, weight=False, bias=False),
            ]
        )
    ), text


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
def test_an_activation_taken_along(dtype):
    """Held in registers and not, with tiles of one channel and of many."""
    assert not (
        text := failures(
            [
                Case(
                    "group_norm", (8, 256, 56, 56), dtype, attrs={"groups": 32}, activation="silu"
                ),
                Case(
                    "group_norm", (4, 64, 112, 112), dtype, attrs={"groups": 32}, activation="silu"
                ),
                Case(
                    "group_norm", (2, 64, 112, 112), dtype, attrs={"groups": 8}, activation="relu"
                ),
                Case(
                    "group_norm",
                    (2, 320, 17, 13),
                    dtype,
                    attrs={"groups": 32},
                    activation="hardswish",
                ),
                Case("group_norm", (3, 512, 7, 7), dtype, attrs={"groups": 32}, activation="relu6"),
                Case(
                    "instance_norm",
                    (4, 33, 112, 112),
                    dtype,
                    weight=False,
                    bias=False,
                    activation="relu",
                ),
                Case(
                    "instance_norm",
                    (4, 33, 112, 112),
                    dtype,
                    fill="offset",
                    extra=True,
                    activation="leaky_relu",
                ),
            ]
        )
    ), text


@pytest.mark.parametrize("dtype", [torch.float32, HALF, BRAIN])
def test_norms_of_groups(dtype):
    """Held in registers and in parts, with what follows."""
    target, groups = dt.target("cuda"), {"groups": 32}
    cases = [
        *forward_cases(),
        Forward("group_norm", (8, 256, 56, 56), dtype, "silu", attrs=groups),
        Forward("group_norm", (4, 64, 112, 112), dtype, "relu", attrs={"groups": 8}),
        Forward("group_norm", (2, 320, 64, 64), dtype, fill="offset", attrs=groups),
        Forward("group_norm", (2, 1280, 16, 16), dtype, "silu", affine=False, attrs=groups),
        Forward("instance_norm", (4, 33, 112, 112), dtype, "leaky_relu", fill="offset"),
        Forward("group_norm", (1, 128, 512, 512), dtype, "silu", attrs=groups),
    ]
    found = [(case, text) for case in cases if (text := wrong_forward(case, target, "cuda"))]
    assert not found, found


def test_a_mean_of_a_thousand_deviations():
    assert not (
        text := failures(
            [
                Case("layer_norm", (512, 4096), fill="offset"),
                Case("layer_norm", (16, 20000), fill="offset"),
                Case("group_norm", (4, 64, 56, 56), fill="offset", attrs={"groups": 8}),
            ]
        )
    ), text


def test_addresses_that_are_not_aligned_and_graph_capture():
    from deuteron.kernels.triton.norm import Operands, backward

    rows, n = 1000, 512
    work = RowGradient(rows, n, 1e-5, True, 4, 2)
    x, grad = (torch.randn(rows, n, device="cuda") for _ in range(2))
    w = torch.randn(n, device="cuda")
    dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
    call = backward(work, spreads(work, 132)[0])
    call(Operands(x, grad, w, None, dx, dw, db))
    want = [t.clone() for t in (dx, dw, db)]
    shifted = torch.empty(rows * n + 1, device="cuda")[1:].view(rows, n).copy_(x)
    call(Operands(shifted, grad, w, None, dx, dw, db))
    for got, exact in zip((dx, dw, db), want, strict=True):
        assert error(got, exact) <= allowed(0.0, torch.float32, n)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call(Operands(x, grad, w, None, dx, dw, db))
    for t in (dx, dw, db):
        t.zero_()
    graph.replay()
    for got, exact in zip((dx, dw, db), want, strict=True):
        assert torch.equal(got, exact)


@pytest.mark.parametrize("find", [False, True], ids=["heuristic", "find"])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_a_plan_trains_with_the_kernel(norm, find):
    shape, params = (2048, 4096), "wb" if norm == "layer_norm" else "w"
    g = dt.Graph(norm)
    x, r = g.tensor("x", shape, "bf16"), g.tensor("r", shape, "bf16")
    given = [g.tensor(n, shape[1:], "bf16") for n in params]
    s = x + r
    (getattr(g, norm)(s, *given) + s).output("y")
    both = g.grad("y", wrt=["x", *params])
    plan = both.compile(device="cuda", find=find, budget_s=300)
    shown = "\n".join(f"{c.region.ops}: {c.candidate}" for c in plan.decision.choices)
    chosen = [c for c in plan.decision.choices if f"{norm}_grad" in c.region.ops]
    assert [c.candidate.engine for c in chosen] == ["triton_kernels"], shown
    assert len(chosen[0].region.nodes[0].inputs) == 4, shown  # the sum of gradients is inside
    feed = {n: torch.randn(t.shape, device="cuda").to(BRAIN) for n, t in plan.inputs.items()}

    def torch_way(kind: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = {n: t.to(kind).requires_grad_() for n, t in feed.items()}
        s = leaves["x"] + leaves["r"]
        if norm == "layer_norm":
            y = F.layer_norm(s, shape[1:], leaves["w"], leaves["b"])
        else:
            y = F.rms_norm(s, shape[1:], leaves["w"], 1e-6)
        (y + s).backward(feed["grad_y"].to(kind))
        return {f"grad_{n}": leaves[n].grad for n in ("x", *params)}

    exact, plain = torch_way(F64), torch_way(BRAIN)
    for _ in range(4):  # the third run and later replay a CUDA Graph
        out = plan.run(feed)
        for name, want in exact.items():
            off, limit = error(out[name], want), allowed(error(plain[name], want), BRAIN)
            assert off <= limit, f"{name} off by {off:.3g}, allowed {limit:.3g}\n{shown}"


@pytest.mark.parametrize("columns", [4096, 12288])
def test_more_than_two_to_the_31_elements(columns):
    from deuteron.kernels.triton.norm import Operands, backward

    rows = 2**31 // columns + 77
    work = RowGradient(rows, columns, 1e-6, False, 2, 2)
    x = torch.randn(rows, columns, device="cuda", dtype=BRAIN)
    grad = torch.randn(rows, columns, device="cuda", dtype=BRAIN)
    w = torch.randn(columns, device="cuda", dtype=BRAIN)
    dx, dw = torch.empty_like(x), torch.empty(columns, device="cuda", dtype=torch.float32)
    call = backward(work, spreads(work, dt.target("cuda").units)[0])
    call(Operands(x, grad, w, None, dx, dw))
    total = torch.zeros(columns, device="cuda", dtype=F64)
    for first in range(0, rows, 8192):
        part = x[first : first + 8192].double()
        rstd = torch.rsqrt(part.square().mean(1, keepdim=True) + 1e-6)
        total += (grad[first : first + 8192].double() * part * rstd).sum(0)
    assert error(dw, total) <= allowed(0.0, torch.float32, rows)
    for few in (slice(0, 8), slice(rows - 8, rows)):
        leaf = x[few].double().requires_grad_()
        F.rms_norm(leaf, (columns,), w.double(), 1e-6).backward(grad[few].double())
        assert error(dx[few], leaf.grad) <= allowed(0.0, BRAIN), few
