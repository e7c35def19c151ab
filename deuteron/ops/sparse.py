"""Products of a sparse matrix with a dense one.

A sparse matrix A [M, K] is three dense tensors, row by row (CSR): the entries of row i are those
from row_starts[i] up to row_starts[i + 1], each with its column and its value. An entry is a
number, or a block of h × w numbers; in that case rows and columns count blocks, and values are
[nnz, h, w]. :mod:`deuteron.frontends.sparse` converts all other formats to this one.

    spmm_csr      y = A · x                                        sums in float32 or wider
    sddmm_csr     the entries of left · rightᵀ where A has some    the gradient of values
    csr_transpose the structure of Aᵀ                              for the gradient of x: Aᵀ · grad

Sums are always taken in the same order. On a CPU the references check the structure before they use
it; on a GPU kernels mask entries that point outside, and give nan for such a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError, GraphError
from deuteron.ir.dtype import int32, int64
from deuteron.ir.graph import Node
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import check_index, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, Vjp, operator
from deuteron.ops.reference import fixed_order, wide_type

AT_A_TIME = 1 << 22  # numbers that a reference gathers before it adds them up


# ---- the structure


def rows_of(row_starts: Tensor, count: int) -> Tensor:
    """The row of each of ``count`` entries."""
    entries = torch.arange(count, dtype=row_starts.dtype, device=row_starts.device)
    found = torch.searchsorted(row_starts[1:].contiguous(), entries, right=True)
    return found.clamp(max=max(row_starts.numel() - 2, 0))


def check_structure(row_starts: Tensor, columns: Tensor, size: int, what: str) -> None:
    """Raise unless the entries of all rows follow each other, in columns from 0 to ``size`` − 1."""
    count, starts = columns.numel(), row_starts.long()
    asked = f"{what} with {starts.numel() - 1} rows, {size} columns and {count} entries"
    if int(starts[0]) != 0 or int(starts[-1]) != count or bool((starts.diff() < 0).any()):
        wrong = f"row_starts do not rise from 0 to {count}"
        remedy = "use the crow_indices() of a sparse CSR tensor"
        raise BindError(wrong, asked=asked, remedy=remedy)
    if count:
        low, high = (int(each) for each in torch.aminmax(columns))
        if low < 0 or high >= size:
            wrong = f"column {low if low < 0 else high} is out of range"
            raise BindError(wrong, asked=asked, remedy=f"use columns from 0 to {size - 1}")


def _looked_at(row_starts: Tensor, columns: Tensor, size: int, what: str) -> None:
    """Check the structure if that needs no waiting: on a CPU, outside of torch.func transforms."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if row_starts.is_cpu and not (wrapped(row_starts) or wrapped(columns)):
        check_structure(row_starts, columns, size, what)


def _check_structure_types(row_starts: TensorType, columns: TensorType) -> None:
    for name, t in (("row_starts", row_starts), ("columns", columns)):
        check_index(t, int64, int32)
        if t.rank != 1:
            raise GraphError(f"{name} has rank {t.rank}, not 1", remedy="give one row of indices")
    if not row_starts.shape[0]:
        remedy = "give one more entry than there are rows: [0] for none"
        raise GraphError("row_starts is empty", remedy=remedy)


def _block(values: Shape) -> Shape:
    """Height and width of an entry."""
    return values[1:] or (1, 1)


def _blocks(what: str, rows: int, side: int) -> int:
    """How many blocks of this height (or width) make up so many rows; raise if they do not fit."""
    if side < 1 or rows % side:
        wrong = f"the {rows} rows of {what} are no multiple of a block's {side}"
        raise GraphError(wrong, remedy="pad them with zeros, or use other blocks")
    return rows // side


