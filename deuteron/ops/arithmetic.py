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
from deuteron.ops.elementwise import Result, anything, elementwise, made_float, numbers, truth
from deuteron.ops.formula import CannotLower, Formula
from deuteron.ops.opdef import Attr, Fusion, OpDef, operator, promoted
from deuteron.ops.samples import Sample, samples, unary_samples


def ndtr(x: torch.Tensor) -> torch.Tensor:
    """Φ(x). PyTorch's 1 + erf loses digits below −4, so in float64, where the reference has to be
    exact, we use erfc. torch's ndtr takes no 16-bit floats: they are computed in float32."""
    if x.dtype == torch.float64:
        return torch.erfc(x * -math.sqrt(0.5)) * 0.5
    out: torch.Tensor = torch.special.ndtr(x.float())
    return out.to(x.dtype) if x.dtype.is_floating_point else out


# ---- powers, and division with a remainder -----------------------------------------------------


def _pow(b: Any, x: Any, y: Any) -> Any:
    """Compute small whole exponents as products, and halves as roots with the signs of C's pow."""
    if x.is_whole:
        return _whole_pow(b, x, y)
    rule = POWERS.get(y.number) if y.number is not None else None
    return b.primitive("pow", x, y) if rule is None else rule(b, x)


def _whole_pow(b: Any, x: Any, y: Any) -> Any:
    """A power of integers. If the exponent is known, it is written as squares and products, which
    wrap around on overflow as a loop of products does."""
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


POWERS: dict[float, Callable[..., Any]] = {
    -1: lambda b, x: 1.0 / x,
    -0.5: lambda b, x: b.where(b.eq(x, -math.inf), 0.0, 1.0 / (b.sqrt(x) + 0.0)),
    0: lambda b, x: 1.0,
    # as C's pow: +0 for −0, and +inf for −inf
    0.5: lambda b, x: b.where(b.eq(x, -math.inf), math.inf, b.sqrt(x) + 0.0),
    1: lambda b, x: x,
    2: lambda b, x: x * x,
    3: lambda b, x: x * x * x,
    4: lambda b, x: (x * x) * (x * x),
}


