"""Kernels for the CPU, generated through :mod:`deuteron.codegen.llvm`.

This module holds the facts that engines need to choose among kernels; it imports nothing heavy.
"""

import platform
from functools import lru_cache

import torch

# Floats in a vector → tiles (rows, vectors of columns) that fill the registers, best first.
# Registers hold the tile's sums, one row of the second factor and one number of the first at the
# same time. The last tile for 16 floats, with one vector, is for products that have no more than 16
# columns, such as those of a grouped convolution.
TILES = {
    4: ((4, 4), (5, 4), (6, 3)),
    8: ((6, 2), (4, 3)),
    16: ((6, 4), (8, 3), (7, 3), (12, 2), (10, 2), (5, 5), (16, 1)),
}
# m → largest error of Winograd's F(m×m, 3×3) relative to the largest result, 8 to 512 channels
WINOGRAD_ERROR = {2: 1e-6, 4: 5e-6}
WOVEN = 4  # a change of layout interleaves up to this many channels in registers
# The same for sums of outer products. On aarch64 the rows of a tile are lanes of whole vectors.
# Elsewhere the broadcast numbers of all rows are in registers as well, so that many rows by several
# vectors do not fit.
OUTER_TILES = TILES | {4: ((4, 4), (8, 2)), 16: ((6, 4), (4, 4), (8, 2), (8, 1))}
ONE_ROW = (1, 4)  # tile for a product with a single row, which does little but read its weight


def tiles_allowed(limit: float | None) -> list[int]:
    """Return the sizes m of Winograd's tiles whose error stays within ``limit``; all if it is
    None."""
    return [m for m, error in WINOGRAD_ERROR.items() if limit is None or error <= limit]


@lru_cache
def lanes() -> int:
    """Return how many floats a vector register of this machine holds, according to torch."""
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)


@lru_cache
def converts_half() -> bool:
    """Whether the machine converts between float16 and float32. Every aarch64 does, and every
    x86-64 that has AVX2, since F16C is older."""
    return platform.machine().lower() not in ("x86_64", "amd64") or lanes() > 4


def shared(down: int, across: int, team: int, columns: int) -> int:
    """Return how many tiles, of ``down`` times ``across``, the thread with the most tiles gets, if
    ``columns`` threads of the team split the columns and ``team // columns`` split the rows."""
    return -(-down // (team // columns)) * -(-across // columns)


def teams(down: int, across: int, team: int) -> list[int]:
    """Return all numbers of threads that may split the columns, best first: first the most even
    split, and among equally even ones the one where threads read the least."""

    def key(columns: int) -> tuple[int, int]:
        read = team // columns * across + columns * down
        return shared(down, across, team, columns), read

    return sorted(range(1, team + 1), key=key)
