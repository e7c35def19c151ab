"""ATen → ours: products, convolution, normalisation, attention, recurrent layers, losses,
pooling, resampling."""

import math
from functools import partial
from typing import Any

import torch

from deuteron.frontends.aten_grad import logits_of, statistics
from deuteron.frontends.aten_site import Entry, Number, Site, axis_of
from deuteron.ops.cross_entropy import divisor
from deuteron.ops.emit import Sym
from deuteron.ops.matmul import summed_type
from deuteron.ops.resample import BLENDS, EDGES, MODES

# ---- products ------------------------------------------------------------------------------------


def _product(b: Site, x: Sym, y: Sym) -> Any:
    """In torch, sums of whole numbers have the type of the operands, and wrap around."""
    return b.to(b.matmul(x, y), x.dtype)


def _linear(b: Site, x: Sym, weight: Sym, bias: Sym | None) -> Any:
    if bias is not None:
        bias = b.to(bias, summed_type(x.dtype))
    return b.to(b.linear(x, weight, bias), x.dtype)


def _added_product(b: Site, extra: Sym, x: Sym, y: Sym, beta: Number, alpha: Number) -> Any:
    """beta · extra + alpha · x @ y; with beta = 0 ``extra`` is ignored, even if it is nan."""
    product = b.scaled(_product(b, x, y), alpha)
    return product if beta == 0 else b.add(b.scaled(extra, beta), product)


def _scaled_product(
    b: Site, x: Sym, y: Sym, left: Sym, right: Sym, bias: Sym | None, over: Any, *_: Any
) -> Any:
    """Factors of 8 bits with one scale each, or one for each row on the left and column on the
    right."""
    b.need(over is None, "a scaled product whose result is scaled as well")
    for scale, many in ((left, (x.shape[0], 1)), (right, (1, y.shape[1]))):
        fits = scale.shape in ((), (1,), (1, 1), many) and scale.dtype.short == "f32"
        b.need(fits, "scales for blocks of a product")
    found = b.mul(b.mul(b.matmul(x, y), left), right)
    return b.to(found if bias is None else b.add(found, bias), b.out.dtype)


# ---- convolution -----------------------------------------------------------------------------

CONV = "stride padding dilation groups transposed output_padding"


def _conv(b: Site, x: Sym, weight: Sym, bias: Sym | None, *_: Any, **otherwise: Any) -> Any:
    """All kinds of convolution; ``otherwise`` adds attributes to those of the call, or replaces
    them."""
    how = b.settings(CONV) | otherwise
    return b.shaped(b.conv(b.batched(x, weight.rank - 2), weight, bias, **how))


def _conv_named_padding(b: Site, x: Sym, weight: Sym, bias: Sym | None, *_: Any) -> Any:
    """padding="same" divides dilation · (kernel − 1) zeros between both ends; an odd one goes to
    the far end."""
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
    """Evaluation, or batch statistics where there are no running ones to update. Further results of
    the call, if it has any, are what autograd keeps for the backward pass."""
    mean, var, eps = b.given.get("running_mean"), b.given.get("running_var"), b.given["eps"]
    if b.given.get("training"):
        b.need(mean is None and var is None, "batch norm in training mode")
        y, _, _, *kept = b.batch_norm_train(x, w, bias, eps=eps)
        kept = [b.wanted(s, i) for i, s in enumerate(kept, 1) if i < len(b.want)]
    else:
        b.need(mean is not None and var is not None, "batch norm without running statistics")
        y = b.batch_norm(x, mean, var, w, bias, eps=eps)
        # there are no batch statistics: torch returns two empty tensors
        kept = [t and b.stretched(b.literal(0, t.dtype), t.shape) for t in b.want[1:3]]
    return (y, *kept) if kept else y


