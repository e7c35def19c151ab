"""ATen → ours: the backward calls that autograd writes, as our gradients.

The backward call of an activation, a pool, a convolution or a loss goes through the gradient rule
of our operator: the forward operator is emitted for it, and its result is not read. A norm's
backward call has the statistics of the forward call but not its eps; where the graph has both
calls, it becomes our gradient operator, which makes all its results in one pass.
"""

from typing import Any

from deuteron.frontends.aten_site import SETTINGS, Entry, Number, Site, axis_of
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.cross_entropy import class_axis
from deuteron.ops.embedding import by_frequency
from deuteron.ops.emit import Grads, Sym
from deuteron.ops.norm import NORMS, gradients
from deuteron.ops.opdef import Vjp

# ---- by the rule of the operator -----------------------------------------------------------------


def through(b: Site, op: str, grad: Sym, *ins: Any, needs: Any = (), **attrs: Any) -> Grads:
    """The gradients of ``op`` for its inputs, by its own rule."""
    made = b.call(op, *ins, **attrs)
    outs = made if isinstance(made, tuple) else (made,)
    node = b.build.producer[outs[0].name]
    rule = table.get(op).vjp
    assert rule is not None
    grads = (b.to(grad, outs[0].dtype), *[None] * (len(outs) - 1))
    wanted = tuple(needs) or (True,) * len(ins)
    wanted += (False,) * (len(table.get(op).inputs) - len(wanted))
    found = rule(b, Vjp(tuple(ins), outs, grads, node.attrs, wanted))
    return list(found)


def _of_input(op: str, names: str) -> Entry:
    """``X_backward(grad, x, settings…)``"""
    return lambda b, grad, x, *_: through(b, op, grad, x, **b.settings(names))[0]


def _of_result(op: str) -> Entry:
    """``X_backward(grad, y, …)``: the rule needs the result alone."""

    def entry(b: Site, grad: Sym, y: Sym, *_: Any) -> Any:
        rule = table.get(op).vjp
        assert rule is not None
        attrs = {"axis": axis_of(b.given["dim"], y.rank)} if "dim" in b.given else {}
        found = rule(b, Vjp((y,), (y,), (grad,), attrs, (True,)))[0]
        assert found is not None
        return b.wanted(found)

    return entry


def _threshold(b: Site, grad: Sym, x: Sym, threshold: Number) -> Any:
    """Zero where x is at most the threshold; a nan lets the gradient through, as in torch. For a
    threshold of 0 it is the gradient of relu, whose result x is."""
    if threshold == 0:
        return _of_result("relu")(b, grad, x)
    return b.where(b.le(*b.pair(x, threshold)), b.literal(0, grad.dtype), grad)


def _leaky_relu(b: Site, grad: Sym, x: Sym, slope: float, is_result: bool) -> Any:
    b.need(not is_result or slope > 0, "the gradient of leaky_relu from its result")
    return through(b, "leaky_relu", grad, x, negative_slope=slope)[0]


def _prelu(b: Site, grad: Sym, x: Sym, weight: Sym) -> Any:
    """The gradient of the weight has the shape of x; torch adds it up by a call of its own."""
    above, zero = b.gt(*b.pair(x, 0)), b.literal(0, grad.dtype)
    return b.where(above, grad, b.mul(grad, weight)), b.where(above, zero, b.mul(grad, x))


def _elu(b: Site, grad: Sym, alpha: Number, *_: Any) -> Any:
    scaled = (b.given["scale"], b.given["input_scale"]) != (1, 1)
    b.need(not scaled and not b.given["is_result"], "elu with scales, or by its result")
    return through(b, "elu", grad, b.given["self_or_result"], alpha=float(alpha))[0]


def _dropout(b: Site, grad: Sym, mask: Sym, scale: float) -> Any:
    return b.mul(*b.pair(b.mul(grad, b.to(mask, grad.dtype)), scale))


# ---- products, pools, indices --------------------------------------------------------------------


def _convolution(b: Site, grad: Sym, x: Sym, weight: Sym, *_: Any) -> Any:
    b.need(x.rank == weight.rank, "the gradient of a convolution without a batch")
    of_x, of_weight, of_bias = b.given["output_mask"]
    how = b.settings("stride padding dilation groups transposed output_padding")
    needs = (bool(of_x), bool(of_weight))
    dx, dw = through(b, "conv", grad, x, weight, needs=needs, **how)[:2]
    if not of_bias:
        return dx, dw, None
    total = b.sum(b.upcast(grad), axes=(0, *range(2, grad.rank)), keepdim=False)
    return dx, dw, b.to(total, grad.dtype)


def _pool(op: str, spatial: int) -> Entry:
    """The indices of the maxima are found again, which is cheaper than keeping them."""

    def entry(b: Site, grad: Sym, x: Sym, *_: Any) -> Any:
        b.need(x.rank == spatial + 2, "the gradient of a pool without a batch")
        how = {} if op.startswith("adaptive") else b.window()
        of = {"x": x} if op == "max_pool" else {"shape": x.shape}
        return b.call(f"{op}_grad", grad, **of, **how)

    return entry


