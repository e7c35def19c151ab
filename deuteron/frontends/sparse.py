"""torch's sparse tensors in the form that the operators of ``ops/sparse.py`` take: row starts,
columns and values, row by row. The structure is checked here, once, so that no kernel has to.

=====================  =====================================================================
sparse_csr, sparse_bsr as they are
sparse_csc, sparse_bsc their structure transposed, and values in that order
sparse_coo             coalesced, which orders entries by row; starts are counted
diagonals (DIA)        entries of each diagonal ordered by row: :func:`from_diagonals`
=====================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.ops import table
from deuteron.ops.sparse import check_structure

BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
BY_COLUMNS = (torch.sparse_csc, torch.sparse_bsc)


@dataclass(frozen=True)
class Structure:
    """Where a sparse matrix [rows, columns] has entries, which are numbers or blocks. ``order``
    has, for each entry, the place of its value in the tensor; None where they are in order."""

    row_starts: Tensor
    columns: Tensor
    shape: tuple[int, int]
    block: tuple[int, int] = (1, 1)
    order: Tensor | None = None

    def ordered(self, values: Tensor) -> Tensor:
        return values if self.order is None else values.index_select(0, self.order)

    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The transposed matrix: row starts, columns, and for each of its entries the entry it is
        here."""
        size = self.shape[1] // self.block[1]
        return turned(self.row_starts, self.columns, size)


def turned(starts: Tensor, indices: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Turn a structure by columns into one by rows, or the other way round."""
    found: tuple[Tensor, Tensor, Tensor] = table.get("csr_transpose").reference(
        starts, indices, size=size
    )
    return found


def is_sparse(value: object) -> bool:
    """Whether something is a tensor of one of torch's sparse layouts."""
    return isinstance(value, Tensor) and value.layout in (*BY_ROWS, *BY_COLUMNS, torch.sparse_coo)


def coalesced(a: Tensor) -> Tensor:
    """A COO tensor with every place once, in order; any other tensor as it is."""
    return a.coalesce() if a.layout is torch.sparse_coo else a


def indices_of(a: Tensor) -> tuple[Tensor, Tensor]:
    """The two tensors that say where entries are, by row, by column or by entry."""
    if a.layout is torch.sparse_coo:
        return tuple(a.indices().unbind())  # type: ignore[return-value]
    if a.layout in BY_ROWS:
        return a.crow_indices(), a.col_indices()
    return a.ccol_indices(), a.row_indices()


def parts_of(a: Tensor) -> tuple[Tensor, ...]:
    """The tensors in which a sparse tensor keeps its numbers; of a dense one, the tensor itself."""
    if not is_sparse(a):
        return (a,)
    a = a.detach()
    return (a._indices(), a._values()) if a.is_sparse else (*indices_of(a), a.values())


def structure_of(a: Tensor, what: str) -> Structure:
    """The structure of a coalesced sparse matrix. A tensor that is no matrix is refused."""
    if a.ndim != 2 or a.dense_dim():
        wrong = f"the sparse tensor is {list(a.shape)}, with {a.dense_dim()} dense dimensions"
        remedy = "use a matrix of numbers; multiply the matrices of a batch one by one"
        raise BindError(wrong, asked=what, remedy=remedy)
    (rows, columns), (first, second) = a.shape, indices_of(a)
    block = tuple(a.values().shape[1:]) or (1, 1)
    h, w = block
    order = None
    if a.layout is torch.sparse_coo:
        ends = torch.arange(rows + 1, dtype=first.dtype, device=a.device)
        starts, second = torch.searchsorted(first.contiguous(), ends), second.contiguous()
    elif a.layout in BY_ROWS:
        starts = first
    else:
        check_structure(first, second, rows // h, what)
        starts, second, order = turned(first, second, rows // h)
    check_structure(starts, second, columns // w, what)
    return Structure(starts, second, (rows, columns), (h, w), order)


def from_diagonals(values: Tensor, offsets: Sequence[int], shape: tuple[int, int]) -> Tensor:
    """The sparse CSR matrix with these diagonals, as ``torch.sparse.spdiags`` has them, on any
    device: ``values[d, j]`` is in column j and row j − ``offsets[d]``. What falls outside of
    ``shape`` is left out. Gradients reach ``values``.

    >>> second = dt.functional.diagonals(torch.tensor([[1.0], [-2.0], [1.0]]).expand(3, 9),
    ...                                  [-1, 0, 1], (9, 9))
    """
    asked = f"diagonals {list(offsets)} of a matrix {list(shape)}"
    if values.ndim != 2 or values.shape[0] != len(offsets):
        wrong = f"values are {list(values.shape)}"
        remedy = f"give one row of values for each of {len(offsets)} offsets"
        raise BindError(wrong, asked=asked, remedy=remedy)
    if len(set(offsets)) != len(offsets):
        raise BindError("an offset comes twice", asked=asked, remedy="add up its values first")
    rows, columns = shape
    column = torch.arange(min(values.shape[1], columns), device=values.device).expand(
        len(offsets), -1
    )
    row = column - torch.tensor(list(offsets), device=values.device)[:, None]
    which, column = ((row >= 0) & (row < rows)).nonzero(as_tuple=True)
    row = row[which, column]
    order = torch.argsort(row * columns + column)
    ends = torch.arange(rows + 1, device=values.device)
    starts = torch.searchsorted(row[order], ends)
    picked = values[which[order], column[order]]
    return torch.sparse_csr_tensor(starts, column[order], picked, size=shape)
