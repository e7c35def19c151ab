"""The gradients of attention: for q, k and v, and for a bias that is added.

Weights are computed again from the log-sums that ``attention_lse`` returned. With p the weights, g
the gradient of the result, and δ the sum of g · result for each query minus the gradient of its
log-sum, the gradient of the scores is p · (g·vᵀ − δ).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import TensorType
from deuteron.ops.attention import ATTRS, BESIDES, completed, flops
from deuteron.ops.attention_checks import checked
from deuteron.ops.attention_math import (
    Columns,
    OtherInputs,
    Part,
    kept_of,
    parts_of,
    scores_of,
    sequences,
    settled,
    widened,
)
from deuteron.ops.checks import check_grad, one_dtype
from deuteron.ops.opdef import Define, Fusion, Given, operator
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.table import get


class Back(NamedTuple):
    """The gradients of the forward pass's results, and these results themselves."""

    grad: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None


def _weights_and_slopes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    back: Back,
    rows: slice,
    columns: Columns,
    rest: OtherInputs,
    part: Part,
    how: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """For some queries, with keys and values already widened: the weights that multiply the values
    (after dropout), the gradient of the products q·k, and the gradient of the final scores."""
    heads, p = q.shape[-3], how["dropout"]
    g = widened(back.grad[..., rows, :], heads)
    some = widened(q[..., rows, :], heads)
    scores, slope = scores_of(some, k, rows, columns, rest, part, how)
    base = back.lse[..., rows, None].nan_to_num(neginf=0.0)
    weights = used = (scores - base).exp()
    dp = g @ v.mT
    if p and rest.seed is not None:
        kept = kept_of(tuple(scores.shape), rows, columns, rest.seed.to(q.device), p, part)
        used, dp = weights * kept, dp * kept
    delta = (g * widened(back.out[..., rows, :], heads)).sum(-1, keepdim=True)
    if back.grad_lse is not None:
        delta = delta - back.grad_lse[..., rows, None]
    after = weights * (dp - delta)
    return used, torch.where(after == 0, 0.0, after * slope) * how["scale"], after


def _parted(
    q: Tensor, k: Tensor, v: Tensor, back: Back, rest: OtherInputs, how: Mapping[str, Any]
) -> Iterator[tuple[Part, tuple[Tensor, Tensor, Tensor], Back, OtherInputs, dict[str, Any]]]:
    """Yield for each sequence: where it lies, its q, k and v, its part of ``back`` and of ``rest``,
    and the attributes that hold for it."""
    for part in sequences(q, k, rest, how):
        mine = part.of_queries(q), part.of_keys(k), part.of_keys(v)
        more = None if back.grad_lse is None else part.of_sums(back.grad_lse)
        own = Back(
            part.of_queries(back.grad), part.of_queries(back.out), part.of_sums(back.lse), more
        )
        yield part, mine, own, part.of(rest), settled(how, part)


