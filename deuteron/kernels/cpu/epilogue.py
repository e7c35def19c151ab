"""y = act(x + residual), applied to a product while it is in registers.

Its memory traffic is the residual, read once; without a fused epilogue the product would be
written and read again for each of its steps.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deuteron.codegen.llvm import Code, Value
from deuteron.codegen.llvm_compute import inline
from deuteron.ops.formula import Traced, trace_op

CHEAP = 3.0  # a formula with up to this many operations is written out for each register


@dataclass(frozen=True)
class Epilogue:
    """What happens to a product before it is stored: an operator with a formula, or none."""

    residual: bool = False
    act: str = "none"
    attrs: tuple[tuple[str, Any], ...] = ()

    @cached_property
    def formula(self) -> Traced | None:
        return None if self.act == "none" else trace_op(self.act, dict(self.attrs))

    @property
    def key(self) -> str:
        """A name for kernels: says what is computed, so that equal formulas share a kernel."""
        return f"{'residual ' if self.residual else ''}{self.formula}"

    @property
    def heavy(self) -> bool:
        """Whether the code is so long that it is written once, in a loop, and not per register."""
        return self.formula is not None and self.formula.flops > CHEAP

    def emit(self, c: Code, x: Value, residual: Value | None) -> Value:
        if residual is not None:
            x = c.b.fadd(x, residual)
        return x if self.formula is None else inline(c, self.formula, x)
