"""The gradients of attention: for q, k and v, and for a bias that is added.

Weights are computed again from the sums that ``attention_lse`` kept. With p the weights, g the
gradient of the result, and δ the sum of g · result for each query, less the gradient of its sum,
the gradient of the scores is p · (g·vᵀ − δ).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import float32
from deuteron.ir.types import TensorType
from deuteron.ops.attention import (
    ATTRS,
    Besides,
    checked,
    completed,
    flops,
    kept_of,
    parts_of,
    rows_of,
    scores_of,
    widened,
)
from deuteron.ops.checks import check_grad, one_dtype
from deuteron.ops.opdef import Fusion, Given, operator
from deuteron.ops.samples import Arg, Sample
from deuteron.ops.table import get


def _weights_and_slopes(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rest: Besides,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    rows: slice,
    how: Mapping[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:
    """Of some queries: what weighs the values, the gradient of the scores before the soft cap, and
    after it."""
    heads, queries, p = q.shape[-3], q.shape[-2], how["dropout"]
    g = widened(grad[..., rows, :], heads)
    scores, slope = scores_of(
        widened(q[..., rows, :], heads), widened(k, heads), rows, queries, rest, **how
    )
    base = lse[..., rows, None].nan_to_num(neginf=0.0)
    weights = used = (scores - base).exp()
    dp = g @ widened(v, heads).mT
    if p and rest.seed is not None:
        kept = kept_of(tuple(scores.shape), rows, queries, rest.seed.to(q.device), p)
        used, dp = weights * kept, dp * kept
    delta = (g * widened(out[..., rows, :], heads)).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - grad_lse[..., rows, None]
    after = weights * (dp - delta)
    return used, after * slope * how["scale"], after


def _grad_reference(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    slopes: Tensor | None,
    seed: Tensor | None,
    grad_lse: Tensor | None,
    **how: Any,
) -> tuple[Tensor, ...]:
    rest, heads = Besides(bias, slopes, seed), q.shape[-3]
    wk = widened(k, heads)
    dq, dk, dv = [], torch.zeros_like(wk), torch.zeros_like(widened(v, heads))
    for rows in parts_of(q, k):
        used, ds, _ = _weights_and_slopes(grad, q, k, v, rest, out, lse, grad_lse, rows, how)
        dq.append(ds @ wk)
        dk = dk + ds.mT @ widened(q[..., rows, :], heads)
        dv = dv + used.mT @ widened(grad[..., rows, :], heads)

    def narrow(x: Tensor, like: Tensor) -> Tensor:
        """Heads that share a key are added up."""
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
    slopes: Tensor | None,
    seed: Tensor | None,
    grad_lse: Tensor | None,
    **how: Any,
) -> Tensor:
    rest, queries = Besides(bias, slopes, seed), q.shape[-2]
    total = torch.zeros(bias.shape, dtype=lse.dtype, device=q.device)
    for rows in parts_of(q, k):
        ds = _weights_and_slopes(grad, q, k, v, rest, out, lse, grad_lse, rows, how)[2]
        part = ds.sum_to_size(rows_of(total, queries, rows).shape)
        if part.shape == total.shape:
            total = total + part
        else:
            total[..., rows, :] += part
    return total.to(bias.dtype)


def _grad_samples() -> Iterator[Sample]:
    for s in get("attention").samples():
        q, _, v = s.args[:3]
        out = Arg((*q.shape[:-1], v.shape[-1]), layout=q.layout)
        lse = Arg(q.shape[:-1], "positive", dtype="f32")
        given = (*s.inputs, *[None] * (6 - len(s.inputs)))
        yield Sample((out, *given[:3], out, lse, *given[3:]), s.attrs)


def _bias_grad_samples() -> Iterator[Sample]:
    for s in _grad_samples():
        bias = s.inputs[6]
        if bias is not None and bias.dtype is None:
            yield s


_INPUTS = "grad q k v out lse bias{} slopes? seed? grad_lse?"


def _check_back(name: str, *types: Given, **how: Any) -> Sequence[TensorType]:
    """q, k, v and the bias, if nothing is wrong with what is given."""
    given: Any = (*types, *[None] * (10 - len(types)))
    grad, q, k, v, out, lse, *rest = given
    shape: Any = checked(name, q, k, v, *rest[:3], **how)
    for what in (grad, out):
        check_grad(name, what, shape)
    one_dtype(name, q=q, grad=grad, out=out)
    for t in (lse, rest[3]):
        if t is not None and (t.shape != q.shape[:-1] or t.dtype not in (float32, q.dtype)):
            wrong = f"{name} got {t} for sums of the queries {q}"
            raise GraphError(wrong, remedy="give those of attention_lse")
    return q, k, v, rest[0]


@operator(
    Fusion.OPAQUE,
    _grad_reference,
    _INPUTS.format("?"),
    attrs=ATTRS,
    complete=partial(completed, 1),
    flops=partial(flops, 1, 3, 2),
    samples=_grad_samples,
)
def attention_grad(*types: Given, **how: Any) -> tuple[TensorType, ...]:
    """The gradients of attention for q, k and v, given those of its results and the results
    themselves; weights are computed again, block by block."""
    found = _check_back("attention_grad", *types, **how)
    return tuple(t.with_layout("contiguous") for t in found[:3])


@operator(
    Fusion.OPAQUE,
    _bias_grad_reference,
    _INPUTS.format(""),
    attrs=ATTRS,
    complete=partial(completed, 1),
    flops=partial(flops, 1, 1, 1),
    samples=_bias_grad_samples,
)
def attention_bias_grad(*types: Given, **how: Any) -> TensorType:
    """The gradient of attention for a bias that is added: the gradient of the scores, summed to
    its shape."""
    return _check_back("attention_bias_grad", *types, **how)[3].with_layout("contiguous")