def _batch_norm_functional(
    b: Site, x: Sym, w: Any, bias: Any, mean: Sym, var: Sym, training: bool, *_: Any
) -> Any:
    """Training that returns the running statistics instead of writing them."""
    if not training:
        return *_batch_norm(b, x, w, bias), mean, var
    made = b.batch_norm_train(x, w, bias, mean, var, **b.settings("momentum eps"))
    y, *new, mean, rstd = made
    # running statistics of 16 bits are float32 to torch's tracer, whatever its kernels return
    return y, *(b.wanted(s, i) for i, s in enumerate((mean, rstd, *new), 1))


def _instance_norm(b: Site, x: Sym, w: Any, bias: Any, mean: Any, var: Any, *_: Any) -> Any:
    if not b.given["use_input_stats"]:
        return _batch_norm(b, x, w, bias)
    b.need(mean is None and var is None, "instance norm that updates running statistics")
    return b.instance_norm(x, w, bias, eps=b.given["eps"])


def _norm(op: str) -> Entry:
    """layer_norm, rms_norm and group_norm. Further results of the call, if it has any, are the mean
    (not for rms_norm) and 1/√(var + eps): autograd keeps them for the backward pass."""

    def entry(b: Site, x: Sym, *_: Any) -> Any:
        eps = b.given["eps"]
        if eps is None:  # torch adds the spacing of the type it computes in
            eps = torch.finfo(torch.float32 if x.dtype.is_low else x.dtype.torch).eps
        how = b.settings("num_groups:groups group:groups")
        how = how or {"dims": len(b.given["normalized_shape"])}
        params = [b.given[name] for name in ("weight", "bias") if name in b.given]
        y = b.one(op, x, *params, eps=eps, **how)
        last = len(b.want) - 1
        kept = b.want[last]
        if not b.used - {0} or kept is None:
            return y
        found = statistics(b, op, x, eps, how, kept.shape)[-last:]
        results = [b.wanted(s, i + 1) for i, s in enumerate(found)]
        b.norms[x.name, results[-1].name] = eps
        return y, *results

    return entry


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
        mask = _four_mask(b, mask, len(lead))
    how = b.settings("is_causal:causal scale")
    return b.shaped(b.attention(four(q, inner), four(k, kv), four(v, kv), mask, **how))


def _four_mask(b: Site, mask: Sym, lead: int) -> Sym:
    """The mask in a rank that broadcasts to [batch, heads, Sq, Sk]."""
    if mask.rank <= 4 and lead == 2:
        return mask
    kept = mask.shape[:-2]
    b.need(lead < 2 or all(n == 1 for n in kept), "a mask over several batch dimensions")
    lengths = mask.shape[-2:] if mask.rank >= 2 else (1, *mask.shape)
    heads = kept[-1:] if lead == 1 and kept else (1,)
    return b.shaped(mask, (1, *heads, *lengths))


# ---- recurrent layers ----------------------------------------------------------------------------


def _rnn(cell: str) -> Entry:
    """Sequences with the batch first are transposed, as torch does, too."""

    def entry(b: Site, x: Sym, state: Any, weights: Any, *_: Any) -> Any:
        given = b.given
        b.need(not (given["train"] and given["dropout"]), "a recurrent layer with dropout")
        how = {"cell": cell} | b.settings("num_layers:layers bidirectional")
        states = state if cell == "lstm" else [state]

        def turned(t: Sym) -> Sym:
            return b.one("permute", t, dims=(1, 0, 2)) if given["batch_first"] else t

        y, *last = b.rnn(turned(x), *states, *weights, **how)
        return turned(y), *last

    return entry


def _cell(cell: str) -> Entry:
    """One step of a recurrent layer, for modules that walk through a sequence by themselves."""

    def entry(b: Site, x: Sym, state: Any, *weights: Sym | None) -> Any:
        b.need(len({w is None for w in weights[2:]}) < 2, "a cell with one bias of two")
        given = [x, *(state if cell == "lstm" else [state])]
        b.need(x.rank == 2, "a cell over one row without a batch")
        sequence = [b.shaped(t, (1, *t.shape)) for t in given]
        known = [w for w in weights if w is not None]
        how = {"cell": cell, "layers": 1, "bidirectional": False}
        _, *last = b.rnn(*sequence, *known, **how)
        flat = tuple(b.shaped(t, t.shape[1:]) for t in last)
        return flat if cell == "lstm" else flat[0]

    return entry


