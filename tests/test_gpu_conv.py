"""Convolutions with what follows them, by kernels in Triton, on a GPU."""

from __future__ import annotations

import pytest
import torch

from deuteron.policy import Policy
from tests import conv_cases
from tests.sweeps import ways

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize(("dtype", "most"), ways(9))
def test_every_case(dtype, most, part):
    every = *conv_cases.cases(dtype), *conv_cases.in_place(dtype), *conv_cases.pulled(dtype)
    cases = every[part::5]
    found = [conv_cases.compare(case, "cuda", most) for case in cases]
    assert sum(count for count, _ in found) >= len(cases)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_with_batch_norm_in_training(dtype):
    cases = list(conv_cases.normalised(dtype, large=True))
    found = [conv_cases.compare(case, "cuda", most=3) for case in cases]
    assert sum(count for count, _ in found) >= 2 * len(cases)
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_through_batch_norm(dtype):
    cases = list(conv_cases.pulled_through_norms(dtype))
    found = [conv_cases.compare(case, "cuda", most=2) for case in cases]
    assert sum(count for count, _ in found) >= 2 * len(cases)
    assert not [wrong for _, each in found for wrong in each]


def test_float32_where_no_channel_sees_another():
    every = conv_cases.cases(torch.float32)
    cases = [c for c in every if "v" not in c.feed and c.feed["w"].shape[1] == 1]
    cases += [c for c in conv_cases.pulled(torch.float32) if "alone" in c.name]
    found = [conv_cases.compare(case, "cuda", most=9) for case in cases]
    assert sum(count for count, _ in found) >= len(cases) >= 5
    assert not [wrong for _, each in found for wrong in each]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, None), (torch.float16, 1e-2), (torch.bfloat16, 5e-2)]
)
def test_winograd(dtype, limit):
    case, policy = conv_cases.by_winograd(dtype), limit and Policy(max_error=limit)
    count, wrong = conv_cases.compare(case, "cuda", most=9, policy=policy)
    assert count and not wrong


def test_whole_numbers_to_the_last_bit():
    assert not [
        wrong for case in conv_cases.of_integers() for wrong in conv_cases.bits_of(case, "cuda")
    ]
