"""ATen → ours: products, convolution, normalisation, attention, losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deuteron.frontends.aten_grad import statistics
from deuteron.frontends.aten_site import Entry, Number, Site, axis_of
from deuteron.ops.emit import Sym

# ---- products ------------------------------------------------------------------------------------


def _times(b: Site, x: Sym, factor: Number) -> Sym:
    return x if factor == 1 else b.mul(*b.pair(x, factor))


def _added_product(b: Site, extra: Sym, x: Sym, y: Sym, beta: Number, alpha: Number) -> Any:
    """beta · extra + alpha · x @ y; with beta = 0 ``extra`` does not count, nan or not."""
    product = _times(b, b.matmul(x, y), alpha)
    return product if beta == 0 else b.add(_times(b, extra, beta), product)


def _outer(b: Site, x: Sym, y: Sym) -> Any:
    return b.mul(b.shaped(x, (*x.shape, 1)), y)


# ---- convolution -----------------------------------------------------------------------------


def _conv(
    b: Site,
    x: Sym,
    weight: Sym,
    bias: Sym | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
) -> Any:
    x = b.batched(x, weight.rank - 2)
    y = b.conv(
        x,
        weight,
        bias,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        transposed=transposed,
        output_padding=output_padding,
    )
    return b.shaped(y)


def _convolution(
    b: Site,
    x: Sym,
    weight: Sym,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    return _conv(b, x, weight, bias, stride, padding, dilation, groups, transposed, output_padding)


def _conv_named_padding(
    b: Site, x: Sym, weight: Sym, bias: Any, stride: Any, padding: str, dilation: Any, groups: int
) -> Any:
    """padding="same" shares dilation · (kernel − 1) zeros out; the odd one goes behind."""
    spatial = weight.rank - 2
    if padding == "valid":
        return _conv(b, x, weight, bias, stride, [0], dilation, groups)
    b.need(padding == "same", f"convolution with padding={padding!r}")
    steps = list(dilation) * (spatial if len(dilation) == 1 else 1)
    total = [d * (k - 1) for d, k in zip(steps, weight.shape[2:], strict=True)]
    front = [t // 2 for t in total]
    odd = [t % 2 for t in total]
    if any(odd):
        lead = [0] * (x.rank - spatial)
        x = b.pad(x, low=[0] * x.rank, high=[*lead, *odd])
    return _conv(b, x, weight, bias, stride, front, dilation, groups)


def _conv_transpose(
    b: Site,
    x: Sym,
    weight: Sym,
    bias: Any,
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: int,
    dilation: Any,
) -> Any:
    return _conv(b, x, weight, bias, stride, padding, dilation, groups, True, output_padding)


# ---- normalisation ---------------------------------------------------------------------------


def _batch_norm(b: Site, x: Sym, w: Any, bias: Any, mean: Any, var: Any, eps: float) -> Any:
    b.need(mean is not None and var is not None, "batch norm without running statistics")
    return b.batch_norm(x, mean, var, w, bias, eps=eps)


def _batch_norm_flag(
    b: Site,
    x: Sym,
    w: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    *ignored: Any,
) -> Any:
    """Evaluation, or batch statistics where there are no running ones to update."""
    if not training:
        return _batch_norm(b, x, w, bias, mean, var, eps)
    b.need(mean is None and var is None, "batch norm in training mode")
    return b.batch_norm_train(x, w, bias, eps=eps)[0]


def _batch_norm_functional(
    b: Site,
    x: Sym,
    w: Any,
    bias: Any,
    mean: Sym,
    var: Sym,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Training that returns the running statistics instead of writing them."""
    if not training:
        return _batch_norm(b, x, w, bias, mean, var, eps), None, None, mean, var
    y, *new, mean, rstd = b.batch_norm_train(x, w, bias, mean, var, momentum=momentum, eps=eps)
    return y, *(_as_wanted(b, i + 1, s) for i, s in enumerate((mean, rstd))), *new


def _as_wanted(b: Site, index: int, x: Sym) -> Sym:
    """A statistic in the type that torch keeps it in."""
    want = b.want[index]
    return x if want is None else b.to(x, want.dtype)


