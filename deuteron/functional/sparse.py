"""Products of sparse matrices and dense ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.utils.weak import WeakTensorKeyDictionary

from deuteron.errors import BindError
from deuteron.frontends import sparse as formats
from deuteron.functional.arguments import check_tensor
from deuteron.functional.core import Function
from deuteron.functional.operators import operator
from deuteron.kinds import checked
from deuteron.ops import Ops, Sym

P = ParamSpec("P")
SPMM = operator("spmm_csr")


def as_it_is(function: Callable[P, Tensor]) -> Callable[P, Tensor]:
    """Return ``function`` as one that torch.compile calls between two graphs, with all that it
    calls, because torch.compile does not look into sparse tensors. If torch's compiler is not
    loaded, this does not load it."""
    untouched: Callable[P, Tensor] = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **named: P.kwargs) -> Tensor:
        compiling = "torch._dynamo" in sys.modules
        return untouched(*args, **named) if compiling else function(*args, **named)

    return call


@dataclass
class Kept:
    """What was worked out for a sparse tensor; it holds until the tensor's indices change."""

    version: tuple[int, ...]
    structure: formats.Structure
    transposed: tuple[Tensor, Tensor, Tensor] | None = None


_KEPT: Any = WeakTensorKeyDictionary()


def _parts(a: Tensor, asked: str, backward: bool) -> tuple[list[Tensor], formats.Structure]:
    """Return row starts, columns and values, with the transposed structure if a gradient of x
    follows. Indices are checked, ordered and transposed once, and again after somebody wrote to
    them."""
    whole = formats.coalesced(a)
    indices = formats.indices_of(whole)
    kept: Kept | None = None
    version: tuple[int, ...] = ()
    if not any(t.is_inference() for t in indices):  # those do not count their changes
        version = tuple(n for t in indices for n in (t.data_ptr(), t._version, t.numel()))
        kept = _KEPT.get(a)
    if kept is None or kept.version != version:
        kept = _KEPT[a] = Kept(version, formats.structure_of(whole.detach(), asked))
    found = kept.structure
    parts = [found.row_starts, found.columns, found.ordered(whole.values())]
    if backward:
        kept.transposed = kept.transposed or found.transposed()
        parts += kept.transposed
    return parts, found


def _check(a: Any, x: Tensor, size: int, asked: str) -> None:
    if not formats.is_sparse(a):
        kind = str(a.layout) if isinstance(a, Tensor) else type(a).__name__
        remedy = "use a.to_sparse_csr(), or torch.matmul for a dense matrix"
        raise BindError(f"the matrix is a {kind}, not sparse", asked=asked, remedy=remedy)
    if not isinstance(x, Tensor) or x.layout is not torch.strided:
        raise BindError("x is not a dense tensor", asked=asked, remedy="use x.to_dense()")
    if a.dtype != x.dtype:
        wrong = f"the matrix is {a.dtype}, x is {x.dtype}"
        raise BindError(wrong, asked=asked, remedy="cast one of them: x.to(a.dtype)")
    if a.device != x.device:
        wrong = f"the matrix is on {a.device}, x on {x.device}"
        raise BindError(wrong, asked=asked, remedy="move them to one device")
    if a.ndim == 2 and a.shape[1] != size:
        wrong = f"the matrix has {a.shape[1]} columns, x {size} rows to multiply"
        raise BindError(wrong, asked=asked, remedy=f"use x with {a.shape[1]} there")


