"""ATen → ours: arithmetic, comparison, activations and reductions."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from deuteron.frontends.aten_site import SETTINGS, Entry, Number, Site, axis_of
from deuteron.ir.dtype import bool_
from deuteron.ops.emit import Sym
from deuteron.ops.reduce import vector_norm

# ---- the same by another name ----------------------------------------------------------------

# Calls of one tensor that are one operator of the same name.
_UNARY = """neg abs sign square exp exp2 expm1 log log2 log1p sqrt rsqrt reciprocal sin cos tan erf
    floor ceil round trunc isnan isinf logical_not relu relu6 sigmoid tanh silu mish hardswish
    hardsigmoid selu log_sigmoid"""

# Our operators of two operands, each a tensor or a number, and the calls that become them.
_BINARY = {
    "mul": "mul.Tensor mul.Scalar",
    "pow": "pow.Tensor_Tensor pow.Scalar",
    "remainder": "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor",
    "floor_div": "floor_divide.default floor_divide.Scalar",
    "maximum": "maximum.default max.other",
    "minimum": "minimum.default min.other",
    **{op: f"{op}.default" for op in "atan2 logical_and logical_or logical_xor".split()},
    **{op: f"{op}.Tensor {op}.Scalar" for op in "eq ne lt le gt ge".split()},
}


def _one(op: str, settings: str = "") -> Entry:
    return lambda b, x, *_: b.call(op, x, **b.settings(settings))


def _binary(op: str) -> Entry:
    return lambda b, x, y: b.call(op, *b.pair(x, y))


# ---- arithmetic that takes a few operators -----------------------------------------------------


def _sum(op: str, b: Site, x: Any, y: Any, alpha: Number) -> Any:
    return b.call(op, *b.pair(x, _times(b, y, alpha)))


def _times(b: Site, y: Any, factor: Number) -> Any:
    """factor · y, computed in the type of the result, as torch does: y alone may be of a type in
    which the product is rounded, or wraps around."""
    typed = isinstance(y, Sym) and (factor != 1 or isinstance(factor, bool))
    return b.scaled(b.wanted(y) if typed else y, factor)


def _add_of(op: str) -> Entry:
    """x + value · (y ∘ z), all in the type of the result."""

    def entry(b: Site, x: Sym, y: Sym, z: Sym, value: Number) -> Any:
        return b.add(x, b.scaled(b.call(op, b.wanted(y), b.wanted(z)), value))

    return entry


def _lerp(b: Site, x: Sym, end: Sym, t: Any) -> Any:
    """From the nearer end, as torch does: at t = 1 it is ``end``, however large x is."""
    distance = b.sub(end, x)
    if not isinstance(t, Sym):
        t = torch.tensor(t, dtype=torch.float32 if x.dtype.is_low else x.dtype.torch).item()
        near = abs(t) < 0.5
        step = b.mul(*b.pair(distance, t if near else 1 - t))
        return b.add(x, step) if near else b.sub(end, step)
    from_x = b.add(x, b.mul(distance, t))
    from_end = b.sub(end, b.mul(distance, b.sub(*b.pair(1.0, t))))
    return b.where(b.lt(*b.pair(b.abs(t), 0.5)), from_x, from_end)


def _div(b: Site, x: Any, y: Any, mode: str | None = None) -> Any:
    if mode is None and not isinstance(y, Sym):
        y = float(y)  # a whole number might not fit into the whole type of x
    x, y = b.pair(x, y)
    if mode == "floor":
        return b.floor_div(x, y)
    if mode == "trunc":
        b.need(b.out.dtype.is_float, "integer division that rounds towards zero")
        return b.trunc(b.div(x, y))
    return b.div(x, y)


def _pow(b: Site, x: Sym, exponent: Number) -> Any:
    """For exponents of ±0.5 torch takes a root, which is nan for -inf where a power is not."""
    if x.dtype.is_float and abs(exponent) == 0.5:
        return b.sqrt(x) if exponent > 0 else b.rsqrt(x)
    return b.pow(*b.pair(x, exponent))


_BITS = ("and", "or", "xor")


def _bitwise(op: str) -> Entry:
    """On booleans, and only there, the bitwise operation is the logical one."""

    def entry(b: Site, *operands: Any) -> Any:
        b.need(b.out.dtype == bool_, "bitwise arithmetic on integers")
        return b.call(op, *(b.pair(*operands) if len(operands) == 2 else operands))

    return entry


# ---- choice ------------------------------------------------------------------------------------


def _where(b: Site, condition: Sym, x: Any, y: Any) -> Any:
    if condition.dtype != bool_:
        condition = b.ne(*b.pair(condition, 0))
    sides = [v if isinstance(v, Sym) else b.literal(v, b.out.dtype) for v in (x, y)]
    return b.where(condition, *sides)


def _masked_fill(b: Site, x: Sym, mask: Sym, value: Any) -> Any:
    fill = b.wanted(value) if isinstance(value, Sym) else b.literal(value, x.dtype)
    return b.where(mask, fill, x)


def _clamp(b: Site, x: Sym, low: Any = None, high: Any = None) -> Any:
    """Bounds that are numbers are attributes; tensors are compared with, lower bound first."""
    x = b.wanted(x)
    if isinstance(low, Sym) or isinstance(high, Sym):
        x = x if low is None else b.maximum(x, b.wanted(b.operand(low, x)))
        return x if high is None else b.minimum(x, b.wanted(b.operand(high, x)))
    return b.clamp(x, min=low, max=high)


def _nan_to_num(b: Site, x: Sym, nan: Any, top: Any, bottom: Any) -> Any:
    """Infinities become the largest numbers of the type unless others are given."""
    b.need(x.dtype.is_float, "nan_to_num of integers")
    limits, found = torch.finfo(x.dtype.torch), x
    for odd, value in ((math.inf, top), (-math.inf, bottom)):
        number = value if value is not None else limits.max if odd > 0 else limits.min
        found = b.where(b.eq(*b.pair(x, odd)), b.literal(number, x.dtype), found)
    return b.where(b.isnan(x), b.literal(0.0 if nan is None else nan, x.dtype), found)


# ---- reductions ----------------------------------------------------------------------------------


def _axes(dim: Sequence[int] | int | None, rank: int) -> tuple[int, ...] | None:
    """ATen's ``dim``, where None and the empty list both mean all dimensions."""
    if dim is None or dim == []:
        return None
    return tuple(axis_of(d, rank) for d in ([dim] if isinstance(dim, int) else dim))


