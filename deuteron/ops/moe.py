"""Mixtures of experts: rows grouped by expert, and products of each group with its own matrix.

A mixture of experts sends every token to a few of its experts. Pairs of a token and an expert are
numbered token by token: pair p belongs to token p // share, where ``share`` is how many experts a
token has. Three lists of integers describe the pairs sorted by group (by expert):

    starts  [groups + 1]  group e has the sorted positions from starts[e] up to starts[e + 1]
    order   [pairs]       which pair stands at each sorted position
    places  [pairs]       at which sorted position each pair stands: the inverse of order

    group_rows      starts, order and places from the experts of all tokens
    take_rows       y[r] = x[order[r] // share]            a row for each pair, group by group
    sum_rows        y[t] = Σ x[places[t · share + s]]      its transpose: the pairs of a token
    grouped_linear  y[r] = x[order[r] // share] · weight[group of r]ᵀ
    grouped_outer   the gradient of its weights: Σ grad[r]ᵀ · x[order[r] // share] over each group

Groups may be empty, and of any size: nothing is padded. Sums are always taken in the same order. On
a CPU the references check the integers before they use them; on a GPU nothing is read outside of
the tensors, whatever the integers are.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import BindError, GraphError
from deuteron.ir.dtype import int32, int64
from deuteron.ir.types import TensorType
from deuteron.ops.checks import check_index, check_shape, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Vjp, operator
from deuteron.ops.reference import wide_type
from deuteron.ops.sparse import rows_of

SHARE = Attr("int", 1, "neighbouring pairs that belong to one row of x: the experts of a token")
GROUPED, ROWS = ("grouped_linear", "grouped_outer"), ("take_rows", "sum_rows")


# ---- groups


def _known(*tensors: Tensor | None) -> bool:
    """Whether the values of tensors can be read without waiting: on a CPU, outside of vmap."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(t is None or (t.is_cpu and not wrapped(t)) for t in tensors)


def _check_range(what: str, index: Tensor, size: int, remedy: str) -> None:
    if _known(index) and index.numel():
        low, high = (int(each) for each in torch.aminmax(index))
        if low < 0 or high >= size:
            wrong = f"{low if low < 0 else high} is out of range"
            raise BindError(wrong, asked=what, remedy=remedy)


def _group_reference(index: Tensor, groups: int) -> tuple[Tensor, ...]:
    remedy = f"use experts from 0 to {groups - 1}"
    _check_range(f"group_rows into {groups} groups", index, groups, remedy)
    flat = index.reshape(-1).long()
    flat = torch.where((flat < 0) | (flat >= groups), groups - 1, flat)
    experts, order = torch.sort(flat, stable=True)
    ends = torch.arange(groups + 1, device=index.device)
    return torch.searchsorted(experts, ends).int(), order.int(), torch.argsort(order).int()


@operator(
    Fusion.OPAQUE,
    _group_reference,
    attrs={"groups": Attr("int", doc="how many groups, or experts, there are")},
    vjp=lambda b, v: [None],
    flops=lambda ins, outs, attrs: 0,
    samples="""groups=3; 5x2:index<3 nograd | 7:index<3:i32 nograd | 1x1:index<1 groups=1 nograd
        | 0x2:index<3 nograd | 4x3:index<2 groups=5 nograd | 6x2@transposed:index<3 nograd""",
)
def group_rows(index: TensorType, groups: int) -> tuple[TensorType, TensorType, TensorType]:
    """Sort the elements of index, each of which is the number of a group, by group; equal ones keep
    their order. Returns where each group starts, which element stands at each sorted position, and
    at which position each element stands. A number of no group is an error on a CPU; on a GPU it is
    taken for that of the last."""
    check_index(index, int64, int32)
    if groups < 1:
        raise GraphError(f"group_rows with groups={groups}", remedy="use 1 or more")
    if index.numel >= 2**31:
        raise GraphError(f"{index.numel} elements are beyond 2³¹", remedy="split the batch")
    one = TensorType.of((index.numel,), int32)
    return TensorType.of((groups + 1,), int32), one, one


# ---- rows of pairs


def _check_pairs(what: str, share: int, **lists: Given) -> int:
    """Return how many pairs there are; raise unless each list has one integer for each pair."""
    if share < 1:
        raise GraphError(f"{what} with share={share}", remedy="use 1 or more")
    count = next(t.shape[0] if t.rank else 0 for t in lists.values() if t is not None)
    for name, t in lists.items():
        if t is not None:
            check_index(t, int64, int32)
            check_shape(f"{name} of {what}", t, (count,), "give the lists of group_rows")
    return count


