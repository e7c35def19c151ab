"""Operators with an index: look up the rows it names, or add up elements that share an index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float64, int32, int64
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import check_index
from deuteron.ops.elementwise import floats
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.movement import AXIS, with_axis
from deuteron.ops.opdef import Attr, Fusion, Given, Vjp, elementwise_flops, input_flops, operator
from deuteron.ops.reference import LOW, fixed_order


def _scatter_add_reference(index: Tensor, src: Tensor, shape: Shape, axis: int) -> Tensor:
    wide = src.float() if src.dtype in LOW else src
    return wide.new_zeros(shape).scatter_add(axis, index.expand_as(src), wide).to(src.dtype)


def _scatter_add_vjp(b: Ops, v: Vjp) -> Grads:
    index, shape = v.arg(0), v.arg(1).shape
    every = index if index.shape == shape else b.expand(index, shape)
    return [None, b.gather(v.grad, every, axis=v.attrs["axis"])]


@operator(
    Fusion.OPAQUE,
    _scatter_add_reference,
    attrs={"shape": Attr("ints", doc="the sizes of the result"), "axis": AXIS},
    complete=with_axis,
    vjp=_scatter_add_vjp,
    flops=input_flops(1),
    samples="""6x3:index<4 6x3 shape=(4,3) axis=0 | 2x5:index<3 2x5 shape=(4,3) axis=-1
        | 0:index<5 0 shape=(5,) axis=0 | 4x2:index<3 4x2@transposed shape=(4,3) axis=1
        | 1x3:index<4 1x3@sliced shape=(4,3) axis=0 | 5x3:index<1 5x3@expanded shape=(1,3) axis=0
        | 2x1x2x2:index<3 2x1x2x2@nhwc shape=(2,3,2,2) axis=1 | 6x1:index<4 6x3 shape=(4,3) axis=0
        | 1x5x1:index<4 2x5x3@transposed shape=(2,4,3) axis=1""",
)
def scatter_add(index: TensorType, src: TensorType, shape: Shape, axis: int) -> TensorType:
    """Zeros of the given shape, and each element of src added where index says along the axis: the
    gradient of gather. In its other dimensions index may have size 1: then it holds for all."""
    pairs = enumerate(zip(index.shape, src.shape, strict=False))
    needed = [1 if i == 1 and d != axis else n for d, (i, n) in pairs]
    check_scatter(index, src, shape, needed)
    if any(i > n and d != axis for d, (i, n) in enumerate(zip(src.shape, shape, strict=True))):
        wrong = f"src {list(src.shape)} is larger than shape {list(shape)} beside axis {axis}"
        raise GraphError(wrong, remedy=f"only along axis {axis} may src be the larger one")
    return TensorType.of(shape, src.dtype)


def check_scatter(
    index: TensorType, src: TensorType, shape: Shape, needed: Sequence[int] | None = None
) -> None:
    """Raise unless index has the sizes ``needed``, which are those of src if left out, and the
    result's shape has the rank of src."""
    check_index(index, int64)
    fits = index.rank == src.rank and index.shape == tuple(needed or src.shape)
    if not fits or len(shape) != src.rank or any(n < 0 for n in shape):
        sizes = f"index {list(index.shape)}, src {list(src.shape)} and shape {list(shape)}"
        remedy = "index and src must be of one shape, and of the rank of shape"
        raise GraphError(f"{sizes} do not fit", remedy=remedy)


def by_frequency(b: Ops, grad: Sym, index: Sym, rows: int) -> Sym:
    """``grad``, the gradients of the rows that ``index`` names, each divided by how often ``index``
    names its row."""
    kind = torch.float64 if grad.dtype == float64 else torch.float32
    one = b.constant(torch.ones((), dtype=kind))
    named = b.embedding_grad(b.one("expand", one, shape=(*index.shape, 1)), index, rows=rows)
    return b.upcast(grad) / b.one("embedding", named, index)


def _embedding_vjp(b: Ops, v: Vjp) -> Grads:
    weight, index, grad = v.arg(0), v.arg(1), v.grad
    if v.attrs["scale_grad_by_freq"]:
        grad = by_frequency(b, grad, index, weight.shape[0])
    how = {"rows": weight.shape[0], "padding_idx": v.attrs["padding_idx"]}
    found = b.one("embedding_grad", grad, index, **how)
    return [b.to(found, weight.dtype), None]


_PADDING = {"padding_idx": Attr("int", -1, "the row without a gradient, or -1")}


def _check_rows(weight: TensorType, index: TensorType, padding_idx: int) -> None:
    check_index(index, int64, int32)
    if weight.rank != 2:
        raise GraphError(f"weight has rank {weight.rank}, not 2", remedy="use [rows, features]")
    if not -1 <= padding_idx < weight.shape[0]:
        wrong = f"padding_idx={padding_idx} is not one of the {weight.shape[0]} rows"
        raise GraphError(wrong, remedy="count from 0; -1 means no padding row")