def _grad_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *given: Tensor | None,
    **how: Any,
) -> tuple[Tensor, ...]:
    rest, back = OtherInputs(*given[:-1]), Back(grad, out, lse, given[-1])
    results = tuple(torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for part, mine, own, beside, settings in _parted(q, k, v, back, rest, how):
        found = _grad_of_one(*mine, own, beside, part, settings)
        if found[0].shape == q.shape and found[1].shape == k.shape:
            return found
        part.of_queries(results[0]).copy_(found[0])
        for whole, each in zip(results[1:], found[1:], strict=True):
            part.of_keys(whole).copy_(each)
    return results


def _grad_of_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    back: Back,
    rest: OtherInputs,
    part: Part,
    how: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    heads = q.shape[-3]
    wk, wv = widened(k, heads), widened(v, heads)
    dq, dk, dv = [], torch.zeros_like(wk), torch.zeros_like(wv)
    for rows, columns in parts_of(q, k, rest, how):
        keys, values = wk[..., columns, :], wv[..., columns, :]
        used, ds, _ = _weights_and_slopes(q, keys, values, back, rows, columns, rest, part, how)
        dq.append(ds @ keys)
        dk[..., columns, :] += ds.mT @ widened(q[..., rows, :], heads)
        dv[..., columns, :] += used.mT @ widened(back.grad[..., rows, :], heads)

    def narrow(x: Tensor, like: Tensor) -> Tensor:
        """Add up the query heads that share a key head, in the type of ``like``."""
        groups = x.unflatten(-3, (like.shape[-3], -1)).sum(-3) if x.shape != like.shape else x
        return groups.to(like.dtype).contiguous()

    whole = torch.cat(dq, -2) if dq else torch.zeros_like(q)
    return narrow(whole, q), narrow(dk, k), narrow(dv, v)


def _bias_grad_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor,
    *given: Tensor | None,
    **how: Any,
) -> Tensor:
    rest, back = OtherInputs(bias, *given[:-1]), Back(grad, out, lse, given[-1])
    heads = q.shape[-3]
    shape = (1,) * (q.ndim - bias.ndim) + tuple(bias.shape)
    total = torch.zeros(shape, dtype=lse.dtype, device=q.device)
    for part, mine, own, beside, settings in _parted(q, k, v, back, rest, how):
        for rows, columns in parts_of(*mine[:2], beside, settings):
            some, wk, wv = mine[0], *(widened(t[..., columns, :], heads) for t in mine[1:])
            _, _, ds = _weights_and_slopes(some, wk, wv, own, rows, columns, beside, part, settings)
            all_rows, all_columns = (shape[i] == 1 for i in (-2, -1))
            of_mine = part.of_scores(total)
            of_mine = of_mine if all_rows else of_mine[..., rows, :]
            of_mine = of_mine if all_columns else of_mine[..., columns]
            of_mine += ds.sum_to_size(of_mine.shape)
    return total.reshape(bias.shape).to(bias.dtype)


def _full_grad_reference(*given: Any, **how: Any) -> tuple[Tensor, ...]:
    return (*_grad_reference(*given, **how), _bias_grad_reference(*given, **how))


def _grad_samples() -> Iterator[Sample]:
    names = get("attention").inputs
    for s in get("attention").samples():
        q, _, v = s.args[:3]
        out = Arg((*q.shape[:-1], v.shape[-1]), layout=q.layout)
        lse = Arg(q.shape[:-1], "positive", dtype="f32")
        given = (*s.inputs, *[None] * (len(names) - len(s.inputs)))
        yield Sample((out, *given[:3], out, lse, *given[3:]), s.attrs)


def _bias_grad_samples() -> Iterator[Sample]:
    for s in _grad_samples():
        bias = s.inputs[6]
        if bias is not None and bias.dtype is None:
            yield s


_INPUTS = f"grad q k v out lse bias{{}} {BESIDES} grad_lse?"


def _check_back(name: str, *types: Given, **how: Any) -> Sequence[TensorType]:
    """Return the types of q, k, v and the bias; raise a GraphError if the inputs do not fit."""
    given: Any = (*types, *[None] * (17 - len(types)))
    grad, q, k, v, out, lse, *rest, grad_lse = given
    shape: Any = checked(name, q, k, v, *rest, **how)
    for what in (grad, out):
        check_grad(name, what, shape)
    one_dtype(name, q=q, grad=grad, out=out)
    for t in (lse, grad_lse):
        if t is not None and (t.shape != q.shape[:-1] or t.dtype not in (float32, q.dtype)):
            wrong = f"{name} got {t} for sums of the queries {q}"
            raise GraphError(wrong, remedy="give those of attention_lse")
    return q, k, v, rest[0]


_back: Callable[..., Define] = partial(
    operator,
    Fusion.OPAQUE,
    attrs=ATTRS,
    complete=partial(completed, 1),
    flops=partial(flops, 1, 3, 2),
)


@_back(_grad_reference, _INPUTS.format("?"), samples=_grad_samples)
def attention_grad(*types: Given, **how: Any) -> tuple[TensorType, ...]:
    """The gradients of attention for q, k and v, from the gradients of its results and the results
    themselves; the weights are computed again, block by block."""
    found = _check_back("attention_grad", *types, **how)
    return tuple(t.with_layout("contiguous") for t in found[:3])


@_back(_full_grad_reference, _INPUTS.format(""), samples=_bias_grad_samples)
def attention_full_grad(*types: Given, **how: Any) -> tuple[TensorType, ...]:
    """The gradients of attention for q, k, v and a bias that is added. The gradient of the bias is
    that of the scores, which a kernel computes anyway on the way to the gradient of q."""
    found = _check_back("attention_full_grad", *types, **how)
    return tuple(t.with_layout("contiguous") for t in found)
