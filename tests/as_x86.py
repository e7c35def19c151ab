"""The instruction of x86-64 that adds up products of bytes, written out for any machine."""

import pytest

from deuteron.codegen import dots, llvm
from deuteron.kernels.cpu import int8_matmul as bytes_


class AsX86(dots.Dots):
    """The instruction of x86-64, written out for any machine."""

    def add(self, c, total, x, w, signed=True):
        wide = llvm.vec(4 * self.lanes, llvm.I32)
        left, right = (c.b.bitcast(v, llvm.vec(4 * self.lanes, llvm.I8)) for v in (x, w))
        made = c.b.mul(c.b.zext(left, wide), c.b.sext(right, wide))
        for first in range(4):
            each = c.shuffle(made, made, range(first, 4 * self.lanes, 4))
            total = c.b.add(total, each)
        return total


X86 = {"avx512": ("sapphirerapids", 16, 12), "avx2": ("alderlake", 8, 6)}


def as_x86(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    """Kernels of bytes as they are written for that machine."""
    _, lanes, rows = X86[machine]
    monkeypatch.setattr(dots, "dots", lambda: AsX86(lanes, rows, 2, True, 2.6))
    monkeypatch.setattr(bytes_, "by_lane", lambda: False)
