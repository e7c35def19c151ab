"""Max pooling that keeps, for its gradient, which element of each window won.

    y, winners = max_pool_with_winners(x)          dx = max_pool_winners_grad(grad, winners)

A winner is the number of an element in its window, counted row by row, and fits into a byte: an
eighth of an int64 place in the image. For 3 × 3 windows with a stride of 2, in 16 bits per element,
the winners take an eighth of the bytes of x, and x need not be kept for the gradient any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import uint8
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import check_grad
from deuteron.ops.conv import memory_order, ordered
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.formula import TENSORS
from deuteron.ops.opdef import Attributes, Fusion, Vjp, operator
from deuteron.ops.pool import OPS as POOLS
from deuteron.ops.pool import ORDER_OF_X, SHAPE_OF_X, result_order
from deuteron.ops.samples import Sample, samples

MOST_NUMBERED = 255  # elements of a window that a byte can number, and one more for "none"
_POOL, _PLACES, _BACK, *_ = POOLS  # max_pool, max_pool_with_indices and max_pool_grad
_GRAD = "max_pool_winners_grad"


def fits_a_byte(kernel: Sequence[int]) -> bool:
    """Whether a byte can number the elements of a window."""
    return prod(kernel) <= MOST_NUMBERED


def _pooled(op: str, x: TensorType, attrs: Attributes) -> TensorType:
    if not fits_a_byte(attrs["kernel"]):
        many = f"a window of {prod(attrs['kernel'])} elements"
        wrong = f"{op}: {many}, and a byte numbers {MOST_NUMBERED}"
        raise GraphError(wrong, remedy="use max_pool_with_indices")
    y = _POOL.infer(x, **attrs)
    assert isinstance(y, TensorType)
    return y


def _begins(out: int, axis: int, attrs: Attributes, like: Any) -> Tensor:
    """Where the windows begin along a dimension, shaped to broadcast over those after it."""
    step, before = int(attrs["stride"][axis]), int(attrs["padding"][axis])
    found = torch.arange(out, device=getattr(like, "device", None)) * step - before
    return found.reshape(-1, *[1] * (len(attrs["kernel"]) - 1 - axis))


def _places(b: Any, winners: Any, shape: Shape, attrs: Attributes) -> Any:
    """The places of winners in a flattened image of this shape: a tensor, or a value of a graph."""
    rest, places, count = b.cast(winners, dtype="i64"), None, 1
    for axis, size in reversed(list(enumerate(shape[2:]))):
        kernel, out = attrs["kernel"][axis], winners.shape[2 + axis]
        along = b.remainder(rest, kernel) * attrs["dilation"][axis]
        place = (along + b.constant(_begins(out, axis, attrs, winners), "begins")) * count
        places = place if places is None else places + place
        count, rest = count * size, b.floor_div(rest, kernel)
    return places


def _reference(x: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    y, places = _PLACES.reference(x, **attrs)
    winners, count, rest = torch.zeros_like(places), 1, places
    for axis, size in reversed(list(enumerate(x.shape[2:]))):
        begins = _begins(y.shape[2 + axis], axis, attrs, x)
        winners += (rest % size - begins) // attrs["dilation"][axis] * count
        count, rest = count * attrs["kernel"][axis], rest // size
    order = result_order("max_pool", TensorType.from_tensor(x))
    return ordered(y, order), ordered(winners.to(torch.uint8), order)


def _vjp(b: Ops, v: Vjp) -> Grads:
    x = v.arg(0)
    how = {"shape": x.shape, "order": memory_order(x.type), **v.attrs}
    return [b.max_pool_winners_grad(v.grad, v.outs[1], **how)]


def _grad_reference(grad: Tensor, winners: Tensor, shape: Shape, order: str, **how: Any) -> Tensor:
    wide = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.new_zeros((*shape[:2], prod(shape[2:])), dtype=wide)
    places = _places(TENSORS, winners, shape, how).flatten(2)
    found = flat.scatter_add(2, places, grad.flatten(2).to(wide))
    return ordered(found.reshape(shape).to(grad.dtype), order)


def _grad_vjp(b: Ops, v: Vjp) -> Grads:
    """The operator is linear in ``grad``: its gradient picks, for each window, the element at the
    place of the winner."""
    if not v.needs[0]:
        return [None, None]
    grad, shape = v.arg(0), v.attrs["shape"]
    places = _places(b, v.arg(1), shape, v.attrs)
    flat = b.reshape(v.grad, shape=(*shape[:2], prod(shape[2:])))
    at = b.reshape(places, shape=(*shape[:2], prod(grad.shape[2:])))
    return [b.reshape(b.gather(flat, at, axis=2), shape=grad.shape), None]


# x and grad; no window hangs over the end, so that any winner lies inside x
_GRAD_CASES = samples(
    """2x3x6x5 2x3x3x2 kernel=2 | 2x3x7x5@nhwc 2x3x3x2 kernel=3 stride=2
    | 1x2x6x6@nhwc 1x2x3x3 kernel=2 dilation=3 stride=1 | 2x3x8 2x3x3 kernel=3 stride=2
    | 1x2x4x3x4 1x2x3x2x3 kernel=2 stride=1 | 0x3x4x4 0x3x2x2 kernel=2"""
)


def _grad_samples() -> Iterator[Sample]:
    for s in _GRAD_CASES():
        x, grad = s.args
        high = s.attrs["kernel"] ** (len(x.shape) - 2)
        winners = replace(grad, kind="index", dtype="u8", high=high)
        yield Sample((grad, winners), {"shape": x.shape, "order": x.layout, **s.attrs})


@operator(
    Fusion.OPAQUE,
    _reference,
    attrs=_POOL.attrs,
    complete=_POOL.complete,
    vjp=_vjp,
    flops=_POOL.flops,
    samples=lambda: [s for s in _POOL.samples() if s.note != "extreme"],
)
def max_pool_with_winners(x: TensorType, **attrs: Any) -> tuple[TensorType, TensorType]:
    """The largest element of each window, and its number in the window as a byte."""
    y = _pooled("max_pool_with_winners", x, attrs)
    return y, y.with_dtype(uint8)


@operator(
    Fusion.OPAQUE,
    _grad_reference,
    attrs={"shape": SHAPE_OF_X, "order": ORDER_OF_X, **_POOL.attrs},
    complete=_BACK.complete,
    vjp=_grad_vjp,
    flops=_BACK.flops,
    samples=_grad_samples,
)
def max_pool_winners_grad(
    grad: TensorType, winners: TensorType, shape: Shape, order: str, **attrs: Any
) -> TensorType:
    """The gradient of max_pool_with_winners: that of each window goes to its winner."""
    y = _pooled(_GRAD, TensorType.of(shape, grad.dtype), attrs)
    check_grad(_GRAD, grad, y.shape)
    if winners.dtype != uint8 or winners.shape != y.shape:
        raise GraphError(f"{_GRAD}: winners are {winners}", remedy=f"u8{list(y.shape)} is needed")
    return TensorType.of(shape, grad.dtype, order)


def winners_of(attrs: Mapping[str, Any], device: torch.device, gen: torch.Generator) -> Tensor:
    """Possible winners for max_pool_winners_grad with these attributes: those of a random image."""
    how = {name: attrs[name] for name in _POOL.attrs}
    x = torch.randn(attrs["shape"], device=device, generator=gen)
    found: Tensor = max_pool_with_winners.reference(x, **how)[1]
    return found