def _with_statistics(
    b: Site, op: str, x: Sym, params: Sequence[Sym | None], eps: float, attrs: dict[str, Any]
) -> tuple[Sym | None, ...]:
    """A norm, its mean and 1/√(var + eps): autograd keeps them for the way back. An RMS norm has
    no mean."""
    y = b.one(op, x, *params, eps=eps, **attrs)
    last = len(b.want) - 1
    kept = b.want[last]
    if not b.used - {0} or kept is None:
        return y, *[None] * last
    found = statistics(b, op, x, eps, attrs, kept.shape)[-last:]
    return y, *(_as_wanted(b, i + 1, s) for i, s in enumerate(found))


def _only_first(entry: Entry, results: int = 3) -> Entry:
    """For calls that also return statistics or indices, which we leave out."""
    return lambda b, *args: (entry(b, *args), *[None] * (results - 1))


def _instance_norm(
    b: Site,
    x: Sym,
    w: Any,
    bias: Any,
    mean: Any,
    var: Any,
    batch_stats: bool,
    momentum: float,
    eps: float,
    *ignored: Any,
) -> Any:
    if not batch_stats:
        return _batch_norm(b, x, w, bias, mean, var, eps)
    b.need(mean is None and var is None, "instance norm that updates running statistics")
    return b.instance_norm(x, w, bias, eps=eps)


def _rms_eps(x: Sym, eps: float | None) -> float:
    """Without eps torch adds the spacing of the type it computes in."""
    wide = torch.float32 if x.dtype.is_low else x.dtype.torch
    return torch.finfo(wide or torch.float32).eps if eps is None else eps


# ---- attention -----------------------------------------------------------------------------------


def _attention(
    b: Site,
    q: Sym,
    k: Sym,
    v: Sym,
    mask: Sym | None = None,
    dropout: float = 0.0,
    causal: bool = False,
    scale: float | None = None,
    gqa: bool = False,
) -> Any:
    """Any rank is brought to [batch, heads, length, features] and back."""
    b.need(dropout == 0, "attention with dropout")
    b.need(q.rank >= 2, "attention on vectors")
    lead = b.out.shape[:-2]
    inner = lead[-1:] or (1,)
    batch = (math.prod(lead[:-1]),)

    def four(t: Sym, heads: tuple[int, ...]) -> Sym:
        full = b.stretched(t, (*lead[:-1], *(heads if lead else ()), *t.shape[-2:]))
        return b.shaped(full, (*batch, *heads, *t.shape[-2:]))

    kv = k.shape[-3:-2] if gqa and lead else inner
    if mask is not None:
        mask = _four_mask(b, mask, len(lead), batch + inner)
    out = b.attention(four(q, inner), four(k, kv), four(v, kv), mask, causal=causal, scale=scale)
    return b.shaped(out)


def _four_mask(b: Site, mask: Sym, lead: int, full: tuple[int, ...]) -> Sym:
    """The mask in a rank that broadcasts to [batch, heads, Sq, Sk]."""
    if mask.rank <= 4 and lead == 2:
        return mask
    kept = mask.shape[:-2]
    b.need(lead < 2 or all(n == 1 for n in kept), "a mask over several batch dimensions")
    lengths = mask.shape[-2:] if mask.rank >= 2 else (1, *mask.shape)
    heads = kept[-1:] if lead == 1 and kept else (1,)
    return b.shaped(mask, (1, *heads, *lengths))


# ---- losses --------------------------------------------------------------------------------------

_REDUCTION = ("none", "mean", "sum")


def _cross_entropy(
    b: Site, x: Sym, target: Sym, weight: Any, reduction: int, ignore: int, smoothing: float
) -> Any:
    return b.cross_entropy(
        x,
        target,
        weight,
        label_smoothing=smoothing,
        ignore_index=ignore,
        reduction=_REDUCTION[reduction],
    )


def _nll(b: Site, x: Sym, target: Sym, weight: Any, reduction: int, ignore: int) -> Any:
    return b.nll_loss(x, target, weight, ignore_index=ignore, reduction=_REDUCTION[reduction])


def _softmax(op: str) -> Entry:
    return lambda b, x, dim, ignored: b.call(op, b.wanted(x), axis=axis_of(dim, x.rank))