def _embedding(b: Site, grad: Sym, index: Sym, rows: int, padding: int, scaled: bool) -> Any:
    dtype = grad.dtype
    if scaled:
        grad = by_frequency(b, grad, index, rows)
    return b.to(b.embedding_grad(grad, index, rows=rows, padding_idx=max(padding, -1)), dtype)


def _slice(b: Site, grad: Sym, shape: Any, dim: int, *bounds: int) -> Any:
    """The gradient of a slice is the gradient with zeros around it."""
    axis = axis_of(dim, len(shape))
    low, high, step = slice(*bounds).indices(shape[axis])
    b.need(step == 1, "the gradient of every second element or fewer")
    before, behind = ([n if i == axis else 0 for i in range(grad.rank)] for n in (low, 0))
    behind[axis] = shape[axis] - max(low, high)
    return b.pad(grad, low=before, high=behind, mode="constant", value=0.0)


def _select(b: Site, grad: Sym, shape: Any, dim: int, index: int) -> Any:
    axis = axis_of(dim, len(shape))
    at = index % shape[axis]
    row = b.shaped(grad, [1 if i == axis else n for i, n in enumerate(shape)])
    return _slice(b, row, shape, axis, at, at + 1, 1)


def _squared_error(b: Site, grad: Sym, x: Sym, y: Sym, reduction: int) -> Any:
    """2 · (x − y), divided by the number of elements where the loss is a mean (1)."""
    each = b.mul(b.upcast(b.to(grad, x.dtype)), b.sub(b.upcast(x), b.upcast(y)))
    return b.wanted(b.mul(*b.pair(each, 2.0 / (x.type.numel if reduction == 1 else 1))))


def _bent(scaled: bool) -> Entry:
    """The difference, clamped to ±``bend``, and for smooth L1 divided by ``bend``."""

    def entry(b: Site, grad: Sym, x: Sym, y: Sym, reduction: int, bend: float) -> Any:
        b.need(bend > 0, "a loss without a bend")
        slope = b.clamp(b.sub(b.upcast(x), b.upcast(y)), min=-bend, max=bend)
        factor = (1 / bend if scaled else 1.0) / (x.type.numel if reduction == 1 else 1)
        return b.wanted(b.mul(b.upcast(b.to(grad, x.dtype)), b.mul(*b.pair(slope, factor))))

    return entry


def _nll(b: Site, grad: Sym, x: Sym, target: Sym, weight: Any, *_: Any) -> Any:
    needs, how = (True, False, False), b.loss_settings()
    found = through(b, "nll_loss", grad, x, target, weight, needs=needs, **how)[0]
    assert found is not None
    b.losses[found.name] = x.name, grad, target, weight, how
    return found


def logits_of(b: Site, x: Sym) -> Sym | None:
    """The logits, if x are their log-probabilities along the class axis of a loss, perhaps widened
    after softmax, as autocast does; else None."""
    low = _before_cast(b, x)
    made = b.build.producer.get(low.name)
    if made is None or made.op != "log_softmax" or made.attrs["axis"] != class_axis(x.shape):
        return None
    if low.dtype.bits > x.dtype.bits:
        return None
    return b.to(b.sym(made.uses[0]), x.dtype)


def _before_cast(b: Site, x: Sym) -> Sym:
    made = b.build.producer.get(x.name)
    return x if made is None or made.op != "cast" else b.sym(made.uses[0])


def _log_softmax(b: Site, grad: Sym, y: Sym, *rest: Any) -> Any:
    """Together with the gradient of the loss before it, this is that of cross-entropy, in one
    pass."""
    known = b.losses.get(grad.name) or b.losses.get(_before_cast(b, grad).name)
    seen = y if known is None else b.sym(known[0])
    logits = logits_of(b, seen)
    if known is None or logits is None or y.name not in (seen.name, _before_cast(b, seen).name):
        return _of_result("log_softmax")(b, grad, y, *rest)
    _, outer, target, weight, how = known
    needs = (True, False, False)
    found = through(b, "cross_entropy", outer, logits, target, weight, needs=needs, **how)[0]
    assert found is not None
    return b.wanted(found)


# ---- norms ---------------------------------------------------------------------------------------

_NORMS = {norm.name: norm for norm in NORMS}


def statistics(b: Site, op: str, x: Sym, eps: float, attrs: Any, shape: Any) -> tuple[Sym, Sym]:
    """mean and 1/√(var + eps) of the norm ``op``, as autograd keeps them, in ``shape``."""
    shape_seen, axes, _ = _NORMS[op].grouping(x.shape, attrs)
    work = b.shaped(b.upcast(x), shape_seen)
    mean = b.mean(work, axes=axes, keepdim=True)
    spread = b.var(work, axes=axes, correction=0, keepdim=True)
    if not _NORMS[op].centred:
        spread = b.mean(b.square(work), axes=axes, keepdim=True)
    rstd = b.rsqrt(b.add(*b.pair(spread, eps)))
    return b.shaped(mean, shape), b.shaped(rstd, shape)


