"""Numbers as they lie in memory: float32, float16 or bfloat16 there, float32 in registers.

A 16-bit number is widened when it is loaded, which is exact, and rounded once when it is stored,
to nearest even; arithmetic never sees the narrow type. float16 needs the machine's conversions
(every aarch64, x86-64 with F16C); bfloat16 is done by shifts, on any machine.
"""

from deuteron.codegen.llvm import F32, Code, Value, vec
from deuteron.codegen.llvm_compute import STORED, Registers
from deuteron.ir.dtype import dtype


class Stored(Registers):
    """Loads and stores of one element type in one function."""

    float = F32

    def __init__(self, c: Code, short: str) -> None:
        self.c, self.dtype, self.kind = c, dtype(short), STORED[short]
        self.bytes = self.dtype.bits // 8

    def at(self, base: Value, *offset: int | Value) -> Value:
        return self.c.at(base, *offset, of=self.kind)

    def load(self, where: Value, lanes: int = 1) -> Value:
        raw = self.c.b.load(where, typ=vec(lanes, self.kind), align=self.bytes)
        return self.from_memory(raw, self.dtype)

    def store(self, value: Value, where: Value) -> None:
        self.c.b.store(self.to_memory(value, self.dtype), where, align=self.bytes)
