"""Operators that all ranks of a process group run together: all_reduce, all_gather, reduce_scatter,
all_to_all, and a product that overlaps with one of these.

Every rank of a process group of torch.distributed runs the same operator at the same place of its
graph. ``group`` is torch's name for the group, and ``ranks`` its size. A group of one rank computes
alone, so graphs can be written, priced and tested where there is no process group.

Every rank runs the collectives of a graph in the same order. To fix that order, each collective
takes as its input ``after`` a result of the one before it; it does not use the values
(passes/collective.py). No pass leaves a collective out because another is equal, computes it ahead
of time, or computes it again for a gradient: ranks would wait for what not all of them run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.graph import Node
from deuteron.ir.types import TensorType
from deuteron.ops.checks import one_dtype
from deuteron.ops.elementwise import numbers
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.opdef import Attr, Define, Fusion, Given, Vjp, elementwise_flops, operator

REDUCE = ("sum", "avg", "max", "min")


def called(name: str, *args: Any) -> Tensor:
    """Start one of torch's collectives, wait for it, and return its result."""
    return wait(getattr(torch.ops._c10d_functional, name)(*args))


def wait(x: Tensor) -> Tensor:
    """Wait for a result of :data:`STARTS`, or for a view of one; on a GPU the stream waits."""
    there: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return there


_C10D = torch.ops._c10d_functional
# Calls that begin a collective and return at once; what they return is read after :func:`wait`.
STARTS: dict[str, Callable[..., Tensor]] = {
    "all_reduce": lambda x, reduce, group, ranks: _C10D.all_reduce(x.contiguous(), reduce, group),
    "all_gather": lambda x, group, ranks: _C10D.all_gather_into_tensor(
        x.contiguous(), ranks, group
    ),
    "reduce_scatter": lambda x, reduce, group, ranks: _C10D.reduce_scatter_tensor(
        x.contiguous(), reduce, ranks, group
    ),
    "all_to_all": lambda x, takes, gives, group, ranks: _C10D.all_to_all_single(
        x.contiguous(), list(takes), list(gives), group
    ),
}


def reduced_into(x: Tensor, out: Tensor, /, reduce: str, group: str, ranks: int) -> None:
    """Begin an all-reduce of x into the memory of ``out``, which may be that of x."""
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    _C10D.all_reduce_(out, reduce, group)


def _whole(name: str) -> Callable[..., Tensor]:
    """The reference of a collective: start it and wait for it; with one rank, copy x."""

    def reference(x: Tensor, after: Any, ranks: int, **attrs: Any) -> Tensor:
        if ranks == 1:
            return x.clone(memory_format=torch.contiguous_format)
        return wait(STARTS[name](x, ranks=ranks, **attrs))

    return reference


def _all_reduce_vjp(b: Ops, v: Vjp) -> Grads:
    """Each rank's x is part of the results on all ranks, so their gradients are reduced as well."""
    if v.attrs["reduce"] not in ("sum", "avg"):
        wrong = f"all_reduce by {v.attrs['reduce']!r} has no gradient"
        raise GraphError(wrong, remedy="use sum or avg, or detach it")
    return [b.all_reduce(v.grad, **v.attrs), None]


def _all_gather_vjp(b: Ops, v: Vjp) -> Grads:
    return [b.reduce_scatter(v.grad, reduce="sum", **v.attrs), None]


def _reduce_scatter_vjp(b: Ops, v: Vjp) -> Grads:
    attrs = dict(v.attrs)
    reduce = attrs.pop("reduce")
    if reduce not in ("sum", "avg"):
        wrong = f"reduce_scatter by {reduce!r} has no gradient"
        raise GraphError(wrong, remedy="use sum or avg, or detach it")
    whole = b.all_gather(v.grad, **attrs)
    return [whole / float(attrs["ranks"]) if reduce == "avg" else whole, None]


def _all_to_all_vjp(b: Ops, v: Vjp) -> Grads:
    back = {**v.attrs, "takes": v.attrs["gives"], "gives": v.attrs["takes"]}
    return [b.all_to_all(v.grad, **back), None]


_GROUP = {
    "group": Attr("str", "", "torch's name of the process group"),
    "ranks": Attr("int", 1, "how many ranks it has"),
}
_REDUCE = {"reduce": Attr("str", "sum", "what becomes of the elements of all ranks", REDUCE)}


def _of_ranks(name: str, x: TensorType, group: str, ranks: int) -> None:
    numbers(name, x)
    if ranks < 1 or (ranks > 1 and not group):
        wrong = f"{name} with ranks={ranks}, group={group!r}"
        raise GraphError(wrong, remedy="name a process group of torch.distributed and its size")


_collective: Callable[..., Define] = partial(operator, Fusion.OPAQUE, flops=elementwise_flops(1))