def _reduce(op: str, x: Sym, b: Site, dim: Any = None, keepdim: bool = False) -> Any:
    return b.call(op, x, axes=_axes(dim, x.rank), keepdim=keepdim)


def _extreme(op: str) -> Entry:
    """Values, and their places if something reads those."""

    def entry(b: Site, x: Sym, dim: int, keepdim: bool) -> Any:
        how = {"axis": axis_of(dim, x.rank), "keepdim": keepdim}
        place = b.call(f"arg{op}", x, **how) if 1 in b.used else None
        return _reduce(op, x, b, dim, keepdim), place

    return entry


def _var(b: Site, x: Sym, *_: Any) -> Any:
    """The three forms of var: over all dimensions, with a flag, with a correction."""
    given = b.given
    flag = given.get("correction", given.get("unbiased"))
    freedom = 1 if flag is None else flag
    b.need(freedom == int(freedom), "a correction that is not whole")
    axes, keepdim = _axes(given.get("dim"), x.rank), given.get("keepdim", False)
    return b.var(x, axes=axes, keepdim=keepdim, correction=int(freedom))


def _std(b: Site, x: Sym, *_: Any) -> Any:
    return b.sqrt(_var(b, x))


def _with_mean(spread: Entry) -> Entry:
    return lambda b, x, *_: (spread(b, x), _named_reduce("mean")(b, x))


def _named_reduce(op: str) -> Entry:
    """A reduction of x, cast to ``dtype`` if one is given, over ``dim`` or over all dimensions."""
    return lambda b, x, *_: _reduce(
        op, b.typed(x, b.given.get("dtype")), b, b.given.get("dim"), b.given.get("keepdim", False)
    )


