"""The matrices of Winograd's algorithm, for kernels of every machine.

    Y = Aᵀ [ Σ_c (G g Gᵀ) ⊙ (Bᵀ d B) ] A      for every m × m tile of a 3 × 3 convolution

A tile takes t² products for a pair of channels, t = m + 2, where the direct sum takes 9 m². The
transforms magnify rounding, and by how much depends on the points; see ``cpu/winograd.py``.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import prod

import numpy as np

POINTS = {2: ("1", "-1"), 4: ("3/2", "-3/2", "2/3", "-2/3")}  # and 0, and infinity; in pairs

Matrix = tuple[tuple[float, ...], ...]


@lru_cache
def matrices(m: int) -> tuple[Matrix, Matrix, Matrix]:
    """Aᵀ [m, t], G [t, 3] and Bᵀ [t, t] for the points of F(m×m, 3×3), by Toom and Cook."""
    points = [Fraction(0), *map(Fraction, POINTS[m])]
    t = m + 2

    def product(roots: Sequence[Fraction]) -> list[Fraction]:
        """Coefficients of Π (x − root), lowest first, exactly."""
        out = np.poly(np.array(roots, object))[::-1]
        return [*out] + [Fraction(0)] * (t - len(out))

    others = [[q for q in points if q != p] for p in points]
    scales = [prod(p - q for q in rest) for p, rest in zip(points, others, strict=True)]
    a = [[p**i for p in points] + [Fraction(int(i == m - 1))] for i in range(m)]
    g = [[p**i / s for i in range(3)] for p, s in zip(points, scales, strict=True)]
    g.append([Fraction(0), Fraction(0), Fraction(1)])
    b = [product(roots) for roots in (*others, points)]

    def plain(rows: list[list[Fraction]]) -> Matrix:
        return tuple(tuple(float(x) for x in row) for row in rows)

    return plain(a), plain(g), plain(b)
