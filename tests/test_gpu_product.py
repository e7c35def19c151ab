"""Products with what follows them, and attention, by kernels in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests import attention_cases, product_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "made",
    [
        *(product_cases.cases, product_cases.batched, product_cases.shared_out),
        *(product_cases.several, product_cases.normed),
        *(attention_cases.cases, attention_cases.gradients, attention_cases.pages),
    ],
)
def test_every_case(made, dtype):
    cases = list(made(dtype))
    found = [product_cases.compare(case, "cuda", most=9) for case in cases]
    assert sum(count for count, _ in found) >= len(cases)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_products_of_bytes(kind):
    found = [product_cases.compare(case, "cuda", most=9) for case in product_cases.of_bytes(kind)]
    assert sum(count for count, _ in found) >= 3
    assert not [wrong for _, each in found for wrong in each]