# ---- losses --------------------------------------------------------------------------------------


def _loss(op: str) -> Entry:
    return lambda b, x, target, weight, *_: b.call(op, x, target, weight, **b.loss_settings())


def _nll_forward(b: Site, x: Sym, target: Sym, weight: Any, *_: Any) -> Any:
    """The loss, and what a mean divides by: the sum of weights, which our gradient computes
    again."""
    how, logits = b.loss_settings(), logits_of(b, x)
    given = ("nll_loss", x) if logits is None else ("cross_entropy", logits)
    loss = b.call(*given, target, weight, **how)
    if how["reduction"] == "none":
        return loss, b.literal(0, x.dtype)
    parts = divisor(b, x.type, target, weight, how["ignore_index"])
    return loss, b.to(parts, x.dtype) if isinstance(parts, Sym) else b.literal(parts, x.dtype)


def _softmax(op: str) -> Entry:
    return lambda b, x, dim, ignored: b.call(op, b.wanted(x), axis=axis_of(dim, x.rank))


def _safe_softmax(b: Site, x: Sym, dim: int, ignored: Any) -> Any:
    """Zeros where nothing is to be seen: softmax is undefined for a row that is all −∞."""
    x, axis = b.wanted(x), axis_of(dim, x.rank)
    hidden = b.eq(b.max(x, axes=(axis,), keepdim=True), b.literal(-math.inf, x.dtype))
    return b.where(hidden, b.literal(0, x.dtype), b.softmax(x, axis=axis))


# ---- pooling ---------------------------------------------------------------------------------


def _pool(op: str, spatial: int, adaptive: bool = False) -> Entry:
    """An adaptive pool takes its size from the result, for which torch has filled in open sizes."""

    def entry(b: Site, x: Sym, *_: Any) -> Any:
        how = {"size": b.out.shape[-spatial:]} if adaptive else b.window()
        made = b.call(op, b.batched(x, spatial), **how)
        return tuple(map(b.shaped, made)) if isinstance(made, tuple) else b.shaped(made)

    return entry


def _max_pool(op: str, spatial: int, adaptive: bool = False) -> Entry:
    """Two results; the second, the indices, is made only if something reads it."""
    plain, both = _pool(op, spatial, adaptive), _pool(f"{op}_with_indices", spatial, adaptive)
    return lambda b, *given: both(b, *given) if 1 in b.used else plain(b, *given)


# ---- resampling ------------------------------------------------------------------------------

# ATen's name → our mode
_UPSAMPLE = {name.format(n): mode for mode, (dims, _, name) in MODES.items() if name for n in dims}
_UPSAMPLE |= {f"_upsample_{mode}2d_aa": mode for mode in ("bilinear", "bicubic")}


def _upsample(name: str, mode: str, back: bool = False) -> Entry:
    def entry(b: Site, x: Sym, *_: Any) -> Any:
        # one argument with all factors, or one for each dimension
        each = [v for k, v in b.given.items() if k.startswith("scale")]
        scales = b.given.get("scale_factors", each)
        given = tuple(s for s in scales or () if s is not None)
        b.need(len(given) in (0, x.rank - 2), "a scale for some dimensions only")
        how: dict[str, Any] = {"mode": mode, "antialias": name.endswith("_aa")}
        how |= {"align_corners": bool(b.given.get("align_corners")), "scale": given or None}
        if back:
            return b.resize_grad(x, shape=b.out.shape, **how)
        return b.resize(x, size=b.out.shape[2:], **how)

    return entry


