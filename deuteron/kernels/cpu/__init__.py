"""Kernels for the CPU, generated through :mod:`deuteron.codegen.llvm`.

What an engine must know to decide stands here, where nothing heavy is imported.
"""

import platform
from functools import lru_cache

import torch

# floats in a vector → tiles (rows, vectors of columns) that fill the registers, best first: sums, a
# row of the second factor and a number of the first are there at once. One vector of 16 is for what
# has no more columns, such as groups of a convolution
TILES = {
    4: ((4, 4), (5, 4), (6, 3)),
    8: ((6, 2), (4, 3)),
    16: ((6, 4), (8, 3), (7, 3), (12, 2), (10, 2), (5, 5), (16, 1)),
}
# largest error of Winograd's F(m×m, 3×3) relative to the largest result, 8 to 512 channels
WINOGRAD_ERROR = {2: 1e-6, 4: 5e-6}
WOVEN = 4  # channels up to this are woven together where a layout changes
# the same for sums of outer products: rows of a tile are lanes of whole vectors on aarch64; many
# rows by several vectors do not fit in registers elsewhere, as numbers of all rows are held as well
OUTER_TILES = TILES | {4: ((4, 4), (8, 2)), 16: ((6, 4), (4, 4), (8, 2), (8, 1))}
ONE_ROW = (1, 4)  # for a product with a single row, which only reads its weight


def tiles_allowed(limit: float | None) -> list[int]:
    """Sizes of tiles of Winograd's algorithm whose error is held under a limit."""
    return [m for m, error in WINOGRAD_ERROR.items() if limit is None or error <= limit]


@lru_cache
def lanes() -> int:
    """Floats in a vector of this machine, as far as torch knows."""
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 4)


@lru_cache
def converts_half() -> bool:
    """Whether the machine converts between float16 and float32: every aarch64, and x86-64 that
    has AVX2, since F16C is older."""
    return platform.machine().lower() not in ("x86_64", "amd64") or lanes() > 4


def shared(down: int, across: int, team: int, columns: int) -> int:
    """Of tiles, ``down`` times ``across``, how many the thread has that has the most, where so many
    threads of a team share columns and the others have other rows."""
    return -(-down // (team // columns)) * -(-across // columns)


def teams(down: int, across: int, team: int) -> list[int]:
    """How many threads may share columns: the evenest way first, and of equals that by which
    threads read the least."""

    def key(columns: int) -> tuple[int, int]:
        read = team // columns * across + columns * down
        return shared(down, across, team, columns), read

    return sorted(range(1, team + 1), key=key)
