"""Sparse products by hand: in Triton's interpreter, compiled for GPUs that are not there.

``python -m tests.interpreted tests.test_triton_sparse`` runs the cases in the interpreter.
"""

from __future__ import annotations

import sys

import pytest
import torch

from deuteron.engines.base import BuildContext
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.policy import Policy
from deuteron.target import target
from tests.interpreted import assert_none_failed, found_in_interpreter, tell
from tests.launched import assert_none_spill, compiled, region_of
from tests.sparse_cases import CASES, Case, wrong_on

pytest.importorskip("triton")
H200 = target("h200")


def never_outside(device: str) -> list[str]:
    """Starts and columns that are none: nothing is read there, and the rows are nan."""
    engine, bad = TritonKernels(), []
    case = CASES[0]
    for name, place, value in (("columns", 4, 12), ("columns", 4, -1), ("starts", 1, 2**40)):
        feed = case.feed("spmm_csr", torch.float32)
        feed[name][place] = value
        region = case.region("spmm_csr", feed)
        candidate = engine.candidates(region, H200, Policy())[0]
        out = torch.zeros(5, 33, device=device)
        kernel = engine.build(
            region, candidate, BuildContext(H200, torch.device(device), Policy(), {})
        )
        kernel.fill([t.to(device) for t in feed.values()], [out])
        if not out.isnan().any():
            bad.append(f"{name}[{place}] = {value} went unnoticed")
    return bad


def main() -> None:
    kinds = {"low": (torch.float32, torch.bfloat16), "rest": (torch.float16, torch.float64)}
    count, failed = wrong_on("cpu", kinds[sys.argv[1]], 1)
    tell([(count, failed + never_outside("cpu"))])


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.test_triton_sparse", "low"), at_least=30)


@pytest.mark.sweep
def test_other_types_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.test_triton_sparse", "rest"), at_least=20)


def regions(kind: torch.dtype, block: tuple[int, ...], n: int = 256):
    """The product and the gradient of its values, with long rows and without."""
    case = Case("large", (3000, 5, 100), 64, n, block)
    for op in ("spmm_csr", "sddmm_csr"):
        feed = {name: t.to("meta") for name, t in case.feed(op, kind).items()}
        how = {"block": block} if op == "sddmm_csr" else {}
        yield region_of(op, *feed.values(), **how)


@pytest.mark.parametrize(
    ("arch", "kind", "block"),
    [(90, torch.float32, ()), (80, torch.bfloat16, ()), (80, torch.float32, (32, 32))],
)
def test_compiles_without_spills(arch, kind, block, monkeypatch):
    for region in regions(kind, block):
        assert_none_spill(compiled(region, arch, monkeypatch), arch, region.ops)


@pytest.mark.sweep
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block", [(), (16, 16), (32, 32), (64, 64), (16, 64)])
def test_every_way_compiles_without_spills(arch, kind, block, monkeypatch):
    if not (block and kind == torch.float64):
        for region in regions(kind, block):
            assert_none_spill(compiled(region, arch, monkeypatch, most=9), arch, region.ops)


def test_refuses_what_tensor_cores_do_not_take():
    engine = TritonKernels()
    for kind, block, reason in (
        (torch.float32, (8, 8), "blocks of (8, 8)"),
        (torch.float64, (16, 16), "f64"),
    ):
        for region in regions(kind, block):
            assert reason in engine.refuse(region, H200, Policy()).reason


if __name__ == "__main__":
    main()