def _grid(b: Site, x: Sym, grid: Sym, mode: int, padding: int, corners: bool) -> Any:
    how = {"mode": BLENDS[mode], "padding_mode": EDGES[padding], "align_corners": corners}
    return b.grid_sample(x, grid, **how)


_DIMS = (1, 2, 3)
_TRANSPOSED = "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
_PRODUCTS = "matmul.default mm.default bmm.default mv.default dot.default vdot.default"
# Calls of several results, of which we give only the first, are listed with those of one result.
_BATCH_NORMS = """batch_norm.default native_batch_norm.default _native_batch_norm_legit.no_stats
    _native_batch_norm_legit_no_training.default"""
_ATTENTIONS = ("efficient", "cudnn", "flash")

TABLE: dict[str, Entry] = {
    _PRODUCTS: _product,
    "_int_mm.default": lambda b, x, y: b.matmul(x, y),
    "_scaled_mm.default": _scaled_product,
    "addmm.default baddbmm.default addmv.default": _added_product,
    "outer.default": lambda b, x, y: b.mul(b.shaped(x, (*x.shape, 1)), y),
    "linear.default": _linear,
    "conv1d.default conv2d.default conv3d.default convolution.default": _conv,
    "conv1d.padding conv2d.padding conv3d.padding": _conv_named_padding,
    _TRANSPOSED: partial(_conv, transposed=True),
    _BATCH_NORMS: _batch_norm,
    "_native_batch_norm_legit_functional.default": _batch_norm_functional,
    "layer_norm.default native_layer_norm.default": _norm("layer_norm"),
    "rms_norm.default _fused_rms_norm.default": _norm("rms_norm"),
    "group_norm.default native_group_norm.default": _norm("group_norm"),
    "instance_norm.default": _instance_norm,
    "softmax.int _softmax.default": _softmax("softmax"),
    "log_softmax.int _log_softmax.default": _softmax("log_softmax"),
    "_safe_softmax.default": _safe_softmax,
    "scaled_dot_product_attention.default": _attention,
    **{f"_scaled_dot_product_{kind}_attention.default": _attention for kind in _ATTENTIONS},
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
    **{f"{cell}.input": _rnn(cell) for cell in ("lstm", "gru")},
    **{f"rnn_{cell}.input": _rnn(cell) for cell in ("tanh", "relu")},
    **{f"{cell}_cell.default": _cell(cell) for cell in ("lstm", "gru")},
    "cross_entropy_loss.default": _loss("cross_entropy"),
    "nll_loss.default nll_loss_nd.default nll_loss2d.default": _loss("nll_loss"),
    "nll_loss_forward.default nll_loss2d_forward.default": _nll_forward,
    **{f"max_pool{n}d.default": _pool("max_pool", n) for n in _DIMS},
    **{f"max_pool{n}d_with_indices.default": _max_pool("max_pool", n) for n in _DIMS[1:]},
    **{f"avg_pool{n}d.default": _pool("avg_pool", n) for n in _DIMS},
    **{f"adaptive_avg_pool{n}d.default": _pool("adaptive_avg_pool", n, True) for n in _DIMS},
    **{f"_adaptive_avg_pool{n}d.default": _pool("adaptive_avg_pool", n, True) for n in _DIMS[1:]},
    **{f"adaptive_max_pool{n}d.default": _max_pool("adaptive_max_pool", n, True) for n in _DIMS},
    **{f"{name}.default {name}.vec": _upsample(name, mode) for name, mode in _UPSAMPLE.items()},
    **{f"{n}_backward.default": _upsample(n, mode, back=True) for n, mode in _UPSAMPLE.items()},
    "pixel_shuffle.default": lambda b, x, factor: b.pixel_shuffle(x, factor=factor),
    "pixel_unshuffle.default": lambda b, x, factor: b.pixel_unshuffle(x, factor=factor),
    "grid_sampler.default grid_sampler_2d.default grid_sampler_3d.default": _grid,
}
