"""Matrix products: ``matmul`` with PyTorch's rules for vectors and batches, and ``linear``.

Operands have one element type; results are row-major whatever the operands' strides. A product
of 16-bit operands adds up in float32 and is rounded once, which is why a gradient summed over a
batch is written as one larger product wherever the shapes allow it. Integers of fewer than 32 bits
are summed in int32, which is the type of the result; a graph imported from torch, where sums wrap
around at every step, takes the low bits of that. 8-bit floats are summed in float32, which is then
the type of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, float32, int32
from deuteron.ir.types import TensorType
from deuteron.ops.checks import broadcast, check_shape, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attributes, Fusion, Given, Types, Vjp, operator


def product_flops(ins: Types, outs: Sequence[TensorType], attrs: Attributes) -> float:
    """One multiplication and one addition per step along the inner dimension."""
    return 2.0 * outs[0].numel * float(ins[0].shape[-1])


def summed_type(kind: DType) -> DType:
    """The element type of sums of products."""
    if kind.bits > 8 and (kind.is_float or kind.bits >= 32):
        return kind
    return float32 if kind.is_float else int32


def _multiplied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The product. torch has no product of integers on a GPU; there we use float64, which holds
    products of 16-bit integers exactly, and sums of as many of them as anybody adds up."""
    if x.is_floating_point() and x.element_size() == 1:
        return torch.matmul(x.float(), y.float())
    if x.is_floating_point() or x.element_size() >= 4:
        return torch.matmul(x, y)
    if x.is_cpu:
        return torch.matmul(x.int(), y.int())
    return torch.matmul(x.double(), y.double()).long().int()


def _linear_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    wide = x.is_floating_point() and x.element_size() > 1
    if wide or x.element_size() >= 4:
        return F.linear(x, weight, bias)
    found = _multiplied(x, weight.mT)
    return found if bias is None else found + bias


def _transposed(b: Ops, x: Sym) -> Sym:
    return b.one("permute", x, dims=(*range(x.rank - 2), x.rank - 1, x.rank - 2))


def _reshaped(b: Ops, x: Sym, *shape: int) -> Sym:
    return x if x.shape == shape else b.reshape(x, shape=shape)


def _left_gradient(b: Ops, x: Sym, y: Sym, grad: Sym) -> Sym:
    """grad · yᵀ in the shape of x. If x is one matrix for a batch of y, one product also sums over
    the batch."""
    m, n = grad.shape[-2:]
    if x.rank == 2 and grad.rank > 2:
        lead = grad.rank - 2
        grad = b.permute(grad, dims=(lead, *range(lead), lead + 1))
        wide = _reshaped(b, grad, m, prod(grad.shape[1:-1]) * n)
        return b.one("matmul", wide, _reshaped(b, _transposed(b, y), wide.shape[1], x.shape[1]))
    return _summed(b, b.matmul(grad, _transposed(b, y)), x.type)


def _right_gradient(b: Ops, x: Sym, y: Sym, grad: Sym) -> Sym:
    """xᵀ · grad in the shape of y. If y has no batch, one product sums over the rows of all
    batches of x."""
    if y.rank == 2:
        rows = prod(grad.shape[:-1])
        flat = _transposed(b, _reshaped(b, x, rows, y.shape[0]))
        return b.one("matmul", flat, _reshaped(b, grad, rows, y.shape[1]))
    return _summed(b, b.matmul(_transposed(b, x), grad), y.type)


def _summed(b: Ops, grad: Sym, like: TensorType) -> Sym:
    """``grad`` added up over the batch dimensions that ``like`` was stretched along."""
    return grad if grad.shape == like.shape else b.unbroadcast(b.upcast(grad), like)


def refuse_bytes(x: Sym) -> None:
    """Raise for 8-bit numbers: their products have no gradient."""
    if x.dtype.bits == 8:
        remedy = "cast the factors to bfloat16 where a gradient is wanted"
        raise GraphError(f"a product of {x.dtype.name} has no gradient", remedy=remedy)


def _matmul_vjp(b: Ops, v: Vjp) -> Grads:
    x, y = v.arg(0), v.arg(1)
    refuse_bytes(x)
    row = _reshaped(b, x, 1, *x.shape) if x.rank == 1 else x
    column = _reshaped(b, y, *y.shape, 1) if y.rank == 1 else y
    batch = broadcast(row.shape[:-2], column.shape[:-2])
    grad = _reshaped(b, v.grad, *batch, row.shape[-2], column.shape[-1])
    dx = _left_gradient(b, row, column, grad) if v.needs[0] else None
    dy = _right_gradient(b, row, column, grad) if v.needs[1] else None
    return [None if g is None else _reshaped(b, g, *t.shape) for g, t in ((dx, x), (dy, y))]