def _logsumexp(b: Site, x: Sym, dim: Any, keepdim: bool) -> Any:
    """log Σ exp(x − m) + m with m the maximum, or 0 where that is infinite."""
    b.need(x.dtype.is_float and x.type.numel > 0, "logsumexp of integers or of nothing")
    top = _reduce("max", x, b, dim, True)
    top = b.where(b.isinf(top), b.literal(0.0, x.dtype), top)
    total = b.add(b.log(_reduce("sum", b.exp(b.sub(x, top)), b, dim, True)), top)
    return b.shaped(total)


def _truth(op: str) -> Entry:
    """any and all; for uint8 torch answers in uint8."""
    return lambda b, x, dim=None, keepdim=False: b.wanted(_reduce(op, x, b, dim, keepdim))


# ---- scans, order and counting -------------------------------------------------------------------


def _scan(op: str) -> Entry:
    """A scalar is its own sum or product; the places of a scalar's extremes we cannot give."""

    def entry(b: Site, x: Sym, dim: int, *_: Any) -> Any:
        one = len(b.want) == 1
        b.need(one or x.rank > 0, f"{op} of a scalar")
        x = b.wanted(x)
        return x if x.rank == 0 else b.call(op, x, axis=axis_of(dim, x.rank))

    return entry


def _sort(b: Site, x: Sym, *_: Any) -> Any:
    """Always stable: one of the orders that torch may give, and the same every time."""
    b.need(x.rank > 0, "sort of a scalar")
    return b.sort(x, axis=axis_of(b.given["dim"], x.rank), descending=b.given["descending"])


def _mean_of(op: str) -> Entry:
    """The operator on the difference, and ATen's reduction: 0 none, 1 mean, 2 sum."""

    def entry(b: Site, x: Sym, y: Sym, reduction: int) -> Any:
        return _reduced(b, b.call(op, b.sub(x, y)), reduction)

    return entry


def _reduced(b: Site, each: Sym, reduction: int) -> Any:
    return each if reduction == 0 else b.call("mean" if reduction == 1 else "sum", each)


def _bent(scaled: bool) -> Entry:
    """Huber's loss: half the square of a small difference, and beyond ``bend`` the tangent there.
    ``scaled`` by 1 / ``bend`` it is smooth L1."""

    def entry(b: Site, x: Sym, y: Sym, reduction: int, bend: float) -> Any:
        far = b.abs(b.sub(b.upcast(x), b.upcast(y)))
        b.need(bend > 0, "a loss without a bend")
        square = b.mul(*b.pair(b.square(far), 0.5 / bend if scaled else 0.5))
        line = b.mul(*b.pair(b.sub(*b.pair(far, 0.5 * bend)), 1.0 if scaled else bend))
        each = b.where(b.lt(*b.pair(far, bend)), square, line)
        return b.wanted(_reduced(b, each, reduction))

    return entry


def _binary_cross_entropy(
    b: Site, x: Sym, target: Sym, weight: Sym | None, positive: Sym | None, reduction: int
) -> Any:
    """Binary cross-entropy of logits: (1 − target) · x − log σ(x), with a factor on the logarithm
    where positives weigh more."""
    x, target = b.upcast(x), b.upcast(target)
    logs = b.log_sigmoid(x)
    if positive is not None:
        more = b.sub(*b.pair(b.upcast(positive), 1.0))
        logs = b.mul(logs, b.add(*b.pair(b.mul(more, target), 1.0)))
    each = b.sub(b.mul(b.sub(*b.pair(1.0, target)), x), logs)
    each = each if weight is None else b.mul(each, b.upcast(weight))
    return b.wanted(_reduced(b, each, reduction))


_SPREADS = {"var": _var, "std": _std, "var_mean": _with_mean(_var), "std_mean": _with_mean(_std)}
_REDUCTIONS = {
    "sum": "sum.default sum.dim_IntList",
    "mean": "mean.default mean.dim",
    "prod": "prod.default prod.dim_int",
    "max": "amax.default max.default",
    "min": "amin.default min.default",
}

