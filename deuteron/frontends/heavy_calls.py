"""Products, convolutions and operators of ours, by shape alone.

While a module is traced nobody sees the numbers, and these calls are nearly all of what running it
costs: a segmentation network at 512² takes seconds. So they are answered with zeros of the shape
and memory order that torch would give. So are operators of ours, for which a plan of their own
would be made only to be thrown away. What is not plainly of that kind is left to torch, which
computes it, or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from deuteron.frontends.aten import schema_order

Tensor = torch.Tensor


def zeros_like_result(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> Tensor | list[Tensor] | None:
    """Zeros in the place of what a call of real tensors would compute, or None: compute it."""
    if func.namespace == "deuteron":
        return _zeros_of_ours(func, args, kwargs)
    shape_of = SHAPES.get(str(func))
    if shape_of is None:
        return None
    given = schema_order(func, args, kwargs)
    tensors = [a for a in given if isinstance(a, Tensor)]
    first = tensors[0]
    alike = {(t.dtype, t.device) for t in tensors} == {(first.dtype, first.device)}
    if not alike or not all(t.is_contiguous() for t in tensors):
        return None
    shape = shape_of(given)
    return None if shape is None else first.new_zeros(shape)


def _zeros_of_ours(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    device = next(a.device for a in args if isinstance(a, Tensor))
    typed = func(*[_without_data(a) if isinstance(a, Tensor) else a for a in args], **kwargs)
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).zero_()
        for t in typed
    ]


def _without_data(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def _convolved(given: Sequence[Any]) -> tuple[int, ...] | None:
    x, weight, bias, *numbers = given
    dims = weight.ndim - 2
    stride, padding, dilation = (_each(n, dims) for n in numbers[:3])
    if x.ndim != dims + 2 or x.shape[1] != weight.shape[1] * numbers[3] or min(stride) < 1:
        return None
    if weight.shape[0] % numbers[3] or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    room = [n + 2 * p - r for n, p, r in zip(x.shape[2:], padding, reach, strict=True)]
    if min(room) < 0 or min(padding) < 0:
        return None
    return x.shape[0], weight.shape[0], *(n // s + 1 for n, s in zip(room, stride, strict=True))


def _each(value: Any, dims: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * dims if len(numbers) == 1 else numbers


def _linear(given: Sequence[Any]) -> tuple[int, ...] | None:
    x, weight, bias = given
    fits = x.ndim and weight.ndim == 2 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    return *x.shape[:-1], weight.shape[0]


SHAPES: Mapping[str, Callable[[Sequence[Any]], tuple[int, ...] | None]] = {
    **{f"aten.conv{n}d.default": _convolved for n in (1, 2, 3)},
    "aten.linear.default": _linear,
}
