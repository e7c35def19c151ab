"""Memory of large results, used again once nobody holds them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from deuteron.ir.types import TensorType
from deuteron.plan.result_memory import Recycled

KIND = TensorType.of((2, 3, 4, 5), "f32", "nhwc")


def test_memory_is_used_again_when_its_tensor_is_gone() -> None:
    make = Recycled(KIND)
    one, two = make(), make()
    assert one.stride() == KIND.strides and one.data_ptr() != two.data_ptr()
    first = one.data_ptr()
    del one
    one = make()
    assert one.data_ptr() == first  # two in turns


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda t: t[0, 1],
    "an array": lambda t: t.numpy(),
    "the storage": lambda t: t.untyped_storage(),
    "autograd": lambda t: torch.ones((), requires_grad=True) * t,
    "another library": lambda t: t.__dlpack__(),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_memory_that_somebody_holds_is_left_alone(name: str) -> None:
    make = Recycled(KIND)
    made = make()
    holder, first = HOLDERS[name](made), made.data_ptr()
    del made
    other = make()
    assert other.data_ptr() != first
    del holder
    assert make().data_ptr() == first


def test_memory_that_was_taken_away_is_made_anew() -> None:
    make = Recycled(KIND)
    make().untyped_storage().resize_(0)
    assert make().untyped_storage().nbytes() == 480
    shared = make().share_memory_()  # another process may read it when this one no longer does
    first = shared.data_ptr()
    del shared
    assert make().data_ptr() != first
