"""An embedding whose table stays in the memory of the host.

A table of a hundred million rows does not fit on a GPU, and a batch reads a few thousand of them.
Those alone are copied there, and their gradient alone comes back: a sparse one, so that
``torch.optim.SparseAdam``, ``SGD`` and ``Adagrad`` update these rows and read no others.

bytes for a batch, each way = distinct rows · features · size of a number
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deuteron import functional as F
from deuteron.errors import BindError
from deuteron.functional.sparse import as_it_is
from deuteron.kinds import checked


class HostEmbedding(nn.Module):
    """``torch.nn.Embedding`` with its table in host memory, and results on ``device``.

    num_embeddings, embedding_dim
            rows of the table, and numbers in a row
    device  where the results are, such as a GPU
    dtype   of the table and the results

    >>> table = dt.nn.HostEmbedding(100_000_000, 64, device="cuda")
    >>> sparse = torch.optim.SparseAdam(table.parameters(), lr=1e-3)
    >>> x = table(index)                      # index on the host; x on the GPU, with a gradient

    ``input`` names the rows, as int64 or int32. The state dict is that of ``torch.nn.Embedding``;
    ``model.to("cuda")`` moves the results, not the table. Each row that a batch reads is copied
    once, from pinned memory; its gradient is the sum over all places that read it. Under
    torch.compile it is a call between graphs, and a ``dt.train_step`` that has one is not captured;
    give the table to the step's optimiser, or call ``sparse.step()`` after each step.
    """

    stays_on_host = True  # wherever the rest of a model is

    @checked(name="HostEmbedding")
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, dtype=dtype))
        nn.init.normal_(self.weight)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HostEmbedding:
        """Do what ``to``, ``cuda`` and ``half`` ask for: the table takes the type, results take the
        device."""
        moved = fn(torch.empty(0, dtype=self.weight.dtype))
        if moved.device.type != "meta":
            self.device = moved.device
        self.weight.data = self.weight.data.to(moved.dtype)
        return self

    @as_it_is
    def forward(self, input: Tensor) -> Tensor:
        if input.dtype not in (torch.int32, torch.int64):
            wrong = f"the index is {input.dtype}"
            raise BindError(wrong, asked="HostEmbedding", remedy="give int64 or int32")
        found: Tensor = _Rows.apply(self.weight, input, self.device)  # type: ignore[no-untyped-call]
        return found

    def extra_repr(self) -> str:
        rows, features = self.weight.shape
        return f"{rows}, {features}, device={str(self.device)!r}"


class _Rows(torch.autograd.Function):
    """Copies the rows that an index names to a device. The gradient is sparse, and on the host."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, index: Tensor, device: torch.device) -> Tensor:
        wanted, places = torch.unique(index.cpu(), return_inverse=True)
        if wanted.numel() and (wanted[0] < 0 or wanted[-1] >= weight.shape[0]):
            wrong = f"the index goes from {int(wanted[0])} to {int(wanted[-1])}"
            remedy = f"the table has {weight.shape[0]} rows"
            raise BindError(wrong, asked="HostEmbedding", remedy=remedy)
        pinned, shape = device.type == "cuda", (len(wanted), weight.shape[1])
        rows = torch.empty(shape, dtype=weight.dtype, pin_memory=pinned)
        torch.index_select(weight, 0, wanted, out=rows)
        there = rows.to(device, non_blocking=True)
        with torch.enable_grad():
            read = F.embedding(places.to(device), there.requires_grad_())
        ctx.wanted, ctx.there, ctx.read, ctx.shape = wanted, there, read, weight.shape
        return read.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = torch.autograd.grad(ctx.read, ctx.there, grad, retain_graph=True)
        where = ctx.wanted[None].to(torch.int64)
        return _sparse(where, rows.cpu(), ctx.shape), None, None


def _sparse(where: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return distinct rows in order as a sparse tensor, which torch calls coalesced."""
    return torch.sparse_coo_tensor(where, rows, shape, is_coalesced=True, check_invariants=False)
