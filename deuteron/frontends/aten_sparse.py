"""ATen → ours: products with a sparse matrix that the module holds.

While a module is traced its sparse tensors stand for themselves. What is computed from them alone
(``w.t()``, ``w.to_dense()``, ``2 * w``) is computed by torch when the module is imported. Where a
sparse tensor meets a value of the graph it becomes a :class:`Sparse`, whose parts are constants,
and the call must be one of ``TABLE``.
"""

from __future__ import annotations

from functools import cached_property
from math import prod
from typing import Any, NoReturn

from torch import Tensor

from deuteron.errors import GraphError
from deuteron.frontends.aten_site import Entry, Number, Site
from deuteron.frontends.sparse import coalesced, structure_of
from deuteron.ops.emit import Ops, Sym

KNOWN = "torch.sparse.mm, @, addmm, mv or linear"


class Sparse:
    """A sparse matrix [rows, columns] of the module, which enters the graph part by part."""

    def __init__(self, b: Ops, tensor: Tensor, name: str) -> None:
        self.b, self.tensor, self.name = b, tensor, name

    @cached_property
    def parts(self) -> tuple[Sym, Sym, Sym]:
        """Row starts, columns and values."""
        whole = coalesced(self.tensor.detach())
        found = structure_of(whole, f"a product with {self.name!r}")
        values = found.ordered(whole.values())
        parts = {"row_starts": found.row_starts, "columns": found.columns, "values": values}
        made = (self.b.constant(t.contiguous(), f"{self.name}_{n}") for n, t in parts.items())
        row_starts, columns, entries = made
        return row_starts, columns, entries

    @cached_property
    def transposed(self) -> Sparse:
        return Sparse(self.b, self.tensor.t(), f"{self.name}_t")

    def times(self, b: Site, x: Sym) -> Sym:
        """The matrix times x [columns, n]."""
        return b.one("spmm_csr", *self.parts, x)

    def applied(self, b: Site, x: Sym) -> Sym:
        """x [..., columns] times the transposed matrix: [..., rows]."""
        lines = b.shaped(x, (prod(x.shape[:-1]), x.shape[-1]))
        turned = b.one("to_layout", b.one("permute", lines, dims=(1, 0)), layout="contiguous")
        made = b.one("permute", self.times(b, turned), dims=(1, 0))
        rows = b.one("to_layout", made, layout="contiguous")
        return b.shaped(rows, (*x.shape[:-1], made.shape[1]))


def _product(b: Site, x: Sym | Sparse, y: Sym | Sparse) -> Any:
    if isinstance(y, Sparse):
        assert isinstance(x, Sym)  # otherwise torch would have computed it at import
        return y.transposed.applied(b, x)
    assert isinstance(x, Sparse)
    if y.rank == 1:
        return b.shaped(x.times(b, b.shaped(y, (*y.shape, 1))), (x.tensor.shape[0],))
    b.need(y.rank == 2, f"a sparse matrix times a tensor of rank {y.rank}")
    return x.times(b, y)


def _added_product(b: Site, extra: Any, x: Any, y: Any, beta: Number, alpha: Number) -> Any:
    b.need(isinstance(extra, Sym), "what is added is sparse")
    b.need(isinstance(x, Sparse) or isinstance(y, Sparse), "neither factor is sparse")
    product = b.scaled(_product(b, x, y), alpha)
    return product if beta == 0 else b.add(b.scaled(extra, beta), product)


def _linear(b: Site, x: Any, weight: Any, bias: Any) -> Any:
    b.need(isinstance(x, Sym) and isinstance(weight, Sparse), "what is sparse is not the weight")
    b.need(bias is None or isinstance(bias, Sym), "the bias is sparse")
    y = weight.applied(b, x)
    return y if bias is None else b.add(y, bias)


_PRODUCTS = "mm.default matmul.default mv.default _sparse_mm.default"
_ADDED = "addmm.default addmv.default _sparse_addmm.default"
_BY_ROW: dict[str, Entry] = {_PRODUCTS: _product, _ADDED: _added_product, "linear.default": _linear}
TABLE = {f"aten.{name}": entry for names, entry in _BY_ROW.items() for name in names.split()}


def refuse(call: str, several: list[Sparse], why: str) -> NoReturn:
    """Refuse a call that reads a sparse tensor and is no product."""
    names = ", ".join(repr(each.name) for each in several)
    wrong = f"{call} of the sparse tensor {names} is not planned: {why}"
    remedy = f"multiply it, by {KNOWN}, or use {several[0].name}.to_dense() there"
    raise GraphError(wrong, asked="a graph with a sparse matrix", remedy=remedy)