def _needs(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad


@as_it_is
@checked()
def spmm(a: Tensor, x: Tensor) -> Tensor:
    """Return the product of a sparse matrix ``a`` [M, K] and a dense ``x`` [K, N] or [K]; sums are
    in float32 at least.

    ``a`` has any of torch's sparse layouts: CSR, CSC, COO, BSR, BSC. Its indices are checked once,
    before any kernel reads them, and again after they were written to. Gradients reach the values
    of ``a``, as a sparse tensor, and ``x``, through the transposed matrix; they are always added in
    the same order. ``torch.compile`` calls it between two graphs; to have the product inside a
    graph, call ``spmm_csr`` with the parts of ``a``.

    >>> y = dt.functional.spmm(adjacency, features)
    """
    asked = f"spmm(a {_shown(a)}, x {_shown(x)})"
    if isinstance(x, Tensor) and x.ndim not in (1, 2):
        raise BindError(f"x has rank {x.ndim}", asked=asked, remedy="reshape it to [K, N]")
    _check(a, x, x.shape[0] if isinstance(x, Tensor) else 0, asked)
    parts, _ = _parts(a, asked, _needs(x))
    y = SPMM.one(*parts[:3], x if x.ndim == 2 else x[:, None], *parts[3:] or (None,) * 3)
    return y if x.ndim == 2 else y[:, 0]


def _sparse_linear(
    b: Ops,
    row_starts: Sym,
    columns: Sym,
    values: Sym,
    x: Sym,
    bias: Sym | None,
    column_starts: Sym | None,
    rows: Sym | None,
    order: Sym | None,
) -> Sym:
    """Write (W · xᵀ)ᵀ + bias: the entries of W are multiplied with rows of xᵀ."""
    lines = b.one("reshape", x, shape=(-1, x.shape[-1])) if x.rank != 2 else x
    turned = b.one("to_layout", b.one("permute", lines, dims=(1, 0)), layout="contiguous")
    known = (column_starts, rows, order)
    made = b.one("spmm_csr", row_starts, columns, values, turned, *known)
    y = b.one("permute", made, dims=(1, 0))
    y = y if bias is None else y + bias
    y = b.one("to_layout", y, layout="contiguous")
    return y if x.rank == 2 else b.one("reshape", y, shape=(*x.shape[:-1], y.shape[1]))


LINEAR = Function("sparse_linear", _sparse_linear)


@as_it_is
@checked()
def sparse_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` [..., K] · ``weight`` [M, K]ᵀ + ``bias`` [M] with a sparse weight, as
    ``torch.nn.functional.linear``. Gradients reach x, the values of the weight and the bias.

    The weight has any layout that :func:`spmm` takes, or is one of :func:`to_2_4`, whose products
    are torch's own.

    >>> y = dt.functional.sparse_linear(x, weight.to_sparse_csr(), bias)
    """
    if isinstance(weight, torch.sparse.SparseSemiStructuredTensor):
        return F.linear(x, weight, bias)
    asked = f"sparse_linear(x {_shown(x)}, weight {_shown(weight)})"
    _check(weight, x, x.shape[-1] if isinstance(x, Tensor) and x.ndim else 0, asked)
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        wrong = f"bias is {list(bias.shape)}, not [{weight.shape[0]}]"
        raise BindError(wrong, asked=asked, remedy="give one number for each row of weight")
    parts, _ = _parts(weight, asked, _needs(x))
    known = parts[3:] or (None,) * 3
    y = LINEAR.one(*parts[:3], x if x.ndim > 1 else x[None], bias, *known)
    return y if x.ndim > 1 else y[0]


@checked()
def diagonals(values: Tensor, offsets: Sequence[int], shape: tuple[int, int]) -> Tensor:
    check_tensor("diagonals", values)
    return formats.from_diagonals(values, offsets, shape)


diagonals.__doc__ = formats.from_diagonals.__doc__


@checked()
def to_2_4(w: Tensor) -> Tensor:
    """Return ``w`` [M, K] without those two of every four neighbours in a row that are nearest to
    0, in the form that the sparse tensor cores of NVIDIA's GPUs multiply: for ``sparse_linear``.

    torch's own semi-structured tensors and kernels do it, on a GPU from Ampere on, in float16,
    bfloat16 and int8.
    """
    check_tensor("to_2_4", w)
    asked = f"to_2_4(w {_shown(w)})"
    if w.ndim != 2 or w.shape[1] % 4:
        remedy = "use a matrix whose rows are a multiple of 4 long"
        raise BindError(f"w is {list(w.shape)}", asked=asked, remedy=remedy)
    if not w.is_cuda:
        wrong = f"w is on {w.device}, and only GPUs multiply such matrices"
        raise BindError(wrong, asked=asked, remedy="use w.cuda(), or w.to_sparse_csr() with spmm")
    fours = w.reshape(-1, 4)
    kept = torch.zeros_like(fours, dtype=torch.bool)
    kept.scatter_(1, fours.abs().topk(2, dim=1).indices, True)
    pruned = torch.where(kept, fours, 0).reshape(w.shape)
    try:
        return torch.sparse.to_sparse_semi_structured(pruned)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        words = (str(error).strip().splitlines() or [type(error).__name__])[0]
        remedy = "use float16 or bfloat16, sizes that are multiples of 64, and a GPU from Ampere on"
        raise BindError(f"torch refuses it: {words}", asked=asked, remedy=remedy) from error


def _shown(t: Any) -> str:
    if not isinstance(t, Tensor):
        return type(t).__name__
    return f"{list(t.shape)} {t.layout}".removesuffix(" torch.strided").replace("torch.", "")
