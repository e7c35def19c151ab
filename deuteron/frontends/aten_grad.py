"""ATen → ours: the backward calls that autograd writes, as our gradients.

An activation, a pool, a convolution or a loss goes through the gradient rule of the operator it
belongs to: the forward operator is emitted, and nobody reads it. A norm's backward call has the
statistics of the forward one but not its eps; where the graph shows that, it becomes our gradient
operator, which makes all its results in one pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deuteron.frontends.aten_site import Entry, Number, Site, axis_of
from deuteron.ir.types import TensorType
from deuteron.ops import table
from deuteron.ops.embedding import by_frequency
from deuteron.ops.emit import Sym
from deuteron.ops.norm import NORMS, Wanted, gradients
from deuteron.ops.opdef import Vjp

# ---- by the rule of the operator -----------------------------------------------------------------


def through(
    b: Site, op: str, grad: Sym, *ins: Sym | None, needs: Sequence[bool] = (), **attrs: Any
) -> list[Sym | None]:
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


def _of_input(op: str, *names: str) -> Entry:
    """``X_backward(grad, x, settings…)``"""

    def entry(b: Site, grad: Sym, x: Sym, *values: Any) -> Any:
        return through(b, op, grad, x, **dict(zip(names, values, strict=True)))[0]

    return entry


def _of_result(op: str) -> Entry:
    """``X_backward(grad, y)``: the rule looks at the result alone."""

    def entry(b: Site, grad: Sym, y: Sym) -> Any:
        rule = table.get(op).vjp
        assert rule is not None
        return rule(b, Vjp((y,), (y,), (grad,), {}, (True,)))[0]

    return entry


def _of_softmax(op: str) -> Entry:
    def entry(b: Site, grad: Sym, y: Sym, dim: int, ignored: Any) -> Any:
        rule = table.get(op).vjp
        assert rule is not None
        attrs = {"axis": axis_of(dim, y.rank)}
        return b.wanted(rule(b, Vjp((y,), (y,), (grad,), attrs, (True,)))[0])  # type: ignore[arg-type]

    return entry


def _threshold(b: Site, grad: Sym, x: Sym, threshold: Number) -> Any:
    """Nothing where x is at most the threshold; a nan lets the gradient through, as in torch."""
    return b.where(b.le(*b.pair(x, threshold)), b.literal(0, grad.dtype), grad)


def _leaky_relu(b: Site, grad: Sym, x: Sym, slope: float, is_result: bool) -> Any:
    b.need(not is_result or slope > 0, "the gradient of leaky_relu from its result")
    return through(b, "leaky_relu", grad, x, negative_slope=slope)[0]


def _elu(
    b: Site, grad: Sym, alpha: Number, scale: Number, input_scale: Number, is_result: bool, x: Sym
) -> Any:
    b.need(scale == 1 and input_scale == 1 and not is_result, "elu with scales, or by its result")
    return through(b, "elu", grad, x, alpha=float(alpha))[0]


def _dropout(b: Site, grad: Sym, mask: Sym, scale: float) -> Any:
    return b.mul(*b.pair(b.mul(grad, b.to(mask, grad.dtype)), scale))


# ---- products, pools, indices --------------------------------------------------------------------


def _convolution(
    b: Site,
    grad: Sym,
    x: Sym,
    weight: Sym,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    b.need(x.rank == weight.rank, "the gradient of a convolution without a batch")
    needs = (bool(mask[0]), bool(mask[1]))
    dx, dw = through(
        b,
        "conv",
        grad,
        x,
        weight,
        needs=needs,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        transposed=transposed,
        output_padding=output_padding,
    )[:2]
    db = None
    if mask[2]:
        db = b.to(b.sum(b.upcast(grad), axes=(0, *range(2, grad.rank)), keepdim=False), grad.dtype)
    return dx, dw, db


def _max_pool(
    b: Site,
    grad: Sym,
    x: Sym,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """The indices are found again: they are cheaper to compute than to keep."""
    b.need(x.rank == len(kernel) + 2, "the gradient of a pool without a batch")
    return b.max_pool_grad(
        grad,
        x,
        kernel=kernel,
        stride=stride or None,
        padding=padding,
        dilation=dilation,
        ceil_mode=ceil_mode,
    )


def _avg_pool(
    b: Site,
    grad: Sym,
    x: Sym,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Any:
    b.need(x.rank == len(kernel) + 2, "the gradient of a pool without a batch")
    return b.avg_pool_grad(
        grad,
        shape=x.shape,
        kernel=kernel,
        stride=stride or None,
        padding=padding,
        ceil_mode=ceil_mode,
        count_include_pad=count_include_pad,
        divisor=divisor,
    )


def _adaptive_avg_pool(b: Site, grad: Sym, x: Sym) -> Any:
    b.need(x.rank >= 4, "the gradient of a pool without a batch")
    return b.adaptive_avg_pool_grad(grad, shape=x.shape)


def _embedding(b: Site, grad: Sym, index: Sym, rows: int, padding: int, scaled: bool) -> Any:
    dtype = grad.dtype
    if scaled:
        grad = by_frequency(b, grad, index, rows)
    return b.to(b.embedding_grad(grad, index, rows=rows, padding_idx=max(padding, -1)), dtype)


_REDUCTION = ("none", "mean", "sum")


def _nll(
    b: Site, grad: Sym, x: Sym, target: Sym, weight: Any, reduction: int, ignore: int, total: Any
) -> Any:
    how = {"ignore_index": ignore, "reduction": _REDUCTION[reduction]}
    return through(b, "nll_loss", grad, x, target, weight, needs=(True, False, False), **how)[0]


# ---- norms ---------------------------------------------------------------------------------------

_NORMS = {norm.name: norm for norm in NORMS}


def statistics(
    b: Site, op: str, x: Sym, eps: float, attrs: Mapping[str, Any], shape: Sequence[int]
) -> tuple[Sym, Sym]:
    """mean and 1/√(var + eps) of the norm ``op``, as autograd keeps them, in ``shape``. Nothing
    is emitted that :func:`_eps_behind` would not find again."""
    shape_seen, axes, _ = _NORMS[op].grouping(x.shape, attrs)
    work = b.shaped(b.upcast(x), shape_seen)
    mean = b.mean(work, axes=axes, keepdim=True)
    spread = b.var(work, axes=axes, correction=0, keepdim=True)
    if not _NORMS[op].centred:
        spread = b.mean(b.square(work), axes=axes, keepdim=True)
    rstd = b.rsqrt(b.add(*b.pair(spread, eps)))
    return b.shaped(mean, shape), b.shaped(rstd, shape)


def _eps_behind(b: Site, rstd: Sym, x: Sym) -> float | None:
    """The eps of the forward norm, if ``rstd`` is what :func:`statistics` made of ``x``."""

    def before(value: str | None, *ops: str) -> str | None:
        node = b.build.producer.get(value or "")
        while node is not None and node.op in ("cast", "reshape"):
            value = node.inputs[0]
            node = b.build.producer.get(value or "")
        if not ops:
            return value
        return node.outputs[0] if node is not None and node.op in ops else None

    root = before(rstd.name, "rsqrt")
    total = before(b.build.producer[root].inputs[0], "add") if root else None
    if total is None:
        return None
    spread, eps = b.build.producer[total].inputs[:2]
    constant = b.build.constants.get(eps or "")
    squares = before(spread, "var", "mean")
    if constant is None or not constant.is_scalar or squares is None:
        return None
    source = before(b.build.producer[squares].inputs[0])
    inner = b.build.producer.get(source or "")
    if inner is not None and inner.op == "square":
        source = before(inner.inputs[0])
    return float(constant.data.item()) if source == before(x.name) else None


def _norm(
    b: Site,
    op: str,
    grad: Sym,
    x: Sym,
    stats: tuple[Sym | None, Sym],
    weight: Sym | None,
    bias: TensorType | None,
    mask: Sequence[bool],
    attrs: Mapping[str, Any],
) -> tuple[Sym | None, Sym | None, Sym | None]:
    """dx, dweight and dbias, as far as the mask asks for them."""
    norm = _NORMS[op]
    eps = _eps_behind(b, stats[1], x)
    of_weight = weight.type if weight is not None and mask[1] else None
    of_bias = bias if norm.centred and mask[2] else None
    if eps is None:
        grouping = norm.grouping(x.shape, attrs)
        wanted = Wanted(bool(mask[0]), of_weight, of_bias)
        dx, dw, db = gradients(
            b, x, grad, weight, grouping, 0.0, wanted, centred=norm.centred, stats=stats
        )
        return dx, dw, db
    kind = "none" if of_bias is None else "same" if of_bias.dtype == x.dtype else "f32"
    how = {**attrs, "eps": eps} | ({"bias": kind} if norm.centred else {})
    made = b.call(f"{op}_grad", x, grad, weight, None, **how)
    results = iter(made if isinstance(made, tuple) else (made,))
    dx = next(results)
    dw = next(results) if weight is not None else None
    return dx, dw if of_weight is not None else None, next(results, None)


def _layer_norm(
    b: Site,
    grad: Sym,
    x: Sym,
    shape: Sequence[int],
    mean: Sym,
    rstd: Sym,
    weight: Any,
    bias: Any,
    mask: Sequence[bool],
) -> Any:
    of_bias = None if bias is None else bias.type
    attrs = {"dims": len(shape)}
    return _norm(b, "layer_norm", grad, x, (mean, rstd), weight, of_bias, mask, attrs)


def _rms_norm(
    b: Site, grad: Sym, x: Sym, shape: Sequence[int], rstd: Sym, weight: Any, mask: Sequence[bool]
) -> Any:
    attrs = {"dims": len(shape)}
    return _norm(b, "rms_norm", grad, x, (None, rstd), weight, None, (*mask, False), attrs)[:2]


def _group_norm(
    b: Site,
    grad: Sym,
    x: Sym,
    mean: Sym,
    rstd: Sym,
    weight: Any,
    n: int,
    c: int,
    positions: int,
    groups: int,
    mask: Sequence[bool],
) -> Any:
    of_bias = TensorType.of((c,), x.dtype if weight is None else weight.dtype)
    attrs = {"groups": groups}
    return _norm(b, "group_norm", grad, x, (mean, rstd), weight, of_bias, mask, attrs)


def _batch_norm(
    b: Site,
    grad: Sym,
    x: Sym,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    mean: Any,
    rstd: Any,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> Any:
    b.need(train, "the gradient of batch norm in evaluation")
    b.need(mean is not None and rstd is not None, "the gradient of batch norm without statistics")
    dx, dw, db, _ = b.batch_norm_act_grad(grad, x, mean, rstd, weight, None)
    like = x.dtype if weight is None else weight.dtype
    return dx, b.to(dw, like), b.to(db, like)


TABLE: dict[str, Entry] = {
    "gelu_backward.default": _of_input("gelu", "approximate"),
    "silu_backward.default": _of_input("silu"),
    "mish_backward.default": _of_input("mish"),
    "hardswish_backward.default": _of_input("hardswish"),
    "hardsigmoid_backward.default": _of_input("hardsigmoid"),
    "hardtanh_backward.default": _of_input("hardtanh", "min", "max"),
    "softplus_backward.default": _of_input("softplus", "beta", "threshold"),
    "softshrink_backward.default": _of_input("softshrink", "lambd"),
    "hardshrink_backward.default": _of_input("hardshrink", "lambd"),
    "glu_backward.default": _of_input("glu", "axis"),
    "log_sigmoid_backward.default": lambda b, grad, x, buffer: through(b, "log_sigmoid", grad, x)[
        0
    ],
    "threshold_backward.default": _threshold,
    "leaky_relu_backward.default": _leaky_relu,
    "elu_backward.default": _elu,
    "sigmoid_backward.default": _of_result("sigmoid"),
    "tanh_backward.default": _of_result("tanh"),
    "_softmax_backward_data.default": _of_softmax("softmax"),
    "_log_softmax_backward_data.default": _of_softmax("log_softmax"),
    "native_dropout_backward.default": _dropout,
    "convolution_backward.default": _convolution,
    "max_pool2d_with_indices_backward.default": _max_pool,
    "max_pool3d_with_indices_backward.default": _max_pool,
    "avg_pool2d_backward.default": _avg_pool,
    "avg_pool3d_backward.default": _avg_pool,
    "_adaptive_avg_pool2d_backward.default": _adaptive_avg_pool,
    "_adaptive_avg_pool3d_backward.default": _adaptive_avg_pool,
    "embedding_dense_backward.default": _embedding,
    "nll_loss_backward.default": _nll,
    "nll_loss2d_backward.default": _nll,
    "native_layer_norm_backward.default": _layer_norm,
    "_fused_rms_norm_backward.default": _rms_norm,
    "native_group_norm_backward.default": _group_norm,
    "native_batch_norm_backward.default": _batch_norm,
}
