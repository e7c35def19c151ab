"""Operators written as scalar primitives: the one place where fused arithmetic is spelled out.

Renderers know only the primitives in :data:`PRIMITIVES`. Everything else an elementwise
operator may be is put together here, in the arithmetic type of the program (float32 for
anything narrower), with nan and infinities as the references have them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from deuteron.codegen.scalar import CannotLower, Const

PRIMITIVES = frozenset(
    {
        "add",
        "sub",
        "mul",
        "div",
        "neg",
        "abs",
        "maximum",
        "minimum",
        "sqrt",
        "exp",
        "exp2",
        "log",
        "erf",
        "tanh",
        "sin",
        "cos",
        "floor",
        "ceil",
        "round",
        "trunc",
        "pow",
        "select",
        "fmod",
        "atan2",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "and",
        "or",
        "not",
        "to_float",
        "to_int",
        "to_bool",
        "expm1",
        "log1p",
        "ndtr",
        "rounded",
        "wrapped",
        "random",
        "quotient",
        "power",
    }
)
COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
# each operand is asked by itself whether it is zero or odd: they need no common type
LOGIC = frozenset({"logical_and", "logical_or", "logical_xor", "logical_not", "isnan", "isinf"})
# what integers can do, what of that leaves a narrow type, and what booleans mean by it
WHOLE = frozenset(
    {
        "add",
        "sub",
        "mul",
        "neg",
        "abs",
        "maximum",
        "minimum",
        "where",
        "square",
        "sign",
        "relu",
        "clamp",
        "floor",
        "ceil",
        "round",
        "trunc",
        "pow",
        "remainder",
        "floor_div",
    }
)
UNCHANGED = frozenset({"floor", "ceil", "round", "trunc"})  # by which integers are
OVERFLOWS = frozenset({"add", "sub", "mul", "neg", "abs", "square", "pow", "floor_div"})
BOOLEAN = {"add": "or", "mul": "and", "maximum": "or", "minimum": "and", "where": "where"}


class Emitter(Protocol):
    """What a recipe writes through: arithmetic on references to scalars."""

    def op(self, name: str, *args: Any, kind: str | None = None) -> Any: ...

    def kind(self, value: Any) -> str: ...


Recipe = Callable[..., Any]


class E:
    """Short names over an emitter, for recipes that read like formulas."""

    def __init__(self, emitter: Emitter) -> None:
        self.emitter = emitter

    def __getattr__(self, name: str) -> Callable[..., Any]:
        op = {"max": "maximum", "min": "minimum", "both": "and", "either": "or"}.get(name, name)
        return lambda *args: self.emitter.op(op, *args)


def _sigmoid(e: E, x: Any) -> Any:
    return e.div(1.0, e.add(1.0, e.exp(e.neg(x))))


def _softplus(e: E, x: Any) -> Any:
    """ln(1 + eˣ) without overflow: max(x, 0) + ln(1 + e^−|x|)."""
    return e.add(e.max(x, 0.0), e.log1p(e.exp(e.neg(e.abs(x)))))


def _gelu(e: E, x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        cube = e.mul(e.mul(x, x), x)
        twice = e.mul(2.0 * math.sqrt(2.0 / math.pi), e.add(x, e.mul(0.044715, cube)))
        return e.mul(x, _sigmoid(e, twice))  # (1 + tanh u) / 2, of which nothing cancels
    return e.mul(x, e.ndtr(x))


def _tanhshrink(e: E, x: Any) -> Any:
    """x − tanh x. Near 0 the two cancel; there it is x³ / (3 + x² + x² / (5 + x² / (7 + …))), the
    continued fraction of tanh, whose terms are all positive."""
    square = e.mul(x, x)
    tail = e.div(square, 17.0)  # from here on below float64's last bit for |x| < 1
    for odd in (15.0, 13.0, 11.0, 9.0, 7.0, 5.0):
        tail = e.div(square, e.add(odd, tail))
    near = e.div(e.mul(x, square), e.add(e.add(3.0, square), tail))
    return e.select(e.lt(e.abs(x), 1.0), near, e.sub(x, e.tanh(x)))


def _clamp(e: E, x: Any, min: float | None, max: float | None) -> Any:
    if min is not None:
        x = e.max(x, min)
    return x if max is None else e.min(x, max)


def _elu(e: E, x: Any, alpha: float = 1.0, scale: float = 1.0, inner: float = 1.0) -> Any:
    below = e.mul(alpha * scale, e.expm1(e.mul(x, inner)))
    return e.select(e.gt(x, 0.0), e.mul(x, scale), below)


def _hardsigmoid(e: E, x: Any) -> Any:
    return e.div(_clamp(e, e.add(x, 3.0), 0.0, 6.0), 6.0)


def _sign(e: E, x: Any) -> Any:
    return e.select(e.gt(x, 0.0), 1.0, e.select(e.lt(x, 0.0), -1.0, 0.0))


def _shrink(e: E, x: Any, lambd: float, soft: bool) -> Any:
    if not soft:
        keep = e.either(e.gt(x, lambd), e.lt(x, -lambd))
        return e.select(e.either(keep, e.ne(x, x)), x, 0.0)
    above, below = e.sub(x, lambd), e.add(x, lambd)
    rest = e.select(e.ne(x, x), x, 0.0)
    return e.select(e.gt(x, lambd), above, e.select(e.lt(x, -lambd), below, rest))


def _pow(e: E, x: Any, y: Any) -> Any:
    """Small whole exponents as products; a half as a root, with the signs that C's pow has."""
    if e.emitter.kind(x) == "int":
        return _whole_pow(e, x, y)
    if isinstance(y, Const) and y.value in POWERS:
        return POWERS[y.value](e, x)
    return e.pow(x, y)


