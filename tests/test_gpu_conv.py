"""Convolutions with what follows them, by kernels in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

from deuteron.policy import Policy
from tests import conv_cases

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_case(dtype):
    cases = [*conv_cases.cases(dtype), *conv_cases.in_place(dtype), *conv_cases.pulled(dtype)]
    found = [conv_cases.compare(case, "cuda", most=9) for case in cases]
    assert sum(count for count, _ in found) >= len(cases)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_batch_norm_in_training(dtype):
    cases = list(conv_cases.normalised(dtype, large=True))
    found = [conv_cases.compare(case, "cuda", most=3) for case in cases]
    assert sum(count for count, _ in found) >= 2 * len(cases)
    assert not [wrong for _, each in found for wrong in each]


def test_float32_where_no_channel_sees_another():
    cases = [c for c in conv_cases.cases(torch.float32) if c.feed["w"].shape[1] == 1]
    cases += [c for c in conv_cases.pulled(torch.float32) if "alone" in c.name]
    found = [conv_cases.compare(case, "cuda", most=9) for case in cases]
    assert sum(count for count, _ in found) >= len(cases) >= 5
    assert not [wrong for _, each in found for wrong in each]


def test_winograd():
    found = [conv_cases.compare(conv_cases.by_winograd(torch.float32), "cuda", most=9)]
    for dtype, limit in ((torch.float16, 1e-2), (torch.bfloat16, 5e-2)):
        case, policy = conv_cases.by_winograd(dtype), Policy(max_error=limit)
        found.append(conv_cases.compare(case, "cuda", most=9, policy=policy))
    assert not [wrong for _, each in found for wrong in each]


def test_whole_numbers_to_the_last_bit():
    assert not [
        wrong for case in conv_cases.of_integers() for wrong in conv_cases.bits_of(case, "cuda")
    ]
