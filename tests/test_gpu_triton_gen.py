"""Generated Triton on a real GPU: operators, kinds, random regions, large and odd tensors."""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.codegen.triton_knobs import choices
from deuteron.codegen.triton_load import Launcher
from deuteron.codegen.triton_render import Knobs, render
from tests.codegen_cases import (
    kind_cases,
    laid_out,
    norm_case,
    operator_cases,
    random_cases,
    softmax_case,
)
from tests.codegen_kept import kept_cases
from tests.gpu_codegen import run_case
from tests.tolerances import EPS, error

pytestmark = pytest.mark.gpu
pytest.importorskip("triton")


def failures(cases) -> str:
    found = [(c.name, run_case(c, k)) for c, k in cases]
    return "\n\n".join(f"{name}\n{wrong}" for name, wrong in found if wrong)


@pytest.mark.parametrize("float_type", ["f32", "f16", "bf16"])
def test_operators(float_type):
    seen: dict[str, int] = {}
    cases = []
    for case in operator_cases(float_type):
        op = case.name.split("-")[0]
        seen[op] = seen.get(op, 0) + 1
        if seen[op] <= 3:  # half a second each to compile
            cases.append((case, None))
    assert not (wrong := failures(cases)), wrong


@pytest.mark.parametrize("float_type", ["f32", "bf16"])
def test_every_kind(float_type):
    assert not (wrong := failures(kind_cases(float_type))), wrong


def test_kept_cases():
    assert not (wrong := failures((c, None) for c in kept_cases())), wrong


def test_random_regions():
    assert not (wrong := failures((c, None) for c in random_cases(range(60)))), wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "columns"), [(1, 1000), (300, 768), (64, 4096), (7, 50257), (3, 131072), (1000, 33)]
)
def test_rows_of_many_lengths_by_every_candidate(rows, columns, dtype):
    for case in (norm_case(rows, columns, dtype), softmax_case(rows, columns, dtype)):
        assert not (wrong := run_case(case, ways=6)), wrong


def test_more_than_two_to_the_31_elements():
    size = 2**31 + 4096
    from deuteron.codegen.lower import lower
    from deuteron.ir import GraphBuilder, TensorType
    from deuteron.ir.dtype import dtype
    from deuteron.ir.region import Region
    from deuteron.ops import Ops, infer

    build = GraphBuilder(infer, "big")
    ops = Ops(build)
    ops.relu(ops.sym(build.input("x", TensorType((size,), dtype("f16"), (1,))))).output("y")
    graph = build.finish()
    program = lower(Region(graph))
    x = torch.zeros(size, dtype=torch.float16, device="cuda")
    x[-5:] = torch.tensor([1, -2, 3, -4, 5])
    y = torch.full_like(x, 9)
    rendered = render(program, choices(program)[0])
    Launcher(rendered, ("x", dict(graph.outputs)["y"]), x.device)(x, y)
    assert y[-5:].tolist() == [1, 0, 3, 0, 5] and y[:8].tolist() == [0] * 8
    assert float(y.sum(dtype=torch.float64)) == 9


def test_addresses_that_are_not_aligned_and_graph_capture():
    case = norm_case(64, 256)
    rendered = render(case.program, Knobs("rows", 256, 4))
    given = [laid_out(t, t.stride(), "cuda") for t in case.feed.values()]
    outs = case.empty_outputs("cuda")
    launch = Launcher(rendered, (*case.feed, *outs), torch.device("cuda"))
    (out,) = outs.values()
    launch(*given, out)
    want = out.clone()
    shifted = torch.empty(given[0].numel() + 1, device="cuda")[1:].view(given[0].shape)
    shifted.copy_(given[0])
    out.zero_()
    launch(shifted, *given[1:], out)
    assert error(out, want) <= 4 * EPS[torch.float32]
    graph = torch.cuda.CUDAGraph()
    out.zero_()
    with torch.cuda.graph(graph):
        launch(*given, out)
    graph.replay()
    assert torch.equal(out, want)


def test_competes_in_a_plan():
    g = dt.Graph("block")
    x, b = g.tensor("x", (512, 1024)), g.tensor("b", (1024,))
    g.softmax(g.relu(x + b), axis=-1).output("y")
    plan = g.compile(find=True, device="cuda", budget_s=20)
    tx, tb = torch.randn(512, 1024, device="cuda"), torch.randn(1024, device="cuda")
    out = plan.run(x=tx, b=tb)["y"]
    want = torch.softmax(torch.relu(tx.double() + tb.double()), -1)
    assert error(out, want) <= 8 * EPS[torch.float32]
