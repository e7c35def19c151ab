"""y = act(x + residual), applied to a product while it is in registers.

Its memory traffic is the residual, read once; without a fused epilogue the product would be
written and read again for each of its steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deuteron.codegen.llvm import Code, Value
from deuteron.codegen.llvm_math import ACTIVATIONS

CHEAP = ("none", "relu", "relu6", "clamp", "hardtanh", "leaky_relu")


@dataclass(frozen=True)
class Epilogue:
    """What happens to a product before it is stored. ``key`` names kernels that share it."""

    residual: bool = False
    act: str = "none"
    attrs: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(residual: bool, act: str, attrs: Mapping[str, Any]) -> Epilogue:
        if act in ("relu6", "clamp", "hardtanh"):  # one kernel for all that hold within bounds
            low, high = (0.0, 6.0) if act == "relu6" else (attrs["min"], attrs["max"])
            return Epilogue(residual, "clamp", (("max", high), ("min", low)))
        return Epilogue(residual, act, tuple(sorted(attrs.items())))

    @property
    def key(self) -> str:
        return f"{'residual ' if self.residual else ''}{self.act}{list(self.attrs)!r}"

    @property
    def heavy(self) -> bool:
        """Whether the code is long enough to be written once, in a loop, and not per register."""
        return self.act not in CHEAP

    def emit(self, c: Code, x: Value, residual: Value | None) -> Value:
        if residual is not None:
            x = c.b.fadd(x, residual)
        return x if self.act == "none" else ACTIVATIONS[self.act](c, x, dict(self.attrs))