@operator(
    Fusion.INJECTIVE,
    torch.embedding,
    attrs=_PADDING
    | {"scale_grad_by_freq": Attr("bool", False, "whether to divide gradients by frequency")},
    vjp=_embedding_vjp,
    flops=elementwise_flops(0),
    samples="""padding_idx=-1 scale_grad_by_freq=False;
        5x3 2x4:index<5 | 5x3 2x4:index<5 padding_idx=2 nograd | 5x3 scalar:index<5
        | 5x3 0x2:index<5 | 5x3@transposed 4:index<5:i32 | 5x4@sliced 3x1:index<5
        | 2x3 7:index<2 scale_grad_by_freq=True nograd""",
)
def embedding(
    weight: TensorType, index: TensorType, padding_idx: int, scale_grad_by_freq: bool
) -> TensorType:
    """The rows of weight that index names. The row padding_idx receives no gradient; -1 means no
    such row. With scale_grad_by_freq a gradient is divided by how often its row is named."""
    _check_rows(weight, index, padding_idx)
    return TensorType.of((*index.shape, weight.shape[1]), weight.dtype)


def _embedding_grad_reference(
    grad: Tensor, index: Tensor, onto: Tensor | None, rows: int, padding_idx: int
) -> Tensor:
    wide = grad.float() if grad.dtype in LOW else grad
    back = torch.ops.aten.embedding_dense_backward
    with fixed_order(grad):
        out: Tensor = back(wide, index, rows, padding_idx, False)
    return (out if onto is None else out.add_(onto)).to(grad.dtype)


def _embedding_grad_vjp(b: Ops, v: Vjp) -> Grads:
    index, padding = v.arg(1), v.attrs["padding_idx"]
    grad = b.embedding(v.grad, index)
    if padding >= 0:
        grad = b.where(b.reshape(b.ne(index, padding), (*index.shape, 1)), grad, 0.0)
    return [grad, None, v.grad]


def _embedding_grad_expand(b: Ops, ins: Sequence[Any], attrs: Mapping[str, Any]) -> list[Sym]:
    """For every row of the table add up all gradients, taking 0 for those whose index is another
    row: for tables of few rows."""
    grad, index, rows, padding = ins[0], ins[1], attrs["rows"], attrs["padding_idx"]
    count, kind = index.type.numel, index.dtype
    numbers = torch.arange(rows, dtype=kind.torch)
    if padding >= 0:
        numbers[padding] = -1
    here = b.eq(b.reshape(index, (count, 1, 1)), b.constant(numbers.reshape(1, rows, 1)))
    each = b.where(here, b.upcast(b.reshape(grad, (count, 1, grad.shape[-1]))), 0.0)
    total = b.sum(each, axes=(0,))
    if len(ins) > 2 and ins[2] is not None:
        total = total + b.upcast(ins[2])
    return [b.to(total, grad.dtype)]


@operator(
    Fusion.OPAQUE,
    _embedding_grad_reference,
    attrs={"rows": Attr("int", doc="how many rows weight has"), **_PADDING},
    vjp=_embedding_grad_vjp,
    expand=_embedding_grad_expand,
    flops=input_flops(1),
    samples="""rows=5 padding_idx=-1;
        2x4x3 2x4:index<5 | 9x3 9:index<5 padding_idx=2 | 3 scalar:index<5 | 0x2x3 0x2:index<5
        | 4x3@transposed 4:index<5:i32 | 4x3@sliced 4:index<5 padding_idx=0
        | 4x3@expanded 4:index<5 | 9x3 9:index<5 5x3 padding_idx=1
        | 4x3 4:index<5 5x3@transposed""",
)
def embedding_grad(
    grad: TensorType, index: TensorType, onto: Given, rows: int, padding_idx: int
) -> TensorType:
    """The gradient of embedding for its weight: rows of grad added up by index, always in the same
    order, and added to ``onto`` if that is given. Nothing is added to the row padding_idx: there
    the result is zero, or onto's."""
    if grad.rank != index.rank + 1 or grad.shape[:-1] != index.shape:
        wrong = f"grad {list(grad.shape)} does not fit index {list(index.shape)}"
        remedy = "grad has the shape of index and one more dimension, the features"
        raise GraphError(wrong, remedy=remedy)
    floats("embedding_grad", grad)
    weight = TensorType.of((max(rows, 0), grad.shape[-1]), grad.dtype)
    _check_rows(weight, index, padding_idx)
    if onto is not None and (onto.shape, onto.dtype) != (weight.shape, weight.dtype):
        remedy = f"give a table of {rows} rows that is of the type of grad"
        raise GraphError(f"onto {onto} does not fit the result {weight}", remedy=remedy)
    return weight