def _whole_division(b: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return ⌊x / y⌋ of integers, and the remainder, which has the sign of y."""
    if y.number == 0:
        raise CannotLower("integers divided by 0, for which torch raises", "cast to a float")
    if y.number == -1:  # the smallest integer has no negative: dividing it by −1 traps
        return -x, 0
    quotient = b.primitive("quotient", x, y)
    left = x - quotient * y
    turned = _turned(b, left, y)
    return b.where(turned, quotient - 1, quotient), b.where(turned, left + y, left)


def _turned(b: Any, left: Any, y: Any) -> Any:
    """Whether ``left``, the remainder of a division by y, is not 0 and differs from y in sign."""
    below = y.number < 0 if y.number is not None else y < 0.0
    return b.primitive("and", b.ne(left, 0.0), b.primitive("ne", left < 0.0, below))


def _remainder(b: Any, x: Any, y: Any) -> Any:
    """C's remainder (fmod), moved to the sign of y; for floats it is exact, as fmod is."""
    if x.is_whole:
        return _whole_division(b, x, y)[1]
    left = b.primitive("fmod", x, y)
    return b.where(_turned(b, left, y), left + y, left)


def _floor_div(b: Any, x: Any, y: Any) -> Any:
    """⌊x / y⌋, computed from x minus its remainder, because the floor of the rounded quotient is
    wrong just below a whole number. x / 0 is what division gives, and a 0 has the quotient's sign.
    """
    if x.is_whole:
        return _whole_division(b, x, y)[0]
    left, quotient = b.primitive("fmod", x, y), x / y
    whole = (x - left) / y
    whole = b.where(_turned(b, left, y), whole - 1.0, whole)
    floor = b.floor(whole)
    floor = b.where(whole - floor > 0.5, floor + 1.0, floor)
    found = b.where(b.eq(whole, 0.0), quotient * 0.0, floor)
    return b.where(b.eq(y, 0.0), quotient, found)


# ---- formulas, gradients and types by name -----------------------------------------------------

_LN2 = math.log(2.0)


def _joined(how: str) -> Formula:
    """A logical operator: turn each operand into a bool by itself, then combine the two."""
    return lambda b, x, y: b.primitive(how, b.to_bool(x), b.to_bool(y))


_FORMULAS: dict[str, Formula] = {  # of the operators that are not primitives
    "sign": lambda b, x: b.where(b.gt(x, 0.0), 1.0, b.where(b.lt(x, 0.0), -1.0, 0.0)),
    "square": lambda b, x: x * x,
    "log2": lambda b, x: b.log(x) * (1.0 / _LN2),
    "rsqrt": lambda b, x: 1.0 / b.sqrt(x),
    "reciprocal": lambda b, x: 1.0 / x,
    "tan": lambda b, x: b.sin(x) / b.cos(x),
    "pow": _pow,
    "remainder": _remainder,
    "floor_div": _floor_div,
    "logical_and": _joined("and"),
    "logical_or": _joined("or"),
    "logical_xor": _joined("ne"),
    "logical_not": lambda b, x: b.primitive("not", b.to_bool(x)),
    "isnan": lambda b, x: b.ne(x, x) if x.is_float else False,
    "isinf": lambda b, x: b.eq(b.abs(x), math.inf) if x.is_float else False,
}


def _flat(b: Any, g: Any) -> float:
    """The derivative is 0 almost everywhere."""
    return 0.0


def _tie(b: Any, g: Any, mine: Any, other: Any) -> Any:
    """max and min split the gradient where both inputs are equal, as PyTorch does."""
    return b.where(mine, b.where(other, g * 0.5, g), 0.0)


def _pow_dy(b: Any, g: Any, x: Any, out: Any) -> Any:
    safe = b.where(b.eq(x, 0.0), 1.0, x)
    return b.where(b.eq(x, 0.0), 0.0, g * out * b.log(safe))


_EXTREME: tuple[Formula, ...] = (
    lambda b, g, x, y, out: _tie(b, g, b.eq(x, out), b.eq(x, y)),
    lambda b, g, x, y, out: _tie(b, g, b.eq(y, out), b.eq(x, y)),
)
_GRADIENTS: dict[str, tuple[Formula, ...]] = {  # one formula for each input
    **dict.fromkeys("sign floor ceil round trunc".split(), (_flat,)),
    "neg": (lambda b, g: -g,),
    "abs": (lambda b, g, x: g * b.sign(x),),
    "square": (lambda b, g, x: g * x * 2.0,),
    "exp": (lambda b, g, out: g * out,),
    "exp2": (lambda b, g, out: g * out * _LN2,),
    "expm1": (lambda b, g, out: g * (out + 1.0),),
    "log": (lambda b, g, x: g / x,),
    "log2": (lambda b, g, x: g / (x * _LN2),),
    "log1p": (lambda b, g, x: g / (x + 1.0),),
    "sqrt": (lambda b, g, out: g * 0.5 / out,),
    "rsqrt": (lambda b, g, out: g * -0.5 * out * out * out,),
    "reciprocal": (lambda b, g, out: -g * out * out,),
    "sin": (lambda b, g, x: g * b.cos(x),),
    "cos": (lambda b, g, x: -g * b.sin(x),),
    "tan": (lambda b, g, out: g * (b.square(out) + 1.0),),
    "erf": (lambda b, g, x: g * b.exp(-b.square(x)) * (2.0 / math.sqrt(math.pi)),),
    "ndtr": (lambda b, g, x: g * b.exp(b.square(x) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi)),),
    "add": (lambda b, g: g, lambda b, g: g),
    "sub": (lambda b, g: g, lambda b, g: -g),
    "mul": (lambda b, g, y: g * y, lambda b, g, x: g * x),
    "div": (lambda b, g, y: g / y, lambda b, g, x, y: -g * x / b.square(y)),
    "pow": (lambda b, g, x, y: b.where(b.eq(y, 0.0), 0.0, g * y * b.pow(x, y - 1.0)), _pow_dy),
    "maximum": _EXTREME,
    "minimum": _EXTREME,
    "remainder": (lambda b, g: g, lambda b, g, x, y: -g * b.floor(x / y)),
    "floor_div": (_flat, _flat),
    "atan2": (
        lambda b, g, x, y: g * y / (b.square(x) + b.square(y)),
        lambda b, g, x, y: -(g * x / (b.square(y) + b.square(x))),
    ),
}


def _no_difference_of_bools(name: str, *types: TensorType) -> DType:
    if bool_ in (t.dtype for t in types):
        raise GraphError(f"{name} is not defined on bool", remedy="use logical_xor or ne")
    return promoted(*types)


_NUMBERS = "neg abs sign square floor ceil round trunc pow remainder floor_div".split()
_TRUTHS = "eq ne lt le gt ge isnan isinf logical_and logical_or logical_xor logical_not".split()
_RESULTS: dict[str, Result] = {  # rules for the result type; operators not listed: made_float
    "sub": _no_difference_of_bools,
    **dict.fromkeys(("add", "mul", "maximum", "minimum"), anything),
    **dict.fromkeys(_NUMBERS, numbers),
    **dict.fromkeys(_TRUTHS, truth),
}

# ---- the operators -----------------------------------------------------------------------------

_BINARY = """3x5{x} 3x5{y} | 3x5{x} 5{y} | 2x1x4{x} 3x1{y} | 3x5{x} scalar{y} | scalar{x} scalar{y}
    | 0x3{x} 1x3{y} | 4x5@transposed{x} 4x1{y} | 4x5@sliced{x} 4x5{y}
    | 2x3x4x5@nhwc{x} 2x3x4x5{y} | 2x3x4x5@nhwc{x} 3x1x1{y} | """