def column_count(node: Node, types: Types) -> int:
    """How many columns a node assumes its sparse matrix has; columns of blocks, if entries are
    blocks."""
    if node.op == "csr_transpose":
        return int(node.attrs["size"])
    dense, values = types[3], types[2]
    assert dense is not None and values is not None
    block = node.attrs["block"] if node.op == "sddmm_csr" else values.shape[1:]
    return int(dense.shape[0] // (block or (1, 1))[1])


# ---- transposed


def _transpose_reference(row_starts: Tensor, columns: Tensor, size: int) -> tuple[Tensor, ...]:
    _looked_at(row_starts, columns, size, "csr_transpose")
    order = torch.argsort(columns, stable=True)
    ends = torch.arange(size + 1, dtype=columns.dtype, device=columns.device)
    starts = torch.searchsorted(columns[order], ends).to(row_starts.dtype)
    return starts, rows_of(row_starts, columns.numel())[order].to(columns.dtype), order


@operator(
    Fusion.OPAQUE,
    _transpose_reference,
    attrs={"size": Attr("int", doc="how many columns there are, of blocks if entries are blocks")},
    vjp=lambda b, v: [None, None],
    flops=lambda ins, outs, attrs: 0,
    samples="""6:starts<9 9:index<4 size=4 nograd | 4:starts<5:i32 5:index<7:i32 size=7 nograd
        | 3:starts<0 0:index<4 size=4 nograd | 1:starts<0 0:index<0 size=0 nograd""",
)
def csr_transpose(
    row_starts: TensorType, columns: TensorType, size: int
) -> tuple[TensorType, TensorType, TensorType]:
    """The transposed structure of a sparse matrix: where its rows start, their columns, and which
    entry of the matrix each of its entries is."""
    _check_structure_types(row_starts, columns)
    if size < 0:
        raise GraphError(f"csr_transpose with size={size}", remedy="use 0 or more")
    starts = TensorType.of((size + 1,), row_starts.dtype)
    return starts, TensorType.of(columns.shape, columns.dtype), TensorType.of(columns.shape, int64)


def transposed(b: Ops, starts: Sym, columns: Sym, values: Sym, size: int, known: Any = ()) -> Any:
    """Row starts, columns and values of Aᵀ. ``known``: the results of csr_transpose, if they are
    already there."""
    t_starts, t_columns, order = known or b.call("csr_transpose", starts, columns, size=size)
    picked = b.one("index_select", values, order, axis=0)
    turned = picked if picked.rank == 1 else b.one("permute", picked, dims=(0, 2, 1))
    return t_starts, t_columns, turned


# ---- sparse · dense


def _some(count: int, each: int) -> Iterator[slice]:
    """Yield slices of ``count`` entries of ``each`` numbers, AT_A_TIME numbers at a time."""
    step = max(AT_A_TIME // max(each, 1), 1)
    yield from (slice(begin, begin + step) for begin in range(0, count, step))


def _spmm_reference(
    row_starts: Tensor, columns: Tensor, values: Tensor, x: Tensor, *transposed: Tensor | None
) -> Tensor:
    (h, w), n, wide = _block(tuple(values.shape)), x.shape[1], wide_type(values)
    size = x.shape[0] // w
    _looked_at(row_starts, columns, size, "spmm_csr")
    rows, lines = rows_of(row_starts, columns.numel()), x.to(wide).reshape(size, w, n)
    out = torch.zeros(row_starts.numel() - 1, h, n, dtype=wide, device=x.device)
    with fixed_order(x):
        for some in _some(columns.numel(), max(h, w) * n):
            picked = lines.index_select(0, columns[some])
            entries = values[some].to(wide).reshape(-1, h, w)
            part = entries * picked if h == w == 1 else torch.bmm(entries, picked)
            out = out.index_add(0, rows[some], part)
    return out.flatten(0, 1).to(x.dtype)


def _spmm_vjp(b: Ops, v: Vjp) -> Grads:
    starts, columns, values, x = (v.arg(i) for i in range(4))
    dvalues = dx = None
    if v.needs[2]:
        how = {"block": values.shape[1:]}
        dvalues = b.to(b.one("sddmm_csr", starts, columns, v.grad, x, **how), values.dtype)
    if v.needs[3]:
        known = [v.arg(i) for i in (4, 5, 6)] if v.has(4) else ()
        size = x.shape[0] // _block(values.shape)[1]
        dx = b.one("spmm_csr", *transposed(b, starts, columns, values, size, known), v.grad)
    return [None, None, dvalues, dx, None, None, None]


def _spmm_flops(ins: Types, outs: Any, attrs: Attributes) -> float:
    assert ins[2] is not None and ins[3] is not None
    return float(2 * ins[2].numel * ins[3].shape[1])


@operator(
    Fusion.OPAQUE,
    _spmm_reference,
    vjp=_spmm_vjp,
    flops=_spmm_flops,
    samples="""6:starts<9 9:index<4 9 4x3 | 4:starts<5:i32 5:index<7:i32 5 7x1
        | 5:starts<40 40:index<30 40 30x5@transposed | 4:starts<0 0:index<4 0 4x3 [no entries]
        | 1:starts<0 0:index<4 0 4x3 [no rows] | 3:starts<4 4:index<5 4 5x0 [no columns]
        | 2:starts<1 1:index<1 1 1x1 | 4:starts<6 6:index<3 6x2x3 9x4
        | 3:starts<5:i32 5:index<2:i32 5x4x4 8x3@sliced""",
)
def spmm_csr(
    row_starts: TensorType,
    columns: TensorType,
    values: TensorType,
    x: TensorType,
    column_starts: Given,
    rows: Given,
    order: Given,
) -> TensorType:
    """A sparse matrix times x [K, N], summed in float32 at least. The matrix is given by where its
    rows start among its entries, their columns, and their values: [nnz], or [nnz, h, w] for blocks.
    The results of csr_transpose may be given, too; the gradient of x then uses them."""
    _check_structure_types(row_starts, columns)
    one_dtype("spmm_csr", values=values, x=x)
    if values.rank not in (1, 3) or values.shape[0] != columns.shape[0]:
        wrong = f"values {list(values.shape)} do not fit {columns.shape[0]} columns"
        raise GraphError(wrong, remedy="give one number, or one block [h, w], for each column")
    if x.rank != 2:
        raise GraphError(f"x has rank {x.rank}, not 2", remedy="reshape it to [K, N]")
    h, w = _block(values.shape)
    size, known = _blocks("x", x.shape[0], w), (column_starts, rows, order)
    if any(t is None for t in known) and known != (None, None, None):
        wrong = "a part of the transposed structure is missing"
        raise GraphError(wrong, remedy="give all that csr_transpose gives, or none of it")
    for t, length in zip(known, (size + 1, *columns.shape * 2), strict=True):
        if t is not None and t.shape != (length,):
            wrong = f"a part of the transposed structure is {list(t.shape)}, not [{length}]"
            raise GraphError(wrong, remedy=f"use csr_transpose(row_starts, columns, size={size})")
    return TensorType.of(((row_starts.shape[0] - 1) * h, x.shape[1]), x.dtype)


# ---- dense · dense, where the sparse matrix has entries


def _sddmm_reference(
    row_starts: Tensor, columns: Tensor, left: Tensor, right: Tensor, block: Shape
) -> Tensor:
    (h, w), n, wide = block or (1, 1), left.shape[1], wide_type(left)
    size, count = right.shape[0] // w, columns.numel()
    _looked_at(row_starts, columns, size, "sddmm_csr")
    rows = rows_of(row_starts, count)
    a, b = left.reshape(left.shape[0] // h, h, n), right.reshape(size, w, n)
    parts = []
    for some in _some(count, max(h, w) * n):
        picked = a.index_select(0, rows[some]).to(wide)
        other = b.index_select(0, columns[some]).to(wide)
        # in row-major order, without which bmm is many times slower on some CPUs
        meet = torch.bmm(picked, other.mT.contiguous()) if block else (picked * other).sum(2)
        parts.append(meet.to(left.dtype))
    made = torch.cat(parts) if parts else left.new_zeros(0)
    return made.reshape(count, *block)


def _sddmm_vjp(b: Ops, v: Vjp) -> Grads:
    starts, columns, left, right = (v.arg(i) for i in range(4))
    dleft = dright = None
    if v.needs[2]:
        dleft = b.one("spmm_csr", starts, columns, v.grad, right)
    if v.needs[3]:
        size = right.shape[0] // (v.attrs["block"] or (1, 1))[1]
        dright = b.one("spmm_csr", *transposed(b, starts, columns, v.grad, size), left)
    return [None, None, dleft, dright]


@operator(
    Fusion.OPAQUE,
    _sddmm_reference,
    attrs={"block": Attr("ints", (), "height and width of an entry; () for numbers")},
    vjp=_sddmm_vjp,
    flops=lambda ins, outs, attrs: 2.0 * outs[0].numel * (ins[2].shape[1] if ins[2] else 0),
    samples="""block=(); 6:starts<9 9:index<4 5x3 4x3 | 4:starts<5:i32 5:index<7:i32 3x1 7x1
        | 5:starts<40 40:index<30 4x5@transposed 30x5@sliced | 4:starts<0 0:index<4 3x3 4x3
        | 3:starts<4 4:index<5 2x0 5x0 | 4:starts<6 6:index<3 6x4 9x4 block=(2,3)""",
)
def sddmm_csr(
    row_starts: TensorType, columns: TensorType, left: TensorType, right: TensorType, block: Shape
) -> TensorType:
    """The entries of left [M, N] · right [K, N]ᵀ at the places where a sparse matrix has entries,
    summed in float32 at least: the gradient of spmm_csr for its values."""
    _check_structure_types(row_starts, columns)
    one_dtype("sddmm_csr", left=left, right=right)
    if len(block) not in (0, 2) or any(side < 1 for side in block):
        raise GraphError(f"block={block}", remedy="use () for numbers, or (height, width)")
    if left.rank != 2 or right.rank != 2 or left.shape[1] != right.shape[1]:
        wrong = f"left {list(left.shape)} and right {list(right.shape)} do not fit"
        raise GraphError(wrong, remedy="use [M, N] and [K, N]")
    h, w = block or (1, 1)
    _blocks("right", right.shape[0], w)
    if _blocks("left", left.shape[0], h) != row_starts.shape[0] - 1:
        wrong = f"left {list(left.shape)} does not have the {row_starts.shape[0] - 1} rows"
        raise GraphError(f"{wrong} of row_starts", remedy=f"use {(row_starts.shape[0] - 1) * h}")
    return TensorType.of((*columns.shape, *block), left.dtype)