@_collective(
    _whole("all_reduce"),
    attrs=_REDUCE | _GROUP,
    vjp=_all_reduce_vjp,
    samples="3x5 | 4x6@transposed reduce=avg | 0 [empty] | scalar [scalar]",
)
def all_reduce(x: TensorType, after: Given, reduce: str, group: str, ranks: int) -> TensorType:
    """The sum (or mean, largest, smallest) of x over all ranks, on each of them."""
    _of_ranks("all_reduce", x, group, ranks)
    return TensorType.of(x.shape, x.dtype)


@_collective(
    _whole("all_gather"),
    attrs=_GROUP,
    vjp=_all_gather_vjp,
    samples="3x5 | 4x6@transposed | 0 [empty]",
)
def all_gather(x: TensorType, after: Given, group: str, ranks: int) -> TensorType:
    """The x of all ranks, one after another along the first axis, on each of them."""
    _of_ranks("all_gather", x, group, ranks)
    if not x.rank:
        raise GraphError("all_gather of a tensor without axes", remedy="reshape it to (1,)")
    return TensorType.of((x.shape[0] * ranks, *x.shape[1:]), x.dtype)


@_collective(
    _whole("reduce_scatter"),
    attrs=_REDUCE | _GROUP,
    vjp=_reduce_scatter_vjp,
    samples="3x5 | 4x6@transposed reduce=avg | 0 [empty]",
)
def reduce_scatter(x: TensorType, after: Given, reduce: str, group: str, ranks: int) -> TensorType:
    """The sum (or mean, …) of x over all ranks, of which each keeps its part of the first axis."""
    _of_ranks("reduce_scatter", x, group, ranks)
    if not x.rank or x.shape[0] % ranks:
        wrong = f"reduce_scatter of {x} over {ranks} ranks"
        raise GraphError(wrong, remedy="give a first axis that can be divided by the ranks")
    return TensorType.of((x.shape[0] // ranks, *x.shape[1:]), x.dtype)


@_collective(
    _whole("all_to_all"),
    attrs={
        "takes": Attr("ints", doc="rows that come from each rank"),
        "gives": Attr("ints", doc="rows of x that go to each rank"),
        **_GROUP,
    },
    vjp=_all_to_all_vjp,
    samples="3x5 takes=(3,) gives=(3,) | 4x6@transposed takes=(4,) gives=(4,)",
)
def all_to_all(
    x: TensorType,
    after: Given,
    takes: tuple[int, ...],
    gives: tuple[int, ...],
    group: str,
    ranks: int,
) -> TensorType:
    """Rows of x go to the ranks, ``gives[r]`` to rank r, and ``takes[r]`` rows come from each."""
    _of_ranks("all_to_all", x, group, ranks)
    if not x.rank or len(takes) != ranks or len(gives) != ranks or sum(gives) != x.shape[0]:
        wrong = f"all_to_all of {x} over {ranks} ranks with takes={takes}, gives={gives}"
        raise GraphError(wrong, remedy="give a number of rows for each rank, in all those of x")
    return TensorType.of((sum(takes), *x.shape[1:]), x.dtype)


BESIDE = ("all_reduce", "all_gather", "reduce_scatter")


def chunked(
    x: Tensor, weight: Tensor, bias: Tensor | None, way: str, chunks: int, group: str, ranks: int
) -> Tensor:
    """Compute a product and the collective after or before it, by chunks of rows. A communication
    library runs collectives on threads or a stream of its own, so while one chunk is being sent,
    the next is multiplied.

    Products write directly into the memory of the result, and all_reduce sums there. For
    reduce_scatter, each chunk has rows for every rank. In a group of one rank nothing has to
    arrive, so nothing is copied."""
    x, start = x.detach(), torch.ops._c10d_functional
    if way == "all_reduce":
        result = x.new_empty(x.shape[0], weight.shape[0])
        parts = result.tensor_split(chunks)
        for rows, part in zip(x.tensor_split(chunks), parts, strict=True):
            _multiply(rows[None], weight, bias, part[None])
            start.all_reduce_(part, "sum", group)
        for part in parts:
            wait(part)
        return result
    if way == "all_gather":
        coming = []
        for rows in x.tensor_split(chunks):
            to = rows if ranks == 1 else x.new_empty(ranks * len(rows), x.shape[1])
            coming.append(start.all_gather_into_tensor_out(rows, ranks, group, out=to))
        result = x.new_empty(ranks, x.shape[0], weight.shape[0])
        for rows, part in zip(coming, result.tensor_split(chunks, 1), strict=True):
            _multiply(wait(rows).view(*part.shape[:2], -1), weight, bias, part)
        return result.flatten(0, 1)
    result = x.new_empty(x.shape[0] // ranks, weight.shape[0])
    parts, held = result.tensor_split(chunks), []
    every = x.view(ranks, x.shape[0] // ranks, x.shape[1]).tensor_split(chunks, 1)
    for rows, part in zip(every, parts, strict=True):
        sent = part[None] if ranks == 1 else x.new_empty(*rows.shape[:2], weight.shape[0])
        _multiply(rows, weight, bias, sent)
        begun = start.reduce_scatter_tensor_out(sent.flatten(0, 1), "sum", ranks, group, out=part)
        held.append((sent, begun))
    for _, begun in held:
        wait(begun)
    return result


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiply a batch of matrices by one weight, into ``out``, which need not be contiguous."""
    factor = weight.detach().t().expand(len(x), -1, -1)
    if bias is None:
        torch.bmm(x, factor, out=out)
    else:
        torch.baddbmm(bias.detach().expand_as(out), x, factor, out=out)


def _beside_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    after: Any,
    way: str,
    chunks: int,
    group: str,
    ranks: int,
) -> Tensor:
    if ranks == 1:
        return torch.nn.functional.linear(x, weight, bias)
    return chunked(x.contiguous(), weight, bias, way, chunks, group, ranks)


def _beside_vjp(b: Ops, v: Vjp) -> Grads:
    """The gradient of the collective, then that of the product; all_gather comes before the
    product, so there it is the other way round."""
    x, weight, grad, way = v.arg(0), v.arg(1), v.grad, v.attrs["way"]
    group = {"group": v.attrs["group"], "ranks": v.attrs["ranks"]}
    if way == "all_reduce":
        grad = b.all_reduce(grad, reduce="sum", **group)
    elif way == "reduce_scatter":
        grad = b.all_gather(grad, **group)
    else:
        x = b.all_gather(x, **group)
    dx = b.matmul(grad, weight)
    if way == "all_gather":
        dx = b.reduce_scatter(dx, reduce="sum", **group)
    dw = b.matmul(b.permute(grad, dims=(1, 0)), x)
    db = b.unbroadcast(b.upcast(grad), v.arg(2).type) if v.needs[2] else None
    return [dx, dw, db, None]


def _beside_flops(ins: Any, outs: Any, attrs: Any) -> float:
    return float(2 * outs[0].numel * ins[1].shape[1] * _more(attrs))


def _more(attrs: Any) -> int:
    """How many times as many rows the product has as the result: its rows are scattered over the
    ranks by reduce_scatter."""
    return int(attrs["ranks"]) if attrs["way"] == "reduce_scatter" else 1


@operator(
    Fusion.COMPLEX,
    _beside_reference,
    attrs={
        "way": Attr("str", "all_reduce", "the collective behind the product, or before", BESIDE),
        "chunks": Attr("int", 1, "parts in which rows are multiplied and sent"),
        **_GROUP,
    },
    vjp=_beside_vjp,
    flops=_beside_flops,
    samples="4x3 5x3 5 | 4x3 5x3 _ way=all_gather chunks=2 | 4x3 5x3 5 way=reduce_scatter chunks=2",
)
def linear_beside(
    x: TensorType,
    weight: TensorType,
    bias: Given,
    after: Given,
    way: str,
    chunks: int,
    group: str,
    ranks: int,
) -> TensorType:
    """x · weightᵀ + bias, with its result summed over ranks (and scattered, or not), or with x
    gathered from all ranks first, as ``way`` says. It works by chunks of rows, so that multiplying
    and sending go on at the same time."""
    _of_ranks("linear_beside", x, group, ranks)
    one_dtype("linear_beside", x=x, weight=weight, bias=bias)
    fits = x.rank == weight.rank == 2 and x.shape[1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        wrong = f"linear_beside of {x} by {weight} with {bias}"
        raise GraphError(wrong, remedy="give rows [m, in], a weight [out, in] and a bias [out]")
    rows = x.shape[0]
    if chunks < 1 or (way == "reduce_scatter" and rows % ranks):
        wrong = f"linear_beside of {rows} rows over {ranks} ranks in {chunks} chunks"
        raise GraphError(wrong, remedy="give rows that ranks divide, and one chunk at least")
    rows = rows * ranks if way == "all_gather" else rows // _more({"way": way, "ranks": ranks})
    return TensorType.of((rows, weight.shape[0]), x.dtype)


_EVERY = (all_reduce, all_gather, reduce_scatter, all_to_all, linear_beside)
COLLECTIVES = frozenset(op.name for op in _EVERY)


def payload(node: Node, ins: Sequence[TensorType], out: TensorType) -> tuple[str, int]:
    """Return which collective a node runs, and the bytes of the larger of its operand and its
    result on one rank, by which it is priced."""
    if node.op != linear_beside.name:
        return node.op, max(ins[0].nbytes, out.nbytes)
    way = node.attrs["way"]
    return way, ins[0].nbytes * node.attrs["ranks"] if way == "all_gather" else out.nbytes * _more(
        node.attrs
    )
