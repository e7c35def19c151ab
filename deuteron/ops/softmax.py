"""Softmax and its logarithm along one axis, safe for any input as in PyTorch.

The maximum is taken away first, so large values do not overflow. A row of −inf alone has no
answer and gives nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.types import TensorType
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, elementwise_flops, norm_axes
from deuteron.ops.samples import samples


def _complete(types: Sequence[TensorType | None], attrs: dict[str, Any]) -> dict[str, Any]:
    x = types[0]
    assert x is not None
    (axis,) = norm_axes((attrs["axis"],), max(x.rank, 1), "axis")  # a scalar has axis 0 here
    return {"axis": axis}


def _infer(name: str) -> Callable[..., TensorType]:
    def infer(x: TensorType, axis: int) -> TensorType:
        if not x.dtype.is_float or x.dtype.bits < 16:
            raise GraphError(
                f"{name} of {x.dtype.name} is not defined",
                remedy='cast first: cast(x, dtype="f32")',
            )
        return x.with_layout("contiguous")

    return infer


def _along(b: Ops, x: Sym, axis: int) -> Sym:
    """The sum along the axis; one number alone is its own."""
    return x if x.rank == 0 else b.sum(x, axes=(axis,), keepdim=True)


def _softmax_grad(b: Ops, y: Sym, grad: Sym, axis: int) -> Sym:
    inner = grad * y
    return inner - y * _along(b, inner, axis)


def _log_softmax_grad(b: Ops, y: Sym, grad: Sym, axis: int) -> Sym:
    p: Sym = b.exp(y)
    return grad - p * _along(b, grad, axis)


def _vjp(rule: Callable[[Ops, Sym, Sym, int], Sym]) -> Callable[[Ops, Vjp], list[Sym | None]]:
    def vjp(b: Ops, v: Vjp) -> list[Sym | None]:
        x = v.arg(0)
        return [b.to(rule(b, b.upcast(v.outs[0]), b.upcast(v.grad), v.attrs["axis"]), x.dtype)]

    return vjp


_samples = samples(
    """3x5 | 3x5 axis=0 | 2x3x4 axis=-2 | scalar [scalar] | 0x4 [empty] | 4x0 [no classes]
    | 2x1 [one class] | 3x5@transposed | 3x5@sliced axis=0 | 2x3x4x5@nhwc axis=1
    | 3x5@expanded:offset | 7x9:extreme nograd [extreme]"""
)

OPS = tuple(
    OpDef(
        name=name,
        doc=doc,
        inputs=("x",),
        attrs={"axis": Attr("int", -1, "the axis along which the elements share out 1")},
        infer=_infer(name),
        reference=fn,
        fusion=Fusion.REDUCTION,
        vjp=_vjp(rule),
        flops=elementwise_flops(flops),
        samples=_samples,
        complete=_complete,
    )
    for name, fn, rule, flops, doc in (
        (
            "softmax",
            lambda x, axis: F.softmax(x, axis),
            _softmax_grad,
            12,
            "eˣ divided by its sum along one axis; a row of −inf alone gives nan.",
        ),
        (
            "log_softmax",
            lambda x, axis: F.log_softmax(x, axis),
            _log_softmax_grad,
            12,
            "ln of softmax along one axis, without forming softmax first.",
        ),
    )
)

SOFTMAX, LOG_SOFTMAX = OPS
