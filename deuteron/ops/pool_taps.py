"""Max pooling that keeps, for its gradient, which tap of each window won.

    y, taps = max_pool_with_taps(x)                dx = max_pool_taps_grad(grad, taps)

A tap is the number of an element in its window, counted along its rows, and fits into a byte:
an eighth of a place in the image, and for 3 × 3 windows two apart in 16 bits per element an eighth
of x, which nobody need keep any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import int64, uint8
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.conv import memory_order, ordered
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import REQUIRED, Attr, Fusion, OpDef, Vjp
from deuteron.ops.pool import OPS as POOLS
from deuteron.ops.samples import Arg, Sample

Attributes = Mapping[str, Any]
MOST_TAPS = 255  # that a byte can number, and one more for "none"
_POOLS = {op.name: op for op in POOLS}
_POOL, _PLACES = _POOLS["max_pool"], _POOLS["max_pool_with_indices"]


def fits(kernel: Sequence[int]) -> bool:
    """Whether a byte can number the elements of a window."""
    return prod(kernel) <= MOST_TAPS


def _pooled(op: str, x: TensorType, attrs: Attributes) -> TensorType:
    """The type of the result."""
    if not fits(attrs["kernel"]):
        raise GraphError(
            f"{op}: a window of {prod(attrs['kernel'])} elements, and a byte numbers {MOST_TAPS}",
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


def _laid_out(t: torch.Tensor, like: TensorType) -> torch.Tensor:
    """``t`` in the memory order that inference promises."""
    if tuple(t.stride()) == like.strides:
        return t
    return t.new_empty_strided(like.shape, like.strides).copy_(t)


# ---- forward -------------------------------------------------------------------------------------


def _infer(x: TensorType, **attrs: Any) -> tuple[TensorType, TensorType]:
    y = _pooled("max_pool_with_taps", x, attrs)
    return y, y.with_dtype(uint8)


def _reference(x: torch.Tensor, **attrs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    y, places = _PLACES.reference(x, **attrs)
    taps, count, rest = torch.zeros_like(places), 1, places
    for axis, size in reversed(list(enumerate(x.shape[2:]))):
        begins = _begins(y.shape[2 + axis], axis, attrs, x.device)
        taps += (rest % size - begins) // attrs["dilation"][axis] * count
        count, rest = count * attrs["kernel"][axis], rest // size
    like, _ = _infer(TensorType.from_tensor(x), **attrs)
    return _laid_out(y, like), _laid_out(taps.to(torch.uint8), like)


def _vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    if v.grads[0] is None:
        return [None]
    x = v.arg(0)
    order = memory_order(x.type)
    return [b.max_pool_taps_grad(v.grad, v.outs[1], shape=x.shape, order=order, **v.attrs)]


def _flops(
    ins: Sequence[TensorType | None], outs: Sequence[TensorType], attrs: Attributes
) -> float:
    """One operation per tap of each window, there and back."""
    y = outs[0] if "shape" not in attrs else ins[0]
    assert y is not None
    return float(y.numel * prod(attrs["kernel"]))


def _samples() -> list[Sample]:
    return [s for s in _POOL.samples() if s.note != "extreme"]


WITH_TAPS = OpDef(
    name="max_pool_with_taps",
    doc="The largest element of each window, and its number in the window as a byte.",
    inputs=("x",),
    attrs=_POOL.attrs,
    complete=_POOL.complete,
    infer=_infer,
    reference=_reference,
    fusion=Fusion.OPAQUE,
    vjp=_vjp,
    flops=_flops,
    samples=_samples,
)

# ---- backward ------------------------------------------------------------------------------------

_GRAD = "max_pool_taps_grad"


def _grad_complete(types: Sequence[TensorType | None], attrs: dict[str, Any]) -> dict[str, Any]:
    assert _POOL.complete is not None
    window = _POOL.complete(types, {name: attrs[name] for name in _POOL.attrs})
    return {**attrs, **window}


def _grad_infer(
    grad: TensorType, taps: TensorType, shape: Shape, order: str, **attrs: Any
) -> TensorType:
    y = _pooled(_GRAD, TensorType.of(shape, grad.dtype), attrs)
    if grad.shape != y.shape or taps.shape != y.shape:
        raise GraphError(
            f"{_GRAD}: the gradient is {list(grad.shape)}, the taps {list(taps.shape)}, "
            f"the forward result {list(y.shape)}",
            remedy="use the shape and attributes of the forward operator",
        )
    if taps.dtype != uint8:
        raise GraphError(f"{_GRAD}: taps are {taps.dtype.name}", remedy="give them as uint8")
    return TensorType.of(shape, grad.dtype, order)


def _grad_reference(
    grad: torch.Tensor, taps: torch.Tensor, shape: Shape, order: str, **attrs: Any
) -> torch.Tensor:
    places, count, rest = torch.zeros_like(taps, dtype=torch.int64), 1, taps.long()
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
        tap = b.remainder(rest, v.attrs["kernel"][axis]) * v.attrs["dilation"][axis]
        begins = b.constant(_begins(grad.shape[2 + axis], axis, v.attrs), "begins")
        place = (tap + begins) * count
        places = place if places is None else places + place
        count, rest = count * size, b.floor_div(rest, v.attrs["kernel"][axis])
    flat = b.reshape(v.grad, shape=(*shape[:2], prod(shape[2:])))
    at = b.reshape(places, shape=(*shape[:2], prod(grad.shape[2:])))
    return [b.reshape(b.gather(flat, at, axis=2), shape=grad.shape), None]


def _grad_samples() -> list[Sample]:
    """Windows that do not hang over: any tap is inside."""
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


TAPS_GRAD = OpDef(
    name=_GRAD,
    doc="The gradient of max_pool_with_taps: each window's goes to the winner among its taps.",
    inputs=("grad", "taps"),
    attrs={
        "shape": Attr("ints", REQUIRED, "the shape of x, whose gradient this is"),
        "order": Attr("str", "contiguous", "memory order of the result", ("contiguous", "nhwc")),
        **_POOL.attrs,
    },
    complete=_grad_complete,
    infer=_grad_infer,
    reference=_grad_reference,
    fusion=Fusion.OPAQUE,
    vjp=_grad_vjp,
    flops=_flops,
    samples=_grad_samples,
)

OPS = (WITH_TAPS, TAPS_GRAD)
