"""Arithmetic, functions of one number, comparison and choice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, bool_, dtype
from deuteron.ir.types import TensorType
from deuteron.ops.elementwise import anything, define, elementwise, made_float, numbers, truth
from deuteron.ops.formula import CannotLower, Formula
from deuteron.ops.opdef import Attr, Fusion, operator, promoted
from deuteron.ops.samples import Sample, samples, unary_samples


def ndtr(x: torch.Tensor) -> torch.Tensor:
    """Φ(x). PyTorch's 1 + erf loses its digits below −4: in float64, in which it has to be exact,
    through erfc. 16-bit floats it does not take."""
    if x.dtype == torch.float64:
        return torch.erfc(x * -math.sqrt(0.5)) * 0.5
    out: torch.Tensor = torch.special.ndtr(x.float())
    return out.to(x.dtype) if x.dtype.is_floating_point else out


# ---- one input ---------------------------------------------------------------------------

_LN2 = math.log(2.0)


def _flat(b: Any, g: Any) -> float:
    """The derivative is 0 almost everywhere."""
    return 0.0


def _sign(b: Any, x: Any) -> Any:
    return b.where(b.gt(x, 0.0), 1.0, b.where(b.lt(x, 0.0), -1.0, 0.0))


def _erf_gradient(b: Any, g: Any, x: Any) -> Any:
    return g * b.exp(-b.square(x)) * (2.0 / math.sqrt(math.pi))


def _ndtr_gradient(b: Any, g: Any, x: Any) -> Any:
    return g * b.exp(b.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))


_FORMULAS: dict[str, Formula] = {  # of those that are no primitives
    "sign": _sign,
    "square": lambda b, x: x * x,
    "log2": lambda b, x: b.log(x) * (1.0 / _LN2),
    "rsqrt": lambda b, x: 1.0 / b.sqrt(x),
    "reciprocal": lambda b, x: 1.0 / x,
    "tan": lambda b, x: b.sin(x) / b.cos(x),
}
_KEEP_INTEGERS = "neg abs sign square floor ceil round trunc".split()

UNARY = tuple(
    define(
        name,
        doc,
        ("x",),
        _FORMULAS.get(name),
        gradient=gradient,
        reference=fn,
        result=numbers if name in _KEEP_INTEGERS else made_float,
        samples=partial(unary_samples, kind),
    )
    for name, doc, fn, gradient, kind in (
        ("neg", "−x", torch.neg, lambda b, g: -g, "normal"),
        ("abs", "|x|", torch.abs, lambda b, g, x: g * b.sign(x), "away"),
        ("sign", "−1, 0 or 1", torch.sign, _flat, "away"),
        ("square", "x²", torch.square, lambda b, g, x: g * x * 2.0, "normal"),
        ("exp", "eˣ", torch.exp, lambda b, g, out: g * out, "normal"),
        ("exp2", "2ˣ", torch.exp2, lambda b, g, out: g * out * _LN2, "normal"),
        ("expm1", "eˣ − 1", torch.expm1, lambda b, g, out: g * (out + 1.0), "normal"),
        ("log", "ln x", torch.log, lambda b, g, x: g / x, "positive"),
        ("log2", "log₂ x", torch.log2, lambda b, g, x: g / (x * _LN2), "positive"),
        ("log1p", "ln(1 + x)", torch.log1p, lambda b, g, x: g / (x + 1.0), "positive"),
        ("sqrt", "√x", torch.sqrt, lambda b, g, out: g * 0.5 / out, "positive"),
        ("rsqrt", "1/√x", torch.rsqrt, lambda b, g, out: g * -0.5 * out * out * out, "positive"),
        ("reciprocal", "1/x", torch.reciprocal, lambda b, g, out: -g * out * out, "away"),
        ("sin", "sin x", torch.sin, lambda b, g, x: g * b.cos(x), "normal"),
        ("cos", "cos x", torch.cos, lambda b, g, x: -g * b.sin(x), "normal"),
        ("tan", "tan x", torch.tan, lambda b, g, out: g * (b.square(out) + 1.0), "unit"),
        ("erf", "the error function", torch.erf, _erf_gradient, "normal"),
        ("ndtr", "Φ(x), the normal distribution", ndtr, _ndtr_gradient, "normal"),
        ("floor", "largest integer ≤ x", torch.floor, _flat, "normal"),
        ("ceil", "smallest integer ≥ x", torch.ceil, _flat, "normal"),
        ("round", "nearest integer, ties to even", torch.round, _flat, "normal"),
        ("trunc", "x without its fraction", torch.trunc, _flat, "normal"),
    )
)

# ---- powers, and division with a remainder -----------------------------------------------------


def _pow(b: Any, x: Any, y: Any) -> Any:
    """Small whole exponents as products; a half as a root, with the signs that C's pow has."""
    if x.is_whole:
        return _whole_pow(b, x, y)
    rule = POWERS.get(y.number) if y.number is not None else None
    return b.primitive("pow", x, y) if rule is None else rule(b, x)