def _samples_of(kx: str, ky: str = "") -> tuple[Sample, ...]:
    if not ky:
        return unary_samples(kx)
    values = "7{x} 7{y}" if kx == "positive" else "33:extreme 33:extreme nograd [extreme]"
    return samples((_BINARY + values).format(x=f":{kx}", y=f":{ky}"))()


def _plain(text: str) -> OpDef:
    """Define the operator of one row of ``_TABLE``. It has one input for each kind of sample data.
    Most have a reference of the same name in torch."""
    named, doc = text.split(maxsplit=1)
    name, *kinds = named.split(":")
    make = elementwise(
        gradient=_GRADIENTS.get(name, (None,) * len(kinds)),
        reference=_REFERENCES.get(name) or getattr(torch, name),
        result=_RESULTS.get(name, made_float),
        samples=partial(_samples_of, *kinds),
        wide=False,
    )
    return make(_FORMULAS.get(name), name, doc, "x y" if len(kinds) > 1 else "x")


# references that are not torch's function of the same name
_REFERENCES: dict[str, Callable[..., Any]] = {"ndtr": ndtr, "floor_div": torch.floor_divide}

# rows of: name, kind of sample data for each input (``name:kind:kind``), then the description
_TABLE = """neg:normal −x | abs:away |x| | sign:away −1, 0 or 1 | square:normal x² | exp:normal eˣ
    | exp2:normal 2ˣ | expm1:normal eˣ − 1 | log:positive ln x | log2:positive log₂ x
    | log1p:positive ln(1 + x) | sqrt:positive √x | rsqrt:positive 1/√x | reciprocal:away 1/x
    | sin:normal sin x | cos:normal cos x | tan:unit tan x | erf:normal the error function
    | ndtr:normal Φ(x), the normal distribution | floor:normal largest integer ≤ x
    | ceil:normal smallest integer ≥ x | round:normal nearest integer, ties to even
    | trunc:normal x without its fraction | add:normal:normal x + y | sub:normal:normal x − y
    | mul:normal:normal x · y | div:normal:away x / y | pow:positive:normal x to the power y
    | maximum:distinct:distinct the larger of x and y; nan wins
    | minimum:distinct:distinct the smaller of x and y; nan wins
    | remainder:normal:positive what is left of x after whole multiples of y, with the sign of y
    | floor_div:normal:positive ⌊x / y⌋ | atan2:away:away the angle of the point (y, x)
    | eq:normal:normal whether x = y | ne:normal:normal whether x ≠ y
    | lt:normal:normal whether x < y | le:normal:normal whether x ≤ y
    | gt:normal:normal whether x > y | ge:normal:normal whether x ≥ y
    | logical_and:normal:normal whether x and y hold
    | logical_or:normal:normal whether x or y holds
    | logical_xor:normal:normal whether either x or y holds
    | logical_not:normal whether x does not hold
    | isnan:normal whether x is nan | isinf:normal whether x is ±infinity"""
PLAIN = tuple(_plain(" ".join(row.split())) for row in _TABLE.split(" | "))

# ---- where, clamp, cast ------------------------------------------------------------------------


def _choice(name: str, condition: TensorType, x: TensorType, y: TensorType) -> DType:
    if condition.dtype != bool_:
        wrong = f"the condition of {name} is {condition.dtype.name}, not bool"
        raise GraphError(wrong, remedy="compare first, e.g. ne(c, 0)")
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
    return b.where(inside[0] if len(inside) == 1 else b.logical_and(*inside), g, 0.0)


def _clamp_reference(
    x: torch.Tensor, min: float | None, max: float | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    if not x.is_floating_point():
        min, max = (None if bound is None else int(bound) for bound in (min, max))
    return torch.clamp(x, min, max, out=out)


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


clamp = replace(clamp, infer=_clamp_infer)
_dtype = dtype


@operator(
    Fusion.ELEMENTWISE,
    lambda x, dtype: x.to(_dtype(dtype).torch, copy=True),
    attrs={"dtype": Attr("dtype", doc="the element type wanted, e.g. 'f16'")},
    vjp=lambda b, v: [
        b.to(v.grad, v.arg(0).dtype) if v.arg(0).dtype.is_float and v.grad.dtype.is_float else None
    ],
    samples="""3x5 dtype=f32 | 3x5:f32 dtype=f16 nograd | 3x5:f32 dtype=bf16 nograd
        | 3x5:i32 dtype=f32 nograd | 3x5:bool dtype=i64 nograd | 7:f32 dtype=i32 nograd
        | 2x3x4x5@nhwc:f32 dtype=f64 nograd""",
)
def cast(x: TensorType, dtype: str) -> TensorType:
    """x in another element type, rounded to nearest even."""
    return x.dense_like(dt=_dtype(dtype))