def _whole_pow(e: E, x: Any, y: Any) -> Any:
    """A known exponent as squares and products, which wrap around as those of a loop do."""
    if not isinstance(y, Const):
        return e.power(x, y)
    left = int(y.value)
    if left < 0:
        raise CannotLower("a negative power of integers, for which torch raises", "cast to a float")
    found: Any = Const(1, "int")
    while left:
        if left & 1:
            found = x if isinstance(found, Const) else e.mul(found, x)
        left >>= 1
        if left:
            x = e.mul(x, x)
    return found


def _whole_division(e: E, x: Any, y: Any) -> tuple[Any, Any]:
    """⌊x / y⌋ of integers, and what it leaves of x, which has the sign of y."""
    if isinstance(y, Const):
        if y.value == 0:
            raise CannotLower("integers divided by 0, for which torch raises", "cast to a float")
        if y.value == -1:  # the least number has no opposite, and its division traps
            return e.neg(x), Const(0, "int")
    quotient = e.quotient(x, y)
    left = e.sub(x, e.mul(quotient, y))
    turned = _turned(e, left, y)
    return (e.select(turned, e.sub(quotient, 1), quotient), e.select(turned, e.add(left, y), left))


def _turned(e: E, left: Any, y: Any) -> Any:
    """Whether what is left of x by y is not 0, and has not the sign of y."""
    below = y.value < 0 if isinstance(y, Const) else e.lt(y, 0.0)
    return e.both(e.ne(left, 0.0), e.ne(e.lt(left, 0.0), below))


def _remainder(e: E, x: Any, y: Any) -> Any:
    """C's remainder, moved to the sign of y; exact, as that is."""
    if e.emitter.kind(x) == "int":
        return _whole_division(e, x, y)[1]
    left = e.fmod(x, y)
    return e.select(_turned(e, left, y), e.add(left, y), left)


def _floor_div(e: E, x: Any, y: Any) -> Any:
    """⌊x / y⌋ from x less its remainder, which a rounded quotient would miss just below a whole
    number; x / 0 is what division gives, and a 0 has the sign of the quotient."""
    if e.emitter.kind(x) == "int":
        return _whole_division(e, x, y)[0]
    left, quotient = e.fmod(x, y), e.div(x, y)
    whole = e.div(e.sub(x, left), y)
    whole = e.select(_turned(e, left, y), e.sub(whole, 1.0), whole)
    floor = e.floor(whole)
    floor = e.select(e.gt(e.sub(whole, floor), 0.5), e.add(floor, 1.0), floor)
    found = e.select(e.eq(whole, 0.0), e.mul(quotient, 0.0), floor)
    return e.select(e.eq(y, 0.0), quotient, found)


