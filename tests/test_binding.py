"""What a plan is given is checked in every run, whether tensors like these came before or not."""

from __future__ import annotations

import pytest
import torch

from deuteron.errors import BindError
from deuteron.ir.types import TensorType
from deuteron.plan.binding import MANY, Binder

SHAPES = [(2, 3), (4,), (), (5, 1, 2), (3, 3), (1, 6)]
CPU = torch.device("cpu")


def given() -> list[torch.Tensor]:
    return [torch.randn(shape) for shape in SHAPES]


@pytest.fixture
def binder():
    assert len(SHAPES) > MANY
    types = [TensorType.from_tensor(t) for t in given()]
    binder = Binder([f"x{i}" for i in range(len(types))], types, CPU)
    for _ in range(3):
        binder.check(given())
    return binder


@pytest.mark.parametrize(
    ("at", "wrong", "says"),
    [
        (0, torch.randn(3, 2), "shape"),
        (0, torch.randn(3, 2).T, "strides"),
        (1, torch.randn(4).double(), "float64"),
        (1, torch.randn(4, dtype=torch.complex64).conj().imag, "neg"),
        (2, 1.0, "float"),
        (3, None, "NoneType"),
        (4, torch.randn(3, 3, device="meta"), "meta"),
        (4, torch.eye(3).to_sparse(), "spars"),
    ],
)
def test_after_tensors_that_fit_others_are_refused(binder, at, wrong, says):
    tensors = given()
    tensors[at] = wrong
    with pytest.raises(BindError, match=f"x{at}.*{says}|{says}.*x{at}"):
        binder.check(tensors)
    with pytest.raises(BindError, match="tensors for"):
        binder.check(given()[:-1])
    binder.check(given())


def test_strides_that_do_not_matter_are_made_the_declared_ones(binder):
    """Also after tensors that had the declared ones."""
    for _ in range(3):
        tensors = given()
        tensors[5] = torch.randn(6, 1).T
        tensors[3] = torch.randn(5, 2).as_strided((5, 1, 2), (2, 7, 1))
        binder.check(tensors)
        assert tensors[5].stride() == (6, 1) and tensors[3].stride() == (2, 2, 1)


def test_one_tensor_may_be_given_twice():
    types = [TensorType.from_tensor(torch.randn(3))] * 5
    binder, x = Binder("abcde", types, CPU), torch.randn(3)
    for _ in range(6):
        binder.check([x] * 5)
    with pytest.raises(BindError):
        binder.check([x] * 4 + [x[:2]])