def _check_rows(what: str, x: TensorType, pairs: int, share: int) -> None:
    if x.rank != 2:
        raise GraphError(f"{what}: x has rank {x.rank}, not 2", remedy="reshape it to [rows, K]")
    if x.shape[0] * share != pairs:
        wrong = f"{what}: {x.shape[0]} rows of {share} pairs each are not {pairs} pairs"
        raise GraphError(wrong, remedy="set share to the experts of a token")


def inverse(b: Ops, order: Sym) -> Sym:
    """The inverse of a permutation."""
    found: Sym = b.call("sort", order, axis=0)[1]
    return found


def _other(b: Ops, v: Vjp, at: int) -> Sym:
    """Input ``at``, a list of pairs; if it is left out, the inverse of the list before it."""
    return v.arg(at) if v.has(at) else inverse(b, v.arg(at - 1))


def _take_reference(x: Tensor, order: Tensor, places: Tensor | None, share: int) -> Tensor:
    _check_range("take_rows", order, x.shape[0] * share, "use the order of group_rows")
    return x.index_select(0, order if share == 1 else order // share)


def _other_way(name: str) -> Callable[[Ops, Vjp], Grads]:
    """The gradient of ``take_rows`` or ``sum_rows`` by the other one, with the lists exchanged."""
    return lambda b, v: [b.one(name, v.grad, _other(b, v, 2), v.arg(1), **v.attrs), None, None]


@operator(
    Fusion.OPAQUE,
    _take_reference,
    attrs={"share": SHARE},
    vjp=_other_way("sum_rows"),
    flops=lambda ins, outs, attrs: 0,
    samples="""5x3 5:order<5 | 4x3@transposed 8:order<8:i32 _ share=2 | 2x0 6:order<6 _ share=3
        | 0x4 0:order<0 _ share=2 | 3x7@sliced 12:order<12 _ share=4""",
)
def take_rows(x: TensorType, order: TensorType, places: Given, share: int) -> TensorType:
    """The row of x of each pair, in the order given: x[order // share]. places is the inverse of
    order, for the gradient."""
    pairs = _check_pairs("take_rows", share, order=order, places=places)
    _check_rows("take_rows", x, pairs, share)
    return TensorType.of((pairs, x.shape[1]), x.dtype)


def _sum_reference(x: Tensor, places: Tensor, order: Tensor | None, share: int) -> Tensor:
    _check_range("sum_rows", places, x.shape[0], "use the places of group_rows")
    picked = x.index_select(0, places)
    if share == 1:
        return picked
    each = picked.unflatten(0, (places.shape[0] // share, share))
    total: Tensor = each.sum(1, dtype=wide_type(x))
    return total.to(x.dtype)


def _sum_expand(b: Ops, ins: Any, attrs: Attributes) -> list[Sym]:
    """A product with a sparse matrix of ones, ``share`` in each row."""
    x, places, _ = ins
    pairs, share = places.shape[0], attrs["share"]
    starts = b.constant(torch.arange(0, pairs + 1, share).to(places.dtype.torch))
    ones = b.constant(torch.ones(pairs, dtype=x.dtype.torch))
    return [b.one("spmm_csr", starts, places, ones, x)]


@operator(
    Fusion.OPAQUE,
    _sum_reference,
    attrs={"share": SHARE},
    vjp=_other_way("take_rows"),
    expand=_sum_expand,
    flops=lambda ins, outs, attrs: float(ins[0].numel),
    samples="""5x3 5:order<5 | 8x3@transposed 8:order<8:i32 _ share=2 | 6x0 6:order<6 _ share=3
        | 0x4 0:order<0 _ share=2 | 12x7@sliced 12:order<12 _ share=4""",
)
def sum_rows(x: TensorType, places: TensorType, order: Given, share: int) -> TensorType:
    """Add up the rows of each token's pairs, in float32 at least: y[t] is the sum of the rows of x
    that places[t · share] and the share − 1 entries after it name. order is the inverse of places,
    for the gradient."""
    pairs = _check_pairs("sum_rows", share, places=places, order=order)
    one_dtype("sum_rows", x=x)
    if x.rank != 2 or x.shape[0] != pairs or pairs % share:
        wrong = f"sum_rows: x is {list(x.shape)}, places are {pairs} in groups of {share}"
        raise GraphError(wrong, remedy="give a row of x for each place, and share of them a token")
    return TensorType.of((pairs // share, x.shape[1]), x.dtype)


# ---- products


def _ends(starts: Tensor, pairs: int, what: str) -> list[int]:
    """Return where groups begin and end; raise unless ``starts`` rises from 0 to ``pairs``."""
    ends: list[int] = starts.tolist()
    rising = all(a <= b for a, b in pairwise(ends))
    if not rising or ends[0] != 0 or ends[-1] != pairs:
        asked = f"{what} of {pairs} rows in {len(ends) - 1} groups"
        wrong, remedy = f"starts do not rise from 0 to {pairs}", "use the starts of group_rows"
        raise BindError(wrong, asked=asked, remedy=remedy)
    return ends


def _rows(x: Tensor, order: Tensor | None, share: int) -> Tensor:
    return x if order is None else _take_reference(x, order, None, share)


def _linear_reference(
    x: Tensor,
    weight: Tensor,
    starts: Tensor,
    order: Tensor | None = None,
    places: Tensor | None = None,
    share: int = 1,
) -> Tensor:
    rows = _rows(x, order, share)
    if _known(starts):
        ends = _ends(starts, rows.shape[0], "grouped_linear")
        groups = [(a, b, w) for (a, b), w in zip(pairwise(ends), weight, strict=True) if b > a]
        if torch.is_grad_enabled() or not groups or not _known(rows, weight):
            parts = [rows[a:b] @ w.mT for a, b, w in groups]
            return torch.cat(parts) if parts else rows @ weight[0].mT
        whole = rows.new_empty(rows.shape[0], weight.shape[1])
        for a, b, w in groups:
            torch.mm(rows[a:b], w.mT, out=whole[a:b])
        return whole
    # We may not wait for the values of starts: every group multiplies all rows and keeps its own.
    group = rows_of(starts, rows.shape[0])
    inside = _inside(starts, rows.shape[0])
    made = torch.full_like(rows[:, :1], float("nan")).expand(-1, weight.shape[1])
    for e, w in enumerate(weight):
        made = torch.where(((group == e) & inside)[:, None], rows @ w.mT, made)
    return made


def _inside(starts: Tensor, pairs: int) -> Tensor:
    """Which rows are in a group; none are if ``starts`` makes no sense."""
    rows = torch.arange(pairs, device=starts.device)
    sound = (starts[0] == 0) & (starts[-1] <= pairs) & (starts.diff() >= 0).all()
    return (rows < starts[-1]) & sound


def _linear_vjp(b: Ops, v: Vjp) -> Grads:
    dx, dw = _to_rows(b, v, v.grad, v.arg(1)) if v.needs[0] else None, None
    if v.needs[1]:
        given = v.grad, v.arg(0), v.arg(2), *v.ins[3:5]
        dw = b.one("grouped_outer", *given, share=v.attrs["share"])
    return [dx, dw, None, None, None]


def _to_rows(b: Ops, v: Vjp, grad: Sym, weight: Sym) -> Sym:
    """The gradient of x: rows of ``grad`` times the matrix of their group, added up for a row of x
    that was read several times."""
    found = b.one("grouped_linear", grad, b.one("permute", weight, dims=(0, 2, 1)), v.arg(2))
    if not v.has(3):
        return found
    return b.one("sum_rows", found, _other(b, v, 4), v.arg(3), share=v.attrs["share"])


@operator(
    Fusion.COMPLEX,
    _linear_reference,
    attrs={"share": SHARE},
    vjp=_linear_vjp,
    flops=lambda ins, outs, attrs: 2.0 * outs[0].numel * ins[0].shape[1],
    samples="""7x4 3x5x4 4:starts<7 | 5x4 1x3x4 2:starts<5:i32 | 2x4 6x3x4 7:starts<2 [empty groups]
        | 3x4@sliced 2x5x4@transposed 3:starts<6 6:order<6 _ share=2
        | 4x3@transposed 3x2x3@sliced 4:starts<4:i32 4:order<4:i32
        | 0x4 3x5x4 4:starts<0 [no rows] | 3x0 2x5x0 3:starts<3 [nothing to add up]
        | 3x4 2x0x4 3:starts<3 [no columns] | 1x6 5x2x6 6:starts<3 3:order<3 _ share=3""",
)
def grouped_linear(
    x: TensorType, weight: TensorType, starts: TensorType, order: Given, places: Given, share: int
) -> TensorType:
    """Rows of x times the matrix of their group: y[r] = x[r] · weight[e]ᵀ for the r from starts[e]
    up to starts[e + 1], with weight [groups, out, in]. With an order, x[order[r] // share] takes
    the place of x[r]. places is the inverse of order, for the gradient."""
    one_dtype("grouped_linear", x=x, weight=weight)
    pairs = _check_groups("grouped_linear", x, starts, order, places, share)
    if weight.rank != 3 or weight.shape[2] != x.shape[1]:
        wrong = f"grouped_linear: x is {list(x.shape)}, weight {list(weight.shape)}"
        raise GraphError(wrong, remedy="weights are stored [groups, out, in]")
    count = starts.shape[0] - 1
    if weight.shape[0] != count:
        wrong = f"grouped_linear: {weight.shape[0]} matrices for the {count} groups of starts"
        raise GraphError(wrong, remedy="give a matrix for each group")
    return TensorType.of((pairs, weight.shape[1]), x.dtype)


def _check_groups(
    what: str, x: TensorType, starts: TensorType, order: Given, places: Given, share: int
) -> int:
    """Return how many pairs there are; raise unless the lists fit x."""
    check_index(starts, int64, int32)
    if starts.rank != 1 or starts.shape[0] < 2:
        wrong = f"{what}: starts is {list(starts.shape)}, not [groups + 1]"
        raise GraphError(wrong, remedy="use the starts of group_rows")
    if order is None and (places is not None or share != 1):
        raise GraphError(f"{what} has places or a share without an order", remedy="give the order")
    pairs = x.shape[0] if order is None and x.rank else 0
    if order is not None:
        pairs = _check_pairs(what, share, order=order, places=places)
    _check_rows(what, x, pairs, share)
    return pairs


def _outer_reference(
    grad: Tensor,
    x: Tensor,
    starts: Tensor,
    order: Tensor | None = None,
    places: Tensor | None = None,
    share: int = 1,
) -> Tensor:
    rows = _rows(x, order, share)
    if _known(starts):
        ends = _ends(starts, rows.shape[0], "grouped_outer")
        groups = pairwise(ends)
        return torch.stack([grad[a:b].mT @ rows[a:b] for a, b in groups])
    group = torch.where(_inside(starts, rows.shape[0]), rows_of(starts, rows.shape[0]), -1)
    zero = torch.zeros((), dtype=grad.dtype, device=grad.device)
    own = (torch.where((group == e)[:, None], grad, zero) for e in range(starts.shape[0] - 1))
    return torch.stack([g.mT @ rows for g in own])


def _outer_vjp(b: Ops, v: Vjp) -> Grads:
    """Both gradients are products with the incoming one, which has a matrix for each group."""
    dgrad, dx = None, _to_rows(b, v, v.arg(0), v.grad) if v.needs[1] else None
    if v.needs[0]:
        given = v.arg(1), v.grad, v.arg(2), *v.ins[3:5]
        dgrad = b.one("grouped_linear", *given, share=v.attrs["share"])
    return [dgrad, dx, None, None, None]


@operator(
    Fusion.COMPLEX,
    _outer_reference,
    attrs={"share": SHARE},
    vjp=_outer_vjp,
    flops=lambda ins, outs, attrs: 2.0 * ins[0].numel * ins[1].shape[1],
    samples="""7x5 7x4 4:starts<7 | 5x3 5x4 2:starts<5:i32 | 2x3 2x4 7:starts<2 [empty groups]
        | 6x5@sliced 3x4@transposed 3:starts<6 6:order<6 _ share=2
        | 4x2@transposed 4x3@sliced 4:starts<4:i32 4:order<4:i32
        | 0x5 0x4 4:starts<0 [no rows] | 3x5 3x0 3:starts<3 | 3x2 1x6 6:starts<3 3:order<3 _ share=3
        """,
)
def grouped_outer(
    grad: TensorType, x: TensorType, starts: TensorType, order: Given, places: Given, share: int
) -> TensorType:
    """For each group the sum of grad[r]ᵀ · x[r] over its rows: [groups, out, in], the gradient of
    grouped_linear for its weights. With an order, x[order[r] // share] takes the place of x[r]. A
    group without rows has zeros."""
    one_dtype("grouped_outer", grad=grad, x=x)
    pairs = _check_groups("grouped_outer", x, starts, order, places, share)
    if grad.rank != 2 or grad.shape[0] != pairs:
        wrong = f"grouped_outer: grad is {list(grad.shape)} for {pairs} rows"
        raise GraphError(wrong, remedy="give the gradient of grouped_linear, [rows, out]")
    return TensorType.of((starts.shape[0] - 1, grad.shape[1], x.shape[1]), x.dtype)
