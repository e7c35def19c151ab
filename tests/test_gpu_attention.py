"""Attention in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.attention_cases import cases
from tests.product_cases import compare

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_case(dtype):
    found = [compare(case, "cuda", most=9) for case in cases(dtype)]
    assert sum(count for count, _ in found) >= 12
    assert not [wrong for _, each in found for wrong in each]
