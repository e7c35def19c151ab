"""Rows added to a table by index: in Triton's interpreter, compiled for GPUs, and offered.

``python -m tests.interpreted tests.test_triton_embedding_grad`` runs the cases in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir.region import Region
from deuteron.ops.evaluate import evaluate
from deuteron.plan.tensors import poisoned
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter, tell
from tests.launched import assert_none_spill, compiled, region_of
from tests.tolerances import allowed, error

pytest.importorskip("triton")
H200 = target("h200")
# entries, rows and numbers of a row; how many different rows are named; the row left out
CASES = {
    "few": ((7, 5, 3), 5, -1),
    "all of one row": ((300, 9, 1), 1, -1),
    "two long ones": ((300, 9, 2), 2, -1),
    "many": ((70, 1000, 5), 1000, -1),
    "a row left out": ((20, 6, 130), 6, 2),
    "only that": ((40, 3, 2), 1, 0),
    "one entry": ((1, 4, 260), 4, -1),
    "large numbers": ((40, 2**27, 1), 2**27, -1),
    "words": ((5000, 30522, 768), 700, 3),
}


def given(name: str, dtype: torch.dtype = torch.float32, onto: bool = False) -> list[torch.Tensor]:
    (entries, rows, wide), named, _ = CASES[name]
    gen = torch.Generator().manual_seed(1)
    grad = torch.randn(entries, wide, generator=gen).to(dtype)
    index = torch.randint(0, named, (entries,), generator=gen) + (rows - named) * (named != 1)
    tables = [torch.randn(rows, wide, generator=gen).to(dtype)] if onto else []
    return [grad, index, *tables]


def wrong_with(name: str, dtype: torch.dtype, onto: bool, device: str) -> list[str]:
    tensors = given(name, dtype, onto)
    attrs = {"rows": CASES[name][0][1], "padding_idx": CASES[name][2]}
    region, engine = region_of("embedding_grad", *tensors, **attrs), TritonKernels()
    feed = dict(zip(region.inputs, tensors, strict=True))
    exact = {k: t.double() if t.is_floating_point() else t for k, t in feed.items()}
    double = region_of("embedding_grad", *exact.values(), **attrs)
    want, theirs = evaluate(double.graph, exact)["y0"], evaluate(region.graph, feed)["y0"]
    bad = []
    (candidate,) = engine.candidates(region, H200, Policy())
    kernel = engine.build(region, candidate, BuildContext(H200, torch.device(device), Policy(), {}))
    for over in (False, True)[: 1 + onto]:
        there = [t.to(device) for t in tensors]
        out = poisoned(region.graph.types[region.outputs[0]], torch.device(device))
        out = there[2] if over else out
        kernel.fill(there, [out])
        if error(out.cpu(), want) > allowed(error(theirs, want), dtype):
            bad.append(f"{name} {dtype} onto={onto} over={over}: {error(out.cpu(), want)}")
    return bad


def wrong_on(device: str) -> list[str]:
    small = [name for name, ((_, rows, _), *_) in CASES.items() if rows <= 1000]
    kinds = (torch.float32, torch.bfloat16)
    found = [w for n in small for o in (False, True) for w in wrong_with(n, kinds[o], o, device)]
    return found + wrong_with("a row left out", torch.float16, False, device)


def main() -> None:
    tell([(0, wrong_on("cpu"))])


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.test_triton_embedding_grad"))


@pytest.mark.parametrize(("arch", "dtype"), [(80, torch.float32), (90, torch.bfloat16)])
@pytest.mark.parametrize("rows", [50257])
def test_compiles_without_spills(arch, dtype, rows, monkeypatch):
    """Entries with numbers of 32 and of 64 bits."""
    grad = torch.empty(8192, 768, dtype=dtype, device="meta")
    index = torch.empty(8192, dtype=torch.int64, device="meta")
    kernels = compiled(region_of("embedding_grad", grad, index, rows=rows), arch, monkeypatch)
    assert len(kernels) == 4
    assert_none_spill(kernels, arch)


def test_a_table_that_is_also_a_weight_gets_its_rows_in_place():
    """As of language models whose words in and out are one table: nothing of its size is made but
    the gradient itself."""
    g = dt.Graph("tied")
    x, dy = g.tensor("x", (256, 64), "f32"), g.tensor("dy", (256, 5000), "f32")
    grad, index = g.tensor("grad", (256, 64), "f32"), g.tensor("index", (256,), "i64")
    product = g.matmul(g.permute(dy, dims=(1, 0)), x)
    total = product + g.embedding_grad(grad, index, rows=5000)
    g.square(total).output("y")
    regions = g.compile(device="cpu").explain(target="h200").report.regions
    (last,) = [r for r in regions if "embedding_grad" in r.ops]
    assert last.ops == ("embedding_grad",)
    assert last.candidate.startswith("triton_kernels[recipe=embedding_grad")
    plan = g.compile(device="cpu")
    assert plan.program.spots, "the product's memory becomes the result's"
    x, dy, grad, index = (
        *(torch.randn(256, n) for n in (64, 5000, 64)),
        torch.randint(0, 5000, (256,)),
    )
    want, theirs = (
        ((dy.T.to(kind) @ x.to(kind)).index_add(0, index, grad.to(kind))) ** 2
        for kind in (torch.float64, torch.float32)
    )
    got = plan.run(x=x, dy=dy, grad=grad, index=index)["y"]
    assert error(got, want) <= allowed(error(theirs, want), torch.float32)


def test_rows_that_are_added_to_their_own_table_are_read_as_they_were():
    """Who writes where it lies what others still have to read adds up sums, not rows."""
    g = dt.Graph("itself")
    x, index = g.tensor("x", (400, 33), "f32"), g.tensor("index", (400,), "i64")
    y = g.exp(x)
    g.square(y + g.embedding_grad(y, index, rows=400)).output("y")
    x, index = torch.randn(400, 33), torch.randint(0, 400, (400,))
    want = (x.double().exp().index_add(0, index, x.double().exp())) ** 2
    plan = g.compile(device="cpu")
    theirs = error((x.exp().index_add(0, index, x.exp())) ** 2, want)
    assert error(plan.run(x=x, index=index)["y"], want) <= allowed(theirs, torch.float32, 8)
    alone = dt.Graph("alone")
    x, index = alone.tensor("x", (400, 33), "f32"), alone.tensor("index", (400,), "i64")
    alone.embedding_grad(x, index, x, rows=400).output("y")
    region, machine = Region(alone.ir()), (H200, torch.device("cpu"))
    for candidate in TritonKernels().candidates(region, H200, Policy()):
        kernel = TritonKernels().build(region, candidate, BuildContext(*machine, Policy(), {}))
        assert kernel.over == ()


@pytest.mark.gpu
def test_on_a_gpu():
    failed = wrong_on("cuda")
    for name, onto in (("large numbers", False), ("words", False), ("words", True)):
        failed += wrong_with(name, torch.float32, onto, "cuda")
    assert not failed, "\n".join(failed)


if __name__ == "__main__":
    main()