def _whole_pow(b: Any, x: Any, y: Any) -> Any:
    """A known exponent as squares and products, which wrap around as those of a loop do."""
    if y.number is None:
        return b.primitive("power", x, y)
    left, found = int(y.number), 1
    if left < 0:
        raise CannotLower("a negative power of integers, for which torch raises", "cast to a float")
    while left:
        if left & 1:
            found = x if isinstance(found, int) else found * x
        left >>= 1
        if left:
            x = x * x
    return found


def _root(b: Any, x: Any) -> Any:
    """√x as C's pow has it: +0 for −0, and +inf for −inf."""
    return b.where(b.eq(x, -math.inf), math.inf, b.sqrt(x) + 0.0)


def _inverse_root(b: Any, x: Any) -> Any:
    return b.where(b.eq(x, -math.inf), 0.0, 1.0 / (b.sqrt(x) + 0.0))


POWERS: dict[float, Callable[..., Any]] = {
    -1: lambda b, x: 1.0 / x,
    -0.5: _inverse_root,
    0: lambda b, x: 1.0,
    0.5: _root,
    1: lambda b, x: x,
    2: lambda b, x: x * x,
    3: lambda b, x: x * x * x,
    4: lambda b, x: (x * x) * (x * x),
}


def _whole_division(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """⌊x / y⌋ of integers, and what it leaves of x, which has the sign of y."""
    if y.number == 0:
        raise CannotLower("integers divided by 0, for which torch raises", "cast to a float")
    if y.number == -1:  # the least number has no opposite, and its division traps
        return -x, 0
    quotient = b.primitive("quotient", x, y)
    left = x - quotient * y
    turned = _turned(b, left, y)
    return b.where(turned, quotient - 1, quotient), b.where(turned, left + y, left)


def _turned(b: Any, left: Any, y: Any) -> Any:
    """Whether what is left of x by y is not 0, and has not the sign of y."""
    below = y.number < 0 if y.number is not None else y < 0.0
    return b.primitive("and", b.ne(left, 0.0), b.primitive("ne", left < 0.0, below))


def _remainder(b: Any, x: Any, y: Any) -> Any:
    """C's remainder, moved to the sign of y; exact, as that is."""
    if x.is_whole:
        return _whole_division(b, x, y)[1]
    left = b.primitive("fmod", x, y)
    return b.where(_turned(b, left, y), left + y, left)


def _floor_div(b: Any, x: Any, y: Any) -> Any:
    """⌊x / y⌋ from x less its remainder, which a rounded quotient would miss just below a whole
    number; x / 0 is what division gives, and a 0 has the sign of the quotient."""
    if x.is_whole:
        return _whole_division(b, x, y)[0]
    left, quotient = b.primitive("fmod", x, y), x / y
    whole = (x - left) / y
    whole = b.where(_turned(b, left, y), whole - 1.0, whole)
    floor = b.floor(whole)
    floor = b.where(whole - floor > 0.5, floor + 1.0, floor)
    found = b.where(b.eq(whole, 0.0), quotient * 0.0, floor)
    return b.where(b.eq(y, 0.0), quotient, found)


def _pow_dx(b: Any, g: Any, x: Any, y: Any) -> Any:
    return b.where(b.eq(y, 0.0), 0.0, g * y * b.pow(x, y - 1.0))


def _pow_dy(b: Any, g: Any, x: Any, out: Any) -> Any:
    safe = b.where(b.eq(x, 0.0), 1.0, x)
    return b.where(b.eq(x, 0.0), 0.0, g * out * b.log(safe))


# ---- two inputs ----------------------------------------------------------------------------


def _no_difference_of_bools(name: str, *types: TensorType) -> DType:
    if bool_ in (t.dtype for t in types):
        raise GraphError(f"{name} is not defined on bool", remedy="use logical_xor or ne")
    return promoted(*types)


def _tie(b: Any, g: Any, mine: Any, other: Any) -> Any:
    """max and min split the gradient where both inputs are equal, as PyTorch does."""
    return b.where(mine, b.where(other, g * 0.5, g), 0.0)


def _extreme_dx(b: Any, g: Any, x: Any, y: Any, out: Any) -> Any:
    return _tie(b, g, b.eq(x, out), b.eq(x, y))


def _extreme_dy(b: Any, g: Any, x: Any, y: Any, out: Any) -> Any:
    return _tie(b, g, b.eq(y, out), b.eq(x, y))


def _angle_dx(b: Any, g: Any, x: Any, y: Any) -> Any:
    return g * y / (b.square(x) + b.square(y))


_BINARY = """3x5{x} 3x5{y} | 3x5{x} 5{y} | 2x1x4{x} 3x1{y} | 3x5{x} scalar{y} | scalar{x} scalar{y}
    | 0x3{x} 1x3{y} | 4x5@transposed{x} 4x1{y} | 4x5@sliced{x} 4x5{y}
    | 2x3x4x5@nhwc{x} 2x3x4x5{y} | 2x3x4x5@nhwc{x} 3x1x1{y} | """


def _binary_samples(kx: str, ky: str) -> tuple[Sample, ...]:
    values = "7{x} 7{y}" if kx == "positive" else "33:extreme 33:extreme nograd [extreme]"
    return samples((_BINARY + values).format(x=f":{kx}", y=f":{ky}"))()


def _sides(dx: Formula, dy: Formula) -> tuple[Formula, Formula]:
    return dx, dy


_FORMULAS_OF_TWO: dict[str, Formula] = {
    "pow": _pow,
    "remainder": _remainder,
    "floor_div": _floor_div,
}
_RESULTS: dict[str, Callable[..., DType]] = {
    "sub": _no_difference_of_bools,
    **dict.fromkeys(("div", "atan2"), made_float),
    **dict.fromkeys(_FORMULAS_OF_TWO, numbers),
}
_EXTREME, _DISTINCT = _sides(_extreme_dx, _extreme_dy), "distinct distinct"
_REMAINDER = "what is left of x after whole multiples of y, with the sign of y"
_PRODUCT = _sides(lambda b, g, y: g * y, lambda b, g, x: g * x)
_DIV = _sides(lambda b, g, y: g / y, lambda b, g, x, y: -g * x / b.square(y))
_REST = _sides(lambda b, g: g, lambda b, g, x, y: -g * b.floor(x / y))
_ANGLE = _sides(_angle_dx, lambda b, g, x, y: -_angle_dx(b, g, y, x))

BINARY = tuple(
    define(
        name,
        doc,
        ("x", "y"),
        _FORMULAS_OF_TWO.get(name),
        gradient=gradients,
        reference=fn,
        result=_RESULTS.get(name, anything),
        samples=partial(_binary_samples, *kinds.split()),
    )
    for name, doc, fn, gradients, kinds in (
        ("add", "x + y", torch.add, _sides(lambda b, g: g, lambda b, g: g), "normal normal"),
        ("sub", "x − y", torch.sub, _sides(lambda b, g: g, lambda b, g: -g), "normal normal"),
        ("mul", "x · y", torch.mul, _PRODUCT, "normal normal"),
        ("div", "x / y", torch.div, _DIV, "normal away"),
        ("pow", "x to the power y", torch.pow, _sides(_pow_dx, _pow_dy), "positive normal"),
        ("maximum", "the larger of x and y; nan wins", torch.maximum, _EXTREME, _DISTINCT),
        ("minimum", "the smaller of x and y; nan wins", torch.minimum, _EXTREME, _DISTINCT),
        ("remainder", _REMAINDER, torch.remainder, _REST, "normal positive"),
        ("floor_div", "⌊x / y⌋", torch.floor_divide, _sides(_flat, _flat), "normal positive"),
        ("atan2", "the angle of the point (y, x)", torch.atan2, _ANGLE, "away away"),
    )
)

# ---- comparisons and logic: bool results, no gradient ----------------------------------------


def _joined(how: str) -> Formula:
    """Each operand is asked by itself whether it is 0."""
    return lambda b, x, y: b.primitive(how, b.to_bool(x), b.to_bool(y))


_LOGIC: dict[str, Formula] = {
    "logical_and": _joined("and"),
    "logical_or": _joined("or"),
    "logical_xor": _joined("ne"),
    "logical_not": lambda b, x: b.primitive("not", b.to_bool(x)),
    "isnan": lambda b, x: b.ne(x, x) if x.is_float else False,
    "isinf": lambda b, x: b.eq(b.abs(x), math.inf) if x.is_float else False,
}

COMPARE = tuple(
    define(
        name,
        f"whether {doc}",
        ("x", "y")[:count],
        _LOGIC.get(name),
        gradient=(None,) * count,
        reference=fn,
        result=truth,
        samples=partial(_binary_samples, "normal", "normal") if count > 1 else unary_samples,
    )
    for name, doc, fn, count in (
        ("eq", "x = y", torch.eq, 2),
        ("ne", "x ≠ y", torch.ne, 2),
        ("lt", "x < y", torch.lt, 2),
        ("le", "x ≤ y", torch.le, 2),
        ("gt", "x > y", torch.gt, 2),
        ("ge", "x ≥ y", torch.ge, 2),
        ("logical_and", "x and y hold", torch.logical_and, 2),
        ("logical_or", "x or y holds", torch.logical_or, 2),
        ("logical_xor", "either x or y holds", torch.logical_xor, 2),
        ("logical_not", "x does not hold", torch.logical_not, 1),
        ("isnan", "x is nan", torch.isnan, 1),
        ("isinf", "x is ±infinity", torch.isinf, 1),
    )
)

# ---- where, clamp, cast ------------------------------------------------------------------------


def _choice(name: str, condition: TensorType, x: TensorType, y: TensorType) -> DType:
    if condition.dtype != bool_:
        raise GraphError(
            f"the condition of {name} is {condition.dtype.name}, not bool",
            remedy="compare first, e.g. ne(c, 0)",
        )
    return promoted(x, y)


@elementwise(
    gradient=(
        None,
        lambda b, g, condition: b.where(condition, g, 0.0),
        lambda b, g, condition: b.where(condition, 0.0, g),
    ),
    reference=torch.where,
    result=_choice,
    samples=samples(
        """3x5:bool 3x5 3x5 | 3x1:bool 5 scalar | 0:bool 0 1 | 4:bool 4:extreme 4:extreme nograd
        | 2x3x4x5:bool 2x3x4x5@nhwc 3x1x1"""
    ),
    wide=False,
)
def where(b: Any, condition: Any, x: Any, y: Any) -> Any:
    """x where the condition holds, else y"""
    return b.primitive("select", condition, x, y)


def _clamp_gradient(b: Any, g: Any, x: Any, min: float | None, max: float | None) -> Any:
    inside = [x >= min] if min is not None else []
    inside += [x <= max] if max is not None else []
    keep = inside[0] if len(inside) == 1 else b.logical_and(*inside)
    return b.where(keep, g, 0.0)


def _clamp_reference(x: torch.Tensor, min: float | None, max: float | None) -> torch.Tensor:
    if not x.is_floating_point():
        min = None if min is None else int(min)
        max = None if max is None else int(max)
    return torch.clamp(x, min, max)


def _clamp_infer(x: TensorType, min: float | None, max: float | None) -> TensorType:
    if min is None and max is None:
        raise GraphError("clamp needs min, max or both", remedy="e.g. clamp(x, min=0.0)")
    if not x.dtype.is_float and any(b is not None and b != int(b) for b in (min, max)):
        raise GraphError("clamp of integers needs whole bounds", remedy="cast to a float first")
    return x.dense_like(dt=numbers("clamp", x))


@elementwise(
    gradient=_clamp_gradient,
    reference=_clamp_reference,
    samples="distinct",
    tried=({"min": -0.53, "max": 0.72}, {"min": 0.01}, {"max": 0.01}),
    wide=False,
)
def clamp(b: Any, x: Any, min: float | None = None, max: float | None = None) -> Any:
    """x held between min and max; nan stays nan"""
    x = x if min is None else b.maximum(x, min)
    return x if max is None else b.minimum(x, max)


CLAMP = replace(clamp, infer=_clamp_infer)


_dtype = dtype


@operator(
    Fusion.ELEMENTWISE,
    lambda x, dtype: x.to(_dtype(dtype).torch, copy=True),
    attrs={"dtype": Attr("dtype", doc="the element type wanted, e.g. 'f16'")},
    vjp=lambda b, v: [
        b.to(v.grad, v.arg(0).dtype) if v.arg(0).dtype.is_float and v.grad.dtype.is_float else None
    ],
    samples=samples(
        """3x5 dtype=f32 | 3x5:f32 dtype=f16 nograd | 3x5:f32 dtype=bf16 nograd
        | 3x5:i32 dtype=f32 nograd | 3x5:bool dtype=i64 nograd | 7:f32 dtype=i32 nograd
        | 2x3x4x5@nhwc:f32 dtype=f64 nograd"""
    ),
)
def cast(x: TensorType, dtype: str) -> TensorType:
    """x in another element type, rounded to nearest even."""
    return x.dense_like(dt=_dtype(dtype))


OPS = (*UNARY, *BINARY, *COMPARE, where, CLAMP, cast)
