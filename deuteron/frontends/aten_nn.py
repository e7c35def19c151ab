"""ATen → ours: products, convolution, normalisation, attention, losses."""

from __future__ import annotations

import math
from functools import partial
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


# ---- convolution -----------------------------------------------------------------------------

CONV = "stride padding dilation groups transposed output_padding"


def _conv(b: Site, x: Sym, weight: Sym, bias: Sym | None, *_: Any, **otherwise: Any) -> Any:
    """All kinds of convolution; ``otherwise`` says what the call does not."""
    how = b.settings(CONV) | otherwise
    return b.shaped(b.conv(b.batched(x, weight.rank - 2), weight, bias, **how))


def _conv_named_padding(b: Site, x: Sym, weight: Sym, bias: Sym | None, *_: Any) -> Any:
    """padding="same" shares dilation · (kernel − 1) zeros out; the odd one goes behind."""
    spatial, padding, dilation = weight.rank - 2, b.given["padding"], b.given["dilation"]
    if padding == "valid":
        return _conv(b, x, weight, bias, padding=[0])
    b.need(padding == "same", f"convolution with padding={padding!r}")
    steps = list(dilation) * (spatial if len(dilation) == 1 else 1)
    total = [d * (k - 1) for d, k in zip(steps, weight.shape[2:], strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):
        lead = [0] * (x.rank - spatial)
        x = b.pad(x, low=[0] * x.rank, high=[*lead, *odd])
    return _conv(b, x, weight, bias, padding=[t // 2 for t in total])


# ---- normalisation ---------------------------------------------------------------------------


def _batch_norm(b: Site, x: Sym, w: Any, bias: Any, *_: Any) -> Any:
    """Evaluation, or batch statistics where there are no running ones to update."""
    mean, var, eps = b.given.get("running_mean"), b.given.get("running_var"), b.given["eps"]
    if b.given.get("training"):
        b.need(mean is None and var is None, "batch norm in training mode")
        return b.batch_norm_train(x, w, bias, eps=eps)[0]
    b.need(mean is not None and var is not None, "batch norm without running statistics")
    return b.batch_norm(x, mean, var, w, bias, eps=eps)


def _batch_norm_functional(
    b: Site, x: Sym, w: Any, bias: Any, mean: Sym, var: Sym, training: bool, *_: Any
) -> Any:
    """Training that returns the running statistics instead of writing them."""
    if not training:
        return _batch_norm(b, x, w, bias), None, None, mean, var
    made = b.batch_norm_train(x, w, bias, mean, var, **b.settings("momentum eps"))
    y, *new, mean, rstd = made
    return y, *(_as_wanted(b, i + 1, s) for i, s in enumerate((mean, rstd))), *new


def _as_wanted(b: Site, index: int, x: Sym) -> Sym:
    """A statistic in the type that torch keeps it in."""
    want = b.want[index]
    return x if want is None else b.to(x, want.dtype)


def _instance_norm(b: Site, x: Sym, w: Any, bias: Any, mean: Any, var: Any, *_: Any) -> Any:
    if not b.given["use_input_stats"]:
        return _batch_norm(b, x, w, bias)
    b.need(mean is None and var is None, "instance norm that updates running statistics")
    return b.instance_norm(x, w, bias, eps=b.given["eps"])


def _norm(op: str) -> Entry:
    """layer_norm, rms_norm and group_norm. Where the call has further results they are the mean,
    but for rms_norm, and 1/√(var + eps): autograd keeps them for the way back."""

    def entry(b: Site, x: Sym, *_: Any) -> Any:
        eps = _rms_eps(x, b.given["eps"])
        how = b.settings("num_groups:groups group:groups")
        if "normalized_shape" in b.given:
            how = {"dims": len(b.given["normalized_shape"])}
        params = [b.given[name] for name in ("weight", "bias") if name in b.given]
        y = b.one(op, x, *params, eps=eps, **how)
        last = len(b.want) - 1
        kept = b.want[last]
        if not last:
            return y
        if not b.used - {0} or kept is None:
            return y, *[None] * last
        found = statistics(b, op, x, eps, how, kept.shape)[-last:]
        return y, *(_as_wanted(b, i + 1, s) for i, s in enumerate(found))

    return entry


def _rms_eps(x: Sym, eps: float | None) -> float:
    """Without eps torch adds the spacing of the type it computes in."""
    wide = torch.float32 if x.dtype.is_low else x.dtype.torch
    return torch.finfo(wide or torch.float32).eps if eps is None else eps


def _only_first(entry: Entry, results: int = 3) -> Entry:
    """For calls that also return statistics or indices, which we leave out."""
    return lambda b, *args: (entry(b, *args), *[None] * (results - 1))


# ---- attention -----------------------------------------------------------------------------------


def _attention(b: Site, q: Sym, k: Sym, v: Sym, *_: Any) -> Any:
    """Any rank is brought to [batch, heads, length, features] and back."""
    b.need(b.given["dropout_p"] == 0, "attention with dropout")
    b.need(q.rank >= 2, "attention on vectors")
    mask = b.given.get("attn_mask", b.given.get("attn_bias"))
    lead = b.out.shape[:-2]
    inner = lead[-1:] or (1,)
    batch = (math.prod(lead[:-1]),)

    def four(t: Sym, heads: tuple[int, ...]) -> Sym:
        full = b.stretched(t, (*lead[:-1], *(heads if lead else ()), *t.shape[-2:]))
        return b.shaped(full, (*batch, *heads, *t.shape[-2:]))

    kv = k.shape[-3:-2] if b.given.get("enable_gqa") and lead else inner
    if mask is not None:
        mask = _four_mask(b, mask, len(lead), batch + inner)
    how = b.settings("is_causal:causal scale")
    return b.shaped(b.attention(four(q, inner), four(k, kv), four(v, kv), mask, **how))


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


def _loss(op: str) -> Entry:
    return lambda b, x, target, weight, *_: b.call(op, x, target, weight, **b.loss_settings())


def _softmax(op: str) -> Entry:
    return lambda b, x, dim, ignored: b.call(op, b.wanted(x), axis=axis_of(dim, x.rank))


_TRANSPOSED = "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
_PRODUCTS = "matmul.default mm.default bmm.default mv.default dot.default vdot.default"
# other attentions, with how many results they have
_ATTENTIONS = {"efficient": 4, "cudnn": 9, "flash": 9}

TABLE: dict[str, Entry] = {
    _PRODUCTS: lambda b, x, y: b.matmul(x, y),
    "addmm.default baddbmm.default addmv.default": _added_product,
    "outer.default": lambda b, x, y: b.mul(b.shaped(x, (*x.shape, 1)), y),
    "linear.default": lambda b, x, weight, bias: b.linear(x, weight, bias),
    "conv1d.default conv2d.default conv3d.default convolution.default": _conv,
    "conv1d.padding conv2d.padding conv3d.padding": _conv_named_padding,
    _TRANSPOSED: partial(_conv, transposed=True),
    "batch_norm.default": _batch_norm,
    "native_batch_norm.default _native_batch_norm_legit_no_training.default": _only_first(
        _batch_norm
    ),
    "_native_batch_norm_legit.no_stats": _only_first(_batch_norm),
    "_native_batch_norm_legit_functional.default": _batch_norm_functional,
    "layer_norm.default native_layer_norm.default": _norm("layer_norm"),
    "rms_norm.default _fused_rms_norm.default": _norm("rms_norm"),
    "group_norm.default native_group_norm.default": _norm("group_norm"),
    "instance_norm.default": _instance_norm,
    "softmax.int _softmax.default": _softmax("softmax"),
    "log_softmax.int _log_softmax.default": _softmax("log_softmax"),
    "scaled_dot_product_attention.default": _attention,
    **{
        f"_scaled_dot_product_{kind}_attention.default": _only_first(_attention, results)
        for kind, results in _ATTENTIONS.items()
    },
    "_scaled_dot_product_flash_attention_for_cpu.default": _only_first(_attention, 2),
    "cross_entropy_loss.default": _loss("cross_entropy"),
    "nll_loss.default nll_loss_nd.default nll_loss2d.default": _loss("nll_loss"),
    "nll_loss_forward.default nll_loss2d_forward.default": _only_first(_loss("nll_loss"), 2),
}
