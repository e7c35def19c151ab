"""Arithmetic, comparison and choice: one result element from the same element of each input.

Types promote as in PyTorch; shapes broadcast; the result keeps the memory order of the first
input that has the full shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deuteron.errors import GraphError
from deuteron.ir.dtype import DType, bool_, dtype, float32
from deuteron.ir.types import TensorType
from deuteron.ops.emit import Ops, Sym
from deuteron.ops.opdef import Attr, Fusion, OpDef, Vjp, broadcast, elementwise_flops, promoted
from deuteron.ops.samples import Arg, Sample, unary_samples

Grad = Callable[[Ops, Vjp], Sym]


def result_type(dt: DType, *types: TensorType | None) -> TensorType:
    """The broadcast result over ``types`` in element type ``dt``."""
    present = [t for t in types if t is not None]
    shape = broadcast(*(t.shape for t in present))
    for t in present:
        if t.shape == shape and 0 not in t.strides[:1]:
            return t.dense_like(shape, dt)
    return present[0].dense_like(shape, dt)


def _floating(name: str, dt: DType) -> DType:
    """Integers and booleans become float32 in functions that only make sense on reals."""
    return dt if dt.is_float else float32


def ndtr(x: torch.Tensor) -> torch.Tensor:
    """Φ(x). PyTorch's 1 + erf loses its digits below −4: in float64, in which it has to be exact,
    through erfc. 16-bit floats it does not take."""
    if x.dtype == torch.float64:
        return torch.erfc(x * -math.sqrt(0.5)) * 0.5
    out: torch.Tensor = torch.special.ndtr(x.float())
    return out.to(x.dtype) if x.dtype.is_floating_point else out


# ---- one input ---------------------------------------------------------------------------

_UNARY: tuple[tuple[str, Callable[..., Any], Grad | None, float, str, str], ...] = (
    # name, reference, gradient, operations per element, sample data, what it is
    ("neg", torch.neg, lambda b, v: -v.grad, 1, "normal", "−x"),
    ("abs", torch.abs, lambda b, v: v.grad * b.sign(v.arg(0)), 1, "away", "|x|"),
    ("sign", torch.sign, None, 1, "away", "−1, 0 or 1"),
    ("square", torch.square, lambda b, v: v.grad * v.arg(0) * 2.0, 1, "normal", "x²"),
    ("exp", torch.exp, lambda b, v: v.grad * v.outs[0], 8, "normal", "eˣ"),
    ("exp2", torch.exp2, lambda b, v: v.grad * v.outs[0] * math.log(2.0), 8, "normal", "2ˣ"),
    ("expm1", torch.expm1, lambda b, v: v.grad * (v.outs[0] + 1.0), 10, "normal", "eˣ − 1"),
    ("log", torch.log, lambda b, v: v.grad / v.arg(0), 8, "positive", "ln x"),
    ("log2", torch.log2, lambda b, v: v.grad / (v.arg(0) * math.log(2.0)), 8, "positive", "log₂ x"),
    ("log1p", torch.log1p, lambda b, v: v.grad / (v.arg(0) + 1.0), 10, "positive", "ln(1 + x)"),
    ("sqrt", torch.sqrt, lambda b, v: v.grad * 0.5 / v.outs[0], 4, "positive", "√x"),
    (
        "rsqrt",
        torch.rsqrt,
        lambda b, v: v.grad * -0.5 * v.outs[0] * v.outs[0] * v.outs[0],
        4,
        "positive",
        "1/√x",
    ),
    (
        "reciprocal",
        torch.reciprocal,
        lambda b, v: -v.grad * v.outs[0] * v.outs[0],
        4,
        "away",
        "1/x",
    ),
    ("sin", torch.sin, lambda b, v: v.grad * b.cos(v.arg(0)), 10, "normal", "sin x"),
    ("cos", torch.cos, lambda b, v: -v.grad * b.sin(v.arg(0)), 10, "normal", "cos x"),
    ("tan", torch.tan, lambda b, v: v.grad * (b.square(v.outs[0]) + 1.0), 14, "unit", "tan x"),
    (
        "erf",
        torch.erf,
        lambda b, v: v.grad * b.exp(-b.square(v.arg(0))) * (2.0 / math.sqrt(math.pi)),
        12,
        "normal",
        "the error function",
    ),
    (
        "ndtr",
        ndtr,
        lambda b, v: v.grad * b.exp(b.square(v.arg(0)) * -0.5) * (1.0 / math.sqrt(2.0 * math.pi)),
        14,
        "normal",
        "Φ(x), the normal distribution",
    ),
    ("floor", torch.floor, None, 1, "normal", "largest integer ≤ x"),
    ("ceil", torch.ceil, None, 1, "normal", "smallest integer ≥ x"),
    ("round", torch.round, None, 1, "normal", "nearest integer, ties to even"),
    ("trunc", torch.trunc, None, 1, "normal", "x without its fraction"),
)

_KEEPS_INT = {"neg", "abs", "sign", "square", "floor", "ceil", "round", "trunc"}


def _unary_infer(name: str) -> Callable[..., TensorType]:
    def infer(x: TensorType) -> TensorType:
        if x.dtype == bool_ and name in _KEEPS_INT:
            raise GraphError(
                f"{name} is not defined on bool", remedy='cast first: cast(x, dtype="i32")'
            )
        return x.dense_like(dt=x.dtype if name in _KEEPS_INT else _floating(name, x.dtype))

    return infer


def _unary_vjp(grad: Grad | None) -> Callable[[Ops, Vjp], list[Sym | None]] | None:
    """No rule means the derivative is zero almost everywhere (sign, floor …)."""
    if grad is None:
        return lambda b, v: [b.zeros(v.arg(0).type)]
    return lambda b, v: [b.to(grad(b, v), v.arg(0).dtype)]


UNARY = tuple(
    OpDef(
        name=name,
        doc=f"{doc}, elementwise.",
        inputs=("x",),
        infer=_unary_infer(name),
        reference=fn,
        fusion=Fusion.ELEMENTWISE,
        vjp=_unary_vjp(grad),
        flops=elementwise_flops(flops),
        samples=partial(unary_samples, kind),
    )
    for name, fn, grad, flops, kind, doc in _UNARY
)

# ---- two inputs ----------------------------------------------------------------------------


def _binary_infer(name: str) -> Callable[..., TensorType]:
    def infer(x: TensorType, y: TensorType) -> TensorType:
        dt = promoted(x, y)
        if name in ("div", "atan2"):
            dt = _floating(name, dt)
        if name == "sub" and bool_ in (x.dtype, y.dtype):
            raise GraphError("sub is not defined on bool", remedy="use logical_xor or ne")
        if name in ("pow", "remainder", "floor_div") and dt == bool_:
            raise GraphError(f"{name} is not defined on bool", remedy='cast(x, dtype="i64") first')
        return result_type(dt, x, y)

    return infer


def _both(gx: Grad, gy: Grad) -> Callable[[Ops, Vjp], list[Sym | None]]:
    def vjp(b: Ops, v: Vjp) -> list[Sym | None]:
        return [
            b.unbroadcast(g(b, v), v.arg(i).type) if v.needs[i] else None
            for i, g in enumerate((gx, gy))
        ]

    return vjp


def _tie(b: Ops, v: Vjp, side: int) -> Sym:
    """max and min split the gradient where both inputs are equal, as PyTorch does."""
    x, y = v.arg(0), v.arg(1)
    mine = b.to(b.eq(v.arg(side), v.outs[0]), v.grad.dtype)
    return v.grad * mine * b.one("where", b.eq(x, y), 0.5, 1.0)


def _pow_dx(b: Ops, v: Vjp) -> Sym:
    x, y = v.arg(0), v.arg(1)
    return b.one("where", b.eq(y, 0.0), 0.0, v.grad * y * b.pow(x, y - 1.0))


def _pow_dy(b: Ops, v: Vjp) -> Sym:
    x = v.arg(0)
    safe = b.where(b.eq(x, 0.0), 1.0, x)
    return b.one("where", b.eq(x, 0.0), 0.0, v.grad * v.outs[0] * b.log(safe))


_BINARY: tuple[tuple[str, Callable[..., Any], Grad | None, Grad | None, float, str, str, str], ...]
_BINARY = (
    # name, reference, gradient of x and of y, operations, sample data for x and y, what it is
    ("add", torch.add, lambda b, v: v.grad, lambda b, v: v.grad, 1, "normal", "normal", "x + y"),
    ("sub", torch.sub, lambda b, v: v.grad, lambda b, v: -v.grad, 1, "normal", "normal", "x − y"),
    (
        "mul",
        torch.mul,
        lambda b, v: v.grad * v.arg(1),
        lambda b, v: v.grad * v.arg(0),
        1,
        "normal",
        "normal",
        "x · y",
    ),
    (
        "div",
        torch.div,
        lambda b, v: v.grad / v.arg(1),
        lambda b, v: -v.grad * v.arg(0) / b.square(v.arg(1)),
        4,
        "normal",
        "away",
        "x / y",
    ),
    ("pow", torch.pow, _pow_dx, _pow_dy, 20, "positive", "normal", "x to the power y"),
    (
        "maximum",
        torch.maximum,
        lambda b, v: _tie(b, v, 0),
        lambda b, v: _tie(b, v, 1),
        1,
        "distinct",
        "distinct",
        "the larger of x and y; nan wins",
    ),
    (
        "minimum",
        torch.minimum,
        lambda b, v: _tie(b, v, 0),
        lambda b, v: _tie(b, v, 1),
        1,
        "distinct",
        "distinct",
        "the smaller of x and y; nan wins",
    ),
    (
        "remainder",
        torch.remainder,
        lambda b, v: v.grad,
        lambda b, v: -v.grad * b.floor(v.arg(0) / v.arg(1)),
        6,
        "normal",
        "positive",
        "what is left of x after whole multiples of y, with the sign of y",
    ),
    ("floor_div", torch.floor_divide, None, None, 6, "normal", "positive", "⌊x / y⌋"),
    (
        "atan2",
        torch.atan2,
        lambda b, v: v.grad * v.arg(1) / (b.square(v.arg(0)) + b.square(v.arg(1))),
        lambda b, v: -v.grad * v.arg(0) / (b.square(v.arg(0)) + b.square(v.arg(1))),
        20,
        "away",
        "away",
        "the angle of the point (y, x)",
    ),
)


def _zero(side: int) -> Grad:
    return lambda b, v: b.zeros(v.outs[0].type)


def _binary_samples(kx: str, ky: str) -> tuple[Sample, ...]:
    def pair(sx: tuple[int, ...], sy: tuple[int, ...], **how: Any) -> Sample:
        return Sample((Arg(sx, kx, **how), Arg(sy, ky)))

    extreme = kx not in ("positive",)
    return (
        pair((3, 5), (3, 5)),
        pair((3, 5), (5,)),
        pair((2, 1, 4), (3, 1)),
        pair((3, 5), ()),
        pair((), ()),
        pair((0, 3), (1, 3)),
        pair((4, 5), (4, 1), layout="transposed"),
        pair((4, 5), (4, 5), layout="sliced"),
        pair((2, 3, 4, 5), (2, 3, 4, 5), layout="nhwc"),
        pair((2, 3, 4, 5), (3, 1, 1), layout="nhwc"),
        Sample((Arg((33,), "extreme"), Arg((33,), "extreme")), grad=False, note="extreme")
        if extreme
        else pair((7,), (7,)),
    )


BINARY = tuple(
    OpDef(
        name=name,
        doc=f"{doc}, elementwise with broadcasting.",
        inputs=("x", "y"),
        infer=_binary_infer(name),
        reference=fn,
        fusion=Fusion.BROADCAST,
        vjp=_both(gx or _zero(0), gy or _zero(1)),
        flops=elementwise_flops(flops),
        samples=partial(_binary_samples, kx, ky),
    )
    for name, fn, gx, gy, flops, kx, ky, doc in _BINARY
)

# ---- comparisons and logic: bool results, no gradient ----------------------------------------


def _bool_infer(*types: TensorType) -> TensorType:
    return result_type(bool_, *types)


def _no_grad(b: Ops, v: Vjp) -> list[Sym | None]:
    return [None] * len(v.ins)


COMPARE = tuple(
    OpDef(
        name=name,
        doc=f"{doc}, elementwise; the result is bool.",
        inputs=("x", "y") if two else ("x",),
        infer=_bool_infer,
        reference=fn,
        fusion=Fusion.BROADCAST if two else Fusion.ELEMENTWISE,
        vjp=_no_grad,
        samples=(lambda: _binary_samples("normal", "normal")) if two else unary_samples,
    )
    for name, fn, two, doc in (
        ("eq", torch.eq, True, "x = y"),
        ("ne", torch.ne, True, "x ≠ y"),
        ("lt", torch.lt, True, "x < y"),
        ("le", torch.le, True, "x ≤ y"),
        ("gt", torch.gt, True, "x > y"),
        ("ge", torch.ge, True, "x ≥ y"),
        ("logical_and", torch.logical_and, True, "x and y"),
        ("logical_or", torch.logical_or, True, "x or y"),
        ("logical_xor", torch.logical_xor, True, "either x or y"),
        ("logical_not", torch.logical_not, False, "not x"),
        ("isnan", torch.isnan, False, "whether x is nan"),
        ("isinf", torch.isinf, False, "whether x is ±infinity"),
    )
)

# ---- where, clamp, cast ------------------------------------------------------------------------


def _where_infer(condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
    if condition.dtype != bool_:
        raise GraphError(
            f"the condition of where is {condition.dtype.name}, not bool",
            remedy="compare first, e.g. ne(c, 0)",
        )
    dt = promoted(x, y)
    return result_type(dt, condition, x, y)


def _where_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    cond, grad = v.arg(0), v.grad
    gx = b.unbroadcast(b.where(cond, grad, 0.0), v.arg(1).type) if v.needs[1] else None
    gy = b.unbroadcast(b.where(cond, 0.0, grad), v.arg(2).type) if v.needs[2] else None
    return [None, gx, gy]


WHERE = OpDef(
    name="where",
    doc="x where the condition holds, else y; elementwise with broadcasting.",
    inputs=("condition", "x", "y"),
    infer=_where_infer,
    reference=torch.where,
    fusion=Fusion.BROADCAST,
    vjp=_where_vjp,
    samples=lambda: (
        Sample((Arg((3, 5), "bool"), Arg((3, 5)), Arg((3, 5)))),
        Sample((Arg((3, 1), "bool"), Arg((5,)), Arg(()))),
        Sample((Arg((0,), "bool"), Arg((0,)), Arg((1,)))),
        Sample((Arg((4,), "bool"), Arg((4,), "extreme"), Arg((4,), "extreme")), grad=False),
        Sample((Arg((2, 3, 4, 5), "bool"), Arg((2, 3, 4, 5), layout="nhwc"), Arg((3, 1, 1)))),
    ),
)


def _clamp_infer(x: TensorType, min: float | None, max: float | None) -> TensorType:
    if min is None and max is None:
        raise GraphError("clamp needs min, max or both", remedy="e.g. clamp(x, min=0.0)")
    if x.dtype == bool_:
        raise GraphError("clamp is not defined on bool")
    if not x.dtype.is_float and any(b is not None and b != int(b) for b in (min, max)):
        raise GraphError("clamp of integers needs whole bounds", remedy="cast to a float first")
    return x.dense_like()


def _clamp_reference(x: torch.Tensor, min: float | None, max: float | None) -> torch.Tensor:
    if not x.is_floating_point():
        min = None if min is None else int(min)
        max = None if max is None else int(max)
    return torch.clamp(x, min, max)


def _clamp_vjp(b: Ops, v: Vjp) -> list[Sym | None]:
    x, keep = v.arg(0), None
    for bound, compare in ((v.attrs["min"], b.ge), (v.attrs["max"], b.le)):
        if bound is not None:
            inside = compare(x, bound)
            keep = inside if keep is None else b.logical_and(keep, inside)
    return [b.where(keep, v.grad, 0.0)]


CLAMP = OpDef(
    name="clamp",
    doc="x held between min and max; nan stays nan.",
    inputs=("x",),
    attrs={"min": Attr("float", None, "lower bound"), "max": Attr("float", None, "upper bound")},
    infer=_clamp_infer,
    reference=_clamp_reference,
    fusion=Fusion.ELEMENTWISE,
    vjp=_clamp_vjp,
    flops=elementwise_flops(2),
    samples=lambda: (
        *unary_samples("distinct", {"min": -0.53, "max": 0.72}),
        *unary_samples("distinct", {"min": 0.01})[:2],
        *unary_samples("distinct", {"max": 0.01})[:1],
    ),
)


def _cast_infer(x: TensorType, dtype: str) -> TensorType:
    return x.dense_like(dt=_dtype(dtype))


def _cast_reference(x: torch.Tensor, dtype: str) -> torch.Tensor:
    return x.to(_dtype(dtype).torch, copy=True)


_dtype = dtype

CAST = OpDef(
    name="cast",
    doc="x in another element type, rounded to nearest even.",
    inputs=("x",),
    attrs={"dtype": Attr("dtype", doc="the element type wanted, e.g. 'f16'")},
    infer=_cast_infer,
    reference=_cast_reference,
    fusion=Fusion.ELEMENTWISE,
    vjp=lambda b, v: [
        b.to(v.grad, v.arg(0).dtype) if v.arg(0).dtype.is_float and v.grad.dtype.is_float else None
    ],
    samples=lambda: (
        Sample((Arg((3, 5)),), {"dtype": "f32"}),
        Sample((Arg((3, 5), dtype="f32"),), {"dtype": "f16"}, grad=False),
        Sample((Arg((3, 5), dtype="f32"),), {"dtype": "bf16"}, grad=False),
        Sample((Arg((3, 5), dtype="i32"),), {"dtype": "f32"}, grad=False),
        Sample((Arg((3, 5), "bool"),), {"dtype": "i64"}, grad=False),
        Sample((Arg((7,), dtype="f32"),), {"dtype": "i32"}, grad=False),
        Sample((Arg((2, 3, 4, 5), layout="nhwc", dtype="f32"),), {"dtype": "f64"}, grad=False),
    ),
)

OPS = (*UNARY, *BINARY, *COMPARE, WHERE, CLAMP, CAST)