TABLE: dict[str, Entry] = {
    **dict.fromkeys(
        (
            "matmul.default",
            "mm.default",
            "bmm.default",
            "mv.default",
            "dot.default",
            "vdot.default",
        ),
        lambda b, x, y: b.matmul(x, y),
    ),
    **dict.fromkeys(("addmm.default", "baddbmm.default", "addmv.default"), _added_product),
    "outer.default": _outer,
    "linear.default": lambda b, x, weight, bias: b.linear(x, weight, bias),
    **{f"conv{n}d.default": _conv for n in (1, 2, 3)},
    **{f"conv{n}d.padding": _conv_named_padding for n in (1, 2, 3)},
    "convolution.default": _convolution,
    "conv_transpose1d.default": _conv_transpose,
    "conv_transpose2d.input": _conv_transpose,
    "conv_transpose3d.input": _conv_transpose,
    "batch_norm.default": _batch_norm_flag,
    "native_batch_norm.default": _only_first(_batch_norm_flag),
    "_native_batch_norm_legit_no_training.default": _only_first(
        lambda b, x, w, bias, mean, var, momentum, eps: _batch_norm(b, x, w, bias, mean, var, eps)
    ),
    "_native_batch_norm_legit.no_stats": _only_first(
        lambda b, x, w, bias, training, momentum, eps: _batch_norm_flag(
            b, x, w, bias, None, None, training, momentum, eps
        )
    ),
    "_native_batch_norm_legit_functional.default": _batch_norm_functional,
    "layer_norm.default": lambda b, x, shape, w, bias, eps, ignored: b.layer_norm(
        x, w, bias, dims=len(shape), eps=eps
    ),
    "native_layer_norm.default": lambda b, x, shape, w, bias, eps: _with_statistics(
        b, "layer_norm", x, (w, bias), eps, {"dims": len(shape)}
    ),
    "rms_norm.default": lambda b, x, shape, w, eps: b.rms_norm(
        x, w, dims=len(shape), eps=_rms_eps(x, eps)
    ),
    "_fused_rms_norm.default": lambda b, x, shape, w, eps: _with_statistics(
        b, "rms_norm", x, (w,), _rms_eps(x, eps), {"dims": len(shape)}
    ),
    "group_norm.default": lambda b, x, groups, w, bias, eps, ignored: b.group_norm(
        x, w, bias, groups=groups, eps=eps
    ),
    "native_group_norm.default": lambda b, x, w, bias, n, c, at, groups, eps: _with_statistics(
        b, "group_norm", x, (w, bias), eps, {"groups": groups}
    ),
    "instance_norm.default": _instance_norm,
    "softmax.int": _softmax("softmax"),
    "_softmax.default": _softmax("softmax"),
    "log_softmax.int": _softmax("log_softmax"),
    "_log_softmax.default": _softmax("log_softmax"),
    "scaled_dot_product_attention.default": _attention,
    "_scaled_dot_product_flash_attention_for_cpu.default": _only_first(
        lambda b, q, k, v, dropout, causal, mask, scale: _attention(
            b, q, k, v, mask, dropout, causal, scale
        ),
        2,
    ),
    "_scaled_dot_product_flash_attention.default": _only_first(
        lambda b, q, k, v, dropout, causal, debug, scale: _attention(
            b, q, k, v, None, dropout, causal, scale
        ),
        9,
    ),
    "_scaled_dot_product_efficient_attention.default": _only_first(
        lambda b, q, k, v, mask, statistics, dropout, causal, scale: _attention(
            b, q, k, v, mask, dropout, causal, scale
        ),
        4,
    ),
    "_scaled_dot_product_cudnn_attention.default": _only_first(
        lambda b, q, k, v, mask, statistics, dropout, causal, debug, scale: _attention(
            b, q, k, v, mask, dropout, causal, scale
        ),
        9,
    ),
    "cross_entropy_loss.default": _cross_entropy,
    "nll_loss.default": _nll,
    "nll_loss_nd.default": _nll,
    "nll_loss2d.default": _nll,
    "nll_loss_forward.default": _only_first(_nll, 2),
    "nll_loss2d_forward.default": _only_first(_nll, 2),
}