TABLE: dict[str, Entry] = {
    **{f"{op}.default": _one(op) for op in _UNARY.split()},
    "sgn.default": _one("sign"),
    "special_ndtr.default": _one("ndtr"),
    **{f"{op}.default": _one(op, names) for op, names in SETTINGS.items()},
    **{calls: _binary(op) for op, calls in _BINARY.items()},
    **{f"{op}.Tensor {op}.Scalar": partial(_sum, op) for op in ("add", "sub")},
    "rsub.Tensor rsub.Scalar": lambda b, x, y, alpha: _sum("sub", b, y, x, alpha),
    "div.Tensor div.Scalar true_divide.Tensor div.Tensor_mode div.Scalar_mode": _div,
    **{f"bitwise_{op}.Tensor __{op}__.Tensor": _bitwise(f"logical_{op}") for op in _BITS},
    "bitwise_not.default": _bitwise("logical_not"),
    "pow.Tensor_Scalar": _pow,
    "addcmul.default": _add_of("mul"),
    "addcdiv.default": _add_of("div"),
    "lerp.Scalar lerp.Tensor": _lerp,
    "log10.default": lambda b, x: b.mul(*b.pair(b.log2(x), math.log10(2.0))),
    "atan.default": lambda b, x: b.atan2(*b.pair(x, 1.0)),
    "frac.default": lambda b, x: b.sub(x, b.trunc(x)),
    "isfinite.default": lambda b, x: b.logical_not(b.logical_or(b.isnan(x), b.isinf(x))),
    "nan_to_num.default": _nan_to_num,
    "where.self where.ScalarOther where.ScalarSelf where.Scalar": _where,
    "masked_fill.Scalar masked_fill.Tensor": _masked_fill,
    "clamp.default clamp.Tensor clip.default clip.Tensor": _clamp,
    "clamp_min.default clamp_min.Tensor": _clamp,
    "clamp_max.default clamp_max.Tensor": lambda b, x, high: _clamp(b, x, None, high),
    "elu.default": lambda b, x, alpha, *scales: b.need(
        scales == (1, 1), "elu with scale or input_scale"
    ).elu(x, alpha=alpha),
    # the weight is one number or one per channel, in whatever shape it comes
    "prelu.default _prelu_kernel.default": lambda b, x, w: b.prelu(x, b.shaped(w, (w.type.numel,))),
    "log_sigmoid_forward.default": _one("log_sigmoid"),
    **{calls: _named_reduce(op) for op, calls in _REDUCTIONS.items()},
    **{f"{op}.dim": _extreme(op) for op in ("max", "min")},
    "aminmax.default": lambda b, x, *how: tuple(_reduce(op, x, b, *how) for op in ("min", "max")),
    **{f"{op}.default": _one(op, "dim:axis keepdim") for op in ("argmax", "argmin")},
    **{f"{op}.default {op}.dim {op}.dims": _truth(op) for op in ("any", "all")},
    **{f"{op}.default {op}.dim {op}.correction": entry for op, entry in _SPREADS.items()},
    "logsumexp.default": _logsumexp,
    **{f"{op}.default": _scan(op) for op in ("cumsum", "cumprod", "cummax", "cummin")},
    "sort.default sort.stable": _sort,
    "argsort.default argsort.stable": lambda b, x, *_: _sort(b, x)[1],
    "topk.default": lambda b, x, k, dim, largest, _: b.need(x.rank > 0, "topk of a scalar").topk(
        x, k=k, axis=axis_of(dim, x.rank), largest=largest
    ),
    "histc.default": lambda b, x, *_: b.need(
        b.given["min"] < b.given["max"], "a range read from the data"
    ).wanted(b.histogram(x, **b.settings("bins min:low max:high"))),
    "linalg_vector_norm.default": lambda b, x, order, dim, keepdim, dtype: vector_norm(
        b, b.typed(x, dtype), p=float(order), axes=_axes(dim, x.rank), keepdim=keepdim
    ),
    "mse_loss.default": _mean_of("square"),
    "l1_loss.default": _mean_of("abs"),
    "smooth_l1_loss.default": _bent(scaled=True),
    "huber_loss.default": _bent(scaled=False),
    "binary_cross_entropy_with_logits.default": _binary_cross_entropy,
}
