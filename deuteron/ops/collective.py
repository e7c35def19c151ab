"""What ranks do together: sums, parts put together, sums taken apart, parts exchanged.

Every rank of a process group of torch.distributed runs the same operator at the same place of its
graph. ``group`` is torch's name of the group, and ``ranks`` how many it has; a group of one rank
computes with nobody, so graphs can be written, priced and tested where no process group is.

Collectives of a graph are run in its order on every rank: each reads, as ``after``, a result of the
one before it, of which it needs nothing but that it is there (passes/collective.py). None is left
out because another is equal, computed ahead of time, or computed again for a gradient: what one
rank does alone the others would wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.types import TensorType
from deuteron.ops.elementwise import numbers
from deuteron.ops.emit import Grads, Ops
from deuteron.ops.opdef import Attr, Define, Fusion, Given, Vjp, elementwise_flops, operator

REDUCE = ("sum", "avg", "max", "min")


def called(name: str, *args: Any) -> Tensor:
    """A collective of torch's, from its start to its end."""
    calls = torch.ops._c10d_functional
    result: Tensor = calls.wait_tensor(getattr(calls, name)(*args))
    return result


def _all_reduce_reference(x: Tensor, after: Any, reduce: str, group: str, ranks: int) -> Tensor:
    if ranks == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return called("all_reduce", x.contiguous(), reduce, group)


def _all_gather_reference(x: Tensor, after: Any, group: str, ranks: int) -> Tensor:
    if ranks == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return called("all_gather_into_tensor", x.contiguous(), ranks, group)


def _reduce_scatter_reference(x: Tensor, after: Any, reduce: str, group: str, ranks: int) -> Tensor:
    if ranks == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return called("reduce_scatter_tensor", x.contiguous(), reduce, ranks, group)


def _all_to_all_reference(
    x: Tensor, after: Any, takes: Any, gives: Any, group: str, ranks: int
) -> Tensor:
    if ranks == 1:
        return x.clone(memory_format=torch.contiguous_format)
    return called("all_to_all_single", x.contiguous(), list(takes), list(gives), group)


def _all_reduce_vjp(b: Ops, v: Vjp) -> Grads:
    """Each rank's x reached the results of all, and their gradients come together."""
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
    _all_reduce_reference,
    attrs=_REDUCE | _GROUP,
    vjp=_all_reduce_vjp,
    samples="3x5 | 4x6@transposed reduce=avg | 0 [empty] | scalar [scalar]",
)
def all_reduce(x: TensorType, after: Given, reduce: str, group: str, ranks: int) -> TensorType:
    """The sum (or mean, largest, smallest) of x over all ranks, on each of them."""
    _of_ranks("all_reduce", x, group, ranks)
    return TensorType.of(x.shape, x.dtype)


@_collective(
    _all_gather_reference,
    attrs=_GROUP,
    vjp=_all_gather_vjp,
    samples="3x5 | 4x6@transposed | 0 [empty]",
)
def all_gather(x: TensorType, after: Given, group: str, ranks: int) -> TensorType:
    """x of all ranks, one behind the other along the first axis, on each of them."""
    _of_ranks("all_gather", x, group, ranks)
    if not x.rank:
        raise GraphError("all_gather of a tensor without axes", remedy="reshape it to (1,)")
    return TensorType.of((x.shape[0] * ranks, *x.shape[1:]), x.dtype)


@_collective(
    _reduce_scatter_reference,
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
    _all_to_all_reference,
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


COLLECTIVES = frozenset(op.name for op in (all_reduce, all_gather, reduce_scatter, all_to_all))


def payload(ins: TensorType, out: TensorType) -> int:
    """Bytes of the larger side of a collective on one rank, which its price goes by."""
    return max(ins.nbytes, out.nbytes)
