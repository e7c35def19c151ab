"""Convolutions with what follows them, by kernels in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

from tests import conv_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_case(dtype):
    cases = list(conv_cases.cases(dtype))
    found = [conv_cases.compare(case, "cuda", most=9) for case in cases]
    assert sum(count for count, _ in found) >= len(cases)
    assert not [wrong for _, each in found for wrong in each]
