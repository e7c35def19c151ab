"""Row scans by hand: in Triton's interpreter, compiled for GPUs that are not there, and offered.

``python -m tests.interpreted tests.test_triton_scan`` runs the cases in the interpreter.
"""

from __future__ import annotations

import pytest
import torch

import deuteron as dt
from deuteron.engines.triton.kernels import TritonKernels
from deuteron.ir import Region
from deuteron.policy import Policy
from deuteron.target import target
from tests import by_hand
from tests.interpreted import assert_none_failed, found_in_interpreter, tell
from tests.launched import assert_none_spill, compiled
from tests.tolerances import allowed, error

pytest.importorskip("triton")
H200 = target("h200")
SHAPES = ((140, 33), (150, 1), (3, 50, 129))


def region_of(op: str, x: torch.Tensor, axis: int = -1) -> Region:
    g = dt.Graph(op)
    getattr(g, op)(g.tensor("x", x.shape, x.dtype, strides=x.stride()), axis=axis).output("y")
    return Region(g.ir(), frozenset(), 0)


def case(shape, dtype) -> torch.Tensor:
    gen = torch.Generator().manual_seed(0)
    if dtype in (torch.int32, torch.bool):
        return torch.randint(0, 2, shape, generator=gen).to(dtype)
    x = torch.rand(shape, generator=gen, dtype=torch.float64) * 0.2 + 0.9
    x[..., 0] *= 3
    x[5:6, ..., -1:] = float("nan")
    x[6:7, ..., -1:] = float("inf")
    return x.to(dtype)


def wrong_with(op: str, x: torch.Tensor, device: str) -> list[str]:
    name, most = f"{op} {list(x.shape)} {x.dtype}", 1 if device == "cpu" else 99
    given = (name, region_of(op, x), {"x": x}, device, most, x.shape[-1])
    return by_hand.compare(*given, gpus=(H200,))[1]


def wrong_over_blocks(product: bool, device: str) -> list[str]:
    """Rows of several blocks, the last one partly filled: what is carried from one to the next."""
    from deuteron.kernels.triton.scan import row_scan

    x = case((9, 70), torch.float32)
    x[4, 20], x[5, 30] = 0.0, float("nan")
    out, given = torch.full((9, 70), 7.0, device=device), x.to(device)
    row_scan(9, 70, product, (4, 16), 4)(given, out)
    exact = (torch.cumprod if product else torch.cumsum)(x.double(), 1)
    off = error(out, exact)
    return [f"carried, product={product}: {off:.3g}"] if off > allowed(0.0, x.dtype, 70) else []


def main() -> None:
    failed = []
    for op, shape, kind in (
        ("cumsum", (140, 33), torch.float32),
        ("cumprod", (3, 50, 9), torch.float32),
        ("cumprod", (150, 1), torch.float64),
        ("cumsum", (140, 9), torch.bfloat16),
        ("cumsum", (140, 9), torch.int32),
    ):
        failed += wrong_with(op, case(shape, kind), "cpu")
    failed += wrong_over_blocks(False, "cpu") + wrong_over_blocks(True, "cpu")
    tell([(0, failed)])


def test_in_the_interpreter():
    assert_none_failed(found_in_interpreter("tests.test_triton_scan"))


@pytest.mark.parametrize(
    ("arch", "dtype", "op"), [(80, torch.bfloat16, "cumsum"), (90, torch.float32, "cumprod")]
)
def test_compiles_without_spills(arch, dtype, op, monkeypatch):
    x = torch.empty(4096, 4096, dtype=dtype, device="meta")
    assert_none_spill(compiled(region_of(op, x), arch, monkeypatch, most=9), arch)


def test_offers_rows_and_refuses_the_rest():
    engine, x = TritonKernels(), torch.empty(4096, 1024)
    assert engine.refuse(region_of("cumsum", x), H200, Policy()) is None
    for other, axis, reason in ((x, 0, "adjacent"), (x.t(), -1, "adjacent"), (x[:5], -1, "fewer")):
        assert reason in engine.refuse(region_of("cumsum", other, axis), H200, Policy()).reason


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["cumsum", "cumprod"])
def test_on_a_gpu(op):
    kinds = (torch.float32, torch.bfloat16, torch.int32)
    shapes = (*SHAPES, (133, 5000))
    failed = [w for s in shapes for k in kinds for w in wrong_with(op, case(s, k), "cuda")]
    failed += wrong_over_blocks(op == "cumprod", "cuda")
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements():
    from deuteron.kernels.triton.scan import row_scan

    rows, columns = 2**20 + 3, 2048
    if torch.cuda.mem_get_info()[0] < 5 * rows * columns:
        pytest.skip("needs 10 GiB")
    x = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    x[-2:, 0] = 1.0
    out = torch.full_like(x, 7.0)
    row_scan(rows, columns, False, (2, 2048), 4)(x, out)
    assert x.numel() > 2**31 and (out[-2:] == 1.0).all() and not out[:-2].any()


if __name__ == "__main__":
    main()
