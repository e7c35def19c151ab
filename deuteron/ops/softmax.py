"""Softmax and its logarithm along one axis, safe for any input as in PyTorch.

The maximum is subtracted first, so large values do not overflow. A row of nothing but −inf has no
softmax and gives nan.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F

from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_float, norm_axes
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, Types, Vjp, VjpFn, elementwise_flops, operator


def _complete(types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    rank = max(types[0].rank, 1)  # a scalar has axis 0 here
    return {"axis": norm_axes((attrs["axis"],), rank, "axis")[0]}


def _along(b: Ops, x: Sym, axis: int) -> Sym:
    """The sum along the axis; a scalar is its own sum."""
    return x if x.rank == 0 else b.sum(x, axes=(axis,), keepdim=True)


def _softmax_grad(b: Ops, y: Sym, grad: Sym, axis: int) -> Sym:
    inner = grad * y
    return inner - y * _along(b, inner, axis)


def _log_softmax_grad(b: Ops, y: Sym, grad: Sym, axis: int) -> Sym:
    p: Sym = b.exp(y)
    return grad - p * _along(b, grad, axis)


def _vjp(rule: Callable[[Ops, Sym, Sym, int], Sym]) -> VjpFn:
    def vjp(b: Ops, v: Vjp) -> Grads:
        found = rule(b, b.upcast(v.outs[0]), b.upcast(v.grad), v.attrs["axis"])
        return [b.to(found, v.arg(0).dtype)]

    return vjp


_sharing = partial(
    operator,
    Fusion.REDUCTION,
    attrs={"axis": Attr("int", -1, "the axis along which the elements share out 1")},
    flops=elementwise_flops(12),
    samples="""3x5 | 3x5 axis=0 | 2x3x4 axis=-2 | scalar [scalar] | 0x4 [empty] | 4x0 [no classes]
        | 2x1 [one class] | 3x5@transposed | 3x5@sliced axis=0 | 2x3x4x5@nhwc axis=1
        | 3x5@expanded:offset | 7x9:extreme nograd [extreme]""",
    complete=_complete,
)


@_sharing(lambda x, axis: F.softmax(x, axis), vjp=_vjp(_softmax_grad))
def softmax(x: TensorType, axis: int) -> TensorType:
    """eˣ divided by its sum along one axis; a row of −inf alone gives nan."""
    check_float("softmax", x=x)
    return x.with_layout("contiguous")


@_sharing(lambda x, axis: F.log_softmax(x, axis), vjp=_vjp(_log_softmax_grad))
def log_softmax(x: TensorType, axis: int) -> TensorType:
    """ln of softmax along one axis, without forming softmax first."""
    check_float("log_softmax", x=x)
    return x.with_layout("contiguous")
