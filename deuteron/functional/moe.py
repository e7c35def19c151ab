"""Mixtures of experts: which experts a token goes to, and what they make of it.

    route     scores of all experts, the best of them, and their shares
    experts   rows go to their experts, group by group, and come back added up
    moe       both, from the tokens on

Without a gradient all of it is one graph: the groups; one product for gate and up, with the
activation and the share in its epilogue; one product back down; and the sum over the experts of
each token. The share is multiplied in before the second product, (s · h) · w = s · (h · w), so that
its gradient needs no result of the second product. In training the first product is a call of its
own, so that the backward pass finds its result instead of computing it again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deuteron.errors import BindError
from deuteron.functional.arguments import check_tensor
from deuteron.functional.autocast import lower
from deuteron.functional.context import any_requires_grad, under_autocast
from deuteron.functional.core import Function
from deuteron.functional.delegate import delegates
from deuteron.functional.operators import activated, operator
from deuteron.ops import Ops, Sym

SCORES = ("softmax", "sigmoid")


# ---- which experts


def _route(b: Ops, logits: Sym, *, top_k: int, score: str, normalise: bool) -> tuple[Sym, ...]:
    wide = b.upcast(logits)
    scores = b.softmax(wide, axis=-1) if score == "softmax" else b.sigmoid(wide)
    best, places = b.topk(scores, k=top_k, axis=-1)
    if normalise:
        best = best / b.sum(best, axes=(best.rank - 1,), keepdim=True)
    return best, places


ROUTE = Function("route", _route)


@delegates()
def route(
    logits: Tensor, top_k: int, *, score: str = "softmax", normalise: bool = True
) -> tuple[Tensor, Tensor]:
    """Choose the best experts of each token, and return (shares, numbers), both [..., top_k], best
    first.

    logits     [..., experts]
    top_k      how many experts a token goes to, from 1 to all
    score      "softmax" over all experts, or "sigmoid" of each
    normalise  whether the shares of a token are divided by their sum

    >>> shares, numbers = dt.functional.route(x @ router.T, top_k=2)

    Shares are what each expert counts in the token's result: float32 (float64 for float64 logits),
    with gradients. Numbers are int64. Which of equal experts is taken is not defined.
    """
    asked = f"route(logits {list(logits.shape)}, top_k={top_k}, score={score!r})"
    if score not in SCORES:
        wrong = f"there is no score {score!r}"
        raise BindError(wrong, asked=asked, remedy=f"use {' or '.join(SCORES)}")
    if not logits.ndim or not 1 <= top_k <= logits.shape[-1]:
        count = logits.shape[-1] if logits.ndim else 0
        wrong = f"a token cannot go to {top_k} of {count} experts"
        raise BindError(wrong, asked=asked, remedy=f"use a top_k from 1 to {max(count, 1)}")
    found: tuple[Tensor, Tensor] = ROUTE(
        logits, top_k=int(top_k), score=score, normalise=bool(normalise)
    )
    return found


# ---- what they make


def _side_by_side(b: Ops, t: Sym) -> Sym:
    """Return ``t`` with numbers side by side in memory along one of its last two dimensions, as
    kernels read them."""
    whole = 1 in t.type.strides[-2:] or t.type.numel == 0
    return t if whole else b.one("to_layout", t, layout="contiguous")


def _rows(b: Ops, x: Sym) -> Sym:
    """Return x [..., K] as a matrix whose rows are contiguous."""
    lines = x if x.rank == 2 else b.one("reshape", x, shape=(-1, x.shape[-1]))
    apart = lines.type.strides[1] != 1 and lines.shape[1] > 1
    return b.one("to_layout", lines, layout="contiguous") if apart else lines


def _shared(b: Ops, h: Sym, weights: Sym, experts: Sym, lists: tuple[Sym, ...], count: int) -> Sym:
    """Return h with each row multiplied by the share of its pair of a token and an expert; nan
    where there is no such expert."""
    known = b.logical_and(b.ge(experts, 0), b.lt(experts, count))
    column = b.one("reshape", b.where(known, weights, float("nan")), shape=(-1, 1))
    return b.to(h * b.one("take_rows", column, *lists[1:]), h.dtype)


def _back(b: Ops, h: Sym, w_out: Sym, lists: tuple[Sym, ...], share: int) -> Sym:
    starts, order, places = lists
    y = b.one("grouped_linear", h, _side_by_side(b, w_out), starts)
    return b.one("sum_rows", y, places, order, share=share)


def _is_gated(w_in: Sym, w_out: Sym) -> bool:
    return w_in.shape[1] != w_out.shape[2]


def _halves(b: Ops, t: Sym, axis: int) -> tuple[Sym, Sym]:
    half = t.shape[axis] // 2
    return b.slice(t, axis, 0, half), b.slice(t, axis, half, 2 * half)


def _whole(
    b: Ops,
    x: Sym,
    experts: Sym,
    weights: Sym,
    w_in: Sym,
    w_out: Sym,
    *,
    activation: str,
    apart: bool,
) -> Sym:
    """Write the whole layer. ``apart``: gate and up are two products in the graph, which GPU
    kernels compute as one."""
    share, lines = experts.shape[-1], _rows(b, x)
    flat = b.one("reshape", experts, shape=(-1,))
    lists = b.group_rows(flat, groups=w_in.shape[0])
    w_in = _side_by_side(b, w_in)
    gated = _is_gated(w_in, w_out)
    parts = _halves(b, w_in, 1) if gated and apart else (w_in,)
    made = [b.one("grouped_linear", lines, w, *lists, share=share) for w in parts]
    gate, *up = _halves(b, made[0], 1) if gated and not apart else made
    h = activated(b, gate, activation)
    h = h * up[0] if up else h
    y = _back(b, _shared(b, h, weights, experts, lists, w_in.shape[0]), w_out, lists, share)
    return y if x.rank == 2 else b.one("reshape", y, shape=x.shape[:-1] + y.shape[1:])


def _inner(b: Ops, x: Sym, w_in: Sym, starts: Sym, order: Sym, places: Sym, *, share: int) -> Sym:
    lines, weight = _rows(b, x), _side_by_side(b, w_in)
    return b.one("grouped_linear", lines, weight, starts, order, places, share=share)


def _outer(
    b: Ops,
    h: Sym,
    experts: Sym,
    weights: Sym,
    w_out: Sym,
    starts: Sym,
    order: Sym,
    places: Sym,
    *,
    activation: str,
    share: int,
) -> Sym:
    gate, *up = _halves(b, h, 1) if h.shape[1] != w_out.shape[2] else (h,)
    y = activated(b, gate, activation)
    y, lists = y if not up else y * up[0], (starts, order, places)
    return _back(b, _shared(b, y, weights, experts, lists, w_out.shape[0]), w_out, lists, share)


EXPERTS = Function("experts", _whole)
INNER, OUTER = Function("experts_inner", _inner), Function("experts_outer", _outer)
GROUPS = operator("group_rows")


@delegates()
def experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    """Apply to each token its experts and add up their results: y = Σ weights[s] · w_out[e] · h
    over e = experts[s], where h = activation(w_in[e] · x), or with a gate h = activation(gate · x)
    · (up · x).

    x           [..., K]
    experts     [..., k] int64 or int32: numbers of experts, k for each token
    weights     [..., k]: their shares, of any float type
    w_in        [experts, H, K]; or with a gate [experts, 2 · H, K], the rows of gate before those
                of up
    w_out       [experts, K, H]
    activation  an activation by its name: "silu", "gelu", "gelu_tanh", "relu", …

    >>> shares, numbers = dt.functional.route(x @ router.T, top_k=2)
    >>> y = dt.functional.experts(x, numbers, shares, gate_up_proj, down_proj)

    Rows are grouped by expert without being moved, and no group is padded; an expert without tokens
    costs nothing but its gradient of zeros. Sums are float32 and keep one order, so that the same
    call gives the same bits. On a GPU the host does not wait for the sizes of groups, so the call
    can be captured. A token whose expert does not exist is nan there; on a CPU it is an error. x,
    weights, w_in and w_out have gradients. Under autocast x, w_in and w_out are cast.
    """
    for t in (experts, weights, w_in, w_out):
        check_tensor("experts", t)
    asked = f"experts(x {list(x.shape)}, experts {list(experts.shape)}, "
    asked += f"weights {list(weights.shape)}, w_in {list(w_in.shape)}, w_out {list(w_out.shape)})"
    _check(x, experts, weights, w_in, w_out, asked)
    x, w_in, w_out = lower(x, w_in, w_out)
    tensors = (x, weights, w_in, w_out)
    if not (torch.is_grad_enabled() and any_requires_grad(tensors)):
        given = (x, experts, weights, w_in, w_out)
        return EXPERTS.one(*given, activation=activation, apart=x.is_cuda)
    lists = GROUPS(experts.reshape(-1), groups=w_in.shape[0])
    share = experts.shape[-1]
    h = INNER.one(x, w_in, *lists, share=share)
    y = OUTER.one(h, experts, weights, w_out, *lists, activation=activation, share=share)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[1])


def _check(
    x: Tensor, experts: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, asked: str
) -> None:
    """Refuse sizes that do not fit each other; types are checked where the graph is written."""

    def refuse(wrong: str, remedy: str) -> None:
        raise BindError(wrong, asked=asked, remedy=remedy)

    if x.ndim < 2:
        refuse(f"x has rank {x.ndim}", "give tokens as rows: [..., K]")
    if experts.ndim != x.ndim or experts.shape[:-1] != x.shape[:-1] or not experts.shape[-1]:
        lead = "".join(f"{n}, " for n in x.shape[:-1])
        refuse("experts are not those of the tokens of x", f"give them as [{lead}k]")
    if weights.shape != experts.shape:
        refuse("weights have another shape than experts", "give a share for each expert")
    if w_in.ndim != 3 or w_in.shape[2] != x.shape[-1] or not w_in.shape[0]:
        refuse(f"w_in does not take rows of {x.shape[-1]}", "give it as [experts, out, in]")
    inner = w_in.shape[1]
    fits = w_out.ndim == 3 and w_out.shape[0] == w_in.shape[0]
    if not fits or w_out.shape[2] not in (inner, inner / 2):
        words = f"[{w_in.shape[0]}, out, {inner}]"
        words += f", or with a gate [{w_in.shape[0]}, out, {inner // 2}]" if inner % 2 == 0 else ""
        refuse("w_out does not take what w_in makes", f"give it as {words}")
    if not weights.is_floating_point():
        refuse(f"weights are {str(weights.dtype).removeprefix('torch.')}", "use weights.float()")


@delegates()
def moe(
    x: Tensor,
    router: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    top_k: int,
    *,
    score: str = "softmax",
    normalise: bool = True,
    activation: str = "silu",
) -> Tensor:
    """Run a layer of experts: :func:`route` by the logits x · routerᵀ, then :func:`experts`.

    x                 [..., K]
    router            [experts, K]: a row for each expert
    w_in, w_out       the experts' matrices, as for :func:`experts`
    top_k             how many experts a token goes to
    score, normalise  as for :func:`route`
    activation        as for :func:`experts`

    >>> y = dt.functional.moe(x, router, gate_up_proj, down_proj, top_k=2)
    """
    check_tensor("moe", router)
    asked = f"moe(x {list(x.shape)}, router {list(router.shape)}, …)"
    if x.ndim < 2:
        raise BindError(f"x has rank {x.ndim}", asked=asked, remedy="give tokens as rows: [..., K]")
    if router.ndim != 2 or router.shape[1] != x.shape[-1]:
        wrong = f"router does not take rows of {x.shape[-1]}"
        raise BindError(wrong, asked=asked, remedy="give it as [experts, K], a row for each expert")
    if x.dtype != router.dtype and not under_autocast(x):
        kinds = (str(t.dtype).removeprefix("torch.") for t in (x, router))
        wrong = "x is {}, and router {}".format(*kinds)
        raise BindError(wrong, asked=asked, remedy="cast one of them: router.to(x.dtype)")
    logits = torch.nn.functional.linear(x, router)
    weights, numbers = route(logits, top_k, score=score, normalise=normalise)
    return experts(x, numbers, weights, w_in, w_out, activation=activation)


__all__ = ["experts", "moe", "route"]
