"""Max pooling that keeps, for its gradient, which element of each window won.

    y, winners = max_pool_with_winners(x)          dx = max_pool_winners_grad(grad, winners)

A winner is the number of an element in its window, counted along its rows, and fits into a byte:
an eighth of a place in the image, and for 3 × 3 windows two apart in 16 bits per element an eighth
of x, which nobody need keep any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64, uint8
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.conv import memory_order, ordered
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Fusion, OpDef, Vjp
from deuteron.ops.pool import OPS as POOLS
from deuteron.ops.pool import ORDER_OF_X, SHAPE_OF_X, check_gradient, result_order
from deuteron.ops.samples import Arg, Sample

Attributes = Mapping[str, Any]
MOST_NUMBERED = 255  # elements of a window that a byte can number, and one more for "none"
_POOL, _PLACES, *_ = POOLS  # max_pool, and max_pool_with_indices
_GRAD = "max_pool_winners_grad"


def fits(kernel: Sequence[int]) -> bool:
    """Whether a byte can number the elements of a window."""
    return prod(kernel) <= MOST_NUMBERED


def _pooled(op: str, x: TensorType, attrs: Attributes) -> TensorType:
    """The type of the result."""
    if not fits(attrs["kernel"]):
        raise GraphError(
            f"{op}: a window of {prod(attrs['kernel'])} elements, and a byte numbers "
            f"{MOST_NUMBERED}",
            remedy="use max_pool_with_indices",
        )
    y = _POOL.infer(x, **attrs)
    assert isinstance(y, TensorType)
    return y


def _begins(out: int, axis: int, attrs: Attributes, device: Any = None) -> torch.Tensor:
    """Where the windows begin along a dimension, to be broadcast over those after it."""
    step, before = int(attrs["stride"][axis]), int(attrs["padding"][axis])
    found = torch.arange(out, device=device) * step - before
    return found.reshape(-1, *[1] * (len(attrs["kernel"]) - 1 - axis))


def _infer(x: TensorType, **attrs: Any) -> tuple[TensorType, TensorType]:
    y = _pooled("max_pool_with_winners", x, attrs)
    return y, y.with_dtype(uint8)


def _reference(x: torch.Tensor, **attrs: Any) -> tuple[torch.Tensor, ...]:
    y, places = _PLACES.reference(x, **attrs)
    winners, count, rest = torch.zeros_like(places), 1, places
    for axis, size in reversed(list(enumerate(x.shape[2:]))):
        begins = _begins(y.shape[2 + axis], axis, attrs, x.device)
        winners += (rest % size - begins) // attrs["dilation"][axis] * count
        count, rest = count * attrs["kernel"][axis], rest // size
    order = result_order("max_pool", TensorType.from_tensor(x))
    return ordered(y, order), ordered(winners.to(torch.uint8), order)


def _vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    if v.grads[0] is None:
        return [None]
    x = v.arg(0)
    how = {"shape": x.shape, "order": memory_order(x.type), **v.attrs}
    return [b.max_pool_winners_grad(v.grad, v.outs[1], **how)]


def _flops(
    ins: Sequence[TensorType | None], outs: Sequence[TensorType], attrs: Attributes
) -> float:
    """One operation per element of each window, there and back."""
    y = outs[0] if "shape" not in attrs else ins[0]
    assert y is not None
    return float(y.numel * prod(attrs["kernel"]))


# ---- backward ------------------------------------------------------------------------------------


def _grad_complete(types: Sequence[TensorType | None], attrs: dict[str, Any]) -> dict[str, Any]:
    assert _POOL.complete is not None
    return {**attrs, **_POOL.complete(types, {name: attrs[name] for name in _POOL.attrs})}


def _grad_infer(
    grad: TensorType, winners: TensorType, shape: Shape, order: str, **attrs: Any
) -> TensorType:
    y = _pooled(_GRAD, TensorType.of(shape, grad.dtype), attrs)
    check_gradient(_GRAD, grad, y.shape)
    if winners.dtype != uint8 or winners.shape != y.shape:
        raise GraphError(f"{_GRAD}: winners are {winners}", remedy=f"u8{list(y.shape)} is needed")
    return TensorType.of(shape, grad.dtype, order)


def _grad_reference(
    grad: torch.Tensor, winners: torch.Tensor, shape: Shape, order: str, **attrs: Any
) -> torch.Tensor:
    places, count, rest = torch.zeros_like(winners, dtype=torch.int64), 1, winners.long()
    for axis, size in reversed(list(enumerate(shape[2:]))):
        begins = _begins(grad.shape[2 + axis], axis, attrs, grad.device)
        places += (begins + rest % attrs["kernel"][axis] * attrs["dilation"][axis]) * count
        count, rest = count * size, rest // attrs["kernel"][axis]
    wide = torch.promote_types(grad.dtype, torch.float32)
    flat = grad.new_zeros((*shape[:2], prod(shape[2:])), dtype=wide)
    found = flat.scatter_add(2, places.flatten(2), grad.flatten(2).to(wide))
    return ordered(found.reshape(shape).to(grad.dtype), order)


def _grad_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    """Linear in the gradient, which each winner hands back to its window."""
    if not v.needs[0]:
        return [None, None]
    grad, shape = v.arg(0), v.attrs["shape"]
    rest, places, count = b.to(v.arg(1), int64), None, 1
    for axis, size in reversed(list(enumerate(shape[2:]))):
        along = b.remainder(rest, v.attrs["kernel"][axis]) * v.attrs["dilation"][axis]
        begins = b.constant(_begins(grad.shape[2 + axis], axis, v.attrs), "begins")
        place = (along + begins) * count
        places = place if places is None else places + place
        count, rest = count * size, b.floor_div(rest, v.attrs["kernel"][axis])
    flat = b.reshape(v.grad, shape=(*shape[:2], prod(shape[2:])))
    at = b.reshape(places, shape=(*shape[:2], prod(grad.shape[2:])))
    return [b.reshape(b.gather(flat, at, axis=2), shape=grad.shape), None]


def _grad_samples() -> list[Sample]:
    """Windows that do not hang over: any winner is inside."""
    cases: tuple[tuple[Shape, Shape, str, dict[str, Any]], ...] = (
        ((2, 3, 6, 5), (2, 3, 3, 2), "contiguous", {"kernel": 2}),
        ((2, 3, 7, 5), (2, 3, 3, 2), "nhwc", {"kernel": 3, "stride": 2}),
        ((1, 2, 6, 6), (1, 2, 3, 3), "nhwc", {"kernel": 2, "dilation": 3, "stride": 1}),
        ((2, 3, 8), (2, 3, 3), "contiguous", {"kernel": 3, "stride": 2}),
        ((1, 2, 4, 3, 4), (1, 2, 3, 2, 3), "contiguous", {"kernel": 2, "stride": 1}),
        ((0, 3, 4, 4), (0, 3, 2, 2), "contiguous", {"kernel": 2}),
    )
    return [
        Sample(
            (Arg(out), Arg(out, "index", dtype="u8", high=attrs["kernel"] ** (len(shape) - 2))),
            {"shape": shape, "order": order, **attrs},
        )
        for shape, out, order, attrs in cases
    ]


WITH_WINNERS = OpDef(
    name="max_pool_with_winners",
    doc="The largest element of each window, and its number in the window as a byte.",
    inputs=("x",),
    attrs=_POOL.attrs,
    complete=_POOL.complete,
    infer=_infer,
    reference=_reference,
    fusion=Fusion.OPAQUE,
    vjp=_vjp,
    flops=_flops,
    samples=lambda: [s for s in _POOL.samples() if s.note != "extreme"],
)
WINNERS_GRAD = replace(
    WITH_WINNERS,
    name=_GRAD,
    doc="The gradient of max_pool_with_winners: each window's goes to its winner.",
    inputs=("grad", "winners"),
    attrs={"shape": SHAPE_OF_X, "order": ORDER_OF_X, **_POOL.attrs},
    complete=_grad_complete,
    infer=_grad_infer,
    reference=_grad_reference,
    vjp=_grad_vjp,
    samples=_grad_samples,
)

OPS = (WITH_WINNERS, WINNERS_GRAD)