def _root(e: E, x: Any, inverse: bool) -> Any:
    """√x or 1/√x as C's pow has them: +0 for −0, and +inf for −inf."""
    root = e.add(e.sqrt(x), 0.0)
    if inverse:
        return e.select(e.eq(x, -math.inf), 0.0, e.div(1.0, root))
    return e.select(e.eq(x, -math.inf), math.inf, root)


POWERS: Mapping[float, Recipe] = {
    -1: lambda e, x: e.div(1.0, x),
    -0.5: lambda e, x: _root(e, x, inverse=True),
    0: lambda e, x: Const(1.0, "float"),
    0.5: lambda e, x: _root(e, x, inverse=False),
    1: lambda e, x: x,
    2: lambda e, x: e.mul(x, x),
    3: lambda e, x: e.mul(e.mul(x, x), x),
    4: lambda e, x: e.mul(e.mul(x, x), e.mul(x, x)),
}


RECIPES: Mapping[str, Recipe] = {
    "pow": _pow,
    "remainder": _remainder,
    "floor_div": _floor_div,
    "square": lambda e, x: e.mul(x, x),
    "sign": _sign,
    "rsqrt": lambda e, x: e.div(1.0, e.sqrt(x)),
    "reciprocal": lambda e, x: e.div(1.0, x),
    "log2": lambda e, x: e.mul(e.log(x), 1.0 / math.log(2.0)),
    "tan": lambda e, x: e.div(e.sin(x), e.cos(x)),
    "isnan": lambda e, x: e.ne(x, x) if e.emitter.kind(x) == "float" else Const(False, "bool"),
    "isinf": lambda e, x: (
        e.eq(e.abs(x), math.inf) if e.emitter.kind(x) == "float" else Const(False, "bool")
    ),
    "logical_and": lambda e, x, y: e.both(e.to_bool(x), e.to_bool(y)),
    "logical_or": lambda e, x, y: e.either(e.to_bool(x), e.to_bool(y)),
    "logical_xor": lambda e, x, y: e.ne(e.to_bool(x), e.to_bool(y)),
    "logical_not": lambda e, x: e.emitter.op("not", e.to_bool(x)),
    "where": lambda e, c, x, y: e.select(c, x, y),
    "clamp": _clamp,
    "relu": lambda e, x: e.max(x, 0.0),
    "relu6": lambda e, x: _clamp(e, x, 0.0, 6.0),
    "hardtanh": _clamp,
    "leaky_relu": lambda e, x, negative_slope: e.select(e.gt(x, 0.0), x, e.mul(x, negative_slope)),
    "sigmoid": _sigmoid,
    "log_sigmoid": lambda e, x: e.neg(_softplus(e, e.neg(x))),
    "silu": lambda e, x: e.mul(x, _sigmoid(e, x)),
    "gelu": _gelu,
    "mish": lambda e, x: e.mul(x, e.tanh(_softplus(e, x))),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda e, x: e.mul(x, _hardsigmoid(e, x)),
    "elu": lambda e, x, alpha: _elu(e, x, alpha),
    "celu": lambda e, x, alpha: _elu(e, x, alpha, 1.0, 1.0 / alpha),
    "selu": lambda e, x: _elu(e, x, 1.6732632423543772, 1.0507009873554805),
    "softsign": lambda e, x: e.div(x, e.add(1.0, e.abs(x))),
    "tanhshrink": _tanhshrink,
    "softshrink": lambda e, x, lambd: _shrink(e, x, lambd, soft=True),
    "hardshrink": lambda e, x, lambd: _shrink(e, x, lambd, soft=False),
    "threshold": lambda e, x, threshold, value: e.select(
        e.gt(x, threshold), x, e.select(e.ne(x, x), x, value)
    ),
    "softplus": lambda e, x, beta, threshold: e.select(
        e.gt(e.mul(x, beta), threshold), x, e.div(_softplus(e, e.mul(x, beta)), beta)
    ),
}
"""Operator → its formula. Primitives under the same name need no entry."""