def _norm(op: str) -> Entry:
    """dx, dweight and dbias (rms_norm has no bias), as far as the mask asks for them. Where only
    the weight is float32, dx of group_norm is float32 to torch's tracer, but not to its kernel."""
    row = _NORMS[op]

    def entry(b: Site, grad: Sym, x: Sym, *_: Any) -> Any:
        mask, weight, bias = b.given["output_mask"], b.given["weight"], b.given.get("bias")
        stats = (b.given.get("mean"), b.given["rstd"])
        attrs = b.settings("group:groups") or {"dims": len(b.given["normalized_shape"])}
        of_weight = weight.type if weight is not None and mask[1] else None
        of_bias = None if bias is None else bias.type
        if op == "group_norm":  # its backward call does not mention the bias
            kind = x.dtype if weight is None else weight.dtype
            of_bias = TensorType.of((b.given["C"],), kind)
        of_bias = of_bias if row.centred and mask[2] else None
        eps = b.norms.get((x.name, b.given["rstd"].name))
        if eps is None:
            groups, wanted = row.grouping(x.shape, attrs), (bool(mask[0]), of_weight, of_bias)
            how: Any = {"centred": row.centred, "stats": stats}
            dx, *found = gradients(b, x, grad, weight, groups, 0.0, wanted, **how)
            return (dx if dx is None else b.wanted(dx), *found)[: len(mask)]
        how = {**attrs, "eps": eps}
        if row.centred:
            same = of_bias is not None and of_bias.dtype == x.dtype
            how["bias"] = "none" if of_bias is None else "same" if same else "f32"
        made = b.call(f"{op}_grad", x, grad, weight, None, **how)
        results = iter(made if isinstance(made, tuple) else (made,))
        dx = b.wanted(next(results))
        dw = next(results) if weight is not None else None
        return (dx, dw if of_weight is not None else None, next(results, None))[: len(mask)]

    return entry


def _batch_norm(b: Site, grad: Sym, x: Sym, weight: Any, *_: Any) -> Any:
    mask = b.given["output_mask"]
    mean, rstd = b.given["save_mean"], b.given["save_invstd"]
    if not b.given["train"]:
        running, (of_x, *of_params) = (b.given["running_mean"], b.given["running_var"]), mask
        needs = (of_x, False, False, *of_params)
        ins = (x, *running, weight, weight)  # the bias has the weight's type
        found = through(b, "batch_norm", grad, *ins, needs=needs, eps=b.given["eps"])
        return found[0], *found[3:]
    b.need(mean is not None and rstd is not None, "the gradient of batch norm without statistics")
    dx, dw, db, _ = b.batch_norm_act_grad(grad, x, mean, rstd, weight, None)
    like = x.dtype if weight is None else weight.dtype
    return dx, b.to(dw, like), b.to(db, like)


_OF_INPUT = dict.fromkeys("silu mish hardswish hardsigmoid log_sigmoid".split(), "")
_OF_INPUT |= {op: SETTINGS[op] for op in "gelu hardtanh softplus softshrink hardshrink glu".split()}
TABLE: dict[str, Entry] = {
    **{f"{op}_backward.default": _of_input(op, names) for op, names in _OF_INPUT.items()},
    "threshold_backward.default": _threshold,
    "leaky_relu_backward.default": _leaky_relu,
    "elu_backward.default": _elu,
    "_prelu_kernel_backward.default": _prelu,
    **{f"{op}_backward.default": _of_result(op) for op in ("sigmoid", "tanh")},
    "_softmax_backward_data.default": _of_result("softmax"),
    "_log_softmax_backward_data.default": _log_softmax,
    "native_dropout_backward.default": _dropout,
    "convolution_backward.default": _convolution,
    **{f"max_pool{n}d_with_indices_backward.default": _pool("max_pool", n) for n in (2, 3)},
    **{f"avg_pool{n}d_backward.default": _pool("avg_pool", n) for n in (2, 3)},
    **{f"_adaptive_avg_pool{n}d_backward.default": _pool("adaptive_avg_pool", n) for n in (2, 3)},
    "embedding_dense_backward.default": _embedding,
    "slice_backward.default": _slice,
    "select_backward.default": _select,
    "mse_loss_backward.default": _squared_error,
    "smooth_l1_loss_backward.default": _bent(scaled=True),
    "huber_loss_backward.default": _bent(scaled=False),
    "nll_loss_backward.default nll_loss2d_backward.default": _nll,
    "native_layer_norm_backward.default": _norm("layer_norm"),
    "_fused_rms_norm_backward.default": _norm("rms_norm"),
    "native_group_norm_backward.default": _norm("group_norm"),
    "native_batch_norm_backward.default": _batch_norm,
}
