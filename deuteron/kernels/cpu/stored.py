"""Numbers as they lie in memory: float32, float16 or bfloat16 there, float32 in registers.

A 16-bit number is widened when it is loaded, which is exact, and rounded once when it is stored,
to nearest even; arithmetic never sees the narrow type. float16 needs the machine's conversions
(every aarch64, x86-64 with F16C); bfloat16 is done by shifts, on any machine.
"""

from deuteron.codegen import llvm_text as ir
from deuteron.codegen.llvm import F32, I32, VOID, Code, Value, lanes_of, vec
from deuteron.codegen.llvm_compute import I16, STORED, Registers
from deuteron.ir.dtype import dtype


class Stored(Registers):
    """Loads and stores of one element type in one function."""

    float = F32

    def __init__(self, c: Code, short: str) -> None:
        self.c, self.dtype, self.kind = c, dtype(short), STORED[short]
        self.bytes = self.dtype.bits // 8

    def at(self, base: Value, *offset: int | Value) -> Value:
        return self.c.at(base, *offset, of=self.kind)

    def load(self, where: Value, lanes: int = 1, mask: Value | None = None) -> Value:
        """Load ``lanes`` numbers; with a ``mask`` only those it selects, and 0 in the other
        lanes."""
        kind = vec(lanes, self.kind)
        if mask is None:
            raw = self.c.b.load(where, typ=kind, align=self.bytes)
        else:
            rest = ir.Constant(I32, self.bytes), mask, ir.Constant(kind, None)
            raw = self.c.outside(f"llvm.masked.load.{self._named(lanes)}", kind, where, *rest)
        return self.from_memory(raw, self.dtype)

    def store(self, value: Value, where: Value, mask: Value | None = None) -> None:
        raw = self.to_memory(value, self.dtype)
        if mask is None:
            self.c.b.store(raw, where, align=self.bytes)
        else:
            name = f"llvm.masked.store.{self._named(lanes_of(raw))}"
            self.c.outside(name, VOID, raw, where, ir.Constant(I32, self.bytes), mask)

    def first(self, count: Value, lanes: int) -> Value:
        """Return the mask of the first ``count`` lanes; of none if it is negative. With it no byte
        of the other lanes is touched, at no cost where :func:`deuteron.codegen.llvm.has_masks`."""
        most = self.c.splat(self.c.b.trunc(count, I32), lanes)
        return self.c.b.icmp_signed("<", ir.Constant(vec(lanes, I32), list(range(lanes))), most)

    def _named(self, lanes: int) -> str:
        return f"v{lanes}{'i' if self.kind is I16 else 'f'}{8 * self.bytes}.p0"
