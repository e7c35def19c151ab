"""One scalar operation in LLVM IR: conversions from and to memory, arithmetic and functions.

Element types widen on load and round on store. The tables say which instruction, intrinsic or
polynomial an operation of a scalar program is, for floats and for whole numbers; loops and
addresses are the renderer's.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from deuteron.codegen import llvm, llvm_math
from deuteron.codegen import llvm_text as ir
from deuteron.codegen.llvm import F32, F64, I8, I32, I64, Code, Value, constant, element_of, vec
from deuteron.ir.dtype import DType, dtype
from deuteron.ops.formula import Arg, Compute, Const, Traced

I1, I16, HALF = ir.I1, ir.I16, ir.F16
STORED = {"f64": F64, "f32": F32, "f16": HALF, "bf16": I16, "i64": I64, "i32": I32, "i16": I16}
STORED |= dict.fromkeys(("i8", "u8", "bool"), I8)


class Registers:
    """Conversions that need nothing but the code being written and the arithmetic type."""

    float: Any = F32

    def __init__(self, c: Code) -> None:
        self.c = c

    def lanes(self, value: Value, lanes: int) -> Value:
        return value if llvm.lanes_of(value) == lanes or lanes == 1 else self.splat(value, lanes)

    def splat(self, value: Value, lanes: int) -> Value:
        if lanes == 1:
            return value
        if isinstance(value, ir.Constant):
            return ir.Constant(vec(lanes, value.type), [value] * lanes)
        return self.c.splat(value, lanes)

    def from_memory(self, raw: Value, dt: DType) -> Value:
        b, lanes = self.c.b, llvm.lanes_of(raw)
        if dt.short == "bf16":
            up = b.shl(b.zext(raw, vec(lanes, I32)), constant(I32, 16, lanes))
            raw = b.bitcast(up, vec(lanes, F32))
        if dt.is_float:
            return self.of_width(raw, self.float)
        if dt.kind == "bool":
            return b.icmp_unsigned("!=", raw, constant(I8, 0, lanes))
        if dt.short == "i64":
            return raw
        return (b.zext if dt.kind == "uint" else b.sext)(raw, vec(lanes, I64))

    def to_memory(self, value: Value, dt: DType) -> Value:
        b, lanes = self.c.b, llvm.lanes_of(value)
        if dt.kind == "bool":
            return b.zext(value, vec(lanes, I8))
        if not dt.is_float:
            return value if dt.short == "i64" else b.trunc(value, vec(lanes, STORED[dt.short]))
        if dt.short == "bf16":
            return self._bf16(self.of_width(value, F32))
        return self.of_width(value, STORED[dt.short])

    def of_width(self, x: Value, kind: Any) -> Value:
        """Convert a float to another type. Between float64 and float16 it goes through float32, as
        in torch: x86-64 has no instruction for both steps, and LLVM would call a function for them
        that is in no library here."""
        here, widths = element_of(x), (HALF, F32, F64)
        if here == kind:
            return x
        if {here, kind} == {HALF, F64}:
            return self.of_width(self.of_width(x, F32), kind)
        wider = widths.index(kind) > widths.index(here)
        return (self.c.b.fpext if wider else self.c.b.fptrunc)(x, vec(llvm.lanes_of(x), kind))

    def upper_half(self, x: Value) -> Value:
        """Convert a float32 that a bfloat16 can hold exactly to that type."""
        b, lanes = self.c.b, llvm.lanes_of(x)
        bits = b.bitcast(x, vec(lanes, I32))
        upper = b.lshr(bits, constant(I32, 16, lanes))
        return b.trunc(upper, vec(lanes, I16))

    def _bf16(self, x: Value) -> Value:
        """Round to nearest even by hand; nan stays a quiet nan."""
        b, lanes, k = self.c.b, llvm.lanes_of(x), partial(constant, I32, lanes=x)
        bits = b.bitcast(x, vec(lanes, I32))
        odd = b.lshr(b.shl(bits, k(15)), k(31))  # ARM does this shift and the addition at once
        rounded = b.add(b.add(bits, k(0x7FFF)), odd)
        quiet = b.or_(bits, k(0x400000))
        chosen = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
        return b.trunc(b.lshr(chosen, k(16)), vec(lanes, I16))


# ---- arithmetic

COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _expm1(c: Code, x: Value) -> Value:
    """eˣ − 1. Above 40 the 1 is lost in rounding anyway, and exp handles overflow."""
    limit = c.f(40.0, llvm.lanes_of(x))
    small = llvm_math.expm1(c, c.fmin(x, limit))
    return c.b.select(c.b.fcmp_ordered(">", x, limit), llvm_math.exp(c, x), small)


def _function(name: str, narrow: Callable[[Code, Value], Value]) -> Callable[[Code, Value], Value]:
    """The polynomial in float32, the C library in float64."""

    def emit(c: Code, x: Value) -> Value:
        return llvm_math.library(c, name, x) if element_of(x) == F64 else narrow(c, x)

    return emit


def _ndtr(c: Code, x: Value) -> Value:
    """Φ(x); in float64 erfc(−x/√2) / 2 by the C library."""
    if element_of(x) == F32:
        return llvm_math.ndtr(c, x)
    found = llvm_math.library(c, "erfc", c.b.fmul(x, constant(F64, -math.sqrt(0.5), x)))
    return c.b.fmul(found, constant(F64, 0.5, x))


def _instruction(name: str) -> Callable[..., Value]:
    return lambda c, *args: getattr(c.b, name)(*args)


def _intrinsic(name: str) -> Callable[..., Value]:
    return lambda c, *args: c.intrinsic(name, *args)


def _pick(order: str) -> Callable[..., Value]:
    return lambda c, x, y: c.b.select(c.b.icmp_signed(order, x, y), x, y)


NARROW = {**llvm_math.FUNCTIONS, "expm1": _expm1, "log1p": llvm_math.log1p}
FLOAT: dict[str, Callable[..., Value]] = {
    **{name: _instruction(f"f{name}") for name in "add sub mul div neg".split()},
    **{name: _intrinsic(name) for name in "sqrt floor ceil trunc".split()},
    "maximum": lambda c, x, y: c.fmax(x, y),
    "minimum": lambda c, x, y: c.fmin(x, y),
    "abs": _intrinsic("fabs"),
    "fma": _intrinsic("fma"),
    "round": _intrinsic("rint"),
    **{name: _function(name, narrow) for name, narrow in NARROW.items()},
    **{n: lambda c, *a, n=n: llvm_math.library(c, n, *a) for n in "pow fmod atan2".split()},
    "ndtr": _ndtr,
}
ANY = {"select": _instruction("select"), "not": _instruction("not_")}
ANY |= {"and": _instruction("and_"), "or": _instruction("or_")}
INTEGER: dict[str, Callable[..., Value]] = {
    **{name: _instruction(name) for name in "add sub mul neg".split()},
    "abs": lambda c, x: c.b.select(c.b.icmp_signed("<", x, x.type(None)), c.b.neg(x), x),
    "maximum": _pick(">"),
    "minimum": _pick("<"),
    "quotient": _instruction("sdiv"),
    "power": llvm_math.power,
}


class Arithmetic(Registers):
    """Scalar operations over registers of any number of lanes."""

    def number(self, value: float | int | bool, kind: str) -> Value:
        if kind == "float":
            return ir.Constant(self.float, float(value))
        return ir.Constant(I1 if kind == "bool" else I64, int(value))

    def type_of(self, kind: str) -> Any:
        return {"float": self.float, "int": I64, "bool": I1}[kind]

    def compute(self, s: Compute, args: list[Value]) -> Value:
        b = self.c.b
        if s.op == "random":
            seed, where = args
            return llvm_math.random(self.c, seed, where, far=dict(s.attrs)["far"])
        if s.op in ("rounded", "wrapped"):
            kind = dtype(dict(s.attrs)["dtype"])
            return self.from_memory(self.to_memory(args[0], kind), kind)
        scalar = element_of(args[-1])
        is_float = scalar in (F32, F64)
        if s.op in COMPARE:
            if is_float:
                return (b.fcmp_unordered if s.op == "ne" else b.fcmp_ordered)(COMPARE[s.op], *args)
            return (b.icmp_unsigned if scalar == I1 else b.icmp_signed)(COMPARE[s.op], *args)
        if s.op in ANY:
            return ANY[s.op](self.c, *args)
        if s.op in ("to_float", "to_int", "to_bool"):
            return self._convert(args[0], s.op, scalar)
        return (FLOAT if is_float else INTEGER)[s.op](self.c, *args)

    def _convert(self, x: Value, op: str, scalar: Any) -> Value:
        b, lanes = self.c.b, llvm.lanes_of(x)
        is_float = scalar in (F32, F64)
        if op == "to_bool":
            zero = constant(scalar, 0.0 if is_float else 0, lanes)
            return b.fcmp_unordered("!=", x, zero) if is_float else b.icmp_signed("!=", x, zero)
        if op == "to_float":
            if is_float:
                return x
            make = b.uitofp if scalar == I1 else b.sitofp
            return make(x, vec(lanes, self.float))
        if is_float:
            return self._whole(x)
        return b.zext(x, vec(lanes, I64)) if scalar == I1 else x

    def _whole(self, x: Value) -> Value:
        """Round towards zero to 64 bits; what does not fit becomes the nearest bound, and nan 0."""
        kind = "f64" if element_of(x) == F64 else "f32"
        name = f"llvm.fptosi.sat.{llvm.many(x)}i64.{llvm.many(x)}{kind}"
        return self.c.outside(name, vec(llvm.lanes_of(x), I64), x)


def inline(c: Code, formula: Traced, *values: Value) -> Value:
    """Write the code of a formula of float32 values where ``c`` is, and return its result."""
    math, lanes = Arithmetic(c), llvm.lanes_of(values[0])
    known: dict[Arg, Value] = dict(zip(formula.inputs, values, strict=True))

    def value(a: Arg) -> Value:
        return math.splat(math.number(a.value, a.kind), lanes) if isinstance(a, Const) else known[a]

    for s in formula.statements:
        known[s.name] = math.compute(s, [value(a) for a in s.args])
    return value(formula.result)
