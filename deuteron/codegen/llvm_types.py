"""Between memory and registers on the CPU: element types widen on load and round on store."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from deuteron.codegen import llvm
from deuteron.codegen.llvm import F32, F64, I8, I32, I64, Code, Value, vec
from deuteron.ir.dtype import DType

I1, I16, HALF = ir.IntType(1), ir.IntType(16), ir.HalfType()
STORED = {"f64": F64, "f32": F32, "f16": HALF, "bf16": I16, "i64": I64, "i32": I32, "i16": I16}
STORED |= dict.fromkeys(("i8", "u8", "bool"), I8)


class Registers:
    """Conversions that need nothing but the code being written and the arithmetic type."""

    c: Code
    float: Any

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
            up = b.shl(b.zext(raw, vec(lanes, I32)), self.splat(ir.Constant(I32, 16), lanes))
            raw = b.bitcast(up, vec(lanes, F32))
        if dt.is_float:
            here = raw.type.element if lanes > 1 else raw.type
            return (
                raw
                if here == self.float
                else (b.fptrunc if here == F64 else b.fpext)(raw, vec(lanes, self.float))
            )
        if dt.kind == "bool":
            return b.icmp_unsigned("!=", raw, self.splat(ir.Constant(I8, 0), lanes))
        if dt.short == "i64":
            return raw
        return (b.zext if dt.kind == "uint" else b.sext)(raw, vec(lanes, I64))

    def to_memory(self, value: Value, dt: DType) -> Value:
        b, lanes = self.c.b, llvm.lanes_of(value)
        if dt.kind == "bool":
            return b.zext(value, vec(lanes, I8))
        if not dt.is_float:
            return value if dt.short == "i64" else b.trunc(value, vec(lanes, STORED[dt.short]))
        here = value.type.element if lanes > 1 else value.type
        if dt.short == "bf16":
            return self._bf16(value if here == F32 else b.fptrunc(value, vec(lanes, F32)))
        want = STORED[dt.short]
        if here == want:
            return value
        wider = want == F64
        return (b.fpext if wider else b.fptrunc)(value, vec(lanes, want))

    def upper_half(self, x: Value) -> Value:
        """A float32 that is a bfloat16 number, as one."""
        b, lanes = self.c.b, llvm.lanes_of(x)
        bits = b.bitcast(x, vec(lanes, I32))
        upper = b.lshr(bits, self.splat(ir.Constant(I32, 16), lanes))
        return b.trunc(upper, vec(lanes, I16))

    def _bf16(self, x: Value) -> Value:
        """Round to nearest even by hand; nan stays a quiet nan."""
        b, lanes = self.c.b, llvm.lanes_of(x)

        def k(n: int) -> Value:
            return self.splat(ir.Constant(I32, n), lanes)

        bits = b.bitcast(x, vec(lanes, I32))
        odd = b.lshr(b.shl(bits, k(15)), k(31))  # which ARM shifts and adds at once
        rounded = b.add(b.add(bits, k(0x7FFF)), odd)
        quiet = b.or_(bits, k(0x400000))
        chosen = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
        return b.trunc(b.lshr(chosen, k(16)), vec(lanes, I16))
