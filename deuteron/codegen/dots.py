"""The instruction that adds up four products of bytes in int32, where the machine has one.

aarch64 multiplies bytes that both have a sign, or both have none; x86-64 multiplies bytes without a
sign by bytes with one. Flipping the highest bit of a byte turns one kind into the other, and moves
it by 128: a sum then begins with the number that makes up for that, so that nothing is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import llvmlite.binding as binding

from deuteron.codegen.llvm import I8, I32, Code, Value, adds_products, vec

TOGETHER = 4  # products that are added up at a time
NARROWEST = 4  # sums in the smallest vector that x86-64 has the instruction for
HIGHEST = {I8: -0x80, I32: -0x7F7F7F80}  # the highest bit of each byte


@dataclass(frozen=True)
class Dots:
    """``lanes`` sums of int32 in a vector, ``rows`` by ``vectors`` of these in registers at a time;
    ``mixed``: factors on the left have no sign, those on the right have one."""

    lanes: int
    rows: int
    vectors: int
    mixed: bool
    faster: float  # how many times as fast as float32, with full tiles

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    def fitted(self, rows: int, columns: int) -> Dots:
        """Return the same for ``rows`` and ``columns``: with tiles that share the rows out evenly,
        so that a product of one row takes the work of one row only, and that are no wider than the
        columns."""
        lanes = self.lanes
        while self.mixed and lanes > NARROWEST and columns <= lanes // 2:
            lanes //= 2
        vectors = min(self.vectors, -(-columns // lanes))
        return replace(self, lanes=lanes, rows=-(-rows // -(-rows // self.rows)), vectors=vectors)

    def moved(self, x: str, weight: str) -> int | None:
        """Return what is added to numbers of type ``x`` on the left before they are multiplied;
        None if the machine cannot multiply them by such a weight."""
        wanted = "u8" if self.mixed else weight
        if self.mixed and weight != "i8":
            return None
        return 0 if x == wanted else 128 if wanted == "u8" else -128

    def add(self, c: Code, total: Value, x: Value, w: Value, signed: bool = True) -> Value:
        """Return ``total`` plus, in each lane, the products of four bytes of x and four of w; all
        are vectors of int32."""
        if self.mixed:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}"
            return c.outside(name, total.type, total, x, w)
        quad = vec(self.lanes * TOGETHER, I8)
        name = f"llvm.aarch64.neon.{'s' if signed else 'u'}dot.v4i32.v16i8"
        return c.outside(name, total.type, total, c.b.bitcast(w, quad), c.b.bitcast(x, quad))


@lru_cache
def dots() -> Dots | None:
    """Return what this machine has, or None."""
    if adds_products():
        return Dots(4, 4, 4, mixed=False, faster=3.8)
    have = binding.get_host_cpu_features()
    if have.get("avx512vnni") and have.get("avx512vl"):
        return Dots(16, 12, 2, mixed=True, faster=2.6)
    return Dots(8, 6, 2, mixed=True, faster=2.6) if have.get("avxvnni") else None
