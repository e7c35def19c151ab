"""How batch norm is spread over a GPU. Nothing here needs Triton, so that engines can use it while
they choose a kernel.

x is seen as rows of lanes. Channels last: a row is a pixel, its lanes are the channels. Channels
first: a row is an image, its lanes are the positions of one channel. A tile is ``a`` rows of ``b``
lanes; a block is a column of tiles; the tiles of a block are dealt to ``splits`` programs.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import prod

from deuteron.codegen.triton_render import power_of_two

INT32 = 2**31
SMALL = 1 << 16  # elements per program up to which one launch is quicker than three
NARROW = 16  # channels of a program that has all rows: few, so that there are many programs
LARGE = 4096  # elements of a tile; of larger ones shared memory holds few stages
PIECES = 512  # parts that a merge takes at a time
WASTE = 1.15  # how many lanes tiles may have in all, as a factor of those that exist


@dataclass(frozen=True)
class Division:
    """How x is cut into tiles, and tiles are dealt to programs."""

    last: bool  # channels last
    rows: int
    channels: int
    lanes: int
    a: int
    b: int
    splits: int
    each: int
    warps: int
    stages: int  # of loads in the second pass
    deep: int  # of loads in the first pass, which waits for nothing but loads
    wide: bool  # offsets need 64 bits
    once: bool  # one launch does it all

    @property
    def across(self) -> int:
        """Tiles side by side over the positions of a channel."""
        return 1 if self.last else -(-self.lanes // self.b)

    @property
    def blocks(self) -> int:
        return -(-self.lanes // self.b) if self.last else self.channels * self.across

    @property
    def tiles(self) -> int:
        return -(-self.rows // self.a)

    @property
    def pieces(self) -> int:
        return self.splits * self.across

    @property
    def count(self) -> int:
        """Values per channel."""
        return self.rows if self.last else self.rows * self.lanes

    @property
    def together(self) -> int:
        """The largest power of two up to 32 that divides the lanes: so many may be one access."""
        return min(self.lanes & -self.lanes, 32)

    @property
    def units(self) -> int:
        return self.lanes // self.together

    @property
    def workspace(self) -> int:
        """The most bytes of scratch that a call needs."""
        return 0 if self.once else 4 * (2 * self.pieces * self.channels + self.pieces)


@lru_cache(maxsize=4096)
def divide(
    shape: tuple[int, ...],
    last: bool,
    units: int,
    *,
    tile: int = 4096,
    warps: int = 4,
    stages: int = 3,
    deep: int = 5,
    waves: int = 2,
    each: int = 4,
    once: bool = True,
    width: int = 256,
) -> Division:
    """Return the division of x [N, C, …] on a GPU with ``units`` multiprocessors: ``tile`` elements
    at a time, ``waves`` programs per multiprocessor in the first pass, ``each`` tiles per program
    in the second. Without ``once`` even the smallest x takes a launch for each pass. ``width`` is
    the most channels of a tile, if they come last."""
    n, channels, positions = shape[0], shape[1], prod(shape[2:])
    rows, lanes = (n * positions, channels) if last else (n, positions)
    wide = n * channels * positions >= INT32
    narrow = power_of_two(min(lanes, NARROW) if last else lanes)
    once = once and not wide and rows * narrow <= SMALL and (last or lanes <= tile)
    b = narrow if once else _width(lanes, width if last else tile)
    a = max(1, min(tile // b, power_of_two(rows)))
    deep = min(deep, 3) if tile > LARGE else deep
    blocks = -(-lanes // b) * (1 if last else channels)
    split = 1 if once else max(1, min(-(-rows // a), waves * units // blocks, PIECES))
    return Division(last, rows, channels, lanes, a, b, split, each, warps, stages, deep, wide, once)


def _width(lanes: int, most: int) -> int:
    """Return the widest tile that has few lanes beyond the end."""
    if lanes <= 64:
        return power_of_two(lanes)
    widths = [w for w in (4096, 2048, 1024, 512, 256, 128, 64) if w <= most]
    padded = {w: -(-lanes // w) * w for w in widths}
    good = [w for w in widths if padded[w] <= WASTE * lanes]
    return good[0] if good else min(widths, key=lambda w: (padded[w], -w))