@operator(
    Fusion.COMPLEX,
    _multiplied,
    vjp=_matmul_vjp,
    flops=product_flops,
    samples="""3x4 4x5 | 4 4 | 3x4@transposed 4 | 4 2x4x3 | 2x3x4 4x5@transposed | 3x4 2x4x5
        | 2x1x3x4@nhwc 5x4x2@sliced | 3x1x2@expanded 3x2x1 | 0x3 3x2 [empty]
        | 2x0 0x3 [nothing to add up] | 3x4:i32 4x2:i32 [integers]
        | 3x40:i8 40x2:i8 [sums of bytes] | 2x3x4:u8 4x2:u8 | 3x4:i16 4:i16
        | 3x5:extreme 5x2:extreme nograd [extreme]""",
)
def matmul(x: TensorType, y: TensorType) -> TensorType:
    """The matrix product x · y over the last two dimensions; the others broadcast. A vector counts
    as a row on the left and as a column on the right. Integers below 32 bits give int32, 8-bit
    floats give float32."""
    one_dtype("matmul", ints=True, least=8, x=x, y=y)
    for name, t in (("x", x), ("y", y)):
        if t.rank == 0:
            wrong = f"matmul needs at least one dimension, {name} is a scalar"
            raise GraphError(wrong, remedy="multiply by a scalar with mul")
    inner = y.shape[-2:][0]
    if x.shape[-1] != inner:
        sizes = f"x {list(x.shape)} ends in {x.shape[-1]}, y {list(y.shape)} has {inner} rows"
        remedy = "make them equal, or swap the last two dimensions of one with permute"
        raise GraphError(f"inner sizes of matmul differ: {sizes}", remedy=remedy)
    batch, columns = broadcast(x.shape[:-2], y.shape[:-2]), y.shape[1:][-1:]
    return TensorType.of((*batch, *x.shape[-2:-1], *columns), summed_type(x.dtype))


def _linear_vjp(b: Ops, v: Vjp) -> Grads:
    x, weight, grad = v.arg(0), v.arg(1), v.grad
    refuse_bytes(x)
    rows, (out, inner) = prod(x.shape[:-1]), weight.shape
    dx = b.matmul(grad, weight) if v.needs[0] else None
    dw = None
    if v.needs[1]:
        dw = b.matmul(_transposed(b, _reshaped(b, grad, rows, out)), _reshaped(b, x, rows, inner))
    db = b.unbroadcast(b.upcast(grad), v.arg(2).type) if v.needs[2] else None
    return [dx, dw, db]


@operator(
    Fusion.COMPLEX,
    _linear_reference,
    vjp=_linear_vjp,
    flops=product_flops,
    samples="""3x4 5x4 5 | 2x3x4 5x4 _ | 4 5x4 5 | 2x3x2x4@nhwc 3x4@transposed 3 | 3x4@sliced 1x4 1
        | 3x2x4@expanded 5x4@sliced _ | 0x4 5x4 5 [empty] | 3x0 2x0 2 [nothing to add up]
        | 3x4:i32 2x4:i32 _ [integers] | 3x5:extreme 2x5 2 nograd [extreme]
        | 3x40:i8 2x40:i8 2:i32 [sums of bytes] | 2x3x4:u8 2x4:u8 _""",
)
def linear(x: TensorType, weight: TensorType, bias: Given) -> TensorType:
    """x · weightᵀ + bias along the last dimension of x; weight is [out, in], bias [out]. Integers
    below 32 bits give int32, 8-bit floats give float32; the bias has that type, too."""
    kind = summed_type(x.dtype)
    given = bias if kind == x.dtype else None
    one_dtype("linear", ints=True, least=8, x=x, weight=weight, bias=given)
    if bias is not None and bias.dtype != kind:
        wrong = f"the bias of linear is {bias.dtype.name}, its sums are {kind.name}"
        raise GraphError(wrong, remedy=f'cast it: cast(bias, dtype="{kind.short}")')
    if x.rank == 0 or weight.rank != 2:
        shapes = f"x {list(x.shape)} and weight {list(weight.shape)}"
        wrong = f"linear takes x of rank 1 or more and weight [out, in], not {shapes}"
        raise GraphError(wrong, remedy="reshape them, or use matmul")
    out, inner = weight.shape
    if x.shape[-1] != inner:
        takes = f"weight {list(weight.shape)} takes {inner}"
        wrong = f"linear: x {list(x.shape)} ends in {x.shape[-1]}, {takes}"
        remedy = "the weight is stored [out, in]; transpose it with permute if it is [in, out]"
        raise GraphError(wrong, remedy=remedy)
    check_shape("the bias of linear", bias, (out,), "give one number per output, or add it later")
    return TensorType.of((*x.shape[:-1], out), kind)
