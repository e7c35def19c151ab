"""Scaled dot-product attention, softmax(scale · q·kᵀ + bias) · v, and its gradient.

Queries are [batch, heads, Sq, D], keys [batch, kv heads, Sk, D], values [batch, kv heads, Sk, Dv];
the batch may be missing. Each key and value head serves an equal run of query heads (one each is
plain multi-head attention, one for all is multi-query attention).

The reference writes the mathematics out, in float32 at least, so that every engine has the same
thing to answer to. A query that may look at no key at all gives zeros, as
``F.scaled_dot_product_attention`` does on the CPU, and sends back no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deuteron.errors import GraphError
from deuteron.ir.dtype import bool_, float32
from deuteron.ir.types import Shape, TensorType
from deuteron.ops.checks import broadcast, check_grad, one_dtype
from deuteron.ops.emit import Grads, Ops, Sym
from deuteron.ops.opdef import Attr, Attributes, Fusion, Given, Types, Vjp, operator
from deuteron.ops.samples import Arg, Sample

_ATTRS = {
    "causal": Attr("bool", False, "query i sees keys 0 … i only, counted from the first of both"),
    "scale": Attr("float", None, "the factor on q·kᵀ; None is 1/√D"),
}


def _complete(query: int, types: Types, attrs: dict[str, Any]) -> dict[str, Any]:
    """Fills in the scale from the input ``query``. Without any features the scores are 0."""
    q = types[query]
    if attrs["scale"] is None and q is not None and q.rank:
        return attrs | {"scale": 1.0 / math.sqrt(max(q.shape[-1], 1))}
    return attrs


# ---- what may be asked -----------------------------------------------------------------------


def _check(name: str, q: TensorType, k: TensorType, v: TensorType, bias: Given) -> Shape:
    """The shape of the result, or what is wrong with the inputs."""
    one_dtype(name, q=q, k=k, v=v)
    if q.rank not in (3, 4) or not k.rank == v.rank == q.rank:
        wrong = f"{name} needs q, k and v of rank 4, not {q.rank}, {k.rank} and {v.rank}"
        remedy = "reshape them to [batch, heads, length, features]; all may be without a batch"
        raise GraphError(wrong, remedy=remedy)
    if not q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        wrong = f"{name} got batches of {q.shape[0]}, {k.shape[0]} and {v.shape[0]} in q, k and v"
        raise GraphError(wrong, remedy="give q, k and v one batch size (expand)")
    if q.shape[-1] != k.shape[-1]:
        wrong = f"q has {q.shape[-1]} features and k has {k.shape[-1]}"
        raise GraphError(wrong, remedy="the last sizes of q and k must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        wrong = f"k {list(k.shape)} and v {list(v.shape)} differ in heads or length"
        raise GraphError(wrong, remedy="give one value for each key")
    heads, shared = q.shape[-3], k.shape[-3]
    if heads % shared if shared else heads:
        wrong = f"{heads} query heads cannot share {shared} key heads"
        raise GraphError(wrong, remedy="the query heads must be a multiple of the key heads")
    scores = (*q.shape[:-1], k.shape[-2])
    if bias is not None and bias.dtype not in (bool_, float32, q.dtype):
        wrong = f"the bias of {name} is {bias.dtype.name}, q is {q.dtype.name}"
        remedy = "give bool (true: may look), float32 or the element type of q"
        raise GraphError(wrong, remedy=remedy)
    if bias is not None and (bias.rank > q.rank or broadcast(bias.shape, scores) != scores):
        wrong = f"the bias {list(bias.shape)} of {name} does not broadcast to scores {list(scores)}"
        raise GraphError(wrong, remedy="give [heads, Sq, Sk] sizes that are equal or 1")
    return (*q.shape[:-1], v.shape[-1])


def _like_queries(q: TensorType, shape: Shape) -> TensorType:
    """The result lies as the queries do: heads inside or outside the sequence. Attention
    kernels answer so, and the reshape that follows is then free."""
    if q.rank == 4 and min(q.shape) > 0 and min(q.shape[1:3]) > 1 and q.strides[1] < q.strides[2]:
        _, heads, rows, inner = shape
        strides = (rows * heads * inner, inner, heads * inner, 1)
        return TensorType.of(shape, q.dtype, strides=strides)
    return TensorType.of(shape, q.dtype)


# ---- the mathematics, written out --------------------------------------------------------------


def _wide(x: Tensor, heads: int) -> Tensor:
    """``x`` in float32 at least, each of its heads repeated for the query heads it serves."""
    x = x.float() if x.dtype.itemsize < 4 else x
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def _probabilities(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """What each query takes of each key, from ``q`` and ``k`` already widened."""
    scores = q @ k.mT * scale
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -torch.inf)
    elif bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill(blind, 0.0)


def _reference(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **how: Any) -> Tensor:
    heads = q.shape[-3]
    p = _probabilities(_wide(q, heads), _wide(k, heads), bias, **how)
    out = (p @ _wide(v, heads)).to(q.dtype)
    t = _like_queries(TensorType.from_tensor(q), tuple(out.shape))
    return torch.empty_strided(t.shape, t.strides, dtype=q.dtype, device=q.device).copy_(out)


def _grad_reference(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, ...]:
    g, wq, wk, wv = (_wide(t, q.shape[-3]) for t in (grad, q, k, v))
    p = _probabilities(wq, wk, bias, causal, scale)
    dp = g @ wv.mT
    ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * scale

    def narrow(x: Tensor, like: Tensor) -> Tensor:
        """Heads that share a key are added up."""
        groups = x.unflatten(-3, (like.shape[-3], -1)).sum(-3) if x.shape != like.shape else x
        return groups.to(like.dtype).contiguous()

    return narrow(ds @ wk, q), narrow(ds.mT @ wq, k), narrow(p.mT @ g, v)


# ---- gradients ---------------------------------------------------------------------------------


def _product(b: Ops, x: Sym, y: Sym) -> Sym:
    """x·yᵀ for each query head of ``x``, against the head of ``y`` that serves it."""
    *batch, heads, rows, inner = x.shape
    shared = y.shape[-3]
    turned = b.permute(b.upcast(y), dims=(*range(y.rank - 2), y.rank - 1, y.rank - 2))
    shape = (*batch, shared, rows * (heads // max(shared, 1)), inner)
    out = b.matmul(b.reshape(b.upcast(x), shape=shape), turned)
    return b.one("reshape", out, shape=(*batch, heads, rows, y.shape[-2]))


def _bias_grad(b: Ops, v: Vjp) -> Sym:
    """p · (dp − Σ p·dp), summed to the shape of the bias. Masked scores take no part."""
    q, k, values, bias = (v.arg(i) for i in range(4))
    scores = _product(b, q, k) * v.attrs["scale"] + b.upcast(bias)
    if v.attrs["causal"]:
        rows, columns = scores.shape[-2:]
        row = b.constant(torch.arange(rows).reshape(rows, 1), "rows")
        scores = b.where(b.ge(row, b.constant(torch.arange(columns), "columns")), scores, -math.inf)
    p, dp = b.softmax(scores, axis=-1), _product(b, v.grad, values)
    ds = p * (dp - b.sum(p * dp, axes=(-1,), keepdim=True))
    return b.unbroadcast(b.where(b.eq(scores, -math.inf), 0.0, ds), bias.type)


def _vjp(b: Ops, v: Vjp) -> Grads:
    out: Grads = [None] * 4
    if any(v.needs[:3]):
        out[:3] = b.attention_grad(v.grad, *v.ins, **v.attrs)
    if v.has(3) and v.needs[3] and v.arg(3).dtype.is_float:
        out[3] = _bias_grad(b, v)
    return out


# ---- cost and samples --------------------------------------------------------------------------


def _flops(slot: int, over_d: int, over_dv: int, ins: Types, outs: Any, attrs: Attributes) -> float:
    """So many products over the D features and over the Dv features, half of each if causal."""
    q, k, v = ins[slot : slot + 3]
    halved = attrs["causal"] and q.shape[-2] == k.shape[-2]
    pairs = math.prod(q.shape[:-1]) * k.shape[-2] * (0.5 if halved else 1.0)
    return float(2.0 * pairs * (over_d * q.shape[-1] + over_dv * v.shape[-1]))


def _grad_samples() -> Iterator[Sample]:
    for s in attention.samples():
        q, _, v = s.args[:3]
        yield Sample((Arg((*q.shape[:-1], v.shape[-1]), layout=q.layout), *s.inputs), s.attrs)


@operator(
    Fusion.COMPLEX,
    _reference,
    attrs=_ATTRS,
    complete=partial(_complete, 0),
    vjp=_vjp,
    flops=partial(_flops, 0, 1, 1),
    samples="""2x2x3x3 2x2x4x3 2x2x4x2 _
        | 2x2x4x3@nhwc 2x2x4x3@nhwc 2x2x4x2@nhwc _ causal=True scale=0.7
        | 2x2x5x3@transposed 2x2x3x3@transposed 2x2x3x2@transposed _ causal=True
        | 2x4x3x3 2x2x4x3 2x2x4x2 4x3x1
        | 1x3x2x3@sliced 1x1x4x3@sliced 1x1x4x2@sliced 2x4:bool
        | 2x2x3x3 2x2x3x3 2x2x3x2 2x1x3x3 causal=True
        | 2x2x3x3@expanded 2x2x3x3@expanded 2x2x3x2@expanded 1x3:bool causal=True
        | 4x3x3 2x2x3 2x2x2 2 | 0x2x3x3 0x1x4x3 0x1x4x2 _ | 2x2x0x3 2x2x4x3 2x2x4x2 _ causal=True
        | 2x2x3x3 2x2x0x3 2x2x0x2 _ | 1x1x1x3 1x1x1x3 1x1x1x2 scalar
        | 2x2x2x3 2x2x2x3 2x2x2x2 2x2:f32 nograd""",
)
def attention(q: TensorType, k: TensorType, v: TensorType, bias: Given, **how: Any) -> TensorType:
    """softmax(scale · q·kᵀ + bias) · v for each head. A bool bias says which keys a query may look
    at, a float bias is added; causal masks as well, aligned at the top left. A query that sees no
    key gives zeros."""
    return _like_queries(q, _check("attention", q, k, v, bias))


@operator(
    Fusion.OPAQUE,
    _grad_reference,
    attrs=_ATTRS,
    complete=partial(_complete, 1),
    flops=partial(_flops, 1, 3, 2),
    samples=_grad_samples,
)
def attention_grad(
    grad: TensorType, q: TensorType, k: TensorType, v: TensorType, bias: Given, **how: Any
) -> tuple[TensorType, ...]:
    """The gradients of attention for q, k and v, given the gradient of its result; the
    probabilities are computed again."""
    check_grad("attention_grad", grad, _check("attention_grad", q, k, v, bias))
    one_dtype("attention_grad", q=q, grad=grad)
    return tuple(t.with_layout("contiguous") for t in (q, k, v))
